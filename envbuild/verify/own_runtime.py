"""The runtime that starts programs in an image without an installed one: its own mount namespace (namespace.py).

One keeper process holds the namespace for all processes of a verification. The namespace is invisible from
outside and disappears with the keeper, however that ends. The image is made available in one of three ways, the
first that works: the kernel mounts it (root only), squashfuse mounts it, or it is unpacked into the store.

The libraries of the GPU driver, which images do not contain, are shown in the image.
Source: the driver's README, "Installed components"; nvidia-container-cli(1).
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from envbuild.base import process
from envbuild.base.atomic import writing
from envbuild.base.errors import HostError
from envbuild.environment import Environment
from envbuild.image.limits import ImageLimits
from envbuild.verify import namespace
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
# The driver's libraries by name → soname, which programs load; the driver's own files end in its version.
_SONAMES = {
    soname.partition(".")[0]: soname
    for soname in (
        "libcuda.so.1",
        "libcudadebugger.so.1",
        "libnvidia-ml.so.1",
        "libnvidia-nvvm.so.4",
        "libnvidia-ptxjitcompiler.so.1",
    )
}
# Programs load this library by its full file name.
_VERSIONED = "libnvidia-gpucomp"
_FILE = re.compile(r"(lib[\w-]+)\.so(\.[\d.]+)?")
_CACHED = re.compile(r"^\s*(\S+) \((.*)\) => (\S+)$", re.MULTILINE)


class WayUnavailable(Exception):
    """A way that cannot make an image available on this host; the message gives the reason."""


def own_runtime(image: ImageFile, way: str | None, environment: Environment) -> Runtime:
    """Return the own runtime for `image`, by `way` if one is given, else by the first way that works.

    Each way is tried on the image, except unpacking. Raises HostError, with the reasons, when no way works.
    """
    refused = []
    for one in (way,) if way else WAYS:
        try:
            with environment.store.working("launched") as folder:
                spec = spec_of(image, one, folder, folder, environment)
                with _keeper(spec, environment):
                    name = f"own:{one}{_detail(spec)}"
            return Runtime(name, partial(_open, image, one, environment))
        except WayUnavailable as error:
            refused.append(f"{one}: {error}")
    hint = f"choose another way ({', '.join(f'own:{one}' for one in WAYS if one != way)})"
    if way == MOUNT and image.compressor != "gzip":
        hint += ", or make the image with --compression gzip, which every kernel with squashfs reads"
    raise HostError(f"{image.path} cannot be launched here; {'; '.join(refused)}", hint)


def _detail(spec: Mapping[str, Any]) -> str:
    if spec["way"] == MOUNT:
        return f" (Linux {platform.release()})"
    if spec["way"] == EXTRACT:
        return ""
    said = process.run([spec["tool"], "--help"], check=False)
    found = re.search(r"squashfuse \d[\w.]*", said.stdout + said.stderr)
    return f" ({found[0] if found else Path(spec['tool']).name})"


@contextmanager
def _open(image: ImageFile, way: str, environment: Environment, work: Path) -> Iterator[Launch]:
    with environment.store.working("launched") as folder, ExitStack() as stack:
        if way == EXTRACT:
            extract(image, folder / "image", environment.site.limits)
        try:
            keeper = stack.enter_context(_keeper(spec_of(image, way, folder, work, environment), environment))
        except WayUnavailable as error:
            raise HostError(f"{image.path} cannot be launched any longer: {error}") from None
        enter, variables = [*START, "enter", str(keeper), image.format], passed(environment.variables)
        yield lambda program, arguments, extra: ([*enter, program, *arguments], {**variables, **extra})


def extract(image: ImageFile, into: Path, limits: ImageLimits) -> None:
    """Unpack `image` into the folder `into`. Raises BuildError when that fails, or the image exceeds `limits`."""
    from envbuild.image.squashfs.read import SquashfsImage
    from envbuild.image.squashfs.unpack import unpack

    with writing(into), image.path.open("rb") as stream:
        into.mkdir(exist_ok=True)
        unpack(SquashfsImage(stream, image.offset, str(image.path), limits), into)


def spec_of(image: ImageFile, way: str, folder: Path, work: Path | None, environment: Environment) -> dict[str, Any]:
    """Return the specification for namespace.py. Raises WayUnavailable if this user or host cannot use `way`."""
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
        "libraries": _driver_libraries(environment.variables) if image.accelerator.driver_libraries else {},
    }


def _squashfuse(variables: Mapping[str, str]) -> str:
    """Return the path of squashfuse. Raises WayUnavailable without it, and when /dev/fuse cannot be opened."""
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


@contextmanager
def _keeper(spec: Mapping[str, Any], environment: Environment) -> Iterator[int]:
    """Yield the process ID of a keeper that holds the namespace of `spec`."""
    folder = Path(spec["folder"])
    for name in ("image", "root"):
        (folder / name).mkdir(exist_ok=True)
    spec_file, log = folder / "spec.json", folder / "keeper.log"
    spec_file.write_text(json.dumps(spec), encoding="utf-8")
    path = {"PATH": environment.variables.get("PATH", os.defpath)}
    with log.open("wb") as stream:
        child = process.start([*START, "keep", spec_file], env=path, stderr=stream.fileno())
    try:
        assert child.stdout is not None
        with child.stdout as stdout:
            line = stdout.readline()
        try:
            answer = json.loads(line)
        except ValueError:
            answer = {"failed": "namespace", "why": log.read_text(errors="replace").strip()[-2000:]}
        if answer.get("failed") == "image":
            raise WayUnavailable(answer["why"])
        if "failed" in answer:
            raise forbidden(answer["why"])
        yield child.pid
    finally:
        process.stop([child])


def forbidden(why: str, proc: Path = Path("/proc/sys")) -> HostError:
    """Return the error for a host that forbids namespaces; it names the settings that may be the reason."""
    found = []
    for name, forbids, allows in _SETTINGS:
        with suppress(OSError):
            if (proc / name.replace(".", "/")).read_text().strip() == forbids:
                found.append((f"{name} = {forbids}", f"{name}={allows}"))
    ways = "install apptainer or enroot, verify on a node that allows it, or build with --no-verify"
    if not found:
        return HostError(
            f"this host does not let us launch an image without a runtime: {why}",
            f"a container around us may forbid it (its seccomp profile or missing capabilities); {ways}",
        )
    settings, orders = zip(*found, strict=True)
    return HostError(
        f"this host forbids to launch an image without a runtime: {' and '.join(settings)} ({why})",
        f"let the administrator run `sysctl -w {' '.join(orders)}`, run as root, or {ways}",
    )


def _driver_libraries(variables: Mapping[str, str]) -> dict[str, str]:
    """Return name → path of each library of the GPU driver; empty on a host without a driver."""
    search = variables.get("PATH", os.defpath)
    if tool := shutil.which("nvidia-container-cli", path=search):
        listed = process.run([tool, "list", "--libraries"], env=variables, check=False)
        if listed.returncode == 0 and (found := named(listed.stdout.split())):
            return found
    cache = shutil.which("ldconfig", path=f"{search}:/sbin:/usr/sbin")
    return named(cached(process.run([cache, "-p"], check=False).stdout)) if cache else {}


def cached(text: str, machine: str | None = None) -> list[str]:
    """Return the paths in the output of `ldconfig -p` that are for `machine` (default: this host's)."""
    mark = {"x86_64": "x86-64", "aarch64": "AArch64"}.get(machine or os.uname().machine, "")
    return [path for _, flags, path in _CACHED.findall(text) if mark in flags]


def named(paths: Iterable[str]) -> dict[str, str]:
    """Return name → path of the driver's libraries among `paths`: the first of each name that programs load."""
    found: dict[str, str] = {}
    for path in paths:
        match = _FILE.fullmatch(os.path.basename(path))
        if match and match[1] in _SONAMES:
            found.setdefault(_SONAMES[match[1]], path)
        elif match and match[1] == _VERSIONED:
            found.setdefault(os.path.basename(os.path.realpath(path)), path)
    return found
