"""`envbuild list` and `envbuild show`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from envbuild.cli import layout
from envbuild.cli.common import open_recipe, print_json, show
from envbuild.cli.options import with_options
from envbuild.environment import load_environment

if TYPE_CHECKING:
    from envbuild.lock.conda import CondaLock
    from envbuild.lock.state import LockState
    from envbuild.recipe.layers import LayerTable
    from envbuild.recipe.load import LoadedRecipe


@click.command("list")
@with_options("json")
def list_command(as_json: bool) -> None:
    """List the recipes that can be built by name, and where each was found.

    A target says which of its locks are missing or stale: wheels, image (the base of its images), builder (the image in
    which their source-built layers are compiled), conda. `envbuild lock RECIPE` makes them.

    \b
    Examples:
      envbuild list
      envbuild list --json | jq -r '.recipes[].name'
    """
    from envbuild.recipe.find import list_recipes, search_folders

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
            cells = [recipe.description, f"[{', '.join(_locked_target(*one) for one in locks.items())}]"]
        else:
            cells = [f"broken: {(error or '').splitlines()[0]}"]
        lines.append(layout.entry(entry.name, [*cells, str(entry.path)], column, columns))
    show(as_json, {"recipes": rows}, *lines)


def _locked(loaded: LoadedRecipe) -> dict[str, dict[str, bool]]:
    """Return, for each target and each lock that its builds need, whether the lock exists and is current."""
    from envbuild.locks import needed_locks
    from envbuild.recipe.targets import Target

    return {
        name: {one.name: one.fault() is None for one in needed_locks(loaded, Target.parse(name))}
        for name in loaded.recipe.targets
    }


def _locked_target(name: str, locks: Mapping[str, bool]) -> str:
    """Return a target with its missing or stale locks: "cpu-x86_64 (not locked: conda)"."""
    missing = ", ".join(lock for lock, current in locks.items() if not current)
    return f"{name} (not locked: {missing})" if missing else name


@click.command("show")
@click.argument("recipe")
@with_options("json")
def show_command(recipe: str, as_json: bool) -> None:
    """Show RECIPE as it was understood, with defaults filled in and the state of its locks.

    \b
    Examples:
      envbuild show pt_cpu
      envbuild show ./my/recipe.toml --json
    """
    from envbuild.locks import needed_locks
    from envbuild.recipe.targets import Target

    loaded = open_recipe(recipe, load_environment())
    states: dict[str, dict[str, LockState[Any]]] = {}
    for name in loaded.recipe.targets:
        for one in needed_locks(loaded, Target.parse(name)):
            states.setdefault(one.name, {})[name] = one.inspect()
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
    click.echo(f"{table.name}: {table.description}\n  from {loaded.path}\n  digest {loaded.digest}")
    click.echo(f"  python {table.python}\n  requirements {', '.join(table.requirements) or 'none'}")
    click.echo(f"  images hold a {'conda environment' if table.environment == 'conda' else 'venv'}")
    if conda:
        click.echo(f"  conda channels {', '.join(table.conda.channels)}")
        click.echo(f"  conda dependencies {', '.join(table.conda.dependencies)}")
        if table.conda.requirements:
            click.echo(f"  with pip {', '.join(table.conda.requirements)}")
    if table.fabric != "any":
        click.echo(f"  fabric {table.fabric}")
    for name, layer in table.layers.items():
        click.echo(f"  layer {name} {layer.version}: {_layer(name, layer)}")
    for name, target in table.targets.items():
        click.echo(f"  target {name}: {', '.join(target.requirements) or 'nothing more'}")
        for index in target.indexes:
            click.echo(f"    index {index}")
        if target.conda:
            click.echo(f"    conda {', '.join(target.conda)}")
        if name in locks:
            state = locks[name]
            packages = f"{len(state.lock.packages)} packages" if state.lock else "none"
            click.echo(f"    lock {state.path}: {packages}, {state.fault or 'current'}")
        for kind in ("image", "builder"):
            if found := states.get(kind, {}).get(name):
                click.echo(f"    {kind} lock {found.path}: {found.fault or 'current'}")
        if name in conda:
            click.echo(f"    conda lock {conda[name].path}: {_conda_lock(conda[name])}")
    verify = table.verify
    click.echo(
        f"  verified on {verify.nodes} nodes × {verify.nproc_per_node} ranks, {verify.epochs} epochs, "
        f"model {verify.model}"
    )


def _layer(name: str, layer: LayerTable) -> str:
    from envbuild.recipe.layers import kind_of

    kinds = {"source": "built from source", "wheel": "the wheel in place of torch's"}
    text = kinds.get(kind_of(name, layer)) or f"the nodes' {layer.path}"
    return f"{text}, for {', '.join(layer.targets)}" if layer.targets else text


def _conda_lock(state: LockState[CondaLock]) -> str:
    if state.lock is None:
        return state.fault or "none"
    pip = len(state.lock.pip.packages)
    packages = f"{len(state.lock.packages)} packages" + (f" and {pip} of pip" if pip else "")
    return f"{packages}, {state.fault or 'current'}"
