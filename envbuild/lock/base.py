"""Locks of a target's base image and of its builder image, in which the source layers are built.

Both hold Debian packages or the digest of an existing image. The builder's (`<target>.build.toml` beside the image
lock) are the image's packages and compilers, or `build_base`, an existing image with compilers.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from envbuild.base.errors import BuildError, LockError, UsageError
from envbuild.base.packages import json_digest
from envbuild.base.progress import Log, log, transfer
from envbuild.base.workers import each
from envbuild.debian.base import fetch_debs, resolve_base, signed_lists
from envbuild.debian.lock import (
    DEBIAN_ARCH,
    DebianLock,
    default_packages,
    default_without,
    newest_suite,
    suites_by_python,
)
from envbuild.debian.release import DebianSuite, archives, debian_client
from envbuild.environment import Environment
from envbuild.image.archive import read_archive, read_daemon
from envbuild.image.layout import Pulled, read_layout
from envbuild.image.limits import Quota
from envbuild.image.model import MAX_MANIFEST, Descriptor, ImageManifest, check_image, parse, parse_config
from envbuild.lock.image import ImageLock, OciLock, image_changes, image_lock_name, read_image, render_image
from envbuild.lock.lifecycle import LockKind, Resolved, Upgrade, write_lock_file
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.model import Recipe
from envbuild.recipe.sources import SourceLayer
from envbuild.recipe.targets import Target
from envbuild.store.client import SourceAnswer, from_vault

_WORKERS = 4
# Packages that nearly every build needs in addition to those of the image.
_COMPILERS = ("bzip2", "file", "g++", "gcc", "libc6-dev", "make", "patch", "pkgconf", "xz-utils")


def image_lock(recipe: LoadedRecipe, target: Target) -> LockKind[ImageLock]:
    """Return the LockKind of the base of the target's images."""
    digest, file = recipe.image_digest(target), image_lock_name(target.name)
    return _base_lock("image", recipe, target, recipe.recipe, recipe.recipe.image.base, file, digest)


def has_base(recipe: Recipe) -> bool:
    """Return whether images of a recipe have a base: an existing image, or a Debian release with its Python."""
    image, conda = recipe.image, recipe.environment == "conda"
    return conda or image.base != "debian" or bool(image.suite) or recipe.python in suites_by_python()


def builder_lock(recipe: LoadedRecipe, target: Target, sources: Sequence[SourceLayer]) -> LockKind[ImageLock]:
    """Return the LockKind of the builder image for `sources`. Raises UsageError if the recipe has no builder image."""
    image = recipe.recipe.image
    debian = image.base == "debian"
    if not debian and not image.build_base:
        raise UsageError(
            f"{recipe.where('image')}: [image] builds on {image.base}, which may lack compilers, "
            f"and no image is set to build {', '.join(layer.name for layer in sources)}",
            "name an image of the same distribution with compilers as `build_base` in [image]",
        )
    python = any(layer.system == "wheel" for layer in sources) and recipe.recipe.environment != "conda"
    headers = [f"libpython{recipe.recipe.python}-dev"] if python else []  # conda's Python has its own
    packages = {*image.build_packages, *(package for layer in sources for package in layer.packages)}
    added = sorted({*_COMPILERS, *headers, *packages})
    content = ["builder", recipe.image_digest(target), added if debian else image.build_base]
    all_packages = tuple(dict.fromkeys((*image.packages, *added)))
    own = dataclasses.replace(recipe.recipe, image=dataclasses.replace(image, packages=all_packages))
    digest, file = json_digest(content), f"{target.name}.build.toml"
    return _base_lock("builder", recipe, target, own, "debian" if debian else image.build_base, file, digest)


def _base_lock(
    name: str, loaded: LoadedRecipe, target: Target, recipe: Recipe, reference: str, file: str, digest: str
) -> LockKind[ImageLock]:
    """Return the LockKind of the base `reference`: "debian" (the recipe's packages) or an existing image."""

    def resolved(
        environment: Environment, old: ImageLock | None, _upgrade: Upgrade, _offline: bool, _: Log
    ) -> Resolved[ImageLock]:
        base: DebianLock | OciLock
        if reference == "debian":
            base = _resolve_debian(recipe, target, environment, old.base if old else None)
            summary = f"{len(base.packages)} Debian packages of {base.suite}"
        else:
            base = OciLock(reference, _resolve_digest(reference, target, environment, loaded.folder))
            summary = f"{reference} is {base.digest}"
        return Resolved(ImageLock(recipe.name, target.name, digest, base), summary)

    return LockKind(
        loaded,
        target,
        name,
        file,
        digest,
        read=read_image,
        resolve=resolved,
        changes=image_changes,
        write=lambda path, lock: write_lock_file(path, render_image(lock)),
    )


def _resolve_debian(
    recipe: Recipe, target: Target, environment: Environment, old: DebianLock | OciLock | None
) -> DebianLock:
    """Resolve the Debian packages of `recipe`, without Debian's Python if it has conda packages. Raises LockError."""
    known, conda = suites_by_python(), recipe.environment == "conda"
    suite = recipe.image.suite or known.get(recipe.python, newest_suite() if conda else "")
    if not suite:
        has = ", ".join(f"{python} ({name})" for python, name in known.items())
        raise LockError(
            f"no known Debian release has Python {recipe.python}; known are {has}",
            "choose one of these as `python`, or build on an existing image (`base` in [image])",
        )
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    keyring = environment.site.debian.keyring
    return resolve_base(
        suite,
        [*default_packages(suite, python=not conda), *recipe.image.packages],
        default_without(),
        target.arch,
        archives=site_archives(suite, now, environment),
        client=debian_client(environment.pip, environment.variables),
        store=environment.store,
        keyring=Path(keyring) if keyring else None,
        allow_expired=environment.allow_expired,
        old=old if isinstance(old, DebianLock) else None,
    )


def site_archives(suite: str, date: str, environment: Environment) -> list[DebianSuite]:
    """Return this site's sources for the packages of `suite`, in order; snapshots of `date` come last."""
    site = environment.site.debian
    return archives(suite, date, mirror=site.mirror or None, security_mirror=site.security_mirror or None)


def _resolve_digest(base: str, target: Target, environment: Environment, folder: Path) -> str:
    """Return the manifest digest of `base` for the target's architecture. Raises LockError."""
    try:
        if (pulled := _local(base, target.arch, environment, folder)) is not None:
            return pulled.manifest.digest
        registry = environment.registry(base)
        manifest = registry.image(target.arch)
        # Without an index, only the image's configuration names its architecture.
        blobs = environment.store.blobs
        registry.fetch_blob(manifest.config, blobs, lambda _: None)
        config = parse_config(blobs.read(manifest.config.digest), base)
        check_image(manifest.layers, config, target.arch, base)
        return manifest.digest
    except BuildError as error:
        raise LockError(error.message, error.hint) from error


def fetch_locked(lock: DebianLock, environment: Environment, *, offline: bool) -> list[Path]:
    """Return the files of the packages in `lock`, downloaded if needed. Raises BuildError for an unavailable one."""
    places = [] if offline else site_archives(lock.suite, lock.date, environment)
    return fetch_debs(lock, environment.store, places, debian_client(environment.pip, environment.variables))


def base_blobs(lock: ImageLock, folder: Path, environment: Environment, *, offline: bool) -> list[str]:
    """Return the digests of all files of a base, fetched into the store's blobs. Raises BuildError."""
    if isinstance(lock.base, DebianLock):
        fetch_locked(lock.base, environment, offline=offline)
        arch = DEBIAN_ARCH[Target.parse(lock.target).arch]
        places = [] if offline else site_archives(lock.base.suite, lock.base.date, environment)
        client = debian_client(environment.pip, environment.variables)
        lists = signed_lists(lock.base, arch, environment.store, places, client)
        return [*(deb.digest for deb in lock.base.packages), *lists]
    manifest = pull(lock.base.reference, lock.base.digest, Target.parse(lock.target).arch, environment, folder).manifest
    return [manifest.digest, manifest.config.digest, *(layer.digest for layer in manifest.layers)]


def pull(base: str, digest: str | None, arch: str, environment: Environment, folder: Path) -> Pulled:
    """Fetch the image `base` for `arch` (x86_64, aarch64), locked or current, into the store, and return it.

    `base` is an image name in a registry, oci:DIR[:TAG], docker-archive:FILE or docker-daemon:NAME; relative paths are
    relative to `folder`. Raises BuildError when the image does not exist, is for another architecture, or differs from
    the locked `digest`.
    """
    blobs = environment.store.blobs
    if digest is not None and blobs.path(digest).is_file():
        known = parse(blobs.read(digest), digest)
        if isinstance(known, ImageManifest) and all(map(blobs.has, (known.config, *known.layers))):
            return Pulled(known, parse_config(blobs.read(known.config.digest), digest), blobs)
    if digest is not None and (known_manifest := _from_vault(digest, environment)) is not None:
        return Pulled(known_manifest, parse_config(blobs.read(known_manifest.config.digest), digest), blobs)
    if (pulled := _local(base, arch, environment, folder)) is not None:
        if digest not in (None, pulled.manifest.digest):
            raise BuildError(
                f"{base} is {pulled.manifest.digest}, but the lock names {digest}",
                "lock the recipe again, or restore the locked image",
            )
        return pulled
    registry = environment.registry(base)
    manifest = registry.image(arch, digest)
    descriptors = [manifest.config, *manifest.layers]
    Quota(environment.site.limits).content(base, sum(blob.size for blob in descriptors))
    if not all(map(blobs.has, descriptors)):
        with transfer(f"pulling {base}", sum(blob.size for blob in descriptors)) as on_progress:
            registry.fetch_blobs(descriptors, blobs, on_progress)
    config = parse_config(blobs.read(manifest.config.digest), base)
    check_image(manifest.layers, config, arch, base)
    blobs.add(manifest.raw)  # last: a manifest in the store means that its blobs are complete
    return Pulled(manifest, config, blobs)


def _from_vault(digest: str, environment: Environment) -> ImageManifest | None:
    """Return the manifest of an image after the vault brought it and all its blobs into the store; None otherwise."""
    store = environment.store

    def bring(blob: Descriptor, stop: threading.Event) -> bool:
        answers: list[SourceAnswer] = []
        sha256 = blob.digest.partition(":")[2]
        brought = store.blobs.has(blob) or from_vault({sha256}, store, answers, size=blob.size, stop=stop) is not None
        for answer in answers:
            log(f"{answer.source}: {blob.digest}: {answer.reason}")
        return brought

    if store.vault is None or not bring(Descriptor("", digest, MAX_MANIFEST), threading.Event()):
        return None
    manifest = parse(store.blobs.read(digest), digest)
    if not isinstance(manifest, ImageManifest):
        return None
    blobs = [manifest.config, *manifest.layers]
    Quota(environment.site.limits).content(digest, sum(blob.size for blob in blobs))
    return manifest if all(each(blobs, bring, _WORKERS)) else None


def _local(base: str, arch: str, environment: Environment, folder: Path) -> Pulled | None:
    """Return the image in a daemon, layout or archive, or None when `base` is in a registry."""
    kind, _, rest = base.partition(":")
    blobs = environment.store.blobs
    with environment.store.writing():
        if kind == "docker-daemon":
            from envbuild.image.daemon import connect

            with connect(environment.variables) as client:
                pulled = read_daemon(rest, blobs, client, arch)
        elif kind == "oci":
            path, _, tag = rest.partition(":")
            pulled = read_layout(folder / path, blobs, tag or None, arch)
        elif kind == "docker-archive":
            pulled = read_archive(folder / rest, blobs, None, arch)
        else:
            return None
        blobs.add(pulled.manifest.raw)
    return pulled
