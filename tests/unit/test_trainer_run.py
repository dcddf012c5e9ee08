"""Whole runs in this process: report, resuming, failures, and the group without a process group."""

from __future__ import annotations

import glob
import json
import sys
import time
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

from ddp_train import selfcheck
from ddp_train.__main__ import main
from ddp_train.data import DataSet
from ddp_train.distributed import Group, _bound_to, _check_same_backend, choose_backend
from ddp_train.errors import TrainError
from ddp_train.place import RankInfo, find_rank_info

ALONE = find_rank_info({})
RANK_KEYS = {
    "rank",
    "local_rank",
    "group_rank",
    "local_world_size",
    "world_size",
    "host",
    "pid",
    "device",
    "allreduce",
    "parameters_digest",
    "restart_count",
    "sys_executable",
    "sys_prefix",
    "python_version",
    "torch_version",
    "torch_file",
    "torch_cuda",
    "ddp_train_file",
    "gloo_ifname",
    "probes",
    "imports",
    "libraries",
    "sockets",
    "interfaces",
    "store",
    "nccl",
    "nccl_log",
    "peak_memory",
}
REPORT_KEYS = {
    "format",
    "status",
    "world_size",
    "backend",
    "ranks",
    "model",
    "data",
    "seed",
    "batch_size",
    "dataset_size",
    "steps_per_epoch",
    "start_epoch",
    "resumed_from",
    "rejected_snapshots",
    "total_epochs",
    "losses",
    "snapshots",
    "bandwidth",
    "seconds",
    "epoch_seconds",
    "started",
    "strategy",
    "variables",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "TORCHELASTIC_RUN_ID",
        "DDP_TRAIN_JUDGED_LATER",
        "DDP_TRAIN_RESUME_AFTER",
        "DDP_TRAIN_PROBES",
    ):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def train(*arguments: str) -> dict[str, Any]:
    options = ["--dataset_size", "256", "--backend", "gloo", "--report", "report.json"]
    assert main([*arguments, *options]) == 0
    report: dict[str, Any] = json.loads(Path("report.json").read_text())
    return report


def test_report_of_one_process(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = train("4", "2")
    assert set(report) == REPORT_KEYS
    assert [set(rank) for rank in report["ranks"]] == [RANK_KEYS]
    assert report["ranks"][0]["allreduce"] == []
    assert (report["format"], report["status"]) == (1, "finished")
    assert (report["world_size"], report["backend"]) == (1, None)
    assert (report["steps_per_epoch"], report["dataset_size"]) == (8, 256)
    assert [entry["epoch"] for entry in report["losses"]] == [0, 1, 2, 3]
    assert report["losses"][-1]["loss"] < report["losses"][0]["loss"]
    assert all(len(one["steps"]) == 8 and fmean(one["steps"]) == pytest.approx(one["loss"]) for one in report["losses"])
    assert [entry["epoch"] for entry in report["snapshots"]] == [0, 2, 3]
    assert set(report["seconds"]) == {"import_torch", "rendezvous", "train", "total"}
    assert len(report["epoch_seconds"]) == 4 and sum(report["epoch_seconds"]) <= report["seconds"]["train"]
    assert report["ranks"][0]["peak_memory"] > 1 << 20 and 0 < report["started"] <= time.perf_counter()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["LOCAL_RANK", "RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "host", "device"]
    assert "Epoch 2 | Training snapshot saved at snapshot.pt" in lines
    loss = report["losses"][1]["loss"]
    assert f"[RANK 0] Epoch 1 | Batchsize: 32 | Steps: 8 | Loss: {loss:.6f}" in lines
    left = {path.name for path in folder.iterdir()}
    assert left == {"report.json", "snapshot.pt", "snapshot.pt.prev"}


@pytest.mark.parametrize("model", ["linear", "mlp", "cnn"])
def test_interrupted_training_ends_where_an_uninterrupted_one_does(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = train("4", "9", "--model", model, "--checkpoint_path", "whole.pt")
    train("2", "9", "--model", model)
    rest = train("4", "9", "--model", model)
    assert "Resuming training from snapshot at Epoch 2" in capsys.readouterr().out
    assert (rest["start_epoch"], rest["resumed_from"]) == (2, "snapshot.pt")
    assert rest["losses"] == whole["losses"][2:]
    digests = [report["ranks"][0]["parameters_digest"] for report in (whole, rest)]
    assert digests[0] == digests[1]


def test_each_epoch_sees_all_samples_in_an_order_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    batch = DataSet.batch

    def watched(self: DataSet, indices: list[int], device: Any) -> tuple[Any, Any]:
        seen.extend(indices)
        return batch(self, indices, device)

    monkeypatch.setattr(DataSet, "batch", watched)
    train("2", "9")
    first, second = seen[:256], seen[256:]
    assert sorted(first) == sorted(second) == list(range(256))
    assert first != second


def test_nothing_left_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    train("3", "1")
    report = train("3", "1")
    assert "Nothing left to do: 3 of 3 epochs are finished" in capsys.readouterr().out
    assert (report["start_epoch"], report["losses"], report["snapshots"]) == (3, [], [])


def test_refused_snapshots_are_in_the_report() -> None:
    Path("snapshot.pt").write_bytes(b"not torch's")
    report = train("1", "1")
    assert report["start_epoch"] == 0
    assert report["resumed_from"] is None
    [rejected] = report["rejected_snapshots"]
    assert rejected["path"] == "snapshot.pt"
    assert "not a file written by torch.save" in rejected["reason"]
    assert Path("snapshot.pt.refused").read_bytes() == b"not torch's"


@pytest.mark.parametrize(
    ("options", "code", "word"),
    [
        (["--data", "absent"], 2, "absent: is not a folder"),
        (["--checkpoint_path", "absent/s.pt"], 1, "absent does not exist"),
        (["--report", "absent/r.json"], 1, "absent does not exist"),
        (["--lr", "1e30"], 1, "training diverged"),
    ],
)
def test_foreseen_failures_are_one_line(
    options: list[str], code: int, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["3", "1", "--backend", "gloo", *options]) == code
    error = capsys.readouterr().err
    assert error.startswith("ddp_train: error: ")
    assert word in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "judged_later", "code"),
    [([], "", 1), (["--report", "r.json"], "", 1), (["--report", "r.json"], "1", 0), ([], "1", 1)],
)
def test_a_failed_selfcheck_is_fatal_unless_the_reports_reader_judges(
    options: list[str],
    judged_later: str,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def wrong(results: object, host: str) -> None:
        raise TrainError(f"wrong sum on {host}")

    monkeypatch.setattr("ddp_train.loop.require_exact", wrong)
    monkeypatch.setenv("DDP_TRAIN_JUDGED_LATER", judged_later)
    assert main(["1", "1", "--backend", "gloo", "--dataset_size", "64", *options]) == code
    assert "wrong sum on" in capsys.readouterr().err
    assert Path("snapshot.pt").exists() == (code == 0)


def test_a_second_launch_waits_for_the_report_of_the_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train("6", "6", "--checkpoint_path", "whole.pt")
    assert "DDP_TRAIN_RESUME_AFTER" in whole["variables"]
    first = folder / "fir[s]t"
    first.mkdir()
    waited = []

    def sleep(seconds: float) -> None:  # what the first launch does meanwhile
        waited.append(seconds)
        if len(waited) == 2:
            monkeypatch.delenv("DDP_TRAIN_RESUME_AFTER")
            train("4", "4")
        elif len(waited) == 3:
            (first / "train-report1.json").touch()

    # Not time.sleep itself: a thread that another test left would call it, too.
    monkeypatch.setattr("ddp_train.resume.time", SimpleNamespace(sleep=sleep))
    pattern = f"{glob.escape(str(first))}/train-report*.json"
    monkeypatch.setenv("DDP_TRAIN_RESUME_AFTER", pattern)
    report = train("6", "6")
    assert len(waited) == 3
    assert (report["start_epoch"], report["rejected_snapshots"]) == (4, [])
    assert report["losses"] == whole["losses"][4:]


def test_ranks_of_an_older_torch_compare_their_backends_too() -> None:
    class Store:  # as torch 2.0's: without multi_get
        def __init__(self, choices: dict[str, bytes]) -> None:
            self.kept = {f"ddp_train/backend/{rank}": at for rank, at in choices.items()}

        def set(self, key: str, value: str) -> None:
            self.kept[key] = value.encode()

        def get(self, key: str) -> bytes:
            return self.kept[key]

    place = RankInfo(0, 0, 0, 1, 2, 0, "here", distributed=True)
    _check_same_backend(Store({"1": b"gloo on there"}), place, "gloo")
    with pytest.raises(TrainError, match="rank 0 would use gloo on here, rank 1 nccl on there"):
        _check_same_backend(Store({"1": b"nccl on there"}), place, "gloo")


def test_device_id_goes_to_nccl_where_torch_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, cpu = torch.device("cuda", 1), torch.device("cpu")
    assert _bound_to(gpu) == {"device_id": gpu} and _bound_to(cpu) == {}

    def older(backend: str, timeout: object = None) -> None: ...

    monkeypatch.setattr(torch.distributed, "init_process_group", older)
    assert _bound_to(gpu) == {}


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_nccl_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert choose_backend("auto", ALONE) == "gloo"
    assert main(["1", "1", "--backend", "nccl"]) == 2
    assert "torch finds no usable CUDA device on" in capsys.readouterr().err


def test_launcher_variables_that_are_half_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    assert main(["1", "1"]) == 2
    assert "RANK without LOCAL_RANK and WORLD_SIZE" in capsys.readouterr().err


class FakeGroup(Group):
    """World of three whose sums come from the ranks' real inputs, with a fault where asked."""

    def __init__(self, fault: str | None) -> None:
        super().__init__(RankInfo(1, 1, 0, 3, 3, 0, "node", distributed=True), "cpu", "gloo")
        self.fault = fault

    def sum_over_ranks(self, tensor: Any) -> Any:
        parts = [selfcheck._values(len(tensor), r, tensor.dtype, "cpu") for r in range(3)]
        if self.fault == "rank 2 lost":
            parts.pop()
        total = torch.stack(parts).sum(0)
        if self.fault == "one element" and len(total) > 1023:
            total[-1] += 1
        if self.fault == "nan" and total.is_floating_point():
            total[0] = float("nan")
        return total


def test_exact_sums_pass() -> None:
    results = selfcheck.check_allreduce(FakeGroup(None))
    assert [(r["dtype"], r["numel"]) for r in results] == [
        (dtype, numel) for dtype in ("int64", "float32", "float64") for numel in (1, 1023, 1 << 18)
    ]
    assert all(r["ok"] and r["max_error"] == 0 for r in results)
    selfcheck.require_exact(results, "node")


@pytest.mark.parametrize(("fault", "wrong"), [("rank 2 lost", 9), ("one element", 3), ("nan", 6)])
def test_wrong_sums_are_noticed(fault: str, wrong: int) -> None:
    results = selfcheck.check_allreduce(FakeGroup(fault))
    assert sum(not r["ok"] for r in results) == wrong
    json.dumps(results, allow_nan=False)
    with pytest.raises(TrainError, match="wrong sum on node"):
        selfcheck.require_exact(results, "node")


@pytest.mark.parametrize("full", [False, True])
def test_the_log_ends_no_training(folder: Path, monkeypatch: pytest.MonkeyPatch, full: bool) -> None:
    """Neither a letter that its encoding lacks, in the path of the snapshot, nor a full disk below it."""
    with open("/dev/full" if full else "log", "w", encoding="latin-1") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        train("2", "1", "--checkpoint_path", "größe→.pt")
        assert (folder / "größe→.pt.prev").exists()
        with suppress(OSError):
            stream.close()
    assert full or "saved at gr\\xf6\\xdfe\\u2192.pt" in Path("log").read_text(encoding="latin-1")
