"""The parts that pods of every kind of job share: names, variables, volumes, resources, placement, user, and command.

Sources: kubernetes.io/docs/reference/kubernetes-api (Pod v1); limits without requests are requests too. PodSecurity
`restricted`: kubernetes.io/docs/concepts/security/pod-security-standards.

Values are written as YAML that every reader understands alike: kubectl reads YAML 1.1, where `no`, `on`, `0o7` and
`1e3` are not strings; others read 1.2. A string that may be read as another type, or that has special characters, is
written in double quotes. kubelet replaces $(NAME) in command, args and variables and turns $$ into $. Source:
kubernetes/kubernetes, third_party/forked/golang/expansion/expand.go.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envbuild.base.errors import UsageError
from envbuild.fabrics import adapter_of, preflight_devices
from envbuild.jobs.model import JobPlan, seconds
from envbuild.recipe.targets import gpu_families
from envbuild.runtimes.base import torchrun_word, word
from envbuild.site.jobs import (
    huge_pages_problem,
    job_variable_problem,
    label_value_problem,
    quantity,
    secret_reference,
    toleration,
    volume_source,
)

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
# Plain words that YAML 1.1 or 1.2 does not read as strings.
_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"}
# Control characters except tab and line feed, lone surrogates, byte order marks and non-characters: other YAML
# readers refuse or change them.
_FOREIGN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufeff\ufffe\uffff\u2028\u2029]")
_WIDE = 1_000_000


def literal(text: str, name: str) -> str:
    """Return `text` for a container's command, args or variable, escaped so that kubelet passes on exactly `text`.

    Raises UsageError for characters that a manifest cannot contain; `name` names the text in it.
    """
    return checked(text, name).replace("$", "$$")


def checked(text: str, name: str) -> str:
    """Return `text` if every YAML reader reads it alike. Raises UsageError if not; `name` names it there."""
    if foreign := _FOREIGN.search(text):
        raise UsageError(
            f"{name}: a Kubernetes manifest cannot carry the character {foreign[0]!r} of {text!r}",
            "put such text into a file that pods see, and name the file",
        )
    return text


def dump(comment: str, documents: Sequence[Mapping[str, Any]]) -> str:
    """Return `documents` as one YAML text that begins with `comment`; keys keep their order."""
    from ruamel.yaml import YAML

    yaml = YAML()
    yaml.indent(mapping=2, sequence=4, offset=2)
    yaml.width = _WIDE
    yaml.representer.ignore_aliases = lambda data: True
    parts = []
    for document in documents:
        text = io.StringIO()
        yaml.dump(_quoted(document), text)
        parts.append(text.getvalue())
    line = "".join(character if character.isprintable() else "?" for character in comment)
    return f"# {line}\n" + "---\n".join(parts)


def _quoted(value: Any) -> Any:
    """Return `value` with its strings marked by the style in which to write them."""
    from ruamel.yaml.scalarstring import DoubleQuotedScalarString, LiteralScalarString

    if isinstance(value, Mapping):
        return {_quoted(key): _quoted(item) for key, item in value.items()}
    if isinstance(value, YamlScript):
        return LiteralScalarString(value.text)
    if isinstance(value, list | tuple):
        return [_quoted(item) for item in value]
    if isinstance(value, str) and (not _PLAIN.fullmatch(value) or value.lower() in _WORDS):
        return DoubleQuotedScalarString(value)
    return value


class YamlScript:
    """A shell script that is written as a readable block of YAML."""

    def __init__(self, text: str) -> None:
        if "$(" in text or "$$" in text or not text.endswith("\n"):
            raise ValueError("kubelet would expand this text")
        self.text = text


_MAX_ARG_STRLEN = 128 * 1024
# Kubernetes' and torchrun's time between SIGTERM and SIGKILL, if nobody chooses another (seconds).
GRACE_S = 30
# The time of these that the container needs after torchrun has ended.
_LAST_S = 5
# The module that starts a rank and waits for the others.
_RANK = "ddp_train.launch.rank"
_KUEUE = "kueue.x-k8s.io/"
KUEUE_QUEUE, _KUEUE_PRIORITY = f"{_KUEUE}queue-name", f"{_KUEUE}priority-class"
LABEL = "app.kubernetes.io/instance"
_LONGEST_LABEL = 63
_ARCHES = {"x86_64": "amd64", "aarch64": "arm64"}
_ARCH = "kubernetes.io/arch"
# The operator sets torchrun's own variables, and envbuild those of the node contract.
_RESERVED = re.compile(r"PET_.*|ENVBUILD_.*|MASTER_(ADDR|PORT)|(LOCAL_)?RANK|(LOCAL_)?WORLD_SIZE")


@dataclass(frozen=True, slots=True)
class Pods:
    """The pods of one job.

    `name` is the job's name; `hosts` are the pods' host names, in the order of their numbers; `number` is the
    path of the field that holds a pod's own number; `port` is the port of the rendezvous on the first pod.
    """

    name: str
    hosts: tuple[str, ...]
    number: str | None
    port: int


def job_name(title: str, suffix: str) -> str:
    """Return `title` as a DNS label (RFC 1035) that is still valid with the operator's `suffix`.

    A name that is too long is cut and gets a digest of the whole, so that two long names stay distinct.
    """
    name = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
    if not re.match(r"[a-z]", name):
        name = f"job-{name}".rstrip("-")
    longest = _LONGEST_LABEL - len(suffix)
    if len(name) > longest:
        digest = hashlib.sha256(title.encode()).hexdigest()[:8]
        name = f"{name[: longest - 9].rstrip('-')}-{digest}"
    return name


def metadata(plan: JobPlan, name: str) -> dict[str, Any]:
    """Return an object's name, namespace and label."""
    return {"name": name, "namespace": plan.site.kubernetes.namespace, "labels": {LABEL: name}}


def job_metadata(plan: JobPlan, name: str) -> dict[str, Any]:
    """Return the job's metadata, with the site's labels and annotations, and the queue.

    Source: kubernetes-sigs/kueue, pkg/controller/constants/constants.go. Kueue's webhook suspends a job with a queue
    until it is admitted. Raises UsageError for a queue that is not the value of a label.
    """
    made = metadata(plan, name)
    made["labels"] |= plan.site.kubernetes.labels
    for key, label in (("partition", KUEUE_QUEUE), ("qos", _KUEUE_PRIORITY)):
        value, origin = getattr(plan.site.scheduler, key), plan.site.origin("scheduler", key)
        if not value:
            continue
        if problem := label_value_problem(value):
            raise UsageError(f"{origin}: {problem}", "write the name of a queue or priority class of Kueue or Volcano")
        if made["labels"].get(label, value) != value:
            raise UsageError(f"{origin} is {value}, and {label} in [kubernetes] labels another", "keep one of them")
        made["labels"][label] = value
    return made | _annotations(plan)


def pod_metadata(plan: JobPlan, name: str) -> dict[str, Any]:
    """Return the pods' labels and annotations. Kueue would queue a pod with its labels beside the job."""
    labels = {key: value for key, value in plan.site.kubernetes.labels.items() if not key.startswith(_KUEUE)}
    return {"labels": {LABEL: name} | labels} | _annotations(plan)


def _annotations(plan: JobPlan) -> dict[str, Any]:
    annotations = {
        key: checked(value, f"[kubernetes] annotations, {key}")
        for key, value in plan.site.kubernetes.annotations.items()
    }
    return {"annotations": annotations} if annotations else {}


def backoff_limit(plan: JobPlan) -> int:
    """Return the backoffLimit that allows each pod to restart as often as the site says, on average.

    The training operator and the controller of Jobs give up when the sum of the restarts of all pods, over the life of
    the job, *reaches* it (kubeflow/training-operator v1.9.4, pkg/core/job.go; kubernetes/kubernetes,
    pkg/controller/job/job_controller.go). One failure ends the agents of all pods, so each counts for all.
    """
    return plan.site.kubernetes.retries * plan.nodes + 1


def rendezvous_conf(plan: JobPlan) -> dict[str, int]:
    """Return torchrun's --rdzv-conf. c10d and etcd-v2 share the code that reads it."""
    return {"join_timeout": plan.join_timeout_s, "read_timeout": plan.read_timeout_s}


def run_folder(plan: JobPlan, name: str) -> str:
    """Return the folder of this job's files, which all pods see."""
    return f"{plan.work.rstrip('/')}/{name}"


def variables(plan: JobPlan, pods: Pods, *, unbuffered: bool = True) -> list[dict[str, Any]]:
    """Return the container's variables. Raises UsageError for a variable that the site must not set."""
    given = dict(plan.variables)
    for name in given:
        problem = job_variable_problem(name)
        if problem is None and _RESERVED.fullmatch(name):
            problem = f"{name} is set by the job itself"
        if problem is not None:
            origin = plan.origins.get(f"variables.{name}", "variables of the job")
            raise UsageError(f"{problem} ({origin})", "remove it from the site file")
    fixed = {"LOGLEVEL": "INFO", "PYTHONNOUSERSITE": "1"}
    if plan.site.kubernetes.run_as:
        # The image has no such user: programs that look up a name or a home folder would fail.
        fixed |= {"HOME": "/tmp", "USER": "envbuild"}
    if unbuffered:
        fixed["PYTHONUNBUFFERED"] = "1"
    if plan.strategy == "ddp":
        # Otherwise, restarts over several nodes are a race: pytorch/pytorch#135712.
        fixed["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    flight = f"{run_folder(plan, pods.name)}/flight-0-"
    # As ddp_train/flight.py.
    fixed |= {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_FR_DUMP_TEMP_FILE": flight}
    if plan.artifact.accelerator.gpu:
        fixed |= {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": flight}
        fixed["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "1"
    if plan.library_path:
        fixed["ENVBUILD_LIBRARY_PATH"] = ":".join(plan.library_path)
    if plan.strategy == "ddp" and plan.site.kubernetes.grace > GRACE_S:
        # Otherwise torchrun kills ranks after 30 s, as torch 2.10 and older do in any case.
        fixed["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(plan.site.kubernetes.grace - _LAST_S)
    node = {
        "ENVBUILD_NODES": str(len(pods.hosts)),
        "ENVBUILD_HOSTS": " ".join(pods.hosts),
        "ENVBUILD_PORT": str(pods.port),
        "ENVBUILD_RUN": run_folder(plan, pods.name),
        "ENVBUILD_RUN_ID": pods.name,
    }
    listed: list[dict[str, Any]] = [
        {"name": name, "value": literal(_fitting(name, value), f"variable {name}")}
        for name, value in ({**fixed, **given} | node).items()
    ]
    listed += _secret_variables(plan, {variable["name"] for variable in listed})
    listed.append(_field("ENVBUILD_ADDRESS", "status.podIP"))
    if plan.site.kubernetes.claim:
        listed.append(_field("ENVBUILD_POD_UID", "metadata.uid"))
    if pods.number is None:
        listed.append({"name": "ENVBUILD_NODE", "value": "0"})
    else:
        listed.append(_field("ENVBUILD_NODE", pods.number))
    return listed


def _fitting(name: str, value: str) -> str:
    """Return `value` of variable `name`. Raises UsageError for a value that is too long for execve(2)."""
    size = len(f"{name}={value}".encode(errors="surrogatepass"))
    if size < _MAX_ARG_STRLEN:
        return value
    hint = "put such text into a file that pods see, and name the file"
    if name == "ENVBUILD_HOSTS":
        name = f"{name}, the names of {len(value.split())} pods,"
        hint = "choose a shorter --name or fewer --nodes"
    raise UsageError(f"{name} has {size} bytes: Linux starts no process with a variable of 128 KiB or more", hint)


def _secret_variables(plan: JobPlan, taken: Collection[str]) -> list[dict[str, Any]]:
    """Return the variables that kubelet takes from secrets. Raises UsageError for one that is set in another way."""
    secrets = []
    for name, reference in plan.site.kubernetes.secrets.items():
        secret = secret_reference(reference)
        if name.startswith("/") or secret is None:
            continue
        if name in taken or _RESERVED.fullmatch(name):
            where = plan.site.origin("kubernetes", "secrets")
            raise UsageError(f"{where}: {name} is set by the job, or in [environment]", "keep one of them")
        secrets.append({"name": name, "valueFrom": {"secretKeyRef": {"name": secret[0], "key": secret[1]}}})
    return secrets


def _field(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def training(plan: JobPlan, pods: Pods) -> list[str]:
    """Return the training command for the container's args, with the paths of its files in the run's folder.

    Ranks on several pods wait for each other at their end (ddp_train.launch.rank), for the time limit at most.
    """
    files = [(option, f"{run_folder(plan, pods.name)}/{file}") for option, file in plan.run_files]
    waiting = ["-m", _RANK, str(seconds(plan.time))] if plan.nodes > 1 else []
    words = [*waiting, *plan.command, *(word for pair in files for word in pair)]
    if plan.strategy == "ddp":
        words = [torchrun_word(word) for word in words]
    return [literal(word, "the training's command") for word in words]


def start(plan: JobPlan, *more: str) -> list[str | YamlScript]:
    """Return the container's command, which creates the run's folder, runs this pod's checks and then args.

    `more` are additional shell lines before the end.
    """
    lines = ["set -eu", 'mkdir -p "$ENVBUILD_RUN"', 'cd "$ENVBUILD_RUN/.."', *logged(plan)]
    if plan.library_path:
        before = '"$ENVBUILD_LIBRARY_PATH${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"'
        lines.append(f"export LD_LIBRARY_PATH={before}")
    lines += more
    if plan.nodes > 1:
        old = f"the image has no {_RANK}: build and push it with the envbuild that renders the job"
        lines.append(f'"$1" -c "import {_RANK}" || {{ echo "{old}" >&2; exit 5; }}')
    if plan.artifact.chips:
        lines.append(f'"$1" -m ddp_train.chips {",".join(plan.artifact.chips)} -- true || exit 5')
    if plan.preflight:
        lines += _preflight(plan)
    return ["/bin/sh", "-c", YamlScript("\n".join([*lines, *run(plan), ""])), "envbuild"]


def _preflight(plan: JobPlan) -> list[str]:
    """Return shell lines that check the pod by itself: before the pods run, no pod knows the names of the others."""
    words = [f"--arch {plan.artifact.arch}"]
    if plan.gpus_per_node:
        words.append(f"--gpus {plan.gpus_per_node}")
    if plan.artifact.provider:
        words.append(f"--provider {plan.artifact.provider}")
    if plan.site.kubernetes.shm:
        words.append(f"--shm {quantity(_shm(plan))}")
    # Backquotes, because kubelet would expand $(…).
    alone = 'ENVBUILD_NODE=0 ENVBUILD_NODES=1 ENVBUILD_HOSTS="`uname -n`" ENVBUILD_ADDRESSES="$ENVBUILD_ADDRESS"'
    if devices := preflight_devices(plan.artifact.provider):
        alone += f" ENVBUILD_DEVICES={word(devices)}"
    alone += f" ENVBUILD_IMEX={plan.imex()}" if plan.imex() else ""
    return [f'{alone} "$1" -m ddp_train.preflight {" ".join(words)} || exit 5']


def _shm(plan: JobPlan) -> str:
    """Return the size of /dev/shm; Kubernetes writes a factor of 1000 as k."""
    return re.sub(r"K$", "k", plan.site.kubernetes.shm)


def resources(plan: JobPlan) -> dict[str, Any]:
    """Return a container's resources: its limits, which are its requests too.

    Raises UsageError when they lack the fabric's device, or the site's resources conflict with other settings.
    """
    site = plan.site.kubernetes
    limits: dict[str, str] = {}
    if plan.cpus_per_node:
        limits["cpu"] = str(plan.cpus_per_node)
    if plan.site.node.memory:
        limits["memory"] = _memory(plan.site.node.memory)
    if plan.gpus_per_node:
        limits[plan.artifact.accelerator.kubernetes] = str(plan.gpus_per_node)
    for key, amount in site.resources.items():
        if key in {family.kubernetes for family in gpu_families()}:
            raise UsageError(
                f"{plan.site.origin('kubernetes', 'resources')}: [node] gpus already requests {key}",
                "remove it from [kubernetes] resources",
            )
        limits[checked(key, "[kubernetes] resources")] = checked(amount, f"resource {key}")
    adapter = adapter_of(plan.artifact.provider)
    if adapter and adapter.resource and plan.nodes > 1 and adapter.resource not in limits:
        raise UsageError(
            f"the artifact needs {adapter.called[0]}, but pods of site {plan.site.name} request none",
            f'write "{adapter.resource}" = "1", or how many a node has, in [kubernetes.resources]',
        )
    if problem := huge_pages_problem(limits):
        where = plan.site.origin("kubernetes", "resources")
        raise UsageError(f"{where}: {problem}", "set [node] cpus and memory")
    return {"resources": {"limits": limits}} if limits else {}


def _memory(text: str) -> str:
    """Return Slurm's 480G in Kubernetes' notation: powers of 1024, MiB without a unit."""
    return f"{text}i" if text[-1].isalpha() else f"{text}Mi"


def placement(plan: JobPlan, name: str) -> dict[str, Any]:
    """Return the pods' placement: on nodes of the artifact's architecture, one pod per node if nodes are exclusive.

    Raises UsageError when the site selects nodes of another architecture.
    """
    arch = _ARCHES[plan.artifact.arch]
    labels: Mapping[str, str] = plan.site.kubernetes.node_selector
    if labels.get(_ARCH, arch) != arch:
        raise UsageError(
            f"site {plan.site.name} chooses {labels[_ARCH]} nodes, the artifact is for {arch}",
            f"remove {_ARCH} from [kubernetes.node_selector]: the artifact's target sets it",
        )
    selector = {_ARCH: arch} | {
        checked(key, "[kubernetes] node_selector"): checked(value, f"node_selector {key}")
        for key, value in labels.items()
    }
    placed: dict[str, Any] = {"nodeSelector": selector}
    tolerated = tolerations(plan)
    if plan.gpus_per_node:
        gpu = plan.artifact.accelerator.kubernetes
        tolerated.insert(0, {"key": gpu, "operator": "Exists", "effect": "NoSchedule"})
    if tolerated:
        placed["tolerations"] = tolerated
    if plan.site.scheduler.exclusive and plan.nodes > 1:
        term = {"labelSelector": {"matchLabels": {LABEL: name}}, "topologyKey": "kubernetes.io/hostname"}
        rule = {"requiredDuringSchedulingIgnoredDuringExecution": [term]}
        placed["affinity"] = {"podAntiAffinity": rule}
    return placed | pod_account(plan)


def tolerations(plan: JobPlan) -> list[dict[str, str]]:
    """Return the site's tolerations."""
    return [parsed for taint in plan.site.kubernetes.tolerations if (parsed := toleration(taint))]


def pod_account(plan: JobPlan) -> dict[str, Any]:
    """Return the user, the service account and the pull secret of a pod."""
    made = pod_security(plan)
    if plan.site.kubernetes.service_account:
        made["serviceAccountName"] = plan.site.kubernetes.service_account
    if plan.site.kubernetes.pull_secret:
        made["imagePullSecrets"] = [{"name": plan.site.kubernetes.pull_secret}]
    return made


def pod_rights(plan: JobPlan) -> dict[str, Any]:
    """Return the settings that TrainJobs leave to their runtime: no token of the API server, and the priority."""
    priority = plan.site.kubernetes.priority_class
    return {"automountServiceAccountToken": False} | ({"priorityClassName": priority} if priority else {})


def _more_volumes(plan: JobPlan) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return (volume, mount) of each volume and secret of the site. Raises UsageError for two at one path."""
    site = plan.site.kubernetes
    more: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for number, (path, text) in enumerate(site.volumes.items()):
        if source := volume_source(text):
            more.append(_volume(f"volume-{number}", source[0], path, read_only=source[1]))
    files = [
        (path, secret)
        for path, reference in site.secrets.items()
        if path[0] == "/" and (secret := secret_reference(reference))
    ]
    for number, (path, (name, _)) in enumerate(files):
        more.append(_volume(f"secret-{number}", {"secret": {"secretName": name}}, path, read_only=True))
    paths = [site.mount, *(mount["mountPath"] for _, mount in more)]
    if twice := next(
        (path for path in paths if [other.rstrip("/") for other in paths].count(path.rstrip("/")) > 1), ""
    ):
        raise UsageError(
            f"two volumes of site {plan.site.name} have the mount path {twice}", "change a path in [kubernetes]"
        )
    return more


def _volume(name: str, source: Any, path: str, *, read_only: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    mount: dict[str, Any] = {"name": name, "mountPath": checked(path, "[kubernetes] volumes and secrets")}
    return {"name": name, **source}, mount | ({"readOnly": True} if read_only else {})


def mounts(plan: JobPlan) -> list[dict[str, Any]]:
    """Return the container's volume mounts."""
    data = {"name": "data", "mountPath": checked(plan.site.kubernetes.mount, "[kubernetes] mount")}
    return [data, {"name": "shm", "mountPath": "/dev/shm"}, *(mount for _, mount in _more_volumes(plan))]


def volumes(plan: JobPlan) -> list[dict[str, Any]]:
    """Return the pod's volumes: the claim with data and snapshots, and memory for /dev/shm.

    The default size of /dev/shm in a container is 64 MiB. Raises UsageError when pods would not share their
    files, or would not see the working folder.
    """
    site = plan.site.kubernetes
    if not site.claim and plan.nodes > 1:
        raise UsageError(
            f"pods of site {plan.site.name} share no file system: a restart needs the snapshot",
            "name a ReadWriteMany volume claim in [kubernetes] claim",
        )
    mount = site.mount.rstrip("/")
    if plan.work != site.mount and not plan.work.startswith(f"{mount}/"):
        raise UsageError(
            f"pods see {site.mount}, and the job's folder is {plan.work} ({plan.origins.get('work', '')})",
            f"choose a folder below {site.mount} with --work, or change [kubernetes] mount",
        )
    data: dict[str, Any] = {"name": "data"}
    data |= {"persistentVolumeClaim": {"claimName": site.claim}} if site.claim else {"emptyDir": {}}
    shm: dict[str, str] = {"medium": "Memory"}
    if site.shm:
        shm["sizeLimit"] = _shm(plan)
    return [data, {"name": "shm", "emptyDir": shm}, *(volume for volume, _ in _more_volumes(plan))]


def logged(plan: JobPlan) -> list[str]:
    """Return lines of POSIX shell that copy all further output to RUN/pod-NUMBER.log; none without a volume claim.

    The training operator removes the pods of a job that reaches backoffLimit or its deadline, and with them the logs
    that kubectl shows: up to 1.9.3 all pods, from 1.9.4 on those that run or start again
    (kubeflow/training-operator, pkg/controller.v1/common/job.go).

    A later pod, also of another job of that name, appends to the file. Each pod begins with a line with its UID and the
    time; jobcheck/diagnose/read.py reads the lines after the last one.

    The container ends with its shell. The shell waits for tee, so that the last lines are written, but only for
    a few seconds: processes that outlive torchrun keep the pipe open.
    """
    if not plan.site.kubernetes.claim:
        return []
    return [
        # Expanded before tee starts: if this failed in tee's shell, nobody would open the pipe, and this shell
        # would wait for it.
        'log="$ENVBUILD_RUN/pod-$ENVBUILD_NODE.log"',
        'echo "envbuild: pod start: $ENVBUILD_POD_UID at `date -u +%Y-%m-%dT%H:%M:%SZ`" >> "$log" || true',
        "pipe=`mktemp -d`/log",
        'mkfifo "$pipe"',
        'tee -a "$log" < "$pipe" &',
        "tee=$!",
        'exec > "$pipe" 2>&1',
        'rm -r "${pipe%/log}"',
        "trap 'code=$?; exec > /dev/null 2>&1",
        '{ sleep 5; kill "$tee"; } & wait "$tee" || true',
        'exit "$code"\' EXIT',
    ]


def lost_log(plan: JobPlan) -> str | None:
    """Return a warning if the log of a failed job is lost, because every kind of job controller removes its pods."""
    if plan.site.kubernetes.claim:
        return None
    return (
        "when this job fails, its log is lost: Kubernetes removes the pod, and no volume keeps a copy."
        " Set [kubernetes] claim in the site file, or keep `kubectl logs --follow` running"
    )


def run(plan: JobPlan) -> list[str]:
    """Return lines of POSIX shell that run args, pass on the signal that ends a pod, and exit with the same code."""
    if not plan.site.kubernetes.claim:
        return ['exec "$@"']
    return [
        # Before the child starts: a signal in between would end this shell alone.
        "child='' told=''",
        'trap \'told=yes; [ -z "$child" ] || kill "$child"\' TERM',
        '"$@" &',
        "child=$!",
        '[ -z "$told" ] || kill "$child"',
        'code=0; wait "$child" || code=$?',
        # A signal ends wait, not the child.
        'while kill -0 "$child" 2> /dev/null; do code=0; wait "$child" || code=$?; done',
        'exit "$code"',
    ]


def pod_security(plan: JobPlan) -> dict[str, Any]:
    """Return the settings that PodSecurity `restricted` requires of a pod, if the site names its user.

    A group also owns the volumes whose drivers let Kubernetes set an owner.
    """
    user, _, group = plan.site.kubernetes.run_as.partition(":")
    if not user:
        return {}
    context: dict[str, Any] = {"runAsNonRoot": True, "runAsUser": int(user)}
    if group:
        context |= {"runAsGroup": int(group), "fsGroup": int(group), "fsGroupChangePolicy": "OnRootMismatch"}
    return {"securityContext": context | {"seccompProfile": {"type": "RuntimeDefault"}}}


def container_security(plan: JobPlan) -> dict[str, Any]:
    """Return the settings that PodSecurity `restricted` requires of a container, if the site names its user."""
    if not plan.site.kubernetes.run_as:
        return {}
    context = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    return {"securityContext": context}
