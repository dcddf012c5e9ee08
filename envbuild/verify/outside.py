"""Images read by envbuild's own readers: no program of the image is run to list its content.

A squashfs is read in place. A docker daemon exports a container that was never started, as one tar. Each file is read
once: the same pass computes its digest and the facts that the checks need.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

from envbuild.base.elf import HEAD, MACHINES, Elf, ElfParts, elf_machine, parse_elf
from envbuild.base.errors import BuildError, HostError, VerificationError
from envbuild.base.packages import SLIM_FILE
from envbuild.contract.image_manifest import FILE_NAME, PathRow, compare, parse, row_of
from envbuild.contract.installed import FileReport
from envbuild.contract.state import PREFIX, State
from envbuild.gpus import Containers, GpuCodeScanner
from envbuild.image.entry import DIR, FILE, HARDLINK, SYMLINK
from envbuild.image.layer import checked_tar, open_layer
from envbuild.image.limits import ImageLimits, Quota
from envbuild.image.squashfs.read import SquashfsImage
from envbuild.image.tar import Chunks, Items, tar_items
from envbuild.image.tree import MergedTree
from envbuild.recipe.targets import VERSION_FILE, Target
from envbuild.verify.model import out_of_time
from envbuild.verify.survey import Survey, survey

VARIABLES = ("etc/environment", ".singularity.d/env/10-docker2singularity.sh")  # of a .sqsh and a .sif
# The files that say what is installed: their content is kept. Larger ones are not what their names say.
_TEXTS = re.compile(
    rf"{re.escape(PREFIX)}/(?:(?:.*/)?(?:[^/]+\.dist-info/(?:RECORD|{re.escape(SLIM_FILE)})"
    rf"|torch-[^/]+\.dist-info/METADATA|conda-meta/[^/]+\.json|{re.escape(VERSION_FILE)})|share/envbuild/layers/[^/]+\.json)|{re.escape(FILE_NAME)}"
    rf"|etc/ld\.so\.conf(?:\.d/.+\.conf)?|{'|'.join(map(re.escape, VARIABLES))}",
    re.DOTALL,
)
_MOST_TEXT = 64 << 20
_CHUNK = 1 << 20
_LIBRARY_PATH = re.compile(r"^(?:export )?LD_LIBRARY_PATH=(.*)$", re.MULTILINE)
_PATH = re.compile(r"/[^:\"'${}\s]+")
_LINKS = 40  # that Linux follows in one path
# Digests of one file by other algorithms than sha256, which some RECORDs use.
Reread = Callable[[str], Iterable[bytes]]


@dataclass(frozen=True, slots=True)
class ReadFile:
    """A regular file: sha256, first bytes, text of a metadata file, code for GPUs, and its ELF data."""

    sha256: str = ""
    head: bytes = b""
    text: bytes | None = None
    gpu_code: Containers = field(default_factory=Containers)
    elf: Elf | None = None


_NOTHING = ReadFile()


@dataclass(frozen=True, slots=True)
class Clock:
    """The deadline for reading, by time.monotonic()."""

    end: float
    seconds: float

    @classmethod
    def of(cls, timeout_s: float) -> Clock:
        """Return the deadline in `timeout_s` seconds."""
        return cls(time.monotonic() + timeout_s, timeout_s)

    def check(self) -> None:
        """Raise VerificationError after the deadline."""
        if time.monotonic() > self.end:
            raise out_of_time("the image", self.seconds)


def read_once(path: str, pieces: Iterable[bytes], size: int, clock: Clock, gpu: bool) -> ReadFile:
    """Return the facts about the file at `path`, with `gpu` also its code for GPUs; `pieces` are its content of `size`
    bytes.

    Raises VerificationError after the deadline.
    """
    digest, head, kept = hashlib.sha256(), b"", list[bytes]()
    scanner, parts = GpuCodeScanner(), ElfParts(size)
    is_text = size <= _MOST_TEXT and _TEXTS.fullmatch(path) is not None
    for piece in pieces:
        clock.check()
        digest.update(piece)
        head = head if len(head) >= HEAD else (head + piece[:HEAD])[:HEAD]
        if is_text:
            kept.append(piece)
        elif elf_machine(head) is not None:
            parts.add(piece)
            if gpu:
                scanner.feed(piece)
    text = b"".join(kept) if is_text else None
    return ReadFile(digest.hexdigest(), head, text, scanner.containers, parse_elf(parts.read, symbols=True))


@dataclass
class ImageFiles:
    """The files of an image, as `contract.installed.Files`: rows by path, and the content of regular files.

    `variables` are lines NAME=VALUE, for an image that has no file with its variables.
    """

    reread: Reread
    rows: dict[str, PathRow] = field(default_factory=dict)
    contents: dict[str, ReadFile] = field(default_factory=dict)
    variables: str = ""
    _folders: dict[str, list[str]] = field(default_factory=dict)

    def add(self, path: str, row: PathRow, seen: ReadFile | None = None) -> None:
        """Add a path; `seen` are the facts about a regular file."""
        self.rows[path] = row
        if seen is not None:
            self.contents[path] = seen

    def link(self, path: str, first: str) -> None:
        """Add `path` as another name of the file `first`."""
        row = self.rows.get(first)
        if row is None:
            raise BuildError(f"/{path}: a hard link to /{first}, which is missing")
        self.add(path, row, self.contents.get(first))

    def names(self, folder: str) -> list[str]:
        if not self._folders:
            for path in self.rows:
                parent, _, name = path.rpartition("/")
                self._folders.setdefault(parent, []).append(name)
        if not self.is_folder(folder):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), folder)
        return self._folders.get(self.real(folder), [])

    def walk(self, folder: str) -> Iterator[str]:
        start = f"{_key(folder)}/".lstrip("/")
        for path in sorted(self.rows):
            if path.startswith(start) and not self.is_folder(path):
                yield f"/{path}"

    def read(self, path: str) -> bytes:
        self._file(path)
        text = self.content(path).text
        if text is None:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path)
        return text

    def head(self, path: str) -> bytes:
        return self.content(path).head

    def size(self, path: str) -> int:
        return self._file(path).size

    def digest(self, path: str, algorithm: str = "sha256") -> bytes:
        row = self._file(path)
        if algorithm == "sha256":
            return bytes.fromhex(row.value)
        digest = hashlib.new(algorithm)
        for piece in self.reread(self.real(path)):
            digest.update(piece)
        return digest.digest()

    def target(self, path: str) -> str:
        folder, _, name = _key(path).rpartition("/")
        row = self._row(f"{self.real(folder)}/{name}")
        return row.value if row.kind == SYMLINK else ""

    def real(self, path: str) -> str:
        """Return `path` with symbolic links resolved; a chain that is too long is followed only in part."""
        done, todo, links = "", _key(path).split("/")[::-1], 0
        while todo:
            part = todo.pop()
            if part in ("", "."):
                continue
            if part == "..":
                done = done.rpartition("/")[0]
                continue
            here = f"{done}/{part}" if done else part
            row = self.rows.get(here)
            if row is None or row.kind != SYMLINK or links == _LINKS:
                done = here
                continue
            links += 1
            todo += row.value.split("/")[::-1]
            if row.value.startswith("/"):
                done = ""
        return done

    def is_folder(self, path: str) -> bool:
        row = self.rows.get(self.real(path))
        return row is not None and row.kind == DIR

    def gpu_code(self, path: str) -> Containers:
        return self.content(path).gpu_code

    def elf(self, path: str) -> Elf | None:
        return self.content(path).elf

    def content(self, path: str) -> ReadFile:
        """Return what was read of a regular file, and nothing of any other path."""
        return self.contents.get(self.real(path), _NOTHING)

    def library_path(self) -> list[str]:
        texts = [self.variables, *((self.content(name).text or b"").decode(errors="replace") for name in VARIABLES)]
        return [path for text in texts for value in _LIBRARY_PATH.findall(text) for path in _PATH.findall(value)]

    def _file(self, path: str) -> PathRow:
        row = self._row(self.real(path))
        if row.kind != FILE:
            raise OSError(errno.EINVAL, "not a regular file", path)
        return row

    def _row(self, path: str) -> PathRow:
        if (row := self.rows.get(_key(path))) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return row


def _key(path: str) -> str:
    return path.strip("/")


def read_squashfs(
    stream: BinaryIO, offset: int, where: str, limits: ImageLimits | None, timeout_s: float, *, gpu: bool = False
) -> ImageFiles:
    """Read the squashfs at `offset` of `stream`, with `gpu` the code for GPUs in it.

    Raises BuildError (damaged), VerificationError (out of time).
    """
    image, clock = SquashfsImage(stream, offset, where, limits), Clock.of(timeout_s)
    handles: dict[str, int] = {}

    def pieces(handle: int) -> Iterator[bytes]:
        return (bytes(length) if data is None else data for data, length in image.blocks(handle))

    entries = [(entry, handle) for entry, handle in image.entries() if entry.path]
    files = [(entry, handle) for entry, handle in entries if entry.kind == FILE]
    seen = image.each_file(files, lambda entry, handle: read_once(entry.path, pieces(handle), entry.size, clock, gpu))
    contents = dict(zip((entry.path for entry, _ in files), seen, strict=True))
    image_files = ImageFiles(lambda path: pieces(handles[path]))
    for entry, handle in entries:
        handles[entry.path] = handle
        if entry.kind == HARDLINK:
            image_files.link(entry.path, entry.target)
        else:
            content = contents.get(entry.path)
            image_files.add(entry.path, row_of(entry, content.sha256 if content else "", entry.target), content)
    return image_files


def read_container(
    client: Any,
    image: str,
    labels: Mapping[str, str],
    limits: ImageLimits | None,
    timeout_s: float,
    *,
    gpu: bool = False,
) -> ImageFiles:
    """Read an image of the daemon, from a container with `labels`. Raises as `read_squashfs`, and HostError."""
    import docker.errors
    import requests

    clock, container = Clock.of(timeout_s), None
    try:
        container = client.containers.create(image, ["true"], entrypoint=[], labels=dict(labels))
        variables = "\n".join(client.images.get(image).attrs["Config"].get("Env") or ())
        exported = tar_items(cast(BinaryIO, Chunks(container.export(_CHUNK))), image, Quota(limits))
        files = ImageFiles(partial(_copied, container), variables=variables)
        return _read_tars(files, [exported], image, limits, clock, gpu)
    except (docker.errors.DockerException, requests.RequestException) as error:
        raise HostError(f"the docker daemon could not export the image: {error}", "verify it again") from error
    finally:
        if container is not None:
            with suppress(docker.errors.DockerException, requests.RequestException):
                container.remove(force=True, v=True)


def read_layers(
    layers: Iterable[tuple[str, Path]], image: str, env: Mapping[str, str], limits: ImageLimits | None, timeout_s: float
) -> ImageFiles:
    """Read an image from the files of its layers, lowest first, each with the digest of its tar.

    `env` are the image's variables. Only sha256 digests are known. Raises as `read_squashfs`.
    """
    variables, quota = "\n".join(map("=".join, env.items())), Quota(limits)
    with ExitStack() as stack:
        tars = (
            checked_tar(stack.enter_context(open_layer(path, image)), f"{image}: layer {diff_id}", diff_id, quota)
            for diff_id, path in layers
        )
        files = ImageFiles(lambda _: (), variables=variables)
        return _read_tars(files, tars, image, limits, Clock.of(timeout_s), gpu=False)


def _read_tars(
    files: ImageFiles, tars: Iterable[Items], image: str, limits: ImageLimits | None, clock: Clock, gpu: bool
) -> ImageFiles:
    """Add the tree that tars make, the lowest first, to `files`; return these."""
    tree, contents = MergedTree(Quota(limits)), dict[tuple[int, int], ReadFile]()
    for layer, items in enumerate(tars):
        tree.begin()
        for number, (member, content) in enumerate(items):
            clock.check()
            if content:
                path = os.path.normpath(f"/{member.name}").strip("/")
                pieces = iter(partial(content.read, _CHUNK), b"")
                contents[layer, number] = read_once(path, pieces, member.size, clock, gpu)
            tree.apply(member, number, image)
    for path, node in tree.walk():
        seen = contents.get((node.layer, node.ordinal))
        if node.member is not None and path:
            files.add(path, row_of(node.member, seen.sha256 if seen else "", node.member.link), seen)
        elif path:
            files.add(path, PathRow(DIR))
    return files


def _copied(container: Any, path: str) -> Iterator[bytes]:
    stream, _ = container.get_archive(f"/{path}")
    for _, content in tar_items(cast(BinaryIO, Chunks(stream)), path):
        while content and (piece := content.read(_CHUNK)):
            yield piece


def survey_image(files: ImageFiles, state: State, form: str, expected: str) -> Survey:
    """Survey an image in `form`; `expected` is the digest of its manifest, "" for an image without one.

    All files are compared with the manifest's rows; without a manifest, the packages' files with their RECORDs. Raises
    VerificationError for an image without an environment.
    """
    text, known = files.content(FILE_NAME).text, None
    if text is not None:
        manifest = parse(text, f"/{FILE_NAME}")
        known = compare(manifest, files.rows, form)
        if expected not in ("", manifest.digest):
            known.altered.append(f"/{FILE_NAME} (another one was made when the image was built)")
    elif expected:
        known = FileReport(missing=[f"/{FILE_NAME}"])
    root = Path("/", PREFIX)
    target, site_packages = Target.parse(state.target), root / f"lib/python{state.python}/site-packages"
    try:
        return survey(root, site_packages, MACHINES[target.arch], known, files, gpu=target.family.gpu)
    except OSError as error:
        raise VerificationError(f"the image has no environment in {root}: {error.filename} {error.strerror}") from error
