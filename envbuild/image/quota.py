"""The quota of one image: its layers are refused before they exhaust memory, disk or time."""

from __future__ import annotations

from envbuild.base.errors import BuildError
from envbuild.site.tables import LimitsTable

# Bytes of names, link targets and extended attributes per entry, on average over an image; real images have below 110.
_TEXT_PER_ENTRY = 128


class Quota:
    """What the content of one image may still take; `limits` are those of the site.

    Every method raises BuildError, beginning with `where`, when the image exceeds the limit.
    """

    def __init__(self, limits: LimitsTable | None = None) -> None:
        self._limits = limits or LimitsTable()
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
        self._text -= more + sum(len(one) if one.isascii() or isinstance(one, bytes) else 4 * len(one) for one in texts)
        if self._text < 0:
            what = f"more than {self._limits.entries * _TEXT_PER_ENTRY} bytes of names, attributes and maps"
            raise self._exceeded(where, what, "entries")

    def _exceeded(self, where: str, what: str, key: str) -> BuildError:
        return BuildError(f"{where}: {what}", f"if you trust this image, set `{key}` in [limits] of site.toml higher")
