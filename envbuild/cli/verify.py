"""`envbuild verify`: train in an artifact and judge it again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from envbuild.base.errors import VerificationError
from envbuild.base.files import named_path
from envbuild.base.progress import log, step
from envbuild.cli import complete
from envbuild.cli.common import attested_images, print_json, run_environment
from envbuild.cli.options import with_options
from envbuild.cli.report import reported
from envbuild.cli.verbosity import verbosity
from envbuild.contract.kinds import ARTIFACTS, kinds_of
from envbuild.kinds.built import find_built, unknown
from envbuild.recipe.find import search_folders

_COUNT = click.IntRange(1, 64)


@click.command("verify")
@click.argument("named", metavar="RECIPE|ARTIFACT", shell_complete=complete.recipes_or_artifacts)
@click.option("--nodes", type=_COUNT, help="Simulated nodes. Default: the recipe's.")
@click.option("--nproc-per-node", type=_COUNT, help="Ranks of each node. Default: the recipe's.")
@click.option("--epochs", type=click.IntRange(2, 10000), help="Epochs to train. Default: the recipe's.")
@click.option("--faults", is_flag=True, help="Kill a rank mid-training; the job must finish from its snapshot.")
@click.option("--untrusted", is_flag=True, help="Also start what no signer of the site has attested.")
@with_options("runtime", "report", "json")
@verbosity
def verify_command(
    named: str, untrusted: bool, runtime: str | None, report: str | None, as_json: bool, **overrides: Any
) -> None:
    """Train in ARTIFACT over several simulated nodes, judge it, write its receipt.

    Exit code 5 when a check fails; the receipt beside ARTIFACT then says so, and the nodes' logs are kept. Where the
    site names signers ([trust]), only what one of them attested is started; the attested receipt then stays, and the
    new one is ARTIFACT.here.receipt.json.

    ARTIFACT is the folder of a venv or conda environment, a .sqsh or a .sif; of a RECIPE, it is what was built here.

    \b
    Examples:
      envbuild verify pt_cpu
      envbuild verify pytorch.sif --runtime apptainer
      envbuild verify build/pt_cpu/cpu-x86_64/venv --nodes 3 --nproc-per-node 1 --faults
    """
    from envbuild.contract.receipt import check_lines, failures, receipt_path
    from envbuild.jobs.artifact import check_trust, open_artifact
    from envbuild.kinds.commit import verify_artifact

    environment = run_environment()
    built = find_built(named, kinds_of("folder", "file"), site_folders=environment.site.recipe_folders)
    path = named_path(Path(named)) if built is None else built.path
    if not path.exists():
        raise unknown(named, search_folders(environment.site.recipe_folders))
    trust, beside = environment.site.trust, path
    if trust.restricts and not untrusted:
        fetch = attested_images(environment.site)
        kinds = tuple(ARTIFACTS)
        check_trust(open_artifact(f"{path.parent}/{path.name}", kinds, None, unverified=True, fetch=fetch), trust)
        beside = path.with_name(f"{path.name}.here")
    with reported(report, [beside], environment), step(f"verifying {path}", told=True):
        state, receipt = verify_artifact(path, environment, overrides, runtime, beside)
    for line in check_lines(receipt):
        log(line)
    if as_json:
        told = {
            "path": str(path.absolute()),
            "digest": receipt["artifact"]["digest"],
            "receipt": str(receipt_path(beside).absolute()),
            "target": state.target,
            "seconds": receipt["seconds"],
            "passed": receipt["passed"],
        }
        print_json(told)
    if not receipt["passed"]:
        raise VerificationError(
            failures(receipt), f"the evidence is in {receipt_path(beside)}, the nodes' logs in {receipt['logs']}"
        )
    if not as_json:
        click.echo(path)
