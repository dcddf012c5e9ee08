"""Fixtures of the real tests: the command as users run it, and one verified environment for all."""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

import pytest
import recipe_python
from disk import spread
from docker import DockerClient
from lab import apptainer
from lab import conda_channel as lab_conda
from lab import sources as lab_sources
from lab.command_server import CommandServer, start_server
from lab.conda_channel import Channel
from lab.conda_server import Server, serve
from lab.dockerd import Lab, dockerd, missing
from lab.terminal import Recording, record
from lab.wheels import make_recipe, make_wheel

from envbuild.build.commit import open_subject
from envbuild.run_environment import load_environment
from envbuild.verify.model import Subject
from envbuild.verify.survey import Survey

REPOSITORY = Path(__file__).resolve().parents[2]
# Of recipes whose tests ask for a verification, and not what it does by default.
QUICK = "\n[verify]\nnodes = 1\nnproc_per_node = 1\nepochs = 2\n"
# Of recipes whose tests train by themselves: the verification checks files and imports.
FILES_ONLY = "\n[verify]\ntrainer = false\n"
ARCH = os.uname().machine
NO_DAEMON = {"DOCKER_HOST": "unix:///nonexistent/docker.sock"}


# Variables that Python or the dynamic linker reads when a program starts.
_AT_START = ("PYTHON", "LD_", "LC_", "LANG", "COLUMNS")


@cache
def _command_server() -> CommandServer:
    """The server of this worker's commands, until the worker ends."""
    server = start_server(os.environ)
    atexit.register(server.stop)
    return server


def _run_command(line: list[str], folder: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a program; `python -m envbuild` by the server, but each of its commands as a new process the first time."""
    changed = {name for name in {*env, *os.environ} if env.get(name) != os.environ.get(name)}
    server = _command_server()
    plain = line[:3] == [sys.executable, "-m", "envbuild"] and not any(name.startswith(_AT_START) for name in changed)
    # The server runs one command at a time.
    plain = plain and threading.current_thread() is threading.main_thread()
    if not plain or line[3] not in server.known:
        if plain:
            server.known.add(line[3])
        return subprocess.run(line, capture_output=True, text=True, cwd=folder, env=env)
    with TemporaryDirectory() as output:
        out, err = Path(output, "out"), Path(output, "err")
        _, status = server.run(line[3:], folder, env, out, err)
        assert status is not None
        return subprocess.CompletedProcess(line, status, out.read_text(), err.read_text())


@dataclass
class Command:
    """`envbuild` run in one folder with its own store. Variables of `env` go over the machine's."""

    folder: Path
    env: dict[str, str] = field(default_factory=dict)

    def __call__(self, *arguments: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
        done = _run_command(self.line(*arguments), self.folder, self.variables(env))
        assert "Traceback (most recent call last)" not in done.stderr.split("    seen:")[0], done.stderr
        if done.returncode == 6 and recipe_python.is_missing(done.stderr):
            pytest.skip(recipe_python.MISSING)
        return done

    def start(self, *arguments: str | Path, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.line(*arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            env=self.variables(env),
            # A test run in the background of a script ignores Ctrl-C, and its children would too.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def line(self, *arguments: str | Path) -> list[str]:
        return [sys.executable, "-m", "envbuild", *map(str, arguments)]

    def variables(self, env: dict[str, str]) -> dict[str, str]:
        return {**os.environ, **self.env, **env}

    def on_terminal(self, *arguments: str | Path, **env: str) -> tuple[dict[str, Any], Recording]:
        """What `--json` printed to a file, and what a terminal got meanwhile."""
        with TemporaryFile() as stdout:
            line = self.line(*arguments, "--json")
            seen = record(line, folder=self.folder, env=self.variables(env), stdout=stdout)
            assert seen.returncode == 0, seen.output.decode()
            stdout.seek(0)
            return json.load(stdout), seen

    def json(self, *arguments: str | Path, **env: str) -> dict[str, Any]:
        done = self(*arguments, "--json", **env)
        assert done.returncode == 0, done.stderr
        loaded: dict[str, Any] = json.loads(done.stdout)
        return loaded


def clear(folder: Path) -> None:
    """Remove what is in a folder of a test, but nothing that the test left mounted there.

    The empty folder stays: ext4 puts the next test's where the fewest folders are, far from the removed files.
    """
    mounted = re.findall(
        rf"^(?:\S+ ){{4}}({re.escape(str(folder))}/\S+)", Path("/proc/self/mountinfo").read_text(), re.M
    )
    for place in reversed(mounted):
        # A space is \040 there.
        place = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), place)
        subprocess.run(["umount", "--lazy", place], check=True)
    for path in folder.iterdir():
        shutil.rmtree(path, ignore_errors=True)  # but no file, and no link
        with suppress(OSError):
            path.unlink()


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """pytest's own, which is emptied at once when the test passed: those of all tests are 40 GB."""
    failed = request.session.testsfailed
    yield tmp_path
    if request.session.testsfailed == failed and tmp_path.exists():
        clear(tmp_path)
        tmp_path.rename(tmp_path.with_name(f"{tmp_path.name}~"))  # else pytest removes it


@pytest.fixture(scope="module", autouse=True)
def _module_folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Clear the folders that fixtures of a module made, when its tests passed."""
    failed, root = request.session.testsfailed, tmp_path_factory.getbasetemp()
    before = set(root.iterdir())
    yield
    if request.session.testsfailed == failed:
        for path in set(root.iterdir()) - before - {root / "session"}:
            path.unlink() if path.is_symlink() or path.is_file() else clear(path)


def session_root(factory: pytest.TempPathFactory) -> Path:
    """The folder of what all modules of the session use; `_module_folders` leaves it."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return factory.getbasetemp().parent
    root = factory.getbasetemp() / "session"
    root.mkdir(exist_ok=True)
    return root


def shared(
    factory: pytest.TempPathFactory, name: str, make: Callable[[Path], Any] = lambda _: None
) -> tuple[Path, Any]:
    """A folder of the session called `name`, and the JSON value that `make(folder)` returned: it is called by the
    first of the session's workers that asks, and the others wait for it."""
    root = session_root(factory)
    folder, result = root / name, root / f"{name}.json"
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not result.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a worker that failed
            folder.mkdir()
            result.write_text(json.dumps(make(folder)))
    return folder, json.loads(result.read_text())


# The modules that compile a source layer.
_COMPILING = (
    "layers/source_*.py",
    "layers/local_build_host.py",
    "build/prepare.py",
    "build/builder_image.py",
    "base/elf*.py",
)


def kept_layers() -> Path:
    """The folder in the user's cache for source layers that take minutes to compile, named by a digest of envbuild's
    modules that compile them. Each layer has the store's name, which is a digest of all its inputs."""
    modules = sorted(path for pattern in _COMPILING for path in (REPOSITORY / "envbuild").glob(pattern))
    digest = hashlib.sha256(b"\0".join(path.read_bytes() for path in modules)).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "envbuild-tests/layers" / digest


def keep_layer(store: Path, name: str) -> None:
    """Copy the store's source layers called `name`, which a test found right, for later sessions."""
    kept = kept_layers()
    for manifest in (store / "built").glob("*/manifest.json"):
        if json.loads(manifest.read_text())["name"] == name and not (kept / manifest.parent.name).exists():
            kept.mkdir(parents=True, exist_ok=True)
            for folder in set(kept.parent.iterdir()) - {kept}:  # of other versions of these modules
                if time.time() - folder.stat().st_mtime > 30 * 86400:
                    shutil.rmtree(folder, ignore_errors=True)
            with TemporaryDirectory(dir=kept, prefix=".") as staging, suppress(OSError):  # another worker was faster
                shutil.copytree(manifest.parent, copy := Path(staging, "layer"), symlinks=True)
                copy.rename(kept / manifest.parent.name)


@pytest.fixture(scope="session")
def session_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of all workers that begins empty but for kept layers: the tests see what a fresh machine sees."""

    def make(store: Path) -> None:
        for layer in kept_layers().glob("[!.]*"):
            shutil.copytree(layer, store / "built" / layer.name, symlinks=True)

    return shared(tmp_path_factory, "store", make)[0]


def link_tree(source: Path | str, target: Path) -> Path:
    """Hard links in `target` to the files of a store, a part of one, or a venv (with its bytecode)."""
    target.parent.mkdir(parents=True, exist_ok=True)
    # Another worker's temporary files may be gone before cp gets there; it goes on.
    subprocess.run(["cp", "-al", "--", source, target], stderr=subprocess.DEVNULL)
    return target


def link_store(source: Path, target: Path) -> Path:
    """Hard links in `target` to a store, except to unpacked packages (most of its files), which images do not need."""
    target.mkdir(parents=True)
    for part in source.iterdir():
        if part.name not in ("uv", "conda"):
            link_tree(part, target / part.name)
    return target


@pytest.fixture
def envbuild(tmp_path: Path, session_store: Path) -> Command:
    """The command in an empty folder, on the session's store."""
    return Command(tmp_path, {"ENVBUILD_STORE": str(session_store)})


def own_copy(command: Command, recipe: str, verify: str = QUICK) -> Path:
    """A copy of a shipped recipe in the command's folder, where locks may be written, with a quick verification."""
    place = command.folder / "recipes" / recipe
    shutil.copytree(REPOSITORY / "recipes" / recipe, place)
    with (place / "recipe.toml").open("a") as stream:
        stream.write(verify)
    return place


def compiled_once(venv: Path, verified: Path) -> Path:
    """The venv, in which torch's modules have bytecode now: processes that start at one time would all compile them.

    Modules that are the same file in the venv `verified` have it there.
    """
    for bytecode in verified.glob("lib/**/__pycache__/*.pyc"):
        source = bytecode.parent.with_name(f"{bytecode.name.partition('.')[0]}.py").relative_to(verified)
        copy = venv / bytecode.relative_to(verified)
        if (venv / source).exists() and (venv / source).samefile(verified / source) and not copy.exists():
            copy.parent.mkdir(exist_ok=True)
            copy.hardlink_to(bytecode)
    subprocess.run([venv / "bin/python", "-c", "import torch.distributed.run, torch._dynamo"], check=True)
    return venv


@pytest.fixture(scope="session")
def pt_cpu(tmp_path_factory: pytest.TempPathFactory, session_store: Path) -> dict[str, Any]:
    """`envbuild venv pt_cpu`, built and verified once: what `--json` printed, its log, and the command's folder."""
    env = {"ENVBUILD_STORE": str(session_store)}

    def make(place: Path) -> dict[str, Any]:
        done = Command(place, env)("venv", "pt_cpu", "--locked", "--json")
        assert done.returncode == 0, done.stderr
        return {**json.loads(done.stdout), "log": done.stderr.splitlines()}

    folder, made = shared(tmp_path_factory, "pt_cpu", make)
    return {**made, "command": Command(folder, env)}


@pytest.fixture(scope="session")
def subject(pt_cpu: dict[str, Any]) -> Subject:
    """The environment of pt_cpu for tests that break its launches and leave its files: those are surveyed once."""
    opened = open_subject(Path(pt_cpu["path"]), load_environment())
    surveys: list[Survey] = []

    def survey(timeout_s: float) -> Survey:
        if not surveys:
            surveys.append(opened.survey(timeout_s))
        return surveys[0]

    return replace(opened, survey=survey)


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory, session_store: Path) -> tuple[Command, Path]:
    """A bundle of pt_minimal, and the command that made it. Builds write into the bundle's store."""
    env = {"ENVBUILD_STORE": str(session_store)}

    def make(place: Path) -> str:
        own_copy(command := Command(place, env), "pt_minimal")
        made = command("bundle", "pt_minimal", "--out", path := place / "pt_minimal")
        assert made.returncode == 0, made.stderr
        assert made.stdout.strip() == str(path)
        return str(path)

    folder, path = shared(tmp_path_factory, "bundle", make)
    return Command(folder, env), Path(path)


@pytest.fixture(scope="session")
def launchers(tmp_path_factory: pytest.TempPathFactory, session_store: Path, pt_cpu: dict[str, Any]) -> Path:
    """An environment with torch, Accelerate, DeepSpeed, and python-etcd for torchrun's rendezvous by etcd.

    The last two have no wheel on their index, so they get one here, as docs/howto/jobs.md tells; DeepSpeed's is built
    without its compiled operations.
    """
    if ARCH != "x86_64":
        pytest.skip("the recipe of these tests names the x86_64 build of PyTorch")

    def make(place: Path) -> str:
        built = ["deepspeed==0.19.8", "python-etcd==0.4.5"]
        line = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", place / "wheels", *built]
        subprocess.run(line, check=True, env={**os.environ, "DS_BUILD_OPS": "0"})
        links = f"{os.environ.get('PIP_FIND_LINKS', '')} {place / 'wheels'}".strip()
        torch = 'requirements = ["torch==2.13.0+cpu"]\nindexes = ["https://download.pytorch.org/whl/cpu"]\n'
        recipe = make_recipe(
            place,
            "launchers",
            ["accelerate==1.15.0", "numpy==2.2.6", *built],
            targets=f"[targets.cpu-x86_64]\n{torch}",
        )
        command = Command(place, {"ENVBUILD_STORE": str(session_store), "PIP_FIND_LINKS": links})
        venv = Path(command.json("venv", recipe, "--no-verify")["path"])
        return str(compiled_once(venv, Path(pt_cpu["path"])))

    return Path(shared(tmp_path_factory, "launchers", make)[1])


@pytest.fixture
def lab(tmp_path: Path) -> Command:
    """The command with its own store, where pip knows one find-links folder and no index at all."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (tmp_path / "pip.conf").write_text(f"[global]\nno-index = true\nfind-links = {wheels}\n")
    env = {
        "ENVBUILD_STORE": str(tmp_path / "store"),
        "PIP_CONFIG_FILE": str(tmp_path / "pip.conf"),
        "PIP_FIND_LINKS": str(wheels),
        "PIP_NO_INDEX": "1",
    }
    return Command(tmp_path, env)


@dataclass
class _Daemon:
    """A real dockerd, and the removal of what the last module left in it, which may still be running."""

    lab: Lab
    removal: Future[None] | None = None

    def remove_all(self) -> None:
        """Remove all containers, images and results of builds."""
        with closing(DockerClient(base_url=self.lab.environment()["DOCKER_HOST"], timeout=900)) as client:
            client.containers.prune()
            client.images.prune(filters={"dangling": False})
            client.api.prune_builds(all=True)


@pytest.fixture(scope="session")
def _dockerd(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Iterator[_Daemon]:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    folder = session_root(tmp_path_factory) / f"dockerd-{worker_id}"
    (layers := folder / "data/overlay2").mkdir(parents=True, exist_ok=True)
    spread(layers)
    with dockerd(folder, wait=False) as lab:
        daemon = _Daemon(lab)
        yield daemon
        if daemon.removal:
            daemon.removal.result()


@pytest.fixture(scope="module")
def docker_daemon(_dockerd: _Daemon) -> Iterator[Lab]:
    """A real dockerd, which begins each module without images; `environment()` points commands at it."""
    if _dockerd.removal:
        _dockerd.removal.result()
    yield _dockerd.lab
    # Meanwhile, other modules are tested: to remove gigabytes takes a disk's time, and no processor's.
    background = ThreadPoolExecutor(1)
    _dockerd.removal = background.submit(_dockerd.remove_all)
    background.shutdown(wait=False)


@pytest.fixture(scope="session")
def layout(tmp_path_factory: pytest.TempPathFactory, session_store: Path) -> dict[str, Any]:
    """`envbuild docker pt_cpu --out oci:image` for both architectures, without a daemon, of the recipe of `squash`."""
    env = {"ENVBUILD_STORE": str(session_store), **NO_DAEMON}
    line = (
        "docker",
        "pt_cpu",
        "--locked",
        "--out",
        "oci:image",
        "--tag",
        "pt_cpu:1",
        "--target",
        "cpu-x86_64",
        "--target",
        "cpu-aarch64",
    )

    def make(place: Path) -> dict[str, Any]:
        own_copy(command := Command(place, env), "pt_cpu")
        done = command(*line, "--json")
        assert done.returncode == 0, done.stderr
        return {**json.loads(done.stdout), "stderr": done.stderr}

    folder, made = shared(tmp_path_factory, "layout", make)
    return {**made, "command": Command(folder, env)}


def apptainer_of(factory: pytest.TempPathFactory) -> apptainer.Apptainer:
    """The session's Apptainer; call it where none is missing."""
    folder, _ = shared(factory, "apptainer", lambda place: str(apptainer.apptainer(place).folder))
    return apptainer.Apptainer(folder)


@pytest.fixture(scope="session")
def squash(tmp_path_factory: pytest.TempPathFactory, session_store: Path) -> dict[str, Any]:
    """pt_cpu as a .sqsh, quickly verified by envbuild's own runtime, and as a .sif, verified on two nodes by Apptainer
    where it can be had. By kind what `--json` said, without a daemon. Jobs train two ranks a node in test_jobs.py."""
    env = {"ENVBUILD_STORE": str(session_store), **NO_DAEMON}

    def make(place: Path) -> dict[str, Any]:
        own_copy(command := Command(place, env), "pt_cpu")
        made = {"enroot": command.json("enroot", "pt_cpu", "--locked")}
        sif = command.json("apptainer", "pt_cpu", "--locked", "--no-verify")
        runtime = {} if apptainer.missing() else apptainer_of(tmp_path_factory).environment()
        verified = command.json("verify", sif["path"], "--nodes", "2", **runtime)
        return {**made, "apptainer": {**sif, "receipt": verified["receipt"]}}

    folder, made = shared(tmp_path_factory, "squash", make)
    return {**made, "command": Command(folder, env)}


def tiny_site(folder: Path, store: Path) -> Command:
    """The command in `folder` without a daemon, where pip knows the wheels of `folder` and no index."""
    pip = {"PIP_FIND_LINKS": str(folder / "wheels"), "PIP_NO_INDEX": "1"}
    return Command(folder, {"ENVBUILD_STORE": str(store), **NO_DAEMON, **pip})


def use_base_of_pt_minimal(recipe: Path, arch: str = ARCH) -> None:
    """Give a recipe the image lock of pt_minimal for `arch`: a base of Debian packages."""
    lock = (REPOSITORY / f"recipes/pt_minimal/cpu-{arch}.image.toml").read_text()
    (recipe / f"cpu-{arch}.image.toml").write_text(lock.replace('"pt_minimal"', f'"{recipe.name}"'))


@pytest.fixture(scope="session")
def tiny_squash(tmp_path_factory: pytest.TempPathFactory, session_store: Path) -> dict[str, Any]:
    """`envbuild build tiny_image --artifact enroot,apptainer` of a tiny wheel on a Debian base, verified without
    training; as `squash` returns it. For what holds of any image file."""

    def make(place: Path) -> dict[str, Any]:
        make_wheel(place / "wheels", "tiny")
        recipe = make_recipe(place / "recipes", "tiny_image", ["tiny"], extra="[verify]\ntrainer = false\n")
        use_base_of_pt_minimal(recipe)
        return tiny_site(place, session_store).json("build", "tiny_image", "--artifact", "apptainer,enroot")

    folder, made = shared(tmp_path_factory, "tiny_squash", make)
    enroot, apptainer = made["artifacts"]
    return {"enroot": enroot, "apptainer": apptainer, "command": tiny_site(folder, session_store)}


@pytest.fixture(scope="session")
def real_apptainer(tmp_path_factory: pytest.TempPathFactory) -> apptainer.Apptainer:
    """The real Apptainer, in a folder of its own."""
    reason = apptainer.missing()
    if reason is not None:
        pytest.skip(reason)
    return apptainer_of(tmp_path_factory)


@pytest.fixture(scope="session")
def conda_channel(tmp_path_factory: pytest.TempPathFactory, session_store: Path) -> Channel:
    """A conda channel for linux-64 and linux-aarch64 with conda-forge's names, made once."""
    reason = lab_conda.missing()
    if reason is not None:
        pytest.skip(reason)
    environment = load_environment({**os.environ, "ENVBUILD_STORE": str(session_store)})
    folder, _ = shared(
        tmp_path_factory, "conda", lambda place: str(lab_conda.build_channel(place / "channel", environment).folder)
    )
    return Channel(folder / "channel")


@pytest.fixture
def conda_server(conda_channel: Channel) -> Iterator[Server]:
    """The channel over HTTP, without faults, no request made yet."""
    with serve(conda_channel.folder) as running:
        yield running


@pytest.fixture(scope="session")
def libfabric_source(tmp_path_factory: pytest.TempPathFactory) -> lab_sources.SourceArchive:
    """libfabric 2.1.0's source archive, from Debian."""
    reason = lab_sources.missing()
    if reason is not None:
        pytest.skip(reason)

    def fetch(place: Path) -> list[str]:
        archive = lab_sources.libfabric(place)
        return [str(archive.path), archive.sha256, archive.version]

    path, *more = shared(tmp_path_factory, "libfabric", fetch)[1]
    return lab_sources.SourceArchive(Path(path), *more)


# Files whose tests take minutes. They come first, so that the workers end at about the same time; those that wait much
# stand between those that compute.
_LONG = (
    "conda",
    "job_faults",
    "horovod",
    "diagnose",
    "dockerfile",
    "source_images",
    "jobs",
    "squash",
    "checks_alive",
    "tutorial",
    "docker",
    "source_layers",
    "every_call",
    "trainer",
    "docker_out",
    "preflight",
    "docker_registry",
    "venv",
    "fabric",
    "etcd",
    "venv_failures",
    "bundle",
    "exec",
    "slim",
)


# The exit status of pytest when tests were skipped that should run: tests/run runs failed tests again, not these.
SKIPPED = 9


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", metavar="K/N", help="Run every N-th file of the real tests, from the K-th one on.")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the files, and leave out those of other parts; tests of a file keep their order."""
    order = {f"test_{name}": place for place, name in enumerate(_LONG)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))
    if part := config.getoption("--part"):
        number, parts = map(int, part.split("/"))
        files = list(dict.fromkeys(item.path for item in items))[number - 1 :: parts]
        config.hook.pytest_deselected(items=[item for item in items if item.path not in files])
        items[:] = [item for item in items if item.path in files]


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    """Say each skipped real test with its reason, whatever the verbosity."""
    for report in terminalreporter.stats.get("skipped", []):
        terminalreporter.write_line(f"skipped: {report.nodeid}: {report.longrepr[2]}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Where every real test should run (FAIL_ON_SKIP), a skipped one fails the session, with a status of its own."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter else []
    if (
        os.environ.get("FAIL_ON_SKIP")
        and exitstatus in (0, 1)
        and any(recipe_python.MISSING not in str(one.longrepr) for one in skipped)
    ):
        session.exitstatus = SKIPPED
