"""A library with code for one GPU, in artifacts for others: verified, built without verification, and in jobs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lab.wheels import make_recipe, make_wheel
from unit.gpu_files import fatbin

from envbuild.base.elf import MACHINES
from envbuild.recipe.targets import host_arch

from .conftest import Command

TARGET = f"cu126-{host_arch()}"
ELF = b"\x7fELF\x02\x01" + bytes(12) + MACHINES.get(host_arch(), 0).to_bytes(2, "little") + bytes(40)


@pytest.fixture
def lab(tmp_path: Path) -> Command:
    wheels = tmp_path / "wheels"
    make_wheel(wheels, "own-ops", files={"own_ops/_C.so": ELF + fatbin("sm_80", "sm_86")})
    env = {"PIP_CONFIG_FILE": "/dev/null", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)}
    for gpu in ("a100", "h100"):
        (tmp_path / f"{gpu}.toml").write_text(f'[scheduler]\nkind = "slurm"\n[node]\ngpus = 1\ngpu_types = ["{gpu}"]\n')
    name_gpus(tmp_path, "")
    return Command(tmp_path, {**env, "ENVBUILD_STORE": str(tmp_path / "store")})


def name_gpus(folder: Path, names: str) -> None:
    text = f"[targets.{TARGET}]\ngpus = [{names}]\n[verify]\ntrainer = false\n"
    make_recipe(folder / "recipes", "ops", ["own-ops"], targets=text)


def test_an_artifact_is_verified_and_a_job_on_another_gpu_refused(lab: Command) -> None:
    name_gpus(lab.folder, '"a100"')
    assert lab("venv", "ops", "--target", TARGET).returncode == 0
    place = lab.folder / f"build/ops/{TARGET}"
    receipt = json.loads((place / "venv.receipt.json").read_text())
    (check,) = (one for one in receipt["checks"] if one["name"] == "gpus")
    assert check["seen"] == "sm_80: 1 libraries natively" and receipt["settings"]["gpus"] == ["a100"]
    assert check["evidence"]["libraries"] == {"lib/python3.11/site-packages/own_ops/_C.so": {"sm_80 sm_86": 1}}
    job = lab("job", place / "venv", "--site", "./h100.toml")
    assert job.returncode == 5 and "_C.so has no code for sm_90 (h100): it has sm_80, sm_86, and no PTX" in job.stderr
    assert lab("job", place / "venv", "--site", "./a100.toml").returncode == 0
    told = json.loads(lab("check", "ops", "--json").stdout)["targets"][0]["findings"]
    assert "its artifact here runs natively on sm_80, sm_86, sm_87, sm_89" in [one["text"] for one in told]
    # Another GPU is another verification of the same environment.
    name_gpus(lab.folder, '"h100"')
    again = lab("venv", "ops", "--target", TARGET)
    assert again.returncode == 5 and "gpus (code for the GPUs)" in again.stderr


@pytest.mark.parametrize("kind", ["venv", "enroot"])
def test_a_build_without_verification_is_refused_by_the_gpus_of_recipe_and_site(lab: Command, kind: str) -> None:
    """Debian's archive is asked for the base of the image."""
    line = (kind, "ops", "--target", TARGET, "--no-verify", "--out", "out.sqsh")
    of_site = lab(*line, ENVBUILD_SITE=str(lab.folder / "h100.toml"))
    name_gpus(lab.folder, '"hopper"')
    of_recipe = lab(*line)
    for done, name in ((of_site, "h100"), (of_recipe, "hopper")):
        assert done.returncode == 5 and f"no code for sm_90 ({name})" in done.stderr
        assert not (lab.folder / "out.sqsh").exists()
    name_gpus(lab.folder, "")
    assert lab(*line).returncode == 0
    job = lab("job", "./out.sqsh", "--unverified", "--site", "./h100.toml")
    assert job.returncode == 5 and "no code for sm_90 (h100)" in job.stderr
