"""Tables of site.toml about jobs: scheduler, modules, paths, containers, nodes and Kubernetes.

Source of what Kubernetes accepts: kubernetes/kubernetes, pkg/apis/core/validation/validation.go, and
k8s.io/apimachinery/pkg/util/validation.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

from envbuild.base.masking import looks_secret, redact, sounds_secret
from envbuild.base.text import SIZES
from envbuild.base.toml import Rules, form, key
from envbuild.data.schedulers import LAUNCHER_NAMES, LAUNCHERS, SCHEDULER_NAMES, TITLES
from envbuild.gpus import GPU_PATTERN, gpu_problem

_DEFAULT_LAUNCHERS = ", ".join(f"{known[0]} on {TITLES[name]}" for name, known in LAUNCHERS.items() if known)
# A time limit: [D-]HH:MM:SS.
TIME_PATTERN = r"(\d{1,4}-)?\d{1,3}:\d{2}:\d{2}"
_SHELL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_WORD = r"^\S*$"
_ABSOLUTE = r"^(/\S*)?$"
# Names, labels and quantities of Kubernetes.
_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_SUBDOMAIN = rf"(?=.{{1,253}}\Z){_LABEL}(\.{_LABEL})*"
_NAME = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_PREFIX = rf"(?=[^/]{{1,253}}/){_LABEL}(\.{_LABEL})*/"
_UNITS = {"": Decimal(1), "m": Decimal("0.001"), "k": Decimal(1000)}
_UNITS |= {unit: Decimal(1000 ** (power + 2)) for power, unit in enumerate("MGTPE")}
_UNITS |= {f"{unit}i": Decimal(1024 ** (power + 1)) for power, unit in enumerate("KMGTPE")}
_QUANTITY = re.compile(rf"([0-9]+(?:\.[0-9]+)?)({'|'.join(_UNITS)})")
_OF_THE_CONTAINER = ("/dev", "/proc", "/sys")
_LARGEST_ID = 2**31 - 1
# The ClusterTrainingRuntime that comes with Trainer.
DEFAULT_RUNTIME = "torch-distributed"
_ENDS = ", with a letter or digit first and last"
_TAINT = re.compile(
    rf"(?P<key>({_PREFIX})?{_NAME})(=(?P<value>({_NAME})?))?(:(?P<effect>NoSchedule|PreferNoSchedule|NoExecute))?"
)
_VOLUME = re.compile(
    rf"(?P<kind>claim|configmap|host|empty)(:(?P<name>/[^\s:]*|{_SUBDOMAIN}|[0-9]+(\.[0-9]+)?[A-Za-z]*))?(?P<ro>:ro)?"
)
_SECRET_REFERENCE = re.compile(rf"(?P<name>{_SUBDOMAIN})(/(?P<key>[-._A-Za-z0-9]{{1,253}}))?")
# Labels by which operators, and the job's own objects, find pods.
_OWN_LABELS = re.compile(
    r"app\.kubernetes\.io/instance|([^/]*\.)?(training\.kubeflow\.org|trainer\.kubeflow\.org|batch\.kubernetes\.io"
    r"|jobset\.sigs\.k8s\.io)/.*|job-name|controller-uid"
)


def job_variable_problem(name: str) -> str | None:
    """Return why `name` may not be a variable of jobs, or None: other users read job scripts, so no secrets."""
    if not _SHELL_NAME.fullmatch(name):
        return f"{name!r} is not the name of a variable"
    if sounds_secret(name):
        return (
            f"{name!r} sounds like a secret: job scripts and receipts are read by others; "
            "let the job read it from a file that only you may read"
        )
    return None


def line_problem(text: str) -> str | None:
    """Return why `text` is not one line, or None."""
    return None if text.isprintable() and text.strip() == text and text else "is not one line of text"


def value_problem(value: str) -> str | None:
    """Return why `value` may not be the value of a variable, or None: others read job scripts, so no secrets."""
    if not value.isprintable():
        return "is not one line of text"
    if redact(value) != value:
        return "holds a password or token, and job scripts are read by others; use a proxy or mirror that needs none"
    if looks_secret(value):
        return "looks like a secret: job scripts are read by others; let the job read it from a file of your own"
    return None


def time_problem(text: str) -> str | None:
    """Return why `text` is not a time limit, or None."""
    match = re.fullmatch(TIME_PATTERN, text)
    if match and re.search("[1-9]", text):
        return None
    return f"{text!r} is no time {'at all' if match else 'limit'}: HH:MM:SS or D-HH:MM:SS, such as 04:00:00"


mount_problem = form(r"/[^:,\s]*(:/[^:,\s]*)?", "is not /PATH or /HOST:/CONTAINER")


label_problem = form(_LABEL, f"is not a name in Kubernetes: up to 63 of a-z, 0-9 and -{_ENDS}")
# "" names no object, such as a claim or secret.
object_problem = form(f"({_SUBDOMAIN})?", f"is not a name in Kubernetes: up to 253 of a-z, 0-9, - and .{_ENDS}")
_OBJECT: Rules = {"check": object_problem, "pattern": r"^[a-z0-9.-]*$"}
node_label_problem = form(
    f"({_PREFIX})?{_NAME}",
    "is not the name of a label: NAME or DOMAIN/NAME, NAME of up to 63 letters, digits, -, _ and .",
)
label_value_problem = form(
    f"({_NAME})?", f"is not the value of a label: up to 63 of letters, digits, -, _ and .{_ENDS}"
)


def job_label_problem(key: str) -> str | None:
    """Return why the site may not give jobs and pods the label `key`, or None."""
    if _OWN_LABELS.fullmatch(key):
        return f"{key!r} is set by the job or its operator"
    return node_label_problem(key)


annotation_problem = form(
    f"({_PREFIX})?{_NAME}",
    "is not the name of an annotation: NAME or DOMAIN/NAME, NAME of up to 63 letters, digits, -, _ and .",
)


def toleration(text: str) -> dict[str, str] | None:
    """Return KEY[=VALUE][:EFFECT], the form of `kubectl taint`, as a toleration of Kubernetes, None for other text."""
    match = _TAINT.fullmatch(text)
    if match is None:
        return None
    made = {"key": match["key"], "operator": "Exists" if match["value"] is None else "Equal"}
    if match["value"] is not None:
        made["value"] = match["value"]
    return made | ({"effect": match["effect"]} if match["effect"] else {})


toleration_problem = form(
    _TAINT.pattern,
    "is not KEY, KEY:EFFECT or KEY=VALUE:EFFECT of a taint, EFFECT being NoSchedule, PreferNoSchedule or NoExecute",
)


def volume_source(text: str) -> tuple[dict[str, object], bool] | None:
    """Return the source of a volume, and whether pods only read it; None for invalid text.

    claim:NAME and configmap:NAME, with :ro to only read; host:/PATH of the node; empty, or empty:SIZE, for a folder
    that lives as long as its pod.
    """
    match = _VOLUME.fullmatch(text)
    kind, name = (match["kind"], match["name"] or "") if match else ("", "")
    read_only = bool(match and match["ro"])
    if kind == "empty" and (not name or quantity(name)) and not read_only:
        return {"emptyDir": {"sizeLimit": name} if name else {}}, False
    if kind == "host" and name.startswith("/") and mount_path_problem(name) is None:
        return {"hostPath": {"path": name}}, read_only
    if kind in ("claim", "configmap") and re.fullmatch(_SUBDOMAIN, name):
        claim: dict[str, object] = {"persistentVolumeClaim": {"claimName": name}}
        return (claim if kind == "claim" else {"configMap": {"name": name}}), read_only
    return None


def volume_problem(text: str) -> str | None:
    """Return why `text` names no volume, or None."""
    if volume_source(text) is not None:
        return None
    return (
        f"{text!r} is no volume: claim:NAME, configmap:NAME, host:/PATH (each with :ro to only read it), empty[:SIZE]"
    )


def secret_reference(text: str) -> tuple[str, str] | None:
    """Return (name, key) of SECRET/KEY, (name, "") of SECRET, None for other text."""
    match = _SECRET_REFERENCE.fullmatch(text)
    return (match["name"], match["key"] or "") if match else None


def secret_problem(place: str, reference: str) -> str | None:
    """Return why pods cannot get a secret at `place`, a variable or a path, or None. Never repeats `reference`."""
    parsed = secret_reference(reference)
    if place.startswith("/"):
        if problem := mount_path_problem(place):
            return problem
        if parsed and not parsed[1]:
            return None
        return "is not the name of a secret, whose keys become files there: the value itself never belongs here"
    if not _SHELL_NAME.fullmatch(place):
        return f"{place!r} is neither the name of a variable nor an absolute path"
    if parsed and parsed[1]:
        return None
    return "is not SECRET/KEY, the names of a secret and of one of its keys: the value itself never belongs here"


def resource_problem(key: str, amount: str) -> str | None:
    """Return why a pod cannot have the limit `key` = `amount`, or None."""
    if "/" in key:
        if not re.fullmatch(f"{_PREFIX}{_NAME}", key):
            return f"{key!r} is not the name of a resource: DOMAIN/NAME, such as vpc.amazonaws.com/efa"
        whole = re.fullmatch(r"[1-9][0-9]*", amount)
        return None if whole else f'{amount!r}: devices are whole numbers, such as "1"'
    size = key.removeprefix("hugepages-")
    pages = size != key and _QUANTITY.fullmatch(size)
    if key not in ("cpu", "memory", "ephemeral-storage") and not pages:
        return (
            f"{key!r} is not a resource of Kubernetes: cpu, memory, ephemeral-storage, hugepages-2Mi,"
            " or DOMAIN/NAME of a device, such as vpc.amazonaws.com/efa"
        )
    match = _QUANTITY.fullmatch(amount)
    if not match or (match[2] == "m" and key != "cpu"):
        like = "2 or 500m" if key == "cpu" else "16Gi"
        return f"{amount!r} is not an amount of {key}, such as {like}"
    if pages and (not quantity(amount) or quantity(amount) % max(1, quantity(size))):
        return f"{amount!r} is not a multiple of {size}, the size of a page"
    return None


def huge_pages_problem(limits: Collection[str]) -> str | None:
    """Return why a pod may not have these limits, or None: huge pages require a limit on cpu or memory."""
    if {"cpu", "memory"} & {*limits} or not any(key.startswith("hugepages-") for key in limits):
        return None
    return "Kubernetes refuses pods that ask for huge pages without CPUs or memory"


UNLIMITED = "Kubernetes evicts such pods first, and a namespace with a quota on them creates none"


def unlimited(limits: Collection[str]) -> str:
    """Return which of CPUs and memory these limits lack, "" for none."""
    names = {"cpu": "CPUs", "memory": "memory"}
    return " and no ".join(title for name, title in names.items() if name not in limits)


def quantity(text: str) -> int:
    """Return a quantity of Kubernetes, such as 16Gi or 8G, as an integer, rounded down; 0 for an invalid one."""
    match = _QUANTITY.fullmatch(text)
    return int(Decimal(match[1]) * _UNITS[match[2]]) if match else 0


def mount_path_problem(text: str) -> str | None:
    """Return why pods cannot mount their data at `text`, or None."""
    if not re.fullmatch(r"/[^\s:]+", text) or {"", ".", ".."} & {*text.strip("/").split("/")}:
        return f"{text!r} is not an absolute path below /, without spaces, colons, // and dots for folders"
    if f"/{text.split('/')[1]}" in _OF_THE_CONTAINER:
        return f"{text!r} is in the container's own file systems; the job mounts /dev/shm itself"
    return None


def user_problem(text: str) -> str | None:
    """Return why `text` is not UID or UID:GID of a user other than root, or None."""
    match = re.fullmatch(r"([0-9]{1,10})(:([0-9]{1,10}))?", text)
    if not text or (match and 0 < int(match[1]) <= _LARGEST_ID and int(match[3] or 0) <= _LARGEST_ID):
        return None
    return f"{text!r} is not UID or UID:GID of a user other than root, such as 1000:1000"


@dataclass(frozen=True, slots=True)
class SchedulerTable:
    """`[scheduler]`: the scheduler of jobs and its options."""

    kind: str = key("none", "The scheduler.", choices=("none", *SCHEDULER_NAMES), example="slurm")
    partition: str = key(
        "", "Partition (Slurm) or queue (others; Kueue or Volcano on Kubernetes).", pattern=_WORD, example="gpu"
    )
    account: str = key("", "Who pays.", pattern=_WORD, example="project_1234")
    qos: str = key("", "Quality of service (Slurm), or Kueue's WorkloadPriorityClass (Kubernetes).", pattern=_WORD)
    constraint: str = key(
        "",
        "Which nodes: Slurm's --constraint, each chunk of PBS's select, LSF's select[…], Flux's --requires.",
        pattern=_WORD,
        example="icelake",
    )
    time: str = key(
        "01:00:00",
        "Most time of a job, HH:MM:SS or D-HH:MM:SS.",
        pattern=f"^{TIME_PATTERN}$",
        check=time_problem,
        example="04:00:00",
    )
    exclusive: bool = key(True, "Whether jobs have their nodes alone.")
    requeue: bool = key(True, "Whether a job whose node failed starts again.")
    auto_resume: bool = key(False, "SageMaker HyperPod's --auto-resume=1 for srun.")
    launcher: str | None = key(
        None, f"What starts torchrun on every node. Default: {_DEFAULT_LAUNCHERS}.", choices=LAUNCHER_NAMES
    )
    directives: tuple[str, ...] = key(
        (),
        "More lines for the scheduler, without #SBATCH, #PBS, #BSUB or #flux:. They replace lines that set the same.",
        check=line_problem,
        example=["--mail-type=END"],
    )


@dataclass(frozen=True, slots=True)
class ModulesTable:
    """`[modules]`: environment modules, loaded exactly like this at build and at run time."""

    init: str = key(
        "", "File that defines `module` where login shells do not.", pattern=_ABSOLUTE, example="/etc/profile.d/lmod.sh"
    )
    purge: bool = key(True, "Unload what is loaded first.")
    build: tuple[str, ...] = key(
        (), "Modules for building environments.", check=line_problem, example=["python/3.11.7", "cuda/12.6"]
    )
    run: tuple[str, ...] = key((), "Modules for jobs.", check=line_problem, example=["python/3.11.7", "cuda/12.6"])


@dataclass(frozen=True, slots=True)
class PathsTable:
    """`[paths]`: file systems, as seen from the nodes."""

    shared: str = key(
        "", "What all nodes see: artifacts, snapshots and logs belong here.", pattern=_ABSOLUTE, example="/fsx/{user}"
    )
    scratch: str = key("", "A node's own fast disk, for temporary files.", pattern=_ABSOLUTE, example="/scratch/{user}")
    cache: str = key("", "Caches of pip, Apptainer and enroot, off $HOME.", pattern=_ABSOLUTE)
    logs: str = key("logs", "Folder of the jobs' output, below the working folder.", pattern=r"^\S+$")


@dataclass(frozen=True, slots=True)
class StageTable:
    """`[stage]`: artifacts on the nodes' own disks."""

    enabled: bool = key(True, "Bring the artifact of a job of several nodes to each node's disk, once.")
    dir: str = key(
        "", "Folder on each node's own disk. Default: [paths] scratch.", pattern=_ABSOLUTE, example="/local/nvme"
    )
    keep: str = key("100G", f"Limit of the copies there: {SIZES}.", pattern=r"^[0-9]{1,9}[kMGT]?$")
    python: str = key("python3", "Python 3.6 or later of the nodes.", pattern=r"^\S+$", example="/usr/bin/python3.11")


def _runtimes() -> tuple[str, ...]:
    from envbuild.runtimes import of_sites  # when a site names one: every command reads its site at its start

    return of_sites()


@dataclass(frozen=True, slots=True)
class ContainerTable:
    """`[container]`: the container runtime of the nodes."""

    runtime: str = key("none", "What the nodes have.", choices=_runtimes, example="pyxis")
    mounts: tuple[str, ...] = key(
        (), "What containers see of the host: /PATH, or /HOST:/CONTAINER.", check=mount_problem, example=["/fsx:/fsx"]
    )


_place_problem = form(
    r"(/[^:,\s]*[^:,\s/])?", "is not an absolute path without spaces, colons, commas and / at its end"
)
# Mounted over an image's own, they would take its C library away.
_system_problem = form(
    r"(?!(/usr)?(/lib(64)?(/[a-z0-9_]+-linux-gnu)?)?\Z).*|", "is a folder of the system: name single files in `more`"
)


def _mounted_problem(text: str) -> str | None:
    return _place_problem(text) or _system_problem(text)


@dataclass(frozen=True, slots=True)
class HostStackTable:
    """`[host_stack]`: the nodes' own libfabric, NCCL plugin and MPI, and whether jobs use them."""

    mode: Literal["image", "inject"] = key(
        "image", "image: ranks use the artifact's own libraries; inject: those of the nodes, named here."
    )
    libfabric: str = key("", "Folder of libfabric.so.1.", check=_mounted_problem, example="/opt/amazon/efa/lib")
    nccl_plugin: str = key("", "File of NCCL's network plugin.", check=_mounted_problem)
    mpi: str = key("", "Folder of libmpi.so.*.", check=_mounted_problem)
    driver: str = key(
        "", "Folder of libcuda.so.1. `envbuild check` judges it; container runtimes mount it.", check=_place_problem
    )
    more: tuple[str, ...] = key((), "Files and folders that these load besides.", check=_mounted_problem)
    inventory: str = key("", "File with the nodes' libraries, for `check`. Default: SITE.stack.json beside this file.")

    @property
    def places(self) -> tuple[str, ...]:
        """The files and folders that ranks use in mode inject."""
        return tuple(filter(None, (self.libfabric, self.nccl_plugin, self.mpi, *self.more)))

    @property
    def injected(self) -> tuple[str, ...]:
        """The same, () in another mode."""
        return self.places if self.mode == "inject" else ()

    def library_path(self, *, isolated: bool) -> tuple[str, ...]:
        """Return the folders of LD_LIBRARY_PATH for them; outside of containers, not those of single files."""
        if not self.injected:
            return ()
        single = [place for place in self.more if ".so" in posixpath.basename(place)]
        folders = [self.libfabric, posixpath.dirname(self.nccl_plugin), self.mpi]
        folders += [place for place in self.more if place not in single]
        folders += [posixpath.dirname(place) for place in single if isolated]
        return tuple(dict.fromkeys(filter(None, folders)))


@dataclass(frozen=True, slots=True)
class NodeTable:
    """`[node]`: resources of one node."""

    gpus: int = key(0, "GPUs.", minimum=0, example=8)
    gpu_types: tuple[str, ...] = key(
        (),
        "What they are: chips (sm_90, gfx90a), GPUs (h100, mi250x) or families (hopper). Jobs refuse artifacts "
        "without code for them.",
        check=gpu_problem,
        pattern=GPU_PATTERN,
        example=["h100"],
    )
    cpus: int = key(
        0,
        "CPUs as the scheduler counts them, Slurm by threads: CPUTot of `scontrol show node`. 0: not said.",
        minimum=0,
    )
    arch: Literal["x86_64", "aarch64"] | None = key(
        None, "Processors. An artifact for others is refused.", example="aarch64"
    )
    memory: str = key("", "Memory for a job.", pattern=r"^(\d+[KMGT]?)?$", example="480G")


@dataclass(frozen=True, slots=True)
class KubernetesTable:
    """`[kubernetes]`: settings of pods."""

    namespace: str = key("default", "Namespace.", check=label_problem, pattern=r"^[a-z0-9-]+$")
    api: Literal["v1", "v2"] = key("v1", "v1: PyTorchJob of the training operator; v2: TrainJob of Trainer.")
    claim: str = key("", "Persistent volume claim with data and snapshots.", **_OBJECT | {"example": "fsx-pv"})
    mount: str = key("/data", "Where pods see it.", check=mount_path_problem, pattern=r"^/\S*$")
    shm: str = key("", "Size of /dev/shm.", pattern=r"^(\d+[KMGT]i?)?$", example="16Gi")
    node_selector: dict[str, str] = key(
        {}, "Labels that nodes must have.", key_check=node_label_problem, check=label_value_problem
    )
    tolerations: tuple[str, ...] = key(
        (),
        "Taints that pods tolerate, as `kubectl taint` has them: KEY, KEY:EFFECT, KEY=VALUE:EFFECT.",
        check=toleration_problem,
        example=["dedicated=training:NoSchedule"],
    )
    labels: dict[str, str] = key(
        {},
        "Labels of the job and its pods; those of Kueue are the job's alone.",
        key_check=job_label_problem,
        check=label_value_problem,
    )
    annotations: dict[str, str] = key(
        {}, "Annotations of the job and its pods.", key_check=annotation_problem, check=value_problem
    )
    priority_class: str = key("", "PriorityClass of pods. A TrainJob has that of its runtime.", **_OBJECT)
    service_account: str = key("", "ServiceAccount of pods.", **_OBJECT)
    resources: dict[str, str] = key(
        {}, "Limits of a pod besides GPUs, such as vpc.amazonaws.com/efa.", entry_check=resource_problem
    )
    etcd_image: str = key(
        "quay.io/coreos/etcd:v3.5.18",
        "Server for --rendezvous etcd-v2, 3.4 or 3.5, with a version or digest.",
        pattern=r"^[^\s@]+(:(?!latest$)[A-Za-z0-9_][A-Za-z0-9_.-]*|@sha256:[0-9a-f]{64})$",
    )
    run_as: str = key(
        "",
        "UID or UID:GID of pods, with all else that PodSecurity `restricted` asks for. Default: the image's user.",
        check=user_problem,
        pattern=r"^([1-9]\d*(:\d+)?)?$",
        example="1000:1000",
    )
    pull_secret: str = key("", "Name of the secret for pulling.", **_OBJECT)
    volumes: dict[str, str] = key(
        {},
        "More volumes: path in pods → claim:NAME, configmap:NAME, host:/PATH (:ro to only read) or empty[:SIZE].",
        key_check=mount_path_problem,
        check=volume_problem,
    )
    secrets: dict[str, str] = key(
        {},
        "Variable → SECRET/KEY, or path in pods → SECRET, whose keys are files there. Names, never values.",
        entry_check=secret_problem,
    )
    grace: int = key(30, "Seconds that pods have to save their state when they are deleted.", minimum=1)
    retries: int = key(
        3, "How often a pod may start again, on average: all restarts of a job are counted together.", minimum=0
    )
    ttl: int | None = key(
        None,
        "Seconds after which a finished job is deleted. Default: never. A TrainJob has that of its runtime.",
        minimum=0,
    )
    runtime: str = key(
        DEFAULT_RUNTIME, "ClusterTrainingRuntime of a TrainJob.", check=object_problem, pattern=r"^[a-z0-9.-]+$"
    )


def runtime_conflicts(table: KubernetesTable) -> Iterator[tuple[str, str, str]]:
    """Yield (key, problem, hint) for each key that the table's `api` does not support.

    Source: kubeflow/trainer v2.3.0, pkg/apis/trainer/v1alpha1/trainjob_types.go: the fields of PodSpecPatch.
    """
    if table.api == "v1":
        if table.runtime != DEFAULT_RUNTIME:
            yield "runtime", "is for TrainJobs, and a PyTorchJob has none", 'api = "v2", or leave it out'
        return
    fields = {"priority_class": "priorityClassName", "ttl": "ttlSecondsAfterFinished", "retries": "backoffLimit"}
    for name, field in fields.items():
        if getattr(table, name) != getattr(KubernetesTable(), name):
            hint = f"leave it out, and name a ClusterTrainingRuntime that has {field} in [kubernetes] runtime"
            yield name, f"a TrainJob cannot set {field}", hint
