"""Chips of GPUs by name, the code for GPUs in ELF files, and whether it runs on a chip.

The code is in CUDA's fatbin containers and in Clang's offload bundles (ROCm). Only headers are read, and the first
bytes of the code: `[slim]` leaves zeros in place of some. Whole files are searched, because cuFFT and cuBLASLt have
containers outside of the sections for them. NVIDIA does not document the containers; the fields were compared with
cuobjdump's output (docs/reference/gpus.md). Bundles: the LLVM project's "Clang Offload Bundler".

Sources: data/gpus.toml (chips); NVIDIA's CUDA C++ Programming Guide, "Binary Compatibility" and "PTX Compatibility";
NVIDIA's "Family-Specific Architecture Features"; LLVM's "Target ID" (AMD).
"""

from __future__ import annotations

import functools
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from envbuild.base.toml import closest
from envbuild.data import load_table

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
        self.containers: Containers = Counter()
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
                self.containers[(UNREADABLE,)] += 1
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
        self.containers += inner.containers
        return bool(inner.containers)

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
            self.containers[tuple(sorted(self._codes))] += 1
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
    return scanner.containers


_CUDA_CODE = re.compile(r"(sm|compute)_(\d+)(\d)([af]?)")
GPU_PATTERN = r"^[a-z0-9_:+-]+$"
_CHIP = re.compile(r"sm_\d{2,3}|gfx[0-9]{1,2}[0-9a-f]{2}((?::[a-z]{1,20}[+-]){0,4})")
NATIVE, PTX = "natively", "by PTX"
# In libraries of torch 2.7 to 2.14 and CUDA 12 and 13, 3 % of the containers or more have code for a chip for which the
# library is made, and 0.2 % or less for another (docs/reference/gpus.md).
_FEW = 50
_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Chip:
    """A chip: `name` is sm_90 or gfx90a; `accelerator` is the family of targets, cuda or rocm."""

    name: str
    accelerator: str
    family: str = ""
    names: tuple[str, ...] = ()
    features: str = ""
    generic: tuple[str, ...] = ()


@functools.cache
def load_chips() -> Mapping[str, Chip]:
    """Return all chips by name."""
    chips = {}
    for accelerator in ("cuda", "rocm"):
        table = load_table("gpus")[accelerator]
        for name, row in table["chips"].items():
            names, features = tuple(row["names"]), row.get("features", "")
            chips[name] = Chip(name, accelerator, row["family"], names, features, _generic(name))
    return chips


def _generic(name: str) -> tuple[str, ...]:
    """Return the code for several chips that runs on the chip `name`."""
    return tuple(code for code, chips in load_table("gpus")["rocm"]["generic"].items() if name in chips)


def chips_named(word: str) -> list[Chip]:
    """Return the chips for which `word` stands: a chip, a GPU or a family; [] for an unknown one."""
    chips = load_chips()
    if _CHIP.fullmatch(word):
        name, _, features = word.partition(":")
        known = chips.get(name)
        known = known or Chip(name, "cuda" if name.startswith("sm_") else "rocm", generic=_generic(name))
        modes = {feature[:-1]: feature for feature in f"{known.features}:{features}".split(":") if feature}
        return [replace(known, features=":".join(modes.values()))]
    return [chip for chip in chips.values() if word in (chip.family, *chip.names)]


def gpu_problem(word: str) -> str | None:
    """Return why `word` names no GPU, or None."""
    if chips_named(word):
        return None
    known = {name for chip in load_chips().values() for name in (chip.name, chip.family, *chip.names)}
    close = closest(word.lower(), sorted(known))
    problem = f"{word!r} is no GPU: name a chip (sm_90, gfx90a), a GPU (h100, mi250x) or a family (hopper)"
    return f"{problem}; did you mean {close!r}?" if close else problem


def all_chips(words: Iterable[str]) -> dict[Chip, str]:
    """Return each chip that `words` name, with the word; unknown words are left out."""
    return {chip: word for word in words for chip in chips_named(word)}


def gpu_of(name: str) -> str | None:
    """Return the name in data/gpus.toml of a GPU as a scheduler calls it (`nvidia_h100_80gb_hbm3`), or None."""
    known = {name for chip in load_chips().values() for name in chip.names}
    return next((word for word in re.split(r"[^a-z0-9]+", name.lower()) if word in known), None)


def runs(code: str, chip: Chip) -> str:
    """Return how `code`, as `gpu_code` names it, runs on `chip`: NATIVE, PTX or "" (not at all)."""
    match = _CUDA_CODE.fullmatch(code)
    own = _CUDA_CODE.fullmatch(chip.name)
    if match is None or own is None:
        processor, _, features = code.partition(":")
        if match or own or (processor != chip.name and processor not in chip.generic):
            return ""
        has = {feature[:-1]: feature for feature in chip.features.split(":")}
        return NATIVE if all(has.get(feature[:-1], feature) == feature for feature in features.split(":")) else ""
    kind, major, minor, suffix = match.groups()
    same = major == own[2] and int(minor) <= int(own[3])
    if suffix == "a":
        fits = code.endswith(f"_{own[2]}{own[3]}a")
    elif kind == "sm" or suffix == "f":
        fits = same
    else:
        fits = int(major + minor) <= int(own[2] + own[3])
    return (NATIVE if kind == "sm" else PTX) if fits else ""


def library_runs(containers: Containers, chip: Chip) -> str:
    """Return how a library with these containers runs on `chip`: NATIVE, PTX or "".

    Code for the chip in one of 50 containers or less does not count: the rest of the library fails.
    """
    ways = Counter[str]()
    for codes, count in containers.items():
        here = {runs(code, chip) for code in codes}
        ways[next((way for way in (NATIVE, PTX) if way in here), "")] += count
    enough = ways.total() / _FEW
    return NATIVE if ways[NATIVE] > enough else PTX if ways[NATIVE] + ways[PTX] > enough else ""


def is_judged(containers: Containers, chip: Chip) -> bool:
    """Return whether a library could be read, and is for GPUs of the maker of `chip`."""
    codes = {code for container in containers for code in container}
    return UNREADABLE not in codes and any(code.startswith("gfx") == (chip.accelerator == "rocm") for code in codes)


def is_optional(path: str) -> bool:
    """Return whether only some functions or versions need the library at `path`, so that others run without it."""
    return any(Path(path).name.startswith(row["library"]) for row in load_table("gpus")["optional"])


def gpu_faults(libraries: Mapping[str, Containers], words: Iterable[str], *, optional: bool = False) -> list[str]:
    """Return a sentence for each of `libraries` (by path) that does not run on one of the GPUs in `words`.

    Only required libraries are judged, or with `optional` only optional ones (see `is_optional`).
    """
    return [
        f"{path} has no code for {chip.name}{f' ({word})' if word != chip.name else ''}: it {_has(containers, chip)}"
        for chip, word in all_chips(words).items()
        for path, containers in sorted(libraries.items())
        if is_optional(path) == optional and is_judged(containers, chip) and not library_runs(containers, chip)
    ]


def _has(containers: Containers, chip: Chip) -> str:
    """Describe the code of a library that does not run on `chip`."""
    fitting = sum(count for codes, count in containers.items() if any(runs(code, chip) for code in codes))
    if fitting:
        return f"has some in only {fitting} of {containers.total()} parts"
    codes = {code for container in containers for code in container}
    names = sorted(codes, key=lambda code: ([int(number) for number in re.findall(r"\d+", code)], code))
    ptx = any(code.startswith("compute_") for code in codes)
    why = "" if chip.accelerator == "rocm" else "; its PTX is for others" if ptx else ", and no PTX"
    return f"has {', '.join(names[:_SHOWN])}{', …' if len(names) > _SHOWN else ''}{why}"
