"""Checks of installed programs (data/programs.toml) and their versions."""

from __future__ import annotations

import importlib.util
import platform
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import envbuild
from envbuild.base.errors import EnvbuildError, HostError
from envbuild.base.workers import run_parallel
from envbuild.data import load_table
from envbuild.doctor.probe import PATIENCE_S, Host, HostFinding, Status, find, first_line, run_probe
from envbuild.pythons import OfferedPython, choose_python, installed_pythons
from envbuild.recipe.model import PYTHONS
from envbuild.site.settings import site_files

# Exit statuses of a shell for a program that cannot be started, for example when a library is missing.
_UNSTARTED = (126, 127)
# The search for Pythons runs each python3.* on PATH.
_LISTING_S, _CHOOSING_S = 2.0, 1.7
_VERSION = re.compile(r"(?<!\d)\d+(?:\.\d+)+[\w.+~-]*")


def envbuild_itself(host: Host) -> Iterator[HostFinding]:
    """Report the versions of envbuild and Python, and check envbuild's dependencies."""
    python = platform.python_version()
    facts = {"version": envbuild.__version__, "python": python, "machine": platform.machine()}
    text = f"envbuild {envbuild.__version__}, Python {python} ({sys.executable})"
    yield HostFinding("envbuild", "ok", text, facts=facts)
    listed = load_table("programs")["modules"]
    missing = [name for name in listed if importlib.util.find_spec(name) is None]
    if not missing:
        yield HostFinding("packages", "ok", f"{len(listed)} imported", facts={"missing": []})
        return
    uses = ", ".join(sorted({listed[name]["use"] for name in missing}))
    hint = f"pip install {' '.join(listed[name]['distribution'] for name in missing)}"
    yield HostFinding("packages", "fail", f"missing: {', '.join(missing)} (for {uses})", hint, {"missing": missing})


def configuration(host: Host) -> list[HostFinding]:
    """Check whether site.toml and pip's configuration are readable."""
    if host.problem:
        hint = host.hint or "correct the file; every command reads it"
        return [HostFinding("configuration", "fail", host.problem, hint)]
    files = [str(path) for path in site_files(host.variables) if path.is_file()]
    if files:
        return [HostFinding("configuration", "ok", ", ".join(files), facts={"files": files})]
    hint = "`envbuild site init` writes one for this host"
    return [HostFinding("configuration", "info", "none; defaults are in force", hint, {"files": []})]


def uv(host: Host) -> list[HostFinding]:
    """Check uv, which resolves and installs."""
    if host.environment is None:
        return []
    path = host.environment.uv  # raises HostError if missing
    code, output = run_probe([path, "--version"], host.variables)
    if code != 0:
        text = f"{path}: {first_line(output) or 'does not start'}"
        return [HostFinding("uv", "fail", text, "pip install --force-reinstall uv")]
    return [HostFinding("uv", "ok", f"{first_line(output)} ({path})", facts={"path": path})]


def pythons(host: Host) -> list[HostFinding]:
    """Report the Python of a virtual environment on this host for each version, as its build would choose it."""
    if host.environment is None:
        return []
    facts = dict[str, dict[str, str]]()
    # Without a store, uv has its cache there; a slow one is ended.
    with tempfile.TemporaryDirectory(prefix="envbuild-doctor-", ignore_cleanup_errors=True) as folder:
        environment = replace(host.environment, variables={**host.environment.variables, "TMPDIR": folder})
        try:
            installed = installed_pythons(environment, _LISTING_S)
        except HostError as error:
            return [
                HostFinding("Pythons", "warn", error.message, "a program python3.* on PATH is slow", {"timeout": True})
            ]

        def look(python: str) -> None:
            try:
                python_found = choose_python(python, environment, offline=host.offline, installed=installed)
            except EnvbuildError as error:
                facts[python] = {"lacking": error.message, "hint": error.hint or ""}
            else:
                by = (
                    {"download": python_found.url}
                    if isinstance(python_found, OfferedPython)
                    else {"path": python_found.path}
                )
                facts[python] = {"version": python_found.version, **by}

        run_parallel([partial(look, python) for python in PYTHONS], _CHOOSING_S)
    known = {python: facts[python] for python in PYTHONS if python in facts}
    kinds: dict[str, list[str]] = {"path": [], "download": [], "lacking": []}
    for python in PYTHONS:
        kinds[next((kind for kind in kinds if kind in known.get(python, ())), "lacking")].append(python)
    here, offered, lacking = kinds.values()
    parts = [f"{known[version]['version']} ({known[version]['path']})" for version in here]
    parts += [f"uv downloads {', '.join(offered)}"] if offered else []
    newest = known.get(lacking[-1], {"lacking": "no answer in time", "hint": ""}) if lacking else {}
    if lacking:
        parts.append(f"not {', '.join(lacking)}: {newest['lacking'].rpartition('; ')[2]}")
    status: Status = "ok" if not lacking else "info" if here or offered else "fail"
    about = {"pythons": known, "here": here, "downloads": offered, "lacking": lacking}
    return [HostFinding("Pythons", status, "; ".join(parts), newest.get("hint", ""), about)]


def programs(host: Host) -> Iterator[HostFinding]:
    """Check every listed program on this host; report missing ones in one finding."""
    listed, findings = load_table("programs")["programs"], dict[str, HostFinding]()

    def look(name: str) -> None:
        if path := find(name, host.variables):
            code, output = run_probe([path, *listed[name]["version"]], host.variables)
            findings[name] = _program(name, listed[name]["use"], path, code, output)

    run_parallel([partial(look, name) for name in listed], 3.5)
    yield from (findings[name] for name in listed if name in findings)
    absent = [name for name in listed if name not in findings]
    if absent:
        yield HostFinding("not installed", "info", ", ".join(absent), facts={"programs": absent})


def _program(name: str, use: str, path: str, code: int | None, output: str) -> HostFinding:
    # squashfuse prints its version with its help, and exits with an error.
    match = _VERSION.search(output)
    if code is None or code in _UNSTARTED or (code != 0 and match is None):
        hint = f"repair or remove it; it {use}" if use.startswith("starts") else ""
        why = first_line(output) or f"exit {code}"
        return HostFinding(name, "warn", f"{path}: {why}", hint, {"path": path, "works": False})
    version = match[0] if match else first_line(output, 60)
    facts = {"path": path, "version": match and match[0], "works": True}
    return HostFinding(name, "ok", f"{version} ({path})", facts=facts)


def modules(host: Host) -> list[HostFinding]:
    """Check whether batch shells define `module`, and which file defines it."""
    bash = find("bash", host.variables)
    if bash is None:
        return [HostFinding("modules", "warn", "bash is not installed", "job scripts need bash")]
    init = module_init(host)
    here, login = (has_module([bash, option], host.variables) for option in ("-c", "-lc"))
    facts = {"here": here, "login": login, "init": init}
    if not (here or login or init):
        return [HostFinding("modules", "info", "none (neither Lmod nor Environment Modules)", facts=facts)]
    shells = "all shells" if here else "login shells" if login else "no shell by itself"
    hint = "" if here or not init else f'[modules] init = "{init}" for batch jobs'
    text = f"defined in {shells}; {init or 'its file was not found'}"
    return [HostFinding("modules", "ok", text, hint, facts)]


def has_module(
    shell: Sequence[str], variables: Mapping[str, str], before: str = "", patience_s: float = PATIENCE_S
) -> bool:
    """Return whether `shell` defines `module` as a function, after the commands `before`."""
    code, output = run_probe([*shell, f"{before}type -t module"], variables, patience_s)
    return code == 0 and "function" in output.split()


def module_init(host: Host) -> str:
    """Return the file that defines `module`, or "" if none is found."""
    variables, root = host.variables, host.root
    places = [f"{variables[name]}/init/bash" for name in ("LMOD_PKG", "MODULESHOME") if variables.get(name)]
    named = ("lmod", "z00_lmod", "modules", "00-modulepath", "z01_lmod", "cray-lmod", "Zlmod")
    places += [f"/etc/profile.d/{name}.sh" for name in named]
    shared = ("/usr/share/lmod/lmod", "/opt/cray/pe/lmod/lmod", "/usr/share/modules", "/usr/share/Modules")
    places += [f"{folder}/init/bash" for folder in shared]
    return next((place for place in places if (root / place.lstrip("/")).is_file()), "")
