"""The report of `tests/gpu/run`: report.json for programs, report.md for people."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .machine import TOP, Context, output

_LONGEST = 400
_SHOWN = ("executable", "version", "torch", "cuda", "nccl", "cudnn", "codes", "gpus", "packages")


def write_report(context: Context, rows: Sequence[Mapping[str, Any]], seconds: float) -> None:
    """Write both files into the report's folder, each by an atomic replace."""
    commit = output(["git", "-C", str(TOP), "describe", "--always", "--dirty", "--abbrev=12"], 5).strip()
    machine = {
        "arch": platform.machine(),
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()),
        "cpus": len(os.sched_getaffinity(0)),
        "device": context.device,
        **{name: context.python.get(name) for name in _SHOWN},
    }
    facts = next((row["evidence"].get("nvidia-smi") for row in rows if row["name"] == "facts"), None)
    made = {
        "format": 1,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit,
        "seconds": round(seconds, 1),
        "machine": {**machine, "nvidia-smi": facts or []},
        "steps": list(rows),
    }
    out = Path(context.out)
    _replace(out / "report.json", json.dumps(made, indent=1, default=str) + "\n")
    _replace(out / "report.md", _page(made))


def _replace(path: Path, text: str) -> None:
    staged = path.with_name(f".{path.name}.new")
    staged.write_text(text)
    staged.replace(path)


def _page(made: Mapping[str, Any]) -> str:
    machine = made["machine"]
    gpus = (
        ", ".join(f"{one['name']} ({one['chip']}, {one['memory'] >> 30} GiB)" for one in machine["gpus"] or ())
        or "none"
    )
    driver = next((one.get("driver_version") for one in machine["nvidia-smi"]), "unknown")
    lines = [
        "# envbuild on a GPU" if made["machine"]["device"] == "cuda" else "# The steps on CPUs: no GPU was tried",
        "",
        f"{made['date']}, commit {made['commit'] or 'unknown'}, {made['seconds']:.0f} s.",
        "",
        f"- GPUs: {gpus}; driver {driver}",
        f"- torch {machine['torch']}, CUDA {machine['cuda']}, NCCL {machine['nccl']}, cuDNN {machine['cudnn']}",
        f"- Python {machine['version']}, Linux {machine['kernel']}, {machine['arch']}, {machine['cpus']} CPUs",
        "",
        "| step | verdict | seconds | limit | expected | seen |",
        "| --- | --- | --- | --- | --- | --- |",
        *(
            f"| {row['name']} | {row['verdict']} | {row['seconds']:.0f} | {row['limit']} | {_cell(row['expects'])} "
            f"| {_cell(row['seen'])} |"
            for row in made["steps"]
        ),
    ]
    for row in made["steps"]:
        if table := row["evidence"].get("bandwidth") or row["evidence"].get("table"):
            lines += [
                "",
                f"Bandwidth of {row['name']}:",
                "",
                "| bytes | microseconds | busbw (GB/s) |",
                "| --- | --- | --- |",
            ]
            lines += [f"| {one['bytes']} | {one['seconds'] * 1e6:.1f} | {one['busbw']:.3f} |" for one in table]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    one_line = " ".join(text.replace("|", "\\|").split())
    return one_line if len(one_line) <= _LONGEST else one_line[: _LONGEST - 1] + "…"
