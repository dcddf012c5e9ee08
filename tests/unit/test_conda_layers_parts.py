"""conda packages together: paths that several have, their layers, what decides these, the base below them."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab.conda_trees import MTIME, SCHEME, Item, located, named, nodes_of, package
from lab.wheels import make_wheel

from envbuild.debian.defaults import default_packages
from envbuild.errors import BuildError
from envbuild.layers.bytecode import find_compiler
from envbuild.layers.compose import LARGE, MOST_LARGE, WheelFile, alone, environment_part
from envbuild.layers.conda import conda_parts
from envbuild.layers.conda_files import CondaFile, Shared, losers, shared_paths
from envbuild.layers.layer_cache import TarCache
from envbuild.store.store import Store

NOTHING = Shared({}, (), ())


@pytest.mark.parametrize(
    "paths, lost",
    [
        ({"a": ["x", "y"], "b": ["y", "z"], "c": ["z"]}, {"a": ("y",), "b": ("z",)}),
        # A file over a folder takes all that is below with it, and the other way round.
        ({"a": ["d/x", "d/e/y"], "b": ["d"], "c": []}, {"a": ("d/e/y", "d/x")}),
        ({"a": ["d"], "b": ["d/x"], "c": []}, {"a": ("d",)}),
        ({"a": ["d/e/x"], "b": ["d/e"], "c": ["d/y"]}, {"a": ("d/e/x",)}),
        ({"a": ["d/e/x"], "b": ["d"], "c": ["d/e"]}, {"a": ("d/e/x",), "b": ("d",)}),
        ({"a": ["dd", "d.x"], "b": ["d"], "c": []}, {}),
    ],
)
def test_of_a_path_that_several_have_the_last_in_the_order_of_dependencies_is_kept(
    paths: Mapping[str, list[str]], lost: dict[str, tuple[str, ...]]
) -> None:
    assert losers(paths, ["a", "b", "c"]) == lost


NAMES = st.lists(st.sampled_from("ab"), min_size=1, max_size=3).map("/".join)


@given(st.dictionaries(st.sampled_from("pqrs"), st.sets(NAMES, max_size=4), min_size=1))
def test_what_is_left_of_any_packages_is_one_tree(paths: dict[str, set[str]]) -> None:
    # No package has a file and a folder of one name.
    own = {
        name: {path for path in has if not any(other.startswith(f"{path}/") for other in has)}
        for name, has in paths.items()
    }
    lost = losers(own, sorted(own))
    left = [path for name, has in own.items() for path in has - set(lost.get(name, ()))]
    assert len(left) == len(set(left))
    assert not any(other.startswith(f"{path}/") for path in left for other in left)
    # Nothing is lost but to another package.
    for path in {path for has in lost.values() for path in has}:
        assert any(path == o or o.startswith(path + "/") or path.startswith(o + "/") for o in left)


def three(folder: Path) -> list[CondaFile]:
    made = [
        package(folder, [Item("bin/x", b"z")], name="zlib"),
        package(folder, [Item("bin/x", b"a"), Item("a", b"a")], name="app", depends=["zlib >=1"]),
        package(folder, [Item("etc/conda/activate.d/m.sh", b"")], name="mid", depends=["app"]),
    ]
    return [located(path) for path in made]


def test_a_dependents_file_replaces_that_of_its_dependency(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    files = three(tmp_path)
    shared = shared_paths(files, [], SCHEME, store)
    assert shared == Shared({"zlib": ("bin/x",)}, ("mid",), ())
    for file in files:  # kept: nothing is read again
        file.path.unlink()
    assert shared_paths(files, [], SCHEME, store) == shared


def test_a_wheel_that_would_replace_a_file_of_conda_is_refused_and_both_named(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, "tool", "2.0")
    item = Item("lib/python3.11/site-packages/tool/__init__.py", b"")
    file = located(package(tmp_path, [item], name="conda-tool"))
    wheels = [WheelFile("tool", "2.0", wheel, "0" * 64, 1)]
    with pytest.raises(BuildError, match=r"tool 2.0, which pip adds.* package conda-tool: /opt/env/lib"):
        shared_paths([file], wheels, SCHEME, Store(tmp_path / "store"))


def test_a_free_threaded_python_is_refused(tmp_path: Path) -> None:
    index = {"name": "python", "version": "3.11.2", "build": "0"}
    index["python_site_packages_path"] = "lib/python3.11t/site-packages"
    made = package(tmp_path, [], name="python", info={"index.json": json.dumps(index).encode()})
    with pytest.raises(BuildError, match=r"python3\.11t"):
        shared_paths([named(made)], [], SCHEME, Store(tmp_path / "store"))


# ---- layers


def pretend(name: str, size: int, **more: Any) -> CondaFile:
    file = CondaFile(dataclasses.replace(_ONE, name=name, sha256=name), Path("/gone"), size)
    return dataclasses.replace(file, package=dataclasses.replace(file.package, **more))


with tempfile.TemporaryDirectory() as _folder:
    _ONE = named(package(Path(_folder), [])).package


def test_large_packages_have_layers_of_their_own_at_most_sixty_with_wheels() -> None:
    conda = [pretend(f"c{n:02}", LARGE + 2 * n) for n in range(40)] + [pretend("tiny", 10)]
    wheels = [WheelFile(f"w{n:02}", "1", Path("/gone"), "0", LARGE + 2 * n + 1) for n in range(40)]
    own = alone(conda, wheels)
    assert own == [30, 30] and sum(own) == MOST_LARGE
    parts = conda_parts(conda, NOTHING, SCHEME, None, MTIME, own[0])
    assert [part.title for part in parts[:2]] == ["c39 1.0", "c38 1.0"] and len(parts) == 31
    assert parts[-1].title.startswith("11 packages: c00 1.0, ")
    assert alone([pretend("a", LARGE)], [wheels[0]]) == [1, 1] and alone([], wheels[:3]) == [0, 3]


def test_all_that_decides_a_layer_changes_its_key() -> None:
    file, compiler = pretend("a", 1), find_compiler(sys.executable)
    scheme = dataclasses.replace(SCHEME, python="3.12")
    variants = [
        conda_parts([file], NOTHING, SCHEME, None, MTIME, 0),
        conda_parts([file], NOTHING, scheme, None, MTIME, 0),
        conda_parts([file], NOTHING, SCHEME, compiler, MTIME, 0),
        conda_parts([file], NOTHING, SCHEME, None, MTIME + 1, 0),
        conda_parts([file], Shared({"a": ("x",)}, (), ()), SCHEME, None, MTIME, 0),
        *(
            conda_parts([pretend("a", 1, **{key: "other"})], NOTHING, SCHEME, None, MTIME, 0)
            for key in ("version", "build", "sha256", "subdir", "url", "md5", "depends")
        ),
    ]
    assert len({parts[0].key for parts in variants}) == len(variants)
    # What other packages share is not its business.
    other = Shared({"b": ("x",)}, ("b",), ("b",))
    assert conda_parts([file], other, SCHEME, None, MTIME, 0)[0].key == variants[0][0].key


def test_modules_of_the_standard_library_and_of_packages_get_bytecode(tmp_path: Path) -> None:
    items = [Item(f"lib/python3.11/{path}", b"x = 1\n") for path in ("os.py", "site-packages/m.py")]
    items += [Item("share/data.py", b"x = 1\n"), Item("lib/python3.11/__pycache__/os.cpython-311.pyc")]
    file, compiler = located(package(tmp_path, items)), find_compiler(sys.executable)
    (part,) = conda_parts([file], NOTHING, SCHEME, compiler, MTIME, 1)
    nodes, _ = nodes_of(part.tree())
    tag = compiler.tag
    assert sorted(path for path in nodes if path.endswith(".pyc")) == [
        f"lib/python3.11/__pycache__/os.{tag}.pyc",
        f"lib/python3.11/site-packages/__pycache__/m.{tag}.pyc",
    ]
    made = [TarCache(Store(tmp_path / str(n)), lambda _: None).part(part) for n in (1, 2)]
    assert made[0].layer == made[1].layer and [d[0] for d in made[0].distributions] == ["lab"]


def test_the_last_layer_is_condas_and_has_no_venv_in_it(tmp_path: Path) -> None:
    path = make_wheel(tmp_path, "ddp-train", "0.1")
    trainer = WheelFile("ddp-train", "0.1", path, "0" * 64, 1)
    part = environment_part(
        trainer, SCHEME, "/opt/env/bin/python", "3.11.2", "{}", None, MTIME,
        system_packages=False, conda=True,
    )  # fmt: skip
    entries = {entry.path: entry for entry, _ in part.tree()}
    assert entries["opt/env/conda-meta/history"].size == 0 and "opt/env/envbuild.json" in entries
    assert not {"opt/env/pyvenv.cfg", "opt/env/bin/python"} & entries.keys()


def test_a_base_for_conda_has_no_python_of_debians() -> None:
    with_python, without = (set(default_packages("bookworm", python=p)) for p in (True, False))
    assert {"python3.11-minimal", "libpython3.11-stdlib"} == with_python - without
    assert {"bash", "coreutils", "ca-certificates", "libstdc++6"} <= without


def test_help_imports_nothing_of_condas() -> None:
    code = "import sys, envbuild.cli, envbuild.kinds.image; print({'rattler', 'zstandard'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
