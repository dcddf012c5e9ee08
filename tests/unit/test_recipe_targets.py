"""Target names, and what follows from them."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from envbuild.base.elf import MACHINES
from envbuild.base.errors import UsageError
from envbuild.recipe.targets import Target, host_arch


@pytest.mark.parametrize(
    ("name", "cuda", "platform", "machine"),
    [
        ("cpu-x86_64", None, "x86_64-manylinux_2_28", 62),
        ("cpu-aarch64", None, "aarch64-manylinux_2_28", 183),
        ("cu118-x86_64", "11.8", "x86_64-manylinux_2_28", 62),
        ("cu130-aarch64", "13.0", "aarch64-manylinux_2_28", 183),
    ],
)
def test_parts(name: str, cuda: str | None, platform: str, machine: int) -> None:
    target = Target.parse(name)
    assert (target.name, str(target)) == (name, name)
    assert (target.family.gpu, target.version) == (cuda is not None, cuda)
    assert (target.platform("2.28"), MACHINES[target.arch]) == (platform, machine)
    assert Target.parse(name) == target


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("cpu-x86", "cpu-x86_64"),
        ("cpu_x86_64", "cpu-x86_64"),
        ("CPU-aarch64", "cpu-aarch64"),
        ("cu12.6-x86_64", "cu126-x86_64"),
        ("cu126-arm64", None),
        ("cu1260-x86_64", "cu126-x86_64"),
        ("cu١٢٦-x86_64", None),
        ("cpu-x86_64\n", "cpu-x86_64"),
        ("", None),
        ("rocm", None),
    ],
)
def test_not_a_target(name: str, meant: str | None) -> None:
    with pytest.raises(UsageError) as caught:
        Target.parse(name)
    text = caught.value.message
    assert "expected ACCELERATOR-ARCH" in text
    if meant:
        assert text.endswith(f"did you mean {meant!r}?")


@pytest.mark.parametrize(
    ("machine", "arch"), [("x86_64", "x86_64"), ("AMD64", "x86_64"), ("arm64", "aarch64"), ("riscv64", "riscv64")]
)
def test_host_arch(monkeypatch: pytest.MonkeyPatch, machine: str, arch: str) -> None:
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine=machine))
    assert host_arch() == arch
