"""What `envbuild job --submit` makes of kubectl's words. There is no kubectl here: its answers are those of 1.30."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from unit.job_plans import PLAN, executable

from envbuild.errors import HostError
from envbuild.jobs.submit import submit

CREATED = "service/{0}-etcd created\ndeployment.apps/{0}-etcd created\n{1}/{0} created\n"
EXISTS = 'Error from server (AlreadyExists): error when creating "j.yaml": {} "pt-cpu{}" already exists\n'
SERVICE = EXISTS.format("services", "-etcd") + EXISTS.format("deployments.apps", "-etcd")
JOB = EXISTS.format("pytorchjobs.kubeflow.org", "")


def submitted(folder: Path, printed: str, said: str = "", code: int = 0) -> str:
    (folder / "out").write_text(printed)
    (folder / "err").write_text(said)
    kubectl = f"#!/bin/sh\ncd {folder}\ncat out\ncat err >&2\nexit {code}\n"
    executable(folder / "bin/kubectl", kubectl)
    plan = replace(PLAN, scheduler="kubernetes")
    return submit(plan, Path("j.yaml"), {"PATH": f"{folder}/bin:{os.environ['PATH']}"})


@pytest.mark.parametrize(
    ("printed", "job"),
    [
        (CREATED.format("pt-cpu", "pytorchjob.kubeflow.org"), "pytorchjob.kubeflow.org/pt-cpu"),
        (CREATED.format("a", "trainjob.trainer.kubeflow.org"), "trainjob.trainer.kubeflow.org/a"),
        ("job.batch/pt-cpu created\n", "job.batch/pt-cpu"),
    ],
)
def test_the_job_is_named_and_not_the_etcd_that_comes_with_it(
    tmp_path: Path, printed: str, job: str
) -> None:
    assert submitted(tmp_path, printed) == job


def test_a_job_that_was_created_beside_an_old_etcd_is_not_hidden(tmp_path: Path) -> None:
    with pytest.raises(HostError) as caught:
        submitted(tmp_path, "pytorchjob.kubeflow.org/pt-cpu created\n", SERVICE, 1)
    assert "only a part of j.yaml" in caught.value.message
    assert "pytorchjob.kubeflow.org/pt-cpu created" in caught.value.message
    assert 'deployments.apps "pt-cpu-etcd" already exists' in caught.value.message
    assert "kubectl delete --ignore-not-found -f j.yaml" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        (SERVICE + JOB, "remove what is there, etcd too, with `kubectl delete"),
        ('error: namespaces "x" not found\n', "change the site file"),
    ],
)
def test_what_kubectl_refuses_altogether_says_what_to_do(
    tmp_path: Path, said: str, hint: str
) -> None:
    with pytest.raises(HostError) as caught:
        submitted(tmp_path, "", said, 1)
    assert caught.value.message.startswith("kubectl refuses j.yaml")
    assert said.splitlines()[-1] in caught.value.message
    assert hint in (caught.value.hint or "")
