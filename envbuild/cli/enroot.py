"""`envbuild enroot`."""

from __future__ import annotations

from pathlib import Path

import click

from envbuild.cli.squash import Choices, from_option, make, with_choices


@click.command("enroot")
@click.argument("recipe", required=False)
@from_option
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="FILE",
    help="Where it goes. Default: build/RECIPE/TARGET/RECIPE.sqsh; with --from as `enroot import` names it.",
)  # fmt: skip
@with_choices
def enroot_command(recipe: str | None, source: str | None, out: Path | None, choices: Choices) -> None:
    """Build the squashfs image of RECIPE (default: pt_cpu) for enroot and pyxis, and prove it by training in it.

    Needs neither enroot, root, nor a docker daemon, and writes for any architecture. What an unprivileged user
    can launch here (enroot, or user namespaces) trains in the image before it takes its place.

    \b
    Examples:
      envbuild enroot --out pt.sqsh
      envbuild enroot pt_cpu --target cpu-aarch64 --out pytorch-arm.sqsh
      envbuild enroot --from docker://nvcr.io#nvidia/pytorch:25.01-py3 --out pytorch.sqsh
      envbuild enroot --from dockerd://pt_cpu:cpu-x86_64 --compression gzip
      srun --container-image=./pt.sqsh --container-mounts=$PWD:/workspace torchrun --nproc-per-node 2 -m ddp_train 3 1
    """
    make(["enroot"], recipe, choices, source=source, out=out)
