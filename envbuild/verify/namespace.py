"""A mount namespace whose root is an image, and the programs started in it. Runs in separate processes.

`keep SPEC` makes the namespace (inside a user namespace if the user is not root), prints one line of JSON, and
holds the namespace until it is killed; no mount is left behind, whatever ended it. `enter KEEPER …` joins the
namespace of that keeper and becomes a program of the image. `run FD` makes a namespace for a single program.

Sources: mount_namespaces(7), user_namespaces(7), pivot_root(2), setns(2); doc/image-format.md of enroot.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import sys
from pathlib import Path
from typing import Any, NoReturn

from envbuild.verify import mounting, supervise
from envbuild.verify.mounting import BIND, NODEV, NOSUID, REC, StepFailed, call, die_with, mount

# Mount points in the image for the host's work folder and the libraries of its GPU driver.
WORK = "/envbuild-verify"
DRIVER = "/run/envbuild-driver"
_HOSTS = ("hosts", "resolv.conf")
_PATH = "/opt/env/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Apptainer's copy of an OCI image's variables; variables that are already set take precedence over them.
_OCI_VARIABLES = "/.singularity.d/env/10-docker2singularity.sh"
# A line of etc/rc before the one that starts the image's program: a comment or a variable.
_RC_LINE = re.compile(
    r"""(?:\#[^\n]*|(?:export\ (?P<path>PATH)|\[\ -n\ "\$\{(?P<name>\w+)\+set\}"\ \]\ \|\|\ export\ (?P=name))
    =(?P<value>(?:'[^']*'|"'")*))?\n""",
    re.ASCII | re.VERBOSE,
)
_QUOTED = re.compile(r"""'([^']*)'|"(')\"""")
_WAYS = {"mount": mounting.by_kernel, "squashfuse": mounting.by_fuse, "extract": mounting.as_extracted}


def main() -> NoReturn:
    """Run `keep SPEC`, `run FD` or `enter KEEPER KIND PROGRAM ARGUMENT…`."""
    what, *words = sys.argv[1:]
    if what == "keep":
        keep(json.loads(Path(words[0]).read_text(encoding="utf-8")))
    if what == "run":
        run(socket.socket(fileno=int(words[0])))
    enter(*words)


def keep(spec: dict[str, Any]) -> NoReturn:
    """Make the namespace that `spec` (own_runtime.py) describes, print one line of JSON, and hold the namespace."""
    fault = _make(spec, os.getppid(), signal.SIGKILL)
    print(json.dumps(fault), flush=True)
    if fault:
        sys.exit(1)
    while True:
        signal.pause()


def run(launcher: socket.socket) -> NoReturn:
    """Make the namespace that exec_image.py describes through the socket `launcher`, and run the program in it.

    The first line of the answer tells whether the namespace was made; the program then runs with this process's
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

    It cannot be removed while a mount point lies in it in this namespace; after the program `ended`, none is needed.
    """
    for point in reversed(mounting.mounts_below("/")):
        if ended or f"/{name}/" in point:
            with contextlib.suppress(OSError):
                call("umount2", os.fsencode(point), mounting.DETACH)
    shutil.rmtree(name, ignore_errors=True, dir_fd=above)


def _make(spec: dict[str, Any], parent: int, at_its_end: signal.Signals) -> dict[str, str]:
    """Make the namespace of `spec`; `at_its_end` comes when `parent` ends. Return the step that `failed`, and `why`."""
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
    """Become `program` of the image that process `keeper` holds; this process's variables override the image's."""
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
    """Become `program`, with `variables` over those of the image. Return the error if that fails."""
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
    """Return the variables of an enroot image, which always include PATH.

    `etc`/environment has one NAME=VALUE per line; enroot removes one pair of quotes around a value. Values that
    enroot would change there are in `etc`/rc instead (artifacts/enroot.py).
    """
    found = {"PATH": _PATH}
    for line in _text(f"{etc}/environment").split("\n"):
        name, equals, value = line.partition("=")
        if equals and name.isascii() and name.isidentifier():
            quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
            found[name] = value[1:-1] if quoted else value
    script, place = _text(f"{etc}/rc"), 0
    while match := _RC_LINE.match(script, place):  # in order: a value may contain such lines
        place = match.end()
        if name := match["name"] or match["path"]:
            found[name] = "".join(one or two for one, two in _QUOTED.findall(match["value"]))
    return found


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
            call("unshare", mounting.NEWNS)
        except OSError:  # root in a container without CAP_SYS_ADMIN
            user = True
    if user:
        call("unshare", mounting.NEWNS | mounting.NEWUSER)
        Path("/proc/self/setgroups").write_text("deny")
        # The user is root inside, so that the image's passwd has an entry; outside, the user's rights are unchanged.
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    call("prctl", mounting.SET_DUMPABLE, 1, 0, 0, 0)
    mount(None, "/", None, REC | mounting.SLAVE)


def _build(spec: dict[str, Any]) -> None:
    image, root = f"{spec['folder']}/image", f"{spec['folder']}/root"
    _WAYS[spec["way"]](spec, image)
    # The root is a tmpfs that shows the image's folders: mount points can be created in it although the image
    # is read-only.
    mount("tmpfs", root, "tmpfs", NOSUID | NODEV, "mode=0755")
    mounting.show_all(image, root, leave=("proc", "sys", "dev", "tmp", "run", "etc"))
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
        mounting.show_file(library, f"{root}{DRIVER}/{name}")
    if binds := spec.get("binds"):
        stash = f"{spec['folder']}/stash"
        os.mkdir(stash)
        mounting.show_binds(root, binds, stash)
    _change_root(root)


def _show_etc(etc: str, place: str) -> None:
    """Show the image's /etc with the host's name files, without which torch cannot resolve this host's address."""
    names = [name for name in _HOSTS if os.path.isfile(f"/etc/{name}")]
    os.mkdir(place)
    if os.path.isdir(etc):
        if all(os.path.isfile(f"{etc}/{name}") and not os.path.islink(f"{etc}/{name}") for name in names):
            mount(etc, place, None, BIND)
        else:  # files cannot be added to the image's folder, so each entry is mounted by itself
            mounting.show_all(etc, place, leave=names)
    for name in names:
        mounting.show_file(f"/etc/{name}", f"{place}/{name}")


def _change_root(root: str) -> None:
    os.chdir(root)
    try:
        # pivot_root(".", "."): the old root is mounted over the new one and then unmounted.
        call("pivot_root", b".", b".")
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        mount(".", "/", None, mounting.MOVE)  # on a diskless node, the host's root is an initramfs
        os.chroot(".")
    else:
        call("umount2", b".", mounting.DETACH)
    os.chdir("/")
