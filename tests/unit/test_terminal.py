"""Text of others reaches a terminal without its commands, and results reach scripts byte for byte."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from envbuild.base.progress import clean


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\ttext\nof two lines", "plain\ttext\nof two lines"),
        ("\x1b]0;owned\x07title", "title"),
        ("\x1b]52;c;cm0gLXJm\x1b\\clipboard", "clipboard"),
        ("\x1b[2J\x1b[1;1Hcleared", "cleared"),
        ("\x9b2Jcleared", "cleared"),
        ("\x1bcreset", "reset"),
        ("\x1b[8mhidden\x1b[0m", "hidden"),
        ("\x1b]0;without an end", ""),
        ("\x1b", "?"),
        ("true\rfalse\b\b\x7f\x00", "true?false????"),
        ("dos\r\n", "dos\n"),
        ("\u202egnp.exe", "?gnp.exe"),
        ("größer … 日本", "größer … 日本"),
    ],
)
def test_commands_to_a_terminal_are_taken_out(text: str, shown: str) -> None:
    assert clean(text) == shown


def test_only_colours_of_messages_remain() -> None:
    assert clean("\x1b[31m\x1b[1merror:\x1b[0m \x1b[8mx\x1b[1;2Hy", colours=True) == "\x1b[31m\x1b[1merror:\x1b[0m xy"


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-m", "envbuild", *arguments], capture_output=True, env=os.environ | env)


def test_an_error_message_cannot_command_a_terminal() -> None:
    done = run("list", ENVBUILD_SITE="/\x1b]0;owned\x07\x1b[2Jnowhere")
    assert done.returncode == 2 and done.stderr == b"error: /nowhere: no such file\n"


PRINT = r"from envbuild.base.progress import guard_streams; guard_streams(); print('a\x1b[2J\x1b]0;t\x07b \udcff')"


def test_a_terminal_gets_no_commands_and_a_script_every_byte() -> None:
    done = subprocess.run([sys.executable, "-c", PRINT], capture_output=True)
    assert done.stdout == b"a\x1b[2J\x1b]0;t\x07b \xff\n"
    ours, theirs = pty.openpty()
    try:
        assert subprocess.run([sys.executable, "-c", PRINT], stdout=theirs, stderr=theirs).returncode == 0
        assert os.read(ours, 1000) == b"ab ?\r\n"
    finally:
        os.close(ours)
        os.close(theirs)


@pytest.mark.parametrize("encoding", ["iso-8859-1", "ascii"])
def test_no_encoding_of_a_locale_makes_the_output_fail(encoding: str) -> None:
    done = run("plan", "pt_cpu", "--target", "cpu-x86_64", "--elsewhere", "--locked", PYTHONIOENCODING=encoding)
    assert done.returncode == 0, done.stderr.decode()
    assert ("…".encode() if encoding == "ascii" else rb"\u2026") in done.stdout


def test_a_path_that_the_locale_cannot_name_is_one_clear_message(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(
        'name = "r"\ndescription = "d"\npython = "3.11"\nrequirements = []\n[targets.cpu-x86_64]\n[image]\n'
        f'base = "oci:{tmp_path}/bäse"\npython = "/usr/bin/python3"\n'
    )
    done = run(
        "lock",
        str(tmp_path / "recipe.toml"),
        "--image",
        LC_ALL="C",
        PYTHONUTF8="0",
        PYTHONCOERCECLOCALE="0",
        ENVBUILD_STORE=str(tmp_path / "store"),
    )
    assert done.returncode == 6, done.stderr.decode()
    assert b"set a UTF-8 locale" in done.stderr and b"Traceback" not in done.stderr
