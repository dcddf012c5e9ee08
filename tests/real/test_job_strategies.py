"""Jobs whose ranks are started by `accelerate launch` and by DeepSpeed's launcher, on a real Slurm of two nodes.

DeepSpeed has no wheel on its index, so the environment gets one that is built from its sources without its compiled
operations, as docs/howto/jobs.md tells. Its launcher is what is tested: it starts the bundled trainer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lab import slurm
from lab.jobs import Jobs
from lab.slurm import slurm_cluster
from lab.wheels import make_recipe
from real.conftest import Command, compiled_once

from envbuild.recipe.targets import host_arch

NAME = "launchers"
TORCH = 'requirements = ["torch==2.13.0+cpu"]\nindexes = ["https://download.pytorch.org/whl/cpu"]\n'
DEEPSPEED = "deepspeed==0.19.8"
TRAIN = """\
import json, os, socket, sys
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
x = torch.randn(64, 4).chunk(accelerator.num_processes)[accelerator.process_index]
losses = []
for _ in range(5):
    loss = model(x).sub(x.sum(1, keepdim=True)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
hosts = gather_object([socket.gethostname()])
if accelerator.is_main_process:
    told = {"losses": losses, "hosts": hosts, "arguments": sys.argv[1:], "how": str(accelerator.distributed_type)}
    with open(os.path.join(os.environ["ENVBUILD_RUN"], "told.json"), "w") as file:
        json.dump(told, file)
accelerator.end_training()
"""


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory, session_store: Path) -> Iterator[Jobs]:
    if reason := slurm.missing():
        pytest.skip(reason)
    if host_arch() != "x86_64":
        pytest.skip("the recipe of this test names the x86_64 build of PyTorch")
    with slurm_cluster(tmp_path_factory.mktemp("strategies"), share=[session_store]) as cluster:
        jobs = Jobs(cluster, {"ENVBUILD_STORE": str(session_store)})
        jobs.write_site()
        yield jobs


@pytest.fixture(scope="module")
def venv(jobs: Jobs, session_store: Path, pt_cpu: dict[str, Any]) -> Path:
    """An environment with both launchers, which the nodes see."""
    wheels = jobs.cluster.folder / "wheels"
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", wheels, DEEPSPEED]
    subprocess.run(pip, check=True, env={**os.environ, "DS_BUILD_OPS": "0"})
    links = f"{os.environ.get('PIP_FIND_LINKS', '')} {wheels}".strip()
    command = Command(jobs.cluster.shared, {"ENVBUILD_STORE": str(session_store), "PIP_FIND_LINKS": links})
    recipe = make_recipe(
        jobs.cluster.shared, NAME, ["accelerate==1.15.0", DEEPSPEED], targets=f"[targets.cpu-x86_64]\n{TORCH}"
    )
    return compiled_once(Path(command.json("venv", recipe, "--no-verify")["path"]), Path(pt_cpu["path"]))


def test_accelerate_and_deepspeed_start_the_ranks_of_both_nodes(jobs: Jobs, venv: Path) -> None:
    script = jobs.cluster.shared / "train.py"
    script.write_text(TRAIN)
    options = ("--unverified", "--strategy")
    arguments = ("--lr", "$local_rank $$", "--module")
    first = jobs.submit(venv, *options, "accelerate", "--name", "hf", "--script", script, arguments=arguments)
    second = jobs.submit(venv, *options, "deepspeed", "--name", "ds")
    ended = jobs.ended(first, "hf")
    assert ended.end.state == "COMPLETED", ended.log
    told = json.loads((ended.run / "told.json").read_text())
    assert sorted(told["hosts"]) == sorted([*jobs.cluster.nodes, *jobs.cluster.nodes])
    assert told["arguments"] == list(arguments) and told["how"] == "DistributedType.MULTI_CPU"
    assert told["losses"][-1] < told["losses"][0]
    jobs.trained(jobs.ended(second, "ds"))
