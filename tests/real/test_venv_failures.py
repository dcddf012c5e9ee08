"""What goes wrong while a venv is built: one clear message, the old venv kept, nothing left behind."""

from __future__ import annotations

import json
import marshal
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import MAGIC_NUMBER
from pathlib import Path
from typing import Any

import pytest
from lab.wheels import make_recipe, make_wheel

from .conftest import Command, link_tree

PACKAGES = ("alpha", "beta", "gamma")


@pytest.fixture
def small(lab: Command) -> Command:
    """A recipe `small` of three tiny wheels, locked."""
    for name in PACKAGES:
        files = {f"{name}/part{n}.py": b"x = 1\n" * n for n in range(30)}
        make_wheel(lab.folder / "wheels", name, files=files | {f"{name}-1.0.data/scripts/{name}-run": b"#!/bin/sh\n"})
    make_recipe(lab.folder / "recipes", "small", [f"{name}==1.0" for name in PACKAGES])
    assert lab("lock", "small", "--wheels").returncode == 0
    return lab


def build(command: Command, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return command("venv", "small", "--no-verify", "--out", "v", *arguments, **env)


def content(command: Command) -> set[str]:
    packages = command.folder / "v/lib/python3.11/site-packages"
    return {path.name.partition("-")[0] for path in packages.glob("*.dist-info")}


def change_recipe(command: Command) -> None:
    """Now the recipe wants only alpha."""
    make_recipe(command.folder / "recipes", "small", ["alpha==1.0"])
    assert command("lock", "small", "--wheels").returncode == 0


def litter(command: Command) -> list[str]:
    return [path.name for path in command.folder.iterdir() if path.name.startswith(".")]


def test_kill_at_any_moment_leaves_the_old_or_the_new(small: Command) -> None:
    assert build(small).returncode == 0
    both = [{"alpha", "beta", "gamma", "ddp_train"}, {"alpha", "ddp_train"}]
    hit = 0
    started = time.monotonic()
    small.start("venv", "small", "--no-verify", "--out", "v").communicate()
    full = time.monotonic() - started + 0.5
    wide = True
    for moment in random.Random(7).sample(range(100), 6):  # at each call of the system: test_every_call.py
        if content(small) == both[0]:  # so that each time there is something to build, whatever the kill before did
            change_recipe(small)
        else:
            make_recipe(small.folder / "recipes", "small", [f"{name}==1.0" for name in PACKAGES])
            assert small("lock", "small", "--wheels").returncode == 0
        child = small.start("venv", "small", "--no-verify", "--out", "v")
        if wide:
            time.sleep(full * moment / 100)
        else:  # however busy the machine is, some kills come while it builds
            while child.poll() is None and not litter(small):
                time.sleep(0.002)
            time.sleep(0.001 * moment if hit else 0)
        child.kill()
        child.communicate()
        hit += bool(litter(small))
        assert content(small) in both
        run = subprocess.run(
            [small.folder / "v/bin/python", "-c", "import alpha; print(alpha.__version__)"],
            capture_output=True,
            text=True,
        )
        assert run.stdout == "1.0\n", run.stderr
        wide = not wide
    assert build(small).returncode == 0
    assert litter(small) == []
    assert hit, "no kill came while it was building"


@pytest.mark.parametrize(
    ("name", "cached"),
    [("alpha/__init__.py", "alpha/__init__.py"), ("bin/alpha-run", "alpha-1.0.data/scripts/alpha-run")],
)
def test_a_file_that_changed_in_uvs_cache_is_unpacked_again(small: Command, name: str, cached: str) -> None:
    assert build(small).returncode == 0
    (file,) = (small.folder / "store/uv").glob(f"archive-v0/*/{cached}")
    with file.open("ab") as stream:  # as whoever may write to an environment changes it, whose files are links to these
        stream.write(b"\n")
    done = small("venv", "small", "--no-verify", "--out", "other", "--json")
    assert done.returncode == 0 and name in done.stderr and "unpacked again" in done.stderr
    # The environment that somebody edited is built again, too.
    assert json.loads(done.stdout)["digest"] == small.json("venv", "small", "--no-verify")["digest"]


def test_ctrl_c_exits_130_and_leaves_nothing(small: Command) -> None:
    codes = []
    for number in range(3):
        child = small.start("venv", "small", "--no-verify", "--out", f"v{number}")
        # The staging folder shows that it is in the middle of building.
        deadline = time.monotonic() + 30
        while not litter(small) and child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(0.02 * number)
        child.send_signal(signal.SIGINT)
        _, stderr = child.communicate()
        codes.append(child.returncode)
        assert child.returncode in (0, 130) and "Traceback" not in stderr, stderr
        assert (small.folder / f"v{number}").exists() == (child.returncode == 0)
        assert litter(small) == []
    assert 130 in codes


@pytest.fixture
def own(pt_cpu: dict[str, Any], tmp_path: Path) -> Path:
    """pt_cpu once more, where no other worker starts anything."""
    return link_tree(pt_cpu["path"], tmp_path / "v")


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    """An empty folder for TMPDIR."""
    folder = tmp_path / "t"
    folder.mkdir()
    return folder


def test_ctrl_c_during_verification_stops_the_ranks(own: Path, envbuild: Command, temporary: Path) -> None:
    child = envbuild.start("verify", own, "--nproc-per-node", "1", "--epochs", "2000", TMPDIR=str(temporary))
    deadline = time.monotonic() + 60
    while not ranks_of(own) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert ranks_of(own), "no rank ever started"
    time.sleep(1.0)
    child.send_signal(signal.SIGINT)
    try:
        _, stderr = child.communicate(timeout=60)
    finally:
        child.kill()
    assert child.returncode == 130 and "interrupted" in stderr, stderr
    deadline = time.monotonic() + 10
    while ranks_of(own) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert ranks_of(own) == [] and list(temporary.iterdir()) == []


def test_kill_9_during_verification_stops_the_ranks_too_and_the_next_run_removes_its_files(
    own: Path, envbuild: Command, temporary: Path
) -> None:
    line = ("verify", own, "--nodes", "1", "--nproc-per-node", "1", "--epochs", "2000")
    child = envbuild.start(*line, TMPDIR=str(temporary))
    deadline = time.monotonic() + 60
    while len(ranks_of(own)) < 3 and time.monotonic() < deadline:  # the reference, an agent and its rank
        time.sleep(0.05)
    child.kill()
    child.communicate()
    deadline = time.monotonic() + 40
    while ranks_of(own) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert ranks_of(own) == []
    [left] = temporary.iterdir()
    assert list(left.glob("*/torchelastic_*")), list(left.rglob("*"))
    assert envbuild("plan", "pt_cpu", TMPDIR=str(temporary)).returncode == 0
    assert list(temporary.iterdir()) == []


def ranks_of(path: Path) -> list[int]:
    """Processes of verification's trainer that the venv at `path` runs."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[0].startswith(os.fsencode(path)) and any(word.endswith(b"/start.py") for word in words):
            found.append(int(entry.name))
    return found


def test_an_extra_or_a_missing_file_means_building_again(small: Command) -> None:
    assert build(small).returncode == 0
    packages = small.folder / "v/lib/python3.11/site-packages"
    (info := packages / "extra-1.0.dist-info").mkdir()
    assert small.json("venv", "small", "--no-verify", "--out", "v", "--offline")["built"]
    assert not info.exists()
    (lost := packages / "alpha/part1.py").unlink()
    done = build(small, "--offline")
    assert f"{lost.relative_to(small.folder / 'v')} changed since the build" in done.stderr and lost.exists()


def test_a_full_disk(small: Command) -> None:
    place = small.folder / "tiny"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", place], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("mounting a small tmpfs needs root")
    try:
        done = small("venv", "small", "--no-verify", "--out", "tiny/v")
        assert done.returncode == 4 and "No space left on device" in done.stderr, done.stderr
        assert "free disk space" in done.stderr
        assert list(place.iterdir()) == []
    finally:
        subprocess.run(["umount", place], check=True)


def test_a_read_only_store(small: Command) -> None:
    store = small.folder / "sealed"
    store.mkdir()
    bound = subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,size=1m", "tmpfs", store], capture_output=True)
    if bound.returncode != 0:
        pytest.skip("a read-only mount needs root")
    try:
        done = build(small, ENVBUILD_STORE=str(store))
        assert done.returncode == 4 and str(store) in done.stderr and "ENVBUILD_STORE" in done.stderr, done.stderr
    finally:
        subprocess.run(["umount", store], check=True)


def test_a_read_only_place(small: Command) -> None:
    place = small.folder / "sealed"
    place.mkdir()
    bound = subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,size=1m", "tmpfs", place], capture_output=True)
    if bound.returncode != 0:
        pytest.skip("a read-only mount needs root")
    try:
        done = small("venv", "small", "--no-verify", "--out", "sealed/v")
        assert done.returncode == 4 and "Read-only file system" in done.stderr and "--out" in done.stderr
    finally:
        subprocess.run(["umount", place], check=True)


def test_no_network_and_nothing_in_the_store(small: Command) -> None:
    for wheel in (small.folder / "wheels").iterdir():
        wheel.unlink()
    env = {"PIP_NO_INDEX": "0", "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0"}
    (small.folder / "pip.conf").write_text("")
    done = build(small, **env)
    assert done.returncode in (3, 4) and "alpha" in done.stderr, done.stderr
    assert "127.0.0.1:9" in done.stderr and "refused" in done.stderr.lower()
    assert not (small.folder / "v").exists() and litter(small) == []


def test_a_wheel_that_is_not_the_locked_one(small: Command) -> None:
    make_wheel(small.folder / "wheels", "beta", files={"beta/evil.py": b"import os\n"})
    done = build(small)
    assert done.returncode in (3, 4) and "beta" in done.stderr, done.stderr
    assert "hash" in done.stderr.lower() and not (small.folder / "v").exists()


def test_a_store_and_a_place_may_have_any_characters_in_their_names(small: Command) -> None:
    """uv splits --find-links at commas, and takes what follows # for a fragment."""
    (small.folder / "wheels, #").mkdir()
    for wheel in (small.folder / "wheels").iterdir():
        shutil.copy(wheel, small.folder / "wheels, #")
    env = {"ENVBUILD_STORE": str(small.folder / "sto,re#\\"), "PIP_FIND_LINKS": (small.folder / "wheels, #").as_uri()}
    done = small("venv", "small", "--no-verify", "--locked", "--out", "a,b#c\\", **env)
    assert done.returncode == 0, done.stderr
    assert (small.folder / "a,b#c\\/lib/python3.11/site-packages/alpha-1.0.dist-info").is_dir()


def test_a_wheel_that_replaces_the_venv_s_configuration_is_refused(small: Command) -> None:
    """uv installs it in silence; the venv's Python would then be the one that the wheel chooses."""
    make_wheel(small.folder / "wheels", "delta", files={"delta-1.0.data/data/pyvenv.cfg": b"home = /elsewhere\n"})
    make_recipe(small.folder / "recipes", "small", ["alpha==1.0", "delta==1.0"])
    done = build(small)
    assert done.returncode == 4 and "delta-1.0-py3-none-any.whl: " in done.stderr, done.stderr
    assert "pyvenv.cfg" in done.stderr and not (small.folder / "v").exists() and litter(small) == []


def test_a_missing_interpreter_lists_what_there_is(small: Command) -> None:
    # Without pyenv, whose shims take a tenth of a second each.
    search = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
    done = build(small, "--python", "3.99", PATH=search)
    assert done.returncode == 6 and "no Python 3.99" in done.stderr, done.stderr
    assert platform.python_version() in done.stderr and "--python" in done.stderr


@pytest.mark.parametrize("python", ["/bin/false", "/nowhere/python3"])
def test_an_interpreter_that_is_none(small: Command, python: str) -> None:
    done = build(small, "--python", python)
    assert done.returncode == 6 and python in done.stderr, done.stderr
    assert litter(small) == []


def test_an_interpreter_of_another_version(small: Command) -> None:
    recipe = small.folder / "recipes/small/recipe.toml"
    recipe.write_text(recipe.read_text().replace('python = "3.11"', 'python = "3.12"'))
    assert small("lock", "small", "--wheels").returncode == 0
    done = build(small, "--python", "3.11")
    assert done.returncode == 6 and "wants Python 3.12" in done.stderr, done.stderr


def test_a_stale_lock_is_refused_when_locked_and_renewed_otherwise(small: Command) -> None:
    make_recipe(small.folder / "recipes", "small", ["alpha==1.0", "beta==1.0"])
    refused = build(small, "--locked")
    assert refused.returncode == 3 and "stale" in refused.stderr and "envbuild lock small" in refused.stderr
    renewed = build(small)
    assert renewed.returncode == 0 and "stale" in renewed.stderr and "- gamma 1.0" in renewed.stderr
    assert content(small) == {"alpha", "beta", "ddp_train"}


def test_offline_and_locked_need_nothing_but_the_store_and_find_links(small: Command) -> None:
    assert build(small, "--offline", "--locked").returncode == 0


def test_two_builds_at_once(small: Command) -> None:
    children = [small.start("venv", "small", "--no-verify", "--out", "v") for _ in range(3)]
    results = [(child.communicate()[1], child.returncode) for child in children]
    assert [code for _, code in results] == [0, 0, 0], results
    assert sum("building small" in text for text, _ in results) == 1
    assert content(small) == {"alpha", "beta", "gamma", "ddp_train"}
    assert litter(small) == []


def test_a_failed_build_keeps_the_old_venv(small: Command) -> None:
    assert build(small).returncode == 0
    make_wheel(small.folder / "wheels", "beta", "2.0")
    make_recipe(small.folder / "recipes", "small", ["alpha==1.0", "beta==2.0"])
    assert small("lock", "small", "--wheels").returncode == 0
    make_wheel(small.folder / "wheels", "beta", "2.0", files={"beta/evil.py": b""})
    assert build(small).returncode in (3, 4)
    assert content(small) == {"alpha", "beta", "gamma", "ddp_train"}


def test_a_recipe_with_five_mistakes_reports_all_five(lab: Command) -> None:
    folder = lab.folder / "recipes" / "bad"
    folder.mkdir(parents=True)
    (folder / "recipe.toml").write_text(
        'name = "bad"\n'
        "description = 3\n"
        'python = "three"\n'
        'requirments = ["numpy"]\n'
        'requirements = ["-r other.txt"]\n'
        "[targets.cpu-x86-64]\n"
    )
    done = lab("venv", "bad")
    assert done.returncode == 2, done.stderr
    where = [f"recipe.toml:{line}:" for line in (2, 3, 4, 5, 6)]
    assert all(place in done.stderr for place in where), done.stderr
    assert "did you mean 'requirements'" in done.stderr
    assert os.listdir(lab.folder / "recipes" / "bad") == ["recipe.toml"]


def with_script(command: Command, body: bytes) -> None:
    """The recipe wants a wheel with the script `say`, too."""
    files = {"epsilon-1.0.data/scripts/say": b"#!python\n" + body}
    make_wheel(command.folder / "wheels", "epsilon", files=files)
    make_recipe(command.folder / "recipes", "small", ["alpha==1.0", "epsilon==1.0"])
    assert command("lock", "small", "--wheels").returncode == 0


def test_a_path_with_dots_gives_the_venv_of_the_plain_path(small: Command) -> None:
    """uv writes of a relative path of its Python, as it is, that of the staging folder into each script."""
    with_script(small, b"print('said')\n")
    (small.folder / "real/deep").mkdir(parents=True)
    (small.folder / "link").symlink_to("real/deep")
    digests = set()
    for out, place in ((small.folder / "v", "v"), (f"../{small.folder.name}/w", "w"), ("link/../x", "real/x")):
        done = small("venv", "small", "--no-verify", "--json", "--out", str(out))
        assert done.returncode == 0, done.stderr
        made = json.loads(done.stdout)
        assert made["path"] == f"{small.folder}/{place}"
        digests.add(made["digest"])
        assert subprocess.check_output([small.folder / place / "bin/say"], text=True) == "said\n"
    assert len(digests) == 1


def test_a_file_that_names_the_staging_folder_ends_the_build(small: Command) -> None:
    with_script(small, b"open('/x/.v.envbuild-0123abcd/lib/file')\n")
    done = build(small)
    assert done.returncode == 4 and "bin/say: names " in done.stderr, done.stderr
    assert not (small.folder / "v").exists() and litter(small) == []


def test_bytecode_that_a_wheel_brings_may_be_compiled_again(small: Command) -> None:
    """numpy's wheel has some."""
    code = MAGIC_NUMBER + bytes(12) + marshal.dumps(compile("x = 0", "part.py", "exec"))
    files = {"zeta/part.py": b"x = 1\n", "zeta/__pycache__/part.cpython-311.pyc": code}
    make_wheel(small.folder / "wheels", "zeta", files=files)
    make_recipe(small.folder / "recipes", "small", ["alpha==1.0", "zeta==1.0"])
    done = build(small, "--compile-bytecode")
    assert done.returncode == 0, done.stderr
    assert subprocess.check_output([small.folder / "v/bin/python", "-c", "import zeta.part as p; print(p.x)"]) == b"1\n"
