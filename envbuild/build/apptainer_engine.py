"""SIF files built by the Apptainer or SingularityCE that is installed on this host, through spython.

envbuild writes SIF files itself; this is for sites whose images must be built by their own tool.

spython's `Client.build` calls only a program named `singularity` and loses its exit code; its `stream_command` takes
any command, merges stdout and stderr, and raises for an exit code. It takes no environment: it runs in a child process.
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
import subprocess, sys
from spython.utils import stream_command
try:
    for line in stream_command(sys.argv[1:], no_newline_regexp="(?!)", output_type="both"):
        print(line, end="", flush=True)
except subprocess.CalledProcessError as error:
    sys.exit(error.returncode if error.returncode > 0 else 128 - error.returncode)
"""


def find_engine(variables: Mapping[str, str]) -> str:
    """Return the path of the installed Apptainer, else of SingularityCE. Raises HostError when there is neither."""
    for name in PROGRAMS:
        if path := shutil.which(name, path=variables.get("PATH")):
            return os.path.abspath(path)
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
            _run([engine, "--nocolor", "build", *options, str(image), source], variables)
            if not image.is_file():
                raise BuildError("the tool reported no error, but wrote no image")
            with image.open("rb") as stream:
                sif_arch = read_sif(stream, "what the tool made").arch
            if sif_arch != arch:
                raise BuildError(f"the tool made an image for {sif_arch or 'no architecture'}, not {arch}")
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


def _run(command: list[str], variables: Mapping[str, str]) -> None:
    """Run the tool through spython. Raises BuildError with the tool's last lines if it fails."""
    last: deque[str] = deque(maxlen=process.TAIL_LINES)

    def show(text: str) -> None:
        line = redact(text)
        if line:
            last.append(line)
            log(line)

    exit_code = process.follow([sys.executable, "-P", "-c", _CHILD, *command], variables, show)
    if exit_code != 0:
        output = "\n".join("  " + line for line in last)
        full = "no space left" in output.lower()
        raise BuildError(
            f"{os.path.basename(command[0])} did not build the image (exit {exit_code}):\n{output}",
            "set APPTAINER_TMPDIR, and APPTAINER_CACHEDIR, to folders with more room" if full else None,
        )
