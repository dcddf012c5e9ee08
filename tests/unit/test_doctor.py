"""envbuild doctor: no check hides another, and what each artifact can do follows from what was found."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from envbuild.base.errors import HostError
from envbuild.contract.kinds import ARTIFACTS
from envbuild.doctor import batch, machine
from envbuild.doctor import machine as kernel
from envbuild.doctor import machine as storage
from envbuild.doctor import network as connectivity
from envbuild.doctor import network as fabric
from envbuild.doctor.probe import Host, HostFinding, HostProbe, Status, facts_of, run_checks, run_probe
from envbuild.doctor.registry import CHECKS, judge, this_host
from envbuild.image.squashfs.read import SquashfsImage
from envbuild.jobs.schedulers.base import Queue

PLAIN = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}


def host(root: Path, **variables: str) -> Host:
    return Host({**PLAIN, **variables}, root=root)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def program(folder: Path, name: str, script: str) -> str:
    """A program that stands for one that no test machine has; its folder, for PATH."""
    path = write(folder, {name: f"#!/bin/sh\n{script}\n"}) / name
    path.chmod(0o755)
    return str(folder)


def test_a_check_that_raises_or_hangs_hides_no_other_and_nothing_of_its_own() -> None:
    release = threading.Event()

    def hangs(_: Host) -> Iterator[HostFinding]:
        yield HostFinding("half", "ok", "found before")
        release.wait(30)

    def breaks(_: Host) -> Iterator[HostFinding]:
        yield HostFinding("part", "ok", "found before")
        raise ValueError("https://user:secret@host is odd")

    def refuses(_: Host) -> Iterator[HostFinding]:
        raise HostError("no such tool", "install it")

    def works(_: Host) -> Iterator[HostFinding]:
        yield HostFinding("good", "ok", "fine")

    checks = [HostProbe("a", one.__name__, one) for one in (hangs, breaks, refuses, works)]
    begin = time.monotonic()
    results = run_checks(checks, Host(PLAIN), deadline_s=0.5)
    assert time.monotonic() - begin < 5
    release.set()
    found = [[(f.name, f.status) for f in findings] for _, findings in results]
    assert found == [
        [("half", "ok"), ("hangs", "warn")],
        [("part", "ok"), ("breaks", "warn")],
        [("refuses", "warn")],
        [("good", "ok")],
    ]
    said = [finding for _, findings in results for finding in findings]
    assert "0.5 s" in said[1].summary
    assert "ValueError" in said[3].summary and "secret" not in said[3].summary
    assert (said[4].summary, said[4].hint) == ("no such tool", "install it")


def test_a_program_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    script = f"sleep 60 & echo $! >{tmp_path}/child; echo said; wait"
    folder = program(tmp_path, "hangs", script)
    begin = time.monotonic()
    assert run_probe([f"{folder}/hangs"], PLAIN, 0.5) == (None, "no answer in 0.5 s")
    assert time.monotonic() - begin < 5
    child = Path(f"/proc/{(tmp_path / 'child').read_text().strip()}/stat")
    for _ in range(100):
        if not child.exists() or child.read_text().split()[2] == "Z":
            return
        time.sleep(0.05)
    raise AssertionError("it still runs")


def test_a_daemon_that_keeps_the_pipe_open_is_not_waited_for() -> None:
    begin = time.monotonic()
    code, _ = run_probe(["sh", "-c", "setsid sleep 20 & echo done"], PLAIN, 1.0)
    assert code is None and time.monotonic() - begin < 5


@pytest.mark.parametrize("command", [["/nonexistent/tool"], ["/"], ["sh", "\0"]])
def test_what_cannot_be_run_is_no_error(command: list[str]) -> None:
    code, why = run_probe(command, PLAIN)
    assert code is None and why


@pytest.mark.parametrize("compressor", kernel.COMPRESSORS)
def test_tiny_images_are_squashfs(compressor: str, tmp_path: Path) -> None:
    data = kernel.tiny_image(compressor)
    assert len(data) == 4096
    assert int.from_bytes(data[20:22], "little") == kernel.COMPRESSORS[compressor]
    if compressor == "lzo":  # our own reader has none
        return
    (tmp_path / "tiny").write_bytes(data)
    with (tmp_path / "tiny").open("rb") as stream:
        image = SquashfsImage(stream, 0, "tiny")
        assert [(entry.path, entry.mode) for entry, _ in image.entries()] in ([("", 0o755)], [])


def test_the_kernel_s_configuration_is_read_where_nothing_may_be_mounted(tmp_path: Path) -> None:
    import platform

    text = "CONFIG_SQUASHFS=m\nCONFIG_SQUASHFS_ZLIB=y\n# CONFIG_SQUASHFS_LZ4 is not set\nCONFIG_SQUASHFS_ZSTD=y\n"
    root = write(tmp_path, {f"boot/config-{platform.release()}": text})
    found = kernel._configured(host(root), "why")
    assert found.facts["kernel"] == ["gzip", "zstd"]
    unknown = kernel._configured(host(tmp_path / "empty"), "why")
    assert unknown.status == "info"


MOUNTS = """\
21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
22 21 0:20 / /home rw,nosuid - nfs4 server:/home rw
23 22 0:21 / /home/a\\040b rw,noexec - lustre fs rw
24 21 0:22 / /tmp rw - tmpfs tmpfs rw
25 21 0:23 / /tmp rw - xfs /dev/sdb rw
broken line
"""


@pytest.mark.parametrize(
    ("path", "kind", "shared"),
    [
        ("/usr/x", "ext4", False),
        ("/home/me/x", "nfs4", True),
        ("/homely", "ext4", False),
        ("/home/a b/c", "lustre", True),
        ("/tmp/x", "xfs", False),
    ],
)
def test_the_file_system_of_a_path(tmp_path: Path, path: str, kind: str, shared: bool) -> None:
    mount = storage.mount_at(Path(path), write(tmp_path, {"proc/self/mountinfo": MOUNTS}))
    assert mount is not None and (mount.kind, mount.shared) == (kind, shared)


GOOD: dict[str, Any] = {
    "kind": "ext4",
    "free": 1 << 40,
    "inodes": 1 << 30,
    "noexec": False,
    "writable": True,
    "shared": False,
}


@pytest.mark.parametrize(
    ("name", "changed", "status", "word"),
    [
        ("store", {}, "ok", ""),
        ("store", {"writable": False}, "fail", "ENVBUILD_STORE"),
        ("home", {"writable": False}, "info", ""),
        ("current folder", {"noexec": True}, "warn", "--out"),
        ("store", {"free": 1 << 30}, "warn", "ENVBUILD_STORE"),
        ("tmp", {"free": 1 << 30}, "ok", ""),
        ("tmp", {"free": 1 << 20}, "warn", "TMPDIR"),
        ("store", {"inodes": 12}, "warn", "ENVBUILD_STORE"),
        ("store", {"free": None, "inodes": None}, "ok", ""),
        ("store", {"shared": True}, "info", ""),
        ("tmp", {"kind": "tmpfs"}, "info", "TMPDIR"),
    ],
)
def test_a_folder_is_judged(name: str, changed: dict[str, Any], status: Status, word: str) -> None:
    heavy = name in ("store", "current folder")
    found, _, hint = storage.judge_place(name, {**GOOD, **changed}, heavy=heavy)
    assert found == status and word in hint


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("127.0.0.1 localhost\n127.0.1.1 {name}.lab {name}\n", "warn"),
        ("::1 localhost {name}\n", "warn"),
        ("127.0.0.1 localhost # {name}\n192.0.2.1 {name}\n", None),
    ],
)
def test_debian_s_hosts_entry_is_named(tmp_path: Path, text: str, status: str | None) -> None:
    import socket

    name = socket.gethostname()
    (found,) = machine.own_name(host(write(tmp_path, {"etc/hosts": text.format(name=name)})))
    assert ("/etc/hosts gives" in found.summary) == (status is not None)
    assert status is None or (found.status == status and name in found.hint)


def adapter(kind: str, state: str, driver: str) -> dict[str, str]:
    return {
        "sys/class/infiniband/a0/ports/1/link_layer": kind,
        "sys/class/infiniband/a0/ports/1/state": state,
        "sys/class/infiniband/a0/ports/1/rate": "200 Gb/sec (4X HDR)",
        f"sys/bus/{driver}/name": "",
    }


@pytest.mark.parametrize(
    ("layer", "state", "driver", "kind", "status"),
    [
        ("InfiniBand", "4: ACTIVE", "mlx5_core", "ib", "ok"),
        ("Ethernet", "4: ACTIVE", "mlx5_core", "roce", "ok"),
        ("Unspecified", "4: ACTIVE", "efa", "efa", "ok"),
        ("InfiniBand", "1: DOWN", "mlx5_core", "ib", "warn"),
    ],
)
def test_adapters_are_told_apart(
    tmp_path: Path, layer: str, state: str, driver: str, kind: str, status: Status
) -> None:
    root = write(tmp_path, adapter(layer, state, driver))
    (root / "dev/infiniband").mkdir(parents=True)
    device = root / "sys/class/infiniband/a0/device"
    device.mkdir()
    (device / "driver").symlink_to(root / "sys/bus" / driver)
    (found,) = fabric.adapters(host(root))
    assert (found.status, found.facts["kinds"]) == (status, [kind])
    (root / "dev/infiniband").rmdir()
    (found,) = fabric.adapters(host(root))
    assert found.status == "warn"


def test_slingshot_is_seen_by_its_devices(tmp_path: Path) -> None:
    (tmp_path / "sys/class/cxi/cxi0").mkdir(parents=True)
    (found,) = fabric.adapters(host(tmp_path))
    assert (found.status, found.facts["kinds"]) == ("ok", ["cxi"])


# ---- with a program that prints what NVIDIA's and others' print
VERSION = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n"


def test_gpus_and_the_cuda_that_their_driver_runs(tmp_path: Path) -> None:
    row = "NVIDIA GH200 120GB, 570.86.15, 97871 MiB"
    folder = program(tmp_path / "bin", "nvidia-smi", f"echo '{row}'; echo '{row}'")
    cached = "\tlibcuda.so.1 (libc6,{}) => /usr/lib/libcuda.so.1"
    ldconfig = "; ".join(f"printf '{cached.format(arch)}\n'" for arch in ("x86-64", "AArch64"))
    program(tmp_path / "bin", "ldconfig", ldconfig)
    root = write(tmp_path, {"proc/driver/nvidia/version": VERSION})
    found = machine.gpus(host(root, PATH=f"{folder}:/usr/bin:/bin"))[0]
    assert found.status == "ok" and found.summary.startswith("2 × NVIDIA GH200 120GB, driver 570.86.15 (CUDA 11, 12)")
    assert found.facts["cuda"] == ["11", "12"] and found.facts["libcuda"] == "/usr/lib/libcuda.so.1"


@pytest.mark.parametrize(
    ("gpu", "channels", "found"),
    [
        ("NVIDIA GB200", {}, [("info", "no channel in /dev/nvidia-caps-imex-channels")]),
        ("NVIDIA GH200 120GB", {"channel0": "c"}, [("ok", "channel0 can be read")]),
        ("NVIDIA GB300", {"channel0": ""}, [("warn", "/dev/nvidia-caps-imex-channels/channel0: No such file")]),
        ("NVIDIA H200", {}, []),
    ],
)
def test_channels_of_imex_are_looked_for_where_nvlink_may_join_hosts(
    gpu: str, channels: dict[str, str], found: list[tuple[Status, str]], tmp_path: Path
) -> None:
    folder = program(tmp_path / "bin", "nvidia-smi", f"echo '{gpu}, 570.86.15, 97871 MiB'")
    program(tmp_path / "bin", "ldconfig", "printf '\tlibcuda.so.1 (libc6,x86-64, AArch64) => /usr/lib/libcuda.so.1\n'")
    (tmp_path / "dev/nvidia-caps-imex-channels").mkdir(parents=True)
    for name, text in channels.items():
        path = tmp_path / "dev/nvidia-caps-imex-channels" / name
        path.write_text(text) if text else path.symlink_to("gone")
    first, *others = machine.gpus(host(tmp_path, PATH=f"{folder}:/usr/bin:/bin"))
    assert first.status == "ok" and [(one.status, one.name) for one in others] == [(s, "IMEX") for s, _ in found]
    assert all(one.summary.startswith(words) for one, (_, words) in zip(others, found, strict=True))
    assert all(one.hint for one in others if one.status != "ok")


def test_a_driver_whose_tool_fails_is_told_with_its_words(tmp_path: Path) -> None:
    words = "NVIDIA-SMI has failed because it couldnt communicate with the NVIDIA driver."
    folder = program(tmp_path / "bin", "nvidia-smi", f"echo '{words}'; exit 9")
    (found,) = machine.gpus(host(tmp_path, PATH=f"{folder}:/usr/bin:/bin"))
    assert found.status == "warn" and words in found.summary
    root = write(tmp_path, {"proc/driver/nvidia/version": VERSION})
    (found,) = machine.gpus(host(root, PATH="/usr/bin:/bin"))
    assert found.status == "warn" and "--gpus all" in found.hint and "570.86.15" in found.summary


def test_partitions_are_read_from_sinfo(tmp_path: Path) -> None:
    rows = (
        "gpu*|4:00:00|64|512000+|gpu:a100:4(S:0-1)|3",
        "gpu*|4:00:00|32|256000|(null)|2",
        "cpu|infinite|8|1000|(null)|1",
    )
    lines = "\\n".join(rows)
    folder = program(tmp_path, "sinfo", f"printf '{lines}\\n'")
    found = batch.queues("slurm", {"PATH": f"{folder}:/usr/bin:/bin"})
    gpu = Queue("gpu", True, "4:00:00", 64, 512000, 4, 5, ("a100",))
    assert found == [gpu, Queue("cpu", False, "infinite", 8, 1000, 0, 1)]


def test_providers_are_read_from_fi_info(tmp_path: Path) -> None:
    folder = program(tmp_path, "fi_info", "printf 'cxi:\\n    version: 117.0\\ntcp:\\n    version: 117.0\\n'")
    (found,) = fabric.libfabric(host(tmp_path, PATH=f"{folder}:/usr/bin:/bin"))
    assert found.facts["providers"] == ["cxi", "tcp"]


@pytest.mark.parametrize(
    ("variables", "status", "shown"),
    [
        ({}, "info", "none"),
        ({"https_proxy": "http://p:3128"}, "ok", "https_proxy http://p:3128"),
        ({"https_proxy": "http://u:pw@p:3128"}, "ok", "http://u:****@p:3128"),
        ({"https_proxy": "http://a:1", "HTTPS_PROXY": "http://b:1"}, "warn", "differ"),
        ({"http_proxy": "p:3128"}, "warn", "no scheme"),
    ],
)
def test_proxies(variables: dict[str, str], status: Status, shown: str) -> None:
    (found,) = connectivity.proxies(Host({**PLAIN, **variables}))
    assert found.status == status and shown in found.summary
    assert "pw" not in str(found)


# ---- what artifacts can do
def findings(**changed: HostFinding | None) -> dict[str, HostFinding]:
    """A host on which all is well, and what is changed of it (`_` for a space in a name)."""
    good = [
        HostFinding("configuration", "ok", ""),
        HostFinding("packages", "ok", "", facts={"missing": []}),
        HostFinding("uv", "ok", "", facts={"path": "/uv"}),
        HostFinding("store", "ok", ""),
        HostFinding("tmp", "ok", ""),
        HostFinding("current folder", "ok", ""),
        HostFinding("package index", "ok", "", facts={"asked": True, "reached": ["x"], "local": 0}),
        HostFinding("conda-forge", "ok", "", facts={"asked": True, "reached": ["x"]}),
        HostFinding("Debian's archive", "ok", "", facts={"asked": True, "reached": ["x"]}),
        HostFinding("docker daemon", "ok", "", facts={"answers": True}),
        HostFinding("own launch", "ok", "", facts={"ways": ["mount", "extract"]}),
        HostFinding("memory", "ok", "", facts={"usable": 1 << 40}),
        HostFinding("GPU", "ok", "", facts={"gpus": ["H100"]}),
    ]
    found = {finding.name: finding for finding in good}
    for name, finding in changed.items():
        key = name.replace("_", " ")
        if finding is None:
            del found[key]
        else:
            found[key] = replace(finding, name=key)
    return found


def cells(found: dict[str, HostFinding]) -> dict[str, str]:
    return {kind: "".join(v.status[0] for v in steps.values()) for kind, steps in judge(found).items()}


def test_a_host_with_all_can_do_all() -> None:
    assert cells(findings()) == dict.fromkeys(ARTIFACTS, "ooo")
    assert all("GPU" not in steps["verify"].summary for steps in judge(findings()).values())


BAD = HostFinding("", "fail", "what is wrong", "what to change")
LOST = HostFinding("", "warn", "no answer", "a mirror", {"asked": True, "reached": [], "local": 0})


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"store": BAD}, dict.fromkeys(ARTIFACTS, "foo")),
        ({"configuration": BAD}, dict.fromkeys(ARTIFACTS, "foo")),
        ({"conda-forge": LOST}, {"conda": "woo"}),
        ({"package_index": LOST}, {"venv": "woo", "docker": "woo", "enroot": "woo", "apptainer": "woo"}),
        ({"package_index": replace(LOST, facts={**LOST.facts, "local": 1})}, {}),
        ({"conda-forge": HostFinding("", "warn", "late", "", {"timeout": True})}, {"conda": "woo"}),
        ({"docker_daemon": HostFinding("", "info", "", "", {"answers": False})}, {"docker": "oww"}),
        ({"own_launch": HostFinding("", "warn", "no", "", {"ways": []})}, {"enroot": "oww", "apptainer": "oww"}),
        ({"packages": HostFinding("", "fail", "", "", {"missing": ["rattler"]})}, {"conda": "foo"}),
        ({"current_folder": HostFinding("", "warn", "noexec")}, {"venv": "woo", "conda": "woo"}),
        ({"memory": HostFinding("", "warn", "1 GB", "", {"usable": 1 << 30})}, dict.fromkeys(ARTIFACTS, "owo")),
        # Checks that had no answer must not break the verdict.
        (
            {"docker_daemon": None, "own_launch": None, "memory": None, "GPU": None, "packages": None},
            {"docker": "oww", "enroot": "oww", "apptainer": "oww"},
        ),
    ],
)
def test_what_is_missing_shows_where_it_matters(
    changed: dict[str, HostFinding | None], expected: dict[str, str]
) -> None:
    assert cells(findings(**changed)) == {**dict.fromkeys(ARTIFACTS, "ooo"), **expected}


def test_an_installed_runtime_does_without_our_own_launch() -> None:
    forbidden = HostFinding("", "warn", "forbidden", "sysctl", {"ways": []})
    works = HostFinding("", "ok", "", "", {"works": True})
    found = findings(own_launch=forbidden, enroot=works, singularity=replace(works, facts={"works": False}))
    assert cells(found)["enroot"] == "ooo" and cells(found)["apptainer"] == "oww"
    assert judge(found)["apptainer"]["run"].hint == "sysctl"


def test_without_a_gpu_it_is_said_that_only_cpus_are_verified() -> None:
    verdicts = judge(findings(GPU=HostFinding("", "info", "none")))
    assert all("CPUs only" in steps["verify"].summary for steps in verdicts.values())


def test_names_of_checks_are_unique_and_a_broken_site_file_leaves_the_rest(tmp_path: Path) -> None:
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    (tmp_path / "site.toml").write_text("stor = 1\n")
    broken = this_host({**PLAIN, "ENVBUILD_SITE": str(tmp_path / "site.toml")}, offline=True)
    assert broken.environment is None and "site.toml:1:1" in broken.problem
    wanted = ("configuration", "processors", "memory", "store", "package index")
    results = run_checks([check for check in CHECKS if check.name in wanted], broken)
    found = facts_of(results)
    assert found["configuration"].status == "fail" and found["processors"].status == "ok"
    assert {steps["build"].status for steps in judge(found).values()} == {"fail"}


OFFLINE = {
    name: HostFinding("", "info", "not asked", facts={"asked": False, "local": 0})
    for name in ("package index", "conda-forge", "Debian's archive")
}


def test_offline_a_build_is_not_promised_from_an_empty_store() -> None:
    empty = replace(findings()["store"], facts={"holds": {"wheels": 0, "conda packages": 0}})
    verdicts = judge(findings(store=empty, **OFFLINE))
    assert {steps["build"].status for steps in verdicts.values()} == {"warn"}
    assert verdicts["conda"]["build"].summary == (
        "unknown: conda-forge not asked, and the store holds no conda packages"
    )
    full = replace(empty, facts={"holds": dict.fromkeys(("wheels", "conda packages", "image blobs"), 9)})
    told = judge(findings(store=full, **OFFLINE))
    assert {steps["build"].status for steps in told.values()} == {"info"}
    assert "only from what the store holds" in told["docker"]["build"].summary


def test_offline_checks_tell_what_the_store_holds_and_what_is_not_asked(tmp_path: Path) -> None:
    (tmp_path / "conda/archives/abc").mkdir(parents=True)
    variables = {**PLAIN, "ENVBUILD_STORE": str(tmp_path), "PIP_CONFIG_FILE": "/dev/null"}
    checks = [check for check in CHECKS if check.name in ("store", "package index", "recipes' sources")]
    found = facts_of(run_checks(checks, this_host(variables, offline=True)))
    assert found["store"].facts["holds"] == {"wheels": 0, "conda packages": 1, "image blobs": 0}
    builds = {kind: steps["build"].status for kind, steps in judge(found).items()}
    assert builds == {"conda": "info", **dict.fromkeys(("venv", "docker", "enroot", "apptainer"), "warn")}


@pytest.mark.parametrize(
    ("facts", "status", "what"),
    [
        (
            {"here": ["3.13"], "downloads": ["3.11", "3.12"], "lacking": []},
            "ok",
            "yes, with this host's Python 3.13; 3.11, 3.12 by download",
        ),
        ({"here": [], "downloads": ["3.11"], "lacking": []}, "ok", "yes, with Python 3.11, which uv downloads"),
        ({"here": ["3.11"], "downloads": [], "lacking": ["3.12"]}, "info", "only with this host's Python 3.11"),
        ({"timeout": True}, "ok", "yes"),
    ],
)
def test_a_venv_names_the_pythons_that_it_can_have(facts: dict[str, Any], status: str, what: str) -> None:
    verdict = judge({"Pythons": HostFinding("Pythons", "info", "…", facts=facts)})["venv"]["build"]
    assert (verdict.status, verdict.summary) == (status, what)


def test_without_any_python_no_venv_can_be_built() -> None:
    finding = HostFinding("Pythons", "fail", "not 3.11: uv cannot download one: …", "run `/x/uv python install 3.11`")
    verdicts = judge({"Pythons": finding})
    assert verdicts["venv"]["build"].status == "fail" and verdicts["venv"]["build"].hint == finding.hint
    assert verdicts["conda"]["build"].status != "fail"
