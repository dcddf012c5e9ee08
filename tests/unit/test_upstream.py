"""`vault check --upstream`: each planted loss is named, and nothing else is; the fetchers of builds ask."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lab.fake_registry import Call, Fake, fake_registry
from lab.wheels import make_recipe, make_wheel
from ruamel.yaml import YAML

from envbuild.base.errors import LockError
from envbuild.build.folder import prepare_folder
from envbuild.build.upstream import check_upstream
from envbuild.contract.kinds import VENV
from envbuild.debian.lock import DebianLock, LockedDeb
from envbuild.debian.release import DebianSuite
from envbuild.lock import conda_solve
from envbuild.lock.conda import CondaPackage
from envbuild.lock.format import Lock, render
from envbuild.lock.image import ImageLock, OciLock
from envbuild.recipe.load import load_recipe
from envbuild.recipe.sources import LockedPackage, SourceLayer
from envbuild.recipe.targets import Target
from envbuild.run_environment import load_environment

TOP = Path(__file__).resolve().parents[2]
TARGET = Target.parse("cpu-x86_64")
MANIFEST = b'{"schemaVersion": 2}'
IMAGE = "sha256:" + hashlib.sha256(MANIFEST).hexdigest()
PAGES, FILE = ("alpha", "beta"), "/files/{}-1.0-py3-none-any.whl"


class Upstream:
    """A server with an index of two wheels, a channel, an archive of Debian, a source archive and an image."""

    def __init__(self, top: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
        self.top, self.fake, self.url = top, fake, f"http://{fake.address}"
        self.files: dict[str, bytes] = {"/src/own-1.tar.gz": b"source", "/debian/pool/x.deb": b"deb"}
        self.files |= {"/conda/noarch/c-1-0.conda": b"conda", f"/v2/team/base/manifests/{IMAGE}": MANIFEST}
        self.yanked: set[str] = set()
        packages = []
        for name in PAGES:
            self.files[FILE.format(name)] = data = make_wheel(top / "made", name).read_bytes()
            packages.append(LockedPackage(name, "1.0", (hashlib.sha256(data).hexdigest(),)))
        self.hashes = {package.name: package.hashes[0] for package in packages}
        folder = make_recipe(top, "lab", PAGES)
        loaded = load_recipe(folder / "recipe.toml")
        lock = Lock(
            "lab", TARGET.name, "3.11", "x86_64-manylinux_2_28", loaded.resolution_digest(TARGET), tuple(packages)
        )
        (folder / f"{TARGET.name}.requirements.txt").write_text(render(lock))
        (top / "site.toml").write_text(f'store = "{top}/store"\n[registries."{fake.address}"]\ninsecure = true\n')
        variables = {"ENVBUILD_SITE": f"{top}/site.toml", "PIP_INDEX_URL": f"{self.url}/simple", "PIP_RETRIES": "0"}
        self.environment = load_environment({**variables, "PATH": "/usr/bin:/bin"})
        plan, _ = prepare_folder(VENV, loaded, TARGET, self.environment, locked=True, offline=True, log=print)
        sha = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("source", "deb", "conda")}
        debs = (LockedDeb("x", "1", "amd64", "pool/x.deb", sha["deb"], 3),)
        base = ImageLock("lab", TARGET.name, "", DebianLock("bookworm", "2026-07-11T10:16:37Z", debs))
        source = SourceLayer("own", "1", TARGET.name, "make", f"{self.url}/src/own-1.tar.gz", sha["source"])
        conda = CondaPackage("c", "1", "0", "noarch", f"{self.url}/conda/noarch/c-1-0.conda", "", sha["conda"])
        plan = replace(plan, base=base, sources=(source,), conda=(conda,))
        builder = replace(base, base=OciLock(f"{fake.address}/team/base", IMAGE))
        self.work = [(loaded, [(plan, builder), (plan, None)])]
        self.listed = [conda]
        monkeypatch.setattr(conda_solve, "solve", lambda *_, **__: tuple(self.listed))
        archive = DebianSuite(f"{self.url}/debian", "bookworm")
        monkeypatch.setattr("envbuild.build.upstream.site_archives", lambda *_: [archive])

    def answer(self, call: Call) -> None:
        project = call.path.removeprefix("/simple/").strip("/")
        if call.path.startswith("/simple/") and FILE.format(project) in self.files:
            yanked = ' data-yanked="broken"' if project in self.yanked else ""
            link = f"{FILE.format(project)}#sha256={self.hashes[project]}"
            page = f'<a href="{link}"{yanked}>{project}-1.0-py3-none-any.whl</a>'
            call.reply(200, page.encode(), Content_Type="text/html")
        elif (data := self.files.get(call.path)) is not None:
            call.reply(200, data, Content_Type="application/vnd.oci.image.manifest.v1+json")
        else:
            call.reply(404)

    def check(self) -> dict[str, str]:
        """The state of each file that is not there."""
        self.rows = check_upstream(self.work, self.environment)
        return {row["name"]: row["state"] for row in self.rows if row["state"] != "there"}


@pytest.fixture
def upstream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Upstream]:
    answers: list[Callable[[Call], None]] = []
    with fake_registry(lambda call: answers[0](call)) as fake:
        made = Upstream(tmp_path, fake, monkeypatch)
        answers.append(made.answer)
        yield made


def test_nothing_is_lost_and_each_page_and_each_file_is_asked_for_once(upstream: Upstream) -> None:
    assert upstream.check() == {}
    assert sorted((row["kind"], row["of"]) for row in upstream.rows) == [
        (kind, ["lab cpu-x86_64"]) for kind in ("conda", "debian", "image", "source", "wheel", "wheel")
    ]
    asked = [(method, path) for method, path, _ in upstream.fake.seen]
    assert len(asked) == len(set(asked)) == 8
    assert {path for method, path in asked if method == "HEAD"} == {
        *(FILE.format(name) for name in PAGES),
        "/conda/noarch/c-1-0.conda",
        "/debian/pool/x.deb",
    }
    json.dumps(upstream.rows)


def drop(path: str) -> Callable[[Upstream], object]:
    return lambda upstream: upstream.files.pop(path)


PLANTED: dict[str, tuple[Callable[[Upstream], object], dict[str, str]]] = {
    "a wheel that its page still lists": (
        lambda upstream: upstream.files.update({FILE.format("alpha"): None}),  # type: ignore[dict-item]
        {"alpha 1.0": "gone"},
    ),
    "a project": (drop(FILE.format("alpha")), {"alpha 1.0": "gone"}),
    "another hash of a wheel": (
        lambda upstream: upstream.hashes.update(alpha="f" * 64),
        {"alpha 1.0": "changed"},
    ),
    "a yanked wheel": (lambda upstream: upstream.yanked.add("beta"), {"beta 1.0": "yanked"}),
    "a source archive": (drop("/src/own-1.tar.gz"), {"own 1": "gone"}),
    "another source archive": (
        lambda upstream: upstream.files.update({"/src/own-1.tar.gz": b"poison"}),
        {"own 1": "changed"},
    ),
    "a Debian package": (drop("/debian/pool/x.deb"), {"x 1 (amd64)": "gone"}),
    "another Debian package": (
        lambda upstream: upstream.files.update({"/debian/pool/x.deb": b"longer"}),
        {"x 1 (amd64)": "changed"},
    ),
    "a conda package that its channel still lists": (drop("/conda/noarch/c-1-0.conda"), {"c-1-0": "gone"}),
    "a conda package that its channel does not list": (lambda upstream: upstream.listed.clear(), {"c-1-0": "gone"}),
    "an image": (drop(f"/v2/team/base/manifests/{IMAGE}"), {"BASE": "gone"}),
    "all": (
        lambda upstream: upstream.files.clear(),
        dict.fromkeys(("alpha 1.0", "beta 1.0", "own 1", "x 1 (amd64)", "c-1-0", "BASE"), "gone"),
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_loss_is_named_and_nothing_else(upstream: Upstream, name: str) -> None:
    plant, lost = PLANTED[name]
    plant(upstream)
    assert upstream.check() == {key.replace("BASE", f"{upstream.fake.address}/team/base"): lost[key] for key in lost}
    assert all(row["answers"] for row in upstream.rows if row["state"] != "there")


def test_an_index_and_a_channel_that_are_gone_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_registry(lambda call: call.reply(404)) as fake:
        upstream = Upstream(tmp_path, fake, monkeypatch)

    def fails(*_: Any, **__: Any) -> None:
        raise LockError("the channel cannot be read")

    monkeypatch.setattr(conda_solve, "solve", fails)
    assert upstream.check().keys() == {
        "alpha 1.0",
        "beta 1.0",
        "own 1",
        "x 1 (amd64)",
        "c-1-0",
        f"{fake.address}/team/base",
    }
    states = {row["name"]: row["state"] for row in upstream.rows}
    assert set(states.values()) == {"unreached"}


def test_a_file_that_any_source_has_is_there(upstream: Upstream, tmp_path: Path) -> None:
    """A wheel in a local folder counts, and a mirror of an index that lost it."""
    upstream.files.pop(FILE.format("alpha"))
    pip = replace(upstream.environment.pip, find_links=(str(tmp_path / "made"),))
    upstream.environment = replace(upstream.environment, pip=pip)
    assert upstream.check() == {}


def test_a_file_of_this_host_s_store_does_not_count(upstream: Upstream, tmp_path: Path) -> None:
    wheel = tmp_path / "copy"
    wheel.write_bytes(upstream.files[FILE.format("alpha")])
    upstream.environment.store.adopt(wheel, upstream.hashes["alpha"], "alpha-1.0-py3-none-any.whl")
    upstream.files.pop(FILE.format("alpha"))
    assert upstream.check() == {"alpha 1.0": "gone"}


@pytest.mark.parametrize("status", [405, 501])
def test_a_server_without_head_is_asked_by_get(upstream: Upstream, status: int) -> None:
    answer = upstream.answer
    upstream.fake.script = lambda call: call.reply(status) if call.command == "HEAD" else answer(call)
    assert upstream.check() == {}


@pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not installed")
@pytest.mark.parametrize(("lost", "opened", "asked"), [(0, "", []), (1, "", ["create"]), (1, "7", ["edit", "7"])])
def test_the_workflow_opens_one_issue_with_the_lost_files(
    tmp_path: Path, lost: int, opened: str, asked: list[str]
) -> None:
    row = {"state": "gone", "kind": "wheel", "name": "alpha 1.0", "of": ["lab cpu-x86_64"], "answers": ["x: not there"]}
    programs = {
        "envbuild": f"echo '{json.dumps({'files': 3, 'lost': [row] * lost})}'; exit {5 * lost}",
        "gh": f'[ "$2" != list ] || {{ echo "{opened}"; exit; }}; printf "%s\\n" "$@" > asked; cp body.md body',
    }
    for name, script in programs.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    workflow = YAML(typ="safe").load((TOP / ".github/workflows/upstream.yml").read_text())
    check, report = (step["run"] for step in workflow["jobs"]["check"]["steps"] if "lost.json" in step.get("run", ""))
    output = tmp_path / "output"
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "GITHUB_OUTPUT": str(output), "ENVBUILD_VAULT": ""}
    for script in [check, *([report] if lost else [])]:
        subprocess.run(["bash", "-eo", "pipefail", "-c", script], cwd=tmp_path, env=env, check=True)
    assert output.read_text() == f"lost={lost}\n"
    if lost:
        assert (tmp_path / "asked").read_text().split()[1 : 1 + len(asked)] == asked
        line = "- gone: wheel alpha 1.0, of lab cpu-x86_64: x: not there"
        assert line in (tmp_path / "body").read_text()
    (tmp_path / "envbuild").write_text("#!/usr/bin/env bash\nexit 4\n")
    assert subprocess.run(["bash", "-eo", "pipefail", "-c", check], cwd=tmp_path, env=env).returncode == 4
