"""`envbuild bisect`: the package that broke or slowed an environment."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from envbuild.base.errors import LockError, UsageError, VerificationError
from envbuild.base.progress import log
from envbuild.cli import complete
from envbuild.cli.common import open_recipe, open_target, run_environment, show
from envbuild.cli.options import PATH, with_options
from envbuild.environment import Environment
from envbuild.lock.wheels import wheel_lock
from envbuild.recipe.find import recipe_files, search_folders
from envbuild.recipe.load import load_recipe
from envbuild.recipe.targets import host_arch

if TYPE_CHECKING:
    from envbuild.bisect.run import Bisected


@click.command("bisect")
@click.argument("good", metavar="LOCK_A", type=PATH)
@click.argument("bad", metavar="LOCK_B", type=PATH)
@click.option(
    "--metric",
    default="pass",
    show_default=True,
    metavar="step_time|pass|COMMAND",
    help="What is bad: a slower step of training, a failed verification, or a command that a shell runs in the "
    "environment and that does not exit with 0 (125: cannot be judged).",
)
@click.option(
    "--recipe",
    metavar="RECIPE",
    shell_complete=complete.recipes,
    help="Name or path. Default: beside LOCK_B or LOCK_A, else by its name.",
)
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
    """Find the package, or the packages together, that broke or slowed an environment: LOCK_A is good, LOCK_B bad.

    Each is a lock file, a folder that holds it for --target, or a recipe: the lock that it has now. Virtual
    environments with some packages of each lock are built, judged and removed. For n packages that differ, a single one
    is found by at most ceil(log2 n) + 2 builds. Exit code 5 if the locks do not differ by the metric.

    \b
    Examples:
      envbuild bisect old/cpu-x86_64.requirements.txt recipes/pt_cpu/cpu-x86_64.requirements.txt
      envbuild bisect old pt_cpu --metric step_time
      envbuild bisect old recipes/pt_cpu --metric 'python -c "import torchvision"'
    """
    from envbuild.bisect.run import Bisection, bisect, find_lock
    from envbuild.lock.format import read

    environment = run_environment()
    name = target or f"cpu-{host_arch()}"
    files = [find_lock(_lock_of(place, name, environment), name) for place in (good, bad)]
    try:
        locks = [found for file in files if (found := read(file))]
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
    show(as_json, result.as_json(), *(_lines(result) if result.found.reproduced else ()))
    if not result.found.reproduced:
        raise VerificationError(
            f"{files[0]} and {files[1]} do not differ by {metric}: {result.found.why}",
            "check the metric: is the first lock good by it, and the second bad, on this host?",
        )


def _lock_of(place: Path, target: str, environment: Environment) -> Path:
    """Return `place`, or the lock of the recipe that it names."""
    if place.exists():
        return place
    file = recipe_files(search_folders(environment.site.recipe_folders)).get(str(place))
    if file is None:
        return place
    loaded = load_recipe(file)
    return wheel_lock(loaded, open_target(loaded, target, environment)).inspect().path


def _lines(result: Bisected) -> list[str]:
    found = result.found
    named = "  and  ".join(", ".join(map(str, group)) for group in result.culprits())
    single = len(found.groups) == 1
    how = {
        True: "bad with these alone changed",
        False: "bad only with other packages of the second lock, too",
        None: "not tested with these alone changed: that environment cannot be built or judged",
    }[found.alone]
    lines = [f"{'found' if single else 'found, together'}: {named}", f"  {how}"]
    for title, mix in (("good without", found.good), ("bad with", found.bad)):
        if (test := result.of(mix)) is not None:
            lines.append(f"  {title}: {len(test.moved)} of {result.packages} packages of the second lock: {test.text}")
    return [*lines, f"  {len(result.tests)} builds"]
