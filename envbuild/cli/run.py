"""`envbuild run`: the user's program in an artifact on this host."""

from __future__ import annotations

import os
import resource
import shlex
import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from envbuild.base.errors import UsageError
from envbuild.base.progress import clean, log
from envbuild.build.kinds import folder_module
from envbuild.cli import complete
from envbuild.cli.common import Names, next_word, run_environment, with_options
from envbuild.contract.kinds import ARTIFACTS, FolderArtifact, kinds_of
from envbuild.run_environment import load_environment
from envbuild.site.settings import load_site

if TYPE_CHECKING:
    from envbuild.jobs.model import JobArtifact

_COUNT = click.IntRange(1, 64)
_NO_PROGRAM = 127, 126  # exit codes of a shell: there is none; it cannot be started


class _Run(click.Command):
    """A command whose own options end at the script, or at the program behind RECIPE|ARTIFACT or `--`."""

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return ["[OPTIONS] [RECIPE|ARTIFACT]", "SCRIPT.py|-- PROGRAM", "[ARGS]..."]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:
            return super().parse_args(ctx, args)
        named, start = None, next_word(self, args)
        own = args[:start]
        if start < len(args) and args[start] != "--" and not _is_script(args[start]):
            named, end = args[start], next_word(self, args, start + 1)
            own, start = [*own, *args[start + 1 : end]], end
        try:
            rest = super().parse_args(ctx, own)
        except click.NoSuchOption as error:
            raise UsageError(
                error.format_message(),
                "write a script's options after it; put -- before a program: envbuild run RECIPE -- python -c …",
            ) from None
        ctx.params |= {"named": named, "words": tuple(args[start:])}
        return rest


@click.command("run", cls=_Run)
@click.argument("named", metavar="RECIPE|ARTIFACT", required=False, shell_complete=complete.runnable)
@click.argument("words", nargs=-1, type=click.UNPROCESSED, shell_complete=complete.any_files)
@click.option("--nodes", type=_COUNT, help="Simulated nodes.  [default: 1]")
@click.option("--nproc-per-node", type=_COUNT, help="Ranks of each node.  [default: 1]")
@click.option(
    "--module", metavar="PKG.MODULE", help="Run this module of the artifact as the script; -- ARGS are its own."
)
@click.option(
    "--script", metavar="TRAIN.py", hidden=True, shell_complete=complete.python_files, help="Same as SCRIPT.py."
)
@click.option(
    "--env",
    "given",
    multiple=True,
    metavar="NAME[=VALUE]",
    help="Set a variable; NAME alone passes the caller's, so that a secret is on no command line. Repeatable.",
)
@click.option(
    "--bind",
    "binds",
    multiple=True,
    metavar="HOST[:PLACE][:ro]",
    help="Mount a folder or file of this host in the image, by default at the same path. Repeatable.",
)
@click.option(
    "--workdir",
    "folder",
    metavar="DIR",
    help="Start PROGRAM in this folder. Default: the current one; in an image if a --bind shows it, else /.",
)
@click.option(
    "--runtime",
    metavar="NAME",
    help="Runtime of an image: own, or one of its methods: own:mount (root), own:squashfuse, own:extract; for ranks "
    "also enroot and apptainer. Default: own; for ranks the best here.",
)
@with_options("unverified", "target")
def run_command(
    named: str | None,
    words: Names,
    nodes: int | None,
    nproc_per_node: int | None,
    module: str | None,
    script: str | None,
    given: Names,
    binds: Names,
    folder: str | None,
    runtime: str | None,
    unverified: bool,
    target: str | None,
) -> None:
    """Run your script, or any program, in an artifact on this host.

    SCRIPT.py is a file of this folder. torchrun starts it as every rank, in this folder, which an image shows as its
    work folder. Each line of output starts with [NODE.RANK], and the exit code is torchrun's.

    Any other PROGRAM starts once, on this terminal; its exit code is this command's. With --nodes or --nproc-per-node,
    it too is started as every rank. In an image it gets this host's network, devices, /dev/shm, GPU driver, host and
    user names, and the job's variables (SLURM_*, NCCL_*, …); that needs neither a container runtime nor root.

    ARTIFACT is the path of an artifact, or a RECIPE: its venv, conda environment, .sqsh or .sif in ./build. Default:
    the only recipe of ./recipes, or else pt_cpu.

    \b
    Examples:
      envbuild run train.py --steps 2
      envbuild run pt_cpu --nodes 2 --nproc-per-node 2 train.py --lr 0.1
      envbuild run pytorch.sqsh --module pkg.train
      envbuild run pt_cpu -- python -c 'import torch; print(torch.__version__)'
      envbuild run --bind /fsx --bind "$PWD" pytorch.sif -- torchrun train.py
      envbuild run --bind data:/data:ro --workdir /data pytorch.sqsh -- bash
    """
    program, is_script = _program(words, script, module)
    once = not is_script and nodes is None and nproc_per_node is None
    variables = _variables(given)
    if not once and (binds or folder):
        raise UsageError(
            "--bind and --workdir work with a single program only, and this command starts ranks",
            "leave them out: ranks run in the current folder; or start the program once: -- PROGRAM",
        )
    if once and named is not None and os.path.isfile(named):  # any image, whoever made it
        _run_in_image(Path(named), program, binds, folder, variables, runtime)
    from envbuild.build.built import find_built
    from envbuild.job_inputs import open_artifact  # nodes start every process of a job by the lines above

    folders = load_site(os.environ).recipe_folders
    kinds = kinds_of("folder", "file")
    if (
        named
        and shutil.which(named)
        and not os.path.exists(named)
        and find_built(named, kinds, target=target, prefer=True, site_folders=folders) is None
    ):
        raise UsageError(
            f"{named} is a program, and neither an artifact nor a recipe",
            f"put -- before it: envbuild run -- {named} …",
        )
    opened = open_artifact(named, kinds, target, unverified=unverified, locked=True, quick=True, site_folders=folders)
    if opened.artifact.kind not in kinds:
        raise UsageError(
            f"{named} is an image in a registry",
            "build a venv, conda environment, .sqsh or .sif of its recipe, or start it with `docker run`",
        )
    if not once:
        _run_ranks(opened.artifact, program, variables, nodes or 1, nproc_per_node or 1, runtime)
    if opened.artifact.of_kind.form == "file":
        _run_in_image(Path(opened.artifact.path), program, binds, folder, variables, runtime)
    _run_in_folder(opened.artifact, program, binds, folder, variables, runtime)


def _is_script(word: str) -> bool:
    return word.endswith(".py") and not os.path.isdir(word)


def _program(words: Names, script: str | None, module: str | None) -> tuple[list[str], bool]:
    """Return the command line of the program, and whether it is a script or a module, which torchrun starts.

    Raises UsageError unless there is one program.
    """
    rest = list(words[1:] if words[:1] == ("--",) else words)
    if script is not None and module is not None:
        raise UsageError("--script and --module are two programs", "leave one of them out")
    if module is not None:
        return ["python", "-m", module, *rest], True
    if script is None and words and _is_script(words[0]):
        script, *rest = rest
    if script is not None:
        if not os.path.isabs(script) and not os.path.isfile(script):
            raise UsageError(
                f"there is no script {script} in {Path.cwd()}", "name a file of this folder, or go to its folder"
            )
        return ["python", script, *rest], True
    if not rest:
        raise UsageError("no program is named", "give SCRIPT.py, --module M, or -- PROGRAM")
    return rest, False


def _variables(given: Names) -> dict[str, str]:
    """Return the variables of --env; a NAME that the caller's environment lacks is left out."""
    variables = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not name or "\0" in text:
            raise UsageError(f"--env {text!r} is not NAME or NAME=VALUE")
        if equals:
            variables[name] = value
        elif name in os.environ:
            variables[name] = os.environ[name]
    return variables


def _run_ranks(
    artifact: JobArtifact,
    program: list[str],
    variables: dict[str, str],
    nodes: int,
    nproc_per_node: int,
    runtime: str | None,
) -> NoReturn:
    """Run `program` as every rank of simulated nodes, and exit as it does."""
    from envbuild.build.commit import open_subject
    from envbuild.verify.user_code import exit_code, run_program_on_nodes

    environment = run_environment()
    subject = open_subject(Path(artifact.path), environment, runtime)
    log(f"running {shlex.join(program)} on {nodes} × {nproc_per_node} ranks …")
    outcome = run_program_on_nodes(
        subject,
        program,
        environment,
        Path.cwd(),
        nodes=nodes,
        nproc_per_node=nproc_per_node,
        variables=variables,
        echo=lambda line: click.echo(clean(line)),
    )
    sys.exit(exit_code(outcome))


def _run_in_image(
    path: Path, program: list[str], binds: Names, folder: str | None, variables: dict[str, str], runtime: str | None
) -> NoReturn:
    """Run `program` once in the image at `path`, and end as it does: by its exit code, or by the same signal."""
    from envbuild.exec_image import exec_image, parse_bind

    shown = [parse_bind(text) for text in binds]
    status = exec_image(
        path,
        program,
        load_environment(),
        log,
        binds=shown,
        folder=folder,
        variables=variables,
        runtime=runtime or "own",
    )
    if os.WIFSIGNALED(status):
        _end_by(os.WTERMSIG(status))
    sys.exit(os.waitstatus_to_exitcode(status))


def _end_by(number: int) -> None:
    """End this process by the signal that ended the program, so that the caller sees it."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _run_in_folder(
    artifact: JobArtifact,
    program: list[str],
    binds: Names,
    folder: str | None,
    variables: dict[str, str],
    runtime: str | None,
) -> NoReturn:
    """Replace this process by `program` in the environment of a folder."""
    if binds or runtime is not None:
        raise UsageError(f"--bind and --runtime are for images, and {artifact.path} is not an image", "leave them out")
    kind, path = ARTIFACTS[artifact.kind], Path(artifact.path)
    assert isinstance(kind, FolderArtifact)
    module = folder_module(kind)
    environment = module.launch_environment(path, os.environ) | variables
    command = module.command(path, *program)
    try:
        os.chdir(folder or ".")
    except OSError as error:
        raise UsageError(f"--workdir {folder}: {error.strerror}") from error
    if shutil.which(command[0], path=environment.get("PATH")) is None:
        there = "/" in command[0] and os.path.exists(command[0])
        log(f"{program[0]}: {'cannot be started' if there else 'not found in the environment and on PATH'}")
        sys.exit(_NO_PROGRAM[there])
    sys.stdout.flush()
    sys.stderr.flush()
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and the program would, too
        signal.signal(ignored, signal.SIG_DFL)
    os.execvpe(command[0], command, environment)
