"""The `[conda]` table: contents of a conda environment, or of an image with one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from envbuild.recipe.checks import index_problem, requirement_problem
from envbuild.toml import Document, Problem, key

# conda's default `channel_alias`: the server of channels that are given by name. Sites mirror it in site.toml.
CHANNEL_ALIAS = "https://conda.anaconda.org"
_NAMED_CHANNEL = re.compile(r"[a-z0-9][a-z0-9_.-]*(/[a-z0-9][a-z0-9_.-]*)*(/label/[A-Za-z0-9_.-]+)?")
_SPEC = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(?P<rest>.*)", re.S)


def channel_problem(text: str) -> str | None:
    """Return why `text` is not a channel (a name on conda's own server, or a URL), or None. Never repeats a URL."""
    if "://" in text or "@" in text:
        if re.search(r"/t/[^/]+/", text):
            return "holds a token; a recipe is shared: credentials belong to the site"
        return index_problem(text)
    if not _NAMED_CHANNEL.fullmatch(text):
        return f"{text!r} is not a channel: a name such as conda-forge, or a URL"
    return None


def spec_problem(text: str) -> str | None:
    """Return why `text` does not have the form of a conda match spec, or None; the solver's parser checks the rest."""
    if "://" in text or "::" in text or "@" in text:
        return "names a channel or an address: channels stand in `channels`, in their order"
    found = _SPEC.fullmatch(text)
    if found is None or not text.isprintable() or text != text.strip():
        return f"{text!r} is not a match spec, such as 'numpy 2.2.*' or 'pytorch >=2.7 cpu*'"
    if re.match(r"\s*[;#]", found["rest"]):
        return f"{text!r}: match specs have no markers or comments; use [targets.NAME] conda = [...]"
    return None


@dataclass(frozen=True)
class CondaTable:
    """`[conda]`: channels and packages of `envbuild conda`."""

    channels: tuple[str, ...] = key(
        ("conda-forge",), "Channels, the one to be preferred first: names, or URLs without credentials.",
        check=channel_problem, min_items=1, example=["conda-forge"],
    )  # fmt: skip
    dependencies: tuple[str, ...] = key(
        (), "Packages of every target, as conda match specs. Python comes from `python`.",
        check=spec_problem, example=["numpy 2.2.*"],
    )  # fmt: skip
    requirements: tuple[str, ...] = key(
        (), "pip requirements for what no channel has; resolved against the conda packages.",
        check=requirement_problem, example=["einops==0.8.1"],
    )  # fmt: skip


def channel_url(channel: str) -> str:
    """Return a channel's canonical URL, whichever mirror serves its packages."""
    return channel.rstrip("/") if "://" in channel else f"{CHANNEL_ALIAS}/{channel}"


def conda_mistakes(document: Document) -> Iterator[Problem]:
    """Yield conda settings that are missing or that have no effect without others."""
    conda = document.data.get("conda")
    has = isinstance(conda, dict) and bool(conda.get("dependencies"))
    if document.data.get("environment") == "conda":
        if not has:
            yield (("environment",), "'conda' needs a [conda] table with `dependencies`")
        image = document.data.get("image")
        if isinstance(image, dict) and image.get("python"):
            yield (("image", "python"), "'python' in [image]: with environment = \"conda\" the interpreter is conda's")
    if isinstance(conda, dict) and not has:
        yield ("conda",), "'dependencies' in [conda] is missing"
    targets = document.data.get("targets")
    for name, table in targets.items() if isinstance(targets, dict) else ():
        if isinstance(table, dict) and table.get("conda") and not isinstance(conda, dict):
            yield ("targets", name, "conda"), "'conda' of a target needs a [conda] table"
