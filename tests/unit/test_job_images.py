"""Images that jobs on Kubernetes run: what a receipt says was pushed, and nothing that merely has a registry's name."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from envbuild.base.errors import UsageError, VerificationError
from envbuild.build import image as image_kind
from envbuild.contract.receipt import passing_receipt, pushed_as, receipt_path, record_push
from envbuild.job_inputs import open_artifact
from envbuild.jobs.model import JobRequest
from envbuild.jobs.plan import plan_job
from envbuild.site.jobs import SchedulerTable
from envbuild.site.settings import Site

ID, MANIFEST, OTHER = (f"sha256:{two * 32}" for two in ("1d", "ab", "cd"))
NAME = "registry.lab:5000/team/pt_cpu"


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def receipt(target: str = "cpu-x86_64", digest: str = MANIFEST, path: str = "pt_cpu:x", **more: Any) -> Path:
    """Beside what the receipt of a build of pt_cpu lies."""
    beside = Path(f"build/pt_cpu/{target}/docker")
    beside.parent.mkdir(parents=True, exist_ok=True)
    said = {
        "format": 1,
        "passed": True,
        "verified_at": "2026-11-21T00:00:00+00:00",
        "target": target,
        "artifact": {"digest": digest, "path": path},
        "recipe": {"name": "pt_cpu"},
        "versions": {},
        "settings": {"nodes": 2, "faults": False},
        **more,
    }
    receipt_path(beside).write_text(json.dumps(said))
    return beside


@pytest.mark.parametrize(
    ("path", "digest"),
    [
        ("pt_cpu:cpu-x86_64", MANIFEST),
        (f"{NAME}:1", MANIFEST),  # --tag without --push
        (f"{NAME}:1", ID),  # docker build: the daemon's id is no manifest of a registry
    ],
)
def test_an_image_whose_name_only_looks_pushed_is_refused_with_the_command_that_pushes_it(
    path: str, digest: str
) -> None:
    receipt(path=path, digest=digest)
    with pytest.raises(UsageError, match="was not pushed") as caught:
        open_artifact("pt_cpu", ("docker",), None)
    assert "docker pt_cpu --target cpu-x86_64 --tag REGISTRY/NAME:TAG --push" in (caught.value.hint or "")


def test_a_push_of_what_was_verified_before_is_noted_and_then_jobs_take_it() -> None:
    beside = receipt()
    record_push(beside, MANIFEST, f"{NAME}@{MANIFEST}")
    opened = open_artifact("pt_cpu", ("docker",), None)
    assert opened.artifact.path == f"{NAME}@{MANIFEST}"
    assert opened.artifact.verified_at
    assert pushed_as(beside, MANIFEST) == f"{NAME}@{MANIFEST}"
    assert pushed_as(beside, OTHER) is None


def test_a_push_of_another_image_leaves_the_receipt_as_it_is() -> None:
    beside = receipt()
    before = receipt_path(beside).read_text()
    record_push(beside, OTHER, f"{NAME}@{OTHER}", Path("build/pt_cpu/elsewhere"))
    assert receipt_path(beside).read_text() == before
    assert not receipt_path(Path("build/pt_cpu/elsewhere")).exists()


def test_receipts_of_several_targets_lie_at_their_own_and_name_their_own_manifests() -> None:
    """Also where `--out` wrote the image, whose receipt lies beside it: jobs look at the target's place."""
    digests = {"cpu-aarch64": OTHER, "cpu-x86_64": MANIFEST}
    images: Any = [
        SimpleNamespace(digest=digest, plan=SimpleNamespace(recipe="pt_cpu", target=target))
        for target, digest in digests.items()
    ]
    wish = image_kind.ImageOptions(f"{NAME}:1", None, push=True, verify=True)
    places = {one.plan.target: wish.beside(one.plan) for one in images}
    assert places == {target: Path(f"build/pt_cpu/{target}/docker") for target in digests}
    receipt("cpu-x86_64")
    sent: Any = [SimpleNamespace(digest=ID), SimpleNamespace(digest=ID)]
    image_kind._record_push(images, sent, wish, NAME)  # with --format docker
    assert open_artifact("pt_cpu", ("docker",), None).artifact.path == f"{NAME}@{ID}"
    image_kind._record_push(images, images, wish, NAME)
    assert open_artifact("pt_cpu", ("docker",), None).artifact.path == f"{NAME}@{MANIFEST}"
    assert not receipt_path(places["cpu-aarch64"]).exists()

    out: Any = SimpleNamespace(path=Path("layout"))
    receipt_path(places["cpu-x86_64"]).rename(receipt_path(out.path))
    written = image_kind.ImageOptions(f"{NAME}:1", out, push=True, verify=True)
    image_kind._record_push(images, images, written, "other.example/x")
    assert pushed_as(out.path, MANIFEST) == f"other.example/x@{MANIFEST}"
    assert passing_receipt(out.path, MANIFEST) == passing_receipt(places["cpu-x86_64"], MANIFEST)


def test_an_image_by_its_digest_is_vouched_for_by_what_was_verified_or_pushed() -> None:
    beside = receipt(digest=ID)
    with pytest.raises(VerificationError):
        open_artifact(f"{NAME}@{MANIFEST}", ("docker",), "cpu-x86_64")
    record_push(beside, ID, f"{NAME}@{MANIFEST}")
    opened = open_artifact(f"{NAME}@{MANIFEST}", ("docker",), None)
    assert opened.artifact.recipe == "pt_cpu" and opened.artifact.verified_at


@pytest.mark.parametrize("text", ["", "[]", '{"artifact": "x"}', "\0"])
def test_a_receipt_of_another_build_that_cannot_be_read_stops_no_job(text: str) -> None:
    receipt()
    other = Path("build/an_other/cpu-x86_64/docker.receipt.json")
    other.parent.mkdir(parents=True)
    other.write_text(text)
    opened = open_artifact(f"{NAME}@{MANIFEST}", ("docker",), None)
    assert opened.artifact.recipe == "pt_cpu"


@pytest.mark.parametrize(
    ("packages", "refused"), [({"packages": ["numpy"]}, True), ({"packages": ["python-etcd"]}, False), ({}, False)]
)
def test_etcd_needs_python_etcd_in_the_image_where_its_receipt_tells(packages: dict[str, Any], refused: bool) -> None:
    record_push(receipt(**packages), MANIFEST, f"{NAME}@{MANIFEST}")
    opened = open_artifact("pt_cpu", ("docker",), None)
    site = Site("eks", scheduler=SchedulerTable(kind="kubernetes"))
    request = JobRequest(rendezvous="etcd-v2", work="/data")
    if refused:
        with pytest.raises(UsageError, match="lacks python-etcd"):
            plan_job(request, opened, site)
    else:
        assert plan_job(request, opened, site).rendezvous == "etcd-v2"
