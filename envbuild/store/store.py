"""Content-addressed store in one folder, shared by all recipes and safe for concurrent processes.

wheels/<sha256>/<file name>    published wheels
trainer/<sha256>/<file name>   the bundled trainer as a wheel
conda/archives/<sha256>/<file name>   published conda packages
conda/pkgs/ conda/stamps/      unpacked conda packages, to link from, and their state when unpacked
conda/images/                  records of the conda packages in images
partial/                       unfinished downloads, which a later run resumes
blobs/                         layers and manifests of images, Debian packages (image/blobs.py)
layers/ bases/ listings/       metadata of blobs: the inputs of layers, checks of bases, the contents of layers
segments/                      layers compressed as parts of a squashfs
built/ builders/ pythons/      built source layers, builder images, interpreters
digests/                       sha256 of find-links files, by path, size, time and inode
uv/                            uv's cache: unpacked wheels, from which environments are linked
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from envbuild.atomic import replacing
from envbuild.errors import BuildError
from envbuild.file_lock import folder_lock

if TYPE_CHECKING:
    from envbuild.image.blobs import Blobs

_STALE_S = 7 * 86400


@dataclass(frozen=True, slots=True)
class Store:
    """Store at `root`. Its folders are created on first use."""

    root: Path

    @property
    def uv_cache(self) -> Path:
        """uv's cache folder; it is created if missing. Raises BuildError when it cannot be created."""
        return self.folder("uv")

    def folder(self, *parts: str) -> Path:
        """Return a folder of the store; create it if missing. Raises BuildError when it cannot be created."""
        path = self.root.joinpath(*parts)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self.unwritable(error) from error
        return path

    def unwritable(self, error: OSError) -> BuildError:
        """Return the error for a failed write to the store."""
        return BuildError(
            f"the store {self.root} cannot be written: {error.strerror}",
            "set ENVBUILD_STORE (or `store` in site.toml) to a writable folder with free disk space",
        )

    @property
    def blobs(self) -> Blobs:
        """Layers and manifests of images, and Debian packages. Raises BuildError if their folder cannot be created."""
        from envbuild.image.blobs import Blobs

        return Blobs(self.folder("blobs"))

    def find_wheel(self, sha256: str) -> Path | None:
        """Return the wheel with this digest, or None when the store has none."""
        with contextlib.suppress(OSError):
            return next((self.root / "wheels" / sha256).glob("*.whl"), None)
        return None

    def find_archive(self, sha256: str, name: str) -> Path | None:
        """Return the conda package with this digest, or None when the store has none."""
        path = self.root / "conda" / "archives" / sha256 / name
        return path if path.is_file() else None

    def adopt(self, temporary: Path, sha256: str, name: str, kind: str = "wheels") -> Path:
        """Move a finished download with this digest to its path below the folder `kind`, and return the path."""
        place = self.folder(kind, sha256) / name
        try:
            os.replace(temporary, place)
        except OSError as error:
            raise self.unwritable(error) from error
        return place

    def put(self, kind: str, digest: str, name: str, make: Callable[[], bytes]) -> Path:
        """Return the file `kind`/`digest`/`name`; write the bytes that `make` returns if it does not exist."""
        place = self.root / kind / digest / name
        if place.is_file():
            return place
        self.folder(kind, digest)
        try:
            with replacing(place) as temporary:
                temporary.write_bytes(make())
        except OSError as error:
            raise self.unwritable(error) from error
        return place

    def file_digest(self, path: Path) -> str:
        """Return the sha256 of a local file, cached by path, size, time and inode. Raises OSError."""
        real = os.path.realpath(path)
        stat = os.stat(real)
        key = [real, stat.st_size, stat.st_mtime_ns, stat.st_ino]
        note = self.root / "digests" / hashlib.sha256(os.fsencode(real)).hexdigest()
        with contextlib.suppress(OSError, ValueError):
            known = json.loads(note.read_text(encoding="utf-8"))
            if isinstance(known, list) and known[:-1] == key:
                return str(known[-1])
        with open(real, "rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        with contextlib.suppress(OSError, BuildError):  # a read-only store only costs time
            self.folder("digests")
            with replacing(note) as temporary:
                temporary.write_text(json.dumps([*key, digest]), encoding="utf-8")
        return digest

    @contextlib.contextmanager
    def working(self, *parts: str) -> Iterator[Path]:
        """Remove temporary folders of killed runs below `parts`, and yield a new one, which is removed at the end.

        On a network file system, flock on a folder may exclude only processes of the same machine. A folder of another
        machine is therefore removed only when it is old. Raises BuildError when the folder cannot be created.
        """
        home = self.folder(*parts)
        limit = time.time() - _STALE_S
        for left in home.iterdir():
            with contextlib.suppress(OSError):
                if left.name.startswith(_this_boot()) or left.stat().st_mtime < limit:
                    with folder_lock(left, wait=False) as held:
                        if held:
                            remove_tree(left)
        with contextlib.ExitStack() as stack:
            folder = self._held_folder(home, stack)
            try:
                yield folder
            finally:
                remove_tree(folder)

    def _held_folder(self, home: Path, stack: contextlib.ExitStack) -> Path:
        """Return a new locked folder in `home`; the lock is released when `stack` is closed.

        Another process may remove the folder as a left-over before it is locked; another folder is created then.
        """
        while True:
            try:
                folder = Path(tempfile.mkdtemp(dir=home, prefix=_this_boot()))
            except OSError as error:
                raise self.unwritable(error) from error
            try:
                stack.enter_context(folder_lock(folder, wait=False))
            except (BlockingIOError, FileNotFoundError):
                continue
            if folder.exists():
                return folder

    def clean_stale(self) -> None:
        """Remove unfinished downloads and unfinished files of killed runs that are old."""
        limit = time.time() - _STALE_S
        kept = (("partial", ""), ("blobs/partial", ""), ("blobs/sha256", ".new-"), ("segments", ".new-"))
        for folder, prefix in kept:
            with contextlib.suppress(OSError):
                for entry in os.scandir(self.root / folder):
                    if entry.name.startswith(prefix) and entry.stat().st_mtime < limit:
                        os.unlink(entry.path)


def remove_tree(folder: Path) -> None:
    """Remove a folder and its contents, including read-only folders. Errors are ignored."""
    for here, names, _ in os.walk(folder):
        for name in names:
            path = os.path.join(here, name)
            if not os.path.islink(path):
                with contextlib.suppress(OSError):
                    os.chmod(path, 0o700)
    shutil.rmtree(folder, ignore_errors=True)


@functools.cache
def _this_boot() -> str:
    """Return the prefix of temporary folders of this machine since its last boot (random(4), boot_id)."""
    try:
        known = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        known = platform.node()
    return hashlib.sha256(known.encode()).hexdigest()[:8] + "-"
