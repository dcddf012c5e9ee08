"""The configuration of an image: the variables with which each of its programs starts, whatever the runtime."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from envbuild.build.image_layers import run_config
from envbuild.debian.lock import DebianLock
from envbuild.layers.base import BaseImage
from envbuild.lock.conda import CondaPackage
from envbuild.lock.image import ImageLock, OciLock
from envbuild.recipe.model import ImageTable

from .test_receipts import the_plan

OCI = OciLock("docker.io/pytorch/pytorch:2.7", "sha256:" + "a" * 64)
DEBIAN = DebianLock("bookworm", "2026-01-01T00:00:00Z", ())
PYTHON = CondaPackage("python", "3.11.9", "h_0", "linux-64", "https://c.example/python-3.11.9-h_0.conda", "", "b" * 64)


def variables(base: OciLock | DebianLock, *, conda: bool = False, given: Mapping[str, str] = {}) -> dict[str, str]:
    plan = replace(
        the_plan(),
        image=ImageTable(env=dict(given)),
        base=ImageLock("r", "cpu-x86_64", "sha256:d", base),
        conda=(PYTHON,) if conda else (),
    )
    config: dict[str, Any] = {"Env": ["PATH=/of/base", "PYTHONNOUSERSITE="]} if base is OCI else {}
    made = run_config(plan, BaseImage("b", "", (), "/usr/bin/python3", "3.11", config))
    return dict(pair.partition("=")[::2] for pair in made["Env"])


@pytest.mark.parametrize(("base", "conda"), [(OCI, False), (OCI, True), (DEBIAN, True)])
def test_packages_in_the_home_folder_are_kept_out(base: OciLock | DebianLock, conda: bool) -> None:
    assert variables(base, conda=conda)["PYTHONNOUSERSITE"] == "1"


def test_a_venv_without_the_packages_of_a_base_needs_no_variable_for_that() -> None:
    assert "PYTHONNOUSERSITE" not in variables(DEBIAN)  # pyvenv.cfg


def test_the_recipe_has_the_last_word() -> None:
    assert variables(OCI, given={"PYTHONNOUSERSITE": ""})["PYTHONNOUSERSITE"] == ""
