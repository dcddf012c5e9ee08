"""Data about Debian, from data/debian.toml."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from envbuild.base.errors import RecipeError
from envbuild.data import load_table

_TRIPLETS = ("x86_64-linux-gnu", "aarch64-linux-gnu")
_FILE = Path(__file__).resolve().parents[1] / "data" / "debian.toml"


@dataclass(frozen=True, slots=True)
class TreeRules:
    """Rules for the tree of a base image.

    `drop` and `keep` match whole paths to leave out and to keep. The others replace maintainer scripts: `copies` maps
    target → source, `links` path → text, `folders` path → (mode, gid), `alternatives` path → files, best first.
    """

    drop: re.Pattern[str]
    keep: re.Pattern[str]
    copies: Mapping[str, str]
    links: Mapping[str, str]
    folders: Mapping[str, tuple[int, int]]
    alternatives: Mapping[str, tuple[str, ...]]


def default_packages(suite: str, *, python: bool = True) -> tuple[str, ...]:
    """Return the packages of a base of `suite`; `python` adds Python. Raises RecipeError for a suite without data."""
    data = load_table("debian")
    if suite not in data["suites"]:
        known = " and ".join(sorted(data["suites"]))
        raise RecipeError(f"unknown Debian release {suite!r}; known are {known}", f"choose one of {known}")
    own = data["suites"][suite]["python"] if python else []
    return tuple(sorted(data["base"]["packages"] + own))


def default_without() -> tuple[str, ...]:
    """Return the packages that a base omits because only maintainer scripts need them."""
    return tuple(load_table("debian")["base"]["without"])


@lru_cache(maxsize=1)
def load_rules() -> TreeRules:
    """Return the rules for the tree of a base."""
    slim, made = load_table("debian")["slim"], load_table("debian")["made"]
    folders = {path: (mode, gid) for path, (mode, gid) in made["folders"].items()}
    alternatives = {
        path.format(triplet=triplet): tuple(name.format(triplet=triplet) for name in names)
        for path, names in made["alternatives"].items()
        for triplet in _TRIPLETS
    }
    return TreeRules(_any_of(slim["drop"]), _any_of(slim["keep"]), made["copies"], made["links"], folders, alternatives)


def _any_of(globs: list[str]) -> re.Pattern[str]:
    # A "*" at the end matches everything below, any other "*" matches within one name.
    texts = []
    for glob in globs:
        text = re.escape(glob.removesuffix("*")).replace(r"\*", "[^/]+")
        texts.append(text + (".+" if glob.endswith("*") else ""))
    return re.compile("|".join(texts))


def newest_suite() -> str:
    """Return the suite with the newest glibc, for bases that do not need Debian's Python."""
    return str(load_table("debian")["base"]["newest"])


def suites_by_python() -> dict[str, str]:
    """Return Python version → suite."""
    minimal = re.compile(r"python(\d+\.\d+)-minimal")
    suites = load_table("debian")["suites"].items()
    return {m[1]: suite for suite, table in suites for name in table["python"] if (m := minimal.fullmatch(name))}


def rules_digest() -> str:
    """Return the digest of the whole data file, an input of the digest of a base."""
    return hashlib.sha256(_FILE.read_bytes()).hexdigest()
