"""Apptainer's files in an image, and the metadata that a SIF carries beside its file system.

Sources: Apptainer 1.4.5 (internal/pkg/build/sources, internal/pkg/build/metadata.go, pkg/inspect,
internal/pkg/util/fs/files/action_script.sh), read and not copied. SingularityCE reads the same files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from envbuild.artifacts.image_run import NAME, Addition, ProgramConfig, file, folder, link, quoted, run_of
from envbuild.image.model import canonical
from envbuild.site.pip_config import redact

_HOME = ".singularity.d"
_DOCKER_ENV = f"{_HOME}/env/10-docker2singularity.sh"
_OWN_ENV = f"{_HOME}/env/90-environment.sh"

_SOURCE_ENV = f"""\
for script in /{_HOME}/env/*.sh; do
    if [ -f "$script" ]; then
        . "$script"
    fi
done
unset script
"""
# Apptainer since 1.0 has these built in; older runtimes, and `/.exec` called by hand, run the files.
_ACTIONS = {
    "exec": f'#!/bin/sh\n\n{_SOURCE_ENV}\nexec "$@"\n',
    "run": f'#!/bin/sh\n\n{_SOURCE_ENV}\nexec /{_HOME}/runscript "$@"\n',
    "shell": f"""\
#!/bin/sh

{_SOURCE_ENV}
if [ -n "${{SINGULARITY_SHELL:-}}" ] && [ -x "$SINGULARITY_SHELL" ]; then
    exec "$SINGULARITY_SHELL" "$@"
elif [ -x /bin/bash ]; then
    export SHELL=/bin/bash
    exec /bin/bash --norc "$@"
fi
export SHELL=/bin/sh
exec /bin/sh "$@"
""",
    # The first process of an instance waits for this signal before it detaches from the terminal.
    "start": f"""\
#!/bin/sh

kill -CONT 1
{_SOURCE_ENV}
if [ -x /{_HOME}/startscript ]; then
    exec /{_HOME}/startscript "$@"
fi
""",
    "test": f"""\
#!/bin/sh

{_SOURCE_ENV}
if [ -x /{_HOME}/test ]; then
    exec /{_HOME}/test "$@"
fi
echo "This image has no tests of its own."
""",
}
# Apptainer knows this file by its name, and sets the variables of --env and APPTAINERENV_* after it.
_BASE_ENV = """\
#!/bin/sh
# libs is where the host's libraries are mounted, the driver's with --nv.
LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}/.singularity.d/libs"
PS1="${PS1:-Apptainer> }"
export LD_LIBRARY_PATH PS1
"""
_RUNTIME_ENV = """\
#!/bin/sh
# What --env PREPEND_PATH, APPEND_PATH and PATH ask for.
if [ -n "${SING_USER_DEFINED_PREPEND_PATH:-}" ]; then
    PATH="$SING_USER_DEFINED_PREPEND_PATH:$PATH"
fi
if [ -n "${SING_USER_DEFINED_APPEND_PATH:-}" ]; then
    PATH="$PATH:$SING_USER_DEFINED_APPEND_PATH"
fi
if [ -n "${SING_USER_DEFINED_PATH:-}" ]; then
    PATH="$SING_USER_DEFINED_PATH"
fi
unset SING_USER_DEFINED_PREPEND_PATH SING_USER_DEFINED_APPEND_PATH SING_USER_DEFINED_PATH
export PATH
"""
_CUSTOM_ENV = "#!/bin/sh\n# What a definition file built on this image says in %environment comes here.\n"
_STARTSCRIPT = "#!/bin/sh\n# An instance of this image starts nothing; `instance run` starts its program.\n"
_LINKS = {
    "singularity": f"{_HOME}/runscript",
    ".run": f"{_HOME}/actions/run",
    ".exec": f"{_HOME}/actions/exec",
    ".test": f"{_HOME}/actions/test",
    ".shell": f"{_HOME}/actions/shell",
    "environment": _OWN_ENV,
}
_PASSWD = "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
_GROUP = "root:x:0:\nnogroup:x:65534:\n"
# path → mode, parents first: folders that Apptainer's build creates, and mount points of other runtimes
_FOLDERS = {
    "dev": 0o755, "etc": 0o755, "home": 0o755, "mnt": 0o755, "proc": 0o755, "root": 0o700,
    "run": 0o755, "sys": 0o755, "tmp": 0o1777, "var": 0o755, "var/tmp": 0o1777,
}  # fmt: skip
_FILES = {"etc/group": _GROUP, "etc/hosts": "", "etc/passwd": _PASSWD, "etc/resolv.conf": ""}


def apptainer_files(
    config: Mapping[str, Any], definition: str, labels: Mapping[str, str], mtime: int
) -> list[Addition]:
    """Return the /.singularity.d of an image, from its OCI configuration, and the links to it in the root.

    `definition` is the text of a definition file; `labels` override the image's own. A file replaces an
    existing one, which would belong to another image; a folder or link is added only if nothing has its path.
    Raises BuildError for an invalid configuration.
    """
    run = run_of(config)
    made = [folder(path, mtime) for path in (_HOME, *(f"{_HOME}/{n}" for n in ("actions", "env", "libs")))]  # fmt: skip
    texts = {
        **{f"{_HOME}/actions/{name}": text for name, text in _ACTIONS.items()},
        _DOCKER_ENV: _environment(run),
        _OWN_ENV: _CUSTOM_ENV,
        f"{_HOME}/env/99-base.sh": _BASE_ENV,
        f"{_HOME}/env/99-runtimevars.sh": _RUNTIME_ENV,
        f"{_HOME}/runscript": _runscript(run),
        f"{_HOME}/startscript": _STARTSCRIPT,
    }
    made += [file(path, text, mtime, 0o755) for path, text in texts.items()]
    table = json.dumps(all_labels(config, definition, labels), indent="\t", ensure_ascii=False)
    made += [file(f"{_HOME}/labels.json", table + "\n", mtime)]
    made += [file(f"{_HOME}/Singularity", definition, mtime)]
    return made + [link(path, target, mtime) for path, target in _LINKS.items()]


def mount_points(has: Callable[[str], bool], mtime: int) -> list[Addition]:
    """Return the files and folders on which runtimes mount, or which they fill in.

    Runtimes cannot create them in a read-only image. `has` says whether the image, with everything else that is
    added, has a path. Apptainer's build creates all of them but mnt, run, etc/passwd and etc/group;
    Charliecloud needs the last two.
    """
    made = [folder(path, mtime, mode) for path, mode in _FOLDERS.items()]
    made += [file(path, text, mtime) for path, text in _FILES.items()]
    return [item for item in made if not has(item[0].path)]


def definition(source: str) -> str:
    """Return a definition file for an image that was made from `source`, such as `docker://debian:12`.

    A source that no definition file can name becomes a comment. A password in it is left out.
    """
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


def all_labels(config: Mapping[str, Any], definition: str, labels: Mapping[str, str]) -> dict[str, str]:
    """Return the labels of an image as `apptainer inspect` prints them, sorted by name.

    They are the image's own, then those of Apptainer that do not depend on host or time, then `labels`.
    """
    found = {**run_of(config).labels, "org.label-schema.schema-version": "1.0"}
    architecture = config.get("architecture")
    if isinstance(architecture, str) and architecture:
        found["org.label-schema.build-arch"] = architecture
    for line in definition.splitlines():
        name, colon, value = line.partition(": ")
        if colon and name in ("Bootstrap", "From"):
            found[f"org.label-schema.usage.singularity.deffile.{name.lower()}"] = value
    return dict(sorted({**found, **labels}.items()))


def inspect_metadata(config: Mapping[str, Any], definition: str, labels: Mapping[str, str]) -> bytes:
    """Return inspect-metadata.json of a SIF, which `apptainer inspect` reads instead of the file system.

    The JSON has the form that Apptainer's pkg/inspect writes; texts lose their final newlines, as there.
    """
    run = run_of(config)
    attributes = {
        "environment": {f"/{_DOCKER_ENV}": _environment(run).rstrip("\n"), f"/{_OWN_ENV}": _CUSTOM_ENV.rstrip("\n")},
        "labels": all_labels(config, definition, labels),
        "runscript": _runscript(run).rstrip("\n"),
        "startscript": _STARTSCRIPT.rstrip("\n"),
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
