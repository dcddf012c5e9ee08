"""The steps of `tests/gpu/run`, in their order: what proves most comes first, because the time is limited.

tests/unit/test_gpu_run.py runs the steps that can run on CPUs.
"""

from __future__ import annotations

from .model import Step
from .training import bandwidth, facts, repeat, slim
from .verdicts import diagnoses, gpu_code
from .verification import artifact, build, one_rank, plant_fallback, plant_library, plant_nccl, plant_plugin, two_ranks

_ALL = (
    Step(
        "build",
        build,
        200,
        does="envbuild venv --offline --locked of the bundle's recipe",
        expects="a venv, whose torch the other steps try",
    ),
    Step(
        "facts",
        facts,
        60,
        does="nvidia-smi -q; the GPUs, torch and NCCL; a product of two matrices",
        expects="the exact product",
    ),
    Step(
        "two-ranks",
        two_ranks,
        150,
        does="verify with two ranks (on one GPU if there is one), each a host of its own to NCCL, and kill one",
        expects="no check fails",
    ),
    Step("one-rank", one_rank, 100, does="the same with one rank, if two could not start", expects="no check fails"),
    Step("artifact", artifact, 150, does="envbuild verify of the bundle's venv", expects="no check fails"),
    Step(
        "plant-fallback",
        plant_fallback,
        75,
        cuda_only=True,
        does="verify: fabric ib with NCCL_NET=Socket, a lock with a newer NCCL than is loaded, a floor of 1e6 GB/s",
        expects="fabric, libraries and bandwidth fail, and no other check",
    ),
    Step(
        "plant-plugin",
        plant_plugin,
        60,
        cuda_only=True,
        does="verify: fabric efa, and the plugin is missing",
        expects="launch fails alone, and its cause names the network",
    ),
    Step(
        "plant-library",
        plant_library,
        60,
        does="verify: one of torch's libraries is cut off (cuDNN, else cuBLAS; on CPUs OpenMP)",
        expects="launch fails alone, and names the library",
    ),
    Step(
        "plant-nccl",
        plant_nccl,
        75,
        cuda_only=True,
        does="verify: LD_PRELOAD of another NCCL (--nccl FILE, else one of the system)",
        expects="launch or libraries fails alone",
    ),
    Step(
        "bandwidth",
        bandwidth,
        75,
        does="torchrun -m ddp_train --bandwidth on all GPUs, else two ranks on one; products per second",
        expects="exact sums and a table",
    ),
    Step("repeat", repeat, 60, does="python -m ddp_train, twice", expects="bit-equal losses and parameters"),
    Step(
        "slim",
        slim,
        90,
        does="python -m ddp_train, with the torch and with a copy without the code for other GPUs ([slim])",
        expects="bit-equal losses and parameters",
    ),
    Step(
        "diagnoses",
        diagnoses,
        75,
        cuda_only=True,
        does="provoke failures of CUDA and NCCL",
        expects="envbuild diagnose names the cause of each",
    ),
    Step(
        "gpu-code",
        gpu_code,
        75,
        cuda_only=True,
        does="run kernels, one by PTX alone, and read the code in their libraries",
        expects="each kernel runs if envbuild says so, and only then",
    ),
)
STEPS = {step.name: step for step in _ALL}
