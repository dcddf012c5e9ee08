"""The store: files by content under one folder, shared by all recipes, safe for several processes.

wheels/<sha256>/<file name>    wheels, as they were published
trainer/<sha256>/<file name>   the bundled trainer as a wheel
conda/archives/<sha256>/<file name>   conda packages, as they were published
conda/pkgs/ conda/stamps/      conda packages unpacked, from which environments are linked, and how they were then
partial/                       downloads under way; a later call goes on where one was cut
blobs/                         images' layers, Debian packages, manifests (image/blobs.py)
layers/ bases/ listings/       what is known of blobs: which inputs made them, what they hold
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

from envbuild.errors import BuildError
from envbuild.file_lock import folder_lock
from envbuild.files import replacing

if TYPE_CHECKING:
    from envbuild.image.blobs import Blobs

_STALE_DAYS = 7.0


@dataclass(frozen=True, slots=True)
class Store:
    """The store at `root`. Folders are made when first needed."""

    root: Path

    @property
    def uv_cache(self) -> Path:
        """uv's cache folder, made if missing. Raises BuildError when it cannot be."""
        return self.folder("uv")

    def folder(self, *parts: str) -> Path:
        """A folder of the store, made if missing. Raises BuildError when it cannot be."""
        path = self.root.joinpath(*parts)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self.unwritable(error) from error
        return path

    def unwritable(self, error: OSError) -> BuildError:
        """The error for a store that refuses a write."""
        return BuildError(
            f"the store {self.root} cannot be written: {error.strerror}",
            "set ENVBUILD_STORE (or `store` in site.toml) to a folder with room that you may write",
        )

    @property
    def blobs(self) -> Blobs:
        """Images' layers, packages and manifests. Raises BuildError when their folder cannot be made."""
        from envbuild.image.blobs import Blobs

        return Blobs(self.folder("blobs"))

    def find_wheel(self, sha256: str) -> Path | None:
        """The wheel with this content, None when the store has none."""
        with contextlib.suppress(OSError):
            for path in (self.root / "wheels" / sha256).iterdir():
                if path.suffix == ".whl":
                    return path
        return None

    def find_archive(self, sha256: str, name: str) -> Path | None:
        """The conda package with this content, None when the store has none."""
        path = self.root / "conda" / "archives" / sha256 / name
        return path if path.is_file() else None

    def adopt(self, temporary: Path, sha256: str, name: str, kind: str = "wheels") -> Path:
        """Move a finished download, whose content has this digest, into its place below the folder `kind`."""
        place = self.folder(kind, sha256) / name
        try:
            os.replace(temporary, place)
        except OSError as error:
            raise self.unwritable(error) from error
        return place

    def put(self, kind: str, digest: str, name: str, make: Callable[[], bytes]) -> Path:
        """The file `kind`/`digest`/`name`, written from `make` when it is not there yet."""
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
        """The sha256 of a local file; remembered by path, size, time and inode. Raises OSError."""
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
        with contextlib.suppress(
            OSError, BuildError
        ):  # a store that is read-only costs time, no more
            self.folder("digests")
            with replacing(note) as temporary:
                temporary.write_text(json.dumps([*key, digest]), encoding="utf-8")
        return digest

    @contextlib.contextmanager
    def working(self, *parts: str) -> Iterator[Path]:
        """A folder of the store for as long as it is used; those that killed runs left are removed first.

        The store may be on a network file system, where flock on a folder holds among the processes of one machine
        alone: what another machine left, or has in use, goes only when it is old. Raises BuildError when the folder
        cannot be made.
        """
        home = self.folder(*parts)
        limit = time.time() - _STALE_DAYS * 86400
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
        """A new folder in `home`, held until `stack` is closed. Another caller may take it for a left-over before we
        hold it, and remove it: then there is another."""
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

    def clean_stale(self, days: float = _STALE_DAYS) -> None:
        """Remove downloads that nobody went on with for `days` days, and what killed runs left half-written."""
        limit = time.time() - days * 86400
        kept = (
            ("partial", ""),
            ("blobs/partial", ""),
            ("blobs/sha256", ".new-"),
            ("segments", ".new-"),
        )
        for folder, prefix in kept:
            with contextlib.suppress(OSError):
                for entry in os.scandir(self.root / folder):
                    if entry.name.startswith(prefix) and entry.stat().st_mtime < limit:
                        os.unlink(entry.path)


def remove_tree(folder: Path) -> None:
    """Remove a folder and all in it, folders that may not be written too; what stays is left for later."""
    for here, names, _ in os.walk(folder):
        for name in names:
            path = os.path.join(here, name)
            if not os.path.islink(path):
                with contextlib.suppress(OSError):
                    os.chmod(path, 0o700)
    shutil.rmtree(folder, ignore_errors=True)


@functools.cache
def _this_boot() -> str:
    """What names of working folders of this machine since it started begin with (random(4), boot_id)."""
    try:
        known = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        known = platform.node()
    return hashlib.sha256(known.encode()).hexdigest()[:8] + "-"
