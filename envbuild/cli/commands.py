"""The commands: one module for each subject, imported when its command runs; their errors become exit codes."""

from __future__ import annotations

import importlib
import sys

import click
from click.shell_completion import CompletionItem

from envbuild import __version__
from envbuild.base.errors import EnvbuildError
from envbuild.base.masking import redact
from envbuild.base.progress import clean
from envbuild.base.system_errors import system_error
from envbuild.cli.layout import verbosity
from envbuild.contract.kinds import ARTIFACTS

_BUILDERS = {"folder": "folder", "file": "image_file", "registry": "image_file"}
_KINDS = {name: (_BUILDERS[kind.form], kind.help) for name, kind in ARTIFACTS.items()}
# Heading of --help → command → (module, one line). Help must not import the commands' dependencies.
GROUPS = {
    "Start": {
        "init": ("init", "Write a recipe from requirements, locks, a Dockerfile or an environment."),
        "venv": _KINDS["venv"],
        "run": ("run", "Run your script, or any program, in an artifact on this host."),
        "doctor": ("site", "Say what this host can build, verify and run, and how to fix the rest."),
    },
    "Recipe": {
        "list": ("recipes", "List the recipes that can be built."),
        "show": ("recipes", "Show one recipe as it was understood."),
        "add": ("lock", "Add packages to a recipe, and lock it again."),
        "remove": ("lock", "Remove packages from a recipe, and lock it again."),
        "lock": ("lock", "Resolve recipes and write or check their locks."),
        "plan": ("plan", "Show what a build would do, in order, with digests."),
        "check": ("recipes", "Say whether CUDA, torch, NCCL and the network go together."),
        "audit": ("lock", "Look up locked packages in a database of known vulnerabilities."),
    },
    "Build": {
        "build": ("image_file", "Build several artifacts of one recipe in one go."),
        **{name: description for name, description in _KINDS.items() if name != "venv"},
        "layers": ("plan", "Build the source-built layers of a recipe alone."),
        "bundle": ("plan", "Collect all that a build reads, for nodes without a network."),
    },
    "Artifact": {
        "verify": ("inspect", "Train in an artifact and judge it again."),
        "inspect": ("inspect", "Show what is in an artifact, or write its SBOM."),
        "rebuild": ("inspect", "Build an artifact again from its receipt, by the vault alone, and compare."),
        "diff": ("inspect", "Compare two artifacts of any kinds."),
        "report": ("report", "Write receipts as one HTML page."),
    },
    "Cluster": {
        "site": ("site", "Describe a cluster: its scheduler, modules, paths and network."),
        "job": ("job", "Render, and submit, the job that trains with an artifact on a cluster."),
        "preflight": ("job", "Check nodes and network of an allocation before training."),
        "diagnose": ("diagnose", "Say from a job's logs why it failed."),
        "lint-job": ("diagnose", "Find faults in a job script written by hand."),
    },
    "Share": {
        "push": ("share", "Push an artifact to a registry, in the parts that artifacts share."),
        "pull": ("share", "Pull an artifact from a registry: the parts that are not here yet."),
        "attest": ("share", "Sign the receipt of an artifact, so that others can trust it."),
        "trust": ("share", "Say whether the site trusts an artifact, and why."),
        "cache": ("store", "Share the results of builds in a registry."),
        "vault": ("store", "Keep the inputs of builds in a registry, for the day when indexes lack them."),
    },
    "Over time": {
        "history": ("history", "Show what the verifications of a recipe measured, over time."),
        "bisect": ("history", "Find the package that broke or slowed an environment."),
        "matrix": ("plan", "List the builds that a CI should run."),
    },
    "Upkeep": {
        "store": ("store", "Show, bound and check the store of downloads and layers."),
        "completion": ("complete", "Print the script that completes commands and names in your shell."),
    },
}
COMMANDS = {name: description for group in GROUPS.values() for name, description in group.items()}
# Former names of commands: they work, and neither help nor completion shows them.
RENAMED = {"exec": "run", "explain": "check"}
# Commands of other tools, and the command of envbuild that does the same.
_ELSEWHERE = {
    "activate": "run",
    "clean": "store",
    "compile": "lock",
    "config": "site",
    "create": "venv",
    "env": "venv",
    "freeze": "lock",
    "import": "init",
    "info": "inspect",
    "install": "venv",
    "launch": "run",
    "logs": "diagnose",
    "make": "venv",
    "new": "init",
    "pip": "add",
    "publish": "push",
    "pyxis": "enroot",
    "sbatch": "job",
    "shell": "run",
    "sif": "apptainer",
    "singularity": "apptainer",
    "sqsh": "enroot",
    "start": "run",
    "submit": "job",
    "sync": "venv",
    "test": "verify",
    "train": "run",
    "uninstall": "remove",
    "upgrade": "lock",
    "update": "lock",
    "validate": "verify",
    "virtualenv": "venv",
}


class _Commands(click.Group):
    """A group that imports a command's module only when it runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        cmd_name = RENAMED.get(cmd_name, cmd_name)
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"envbuild.cli.{COMMANDS[cmd_name][0]}")
        command = getattr(module, f"{cmd_name.replace('-', '_')}_command")
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            # click would take it for a closed standard output, which is ClosedPipe: it is of a tool or a server.
            raise system_error(error) or error from error

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        # click's own imports every module for its help.
        matching = {name: text for name, (_, text) in COMMANDS.items() if name.startswith(incomplete)}
        names = [CompletionItem(name, help=text) for name, text in matching.items()]
        return [*names, *click.Command.shell_complete(self, ctx, incomplete)]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in (*COMMANDS, *RENAMED) and not args[0].startswith("-"):
            from envbuild.base.toml import closest

            if args[0] == "help":
                ctx.fail(f"there is no command 'help'; write `envbuild {' '.join([*args[1:2], '--help'])}`")
            near = _ELSEWHERE.get(args[0]) or closest(args[0], COMMANDS)
            meant = f"; did you mean {near!r}: {COMMANDS[near][1]}" if near else ". `envbuild --help` lists all."
            ctx.fail(f"there is no command {args[0]!r}{meant}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))
        for heading, group in GROUPS.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(width), text) for name, (_, text) in group.items()])


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="\b\nExamples:\n  envbuild init my_train --from requirements.txt\n  envbuild venv my_train\n"
    "  envbuild run my_train train.py --steps 2",
)
@verbosity
@click.version_option(__version__, prog_name="envbuild")
def cli() -> None:
    """Compile one recipe into PyTorch environments, each verified by distributed training.

    Without RECIPE, commands take the only recipe of ./recipes, here or in a folder above, or else pt_cpu.

    Results go to standard output, everything else to standard error. Exit codes: 0 done, 2 usage or recipe, 3 lock, 4
    build, 5 verification failed, 6 a tool or permission this host lacks, 70 a fault of envbuild, 130 interrupted.
    """


def run() -> int:
    """Run the command of `sys.argv` and return its exit code; print each expected error as one message.

    Other exceptions are faults of envbuild, and are left to the caller.
    """
    try:
        # Commands return None; click returns the code of an Exit that they raise.
        ended = cli.main(standalone_mode=False)
        sys.stdout.flush()  # a full disk is an error here, and ignored when Python ends
        return ended if isinstance(ended, int) else 0
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.Abort:
        raise KeyboardInterrupt from None
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except EnvbuildError as error:
        return _show(error)
    except (OSError, UnicodeEncodeError) as error:
        known = system_error(error)
        if known is None:
            raise
        return _show(known)


def _show(error: EnvbuildError) -> int:
    # Cleaned here too: what the streams keep are the colours of messages, not those of their texts.
    click.echo(click.style("error: ", fg="red", bold=True) + clean(redact(error.message)), err=True)
    if error.hint:
        click.echo(click.style("  hint: ", fg="green") + clean(redact(error.hint)), err=True)
    return error.exit_code
