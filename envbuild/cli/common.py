"""Common parts of several commands: find a recipe and its target, print a result."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from envbuild.environment import Environment
from envbuild.errors import UsageError
from envbuild.progress import log as log
from envbuild.recipe.find import choose_target, find_recipe, search_folders
from envbuild.recipe.load import LoadedRecipe, load_recipe
from envbuild.recipe.targets import Target

if TYPE_CHECKING:
    from envbuild.kinds.commit import Result
    from envbuild.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """Values of the options that all builds share."""

    no_verify: bool
    faults: bool
    dry_run: bool
    locked: bool
    offline: bool
    as_json: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderOptions(BuildOptions):
    """Values of the options of environments in folders, see `folder_options`."""

    compile_bytecode: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageBuildOptions(BuildOptions):
    """Values of the options of image builds."""

    no_bytecode: bool


Decorator = Callable[[Callable[..., None]], Callable[..., None]]
target_option = click.option(
    "--target", metavar="TARGET", help="ACCELERATOR-ARCH, such as cpu-x86_64. Default: this host's."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
locked_option = click.option(
    "--locked", is_flag=True, help="Refuse (exit 3) where the lock is missing or stale; for CI."
)
offline_option = click.option(
    "--offline", is_flag=True, help="Use the store, find-links folders and file indexes only."
)


no_verify_option = click.option("--no-verify", is_flag=True, help="Only build; leave no receipt.")
faults_option = click.option("--faults", is_flag=True, help="Verify too that a killed rank restarts from the snapshot.")
no_bytecode_option = click.option("--no-bytecode", is_flag=True, help="Leave compiled modules out of the image.")
dry_run_option = click.option("--dry-run", is_flag=True, help="Print the plan and stop.")


def packed(record: type, name: str, *options: Decorator) -> Decorator:
    """Return a decorator that adds `options` to a command.

    The command gets their values in its argument `name`, a `record` with a field for each option.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**given: Any) -> None:
            chosen = {field.name: given.pop(field.name) for field in fields(record)}
            command(**given, **{name: record(**chosen)})

        whole: Callable[..., None] = run
        for option in reversed(options):
            whole = option(whole)
        return whole

    return decorate


folder_options = packed(
    FolderOptions, "how", no_verify_option, faults_option,
    click.option(
        "--compile-bytecode", is_flag=True, help="Compile all modules now, not when first imported."
    ),
    dry_run_option, locked_option, offline_option, json_option,
)  # fmt: skip


def open_recipe(name: str, environment: Environment) -> LoadedRecipe:
    """Return the recipe with the name or path `name`."""
    return load_recipe(find_recipe(name, search_folders(environment.site.recipe_folders)))


def open_target(loaded: LoadedRecipe, name: str | None, environment: Environment) -> Target:
    """Return the target of `loaded` with the name `name`, None for the one that suits this host."""
    return choose_target(loaded, name, search_folders(environment.site.recipe_folders))


def check_out(path: Path | None, option: str = "--out") -> None:
    """Check that at most the parent folder of `path` is missing: a typo must not silently create a tree of folders.

    Raises UsageError.
    """
    above = path.absolute().parent.parent if path else Path()
    try:
        above.stat()
        return
    except FileNotFoundError:
        pass
    except OSError:  # not accessible or not a folder: writing reports it
        return
    folders = reversed([above, *above.parents])
    missing = next((folder for folder in folders if not folder.exists()), above)
    raise UsageError(
        f"{option} {path}: the folder {missing} does not exist",
        f"correct the path, or make the folders first: mkdir -p {shlex.quote(str(above))}",
    )


def own_command() -> str:
    """Return the path of this envbuild, with which nodes start it if they see it at the same path."""
    path = Path(sys.argv[0]).absolute()
    if path.name == "__main__.py":  # python -m envbuild
        path = Path(sys.executable).absolute().parent / "envbuild"
    return os.fspath(path)


def print_json(value: Mapping[str, Any]) -> None:
    """Print one JSON object to standard output."""
    click.echo(json.dumps(value, indent=1))


def show_plan(plan: Plan, as_json: bool, path: Path | None = None) -> None:
    """Print the plan of a build, and its path."""
    if as_json:
        print_json({**plan.as_json(), **({"path": str(path.absolute())} if path else {})})
        return
    print_plan(plan)
    if path:
        click.echo(path)


def print_plan(plan: Plan) -> None:
    """Print a plan as text."""
    click.echo(f"{plan.artifact} of {plan.recipe} for {plan.target}, {plan.digest}")
    for number, layer in enumerate(plan.layers, start=1):
        click.echo(f"{number:3}. {layer.kind:8} {layer.name} {layer.version}  {layer.digest[:19]}…")


def finish(result: Result, path: Path, as_json: bool) -> None:
    """Print the path or the result of a build in a folder, or that nothing changed."""
    if not result.built and not result.verified:
        log(f"{path}: nothing changed ({result.seconds:.2f} s)")
    if as_json:
        print_json(result.as_json())
    else:
        click.echo(path)
