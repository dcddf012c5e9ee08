"""Steps that need torch alone: the facts of the machine, and trainings without envbuild.verify."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from envbuild.slim import SlimRules

from .machine import TOP, Context, clean_environment, output
from .model import Seen, Skipped, Unexpected
from .programs import Ended, run_all, slim_torch, train_apart, trainer, trainer_environment

_FIELDS = "name,driver_version,memory.total,compute_cap,compute_mode,mig.mode.current,pcie.link.gen.current"
_PRODUCT = (
    "import sys, torch; a = torch.arange(64., dtype=torch.float64).reshape(8, 8); b = a.to(sys.argv[1]); "
    "print('equal' if torch.equal((b @ b).cpu(), a @ a) else 'different')"
)
_SPEED = "import json, sys; from ddp_train.preflight.speed import measure; print(json.dumps(measure(int(sys.argv[1]))))"


def facts(context: Context) -> Seen:
    """Read what the machine has, and let the device compute something exact."""
    folder, python = context.folder("facts"), context.python
    (folder / "nvidia-smi-q.txt").write_text(output(["nvidia-smi", "-q"], 20))
    rows = output(["nvidia-smi", f"--query-gpu={_FIELDS}", "--format=csv,noheader"], 20).splitlines()
    gpus = [dict(zip(_FIELDS.split(","), row.split(", "), strict=False)) for row in rows]
    (done,) = run_all([([python["executable"], "-c", _PRODUCT, context.device], clean_environment())], folder)
    evidence = {"nvidia-smi": gpus, "libraries": python["libraries"]}
    if done.text.split()[-1:] != ["equal"]:
        raise Unexpected("a product of two small matrices is wrong", {**evidence, "output": done.text[-2000:]})
    names = ", ".join(f"{one['name']} ({one['chip']})" for one in python["gpus"]) or "no GPU"
    return f"{names}; torch {python['torch']}, NCCL {python['nccl']}, Python {python['version']}", evidence


def bandwidth(context: Context) -> Seen:
    """Time all-reduces: of all GPUs as one host, or of two ranks on one GPU as two hosts."""
    folder, gpus = context.folder("bandwidth"), len(context.python["gpus"])
    shape = (1, gpus) if gpus > 1 else (2, 1)
    report = folder / "report.json"
    options = ["2", "2", "--model", "mlp", "--bandwidth", "8" if context.cuda else "0.2"]
    options += ["--checkpoint_path", str(folder / "snapshot.pt"), "--report", str(report)]
    made = _reports(train_apart(context, *shape, folder, *options), [report])[0]
    rows: list[dict[str, Any]] = made["bandwidth"]
    speed = output([context.python["executable"], "-c", _SPEED, str(gpus)], 40, trainer_environment())
    evidence = {"shape": shape, "backend": made["backend"], "table": rows, "speed": json.loads(speed or "{}")}
    if not rows or not all(row["ok"] for rank in made["ranks"] for row in rank["allreduce"]):
        raise Unexpected("an all-reduce of known numbers is wrong, or nothing was measured", evidence)
    way = f"{gpus} GPUs of one host" if gpus > 1 else "two ranks over loopback"
    size = f"{rows[-1]['bytes'] >> 10} KiB"
    return f"{rows[-1]['busbw']:.3g} GB/s at {size} by {made['backend']}, {way}", evidence


def repeat(context: Context) -> Seen:
    """Train twice: only if both runs are bit-equal can losses prove that two artifacts are equal."""
    said, evidence = _both(context, "repeat", str(TOP))
    return f"{said} in two runs", evidence


def slim(context: Context) -> Seen:
    """Train with the tried torch, and with a copy that lacks the code for other GPUs, as `repeat` trains twice."""
    chips = tuple(sorted({one["chip"] for one in context.python["gpus"]})) or ("sm_90",)
    copy = context.folder("slim") / "site-packages"
    blanked = slim_torch(context, copy, SlimRules(0, chips))
    left_out = sum(blanked.values())
    if context.cuda and not left_out:
        raise Skipped(f"the libraries of this torch have code for {', '.join(chips)} alone")
    said, evidence = _both(context, "slim", f"{copy}:{TOP}")
    shutil.rmtree(copy)
    return f"{said} with and without {left_out >> 20} MiB of code for other GPUs", evidence | {"blanked": blanked}


def _both(context: Context, step: str, path: str) -> Seen:
    """Train with the tried torch, and with `path` as PYTHONPATH. Raises Unexpected if results are not bit-equal."""
    folder = context.folder(step)
    reports = [folder / f"report{number}.json" for number in range(2)]
    lines = [
        trainer(context, "3", "3", "--model", "cnn", "--report", str(one), "--checkpoint_path", f"{one}.pt")
        for one in reports
    ]
    own = trainer_environment()
    made = _reports(run_all(list(zip(lines, (own, {**own, "PYTHONPATH": path}), strict=True)), folder), reports)
    losses = [[entry["loss"] for entry in one["losses"]] for one in made]
    digests = [one["ranks"][0]["parameters_digest"] for one in made]
    evidence = {"losses": losses, "parameters": digests}
    if losses[0] != losses[1] or digests[0] != digests[1]:
        raise Unexpected("two runs of the same training differ", evidence)
    return f"losses {losses[0]} and all parameters are bit-equal", evidence


def _reports(done: list[Ended], reports: list[Path]) -> list[dict[str, Any]]:
    """Return the trainer's reports. Raises Unexpected if a program failed or wrote none."""
    codes = [one.code for one in done]
    if any(codes) or None in codes or not all(report.is_file() for report in reports):
        raise Unexpected(f"the trainer ended with {codes}", {"output": [one.text[-3000:] for one in done]})
    return [json.loads(report.read_text()) for report in reports]
