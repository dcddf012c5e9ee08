"""A stand-in for a Kubernetes API server, for a real kubectl: discovery, and create, read and delete of objects.

It schedules nothing and runs no pod; it takes pods in dry runs alone. It knows namespaces, the kinds of RESOURCES,
rights that are denied, and refuses what Kubernetes' and Kubeflow's types refuse (`lab.manifests`), as a server does
that validates strictly.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lab.manifests import faults

# Folder of the API, kind, plural.
RESOURCES = (
    ("api/v1", "Pod", "pods"),
    ("api/v1", "Service", "services"),
    ("apis/apps/v1", "Deployment", "deployments"),
    ("apis/batch/v1", "Job", "jobs"),
    ("apis/kubeflow.org/v1", "PyTorchJob", "pytorchjobs"),
    ("apis/trainer.kubeflow.org/v1alpha1", "TrainJob", "trainjobs"),
)
_OPERATIONS = ("create", "get", "patch", "delete")


@dataclass
class StandIn:
    """The cluster's state: objects by path, and what it refuses. `lacks`: kinds without an operator."""

    folder: Path
    address: str = ""
    namespaces: set[str] = field(default_factory=lambda: {"default"})
    lacks: set[str] = field(default_factory=set)
    forbidden: set[str] = field(default_factory=set)
    # Kind → (code, reason, message) with which every request to create one is refused.
    refused: dict[str, tuple[int, str, str]] = field(default_factory=dict)
    objects: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def kubeconfig(self) -> Path:
        """A file for KUBECONFIG."""
        path = self.folder / "kubeconfig"
        cluster = {"name": "stand-in", "cluster": {"server": self.address}}
        context = {"name": "stand-in", "context": {"cluster": "stand-in", "user": "ada"}}
        user = {"name": "ada", "user": {"token": "not-checked"}}
        text = {"apiVersion": "v1", "kind": "Config", "clusters": [cluster], "contexts": [context], "users": [user]}
        path.write_text(json.dumps({**text, "current-context": "stand-in"}))
        return path

    def names(self) -> list[str]:
        """PLURAL/NAME of every object, sorted."""
        return sorted("/".join(path.rsplit("/", 2)[-2:]) for path in self.objects)

    def served(self) -> list[tuple[str, str, str]]:
        return [one for one in RESOURCES if one[1] not in self.lacks]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    @property
    def state(self) -> StandIn:
        assert isinstance(self.server, _Server)
        return self.server.state

    def log_message(self, *_arguments: object) -> None:
        """Nothing on the terminal."""

    def _reply(self, code: int, document: dict[str, Any]) -> None:
        self._send(code, "application/json", json.dumps(document).encode())

    def _send(self, code: int, kind: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, code: int, reason: str, message: str, **details: str) -> None:
        text = {"message": message, "reason": reason, "code": code, "details": details}
        self._reply(code, {"kind": "Status", "apiVersion": "v1", "status": "Failure", **text})

    def do_GET(self) -> None:
        path = urlsplit(self.path).path.strip("/")
        known = _discovery(self.state).get(path)
        if known is None and f"/{path}" in self.state.objects:
            known = self.state.objects[f"/{path}"]
        if path == "openapi/v2":  # as protobuf; an empty message is a document that says nothing
            self._send(200, "application/com.github.proto-openapi.spec.v2.v1.0+protobuf", b"")
        elif known is not None:
            self._reply(200, known)
        else:
            self._refuse(404, "NotFound", f"{path} not found")

    def _resource(self, path: str) -> tuple[str, str, str, str, str] | None:
        """API, kind, plural, namespace and name (or "") of a request's path."""
        for api, kind, plural in self.state.served():
            if path.startswith(f"/{api}/namespaces/"):
                namespace, found, *name = path.removeprefix(f"/{api}/namespaces/").split("/")
                if found == plural:
                    return api, kind, plural, namespace, "".join(name)
        return None

    def do_POST(self) -> None:
        asked = urlsplit(self.path)
        document = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        found = self._resource(asked.path)
        if found is None:
            self._refuse(404, "NotFound", "the server could not find the requested resource")
            return
        api, kind, plural, namespace, _ = found
        dry = "dryRun=All" in asked.query
        metadata, group = document["metadata"], "/".join(api.split("/")[1:-1])
        name = metadata.setdefault("name", f"{metadata.get('generateName', '')}x7k2p")
        full = f"{plural}.{group}" if group else plural
        place = f"{asked.path}/{name}"
        if namespace not in self.state.namespaces:
            gone = f'namespaces "{namespace}" not found'
            self._refuse(404, "NotFound", gone, name=namespace, kind="namespaces")
        elif kind in self.state.forbidden:
            who = f'User "ada" cannot create resource "{plural}" in API group "{group}" in the namespace "{namespace}"'
            self._refuse(403, "Forbidden", f"{full} is forbidden: {who}", kind=plural, group=group)
        elif kind in self.state.refused:
            self._refuse(*self.state.refused[kind], name=name, kind=plural, group=group)
        elif kind == "Pod" and not dry:
            self._refuse(400, "BadRequest", "this stand-in runs no pods")
        elif place in self.state.objects:
            self._refuse(409, "AlreadyExists", f'{full} "{name}" already exists', name=name, kind=plural, group=group)
        elif "fieldValidation=Strict" not in asked.query or (wrong := faults(document)):
            self._refuse(400, "BadRequest", f"strict decoding error: {wrong if asked.query else 'not asked for'}")
        else:
            document["metadata"]["uid"] = f"uid-{len(self.state.objects)}"
            if not dry:
                self.state.objects[place] = document
            self._reply(201, document)

    def do_PATCH(self) -> None:
        path = urlsplit(self.path).path
        patch = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if (changed := self.state.objects.get(path)) is None:
            self._refuse(404, "NotFound", f"{path} not found")
        else:  # annotations alone
            changed["metadata"].setdefault("annotations", {}).update(patch.get("metadata", {}).get("annotations", {}))
            self._reply(200, changed)

    def do_DELETE(self) -> None:
        path = urlsplit(self.path).path
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        gone = self.state.objects.pop(path, None)
        if gone is None:
            self._refuse(404, "NotFound", f"{path} not found")
        else:
            details = {"name": gone["metadata"]["name"], "uid": gone["metadata"]["uid"]}
            self._reply(200, {"kind": "Status", "apiVersion": "v1", "status": "Success", "details": details})


def _discovery(state: StandIn) -> dict[str, dict[str, Any]]:
    """What kubectl asks before it creates anything, by path."""
    apis = sorted({api for api, _, _ in state.served()})
    groups = []
    for api in apis:
        _, *group, version = api.split("/")
        if group:
            one = {"groupVersion": f"{group[0]}/{version}", "version": version}
            groups.append({"name": group[0], "versions": [one], "preferredVersion": one})
    answers: dict[str, dict[str, Any]] = {
        "api": {"kind": "APIVersions", "versions": ["v1"]},
        "apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups},
        # Asked where no document has a kind; kinds with one are not listed.
        "apis/apiextensions.k8s.io/v1/customresourcedefinitions": {
            "kind": "CustomResourceDefinitionList",
            "apiVersion": "apiextensions.k8s.io/v1",
            "items": [],
        },
        "openapi/v3": {"paths": {api: {"serverRelativeURL": f"/openapi/v3/{api}"} for api in apis}},
    }
    for api in apis:
        resources = [
            {"name": plural, "singularName": kind.lower(), "namespaced": True, "kind": kind, "verbs": _OPERATIONS}
            for where, kind, plural in state.served()
            if where == api
        ]
        version = api.partition("/")[2]
        answers[api] = {"kind": "APIResourceList", "groupVersion": version, "resources": resources}
        answers[f"openapi/v3/{api}"] = _openapi(api, [(one["kind"], one["name"]) for one in resources])
    return answers


def _openapi(api: str, resources: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """An API's OpenAPI document, which says no more than that the server validates the fields of each kind itself."""
    _, *group, version = api.split("/")
    paths = {}
    for kind, plural in resources:
        operation = {
            "parameters": [{"name": "fieldValidation", "in": "query"}, {"name": "dryRun", "in": "query"}],
            "responses": {},
            "x-kubernetes-group-version-kind": {"group": "".join(group), "version": version, "kind": kind},
        }
        paths[f"/{api}/namespaces/{{namespace}}/{plural}/{{name}}"] = {"patch": operation}
    return {"openapi": "3.0.0", "info": {"title": "stand-in", "version": "1"}, "paths": paths}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    state: StandIn


@contextmanager
def api_server_stand_in(folder: Path) -> Iterator[StandIn]:
    """A stand-in on this machine, whose kubeconfig is in `folder`."""
    server = _Server(("127.0.0.1", 0), _Handler)
    server.state = StandIn(folder, f"http://127.0.0.1:{server.server_address[1]}")
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield server.state
    finally:
        server.shutdown()
        server.server_close()
