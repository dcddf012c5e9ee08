"""The job that builds an environment on a node: golden scripts, shellcheck, and values that arrive unchanged."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from lab.golden import assert_golden_case
from lab.shellcheck import shellcheck

import envbuild
from envbuild.base.errors import UsageError
from envbuild.cli.folder import conda_command, venv_command
from envbuild.jobs.build import Build, plan_build, render_build
from envbuild.jobs.model import JobRequest
from envbuild.recipe.targets import ARCHES, host_arch
from envbuild.site.jobs import ModulesTable, NodeTable, PathsTable, SchedulerTable
from envbuild.site.settings import Site
from examples import examples

GOLDEN = Path(__file__).parent / "data" / "jobs" / "builds.txt"
SITE = Site(
    "lab",
    scheduler=SchedulerTable(kind="slurm", partition="icelake", account="p1"),
    modules=ModulesTable(init="/etc/profile.d/lmod.sh", build=("python/3.11.7",), run=("cuda/12.6",)),
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
    "venv",
    "pt_cpu",
    "/home/ada/recipes/pt_cpu",
    "cpu-x86_64",
    "/fsx/ada/build/pt_cpu/cpu-x86_64/venv",
    "/fsx/tools/bin/envbuild",
)
BUNDLED = replace(VENV, bundle="/fsx/ada/bundle", tools="3.11")
BUILDS = {
    "slurm-venv": (SITE, VENV),
    "slurm-bundle": (SITE, replace(BUNDLED, options=("--faults",))),
    "slurm-conda": (replace(SITE, modules=ModulesTable()), replace(VENV, kind="conda")),
    "lsf-venv": (replace(SITE, scheduler=replace(SITE.scheduler, kind="lsf")), VENV),
    "flux-venv": (replace(SITE, scheduler=replace(SITE.scheduler, kind="flux")), VENV),
    "pbs-bundle": (GPU_SITE, replace(BUNDLED, name="gh200", target="cu126-aarch64")),
}


def _render(site: Site, build: Build) -> str:
    return render_build(plan_build(build, JobRequest(current=Path("/home/ada")), site), build)


@pytest.mark.parametrize("name", BUILDS)
def test_the_script_is_the_golden_one(name: str) -> None:
    texts = {case: _render(*build).replace(envbuild.__version__, "VERSION") for case, build in BUILDS.items()}
    assert_golden_case(name, texts, GOLDEN)


def test_shellcheck_finds_nothing(tmp_path: Path) -> None:
    for name, build in BUILDS.items():
        (tmp_path / f"{name}.sh").write_text(_render(*build))
    assert shellcheck("--shell", "bash", *sorted(tmp_path.iterdir())) == ""


_TEXT = st.text(st.characters(blacklist_categories=["Cs", "Cc"]), min_size=1, max_size=20).filter(
    lambda text: text.strip() == text and text not in (".", "..") and "/" not in text
)


@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=_TEXT, value=_TEXT, option=_TEXT)
def test_paths_and_variables_arrive_unchanged_at_a_recording_envbuild(
    tmp_path: Path, place: str, value: str, option: str
) -> None:
    tool = tmp_path / "bin $x" / "envbuild"
    log = tool.with_name("told")
    tool.parent.mkdir(exist_ok=True)
    tool.write_text('#!/bin/sh\nprintf "%s\\0" "$VALUE" "$ENVBUILD_STORE" "$@" >"$(dirname "$0")/told"\n')
    tool.chmod(0o755)
    site = Site(
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
        value,
        f"{tmp_path}/cache/envbuild",
        "venv",
        VENV.recipe,
        "--target",
        "cpu-x86_64",
        "--prefix",
        target,
        option,
        "--locked",
    ]


def test_a_module_that_cannot_be_loaded_stops_the_build(tmp_path: Path) -> None:
    init = tmp_path / "init.sh"
    init.write_text('module() { [ "$1" != load ] || [ "$2" != nosuch/1 ]; }\n')
    site = replace(SITE, modules=ModulesTable(init=str(init), build=("nosuch/1",)))
    done = subprocess.run(["bash", "-c", _render(site, VENV)], capture_output=True, text=True)
    assert done.returncode == 6
    assert "module nosuch/1 cannot be loaded" in done.stderr


def test_a_folder_that_cannot_be_said_is_called_by_the_sites_key() -> None:
    said = {"[paths] shared": Path("lab.toml")}
    site = replace(SITE, paths=PathsTable(shared="/fsx/a%b"), origins=said)
    with pytest.raises(UsageError, match=r"^\[paths\] shared of lab\.toml cannot be part of a directive"):
        _render(site, VENV)


def test_kubernetes_builds_nothing() -> None:
    site = replace(SITE, scheduler=SchedulerTable(kind="kubernetes"))
    with pytest.raises(UsageError, match="Slurm, PBS, LSF or Flux"):
        _render(site, VENV)


def test_without_a_scheduler_it_is_built_here() -> None:
    site = replace(SITE, scheduler=SchedulerTable(kind="none"))
    with pytest.raises(UsageError, match="names no scheduler") as caught:
        _render(site, VENV)
    assert "leave out --job" in (caught.value.hint or "")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A site whose sbatch, first on PATH, leaves a file `submitted`; the current folder is an empty one."""
    sbatch = tmp_path / "bin/sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(f"#!/bin/sh\necho 7 | tee {tmp_path}/submitted\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("ENVBUILD_STORE", str(tmp_path / "store"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    path = tmp_path / "lab.toml"
    path.write_text(f'[scheduler]\nkind = "slurm"\n[paths]\nshared = "{tmp_path}/fsx"\n')
    return path


@pytest.mark.parametrize("more", [(), ("--submit",), ("--bundle", "b", "--out", "job.sh")])
@pytest.mark.parametrize("command", [venv_command, conda_command], ids=["venv", "conda"])
def test_a_dry_run_prints_the_job_and_makes_and_submits_nothing(
    command: Any, more: tuple[str, ...], site: Path, tmp_path: Path
) -> None:
    given = ["pt_cpu", "--target", f"cpu-{host_arch()}", "--job", "--site", str(site), "--dry-run"]
    done = CliRunner().invoke(command, [*given, *more], catch_exceptions=False)
    assert done.exit_code == 0 and done.output.startswith("#!/bin/bash")
    kind = command.name
    assert f"--prefix {tmp_path}/fsx/build/pt_cpu/cpu-{host_arch()}/{kind} --locked" in done.output
    assert not os.listdir(tmp_path / "here") and not (tmp_path / "fsx").exists()
    assert not (tmp_path / "submitted").exists()


@pytest.mark.parametrize("option", ["--out", "--script"])
@pytest.mark.parametrize("command", [venv_command, conda_command], ids=["venv", "conda"])
def test_the_job_goes_to_out_and_the_environment_to_prefix(
    command: Any, option: str, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envbuild.build.image.plan_of", lambda *_, **__: None)
    given = ["pt_cpu", "--target", f"cpu-{host_arch()}", "--job", "--site", str(site), "--prefix", f"{tmp_path}/fsx/e"]
    done = CliRunner().invoke(command, [*given, option, "job.sh"], catch_exceptions=False)
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (0, "job.sh")
    assert f"--prefix {tmp_path}/fsx/e --locked" in Path("job.sh").read_text()


def test_one_folder_is_named_once() -> None:
    for command, words in (
        (venv_command, ["--out", "a", "--prefix", "b"]),
        (conda_command, ["--name", "a", "--prefix", "b"]),
        (conda_command, ["--name", "a", "--out", "b"]),
    ):
        done = CliRunner().invoke(command, ["pt_cpu", "--dry-run", *words])
        assert isinstance(done.exception, UsageError) and "exclude each other" in done.exception.message


def test_nodes_of_another_architecture_need_an_envbuild_of_theirs(site: Path) -> None:
    (other,) = (arch for arch in ARCHES if arch != host_arch())
    given = ["pt_cpu", "--target", f"cpu-{other}", "--job", "--site", str(site), "--dry-run"]
    refused = CliRunner().invoke(venv_command, given).exception
    assert isinstance(refused, UsageError)
    assert f"nodes of cpu-{other} cannot run the envbuild of this {host_arch()} host" in refused.message
    assert "--bundle DIR" in refused.hint
    done = CliRunner().invoke(venv_command, [*given, "--bundle", "b"], catch_exceptions=False)
    assert "exec python3.11 -m envbuild venv " in done.output
