"""The output of a program that `envbuild run` starts: which lines are shown, when, and how."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from envbuild.verify.user_run import _Follower


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
