"""kubectl's output for a manifest, and hints for its errors. The messages are those of kubectl 1.37."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

from envbuild.base import process
from envbuild.base.errors import HostError

_CHANGE = "change the site file or the options that it names, then submit again"
_KUBEFLOW = "https://www.kubeflow.org/docs/components/trainer"
# (pattern of kubectl's message, hint); the first match wins. The messages are those that users of clusters reported:
# hmcts/cnp-flux-config#2122 and #13765 (quota), red-hat-storage/ocs-ci#6332 and rancher/k3k#294 (PodSecurity).
_HINTS = (
    (
        r"fail(?:ed|ure) (?:calling|to call) webhook|no endpoints available for service",
        "kubectl reaches the cluster, and a part of it that must agree does not answer: the webhook that the message"
        " names. Its pod may be starting: try again in a minute, then tell the cluster's administrator; `kubectl get"
        " pods --all-namespaces` shows which operator does not run",
    ),
    (
        r"unable to handle the request|unable to return a response in the time allotted|etcdserver:"
        r"|Too ?Many ?Requests|ServiceUnavailable",
        "the cluster's API server answers, and cannot do this now: try again in a minute, then tell the cluster's"
        " administrator; `kubectl get apiservices` shows a part that does not run",
    ),
    (
        r"exceeded quota|failed quota",
        "see `kubectl describe quota` of the namespace, and change [node] cpus, memory or gpus, or [kubernetes]"
        " namespace in the site file",
    ),
    (
        r"violates PodSecurity",
        'set [kubernetes] run_as = "UID:GID" in the site file; host: volumes are refused by all levels but privileged',
    ),
    (
        r"(?:maximum|minimum) \S+ usage per (?:Pod|Container)|max limit to request ratio",
        "the namespace's LimitRange bounds pods (`kubectl describe limitrange`): change [node] cpus or memory in the"
        " site file",
    ),
    (
        r'serviceaccount "[^"]*" not found|error looking up service account',
        "change [kubernetes] service_account in the site file, or have it made",
    ),
    (r"no PriorityClass with name", "change [kubernetes] priority_class in the site file, or have it made"),
    (r"denied the request", "the cluster's policy refuses it: change the site file as the message says"),
    (
        r'no matches for kind "PyTorchJob"',
        "the cluster lacks the training operator; its administrator installs it with `kubectl apply --server-side -k"
        ' "github.com/kubeflow/training-operator.git/manifests/overlays/standalone?ref=v1.9.4"`'
        f' ({_KUBEFLOW}/legacy-v1/installation). Where Trainer is installed, set [kubernetes] api = "v2"',
    ),
    (
        r'no matches for kind "TrainJob"',
        "the cluster lacks Kubeflow Trainer; its administrator installs it with `kubectl apply --server-side -k"
        ' "https://github.com/kubeflow/trainer.git/manifests/overlays/manager?ref=v2.3.0"`, then the same with'
        f" overlays/runtimes ({_KUBEFLOW}/operator-guides/installation). Where the training operator is installed,"
        ' set [kubernetes] api = "v1"',
    ),
    (
        r"connection refused|no such host|i/o timeout|no route to host|network is unreachable"
        r"|tls: failed to verify|Unable to connect to the server",
        "kubectl does not reach the cluster: point KUBECONFIG to the cluster's file, then see `kubectl cluster-info`",
    ),
    (
        r"loading config file|Error in configuration",
        "point KUBECONFIG to the cluster's file, and choose one of `kubectl config get-contexts`",
    ),
    (r"provide credentials|Unauthorized", "log in to the cluster: KUBECONFIG's user has no valid credentials"),
    (
        r"\(Forbidden\)|is forbidden:",
        "ask the cluster's administrator for this right, or change [kubernetes] namespace in the site file",
    ),
    (r'namespaces "[^"]*" not found', "make the namespace, or change [kubernetes] namespace in the site file"),
)


def created_job(printed: str) -> str:
    """Return kubectl's name of the created job (pytorchjob.kubeflow.org/NAME), without the manifest's other objects."""
    found = re.findall(r"^((?:pytorchjob|trainjob|job)[^\s/]*/\S+) created", printed, re.IGNORECASE | re.MULTILINE)
    return found[-1] if found else printed.strip()


def refusal(done: subprocess.CompletedProcess[str], refused: Path, earlier: Path) -> HostError:
    """Return the error for the manifest `refused`, which kubectl rejected.

    `earlier` is the manifest of an earlier job, which may not exist. kubectl continues after an object that it
    could not create: the objects that it did create exist and may run.
    """
    files = " ".join(f"-f {shlex.quote(str(one))}" for one in (earlier, refused) if one.exists())
    delete = f"`kubectl delete --ignore-not-found {files}`"
    advice = next((hint for words, hint in _HINTS if re.search(words, done.stderr)), None)
    if made := done.stdout.strip():
        created = "\n".join(f"  {line}" for line in made.splitlines())
        hint = f"remove that part, and the etcd or job that an earlier job left, with {delete}, then submit again"
        return HostError(
            f"kubectl created only a part of {refused}:\n{created}\nand refused the rest:\n{process.tail(done)}",
            f"{advice}. First {hint}" if advice else hint,
        )
    if "AlreadyExists" in done.stderr:
        advice = f"choose another --name, or remove what is there, etcd too, with {delete}, then submit again"
    return HostError(f"kubectl refuses {refused}:\n{process.tail(done)}", advice or _CHANGE)


def unchecked_pod(done: subprocess.CompletedProcess[str]) -> str:
    """Return why the dry run of a pod says nothing about the pods that the job's controller creates, "" if it does."""
    if found := re.search(r"pods is forbidden: User (\S+) cannot create resource", done.stderr):
        return f"user {found[1]} may not create pods, as their controller may"
    if found := re.search(r'admission webhook "([^"]*)" does not support dry run', done.stderr):
        return f"the cluster's webhook {found[1]} does not support dry runs"
    return ""


def refused_pod(done: subprocess.CompletedProcess[str], name: str) -> HostError:
    """Return the error for job `name`, of whose pods the server refused one in a dry run."""
    advice = next((hint for words, hint in _HINTS if re.search(words, done.stderr)), None)
    return HostError(
        f"{name} was not submitted: a dry run of one of its pods failed:\n{process.tail(done)}", advice or _CHANGE
    )
