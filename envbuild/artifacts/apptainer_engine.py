"""A SIF built by the Apptainer or SingularityCE that is installed here, driven through spython.

Envbuild writes SIF files itself; this is for sites that want their own tool to have built what they run.

spython calls a program named `singularity` only, loses its exit code, and prints or drops its messages. So it runs
in a process of its own, where that name is a script that notes the exit code and sends all messages one way.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from envbuild import process
from envbuild.artifacts.image_run import quoted
from envbuild.artifacts.place import remove, staged, writing
from envbuild.environment import Environment
from envbuild.errors import BuildError, HostError
from envbuild.image.model import GOARCH
from envbuild.image.sif import read_sif
from envbuild.site.pip_config import redact

Say = Callable[[str], None]
PROGRAMS = ("apptainer", "singularity")
# zstd of the level that envbuild's own squashfs has: gzip, the tool's default, takes four times as long.
_SQUASHFS = "-comp zstd -Xcompression-level 3"
_OPTION = "--mksquashfs-args"
# Run with -P: nothing in the current folder is taken for a module of Python's.
_CHILD = """\
import sys
from spython.main import Client
source, image, *options = sys.argv[1:]
Client.build(recipe=source, image=image, options=options, singularity_options=["--nocolor"], sudo=False, quiet=True)
"""
_SETTINGS = ("CACHEDIR", "TMPDIR")


def find_engine(variables: Mapping[str, str]) -> str:
    """The path of the installed Apptainer, else of SingularityCE. Raises HostError when there is neither."""
    for name in PROGRAMS:
        if found := shutil.which(name, path=variables.get("PATH")):
            return os.path.abspath(found)
    raise HostError(
        "neither apptainer nor singularity is installed here",
        "install Apptainer (apptainer.org), load its module, or build without it: "
        "envbuild writes SIF files itself",
    )


def build_with_apptainer(
    source: str, out: Path, environment: Environment, say: Say, *, arch: str
) -> None:
    """Build the SIF `out` from `source` (`docker-archive:FILE`, `oci:FOLDER`), an image for `arch` (x86_64,
    aarch64).

    The tool's own settings count, APPTAINER_CACHEDIR and APPTAINER_TMPDIR and the same with SINGULARITY. `out`
    is replaced when the new image is whole; an interrupted build leaves nothing. Raises HostError without the
    tool and BuildError, with the end of what it said, when it fails or makes something else.
    """
    engine = find_engine(environment.variables)
    options = _options(engine, arch, environment.variables)
    with staged(out) as folder:
        with _temporary(environment.variables) as variables:
            image = folder / "image.sif"
            _run(engine, [source, str(image), *options], folder, variables, say)
            _check(image, arch)
        with writing(out.parent):
            image.chmod(0o755)  # as the tool makes it: a SIF can be executed
            os.replace(image, out)


def _options(engine: str, arch: str, variables: Mapping[str, str]) -> list[str]:
    options = [] if arch == os.uname().machine else ["--arch", GOARCH[arch]]
    known = process.run([engine, "build", "--help"], env=variables, failure=HostError)
    return [*options, _OPTION, _SQUASHFS] if _OPTION in known.stdout else options


@contextmanager
def _temporary(variables: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """The variables for the tool, whose temporary files lie where it would put them, in a folder that goes.

    Apptainer reads SINGULARITY_* too, SingularityCE no APPTAINER_*: both get both.
    """
    made = dict(variables)
    for setting in _SETTINGS:
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
        for path, folders, _ in os.walk(own):
            # A tree may hold folders that not even their owner may write to.
            for name in folders:
                if not os.path.islink(os.path.join(path, name)):
                    os.chmod(os.path.join(path, name), 0o700)
        remove(own)


def _run(
    engine: str, arguments: list[str], folder: Path, variables: Mapping[str, str], say: Say
) -> None:
    """Let spython build; raises BuildError with the tool's last lines when it fails."""
    code = folder / "code"
    script = folder / "bin/singularity"
    script.parent.mkdir()
    script.write_text(
        f'#!/bin/sh\n{quoted(engine)} "$@" 2>&1\ncode=$?\necho $code > {quoted(str(code))}\nexit $code\n'
    )
    script.chmod(0o755)
    path = f"{script.parent}{os.pathsep}{variables.get('PATH', os.defpath)}"
    child = process.start(
        [sys.executable, "-P", "-c", _CHILD, *arguments],
        env={**variables, "PATH": path},
        stderr=subprocess.STDOUT,
    )
    last: deque[str] = deque(maxlen=process.TAIL_LINES)
    try:
        assert child.stdout is not None
        for raw in child.stdout:
            line = redact(raw.decode(errors="replace").rstrip())
            if line:
                last.append(line)
                say(line)
        child.wait()
    except BaseException:
        process.stop([child])
        raise
    told = code.read_text().strip() if code.exists() else "no exit code"
    if child.returncode != 0 or told != "0":
        said = "\n".join("  " + line for line in last)
        name = os.path.basename(engine)
        raise BuildError(f"{name} did not build the image (exit {told}):\n{said}", _hint(said))


def _hint(said: str) -> str | None:
    if "no space left" in said.lower():
        return "set APPTAINER_TMPDIR, and APPTAINER_CACHEDIR, to folders with more room"
    return None


def _check(image: Path, arch: str) -> None:
    """Raises BuildError when the tool, which said that all went well, has not made what was asked for."""
    if not image.is_file():
        raise BuildError("the tool ended without an error and without an image")
    with image.open("rb") as stream:
        found = read_sif(stream, "what the tool made")
    if found.arch != arch:
        raise BuildError(
            f"the tool made an image for {found.arch or 'no architecture'}, not {arch}"
        )
