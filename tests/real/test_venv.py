"""`envbuild venv pt_cpu` as a user runs it: built from the lock, verified, receipted, kept."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema

from .conftest import REPOSITORY, Command, link_store, link_tree

CHECKS = {
    "installed",
    "trainer",
    "architecture",
    "accelerator",
    "linkage",
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
    "command",
    "restart",
}


def patience_s() -> float:
    """The longest time without a sign of life on a terminal: 10 s, more on a busy machine."""
    return 10 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def test_the_receipt_lists_every_check_with_evidence(pt_cpu: dict[str, Any]) -> None:
    receipt = json.loads(Path(pt_cpu["receipt"]).read_text())
    schema = json.loads((REPOSITORY / "docs" / "receipt.schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(receipt)
    assert receipt["passed"] and receipt["artifact"]["digest"] == pt_cpu["digest"]
    assert {check["name"] for check in receipt["checks"]} == CHECKS
    untried = [check["name"] for check in receipt["checks"] if check["status"] == "not tried"]
    assert untried == ["command", "restart"]
    assert all(check["status"] == "pass" and check["evidence"] for check in receipt["checks"][:-2])
    assert Path(pt_cpu["path"], "bin", "torchrun").exists()
    assert Path(receipt["artifact"]["path"]) == Path(pt_cpu["path"])
    assert not list(Path(pt_cpu["path"]).parent.glob(".*")), "nothing is left beside the venv"


def test_a_second_call_changes_nothing(pt_cpu: dict[str, Any]) -> None:
    before = os.stat(Path(pt_cpu["path"]) / "envbuild.json"), Path(pt_cpu["receipt"]).read_bytes()
    command: Command = pt_cpu["command"]
    done = command("venv", "pt_cpu", "--json")
    assert done.returncode == 0 and "nothing changed" in done.stderr, done.stderr
    again = json.loads(done.stdout)
    assert (again["built"], again["verified"], again["digest"]) == (False, False, pt_cpu["digest"])
    after = os.stat(Path(pt_cpu["path"]) / "envbuild.json"), Path(pt_cpu["receipt"]).read_bytes()
    assert before[0].st_ino == after[0].st_ino and before[1] == after[1]


def test_the_log_of_a_build_is_short_and_ends_with_a_summary(pt_cpu: dict[str, Any]) -> None:
    log = pt_cpu["log"]
    assert len(log) < 40
    summary = dict(line.split(maxsplit=1) for line in log[log.index("") + 1 :])
    assert summary["built"] == "venv of pt_cpu for " + pt_cpu["target"] and summary["digest"] == pt_cpu["digest"]
    assert summary["checks"].startswith("23 checks passed, 2 not tried") and " wheels" in summary["reused"]


def test_a_second_build_has_the_same_digest_shows_its_progress_and_runs_after_a_move(
    pt_cpu: dict[str, Any], session_store: Path, tmp_path: Path
) -> None:
    # With an empty cache uv unpacks the wheels. Linking them takes 0.2 s, and shorter steps are not drawn.
    store = link_store(session_store, tmp_path / "store")
    command = Command(tmp_path, {"ENVBUILD_STORE": str(store)})
    words = ("venv", "pt_cpu", "--no-verify", "--out", "elsewhere with späce/venv", "--offline")
    other, seen = command.on_terminal(*words)
    assert max(map(len, seen.lines())) <= 80 and seen.longest_pause < patience_s()
    assert any(re.search(r" installing \d+ wheels +\d:\d\d", line) for line in seen.lines()), seen.lines()
    assert other["digest"] == pt_cpu["digest"] and other["receipt"] is None
    assert other["built"] and not other["verified"]
    shutil.move(other["path"], tmp_path / "moved")
    # torchrun is the same script, but would compile torch first.
    done = subprocess.run([tmp_path / "moved/bin/tqdm", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "--total" in done.stdout + done.stderr, done.stderr


def test_faults_are_survived_in_another_world_through_a_link_and_no_secret_of_the_environment_is_kept(
    pt_cpu: dict[str, Any], tmp_path: Path
) -> None:
    """Home and scratch folders are often links: the scripts then see another path than the user gave."""
    command: Command = pt_cpu["command"]
    venv = link_tree(pt_cpu["path"], tmp_path / "there/venv")  # its receipt changes
    (tmp_path / "home").symlink_to(tmp_path / "there")
    given = tmp_path / "home" / "venv"
    secret = "s3cr3t-t0ken"
    (place := tmp_path / "a$$b $local_rank").mkdir()  # torchrun would read that as names
    world = ("--nodes=2", "--nproc-per-node=1", "--epochs=2")
    done, seen = command.on_terminal(
        "verify",
        given,
        "--faults",
        *world,
        "--report",
        AWS_SECRET_ACCESS_KEY=secret,
        PIP_PROXY="",
        TMPDIR=str(place),
        TORCH_DISTRIBUTED_DEBUG="DETAIL",
        GLOO_DEVICE_TRANSPORT="TCP_TLS",  # each alone ended the ranks
    )
    assert (
        not [line for line in seen.lines() if len(line) > 80 and " " in line.strip()]
        and seen.longest_pause < patience_s()
    )
    assert any(line.startswith("  node 1: epoch 1/") and " loss " in line for line in seen.lines()), seen.lines()
    assert done["passed"] and done["path"] == str(given)
    page = tmp_path / "there/venv.report.html"
    assert "2 simulated nodes × 1 rank" in page.read_text()
    for file in (Path(done["receipt"]), venv / "envbuild.json", page):
        assert secret not in file.read_text()
    assert secret not in json.dumps(done) + seen.output.decode()
    receipt = json.loads(Path(done["receipt"]).read_text())
    restart = next(check for check in receipt["checks"] if check["name"] == "restart")
    assert restart["evidence"]["killed"]["pid"] and restart["evidence"]["start_epoch"] > 0


def test_what_changed_since_its_verification_is_not_run(pt_cpu: dict[str, Any], tmp_path: Path) -> None:
    command: Command = pt_cpu["command"]
    venv = link_tree(pt_cpu["path"], tmp_path / "venv")
    shutil.copy(pt_cpu["receipt"], tmp_path / "venv.receipt.json")
    job = ("job", venv, "--scheduler", "slurm", "--out", tmp_path / "job.sh")
    assert command(*job).returncode == 0
    assert command.json("inspect", venv)["receipt"]["matches"]
    added = venv / "lib/python3.11/site-packages/sitecustomize.py"
    added.write_text("")
    done = command(*job)
    assert done.returncode == 5 and f"{added.relative_to(venv)} changed since it was verified" in done.stderr
    assert command(*job, "--unverified").returncode == 0
    receipt = command.json("inspect", venv)["receipt"]
    assert receipt["passed"] and not receipt["matches"] and receipt["changed"] == [str(added.relative_to(venv))]


def test_an_installed_envbuild_works_from_any_folder(tmp_path: Path, session_store: Path) -> None:
    """The release's wheel has what it needs, is tried by the release's own script, and builds; nothing of the checkout
    is used."""
    tools = tmp_path / "tools"
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "PATH": search, "ENVBUILD_STORE": str(session_store), "UV_TOOL_DIR": str(tools)}
    release = [sys.executable, REPOSITORY / "tools/release", "build", "check", "try", "--dist", tmp_path / "dist"]
    made = subprocess.run([*release, "--python", sys.executable], env=env, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    wheel = next((tmp_path / "dist").glob("*.whl"))
    env["UV_TOOL_BIN_DIR"] = str(tmp_path / "bin")
    subprocess.run(["uv", "tool", "install", "-q", "--python", sys.executable, wheel], check=True, env=env)
    folder = tmp_path / "anywhere"
    folder.mkdir()
    program = tmp_path / "bin/envbuild"
    listed = subprocess.run([program, "list"], capture_output=True, text=True, cwd=folder, env=env)
    assert "pt_cpu" in listed.stdout and "_bundled" in listed.stdout, listed.stderr
    built = subprocess.run(
        [program, "venv", "pt_minimal", "--locked", "--no-verify"], capture_output=True, text=True, cwd=folder, env=env
    )
    assert built.returncode == 0, built.stderr
    assert (folder / "build/pt_minimal").is_dir()
    help_text = subprocess.run(
        [folder / built.stdout.strip() / "bin/python", "-m", "ddp_train", "--help"], capture_output=True, text=True
    )
    assert "TOTAL_EPOCHS" in help_text.stdout.upper()
