"""The probes of a verification on two ranks with a broken torch: exactly the check of the broken thing fails.

One job runs the probes once for each break, because the start of torch takes longer than all probes together.
"""

from __future__ import annotations

import json
import subprocess
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from envbuild.verify import training_checks
from envbuild.verify.probes import make_request

from .conftest import shared
from .test_trainer import LIMIT, TORCHRUN, environment

CHECKS = {
    "allreduce": training_checks.check_allreduce,
    "collectives": training_checks.check_collectives,
    "sampler": training_checks.check_sampler,
    "optimizer": training_checks.check_optimizer,
}
# By check, code that breaks `torch`; `all_reduce`, `broadcast`, `gather` and `scatter` are the whole functions.
BREAKS: Mapping[str, tuple[str | None, str]] = {
    "nothing": (None, "pass"),
    "all-reduce above 300,000 elements": (
        "allreduce",
        """
        def inexact(tensor, *args, **kwargs):
            all_reduce(tensor, *args, **kwargs)
            if tensor.numel() > 300_000:
                tensor[-1] += 1
        torch.distributed.all_reduce = inexact
        """,
    ),
    "all-reduce in bfloat16 and float16": (
        "allreduce",
        """
        def inexact(tensor, *args, **kwargs):
            all_reduce(tensor, *args, **kwargs)
            if tensor.dtype in (torch.bfloat16, torch.float16):
                tensor[7] *= 2
        torch.distributed.all_reduce = inexact
        """,
    ),
    "MAX is SUM": (
        "allreduce",
        """
        def summed(tensor, op=torch.distributed.ReduceOp.SUM, **kwargs):
            all_reduce(tensor, op=torch.distributed.ReduceOp.SUM if op == torch.distributed.ReduceOp.MAX else op)
        torch.distributed.all_reduce = summed
        """,
    ),
    "all-reduce without bfloat16": (
        "allreduce",
        """
        def picky(tensor, *args, **kwargs):
            if tensor.dtype == torch.bfloat16:
                raise RuntimeError("Invalid scalar type")
            all_reduce(tensor, *args, **kwargs)
        torch.distributed.all_reduce = picky
        """,
    ),
    "a broadcast that sends nothing": ("collectives", "torch.distributed.broadcast = lambda tensor, src: None"),
    "an all-gather in another order": (
        "collectives",
        "torch.distributed.all_gather = lambda parts, tensor: gather(parts[::-1], tensor)",
    ),
    "a reduce-scatter to other ranks": (
        "collectives",
        "torch.distributed.reduce_scatter = lambda result, parts: scatter(result, parts[::-1])",
    ),
    "a barrier that does not wait": ("collectives", "torch.distributed.barrier = lambda: None"),
    "set_epoch has no effect": (
        "sampler",
        "torch.utils.data.distributed.DistributedSampler.set_epoch = lambda self, epoch: None",
    ),
    "all ranks have one share": (
        "sampler",
        """
        def first(self):
            self.rank = 0
            return shares(self)
        torch.utils.data.distributed.DistributedSampler.__iter__ = first
        """,
    ),
    "SGD ignores lr": (
        "optimizer",
        """
        def fixed(self, params, lr, **kwargs):
            init(self, params, 0.01, **kwargs)
        torch.optim.SGD.__init__ = fixed
        """,
    ),
    "SGD ignores momentum": (
        "optimizer",
        """
        def fixed(self, params, lr, momentum, **kwargs):
            init(self, params, lr, **kwargs)
        torch.optim.SGD.__init__ = fixed
        """,
    ),
    "AdamW without weight decay": (
        "optimizer",
        """
        def fixed(self, params, **kwargs):
            decays(self, params, **{**kwargs, "weight_decay": 0.0})
        torch.optim.AdamW.__init__ = fixed
        """,
    ),
}
PROGRAM = """
import json, os, sys
import torch
import torch.utils.data.distributed
from ddp_train.distributed import connect
from ddp_train.ending import leave
from ddp_train.place import find_rank_info
from ddp_train.probes import run_probes
from ddp_train.report import describe_rank

all_reduce, broadcast = torch.distributed.all_reduce, torch.distributed.broadcast
gather, scatter, barrier = torch.distributed.all_gather, torch.distributed.reduce_scatter, torch.distributed.barrier
sampler, sgd = torch.utils.data.distributed.DistributedSampler, torch.optim.SGD
shares, set_epoch, init = sampler.__iter__, sampler.set_epoch, sgd.__init__
adamw, decays = torch.optim.AdamW, torch.optim.AdamW.__init__

def mend():
    torch.distributed.all_reduce, torch.distributed.broadcast = all_reduce, broadcast
    torch.distributed.all_gather, torch.distributed.reduce_scatter = gather, scatter
    torch.distributed.barrier = barrier
    sampler.__iter__, sampler.set_epoch, sgd.__init__, adamw.__init__ = shares, set_epoch, init, decays

def main():
    group = connect(find_rank_info(os.environ), "gloo")
    reports = {}
    for name, (_, code) in json.loads(sys.argv[1]).items():
        exec(code, globals())
        probes = run_probes(group, os.environ)
        mend()
        entries = group.gather({**describe_rank(group), "probes": probes})
        reports[name] = {"backend": group.backend, "ranks": entries}
    if group.leads:
        with open("reports.json", "w") as file:
            json.dump(reports, file)
    group.close()
    return 0

leave(main)
"""


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The request, and by break the report of two ranks."""

    def make(folder: Path) -> dict[str, Any]:
        request = make_request(2)
        (folder / "request.json").write_text(json.dumps(request))
        (folder / "program.py").write_text(PROGRAM)
        breaks = json.dumps({name: (check, textwrap.dedent(code)) for name, (check, code) in BREAKS.items()})
        subprocess.run(
            [*TORCHRUN, "--standalone", "--nproc-per-node=2", "program.py", breaks],
            cwd=folder,
            check=True,
            timeout=LIMIT,
            env=environment(DDP_TRAIN_PROBES=str(folder / "request.json")),
        )
        return {"request": request, "reports": json.loads((folder / "reports.json").read_text())}

    found: dict[str, Any] = shared(tmp_path_factory, "probes", make)[1]
    return found


@pytest.mark.parametrize("name", BREAKS)
def test_exactly_the_check_of_the_broken_thing_fails(name: str, probed: dict[str, Any]) -> None:
    wanted = BREAKS[name][0]
    checks = [check(probed["request"], probed["reports"][name]) for check in CHECKS.values()]
    failed = {check.name: check.seen for check in checks if check.status == "fail"}
    assert set(failed) == ({wanted} if wanted else set()), failed
