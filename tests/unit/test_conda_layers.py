"""Layers of conda packages: how they are grouped, what decides them, the last layer, the base below them."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

from lab.conda_trees import MTIME, SCHEME
from lab.wheels import make_wheel

from envbuild.build.conda_layers import LinkedPackage, LinkedPackages, conda_parts
from envbuild.debian.lock import default_packages
from envbuild.interpreter import read_python
from envbuild.layers.bytecode import Compiler, compiler_of
from envbuild.layers.compose import LARGE, MOST_LARGE, alone, environment_part
from envbuild.layers.layer_cache import LayerRequest
from envbuild.layers.wheel import Scheme, WheelFile
from envbuild.lock.conda import CondaPackage
from envbuild.store.store import Store


def pretend(name: str, size: int, record: str = "1") -> LinkedPackage:
    return LinkedPackage(CondaPackage(name, "1.0", "0", "noarch", "https://x/c/noarch/x", "", ""), size, record, ())


def parts(
    packages: list[LinkedPackage],
    scheme: Scheme = SCHEME,
    compiler: Compiler | None = None,
    mtime: int = MTIME,
    own: int = 0,
) -> list[LayerRequest]:
    linked = LinkedPackages(tuple(packages), lambda: Path("/gone"), Store(Path("/gone")))
    return conda_parts(linked, scheme, compiler, mtime, own)


def test_large_packages_have_layers_of_their_own_at_most_sixty_with_wheels() -> None:
    conda = [pretend(f"c{n:02}", LARGE + 2 * n) for n in range(40)] + [pretend("tiny", 10)]
    wheels = [WheelFile(f"w{n:02}", "1", Path("/gone"), "0", LARGE + 2 * n + 1) for n in range(40)]
    own = alone(conda, wheels)
    assert own == [30, 30] and sum(own) == MOST_LARGE
    made = parts(conda, own=own[0])
    assert [part.title for part in made[:2]] == ["c39 1.0", "c38 1.0"] and len(made) == 31
    assert made[-1].title.startswith("11 packages: c00 1.0, ")
    assert alone([pretend("a", LARGE)], [wheels[0]]) == [1, 1] and alone([], wheels[:3]) == [0, 3]


def test_all_that_decides_a_layer_changes_its_key() -> None:
    one = pretend("a", 1)
    variants = [
        parts([one]),
        parts([one], dataclasses.replace(SCHEME, python="3.12")),
        parts([one], dataclasses.replace(SCHEME, prefix="opt/other")),
        parts([one], compiler=compiler_of(read_python(sys.executable))),
        parts([one], mtime=MTIME + 1),
        parts([pretend("a", 1, record="2")]),
        parts([one, pretend("b", 1)]),
    ]
    assert len({made[0].key for made in variants}) == len(variants)


def test_the_last_layer_is_condas_and_has_no_venv_in_it(tmp_path: Path) -> None:
    path = make_wheel(tmp_path, "ddp-train", "0.1")
    trainer = WheelFile("ddp-train", "0.1", path, "0" * 64, 1)
    part = environment_part(
        [trainer], SCHEME, "/opt/env/bin/python", "3.11.2", "{}", None, MTIME, system_packages=False, conda=True
    )
    entries = {entry.path: entry for entry, _ in part.tree()}
    assert entries["opt/env/conda-meta/history"].size == 0 and "opt/env/envbuild.json" in entries
    assert not {"opt/env/pyvenv.cfg", "opt/env/bin/python"} & entries.keys()


def test_a_base_for_conda_has_no_python_of_debians() -> None:
    with_python, without = (set(default_packages("bookworm", python=p)) for p in (True, False))
    assert {"python3.11-minimal", "libpython3.11-stdlib"} == with_python - without
    assert {"bash", "coreutils", "ca-certificates", "libstdc++6"} <= without


def test_help_imports_nothing_of_condas() -> None:
    code = "import sys, envbuild.cli.commands, envbuild.build.image; print({'rattler', 'zstandard'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
