"""`envbuild venv`."""

from __future__ import annotations

from pathlib import Path

import click

from envbuild.cli.build_job import AsJob, build_folder, job_options
from envbuild.cli.common import FolderOptions, check_out, folder_options, open_recipe, open_target, target_option
from envbuild.environment import load_environment


@click.command("venv")
@click.argument("recipe")
@target_option
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Default: build/RECIPE/TARGET/venv, with --job in [paths] shared of the site.",
)
@click.option("--python", metavar="P", help="Interpreter: a path or a version. Default: the recipe's version.")
@job_options
@folder_options
def venv_command(
    recipe: str, target: str | None, out: Path | None, python: str | None, as_job: AsJob, how: FolderOptions
) -> None:
    """Build the virtual environment of RECIPE from its lock and prove it by distributed training.

    The environment appears in its place only when it is whole and passed; until then an older one
    stays there. The last line of standard output is its path.

    \b
    Examples:
      envbuild venv pt_cpu
      envbuild venv pt_cpu --out /scratch/envs/pt_cpu --locked --faults
      envbuild venv pt_cpu --job --site slurm-modules --dry-run
      envbuild venv gh200_cu126 --target cu126-aarch64 --job --site pbs-gh200 --bundle bundle --submit
      source build/pt_cpu/cpu-x86_64/venv/bin/activate
    """
    environment = load_environment()
    loaded = open_recipe(recipe, environment)
    wanted = open_target(loaded, target, environment)
    if not as_job.job:  # for a job, nodes may see folders that this host does not
        check_out(out)
    build_folder("venv", loaded, wanted, out, as_job, how, environment, python)
