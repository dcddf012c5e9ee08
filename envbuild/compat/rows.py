"""Rows of data/compatibility.toml and data/releases.toml, and findings that rest on them.

The comments of both files explain the columns."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeVar, get_args, get_type_hints

from envbuild.data import load_table
from envbuild.fabrics import Fabric, frozen

_RELEASE = re.compile(r"v?([0-9]{1,9}(?:\.[0-9]{1,9})*)(.*)", re.DOTALL | re.IGNORECASE)
_BEFORE = re.compile(r"[-_.]?(a|b|c|rc|alpha|beta|pre|preview|dev)[-_.]?[0-9]*(?![a-z])", re.IGNORECASE)
_CLAUSE = re.compile(r"\s*(==|!=|>=|<=|>|<)\s*(\S+)\s*")

# Release numbers without trailing zeros; 0 for a pre-release, else 1.
Key = tuple[tuple[int, ...], int]


def key(version: str) -> Key | None:
    """Return the sort key of a version, or None if it does not begin with a number."""
    match = _RELEASE.fullmatch(version.strip())
    if match is None:
        return None
    numbers = [int(part) for part in match[1].split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers), 0 if _BEFORE.match(match[2]) else 1


def older(version: str, than: str) -> bool | None:
    """Return whether `version` precedes `than`, or None if one of them is not a version."""
    first, second = key(version), key(than)
    return None if first is None or second is None else first < second


def matches(version: str, specifier: str) -> bool | None:
    """Return whether `version` satisfies `specifier` (">=1.14,<1.15"), or None if one of them is malformed.

    As in PEP 440, "<1.15" excludes pre-releases of 1.15, which resemble 1.15 more than the releases before it.
    """
    release = key(version)
    if release is None:
        return None
    for clause in specifier.split(","):
        parts = _CLAUSE.fullmatch(clause)
        limit = key(parts[2]) if parts else None
        if parts is None or limit is None:
            return None
        holds = {
            "==": release == limit,
            "!=": release != limit,
            ">=": release >= limit,
            "<=": release <= limit,
            ">": release > limit,
            "<": release < limit and release != (limit[0], 0),
        }[parts[1]]
        if not holds:
            return False
    return True


# In place of a value that no source states.
UNKNOWN = "unknown"
Status = Literal["good", "bad", "unknown", "note"]
LOOK_IT_UP = "look it up with the project; docs/reference/compatibility.md says how to add a row"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Row of the data: its `source`, and the `date` (ISO 8601) on which the source was read."""

    source: str
    date: str


@dataclass(frozen=True, slots=True)
class Driver(Row):
    """Oldest driver (`minimum`) that runs the CUDA versions `cuda`."""

    cuda: str
    minimum: str


@dataclass(frozen=True, slots=True)
class NcclPin(Row):
    """NCCL version that the torch versions `torch` pin when they are built for one of `cuda`."""

    torch: str
    cuda: tuple[str, ...]
    nccl: str


@dataclass(frozen=True, slots=True)
class Rccl(Row):
    """NCCL version that the RCCL of the ROCm versions `rocm` is based on: torch for ROCm contains that RCCL."""

    rocm: str
    nccl: str


@dataclass(frozen=True, slots=True)
class Release(Row):
    """Row about the releases `versions` of one project."""

    versions: str


@dataclass(frozen=True, slots=True)
class TorchBuild(Release):
    """CUDA versions that the torch wheels of `versions` are built for on `arch`.

    `default` is the CUDA version of the default index's plain wheel, "cpu" for a wheel without CUDA, "" if unknown.
    `glibc` ("2.28") and `nccl` ("wheel", "inside") are also "" if unknown. The data file explains the columns.
    """

    arch: str
    cuda: tuple[str, ...]
    complete: bool = False
    default: str = ""
    glibc: str = ""
    nccl: str = ""


@dataclass(frozen=True, slots=True)
class TorchRocm(Release):
    """ROCm versions that the torch wheels of `versions` are built for; the list may be incomplete."""

    rocm: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Nccl(Release):
    """Versions of the net API that the NCCL `versions` look for in a plugin."""

    apis: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plugin(Release):
    """aws-ofi-nccl of `versions`: its net APIs, the libfabric that it compiles with, the file that NCCL opens."""

    apis: tuple[int, ...]
    libfabric: str
    library: str


@dataclass(frozen=True, slots=True)
class Libfabric(Release):
    """libfabric of `versions`: the providers in its source, and its newest symbol version."""

    providers: tuple[str, ...]
    symbol: str


@dataclass(frozen=True, slots=True)
class TorchRelease(Row):
    """Wheels of one release of torch for `arch`, as read by tools/refresh; unreadable values are UNKNOWN.

    `cuda` is the plain wheel's version, "cpu" for none; `nccl`, `cudnn` and `triton` are "" if not required.
    """

    version: str
    arch: str
    cuda: str
    python: tuple[str, ...]
    glibc: str
    nccl: str
    cudnn: str
    triton: str
    builds: tuple[str, ...] = (UNKNOWN,)
    code: dict[str, list[str]] = field(default_factory=dict)

    @property
    def build(self) -> TorchBuild:
        """Release as a TorchBuild row, which may be incomplete."""
        cuda = tuple(
            build_name for build_name in dict.fromkeys((*self.builds, self.cuda)) if build_name not in (UNKNOWN, "cpu")
        )
        nccl = "wheel" if self.nccl not in ("", UNKNOWN) else ""
        versions, (default, glibc) = f"=={self.version}", (_stated(self.cuda), _stated(self.glibc))
        return TorchBuild(versions, self.arch, cuda, False, default, glibc, nccl, source=self.source, date=self.date)


def _stated(value: str) -> str:
    return "" if value == UNKNOWN else value


@dataclass(frozen=True, slots=True)
class PackageRelease(Row):
    """A release of another package: the torch (">=2.4", "" for none) and Python that it requires.

    `wheels` are the CPythons that have a wheel, () if all have one.
    """

    name: str
    version: str
    requires_python: str
    torch: str
    wheels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CompatRule(Row):
    """Known incompatible combination: a stack that matches all of `when`. `fix` is the advised change."""

    id: str
    subject: str
    when: dict[str, str]
    reason: str
    fix: str
    status: Literal["bad", "unknown"] = "bad"


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of data/compatibility.toml by kind, and `releases`, `packages` and the day `read` of data/releases.toml."""

    drivers: tuple[Driver, ...] = ()
    torch: tuple[TorchBuild, ...] = ()
    torch_rocm: tuple[TorchRocm, ...] = ()
    rccl: tuple[Rccl, ...] = ()
    nccl_pins: tuple[NcclPin, ...] = ()
    nccl: tuple[Nccl, ...] = ()
    plugins: tuple[Plugin, ...] = ()
    libfabric: tuple[Libfabric, ...] = ()
    rules: tuple[CompatRule, ...] = ()
    releases: tuple[TorchRelease, ...] = ()
    packages: tuple[PackageRelease, ...] = ()
    read: str = ""

    def torch_build(self, torch: str, arch: str) -> TorchBuild | None:
        """Return the row of torch's builds for `arch`: the curated row, which lists all builds, else the release's."""
        if row := row_of((row for row in self.torch if row.arch == arch), torch):
            return row
        release = self.release(torch, arch)
        return release.build if release else None

    def release(self, torch: str, arch: str) -> TorchRelease | None:
        """Return the release of torch for `arch`."""
        release_key = key(torch)
        return next((row for row in self.releases if row.arch == arch and key(row.version) == release_key), None)

    def pin(self, torch: str, cuda: str) -> NcclPin | None:
        """Return the row with the NCCL that `torch` for CUDA `cuda` pins."""
        if row := next((row for row in self.nccl_pins if cuda in row.cuda and matches(torch, row.torch)), None):
            return row
        releases = (self.release(torch, arch) for arch in ("x86_64", "aarch64"))
        release = next((row for row in releases if row and row.cuda == cuda and _stated(row.nccl)), None)
        if release is None:
            return None
        return NcclPin(f"=={release.version}", (cuda,), release.nccl, source=release.source, date=release.date)

    @property
    def by_hand(self) -> str:
        """Day (ISO 8601) of the newest curated row."""
        tables = (self.drivers, self.torch, self.torch_rocm, self.rccl, self.nccl_pins, self.nccl, self.plugins)
        return max(row.date for table in (*tables, self.libfabric, self.rules) for row in table)

    @property
    def newest_torch(self) -> str:
        """Newest release of torch that has a row."""
        return max((row.version for row in self.releases), key=lambda version: key(version) or ((), 0), default="")

    def is_newer(self, torch: str) -> bool:
        """Return whether `torch` is newer than every release that has a row."""
        return bool(self.newest_torch) and older(self.newest_torch, torch) is True

    def rccl_of(self, rocm: str) -> Rccl | None:
        """Return the row of the RCCL that comes with ROCm `rocm`."""
        return next((row for row in self.rccl if matches(rocm, row.rocm)), None)


R = TypeVar("R", bound=Release)


def row_of(rows: Iterable[R], version: str | None) -> R | None:
    """Return the row of `rows` about the release `version`, or None without a release."""
    return next((row for row in rows if version and matches(version, row.versions)), None)


@functools.cache
def load_rows() -> Rows:
    """Return the rows of data/compatibility.toml and data/releases.toml."""
    kinds = {name: get_args(hint)[0] for name, hint in get_type_hints(Rows).items() if name != "read"}
    releases = load_table("releases")
    tables = {**load_table("compatibility"), "releases": releases["torch"], "packages": releases["packages"]}
    rows: dict[str, Any] = {
        name: tuple(kinds[name](**frozen(row) | {"date": str(row["date"])}) for row in table)
        for name, table in tables.items()
    }
    return Rows(**rows, read=releases["read"].isoformat())


@dataclass(frozen=True, slots=True)
class CompatFinding:
    """Result of a check of one pair of parts of the stack.

    "good" and "bad" are based on `source`, "unknown" means that the data have no row, a "note" is information.
    `fix` is the advised change, `date` (ISO 8601) the day when the source was read.
    """

    status: Status
    subject: str
    text: str
    fix: str = ""
    source: str = ""
    date: str = ""

    def as_json(self) -> dict[str, str]:
        """Return the finding as `envbuild check --json` prints it."""
        return asdict(self)


def finding(status: Status, subject: str, text: str, fix: str = "", *, by: Row | Fabric | None = None) -> CompatFinding:
    """Return a finding with the source and date of the row `by`."""
    return CompatFinding(status, subject, text, fix, by.source if by else "", by.date if by else "")
