"""Chips of GPUs by name, and whether code for GPUs runs on them.

Sources: data/gpus.toml (chips); NVIDIA's CUDA C++ Programming Guide, "Binary Compatibility" and "PTX Compatibility";
NVIDIA's "Family-Specific Architecture Features"; LLVM's "Target ID" (AMD).
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from envbuild.base.toml.decode import closest
from envbuild.data import load_table
from envbuild.gpu_code import UNREADABLE, Containers

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
        modes = {one[:-1]: one for one in f"{known.features}:{features}".split(":") if one}
        return [replace(known, features=":".join(modes.values()))]
    return [one for one in chips.values() if word in (one.family, *one.names)]


def gpu_problem(word: str) -> str | None:
    """Return why `word` names no GPU, or None."""
    if chips_named(word):
        return None
    known = {name for one in load_chips().values() for name in (one.name, one.family, *one.names)}
    close = closest(word.lower(), sorted(known))
    what = f"{word!r} is no GPU: name a chip (sm_90, gfx90a), a GPU (h100, mi250x) or a family (hopper)"
    return f"{what}; did you mean {close!r}?" if close else what


def all_chips(words: Iterable[str]) -> dict[Chip, str]:
    """Return each chip that `words` name, with the word; unknown words are left out."""
    return {chip: word for word in words for chip in chips_named(word)}


def gpu_of(name: str) -> str | None:
    """Return the name in data/gpus.toml of a GPU as a scheduler calls it (`nvidia_h100_80gb_hbm3`), or None."""
    known = {one for chip in load_chips().values() for one in chip.names}
    return next((one for one in re.split(r"[^a-z0-9]+", name.lower()) if one in known), None)


def runs(code: str, chip: Chip) -> str:
    """Return how `code`, as `gpu_code` names it, runs on `chip`: NATIVE, PTX or "" (not at all)."""
    match = _CUDA_CODE.fullmatch(code)
    own = _CUDA_CODE.fullmatch(chip.name)
    if match is None or own is None:
        processor, _, features = code.partition(":")
        if match or own or (processor != chip.name and processor not in chip.generic):
            return ""
        has = {one[:-1]: one for one in chip.features.split(":")}
        return NATIVE if all(has.get(one[:-1], one) == one for one in features.split(":")) else ""
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
    codes = {code for one in containers for code in one}
    return UNREADABLE not in codes and any(code.startswith("gfx") == (chip.accelerator == "rocm") for code in codes)


def is_optional(path: str) -> bool:
    """Return whether only some functions or versions need the library at `path`, so that others run without it."""
    return any(Path(path).name.startswith(one["library"]) for one in load_table("gpus")["optional"])


def gpu_faults(libraries: Mapping[str, Containers], words: Iterable[str], *, optional: bool = False) -> list[str]:
    """Return a sentence for each of `libraries` (by path) that does not run on one of the GPUs that `words` name.

    They are those that everything needs, or with `optional` the others.
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
    codes = {code for one in containers for code in one}
    names = sorted(codes, key=lambda code: ([int(number) for number in re.findall(r"\d+", code)], code))
    ptx = any(code.startswith("compute_") for code in codes)
    why = "" if chip.accelerator == "rocm" else "; its PTX is for others" if ptx else ", and no PTX"
    return f"has {', '.join(names[:_SHOWN])}{', …' if len(names) > _SHOWN else ''}{why}"
