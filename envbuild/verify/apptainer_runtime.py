"""The runtime that starts programs in a SIF with Apptainer or Singularity.

Short commands run through spython's public `run_command`: it takes the program's path, returns the output and
the exit code separately, and raises nothing. `Client.execute` always starts `singularity` and drops the exit
code of a failure. The agents of a verification run concurrently, write to a log and take signals, which
spython's background mode does not support; they are started with process.start.

Source: apptainer-exec(1), Apptainer's user guide, "Environment and Metadata".
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from envbuild.environment import Environment
from envbuild.errors import HostError
from envbuild.verify.host import Launch
from envbuild.verify.image_file import ImageFile, Runtime, passed

_WORK = "/envbuild-verify"
# Variables that configure Apptainer itself. APPTAINERENV_… are left out: the user sets them for their own runs.
_OWN = ("APPTAINER_", "SINGULARITY_", "XDG_", "SQUASHFUSE", "FUSE")
_NEEDED = ("PATH", "HOME", "USER", "LOGNAME", "TMPDIR", "LANG")
_PROBE = """
import os, sys
if "ENVBUILD_PROBE" not in os.environ:
    sys.exit("the image does not let variables in: it has no /.singularity.d/env/90-environment.sh")
"""
_MODES: tuple[tuple[str, ...], ...] = ((), ("--userns",))  # the site's default; user namespace


def apptainer_runtime(image: ImageFile, program: Path, environment: Environment) -> Runtime:
    """Return the runtime of the Apptainer or Singularity at `program`, in the first mode that starts `image`.

    Raises HostError when no mode starts it.
    """
    host = _host(environment.variables)
    version = _run([str(program), "--version"], host)
    said = version["text"]
    if version["code"] != 0:
        raise HostError(f"{program} --version failed (exit {version['code']}): {said}")
    failed = []
    for mode in _MODES:
        command = _command(program, image, mode, None)
        # spython drops empty arguments, so there must be none.
        result = _run([*command, "python", "-I", "-c", _PROBE], host | _given({"ENVBUILD_PROBE": "1"}))
        if result["code"] == 0:
            name = " ".join([*said.replace(" version ", " ").split("\n")[0].split(), *mode])
            return Runtime(name, _WORK, partial(_open, program, image, mode, environment))
        failed.append(f"{' '.join(['exec', *mode])} (exit {result['code']}): {result['text']}")
    raise HostError(
        f"{said} cannot start {image.path}:\n  " + "\n  ".join(failed),
        "see the messages above; --runtime own launches it without Apptainer",
    )


@contextlib.contextmanager
def _open(
    program: Path, image: ImageFile, mode: Sequence[str], environment: Environment, work: Path
) -> Iterator[Launch]:
    if set(str(work)) & set(':,"\\'):
        raise HostError(
            f"Apptainer cannot bind the folder {work}: its name has a character with a meaning",
            'set TMPDIR to a folder without : , " and \\ in its path',
        )
    host, inside = _host(environment.variables), passed(environment.variables)
    command = _command(program, image, mode, work)

    def launch(name: str, arguments: Sequence[str], extra: Mapping[str, str]) -> tuple[list[str], Mapping[str, str]]:
        return [*command, name, *arguments], host | _given({**inside, **extra})

    yield launch


def _given(variables: Mapping[str, str]) -> dict[str, str]:
    """Return `variables` under the names that make Apptainer and Singularity set them in the container."""
    prefixes = ("APPTAINERENV_", "SINGULARITYENV_")
    return {prefix + key: value for key, value in variables.items() for prefix in prefixes}


def _command(program: Path, image: ImageFile, mode: Sequence[str], work: Path | None) -> list[str]:
    """Return the command line that every started program shares. /tmp is mounted as the site configured it."""
    bind = ["--bind", f"{work}:{_WORK}", "--pwd", _WORK] if work else []
    gpus = [image.accelerator.apptainer] if image.accelerator.apptainer else []
    options = [*mode, "--cleanenv", "--no-home", *gpus, *bind]
    return [str(program), "--quiet", "--nocolor", "exec", *options, str(image.path)]


def _host(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name in _NEEDED or name.startswith(_OWN)}


def _run(command: list[str], variables: Mapping[str, str]) -> dict[str, Any]:
    """Run `command` to its end with spython. Return the exit `code` and the `text` of stdout and stderr.

    Raises HostError when the program cannot be executed.
    """
    from spython.utils import run_command

    try:
        done = run_command(command, quiet=True, environ=dict(variables))
    except OSError as error:
        raise HostError(f"{command[0]} cannot be run: {error.strerror}") from error
    text = "".join(done["message"]).strip()
    return {"code": done["return_code"], "text": text[-2000:]}
