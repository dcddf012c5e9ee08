"""Options that several commands have, each declared once, and the values of those that builds have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from envbuild.base.errors import UsageError
from envbuild.base.files import named_path
from envbuild.base.progress import log
from envbuild.cli import complete
from envbuild.cli.verbosity import verbosity

if TYPE_CHECKING:
    from envbuild.lock.lifecycle import LockUse
    from envbuild.verify.model import Thoroughness


class _Named(click.Path):
    """A path with a name, beside which a receipt can lie: "." and ".." are the folders that they stand for."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path: Any = super().convert(value, param, ctx)
        return named_path(path)


PATH = _Named(path_type=Path)
Names = tuple[str, ...]
# The value of --report without FILE; no name of a file that a user gives.
BESIDE = ""
Command = Callable[..., None]
Decorator = Callable[[Command], Command]
_FLAGS = {
    "locked": "Refuse (exit 3) where the lock is missing or stale; for CI.",
    "offline": "Use the store, find-links folders and file indexes only.",
    "no-verify": "Only build; leave no receipt.",
    "faults": "Verify too that a killed rank restarts from the snapshot.",
    "no-bytecode": "Leave compiled modules out of the image.",
    "exact": "Read all files of a venv or conda environment again, whatever their size, times and inode say.",
    "dry-run": "Print the plan and stop.",
}
_VALUES = {
    "target": ("TARGET", complete.targets, "ACCELERATOR-ARCH, such as cpu-x86_64. Default: this host's."),
    "site": ("SITE", complete.sites, "Name or path of a site file. Default: the site.toml in force."),
    "runtime": (
        "NAME",
        None,
        "What launches it for verification: enroot, apptainer, or own (user namespaces). Default: the best here.",
    ),
}


_SHARED: dict[str, Decorator] = {
    "verify": click.option(
        "--verify",
        type=click.Choice(["full", "quick"]),
        default="full",
        show_default=True,
        help="quick: files, imports and one short launch, for daily edits; jobs and registries want full.",
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
    **{
        name: click.option(f"--{name}", metavar=value, shell_complete=values, help=text)
        for name, (value, values, text) in _VALUES.items()
    },
}


def next_word(command: click.Command, args: Sequence[str], at: int = 0) -> int:
    """Return the index of the first word of `args`, from `at` on, that is neither an option of `command` nor its value.

    `--` is such a word; without one, this is the number of `args`.
    """
    options = [one for one in command.params if isinstance(one, click.Option)]
    with_value = {name for one in options if not one.is_flag for name in one.opts}
    while at < len(args) and args[at].startswith("-") and args[at] not in ("-", "--"):
        at += 2 if args[at] in with_value else 1
    return min(at, len(args))


def with_options(*options: str | Decorator) -> Decorator:
    """Return a decorator that adds options to a command, in this order: names of _SHARED, or click's decorators."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
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
                "--report needs a receipt, and with --job or --no-verify this run writes none",
                "leave it out, and run `envbuild report` when there is a receipt",
            )

    @property
    def asked(self) -> Thoroughness:
        """What the verification must show at least."""
        from envbuild.verify.model import Thoroughness

        return Thoroughness(quick=self.verify == "quick", faults=self.faults)

    @property
    def lock_use(self) -> LockUse:
        """The handling of a missing or stale lock; a dry run writes none."""
        return {"locked": self.locked, "offline": self.offline, "log": log, "write": not self.dry_run}


def build_options(*options: str | Decorator) -> Decorator:
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
