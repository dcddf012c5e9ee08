"""The lint as `envbuild lint-job` calls it: with the facts about the scripts of all schedulers."""

from __future__ import annotations

from functools import partial

from envbuild.jobcheck.lint import engine, script
from envbuild.jobs.schedulers import SCRIPT_FACTS

lint = partial(engine.lint, schedulers=SCRIPT_FACTS)
lint_file = partial(engine.lint_file, schedulers=SCRIPT_FACTS)
read_script = partial(script.read_script, schedulers=SCRIPT_FACTS)
