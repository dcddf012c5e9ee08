"""Dependencies in the form of poetry, which pixi and conda-lock share: a name, and a version or a table.

Source: python-poetry.org, "Dependency specification".
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from envbuild.base.toml import list_at
from envbuild.imports.statement import SOURCE, TOOL, Statement, for_linux, git_address, lost
from envbuild.recipe.accelerators import accelerator_of

_GIT = {"git", "rev", "tag", "branch", "subdirectory"}
_CARRIED = _GIT | {"index", "version", "extras", "markers", "python", "platform", "optional"}


def poetry_requirement(name: str, about: dict[str, Any], place: str, group: str) -> Iterator[Statement]:
    """Yield a dependency in the form of poetry or pixi as a PEP 508 requirement."""
    version = poetry_specifier(str(about.get("version", "*")))
    if address := git_address(about):
        version = f" @ {address}"
    if {"path", "url", "file"} & about.keys():
        yield lost(f"{name} = {about}", place, SOURCE, group)
    elif version is None:
        yield lost(f"{name} {about['version']}", place, "alternatives of versions, which PEP 440 does not know", group)
    else:
        extras = ",".join(str(one) for one in list_at(about, "extras"))
        python = (poetry_specifier(str(about.get("python", ""))) or "").split(",")
        systems = str(about.get("platform", "")).split(",")
        markers = [str(about["markers"])] if "markers" in about else []
        for variable, parts in (("python_version", python), ("sys_platform", systems)):
            pairs = [re.findall(r"^([<>=!~]*)(.*)", part.strip(), re.S)[0] for part in parts if part.strip()]
            operators = {"": "==", "!": "!="}  # poetry writes "!darwin"
            markers += [f'{variable} {operators.get(sign, sign)} "{value.strip()}"' for sign, value in pairs]
        marker = " and ".join(f"({one})" if " or " in one else one for one in markers)
        text = f"{name}{f'[{extras}]' if extras else ''}{version}{f' ; {marker}' if marker else ''}"
        yield Statement("requirement", text, place, group)
        tag = re.search(r"\+([a-z]+[0-9.]*)$", str(about.get("version", "")).strip())
        if tag and accelerator_of(tag[1]) and for_linux(marker):
            yield Statement("accelerator", tag[1], place, group)
        if "://" in str(about.get("index", "")):  # pixi
            yield Statement("index", str(about["index"]), place, group)
        for key in sorted(about.keys() - _CARRIED):
            yield lost(f"{name}: {key} = {about[key]}", place, TOOL)


def poetry_specifier(text: str) -> str | None:
    """Return poetry's constraint as a PEP 440 specifier, with ^ and ~ translated; None when it has no such form."""
    joined = re.sub(r"([<>=!~^])\s+", r"\1", text.strip())
    parts = [part.strip() for part in re.split(r"[,\s]+(?=[<>=!~^*\d])", joined)]
    return None if "|" in text else ",".join(filter(None, (_translated(part) for part in parts)))


def _translated(part: str) -> str:
    operator, version = re.fullmatch(r"(\^|~(?!=)|[<>=!~]*)\s*(.*)", part, re.S).groups()  # type: ignore[union-attr]
    numbers = re.match(r"v?(\d{1,9}!)?(\d{1,9}(?:\.\d{1,9})*)", version)
    if version in ("", "*"):
        return ""
    if operator not in ("^", "~") or not numbers:
        return f"{operator or '=='}{version}".replace("====", "===")
    version = version.partition("+")[0]  # PEP 440 has no local versions in ranges
    found = [int(one) for one in numbers[2].split(".")]
    first = next((index for index, one in enumerate(found) if one), len(found) - 1)
    last = first if operator == "^" else min(1, len(found) - 1)
    return f">={version},<{numbers[1] or ''}{'.'.join(map(str, [*found[:last], found[last] + 1]))}"
