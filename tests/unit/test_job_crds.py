"""Manifests against the CustomResourceDefinitions of the operators' releases, as a cluster with them checks fields.

The definitions are in no package: they are read from a folder `shared/crds` beside this checkout or the one that
ENVBUILD_CRDS names, else from the projects' own repositories; without a network these tests are skipped.
"""

from __future__ import annotations

import functools
import gzip
import os
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from lab.golden import read_golden_cases

_GITHUB = "https://raw.githubusercontent.com/kubeflow"
_V1 = f"{_GITHUB}/training-operator/{{0}}/manifests/base/crds/kubeflow.org_pytorchjobs.yaml"
_V2 = f"{_GITHUB}/trainer/{{0}}/manifests/base/crds/trainer.kubeflow.org_trainjobs.yaml"
RELEASES = [
    *(("pytorchjobs", version, _V1) for version in ("v1.7.0", "v1.8.1", "v1.9.0")),
    *(("trainjobs", version, _V2) for version in ("v2.2.0", "v2.3.0")),
]
MANIFESTS = read_golden_cases(Path(__file__).parent / "data/jobs/kubernetes.txt")
FOLDER = Path(os.environ.get("ENVBUILD_CRDS") or Path(__file__).resolve().parents[2].parent / "shared/crds")


@functools.cache
def definition(plural: str, version: str, url: str) -> dict[str, Any]:
    """The schema of a release; unknown fields are refused."""
    local = FOLDER / f"{plural}-{version}.yaml.gz"
    if local.exists():
        text = gzip.decompress(local.read_bytes()).decode()
    else:
        try:
            with urllib.request.urlopen(url.format(version), timeout=10) as answer:
                text = answer.read().decode()
        except OSError as error:
            pytest.skip(f"no {local.name} here, and {url.format(version)}: {error}")
    loaded = next(one for one in yaml.load_all(text, yaml.CSafeLoader) if one and "spec" in one)
    served = [one for one in loaded["spec"]["versions"] if one["served"]]
    schema: dict[str, Any] = strict(served[0]["schema"]["openAPIV3Schema"])
    return {"apiVersion": f"{loaded['spec']['group']}/{served[0]['name']}", **schema}


def strict(schema: Any) -> Any:
    """`schema` as JSON Schema, where an object has no properties but those that are listed."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(value) for key, value in schema.items() if key != "format"}
    listed = isinstance(made.get("properties"), dict) and made.get("type") == "object"
    if listed and not made.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    if made.get("x-kubernetes-int-or-string"):
        made["type"] = ["integer", "string"]
    return made


def wrong(document: dict[str, Any], schema: dict[str, Any]) -> list[str]:
    """What the cluster would refuse; `metadata` is checked by the core, not by the definition."""
    return [
        f"{'/'.join(map(str, one.path))}: {one.message[:200]}"
        for one in Draft202012Validator(schema).iter_errors(document)
    ]


def rendered(plural: str) -> list[tuple[str, dict[str, Any]]]:
    return [
        (name, document)
        for name, text in MANIFESTS.items()
        for document in yaml.safe_load_all(text)
        if document["kind"].lower() + "s" == plural
    ]


@pytest.mark.parametrize(("plural", "version", "url"), RELEASES)
def test_every_release_of_the_operators_takes_the_manifests(plural: str, version: str, url: str) -> None:
    schema = definition(plural, version, url)
    documents = rendered(plural)
    assert len(documents) >= 3
    for name, document in documents:
        assert document["apiVersion"] == schema["apiVersion"], name
        assert wrong(document, schema) == [], name


@pytest.mark.parametrize(("plural", "version", "url"), RELEASES)
def test_a_field_that_no_release_knows_is_refused(plural: str, version: str, url: str) -> None:
    schema = definition(plural, version, url)
    _, document = rendered(plural)[0]
    spec = {**document["spec"], "nprocPerNodes": 2}
    assert any("nprocPerNodes" in one for one in wrong({**document, "spec": spec}, schema))
