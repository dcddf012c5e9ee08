"""Start programs in a SIF by Apptainer or Singularity.

spython runs what is short and only asked for its result; its public `run_command` takes the program's path,
keeps both streams and the exit code apart from each other and raises nothing, where `Client.execute` always
starts `singularity` and drops the exit code of a failure. The agents of a verification run beside each other, write
to a log and take signals, which spython's background mode cannot do: its command list goes to process.start.

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
# What Apptainer itself goes by. APPTAINERENV_… are the user's for his own runs, and are left out.
_OWN = ("APPTAINER_", "SINGULARITY_", "XDG_", "SQUASHFUSE", "FUSE")
_NEEDED = ("PATH", "HOME", "USER", "LOGNAME", "TMPDIR", "LANG")
# Tried in this order: as set up by the site, and in a user namespace.
_PROBE = """
import os, sys
if "ENVBUILD_PROBE" not in os.environ:
    sys.exit("the image does not let variables in: it has no /.singularity.d/env/90-environment.sh")
"""
_MODES: tuple[tuple[str, ...], ...] = ((), ("--userns",))


def apptainer_runtime(image: ImageFile, program: Path, environment: Environment) -> Runtime:
    """Apptainer (or Singularity) at `program`, in the first mode that starts `image`. Raises HostError."""
    host = _host(environment.variables)
    version = _run([str(program), "--version"], host)
    said = version["text"]
    if version["code"] != 0:
        raise HostError(f"{program} --version failed (exit {version['code']}): {said}")
    failed = []
    for mode in _MODES:
        command = _command(program, image, mode, None)
        # No empty argument: spython drops it.
        result = _run(
            [*command, "python", "-I", "-c", _PROBE], host | _given({"ENVBUILD_PROBE": "1"})
        )
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

    def launch(
        name: str, arguments: Sequence[str], extra: Mapping[str, str]
    ) -> tuple[list[str], Mapping[str, str]]:
        return [*command, name, *arguments], host | _given({**inside, **extra})

    yield launch


def _given(variables: Mapping[str, str]) -> dict[str, str]:
    """`variables` as those that Apptainer and Singularity set inside."""
    prefixes = ("APPTAINERENV_", "SINGULARITYENV_")
    return {prefix + key: value for key, value in variables.items() for prefix in prefixes}


def _command(program: Path, image: ImageFile, mode: Sequence[str], work: Path | None) -> list[str]:
    """What is common to all that is started. /tmp is the host's, as the site has set it up."""
    bind = ["--bind", f"{work}:{_WORK}", "--pwd", _WORK] if work else []
    gpus = [image.accelerator.apptainer] if image.accelerator.apptainer else []
    options = [*mode, "--cleanenv", "--no-home", *gpus, *bind]
    return [str(program), "--quiet", "--nocolor", "exec", *options, str(image.path)]


def _host(variables: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value for name, value in variables.items() if name in _NEEDED or name.startswith(_OWN)
    }


def _run(command: list[str], variables: Mapping[str, str]) -> dict[str, Any]:
    """Run to the end by spython: exit `code`, and the `text` of both streams."""
    from spython.utils import run_command

    try:
        done = run_command(command, quiet=True, environ=dict(variables))
    except OSError as error:
        raise HostError(f"{command[0]} cannot be run: {error.strerror}") from error
    text = "".join(done["message"]).strip()
    return {"code": done["return_code"], "text": text[-2000:]}
