"""The receipt of a verification, from its subject and verdict."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from envbuild import __version__
from envbuild.contract.receipt import FORMAT
from envbuild.fabrics import nccl_version
from envbuild.verify.model import Subject, Verdict


def make_receipt(subject: Subject, verdict: Verdict, path: Path | str) -> dict[str, Any]:
    """Return the receipt of `subject`, whose final path (or name, in a daemon) is `path`.

    It contains no environment variables except those that a fabric needs.
    """
    state, uname = subject.state, os.uname()
    versions = next((c.evidence for c in verdict.checks if c.name == "versions"), {})
    return {
        "format": FORMAT,
        "passed": verdict.passed,
        "artifact": {
            "kind": subject.kind or state.artifact,
            "path": os.fspath(path.absolute()) if isinstance(path, Path) else path,
            "digest": subject.digest,
            **({"manifest": subject.manifest} if subject.manifest else {}),
        },
        "recipe": {"name": state.recipe, "digest": state.recipe_digest},
        "lock": {"digest": state.lock_digest},
        "plan": {"digest": state.plan_digest},
        "target": state.target,
        "fabric": state.fabric,
        "packages": sorted(name for name, _, _ in state.packages),
        **({"project": state.project} if state.project else {}),
        **({"slim": state.slim} if state.slim else {}),
        "layers": [{"name": one.name, "version": one.version, "path": one.path} for one in state.layers],
        "runtime": subject.runtime,
        "settings": asdict(verdict.settings),
        "versions": {
            "envbuild": __version__,
            **{name: versions.get(name) for name in ("python", "torch", "torch_cuda")},
            **({"python_build": state.python_build} if state.python_build else {}),
            "nccl": nccl_version(state) or None,
        },
        "host": {
            "name": uname.nodename,
            "kernel": uname.release,
            "arch": uname.machine,
            "libc": " ".join(platform.libc_ver()).strip(),
            "cpus": len(os.sched_getaffinity(0)),
            **({"processor": processor} if (processor := _processor()) else {}),
        },
        **({"performance": dict(verdict.performance)} if verdict.performance else {}),
        "verified_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(verdict.seconds, 3),
        "checks": [asdict(check) for check in verdict.checks],
    }


def _processor(path: Path = Path("/proc/cpuinfo")) -> str:
    """Return the model of the host's processor; "" if the kernel does not name it, as on most ARM machines."""
    with suppress(OSError), path.open(encoding="utf-8", errors="replace") as stream:
        return next((line.partition(":")[2].strip() for line in stream if line.startswith("model name")), "")
    return ""
