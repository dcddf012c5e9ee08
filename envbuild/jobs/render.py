"""JobPlan → text."""

from __future__ import annotations

from envbuild.jobs.model import JobPlan
from envbuild.jobs.schedulers import SCHEDULERS


def render(plan: JobPlan) -> str:
    """Return the script or manifest of `plan`. Raises UsageError for values that its scheduler cannot express."""
    return SCHEDULERS[plan.scheduler].render(plan)


def explained(plan: JobPlan) -> list[tuple[str, str, str]]:
    """Return (name, value, who set it) for every value of the job with a known origin."""
    rows = []
    variables = dict(plan.variables)
    for key, origin in plan.origins.items():
        head, _, rest = key.partition(".")
        if head == "variables":
            rows.append((rest, variables.get(rest, "counted on the node"), origin))
        elif head == "artifact":
            rows.append((key, f"{plan.artifact.path} ({plan.artifact.target})", origin))
        elif head == "command":
            rows.append((key, " ".join(plan.command), origin))
        else:
            rows.append((key, str(getattr(plan, head)), origin))
    return rows
