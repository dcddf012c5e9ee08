"""The Python of a machine as the subject of `envbuild verify`: the checks on launches, without those on an artifact."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from envbuild.base.elf import MACHINES
from envbuild.contract.installed import FileReport
from envbuild.contract.receipt import FAIL
from envbuild.contract.state import State
from envbuild.contract.verification import VerifySettings
from envbuild.recipe.targets import Target
from envbuild.site.settings import load_site
from envbuild.verify.elf_files import scan_elf
from envbuild.verify.host import host_nodes
from envbuild.verify.model import Check, Subject
from envbuild.verify.run import verify
from envbuild.verify.survey import Survey

from .machine import APART, Context, clean_environment, torch_folder

# Checks on what envbuild built, which a machine's own Python is not.
_OF_ARTIFACTS = ("installed", "linkage", "trainer", "imports", "command")


def verify_machine(
    context: Context,
    step: str,
    settings: VerifySettings,
    *,
    fabric: str = "socket",
    nccl: str = "",
    variables: Mapping[str, str] | None = None,
    env: Mapping[str, str] | None = None,
    planted: Mapping[str, str] | None = None,
) -> list[Check]:
    """Verify the tried Python and return its checks; the nodes' logs are kept in the folder of `step`.

    `fabric` and `nccl` (the locked version of NCCL, by default the installed one) are what the artifact would name,
    `variables` those of the site, `env` those of the caller, and `planted` those with which each program starts.
    """
    folder = context.folder(step)
    site = folder / "site.toml"
    rows = [f"{name} = {json.dumps(value)}\n" for name, value in {**APART, **(variables or {})}.items()]
    # This table replaces that of any site file of the machine.
    site.write_text("[fabric.variables]\n" + "".join(rows))
    own = clean_environment(ENVBUILD_SITE=str(site), **(env or {}))
    verdict = verify(
        _subject(context, fabric, nccl, planted), settings, load_site(own), own, print, logs=folder / "logs"
    )
    return [check for check in verdict.checks if check.name not in _OF_ARTIFACTS]


def failed(checks: list[Check]) -> list[str]:
    """Return the names of the failed checks."""
    return [check.name for check in checks if check.status == FAIL]


def _subject(context: Context, fabric: str, nccl: str, planted: Mapping[str, str] | None = None) -> Subject:
    python = context.python
    executable, cuda = python["executable"], python["cuda"]
    accelerator = "cu" + "".join(cuda.split(".")[:2]) if context.cuda else "cpu"
    target = Target.parse(f"{accelerator}-{platform.machine()}")
    packages = {name: version for name, version in python["packages"].items() if name == "torch" or "nccl" in name}
    if nccl:
        packages = {name: version for name, version in packages.items() if "nccl" not in name}
        packages[f"nvidia-nccl-cu{(cuda or '12').split('.')[0]}"] = nccl
    state = State(
        "venv",
        "machine",
        "",
        "",
        "",
        target.name,
        ".".join(python["version"].split(".")[:2]),
        python["version"],
        executable,
        tuple(sorted((name, version, "") for name, version in packages.items())),
        fabric=fabric,
    )
    # The folder of everything that the ranks may load. Of several installations (~/.local), it is "/": all is accepted.
    own_nccl = [path for path in python["libraries"] if "libnccl.so" in path]
    root = os.path.commonpath([executable, python["prefix"], python["torch_file"], *own_nccl])
    elf = scan_elf(torch_folder(context), MACHINES[target.arch])

    before = ["env", *(f"{name}={value}" for name, value in (planted or {}).items())] if planted else []

    def command(program: str, arguments: Any) -> list[str]:
        start = ["-m", "torch.distributed.run"] if program == "torchrun" else []
        return [*before, executable, *start, *arguments]

    return Subject(
        Path(python["prefix"] if root == "/" else root),
        state,
        target,
        "",
        "host",
        survey=lambda _: Survey({}, FileReport(), elf),
        nodes=lambda work, _, env: host_nodes(work, command, env),
        isolated=root == "/",
    )
