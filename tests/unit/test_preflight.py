"""The preflight by itself: what travels, what nodes tell, how it is judged, and several processes on loopback."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_train.errors import TrainError
from ddp_train.preflight.__main__ import as_json, main
from ddp_train.preflight.facts import collect, hosts_lines, packages, source_towards, state_digest
from ddp_train.preflight.host import at_once, driver, missing_channel
from ddp_train.preflight.judge import judge
from ddp_train.preflight.model import FAIL, UNKNOWN, WARN, Facts, Finding, Node, Requirements, facts_of
from ddp_train.preflight.place import ALL_PAIRS, NodeInfo, find_node_info
from ddp_train.preflight.rules_network import any_interface
from ddp_train.preflight.speed import figures, slow
from ddp_train.preflight.wire import WireError, decode, encode, plain
from envbuild.base.errors import UsageError
from envbuild.contract.state import BuiltLayer, State
from envbuild.jobs.submit import find_allocation
from examples import examples

REPOSITORY = Path(__file__).resolve().parents[2]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=4,
)
few = examples(50)
CONTRACT = {
    "ENVBUILD_NODE": "0",
    "ENVBUILD_NODES": "1",
    "ENVBUILD_HOSTS": "n1",
    "ENVBUILD_ADDRESSES": "127.0.0.1",
    "ENVBUILD_ADDRESS": "127.0.0.1",
    "ENVBUILD_INTERFACE": "lo",
    "ENVBUILD_PORT": "1",
    "ENVBUILD_RUN": "/tmp",
    "ENVBUILD_RUN_ID": "r-1-0",
}


@few
@given(st.dictionaries(st.text().filter(lambda name: name != "preflight"), JSON), st.text())
def test_every_message_arrives_as_one_line_and_unchanged(message: dict[str, Any], run: str) -> None:
    line = encode(message, run)
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    assert decode(line, run) == {**message, "preflight": run}
    with pytest.raises(WireError, match="another run"):
        decode(line, run + "x")


@few
@given(st.binary() | JSON.map(lambda value: json.dumps(value).encode()) | st.just(b"[" * 100_000))
def test_whatever_a_stranger_sends_is_refused(line: bytes) -> None:
    with pytest.raises(WireError):
        decode(line, "run")


@few
@given(st.dictionaries(st.sampled_from([*vars(Facts())]), JSON) | JSON)
def test_facts_that_arrive_are_facts_or_refused(message: Any) -> None:
    try:
        facts = facts_of(message)
    except ValueError:
        return
    judge([good(0), replace(good(1), facts=facts)], Requirements(digest="sha256:x", gpus=1, shm=1))


def test_facts_survive_the_way() -> None:
    told = node(0).facts
    assert told is not None and facts_of(json.loads(json.dumps(vars(told)))) == told


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"ENVBUILD_NODE": None}, "ENVBUILD_NODE is not set"),
        ({"ENVBUILD_NODE": "1"}, "ENVBUILD_NODE is '1', not a number up to 0"),
        ({"ENVBUILD_NODE": "-1"}, "not a number"),
        ({"ENVBUILD_NODE": "²"}, "not a number"),
        ({"ENVBUILD_PORT": "65536"}, "ENVBUILD_PORT"),
        ({"ENVBUILD_RUN": ""}, "ENVBUILD_RUN is not set"),
        ({"ENVBUILD_NODES": "2"}, "1 names in ENVBUILD_HOSTS"),
        ({"ENVBUILD_ADDRESS": "10.0.0.9"}, "'10.0.0.9', and node 0"),
    ],
)
def test_a_broken_contract_is_named(
    change: dict[str, str | None], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    environ = {name: value for name, value in {**CONTRACT, **change}.items() if value is not None}
    with pytest.raises(TrainError, match="ENVBUILD_"):
        find_node_info(environ)
    assert main([], environ) == 2
    error = capsys.readouterr().err
    assert word in error and error.count("\n") == 1


def test_wrong_options_are_one_line_and_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--wait", "0"], CONTRACT) == main(["--gpus", "x"], CONTRACT) == 2
    assert capsys.readouterr().err.count("\n") == 2


@pytest.mark.parametrize("count", [1, 2, 5, ALL_PAIRS, ALL_PAIRS + 1, 100, 1000])
def test_every_node_is_tried_by_others_and_by_no_more_than_some(count: int) -> None:
    names = tuple(f"n{number}" for number in range(count))
    place = NodeInfo(0, names, names, "", 1, "/", "r")
    tried: dict[int, int] = dict.fromkeys(range(count), 0)
    for number in range(count):
        partners = place.partners(number)
        assert number not in partners and len(set(partners)) == len(partners) <= ALL_PAIRS + 1
        assert count == 1 or (number + 1) % count in partners
        for partner in partners:
            tried[partner] += 1
    assert min(tried.values()) >= min(count - 1, ALL_PAIRS - 3)


LAYERS = (BuiltLayer("nccl", "2.29", "sha256:9"), BuiltLayer("libfabric", "2.1", "", "/opt/fi"))


@pytest.mark.parametrize("layers", [(), LAYERS])
def test_the_digest_is_the_one_that_envbuild_computes(layers: tuple[BuiltLayer, ...], tmp_path: Path) -> None:
    state = State(
        "venv",
        "r",
        "d",
        "l",
        "p",
        "cpu-x86_64",
        "3.11",
        "3.11.7",
        "i",
        (("torch", "2.13.0+cpu", "0" * 64), ("ünïcode", "1", "2")),
        layers=layers,
    )
    assert state_digest(json.loads(state.render())) == state.digest
    assert state_digest({}) == state_digest({"packages": 1}) == ""


def test_a_package_whose_metadata_are_in_another_encoding_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (("odd", "Author: Jos\u00e9".encode("latin-1")), ("plain", b"Author: A")):
        (tmp_path / f"{name}-1.dist-info").mkdir()
        (tmp_path / f"{name}-1.dist-info/METADATA").write_bytes(b"Name: %s\nVersion: 1\n%s\n" % (name.encode(), text))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert packages(tmp_path) == {"plain": "1"}


def test_lines_of_hosts_packages_and_drivers_are_read(tmp_path: Path) -> None:
    text = "127.0.0.1 localhost # n1\n\n127.0.1.1\tn1.example n1\n10.0.0.1 n1\n"
    assert hosts_lines(text, ["n1", "n9"]) == {"n1": "line 3: 127.0.1.1 n1.example n1"}
    (tmp_path / "conda-meta").mkdir()
    (tmp_path / "conda-meta/nccl-2.27.3.1-h03a54cd_0.json").touch()
    (tmp_path / "conda-meta/history.json").touch()
    found = packages(tmp_path)
    assert found["conda:nccl"] == "2.27.3.1" and "hypothesis" in found
    line = "NVRM version: NVIDIA UNIX {}  535.104.05  Release Build\nGCC version:  gcc 12.2.0\n"
    for kind in ("x86_64 Kernel Module", "Open Kernel Module for aarch64"):
        assert driver(line.format(kind)) == "535.104.05"
    assert driver("") == ""
    assert source_towards("127.0.0.9") == "127.0.0.1"
    assert plain("::ffff:10.0.0.1") == "10.0.0.1" and plain("fe80::1%eth0") == "fe80::1"


@pytest.mark.parametrize(
    ("cluster", "channel", "says"),
    [
        ("9c6f5af3-53bf-49b5-a436-b66766c413c3", "", "{} has no channel"),
        ("9c6f5af3-53bf-49b5-a436-b66766c413c3", "locked", "{}/channel3 cannot be read"),
        ("9c6f5af3-53bf-49b5-a436-b66766c413c3", "open", ""),
        ("00000000-0000-0000-0000-000000000000", "", ""),
        ("N/A", "", ""),
    ],
)
def test_a_node_whose_gpus_have_a_cluster_needs_a_channel_of_imex(
    cluster: str, channel: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = f"    Fabric\n        State                             : Completed\n        ClusterUUID : {cluster}"
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho '{shown}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    folder = tmp_path / "channels"
    folder.mkdir()
    if channel == "open":
        (folder / "channel3").touch()
    elif channel:
        (folder / "channel3").symlink_to("gone")  # root may read all that exists
    assert missing_channel(str(folder)) == says.format(folder)


@pytest.mark.parametrize(("enabled", "looked"), [("", True), ("2", True), ("0", False)])
def test_no_channel_is_missed_where_nccl_goes_without(
    enabled: str, looked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddp_train.preflight.host.missing_channel", lambda folder: f"{folder} has no channel")
    env = {"ENVBUILD_IMEX": "/dev/x", "NCCL_MNNVL_ENABLE": enabled, "CUDA_VISIBLE_DEVICES": ""}
    assert collect(env, "127.0.0.1", "lo", (), (), "", None).imex == ("/dev/x has no channel" if looked else "")
    assert collect({}, "127.0.0.1", "lo", (), (), "", None).imex == ""


def test_a_look_up_that_hangs_is_left_alone() -> None:
    with socket.socket() as never:
        never.bind(("127.0.0.1", 0))
        never.listen()
        jobs = {"name a": never.accept, "name b": lambda: 7}
        assert at_once(jobs, 5, {"name": 0.2}) == {"name b": 7}


@pytest.mark.parametrize(
    ("variable", "value", "some"),
    [
        ("GLOO_SOCKET_IFNAME", "eth0", True),
        ("GLOO_SOCKET_IFNAME", "eth", False),
        ("GLOO_SOCKET_IFNAME", "eth0,ib0", False),
        ("NCCL_SOCKET_IFNAME", "eth,ib", True),
        ("NCCL_SOCKET_IFNAME", "=eth", False),
        ("NCCL_SOCKET_IFNAME", "=eth0", True),
        ("NCCL_SOCKET_IFNAME", "^eth", True),
        ("NCCL_SOCKET_IFNAME", "^eth,lo", False),
        ("NCCL_SOCKET_IFNAME", "^=eth", True),
    ],
)
def test_an_interface_is_chosen_as_the_libraries_choose(variable: str, value: str, some: bool) -> None:
    assert any_interface(variable, value, {"lo": [], "eth0": []}) is some


def node(number: int, **facts: Any) -> Node:
    """A node that is well but for `facts`."""
    address = f"10.0.0.{number + 1}"
    told = Facts(
        hostname=f"n{number}",
        source=address,
        arch="x86_64",
        python="3.11.7",
        interfaces={"lo": ["127.0.0.1"], "eth0": [address]},
        mtu=1500,
        packages={"torch": "2.13.0"},
        artifact="venv",
        digest="sha256:a",
        changed="",
        shm=1 << 34,
        run_free=1 << 40,
        tmp_free=1 << 40,
        cores=8,
        cores_allowed=8,
        names={"n0": ["10.0.0.1"], f"n{number}": [address]},
    )
    return Node(number, f"n{number}", address, "eth0", replace(told, **facts), finished=True, seen=address)


def good(number: int) -> Node:
    return node(number)


def nodes_with(change: Mapping[str, Any], **facts: Any) -> list[Node]:
    """Three nodes, the last of which is not well."""
    return [good(0), good(1), replace(node(2, **facts), **change)]


def test_a_good_job_has_no_findings() -> None:
    wanted = Requirements("sha256:a", 0, "", "x86_64", 1 << 30, 1 << 30)
    assert judge([good(0), good(1), good(2)], wanted) == []
    # A site may name its nodes by one network and train over another.
    two = {"interfaces": {"eth1": ["10.1.0.3"], "eth0": ["10.0.0.3"]}}
    named = {"names": {"n2": ["10.1.0.3"]}}
    assert judge(nodes_with({}, **two, **named), wanted) == []


@pytest.mark.parametrize(
    ("change", "facts", "status", "check", "words"),
    [
        ({"facts": None}, {}, FAIL, "answers", "does not answer"),
        ({"finished": False, "error": "it broke"}, {}, FAIL, "answers", "fell silent: it broke"),
        ({"doubled": True}, {}, FAIL, "answers", "several processes"),
        ({"address": "127.0.1.1"}, {"interfaces": {}}, FAIL, "address", "loopback"),
        ({"address": "::1"}, {"interfaces": {}}, FAIL, "address", "loopback"),
        ({"address": "10.0.0.9", "seen": ""}, {}, FAIL, "address", "on none of its interfaces"),
        ({"interface": "eth1"}, {}, FAIL, "interface", "is on eth0, not on eth1"),
        ({}, {"variables": {"GLOO_SOCKET_IFNAME": "ib0"}}, FAIL, "interface", "ib0"),
        ({"seen": "192.168.0.1"}, {}, WARN, "route", "NAT"),
        ({"pairs": {0: "ok", 1: "timed out"}}, {}, FAIL, "pairs", "from n2 (10.0.0.3): timed out"),
        ({"shared": "does not see it"}, {}, FAIL, "run folder", "does not see it"),
        ({}, {"arch": "aarch64"}, FAIL, "architecture", "aarch64 on n2"),
        ({}, {"digest": "sha256:b"}, FAIL, "artifact", "runs sha256:b"),
        ({}, {"digest": "", "artifact": ""}, FAIL, "artifact", "what envbuild did not make"),
        ({}, {"changed": "bin/x and 2 more files"}, FAIL, "files", "bin/x and 2 more files changed since"),
        ({}, {"changed": UNKNOWN}, WARN, "files", "could not be compared"),
        ({}, {"python": "3.11.9"}, FAIL, "python", "3.11.7 on n0, n1; 3.11.9 on n2"),
        ({}, {"packages": {"torch": "2.12"}}, FAIL, "torch", "2.13.0 on n0, n1; 2.12 on n2"),
        ({}, {"packages": {"torch": "2.13.0", "nvidia-nccl-cu12": "2"}}, FAIL, "nccl", "2 on n2"),
        ({}, {"packages": {"torch": "2.13.0", "six": "1"}}, WARN, "packages", "none on n0, n1"),
        ({}, {"driver": "550.1"}, WARN, "driver", "550.1 on n2"),
        ({}, {"mtu": 9000}, WARN, "mtu", "9000 on n2"),
        ({}, {"shm": 1 << 20}, FAIL, "shm", "1.0 MiB, wanted 1.0 GiB"),
        ({}, {"run_free": 1 << 20}, FAIL, "space", "1.0 MiB free"),
        ({}, {"tmp_free": 0}, WARN, "space", "temporary"),
        ({}, {"cores_allowed": 1}, WARN, "cores", "1 of 8 cores"),
        ({}, {"imex": "/dev/x has no channel"}, WARN, "imex", "NVLink between the nodes: /dev/x has no channel"),
        ({"ahead_s": -90.0, "error_s": 0.1}, {}, FAIL, "clock", "90 s behind"),
        ({"ahead_s": 3.0, "error_s": 0.1}, {}, WARN, "clock", "3 s ahead of"),
        ({}, {"names": {"n0": []}}, WARN, "names", "n0 has no address"),
        ({}, {"names": {"n0": None}}, WARN, "names", "not looked up in time"),
        ({}, {"names": {"n2": ["127.0.1.1"]}}, WARN, "names", "n2 is 127.0.1.1"),
        ({}, {"names": {"n0": ["10.9.9.9"]}}, WARN, "names", "n0 is 10.9.9.9"),
        ({}, {"reverse": {"10.0.0.1": "n7.example"}}, WARN, "names", "called n7.example"),
    ],
)
def test_each_fault_is_found_alone_with_its_node_and_a_remedy(
    change: dict[str, Any], facts: dict[str, Any], status: str, check: str, words: str
) -> None:
    wanted = Requirements("sha256:a", 0, "", "", 1 << 30, 1 << 30, manifest="sha256:m")
    nodes = nodes_with(change, **facts)
    found = judge(nodes, wanted)
    hit = [one for one in found if words in one.fault]
    assert [(one.status, one.check) for one in hit] == [(status, check)], found
    assert hit[0].remedy and "  " not in hit[0].fault + hit[0].remedy
    assert {one.check for one in found} == {check}, found
    blamed = (2,) if check != "pairs" else (1,)
    assert hit[0].nodes == blamed
    assert as_json(nodes, found, 1.0)["passed"] is (status == WARN)


@pytest.mark.parametrize(
    ("wanted", "facts", "check"),
    [
        (Requirements(gpus=2), {"gpus": 1}, "gpus"),
        (Requirements(provider="efa"), {"provider": "no device"}, "fabric"),
        (Requirements(provider="efa", pins=True), {"memlock": 65536}, "memlock"),
        (Requirements(arch="aarch64"), {}, "architecture"),
    ],
)
def test_what_a_job_wants_must_be_there(wanted: Requirements, facts: dict[str, Any], check: str) -> None:
    findings = judge([node(0, **facts), node(1, **facts)], wanted)
    assert [(one.status, one.check, one.nodes) for one in findings] == [(FAIL, check, (0, 1))]


@pytest.mark.parametrize(
    ("wanted", "has", "says"),
    [
        (64_000_000, 64_000_000, None),  # 64M: what was asked for is there, though less than 64 MiB
        (64_000_000, 63_995_904, None),  # a page less: a file system has whole ones
        (64 << 20, (64 << 20) - (1 << 20), "has 63.0 MiB, wanted 64.0 MiB"),
        ((1 << 30) + (1 << 20), 1 << 30, "has 1.000 GiB, wanted 1.001 GiB"),
        (0, 63 << 20, "has 63.0 MiB"),
        (0, 64 << 20, None),
    ],
)
def test_shm_is_less_than_asked_for_where_the_numbers_shown_are(wanted: int, has: int, says: str | None) -> None:
    found = judge([node(0, shm=has), node(1, shm=has)], Requirements(shm=wanted))
    assert [one.fault for one in found] == ([f"/dev/shm {says}"] if says else [])
    assert [one.status for one in found] == ([FAIL if wanted else WARN] if says else [])


def test_an_image_is_not_held_to_the_digest_of_its_file() -> None:
    nodes = [node(0, artifact="docker"), node(1, artifact="docker")]
    assert judge(nodes, Requirements(digest="sha256:of-the-file")) == []


def test_of_two_nodes_that_differ_none_is_blamed() -> None:
    findings = judge([node(0), node(1, python="3.12.1")], Requirements())
    assert findings == [Finding(FAIL, "python", (), "Python differs: 3.11.7 on n0; 3.12.1 on n1", findings[0].remedy)]


def run_on_loopback(folder: Path, nodes: range, count: int, *options: str) -> tuple[list[int], list[str], str, int]:
    """Exit codes and error output of processes that are nodes at 127.0.0.1 and following, and what node 0 printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for number in nodes:
        env = {
            **os.environ,
            **CONTRACT,
            "PYTHONPATH": str(REPOSITORY),
            "ENVBUILD_NODE": str(number),
            "ENVBUILD_NODES": str(count),
            "ENVBUILD_HOSTS": " ".join(["localhost"] * count),
            "ENVBUILD_ADDRESSES": " ".join(f"127.0.0.{n + 1}" for n in range(count)),
            "ENVBUILD_ADDRESS": f"127.0.0.{number + 1}",
            "ENVBUILD_PORT": str(port),
            "ENVBUILD_RUN": str(folder),
        }
        line = [sys.executable, "-m", "ddp_train.preflight", "--json", *options]
        started.append(subprocess.Popen(line, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    ends = [process.communicate(timeout=40) for process in started]
    codes = [process.returncode for process in started]
    return codes, [end[1] for end in ends], ends[0][0], port


FAST = {"compute": 100.0, "memory": 10.0, "gpu 0": 700.0, "gpu 1": 690.0}


def test_a_slow_node_is_told_apart_from_its_partners() -> None:
    """Node 2 sends slowly, so that nodes 3 and 0 get little from it and enough from others; node 1 computes slowly."""
    nodes = [dict(FAST) for _ in range(4)]
    nodes[1]["compute"], nodes[3]["gpu 1"] = 40.0, 500.0
    sent = [{(number + step) % 4: 1.0 if number == 2 else 9.0 for step in (1, 2)} for number in range(4)]
    found = slow(figures(nodes, sent))
    assert [(number, what.partition(":")[0]) for number, what in found] == [(1, "compute"), (3, "gpu 1"), (2, "send")]
    assert found[0][1] == "compute: 40 products/s, the job's nodes 100"


def test_of_two_nodes_the_slower_one_is_named_and_equal_ones_never() -> None:
    assert slow([{"compute": 100.0}, {"compute": 30.0}]) == [(1, "compute: 30 products/s, the job's nodes 100")]
    assert slow([{"compute": 100.0}, {"compute": 90.0}]) == []
    assert slow([{}, {"compute": 90.0}]) == [] and slow([]) == []


@given(st.lists(st.dictionaries(st.sampled_from(sorted(FAST)), st.floats(0, 1e9)), max_size=9))
def test_the_fastest_node_is_never_slow(nodes: list[dict[str, float]]) -> None:
    for number, what in slow(nodes):
        name = what.partition(":")[0]
        assert nodes[number][name] < max(value for one in nodes for value in one.values())


@pytest.mark.parametrize("fast", [False, True])
def test_a_slow_node_fails_a_job_that_leaves_it_out(fast: bool) -> None:
    nodes = [node(number, speeds=FAST) for number in range(3)]
    nodes[1] = replace(nodes[1], facts=replace(nodes[1].known, speeds={**FAST, "memory": 1.0}))
    found = judge(nodes, Requirements(fast=fast))
    assert [(one.status, one.check, one.nodes) for one in found] == [("fail" if fast else "warn", "speed", (1,))]
    assert "is slow: memory: 1 GB/s" in found[0].fault


def test_processes_on_loopback_meet_and_are_refused_for_being_there(tmp_path: Path) -> None:
    codes, words, told, port = run_on_loopback(tmp_path, range(3), 3)
    assert codes == [1, 1, 1]
    verdict = json.loads(told)
    assert {one["check"] for one in verdict["findings"] if one["status"] == FAIL} == {"address"}
    assert [one["pairs"] for one in verdict["nodes"]] == [
        {"1": "ok", "2": "ok"},
        {"0": "ok", "2": "ok"},
        {"0": "ok", "1": "ok"},
    ]
    assert words[1] == words[2] == "" and "loopback" in words[0]
    assert not list(tmp_path.iterdir())
    # No SO_REUSEADDR: not even a closed connection may linger at the rendezvous' port.
    with socket.socket() as again:
        again.bind(("127.0.0.1", port))


def test_a_node_without_a_head_says_so_and_the_head_is_not_needed_to_see_it(tmp_path: Path) -> None:
    codes, words, _, port = run_on_loopback(tmp_path, range(1, 2), 2, "--wait", "1")
    assert codes == [1]
    assert f"cannot reach the head localhost at 127.0.0.1:{port}: refused" in words[0]
    assert "    fix: see what the head prints" in words[0]


def test_it_runs_without_torch_and_imports_none(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None; import ddp_train.preflight.__main__ as p;"
        " code = p.main([]); print(sorted(m for m in sys.modules if m.startswith('torch')), code)"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    env = {**os.environ, **CONTRACT, "ENVBUILD_PORT": port, "ENVBUILD_RUN": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.stdout == "['torch'] 1\n", done.stderr


def test_sources_are_python_3_9_and_short() -> None:
    import ast

    for source in (REPOSITORY / "ddp_train/preflight").glob("*.py"):
        ast.parse(source.read_text(), feature_version=(3, 9))
        assert len(source.read_text().splitlines()) < 300, source


def test_an_allocation_is_found_where_there_is_one(tmp_path: Path) -> None:
    slurm = find_allocation([], {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3"})
    assert (slurm.scheduler, slurm.nodes, slurm.job, slurm.launcher) == ("slurm", 3, "7", None)
    (tmp_path / "nodes").write_text("n1\nn1\nn2\n")
    pbs = find_allocation([], {"PBS_JOBID": "9.srv", "PBS_NODEFILE": str(tmp_path / "nodes")})
    assert (pbs.scheduler, pbs.nodes, pbs.job) == ("pbs", 2, "9.srv")
    by_ssh = find_allocation(["n1", "n2"], {"SLURM_JOB_ID": "7"})
    assert (by_ssh.scheduler, by_ssh.nodes, by_ssh.launcher) == ("pbs", 2, "ssh")


@pytest.mark.parametrize(
    ("hosts", "env", "word"),
    [
        ([], {}, "not inside of an allocation"),
        ([], {"SLURM_JOB_ID": "7"}, "SLURM_JOB_NUM_NODES"),
        ([], {"PBS_JOBID": "9"}, "PBS_NODEFILE=''"),
        (["n1", "n1"], {}, "n1 is given twice"),
        (["-oProxyCommand=x"], {}, "is not the name of a host"),
        (["a b"], {}, "is not the name of a host"),
    ],
)
def test_what_is_no_allocation_is_refused(hosts: list[str], env: dict[str, str], word: str) -> None:
    with pytest.raises(UsageError, match=word) as refused:
        find_allocation(hosts, env)
    assert refused.value.hint
