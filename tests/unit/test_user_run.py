"""The words of `envbuild run`, and the output of its program: which lines are shown, when, and how."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest

from envbuild.base.errors import UsageError
from envbuild.cli.commands import cli
from envbuild.verify.user_code import _Follower


def shown(folder: Path, log: bytes, code: int | None = 0, *, bare: bool = False) -> list[str]:
    (folder / "run-node0.log").write_bytes(log)
    child = SimpleNamespace(poll=lambda: code, returncode=code)
    running: Any = SimpleNamespace(children=[child], work=folder, job=SimpleNamespace(name="run", bare=bare))
    lines: list[str] = []
    _Follower(running, lines.append).poll(running)
    return lines


TEXT = "a\fb\x1c\x85\u2028\u2029\vc"  # as in texts that models learn from


@pytest.mark.parametrize("code", [0, 1, None])
def test_a_rank_s_line_is_shown_whole(tmp_path: Path, code: int | None) -> None:
    log = f"torchrun's own\n[0.0]:{TEXT}\n[0.1]:\r\n[0.1]:1 %\r[0.1]:2 %\n\n"
    ranks = [f"[0.0]:{TEXT}", "[0.1]:", "[0.1]:1 %", "[0.1]:2 %"]
    assert shown(tmp_path, log.encode(), code) == [*ranks, *(["torchrun's own", ""] if code else [])]


def test_without_torch_each_line_has_its_node(tmp_path: Path) -> None:
    assert shown(tmp_path, f"{TEXT}\n\n1\r2".encode(), bare=True) == [f"[0]: {TEXT}", "[0]: ", "[0]: 1", "[0]: 2"]
    assert shown(tmp_path, b"", bare=True) == []


def test_torchrun_ends_lines_as_a_text_file_of_python_does(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(f"{TEXT}\r1\r\n2\n".encode())
    program = "import sys; print(len(list(open(sys.argv[1], encoding='utf-8', errors='replace'))))"
    said = subprocess.run([sys.executable, "-c", program, tmp_path / "log"], capture_output=True, text=True, check=True)
    assert said.stdout == "3\n"


@pytest.mark.parametrize(
    ("line", "named", "words", "nodes"),
    [
        ("train.py --steps 2", None, ["train.py", "--steps", "2"], None),
        (
            "--nodes 2 pt_cpu --env A=b sub/train.py --nodes 9 -- x",
            "pt_cpu",
            ["sub/train.py", "--nodes", "9", "--", "x"],
            2,
        ),
        ("--nodes=3 -- nvidia-smi -L", None, ["--", "nvidia-smi", "-L"], 3),
        ("image.sqsh --unverified --nodes 2 -- train.py", "image.sqsh", ["--", "train.py"], 2),
        ("image.sqsh sh -c true", "image.sqsh", ["sh", "-c", "true"], None),
        ("--bind /a --bind /b:/c:ro image.sqsh -- env", "image.sqsh", ["--", "env"], None),
        ("pt_cpu --script old.py -- --nodes 9", "pt_cpu", ["--", "--nodes", "9"], None),
        ("folder.py train.py", "folder.py", ["train.py"], None),
        ("", None, [], None),
    ],
)
def test_own_options_end_at_the_script_or_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, named: str | None, words: list[str], nodes: int | None
) -> None:
    (tmp_path / "folder.py").mkdir()
    monkeypatch.chdir(tmp_path)
    command = cli.get_command(click.Context(cli), "run")
    assert command is not None
    found = command.make_context("run", line.split()).params
    assert (found["named"], list(found["words"]), found["nodes"]) == (named, words, nodes)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--nodse 2 train.py", "'--nodes'?"),
        ("pt_cpu --steps 2 train.py", "No such option"),
        ("python -c pass", "put -- before a program"),
        ("--nodes", "requires an argument"),
    ],
)
def test_an_option_that_is_none_is_refused(line: str, said: str) -> None:
    command = cli.get_command(click.Context(cli), "run")
    assert command is not None
    with pytest.raises((UsageError, click.UsageError)) as caught:
        command.make_context("run", line.split())
    assert said in f"{caught.value.message} {getattr(caught.value, 'hint', '')}"
