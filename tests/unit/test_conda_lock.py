"""What conda locks say, apart from solving: accelerators, distributions, changes, exports, states."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab.wheels import make_recipe
from ruamel.yaml import YAML

from envbuild.base.errors import LockError, UsageError
from envbuild.lock import format as pip_format
from envbuild.lock import lifecycle
from envbuild.lock.conda import CondaLock, CondaPackage, environment_text, explicit_text, pip_entries, topological_order
from envbuild.lock.conda_format import part_of, render
from envbuild.lock.conda_kind import conda_changes, conda_lock, provided, without_conda
from envbuild.lock.conda_solve import canonical_url, hide, recipe_specs, virtual_packages
from envbuild.lock.format import Lock
from envbuild.lock.judge import check_conda_accelerator
from envbuild.recipe.load import LoadedRecipe, load_recipe
from envbuild.recipe.sources import LockedPackage
from envbuild.recipe.targets import Target

X86 = Target.parse("cpu-x86_64")
CONDA = '[conda]\ndependencies = ["numpy 2.*", "pytorch"]\n'
PIP = CONDA + 'requirements = ["einops"]\n'


def package(name: str, version: str = "1.0", build: str = "0", *depends: str) -> CondaPackage:
    url = f"https://conda.anaconda.org/conda-forge/linux-64/{name}-{version}-{build}.conda"
    return CondaPackage(name, version, build, "linux-64", url, "0" * 32, "1" * 64, depends)


def recipe(tmp_path: Path, conda: str = CONDA, targets: str = "") -> LoadedRecipe:
    place = make_recipe(tmp_path / "recipes", "demo", [], extra=conda, targets=targets)
    return load_recipe(place / "recipe.toml")


def lock(*packages: CondaPackage, pip: tuple[LockedPackage, ...] = (), digest: str = "a" * 64) -> CondaLock:
    added = Lock("demo", "cpu-x86_64", "3.11", "x86_64-manylinux_2_28", f"sha256:{digest}", pip)
    return CondaLock("demo", "cpu-x86_64", f"sha256:{digest}", packages, added)


EINOPS = LockedPackage("einops", "0.8.1", ("e" * 64,))


@pytest.mark.parametrize(
    ("target", "torch", "fault"),
    [
        ("cpu-x86_64", package("pytorch", "2.7", "cpu_py311_0"), None),
        ("cpu-x86_64", package("pytorch", "2.7", "cuda126_py311_0"), "is for CPUs"),
        ("cpu-x86_64", package("pytorch", "2.7", "py311_0", "cuda-version >=12.6"), "cuda-version"),
        ("cpu-x86_64", package("libtorch", "2.7", "py311_0", "__cuda"), "is for CPUs"),
        ("cu126-x86_64", package("pytorch", "2.7", "cuda126_py311_0"), None),
        ("cu126-x86_64", package("pytorch", "2.7", "py311_0", "cudatoolkit 11.*"), None),
        ("cu126-x86_64", package("pytorch", "2.7", "cpu_py311_0"), "needs CUDA"),
        ("cu126-x86_64", package("pytorch", "2.7", "py311_0", "numpy"), "needs CUDA"),
        ("cu126-x86_64", package("numpy", "2.7", "cpu_0"), None),
    ],
)
def test_a_pytorch_for_the_other_accelerator_is_refused(target: str, torch: CondaPackage, fault: str | None) -> None:
    if fault is None:
        check_conda_accelerator(Target.parse(target), [torch], "x")
        return
    with pytest.raises(LockError, match=fault) as error:
        check_conda_accelerator(Target.parse(target), [torch], "x")
    assert f"[targets.{target}]" in str(error.value.hint) and torch.name in str(error.value.hint)


def test_distributions_are_known_by_pips_names_and_versions() -> None:
    rows = [
        package("pytorch", "2.13.0", "cpu_0", "python 3.11.*"),
        package("msgpack-python", "1.1", "0", "python_abi 3.11.*"),
        package("ruamel.yaml", "0.18", "0", "python"),
        package("jupyter_core", "5.0rc1", "0", "python"),
        package("local", "1.0+x", "0", "python"),
        package("strange", "2024b_x", "0", "python"),  # no version by PEP 440
        package("zlib", "1.3"),  # no Python in it
        package("python", "3.11.2", "0", "python_abi"),
    ]
    assert provided(rows) == {
        "torch": "2.13.0+conda",
        "msgpack": "1.1+conda",
        "ruamel-yaml": "0.18+conda",
        "jupyter-core": "5.0rc1+conda",
        "local": "1.0+x.conda",
    }


def test_virtual_packages_come_from_the_target_and_specs_know_their_line(tmp_path: Path) -> None:
    targets = '[targets.cu126-aarch64]\nglibc = "2.34"\nconda = ["pytorch * cuda126*"]\n'
    loaded = recipe(tmp_path, targets=targets)
    target = Target.parse("cu126-aarch64")
    assert virtual_packages(loaded, target) == [
        ("__unix", "0", "0"),
        ("__linux", "0", "0"),
        ("__glibc", "2.34", "0"),
        ("__archspec", "1", "aarch64"),
        ("__cuda", "12.6", "0"),
    ]
    specs = recipe_specs(loaded, target)
    assert [spec.name for spec in specs] == ["python", "numpy", "pytorch", "pytorch"]
    lines = loaded.path.read_text().splitlines()
    for spec in specs:
        at = int(spec.where.split(":")[-2])
        assert spec.text.partition(" ")[0] in lines[at - 1]


def test_secrets_of_urls_are_hidden_and_never_get_into_a_lock() -> None:
    text = "https://me:w0rd@c.org/t/s3cret/forge/noarch https://t0ken@c.org/x"
    assert not {"w0rd", "s3cret", "t0ken"} & set(hide(text).replace("/", ":").split(":"))
    serving = {"http://m.org/t/s3cret/forge": "https://c.org/forge"}
    url = "http://me:w0rd@m.org/t/s3cret/forge/noarch/a-1-0.conda"
    assert canonical_url(url, serving) == "https://c.org/forge/noarch/a-1-0.conda"
    with pytest.raises(LockError) as error:
        canonical_url(url, {})
    assert "s3cret" not in error.value.message and "w0rd" not in error.value.message


def test_changes_are_said_line_by_line() -> None:
    old = lock(package("a"), package("b"), package("c"), package("d"), pip=(EINOPS,))
    moved = replace(package("d"), sha256="2" * 64)
    new = lock(package("a"), package("b", "1.1"), package("e"), moved)
    assert conda_changes(old, new) == [
        "~ b 1.0 0 -> 1.1 0",
        "- c 1.0 0",
        "~ d 1.0 0 (another file)",
        "+ e 1.0 0",
        "- einops 0.8.1 (pip)",
    ]
    assert conda_changes(old, old) == [] and len(conda_changes(None, old)) == 5


def test_what_is_upgraded_leaves_the_lock_by_either_name() -> None:
    whole = lock(package("a"), package("ruamel.yaml"), pip=(EINOPS,))
    left = without_conda(whole, ["Einops", "ruamel.yaml"])
    assert [p.name for p in left.packages] == ["a"] and left.pip.packages == ()
    with pytest.raises(LockError, match="nothing is not in the conda lock of demo"):
        without_conda(whole, ["a", "nothing"])


@given(st.lists(st.lists(st.integers(0, 7), max_size=4), max_size=8))
def test_a_package_stands_after_what_it_needs_unless_they_need_each_other(graph: list[list[int]]) -> None:
    rows = [package(f"p{n}", "1", "0", *(f"p{m} 1.*" for m in needs)) for n, needs in enumerate(graph)]
    ordered = [p.name for p in topological_order(rows)]
    assert sorted(ordered) == sorted(p.name for p in rows)

    def reachable(start: int) -> set[int]:
        seen, todo = set(), [start]
        while todo:
            for m in graph[todo.pop()]:
                if m < len(graph) and m not in seen:
                    seen.add(m)
                    todo.append(m)
        return seen

    for n, needs in enumerate(graph):
        for m in needs:
            if m < len(graph) and n not in reachable(m):
                assert ordered.index(f"p{m}") < ordered.index(f"p{n}")


PYLOCK = f"""\
lock-version = "1.0"
[[packages]]
name = "einops"
version = "0.8.1"
wheels = [
  {{ url = "https://me:w0rd@i.org/einops-0.8.1-py3-none-any.whl", hashes = {{ sha256 = "{"e" * 64}" }} }},
  {{ url = "https://i.org/einops-0.8.1-cp99-none-any.whl", hashes = {{ sha256 = "{"f" * 64}" }} }},
]
"""


def test_exports_name_every_package_and_no_secret() -> None:
    whole = lock(package("zlib"), package("a", "1.0", "0", "zlib >=1"), pip=(EINOPS,))
    explicit = explicit_text(whole).splitlines()
    urls = [line for line in explicit if line.startswith("https://")]
    assert explicit.index("@EXPLICIT") < explicit.index(urls[0])
    assert [url.rpartition("/")[2] for url in urls] == [f"zlib-1.0-0.conda#{'0' * 32}", f"a-1.0-0.conda#{'0' * 32}"]
    assert explicit[-1] == f"# pip einops==0.8.1 --hash=sha256:{'e' * 64}"

    exported = YAML(typ="safe").load(environment_text(whole, ["conda-forge"]))
    assert exported["dependencies"] == ["zlib=1.0=0", "a=1.0=0", "pip", {"pip": ["einops==0.8.1"]}]
    assert exported["channels"] == ["conda-forge", "nodefaults"]

    text = render([part_of(whole, ["conda-forge"])]) + pip_entries(whole, PYLOCK)
    rows = YAML(typ="safe").load(text)["package"]
    assert [(row["name"], row["manager"]) for row in rows] == [("a", "conda"), ("zlib", "conda"), ("einops", "pip")]
    assert rows[-1]["url"] == "https://i.org/einops-0.8.1-py3-none-any.whl" and "w0rd" not in text
    with pytest.raises(LockError, match="names no wheel"):
        pip_entries(whole, 'lock-version = "1.0"\npackages = []\n')


def write(loaded: LoadedRecipe, packages: tuple[CondaPackage, ...], pip: Lock | None) -> CondaLock:
    digest = loaded.conda_digest(X86)
    whole = lock(*packages, digest=digest.removeprefix("sha256:"))
    part = part_of(whole, loaded.recipe.conda.channels, pip.digest if pip else "")
    (loaded.folder / "cpu.conda-lock.yml").write_text(render([part]))
    if pip is not None:
        (loaded.folder / "cpu-x86_64.conda.requirements.txt").write_text(pip_format.render(pip))
    return whole


def test_a_lock_is_current_stale_or_missing(tmp_path: Path) -> None:
    loaded = recipe(tmp_path)
    assert conda_lock(loaded, X86).inspect().fault == "no conda lock for this target yet"
    whole = write(loaded, (package("numpy"),), None)
    state = conda_lock(loaded, X86).inspect()
    assert state.fault is None and state.lock == whole
    assert conda_lock(loaded, Target.parse("cpu-aarch64")).inspect().fault == "no conda lock for this target yet"
    changed = recipe(tmp_path, CONDA.replace("2.*", "1.*"))
    assert "stale" in str(conda_lock(changed, X86).inspect().fault)


def test_what_pip_adds_has_to_be_of_the_same_resolution(tmp_path: Path) -> None:
    loaded = recipe(tmp_path, PIP)
    pip = lock(pip=(EINOPS,), digest=loaded.conda_digest(X86).removeprefix("sha256:")).pip
    write(loaded, (package("numpy"),), pip)
    state = conda_lock(loaded, X86).inspect()
    assert state.fault is None and state.lock is not None and state.lock.pip == pip
    other = replace(pip, packages=(replace(EINOPS, version="0.8.0"),))
    beside = loaded.folder / "cpu-x86_64.conda.requirements.txt"
    beside.write_text(pip_format.render(other))  # as a run leaves it that was killed between the two
    assert "stale" in str(conda_lock(loaded, X86).inspect().fault)
    beside.unlink()
    assert "stale" in str(conda_lock(loaded, X86).inspect().fault)


def test_a_current_lock_is_taken_without_the_solver_and_a_wrong_one_refused(tmp_path: Path) -> None:
    loaded = recipe(tmp_path)
    whole = write(loaded, (package("pytorch", "2.7", "cpu_0"),), None)
    said: list[str] = []

    def ensure(what: LoadedRecipe) -> CondaLock:
        # No environment is there to solve in: whoever asked for it would fail here.
        return lifecycle.ensure(
            conda_lock(what, X86),
            None,
            locked=True,
            offline=False,
            log=said.append,  # type: ignore[arg-type]
        )

    assert ensure(loaded) == whole and said == []
    write(loaded, (package("pytorch", "2.7", "cuda126_0"),), None)
    with pytest.raises(LockError, match="is for CPUs"):
        ensure(loaded)
    with pytest.raises(LockError, match="stale") as error:
        ensure(recipe(tmp_path, CONDA.replace("2.*", "1.*")))
    assert f"envbuild lock {loaded.folder} --target cpu-x86_64 --conda" in str(error.value.hint)
    with pytest.raises(UsageError, match=r"demo has no \[conda\] packages"):
        ensure(recipe(tmp_path, ""))
