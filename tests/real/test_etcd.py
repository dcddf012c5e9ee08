"""The processes that manifests of `envbuild job` start, on two hosts: rendezvous by c10d, and by a real etcd.

There is no Kubernetes here. The hosts are two nodes of the lab's cluster with the names that pods would have, and what
the operators add to a pod (PET_… and the pod's address) is emulated by tests/lab/manifests.py.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from lab import etcd as lab_etcd
from lab import slurm
from lab.etcd import etcd
from lab.manifests import process_of
from lab.slurm import Cluster, slurm_cluster
from ruamel.yaml import YAML

from envbuild.jobs.model import JobArtifact, JobPlan
from envbuild.jobs.schedulers.kubernetes import render_kubernetes
from envbuild.recipe.targets import host_arch
from envbuild.site.jobs import KubernetesTable, SchedulerTable
from envbuild.site.settings import Site

NAME = "meet"
PODS = (f"{NAME}-worker-0", f"{NAME}-worker-1")
DIGEST = "sha256:" + "0" * 64


@dataclass(frozen=True)
class Pods:
    """Two hosts with the names of pods, and an environment with python-etcd that both see."""

    cluster: Cluster
    venv: Path

    def train(
        self, plan: JobPlan, server: Callable[[], AbstractContextManager[object]] = nullcontext, operator: str = "1.9"
    ) -> tuple[dict[str, Any], str]:
        """Run the two pods of a job to their end; the trainer's report, and what both printed.

        `server` is started once the pods wait for it; `operator` is the version of the training operator.
        """
        *_, job = YAML(typ="safe", pure=True).load_all(render_kubernetes(plan))
        # What Kubernetes' name service knows: pods, and the service of the job's etcd.
        names = "".join(
            f"{self.cluster.address(pod)} {pod} {NAME}-node-0-{number}.{NAME}\n" for number, pod in enumerate(PODS)
        )
        names += f"127.0.0.1 localhost\n{self.cluster.address('ctl')} {NAME}-etcd\n"
        logs = [Path(f"{plan.work}-{pod}.log") for pod in PODS]

        def printed() -> str:
            return "".join(log.read_text() for log in logs)

        running = []
        try:
            for number, pod in enumerate(PODS):
                self.cluster.set_hosts(pod, names)
                line, variables = process_of(job, number, self.cluster.address(pod), operator=operator)
                with logs[number].open("w") as log:
                    output = log.fileno()
                    running.append(self.cluster.popen(line, on=pod, env=variables, stdout=output, stderr=output))
            if server is not nullcontext:
                self.cluster.until(lambda: printed().count("waiting for") >= len(PODS))
            with server():
                codes = [one.wait(120) for one in running]
        finally:
            for one in running:
                if one.poll() is None:
                    os.killpg(one.pid, signal.SIGKILL)
                    one.wait()
        assert codes == [0, 0], printed()
        folder = Path(plan.work) / NAME
        # Every rank ended after the work of all (ddp_train.launch.rank).
        (ended,) = (folder / "end").iterdir()
        assert (ended / "pods/all").exists()
        assert len(list((ended / "ranks").iterdir())) == len(PODS) * plan.nproc_per_node
        # What remains when the operator removes the pods.
        for number, log in enumerate(logs):
            start, _, rest = (folder / f"pod-{number}.log").read_text().partition("\n")
            assert start.startswith(f"envbuild: pod start: {number} at ") and rest == log.read_text()
        report: dict[str, Any] = json.loads((folder / "report.json").read_text())
        return report, printed()

    def plan(self, work: str, **more: Any) -> JobPlan:
        """A rank on each of two pods, with the environment instead of an image."""
        folder = self.cluster.shared / work
        artifact = JobArtifact(
            kind="docker",
            path=f"registry.example.org/{NAME}@{DIGEST}",
            digest=DIGEST,
            recipe=NAME,
            target=f"cpu-{host_arch()}",
            python=str(self.venv / "bin/python"),
        )
        site = Site(
            "pods",
            scheduler=SchedulerTable(kind="kubernetes"),
            kubernetes=KubernetesTable(claim="data", mount=str(folder)),
        )
        plan = JobPlan(
            name=NAME,
            scheduler="kubernetes",
            artifact=artifact,
            site=site,
            runtime="pod",
            launcher="srun",
            strategy="ddp",
            nodes=2,
            nproc_per_node=1,
            command=("-m", "ddp_train", "2", "1"),
            work=str(folder),
            run_files=(("--checkpoint_path", "snapshot.pt"), ("--report", "report.json")),
            variables=(("OMP_NUM_THREADS", "1"),),
            join_timeout_s=60,
            read_timeout_s=60,
        )
        return replace(plan, **more)


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory, launchers: Path) -> Iterator[Pods]:
    reason = slurm.missing() or lab_etcd.missing()
    if reason is not None:
        pytest.skip(reason)
    with slurm_cluster(tmp_path_factory.mktemp("pods") / "cluster", PODS, share=[launchers]) as cluster:
        yield Pods(cluster, launchers)


def check(report: dict[str, Any], printed: str, backend: str, world: int = 2) -> None:
    assert report["world_size"] == world, report
    # torchrun itself, on each of the two.
    assert len(re.findall(rf"rdzv_backend\s*: {backend}$", printed, re.MULTILINE)) == 2, printed


def test_a_pytorchjob_trains_by_c10d_with_the_variables_of_an_older_operator_emulated(pods: Pods) -> None:
    """Those of 1.9: the job with etcd, below."""
    check(*pods.train(pods.plan("c10d"), operator="1.7"), "c10d")


def test_a_trainjob_trains_by_c10d_with_the_variables_of_the_operator_emulated(pods: Pods) -> None:
    plan = pods.plan("v2", nproc_per_node=2)
    second = replace(plan.site, kubernetes=replace(plan.site.kubernetes, api="v2"))
    check(*pods.train(replace(plan, site=second)), "c10d", world=4)


def test_a_pytorchjob_waits_for_a_real_etcd_and_trains_with_the_variables_of_the_operator_emulated(pods: Pods) -> None:
    plan = pods.plan("etcd", rendezvous="etcd-v2", preflight=True)
    address, folder = pods.cluster.address("ctl"), pods.cluster.folder / "etcd"
    report, printed = pods.train(plan, lambda: etcd(folder, address, cluster=pods.cluster))
    check(report, printed, "etcd-v2")
    assert f"waiting for etcd at {NAME}-etcd:2379" in printed
    assert printed.count("preflight: ok: 1 of 1 nodes") == 2, printed
