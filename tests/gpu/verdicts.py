"""Steps that compare what envbuild says with what the GPU does: causes of failures, and code for GPUs in libraries."""

from __future__ import annotations

import os
from typing import Any

from .machine import APART, Context, clean_environment
from .model import Seen, Skipped, Unexpected
from .programs import run_all

# Two ranks on one GPU as one host, which NCCL refuses. Started without torchrun, whose output would hide NCCL's.
_PAIR = """
import sys, torch, torch.distributed as d
torch.cuda.set_device(0)
d.init_process_group("nccl", init_method="file://" + sys.argv[2], rank=int(sys.argv[1]), world_size=2)
d.all_reduce(torch.ones(1, device="cuda"))
torch.cuda.synchronize()
"""
# Rank 1 does not come to the second sum, and NCCL's watchdog ends rank 0.
_LATE = """
import datetime, sys, time, torch, torch.distributed as d
rank, file = int(sys.argv[1]), sys.argv[2]
torch.cuda.set_device(0)
d.init_process_group(
    "nccl", init_method="file://" + file, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=6)
)
d.all_reduce(torch.ones(1, device="cuda"))
torch.cuda.synchronize()
if rank == 1:
    time.sleep(14)
d.all_reduce(torch.ones(8, 4, device="cuda"))
torch.cuda.synchronize()
time.sleep(20)
"""
_PAIRS = (_PAIR, _LATE)
_APART = {"NCCL_HOSTID": "node{rank}", "NCCL_SOCKET_IFNAME": "=lo", **APART}
# The rule that must name the cause, with a remark; the program and its variables. _PAIRS are started as two ranks, of
# which {rank} in a variable is the number.
_FAILURES: dict[str, tuple[str, dict[str, str]]] = {
    "no-gpu": ("import torch; torch.zeros(1).cuda()", {"CUDA_VISIBLE_DEVICES": ""}),
    "gpu-ordinal": ("import torch; torch.cuda.set_device(63); torch.zeros(1).cuda()", {}),
    "gpu-memory": ("import torch; torch.empty(1 << 44, dtype=torch.uint8, device='cuda')", {}),
    "gpu-shared (two ranks on one GPU)": (_PAIR, {"NCCL_DEBUG": "WARN"}),
    "nccl-interface": (_PAIR, {"NCCL_DEBUG": "INFO", "NCCL_SOCKET_IFNAME": "=nosuch0"}),
    "nccl-timeout": (_LATE, {"NCCL_DEBUG": "WARN", **_APART}),
    "network-missing": (_PAIR, {"NCCL_DEBUG": "INFO", "NCCL_NET": "AWS Libfabric", **_APART}),
}
_OTHER_NCCL = {"NCCL_DEBUG": "INFO", "LD_PRELOAD": "{other}", **_APART}
# Ranks that do not end by themselves must not take the others' results with them.
_FAILURES_S = 35.0
# A kernel of torch's own, and one of cuBLAS.
_KERNELS = {
    "libtorch_cuda.so": "import torch; a = torch.arange(8, device='cuda'); assert (a + a).sum().item() == 56",
    "libcublas.so": "import torch; a = torch.ones(64, 64, device='cuda'); assert (a @ a).sum().item() == 64.0**3",
}


def diagnoses(context: Context) -> Seen:
    """Provoke failures at the same time, and diagnose their output."""
    from ddp_train.flight import flight_variables
    from envbuild.jobcheck.diagnose.engine import diagnose
    from envbuild.jobcheck.diagnose.read import read_logs
    from envbuild.jobcheck.diagnose.rules import load_rules

    folder, python = context.folder("diagnoses"), context.python["executable"]
    flight = folder / "flight"
    flight.mkdir(parents=True)
    failures = dict(_FAILURES)
    if context.nccl:
        failures["nccl-truncated"] = (_PAIR, _OTHER_NCCL)
    commands, owners = [], []
    for number, (name, (program, env)) in enumerate(failures.items()):
        for rank in range(2 if program in _PAIRS else 1):
            own = {key: value.format(rank=rank, other=context.nccl * rank) for key, value in env.items()}
            if program is _LATE:
                own |= flight_variables(f"{flight}/rank-", gpu=True)
            line = [python, "-c", program, str(rank), str(folder / f"meeting{number}")]
            commands.append((line, clean_environment(**own)))
            owners.append(name)
    done = run_all(commands, folder, _FAILURES_S)
    evidence: dict[str, Any] = {}
    for name in failures:
        text = "\n".join(one.text for one, owner in zip(done, owners, strict=True) if owner == name)
        found = [one.id for one in diagnose([("log", text.splitlines())], load_rules()).findings]
        evidence[name] = {"found": found, "output": text[-2000:]}
    # Which collective the late rank had not entered: the watchdog of the other one wrote its record.
    late = diagnose(read_logs([str(one) for one in flight.iterdir()]), load_rules()).findings
    evidence["flight"] = {"found": [one.id for one in late], "output": "\n".join(one.cause for one in late)}
    wanted = [*failures, "flight"]
    missed = [name for name in wanted if not any(one.startswith(name.split()[0]) for one in evidence[name]["found"])]
    if missed:
        raise Unexpected(f"`envbuild diagnose` did not name {', '.join(missed)}", evidence)
    return f"{len(wanted)} failures were named", evidence


def gpu_code(context: Context) -> Seen:
    """Run kernels of two libraries, and one by PTX alone, and compare with the code that the libraries have."""
    try:
        from envbuild.gpus import chips_named, library_runs, read_gpu_code
    except ImportError as error:
        raise Skipped(f"this envbuild does not read code for GPUs ({error})") from error
    chip = chips_named(context.python["gpus"][0]["chip"])[0]
    paths = {name: _mapped(context, name) for name in _KERNELS}
    # With this variable the driver compiles PTX and uses no other code. cuBLAS also needs torch's kernels: by PTX
    # alone, its failure would not be its own.
    jobs = [(name, "0") for name, path in paths.items() if path]
    jobs += [(name, "1") for name, _ in jobs if name == "libtorch_cuda.so"]
    lines = [[context.python["executable"], "-c", _KERNELS[name]] for name, _ in jobs]
    variables = [clean_environment(CUDA_FORCE_PTX_JIT=forced) for _, forced in jobs]
    done = run_all(list(zip(lines, variables, strict=True)), context.folder("gpu-code"))
    evidence: dict[str, Any] = {"chip": chip.name, "torch_says": context.python["codes"]}
    wrong = []
    for (name, forced), ended in zip(jobs, done, strict=True):
        with open(paths[name], "rb") as stream:
            containers = read_gpu_code(stream)
        if forced == "1":
            containers = _ptx_alone(containers)
        says, ran, what = library_runs(containers, chip), ended.code == 0, name + " by PTX alone" * (forced == "1")
        evidence[what] = {"path": paths[name], "verdict": says, "ran": ran, "output": ended.text[-800:]}
        if bool(says) != ran:
            wrong.append(f"{what}: code that runs {says or 'nowhere'}, and it {'ran' if ran else 'did not run'}")
    if wrong or not jobs:
        raise Unexpected(f"on {chip.name}, {'; '.join(wrong) or 'torch maps no library of its own'}", evidence)
    return f"{len(jobs)} verdicts on {chip.name} are what the GPU did", evidence


def _mapped(context: Context, name: str) -> str:
    return next((path for path in context.python["libraries"] if os.path.basename(path).startswith(name)), "")


def _ptx_alone(containers: Any) -> Any:
    """Return the containers with their PTX alone."""
    found = type(containers)()
    for codes, count in containers.items():
        # A container without PTX still counts: the reader's rule needs a share of all of them.
        found[tuple(code for code in codes if code.startswith("compute_")) or ("none",)] += count
    return found
