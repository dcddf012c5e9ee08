"""The runtime that starts programs in an image without an installed one: its own mount namespace (namespace.py).

One keeper process holds the namespace for all processes of a verification. The namespace is invisible from
outside and disappears with the keeper, however that ends. The image is made available in one of three ways, the
first that works: the kernel mounts it (root only), squashfuse mounts it, or it is unpacked into the store.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from envbuild import process
from envbuild.atomic import writing
from envbuild.environment import Environment
from envbuild.errors import HostError
from envbuild.verify import namespace
from envbuild.verify.driver import driver_libraries
from envbuild.verify.host import Launch
from envbuild.verify.image_file import ImageFile, Runtime, passed

MOUNT, SQUASHFUSE, EXTRACT = WAYS = ("mount", "squashfuse", "extract")
# -I and an explicit path load envbuild's modules and Python's, whatever the caller's variables and the current
# folder contain.
_BOOT = "import sys; sys.path.insert(0, sys.argv.pop(1)); from envbuild.verify.namespace import main; main()"
START = (sys.executable, "-I", "-c", _BOOT, str(Path(namespace.__file__).parents[2]))
_FUSE = Path("/dev/fuse")
# Kernel settings that may forbid user namespaces: (name, the value that forbids, a value that allows).
_SETTINGS = (
    ("user.max_user_namespaces", "0", "15000"),
    ("user.max_mnt_namespaces", "0", "15000"),
    ("kernel.unprivileged_userns_clone", "0", "1"),
    ("kernel.apparmor_restrict_unprivileged_userns", "1", "0"),
)


class WayUnavailable(Exception):
    """A way that cannot make an image available on this host; the message gives the reason."""


def own_runtime(image: ImageFile, way: str | None, environment: Environment) -> Runtime:
    """Return the own runtime for `image`, by `way` if one is given, else by the first way that works.

    Each way is tried on the image, except unpacking. Raises HostError, with the reasons, when no way works.
    """
    refused = []
    for one in (way,) if way else WAYS:
        try:
            detail = _try(image, one, environment)
        except WayUnavailable as error:
            refused.append(f"{one}: {error}")
            continue
        name = f"own:{one} ({detail})" if detail else f"own:{one}"
        return Runtime(name, namespace.WORK, partial(_open, image, one, environment))
    other = [f"own:{one}" for one in WAYS if one != way]
    hint = f"choose another way ({', '.join(other)})"
    if way == MOUNT and image.compressor != "gzip":
        hint += ", or make the image with --compression gzip, which every kernel with squashfs reads"
    raise HostError(f"{image.path} cannot be launched here; {'; '.join(refused)}", hint)


def _try(image: ImageFile, way: str, environment: Environment) -> str:
    """Mount `image` by `way` and unmount it. Return a detail about the way, for the runtime's name.

    Raises Refused, or HostError when no other way would work either.
    """
    with environment.store.working("launched") as folder:
        spec = spec_of(image, way, folder, folder, environment)
        detail = f"Linux {platform.release()}" if way == MOUNT else ""
        if way == SQUASHFUSE:
            detail = _version(spec["tool"])
        with _keeper(spec, environment):
            return detail


@contextlib.contextmanager
def _open(image: ImageFile, way: str, environment: Environment, work: Path) -> Iterator[Launch]:
    with environment.store.working("launched") as folder:
        if way == EXTRACT:
            extract(image, folder / "image")
        with contextlib.ExitStack() as stack:
            try:
                spec = spec_of(image, way, folder, work, environment)
                keeper = stack.enter_context(_keeper(spec, environment))
            except WayUnavailable as error:
                raise HostError(f"{image.path} cannot be launched any longer: {error}") from None
            variables = passed(environment.variables)

            def launch(
                program: str, arguments: Sequence[str], extra: Mapping[str, str]
            ) -> tuple[list[str], Mapping[str, str]]:
                enter = [*START, "enter", str(keeper), image.kind]
                return [*enter, program, *arguments], {**variables, **extra}

            yield launch


def extract(image: ImageFile, into: Path) -> None:
    """Unpack `image` into the folder `into`. Raises BuildError when that fails."""
    from envbuild.image.squashfs.read import SquashfsImage
    from envbuild.image.squashfs.unpack import unpack

    with writing(into), image.path.open("rb") as stream:
        into.mkdir(exist_ok=True)
        unpack(SquashfsImage(stream, image.offset, str(image.path)), into)


def spec_of(image: ImageFile, way: str, folder: Path, work: Path | None, environment: Environment) -> dict[str, Any]:
    """Return the specification for namespace.py; `work` is the work folder, None for no such folder.

    Raises Refused for a way that this user or this host cannot use.
    """
    if way == MOUNT and os.geteuid() != 0:
        raise WayUnavailable("only root may mount squashfs images")
    return {
        "image": str(image.path),
        "offset": image.offset,
        "compressor": image.compressor,
        "way": way,
        "tool": _squashfuse(environment.variables) if way == SQUASHFUSE else "",
        "folder": str(folder),
        "work": str(work or ""),
        "libraries": driver_libraries(environment.variables) if image.accelerator.driver_libraries else {},
    }


@contextlib.contextmanager
def _keeper(spec: Mapping[str, Any], environment: Environment) -> Iterator[int]:
    """Yield the process ID of a keeper that holds the namespace of `spec`.

    Raises Refused when the image cannot be mounted, HostError when namespaces are forbidden.
    """
    folder = Path(spec["folder"])
    for name in ("image", "root"):
        (folder / name).mkdir(exist_ok=True)
    told, log = folder / "spec.json", folder / "keeper.log"
    told.write_text(json.dumps(spec), encoding="utf-8")
    with log.open("wb") as stream:
        child = process.start(
            [*START, "keep", told], env={"PATH": environment.variables.get("PATH", os.defpath)}, stderr=stream.fileno()
        )
    try:
        assert child.stdout is not None
        with child.stdout as answer:
            line = answer.readline()
        try:
            said = json.loads(line)
        except ValueError:
            said = {"failed": "namespace", "why": log.read_text(errors="replace").strip()[-2000:]}
        if said.get("failed") == "image":
            raise WayUnavailable(said["why"])
        if "failed" in said:
            raise forbidden(said["why"])
        yield child.pid
    finally:
        process.stop([child])


def forbidden(why: str, proc: Path = Path("/proc/sys")) -> HostError:
    """Return the error for a host that forbids namespaces; it names the settings that may be the reason."""
    found = []
    for name, forbids, allows in _SETTINGS:
        with contextlib.suppress(OSError):
            if (proc / name.replace(".", "/")).read_text().strip() == forbids:
                found.append((f"{name} = {forbids}", f"{name}={allows}"))
    ways = "install apptainer or enroot, verify on a node that allows it, or build with --no-verify"
    if found:
        settings = " and ".join(setting for setting, _ in found)
        orders = " ".join(order for _, order in found)
        return HostError(
            f"this host forbids to launch an image without a runtime: {settings} ({why})",
            f"let the administrator run `sysctl -w {orders}`, run as root, or {ways}",
        )
    return HostError(
        f"this host does not let us launch an image without a runtime: {why}",
        f"a container around us may forbid it (its seccomp profile or missing capabilities); {ways}",
    )


def _squashfuse(variables: Mapping[str, str]) -> str:
    """Return the path of squashfuse. Raises Refused when it is not installed or /dev/fuse cannot be opened."""
    search = variables.get("PATH", os.defpath)
    # squashfuse_ll is faster and takes the same options.
    tool = shutil.which("squashfuse_ll", path=search) or shutil.which("squashfuse", path=search)
    if tool is None:
        raise WayUnavailable("squashfuse is not installed")
    try:
        os.close(os.open(_FUSE, os.O_RDWR))
    except OSError as error:
        raise WayUnavailable(f"{_FUSE}: {error.strerror}") from None
    return tool


def _version(tool: str) -> str:
    said = process.run([tool, "--help"], check=False)
    found = re.search(r"squashfuse \d[\w.]*", said.stdout + said.stderr)
    return found[0] if found else Path(tool).name
