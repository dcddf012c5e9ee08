"""The vault: each kind of input is read from it by its sha256, and whatever else it sends is refused."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
from lab.fake_registry import Call, Fake, fake_registry
from lab.host import Host
from lab.wheels import make_wheel

from envbuild.base.errors import BuildError, UsageError
from envbuild.cache.http import Transport
from envbuild.debian.base import fetch_debs
from envbuild.debian.lock import DebianLock, LockedDeb
from envbuild.image.layout import Blobs
from envbuild.image.limits import ImageLimits, Quota
from envbuild.image.registry import open_registry
from envbuild.lock.base import pull
from envbuild.run_environment import load_environment, with_tmpdir
from envbuild.site.pip_config import PipConfig
from envbuild.site.settings import Site
from envbuild.store.archives import WantedArchive, locate_archive
from envbuild.store.client import Client, SourceAnswer, from_vault
from envbuild.store.fetch import CondaArchive, WantedWheel, fetch_archives, locate_wheels
from envbuild.store.remote import open_vault
from envbuild.store.store import Store
from envbuild.store.vault import Vault, wheel_name

PIP = PipConfig(retries=0)


class World:
    """A store whose vault is a folder, or the fake registry that serves this folder's blobs."""

    def __init__(self, top: Path) -> None:
        self.top, self.blobs = top, Blobs(top / "vault/blobs")
        self.store = Store(top / "store", vault=Vault(f"oci:{top}/vault", self.blobs))

    def keep(self, data: bytes) -> str:
        return self.blobs.add(data).partition(":")[2]

    def spoil(self, sha256: str) -> None:
        path = self.blobs.path(f"sha256:{sha256}")
        path.unlink()
        path.write_bytes(b"poison")

    def at(self, fake: Fake) -> Store:
        transport = Transport(insecure=frozenset({fake.address}), retries=0)
        registry = open_registry(f"{fake.address}/team/vault", transport, {})
        return Store(self.top / "other", vault=Vault(f"oci://{fake.address}/team/vault", registry))

    def wheels(self, *wanted: WantedWheel, pip: PipConfig = PIP, store: Store | None = None) -> list[Path]:
        paths = locate_wheels(wanted, Host(store or self.store, pip), offline=True)
        return [paths[wheel] for wheel in wanted]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def serving(world: World) -> Callable[[Call], None]:
    def script(call: Call) -> None:
        path = world.blobs.path(call.path.rpartition("/")[2])
        call.reply(200, path.read_bytes()) if path.is_file() else call.reply(404)

    return script


def locked(data: bytes, name: str = "alpha", version: str = "1.0") -> WantedWheel:
    return WantedWheel(name, version, frozenset({hashlib.sha256(data).hexdigest()}))


def test_a_wheel_comes_by_its_hash_and_is_named_by_its_own_metadata(world: World, tmp_path: Path) -> None:
    tag = "cp311-cp311-manylinux_2_17_x86_64"
    wheel = make_wheel(tmp_path / "made", "al-pha", tag=tag)
    world.keep(wheel.read_bytes())
    wanted = WantedWheel("al-pha", "1.0", frozenset({"0" * 64, hashlib.sha256(wheel.read_bytes()).hexdigest()}))
    (path,) = world.wheels(wanted)
    assert path.name == wheel.name == f"al_pha-1.0-{tag}.whl" and path.read_bytes() == wheel.read_bytes()
    assert world.wheels(wanted) == [path]
    with fake_registry(serving(world)) as fake:
        (other,) = world.wheels(wanted, store=world.at(fake))
    assert other.name == path.name and other.read_bytes() == path.read_bytes()
    assert [where for _, where, _ in fake.seen] == [
        f"/v2/team/vault/blobs/sha256:{sha256}" for sha256 in sorted(wanted.hashes)
    ]


def test_a_poisoned_wheel_is_refused_and_comes_from_the_index(world: World, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "index/alpha", "alpha")
    data = wheel.read_bytes()
    page = f'<a href="{wheel.name}#sha256={hashlib.sha256(data).hexdigest()}">{wheel.name}</a>'
    (wheel.parent / "index.html").write_text(page)
    world.spoil(world.keep(data))
    index = PipConfig(index_url=f"file://{tmp_path}/index", retries=0)
    for store in (world.store, Store(tmp_path / "third", vault=world.store.vault)):
        assert world.wheels(locked(data), pip=index, store=store)[0].read_bytes() == data
    with pytest.raises(BuildError, match=r"vault oci:.*hash mismatch: sha256:.* has sha256:") as caught:
        world.wheels(locked(data), store=Store(tmp_path / "empty", vault=world.store.vault))
    assert hashlib.sha256(b"poison").hexdigest() in caught.value.message


@pytest.mark.parametrize("content", [b"", b"no zip", b"PK\x05\x06" + bytes(18)], ids=["empty", "text", "empty zip"])
def test_a_locked_file_that_is_no_wheel_is_refused(world: World, content: bytes) -> None:
    world.keep(content)
    with pytest.raises(BuildError, match="not a wheel"):
        world.wheels(locked(content))
    assert not list((world.store.root / "wheels").glob("*/*"))


def test_another_wheel_than_the_locked_one_is_refused(world: World, tmp_path: Path) -> None:
    data = make_wheel(tmp_path / "made", "beta").read_bytes()
    world.keep(data)
    with pytest.raises(BuildError, match=r"it has another wheel: 'beta-1.0-py3-none-any.whl'"):
        world.wheels(locked(data))


@pytest.mark.parametrize("limit", [{"entries": 3}, {"unpacked_bytes": 1_000_000}], ids=str)
def test_a_wheel_of_a_repository_that_has_its_lock_too_cannot_fill_the_disk(
    world: World, tmp_path: Path, limit: dict[str, int]
) -> None:
    data = make_wheel(tmp_path / "made", "alpha", files={"alpha/zeros": bytes(2_000_000)}).read_bytes()
    world.keep(data)
    store = Store(tmp_path / "bounded", vault=Vault("oci:x", world.blobs, Quota(ImageLimits(**limit))))
    with pytest.raises(BuildError, match=r"alpha-1\.0-py3-none-any\.whl: more than"):
        world.wheels(locked(data), store=store)
    assert not list((store.root / "wheels").glob("*/*"))
    (path,) = world.wheels(locked(data))
    assert path.stat().st_size == len(data) == world.store.vault.fetched_bytes  # type: ignore[union-attr]


def test_conda_packages_sources_and_debian_packages_come_by_their_hashes(world: World, tmp_path: Path) -> None:
    conda, source, deb = (world.keep(data) for data in (b"conda", b"source", b"deb"))
    archive = CondaArchive("https://nowhere.invalid/noarch/x-1-0.conda", conda)
    paths = fetch_archives([archive], Host(world.store, PIP), offline=True)
    assert paths[archive].name == "x-1-0.conda" and paths[archive].read_bytes() == b"conda"
    wanted = WantedArchive("x", "1", "https://nowhere.invalid/x.tar.gz", source)
    where = locate_archive(wanted, Host(world.store, PIP), offline=True)
    assert where.read_bytes() == b"source" and where.parent == world.store.root / "sources" / source
    lock = DebianLock("bookworm", "2026-07-11T10:16:37Z", (LockedDeb("x", "1", "amd64", "pool/x.deb", deb, 3),))
    assert fetch_debs(lock, world.store, [], Client(PIP, {}))[0].read_bytes() == b"deb"
    long = DebianLock("bookworm", lock.date, (LockedDeb("x", "1", "amd64", "pool/x.deb", conda, 4),))
    with fake_registry(serving(world)) as fake, pytest.raises(BuildError, match="5 bytes, not 4"):
        fetch_debs(long, world.at(fake), [], Client(PIP, {}))


def test_without_it_in_the_vault_the_other_sources_are_asked(world: World) -> None:
    archive = CondaArchive("https://nowhere.invalid/noarch/x-1-0.conda", "a" * 64)
    with pytest.raises(BuildError) as caught:
        fetch_archives([archive], Host(world.store, PIP), offline=True)
    assert f"vault oci:{world.top}/vault: not there" in caught.value.message
    assert "not asked, --offline" in caught.value.message


FAULTS: dict[str, Callable[[Call], object]] = {
    "an error": lambda call: call.reply(500, b"out of memory"),
    "the end of the connection": lambda call: call.cut(),
    "another file": lambda call: call.reply(200, b"poison"),
    "half of the file": lambda call: call.reply(200, b"da", promise=4),
    "nothing": lambda call: call.reply(200),
    "a login": lambda call: call.reply(401, WWW_Authenticate='Basic realm="x"'),
    "a redirect to itself": lambda call: call.reply(307, Location=call.path),
    "no content": lambda call: call.reply(204),
    "a page": lambda call: call.reply(200, b"<html>log in</html>", Content_Type="text/html"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_registry_is_an_answer_and_no_end(world: World, name: str) -> None:
    sha256 = hashlib.sha256(b"data").hexdigest()
    answers = list[SourceAnswer]()
    with fake_registry(lambda call: FAULTS[name](call)) as fake:  # type: ignore[arg-type,return-value]
        store = world.at(fake)
        for _ in range(5):
            assert from_vault([sha256], store, answers) is None
        asked = len(fake.seen)
    assert len(answers) == 5 and all(
        str(answer).startswith(f"vault oci://{fake.address}/team/vault: ") for answer in answers
    )
    assert not store.blobs.path(f"sha256:{sha256}").exists()
    # A vault that answers each request with an error is asked three times, not once for each file.
    assert name != "an error" or asked == 3


def test_a_base_image_comes_whole_or_not_at_all(world: World, tmp_path: Path) -> None:
    config, layer = world.keep(CONFIG), world.keep(b"layer")
    raw = MANIFEST.replace(b"CONFIG", config.encode()).replace(b"LAYER", layer.encode())
    digest = f"sha256:{world.keep(raw)}"
    variables = {"ENVBUILD_STORE": str(world.store.root), "ENVBUILD_VAULT": f"oci:{tmp_path}/vault"}
    with with_tmpdir(load_environment(variables)) as environment:
        pulled = pull("nowhere.invalid/x:1", digest, "x86_64", environment, tmp_path)
        assert pulled.manifest.digest == digest
        assert pulled.blobs.read(f"sha256:{layer}") == b"layer"
        world.spoil(layer)
        world.store.blobs.path(f"sha256:{layer}").unlink()
        with pytest.raises(BuildError, match=r"nowhere\.invalid"):
            pull("nowhere.invalid/x:1", digest, "x86_64", environment, tmp_path)


CONFIG = b'{"architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": ["sha256:%s"]}}' % (
    b"0" * 64
)
MANIFEST = (
    b'{"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json", "config": {"mediaType":'
    b' "application/vnd.oci.image.config.v1+json", "digest": "sha256:CONFIG", "size": %d}, "layers": [{"mediaType":'
    b' "application/vnd.oci.image.layer.v1.tar", "digest": "sha256:LAYER", "size": 5}]}' % len(CONFIG)
)


def test_offline_asks_a_folder_and_no_registry(tmp_path: Path) -> None:
    def vault(url: str, *, offline: bool = False) -> Vault | None:
        return open_vault(Site(), PIP, {"ENVBUILD_VAULT": url}, offline=offline)

    assert vault("") is None and vault("oci://registry.invalid/x", offline=True) is None
    assert isinstance(getattr(vault(f"oci:{tmp_path}", offline=True), "source", None), Blobs)
    assert not isinstance(getattr(vault("oci://registry.invalid/x"), "source", None), Blobs)
    for wrong in ("registry.invalid/x", "oci://user:geheim@registry.invalid/x", "oci://registry.invalid/x:1", "oci:"):
        with pytest.raises(UsageError) as caught:
            vault(wrong)
        assert "geheim" not in caught.value.message


def test_a_name_has_all_tags_of_the_wheel(tmp_path: Path) -> None:
    path = make_wheel(tmp_path, "alpha", tag="py2-none-any\nTag: py3-none-any")
    assert wheel_name(path) == "alpha-1.0-py2.py3-none-any.whl"
