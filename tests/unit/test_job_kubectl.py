"""What `envbuild job --submit` makes of kubectl's words, as kubectl 1.30 and, where it is said, 1.37 wrote them.

A real kubectl is in tests/real/test_kubectl.py."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result
from lab.manifests import container_of, faults
from unit.job_plans import PLAN, executable

from envbuild.base.errors import HostError, UsageError
from envbuild.cli.job import job_command
from envbuild.jobs.schedulers import SCHEDULERS
from envbuild.jobs.schedulers.kubernetes import render_pod
from envbuild.jobs.submit import pending_path, submit, write_script
from envbuild.site.jobs import KubernetesTable
from envbuild.site.settings import Site

CREATED = "service/{0}-etcd created\ndeployment.apps/{0}-etcd created\n{1}/{0} created\n"
EXISTS = 'Error from server (AlreadyExists): error when creating "j.yaml": {} "pt-cpu{}" already exists\n'
SERVICE = EXISTS.format("services", "-etcd") + EXISTS.format("deployments.apps", "-etcd")
JOB = EXISTS.format("pytorchjobs.kubeflow.org", "")


ON_KUBERNETES = replace(
    PLAN,
    scheduler="kubernetes",
    artifact=replace(PLAN.artifact, kind="docker", path=f"registry.example.org/ml/pt_cpu@sha256:{'ab' * 32}"),
    site=Site("lab", kubernetes=KubernetesTable(claim="data")),
    work="/data",
)
_OPENAPI = (
    'error: error validating "{{}}": error validating data: failed to download openapi: {}; if you choose to ignore'
    " these errors, turn validation off with --validate=false\n"
)
_GET = 'Get "http://localhost:8080/openapi/v2?timeout=32s": dial tcp '
_KIND = (
    'error: resource mapping not found for name: "pt-cpu" namespace: "ml" from "{{}}": no matches for kind "{}" in'
    ' version "{}"\nensure CRDs are installed first\n'
)
_HOOK = "validator.pytorchjob.training-operator.kubeflow.org"
_DOWN = f'Internal error occurred: failed calling webhook "{_HOOK}": failed to call webhook:'
_POST = 'Post "https://training-operator.kubeflow.svc:443/validate?timeout=10s"'
_ERROR = 'Error from server ({}): error when creating "{{}}": {}\n'
# What kubectl 1.37 said, of each kind of refusal, and what its user is told to do.
REFUSALS = (
    (_OPENAPI.format(f"{_GET}127.0.0.1:8080: connect: connection refused"), "point KUBECONFIG to"),
    (_OPENAPI.format(f"{_GET}lookup nosuch.invalid on 192.0.2.53:53: no such host"), "point KUBECONFIG to"),
    (_OPENAPI.format("the server has asked for the client to provide credentials"), "log in to the cluster"),
    ("Error in configuration: context was not found for specified context: b\n", "get-contexts"),
    (_KIND.format("PyTorchJob", "kubeflow.org/v1"), "overlays/standalone?ref=v1.9.4"),
    (_KIND.format("TrainJob", "trainer.kubeflow.org/v1alpha1"), "overlays/manager?ref=v2.3.0"),
    (_KIND.format("ComputeDomain", "resource.nvidia.com/v1beta1"), 'NCCL_MNNVL_ENABLE = "0" in [environment]'),
    ('Error from server (NotFound): error when creating "{}": namespaces "ml" not found\n', "make the namespace"),
    (
        _ERROR.format("InternalError", f"{_DOWN} {_POST}: dial tcp 10.96.31.7:443: connect: connection refused"),
        "the webhook that the message names",
    ),
    (
        _ERROR.format("InternalError", f'{_DOWN} {_POST}: no endpoints available for service "training-operator"'),
        "the webhook that the message names",
    ),
    ("Error from server (ServiceUnavailable): the server is currently unable to handle the request\n", "try again"),
    ("Unable to connect to the server: net/http: TLS handshake timeout\n", "point KUBECONFIG to"),
    (
        'Error from server (Forbidden): error when creating "{}": services is forbidden: User "ada" cannot create'
        ' resource "services" in API group "" in the namespace "ml"\n',
        "cluster's administrator",
    ),
)


def test_an_operator_that_is_missing_is_named_also_when_etcd_was_created(tmp_path: Path) -> None:
    said = _KIND.format("PyTorchJob", "kubeflow.org/v1").format("j.new.yaml")
    with pytest.raises(HostError) as caught:
        submitted(tmp_path, "service/pt-cpu-etcd created\n", said, 1)
    hint = caught.value.hint or ""
    assert "lacks the training operator" in hint and "First remove that part" in hint


def submitted(folder: Path, printed: str, said: str = "", code: int = 0, tried: tuple[str, int] = ("", 0)) -> str:
    """Submit a manifest to a kubectl that answers so; `tried`: what it says to the dry run of a pod, and its code."""
    (folder / "out").write_text(printed)
    (folder / "err").write_text(said)
    (folder / "tried").write_text(tried[0])
    trial = (
        f'case "$*" in *--dry-run=server*) cp "$4" {folder}/pod.yaml; cat {folder}/tried >&2; exit {tried[1]};; esac'
    )
    kubectl = f'#!/bin/sh\n{trial}\necho "$@" >{folder}/called\ncat {folder}/out\ncat {folder}/err >&2\nexit {code}\n'
    executable(folder / "bin/kubectl", kubectl)
    script = folder / "j.yaml"
    write_script("new", script, "", pending_path(ON_KUBERNETES, script))
    return submit(ON_KUBERNETES, script, {"PATH": f"{folder}/bin:{os.environ['PATH']}"})


@pytest.mark.parametrize(
    ("printed", "job"),
    [
        (CREATED.format("pt-cpu", "pytorchjob.kubeflow.org"), "pytorchjob.kubeflow.org/pt-cpu"),
        (CREATED.format("a", "trainjob.trainer.kubeflow.org"), "trainjob.trainer.kubeflow.org/a"),
        ("job.batch/pt-cpu created\n", "job.batch/pt-cpu"),
    ],
)
def test_the_job_is_named_and_not_the_etcd_that_comes_with_it(tmp_path: Path, printed: str, job: str) -> None:
    assert submitted(tmp_path, printed) == job


def test_a_manifest_takes_its_name_once_kubectl_has_taken_it(tmp_path: Path) -> None:
    (tmp_path / "j.yaml").write_text("old")
    submitted(tmp_path, "job.batch/pt-cpu created\n")
    assert (tmp_path / "called").read_text() == f"create -f {tmp_path}/j.new.yaml\n"
    assert (tmp_path / "j.yaml").read_text() == "new"
    assert not (tmp_path / "j.new.yaml").exists()


@pytest.mark.parametrize(("printed", "said"), [("", JOB), ("job.batch/pt-cpu created\n", SERVICE)])
def test_a_refused_manifest_leaves_that_of_the_earlier_job_which_knows_all_of_its_parts(
    printed: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "j.yaml").write_text("with etcd")
    with pytest.raises(HostError) as caught:
        submitted(tmp_path, printed, said, 1)
    assert (tmp_path / "j.yaml").read_text() == "with etcd"
    assert (tmp_path / "j.new.yaml").read_text() == "new"
    files = f"-f {tmp_path}/j.yaml -f {tmp_path}/j.new.yaml"
    assert f"`kubectl delete --ignore-not-found {files}`" in (caught.value.hint or "")


def test_what_kubectl_warns_of_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    warning = 'Warning: would violate PodSecurity "restricted:latest": runAsNonRoot != true\n'
    submitted(tmp_path, "job.batch/pt-cpu created\n", warning)
    assert capsys.readouterr().err == warning


def test_a_job_that_was_created_beside_an_old_etcd_is_not_hidden(tmp_path: Path) -> None:
    with pytest.raises(HostError) as caught:
        submitted(tmp_path, "pytorchjob.kubeflow.org/pt-cpu created\n", SERVICE, 1)
    assert "j.new.yaml:\n  pytorchjob" in caught.value.message
    assert "pytorchjob.kubeflow.org/pt-cpu created" in caught.value.message
    assert 'deployments.apps "pt-cpu-etcd" already exists' in caught.value.message
    assert f"kubectl delete --ignore-not-found -f {tmp_path}/j.new.yaml" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        (SERVICE + JOB, "remove what is there, etcd too, with `kubectl delete"),
        ("error: unknown\n", "change the site file"),
        *((said.format("j.new.yaml"), hint) for said, hint in REFUSALS),
    ],
)
def test_what_kubectl_refuses_altogether_says_what_to_do(tmp_path: Path, said: str, hint: str) -> None:
    with pytest.raises(HostError) as caught:
        submitted(tmp_path, "", said, 1)
    assert caught.value.message.startswith(f"kubectl refuses {tmp_path}/j.new.yaml")
    assert said.splitlines()[-1] in caught.value.message
    assert hint in (caught.value.hint or "")


def job(folder: Path, *options: str, claim: str = "", node: str = 'cpus = 4\nmemory = "8G"', more: str = "") -> Result:
    """`envbuild job` of a pushed image at a site with Kubernetes."""
    site = folder / "lab.toml"
    site.write_text(f'[scheduler]\nkind = "kubernetes"\n[node]\n{node}\n[kubernetes]\nclaim = "{claim}"\n{more}\n')
    image = f"registry.example.org/ml/pt_cpu@sha256:{'ab' * 32}"
    line = [image, "--unverified", "--target", "cpu-x86_64", "--nodes", "1", "--site", str(site)]
    return CliRunner().invoke(job_command, [*line, *options])


@pytest.mark.parametrize("options", [(), ("--strategy", "single", "--nproc-per-node", "1")])
def test_who_renders_a_job_without_a_claim_hears_that_its_log_is_lost_when_it_fails(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    assert "its log is lost" in job(tmp_path, *options).stderr
    assert job(tmp_path, *options, claim="data").stderr == ""


@pytest.mark.parametrize(
    ("node", "missing"), [("", "no CPUs and no memory"), ("cpus = 4", "no memory"), ('memory = "8G"', "no CPUs")]
)
def test_who_renders_pods_that_are_evicted_first_hears_of_it(node: str, missing: str, tmp_path: Path) -> None:
    assert f"pods of site lab ask for {missing}: Kubernetes evicts such pods first" in job(
        tmp_path, claim="data", node=node
    ).stderr.replace("\n", " ")
    own = '[kubernetes.resources]\ncpu = "1"\nmemory = "2Gi"'
    assert job(tmp_path, claim="data", node="", more=own).stderr == ""


@pytest.mark.parametrize(("nodes", "runtime", "warned"), [(6, "", False), (7, "", True), (7, "mine", False)])
def test_a_trainjob_whose_runtime_gives_up_after_one_lost_pod_is_warned_of(
    nodes: int, runtime: str, warned: bool, tmp_path: Path
) -> None:
    more = 'api = "v2"' + (f'\nruntime = "{runtime}"' if runtime else "")
    printed = job(tmp_path, "--nodes", str(nodes), claim="data", more=more).stderr
    assert ("one lost pod probably ends this TrainJob" in printed) == warned
    assert not warned or "backoffLimit 22" in printed.replace("\n", " ")


POD_REFUSALS = [
    ('pods "pt-cpu-x" is forbidden: failed quota: compute: must specify limits.cpu for: pytorch', "describe quota"),
    (
        'pods "pt-cpu-x" is forbidden: exceeded quota: compute, requested: limits.cpu=4, used: limits.cpu=8, limited:'
        " limits.cpu=8",
        "describe quota",
    ),
    ('pods "pt-cpu-x" is forbidden: violates PodSecurity "restricted:latest": runAsNonRoot != true', "run_as"),
    ('pods "pt-cpu-x" is forbidden: maximum cpu usage per Container is 2, but limit is 4', "LimitRange"),
    (
        'pods "pt-cpu-x" is forbidden: error looking up service account ml/a: serviceaccount "a" not found',
        "service_account",
    ),
    ('pods "pt-cpu-x" is forbidden: no PriorityClass with name high was found', "priority_class"),
    ('admission webhook "validate.kyverno.svc-fail" denied the request: label team is missing', "policy refuses it"),
    ("the server is currently unable to handle the request", "apiservices"),
]


@pytest.mark.parametrize(("said", "hint"), POD_REFUSALS)
def test_a_job_whose_pods_the_cluster_refuses_is_not_submitted(said: str, hint: str, tmp_path: Path) -> None:
    with pytest.raises(HostError) as caught:
        submitted(tmp_path, "job created\n", tried=(_ERROR.format("Forbidden", said).format("trial.yaml"), 1))
    assert caught.value.message.startswith("pt_cpu was not submitted: a dry run of one of its pods failed") and (
        said in caught.value.message
    )
    assert hint in (caught.value.hint or "")
    assert not (tmp_path / "called").exists()


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (
            'pods is forbidden: User "ada" cannot create resource "pods" in API group "" in the namespace "ml"',
            'user "ada" may not create pods',
        ),
        ('admission webhook "inject.example.org" does not support dry run: clusterName: ', "inject.example.org"),
    ],
)
def test_a_dry_run_that_says_nothing_about_the_pods_is_named_and_the_job_submitted(
    said: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tried = (_ERROR.format("Forbidden", said).format("trial.yaml"), 1)
    assert submitted(tmp_path, "job.batch/pt-cpu created\n", tried=tried) == "job.batch/pt-cpu"
    printed = capsys.readouterr().err
    assert "was not checked" in printed and reason in printed


def test_a_warning_about_pods_is_shown_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    warning = 'Warning: would violate PodSecurity "restricted:latest": runAsNonRoot != true\n'
    submitted(tmp_path, "job.batch/pt-cpu created\n", f"{warning}Warning: other\n", tried=(warning, 0))
    assert capsys.readouterr().err == f"{warning}Warning: other\n"


@pytest.mark.parametrize("api", ["v1", "v2", "single"])
def test_the_pod_of_the_dry_run_is_one_of_the_jobs_pods(api: str) -> None:
    table = replace(ON_KUBERNETES.site.kubernetes, api="v2" if api == "v2" else "v1", run_as="7", shm="1Gi")
    plan = replace(ON_KUBERNETES, site=replace(ON_KUBERNETES.site, kubernetes=table))
    if api == "single":
        plan = replace(plan, strategy="single", nodes=1, nproc_per_node=1)
    pod = yaml.safe_load(render_pod(plan))
    assert faults(pod) == []
    assert pod["metadata"]["generateName"] == "pt-cpu-" and pod["metadata"]["namespace"] == "default"
    job = [*yaml.safe_load_all(SCHEDULERS["kubernetes"].render(plan))][-1]
    (container,), expected = pod["spec"]["containers"], container_of(job)
    for key in ("image", "command", "args", "env"):
        assert container[key] == expected[key]
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert pod["spec"]["securityContext"]["runAsUser"] == 7 and len(pod["spec"]["volumes"]) == 2


@pytest.mark.parametrize("kind", ["folder", "manifest"])
def test_submit_changes_nothing_at_the_manifests_name_before_kubectl_agreed(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executable(tmp_path / "bin/kubectl", "#!/bin/sh\necho unknown >&2\nexit 1\n")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    out = tmp_path / "j.yaml"
    out.mkdir() if kind == "folder" else out.write_text("old")
    error = job(tmp_path, "--submit", "--out", str(out), claim="data").exception
    assert isinstance(error, UsageError if kind == "folder" else HostError)
    assert out.is_dir() or out.read_text() == "old"


@pytest.mark.parametrize("time", ["0", "00:00:00", "99999-00:00:00"])
def test_a_time_limit_of_nothing_is_refused(time: str, tmp_path: Path) -> None:
    error = job(tmp_path, "--time", time).exception
    assert isinstance(error, UsageError) and f"--time: '{time}' is no time" in error.message
