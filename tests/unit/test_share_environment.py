"""Environments in registries: no configuration makes a pull write outside of its folder, or take another file."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given
from hypothesis import strategies as st
from lab.wheels import make_recipe, make_wheel
from securesystemslib.signer import CryptoSigner

from envbuild.base.errors import BuildError, UsageError, VerificationError
from envbuild.build.folder import make_environment, prepare_folder
from envbuild.build.rebuild import _read, pull_environment
from envbuild.build.share import ATTESTATIONS
from envbuild.contract.kinds import VENV
from envbuild.image.layout import Blobs
from envbuild.image.model import Descriptor
from envbuild.image.reference import parse_reference
from envbuild.image.registry import Registry
from envbuild.lock.format import BuiltPackage, Lock
from envbuild.lock.format import render as render_lock
from envbuild.lock.lifecycle import write_lock_file
from envbuild.plan import Plan
from envbuild.recipe.load import load_recipe
from envbuild.recipe.sources import LockedPackage
from envbuild.recipe.targets import Target
from envbuild.run_environment import load_environment
from envbuild.store.pieces import INPUT, RECEIPT
from envbuild.trust.bundle import sign
from envbuild.trust.policy import attested

WHEEL, TEXT = Descriptor(INPUT, "sha256:" + "a" * 64, 100), Descriptor(INPUT, "sha256:" + "b" * 64, 10)
LARGE = Descriptor(INPUT, "sha256:" + "c" * 64, 1 << 30)
SMALL = Descriptor(INPUT, "sha256:" + "e" * 64, 1 << 20)
BLOBS = [WHEEL, TEXT, LARGE, SMALL]
TARGET = Target.parse("cpu-x86_64")
REFERENCE = parse_reference("registry.example.org/x:1")
RECIPE = f"recipes/{'0' * 64}"
GOOD = {
    "kind": "venv",
    "target": "cpu-x86_64",
    "digest": "sha256:" + "d" * 64,
    "plan": "sha256:p",
    "lock": "sha256:l",
    "files": {f"wheels/{'a' * 64}/x-1-py3-none-any.whl": WHEEL.digest, f"{RECIPE}/recipe.toml": TEXT.digest},
}


def read(value: Any) -> Any:
    return _read(json.dumps(value).encode(), BLOBS, "here")


def place(name: str, digest: str = TEXT.digest) -> Callable[[dict[str, Any]], object]:
    return lambda value: value.update(files={name: digest})


WRONG: dict[str, Callable[[dict[str, Any]], object]] = {
    "a path that leads out of the recipe": place(f"{RECIPE}/../../x"),
    "an absolute path": place("/etc/passwd"),
    "another folder of the store": place(f"builders/{'b' * 64}/x.sqsh"),
    "a wheel with another digest": place(f"wheels/{'f' * 64}/x.whl"),
    "a wheel in a folder": place(f"wheels/{'b' * 64}/../x.whl"),
    "a wheel without a name": place(f"wheels/{'b' * 64}/"),
    "a file of git": place(f"{RECIPE}/.git/config"),
    "a file of git on a file system without cases": place(f"{RECIPE}/x/.GIT/config"),
    "a file without a name": place(f"{RECIPE}//x"),
    "a file that is the folder": place(f"{RECIPE}/."),
    "a name with a zero byte": place(f"{RECIPE}/a\0b"),
    "a name that is half of a character": place(f"{RECIPE}/\ud800"),
    "a path that is too deep": place(f"{RECIPE}/{'a/' * 300}b"),
    "a name that is too long": place(f"{RECIPE}/{'é' * 128}"),
    "a file that the manifest lacks": place(f"{RECIPE}/x", "sha256:" + "f" * 64),
    "a digest of another form": place(f"{RECIPE}/x", "b" * 64),
    "a large file of a recipe": place(f"{RECIPE}/x", LARGE.digest),
    "a file that a recipe has very often": lambda value: value["files"].update(
        {f"{RECIPE}/{number}": SMALL.digest for number in range(100)}
    ),
    "a target that is no text": lambda value: value.update(target=["x"]),
    "two recipes": lambda value: value["files"].update({f"recipes/{'1' * 64}/x": SMALL.digest}),
    "no recipe": lambda value: value["files"].pop(f"{RECIPE}/recipe.toml"),
    "no plan": lambda value: value.pop("plan"),
    "files that are a list": lambda value: value.update(files=[]),
}


def test_what_was_pushed_is_read_again() -> None:
    assert read(GOOD)[0].files == GOOD["files"]


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_configuration_is_refused(name: str) -> None:
    value = json.loads(json.dumps(GOOD))
    WRONG[name](value)
    with pytest.raises(BuildError, match="invalid configuration"):
        read(value)


@given(st.binary() | st.text().map(str.encode))
def test_any_configuration_is_read_or_refused(data: bytes) -> None:
    with pytest.raises(BuildError):
        _read(data, BLOBS, "here")


KEY = ed25519.Ed25519PrivateKey.generate()
PLATFORM = "x86_64-manylinux_2_28"


class Pushed:
    """An environment of one wheel as it lies in a registry; a hostile hand changes `about`, `files` and the lock."""

    def __init__(self, top: Path, *, trusted: bool = False) -> None:
        self.top, self.registry = top, Blobs(top / "registry")
        site = f'store = "{top}/store"\n'
        if trusted:
            (top / "ci.pub").write_bytes(KEY.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
            site += f'[trust]\nsigners = ["{top}/ci.pub"]\n'
        (top / "site.toml").write_text(site)
        self.environment = load_environment({"ENVBUILD_SITE": str(top / "site.toml"), "PATH": os.environ["PATH"]})
        self.store = self.environment.store
        self.wheel = make_wheel(top / "wheels", "alpha", tag="cp311-cp311-manylinux_2_17_x86_64")
        self.sha256 = hashlib.sha256(self.wheel.read_bytes()).hexdigest()
        self.folder = make_recipe(top / "of", "lab", ["alpha"])
        self.lock()
        self.name, self.more, self.attested = self.wheel.name, dict[str, bytes](), trusted

    def lock(self, *, built: tuple[BuiltPackage, ...] = ()) -> None:
        loaded = load_recipe(self.folder / "recipe.toml")
        digest = loaded.resolution_digest(TARGET)
        packages = (LockedPackage("alpha", "1.0", (self.sha256,)),)
        lock = Lock("lab", TARGET.name, "3.11", PLATFORM, digest, packages, built=built)
        write_lock_file(self.folder / f"{TARGET.name}.requirements.txt", render_lock(lock))

    def plan(self) -> Plan:
        loaded = load_recipe(self.folder / "recipe.toml")
        return prepare_folder(VENV, loaded, TARGET, self.environment, locked=True, offline=True, log=print)[0]

    def receipt(self, plan: Plan) -> dict[str, Any]:
        return {
            "format": 1,
            "passed": True,
            "verified_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": 1.0,
            "artifact": {"kind": "venv", "path": "/x", "digest": GOOD["digest"]},
            "target": TARGET.name,
            "checks": [],
            "recipe": {"name": "lab", "digest": plan.recipe_digest},
            "plan": {"digest": plan.digest},
            "lock": {"digest": plan.lock_digest},
            "versions": {"envbuild": "1"},
        }

    def pull(self, plan: Plan, *, receipt: dict[str, Any] | None = None) -> Any:
        """Pull what is pushed as of `plan`, with the attested `receipt`; return the call that would build it."""
        texts = {f"{RECIPE}/{one.name}": one.read_bytes() for one in self.folder.iterdir()} | self.more
        files = {f"wheels/{self.sha256}/{self.name}": self.wheel.read_bytes(), **texts}
        listed = [Descriptor(INPUT, self.registry.add(data), len(data)) for data in files.values()]
        digests = {place: blob.digest for place, blob in zip(files, listed, strict=True)}
        about = {**GOOD, "plan": plan.digest, "files": digests}
        if self.attested:
            receipt = receipt or self.receipt(plan)
            media = next(media for media, name in ATTESTATIONS.items() if not name)
            beside = {RECEIPT: json.dumps(receipt).encode(), media: sign(attested(receipt), CryptoSigner(KEY))}
            listed += [Descriptor(kind, self.store.blobs.add(data), len(data)) for kind, data in beside.items()]

        def fetch(wanted: list[Descriptor], blobs: Blobs, _: object) -> None:
            for blob in wanted:
                blobs.add(self.registry.read(blob.digest))

        registry = cast(Registry, SimpleNamespace(reference=REFERENCE, fetch_blobs=fetch))
        made = SimpleNamespace(path=self.top, digest=GOOD["digest"], target="", receipt=None)
        with patch("envbuild.build.rebuild.make_environment", return_value=made) as make:
            try:
                pull_environment(
                    json.dumps(about).encode(), listed, registry, self.top / "env", self.environment, verify=True
                )
            finally:
                self.built = make.called
        return make.call_args


@pytest.mark.parametrize("changed", [None, "recipe", "plan", "lock"])
def test_only_what_was_attested_is_built_or_kept(tmp_path: Path, changed: str | None) -> None:
    pushed = Pushed(tmp_path, trusted=True)
    plan = pushed.plan()
    receipt = pushed.receipt(plan)
    if changed is None:
        assert pushed.pull(plan).kwargs["digest"] == GOOD["digest"] and pushed.built
        return
    receipt[changed]["digest"] = "sha256:other"  # whoever may write to the registry has pushed another one
    with pytest.raises(VerificationError, match=f"is not trusted: its {changed} is sha256:"):
        pushed.pull(plan, receipt=receipt)
    assert not pushed.built and not (pushed.store.root / "wheels").exists()


def test_the_attestation_covers_the_tools_of_builds_from_source(tmp_path: Path) -> None:
    """The plan of a package from source names its build's wheels by version alone; the lock has their hashes."""
    pushed = Pushed(tmp_path, trusted=True)
    (pushed.folder / "recipe.toml").write_text((pushed.folder / "recipe.toml").read_text() + "[build.own]\n")
    plans = []
    for tool in ("c", "d"):
        build = (LockedPackage("setuptools", "80.0", (tool * 64,)),)
        pushed.lock(built=(BuiltPackage("own", "1.0", "e" * 64, build=build),))
        plans.append(pushed.plan())
    assert plans[0].digest == plans[1].digest
    with pytest.raises(VerificationError, match="is not trusted: its lock is sha256:"):
        pushed.pull(plans[1], receipt=pushed.receipt(plans[0]))


@pytest.mark.parametrize("trusted", [False, True])
def test_no_program_of_a_pulled_recipe_is_run(tmp_path: Path, trusted: bool) -> None:
    pushed = Pushed(tmp_path, trusted=trusted)
    plan = pushed.plan()
    with (pushed.folder / "recipe.toml").open("a") as stream:
        stream.write('[project]\npath = "."\n')
    pushed.more[f"{RECIPE}/x.py"] = b"x = 1\n"
    with (
        patch("envbuild.layers.project.run_git") as git,
        pytest.raises(BuildError, match=r"the kept recipe 0+ has \[project\]"),
    ):
        pushed.pull(plan)
    assert not git.called and not pushed.built


def test_a_script_outside_of_the_pulled_recipe_is_not_taken(tmp_path: Path) -> None:
    pushed = Pushed(tmp_path)
    plan = pushed.plan()
    (tmp_path / "secret").write_text("x = 1\n")
    with (pushed.folder / "recipe.toml").open("a") as stream:
        stream.write(f'[verify]\nscript = "{tmp_path}/secret"\n')
    with pytest.raises(UsageError, match="is outside of the recipe's folder"):
        pushed.pull(plan)


def test_an_environment_of_another_digest_takes_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pushed = Pushed(tmp_path)
    module = SimpleNamespace(TITLE="venv", build=lambda _: SimpleNamespace(digest="sha256:here"))
    monkeypatch.setattr("envbuild.build.folder.folder_module", lambda _: module)
    with pytest.raises(BuildError, match="is sha256:here, but the pushed one has sha256:there"):
        make_environment(
            cast(Any, None),
            pushed.plan(),
            cast(Any, None),
            pushed.environment,
            tmp_path / "env",
            offline=True,
            digest="sha256:there",
        )
    assert not (tmp_path / "env").exists()


def test_a_pull_keeps_to_the_limits_before_the_first_byte(tmp_path: Path) -> None:
    """Files are counted as they are written out: one wheel may be named for many."""
    (tmp_path / "site.toml").write_text('store = "store"\n[limits]\nunpacked_bytes = 1000\n')
    environment = load_environment({"ENVBUILD_SITE": str(tmp_path / "site.toml"), "PATH": os.environ["PATH"]})
    names = {f"wheels/{'a' * 64}/x-{number}-py3-none-any.whl": WHEEL.digest for number in range(10)}
    about = {**GOOD, "files": {**cast(dict[str, str], GOOD["files"]), **names}}
    registry = cast(Registry, SimpleNamespace(reference="registry/x:1"))  # nothing is asked of it
    with pytest.raises(BuildError, match="registry/x:1: more than 1000 bytes of files"):
        pull_environment(json.dumps(about).encode(), BLOBS, registry, tmp_path / "env", environment, verify=True)


def test_a_target_that_the_recipe_lacks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pushed = Pushed(tmp_path)
    plan = pushed.plan()
    monkeypatch.setitem(GOOD, "target", "cu126-x86_64")
    with pytest.raises(UsageError, match="has no target 'cu126-x86_64'"):
        pushed.pull(plan)
