"""ROCm from its target to the job: what one row of recipe/targets.py decides."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

import pytest
from lab.wheels import make_recipe, make_wheel
from unit.job_plans import AWS, GPU_SIF, MOUNTS, PLAN, SIF
from unit.test_job_kubernetes import GPUS, ON_GPUS

from ddp_train.preflight.host import amd_gpus
from envbuild.base.errors import BuildError, LockError, RecipeError, UsageError
from envbuild.compat.judge import judge
from envbuild.compat.stack import Stack, stack_of
from envbuild.contract.state import BuiltLayer
from envbuild.doctor import machine
from envbuild.doctor.probe import Host
from envbuild.fabrics import plugin_variables
from envbuild.jobs.schedulers import render
from envbuild.jobs.schedulers.kubernetes import render_kubernetes
from envbuild.layers.source_known import source_layers
from envbuild.layers.wheel import WheelFile
from envbuild.layers.wheels import check_wheels
from envbuild.lock.conda import CondaPackage
from envbuild.lock.format import Lock
from envbuild.lock.judge import check_accelerator
from envbuild.plan import make_plan
from envbuild.recipe.load import load_recipe
from envbuild.recipe.sources import LockedPackage
from envbuild.recipe.targets import (
    ACCELERATORS,
    CUDA,
    ROCM,
    Target,
    accelerator_of,
    target_problem,
    torch_builds,
    torch_index,
)
from envbuild.verify.elf_files import scan_elf
from envbuild.verify.launch import visible_gpus
from envbuild.verify.training_checks import _wrong_build

TARGET = Target.parse("rocm6.4-x86_64")
HIP = "cuda: Optional[str] = None\nhip: Optional[str] = '6.4.43482-0f2d60242'\n"
LUMI = load_recipe(Path(__file__).resolve().parents[2] / "recipes/lumi_rocm/recipe.toml")


def packages(*pins: str) -> list[LockedPackage]:
    return [LockedPackage(*pin.split("=="), ("0" * 64,)) for pin in pins]  # type: ignore[arg-type]


def test_every_tag_has_one_family_and_every_gpu_what_others_ask_of_it() -> None:
    for one in ACCELERATORS.values():
        assert [accelerator_of(tag) for tag in one.usual] == [one] * len(one.usual)
        asked = [one.torch_field, one.torch_library, one.devices, one.visible, one.apptainer]
        asked += [one.kubernetes, one.net_plugin, one.nccl, one.wheels, one.probe]
        assert {bool(text) for text in asked} == {one.gpu}, one.name


@pytest.mark.parametrize(
    ("tag", "version"), [("rocm6.4", "6.4"), ("rocm6.2.4", "6.2.4"), ("cu126", "12.6"), ("cpu", None)]
)
def test_the_version_of_a_tag(tag: str, version: str | None) -> None:
    assert Target.parse(f"{tag}-x86_64").version == version
    assert torch_index(tag) == f"https://download.pytorch.org/whl/{tag}"


@pytest.mark.parametrize("name", ["rocm64-x86_64", "rocm6.4", "rocm-x86_64", "rocm6.4.1.2-x86_64"])
def test_what_is_no_target_of_rocm(name: str) -> None:
    assert "rocmN.N (rocm6.4)" in (target_problem(name) or "")


def test_a_name_with_a_dot_that_is_not_quoted_is_explained(tmp_path: Path) -> None:
    folder = make_recipe(tmp_path, "one", [], targets="[targets.rocm6.4-x86_64]\n")
    with pytest.raises(RecipeError, match=r'quote a name with a dot: \[targets."rocm6.N-x86_64"\]'):
        load_recipe(folder / "recipe.toml")


@pytest.mark.parametrize(
    ("target", "pins", "said"),
    [
        ("rocm6.4-x86_64", ["torch==2.9.1+rocm6.4", "pytorch-triton-rocm==3.5.1"], None),
        ("rocm6.4-x86_64", ["torch==2.9.1+rocm6.3"], r"another ROCm \(rocm6.3\)"),
        ("rocm6.4-x86_64", ["torch==2.9.1+cu126"], r"another accelerator \(cu126\)"),
        ("rocm6.4-x86_64", ["torch==2.9.1", "nvidia-nccl-cu12==2.27.5"], "another accelerator"),
        ("rocm6.4-x86_64", ["torch==2.9.1+cpu"], "needs ROCm, but .* is a CPU-only build"),
        ("cu126-x86_64", ["torch==2.9.1+rocm6.4"], r"another accelerator \(rocm6.4\)"),
        ("cpu-x86_64", ["torch==2.9.1+rocm6.4"], "is a GPU build"),
        ("cpu-x86_64", ["torch==2.9.1", "pytorch-triton-rocm==3.5.1"], "is a GPU build"),
    ],
)
def test_a_lock_of_another_accelerator_is_refused(target: str, pins: list[str], said: str | None) -> None:
    if said is None:
        check_accelerator(Target.parse(target), packages(*pins), "r")
        return
    with pytest.raises(LockError, match=said) as caught:
        check_accelerator(Target.parse(target), packages(*pins), "r")
    if target.startswith("rocm"):
        hint = caught.value.hint or ""
        assert '[targets."rocm6.4-x86_64"]' in hint and torch_index("rocm6.4") in hint


@pytest.mark.parametrize(
    ("target", "version", "libraries", "said"),
    [
        ("rocm6.4-x86_64", HIP, ("libtorch_hip.so",), None),
        ("rocm6.3-x86_64", HIP, ("libtorch_hip.so",), "is built for ROCm 6.4.43482"),
        ("rocm6.4-x86_64", HIP, (), "has no ROCm in it"),
        ("rocm6.4-x86_64", "cuda = '12.6'\n", ("libtorch_cuda.so",), "has no ROCm in it"),
        ("cu126-x86_64", HIP, ("libtorch_hip.so",), "has no CUDA in it"),
        ("cpu-x86_64", HIP, ("libtorch_hip.so",), "is built for ROCm 6.4.43482, and"),
    ],
)
def test_a_wheel_of_another_accelerator_is_refused(
    tmp_path: Path, target: str, version: str, libraries: tuple[str, ...], said: str | None
) -> None:
    files = {"torch/version.py": version.encode(), **{f"torch/lib/{n}": b"" for n in libraries}}
    path = make_wheel(tmp_path, "torch", tag="cp311-cp311-manylinux_2_28_x86_64", files=files)
    wheels = [WheelFile("torch", "1.0", path, "", 0)]
    if said is None:
        check_wheels(Target.parse(target), wheels)
        return
    with pytest.raises(BuildError, match=said):
        check_wheels(Target.parse(target), wheels)


def test_a_survey_names_hip(tmp_path: Path) -> None:
    torch = tmp_path / "lib/python3.11/site-packages/torch"
    (torch / "lib").mkdir(parents=True)
    (torch / "version.py").write_text(HIP)
    (torch / "lib/libtorch_hip.so").touch()
    assert scan_elf(tmp_path, 62).torch == ["libtorch_hip.so", "hip=6.4.43482"]
    assert torch_builds(HIP) == {"hip": "6.4.43482"}


@pytest.mark.parametrize(
    ("target", "rank", "locked", "wrong"),
    [
        ("rocm6.4-x86_64", {"torch_cuda": None, "torch_hip": "6.4.43482-0f"}, True, False),
        ("rocm6.4-x86_64", {"torch_cuda": "12.6"}, True, True),
        ("rocm6.4-x86_64", {"torch_cuda": None}, False, True),
        ("cpu-x86_64", {"torch_cuda": None, "torch_hip": "6.4.43482-0f"}, True, True),
        ("cpu-x86_64", {"torch_cuda": None, "torch_hip": "6.4.43482-0f"}, False, False),
    ],
)
def test_the_torch_that_ranks_loaded(target: str, rank: dict[str, Any], locked: bool, wrong: bool) -> None:
    assert bool(_wrong_build("rank 0", rank, Target.parse(target), locked)) == wrong


def test_the_shipped_recipe_is_planned_with_a_plugin_for_rocm() -> None:
    sources, hosts = source_layers(LUMI, TARGET)
    plugin = next(one for one in sources if one.name == "aws-ofi-nccl")
    assert "--with-rocm=/opt/rocm" in plugin.configure and "--without-cuda" in plugin.configure
    assert not [one for one in plugin.configure if "cudart-dynamic" in one and "enable" in one]
    assert not plugin.wheels and [one.name for one in hosts] == ["libfabric"]
    lock = Lock("lumi_rocm", TARGET.name, "3.11", "x", "d", tuple(packages("torch==2.9.1+rocm6.4")))
    plan = make_plan(
        LUMI, lock, TARGET, artifact="venv", trainer_version="1", trainer_digest="t", sources=sources, host_layers=hosts
    )
    assert plan.target == TARGET.name and plan.fabric == "cxi"


def test_its_stack_is_judged() -> None:
    stack = stack_of(LUMI, TARGET, None)
    assert (stack.rocm, stack.cuda, stack.nccl, stack.nccl_in) == ("6.4", None, "2.22.3", "inside")
    assert {one.status for one in judge(stack)} <= {"good", "note"}
    old = [one for one in judge(replace(stack, plugin="1.17.1")) if one.status == "bad"]
    assert [one.subject for one in old] == ["plugin"] and "1.18.0" in old[0].fix
    bare = [one for one in judge(replace(stack, plugin=None)) if one.status == "bad"]
    assert [one.subject for one in bare] == ["fabric"]
    conda = Stack("x86_64", "3.11", "2.28", rocm="6.4", torch="2.9.1", torch_origin="conda")
    assert "note" in {one.status for one in judge(conda) if one.subject == "torch"}


def test_a_build_of_conda_for_rocm_is_told_by_its_string() -> None:
    from envbuild.lock.judge import check_conda_accelerator

    def package(build: str) -> CondaPackage:
        return CondaPackage("pytorch", "2.9.1", build, "linux-64", "u", "0" * 32, "1" * 64, ())

    check_conda_accelerator(TARGET, [package("rocm_py311_0")], "r")
    for build in ("cpu_py311_0", "cuda126_py311_0"):
        with pytest.raises(LockError, match="needs ROCm"):
            check_conda_accelerator(TARGET, [package(build)], "r")


# ---- Jobs and launches.
ROCM_SIF = replace(SIF, recipe="lumi_rocm", target=TARGET.name, fabric="cxi", provider="cxi")


def test_apptainer_gets_its_option_and_slurm_the_gpus() -> None:
    plan = replace(
        PLAN, artifact=ROCM_SIF, site=AWS, runtime="apptainer", gpus_per_node=8, nproc_per_node=8, mounts=MOUNTS
    )
    text = render(plan)
    assert "apptainer exec --no-home --rocm" in text and "--gpus-per-node=8" in text
    assert "--nv" not in text and "NVIDIA_VISIBLE_DEVICES" not in text
    assert "apptainer exec --no-home --nv" in render(replace(plan, artifact=GPU_SIF))


def test_enroot_keeps_the_variable_of_devices() -> None:
    image = replace(ROCM_SIF, kind="enroot", path="/fsx/pt.sqsh")
    plan = replace(PLAN, artifact=image, site=AWS, runtime="enroot", gpus_per_node=8)
    text = render(replace(plan, mounts=MOUNTS))
    assert "${ROCR_VISIBLE_DEVICES:+--env" in text and "NVIDIA" not in text


def test_pods_ask_for_amd_s_resource() -> None:
    image = replace(ON_GPUS.artifact, target=TARGET.name, fabric="cxi", provider="cxi")
    plan = replace(ON_GPUS, artifact=image)
    text = render_kubernetes(plan)
    assert text.count("amd.com/gpu") >= 2 and "nvidia.com" not in text
    site = replace(GPUS, kubernetes=replace(GPUS.kubernetes, resources={"amd.com/gpu": "8"}))
    with pytest.raises(UsageError, match=r"\[node\] gpus already requests amd.com/gpu"):
        render_kubernetes(replace(plan, site=site))


def test_the_plugin_s_file_is_the_one_that_rccl_opens() -> None:
    layers = [BuiltLayer("aws-ofi-nccl", "1.21.1", ""), BuiltLayer("libfabric", "1.22.0", "", path="/x/libnccl-net")]
    found = {
        "NCCL_NET_PLUGIN": "/env/lib/libnccl-net-ofi.so",
        "LD_LIBRARY_PATH": "/x/libnccl-net/lib64:/x/libnccl-net/lib",
    }
    root = PurePath("/env")
    assert plugin_variables(layers, root, "2.22.3", net_plugin=CUDA.net_plugin) == found
    rocm = plugin_variables(layers, root, "2.22.3", net_plugin=ROCM.net_plugin)
    assert rocm == {**found, "NCCL_NET_PLUGIN": "/env/lib/librccl-net-ofi.so"}


# ---- Hosts.
def fake_kfd(root: Path, *simd: int) -> Path:
    for number, count in enumerate(simd):
        node = root / f"sys/class/kfd/kfd/topology/nodes/{number}"
        node.mkdir(parents=True)
        (node / "properties").write_text(f"cpu_cores_count 64\nsimd_count {count}\n")
    (root / "dev/dri").mkdir(parents=True)
    (root / "dev/kfd").touch()
    return root


def test_gpus_are_the_nodes_of_the_kernel_that_have_compute_units(tmp_path: Path) -> None:
    root = fake_kfd(tmp_path, 0, 440, 440)
    nodes = str(root / "sys/class/kfd/kfd/topology/nodes")
    assert amd_gpus(str(root / "dev/kfd"), nodes) == 2
    assert amd_gpus(str(root / "none"), nodes) == 0
    (found,) = machine.gpus(Host({"PATH": "/nowhere"}, root=root))
    assert (found.status, found.facts["gpus"]) == ("ok", ["AMD", "AMD"])
    for number in (128, 129):
        (root / f"dev/dri/renderD{number}").touch()
    assert visible_gpus({}, ROCM, root / "dev") == ["0", "1"]
    assert visible_gpus({"ROCR_VISIBLE_DEVICES": "3"}, ROCM, root / "dev") == ["3"]
