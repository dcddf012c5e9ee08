"""The builder image, in which source layers of images are compiled: builders/<digest>.sqsh in the store.

The digest covers its lock and the version of the rules for unpacking packages.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from functools import partial
from pathlib import Path

from envbuild.base.atomic import file_lock
from envbuild.base.host import check_disk_space
from envbuild.base.progress import log, transfer
from envbuild.build.squash_files import composed, write_sqsh
from envbuild.cache.hashed import read_note, write_note
from envbuild.contract.state import FIXED_TIME
from envbuild.debian.lock import rules_digest
from envbuild.environment import Environment
from envbuild.image.model import GOARCH
from envbuild.image.squashfs.model import codec_of
from envbuild.layers.base import image_layers, locked_files
from envbuild.layers.layer_cache import LayerRequest
from envbuild.layers.segment_cache import segment_cache
from envbuild.lock.base import pull
from envbuild.lock.image import ImageLock, OciLock
from envbuild.recipe.targets import Target
from envbuild.store.entry import CacheEntry, key_of, shared
from envbuild.store.store import Store

# Increase it when builder images change although their locks do not.
_FORMAT = 1
# The fastest compression: builds of layers wait for the image.
_CODEC = "zstd:1"
_ENV = ("PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8")


def builder_file(lock: ImageLock, folder: Path, environment: Environment, *, offline: bool) -> Path:
    """Return the .sqsh of the builder image of `lock`; write it if it is missing. `folder` is the recipe's folder.

    Raises BuildError when a package is not available, and when the store is not writable.
    """
    key = hashlib.sha256(f"{_FORMAT} {lock.digest} {rules_digest()}".encode()).hexdigest()
    store = environment.store
    path = store.folder("builders") / f"{key}.sqsh"
    if _is_intact(path, store):
        return path

    def make() -> bool:
        log(f"preparing the builder image of {lock.target}: {_title(lock)}")
        _write_builder(lock, folder, path, environment, offline)
        return True

    with store.writing(), file_lock(path.with_suffix(".lock"), remove=True):
        # Another process may have written it meanwhile.
        shared(CacheEntry("builder", key), store.remote, lambda: _is_intact(path, store) or None, make)
    return path


def _is_intact(path: Path, store: Store) -> bool:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return store.digests.keep(path, read_note(path.with_suffix(".json"))["sha256"])
    return False


def _title(lock: ImageLock) -> str:
    if isinstance(lock.base, OciLock):
        return lock.base.reference
    return f"Debian {lock.base.suite} with compilers, {len(lock.base.packages)} packages"


def _write_builder(lock: ImageLock, folder: Path, path: Path, environment: Environment, offline: bool) -> None:
    segments = segment_cache(environment, codec_of(_CODEC))
    base, arch, env = lock.base, Target.parse(lock.target).arch, list(_ENV)
    if isinstance(base, OciLock):
        pulled = pull(base.reference, base.digest, arch, environment, folder)
        env = list((pulled.config.get("config") or {}).get("Env") or _ENV)
        layers = image_layers(pulled, base.reference, segments)
    else:
        key = ["builder", FIXED_TIME, rules_digest()]
        key += [f"{deb.name} {deb.version} {deb.arch} {deb.sha256}" for deb in base.packages]
        tree = partial(locked_files, base, FIXED_TIME, environment, offline=offline)
        layers = (segments.part(LayerRequest(_title(lock), key_of("debian", key), tree)),)
    config = {"architecture": GOARCH[arch], "os": "linux", "config": {"Env": env}}
    origin = f"envbuild:builder:{lock.target}@{lock.digest}"
    root_of = composed(layers, segments, config, provenance=origin, definition="", arch=arch, mtime=FIXED_TIME)
    with environment.store.working("builders", "new") as made:
        new = made / path.name
        with new.open("x+b") as out, root_of as root:
            check_disk_space(made, root.size)
            with transfer("writing the builder", None) as on_progress:
                write_sqsh(root, out, on_progress)
        new.chmod(0o644)
        os.replace(new, path)
    write_note(path.with_suffix(".json"), {"sha256": environment.store.digests.of(path)})
