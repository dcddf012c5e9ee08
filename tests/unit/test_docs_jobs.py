"""The commands that the pages about jobs show are commands that there are."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from envbuild.cli import cli

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = [DOCS / "jobs.md", *sorted((DOCS / "seeds").glob("*.md"))]


def commands(page: Path) -> list[str]:
    """Whole command lines: indented ones and code in lines, less those that only show a form."""
    text = page.read_text(encoding="utf-8")
    found = re.findall(r"^    (envbuild .+)$|`(envbuild .+?)`", text, re.MULTILINE)
    lines = ["".join(one) for one in found]
    return [line.split(" # ")[0] for line in lines if not re.search(r"[\[…]|\|", line)]


def parse(line: str) -> None:
    """Parse a command line as click does, without running it."""
    words = shlex.split(line)[1:]
    top = click.Context(cli)
    command: click.Command | None = cli
    while isinstance(command, click.Group) and words:
        name, *words = words
        command = command.get_command(top, name)
        assert command is not None, f"there is no {name}"
    if words and command is not None:
        command.make_context(command.name, words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_command_lines_of_the_pages_about_jobs_are_understood(page: Path) -> None:
    for line in commands(page):
        try:
            parse(line)
        except click.ClickException as error:
            raise AssertionError(f"{page.name}: {line}: {error.format_message()}") from error


def test_the_pages_show_commands_at_all() -> None:
    assert sum(len(commands(page)) for page in PAGES) > 40


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target
