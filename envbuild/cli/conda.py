"""`envbuild conda`."""

from __future__ import annotations

from pathlib import Path

import click

from envbuild.cli.build_job import AsJob, build_folder, job_options
from envbuild.cli.common import FolderOptions, check_out, folder_options, open_recipe, open_target, target_option
from envbuild.environment import load_environment
from envbuild.errors import UsageError


@click.command("conda")
@click.argument("recipe")
@target_option
@click.option(
    "--out",
    "--prefix",
    "-p",
    "out",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="The environment's folder. Default: build/RECIPE/TARGET/conda, with --job in [paths] shared of the site.",
)
@click.option(
    "--name",
    "-n",
    metavar="NAME",
    help="Put it where `conda activate NAME` finds it (CONDA_ENVS_DIRS, conda's envs, ~/.conda/envs).",
)
@job_options
@folder_options
def conda_command(
    recipe: str, target: str | None, out: Path | None, name: str | None, as_job: AsJob, how: FolderOptions
) -> None:
    """Build the conda environment of RECIPE from its lock and prove it by distributed training.

    It needs no conda: packages are taken from the recipe's channels (or the site's mirrors of them), checked
    by sha256 and linked from a shared cache. The environment appears in its place only when it is whole and
    passed. The last line of standard output is its path; conda, mamba and micromamba activate it.

    \b
    Examples:
      envbuild conda pt_cpu
      envbuild conda pt_cpu --name pt_cpu --locked && conda activate pt_cpu
      envbuild conda pt_cpu --prefix /fsx/envs/pt_cpu --faults
      envbuild conda pt_cpu --job --site aws-parallelcluster --submit
      build/pt_cpu/cpu-x86_64/conda/bin/torchrun --nproc-per-node 2 -m ddp_train 3 1
    """
    from envbuild.site.conda_envs import named_prefix

    if out is not None and name is not None:
        raise UsageError("--name and --prefix both say where to build", "give one of them")
    environment = load_environment()
    loaded = open_recipe(recipe, environment)
    wanted = open_target(loaded, target, environment)
    if not as_job.job:  # for a job, nodes may see folders that this host does not
        check_out(out)
    if name is not None:
        out = named_prefix(name, environment.variables)
    build_folder("conda", loaded, wanted, out, as_job, how, environment)
