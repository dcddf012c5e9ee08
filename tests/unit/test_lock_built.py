"""Locks of packages without a wheel: resolved by uv from archives of these tests, and read back from the lock file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from lab.wheels import make_recipe, make_wheel
from sdists import commit, git, make_sdist, project, sha256

from envbuild.base.errors import EnvbuildError, LockError
from envbuild.environment import Environment
from envbuild.layers.source_known import built_layers
from envbuild.lock.conda import CondaPackage
from envbuild.lock.conda_kind import conda_lock
from envbuild.lock.format import Lock, parse, render
from envbuild.lock.resolve import without
from envbuild.lock.wheels import wheel_lock
from envbuild.recipe.load import load_recipe
from envbuild.recipe.targets import Target, host_arch
from envbuild.run_environment import load_environment, with_tmpdir

TARGET = Target.parse(f"cpu-{host_arch()}")


class Lab:
    """A recipe with these requirements, find-links of the tests alone, and its lock."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.wheels = folder, folder / "wheels"
        self.wheels.mkdir(parents=True)
        self.logged: list[str] = []
        self.environment: Environment = load_environment(
            {
                **{name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ},
                "PIP_CONFIG_FILE": os.devnull,
                "PIP_NO_INDEX": "1",
                "PIP_FIND_LINKS": str(self.wheels),
                "ENVBUILD_STORE": str(folder / "store"),
            }
        )

    def lock(
        self,
        *requirements: str,
        extra: str = "",
        old: Lock | None = None,
        upgrade: tuple[str, ...] | None = (),
        offline: bool = False,
    ) -> Lock:
        self.recipe = load_recipe(make_recipe(self.folder, "r", requirements, extra=extra) / "recipe.toml")
        kind = wheel_lock(self.recipe, TARGET)
        with with_tmpdir(self.environment) as environment:
            found = kind.resolve(environment, old, upgrade, offline, self.logged.append).lock
        assert parse(render(found), "x") == found
        return found

    def fails(self, *requirements: str, extra: str = "") -> EnvbuildError:
        with pytest.raises(LockError) as caught:
            self.lock(*requirements, extra=extra)
        return caught.value


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def test_a_dependency_without_a_wheel_is_built_in_the_version_that_is_required(lab: Lab) -> None:
    make_wheel(lab.wheels, "hydra", requires=["antlr<5"])
    for version in ("4.8", "4.9", "5.0"):
        archive = make_sdist(lab.wheels, "antlr", version, requires=["tool"], build=["helper"], more=["late>=2"])
        wanted = sha256(archive) if version == "4.9" else locals().get("wanted", "")
    for name, version in (("tool", "1.0"), ("helper", "3.0"), ("late", "1.0"), ("late", "2.0")):
        make_wheel(lab.wheels, name, version)
    error = lab.fails("hydra")
    assert 'build = ["antlr"]' in (error.hint or ""), error.hint
    found = lab.lock("hydra", extra='build = ["antlr"]')
    (one,) = found.built
    assert (one.name, one.version, one.sha256, one.commit) == ("antlr", "4.9", wanted, "")
    assert [(wheel.name, wheel.version) for wheel in one.build] == [("helper", "3.0"), ("late", "2.0")]
    assert [package.name for package in found.packages] == ["hydra", "tool"]
    (layer,) = built_layers(lab.recipe, TARGET, found)
    assert (layer.system, layer.url, layer.isolated) == ("wheel", "index:antlr", True)
    assert [wheel.name for wheel in layer.build] == ["pip", "helper", "late"]
    # A plain lock keeps what it has; --upgrade moves the package, or one of its build requirements.
    make_sdist(lab.wheels, "antlr", "4.10", build=["helper"])
    make_wheel(lab.wheels, "helper", "4.0")
    again = lab.lock("hydra", extra='build = ["antlr"]', old=found)
    assert again == found
    moved = lab.lock("hydra", extra='build = ["antlr"]', old=found, upgrade=("helper",))
    assert moved.versions["antlr"] == "4.9" and moved.built[0].build[0].version == "4.0"
    moved = lab.lock("hydra", extra='build = ["antlr"]', old=found, upgrade=("antlr",))
    assert moved.versions["antlr"] == "4.10"
    with pytest.raises(LockError, match="other is not in the lock"):
        without(found, ["other"])


def test_the_commit_of_a_branch_is_locked_until_it_is_upgraded(lab: Lab) -> None:
    files = project("demo", "2.0", requires=["tool"])
    first = commit(lab.folder / "repo", {f"py/{name}": text for name, text in files.items()}, "v2")
    git(lab.folder / "repo", "branch", "-m", "trunk")
    make_wheel(lab.wheels, "tool")
    line = f"demo @ git+{(lab.folder / 'repo').as_uri()}@trunk#subdirectory=py"
    found = lab.lock(line)
    (one,) = found.built
    assert (one.version, one.commit, one.ref) == ("2.0", first, "trunk")
    assert [package.name for package in found.packages] == ["tool"]
    (layer,) = built_layers(lab.recipe, TARGET, found)
    assert layer.url == f"git+{(lab.folder / 'repo').as_uri()}@{first}#subdirectory=py"
    assert "SETUPTOOLS_SCM_PRETEND_VERSION=2.0" in layer.configure
    second = commit(lab.folder / "repo", {"py/demo.py": "NEW = 1\n"})
    assert lab.lock(line, old=found) == found
    assert lab.lock(line, old=found, offline=True) == found, "the store has the commit"
    moved = lab.lock(line, old=found, upgrade=("demo",)).built[0]
    assert moved.commit == second and moved.sha256 != one.sha256
    tagged = lab.lock(line.replace("@trunk", "@v2"), old=lab.lock(line, old=found, upgrade=None)).built[0]
    assert (tagged.commit, tagged.sha256) == (first, one.sha256), "another tag is another commit"


def test_files_of_urls_and_of_the_recipe(lab: Lab) -> None:
    (lab.folder / "r").mkdir()
    archive = make_sdist(lab.folder / "elsewhere", "demo", requires=["own"])
    wheel = make_wheel(lab.folder / "r", "own", files={"own/data": b"x"})
    other = make_wheel(lab.folder / "elsewhere", "other")
    make_wheel(lab.wheels, "own", "9.0")  # an index may have newer ones
    lines = [
        f"demo @ {archive.as_uri()}#sha256={sha256(archive)}",
        f"own @ ./{wheel.name}",
        f"other @ {other.as_uri()}#sha256={sha256(other)}",
        "never @ ./own-1.0-py3-none-any.whl ; os_name == 'nt'",
    ]
    with pytest.raises(EnvbuildError, match="one of own"):
        lab.lock(*lines)
    found = lab.lock(*lines[:3])
    assert [(one.name, one.version, one.hashes) for one in found.packages] == [
        ("other", "1.0", (sha256(other),)),
        ("own", "1.0", (sha256(wheel),)),
    ]
    assert [(one.name, one.sha256) for one in found.built] == [("demo", sha256(archive))]
    assert "://" not in render(found) and str(lab.folder) not in render(found)
    archive.write_bytes(archive.read_bytes() + b"\0")
    Path(lab.environment.store.root / "sources" / found.built[0].sha256 / archive.name).unlink()
    error = lab.fails(*lines[:3])
    assert f"it has sha256:{sha256(archive)}" in error.message


def test_a_build_in_the_environment_leaves_out_the_wheels_that_are_there(lab: Lab) -> None:
    make_wheel(lab.wheels, "torch", "2.0")
    for version in ("1.0", "2.0"):
        make_wheel(lab.wheels, "ninja", version)
    # Its back end fails without torch, so nothing can ask it for its requirements.
    make_sdist(lab.wheels, "flash", build=["ninja"], extra="import torch")
    table = "[build.flash]\nisolation = false\ndependencies = ['torch']\nrequires = ['ninja<2']\n"
    text = lab.fails("flash", "torch", extra='build = ["flash"]')
    assert "No module named 'torch'" in text.message and "[tool.uv" not in text.message
    assert "[build.flash]" in (text.hint or "")
    found = lab.lock("flash", "torch", extra=table)
    assert [wheel.name for wheel in found.built[0].build] == ["ninja"]
    assert found.built[0].build[0].version == "1.0"
    (layer,) = built_layers(lab.recipe, TARGET, found)
    assert not layer.isolated


def test_requirements_of_a_build_that_fails_are_named(lab: Lab) -> None:
    broken = "def get_requires_for_build_wheel(config_settings=None):\n    raise SystemExit('no compiler here')\n"
    make_sdist(lab.wheels, "demo", extra=broken)
    error = lab.fails("demo", extra='build = ["demo"]')
    assert "no compiler here" in error.message and "[build.demo]" in (error.hint or "")
    make_sdist(lab.wheels, "other", more=["gone>=2"])
    error = lab.fails("other", extra='build = ["other"]')
    assert "gone" in error.message
    make_wheel(lab.wheels, "tool")
    error = lab.fails("tool", extra='build = ["demo"]')
    assert "nothing requires 'demo'" in error.message and "recipe.toml:5:10" in error.message


@pytest.mark.parametrize("isolated", [False, True])
def test_what_pip_adds_to_conda_packages_is_built_too(lab: Lab, isolated: bool) -> None:
    # The back end imports numpy: of the index, in uv's own environment, and not the name that stands for conda's.
    make_sdist(lab.wheels, "demo", requires=["numpy"], build=["numpy"], extra="import numpy")
    make_wheel(lab.wheels, "numpy", "1.8")
    make_wheel(lab.wheels, "other")
    way = "" if isolated else "isolation = false\n"
    table = f"[conda]\ndependencies = ['numpy']\nrequirements = ['demo']\n[build.demo]\n{way}"
    folder = make_recipe(lab.folder, "r", ["other"], targets=f"[targets.{TARGET}]\n{table}")
    recipe = load_recipe(folder / "recipe.toml")
    url = "https://conda.anaconda.org/conda-forge/linux-64/numpy-1.9-0.conda"
    numpy = CondaPackage("numpy", "1.9", "0", "linux-64", url, "0" * 32, "0" * 64, ("python >=3.11",))
    kind = conda_lock(recipe, TARGET, lambda *_, **__: (numpy,))
    with with_tmpdir(lab.environment) as environment:
        found = kind.resolve(environment, None, (), False, lab.logged.append).lock
    (one,) = found.pip.built
    names = [f"{wheel.name} {wheel.version}" for wheel in one.build]
    assert (one.name, names, found.pip.packages) == ("demo", ["numpy 1.8"] * isolated, ()), "numpy is conda's"
    kind.write(folder / kind.file, found)
    assert kind.read(folder / kind.file) == found
    (layer,) = built_layers(recipe, TARGET, found)
    assert (layer.name, layer.isolated) == ("demo", isolated)
    with with_tmpdir(lab.environment) as environment:  # [build] is for the conda packages alone
        assert not wheel_lock(recipe, TARGET).resolve(environment, None, (), False, lab.logged.append).lock.built


def test_the_extras_of_a_torch_that_is_split_by_gpu_are_locked(lab: Lab) -> None:
    """The wheels have the requirements of AMD's: each extra brings the code for one GPU, and that of its family."""
    version, target = "2.12.0+rocm7.14.0", Target.parse("rocm7.14.0-x86_64")
    devices = {"device-gfx942": ["gfx942"], "device-gfx1151": ["gfx1151", "gfx115x"]}
    pins = [f'amd-torch-device-{name}=={version}; extra == "{extra}"' for extra, of in devices.items() for name in of]
    make_wheel(lab.wheels, "torch", version, requires=["rocm-bootstrap", *pins], tag="cp311-cp311-linux_x86_64")
    make_wheel(lab.wheels, "rocm-bootstrap", "0.2.0")
    for name in ("gfx942", "gfx1151", "gfx115x"):
        make_wheel(lab.wheels, f"amd-torch-device-{name}", version, tag="py3-none-linux_x86_64")

    def lock(requirement: str) -> Lock:
        table = f'[targets."{target.name}"]\nrequirements = ["{requirement}=={version}"]\ngpus = ["mi300x"]\n'
        recipe = load_recipe(make_recipe(lab.folder, "r", [], targets=table) / "recipe.toml")
        with with_tmpdir(lab.environment) as environment:
            return wheel_lock(recipe, target).resolve(environment, None, (), False, lab.logged.append).lock

    one, two = lock("torch[device-gfx942]"), lock("torch[device-gfx942,device-gfx1151]")
    assert set(one.versions) == {"amd-torch-device-gfx942", "rocm-bootstrap", "torch"}
    assert two.versions.keys() - one.versions.keys() == {"amd-torch-device-gfx1151", "amd-torch-device-gfx115x"}
    with pytest.raises(LockError, match="torch has no code for any GPU"):
        lock("torch")
    with pytest.raises(LockError, match=r"torch has no code for gfx942: .*, and the lock has gfx1151, gfx115x alone"):
        lock("torch[device-gfx1151]")
