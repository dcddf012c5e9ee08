"""Options and functions that several commands share."""

from __future__ import annotations

import errno
import json
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from envbuild.base.errors import UsageError
from envbuild.base.files import named_path
from envbuild.base.progress import log
from envbuild.cli import complete, layout
from envbuild.cli.layout import verbosity
from envbuild.contract.verification import Thoroughness
from envbuild.environment import Environment
from envbuild.recipe.find import check_own, choose_target, default_recipe, find_recipe, search_folders
from envbuild.recipe.load import LoadedRecipe, load_recipe
from envbuild.recipe.targets import Target
from envbuild.run_environment import load_environment, with_tmpdir
from envbuild.site.settings import Site
from envbuild.store.usage import remember

if TYPE_CHECKING:
    from envbuild.jobs.model import JobPlan
    from envbuild.lock.lifecycle import LockUse
    from envbuild.plan import Plan


class _Named(click.Path):
    """A path with a name, so that a receipt can lie beside it: "." and ".." are replaced by the folders' own paths."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path: Any = super().convert(value, param, ctx)
        return named_path(path)


PATH = _Named(path_type=Path)
Names = tuple[str, ...]
# The value of --report without FILE; no name of a file that a user gives.
BESIDE = ""
Command = Callable[..., None]
Decorator = Callable[[Command], Command]
# A name in _SHARED, the name of an option in _COMPLETIONS with a help text of its own, or a decorator of click.
Option = str | tuple[str, str] | Decorator
_FLAGS = {
    "locked": "Refuse (exit 3) a missing or stale lock; for CI.",
    "offline": "Use the store, find-links folders and file indexes only.",
    "no-verify": "Only build; leave no receipt.",
    "faults": "Also verify that a killed rank restarts from the snapshot.",
    "no-bytecode": "Leave compiled modules out of the image.",
    "unverified": "Take an artifact without a passing receipt.",
    "exact": "Read all files of a venv or conda environment again, whatever their size, times and inode say.",
    "dry-run": "Print the plan and stop.",
}
_COMPLETIONS = {"target": complete.targets, "site": complete.sites, "recipe": complete.recipes}


def _value_option(name: str, text: str) -> Decorator:
    """Return the option --target, --site or --recipe with `text` as its help; "targets" is a repeatable --target."""
    word = name.removesuffix("s")
    values = _COMPLETIONS[word]
    return click.option(
        f"--{word}", name, multiple=name != word, metavar=word.upper(), shell_complete=values, help=text
    )


_SHARED: dict[str, Decorator] = {
    "verify": click.option(
        "--verify",
        type=click.Choice(["full", "quick"]),
        default="full",
        show_default=True,
        help="quick: files, imports and one short launch, for daily edits; jobs and registries need full.",
    ),
    "target": _value_option("target", "ACCELERATOR-ARCH, such as cpu-x86_64. Default: this host's."),
    "targets": _value_option("targets", "Only this target; repeatable."),
    "site": _value_option("site", "Name or path of a site file. Default: the site.toml in force."),
    "runtime": click.option(
        "--runtime",
        metavar="NAME",
        help="Runtime for verification: enroot, apptainer, podman, or own (user namespaces). Default: the best here.",
    ),
    "json": click.option("--json", "as_json", is_flag=True, help="Print one JSON object."),
    "report": click.option(
        "--report",
        is_flag=False,
        flag_value=BESIDE,
        metavar="[FILE]",
        shell_complete=complete.any_files,
        help="Write the receipt as an HTML page, by default beside it; also if verification fails.",
    ),
    **{name: click.option(f"--{name}", is_flag=True, help=text) for name, text in _FLAGS.items()},
}
# The last options of every command that builds artifacts.
BUILD_OPTIONS = ("dry-run", "locked", "offline", "report", "json")


def next_word(command: click.Command, args: Sequence[str], at: int = 0) -> int:
    """Return the index of the first word of `args`, from `at` on, that is neither an option of `command` nor its value.

    `--` is such a word; without one, this is the number of `args`.
    """
    options = [param for param in command.params if isinstance(param, click.Option)]
    with_value = {name for option in options if not option.is_flag for name in option.opts}
    while at < len(args) and args[at].startswith("-") and args[at] not in ("-", "--"):
        at += 2 if args[at] in with_value else 1
    return min(at, len(args))


def with_options(*options: Option) -> Decorator:
    """Return a decorator that adds options to a command, in this order."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            if isinstance(option, tuple):
                command = _value_option(*option)(command)
            else:
                command = (_SHARED[option] if isinstance(option, str) else option)(command)
        return command

    return decorate


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """Values of the options of commands that build; those that a command lacks have their defaults.

    Raises UsageError for options that need --job, and for a report of no receipt.
    """

    target: str | None = None
    out: Path | None = None
    prefix: Path | None = None
    python: str | None = None
    job: bool = False
    site: str | None = None
    bundle: Path | None = None
    submit: bool = False
    script: Path | None = None
    source: str | None = None
    engine: str = "native"
    compression: str = "zstd"
    runtime: str | None = None
    verify: str = "full"
    no_verify: bool = False
    faults: bool = False
    compile_bytecode: bool = False
    editable: bool = False
    no_bytecode: bool = False
    exact: bool = False
    dry_run: bool = False
    locked: bool = False
    offline: bool = False
    report: str | None = None
    as_json: bool = False

    def __post_init__(self) -> None:
        if not self.job and (self.site or self.bundle or self.submit or self.script):
            raise UsageError("--site, --bundle and --submit are for --job", "add --job")
        if self.verify == "quick" and (self.no_verify or self.faults):
            raise UsageError(
                f"--verify quick and --{'no-verify' if self.no_verify else 'faults'} exclude each other",
                "leave one of them out",
            )
        if self.report is not None and (self.job or self.no_verify):
            raise UsageError(
                "--report needs a receipt, but this run writes none (--job or --no-verify)",
                "leave it out, and run `envbuild report` once the receipt exists",
            )

    @property
    def asked(self) -> Thoroughness:
        """The required thoroughness of the verification."""
        return Thoroughness(quick=self.verify == "quick", faults=self.faults)

    @property
    def lock_use(self) -> LockUse:
        """The handling of a missing or stale lock; a dry run writes none."""
        return {"locked": self.locked, "offline": self.offline, "log": log, "write": not self.dry_run}


def build_options(*options: Option) -> Decorator:
    """Return the decorator of `with_options`; the command gets the values in one argument `options`, a BuildOptions.

    Arguments and options that BuildOptions does not have are passed as usual.
    """
    names = {field.name for field in fields(BuildOptions)}

    def decorate(command: Command) -> Command:
        @wraps(command)
        def run(**given: Any) -> None:
            chosen = {name: given.pop(name) for name in names & given.keys()}
            command(**given, options=BuildOptions(**chosen))

        return with_options(*options)(verbosity(run))

    return decorate


def run_environment() -> Environment:
    """Return the environment of this process with a TMPDIR for its children, which is removed when the command ends.

    It has the site's cache, except for commands with --offline or --dry-run.
    """
    context = click.get_current_context()
    alone = bool(context.params.get("offline") or context.params.get("dry_run"))
    return context.with_resource(with_tmpdir(load_environment(), offline=alone))


def attested_images(site: Site) -> Callable[[str, str], Path | None] | None:
    """Return a function that fetches an image's attested receipt from its registry or file; None without signers."""
    if not site.trust.restricts:
        return None

    def fetch(name: str, digest: str) -> Path | None:
        from envbuild.build.attached import SignedBundles, add_attached
        from envbuild.image.sif import embedded
        from envbuild.store.remote import registry_of
        from envbuild.trust.policy import Signers

        environment = load_environment()
        bundles = SignedBundles(digest, Signers.of(site.trust))
        if Path(name).is_file():
            for bundle in embedded(Path(name)).values():
                bundles.add(bundle)
        else:
            registry = registry_of(f"{name}@{digest}", site, environment.pip, environment.variables)
            add_attached(bundles, registry, environment.store)
        place = bundles.keep(environment.store)
        if place is not None:
            log(f"{name}: receipt and attestations are those in it")
        return place

    return fetch


def open_recipe(name: str | None, environment: Environment) -> LoadedRecipe:
    """Return the recipe with the name or path `name`; without a name, the default recipe."""
    folders = search_folders(environment.site.recipe_folders)
    loaded = load_recipe(default_recipe() if name is None else find_recipe(name, folders))
    use_recipe(loaded, environment)
    return loaded


def open_own_recipe(name: str | None, environment: Environment) -> LoadedRecipe:
    """Return the recipe as `open_recipe`, to be edited. Raises UsageError for a recipe that comes with envbuild."""
    loaded = open_recipe(name, environment)
    check_own(loaded)
    return loaded


def use_recipe(loaded: LoadedRecipe, environment: Environment) -> None:
    """Record at the end of the command that the files of the store for `loaded` were used."""
    click.get_current_context().call_on_close(partial(remember, environment.store, loaded.recipe.name))


def open_target(loaded: LoadedRecipe, name: str | None, environment: Environment) -> Target:
    """Return the target of `loaded` with the name `name`; without a name, the target that suits this host."""
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
    result = next((candidate for candidate in (number, path) if candidate is not None), text.removesuffix("\n"))
    show(as_json, {"job": number, **value}, result)
