"""What people read fits into a terminal of 80 columns; in a pipe an entry stays one line."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import termios

import pytest

from envbuild.cli import layout
from envbuild.cli import site as doctor
from envbuild.doctor.registry import StepVerdict

LONG = StepVerdict("warn", "no: " + "a reason that takes its time " * 3, "do something about it " * 5)


def on_terminal(columns: int, *arguments: str) -> list[str]:
    """The lines that a command prints on a terminal of that width, without colours."""
    child, terminal = pty.fork()
    if child == 0:
        try:
            fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
            os.environ.pop("COLUMNS", None)
            os.environ["TERM"] = "xterm"
            # readline, which pytest imports, sets COLUMNS for children where os.environ does not see it.
            os.execve(sys.executable, [sys.executable, *arguments], dict(os.environ))
        finally:
            os._exit(127)
    said = b""
    while True:
        try:
            said += os.read(terminal, 1 << 16)
        except OSError:  # the other end is closed
            break
    assert os.waitpid(child, 0)[1] == 0, said.decode()
    os.close(terminal)
    return re.sub(r"\x1b\[[0-9;]*m", "", said.decode()).replace("\r", "").splitlines()


def test_the_list_of_recipes_fits_a_terminal_and_keeps_one_line_an_entry_in_a_pipe() -> None:
    lines = on_terminal(80, "-m", "envbuild", "list")
    assert max(map(len, lines)) <= 80 and len(lines) > 8
    names = [line.split()[0] for line in lines if not line.startswith(" ")]
    assert "pt_cpu" in names and names == sorted(names)


@pytest.mark.parametrize("columns", [80, 60])
@pytest.mark.parametrize(
    "command",
    [
        "plan pt_efa --artifact docker --target cu130-x86_64 --locked --elsewhere",
        "matrix pt_cpu pytorch_hub",
        "check pt_efa",
        "show pt_efa",
    ],
)
def test_tables_fit_a_terminal_and_break_no_word(command: str, columns: int) -> None:
    lines = on_terminal(columns, "-m", "envbuild", *command.split())
    wide = [line for line in lines if len(line) > columns]
    assert len(lines) > 5 and all(len(line.split()) == 1 for line in wide), wide


@pytest.mark.parametrize("columns", [80, 300])
def test_what_doctor_says_of_artifacts_fits_a_terminal(columns: int) -> None:
    script = (
        "from tests.unit.test_layout import LONG\n"
        "from envbuild.cli.site import _show_artifacts\n"
        "_show_artifacts({k: {'build': LONG, 'verify': LONG, 'run': LONG} for k in ('venv', 'apptainer')})"
    )
    lines = on_terminal(columns, "-c", script)
    assert max(map(len, lines)) <= columns
    words = re.sub(r"\s+", " ", " ".join(lines))
    for step in ("build", "verify", "run"):
        assert step in words
    if columns == 80:  # a row a step: no cell is folded to a column of a few characters
        assert any(line.startswith("venv       build   no: a reason that takes its time a") for line in lines)


def test_an_entry_breaks_between_its_cells_and_words_only() -> None:
    cells = ["What it is for, said in some words", "[cpu-x86_64]", "/a/long/path/to/a/recipe.toml"]
    assert layout.entry("pt", cells, 4, 200) == (
        "pt    What it is for, said in some words  [cpu-x86_64]  /a/long/path/to/a/recipe.toml"
    )
    assert layout.entry("pt", cells, 4, 30).splitlines() == [
        "pt    What it is for, said in",
        "      some words  [cpu-x86_64]",
        "      /a/long/path/to/a/recipe.toml",
    ]


def test_in_a_pipe_lines_are_as_long_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert layout.width() == layout.NO_LIMIT
    monkeypatch.setenv("COLUMNS", "72")
    assert layout.width() == 72 and doctor._console().width == 72
