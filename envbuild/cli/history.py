"""`envbuild history` and `envbuild bisect`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from envbuild.base.errors import LockError, UsageError, VerificationError
from envbuild.base.progress import log
from envbuild.cli import complete, layout
from envbuild.cli.common import PATH, open_recipe, open_target, print_json, run_environment, show, with_options
from envbuild.contract.receipt import read_receipt, receipt_path
from envbuild.environment import Environment
from envbuild.lock.format import lock_file_name, read
from envbuild.lock.wheels import wheel_lock
from envbuild.recipe.find import command_word, recipe_files, search_folders
from envbuild.recipe.load import load_recipe
from envbuild.recipe.targets import Target, host_arch
from envbuild.run_environment import load_environment
from envbuild.store.history import METRICS, merged, recorded, row_of, sparkline

if TYPE_CHECKING:
    from envbuild.bisect.run import Bisected


_SHORT = len("sha256:") + 8


@click.command("history")
@click.argument("recipe", required=False, shell_complete=complete.recipes)
@with_options(("target", "Only this target. Default: all of them."))
@click.option(
    "--metric", "metrics", multiple=True, type=click.Choice(list(METRICS)), help="Only this metric; repeatable."
)
@click.option(
    "--receipts",
    "places",
    multiple=True,
    type=PATH,
    metavar="PATH",
    help="Include a receipt, an artifact's receipt, or all receipts of a folder; repeatable.",
)
@with_options("json")
def history_command(
    recipe: str | None, target: str | None, metrics: tuple[str, ...], places: tuple[Path, ...], as_json: bool
) -> None:
    """Show what the verifications of RECIPE measured, oldest first, with a sparkline for each metric.

    The store records each verification, passed or failed: the last 100 for each kind of artifact and target. Only
    verifications of the same kind, target, host and shape of training are compared.

    \b
    Examples:
      envbuild history pt_cpu
      envbuild history pt_cpu --target cpu-x86_64 --metric step_s
      envbuild history pt_cpu --receipts /srv/receipts --json
    """
    environment = load_environment()
    loaded = open_recipe(recipe, environment)
    name = loaded.recipe.name
    given = [row_of(receipt) for place in places for receipt in _receipts(place, name)]
    rows = [row for row in merged(recorded(environment.store, name), given) if target in (None, row["target"])]
    if as_json:
        print_json({"recipe": name, "verifications": rows})
        return
    if not rows:
        of = f" for {target}" if target else ""
        has_venv = any(loaded.has_wheels(Target.parse(target_name)) for target_name in loaded.recipe.targets)
        kind = "venv" if has_venv else "conda"
        raise UsageError(
            f"no verification of {name}{of} is recorded in {environment.store.root}",
            f"build it: envbuild {kind} {command_word(loaded)}; or name receipts with --receipts",
        )
    series: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        series.setdefault(_series(name, row), []).append(row)
    for title, those in series.items():
        for line in [title, *_lines(those, metrics or tuple(METRICS)), ""]:
            click.echo(layout.fitted(line))


def _receipts(place: Path, recipe: str) -> Iterator[Mapping[str, Any]]:
    """Yield the receipts of `recipe` at `place`. Raises UsageError for a file that is no receipt, OSError."""
    if receipt_path(place).is_file():
        place = receipt_path(place)
    for path in sorted(place.rglob("*.receipt.json")) if place.is_dir() else [place]:
        try:
            receipt = read_receipt(path)
        except (OSError, ValueError) as error:
            raise UsageError(f"{path} is not a receipt: {error}", "name the receipts that are, or a folder") from error
        if receipt.get("recipe", {}).get("name") == recipe:
            yield receipt


def _series(recipe: str, row: Mapping[str, Any]) -> str:
    """Return the title of the series of `row`: the facts that must be equal for a comparison."""
    host, shape = row["host"], row["settings"]
    machine = [str(host.get("name", "unknown host")), f"{host.get('cpus', '?')} processors"]
    machine += [str(value) for value in (host.get("processor"), row["performance"].get("gpu")) if value]
    training = f"{shape['nodes']} × {shape['nproc_per_node']} ranks, {shape['model']}, batch {shape['batch_size']}"
    return f"{recipe} {row['target']}, {row['kind']} by {row['runtime']} on {', '.join(machine)}; {training}"


def _lines(rows: Iterable[Mapping[str, Any]], metrics: Iterable[str]) -> list[str]:
    rows = list(rows)
    # A failed verification measured something else than those that passed.
    figures = [row["performance"] if row["passed"] else {} for row in rows]
    shown = [name for name in metrics if any(name in figure for figure in figures)]
    table = [["verified at", "result", "lock", "torch", *(METRICS[name].title for name in shown)]]
    for row, values in zip(rows, figures, strict=True):
        result = "passed" if row["passed"] else f"failed: {', '.join(map(str, row['failed']))}"
        cells = [METRICS[name].show(values[name]) if name in values else "" for name in shown]
        torch = str(row["versions"].get("torch") or "")
        table.append([row["verified_at"], result, row["lock"][len("sha256:") : _SHORT], torch, *cells])
    lines = [f"  {layout.printable(line)}" for line in layout.columns(table)]
    drawn = [[METRICS[name].title, sparkline([figure.get(name) for figure in figures])] for name in shown]
    return [*lines, *(f"  {line}" for line in layout.columns(drawn) if drawn)]


@click.command("bisect")
@click.argument("good", metavar="LOCK_A", type=PATH)
@click.argument("bad", metavar="LOCK_B", type=PATH)
@click.option(
    "--metric",
    default="pass",
    show_default=True,
    metavar="step_time|pass|COMMAND",
    help="The criterion for bad: a slower step of training, a failed verification, or a shell command that fails "
    "in the environment (exit code 125: cannot be judged).",
)
@with_options(("recipe", "Name or path. Default: beside LOCK_B or LOCK_A, else by its name."))
@click.option(
    "--rounds",
    type=click.IntRange(1, 1000),
    metavar="N",
    help="Measure each environment at most N times. Default: 40 for step_time, else 1; one failure of N is bad.",
)
@with_options("target", "offline", "json")
def bisect_command(
    good: Path,
    bad: Path,
    metric: str,
    recipe: str | None,
    rounds: int | None,
    target: str | None,
    offline: bool,
    as_json: bool,
) -> None:
    """Find the package or packages that broke or slowed an environment: LOCK_A is good, LOCK_B bad.

    LOCK_A and LOCK_B are lock files, folders that hold one for --target, or recipes with their current locks. envbuild
    builds virtual environments with some packages of each lock, judges and removes them. If n packages differ, at most
    ceil(log2 n) + 2 builds find a single culprit. Exit code 5 if the locks do not differ by the metric.

    \b
    Examples:
      envbuild bisect old/cpu-x86_64.requirements.txt recipes/pt_cpu/cpu-x86_64.requirements.txt
      envbuild bisect old pt_cpu --metric step_time
      envbuild bisect old recipes/pt_cpu --metric 'python -c "import torchvision"'
    """
    from envbuild.bisect.run import Bisection, bisect

    environment = run_environment()
    files = [_lock_of(place, target or f"cpu-{host_arch()}", environment) for place in (good, bad)]
    try:
        locks = [lock for file in files if (lock := read(file))]
    except LockError as error:  # its hint is for the lock of a recipe: to remove it and make it again
        raise UsageError(
            error.message, "give two locks of wheels, TARGET.requirements.txt, of different times"
        ) from error
    if len(locks) < 2 or any(
        getattr(locks[0], key) != getattr(locks[1], key) for key in ("recipe", "target", "python")
    ):
        raise UsageError(
            f"{files[0]} and {files[1]} are not of one recipe, target and Python",
            "give two locks of one target, of different times",
        )
    beside = next((file.parent for file in reversed(files) if (file.parent / "recipe.toml").is_file()), None)
    loaded = open_recipe(recipe or str(beside.absolute() if beside else locks[0].recipe), environment)
    chosen = open_target(loaded, locks[0].target, environment)
    if chosen.arch != host_arch():
        raise UsageError(f"the locks are for {chosen.name}, and this host is {host_arch()}", f"run it on {chosen.arch}")
    result = bisect(Bisection(loaded, chosen, locks[0], locks[1], metric, rounds, offline), environment, log)
    show(as_json, result.as_json(), *(_bisected_lines(result) if result.outcome.reproduced else ()))
    if not result.outcome.reproduced:
        raise VerificationError(
            f"{files[0]} and {files[1]} do not differ by {metric}: {result.outcome.why}",
            "check the metric: by it, the first lock must be good and the second bad on this host",
        )


def _lock_of(place: Path, target: str, environment: Environment) -> Path:
    """Return the lock file `place`, that of a folder for `target`, or that of the recipe which `place` names."""
    path = place / lock_file_name(target) if place.is_dir() else place
    if not place.exists() and (file := recipe_files(search_folders(environment.site.recipe_folders)).get(str(place))):
        loaded = load_recipe(file)
        path = wheel_lock(loaded, open_target(loaded, target, environment)).inspect().path
    if not os.path.isfile(path):
        raise UsageError(f"{path} is not a lock file", "give a file TARGET.requirements.txt, or the folder with it")
    return path


def _bisected_lines(result: Bisected) -> list[str]:
    culprits = result.outcome
    named = "  and  ".join(", ".join(map(str, group)) for group in result.culprits())
    single = len(culprits.groups) == 1
    how = {
        True: "bad with these alone changed",
        False: "bad only with other packages of the second lock, too",
        None: "not tested with these alone changed: that environment cannot be built or judged",
    }[culprits.alone]
    lines = [f"{'found' if single else 'found, together'}: {named}", f"  {how}"]
    for title, mix in (("good without", culprits.good), ("bad with", culprits.bad)):
        if (test := result.of(mix)) is not None:
            lines.append(f"  {title}: {len(test.moved)} of {result.packages} packages of the second lock: {test.text}")
    return [*lines, f"  {len(result.tests)} builds"]
