"""`envbuild diagnose` and `envbuild lint-job`: faults of jobs, in their logs and in their scripts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePath

import click

from envbuild.base.errors import VerificationError
from envbuild.base.progress import log
from envbuild.cli import complete
from envbuild.cli.common import PATH, print_json, with_options
from envbuild.jobcheck.diagnose.engine import Diagnosis, Evidence, diagnose
from envbuild.jobcheck.diagnose.read import jobs_of, read_logs
from envbuild.jobcheck.diagnose.rules import load_rules

_EVIDENCE = 6


@click.command("diagnose")
@click.argument("logs", metavar="LOG...", nargs=-1, required=True, shell_complete=complete.any_files)
@click.option("--all", "everything", is_flag=True, help="Also show consequences of a cause.")
@with_options("json")
def diagnose_command(logs: tuple[str, ...], everything: bool, as_json: bool) -> None:
    """Find out from its LOGs why a job failed: causes first, with the lines that show them and what to do.

    Give the logs of all nodes, or the one that a scheduler merged from them; compressed logs work too, and "-" is
    standard input. In a folder, each job is diagnosed by itself; jobs are told apart by the number in the names of
    their logs (ddp_1234.out). The exit code is 0 whether or not a cause was recognised (--json: findings is then
    empty).

    \b
    Examples:
      envbuild diagnose logs/ddp_1234.out
      kubectl logs --prefix --tail=-1 -l training.kubeflow.org/job-name=ddp | envbuild diagnose -
    """
    diagnoses = [(job, files, diagnose(read_logs(files), load_rules())) for job, files in jobs_of(logs).items()]
    if as_json:
        rows = [{"job": job, "logs": files, **diagnosis.as_json()} for job, files, diagnosis in diagnoses]
        print_json({"jobs": rows} if len(diagnoses) > 1 else diagnoses[0][2].as_json())
        return
    for number, (job, files, diagnosis) in enumerate(diagnoses):
        if len(diagnoses) > 1:
            name = f"job {job}" if job else "other logs"
            title = f"{name}: {', '.join(PurePath(log).name for log in files)}"
            click.echo(("\n" if number else "") + click.style(title, underline=True))
        _show(diagnosis, everything)


def _show(diagnosis: Diagnosis, everything: bool) -> None:
    known = any(finding.kind == "cause" for finding in diagnosis.findings)
    if diagnosis.exception:
        title = (
            "The program's own words; the cause below may lead to them:"
            if known
            else "No cause is known. The program's own words:"
        )
        click.echo(click.style(title, bold=True))
        _quote(diagnosis.exception)
    elif diagnosis.verdict == "symptom":
        click.echo(click.style("The log does not hold the cause, or no rule knows it. It shows:", bold=True))
    # Without a known cause, only the symptoms can be shown.
    hides = not everything and known
    hidden = [finding for finding in diagnosis.findings if hides and finding.kind == "symptom"]
    for number, diagnosis_finding in enumerate((f for f in diagnosis.findings if f not in hidden), start=1):
        head = "" if diagnosis_finding.kind == "cause" else f"{diagnosis_finding.kind}: "
        click.echo(
            click.style(f"{number}. {head}{diagnosis_finding.cause}", bold=diagnosis_finding.kind == "cause")
            + f"  [{diagnosis_finding.id}]"
        )
        _quote(diagnosis_finding.evidence[:_EVIDENCE])
        if len(diagnosis_finding.evidence) > _EVIDENCE:
            click.echo(f"     … and {len(diagnosis_finding.evidence) - _EVIDENCE} more")
        click.echo(click.style("   do: ", fg="green") + diagnosis_finding.hint)
    if hidden:
        click.echo(f"Also in the log: {', '.join(finding.id for finding in hidden)} (--all shows them)", err=True)
    if not diagnosis.findings:
        click.echo(f"Nothing was recognised in {diagnosis.lines} lines.", err=True)
    if diagnosis.last and not diagnosis.findings and not diagnosis.exception:
        click.echo("The last lines that speak of an error:", err=True)
        _quote(diagnosis.last)


def _quote(lines: Sequence[Evidence]) -> None:
    for line in lines:
        click.echo(f"     {line.file}:{line.line}: {line.text}")


@click.command("lint-job")
@click.argument("scripts", metavar="SCRIPT...", nargs=-1, required=True, type=PATH)
@with_options("json")
def lint_job_command(scripts: tuple[Path, ...], as_json: bool) -> None:
    """Find faults in hand-written job scripts: sbatch, PBS, shell, Kubernetes manifests.

    Exit code 5 when a script has an error, 0 when it has only warnings and hints. Lines that end in `# lint-job:
    ignore` are skipped.

    \b
    Examples:
      envbuild lint-job train.sbatch
      envbuild lint-job ddp.pbs pytorchjob.yaml --json
    """
    from envbuild.jobcheck.lint.engine import lint_file
    from envbuild.jobcheck.lint.faults import LEVELS
    from envbuild.jobs.schedulers import SCRIPT_FACTS

    problems = [problem for path in scripts for problem in lint_file(path, SCRIPT_FACTS)]
    count = {level: sum(problem.fault.level == level for problem in problems) for level in LEVELS}
    if as_json:
        print_json({"problems": [problem.as_json() for problem in problems], "count": count})
    colours = {"error": "red", "warning": "yellow", "hint": "blue"}
    for fault in [] if as_json else problems:
        level = click.style(fault.fault.level, fg=colours[fault.fault.level], bold=True)
        click.echo(f"{fault.file}:{fault.line}: {level}: {fault.message}  [{fault.fault.id}]")
        click.echo(f"    {fault.text}")
        click.echo(click.style("    instead: ", fg="green") + fault.hint)
    summary = ", ".join(f"{number} {level}{'s' * (number != 1)}" for level, number in count.items())
    if count["error"]:
        names = dict.fromkeys(problem.file for problem in problems if problem.fault.level == "error")
        raise VerificationError(f"{', '.join(names)}: {summary}", "each line says what to write instead")
    if not as_json:
        log(summary if problems else "no faults were found")
