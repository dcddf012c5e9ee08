"""A vault in a real registry: what was locked is built from it alone, and no fault of it is a fault of a build."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lab import registry as lab_registry
from lab.fake_registry import Call, fake_registry
from lab.wheels import make_recipe, make_wheel

from .conftest import NO_DAEMON, REPOSITORY, Command, tiny_site
from .test_cache import FAULTS as OF_CACHE
from .test_cache import keys, through

TARGET = f"cpu-{os.uname().machine}"
# A server that says nothing for a second is too slow; nothing is tried again.
PIP = {"PIP_NO_INDEX": "1", "PIP_RETRIES": "0", "PIP_DEFAULT_TIMEOUT": "1"}


def slow(call: Call) -> None:
    call.content()
    time.sleep(1.5)
    call.cut()


FAULTS = (*OF_CACHE, slow)
FAKETIME = Path("/usr/lib") / f"{os.uname().machine}-linux-gnu/faketime/libfaketime.so.1"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lab_registry.Lab]:
    if (reason := lab_registry.missing()) is not None:
        pytest.skip(reason)
    with lab_registry.registry(tmp_path_factory.mktemp("registry")) as running:
        yield running


class Team:
    """A host that has the wheels of two recipes, and one that has the vault at `address` alone."""

    def __init__(self, top: Path, address: str) -> None:
        self.top, self.address = top, address
        builder = tiny_site(top, top / "builder")
        self.builder = Command(top, {**builder.env, **PIP, **self.site("builder")})

    def site(self, name: str, vault: str = "", trust: str = "") -> dict[str, str]:
        file = self.top / f"{name}.toml"
        vault = vault or f"oci://{self.address}/{self.top.name}/vault"
        file.write_text(f'vault = "{vault}"\n[registries."{self.address}"]\ninsecure = true\n{trust}')
        return {"ENVBUILD_SITE": str(file)}

    def node(self, name: str, **site: str) -> Command:
        """A host with an empty store, where pip has neither an index nor a folder."""
        env = {**PIP, "ENVBUILD_STORE": str(self.top / f"store-{name}"), "PIP_FIND_LINKS": ""}
        return Command(self.top, {**env, **self.site(name, **site)})

    def built(self, command: Command, out: str, *options: str, recipe: str = "one", **env: str) -> str:
        line = ("venv", recipe, "--locked", "--no-verify", "--out", out, *options)
        return str(command.json(*line, **env)["digest"])


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheels, and two recipes with their locks."""
    top = tmp_path_factory.mktemp("locked")
    noise = random.Random(7).randbytes(300_000)
    make_wheel(top / "wheels", "alpha", requires=["beta"], files={"alpha/noise": noise})
    make_wheel(top / "wheels", "beta")
    for name, needs in (("one", ["alpha"]), ("two", ["beta"])):
        make_recipe(top / "recipes", name, needs, extra="[verify]\ntrainer = false\n")
    assert tiny_site(top, top / "store")("lock", "one", "two", "--wheels").returncode == 0
    return top


@pytest.fixture
def team(tmp_path: Path, server: lab_registry.Lab, locked: Path) -> Team:
    for part in ("wheels", "recipes"):
        shutil.copytree(locked / part, tmp_path / part)
    return Team(tmp_path, server.address)


def test_a_host_without_an_index_builds_what_another_kept(team: Team, server: lab_registry.Lab) -> None:
    wanted = team.built(team.builder, "built")
    pushed = team.builder.json("vault", "push", "one", "two")["locks"]
    assert {(row["recipe"], row["target"]) for row in pushed} == {
        (name, f"cpu-{arch}") for name in ("one", "two") for arch in ("x86_64", "aarch64")
    }
    assert sum(row["uploaded_bytes"] for row in pushed) < 1.1 * pushed[0]["bytes"]
    assert all(row["uploaded_bytes"] == 0 for row in team.builder.json("vault", "push", "one", "two")["locks"])
    assert team.built(team.node("fresh"), "env") == wanted
    shown = team.node("other").json("vault", "status")
    assert [row["missing"] for row in shown["locks"]] == [[]] * 4
    assert {name for row in shown["locks"] for name in row["of"]} == {
        f"{name} cpu-{arch} wheels" for name in ("one", "two") for arch in ("x86_64", "aarch64")
    }
    assert shown["bytes"] < 0.6 * sum(row["bytes"] for row in shown["locks"])
    assert all(row["kept"].endswith("T00:00:00Z") for row in shown["locks"])
    told = team.node("third")("site", "check", "--json").stdout
    assert "/vault (read): 4 locks" in told, told


def test_what_upstream_has_lost_is_named_of_recipes_and_of_the_locks_in_the_vault(team: Team) -> None:
    """Here the only source is a page of find-links."""
    page = team.top / "index.html"
    files = sorted(team.top.glob("wheels/*.whl"))
    hashes = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}

    def write(*names: str, yanked: str = "") -> None:
        rows = (f'<a href="wheels/{name}#sha256={hashes[name]}"{yanked}>{name}</a>' for name in names)
        page.write_text("".join(rows))

    write(*hashes)
    asked = Command(team.top, {**team.builder.env, "PIP_FIND_LINKS": page.as_uri()})
    assert asked.json("vault", "check", "--upstream", "one", "two") == {"files": 2, "lost": []}
    asked.json("vault", "push", "one")
    shutil.rmtree(team.top / "recipes")
    write(files[0].name)
    done = asked("vault", "check", "--upstream", "--json")
    assert done.returncode == 5, done.stderr
    (row,) = json.loads(done.stdout)["lost"]
    assert row["name"] == "beta 1.0" and row["state"] == "gone" and row["sha256"] == hashes[files[1].name]
    assert row["of"] == ["one cpu-x86_64", "one cpu-aarch64"] and "not there" in row["answers"][0], row
    write(*hashes, yanked=' data-yanked="broken"')
    done = asked("vault", "check", "--upstream")
    assert done.returncode == 5 and done.stdout.count("yanked") == 2 * 2, done.stdout


def test_a_lost_and_a_poisoned_file_are_named_and_never_built_from(team: Team, server: lab_registry.Lab) -> None:
    team.builder.json("vault", "push", "one", "--target", TARGET)
    wheel = next(team.top.glob("wheels/alpha*"))
    blobs = [file for file in server.storage.rglob("data") if file.read_bytes() == wheel.read_bytes()]
    assert len(blobs) == 1
    blobs[0].write_bytes(bytes(len(wheel.read_bytes())))
    done = team.node("poisoned")("venv", "one", "--locked", "--no-verify", "--out", "env")
    assert done.returncode == 4 and "hash mismatch" in done.stderr and "vault oci://" in done.stderr, done.stderr
    assert not (team.top / "env").exists()
    blobs[0].unlink()
    shown = team.node("lost")("vault", "status", "--json")
    assert shown.returncode == 5, shown.stderr
    (row,) = json.loads(shown.stdout)["locks"]
    assert len(row["missing"]) == 1 and row["missing"][0].endswith(wheel.name)
    assert team.builder.json("vault", "push", "one", "--target", TARGET)["locks"][0]["uploaded_bytes"] > 300_000
    assert team.node("again").json("vault", "status")["locks"][0]["missing"] == []


def test_entries_of_others_are_refused_where_signers_are_named(team: Team) -> None:
    private, public = keys(team.top, "ci")
    other, _ = keys(team.top, "other")
    trust = f'[trust]\ncache_signers = ["{public}"]\n'
    done = team.node("unsigned", trust=trust)("vault", "push", "one")
    assert done.returncode == 2 and "ENVBUILD_CACHE_KEY" in done.stderr
    builder = Command(team.top, {**team.builder.env, **team.site("signed", trust=trust)})
    assert builder("vault", "push", "one", ENVBUILD_CACHE_KEY=str(private)).returncode == 0
    reader = team.node("reader", trust=trust)
    assert reader("vault", "status").returncode == 0
    assert team.builder("vault", "push", "one", ENVBUILD_CACHE_KEY=str(other)).returncode == 0
    done = reader("vault", "status")
    assert done.returncode == 4 and "no signer of the cache has signed it" in done.stderr, done.stderr


def test_a_folder_is_a_vault_too_and_may_be_read_offline(team: Team) -> None:
    wanted = team.built(team.builder, "built")
    folder = f"oci:{team.top}/kept"
    keeper = Command(team.top, {**team.builder.env, **team.site("keeper", vault=folder)})
    assert team.built(keeper, "again") == wanted and not (team.top / "kept").exists()
    done = keeper("venv", "one", "--locked", "--no-verify", "--out", "kept-too", ENVBUILD_VAULT_MODE="readwrite")
    assert done.returncode == 0 and f"{folder} keeps the " in done.stderr, done.stderr
    (team.top / "kept/bundle.json").write_text("{}")  # a bundle stays as it is
    done = keeper("venv", "two", "--locked", "--no-verify", "--out", "not-kept", ENVBUILD_VAULT_MODE="readwrite")
    assert done.returncode == 0 and "keeps the" not in done.stderr, done.stderr
    (team.top / "kept/bundle.json").unlink()
    (first,) = keeper.json("vault", "push", "one", "--target", TARGET)["locks"]
    assert first["bytes"] > 300_000 and first["uploaded_bytes"] == 0
    keeper.json("vault", "push", "two")
    index = json.loads((team.top / "kept/index.json").read_text())
    assert len(index["manifests"]) == 3 and (team.top / "kept/oci-layout").is_file()
    node = team.node("node", vault=folder)
    assert team.built(node, "env", "--offline") == wanted
    assert node.json("vault", "status")["locks"][0]["missing"] == []


def git(folder: Path, *words: str) -> None:
    line = ["git", "-C", str(folder), "-c", "user.name=lab", "-c", "user.email=lab@example.org", *words]
    subprocess.run(line, check=True, capture_output=True)


@pytest.mark.parametrize("form", ["registry", "folder"])
def test_locks_that_no_ref_names_are_removed_with_their_files(team: Team, form: str) -> None:
    vault = f"oci:{team.top}/kept" if form == "folder" else ""
    builder = Command(team.top, {**team.builder.env, **team.site("prune", vault=vault)})
    builder.json("vault", "push", "one", "two")
    repository = team.top / "repository"
    shutil.copytree(team.top / "recipes", repository / "recipes")
    git(repository.parent, "init", "--quiet", "repository")
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "-m", "both")
    git(repository, "branch", "old")
    shutil.rmtree(repository / "recipes/one")
    git(repository, "commit", "--quiet", "-a", "-m", "one is gone")
    # Of a host without recipes; a branch names both locks of "one".
    node = Command(repository.parent, {**builder.env, "ENVBUILD_RECIPES": "/nonexistent"})
    shutil.rmtree(team.top / "recipes")

    def prune(*options: str, status: int = 0, words: str = "") -> dict[str, Any]:
        done = node("vault", "prune", "--json", *options)
        assert done.returncode == status and words in done.stderr, done.stderr
        return json.loads(done.stdout) if status == 0 else {}

    prune(status=2, words="choose what to remove")
    (team.top / "other").mkdir()
    prune("--not-in", "other", status=4, words="git rev-parse failed")
    git(team.top, "init", "--quiet", "other")
    prune("--not-in", "other", status=2, words="names a lock of")
    git(team.top, "clone", "--quiet", "--depth=1", repository.as_uri(), "shallow")
    prune("--not-in", "shallow", status=2, words="shallow")
    assert prune("--not-in", "repository")["removed"] == []
    git(repository, "tag", "-a", "-m", "a tag counts, too", "v1", "old")
    git(repository, "branch", "-D", "old")
    assert prune("--not-in", "repository")["removed"] == []
    git(repository, "tag", "-d", "v1")
    assert prune("--not-in", "repository", "--older-than", "1d")["removed"] == []
    planned = prune("--not-in", "repository", "--dry-run")
    assert len(planned["removed"]) == 2 and planned["left"] == 2 and planned["bytes"] > 300_000
    assert len(node.json("vault", "status")["locks"]) == 4
    assert prune("--not-in", "repository") == planned
    shown = node.json("vault", "status")
    assert [row["missing"] for row in shown["locks"]] == [[], []] and shown["bytes"] < 300_000
    wheels = sorted(team.top.glob("wheels/*.whl"))
    digests = [hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in wheels]
    if form == "folder":
        assert [(team.top / "kept/blobs/sha256" / digest).exists() for digest in digests] == [False, True]
    # What is older than an age, and of no recipe here.
    assert len(prune("--older-than", "0h", "--dry-run")["removed"]) == 2
    shutil.copytree(repository / "recipes", team.top / "recipes")
    assert prune("--older-than", "0h")["removed"] == []


def test_a_fault_at_any_request_of_a_build_is_no_fault_where_an_index_has_the_files(team: Team) -> None:
    wanted = team.built(team.builder, "built")
    team.builder.json("vault", "push", "one", "--target", TARGET)
    runs = 0

    def build(fault: Callable[[Call, int], bool]) -> int:
        nonlocal runs
        runs += 1
        index = {"PIP_FIND_LINKS": (team.top / "pages/index.html").as_uri()}
        with fake_registry(through(team.address, fault)) as proxy:
            insecure = f'[registries."{proxy.address}"]\ninsecure = true\n'
            node = team.node(f"n{runs}", vault=f"oci://{proxy.address}/{team.top.name}/vault", trust=insecure)
            assert team.built(Command(node.folder, {**node.env, **index}), f"env{runs}") == wanted
        return len(proxy.seen)

    (team.top / "pages").mkdir()
    links = "".join(f'<a href="../wheels/{path.name}">{path.name}</a>' for path in team.top.glob("wheels/*.whl"))
    (team.top / "pages/index.html").write_text(links)
    requests = build(lambda _call, _number: False)
    assert requests == 2
    for number in range(requests):
        for wrong in FAULTS[number::requests]:
            build(lambda call, seen, n=number, w=wrong: seen == n and (w(call), True)[1])  # type: ignore[misc]
    for wrong in FAULTS[:2]:
        build(lambda call, _seen, w=wrong: (w(call), True)[1])  # type: ignore[misc]


def test_a_fault_at_any_request_of_a_push_leaves_no_entry_without_its_files(team: Team) -> None:
    runs = 0

    def push(fault: Callable[[Call, int], bool]) -> tuple[int, int]:
        nonlocal runs
        runs += 1
        name = f"vault{runs}"
        with fake_registry(through(team.address, fault)) as proxy:
            insecure = f'[registries."{proxy.address}"]\ninsecure = true\n'
            site = team.site("push", vault=f"oci://{proxy.address}/{team.top.name}/{name}", trust=insecure)
            done = Command(team.top, {**team.builder.env, **site})("vault", "push", "two", "--target", TARGET)
        assert done.returncode in (0, 4), done.stderr
        status = team.node("status", vault=f"oci://{team.address}/{team.top.name}/{name}")("vault", "status", "--json")
        assert status.returncode == 0, status.stderr
        locks: list[dict[str, Any]] = json.loads(status.stdout)["locks"]
        assert len(locks) == 1 or done.returncode == 4, done.stderr
        return done.returncode, len(proxy.seen)

    status, requests = push(lambda _call, _number: False)
    assert status == 0 and requests > 4
    for number in range(0, requests, 2):
        wrong = FAULTS[number // 2 % len(FAULTS)]
        push(lambda call, seen, n=number, w=wrong: seen == n and (w(call), True)[1])  # type: ignore[misc]
    for wrong in FAULTS:
        assert push(lambda call, _seen, w=wrong: (w(call), True)[1])[0] == 4  # type: ignore[misc]


def test_an_environment_is_built_again_from_its_receipt_and_the_vault_alone(team: Team) -> None:
    built = team.builder.json("venv", "one", "--locked", "--out", "built")
    team.builder.json("vault", "push", "one")
    node = team.node("node")
    shown = node.json("rebuild", built["receipt"])
    assert shown["verdict"] == "identical" and shown["digest"] == built["digest"], shown
    # The recipe of today is another one: what counts is the one that was kept.
    recipe = team.top / "recipes/one/recipe.toml"
    recipe.write_text(recipe.read_text().replace("alpha", "beta"))
    assert node.json("rebuild", "built", "--out", "again")["verdict"] == "identical"
    assert (team.top / "again/bin/python").exists()
    receipt = json.loads(Path(built["receipt"]).read_text())
    for part, words in {
        "lock": "does not have the recipe",
        "recipe": "does not have",
    }.items():
        other = {**receipt, part: {**receipt[part], "digest": "sha256:" + "0" * 64}}
        (team.top / "other.receipt.json").write_text(json.dumps(other))
        done = node("rebuild", "other")
        assert done.returncode == 4 and words in done.stderr, done.stderr
    # The same content by another plan, such as that of another envbuild.
    (team.top / "built.receipt.json").write_text(json.dumps({**receipt, "plan": {"digest": "sha256:" + "0" * 64}}))
    done = node("rebuild", "built")
    assert done.returncode == 0 and "identical" in done.stdout and "the plan here is" in done.stderr, done.stderr
    module = next(team.top.glob("built/lib/python*/site-packages/alpha/__init__.py"))
    other = {**receipt, "artifact": {**receipt["artifact"], "digest": "sha256:" + "0" * 64}}
    Path(built["receipt"]).write_text(json.dumps(other))
    text = module.read_text()
    module.unlink()  # it may be a link to the store's
    module.write_text(text + "changed = 1\n")
    done = node("rebuild", "built")
    assert done.returncode == 5 and "alpha/__init__.py  alpha-1.0" in done.stdout, done.stdout + done.stderr


def test_an_image_is_built_again_and_the_layer_that_differs_is_named(
    tmp_path: Path, tiny_squash: dict[str, Any]
) -> None:
    """From a vault in a folder: a docker image, a file of another compression, and one with another wheel."""
    maker, vault = tiny_squash["command"], {"ENVBUILD_VAULT": f"oci:{tmp_path}/vault"}
    maker.json("vault", "push", "tiny_image", "--target", TARGET, **vault)
    receipt = json.loads(Path(tiny_squash["enroot"]["receipt"]).read_text())

    def rebuilt(name: str, digest: str, kind: str = "enroot", *, status: int = 0) -> dict[str, Any]:
        about = {"kind": kind, "path": str(tmp_path / name), "digest": digest}
        (tmp_path / f"{name}.receipt.json").write_text(json.dumps({**receipt, "artifact": about}))
        done = maker("rebuild", tmp_path / name, "--json", **vault)
        assert done.returncode == status, done.stderr
        shown: dict[str, Any] = json.loads(done.stdout)
        return shown

    options = ("--target", TARGET, "--no-verify", "--out")
    image = maker.json("docker", "tiny_image", *options, f"oci:{tmp_path}/image")
    assert rebuilt("image", image["digest"], "docker")["verdict"] == "identical"
    packed = maker.json("enroot", "tiny_image", "--compression", "gzip", *options, tmp_path / "packed.sqsh")
    assert packed["digest"] != tiny_squash["enroot"]["digest"]
    assert rebuilt("packed.sqsh", packed["digest"])["verdict"] == "equal files, other container"
    for folder in ("recipes", "wheels"):
        shutil.copytree(maker.folder / folder, tmp_path / folder)
    wheel = make_wheel(tmp_path / "wheels", "tiny", files={"tiny/added.py": b"1"})
    lock = next((tmp_path / "recipes/tiny_image").glob(f"{TARGET}.requirements.txt"))
    old = hashlib.sha256((maker.folder / "wheels" / wheel.name).read_bytes()).hexdigest()
    lock.write_text(lock.read_text().replace(old, hashlib.sha256(wheel.read_bytes()).hexdigest()))
    other = Command(tmp_path, {**maker.env, "PIP_FIND_LINKS": str(tmp_path / "wheels")})
    changed = other.json("enroot", "tiny_image", "--locked", *options, tmp_path / "changed.sqsh")
    shown = rebuilt("changed.sqsh", changed["digest"], status=5)
    rows = {row["name"]: (row["change"], row["layer"]) for row in shown["changes"]}
    (name,) = (name for name in rows if name.endswith("tiny/added.py"))
    assert rows[name] == ("removed", None)
    (name,) = (name for name in rows if name.endswith("tiny-1.0.dist-info/RECORD"))
    assert rows[name] == ("changed", "tiny 1.0"), rows


@pytest.mark.skipif(TARGET != "cpu-x86_64", reason="it was built for x86_64")
def test_of_an_artifact_that_an_older_version_built_the_differences_are_named(tmp_path: Path) -> None:
    """tests/unit/data/kept.tar.xz has an environment of commit 5af1420d, older than `rebuild`, and its inputs.

    No release is older. Its trainer is another than today's, and so may be this host's Python; nothing else differs.
    """
    (tmp_path / "recipes").mkdir()
    kept = REPOSITORY / "tests/unit/data/kept.tar.xz"
    subprocess.run(["tar", "-xf", kept, "-C", tmp_path / "recipes"], check=True)
    place = tmp_path / "recipes/old_tiny"
    old, files = tmp_path / "env", {**NO_DAEMON, **PIP, "ENVBUILD_VAULT": f"oci:{tmp_path}/vault"}
    for name in ("env", "env.receipt.json"):
        (place / name).rename(tmp_path / name)
    wheels = (place / "tiny-1.0-py3-none-any.whl").rename(tmp_path / "tiny-1.0-py3-none-any.whl").parent
    maker = Command(tmp_path, {**files, "ENVBUILD_STORE": str(tmp_path / "one"), "PIP_FIND_LINKS": str(wheels)})
    maker.json("vault", "push", "old_tiny", "--target", TARGET)
    node = Command(tmp_path, {**files, "ENVBUILD_STORE": str(tmp_path / "two"), "PIP_FIND_LINKS": ""})
    done = node("rebuild", old, "--json")
    assert done.returncode == 5 and "warning: the artifact was built from the plan sha256:8974809dadeb" in done.stderr
    changes = json.loads(done.stdout)["changes"]
    others = [row for row in changes if row["layer"] != "ddp_train-0.1.0" and row["name"] != "python"]
    assert len(changes) > 10 and all("ddp" in row["name"] for row in others), others


@pytest.mark.skipif(not FAKETIME.exists(), reason="libfaketime (Debian: faketime) is not installed")
def test_an_image_and_an_environment_are_the_same_ten_years_later(tmp_path: Path, tiny_squash: dict[str, Any]) -> None:
    """From a vault in a folder alone: lists of Debian have expired then, and 2038 is near."""
    maker, vault = tiny_squash["command"], {"ENVBUILD_VAULT": f"oci:{tmp_path}/vault"}
    env = maker.json("venv", "tiny_image", "--locked", "--no-verify", "--out", tmp_path / "now")
    maker.json("vault", "push", "tiny_image", "--target", TARGET, **vault)
    later = {"LD_PRELOAD": str(FAKETIME), "FAKETIME": "+3653d"}
    node = Command(maker.folder, {**PIP, **NO_DAEMON, **vault, **later, "ENVBUILD_STORE": str(tmp_path / "store")})
    options = ("--locked", "--offline", "--no-verify")
    assert (
        node.json("enroot", "tiny_image", *options, "--out", tmp_path / "later.sqsh")["digest"]
        == (tiny_squash["enroot"]["digest"])
    )
    assert node.json("venv", "tiny_image", *options, "--out", tmp_path / "later")["digest"] == env["digest"]
    clock = subprocess.run(["date", "+%s"], env={**os.environ, **later}, capture_output=True, check=True)
    assert int(clock.stdout) > time.time() + 9 * 365 * 86400
