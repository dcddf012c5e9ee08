"""Kubernetes: JobPlan → PyTorchJob, TrainJob, or a Job with one process; the job's etcd; and kubectl's errors.

PyTorchJob, training operator 1.7 to 1.9: kubeflow/training-operator v1.9.4,
pkg/apis/kubeflow.org/v1/{common,pytorch}_types.go and pkg/controller.v1/{common/job,pytorch/elastic,pytorch/envvar}.go.
TrainJob, Kubeflow Trainer 2.2 and later: kubeflow/trainer v2.3.0, pkg/apis/trainer/v1alpha1/trainjob_types.go and
pkg/runtime/framework/plugins/{torch/torch.go,jobset/jobset.go}. kubectl's messages are from version 1.37.
ComputeDomain: NVIDIA/k8s-dra-driver-gpu, api/nvidia.com/resource/v1beta1/computedomain.go and demo/specs/imex.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envbuild.base.errors import HostError, UsageError
from envbuild.jobs import kubernetes_pod as pod
from envbuild.jobs.kubernetes_pod import dump, literal
from envbuild.jobs.model import JobPlan, seconds
from envbuild.jobs.schedulers.base import Scheduler, Submission, Trial
from envbuild.site.jobs import runtime_conflicts

# The form of the suffix that Kubernetes adds to the names of a Job's pods.
_POD_SUFFIX = "-12345"
# Only the checks of --preflight use this port.
_PREFLIGHT_PORT = 29500
_PYTORCHJOB_PORT = 23456
_TRAINJOB_PORT = 29500
_ETCD_PORT = 2379
_ETCD_SUFFIX = "-etcd"
_ENDPOINT = re.compile(r"(?P<host>[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?):(?P<port>[0-9]{1,5})")
# The annotation of a JobSet by which Trainer chooses the queue of Volcano's PodGroup.
_VOLCANO_QUEUE = "scheduling.volcano.sh/queue-name"
_MOST_WORDS = 128
_MOST_VARIABLES = 128


def render_kubernetes(plan: JobPlan) -> str:
    """Return the manifest of `plan`, for `kubectl create -f`. Pure.

    Raises UsageError for values that a manifest cannot express, naming the key or option to change.
    """
    artifact = plan.artifact
    verified = f"verified {artifact.verified_at}" if artifact.verified_at else "not verified"
    comment = f"envbuild job: {artifact.recipe} for {artifact.target}, {artifact.digest}, {verified}"
    return dump(comment, _documents(plan))


def render_pod(plan: JobPlan) -> str:
    """Return a pod like the pods of the job's controller, without additions by it or by a TrainJob's runtime."""
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
    about = job["metadata"]
    metadata = {"generateName": f"{about['name']}-", "namespace": about["namespace"], **template["metadata"]}
    pod_spec = {**template["spec"], "restartPolicy": "OnFailure"}
    document = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod_spec}
    return dump("envbuild job: a pod for kubectl create --dry-run=server", [document])


def _documents(plan: JobPlan) -> list[dict[str, Any]]:
    artifact = plan.artifact
    if artifact.of_kind.form != "registry" or "@sha256:" not in artifact.path:
        raise UsageError(
            f"{artifact.path} is not an image by its digest; pods may pull different images for one tag",
            "push one (`envbuild docker RECIPE --tag REGISTRY/NAME:TAG --push`) and give NAME@sha256:…",
        )
    if plan.strategy == "horovod":
        raise UsageError(
            "strategy horovod is not rendered for Kubernetes: it would need an MPIJob of the MPI operator",
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
    name = pod.job_name(plan.name, _POD_SUFFIX)
    pods = pod.Pods(name, (name,), None, _PREFLIGHT_PORT)
    again = plan.site.scheduler.requeue
    args = [literal(plan.artifact.python, "python"), *pod.training(plan, pods)]
    container = _container(plan, {"command": pod.start(plan), "args": args, "env": pod.variables(plan, pods)})
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": pod.job_metadata(plan, name),
        "spec": {
            "activeDeadlineSeconds": seconds(plan.time),
            "backoffLimit": pod.backoff_limit(plan) if again else 0,
            **({} if plan.site.kubernetes.ttl is None else {"ttlSecondsAfterFinished": plan.site.kubernetes.ttl}),
            "template": {
                "metadata": pod.pod_metadata(plan, name),
                "spec": {
                    "terminationGracePeriodSeconds": plan.site.kubernetes.grace,
                    **pod.pod_rights(plan),
                    **pod.placement(plan, name),
                    "restartPolicy": "OnFailure" if again else "Never",
                    "containers": [container],
                    "volumes": pod.volumes(plan),
                },
            },
        },
    }


def _container(plan: JobPlan, process: dict[str, Any]) -> dict[str, Any]:
    """Return the only container of a pod, which runs `process`."""
    rights = {**pod.resources(plan), **pod.container_security(plan), "volumeMounts": pod.mounts(plan)}
    return {"name": "pytorch", "image": plan.artifact.path, **process, **rights}


def _torchrun(plan: JobPlan, pods: pod.Pods, *options: str) -> list[str]:
    """Return the container's args: the training by torchrun with `options`."""
    start = [literal(plan.artifact.python, "python"), "-m", "torch.distributed.run", *options]
    return [*start, "--local-addr", "$(ENVBUILD_ADDRESS)", *pod.training(plan, pods)]


def pytorch_job(plan: JobPlan) -> list[dict[str, Any]]:
    """Return the documents of a PyTorchJob: etcd first, if the rendezvous needs it. Raises UsageError.

    The operator sets PYTHONUNBUFFERED, and PET_NNODES, PET_MAX_RESTARTS and PET_RDZV_*, which torchrun reads, and
    creates a service for each worker's name. For jobs that have only workers, it sets PET_NPROC_PER_NODE since 1.8
    (#1948); with 1.7, torchrun would start one rank, so the number is an argument.
    """
    suffix = max(f"-worker-{plan.nodes - 1}", etcd_suffix(plan), key=len)
    name = pod.job_name(plan.name, suffix)
    hosts = tuple(f"{name}-worker-{number}" for number in range(plan.nodes))
    # The endpoint is the first pod's own name, so torch can tell without DNS which pod hosts the store.
    pods = pod.Pods(name, hosts, "metadata.labels['training.kubeflow.org/replica-index']", _PYTORCHJOB_PORT)
    etcd = etcd_of(plan, name)
    again = plan.site.scheduler.requeue
    policy: dict[str, Any] = {"activeDeadlineSeconds": seconds(plan.time)}
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
    process = {
        "command": pod.start(plan, *waiting(etcd)),
        "args": _torchrun(plan, pods, "--nproc-per-node", str(plan.nproc_per_node)),
        "env": pod.variables(plan, pods, unbuffered=False),
        "ports": [{"name": "pytorchjob-port", "containerPort": _PYTORCHJOB_PORT}],
    }
    worker: dict[str, Any] = {
        "replicas": plan.nodes,
        "restartPolicy": "OnFailure" if again else "Never",
        "template": {
            "metadata": pod.pod_metadata(plan, name),
            "spec": {
                # The operator does not wake up at the job's deadline, while kubelet enforces the pod's.
                "activeDeadlineSeconds": seconds(plan.time),
                "terminationGracePeriodSeconds": plan.site.kubernetes.grace,
                **pod.pod_rights(plan),
                **pod.placement(plan, name),
                "containers": [_container(plan, process)],
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
    return [*(etcd.documents if etcd else ()), *_claim_imex(plan, name, worker["template"]["spec"]), job]


def _claim_imex(plan: JobPlan, name: str, spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Let the pods of `spec` claim a channel of IMEX; return the ComputeDomain that grants it, none for other GPUs."""
    if not plan.imex("racks"):
        return []
    spec["resourceClaims"] = [{"name": "imex", "resourceClaimTemplateName": name}]
    spec["containers"][0]["resources"]["claims"] = [{"name": "imex"}]
    about = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": "ComputeDomain", "metadata": pod.metadata(plan, name)}
    return [about | {"spec": {"numNodes": plan.nodes, "channel": {"resourceClaimTemplate": {"name": name}}}}]


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


def train_job(plan: JobPlan) -> list[dict[str, Any]]:
    """Return the documents of a TrainJob: etcd first, if the rendezvous needs it. Raises UsageError.

    Trainer sets PET_NNODES, PET_NPROC_PER_NODE, PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT, and refuses a job
    that sets them. It chooses torchrun's static rendezvous, which does not survive a restart, so c10d is requested on
    the command line. Volcano's queue: volcano/volcano.go of the same plugins and
    examples/yaml/04-volcano-integration.yaml; Kueue's: 03-kueue-integration.yaml.
    """
    # The name of the last pod; Kubernetes adds a dash and five characters.
    suffix = max(f"-node-0-{plan.nodes - 1}-12345", etcd_suffix(plan), key=len)
    name = pod.job_name(plan.name, suffix)
    hosts = tuple(f"{name}-node-0-{number}.{name}" for number in range(plan.nodes))
    number = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    pods = pod.Pods(name, hosts, number, _TRAINJOB_PORT)
    etcd = etcd_of(plan, name)
    endpoint = literal(f"{etcd.host}:{etcd.port}", "--endpoint") if etcd else "$(PET_MASTER_ADDR):$(PET_MASTER_PORT)"
    options = ["--rdzv-backend", plan.rendezvous, "--rdzv-endpoint", endpoint, "--rdzv-id", name]
    arguments = _torchrun(plan, pods, *options, "--max-restarts", str(plan.max_restarts))
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
        trainer["resourcesPerNode"] = limits["resources"]
    runtime = plan.site.kubernetes.runtime
    job = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": pod.job_metadata(plan, name),
        "spec": {
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "ClusterTrainingRuntime", "name": runtime},
            "activeDeadlineSeconds": seconds(plan.time),
            "trainer": trainer,
            "runtimePatches": [_patch(plan, name)],
        },
    }
    return [*(etcd.documents if etcd else ()), job]


def _meeting(plan: JobPlan, etcd: Etcd | None) -> list[str]:
    """Return the shell lines before torchrun that pass it the pod that hosts the store.

    torch cannot find out by itself before DNS knows the pods.
    """
    conf = ",".join(f"{key}={value}" for key, value in pod.rendezvous_conf(plan).items())
    if etcd is not None:
        return [*waiting(etcd), f'export PET_RDZV_CONF="{conf}"']
    return ['if [ "$PET_NODE_RANK" = 0 ]; then host=1; else host=0; fi', f'export PET_RDZV_CONF="is_host=$host,{conf}"']


def _patch(plan: JobPlan, name: str) -> dict[str, Any]:
    """Return the additions to the runtime's pods: labels, placement and volumes; and to the JobSet's annotations."""
    spec: dict[str, Any] = {
        **pod.placement(plan, name),
        "containers": [{"name": "node"} | pod.container_security(plan) | {"volumeMounts": pod.mounts(plan)}],
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


@dataclass(frozen=True, slots=True)
class Etcd:
    """The address of the rendezvous, and the Kubernetes objects that it needs (none for the site's own server).

    torch's etcd rendezvous uses etcd's v2 API, which 3.6 removed and 3.4 and 3.5 offer with --enable-v2. The server
    advertises the name of its service: clients reconnect to the advertised address after a lost connection. Only
    `kubectl delete -f` removes a server that is part of the job's manifest.
    """

    host: str
    port: int
    documents: tuple[dict[str, Any], ...] = ()


def etcd_suffix(plan: JobPlan) -> str:
    """Return the suffix that etcd's objects add to the job's name, "" without etcd."""
    return _ETCD_SUFFIX if plan.rendezvous == "etcd-v2" else ""


def etcd_of(plan: JobPlan, name: str) -> Etcd | None:
    """Return the etcd server of job `name`: the plan's endpoint or one in the manifest; None if the rendezvous is c10d.

    Raises UsageError for an endpoint that is not HOST:PORT.
    """
    if plan.rendezvous != "etcd-v2":
        return None
    if plan.rendezvous_endpoint:
        endpoint = _ENDPOINT.fullmatch(plan.rendezvous_endpoint)
        if endpoint is None or not 0 < int(endpoint["port"]) < 65536:
            raise UsageError(
                f"{plan.rendezvous_endpoint!r} is not the endpoint of an etcd server",
                "write HOST:PORT, or leave out --endpoint: the job then brings its own",
            )
        return Etcd(endpoint["host"], int(endpoint["port"]))
    own = f"{name}{_ETCD_SUFFIX}"
    return Etcd(own, _ETCD_PORT, (_etcd_service(plan, own), _etcd_deployment(plan, own)))


def waiting(etcd: Etcd | None) -> list[str]:
    """Return shell lines that fail if the image lacks python-etcd, and then wait until etcd accepts connections.

    Without the wait, torchrun fails at once if etcd is not ready. The job's time limit ends the wait. $1 is the
    interpreter.
    """
    if etcd is None:
        return []
    probe = f'import socket; socket.create_connection(("{etcd.host}", {etcd.port}), 5).close()'
    lacks = "the image lacks python-etcd, which the etcd rendezvous imports: add it to the recipe's requirements"
    return [
        f'"$1" -c "import etcd" || {{ echo "{lacks}" >&2; exit 1; }}',
        f"until \"$1\" -c '{probe}' 2> /dev/null; do",
        f'  echo "waiting for etcd at {etcd.host}:{etcd.port}" >&2',
        "  sleep 2",
        "done",
    ]


def _etcd_service(plan: JobPlan, own: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": pod.metadata(plan, own),
        "spec": {
            "selector": pod.metadata(plan, own)["labels"],
            "ports": [{"name": "client", "port": _ETCD_PORT, "targetPort": _ETCD_PORT}],
        },
    }


def _etcd_deployment(plan: JobPlan, own: str) -> dict[str, Any]:
    command = [
        "etcd",
        "--enable-v2=true",
        "--data-dir=/var/lib/etcd",
        f"--listen-client-urls=http://0.0.0.0:{_ETCD_PORT}",
        f"--advertise-client-urls=http://{own}:{_ETCD_PORT}",
    ]
    container: dict[str, Any] = {
        "name": "etcd",
        "image": plan.site.kubernetes.etcd_image,
        "command": command,
        "ports": [{"name": "client", "containerPort": _ETCD_PORT}],
        "readinessProbe": {"tcpSocket": {"port": _ETCD_PORT}, "periodSeconds": 2},
        "resources": {"limits": {"cpu": "1", "memory": "512Mi"}},
        **pod.container_security(plan),
        "volumeMounts": [{"name": "data", "mountPath": "/var/lib/etcd"}],
    }
    template: dict[str, Any] = {**pod.pod_rights(plan), **pod.pod_account(plan), "containers": [container]}
    if tolerated := pod.tolerations(plan):
        template["tolerations"] = tolerated
    template["volumes"] = [{"name": "data", "emptyDir": {}}]
    labels = pod.metadata(plan, own)["labels"]
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": pod.metadata(plan, own),
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": labels},
            "strategy": {"type": "Recreate"},
            "template": {"metadata": pod.pod_metadata(plan, own), "spec": template},
        },
    }


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
        r'no matches for kind "ComputeDomain"',
        "the cluster lacks NVIDIA's DRA driver (github.com/NVIDIA/k8s-dra-driver-gpu), by which pods use NVLink between"
        ' nodes: have it installed, or set NCCL_MNNVL_ENABLE = "0" in [environment] of the site file to go without',
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
    names = re.findall(r"^((?:pytorchjob|trainjob|job)[^\s/]*/\S+) created", printed, re.IGNORECASE | re.MULTILINE)
    return names[-1] if names else printed.strip()


def refusal(done: subprocess.CompletedProcess[str], said: str, refused: Path, earlier: Path) -> HostError:
    """Return the error for the manifest `refused`, which kubectl rejected; `said` is the end of its output.

    `earlier` is the manifest of an earlier job, which may not exist. kubectl continues after an object that it
    could not create: the objects that it did create exist and may run.
    """
    files = " ".join(f"-f {shlex.quote(str(file))}" for file in (earlier, refused) if file.exists())
    delete = f"`kubectl delete --ignore-not-found {files}`"
    advice = next((hint for words, hint in _HINTS if re.search(words, done.stderr)), None)
    if made := done.stdout.strip():
        created = "\n".join(f"  {line}" for line in made.splitlines())
        hint = f"remove that part, and the etcd or job that an earlier job left, with {delete}, then submit again"
        return HostError(
            f"kubectl created only a part of {refused}:\n{created}\nand refused the rest:\n{said}",
            f"{advice}. First {hint}" if advice else hint,
        )
    if "AlreadyExists" in done.stderr:
        advice = f"choose another --name, or remove what is there, etcd too, with {delete}, then submit again"
    return HostError(f"kubectl refuses {refused}:\n{said}", advice or _CHANGE)


def unchecked_pod(done: subprocess.CompletedProcess[str]) -> str:
    """Return why the dry run of a pod is no test of the job's pods, "" if it is one."""
    if user := re.search(r"pods is forbidden: User (\S+) cannot create resource", done.stderr):
        return f"user {user[1]} may not create pods, as their controller may"
    if webhook := re.search(r'admission webhook "([^"]*)" does not support dry run', done.stderr):
        return f"the cluster's webhook {webhook[1]} does not support dry runs"
    return ""


def refused_pod(done: subprocess.CompletedProcess[str], said: str, name: str) -> HostError:
    """Return the error for job `name`, of whose pods the server refused one in a dry run; `said`: as in `refusal`."""
    advice = next((hint for words, hint in _HINTS if re.search(words, done.stderr)), None)
    return HostError(f"{name} was not submitted: a dry run of one of its pods failed:\n{said}", advice or _CHANGE)


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
