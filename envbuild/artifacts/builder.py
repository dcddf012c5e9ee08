"""The builder image, in which source layers of images are compiled: a squashfs in the store, one for each lock.

builders/<digest>.sqsh     the digest of the lock and of the rules by which packages become a tree
"""

from __future__ import annotations

import hashlib
import os
from functools import partial
from pathlib import Path

from envbuild import resources
from envbuild.artifacts.squash import composed, write_sqsh
from envbuild.debian.defaults import rules_digest
from envbuild.disk_space import check_disk_space
from envbuild.environment import Environment
from envbuild.file_lock import file_lock
from envbuild.image.model import GOARCH
from envbuild.image.squashfs.codec import codec_of
from envbuild.layers.base import image_layers, locked_files
from envbuild.layers.compose import FIXED_TIME, LayerRequest, key_of
from envbuild.layers.segments import SegmentCache
from envbuild.lock.base_oci import pull
from envbuild.lock.image import ImageLock, OciLock
from envbuild.progress import log, transfer
from envbuild.recipe.targets import Target

# Increase it when builder images change although their locks do not.
FORMAT = 1
# The image is written once and read often, by anything that can mount it.
_CODEC = "zstd:1"
_ENV = ("PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8")


def builder_file(lock: ImageLock, folder: Path, environment: Environment, *, offline: bool) -> Path:
    """Return the .sqsh of the builder image that `lock` describes; it is written if missing. `folder` is the recipe's.

    Raises BuildError when no source has a part of it, and when the store is not writable.
    """
    key = hashlib.sha256(f"{FORMAT} {lock.digest} {rules_digest()}".encode()).hexdigest()
    path = environment.store.folder("builders") / f"{key}.sqsh"
    if path.is_file():
        return path
    try:
        with file_lock(path.with_suffix(".lock"), remove=True):
            if not path.is_file():  # another process may have written it meanwhile
                log(f"the builder of {lock.target} is made: {_title(lock)}")
                _write(lock, folder, path, environment, offline)
    except OSError as error:
        raise environment.store.unwritable(error) from error
    return path


def _title(lock: ImageLock) -> str:
    if isinstance(lock.base, OciLock):
        return lock.base.reference
    return f"Debian {lock.base.suite} with compilers, {len(lock.base.packages)} packages"


def _write(lock: ImageLock, folder: Path, path: Path, environment: Environment, offline: bool) -> None:
    maker = SegmentCache(environment.store, codec_of(_CODEC), resources.workers(environment.variables), log)
    base, arch, env = lock.base, Target.parse(lock.target).arch, list(_ENV)
    if isinstance(base, OciLock):
        pulled = pull(base.reference, base.digest, arch, environment, folder)
        env = list((pulled.config.get("config") or {}).get("Env") or _ENV)
        layers = image_layers(pulled, base.reference, maker)
    else:
        key = ["builder", FIXED_TIME, rules_digest()]
        key += [f"{deb.name} {deb.version} {deb.arch} {deb.sha256}" for deb in base.packages]
        tree = partial(locked_files, base, FIXED_TIME, environment, offline=offline)
        layers = (maker.part(LayerRequest(_title(lock), key_of("debian", key), tree)),)
    config = {"architecture": GOARCH[arch], "os": "linux", "config": {"Env": env}}
    origin = f"envbuild:builder:{lock.target}@{lock.digest}"
    root_of = composed(layers, maker, config, provenance=origin, definition="", arch=arch, mtime=FIXED_TIME)
    with environment.store.working("builders", "new") as made:
        new = made / path.name
        with new.open("x+b") as out, root_of as root:
            check_disk_space(made, root.size)
            with transfer("writing the builder", None) as on_progress:
                write_sqsh(root, out, on_progress)
        new.chmod(0o644)
        os.replace(new, path)
