"""SIF files built by the Apptainer or SingularityCE that is installed on this host, through spython.

envbuild writes SIF files itself; this is for sites whose images must be built by their own tool.

spython only calls a program named `singularity`, loses its exit code, and prints or drops its messages. So it
runs in a child process, where that name is a script that records the exit code and merges stdout and stderr.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from envbuild.artifacts.image_run import quoted
from envbuild.base import process
from envbuild.base.atomic import remove_tree, staged, writing
from envbuild.base.errors import BuildError, HostError
from envbuild.base.masking import redact
from envbuild.base.progress import log
from envbuild.environment import Environment
from envbuild.image.model import GOARCH
from envbuild.image.sif import read_sif

PROGRAMS = ("apptainer", "singularity")
# The compression level of envbuild's own squashfs; gzip, the tool's default, takes four times as long.
_SQUASHFS = "-comp zstd -Xcompression-level 3"
_OPTION = "--mksquashfs-args"
# Run with -P: Python imports no module from the current folder.
_CHILD = """\
import sys
from spython.main import Client
source, image, *options = sys.argv[1:]
Client.build(recipe=source, image=image, options=options, singularity_options=["--nocolor"], sudo=False, quiet=True)
"""


def find_engine(variables: Mapping[str, str]) -> str:
    """Return the path of the installed Apptainer, else of SingularityCE. Raises HostError when there is neither."""
    for name in PROGRAMS:
        if found := shutil.which(name, path=variables.get("PATH")):
            return os.path.abspath(found)
    raise HostError(
        "neither apptainer nor singularity is installed here",
        "install Apptainer (apptainer.org), load its module, or build without it: envbuild writes SIF files itself",
    )


def build_with_apptainer(source: str, out: Path, environment: Environment, *, arch: str) -> None:
    """Build the SIF `out` from `source` (`docker-archive:FILE`, `oci:FOLDER`) for `arch` (x86_64, aarch64).

    The tool's own settings apply: APPTAINER_CACHEDIR, APPTAINER_TMPDIR, and the same with SINGULARITY. `out` is
    replaced when the new image is complete; an interrupted build leaves nothing behind. Raises HostError without the
    tool, BuildError with the end of its output when it fails or writes another image.
    """
    engine = find_engine(environment.variables)
    options = [] if arch == os.uname().machine else ["--arch", GOARCH[arch]]
    known = process.run([engine, "build", "--help"], env=environment.variables, failure=HostError)
    if _OPTION in known.stdout:
        options += [_OPTION, _SQUASHFS]
    with staged(out) as folder:
        with _temporary(environment.variables) as variables:
            image = folder / "image.sif"
            _run(engine, [source, str(image), *options], folder, variables)
            if not image.is_file():
                raise BuildError("the tool ended without an error and without an image")
            with image.open("rb") as stream:
                found = read_sif(stream, "what the tool made").arch
            if found != arch:
                raise BuildError(f"the tool made an image for {found or 'no architecture'}, not {arch}")
        with writing(out.parent):
            image.chmod(0o755)  # executable, as the tool's own SIF files are
            os.replace(image, out)


@contextmanager
def _temporary(variables: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Yield the tool's variables, for both its names; its temporary files go into a folder that is removed."""
    made = dict(variables)
    for setting in ("CACHEDIR", "TMPDIR"):  # Apptainer also reads SINGULARITY_*, but SingularityCE reads no APPTAINER_*
        value = made.get(f"APPTAINER_{setting}") or made.get(f"SINGULARITY_{setting}")
        if value:
            made[f"APPTAINER_{setting}"] = made[f"SINGULARITY_{setting}"] = value
    place = Path(made.get("APPTAINER_TMPDIR") or made.get("TMPDIR") or "/tmp")
    with writing(place):
        own = Path(tempfile.mkdtemp(prefix="envbuild-", dir=place))
    made["APPTAINER_TMPDIR"] = made["SINGULARITY_TMPDIR"] = str(own)
    try:
        yield made
    finally:
        remove_tree(own)  # a tree may have folders that not even their owner may write to


def _run(engine: str, arguments: list[str], folder: Path, variables: Mapping[str, str]) -> None:
    """Let spython build. Raises BuildError with the tool's last lines when it fails."""
    code = folder / "code"
    script = folder / "bin/singularity"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\n{quoted(engine)} "$@" 2>&1\ncode=$?\necho $code > {quoted(str(code))}\nexit $code\n')
    script.chmod(0o755)
    path = f"{script.parent}{os.pathsep}{variables.get('PATH', os.defpath)}"
    last: deque[str] = deque(maxlen=process.TAIL_LINES)

    def show(text: str) -> None:
        line = redact(text)
        if line:
            last.append(line)
            log(line)

    exit_code = process.follow([sys.executable, "-P", "-c", _CHILD, *arguments], {**variables, "PATH": path}, show)
    told = code.read_text().strip() if code.exists() else "no exit code"
    if exit_code != 0 or told != "0":
        said = "\n".join("  " + line for line in last)
        full = "no space left" in said.lower()
        raise BuildError(
            f"{os.path.basename(engine)} did not build the image (exit {told}):\n{said}",
            "set APPTAINER_TMPDIR, and APPTAINER_CACHEDIR, to folders with more room" if full else None,
        )
