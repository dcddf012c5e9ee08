"""Jobs in containers of podman: which images, which variables, and their container as an EDF."""

from __future__ import annotations

import subprocess
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from unit.job_plans import DIGEST, EFA_SQSH, GPU_SIF, IMAGE, MOUNTS, NCCL, PLAN, SQSH, VENV

from envbuild.base.errors import UsageError
from envbuild.exec_image import inherited
from envbuild.job_inputs import open_artifact
from envbuild.jobs.model import JobInputs, JobPlan, JobRequest
from envbuild.jobs.plan import plan_job, wanted_kinds
from envbuild.jobs.plan_checks import possible_faults
from envbuild.jobs.schedulers import SCHEDULERS
from envbuild.jobs.script import node_program
from envbuild.jobs.staging import environment_definition
from envbuild.site.settings import Site, load_site
from envbuild.verify.image_runtime import choose

LAYOUT = f"oci:/fsx/layout@{DIGEST}"


def site_of(folder: Path, runtime: str = "podman", more: str = "") -> Site:
    text = f'[scheduler]\nkind = "slurm"\n[container]\nruntime = "{runtime}"\n{more}'
    (folder / "lab.toml").write_text(text)
    return load_site({"HOME": str(folder), "USER": "ada"}, str(folder / "lab.toml"))


def test_a_recipe_has_a_sqsh_first_and_images_of_a_registry_by_podman_alone(tmp_path: Path) -> None:
    assert wanted_kinds("slurm", site_of(tmp_path)) == ("enroot", "docker", "venv", "conda")
    assert wanted_kinds("slurm", site_of(tmp_path, "podman-hpc")) == ("docker", "venv", "conda")
    request = JobRequest(current=tmp_path)
    for runtime in ("podman", "podman-hpc"):
        site = site_of(tmp_path, runtime, '[stage]\ndir = "/nvme"\n')
        plan = plan_job(request, JobInputs(IMAGE), site)
        assert (plan.runtime, plan.stage) == (runtime, "") and plan.mounts == ((str(tmp_path), str(tmp_path)),)
        assert f"{IMAGE.path}" in node_program(plan, SCHEDULERS["slurm"].launchers["srun"])
    assert plan_job(request, JobInputs(SQSH), site_of(tmp_path, "podman-hpc")).runtime == "own"
    with pytest.raises(UsageError, match="does not run images from a registry") as caught:
        plan_job(request, JobInputs(IMAGE), site_of(tmp_path, "enroot"))
    assert '[container] runtime = "podman" or "podman-hpc"' in (caught.value.hint or "")


def test_an_oci_layout_is_named_by_its_folder_and_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    opened = open_artifact(f"oci:layout@{DIGEST}", ("docker",), "cpu-x86_64", unverified=True)
    artifact = opened.artifact
    assert (artifact.path, artifact.place) == (f"oci:{tmp_path}/layout@{DIGEST}", f"{tmp_path}/layout")
    assert (artifact.recipe, artifact.digest, IMAGE.place, SQSH.place) == ("layout", DIGEST, "", SQSH.path)
    script = node_program(plan_job(JobRequest(), opened, site_of(tmp_path)), SCHEDULERS["slurm"].launchers["srun"])
    assert f'cd "$disk" && ln -s {tmp_path}/layout layout && podman pull --quiet oci:layout)' in script
    assert f'"$image")" = {DIGEST} ]' in script
    site = site_of(tmp_path, more='[paths]\nshared = "/fsx"\n')
    plan = plan_job(JobRequest(current=tmp_path), JobInputs(replace(artifact, path=LAYOUT)), site)
    assert not [fault for fault in possible_faults(plan, "x86_64") if "layout" in fault]
    with pytest.raises(UsageError, match="nodes do not see /tmp/layout"):
        plan_job(JobRequest(), JobInputs(replace(artifact, path=f"oci:/tmp/layout@{DIGEST}")), site)


# What a job has, what an image must not get from the host, and what is no variable.
GIVEN = {
    "SLURM_JOB_ID": "7",
    "NCCL_DEBUG": "a b\nSLURM_X=1",
    "PYTHONUTF8": "1",
    "RANK": "0",
    "no_proxy": "*",
    "PATH": "/usr/bin:/bin",
    "HOME": "/root",
    "LD_LIBRARY_PATH": "/x",
    "PYTHONPATH": "/x",
    "CUDA_HOME": "/x",
    "CUDA_VISIBLE_DEVICES": "1",
    "RANKS": "1",
    "ENVBUILD_STORE": "/x",
}


def test_a_container_gets_the_variables_that_envbuild_run_passes_on(tmp_path: Path) -> None:
    plan = replace(PLAN, artifact=SQSH, runtime="podman", mounts=MOUNTS)
    script = node_program(plan, SCHEDULERS["slurm"].launchers["srun"])
    start, end = script.index("env | sed"), script.index("image=/fsx/pt.sqsh")
    subprocess.run(["sh", "-euc", script[start:end]], env={**GIVEN, "job": str(tmp_path)}, check=True)
    names = set((tmp_path / "variables").read_text().split()) & GIVEN.keys()
    assert (
        names
        == inherited(GIVEN).keys()
        == {"SLURM_JOB_ID", "NCCL_DEBUG", "PYTHONUTF8", "RANK", "no_proxy"} | {"CUDA_VISIBLE_DEVICES"}
    )


def test_a_verification_takes_podman_only_if_it_is_asked_for(tmp_path: Path) -> None:
    program = tmp_path / "podman"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    variables = {"PATH": str(tmp_path)}
    assert choose("enroot", None, variables) == ("own", None, None)
    assert choose("enroot", "podman", variables) == ("podman", program, None)
    with pytest.raises(UsageError, match="unknown runtime 'podman-hpc'"):
        choose("enroot", "podman-hpc", variables)


def edf(plan: JobPlan) -> dict[str, object]:
    return tomllib.loads(environment_definition(plan))


def test_the_container_of_a_job_is_an_edf(tmp_path: Path) -> None:
    of_file = replace(
        PLAN, artifact=EFA_SQSH, runtime="pyxis", mounts=(*MOUNTS, ("/d", "/data:ro,nodev")), variables=(("A", "$B"),)
    )
    assert edf(of_file) == {
        "image": "/fsx/pt.sqsh",
        "workdir": "/fsx/me",
        "entrypoint": False,
        "mounts": ["/fsx:/fsx", "/d:/data:ro+nodev"],
        "env": {"A": "$$B"},
    }
    of_registry = replace(PLAN, artifact=replace(GPU_SIF, kind="docker", path=IMAGE.path), runtime="podman")
    found = edf(replace(of_registry, variables=NCCL, library_path=("/opt/a", "/b")))
    assert (found["image"], found["devices"]) == (IMAGE.path, ["nvidia.com/gpu=all"])
    assert found["env"] == {**dict(NCCL), "LD_LIBRARY_PATH": "/opt/a:/b"}
    assert found["annotations"] == {"com": {"hooks": {"cxi": {"enabled": "true"}}}}
    with pytest.raises(UsageError, match="runs in no container"):
        environment_definition(replace(PLAN, artifact=VENV))
