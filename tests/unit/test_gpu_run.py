"""`tests/gpu/run`: its plan, its runner with steps that crash and hang, and the judgements of its steps.

No GPU is needed; tests/real/test_gpu_run.py runs those steps that CPUs can run.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gpu import machine, programs, runner, training, verdicts, verification
from gpu.machine import TOP, Context
from gpu.model import Skipped, Unexpected
from gpu.programs import Ended
from gpu.steps import STEPS
from lab.shellcheck import shellcheck

RUN = TOP / "tests/gpu/run"


def test_the_dry_run_names_each_step_with_its_command_and_limit_and_writes_nothing(tmp_path: Path) -> None:
    out = tmp_path / "report"
    done = subprocess.run([RUN, "--dry-run", "--out", out], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for step in STEPS.values():
        assert f"\n{step.name}, at most {step.seconds} s" in done.stdout
        assert f"--inside {step.name} --out {out}\n" in done.stdout
        assert step.does in done.stdout and step.expects in done.stdout
    assert "envbuild.verify: can be imported" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_all_steps_end_within_ten_minutes() -> None:
    """The last step may begin when almost no time is left, and gets no more; what it leaves behind is ended."""
    assert runner.LIMIT_S + 2 * runner._END_S < 600
    assert all(step.seconds <= runner.LIMIT_S / 2 for step in STEPS.values())


def test_the_documentation_lists_every_step() -> None:
    text = (TOP / "docs/contributing.md").read_text()
    assert [line for line in text.splitlines() if line in _rows()] == _rows()


def _rows() -> list[str]:
    return [f"| `{step.name}` | {step.does} | {step.expects} |" for step in STEPS.values()]


def test_the_dry_run_tells_what_a_checkout_lacks(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(runner, "NEEDED", (*runner.NEEDED, "envbuild/nothing.py"))
    assert runner.main(["--dry-run", "--steps", "slim", "--out", str(tmp_path / "r")]) == 1
    assert "envbuild/nothing.py is missing" in capsys.readouterr().err


def test_shellcheck_finds_nothing() -> None:
    assert shellcheck(RUN) == ""


def test_without_a_gpu_nothing_is_started(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(runner, "has_gpu", lambda: False)
    assert runner.main(["--out", str(tmp_path / "report")]) == 6
    assert "no NVIDIA GPU" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_files_is_left_alone(capsys: Any, tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    assert runner.main(["--device", "cpu", "--out", str(tmp_path)]) == 6
    assert "is not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


# ---- the runner

# Steps in place of the real ones, and no search for a torch. The runner starts each as this script.
PLANTED = """
import os, signal, subprocess, sys, time
from gpu import runner, steps
from gpu.model import Skipped, Step, Unexpected

def crash(context):
    os.kill(os.getpid(), signal.SIGSEGV)

def hang(context):
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    (context.folder("hang") / "pid").write_text(str(child.pid))
    time.sleep(1000)

def skip(context):
    raise Skipped("no such thing here")

def differ(context):
    raise Unexpected("seven", {"wanted": 6})

def leave(context):
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    return str(child.pid), {}

runs = {"crash": crash, "hang": hang, "skip": skip, "differ": differ, "fault": lambda context: 1 / 0, "leave": leave,
        "cuda": crash, "good": lambda context: (context.python["torch"], {"table": []})}
steps.STEPS.clear()
steps.STEPS.update({name: Step(name, run, 1 if name == "hang" else 60, "does", "expects", name == "cuda")
                    for name, run in runs.items()})
runner._command = lambda name, out: [sys.executable, __file__, "--inside", name, "--out", str(out)]
runner.find_python = lambda *_, **__: {"torch": "2.0", "executable": "python", "gpus": []}
sys.exit(runner.main())
"""


def planted(folder: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Run planted steps; return the process and report.json."""
    script = folder / "planted.py"
    script.write_text(PLANTED)
    env = {**os.environ, "PYTHONPATH": f"{TOP}:{TOP}/tests"}
    line = [sys.executable, script, "--device", "cpu", "--out", folder / "report", *arguments]
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=120)
    return done, json.loads((folder / "report/report.json").read_text())


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists() and "Z (zombie)" not in Path(f"/proc/{pid}/status").read_text()


def test_a_step_that_crashes_hangs_or_fails_stops_no_other_and_leaves_nothing_behind(tmp_path: Path) -> None:
    done, report = planted(tmp_path)
    assert done.returncode == 5, done.stderr
    rows = {row["name"]: row for row in report["steps"]}
    assert {name: row["verdict"] for name, row in rows.items()} == {
        "crash": "fail",
        "hang": "fail",
        "skip": "skipped",
        "differ": "fail",
        "fault": "fail",
        "leave": "pass",
        "cuda": "skipped",
        "good": "pass",
    }
    assert "ended with -11" in rows["crash"]["seen"]
    assert (
        "still running after 3 s; stopped" in rows["hang"]["seen"] and rows["hang"]["seconds"] < 3 + 2 * runner._END_S
    )
    assert rows["skip"]["seen"] == "no such thing here" and rows["cuda"]["seen"] == "needs a GPU"
    assert rows["differ"]["evidence"] == {"wanted": 6}
    assert "ZeroDivisionError" in rows["fault"]["seen"]
    assert "Traceback" in (tmp_path / "report/fault/log.txt").read_text()
    assert rows["good"]["seen"] == "2.0"
    assert not is_alive(int((tmp_path / "report/hang/pid").read_text()))
    assert not is_alive(int(rows["leave"]["seen"]))
    page = (tmp_path / "report/report.md").read_text()
    assert page.startswith("# The steps on CPUs: no GPU was tried\n")
    assert "| differ | fail |" in page and "| good | pass |" in page
    assert done.stdout.splitlines()[-1] == str(tmp_path / "report/report.md")


def test_steps_without_time_are_skipped_and_named(tmp_path: Path) -> None:
    done, report = planted(tmp_path, "--steps", "good", "skip", "--limit", "5")
    assert done.returncode == 0
    assert [(row["name"], row["verdict"]) for row in report["steps"]] == [("skip", "skipped"), ("good", "skipped")]
    assert all("no time was left" in row["seen"] for row in report["steps"])


def test_an_interrupted_runner_ends_its_step(tmp_path: Path) -> None:
    script = tmp_path / "planted.py"
    script.write_text(PLANTED.replace("1 if name", "60 if name"))
    env = {**os.environ, "PYTHONPATH": f"{TOP}:{TOP}/tests"}
    line = [sys.executable, script, "--device", "cpu", "--out", tmp_path / "report", "--steps", "hang"]
    child = subprocess.Popen(line, env=env, stdout=subprocess.DEVNULL)
    noted = tmp_path / "report/hang/pid"
    deadline = time.monotonic() + 60
    while not (noted.exists() and noted.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    child.terminate()
    assert child.wait(30) == 130
    assert not is_alive(int(noted.read_text()))


# ---- the machine


def fake_python(folder: Path, torch: bool, gpus: list[dict[str, Any]] | None) -> str:
    """A Python that answers both questions of find_python; None: its torch cannot be imported."""
    made = json.dumps({"torch": "2.7.1+cu126", "executable": str(folder / "python"), "gpus": gpus})
    folder.mkdir()
    (folder / "answer").write_text("noise\n" + made)
    failing = "exit 1" if gpus is None else f"cat {folder}/answer"
    script = f'#!/bin/sh\ncase "$2" in *find_spec*) echo {torch} ;; *) {failing} ;; esac\n'
    (folder / "python").write_text(script)
    (folder / "python").chmod(0o755)
    return str(folder / "python")


def test_the_first_python_whose_torch_sees_a_gpu_is_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpu = {"name": "H100", "chip": "sm_90", "memory": 1}
    pythons = [
        fake_python(tmp_path / "none", False, None),
        fake_python(tmp_path / "broken", True, None),
        fake_python(tmp_path / "cpu", True, []),
        fake_python(tmp_path / "gpu", True, [gpu]),
        fake_python(tmp_path / "later", True, [gpu]),
    ]
    monkeypatch.setattr(machine, "_pythons", lambda: iter(pythons))
    said: list[str] = []
    assert machine.find_python("cuda", log=said.append)["executable"] == pythons[3]
    assert [text.rpartition(": ")[2] for text in said] == [
        "no torch",
        "its torch cannot be imported",
        "torch 2.7.1+cu126 sees no GPU",
    ]
    assert machine.find_python("cpu", log=said.append)["executable"] == pythons[2]
    assert machine.find_python("cuda", pythons[2], log=said.append) == {}


def test_a_step_has_no_variable_of_an_outer_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "PET_NNODES", "NCCL_NET", "PYTHONPATH", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    made = machine.clean_environment(MORE="2")
    assert not {"RANK", "PET_NNODES", "NCCL_NET", "PYTHONPATH", "TORCHELASTIC_RUN_ID"} & made.keys()
    assert made["MORE"] == "2" and made["PATH"] == os.environ["PATH"]


def cuda_context(out: Path, **python: Any) -> Context:
    """The context of a made-up machine with torch of PyPI for CUDA in a virtual environment."""
    site = out / "env/lib/python3.11/site-packages"
    for name in ("torch/__init__.py", "torch/lib/libtorch_cuda.so", "nvidia/cudnn/lib/libcudnn.so.9"):
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_bytes(bytes(4096))
    libraries = ["torch/lib/libtorch_cuda.so", "nvidia/cudnn/lib/libcudnn.so.9", "nvidia/nccl/lib/libnccl.so.2"]
    made = {
        "executable": str(out / "env/bin/python"),
        "prefix": str(out / "env"),
        "version": "3.11.7",
        "torch": "2.7.1+cu126",
        "torch_file": str(site / "torch/__init__.py"),
        "cuda": "12.6",
        "nccl": "2.26.2",
        "codes": ["sm_90"],
        "gpus": [{"name": "H100", "chip": "sm_90", "memory": 1 << 36}],
        "packages": {"torch": "2.7.1", "nvidia-nccl-cu12": "2.26.2", "nvidia-cudnn-cu12": "9.5.1.17"},
        "libraries": [str(site / name) for name in libraries],
        **python,
    }
    return Context(str(out), "cuda", python=made)


def test_the_machine_s_python_is_a_subject_with_its_nccl_and_the_planted_one(tmp_path: Path) -> None:
    from gpu.subject import _subject

    context = cuda_context(tmp_path)
    subject = _subject(context, "socket", "")
    assert subject.target.name.startswith("cu126-") and subject.state.nccl == "2.26.2"
    assert subject.root == tmp_path / "env" and not subject.isolated
    assert subject.holds(context.python["libraries"][2])
    assert _subject(context, "ib", "99.0.0").state.nccl == "99.0.0"
    other = cuda_context(tmp_path, libraries=["/usr/lib/libnccl.so.2"])
    assert _subject(other, "socket", "").isolated, "NCCL of the system and torch of a user have no folder in common"


def test_a_library_is_cut_off_in_links_and_not_in_the_machine_s_torch(tmp_path: Path) -> None:
    context = cuda_context(tmp_path)
    broken = programs.break_library(context, tmp_path / "broken")
    assert broken == str(tmp_path / "broken/nvidia/cudnn/lib/libcudnn.so.9")
    assert os.path.getsize(broken) == 16
    assert os.path.getsize(context.python["libraries"][1]) == 4096
    assert (tmp_path / "broken/torch/__init__.py").is_symlink()
    elsewhere = cuda_context(tmp_path, libraries=["/usr/lib/libcudnn.so.9"])
    assert programs.break_library(elsewhere, tmp_path / "other") is None


# ---- judgements


def checks(**status: str) -> dict[str, Any]:
    """Evidence of a verification in which all passed but these."""
    names = ("launch", "world", "fabric", "libraries", "bandwidth")
    return {
        "checks": {name: {"status": status.get(name, "pass"), "seen": f"{name}!\nmore", "cause": ""} for name in names}
    }


def verified(monkeypatch: pytest.MonkeyPatch, evidence: dict[str, Any]) -> list[dict[str, Any]]:
    """Let verifications end with this evidence; return the arguments of each."""
    called: list[dict[str, Any]] = []

    def verify(context: Context, step: str, nodes: int, **more: Any) -> tuple[list[str], dict[str, Any]]:
        called.append({"step": step, "nodes": nodes, **more})
        return [name for name, row in evidence["checks"].items() if row["status"] == "fail"], evidence

    monkeypatch.setattr(verification, "_verify", verify)
    return called


def keep(context: Context, step: str, verdict: str, evidence: dict[str, Any]) -> None:
    context.folder(step).mkdir(exist_ok=True)
    (context.folder(step) / "result.json").write_text(json.dumps({"verdict": verdict, "evidence": evidence}))


def test_one_rank_is_tried_only_where_two_cannot_share_the_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    context = cuda_context(tmp_path)
    refused = checks(launch="fail")
    refused["checks"]["launch"]["seen"] = "exit codes [1, 1]\nNCCL WARN Duplicate GPU detected : rank 0 and rank 1"
    verified(monkeypatch, refused)
    with pytest.raises(Skipped, match="does not let two ranks share"):
        verification.two_ranks(context)
    keep(context, "two-ranks", "skipped", {})
    called = verified(monkeypatch, checks())
    assert verification.one_rank(context)[0] == "5 checks passed, none failed"
    assert called[0]["nodes"] == 1
    with pytest.raises(Skipped, match="only between two ranks"):
        verification.plant_plugin(context)
    keep(context, "two-ranks", "pass", checks())
    with pytest.raises(Skipped, match="two ranks were launched"):
        verification.one_rank(context)


def test_a_planted_fault_passes_only_if_exactly_its_checks_fail(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    context = cuda_context(tmp_path)
    three = {"fabric": "fail", "libraries": "fail", "bandwidth": "fail"}
    called = verified(monkeypatch, checks(**three))
    assert verification.plant_fallback(context)[0] == "fabric: fabric!; libraries: libraries!; bandwidth: bandwidth!"
    assert called[0]["fabric"] == "ib" and called[0]["variables"] == {"NCCL_NET": "Socket"}
    for wrong in ({**three, "fabric": "pass"}, {**three, "world": "fail"}, {}):
        verified(monkeypatch, checks(**wrong))
        with pytest.raises(Unexpected, match="should have") as caught:
            verification.plant_fallback(context)
        assert caught.value.evidence["checks"]
    keep(context, "two-ranks", "fail", checks(launch="fail"))
    verified(monkeypatch, checks(fabric="fail", libraries="fail"))
    verification.plant_fallback(context)  # one rank has no bandwidth


@pytest.mark.parametrize(
    ("plant", "cause"),
    [
        ("plant_plugin", "NCCL did not find its network plugin: …"),
        ("plant_library", "{library} is no shared library, or not a whole one (file too short)"),
    ],
)
def test_the_cause_must_name_the_planted_fault(
    plant: str, cause: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    context = cuda_context(tmp_path)
    library = str(tmp_path / "plant-library/broken/nvidia/cudnn/lib/libcudnn.so.9")
    evidence = checks(launch="fail")
    evidence["checks"]["launch"]["cause"] = cause.format(library=library)
    verified(monkeypatch, evidence)
    assert getattr(verification, plant)(context)[0] == "launch: launch!"
    (tmp_path / "again").mkdir()
    evidence["checks"]["launch"]["cause"] = "see the log"
    with pytest.raises(Unexpected, match="the cause that envbuild names"):
        getattr(verification, plant)(cuda_context(tmp_path / "again"))


def test_another_nccl_is_found_by_its_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    places = {"/opt/a/lib/libnccl.so.2": "22602\n", "/opt/b/lib/libnccl.so.2": "", "/opt/c/lib/libnccl.so.2": "22105\n"}
    monkeypatch.setattr(verification, "glob", SimpleNamespace(glob=lambda place: places if "/opt" in place else ()))
    monkeypatch.setattr(verification, "output", lambda command, _: places[command[-1]])
    called = verified(monkeypatch, checks(libraries="fail"))
    _, evidence = verification.plant_nccl(cuda_context(tmp_path))
    assert called[0]["env"] == {"LD_PRELOAD": "/opt/c/lib/libnccl.so.2"} and evidence["preloaded_version"] == "2.21.5"
    del places["/opt/c/lib/libnccl.so.2"]
    with pytest.raises(Skipped, match="no other NCCL than"):
        verification.plant_nccl(cuda_context(tmp_path))


SAID = {
    "no-gpu": ["RuntimeError: No CUDA GPUs are available"],
    "gpu-ordinal": ["RuntimeError: CUDA error: invalid device ordinal"],
    "gpu-memory": ["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 16384.00 GiB. GPU 0 has"],
    "two ranks": ["n1:1:2 [0] init.cc:9 NCCL WARN Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000"]
    * 2,
    "nccl-interface": ["n1:1:2 [0] bootstrap.cc:4 NCCL WARN Bootstrap : no socket interface found", ""],
    "nccl-timeout": ["[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=2, OpType=X)", ""],
    "network-missing": ["n1:1:2 [0] net.cc:6 NCCL WARN Error: network AWS Libfabric not found.", ""],
}


def test_every_provoked_failure_must_be_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    texts = [text for several in SAID.values() for text in several]
    records = Path(__file__).parent / "data/flight/behind"

    def run(*_: Any) -> list[Ended]:
        shutil.copytree(records, tmp_path / "diagnoses/flight", dirs_exist_ok=True)
        return [Ended(1, text) for text in texts]

    monkeypatch.setattr(verdicts, "run_all", run)
    assert verdicts.diagnoses(cuda_context(tmp_path))[0] == "8 failures were named"
    shutil.rmtree(tmp_path / "diagnoses")
    texts[2] = "torch.OutOfMemoryError: something new"
    records = tmp_path / "none"
    records.mkdir()
    with pytest.raises(Unexpected, match=r"did not name gpu-memory, flight$"):
        verdicts.diagnoses(cuda_context(tmp_path))


def test_a_static_verdict_must_be_what_the_gpu_did(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With a stand-in for envbuild's reader: libtorch_cuda has sm_90 without PTX."""
    context = cuda_context(tmp_path)
    monkeypatch.setitem(sys.modules, "envbuild.gpus", None)
    with pytest.raises(Skipped, match="does not read code for GPUs"):
        verdicts.gpu_code(context)
    rules: Any = SimpleNamespace(
        read_gpu_code=lambda stream: Counter({("sm_80", "sm_90"): 3}),
        chips_named=lambda name: [SimpleNamespace(name=name)],
        library_runs=lambda found, chip: "natively" if any(chip.name in codes for codes in found) else "",
    )
    monkeypatch.setitem(sys.modules, "envbuild.gpus", rules)
    codes = [0, 1]
    monkeypatch.setattr(verdicts, "run_all", lambda *_: [Ended(code, "") for code in codes])
    assert verdicts.gpu_code(context)[0] == "2 verdicts on sm_90 are what the GPU did"
    codes[:] = [1, 0]
    with pytest.raises(Unexpected) as caught:
        verdicts.gpu_code(context)
    assert "libtorch_cuda.so: code that runs natively, and it did not run" in str(caught.value)
    assert "libtorch_cuda.so by PTX alone: code that runs nowhere, and it ran" in str(caught.value)


def test_two_runs_that_differ_in_the_last_bit_fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    context = cuda_context(tmp_path)
    folder = context.folder("repeat")
    folder.mkdir()

    def trained(*losses: float) -> None:
        for number, loss in enumerate(losses):
            made = {"losses": [{"epoch": 0, "loss": loss}], "ranks": [{"parameters_digest": "d"}]}
            (folder / f"report{number}.json").write_text(json.dumps(made))

    codes = [0, 0]
    monkeypatch.setattr(training, "run_all", lambda *_: [Ended(code, "why") for code in codes])
    trained(0.1, 0.1)
    assert "bit-equal" in training.repeat(context)[0]
    trained(0.1, 0.1 + 2**-56)
    with pytest.raises(Unexpected, match="differ"):
        training.repeat(context)
    codes[1] = 1
    with pytest.raises(Unexpected, match="ended with") as caught:
        training.repeat(context)
    assert caught.value.evidence["output"] == ["why", "why"]
