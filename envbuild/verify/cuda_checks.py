"""Whether the torch in an artifact is a build for its target, told from its files: no GPU is needed for it."""

from __future__ import annotations

from envbuild.artifacts.survey import Survey
from envbuild.torch_build import accelerator_fault
from envbuild.verify.model import Check, judge
from envbuild.verify.subject import Subject


def check_accelerator(subject: Subject, survey: Survey) -> Check:
    """The artifact's own torch is built for the target's CUDA, or for none; a base image's torch is not judged."""
    target, found = subject.target, survey.elf.torch
    cuda, fault = None, None
    if found is not None:
        cuda = next((item[5:] for item in found if item.startswith("cuda=")), None)
        exact = "conda" not in (subject.state.artifact, subject.state.environment)
        fault = accelerator_fault(target.name, target.cuda_version, cuda, found, exact=exact)
    built = f"CUDA {cuda}" if cuda else "CPUs"
    return judge(
        "accelerator",
        "torch's build is the target's",
        fault is None,
        seen=f"torch {fault}" if fault else
        f"torch is built for {built}" if found is not None else "no torch of its own",
        expected=f"torch built for {f'CUDA {target.cuda_version}' if target.is_cuda else 'CPUs'}",
        cause="the lock names another build of torch (PyPI has CUDA builds for x86_64, CPU builds for aarch64 before "
        "2.11), or torch was reinstalled; pin the build in the target and name its index there",
        evidence={"cuda": cuda, "libraries": [name for name in found or [] if "=" not in name]},
    )  # fmt: skip
