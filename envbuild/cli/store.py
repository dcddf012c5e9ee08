"""`envbuild store`: the store of downloads and layers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from typing import Any

import click

from envbuild.base import host
from envbuild.base.errors import UsageError, VerificationError
from envbuild.base.progress import log
from envbuild.base.text import AGES, SIZES, human_size, seconds, size
from envbuild.cli import complete, layout
from envbuild.cli.common import print_json, show
from envbuild.cli.options import with_options
from envbuild.environment import load_environment
from envbuild.layers.store_check import check_store
from envbuild.store.usage import Removal, StoreItem, choose, items, own_items, recipes, remove

_AGES = (1, 7, 30, 90)  # days


@click.group("store")
def store_command() -> None:
    """Show, bound and check the store: wheels, packages, layers and segments, which all recipes share.

    \b
    Examples:
      envbuild store status
      envbuild store prune --older-than 30d
      envbuild store check
    """


@store_command.command("check")
@with_options("json")
def check_command(as_json: bool) -> None:
    """Read every file of the store and compare it with its sha256; remove what is damaged.

    Builds compare what they use, once after each boot. This reads everything: after a failing disk, or after others
    could write to the store. The next build fetches or makes again what was removed. Exit code 5 when something was.

    \b
    Examples:
      envbuild store check
      ENVBUILD_STORE=/fsx/envbuild envbuild store check --json
    """
    environment = load_environment()
    count, size, removed = check_store(environment.store, host.workers(os.environ))
    if as_json:
        store = str(environment.store.root)
        print_json({"store": store, "files": count, "bytes": size, "removed": [str(path) for path in removed]})
    else:
        log(f"{count} files, {human_size(size)}: {len(removed) or 'none'} damaged")
    if removed:
        raise VerificationError(
            f"{len(removed)} files of {environment.store.root} were damaged and are removed",
            "if this comes again, check the disk, and who may write to the store",
        )


@store_command.command("status")
@with_options("json")
def status_command(as_json: bool) -> None:
    """Show what the store holds: by kind, by recipe, and by the time of the last use.

    A recipe's own items are those that no other recipe used; --recipe of `store prune` removes them.

    \b
    Examples:
      envbuild store status
      envbuild store status --json | jq .unused
    """
    store, now = load_environment().store, time.time()
    found = items(store)
    kinds: dict[str, list[StoreItem]] = {}
    for item in found:
        kinds.setdefault(item.kind, []).append(item)
    used = {recipe: [item for item in found if item.name in names] for recipe, names in recipes(store).items()}
    value: dict[str, Any] = {
        "store": str(store.root),
        "items": len(found),
        "bytes": _size(found),
        "kinds": [{"kind": kind, "items": len(those), "bytes": _size(those)} for kind, those in kinds.items()],
        "recipes": [
            {"recipe": recipe, "bytes": _size(those), "own_bytes": _size(filter(own_items(store, recipe), those))}
            for recipe, those in used.items()
        ],
        "unused": [
            {"days": days, "bytes": _size(item for item in found if item.used < now - days * 86400)} for days in _AGES
        ],
    }
    rows = [[row["kind"], f"{row['items']} items", human_size(row["bytes"])] for row in value["kinds"]]
    rows += [
        [f"recipe {row['recipe']}", "", f"{human_size(row['bytes'])}, {human_size(row['own_bytes'])} its own"]
        for row in value["recipes"]
    ]
    rows += [[f"not used for {row['days']} days", "", human_size(row["bytes"])] for row in value["unused"]]
    rows.append([f"{store.root}", f"{len(found)} items", human_size(value["bytes"])])
    show(as_json, value, *layout.columns(rows))


@store_command.command("prune")
@click.option("--older-than", metavar="AGE", help="What was not used for AGE, such as 12h, 30d or 8w.")
@click.option("--keep", metavar="SIZE", help="What was not used for longest, until SIZE, such as 50G, remains.")
@click.option(
    "--recipe", metavar="NAME", shell_complete=complete.recipes, help="Only what no other recipe than NAME used."
)
@click.option("--dry-run", is_flag=True, help="Remove nothing; list what would be removed.")
@with_options("json")
def prune_command(older_than: str | None, keep: str | None, recipe: str | None, dry_run: bool, as_json: bool) -> None:
    """Remove what is not used from the store.

    It may run beside builds: what they use stays. Environments and images keep their files, and a later build fetches
    or makes again what it lacks. --older-than and --keep together remove what either would. The key store_bytes in
    [limits] of the site file sets a limit that each run keeps.

    \b
    Examples:
      envbuild store prune --older-than 30d
      envbuild store prune --keep 50G --dry-run
      envbuild store prune --recipe old_project
    """
    if not (older_than or keep or recipe):
        raise UsageError("nothing says what to remove", "give --older-than, --keep or --recipe")
    older_s = _given("--older-than", older_than, seconds, AGES)
    most = _given("--keep", keep, size, SIZES)
    store = load_environment().store
    only = own_items(store, recipe) if recipe else lambda _: True
    if recipe and recipe not in recipes(store):
        known = ", ".join(recipes(store)) or "none"
        raise UsageError(f"--recipe {recipe}: nothing in the store is known to be of it", f"known: {known}")
    found = items(store)
    chosen = choose(found, time.time(), older_s=older_s, keep=most, only=only)
    removal = Removal(tuple(chosen), ()) if dry_run or not chosen else remove(store, chosen)
    removed, held = removal.removed, removal.held
    value = {
        "store": str(store.root),
        "removed": [{"kind": item.kind, "path": str(store.root / item.name), "bytes": item.size} for item in removed],
        "bytes": (gone := _size(removed)),
        "held": [str(store.root / item.name) for item in held],
        "left": (left := _size(found) - _size(removed)),
    }
    rows = [[item.name, item.kind, human_size(item.size)] for item in removed] if dry_run else []
    show(as_json, value, *(layout.columns(rows) if rows else []))
    what = "would be removed" if dry_run else "removed"
    log(f"{len(removed)} items, {human_size(gone)}: {what}; {human_size(left)} remain")
    if held:
        log(f"{len(held)} items stay: running builds may use them")


def _size(those: Iterable[StoreItem]) -> int:
    return sum(item.size for item in those)


def _given(option: str, text: str | None, read: Callable[[str], int | None], examples: str) -> int | None:
    found = None if text is None else read(text)
    if text is not None and found is None:
        raise UsageError(f"{option} {text}: expected a number with a unit", f"such as {examples}")
    return found
