"""Search for faults in Kubernetes manifests that start torchrun: PyTorchJob, TrainJob, Job, and the pods in them.

Sources: training-operator v1.7 (PyTorchJob), Kubeflow Trainer v2 (TrainJob), Kubernetes' API reference (Pod).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from envbuild.base.errors import UsageError
from envbuild.base.yaml_reader import line_of, parse_yaml
from envbuild.data import load_table
from envbuild.jobcheck.lint.directives import whole_number
from envbuild.jobcheck.lint.environment import judged_image, of_commands, of_secrets
from envbuild.jobcheck.lint.faults import load_faults, of_patterns, search_text
from envbuild.jobcheck.lint.rendezvous import of_launches, of_variables
from envbuild.jobcheck.lint.resources import of_ranks
from envbuild.jobcheck.lint.script import Fault, read_script
from envbuild.jobcheck.lint.shell import WORDS
from envbuild.jobcheck.lint.slips import of_lines, of_placeholders
from envbuild.jobcheck.lint.status import of_status

# The rules for the command of a container.
_RULES = (of_launches, of_variables, of_lines, of_commands, of_patterns, of_secrets, of_ranks, of_status)
# Faults that do not apply to a pod's command: each pod has its own network, and the operator sets the endpoint
# and the number of nodes.
_OF_HOSTS = frozenset(["fixed-port", "error-ignored", "threads", "local-address", "run-id", "requeue"])

_OF_JOBS = frozenset(["status-lost", "one-process"])  # servers do not end, and spread their model themselves
_STARTS_RANKS = re.compile(r"torchrun|torch\.distributed|accelerate|deepspeed|mpirun|horovodrun|lightning")

_TORCHRUN = re.compile(r"(?:\btorchrun|-m torch\.distributed\.(?:run|launch)) ")

_USES_GPUS = re.compile(
    r"\bnvidia-smi\b|--nproc[-_]per[-_]node[= ][2-9]|backend[= ]nccl|--device[= ]cuda|\bdeepspeed \S"
)

# Real manifests have few.
_ALIASES = 256
_HINT = "give the manifest that kubectl gets, and write it flatter if it is nested or repeats itself"


def lint_manifest(text: str, name: str) -> Iterator[Fault]:
    """Find the faults in all documents of a manifest, or of a template for envsubst.

    Raises UsageError for text that is not YAML.
    """
    for fault in load_faults().values():
        yield from search_text(fault, "manifest", text)
    for document in parse_yaml(text, name, UsageError, _HINT, typ="rt", aliases=_ALIASES):
        if isinstance(document, Mapping):
            ends = str(document.get("kind")).endswith("Job")
            findings = _walk(document, _nodes(document), _ranks(document), set())
            mounted = str(document.get("apiVersion")).startswith("ray.io/")  # KubeRay mounts /dev/shm itself
            left_out = (set() if ends else _OF_JOBS) | ({"shared-memory"} if mounted else set())
            yield from (finding for finding in findings if finding.id not in left_out)
            if document.get("kind") == "Job" and str(document.get("apiVersion")).startswith("batch/v"):
                yield from _policy(document)
                yield from _unknown(document.get("spec"), "job")
                yield from _names(document)
            if document.get("kind") == "PyTorchJob":
                yield from _replicas(document)


def _nodes(document: Mapping[str, Any]) -> int:
    """Return the number of pods of a job; a variable counts as 2."""
    spec = document.get("spec")
    if not isinstance(spec, Mapping):
        return 1
    counts: list[Any] = []
    for key in ("pytorchReplicaSpecs", "replicatedJobs"):
        value = spec.get(key)
        for group in value.values() if isinstance(value, Mapping) else value or ():
            pods = _inner(group, "template", "spec", "parallelism") if key == "replicatedJobs" else 1
            replicas = group.get("replicas", 1) if isinstance(group, Mapping) else 1
            counts.append(replicas * pods if isinstance(replicas, int) and isinstance(pods, int) else replicas)
    trainer = spec.get("trainer")
    counts.append(trainer.get("numNodes", 1) if isinstance(trainer, Mapping) else 0)
    if document.get("kind") == "Job":
        counts.append(spec.get("parallelism", 1))
    return max(1, sum(count if isinstance(count, int) else 2 for count in counts))


def _ranks(document: Mapping[str, Any]) -> str:
    """Return the number of ranks that an operator passes to torchrun in each pod, by default one per GPU; "" for none.

    Source: kubeflow/training-operator v1.9.3, pkg/apis/kubeflow.org/v1/pytorch_defaults.go, and Trainer v2.
    """
    places = {
        "PyTorchJob": (("nprocPerNode",), ("elasticPolicy", "nProcPerNode")),
        "TrainJob": (("trainer", "numProcPerNode"),),
    }.get(str(document.get("kind")), ())
    numbers = (_inner(document, "spec", *keys) for keys in places)
    return str(next(filter(None, numbers), "auto")) if places else ""


def _walk(value: Any, nodes: int, ranks: str, seen: set[int]) -> Iterator[Fault]:
    """Find the faults below `value`, in a job of `nodes` pods with `ranks` from the operator.

    `seen` are the objects already searched, which aliases repeat.
    """
    if id(value) in seen or not isinstance(value, Mapping | list):
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        containers = value.get("containers")
        if isinstance(containers, Sequence) and not isinstance(containers, str):
            yield from _pod(value, nodes, ranks)
        if isinstance(value.get("trainer"), Mapping):
            yield from _container(value["trainer"], nodes, ranks)
    for inner in value.values() if isinstance(value, Mapping) else value:
        yield from _walk(inner, nodes, ranks, seen)


def _policy(document: Mapping[str, Any]) -> Iterator[Fault]:
    """Find a Job whose pods have a restart policy that the API server refuses; Always is the default."""
    pod = _inner(document, "spec", "template", "spec")
    if isinstance(pod, Mapping) and _rows(pod, "containers"):
        policy = str(pod.get("restartPolicy", "Always"))
        if policy == "Always":
            given = "restartPolicy" in pod
            yield Fault("restart-policy", line_of(pod, "restartPolicy" if given else "containers"), policy)


def _names(document: Mapping[str, Any]) -> Iterator[Fault]:
    """Find endpoints at a pod of an Indexed Job without the subdomain and headless Service that its name needs."""
    name, spec = (_inner(document, *keys) for keys in (("metadata", "name"), ("spec",)))
    pod = _inner(spec, "template", "spec")
    if not isinstance(pod, Mapping) or spec.get("completionMode") != "Indexed" or pod.get("subdomain"):
        return
    for container in _rows(pod, "containers"):
        env = [(str(variable.get("value")), line_of(variable, "value")) for variable in _rows(container, "env")]
        words = [(word.rpartition("=")[2], line_of(container, "args")) for word in _words(container)]
        for value, line in (*env, *words):
            if re.fullmatch(rf"{re.escape(str(name))}-\d+(?:[.:].*)?", value):
                yield Fault("pod-name", line, value)


def _inner(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _rows(value: Any, key: str) -> list[Mapping[str, Any]]:
    """Return the mappings in the list `key` of `value`."""
    rows = _inner(value, key)
    return [row for row in rows if isinstance(row, Mapping)] if isinstance(rows, list) else []


def _replicas(document: Mapping[str, Any]) -> Iterator[Fault]:
    """Find replicas of a PyTorchJob without the container "pytorch", the only name that the operator accepts."""
    specs = _inner(document, "spec", "pytorchReplicaSpecs")
    for replica in specs.values() if isinstance(specs, Mapping) else ():
        containers = _rows(_inner(replica, "template", "spec"), "containers")
        named = [container for container in containers if isinstance(container.get("name"), str)]
        if named and not any(container["name"] == "pytorch" for container in named):
            yield Fault("container-name", line_of(named[0], "name"), named[0]["name"])


def _unknown(value: Any, kind: str) -> Iterator[Fault]:
    """Find fields that neither a pod, a container nor a job has."""
    fields = [key for key in value if isinstance(key, str) and key.isalpha()] if isinstance(value, Mapping) else []
    others = [key for key in fields if key not in WORDS[f"{kind}_fields"]]
    elsewhere = WORDS["pod_fields"] | WORDS["container_fields"] | WORDS["job_fields"]
    for key in others[:1]:  # others may be those of an operator
        yield Fault("field-unknown", line_of(value, key), key, level="" if key in elsewhere else "hint")


def _pod(spec: Mapping[str, Any], nodes: int, ranks: str) -> Iterator[Fault]:
    yield from _unknown(spec, "pod")
    volumes = {str(volume.get("name")) for volume in _rows(spec, "volumes")}
    for key in ("initContainers", "containers"):
        for container in _rows(spec, key):
            yield from _unknown(container, "container")
            yield from _container(container, nodes, ranks)
            shared = any(
                str(mount.get("mountPath")).strip("/") == "dev/shm" and str(mount.get("name")) in volumes
                for mount in _rows(container, "volumeMounts")
            )
            # One rank without workers uses none.
            text = " ".join(_words(container))
            lone = _gpus(container) == 1 and re.search(r"workers[= ]0\b|^(?:\S*sh -\w*c )?(?:sleep|nvidia-smi)\b", text)
            workers = re.search(r"\bnum[-_]workers[= ][1-9]", text)
            gpus = _gpus(container) or 0
            if key == "containers" and (gpus or workers) and not shared and not lone:
                # Whether one rank has data loaders is not known.
                yield Fault("shared-memory", line_of(container, "image"), level="" if gpus > 1 or workers else "hint")


def _limits(container: Mapping[str, Any]) -> Mapping[str, Any] | None:
    limits = _inner(container, "resources", "limits") or _inner(container, "resourcesPerNode", "limits")
    return limits if isinstance(limits, Mapping) else None


def _gpus(container: Mapping[str, Any]) -> int | None:
    """Return the GPUs of a container, None if the manifest sets no limits, because a mutating webhook may set them."""
    limits = _limits(container)
    if limits is None:
        return None
    counts = [whole_number(str(value)) for name, value in limits.items() if str(name).endswith("/gpu")]
    return max((1 if count is None else count for count in counts), default=0)


def _words(container: Mapping[str, Any]) -> list[str]:
    values = (container.get(key) for key in ("command", "args"))
    return [str(word) for value in values if isinstance(value, list) for word in value]


def _container(container: Mapping[str, Any], nodes: int, ranks: str) -> Iterator[Fault]:
    image = container.get("image")
    if isinstance(image, str):
        yield from judged_image(image, line_of(container, "image"))
    variables = {str(row.get("name")): (row.get("value"), line_of(row, "value")) for row in _rows(container, "env")}
    # Written as a script, so that the rules for scripts apply; a fault's line is mapped back to the manifest.
    exports = [
        f"export {name}={_quoted(' '.join(str(value).split()))}"
        for name, (value, _) in variables.items()
        if value is not None
    ]
    words = _words(container)
    shell = len(words) > 2 and words[1].startswith("-") and words[1].endswith("c")
    body = words[2] if shell else " ".join(_quoted(word) for word in words)
    begun = line_of(container, "command" if "command" in container else "args")
    count = whole_number(ranks)
    if count and _gpus(container) and count > (_gpus(container) or 0) and not _STARTS_RANKS.search(body):
        yield Fault("ranks-exceed-gpus", begun, f"{count} ranks, {_gpus(container)} GPUs")
    # No operator tells the pods of a Job or JobSet how many they are.
    lone = nodes > 1 and not ranks and "PET_" not in f"{exports}"
    meets = "torchrun " in body and re.search(r"--(?:master[-_]addr|rdzv[-_]endpoint)", body)
    if lone and meets and not re.search(r"nnodes|standalone", body):
        yield Fault("nodes-missing", begun, "", str(nodes))
    if nodes > 1 and ranks and "nnodes" not in body:  # the operator sets it in PET_NNODES
        body = body.replace("torchrun ", f"torchrun --nnodes={nodes} ", 1)
    if ranks and "nproc" not in body:  # the operator sets it in PET_NPROC_PER_NODE
        body = _TORCHRUN.sub(lambda match: f"{match[0]}--nproc-per-node={_quoted(ranks)} ", body)
    if _gpus(container) is None and (used := _USES_GPUS.search(body)):
        yield Fault("gpus-missing", begun, used[0])
    gpus = _gpus(container) or 0
    script = replace(read_script("\n".join([*exports, body]), {}), everywhere=True, pod_gpus=gpus)
    lines = [line for _, (value, line) in variables.items() if value is not None]
    for rule in (*_RULES, of_placeholders):
        for finding in rule(script):
            if finding.id in _OF_HOSTS:
                continue
            line = lines[finding.line - 1] if finding.line <= len(lines) else begun
            alone = finding.id == "network-disabled" and nodes == 1  # no other pod to reach
            yield Fault(finding.id, line, finding.value, str(nodes), level="hint" if alone else "")
    if gpus > 1 and re.search(r"\bpython[\d.]* (?!-m torch\.distributed)", body) and not _STARTS_RANKS.search(body):
        yield Fault("one-process", begun, str(gpus), level="hint")  # the program may take all GPUs itself
    cpus = whole_number(str((_limits(container) or {}).get("cpu", "")))
    if gpus > 1 and cpus is not None and cpus < gpus:
        yield Fault("cpus-missing", line_of(container, "resources"), f"{gpus} GPUs, {cpus} CPU{'s' * (cpus != 1)}")
    provider = variables.get("FI_PROVIDER", ("", 0))
    limits = _limits(container) or {}
    for fabric in load_table("fabrics")["fabrics"].values() if provider[0] else ():
        device = fabric.get("adapter", {}).get("resource", "")
        if fabric["provider"] == provider[0] and device and device not in limits:
            yield Fault("efa-device", provider[1], device)


def _quoted(word: str) -> str:
    """Return `word` quoted for a shell; `$(NAME)` and `$NAME` of manifests stay unchanged."""
    return word if word and not set(word) & set(" \t\n;|&<>'\"`#") else shlex.quote(word)
