"""`envbuild man`: man pages from the text of --help."""

from __future__ import annotations

import inspect
import os
import re
import textwrap
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, date, datetime
from pathlib import Path

import click

from envbuild import __version__
from envbuild.atomic import write_beside
from envbuild.cli.common import check_out
from envbuild.cli.options import PATH
from envbuild.errors import HostError, UsageError

# As in docs/reference/commands.md.
EXIT_CODES = {
    0: "success",
    1: "envbuild diff: the artifacts differ",
    2: "wrong command line, recipe or site file",
    3: "a lock is missing, stale or impossible; versions do not go together",
    4: "the build failed",
    5: "verification failed; an artifact has no passing receipt; preflight or lint-job found an error; store check "
    "found damage; the locks of bisect do not differ; a site does not trust it; audit found a vulnerability, or has no "
    "usable database",
    6: "this host lacks a tool, an interpreter, an architecture or a permission",
    70: "a fault of envbuild itself",
    130: "interrupted",
    141: "the reader of its output ended first, as head -1 does: SIGPIPE, as for ls or git",
}


@click.command("man")
@click.option("--out", type=PATH, metavar="DIR", required=True, help="The folder, such as ~/.local/share/man/man1.")
def man_command(out: Path) -> None:
    """Write the man pages of envbuild and of each command to a folder, and print its path.

    `man envbuild-venv` finds them where the folder above DIR is on MANPATH; ~/.local/share/man is, where ~/.local/bin
    is on PATH. SOURCE_DATE_EPOCH sets the date in the pages.

    \b
    Examples:
      envbuild man --out man1 && man -l man1/envbuild-venv.1
    """
    from envbuild.cli.commands import cli

    if "man" not in out.parts:  # the user's own folder, which may not exist yet
        check_out(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, text in man_pages(cli).items():
            write_beside(out / name, text)
    except OSError as error:
        raise HostError(f"{out}: the man pages cannot be written: {error.strerror}", "choose another --out") from error
    click.echo(out)


def man_pages(command: click.Command) -> dict[str, str]:
    """Return the text of each page by its file name: of `command` and of all commands below it."""
    contexts = list(_contexts(command, None, "envbuild"))
    names = [_name(context) for context in contexts]
    return {f"{_name(context)}.1": "".join(_page(context, names)) for context in contexts}


def _contexts(command: click.Command, above: click.Context | None, name: str) -> Iterator[click.Context]:
    context = click.Context(command, above, name, **command.context_settings)
    yield context
    if isinstance(command, click.Group):
        for word in command.list_commands(context):
            if below := command.get_command(context, word):
                yield from _contexts(below, context, word)


def _name(context: click.Context) -> str:
    return context.command_path.replace(" ", "-")


def _page(context: click.Context, names: list[str]) -> Iterator[str]:
    command, name = context.command, _name(context)
    text, _, examples = inspect.cleandoc(command.help or "").partition("\b\nExamples:\n")
    examples = examples or "\n".join((command.epilog or "").removeprefix("Examples:").split("·"))
    first, *_ = text.partition("\n\n")
    options = [one for one in command.get_params(context) if isinstance(one, click.Option)]
    yield f'.TH {_roff(name.upper())} 1 {_day()} "envbuild {__version__}" "envbuild"\n'
    yield f".SH NAME\n{_filled(f'{name} - {first}').rstrip('.')}\n"
    pieces = " ".join(command.collect_usage_pieces(context))
    yield f".SH SYNOPSIS\n.B {_roff(context.command_path)}\n{_filled(pieces)}\n"
    yield ".SH DESCRIPTION\n" + ".PP\n".join(_paragraph(part) for part in text.strip().split("\n\n"))
    yield from _list("OPTIONS", filter(None, (option.get_help_record(context) for option in options)))
    if isinstance(command, click.Group):
        below = ((one, command.get_command(context, one)) for one in command.list_commands(context))
        yield from _list("COMMANDS", ((one, found.get_short_help_str(200)) for one, found in below if found))
    lines = [line.strip() for line in examples.splitlines() if line.strip()]
    yield ".SH EXAMPLES\n.nf\n" + "".join(f"{_roff(line)}\n" for line in lines) + ".fi\n"
    yield from _list("EXIT STATUS", ((str(code), text) for code, text in EXIT_CODES.items()))
    related = [one for one in names if one != name and (name.startswith(f"{one}-") or one.startswith(f"{name}-"))]
    yield ".SH SEE ALSO\n" + " ,\n".join(f".BR {_roff(one)} (1)" for one in related).replace(") ,", "),") + "\n"


def _day() -> date:
    """Return the day of SOURCE_DATE_EPOCH, else today. Raises UsageError for another value than seconds."""
    text = os.environ.get("SOURCE_DATE_EPOCH", "")
    if text and not re.fullmatch("[0-9]{1,11}", text):  # until the year 5138
        raise UsageError(f"SOURCE_DATE_EPOCH is {text!r}", "give seconds since 1970, or unset it")
    return datetime.fromtimestamp(int(text or time.time()), UTC).date()


def _paragraph(text: str) -> str:
    if text.startswith("\b\n"):  # click leaves the lines of such a paragraph
        return f".nf\n{_roff(text[2:])}\n.fi\n"
    return _filled(text) + "\n"


def _list(title: str, rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    yield f".SH {title}\n"
    yield from (f".TP\n.B {_roff(term)}\n{_filled(text)}\n" for term, text in rows)


def _filled(text: str) -> str:
    return _roff(textwrap.fill(" ".join(text.split()), 72, break_on_hyphens=False, break_long_words=False))


def _roff(text: str) -> str:
    """Return `text` for roff: no character or line of it is a request, and options can be copied out of the page."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"^(?=[.'])", r"\\&", text, flags=re.MULTILINE)
