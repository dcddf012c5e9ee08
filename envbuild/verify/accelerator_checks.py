"""The check that an artifact's torch is built for its target. It reads files only and needs no GPU."""

from __future__ import annotations

from envbuild.artifacts.survey import Survey
from envbuild.recipe.accelerators import accelerator_fault, builds_title, survey_builds
from envbuild.verify.model import Check, judge
from envbuild.verify.subject import Subject


def check_accelerator(subject: Subject, survey: Survey) -> Check:
    """Check that the artifact's own torch is built for the target; a base image's torch is not judged."""
    target, found = subject.target, survey.elf.torch
    builds: dict[str, str] = {}
    fault = None
    if found is not None:
        builds = survey_builds(found)
        exact = "conda" not in (subject.state.artifact, subject.state.environment)
        fault = accelerator_fault(target.name, builds, found, exact=exact)
    wanted = " ".join(filter(None, (target.family.title, target.version)))
    return judge(
        "accelerator",
        "torch's build is the target's",
        fault is None,
        seen=f"torch {fault}" if fault else
        f"torch is built for {builds_title(builds) or 'CPUs'}" if found is not None else "no torch of its own",
        expected=f"torch built for {wanted}",
        cause="the lock names another build of torch (PyPI has CUDA builds for x86_64, CPU builds for aarch64 before "
        "2.11), or torch was reinstalled; pin the build in the target and name its index there",
        evidence={
            "cuda": None, **builds, "libraries": [name for name in found or [] if "=" not in name]
        },
    )  # fmt: skip
