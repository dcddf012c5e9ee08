"""enroot's files in an image, and what enroot changes in every other file.

Sources: enroot 4.1 (src/docker.sh, src/runtime.sh, bin/enroot-switchroot.c) and pyxis 0.21, read and not
copied. `enroot import` writes the same four files; these also keep what enroot's lose, as documented below.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from envbuild.base.masking import redact
from envbuild.build.image_run import NAME, Addition, ProgramConfig, file, folder, quoted, run_of
from envbuild.contract.image_manifest import converted_mode
from envbuild.image.entry import Entry

# In etc/environment, enroot replaces this by a variable of the user who starts the container; it has no escape.
_REFERENCE = re.compile(r"\$\{[A-Za-z_][A-Za-z0-9_]*\}")
# A quoted value loses its quotes, in two rounds; enroot takes a backslash for a quote.
_QUOTED = re.compile(r"[\"'\\].*[\"'\\]\s*", re.DOTALL)
_RC_LOCAL = """\
# /etc/rc reads this file before it starts the program of the image. What is mounted here may
# start another one: "$@" are the arguments of the container.
"""


def normalised(entry: Entry) -> Entry | None:
    """Return `entry` as `enroot import` puts it into an image, None if that leaves it out.

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
    """Return the script that starts the program: POSIX sh, unlike enroot's own, and any value keeps its newlines."""
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
