"""`envbuild job`."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from envbuild.cli.common import check_out, json_option, log, own_command, print_json, target_option
from envbuild.errors import UsageError
from envbuild.site.schedulers import LAUNCHER_NAMES, SCHEDULER_NAMES

if TYPE_CHECKING:
    from envbuild.jobs.model import JobPlan

_COUNT = click.IntRange(1, 100_000)


class _WithScript(click.Command):
    """A command whose arguments may be options of a training script."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise UsageError(
                error.format_message(),
                "put -- before arguments of the training script: "
                f"envbuild job … --script TRAIN.py -- {error.option_name} …",
            ) from None


@click.command("job", cls=_WithScript)
@click.argument("named", metavar="RECIPE|ARTIFACT")
@click.argument("arguments", metavar="[ARGS]...", nargs=-1, type=click.UNPROCESSED)
@click.option("--site", metavar="SITE", help="Name or path of a site file. Default: the site.toml in force.")
@click.option("--nodes", type=_COUNT, help="Nodes. Default: the recipe's [verify] nodes.")
@click.option("--nproc-per-node", type=_COUNT, help="Ranks of each node. Default: its GPUs, or the recipe's [verify].")
@click.option(
    "--script", metavar="TRAIN.py",
    help="What to train with, as nodes see it; ARGS are its own. Default: the bundled trainer.",
)  # fmt: skip
@click.option("--scheduler", type=click.Choice(SCHEDULER_NAMES), help="Default: the site's.")
@click.option(
    "--strategy", type=click.Choice(["ddp", "horovod", "single"]), default="ddp", show_default=True,
    help="ddp: one torchrun a node; horovod: one MPI process a rank; single: one process.",
)  # fmt: skip
@click.option("--name", metavar="NAME", help="The job's name. Default: the recipe's.")
@click.option("--time", metavar="HH:MM:SS", help="Time limit. Default: the site's.")
@click.option("--work", metavar="DIR", help="Folder of runs, seen by all nodes. Default: [paths] shared, or here.")
@click.option(
    "--launcher", type=click.Choice(LAUNCHER_NAMES),
    help="What starts the processes of each node. Default: the site's.",
)  # fmt: skip
@click.option("--max-restarts", type=click.IntRange(0, 1000), help="Restarts of failed ranks by torchrun. Default: 3.")
@click.option(
    "--rendezvous", type=click.Choice(["c10d", "etcd-v2"]), default="c10d", show_default=True,
    help="Where agents meet: at the head node, or at an etcd server.",
)  # fmt: skip
@click.option("--endpoint", metavar="HOST:PORT", default="", help="The etcd server.")
@click.option("--preflight", is_flag=True, help="Check nodes and network first; see `envbuild preflight`.")
@click.option("--unverified", is_flag=True, help="Take an artifact without a passing receipt.")
@target_option
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE", help="Write it there. Default: print it.")
@click.option("--explain", is_flag=True, help="Show every value and who decided it, on standard error.")
@click.option("--submit", is_flag=True, help="Hand it to the scheduler; prints the job's number.")
@json_option
def job_command(
    named: str,
    arguments: tuple[str, ...],
    site: str | None,
    target: str | None,
    out: Path | None,
    unverified: bool,
    explain: bool,
    submit: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Render the job that trains with an artifact on a cluster.

    Takes the path of an artifact, NAME@sha256:… of an image in a registry, or a RECIPE, of which it takes what was
    built here, or in [paths] shared of the site. Only what passed verification is taken. Put -- before ARGS that begin
    with a dash.

    \b
    Examples:
      envbuild job pt_cpu --site aws-parallelcluster --nodes 4 --submit
      envbuild job pytorch.sqsh --site slurm-modules --script train.py -- --lr 0.1
      envbuild job pt_cpu --site aws-eks --out job.yaml
      envbuild job pt_cpu --site slurm-modules --explain --preflight 50 10
    """
    from envbuild.jobs.artifact import open_artifact
    from envbuild.jobs.here import no_scheduler_error
    from envbuild.jobs.model import JobRequest
    from envbuild.jobs.plan import plan_job, scheduler_of, wanted_kinds
    from envbuild.jobs.plan_checks import possible_faults
    from envbuild.jobs.render import explained, render
    from envbuild.kinds import kinds_of
    from envbuild.recipe.targets import host_arch
    from envbuild.site.settings import load_site

    check_out(out)
    where = load_site(os.environ, site)
    request = JobRequest(arguments=arguments, current=Path.cwd(), envbuild=own_command(), **options)
    nobody = request.scheduler is None and where.scheduler.kind == "none"
    # Without a scheduler, the job runs on this host, without a docker daemon.
    kinds = kinds_of("folder", "file") if nobody else wanted_kinds(scheduler_of(request, where), where)
    opened = open_artifact(named, kinds, target, shared=where.paths.shared, unverified=unverified)
    if nobody:
        raise no_scheduler_error(request, opened, where)
    plan = plan_job(request, opened, where)
    warnings = list(possible_faults(plan, host_arch()))
    for one in warnings:
        log(f"warning: {one}")
    if explain:
        _table(explained(plan))
    text = render(plan)
    path, number = _hand_over(plan, text, out, submit)
    if as_json:
        print_json({**_as_json(plan, text, path, number), "warnings": warnings})
    elif number is not None:
        click.echo(number)
    elif path is not None:
        click.echo(path)
    else:
        click.echo(text, nl=False)


def _hand_over(plan: JobPlan, text: str, out: Path | None, submit: bool) -> tuple[Path | None, str | None]:
    """Write or submit the script, if requested.

    Returns its path, None if it is to be printed, and the job's number, None if it was not submitted.
    """
    from envbuild.jobs.schedulers import SCHEDULERS
    from envbuild.jobs.submit import default_script, submit_script, write_script

    if out is None and not submit:
        return None, None
    hint = "name another file with --out, or another folder with --work"
    if not submit and out is not None:
        write_script(text, out, hint)
        return out, None
    path = out or default_script(plan, Path() if SCHEDULERS[plan.scheduler].pods else Path(plan.work))
    number = submit_script(plan, text, path, os.environ, hint, named=out is not None)
    log(f"submitted {path} to {plan.scheduler}")
    return path, number


def _table(rows: list[tuple[str, str, str]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    widths[1] = min(widths[1], 60)
    for name, value, origin in rows:
        log(f"{name:{widths[0]}}  {value:{widths[1]}}  {origin}")


def _as_json(plan: JobPlan, text: str, path: Path | None, number: str | None) -> dict[str, Any]:
    from envbuild.jobs.render import explained

    return {
        "job": number,
        "path": str(path.absolute()) if path else None,
        "scheduler": plan.scheduler,
        "site": plan.site.name,
        "artifact": asdict(plan.artifact),
        "values": {name: {"value": value, "origin": origin} for name, value, origin in explained(plan)},
        "script": text,
    }
