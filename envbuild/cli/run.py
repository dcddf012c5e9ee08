"""`envbuild run`: the user's program in an artifact on this host."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import click

from envbuild.cli.common import log, run_environment
from envbuild.cli.options import with_options
from envbuild.errors import UsageError
from envbuild.progress import clean

_COUNT = click.IntRange(1, 64)


@click.command("run")
@click.argument("named", metavar="RECIPE|ARTIFACT")
@click.argument("words", metavar="[ARGS]...|COMMAND", nargs=-1, type=click.UNPROCESSED)
@click.option("--nodes", type=_COUNT, default=1, show_default=True, help="Simulated nodes.")
@click.option("--nproc-per-node", type=_COUNT, default=1, show_default=True, help="Ranks of each node.")
@click.option("--script", metavar="TRAIN.py", help="A Python script, relative to this folder; ARGS are its own.")
@click.option("--module", metavar="PKG.MODULE", help="A module of the artifact; ARGS are its own.")
@click.option("--unverified", is_flag=True, help="Take an artifact without a passing receipt.")
@with_options("target", "runtime")
def run_command(
    named: str, words: tuple[str, ...], nodes: int, nproc_per_node: int, script: str | None, module: str | None,
    unverified: bool, target: str | None, runtime: str | None,
) -> None:  # fmt: skip
    """Run your program in an artifact, on this host, as ranks of simulated nodes.

    Takes the path of an artifact, or a RECIPE, of which it takes the venv, conda environment, .sqsh or .sif that was
    built here. torchrun starts the program as every rank, in the current folder, which an image shows as its work
    folder. Each line of output starts with [NODE.RANK]. The exit code is torchrun's. The words are those of `job`.

    \b
    Examples:
      envbuild run pt_cpu --nodes 2 --nproc-per-node 2 --script train.py -- --lr 0.1
      envbuild run pytorch.sqsh --module pkg.train
      envbuild run pt_cpu --nproc-per-node 2 -- python -c 'import os; print(os.environ["RANK"])'
    """
    from envbuild.jobs.artifact import open_artifact
    from envbuild.kinds import kinds_of
    from envbuild.kinds.commit import open_subject
    from envbuild.verify.user_run import exit_code, run_program_on_nodes

    program = _program(words, script, module)
    kinds = kinds_of("folder", "file")
    opened = open_artifact(named, kinds, target, unverified=unverified)
    if opened.artifact.kind not in kinds:
        raise UsageError(
            f"{named} is an image in a registry",
            "build a venv, conda environment, .sqsh or .sif of its recipe, or start it with `docker run`",
        )
    environment = run_environment()
    subject = open_subject(Path(opened.artifact.path), environment, runtime)
    log(f"running {shlex.join(program)} on {nodes} × {nproc_per_node} ranks …")
    outcome = run_program_on_nodes(
        subject, program, environment, Path.cwd(),
        nodes=nodes, nproc_per_node=nproc_per_node, echo=lambda line: click.echo(clean(line)),
    )  # fmt: skip
    sys.exit(exit_code(outcome))


def _program(words: tuple[str, ...], script: str | None, module: str | None) -> list[str]:
    """Return the command line of a rank. Raises UsageError unless there is one program."""
    if script is not None and module is not None:
        raise UsageError("--script and --module are two programs", "leave one of them out")
    if module is not None:
        return ["python", "-m", module, *words]
    if script is not None:
        if not Path(script).is_absolute() and not Path(script).is_file():
            raise UsageError(f"--script {script}: there is no such file in {Path.cwd()}")
        return ["python", script, *words]
    if not words:
        raise UsageError("no program is named", "give --script F, --module M, or -- COMMAND")
    return list(words)
