"""Adding a thing costs one module and one entry: toys that are built, trained and judged for real.

The module of the toy kind has nothing of the venv's: it unpacks wheels with zipfile. `tests/unit/test_extending.py` has
toys of all other things.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import pytest

from envbuild import runtimes
from envbuild.base import host
from envbuild.base.files import sha256_of
from envbuild.base.progress import OnProgress
from envbuild.build import squash_files
from envbuild.build.commit import open_subject
from envbuild.build.folder import make_environment, prepare_folder
from envbuild.build.image import prepare_image
from envbuild.build.installing import FolderBuild
from envbuild.build.squash import ImageFileOptions, OutputFile, make_from_recipe
from envbuild.contract import kinds
from envbuild.contract.installed import distributions, names_and_versions
from envbuild.contract.kinds import FileArtifact, FolderArtifact
from envbuild.contract.manifest import seal, write_manifest
from envbuild.contract.receipt import passing_receipt
from envbuild.contract.state import FILE, State, has_packages, site_packages
from envbuild.contract.verification import Thoroughness
from envbuild.image.squashfs.model import codec_of
from envbuild.job_inputs import open_artifact
from envbuild.jobs.model import JobRequest
from envbuild.jobs.plan import plan_job, wanted_kinds
from envbuild.jobs.schedulers import render
from envbuild.layers.wheels import locate
from envbuild.plan import state_of
from envbuild.pythons import provide_python
from envbuild.recipe.load import load_recipe
from envbuild.recipe.targets import Target, host_arch
from envbuild.run_environment import load_environment
from envbuild.runtimes.base import HostProgram, HostStart, Runtime, Way
from envbuild.site.settings import load_site
from envbuild.verify import image_file

from .conftest import Command, own_copy

HERE = f"cpu-{host_arch()}"
TOY = FolderArtifact("toy", "Build a toy.", "toy", sources=("package index",), imports=("rattler",))


def build(wanted: FolderBuild, compiled: Path) -> State:
    """Unpack the wheels beside a link to Python; pyvenv.cfg is Python's own file for such a folder.

    Modules that the site-packages `compiled` have too get the bytecode there: to compile torch takes seconds.
    """
    plan, environment, staged = wanted.plan, wanted.environment, wanted.staged
    python = provide_python(plan.python, environment, offline=wanted.offline)
    packages = site_packages(staged, plan.python)
    located, own = locate(plan, wanted.trainer, environment, wanted.offline)
    for wheel in (*located, *own):
        with zipfile.ZipFile(wheel.path) as archive:
            archive.extractall(packages)
            for entry in archive.infolist():
                if mode := entry.external_attr >> 16 & 0o777:
                    (packages / entry.filename).chmod(mode | 0o600)
    known = [one for one in compiled.rglob("*.pyc") if (packages / _source(one).relative_to(compiled)).exists()]
    for source in map(_source, known):
        modified = source.stat().st_mtime  # bytecode names it
        os.utime(packages / source.relative_to(compiled), (modified, modified))
    (staged / "bin").mkdir()
    (staged / "bin/python").symlink_to(python.path)
    (staged / "pyvenv.cfg").write_text(f"home = {Path(python.path).parent}\n")
    found = [(one.name, one.version, one.record) for one in distributions(packages).values()]
    state = state_of(plan, python.version, os.path.realpath(python.path), found, own=own)
    (staged / FILE).write_text(state.render())
    manifest, files = write_manifest(staged, host.workers(environment.variables))
    seal(staged, manifest, files, environment.store)
    for one in known:
        copy = packages / one.relative_to(compiled)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(one, copy)
    return state


def _source(bytecode: Path) -> Path:
    return bytecode.parent.with_name(f"{bytecode.name.partition('.')[0]}.py")


def is_current(path: Path, state: State, python: str | None = None) -> bool:
    return has_packages(path, state, names_and_versions(site_packages(path, state.python)).items())


def command(path: Path, program: str, *arguments: str) -> list[str]:
    module = ["-m", "torch.distributed.run"] if program == "torchrun" else []
    return [str(path.absolute() / "bin/python"), *module, *arguments]


@pytest.fixture
def toy(
    monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None], pt_cpu: dict[str, Any]
) -> FolderArtifact:
    """A kind of environments: `envbuild/build/toy.py` and one entry."""
    compiled = site_packages(Path(pt_cpu["path"]), "3.11")
    module = SimpleNamespace(
        TITLE="toy",
        build=partial(build, compiled=compiled),
        is_current=is_current,
        command=command,
        launch_environment=lambda _, env: dict(env),
    )
    monkeypatch.setitem(sys.modules, "envbuild.build.toy", module)  # type: ignore[arg-type]
    monkeypatch.setitem(kinds.ARTIFACTS, "toy", TOY)  # type: ignore[attr-defined]
    record_property("files of an addition", ["envbuild/build/toy.py", "envbuild/contract/kinds.py"])
    return TOY


def test_a_kind_of_artifact_trains_and_is_judged(
    toy: FolderArtifact, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, session_store: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ENVBUILD_STORE", str(session_store))
    environment, target = load_environment(), Target.parse(HERE)
    loaded = load_recipe(own_copy(Command(tmp_path), "pt_cpu") / "recipe.toml")
    plan, trainer = prepare_folder(toy, loaded, target, environment, locked=True, offline=False, log=print)
    result = make_environment(toy, plan, trainer, environment, toy.default_path("pt_cpu", HERE), offline=False)
    assert result.built and result.verified and result.path == Path("build/pt_cpu", HERE, "toy")
    receipt = passing_receipt(result.path, result.digest)
    assert receipt is not None and receipt["artifact"]["kind"] == "toy" and receipt["runtime"] == "host"
    tried = {check["name"]: check["status"] for check in receipt["checks"]}
    assert [name for name, status in tried.items() if status != "pass"] == ["command", "restart"]
    assert {"installed", "linkage", "launch", "allreduce", "resume", "loss"} <= tried.keys()
    assert not make_environment(toy, plan, trainer, environment, result.path, offline=True).built

    (site_packages(result.path, plan.python) / "torch/nn/modules/linear.py").write_text("raise SystemExit(3)\n")
    subject = open_subject(result.path, environment)
    assert subject.survey(600.0).files.altered

    (tmp_path / "lab.toml").write_text('[scheduler]\nkind = "slurm"\n')
    site = load_site({"HOME": str(tmp_path), "USER": "ada"}, str(tmp_path / "lab.toml"))
    opened = open_artifact("pt_cpu", wanted_kinds("slurm", site), HERE, unverified=True)
    assert opened.artifact.kind == "toy"
    assert f"{result.path.absolute()}/bin/python -I" in render(plan_job(JobRequest(current=tmp_path), opened, site))
    assert json.loads((result.path / FILE).read_text())["artifact"] == "toy"


# ---- a kind of image files, its format, and the program that starts it
IMAGE = FileArtifact("toy", "Build a toy.", "{recipe}.toy", (), (), format="paged")
PAGE = b"PAGED".ljust(4096, b"\0")
# toyrun ROOT FOLDER PLACE PROGRAM ARGUMENT…: a program in a root file system, which sees a folder of the host in PLACE.
TOYRUN = """#!/bin/sh
set -e
if [ "$1" = --version ]; then exec echo toyrun version 1; fi
if [ "$1" != --inside ]; then exec unshare --mount --propagation private "$0" --inside "$@"; fi
root=$2 folder=$3 place=$4
shift 4
mkdir -p "$root$place"
mount --bind "$folder" "$root$place"
touch "$root/etc/hosts"
mount --bind /etc/hosts "$root/etc/hosts"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
PATH=$PATH:/usr/sbin
exec chroot "$root" /usr/bin/env PATH=/opt/env/bin:/usr/bin:/bin /bin/sh -c 'cd "$0" && exec "$@"' "$place" "$@"
"""


def write_paged(
    root: squash_files.SquashTree, out: BinaryIO, on_progress: OnProgress, squashfs: Path | None = None
) -> tuple[int, str]:
    """Write a page before the squashfs."""
    place = Path(out.name)
    with place.with_suffix(".squashfs").open("x+b") as alone:
        squash_files.write_sqsh(root, alone, on_progress)
        alone.seek(0)
        out.write(PAGE)
        shutil.copyfileobj(alone, out)
    out.flush()
    return len(PAGE), f"sha256:{sha256_of(place)}"


def toyrun(started: HostProgram) -> tuple[list[str], dict[str, str]]:
    line = [str(started.runtime), started.image, started.folder, started.inside, *started.command]
    return line, dict(started.variables)


@pytest.mark.skipif(os.geteuid() != 0, reason="the toy runtime mounts and changes its root folder, as root may")
def test_a_kind_of_image_file_is_written_started_and_judged(
    monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None], tmp_path: Path, session_store: Path
) -> None:
    """A page before the squashfs, and a program of its own that starts what is behind it."""
    monkeypatch.setitem(kinds.ARTIFACTS, "toy", IMAGE)  # type: ignore[attr-defined]
    paged = image_file.ImageFormat("paged", lambda head: head.startswith(b"PAGED"), lambda _, __: len(PAGE))
    monkeypatch.setitem(image_file.FORMATS, "paged", paged)
    monkeypatch.setitem(squash_files.WRITERS, "paged", write_paged)
    host = HostStart(("toyrun",), ("TOY_",), toyrun, kinds=("toy",), ways=(Way(unpacked=True),))
    runtime = Runtime(kinds=("toy",), host=host)
    monkeypatch.setitem(runtimes.RUNTIMES, "toyrun", runtime)  # type: ignore[attr-defined]
    rows = ["contract/kinds.py", "verify/image_file.py", "build/squash_files.py", "runtimes/__init__.py"]
    record_property("files of an addition", [f"envbuild/{name}" for name in rows])
    (tmp_path / "toyrun").write_text(TOYRUN)
    (tmp_path / "toyrun").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ENVBUILD_STORE", str(session_store))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    environment, target = load_environment(), Target.parse(HERE)
    loaded = load_recipe(own_copy(Command(tmp_path), "pt_cpu") / "recipe.toml")
    one = prepare_image(loaded, target, environment, bytecode=True, locked=True, offline=False, log=print)
    wanted = OutputFile("toy", IMAGE.default_path("pt_cpu", HERE))
    options = ImageFileOptions((wanted,), codec_of("zstd"), verify=True, asked=Thoroughness(quick=True))
    (result,) = make_from_recipe(one, options, environment, offline=False)
    assert result.path == Path("build/pt_cpu", HERE, "pt_cpu.toy") and result.path.read_bytes()[:5] == b"PAGED"
    receipt = passing_receipt(result.path, result.digest)
    assert receipt is not None and receipt["artifact"]["kind"] == "toy" and receipt["runtime"] == "toyrun 1"
    tried = {check["name"]: check["status"] for check in receipt["checks"] if check["status"] != "not tried"}
    assert {"installed", "launch", "allreduce", "imports"} <= tried.keys() and {*tried.values()} == {"pass"}
    assert open_subject(result.path, environment).runtime == "toyrun 1"
