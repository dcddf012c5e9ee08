"""Reader of the code for GPUs in ELF files: CUDA's fatbin containers and Clang's offload bundles (ROCm).

Only headers are read, and the first bytes of the code: `[slim]` leaves zeros in place of some. Whole files are
searched, because cuFFT and cuBLASLt have containers outside of the sections for them. NVIDIA does not document the
containers; the fields were compared with cuobjdump's output (docs/reference/gpus.md). Bundles: the LLVM project's
"Clang Offload Bundler".
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from typing import IO

# A container's header: magic number, version, size of the header, size of the entries.
_CONTAINER = struct.Struct("<IHHQ")
_FATBIN = 0xBA55ED50.to_bytes(4, "little")
# An entry's header: kind, size of the header, size of the payload, architecture, flags. The rest is not used.
_ENTRY = struct.Struct("<H2xIQ12xI8xQ16x")
_PTX, _ELF = 1, 2
_SUFFIXES = {1 << 20: "a", 1 << 21: "f"}  # of the flags: code for one architecture, and for a family
_MOST_HEADER = 1 << 16
_BUNDLE = b"__CLANG_OFFLOAD_BUNDLE__"
_BUNDLE_HEAD, _BUNDLE_ENTRY = struct.Struct("<24sQ"), struct.Struct("<QQQ")
_MOST_ENTRIES, _MOST_NAME, _FAR = 4096, 256, 1 << 40
_AMD = re.compile(r"hip\w*-amdgcn-[\w.]*-[\w.]*-[\w.]*-?(gfx[0-9a-z-]+(?::[a-z]+[+-])*)")
# A compressed bundle: magic number, version, method (zlib, zstd), its size, which version 1 lacks. So is its table.
_COMPRESSED, _COMPRESSED_HEAD = b"CCOB", struct.Struct("<4sHHQQQ")
_COMPRESSED_HEADS = {2: 24, 3: 32}
UNREADABLE = "compressed"  # in place of codes, for a bundle whose table could not be read
_WINDOW = 1 << 18  # of compressed data; a block of zstd has at most 128 KiB
# Bytes that are read at once: where a header is expected, and where a container is searched.
_SMALL, _LARGE = 1 << 13, 1 << 20

# The payload of an entry begins with a magic number or text, never with so many zeros.
_BLANK = bytes(8)

# An entry of a container of CUDA: its code, and place and size of its payload in the file.
CudaEntry = tuple[str, int, int]
# The codes of each container, such as ("compute_90", "sm_80", "sm_90a") or ("gfx90a:xnack-",) → number of containers.
Containers = Counter[tuple[str, ...]]


class GpuCodeScanner:
    """A scanner of consecutive pieces of a file. The next `skip` bytes are of no interest and may be left out."""

    def __init__(self, each: Callable[[Sequence[CudaEntry]], None] | None = None) -> None:
        """Call `each` with the entries of every container of CUDA."""
        self._each, self._entries = each, list[CudaEntry]()
        self._base = 0  # position in the file of the data's first byte
        self.found: Containers = Counter()
        self.skip = 0
        self._rest = b""
        self._entries_left = 0  # bytes of entries of the current container
        self._bundles_left = 0  # entries of the current bundle
        self._bundle_start = self._bundle_end = 0  # positions in the data; the start may be negative
        self._codes: set[str] = set()

    @property
    def searching(self) -> bool:
        """Whether the next bytes are searched for a container; otherwise they begin with a header."""
        return not self._entries_left and not self._bundles_left

    def feed(self, piece: bytes) -> None:
        """Scan the next bytes of the file."""
        if self.skip >= len(piece):
            self.skip -= len(piece)
            return
        data = self._rest + memoryview(piece)[self.skip :] if self.skip or self._rest else piece
        self.skip, place = 0, 0
        hits: dict[bytes, int] = {}
        while place < len(data):
            if self._entries_left:
                following = self._entry(data, place)
            elif self._bundles_left:
                following = self._bundle_entry(data, place)
            else:
                following = self._search(data, place, hits)
            if following is None:
                break
            place = following
        self.skip = max(0, place - len(data))
        self._rest = bytes(data[place:])
        self._base += place
        self._bundle_start -= place
        self._bundle_end -= place

    def _search(self, data: bytes, place: int, hits: dict[bytes, int]) -> int | None:
        """Return the position after the header of the next container, None if more data is needed."""
        for magic in (_FATBIN, _BUNDLE, _COMPRESSED):
            # A magic number that is missing is searched only once: otherwise the time would be quadratic.
            if hits.get(magic, -1) < place:
                at = data.find(magic, place)
                hits[magic] = len(data) if at < 0 else at
        at = min(hits.values())
        if at == len(data):
            kept = len(data) - len(_BUNDLE) + 1  # the last bytes may be the beginning of one
            return kept if kept > place else None
        magic = next(name for name, position in hits.items() if position == at)
        head = {_FATBIN: _CONTAINER, _BUNDLE: _BUNDLE_HEAD, _COMPRESSED: _COMPRESSED_HEAD}[magic]
        if len(data) - at < head.size:
            return at if at > place else None
        fields: tuple[int, ...] = head.unpack_from(data, at)
        if magic == _FATBIN:
            _, version, size, length = fields
            if version == 1 and size == head.size and _ENTRY.size <= length < _FAR:
                self._entries_left = length
                return at + size
        elif magic == _BUNDLE:
            if 0 < fields[1] <= _MOST_ENTRIES:
                self._bundles_left = fields[1]
                self._bundle_start = self._bundle_end = at
                return at + head.size
        elif 0 < fields[1] < 10 and fields[2] in (0, 1):
            size = fields[3] if fields[1] == 3 else fields[3] & 0xFFFFFFFF
            begin = _COMPRESSED_HEADS.get(fields[1])
            if begin is None:
                self.found[(UNREADABLE,)] += 1
            elif head.size <= size < _FAR:
                if len(data) - at < min(size, _WINDOW):
                    return at if at > place else None
                if self._compressed(data[at + begin : at + min(size, _WINDOW)], fields[2]):
                    return at + size
        return at + len(magic)

    def _compressed(self, data: bytes, method: int) -> bool:
        """Read the bundle that begins in `data`; return whether there is one."""
        import zlib

        import zstandard

        try:
            if method == 0:
                text = zlib.decompressobj().decompress(data, _SMALL)
            else:
                text = zstandard.ZstdDecompressor().stream_reader(data).read(_SMALL)
        except (zlib.error, zstandard.ZstdError):
            return False
        inner = GpuCodeScanner()
        inner.feed(text)
        self.found += inner.found
        return bool(inner.found)

    def _entry(self, data: bytes, place: int) -> int | None:
        """Return the position after an entry of a container, None if more data is needed."""
        if len(data) - place < min(_ENTRY.size, self._entries_left):
            return None
        kind = header = payload = number = flags = 0
        if self._entries_left >= _ENTRY.size:
            kind, header, payload, number, flags = _ENTRY.unpack_from(data, place)
        if not _ENTRY.size <= header <= _MOST_HEADER or header + payload > self._entries_left:
            # No container: the constant is in the code of programs that read containers, too.
            self._codes, self._entries_left = set(), 0
            self._entries.clear()
            return place
        start = place + header
        if len(data) - start < min(len(_BLANK), payload):
            return None
        if kind in (_PTX, _ELF) and data[start : start + min(len(_BLANK), payload)].strip(b"\0"):
            suffix = "".join(letter for bit, letter in _SUFFIXES.items() if flags & bit)
            code = f"{'compute' if kind == _PTX else 'sm'}_{number}{suffix}"
            self._codes.add(code)
            self._entries.append((code, self._base + start, payload))
        self._entries_left -= header + payload
        if not self._entries_left:
            if self._each is not None:
                self._each(self._entries)
            self._container_ends()
        return place + header + payload

    def _bundle_entry(self, data: bytes, place: int) -> int | None:
        """Return the position after a row of a bundle's table, or after the bundle; None if more data is needed."""
        if len(data) - place < _BUNDLE_ENTRY.size:
            return None
        fields: tuple[int, int, int] = _BUNDLE_ENTRY.unpack_from(data, place)
        offset, size, length = fields
        if length > _MOST_NAME or max(offset, size) > _FAR:
            self._codes, self._bundles_left = set(), 0
            return place
        following = place + _BUNDLE_ENTRY.size + length
        if following > len(data):
            return None
        if match := _AMD.fullmatch(bytes(data[following - length : following]).decode("utf-8", "replace")):
            self._codes.add(match[1])
        self._bundle_end = max(self._bundle_end, self._bundle_start + offset + size)
        self._bundles_left -= 1
        if self._bundles_left:
            return following
        self._container_ends()
        return max(following, self._bundle_end)

    def _container_ends(self) -> None:
        if self._codes:
            self.found[tuple(sorted(self._codes))] += 1
        self._codes, self._entries = set(), []


def read_gpu_code(stream: IO[bytes], each: Callable[[Sequence[CudaEntry]], None] | None = None) -> Containers:
    """Return the containers in the file `stream`, without reading the code in them. Raises OSError.

    `each` is called with the entries of each container of CUDA.
    """
    scanner = GpuCodeScanner(each)
    while piece := stream.read(_LARGE if scanner.searching else _SMALL):
        scanner.feed(piece)
        if scanner.skip:
            stream.seek(scanner.skip, 1)
            scanner.skip = 0
    return scanner.found
