"""A mount namespace with an image as its root, and the programs started in it. Runs in separate processes.

`keep SPEC` makes the namespace (inside a user namespace if the user is not root), prints one line of JSON, and holds
the namespace until it is killed; the kernel then removes all mounts. `enter KEEPER …` joins the namespace of that
keeper and becomes a program of the image. `run FD` makes a namespace for a single program.

Mounts need no external tool, except squashfuse if the kernel refuses the squashfs. Needs only the standard library.
Sources: mount(2), mount_namespaces(7), user_namespaces(7), pivot_root(2), setns(2), prctl(2), proc(5), loop(4),
linux/loop.h, squashfuse(1); build/runtime_files.py (an image's variables).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from envbuild.base.host import read_mounts
from envbuild.verify import supervise
from envbuild.verify.supervise import call, die_with

RDONLY, NOSUID, NODEV = 1, 2, 4
# Flags of statvfs(3), and of mount(2).
_LOCKED = (
    (os.ST_NOSUID, NOSUID),
    (os.ST_NODEV, NODEV),
    (os.ST_NOEXEC, 8),
    (os.ST_NOATIME, 1 << 10),
    (os.ST_NODIRATIME, 1 << 11),
    (os.ST_RELATIME, 1 << 21),
)
_REMOUNT, BIND, MOVE, REC, SLAVE = 32, 4096, 8192, 16384, 1 << 19
DETACH = 2
NEWNS, NEWUSER = 0x00020000, 0x10000000
SET_DUMPABLE = 4
_LOOP_SET_FD, _LOOP_CLR_FD, _LOOP_SET_STATUS64 = 0x4C00, 0x4C01, 0x4C04
_LOOP_CONFIGURE, _LOOP_GET_FREE = 0x4C0A, 0x4C82
_FUSE_WAIT_S = 15.0
_MOST_LINKS = 40
# These are bind mounts of the host's own folders: mount points must not be created in them.
_OF_HOST = ("dev", "proc", "sys")

# (path on the host, path in the image, read-only)
Bind = tuple[str, str, bool]
# Mount points in the image for the host's work folder and the libraries of its GPU driver.
WORK = "/envbuild-verify"
DRIVER = "/run/envbuild-driver"
_HOSTS = ("hosts", "resolv.conf")
_PATH = "/opt/env/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# A SIF's copy of an OCI image's variables; variables that are already set take precedence over them.
_OCI_VARIABLES = "/.singularity.d/env/10-docker2singularity.sh"
# A line of etc/rc before the one that starts the image's program: a comment or a variable.
_RC_LINE = re.compile(
    r"""(?:\#[^\n]*|(?:export\ (?P<path>PATH)|\[\ -n\ "\$\{(?P<name>\w+)\+set\}"\ \]\ \|\|\ export\ (?P=name))
    =(?P<value>(?:'[^']*'|"'")*))?\n""",
    re.ASCII | re.VERBOSE,
)
_QUOTED = re.compile(r"""'([^']*)'|"(')\"""")


class StepFailed(Exception):
    """The failure of a step, "image" or "bind", on this host, with the reason."""


def by_kernel(spec: dict[str, Any], place: str) -> None:
    """Mount the image through a loop device, which the kernel frees after the last use. Raises StepFailed."""
    try:
        loop, device = _loop(spec["image"], spec["offset"])
    except OSError as error:
        raise StepFailed("image", f"no loop device: {error.strerror}") from error
    try:
        mount(device, place, "squashfs", RDONLY | NOSUID | NODEV)
    except OSError as error:
        why = "" if error.errno != errno.EINVAL else f", squashfs with {spec['compressor']} perhaps"
        raise StepFailed("image", f"the kernel refuses it{why}: {error.strerror}") from error
    finally:
        os.close(loop)


def _loop(file: str, offset: int) -> tuple[int, str]:
    """Return an open read-only loop device on `file`, which the kernel frees on close unless mounted, and its path."""
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    image = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    flags = 1 | 4  # LO_FLAGS_READ_ONLY, LO_FLAGS_AUTOCLEAR
    info = struct.pack("<5Q4I64s64s32s2Q", 0, 0, 0, offset, 0, 0, 0, 0, flags, b"", b"", b"", 0, 0)
    try:
        while True:
            device = f"/dev/loop{fcntl.ioctl(control, _LOOP_GET_FREE)}"
            loop = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
            try:
                _configure(loop, image, info)
                return loop, device
            except OSError as error:
                os.close(loop)
                if error.errno != errno.EBUSY:  # another process took the device first
                    raise
    finally:
        os.close(image)
        os.close(control)


def _configure(loop: int, image: int, info: bytes) -> None:
    try:
        fcntl.ioctl(loop, _LOOP_CONFIGURE, struct.pack("<II", image, 0) + info + bytes(64))
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTTY):
            raise
        fcntl.ioctl(loop, _LOOP_SET_FD, image)  # kernels before Linux 5.8
        try:
            fcntl.ioctl(loop, _LOOP_SET_STATUS64, info)
        except OSError:
            fcntl.ioctl(loop, _LOOP_CLR_FD)
            raise


def by_fuse(spec: dict[str, Any], place: str) -> None:
    """Mount the image with squashfuse, which is killed when this process ends. Raises StepFailed."""
    before = os.stat(place).st_dev
    options = f"ro,offset={spec['offset']}" if spec["offset"] else "ro"
    keeper = os.getpid()
    with open(f"{spec['folder']}/squashfuse.log", "w+b") as log:
        child = subprocess.Popen(
            [spec["tool"], "-f", "-o", options, spec["image"], place],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=lambda: die_with(keeper, signal.SIGKILL),
        )
        deadline = time.monotonic() + _FUSE_WAIT_S
        while child.poll() is None and time.monotonic() < deadline:
            if os.stat(place).st_dev != before:
                return
            time.sleep(0.005)
        child.kill()
        child.wait()
        log.seek(0)
        output = log.read(4096).decode(errors="replace").strip()
    raise StepFailed("image", output or "squashfuse mounted nothing")


def as_extracted(spec: dict[str, Any], place: str) -> None:
    """Make the unpacked image read-only, like a mounted image."""
    mount(place, place, None, BIND)
    read_only(place)


_WAYS = {"mount": by_kernel, "squashfuse": by_fuse, "extract": as_extracted}


def read_only(place: str) -> None:
    """Remount `place` read-only."""
    status = os.statvfs(place).f_flag
    # The remount must repeat the flags that an outer namespace locked, or the kernel refuses it.
    locked = sum(flag for has, flag in _LOCKED if status & has)
    mount(None, place, None, _REMOUNT | BIND | RDONLY | locked)


def mount(source: str | None, place: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """Call mount(2). Raises OSError whose message names source and mount point."""
    texts = [None if text is None else os.fsencode(text) for text in (source, place, kind, options)]
    try:
        call("mount", *texts[:3], ctypes.c_ulong(flags), texts[3])
    except OSError as error:
        action = f"mount {source or kind or 'again'} at {place}"
        raise OSError(error.errno, f"{action}: {os.strerror(error.errno or 0)}") from None


def show_binds(root: str, binds: Sequence[Bind], stash: str) -> None:
    """Bind-mount each of `binds`, parents first, below `root`, after all other mounts.

    `stash` is an empty scratch folder outside of `root`. Raises StepFailed.
    """
    ordered = sorted(binds, key=lambda bind: os.path.normpath(bind[1]).count("/"))
    # Create all mount points before the first mount, so that none is created in a folder of the host.
    for number, (host, place, _) in enumerate(ordered):
        _make_mount_point(root, place, os.path.isdir(host), f"{stash}/{number}")
    for host, place, readonly in ordered:
        here = root + _resolved(root, place)
        try:
            mount(host, here, None, BIND | REC)
            if readonly:
                for point in mounts_below(here):
                    read_only(point)
        except OSError as error:
            raise StepFailed("bind", f"{host} cannot be shown at {place}: {error.strerror}") from None


def _make_mount_point(root: str, place: str, folder: bool, stash: str) -> None:
    """Create the mount point `place`, a folder or an empty file, unless it exists."""
    above = root
    names = _resolved(root, place).strip("/").split("/")
    if names == [""]:
        raise StepFailed("bind", "nothing can be shown at / instead of the image")
    for depth, name in enumerate(names, start=1):
        here, wants_folder = f"{above}/{name}", folder or depth < len(names)
        if not os.path.lexists(here):
            if names[0] in _OF_HOST:
                raise StepFailed("bind", f"/{names[0]} is the host's own and has no {place}")
            if not os.access(above, os.W_OK) or os.statvfs(above).f_flag & os.ST_RDONLY:
                _open_up(above, f"{stash}.{depth}")
            if wants_folder:
                os.mkdir(here)
            else:
                os.close(os.open(here, os.O_CREAT | os.O_WRONLY, 0o644))
        elif os.path.isdir(here) != wants_folder:
            expected, present = ("a folder", "a file") if wants_folder else ("a file", "a folder")
            raise StepFailed(
                "bind", f"{place}: {expected} is to be shown, and /{'/'.join(names[:depth])} of the image is {present}"
            )
        above = here


def _open_up(folder: str, stash: str) -> None:
    """Mount a tmpfs over `folder`, so that it becomes writable, and bind the old content into it."""
    os.mkdir(stash)
    mount(folder, stash, None, BIND | REC)
    mount("tmpfs", folder, "tmpfs", NOSUID | NODEV, "mode=0755")
    show_all(stash, folder, flags=REC)


def show_all(folder: str, place: str, *, leave: Sequence[str] = (), flags: int = 0) -> None:
    """Bind each file and folder in `folder`, except the names in `leave`, into the writable folder `place`."""
    for entry in os.scandir(folder):
        here = f"{place}/{entry.name}"
        if entry.name in leave:
            continue
        if entry.is_symlink():
            os.symlink(os.readlink(entry.path), here)
        elif entry.is_dir():
            os.mkdir(here)
            mount(entry.path, here, None, BIND | flags)
        elif entry.is_file():
            show_file(entry.path, here)


def show_file(source: str, place: str) -> None:
    """Bind the file `source` to `place`, which is created if it does not exist."""
    if not os.path.exists(place):
        os.close(os.open(place, os.O_CREAT))
    mount(os.path.realpath(source), place, None, BIND)


def _resolved(root: str, place: str) -> str:
    """Return `place` with symbolic links resolved relative to `root`."""
    done: list[str] = []
    todo = place.split("/")
    links = 0
    while todo:
        name = todo.pop(0)
        here = "/".join((root, *done, name))
        if name in ("", "."):
            continue
        if name == "..":
            del done[-1:]
        elif not os.path.islink(here):
            done.append(name)
        else:
            links += 1
            if links > _MOST_LINKS:
                raise StepFailed("bind", f"{place}: too many symbolic links in the image")
            target = os.readlink(here)
            if target.startswith("/"):
                done.clear()
            todo[:0] = target.split("/")
    return "/" + "/".join(done)


def mounts_below(place: str) -> list[str]:
    """Return the mount points at and below `place`."""
    below = place.rstrip("/") + "/"
    return [m.at for m in read_mounts() if m.at == place or m.at.startswith(below)]


def main() -> NoReturn:
    """Run `keep SPEC`, `run FD` or `enter KEEPER KIND PROGRAM ARGUMENT…`."""
    command, *words = sys.argv[1:]
    if command == "keep":
        keep(json.loads(Path(words[0]).read_text(encoding="utf-8")))
    if command == "run":
        run(socket.socket(fileno=int(words[0])))
    enter(*words)


def keep(spec: dict[str, Any]) -> NoReturn:
    """Make the namespace of `spec` (see runtimes.py), print one line of JSON, and hold the namespace."""
    fault = _make(spec, os.getppid(), signal.SIGKILL)
    print(json.dumps(fault), flush=True)
    if fault:
        sys.exit(1)
    while True:
        signal.pause()


def run(launcher: socket.socket) -> NoReturn:
    """Make the namespace that exec_image.py describes through the socket `launcher`, and run the program in it.

    The first line of the answer reports whether the namespace was made; the program then runs with this process's
    streams, and its wait status is the second line.
    """
    parent = os.getppid()
    launcher.set_inheritable(False)
    held = supervise.hold_signals()
    with launcher.makefile("rb") as stream:
        spec = json.load(stream)
    folder = Path(spec["folder"])
    above = os.open(folder.parent, os.O_RDONLY | os.O_DIRECTORY)
    # After a kill of the launcher, which shares this lock, no other run removes the folder of a running program.
    with contextlib.suppress(OSError):
        fcntl.flock(os.open(folder, os.O_RDONLY | os.O_DIRECTORY), fcntl.LOCK_SH | fcntl.LOCK_NB)
    fault = _make(spec, parent, signal.SIGTERM)
    if not fault:
        if spec["way"] != "extract":  # it is needed no longer, and after a kill of the launcher nobody else is left
            _remove(folder.name, above)
        try:
            os.chdir(spec["folder_inside"])
        except OSError as error:
            fault = {"failed": "folder", "why": f"{spec['folder_inside']}: {error.strerror}"}
    launcher.sendall(json.dumps(fault).encode() + b"\n")
    if fault:
        sys.exit(1)

    def become() -> NoReturn:
        error = _become(spec["format"], spec["program"], tuple(spec["arguments"]), spec["variables"])
        print(f"{spec['program']}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127 if error.errno == errno.ENOENT else 126)

    def ended(status: int) -> None:
        with contextlib.suppress(OSError):  # the launcher may have been killed
            launcher.sendall(f"{status}\n".encode())

    supervise.keep_program(become, held, parent, ended)
    if spec["way"] == "extract" and os.getppid() != parent:  # otherwise the launcher removes the folder
        _remove(folder.name, above, ended=True)
    os._exit(0)


def _remove(name: str, above: int, ended: bool = False) -> None:
    """Remove the folder `name` in the open folder `above`, which a bind may show in the image, too.

    Mount points in it are unmounted first; all mount points of the namespace if the program `ended`.
    """
    for point in reversed(mounts_below("/")):
        if ended or f"/{name}/" in point:
            with contextlib.suppress(OSError):
                call("umount2", os.fsencode(point), DETACH)
    shutil.rmtree(name, ignore_errors=True, dir_fd=above)


def _make(spec: dict[str, Any], parent: int, at_its_end: signal.Signals) -> dict[str, str]:
    """Make the namespace of `spec`; `at_its_end` is sent when `parent` ends. Return the `failed` step, and `why`."""
    try:
        _isolate()
        # An exec or a change of credentials may have cleared the parent-death signal that the parent set.
        die_with(parent, at_its_end)
        _build(spec)
    except StepFailed as error:
        return dict(zip(("failed", "why"), error.args, strict=True))
    except OSError as error:
        return {"failed": "namespace", "why": error.strerror or str(error)}
    return {}


def enter(keeper: str, image_format: str, program: str, *arguments: str) -> NoReturn:
    """Replace this process by `program` in the namespace of process `keeper`.

    Variables of this process override those of the image.
    """
    parent = os.getppid()
    try:
        user, mounts = (os.open(f"/proc/{keeper}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC) for name in ("user", "mnt"))
    except OSError as gone:  # as after pkill, or where the kernel ran out of memory
        sys.exit(f"process {keeper}, which holds the image, was killed ({gone.strerror}): verify the image again")
    # setns(2) fails for the user namespace that the process is already in.
    if not os.path.sameopenfile(user, os.open("/proc/self/ns/user", os.O_RDONLY)):
        call("setns", user, 0)
    call("setns", mounts, 0)
    die_with(parent, signal.SIGTERM)
    os.chdir(WORK)
    os.environ.pop("LC_CTYPE", None)  # set by Python itself when there is no locale (PEP 538)
    error = _become(image_format, program, arguments, {"HOME": "/tmp", **os.environ})
    sys.exit(f"{program}: {error.strerror}")


def _become(image_format: str, program: str, arguments: tuple[str, ...], variables: dict[str, str]) -> OSError:
    """Replace this process by `program`, with `variables` over the image's. Return the error if that fails."""
    driver = DRIVER if os.path.isdir(DRIVER) else ""
    if image_format == "sif" and os.path.exists(_OCI_VARIABLES):
        extend = f"export LD_LIBRARY_PATH={driver}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}; "
        script = f'. {_OCI_VARIABLES}; {extend if driver else ""}exec "$0" "$@"'
        program, arguments = "/bin/sh", ("-c", script, program, *arguments)
    else:
        variables = image_variables() | variables
        if driver:
            before = variables.get("LD_LIBRARY_PATH")
            variables["LD_LIBRARY_PATH"] = f"{driver}:{before}" if before else driver
    # As execvpe(3) does, with the image's PATH. os.execvpe may import modules, which fails once the host's root is
    # replaced.
    failed: OSError = FileNotFoundError(errno.ENOENT, "not found in the image")
    for folder in [""] if "/" in program else variables.get("PATH", _PATH).split(":"):
        try:
            os.execve(os.path.join(folder, program), [program, *arguments], variables)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:  # not executable; execvp(3) goes on too
            failed = error
    return failed


def image_variables(etc: str = "/etc") -> dict[str, str]:
    """Return the variables of a .sqsh, always with PATH.

    `etc`/environment has one NAME=VALUE per line; one pair of quotes around a value is removed. Values that this would
    change are in `etc`/rc instead (build/runtime_files.py).
    """
    variables = {"PATH": _PATH}
    for line in _text(f"{etc}/environment").split("\n"):
        name, equals, value = line.partition("=")
        if equals and name.isascii() and name.isidentifier():
            quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
            variables[name] = value[1:-1] if quoted else value
    script, place = _text(f"{etc}/rc"), 0
    while match := _RC_LINE.match(script, place):  # in order: a value may contain such lines
        place = match.end()
        if name := match["name"] or match["path"]:
            variables[name] = "".join(quoted_text or two for quoted_text, two in _QUOTED.findall(match["value"]))
    return variables


def _text(file: str) -> str:
    try:
        return Path(file).read_bytes().decode(errors="surrogateescape")
    except OSError:
        return ""


def _isolate() -> None:
    """Leave the host's mount namespace, through a user namespace if the user lacks the privilege."""
    uid, gid = os.geteuid(), os.getegid()
    user = uid != 0
    if not user:
        try:
            call("unshare", NEWNS)
        except OSError:  # root in a container without CAP_SYS_ADMIN
            user = True
    if user:
        call("unshare", NEWNS | NEWUSER)
        Path("/proc/self/setgroups").write_text("deny")
        # The user is root inside, so that the image's passwd has an entry; outside, the user's rights are unchanged.
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    call("prctl", SET_DUMPABLE, 1, 0, 0, 0)
    mount(None, "/", None, REC | SLAVE)


def _build(spec: dict[str, Any]) -> None:
    image, root = f"{spec['folder']}/image", f"{spec['folder']}/root"
    _WAYS[spec["way"]](spec, image)
    # The root is a tmpfs that shows the image's folders: mount points can be created in it although the image
    # is read-only.
    mount("tmpfs", root, "tmpfs", NOSUID | NODEV, "mode=0755")
    show_all(image, root, leave=("proc", "sys", "dev", "tmp", "run", "etc"))
    _show_etc(f"{image}/etc", f"{root}/etc")
    for name in ("proc", "sys", "dev", "tmp", "run"):
        os.mkdir(f"{root}/{name}")
    for name in ("proc", "sys", "dev"):
        mount(f"/{name}", f"{root}/{name}", None, BIND | REC)
    for folder in (f"{root}/tmp", f"{root}/run", f"{root}/var/tmp"):
        if os.path.isdir(folder) and not os.path.islink(folder):
            mount("tmpfs", folder, "tmpfs", NOSUID | NODEV, "mode=1777")
    if spec["work"]:
        os.mkdir(root + WORK)
        mount(spec["work"], root + WORK, None, BIND)
    if spec["libraries"]:
        os.mkdir(root + DRIVER)
    for name, library in spec["libraries"].items():
        show_file(library, f"{root}{DRIVER}/{name}")
    if binds := spec.get("binds"):
        stash = f"{spec['folder']}/stash"
        os.mkdir(stash)
        show_binds(root, binds, stash)
    _change_root(root)


def _show_etc(etc: str, place: str) -> None:
    """Bind the host's name files into the image's /etc: torch needs them to resolve this host's address."""
    names = [name for name in _HOSTS if os.path.isfile(f"/etc/{name}")]
    os.mkdir(place)
    if os.path.isdir(etc):
        if all(os.path.isfile(f"{etc}/{name}") and not os.path.islink(f"{etc}/{name}") for name in names):
            mount(etc, place, None, BIND)
        else:  # files cannot be added to the image's folder, so each entry is mounted by itself
            show_all(etc, place, leave=names)
    for name in names:
        show_file(f"/etc/{name}", f"{place}/{name}")


def _change_root(root: str) -> None:
    os.chdir(root)
    try:
        # pivot_root(".", "."): the old root is mounted over the new one and then unmounted.
        call("pivot_root", b".", b".")
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        mount(".", "/", None, MOVE)  # on a diskless node, the host's root is an initramfs
        os.chroot(".")
    else:
        call("umount2", b".", DETACH)
    os.chdir("/")
