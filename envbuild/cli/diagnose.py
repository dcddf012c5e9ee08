"""`envbuild diagnose`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from envbuild.cli.common import json_option, print_json

if TYPE_CHECKING:
    from envbuild.jobs.diagnose import Diagnosis, Evidence

_EVIDENCE = 6


@click.command("diagnose")
@click.argument("logs", metavar="LOG...", nargs=-1, required=True)
@click.option("--all", "everything", is_flag=True, help="Show what follows from a cause, too.")
@json_option
def diagnose_command(logs: tuple[str, ...], everything: bool, as_json: bool) -> None:
    """Say why a job failed, from its LOGs: causes first, with the lines that show them and what to do.

    Give the logs of all nodes, or the one that a scheduler made of them; compressed ones and folders too, "-" is
    standard input. Exit code 0 whether or not something was recognised (--json: findings is empty then).

    \b
    Examples:
      envbuild diagnose logs/ddp_1234.out
      kubectl logs --prefix -l training.kubeflow.org/job-name=ddp | envbuild diagnose -
    """
    from envbuild.jobs.diagnose import diagnose
    from envbuild.jobs.diagnose_read import read_logs
    from envbuild.jobs.diagnose_rules import load_rules

    found = diagnose(read_logs(logs), load_rules())
    if as_json:
        print_json(
            {
                "lines": found.lines,
                "findings": [one.as_json() for one in found.findings],
                "last": [
                    {"file": one.file, "line": one.line, "text": one.text} for one in found.last
                ],
            }
        )
    else:
        _show(found, everything)


def _show(found: Diagnosis, everything: bool) -> None:
    causes = [one for one in found.findings if one.kind == "cause"]
    # Where no cause is known, what follows from it is all there is to say.
    hidden = [] if everything or not causes else [f for f in found.findings if f.kind == "symptom"]
    for number, one in enumerate((f for f in found.findings if f not in hidden), start=1):
        head = {"cause": "", "symptom": "symptom: ", "note": "note: "}[one.kind]
        title = f"{number}. {head}{one.cause}"
        click.echo(click.style(title, bold=one.kind == "cause") + f"  [{one.id}]")
        for line in one.evidence[:_EVIDENCE]:
            click.echo(f"     {_place(line)}")
        if len(one.evidence) > _EVIDENCE:
            click.echo(f"     … and {len(one.evidence) - _EVIDENCE} more")
        click.echo(click.style("   do: ", fg="green") + one.remedy)
    if hidden:
        click.echo(
            f"Followed by: {', '.join(one.id for one in hidden)} (--all shows them)", err=True
        )
    if found.findings:
        return
    click.echo(f"Nothing was recognised in {found.lines} lines.", err=True)
    if found.last:
        click.echo("The last lines that speak of an error:", err=True)
        for line in found.last:
            click.echo(f"     {_place(line)}")


def _place(line: Evidence) -> str:
    return f"{line.file}:{line.line}: {line.text}"
