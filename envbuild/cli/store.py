"""`envbuild store`, `envbuild cache` and `envbuild vault`."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from envbuild.base import host
from envbuild.base.errors import BuildError, LockError, RecipeError, UsageError, VerificationError
from envbuild.base.progress import log
from envbuild.base.text import AGES, SIZES, human_size, seconds, size
from envbuild.base.workers import each
from envbuild.cli import complete, layout
from envbuild.cli.common import PATH, open_recipe, open_target, print_json, run_environment, show, with_options
from envbuild.environment import Environment
from envbuild.image.squashfs.model import codec_of
from envbuild.layers.store_check import check_store
from envbuild.locks import locked_names, referenced_locks
from envbuild.recipe.find import list_recipes, search_folders
from envbuild.recipe.load import LoadedRecipe
from envbuild.run_environment import load_environment
from envbuild.store.entry import CacheEntry
from envbuild.store.remote import (
    RemoteCache,
    cache_of,
    counted,
    kept_inputs,
    named_vault,
    pull_recipe,
    push_recipe,
)
from envbuild.store.usage import Removal, StoreItem, choose, items, own_items, recipes, remember, remove
from envbuild.store.vault import Vault

if TYPE_CHECKING:
    from envbuild.build.bundle import LockedPlan

_AGES = (1, 7, 30, 90)  # days
_REQUESTS = 8


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

    Builds compare the files they use, once after each boot. This command reads the whole store: run it after a disk
    failure, or if others could write to the store. The next build downloads or builds the removed files again. Exit
    code 5 when a file was removed.

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
            f"{len(removed)} files of {environment.store.root} were damaged and have been removed",
            "if it happens again, check the disk, and who may write to the store",
        )


@store_command.command("status")
@with_options("json")
def status_command(as_json: bool) -> None:
    """Show the contents of the store: by kind, by recipe, and by the time of the last use.

    A recipe's own items are those that no other recipe used; --recipe of `store prune` removes them.

    \b
    Examples:
      envbuild store status
      envbuild store status --json | jq .unused
    """
    store, now = load_environment().store, time.time()
    store_items = items(store)
    kinds: dict[str, list[StoreItem]] = {}
    for item in store_items:
        kinds.setdefault(item.kind, []).append(item)
    used = {recipe: [item for item in store_items if item.name in names] for recipe, names in recipes(store).items()}
    value: dict[str, Any] = {
        "store": str(store.root),
        "items": len(store_items),
        "bytes": _size(store_items),
        "kinds": [{"kind": kind, "items": len(those), "bytes": _size(those)} for kind, those in kinds.items()],
        "recipes": [
            {"recipe": recipe, "bytes": _size(those), "own_bytes": _size(filter(own_items(store, recipe), those))}
            for recipe, those in used.items()
        ],
        "unused": [
            {"days": days, "bytes": _size(item for item in store_items if item.used < now - days * 86400)}
            for days in _AGES
        ],
    }
    rows = [[row["kind"], f"{row['items']} items", human_size(row["bytes"])] for row in value["kinds"]]
    rows += [
        [f"recipe {row['recipe']}", "", f"{human_size(row['bytes'])}, {human_size(row['own_bytes'])} its own"]
        for row in value["recipes"]
    ]
    rows += [[f"not used for {row['days']} days", "", human_size(row["bytes"])] for row in value["unused"]]
    rows.append([f"{store.root}", f"{len(store_items)} items", human_size(value["bytes"])])
    show(as_json, value, *layout.columns(rows))


@store_command.command("prune")
@click.option("--older-than", metavar="AGE", help="Remove items not used for AGE, such as 12h, 30d or 8w.")
@click.option("--keep", metavar="SIZE", help="Remove the least recently used items until SIZE, such as 50G, remains.")
@click.option(
    "--recipe",
    metavar="NAME",
    shell_complete=complete.recipes,
    help="Remove only items that no other recipe than NAME used.",
)
@click.option("--dry-run", is_flag=True, help="Remove nothing; list what would be removed.")
@with_options("json")
def prune_command(older_than: str | None, keep: str | None, recipe: str | None, dry_run: bool, as_json: bool) -> None:
    """Remove unused items from the store.

    It may run beside builds: files in use stay. Environments and images keep their files; a later build downloads or
    builds again the files it needs. --older-than and --keep together remove items that either option would remove. The
    key store_bytes in [limits] of the site file sets a limit that each run keeps.

    \b
    Examples:
      envbuild store prune --older-than 30d
      envbuild store prune --keep 50G --dry-run
      envbuild store prune --recipe old_project
    """
    if not (older_than or keep or recipe):
        raise UsageError("choose what to remove", "give --older-than, --keep or --recipe")
    older_s = _given("--older-than", older_than, seconds, AGES)
    most = _given("--keep", keep, size, SIZES)
    store = load_environment().store
    only = own_items(store, recipe) if recipe else lambda _: True
    if recipe and recipe not in recipes(store):
        known = ", ".join(recipes(store)) or "none"
        raise UsageError(f"--recipe {recipe}: the store has no entry of this recipe", f"known: {known}")
    store_items = items(store)
    chosen = choose(store_items, time.time(), older_s=older_s, keep=most, only=only)
    removal = Removal(tuple(chosen), ()) if dry_run or not chosen else remove(store, chosen)
    removed, held = removal.removed, removal.held
    value = {
        "store": str(store.root),
        "removed": [{"kind": item.kind, "path": str(store.root / item.name), "bytes": item.size} for item in removed],
        "bytes": (gone := _size(removed)),
        "held": [str(store.root / item.name) for item in held],
        "left": (left := _size(store_items) - _size(removed)),
    }
    rows = [[item.name, item.kind, human_size(item.size)] for item in removed] if dry_run else []
    show(as_json, value, *(layout.columns(rows) if rows else []))
    action = "would be removed" if dry_run else "removed"
    log(f"{len(removed)} items, {human_size(gone)}: {action}; {human_size(left)} remain")
    if held:
        log(f"{len(held)} items stay: running builds may use them")


def _size(those: Iterable[StoreItem]) -> int:
    return sum(item.size for item in those)


def _given(option: str, text: str | None, read: Callable[[str], int | None], examples: str) -> int | None:
    parsed = None if text is None else read(text)
    if text is not None and parsed is None:
        raise UsageError(f"{option} {text}: expected a number with a unit", f"such as {examples}")
    return parsed


@click.group("cache")
def cache_command() -> None:
    """Share the results of builds in a registry: layers, segments, source-built layers and wheels.

    The key cache in the site file, or ENVBUILD_CACHE=oci://REGISTRY/NAME, sets the repository. Builds then download
    results of others, found by the digest of their inputs. With cache_mode (ENVBUILD_CACHE_MODE) write or readwrite
    they also upload their own. An unreachable cache or an invalid entry never makes a build fail.

    \b
    Examples:
      ENVBUILD_CACHE=oci://registry.example.org/team/cache envbuild cache status
      ENVBUILD_CACHE_MODE=readwrite envbuild cache warm pt_cpu
    """


@cache_command.command("status")
@with_options("json")
def cache_status_command(as_json: bool) -> None:
    """Show the cache: its repository, mode and signers, and its entries by kind.

    \b
    Examples:
      envbuild cache status
      envbuild cache status --json
    """
    environment, remote = _opened()
    url, mode = cache_of(environment.site, environment.variables)
    kinds = dict(counted(remote.registry.tags()))
    value: dict[str, Any] = {
        "cache": url,
        "mode": mode,
        "signers": list(environment.site.trust.cache_signers),
        "signs": remote.signer is not None,
        "entries": kinds,
    }
    signers = ", ".join(value["signers"]) or "none: whoever may write to the registry is trusted"
    rows = [["cache", url], ["mode", mode], ["signers", signers]]
    rows += [[kind, str(count)] for kind, count in kinds.items()]
    show(as_json, value, *layout.columns(rows))


@cache_command.command("push")
@click.argument("recipes", metavar="RECIPE…", nargs=-1, required=True, shell_complete=complete.recipes)
@with_options("json")
def push_command(recipes: tuple[str, ...], as_json: bool) -> None:
    """Upload the items of this store that builds of each RECIPE used.

    Builds in the modes write and readwrite upload their results themselves; use this for a store that was filled
    earlier.

    \b
    Examples:
      envbuild cache push pt_cpu pt_cu126
    """
    from envbuild.layers.source_build import pack_built

    _, remote = _opened(writes=True)
    rows = []
    for recipe in recipes:
        count, sent = push_recipe(remote, recipe, pack_built, lambda entry: log(f"  {entry.tag}"))
        if not count:
            raise UsageError(f"the store has nothing of {recipe}", f"build it, or: envbuild cache warm {recipe}")
        rows.append({"recipe": recipe, "entries": count, "uploaded_bytes": sent})
        log(f"{recipe}: {count} entries, {human_size(sent)} uploaded")
    show(as_json, {"recipes": rows})


@cache_command.command("pull")
@click.argument("recipes", metavar="RECIPE…", nargs=-1, required=True, shell_complete=complete.recipes)
@with_options("json")
def pull_command(recipes: tuple[str, ...], as_json: bool) -> None:
    """Download the entries of each RECIPE, uploaded by `cache push` or `cache warm`, for later work without a network.

    \b
    Examples:
      envbuild cache pull pt_cpu
    """
    _, remote = _opened(reads=True)
    rows = []
    for recipe in recipes:
        count, failed = pull_recipe(remote, recipe)
        if failed:
            raise BuildError(f"{recipe}: {failed} of {count} entries could not be fetched", "run it again")
        rows.append({"recipe": recipe, "entries": count})
        log(f"{recipe}: {count} entries are here")
    show(as_json, {"recipes": rows})


@cache_command.command("warm")
@click.argument("recipes", metavar="RECIPE…", nargs=-1, required=True, shell_complete=complete.recipes)
@with_options("target", "locked", "json")
def warm_command(recipes: tuple[str, ...], target: str | None, locked: bool, as_json: bool) -> None:
    """Download or build every layer of the images of each RECIPE, and upload those that the cache lacks.

    No image is written or verified: builds of images, .sqsh and .sif do that with these layers.

    \b
    Examples:
      envbuild cache warm pt_cpu --target cpu-x86_64
    """
    from envbuild.build.image import image_layers, prepare_image
    from envbuild.build.image_layers import fill
    from envbuild.layers.layer_cache import TarCache
    from envbuild.layers.segment_cache import segment_cache
    from envbuild.layers.source_build import pack_built

    environment, remote = _opened(writes=True)
    limits, store = environment.site.limits, environment.store
    segments = segment_cache(environment, codec_of("zstd"))
    rows = []
    for name in recipes:
        loaded = open_recipe(name, environment)
        parsed = open_target(loaded, target, environment)
        image = prepare_image(
            loaded, parsed, environment, bytecode=True, locked=locked, offline=False, log=log, write=True
        )
        layers = image_layers(image, environment, offline=False)
        made = fill(image, layers, environment, TarCache(store, log, limits), offline=False)
        fill(image, layers, environment, segments, offline=False, with_manifest=False)
        rows.append({"recipe": loaded.recipe.name, "target": parsed.name, "layers": len(made.layers)})
        remember(store, loaded.recipe.name)
        remote.flush()
        push_recipe(remote, loaded.recipe.name, pack_built, lambda _: None)
    show(as_json, {"recipes": rows})


def _opened(*, reads: bool = False, writes: bool = False) -> tuple[Environment, RemoteCache]:
    environment = run_environment()
    remote = environment.store.remote
    if not isinstance(remote, RemoteCache):
        raise UsageError(
            "no cache is named", "set `cache` in site.toml, or ENVBUILD_CACHE=oci://registry.example.org/team/cache"
        )
    if (writes and not remote.writes) or (reads and not remote.reads):
        mode = "readwrite" if writes else "read"
        raise UsageError("the cache's mode does not allow this", f"set ENVBUILD_CACHE_MODE={mode}, or `cache_mode`")
    return environment, remote


@click.group("vault")
def vault_command() -> None:
    """Keep the inputs of builds, so that each locked environment can be built again when its indexes have gone.

    The key vault in the site file, or ENVBUILD_VAULT=oci://REGISTRY/NAME, sets the repository; oci:DIR is a folder.
    Builds look for each file in the store, then in the vault, then in indexes, by the sha256 in its lock.

    \b
    Examples:
      ENVBUILD_VAULT=oci://registry.example.org/team/vault envbuild vault push pt_cpu
      envbuild vault status
    """


@vault_command.command("push")
@click.argument("recipes", metavar="RECIPE…", nargs=-1, shell_complete=complete.recipes)
@click.option("--all", "every", is_flag=True, help="All recipes with current locks.")
@with_options(("target", "Only this target. Default: all."), "json")
def vault_push_command(recipes: tuple[str, ...], every: bool, target: str | None, as_json: bool) -> None:
    """Keep all files that builds of each RECIPE read: its locked packages, sources and base images, and itself.

    Every lock has one entry, whose files are uploaded once for all entries. Files that the store lacks are downloaded
    first. With [trust] cache_signers, entries are signed by ENVBUILD_CACHE_KEY.

    \b
    Examples:
      envbuild vault push pt_cpu pt_cu126
      envbuild vault push --all
    """
    from envbuild.build.bundle import keep_plan

    environment, vault = _vault()
    if every == bool(recipes):
        raise UsageError("name the recipes to keep", "give RECIPE…, or --all")
    vault.keys(True)  # raises before anything is downloaded
    rows: list[dict[str, Any]] = []
    faults: list[BuildError] = []
    work = _plans(_recipes(recipes, environment), target, environment)
    for loaded, plan in ((loaded, plan) for loaded, plans in work for plan in plans):
        about = {name: getattr(plan[0], name) for name in ("recipe", "target", "artifact", "lock_digest")}
        try:
            count, size, sent = keep_plan(vault, loaded, plan, environment, offline=False)
        except BuildError as error:  # the other plans are kept
            faults.append(error)
            continue
        rows.append({**about, "files": count, "bytes": size, "uploaded_bytes": sent})
        log(f"{plan[0].recipe} {plan[0].target}: {count} files, {human_size(size)}; {human_size(sent)} uploaded")
    if faults:
        raise BuildError(f"not all is kept: {faults[0].message}", faults[0].hint)
    if not rows:
        raise UsageError("no recipe has a current lock", "make one: `envbuild lock RECIPE`")
    show(as_json, {"vault": vault.name, "locks": rows})


@vault_command.command("status")
@with_options("json")
def vault_status_command(as_json: bool) -> None:
    """Show the locks in the vault, whether each is whole, and the current locks of recipes that are not kept.

    Exit code 5 if the vault lacks a file of one of its locks.

    \b
    Examples:
      envbuild vault status
      envbuild vault status --json | jq '.locks[] | select(.missing != [])'
    """
    environment, vault = _vault()
    names = locked_names(_recipes((), environment))
    kept = {lock: kept_inputs(vault, lock) for lock in vault.locks()}
    owners = Counter(digest for files, _ in kept.values() for digest in {file.digest for file in files})
    sizes = {file.digest: file.size for files, _ in kept.values() for file in files}
    lacking = each(list(sizes.items()), lambda row, stop: row[0] if vault.lacks(*row, stop) else "", _REQUESTS)
    missing = set(lacking) - {""}
    rows: list[dict[str, Any]] = []
    for lock, (files, day) in kept.items():
        own = {file.digest: file.size for file in files}
        row = {"lock": lock, "kept": day, "of": names.pop(lock, []), "files": len(files)}
        row |= {"bytes": sum(own.values()), "own_bytes": sum(size for key, size in own.items() if owners[key] == 1)}
        rows.append({**row, "missing": sorted(file.name for file in files if file.digest in missing)})
    value = {
        "vault": vault.name,
        "locks": rows,
        "bytes": sum(sizes.values()),
        "signers": len(environment.site.trust.cache_signers),
    }
    value["not_kept"] = [{"lock": lock, "of": of} for lock, of in names.items()]
    lines = [
        [
            ", ".join(row["of"]) or row["lock"][:19],
            f"{len(row['missing'])} of {row['files']} files missing" if row["missing"] else f"{row['files']} files",
            f"{human_size(row['bytes'])}, {human_size(row['own_bytes'])} its own",
        ]
        for row in rows
    ]
    lines += [[", ".join(of), "not kept", ""] for of in names.values()]
    lines.append([vault.name, f"{len(sizes)} files", human_size(sum(sizes.values()))])
    show(as_json, value, *layout.columns(lines))
    if missing:
        raise VerificationError(
            f"{vault.name} lacks {len(missing)} files of its locks", "keep them again: `envbuild vault push RECIPE`"
        )


@vault_command.command("prune")
@click.option("--older-than", metavar="AGE", help="Only locks that nobody pushed for AGE, such as 52w.")
@click.option("--not-in", "repository", type=PATH, metavar="DIR", help="Only locks that no branch or tag of it names.")
@click.option("--dry-run", "dry", is_flag=True, help="Remove nothing; list what would be removed.")
@with_options("json")
def vault_prune_command(older_than: str | None, repository: Path | None, dry: bool, as_json: bool) -> None:
    """Remove locks from the vault, with the files that no other lock has.

    Locks of the recipes that envbuild finds here always stay. --not-in names a clone of a git repository with all of
    its branches and tags; with --older-than too, both must hold. A registry frees the files when it collects garbage.

    \b
    Examples:
      envbuild vault prune --not-in . --older-than 52w --dry-run
    """
    age = _given("--older-than", older_than, seconds, AGES)
    if age is None and repository is None:
        raise UsageError("choose what to remove", "give --older-than, --not-in or both")
    environment, vault = _vault()
    staying = set(locked_names(_recipes((), environment)))
    kept = {lock: kept_inputs(vault, lock) for lock in vault.locks()}
    if repository is not None:
        referenced = referenced_locks(repository, environment.variables)
        if kept and not referenced & kept.keys():
            text = f"no branch or tag of {repository} names a lock of {vault.name}"
            raise UsageError(f"{text}: nothing is removed", "give the git repository with the recipes of this vault")
        staying |= referenced
    before = f"{datetime.now(UTC) - timedelta(seconds=age or 0):%Y-%m-%dT%H:%M:%SZ}"
    removed = [lock for lock, (_, day) in kept.items() if lock not in staying and day < before]
    held = {file.digest for lock, (files, _) in kept.items() if lock not in removed for file in files}
    freed = {file.digest: file.size for lock in removed for file in kept[lock][0] if file.digest not in held}
    if removed and not dry:
        vault.remove([CacheEntry("lock", lock.partition(":")[2]).tag for lock in removed], list(freed))
    rows: list[list[Any]] = [[lock, kept[lock][1][:10], len(kept[lock][0])] for lock in removed]
    size, left, names = sum(freed.values()), len(kept) - len(removed), ("lock", "kept", "files")
    value = {"removed": [dict(zip(names, row, strict=True)) for row in rows], "bytes": size, "left": left}
    show(as_json, {"vault": vault.name, **value}, *layout.columns([[*row[:2], f"{row[2]} files"] for row in rows]))
    action = "would be removed" if dry else "removed"
    log(f"{len(removed)} locks, {human_size(size)}: {action}; {left} remain")


@vault_command.command("check")
@click.argument("recipes", metavar="[RECIPE…]", nargs=-1, shell_complete=complete.recipes)
@click.option("--upstream", is_flag=True, required=True, help="Ask the sources of locked files; no other check exists.")
@click.option("--all", "every", is_flag=True, help="All recipes with current locks.")
@with_options("json")
def vault_check_command(recipes: tuple[str, ...], upstream: bool, every: bool, as_json: bool) -> None:
    """Ask indexes, channels and archives for each locked file: which have vanished, changed, or been yanked.

    Of the locks in the vault, or of RECIPE…, which needs no vault. A file counts if any source that builds ask has it
    with its hash. Each page is read once, and nothing but source archives is downloaded. Exit code 5 if files are lost.

    \b
    Examples:
      envbuild vault check --upstream
      envbuild vault check --upstream --all --json | jq '.lost[] | .name'
    """
    from envbuild.build.rebuild import kept_recipes
    from envbuild.build.upstream import THERE, check_upstream

    named = bool(recipes) or every
    environment, vault = (run_environment(), None) if named else _vault()
    with environment.store.working("opened") as folder:
        chosen = _recipes(recipes, environment) if named else []
        for lock in vault.locks() if vault else []:
            try:
                chosen += kept_recipes(lock, folder, environment)
            except (BuildError, RecipeError, UsageError) as error:  # such as own code
                log(f"{lock[:19]}: left out: {error.message}")
        unique = {loaded.folder: loaded for loaded in chosen}.values()
        files = check_upstream(_plans(unique, None, environment), environment)
    if not files:
        raise UsageError("there is no lock to check", "keep one: `envbuild vault push RECIPE`, or name a RECIPE")
    lost = [row for row in files if row["state"] != THERE]
    rows = [[row["state"], row["name"], ", ".join(row["of"]), "; ".join(row["answers"])] for row in lost]
    show(as_json, {"files": len(files), "lost": lost}, *layout.columns(rows))
    if lost:
        raise VerificationError(f"{len(lost)} of {len(files)} locked files are lost", "keep them: envbuild vault push")
    log(f"all {len(files)} locked files are there")


def _plans(
    recipes: Iterable[LoadedRecipe], target: str | None, environment: Environment
) -> Iterator[tuple[LoadedRecipe, list[LockedPlan]]]:
    """Yield the plans of each target of `recipes`, or of one, for which there are current locks; log the others."""
    from envbuild.build.bundle import lock_plans

    for loaded in recipes:
        for name in [target] if target else loaded.recipe.targets:
            try:
                yield loaded, lock_plans(loaded, loaded.target(name)[0], environment)
            except LockError as error:
                log(f"{loaded.recipe.name} {name}: left out: {error.message.splitlines()[0]}")


def _recipes(names: Sequence[str], environment: Environment) -> list[LoadedRecipe]:
    """Return the recipes with these names or paths, all without one."""
    if names:
        return [open_recipe(name, environment) for name in names]
    listed = list_recipes(search_folders(environment.site.recipe_folders))
    return [recipe.loaded for recipe in listed if recipe.loaded is not None]


def _vault() -> tuple[Environment, Vault]:
    environment = run_environment()
    return environment, named_vault(environment)
