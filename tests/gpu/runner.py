"""Run the steps of `tests/gpu/run` one after the other, each in processes of its own, and write one report."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .machine import TOP, Context, find_python, has_gpu, load_context

PASS, FAIL, SKIPPED = "pass", "fail", "skipped"
NEEDED = (
    "ddp_train/__main__.py",
    "ddp_train/preflight/speed.py",
    "envbuild/verify/run.py",
    "envbuild/jobcheck/diagnose/engine.py",
    "envbuild/data/checks.toml",
    "envbuild/data/fabrics.toml",
    "envbuild/data/nccl_log.toml",
    "envbuild/data/diagnoses.toml",
)
LIMIT_S = 570
# Less is of no use to a step: importing torch from a cold disk takes as long.
_LEAST_S = 15
_END_S = 5.0
# Tests have few processors, and share them.
_LONGER_ON_CPUS = 3
_NO_TORCH = (
    "no Python of this machine has a torch that can use the GPU. Name one (--python), or bring a bundle (--bundle)"
)
_BUNDLE = TOP / "build/bundle"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options; exit with code 2 if they are invalid."""
    from .steps import STEPS

    parser = argparse.ArgumentParser(prog="tests/gpu/run", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add(
        "--dry-run",
        action="store_true",
        help="print the steps with their commands, and check what they need; start nothing",
    )
    add("--steps", nargs="+", metavar="NAME", choices=tuple(STEPS), default=list(STEPS), help="run only these")
    add(
        "--out", type=Path, default=Path("gpu-report"), metavar="DIR", help="folder of the report (default: gpu-report)"
    )
    add(
        "--bundle",
        type=Path,
        metavar="DIR",
        help="bundle to build from (default: build/bundle of the checkout, if it exists)",
    )
    add("--python", default="", metavar="FILE", help="Python whose torch is tried (default: the first that sees a GPU)")
    add("--nccl", type=Path, metavar="FILE", help="another libnccl.so.2 than torch's, for the step plant-nccl")
    add("--limit", type=int, default=LIMIT_S, metavar="SECONDS", help="time for all steps (default: %(default)s)")
    # For tests of the steps themselves, on machines without a GPU.
    add("--device", choices=("cuda", "cpu"), default="cuda", help=argparse.SUPPRESS)
    # A process of this module runs one step in the report's folder.
    add("--inside", metavar="NAME", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 0 if no step failed, 5 if one did, 6 if the machine cannot run the steps."""
    options = parse(argv)
    out = options.out.absolute()
    if options.inside:
        return run_inside(options.inside, out)
    if options.dry_run:
        return dry_run(options.steps, out, options.limit)
    if problem := _problem(options, out):
        print(f"tests/gpu/run: {problem}", file=sys.stderr)
        return 6
    bundle: Path | None = options.bundle or (_BUNDLE if (_BUNDLE / "bundle.json").is_file() else None)
    nccl: Path | None = options.nccl
    context = Context(
        str(out), options.device, str(bundle.absolute()) if bundle else "", str(nccl.absolute()) if nccl else ""
    )
    for name in ("TERM", "HUP"):
        signal.signal(getattr(signal, f"SIG{name}"), lambda *_: sys.exit(130))
    try:
        return run_steps(context, options)
    except KeyboardInterrupt:
        return 130


def _problem(options: argparse.Namespace, out: Path) -> str:
    """Return why nothing can be started, "" if it can."""
    if options.device == "cuda" and not has_gpu():
        return (
            "this machine has no NVIDIA GPU that the process can see (no /dev/nvidia0, and nvidia-smi -L names none). "
            "Run it on a machine with one; --dry-run prints the steps"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        return f"{out} is not empty. Choose another folder for the report: --out DIR"
    return ""


def dry_run(names: Sequence[str], out: Path, limit: int) -> int:
    """Print the plan; return 1 if the checkout lacks something that a step needs."""
    from .steps import STEPS

    print(f"Each step is a process with PYTHONPATH={TOP}:{TOP}/tests:\n")
    for name in names:
        step = STEPS[name]
        print(f"{name}, at most {step.seconds} s{', on GPUs alone' if step.cuda_only else ''}")
        print(f"  does     {step.does}\n  expects  {step.expects}\n  command  {shlex.join(_command(name, out))}")
    print(f"\nAfter {limit} s, the steps that are left are skipped, and the report says so.")
    faults = [f"{name} is missing" for name in NEEDED if not (TOP / name).is_file()]
    try:
        from . import subject  # noqa: F401 - whether it can be imported by this Python

        print("envbuild.verify: can be imported")
    except ImportError as error:
        faults.append(f"envbuild.verify cannot be imported by {sys.executable}: {error}")
    for fault in faults:
        print(f"tests/gpu/run: {fault}", file=sys.stderr)
    return 1 if faults else 0


def _command(name: str, out: Path) -> list[str]:
    return [sys.executable, "-m", "gpu.runner", "--inside", name, "--out", str(out)]


def run_steps(context: Context, options: argparse.Namespace) -> int:
    """Run the chosen steps and write the report after each; return the exit code."""
    from envbuild.verify.supervise import inherit_orphans

    from .report import write_report
    from .steps import STEPS

    inherit_orphans()
    out, started = Path(context.out), time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    names = [name for name in STEPS if name in options.steps]
    for name in names:
        if name != "build" and not context.python:
            venv = context.folder("build") / "venv/bin/python"
            if context.bundle and rows and rows[0]["verdict"] == PASS:
                options.python = str(venv)
            found = find_python(context.device, options.python, log=print)
            if not found:
                print(f"tests/gpu/run: {_NO_TORCH}", file=sys.stderr)
                return 6
            context = Context(**{**vars(context), "python": found})
            print(f"torch {found['torch']} of {found['executable']}")
        context.save()
        left = options.limit - (time.monotonic() - started)
        rows.append(_run_step(context, name, left))
        print(f"{rows[-1]['verdict']:<8} {name} ({rows[-1]['seconds']:.0f} s): {rows[-1]['seen']}", flush=True)
        write_report(context, rows, time.monotonic() - started)
    print(out / "report.md")
    return 5 if any(row["verdict"] == FAIL for row in rows) else 0


def _run_step(context: Context, name: str, left: float) -> dict[str, Any]:
    """Run one step in a process of its own, end all that it leaves behind, and return its row of the report."""
    from envbuild.verify.supervise import descendants, end_rest

    from .steps import STEPS

    step, folder, began = STEPS[name], context.folder(name), time.monotonic()
    row = {"name": name, "does": step.does, "expects": step.expects, "limit": step.seconds, "evidence": {}}
    if step.cuda_only and not context.cuda:
        return {**row, "verdict": SKIPPED, "seen": "needs a GPU", "seconds": 0.0}
    if left < _LEAST_S:
        return {**row, "verdict": SKIPPED, "seen": "no time was left for it", "seconds": 0.0}
    folder.mkdir(parents=True, exist_ok=True)
    spare, limit = descendants(), min(step.seconds * (1 if context.cuda else _LONGER_ON_CPUS), left)
    with (folder / "log.txt").open("wb") as log:
        child = subprocess.Popen(
            _command(name, Path(context.out)), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    try:
        code: int | None = child.wait(limit)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGTERM)
        # torchrun's agents are in sessions of their own; this process inherits them.
        end_rest(spare, _END_S)
    found = context.result(name)
    if code is None or not found:
        what = (
            f"still running after {limit:.0f} s; stopped" if code is None else f"the step's process ended with {code}"
        )
        found = {"verdict": FAIL, "seen": f"{what}: {folder / 'log.txt'}"}
    return {**row, **found, "seconds": round(time.monotonic() - began, 1)}


def run_inside(name: str, out: Path) -> int:
    """Run one step in this process, and write its result. An exception is a failure of the step."""
    from .model import Skipped, Unexpected
    from .steps import STEPS

    context = load_context(out)
    try:
        seen, evidence = STEPS[name].run(context)
        result = {"verdict": PASS, "seen": seen, "evidence": evidence}
    except Skipped as reason:
        result = {"verdict": SKIPPED, "seen": str(reason), "evidence": {}}
    except Unexpected as fault:
        result = {"verdict": FAIL, "seen": str(fault), "evidence": fault.evidence}
    except Exception as error:  # noqa: BLE001 - a fault of one step must not stop the others
        traceback.print_exc()
        result = {"verdict": FAIL, "seen": f"{type(error).__name__}: {error}", "evidence": {}}
    (context.folder(name) / "result.json").write_text(json.dumps(result, indent=1, default=str) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
