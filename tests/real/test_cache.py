"""A team's cache in a real registry: what one store made, another has; no fault of the registry makes a build fail."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import random
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lab import registry as lab_registry
from lab.fake_registry import Call, fake_registry
from lab.wheels import make_recipe, make_wheel

from envbuild.base.packages import digest_of
from envbuild.cache.http import Transport
from envbuild.image.layout import Blobs
from envbuild.image.model import OCI_MANIFEST, Descriptor
from envbuild.image.registry import Registry, open_registry

from .conftest import ARCH, Command, link_store, link_tree, tiny_site, use_base_of_pt_minimal
from .test_store import layer, write_archive

# All faults at all requests: CACHE_FAULTS=all pytest tests/real/test_cache.py
ALL = os.environ.get("CACHE_FAULTS") == "all"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[lab_registry.Lab]:
    if (reason := lab_registry.missing()) is not None:
        pytest.skip(reason)
    with lab_registry.registry(tmp_path / "registry") as running:
        yield running


def command(
    folder: Path, store: str, address: str, mode: str = "readwrite", trust: str = "", key: str = "", name: str = "cache"
) -> Command:
    """The command with a store of its own, and the cache at `address`, for which the site's [trust] says `trust`."""
    site = folder / f"{store}.toml"
    site.write_text(f'cache = "oci://{address}/team/{name}"\n[registries."{address}"]\ninsecure = true\n{trust}')
    env = {"ENVBUILD_STORE": str(folder / store), "ENVBUILD_SITE": str(site), "ENVBUILD_CACHE_MODE": mode}
    return Command(folder, {**env, "ENVBUILD_CACHE_KEY": key} if key else env)


def of_tiny_image(folder: Path, store: str, address: str, mode: str, tiny_squash: dict[str, Any]) -> Command:
    """The same in the folder of the recipe of `tiny_squash`, whose wheels pip knows."""
    made = command(folder, store, address, mode)
    return Command(tiny_squash["command"].folder, {**tiny_squash["command"].env, **made.env})


def convert(run: Command, out: str) -> tuple[str, str]:
    """An image file from a small docker archive; its digest, and what was said."""
    line = ("enroot", "--from", "docker-archive:small.tar", "--target", "cpu-x86_64", "--out", out, "--json")
    done = run(*line)
    assert done.returncode == 0, done.stderr
    return str(json.loads(done.stdout)["digest"]), done.stderr


@pytest.fixture
def small(tmp_path: Path) -> Path:
    chance = random.Random(5)
    write_archive(tmp_path / "small.tar", [layer(chance, "etc/one", "usr/two"), layer(chance, "srv/three")])
    return tmp_path


def keys(folder: Path, name: str) -> tuple[Path, Path]:
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", private], check=True)
    subprocess.run(["openssl", "pkey", "-in", private, "-pubout", "-out", public], check=True)
    return private, public


def opened(address: str) -> Registry:
    return open_registry(f"{address}/team/cache", Transport(insecure=frozenset({address})), {})


def test_one_store_makes_and_another_fetches_what_is_signed(small: Path, server: lab_registry.Lab) -> None:
    private, public = keys(small, "ci")
    other, _ = keys(small, "other")
    trust = f'[trust]\ncache_signers = ["{public}"]\n'
    made, said = convert(command(small, "one", server.address, trust=trust, key=str(private)), "one.sqsh")
    assert "2 uploaded" in said and "2 missing" in said
    fetched, said = convert(command(small, "two", server.address, "read", trust), "two.sqsh")
    assert fetched == made and "2 results fetched" in said and "layer:" not in said
    assert (small / "one.sqsh").read_bytes() == (small / "two.sqsh").read_bytes()
    shown = command(small, "two", server.address, "read", trust).json("cache", "status")
    assert shown["entries"] == {"segment": 2} and not shown["signs"]
    told = command(small, "two", server.address, "read", trust)("site", "check", "--json")
    assert "2 entries" in told.stdout and "[trust] cache_signers" in told.stdout, told.stdout
    # Somebody who may write to the registry, but has another key, replaces an entry by one that is right in itself.
    evil = small / "evil"
    evil.mkdir()
    chance = random.Random(6)
    write_archive(evil / "small.tar", [layer(chance, "etc/one", "usr/two"), layer(chance, "srv/three")])
    convert(command(evil, "store", server.address, key=str(other)), "evil.sqsh")
    registry = opened(server.address)
    tags = sorted(tag for tag in registry.tags() if tag.startswith("segment-"))
    assert len(tags) == 4
    honest = {tag: registry.manifest(tag)[0] for tag in tags}
    for one, another in itertools.permutations(tags, 2):
        registry.put_manifest(honest[another], OCI_MANIFEST, one)  # a moved tag
    again, said = convert(command(small, "three", server.address, "read", trust), "three.sqsh")
    assert again == made and said.count("is refused") == 2 and "2 refused" in said


def test_a_damaged_entry_is_refused_without_signers_too(small: Path, server: lab_registry.Lab) -> None:
    made, _ = convert(command(small, "one", server.address), "one.sqsh")
    registry = opened(server.address)
    (small / "blobs").mkdir()
    blobs = Blobs(small / "blobs")
    for number, tag in enumerate(registry.tags()):
        value: dict[str, Any] = json.loads(registry.manifest(tag)[0])
        row = value["layers"][number]  # the data of one, the note of the other
        row.pop("data", None)
        content = bytes(row["size"])
        row["digest"] = blobs.add(content)
        raw = json.dumps(value).encode()
        registry.push(blobs, [Descriptor("x", row["digest"], len(content))], raw, OCI_MANIFEST, tag)
    again, said = convert(command(small, "two", server.address), "two.sqsh")
    assert again == made and said.count("is refused") == 2 and "2 uploaded" in said
    fetched, said = convert(command(small, "three", server.address), "three.sqsh")
    assert fetched == made and "2 results fetched" in said  # it was replaced


def through(address: str, fault: Callable[[Call, int], bool]) -> Callable[[Call], None]:
    """A script that passes requests on to the registry at `address`, except those that `fault` answers."""
    numbers, lock = itertools.count(), threading.Lock()

    def script(call: Call) -> None:
        with lock:
            number = next(numbers)
        if fault(call, number):
            return
        line = http.client.HTTPConnection(address)
        line.request(call.command, call.path, call.content(), dict(call.headers.items()))
        answer = line.getresponse()
        body = answer.read()
        kept = ("Location", "Content-Type", "Docker-Content-Digest", "Range", "Docker-Upload-UUID", "Content-Range")
        headers = {name: value for name in kept if (value := answer.headers.get(name)) is not None}
        call.reply(answer.status, body, **headers)
        line.close()

    return script


def killed(call: Call) -> None:
    call.cut()


def full(call: Call) -> None:
    call.content()
    call.reply(507, b'{"errors": [{"code": "UNKNOWN", "message": "no space left on device"}]}')


def garbage(call: Call) -> None:
    call.content()
    call.reply(200, random.Random(1).randbytes(3000), Location="::", Content_Type="text/html")


def short(call: Call) -> None:
    call.content()
    call.reply(200, b"{}", promise=100_000)


FAULTS = (killed, full, garbage, short)


def test_a_fault_at_any_request_leaves_every_build_well(small: Path, server: lab_registry.Lab) -> None:
    wanted, _ = convert(Command(small, {"ENVBUILD_STORE": str(small / "none")}), "wanted.sqsh")
    runs = 0

    def build(fault: Callable[[Call, int], bool], name: str = "cache") -> int:
        nonlocal runs
        runs += 1
        with fake_registry(through(server.address, fault)) as proxy:
            made, _ = convert(command(small, f"store{runs}", proxy.address, name=name), f"{runs}.sqsh")
        assert made == wanted
        return len(proxy.seen)

    def at(number: int, wrong: Callable[[Call], None]) -> Callable[[Call, int], bool]:
        def fault(call: Call, seen: int) -> bool:
            if seen == number:
                wrong(call)
            return seen == number

        return fault

    def always(wrong: Callable[[Call], None]) -> Callable[[Call, int], bool]:
        def fault(call: Call, seen: int) -> bool:
            if seen >= 2:
                wrong(call)
            return seen >= 2

        return fault

    writes, reads = build(lambda _call, _number: False), build(lambda _call, _number: False)
    assert writes > 2 * reads >= 8
    for number in range(reads):
        for wrong in FAULTS if ALL else [FAULTS[number % len(FAULTS)]]:
            build(at(number, wrong))
    for number in range(writes) if ALL else range(1, writes, 4):  # a repository that is empty each time
        for wrong in FAULTS if ALL else [FAULTS[number // 4 % len(FAULTS)]]:
            build(at(number, wrong), f"{wrong.__name__}{number}")
    for wrong in FAULTS:
        build(always(wrong))


def test_a_cache_that_is_gone_or_silent_costs_little(small: Path) -> None:
    made, said = convert(command(small, "one", "127.0.0.1:9"), "one.sqsh")  # nobody listens there
    assert "is not used in this run" in said and said.count("is not used") == 1
    assert made == convert(Command(small, {"ENVBUILD_STORE": str(small / "two")}), "two.sqsh")[0]
    offline = command(small, "three", "127.0.0.1:9")
    done = offline("enroot", "pt_cpu", "--offline", "--locked", "--out", "x.sqsh")
    assert "cache" not in done.stderr


def test_an_empty_store_gets_all_of_a_recipe(
    tiny_squash: dict[str, Any], session_store: Path, tmp_path: Path, server: lab_registry.Lab
) -> None:
    """A recipe's .sqsh in an empty store: nothing is made, no wheel is fetched, and the bytes are the same."""
    line = ("enroot", "tiny_image", "--locked", "--no-verify", "--json", "--out")
    alone = {"PIP_FIND_LINKS": ""}
    link_store(session_store, tmp_path / "full")
    full = of_tiny_image(tmp_path, "full", server.address, "readwrite", tiny_squash)
    pushed = full.json("cache", "push", "tiny_image")["recipes"][0]
    assert pushed["entries"] > 3 and pushed["uploaded_bytes"] > 10_000_000
    assert full.json("cache", "push", "tiny_image")["recipes"][0]["uploaded_bytes"] == 0
    empty = of_tiny_image(tmp_path, "empty", server.address, "read", tiny_squash)
    done = empty(*line, tmp_path / "again.sqsh", **alone)
    assert done.returncode == 0, done.stderr
    assert "layer:" not in done.stderr and " fetched" in done.stderr, done.stderr
    assert json.loads(done.stdout)["digest"] == tiny_squash["enroot"]["digest"]
    assert not (tmp_path / "empty" / "wheels").exists()
    # One who only wants to have it all, for later.
    pulled = of_tiny_image(tmp_path, "pulled", server.address, "read", tiny_squash)
    assert pulled.json("cache", "pull", "tiny_image")["recipes"][0]["entries"] == pushed["entries"]
    offline = pulled(*line, tmp_path / "off.sqsh", "--offline", **alone)
    assert offline.returncode == 0, offline.stderr
    assert json.loads(offline.stdout)["digest"] == tiny_squash["enroot"]["digest"]


def test_warm_fills_a_cache_from_which_an_image_comes(
    session_store: Path, tiny_squash: dict[str, Any], tmp_path: Path, server: lab_registry.Lab
) -> None:
    """A recipe's layers as tars and as segments, uploaded; an image in an empty store is then fetched."""
    link_store(session_store, tmp_path / "full")
    full = of_tiny_image(tmp_path, "full", server.address, "readwrite", tiny_squash)
    warmed = full.json("cache", "warm", "tiny_image", "--locked")["recipes"][0]
    assert warmed["layers"] > 2
    empty = of_tiny_image(tmp_path, "empty", server.address, "read", tiny_squash)
    line = ("docker", "tiny_image", "--target", f"cpu-{ARCH}", "--locked", "--no-verify", "--json", "--out")
    made = empty(*line, f"oci:{tmp_path / 'image'}")
    assert made.returncode == 0, made.stderr
    assert "layer:" not in made.stderr, made.stderr
    again = full(*line, f"oci:{tmp_path / 'other'}")
    assert json.loads(again.stdout)["digest"] == json.loads(made.stdout)["digest"]


def test_an_image_file_is_pulled_to_the_same_bytes_by_its_segments(
    tiny_squash: dict[str, Any], tmp_path: Path, server: lab_registry.Lab
) -> None:
    builder = tiny_squash["command"]
    site = command(tmp_path, "node", server.address).env["ENVBUILD_SITE"]
    push = Command(builder.folder, {**builder.env, "ENVBUILD_SITE": site, "ENVBUILD_CACHE": ""})
    node = Command(tmp_path, {"ENVBUILD_STORE": str(tmp_path / "node"), "ENVBUILD_SITE": site, "ENVBUILD_CACHE": ""})
    tags = {kind: f"{server.address}/team/pt:{kind}" for kind in ("enroot", "apptainer")}
    sent = {kind: push.json("push", tiny_squash[kind]["path"], tag) for kind, tag in tags.items()}
    assert sent["apptainer"]["uploaded_bytes"] < 0.02 * Path(tiny_squash["apptainer"]["path"]).stat().st_size
    first = node.json("pull", tags["enroot"], "--out", "pt.sqsh")
    assert first["fetched_bytes"] > 0.9 * first["bytes"]
    assert (tmp_path / "pt.sqsh").read_bytes() == Path(tiny_squash["enroot"]["path"]).read_bytes()
    second = node.json("pull", sent["apptainer"]["path"], "--out", "pt.sif")  # by digest
    assert (tmp_path / "pt.sif").read_bytes() == Path(tiny_squash["apptainer"]["path"]).read_bytes()
    assert second["fetched_bytes"] < 0.02 * second["bytes"]
    # Jobs take it: its receipt came with it.
    (tmp_path / "receipt").mkdir()
    for name, kind in (("pt.sqsh", "enroot"), ("pt.sif", "apptainer")):
        shown = node.json("inspect", name)
        assert shown["digest"] == tiny_squash[kind]["digest"]
        receipt = json.loads((tmp_path / f"{name}.receipt.json").read_text())
        assert receipt["artifact"]["path"] == str(tmp_path / name) and receipt["passed"]
    done = node("pull", tags["enroot"], "--out", "pt.sif")
    assert done.returncode == 2 and "ends in '.sqsh'" in done.stderr
    done = node("pull", f"{server.address}/team/pt:none", "--out", "x.sqsh")
    assert done.returncode == 4 and not list(tmp_path.glob("x.sqsh*"))
    # A site that names signers takes it only when one of them has attested it.
    private, public = keys(tmp_path, "ci")
    with Path(site).open("a") as stream:
        stream.write(f'[trust]\nsigners = ["{public}"]\n')
    done = node("pull", tags["enroot"], "--out", "trusted.sqsh")
    assert done.returncode == 5 and "no attestation" in done.stderr and not list(tmp_path.glob("trusted.sqsh*"))
    assert push("attest", tiny_squash["enroot"]["path"], "--key", private).returncode == 0
    try:
        push.json("push", tiny_squash["enroot"]["path"], tags["enroot"])
        assert node.json("pull", tags["enroot"], "--out", "trusted.sqsh")["fetched_bytes"] == 0
        assert node("trust", "trusted.sqsh").returncode == 0
        assert node.json("trust", tags["enroot"], "--recipe", "tiny_image")["path"].startswith(
            f"{server.address}/team/pt@"
        )
        assert node("trust", tags["enroot"], "--recipe", "other").returncode == 5
    finally:
        Path(f"{tiny_squash['enroot']['path']}.sigstore.json").unlink()


def test_an_environment_is_built_from_what_was_pushed_without_any_index(
    tmp_path: Path, session_store: Path, server: lab_registry.Lab
) -> None:
    builder, tag = tiny_site(tmp_path, session_store), f"{server.address}/team/pt:venv"
    make_wheel(tmp_path / "wheels", "tiny", files={"tiny/noise": random.Random(7).randbytes(3_000_000)})
    make_recipe(tmp_path / "recipes", "tiny", ["tiny"], extra="[verify]\ntrainer = false\n")
    built = builder.json("venv", "tiny", "--out", "built")
    site = command(tmp_path, "node", server.address).env["ENVBUILD_SITE"]
    push = Command(builder.folder, {**builder.env, "ENVBUILD_SITE": site, "ENVBUILD_CACHE": ""})
    store = {"ENVBUILD_STORE": str(tmp_path / "node"), "PIP_FIND_LINKS": ""}
    node = Command(tmp_path, {**push.env, **store})
    sent = push.json("push", "built", tag)
    assert sent["digest"] == built["digest"] and sent["uploaded_bytes"] > 3_000_000
    assert push.json("push", "built", tag)["uploaded_bytes"] == 0
    made = node.json("pull", tag, "--out", "env")
    assert made["digest"] == built["digest"] and made["fetched_bytes"] == made["bytes"]
    receipt = json.loads(Path(made["receipt"]).read_text())
    assert receipt["passed"] and receipt["artifact"]["path"] == str(tmp_path / "env")
    again = node.json("pull", tag, "--out", "other", "--no-verify")
    assert again["fetched_bytes"] < 0.01 * again["bytes"] and again["receipt"] is None
    done = node("pull", tag, "--out", "x.sqsh")
    assert done.returncode == 2 and "is an environment" in done.stderr
    _, public = keys(tmp_path, "ci")
    with Path(site).open("a") as stream:
        stream.write(f'[trust]\nsigners = ["{public}"]\n')
    done = node("pull", tag, "--out", "trusted")
    assert done.returncode == 5 and "no attestation" in done.stderr and not list(tmp_path.glob("trusted*"))


def test_a_layout_is_pushed_as_the_image_that_it_is(
    layout: dict[str, Any], tmp_path: Path, server: lab_registry.Lab
) -> None:
    push = command(tmp_path, "store", server.address)
    done = push("push", f"oci:{layout['path']}", f"{server.address}/team/pt:image")
    assert done.returncode == 4 and "images for 2 platforms" in done.stderr, done.stderr
    image = tmp_path / "one"
    raw = json.loads((Path(layout["path"]) / "index.json").read_text())
    link_tree(layout["path"], image)
    index = json.loads((image / "blobs/sha256" / raw["manifests"][0]["digest"][7:]).read_text())
    (image / "index.json").unlink()
    (image / "index.json").write_text(json.dumps({**raw, "manifests": index["manifests"][:1]}))
    sent = push.json("push", f"oci:{image}", f"{server.address}/team/pt:image")
    assert sent["digest"] == index["manifests"][0]["digest"]
    line = ["skopeo", "inspect", "--raw", "--tls-verify=false", f"docker://{server.address}/team/pt:image"]
    seen = subprocess.run(line, capture_output=True, check=True).stdout
    assert digest_of(seen) == sent["digest"]


def test_a_changed_line_moves_one_small_segment(session_store: Path, tmp_path: Path, server: lab_registry.Lab) -> None:
    link_store(session_store, tmp_path / "builder")
    site = command(tmp_path, "builder", server.address).env["ENVBUILD_SITE"]
    build = tiny_site(tmp_path, tmp_path / "builder")
    build.env |= {"ENVBUILD_SITE": site, "ENVBUILD_CACHE": ""}
    node = Command(tmp_path, {"ENVBUILD_STORE": str(tmp_path / "node"), "ENVBUILD_SITE": site, "ENVBUILD_CACHE": ""})
    package = tmp_path / "mine"
    package.mkdir()
    make_wheel(tmp_path / "wheels", "tiny")
    extra = '[verify]\ntrainer = false\n[project]\npath = "../../mine"\n'
    use_base_of_pt_minimal(make_recipe(tmp_path / "recipes", "tiny", ["tiny"], extra=extra))
    moved = []
    for line in ("one", "two"):
        (package / "code.py").write_text(f"said = {line!r}\n")
        build.json("enroot", "tiny", "--out", f"{line}.sqsh")
        build.json("push", f"{line}.sqsh", f"{server.address}/team/mine:{line}")
        pulled = node.json("pull", f"{server.address}/team/mine:{line}", "--out", "mine.sqsh")
        assert (tmp_path / "mine.sqsh").read_bytes() == (tmp_path / f"{line}.sqsh").read_bytes()
        moved.append(pulled["fetched_bytes"] / pulled["bytes"])
    assert moved[0] > 0.9 and moved[1] < 0.03, moved
