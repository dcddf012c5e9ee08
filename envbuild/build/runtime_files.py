"""Files by which enroot and Apptainer start the program of an image, as its configuration defines it.

Sources: OCI image specification 1.1, config.md; enroot 4.1 (src/docker.sh, src/runtime.sh, bin/enroot-switchroot.c) and
pyxis 0.21; Apptainer 1.4.5 (internal/pkg/build/sources, internal/pkg/build/metadata.go, pkg/inspect), all read and not
copied. `enroot import` writes the same four files; differences from them are documented below. SingularityCE reads the
same files as Apptainer. Files that are the same in all images are in data/apptainer.toml.
"""

from __future__ import annotations

import dataclasses
import json
import posixpath
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from envbuild.base.errors import BuildError
from envbuild.base.masking import redact
from envbuild.contract.image_manifest import converted_mode
from envbuild.data import load_table
from envbuild.image.entry import DIR, FILE, SYMLINK, Entry
from envbuild.image.model import canonical

# An addition to an image: an entry, and the content of a file. A file replaces an existing one; a folder or a
# symbolic link is added only if nothing has its path.
Addition = tuple[Entry, bytes | None]
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class ProgramConfig:
    """The start of an image's program; `env` has each variable once, `workdir` and `volumes` are absolute."""

    entrypoint: tuple[str, ...]
    cmd: tuple[str, ...]
    env: Mapping[str, str]
    workdir: str
    volumes: tuple[str, ...]
    labels: Mapping[str, str]

    @property
    def default(self) -> tuple[str, ...]:
        """The default command: the image's, or a shell (as in enroot) if the image has none."""
        return self.cmd if self.cmd or self.entrypoint else ("/bin/sh",)


def run_of(config: Mapping[str, Any]) -> ProgramConfig:
    """Return how an image's configuration starts its program. Raises BuildError for an invalid configuration."""
    inner = config.get("config") or {}
    if not isinstance(inner, dict):
        raise _wrong("config")
    pairs = [pair.partition("=") for pair in _words(inner, "Env")]
    return ProgramConfig(
        entrypoint=_words(inner, "Entrypoint"),
        cmd=_words(inner, "Cmd"),
        env={name: value for name, equals, value in pairs if equals},
        workdir=_absolute(_text(inner.get("WorkingDir") or "", "WorkingDir")),
        volumes=tuple(sorted({_absolute(path) for path in _table(inner, "Volumes")} - {"/"})),
        labels={k: _text(v, "Labels") for k, v in sorted(_table(inner, "Labels").items())},
    )


def quoted(text: str) -> str:
    """Return `text` as one word of a POSIX shell's command, whatever it contains.

    The shorter `'\\''` is not used, because the shell inside Apptainer 1.4 keeps its backslash.
    """
    return "'" + text.replace("'", "'\"'\"'") + "'"


def file(path: str, text: str, mtime: int, mode: int = 0o644) -> Addition:
    """Return a file with the content `text`; characters without UTF-8, which JSON allows, become question marks."""
    data = text.encode("utf-8", "replace")
    return Entry(path, FILE, mode, len(data), mtime=mtime), data


def folder(path: str, mtime: int, mode: int = 0o755) -> Addition:
    """Return a folder, which is added only if nothing has its path."""
    return Entry(path, DIR, mode, mtime=mtime), None


def link(path: str, target: str, mtime: int) -> Addition:
    """Return a symbolic link, which is added only if nothing has its path."""
    return Entry(path, SYMLINK, 0o777, target=target, mtime=mtime), None


def _words(data: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = data.get(key) or []
    if isinstance(value, str):  # in docker's older images
        value = [value]
    if not isinstance(value, list):
        raise _wrong(key)
    return tuple(_text(word, key) for word in value)


def _table(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = data.get(key) or {}
    if not isinstance(value, dict) or any("\0" in name for name in value):
        raise _wrong(key)
    return value


def _text(value: object, key: str) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise _wrong(key)
    return value


def _absolute(path: str) -> str:
    # normpath keeps two leading slashes, to which POSIX allows another meaning.
    return "/" + posixpath.normpath("/" + path).lstrip("/")


def _wrong(key: str) -> BuildError:
    return BuildError(
        f"the image's configuration is invalid: {key} does not have the form that the OCI specification requires",
        "build or pull the image again, by a tool that writes OCI or docker images",
    )


# In etc/environment, enroot replaces this by a variable of the user who starts the container; it has no escape.
_REFERENCE = re.compile(r"\$\{[A-Za-z_][A-Za-z0-9_]*\}")
# A quoted value loses its quotes, in two rounds; enroot takes a backslash for a quote.
_QUOTED = re.compile(r"[\"'\\].*[\"'\\]\s*", re.DOTALL)
_RC_LOCAL = """\
# /etc/rc reads this file before it starts the program of the image. What is mounted here may
# start another one: "$@" are the arguments of the container.
"""


def normalised(entry: Entry) -> Entry | None:
    """Return `entry` as `enroot import` puts it into an image, None if `enroot import` leaves it out.

    Everything belongs to 0:0, because images are unpacked and mounted by users who own nothing else. Extended
    attributes outside user.* (capabilities, SELinux, ACLs) are dropped, because they cannot be set without root. The
    caller must leave out hard links to files that are left out.
    """
    mode = converted_mode(entry.path, entry.kind, entry.mode)
    if mode is None:
        return None
    kept = entry.xattrs and tuple(item for item in entry.xattrs if item[0].startswith("user."))
    if (mode, 0, 0, kept) == (entry.mode, entry.uid, entry.gid, entry.xattrs):
        return entry
    return dataclasses.replace(entry, mode=mode, uid=0, gid=0, xattrs=kept)


def enroot_files(config: Mapping[str, Any], provenance: str, mtime: int) -> list[Addition]:
    """Return the files that start the program of an image, from the image's configuration (OCI, config.md).

    `provenance` is the origin of the image; a password in it is left out. A file replaces an existing one; a
    folder is added only if nothing has its path. Raises BuildError for an invalid configuration.
    """
    run = run_of(config)
    parts = run.workdir.strip("/").split("/") if run.workdir != "/" else []
    folders = ["/".join(parts[: depth + 1]) for depth in range(len(parts))]
    unchanged = [f"{name}={value}\n" for name, value in run.env.items() if _known(name) and _left_alone(value)]
    return [
        folder("etc", mtime),
        file("etc/environment", "".join(unchanged), mtime),
        file("etc/fstab", _fstab(run), mtime),
        file("etc/rc", _rc(run, redact(provenance)), mtime),
        file("etc/rc.local", _RC_LOCAL, mtime),
        *(folder(path, mtime) for path in folders if path != "etc"),
    ]


def _known(name: str) -> bool:
    """Return whether a variable reaches the program: enroot drops its own ENROOT_*, and names that no shell allows."""
    return NAME.fullmatch(name) is not None and not name.startswith("ENROOT_")


def _left_alone(value: str) -> bool:
    """Return whether enroot takes `value` in etc/environment unchanged; etc/rc sets all other values."""
    return "\n" not in value and not _REFERENCE.search(value) and not _QUOTED.fullmatch(value)


def _fstab(run: ProgramConfig) -> str:
    """Return a line that binds each volume onto itself, so that it is writable where the rest is not."""

    def word(path: str) -> str:
        # getmntent(3) decodes these; a `$` must not start a variable of enroot's, and a `#` no comment.
        return re.sub(r"[\s\\$#]", lambda match: f"\\{ord(match.group()):03o}", path, flags=re.ASCII)

    options = "x-create=dir,bind,rw,nosuid,nodev"
    return "".join(f"${{ENROOT_ROOTFS}}{path} {path} none {options}\n" for path in map(word, run.volumes))


def _rc(run: ProgramConfig, provenance: str) -> str:
    """Return the script that starts the program. Unlike enroot's, it is POSIX sh, and newlines in values are kept."""
    comments = [f"enroot-provenance: {provenance}"]
    comments += [f"{name} {value}" for name, value in run.labels.items()]
    lines = ["# " + " ".join(re.split(r"[\r\n]", comment)) for comment in comments] + [""]
    path = run.env.get("PATH")
    if path:
        lines += [
            "# enroot starts a login shell, whose /etc/profile has put its own PATH over the image's.",
            f"export PATH={quoted(path)}",
        ]
    for name, value in run.env.items():
        if _known(name) and name != "PATH" and not _left_alone(value):
            # A value that is already set comes from the user who starts the container, and wins.
            lines.append(f'[ -n "${{{name}+set}}" ] || export {name}={quoted(value)}')
    entrypoint = "".join(f"{quoted(word)} " for word in run.entrypoint)
    default = " ".join(quoted(word) for word in run.default)
    lines += [
        f"mkdir -p {quoted(run.workdir)} 2> /dev/null",
        f"cd {quoted(run.workdir)} && unset OLDPWD || exit 1",
        "",
        "if [ -s /etc/rc.local ]; then",
        "    . /etc/rc.local",
        "fi",
        "",
        "if [ $# -gt 0 ]; then",
        f'    exec {entrypoint}"$@"',
        "else",
        f"    exec {entrypoint}{default}".rstrip(),
        "fi",
    ]
    return "\n".join(lines) + "\n"


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
    """Return a definition file for an image from `source` without passwords; a comment if no agent can read it."""
    shown = redact(source)
    if shown.startswith("docker://") and "\n" not in shown:
        return f"Bootstrap: docker\nFrom: {shown.removeprefix('docker://')}\n"
    return "".join(f"# {line}\n" for line in shown.splitlines())


def recipe_definition(recipe: str, target: str, plan_digest: str) -> str:
    """Return the substitute for a definition file in the image of a recipe, which Apptainer did not build."""
    return (
        "# This image was made without a definition file, by\n"
        f"#     envbuild apptainer {recipe} --target {target}\n"
        f"# from a plan with the digest {plan_digest}\n"
    )


def all_labels(config: Mapping[str, Any], definition: str) -> dict[str, str]:
    """Return the labels of an image as `apptainer inspect` prints them, sorted: its own, and Apptainer's."""
    labels = {**run_of(config).labels, "org.label-schema.schema-version": "1.0"}
    architecture = config.get("architecture")
    if isinstance(architecture, str) and architecture:
        labels["org.label-schema.build-arch"] = architecture
    for line in definition.splitlines():
        name, colon, value = line.partition(": ")
        if colon and name in ("Bootstrap", "From"):
            labels[f"org.label-schema.usage.singularity.deffile.{name.lower()}"] = value
    return dict(sorted(labels.items()))


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
