"""`[project]`: own code in a venv and a .sqsh, built by hand without torch; only the top changes when code changes."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lab.conda_channel import Channel
from lab.wheels import make_recipe, make_wheel

from envbuild.contract.manifest import read_manifest
from envbuild.contract.state import read_state
from envbuild.verify.image_file import image_state, open_image_file

ENVBUILD = Path(sys.executable).with_name("envbuild")
TARGET = f"cpu-{platform.machine()}"
# A back end in the project's own tree (PEP 517, "In-tree build backends"), which needs no index.
BACKEND = """
import os, sys
sys.path.insert(0, WHEELS)
from lab.wheels import make_wheel
from pathlib import Path
def get_requires_for_build_wheel(config_settings=None):
    return []
def build_wheel(folder, config_settings=None, metadata_directory=None):
    if os.path.exists("src/lab_pkg/broken"):
        raise RuntimeError("a broken project")
    text = Path("src/lab_pkg/__init__.py").read_bytes()
    return make_wheel(Path(folder), "lab-pkg", "0.3", requires=["leaf>=1"], files={"lab_pkg/__init__.py": text}).name
""".replace("WHEELS", repr(os.fspath(Path(__file__).parents[1])))


class Lab:
    """A project in a git repository with a recipe, and an index of its only dependency."""

    def __init__(self, top: Path) -> None:
        self.top, wheels = top, top / "wheels"
        make_wheel(wheels, "leaf", "1.2")
        (top / "src/lab_pkg").mkdir(parents=True)
        (top / "src/lab_pkg/__init__.py").write_text('def main():\n    print("one")\n')
        (top / "pyproject.toml").write_text(
            '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
            '[project]\nname = "Lab.Pkg"\nversion = "0.3"\ndependencies = ["leaf>=1"]\n'
        )
        (top / ".gitignore").write_text("/wheels\n/store\n/out*\n/recipes\n")
        (top / "backend.py").write_text(BACKEND)
        self.recipe = make_recipe(top / "recipes", "own", [], extra='[project]\npath = "../.."\n')
        self.env = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_", "ENVBUILD_"))},
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(wheels),
            "ENVBUILD_STORE": str(top / "store"),
            "GIT_CONFIG_GLOBAL": os.devnull,
        }
        self.git("init", "-q")
        self.commit()

    def git(self, *words: str) -> str:
        line = ["git", "-c", "user.name=ada", "-c", "user.email=ada@example.org", *words]
        return subprocess.run(line, cwd=self.top, env=self.env, check=True, capture_output=True, text=True).stdout

    def commit(self) -> str:
        self.git("add", "-A")
        self.git("commit", "-qm", "x")
        return self.git("rev-parse", "HEAD").strip()

    def envbuild(self, *words: str, code: int = 0) -> str:
        done = subprocess.run([ENVBUILD, *words], cwd=self.top, env=self.env, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        return done.stderr

    def change(self, word: str) -> None:
        path = self.top / "src/lab_pkg/__init__.py"
        before = path.stat().st_mtime
        path.write_text(f'def main():\n    print("{word}")\n')
        # Python takes old bytecode for a source of the same size and second.
        os.utime(path, (before + 2, before + 2))


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path / "top")


def says(venv: Path) -> str:
    line = [venv / "bin/python", "-c", "import lab_pkg; lab_pkg.main()"]
    return subprocess.run(line, check=True, capture_output=True, text=True, cwd="/").stdout.strip()


def project_of(venv: Path) -> dict[str, Any]:
    state = read_state(venv)
    assert state is not None
    return state.project


def test_a_venv_holds_the_project_and_its_dependencies_are_locked(lab: Lab) -> None:
    venv, head = lab.top / "out", lab.git("rev-parse", "HEAD").strip()
    said = lab.envbuild("venv", "recipes/own", "--no-verify", "--out", "out")
    assert "building its wheel" in said
    assert "leaf==1.2" in (lab.recipe / f"{TARGET}.requirements.txt").read_text()
    assert says(venv) == "one"
    project = project_of(venv)
    assert (project["name"], project["version"], project["commit"]) == ("lab-pkg", "0.3", head)
    # Nothing changed: no back end runs. Another venv of the same files takes the wheel from the store.
    assert "nothing changed" in lab.envbuild("venv", "recipes/own", "--no-verify", "--out", "out")
    assert "building its wheel" not in lab.envbuild("venv", "recipes/own", "--no-verify", "--out", "out2")
    lab.change("two")
    assert "plan changed" in lab.envbuild("venv", "recipes/own", "--no-verify", "--out", "out")
    assert (says(venv), project_of(venv)["commit"]) == ("two", f"{head}-dirty")
    # A file of the project that changes in the artifact is found.
    (file := next(venv.glob("lib/*/site-packages/lab_pkg/__init__.py"))).unlink()  # it may be a link into uv's cache
    file.write_text("def main(): pass\n")
    assert "lab_pkg/__init__.py changed" in lab.envbuild("venv", "recipes/own", "--no-verify", "--out", "out")


def test_an_editable_venv_refers_to_the_folder_and_stays_as_code_changes(lab: Lab) -> None:
    line = ("venv", "recipes/own", "--no-verify", "--editable", "--out", "out")
    lab.envbuild(*line)
    venv = lab.top / "out"
    assert says(venv) == "one" and project_of(venv)["editable"] is True
    manifest = read_manifest(venv)
    assert manifest is not None
    assert [path.rpartition("/")[2] for path in manifest.rows if path.endswith(".pth")] == ["__editable__.lab_pkg.pth"]
    lab.change("two")
    assert says(venv) == "two"
    assert "nothing changed" in lab.envbuild(*line)


def test_a_conda_environment_holds_the_project_and_what_pip_adds_for_it(lab: Lab, conda_channel: Channel) -> None:
    with (lab.recipe / "recipe.toml").open("a") as out:
        out.write(f'[conda]\nchannels = ["{conda_channel.folder.as_uri()}"]\ndependencies = ["numpy"]\n')
    lab.envbuild("conda", "recipes/own", "--no-verify", "--out", "out")
    assert "leaf==1.2" in (lab.recipe / f"{TARGET}.conda.requirements.txt").read_text()
    assert says(lab.top / "out") == "one" and project_of(lab.top / "out")["version"] == "0.3"
    lab.change("two")
    lab.envbuild("conda", "recipes/own", "--no-verify", "--out", "out")
    assert says(lab.top / "out") == "two"


def test_a_script_verifies_the_artifact_also_without_the_recipe(lab: Lab) -> None:
    """Without torch, the script runs once on each node."""
    with (lab.recipe / "recipe.toml").open("a") as out:
        out.write('[verify]\ntrainer = false\nscript = "../../train.py 7"\nexpect.file = "seven"\n')
    script, line = lab.top / "train.py", ("venv", "recipes/own", "--out", "out")
    script.write_text("import lab_pkg, sys\nlab_pkg.main()\nopen({'7': 'seven'}[sys.argv[1]], 'w').write('x')\n")
    lab.envbuild(*line)
    assert "nothing changed" in lab.envbuild(*line)
    script.rename(lab.top / "gone.py")
    lab.envbuild("verify", "out")
    receipt = json.loads((lab.top / "out.receipt.json").read_text())
    (check,) = (one for one in receipt["checks"] if one["name"] == "command")
    assert check["status"] == "pass" and "/.script/train.py 7" in check["evidence"]["command"]
    # A changed script is another verification of the same environment.
    script.write_text("raise SystemExit(3)\n")
    assert "exit codes [3, 3]" in lab.envbuild(*line, code=5)


def test_a_failing_back_end_is_an_error_with_its_last_lines(lab: Lab) -> None:
    (lab.top / "src/lab_pkg/broken").write_text("")
    lab.commit()
    said = lab.envbuild("venv", "recipes/own", "--no-verify", code=4)
    assert "own/recipe.toml:6:1: [project]: the wheel of" in said and "RuntimeError: a broken project" in said


def test_only_the_top_layer_of_an_image_changes_with_the_code(lab: Lab) -> None:
    """Debian's archive is asked for the base."""
    lab.envbuild("docker", "recipes/own", "--no-verify", "--out", "oci:out-oci")
    before = layers(lab.top / "out-oci")
    lab.change("two")
    lab.envbuild("docker", "recipes/own", "--no-verify", "--out", "oci:out-oci")
    after = layers(lab.top / "out-oci")
    assert after[:-1] == before[:-1] and after[-1] != before[-1]
    lab.envbuild("enroot", "recipes/own", "--no-verify", "--out", "out.sqsh")
    lab.change("three")
    said = lab.envbuild("enroot", "recipes/own", "--no-verify", "--out", "out.sqsh")
    assert [line for line in said.splitlines() if "layer: " in line] == [
        "  layer: ddp-train 0.1.0, lab-pkg 0.3 and envbuild.json"
    ]
    state = image_state(open_image_file(lab.top / "out.sqsh"))
    assert state.project["commit"].endswith("-dirty")
    lab.envbuild("diff", "out.sqsh", "oci:out-oci", code=1)


def layers(layout: Path) -> list[str]:
    def blob(digest: str) -> Any:
        return json.loads((layout / "blobs/sha256" / digest.partition(":")[2]).read_text())

    manifest = blob(json.loads((layout / "index.json").read_text())["manifests"][0]["digest"])
    return [layer["digest"] for layer in manifest["layers"]]
