"""Existing image as the base of an image: its digest for a target, and its blobs."""

from __future__ import annotations

from pathlib import Path

from envbuild.cache.transport import transport_of
from envbuild.environment import Environment
from envbuild.errors import BuildError, LockError
from envbuild.image.archive import read_archive, read_daemon
from envbuild.image.blobs import Blobs, Pulled
from envbuild.image.layout import read_layout
from envbuild.image.model import ImageIndex, ImageManifest, check_image, choose, parse, parse_config
from envbuild.image.reference import parse_reference
from envbuild.image.registry import Registry, open_registry
from envbuild.progress import transfer
from envbuild.recipe.targets import Target

_LOCAL = ("oci", "docker-archive", "docker-daemon")


def resolve_digest(base: str, target: Target, environment: Environment, folder: Path) -> str:
    """Return the digest of the manifest that `base` has for `target`'s architecture.

    Relative paths are relative to `folder`. Raises LockError.
    """
    try:
        if _kind(base) in _LOCAL:
            return _local(base, target.arch, environment, folder).manifest.digest
        registry = registry_of(base, environment)
        manifest = _manifest(registry, None, target.arch)
        # Without an index, only the image's configuration names its architecture.
        blobs = environment.store.blobs
        registry.fetch_blob(manifest.config, blobs, lambda _: None)
        config = parse_config(blobs.read(manifest.config.digest), base)
        check_image(manifest.layers, config, target.arch, base)
        return manifest.digest
    except BuildError as error:
        raise LockError(error.message, error.hint) from error


def pull(base: str, digest: str, arch: str, environment: Environment, folder: Path) -> Pulled:
    """Return the image `base` as locked, with its blobs in the store.

    Raises BuildError when the image no longer exists or has another digest.
    """
    blobs = environment.store.blobs
    if (known := _stored(digest, blobs)) is not None:
        return known
    if _kind(base) in _LOCAL:
        pulled = _local(base, arch, environment, folder)
        if pulled.manifest.digest != digest:
            raise BuildError(
                f"{base} is {pulled.manifest.digest}, locked is {digest}",
                "lock the recipe again, or bring the image back that was locked",
            )
        return pulled
    return _fetch(registry_of(base, environment), base, digest, arch, environment)


def fetch_image(source: str, arch: str, environment: Environment, folder: Path) -> Pulled:
    """Return the image that `source` names now, for `arch` (x86_64, aarch64), with its blobs in the store.

    `source` is an image name in a registry, oci:DIR[:TAG], docker-archive:FILE or docker-daemon:NAME; relative
    paths are relative to `folder`. Raises BuildError when the image does not exist or is for another architecture.
    """
    if _kind(source) in _LOCAL:
        return _local(source, arch, environment, folder)
    return _fetch(registry_of(source, environment), source, None, arch, environment)


def registry_of(image: str, environment: Environment) -> Registry:
    """Return the registry of `image`, with this site's mirrors, proxies and certificates."""
    site = environment.site
    reference = parse_reference(image)
    insecure = frozenset(host for host, table in site.registries if table.insecure)
    transport = transport_of(environment.pip, environment.variables, insecure)
    mirrors = site.registry(reference.registry).mirrors
    return open_registry(reference, transport, environment.variables, mirrors)


def _fetch(registry: Registry, name: str, digest: str | None, arch: str, environment: Environment) -> Pulled:
    blobs = environment.store.blobs
    manifest = _manifest(registry, digest, arch)
    wanted = [manifest.config, *manifest.layers]
    if not all(blobs.has(blob) for blob in wanted):
        with transfer(f"pulling {name}", sum(blob.size for blob in wanted)) as on_progress:
            registry.fetch_blobs(wanted, blobs, on_progress)
    config = parse_config(blobs.read(manifest.config.digest), name)
    check_image(manifest.layers, config, arch, name)
    blobs.add(manifest.raw)  # last: a manifest in the store means that its blobs are complete
    return Pulled(manifest, config, blobs)


def _manifest(registry: Registry, digest: str | None, arch: str) -> ImageManifest:
    raw, media_type = registry.manifest(digest)
    where = str(registry.reference)
    found = parse(raw, where, media_type)
    if isinstance(found, ImageIndex):
        chosen = choose(found, arch, where)
        raw, media_type = registry.manifest(chosen.digest)
        found = parse(raw, where, media_type)
    if not isinstance(found, ImageManifest):
        raise BuildError(f"{where}: an index inside of an index")
    return found


def _local(base: str, arch: str, environment: Environment, folder: Path) -> Pulled:
    kind, _, rest = base.partition(":")
    blobs = environment.store.blobs
    try:
        if kind == "docker-daemon":
            from envbuild.image.daemon import connect

            with connect(environment.variables) as client:
                pulled = read_daemon(rest, blobs, client, arch)
        elif kind == "oci":
            path, _, tag = rest.partition(":")
            pulled = read_layout(folder / path, blobs, tag or None, arch)
        else:
            pulled = read_archive(folder / rest, blobs, None, arch)
        blobs.add(pulled.manifest.raw)
    except OSError as error:
        raise environment.store.unwritable(error) from error
    return pulled


def _stored(digest: str, blobs: Blobs) -> Pulled | None:
    if not blobs.path(digest).is_file():
        return None
    manifest = parse(blobs.read(digest), digest)
    if not isinstance(manifest, ImageManifest):
        return None
    if not all(blobs.has(blob) for blob in (manifest.config, *manifest.layers)):
        return None
    return Pulled(manifest, parse_config(blobs.read(manifest.config.digest), digest), blobs)


def _kind(base: str) -> str:
    return base.partition(":")[0]
