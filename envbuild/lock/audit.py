"""The audit of locks against a site's database of vulnerabilities, and reports of what an upgrade changes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from envbuild.errors import UsageError, VerificationError
from envbuild.lock.advisories import Advisory, AdvisoryDatabase, AuditedPackage, advisories, audited, read_database
from envbuild.site.tables import AuditTable
from envbuild.units import seconds


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


@dataclass(frozen=True, slots=True)
class LockChange:
    """An upgraded lock: its recipe, target and kind, the lines of its changes, and the locks before and after."""

    recipe: str
    target: str
    kind: str
    lines: Sequence[str]
    before: object
    after: object


@dataclass(frozen=True, slots=True)
class UpgradeReport:
    """What a run of `envbuild lock` changed, for people who review it."""

    changes: list[LockChange] = field(default_factory=list)

    def render(self, table: AuditTable) -> str:
        """Return the report in Markdown; with a database, the vulnerabilities before and after. Raises as `audit`."""
        text = ["# Upgraded locks", ""]
        changed = [one for one in self.changes if one.lines]
        if not changed:
            text += ["Nothing changed.", ""]
        for one in changed:
            text += [
                f"## {one.recipe}, {one.target}: {one.kind}",
                "",
                "| package | before | after |",
                "| --- | --- | --- |",
            ]
            text += [_row(line) for line in one.lines]
            text.append("")
        if table.database:
            text += self._vulnerabilities(table)
        else:
            text += ["Known vulnerabilities were not looked up: [audit] of the site names no database.", ""]
        return "\n".join(text)

    def _vulnerabilities(self, table: AuditTable) -> list[str]:
        old, new_locks = [one.before for one in self.changes if one.before], [one.after for one in self.changes]
        database = open_database([*old, *new_locks], table, datetime.now(UTC))
        before, after = judge_locks(old, database, table), judge_locks(new_locks, database, table)
        text = ["## Known vulnerabilities", ""]
        if after.newest:
            text += [
                f"Of {after.judged} packages, by a database of {after.newest:%Y-%m-%d}; {after.unknown} others.",
                "",
            ]
        mended, new = _without(before.found, after.found), _without(after.found, before.found)
        left = _without(after.found, new)
        for title, those in (("Mended", mended), ("New", new), ("Left", left)):
            text += [f"**{title}: {len(those)}**", ""]
            text += [f"- {_said(one)}" for one in those] + ([""] if those else [])
        return text


def _without(those: Sequence[Advisory], others: Collection[Advisory]) -> list[Advisory]:
    known = {(one.package.name, one.id) for one in others}
    return [one for one in those if (one.package.name, one.id) not in known]


def _row(line: str) -> str:
    """Return the row of a line such as `~ numpy 1.0 -> 2.0`, see `package_changes`."""
    sign, _, rest = line.partition(" ")
    name, _, versions = rest.partition(" ")
    before, arrow, after = versions.partition(" -> ")
    cells = {"+": (name, "", versions), "-": (name, versions, "")}.get(sign)
    cells = cells or ((name, before, after) if arrow else (name, versions, versions))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _said(one: Advisory) -> str:
    fixed = f"; mended in {', '.join(one.fixed)}" if one.fixed else "; no version mends it yet"
    names = f" ({', '.join(one.aliases)})" if one.aliases else ""
    return f"{one.package.name} {one.package.version}: {one.id}{names}: {one.summary}{fixed}"
