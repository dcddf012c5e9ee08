"""Every command line that users are shown: examples in --help, code blocks and code in lines of README and docs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from envbuild.cli.commands import COMMANDS, cli

TOP = Path(__file__).resolve().parents[2]
PAGES = [TOP / "README.md", *sorted((TOP / "docs").rglob("*.md"))]
_OPERATORS = frozenset(";|&()<>")
# What shows a form and not a command: [OPTION], ONE|OTHER, FILE….
_FORM = re.compile(r"\[[^]]*\]|[A-Z]\|[A-Z]|…")
# Lines of code blocks that begin so are commands; others are output, TOML or YAML.
_PROGRAM = re.compile(
    r"([A-Z_]+=\S+ )*(\S*\$\()?([\w./-]*/)?(envbuild|docker|kubectl|srun|salloc|sbatch|apptainer|conda|micromamba"
    r"|torchrun|horovodrun|python[\d.]*|pip|pipx|uv|source|tests/run|tools/[\w-]+|sh|tar)( (?!=)|$)"
)


@dataclass(frozen=True)
class Shown:
    """A line of a page or of a command's help, without its comment."""

    where: str
    line: str

    @property
    def is_form(self) -> bool:
        """Whether it shows how commands look, and is none."""
        return bool(_FORM.search(re.sub(r"'[^']*'", "", self.line)))

    def arguments(self, program: str) -> list[list[str]]:
        """The arguments of each `program` in the line, as a shell splits it."""
        lexer = shlex.shlex(self.line, posix=True, punctuation_chars=True)
        lexer.whitespace_split, lexer.commenters = True, ""
        words, found, before = [*lexer, ";"], [], ""
        while words:
            word = words.pop(0)
            installed = before in ("install", "upgrade", "uninstall")
            before = before if word.startswith("-") else word
            if (word == program or word.endswith(f"/bin/{program}")) and not installed:
                end = next(i for i, one in enumerate(words) if set(one) <= _OPERATORS)
                found.append(words[:end])
        return found


def shown() -> list[Shown]:
    """All lines that hold a command, once each."""
    return list(dict.fromkeys([*_helps(), *_pages()]))


def command_of(arguments: list[str]) -> tuple[click.Command, list[str]]:
    """The command that `arguments` name, and what is left for it. Raises click.UsageError."""
    command: click.Command = cli
    context = click.Context(cli, info_name="envbuild")
    while isinstance(command, click.Group) and arguments and not arguments[0].startswith("-"):
        _, found, arguments = command.resolve_command(context, list(arguments))
        assert found is not None
        command = found
    return command, arguments


def _helps() -> Iterator[Shown]:
    for name, command in _tree():
        lines = (command.help or "").partition("Examples:\n")[2].splitlines()
        yield from (Shown(f"{name} --help", line.strip()) for line in lines if line.strip())
    examples = (cli.epilog or "").partition("Examples:\n")[2].splitlines()
    yield from (Shown("envbuild --help", line.strip()) for line in examples)


def _tree() -> Iterator[tuple[str, click.Command]]:
    context = click.Context(cli)
    for name in COMMANDS:
        command = cli.get_command(context, name)
        assert command is not None
        yield f"envbuild {name}", command
        if isinstance(command, click.Group):
            yield from ((f"envbuild {name} {sub}", one) for sub, one in command.commands.items())


def _pages() -> Iterator[Shown]:
    """Commands in indented and fenced blocks, and code in lines that has more than a command's name."""
    for page in PAGES:
        where, fenced = str(page.relative_to(TOP)), False
        for line in page.read_text(encoding="utf-8").splitlines():
            if line.lstrip().startswith("```"):
                fenced = not fenced
            elif fenced or line.startswith("    "):
                text = re.sub(r"^(- )?(run: )?", "", line.strip())
                if _PROGRAM.match(text):
                    yield Shown(where, re.sub(r"\s+# .*", "", text))
            else:
                codes = re.findall(r"`([^`]*\benvbuild [a-z][^`]* [^`]+)`", line)
                yield from (Shown(where, code) for code in codes)
