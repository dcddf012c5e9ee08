"""Reports of what an upgrade of locks changes: versions, sizes, known vulnerabilities, and verification."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from envbuild.base.errors import VerificationError
from envbuild.base.text import human_size
from envbuild.debian.lock import DebianLock
from envbuild.lock.advisories import Advisory, judge_locks, open_database
from envbuild.lock.conda import CondaLock
from envbuild.lock.format import Lock
from envbuild.lock.image import ImageLock
from envbuild.site.tables import AuditTable
from envbuild.store.fetch import ARCHIVES, WantedWheel, stored_wheel
from envbuild.store.history import METRICS
from envbuild.store.store import Store


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
class VerifiedUpgrade:
    """Receipts of an environment built from the locks before and after, and the bytes of its files; None without."""

    recipe: str
    target: str
    before: tuple[Mapping[str, Any], int] | None
    after: tuple[Mapping[str, Any], int] | None


@dataclass(frozen=True, slots=True)
class UpgradeReport:
    """What a run of `envbuild lock` changed, for people who review it; `faults` are those of the database."""

    changes: list[LockChange] = field(default_factory=list)
    verified: list[VerifiedUpgrade] = field(default_factory=list)
    faults: list[VerificationError] = field(default_factory=list)

    def render(self, table: AuditTable, store: Store) -> str:
        """Return the report in Markdown; with a database, the vulnerabilities before and after.

        Sizes of wheels and conda packages are those of the files in `store`. A database that cannot be used is among
        the `faults`: the locks have changed already, and nothing else says how.
        """
        text = ["# Upgraded locks", ""]
        changed = [one for one in self.changes if one.lines]
        if not changed:
            text += ["Nothing changed.", ""]
        for one in changed:
            text += [
                f"## {one.recipe}, {one.target}: {one.kind}",
                "",
                "| package | before | after | size |",
                "| --- | --- | --- | --- |",
            ]
            sizes = [sizes_of(lock, store) for lock in (one.before, one.after)]
            text += [_row(line, *sizes) for line in one.lines]
            text.append("")
        for verified in self.verified:
            text += _verified(verified)
        if table.database:
            try:
                text += self._vulnerabilities(table)
            except VerificationError as error:
                self.faults.append(error)
                text += [f"**Known vulnerabilities could not be looked up: {error.message}**", ""]
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


def _row(line: str, before: Mapping[str, int], after: Mapping[str, int]) -> str:
    """Return the row of a line such as `~ numpy 1.0 -> 2.0`, see `package_changes`, with the packages' sizes."""
    sign, _, rest = line.partition(" ")
    name, _, versions = rest.partition(" ")
    old, arrow, new = versions.partition(" -> ")
    cells = {"+": (name, "", versions), "-": (name, versions, "")}.get(sign)
    cells = cells or ((name, old, new) if arrow else (name, versions, versions))
    known = dict.fromkeys(human_size(table[name]) for table in (before, after) if name in table)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in (*cells, " → ".join(known))) + " |"


def sizes_of(lock: object, store: Store) -> dict[str, int]:
    """Return the bytes of the packages of a lock of any kind, by name, as far as lock or `store` tell them."""
    if isinstance(lock, CondaLock):
        files = {one.name: store.find(ARCHIVES, one.sha256, one.file_name.__eq__) for one in lock.packages}
        own = {one.name: one.size for one in lock.packages if one.size}
        own |= {name: path.stat().st_size for name, path in files.items() if path}
        return own | sizes_of(lock.pip, store)
    if isinstance(lock, Lock):
        wanted = [WantedWheel(one.name, one.version, frozenset(one.hashes)) for one in lock.packages]
        return {one.name: path.stat().st_size for one in wanted if (path := stored_wheel(one, store))}
    if isinstance(lock, ImageLock) and isinstance(lock.base, DebianLock):
        return {one.name: one.size for one in lock.base.packages}
    return {}


def _verified(one: VerifiedUpgrade) -> list[str]:
    rows: dict[str, Callable[[Mapping[str, Any], int], str]] = {
        "verification": lambda receipt, _: _outcome(receipt),
        "loss by epoch": lambda receipt, _: ", ".join(f"{loss:.6g}" for loss in _losses(receipt)),
        "size of all files": lambda _, size: human_size(size),
    }
    text = [f"## {one.recipe}, {one.target}: verified", "", "| | before | after |", "| --- | --- | --- |"]
    for title, show in rows.items():
        cells = ["" if each is None else show(*each) for each in (one.before, one.after)]
        text.append(f"| {title} | {' | '.join(cells)} |")
    figures = [each[0].get("performance", {}) if each else {} for each in (one.before, one.after)]
    for name, metric in METRICS.items():
        cells = [metric.show(each[name]) if name in each else "" for each in figures]
        text += [f"| {metric.title} | {' | '.join(cells)} |"] if any(cells) else []
    return [*text, ""]


def _outcome(receipt: Mapping[str, Any]) -> str:
    failed = [check["name"] for check in receipt["checks"] if check["status"] in ("fail", "blocked")]
    return f"**failed**: {', '.join(failed)}" if failed or not receipt["passed"] else "passed"


def _losses(receipt: Mapping[str, Any]) -> Sequence[float]:
    found = next((one["evidence"] for one in receipt["checks"] if one["name"] == "curve"), None) or {}
    return found.get("losses") or ()


def _said(one: Advisory) -> str:
    fixed = f"; mended in {', '.join(one.fixed)}" if one.fixed else "; no version mends it yet"
    names = f" ({', '.join(one.aliases)})" if one.aliases else ""
    return f"{one.package.name} {one.package.version}: {one.id}{names}: {one.summary}{fixed}"
