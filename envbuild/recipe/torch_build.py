"""Accelerator that a torch build is for, read from torch's files without importing it.

This module is part of the survey that runs inside artifacts: it needs nothing but Python 3.9.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from envbuild.recipe.accelerators import accelerator_of, gpu_families

VERSION_FILE = "torch/version.py"
# torch/version.py has a few lines; a larger file is a different file.
MAX_VERSION_FILE = 64 << 10
# `cuda: Optional[str] = '12.6'` in one release, `cuda = '12.6'` in others; `hip = '6.4.43482-0f2d60242'`.
_FIELD = r"^{}\b[^=\n]*=\s*['\"]([0-9.]+)[^'\"\n]*['\"]"


def torch_libraries() -> set[str]:
    """Return the names of torch's accelerator libraries: conda installs them in lib, wheels in torch/lib."""
    return {one.torch_library for one in gpu_families()}


def torch_builds(text: str) -> dict[str, str]:
    """Return the accelerators that torch was built for, {"cuda": "12.6"}, from the text of torch/version.py."""
    names = [one.torch_field for one in gpu_families()]
    found = {name: re.search(_FIELD.format(name), text, re.MULTILINE) for name in names}
    return {name: match[1] for name, match in found.items() if match}


def survey_builds(survey: Collection[str]) -> dict[str, str]:
    """Return the accelerators that torch was built for from the entries of a survey, such as `cuda=12.6`."""
    pairs = (one.partition("=") for one in survey)
    return {name: version for name, equals, version in pairs if equals}


def accelerator_fault(target: str, builds: Mapping[str, str], libraries: Collection[str], *, exact: bool) -> str | None:
    """Return why a torch that was built for `builds`, with accelerator `libraries`, does not suit `target`, or None.

    Without `exact` only the major version counts: conda builds of one major version are interchangeable.
    """
    tag = target.partition("-")[0]
    wanted = accelerator_of(tag)
    if wanted is None or not wanted.gpu:
        if not builds and not torch_libraries() & set(libraries):
            return None
        return f"is built for {builds_title(builds) or 'GPUs'}, and {target} is for CPUs"
    title, version = wanted.title, wanted.version(tag) or ""
    found = builds.get(wanted.torch_field)
    if found is None or wanted.torch_library not in libraries:
        return f"has no {title} in it, and {target} needs {title} {version}"
    parts = 2 if exact else 1  # a HIP version has more components than its target
    if found.split(".")[:parts] == version.split(".")[:parts]:
        return None
    return f"is built for {title} {found}, and {target} is for {title} {version}"


def builds_title(builds: Mapping[str, str]) -> str:
    """Return `CUDA 12.6` for {"cuda": "12.6"}; "" for a build for CPUs."""
    families = [one for one in gpu_families() if one.torch_field in builds]
    return " and ".join(f"{one.title} {builds[one.torch_field]}" for one in families)
