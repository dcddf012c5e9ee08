"""`envbuild conda`."""

from __future__ import annotations

from pathlib import Path

import click

from envbuild.cli.common import (
    finish,
    json_option,
    locked_option,
    offline_option,
    open_recipe,
    say,
    show_dry_run,
    target_option,
)
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
    help="The environment's folder. Default: build/RECIPE/TARGET/conda.",
)
@click.option(
    "--name",
    "-n",
    metavar="NAME",
    help="Put it where `conda activate NAME` finds it (CONDA_ENVS_DIRS, conda's envs, ~/.conda/envs).",
)
@click.option("--no-verify", is_flag=True, help="Only build; leave no receipt.")
@click.option(
    "--faults", is_flag=True, help="Verify too that a killed rank restarts from the snapshot."
)
@click.option(
    "--compile-bytecode", is_flag=True, help="Compile all modules now, not when first imported."
)
@click.option("--dry-run", is_flag=True, help="Print the plan and stop.")
@locked_option
@offline_option
@json_option
def conda_command(
    recipe: str,
    target: str | None,
    out: Path | None,
    name: str | None,
    no_verify: bool,
    faults: bool,
    compile_bytecode: bool,
    dry_run: bool,
    locked: bool,
    offline: bool,
    as_json: bool,
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
      build/pt_cpu/cpu-x86_64/conda/bin/torchrun --nproc-per-node 2 -m ddp_train 3 1
    """
    from envbuild.artifacts import conda
    from envbuild.make import make_environment, prepare
    from envbuild.make_kinds import Conda
    from envbuild.site.conda_envs import named_prefix

    if out is not None and name is not None:
        raise UsageError("--name and --prefix both say where to build", "give one of them")
    environment = load_environment()
    loaded = open_recipe(recipe, environment)
    wanted, _ = loaded.target(target)
    if name is not None:
        out = named_prefix(name, environment.variables)
    if not dry_run:
        conda.probe(wanted)
    plan, trainer = prepare(
        loaded, wanted, environment, artifact=conda.KIND, locked=locked, offline=offline, say=say,
        compile_bytecode=compile_bytecode, conda=True,
    )  # fmt: skip
    path = out or conda.default_path(loaded.recipe.name, wanted.name)
    if dry_run:
        show_dry_run(plan, path, as_json)
        return
    result = make_environment(
        Conda(plan, trainer, environment, offline), plan, environment, path, say,
        verify=not no_verify, faults=faults,
    )  # fmt: skip
    finish(result, path, as_json)
