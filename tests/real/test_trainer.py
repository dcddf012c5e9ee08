"""The trainer with several ranks and under torchrun: two simulated nodes, killed workers, failures."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 180  # seconds for one job, on a busy machine of two cores
# Without garbage collection, which takes a third of an agent's start.
_RUN = "import gc; gc.disable(); from torch.distributed.run import main; main()"
TORCHRUN = [sys.executable, "-c", _RUN]

pytest.importorskip("torch")


def environment(**changes: str) -> dict[str, str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **changes}
    # With it, each process would compile all of torch's modules again.
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    return environ


class Job:
    """A process whose output is collected line by line; it and its children end with the test."""

    def __init__(self, command: list[str], folder: Path, environ: dict[str, str]) -> None:
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env=environ,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, pattern: str) -> None:
        wait_until(lambda: re.search(pattern, self.output) is not None, f"{pattern}:\n", self)

    def end(self) -> int:
        code = self.process.wait(LIMIT)
        self._reader.join(10)
        return code

    def workers(self) -> list[int]:
        """Process ids of torchrun's children that run the trainer."""
        listing = subprocess.run(
            ["ps", "-o", "pid=,args=", "--ppid", str(self.process.pid)], capture_output=True, text=True
        ).stdout
        return [int(row.split()[0]) for row in listing.splitlines() if "ddp_train" in row]


def wait_until(true: Callable[[], bool], what: str, job: Job | None = None, limit: float = LIMIT) -> None:
    deadline = time.monotonic() + limit
    while not true():
        if time.monotonic() > deadline:
            pytest.fail(f"waited {limit} s in vain for {what}{job.output if job else ''}")
        time.sleep(0.05)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def launch(command: list[str], folder: Path = tmp_path, **environ: str) -> Job:
        jobs.append(Job(command, folder, environment(**environ)))
        return jobs[-1]

    yield launch
    for job in jobs:
        # torchrun puts each rank into a session of its own: the group does not reach them.
        for pid in job.workers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.process.pid, signal.SIGKILL)
        job.process.wait(10)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def local(number: int, *arguments: str) -> list[str]:
    command = [*TORCHRUN, "--standalone", f"--nproc-per-node={number}", "-m", "ddp_train"]
    return [*command, *arguments]


# MASTER_PORT NUMBER ARGUMENT…: ranks with the variables of a launcher that is no torchrun; ends with a failure of one.
# They are forked from one process: the imports of torch and of what an optimizer needs take two seconds.
_RANKS = """
import gc
gc.disable()
import os, runpy, sys, torch, torch._dynamo
gc.freeze()
port, number, *arguments = sys.argv[1:]
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, WORLD_SIZE=number, LOCAL_WORLD_SIZE=number)
for rank in range(int(number)):
    if os.fork() == 0:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        sys.argv[1:] = arguments
        runpy.run_module("ddp_train", run_name="__main__", alter_sys=True)
statuses = [os.wait()[1] for _ in range(int(number))]
sys.exit(max(map(os.waitstatus_to_exitcode, statuses), key=abs))
"""


def ranks(number: int, *arguments: str) -> list[str]:
    """The command of ranks without torchrun, whose agent imports torch, too."""
    return [sys.executable, "-c", _RANKS, str(free_port()), str(number), *arguments]


def alone(*arguments: str) -> list[str]:
    """The command of one process without torchrun."""
    return [sys.executable, "-m", "ddp_train", *arguments]


def report_at(path: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(path.read_text())
    return report


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


# A network that adds wrongly, on one rank and for one size, and takes a quarter of a second more for large ones.
INEXACT = """
import os, time, torch
exact = torch.distributed.all_reduce
def inexact(tensor, *args, **kwargs):
    if tensor.numel() >= 1 << 14:
        time.sleep(0.25)
    result = exact(tensor, *args, **kwargs)
    if tensor.numel() == 1023 and os.environ["RANK"] == "1":
        tensor[17] += 1
    return result
torch.distributed.all_reduce = inexact
"""


def test_a_network_that_adds_wrongly_is_in_the_report_and_does_not_end_a_verification(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    """A job ends by a wrong sum, as tests/unit/test_trainer_run.py shows.

    The same launch shows that one size is enough to measure a slow network.
    """
    (tmp_path / "sitecustomize.py").write_text(INEXACT)
    command = ranks(2, "1", "1", "--backend", "gloo", "--report", "report.json", "--bandwidth", "0.5")
    job = start(command, PYTHONPATH=f"{tmp_path}:{ROOT}", DDP_TRAIN_JUDGED_LATER="1")
    assert job.end() == 0, job.output
    assert "gave a wrong sum" in job.output
    report = report_at(tmp_path / "report.json")
    wrong = [[one["numel"] for one in rank["allreduce"] if not one["ok"]] for rank in report["ranks"]]
    assert wrong == [[], [1023, 1023, 1023]]
    rows = report["bandwidth"]
    assert len(rows) == 1 and rows[0]["seconds"] >= 0.25


def test_two_ranks_follow_the_curve_of_one_process(start: Callable[..., Job], tmp_path: Path) -> None:
    """Of a cnn; verification compares the curves of an mlp. How ranks leave many times: tests/lab/stress_trainer.py."""
    common = ["3", "2", "--model", "cnn", "--dataset_size", "512", "--seed", "7"]
    kept = ("--checkpoint_path", "alone.pt", "--report", "alone.json")
    single = start(alone(*common, "--batch_size", "32", *kept))
    assert single.end() == 0, single.output
    both = start(ranks(2, *common, "--batch_size", "16", "--report", "both.json"))
    assert both.end() == 0, both.output
    one, two = report_at(tmp_path / "alone.json"), report_at(tmp_path / "both.json")
    assert [entry["epoch"] for entry in two["losses"]] == [0, 1, 2]
    for index, entry in enumerate(two["losses"]):
        assert entry["loss"] == pytest.approx(one["losses"][index]["loss"], rel=1e-4)
    assert (two["world_size"], two["backend"], two["steps_per_epoch"]) == (2, "gloo", 16)
    assert [rank["rank"] for rank in two["ranks"]] == [0, 1]
    for rank in two["ranks"]:
        assert len(rank["allreduce"]) == 9
        assert all(check["ok"] for check in rank["allreduce"])
    assert len({rank["parameters_digest"] for rank in two["ranks"]}) == 1
    assert len({rank["pid"] for rank in two["ranks"]}) == 2
    assert both.output.count("Training snapshot saved") == 2, "only rank 0 saves"
    for rank_number in (0, 1):
        assert f"[RANK {rank_number}] Epoch 2 | Batchsize: 16 | Steps: 16 | Loss: " in both.output
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_bandwidth_and_connections_are_in_the_report(start: Callable[..., Job], tmp_path: Path) -> None:
    options = ["--bandwidth", "0.5", "--backend", "gloo", "--report", "report.json"]
    job = start(ranks(3, "1", "1", *options), GLOO_SOCKET_IFNAME="lo")
    assert job.end() == 0, job.output
    report = report_at(tmp_path / "report.json")
    rows = report["bandwidth"]
    assert [row["bytes"] for row in rows] == [2**16 * 4**n for n in range(len(rows))] and rows
    for row in rows:
        assert row["algbw"] == pytest.approx(row["bytes"] / row["seconds"] / 1e9, rel=0.01, abs=2e-6)
        assert row["busbw"] == pytest.approx(row["algbw"] * 2 * 2 / 3, rel=0.01, abs=2e-6)
    assert job.output.count("busbw (GB/s)") == 1, "rank 0 alone shows the table"
    sockets = [{tuple(pair) for pair in rank["sockets"]} for rank in report["ranks"]]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert {(b, a) for a, b in sockets[one]} & sockets[other], "every two ranks are connected"
    port = report["ranks"][0]["store"].rpartition(":")[2]
    assert any(end.endswith(f":{port}") for pair in sockets[1] for end in pair)


def test_damaged_snapshot_falls_back_on_all_ranks_and_no_numpy_is_needed(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    (blocked / "numpy.py").write_text("raise ModuleNotFoundError(\"No module named 'numpy'\")\n")
    options = ["--model", "cnn", "--dataset_size", "256", "--report", "report.json"]
    first = start(alone("3", "1", *options), PYTHONPATH=f"{blocked}:{ROOT}")
    assert first.end() == 0, first.output
    snapshot = tmp_path / "snapshot.pt"
    snapshot.write_bytes(snapshot.read_bytes()[:-100])
    second = start(ranks(2, "4", "1", *options), PYTHONPATH=f"{blocked}:{ROOT}")
    assert second.end() == 0, second.output
    report = report_at(tmp_path / "report.json")
    assert report["start_epoch"] == 2
    assert report["resumed_from"] == "snapshot.pt.prev"
    assert [entry["path"] for entry in report["rejected_snapshots"]] == ["snapshot.pt"]
    assert "Resuming training from snapshot at Epoch 2" in second.output
    # torch itself warns of a missing NumPy; nothing may have failed over it.
    assert "Traceback" not in first.output + second.output


def test_a_foreseen_failure_ends_all_ranks_with_one_line(start: Callable[..., Job]) -> None:
    """Other failures: tests/unit/test_trainer_run.py."""
    job = start(ranks(2, "3", "1", "--data", "absent"))
    began = time.monotonic()
    assert job.end() == 2, job.output
    assert time.monotonic() - began < LIMIT / 2
    errors = [line for line in job.lines if line.startswith("ddp_train: error: ")]
    assert len(errors) == 1, job.output
    assert "absent: is not a folder" in errors[0]


def test_full_disk_during_training_ends_all_ranks(start: Callable[..., Job], tmp_path: Path) -> None:
    """A limit on file sizes (4 blocks of 1024 bytes) stands for the full disk."""
    command = ["bash", "-c", 'ulimit -f 4; exec "$@"', "-", *ranks(2, "3", "1")]
    job = start(command)
    assert job.end() != 0
    errors = [line for line in job.lines if line.startswith("ddp_train: error: ")]
    assert errors == ["ddp_train: error: cannot write snapshot snapshot.pt: File too large"]
    assert not [path for path in tmp_path.iterdir() if "snapshot" in path.name]


def test_ranks_die_with_a_killed_torchrun(start: Callable[..., Job]) -> None:
    job = start(local(2, "1000000", "1000000"))
    job.wait_for(r"\[RANK 1\] Epoch 1 ")
    workers = job.workers()
    assert len(workers) == 2
    job.process.kill()
    try:
        wait_until(lambda: not any(alive(pid) for pid in workers), "the ranks' end", limit=30)
    finally:
        for pid in filter(alive, workers):
            os.kill(pid, signal.SIGKILL)


def nodes(port: int, node: int, *arguments: str, number: int) -> list[str]:
    """The command of one of two nodes with this number of ranks, both on this machine."""
    return [
        *TORCHRUN,
        "--nnodes=2",
        f"--nproc-per-node={number}",
        "--max-restarts=3",
        "--rdzv-id=trainer",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{port}",
        "--local-addr=127.0.0.1",
        f"--rdzv-conf=is_host={1 - node},join_timeout={LIMIT},read_timeout={LIMIT}",
        "-m",
        "ddp_train",
        *arguments,
    ]


def test_a_killed_worker_restarts_from_the_snapshot(start: Callable[..., Job], tmp_path: Path) -> None:
    """Two nodes without a shared disk, one with two ranks: the other must get the state over the network.

    A rank of node 1 is killed in tests/real/test_job_faults.py.
    """
    settings = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    port = free_port()
    jobs = []
    for node in (0, 1):
        folder = tmp_path / f"node{node}"
        folder.mkdir()
        command = nodes(port, node, "60", "5", "--report", "report.json", number=2 - node)
        jobs.append(start(command, folder, **settings))

    def saved() -> bool:
        return any("Epoch 10 | Training snapshot saved" in job.output for job in jobs)

    wait_until(saved, "a snapshot")
    os.kill(jobs[0].workers()[-1], signal.SIGKILL)
    outputs = []
    for job in jobs:
        code = job.end()
        outputs.append(job.output)
        assert code == 0, job.output[-6000:]
    assert "Resuming training from snapshot at Epoch" in "".join(outputs)
    # torchrun sorts its agents by address and process id: rank 0 keeps its node, but which it is
    # does not follow from is_host.
    reports = [report_at(path) for path in tmp_path.glob("node*/report.json")]
    assert len(reports) == 1
    [report] = reports
    assert report["start_epoch"] >= 11
    assert report["losses"][-1]["epoch"] == 59
    assert sorted({rank["group_rank"] for rank in report["ranks"]}) == [0, 1]
    assert len({rank["parameters_digest"] for rank in report["ranks"]}) == 1
    assert max(rank["restart_count"] for rank in report["ranks"]) >= 1
    assert {rank["gloo_ifname"] for rank in report["ranks"]} == {"lo"}
