"""The job that builds an environment on a node: golden scripts, shellcheck, and values that arrive unchanged."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lab.golden import assert_golden
from lab.shellcheck import shellcheck

import envbuild
from envbuild.errors import UsageError
from envbuild.jobs.build import Build, plan_build, render_build
from envbuild.jobs.plan import JobRequest
from envbuild.site.job_site import JobSite
from envbuild.site.jobs import ModulesTable, NodeTable, PathsTable, SchedulerTable

GOLDEN = Path(__file__).parent / "data" / "builds"
SITE = JobSite(
    "lab",
    scheduler=SchedulerTable(kind="slurm", partition="icelake", account="p1"),
    modules=ModulesTable(
        init="/etc/profile.d/lmod.sh", build=("python/3.11.7",), run=("cuda/12.6",)
    ),
    paths=PathsTable(shared="/fsx/ada", scratch="/scratch", cache="/fsx/cache"),
    environment={"https_proxy": "http://proxy:3128", "SSL_CERT_FILE": "/etc/ca.pem"},
)
GPU_SITE = replace(
    SITE,
    scheduler=SchedulerTable(kind="pbs", partition="workq", constraint="sales_op=none"),
    modules=ModulesTable(build=("cray-python/3.11.7", "cuda/12.6")),
    node=NodeTable(gpus=4, cpus=288),
)
VENV = Build(
    "venv", "pt_cpu", "/home/ada/recipes/pt_cpu", "cpu-x86_64", "/fsx/ada/build/pt_cpu/cpu-x86_64/venv",
    "/fsx/tools/bin/envbuild",
)  # fmt: skip
BUNDLED = replace(VENV, bundle="/fsx/ada/bundle", tools="3.11")
BUILDS = {
    "slurm-venv": (SITE, VENV),
    "slurm-bundle": (SITE, replace(BUNDLED, options=("--faults",))),
    "slurm-conda": (replace(SITE, modules=ModulesTable()), replace(VENV, kind="conda")),
    "pbs-bundle": (GPU_SITE, replace(BUNDLED, name="gh200", target="cu126-aarch64")),
}


def _render(site: JobSite, build: Build) -> str:
    return render_build(plan_build(build, JobRequest(current=Path("/home/ada")), site), build)


@pytest.mark.parametrize("name", BUILDS)
def test_the_script_is_the_golden_one(name: str) -> None:
    text = _render(*BUILDS[name]).replace(envbuild.__version__, "VERSION")
    assert_golden(text, GOLDEN / f"{name}.sh")


def test_shellcheck_finds_nothing() -> None:
    assert shellcheck("--shell", "bash", *sorted(GOLDEN.glob("*.sh"))) == ""
    assert {path.stem for path in GOLDEN.glob("*.sh")} == set(BUILDS)


_TEXT = st.text(
    st.characters(blacklist_categories=["Cs", "Cc"]), min_size=1, max_size=20
).filter(lambda text: text.strip() == text and text not in (".", "..") and "/" not in text)  # fmt: skip


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(place=_TEXT, value=_TEXT, option=_TEXT)
def test_paths_and_variables_arrive_unchanged_at_a_recording_envbuild(
    tmp_path: Path, place: str, value: str, option: str
) -> None:
    tool, log = tmp_path / "bin $x" / "envbuild", tmp_path / "log"
    tool.parent.mkdir(exist_ok=True)
    tool.write_text(f'#!/bin/sh\nprintf "%s\\0" "$VALUE" "$ENVBUILD_STORE" "$@" >{str(log)!r}\n')
    tool.chmod(0o755)
    site = JobSite(
        "lab",
        scheduler=SchedulerTable(kind="slurm"),
        paths=PathsTable(shared=str(tmp_path), cache=str(tmp_path / "cache")),
        environment={"VALUE": value},
    )
    target = str(tmp_path / place / "venv")
    build = replace(VENV, envbuild=str(tool), place=target, options=(option,))
    text = render_build(plan_build(build, JobRequest(), site), build)
    subprocess.run(["bash", "-c", text], check=True, env={"PATH": os.environ["PATH"]})
    told = log.read_text().split("\0")[:-1]
    assert told == [
        value, f"{tmp_path}/cache/envbuild", "venv", VENV.recipe, "--target", "cpu-x86_64", "--out", target,
        option, "--locked",
    ]  # fmt: skip


def test_a_module_that_cannot_be_loaded_stops_the_build(tmp_path: Path) -> None:
    init = tmp_path / "init.sh"
    init.write_text('module() { [ "$1" != load ] || [ "$2" != nosuch/1 ]; }\n')
    site = replace(SITE, modules=ModulesTable(init=str(init), build=("nosuch/1",)))
    done = subprocess.run(["bash", "-c", _render(site, VENV)], capture_output=True, text=True)
    assert done.returncode == 6
    assert "module nosuch/1 cannot be loaded" in done.stderr


def test_kubernetes_builds_nothing() -> None:
    site = replace(SITE, scheduler=SchedulerTable(kind="kubernetes"))
    with pytest.raises(UsageError, match="Slurm or PBS"):
        _render(site, VENV)
