"""The preflight between real hosts: every fault is provoked in a cluster of network namespaces, and named."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from lab.slurm import Cluster, missing, slurm_cluster

from envbuild.contract.manifest import FILE, write_manifest
from envbuild.contract.state import State
from envbuild.jobs.model import JobArtifact, JobPlan
from envbuild.jobs.schedulers import render
from envbuild.site.jobs import SchedulerTable
from envbuild.site.settings import Site

REPOSITORY = Path(__file__).resolve().parents[2]
_ports = itertools.count(21000)
FAKETIME = Path("/usr/lib") / f"{os.uname().machine}-linux-gnu/faketime/libfaketime.so.1"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("cluster")
    with slurm_cluster(folder, ("n1", "n2", "n3", "n4"), second_network=True) as running:
        yield running


@dataclass(frozen=True)
class Told:
    """What a preflight told: exit codes and error output by node, the head's object, the port it used."""

    codes: dict[str, int]
    words: dict[str, str]
    verdict: dict[str, Any]
    port: int

    def named(self, check: str, status: str = "fail") -> dict[str, list[str]]:
        """What was found by one check: what → nodes."""
        return {
            one["what"]: one["nodes"]
            for one in self.verdict["findings"]
            if (one["check"], one["status"]) == (check, status)
        }

    @property
    def failed(self) -> set[str]:
        return {one["check"] for one in self.verdict["findings"] if one["status"] == "fail"}


def preflight(cluster: Cluster, *options: str, **more: Any) -> Told:
    """Start it on `nodes` of the three as a job's script does, and wait for its end: see `started`."""
    return started(cluster, *options, **more)()


def started(
    cluster: Cluster,
    *options: str,
    nodes: tuple[str, ...] = ("n1", "n2", "n3"),
    change: Mapping[str, Mapping[str, str]] | None = None,
    python: Mapping[str, str] | None = None,
    addresses: Mapping[str, str] | None = None,
    port: int | None = None,
    within: Mapping[str, str] | None = None,
) -> Callable[[], Told]:
    """Start it, and return a function that waits for its end. `change` goes over the variables of a node, and
    `within` are shell lines that go before the program of a node."""
    port = port or next(_ports)
    at = {node: (addresses or {}).get(node, cluster.address(node)) for node in cluster.nodes[:3]}
    folder = cluster.shared / f"run-{port}"
    folder.mkdir()
    processes = {}
    for node in nodes:
        env = {
            "ENVBUILD_NODE": str(cluster.nodes.index(node)),
            "ENVBUILD_NODES": "3",
            "ENVBUILD_HOSTS": "n1 n2 n3",
            "ENVBUILD_ADDRESSES": " ".join(at.values()),
            "ENVBUILD_ADDRESS": at[node],
            "ENVBUILD_INTERFACE": "eth0",
            "ENVBUILD_PORT": str(port),
            "ENVBUILD_RUN": str(folder),
            "ENVBUILD_RUN_ID": f"train-{port}-0",
            "PYTHONPATH": str(REPOSITORY),
            **(change or {}).get(node, {}),
        }
        interpreter = (python or {}).get(node, sys.executable)
        line = [interpreter, "-m", "ddp_train.preflight", "--json", *options]
        if node in (within or {}):
            line = ["sh", "-c", f'{(within or {})[node]}; exec "$@"', "sh", *line]
        processes[node] = cluster.popen(line, on=node, env=env)

    def told() -> Told:
        ends = {node: process.communicate(timeout=40) for node, process in processes.items()}
        verdict = ends["n1"][0] if "n1" in ends else ""
        assert not list(folder.iterdir()), "something is left in the run's folder"
        return Told(
            {node: process.returncode for node, process in processes.items()},
            {node: end[1] for node, end in ends.items()},
            json.loads(verdict) if verdict else {},
            port,
        )

    return told


def environment(folder: Path, torch: str) -> str:
    """A virtual environment with envbuild's record and a `torch` that is installed as far as metadata go."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    packages = (("torch", torch, "0" * 64),)
    state = State("venv", "r", "sha256:1", "sha256:2", "sha256:3", "cpu-x86_64", "3.11", "3.11.7", "python3", packages)
    (folder / "envbuild.json").write_text(state.render())
    site = next(folder.glob("lib/python3*/site-packages"))
    (site / f"torch-{torch}.dist-info").mkdir()
    (site / f"torch-{torch}.dist-info/METADATA").write_text(f"Name: torch\nVersion: {torch}\n")
    shutil.copytree(REPOSITORY / "ddp_train", site / "ddp_train")
    return state.digest


def test_a_good_cluster_passes_in_seconds_and_its_port_is_free_at_once(cluster: Cluster) -> None:
    told = preflight(cluster)
    assert told.codes == {"n1": 0, "n2": 0, "n3": 0}, told.words
    assert told.verdict["findings"] == [] and told.verdict["seconds"] < 10
    assert told.words["n2"] == told.words["n3"] == ""
    assert "preflight: ok: 3 of 3 nodes" in told.words["n1"]
    seen = {node["host"]: node for node in told.verdict["nodes"]}
    assert seen["n2"]["pairs"] == {"0": "ok", "2": "ok"}
    assert seen["n3"]["names"]["n1"] == ["10.89.7.11"] and seen["n3"]["interface"] == "eth0"
    # Without SO_REUSEADDR a socket that merely waits for late packets would be in the way, too.
    bind = f"import socket; socket.socket().bind(('10.89.7.11', {told.port}))"
    done = cluster.run([sys.executable, "-c", bind], on="n1")
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def waiting(cluster: Cluster) -> Iterator[dict[str, Callable[[], Told]]]:
    """Preflights that wait for a node until the end of --wait, side by side: nothing else in them takes time."""
    dropped, taken = next(_ports), next(_ports)
    cluster.block("n1", port=dropped, source="n2")
    cluster.block("n1", port=dropped, source="n3", reject=True)
    serve = [sys.executable, "-m", "http.server", str(taken)]
    server = cluster.popen(serve, on="n1", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        listens = ["bash", "-c", f"ss -ltn | grep -q :{taken}"]
        cluster.until(lambda: cluster.run(listens, on="n1").returncode == 0)
        two = ("n1", "n2")
        yield {
            "not started": started(cluster, "--wait", "5", nodes=two),
            "firewall": started(cluster, "--wait", "5", port=dropped),
            "port in use": started(cluster, "--wait", "5", port=taken, nodes=two),
        }
    finally:
        os.killpg(server.pid, 9)
        server.wait()


def test_a_node_that_was_not_started_is_named(waiting: dict[str, Callable[[], Told]]) -> None:
    told = waiting["not started"]()
    assert told.codes == {"n1": 1, "n2": 1} and told.failed == {"answers"}
    assert list(told.named("answers").values()) == [["n3"]]
    assert "n3 (10.89.7.13): does not answer" in told.words["n1"]
    assert "--ntasks-per-node=1" in told.words["n1"]


def test_a_firewall_before_the_head_is_told_apart_from_nobody_listening(
    waiting: dict[str, Callable[[], Told]],
) -> None:
    told = waiting["firewall"]()
    assert told.codes == {"n1": 1, "n2": 1, "n3": 1}
    assert list(told.named("answers").values()) == [["n2", "n3"]]
    where = f"cannot reach the head n1 at 10.89.7.11:{told.port}"
    assert f"{where}: timed out" in told.words["n2"] and "dropped" in told.words["n2"]
    assert f"{where}: refused" in told.words["n3"] and "a firewall rejects" in told.words["n3"]


def test_a_port_in_use_is_named_and_so_is_what_has_it(waiting: dict[str, Callable[[], Told]]) -> None:
    told = waiting["port in use"]()
    assert told.codes == {"n1": 1, "n2": 1}
    assert f"cannot listen at 10.89.7.11:{told.port}" in told.words["n1"]
    assert "in use" in told.words["n1"]
    assert "what listens there is not this job's preflight" in told.words["n2"]


def test_names_that_lead_astray_are_warnings_with_their_line(cluster: Cluster) -> None:
    """Debian's default, 127.0.1.1 for the own name, and an unknown name: jobs that go by addresses survive both."""
    cluster.set_hosts("n2", f"127.0.0.1 localhost\n127.0.1.1 n2\n{cluster.hosts('n2')}")
    good = cluster.hosts("n3")
    cluster.set_hosts("n3", "".join(x for x in good.splitlines(True) if "n1" not in x.split()))
    try:
        told = preflight(cluster)
    finally:
        cluster.set_hosts("n2")
        cluster.set_hosts("n3")
    assert set(told.codes.values()) == {0}, told.words
    found = told.named("names", "warn")
    own = next(what for what in found if "127.0.1.1" in what)
    assert found[own] == ["n2"] and "(/etc/hosts, line 2: 127.0.1.1 n2)" in own
    assert found["n1 has no address"] == ["n3"]


def test_a_firewall_between_other_nodes_and_packets_that_are_too_large_are_found(cluster: Cluster) -> None:
    cluster.block("n3", source="n2")
    # Stands for a link on the way with a smaller MTU that says nothing.
    rule = f"iptables -w -A INPUT -i eth0 -p tcp -s {cluster.address('n1')} -m length --length 1200:65535 -j DROP"
    cluster.run(rule.split(), on="n3", check=True)
    try:
        told = preflight(cluster)
    finally:
        cluster.unblock("n3")
    assert told.failed == {"pairs"} and set(told.codes.values()) == {1}
    found = told.named("pairs")
    # What n3 sends gets no answer either: the firewall drops n2's half of it.
    assert {what: nodes for what, nodes in found.items() if "timed out" in what} == {
        "cannot be reached from n2 (10.89.7.12): timed out": ["n3"],
        "cannot be reached from n3 (10.89.7.13): timed out": ["n2"],
    }
    stalled = {what: nodes for what, nodes in found.items() if "timed out" not in what}
    assert all("stalled" in what for what in stalled) and "n3" in {node for nodes in stalled.values() for node in nodes}
    assert "one MTU" in told.words["n1"]


def test_a_wrong_interface_and_another_network_are_found(cluster: Cluster) -> None:
    change = {"n2": {"ENVBUILD_INTERFACE": "eth1"}, "n3": {"GLOO_SOCKET_IFNAME": "ib0"}}
    told = preflight(cluster, change=change)
    assert told.named("interface") == {
        "10.89.7.12 is on eth0, not on eth1, which has 10.89.8.12": ["n2"],
        "GLOO_SOCKET_IFNAME=ib0, and its interfaces are lo, eth0, eth1": ["n3"],
    }
    told = preflight(
        cluster,
        addresses={"n2": cluster.address("n2", network=1), "n3": "10.89.7.99"},
        change={"n2": {"ENVBUILD_INTERFACE": "eth1"}},
    )
    over = "reaches the head over eth0 (10.89.7.12), not over eth1"
    assert told.named("route", "warn")[over] == ["n2"]
    assert any("10.89.7.99 is on none of its interfaces" in what for what in told.named("address"))


def test_nodes_with_different_artifacts_are_named(cluster: Cluster) -> None:
    digest = environment(cluster.shared / "new", "2.13.0")
    environment(cluster.shared / "old", "2.12.1")
    python = {node: str(cluster.shared / "new/bin/python") for node in ("n1", "n2")}
    python["n3"] = str(cluster.shared / "old/bin/python")
    told = preflight(cluster, "--digest", digest, "--arch", "mips", python=python)
    assert told.failed == {"artifact", "torch", "architecture"}
    assert told.named("torch") == {"torch differs: 2.13.0 on n1, n2; 2.12.1 on n3": ["n3"]}
    [(what, nodes)] = [pair for pair in told.named("artifact").items() if "runs" in pair[0]]
    assert nodes == ["n3"] and digest[:19] in what
    python["n3"] = python["n1"]
    assert set(preflight(cluster, "--digest", digest, python=python).codes.values()) == {0}


def test_changed_files_of_an_environment_are_named(cluster: Cluster) -> None:
    for name in ("same", "other"):
        digest = environment(cluster.shared / name, "2.13.0")
    manifest = write_manifest(cluster.shared / "same", 2)[0].digest
    shutil.copy(cluster.shared / "same" / FILE, cluster.shared / "other" / FILE)
    shutil.copy(cluster.shared / "same/pyvenv.cfg", cluster.shared / "other/pyvenv.cfg")
    for script in (cluster.shared / "same/bin").glob("*ctivate*"):
        shutil.copy(script, cluster.shared / "other/bin")
    tool = cluster.shared / "other/bin/activate"
    tool.write_text(tool.read_text()[::-1])
    python = {node: str(cluster.shared / "same/bin/python") for node in ("n1", "n2")}
    python["n3"] = str(cluster.shared / "other/bin/python")
    asked = ("--digest", digest, "--manifest", manifest)
    assert set(preflight(cluster, *asked, python=python).codes.values()) == {0}
    told = preflight(cluster, *asked, "--exact", python=python)
    assert set(told.codes.values()) == {1} and told.failed == {"files"}
    assert told.named("files") == {"bin/activate changed since the environment was verified": ["n3"]}
    tool.unlink()
    (cluster.shared / "other/bin/torchrun").touch()
    told = preflight(cluster, *asked, python=python)
    assert list(told.named("files").values()) == [["n3"]] and "bin/activate, bin/torchrun" in next(
        iter(told.named("files"))
    )


def test_a_run_folder_that_each_node_has_for_itself_is_found(cluster: Cluster) -> None:
    for node in ("n1", "n3"):
        cluster.run(["mkdir", "-p", "/tmp/own"], on=node, check=True)
    told = preflight(cluster, change={node: {"ENVBUILD_RUN": "/tmp/own"} for node in cluster.nodes})
    assert told.failed == {"run folder"}
    what, nodes = next(iter(told.named("run folder").items()))
    assert nodes == ["n2", "n3"] and "no such file" in what
    told = preflight(cluster, change={"n1": {"ENVBUILD_RUN": "/proc"}})
    assert any("cannot write into" in what for what in told.named("run folder"))


def test_what_nodes_do_not_offer_is_named(cluster: Cluster) -> None:
    asked = ["--gpus", "2", "--provider", "efa", "--shm", str(1 << 50), "--free", str(1 << 60)]
    devices = {"ENVBUILD_DEVICES": "/sys/class/infiniband/*/device/driver=efa"}
    told = preflight(cluster, *asked, change=dict.fromkeys(cluster.nodes, devices))
    assert told.failed - {"memlock"} == {"gpus", "fabric", "shm", "space"}, told.words["n1"]
    assert all(nodes == ["n1", "n2", "n3"] for nodes in told.named("gpus").values())


@pytest.mark.skipif(not FAKETIME.exists(), reason="libfaketime (Debian: faketime) is not installed")
def test_clocks_that_disagree_are_found(cluster: Cluster) -> None:
    change = {
        node: {"LD_PRELOAD": str(FAKETIME), "FAKETIME": offset, "DONT_FAKE_MONOTONIC": "1"}
        for node, offset in (("n2", "+300s"), ("n3", "-5s"))
    }
    told = preflight(cluster, change=change)
    assert told.named("clock") == {"its clock is 300 s ahead of the head's": ["n2"]}
    assert told.named("clock", "warn") == {"its clock is 5 s behind the head's": ["n3"]}


@pytest.fixture
def tenth() -> Iterator[str]:
    """A shell line after which a process has a tenth of a processor, by a control group of version 1 or 2."""
    top = Path("/sys/fs/cgroup")
    first = (top / "cpu").is_dir()
    group = (top / "cpu" if first else top) / f"envbuild-test-{os.getpid()}"
    group.mkdir()
    limit, text = ("cpu.cfs_quota_us", "10000") if first else ("cpu.max", "10000 100000")
    (group / limit).write_text(text)
    yield f"echo $$ >{group}/cgroup.procs"
    wait_until_gone(group)


def wait_until_gone(group: Path) -> None:
    for _ in range(100):
        try:
            group.rmdir()
            return
        except OSError:  # its last process is ending
            time.sleep(0.1)


@contextmanager
def links(cluster: Cluster, **rates: str) -> Iterator[None]:
    """Limit what nodes send."""
    limit = ["burst", "256kb", "latency", "50ms"]
    for node, rate in rates.items():
        cluster.run(["tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", rate, *limit], on=node, check=True)
    try:
        yield
    finally:
        for node in rates:
            cluster.run(["tc", "qdisc", "del", "dev", "eth0", "root"], on=node, check=True)


def test_nodes_that_compute_or_send_slowly_are_named(cluster: Cluster, tenth: str) -> None:
    with links(cluster, n1="500mbit", n2="500mbit", n3="50mbit"):
        told = preflight(cluster, "--speed", within={"n2": tenth})
    assert set(told.codes.values()) == {0}, told.words
    found = {(what.split(":")[1].strip(), tuple(nodes)) for what, nodes in told.named("speed", "warn").items()}
    assert {("compute", ("n2",)), ("send", ("n3",))} <= found, told.verdict["findings"]
    assert told.verdict["seconds"] < 20


def test_a_job_starts_again_without_its_slow_node(cluster: Cluster, tmp_path: Path) -> None:
    """The first three nodes are taken at first; the link of one is slow."""
    folder = cluster.shared / "environment"
    digest = environment(folder, "2.13.0")
    python = f"{folder}/bin/python"
    artifact = JobArtifact("venv", str(folder), digest, "slow", f"cpu-{os.uname().machine}", python)
    site = Site("lab", scheduler=SchedulerTable(kind="slurm", exclusive=False))
    plan = JobPlan(
        "slow",
        "slurm",
        artifact,
        site,
        "folder",
        "srun",
        "ddp",
        3,
        1,
        (),
        str(cluster.shared),
        preflight=True,
        speed=True,
        exclude_slow=True,
        time="00:05:00",
    )
    script = cluster.shared / "slow.sbatch"
    script.write_text(render(plan))
    (cluster.shared / "logs").mkdir(exist_ok=True)
    with links(cluster, n1="500mbit", n2="50mbit", n3="500mbit", n4="500mbit"):
        job = cluster.sbatch(script)
        log = cluster.shared / f"logs/slow_{job}.out"
        cluster.until(lambda: log.exists() and "starts again" in log.read_text())
        cluster.resume_now(job)
        end = cluster.wait(job, 120)
    assert (end.state, end.restarts) == ("COMPLETED", 1), log.read_text()
    assert "the job starts again without n2" in log.read_text()
    assert "preflight: ok: 3 of 3 nodes" in log.read_text()
    assert cluster.job(job)["NodeList"] in ("n[1,3-4]", "n1,n3,n4")


def test_the_command_checks_an_allocation_and_hosts_by_ssh(cluster: Cluster) -> None:
    environment(cluster.shared / "env", "2.13.0")
    (cluster.shared / "site.toml").write_text('[scheduler]\nkind = "slurm"\n')
    command = [sys.executable, "-m", "envbuild", "preflight", "env/../env", "--unverified"]
    command += ["--site", "./site.toml"]
    env = {"PYTHONPATH": str(REPOSITORY)}
    outside = cluster.run(command, env=env)
    assert outside.returncode == 2 and "not inside of an allocation" in outside.stderr
    inside = ["salloc", "--quiet", "--nodes=3", *command]
    done = cluster.run(inside, env=env)
    assert done.returncode == 0, done.stderr
    assert "preflight: ok: 3 of 3 nodes, torch 2.13.0" in done.stderr
    by_ssh = cluster.run([*command, "--host", "n2,n3"], env=env)
    assert by_ssh.returncode == 0, by_ssh.stderr
    assert "preflight: ok: 2 of 2 nodes" in by_ssh.stderr
    cluster.block("n3", source="n2")
    try:
        done = cluster.run(inside, env=env)
    finally:
        cluster.unblock("n3")
    assert done.returncode == 5, done.stderr
    assert "n3 (10.89.7.13): cannot be reached from n2 (10.89.7.12): timed out" in done.stderr
    left = sorted(path.name for path in cluster.shared.glob("*preflight*"))
    assert left == [], left
