"""Common parts of several commands: find a recipe and its target, hand over a job, print a result."""

from __future__ import annotations

import errno
import json
import os
import shlex
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from envbuild.base.errors import UsageError
from envbuild.base.progress import log as log
from envbuild.cli import layout
from envbuild.environment import Environment, load_environment
from envbuild.recipe.find import check_own, choose_target, default_recipe, find_recipe, search_folders
from envbuild.recipe.load import LoadedRecipe, load_recipe
from envbuild.recipe.targets import Target
from envbuild.site.settings import Site
from envbuild.store.usage import remember

if TYPE_CHECKING:
    from envbuild.jobs.model import JobPlan
    from envbuild.plan.plan import Plan


def run_environment() -> Environment:
    """Return the environment of this process with a TMPDIR for its children, which is removed when the command ends.

    It has the site's cache, except for commands with --offline or --dry-run.
    """
    context = click.get_current_context()
    alone = bool(context.params.get("offline") or context.params.get("dry_run"))
    return context.with_resource(load_environment().with_tmpdir(offline=alone))


def attested_images(site: Site) -> Callable[[str, str], Path | None] | None:
    """Return what takes the attested receipt of an image out of its registry or file; None without signers."""
    if not site.trust.restricts:
        return None

    def fetch(name: str, digest: str) -> Path | None:
        from envbuild.image.sif import embedded
        from envbuild.kinds.attached import SignedBundles, add_attached
        from envbuild.store.remote import registry_of
        from envbuild.trust.policy import Signers

        environment = load_environment()
        found = SignedBundles(digest, Signers.of(site.trust))
        if Path(name).is_file():
            for bundle in embedded(Path(name)).values():
                found.add(bundle)
        else:
            registry = registry_of(f"{name}@{digest}", site, environment.pip, environment.variables)
            add_attached(found, registry, environment.store)
        place = found.keep(environment.store)
        if place is not None:
            log(f"{name}: receipt and attestations are those in it")
        return place

    return fetch


def open_recipe(name: str | None, environment: Environment) -> LoadedRecipe:
    """Return the recipe with the name or path `name`, None for the default one."""
    folders = search_folders(environment.site.recipe_folders)
    loaded = load_recipe(default_recipe() if name is None else find_recipe(name, folders))
    use_recipe(loaded, environment)
    return loaded


def open_own_recipe(name: str | None, environment: Environment) -> LoadedRecipe:
    """Return the recipe as `open_recipe`, to be edited. Raises UsageError for one that comes with envbuild."""
    loaded = open_recipe(name, environment)
    check_own(loaded)
    return loaded


def use_recipe(loaded: LoadedRecipe, environment: Environment) -> None:
    """Note at the end of the command that the store's files for `loaded` were used now."""
    click.get_current_context().call_on_close(partial(remember, environment.store, loaded.recipe.name))


def open_target(loaded: LoadedRecipe, name: str | None, environment: Environment) -> Target:
    """Return the target of `loaded` with the name `name`, None for the one that suits this host."""
    return choose_target(loaded, name, search_folders(environment.site.recipe_folders))


def open_build(recipe: str | None, target: str | None) -> tuple[Environment, LoadedRecipe, Target]:
    """Return the environment of this process, the recipe, and its target; see `open_recipe` and `open_target`."""
    environment = run_environment()
    loaded = open_recipe(recipe, environment)
    return environment, loaded, open_target(loaded, target, environment)


def check_out(path: Path | None, option: str = "--out") -> None:
    """Check that at most the parent folder of `path` is missing: a typo must not silently create a tree of folders.

    Raises UsageError, and OSError for a path that is too long for the system.
    """
    above = path.absolute().parent.parent if path else Path()
    try:
        (path or above).lstat()
        return
    except FileNotFoundError:
        if above.exists():
            return
    except OSError as error:  # not accessible or not a folder: writing reports it
        if error.errno == errno.ENAMETOOLONG:
            raise
        return
    folders = reversed([above, *above.parents])
    missing = next((folder for folder in folders if not folder.exists()), above)
    raise UsageError(
        f"{option} {path}: the folder {missing} does not exist",
        f"correct the path, or make the folders first: mkdir -p {shlex.quote(str(above))}",
    )


def print_json(value: Mapping[str, Any]) -> None:
    """Print one JSON object to standard output."""
    click.echo(json.dumps(value, indent=1))


def show(as_json: bool, value: Mapping[str, Any], *lines: object) -> None:
    """Print one JSON object, or `lines`."""
    if as_json:
        print_json(value)
    else:
        for line in lines:
            click.echo(line)


def show_plan(plan: Plan, as_json: bool, path: Path | None = None) -> None:
    """Print the plan of a build, and its path."""
    shown = {"path": str(path.absolute())} if path else {}
    show(as_json, plan.as_json() | shown, *plan_lines(plan), *([path] if path else []))


def plan_lines(plan: Plan) -> list[str]:
    """Return a plan as text."""
    layers = [
        layout.fitted(f"{number:3}. {layer.kind:8} {layer.name} {layer.version}  {layer.digest[:19]}…", 14)
        for number, layer in enumerate(plan.layers, start=1)
    ]
    return [layout.fitted(f"{plan.artifact} of {plan.recipe} for {plan.target}, {plan.digest}", 4), *layers]


def hand_over(
    plan: JobPlan, text: str, out: Path | None, *, submit: bool, hint: str, note: str = ""
) -> tuple[Path | None, str | None]:
    """Submit the script of a job or write it to `out`, if requested.

    Returns its path, None if it is to be printed, and the job's number, None if it was not submitted. `hint` is the
    advice when the script cannot be written, `note` the end of the message about the submission.
    """
    from envbuild.jobs.schedulers import SCHEDULERS
    from envbuild.jobs.submit import default_script, submit_script, write_script

    if not submit:
        if out is not None:
            write_script(text, out, hint)
        return out, None
    path = out or default_script(plan, Path() if SCHEDULERS[plan.scheduler].pods else Path(plan.work))
    number = submit_script(plan, text, path, os.environ, hint, named=out is not None)
    log(f"submitted {path} to {plan.scheduler}{note}")
    return path, number


def show_job(as_json: bool, value: Mapping[str, Any], text: str, path: Path | None, number: str | None) -> None:
    """Print a job: as one JSON object, or its number, else the path of its script, else the script."""
    told = next((one for one in (number, path) if one is not None), text.removesuffix("\n"))
    show(as_json, {"job": number, **value}, told)
