"""Checks of installed programs and their versions."""

from __future__ import annotations

import importlib.util
import platform
import re
import sys
from collections.abc import Iterator
from functools import partial

import envbuild
from envbuild.doctor.probe import Host, HostFinding, find, first_line, run_parallel, run_probe
from envbuild.site.settings import site_files

# Exit statuses of a shell for a program that cannot be started, for example when a library is missing.
_UNSTARTED = (126, 127)
_VERSION = re.compile(r"\d+(?:\.\d+)+[\w.+~-]*")
# program → (arguments that print its version, its purpose)
_PROGRAMS = {
    "apptainer": (("--version",), "starts and makes .sif images"),
    "singularity": (("--version",), "starts .sif images"),
    "enroot": (("version",), "starts .sqsh images"),
    "ch-run": (("--version",), "starts images (Charliecloud)"),
    "squashfuse_ll": (("--help",), "mounts images without root"),
    "squashfuse": (("--help",), "mounts images without root"),
    "mksquashfs": (("-version",), "makes squashfs images; envbuild does so itself"),
    "unsquashfs": (("-version",), "unpacks squashfs images; envbuild does so itself"),
    "docker": (("--version",), "the docker client"),
    "podman": (("--version",), "containers without a daemon"),
    "skopeo": (("--version",), "copies images"),
    "conda": (("--version",), "conda; envbuild makes its environments itself"),
    "mamba": (("--version",), "conda; envbuild makes its environments itself"),
    "micromamba": (("--version",), "conda; envbuild makes its environments itself"),
    "mpirun": (("--version",), "starts one torchrun a node"),
    "mpiexec": (("--version",), "starts one torchrun a node"),
    "ssh": (("-V",), "starts one torchrun a node"),
    "ip": (("-V",), "tells a node's addresses"),
    "gcc": (("-dumpfullversion",), "compiles source-built layers"),
    "nvcc": (("--version",), "compiles source-built layers for CUDA"),
}
# Modules that builds import; all are installed with envbuild, unless an installation is damaged.
_MODULES = {
    "rattler": "conda environments",
    "deflate": "images",
    "zstandard": "images and conda packages",
    "lz4": "squashfs images",
    "isal": "images",
    "pysequoia": "Debian's signatures",
    "docker": "the docker daemon",
    "requests": "downloads",
}
# Names on PyPI of modules whose distribution has another name.
_DISTRIBUTIONS = {"rattler": "py-rattler"}


def envbuild_itself(host: Host) -> Iterator[HostFinding]:
    """Report the versions of envbuild and Python, and check envbuild's dependencies."""
    version = f"envbuild {envbuild.__version__}, Python {platform.python_version()}"
    yield HostFinding(
        "envbuild", "ok", f"{version} ({sys.executable})",
        facts={"version": envbuild.__version__, "python": platform.python_version(), "machine": platform.machine()},
    )  # fmt: skip
    lacking = [name for name in _MODULES if importlib.util.find_spec(name) is None]
    uses = ", ".join(sorted({_MODULES[name] for name in lacking}))
    yield HostFinding(
        "packages",
        "fail" if lacking else "ok",
        f"missing: {', '.join(lacking)} (for {uses})" if lacking else f"{len(_MODULES)} imported",
        f"pip install {' '.join(_DISTRIBUTIONS.get(n, n) for n in lacking)}" if lacking else "",
        {"missing": lacking},
    )


def configuration(host: Host) -> Iterator[HostFinding]:
    """Check whether site.toml and pip's configuration are readable."""
    if host.problem:
        yield HostFinding(
            "configuration", "fail", host.problem, host.hint or "correct the file; every command reads it"
        )
        return
    there = [str(path) for path in site_files(host.variables) if path.is_file()]
    what = ", ".join(there) if there else "none; defaults are in force"
    hint = "" if there else "`envbuild site init` writes one for this host"
    yield HostFinding("configuration", "ok" if there else "info", what, hint, {"files": there})


def uv(host: Host) -> Iterator[HostFinding]:
    """Check uv, which resolves and installs."""
    if host.environment is None:
        return
    path = host.environment.uv  # raises HostError if missing
    code, said = run_probe([path, "--version"], host.variables)
    if code != 0:
        hint = "pip install --force-reinstall uv"
        yield HostFinding("uv", "fail", f"{path}: {first_line(said) or 'does not start'}", hint)
        return
    yield HostFinding("uv", "ok", f"{first_line(said)} ({path})", facts={"path": path})


def programs(host: Host) -> Iterator[HostFinding]:
    """Check every listed program on this host; report missing ones in one finding."""
    found: dict[str, tuple[str, int | None, str]] = {}

    def look(name: str) -> None:
        if path := find(name, host.variables):
            code, said = run_probe([path, *_PROGRAMS[name][0]], host.variables)
            found[name] = (path, code, said)

    run_parallel([partial(look, name) for name in _PROGRAMS], 3.5)
    for name, (_, use) in _PROGRAMS.items():
        if name not in found:
            continue
        path, code, said = found[name]
        # squashfuse prints its version with its help, and exits with an error.
        match = _VERSION.search(said)
        if code is None or code in _UNSTARTED or (code != 0 and match is None):
            hint = f"repair or remove it; it {use}" if use.startswith("starts") else ""
            why = first_line(said) or f"exit {code}"
            yield HostFinding(name, "warn", f"{path}: {why}", hint, {"path": path, "works": False})
        else:
            version = match[0] if match else first_line(said, 60)
            facts = {"path": path, "version": match and match[0], "works": True}
            yield HostFinding(name, "ok", f"{version} ({path})", facts=facts)
    absent = [name for name in _PROGRAMS if name not in found]
    if absent:
        yield HostFinding("not installed", "info", ", ".join(absent), facts={"programs": absent})


def modules(host: Host) -> Iterator[HostFinding]:
    """Check whether batch shells define `module`, and which file defines it."""
    bash = find("bash", host.variables)
    if bash is None:
        yield HostFinding("modules", "warn", "bash is not installed", "job scripts need bash")
        return
    init = module_init(host)
    code, said = run_probe([bash, "-c", "type -t module"], host.variables)
    here = code == 0 and "function" in said.split()
    code, said = run_probe([bash, "-lc", "type -t module"], host.variables)
    login = code == 0 and "function" in said.split()
    facts = {"here": here, "login": login, "init": init}
    if not (here or login or init):
        yield HostFinding("modules", "info", "none (neither Lmod nor Environment Modules)", facts=facts)
        return
    shells = "all shells" if here else "login shells" if login else "no shell by itself"
    hint = "" if here or not init else f'[modules] init = "{init}" for batch jobs'
    yield HostFinding("modules", "ok", f"defined in {shells}; {init or 'its file was not found'}", hint, facts)


def module_init(host: Host) -> str:
    """Return the file that defines `module`, or "" if none is found."""
    variables, root = host.variables, host.root
    places = [f"{variables[name]}/init/bash" for name in ("LMOD_PKG", "MODULESHOME") if variables.get(name)]
    named = ("lmod", "z00_lmod", "modules", "00-modulepath", "z01_lmod", "cray-lmod", "Zlmod")
    places += [f"/etc/profile.d/{name}.sh" for name in named]
    places += [
        "/usr/share/lmod/lmod/init/bash",
        "/opt/cray/pe/lmod/lmod/init/bash",
        "/usr/share/modules/init/bash",
        "/usr/share/Modules/init/bash",
    ]
    return next((place for place in places if (root / place.lstrip("/")).is_file()), "")
