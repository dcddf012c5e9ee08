"""The scripts of the images workflow, run by bash as GitHub does, with git, jq and envbuild's own matrix."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lab.ci import commit, git, write_recipe
from ruamel.yaml import YAML

WORKFLOW = Path(__file__).resolve().parents[2] / ".github/workflows/images.yml"
ABSENT = [tool for tool in ("bash", "git", "jq") if shutil.which(tool) is None]
pytestmark = pytest.mark.skipif(bool(ABSENT), reason=f"not installed: {', '.join(ABSENT)}")
ZEROS = "0" * 40


def script(job: str, part: str) -> str:
    """The one script of `job` that has `part` in it."""
    steps = YAML(typ="safe").load(WORKFLOW.read_text())["jobs"][job]["steps"]
    (found,) = [step["run"] for step in steps if part in step.get("run", "")]
    return str(found)


class Runner:
    """A checkout, and what GitHub gives to scripts."""

    def __init__(self, folder: Path) -> None:
        self.top = folder / "checkout"
        for name in ("one", "two"):
            write_recipe(self.top, name, "cpu-x86_64", "cpu-aarch64", "cu126-x86_64")
        git(self.top, "init", "--quiet")
        self.first = commit(self.top)
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.output = folder / "output"
        self.calls = folder / "calls"

    def program(self, text: str) -> None:
        path = self.bin / "envbuild"
        path.write_text(text)
        path.chmod(0o755)

    def run(self, script: str, **env: str) -> dict[str, str]:
        """Run it as `shell: bash` does; what it wrote to $GITHUB_OUTPUT."""
        self.output.write_text("")
        given = {
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "GITHUB_OUTPUT": str(self.output),
            "GITHUB_STEP_SUMMARY": str(self.output.with_name("summary")),
            "GITHUB_REPOSITORY": "Owner/EnvBuild",
            "GITHUB_REF_TYPE": "branch",
            "GITHUB_REF_NAME": "main",
            "PUBLISH": "true",
            "CALLS": str(self.calls),
        }
        line = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script]
        done = subprocess.run(line, cwd=self.top, env={**os.environ, **given, **env}, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(done.stderr)
        return dict(line.split("=", 1) for line in self.output.read_text().splitlines())

    def called(self) -> list[list[str]]:
        return [json.loads(line) for line in self.calls.read_text().splitlines()]


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    made = Runner(tmp_path)
    # Only the checkout's recipes, not those that envbuild ships.
    made.program(f'#!/bin/sh\ncommand=$1; shift\nexec {sys.executable} -m envbuild $command one two "$@"\n')
    return made


# Says what it was called with; a push needs a registry, and pushing has its own tests.
RECORDER = f"""#!{sys.executable}
import hashlib, json, os, sys
line = json.dumps(sys.argv[1:])
print(line, file=open(os.environ["CALLS"], "a"))
print(json.dumps({{"digest": "sha256:" + hashlib.sha256(line.encode()).hexdigest()}}))
"""


def recipes(output: dict[str, str]) -> set[str]:
    return {entry["recipe"] for entry in json.loads(output["matrix"])["include"]}


@pytest.mark.parametrize(
    ("base", "kind", "expected"),
    [
        ("first", "branch", {"two"}),
        ("first", "tag", {"one", "two"}),
        (ZEROS, "branch", {"one", "two"}),  # a new branch
        ("", "branch", {"one", "two"}),  # a manual run
        ("0123456789" * 4, "branch", {"one", "two"}),  # gone with a forced push
    ],
)
def test_the_plan_is_what_changed_and_everything_where_that_cannot_be_told(
    runner: Runner, base: str, kind: str, expected: set[str]
) -> None:
    write_recipe(runner.top, "two", "cpu-x86_64")
    commit(runner.top)
    base = runner.first if base == "first" else base
    output = runner.run(script("plan", "GITHUB_OUTPUT"), BASE=base, GITHUB_REF_TYPE=kind)
    assert recipes(output) == expected and output["publish"] == "true"


def test_an_empty_plan_is_what_the_build_job_is_skipped_for(runner: Runner) -> None:
    output = runner.run(script("plan", "GITHUB_OUTPUT"), BASE=runner.first)
    condition = YAML(typ="safe").load(WORKFLOW.read_text())["jobs"]["build"]["if"]
    assert re.fullmatch(r"needs\.plan\.outputs\.matrix != '(.*)'", condition)[1] == output["matrix"]  # type: ignore[index]


def test_a_mistake_in_a_recipe_fails_the_plan(runner: Runner) -> None:
    (runner.top / "recipes/one/recipe.toml").write_text("nonsense = 1\n")
    with pytest.raises(RuntimeError, match="nonsense"):
        runner.run(script("plan", "GITHUB_OUTPUT"), BASE="")


def test_only_images_are_pushed_and_only_where_publishing_is_on(runner: Runner) -> None:
    entries = json.loads(runner.run(script("plan", "GITHUB_OUTPUT"), BASE="")["matrix"])["include"]
    runner.program(RECORDER)
    build = script("build", "matrix.command")
    for publish in ("true", "false"):
        for entry in entries:
            text = build.replace("${{ matrix.command }}", entry["command"])
            assert "${{" not in text
            variables = {name.upper(): entry[name] for name in ("artifact", "recipe", "target")}
            runner.run(text, PUBLISH=publish, **variables)
            told = runner.called()[-1]
            tag = f"ghcr.io/owner/envbuild/{entry['recipe']}:main-{entry['target']}"
            pushed = ["--tag", tag, "--push"] if (publish, entry["artifact"]) == ("true", "docker") else []
            gpu = ["--no-verify"] if entry["gpu"] else []
            assert told == [
                entry["artifact"],
                entry["recipe"],
                "--target",
                entry["target"],
                "--locked",
                *gpu,
                "--json",
                *pushed,
            ]
    failing = build.replace("${{ matrix.command }}", "false")
    with pytest.raises(RuntimeError):
        runner.run(failing, ARTIFACT="venv", RECIPE="one", TARGET="cpu-x86_64")


def test_one_index_is_made_of_all_architectures_of_an_accelerator(runner: Runner) -> None:
    matrix = runner.run(script("plan", "GITHUB_OUTPUT"), BASE="")["matrix"]
    runner.program(RECORDER)
    output = runner.run(script("publish", "GITHUB_OUTPUT"), MATRIX=matrix)
    calls: list[Any] = [
        [
            "docker",
            name,
            *targets,
            "--locked",
            "--no-verify",
            "--tag",
            f"ghcr.io/owner/envbuild/{name}:main-{accelerator}",
            "--push",
            "--json",
        ]
        for name in ("one", "two")
        for accelerator, targets in (
            ("cpu", ["--target", "cpu-x86_64", "--target", "cpu-aarch64"]),
            ("cu126", ["--target", "cu126-x86_64"]),
        )
    ]
    assert runner.called() == calls
    digests = json.loads(output["digests"])
    assert list(digests) == [call[call.index("--tag") + 1] for call in calls]
    assert len(set(digests.values())) == 4
    runner.program("#!/bin/sh\nexit 5\n")
    with pytest.raises(RuntimeError):
        runner.run(script("publish", "GITHUB_OUTPUT"), MATRIX=matrix)
