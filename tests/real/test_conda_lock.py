"""`envbuild lock --conda` with the real solver, real channels and conda-lock as the judge of what is written."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from lab import artifacts
from lab.conda_package import Metadata, conda_package
from lab.conda_server import Server, serve
from lab.conda_shim import conda_shim
from lab.wheels import make_recipe, make_wheel

from envbuild.image.layout import Blobs

from .conftest import REPOSITORY, Command

FORGE = "https://conda.anaconda.org/conda-forge"
PASSWORD = "h1dden-w0rd"
ARCH = {"linux-64": "x86_64", "linux-aarch64": "aarch64"}
TARGETS = """\
[targets.cpu-x86_64]
[targets.cpu-aarch64]
[targets.cu126-x86_64]
conda = ["pytorch * cuda126*"]
"""


def put(folder: Path, name: str, version: str, build: str, subdir: str, *depends: str) -> None:
    noarch = "generic" if subdir == "noarch" else None
    with conda_package(folder, Metadata(name, version, build, subdir, depends, noarch=noarch)):
        pass


def index(folder: Path) -> None:
    from rattler.index import index_fs

    asyncio.run(index_fs(folder, force=True))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A channel of packages without content, for both architectures."""
    folder = tmp_path_factory.mktemp("tiny")
    python = "python >=3.11,<3.12.0a0"
    for subdir in ("linux-64", "linux-aarch64"):
        put(folder, "python", "3.11.9", "h1", subdir, "__glibc >=2.17,<3.0.a0", "zlib >=1.2")
        put(folder, "python", "3.12.1", "h1", subdir, "zlib")
        put(folder, "zlib", "1.3", f"h{subdir[-2:]}", subdir)
        for version in ("2.1.0", "2.2.6"):
            put(folder, "numpy", version, "py311_0", subdir, python)
        put(folder, "pytorch", "2.13.0", "cpu_py311_0", subdir, python, "numpy >=2", "tool")
        put(folder, "newglibc", "1.0", "0", subdir, "__glibc >=2.34")
        put(folder, "arch", "1.0", "0", subdir, f"__archspec 1 {ARCH[subdir]}")
    put(folder, "pytorch", "2.13.0", "cuda126_py311_0", "linux-64", python, "numpy >=2", "__cuda >=12.6")
    put(folder, "tool", "1.0", "0", "noarch")
    index(folder)
    return folder


@pytest.fixture
def channel(tiny: Path, tmp_path: Path) -> Iterator[Server]:
    """A copy of that channel of this test's own, served."""
    import shutil

    folder = tmp_path / "channel"
    shutil.copytree(tiny, folder)
    with serve(folder) as server:
        yield server


def site(command: Command, *mirrors: str) -> None:
    """Let `command` find conda-forge at `mirrors`, and nowhere else: what is not there is refused at once."""
    path = command.folder / "site.toml"
    rows = ", ".join(json.dumps(url) for url in mirrors)
    path.write_text(f'[mirrors]\n"{FORGE}" = [{rows}]\n')
    command.env |= {"ENVBUILD_SITE": str(path), "HOME": str(command.folder)}


def make(
    command: Command, dependencies: Sequence[str] = ("numpy 2.*", "pytorch"), *, more: str = "", targets: str = TARGETS
) -> Path:
    """A recipe `demo` with [conda]; its folder."""
    rows = "".join(f"  {json.dumps(row)},\n" for row in dependencies)
    table = f"[conda]\ndependencies = [\n{rows}]\n{more}"
    return make_recipe(command.folder / "recipes", "demo", [], extra=table, targets=targets)


@pytest.fixture
def demo(lab: Command, channel: Server) -> Command:
    """The command, where conda-forge is that channel, with the recipe `demo`."""
    site(lab, channel.url)
    make(lab)
    return lab


def packages(command: Command, accelerator: str = "cpu") -> dict[str, list[str]]:
    """The file names of a lock by platform, as conda-lock reads them: its own parser is the judge."""
    from conda_lock.lockfile import parse_conda_lock_file

    found: dict[str, list[str]] = {}
    for locked in parse_conda_lock_file(command.folder / f"recipes/demo/{accelerator}.conda-lock.yml").package:
        assert locked.manager == "conda" and locked.hash.md5 and locked.hash.sha256 and locked.categories == {"main"}
        found.setdefault(locked.platform, []).append(locked.url)
    for urls in found.values():
        assert all(url.startswith(FORGE + "/") for url in urls), urls
    return {key: sorted(url.rpartition("/")[2] for url in urls) for key, urls in found.items()}


def stems(names: Sequence[str]) -> set[str]:
    return {name.removesuffix(".conda") for name in names}


COMMON = {"numpy-2.2.6-py311_0", "python-3.11.9-h1"}


def test_every_target_is_solved_from_any_host_into_files_that_conda_lock_reads(demo: Command) -> None:
    done = demo("lock", "demo", "--conda")
    assert done.returncode == 0, done.stderr
    cpu = packages(demo)
    assert stems(cpu["linux-64"]) == COMMON | {"pytorch-2.13.0-cpu_py311_0", "tool-1.0-0", "zlib-1.3-h64"}
    assert stems(cpu["linux-aarch64"]) == COMMON | {"pytorch-2.13.0-cpu_py311_0", "tool-1.0-0", "zlib-1.3-h64"}
    cuda = packages(demo, "cu126")
    assert list(cuda) == ["linux-64"]
    assert "pytorch-2.13.0-cuda126_py311_0" in stems(cuda["linux-64"])
    assert demo("lock", "demo", "--conda", "--check").returncode == 0
    before = {p: p.read_bytes() for p in (demo.folder / "recipes/demo").iterdir()}
    assert "conda packages" not in demo("lock", "demo", "--conda").stderr  # what is current stays
    assert before == {p: p.read_bytes() for p in (demo.folder / "recipes/demo").iterdir()}


def test_one_lock_makes_the_conda_lock_too_and_each_hint_for_it_works(demo: Command) -> None:
    """The base of its images lies beside it, so that all of the recipe is locked without a network."""
    blobs = Blobs(demo.folder / "blobs")
    image, _ = artifacts.image(blobs, [artifacts.layer(blobs, {"bin/sh": "x"})])
    artifacts.layout(demo.folder / "base", blobs, [(image, "1")])
    base = '[image]\nbase = "oci:../../base:1"\npython = "/usr/bin/python3"\n'
    place = make(demo, more=base, targets="[targets.cpu-x86_64]\n")
    lock = place / "cpu.conda-lock.yml"
    check, build = ("lock", "demo", "--check"), ("plan", "demo", "--artifact", "conda", "--locked")
    assert demo("lock", "demo", "--wheels", "--image").returncode == 0 and not lock.exists()
    for failing in (check, build):
        done = demo(*failing)
        assert done.returncode == 3 and "no conda lock for this target yet" in done.stderr
        command = re.search(r"hint: .*`envbuild (.+?)`", done.stderr)
        assert command and demo(*command[1].split()).returncode == 0, done.stderr
        assert demo(*failing).returncode == 0
        lock.unlink()
    assert demo("lock", "demo").returncode == 0 and lock.is_file()
    assert demo(*check).returncode == demo(*build).returncode == 0


@pytest.mark.parametrize("platform", ["linux-64", "linux-aarch64"])
def test_conda_lock_renders_both_kinds_from_it(demo: Command, platform: str) -> None:
    assert demo("lock", "demo", "--conda").returncode == 0
    path = demo.folder / "recipes/demo/cpu.conda-lock.yml"
    for kind in ("explicit", "env"):
        done = subprocess.run(
            [sys.executable, "-m", "conda_lock", "render", "-k", kind, "-p", platform, path],
            cwd=demo.folder,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
    locked = stems(packages(demo)[platform])
    explicit = (demo.folder / f"conda-{platform}.lock").read_text().splitlines()
    urls = [line for line in explicit if line.startswith("https://")]
    assert {url.partition("#")[0].rpartition("/")[2].removesuffix(".conda") for url in urls} == locked
    order = [url.rpartition("/")[2].rpartition("-")[0] for url in urls]
    assert order.index("zlib-1.3") < order.index("python-3.11.9") < order.index("numpy-2.2.6")
    env = (demo.folder / f"conda-{platform}.lock.yml").read_text()
    assert {line[4:].replace("=", "-") for line in env.splitlines() if line.startswith("  - ")} == {
        *locked,
        "conda-forge",
    }


def test_versions_stay_until_they_are_upgraded(demo: Command, channel: Server) -> None:
    make(demo, ["numpy 2.*", "tool"])
    assert demo("lock", "demo", "--conda").returncode == 0
    for version in ("1.1", "1.2"):
        put(channel.folder, "tool", version, "0", "noarch")
    put(channel.folder, "zlib", "1.4", "h64", "linux-64")
    index(channel.folder)
    make(demo, ["numpy 2.*", "tool <1.2"])  # stale: solved anew, and still 1.0
    assert demo("lock", "demo", "--conda").returncode == 0
    assert {"tool-1.0-0", "zlib-1.3-h64"} <= stems(packages(demo)["linux-64"])
    done = demo("lock", "demo", "--conda", "--upgrade=tool")
    assert "~ tool 1.0 0 -> 1.1 0" in done.stderr and "zlib" not in done.stderr, done.stderr
    assert {"tool-1.1-0", "zlib-1.3-h64"} <= stems(packages(demo)["linux-64"])
    assert demo("lock", "demo", "--conda", "--upgrade", "--dry-run").returncode == 0
    assert "zlib-1.3-h64" in stems(packages(demo)["linux-64"])
    assert demo("lock", "demo", "--conda", "--upgrade").returncode == 0
    assert {"tool-1.1-0", "zlib-1.4-h64"} <= stems(packages(demo)["linux-64"])
    done = demo("lock", "demo", "--conda", "--upgrade=nothing")
    assert done.returncode == 3 and "nothing is not in" in done.stderr


def test_one_target_is_renewed_and_the_others_stay(demo: Command, channel: Server) -> None:
    assert demo("lock", "demo", "--conda").returncode == 0
    before = packages(demo)
    for subdir in ("linux-64", "linux-aarch64"):
        put(channel.folder, "zlib", "1.4", "h64", subdir)
    index(channel.folder)
    assert demo("lock", "demo", "--conda", "--target", "cpu-x86_64", "--upgrade").returncode == 0
    after = packages(demo)
    assert after["linux-aarch64"] == before["linux-aarch64"]
    assert "zlib-1.4-h64" in stems(after["linux-64"])
    assert demo("lock", "demo", "--conda", "--check").returncode == 0


def test_a_package_that_its_channel_withdrew_moves(demo: Command, channel: Server) -> None:
    assert demo("lock", "demo", "--conda", "--target", "cpu-x86_64").returncode == 0
    (channel.folder / "linux-64/numpy-2.2.6-py311_0.conda").unlink()
    index(channel.folder)
    make(demo, ["numpy 2.*", "pytorch", "tool"])
    assert demo("lock", "demo", "--conda", "--target", "cpu-x86_64").returncode == 0
    assert "numpy-2.1.0-py311_0" in stems(packages(demo)["linux-64"])


def test_virtual_packages_are_the_targets(demo: Command) -> None:
    make(demo, ["arch", "newglibc"], targets='[targets.cpu-aarch64]\nglibc = "2.35"\n')
    done = demo("lock", "demo", "--conda")
    assert done.returncode == 0, done.stderr
    assert {"arch-1.0-0", "newglibc-1.0-0"} <= stems(packages(demo)["linux-aarch64"])
    make(demo, ["newglibc"], targets='[targets.cpu-aarch64]\nglibc = "2.28"\n')
    done = demo("lock", "demo", "--conda")
    assert done.returncode == 3 and "__glibc" in done.stderr, done.stderr
    make(demo, ["pytorch * cuda*"], targets="[targets.cpu-x86_64]\n")
    done = demo("lock", "demo", "--conda")
    assert done.returncode == 3 and "__cuda" in done.stderr, done.stderr


def test_the_solvers_explanation_names_the_lines_of_the_recipe(demo: Command) -> None:
    place = make(demo, ["zlib", "numpy 9.*", "pytorch"], targets="[targets.cpu-x86_64]\n")
    done = demo("lock", "demo", "--conda")
    assert done.returncode == 3 and not list(place.glob("*.yml"))
    lines = (place / "recipe.toml").read_text().splitlines()
    at = next(n for n, line in enumerate(lines, 1) if "numpy" in line)
    assert f"recipe.toml:{at}:3: asks for 'numpy 9.*'" in done.stderr, done.stderr
    assert "asks for 'zlib'" not in done.stderr


def test_a_bad_match_spec_is_refused_at_its_place(demo: Command) -> None:
    place = make(demo, ["zlib", "numpy >=2,,<3 what is this"], targets="[targets.cpu-x86_64]\n")
    done = demo("lock", "demo", "--conda")
    lines = (place / "recipe.toml").read_text().splitlines()
    at = next(n for n, line in enumerate(lines, 1) if "numpy" in line)
    assert done.returncode == 2 and f"recipe.toml:{at}:3: 'numpy >=2" in done.stderr, done.stderr


def test_the_wrong_accelerator_is_refused(demo: Command, channel: Server) -> None:
    # A CUDA build that does not say that it needs a driver: what a solver cannot know.
    put(channel.folder, "pytorch", "2.14.0", "cuda126_py311_0", "linux-64", "python 3.11.*")
    index(channel.folder)
    done = demo("lock", "demo", "--conda", "--target", "cpu-x86_64")
    assert done.returncode == 3 and "is for CPUs, but pytorch-2.14.0-cuda126" in done.stderr
    make(demo, ["pytorch * cpu*"], targets="[targets.cu126-x86_64]\n")
    done = demo("lock", "demo", "--conda")
    assert done.returncode == 3 and "needs CUDA, but pytorch-2.13.0-cpu" in done.stderr
    assert not list(demo.folder.glob("recipes/demo/*.yml"))


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"": "404"}, "is the channel's name right?"),
        ({"": "401"}, "credentials?"),
        ({"": "500"}, "500"),
        ({"shards.msgpack.zst": "truncate", "json.zst": "truncate", "repodata.json": "truncate"}, "cannot be read"),
        ({"shards.msgpack.zst": "404", "json.zst": "404", "repodata.json": "truncate"}, "cannot be read"),
    ],
)
def test_a_channel_that_fails_breaks_nothing_else(
    lab: Command, channel: Server, fault: dict[str, str], said: str
) -> None:
    make_wheel(lab.folder / "wheels", "alpha")
    site(lab, channel.url)
    extra = '[conda]\ndependencies = ["numpy"]\n'
    place = make_recipe(lab.folder / "recipes", "demo", ["alpha"], extra=extra, targets="[targets.cpu-x86_64]\n")
    channel.faults.update(fault)  # type: ignore[arg-type]
    # Nothing of this test reaches the real channel.
    done = lab("lock", "demo", "--wheels", "--conda", https_proxy="http://127.0.0.1:9")
    assert done.returncode == 3 and FORGE in done.stderr and said in done.stderr, done.stderr
    assert (place / "cpu-x86_64.requirements.txt").is_file() and not list(place.glob("*.yml"))


def test_a_channel_that_is_away_later_leaves_the_lock_and_offline_uses_what_is_known(
    demo: Command, channel: Server
) -> None:
    place = make(demo, ["numpy"], targets="[targets.cpu-x86_64]\n")
    assert demo("lock", "demo", "--conda").returncode == 0
    before = (place / "cpu.conda-lock.yml").read_bytes()
    channel.down()
    assert demo("lock", "demo", "--conda", "--upgrade", https_proxy="http://127.0.0.1:9").returncode == 3
    assert (place / "cpu.conda-lock.yml").read_bytes() == before
    make(demo, ["numpy <2.2"], targets="[targets.cpu-x86_64]\n")
    done = demo("lock", "demo", "--conda", "--offline")
    assert done.returncode == 0 and "numpy 2.2.6 py311_0 -> 2.1.0 py311_0" in done.stderr, done.stderr


def test_offline_without_anything_known_says_so(demo: Command) -> None:
    done = demo("lock", "demo", "--conda", "--offline")
    assert done.returncode == 3 and "run it once without --offline" in done.stderr


def test_the_next_mirror_serves_where_one_is_down_and_folders_do_too(lab: Command, channel: Server) -> None:
    make(lab, ["numpy"], targets="[targets.cpu-x86_64]\n")
    site(lab, "http://127.0.0.1:9/down", channel.url)
    assert lab("lock", "demo", "--conda").returncode == 0
    first = packages(lab)
    site(lab, channel.folder.as_uri())
    requests = len(channel.requests)
    assert lab("lock", "demo", "--conda", "--upgrade").returncode == 0
    assert packages(lab) == first and len(channel.requests) == requests


@pytest.mark.parametrize("way", ["url", "netrc", "token"])
def test_credentials_reach_the_channel_and_nothing_else(lab: Command, tiny: Path, way: str) -> None:
    make(lab, ["numpy"], targets="[targets.cpu-x86_64]\n")
    prefix = f"/t/{PASSWORD}/conda-forge" if way == "token" else "/conda-forge"
    user = None if way == "token" else "me"
    with serve(tiny, prefix=prefix, user=user, password=PASSWORD) as server:
        plain = server.url
        site(lab, plain.replace("//", f"//me:{PASSWORD}@") if way == "url" else plain)
        if way == "netrc":
            (lab.folder / ".netrc").write_text(f"machine 127.0.0.1 login me password {PASSWORD}\n")
            (lab.folder / ".netrc").chmod(0o600)
        done = lab("lock", "demo", "--conda")
        assert done.returncode == 0, done.stderr
        packages(lab)
        written = [*(lab.folder / "recipes").rglob("*"), *(lab.folder / "store").rglob("*")]
        for path in written:
            assert path.is_dir() or PASSWORD.encode() not in path.read_bytes(), path
        server.faults[""] = "404"  # and messages have none either
        failed = lab("lock", "demo", "--conda", "--upgrade", https_proxy="http://127.0.0.1:9")
        assert failed.returncode == 3
        assert PASSWORD not in done.stdout + done.stderr + failed.stdout + failed.stderr


def test_a_channel_without_this_platform_is_one_of_noarch_packages(
    lab: Command, channel: Server, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    put(other, "extra", "1.0", "0", "noarch")
    index(other)
    table = 'channels = ["http://example.invalid/other", "conda-forge"]\n'
    make(lab, ["numpy", "extra"], more=table, targets="[targets.cpu-x86_64]\n")
    site(lab, channel.url)
    with serve(other, prefix="/other") as server:
        path = lab.folder / "site.toml"
        path.write_text(path.read_text() + f'"http://example.invalid/other" = ["{server.url}"]\n')
        done = lab("lock", "demo", "--conda")
    assert done.returncode == 0, done.stderr
    text = (lab.folder / "recipes/demo/cpu.conda-lock.yml").read_text()
    assert '"http://example.invalid/other/noarch/extra-1.0-0.conda"' in text
    assert text.index('url: "http://example.invalid/other"') < text.index('url: "conda-forge"')


def test_the_first_channel_is_strictly_preferred(lab: Command, channel: Server, tmp_path: Path) -> None:
    other = tmp_path / "other"
    put(other, "tool", "0.5", "0", "noarch")
    index(other)
    url = other.as_uri()
    make(lab, ["tool"], more=f'channels = ["{url}", "conda-forge"]\n', targets="[targets.cpu-x86_64]\n")
    site(lab, channel.url)
    done = lab("lock", "demo", "--conda")
    assert done.returncode == 0 and "+ tool 0.5 0" in done.stderr, done.stderr


PIP = 'requirements = ["addon"]\n'


def pip_lock(command: Command) -> str:
    return (command.folder / "recipes/demo/cpu-x86_64.conda.requirements.txt").read_text()


def test_what_pip_adds_is_resolved_against_the_conda_packages(demo: Command) -> None:
    wheels = demo.folder / "wheels"
    make_wheel(wheels, "numpy", "2.4.0")  # an index may have what it likes: conda's is there
    make_wheel(wheels, "torch", "2.99")
    make_wheel(wheels, "addon", "1.0", requires=["numpy>=2.2,<=2.2.6", "torch==2.13.0", "helper"])
    make_wheel(wheels, "helper", "1.0", requires=["numpy"])
    make(demo, more=PIP, targets="[targets.cpu-x86_64]\n")
    done = demo("lock", "demo", "--conda")
    assert done.returncode == 0, done.stderr
    assert [line.split(" ")[0] for line in pip_lock(demo).splitlines() if "==" in line] == ["addon==1.0", "helper==1.0"]
    assert demo("lock", "demo", "--conda", "--check").returncode == 0
    make_wheel(wheels, "helper", "1.1")
    assert demo("lock", "demo", "--conda").returncode == 0 and "helper==1.0" in pip_lock(demo)
    done = demo("lock", "demo", "--conda", "--upgrade=helper")
    assert "~ helper 1.0 -> 1.1 (pip)" in done.stderr, done.stderr
    make(demo, targets="[targets.cpu-x86_64]\n")  # asks for nothing of pip any more
    assert demo("lock", "demo", "--conda").returncode == 0
    assert not (demo.folder / "recipes/demo/cpu-x86_64.conda.requirements.txt").exists()
    assert demo("lock", "demo", "--conda", "--check").returncode == 0


def test_a_conflict_of_pip_and_conda_is_explained(demo: Command) -> None:
    make_wheel(demo.folder / "wheels", "numpy", "1.26")
    make_wheel(demo.folder / "wheels", "addon", "1.0", requires=["numpy<2"])
    place = make(demo, more=PIP, targets="[targets.cpu-x86_64]\n")
    done = demo("lock", "demo", "--conda")
    assert done.returncode == 3 and "numpy" in done.stderr and "those of the conda" in done.stderr, done.stderr
    assert not list(place.glob("*conda*"))
    text = (place / "recipe.toml").read_text()
    (place / "recipe.toml").write_text(
        text.replace("requirements = []", 'requirements = []\noverrides = ["numpy>=2"]', 1)
    )
    assert demo("lock", "demo", "--conda").returncode == 0
    assert "# override: numpy>=2\n" in pip_lock(demo) and "\nnumpy==" not in pip_lock(demo)


def test_a_recipe_of_conda_packages_alone_has_no_wheel_lock(demo: Command) -> None:
    place = make(demo, targets="[targets.cpu-x86_64]\n")
    text = (place / "recipe.toml").read_text()
    (place / "recipe.toml").write_text(text.replace('python = "3.11"', 'python = "3.11"\nenvironment = "conda"'))
    assert demo("lock", "demo", "--conda", "--check").returncode == 3
    done = demo("lock", "demo", "--conda")
    assert done.returncode == 0, done.stderr
    assert not (place / "cpu-x86_64.requirements.txt").exists()
    assert "python-3.11.9-h1" in stems(packages(demo)["linux-64"])
    assert demo("lock", "demo", "--conda", "--check").returncode == 0


def test_conda_is_refused_where_the_recipe_has_none(lab: Command) -> None:
    make_recipe(lab.folder / "recipes", "demo", [], targets="[targets.cpu-x86_64]\n")
    done = lab("lock", "demo", "--conda")
    assert done.returncode == 2 and "recipe demo has no [conda] packages" in done.stderr


def test_exports_are_what_other_tools_read(demo: Command) -> None:
    make_wheel(demo.folder / "wheels", "addon", "1.0")
    make(demo, more=PIP, targets="[targets.cpu-x86_64]\n[targets.cpu-aarch64]\n")
    for kind, count in (("conda-lock", 1), ("environment", 2), ("explicit", 2)):
        done = demo("lock", "demo", "--conda", "--export", kind, "--export-dir", "out")
        assert done.returncode == 0, done.stderr
        paths = [demo.folder / line for line in done.stdout.splitlines()]
        assert len(paths) == count and all(path.is_file() for path in paths)
        assert all("addon" in path.read_text() for path in paths)
    path = demo.folder / "out/demo-cpu.conda-lock.yml"
    for platform in ("linux-64", "linux-aarch64"):
        rendered = subprocess.run(
            [sys.executable, "-m", "conda_lock", "render", "-k", "explicit", "-p", platform, path],
            cwd=demo.folder,
            capture_output=True,
            text=True,
        )
        assert rendered.returncode == 0, rendered.stderr
        text = (demo.folder / f"conda-{platform}.lock").read_text()
        assert "# pip addon @ " in text and "numpy-2.2.6-py311_0.conda#" in text


def test_conda_lock_as_the_solver_with_a_shim_over_rattler_in_place_of_conda(demo: Command) -> None:
    """The executable is a shim: no conda can be had here. conda-lock is the real one."""
    make(demo, targets="[targets.cpu-x86_64]\n[targets.cpu-aarch64]\n")
    bare = str(Path(sys.executable).parent)
    done = demo("lock", "demo", "--conda", "--solver", "conda-lock", PATH=bare)
    assert done.returncode == 6 and "needs one of micromamba" in done.stderr
    env = conda_shim(demo.folder)
    done = demo("lock", "demo", "--conda", "--solver", "conda-lock", **env)
    assert done.returncode == 0, done.stderr
    by_conda_lock = packages(demo)
    assert demo("lock", "demo", "--conda", "--upgrade").returncode == 0
    assert packages(demo) == by_conda_lock
    # The lock's numpy is no more what the recipe asks for, its other packages stay.
    make(demo, ["numpy <2.2", "pytorch"], targets="[targets.cpu-x86_64]\n")
    done = demo("lock", "demo", "--conda", "--solver", "conda-lock", **env)
    assert done.returncode == 0, done.stderr
    assert "numpy-2.1.0-py311_0" in stems(packages(demo)["linux-64"])
    make(demo, ["numpy 9.*"], targets="[targets.cpu-x86_64]\n")
    done = demo("lock", "demo", "--conda", "--solver", "conda-lock", **env)
    assert done.returncode == 3 and "asks for 'numpy 9.*'" in done.stderr, done.stderr


def test_help_shows_examples_and_imports_nothing_heavy(lab: Command) -> None:
    done = lab("lock", "--help")
    assert "envbuild lock pt_cpu --conda" in done.stdout
    code = (
        "import sys, envbuild.cli.lock, envbuild.lock.conda_kind\n"
        "assert not {'rattler', 'conda_lock', 'ruamel', 'requests'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
