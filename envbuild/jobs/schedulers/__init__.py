"""The schedulers, one module each. A new one needs its module, a line here and a row of data/schedulers.toml."""

from __future__ import annotations

from collections.abc import Mapping

from envbuild.jobcheck.lint.directives import ScriptFacts
from envbuild.jobs.model import JobPlan
from envbuild.jobs.schedulers.base import Scheduler
from envbuild.jobs.schedulers.flux import FLUX
from envbuild.jobs.schedulers.kubernetes import KUBERNETES
from envbuild.jobs.schedulers.lsf import LSF
from envbuild.jobs.schedulers.pbs import PBS
from envbuild.jobs.schedulers.slurm import SLURM

SCHEDULERS: Mapping[str, Scheduler] = {"slurm": SLURM, "pbs": PBS, "lsf": LSF, "flux": FLUX, "kubernetes": KUBERNETES}

# Facts about their scripts, for `envbuild lint-job`.
SCRIPT_FACTS: Mapping[str, ScriptFacts] = {name: known.script for name, known in SCHEDULERS.items() if known.script}


def render(plan: JobPlan) -> str:
    """Return the script or manifest of `plan`. Raises UsageError for values that its scheduler cannot express."""
    return SCHEDULERS[plan.scheduler].render(plan)
