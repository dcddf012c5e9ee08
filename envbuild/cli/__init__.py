"""The command line: one module per command, imported when the command runs."""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import signal
import sys
import threading
from typing import Any

import click

from envbuild import __version__
from envbuild.errors import EnvbuildError
from envbuild.kinds import ARTIFACTS

_BUILDERS = {"folder": "folder", "file": "image_file", "registry": "docker"}
# command → (module, one line for --help). Help must not import the commands' dependencies.
COMMANDS = {
    "list": ("recipes", "List the recipes that can be built."),
    "show": ("recipes", "Show one recipe as it was understood."),
    "lock": ("lock", "Resolve recipes and write or check their locks."),
    "explain": ("recipes", "Say whether CUDA, torch, NCCL and the network go together."),
    "plan": ("plan", "Show what a build would do, in order, with digests."),
    **{name: (_BUILDERS[kind.form], kind.help) for name, kind in ARTIFACTS.items()},
    "layers": ("plan", "Build the source-built layers of a recipe alone."),
    "build": ("image_file", "Build several artifacts of one recipe in one go."),
    "bundle": ("plan", "Collect all that a build reads, for nodes without a network."),
    "verify": ("verify", "Train in an artifact and judge it again."),
    "job": ("job", "Render, and submit, the job that trains with an artifact on a cluster."),
    "preflight": ("job", "Check nodes and network of an allocation before training."),
    "diagnose": ("diagnose", "Say from a job's logs why it failed."),
    "lint-job": ("diagnose", "Find faults in a job script written by hand."),
    "site": ("site", "Describe a cluster: its scheduler, modules, paths and network."),
    "doctor": ("doctor", "Say what this host can build, verify and run, and how to fix the rest."),
    "exec": ("verify", "Run a program in an image without any container runtime."),
    "inspect": ("inspect", "Show what is in an artifact, or write its SBOM."),
    "diff": ("inspect", "Compare two artifacts of any kinds."),
    "store": ("store", "Check the store of downloads and layers."),
    "matrix": ("matrix", "List the builds that a CI should run."),
}


class _Commands(click.Group):
    """A group that imports a command's module only when it runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"envbuild.cli.{COMMANDS[cmd_name][0]}")
        command = getattr(module, f"{cmd_name.replace('-', '_')}_command")
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            from envbuild.toml import closest

            near = closest(args[0], COMMANDS)
            meant = f"; did you mean {near!r}?" if near else ""
            ctx.fail(f"no command {args[0]!r}{meant} Commands: {', '.join(COMMANDS)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Examples:  envbuild venv pt_cpu   ·   envbuild lock pt_cpu --upgrade=numpy   ·   "
    "envbuild verify build/pt_cpu/cpu-x86_64/venv --faults",
)
@click.version_option(__version__, prog_name="envbuild")
def cli() -> None:
    """Compile one recipe into PyTorch environments, each proven by distributed training.

    Results go to standard output, everything else to standard error. Exit codes: 0 done, 2 usage or recipe, 3 lock, 4
    build, 5 verification failed, 6 a tool or permission this host lacks, 130 interrupted.
    """


def main() -> None:
    """Run the `envbuild` command. Every expected failure is one message and its exit code."""
    interrupted: list[int] = []
    atexit.register(_leave, interrupted)  # registered first, so that it runs last
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.unraisablehook = _unraisable
    # Trees of 100,000 paths are built once and kept: garbage collection over them costs a tenth of the run time.
    gc.set_threshold(100_000, 50, 100)
    try:
        # Commands return None; click returns the code of an Exit that they raise.
        ended = cli.main(standalone_mode=False)
        code = ended if isinstance(ended, int) else 0
    except click.exceptions.Exit as done:
        code = done.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("envbuild: interrupted", err=True)
        code = 130
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except EnvbuildError as error:
        click.echo(click.style("error: ", fg="red", bold=True) + error.message, err=True)
        if error.hint:
            click.echo(click.style("  hint: ", fg="green") + error.hint, err=True)
        code = error.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    # The work is done and reported: a Ctrl-C during Python's shutdown must not turn it into a failure.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if code == 130:
        interrupted.append(code)
    sys.exit(code)


def _leave(interrupted: list[int]) -> None:
    """Exit with the code in `interrupted`, if any, after all other exit handlers have run.

    If a Ctrl-C arrives in code that Python compiled from text (that of a dataclass or a named tuple, during an import),
    Python kills itself with SIGINT at its end although the exception was handled (CPython, run_eval_code_obj in
    pythonrun.c).
    """
    if interrupted:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(interrupted[0])


def _unraisable(found: Any) -> None:
    """Resend a Ctrl-C that arrived where Python drops exceptions (finalizers, the import system's callbacks)."""
    if issubclass(found.exc_type, KeyboardInterrupt):
        # With a delay: now, the signal would be handled inside this hook and be dropped again.
        threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(found)
