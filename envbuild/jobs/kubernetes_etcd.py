"""An etcd server for the rendezvous of one job, in the job's manifest; only `kubectl delete -f` removes it.

torch's etcd rendezvous uses etcd's v2 API, which 3.6 removed and 3.4 and 3.5 offer with --enable-v2. The server
advertises the name of its service: clients reconnect to the advertised address after a lost connection.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from envbuild.base.errors import UsageError
from envbuild.jobs.kubernetes_pod import metadata, pod_account, pod_metadata, pod_rights, tolerations
from envbuild.jobs.kubernetes_security import container_security
from envbuild.jobs.model import JobPlan

_PORT = 2379
_SUFFIX = "-etcd"
_ENDPOINT = re.compile(r"(?P<host>[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?):(?P<port>[0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class Etcd:
    """The address of the rendezvous, and the Kubernetes objects that it needs (none for the site's own server)."""

    host: str
    port: int
    documents: tuple[dict[str, Any], ...] = ()


def etcd_suffix(plan: JobPlan) -> str:
    """Return the suffix that etcd's objects add to the job's name, "" without etcd."""
    return _SUFFIX if plan.rendezvous == "etcd-v2" else ""


def etcd_of(plan: JobPlan, name: str) -> Etcd | None:
    """Return the etcd server of job `name`: the plan's endpoint or one in the manifest; None if the rendezvous is c10d.

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
    pod: dict[str, Any] = {**pod_rights(plan), **pod_account(plan), "containers": [container]}
    if tolerated := tolerations(plan):
        pod["tolerations"] = tolerated
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
            "template": {"metadata": pod_metadata(plan, own), "spec": pod},
        },
    }
