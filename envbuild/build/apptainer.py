"""Apptainer's files in an image, and the metadata that a SIF carries beside its file system.

Sources: Apptainer 1.4.5 (internal/pkg/build/sources, internal/pkg/build/metadata.go, pkg/inspect), read and not copied.
SingularityCE reads the same files. Those that are the same in all images are in data/apptainer.toml.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from envbuild.base.masking import redact
from envbuild.build.image_run import NAME, Addition, ProgramConfig, file, folder, link, quoted, run_of
from envbuild.data import load_table
from envbuild.image.model import canonical

_HOME = ".singularity.d"
_DOCKER_ENV, _OWN_ENV = "env/10-docker2singularity.sh", "env/90-environment.sh"


def _scripts(run: ProgramConfig) -> dict[str, str]:
    return {**load_table("apptainer")["scripts"], _DOCKER_ENV: _environment(run), "runscript": _runscript(run)}


def apptainer_files(config: Mapping[str, Any], definition: str, mtime: int) -> list[Addition]:
    """Return the /.singularity.d of an image, from its OCI configuration, and the links to it in the root.

    `definition` is the text of a definition file. A file replaces an existing one, which would belong to another image;
    a folder or link is added only if nothing has its path. Raises BuildError for an invalid configuration.
    """
    added = [folder(path, mtime) for path in (_HOME, *(f"{_HOME}/{name}" for name in ("actions", "env", "libs")))]
    added += [file(f"{_HOME}/{path}", text, mtime, 0o755) for path, text in _scripts(run_of(config)).items()]
    labels = json.dumps(all_labels(config, definition), indent="\t", ensure_ascii=False)
    added += [file(f"{_HOME}/labels.json", labels + "\n", mtime), file(f"{_HOME}/Singularity", definition, mtime)]
    return added + [link(path, f"{_HOME}/{target}", mtime) for path, target in load_table("apptainer")["links"].items()]


def mount_points(has: Callable[[str], bool], mtime: int) -> list[Addition]:
    """Return the files and folders on which runtimes mount, or which they fill in.

    Runtimes cannot create them in a read-only image. `has` says whether the image, with everything else that is added,
    has a path.
    """
    points = load_table("apptainer")["mount-points"]
    added = [folder(path, mtime, mode) for path, mode in points["folders"].items()]
    added += [file(path, text, mtime) for path, text in points["files"].items()]
    return [item for item in added if not has(item[0].path)]


def definition(source: str) -> str:
    """Return a definition file for an image from `source`, a comment if none can name it. Passwords are left out."""
    shown = redact(source)
    if shown.startswith("docker://") and "\n" not in shown:
        return f"Bootstrap: docker\nFrom: {shown.removeprefix('docker://')}\n"
    return "".join(f"# {line}\n" for line in shown.splitlines())


def recipe_definition(recipe: str, target: str, plan_digest: str) -> str:
    """Return the text in place of a definition file for the image of a recipe, which Apptainer did not build."""
    return (
        "# This image was made without a definition file, by\n"
        f"#     envbuild apptainer {recipe} --target {target}\n"
        f"# from a plan with the digest {plan_digest}\n"
    )


def all_labels(config: Mapping[str, Any], definition: str) -> dict[str, str]:
    """Return the labels of an image as `apptainer inspect` prints them, sorted: its own, and Apptainer's."""
    found = {**run_of(config).labels, "org.label-schema.schema-version": "1.0"}
    architecture = config.get("architecture")
    if isinstance(architecture, str) and architecture:
        found["org.label-schema.build-arch"] = architecture
    for line in definition.splitlines():
        name, colon, value = line.partition(": ")
        if colon and name in ("Bootstrap", "From"):
            found[f"org.label-schema.usage.singularity.deffile.{name.lower()}"] = value
    return dict(sorted(found.items()))


def inspect_metadata(config: Mapping[str, Any], definition: str) -> bytes:
    """Return inspect-metadata.json of a SIF, which `apptainer inspect` reads, as Apptainer's pkg/inspect writes it."""
    texts = {path: text.rstrip("\n") for path, text in _scripts(run_of(config)).items()}
    attributes = {
        "environment": {f"/{_HOME}/{path}": texts[path] for path in (_DOCKER_ENV, _OWN_ENV)},
        "labels": all_labels(config, definition),
        "runscript": texts["runscript"],
        "startscript": texts["startscript"],
        "deffile": definition.rstrip("\n"),
    }
    return canonical({"data": {"attributes": attributes}, "type": "container"})


def oci_config(config: Mapping[str, Any]) -> bytes:
    """Return oci-config.json of a SIF: how to run the image (OCI, config.md)."""
    return canonical(config.get("config") or {})


def _environment(run: ProgramConfig) -> str:
    """Return the script with the image's variables, which Apptainer reads before it starts anything.

    A variable that is already set keeps its value, except PATH, which the host always sets. Runtimes before
    Apptainer 1.0 set the variables of --env before this script runs, Apptainer itself after it.
    """
    lines = ["#!/bin/sh"]
    for name, value in run.env.items():
        if name == "PATH":
            lines.append(f"export PATH={quoted(value)}")
        elif NAME.fullmatch(name):
            lines.append(f'[ -n "${{{name}:-}}" ] || {name}={quoted(value)}')
            lines.append(f"export {name}")
    return "\n".join(lines) + "\n"


def _runscript(run: ProgramConfig) -> str:
    """Return the script of `apptainer run`: the image's entrypoint with the given arguments, or with its own.

    Arguments are taken literally. Apptainer's own script lets a shell evaluate them again unless --no-eval is
    given, so that a `$` in an argument has another result than under docker.
    """
    lines = ["#!/bin/sh"]
    lines += ["if [ $# -eq 0 ]; then", f"    set -- {_line(run.default)}", "fi"] if run.default else []
    lines += [f'exec {_line(run.entrypoint)} "$@"' if run.entrypoint else 'exec "$@"']
    return "\n".join(lines) + "\n"


def _line(words: tuple[str, ...]) -> str:
    return " ".join(quoted(word) for word in words)
