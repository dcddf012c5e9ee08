"""Steps from a source archive to installed files: unpack, patch, configure, make, install, tidy, relocate.

Sources: the GNU Coding Standards (configure, DESTDIR, standard targets),
reproducible-builds.org (SOURCE_DATE_EPOCH, -ffile-prefix-map).

A Python project is compiled against an environment's packages. pip builds its wheel with the target interpreter,
without isolation and without an index: imports come from the environment, and the build tools (pip, setuptools,
cmake) from a separate folder. Sources: PEP 517 (build back ends); "Binary distribution format" and "Recording installed
projects" of the PyPA (scripts, RECORD, INSTALLER).
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from envbuild.base.elf import is_elf
from envbuild.base.errors import BuildError
from envbuild.base.files import sha256_of
from envbuild.base.packages import record_row
from envbuild.layers.source_files import relocate
from envbuild.layers.source_job import PREFIX, TOOLS, BuildHost, BuildPython, SourceBuild
from envbuild.layers.wheel import INSTALLER, RELOCATABLE, entry_point_scripts, render_record
from envbuild.store.archives import unpack, unzip

_DATA = {"purelib": "", "platlib": "", "scripts": "bin", "data": ".", "headers": "include"}
_LICENCES = ("COPYING*", "LICENSE*", "LICENCE*", "NOTICE*")
# Reports all missing programs before the build begins.
_LOOK = 'for p; do command -v "$p" >/dev/null || { echo "$p: not found"; m=127; }; done; exit ${m:-0}'
_UNWANTED = ("share/doc", "share/info", "share/man")


def make_layer(job: SourceBuild) -> list[str]:
    """Build the layer of `job`, install it into `job.staged` and relocate its files; return the result of `relocate`.

    Raises StepError for a command that fails, BuildError for an unusable archive or result.
    """
    host, layer = job.build_host, job.layer
    (host.work / "tmp").mkdir()
    (host.work / "stage").mkdir()
    unpack(job.archive, job.source)
    programs = [*layer.tools, *(["patch"] if job.patches else [])]
    job.run("programs", ["sh", "-c", _LOOK, "sh", *programs])
    for patch in job.patches:
        # A fixed name, because `patch` would take a file name with a leading dash for an option.
        shutil.copyfile(patch, host.work / "patch.diff")
        options = ["-p1", "--batch", "--forward", "--no-backup-if-mismatch", "-i", str(host.inside / "patch.diff")]
        job.run(f"patch {patch.name}", ["patch", *options])
    _SYSTEMS[layer.system](job)
    if not job.staged.is_dir() or not any(job.staged.iterdir()):
        raise BuildError(
            f"{job.title}: `make install` installed nothing below {PREFIX}",
            "its Makefile must honour DESTDIR and PREFIX; a variable in `configure` may name {install}, the folder to "
            "install into",
        )
    _licences(job)
    tidy(job.staged, (f"{job.stage}{PREFIX}",))
    if libraries := [host.inside / path.relative_to(host.work) for path in job.staged.rglob("*") if is_elf(path)]:
        # Debugging information is most of a library's size.
        job.run("strip", ["strip", "--strip-debug", *sorted(map(str, libraries))])
    traces = {str(host.inside), str(host.work)}
    if layer.system == "wheel" and job.python.startswith("/"):
        traces.add(str(job.environment))
    arch = layer.target.rpartition("-")[2]
    done = relocate(job.staged, arch, sorted(traces), job.places, job.hosts.values())
    if layer.system == "wheel":
        renew_records(job.staged, layer.name)
    return done


def _autotools(job: SourceBuild) -> None:
    if not (job.source / "configure").is_file():
        # The archive of a tag does not contain the version: write it to the files that gnulib's git-version-gen and
        # aws-ofi-nccl read.
        for name in (".tarball-version", ".release_version"):
            (job.source / name).write_text(job.layer.version + "\n", encoding="utf-8")
        if (job.source / "autogen.sh").is_file():
            # Some scripts have no "#!" line: a shell runs them, execve does not.
            text = (job.source / "autogen.sh").read_bytes()
            os.chmod(job.source / "autogen.sh", 0o755)
            job.run("autogen.sh", ["./autogen.sh"] if text[:2] == b"#!" else ["sh", "autogen.sh"])
        elif (job.source / "configure.ac").is_file():
            job.run("autoreconf", ["autoreconf", "--force", "--install"])
        else:
            raise BuildError(
                f"{job.title}: its archive has no configure script",
                f'name its build system: `system = "make"` in [layers.{job.layer.name}]',
            )
    os.chmod(job.source / "configure", 0o755)
    options = [f"--prefix={PREFIX}", f"--libdir={PREFIX}/lib", "--disable-static", "--enable-shared"]
    options += ["--disable-dependency-tracking", *job.options()]
    job.run("configure", ["./configure", *options], more=("config.log",))
    job.run("make", ["make", f"-j{job.jobs}"])
    job.run("make install", ["make", "install", f"DESTDIR={job.stage}"])


def _make(job: SourceBuild) -> None:
    # The last value on a command line wins: a layer's own PREFIX={install} is for Makefiles without DESTDIR.
    named = [f"PREFIX={PREFIX}", f"DESTDIR={job.stage}", *job.options()]
    job.run("make", ["make", f"-j{job.jobs}", *named])
    job.run("make install", ["make", "install", *named])


def _wheel(job: SourceBuild) -> None:
    wheel, version = build_wheel(job)
    unpack_wheel(wheel, job.staged, version)
    add_scripts(job.staged, wheel.name)


_SYSTEMS = {"autotools": _autotools, "make": _make, "wheel": _wheel}


def _licences(job: SourceBuild) -> None:
    """Copy the licence texts of the source to the installed files."""
    for patterns in (job.layer.licences, _LICENCES):
        paths = sorted({path for pattern in patterns for path in job.source.glob(pattern) if path.is_file()})
        if paths:
            break
    else:
        job.log(f"{job.title}: no licence file in its archive")
        return
    folder = job.staged / "share" / "licenses" / job.layer.name
    folder.mkdir(parents=True, exist_ok=True)
    for path in paths:
        shutil.copyfile(path, folder / path.name)


def tidy(tree: Path, roots: Sequence[str] = ()) -> None:
    """Normalize an installed tree.

    Documentation, static libraries, libtool files and empty folders are removed, modes become independent of the umask,
    and links into the prefix, or into `roots`, other paths of `tree`, become relative.
    """
    for name in _UNWANTED:
        shutil.rmtree(tree / name, ignore_errors=True)
    for path in sorted(tree.rglob("*"), reverse=True):  # the content of a folder before the folder
        if path.is_symlink():
            target = os.readlink(path)
            # Makefiles without DESTDIR, and some with it, link to the folder that they install into.
            root = next((root for root in (PREFIX, *roots) if target.startswith(root + "/")), None)
            if root is not None:
                inner = os.path.relpath(target, root / path.parent.relative_to(tree))
                path.unlink()
                path.symlink_to(inner)
        elif path.is_dir():
            path.chmod(0o755)
            with contextlib.suppress(OSError):
                path.rmdir()  # empty ones only
        elif path.suffix in (".la", ".a"):
            path.unlink()
        else:
            path.chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)
    tree.chmod(0o755)


def unpack_wheel(wheel: Path, prefix: Path, python: str) -> None:
    """Unpack a wheel below an environment's root for Python `python` ("3.11"), without scripts of entry points."""
    site = prefix / "lib" / f"python{python}" / "site-packages"
    site.mkdir(parents=True, exist_ok=True)
    unzip(wheel, site)
    for data in site.glob("*.data"):
        for part in data.iterdir():
            into = site if not _DATA.get(part.name) else prefix / _DATA[part.name]
            shutil.copytree(part, into, dirs_exist_ok=True)
        shutil.rmtree(data)


def unpack_cuda(wheels: list[Path], folder: Path) -> None:
    """Unpack NVIDIA's wheels as one CUDA toolkit: bin, include, lib (also as lib64), libraries by linkers' names."""
    raw = folder.with_name(folder.name + ".raw")
    folder.mkdir()
    for wheel in wheels:
        raw.mkdir()
        unzip(wheel, raw)
        # cu12: nvidia/<part>/include; cu13: nvidia/cu13/include.
        for part in sorted(raw.glob("nvidia/*/")):
            shutil.copytree(part, folder, dirs_exist_ok=True)
        shutil.rmtree(raw)
    (folder / "lib").mkdir(exist_ok=True)
    for library in sorted((folder / "lib").glob("lib*.so.*")):
        plain = library.with_name(library.name.partition(".so.")[0] + ".so")
        if not plain.exists():
            plain.symlink_to(library.name)
    (folder / "lib64").symlink_to("lib")


def unpack_tools(wheels: Sequence[Path], work: Path) -> None:
    """Unpack the wheels that a build runs below `work`: modules, and programs in bin. Raises as `unzip`."""
    folder = work / TOOLS
    folder.mkdir()
    for wheel in wheels:
        unzip(wheel, folder)
    for scripts in sorted(folder.glob("*.data/scripts")):
        shutil.copytree(scripts, folder / "bin", dirs_exist_ok=True)


_WITH_PATH = 'PATH="$1:$PATH"; export PATH; shift; exec "$@"'
_VERSION = "import sys; print('%d.%d' % sys.version_info[:2], file=open(sys.argv[1], 'w'))"
# Variables with compiler options; a recipe's options follow ours, and take precedence.
_FLAGS = ("CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS")


def interpreter_in(host: BuildHost, python: BuildPython, *, isolated: bool) -> str:
    """Return the path, as commands see it, of an interpreter for the build of a Python project.

    It sees the packages of the artifact's environment, or none if `isolated`; a missing environment is created in the
    work folder of `host`. Source of pyvenv.cfg: PEP 405.
    """
    if python.packages is None and not isolated:
        return python.interpreter
    # The interpreter of a virtual environment is a link, and home is where its standard library is found.
    program = os.path.realpath(python.interpreter) if python.packages is None else python.interpreter
    home = os.path.dirname(program)
    root = host.work / "environment"
    if python.conda is not None:
        root.mkdir()
        python.conda(root, host.inside / root.name)
        home, program = str(host.inside / root.name / "bin"), python.interpreter
        if not isolated and python.packages is not None:
            python.packages(root)
            return f"{home}/python"
        root = host.work / "isolated"
    (root / "bin").mkdir(parents=True)
    (root / f"lib/python{python.version}/site-packages").mkdir(parents=True)
    system = str(python.system and not isolated).lower()
    (root / "pyvenv.cfg").write_text(f"home = {home}\ninclude-system-site-packages = {system}\n", encoding="utf-8")
    for name in ("python", "python3", f"python{python.version}"):
        (root / "bin" / name).symlink_to(f"{home}/{os.path.basename(program) or 'python'}")
    if not isolated and python.packages is not None:
        python.packages(root)
    return str(host.inside / root.name / "bin/python")


def build_wheel(job: SourceBuild) -> tuple[Path, str]:
    """Build the project of `job` for the interpreter `job.python`; return its wheel and the Python version.

    The layer's options are environment variables of the build, NAME=VALUE. Raises StepError; BuildError when the build
    returns no wheel or several.
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
        raise BuildError(f"{job.title}: pip built {len(wheels)} wheels of it instead of one")
    return wheels[0], (work / "python-version").read_text(encoding="ascii").strip()


def renew_records(tree: Path, name: str) -> None:
    """Rewrite RECORD and INSTALLER of the distribution in `tree`, because strip and patchelf changed its libraries."""
    # RECORD does not list the licence texts that the layer `name` adds.
    for info in sorted(tree.glob("lib/python*/site-packages/*.dist-info")):
        (info / "INSTALLER").write_bytes(INSTALLER)
        rows = [
            (os.path.relpath(path, info.parent), *_row(path))
            for path in tree.rglob("*")
            if not path.is_dir() and path != info / "RECORD" and f"share/licenses/{name}/" not in path.as_posix()
        ]
        (info / "RECORD").write_bytes(render_record(rows, info.name))
        for file_name in ("INSTALLER", "RECORD"):
            (info / file_name).chmod(0o644)


def _variables(job: SourceBuild) -> dict[str, str]:
    """Return environment variables that disable the host's pip and Python settings, and keep temporary paths out."""
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
    """Create the scripts of entry points, and change scripts so that they run the interpreter beside them."""
    programs = tree / "bin"
    for path in sorted(programs.iterdir()) if programs.is_dir() else ():
        head, _, rest = path.read_bytes().partition(b"\n")
        if head.startswith(b"#!python"):
            path.write_bytes(RELOCATABLE + rest)
            path.chmod(0o755)
    for text in sorted(tree.glob("lib/python*/site-packages/*.dist-info/entry_points.txt")):
        for name, script in entry_point_scripts(text.read_text(encoding="utf-8"), "", where):
            programs.mkdir(exist_ok=True)
            (programs / name).write_bytes(RELOCATABLE + script.partition(b"\n")[2])
            (programs / name).chmod(0o755)


def _row(path: Path) -> tuple[str, str]:
    return record_row(bytes.fromhex(sha256_of(path)), path.stat().st_size)
