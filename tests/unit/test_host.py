"""What we may use of a machine, as its kernel's and Slurm's own files and variables tell it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from envbuild.base.host import memory, workers

GIB = 1 << 30
V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1 = (
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
    "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory"
)


@pytest.fixture(autouse=True)
def _thirty_two_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(32)))


def host(folder: Path, mounts: str, group: str, **files: str) -> Path:
    """A root with these control groups; a file's name has "__" for a slash."""
    proc = folder / "proc/self"
    proc.mkdir(parents=True)
    (proc / "mountinfo").write_text(f"22 1 8:1 / / rw - ext4 /dev/sda rw\n{mounts}\n")
    (proc / "cgroup").write_text(group + "\n")
    (folder / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   67108864 kB\n")
    for name, text in files.items():
        path = folder / "sys/fs/cgroup" / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return folder


@pytest.mark.parametrize(
    ("own", "above", "expected"),
    [
        ("max 100000", "max 100000", 32),
        ("150000 100000", "max 100000", 2),
        ("max 100000", "400000 100000", 4),
        ("300000 100000", "250000 50000", 3),
        ("1000 100000", "max 100000", 1),
        ("", "nonsense", 32),
    ],
)
def test_the_quota_of_a_group_or_of_one_above_it_counts(own: str, above: str, expected: int, tmp_path: Path) -> None:
    quotas = {"job__step__cpu.max": own, "job__cpu.max": above}
    root = host(tmp_path, V2, "0::/job/step", **quotas)
    assert workers({}, root=root) == expected


def test_quotas_of_version_1_are_found_where_the_controller_is_mounted(tmp_path: Path) -> None:
    files = {
        "cpu,cpuacct__a__cpu.cfs_quota_us": "250000",
        "cpu,cpuacct__a__cpu.cfs_period_us": "100000",
        "cpu,cpuacct__cpu.cfs_quota_us": "-1",
        "cpu,cpuacct__cpu.cfs_period_us": "100000",
        "memory__u__m__memory.limit_in_bytes": "9223372036854771712",
        "memory__u__memory.limit_in_bytes": str(3 * GIB),
    }
    group = "9:name=systemd:/x\n4:memory:/u/m\n1:cpu,cpuacct:/a\n0::/"
    root = host(tmp_path, V1, group, **files)
    assert workers({}, root=root) == 3
    assert memory({}, root=root) == 3 * GIB


@pytest.mark.parametrize(
    ("mounted", "group"), [("/docker/abc", "/docker/abc"), ("/docker/abc", "/"), ("/../..", "/"), ("/other", "/../up")]
)
def test_in_a_container_the_mounted_part_is_ours(mounted: str, group: str, tmp_path: Path) -> None:
    mounts = V2.replace(" / /sys", f" {mounted} /sys")
    root = host(tmp_path, mounts, f"0::{group}", **{"cpu.max": "200000 100000", "memory.max": "77"})
    assert (workers({}, root=root), memory({}, root=root)) == (2, 77)


def test_a_mount_point_may_have_blanks(tmp_path: Path) -> None:
    mounts = V2.replace("/sys/fs/cgroup", r"/sys/fs/cgroup/my\040groups")
    root = host(tmp_path, mounts, "0::/a", **{"my groups__a__cpu.max": "100000 100000"})
    assert workers({}, root=root) == 1


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, 32),
        ({"SLURM_CPUS_PER_TASK": "6", "SLURM_CPUS_ON_NODE": "24"}, 6),
        ({"SLURM_CPUS_ON_NODE": "24"}, 24),
        ({"SLURM_CPUS_ON_NODE": "256"}, 32),
        ({"SLURM_CPUS_PER_TASK": "", "SLURM_CPUS_ON_NODE": "8(x2)"}, 32),
        ({"SLURM_CPUS_PER_TASK": "0"}, 32),
    ],
)
def test_slurm_gives_a_job_fewer_processors(variables: dict[str, str], expected: int, tmp_path: Path) -> None:
    assert workers(variables, root=tmp_path) == expected
    assert workers(variables, 5, root=tmp_path) == 5


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, 64 * GIB),
        ({"SLURM_MEM_PER_NODE": "4096"}, 4 * GIB),
        ({"SLURM_MEM_PER_NODE": "16G"}, 16 * GIB),
        ({"SLURM_MEM_PER_NODE": "0"}, 64 * GIB),
        ({"SLURM_MEM_PER_NODE": "999999999"}, 64 * GIB),
        ({"SLURM_MEM_PER_CPU": "2048", "SLURM_CPUS_ON_NODE": "4"}, 8 * GIB),
        ({"SLURM_MEM_PER_CPU": "2048", "SLURM_CPUS_PER_TASK": "2"}, 4 * GIB),
        ({"SLURM_MEM_PER_CPU": "2048"}, 2 * GIB),
        ({"SLURM_MEM_PER_CPU": "lots"}, 64 * GIB),
    ],
)
def test_slurm_gives_a_job_less_memory(variables: dict[str, str], expected: int, tmp_path: Path) -> None:
    assert memory(variables, root=host(tmp_path, V2, "0::/")) == expected


def test_the_lowest_memory_limit_above_us_counts(tmp_path: Path) -> None:
    files = {"a__memory.max": str(9 * GIB), "a__b__memory.max": "max", "memory.max": str(5 * GIB)}
    root = host(tmp_path, V2, "0::/a/b", **files)
    assert memory({}, root=root) == 5 * GIB


def test_a_machine_that_tells_nothing_limits_nothing(tmp_path: Path) -> None:
    assert (workers({}, root=tmp_path), memory({}, root=tmp_path)) == (32, None)


@given(
    st.text(),
    st.text(),
    st.text(),
    st.dictionaries(st.sampled_from(["SLURM_CPUS_ON_NODE", "SLURM_MEM_PER_CPU", "SLURM_MEM_PER_NODE"]), st.text()),
)
@example(V2.replace("/sys", r"/\000sys"), "0::/a", "", {})
def test_files_of_any_content_do_no_harm(mounts: str, group: str, meminfo: str, variables: dict[str, str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        proc = Path(folder) / "proc/self"
        proc.mkdir(parents=True)
        for path, text in ((proc / "mountinfo", mounts), (proc / "cgroup", group)):
            path.write_bytes(text.encode("utf-8", "surrogatepass"))
        (Path(folder) / "proc/meminfo").write_bytes(meminfo.encode("utf-8", "surrogatepass"))
        assert 1 <= workers(variables, root=Path(folder)) <= 32
        memory(variables, root=Path(folder))


def test_this_machine_is_read_without_error() -> None:
    assert 1 <= workers(os.environ) <= 32
    available = memory(os.environ)
    assert available is None or available > 1 << 20
