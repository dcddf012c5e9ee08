"""The locks of the base of a target's images, and of the image in which the target's source layers are built.

Both have the same format: Debian packages, or the digest of an existing image. The builder's file is
`<target>.build.toml` beside the image lock. It holds the image's Debian packages and compilers, or the digest of
`build_base`, an existing image with compilers.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from envbuild.debian.base import resolve_base
from envbuild.debian.defaults import default_packages, default_without, newest_suite, suites_by_python
from envbuild.debian.lock import DebianLock
from envbuild.debian.sources import DebianSuite, archives, debian_client
from envbuild.environment import Environment
from envbuild.errors import LockError, UsageError
from envbuild.image.model import digest_of
from envbuild.lock.base_oci import resolve_digest
from envbuild.lock.image import ImageLock, OciLock, image_changes, image_lock_name, read_image, render_image
from envbuild.lock.lifecycle import LockKind, Log, Resolved, Upgrade, write_lock_file
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.model import Recipe
from envbuild.recipe.sources import SourceLayer
from envbuild.recipe.targets import Target

# Packages that nearly every build needs in addition to those of the image.
_COMPILERS = ("bzip2", "file", "g++", "gcc", "libc6-dev", "make", "patch", "pkgconf", "xz-utils")


def image_lock(recipe: LoadedRecipe, target: Target) -> LockKind[ImageLock]:
    """Return the kind of lock that holds the base of the target's images."""
    return _base_lock(
        recipe, target, recipe.recipe, recipe.recipe.image.base, image_lock_name(target.name),
        recipe.image_digest(target), name="image", title="image lock", subject="the recipe's base",
    )  # fmt: skip


def builder_lock(recipe: LoadedRecipe, target: Target, sources: Sequence[SourceLayer]) -> LockKind[ImageLock]:
    """Return the kind of lock that holds the image in which `sources` are built.

    Raises UsageError when no image is configured in which they can be built.
    """
    image = recipe.recipe.image
    debian = image.base == "debian"
    if not debian and not image.build_base:
        raise UsageError(
            f"{recipe.where('image')}: [image] builds on {image.base}, which need not have compilers: "
            f"nothing says in which image to build {', '.join(layer.name for layer in sources)}",
            "name an image of the same distribution with compilers as `build_base` in [image]",
        )
    added = sorted({*_COMPILERS, *image.build_packages, *(package for layer in sources for package in layer.packages)})
    content = ["builder", recipe.image_digest(target), added if debian else image.build_base]
    packages = tuple(dict.fromkeys((*image.packages, *added)))
    own = dataclasses.replace(recipe.recipe, image=dataclasses.replace(image, packages=packages))
    return _base_lock(
        recipe, target, own, "debian" if debian else image.build_base,
        f"{target.name}.build.toml", digest_of(json.dumps(content).encode()),
        name="builder", title="lock of the builder", subject="what the layers need to be built",
    )  # fmt: skip


def _base_lock(
    loaded: LoadedRecipe,
    target: Target,
    recipe: Recipe,
    reference: str,
    file: str,
    digest: str,
    *,
    name: str,
    title: str,
    subject: str,
) -> LockKind[ImageLock]:
    """Return the kind of lock that holds the base `reference`; the other arguments are those of LockKind.

    `reference` is "debian", for the Debian packages of `recipe`, or names an existing image; paths are relative to
    the folder of `loaded`.
    """

    def resolved(
        environment: Environment, _old: ImageLock | None, _upgrade: Upgrade, _offline: bool, _: Log
    ) -> Resolved[ImageLock]:
        base: DebianLock | OciLock
        if reference == "debian":
            base = _resolve_debian(recipe, target, environment)
            summary = f"{len(base.packages)} Debian packages of {base.suite}"
        else:
            base = OciLock(reference, resolve_digest(reference, target, environment, loaded.folder))
            summary = f"{reference} is {base.digest}"
        return Resolved(ImageLock(recipe.name, target.name, digest, base), summary)

    return LockKind(
        loaded, target, part="image", name=name, title=title, subject=subject,
        task=f"resolving the {'base' if name == 'image' else name} of {target.name}", file=file, digest=digest,
        read=read_image, resolve=resolved, changes=image_changes,
        write=lambda path, lock: write_lock_file(path, render_image(lock)),
    )  # fmt: skip


def _resolve_debian(recipe: Recipe, target: Target, environment: Environment) -> DebianLock:
    """Resolve the Debian packages of `recipe` for `target`. Raises LockError.

    With conda packages, Debian's Python is left out; if no suite has the recipe's Python, the newest suite is used.
    """
    known, conda = suites_by_python(), recipe.environment == "conda"
    suite = recipe.image.suite or known.get(recipe.python, newest_suite() if conda else "")
    if not suite:
        has = ", ".join(f"{python} ({name})" for python, name in known.items())
        raise LockError(
            f"no Debian release with Python {recipe.python} is known; known are {has}",
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
        blobs=environment.store.blobs,
        keyring=Path(keyring) if keyring else None,
    )


def site_archives(suite: str, date: str, environment: Environment) -> list[DebianSuite]:
    """Return this site's sources for the packages of `suite`, in order; snapshots of `date` come last."""
    site = environment.site.debian
    return archives(suite, date, mirror=site.mirror or None, security_mirror=site.security_mirror or None)
