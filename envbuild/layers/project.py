"""The user's own code, `[project]` of a recipe: its files, and their wheel, the last step of an artifact.

The wheel is kept in the store by the digest of the files. Sources: PEP 517 (build back ends), git-ls-files(1),
gitignore(5); reproducible-builds.org, "SOURCE_DATE_EPOCH"; Python's documentation of site (.pth files).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from envbuild.base import process
from envbuild.base.errors import BuildError, HostError, RecipeError
from envbuild.base.git import run_git
from envbuild.base.packages import described, pack, with_record
from envbuild.base.progress import log
from envbuild.base.text import normalise
from envbuild.cache.hashed import read_note, write_note
from envbuild.contract.state import FIXED_TIME
from envbuild.environment import Environment
from envbuild.layers.contents import reading
from envbuild.layers.wheel import TRAINER_NAME, required_by
from envbuild.plan import Plan
from envbuild.pythons import provide_python
from envbuild.recipe.checks import applicable
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.project import OwnCode
from envbuild.recipe.targets import host_arch

# Increase it when the wheel changes although the files do not.
_FORMAT = 1
_SKIPPED = re.compile(
    r"\.git|\.hg|\.svn|\.venv|\.tox|\.nox|__pycache__|\.(mypy|pytest|ruff)_cache|build|dist|.*\.egg-info|.*\.py[co]"
    # What `--out` may have put there: it would make each build another one.
    r"|.*\.(sqsh|sif)(\.failed)?|.*\.receipt\.json"
)
# git's words for a folder that is in no work tree, or in a repository without one.
_NO_WORK_TREE = re.compile("not a git repository|must be run in a work tree|cannot use bare repository")
# Files of environments: a folder with one of them is no source.
_ENVIRONMENTS = ("pyvenv.cfg", "conda-meta", "envbuild.json")


def collect(loaded: LoadedRecipe, environment: Environment, *, editable: bool = False) -> OwnCode | None:
    """Return the project of a recipe with its files, None without one. Raises RecipeError when it has no Python file.

    Modified tracked files are used with their modifications; untracked Python files are reported.
    """
    code, table = loaded.code, loaded.recipe.project
    if code is None or table is None:
        return None
    where = f"{code.where}: 'path' in [project]:"
    git_in = partial(_git, where, environment.variables)
    git = partial(git_in, code.root)
    tracked = None if table.include else git("ls-files", "-z", "--recurse-submodules")
    names = _all_files(code.root) if tracked is None else tracked.split("\0")[:-1]
    if left := tracked and (git("ls-files", "-z", "-o", "--exclude-standard", "*.py") or "").split("\0")[:-1]:
        log(f"note: [project]: {len(left)} files that git does not track are left out: {', '.join(left[:5])}")
    files, links = [], []
    for name in sorted({name for name in names if table.takes(name)}):
        path = code.root / name
        if not name.isprintable() or "\ufffd" in name or name.startswith("/") or ".." in name.split("/"):
            raise RecipeError(f"{where} {name!r} is not a valid file name in a wheel", "rename it")
        try:
            if path.is_file():
                mode = 0o755 if path.stat().st_mode & 0o100 else 0o644
                files.append((name, mode, environment.store.digests.of(path)))
            elif path.is_symlink():
                links.append(name)
        except OSError as error:
            raise RecipeError(f"{where} {path}: {error.strerror}") from error
    if links:
        log(f"note: [project]: links that do not lead to a file are left out: {', '.join(links[:5])}")
    if not any(name.endswith(".py") for name, _, _ in files):
        hint = "correct `path` or `include`" if tracked is None else "`git add` it, or say `include` in [project]"
        raise RecipeError(f"{where} no Python package found: no .py among {len(files)} files of {code.root}", hint)
    commit = "" if editable else (git("rev-parse", "--quiet", "--verify", "HEAD") or "").strip()
    if commit and _is_dirty(code.root, git_in):
        commit += "-dirty"
    return replace(code, files=tuple(files), commit=commit, editable=editable)


def _git(where: str, variables: Mapping[str, str], root: Path, *words: str) -> str | None:
    """Return git's output in `root`; None if git is missing, or `root` is in no work tree that git may read.

    Raises RecipeError if git cannot list the files, because otherwise all files would be used.
    """
    with contextlib.suppress(HostError):
        done = run_git(root, *words, variables=variables)
        if done.returncode == 0:
            return done.stdout
        if done.stderr and not _NO_WORK_TREE.search(done.stderr):
            fault = f"git does not read the repository of {root}:\n{process.tail(done)}"
            if words[0] == "ls-files":
                hint = "mend the repository, or say `include` in [project]: git is then not asked for the files"
                raise RecipeError(f"{where} {fault}", hint)
            log(f"note: [project]: {fault}")
    return None


def _is_dirty(root: Path, git: Callable[..., str | None]) -> bool:
    """Return whether tracked files in `root`, or in its submodules, changed since the commit.

    git runs separately in each submodule: otherwise it would run programs that the submodule's configuration names.
    """
    if git(root, "status", "--porcelain", "--untracked-files=no", "--ignore-submodules=dirty", "--", "."):
        return True
    rows = (git(root, "ls-files", "-z", "--stage") or "").split("\0")
    modules = [root / row.partition("\t")[2] for row in rows if row.startswith("160000 ")]
    return any(_is_dirty(module, git) for module in modules if (module / ".git").exists())


def _all_files(root: Path) -> Iterator[str]:
    for here, folders, files in os.walk(root):
        folders[:] = [
            name
            for name in folders
            if _is_source(here, name) and not any((Path(here, name) / marker).exists() for marker in _ENVIRONMENTS)
        ]
        files += [name for name in folders if os.path.islink(os.path.join(here, name))]
        yield from (os.path.relpath(os.path.join(here, name), root) for name in files if not _SKIPPED.fullmatch(name))


def _is_source(here: str, name: str) -> bool:
    # Outputs of a build are in no package of this name.
    package = name in ("build", "dist") and os.path.isfile(os.path.join(here, name, "__init__.py"))
    return package or not _SKIPPED.fullmatch(name)


def project_wheel(plan: Plan, environment: Environment, *, offline: bool) -> tuple[str, str, Path] | None:
    """Return name, version and wheel of the plan's project, built if the store lacks it; None without a project.

    Raises BuildError when its build back end fails, when its files change during the build, or when the wheel is not
    compatible with the plan; RecipeError when a locked package has its name.
    """
    code, store = plan.project, environment.store
    if code is None:
        return None
    # Hosts with one store may have other processors, for which a compiled wheel is none.
    content = json.dumps(
        [_FORMAT, host_arch(), plan.python, code.module, str(code.root) if code.editable else "", code.files]
    )
    note = store.folder("projects") / f"{hashlib.sha256(content.encode()).hexdigest()}.json"
    path: Path | None = None
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        known = read_note(note)
        path = store.find("wheels", known["sha256"], known["file"].__eq__)
    if path is None:
        log(f"{code.root}: building its wheel")
        with store.writing(), store.working("building") as work:
            made = _plain(code, work) if code.module else _built(code, work, plan, environment, offline)
            made = _editable(code, made) if code.editable else made
            sha256 = hashlib.sha256(made.read_bytes()).hexdigest()
            path = store.adopt(made, sha256, made.name)
            write_note(note, {"sha256": sha256, "file": made.name})
    return *_checked(code, path, plan), path


def _contents(code: OwnCode) -> Iterator[tuple[str, int, bytes]]:
    for name, mode, sha256 in code.files:
        try:
            data = (code.root / name).read_bytes()
        except OSError:
            data = b""
        if hashlib.sha256(data).hexdigest() != sha256:
            raise BuildError(f"{code.root / name} changed while envbuild read it", "run it again")
        yield name, mode, data


def _plain(code: OwnCode, work: Path) -> Path:
    folder, info = code.module.replace(".", "/"), f"{code.name.replace('-', '_')}-0"
    files = [(f"{folder}/{name}", data) for name, _, data in _contents(code)]
    executable = {f"{folder}/{name}" for name, mode, _ in code.files if mode & 0o100}
    metadata = f"Metadata-Version: 2.1\nName: {code.name}\nVersion: 0\n"
    path = work / f"{info}-py3-none-any.whl"
    path.write_bytes(pack(described(files, f"{info}.dist-info", metadata), executable))
    return path


def _built(code: OwnCode, work: Path, plan: Plan, environment: Environment, offline: bool) -> Path:
    for name, mode, data in _contents(code):
        path = work / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        path.chmod(mode)
    environment.write_uv_settings(work / "uv.toml", ())
    python = provide_python(plan.python, environment, offline=offline)
    options = ["--offline"] if offline else []
    done = process.run(
        [
            environment.uv,
            "build",
            "--wheel",
            "--config-file",
            work / "uv.toml",
            "--python",
            python.path,
            "--out-dir",
            work / "dist",
            *options,
            work / "source",
        ],
        env={**environment.uv_environment(), "SOURCE_DATE_EPOCH": str(FIXED_TIME), "PYTHONHASHSEED": "0"},
        check=False,
    )
    wheels = sorted(work.glob("dist/*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        failure = f"the wheel of {code.root} cannot be built ({process.ending(done.returncode)})"
        raise BuildError(
            f"{code.where}: [project]: {failure}:\n{process.tail(done)}",
            "the build sees no git history, and only the files that git tracks, or `include` in [project]; try it with "
            "`uv build --wheel`",
        )
    return wheels[0]


def _editable(code: OwnCode, wheel: Path) -> Path:
    """Return an editable wheel: the metadata of `wheel`, and a .pth file with the source folders instead of modules."""
    folders = [code.root.parents[code.module.count(".")]] if code.module else [code.root, code.root / "src"]
    with zipfile.ZipFile(wheel) as archive:
        info, names = _info(archive), [name for name in archive.namelist() if not name.endswith("/")]
        kept = [(name, archive.read(name)) for name in names if name.startswith(info) and name != f"{info}/RECORD"]
    modules = [name for name in names if not name.startswith(info)]
    places = {name: str(folder) for folder in folders for name in modules if (folder / name).is_file()}
    if lost := sorted(set(modules) - places.keys()):
        has = " or ".join(map(str, folders))
        raise BuildError(f"{code.where}: [project]: {lost[0]} of its wheel is not in {has}", "leave --editable out")
    text = "".join(f"{place}\n" for place in sorted(set(places.values())))
    path = wheel.parent / "editable" / wheel.name
    path.parent.mkdir()
    path.write_bytes(pack(with_record([(f"__editable__.{info.partition('-')[0]}.pth", text.encode()), *kept], info)))
    return path


def _info(archive: zipfile.ZipFile) -> str:
    names = [name for name in archive.namelist() if re.fullmatch(r"[^/]*\.dist-info/METADATA", name)]
    if len(names) != 1:
        raise BuildError(f"{archive.filename} is not a wheel: it has {len(names)} files METADATA")
    return names[0].partition("/")[0]


def _checked(code: OwnCode, wheel: Path, plan: Plan) -> tuple[str, str]:
    """Return name and version of `wheel`; raise an error if it has no module or is incompatible with `plan`."""
    # An existing base may have packages that no lock has.
    whole = plan.image is None or plan.image.base == "debian" or plan.conda
    with reading(wheel.name, "wheel"), zipfile.ZipFile(wheel) as archive:
        info, names = _info(archive), archive.namelist()
        lines = required_by(archive, info) if whole else []
        requirements = [applicable(lines, plan.python, plan.platform, extra) for extra in ("", *code.extras)]
    stem, _, version = info.removesuffix(".dist-info").rpartition("-")
    name, where = normalise(stem), f"{code.where}: [project]: {wheel.name}"
    known = check_name(plan, name) | {name: ""}  # its extras may require it
    if all(member.startswith(info) for member in names):
        raise BuildError(f"{where}: no Python package found", "name its packages in pyproject.toml")
    if plan.image is not None and not wheel.name.endswith("-any.whl"):
        raise BuildError(
            f"{where} was compiled for this host, and an image may be unable to load it",
            "build a venv or conda environment, or compile it as a layer of [layers]",
        )
    for other, line in (
        (other, line) for by_name in requirements for other, lines in by_name.items() for line in lines
    ):
        has = known.get(other)
        if has is None or (has and not line.specifier.contains(has, prereleases=True)):
            raise BuildError(
                f"{where} requires {line}, and {has or 'no version'} is locked",
                "if its build back end computes its requirements, add them to `requirements` of the recipe",
            )
    return name, version


def check_name(plan: Plan, name: str) -> dict[str, str]:
    """Return the other distributions of `plan`, with versions where known; raise RecipeError if one has this `name`."""
    known = {
        TRAINER_NAME: "",
        **{layer.name: layer.version if layer.locked else "" for layer in plan.sources},
        **{package.name: package.version for package in plan.packages},
    }
    if plan.conda:
        from envbuild.lock.conda_kind import provided

        known |= provided(plan.conda)
    if name in known and plan.project is not None:
        raise RecipeError(
            f"{plan.project.where}: 'path' in [project]: its distribution is {name}, as that of a locked package",
            f"remove {name} from the requirements, or rename the project",
        )
    return known
