"""`envbuild job` and `envbuild preflight`."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import click

from envbuild.base.errors import UsageError, VerificationError
from envbuild.base.progress import log
from envbuild.cli import complete, layout
from envbuild.cli.common import PATH, attested_images, check_out, hand_over, next_word, show_job, with_options
from envbuild.contract.kinds import kinds_of
from envbuild.data.schedulers import LAUNCHER_NAMES, SCHEDULER_NAMES
from envbuild.environment import own_command
from envbuild.jobs.model import JobInputs, JobPlan, JobRequest, Strategy
from envbuild.recipe.targets import host_arch
from envbuild.site.settings import Site, load_site

_COUNT = click.IntRange(1, 100_000)
_launcher_option = click.option(
    "--launcher", type=click.Choice(LAUNCHER_NAMES), help="Launcher of the processes on each node. Default: the site's."
)


class _WithScript(click.Command):
    """A command whose first word may be left out, and whose others may be options of a training script."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = next_word(self, args)
        default = not ctx.resilient_parsing and args[at : at + 1] in ([], ["--"])
        try:
            rest = super().parse_args(ctx, [*args[:at], "", *args[at:]] if default else args)
            if default:
                ctx.params["named"] = None
            return rest
        except click.NoSuchOption as error:
            raise UsageError(
                error.format_message(),
                "put -- before arguments of the training script: "
                f"envbuild job … --script TRAIN.py -- {error.option_name} …",
            ) from None


def _opened(named: str | None, target: str | None, kinds: tuple[str, ...], site: Site, **how: Any) -> JobInputs:
    """Return the artifact of a job at `site`, which trusts it and whose GPUs it has code for; see open_artifact."""
    from envbuild.job_inputs import check_gpus, check_trust, open_artifact

    folders = site.recipe_folders
    opened = open_artifact(named, kinds, target, shared=site.paths.shared, locked=True, site_folders=folders, **how)
    check_trust(opened, site.trust)
    check_gpus(opened, site)
    return opened


def explained(plan: JobPlan) -> list[tuple[str, str, str]]:
    """Return (name, value, who set it) for every value of the job with a known origin."""
    rows = []
    variables = dict(plan.variables)
    for key, origin in plan.origins.items():
        head, _, rest = key.partition(".")
        if head == "variables":
            rows.append((rest, variables.get(rest, "counted on the node"), origin))
        elif head == "artifact":
            rows.append((key, f"{plan.artifact.path} ({plan.artifact.target})", origin))
        elif head == "command":
            rows.append((key, " ".join(plan.command), origin))
        else:
            rows.append((key, str(getattr(plan, head)), origin))
    return rows


@click.command("job", cls=_WithScript)
@click.argument("named", metavar="[RECIPE|ARTIFACT]", required=False, shell_complete=complete.recipes_or_artifacts)
@click.argument("arguments", metavar="[ARGS]...", nargs=-1, type=click.UNPROCESSED, shell_complete=complete.any_files)
@with_options("site")
@click.option("--nodes", type=_COUNT, help="Nodes. Default: the recipe's [verify] nodes.")
@click.option("--nproc-per-node", type=_COUNT, help="Ranks of each node. Default: its GPUs, or the recipe's [verify].")
@click.option(
    "--script",
    metavar="TRAIN.py",
    shell_complete=complete.python_files,
    help="Training script, by its path on the nodes; ARGS are its arguments. Default: the bundled trainer.",
)
@click.option("--module", metavar="PKG.TRAIN", help="Training module in the artifact.")
@click.option("--scheduler", type=click.Choice(SCHEDULER_NAMES), help="Default: the site's.")
@click.option(
    "--strategy",
    type=click.Choice(get_args(Strategy)),
    default="ddp",
    show_default=True,
    help="ddp, accelerate, deepspeed: one torchrun, `accelerate launch` or DeepSpeed launcher a node; horovod: one MPI "
    "process a rank; single: one process.",
)
@click.option("--name", metavar="NAME", help="The job's name. Default: the recipe's.")
@click.option("--time", metavar="HH:MM:SS", help="Time limit. Default: the site's.")
@click.option("--work", metavar="DIR", help="Folder of runs, seen by all nodes. Default: [paths] shared, or here.")
@_launcher_option
@click.option("--max-restarts", type=click.IntRange(0, 1000), help="Restarts of failed ranks by torchrun. Default: 3.")
@click.option(
    "--rendezvous",
    type=click.Choice(["c10d", "etcd-v2"]),
    default="c10d",
    show_default=True,
    help="Rendezvous backend: c10d at the head node, or an etcd server.",
)
@click.option("--endpoint", metavar="HOST:PORT", default="", help="The etcd server.")
@click.option("--preflight", is_flag=True, help="Check nodes and network first; see `envbuild preflight`.")
@click.option(
    "--exclude-slow", is_flag=True, help="Compare the nodes' speed, too, and start again without slow ones (Slurm)."
)
@with_options("unverified", "exact", "target")
@click.option("--out", type=PATH, metavar="FILE", help="Write the job to this file. Default: print it.")
@click.option(
    "--export", type=click.Choice(["edf"]), help="Print the container alone: edf, for CSCS's `srun --environment`."
)
@click.option("--explain", is_flag=True, help="Show each value and its origin, on standard error below the script.")
@click.option("--submit", is_flag=True, help="Submit it to the scheduler, and print the job's number.")
@with_options("json")
def job_command(
    named: str | None,
    arguments: tuple[str, ...],
    site: str | None,
    target: str | None,
    out: Path | None,
    unverified: bool,
    exact: bool,
    export: str | None,
    explain: bool,
    submit: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Render the job that trains with an artifact on a cluster.

    ARTIFACT is the path of an artifact, NAME@sha256:… of an image in a registry, or a RECIPE (default: the only one of
    ./recipes, or else pt_cpu): its artifact in ./build, or in the site's [paths] shared. The artifact must have passed
    verification, and the packages of a RECIPE's artifact must be those of its current lock. Put -- before ARGS that
    begin with a dash.

    \b
    Examples:
      envbuild job pt_cpu --site aws-parallelcluster --nodes 4 --submit
      envbuild job pytorch.sqsh --site slurm-modules --script train.py -- --lr 0.1
      envbuild job pt_cpu --site slurm-modules --module pkg.train -- --lr 0.1
      envbuild job pt_cpu --site aws-eks --out job.yaml
      envbuild job pt_cpu --site slurm-modules --explain --preflight 50 10
      envbuild job pt_cpu --site slurm-modules --nodes 64 --exclude-slow --submit
    """
    from envbuild.contract.receipt import is_quick
    from envbuild.job_inputs import full_hint
    from envbuild.jobs.plan import plan_job, scheduler_of, wanted_kinds
    from envbuild.jobs.plan_checks import possible_faults
    from envbuild.jobs.schedulers import render
    from envbuild.jobs.staging import environment_definition
    from envbuild.jobs.submit import no_scheduler_error

    check_out(out)
    where = load_site(os.environ, site)
    request = JobRequest(arguments=arguments, current=Path.cwd(), envbuild=own_command(), exact=exact, **options)
    nobody = request.scheduler is None and where.scheduler.kind == "none"
    # Without a scheduler, the job runs on this host, without a docker daemon.
    kinds = kinds_of("folder", "file") if nobody else wanted_kinds(scheduler_of(request, where), where)
    how = {"unverified": unverified, "exact": exact, "fetch": attested_images(where), "quick": not submit}
    opened = _opened(named, target, kinds, where, **how)
    if nobody:
        raise no_scheduler_error(request, opened, where)
    plan = plan_job(request, opened, where)
    warnings = list(possible_faults(plan, host_arch()))
    if opened.receipt is not None and is_quick(opened.receipt):
        warnings.append(
            f"the artifact was verified with --verify quick only, and --submit refuses it: {full_hint(opened)}"
        )
    for warning in warnings:
        log(f"warning: {warning}")
    values = explained(plan)
    if export and submit:
        raise UsageError("--export writes a container, and --submit a job", "leave one of them out")
    text = environment_definition(plan) if export else render(plan)
    hint = "name another file with --out, or another folder with --work"
    path, number = hand_over(plan, text, out, submit=submit, hint=hint)
    about = {
        "path": str(path.absolute()) if path else None,
        "scheduler": plan.scheduler,
        "site": plan.site.name,
        "artifact": asdict(plan.artifact),
        "values": {name: {"value": value, "origin": origin} for name, value, origin in values},
        "script": text,
        "warnings": warnings,
    }
    show_job(as_json, about, text, path, number)
    sys.stdout.flush()  # standard error is below the script, where a terminal shows both
    for line in layout.columns(values, most=60) if explain else ():
        log(line)


@click.command("preflight")
@click.argument("named", metavar="[RECIPE|ARTIFACT]", required=False, shell_complete=complete.recipes_or_artifacts)
@with_options("site")
@click.option("--host", "hosts", metavar="H1,H2", default="", help="Nodes by ssh, without a scheduler.")
@click.option("--nproc-per-node", type=_COUNT, help="GPUs that each node must have.")
@click.option("--speed", is_flag=True, help="Compare how fast nodes compute, copy memory and send, and name slow ones.")
@_launcher_option
@click.option("--work", metavar="DIR", help="Folder that all nodes see. Default: [paths] shared, or here.")
@with_options("unverified", "exact", "target")
def preflight_command(
    named: str | None,
    site: str | None,
    hosts: str,
    launcher: str | None,
    unverified: bool,
    exact: bool,
    target: str | None,
    **options: Any,
) -> None:
    """Check the nodes of an allocation, and the network between them, before training.

    Run it inside of salloc or qsub -I: every node starts a small program of the artifact, reports its hardware and
    software, and tries to reach every other node. envbuild names the node, the address and the fix for each finding
    that would make training hang. It takes seconds. The nodes also compare the files of a venv or conda environment
    with its manifest, with --exact their contents. Exit code 5 if a job would fail. `envbuild job --preflight` runs the
    same checks before a job's training.

    \b
    Examples:
      salloc --nodes=4 envbuild preflight pt_cpu --site slurm-modules
      envbuild preflight /fsx/pt.sqsh --site aws-parallelcluster --speed
      envbuild preflight build/pt_cpu/cpu-x86_64/venv --host n1,n2
    """
    from envbuild.jobs.plan import plan_job, wanted_kinds
    from envbuild.jobs.submit import NAME, alone, find_allocation, run_now

    where = load_site(os.environ, site)
    allocation = find_allocation([host for host in hosts.split(",") if host], os.environ)
    request = JobRequest(
        scheduler=allocation.scheduler,
        nodes=allocation.nodes,
        name=NAME,
        launcher=allocation.launcher or launcher,
        preflight=True,
        exact=exact,
        current=Path.cwd(),
        envbuild=own_command(),
        **options,
    )
    kinds = wanted_kinds(allocation.scheduler, where)
    opened = _opened(named, target, kinds, where, unverified=unverified, exact=exact, quick=True)
    plan = alone(plan_job(request, opened, where))
    code = run_now(plan, allocation, os.environ)
    if code == VerificationError.exit_code:
        raise VerificationError("a job would fail on these nodes; see the findings above", "carry out what it says")
    if code != 0:
        log(f"the preflight ended with exit code {code}")
        sys.exit(code)
