"""TrainJob of Kubeflow Trainer, version 2.2 and later.

Source: kubeflow/trainer v2.3.0, pkg/apis/trainer/v1alpha1/trainjob_types.go and
pkg/runtime/framework/plugins/{torch/torch.go,jobset/jobset.go}. Trainer sets PET_NNODES, PET_NPROC_PER_NODE,
PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT, and refuses a job that sets them. It chooses torchrun's
static rendezvous, which does not survive a restart, so c10d is requested on the command line. Volcano's queue: the
plugin volcano/volcano.go and examples/yaml/04-volcano-integration.yaml; Kueue's: 03-kueue-integration.yaml.
"""

from __future__ import annotations

from typing import Any

from envbuild.base.errors import UsageError
from envbuild.jobs import kubernetes_pod as pod
from envbuild.jobs.kubernetes_etcd import Etcd, etcd_of, etcd_suffix, waiting
from envbuild.jobs.kubernetes_security import container_security
from envbuild.jobs.kubernetes_yaml import literal
from envbuild.jobs.model import JobPlan

# The annotation of a JobSet by which Trainer chooses the queue of Volcano's PodGroup.
_VOLCANO_QUEUE = "scheduling.volcano.sh/queue-name"
_PORT = 29500
_MOST_WORDS = 128
_MOST_VARIABLES = 128


def train_job(plan: JobPlan) -> list[dict[str, Any]]:
    """Return the job's documents: etcd first, if the rendezvous needs it. Raises UsageError."""
    # The name of the last pod; Kubernetes adds a dash and five characters.
    suffix = max(f"-node-0-{plan.nodes - 1}-12345", etcd_suffix(plan), key=len)
    name = pod.job_name(plan.name, suffix)
    hosts = tuple(f"{name}-node-0-{number}.{name}" for number in range(plan.nodes))
    number = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    pods = pod.Pods(name, hosts, number, _PORT)
    etcd = etcd_of(plan, name)
    endpoint = literal(f"{etcd.host}:{etcd.port}", "--endpoint") if etcd else "$(PET_MASTER_ADDR):$(PET_MASTER_PORT)"
    arguments = [
        literal(plan.artifact.python, "python"),
        "-m",
        "torch.distributed.run",
        "--rdzv-backend",
        plan.rendezvous,
        "--rdzv-endpoint",
        endpoint,
        "--rdzv-id",
        name,
        "--max-restarts",
        str(plan.max_restarts),
        "--local-addr",
        "$(ENVBUILD_ADDRESS)",
        *pod.training(plan, pods),
    ]
    if len(arguments) > _MOST_WORDS:
        raise UsageError(
            f"a TrainJob's container takes {_MOST_WORDS} arguments, this one has {len(arguments)}",
            'put them into a file that the script reads, or use [kubernetes] api = "v1"',
        )
    environment = pod.variables(plan, pods)
    if len(environment) > _MOST_VARIABLES:
        raise UsageError(f"a TrainJob takes {_MOST_VARIABLES} variables, not {len(environment)}")
    trainer: dict[str, Any] = {
        "image": plan.artifact.path,
        "numNodes": plan.nodes,
        "numProcPerNode": plan.nproc_per_node,
        "command": pod.start(plan, *_meeting(plan, etcd)),
        "args": arguments,
        "env": environment,
    }
    if limits := pod.resources(plan):
        trainer["resourcesPerNode"] = limits
    runtime = plan.site.kubernetes.runtime
    job = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": pod.job_metadata(plan, name),
        "spec": {
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "ClusterTrainingRuntime", "name": runtime},
            "activeDeadlineSeconds": pod.seconds(plan.time),
            "trainer": trainer,
            "runtimePatches": [_patch(plan, name)],
        },
    }
    return [*(etcd.documents if etcd else ()), job]


def _meeting(plan: JobPlan, etcd: Etcd | None) -> list[str]:
    """Return the shell lines before torchrun that tell it which pod hosts the store.

    Before DNS knows the pods, torch cannot tell by itself.
    """
    conf = ",".join(f"{key}={value}" for key, value in pod.rendezvous_conf(plan).items())
    if etcd is not None:
        return [*waiting(etcd), f'export PET_RDZV_CONF="{conf}"']
    return ['if [ "$PET_NODE_RANK" = 0 ]; then host=1; else host=0; fi', f'export PET_RDZV_CONF="is_host=$host,{conf}"']


def _patch(plan: JobPlan, name: str) -> dict[str, Any]:
    """Return the additions to the runtime's pods: labels, placement and volumes; and to the JobSet's annotations."""
    spec: dict[str, Any] = {
        **pod.placement(plan, name),
        "containers": [{"name": "node"} | container_security(plan) | {"volumeMounts": pod.mounts(plan)}],
        "volumes": pod.volumes(plan),
    }
    if plan.site.kubernetes.grace != pod.GRACE_S:
        spec["terminationGracePeriodSeconds"] = plan.site.kubernetes.grace  # Trainer 2.3
    metadata = pod.pod_metadata(plan, name)
    job = {"name": "node", "template": {"spec": {"template": {"metadata": metadata, "spec": spec}}}}
    template: dict[str, Any] = {}
    annotations = dict(metadata.get("annotations", {}))
    if plan.site.scheduler.partition:
        annotations.setdefault(_VOLCANO_QUEUE, plan.site.scheduler.partition)
    if annotations:
        template["metadata"] = {"annotations": annotations}
    template["spec"] = {"replicatedJobs": [job]}
    return {"manager": "envbuild/job", "trainingRuntimeSpec": {"template": template}}
