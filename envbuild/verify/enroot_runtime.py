"""The runtime that starts programs in an enroot image with enroot.

Written from enroot's public sources and never run with the real enroot. enroot starts an image without
unpacking it if squashfuse and the kernel's overlayfs allow that; otherwise the image is unpacked into a folder
of the store, which is removed after the verification.

Source: github.com/NVIDIA/enroot 4.1, doc/cmd/start.md, doc/cmd/create.md, doc/image-format.md, src/runtime.sh.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from envbuild import process
from envbuild.environment import Environment
from envbuild.errors import HostError
from envbuild.verify.host import Launch
from envbuild.verify.image_file import ImageFile, Runtime, passed

_WORK = "/envbuild-verify"
_NAME = "envbuild"
# Variables that configure enroot and its hooks.
_OWN = ("ENROOT_", "XDG_", "NVIDIA_", "MELLANOX_")
_NEEDED = ("PATH", "HOME", "USER", "LOGNAME", "TMPDIR", "LANG", "TERM")


def enroot_runtime(image: ImageFile, program: Path, environment: Environment) -> Runtime:
    """Return the runtime of the enroot at `program`, which starts `image` without unpacking it if possible.

    Raises HostError when enroot does not run.
    """
    host = _host(environment.variables, image)
    version = process.run([program, "version"], env=host, failure=HostError).stdout.strip()
    probe = [str(program), "start", str(image.path), "python", "-I", "-c", "pass"]
    in_place = process.run(probe, env=host, check=False).returncode == 0
    return Runtime(
        f"enroot {version}" + ("" if in_place else " (unpacked)"),
        _WORK,
        lambda work: _open(program, image, environment, work, in_place),
    )


@contextlib.contextmanager
def _open(program: Path, image: ImageFile, environment: Environment, work: Path, in_place: bool) -> Iterator[Launch]:
    if ":" in str(work) or len(str(work).split()) != 1:
        raise HostError(
            f"enroot cannot mount the folder {work}: its name has a colon or a space",
            "set TMPDIR to a folder without them in its path",
        )
    host, inside = _host(environment.variables, image), passed(environment.variables)
    mount = f"{work}:{_WORK}:none:x-create=dir,bind,rw"
    with contextlib.ExitStack() as stack:
        place = str(image.path)
        if not in_place:
            folder = stack.enter_context(environment.store.working("launched"))
            host["ENROOT_DATA_PATH"] = str(folder)
            process.run([program, "create", "--name", _NAME, image.path], env=host, failure=HostError)
            place = _NAME

        def launch(
            name: str, arguments: Sequence[str], extra: Mapping[str, str]
        ) -> tuple[list[str], Mapping[str, str]]:
            given = {**inside, **extra}
            named = [word for key in sorted(given) for word in ("--env", key)]
            options = [*named, "--mount", mount, place, name]
            return [str(program), "start", *options, *arguments], {**host, **given}

        yield launch


def _host(variables: Mapping[str, str], image: ImageFile) -> dict[str, str]:
    kept = {name: value for name, value in variables.items() if name in _NEEDED or name.startswith(_OWN)}
    return {**dict(image.accelerator.container_variables), **kept}
