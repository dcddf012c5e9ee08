"""Steps that verify: the tried Python, the bundle's artifact, and planted faults that the checks must find."""

from __future__ import annotations

import glob
import json
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .machine import APART, TOP, Context, clean_environment, output
from .model import Seen, Skipped, Unexpected
from .programs import break_library, run_all

_NCCL_PLACES = (
    "/usr/lib/*/libnccl.so.2",
    "/usr/lib64/libnccl.so.2",
    "/usr/local/*/lib/libnccl.so.2",
    "/opt/*/lib/libnccl.so.2",
)
_NCCL_VERSION = (
    "import ctypes, sys; v = ctypes.c_int(); ctypes.CDLL(sys.argv[1]).ncclGetVersion(ctypes.byref(v)); print(v.value)"
)


def build(context: Context) -> Seen:
    """Build the bundle's recipe, whose venv is tried in place of the machine's own Pythons."""
    if not context.bundle:
        raise Skipped("no bundle is given (--bundle DIR) and none is in build/bundle: the machine's own torch is tried")
    about = _about(context)
    folder, recipe = context.folder("build"), f"{context.bundle}/recipes/{about['recipe']}"
    command = [
        *_envbuild(about),
        "venv",
        recipe,
        "--target",
        about["target"],
        "--offline",
        "--locked",
        "--no-verify",
        "--out",
        str(folder / "venv"),
    ]
    (done,) = run_all([(command, _of_bundle(context))], folder)
    if done.code != 0:
        raise Unexpected(f"{shlex.join(command)} ended with {done.code}", {"output": done.text[-4000:]})
    return f"{about['recipe']} for {about['target']}", {"bundle": about}


def _about(context: Context) -> dict[str, Any]:
    about: dict[str, Any] = json.loads((Path(context.bundle) / "bundle.json").read_text())
    return about


def _envbuild(about: dict[str, Any]) -> list[str]:
    """Return the beginning of a command of envbuild, by the Python for which the bundle has its dependencies."""
    own = f"{sys.version_info[0]}.{sys.version_info[1]}"
    python = sys.executable if about["python"] in ("", own) else f"python{about['python']}"
    return [python, "-m", "envbuild"]


def _of_bundle(context: Context) -> dict[str, str]:
    """Return the variables of the bundle's envbuild, or of the checkout's if the bundle has none."""
    own = Path(context.bundle, "envbuild")
    store, vault = f"{context.bundle}/store", f"oci:{context.bundle}"
    return clean_environment(ENVBUILD_STORE=store, ENVBUILD_VAULT=vault, PYTHONPATH=str(own if own.is_dir() else TOP))


def artifact(context: Context) -> Seen:
    """Verify the bundle's venv by the command, with the checks on its files."""
    if not context.bundle:
        raise Skipped("no bundle: there is no artifact of envbuild")
    venv = context.folder("build") / "venv"
    options = [str(venv), f"--nodes={_nodes(context)}", "--nproc-per-node=1", "--json"]
    command = [*_envbuild(_about(context)), "verify", *options]
    (done,) = run_all([(command, _of_bundle(context) | APART)], context.folder("artifact"))
    if done.code != 0:
        raise Unexpected(f"{shlex.join(command)} ended with {done.code}", {"output": done.text[-6000:]})
    receipt = json.loads(venv.with_name(f"{venv.name}.receipt.json").read_text())
    return f"{len(receipt['checks'])} checks, none failed", {"receipt": receipt}


def _verify(context: Context, step: str, nodes: int, **more: Any) -> tuple[list[str], dict[str, Any]]:
    """Return the failed checks of a verification with `nodes` × 1 ranks, and all checks as evidence."""
    try:
        from envbuild.contract.verification import VerifySettings

        from .subject import failed, verify_machine
    except ImportError as error:
        raise Skipped(f"this Python cannot import envbuild.verify ({error}); `bandwidth` trains without it") from error
    # The runner ends the step sooner.
    settings = VerifySettings(
        nodes=nodes, nproc_per_node=1, **{"epochs": 4, "timeout_s": 150, **more.pop("settings", {})}
    )
    checks = verify_machine(context, step, settings, **more)
    rows = {check.name: {"status": check.status, "seen": check.seen, "cause": check.cause} for check in checks}
    table = next((check.evidence.get("table") for check in checks if check.name == "bandwidth"), None)
    return failed(checks), {"checks": rows, "bandwidth": table}


def _expect(found: Iterable[str], wanted: Iterable[str], evidence: dict[str, Any]) -> Seen:
    """Raise Unexpected unless exactly the checks `wanted` failed."""
    rows = evidence["checks"]
    said = "; ".join(f"{name}: {rows[name]['seen'].splitlines()[0]}" for name in found)
    if set(found) != set(wanted):
        names = [", ".join(sorted(one)) or "no check" for one in (found, wanted)]
        raise Unexpected(f"{names[0]} failed, and {names[1]} should have: {said}", evidence)
    return said or f"{sum(row['status'] == 'pass' for row in rows.values())} checks passed, none failed", evidence


def _launched(context: Context) -> bool | None:
    """Return whether two ranks could be launched, None before it was tried."""
    result = context.result("two-ranks")
    checks = result.get("evidence", {}).get("checks", {})
    return checks.get("launch", {}).get("status") == "pass" if result else None


def _nodes(context: Context) -> int:
    return 1 if _launched(context) is False else 2


def two_ranks(context: Context) -> Seen:
    """Verify on two nodes, which share the GPU of a machine with one, and kill a rank."""
    found, evidence = _verify(context, "two-ranks", 2, settings={"faults": True})
    launch = evidence["checks"]["launch"]
    if "launch" in found and "Duplicate GPU" in launch["seen"] + launch["cause"]:
        raise Skipped("this NCCL does not let two ranks share a GPU")
    return _expect(found, (), evidence)


def one_rank(context: Context) -> Seen:
    """Verify with one rank and kill it, where two could not start."""
    if _launched(context):
        raise Skipped("two ranks were launched")
    found, evidence = _verify(context, "one-rank", 1, settings={"faults": True})
    return _expect(found, (), evidence)


def plant_fallback(context: Context) -> Seen:
    """The network is another one than the fabric's, NCCL older than the lock's, the bandwidth below its floor."""
    nodes = _nodes(context)
    found, evidence = _verify(
        context,
        "plant-fallback",
        nodes,
        fabric="ib",
        nccl="99.0.0",
        variables={"NCCL_NET": "Socket"},
        settings={"busbw_floor": 1e6},
    )
    return _expect(found, ["fabric", "libraries", *(["bandwidth"] if nodes > 1 else [])], evidence)


def plant_plugin(context: Context) -> Seen:
    """The fabric needs a plugin that is not there."""
    if _nodes(context) < 2:
        raise Skipped("NCCL looks for a network only between two ranks")
    missing = {"NCCL_NET_PLUGIN": "/nonexistent/libnccl-net-ofi.so"}
    found, evidence = _verify(context, "plant-plugin", 2, fabric="efa", variables=missing)
    seen = _expect(found, ["launch"], evidence)
    cause = evidence["checks"]["launch"]["cause"]
    if "NCCL did not find its network plugin" not in cause:
        raise Unexpected(f"the cause that envbuild names is another one: {cause}", evidence)
    return seen


def plant_library(context: Context) -> Seen:
    """One of torch's libraries is cut off, as after a partial copy."""
    folder = context.folder("plant-library") / "broken"
    library = break_library(context, folder)
    if library is None:
        raise Skipped("torch has its libraries from elsewhere than its own packages")
    # As a part of the subject, because a verification drops the caller's PYTHONPATH.
    found, evidence = _verify(context, "plant-library", _nodes(context), planted={"PYTHONPATH": str(folder)})
    evidence["library"] = library
    seen = _expect(found, ["launch"], evidence)
    cause = evidence["checks"]["launch"]["cause"]
    if library not in cause:
        raise Unexpected(f"the cause that envbuild names is not {library}: {cause}", evidence)
    return seen


def plant_nccl(context: Context) -> Seen:
    """Another NCCL than torch's is loaded first."""
    path, version = _other_nccl(context)
    found, evidence = _verify(context, "plant-nccl", _nodes(context), env={"LD_PRELOAD": path})
    evidence |= {"preloaded": path, "preloaded_version": version}
    # An older one may lack functions that torch needs, so that the ranks cannot start.
    return _expect(found, ["launch" if "launch" in found else "libraries"], evidence)


def _other_nccl(context: Context) -> tuple[str, str]:
    """Return path and version of an NCCL with another version than that of torch. Raises Skipped without one."""
    loaded = context.python["nccl"]
    for path in [context.nccl] if context.nccl else sorted(one for place in _NCCL_PLACES for one in glob.glob(place)):
        number = output([sys.executable, "-c", _NCCL_VERSION, path], 20).strip()
        version = ".".join(str(int(number) // part % 100) for part in (10000, 100, 1)) if number else loaded
        if version != loaded:
            return path, version
    raise Skipped(f"this machine has no other NCCL than {loaded}; give one: --nccl FILE")
