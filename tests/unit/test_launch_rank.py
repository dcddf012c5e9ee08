"""ddp_train.launch.rank: ranks in pods end together, whatever the others do, and a rank's end is its program's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ddp_train.launch import rank as module
from ddp_train.launch.rank import Barrier, find_barrier

_PLACE = {"TORCHELASTIC_RUN_ID": "pt-cpu", "MASTER_ADDR": "pt-cpu-worker-0", "MASTER_PORT": "40123"}


def environment(run: Path, rank: int, *, local: int = 1, world: int = 2, **more: str) -> dict[str, str]:
    """What torchrun and the manifest give to rank `rank` of `world`, with `local` ranks in each pod."""
    numbers = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank % local, "LOCAL_WORLD_SIZE": local}
    numbers |= {"GROUP_RANK": rank // local, "GROUP_WORLD_SIZE": world // local}
    variables = {name: str(number) for name, number in numbers.items()}
    return {"PATH": os.environ["PATH"], "ENVBUILD_RUN": str(run), **_PLACE, **variables, **more}


def start(
    run: Path, rank: int, program: str, *, seconds: int = 60, local: int = 1, world: int = 2, **more: str
) -> subprocess.Popen[str]:
    """Start rank `rank`, whose script is `program`, in a session of its own, as torchrun does."""
    script = run / f"train-{rank}.py"
    script.write_text(program)
    return subprocess.Popen(
        [sys.executable, "-m", "ddp_train.launch.rank", str(seconds), script, "--lr", "0.1"],
        env=environment(run, rank, local=local, world=world, **more),
        cwd=Path(module.__file__).parents[2],
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def until(condition: Callable[[], bool]) -> None:
    late = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < late
        time.sleep(0.02)


def barrier(run: Path, rank: int, local: int = 1, world: int = 2) -> Barrier:
    made = find_barrier(environment(run, rank, local=local, world=world))
    made.join()
    return made


SAVES = "import sys, time, pathlib\ntime.sleep({})\npathlib.Path(sys.path[0], 'saved').touch()"


def test_no_rank_ends_while_another_still_saves_its_state(tmp_path: Path) -> None:
    ranks = [start(tmp_path, number, SAVES.format(1.5) if number == 2 else "", local=2, world=4) for number in range(4)]
    while any(one.poll() is None for one in ranks):
        ended = [number for number, one in enumerate(ranks) if one.poll() is not None]
        assert not ended or (tmp_path / "saved").exists(), ended
        time.sleep(0.02)
    assert [one.returncode for one in ranks] == [0, 0, 0, 0]


def test_the_program_gets_its_arguments_variables_and_folder(tmp_path: Path) -> None:
    text = "import os, sys; print(sys.argv[1:], sys.path[0], os.environ['RANK'], os.environ['MASTER_PORT'])"
    one = start(tmp_path, 0, text, world=1)
    assert one.communicate(timeout=20)[0] == f"['--lr', '0.1'] {tmp_path} 0 40123\n"


@pytest.mark.parametrize(
    ("program", "code"), [("import sys; sys.exit(7)", 7), ("import os; os.kill(os.getpid(), 9)", -9), ("1 / 0", 1)]
)
def test_a_rank_that_fails_ends_at_once_as_its_program_did(program: str, code: int, tmp_path: Path) -> None:
    assert start(tmp_path, 0, program).wait(20) == code


COUNTS = """\
import signal, sys, time, pathlib
here, times = pathlib.Path(sys.path[0]), []
signal.signal(signal.SIGTERM, lambda *_: times.append(1))
here.joinpath("ready").touch()
while not times:
    time.sleep(0.01)
time.sleep(0.5)
here.joinpath("told").write_text(str(len(times)))
sys.exit(9)
"""


@pytest.mark.parametrize("whole_group", [True, False], ids=["its own group", "the launcher's group"])
@pytest.mark.parametrize("code", [9, 0])
def test_a_program_that_is_told_to_end_hears_it_once_may_save_and_waits_for_nobody(
    code: int, whole_group: bool, tmp_path: Path
) -> None:
    text = COUNTS.replace("sys.exit(9)", f"sys.exit({code})")
    one = start(tmp_path, 0, text) if whole_group else _in_our_group(tmp_path, text)
    until((tmp_path / "ready").exists)
    os.killpg(one.pid, signal.SIGTERM) if whole_group else one.terminate()
    assert one.wait(20) == code
    assert (tmp_path / "told").read_text() == "1"


def _in_our_group(run: Path, program: str) -> subprocess.Popen[bytes]:
    script = run / "train.py"
    script.write_text(program)
    line = [sys.executable, "-m", "ddp_train.launch.rank", "60", script]
    return subprocess.Popen(line, env=environment(run, 0), cwd=Path(module.__file__).parents[2])


def test_a_rank_that_waits_ends_by_the_signal_that_torchrun_sends_to_start_anew(tmp_path: Path) -> None:
    one = start(tmp_path, 0, "")
    until(lambda: (tmp_path / "end/pt-cpu-worker-0-40123/ranks/0").exists())
    os.killpg(one.pid, signal.SIGUSR1)  # a program's own: it has ended
    os.killpg(one.pid, signal.SIGTERM)
    assert one.wait(10) == -signal.SIGTERM


def test_a_killed_rank_leaves_no_program(tmp_path: Path) -> None:
    text = (
        "import os, sys, time, pathlib\npathlib.Path(sys.path[0], 'pid').write_text(str(os.getpid()))\ntime.sleep(60)"
    )
    one = start(tmp_path, 0, text)
    until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "")
    pid = int((tmp_path / "pid").read_text())
    one.kill()
    one.wait(10)
    until(lambda: not _lives(pid))


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# ---- what earlier attempts and jobs left
def test_files_of_an_earlier_attempt_and_of_an_earlier_job_of_this_name_end_nobody(tmp_path: Path) -> None:
    for number in (0, 1):
        barrier(tmp_path, number)
    folder = tmp_path / "end/pt-cpu-worker-0-40123"
    for left in (folder / "ranks/0", folder / "ranks/1", folder / "pods/all"):
        left.touch()
    earlier = tmp_path / "end/pt-cpu-worker-0-39999/ranks"
    earlier.mkdir(parents=True)
    for number in (0, 1):
        (earlier / str(number)).touch()
    first, second = barrier(tmp_path, 0), barrier(tmp_path, 1)
    assert not earlier.exists()
    assert first.wait(0) == "the ranks of pod 1 had not finished after 0 s"
    assert second.wait(0) == "the ranks of pod 0 had not finished after 0 s"


def test_ranks_meet_whatever_the_order_in_which_they_end(tmp_path: Path) -> None:
    first, second = barrier(tmp_path, 0), barrier(tmp_path, 1)
    assert second.wait(0) == "the ranks of pod 0 had not finished after 0 s"
    assert first.wait(5) == ""
    assert second.wait(5) == ""


# ---- a peer that is gone
def test_a_pod_that_is_gone_is_not_waited_for_and_the_rank_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its save is not there: the job must not count as done. torchrun, or the operator, starts the ranks again."""
    monkeypatch.setattr(module, "_POLL_S", 0.01)
    monkeypatch.setattr(module, "_LOST_AFTER", 20)
    first = barrier(tmp_path, 0)
    barrier(tmp_path, 1)
    assert first.wait(60) == "pod 1 gave no sign of life, and had not finished"
    other = find_barrier(environment(tmp_path, 1))
    (tmp_path / "end/pt-cpu-worker-0-40123/pods/0").unlink()
    assert other.wait(60) == "pod 0 gave no sign of life, and had not finished"


def test_a_pod_that_shows_life_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_POLL_S", 0.05)
    monkeypatch.setattr(module, "_LOST_AFTER", 10)
    monkeypatch.setattr(module, "_BEAT_S", 0.05)
    first, second = barrier(tmp_path, 0), barrier(tmp_path, 1)
    second.show_life()
    assert first.wait(2) == "the ranks of pod 1 had not finished after 2 s"


def test_a_wait_has_an_end_and_says_whom_it_was_for(tmp_path: Path) -> None:
    one = start(tmp_path, 0, "", seconds=1, local=2, world=6)
    printed, _ = one.communicate(timeout=20)
    assert one.returncode == 1
    assert printed == (
        "envbuild: rank 0 has finished its work, but the ranks of pod 0, 1, 2 had not finished after 1 s\n"
    )


def test_a_run_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "end").write_text("a file")
    printed, _ = (one := start(tmp_path, 0, "")).communicate(timeout=20)
    assert one.returncode == 1
    assert printed.startswith(f"envbuild: {tmp_path}/end") and "pods must be able to write there" in printed


def test_a_process_that_torchrun_did_not_start_is_told_so(tmp_path: Path) -> None:
    one = start(tmp_path, 0, "", MASTER_PORT="")
    assert "with torchrun, in a job of pods" in one.communicate(timeout=20)[0]
    assert one.returncode == 2
