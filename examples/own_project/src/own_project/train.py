"""Train a line by DistributedDataParallel. Start it with torchrun: `torchrun -m own_project.train --max-steps 100`."""

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm

from own_project.data import make_line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-steps", type=int, default=100)
    parser.add_argument("--out", type=Path, help="where rank 0 saves the model")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="such as lr=0.05")
    options = parser.parse_args()
    settings = OmegaConf.merge({"lr": 0.1, "batch_size": 32}, OmegaConf.from_dotlist(options.settings))
    gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    model = DistributedDataParallel(torch.nn.Linear(1, 1).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr)
    data = make_line(4096)
    loader = DataLoader(data, batch_size=settings.batch_size, sampler=DistributedSampler(data))
    steps = iter(tqdm(range(options.max_steps), disable=rank != 0, ncols=60))
    epoch = 0
    while True:
        loader.sampler.set_epoch(epoch)
        for (x, y), step in zip(loader, steps, strict=False):
            loss = torch.nn.functional.mse_loss(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if rank == 0 and step % 5 == 0:
                print(f"step {step} loss: {loss.item():.4f}", flush=True)
            if step == options.max_steps - 1:
                if rank == 0 and options.out:
                    options.out.parent.mkdir(parents=True, exist_ok=True)
                    torch.save(model.module.state_dict(), options.out)
                dist.barrier()
                dist.destroy_process_group()
                return
        epoch += 1


if __name__ == "__main__":
    main()
    # torch's CPU build sometimes aborts while a process that used gloo ends, and the job would count as failed.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
