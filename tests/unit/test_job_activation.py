"""The environment that a job's interpreter sees is the activated one."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

from envbuild.jobs.model import JobArtifact, JobPlan
from envbuild.jobs.node_program import enter
from envbuild.site.settings import Site as JobSite

_PYTHON = '#!/bin/sh\necho "$CONDA_PREFIX|$VIRTUAL_ENV|$FROM_PACKAGE|$(command -v tool)|$#|$2"\n'


def _plan(kind: str, folder: Path) -> JobPlan:
    artifact = JobArtifact(
        kind="conda" if kind == "conda" else "venv",
        path=str(folder),
        digest="",
        recipe="r",
        target="cpu-x86_64",
        python=str(folder / "bin/python"),
    )
    return JobPlan(
        name="r", scheduler="slurm", artifact=artifact, site=JobSite("lab"), runtime="folder", launcher="srun",
        strategy="ddp", nodes=1, nproc_per_node=1, command=(), work=str(folder.parent),
    )  # fmt: skip


def _run(plan: JobPlan) -> list[str]:
    folder = Path(plan.artifact.path)
    for name, text in (("python", _PYTHON), ("tool", "#!/bin/sh\n")):
        file = folder / "bin" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)
    text = f"set -eu\nset -- train.py 'a $b'\n{enter(plan)}"
    done = subprocess.run(["sh", "-c", text], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().split("|")


def test_a_conda_environments_activation_scripts_are_run_by_bash(tmp_path: Path) -> None:
    folder = tmp_path / "with space"
    scripts = folder / "etc/conda/activate.d"
    scripts.mkdir(parents=True)
    (scripts / "a.sh").write_text("echo noise; [[ -n $CONDA_PREFIX ]] && export FROM_PACKAGE=first")
    (scripts / "b.sh").write_text('export FROM_PACKAGE="$FROM_PACKAGE+$unset_variable"; false')
    found = _run(_plan("conda", folder))
    assert found == [str(folder), "", "first+", str(folder / "bin/tool"), "2", "a $b"]


def test_without_scripts_the_prefix_and_path_are_set(tmp_path: Path) -> None:
    folder = tmp_path / "it's"
    found = _run(_plan("conda", folder))
    assert found == [str(folder), "", "", str(folder / "bin/tool"), "2", "a $b"]


def test_a_venv_is_first_on_the_path_of_what_a_job_starts(tmp_path: Path) -> None:
    folder = tmp_path / "venv"
    assert _run(_plan("venv", folder)) == ["", str(folder), "", str(folder / "bin/tool"), "2", "a $b"]


def test_a_container_activates_itself(tmp_path: Path) -> None:
    plan = _plan("venv", tmp_path)
    inside = replace(plan, runtime="pyxis", artifact=replace(plan.artifact, python="/opt/env/bin/python"))
    assert enter(inside) == 'exec /opt/env/bin/python "$@"\n'
