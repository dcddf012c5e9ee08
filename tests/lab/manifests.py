"""Kubernetes manifests against the types of those who read them, offline and strictly: an unknown field is a fault.

Core kinds and every pod go through Kubernetes' own JSON schemas, PyTorchJob through the model of the training
operator's Python package and TrainJob through that of Trainer's. What those do not know, values of enumerations and
names of replicas, is from their Go types.
"""

from __future__ import annotations

import functools
import importlib
import json
import re
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any

VERSION = "1.34.0"
_CORE = {"Pod-v1", "Service-v1", "Deployment-apps-v1", "Job-batch-v1"}
_REPLICAS = {"Master", "Worker"}
# JSON type of the generated classes' leaves.
_LEAVES: dict[str, type] = {"str": str, "int": int, "bool": bool, "float": float}
_ENUMS = {
    "rdzvBackend": {"c10d", "etcd", "etcd-v2"},
    "cleanPodPolicy": {"All", "Running", "None"},
    "restartPolicy": {"Always", "OnFailure", "Never", "ExitCode"},
}


def faults(document: dict[str, Any]) -> list[str]:
    """What is wrong with one document of a manifest."""
    check = {"PyTorchJob": _pytorch_job, "TrainJob": _train_job}.get(document.get("kind", ""), _core)
    try:
        return list(check(document))
    except KeyError as error:
        return [f"there is no {error}"]


def container_of(job: dict[str, Any]) -> dict[str, Any]:
    """What is run in a job's pods; a TrainJob has the same keys."""
    if job["kind"] == "TrainJob":
        found: dict[str, Any] = job["spec"]["trainer"]
    elif job["kind"] == "Job":
        found = job["spec"]["template"]["spec"]["containers"][0]
    else:
        found = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    return found


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """What kubelet makes of command, args and values, as its documentation says it."""
    one = re.compile(r"\$(?:(\$)|\(([^()]*)\))")
    return one.sub(lambda found: "$" if found[1] else variables.get(found[2], found[0]), text)


def process_of(
    job: dict[str, Any], number: int, address: str, *, operator: str = "1.9"
) -> tuple[list[str], dict[str, str]]:
    """The command and the variables of pod `number` at `address`, as the operator and kubelet make them of `job`.

    Written after kubeflow/training-operator v1.9.3, pkg/controller.v1/pytorch/elastic.go, and kubeflow/trainer v2.3.0,
    pkg/runtime/framework/plugins/torch/torch.go: it stands in for them, and is not them. `operator` 1.7 sets
    PET_NPROC_PER_NODE only for jobs with a master, which ours have not (pkg/controller.v1/pytorch/envvar.go).
    """
    container, name = container_of(job), job["metadata"]["name"]
    variables = _pytorch_variables(job) if job["kind"] == "PyTorchJob" else {}
    if operator == "1.7":
        variables.pop("PET_NPROC_PER_NODE", None)
    if job["kind"] == "TrainJob":
        trainer = job["spec"]["trainer"]
        variables = {
            "PET_NNODES": str(trainer["numNodes"]),
            "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
            "PET_NODE_RANK": str(number),
            "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
            "PET_MASTER_PORT": "29500",
        }
    fields = {"status.podIP": address}
    for one in container["env"]:
        if "value" in one:
            variables[one["name"]] = expanded(one["value"], variables)
        else:
            path = one["valueFrom"]["fieldRef"]["fieldPath"]
            variables[one["name"]] = fields.get(path, str(number))
    line = [*container["command"], *container["args"]]
    return [expanded(word, variables) for word in line], variables


def _pytorch_variables(job: dict[str, Any]) -> dict[str, str]:
    spec, name = job["spec"], job["metadata"]["name"]
    policy = spec["elasticPolicy"]
    ports = {one["name"]: one["containerPort"] for one in container_of(job)["ports"]}
    host = policy.get("rdzvHost", f"{name}-worker-0")
    port = policy.get("rdzvPort", ports["pytorchjob-port"])
    return {
        "PYTHONUNBUFFERED": "1",
        "PET_NPROC_PER_NODE": spec["nprocPerNode"],
        "PET_RDZV_ENDPOINT": f"{host}:{port}",
        "PET_RDZV_BACKEND": policy["rdzvBackend"],
        "PET_NNODES": f"{policy['minReplicas']}:{policy['maxReplicas']}",
        "PET_MAX_RESTARTS": str(policy["maxRestarts"]),
        "PET_RDZV_ID": policy["rdzvId"],
        "PET_RDZV_CONF": ",".join(f"{one['key']}={one['value']}" for one in policy["rdzvConf"]),
    }


def _core(document: dict[str, Any]) -> Iterator[str]:
    version = document["apiVersion"].replace("/", "-")
    if f"{document['kind']}-{version}" not in _CORE:
        yield f"no kind {document['kind']} of {version} is expected"
        return
    for error in _schema(f"{document['kind'].lower()}-{version}").iter_errors(document):
        yield f"{document['kind']}: {error.json_path}: {error.message[:300]}"


@functools.cache
def _schema(name: str) -> Any:
    """The strict schema of one kind. kubernetes_validate's own function reads a megabyte for each document."""
    from jsonschema.validators import Draft202012Validator
    from referencing import Registry, Resource

    files = resources.files("kubernetes_validate") / "kubernetes-json-schema"
    folder = files / f"v{VERSION}-local-strict"
    schema, known = (
        Resource.from_contents(json.loads((folder / f"{one}.json").read_text())) for one in (name, "_definitions")
    )
    registry: Registry[Any] = Registry().with_resources(
        [("", schema), ("_definitions.json", known), (known.id() or "_definitions.json", known)]
    )
    return Draft202012Validator(schema.contents, registry=registry)


def _pod(metadata: object, spec: object) -> Iterator[str]:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
    yield from _core(pod)


def _pytorch_job(document: dict[str, Any]) -> Iterator[str]:
    if document.get("apiVersion") != "kubeflow.org/v1":
        yield "apiVersion"
    yield from _walk(document, "KubeflowOrgV1PyTorchJob", "PyTorchJob")
    spec = document.get("spec", {})
    for required in ("runPolicy", "elasticPolicy", "pytorchReplicaSpecs", "nprocPerNode"):
        if required not in spec:
            yield f"spec has no {required}"
    for name, replica in spec.get("pytorchReplicaSpecs", {}).items():
        if name not in _REPLICAS:
            yield f"there are no {name} replicas"
        template = replica.get("template", {})
        yield from _pod(template.get("metadata"), template.get("spec"))
        containers = template.get("spec", {}).get("containers", [])
        if [one.get("name") for one in containers] != ["pytorch"]:
            yield "the operator looks for a container called pytorch"


def _walk(value: Any, kind: str, at: str) -> Iterator[str]:
    """Compare `value` with a generated class, field by field."""
    inner = re.fullmatch(r"(list\[|dict\(str, )(.*)[\])]", kind)
    if inner and inner[1] == "list[":
        if not isinstance(value, list):
            yield f"{at} is no list"
            return
        for number, one in enumerate(value):
            yield from _walk(one, inner[2], f"{at}[{number}]")
    elif inner:
        for key, one in value.items():
            yield from _walk(one, inner[2], f"{at}[{key}]")
    elif kind in _LEAVES:
        if type(value) is not _LEAVES[kind]:
            yield f"{at} is {value!r}, not {kind}"
        if value not in _ENUMS.get(at.rpartition(".")[2], {value}):
            yield f"{at} may not be {value!r}"
    elif kind not in ("object", "datetime"):
        model = _model(kind)
        known = {name: model.openapi_types[key] for key, name in model.attribute_map.items()}
        if not isinstance(value, dict):
            yield f"{at} is no object"
            return
        for key, one in value.items():
            if key in known:
                yield from _walk(one, known[key], f"{at}.{key}")
            else:
                yield f"{at} has no field {key}"


def _model(kind: str) -> Any:
    for package in ("kubeflow.training.models", "kubernetes.client.models"):
        found = getattr(importlib.import_module(package), kind, None)
        if found is not None:
            return found
    raise LookupError(kind)


def _train_job(document: dict[str, Any]) -> Iterator[str]:
    from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob
    from pydantic import ValidationError

    if document.get("apiVersion") != "trainer.kubeflow.org/v1alpha1":
        yield "apiVersion"
    try:
        # Unknown fields are dropped in silence: what comes back is compared.
        made = TrainerV1alpha1TrainJob.from_dict(document)
        again = made.to_dict() if made is not None else None
    except (ValidationError, ValueError, AttributeError, TypeError) as error:
        yield str(error)
        return
    if again != document:
        yield f"other than what Trainer understands: {_differences(document, again)}"
    for patch in document.get("spec", {}).get("runtimePatches", []):
        jobs = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        for job in jobs:
            pod = job["template"]["spec"]["template"]
            yield from _pod(pod["metadata"], pod["spec"])
            if [one["name"] for one in pod["spec"]["containers"]] != ["node"]:
                yield "the runtime torch-distributed has one container, called node"


def _differences(given: Any, understood: Any, at: str = "") -> list[str]:
    if isinstance(given, dict) and isinstance(understood, dict):
        return [
            found
            for key in sorted({*given, *understood})
            for found in _differences(given.get(key), understood.get(key), f"{at}.{key}")
        ]
    if isinstance(given, list) and isinstance(understood, list) and len(given) == len(understood):
        pairs = enumerate(zip(given, understood, strict=True))
        return [found for number, (one, two) in pairs for found in _differences(one, two, f"{at}[{number}]")]
    return [] if given == understood else [at]
