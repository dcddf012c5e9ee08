"""`envbuild list`, `envbuild show` and `envbuild check`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import UTC, date, datetime
from pathlib import Path
from textwrap import wrap
from typing import Any

import click

from envbuild.base.errors import LockError, UsageError
from envbuild.base.files import build_folder
from envbuild.cli import complete, layout
from envbuild.cli.common import open_recipe, open_target, print_json, show, with_options
from envbuild.compat.judge import gpu_findings, judge
from envbuild.compat.rows import CompatFinding, load_rows
from envbuild.contract.receipt import read_receipt, recorded_gpu_code
from envbuild.environment import Environment
from envbuild.gpus import Containers
from envbuild.lock.conda import CondaLock
from envbuild.lock.lifecycle import LockState
from envbuild.locks import locked_stack, needed_locks, wheel_locks
from envbuild.recipe.find import list_recipes, search_folders
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.model import LayerTable, layer_kind
from envbuild.recipe.targets import Target
from envbuild.run_environment import load_environment
from envbuild.site.settings import Site, load_site

_COLOURS = {"good": "green", "bad": "red", "unknown": "yellow", "note": "cyan"}
_WIDTH = 100
_INDENT = " " * 21


@click.command("list")
@with_options("json")
def list_command(as_json: bool) -> None:
    """List the recipes that can be built by name, and where each was found.

    Each target shows which of its locks are missing or stale: wheels, image (the base of its images), builder (the
    image in which their source layers are compiled), conda. `envbuild lock RECIPE` makes them.

    \b
    Examples:
      envbuild list
      envbuild list --json | jq -r '.recipes[].name'
    """
    environment = load_environment()
    entries = list_recipes(search_folders(environment.site.recipe_folders))
    column, columns = max((len(entry.name) for entry in entries), default=0), layout.width()
    rows, lines = [], []
    for entry in entries:
        recipe = entry.loaded.recipe if entry.loaded else None
        locks = _locked(entry.loaded) if entry.loaded else {}
        error = entry.error.message if entry.error else None
        rows.append(
            {
                "name": entry.name,
                "path": str(entry.path),
                "description": recipe.description if recipe else None,
                "targets": list(recipe.targets) if recipe else [],
                "locks": locks,
                "error": error,
            }
        )
        if recipe:
            described = [recipe.description] if recipe.description else []
            cells = [*described, f"[{', '.join(_locked_target(*lock) for lock in locks.items())}]"]
        else:
            cells = ["broken: " + (error or "").partition("\n")[0]]
        lines.append(layout.entry(entry.name, [*cells, str(entry.path)], column, columns))
    show(as_json, {"recipes": rows}, *lines)


def _locked(loaded: LoadedRecipe) -> dict[str, dict[str, bool]]:
    """Return, for each target and each lock that its builds need, whether the lock exists and is current."""
    return {
        name: {lock_kind.label: lock_kind.fault() is None for lock_kind in needed_locks(loaded, Target.parse(name))}
        for name in loaded.recipe.targets
    }


def _locked_target(name: str, locks: Mapping[str, bool]) -> str:
    """Return a target with its missing or stale locks: "cpu-x86_64 (not locked: conda)"."""
    missing = ", ".join(lock for lock, current in locks.items() if not current)
    return f"{name} (not locked: {missing})" if missing else name


@click.command("show")
@click.argument("recipe", required=False, shell_complete=complete.recipes)
@with_options("json")
def show_command(recipe: str | None, as_json: bool) -> None:
    """Show RECIPE as envbuild reads it, with defaults and the state of its locks.

    \b
    Examples:
      envbuild show pt_cpu
      envbuild show ./my/recipe.toml --json
    """
    loaded = open_recipe(recipe, load_environment())
    states: dict[str, dict[str, LockState[Any]]] = {}
    for name in loaded.recipe.targets:
        for lock in needed_locks(loaded, Target.parse(name)):
            states.setdefault(lock.name, {})[f"{name}{lock.label.removeprefix(lock.name)}"] = lock.inspect()
    locks, conda = states.get("wheels", {}), states.get("conda", {})
    if as_json:
        names = {"wheels": "locks", "conda": "conda_locks", "image": "image_locks", "builder": "builder_locks"}
        about = {
            key: {
                target: {"path": str(state.path), "current": state.fault is None, "fault": state.fault}
                for target, state in states.get(name, {}).items()
            }
            for name, key in names.items()
        }
        print_json({**asdict(loaded.recipe), "path": str(loaded.path), "digest": loaded.digest, **about})
        return
    table = loaded.recipe

    def say(line: str) -> None:
        click.echo(layout.fitted(line))

    say(f"{table.name}: {table.description}" if table.description else table.name)
    say(f"  from {loaded.path}")
    say(f"  digest {loaded.digest}")
    say(f"  python {table.python}")
    say(f"  requirements {', '.join(table.requirements) or 'none'}")
    for project, index in table.indexes.items():
        say(f"  {project} from the index {index} alone")
    say(f"  images hold a {'conda environment' if table.environment == 'conda' else 'venv'}")
    if conda:
        say(f"  conda channels {', '.join(table.conda.channels)}")
        say(f"  conda dependencies {', '.join(table.conda.dependencies)}")
        if table.conda.requirements:
            say(f"  with pip {', '.join(table.conda.requirements)}")
    if table.fabric != "any":
        say(f"  fabric {table.fabric}")
    for name, layer in table.layers.items():
        say(f"  layer {name} {layer.version}: {_layer(name, layer)}")
    for name, target in table.targets.items():
        say(f"  target {name}: {', '.join(target.requirements) or 'nothing more'}")
        for index in target.indexes:
            say(f"    index {index}")
        if target.conda:
            say(f"    conda {', '.join(target.conda)}")
        for state in (state for key, state in locks.items() if key.partition(" ")[0] == name):
            packages = f"{len(state.lock.packages)} packages" if state.lock else "none"
            say(f"    lock {state.path}: {packages}, {state.fault or 'current'}")
        for kind in ("image", "builder"):
            if lock_state := states.get(kind, {}).get(name):
                say(f"    {kind} lock {lock_state.path}: {lock_state.fault or 'current'}")
        if name in conda:
            say(f"    conda lock {conda[name].path}: {_conda_lock(conda[name])}")
    verify = table.verify
    say(
        f"  verified on {verify.nodes} nodes × {verify.nproc_per_node} ranks, {verify.epochs} epochs, "
        f"model {verify.model}"
    )


def _layer(name: str, layer: LayerTable) -> str:
    kinds = {"source": "built from source", "wheel": "the wheel in place of torch's"}
    text = kinds.get(layer_kind(name, layer)) or f"the nodes' {layer.path}"
    return f"{text}, for {', '.join(layer.targets)}" if layer.targets else text


def _conda_lock(state: LockState[CondaLock]) -> str:
    if state.lock is None:
        return state.fault or "none"
    pip = len(state.lock.pip.packages)
    packages = f"{len(state.lock.packages)} packages" + (f" and {pip} of pip" if pip else "")
    return f"{packages}, {state.fault or 'current'}"


@click.command("check")
@click.argument("recipe", metavar="[RECIPE|ARTIFACT]", required=False, shell_complete=complete.recipes_or_artifacts)
@with_options(("target", "ACCELERATOR-ARCH, such as cu126-x86_64. Default: all."))
@click.option("--driver", metavar="VERSION", help="Driver version of the nodes, as nvidia-smi prints it.")
@click.option(
    "--suggest", is_flag=True, help="For extensions that do not fit torch, find the newest release that fits."
)
@with_options(("site", "Judge ARTIFACT with the network libraries of SITE's nodes."), "offline", "json")
def check_command(
    recipe: str | None,
    target: str | None,
    driver: str | None,
    suggest: bool,
    site: str | None,
    offline: bool,
    as_json: bool,
) -> None:
    """Check whether the parts of RECIPE are compatible, link by link, each with its source.

    Checks glibc, driver, CUDA, torch, NCCL, the plugin, libfabric and the network, and lists the GPUs on which the
    recipe runs. Locked versions are checked if there is a lock, else the pins of the recipe. Locked packages with code
    that is compiled against torch (torchvision, xformers, vllm, …) are checked by their symbols, which are read from
    the index by ranges, once for each wheel; the rest needs no network. Exit code 3 when a combination is known not to
    work.

    With --site, ARTIFACT (a venv, conda environment, squashfs, SIF, or a container image as `envbuild inspect` takes
    it, or a RECIPE whose artifact is in ./build) is judged with the libraries in SITE's [host_stack] instead: whether a
    rank can load the libfabric, NCCL plugin and MPI that would meet, by names, symbols and their versions. The nodes'
    are read from the inventory that `envbuild site init` writes on a node; no node is needed here.

    \b
    Examples:
      envbuild check pt_cu126
      envbuild check gh200_cu126 --target cu126-aarch64 --driver 550.54.15
      envbuild check pt_vision --suggest
      envbuild check ./recipe.toml --json
      envbuild check pt_cu126.sqsh --site ./site.toml
      envbuild check docker://ghcr.io/acme/pt_cu126:1.0 --site ./site.toml
    """
    environment = load_environment()
    if site is not None:
        _check_stack(recipe, target, load_site(environment.variables, site), environment, as_json=as_json)
        return
    loaded = open_recipe(recipe, environment)
    names = [target] if target is not None else list(loaded.recipe.targets)
    rows_of_targets: list[dict[str, Any]] = []
    for name in names:
        parsed = open_target(loaded, name, environment)
        stack, basis = locked_stack(loaded, parsed)
        stack = replace(stack, driver=driver)
        words = loaded.recipe.targets[parsed.name].gpus
        findings = judge(stack) + gpu_findings(stack, words, _built(loaded.recipe.name, parsed))
        findings += _extensions(loaded, parsed, environment, offline=offline, suggest=suggest)
        statuses = {finding.status for finding in findings}
        # `rocm` is shown only for targets that have it, so that the output for others does not change.
        shown = [field for field in stack.__slots__ if field != "packages" and (field != "rocm" or stack.rocm)]
        rows_of_targets.append(
            {
                "target": parsed.name,
                "basis": basis,
                "verdict": next((verdict for verdict in ("bad", "unknown") if verdict in statuses), "good"),
                "stack": {field: getattr(stack, field) for field in shown},
                "findings": [finding.as_json() for finding in findings],
            }
        )
        if not as_json:
            if name != names[0]:
                click.echo()
            click.echo(click.style(f"{loaded.recipe.name} for {parsed.name}", bold=True) + f", {basis}")
            _show_findings(findings)
    rows = load_rows()
    if as_json:
        knowledge = {"read": rows.read, "torch": rows.newest_torch, "by_hand": rows.by_hand}
        print_json({"recipe": loaded.recipe.name, "targets": rows_of_targets, "knowledge": knowledge})
    else:
        age = (datetime.now(UTC).date() - date.fromisoformat(rows.read)).days
        release_text = (
            f"releases read on {rows.read} ({age} day{'' if age == 1 else 's'} ago), torch up to {rows.newest_torch}"
        )
        text = f"envbuild's data: {release_text}; rows by hand up to {rows.by_hand}"
        for line in wrap(text, max(20, min(_WIDTH, layout.width()))):
            click.echo(click.style(line, dim=True))
    if any(row["verdict"] == "bad" for row in rows_of_targets):
        sys.exit(3)


def _check_stack(text: str | None, target: str | None, site: Site, environment: Environment, *, as_json: bool) -> None:
    """Judge an artifact with the libraries of the nodes of `site`; exit with 3 if they cannot be loaded together."""
    from envbuild.cli.inspect import spelling
    from envbuild.compat.host_stack import HostInventory, judge_stack, parse_inventory
    from envbuild.inspect.reader import open_artifact
    from envbuild.verify.static_checks import image_libraries, read_libraries

    table, file = site.host_stack, Path(site.host_stack.inventory)
    if not table.inventory:
        raise UsageError(
            f"site {site.name} has no [host_stack]", "name the nodes' libraries there: docs/howto/host-stack.md"
        )
    host, absent = HostInventory({}), None
    if file.is_file():
        host = parse_inventory(file.read_text(encoding="utf-8", errors="replace"), str(file))
    else:
        hint = f"on a node: envbuild site init --from {site.files[-1]} --out {site.files[-1]} --force"
        absent = UsageError(f"there is no inventory of the nodes' libraries, {file}", hint)
    if absent and table.injected:
        raise absent
    artifact = spelling(text, target, environment)
    with open_artifact(artifact, environment, target) as opened:
        about, layers = opened.about, opened.layers()
        if about.place and not layers:
            libraries = read_libraries(about.place, environment.site.limits)
        else:
            parts = zip((layer.diff_id for layer in about.layers), layers, strict=True)
            libraries = image_libraries(artifact, parts, about.env, environment.site.limits)
    if absent and not libraries.isolated:  # an image takes nothing of the nodes
        raise absent
    findings = judge_stack(table, host, libraries)
    bad = any(finding.status == "bad" for finding in findings)
    if as_json:
        verdict = {"artifact": artifact, "site": site.name, "mode": table.mode, "verdict": "bad" if bad else "good"}
        print_json({**verdict, "findings": [finding.as_json() for finding in findings]})
    else:
        click.echo(click.style(artifact, bold=True) + f" on the nodes of {site.name}, mode {table.mode}")
        _show_findings(findings)
    if bad:
        sys.exit(3)


def _extensions(
    loaded: LoadedRecipe, target: Target, environment: Environment, *, offline: bool, suggest: bool
) -> list[CompatFinding]:
    """Return a finding for each locked extension of torch; [] without a current lock."""
    with suppress(LockError):  # the stack's basis says that it cannot be read
        state = wheel_locks(loaded, target)[0].inspect() if loaded.has_wheels(target) else None
        if state and state.lock and not state.fault:
            from envbuild.extensions import Extensions  # with the HTTP client, which other commands of this module lack

            return Extensions(loaded, target, state.lock, environment, offline).findings(suggest=suggest)
    return []


def _built(recipe: str, target: Target) -> dict[str, Containers]:
    """Return the code for GPUs in the libraries of what was built here, from its receipt; {} without one."""
    for path in sorted((build_folder() / recipe / target.name).glob("*.receipt.json")):
        with suppress(OSError, ValueError):
            if code := recorded_gpu_code(read_receipt(path)):
                return code
    return {}


def _show_findings(findings: Sequence[CompatFinding]) -> None:
    columns = max(20, min(_WIDTH, layout.width()) - len(_INDENT))
    for finding in findings:
        status = click.style(f"{finding.status:7}", fg=_COLOURS[finding.status])
        lines = wrap(finding.text, columns, break_on_hyphens=False)
        click.echo(f"  {status}  {finding.subject:10}{lines[0] if lines else ''}")
        for line in lines[1:]:
            click.echo(_INDENT + line)
        notes = [f"fix: {finding.fix}"] if finding.fix and finding.status != "good" else []
        notes += [f"source: {finding.source} ({finding.date})"] if finding.source else []
        for note in notes:
            # The URL of a source stays whole.
            indent = " " * min(len(_INDENT), max(2, columns + len(_INDENT) - max(map(len, note.split()))))
            room = columns + len(_INDENT) - len(indent)
            for line in wrap(note, room, break_long_words=False, break_on_hyphens=False):
                click.echo(indent + click.style(line, dim=True))
    if not findings:
        click.echo("  nothing to check: the recipe has no CUDA target and no layers")
        return
    bad, unknown = (sum(finding.status == status for finding in findings) for status in ("bad", "unknown"))
    known = f"{bad} known not to work" if bad else "nothing is known not to work"
    click.echo(f"  {known}, {unknown} not known" if unknown else f"  {known}")
