"""Honest verifications of each kind of artifact, by hand: none may fail.

    HONEST=100 pytest tests/real/honest.py -n 2 --dist load
    HONEST=100 HONEST_OPTIONS="--nodes 2 --nproc-per-node 1 --epochs 2" pytest …

Each one verifies an untouched artifact, and reads every file again. For docker, the options of `verify` become keys of
the recipe's [verify].
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from .conftest import REPOSITORY, Command, shared
from .test_conda import recipe, site

_COUNT = range(int(os.environ.get("HONEST", "1")))
_OPTIONS = os.environ.get("HONEST_OPTIONS", "").split()


def verified(command: Command, path: str | Path) -> None:
    done = command("verify", path, *_OPTIONS)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("number", _COUNT)
def test_venv(number: int, pt_cpu: dict[str, Any]) -> None:
    verified(pt_cpu["command"], pt_cpu["path"])


@pytest.mark.parametrize("number", _COUNT)
@pytest.mark.parametrize("kind", ["enroot", "apptainer"])
def test_image_file(number: int, kind: str, squash: dict[str, Any]) -> None:
    verified(squash["command"], squash[kind]["path"])


@pytest.fixture(scope="session")
def conda(
    tmp_path_factory: pytest.TempPathFactory, conda_channel: Any, session_store: Path
) -> tuple[Command, dict[str, Any]]:
    def make(folder: Path) -> Any:
        recipe(folder)
        command = Command(folder, env | site(folder, conda_channel.folder.as_uri()))
        assert command("lock", "pt_cpu", "--conda").returncode == 0
        return command.json("conda", "pt_cpu", "--locked", "--no-verify")

    env = {"ENVBUILD_STORE": str(session_store)}
    folder, made = shared(tmp_path_factory, "honest_conda", make)
    return Command(folder, env), made


@pytest.mark.parametrize("number", _COUNT)
def test_conda(number: int, conda: tuple[Command, dict[str, Any]]) -> None:
    command, made = conda
    verified(command, made["path"])


@pytest.mark.parametrize("number", _COUNT)
def test_docker(number: int, tmp_path: Path, docker_daemon: Any, session_store: Path) -> None:
    command = Command(tmp_path, {"ENVBUILD_STORE": str(session_store), **docker_daemon.environment()})
    if _OPTIONS:
        keys = zip(_OPTIONS[::2], _OPTIONS[1::2], strict=True)
        place = tmp_path / "recipes/pt_cpu"
        shutil.copytree(REPOSITORY / "recipes/pt_cpu", place)
        with (place / "recipe.toml").open("a") as stream:
            stream.write("\n[verify]\n" + "".join(f"{key[2:].replace('-', '_')} = {value}\n" for key, value in keys))
    made = command.json("docker", "pt_cpu", "--locked")
    receipt = json.loads(Path(made["receipt"]).read_text())
    assert receipt["passed"] and receipt["artifact"]["digest"] == made["digest"]
