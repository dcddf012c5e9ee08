"""The machine on which the steps run: its GPUs, and the Python whose torch they try."""

from __future__ import annotations

import glob
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

TOP = Path(__file__).resolve().parents[2]
# Of Pythons that may have torch, besides those on PATH.
_PLACES = (
    "/opt/conda/bin/python",
    "/opt/*/bin/python3",
    "/usr/bin/python3.*",
    "/usr/local/bin/python3.*",
    "~/*/bin/python",
)
_PROBE_S, _FIND_S = 90.0, 10.0
# Python settings and variables of an outer job, which the processes of a step must not have. Without bytecode, each
# of them would compile torch again.
_DROPPED = frozenset(
    {
        "PYTHONPATH",
        "PYTHONHOME",
        "PYTHONDONTWRITEBYTECODE",
        "VIRTUAL_ENV",
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    }
)
# Two ranks on one GPU are two hosts for NCCL (NCCL_HOSTID), and must meet over the network.
APART = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
_HAS_TORCH = "import importlib.util as u; print(u.find_spec('torch') is not None)"
# What a Python has, as JSON; any Python from 3.8 on can run it.
_PROBE = """
import json, os, platform, sys
import torch
try:
    from importlib.metadata import distributions
    rows = {(d.metadata["Name"] or "").lower().replace("_", "-"): d.version for d in distributions()}
except Exception:
    rows = {}
cuda = torch.cuda.is_available()
mapped = set()
with open("/proc/self/maps") as stream:
    for line in stream:
        path = line.rstrip("\\n").split(None, 5)[5:]
        if path and ".so" in path[0]:
            mapped.add(path[0])
print(json.dumps({
    "executable": sys.executable, "prefix": sys.prefix, "version": platform.python_version(),
    "torch": torch.__version__, "torch_file": torch.__file__, "cuda": torch.version.cuda,
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda and torch.distributed.is_nccl_available() else None,
    "cudnn": torch.backends.cudnn.version() if cuda else None,
    "codes": torch.cuda.get_arch_list() if cuda else [],
    "gpus": [
        {"name": one.name, "chip": "sm_%d%d" % (one.major, one.minor), "memory": one.total_memory}
        for one in map(torch.cuda.get_device_properties, range(torch.cuda.device_count() if cuda else 0))
    ],
    "packages": {name: version for name, version in rows.items() if name.startswith(("torch", "nvidia-", "triton"))},
    "libraries": sorted(mapped),
}))
"""


@dataclass(frozen=True)
class Context:
    """What every step is given. `python` is what _PROBE printed of the Python that is tried, {} before one is known.

    `device` is cuda, or cpu in tests of the steps themselves. `bundle` and `nccl` are paths, "" for none.
    """

    out: str
    device: str = "cuda"
    bundle: str = ""
    nccl: str = ""
    python: dict[str, Any] = field(default_factory=dict)

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    @property
    def backend(self) -> str:
        return "nccl" if self.cuda else "gloo"

    def folder(self, step: str) -> Path:
        """Return the folder of `step`, which holds its log, its result and its files."""
        return Path(self.out, step)

    def result(self, step: str) -> dict[str, Any]:
        """Return the result of a step that ran before, {} if it has none."""
        try:
            found: dict[str, Any] = json.loads((self.folder(step) / "result.json").read_text())
        except (OSError, ValueError):
            return {}
        return found

    def save(self) -> None:
        Path(self.out, "context.json").write_text(json.dumps(asdict(self), indent=1) + "\n")


def load_context(out: Path) -> Context:
    """Return the context that `Context.save` wrote into `out`."""
    return Context(**json.loads((out / "context.json").read_text()))


def clean_environment(**more: str) -> dict[str, str]:
    """Return this process's variables without those of an outer job and without Python settings, and `more`."""
    prefixes = ("PET_", "TORCHELASTIC_", "NCCL_", "DDP_TRAIN_")
    own = {name: value for name, value in os.environ.items() if name not in _DROPPED and not name.startswith(prefixes)}
    return {**own, "PYTHONUNBUFFERED": "1", **more}


def has_gpu() -> bool:
    """Return whether the driver shows a GPU of NVIDIA to this process."""
    if glob.glob("/dev/nvidia[0-9]*"):
        return True
    smi = shutil.which("nvidia-smi")
    return smi is not None and "GPU 0" in output([smi, "-L"], _FIND_S)


def output(command: Sequence[str], seconds: float, env: Mapping[str, str] | None = None) -> str:
    """Return what a command prints, "" if it cannot be run, fails or takes longer than `seconds`."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            env=env,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def find_python(device: str, named: str = "", log: Any = print) -> dict[str, Any]:
    """Return what the first Python has whose torch can use the device; {} if there is none. `named` is tried alone."""
    for python in iter([named]) if named else _pythons():
        found = "True" in output([python, "-c", _HAS_TORCH], _FIND_S, clean_environment())
        text = output([python, "-c", _PROBE], _PROBE_S, clean_environment()) if found else ""
        try:
            probed: dict[str, Any] = json.loads(text.strip().splitlines()[-1])
        except (ValueError, IndexError):
            log(f"{python}: {'its torch cannot be imported' if found else 'no torch'}")
            continue
        if device == "cpu" or probed["gpus"]:
            return probed
        log(f"{python}: torch {probed['torch']} sees no GPU")
    return {}


def _pythons() -> Iterator[str]:
    """Yield the Pythons of this machine once each, those that the caller uses first."""
    names = (os.environ.get("PYTHON"), sys.executable, *map(shutil.which, ("python3", "python")))
    seen = set()
    for path in (*names, *(one for place in _PLACES for one in sorted(glob.glob(os.path.expanduser(place))))):
        # Links are followed up to the folder alone: a virtual environment's python is a link to the system's.
        if path and not path.endswith("-config") and os.access(path, os.X_OK):
            folder, name = os.path.split(os.path.abspath(path))
            own = os.path.join(os.path.realpath(folder), os.path.basename(os.path.realpath(path)) or name)
            if own not in seen:
                seen.add(own)
                yield path


def torch_folder(context: Context) -> Path:
    """Return the folder of the tried torch package."""
    return Path(context.python["torch_file"]).parent
