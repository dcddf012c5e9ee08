"""What enroot expects in an image, and what it does to every file of one.

Sources: enroot 4.1 (src/docker.sh, src/runtime.sh, bin/enroot-switchroot.c) and pyxis 0.21, read and not
copied. `enroot import` writes the same four files; these also carry what enroot's lose, as told below.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from envbuild.artifacts.image_run import NAME, Addition, Run, file, folder, quoted, run_of
from envbuild.image.entry import BLOCK, CHAR, DIR, SYMLINK, Entry
from envbuild.site.pip_config import redact

# enroot replaces this in etc/environment by the variable of whoever starts the container, and has no escape.
_REFERENCE = re.compile(r"\$\{[A-Za-z_][A-Za-z0-9_]*\}")
# A quoted value, which loses its quotes, twice over; enroot counts a backslash as a quote.
_QUOTED = re.compile(r"[\"'\\].*[\"'\\]\s*", re.DOTALL)
_RC_LOCAL = """\
# /etc/rc reads this file before it starts the program of the image. What is mounted here may
# start another one: "$@" are the arguments of the container.
"""


def normalised(entry: Entry) -> Entry | None:
    """`entry` as `enroot import` puts it into an image; None where it leaves it out.

    What lies in dev, device nodes anywhere and .dockerenv go: making a node needs root, and the runtimes
    mount the host's dev. All belongs to 0:0, since images are unpacked and mounted by users who own
    nothing else. Its owner may read everything, enter and write folders; setuid, setgid and sticky bits
    stay, and so do fifos. Extended attributes outside user.* (capabilities, SELinux, ACLs) go: without
    root they cannot be set. A hard link to what is left out must be left out by the caller.
    """
    path = entry.path
    if path.startswith("dev/") or path == ".dockerenv" or entry.kind in (CHAR, BLOCK):
        return None
    mode = entry.mode
    if path == "":
        mode = 0o755
    elif entry.kind == DIR:
        mode |= 0o700
    elif entry.kind != SYMLINK:
        mode |= 0o400 | (0o100 if mode & 0o111 else 0)
    kept = tuple(item for item in entry.xattrs if item[0].startswith("user."))
    if (mode, 0, 0, kept) == (entry.mode, entry.uid, entry.gid, entry.xattrs):
        return entry
    return dataclasses.replace(entry, mode=mode, uid=0, gid=0, xattrs=kept)


def enroot_files(config: Mapping[str, Any], provenance: str, mtime: int) -> list[Addition]:
    """The files that start the program of an image, from the image's configuration (OCI, config.md).

    `provenance` says where the image comes from; a password in it is left out. Raises BuildError for a
    configuration that makes no sense. A file replaces what is there; a folder is made where nothing is.
    """
    run = run_of(config)
    parts = run.workdir.strip("/").split("/") if run.workdir != "/" else []
    folders = ["/".join(parts[: depth + 1]) for depth in range(len(parts))]
    return [
        folder("etc", mtime),
        file("etc/environment", _environment(run), mtime),
        file("etc/fstab", _fstab(run), mtime),
        file("etc/rc", _rc(run, redact(provenance)), mtime),
        file("etc/rc.local", _RC_LOCAL, mtime),
        *(folder(path, mtime) for path in folders if path != "etc"),
    ]


def _environment(run: Run) -> str:
    """A line NAME=VALUE for each variable that has a value which enroot leaves as it is."""
    lines = (f"{n}={v}\n" for n, v in run.env.items() if _known(n) and _left_alone(v))
    return "".join(lines)


def _known(name: str) -> bool:
    """Whether a variable gets through: enroot drops ENROOT_*, its own, and what no shell can name."""
    return NAME.fullmatch(name) is not None and not name.startswith("ENROOT_")


def _left_alone(value: str) -> bool:
    """Whether enroot takes `value` in etc/environment as it is; etc/rc sets the others."""
    return "\n" not in value and not _REFERENCE.search(value) and not _QUOTED.fullmatch(value)


def _fstab(run: Run) -> str:
    """A line for each volume, so that it can be written to where the rest cannot: it is bound onto itself."""
    options = "x-create=dir,bind,rw,nosuid,nodev"
    paths = [_fstab_word(path) for path in run.volumes]
    return "".join(f"${{ENROOT_ROOTFS}}{path} {path} none {options}\n" for path in paths)


def _fstab_word(path: str) -> str:
    # getmntent(3) reads these back; `$` must not begin what enroot takes for a variable, `#` no comment.
    return re.sub(r"[\s\\$#]", lambda match: f"\\{ord(match.group()):03o}", path, flags=re.ASCII)


def _rc(run: Run, provenance: str) -> str:
    """The script that enroot runs, by /bin/sh and with the arguments of the container, to start a program.

    enroot's own quotes by bash's rules, which other shells do not know, and loses values with newlines.
    """
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
            # What is set here comes from whoever starts the container, who wins.
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
