"""The builder image, in which source layers of images are compiled: a squashfs in the store, one for each lock.

builders/<digest>.sqsh     the digest of the lock and of the rules by which packages become a tree
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from envbuild import resources
from envbuild.artifacts.squash import composed, write_sqsh
from envbuild.debian.defaults import rules_digest
from envbuild.disk_space import check_disk_space
from envbuild.environment import Environment
from envbuild.file_lock import file_lock
from envbuild.image.entry import Tree
from envbuild.image.model import GOARCH
from envbuild.image.squashfs.codec import codec_of
from envbuild.layers.base import image_layers, locked_files
from envbuild.layers.compose import FIXED_TIME, LayerRequest, key_of
from envbuild.layers.segments import CachedSegment, SegmentCache
from envbuild.lock.base_oci import pull
from envbuild.lock.image import ImageLock, OciLock
from envbuild.progress import Log, transfer
from envbuild.recipe.targets import Target

# Increase it when builder images change although their locks do not.
FORMAT = 1
# The image is written once and read often, by anything that can mount it.
_CODEC = "zstd:1"
_ENV = ("PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8")


def builder_file(lock: ImageLock, folder: Path, environment: Environment, log: Log, *, offline: bool) -> Path:
    """Return the .sqsh of the builder image that `lock` describes; it is written if missing. `folder` is the recipe's.

    Raises BuildError when no source has a part of it, and when the store is not writable.
    """
    key = hashlib.sha256(f"{FORMAT} {lock.digest} {rules_digest()}".encode()).hexdigest()
    place = environment.store.folder("builders") / f"{key}.sqsh"
    if place.is_file():
        return place
    try:
        with file_lock(place.with_suffix(".lock"), remove=True):
            if not place.is_file():  # another process may have written it meanwhile
                log(f"the builder of {lock.target} is made: {_title(lock)}")
                _write(lock, folder, place, environment, log, offline)
    except OSError as error:
        raise environment.store.unwritable(error) from error
    return place


def _title(lock: ImageLock) -> str:
    if isinstance(lock.base, OciLock):
        return lock.base.reference
    return f"Debian {lock.base.suite} with compilers, {len(lock.base.packages)} packages"


def _write(lock: ImageLock, folder: Path, place: Path, environment: Environment, log: Log, offline: bool) -> None:
    codec, workers = codec_of(_CODEC), resources.workers(environment.variables)
    maker = SegmentCache(environment.store, codec, workers, log)
    arch = Target.parse(lock.target).arch
    layers, env = _layers(lock, folder, environment, maker, offline)
    with environment.store.working("builders", "new") as made:
        path = made / place.name
        with (
            path.open("x+b") as out,
            composed(
                layers,
                {"architecture": GOARCH[arch], "os": "linux", "config": {"Env": env}},
                provenance=f"envbuild:builder:{lock.target}@{lock.digest}",
                definition="",
                arch=arch,
                codec=codec,
                mtime=FIXED_TIME,
                workers=workers,
                folder=environment.store.folder("segments"),
            ) as root,
        ):
            check_disk_space(made, root.size)
            with transfer("writing the builder", None) as on_progress:
                write_sqsh(root, out, on_progress)
        path.chmod(0o644)
        os.replace(path, place)


def _layers(
    lock: ImageLock, folder: Path, environment: Environment, maker: SegmentCache, offline: bool
) -> tuple[list[CachedSegment], list[str]]:
    """Return the layers of the builder image, and its variables."""
    base = lock.base
    if isinstance(base, OciLock):
        arch = Target.parse(lock.target).arch
        pulled = pull(base.reference, base.digest, arch, environment, folder)
        config = pulled.config.get("config") or {}
        return list(image_layers(pulled, base.reference, maker)), list(config.get("Env") or _ENV)

    def tree() -> Tree:
        return locked_files(base, FIXED_TIME, environment, offline=offline)

    key = ["builder", FIXED_TIME, rules_digest()]
    key += [f"{deb.name} {deb.version} {deb.arch} {deb.sha256}" for deb in base.packages]
    return [maker.part(LayerRequest(_title(lock), key_of("debian", key), tree))], list(_ENV)
