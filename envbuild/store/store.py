"""Content-addressed store in one folder, shared by all recipes and safe for concurrent processes.

wheels/<sha256>/<file name>    published wheels, and those of users' own projects
projects/                      the sha256 of own projects' wheels, by the digest of their files
trainer/<sha256>/<file name>   the bundled trainer as a wheel
conda/archives/<sha256>/<file name>   published conda packages
conda/pkgs/ conda/stamps/      unpacked conda packages, to link from, and their state when unpacked
conda/images/                  records of the conda packages in images
partial/                       unfinished downloads, which a later run resumes
blobs/                         layers and manifests of images, Debian packages (image/layout.py)
layers/ bases/ listings/       metadata of blobs: the inputs of layers, checks of bases, the contents of layers
segments/                      layers compressed as parts of a squashfs
built/ builders/ pythons/      built source layers, builder images, notes on the host's Pythons
interpreters/                  Pythons that uv downloaded
maps/                          which parts of image files are those of segments
facts/                         what builds need to know of wheels whose layers exist
symbols/<sha256>/              the symbol tables of a wheel's libraries
digests/                       sha256 of files since the boot, by path and stat
recipes/                       what the builds of each recipe have used
history/                       what the verifications of each recipe measured
seals/                         stat of the files of verified environments
uv/                            uv's cache: unpacked wheels, from which environments are linked
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from envbuild.base.atomic import folder_lock, remove_tree, replacing
from envbuild.base.errors import BuildError
from envbuild.base.files import is_file_name
from envbuild.base.host import this_boot
from envbuild.base.system_errors import file_error
from envbuild.cache.hashed import Digests

if TYPE_CHECKING:
    from envbuild.image.layout import Blobs
    from envbuild.store.entry import ResultCache
    from envbuild.store.vault import Vault

_STALE_S = 7 * 86400
# The folders in which `replacing`, blobs and `file_lock` write; a kill leaves files called .new-* or *.lock there.
_WRITTEN = ["bases", "blobs/sha256", "conda/images", "conda/info", "conda/stamps", "digests", "facts", "history"]
_WRITTEN += ["layers", "listings", "maps", "projects", "pythons", "recipes", "seals", "segments", "trainer/*"]
# The folders that `working` is called for.
_WORKING = ("bisect", "building", "builders/new", "conda/linked", "launched", "layouts", "opened", "pruned", "running")


@dataclass(frozen=True, slots=True)
class Store:
    """Store at `root`. Its folders are created on first use. `seen` has the paths that this process has used.

    `remote` and `vault` are the team's, if a run has them. `first` is called before the first folder is created.
    """

    root: Path
    seen: set[str] = field(default_factory=set, compare=False, repr=False)
    remote: ResultCache | None = field(default=None, compare=False, repr=False)
    vault: Vault | None = field(default=None, compare=False, repr=False)
    first: list[Callable[[], None]] = field(default_factory=list, compare=False, repr=False)

    @property
    def uv_cache(self) -> Path:
        """uv's cache folder; it is created if missing. Raises BuildError when it cannot be created."""
        with self.digests.using():
            path = self.folder("uv")
            self.note_use(path, path)
        return path

    @property
    def conda_lock(self) -> Path:
        """The file that is locked while unpacked conda packages are used."""
        return self.root / "conda" / "lock"

    def note_use(self, path: Path, marked: Path) -> None:
        """Record the use of `path`, which has no digest, in the time of the file or folder `marked`."""
        with contextlib.suppress(OSError):
            os.utime(marked)
        self.seen.add(os.path.realpath(path))

    def folder(self, *parts: str) -> Path:
        """Return a folder of the store; create it if missing. Raises BuildError when it cannot be created."""
        path = self.root.joinpath(*parts)
        while self.first:
            self.first.pop()()
        with self.writing():
            path.mkdir(parents=True, exist_ok=True)
        return path

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Raise BuildError for an OSError of the block, which reads or writes files of the store."""
        try:
            yield
        except OSError as error:
            raise self.unwritable(error) from error

    def unwritable(self, error: OSError) -> BuildError:
        """Return the error for a file that could not be written to the store, or read for it."""
        return BuildError(
            file_error(error, self.root),
            "set ENVBUILD_STORE (or `store` in site.toml) to a writable folder with free disk space",
        )

    @property
    def blobs(self) -> Blobs:
        """Layers and manifests of images, and Debian packages. Raises BuildError if their folder cannot be created."""
        from envbuild.image.layout import Blobs

        return Blobs(self.folder("blobs"), self.digests)

    def find(self, kind: str, sha256: str, fits: Callable[[str], bool] = lambda _: True) -> Path | None:
        """Return the file with this digest below the folder `kind`, "" for blobs, whose name `fits`; None without one.

        Installers read a wheel's name, so a wheel with another name does not count.
        """
        folder = self.root / kind / sha256 if kind else self.root / "blobs/sha256"
        with contextlib.suppress(OSError):
            for name in sorted(os.listdir(folder)) if kind else [sha256]:
                path = folder / name
                if fits(name) and path.is_file() and self.digests.keep(path, sha256):
                    return path
        return None

    def adopt(self, temporary: Path, sha256: str, name: str, kind: str = "wheels") -> Path:
        """Move a finished download with this digest to its path below the folder `kind`, "" for blobs; return the path.

        `name` may come from an untrusted source. Raises BuildError if it is not a file name.
        """
        if not is_file_name(name):
            raise BuildError(f"{name!r:.80} is not a valid file name for the store", "get the file from another source")
        place = self.folder(kind, sha256) / name if kind else self.folder("blobs/sha256") / sha256
        with self.writing():
            os.replace(temporary, place)
        self.digests.record(place, sha256)
        return place

    def put(self, kind: str, digest: str, name: str, make: Callable[[], bytes]) -> Path:
        """Return the file `kind`/`digest`/`name` with the bytes that `make` returns; write it if it is not there."""
        place = self.root / kind / digest / name
        with self.writing():
            data = make()
            with contextlib.suppress(OSError):
                if place.read_bytes() == data:
                    return place
            self.folder(kind, digest)
            with replacing(place) as temporary:
                temporary.write_bytes(data)
        return place

    @property
    def digests(self) -> Digests:
        """The digests of files in the store and of local files that builds read."""
        return Digests(self.root / "digests", self.seen)

    @contextlib.contextmanager
    def working(self, *parts: str) -> Iterator[Path]:
        """Yield a `working_folder` below `parts`. Raises BuildError when it cannot be created."""
        with contextlib.ExitStack() as stack:
            with self.writing():
                folder = stack.enter_context(working_folder(self.folder(*parts)))
            yield folder

    def clean_stale(self) -> None:
        """Remove folders of `working` that killed runs left, and old files and downloads that they did not finish."""
        for parts in _WORKING:
            clean_folders(self.root / parts)
        limit = time.time() - _STALE_S
        for pattern in ("partial", "blobs/partial", *_WRITTEN):
            for folder in self.root.glob(pattern):
                with contextlib.suppress(OSError):
                    for file in os.scandir(folder):
                        left = folder.name == "partial" or file.name.startswith(".new-") or file.name.endswith(".lock")
                        if left and file.stat(follow_symlinks=False).st_mtime < limit:
                            os.unlink(file.path)


@contextlib.contextmanager
def working_folder(home: Path, prefix: str = "", *, shared: bool = False) -> Iterator[Path]:
    """Yield a new folder in `home`, named `prefix` and random characters, after `clean_folders`.

    It is removed at the end, or after a kill by the next run; a child with a `shared` lock on it keeps it until then.
    Raises OSError.
    """
    clean_folders(home, prefix)
    with contextlib.ExitStack() as stack:
        held = False
        while not held:  # another process may remove the folder as a left-over before it is locked
            folder = Path(tempfile.mkdtemp(dir=home, prefix=prefix + this_boot()))
            with contextlib.suppress(BlockingIOError, FileNotFoundError):
                stack.enter_context(folder_lock(folder, wait=False, shared=shared))
                held = folder.exists()
        try:
            yield folder
        finally:
            remove_tree(folder)


def clean_folders(home: Path, prefix: str = "") -> None:
    """Remove this user's folders in `home`, which may be missing, that killed runs left. Errors are ignored.

    On a network file system, flock on a folder may exclude only processes of the same machine. A folder of another
    machine is therefore removed only when it is old.
    """
    limit = time.time() - _STALE_S
    for left in home.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            about = left.lstat()  # in /tmp, other users may put links and folders under this name
            old = left.name.startswith(prefix + this_boot()) or about.st_mtime < limit
            if old and about.st_uid == os.getuid():
                with folder_lock(left, wait=False) as held:
                    if held:
                        remove_tree(left)
