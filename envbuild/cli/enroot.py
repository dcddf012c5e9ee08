"""`envbuild enroot`."""

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


@click.command("enroot")
@click.argument("recipe", required=False)
@from_option
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="FILE",
    help="Where it goes. Default: build/RECIPE/TARGET/RECIPE.sqsh; with --from as `enroot import` names it.",
)  # fmt: skip
@target_option
@compression_option
@no_verify_option
@faults_option
@runtime_option
@no_bytecode_option
@click.option("--dry-run", is_flag=True, help="Print the plan and stop.")
@locked_option
@offline_option
@json_option
def enroot_command(
    recipe: str | None,
    source: str | None,
    out: Path | None,
    target: str | None,
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
    """Build the squashfs image of RECIPE (default: pt_cpu) for enroot and pyxis, and prove it by training in it.

    Needs neither enroot, root, nor a docker daemon, and writes for any architecture. What an unprivileged user
    can launch here (enroot, or user namespaces) trains in the image before it takes its place.

    \b
    Examples:
      envbuild enroot --out pytorch.sqsh
      envbuild enroot pt_cpu --target cpu-aarch64 --out pytorch-arm.sqsh
      envbuild enroot --from docker://nvcr.io#nvidia/pytorch:25.01-py3 --out pytorch.sqsh
      envbuild enroot --from dockerd://pt_cpu:cpu-x86_64 --compression gzip
      srun --container-image=./pytorch.sqsh torchrun --nproc-per-node 2 -m ddp_train 3 1
    """
    results, plan = make(
        ["enroot"], recipe, source=source, target=target, out=out, compression=compression,
        verify=not no_verify, faults=faults, runtime=runtime, bytecode=not no_bytecode,
        dry_run=dry_run, locked=locked, offline=offline,
    )  # fmt: skip
    show_results(results, plan, as_json=as_json)
