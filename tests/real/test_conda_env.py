"""Conda environments built from a real channel: files, prefixes, what pip adds, and all that goes wrong."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from lab.conda_channel import Channel
from lab.conda_package import PLACEHOLDER, Metadata, conda_package
from lab.conda_server import Fault, Server, serve
from lab.wheels import make_wheel

from envbuild.base.elf import MACHINES
from envbuild.base.errors import BuildError
from envbuild.build import conda, conda_cache
from envbuild.build.installing import FolderBuild
from envbuild.contract.conda_meta import read_records
from envbuild.contract.state import State
from envbuild.environment import Environment
from envbuild.layers.conda_package import locate_conda
from envbuild.layers.wheel import load_trainer
from envbuild.lock.conda import CondaLock, CondaPackage
from envbuild.lock.format import Lock
from envbuild.plan import Plan, make_plan
from envbuild.recipe.load import load_recipe
from envbuild.recipe.sources import LockedPackage
from envbuild.recipe.targets import Target, host_arch
from envbuild.site.pip_config import PipConfig
from envbuild.site.settings import Site
from envbuild.store.store import Store
from envbuild.verify.survey import Survey, survey

# The channel itself is not there: every package comes from the mirror.
URL = "http://127.0.0.1:9/conda-forge"
REPOSITORY = Path(__file__).resolve().parents[2]
TARGET = Target.parse(f"cpu-{host_arch()}")
SUBDIR = {"x86_64": "linux-64", "aarch64": "linux-aarch64"}[host_arch()]
BASE = ("labdata", "labtool", "libgcc", "libstdcxx", "python")
SMALL = "labtool-1.1-pyhlab_0.conda"
LARGE = "python-3.11"


def locked(file: Path) -> CondaPackage:
    data = file.read_bytes()
    stem = file.name.removesuffix(".conda").removesuffix(".tar.bz2")
    name, version, build = stem.rsplit("-", 2)
    subdir = file.parent.name
    return CondaPackage(
        name,
        version,
        build,
        subdir,
        f"{URL}/{subdir}/{file.name}",
        hashlib.md5(data).hexdigest(),
        hashlib.sha256(data).hexdigest(),
    )


def plan_of(channel: Channel, more: Sequence[Path] = (), wheels: Sequence[Path] = (), compiled: bool = False) -> Plan:
    """The plan of a small environment: the interpreter, two packages of the lab, `more`, and `wheels` by pip."""
    files = [channel.package(name) for name in BASE[:2]]
    files += [channel.package(name, SUBDIR) for name in BASE[2:]]
    pip = tuple(LockedPackage(w.name.split("-")[0], w.name.split("-")[1], (digest(w),)) for w in wheels)
    lock = CondaLock(
        "pt_cpu",
        TARGET.name,
        "d",
        tuple(locked(file) for file in [*files, *more]),
        Lock("pt_cpu", TARGET.name, "3.11", f"{TARGET.arch}-manylinux_2_28", "d", pip),
    )
    trainer = load_trainer()
    return make_plan(
        load_recipe(REPOSITORY / "recipes" / "pt_cpu" / "recipe.toml"),
        lock,
        TARGET,
        artifact="conda",
        trainer_version=trainer.version,
        trainer_digest=trainer.digest,
        compile_bytecode=compiled,
    )


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@dataclass(frozen=True)
class Lab:
    """A store and a mirror of the channel; environments are put into `folder`."""

    folder: Path
    mirror: str
    pip: PipConfig = field(default_factory=lambda: PipConfig(no_index=True, retries=0))
    store: Path | None = None

    @property
    def environment(self) -> Environment:
        store = Store(self.store or self.folder / "store")
        site = Site(store=store.root, mirrors={URL: (self.mirror,)})
        return Environment({**os.environ, "NETRC": os.devnull}, site, self.pip, store)

    def build(self, plan: Plan, place: Path | None = None, offline: bool = False) -> State:
        """As the command does: made beside its place, then moved."""
        final = place or self.folder / "env"
        staged = final.with_name(f".{final.name}.envbuild-0123abcd")  # in the form of atomic.staging
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir(parents=True)
        state = conda.build(FolderBuild(plan, load_trainer(), self.environment, staged, final, offline))
        shutil.rmtree(final, ignore_errors=True)
        staged.rename(final)
        return state

    def unpacked(self, package: str) -> Path:
        (found,) = (self.environment.store.root / "conda" / "pkgs").glob(f"{package}-*[!k]")
        return found


@pytest.fixture
def lab(tmp_path: Path, conda_channel: Channel) -> Lab:
    """The channel as a folder on disk."""
    return Lab(tmp_path, conda_channel.folder.as_uri())


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture
def warm(lab: Lab, store: Path) -> Lab:
    """`lab` with a store that has the packages after the first build; tests leave its files as they are."""
    return replace(lab, store=store)


@pytest.fixture
def web(tmp_path: Path, conda_server: Server) -> Lab:
    """The channel over HTTP."""
    return Lab(tmp_path, conda_server.url)


def surveyed(place: Path) -> Survey:
    return survey(place, place / "lib" / "python3.11" / "site-packages", MACHINES[TARGET.arch])


def as_built(state: State, found: Survey) -> bool:
    rows = {(d.name, d.version, d.record) for d in found.distributions.values()}
    files = found.files
    return rows == set(state.packages) and not (files.altered or files.missing or files.unowned)


def run(place: Path, program: str, *arguments: str) -> str:
    line = [str(place / "bin" / program), *arguments]
    return subprocess.run(line, capture_output=True, text=True, check=True).stdout


# ---- what is built


def test_an_environment_runs_in_its_place_and_is_what_was_locked(warm: Lab, conda_channel: Channel) -> None:
    from rattler import PrefixRecord

    plan, place = plan_of(conda_channel), warm.folder / "env"
    state = warm.build(plan)
    assert state.environment == "conda" and state.interpreter == str(place / "bin" / "python")
    assert {n for n, _, _ in state.packages} == {*BASE, "ddp-train"}
    assert as_built(state, surveyed(place))
    assert conda.is_current(place, state)
    # The prefix is the place's, in texts and in programs, and not that of the folder where it was made.
    assert run(place, "labtool", "x") == "labtool 1.1 x\n"
    assert run(place, "labdata") == f"root = {place}/share/labdata\n"
    assert str(place).encode() + b"/lib\0" in (place / "bin/python3.11").read_bytes()
    for path in place.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.stat().st_size < 1 << 20:
            data = path.read_bytes()
            assert b".env.envbuild-" not in data, path
            assert PLACEHOLDER.encode() not in data or path.suffix == ".json", path
    # Files are shared with the store.
    shared = place / "lib/python3.11/site-packages/labtool.py"
    assert shared.samefile(warm.unpacked("labtool") / "site-packages/labtool.py")
    # conda-meta: readable by others, canonical, and silent about this host.
    records = sorted((place / "conda-meta").glob("*.json"))
    assert [p.stem for p in records] == sorted(p.stem for p in plan.conda)
    for path in records:
        record = PrefixRecord.from_path(path)
        assert record.url.startswith(f"{URL}/") and record.channel == URL
        assert b"file:" not in path.read_bytes() and str(warm.environment.store.root) not in path.read_text()
    history = (place / "conda-meta" / "history").read_text()
    assert history.startswith("==> ") and f"+{URL}/noarch::labtool-1.1-pyhlab_0\n" in history


def test_two_environments_of_one_plan_have_one_digest_and_a_moved_one_is_not_current(
    warm: Lab, conda_channel: Channel
) -> None:
    plan = plan_of(conda_channel)
    one, two = warm.build(plan), warm.build(plan, warm.folder / "other" / "a much longer name of it")
    assert one.digest == two.digest and one.packages == two.packages
    (warm.folder / "env").rename(warm.folder / "moved")
    assert not conda.is_current(warm.folder / "moved", one)


@pytest.mark.parametrize("name", ["prä fix with blanks", "x" * 140])
def test_programs_run_wherever_the_environment_is(warm: Lab, conda_channel: Channel, name: str) -> None:
    wheel = script_wheel(warm.folder / "wheels")
    pip = replace(warm.pip, find_links=(str(wheel.parent),))
    place = warm.folder / name / "env"
    replace(warm, pip=pip).build(plan_of(conda_channel, wheels=[wheel]), place)
    assert run(place, "labtool") == "labtool 1.1\n"
    assert run(place, "tinytool") == f"{place}\n"
    assert run(place, "python", "-c", "import sys; print(sys.prefix)") == f"{place}\n"


def test_before_it_is_in_its_place_programs_are_run_by_its_own_interpreter(warm: Lab, conda_channel: Channel) -> None:
    plan, final = plan_of(conda_channel), warm.folder / "final"
    staged = warm.folder / "staged"
    staged.mkdir()
    conda.build(FolderBuild(plan, load_trainer(), warm.environment, staged, final, True))
    env = conda.launch_environment(staged, {"PATH": "/usr/bin:/bin", "VIRTUAL_ENV": "/x", "A": "1\n2"})
    for program, said in (("labtool", "labtool 1.1\n"), ("python", "Python 3.11.2\n")):
        arguments = ["--version"] if program == "python" else []
        line = conda.command(staged, program, *arguments)
        done = subprocess.run(line, env=env, capture_output=True, text=True, check=True)
        assert done.stdout == said
    # As activated: scripts of packages are sourced, a venv's variable is gone, all others stay as they are.
    assert env["LABTOOL_HOME"] == f"{staged}/share/labtool"
    assert env["CONDA_PREFIX"] == str(staged) and "VIRTUAL_ENV" not in env and env["A"] == "1\n2"
    assert env["PATH"] == f"{staged}/bin:/usr/bin:/bin"
    staged.rename(final)
    assert conda.command(final, "labtool") == [str(final / "bin" / "labtool")]


def test_bytecode_is_compiled_with_the_places_path(warm: Lab, conda_channel: Channel) -> None:
    warm.build(plan_of(conda_channel, compiled=True))
    compiled = list((warm.folder / "env/lib/python3.11/site-packages").rglob("__pycache__/*.pyc"))
    assert compiled
    assert all(b".env.envbuild-" not in path.read_bytes() for path in compiled)


def test_the_survey_names_the_file_that_is_not_as_locked(warm: Lab, conda_channel: Channel) -> None:
    state = warm.build(plan_of(conda_channel))
    place = warm.folder / "env"
    packages = place / "lib/python3.11/site-packages"
    module, foreign, link = packages / "labtool.py", packages / "foreign.py", place / "share/labdata/default.conf"
    content, target = module.read_bytes(), link.readlink()

    def check_named(kind: str, file: Path) -> None:
        found = surveyed(place)
        assert getattr(found.files, kind) == [str(file.relative_to(place))]
        assert not as_built(state, found)

    module.unlink()
    check_named("missing", module)
    module.write_text("import os\n")
    check_named("altered", module)
    module.write_bytes(content)
    foreign.write_text("")
    check_named("unowned", foreign)
    foreign.unlink()
    link.unlink()
    link.symlink_to("elsewhere")
    check_named("altered", link)
    link.unlink()
    link.symlink_to(target)
    assert as_built(state, surveyed(place))


def test_what_pip_installs_or_removes_later_is_seen_quickly(warm: Lab, conda_channel: Channel) -> None:
    state, place = warm.build(plan_of(conda_channel)), warm.folder / "env"
    packages = place / "lib/python3.11/site-packages"
    (packages / "foreign-1.0.dist-info").mkdir()
    assert not conda.is_current(place, state)
    (packages / "foreign-1.0.dist-info").rmdir()
    assert conda.is_current(place, state)
    shutil.rmtree(packages / "labtool-1.1.dist-info")
    assert not conda.is_current(place, state)


# ---- what pip adds


def script_wheel(folder: Path) -> Path:
    return make_wheel(
        folder,
        "tinytool",
        files={
            "tinytool/tool.py": b"import sys\n\n\ndef main():\n    print(sys.prefix)\n",
            "tinytool-1.0.dist-info/entry_points.txt": b"[console_scripts]\ntinytool = tinytool.tool:main\n",
        },
    )


def test_wheels_are_added_beside_condas_packages(warm: Lab, conda_channel: Channel) -> None:
    wheel = script_wheel(warm.folder / "wheels")
    warm = replace(warm, pip=replace(warm.pip, find_links=(str(wheel.parent),)))
    plan = plan_of(conda_channel, wheels=[wheel])
    state, place = warm.build(plan), warm.folder / "env"
    assert ("tinytool", "1.0") in {(n, v) for n, v, _ in state.packages}
    assert as_built(state, surveyed(place)) and conda.is_current(place, state)
    assert run(place, "tinytool") == f"{place}\n"
    assert state.digest == warm.build(plan, warm.folder / "second").digest


@pytest.mark.parametrize(
    ("name", "files", "said"),
    [
        ("labtool", {}, "pip would replace labtool 1.1"),
        ("other", {"labtool.py": b"x = 1\n"}, "lib/python3.11/site-packages/labtool.py of conda package labtool-1.1"),
        ("other", {"other-1.0.data/scripts/labdata": b"#!python\n"}, "bin/labdata of conda package labdata-1.0-0"),
    ],
)
def test_a_wheel_over_a_conda_package_is_refused(
    warm: Lab, conda_channel: Channel, name: str, files: dict[str, bytes], said: str
) -> None:
    wheel = make_wheel(warm.folder / "wheels", name, files=files)
    warm = replace(warm, pip=replace(warm.pip, find_links=(str(wheel.parent),)))
    with pytest.raises(BuildError) as caught:
        warm.build(plan_of(conda_channel, wheels=[wheel]))
    assert said in caught.value.message and wheel.name in caught.value.message


# ---- where packages come from


@pytest.mark.parametrize(
    ("fault", "said"),
    [("404", "404"), ("401", "401"), ("500", "500"), ("truncate", "hash mismatch"), ("drop", "IncompleteRead")],
)
def test_a_faulty_answer_is_named_and_the_next_call_goes_on(
    web: Lab, conda_server: Server, conda_channel: Channel, fault: Fault, said: str
) -> None:
    plan, place = plan_of(conda_channel), web.folder / "env"
    conda_server.faults[SMALL] = fault
    with pytest.raises(BuildError) as caught:
        web.build(plan)
    message = caught.value.message
    assert SMALL in message and said in message and conda_server.url in message
    assert "labdata" not in message or fault == "401"
    assert caught.value.hint and not place.exists()
    conda_server.faults.clear()
    before = len(conda_server.requests)
    assert as_built(web.build(plan), surveyed(place))
    asked = {path.rpartition("/")[2] for path in conda_server.requests[before:]}
    assert SMALL in asked and (fault == "401" or not any(name.startswith("python") for name in asked))


def test_a_channel_that_goes_down_is_not_asked_for_each_package(
    web: Lab, conda_server: Server, conda_channel: Channel
) -> None:
    plan = plan_of(conda_channel)
    conda_server.down()
    started = time.monotonic()
    with pytest.raises(BuildError) as caught:
        web.build(plan)
    assert time.monotonic() - started < 10
    assert all(package.file_name in caught.value.message for package in plan.conda)
    conda_server.up()
    web.build(plan)


def test_a_tampered_file_of_a_local_channel_is_refused(lab: Lab, conda_channel: Channel) -> None:
    mirror = lab.folder / "mirror"
    for subdir in (SUBDIR, "noarch"):
        shutil.copytree(
            conda_channel.folder / subdir, mirror / subdir, ignore=shutil.ignore_patterns("*torch*", "shards")
        )
    plan = plan_of(conda_channel)
    (mirror / "noarch" / SMALL).write_bytes((mirror / "noarch" / SMALL).read_bytes()[:-1] + b"x")
    lab = replace(lab, mirror=mirror.as_uri())
    with pytest.raises(BuildError, match="hash mismatch") as caught:
        lab.build(plan, offline=True)
    assert SMALL in caught.value.message and "labdata" not in caught.value.message


def test_secrets_are_in_no_message_and_no_file(lab: Lab, conda_channel: Channel, tmp_path: Path) -> None:
    plan = plan_of(conda_channel)
    with serve(conda_channel.folder, prefix="/t/tok-en/forge", user="me", password="pass-word") as server:
        url = server.url.replace("://", "://me:{}@")
        with pytest.raises(BuildError) as caught:
            replace(lab, mirror=url.format("wrong-one")).build(plan)
        assert "401" in caught.value.message and "me:****@" in caught.value.message
        lab = replace(lab, mirror=url.format("pass-word"))
        server.faults[SMALL] = "404"
        with pytest.raises(BuildError) as second:
            lab.build(plan)
        server.faults.clear()
        lab.build(plan)
    for error in (caught.value, second.value):
        text = f"{error.message}{error.hint}"
        assert not [word for word in ("wrong-one", "pass-word", "tok-en") if word in text]
    for path in [*(lab.folder / "env").rglob("*"), *(lab.folder / "store").rglob("*")]:
        if path.is_file() and path.stat().st_size < 1 << 20:
            data = path.read_bytes()
            assert b"pass-word" not in data and b"tok-en" not in data, path


def test_offline_nothing_is_asked_and_what_is_there_serves(
    web: Lab, conda_server: Server, conda_channel: Channel
) -> None:
    plan = plan_of(conda_channel)
    with pytest.raises(BuildError, match="not asked, --offline"):
        web.build(plan, offline=True)
    assert not conda_server.requests
    web.build(plan)
    conda_server.down()
    web.build(plan, web.folder / "again", offline=True)


def test_packages_are_located_in_the_plans_order_and_once(
    web: Lab, conda_server: Server, conda_channel: Channel
) -> None:
    plan = plan_of(conda_channel)
    for _ in range(2):
        found = locate_conda(plan.conda, web.environment, offline=False)
        assert [package for package, _ in found] == list(plan.conda)
        assert all(digest(path) == package.sha256 for package, path in found)
    assert len(conda_server.requests) == len(plan.conda)


# ---- the store


# The damages of two builds, by package: a build heals the store for the next one.
DAMAGES = (
    {"labtool": "edited", "python": "cut", "labdata": "removed", "libgcc": "mode", "libstdcxx": "no folder"},
    {"labtool": "same stat", "python": "no stamp", "labdata": "other stamp", "libgcc": "more"},
)
# A file, or for "no folder" a folder, of each package.
DAMAGED = {
    "labtool": "site-packages/labtool.py",
    "python": "bin/python3.11",
    "labdata": "share/labdata/settings.conf",
    "libgcc": "lib/libgcc_s.so.1",
    "libstdcxx": "lib",
}


def test_a_damaged_unpacked_package_never_gets_into_an_environment(
    lab: Lab, conda_channel: Channel, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, place = plan_of(conda_channel), lab.folder / "env"
    state = lab.build(plan)
    for damages in DAMAGES:
        for package, damage in damages.items():
            _damage(lab, place, package, damage)
        capsys.readouterr()
        again = lab.build(plan)
        assert again.digest == state.digest and as_built(again, surveyed(place)), damages
        assert run(place, "labtool") == "labtool 1.1\n", damages
        lines = [line for line in capsys.readouterr().err.splitlines() if "damaged" in line]
        for package, damage in damages.items():
            said = "damaged (wrong sha256)" if damage.endswith("stamp") else "damaged in the store"
            named = [said in line for line in lines if f"{package}-" in line]
            assert named == [True], (package, damage, lines)
        assert not conda_cache.damaged(lab.environment.store, plan.conda, {}), damages


def _damage(lab: Lab, place: Path, package: str, damage: str) -> None:
    file = lab.unpacked(package) / DAMAGED[package]
    stamps = lab.folder / "store/conda/stamps"
    if damage == "edited":  # in place, through the hard link in an environment
        with (place / "lib/python3.11/site-packages/labtool.py").open("r+") as stream:
            stream.write("IMPORT")
    elif damage == "cut":
        os.truncate(file, 100)
    elif damage == "removed":
        file.unlink()
    elif damage == "mode":
        file.chmod(0o600)
    elif damage == "no folder":
        shutil.rmtree(file)
    elif damage == "no stamp":
        next(stamps.glob(f"{package}-*")).write_text("{")
    elif damage == "other stamp":
        shutil.copy(next(stamps.glob("labtool-*")), next(stamps.glob(f"{package}-*")))
    elif damage == "same stat":  # of the same size and time
        about, text = file.stat(), file.read_text()
        file.write_text(text.replace("import", "IMPORT"))
        os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
    else:
        file.with_name("foreign.py").write_text("")


def test_a_damaged_archive_in_the_store_is_fetched_again(
    web: Lab, conda_server: Server, conda_channel: Channel
) -> None:
    plan = plan_of(conda_channel)
    locate_conda(plan.conda, web.environment, offline=False)
    (archive,) = (web.folder / "store/conda/archives").glob(f"*/{SMALL}")
    archive.write_bytes(archive.read_bytes()[:-100])
    web.build(plan)
    assert sum(path.endswith(SMALL) for path in conda_server.requests) == 2


def test_a_package_that_is_another_than_locked_is_refused(lab: Lab, conda_channel: Channel) -> None:
    plan = plan_of(conda_channel)
    wrong = tuple(replace(p, version="9.9") if p.name == "labtool" else p for p in plan.conda)
    with pytest.raises(BuildError, match=r"contains labtool 1\.1 pyhlab_0, but the lock names labtool-9\.9"):
        lab.build(replace(plan, conda=wrong))


def test_two_builds_at_once_share_a_store(web: Lab, conda_channel: Channel, conda_server: Server) -> None:
    children = [start(web, name) for name in ("one", "two")]
    for child in children:
        _, err = child.communicate(timeout=120)
        assert child.returncode == 0, err
    plan = plan_of(conda_channel)
    assert len(conda_server.requests) == len(plan.conda)
    for name in ("one", "two"):
        assert not surveyed(web.folder / name).files.missing


@pytest.mark.parametrize("after", [0.6, 1.0, 1.8])
def test_after_kill_9_the_next_build_works(web: Lab, conda_channel: Channel, after: float) -> None:
    child = start(web, "env")
    time.sleep(after)
    os.killpg(child.pid, signal.SIGKILL)
    child.communicate()
    plan = plan_of(conda_channel)
    state = web.build(plan)
    assert as_built(state, surveyed(web.folder / "env"))
    assert not [p for p in (web.folder / "store/conda/pkgs").iterdir() if p.is_dir() and p.name[0] == "."]


def start(lab: Lab, name: str) -> subprocess.Popen[str]:
    """A build in a process of its own, at `lab.folder`/`name`."""
    code = (
        "import sys; sys.path[:0] = sys.argv[1:3]\n"
        "from pathlib import Path\n"
        "from real.test_conda_env import Lab, plan_of\n"
        "from lab.conda_channel import Channel\n"
        "folder, mirror, channel, name = sys.argv[3:]\n"
        "Lab(Path(folder), mirror).build(plan_of(Channel(Path(channel))), Path(folder) / name)\n"
    )
    channel = next(folder for folder in _CHANNELS)
    line = [sys.executable, "-c", code, str(REPOSITORY / "tests"), str(REPOSITORY), str(lab.folder), lab.mirror]
    return subprocess.Popen(
        [*line, channel, name], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


_CHANNELS: list[str] = []


@pytest.fixture(autouse=True)
def _known_channel(conda_channel: Channel) -> None:
    _CHANNELS[:] = [str(conda_channel.folder)]


# ---- disks and paths


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.parametrize(("where", "size"), [("place", "1m"), ("place", "24m"), ("store", "8m")])
def test_a_full_disk_is_said_and_the_old_environment_stays(
    web: Lab, conda_channel: Channel, where: str, size: str
) -> None:
    plan = plan_of(conda_channel)
    with small_disk(web.folder / "disk", size) as disk:
        place = disk / "env" if where == "place" else web.folder / "env"
        lab = replace(web, store=disk / "store") if where == "store" else web
        (place / "old").mkdir(parents=True)
        with pytest.raises(BuildError, match="No space left") as caught:
            lab.build(plan, place)
        assert str(disk) in caught.value.message and caught.value.hint
        assert [path.name for path in place.iterdir()] == ["old"]
    web.build(plan)


@pytest.mark.parametrize("where", ["place", "store"])
def test_a_read_only_disk_is_said(warm: Lab, conda_channel: Channel, where: str) -> None:
    with small_disk(warm.folder / "disk", "8m") as disk:
        place = warm.folder / "env"
        staged = (disk if where == "place" else warm.folder) / "staged"
        staged.mkdir()
        (disk / "store").mkdir()
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        chosen = replace(warm, store=disk / "store") if where == "store" else warm
        with pytest.raises(BuildError, match="Read-only file system") as caught:
            conda.build(FolderBuild(plan_of(conda_channel), load_trainer(), chosen.environment, staged, place, True))
        assert caught.value.hint


def test_a_path_too_long_for_a_package_is_refused_before_anything_is_written(warm: Lab, conda_channel: Channel) -> None:
    plan = plan_of(conda_channel)
    longest = "/" + "p" * (len(PLACEHOLDER) - 1)
    staged = warm.folder / "staged"
    staged.mkdir()
    with pytest.raises(BuildError) as caught:
        conda.build(FolderBuild(plan, load_trainer(), warm.environment, staged, Path(longest + "x"), True))
    message = caught.value.message
    assert "256 bytes" in message and "at most 255" in message and "bin/python3.11" in message
    assert not list(staged.iterdir())
    conda.build(FolderBuild(plan, load_trainer(), warm.environment, staged, Path(longest), True))
    assert longest.encode() in (staged / "bin/python3.11").read_bytes()


def test_scripts_of_packages_are_not_run_but_said(
    warm: Lab, conda_channel: Channel, capsys: pytest.CaptureFixture[str]
) -> None:
    mirror = warm.folder / "mirror"
    shutil.copytree(conda_channel.folder, mirror, ignore=shutil.ignore_patterns("*torch*", "shards", "linux-aarch64"))
    with conda_package(mirror, Metadata("linky", "1.0", "0", "noarch", noarch="generic")) as package:
        script = f"#!/bin/sh\ntouch {warm.folder}/ran\n".encode()
        package.file("bin/.linky-post-link.sh", script, executable=True)
        package.file("share/shared.txt", b"one\n")
    plan = plan_of(conda_channel, [mirror / "noarch" / "linky-1.0-0.conda"])
    replace(warm, mirror=mirror.as_uri()).build(plan)
    assert "bin/.linky-post-link.sh" in capsys.readouterr().err
    assert not (warm.folder / "ran").exists()
    names = [record["name"] for record in read_records(warm.folder / "env")]
    assert "linky" in names and json.loads((warm.folder / "env/envbuild.json").read_text())["packages"]
