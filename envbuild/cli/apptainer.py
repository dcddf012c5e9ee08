"""`envbuild apptainer`."""

from __future__ import annotations

from pathlib import Path

import click

from envbuild.cli.common import json_option, locked_option, offline_option, target_option
from envbuild.cli.squash import (
    compression_option,
    faults_option,
    from_option,
    make,
    no_bytecode_option,
    no_verify_option,
    runtime_option,
    show_results,
)


@click.command("apptainer")
@click.argument("recipe", required=False)
@from_option
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="FILE",
    help="Where it goes. Default: build/RECIPE/TARGET/RECIPE.sif; with --from as `apptainer pull` names it.",
)  # fmt: skip
@target_option
@click.option(
    "--engine", type=click.Choice(["native", "apptainer"]), default="native", show_default=True,
    help="apptainer: `apptainer build` of the same layers by the installed tool.",
)  # fmt: skip
@compression_option
@no_verify_option
@faults_option
@runtime_option
@no_bytecode_option
@click.option("--dry-run", is_flag=True, help="Print the plan and stop.")
@locked_option
@offline_option
@json_option
def apptainer_command(
    recipe: str | None,
    source: str | None,
    out: Path | None,
    target: str | None,
    engine: str,
    compression: str,
    no_verify: bool,
    faults: bool,
    runtime: str | None,
    no_bytecode: bool,
    dry_run: bool,
    locked: bool,
    offline: bool,
    as_json: bool,
) -> None:
    """Build the SIF of RECIPE (default: pt_cpu) for Apptainer and Singularity, and prove it by training in it.

    Needs neither Apptainer, root, nor a docker daemon, and writes for any architecture. What an unprivileged
    user can launch here (Apptainer, or user namespaces) trains in the image before it takes its place.

    \b
    Examples:
      envbuild apptainer
      envbuild apptainer pt_cpu --out pytorch.sif --faults
      envbuild apptainer --from docker-archive:image.tar --out image.sif
      envbuild apptainer pt_cpu --engine apptainer
      apptainer exec pt_cpu.sif torchrun --nproc-per-node 2 -m ddp_train 3 1
    """
    results, plan = make(
        ["apptainer"], recipe, source=source, target=target, out=out, compression=compression,
        verify=not no_verify, faults=faults, runtime=runtime, bytecode=not no_bytecode,
        dry_run=dry_run, locked=locked, offline=offline, engine=engine,
    )  # fmt: skip
    show_results(results, plan, as_json=as_json)
