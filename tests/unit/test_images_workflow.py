"""The workflow that builds images: what GitHub takes, what the matrix gives it, what envbuild understands."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from lab.ci import valid
from ruamel.yaml import YAML

from envbuild.contract.kinds import ARTIFACTS
from envbuild.matrix import MatrixJob

REPOSITORY = Path(__file__).resolve().parents[2]
GOLDEN = REPOSITORY / "tests/golden/matrix"
WORKFLOW = REPOSITORY / ".github/workflows/images.yml"


def workflow() -> dict[str, Any]:
    loaded: dict[str, Any] = YAML(typ="safe").load(WORKFLOW.read_text())
    return loaded


def scripts() -> list[str]:
    return [step["run"] for job in workflow()["jobs"].values() for step in job["steps"] if "run" in step]


def test_github_accepts_the_workflow_and_gitlab_the_child_pipeline() -> None:
    assert valid("github-workflows", WORKFLOW.read_text())
    assert valid("gitlab-ci", (GOLDEN / "gitlab.json").read_text())


@pytest.mark.parametrize(
    ("good", "broken"),
    [
        ("runs-on: ubuntu-24.04", "runs_on: ubuntu-24.04"),
        ("timeout-minutes: 15", "timeout-minutes: soon"),
        ("contents: read", "contents: reed"),
        ("strategy:", "stratgey:"),
        ("  plan:\n", "  plan plan:\n"),
    ],
)
def test_a_broken_workflow_is_noticed(good: str, broken: str) -> None:
    text = WORKFLOW.read_text()
    assert good in text and not valid("github-workflows", text.replace(good, broken, 1))


def test_a_broken_child_pipeline_is_noticed() -> None:
    pipeline = json.loads((GOLDEN / "gitlab.json").read_text())
    pipeline["pt_cpu-cpu-x86_64-venv"]["script"] = 7
    assert not valid("gitlab-ci", json.dumps(pipeline))


def test_every_matrix_key_in_the_workflow_is_in_the_entries() -> None:
    used = set(re.findall(r"(?<![\w.])matrix\.(\w+)", WORKFLOW.read_text()))
    assert used >= {"runner", "id", "command"}
    assert used <= {field.name for field in fields(MatrixJob)}
    entries = json.loads((GOLDEN / "github.json").read_text())["include"]
    assert all(used <= set(entry) for entry in entries)


def test_every_job_has_a_time_limit_and_no_more_rights_than_it_needs() -> None:
    loaded = workflow()
    assert loaded["permissions"] == {"contents": "read"}
    for name, job in loaded["jobs"].items():
        assert job["timeout-minutes"] <= 120
        assert job.get("permissions", {}) == ({} if name == "plan" else {"contents": "read", "packages": "write"})


def test_every_job_that_reads_a_result_waits_for_the_job_that_gives_it() -> None:
    for name, job in workflow()["jobs"].items():
        needs = job.get("needs", [])
        read = set(re.findall(r"needs\.(\w+)\.", json.dumps(job)))
        assert read <= set([needs] if isinstance(needs, str) else needs), name


def options_of(command: str) -> set[str]:
    """The options that `envbuild COMMAND` takes."""
    import click

    from envbuild.cli.commands import cli

    found = cli.get_command(click.Context(cli), command)
    assert found is not None, f"no command {command!r}"
    return {name for parameter in found.params for name in parameter.opts}


@pytest.mark.parametrize("script", [text for text in scripts() if "envbuild" in text or "matrix." in text])
def test_every_envbuild_option_in_the_workflow_exists(script: str) -> None:
    named = set(re.findall(r"\benvbuild (\w+)", script))
    used = named | (set(ARTIFACTS) if "matrix.command" in script else set())
    assert used, script
    lines = [line for line in script.splitlines() if re.search(r"\benvbuild \w|options\+?=", line)]
    written = set(re.findall(r"(?<!\S)\(?(--[a-z-]+)", "\n".join(lines).replace("(--", " --")))
    assert written and written <= set().union(*(options_of(name) for name in used))


@pytest.mark.parametrize("job", json.loads((GOLDEN / "json.json").read_text()), ids=lambda job: str(job["id"]))
def test_every_command_of_the_matrix_can_be_parsed(job: dict[str, Any]) -> None:
    import click

    from envbuild.cli.commands import cli

    program, name, *arguments = shlex.split(job["command"])
    command = cli.get_command(click.Context(cli), name)
    assert program == "envbuild" and command is not None
    parsed = command.make_context(name, arguments)
    assert parsed.params["recipe"] == job["recipe"] and parsed.params["locked"]
