"""`envbuild lint-job`."""

from __future__ import annotations

from pathlib import Path

import click

from envbuild.cli.common import log, print_json
from envbuild.cli.options import PATH, with_options
from envbuild.errors import VerificationError
from envbuild.jobs.lint import lint_file
from envbuild.jobs.lint_faults import LEVELS


@click.command("lint-job")
@click.argument("scripts", metavar="SCRIPT...", nargs=-1, required=True, type=PATH)
@with_options("json")
def lint_job_command(scripts: tuple[Path, ...], as_json: bool) -> None:
    """Find faults in hand-written job scripts: sbatch, PBS, shell, Kubernetes manifests.

    Exit code 5 when one of them is an error; warnings and hints alone are exit code 0. A line that ends in `# lint-job:
    ignore` is passed over.

    \b
    Examples:
      envbuild lint-job train.sbatch
      envbuild lint-job ddp.pbs pytorchjob.yaml --json
    """
    problems = [problem for path in scripts for problem in lint_file(path)]
    count = {level: sum(one.fault.level == level for one in problems) for level in LEVELS}
    if as_json:
        print_json({"problems": [one.as_json() for one in problems], "count": count})
    colours = {"error": "red", "warning": "yellow", "hint": "blue"}
    for one in [] if as_json else problems:
        level = click.style(one.fault.level, fg=colours[one.fault.level], bold=True)
        click.echo(f"{one.file}:{one.line}: {level}: {one.what}  [{one.fault.id}]")
        click.echo(f"    {one.text}")
        click.echo(click.style("    instead: ", fg="green") + one.instead)
    told = ", ".join(f"{number} {level}{'s' * (number != 1)}" for level, number in count.items())
    if count["error"]:
        names = dict.fromkeys(one.file for one in problems if one.fault.level == "error")
        raise VerificationError(f"{', '.join(names)}: {told}", "each line says what to write instead")
    if not as_json:
        log(told if problems else "no faults were found")
