"""`envbuild diagnose`."""

from __future__ import annotations

from pathlib import PurePath

import click

from envbuild.cli.common import print_json
from envbuild.cli.options import with_options
from envbuild.diagnose.engine import diagnose
from envbuild.diagnose.model import Diagnosis, Evidence
from envbuild.diagnose.read import jobs_of, read_logs
from envbuild.diagnose.rules import load_rules

_EVIDENCE = 6


@click.command("diagnose")
@click.argument("logs", metavar="LOG...", nargs=-1, required=True)
@click.option("--all", "everything", is_flag=True, help="Show what follows from a cause, too.")
@with_options("json")
def diagnose_command(logs: tuple[str, ...], everything: bool, as_json: bool) -> None:
    """Say why a job failed, from its LOGs: causes first, with the lines that show them and what to do.

    Give the logs of all nodes, or the one that a scheduler made of them; compressed ones too, "-" is standard input. Of
    a folder each job is diagnosed by itself, told by the number in its logs' names (ddp_1234.out). Exit code 0 whether
    or not something was recognised (--json: findings is empty then).

    \b
    Examples:
      envbuild diagnose logs/ddp_1234.out
      kubectl logs --prefix --tail=-1 -l training.kubeflow.org/job-name=ddp | envbuild diagnose -
    """
    jobs = jobs_of(logs)
    found = [(job, diagnose(read_logs(job.logs), load_rules())) for job in jobs]
    if as_json:
        rows = [{"job": job.number, "logs": list(job.logs), **one.as_json()} for job, one in found]
        print_json({"jobs": rows} if len(found) > 1 else found[0][1].as_json())
        return
    for number, (job, one) in enumerate(found):
        if len(found) > 1:
            name = f"job {job.number}" if job.number else "other logs"
            title = f"{name}: {', '.join(PurePath(log).name for log in job.logs)}"
            click.echo(("\n" if number else "") + click.style(title, underline=True))
        _show(one, everything)


def _show(found: Diagnosis, everything: bool) -> None:
    causes = [one for one in found.findings if one.kind == "cause"]
    # Without a known cause, only the symptoms can be shown.
    hidden = [] if everything or not causes else [f for f in found.findings if f.kind == "symptom"]
    for number, one in enumerate((f for f in found.findings if f not in hidden), start=1):
        head = {"cause": "", "symptom": "symptom: ", "note": "note: "}[one.kind]
        title = f"{number}. {head}{one.cause}"
        click.echo(click.style(title, bold=one.kind == "cause") + f"  [{one.id}]")
        for line in one.evidence[:_EVIDENCE]:
            click.echo(f"     {_place(line)}")
        if len(one.evidence) > _EVIDENCE:
            click.echo(f"     … and {len(one.evidence) - _EVIDENCE} more")
        click.echo(click.style("   do: ", fg="green") + one.hint)
    if hidden:
        click.echo(f"Followed by: {', '.join(one.id for one in hidden)} (--all shows them)", err=True)
    if not found.findings:
        click.echo(f"Nothing was recognised in {found.lines} lines.", err=True)
    if found.exception:
        click.echo("The program's first exception:")
        for line in found.exception:
            click.echo(f"     {_place(line)}")
    if found.last and not found.findings:
        click.echo("The last lines that speak of an error:", err=True)
        for line in found.last:
            click.echo(f"     {_place(line)}")


def _place(line: Evidence) -> str:
    return f"{line.file}:{line.line}: {line.text}"
