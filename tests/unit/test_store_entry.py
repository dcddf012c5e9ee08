"""Entries of a remote cache: what was written is read, and every tampering is refused."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from securesystemslib.signer import CryptoSigner

from envbuild.base.errors import UsageError
from envbuild.base.packages import digest_of
from envbuild.cache.hashed import write_note
from envbuild.image.limits import ImageLimits
from envbuild.layers.source_build import _fetched, pack_built
from envbuild.layers.source_files import SourceManifest, list_files, write_manifest
from envbuild.site.pip_config import PipConfig
from envbuild.site.settings import Site, load_site
from envbuild.store.entry import KINDS, CacheEntry, EntryFile, ResultCache, read_entry, render_entry
from envbuild.store.remote import _listed, cache_of, counted, entries_of, open_remote
from envbuild.store.store import Store
from envbuild.store.usage import remember
from envbuild.trust.bundle import sign, statement
from envbuild.trust.policy import RECEIPT

SIGNER, OTHER = CryptoSigner.generate_ed25519(), CryptoSigner.generate_ed25519()
KEYS = [SIGNER.public_key]
ENTRY = CacheEntry("segment", "a" * 64 + "-0123456789ab")
DATA, INDEX, NOTE = b"d" * 5000, b"i" * 9000, b'{"seal": ""}'
# As the store has them: the last one marks a complete result.
FILES = [
    EntryFile(ENTRY.files[0], digest_of(DATA), len(DATA)),
    EntryFile(ENTRY.files[1], digest_of(NOTE), len(NOTE), NOTE),
    EntryFile(ENTRY.files[2], digest_of(INDEX), len(INDEX)),
]
SIGNATURE = "org.envbuild.signature"


def manifest(signer: CryptoSigner | None = SIGNER, entry: CacheEntry = ENTRY) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(render_entry(entry, FILES, 1.5, signer))
    return value


def signed_as(kind: str, subjects: dict[str, str], predicate: dict[str, Any]) -> str:
    return sign(statement(subjects, kind, predicate), SIGNER).decode()


SUBJECTS = {file.name: file.digest for file in FILES}
SAID = {"kind": "segment", "key": ENTRY.key}
CACHE = "urn:envbuild:cache-entry:1"
OTHER_DATA = digest_of(b"poison")


def with_payload(found: dict[str, Any], change: Callable[[dict[str, Any]], object]) -> None:
    """Change the signed statement, and leave its signature."""
    bundle = json.loads(found["annotations"][SIGNATURE])
    payload = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
    change(payload)
    bundle["dsseEnvelope"]["payload"] = base64.b64encode(json.dumps(payload).encode()).decode()
    found["annotations"][SIGNATURE] = json.dumps(bundle)


def poison(found: dict[str, Any]) -> None:
    """Another segment under this tag, with a statement that was edited for it."""
    found["layers"][0]["digest"] = OTHER_DATA
    with_payload(found, lambda told: told["subject"][0]["digest"].update(sha256=OTHER_DATA.partition(":")[2]))


TAMPERINGS: dict[str, Callable[[dict[str, Any]], object]] = {
    "another digest": lambda m: m["layers"][0].update(digest=OTHER_DATA),
    "a poisoned segment with an edited statement": poison,
    "another size and content": lambda m: m["layers"][1].update(size=1, data="eA==", digest=digest_of(b"x")),
    "content that has another digest": lambda m: m["layers"][1].update(data=base64.b64encode(b"x" * 12).decode()),
    "content that is no base64": lambda m: m["layers"][1].update(data="%%%"),
    "another name": lambda m: m["layers"][0]["annotations"].update({"org.opencontainers.image.title": "wheels/x"}),
    "a name that leads outside": lambda m: m["layers"][0]["annotations"].update(
        {"org.opencontainers.image.title": "../../etc/passwd"}
    ),
    "an absolute name": lambda m: m["layers"][0]["annotations"].update(
        {"org.opencontainers.image.title": "/etc/passwd"}
    ),
    "one file more": lambda m: m["layers"].append(
        {**m["layers"][0], "annotations": {"org.opencontainers.image.title": "x"}}
    ),
    "a blob where none belongs": lambda m: m["layers"].append(
        {
            "mediaType": "x",
            "digest": OTHER_DATA,
            "size": 6,
            "annotations": {"org.opencontainers.image.title": f"blobs/sha256/{OTHER_DATA[7:]}"},
        }
    ),
    "a file twice": lambda m: m["layers"].append(m["layers"][0]),
    "a file less": lambda m: m["layers"].pop(),
    "no files": lambda m: m.update(layers=[]),
    "another kind": lambda m: m.update(artifactType="application/vnd.envbuild.layer.v1"),
    "another version": lambda m: m.update(artifactType="application/vnd.envbuild.segment.v2"),
    "an image": lambda m: m.pop("artifactType"),
    "no signature": lambda m: m["annotations"].pop(SIGNATURE),
    "a signature that is no text": lambda m: m["annotations"].update({SIGNATURE: {}}),
    "a signature that is no bundle": lambda m: m["annotations"].update({SIGNATURE: "{}"}),
    "another signer": lambda m: m["annotations"].update({SIGNATURE: manifest(OTHER)["annotations"][SIGNATURE]}),
    "a statement on another key": lambda m: m["annotations"].update(
        {SIGNATURE: signed_as(CACHE, SUBJECTS, {**SAID, "key": "b" * 64})}
    ),
    "a statement on another kind": lambda m: m["annotations"].update(
        {SIGNATURE: signed_as(CACHE, SUBJECTS, {**SAID, "kind": "layer"})}
    ),
    "a statement with more subjects": lambda m: m["annotations"].update(
        {SIGNATURE: signed_as(CACHE, {**SUBJECTS, "x": OTHER_DATA}, SAID)}
    ),
    "a statement with fewer subjects": lambda m: m["annotations"].update(
        {SIGNATURE: signed_as(CACHE, dict(list(SUBJECTS.items())[:2]), SAID)}
    ),
    "a signed receipt in its place": lambda m: m["annotations"].update({SIGNATURE: signed_as(RECEIPT, SUBJECTS, SAID)}),
    "an edited statement": lambda m: with_payload(m, lambda told: told["predicate"].update(key="b" * 64)),
    "a negative size": lambda m: m["layers"][0].update(size=-1),
    "a size that is no number": lambda m: m["layers"][0].update(size="5000"),
    "a digest of another kind": lambda m: m["layers"][0].update(digest="sha512:" + "0" * 128),
    "no annotations": lambda m: m.pop("annotations"),
}


LOCK = CacheEntry("lock", "c" * 64)
LOCKED = [
    EntryFile(f"wheels/{digest_of(DATA)[7:]}/x-1-py3-none-any.whl", digest_of(DATA), len(DATA)),
    EntryFile(f"recipes/{'e' * 64}/recipe.toml", digest_of(NOTE), len(NOTE), NOTE),
]


def locked(signer: CryptoSigner | None = SIGNER, entry: CacheEntry = LOCK) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(render_entry(entry, LOCKED, 0.0, signer))
    return value


def titled(name: str, row: int = 0) -> Callable[[dict[str, Any]], object]:
    """Another name of a file; whoever signs may do so, too, so that the name alone is refused."""

    def change(found: dict[str, Any]) -> None:
        found["layers"][row]["annotations"]["org.opencontainers.image.title"] = name
        subjects = {file["annotations"]["org.opencontainers.image.title"]: file["digest"] for file in found["layers"]}
        said = {"kind": "lock", "key": LOCK.key}
        found["annotations"][SIGNATURE] = sign(statement(subjects, CACHE, said), SIGNER).decode()

    return change


HEX = digest_of(DATA)[7:]
LOCK_TAMPERINGS: dict[str, Callable[[dict[str, Any]], object]] = {
    "another digest": lambda m: m["layers"][0].update(digest=OTHER_DATA),
    "another digest and name": lambda m: (
        titled(f"wheels/{OTHER_DATA[7:]}/x-1-py3-none-any.whl")(m),
        m["layers"][0].update(digest=OTHER_DATA),
    ),
    "the digest of another wheel in its name": titled(f"wheels/{'f' * 64}/x-1-py3-none-any.whl"),
    "a name that leads outside": titled("../../etc/passwd"),
    "an absolute name": titled("/etc/passwd"),
    "a name that leads out of the recipe": titled(f"recipes/{'e' * 64}/../../x", 1),
    "a recipe without a key": titled("recipes/recipe.toml", 1),
    "a recipe with a key of another form": titled(f"recipes/{'E' * 64}/recipe.toml", 1),
    "a recipe that is a folder": titled(f"recipes/{'e' * 64}/", 1),
    "a wheel in a folder": titled(f"wheels/{HEX}/a/b.whl"),
    "a wheel without a name": titled(f"wheels/{HEX}/"),
    "a folder of results": titled(f"layers/{HEX}.json"),
    "a folder of programs": titled(f"interpreters/{HEX}/bin"),
    "a blob of another digest": titled(f"blobs/sha256/{'f' * 64}"),
    "another content of the recipe": lambda m: m["layers"][1].update(data=base64.b64encode(b"x" * len(NOTE)).decode()),
    "a file twice": lambda m: m["layers"].append(m["layers"][0]),
    "a file less": lambda m: m["layers"].pop(),
    "no files": lambda m: m.update(layers=[]),
    "a file more": lambda m: m["layers"].append(
        {**m["layers"][0], "annotations": {"org.opencontainers.image.title": f"blobs/sha256/{HEX}"}}
    ),
    "another kind": lambda m: m.update(artifactType="application/vnd.envbuild.recipe.v1"),
    "no signature": lambda m: m["annotations"].pop(SIGNATURE),
    "another signer": lambda m: m["annotations"].update({SIGNATURE: locked(OTHER)["annotations"][SIGNATURE]}),
    "the statement of another lock": lambda m: m["annotations"].update(
        {SIGNATURE: locked(entry=CacheEntry("lock", "d" * 64))["annotations"][SIGNATURE]}
    ),
    "the statement of a segment": lambda m: m["annotations"].update({SIGNATURE: manifest()["annotations"][SIGNATURE]}),
}


@pytest.mark.parametrize("name", LOCK_TAMPERINGS)
def test_a_tampered_entry_of_a_lock_is_refused(name: str) -> None:
    found = locked()
    assert [file.name for file in read_entry(json.dumps(found).encode(), LOCK, KEYS)[0]] == [one.name for one in LOCKED]
    LOCK_TAMPERINGS[name](found)
    with pytest.raises(ValueError, match=r"."):
        read_entry(json.dumps(found).encode(), LOCK, KEYS)


@pytest.mark.parametrize("name", TAMPERINGS)
def test_every_tampering_is_refused(name: str) -> None:
    found = manifest()
    TAMPERINGS[name](found)
    with pytest.raises(ValueError):
        read_entry(json.dumps(found).encode(), ENTRY, KEYS)


def test_the_tag_of_another_entry_is_refused() -> None:
    other = CacheEntry("segment", "b" * 64 + "-0123456789ab")
    for signers in (KEYS, []):  # its files are those of another key
        with pytest.raises(ValueError, match="other files"):
            read_entry(json.dumps(manifest()).encode(), other, signers)


def test_what_was_written_is_read() -> None:
    raw = json.dumps(manifest()).encode()
    assert read_entry(raw, ENTRY, [OTHER.public_key, *KEYS]) == (FILES, 1.5)
    assert read_entry(json.dumps(manifest(None)).encode(), ENTRY) == (FILES, 1.5)
    assert manifest()["config"]["mediaType"] == "application/vnd.oci.empty.v1+json"


def test_the_blob_of_a_layer_comes_before_what_marks_it_complete() -> None:
    entry = CacheEntry("layer", "c" * 64)
    blob = EntryFile(f"blobs/sha256/{digest_of(DATA)[7:]}", digest_of(DATA), len(DATA))
    files = [EntryFile(name, digest_of(NOTE), len(NOTE), NOTE) for name in entry.files]
    read, _ = read_entry(render_entry(entry, [*files, blob], 0.0, SIGNER), entry, KEYS)
    assert read == [blob, *files]
    wrong = EntryFile(f"blobs/sha256/{'0' * 64}", digest_of(DATA), len(DATA))
    with pytest.raises(ValueError, match="other files"):
        read_entry(render_entry(entry, [*files, wrong], 0.0, SIGNER), entry, KEYS)


@given(
    st.binary(max_size=200)
    | st.recursive(
        st.none() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["artifactType", "layers", "annotations", "digest", "size", "data"]), inner, max_size=4
            )
        ),
    ).map(lambda value: json.dumps(value).encode())
)
def test_any_answer_of_a_registry_is_read_or_refused(raw: bytes) -> None:
    with pytest.raises(ValueError):
        read_entry(raw, ENTRY, KEYS)


def test_every_kind_has_a_tag_that_registries_accept() -> None:
    for kind in KINDS:
        tag = CacheEntry(kind, "a" * 64 + "-0123456789ab").tag
        assert len(tag) <= 128 and tag.replace("-", "").isalnum()


def site(folder: Path, text: str) -> Site:
    (folder / "site.toml").write_text(text)
    return load_site({"ENVBUILD_SITE": str(folder / "site.toml"), "HOME": str(folder)})


def test_the_environment_goes_over_the_site(tmp_path: Path) -> None:
    known = site(tmp_path, 'cache = "oci://registry.example.org/team/cache"\ncache_mode = "write"\n')
    assert cache_of(known, {}) == ("oci://registry.example.org/team/cache", "write")
    env = {"ENVBUILD_CACHE": "oci://other.example.org/cache", "ENVBUILD_CACHE_MODE": "read"}
    assert cache_of(known, env) == ("oci://other.example.org/cache", "read")
    assert cache_of(known, {"ENVBUILD_CACHE": ""})[0] == ""


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"ENVBUILD_CACHE": "registry.example.org/cache"}, "ENVBUILD_CACHE: not a repository"),
        ({"ENVBUILD_CACHE": "oci://user:secret@registry.example.org/cache"}, "not a repository"),
        ({"ENVBUILD_CACHE": "oci://registry.example.org"}, "not a repository"),
        ({"ENVBUILD_CACHE": "oci://registry.example.org/cache:1"}, "not a repository"),
        ({"ENVBUILD_CACHE": "oci://r.example.org/c", "ENVBUILD_CACHE_MODE": "both"}, "read, write, readwrite"),
        (
            {"ENVBUILD_CACHE": "oci://r.example.org/c", "ENVBUILD_CACHE_KEY": "/gone", "ENVBUILD_CACHE_MODE": "write"},
            "ENVBUILD_CACHE_KEY /gone",
        ),
    ],
)
def test_a_faulty_setting_says_what_is_expected(tmp_path: Path, env: dict[str, str], says: str) -> None:
    with pytest.raises(UsageError, match=says) as failed:
        open_remote(Site(), PipConfig(), env, Store(tmp_path))
    assert "secret" not in str(failed.value)


def test_a_cache_that_needs_signatures_is_not_written_without_a_key(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

    private = Ed25519PrivateKey.generate()
    public = private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "ci.pub").write_bytes(public)
    (tmp_path / "ci.pem").write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    known = site(tmp_path, 'cache = "oci://r.example.org/c"\n[trust]\ncache_signers = ["ci.pub"]\n')
    reads = open_remote(known, PipConfig(), {}, Store(tmp_path))
    assert reads is not None and reads.reads and not reads.writes and len(reads.signers) == 1
    with pytest.raises(UsageError, match="ENVBUILD_CACHE_KEY is not set"):
        open_remote(known, PipConfig(), {"ENVBUILD_CACHE_MODE": "readwrite"}, Store(tmp_path))
    env = {"ENVBUILD_CACHE_MODE": "readwrite", "ENVBUILD_CACHE_KEY": str(tmp_path / "ci.pem")}
    both = open_remote(known, PipConfig(), env, Store(tmp_path))
    assert both is not None and both.writes and both.signer is not None
    assert open_remote(Site(), PipConfig(), {}, Store(tmp_path)) is None


def test_what_a_recipe_used_are_the_entries_that_are_pushed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    names = (
        "layers/k.members",
        "segments/k-c.data",
        "builders/b.sqsh",
        "built/d/tree/x",
        "facts/f.json",
        "wheels/w/x.whl",
    )
    for name in names:
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_bytes(b"x")
        store.seen.add(str(path.resolve()))
    remember(store, "mine")
    found = {(one.kind, one.key) for one in entries_of(store, "mine")}
    assert found == {("layer", "k"), ("segment", "k-c"), ("builder", "b"), ("built", "d"), ("wheel", "f")}
    assert entries_of(store, "other") == []
    assert dict(counted(["segment-a", "layer-b", "segment-c", "latest"])) == {"layer": 1, "segment": 2}


def test_a_list_names_files_of_the_store_alone(tmp_path: Path) -> None:
    named = CacheEntry("recipe", "mine")
    keys = ["good", "..", "a/b", "a\0b", "\ud800", "x" * 300, 7]
    (tmp_path / "partial").mkdir()
    write_note(tmp_path / named.files[0], {"entries": [["layer", key] for key in keys] + [["other", "good"]]})
    assert [one.key for one in _listed(Store(tmp_path), named)] == ["good"]


@pytest.mark.parametrize("limits", [ImageLimits(unpacked_bytes=999), ImageLimits(entries=2), ImageLimits()])
def test_a_built_layer_of_the_cache_is_unpacked_within_the_limits(tmp_path: Path, limits: ImageLimits) -> None:
    """A small file in a registry can become one that fills the disk."""
    refused: list[CacheEntry] = []
    remote = cast(ResultCache, SimpleNamespace(bring=lambda _: True, refuse=refused.append))
    store = Store(tmp_path / "store", remote=remote)
    made = tmp_path / "made"
    (made / "tree").mkdir(parents=True)
    (made / "tree/zeros").write_bytes(bytes(1000))
    write_manifest(made, SourceManifest("lab", "1.0", list_files(made / "tree")))
    (store.folder("built") / "key").symlink_to(made)
    pack_built(store, store.root / "built/key")
    (store.root / "built/key").unlink()
    assert _fetched(store, store.root / "built/key/tree", limits) == (limits == ImageLimits()) == (not refused)
