"""Every recipe that comes with envbuild: current locks without addresses, plans and verdicts for all its targets."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from envbuild.base.errors import LockError
from envbuild.cli.commands import cli
from envbuild.compat.judge import judge
from envbuild.layers.source_known import source_layers
from envbuild.lock.base import image_lock
from envbuild.lock.conda_format import parse_packages
from envbuild.lock.format import Lock
from envbuild.lock.judge import check_accelerator
from envbuild.lock.lifecycle import ensure
from envbuild.lock.resolve import nccl_package
from envbuild.lock.wheels import wheel_lock
from envbuild.locks import locked_stack
from envbuild.plan import make_plan
from envbuild.recipe.load import LoadedRecipe, load_recipe
from envbuild.recipe.targets import Target, host_arch
from envbuild.run_environment import load_environment

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
CONDA_LOCKS = sorted(RECIPES.glob("*/*.conda-lock.yml"))
LOADED = {path.parent.name: load_recipe(path) for path in sorted(RECIPES.glob("*/recipe.toml"))}
TARGETS = [(name, target) for name, one in LOADED.items() for target in one.recipe.targets]
# What was never locked: indexes or registries that the machine where locks are made does not reach.
UNLOCKED = {
    ("gh200_cu126", "cu126-aarch64"),
    ("lumi_rocm", "rocm6.4-x86_64"),
    ("pt_cu126", "cu126-aarch64"),
    ("pt_vision", "cpu-x86_64"),
}


def opened(name: str, target: str) -> tuple[LoadedRecipe, Target, Lock | None]:
    recipe, found = LOADED[name], Target.parse(target)
    state = wheel_lock(recipe, found).inspect()
    assert state.lock is None or state.fault is None, f"{state.path}: {state.fault}"
    return recipe, found, state.lock


@pytest.mark.parametrize(("name", "target"), TARGETS)
def test_a_target_is_locked_for_its_accelerator_and_planned_with_its_layers(name: str, target: str) -> None:
    recipe, found, lock = opened(name, target)
    if (name, target) in UNLOCKED or not recipe.has_wheels(found):
        assert lock is None
        return
    assert lock is not None, f"envbuild lock {name} --target {target}"
    check_accelerator(found, lock.packages, name)
    sources, hosts = source_layers(recipe, found)
    plan = make_plan(
        recipe,
        lock,
        found,
        artifact="venv",
        trainer_version="1",
        trainer_digest="t",
        sources=sources,
        host_layers=hosts,
    )
    named = {one.name for one in (*plan.sources, *plan.host_layers)}
    wanted = {one for one, table in recipe.recipe.layers.items() if table.for_target(target)}
    assert wanted - {"nccl"} <= named and plan.fabric == recipe.recipe.fabric


@pytest.mark.parametrize(("name", "target"), TARGETS)
def test_nothing_of_a_target_is_known_not_to_work(name: str, target: str) -> None:
    findings = judge(locked_stack(LOADED[name], Target.parse(target))[0])
    assert [one for one in findings if one.status in ("bad", "unknown")] == []


@pytest.mark.parametrize(("name", "target"), sorted(UNLOCKED))
def test_what_needs_another_index_says_which_and_how(tmp_path: Path, name: str, target: str) -> None:
    recipe, found, _ = opened(name, target)
    environment = load_environment({"HOME": str(tmp_path), "ENVBUILD_STORE": str(tmp_path)})
    with pytest.raises(LockError) as caught:
        ensure(wheel_lock(recipe, found), environment, locked=True, offline=True, log=print)
    (index,) = recipe.recipe.targets[target].indexes
    said = f"{caught.value.hint}"
    assert f"`envbuild lock {name} --target {target} --wheels`" in said and index in said


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*/*-*.*")), ids=lambda path: f"{path.parent.name}-{path.name}")
def test_a_lock_holds_no_address_except_that_of_a_channel(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    if path in CONDA_LOCKS:
        text, found = re.subn(r'^  url: "https://conda\.anaconda\.org/conda-forge/(linux|noarch)', "", text, flags=re.M)
        assert found
    assert not re.search(r"[a-z]+://|@[a-z0-9.-]+\.[a-z]{2,}/", text)


@pytest.mark.parametrize(
    ("name", "target", "packages", "pytorch"),
    [
        ("pt_cpu", "cpu-x86_64", 81, "2.12.0 cpu_mkl_py311_h338015a_100"),
        ("pt_cpu", "cpu-aarch64", 77, "2.12.0 cpu_generic_py311_h8ebb990_0"),
        ("pt_cuda_conda", "cu129-x86_64", 109, "2.12.0 cuda129_mkl_py311_h49b8cc7_300"),
    ],
)
def test_a_conda_environment_is_planned_from_its_lock(
    name: str, target: str, packages: int, pytorch: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--artifact", "conda", "--target", target, "--locked", "--elsewhere", "--json"]
    cli.main(["plan", name, *arguments], standalone_mode=False)
    layers = json.loads(capsys.readouterr().out)["layers"]
    assert [layer["kind"] for layer in layers] == ["conda"] * packages + ["trainer"]
    assert {layer["name"]: layer["version"] for layer in layers}["pytorch"] == pytorch
    if Target.parse(target).arch == host_arch():
        cli.main(["conda", name, "--target", target, "--locked", "--dry-run"], standalone_mode=False)
        assert len(re.findall(r"^ *\d+\. conda ", capsys.readouterr().out, re.MULTILINE)) == packages


# conda-lock and rattler read each lock and print the packages of each platform; in processes of their own, because
# rattler's threads can crash the interpreter at its end.
READERS = {
    "conda-lock": """
import pathlib, sys
from click.testing import CliRunner
from conda_lock.conda_lock import main
for kind in ("env", "explicit"):
    done = CliRunner().invoke(main, ["render", "--kind", kind, sys.argv[1]], catch_exceptions=False)
    assert done.exit_code == 0, done.output
for path in sorted(pathlib.Path().glob("conda-*.lock")):
    for line in path.read_text().splitlines():
        if line.startswith("https://"):
            print(path.stem.removeprefix("conda-"), *line.split("#"))
""",
    "rattler": """
import os, sys
from rattler import LockFile
((_, environment),) = LockFile.from_path(sys.argv[1]).environments()
for platform in environment.platforms():
    for record in environment.conda_repodata_records_for_platform(platform):
        print(platform, record.url, record.md5.hex())
sys.stdout.flush()
os._exit(0)
""",
}


@pytest.mark.parametrize("path", CONDA_LOCKS, ids=lambda path: path.parent.name)
@pytest.mark.parametrize("reader", READERS)
def test_other_tools_read_a_conda_lock(reader: str, path: Path, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", READERS[reader], path], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    own = parse_packages(path.read_text(), path.name)
    expected = {f"{platform} {one.url} {one.md5}" for platform, packages in own.items() for one in packages}
    assert set(done.stdout.splitlines()) == expected


@pytest.mark.parametrize(("name", "target"), TARGETS)
def test_locks_of_images_are_current(name: str, target: str) -> None:
    recipe, found, _ = opened(name, target)
    state = image_lock(recipe, found).inspect()
    assert state.lock is None or state.fault is None, f"{state.path}: {state.fault}"
    debian = recipe.recipe.image.base == "debian"
    assert state.lock is not None or not debian or (name, target) in UNLOCKED


@pytest.mark.parametrize(
    ("name", "target", "version"),
    [
        ("pt_cu126", "cu126-x86_64", "2.26.2"),
        ("pt_cu132", "cu132-x86_64", "2.30.7"),
        ("pt_cu132", "cu132-aarch64", "2.30.7"),
        ("gh200_cu132", "cu132-aarch64", "2.30.7"),
        ("pt_efa", "cu130-x86_64", "2.30.7"),
        ("pt_efa", "cu130-aarch64", "2.30.7"),
    ],
)
def test_the_nccl_that_comments_name_is_the_locked_one(name: str, target: str, version: str) -> None:
    recipe, found, lock = opened(name, target)
    assert lock is not None and lock.versions[nccl_package(found)] == version
    text = recipe.path.read_text()
    assert f"NCCL {version}" in text


def test_gh200_has_all_that_the_guide_pins_and_the_nodes_libfabric() -> None:
    recipe = LOADED["gh200_cu126"].recipe
    assert len(recipe.requirements) == 11 and all("==" in one for one in recipe.requirements)
    sources, hosts = source_layers(LOADED["gh200_cu126"], Target.parse("cu126-aarch64"))
    assert [host.path for host in hosts] == [f"/opt/cray/libfabric/{hosts[0].version}"]
    assert "aws-ofi-nccl" in {one.name for one in sources} and recipe.fabric == "cxi"


def test_list_and_docs_say_of_every_target_what_is_locked(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["list", "--json"], standalone_mode=False)
    listed = {row["name"]: row["locks"] for row in json.loads(capsys.readouterr().out)["recipes"]}
    assert listed["gh200_cu126"] == {"cu126-aarch64": {"wheels": False, "image": True, "builder": True}}
    for name, target in TARGETS:
        found = {"wheels": "requirements.txt", "image": "image.toml", "builder": "build.toml"}
        files = {lock: f"{target}.{ending}" for lock, ending in found.items()}
        files["conda"] = f"{Target.parse(target).accelerator}.conda-lock.yml"
        for lock, file in files.items():
            shipped = (RECIPES / name / file).is_file()
            assert listed[name][target].get(lock, False) == shipped, (name, target, lock)
    cli.main(["list"], standalone_mode=False)
    text = " ".join(capsys.readouterr().out.split())
    assert "cu126-aarch64 (not locked: wheels)" in text and "cpu-x86_64 (not locked: image)" in text
    said = {}
    for line in (RECIPES.parent / "docs/howto/locks.md").read_text().splitlines():
        if row := re.fullmatch(r"\| `(\w+)`, (.+?) \| (.*?) \| (.*?) ?\|", line):
            locked, missing = row[3].split(", "), re.findall(r"(\w+): ", row[4])
            state = dict.fromkeys(locked, True) | dict.fromkeys(missing, False)
            targets = re.findall(r"`(.+?)`", row[2]) or listed[row[1]]
            said |= {(row[1], target): state for target in targets}
    assert said == {(name, target): listed[name][target] for name, target in TARGETS}
