"""`envbuild run`: a user's script in a venv and in a .sqsh, on simulated nodes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from .conftest import Command

SCRIPT = """
import os, pathlib, sys
import torch.distributed as d
d.init_process_group("gloo")
names = [None] * d.get_world_size()
d.all_gather_object(names, os.environ["GROUP_RANK"] + "." + os.environ["LOCAL_RANK"])
print("here", *names, *filter(None, [os.environ.get("LR")]), *sys.argv[1:], flush=True)
pathlib.Path(f"rank{d.get_rank()}.txt").write_text(pathlib.Path("data.txt").read_text())
rank = d.get_rank()
d.barrier()
d.destroy_process_group()
os._exit(3 if "--fail" in sys.argv and rank == 1 else 0)  # gloo's threads sometimes abort Python's shutdown
"""


def prepare(folder: Path) -> None:
    (folder / "train.py").write_text(SCRIPT)
    (folder / "data.txt").write_text("42")


def test_a_script_in_a_venv_with_live_output_of_each_rank(
    envbuild: Command, pt_cpu: dict[str, Any], tmp_path: Path
) -> None:
    prepare(tmp_path)
    line = ("run", "--nodes", "2", pt_cpu["path"], "--nproc-per-node", "1", "--env", "LR=2", "train.py", "--lr", "$1")
    done = envbuild(*line)
    assert done.returncode == 0, done.stdout + done.stderr
    # torchrun's own lines are not those of the program.
    assert sorted(done.stdout.splitlines()) == ["[0.0]:here 0.0 1.0 2 --lr $1", "[1.0]:here 0.0 1.0 2 --lr $1"]
    assert (tmp_path / "rank1.txt").read_text() == "42"
    left = {name for name in os.listdir(tmp_path) if name.startswith(".envbuild")}
    assert not left


def test_a_script_in_an_image_and_its_failure(envbuild: Command, squash: dict[str, Any], tmp_path: Path) -> None:
    prepare(tmp_path)
    line = ("run", squash["enroot"]["path"], "--nproc-per-node", "2", "train.py", "--fail")
    done = envbuild(*line)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "[0.1]:here 0.0 0.1 --fail" in done.stdout and "exitcode  : 3" in done.stdout
    assert (tmp_path / "rank1.txt").read_text() == "42"


def test_a_program_starts_once_in_a_venv_with_the_terminal_of_the_caller(
    envbuild: Command, pt_cpu: dict[str, Any], tmp_path: Path
) -> None:
    said = "import os, sys; print(sys.prefix, os.getcwd(), input(), 'RANK' in os.environ, os.environ['X']); sys.exit(7)"
    (tmp_path / "in").mkdir()
    line = envbuild.line("run", "--env", "X=$y", "--workdir", "in", pt_cpu["path"], "--", "python", "-c", said)
    done = subprocess.run(line, input="typed\n", capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 7, done.stderr
    assert done.stdout.split() == [str(Path(pt_cpu["path"]).absolute()), str(tmp_path / "in"), "typed", "False", "$y"]
    for words, code in ((["sh", "-c", "kill -TERM $$"], -15), (["no-such-program"], 127), (["./in"], 126)):
        done = subprocess.run(envbuild.line("run", pt_cpu["path"], "--", *words), capture_output=True, cwd=tmp_path)
        assert done.returncode == code and b"Traceback" not in done.stderr, done.stderr


def test_refusals(envbuild: Command, pt_cpu: dict[str, Any]) -> None:
    for words, message in (
        ((pt_cpu["path"],), "give SCRIPT.py, --module M, or -- PROGRAM"),
        ((pt_cpu["path"], "gone.py", "--steps", "2"), "there is no script gone.py in "),
        ((pt_cpu["path"], "--script", "a.py", "--module", "a"), "--script and --module are two programs"),
        ((pt_cpu["path"], "--bind", "/", "--", "true"), "--bind and --runtime are for images"),
        ((pt_cpu["path"], "--nodes", "1", "--workdir", "/", "--", "true"), "this command starts ranks"),
        (("nothing-of-that-name", "--module", "a"), "nothing-of-that-name is neither an artifact nor a recipe"),
    ):
        done = envbuild("run", *words)
        assert done.returncode == 2 and message in done.stderr, done.stderr
