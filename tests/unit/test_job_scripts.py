"""Scripts of all schedulers: what each looks like as a whole, and that shellcheck has nothing to say."""

from __future__ import annotations

import base64
import functools
import hashlib
import io
import os
import re
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lab.golden import assert_golden_case, read_golden_cases
from lab.shellcheck import shellcheck
from unit.job_plans import (
    AWS,
    CONDA,
    DIGEST,
    EFA_SQSH,
    GH200,
    GPU_SIF,
    IMAGE,
    LOADED,
    MODULES,
    MOUNTS,
    NCCL,
    PLAN,
    REPOSITORY,
    SIF,
    SITE,
    SQSH,
    VENV,
)

import envbuild
from envbuild.jobs.model import JobPlan
from envbuild.jobs.schedulers import render
from envbuild.site.jobs import ModulesTable, NodeTable, SchedulerTable
from envbuild.site.tables import TrustTable

GOLDEN = Path(__file__).parent / "data" / "jobs"
PBS = replace(PLAN, scheduler="pbs", launcher="mpiexec")
GPUS = replace(PLAN, nproc_per_node=8, gpus_per_node=8, cpus_per_node=96, variables=NCCL)
LSF = replace(PLAN, scheduler="lsf", launcher="blaunch")
FLUX = replace(PLAN, scheduler="flux", launcher="flux")
ON_LSF = replace(
    SITE,
    scheduler=SchedulerTable(
        kind="lsf",
        partition="gpu",
        account="p1",
        constraint="hname!=n7",
        requeue=False,
        directives=("-alloc_flags smt4",),
    ),
    node=NodeTable(gpus=4, cpus=44, memory="480"),
    modules=MODULES.modules,
)
ON_FLUX = replace(
    SITE,
    scheduler=SchedulerTable(
        kind="flux", partition="pbatch", account="p1", constraint="rack1", directives=("--urgency=20",)
    ),
    node=NodeTable(gpus=4, cpus=96),
    modules=MODULES.modules,
)
ON_GH200 = replace(
    PBS,
    site=GH200,
    artifact=replace(VENV, target="cu126-aarch64", fabric="slingshot", provider="cxi"),
    nproc_per_node=4,
    gpus_per_node=4,
    cpus_per_node=72,
    preflight=True,
    time="1-02:30:00",
    variables=(("NCCL_SOCKET_IFNAME", "hsn0,hsn1"),),
    library_path=("/opt/cray/lib64",),
)
STAGED = replace(PLAN, mounts=MOUNTS, stage="/local/nvme", stage_bytes=10**11)
PLANS: dict[str, JobPlan] = {
    "slurm-venv-srun": PLAN,
    "slurm-venv-mpirun": replace(PLAN, launcher="mpirun", preflight=True),
    "slurm-conda": replace(PLAN, artifact=CONDA, preflight=True),
    "slurm-pyxis": replace(PLAN, artifact=SQSH, runtime="pyxis", mounts=MOUNTS, preflight=True),
    "slurm-hyperpod": replace(GPUS, name="pt_efa", artifact=EFA_SQSH, runtime="pyxis", mounts=MOUNTS, site=AWS),
    "slurm-enroot": replace(GPUS, artifact=EFA_SQSH, runtime="enroot", mounts=MOUNTS, site=AWS),
    "slurm-apptainer-cpu": replace(PLAN, artifact=SIF, runtime="apptainer", mounts=MOUNTS),
    "slurm-apptainer-cuda": replace(
        GPUS,
        artifact=GPU_SIF,
        runtime="apptainer",
        mounts=(*MOUNTS, ("/data", "/data:ro")),
        variables=tuple((name, "cxi" if name == "FI_PROVIDER" else value) for name, value in NCCL),
    ),
    "slurm-podman": replace(GPUS, artifact=EFA_SQSH, runtime="podman", mounts=MOUNTS, site=AWS),
    "slurm-podman-hpc": replace(PLAN, artifact=IMAGE, runtime="podman-hpc", mounts=MOUNTS),
    "slurm-stage-podman": replace(STAGED, artifact=SQSH, runtime="podman", preflight=True),
    "pbs-podman-registry": replace(PBS, artifact=IMAGE, runtime="podman", mounts=MOUNTS),
    "pbs-podman-layout": replace(
        PBS, artifact=replace(IMAGE, path=f"oci:/fsx/it's@{DIGEST}"), runtime="podman", mounts=MOUNTS
    ),
    "slurm-stage": replace(STAGED, artifact=SIF, runtime="apptainer"),
    "slurm-stage-pyxis": replace(STAGED, artifact=SQSH, runtime="pyxis", preflight=True),
    "slurm-stage-enroot": replace(STAGED, artifact=SQSH, runtime="enroot", site=SITE),
    "slurm-stage-venv": replace(STAGED, artifact=replace(VENV, manifest=DIGEST), preflight=True, exact=True),
    "pbs-stage-conda": replace(
        PBS, artifact=replace(CONDA, manifest=DIGEST), launcher="ssh", stage="/local disk", site=MODULES, modules=LOADED
    ),
    "pbs-stage": replace(PBS, artifact=SIF, runtime="apptainer", mounts=MOUNTS, launcher="ssh", stage="/local"),
    "slurm-own": replace(PLAN, artifact=SQSH, runtime="own", mounts=MOUNTS),
    "slurm-gb200": replace(
        GPUS, preflight=True, site=replace(SITE, node=NodeTable(gpus=8, gpu_types=("gb200",))), variables=()
    ),
    "slurm-horovod": replace(PLAN, strategy="horovod", launcher="mpirun"),
    "slurm-horovod-sif": replace(
        PLAN, artifact=SIF, runtime="apptainer", mounts=MOUNTS, strategy="horovod", launcher="mpirun"
    ),
    "slurm-single": replace(PLAN, strategy="single", nodes=1, nproc_per_node=1),
    "slurm-modules": replace(PLAN, site=MODULES, modules=LOADED, variables=NCCL),
    "slurm-login-modules": replace(
        PLAN, site=replace(SITE, modules=ModulesTable(purge=False)), modules=LOADED, launcher="mpirun"
    ),
    "slurm-purge": replace(
        PLAN, site=replace(SITE, modules=ModulesTable(purge=True), origins={"[modules] purge": Path("lab.toml")})
    ),
    "slurm-exclude-slow": replace(PLAN, preflight=True, speed=True, exclude_slow=True),
    "slurm-trust": replace(
        PLAN,
        site=replace(SITE, trust=TrustTable(signers=("/etc/envbuild/ci.pub",)), files=(Path("/etc/lab.toml"),)),
        envbuild="/opt/tools/bin/envbuild",
        preflight=True,
    ),
    "slurm-etcd": replace(PLAN, rendezvous="etcd-v2", rendezvous_endpoint="etcd.example:2379"),
    "pbs-venv-mpiexec": PBS,
    "pbs-venv-ssh": replace(PBS, launcher="ssh", preflight=True),
    "pbs-venv-pbsdsh": replace(PBS, launcher="pbsdsh"),
    "pbs-gh200": ON_GH200,
    "lsf-venv-blaunch": LSF,
    "lsf-venv-ssh": replace(
        LSF, launcher="ssh", site=replace(SITE, scheduler=SchedulerTable(exclusive=False)), cpus_per_node=2
    ),
    "lsf-gpus-sif": replace(
        LSF,
        artifact=GPU_SIF,
        runtime="apptainer",
        mounts=MOUNTS,
        site=ON_LSF,
        modules=LOADED,
        preflight=True,
        nproc_per_node=4,
        gpus_per_node=4,
        cpus_per_node=44,
        time="1-02:30:01",
    ),
    "lsf-horovod": replace(LSF, strategy="horovod", launcher="mpirun"),
    "flux-venv": FLUX,
    "flux-gpus-sif": replace(
        FLUX,
        artifact=GPU_SIF,
        runtime="apptainer",
        mounts=MOUNTS,
        site=ON_FLUX,
        modules=LOADED,
        preflight=True,
        nproc_per_node=4,
        gpus_per_node=4,
        cpus_per_node=96,
        time="1-02:30:01",
    ),
    "flux-single": replace(FLUX, strategy="single", nodes=1, nproc_per_node=1),
    "pbs-sif": replace(
        PBS,
        artifact=SIF,
        runtime="apptainer",
        mounts=MOUNTS,
        launcher="ssh",
        site=replace(MODULES, scheduler=replace(MODULES.scheduler, kind="pbs", directives=("-W umask=027",))),
        modules=LOADED,
    ),
}
# A module of the artifact instead of the bundled trainer, on each scheduler.
PLANS |= {
    f"{one.scheduler}-module": replace(one, command=("-m", "pkg.train", "--lr", "0.1"), run_files=())
    for one in (PLAN, PBS, LSF, FLUX)
}
PLANS |= {
    f"{one.scheduler}-{strategy}": replace(one, strategy=strategy)
    for one, strategy in (
        (PLAN, "accelerate"),
        (PBS, "deepspeed"),
        (LSF, "accelerate"),
        (FLUX, "deepspeed"),
        (replace(PLAN, launcher="mpirun"), "deepspeed"),
    )
}


def golden_text(plan: JobPlan) -> str:
    """The script of `plan`, without the parts that differ between versions of envbuild and of zlib."""
    text = render(plan).replace(envbuild.__version__, "VERSION")
    text = re.sub(r"(?<=<<'STAGE'\n).*?(?=\nSTAGE\n)", "UEsD", text, flags=re.DOTALL)
    return re.sub(r"(?<=^# sha256 of the decoded file: )[0-9a-f]{64}$", "SHA256", text, flags=re.MULTILINE)


@functools.cache
def golden_texts(scheduler: str) -> dict[str, str]:
    return {
        name.removeprefix(f"{scheduler}-"): golden_text(plan)
        for name, plan in PLANS.items()
        if plan.scheduler == scheduler
    }


@pytest.mark.parametrize("name", PLANS)
def test_the_script_is_the_golden_one(name: str) -> None:
    scheduler, _, case = name.partition("-")
    assert_golden_case(case, golden_texts(scheduler), GOLDEN / f"{scheduler}.txt")


@pytest.mark.parametrize(
    ("gpu_types", "changes", "looks"),
    [
        (("gh200",), {}, True),
        (("h100", "gb300"), {}, True),
        (("gb200",), {"nodes": 1}, False),
        (("gb200",), {"preflight": False}, False),
        (("gb200",), {"gpus_per_node": 0}, False),
        (("gb200",), {"variables": (("NCCL_MNNVL_ENABLE", "0"),)}, False),
        (("gb200",), {"variables": (("NCCL_MNNVL_ENABLE", "2"),)}, True),
        (("b200",), {}, False),
        ((), {}, False),
    ],
)
def test_the_preflight_looks_for_channels_of_imex_where_nvlink_may_join_nodes(
    gpu_types: tuple[str, ...], changes: dict[str, Any], looks: bool
) -> None:
    plan = replace(PLANS["slurm-gb200"], site=replace(SITE, node=NodeTable(gpus=8, gpu_types=gpu_types)))
    text = render(replace(plan, **changes))
    assert ("export ENVBUILD_IMEX=/dev/nvidia-caps-imex-channels\n" in text) is looks


def test_a_job_without_restarts_has_none() -> None:
    assert '"max_restarts": 0' in render(replace(PLAN, max_restarts=0))


@pytest.mark.parametrize("name", [name for name in PLANS if "stage" in name])
def test_who_reads_a_script_can_compare_its_packed_program_with_the_readable_one(name: str, tmp_path: Path) -> None:
    text = render(PLANS[name])
    packed = base64.b64decode(text.split("<<'STAGE'\n")[1].split("\nSTAGE\n")[0])
    assert f"# sha256 of the decoded file: {hashlib.sha256(packed).hexdigest()}\n" in text
    with zipfile.ZipFile(io.BytesIO(packed)) as file:
        assert file.read("__main__.py") == b'import runpy\n\nrunpy.run_module("stage", run_name="__main__")\n'
        for entry in set(file.namelist()) - {"__main__.py"}:
            assert file.read(entry) == (Path(REPOSITORY) / "ddp_train" / entry).read_bytes()
    assert f"source is ddp_train/stage of envbuild {envbuild.__version__}" in text
    # It starts whatever the caller's variables say of Python, as with those of another Python's module.
    (tmp_path / "stage-0.zip").write_bytes(packed)
    (tmp_path / "stage.py").write_text("raise SystemExit('not this one')")
    line = next(line for line in text.splitlines() if line.endswith('-I -B "$ENVBUILD_RUN/stage-$restarts.zip"'))
    variables = {"PYTHONHOME": "/of/another", "PYTHONPATH": str(tmp_path), "PYTHONINSPECT": "1"}
    about = '{"source": "/none", "folder": "/none", "keep": 0, "number": ["N"], "interface": ""}'
    done = subprocess.run(
        ["bash", "-c", f'exec {line} "$@"', "bash", about, "stage", str(tmp_path / "run/settings-0.sh")],
        env={"PATH": os.environ["PATH"], "ENVBUILD_RUN": str(tmp_path), "restarts": "0", "N": "0", **variables},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 1 and "no image is staged: " in done.stderr, done.stderr


def test_a_table_holds_many_scripts_and_no_two_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ENVBUILD_WRITE_GOLDEN", raising=False)  # else the cases below would be written
    scripts = read_golden_cases(GOLDEN / "slurm.txt")
    assert len(scripts) == len(set(scripts.values())) > 20
    assert scripts["venv-srun"].startswith("#!/bin/bash\n#SBATCH --job-name=pt_cpu\n")
    assert scripts["login-modules"].startswith("#!/bin/bash -l\n")
    changed = scripts | {"single": scripts["single"].replace("nodes=1", "nodes=2")}
    with pytest.raises(AssertionError):
        assert_golden_case("single", changed, GOLDEN / "slurm.txt")
    with pytest.raises(AssertionError):  # a case that is gone
        assert_golden_case("venv-srun", {"venv-srun": scripts["venv-srun"]}, GOLDEN / "slurm.txt")


def test_shellcheck_finds_nothing_in_any_script(tmp_path: Path) -> None:
    for name, plan in PLANS.items():
        (tmp_path / f"{name}.sh").write_text(golden_text(plan))
    assert shellcheck("--shell", "bash", *sorted(tmp_path.iterdir())) == ""


def test_shellcheck_finds_nothing_in_the_programs_for_nodes(tmp_path: Path) -> None:
    programs = {
        render(plan).split(f"<<'{end}'\n")[1].split(f"\n{end}\n")[0]
        for plan in PLANS.values()
        for end in ("SETTINGS", "NODE", "TIDY")
        if f"<<'{end}'" in render(plan)
    }
    for number, program in enumerate(sorted(programs)):
        (tmp_path / f"{number}.sh").write_text(f"{program}\n")
    left_out = "--exclude=SC2034"  # of the settings, other programs read the variables
    assert shellcheck("--shell", "sh", left_out, *sorted(tmp_path.iterdir())) == ""


@pytest.mark.parametrize("name", PLANS)
def test_no_script_guesses_an_endpoint_or_asks_for_a_name(name: str) -> None:
    text = render(PLANS[name])
    assert "localhost" not in text
    assert "$(hostname" not in text
    assert ":=" not in text


@pytest.mark.parametrize("name", [name for name in PLANS if name.startswith("slurm-")])
def test_a_script_is_short_enough_to_be_read(name: str) -> None:
    """A container that the node itself starts, and launchers that start one process at a time, need more lines."""
    more = {"slurm-pyxis": 50, "slurm-hyperpod": 50, "slurm-enroot": 85, "slurm-horovod": 5, "slurm-horovod-sif": 35}
    more["slurm-login-modules"] = 30
    more |= {
        "slurm-exclude-slow": 20,
        "slurm-podman": 85,
        "slurm-podman-hpc": 70,
        "slurm-stage-podman": 110,
        "slurm-stage": 5,
        "slurm-stage-venv": 10,
        "slurm-stage-pyxis": 75,
        "slurm-stage-enroot": 105,
    }
    # The packed program is for machines.
    lines = [
        line for line in render(PLANS[name]).splitlines() if len(line) != 118 or not re.fullmatch(r"[\w+/=]+", line)
    ]
    assert len(lines) <= 105 + more.get(name, 0)
