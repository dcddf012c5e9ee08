"""`envbuild audit`: known vulnerabilities of what recipes lock."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from envbuild.base.errors import LockError, VerificationError
from envbuild.base.progress import log
from envbuild.cli import complete, layout
from envbuild.cli.common import open_recipe, open_target, run_environment, show
from envbuild.cli.options import PATH, Names, with_options
from envbuild.lock.advisories import audit
from envbuild.locks import needed_locks


@click.command("audit")
@click.argument("recipes", nargs=-1, metavar="[RECIPE]…", shell_complete=complete.recipes)
@click.option(
    "--target",
    "targets",
    multiple=True,
    metavar="TARGET",
    shell_complete=complete.targets,
    help="Only this target; repeatable.",
)
@click.option("--database", type=PATH, metavar="DIR", help="OSV's exports. Default: database in [audit] of the site.")
@click.option("--ignore", multiple=True, metavar="ID", help="A vulnerability that does not concern you; repeatable.")
@with_options("json")
def audit_command(recipes: Names, targets: Names, database: Path | None, ignore: Names, as_json: bool) -> None:
    """Look up the locked packages of RECIPE… in an offline database of vulnerabilities; exit code 5 if one has any.

    The database is a folder with OSV's exports, PyPI/all.zip and Debian/all.zip. A missing or damaged one, and one
    whose newest record is older than max_age in [audit] (14d), ends with exit code 5 too: what could not be looked up
    is not said to be good. A lock that was not made yet is named. Conda packages, and packages of an existing base
    image, are in no database: their number is said.

    \b
    Examples:
      envbuild audit pt_cpu --database /srv/osv
      envbuild audit pt_cpu pt_hf --target cpu-x86_64 --ignore GHSA-xxxx-xxxx-xxxx --json
    """
    environment = run_environment()
    table = environment.site.audit
    table = replace(table, database=str(database or table.database), ignore=(*table.ignore, *ignore))
    locks: list[object] = []
    for loaded in (open_recipe(name, environment) for name in recipes or (None,)):
        for target in [open_target(loaded, name, environment) for name in targets or loaded.recipe.targets]:
            for kind in needed_locks(loaded, target):
                state = kind.inspect()
                if state.lock is None:
                    log(f"{state.path}: {state.fault}; not looked up")
                elif state.fault is not None:
                    raise LockError(f"{state.path}: {state.fault}", f"make it again: `{kind.command}`")
                else:
                    locks.append(state.lock)
    if not locks:
        raise LockError("none of these recipes is locked", f"envbuild lock {' '.join(recipes)}".rstrip())
    done = audit(locks, table, datetime.now(UTC))
    value: dict[str, Any] = {
        "database": table.database,
        "newest": done.newest.isoformat() if done.newest else None,
        "judged": done.judged,
        "not_in_database": done.unknown,
        "ignored": [one.id for one in done.ignored],
        "found": [
            {
                "package": one.package.name,
                "version": one.package.version,
                "ecosystem": one.package.ecosystem,
                "id": one.id,
                "aliases": one.aliases,
                "summary": one.summary,
                "fixed": one.fixed,
            }
            for one in done.found
        ],
    }
    rows = [
        [f"{one.package.name} {one.package.version}", one.id, ", ".join(one.fixed) or "-", one.summary]
        for one in done.found
    ]
    show(as_json, value, *layout.columns(rows))
    others = f"; {done.unknown} others are in no database" if done.unknown else ""
    log(f"{done.judged} packages looked up{others}: {len(done.found)} vulnerabilities")
    if done.found:
        raise VerificationError(
            f"{len({one.package for one in done.found})} packages have known vulnerabilities",
            "upgrade them: envbuild lock RECIPE --upgrade=PKG; or ignore one with its reason: `ignore` in [audit]",
        )
