"""The lab's dockerd: containers run and reach the network, and the machine is left as it was."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import docker
import pytest
from lab.dockerd import Lab, dockerd, missing

REASON = missing()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
FORWARD = Path("/proc/sys/net/ipv4/ip_forward")


@contextmanager
def client(lab: Lab) -> Iterator[Any]:
    with closing(docker.DockerClient(base_url=lab.environment()["DOCKER_HOST"])) as opened:
        opened.images.load(bash_image())
        yield opened


def run(opened: Any, script: str) -> str:
    """What a bash script prints in a new container."""
    printed = opened.containers.run("lab:bash", ["/bin/bash", "-c", script], remove=True)
    return str(printed.decode().strip())


def bash_image() -> bytes:
    """An archive as `docker save` writes it: this machine's bash in one layer, named `lab:bash`."""
    libraries = subprocess.run(["ldd", "/bin/bash"], capture_output=True, text=True, check=True)
    files = ["/bin/bash", *re.findall(r"(/\S+) \(0x", libraries.stdout)]
    layer = pack({path: Path(path).read_bytes() for path in files})
    config = {
        "architecture": "amd64" if os.uname().machine == "x86_64" else "arm64",
        "os": "linux",
        "config": {"Cmd": ["/bin/bash"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": ["lab:bash"], "Layers": ["layer.tar"]}]
    return pack(
        {"config.json": json.dumps(config).encode(), "layer.tar": layer, "manifest.json": json.dumps(manifest).encode()}
    )


def pack(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path, data in files.items():
            member = tarfile.TarInfo(path.lstrip("/"))
            member.size, member.mode = len(data), 0o755
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def output(*command: str) -> str:
    """What it prints; a folder or process that ends while it is listed is no matter."""
    return subprocess.run(command, capture_output=True, text=True).stdout


class Traces:
    """What one lab has put on the machine; other labs may run beside it."""

    def __init__(self, lab: Lab, bridges: list[str]) -> None:
        subnet = f"10.213.{bridges[0].removeprefix('dlab')}.0"
        words = [str(lab.socket.parent), str(lab.log.parent / "data"), subnet, *bridges]
        self.ours = re.compile(rf"(?<!\w)({'|'.join(map(re.escape, words))})(?!\w)")
        self.namespace = os.readlink(f"/proc/{lab.pid}/ns/pid_for_children")
        self.lab = lab

    def found(self) -> dict[str, list[str]]:
        places = {
            "mounts": Path("/proc/self/mounts").read_text(),
            "interfaces": "\n".join(os.listdir("/sys/class/net")),
            "rules": output("iptables-save"),
            "cgroups": output("find", "/sys/fs/cgroup", "-type", "d"),
            "folders": "\n".join(map(str, [*Path("/run").iterdir(), *self.lab.log.parent.iterdir()])),
        }
        found = {
            place: [line for line in text.splitlines() if self.ours.search(line)] for place, text in places.items()
        }
        processes = filter(self._inside, Path("/proc").glob("[0-9]*/ns/pid"))
        found["processes"] = [path.parent.parent.name for path in processes]
        return {place: lines for place, lines in found.items() if lines}

    def process(self, name: str) -> int:
        """The lab's process called `name`."""
        inside = self.found()["processes"]
        (pid,) = [int(pid) for pid in output("pgrep", "-x", name).split() if pid in inside]
        return pid

    def _inside(self, path: Path) -> bool:
        try:
            return os.readlink(path) == self.namespace
        except OSError:  # it has just ended
            return False


def use(lab: Lab) -> Traces:
    """Leave all that a careless test would: a running container, a network, a volume."""
    with client(lab) as opened:
        bridge = opened.networks.get("bridge").attrs["Options"]["com.docker.network.bridge.name"]
        network = opened.networks.create("left", driver="bridge")
        for name in ("bridge", "left"):
            opened.containers.run(
                "lab:bash",
                ["/bin/bash", "-c", "trap '' TERM; while :; do read -t 100 <> <(:); done"],
                detach=True,
                network=name,
                volumes={"left": {"bind": "/v", "mode": "rw"}},
                ports={"80/tcp": None},
            )
        assert len(opened.containers.list()) == 2
        return Traces(lab, [bridge, f"br-{network.id[:12]}"])


def test_containers_run_and_their_output_and_status_come_back(tmp_path: Path) -> None:
    with dockerd(tmp_path) as lab, client(lab) as opened:
        version = subprocess.run(["bash", "-c", "echo $BASH_VERSION"], capture_output=True, text=True)
        assert run(opened, "echo $BASH_VERSION") == version.stdout.strip()
        with pytest.raises(docker.errors.ContainerError) as failed:
            run(opened, "exit 7")
        assert failed.value.exit_status == 7
        assert opened.info()["Driver"] in ("overlay2", "vfs")
        assert "127.0.0.0/8" in opened.info()["RegistryConfig"]["InsecureRegistryCIDRs"]


def test_nothing_is_left_whatever_a_test_left_running(tmp_path: Path) -> None:
    before = FORWARD.read_text()
    with dockerd(tmp_path) as lab:
        traces = use(lab)
        assert set(traces.found()) == {"interfaces", "rules", "cgroups", "folders", "processes"}
    assert traces.found() == {}
    assert [path.name for path in tmp_path.iterdir()] == ["dockerd.log"]
    if not list(Path("/sys/class/net").glob("dlab*")):
        assert FORWARD.read_text() == before


def test_nothing_is_left_when_the_test_process_is_killed(tmp_path: Path) -> None:
    script = (
        "import pathlib, sys, time\nfrom lab.dockerd import dockerd\n"
        "with dockerd(pathlib.Path(sys.argv[1])) as lab:\n"
        "    print(lab.socket, lab.pid, flush=True)\n    time.sleep(600)\n"
    )
    tests = str(Path(__file__).resolve().parents[1])
    command = [sys.executable, "-c", script, str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": tests}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as other:
        assert other.stdout is not None
        path, pid = other.stdout.readline().split()
        traces = use(Lab(Path(path), tmp_path / "dockerd.log", int(pid)))
        other.send_signal(signal.SIGKILL)
    assert gone(traces)


def test_a_daemon_that_crashes_takes_its_containers_and_traces_along(tmp_path: Path) -> None:
    with dockerd(tmp_path) as lab:
        traces = use(lab)
        os.kill(traces.process("dockerd"), signal.SIGKILL)
        assert gone(traces)


def gone(traces: Traces, seconds: float = 30) -> bool:
    deadline = time.monotonic() + seconds
    while traces.found() and time.monotonic() < deadline:
        time.sleep(0.1)
    return traces.found() == {}


def test_two_labs_run_side_by_side_and_do_not_see_each_other(tmp_path: Path) -> None:
    with dockerd(tmp_path / "one") as one:
        with dockerd(tmp_path / "two") as two, client(two) as second:
            first_traces = use(one)
            assert second.containers.list() == []
            second_traces = use(two)
        assert second_traces.found() == {}
        assert set(first_traces.found()) >= {"interfaces", "rules", "processes"}
        assert FORWARD.read_text().strip() == "1"
        with client(one) as opened:
            assert len(opened.containers.list()) == 2
            assert run(opened, "echo still") == "still"
    assert first_traces.found() == {}


def test_a_container_reaches_beyond_the_machine_by_its_address(tmp_path: Path) -> None:
    """A network namespace with a veth pair stands for another machine, which knows no way to the containers."""
    outside, link = "10.214.7", f"out{os.getpid()}"
    server = (
        "import socket; print('ready', flush=True); input()\n"
        "s = socket.create_server(('0.0.0.0', 8000)); print('ready', flush=True)\n"
        "c, a = s.accept(); c.sendall(a[0].encode() + b'\\n')"
    )
    with (
        dockerd(tmp_path) as lab,
        client(lab) as opened,
        subprocess.Popen(
            ["unshare", "--net", sys.executable, "-c", server], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as machine,
    ):
        assert machine.stdin is not None and machine.stdout is not None
        assert machine.stdout.readline() == b"ready\n"
        up = f"""
            ip link add {link} type veth peer name eth0 netns {machine.pid}
            ip address add {outside}.1/24 dev {link} && ip link set {link} up
            nsenter --net --target {machine.pid} ip address add {outside}.2/24 dev eth0
            nsenter --net --target {machine.pid} ip link set eth0 up
        """
        try:
            subprocess.run(["sh", "-ec", up], check=True)
            machine.stdin.write(b"\n")
            machine.stdin.flush()
            assert machine.stdout.readline() == b"ready\n"
            line = f"exec 3<>/dev/tcp/{outside}.2/8000; read a <&3; echo $a"
            said = run(opened, line)
        finally:
            machine.kill()
        assert said == f"{outside}.1"


@pytest.fixture
def overlay(tmp_path: Path) -> Iterator[Path]:
    """A folder on an overlay file system, as the root of a container is."""
    top, merged = tmp_path / "top", tmp_path / "merged"
    top.mkdir()
    merged.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", top], check=True)
    for name in ("lower", "upper", "work"):
        (top / name).mkdir()
    options = ",".join(f"{n}dir={top / n}" for n in ("lower", "upper", "work"))
    subprocess.run(["mount", "-t", "overlay", "-o", options, "overlay", merged], check=True)
    yield merged
    subprocess.run(["umount", merged, top], check=True)


def test_inside_a_container_images_are_kept_without_overlays(overlay: Path) -> None:
    with dockerd(overlay / "lab") as lab, client(lab) as opened:
        assert opened.info()["Driver"] == "vfs"
        assert run(opened, "echo works") == "works"


def test_a_published_port_answers_on_the_loopback_address(tmp_path: Path) -> None:
    with dockerd(tmp_path) as lab, client(lab) as opened:
        # bash cannot listen: the port is open as soon as the container runs, and closes when nobody answers inside.
        container = opened.containers.run(
            "lab:bash", ["/bin/bash", "-c", "read -t 60 <> <(:)"], detach=True, ports={"80/tcp": ("127.0.0.1", None)}
        )
        container.reload()
        port = int(container.ports["80/tcp"][0]["HostPort"])
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            connection.settimeout(10)
            assert connection.recv(1) == b""
