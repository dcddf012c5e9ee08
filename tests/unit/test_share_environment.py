"""Environments in registries: no configuration makes a pull write outside of its folder, or take another file."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envbuild.errors import BuildError
from envbuild.image.model import Descriptor
from envbuild.kinds.share_environment import _read, is_environment
from envbuild.store.pieces import INPUT

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
