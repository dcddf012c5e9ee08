"""The audit of locks against a site's database of vulnerabilities."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
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
