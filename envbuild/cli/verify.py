"""`envbuild verify`, `envbuild run` and `envbuild exec`: run something in an artifact."""

from __future__ import annotations

import os
import resource
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import click

from envbuild.cli import complete
from envbuild.cli.common import attested_images, log, print_json, run_environment
from envbuild.cli.options import PATH, Names, with_options
from envbuild.cli.verbosity import verbosity
from envbuild.environment import load_environment
from envbuild.errors import UsageError, VerificationError
from envbuild.kinds import ARTIFACTS
from envbuild.progress import step
from envbuild.terminal import clean

_COUNT = click.IntRange(1, 64)


@click.command("verify")
@click.argument("path", type=PATH, shell_complete=complete.artifacts)
@click.option("--nodes", type=_COUNT, help="Simulated nodes. Default: the recipe's.")
@click.option("--nproc-per-node", type=_COUNT, help="Ranks of each node. Default: the recipe's.")
@click.option("--epochs", type=click.IntRange(2, 10000), help="Epochs to train. Default: the recipe's.")
@click.option("--faults", is_flag=True, help="Kill a rank mid-training; the job must finish from its snapshot.")
@click.option("--untrusted", is_flag=True, help="Also start what no signer of the site has attested.")
@with_options("runtime", "json")
@verbosity
def verify_command(path: Path, untrusted: bool, runtime: str | None, as_json: bool, **overrides: Any) -> None:
    """Train in the artifact at PATH over several simulated nodes, judge it, write its receipt.

    Exit code 5 when a check fails; the receipt beside PATH then says so, and the nodes' logs are kept. Where the site
    names signers ([trust]), only what one of them attested is started; the attested receipt then stays, and the new one
    is PATH.here.receipt.json.

    PATH is the folder of a venv or conda environment, a .sqsh or a .sif.

    \b
    Examples:
      envbuild verify build/pt_cpu/cpu-x86_64/venv
      envbuild verify pytorch.sif --runtime apptainer
      envbuild verify build/pt_cpu/cpu-x86_64/venv --nodes 3 --nproc-per-node 1 --faults
    """
    from envbuild.jobs.artifact import check_trust, open_artifact
    from envbuild.kinds.commit import verify_artifact
    from envbuild.verify.receipt import check_lines, failures, receipt_path

    environment = run_environment()
    trust, beside = environment.site.trust, path
    if trust.restricts and not untrusted:
        fetch = attested_images(environment.site)
        kinds = tuple(ARTIFACTS)
        check_trust(open_artifact(f"{path.parent}/{path.name}", kinds, None, unverified=True, fetch=fetch), trust)
        beside = path.with_name(f"{path.name}.here")
    with step(f"verifying {path}", told=True):
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


@click.command("exec", context_settings={"allow_interspersed_args": False})
@click.argument("image", type=PATH, shell_complete=complete.images)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, shell_complete=complete.any_files)
@click.option(
    "--bind", "binds", multiple=True, metavar="HOST[:PLACE][:ro]",
    help="Show a folder or file of this host in the image, by default at the same path. Repeatable.",
)  # fmt: skip
@click.option(
    "--workdir", "folder", metavar="DIR",
    help="Folder to start in. Default: the current one if a --bind shows it, else /.",
)  # fmt: skip
@click.option(
    "--env", "given", multiple=True, metavar="NAME[=VALUE]",
    help="Set a variable; NAME alone passes the caller's, so that a secret is on no command line. Repeatable.",
)  # fmt: skip
@click.option(
    "--runtime", default="own", show_default=True, metavar="NAME",
    help="own, or one way of it: own:mount (root), own:squashfuse, own:extract.",
)  # fmt: skip
def exec_command(image: Path, command: Names, binds: Names, given: Names, **options: Any) -> None:
    """Start a program in IMAGE, a .sqsh or .sif, without any container runtime or root.

    The program has the image's files and variables, this host's network, devices, /dev/shm, GPU driver and names, and
    the job's variables (SLURM_*, NCCL_*, …). Its exit code is this command's.

    \b
    Examples:
      envbuild exec pytorch.sqsh -- python -c 'import torch; print(torch.__version__)'
      envbuild exec --bind /fsx --bind "$PWD" pytorch.sif -- torchrun train.py
      envbuild exec --bind data:/data:ro --workdir /data pytorch.sqsh -- bash
    """
    from envbuild.exec_image import exec_image, parse_bind

    if command[0] == "--":  # click keeps a "--" that follows IMAGE
        command = command[1:]
    if not command:
        raise UsageError("no program is named", "envbuild exec IMAGE -- PROGRAM [ARGUMENT]…")
    environment = load_environment()
    shown = [parse_bind(text) for text in binds]
    status = exec_image(image, command, environment, log, binds=shown, variables=_variables(given), **options)
    if os.WIFSIGNALED(status):
        _end_by(os.WTERMSIG(status))
    sys.exit(os.waitstatus_to_exitcode(status))


def _variables(given: Names) -> dict[str, str]:
    """Return the variables of --env; a NAME that the caller's environment lacks is left out."""
    found = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not name or "\0" in text:
            raise UsageError(f"--env {text!r} is not NAME or NAME=VALUE")
        if equals:
            found[name] = value
        elif name in os.environ:
            found[name] = os.environ[name]
    return found


def _end_by(number: int) -> None:
    """End this process by the signal that ended the program, so that the caller sees it."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


@click.command("run")
@click.argument("named", metavar="RECIPE|ARTIFACT", shell_complete=complete.recipes_or_artifacts)
@click.argument(
    "words", metavar="[ARGS]...|COMMAND", nargs=-1, type=click.UNPROCESSED, shell_complete=complete.any_files
)
@click.option("--nodes", type=_COUNT, default=1, show_default=True, help="Simulated nodes.")
@click.option("--nproc-per-node", type=_COUNT, default=1, show_default=True, help="Ranks of each node.")
@click.option(
    "--script", metavar="TRAIN.py", shell_complete=complete.python_files,
    help="A Python script, relative to this folder; ARGS are its own.",
)  # fmt: skip
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
