"""What a recipe's target is made of, and what locking and building say and refuse."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from envbuild.base.errors import LockError
from envbuild.compat.stack import Stack, stack_of
from envbuild.layers.source_known import source_layers
from envbuild.lock.format import Lock, lock_file_name, render
from envbuild.lock.judge import check_stack, impossible_pins
from envbuild.lock.lifecycle import ensure, update
from envbuild.lock.wheels import wheel_lock
from envbuild.recipe.load import LoadedRecipe, load_recipe
from envbuild.recipe.sources import LockedPackage
from envbuild.recipe.targets import Target
from envbuild.run_environment import load_environment

X86, ARM = Target.parse("cu126-x86_64"), Target.parse("cu126-aarch64")


def recipe(
    folder: Path,
    layers: str = "",
    *,
    torch: str = "torch==2.7.1",
    top: str = "",
    targets: str = "[targets.cu126-x86_64]\n[targets.cu126-aarch64]\n[targets.cpu-x86_64]",
) -> LoadedRecipe:
    file = folder / "recipes" / "lab" / "recipe.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    pins = "".join(f'"{one}", ' for one in torch.split())
    file.write_text(
        'name = "lab"\ndescription = "For the lab"\npython = "3.11"\n'
        f"requirements = [{pins}]\n{top}\n{targets}\n{layers}\n"
    )
    return load_recipe(file)


def layer(name: str, version: str, more: str = "") -> str:
    return f'[layers.{name}]\nversion = "{version}"\n{more}\n'


FABRIC = layer("libfabric", "2.1.0") + layer("aws-ofi-nccl", "1.21.1")


def test_without_a_lock_the_pins_and_what_torch_is_known_to_pin_count(tmp_path: Path) -> None:
    stack = stack_of(recipe(tmp_path, FABRIC, top='fabric = "tcp-ofi"'), X86, None)
    assert stack == Stack(
        arch="x86_64",
        python="3.11",
        glibc="2.28",
        fabric="tcp-ofi",
        provider="tcp",
        cuda="12.6",
        torch="2.7.1",
        torch_origin="recipe",
        nccl="2.26.2",
        nccl_origin="pin",
        nccl_in="wheel",
        plugin="1.21.1",
        libfabric="2.1.0",
        libfabric_origin="source",
        packages=(("torch", "2.7.1"),),
    )


def test_a_lock_says_more_than_pins(tmp_path: Path) -> None:
    locked = {"torch": "2.9.1+cu126", "nvidia-nccl-cu12": "2.27.5", "Typing_Extensions": "4.12.2"}
    stack = stack_of(recipe(tmp_path, torch="torch numpy"), X86, locked)
    assert (stack.torch, stack.torch_origin) == ("2.9.1+cu126", "lock")
    assert (stack.nccl, stack.nccl_origin) == ("2.27.5", "lock")
    assert dict(stack.packages)["typing-extensions"] == "4.12.2"
    assert stack_of(recipe(tmp_path, torch="torch numpy"), X86, None).torch is None


@pytest.mark.parametrize(
    ("text", "origin", "version"),
    [
        (layer("nccl", "2.28.9-1"), "wheel", "2.28.9-1"),
        (layer("nccl", "2.28.9-1", 'kind = "source"'), "source", "2.28.9-1"),
        (layer("nccl", "2.28.9", 'targets = ["cu126-aarch64"]'), "pin", "2.26.2"),
    ],
)
def test_nccl_of_the_recipe_stands_before_torchs(tmp_path: Path, text: str, origin: str, version: str) -> None:
    stack = stack_of(recipe(tmp_path, text), X86, None)
    assert (stack.nccl, stack.nccl_origin) == (version, origin)


def test_a_cpu_target_has_no_nccl(tmp_path: Path) -> None:
    stack = stack_of(recipe(tmp_path, layer("nccl", "2.28.9")), Target.parse("cpu-x86_64"), None)
    assert stack.nccl is None and stack.cuda is None


@pytest.mark.parametrize(
    ("fabric", "options", "aws"),
    [
        ("efa", "", True),
        ("tcp-ofi", "", False),
        ("efa", 'configure = ["--disable-platform-aws"]', False),
        ("any", 'configure = ["--enable-platform-aws", "-x"]', True),
        ("any", 'configure = ["--enable-platform-aws=no"]', False),
        ("any", 'configure = ["--enable-platform-aws", "--disable-platform-aws"]', False),
    ],
)
def test_whether_the_plugin_is_for_aws(tmp_path: Path, fabric: str, options: str, aws: bool) -> None:
    layers = layer("libfabric", "2.1.0") + layer("aws-ofi-nccl", "1.21.1", options)
    loaded = recipe(tmp_path, layers, top=f'fabric = "{fabric}"')
    assert stack_of(loaded, X86, None).plugin_aws is aws
    plugin = next(one for one in source_layers(loaded, X86)[0] if one.name == "aws-ofi-nccl")
    told = [one for one in plugin.configure if one.endswith(("-aws", "-aws=no"))]
    assert (told[-1] == "--enable-platform-aws") is aws, "what is built is what is judged"


def test_conda_packages_have_other_names_and_their_solver_is_trusted(tmp_path: Path) -> None:
    locked = {"pytorch": "2.7.1", "nccl": "2.20.5", "libfabric": "2.1.0", "aws-ofi-nccl": "1.14.0"}
    stack = stack_of(recipe(tmp_path), X86, locked, conda=True)
    assert (stack.torch, stack.nccl, stack.plugin) == ("2.7.1", "2.20.5", "1.14.0")
    check_stack(recipe(tmp_path), X86, locked, None, conda=True)
    with pytest.raises(LockError, match="libfabric's tcp provider"):
        check_stack(recipe(tmp_path, top='fabric = "tcp-ofi"'), X86, locked, None, conda=True)


def test_a_pin_under_a_marker_is_none(tmp_path: Path) -> None:
    file = recipe(tmp_path).path
    text = file.read_text().replace('"torch==2.7.1"', "\"torch==2.7.1; python_version < '3'\"")
    file.write_text(text)
    assert stack_of(load_recipe(file), X86, None).torch is None


BAD = [
    (layer("libfabric", "2.1.0") + layer("aws-ofi-nccl", "1.14.0"), 'fabric = "tcp-ofi"', "1.14.2"),
    (layer("libfabric", "1.20.1") + layer("aws-ofi-nccl", "1.21.1"), 'fabric = "efa"', "libfabric 1.22.0"),
    (layer("libfabric", "1.20.1") + layer("aws-ofi-nccl", "1.21.1"), 'fabric = "cxi"', "1.21"),
    (layer("nccl", "2.25.1"), "", 'version = "2.26.2" or newer in [layers.nccl]'),
    ("", 'fabric = "efa"', "add [layers.aws-ofi-nccl] and [layers.libfabric]"),
]


@pytest.mark.parametrize(("layers", "top", "fix"), BAD)
def test_a_known_bad_pair_is_refused_before_anything_is_resolved(
    tmp_path: Path, layers: str, top: str, fix: str
) -> None:
    loaded = recipe(tmp_path, layers, top=top)
    with pytest.raises(LockError) as caught:
        update(wheel_lock(loaded, X86), load_environment(), upgrade=None, offline=True, log=print)
    assert fix in caught.value.message and "fix: " in caught.value.message
    assert caught.value.hint and "envbuild check lab --target cu126-x86_64" in caught.value.hint
    assert list(loaded.folder.iterdir()) == [loaded.path]


def write_lock(loaded: LoadedRecipe, target: Target, *pins: str) -> None:
    packages = tuple(
        LockedPackage(*pin.split("=="), ("0" * 64,))  # type: ignore[arg-type]
        for pin in pins
    )
    lock = Lock("lab", target.name, "3.11", target.platform("2.28"), loaded.resolution_digest(target), packages)
    (loaded.folder / lock_file_name(target.name)).write_text(render(lock))


def lock_of(loaded: LoadedRecipe, target: Target) -> tuple[Lock, list[str]]:
    said: list[str] = []
    kind = wheel_lock(loaded, target)
    lock = ensure(kind, load_environment(), locked=True, offline=True, log=said.append)
    return lock, said


def test_a_build_refuses_what_its_lock_and_layers_are_known_not_to_do(tmp_path: Path) -> None:
    loaded = recipe(tmp_path, FABRIC.replace("1.21.1", "1.16.3"), targets="[targets.cu130-x86_64]")
    target = Target.parse("cu130-x86_64")
    pins = ("torch==2.12.0", "nvidia-cuda-runtime==13.0.96", "nvidia-nccl-cu13==2.29.7")
    write_lock(loaded, target, *pins)
    with pytest.raises(LockError, match=r"made for CUDA 13 from 1\.17 on") as caught:
        lock_of(loaded, target)
    assert "aws-ofi-nccl 1.17.1 or newer" in caught.value.message


def test_what_is_good_is_locked_in_silence(tmp_path: Path) -> None:
    loaded = recipe(tmp_path, FABRIC, top='fabric = "tcp-ofi"')
    write_lock(loaded, X86, "nvidia-nccl-cu12==2.26.2", "torch==2.7.1")
    lock, said = lock_of(loaded, X86)
    assert lock.versions["torch"] == "2.7.1" and said == []


def test_what_is_not_known_is_said_in_a_line_each(tmp_path: Path) -> None:
    loaded = recipe(tmp_path, FABRIC.replace("1.21.1", "7.0"), torch="torch==2.5.1")
    write_lock(loaded, X86, "nvidia-nccl-cu12==7.2", "torch==2.5.1")
    said = lock_of(loaded, X86)[1]
    assert len(said) == 3 and all(line.startswith("note: cu126-x86_64: ") for line in said)
    assert [line.split(": ")[2] for line in said] == ["torch", "nccl", "plugin"]


def test_a_lock_with_a_torch_newer_than_all_rows_says_so_once(tmp_path: Path) -> None:
    loaded = recipe(tmp_path, torch="torch==7.1")
    write_lock(loaded, X86, "nvidia-nccl-cu12==7.2", "torch==7.1")
    (said,) = lock_of(loaded, X86)[1]
    assert said.startswith("note: cu126-x86_64: torch: torch 7.1 is newer than torch 2.")


def test_a_cpu_recipe_is_not_even_judged(tmp_path: Path) -> None:
    loaded = recipe(tmp_path)
    write_lock(loaded, Target.parse("cpu-x86_64"), "torch==7.1+cpu")
    assert lock_of(loaded, Target.parse("cpu-x86_64"))[1] == []
    script = (
        "import sys\nfrom envbuild.lock import wheels\n"
        "print([m for m in sys.modules if m in ('envbuild.compat.judge', 'packaging')])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "judge" not in done.stdout


GUIDE = "numpy==2.2.2 setuptools==53.0.0 sympy==1.13.1"


@pytest.mark.parametrize(
    ("torch", "said"),
    [
        ("torch==2.6.0+cu126", ""),
        ("torch==2.7.1", "torch 2.7 and newer require sympy>=1.13.3 (torch 2.7.1, sympy 1.13.1)"),
        ("torch==2.13.0", "torch 2.13 to 2.15 require setuptools>=77.0.3"),
    ],
)
def test_pins_of_a_guide_that_exclude_each_other_are_explained(tmp_path: Path, torch: str, said: str) -> None:
    told = impossible_pins(recipe(tmp_path, torch=f"{GUIDE} {torch}"), X86)
    assert (said in told and "fix: pin " in told) if said else not told


def test_a_failed_resolution_says_which_pins_cannot_be(tmp_path: Path) -> None:
    loaded = recipe(tmp_path, torch=f"{GUIDE} torch==2.7.1")
    with pytest.raises(LockError, match="cannot be resolved") as caught:
        update(wheel_lock(loaded, X86), load_environment(), upgrade=None, offline=True, log=print)
    assert "pin sympy==1.13.3 or newer" in caught.value.message


def test_constraints_are_pins_too_but_bring_nothing(tmp_path: Path) -> None:
    loaded = recipe(tmp_path, top='constraints = ["sympy==1.13.1", "torch==2.6.0"]')
    assert "sympy 1.13.1" in impossible_pins(loaded, X86)
    assert stack_of(loaded, X86, None).torch == "2.7.1"
    alone = recipe(tmp_path, torch="numpy", top='constraints = ["torch==2.6.0"]')
    assert stack_of(alone, X86, None).torch is None
