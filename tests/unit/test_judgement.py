"""Recorded launches and probes of pt_cpu, 2 × 2 ranks, that passed: break one thing, see exactly its check fail.

tests/real/test_checks_alive.py breaks real launches; here is what need not be launched to be broken.
"""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from envbuild.contract.state import State
from envbuild.contract.verification import VerifySettings
from envbuild.fabrics import find_fabric
from envbuild.recipe.targets import CPU, Target
from envbuild.site.tables import FabricTable
from envbuild.verify.launch import Bench, Network, Outcome, TrainingJob
from envbuild.verify.model import Check, Subject
from envbuild.verify.probes import cases_of, expected_parts, make_operations
from envbuild.verify.run import _floor, judge_launches

RECORDED = Path(__file__).parent / "data/verification/launches.json"
PROBED = RECORDED.with_name("probes.json")
ROOT = Path("/build/venv")

Launched = dict[str, Any]


def ranks(launched: Launched) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = launched["first"]["reports"][0]["ranks"]
    return found


def curve(launched: Launched, change: Callable[[float], float], *names: str) -> None:
    for name in names or ("first", "second"):
        for entry in launched[name]["reports"][0]["losses"]:
            entry["loss"] = change(entry["loss"])


def split(launched: Launched) -> None:
    """Each node met only itself."""
    report = launched["first"]["reports"][0]
    report["world_size"] = 2
    del report["ranks"][2:]
    launched["first"]["reports"].append(json.loads(json.dumps(report)))


def wrong_result(check: str, case: str) -> Callable[[Launched], object]:
    return lambda launched: ranks(launched)[1]["probes"][check].update({case: "0" * 64})


def probed(name: str, value: object, *numbers: int) -> Callable[[Launched], object]:
    """Every rank of `numbers` (default: all) reported `value` for the probe `name`."""
    return lambda launched: [ranks(launched)[rank]["probes"].update({name: value}) for rank in numbers or range(4)]


def first_epoch_again(launched: Launched) -> None:
    """The sampler ignores set_epoch."""
    for rank in ranks(launched):
        rank["probes"]["sampler"] = [rank["probes"]["sampler"][0]] * 3


def other_epoch(launched: Launched) -> None:
    """The order of an epoch does not follow from its number."""
    for rank in ranks(launched):
        rank["probes"]["sampler"][2] = rank["probes"]["sampler"][1]


def one_share(launched: Launched) -> None:
    """All ranks train on rank 0's samples."""
    probed("sampler", ranks(launched)[0]["probes"]["sampler"])(launched)


def early(launched: Launched) -> None:
    """Rank 3 left the barrier before the last rank entered it."""
    ranks(launched)[3]["probes"]["barrier"]["left"] = ranks(launched)[3]["probes"]["barrier"]["entered"]
    ranks(launched)[0]["probes"]["barrier"]["entered"] += 3600
    for rank in ranks(launched)[:3]:
        rank["probes"]["barrier"]["left"] += 3600


def other_step(name: str) -> Callable[[Launched], object]:
    def change(launched: Launched) -> None:
        ranks(launched)[2]["probes"]["optimizer"][name][5] += 1e-6

    return change


def operations(launched: Launched) -> dict[str, Any]:
    found: dict[str, Any] = launched["reference"]["reports"][0]["ranks"][0]["probes"]["operations"]
    return found


def other_result(name: str, part: str, change: float) -> Callable[[Launched], object]:
    return lambda launched: operations(launched)[name][part].__setitem__(
        3, operations(launched)[name][part][3] + change
    )


def flat(launched: Launched) -> None:
    """The optimizer does not step, in no launch."""
    curve(launched, lambda _: 1.25, "first", "second", "reference")


BREAKS: dict[str, tuple[str, Callable[[Launched], object]]] = {
    "a node whose torchrun failed": ("launch", lambda r: r["first"].update(returncodes=[0, 1])),
    "a launch that took too long": ("launch", lambda r: r["first"].update(timed_out=True)),
    "no report": ("launch", lambda r: r["first"].update(reports=[])),
    "nodes that met only themselves": ("world", split),
    "a rank twice": ("world", lambda r: ranks(r)[3].update(rank=2)),
    "a process that is two ranks": ("world", lambda r: ranks(r)[1].update(pid=ranks(r)[0]["pid"])),
    "another Python": ("versions", lambda r: ranks(r)[2].update(python_version="3.11.2")),
    "another torch than the locked one": ("versions", lambda r: ranks(r)[0].update(torch_version="1.0.0")),
    "torch for CUDA on a CPU target": ("versions", lambda r: ranks(r)[0].update(torch_cuda="12.6")),
    "torch of the user": ("versions", lambda r: ranks(r)[3].update(torch_file="/home/u/.local/torch/__init__.py")),
    "a trainer that is not envbuild's": (
        "versions",
        lambda r: ranks(r)[1].update(ddp_train_file="/build/venv/lib/ddp_train/__init__.py"),
    ),
    "a wrong sum on one rank": ("allreduce", wrong_result("allreduce", "sum float64 × 1023")),
    "a wrong large sum": ("allreduce", wrong_result("allreduce", "sum float32 × 4194304")),
    "a wrong sum in bfloat16": ("allreduce", wrong_result("allreduce", "sum bfloat16 × 524288")),
    "a wrong maximum": ("allreduce", wrong_result("allreduce", "max int64 × 1023")),
    "a wrong minimum": ("allreduce", wrong_result("allreduce", "min float16 × 1023")),
    "a wrong product": ("allreduce", wrong_result("allreduce", "product float32 × 1023")),
    "a type that torch should support": (
        "allreduce",
        lambda r: ranks(r)[1]["probes"]["allreduce"].update({"sum bfloat16 × 1023": "error: Invalid scalar type"}),
    ),
    "a rank that summed nothing": ("allreduce", probed("allreduce", {}, 2)),
    "a report without probes": ("allreduce", lambda r: ranks(r)[2].pop("probes")),
    "a wrong broadcast": ("collectives", wrong_result("collectives", "broadcast float32 × 131072")),
    "a wrong all-gather": ("collectives", wrong_result("collectives", "all_gather int64 × 1023")),
    "a wrong reduce-scatter": ("collectives", wrong_result("collectives", "reduce_scatter bfloat16 × 1023")),
    "a barrier that does not wait": ("collectives", early),
    "a sampler that ignores set_epoch": ("sampler", first_epoch_again),
    "a sampler with an order of its own": ("sampler", other_epoch),
    "a sampler that gives all ranks one share": ("sampler", one_share),
    "a step of SGD of another size": ("optimizer", other_step("SGD")),
    "a step of AdamW of another size": ("optimizer", other_step("AdamW")),
    "an optimizer without steps": ("optimizer", lambda r: ranks(r)[1]["probes"]["optimizer"].pop("AdamW")),
    "an exact product that is close": ("operations", other_result("matmul float32", "output", 1e-6)),
    "a gradient that is not close": ("operations", other_result("layer_norm bfloat16", "gradient of weight", 0.5)),
    "a sample twice": ("operations", other_result("DataLoader int64", "share 1 of 2", 1)),
    "a result that is no number": (
        "operations",
        other_result("cross_entropy float32", "gradient of logits", float("nan")),
    ),
    "a result with a value less": ("operations", lambda r: operations(r)["embedding float32"]["output"].pop()),
    "an operation without gradient": (
        "operations",
        lambda r: operations(r)["linear float16"].pop("gradient of weight"),
    ),
    "an operation that no process probed": ("operations", lambda r: operations(r).pop("batch_norm float32")),
    "an operation that failed": (
        "operations",
        lambda r: operations(r).update({"matmul float16": "error: RuntimeError: not implemented"}),
    ),
    "a reference without probes": ("operations", lambda r: r["reference"]["reports"][0]["ranks"][0].pop("probes")),
    "other parameters on one rank": ("parameters", lambda r: ranks(r)[1].update(parameters_digest="0" * 64)),
    "no snapshot after the last epoch": (
        "snapshot",
        lambda r: r["first"]["reports"][0].update(snapshots=[{"epoch": 0, "path": "train.pt"}]),
    ),
    "a second launch that failed": ("relaunch", lambda r: r["second"].update(returncodes=[1, 0])),
    "a snapshot that forgot an epoch": ("resume", lambda r: r["second"]["reports"][0].update(start_epoch=1)),
    "a snapshot that was refused": (
        "resume",
        lambda r: r["second"]["reports"][0].update(rejected_snapshots=[{"path": "p", "reason": "cut"}]),
    ),
    "resumed by another number of ranks": ("resume", lambda r: r["second"]["reports"][0].update(world_size=4)),
    "resumed by each node alone": ("resume", lambda r: r["second"]["reports"].append(r["second"]["reports"][0])),
    "a reference process that failed": ("reference", lambda r: r["reference"].update(returncodes=[7])),
    "an optimizer that does not step": ("loss", flat),
    "a curve that leaves the reference's": ("curve", lambda r: curve(r, lambda loss: loss * 1.001)),
    "a module that one rank cannot import": (
        "imports",
        lambda r: ranks(r)[2]["imports"].update(numpy="ImportError: libopenblas.so: no such file"),
    ),
    "a rank that imported nothing": ("imports", lambda r: ranks(r)[3].update(imports=[])),
    "a curve of the second launch that does": ("curve", lambda r: curve(r, lambda loss: loss * 1.001, "second")),
}


def subject_of(launched: Launched) -> Subject:
    state = State(
        "venv",
        "pt_cpu",
        "sha256:r",
        "sha256:l",
        "sha256:p",
        "cpu-x86_64",
        "3.11",
        launched["state"]["python_version"],
        "/usr/bin/python3.11",
        tuple((name, version, record) for name, version, record in launched["state"]["packages"]),
    )
    target = Target.parse(state.target)

    def unused(*_: object) -> Any:
        raise AssertionError("nothing is launched or surveyed")

    return Subject(ROOT, state, target, "sha256:d", "host", unused, unused)


def judged(
    launched: Launched, work: Path, floor: float = 0.0, floor_of: str = "", *, quick: bool = False
) -> list[Check]:
    subject = subject_of(launched)
    first, second, reference = (
        Outcome(TrainingJob(**launched[job]), **launched[name])
        for name, job in (("first", "job"), ("second", "resumed"), ("reference", "job"))
    )
    network = Network(find_fabric(subject.state.fabric), CPU)
    nodes: Any = SimpleNamespace(interface=launched["interface"], work=PurePosixPath("/verification"))
    settings = VerifySettings(epochs=launched["epochs"], quick=quick)
    assert settings.first_epochs == launched["half"]
    bench = Bench(nodes, work, settings, subject, network, launched["request"], floor, floor_of)
    return judge_launches(bench, first, second, reference, ["numpy"])


@pytest.fixture(scope="module")
def recorded() -> bytes:
    """The recorded launches with their probes, pickled: each test changes its own copy."""
    found: Launched = json.loads(RECORDED.read_text())
    probed = json.loads(PROBED.read_text())
    for rank, probes in zip(ranks(found), probed["ranks"], strict=True):
        rank |= {"probes": probes, "imports": {"numpy": ""}}
    cases = {check: cases_of(check) for check in ("allreduce", "collectives")}
    asked = make_operations(Random(38))
    results = {f"{op} {dtype}": expected_parts(asked, op) for op, dtype in asked["cases"]}
    loaded = results["DataLoader int64"]
    results["DataLoader int64"] = {**loaded, "shuffled": loaded["shuffled"][::-1]}
    found["reference"]["reports"][0]["ranks"][0]["probes"] = json.loads(json.dumps({"operations": results}))
    return pickle.dumps({**found, "request": {**probed["request"], "cases": cases, "operations": asked}})


@pytest.fixture
def launched(recorded: bytes, tmp_path: Path) -> Launched:
    with zipfile.ZipFile(tmp_path / "train.pt", "w") as archive:
        archive.writestr("train/data.pkl", bytes(1000))
    found: Launched = pickle.loads(recorded)
    return found


def test_a_quick_verification_judges_one_launch(launched: Launched, tmp_path: Path) -> None:
    launched["second"]["reports"] = launched["reference"]["reports"] = []
    checks = judged(launched, tmp_path, quick=True)
    assert {check.status for check in checks} == {"pass", "not tried"}
    untried = [check.name for check in checks if check.status == "not tried"]
    assert untried == ["bandwidth", "relaunch", "resume", "reference", "operations", "loss", "curve"]
    assert "--verify quick" in next(check.seen for check in checks if check.name == "curve")
    launched["first"]["returncodes"][0] = 1
    assert [check.name for check in judged(launched, tmp_path, quick=True) if check.status == "fail"] == ["launch"]


def test_nothing_broken_nothing_fails(launched: Launched, tmp_path: Path) -> None:
    checks = judged(launched, tmp_path)
    assert [(check.name, check.status) for check in checks] == [
        (name, "pass")
        for name in (
            "launch",
            "world",
            "versions",
            "fabric",
            "allreduce",
            "collectives",
            "bandwidth",
            "parameters",
            "sampler",
            "optimizer",
            "snapshot",
            "relaunch",
            "resume",
            "reference",
            "operations",
            "loss",
            "curve",
            "imports",
        )
    ]


@pytest.mark.parametrize("name", BREAKS)
def test_exactly_the_broken_thing_fails(name: str, launched: Launched, tmp_path: Path) -> None:
    wanted, change = BREAKS[name]
    change(launched)
    checks = judged(launched, tmp_path)
    assert [check.name for check in checks if check.status == "fail"] == [wanted], [
        (check.name, check.seen) for check in checks if check.status != "pass"
    ]
    failure = next(check for check in checks if check.status == "fail")
    assert failure.seen and failure.expected and failure.cause
    json.dumps(failure.evidence, allow_nan=False)


@pytest.mark.parametrize(("loaded", "fails"), [("2.13.0+cu130", []), ("2.13.1+cu130", ["versions"])])
def test_torch_is_the_locked_one_with_the_local_version_of_its_build(
    loaded: str, fails: list[str], launched: Launched, tmp_path: Path
) -> None:
    """PyPI's torch 2.7.1 calls itself 2.7.1+cu126."""
    launched["state"]["packages"] = [["torch", "2.13.0", ""]]
    for name in ("first", "second", "reference"):
        for rank in launched[name]["reports"][0]["ranks"]:
            rank["torch_version"] = loaded
    checks = judged(launched, tmp_path)
    assert [check.name for check in checks if check.status == "fail"] == fails


@pytest.mark.parametrize("damage", ["cut", "gone", "litter"])
def test_a_snapshot_that_is_not_whole_and_alone_fails(damage: str, launched: Launched, tmp_path: Path) -> None:
    snapshot = tmp_path / "train.pt"
    if damage == "cut":
        snapshot.write_bytes(snapshot.read_bytes()[:-20])
    elif damage == "gone":
        snapshot.unlink()
    else:
        (tmp_path / "train.pt.tmp").touch()
    checks = judged(launched, tmp_path)
    assert [check.name for check in checks if check.status == "fail"] == ["snapshot"]


def test_traffic_on_another_interface_fails(launched: Launched, tmp_path: Path) -> None:
    sockets = json.loads(json.dumps(ranks(launched)).replace("127.0.0.1:", "192.0.2.2:"))
    for rank, moved in zip(ranks(launched), sockets, strict=True):
        rank["sockets"] = moved["sockets"]
    checks = judged(launched, tmp_path)
    assert [check.name for check in checks if check.status == "fail"] == ["fabric"]


def test_a_rank_that_was_told_another_interface_fails(launched: Launched, tmp_path: Path) -> None:
    ranks(launched)[1]["gloo_ifname"] = "eth0"
    checks = judged(launched, tmp_path)
    (failure,) = (check for check in checks if check.status == "fail")
    assert failure.name == "fabric" and "rank 1: GLOO_SOCKET_IFNAME is eth0" in failure.seen


def test_a_floor_of_the_site_that_is_not_reached_fails(launched: Launched, tmp_path: Path) -> None:
    checks = judged(launched, tmp_path, floor=100000.0, floor_of="the site")
    (failure,) = (check for check in checks if check.status == "fail")
    assert failure.name == "bandwidth"
    assert failure.expected == "at least 100000 GB/s (the site's busbw_floor)"


def test_a_recipe_s_floor_goes_over_the_site_s() -> None:
    site = FabricTable(busbw_floor={"any": 3.0})
    subject = subject_of({"state": {"python_version": "3.11.7", "packages": []}})
    assert _floor(subject, VerifySettings(), site) == (3.0, "the site")
    assert _floor(subject, VerifySettings(busbw_floor=1.5), site) == (1.5, "the recipe")


@pytest.mark.parametrize(("name", "check"), [("first", "launch"), ("second", "relaunch"), ("reference", "reference")])
def test_a_report_that_is_not_json_fails_its_launch(name: str, check: str, launched: Launched, tmp_path: Path) -> None:
    launched[name]["reports"] = [{"unreadable": "train-report0.json"}]
    checks = judged(launched, tmp_path)
    (failure,) = (one for one in checks if one.status == "fail")
    assert failure.name == check and "train-report0.json is not JSON" in failure.seen
    assert "blocked" in {one.status for one in checks}


@pytest.mark.parametrize("value", [None, 7, "x", [], [[]], {}, {"entered": "x"}])
@pytest.mark.parametrize("name", ["allreduce", "collectives", "barrier", "sampler", "optimizer"])
def test_a_malformed_probe_fails_its_check(name: str, value: object, launched: Launched, tmp_path: Path) -> None:
    for rank in ranks(launched):
        rank["probes"][name] = value
    checks = judged(launched, tmp_path)
    check = "collectives" if name == "barrier" else name
    assert [one.name for one in checks if one.status == "fail"] == [check]


@pytest.mark.parametrize("value", [None, 7, [], [[]], {}, {"output": None}, {"output": "x"}])
@pytest.mark.parametrize("name", ["", "matmul float32", "DataLoader int64", "state_dict float32"])
def test_a_malformed_operation_fails_its_check(name: str, value: Any, launched: Launched, tmp_path: Path) -> None:
    if name:
        operations(launched)[name] = value
    else:
        launched["reference"]["reports"][0]["ranks"][0]["probes"] = value
    checks = judged(launched, tmp_path)
    assert [one.name for one in checks if one.status == "fail"] == ["operations"]


@pytest.mark.parametrize(
    ("name", "result", "torch", "status"),
    [
        ("linear float16", "error: RuntimeError: not implemented for 'Half'", "2.1.2+cpu", "pass"),
        ("linear float16", "error: RuntimeError: not implemented for 'Half'", "2.13.0+cpu", "fail"),
        ("linear bfloat16", "error: RuntimeError: not implemented", "2.1.2+cpu", "fail"),
        ("linear float16", "host: no semaphores", "2.1.2+cpu", "fail"),
        ("DataLoader int64", "host: no semaphores for worker processes", "2.13.0+cpu", "pass"),
        ("DataLoader int64", "error: RuntimeError: DataLoader timed out", "2.13.0+cpu", "fail"),
    ],
)
def test_an_operation_that_was_not_probed_is_named(
    name: str, result: str, torch: str, status: str, launched: Launched, tmp_path: Path
) -> None:
    operations(launched)[name] = result
    launched["reference"]["reports"][0]["ranks"][0]["torch_version"] = torch
    check = next(one for one in judged(launched, tmp_path) if one.name == "operations")
    assert check.status == status and result in check.seen and name in check.seen
    assert name in check.evidence["unsupported"] or status == "fail"
