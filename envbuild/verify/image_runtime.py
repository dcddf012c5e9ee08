"""The runtimes that start programs in an image file: the installed ones, and envbuild's own (namespace.py).

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from envbuild.base import process
from envbuild.base.atomic import writing
from envbuild.base.errors import HostError, UsageError
from envbuild.contract.image_manifest import SQUASHFS
from envbuild.contract.kinds import file_kind
from envbuild.contract.receipt import manifest_of
from envbuild.contract.state import PREFIX, State
from envbuild.environment import Environment
from envbuild.image.limits import ImageLimits
from envbuild.image.sif import content_digest
from envbuild.recipe.targets import Target, gpu_families, host_arch
from envbuild.runtimes import OWN, RUNTIMES, starting
from envbuild.runtimes.base import HostProgram, HostStart, Way
from envbuild.verify import namespace
from envbuild.verify.host import HostNodes, Launch
from envbuild.verify.image_file import ImageFile, image_state, open_image_file, own_manifest
from envbuild.verify.model import Subject
from envbuild.verify.namespace import WORK
from envbuild.verify.outside import read_squashfs, survey_image
from envbuild.verify.survey import Survey

MOUNT, SQUASHFUSE, EXTRACT = WAYS = ("mount", "squashfuse", "extract")
# -I and an explicit path load envbuild's modules and Python's, whatever the caller's variables and the current
# folder contain.
_BOOT = "import sys; sys.path.insert(0, sys.argv.pop(1)); from envbuild.verify.namespace import main; main()"
START = (sys.executable, "-I", "-c", _BOOT, str(Path(namespace.__file__).parents[2]))
_FUSE = Path("/dev/fuse")
# A site's GPU and network variables, which a job's programs need; no other variable of the caller enters an image.
_PASSED = ("NCCL_", "FI_", "OFI_NCCL_", "UCX_", "TERM")
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
_NEEDED = ("PATH", "HOME", "USER", "LOGNAME", "TMPDIR", "LANG", "TERM")  # variables of every program on this host
_PROBE = 'import os, sys; sys.exit("ENVBUILD_PROBE" not in os.environ and "the image does not let variables in{}")'


@dataclass(frozen=True, slots=True)
class StartedRuntime:
    """A runtime that can start programs in one image file; `name` goes into the receipt.

    `open` takes a work folder on this host, which the programs see as `work`.
    """

    name: str
    open: Callable[[Path], AbstractContextManager[Launch]]
    work: str = WORK


def passed(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the caller's `variables` that are passed into an image."""
    prefixes = (*_PASSED, *(accelerator.visible for accelerator in gpu_families()))
    return {name: value for name, value in variables.items() if name.startswith(prefixes)}


class WayUnavailable(Exception):
    """The error of a way of mounting that does not work on this host; the message gives the reason."""


def own_runtime(image: ImageFile, way: str | None, environment: Environment) -> StartedRuntime:
    """Return the own runtime for `image`, by `way` if one is given, else by the first way that works.

    Each way is tried on the image, except unpacking. Raises HostError, with the reasons, when no way works.
    """
    refused = []
    for method in (way,) if way else WAYS:
        try:
            with environment.store.working("launched") as folder:
                spec = spec_of(image, method, folder, folder, environment)
                with _keeper(spec, environment):
                    name = f"own:{method}{_detail(spec)}"
            return StartedRuntime(name, partial(_open, image, method, environment))
        except WayUnavailable as error:
            refused.append(f"{method}: {error}")
    hint = f"choose another way ({', '.join(f'own:{way_name}' for way_name in WAYS if way_name != way)})"
    if way == MOUNT and image.compressor != "gzip":
        hint += ", or make the image with --compression gzip, which every kernel with squashfs reads"
    raise HostError(f"{image.path} cannot be launched here; {'; '.join(refused)}", hint)


def _detail(spec: Mapping[str, Any]) -> str:
    if spec["way"] == MOUNT:
        return f" (Linux {platform.release()})"
    if spec["way"] == EXTRACT:
        return ""
    help_text = process.run([spec["tool"], "--help"], check=False)
    match = re.search(r"squashfuse \d[\w.]*", help_text.stdout + help_text.stderr)
    return f" ({match[0] if match else Path(spec['tool']).name})"


@contextmanager
def _open(image: ImageFile, way: str, environment: Environment, work: Path) -> Iterator[Launch]:
    with environment.store.working("launched") as folder, ExitStack() as stack:
        if way == EXTRACT:
            extract(image, folder / "image", environment.site.limits)
        try:
            keeper = stack.enter_context(_keeper(spec_of(image, way, folder, work, environment), environment))
        except WayUnavailable as error:
            raise HostError(f"{image.path} can no longer be launched: {error}") from None
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
    """Return the error for a host that forbids namespaces, with the settings that may be the reason."""
    settings_found = []
    for name, forbids, allows in _SETTINGS:
        with suppress(OSError):
            if (proc / name.replace(".", "/")).read_text().strip() == forbids:
                settings_found.append((f"{name} = {forbids}", f"{name}={allows}"))
    programs = " or ".join(name for name, host in _installed().items() if host.kinds)
    ways = f"install {programs}, verify on a node that allows it, or build with --no-verify"
    if not settings_found:
        return HostError(
            f"this host cannot launch an image without a runtime: {why}",
            f"a surrounding container may forbid it (its seccomp profile or missing capabilities); {ways}",
        )
    settings, orders = zip(*settings_found, strict=True)
    return HostError(
        f"this host forbids launching an image without a runtime: {' and '.join(settings)} ({why})",
        f"let the administrator run `sysctl -w {' '.join(orders)}`, run as root, or {ways}",
    )


def _driver_libraries(variables: Mapping[str, str]) -> dict[str, str]:
    """Return name → path of each library of the GPU driver; empty on a host without a driver."""
    search = variables.get("PATH", os.defpath)
    if tool := shutil.which("nvidia-container-cli", path=search):
        listed = process.run([tool, "list", "--libraries"], env=variables, check=False)
        if listed.returncode == 0 and (libraries := named(listed.stdout.split())):
            return libraries
    cache = shutil.which("ldconfig", path=f"{search}:/sbin:/usr/sbin")
    return named(cached(process.run([cache, "-p"], check=False).stdout)) if cache else {}


def cached(text: str, machine: str | None = None) -> list[str]:
    """Return the libraries for `machine` (default: this host's) in the output of `ldconfig -p`."""
    mark = {"x86_64": "x86-64", "aarch64": "AArch64"}.get(machine or os.uname().machine, "")
    return [path for _, flags, path in _CACHED.findall(text) if mark in flags]


def named(paths: Iterable[str]) -> dict[str, str]:
    """Return name → path of the driver's libraries among `paths`, the first path for each name."""
    libraries: dict[str, str] = {}
    for path in paths:
        match = _FILE.fullmatch(os.path.basename(path))
        if match and match[1] in _SONAMES:
            libraries.setdefault(_SONAMES[match[1]], path)
        elif match and match[1] == _VERSIONED:
            libraries.setdefault(os.path.basename(os.path.realpath(path)), path)
    return libraries


def names() -> tuple[str, ...]:
    """Return the names that `--runtime` accepts."""
    return (*_installed(), OWN, *(f"{OWN}:{way}" for way in WAYS))


def _installed() -> dict[str, HostStart]:
    return {name: runtime.host for name, runtime in RUNTIMES.items() if runtime.host}


def file_subject(
    path: Path,
    kind: str,
    state: State,
    digest: str,
    environment: Environment,
    runtime: str | None,
    manifest: str = "",
) -> Subject:
    """Return the subject for the image file `path` of `kind`.

    `manifest` is the digest of the manifest of its files, "" to use the manifest inside. `runtime` is one of `names()`,
    or None for the best available one. Raises UsageError for a file or a runtime of another kind, HostError when no
    runtime on this host can start the image.
    """
    target = Target.parse(state.target)
    if target.arch != host_arch():
        raise HostError(
            f"an image for {target.name} cannot be started on this {host_arch()} host",
            f"run `envbuild verify {path}` on an {target.arch} node",
        )
    image = open_image_file(path, kind, accelerator=target.family)
    started = runtime_for(image, runtime, environment)
    expected = manifest or own_manifest(image)

    def surveyed(timeout_s: float) -> Survey:
        with path.open("rb") as stream:
            limits, gpu = environment.site.limits, target.family.gpu
            files = read_squashfs(stream, image.offset, str(path), limits, timeout_s, gpu=gpu)
            return survey_image(files, state, SQUASHFS, expected)

    return Subject(
        Path("/", PREFIX),
        state,
        target,
        digest,
        started.name,
        survey=surveyed,
        nodes=lambda work, _, __: _nodes(started, work),
        isolated=True,
        kind=kind,
        manifest=expected,
    )


def open_file_subject(path: Path, environment: Environment, runtime: str | None) -> Subject:
    """Return the subject for the .sqsh or .sif file at `path`. Raises UsageError if it is not envbuild's."""
    image = open_image_file(path)
    state, digest = image_state(image), content_digest(path)
    return file_subject(path, image.kind, state, digest, environment, runtime, manifest_of(path))


@contextmanager
def _nodes(runtime: StartedRuntime, work: Path) -> Iterator[HostNodes]:
    with runtime.open(work) as launch:
        yield HostNodes(work, launch, PurePosixPath(runtime.work))


def choose(kind: str, name_asked: str | None, variables: Mapping[str, str]) -> tuple[str, Path | None, str | None]:
    """Return the runtime for an image of `kind`, its program, and the requested way of the own runtime, if any.

    `name_asked` is one of `names()`, None for the best. Raises UsageError for an unsuitable one, HostError without it.
    """
    if name_asked is not None and name_asked not in names():
        raise UsageError(f"unknown runtime {name_asked!r}", f"one of {', '.join(names())}")
    installed = _installed()
    suitable = [name for name in starting(kind) if name in installed]
    if name_asked in installed and name_asked not in suitable:
        raise UsageError(
            f"{name_asked} does not start {file_kind(kind).suffix} images", f"choose {' or '.join([*suitable, OWN])}"
        )
    usual = [name for name in suitable if kind in installed[name].kinds] if name_asked is None else []
    search = variables.get("PATH", os.defpath)
    for name in [name_asked] if name_asked in suitable else usual:
        for program in installed[name].programs:
            if path := shutil.which(program, path=search):
                return name, Path(path), None
    if name_asked in suitable:
        raise HostError(
            f"{' or '.join(installed[name_asked].programs)} is not on PATH",
            f"install it, or choose {OWN}, which needs nothing installed",
        )
    return OWN, None, (name_asked or OWN).partition(":")[2] or None


def runtime_for(image: ImageFile, name_asked: str | None, environment: Environment) -> StartedRuntime:
    """Return the runtime that starts `image` (see `choose`), after a trial start.

    If an installed runtime cannot start the image, the own runtime is used, unless `name_asked` names the installed
    one. Raises HostError when no runtime can.
    """
    name, program, way = choose(image.kind, name_asked, environment.variables)
    if program is None:
        return own_runtime(image, way, environment)
    try:
        return _installed_runtime(name, program, image, environment)
    except HostError as failed:
        if name_asked is not None:
            raise
        try:
            own = own_runtime(image, way, environment)
        except HostError as error:
            raise HostError(f"{failed.message}\n{error.message}", error.hint) from error
        return replace(own, name=f"{own.name}, {name} could not start it")


def _installed_runtime(name: str, program: Path, image: ImageFile, environment: Environment) -> StartedRuntime:
    """Return the runtime `name`, whose program is `program`, in the first way that starts `image`.

    Each way is tried on the image, except unpacking.
    """
    row, variables = _installed()[name], environment.variables
    kept = {key: value for key, value in variables.items() if key in _NEEDED or key.startswith(row.variables)}
    host = {**dict(image.accelerator.container_variables), **kept} if row.selects_devices else kept
    done = process.run([program, *row.version], env=host, failure=HostError)
    version = done.stdout.strip().split("\n")[0].replace(" version ", " ")
    title = version if version[:1].isalpha() else f"{name} {version}"
    probe = _PROBE.format(row.no_variables and f": {row.no_variables}")
    failed = []
    for way in row.ways:
        if not way.unpacked:
            words = ("python", "-I", "-c", probe)
            given = {"ENVBUILD_PROBE": "1"}
            trial = HostProgram(program, way.options, str(image.path), image.accelerator, words, given)
            line, more = row.command(trial)
            done = process.run(line, env={**host, **more}, check=False)
            if done.returncode:
                said = f"{done.stdout}{done.stderr}".strip()[-2000:]
                failed.append(f"{' '.join([program.name, *way.options])} ({process.ending(done.returncode)}): {said}")
                continue
        opened = partial(_open_installed, row, way, program, image, host, environment)
        return StartedRuntime(" ".join(filter(None, [title, way.title])), opened)
    raise HostError(
        f"{title} cannot start {image.path}:\n  " + "\n  ".join(failed),
        f"see the messages above; --runtime {OWN} launches it without {name}",
    )


@contextmanager
def _open_installed(
    row: HostStart,
    way: Way,
    program: Path,
    image: ImageFile,
    host: Mapping[str, str],
    environment: Environment,
    work: Path,
) -> Iterator[Launch]:
    if set(str(work)) & set(row.splits):
        raise HostError(
            f"{program.name} cannot show the folder {work} in a container: it interprets a character of its path",
            f"set TMPDIR to a folder without {' '.join(map(repr, row.splits))} in its path",
        )
    inside, place, host = passed(environment.variables), str(image.path), dict(host)
    with ExitStack() as stack:
        if way.unpacked:
            folder = stack.enter_context(environment.store.working("launched"))
            if way.unpack is None:
                extract(image, folder / "image", environment.site.limits)
                place = str(folder / "image")
            else:
                line, more, place = way.unpack(program, image.path, folder)
                host |= more
                process.run(line, env=host, failure=HostError)

        def launch(name: str, arguments: Sequence[str], extra: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
            words, given = (name, *arguments), {**inside, **extra}
            started = HostProgram(program, way.options, place, image.accelerator, words, given, str(work), WORK)
            line, more = row.command(started)
            return line, {**host, **more}

        yield launch
