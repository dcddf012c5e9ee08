"""Records of torch's flight recorder, merged: of jobs that hung here (data/flight), and as NCCL writes them."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab.golden import read_golden_cases

from ddp_train.flight import PREFIX, flight_variables
from envbuild.jobcheck.diagnose.engine import diagnose
from envbuild.jobcheck.diagnose.read import is_record, merged, read_logs, read_record
from envbuild.jobcheck.diagnose.rules import load_rules

DATA = Path(__file__).parent / "data"
TOP = Path(__file__).parents[2]
HANGS = ("behind", "differ", "all", "none")


def of_folder(folder: Path) -> list[str]:
    records = (read_record(path) for path in sorted(folder.iterdir()) if path.suffix != ".stack")
    return list(merged([one for one in records if one]))


@pytest.mark.parametrize("hang", HANGS)
def test_records_of_a_job_that_hung_become_the_line_of_its_log(hang: str) -> None:
    (line,) = of_folder(DATA / "flight" / hang)
    assert line in (DATA / f"logs/flight-{hang}.log").read_text().splitlines()


def test_the_rank_that_is_late_is_named_with_the_collective_and_both_lines() -> None:
    (found,) = diagnose(read_logs([str(DATA / "flight/behind")]), load_rules()).findings
    assert found.id == "flight-behind"
    for part in (
        "rank 1 has not entered gloo:all_reduce of 3×2 Float (number 5)",
        "ranks 0, 2 of default_pg wait at /job/train.py:21 in step",
        "it was at /job/train.py:17 in load",
    ):
        assert part in found.cause


def test_records_that_nccl_s_watchdog_wrote_name_the_late_rank() -> None:
    """Of `tests/gpu/run` on an H200: torch 2.11 with two ranks, of which one sleeps before an all-reduce."""
    assert of_folder(DATA / "flight/nccl") == [
        "flight: behind: rank 1 has not entered nccl:all_reduce of 8×4 Float (number 2), in which rank 0 of default_pg "
        "waits at <string>:12 in <module>; its last collective was nccl:all_reduce of 1 Float (number 1) at <string>:8 "
        "in <module>"
    ]


def test_of_the_folder_of_a_run_only_records_and_logs_of_pods_are_read(tmp_path: Path) -> None:
    for path in (DATA / "flight/none").iterdir():
        shutil.copy(path, tmp_path)
    (tmp_path / "settings-0.sh").write_text("CUDA out of memory. Tried to allocate 2.00 GiB\n")
    (tmp_path / "snapshot.pt").write_bytes(b"CUDA out of memory. Tried to allocate 2.00 GiB\n")
    assert [one.id for one in diagnose(read_logs([str(tmp_path)]), load_rules()).findings] == ["flight-none"]
    (tmp_path / "pod-1.log").write_text("CUDA out of memory. Tried to allocate 2.00 GiB\n")
    assert diagnose(read_logs([str(tmp_path)]), load_rules()).findings[0].id == "gpu-memory"


def test_a_run_without_records_has_none_and_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "settings-0.sh").write_text("")
    assert list(read_logs([str(tmp_path)])) == []


# Two groups may have one description.
GROUPS = {"world": ("0", "world"), "model": ("1", "mesh_tp"), "other": ("2", "mesh_tp")}


def entry(number: int, name: str, state: str, group: str = "world", size: Sequence[int] = (8, 4)) -> dict[str, Any]:
    """An entry as torch 2.7 writes it for NCCL (FlightRecorderDetail.hpp; never recorded here)."""
    frames = [
        {"name": "all_reduce", "filename": "/env/lib/python3.11/site-packages/torch/distributed/x.py", "line": 1},
        {"name": name, "filename": "/home/me/train.py", "line": number},
    ]
    return {
        "frames": frames,
        "record_id": number,
        "pg_id": 0,
        "process_group": GROUPS[group],
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": f"nccl:{name}",
        "time_created_ns": 1,
        "input_sizes": [size],
        "input_dtypes": ["BFloat16"],
        "output_sizes": [size],
        "output_dtypes": ["BFloat16"],
        "state": state,
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": False,
        "timeout_ms": 600000,
        "is_p2p": False,
    }


def write(folder: Path, rank: int, entries: list[dict[str, Any]], groups: dict[str, str]) -> None:
    config = {
        GROUPS[key][0]: dict(zip(("name", "desc"), GROUPS[key], strict=True), ranks=of) for key, of in groups.items()
    }
    value = {"version": "2.4", "pg_config": config, "pg_status": {}, "entries": entries}
    (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(value, protocol=2))


def test_records_of_nccl_with_two_groups_name_the_rank_that_waits_nowhere(tmp_path: Path) -> None:
    """Ranks 0 and 1 are a group, and 2 and 3: 3 is late, so 2 waits for it and is late for all."""
    done = entry(1, "all_reduce", "completed")
    for rank, more in enumerate(
        (
            [entry(2, "all_reduce", "started")],
            [entry(2, "all_reduce", "scheduled")],
            [entry(1, "all_gather_into_tensor", "started", "other")],
            [],
        )
    ):
        own = {"model": "[0, 1]"} if rank < 2 else {"other": "[2, 3]"}
        ended = entry(1, "all_gather_into_tensor", "completed", "model")
        write(tmp_path, rank, [done, *([ended] if rank < 2 else []), *more], {"world": "[0, 1, 2, 3]", **own})
    lines = of_folder(tmp_path)
    assert len(lines) == 2
    assert lines[0].startswith("flight: behind: rank 3 has not entered nccl:all_reduce of 8×4 BFloat16 (number 2), in ")
    assert "ranks 0, 1 of world wait at /home/me/train.py:2 in all_reduce; its last collective was" in lines[0]
    assert lines[1].startswith("flight: behind: rank 3 has not entered nccl:all_gather_into_tensor")
    assert "in which rank 2 of mesh_tp 2 waits" in lines[1]


@pytest.mark.parametrize(
    ("name", "sizes", "kinds"),
    [("all_reduce", (8, 9), ["differ"]), ("all_reduce", (8, 8), ["all"]), ("all_to_all", (8, 9), ["all"])],
)
def test_sizes_differ_only_where_they_must_be_equal(
    tmp_path: Path, name: str, sizes: tuple[int, int], kinds: list[str]
) -> None:
    for rank, size in enumerate(sizes):
        write(tmp_path, rank, [entry(1, name, "started", size=(size,))], {"world": "[0, 1]"})
    assert [line.split(":")[1].strip() for line in of_folder(tmp_path)] == kinds


def test_ranks_that_finished_everything_yield_nothing(tmp_path: Path) -> None:
    for rank in range(2):
        write(tmp_path, rank, [entry(1, "all_reduce", "completed")], {"world": "[0, 1]"})
    assert of_folder(tmp_path) == []


def test_a_pickle_that_runs_programs_or_fills_memory_is_no_record(tmp_path: Path) -> None:
    """Nothing but plain values is understood, and nested lists are not shown."""

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, (f"touch {tmp_path}/ran",)

    nested: Any = []
    for _ in range(60):
        nested = [nested, nested]
    for number, value in enumerate(
        (
            {"entries": [Evil()]},
            {"entries": [{**entry(1, "x", "started"), "profiling_name": nested}]},
            {"entries": [{**entry(1, "x", "started"), "input_dtypes": [nested]}]},
            {"entries": [], "pg_config": {"0": {"ranks": nested}}},
            {"entries": nested},
        )
    ):
        path = tmp_path / f"rank{number}"
        path.write_bytes(pickle.dumps(value, protocol=2))
        assert is_record(path)
        assert read_record(path) is None
    path.write_bytes(b"\x80\x02}r\xff\xff\xff\x7f(\x8b\xff\xff\xff\x7f")
    assert read_record(path) is None
    assert not (tmp_path / "ran").exists()


SEED = (DATA / "flight/behind/flight-0-1").read_bytes()


@given(st.binary(max_size=64), st.integers(0, len(SEED)), st.integers(0, 64))
def test_no_damaged_record_raises(tmp_path_factory: pytest.TempPathFactory, data: bytes, at: int, cut: int) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged-1"
    path.write_bytes(SEED[:at] + data + SEED[at + cut :])
    record = read_record(path)
    list(merged([record] if record else []))


MANIFESTS = read_golden_cases(DATA / "jobs/kubernetes.txt")


@pytest.mark.parametrize("name", MANIFESTS)
def test_pods_switch_the_recorder_on_as_other_jobs_of_any_torch_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddp_train.flight.metadata.version", lambda _: "2.8.0")
    found = dict(re.findall(r"name: (TORCH_(?:FR|NCCL)_\w+)\n +value: \"?([^\"\n]*)", MANIFESTS[name]))
    prefix = found[PREFIX]
    assert prefix.endswith("/flight-0-")
    assert found in (flight_variables(prefix, gpu=False), flight_variables(prefix, gpu=True))


@pytest.mark.parametrize(
    ("version", "old"), [("2.8.0+cu126", True), ("2.9.0", False), ("2.11.0+cu130", False), ("3.0", False)]
)
def test_a_newer_torch_gets_no_names_of_which_each_rank_would_warn(
    version: str, old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddp_train.flight.metadata.version", lambda _: version)
    assert ("TORCH_NCCL_TRACE_BUFFER_SIZE" in flight_variables("f-", gpu=True)) is old
    assert "TORCH_FR_BUFFER_SIZE" in flight_variables("f-", gpu=True)


def test_without_the_variables_of_a_job_nothing_is_recorded() -> None:
    program = (
        "import signal; from ddp_train.flight import record_hangs, write_record; record_hangs(); write_record(); "
        "assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_")}
    subprocess.run([sys.executable, "-c", program], check=True, cwd=TOP, env=env)


def test_processes_that_a_recorded_program_forks_end_by_sigterm(tmp_path: Path) -> None:
    program = (
        "import multiprocessing, time; from ddp_train.flight import record_hangs; record_hangs()\n"
        "child = multiprocessing.get_context('fork').Process(target=time.sleep, args=(60,))\n"
        "child.start(); child.terminate(); child.join(20); print(child.exitcode)"
    )
    env = {**os.environ, "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/flight-0-", "RANK": "3"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=TOP, env=env, timeout=50)
    assert done.stdout == "-15\n", done.stderr
    assert list(tmp_path.iterdir()) == []


def test_sigterm_ends_a_recorded_program_by_sigterm_and_its_stack_is_kept(tmp_path: Path) -> None:
    program = (
        "import os, signal, time; from ddp_train.flight import record_hangs; record_hangs()\n"
        "def load(): os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)\n"
        "load()"
    )
    (tmp_path / "flight-0-3").write_text("of a try before")
    env = {**os.environ, "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/flight-0-", "RANK": "3"}
    done = subprocess.run([sys.executable, "-c", program], check=False, cwd=TOP, env=env, timeout=50)
    assert done.returncode == -15
    assert [path.name for path in tmp_path.iterdir()] == ["flight-0-3.stack"]
    assert (tmp_path / "flight-0-3.stack").read_text().splitlines()[0] == "<string>:2 in load"
