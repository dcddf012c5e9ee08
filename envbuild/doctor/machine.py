"""Checks of this host: processors, memory, GPUs, user, clock, locale, name, kernel and file systems."""

from __future__ import annotations

import contextlib
import ctypes
import getpass
import gzip
import io
import ipaddress
import json
import os
import platform
import re
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import envbuild
from envbuild.base import host as granted
from envbuild.base.errors import EnvbuildError
from envbuild.base.host import Mount, mount_of, read_mounts
from envbuild.base.text import human_size
from envbuild.data import load_table
from envbuild.doctor.probe import Host, HostFinding, Status, find, first_line, read_text, run_probe
from envbuild.environment import Environment
from envbuild.gpus import gpu_of
from envbuild.image.squashfs.model import NAMES, codec_of
from envbuild.image.squashfs.tables import data_start, write_tables
from envbuild.site.pip_config import PipConfig
from envbuild.site.settings import Site
from envbuild.store.store import Store

_ENOUGH_MEMORY = 3 << 30
_ENOUGH_SHM = 1 << 30
# adjtimex(2): the state of an unsynchronised clock.
_TIME_ERROR = 5


def who(host: Host) -> list[HostFinding]:
    """Report the current user."""
    user = os.getuid()
    text = "root" if os.geteuid() == 0 else f"user {user}; nothing here needs root"
    return [HostFinding("user", "ok", text, facts={"uid": user})]


def processors(host: Host) -> list[HostFinding]:
    """Report the number of available processors."""
    ours, all_ = granted.workers(host.variables, 4096, root=host.root), os.cpu_count() or 1
    text = f"{ours} of {all_}" if ours != all_ else f"{all_}"
    return [HostFinding("processors", "ok", text, facts={"usable": ours, "all": all_})]


def memory(host: Host) -> list[HostFinding]:
    """Check the available memory."""
    usable = granted.memory(host.variables, root=host.root)
    if usable is None:
        return [HostFinding("memory", "info", "not known")]
    text, facts = f"{human_size(usable)} available to us", {"usable": usable}
    if usable >= _ENOUGH_MEMORY:
        return [HostFinding("memory", "ok", text, facts=facts)]
    hint = "two ranks with torch need about 1.5 GB; ask for more in a job, or free some"
    return [HostFinding("memory", "warn", text, hint, facts)]


def shared_memory(host: Host) -> list[HostFinding]:
    """Check /dev/shm, through which data loaders and NCCL exchange data."""
    name, place = "/dev/shm", host.root / "dev/shm"
    try:
        about = os.statvfs(place)
    except OSError as error:
        return [HostFinding(name, "warn", f"{error.strerror}", "mount a tmpfs there: loaders with workers need it")]
    size = about.f_blocks * about.f_frsize
    if not size or not os.access(place, os.W_OK):
        return [HostFinding(name, "warn", "cannot be written", "loaders of data and NCCL need it: mode 1777")]
    if size >= _ENOUGH_SHM:
        return [HostFinding(name, "ok", human_size(size), facts={"size": size})]
    hint = "docker run --shm-size=8g, or in a pod an emptyDir of medium Memory ([kubernetes] shm)"
    return [HostFinding(name, "warn", human_size(size), hint, {"size": size})]


def gpus(host: Host) -> list[HostFinding]:
    """Check NVIDIA GPUs (driver, listed GPUs, driver library), else AMD GPUs."""
    loaded = re.search(r"Module(?:\s+for \S+)?\s+(\d[\d.]+)", read_text(host.root / "proc/driver/nvidia/version"))
    driver = loaded[1] if loaded else ""
    tool = find("nvidia-smi", host.variables)
    listed: list[list[str]] = []
    trouble = ""
    if tool:
        fields = "--query-gpu=name,driver_version,memory.total"
        code, output = run_probe([tool, fields, "--format=csv,noheader"], host.variables)
        rows = [re.split(r"\s*,\s*", line.strip()) for line in output.splitlines()]
        listed = [row for row in rows if len(row) == 3] if code == 0 else []
        trouble = "" if code == 0 else first_line(output)
    devices = sorted(path.name for path in (host.root / "dev").glob("nvidia[0-9]*"))
    library = _libcuda(host)
    names = [row[0] for row in listed]
    known = driver or (listed[0][1] if listed else "")
    facts: dict[str, Any] = {"gpus": names, "driver": known, "devices": devices, "libcuda": library}
    if listed:
        code, output = run_probe([str(tool), "--query-gpu=compute_cap", "--format=csv,noheader"], host.variables)
        versions = re.findall(r"^(\d{1,2})\.(\d)\s*$", output, re.MULTILINE) if code == 0 else []
        facts["chips"] = sorted({f"sm_{major}{minor}" for major, minor in versions})
        counted = ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))
        facts["cuda"] = _cuda(known)
        if library:
            cuda = f" (CUDA {', '.join(facts['cuda'])})" if facts["cuda"] else ""
            driver_finding = HostFinding("GPU", "ok", f"{counted}, driver {known}{cuda}, {library}", facts=facts)
            return [driver_finding, *_imex(host, names)]
        hint = "install the driver's libraries, or pass them into this container (--gpus all, --nv)"
        return [HostFinding("GPU", "warn", f"{counted}, but libcuda.so.1 is not found", hint, facts)]
    if tool or driver or devices:
        parts = [f"driver {driver}" if driver else "no driver is loaded"]
        parts += [f"nvidia-smi: {trouble}"] if trouble else ([] if tool else ["no nvidia-smi"])
        parts += [", ".join(devices)] if devices else ["no /dev/nvidia0"]
        hint = "load or repair NVIDIA's driver (dmesg tells why), or ask the job for GPUs"
        if driver and not devices:
            hint = "this container was started without its GPUs (--gpus all, --nv)"
        return [HostFinding("GPU", "warn", "; ".join(parts), hint, facts)]
    if (host.root / "dev/kfd").exists():
        return [_amd(host)]
    text = "none: artifacts for CUDA can be built here, not verified"
    return [HostFinding("GPU", "info", text, "verify them in a job on a node with GPUs", facts)]


def _imex(host: Host, names: Sequence[str]) -> list[HostFinding]:
    """Check the channels of NVIDIA's IMEX if NVLink may join hosts with GPUs called `names`."""
    row = load_table("gpus")["multi_node_nvlink"]
    if set(row["names"]).isdisjoint(map(gpu_of, names)):
        return []
    folder: str = row["devices"]
    readable, others = list[str](), list[str]()
    for channel in sorted((host.root / folder[1:]).glob("channel*")):
        try:
            os.close(os.open(channel, os.O_RDONLY))
            readable.append(channel.name)
        except OSError as error:
            others.append(f"{folder}/{channel.name}: {error.strerror}")
    facts = {"channels": readable}
    if readable:
        return [HostFinding("IMEX", "ok", f"{', '.join(readable[:3])} can be read", facts=facts)]
    if others:
        hint = "let the administrator change its mode, or allow it in the job's control group"
        return [HostFinding("IMEX", "warn", others[0], hint, facts)]
    hint = "NVLink between hosts (GB200 NVL72) needs one in each job: Slurm's switch/nvidia_imex or a ComputeDomain"
    return [HostFinding("IMEX", "info", f"no channel in {folder}", hint, facts)]


def _amd(host: Host) -> HostFinding:
    """Check AMD GPUs as the kernel driver lists them: topology nodes with compute units."""
    paths = (host.root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties")
    nodes = [text for text in map(read_text, paths) if re.search(r"^simd_count [1-9]", text, re.MULTILINE)]
    count = len(nodes)
    # 90010 is gfx90a: two decimal digits each for minor version and stepping, which the name has in hexadecimal.
    versions = {int(n) for text in nodes for n in re.findall(r"^gfx_target_version (\d{5,6})$", text, re.MULTILINE)}
    driver = read_text(host.root / "sys/module/amdgpu/version").strip()
    facts = {"gpus": ["AMD"] * count, "driver": driver, "devices": ["kfd"]}
    facts["chips"] = [f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}" for version in sorted(versions)]
    gpus_text = f"{count} × AMD, driver {driver or 'of the kernel'}"
    if os.access(host.root / "dev/kfd", os.R_OK | os.W_OK) and count:
        return HostFinding("GPU", "ok", gpus_text, facts=facts)
    hint = "join the groups that own /dev/kfd and /dev/dri (render, video), or ask the job for GPUs"
    return HostFinding("GPU", "warn", f"{gpus_text}, but /dev/kfd cannot be used", hint, facts)


def _libcuda(host: Host) -> str:
    """Return the path of the driver's library, found as verification finds it, or ""."""
    from envbuild.verify.image_runtime import cached, named

    if tool := find("nvidia-container-cli", host.variables):
        code, output = run_probe([tool, "list", "--libraries"], host.variables)
        if code == 0 and (libraries := named(output.split())):
            return libraries.get("libcuda.so.1", "")
    if tool := find("ldconfig", host.variables):
        return named(cached(run_probe([tool, "-p"], host.variables)[1])).get("libcuda.so.1", "")
    return ""


def _cuda(driver: str) -> list[str]:
    """Return the major CUDA versions that a driver supports (data/compatibility.toml)."""
    from envbuild.compat.rows import load_rows, older

    fitting = (row for row in load_rows().drivers if older(driver, row.minimum) is False)
    return [row.cuda.removeprefix(">=").partition(",")[0] for row in fitting]


def clock(host: Host) -> list[HostFinding]:
    """Check whether the clock is plausible and synchronised."""
    newest = max((path.stat().st_mtime for path in Path(envbuild.__file__).parent.glob("*.py")), default=0.0)
    now = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    if time.time() < newest - 86400:
        hint = "set the clock (chrony, ntpd): certificates are refused and builds are dated wrongly"
        return [HostFinding("clock", "warn", f"{now} is before envbuild itself was written", hint)]
    function = getattr(ctypes.CDLL(None), "adjtimex", None)
    # struct timex, all 0: read only
    state = None if function is None else function(ctypes.create_string_buffer(512))
    if state == _TIME_ERROR:
        text = f"{now}; the kernel does not report a synchronised clock"
        hint = "on cluster nodes let chrony or ntpd run; in a virtual machine its host may do it"
        return [HostFinding("clock", "info", text, hint, {"synchronised": False})]
    return [HostFinding("clock", "ok", now, facts={"synchronised": state is not None and state >= 0})]


def locale(host: Host) -> list[HostFinding]:
    """Check whether file names and output use UTF-8, and whether the configured locale exists."""
    named = next((host.variables[n] for n in ("LC_ALL", "LC_CTYPE", "LANG") if host.variables.get(n)), "")
    encoding = sys.getfilesystemencoding()
    if encoding.lower() != "utf-8":
        text = f"{named or 'none'}: names of files are {encoding}"
        return [HostFinding("locale", "warn", text, "export LC_ALL=C.UTF-8")]
    tool = find("locale", host.variables)
    if named and tool:
        code, output = run_probe([tool, "-a"], host.variables)
        known = {_plain(line) for line in output.splitlines()} if code == 0 else set()
        if known and _plain(named) not in known | {"c", "posix"}:
            hint = "export LC_ALL=C.UTF-8, or let the administrator generate it (locale-gen)"
            return [HostFinding("locale", "warn", f"{first_line(named)} is not installed", hint)]
    return [HostFinding("locale", "ok", f"{first_line(named) or 'none named'}, {encoding}")]


def _plain(name: str) -> str:
    return name.strip().lower().replace("-", "")


def own_name(host: Host) -> list[HostFinding]:
    """Check whether this host's name resolves to an address that other hosts reach, not to Debian's 127.0.1.1."""
    name = socket.gethostname()
    lines = (line.partition("#")[0].split() for line in read_text(host.root / "etc/hosts").splitlines())
    in_file = [words[0] for words in lines if name in words[1:]]
    facts: dict[str, Any] = {"hostname": name, "hosts": in_file}
    if loop := next(filter(_loopback, in_file), None):
        hint = (
            "harmless to jobs that envbuild writes, which pass addresses on; elsewhere torchrun's nodes "
            f"meet at {loop} or hang: give {name} its own address in /etc/hosts"
        )
        return [HostFinding("own name", "warn", f"/etc/hosts gives {loop} for {name}", hint, facts)]
    try:
        addresses = sorted({str(row[4][0]) for row in socket.getaddrinfo(name, None)})
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        hint = f"give {name} its address in /etc/hosts or DNS: torchrun without --local-addr stops at once"
        return [HostFinding("own name", "warn", f"{name} means no address: {why}", hint, facts)]
    text = f"{name} means {', '.join(addresses)}"
    if all(map(_loopback, addresses)):
        return [
            HostFinding("own name", "warn", f"{text} alone", f"give {name} its own address in /etc/hosts or DNS", facts)
        ]
    return [HostFinding("own name", "ok", text, facts={**facts, "addresses": addresses})]


def _loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


# The compressors that Linux knows.
COMPRESSORS = {name: number for number, name in NAMES.items() if name != "lzma"}
# Imports only envbuild and Python's own modules, independent of the caller's variables and current folder.
_BOOT = "import sys; sys.path.insert(0, sys.argv.pop(1)); from envbuild.doctor.machine import main; main()"
_START = (sys.executable, "-I", "-c", _BOOT, str(Path(__file__).parents[2]))
_ANSWERS = "answers"
# Result for a skipped trial: only root mounts images.
_NO = (False, "only root mounts images", "")
_EXTRACTED = ("extract", "gzip")
_TRIALS_S = 3.5
# Settings of the kernel that restrict namespaces.
_SETTINGS = (
    "user/max_user_namespaces",
    "user/max_mnt_namespaces",
    "kernel/unprivileged_userns_clone",
    "kernel/apparmor_restrict_unprivileged_userns",
)


def launching(host: Host) -> Iterator[HostFinding]:
    """Check envbuild's own launch: squashfs mounts by the kernel, squashfuse, extraction."""
    with tempfile.TemporaryDirectory(prefix="envbuild-doctor-", ignore_cleanup_errors=True) as folder:
        _, trouble = run_probe([*_START, folder], host.variables, _TRIALS_S)
        answers = _answers(Path(folder))
    works, why, hint = answers.get(_EXTRACTED, (False, f"could not be tried: {first_line(trouble)}", ""))
    if not works:
        settings = {name.replace("/", "."): read_text(host.root / "proc/sys" / name).strip() for name in _SETTINGS}
        forbidden = {name: value for name, value in settings.items() if value}
        facts = {"ways": [], "forbidden": forbidden} if _EXTRACTED in answers else {"ways": []}
        yield HostFinding("own launch", "warn", why, hint, facts)
        yield _configured(host, "not tried")
        return
    mounted = [name for name in COMPRESSORS if answers.get(("mount", name), _NO)[0]]
    by_fuse, _, _ = answers.get(("squashfuse", "gzip"), _NO)
    possible = {"mount": bool(mounted), "squashfuse": by_fuse, "extract": True}
    ways = [way for way, works in possible.items() if works]
    text = f"works by {', '.join(ways)}"
    if len(ways) > 1:
        yield HostFinding("own launch", "ok", text, facts={"ways": ways})
    else:
        slow = "install squashfuse, and let users open /dev/fuse: unpacking is slower"
        yield HostFinding("own launch", "info", text, slow, {"ways": ways})
    if mounted:
        lacking = ", ".join(name for name in COMPRESSORS if name not in mounted)
        text = f"Linux {platform.release()} mounts {', '.join(mounted)}" + (f"; not {lacking}" if lacking else "")
        yield HostFinding("squashfs", "ok", text, facts={"kernel": mounted, "by": "mounting"})
    else:
        yield _configured(host, answers.get(("mount", "gzip"), _NO)[1])


def _answers(folder: Path) -> dict[tuple[str, str], tuple[bool, str, str]]:
    """Return the results that `main` has written so far, by method and compressor."""
    answers = {}
    for line in read_text(folder / _ANSWERS).splitlines():
        with contextlib.suppress(ValueError):  # an incomplete last line
            way, compressor, works, why, hint = json.loads(line)
            answers[way, compressor] = (works, why, hint)
    return answers


def _configured(host: Host, why: str) -> HostFinding:
    """Report the kernel configuration of squashfs when mounts could not be tested."""
    release, text = platform.release(), ""
    with contextlib.suppress(OSError, EOFError):
        text = gzip.decompress((host.root / "proc/config.gz").read_bytes()).decode(errors="replace")
    places = (f"boot/config-{release}", f"lib/modules/{release}/config")
    text = text or next(filter(None, (read_text(host.root / place) for place in places)), "")
    if not text:
        return HostFinding("squashfs", "info", f"not known ({why}; the kernel's configuration is not here)")
    on = {line.partition("=")[0] for line in text.splitlines() if line.endswith(("=y", "=m"))}
    options = {name: "ZLIB" if name == "gzip" else name.upper() for name in COMPRESSORS}
    there = [name for name, option in options.items() if {"CONFIG_SQUASHFS", f"CONFIG_SQUASHFS_{option}"} <= on]
    squashfs_text = f"Linux {release} has {', '.join(there) or 'no squashfs'} by its configuration ({why})"
    return HostFinding(
        "squashfs", "ok" if there else "warn", squashfs_text, facts={"kernel": there, "by": "configuration"}
    )


def main() -> None:
    """Write each result to FOLDER/answers (FOLDER is the first argument), one line each, as soon as it is known."""
    from envbuild.verify.image_runtime import EXTRACT, MOUNT, SQUASHFUSE

    folder = Path(sys.argv[1])
    mounts = [(MOUNT, name) for name in COMPRESSORS] if os.geteuid() == 0 else []
    with (folder / _ANSWERS).open("w", encoding="utf-8") as answers:
        for way, compressor in ((EXTRACT, "gzip"), (SQUASHFUSE, "gzip"), *mounts):
            answer = [way, compressor, *_attempt(folder, way, compressor)]
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


def _attempt(folder: Path, way: str, compressor: str) -> tuple[bool, str, str]:
    """Return (success, reason of a failure, hint) of a launch of a tiny image by the method `way`."""
    from envbuild.contract.kinds import ENROOT
    from envbuild.verify.image_file import ImageFile
    from envbuild.verify.image_runtime import own_runtime

    image = folder / f"{compressor}.sqsh"
    image.write_bytes(tiny_image(compressor))
    store = folder / "store"
    environment = Environment(dict(os.environ), Site(store=store), PipConfig(), Store(store))
    try:
        own_runtime(ImageFile(image, ENROOT.name, 0, compressor), way, environment)
    except EnvbuildError as error:
        return False, error.message.splitlines()[0], error.hint or ""
    return True, "", ""


def tiny_image(compressor: str) -> bytes:
    """Return an empty squashfs with uncompressed blocks: only its superblock names the compressor."""
    # Only lz4 requires compressor options: version 1, no flags.
    options = struct.pack("<II", 1, 0) if compressor == "lz4" else b""
    codec = replace(codec_of("xz"), number=COMPRESSORS[compressor], options=options, compress=bytes)
    image = io.BytesIO()
    image.seek(data_start(codec))
    write_tables(image, 0, [], [], codec, 0)
    return image.getvalue()


def fuse(host: Host) -> list[HostFinding]:
    """Check whether /dev/fuse can be opened."""
    device = host.root / "dev/fuse"
    if not device.exists():
        hint = "modprobe fuse; in a container, pass --device /dev/fuse"
        return [HostFinding("/dev/fuse", "info", "not there: nothing is mounted by squashfuse", hint)]
    try:
        os.close(os.open(device, os.O_RDWR))
    except OSError as error:
        hint = "let the administrator run `chmod 0666 /dev/fuse`"
        return [HostFinding("/dev/fuse", "info", f"{error.strerror}", hint)]
    return [HostFinding("/dev/fuse", "ok", "can be opened", facts={"opens": True})]


def subordinate_ids(host: Host) -> list[HostFinding]:
    """Check subordinate user and group ids, which rootless Docker, Podman and apptainer --fakeroot need."""
    if os.geteuid() == 0:
        return [HostFinding("subuid", "info", "not needed by root")]
    names = {str(os.getuid())}
    with contextlib.suppress(KeyError, OSError):  # for example a container's user without a name
        names.add(getpass.getuser())
    lacking = []
    for file in ("etc/subuid", "etc/subgid"):
        if not names & {line.partition(":")[0] for line in read_text(host.root / file).splitlines()}:
            lacking.append(f"/{file}")
    tools = [tool for tool in ("newuidmap", "newgidmap") if find(tool, host.variables) is None]
    if not lacking and not tools:
        text = "numbers for this user, newuidmap and newgidmap are here"
        return [HostFinding("subuid", "ok", text, facts={"there": True})]
    parts = [f"nothing for this user in {' and '.join(lacking)}"] if lacking else []
    parts += [f"{' and '.join(tools)} missing"] if tools else []
    hint = "only rootless Docker, Podman and `apptainer build --fakeroot` need them, envbuild does not"
    return [HostFinding("subuid", "info", "; ".join(parts), hint, {"there": False})]


_MEMORY = frozenset({"tmpfs", "ramfs"})
# Disk space for a CPU environment of torch with its wheels, and for a CUDA one.
_SMALL, _COMFORTABLE = 3 << 30, 12 << 30
_LITTLE = 256 << 20
_INODES = 60_000
# Folders of the store (store/store.py), by the plural name of their contents.
_HOLDS = {"wheels": "wheels", "conda packages": "conda/archives", "image blobs": "blobs/sha256"}


def mounts(root: Path = Path("/")) -> list[Mount]:
    """Return the mounts of this host, [] if the kernel does not report them."""
    try:
        return read_mounts(root)
    except OSError:
        return []


def mount_at(path: Path, root: Path = Path("/")) -> Mount | None:
    """Return the file system of `path`, or None if the kernel does not report it."""
    return mount_of(path, mounts(root))


def store(host: Host) -> Iterator[HostFinding]:
    """Check the store's folder."""
    if host.environment is not None:
        folder = host.environment.site.store
        finding = _place("store", folder, host, heavy=True)
        holds = {kind: len(list((folder / place).glob("*"))) for kind, place in _HOLDS.items()}
        yield replace(finding, facts={**finding.facts, "holds": holds})


def home(host: Host) -> Iterator[HostFinding]:
    """Check $HOME, and its quota if `quota` or Lustre reports one."""
    named = host.variables.get("HOME")
    if not named:
        yield HostFinding("home", "warn", "$HOME is not set", "export HOME=…: tools look for their settings there")
        return
    yield _place("home", Path(named), host)
    yield from _quota(Path(named), host)


def temporary(host: Host) -> list[HostFinding]:
    """Check the folder of temporary files."""
    try:
        return [_place("tmp", Path(tempfile.gettempdir()), host)]
    except FileNotFoundError:
        text = "no folder for temporary files can be written"
        return [HostFinding("tmp", "fail", text, "export TMPDIR=… with free disk space")]


def current(host: Host) -> list[HostFinding]:
    """Check the current folder, where artifacts are built."""
    try:
        folder = Path.cwd()
    except OSError:
        return [HostFinding("current folder", "fail", "it does not exist any more", "cd to one that does")]
    return [_place("current folder", folder, host, heavy=True)]


def _place(name: str, path: Path, host: Host, *, heavy: bool = False) -> HostFinding:
    there = path
    while not os.path.exists(there) and there != there.parent:
        there = there.parent
    mount = mount_at(there, host.root)
    about = os.statvfs(there)
    facts: dict[str, Any] = {
        "path": str(path),
        "kind": mount.kind if mount else "unknown file system",
        # File systems without such a count, such as some network file systems, report 0 of 0.
        "free": about.f_bavail * about.f_frsize if about.f_blocks else None,
        "inodes": about.f_favail if about.f_files else None,
        "noexec": bool(about.f_flag & os.ST_NOEXEC),
        "writable": there.is_dir() and os.access(there, os.W_OK | os.X_OK),
        "shared": bool(mount and mount.shared),
    }
    free = facts["free"]
    text = f"{path}: {facts['kind']}" + (f", {human_size(free)} free" if free is not None else "")
    status, more, hint = judge_place(name, facts, heavy=heavy)
    if not facts["writable"]:
        more = f"{there} {more}"
    return HostFinding(name, status, f"{text}; {more}" if more else text, hint, facts)


def judge_place(name: str, facts: Mapping[str, Any], *, heavy: bool) -> tuple[Status, str, str]:
    """Return (status, problem, advised change) for a folder; `heavy`: environments are written to it."""
    other = {"store": "set ENVBUILD_STORE", "tmp": "set TMPDIR", "home": "move caches"}
    elsewhere = f"{other.get(name, 'use --out')} to a folder"
    free, inodes = facts["free"], facts["inodes"]
    if not facts["writable"] and name == "home":
        return "info", "cannot be written", ""
    if not facts["writable"]:
        return "fail", "cannot be written", f"{elsewhere} that you may write"
    if heavy and facts["noexec"]:
        return "warn", "programs on it cannot be run (noexec)", f"{elsewhere} elsewhere"
    if free is not None and free < (_SMALL if heavy else _LITTLE):
        return "warn", "too little for torch" if heavy else "little", f"free disk space, or {elsewhere} with more"
    if inodes is not None and inodes < _INODES:
        text = f"{inodes} inodes left, and an environment has 15,000 files and more"
        return "warn", text, f"free disk space, or {elsewhere} elsewhere"
    if name == "tmp" and facts["kind"] in _MEMORY:
        return "info", "it is memory", "set TMPDIR to a disk for large images"
    if name == "store" and facts["shared"]:
        return "info", "environments are copied from it, not linked", ""
    if heavy and free is not None and free < _COMFORTABLE:
        return "info", "little for CUDA images", ""
    return "ok", "", ""


def _quota(folder: Path, host: Host) -> list[HostFinding]:
    mount = mount_at(folder, host.root)
    if mount and mount.kind == "lustre" and (tool := find("lfs", host.variables)):
        command = [tool, "quota", "-q", "-h", "-u", str(os.getuid()), str(folder)]
    elif tool := find("quota", host.variables):
        command = [tool, "-w", "-p", "-s"]
    else:
        return []
    code, output = run_probe(command, host.variables)
    if code is None:
        return [HostFinding("quota", "info", f"{tool}: {output}")]
    # The line with the most numbers.
    lines = [" ".join(line.split()) for line in output.splitlines()]
    row = max(lines, key=lambda line: len(re.findall(r"\d+", line)), default="")[:160]
    if "*" in output:
        return [
            HostFinding("quota", "warn", f"over quota: {row}", "set ENVBUILD_STORE and caches to another file system")
        ]
    return [HostFinding("quota", "info", row)] if row else []
