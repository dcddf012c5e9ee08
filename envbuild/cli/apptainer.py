"""`envbuild apptainer`."""

from __future__ import annotations

from pathlib import Path

import click

from envbuild.cli.squash import Choices, from_option, make, with_choices


@click.command("apptainer")
@click.argument("recipe", required=False)
@from_option
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="FILE",
    help="Where it goes. Default: build/RECIPE/TARGET/RECIPE.sif; with --from as `apptainer pull` names it.",
)  # fmt: skip
@click.option(
    "--engine", type=click.Choice(["native", "apptainer"]), default="native", show_default=True,
    help="apptainer: `apptainer build` of the same layers by the installed tool.",
)  # fmt: skip
@with_choices
def apptainer_command(recipe: str | None, source: str | None, out: Path | None, engine: str, choices: Choices) -> None:
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
    make(["apptainer"], recipe, choices, source=source, out=out, engine=engine)
