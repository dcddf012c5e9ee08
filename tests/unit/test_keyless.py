"""Attestations without a key, by sigstore-python and a stand-in for Sigstore's services: what a site takes of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lab.sigstore_stand_in import StandIn, sigstore_stand_in, token

from envbuild.base.errors import HostError, UsageError, VerificationError

from .test_trust import Place

WORKFLOW = "https://github.com/team/images/.github/workflows/images.yml@refs/heads/main"
ISSUER = "https://token.actions.example.org"


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandIn]:
    with sigstore_stand_in(tmp_path_factory.mktemp("sigstore")) as running:
        yield running


@pytest.fixture
def place(tmp_path: Path, services: StandIn, monkeypatch: pytest.MonkeyPatch) -> Place:
    made = Place(tmp_path)
    monkeypatch.setenv("SIGSTORE_ID_TOKEN", token(WORKFLOW, ISSUER))
    site_of(made, services.config, f"{WORKFLOW} {ISSUER}")
    return made


def site_of(place: Place, config: Path, *identities: str) -> None:
    place.site.write_text(
        f'store = "store"\n[trust]\nidentities = {json.dumps(list(identities))}\nsigstore = "{config}"\n'
    )


def attested(place: Place) -> dict[str, Any]:
    place.run("attest", str(place.venv), "--key", "sigstore")
    found: dict[str, Any] = json.loads(place.bundle.read_text())
    return found


def test_what_an_identity_attests_is_trusted(place: Place, services: StandIn) -> None:
    made = json.loads(place.run("attest", str(place.venv), "--key", "sigstore", "--with", "sbom", "--json").stdout)
    assert made["key"] == WORKFLOW
    told = json.loads(place.run("trust", str(place.venv), "--json").stdout)
    assert told["signer"] == f"{WORKFLOW} {ISSUER}" and told["with"] == ["sbom"]
    # A site may take keys and identities.
    place.attest()
    with pytest.raises(VerificationError, match="no signer of the site"):
        place.run("trust", str(place.venv))
    place.site.write_text(place.site.read_text() + 'signers = ["ci.pub"]\n')
    assert place.run("trust", str(place.venv), "--json").exit_code == 0
    attested(place)
    assert place.run("trust", str(place.venv)).exit_code == 0


@pytest.mark.parametrize(
    "identity",
    [f"{WORKFLOW} https://accounts.example.org", f"{WORKFLOW}x {ISSUER}", f"{WORKFLOW[:-1]} {ISSUER}"],
    ids=["another issuer", "a longer identity", "a shorter identity"],
)
def test_another_identity_is_refused(place: Place, services: StandIn, identity: str) -> None:
    attested(place)
    site_of(place, services.config, identity)
    with pytest.raises(VerificationError, match="no signer of the site"):
        place.run("trust", str(place.venv))


def test_another_sigstore_is_refused(place: Place, tmp_path: Path) -> None:
    attested(place)
    (tmp_path / "other").mkdir()
    with sigstore_stand_in(tmp_path / "other") as other:
        site_of(place, other.config, f"{WORKFLOW} {ISSUER}")
        with pytest.raises(VerificationError, match="no signer of the site"):
            place.run("trust", str(place.venv))
    place.site.write_text(f'store = "store"\n[trust]\nidentities = ["{WORKFLOW} {ISSUER}"]\n')  # the public one
    with pytest.raises(VerificationError, match="no signer of the site"):
        place.run("trust", str(place.venv))


def change(bundle: dict[str, Any], *path: str | int, value: Any = None) -> dict[str, Any]:
    part: Any = bundle
    for name in path[:-1]:
        part = part[name]
    part[path[-1]] = value
    return bundle


@pytest.mark.parametrize(
    ("path", "other"),
    [
        (("verificationMaterial", "certificate"), True),
        (("verificationMaterial", "tlogEntries"), True),
        (("verificationMaterial", "tlogEntries"), False),
        (("verificationMaterial", "tlogEntries", 0, "inclusionPromise"), True),
        (("verificationMaterial", "tlogEntries", 0, "inclusionPromise"), False),
        (("verificationMaterial", "tlogEntries", 0, "inclusionProof"), True),
        (("verificationMaterial", "tlogEntries", 0, "integratedTime"), False),
        (("dsseEnvelope", "signatures"), True),
        (("dsseEnvelope", "payload"), True),
    ],
)
def test_parts_of_another_bundle_are_refused(place: Place, path: tuple[Any, ...], other: bool) -> None:
    """Each part is taken out, or replaced by that of another honest bundle of the same identity."""
    place.receipt["seconds"] = 2.5
    place.attest()
    second = attested(place)
    (place.folder / "venv.receipt.json").write_text(json.dumps({**place.receipt, "seconds": 1.0}))
    first = attested(place)
    part: Any = second
    for name in path:
        part = part[name]
    value = part if other else "1" if path[-1] == "integratedTime" else [] if path[-1] == "tlogEntries" else None
    place.bundle.write_text(json.dumps(change(first, *path, value=value)))
    with pytest.raises(VerificationError, match="is not trusted"):
        place.run("trust", str(place.venv))


def test_without_a_token_the_library_or_a_readable_configuration(
    place: Place, services: StandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    attested(place)
    monkeypatch.setenv("SIGSTORE_ID_TOKEN", "no token")
    with pytest.raises(UsageError, match="Sigstore refused to sign: Identity token is malformed"):
        attested(place)
    monkeypatch.delenv("SIGSTORE_ID_TOKEN")
    monkeypatch.setattr("sigstore.oidc.detect_credential", lambda: None)
    with pytest.raises(UsageError, match="the identity of this process is unknown") as caught:
        attested(place)
    assert "id-token: write" in (caught.value.hint or "")
    site_of(place, tmp_path / "none.json", f"{WORKFLOW} {ISSUER}")
    with pytest.raises(UsageError, match=r"none\.json: No such file"):
        place.run("trust", str(place.venv))
    site_of(place, services.config, f"{WORKFLOW} {ISSUER}")
    monkeypatch.setitem(sys.modules, "sigstore", None)
    with pytest.raises(HostError, match="need sigstore-python") as missing:
        place.run("trust", str(place.venv))
    assert "pip install" in (missing.value.hint or "")
