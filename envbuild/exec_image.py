"""`envbuild run` of one program in a .sqsh or .sif file, without a container runtime, root or daemon.

The image is opened as for a verification (verify/image_runtime.py): mounted by the kernel, mounted by squashfuse, or
unpacked. Unlike there, no way is tried out first, the namespace is for one program, and nothing is kept in the store,
which the nodes of a cluster may share.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from envbuild.base import process
from envbuild.base.errors import HostError, UsageError
from envbuild.base.progress import Log
from envbuild.data import load_table
from envbuild.environment import Environment
from envbuild.recipe.targets import CPU, gpu_families
from envbuild.run_environment import RUN
from envbuild.runtimes import OWN
from envbuild.store.store import working_folder
from envbuild.verify import supervise
from envbuild.verify.image_file import ImageFile, open_image_file
from envbuild.verify.image_runtime import EXTRACT, START, WAYS, WayUnavailable, extract, forbidden, names, spec_of

RUNTIMES = (OWN, *(f"{OWN}:{way}" for way in WAYS))


class Bind(NamedTuple):
    """A bind mount of this host's folder or file `host` at `place` in the image; `readonly` forbids writes."""

    host: str
    place: str
    readonly: bool


def parse_bind(text: str) -> Bind:
    """Parse HOST[:PLACE][:ro|:rw]; PLACE defaults to the absolute path of HOST.

    Raises UsageError for any other form, and when HOST does not exist.
    """
    parts = text.split(":")
    mode = parts.pop() if len(parts) > 1 and parts[-1] in ("ro", "rw") else "rw"
    host, place = parts[0], (parts[1] if len(parts) == 2 else os.path.abspath(parts[0]))
    if len(parts) > 2 or not host or not place.startswith("/"):
        raise UsageError(
            f"--bind {text!r} is not HOST[:PLACE][:ro]",
            "PLACE is an absolute path in the image; paths that hold a colon cannot be bound",
        )
    if not os.path.exists(host):
        raise UsageError(f"--bind {text!r}: there is no {host} on {socket.gethostname()}")
    return Bind(os.path.abspath(host), place, mode == "ro")


def inherited(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the caller's `variables` that programs in the image get without any option."""
    table = load_table("caller")["image"]
    return {
        name: value
        for name, value in process.of_caller(variables).items()
        if name not in table["kept_out"] and (name in table["names"] or name.startswith((*table["prefixes"], "PYTHON")))
    }


def exec_image(
    path: Path,
    command: Sequence[str],
    environment: Environment,
    log: Log,
    *,
    binds: Sequence[Bind],
    folder: str | None,
    variables: Mapping[str, str],
    runtime: str,
) -> int:
    """Run `command` in the image at `path` with this process's streams, and return its wait status.

    `variables` override those that the image sets and those that are `inherited`. `folder` is the working folder inside
    the image; the default is the current folder if a bind shows it, else /. `runtime` is one of RUNTIMES.

    Raises UsageError for a file that is not an image and for a bind that does not fit the image, HostError when this
    host cannot start it.
    """
    if runtime not in RUNTIMES:
        fault = f"{runtime} starts ranks, not one program" if runtime in names() else f"unknown runtime {runtime!r}"
        raise UsageError(fault, f"one of {', '.join(RUNTIMES)}")
    accelerator = next(
        (accelerator for accelerator in gpu_families() if any(Path("/dev").glob(accelerator.probe))), CPU
    )
    image = open_image_file(path, accelerator=accelerator)
    home = environment.variables.get("HOME")
    settings = {
        "format": image.format,
        "program": command[0],
        "arguments": list(command[1:]),
        "variables": {
            "HOME": home if home and _seen(home, binds) else "/tmp",
            **inherited(environment.variables),
            **variables,
        },
        "binds": list(binds),
        "folder_inside": folder or (os.getcwd() if _seen(os.getcwd(), binds) else "/"),
    }
    way = runtime.partition(":")[2]
    refused = []
    for method in (way,) if way else WAYS:
        try:
            return _start(image, method, settings, environment, log)
        except WayUnavailable as error:
            refused.append(f"{method}: {error}")
    raise HostError(
        f"{image.path} cannot be started here; {'; '.join(refused)}",
        f"choose another way: --runtime {' or '.join(f'{OWN}:{name}' for name in WAYS if name != way)}",
    )


def _seen(path: str, binds: Sequence[Bind]) -> bool:
    """Return whether a bind shows `path` of the host at the same path in the image."""
    return any(
        bind.host == os.path.normpath(bind.place) and PurePosixPath(path).is_relative_to(bind.host) for bind in binds
    )


def _start(image: ImageFile, way: str, settings: Mapping[str, Any], environment: Environment, log: Log) -> int:
    """Run the program and return its wait status. Raises WayUnavailable when `way` cannot open the image here."""
    # On the node's own disk: the store may be on a file system that all nodes share.
    with working_folder(Path(tempfile.gettempdir()), RUN, shared=True) as folder:
        spec = {**spec_of(image, way, folder, None, environment), **settings}
        if way == EXTRACT:
            size = image.path.stat().st_size >> 20
            log(
                f"unpacking {image.path.name} ({size} MiB) into {folder}; "
                "with squashfuse and /dev/fuse it would be mounted instead"
            )
            extract(image, folder / "image", environment.site.limits)
        for name in ("image", "root"):
            (folder / name).mkdir(exist_ok=True)
        return _supervised(spec, environment)


def _supervised(spec: Mapping[str, Any], environment: Environment) -> int:
    """Start the keeper, which holds the image open and runs the program, and wait for the program."""
    spare = supervise.descendants()  # children of a shell that `exec`ed envbuild
    supervise.inherit_orphans()
    held = supervise.hold_signals()
    ours, theirs = socket.socketpair()
    theirs.set_inheritable(True)
    keeper = None
    try:
        keeper = subprocess.Popen(
            [*START, "run", str(theirs.fileno())],
            env={"PATH": environment.variables.get("PATH", os.defpath)},
            close_fds=False,  # the program may need descriptors that the caller made inheritable, such as PMI's
        )
        theirs.close()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            ours.sendall(json.dumps(dict(spec)).encode())
            ours.shutdown(socket.SHUT_WR)
        with ours.makefile("rb") as answers:
            _judge(answers.readline())
            supervise.launcher_waits(keeper.pid, held)
            keeper.returncode = 0  # waited for above
            status = answers.readline()
        return int(status) if status else signal.SIGKILL  # someone killed the keeper
    finally:
        if keeper is not None and keeper.returncode is None:
            keeper.kill()
            keeper.wait()
        supervise.end_rest(spare)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, held)
        ours.close()


def _judge(line: bytes) -> None:
    """Raise the error that the keeper reports in `line`, if it reports one."""
    try:
        answer = json.loads(line)
    except ValueError:
        raise forbidden("the process that holds the image ended by itself") from None
    why = answer.get("why", "")
    match answer.get("failed"):
        case "image":
            raise WayUnavailable(why)
        case "bind":
            raise UsageError(f"--bind: {why}")
        case "folder":
            raise UsageError(
                f"the image does not have this working folder: {why}", "bind it, or choose another --workdir"
            )
        case "namespace":
            raise forbidden(why)
