"""Real bash, zsh and fish complete what a user types."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

# What is typed before the Tab key, and the line then.
CASES = [
    ("envbuild venv pt_m", "envbuild venv pt_minimal "),
    ("envbuild venv pt_minimal --target=cpu-x", "envbuild venv pt_minimal --target=cpu-x86_64 "),
    ("envbuild venv od", "envbuild venv odd\\ name "),
    ("envbuild site show slurm-m", "envbuild site show slurm-modules "),
    ("envbuild verify bu", "envbuild verify build/pt_cpu/cpu-x86_64/venv "),
    ('envbuild verify "my image:', 'envbuild verify "my image:1.sqsh" '),
    ("envbuild push my\\ image:1.sqsh host:5000/x:1 --js", "envbuild push my\\ image:1.sqsh host:5000/x:1 --json "),
    ("envbuild run ./fi", "envbuild run ./file.sif "),
    ("envbuild venv pt_cpu --out=./oth", "envbuild venv pt_cpu --out=./other/"),
]
# How each shell starts; then a key (Ctrl-O) that appends the line to a file and empties it.
STARTS = {"bash": ["bash", "--noprofile", "--norc", "-i"], "zsh": ["zsh", "-f", "-i"]}
SOURCED = {
    "bash": """source <(envbuild completion bash)
keep() { printf '%s\\n' "$READLINE_LINE" >>lines; READLINE_LINE=; }
bind -x '"\\C-o": keep'
""",
    "zsh": """autoload -Uz compinit; compinit -u -D; source <(envbuild completion zsh)
keep() { print -r -- $BUFFER >>lines; BUFFER=; }
zle -N keep; bindkey '^O' keep
""",
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "recipes/odd name").mkdir(parents=True)
    (tmp_path / "recipes/odd name/recipe.toml").touch()
    (tmp_path / "build/pt_cpu/cpu-x86_64/venv").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    for name in ("my image:1.sqsh", "file.sif", "file.txt"):
        (tmp_path / name).touch()
    return tmp_path


def variables() -> dict[str, str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return {**os.environ, "PATH": path, "TERM": "dumb", "COLUMNS": "200", "LC_ALL": "C.UTF-8"}


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_the_tab_key_completes(shell: str, place: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (place / "start").write_text(SOURCED[shell])
    lines = place / "lines"
    process, screen = pty.fork()
    if process == 0:
        os.chdir(place)
        os.execvpe(STARTS[shell][0], STARTS[shell], variables())
    shown, end = b"", time.monotonic() + 60
    try:
        os.write(screen, b"source ./start; touch lines\n")
        for number in range(len(CASES) + 1):
            while not lines.exists() or lines.read_text().count("\n") < number:
                assert time.monotonic() < end, shown
                if select.select([screen], [], [], 0.01)[0]:
                    shown += os.read(screen, 65536)
            if number < len(CASES):
                os.write(screen, f"{CASES[number][0]}\t\x0f".encode())
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(screen)
    assert lines.read_text().splitlines() == [expected for _, expected in CASES]


def test_fish_completes(place: Path) -> None:
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    # `complete -C` prints words before fish quotes them.
    script = "envbuild completion fish | source\nfor line in $argv; echo '#'; complete -C $line; end"
    command = ["fish", "--no-config", "-c", script, "--", *(typed for typed, _ in CASES)]
    env = variables() | {"XDG_CONFIG_HOME": str(place), "XDG_DATA_HOME": str(place)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=place, env=env)
    found = [answer.split("\n")[1].partition("\t")[0] for answer in done.stdout.split("#")[1:]]
    last = [re.split(r"(?<!\\) (?!image:)", line.rstrip())[-1] for _, line in CASES]
    assert found == [word.replace("\\", "").strip('"') for word in last], done.stdout + done.stderr
    assert done.stderr == ""
