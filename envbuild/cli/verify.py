"""`envbuild verify`."""

from __future__ import annotations

from pathlib import Path

import click

from envbuild.cli.common import log, print_json
from envbuild.cli.options import PATH, with_options
from envbuild.environment import load_environment
from envbuild.errors import VerificationError


@click.command("verify")
@click.argument("path", type=PATH)
@click.option("--nodes", type=click.IntRange(1, 64), help="Simulated nodes. Default: the recipe's.")
@click.option("--nproc-per-node", type=click.IntRange(1, 64), help="Ranks of each node. Default: the recipe's.")
@click.option("--epochs", type=click.IntRange(2, 10000), help="Epochs to train. Default: the recipe's.")
@click.option("--faults", is_flag=True, help="Kill a rank mid-training; the job must finish from its snapshot.")
@with_options("runtime", "json")
def verify_command(
    path: Path,
    nodes: int | None,
    nproc_per_node: int | None,
    epochs: int | None,
    faults: bool,
    runtime: str | None,
    as_json: bool,
) -> None:
    """Train in the artifact at PATH over several simulated nodes, judge it, write its receipt.

    Exit code 5 when a check fails; the receipt beside PATH then says so, and the nodes' logs are kept.

    PATH is the folder of a venv or conda environment, a .sqsh or a .sif.

    \b
    Examples:
      envbuild verify build/pt_cpu/cpu-x86_64/venv
      envbuild verify pytorch.sif --runtime apptainer
      envbuild verify build/pt_cpu/cpu-x86_64/venv --nodes 3 --nproc-per-node 1 --faults
    """
    from envbuild.kinds.verify import verify_artifact
    from envbuild.verify.explain import failures_in, lines
    from envbuild.verify.receipt import receipt_path

    overrides = {"nodes": nodes, "nproc_per_node": nproc_per_node, "epochs": epochs, "faults": faults}
    state, receipt = verify_artifact(path, load_environment(), log, overrides, runtime)
    for line in lines(receipt["checks"]):
        log(line)
    if as_json:
        print_json(
            {
                "path": str(path.absolute()),
                "digest": receipt["artifact"]["digest"],
                "receipt": str(receipt_path(path).absolute()),
                "target": state.target,
                "seconds": receipt["seconds"],
                "passed": receipt["passed"],
            }
        )
    if not receipt["passed"]:
        failed = [check for check in receipt["checks"] if check["status"] == "fail"]
        raise VerificationError(
            failures_in(failed, len(receipt["checks"])),
            f"the evidence is in {receipt_path(path)}, the nodes' logs in {receipt['logs']}",
        )
    if not as_json:
        click.echo(path)
