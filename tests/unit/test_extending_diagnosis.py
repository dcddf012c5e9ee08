"""A new diagnosis or lint rule is one row of data/, and commands that diagnose nothing do not read the table."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from lab.lint import lint

from envbuild.cli.diagnose import diagnose_command
from envbuild.jobcheck.diagnose.engine import explain
from envbuild.jobcheck.diagnose.rules import load_rules
from envbuild.jobcheck.lint.faults import load_faults

ROW = """
[[rules]]
id = "flux-capacitor"
rank = 200
all = ['flux capacitor (?P<number>\\d+)']
every = "number"
cause = "the flux capacitor {number} {is} empty"
hint = "replace it"
source = "this test"
date = 2026-11-22
where = {job = {}, verification = {}, source-build = {hint = "load its module"}}
"""
FAULTS = """
[capacitor]
level = "error"
what = "{value} drains the capacitor"
instead = "nothing"
directive = '--flux'
command = '^flux-drain\\b'
variables = {FLUX = "1|ON"}
"""
LINE = "x: flux capacitor 3 is empty"


@pytest.fixture
def row(more_rows: Callable[[str, str], None]) -> Iterator[None]:
    """The table with one row more."""
    more_rows("diagnoses", ROW)
    load_rules.cache_clear()
    yield
    load_rules.cache_clear()


@pytest.mark.usefixtures("row")
def test_a_rule_is_one_row_for_jobs_verification_and_source_builds(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text(f"begin\n{LINE}\nCUDA error: out of memory\n")
    done = CliRunner().invoke(diagnose_command, [str(log), "--json"])
    first = json.loads(done.stdout)["findings"][0]
    assert (first["id"], first["remedy"]) == ("flux-capacitor", "replace it")
    assert first["evidence"][0]["line"] == 2
    assert explain(LINE, "verification") == "the flux capacitor 3 is empty: replace it"
    assert explain(LINE, "source-build") == "the flux capacitor 3 is empty: load its module"


@pytest.mark.usefixtures("row")
def test_every_value_is_named_also_where_counts_begin_anew() -> None:
    again = "*** JOB 1 ON n1 CANCELLED AT 2026 DUE TO JOB REQUEUE ***"
    both = f"{LINE}\n{LINE.replace('3', '5')}"
    assert explain(both, "verification") == "the flux capacitor 3, 5 are empty: replace it"
    assert explain(f"{both}\n{again}", "verification") == "the flux capacitor 3 is empty: replace it"


def test_without_the_row_nothing_is_found() -> None:
    assert explain(LINE, "verification") == explain(LINE, "source-build") == ""


def test_a_lint_rule_with_a_pattern_is_one_row(more_rows: Callable[[str, str], None]) -> None:
    more_rows("job_faults", FAULTS)
    load_faults.cache_clear()
    script = "#!/bin/bash\n#SBATCH --flux\nset -e\n/opt/bin/flux-drain --now\nexport FLUX=on\n"
    try:
        found = [(one.line, one.message) for one in lint(script, "x.sh") if one.fault.id == "capacitor"]
    finally:
        load_faults.cache_clear()
    said = ["--flux", "flux-drain --now", "FLUX=on"]
    assert found == [(n, f"{text} drains the capacitor") for n, text in zip((2, 4, 5), said, strict=True)]


def test_the_table_is_read_by_a_diagnosis_alone() -> None:
    script = (
        "import sys, envbuild.cli.commands; assert not any('envbuild.jobcheck' in name for name in sys.modules);"
        "import envbuild.verify.training_checks, envbuild.layers.source_build;"
        "from envbuild.jobcheck.diagnose.rules import load_rules;"
        "from envbuild.jobcheck.diagnose.engine import explain;"
        "assert load_rules.cache_info().misses == 0; explain('x', 'verification');"
        "assert load_rules.cache_info().misses == 1"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
