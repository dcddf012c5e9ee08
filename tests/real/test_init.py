"""`envbuild init` and `envbuild lock` with a real uv: versions of other tools' locks stay, though newer ones exist."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from lab.wheels import make_wheel

from .conftest import Command
from .test_lock import lock_text, pins

UV = (sys.executable, "-m", "uv")


def test_the_lock_has_the_pins_of_uvs(lab: Command) -> None:
    for name in ("alpha", "beta"):
        make_wheel(lab.folder / "wheels", name)
    make_wheel(lab.folder / "wheels", "gamma", requires=["alpha"])
    project = lab.folder / "pyproject.toml"
    project.write_text(
        '[project]\nname = "pinned"\nversion = "1"\nrequires-python = ">=3.11"\ndependencies = ["gamma", "beta"]\n'
    )
    sources = ["--no-index", "--find-links", lab.folder / "wheels"]
    subprocess.run([*UV, "lock", "--quiet", *sources], cwd=lab.folder, check=True)
    for name in ("alpha", "beta"):
        make_wheel(lab.folder / "wheels", name, "1.1")
    done = lab("init", "--from", "uv.lock", "--from", "pyproject.toml", "--target", "cpu-x86_64")
    assert done.returncode == 0 and Path(done.stdout.strip()) == Path("recipes/pinned/recipe.toml")
    assert lab("lock", "pinned", "--wheels").returncode == 0
    assert pins(lock_text(lab, "pinned")) == ["alpha==1.0", "beta==1.0", "gamma==1.0"]


def test_an_environment_of_pip_gives_its_versions(lab: Command) -> None:
    make_wheel(lab.folder / "wheels", "alpha")
    environment = lab.folder / "venv"
    subprocess.run([*UV, "venv", "--quiet", environment], check=True)
    install = [*UV, "pip", "install", "--quiet", "--no-index", "--find-links", lab.folder / "wheels", "alpha"]
    subprocess.run([*install, "--python", environment], check=True)
    make_wheel(lab.folder / "wheels", "alpha", "1.1")
    (environment / "bin/python").unlink()  # nothing of it is run
    assert lab("init", "mine", "--from", "venv", "--target", "cpu-x86_64").returncode == 0
    assert lab("lock", "mine", "--wheels").returncode == 0
    assert pins(lock_text(lab, "mine")) == ["alpha==1.0"]


def test_packages_come_and_go_with_their_locks_or_nothing_changes(lab: Command) -> None:
    for name, version in (("alpha", "1.0"), ("alpha", "1.1"), ("beta", "1.0")):
        make_wheel(lab.folder / "wheels", name, version)
    make_wheel(lab.folder / "wheels", "gamma", requires=["alpha<1.1"])
    (lab.folder / "requirements.txt").write_text("beta\n")
    assert lab("init", "lab", "--from", "requirements.txt", "--target", "cpu-x86_64").returncode == 0
    folder = lab.folder / "recipes/lab"
    made = lab.json("add", "Alpha", "gamma")
    assert made["changes"] == [{"list": "requirements", "before": None, "after": one} for one in ("alpha", "gamma")]
    assert pins(lock_text(lab, "lab")) == ["alpha==1.0", "beta==1.0", "gamma==1.0"]
    assert made["locks"] == {"recipes/lab/cpu-x86_64.requirements.txt": ["+ alpha 1.0", "+ beta 1.0", "+ gamma 1.0"]}
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for words in (["add", "alpha==1.1"], ["add", "nonesuch"], ["remove", "gamma", "--dry-run"]):
        assert lab(*words).returncode == (0 if "--dry-run" in words else 3)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert lab.json("remove", "gamma")["locks"].popitem()[1] == ["- gamma 1.0"]
    assert lab("lock", "lab", "--wheels", "--check").returncode == 0
