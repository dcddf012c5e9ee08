"""Image files that a runtime starts: squashfs (.sqsh) and SIF (.sif)."""

from __future__ import annotations

import stat
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from envbuild.base.errors import UsageError
from envbuild.base.files import MISSING
from envbuild.base.packages import digest_of
from envbuild.contract.image_manifest import FILE_NAME
from envbuild.contract.kinds import ARTIFACTS, FileArtifact, file_kind, kinds_of
from envbuild.contract.state import FILE, PREFIX, State, parse_state
from envbuild.image.sif import is_sif, read_sif
from envbuild.image.squashfs.model import NAMES
from envbuild.image.squashfs.read import SquashfsImage, is_squashfs
from envbuild.recipe.targets import CPU, Accelerator

_HEAD = 64
_MOST_STATE, _MOST_MANIFEST = 16 << 20, 1 << 30


@dataclass(frozen=True, slots=True)
class ImageFormat:
    """A format of image files; `title` is its name in messages.

    `matches` returns whether a file with these first bytes has the format; `offset` returns the offset of its squashfs.
    """

    title: str
    matches: Callable[[bytes], bool]
    offset: Callable[[BinaryIO, str], int]


FORMATS = {
    "squashfs": ImageFormat("squashfs", is_squashfs, lambda _, __: 0),
    "sif": ImageFormat("SIF", is_sif, lambda stream, where: read_sif(stream, where).partition.offset),
}


@dataclass(frozen=True, slots=True)
class ImageFile:
    """A file that holds a squashfs from `offset` on.

    `path` is absolute; `kind` is the artifact's kind; `accelerator` is the accelerator of the image's programs.
    """

    path: Path
    kind: str
    offset: int
    compressor: str
    accelerator: Accelerator = CPU

    @property
    def format(self) -> str:
        """The format of the file, a key of FORMATS."""
        return file_kind(self.kind).format


def image_kind(path: Path) -> str | None:
    """Return the kind of the image file `path`, by its first bytes; None for any other file.

    Raises OSError for a file that cannot be read.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return None
        with path.open("rb") as stream:
            head = stream.read(_HEAD)
    except MISSING:
        return None
    kind = _kind_of(head)
    return kind.name if kind else None


def _kind_of(head: bytes) -> FileArtifact | None:
    kinds = (kind for kind in ARTIFACTS.values() if isinstance(kind, FileArtifact))
    return next((kind for kind in kinds if FORMATS[kind.format].matches(head)), None)


def check_image_place(path: Path) -> None:
    """Raise UsageError when `path`, where an image file is to be written, has content that must not be replaced."""
    if path.is_dir():
        raise UsageError(f"{path} is a folder", "name a file with --out")
    if path.exists() and path.stat().st_size and image_kind(path) is None:
        raise UsageError(
            f"{path} exists and is neither a squashfs nor a SIF; it is left as it is",
            "remove it, or choose another path with --out",
        )


def open_image_file(path: Path, kind: str | None = None, *, accelerator: Accelerator = CPU) -> ImageFile:
    """Open the image file `path` of `kind` (None: any). Raises UsageError for another file, BuildError if damaged."""
    try:
        with path.open("rb") as stream:
            head = stream.read(_HEAD)
            actual = _kind_of(head)
            offset = FORMATS[actual.format].offset(stream, str(path)) if actual else 0
            stream.seek(offset)
            block = stream.read(22)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", "give a .sqsh or .sif file") from error
    if actual is None or not is_squashfs(block) or len(block) < 22 or kind not in (None, actual.name):
        expected = file_kind(kind).format if kind else "squashfs"
        raise UsageError(f"{path} is no {FORMATS[expected].title} image")
    number = struct.unpack_from("<H", block, 20)[0]
    compressor = NAMES.get(number, f"number {number}")
    return ImageFile(path.absolute(), actual.name, offset, compressor, accelerator)


def image_state(image: ImageFile) -> State:
    """Return the state that envbuild stored in the image. Raises UsageError when envbuild did not make the image."""
    where = str(image.path)
    with image.path.open("rb") as stream:
        tree = SquashfsImage(stream, image.offset, where)
        handle = tree.find(f"{PREFIX}/{FILE}")
        if handle is None:
            raise UsageError(
                f"{where} is not an artifact of envbuild: it has no /{PREFIX}/{FILE}",
                f"give a file that {' or '.join(f'`envbuild {name}`' for name in kinds_of('file'))} made",
            )
        text = tree.content(handle, _MOST_STATE)
    return parse_state(text, f"{where}: /{PREFIX}/{FILE}")


def own_manifest(image: ImageFile) -> str:
    """Return the digest of the manifest inside of the image, "" without one. Raises BuildError for a damaged image."""
    with image.path.open("rb") as stream:
        tree = SquashfsImage(stream, image.offset, str(image.path))
        handle = tree.find(FILE_NAME)
        return "" if handle is None else digest_of(tree.content(handle, _MOST_MANIFEST))


def holds_file(form: str, image: str, path: str) -> bool:
    """Return whether the artifact of `form` at `image` is an image file with a regular file at the absolute `path`."""
    if form != "file" or image_kind(Path(image)) is None:
        return False
    opened = open_image_file(Path(image))
    with opened.path.open("rb") as stream:
        return SquashfsImage(stream, opened.offset, image).find(path.strip("/")) is not None
