"""Wheels in a conda environment: uv installs them beside conda's packages and never over them.

Sources: PyPA "Recording installed projects" (RECORD) and "Entry points specification".
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
from collections.abc import Sequence
from pathlib import Path

from envbuild import atomic
from envbuild.artifacts.conda_survey import META, read_records
from envbuild.artifacts.folder import FolderBuild, install_wheels, site_packages
from envbuild.artifacts.installed import names_and_versions
from envbuild.errors import BuildError
from envbuild.layers.compose import WheelFile
from envbuild.layers.wheel import Scheme, wheel_paths

# As uv writes it for relocatable environments: the interpreter is found from the script's own path.
_RELOCATABLE = b"""#!/bin/sh
'''exec' "$(dirname -- "$(realpath -- "$0")")"/'python' "$0" "$@"
' '''
"""


def add_wheels(wanted: FolderBuild, wheels: Sequence[WheelFile]) -> None:
    """Install `wheels`, the plan's and the trainer's, into the new conda environment.

    Raises BuildError for a wheel that would replace a file of a conda package, and when uv fails.
    """
    staged, python = wanted.staged, wanted.plan.python
    packages = site_packages(staged, python)
    with atomic.writing(staged):
        packages.mkdir(parents=True, exist_ok=True)
    before = names_and_versions(packages)
    for wheel in wheels:
        _refuse_over(wheel, python, before, staged)
    install_wheels(wanted, [wheel.path for wheel in wheels], "--break-system-packages")
    with atomic.writing(staged):
        for record in packages.glob("*.dist-info/RECORD"):
            if _installer(record.parent) == "uv":
                _release_scripts(record, staged)


def _refuse_over(wheel: WheelFile, python: str, before: dict[str, str], staged: Path) -> None:
    if wheel.name in before:
        raise BuildError(
            f"{wheel.path.name}: conda packages bring {wheel.name} {before[wheel.name]}, pip would replace it",
            "remove it from `requirements` of [conda], or the conda package from `dependencies`; then lock again",
        )
    for path in wheel_paths(wheel.path, Scheme("prefix", python)):
        relative = path.removeprefix("prefix/")
        if os.path.lexists(staged / relative):
            owner = _owner(staged, relative)
            raise BuildError(
                f"{wheel.path.name} would replace {relative} of {owner}",
                "remove one of the two from [conda] in the recipe, and lock again",
            )


def _owner(staged: Path, relative: str) -> str:
    for record in read_records(staged):
        if relative in record["files"]:
            return f"conda package {record['name']}-{record['version']}-{record['build']}"
    return f"what is in {META}" if relative.startswith(META) else "the environment"


def _installer(dist_info: Path) -> str:
    try:
        return (dist_info / "INSTALLER").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _release_scripts(record: Path, staged: Path) -> None:
    """Let the scripts of a distribution find their interpreter from their own path, and update the RECORD.

    uv wrote the path of the staging folder into them. Each file is replaced by a new one, because it may be a link into
    uv's cache.
    """
    with record.open(encoding="utf-8", newline="") as stream:
        rows = [row for row in csv.reader(stream) if row]
    changed = False
    for row in rows:
        path = Path(os.path.normpath(record.parents[1] / row[0]))
        if path.parent != staged / "bin" or path.is_symlink():
            continue
        data = path.read_bytes()
        body = _without_interpreter(data, os.fsencode(staged / "bin" / "python"))
        if body is None:
            continue
        data = _RELOCATABLE + body
        _rewrite(path, data)
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        row[1:] = [f"sha256={digest}", str(len(data))]
        changed = True
    if changed:
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows(rows)
        _rewrite(record, out.getvalue().encode())


def _without_interpreter(data: bytes, python: bytes) -> bytes | None:
    """Return a script without the lines that start `python`, None if it does not start that interpreter."""
    lines = data.split(b"\n", 3)
    if lines[0].startswith(b"#!" + python):
        return data[len(lines[0]) + 1 :]
    # The form for interpreter paths that the kernel would not accept.
    if lines[0] == b"#!/bin/sh" and len(lines) == 4 and lines[1].startswith(b"'''exec' "):
        return lines[3] if python in lines[1] else None
    return None


def _rewrite(path: Path, data: bytes) -> None:
    mode = path.stat().st_mode & 0o7777
    path.unlink()
    path.write_bytes(data)
    path.chmod(mode)
