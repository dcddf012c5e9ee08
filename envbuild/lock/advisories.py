"""Known vulnerabilities of locked packages, from an offline export of OSV's database.

The export is a folder as OSV publishes it: PyPI/all.zip and Debian/all.zip, each with one JSON file a record
(ossf.github.io/osv-schema, 1.6). Packages of PyPI are compared by PEP 440, Debian's source packages by dpkg's order.
Conda packages are in no database of OSV's.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cmp_to_key
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from envbuild.base.errors import LockError, UsageError, VerificationError
from envbuild.base.files import parse_json
from envbuild.base.text import normalise, seconds
from envbuild.debian.control import compare_versions
from envbuild.debian.lock import DebianLock
from envbuild.lock.conda import CondaLock
from envbuild.lock.format import Lock
from envbuild.lock.image import ImageLock
from envbuild.site.tables import AuditTable

PYPI, DEBIAN = "PyPI", "Debian"
_MOST = 8 << 20  # bytes of a record
_DAMAGE = (OSError, zipfile.BadZipFile, zlib.error, ValueError, RuntimeError, NotImplementedError)
# Debian's releases in the names of OSV's ecosystems (wiki.debian.org/DebianReleases, 2026-11-24).
_RELEASES = {"bullseye": "11", "bookworm": "12", "trixie": "13", "forky": "14"}
_ORDER = cmp_to_key(compare_versions)


@dataclass(frozen=True, slots=True, order=True)
class AuditedPackage:
    """A locked package as OSV knows it: its ecosystem ("PyPI", "Debian:12"), its name there, its version."""

    ecosystem: str
    name: str
    version: str


@dataclass(frozen=True, slots=True)
class Advisory:
    """A vulnerability of `package`: its identifier and aliases, one line about it, and the versions that mend it."""

    package: AuditedPackage
    id: str
    aliases: tuple[str, ...]
    summary: str
    fixed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AdvisoryDatabase:
    """The records that concern some packages, by ecosystem and name, and the time of the newest record of each zip."""

    records: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]
    newest: Mapping[str, datetime]


def audited(lock: object) -> tuple[set[AuditedPackage], int]:
    """Return the packages of a lock of any kind that OSV may know, and the number of the others."""
    if isinstance(lock, CondaLock):
        pip, _ = audited(lock.pip)
        return pip, len(lock.packages)
    if isinstance(lock, Lock):
        rows = [(one.name, one.version) for one in lock.packages]
        rows += [(one.name, one.version) for one in lock.built]
        return {AuditedPackage(PYPI, normalise(name), version.partition("+")[0]) for name, version in rows}, 0
    if isinstance(lock, ImageLock) and isinstance(lock.base, DebianLock):
        release = _RELEASES.get(lock.base.suite)
        if release is None:
            return set(), len(lock.base.packages)
        # pool/main/g/glibc/libc6_2.36-9_amd64.deb: the folder is the source package.
        packages = {
            AuditedPackage(f"{DEBIAN}:{release}", deb.path.split("/")[-2], _without_rebuild(deb.version))
            for deb in lock.base.packages
        }
        return packages, 0
    return set(), 1  # an existing image: its packages are not locked


def _without_rebuild(version: str) -> str:
    """Return the version of the source of a package that Debian rebuilt (Debian policy, 5.6.12)."""
    head, mark, number = version.rpartition("+b")
    return head if mark and number.isdecimal() else version


def read_database(folder: Path, wanted: Collection[AuditedPackage]) -> AdvisoryDatabase:
    """Read the records that concern `wanted` from the export in `folder`.

    Raises VerificationError when a zip that is needed is missing or damaged.
    """
    names = {(one.ecosystem, one.name) for one in wanted}
    records: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    newest = {}
    for kind in sorted({one.ecosystem.partition(":")[0] for one in wanted}):
        path, latest = folder / kind / "all.zip", datetime.min.replace(tzinfo=UTC)
        try:
            for record in _records(path):
                latest = max(latest, datetime.fromisoformat(record["modified"]).astimezone(UTC))
                for place in {(_ecosystem(row), _name(row)) for row in record.get("affected") or ()} & names:
                    records.setdefault(place, []).append(record)
        except FileNotFoundError:
            raise VerificationError(f"{path} does not exist", _hint(kind)) from None
        except (*_DAMAGE, KeyError, TypeError, AttributeError) as error:
            raise VerificationError(f"{path} cannot be read: {error!r:.100}", _hint(kind)) from error
        newest[kind] = latest
    return AdvisoryDatabase(records, newest)


def _hint(kind: str) -> str:
    return f"copy OSV's export of {kind} there: https://osv-vulnerabilities.storage.googleapis.com/{kind}/all.zip"


def _records(path: Path) -> Iterator[Mapping[str, Any]]:
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            if member.filename.endswith(".json"):
                if member.file_size > _MOST:
                    raise ValueError(f"{member.filename} has {member.file_size} bytes")
                yield parse_json(archive.read(member))


def _ecosystem(row: Mapping[str, Any]) -> str:
    return str((row.get("package") or {}).get("ecosystem", ""))


def _name(row: Mapping[str, Any]) -> str:
    name = str((row.get("package") or {}).get("name", ""))
    return normalise(name) if _ecosystem(row) == PYPI else name


def advisories(packages: Iterable[AuditedPackage], database: AdvisoryDatabase) -> list[Advisory]:
    """Return the vulnerabilities of `packages`, in their order; records that were withdrawn are left out.

    Raises VerificationError for a record that cannot be read.
    """
    found = []
    for package in packages:
        for record in database.records.get((package.ecosystem, package.name), ()):
            try:
                advisory = _advisory(package, record)
            except (LookupError, TypeError, AttributeError, ValueError) as error:
                raise VerificationError(
                    f"the record {str(record.get('id'))[:80]} of {package.name} cannot be read: {error!r:.100}",
                    _hint(package.ecosystem.partition(":")[0]),
                ) from error
            found += [advisory] if advisory else []
    return found


def _advisory(package: AuditedPackage, record: Mapping[str, Any]) -> Advisory | None:
    """Return the vulnerability of `record` if `package` has it. Raises the errors of a malformed record."""
    rows = [row for row in record["affected"] if (_ecosystem(row), _name(row)) == (package.ecosystem, package.name)]
    hit = [row for row in rows if _affects(row, package)]
    if record.get("withdrawn") or not hit:
        return None
    text = str(record.get("summary") or record.get("details") or "").strip().partition("\n")[0]
    aliases = tuple(map(str, record.get("aliases") or record.get("upstream") or ()))
    fixed = sorted({str(event["fixed"]) for row in hit for event in _events(row) if "fixed" in event})
    return Advisory(package, str(record["id"]), aliases, text[:200], tuple(fixed))


def _events(row: Mapping[str, Any]) -> list[Mapping[str, str]]:
    ranges = [one for one in row.get("ranges") or () if one.get("type") == "ECOSYSTEM"]
    return [event for one in ranges for event in one.get("events") or ()]


def _affects(row: Mapping[str, Any], package: AuditedPackage) -> bool:
    """Return whether a version is affected, by the evaluation algorithm of OSV's schema.

    A version that cannot be understood ends no range: what is not known to be mended counts as affected.
    """
    mine = _place(package, package.version)
    versions = row.get("versions") or ()
    if package.version in versions or any(_place(package, one) == mine for one in versions):
        return True
    for one in row.get("ranges") or ():
        if one.get("type") != "ECOSYSTEM":
            continue
        events = [
            (_place(package, str(version)) or (_FIRST if name == "introduced" else None), name)
            for event in one.get("events") or ()
            for name, version in event.items()
        ]
        affected = False
        for place, name in sorted((place, name) for place, name in events if place is not None):
            if mine is None or mine >= place:
                if name == "introduced" or mine is None:
                    affected = True
                elif name == "fixed" or (name == "last_affected" and mine > place):
                    affected = False
        if affected:
            return True
    return False


_FIRST = (0,)  # before every version: OSV's "0"


def _place(package: AuditedPackage, version: str) -> tuple[Any, ...] | None:
    """Return what orders a version among those of its package, None for one that cannot be understood."""
    if version == "0":
        return _FIRST
    try:
        return 1, Version(version) if package.ecosystem == PYPI else _debian(version)
    except (InvalidVersion, LockError):
        return None


def _debian(version: str) -> Any:
    compare_versions(version, "0")
    return _ORDER(version)


@dataclass(frozen=True, slots=True)
class LockAudit:
    """The vulnerabilities of some locks' packages, without those in `ignored`.

    `judged` is the number of packages that were compared, `unknown` of those that no database has, `newest` the time of
    the database's newest record, by its older zip.
    """

    found: tuple[Advisory, ...]
    ignored: tuple[Advisory, ...]
    judged: int
    unknown: int
    newest: datetime | None


def audit(locks: Sequence[object], table: AuditTable, now: datetime) -> LockAudit:
    """Compare the packages of `locks` with the database of `table`. Raises as `open_database`."""
    return judge_locks(locks, open_database(locks, table, now), table)


def open_database(locks: Iterable[object], table: AuditTable, now: datetime) -> AdvisoryDatabase:
    """Read what the database of `table` has of the packages of `locks`.

    Raises UsageError when there is none, VerificationError when it is missing, damaged or older than `max_age`.
    """
    if not table.database:
        raise UsageError(
            "no database of vulnerabilities is named", "give --database FOLDER, or `database` in [audit] of site.toml"
        )
    database = read_database(Path(table.database), {one for lock in locks for one in audited(lock)[0]})
    most = seconds(table.max_age)
    for kind, newest in database.newest.items():
        if most is not None and (now - newest).total_seconds() > most:
            raise VerificationError(
                f"{table.database}/{kind}/all.zip is too old: its newest record is of {newest:%Y-%m-%d}, "
                f"and [audit] max_age is {table.max_age}",
                "copy a new export there; what it does not know yet cannot be found",
            )
    return database


def judge_locks(locks: Iterable[object], database: AdvisoryDatabase, table: AuditTable) -> LockAudit:
    """Return the vulnerabilities of the packages of `locks`, of which `database` has the records."""
    packages: set[AuditedPackage] = set()
    unknown = 0
    for lock in locks:
        known, others = audited(lock)
        packages |= known
        unknown += others
    found = advisories(sorted(packages), database)
    ignored = [one for one in found if not {one.id, *one.aliases}.isdisjoint(table.ignore)]
    left = tuple(one for one in found if one not in ignored)
    return LockAudit(left, tuple(ignored), len(packages), unknown, min(database.newest.values(), default=None))
