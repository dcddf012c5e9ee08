"""CPU targets never get a GPU torch, CUDA targets never a CPU one: in locks, in wheels, in artifacts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab.wheels import make_recipe, make_wheel
from packaging.requirements import Requirement
from packaging.version import Version

from envbuild.base.errors import BuildError, LockError
from envbuild.layers.wheel import WheelFile
from envbuild.layers.wheels import check_wheels, wheel_arch
from envbuild.lock.format import Lock
from envbuild.lock.judge import check_accelerator, check_devices
from envbuild.lock.resolve import check_override, nccl_override, own_limits
from envbuild.recipe.load import load_recipe
from envbuild.recipe.sources import LockedPackage
from envbuild.recipe.targets import ARCHES, Target, torch_builds
from envbuild.verify.elf_files import ElfReport, scan_elf
from envbuild.verify.static_checks import check_accelerator as check_artifact


def packages(*pins: str) -> list[LockedPackage]:
    return [LockedPackage(*pin.split("=="), ("0" * 64,)) for pin in pins]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("target", "pins"),
    [
        ("cpu-x86_64", ["torch==2.13.0+cpu", "numpy==2.2.6"]),
        ("cpu-x86_64", ["torch==2.13.0+cpu", "triton==3.5"]),
        ("cpu-aarch64", ["torch==2.10.0"]),
        ("cpu-aarch64", ["numpy==2.2.6"]),
        ("cu126-x86_64", ["torch==2.7.1", "nvidia-nccl-cu12==2.26.2"]),
        ("cu126-x86_64", ["torch==2.7.1", "nvidia-cuda-runtime-cu12==12.6.77"]),
        ("cu130-aarch64", ["torch==2.12.1", "nvidia-cuda-runtime==13.0.96"]),
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
        ("cu126-x86_64", ["torch==2.10.0+cu128"], r"another CUDA \(cu128\)"),
        ("cu128-x86_64", ["torch==2.7.1", "nvidia-cuda-runtime-cu12==12.6.77"], r"\(cu126\)"),
        ("cu126-x86_64", ["torch==2.12.1", "nvidia-cuda-runtime==13.0.96"], r"\(cu130\)"),
    ],
)
def test_the_wrong_build_is_named(target: str, pins: list[str], said: str) -> None:
    with pytest.raises(LockError, match=said) as caught:
        check_accelerator(Target.parse(target), packages(*pins), "r")
    assert pins[0] in caught.value.message and caught.value.hint


CUDA_LINE = "cuda: Optional[str] = {!r}\n"


def torch_wheel(folder: Path, cuda: str | None, *libraries: str, arch: str = "x86_64") -> WheelFile:
    """A wheel called torch that says it is for `cuda`, with empty `libraries`."""
    files = {"torch/version.py": ("__version__ = '1'\n" + CUDA_LINE.format(cuda)).encode()}
    files |= {f"torch/lib/{name}": b"" for name in libraries}
    path = make_wheel(folder, "torch", tag=f"cp311-cp311-manylinux_2_28_{arch}", files=files)
    return WheelFile("torch", "1.0", path, "", 0)


BUILDS: list[tuple[str, str | None, tuple[str, ...], str | None]] = [
    ("cpu-x86_64", None, (), None),
    ("cpu-x86_64", None, ("libtorch_cpu.so",), None),
    ("cu126-x86_64", "12.6", ("libtorch_cuda.so",), None),
    ("cpu-x86_64", "12.6", ("libtorch_cuda.so",), "is built for CUDA 12.6"),
    ("cpu-x86_64", None, ("libtorch_hip.so",), "is built for GPUs"),
    ("cu126-x86_64", None, (), "has no CUDA in it"),
    ("cu126-x86_64", "12.6", (), "has no CUDA in it"),
    ("cu126-x86_64", "12.8", ("libtorch_cuda.so",), "is built for CUDA 12.8"),
]


@pytest.mark.parametrize(("target", "cuda", "libraries", "said"), BUILDS)
def test_a_torch_of_another_accelerator_is_refused_before_it_is_installed(
    tmp_path: Path, target: str, cuda: str | None, libraries: tuple[str, ...], said: str | None
) -> None:
    wheels = [torch_wheel(tmp_path, cuda, *libraries)]
    if said is None:
        check_wheels(Target.parse(target), wheels)
        return
    with pytest.raises(BuildError, match=said) as caught:
        check_wheels(Target.parse(target), wheels)
    assert wheels[0].path.name in caught.value.message and caught.value.hint


@pytest.mark.parametrize(("target", "cuda", "libraries", "said"), BUILDS)
def test_a_torch_of_another_accelerator_is_seen_in_what_was_built(
    tmp_path: Path, target: str, cuda: str | None, libraries: tuple[str, ...], said: str | None
) -> None:
    torch = tmp_path / "lib/python3.11/site-packages/torch"
    (torch / "lib").mkdir(parents=True)
    (torch / "version.py").write_text(CUDA_LINE.format(cuda))
    for name in libraries:
        (torch / "lib" / name).touch()
    check = judge_artifact(target, scan_elf(tmp_path, 62))
    assert check.status == ("fail" if said else "pass") and (said or "built for") in check.seen
    assert check.evidence["cuda"] == cuda


def judge_artifact(target: str, report: ElfReport, artifact: str = "venv") -> Any:
    state = SimpleNamespace(artifact=artifact, of_conda=artifact == "conda")
    subject: Any = SimpleNamespace(target=Target.parse(target), state=state)
    survey: Any = SimpleNamespace(elf=report)
    return check_artifact(subject, survey)


def test_a_base_image_s_torch_is_not_judged_and_conda_s_by_its_major_version(tmp_path: Path) -> None:
    assert judge_artifact("cu126-x86_64", scan_elf(tmp_path, 62)).status == "pass"
    report = ElfReport(torch=["libtorch_cuda.so", "cuda=12.9"])
    assert judge_artifact("cu126-x86_64", report, "conda").status == "pass"
    assert judge_artifact("cu126-x86_64", report).status == "fail"
    assert judge_artifact("cu130-x86_64", report, "conda").status == "fail"


def test_a_wheel_of_another_processor_is_refused(tmp_path: Path) -> None:
    wheel = torch_wheel(tmp_path, None, arch="aarch64")
    with pytest.raises(BuildError, match="is for aarch64, and cpu-x86_64 is for x86_64"):
        check_wheels(Target.parse("cpu-x86_64"), [wheel])
    check_wheels(Target.parse("cpu-aarch64"), [wheel])


def test_a_torch_that_is_no_archive_is_an_error_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "torch-1.0-py3-none-any.whl"
    path.write_bytes(b"PK\x05\x06 cut off")
    with pytest.raises(BuildError, match="not a wheel that can be read"):
        check_wheels(Target.parse("cpu-x86_64"), [WheelFile("torch", "1.0", path, "", 0)])


@given(st.sampled_from(ARCHES), st.lists(st.integers(5, 40), min_size=1, max_size=3))
def test_the_processor_is_told_from_any_platform_tag(arch: str, glibcs: list[int]) -> None:
    tags = ".".join(f"manylinux_2_{glibc}_{arch}" for glibc in glibcs)
    assert wheel_arch(f"some_pkg-1.0+x-1-cp311-abi3-{tags}.whl") == arch
    assert wheel_arch("some_pkg-1.0-py2.py3-none-any.whl") is None


@given(st.text())
def test_any_text_has_a_cuda_version_or_none(text: str) -> None:
    assert all(name in text for name in torch_builds(text))
    assert set(torch_builds(f"{text}\ncuda = '12.6'\n")) >= {"cuda"}


PINNED = ["torch==2.7.1", "nvidia-nccl-cu12==2.26.2", "numpy==2.2.6"]


@pytest.mark.parametrize(
    ("target", "table", "pins", "override", "said"),
    [
        ("cu126-x86_64", 'version = "2.27.5"', PINNED, "nvidia-nccl-cu12==2.27.5", None),
        ("cu126-x86_64", 'version = "2.26.2-1"', PINNED, "nvidia-nccl-cu12==2.26.2", None),
        (
            "cu130-x86_64",
            'version = "2.30.7"',
            ["torch==2.12.1", "nvidia-nccl-cu13==2.29.7"],
            "nvidia-nccl-cu13==2.30.7",
            None,
        ),
        ("cu126-x86_64", 'version = "2.25.1"', PINNED, "nvidia-nccl-cu12==2.25.1", "older than 2.26.2"),
        ("cu126-x86_64", 'version = "2.x"', PINNED, "nvidia-nccl-cu12==2.x", "not a version"),
        (
            "cu126-aarch64",
            'version = "2.26.2"',
            ["torch==2.6.0+cu126"],
            "nvidia-nccl-cu12==2.26.2",
            r"torch==2.6.0\+cu126 brings no nvidia-nccl-cu12",
        ),
        ("cu126-x86_64", 'version = "2.27.5"', ["tqdm==4"], "nvidia-nccl-cu12==2.27.5", "nothing here depends"),
        ("cpu-x86_64", 'version = "2.27.5"', PINNED, None, None),
        ("cu126-x86_64", 'version = "2.27.5"\nkind = "source"', PINNED, None, None),
        ("cu126-x86_64", 'version = "2.27.5"\ntargets = ["cpu-x86_64"]', PINNED, None, None),
    ],
)
def test_nccl_is_replaced_by_a_newer_wheel_or_not_at_all(
    tmp_path: Path, target: str, table: str, pins: list[str], override: str | None, said: str | None
) -> None:
    tables = "".join(f"[targets.{name}]\n" for name in {target, "cpu-x86_64"})
    plain = load_recipe(make_recipe(tmp_path / "plain", "one", [], targets=tables) / "recipe.toml")
    place = make_recipe(tmp_path, "one", [], targets=f"{tables}[layers.nccl]\n{table}\n")
    recipe, chosen = load_recipe(place / "recipe.toml"), Target.parse(target)
    assert nccl_override(recipe, chosen) == override
    same = recipe.resolution_digest(chosen) == plain.resolution_digest(chosen)
    assert same == (override is None), "locks of recipes without it stay current, others do not"
    if override is None:
        return
    pinned = Lock("one", target, "3.11", "x", "d", tuple(packages(*pins)))
    if said is None:
        check_override(recipe, chosen, pinned)
        return
    with pytest.raises(LockError, match=said) as caught:
        check_override(recipe, chosen, pinned)
    assert "recipe.toml:" in caught.value.message and caught.value.hint


ROCM = "rocm7.14.0-x86_64"


@pytest.mark.parametrize(
    ("gpus", "locked", "said"),
    [
        ([], ["rocm-bootstrap"], "no code for any GPU: its wheel is split by GPU, and no extra chooses one"),
        (["mi300x"], ["rocm-bootstrap", "amd-torch-device-gfx942"], None),
        (["gfx90a", "mi300x"], ["amd-torch-device-gfx942"], "no code for gfx90a: .*, and the lock has gfx942 alone"),
        ([], ["rocm-bootstrap", "amd-torch-device-gfx1151", "amd-torch-device-gfx115x"], None),
        (["mi300x"], ["triton-rocm"], None),
    ],
)
def test_torch_that_is_split_by_gpu_has_the_code_for_the_targets(
    gpus: list[str], locked: list[str], said: str | None, tmp_path: Path
) -> None:
    table = f'[targets."{ROCM}"]\nrequirements = ["torch==2.12.0+rocm7.14.0"]\ngpus = {json.dumps(gpus)}\n'
    loaded = load_recipe(make_recipe(tmp_path, "r", [], targets=table) / "recipe.toml")
    lock = packages("torch==2.12.0+rocm7.14.0", *(f"{name}==1" for name in locked))
    if said is None:
        check_devices(loaded, Target.parse(ROCM), lock)
        return
    with pytest.raises(LockError, match=f"recipe.toml:8:1: {ROCM}: torch has {said}") as caught:
        check_devices(loaded, Target.parse(ROCM), lock)
    extras = "device-gfx90a,device-gfx942" if gpus else "device-all"
    assert caught.value.hint == f'write torch[{extras}] in `requirements` of [targets."{ROCM}"]'


def test_a_hint_does_not_name_an_index_that_the_target_has() -> None:
    target, torch = Target.parse("cu124-x86_64"), packages("torch==2.15.0+cu132")
    for indexes, said in ((), True), (("https://download.pytorch.org/whl/cu124/",), False):
        with pytest.raises(LockError) as caught:
            check_accelerator(target, torch, "r", indexes)
        assert ("name the index" in (caught.value.hint or "")) is said


@pytest.mark.parametrize(
    ("target", "line", "limits"),
    [
        ("cu124-x86_64", "torch", ("torch<=2.6.0", "torchaudio<=2.6.0")),
        ("cu124-x86_64", "torch<2.6", ("torch<=2.5.1", "torchaudio<=2.5.1")),
        ("cu124-x86_64", "torch>=2.7", ()),
        ("cpu-x86_64", "torch", ("torch<=2.13.0", "torchaudio<=2.13.0")),
        ("rocm6.4-x86_64", "torch", ()),
    ],
)
def test_the_newest_build_for_the_target_limits_torch(target: str, line: str, limits: tuple[str, ...]) -> None:
    versions = ("2.5.1+cu124", "2.6.0+cu124", "2.7.0+cu126", "2.13.0+cpu", "2.15.0")
    files = [SimpleNamespace(requires_python="")]
    releases = [
        SimpleNamespace(version=Version(version), files=files, fits=lambda python, platform: True)
        for version in versions
    ]
    offers: Any = SimpleNamespace(releases=lambda names: {"torch": releases})
    lines = {"torch": [Requirement(line)]}
    assert own_limits(Target.parse(target), offers, lines, "3.11", "x86_64-manylinux_2_28") == limits
