"""`envbuild list` and `envbuild show`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from envbuild.cli import layout
from envbuild.cli.common import json_option, open_recipe, print_json
from envbuild.environment import load_environment

if TYPE_CHECKING:
    from envbuild.lock.conda import CondaLock
    from envbuild.lock.lifecycle import LockState
    from envbuild.recipe.layers import LayerTable
    from envbuild.recipe.load import LoadedRecipe


@click.command("list")
@json_option
def list_command(as_json: bool) -> None:
    """List the recipes that can be built by name, and where each was found.

    A target says which of its locks are missing or stale: wheels, image (the base of its images), builder (the image
    in which their source-built layers are compiled), conda. `envbuild lock RECIPE` makes them.

    \b
    Examples:
      envbuild list
      envbuild list --json | jq -r '.recipes[].name'
    """
    from envbuild.recipe.find import list_recipes, search_folders

    environment = load_environment()
    entries = list_recipes(search_folders(environment.site.recipe_folders))
    if as_json:
        rows = [
            {
                "name": entry.name,
                "path": str(entry.path),
                "description": entry.loaded.recipe.description if entry.loaded else None,
                "targets": list(entry.loaded.recipe.targets) if entry.loaded else [],
                "locks": _locked(entry.loaded) if entry.loaded else {},
                "error": entry.error.message if entry.error else None,
            }
            for entry in entries
        ]
        print_json({"recipes": rows})
        return
    column, columns = max((len(entry.name) for entry in entries), default=0), layout.width()
    for entry in entries:
        if entry.loaded:
            recipe = entry.loaded.recipe
            cells = [recipe.description, f"[{', '.join(_locked_targets(entry.loaded))}]"]
        else:
            cells = [f"broken: {entry.error.message.splitlines()[0] if entry.error else ''}"]
        click.echo(layout.entry(entry.name, [*cells, str(entry.path)], column, columns))


def _locked(loaded: LoadedRecipe) -> dict[str, dict[str, bool]]:
    """Return, for each target and each lock that its builds need, whether the lock exists and is current."""
    from envbuild.locks import needed_locks
    from envbuild.recipe.targets import Target

    return {
        name: {one.name: one.fault() is None for one in needed_locks(loaded, Target.parse(name))}
        for name in loaded.recipe.targets
    }


def _locked_targets(loaded: LoadedRecipe) -> list[str]:
    """Return the targets, each with its missing or stale locks: "cpu-x86_64 (not locked: conda)"."""
    texts = []
    for name, locks in _locked(loaded).items():
        missing = ", ".join(lock for lock, current in locks.items() if not current)
        texts.append(f"{name} (not locked: {missing})" if missing else name)
    return texts


@click.command("show")
@click.argument("recipe")
@json_option
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
        print_json(
            {
                **asdict(loaded.recipe),
                "path": str(loaded.path),
                "digest": loaded.digest,
                "locks": _states(locks),
                "conda_locks": _states(conda),
                "image_locks": _states(states["image"]),
                "builder_locks": _states(states.get("builder", {})),
            }
        )
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


def _states(locks: Mapping[str, LockState[Any]]) -> dict[str, dict[str, Any]]:
    return {
        name: {"path": str(state.path), "current": state.fault is None, "fault": state.fault}
        for name, state in locks.items()
    }


def _layer(name: str, layer: LayerTable) -> str:
    from envbuild.recipe.layers import kind_of

    kind = kind_of(name, layer)
    text = {"source": "built from source", "wheel": "the wheel in place of torch's"}.get(kind)
    text = text or f"the nodes' {layer.path}"
    return f"{text}, for {', '.join(layer.targets)}" if layer.targets else text


def _conda_lock(state: LockState[CondaLock]) -> str:
    if state.lock is None:
        return state.fault or "none"
    pip = len(state.lock.pip.packages)
    packages = f"{len(state.lock.packages)} packages" + (f" and {pip} of pip" if pip else "")
    return f"{packages}, {state.fault or 'current'}"
