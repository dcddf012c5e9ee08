"""A file of an image, read once as its bytes come by: its digest, and what the checks ask of its content."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass

from envbuild.base.elf import HEAD, Elf, ElfParts, elf_machine, parse_elf
from envbuild.base.packages import SLIM_FILE
from envbuild.contract.image_manifest import FILE_NAME
from envbuild.contract.state import PREFIX
from envbuild.gpu_code import Containers, GpuCodeScanner
from envbuild.recipe.accelerators import VERSION_FILE
from envbuild.verify.model import out_of_time

VARIABLES = ("etc/environment", ".singularity.d/env/10-docker2singularity.sh")  # enroot's and Apptainer's
# The files that say what is installed: their content is kept. Larger ones are not what their names say.
_TEXTS = re.compile(
    rf"{re.escape(PREFIX)}/(?:(?:.*/)?(?:[^/]+\.dist-info/(?:RECORD|{re.escape(SLIM_FILE)})"
    rf"|torch-[^/]+\.dist-info/METADATA|conda-meta/[^/]+\.json|{re.escape(VERSION_FILE)})|share/envbuild/layers/[^/]+\.json)|{re.escape(FILE_NAME)}"
    rf"|etc/ld\.so\.conf(?:\.d/[^/]+\.conf)?|{'|'.join(map(re.escape, VARIABLES))}",
    re.DOTALL,
)
_MOST_TEXT = 64 << 20


@dataclass(frozen=True, slots=True)
class ReadFile:
    """A regular file: sha256, first bytes, its text if it says what is installed, code for GPUs, the ELF file in it."""

    sha256: str
    head: bytes
    text: bytes | None
    gpu_code: Containers
    elf: Elf | None


@dataclass(frozen=True, slots=True)
class Clock:
    """The end of the time that reading may take, by time.monotonic()."""

    end: float
    seconds: float

    @classmethod
    def of(cls, timeout_s: float) -> Clock:
        """Return the one that ends in `timeout_s` seconds."""
        return cls(time.monotonic() + timeout_s, timeout_s)

    def check(self) -> None:
        """Raise VerificationError when the time is over."""
        if time.monotonic() > self.end:
            raise out_of_time("the image", self.seconds)


def read_once(path: str, pieces: Iterable[bytes], size: int, clock: Clock, gpu: bool) -> ReadFile:
    """Return what `pieces`, the content of the file at `path` with `size` bytes, are; with `gpu` also code for GPUs.

    Raises VerificationError when the time is over.
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
    return ReadFile(digest.hexdigest(), head, text, scanner.found, parse_elf(parts.read, symbols=True))
