"""The command line, the launcher's variables, and the package's own promises."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ddp_train
from ddp_train.args import parse_arguments
from ddp_train.errors import TrainError, one_line
from ddp_train.place import JUDGED_LATER, find_rank_info

PACKAGE = Path(ddp_train.__file__).parent

TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "GROUP_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "WORLD_SIZE": "4",
    "TORCHELASTIC_RESTART_COUNT": "2",
}


def test_defaults() -> None:
    arguments = parse_arguments(["50", "10"])
    assert (arguments.total_epochs, arguments.save_every, arguments.batch_size) == (50, 10, 32)
    assert (arguments.checkpoint_path, arguments.model, arguments.data) == ("snapshot.pt", "linear", "synthetic")
    assert arguments.dataset_size is None
    assert arguments.report is None


@pytest.mark.parametrize("name", ["batch_size", "checkpoint_path", "dataset_size"])
def test_dashes_and_underscores_mean_the_same(name: str) -> None:
    underscored = parse_arguments(["2", "1", f"--{name}", "7"])
    dashed = parse_arguments(["2", "1", f"--{name.replace('_', '-')}", "7"])
    assert underscored == dashed != parse_arguments(["2", "1"])


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["0", "1"], "at least 1"),
        (["1", "0"], "at least 1"),
        (["x", "1"], "whole number"),
        (["1"], "save_every"),
        (["1", "1", "--batch_size", "-3"], "batch_size"),
        (["1", "1", "--lr", "nan"], "positive"),
        (["1", "1", "--lr", "0"], "positive"),
        (["1", "1", "--seed", "-1"], "2**32"),
        (["1", "1", "--model", "resnet"], "resnet"),
        (["1", "1", "--backend", "mpi"], "mpi"),
        (["1", "1", "--checkpoint_path", ""], "empty"),
        (["1", "1", "--batch", "4"], "unrecognized"),
    ],
)
def test_bad_arguments_are_one_line_and_code_2(argv: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse_arguments(argv)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("ddp_train: error: ")
    assert word in error
    assert error.count("\n") == 1


def test_second_rank_of_a_node_does_not_repeat_the_usage_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr("ddp_train.args._LAST_WORDS_S", 0)
    with pytest.raises(SystemExit) as stop:
        parse_arguments([])
    assert stop.value.code == 2
    assert capsys.readouterr().err == ""


def test_place_from_torchrun() -> None:
    place = find_rank_info(TORCHRUN)
    assert (place.rank, place.local_rank, place.group_rank) == (3, 1, 1)
    assert (place.local_world_size, place.world_size, place.restart_count) == (2, 4, 2)
    assert place.distributed


def test_place_without_a_launcher() -> None:
    place = find_rank_info({"LOCAL_RANK": "5"})
    assert (place.rank, place.local_rank, place.world_size) == (0, 0, 1)
    assert not place.distributed


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"WORLD_SIZE": None}, "RANK and LOCAL_RANK without WORLD_SIZE; pyxis .* unset RANK LOCAL_RANK"),
        ({"RANK": "one"}, "RANK"),
        ({"LOCAL_RANK": None}, "LOCAL_RANK"),
        ({"RANK": "4"}, "RANK 4 of WORLD_SIZE 4"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK"),
    ],
)
def test_place_from_broken_variables(change: dict[str, str | None], name: str) -> None:
    environ = {key: value for key, value in {**TORCHRUN, **change}.items() if value is not None}
    with pytest.raises(TrainError, match=name) as caught:
        find_rank_info(environ)
    assert caught.value.exit_code == 2


def test_one_line_of_an_exception() -> None:
    assert one_line(ValueError("\n  first\nsecond")) == "first"
    assert one_line(ValueError()) == "ValueError"
    assert len(one_line(ValueError("x" * 1000))) == 300


def test_sources_are_python_3_9_and_short() -> None:
    sources = sorted(PACKAGE.glob("*.py"))
    assert len(sources) > 5
    for source in sources:
        text = source.read_text()
        ast.parse(text, feature_version=(3, 9))
        assert source.is_symlink() or len(text.splitlines()) < 300, source  # links are to modules of envbuild


def test_wrong_arguments_do_not_wait_for_torch(tmp_path: Path) -> None:
    """A torch that cannot be imported is not even looked at; with good arguments it is one line."""
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12: cannot open')\n")
    environ = {"PYTHONPATH": f"{tmp_path}:{PACKAGE.parent}"}
    command = [sys.executable, "-m", "ddp_train"]
    usage = subprocess.run([*command, "0", "1"], env=environ, capture_output=True, text=True)
    assert (usage.returncode, "at least 1" in usage.stderr) == (2, True)
    broken = subprocess.run([*command, "1", "1"], env=environ, capture_output=True, text=True)
    assert broken.returncode == 1
    assert broken.stderr.startswith("ddp_train: error: torch cannot be imported")
    assert "libcudart" in broken.stderr
    assert broken.stderr.count("\n") == 1


@pytest.mark.parametrize(("parent_has", "own", "code"), [("1", "1", 0), ("0", "1", -9), ("0", "0", 0)])
def test_a_rank_of_a_verification_ends_whose_torchrun_has_died_before_it(parent_has: str, own: str, code: int) -> None:
    """A parent without the variable that verification gives to torchrun has adopted the rank."""
    rank = "import os; from ddp_train.place import die_with_parent; die_with_parent(os.environ)"
    parent = f"""if True:
        import os, subprocess
        os.environ[{JUDGED_LATER!r}] = {own!r}
        print(subprocess.run([{sys.executable!r}, "-c", {rank!r}]).returncode)
    """
    env = {**os.environ, "TORCHELASTIC_RUN_ID": "x", JUDGED_LATER: parent_has}
    done = subprocess.run([sys.executable, "-c", parent], env=env, capture_output=True, text=True)
    assert done.stdout.strip() == str(code), done.stderr
