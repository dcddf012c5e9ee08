"""A Python project as a layer: compiled against an environment's packages, installed in site-packages.

pip builds a wheel with the interpreter that it is for, without isolation and without an index: imports come from that
environment, and the build tools (pip, setuptools, cmake) from a separate folder. Sources: PEP 517 (build back ends);
"Binary distribution format" and "Recording installed projects" of the PyPA (scripts, RECORD, INSTALLER).
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from envbuild.base.errors import BuildError
from envbuild.base.packages import record_row
from envbuild.layers.source_job import PREFIX, TOOLS, BuildHost, BuildPython, SourceBuild
from envbuild.layers.wheel import INSTALLER, entry_point_scripts, render_record

_WITH_PATH = 'PATH="$1:$PATH"; export PATH; shift; exec "$@"'
_VERSION = "import sys; print('%d.%d' % sys.version_info[:2], file=open(sys.argv[1], 'w'))"
# Variables with compiler options; a recipe's options follow ours, and take precedence.
_FLAGS = ("CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS")
# The first lines of a script that runs the interpreter beside it, wherever the environment is: sh executes the second
# line, and Python reads it as a string.
_START = b"""#!/bin/sh
'''exec' "$(dirname -- "$(realpath -- "$0")")"/'python' "$0" "$@"
' '''
"""


def interpreter_in(host: BuildHost, python: BuildPython, *, isolated: bool) -> str:
    """Return the path, as commands see it, of an interpreter for the build of a Python project.

    It sees the packages of the artifact's environment, or none if `isolated`; what is missing is made in the work
    folder of `host`. Source of pyvenv.cfg: PEP 405.
    """
    if python.packages is None and not isolated:
        return python.interpreter
    # The interpreter of a virtual environment is a link, and home is where its standard library is found.
    home = os.path.dirname(os.path.realpath(python.interpreter) if python.packages is None else python.interpreter)
    root = host.work / "environment"
    if python.conda is not None:
        root.mkdir()
        python.conda(root, host.inside / root.name)
        home = str(host.inside / root.name / "bin")
        if not isolated and python.packages is not None:
            python.packages(root)
            return f"{home}/python"
        root = host.work / "isolated"
    (root / "bin").mkdir(parents=True)
    (root / f"lib/python{python.version}/site-packages").mkdir(parents=True)
    system = str(python.system and not isolated).lower()
    (root / "pyvenv.cfg").write_text(f"home = {home}\ninclude-system-site-packages = {system}\n", encoding="utf-8")
    for name in ("python", "python3", f"python{python.version}"):
        (root / "bin" / name).symlink_to(f"{home}/{os.path.basename(python.interpreter) or 'python'}")
    if not isolated and python.packages is not None:
        python.packages(root)
    return str(host.inside / root.name / "bin/python")


def build_wheel(job: SourceBuild) -> tuple[Path, str]:
    """Build the project of `job` for the interpreter `job.python`; return its wheel, and the version of Python.

    The layer's options are variables of the build, NAME=VALUE. Raises StepError; BuildError when the project builds no
    wheel or several.
    """
    work, inside = job.build_host.work, job.build_host.inside
    job.run("python", [job.python, "-c", _VERSION, str(inside / "python-version")])
    # The tools' folders with programs; cmake's wheel has them in cmake/data/bin.
    folders = [*sorted((work / TOOLS).glob("*/data/bin")), work / TOOLS / "bin"]
    programs = ":".join(str(inside / path.relative_to(work)) for path in folders)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    pip = [job.python, "-m", "pip", "wheel", ".", *options, "--wheel-dir", str(inside / "dist")]
    job.run("pip wheel", ["sh", "-c", _WITH_PATH, "sh", programs, *pip], _variables(job))
    wheels = sorted((work / "dist").glob("*.whl"))
    if len(wheels) != 1:
        raise BuildError(f"{job.title}: pip made {len(wheels)} wheels of it, not one")
    return wheels[0], (work / "python-version").read_text(encoding="ascii").strip()


def renew_records(tree: Path, name: str) -> None:
    """Rewrite RECORD and INSTALLER of the distribution in `tree`, as strip and patchelf changed its libraries."""
    # RECORD does not list the licence texts that the layer `name` adds.
    for info in sorted(tree.glob("lib/python*/site-packages/*.dist-info")):
        (info / "INSTALLER").write_bytes(INSTALLER)
        rows = [
            (os.path.relpath(path, info.parent), *_row(path))
            for path in tree.rglob("*")
            if not path.is_dir() and path != info / "RECORD" and f"share/licenses/{name}/" not in path.as_posix()
        ]
        (info / "RECORD").write_bytes(render_record(rows, info.name))
        for one in ("INSTALLER", "RECORD"):
            (info / one).chmod(0o644)


def _variables(job: SourceBuild) -> dict[str, str]:
    """Return variables that exclude the settings of the host's pip and Python, and temporary paths in the result."""
    inside, ours = job.build_host.inside, job.variables()
    maps = ours["CPPFLAGS"]
    if job.python.startswith("/"):
        maps = f"-ffile-prefix-map={job.environment}={PREFIX} {maps}"
    variables = {
        "PYTHONPATH": str(inside / TOOLS),
        "PYTHONNOUSERSITE": "1",
        # Bytecode of imported modules goes to a separate folder: the environment must not change.
        "PYTHONPYCACHEPREFIX": str(inside / "pycache"),
        "PYTHONHASHSEED": "0",
        "PIP_CONFIG_FILE": os.devnull,
        "MAKEFLAGS": f"-j{job.jobs}",
        "MAX_JOBS": str(job.jobs),
        "CMAKE_BUILD_PARALLEL_LEVEL": str(job.jobs),
        "CFLAGS": maps,
        "CXXFLAGS": maps,
    }
    for option in job.options():
        name, _, value = option.partition("=")
        before = variables.get(name) or ours.get(name, "")
        variables[name] = f"{before} {value}".strip() if name in _FLAGS else value
    return variables


def add_scripts(tree: Path, where: str) -> None:
    """Create the scripts of entry points, and make scripts run the interpreter beside them."""
    programs = tree / "bin"
    for path in sorted(programs.iterdir()) if programs.is_dir() else ():
        head, _, rest = path.read_bytes().partition(b"\n")
        if head.startswith(b"#!python"):
            path.write_bytes(_START + rest)
            path.chmod(0o755)
    for text in sorted(tree.glob("lib/python*/site-packages/*.dist-info/entry_points.txt")):
        for name, script in entry_point_scripts(text.read_text(encoding="utf-8"), "", where):
            programs.mkdir(exist_ok=True)
            (programs / name).write_bytes(_START + script.partition(b"\n")[2])
            (programs / name).chmod(0o755)


def _row(path: Path) -> tuple[str, str]:
    with path.open("rb") as stream:
        return record_row(hashlib.file_digest(stream, "sha256").digest(), path.stat().st_size)
