"""An etcd server for the rendezvous of one job, made with it by one manifest, and removed by `kubectl delete -f` alone.

torch's etcd rendezvous speaks etcd's v2 interface, which 3.6 no longer has and 3.4 and 3.5 have with --enable-v2.
The server advertises its service's name: clients go to what it advertises once a connection is lost.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from envbuild.errors import UsageError
from envbuild.jobs.kubernetes_pod import metadata
from envbuild.jobs.kubernetes_security import container_security, pod_security
from envbuild.jobs.model import JobPlan

_PORT = 2379
_SUFFIX = "-etcd"
_ENDPOINT = re.compile(r"(?P<host>[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?):(?P<port>[0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class Etcd:
    """Where the rendezvous meets, and the objects that have to be there first (none for a site's own server)."""

    host: str
    port: int
    documents: tuple[dict[str, Any], ...] = ()


def etcd_suffix(plan: JobPlan) -> str:
    """What the names of etcd's objects have after the job's, "" without one."""
    return _SUFFIX if plan.rendezvous == "etcd-v2" else ""


def etcd_of(plan: JobPlan, name: str) -> Etcd | None:
    """The etcd of job `name`: the server that the plan names, or one of its own; None where the rendezvous is c10d.

    Raises UsageError for an endpoint that is not HOST:PORT.
    """
    if plan.rendezvous != "etcd-v2":
        return None
    if plan.rendezvous_endpoint:
        found = _ENDPOINT.fullmatch(plan.rendezvous_endpoint)
        if found is None or not 0 < int(found["port"]) < 65536:
            raise UsageError(
                f"{plan.rendezvous_endpoint!r} is not the endpoint of an etcd server",
                "write HOST:PORT, or leave out --endpoint: the job then brings its own",
            )
        return Etcd(found["host"], int(found["port"]))
    own = f"{name}{_SUFFIX}"
    return Etcd(own, _PORT, (_service(plan, own), _deployment(plan, own)))


def waiting(etcd: Etcd | None) -> list[str]:
    """Lines of shell that end an image without python-etcd, and wait until etcd answers: where it does not, torchrun
    gives up at once, and that is a failure.

    The job's time limit ends the waiting. $1 is the interpreter.
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


def _service(plan: JobPlan, own: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(plan, own),
        "spec": {
            "selector": metadata(plan, own)["labels"],
            "ports": [{"name": "client", "port": _PORT, "targetPort": _PORT}],
        },
    }


def _deployment(plan: JobPlan, own: str) -> dict[str, Any]:
    command = [
        "etcd",
        "--enable-v2=true",
        "--data-dir=/var/lib/etcd",
        f"--listen-client-urls=http://0.0.0.0:{_PORT}",
        f"--advertise-client-urls=http://{own}:{_PORT}",
    ]
    container: dict[str, Any] = {
        "name": "etcd",
        "image": plan.site.kubernetes.etcd_image,
        "command": command,
        "ports": [{"name": "client", "containerPort": _PORT}],
        "readinessProbe": {"tcpSocket": {"port": _PORT}, "periodSeconds": 2},
        "resources": {"limits": {"cpu": "1", "memory": "512Mi"}},
        **container_security(plan),
        "volumeMounts": [{"name": "data", "mountPath": "/var/lib/etcd"}],
    }
    pod: dict[str, Any] = {**pod_security(plan), "containers": [container]}
    if plan.site.kubernetes.pull_secret:
        pod["imagePullSecrets"] = [{"name": plan.site.kubernetes.pull_secret}]
    pod["volumes"] = [{"name": "data", "emptyDir": {}}]
    labels = metadata(plan, own)["labels"]
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(plan, own),
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": labels},
            "strategy": {"type": "Recreate"},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }
