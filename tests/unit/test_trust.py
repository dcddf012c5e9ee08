"""Attestations of receipts, and what of them a site trusts: every tampering is refused, no honest one is."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from click.testing import CliRunner, Result
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from google.protobuf import json_format
from hypothesis import given
from hypothesis import strategies as st
from in_toto_attestation.v1 import statement_pb2
from in_toto_attestation.v1.statement import Statement
from lab import artifacts
from sigstore_models.bundle.v1 import Bundle

from envbuild.base.errors import EnvbuildError, UsageError, VerificationError
from envbuild.build.bundle import FORMAT
from envbuild.cli.commands import cli
from envbuild.contract.manifest import write_manifest
from envbuild.contract.receipt import read_receipt, receipt_path, write_receipt
from envbuild.contract.state import State
from envbuild.doctor.sites import check_site
from envbuild.job_inputs import check_trust, open_artifact
from envbuild.site.settings import load_site
from envbuild.site.tables import TrustTable
from envbuild.trust.bundle import PREDICATES, bundle_path, opened, sign, statement
from envbuild.trust.keys import AgentSigner, load_public, load_signer
from envbuild.trust.policy import RECEIPT, attested, judge

NOW = datetime.now(UTC)
KEYS: dict[str, Callable[[], Any]] = {
    "ed25519": ed25519.Ed25519PrivateKey.generate,
    "p256": lambda: ec.generate_private_key(ec.SECP256R1()),
    "p384": lambda: ec.generate_private_key(ec.SECP384R1()),
}


def make_key(folder: Path, name: str, kind: str = "ed25519", passphrase: str = "") -> Path:
    """A private key in NAME.pem, and its public key in NAME.pub."""
    private = KEYS[kind]()
    hidden = BestAvailableEncryption(passphrase.encode()) if passphrase else NoEncryption()
    path = folder / f"{name}.pem"
    path.write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, hidden))
    public = private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    path.with_suffix(".pub").write_bytes(public)
    return path


def no_passphrase() -> str:
    raise AssertionError("nobody is asked")


class Place:
    """A venv with its manifest and a passing receipt, the keys of a signer and of a stranger, and a site."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.venv = folder, folder / "venv"
        state = State("venv", "lab", "sha256:r", "sha256:l", "sha256:p", "cpu-x86_64", "3.11", "3.11.7", "python3", ())
        artifacts.make_venv(self.venv, {**artifacts.frame(), "envbuild.json": state.render(), "lib/x.py": "x = 1\n"})
        manifest, _ = write_manifest(self.venv, 1)
        checks = [{"name": name, "status": "pass"} for name in ("launch", "allreduce")]
        checks.append({"name": "restart", "status": "not tried"})
        self.receipt = {
            "format": 1,
            "passed": True,
            "verified_at": NOW.isoformat(timespec="seconds"),
            "target": "cpu-x86_64",
            "artifact": {"kind": "venv", "path": str(self.venv), "digest": state.digest, "manifest": manifest.digest},
            "recipe": {"name": "lab", "digest": "sha256:r"},
            "lock": {"digest": "sha256:l"},
            "plan": {"digest": "sha256:p"},
            "checks": checks,
            "versions": {"envbuild": "1"},
            "seconds": 1.25,
        }
        write_receipt(self.receipt, self.venv)
        self.key, self.stranger = make_key(folder, "ci"), make_key(folder, "stranger", "p256")
        self.site = folder / "site.toml"
        self.site.write_text('store = "store"\n[trust]\nsigners = ["ci.pub"]\n')

    @property
    def trust(self) -> TrustTable:
        return TrustTable(signers=(str(self.key.with_suffix(".pub")),))

    @property
    def bundle(self) -> Path:
        return bundle_path(self.venv)

    def attest(self, payload: bytes | None = None, key: Path | None = None) -> None:
        told = attested(self.receipt) if payload is None else payload
        self.bundle.write_bytes(sign(told, load_signer(str(key or self.key), None, no_passphrase)))

    def judged(self, now: datetime = NOW, **more: Any) -> str:
        receipt = read_receipt(receipt_path(self.venv))
        return judge(self.venv, receipt, replace(self.trust, **more), now).verified_at

    def run(self, *words: str) -> Result:
        env = {"ENVBUILD_SITE": str(self.site)}
        return CliRunner().invoke(cli, words, env=env, catch_exceptions=False, standalone_mode=False)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize("passphrase", ["", "secret words"])
def test_what_a_signer_attests_is_trusted(
    place: Place, kind: str, passphrase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = make_key(place.folder, "ci", kind, passphrase)
    monkeypatch.setenv("ENVBUILD_KEY_PASSPHRASE", passphrase)
    done = place.run("attest", str(place.venv), "--key", str(key), "--json")
    assert json.loads(done.stdout)["path"] == str(place.bundle)
    told = json.loads(place.run("trust", str(place.venv), "--exact", "--json").stdout)
    assert told["signer"] == str(place.folder / "ci.pub") and told["digest"] == place.receipt["artifact"]["digest"]
    assert "trusted: attested by" in place.run("trust", str(place.venv)).stdout
    assert "secret" not in place.bundle.read_text()
    bundle = json.loads(place.bundle.read_text())
    assert bundle["mediaType"] == "application/vnd.dev.sigstore.bundle.v0.3+json"
    found = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
    digests = [f"sha256:{row['digest']['sha256']}" for row in found["subject"]]
    assert digests == [place.receipt["artifact"]["digest"], place.receipt["artifact"]["manifest"]]
    assert found["predicate"] == read_receipt(receipt_path(place.venv))


def test_a_file_of_a_signer_says_nothing_that_would_not_count(tmp_path: Path, openssh: None) -> None:
    """A second key, or the end of a certificate's time, which nobody would notice that they do not."""
    for name in ("a", "b"):
        make_key(tmp_path, name)
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / f"ssh-{name}"], check=True)
    words = ["-q", "-s", "ssh-a", "-I", "x", "-n", "x", "-V", "20200101:20200102", "ssh-b.pub"]
    subprocess.run(["ssh-keygen", *words], check=True, cwd=tmp_path)
    for form in ("{}.pub", "ssh-{}.pub"):
        texts = [(tmp_path / form.format(name)).read_bytes() for name in "ab"]
        (tmp_path / "both.pub").write_bytes(b"".join(texts))
        assert load_public(tmp_path / form.format("a"))
        with pytest.raises(UsageError, match="several keys"):
            load_public(tmp_path / "both.pub")
    with pytest.raises(UsageError, match="an OpenSSH certificate"):
        load_public(tmp_path / "ssh-b-cert.pub")


def test_openssl_finds_the_signature_right(place: Place) -> None:
    key = make_key(place.folder, "p", "p256")
    place.attest(key=key)
    envelope = json.loads(place.bundle.read_text())["dsseEnvelope"]
    payload, kind = base64.b64decode(envelope["payload"]), envelope["payloadType"].encode()
    # DSSE's protocol.md, by hand.
    (place.folder / "pae").write_bytes(b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload))
    (place.folder / "sig").write_bytes(base64.b64decode(envelope["signatures"][0]["sig"]))
    line = ["openssl", "dgst", "-sha256", "-verify", "p.pub", "-signature", "sig", "pae"]
    assert subprocess.run(line, cwd=place.folder, capture_output=True, text=True).stdout == "Verified OK\n"


def test_the_formats_are_those_of_sigstore_and_in_toto(place: Place) -> None:
    """The projects' own models read a bundle and its statement; cosign itself could not be had."""
    place.attest()
    bundle = Bundle.from_json(place.bundle.read_bytes())
    assert bundle.dsse_envelope is not None and bundle.verification_material.public_key is not None
    assert bundle.verification_material.public_key.hint == load_public(place.key.with_suffix(".pub")).keyid
    found = json_format.Parse(bundle.dsse_envelope.payload, statement_pb2.Statement())
    Statement.copy_from_pb(found).validate()
    assert found.predicate_type == RECEIPT and found.predicate["target"] == place.receipt["target"]


def edit(name: str, value: Any) -> Callable[[Place], None]:
    """A tampering: the receipt has another value, and nobody signs it."""

    def tamper(place: Place) -> None:
        write_receipt({**place.receipt, name: value}, place.venv)

    return tamper


def resign(name: str, value: Any) -> Callable[[Place], None]:
    """A tampering of the statement, which the right key signs."""

    def tamper(place: Place) -> None:
        place.attest(json.dumps({**json.loads(attested(place.receipt)), name: value}).encode())

    return tamper


def forge(change: Callable[[dict[str, Any]], None]) -> Callable[[Place], None]:
    """A tampering of the bundle's JSON."""

    def tamper(place: Place) -> None:
        bundle = json.loads(place.bundle.read_text())
        change(bundle)
        place.bundle.write_text(json.dumps(bundle))

    return tamper


def by_stranger(place: Place) -> None:
    right = json.loads(place.bundle.read_text())
    place.attest(key=place.stranger)
    bundle = json.loads(place.bundle.read_text())
    bundle["verificationMaterial"] = right["verificationMaterial"]
    bundle["dsseEnvelope"]["signatures"][0]["keyid"] = right["dsseEnvelope"]["signatures"][0]["keyid"]
    place.bundle.write_text(json.dumps(bundle))


def another_payload(bundle: dict[str, Any]) -> None:
    envelope = bundle["dsseEnvelope"]
    told = json.loads(base64.b64decode(envelope["payload"]))
    told["predicate"]["passed"] = False
    envelope["payload"] = base64.b64encode(json.dumps(told).encode()).decode()


def verified_quickly(place: Place) -> None:
    place.receipt["settings"] = {"quick": True}
    write_receipt(place.receipt, place.venv)
    place.attest()


def passed_is_false(place: Place) -> None:
    place.receipt["passed"] = False
    write_receipt(place.receipt, place.venv)
    place.attest()


TAMPERINGS: dict[str, tuple[Callable[[Place], Any], str]] = {
    "no bundle": (lambda place: place.bundle.unlink(), "has no attestation"),
    "a stranger's key": (lambda place: place.attest(key=place.stranger), "no signer of the site"),
    "a stranger's key that claims to be the signer's": (by_stranger, "no signer of the site"),
    "a check in the receipt": (edit("checks", []), "another one than was attested"),
    "the time in the receipt": (edit("verified_at", "2099-01-01T00:00:00+00:00"), "another one than was attested"),
    "a new field of the receipt": (edit("fabric", "efa"), "another one than was attested"),
    "the payload": (forge(another_payload), "no signer of the site"),
    "the payload's type": (forge(lambda b: b["dsseEnvelope"].update(payloadType="text/plain")), "its payload is"),
    "no signature": (forge(lambda b: b["dsseEnvelope"].update(signatures=[])), "no signer of the site"),
    "a signature of nothing": (forge(lambda b: b["dsseEnvelope"]["signatures"][0].update(sig="")), "no signer"),
    "a signature that is no base64": (forge(lambda b: b["dsseEnvelope"]["signatures"][0].update(sig="*")), "cannot"),
    "no envelope": (forge(lambda b: b.pop("dsseEnvelope")), "it is invalid"),
    "signatures that are no list": (forge(lambda b: b["dsseEnvelope"].update(signatures=7)), "it is invalid"),
    "another predicate's type": (resign("predicateType", "https://slsa.dev/provenance/v1"), "is no attestation"),
    "another statement's type": (resign("_type", "https://in-toto.io/Statement/v2"), "its statement is"),
    "no subject": (resign("subject", []), "of another artifact"),
    "another subject": (resign("subject", [{"name": "x", "digest": {"sha256": "0" * 64}}]), "of another artifact"),
    "a subject of another hash": (resign("subject", [{"name": "x", "digest": {"md5": "0" * 32}}]), "it is invalid"),
    "a predicate that is no object": (resign("predicate", []), "its predicate is not an object"),
    "a predicate of nothing": (resign("predicate", {}), "another one than was attested"),
    "an empty file": (lambda place: place.bundle.write_text(""), "cannot be read"),
    "a file that is no JSON": (lambda place: place.bundle.write_text("{"), "cannot be read"),
    "a nested file": (lambda place: place.bundle.write_text("[" * 100_000), "cannot be read"),
    "a list": (lambda place: place.bundle.write_text("[]"), "it is invalid"),
    "a file without an end": (lambda place: place.bundle.write_bytes(b" " * (17 << 20)), "more than 16777216 bytes"),
    "a verification that failed": (passed_is_false, "did not pass"),
    "a quick verification": (verified_quickly, "verified with --verify quick only"),
}


@pytest.mark.parametrize("name", TAMPERINGS)
def test_a_tampering_is_refused(place: Place, name: str) -> None:
    tamper, why = TAMPERINGS[name]
    place.attest()
    assert place.judged()
    tamper(place)
    with pytest.raises(VerificationError, match=f"is not trusted: .*{why}") as caught:
        place.judged()
    assert "`envbuild attest" in (caught.value.hint or "")
    with pytest.raises(EnvbuildError):
        place.run("trust", str(place.venv))


def test_a_bundle_is_of_one_artifact(place: Place, tmp_path: Path) -> None:
    place.attest()
    (tmp_path / "other").mkdir()
    other = Place(tmp_path / "other")
    other.receipt["artifact"]["digest"] = "sha256:" + "7" * 64
    write_receipt(other.receipt, other.venv)
    other.bundle.write_bytes(place.bundle.read_bytes())
    with pytest.raises(VerificationError, match="is of another artifact"):
        judge(other.venv, other.receipt, place.trust, NOW)


def test_content_that_changed_is_refused(place: Place) -> None:
    place.attest()
    assert "trusted" in place.run("trust", str(place.venv)).stdout
    (place.venv / "lib/x.py").write_text("x = 2\n")
    with pytest.raises(VerificationError, match=r"lib/x\.py changed since it was verified"):
        place.run("trust", str(place.venv))
    with pytest.raises(VerificationError, match=r"lib/x\.py changed since it was verified"):
        place.run("attest", str(place.venv), "--key", str(place.key))


def test_a_second_signer_of_several_counts(place: Place) -> None:
    place.attest(key=place.stranger)
    both = (str(place.key.with_suffix(".pub")), str(place.stranger.with_suffix(".pub")))
    assert place.judged(signers=both)
    first = json.loads(place.bundle.read_text())["dsseEnvelope"]["signatures"]
    place.attest()
    forge(lambda bundle: bundle["dsseEnvelope"].update(signatures=[*first, *bundle["dsseEnvelope"]["signatures"]]))(
        place
    )
    assert place.judged()


def test_a_pushed_or_copied_artifact_stays_trusted(place: Place) -> None:
    place.attest()
    moved = {**place.receipt["artifact"], "path": "/elsewhere", "pushed": "registry.example.org/a@sha256:" + "1" * 64}
    write_receipt({**place.receipt, "artifact": moved}, place.venv)
    assert place.judged()
    told = json.loads(attested({**place.receipt, "artifact": moved}, "sbom", {}))
    assert told["predicateType"] == PREDICATES["sbom"], "with the digest under which registries have it:"
    assert told["subject"][-1] == {"name": "registry.example.org/a", "digest": {"sha256": "1" * 64}}


def test_a_pushed_image_is_trusted_by_the_digest_that_nodes_pull(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place.folder)
    built = Path("build/lab/cpu-x86_64/docker")
    built.parent.mkdir(parents=True)

    def push(digit: str) -> str:
        """Write the receipt of an image that was pushed with this digest, and return its reference."""
        image = f"registry.example.org/lab@sha256:{digit * 64}"
        artifact = {"kind": "docker", "path": "lab", "digest": "sha256:" + "1" * 64, "pushed": image}
        place.receipt |= {"artifact": artifact, "settings": {}}
        write_receipt(place.receipt, built)
        return image

    for digit in "12":  # the image's own manifest, and the one of `--format docker`
        image = push(digit)
        bundle_path(built).write_bytes(sign(attested(place.receipt), load_signer(str(place.key), None, no_passphrase)))
        assert all("trusted: attested by" in place.run("trust", named).stdout for named in ("lab", image))
    image = push("e")
    for named in ("lab", image):
        with pytest.raises(VerificationError, match="is of another artifact"):
            place.run("trust", named)
        with pytest.raises(VerificationError, match="is of another artifact"):
            check_trust(open_artifact(named, ("docker",), None), place.trust)


def test_the_sites_checks_and_age(place: Place) -> None:
    place.attest()
    assert place.judged(checks=("launch", "allreduce"), max_age="90d")
    with pytest.raises(VerificationError, match="lacks checks that passed: restart, nothing"):
        place.judged(checks=("launch", "restart", "nothing"))
    assert place.judged(NOW + timedelta(days=90) - timedelta(seconds=5), max_age="90d")
    with pytest.raises(VerificationError, match="more than 90d ago"):
        place.judged(NOW + timedelta(days=90, seconds=5), max_age="90d")
    assert place.judged(NOW - timedelta(seconds=200))
    with pytest.raises(VerificationError, match="of the future"):
        place.judged(NOW - timedelta(seconds=400))


def test_a_time_that_is_none_is_refused(place: Place) -> None:
    place.receipt["verified_at"] = "yesterday"
    write_receipt(place.receipt, place.venv)
    place.attest()
    with pytest.raises(VerificationError, match="malformed"):
        place.judged()


def test_jobs_take_what_the_site_trusts_alone(place: Place) -> None:
    place.site.write_text('[scheduler]\nkind = "slurm"\n[trust]\nsigners = ["ci.pub"]\n')
    line = ("job", str(place.venv), "--site", str(place.site), "--nodes", "1")
    with pytest.raises(VerificationError, match="is not trusted: it has no attestation"):
        place.run(*line)
    place.attest()
    assert "#SBATCH" in place.run(*line).stdout
    receipt_path(place.venv).unlink()
    with pytest.raises(VerificationError, match="no passing receipt, and the site trusts only attested artifacts"):
        place.run(*line, "--unverified")
    opened_ = open_artifact(str(place.venv), ("venv",), None, unverified=True)
    check_trust(opened_, TrustTable())  # a site without signers


@pytest.mark.parametrize("named", [".", "./", "lib/.."])
def test_the_current_folder_is_an_artifact_with_a_receipt_beside_it(
    place: Place, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place.venv / "lib").mkdir(exist_ok=True)
    monkeypatch.chdir(place.venv)
    place.run("attest", named, "--key", str(place.key))
    assert place.bundle.exists()
    assert "trusted: attested by" in place.run("trust", named).stdout
    with pytest.raises(EnvbuildError) as caught:  # it is trusted, and no environment that could be started
        place.run("verify", named)
    assert "trusted" not in caught.value.message


def make_bundle(folder: Path) -> Path:
    """A folder with the parts of a bundle."""
    files = {"recipes/lab/recipe.toml": "name", "blobs/sha256/0": "zip", "envbuild/envbuild/__init__.py": ""}
    about = {"format": FORMAT, "recipe": "lab", "target": "cpu-x86_64", "kinds": ["venv"]}
    for name, text in {**files, "bundle.json": json.dumps(about)}.items():
        (folder / "bundle" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "bundle" / name).write_text(text)
    return folder / "bundle"


def test_a_bundle_is_attested_with_all_of_its_files(place: Place) -> None:
    bundle = make_bundle(place.folder)
    with pytest.raises(VerificationError, match="it has no attestation"):
        place.run("trust", str(bundle))
    for _ in range(2):
        made = json.loads(place.run("attest", str(bundle), "--key", str(place.key), "--json").stdout)
        assert made["path"] == str(bundle / "bundle.sigstore.json")
    shutil.copytree(bundle, moved := place.folder / "moved")
    told = json.loads(place.run("trust", str(moved), "--json").stdout)
    assert told["digest"] == made["digest"] and told["signer"] == str(place.folder / "ci.pub")
    place.run("attest", str(bundle), "--key", str(place.stranger))
    with pytest.raises(VerificationError, match=r"no signer of the site has signed bundle\.sigstore\.json"):
        place.run("trust", str(bundle))


@pytest.mark.parametrize(
    ("name", "tamper"),
    [
        ("blobs/sha256/0", lambda file: file.write_text("zap")),
        ("recipes/lab/recipe.toml", lambda file: file.unlink()),
        ("envbuild/__pycache__/planted.pyc", lambda file: (file.parent.mkdir(), file.write_text("code"))),
        ("envbuild/envbuild/__init__.py", lambda file: file.chmod(0o4755)),
        ("bundle.json", lambda file: file.write_text(file.read_text().replace("cpu", "gpu"))),
        ("envbuild.manifest", lambda file: file.write_text(file.read_text().replace("sha256/0", "sha256/1"))),
    ],
)
def test_a_bundle_that_was_tampered_with_is_refused(place: Place, name: str, tamper: Callable[[Path], Any]) -> None:
    bundle = make_bundle(place.folder)
    place.run("attest", str(bundle), "--key", str(place.key))
    tamper(bundle / name)
    with pytest.raises(VerificationError) as caught:
        place.run("trust", str(bundle))
    assert f"{name} changed since it was attested" in str(caught.value) or "of another artifact" in str(caught.value)


def test_verify_starts_what_the_site_trusts_alone(place: Place) -> None:
    with pytest.raises(VerificationError, match="is not trusted: it has no attestation"):
        place.run("verify", str(place.venv))
    with pytest.raises(EnvbuildError) as caught:  # it is no environment that could be started
        place.run("verify", str(place.venv), "--untrusted")
    assert "trusted" not in caught.value.message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9),
    lambda x: st.lists(x) | st.dictionaries(st.text(max_size=5), x),
    max_leaves=9,
)


@given(st.dictionaries(st.text(max_size=9), JSON), st.sampled_from(sorted(KEYS)))
def test_every_predicate_is_read_as_it_was_signed(predicate: dict[str, Any], kind: str) -> None:
    from securesystemslib.signer import CryptoSigner

    signer = CryptoSigner(KEYS[kind]())
    bundle = sign(statement({"a": "sha256:" + "0" * 64}, RECEIPT, predicate), signer)
    found, by = opened(bundle, [signer.public_key])
    assert by is signer.public_key and found["predicate"] == predicate
    assert opened(bundle, [])[1] is None


@given(st.binary(max_size=300) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_file_is_no_bundle(data: bytes) -> None:
    with pytest.raises(ValueError):
        opened(data, [])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no private key in PEM form"),
        ("-----BEGIN PRIVATE KEY-----\nMC4CAQ==\n-----END PRIVATE KEY-----\n", "no private key in PEM form"),
        (None, "No such file"),
    ],
)
def test_faulty_keys(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "key.pem"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=message) as caught:
        load_signer(str(path), None, no_passphrase)
    assert "openssl genpkey" in (caught.value.hint or "")
    with pytest.raises(UsageError):
        load_public(path)


def test_keys_of_other_kinds_and_faulty_uses(tmp_path: Path) -> None:
    private = rsa.generate_private_key(65537, 2048)
    path = tmp_path / "rsa.pem"
    path.write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    with pytest.raises(UsageError, match="neither an Ed25519 nor an ECDSA key"):
        load_signer(str(path), None, no_passphrase)
    hidden = make_key(tmp_path, "hidden", passphrase="right")
    with pytest.raises(UsageError, match="passphrase is wrong"):
        load_signer(str(hidden), None, lambda: "wrong")
    with pytest.raises(UsageError, match="its public key is not known"):
        load_signer("awskms:alias/x", None, no_passphrase)
    with pytest.raises(UsageError, match="no public Ed25519 or ECDSA key"):
        load_public(hidden)


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, openssh: None) -> Iterator[Path]:
    """A folder with keys that a real ssh-agent has: KIND in OpenSSH's form, and KIND.pub."""
    place = tmp_path / "agent"
    monkeypatch.setenv("SSH_AUTH_SOCK", str(place))
    with subprocess.Popen(["ssh-agent", "-D", "-a", place], stdout=subprocess.DEVNULL) as process:
        try:
            while not place.exists():
                assert process.poll() is None
                time.sleep(0.01)
            for kind, options in {"ed25519": [], "ecdsa": ["-b", "521"]}.items():
                key = tmp_path / kind
                subprocess.run(["ssh-keygen", "-q", "-t", kind, *options, "-N", "", "-f", key], check=True)
                subprocess.run(["ssh-add", "-q", key], check=True)
            yield tmp_path
        finally:
            process.kill()


def test_keys_in_an_ssh_agent_sign_as_those_in_files(agent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("ed25519", "ecdsa"):
        public = agent / f"{kind}.pub"
        for size in (1, 1000, 300_000 if kind == "ed25519" else 60_000):
            payload = statement({"a": "sha256:" + "0" * 64}, RECEIPT, {"x": "y" * size})
            signer = load_signer("ssh-agent", public, no_passphrase)
            if size > 200_000:  # more than OpenSSH's agent takes
                with pytest.raises(UsageError, match="an ssh-agent accepts 262144"):
                    sign(payload, signer)
                continue
            found, by = opened(sign(payload, signer), [load_public(public)])
            assert by is not None and found["predicate"] == {"x": "y" * size}
    subprocess.run(["ssh-add", "-q", "-D"], check=True)
    with pytest.raises(UsageError, match="refused to sign with this key"):
        load_signer("ssh-agent", agent / "ecdsa.pub", no_passphrase).sign(b"x")
    with pytest.raises(UsageError, match="its public key is not known"):
        load_signer("ssh-agent", None, no_passphrase)
    for place, message in (("/nonexistent", "No such file"), ("", "SSH_AUTH_SOCK is not set")):
        monkeypatch.setenv("SSH_AUTH_SOCK", place)
        with pytest.raises(UsageError, match=message):
            load_signer("ssh-agent", agent / "ecdsa.pub", no_passphrase).sign(b"x")


@given(st.binary(max_size=200))
def test_any_answer_of_an_agent_is_judged(answer: bytes) -> None:
    signer = AgentSigner(ec.generate_private_key(ec.SECP256R1()).public_key(), {})
    with patch.object(AgentSigner, "_asked", lambda self, message: answer), pytest.raises(UsageError):
        signer.sign(b"x")


def test_the_site_file(tmp_path: Path) -> None:
    site = tmp_path / "site.toml"
    site.write_text('[trust]\nsigners = ["keys/ci.pub", "~/own.pub"]\nmax_age = "30d"\n')
    trust = load_site({"ENVBUILD_SITE": str(site), "HOME": "/home/one"}).trust
    assert trust.signers == (str(tmp_path / "keys/ci.pub"), "/home/one/own.pub") and trust.max_age == "30d"
    site.write_text('[trust]\nmax_age = "a month"\n')
    with pytest.raises(EnvbuildError, match="max_age"):
        load_site({"ENVBUILD_SITE": str(site)})


def test_site_check_judges_the_table(place: Place) -> None:
    def found() -> list[tuple[str, str]]:
        rows = check_site(str(place.site), {"HOME": "/nonexistent"}, None, offline=True)
        return [(row.status, row.summary) for row in rows if row.name.startswith("[trust]")]

    assert found() == [("ok", str(place.key.with_suffix(".pub")))]
    place.site.write_text('[trust]\nsigners = ["gone.pub", "ci.pem"]\nchecks = ["launch", "restrat"]\n')
    (gone, private, check) = found()
    assert gone[0] == private[0] == check[0] == "fail" and "gone.pub: No such file" in gone[1]
    assert "no public Ed25519 or ECDSA key" in private[1] and check[1] == "there is no check restrat"
    place.site.write_text('[trust]\nmax_age = "30d"\n')
    assert found() == [("warn", "has no effect without signers")]


def test_a_site_without_signers_trusts_nothing(place: Place) -> None:
    place.site.write_text("")
    with pytest.raises(UsageError, match="the site names no signers"):
        place.run("trust", str(place.venv))


BOTH = ("--with", "sbom", "--with", "provenance")


def test_sbom_and_provenance_are_attested_of_the_same_content(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_WORKFLOW_REF", "o/r/.github/workflows/images.yml@refs/heads/main")
    monkeypatch.setenv("GITHUB_RUN_ID", "7")
    monkeypatch.setenv("GITHUB_REPOSITORY", "o/r")
    place.run("attest", str(place.venv), "--key", str(place.key), *BOTH)
    found = {}
    for name in ("sbom", "provenance"):
        told, by = opened(bundle_path(place.venv, name).read_bytes(), [load_public(place.key.with_suffix(".pub"))])
        assert by is not None and told["predicateType"] == PREDICATES[name]
        assert f"sha256:{told['subject'][0]['digest']['sha256']}" == place.receipt["artifact"]["digest"]
        found[name] = told["predicate"]
    assert found["sbom"]["bomFormat"] == "CycloneDX"
    build, run = found["provenance"]["buildDefinition"], found["provenance"]["runDetails"]
    assert [one["name"] for one in build["resolvedDependencies"]] == ["recipe", "lock", "plan"]
    assert run["builder"]["id"] == "https://github.com/o/r/.github/workflows/images.yml@refs/heads/main"
    assert run["metadata"]["invocationId"] == "https://github.com/o/r/actions/runs/7/attempts/1"
    assert "with its sbom and its provenance" in place.run("trust", str(place.venv)).stdout


def swap(place: Place, one: str, other: str) -> None:
    bundle_path(place.venv, one).write_bytes(bundle_path(place.venv, other).read_bytes())


def sbom_of(place: Place, key: Path, **changes: Any) -> None:
    told = {**json.loads(attested(place.receipt, "sbom", {"bomFormat": "CycloneDX"})), **changes}
    bundle_path(place.venv, "sbom").write_bytes(
        sign(json.dumps(told).encode(), load_signer(str(key), None, no_passphrase))
    )


SWAPS: dict[str, Callable[[Place], Any]] = {
    "the provenance in place of the sbom": lambda place: swap(place, "sbom", "provenance"),
    "the receipt in place of the sbom": lambda place: swap(place, "sbom", ""),
    "the sbom in place of the receipt": lambda place: swap(place, "", "sbom"),
    "an sbom of a stranger's": lambda place: sbom_of(place, place.stranger),
    "an sbom of another artifact": lambda place: sbom_of(
        place, place.key, subject=[{"name": "x", "digest": {"sha256": "0" * 64}}]
    ),
    "an sbom that is cut short": lambda place: bundle_path(place.venv, "sbom").write_bytes(b"{"),
    "no provenance": lambda place: bundle_path(place.venv, "provenance").unlink(),
}


@pytest.mark.parametrize("name", SWAPS)
def test_a_swapped_attestation_is_refused(place: Place, name: str) -> None:
    place.run("attest", str(place.venv), "--key", str(place.key), *BOTH)
    trust = replace(place.trust, attestations=("sbom", "provenance"))
    assert judge(place.venv, place.receipt, trust, NOW).others == ("sbom", "provenance")
    SWAPS[name](place)
    with pytest.raises(VerificationError, match="is not trusted"):
        judge(place.venv, place.receipt, trust, NOW)
