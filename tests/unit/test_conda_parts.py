"""What conda environments are judged by: digests, records, variables, and archives found on disk."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab.host import Host

from envbuild.base.errors import BuildError, HostError
from envbuild.base.masking import redact
from envbuild.base.packages import conda_digest
from envbuild.build import conda, conda_cache, venv
from envbuild.build.conda import command, launch_environment
from envbuild.build.conda_install import _clean_records
from envbuild.contract.conda_meta import META, conda_packages, owned_dist_infos, quick_names, survey_conda
from envbuild.lock.conda import CondaPackage
from envbuild.site.settings import Site
from envbuild.store.fetch import CondaArchive, fetch_archives
from envbuild.store.store import Store

SITE = "lib/python3.11/site-packages"
word = st.text('abc/._-\\"ä', min_size=1, max_size=8)


def put(path: Path, content: bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return hashlib.sha256(content).hexdigest()


def record(root: Path, name: str, version: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    data = {"name": name, "version": version, "build": "0", "paths_data": {"paths": rows}}
    put(root / "conda-meta" / f"{name}-{version}-0.json", json.dumps(data).encode())
    return data


# ---- digests and records


@given(st.lists(st.tuples(word, word), unique=True, max_size=5), st.randoms())
def test_a_packages_digest_depends_on_its_rows_and_not_on_their_order(
    pairs: list[tuple[str, str]], random: Any
) -> None:
    rows = [{"_path": path, "sha256": sha256} for path, sha256 in pairs]
    shuffled = random.sample(rows, len(rows))
    assert conda_digest(rows) == conda_digest(iter(shuffled))
    assert conda_digest([*rows, {"_path": "more"}]) != conda_digest(rows)


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"sha256_in_prefix": "f" * 64}, True),
        ({"size_in_bytes": 99}, True),
        ({"sha256": "e" * 64}, False),
        ({"_path": "other"}, False),
        ({"_path": "__clobbers__/x", "original_path": "bin/x"}, True),
    ],
)
def test_what_a_prefix_changes_in_a_record_is_not_in_its_digest(change: dict[str, Any], same: bool) -> None:
    row = {"_path": "bin/x", "path_type": "hardlink", "sha256": "a" * 64}
    script = {"_path": "bin/s", "path_type": "unix_python_entry_point", "sha256": "b" * 64}
    one = {"name": "x", "version": "1", "paths_data": {"paths": [row, script]}}
    other_script = {**script, "sha256": "c" * 64}  # it holds the prefix
    two = {**one, "paths_data": {"paths": [other_script, {**row, **change}]}}
    assert (conda_packages([one]) == conda_packages([two])) == same


@pytest.mark.parametrize("content", [b"{", b"[]", b"{}", b'{"name": "x", "version": "1", "paths_data": 3}'])
def test_a_record_that_makes_no_sense_is_an_altered_file(tmp_path: Path, content: bytes) -> None:
    put(tmp_path / "conda-meta" / "x-1-0.json", content)
    (tmp_path / SITE).mkdir(parents=True)
    found, files = survey_conda(tmp_path, tmp_path / SITE)
    assert not found and files.altered == ["conda-meta"]


def test_packages_of_conda_and_of_pip_are_told_apart(tmp_path: Path) -> None:
    brought = {"one.py": b"1", "one-1.dist-info/METADATA": b"m", "big/in-2.dist-info/METADATA": b""}
    rows: list[dict[str, Any]] = [
        {"_path": f"{SITE}/{name}", "sha256": put(tmp_path / SITE / name, data)} for name, data in brought.items()
    ]
    rows.append({"_path": f"{SITE}/__pycache__/one.pyc", "sha256": "0" * 64})
    data = record(tmp_path, "one", "1", rows)
    put(tmp_path / SITE / "two.py", b"2")
    put(tmp_path / SITE / "Two_x-2.dist-info" / "RECORD", b"two.py,,\nTwo_x-2.dist-info/RECORD,,\n")
    put(tmp_path / SITE / "nobody.py", b"")
    assert "one-1.dist-info" in owned_dist_infos([data], SITE)
    found, files = survey_conda(tmp_path, tmp_path / SITE)
    assert {(d.name, d.version) for d in found.values()} == {("one", "1"), ("two-x", "2")}
    assert files.unowned == [f"{SITE}/nobody.py"] and not files.missing and not files.altered
    assert quick_names(tmp_path, tmp_path / SITE) == {("one", "1"), ("two-x", "2")}


# ---- variables


def test_variables_that_packages_and_users_set_are_set(tmp_path: Path) -> None:
    root = tmp_path / "envs" / "mine"
    put(root / "etc/conda/env_vars.d/pkg.json", b'{"A": "1", "B": "pkg"}')
    put(root / "etc/conda/env_vars.d/odd.json", b"[")
    put(root / "conda-meta/state", b'{"env_vars": {"B": "user"}}')
    env = launch_environment(root, {"PYTHONPATH": "/x", "HOME": "/h"})
    assert env["A"] == "1" and env["B"] == "user" and env["HOME"] == "/h"
    assert "PYTHONPATH" not in env and env["CONDA_DEFAULT_ENV"] == "mine"
    assert env["PATH"] == f"{root}/bin:{os.defpath}"


def test_packages_of_the_users_home_are_not_found(tmp_path: Path) -> None:
    root, home = tmp_path / "conda", tmp_path / "home"
    (root / "bin").mkdir(parents=True)
    (root / "bin/python").symlink_to(os.path.realpath(sys.executable))  # one outside of a venv, as conda's
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    put(home / f".local/lib/python{version}/site-packages/stray.py", b"")
    env = launch_environment(root, {"PATH": os.environ["PATH"], "HOME": str(home)})
    done = subprocess.run(command(root, "python", "-c", "import stray"), env=env, capture_output=True, text=True)
    assert "No module named 'stray'" in done.stderr


@pytest.mark.parametrize("kind", [venv, conda])
def test_a_command_of_verify_is_a_program_of_the_environment_or_of_the_host(kind: Any, tmp_path: Path) -> None:
    put(tmp_path / "bin/tool", b"")
    for own in ("tool", "python", "torchrun"):  # the last two are never those of the host
        assert kind.command(tmp_path, own, "-x") == [f"{tmp_path}/bin/{own}", "-x"]
    for other in ("sh", "/bin/sh"):
        line, env = kind.command(tmp_path, other, "-c", "exit 3"), {"PATH": os.environ["PATH"]}
        assert subprocess.run(line, env=kind.launch_environment(tmp_path, env)).returncode == 3


def test_an_activation_that_cannot_end_is_an_error(tmp_path: Path) -> None:
    put(tmp_path / "etc/conda/activate.d/a.sh", b"exit 3\n")
    with pytest.raises(HostError, match=r"activate\.d.*exit 3"):
        launch_environment(tmp_path, {"PATH": os.environ["PATH"]})


# ---- archives and what is unpacked


def test_an_archive_on_disk_is_used_where_it_lies(tmp_path: Path) -> None:
    channel, mirror = "https://conda.example.org/c", tmp_path / "mirror"
    archive = CondaArchive(f"{channel}/noarch/x-1-0.conda", put(mirror / "noarch/x-1-0.conda", b"x"))
    mirrors = {channel: ((tmp_path / "no").as_uri(), mirror.as_uri())}
    site = Site(store=tmp_path / "store", mirrors=mirrors)
    store = Store(tmp_path / "store")

    def fetch() -> dict[CondaArchive, Path]:
        return fetch_archives([archive], Host(store, site=site), offline=True)

    assert fetch() == {archive: mirror / "noarch/x-1-0.conda"}
    put(mirror / "noarch/x-1-0.conda", b"another")
    with pytest.raises(BuildError) as caught:
        fetch()
    assert (
        "hash mismatch" in caught.value.message
        and f"{tmp_path}/no/noarch/x-1-0.conda: not there" in caught.value.message
    )
    put(tmp_path / "store/conda/archives" / archive.sha256 / archive.name, b"x")
    assert fetch()[archive].is_relative_to(store.root)


def test_packages_that_are_missing_for_the_same_reason_share_a_few_lines(tmp_path: Path) -> None:
    channel, mirror = "https://conda.example.org/c", tmp_path / "mirror"
    archives = [CondaArchive(f"{channel}/noarch/x{number}-1-0.conda", "0" * 64) for number in range(200)]
    put(mirror / "noarch/x7-1-0.conda", b"another")
    site = Site(store=tmp_path / "store", mirrors={channel: (mirror.as_uri(), channel)})
    with pytest.raises(BuildError) as caught:
        fetch_archives(archives, Host(Store(tmp_path / "store"), site=site), offline=True)
    lines = caught.value.message.splitlines()
    assert lines[:3] == [
        "199 conda packages: no source has them with the locked hash",
        "    x0-1-0.conda, x1-1-0.conda, x2-1-0.conda, x3-1-0.conda, x4-1-0.conda and 194 more",
        f"    {mirror}: not there",
    ]
    assert "x7-1-0.conda: no source has it with the locked hash" in lines and len(lines) < 10
    assert "envbuild bundle RECIPE --kind conda" in str(caught.value.hint)
    for archive in archives[:100]:
        put(mirror / f"noarch/{archive.name}", archive.name.encode())
    with pytest.raises(BuildError) as caught:
        fetch_archives(archives, Host(Store(tmp_path / "store"), site=site), offline=True)
    assert "and 97 more conda packages" in caught.value.message and len(caught.value.message.splitlines()) < 20


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://h/t/tok-1/c/noarch/x.conda: 401", "https://h/t/****/c/noarch/x.conda: 401"),
        ("https://u:p@h/a/t/tok/c and https://h/t/x/d", "https://u:****@h/a/t/****/c and https://h/t/****/d"),
        ("https://h/a/b/t", "https://h/a/b/t"),
        ("/t/x/y", "/t/x/y"),
        # A repository of a registry, by its name and by the registry's API.
        ("docker://h:5000/t/odd and h/t/odd", "docker://h:5000/t/odd and h/t/odd"),
        ("https://h/v2/t/odd/manifests/1: 404", "https://h/v2/t/odd/manifests/1: 404"),
        ("HTTPS://h/v2x/t/tok/c", "HTTPS://h/v2x/t/****/c"),
    ],
)
def test_tokens_of_channels_are_hidden(text: str, shown: str) -> None:
    assert redact(text) == shown


@pytest.mark.parametrize("change", ["content", "mode", "time", "new", "gone", "link", "same stat", "none"])
def test_every_change_of_an_unpacked_tree_changes_its_digest(tmp_path: Path, change: str) -> None:
    file = tmp_path / "a" / "f"
    put(file, b"1")
    (tmp_path / "l").symlink_to("a/f")
    before = conda_cache.tree_digest(tmp_path, {})
    if change == "content":
        file.write_bytes(b"12")
    elif change == "same stat":
        about = file.stat()
        file.write_bytes(b"2")
        os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
    elif change == "mode":
        file.chmod(0o600)
    elif change == "time":
        os.utime(file, ns=(0, 1))
    elif change == "new":
        put(tmp_path / "b" / "g", b"")
    elif change == "gone":
        file.unlink()
    elif change == "link":
        (tmp_path / "l").unlink()
        (tmp_path / "l").symlink_to("a/ff")
    else:
        os.link(file, tmp_path.parent / f"{tmp_path.name}-linked")  # as installing does
    assert (conda_cache.tree_digest(tmp_path, {}) == before) == (change == "none")


def test_threads_of_the_linking_child_print_whole_lines() -> None:
    script = (
        "import sys, threading\n"
        "from envbuild.build.conda_link import say\n"
        "sys.setswitchinterval(1e-6)\n"
        "print_all = lambda name: [say(f'failed {name}') for _ in range(2000)]\n"
        "threads = [threading.Thread(target=print_all, args=(letter * 50,)) for letter in 'abcdefgh']\n"
        "[thread.start() for thread in threads]\n"
        "[thread.join() for thread in threads]\n"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, text=True).stdout
    assert Counter(said.splitlines()) == {f"failed {letter * 50}": 2000 for letter in "abcdefgh"}


def test_everybody_may_read_which_packages_are_installed(tmp_path: Path) -> None:
    """rattler writes the records for their owner alone; `conda list` of a colleague needs them."""
    one = CondaPackage("lab", "1.0", "0", "noarch", "https://lab.example/noarch/lab-1.0-0.conda", "", "")
    record = tmp_path / "env" / META / "lab-1.0-0.json"
    record.parent.mkdir(parents=True)
    record.write_text("{}")
    record.chmod(0o600)
    work = SimpleNamespace(known={one: None}, new={}, staged=tmp_path / "env", store=Store(tmp_path / "store"))
    _clean_records(cast(Any, work))
    (tmp_path / "new").touch()
    assert record.read_text() == "{}"
    assert record.stat().st_mode == (tmp_path / "new").stat().st_mode
