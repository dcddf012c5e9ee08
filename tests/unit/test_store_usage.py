"""What a store holds, by use and by recipe, and the removal of what is not used, beside builds that use it."""

import hashlib
import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from envbuild.base.errors import UsageError
from envbuild.cli.store import store_command
from envbuild.run_environment import load_environment, with_tmpdir
from envbuild.store.store import Store
from envbuild.store.usage import StoreItem, choose, items, limit, own_items, recipes, remember, remove

DAY = 86400
KEY = "ab" * 32


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def wheel(store: Store, content: bytes, name: str = "demo-1.0-py3-none-any.whl") -> str:
    """Put a wheel into the store, and return its sha256."""
    sha256 = hashlib.sha256(content).hexdigest()
    new = store.folder("partial") / "new"
    new.write_bytes(content)
    store.adopt(new, sha256, name)
    return sha256


def age(store: Store, days: float, *patterns: str) -> None:
    """Let all that the store has, or what matches, be used `days` ago."""
    then = time.time() - days * DAY
    for pattern in patterns or ("**/*",):
        for path in store.root.glob(pattern):
            os.utime(path, (then, then), follow_symlinks=False)


def names(found: object) -> list[str]:
    assert isinstance(found, (list, tuple))
    return [item.name for item in found]


def test_items_are_what_is_removed_as_a_whole(store: Store) -> None:
    assert items(store) == []
    sha256 = wheel(store, b"w" * 5000)
    store.blobs.add(b"blob")
    for name in (
        "segments/k.data",
        "segments/k.index",
        "segments/k.json",
        "segments/.new-1",
        "segments/k.lock",
        "layers/l.members",
        "layers/l.json",
        "layers/other.json",
        "conda/pkgs/p-1.0-0/lib/x",
        "conda/pkgs/p-1.0-0.lock",
        "conda/stamps/p-1.0-0.json",
        "built/b/tree/lib.so",
        "built/b/manifest",
        "uv/wheels-v5/x",
        "builders/d.sqsh",
        "builders/d.json",
        "seals/e.json",
    ):
        path = store.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    found = {item.name: item for item in items(store)}
    blob = f"blobs/sha256/{hashlib.sha256(b'blob').hexdigest()}"
    assert set(found) == {
        f"wheels/{sha256}",
        blob,
        "segments/k.data",
        "layers/l.members",
        "conda/pkgs/p-1.0-0",
        "built/b",
        "uv",
        "builders/d.sqsh",
        "seals/e.json",
    }
    assert [path.name for path in found["segments/k.data"].paths] == ["k.data", "k.index", "k.json"]
    assert found["conda/pkgs/p-1.0-0"].paths[1] == store.root / "conda/stamps/p-1.0-0.json"
    assert found[f"wheels/{sha256}"].size >= 5000 and all(item.used > time.time() - 60 for item in found.values())


def test_a_use_is_noted_and_a_check_is_none(store: Store) -> None:
    sha256 = wheel(store, b"wheel")
    age(store, 40)
    (item,) = items(store)
    assert item.used < time.time() - 39 * DAY
    path = next((store.root / "wheels" / sha256).iterdir())
    assert store.digests.keep(path, sha256, again=True)  # as `envbuild store check` does
    assert items(store)[0].used == pytest.approx(item.used, abs=1)
    assert store.find("wheels", sha256, bool) == path
    assert items(store)[0].used > time.time() - 60


ITEMS = st.lists(st.tuples(st.integers(0, 100), st.integers(0, 50)), max_size=12).map(
    lambda rows: [
        StoreItem("wheels", f"wheels/{number}", (), size, used) for number, (used, size) in enumerate(sorted(rows))
    ]
)


@given(ITEMS, st.none() | st.integers(0, 110), st.none() | st.integers(0, 300), st.sets(st.integers(0, 11)))
def test_what_is_chosen(found: list[StoreItem], older: int | None, keep: int | None, own: set[int]) -> None:
    chosen = choose(found, 100, older_s=older, keep=keep, only=lambda item: int(item.name[7:]) in own)
    candidates = [item for item in found if int(item.name[7:]) in own]
    assert [item for item in candidates if item in chosen] == chosen  # in order
    left = [item for item in candidates if item not in chosen]
    if older is not None:
        assert all(item.used >= 100 - older for item in left)
    if keep is not None and left:
        assert sum(item.size for item in found if item not in chosen) <= keep
        # The last one by age was needed, or was old.
        young = [item for item in chosen if older is None or item.used >= 100 - older]
        if young:
            assert sum(item.size for item in found if item not in chosen or item is young[-1]) > keep
            assert all(item.used >= young[-1].used for item in left)
    if older is None and keep is None:
        assert not left


def test_unused_items_go_and_linked_files_stay(store: Store, tmp_path: Path) -> None:
    old, new = wheel(store, b"old"), wheel(store, b"new")
    cached = store.folder("uv", "archive") / "module.py"
    cached.write_text("x = 1")
    os.link(cached, tmp_path / "module.py")
    age(store, 40)
    assert store.find("wheels", new, bool)
    found = items(store)
    done = remove(store, choose(found, time.time(), older_s=30 * DAY))
    assert sorted(names(done.removed)) == sorted([f"wheels/{old}", "uv"]) and done.held == ()
    assert names(items(store)) == [f"wheels/{new}"] and (tmp_path / "module.py").read_text() == "x = 1"
    assert store.find("wheels", old, bool) is None and store.find("wheels", new, bool)
    assert len(list((store.root / "digests").iterdir())) == 1 and not list((store.root / "pruned").iterdir())


def test_what_a_running_build_used_stays(store: Store) -> None:
    used, other = wheel(store, b"used"), wheel(store, b"other")
    age(store, 40)
    with store.working("running"):
        assert store.find("wheels", used, bool)
        done = remove(store, items(store))
        assert names(done.removed) == [f"wheels/{other}"] and names(done.held) == [f"wheels/{used}"]
        assert store.find("wheels", used, bool)
    age(store, 1, "digests/*")
    assert names(remove(store, items(store)).removed) == [f"wheels/{used}"]


def test_a_run_registers_itself_and_its_recipe(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENVBUILD_STORE", str(store.root))
    sha256, unused = wheel(store, b"wheel"), wheel(store, b"unused")
    with with_tmpdir(load_environment()) as environment:
        assert len(list((store.root / "running").iterdir())) == 1
        assert environment.store.find("wheels", sha256, bool)
        remember(environment.store, "mine")
    assert not list((store.root / "running").iterdir())
    assert recipes(store) == {"mine": {f"wheels/{sha256}"}}
    again = Store(store.root)
    assert again.find("wheels", unused, bool)
    remember(again, "mine")
    remember(again, "theirs")
    assert recipes(store)["mine"] == {f"wheels/{sha256}", f"wheels/{unused}"}
    assert names(list(filter(own_items(store, "mine"), items(store)))) == [f"wheels/{sha256}"]


def test_the_first_run_of_a_store_registers_itself_when_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "new"
    monkeypatch.setenv("ENVBUILD_STORE", str(root))
    with with_tmpdir(load_environment()):
        pass
    assert not root.exists()  # nothing was written
    with with_tmpdir(load_environment()) as environment:
        sha256 = wheel(environment.store, b"wheel")
        assert len(list((root / "running").iterdir())) == 1
        time.sleep(0.02)  # the clock of file systems is coarse
        assert names(remove(Store(root), items(Store(root))).held) == [f"wheels/{sha256}"]
    assert not list((root / "running").iterdir())
    time.sleep(0.02)
    assert names(remove(Store(root), items(Store(root))).removed) == [f"wheels/{sha256}"]


def test_a_store_that_cannot_be_written_is_used(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.root.parent.joinpath("file").write_text("")
    monkeypatch.setenv("ENVBUILD_STORE", str(store.root.parent / "file/store"))
    with with_tmpdir(load_environment()) as environment:
        remember(environment.store, "mine")
        limit(environment.store, 1)


BUILD = """
import sys
from pathlib import Path
from envbuild.store.store import Store

store, rounds = Store(Path(sys.argv[1])), int(sys.argv[2])
wheels = [line.split() for line in open(sys.argv[3])]
for round in range(rounds):
    with store.working("running"):
        paths = []
        for sha256, content in wheels:
            path = store.find("wheels", sha256, bool)
            if path is None:
                with store.working("building") as work:
                    new = work / "new"
                    new.write_text(content)
                    path = store.adopt(new, sha256, "demo-1.0-py3-none-any.whl")
            paths.append((path, content))
        for path, content in paths:
            assert path.read_text() == content, path
"""


def test_nothing_that_running_builds_use_is_lost(store: Store, tmp_path: Path) -> None:
    contents = [f"content-{number}" for number in range(40)]
    rows = [f"{hashlib.sha256(text.encode()).hexdigest()} {text}" for text in contents]
    (tmp_path / "wheels").write_text("\n".join(rows))
    line = [sys.executable, "-c", BUILD, str(store.root), "12", str(tmp_path / "wheels")]
    builds = [subprocess.Popen(line, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    removed = 0
    while any(build.poll() is None for build in builds):
        removed += len(remove(store, items(store)).removed)
    assert [(build.wait(), build.communicate()[1]) for build in builds] == [(0, "")] * 3
    assert removed > 0


def test_the_limit_of_the_site_is_kept_once_an_hour(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = wheel(store, b"o" * 9000), wheel(store, b"n" * 9000)
    age(store, 3, f"wheels/{old}", "digests/*")
    age(store, 2, f"wheels/{new}")
    store.folder("pruned")
    limit(store, 14000)
    assert len(items(store)) == 2  # looked at now
    age(store, 1, "pruned")
    limit(store, 40000)
    assert len(items(store)) == 2 and not capsys.readouterr().err
    age(store, 1, "pruned")
    limit(store, 14000)
    assert names(items(store)) == [f"wheels/{new}"] and "limit of 14.0 kB: 1 items" in capsys.readouterr().err


def command(store: Store, *words: str) -> Result:
    return CliRunner().invoke(store_command, words, env={"ENVBUILD_STORE": str(store.root)}, catch_exceptions=False)


def test_the_commands(store: Store) -> None:
    sha256, own = wheel(store, b"w" * 5000), wheel(store, b"own")
    mine, theirs = Store(store.root), Store(store.root)
    assert mine.find("wheels", sha256, bool) and mine.find("wheels", own, bool) and theirs.find("wheels", sha256, bool)
    remember(mine, "mine")
    remember(theirs, "theirs")
    status = json.loads(command(store, "status", "--json").stdout)
    assert status["items"] == 2 and status["bytes"] == sum(row["bytes"] for row in status["kinds"])
    assert [row["recipe"] for row in status["recipes"]] == ["mine", "theirs"]
    assert status["recipes"][1]["own_bytes"] == 0 < status["recipes"][0]["own_bytes"]
    text = command(store, "status").stdout
    assert "recipe mine" in text and "not used for 30 days" in text and str(store.root) in text
    dry = command(store, "prune", "--recipe", "mine", "--dry-run")
    assert f"wheels/{own}" in dry.stdout and "would be removed" in dry.stderr and len(items(store)) == 2
    done = json.loads(command(store, "prune", "--recipe", "mine", "--json").stdout)
    assert [row["path"] for row in done["removed"]] == [str(store.root / "wheels" / own)] and done["held"] == []
    assert names(items(store)) == [f"wheels/{sha256}"] and done["left"] == items(store)[0].size
    assert json.loads(command(store, "prune", "--older-than", "1h", "--json").stdout)["removed"] == []
    assert len(json.loads(command(store, "prune", "--keep", "0", "--json").stdout)["removed"]) == 1
    assert items(store) == [] and command(store, "status").exit_code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "choose what to remove"),
        (("--older-than", "30"), "--older-than 30: expected a number with a unit"),
        (("--keep", "50 GB"), "--keep 50 GB: expected"),
        (("--recipe", "gone"), "--recipe gone: the store has no entry of this recipe"),
    ],
)
def test_faulty_options(store: Store, words: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        textwrap.dedent(command(store, "prune", *words).output)
