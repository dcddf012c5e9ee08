"""JobPlan → Kubernetes manifest: PyTorchJob, TrainJob, or a Job with one process."""

from __future__ import annotations

from typing import Any

from envbuild.base.errors import UsageError
from envbuild.jobs import kubernetes_pod as pod
from envbuild.jobs.kubectl import created_job, refusal, refused_pod, unchecked_pod
from envbuild.jobs.kubernetes_security import container_security
from envbuild.jobs.kubernetes_v1 import pytorch_job
from envbuild.jobs.kubernetes_v2 import train_job
from envbuild.jobs.kubernetes_yaml import dump, literal
from envbuild.jobs.model import JobPlan
from envbuild.jobs.schedulers.base import Scheduler, Submission, Trial
from envbuild.site.jobs import runtime_conflicts

# The form of the suffix that Kubernetes adds to the names of a Job's pods.
_SUFFIX = "-12345"
# Only the checks of --preflight use this port.
_PORT = 29500


def render_kubernetes(plan: JobPlan) -> str:
    """Return the manifest of `plan`, for `kubectl create -f`. Pure.

    Raises UsageError for values that a manifest cannot express, naming the key or option to change.
    """
    artifact = plan.artifact
    verified = f"verified {artifact.verified_at}" if artifact.verified_at else "not verified"
    comment = f"envbuild job: {artifact.recipe} for {artifact.target}, {artifact.digest}, {verified}"
    return dump(comment, _documents(plan))


def render_pod(plan: JobPlan) -> str:
    """Return a pod like those that the job's controller creates, without what it or a TrainJob's runtime adds."""
    job = _documents(plan)[-1]
    spec = job["spec"]
    if job["kind"] == "TrainJob":
        (patched,) = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        template, trainer = patched["template"]["spec"]["template"], spec["trainer"]
        container = {key: trainer[key] for key in ("image", "command", "args", "env")}
        container |= {"resources": trainer.get("resourcesPerNode", {})} | template["spec"]["containers"][0]
        template = {**template, "spec": {**template["spec"], "containers": [container]}}
    elif job["kind"] == "PyTorchJob":
        template = spec["pytorchReplicaSpecs"]["Worker"]["template"]
    else:
        template = spec["template"]
    found = job["metadata"]
    metadata = {"generateName": f"{found['name']}-", "namespace": found["namespace"], **template["metadata"]}
    pod_spec = {**template["spec"], "restartPolicy": "OnFailure"}
    document = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod_spec}
    return dump("envbuild job: a pod for kubectl create --dry-run=server", [document])


def _documents(plan: JobPlan) -> list[dict[str, Any]]:
    artifact = plan.artifact
    if artifact.of_kind.form != "registry" or "@sha256:" not in artifact.path:
        raise UsageError(
            f"{artifact.path} is not an image by its digest, and a tag may be another image for each pod",
            "push one (`envbuild docker RECIPE --tag REGISTRY/NAME:TAG --push`) and give NAME@sha256:…",
        )
    if plan.strategy == "horovod":
        raise UsageError(
            "strategy horovod is not rendered for Kubernetes: it takes an MPIJob of the MPI operator",
            "use --strategy ddp, or a Slurm or PBS site",
        )
    if plan.strategy != "single":
        for key, problem, hint in runtime_conflicts(plan.site.kubernetes):
            raise UsageError(f"{plan.site.origin('kubernetes', key)}: {problem}", hint)
    if plan.strategy == "single":
        return [_single(plan)]
    return train_job(plan) if plan.site.kubernetes.api == "v2" else pytorch_job(plan)


def _single(plan: JobPlan) -> dict[str, Any]:
    """Return a Job of one pod with one process and no torchrun."""
    name = pod.job_name(plan.name, _SUFFIX)
    pods = pod.Pods(name, (name,), None, _PORT)
    again = plan.site.scheduler.requeue
    container: dict[str, Any] = {
        "name": "pytorch",
        "image": plan.artifact.path,
        "command": pod.start(plan),
        "args": [literal(plan.artifact.python, "python"), *pod.training(plan, pods)],
        "env": pod.variables(plan, pods),
    }
    if limits := pod.resources(plan):
        container["resources"] = limits
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": pod.job_metadata(plan, name),
        "spec": {
            "activeDeadlineSeconds": pod.seconds(plan.time),
            "backoffLimit": pod.backoff_limit(plan) if again else 0,
            **({} if plan.site.kubernetes.ttl is None else {"ttlSecondsAfterFinished": plan.site.kubernetes.ttl}),
            "template": {
                "metadata": pod.pod_metadata(plan, name),
                "spec": {
                    "terminationGracePeriodSeconds": plan.site.kubernetes.grace,
                    **pod.pod_rights(plan),
                    **pod.placement(plan, name),
                    "restartPolicy": "OnFailure" if again else "Never",
                    "containers": [container | container_security(plan) | {"volumeMounts": pod.mounts(plan)}],
                    "volumes": pod.volumes(plan),
                },
            },
        },
    }


KUBERNETES = Scheduler(
    suffix=".yaml",
    render=render_kubernetes,
    # `create`, not `apply`, which would silently leave a finished job of the same name unchanged.
    submission=Submission(
        ("kubectl", "create", "-f"),
        created_job,
        refusal=refusal,
        # A controller whose pods are refused retries for ever, and the job looks like one that waits.
        trial=Trial(("kubectl", "create", "--dry-run=server", "-f"), render_pod, unchecked_pod, refused_pod),
    ),
    site_keys=frozenset(["memory", "partition", "qos"]),
)
