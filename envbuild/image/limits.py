"""Limits for the content of one image: its layers are refused before they exhaust memory, disk or time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from envbuild.base.errors import BuildError

# Bytes of names, link targets and extended attributes per entry, on average over an image; real images have below 110.
_TEXT_PER_ENTRY = 128


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """The most files, folders and links in all layers of one image, and the most bytes of its files.

    Bytes in holes of a layer's sparse files count 16 times.
    """

    # Where a user sets a limit, for the hint of an error.
    SET_IN: ClassVar[str] = "the ImageLimits of the call"

    entries: int = 400_000
    unpacked_bytes: int = 128 << 30


class Quota:
    """Counter of the content that one image may still have within its `limits`.

    Every method raises BuildError, beginning with `where`, when the image exceeds the limit.
    """

    def __init__(self, limits: ImageLimits | None = None) -> None:
        self._limits = limits or ImageLimits()
        self._entries = self._limits.entries
        self._bytes = self._limits.unpacked_bytes
        self._text = self._limits.entries * _TEXT_PER_ENTRY

    def entry(self, where: str) -> None:
        """Count one file, folder or link."""
        self._entries -= 1
        if self._entries < 0:
            raise self._exceeded(where, f"more than {self._limits.entries} files and folders", "entries")

    def content(self, where: str, size: int) -> None:
        """Count a file of `size` bytes."""
        self._bytes -= size
        if self._bytes < 0:
            raise self._exceeded(where, f"more than {self._limits.unpacked_bytes} bytes of files", "unpacked_bytes")

    def text(self, where: str, *texts: str | bytes, more: int = 0) -> None:
        """Count the memory of names, targets and attributes, and `more` bytes."""
        # Python stores a text with 1 byte per character if all are ASCII, else with up to 4.
        self._text -= more + sum(
            len(text) if text.isascii() or isinstance(text, bytes) else 4 * len(text) for text in texts
        )
        if self._text < 0:
            excess = f"more than {self._limits.entries * _TEXT_PER_ENTRY} bytes of names, attributes and maps"
            raise self._exceeded(where, excess, "entries")

    def _exceeded(self, where: str, excess: str, key: str) -> BuildError:
        return BuildError(f"{where}: {excess}", f"if you trust this image, set `{key}` in {self._limits.SET_IN} higher")
