"""Jobs whose ranks are started by `accelerate launch` and by DeepSpeed's launcher, on a real Slurm of two nodes.

DeepSpeed's launcher is what is tested of it: it starts the bundled trainer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab import slurm
from lab.jobs import Jobs
from lab.slurm import slurm_cluster

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
def jobs(tmp_path_factory: pytest.TempPathFactory, session_store: Path, launchers: Path) -> Iterator[Jobs]:
    if reason := slurm.missing():
        pytest.skip(reason)
    with slurm_cluster(tmp_path_factory.mktemp("strategies"), share=[session_store, launchers]) as cluster:
        jobs = Jobs(cluster, {"ENVBUILD_STORE": str(session_store)})
        jobs.write_site()
        yield jobs


def test_accelerate_and_deepspeed_start_the_ranks_of_both_nodes(jobs: Jobs, launchers: Path) -> None:
    script = jobs.cluster.shared / "train.py"
    script.write_text(TRAIN)
    options = ("--unverified", "--strategy")
    arguments = ("--lr", "$local_rank $$", "--module")
    first = jobs.submit(launchers, *options, "accelerate", "--name", "hf", "--script", script, arguments=arguments)
    second = jobs.submit(launchers, *options, "deepspeed", "--name", "ds")
    ended = jobs.ended(first, "hf")
    assert ended.end.state == "COMPLETED", ended.log
    told = json.loads((ended.run / "told.json").read_text())
    assert sorted(told["hosts"]) == sorted([*jobs.cluster.nodes, *jobs.cluster.nodes])
    assert told["arguments"] == list(arguments) and told["how"] == "DistributedType.MULTI_CPU"
    assert told["losses"][-1] < told["losses"][0]
    jobs.trained(jobs.ended(second, "ds"))
