"""PyTorchJob of the training operator, versions 1.7 to 1.9.

Source: kubeflow/training-operator v1.9.4, pkg/apis/kubeflow.org/v1/{common,pytorch}_types.go and
pkg/controller.v1/{common/job,pytorch/elastic,pytorch/envvar}.go. The operator sets PYTHONUNBUFFERED, and PET_NNODES,
PET_MAX_RESTARTS and PET_RDZV_*, which torchrun reads, and creates a service for each worker's name. For jobs
that have only workers, it sets PET_NPROC_PER_NODE since 1.8 (#1948); with 1.7, torchrun would start one rank,
so the number is an argument.
"""

from __future__ import annotations

from typing import Any

from envbuild.jobs import kubernetes_pod as pod
from envbuild.jobs.kubernetes_etcd import Etcd, etcd_of, etcd_suffix, waiting
from envbuild.jobs.kubernetes_security import container_security
from envbuild.jobs.kubernetes_yaml import literal
from envbuild.jobs.model import JobPlan

_PORT = 23456


def pytorch_job(plan: JobPlan) -> list[dict[str, Any]]:
    """Return the job's documents: etcd first, if the rendezvous needs it. Raises UsageError."""
    suffix = max(f"-worker-{plan.nodes - 1}", etcd_suffix(plan), key=len)
    name = pod.job_name(plan.name, suffix)
    hosts = tuple(f"{name}-worker-{number}" for number in range(plan.nodes))
    # The endpoint is the first pod's own name, so torch can tell without DNS which pod hosts the store.
    pods = pod.Pods(name, hosts, "metadata.labels['training.kubeflow.org/replica-index']", _PORT)
    etcd = etcd_of(plan, name)
    again = plan.site.scheduler.requeue
    policy: dict[str, Any] = {"activeDeadlineSeconds": pod.seconds(plan.time)}
    if again:
        policy["backoffLimit"] = pod.backoff_limit(plan)
    # None would let a failed job run on and hold its GPUs, from operator 1.9.4 on. One completed pod makes a job with
    # an elasticPolicy Succeeded: until all ranks have finished, none completes (ddp_train.launch.rank).
    policy["cleanPodPolicy"] = "Running"
    if plan.site.kubernetes.ttl is not None:
        policy["ttlSecondsAfterFinished"] = plan.site.kubernetes.ttl
    # What the operator gives to the PodGroup, if it uses Volcano; Kueue reads the priority.
    gang = {"queue": plan.site.scheduler.partition, "priorityClass": plan.site.kubernetes.priority_class}
    if any(gang.values()):
        policy["schedulingPolicy"] = {key: value for key, value in gang.items() if value}
    worker = {
        "replicas": plan.nodes,
        "restartPolicy": "OnFailure" if again else "Never",
        "template": {
            "metadata": pod.pod_metadata(plan, name),
            "spec": {
                # The operator does not wake up at the job's deadline, while kubelet enforces the pod's.
                "activeDeadlineSeconds": pod.seconds(plan.time),
                "terminationGracePeriodSeconds": plan.site.kubernetes.grace,
                **pod.pod_rights(plan),
                **pod.placement(plan, name),
                "containers": [_container(plan, pods, etcd)],
                "volumes": pod.volumes(plan),
            },
        },
    }
    job = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": pod.job_metadata(plan, name),
        "spec": {
            "nprocPerNode": str(plan.nproc_per_node),
            "runPolicy": policy,
            "elasticPolicy": _elastic(plan, name, etcd),
            "pytorchReplicaSpecs": {"Worker": worker},
        },
    }
    return [*(etcd.documents if etcd else ()), job]


def _elastic(plan: JobPlan, name: str, etcd: Etcd | None) -> dict[str, Any]:
    """Return the policy that the operator turns into PET_RDZV_*, PET_NNODES and PET_MAX_RESTARTS."""
    policy: dict[str, Any] = {
        "rdzvBackend": plan.rendezvous,
        "rdzvId": name,
        "minReplicas": plan.nodes,
        "maxReplicas": plan.nodes,
        "maxRestarts": plan.max_restarts,
    }
    if etcd is not None:
        policy |= {"rdzvHost": etcd.host, "rdzvPort": etcd.port}
    policy["rdzvConf"] = [{"key": key, "value": str(value)} for key, value in pod.rendezvous_conf(plan).items()]
    return policy


def _container(plan: JobPlan, pods: pod.Pods, etcd: Etcd | None) -> dict[str, Any]:
    torchrun = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(plan.nproc_per_node),
        "--local-addr",
        "$(ENVBUILD_ADDRESS)",
    ]
    container: dict[str, Any] = {
        "name": "pytorch",
        "image": plan.artifact.path,
        "command": pod.start(plan, *waiting(etcd)),
        "args": [literal(plan.artifact.python, "python"), *torchrun, *pod.training(plan, pods)],
        "env": pod.variables(plan, pods, unbuffered=False),
        "ports": [{"name": "pytorchjob-port", "containerPort": _PORT}],
    }
    if limits := pod.resources(plan):
        container["resources"] = limits
    return container | container_security(plan) | {"volumeMounts": pod.mounts(plan)}
