"""Typical mistakes and their answers: each says what is wrong and what to write, with exit code 2 or 6."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
from lab.golden import assert_golden

from envbuild.base.files import shipped
from envbuild.cli.commands import run

GOLDEN = Path(__file__).parents[1] / "golden/mistakes.txt"
_GOOD = """name = "NAME"
python = "3.11"
requirements = ["torch==2.10.0+cpu", "numpy==2.2.6"]

[targets.cpu-x86_64]
[targets.cpu-aarch64]
"""
# The mistake in a recipe → what it replaces in the good one.
_RECIPES = {
    "mine": ("", ""),
    "conda_pin": ("numpy==2.2.6", "numpy=2.2.6"),
    "two_bounds": ("numpy==2.2.6", "numpy>=2.0<3"),
    "blank": ("numpy==2.2.6", "numpy 2.2.6"),
    "option": ("numpy==2.2.6", "--extra-index-url https://example.org/simple"),
    "path": ("numpy==2.2.6", "./wheels/numpy.whl"),
    "twice": ("numpy==2.2.6", "numpy==2.2.6', 'NumPy==2.1.0"),
    "comma": ('cpu", "numpy', 'cpu" "numpy'),
    "quote": ('"numpy==2.2.6"', '"numpy==2.2.6'),
    "bracket": ('numpy==2.2.6"]', 'numpy==2.2.6"'),
    "key": ("python =", "pyhton ="),
    "number": ('"3.11"', "3.11"),
    "old_python": ('"3.11"', '"2.7"'),
    "underscore": ("targets.cpu-x86_64", "targets.cu126_x86_64"),
    "gpu": ("targets.cpu-x86_64", "targets.gpu"),
    "other_name": ('name = "NAME"', 'name = "another"'),
    "base": ("[targets.cpu-x86_64]", '[image]\nbase = "docker.io/library/debian:bookworm:1"\n\n[targets.cpu-x86_64]'),
    "table": ("[targets.cpu-x86_64]", "[verify]\nrank = 2\n\n[targets.cpu-x86_64]"),
}
_LINES = """
create mine
install torch
pip install torch
conda env create
env mine
sbatch mine
sif mine
help
help venv
vnev mine
venv mien
venv nosuch
venv requirements.txt
conda environment.yml
venv ./nowhere
venv mine --target cu126-x86_64
venv mine --target gpu
venv mine --target x86_64
venv mine --dryrun
venv mine -o there
venv mine --out a/b/c/d
venv mine --python /no/such
venv mine extra
venv conda_pin
venv two_bounds
venv blank
venv option
venv path
venv twice
venv comma
venv quote
venv bracket
venv key
venv number
venv old_python
venv underscore
venv gpu
venv other_name
venv base
venv table
enroot
apptainer
lock nosuch
lock mine --target gpu
docker mine --tag Bad:Tag:1
docker mine --push
docker mine --out image.tar
run mine train.py
run mine nosuch.py
run nosuch.py --steps 2
run train.py --steps 2
run .venv python
exec mine python
inspect mine
inspect x.log
report mine
diff mine mine
verify mine
verify empty
verify train.py
push mine oci://localhost/x
push mine registry.example.org/x
pull registry.example.org/x
trust mine
job mine
job mine --site slurm
job mine --nodes 0
site show nosuch
init mine --from requirements.txt
init new --from nosuch.txt
init new --from train.py
init requirements.txt
diagnose nosuch.log
diagnose empty
lint-job nosuch.sh
lint-job train.py
history mine
store clean
store prune --older-than yesterday
preflight mine
completion powershell
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with recipes, most of which have a mistake, and files that are none."""
    top = tmp_path / "project"
    for name, (good, bad) in _RECIPES.items():
        folder = top / "recipes" / name
        folder.mkdir(parents=True)
        bad = bad.replace("', '", '", "')
        (folder / "recipe.toml").write_text(_GOOD.replace(good, bad).replace("NAME", name), encoding="utf-8")
    (top / "empty").mkdir()
    for name, text in {
        "train.py": "print('hello')\n",
        "requirements.txt": "torch==2.10.0\n",
        "environment.yml": "channels: [conda-forge]\ndependencies: [python=3.11, numpy]\n",
        "x.log": "hello\n",
    }.items():
        (top / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(top)
    for name, value in {
        "HOME": str(tmp_path / "home"),
        "ENVBUILD_STORE": str(tmp_path / "store"),
        "DOCKER_HOST": "unix:///nonexistent/docker.sock",
        "COLUMNS": "100",
    }.items():
        monkeypatch.setenv(name, value)
    for name in ("ENVBUILD_SITE", "XDG_CONFIG_HOME", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    return top


def answer(line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    """Run `envbuild LINE` in this process; return its exit code and all that it prints."""
    monkeypatch.setattr(sys, "argv", ["envbuild", *shlex.split(line)])
    capsys.readouterr()
    code = run()
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def test_the_answers_to_typical_mistakes(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = _LINES.strip().splitlines()
    assert len(lines) >= 60 and len(set(lines)) == len(lines)
    places = {str(project): "PROJECT", str(project.parent): "TMP", str(shipped("recipes").parent): "ENVBUILD"}
    parts = []
    for line in lines:
        code, said = answer(line, capsys, monkeypatch)
        for place, word in places.items():
            said = said.replace(place, word)
        said = re.sub(r"(?m)^Usage: .*\nTry .*\n\n", "", said)
        assert code in (2, 6), (line, code, said)
        assert "Traceback" not in said and said.count("\n") <= 12, (line, said)
        parts.append(f"$ envbuild {line}\n{said.rstrip()}\n[{code}]\n")
    assert_golden("\n".join(parts), GOLDEN)
