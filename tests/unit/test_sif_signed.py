"""Attestations inside of a SIF: they are read again, and neither they nor signatures make other content of it."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from envbuild.base.errors import BuildError
from envbuild.image.sif import JSON, METADATA, content_digest, embed, embedded, read_object, read_sif

from .test_sif import IMAGE, made

NAMED = {"envbuild.sigstore.json": b'{"a": 1}', "envbuild.sbom.sigstore.json": b"{}"}
PLAIN = made()
DIGEST = f"sha256:{hashlib.sha256(PLAIN).hexdigest()}"


def sign(payload: bytes) -> bytes:
    return json.dumps({"payloadType": METADATA, "payload": payload.decode()}).encode()


def signed(place: Path, data: bytes = PLAIN, named: dict[str, bytes] = NAMED) -> Path:
    source, out = place.with_name("source.sif"), place
    source.write_bytes(data)
    out.write_bytes(b"")
    with out.open("r+b") as stream:
        assert embed(source, stream, named, sign)
    return out


def test_the_digest_is_of_the_content_and_the_attestations_are_read_again(tmp_path: Path) -> None:
    place = signed(tmp_path / "a.sif")
    assert content_digest(place) == content_digest(tmp_path / "source.sif") == DIGEST
    assert place.read_bytes() != PLAIN and embedded(place) == NAMED and embedded(tmp_path / "source.sif") == {}
    with place.open("rb") as stream:
        sif = read_sif(stream, "a.sif")
        kinds = [item.kind for item in sif.objects]
        assert kinds[4:] == [JSON, JSON, "signature", "signature"]
        contents = [read_object(stream, item, "a.sif") for item in sif.objects if item.kind == "signature"]
    told = [json.loads(json.loads(one)["payload"]) for one in contents]
    assert [len(one["objects"]) for one in told] == [4, 2]
    assert told[0]["objects"][3]["objectDigest"] == f"sha256:{hashlib.sha256(IMAGE).hexdigest()}"
    plain = tmp_path / "plain"
    plain.write_bytes(IMAGE)
    assert content_digest(plain) == f"sha256:{hashlib.sha256(IMAGE).hexdigest()}" and embedded(plain) == {}


def test_new_attestations_replace_the_old_ones(tmp_path: Path) -> None:
    first = signed(tmp_path / "a.sif").read_bytes()
    again = signed(tmp_path / "b.sif", first, {"envbuild.sigstore.json": b"new"})
    assert embedded(again) == {"envbuild.sigstore.json": b"new"} and content_digest(again) == DIGEST
    assert signed(tmp_path / "c.sif", again.read_bytes()).read_bytes() == first


def test_a_pgp_signature_is_kept(tmp_path: Path) -> None:
    data = bytearray(signed(tmp_path / "a.sif").read_bytes())
    at = struct.unpack_from("<q", data, 4096 + 6 * 585 + 17)[0]
    data[at : at + 34] = b"-----BEGIN PGP SIGNED MESSAGE-----"
    (tmp_path / "pgp.sif").write_bytes(data)
    assert content_digest(tmp_path / "pgp.sif") == DIGEST
    with (tmp_path / "new.sif").open("w+b") as out:
        assert not embed(tmp_path / "pgp.sif", out, NAMED, sign)
        assert out.seek(0, 2) == 0


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, len(PLAIN) - 1), bit=st.integers(0, 7))
def test_any_change_of_the_content_is_another_digest(tmp_path: Path, at: int, bit: int) -> None:
    data = bytearray(signed(tmp_path / "a.sif").read_bytes())
    data[at] ^= 1 << bit
    place = tmp_path / "changed.sif"
    place.write_bytes(data)
    # Fields that signing changes are known from the rest: these bytes change nothing that is read.
    slots = range(4096 + 4 * 585, 4096 + 8 * 585)
    header = [*range(72, 88), *range(120, 128)]  # mtime, number of free descriptors, size of all objects
    try:
        changed = content_digest(place)
    except BuildError:
        return
    assert changed != DIGEST or at in slots or at in header


@pytest.mark.parametrize("name", [b"oci-config.json", b"envbuild.sigstore.jsonx"])
def test_what_is_no_attestation_is_content(tmp_path: Path, name: bytes) -> None:
    data = bytearray(signed(tmp_path / "a.sif").read_bytes())
    struct.pack_into("128s", data, 4096 + 4 * 585 + 73, name)
    (tmp_path / "b.sif").write_bytes(data)
    assert content_digest(tmp_path / "b.sif") != DIGEST


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    data = bytearray(PLAIN)
    struct.pack_into("<q", data, 88 + 8, 1 << 22)
    (tmp_path / "b.sif").write_bytes(data + bytes(1 << 23))
    with pytest.raises(BuildError, match="damaged"):
        content_digest(tmp_path / "b.sif")
