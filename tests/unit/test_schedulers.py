"""The table of schedulers: it agrees with the names that sites and options accept, and each has what others need."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from unit.job_plans import PLAN

from envbuild.cli.job import job_command
from envbuild.jobs.schedulers import SCHEDULERS
from envbuild.site.schedulers import LAUNCHER_NAMES, LAUNCHERS, SCHEDULER_NAMES, TITLES

TOP = Path(__file__).parents[2]


def test_the_table_has_the_schedulers_and_launchers_of_the_data() -> None:
    assert tuple(SCHEDULERS) == SCHEDULER_NAMES == tuple(TITLES)
    assert {name: tuple(one.launchers) for name, one in SCHEDULERS.items()} == LAUNCHERS
    (schedulers,) = (one.type for one in job_command.params if one.name == "scheduler")
    (launchers,) = (one.type for one in job_command.params if one.name == "launcher")
    assert tuple(schedulers.choices) == SCHEDULER_NAMES  # type: ignore[attr-defined]
    assert tuple(launchers.choices) == LAUNCHER_NAMES  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", [name for name, one in SCHEDULERS.items() if not one.pods])
def test_what_lint_job_knows_of_a_scheduler_is_true_of_its_own_scripts(name: str) -> None:
    chosen = SCHEDULERS[name]
    plan = replace(PLAN, scheduler=name, launcher=LAUNCHERS[name][0], nodes=3)
    assert chosen.directives is not None and chosen.script is not None and chosen.host is not None
    lines = [line for line in chosen.directives(plan) if line.startswith(chosen.script.marker)]
    words = [(at, tuple(line.split()[1:])) for at, line in enumerate(lines, start=1)]
    unquoted = [(at, tuple(word.strip('"') for word in row)) for at, row in words]
    found = chosen.script.nodes(unquoted)
    assert found is not None and found[1] == 3
    options = [" ".join(row) for _, row in words if row[0] not in ("-j", "-r", "-R")]
    own = [one for one in options if chosen.own_option(one)]
    assert len(own) > len(options) // 2


def test_only_the_table_names_schedulers() -> None:
    """Whoever adds one finds no other list to add it to."""
    names = "|".join(f'"{name}"' for name in SCHEDULERS)
    done = subprocess.run(
        ["git", "grep", "-nE", f"(==|!=|in \\() ?({names})", "--", "envbuild"],
        cwd=TOP, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout == ""
