"""Known vulnerabilities of locked packages, from an offline export of OSV's database, and reports of an upgrade.

The export is a folder as OSV publishes it: PyPI/all.zip and Debian/all.zip, each with one JSON file a record
(ossf.github.io/osv-schema, 1.6). Versions are ordered by PEP 440 for PyPI, and by dpkg's rules for Debian's source
packages. OSV has no database of conda packages.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from functools import cmp_to_key
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from envbuild.base.errors import LockError, UsageError, VerificationError
from envbuild.base.files import parse_json
from envbuild.base.text import human_size, normalise, seconds
from envbuild.debian.control import compare_versions
from envbuild.debian.lock import DebianLock
from envbuild.lock.conda import CondaLock
from envbuild.lock.conda_kind import provided
from envbuild.lock.format import Lock
from envbuild.lock.image import ImageLock
from envbuild.recipe.load import LoadedRecipe
from envbuild.site.settings import Site
from envbuild.site.tables import AuditTable
from envbuild.store.fetch import ARCHIVES, WantedWheel, stored_wheel
from envbuild.store.history import METRICS
from envbuild.store.store import Store

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
    """A vulnerability of `package`: its identifier and aliases, one line about it, and the fixed versions."""

    package: AuditedPackage
    id: str
    aliases: tuple[str, ...]
    summary: str
    fixed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AdvisoryDatabase:
    """Advisory records by ecosystem and package name, and the time of the newest record of each zip."""

    records: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]
    newest: Mapping[str, datetime]


@dataclass(frozen=True, slots=True)
class Exemption:
    """An exception of [audit]: the identifier or alias of a vulnerability, the reason, and the last day, None for none.

    `place` says where it is written. It counts for the locks of `recipe`, "" for those of all recipes.
    """

    id: str
    reason: str
    expires: date | None
    place: str
    recipe: str = ""

    def row(self) -> dict[str, str | None]:
        """Return it as plain data."""
        expires = self.expires.isoformat() if self.expires else None
        return {"id": self.id, "reason": self.reason, "expires": expires, "place": self.place}


def exemptions_of(site: Site, recipes: Iterable[LoadedRecipe] = ()) -> list[Exemption]:
    """Return the exceptions in [audit] of a site and of each of `recipes`."""
    origin = site.origin("audit", "exceptions")
    rows = [(name, entry, origin, "") for name, entry in site.audit.exceptions.items()]
    for recipe, loaded in {loaded.recipe.name: loaded for loaded in recipes}.items():
        own = loaded.recipe.audit.exceptions.items()
        rows += [(name, entry, loaded.where("audit", "exceptions", name), recipe) for name, entry in own]
    return [
        Exemption(name, entry.reason, date.fromisoformat(entry.expires), place, recipe)
        for name, entry, place, recipe in rows
    ]


def audited(lock: object) -> tuple[set[AuditedPackage], int]:
    """Return the packages of a lock whose ecosystem OSV covers, and the number of its other packages."""
    if isinstance(lock, CondaLock):
        own = {
            AuditedPackage(PYPI, name, version.partition("+")[0]) for name, version in provided(lock.packages).items()
        }
        return own | audited(lock.pip)[0], len(lock.packages) - len(own)
    if isinstance(lock, Lock):
        versions = lock.versions.items()
        return {AuditedPackage(PYPI, normalise(name), version.partition("+")[0]) for name, version in versions}, 0
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
    """Return a Debian version without the suffix of a binary rebuild, such as +b1 (Debian Policy, 5.6.12)."""
    head, mark, number = version.rpartition("+b")
    return head if mark and number.isdecimal() else version


def read_database(folder: Path, packages: Collection[AuditedPackage]) -> AdvisoryDatabase:
    """Read the records about `packages` from the export in `folder`.

    Raises VerificationError when a required zip is missing or damaged.
    """
    names = {(package.ecosystem, package.name) for package in packages}
    records: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    newest = {}
    for kind in sorted({package.ecosystem.partition(":")[0] for package in packages}):
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
    """Return the vulnerabilities of `packages`, in the packages' order; withdrawn records are left out.

    Raises VerificationError for a record that cannot be read.
    """
    results = []
    for package in packages:
        for record in database.records.get((package.ecosystem, package.name), ()):
            try:
                advisory = _advisory(package, record)
            except (LookupError, TypeError, AttributeError, ValueError) as error:
                raise VerificationError(
                    f"the record {str(record.get('id'))[:80]} of {package.name} cannot be read: {error!r:.100}",
                    _hint(package.ecosystem.partition(":")[0]),
                ) from error
            results += [advisory] if advisory else []
    return results


def _advisory(package: AuditedPackage, record: Mapping[str, Any]) -> Advisory | None:
    """Return the vulnerability in `record` if it affects `package`, else None. A malformed record raises an error."""
    rows = [row for row in record["affected"] if (_ecosystem(row), _name(row)) == (package.ecosystem, package.name)]
    hit = [row for row in rows if _affects(row, package)]
    if record.get("withdrawn") or not hit:
        return None
    text = str(record.get("summary") or record.get("details") or "").strip().partition("\n")[0]
    aliases = tuple(map(str, record.get("aliases") or record.get("upstream") or ()))
    events = [event for row in hit for events in _histories(row) for event in events]
    fixed = sorted({str(event["fixed"]) for event in events if "fixed" in event})
    return Advisory(package, str(record["id"]), aliases, text[:200], tuple(fixed))


def _histories(row: Mapping[str, Any]) -> list[Sequence[Mapping[str, str]]]:
    """Return the events of each range of versions."""
    return [history.get("events") or () for history in row.get("ranges") or () if history.get("type") == "ECOSYSTEM"]


def _affects(row: Mapping[str, Any], package: AuditedPackage) -> bool:
    """Return whether a version is affected, by the evaluation algorithm of OSV's schema.

    A fixed version that cannot be parsed is ignored, so that the package still counts as affected.
    """
    mine = _place(package, package.version)
    versions = row.get("versions") or ()
    if package.version in versions or any(_place(package, version) == mine for version in versions):
        return True
    for events in _histories(row):
        places = [
            (_place(package, str(version)) or (_FIRST if name == "introduced" else None), name)
            for event in events
            for name, version in event.items()
        ]
        affected = False
        for place, name in sorted((place, name) for place, name in places if place is not None):
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
    """Return the sort key of a version in its ecosystem, None for a version that cannot be parsed."""
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
    """Vulnerabilities of the packages of some locks: `advisories`, and those that an exception accepts.

    `expired` are the exceptions that would accept one of the advisories, `unused` those that match no package. `judged`
    is the number of compared packages, `unknown` the number of packages without a database, `newest` the time of the
    newest record in the older of the database's zips.
    """

    advisories: tuple[Advisory, ...]
    accepted: tuple[tuple[Advisory, Exemption], ...]
    expired: tuple[Exemption, ...]
    unused: tuple[Exemption, ...]
    judged: int
    unknown: int
    newest: datetime | None


def audit(locks: Sequence[object], table: AuditTable, now: datetime, exemptions: Sequence[Exemption] = ()) -> LockAudit:
    """Compare the packages of `locks` with the database that `table` configures. Raises as `open_database`."""
    return judge_locks(locks, open_database(locks, table, now), exemptions, now.date())


def open_database(locks: Iterable[object], table: AuditTable, now: datetime) -> AdvisoryDatabase:
    """Read the records about the packages of `locks` from the database that `table` configures.

    Raises UsageError when there is none, VerificationError when it is missing, damaged or older than `max_age`.
    """
    if not table.database:
        raise UsageError(
            "no vulnerability database is set", "give --database FOLDER, or `database` in [audit] of site.toml"
        )
    database = read_database(Path(table.database), {package for lock in locks for package in audited(lock)[0]})
    most = seconds(table.max_age)
    for kind, newest in database.newest.items():
        if most is not None and (now - newest).total_seconds() > most:
            raise VerificationError(
                f"{table.database}/{kind}/all.zip is too old: its newest record is of {newest:%Y-%m-%d}, "
                f"and [audit] max_age is {table.max_age}",
                "copy a new export there; what it does not know yet cannot be found",
            )
    return database


def judge_locks(
    locks: Iterable[object], database: AdvisoryDatabase, exemptions: Sequence[Exemption], today: date
) -> LockAudit:
    """Return the vulnerabilities of the packages of `locks`; `database` must contain their records."""
    packages: dict[str, set[AuditedPackage]] = {}
    unknown = 0
    for lock in locks:
        known, others = audited(lock)
        packages.setdefault(getattr(lock, "recipe", ""), set()).update(known)
        unknown += others
    advisories_found: dict[Advisory, None] = {}
    accepted: dict[tuple[Advisory, Exemption], None] = {}
    matched: dict[Exemption, None] = {}
    for recipe, own in packages.items():
        for advisory in advisories(sorted(own), database):
            names = {advisory.id, *advisory.aliases}
            fitting = [
                exemption for exemption in exemptions if exemption.id in names and exemption.recipe in ("", recipe)
            ]
            valid = next(
                (exemption for exemption in fitting if not exemption.expires or exemption.expires >= today), None
            )
            matched |= dict.fromkeys(fitting)
            if valid is None:
                advisories_found[advisory] = None
            else:
                accepted[advisory, valid] = None
    used = {exemption for _, exemption in accepted}
    return LockAudit(
        tuple(sorted(advisories_found, key=lambda advisory: advisory.package)),
        tuple(accepted),
        tuple(exemption for exemption in matched if exemption not in used),
        tuple(exemption for exemption in exemptions if exemption not in matched),
        len(set().union(*packages.values())),
        unknown,
        min(database.newest.values(), default=None),
    )


@dataclass(frozen=True, slots=True)
class LockChange:
    """Upgraded lock: its recipe, target and kind, its changes as lines, and the lock before and after.

    `limits` say which files were left out as too new.
    """

    recipe: str
    target: str
    kind: str
    lines: Sequence[str]
    before: object
    after: object
    limits: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class VerifiedUpgrade:
    """Receipts and sizes (bytes) of the environments built from the old and the new lock; None if not built."""

    recipe: str
    target: str
    before: tuple[Mapping[str, Any], int] | None
    after: tuple[Mapping[str, Any], int] | None


@dataclass(frozen=True, slots=True)
class UpgradeReport:
    """Changes of one run of `envbuild lock`, for reviewers; `faults` are errors of the vulnerability database.

    `extensions` are lines about extensions that do not load with the locked torch, or may not.
    """

    changes: list[LockChange] = field(default_factory=list)
    verified: list[VerifiedUpgrade] = field(default_factory=list)
    faults: list[VerificationError] = field(default_factory=list)
    extensions: list[str] = field(default_factory=list)

    def render(self, table: AuditTable, store: Store, exemptions: Sequence[Exemption] = ()) -> str:
        """Return the report in Markdown; with a database, the vulnerabilities before and after.

        Sizes of wheels and conda packages are those of the files in `store`. An unusable database is added to
        the `faults`: the locks have changed already, and only the report lists the changes.
        """
        text = ["# Upgraded locks", ""]
        changed = [lock_change for lock_change in self.changes if lock_change.lines]
        if not changed:
            text += ["Nothing changed.", ""]
        for change in changed:
            text += [
                f"## {change.recipe}, {change.target}: {change.kind}",
                "",
                "| package | before | after | size |",
                "| --- | --- | --- | --- |",
            ]
            sizes = [sizes_of(lock, store) for lock in (change.before, change.after)]
            text += [_row(line, *sizes) for line in change.lines]
            text.append("")
            if overrides := _overrides(change.after):
                text += [
                    f"Overridden, whatever packages ask for: {', '.join(f'`{override}`' for override in overrides)}.",
                    "",
                ]
            if change.limits:
                text += [f"By their age, {'; '.join(change.limits)}.", ""]
        if self.extensions:
            text += ["## Extensions of torch", "", *(f"- {line}" for line in self.extensions), ""]
        for verified in self.verified:
            text += _verified(verified)
        if table.database:
            try:
                text += self._vulnerabilities(table, exemptions)
            except VerificationError as error:
                self.faults.append(error)
                text += [f"**Known vulnerabilities could not be looked up: {error.message}**", ""]
        else:
            text += ["Known vulnerabilities were not looked up: [audit] of the site names no database.", ""]
        return "\n".join(text)

    def _vulnerabilities(self, table: AuditTable, exemptions: Sequence[Exemption]) -> list[str]:
        old, new_locks = (
            [change.before for change in self.changes if change.before],
            [change.after for change in self.changes],
        )
        now = datetime.now(UTC)
        database = open_database([*old, *new_locks], table, now)
        before, after = (judge_locks(locks, database, exemptions, now.date()) for locks in (old, new_locks))
        text = ["## Known vulnerabilities", ""]
        if after.newest:
            text += [
                f"Of {after.judged} packages, by a database of {after.newest:%Y-%m-%d}; {after.unknown} others are "
                "not covered by it.",
                "",
            ]
        mended, new = _without(before.advisories, after.advisories), _without(after.advisories, before.advisories)
        left = _without(after.advisories, new)
        for title, those in (("Mended", mended), ("New", new), ("Left", left)):
            text += [f"**{title}: {len(those)}**", ""]
            text += [f"- {_said(advisory)}" for advisory in those] + ([""] if those else [])
        lines = [f"- {advisory.package.name}: {accepted_line(exemption)}" for advisory, exemption in after.accepted]
        lines += [f"- {expired_line(exemption)}" for exemption in after.expired]
        if lines:
            text += [f"**Exceptions: {len(lines)}**", "", *lines, ""]
        return text


def accepted_line(exemption: Exemption) -> str:
    """Return an exception that counts, with its reason and its last day."""
    until = f" until {exemption.expires}" if exemption.expires else ""
    return f"{exemption.id} is accepted{until}: {exemption.reason} ({exemption.place})"


def expired_line(exemption: Exemption) -> str:
    """Return that an exception no longer counts."""
    return f"the exception of {exemption.id} expired on {exemption.expires}: {exemption.reason} ({exemption.place})"


def _overrides(lock: object) -> tuple[str, ...]:
    wheel_lock = lock.pip if isinstance(lock, CondaLock) else lock
    return wheel_lock.overrides if isinstance(wheel_lock, Lock) else ()


def _without(those: Sequence[Advisory], others: Collection[Advisory]) -> list[Advisory]:
    known = {(advisory.package.name, advisory.id) for advisory in others}
    return [advisory for advisory in those if (advisory.package.name, advisory.id) not in known]


def _row(line: str, before: Mapping[str, int], after: Mapping[str, int]) -> str:
    """Return the table row for a change such as `~ numpy 1.0 -> 2.0` (see `package_changes`), with package sizes."""
    sign, _, rest = line.partition(" ")
    name, _, versions = rest.partition(" ")
    old, arrow, new = versions.partition(" -> ")
    cells = {"+": (name, "", versions), "-": (name, versions, "")}.get(sign)
    cells = cells or ((name, old, new) if arrow else (name, versions, versions))
    known = dict.fromkeys(human_size(table[name]) for table in (before, after) if name in table)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in (*cells, " → ".join(known))) + " |"


def sizes_of(lock: object, store: Store) -> dict[str, int]:
    """Return name → size (bytes) for the locked packages whose size is in the lock or in `store`."""
    if isinstance(lock, CondaLock):
        files = {
            package.name: store.find(ARCHIVES, package.sha256, package.file_name.__eq__) for package in lock.packages
        }
        own = {package.name: package.size for package in lock.packages if package.size}
        own |= {name: path.stat().st_size for name, path in files.items() if path}
        return own | sizes_of(lock.pip, store)
    if isinstance(lock, Lock):
        wheels = [WantedWheel(package.name, package.version, frozenset(package.hashes)) for package in lock.packages]
        return {wheel.name: path.stat().st_size for wheel in wheels if (path := stored_wheel(wheel, store))}
    if isinstance(lock, ImageLock) and isinstance(lock.base, DebianLock):
        return {deb.name: deb.size for deb in lock.base.packages}
    return {}


def _verified(upgrade: VerifiedUpgrade) -> list[str]:
    rows: dict[str, Callable[[Mapping[str, Any], int], str]] = {
        "verification": lambda receipt, _: _outcome(receipt),
        "loss by epoch": lambda receipt, _: ", ".join(f"{loss:.6g}" for loss in _losses(receipt)),
        "size of all files": lambda _, size: human_size(size),
    }
    text = [f"## {upgrade.recipe}, {upgrade.target}: verified", "", "| | before | after |", "| --- | --- | --- |"]
    for title, show in rows.items():
        cells = ["" if each is None else show(*each) for each in (upgrade.before, upgrade.after)]
        text.append(f"| {title} | {' | '.join(cells)} |")
    figures = [each[0].get("performance", {}) if each else {} for each in (upgrade.before, upgrade.after)]
    for name, metric in METRICS.items():
        cells = [metric.show(each[name]) if name in each else "" for each in figures]
        text += [f"| {metric.title} | {' | '.join(cells)} |"] if any(cells) else []
    return [*text, ""]


def _outcome(receipt: Mapping[str, Any]) -> str:
    failed = [check["name"] for check in receipt["checks"] if check["status"] in ("fail", "blocked")]
    return f"**failed**: {', '.join(failed)}" if failed or not receipt["passed"] else "passed"


def _losses(receipt: Mapping[str, Any]) -> Sequence[float]:
    evidence = next((check["evidence"] for check in receipt["checks"] if check["name"] == "curve"), None) or {}
    return evidence.get("losses") or ()


def _said(advisory: Advisory) -> str:
    fixed = f"; mended in {', '.join(advisory.fixed)}" if advisory.fixed else "; no version mends it yet"
    names = f" ({', '.join(advisory.aliases)})" if advisory.aliases else ""
    return f"{advisory.package.name} {advisory.package.version}: {advisory.id}{names}: {advisory.summary}{fixed}"
