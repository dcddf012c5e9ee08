"""`envbuild preflight`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from envbuild.cli.common import log, own_command, target_option
from envbuild.errors import VerificationError
from envbuild.site.schedulers import LAUNCHER_NAMES


@click.command("preflight")
@click.argument("named", metavar="RECIPE|ARTIFACT")
@click.option("--site", metavar="SITE", help="Name or path of a site file. Default: the site.toml in force.")
@click.option("--host", "hosts", metavar="H1,H2", default="", help="Nodes by ssh, without a scheduler.")
@click.option("--nproc-per-node", type=click.IntRange(1, 100_000), help="GPUs wanted of each node.")
@click.option(
    "--launcher", type=click.Choice(LAUNCHER_NAMES),
    help="What starts the processes of each node. Default: the site's.",
)  # fmt: skip
@click.option("--work", metavar="DIR", help="Folder that all nodes see. Default: [paths] shared, or here.")
@click.option("--unverified", is_flag=True, help="Take an artifact without a passing receipt.")
@target_option
def preflight_command(
    named: str,
    site: str | None,
    hosts: str,
    nproc_per_node: int | None,
    launcher: str | None,
    work: str | None,
    unverified: bool,
    target: str | None,
) -> None:
    """Check the nodes of an allocation, and the network between them, before training.

    Run it inside of salloc or qsub -I: every node starts a small program of the artifact, tells what it has, and tries
    to reach every other one. Names the node, the address and the remedy of what would let training hang. Takes
    seconds. Exit code 5 when something would. `envbuild job --preflight` puts the same before a job's training.

    \b
    Examples:
      salloc --nodes=4 envbuild preflight pt_cpu --site slurm-modules
      envbuild preflight /fsx/pt.sqsh --site aws-parallelcluster
      envbuild preflight build/pt_cpu/cpu-x86_64/venv --host n1,n2
    """
    from envbuild.jobs.artifact import open_artifact
    from envbuild.jobs.model import JobRequest
    from envbuild.jobs.plan import plan_job, wanted_kinds
    from envbuild.jobs.preflight import NAME, alone, find_allocation, run_now
    from envbuild.site.settings import load_site

    where = load_site(os.environ, site)
    allocation = find_allocation([one for one in hosts.split(",") if one], os.environ)
    request = JobRequest(
        scheduler=allocation.scheduler,
        nodes=allocation.nodes,
        nproc_per_node=nproc_per_node,
        name=NAME,
        launcher=allocation.launcher or launcher,
        preflight=True,
        work=work,
        current=Path.cwd(),
        envbuild=own_command(),
    )
    kinds = wanted_kinds(allocation.scheduler, where)
    opened = open_artifact(named, kinds, target, shared=where.paths.shared, unverified=unverified)
    plan = alone(plan_job(request, opened, where))
    code = run_now(plan, allocation, os.environ)
    if code == VerificationError.exit_code:
        raise VerificationError("the nodes would fail a job, see above", "carry out what it says")
    if code != 0:
        log(f"the preflight ended with exit code {code}")
        sys.exit(code)
