"""Distributed training that verifies an environment: DDP over gloo or NCCL, with resumable snapshots.

Start it with `torchrun … -m ddp_train TOTAL_EPOCHS SAVE_EVERY`, or with `python -m ddp_train …` as one process
without a process group. Importing this package does not import torch.
"""
