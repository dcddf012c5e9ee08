"""Scripts of jobs are written and handed over: what the scheduler's command is told, and what cannot be written."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from unit.job_plans import PLAN, executable

from envbuild.base.errors import EnvbuildError, HostError, UsageError
from envbuild.cli.folder import venv_command
from envbuild.jobs.schedulers import render
from envbuild.jobs.submit import submit, submit_script, write_script

# As in a step of a job that runs; values do not matter.
OF_A_JOB = (
    "SLURM_JOB_ID",
    "SLURM_MEM_PER_CPU",
    "SLURM_RESTART_COUNT",
    "SLURM_CPU_BIND",
    "SLURM_EXPORT_ENV",
    "SLURM_CONF_X",
    "SLURMD_NODENAME",
    "PBS_JOBID",
    "PBS_JOBNAME",
    "PBS_NODEFILE",
    "PBS_NODENUM",
    "PBS_O_WORKDIR",
    "PBS_ENVIRONMENT",
    "PBS_ARRAY_INDEX",
    "PBS_QUEUE",
    "LSB_JOBID",
    "LSB_DJOB_HOSTFILE",
    "LSB_MCPU_HOSTS",
    "LS_SUBCWD",
    "FLUX_JOB_ID",
    "FLUX_TASK_RANK",
    "PMIX_RANK",
    "PMI_RANK",
    "PALS_RANKID",
    "OMPI_COMM_WORLD_RANK",
)
OF_THE_USER = (
    "SLURM_CONF",
    "SLURM_CLUSTERS",
    "SLURM_JWT",
    "SBATCH_ACCOUNT",
    "SBATCH_EXPORT",
    "SRUN_CPUS_PER_TASK",
    "LSB_DEFAULTQUEUE",
    "LSF_ENVDIR",
    "FLUX_URI",
    "PBS_SERVER",
    "PBS_DEFAULT",
    "PBS_CONF_FILE",
    "PBS_EXEC",
    "PBS_HOME",
    "PBS_PRIMARY",
    "PMIX_MCA_gds",
    "OMPI_MCA_btl",
    "MY_SLURM_JOB_ID",
    "LD_LIBRARY_PATH",
)


@pytest.mark.parametrize(("scheduler", "command"), [("slurm", "sbatch"), ("pbs", "qsub")])
def test_a_job_that_is_submitted_from_inside_of_another_hears_nothing_of_that_one(
    tmp_path: Path, scheduler: Any, command: str
) -> None:
    executable(tmp_path / "bin" / command, '#!/bin/sh\nenv >"$HOME/env"\necho 7\n')
    plan = replace(PLAN, scheduler=scheduler, work=str(tmp_path))
    told = dict.fromkeys(OF_A_JOB + OF_THE_USER, "x")
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    script = tmp_path / "job"
    assert submit(plan, script, {**told, "PATH": path, "HOME": str(tmp_path)}) == "7"
    names = {line.partition("=")[0] for line in (tmp_path / "env").read_text().splitlines()}
    assert names & set(told) == set(OF_THE_USER)


# Printed by Slurm 22.05 without its controller, and without a configuration; by OpenPBS' source (src/cmds/qsub.c).
NO_SERVER = [
    ("slurm", "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)"),
    ("slurm", "sbatch: fatal: Could not establish a configuration source"),
    ("pbs", "qsub: cannot connect to server pbs01 (errno=15010)"),
]
REFUSED = "sbatch: error: invalid partition specified: gpu"


def refused(tmp_path: Path, scheduler: Any, said: str, *, named: bool = False) -> HostError:
    """How a job ends whose scheduler says `said` ("": is not there); in a folder of runs that is not there either."""
    if said:
        for command in ("sbatch", "qsub"):
            executable(tmp_path / "bin" / command, f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
    plan = replace(PLAN, scheduler=scheduler, work=str(tmp_path / "fsx/me"))
    script = tmp_path / "job.sh" if named else tmp_path / "fsx/me/pt_cpu.job"
    with pytest.raises(HostError) as caught:
        submit_script(plan, "text", script, {"PATH": f"{tmp_path}/bin:/nowhere"}, "", named=named)
    return caught.value


@pytest.mark.parametrize(("scheduler", "said"), [*NO_SERVER, ("slurm", REFUSED), ("slurm", "")])
def test_a_job_that_was_not_submitted_leaves_nothing_behind(tmp_path: Path, scheduler: str, said: str) -> None:
    refused(tmp_path, scheduler, said)
    assert [one for one in os.listdir(tmp_path) if one != "bin"] == []


def test_a_script_that_was_there_is_there_again_and_a_named_one_stays(tmp_path: Path) -> None:
    (tmp_path / "fsx/me").mkdir(parents=True)
    before = "# envbuild 1.0: the job before\n"
    (tmp_path / "fsx/me/pt_cpu.job").write_text(before)
    refused(tmp_path, "slurm", REFUSED)
    assert (tmp_path / "fsx/me/pt_cpu.job").read_text() == before
    assert os.listdir(tmp_path / "fsx/me") == ["pt_cpu.job"]
    refused(tmp_path, "slurm", REFUSED, named=True)
    assert (tmp_path / "job.sh").read_text() == "text"


def test_a_script_that_somebody_wrote_is_not_overwritten_and_one_of_envbuild_is(tmp_path: Path) -> None:
    executable(tmp_path / "bin/sbatch", "#!/bin/sh\necho 7\n")
    plan, script, env = replace(PLAN, work=str(tmp_path)), tmp_path / "pt_cpu.sbatch", {"PATH": f"{tmp_path}/bin:/bin"}
    for text in (b"#!/bin/bash\nsrun python train.py\n", b"#!/bin/bash\n# caf\xe9\n"):
        script.write_bytes(text)
        with pytest.raises(UsageError, match="was not written by envbuild"):
            submit_script(plan, render(plan), script, env, "", named=False)
        assert script.read_bytes() == text
    for named in (True, False):
        assert submit_script(plan, render(plan), script, env, "", named=named) == "7"
        assert script.read_text() == render(plan)


@pytest.mark.parametrize(("scheduler", "said"), [*NO_SERVER, ("slurm", "")])
def test_a_scheduler_that_does_not_answer_is_not_blamed_on_the_site_file(
    tmp_path: Path, scheduler: str, said: str
) -> None:
    error = refused(tmp_path, scheduler, said)
    assert "site file" not in f"{error.message} {error.hint}"
    assert "login node" in (error.hint or "")
    assert "site file" in (refused(tmp_path, scheduler, REFUSED).hint or "")


@pytest.mark.parametrize(("place", "error"), [("", UsageError), ("file/x.sh", HostError), ("n" * 300, HostError)])
def test_a_script_that_cannot_be_written_is_an_error_with_what_to_change(
    tmp_path: Path, place: str, error: type[EnvbuildError]
) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(error, match=str(tmp_path)) as caught:
        write_script("text", tmp_path / place, "choose another file with --out")
    assert caught.value.hint == "choose another file with --out"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize(
    ("shared", "more"), [("{}", ["--out", "{}"]), ("{}", ["--out", "{}/file/x.sh"]), ("{}/file", ["--submit"])]
)
def test_so_is_one_of_a_job_that_builds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: str, more: list[str]
) -> None:
    monkeypatch.setattr("envbuild.build.image.plan_of", lambda *_, **__: None)  # of which this is not
    (tmp_path / "file").write_text("kept")
    (tmp_path / "sbatch").write_text("#!/bin/sh\nexit 1\n")  # also where no Slurm is installed
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    site = tmp_path / "lab.toml"
    site.write_text(f'[scheduler]\nkind = "slurm"\n[paths]\nshared = "{shared.format(tmp_path)}"\n')
    line = ["pt_minimal", "--target", "cpu-x86_64", "--job", "--site", str(site)]
    done = CliRunner().invoke(venv_command, [*line, *(one.format(tmp_path) for one in more)])
    assert isinstance(done.exception, EnvbuildError), done
    assert done.exception.message.startswith(str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["file", "lab.toml", "sbatch"]


def test_a_build_whose_scheduler_does_not_answer_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envbuild.build.image.plan_of", lambda *_, **__: None)
    executable(tmp_path / "bin/sbatch", f"#!/bin/sh\necho '{NO_SERVER[0][1]}' >&2\nexit 1\n")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    site = tmp_path / "lab.toml"
    site.write_text(f'[scheduler]\nkind = "slurm"\n[paths]\nshared = "{tmp_path}/fsx"\n')
    line = ["pt_minimal", "--target", "cpu-x86_64", "--job", "--submit", "--site", str(site)]
    done = CliRunner().invoke(venv_command, line)
    assert isinstance(done.exception, HostError), done
    assert "site file" not in (done.exception.hint or "")
    assert sorted(os.listdir(tmp_path)) == ["bin", "lab.toml"]
