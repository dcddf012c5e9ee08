"""CPU targets never get a GPU torch, CUDA targets never a CPU one."""

import pytest

from envbuild.errors import LockError
from envbuild.lock.accelerator import check_accelerator
from envbuild.lock.format import LockedPackage
from envbuild.recipe.targets import Target


def packages(*pins: str) -> list[LockedPackage]:
    return [LockedPackage(*pin.split("=="), ("0" * 64,)) for pin in pins]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("target", "pins"),
    [
        ("cpu-x86_64", ["torch==2.13.0+cpu", "numpy==2.2.6"]),
        ("cpu-aarch64", ["torch==2.10.0"]),
        ("cpu-aarch64", ["numpy==2.2.6"]),
        ("cu126-x86_64", ["torch==2.7.1", "nvidia-nccl-cu12==2.26.2"]),
        ("cu126-aarch64", ["torch==2.9.0+cu126"]),
    ],
)
def test_a_fitting_build_passes(target: str, pins: list[str]) -> None:
    check_accelerator(Target.parse(target), packages(*pins), "r")


@pytest.mark.parametrize(
    ("target", "pins", "said"),
    [
        ("cpu-x86_64", ["torch==2.13.0", "nvidia-cublas==13.1", "triton==3.5"], "is a GPU build"),
        ("cpu-x86_64", ["torch==2.13.0+cu130"], "is a GPU build"),
        ("cpu-aarch64", ["torch==2.11.0", "cuda-bindings==13.0"], "is a GPU build"),
        ("cu126-aarch64", ["torch==2.10.0"], "is a CPU-only build"),
        ("cu126-aarch64", ["torch==2.10.0+cpu"], "is a CPU-only build"),
        ("cu126-x86_64", ["torch==2.10.0+cu128"], "built for another CUDA"),
    ],
)
def test_the_wrong_build_is_named(target: str, pins: list[str], said: str) -> None:
    with pytest.raises(LockError, match=said) as caught:
        check_accelerator(Target.parse(target), packages(*pins), "r")
    assert pins[0] in caught.value.message and caught.value.hint
