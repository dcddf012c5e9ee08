"""Environments in registries: no configuration makes a pull write outside of its folder, or take another file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given
from hypothesis import strategies as st
from lab.wheels import make_recipe
from securesystemslib.signer import CryptoSigner

from envbuild.environment import load_environment
from envbuild.errors import BuildError, VerificationError
from envbuild.image.model import Descriptor
from envbuild.image.registry import Registry
from envbuild.kinds.share_environment import _read, is_environment, pull_environment
from envbuild.store.pieces import ATTESTATIONS, INPUT, RECEIPT
from envbuild.trust.bundle import sign
from envbuild.trust.policy import attested

WHEEL, TEXT = Descriptor(INPUT, "sha256:" + "a" * 64, 100), Descriptor(INPUT, "sha256:" + "b" * 64, 10)
LARGE = Descriptor(INPUT, "sha256:" + "c" * 64, 1 << 30)
BLOBS = [WHEEL, TEXT, LARGE]
GOOD = {
    "kind": "venv", "name": "lab", "target": "cpu-x86_64", "digest": "sha256:" + "d" * 64, "plan": "sha256:p",
    "compile_bytecode": False,
    "files": {f"wheels/{'a' * 64}/x-1-py3-none-any.whl": WHEEL.digest, "recipe/recipe.toml": TEXT.digest},
}  # fmt: skip


def read(value: Any) -> Any:
    return _read(json.dumps(value).encode(), BLOBS, "here")


def place(name: str, digest: str = TEXT.digest) -> Callable[[dict[str, Any]], object]:
    return lambda value: value.update(files={name: digest})


WRONG: dict[str, Callable[[dict[str, Any]], object]] = {
    "a path that leads out of the recipe": place("recipe/../../x"),
    "an absolute path": place("/etc/passwd"),
    "another folder of the store": place(f"builders/{'b' * 64}/x.sqsh"),
    "a wheel with another digest": place(f"wheels/{'e' * 64}/x.whl"),
    "a wheel in a folder": place(f"wheels/{'b' * 64}/../x.whl"),
    "a wheel whose name is a folder": place(f"wheels/{'b' * 64}/.."),
    "a file that the manifest lacks": place("recipe/x", "sha256:" + "e" * 64),
    "a digest of another form": place("recipe/x", "b" * 64),
    "a large file of a recipe": place("recipe/x", LARGE.digest),
    "a name that is a path": lambda value: value.update(name="../x"),
    "a name that is no text": lambda value: value.update(name=["x"]),
    "no plan": lambda value: value.pop("plan"),
    "files that are a list": lambda value: value.update(files=[]),
}


def test_what_was_pushed_is_read_again() -> None:
    assert read(GOOD).files == GOOD["files"] and is_environment(json.dumps(GOOD).encode())


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_configuration_is_refused(name: str) -> None:
    value = json.loads(json.dumps(GOOD))
    WRONG[name](value)
    with pytest.raises(BuildError, match="its configuration cannot be understood"):
        read(value)


@given(st.binary() | st.text().map(str.encode))
def test_any_configuration_is_read_or_refused(data: bytes) -> None:
    assert not is_environment(data)
    with pytest.raises(BuildError):
        _read(data, BLOBS, "here")


@pytest.mark.parametrize("changed", [None, "recipe", "plan"])
def test_only_what_was_attested_is_built(tmp_path: Path, changed: str | None) -> None:
    private = ed25519.Ed25519PrivateKey.generate()
    public = private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "ci.pub").write_bytes(public)
    (tmp_path / "site.toml").write_text(f'store = "store"\n[trust]\nsigners = ["{tmp_path}/ci.pub"]\n')
    environment = load_environment({"ENVBUILD_SITE": str(tmp_path / "site.toml"), "PATH": os.environ["PATH"]})
    blobs, digest = environment.store.blobs, GOOD["digest"]
    receipt = {
        "format": 1, "passed": True, "verified_at": datetime.now(UTC).isoformat(timespec="seconds"), "seconds": 1.0,
        "artifact": {"kind": "venv", "path": "/x", "digest": digest}, "target": "cpu-x86_64", "checks": [],
        "recipe": {"name": "lab", "digest": "sha256:r"}, "plan": {"digest": "sha256:p"}, "versions": {"envbuild": "1"},
    }  # fmt: skip
    recipe = make_recipe(tmp_path, "lab", ["alpha"]) / "recipe.toml"
    texts = {
        INPUT: recipe.read_bytes(), RECEIPT: json.dumps(receipt).encode(),
        next(media for media, name in ATTESTATIONS.items() if not name): sign(attested(receipt), CryptoSigner(private)),
    }  # fmt: skip
    listed = [Descriptor(media, blobs.add(text), len(text)) for media, text in texts.items()]
    about = {**GOOD, "files": {"recipe/recipe.toml": listed[0].digest}}
    digests = {"recipe_digest": "sha256:r", "digest": "sha256:p"}
    if changed is not None:  # whoever may write to the registry writes the configuration, too
        name = "digest" if changed == "plan" else "recipe_digest"
        digests[name] = "sha256:other"
        about["plan"] = digests["digest"]
    registry = SimpleNamespace(reference="registry/x:1", fetch_blobs=lambda *_: [])
    plan, built = SimpleNamespace(**digests), SimpleNamespace(path=tmp_path, digest=digest, target="", receipt=None)
    with (
        patch("envbuild.kinds.share_environment.prepare_folder", return_value=(plan, None)),
        patch("envbuild.kinds.share_environment.make_environment", return_value=built) as make,
    ):  # fmt: skip
        pull = partial(
            pull_environment, json.dumps(about).encode(), listed, cast(Registry, registry), tmp_path / "env",
            environment, verify=True,
        )  # fmt: skip
        if changed is None:
            pull()
        else:
            with pytest.raises(VerificationError, match=f"is not trusted: its {changed} is sha256:"):
                pull()
        assert make.called == (changed is None)
