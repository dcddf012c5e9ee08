"""Each check on a trainer's report: passes on a good one, fails on the one thing that is wrong."""

import copy
import dataclasses
import shutil
import zipfile
from pathlib import Path
from typing import Any, cast

import pytest

from envbuild.jobcheck.diagnose.engine import explain
from envbuild.verify import training_checks as training
from envbuild.verify.launch import Outcome, Running, TrainingJob
from envbuild.verify.model import Nodes

JOB = TrainingJob("train", (), nodes=2, nproc_per_node=2, timeout_s=60)


def make_report(**changes: Any) -> dict[str, Any]:
    ranks = [
        {
            "rank": rank,
            "local_rank": rank % 2,
            "group_rank": rank // 2,
            "local_world_size": 2,
            "world_size": 4,
            "host": "n1",
            "pid": 100 + rank,
            "device": "cpu",
            "parameters_digest": "d",
        }
        for rank in range(4)
    ]
    report = {
        "world_size": 4,
        "ranks": ranks,
        "start_epoch": 0,
        "resumed_from": None,
        "rejected_snapshots": [],
        "losses": [{"epoch": e, "loss": 1.0 / (e + 1)} for e in range(3)],
        "snapshots": [{"epoch": 2, "path": "x"}],
    }
    return {**report, **changes}


def make_outcome(**changes: Any) -> Outcome:
    return Outcome(
        **{
            "job": JOB,
            "returncodes": [0, 0],
            "reports": [make_report()],
            "log": "",
            "seconds": 1.0,
            "timed_out": False,
            "command": ["torchrun"],
            **changes,
        }
    )


def test_a_good_launch_passes() -> None:
    assert training.check_launch("launch", make_outcome()).status == "pass"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"returncodes": [0, 1]}, "exit codes [0, 1]"),
        ({"returncodes": [0, -9], "timed_out": True}, "still running"),
        ({"reports": []}, "0 reports"),
    ],
)
def test_a_bad_launch_fails(changes: dict[str, Any], said: str) -> None:
    check = training.check_launch("launch", make_outcome(**changes))
    assert check.status == "fail" and said in check.seen and check.cause


def test_the_world_must_be_one_and_whole() -> None:
    assert training.check_world(JOB, [make_report()]).status == "pass"
    assert training.check_world(JOB, []).status == "fail"
    two = training.check_world(JOB, [make_report(world_size=2), make_report(world_size=2)])
    assert two.status == "fail" and "2 world(s) of size 2, 2" in two.seen
    for key, value in (("group_rank", 0), ("rank", 1), ("pid", 100), ("local_world_size", 4)):
        report = copy.deepcopy(make_report())
        report["ranks"][3][key] = value
        assert training.check_world(JOB, [report]).status == "fail", key


def test_different_parameters_fail() -> None:
    report = make_report()
    assert training.check_parameters(report).status == "pass"
    report["ranks"][3]["parameters_digest"] = "other"
    assert training.check_parameters(report).status == "fail"


@pytest.mark.parametrize(
    ("losses", "status"),
    [
        ([2.0, 1.0], "pass"),
        ([1.0, 0.99], "fail"),
        ([1.0, 1.5], "fail"),
        ([], "fail"),
        ([1.0], "fail"),
        ([1.0, float("nan")], "fail"),
    ],
)
def test_the_loss_must_fall(losses: list[float], status: str) -> None:
    assert training.check_loss_falls(losses).status == status


@pytest.mark.parametrize(
    ("losses", "status"),
    [
        ([1.0, 0.5], "pass"),
        ([1.00001, 0.5], "pass"),
        ([1.001, 0.5], "fail"),
        ([1.0], "fail"),
        ([], "fail"),
        ([float("nan"), 0.5], "fail"),
        ([1.0, float("nan")], "fail"),
    ],
)
def test_the_curve_must_agree(losses: list[float], status: str) -> None:
    assert training.check_curve(losses, [1.0, 0.5], 1e-4).status == status


def test_a_snapshot_must_be_whole_and_alone(tmp_path: Path) -> None:
    path = tmp_path / "s.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("s/data.pkl", b"x" * 1000)
    (tmp_path / "s.pt.prev").write_bytes(path.read_bytes())
    assert training.check_snapshot(make_report(), path, 3).status == "pass"
    assert training.check_snapshot(make_report(), path, 4).status == "fail"
    litter = tmp_path / ".s.pt.tmp1"
    litter.write_text("")
    assert training.check_snapshot(make_report(), path, 3).status == "fail"
    litter.unlink()
    for damage in (path.read_bytes()[:-30], path.read_bytes().replace(b"xxxx", b"xyxx", 1)):
        path.write_bytes(damage)
        assert training.check_snapshot(make_report(), path, 3).status == "fail"
    path.unlink()
    assert "no snapshot" in training.check_snapshot(make_report(), path, 3).seen


def test_resuming_must_begin_where_the_first_launch_ended() -> None:
    job = dataclasses.replace(JOB, nproc_per_node=1)
    good = make_report(world_size=2, start_epoch=3, resumed_from="x", losses=[{"epoch": 3, "loss": 1.0}])
    assert training.check_resume(job, [good], 3, 4).status == "pass"
    assert training.check_resume(job, [good, good], 3, 4).status == "fail"  # each node by itself
    for change in (
        {"start_epoch": 2},
        {"world_size": 4},
        {"resumed_from": None},
        {"losses": []},
        {"rejected_snapshots": [{"path": "x", "reason": "truncated"}]},
    ):
        assert training.check_resume(job, [{**good, **change}], 3, 4).status == "fail", change


def test_a_restart_needs_a_kill_a_snapshot_and_the_same_curve() -> None:
    reference = [1.0 / (e + 1) for e in range(3)]
    report = make_report(start_epoch=1, resumed_from="x", losses=[{"epoch": e, "loss": reference[e]} for e in (1, 2)])
    killed = {"rank": 3, "pid": 9, "after_epoch": 0}

    def status(outcome: Outcome, kill: dict[str, Any] = killed) -> str:
        return training.check_restart(outcome, kill, reference, 1e-4).status

    assert status(make_outcome(reports=[report])) == "pass"
    assert status(make_outcome(reports=[report]), {}) == "fail"
    assert status(make_outcome(reports=[report], returncodes=[0, 1])) == "fail"
    assert status(make_outcome(reports=[make_report()])) == "fail"
    assert status(make_outcome(reports=[])) == "fail"
    wrong = copy.deepcopy(report)
    wrong["losses"][1]["loss"] = 0.4
    assert status(make_outcome(reports=[wrong])) == "fail"


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        ("torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError", "did not start on each of them"),
        ("RuntimeError: Gloo connectFullMesh failed with … remote=[127.0.1.1]", "GLOO_SOCKET_IFNAME"),
        ("socket.gaierror: [Errno -2] Name or service not known", "cannot be resolved"),
        ("OSError: [Errno 28] No space left on device", "disk is full"),
        ("something new", "see the log"),
    ],
)
def test_known_failures_get_their_usual_cause(log: str, cause: str) -> None:
    check = training.check_launch("launch", make_outcome(returncodes=[1, 1], log=log))
    assert cause in check.cause
    assert explain(log, "verification") == ("" if "see the log" in cause else check.cause)


def test_a_failed_launch_shows_the_rank_s_own_exception_before_torchrun_s_summary() -> None:
    own = [
        "[rank1]: Traceback (most recent call last):",
        '[rank1]:   File "/work/.trainer/loop.py", line 7, in train',
        "[rank1]: torch.AcceleratorError: CUDA error: no kernel image is available for execution on the device",
    ]
    summary = [f"torchrun's line {number}" for number in range(40)]
    check = training.check_launch("launch", make_outcome(returncodes=[1, 1], log="\n".join([*own, *summary])))
    assert own[2].split(": ", 1)[1] in check.seen and "loop.py" in check.seen
    long = own[2] + ": " + "x" * 5000
    assert long in training.log_tail("\n".join([*own[:2], long, *summary]))
    assert check.cause.startswith("the artifact has no code for this host's GPU")


@pytest.mark.parametrize(("name", "shown"), [("h200_two_ranks", 0), ("h200_no_plugin", 2), ("efa_no_device", 4)])
def test_the_log_of_a_job_has_nccl_s_faults_unless_it_went_on_after_all_of_them(
    name: str, shown: int, tmp_path: Path
) -> None:
    shutil.copy(Path(__file__).parent / f"data/nccl/{name}.log", tmp_path / "train-nccl0.n1.7.txt")
    running = Running(TrainingJob("train", (), 1, 1, 60), "id", tmp_path, 0.0, cast(Nodes, None))
    lines = running._nccl_faults().splitlines()
    assert len(lines) == shown and all(line.startswith("NCCL WARN ") for line in lines)
