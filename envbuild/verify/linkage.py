"""Check of the libraries: what the dynamic loader would find for them, and whether torch's own pins are installed."""

from __future__ import annotations

import re
from collections.abc import Iterator

from envbuild.artifacts.survey import Survey
from envbuild.base.text import normalise
from envbuild.verify.model import Check, Subject, judge

_SHOWN, _KEPT = 5, 50


def check_linkage(subject: Subject, survey: Survey) -> Check:
    """Check symbols, versions, copies and stubs of libraries, and torch's pins of the libraries that it loads."""
    found = survey.linkage
    wrong = [*found.faults, *_broken_pins(subject, survey)]
    more = f"; {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
    base = ", ".join(f"{name} {version}" for name, version in found.base.items())
    return judge(
        "linkage",
        not wrong,
        seen="; ".join(wrong[:_SHOWN]) + more
        or f"{found.symbols} symbols of {found.libraries} libraries are defined; they need {base or 'no C library'}",
        expected="every symbol and version defined where the loader looks, one NCCL and cuDNN, no stub of the driver",
        evidence={"base": found.base, "absent": dict(list(found.absent.items())[:_KEPT]), "faults": wrong[:_KEPT]},
    )


def _broken_pins(subject: Subject, survey: Survey) -> Iterator[str]:
    """Yield the requirements of torch that other versions than the installed ones fulfil; a newer NCCL is accepted."""
    if not survey.requires:  # as of a machine's own torch, which is tried by a Python without packages
        return
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.version import InvalidVersion, Version

    target = subject.target
    system = {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": target.arch, "extra": ""}
    for text in survey.requires:
        try:
            wanted = Requirement(text)
            name, python = normalise(wanted.name), {"python_version": subject.state.python}
            now = survey.distributions.get(name)
            if now is None or not re.fullmatch(target.family.wheels, name):
                continue
            if wanted.marker is not None and not wanted.marker.evaluate(system | python):
                continue
            newer = name.startswith(target.family.nccl_wheel or "\0") and any(
                one.operator == "==" and Version(now.version) > Version(one.version) for one in wanted.specifier
            )
        except (InvalidRequirement, InvalidVersion):
            continue
        if not newer and not wanted.specifier.contains(now.version, prereleases=True):
            yield f"torch requires {name}{wanted.specifier}, installed is {now.version}"
