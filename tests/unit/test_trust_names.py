"""Names that are bound to a recipe: a tag that was moved, or a file that was replaced, to other signed content."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from lab.fake_registry import Call, Fake, fake_registry
from securesystemslib.signer import CryptoSigner

from envbuild.base.errors import EnvbuildError, RecipeError, UsageError, VerificationError
from envbuild.base.packages import digest_of
from envbuild.build.bundle import FILE, FORMAT, attest_bundle
from envbuild.build.share import ATTESTATIONS
from envbuild.cli.commands import cli
from envbuild.contract.receipt import write_receipt
from envbuild.image.model import OCI_CONFIG, OCI_MANIFEST, Descriptor, canonical, new_manifest
from envbuild.image.reference import parse_reference
from envbuild.job_inputs import check_trust, open_artifact
from envbuild.site.settings import load_site
from envbuild.store.pieces import CONFIG, PIECE, RECEIPT, FilePieces, render
from envbuild.trust.bundle import BUNDLE, bundle_path, sign
from envbuild.trust.policy import attested

CONTENT = b"hsqs" + bytes(100)
MEDIA = next(media for media, name in ATTESTATIONS.items() if not name)


def receipt_of(digest: str, kind: str, recipe: str = "lab") -> dict[str, Any]:
    return {
        "format": 1,
        "passed": True,
        "verified_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": 1.0,
        "artifact": {"kind": kind, "path": "/x", "digest": digest},
        "target": "cpu-x86_64",
        "checks": [],
        "recipe": {"name": recipe, "digest": "sha256:r"},
        "plan": {"digest": "sha256:p"},
        "versions": {"envbuild": "1"},
    }


class Place:
    """A registry with a pushed file (tag `file`) and an image with a referrer (tag `image`), both of the recipe lab."""

    def __init__(self, folder: Path) -> None:
        private = Ed25519PrivateKey.generate()
        self.folder, self.signer = folder, CryptoSigner(private)
        (folder / "ci.pub").write_bytes(
            private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        )
        self.answers: dict[str, tuple[bytes, str]] = {}
        self.fake: Fake
        piece = self.blob(CONTENT, PIECE)
        told = receipt_of(digest_of(CONTENT), "enroot")
        receipt = self.blob(json.dumps(told).encode(), RECEIPT)
        bundle = self.blob(sign(attested(told), self.signer), MEDIA)
        about = FilePieces("enroot", "x.sqsh", "cpu-x86_64", piece.digest, piece.size, ((piece.digest, 0, piece.size),))
        config = self.blob(json.dumps(asdict(about)).encode(), CONFIG)
        self.manifest(render(config, [piece, receipt, bundle]), "file")
        image = new_manifest(OCI_MANIFEST, self.blob(b"{}", OCI_CONFIG), []).raw
        self.manifest(image, "image")
        self.image = digest_of(image)
        layer = self.blob(sign(attested(receipt_of(self.image, "docker")), self.signer), BUNDLE)
        referrer = canonical({"schemaVersion": 2, "artifactType": BUNDLE, "layers": [layer.as_json()]})
        row = {**Descriptor(OCI_MANIFEST, self.manifest(referrer), len(referrer)).as_json(), "artifactType": BUNDLE}
        self.answers[f"referrers/{self.image}"] = canonical({"manifests": [row]}), ""

    def blob(self, data: bytes, kind: str) -> Descriptor:
        self.answers[f"blobs/{digest_of(data)}"] = data, ""
        return Descriptor(kind, digest_of(data), len(data))

    def manifest(self, raw: bytes, *names: str) -> str:
        for name in (digest_of(raw), *names):
            self.answers[f"manifests/{name}"] = raw, OCI_MANIFEST
        return digest_of(raw)

    def __call__(self, call: Call) -> None:
        found = self.answers.get(call.path.partition("?")[0].removeprefix("/v2/team/x/"))
        call.reply(200 if found else 404, *(found[:1] if found else ()), Content_Type=found[1] if found else "")

    def site(self, **names: str) -> Path:
        place = self.folder / "site.toml"
        rows = "".join(f"{json.dumps(name)} = {json.dumps(recipe)}\n" for name, recipe in names.items())
        place.write_text(
            f'store = "store"\n[registries."{self.fake.address}"]\ninsecure = true\n'
            f'[trust]\nsigners = ["ci.pub"]\n[trust.names]\n{rows}'
        )
        return place

    def run(self, *words: str) -> Result:
        env = {"ENVBUILD_SITE": str(self.folder / "site.toml")}
        return CliRunner().invoke(cli, words, env=env, standalone_mode=False)

    def refuses(self, *words: str) -> str:
        error = self.run(*words).exception
        assert isinstance(error, VerificationError), error
        return error.message


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    with fake_registry(made) as made.fake:
        made.site()
        yield made


@pytest.mark.parametrize("tag", ["file", "image"])
def test_a_tag_is_judged_by_what_it_names_now_and_by_its_recipe(place: Place, tag: str) -> None:
    name = f"{place.fake.address}/team/x:{tag}"
    told = json.loads(place.run("trust", name, "--recipe", "lab", "--json").stdout)
    assert re.fullmatch(rf"{place.fake.address}/team/x@sha256:[0-9a-f]{{64}}", told["path"])
    assert told["recipe"] == "lab" and told["signer"] == str(place.folder / "ci.pub")
    assert "trusted: attested by" in place.run("trust", name).stdout
    assert "of the recipe 'lab', and it was asked for as 'other'" in place.refuses("trust", name, "--recipe", "other")
    place.signer = CryptoSigner(Ed25519PrivateKey.generate())
    (place.folder / "ci.pub").write_bytes(
        place.signer._private_key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)  # type: ignore[attr-defined]
    )
    place.refuses("trust", name, "--recipe", "lab")


@pytest.mark.parametrize("tag", ["file", "image"])
def test_an_option_without_a_name_is_no_permission(place: Place, tag: str) -> None:
    """--recipe "$NAME", of a variable that is not set."""
    error = place.run("trust", f"{place.fake.address}/team/x:{tag}", "--recipe", "").exception
    assert isinstance(error, UsageError) and "--recipe names no recipe" in error.message


@pytest.mark.parametrize("tag", ["file", "image"])
def test_names_of_the_site_bind_a_repository_and_its_tags(place: Place, tag: str) -> None:
    name = f"{place.fake.address}/team/x"
    for bound, fits in (
        ({name: "lab"}, True),
        ({name: "other"}, False),
        ({f"{name}:{tag}": "lab", name: "other"}, True),
        ({f"{name}:{tag}": "other", name: "lab"}, False),
        ({f"{name}:none": "other", f"{name}x": "other"}, True),
    ):
        place.site(**bound)
        if fits:
            assert place.run("trust", f"{name}:{tag}").exit_code == 0
        else:
            assert (
                f"{name}:{tag} is not trusted: it is of the recipe 'lab', and [trust] names of the site says {name}"
                in place.refuses("trust", f"{name}:{tag}")
            )
    place.site(**{name: "other"})
    if tag == "image":
        assert "= 'other'" in place.refuses("trust", f"{name}@{place.image}")
        assert "= 'other'" in place.refuses("job", f"{name}@{place.image}", "--scheduler", "kubernetes")


def test_a_pull_takes_only_what_its_name_stands_for(place: Place) -> None:
    name, out = f"{place.fake.address}/team/x:file", place.folder / "x.sqsh"
    for bound in ({name: "other"}, {str(out): "other"}):
        place.site(**bound)
        assert "of the recipe 'lab'" in place.refuses("pull", name, "--out", str(out))
        assert not place.fake.asked("GET", digest_of(CONTENT)) and not list(place.folder.glob("*.sqsh*"))
    place.site(**{name: "lab", str(out): "lab"})
    assert place.run("pull", name, "--out", str(out)).exit_code == 0
    assert out.read_bytes() == CONTENT


def test_a_recipe_named_on_the_command_line_is_that_of_its_artifact(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the place of an artifact, anybody who may write there can put another signed one with its receipt."""
    monkeypatch.chdir(place.folder)
    for recipe, fits in (("lab", True), ("other", False)):
        beside = Path("build") / recipe / "cpu-x86_64/docker"
        beside.parent.mkdir(parents=True)
        told = receipt_of(place.image, "docker")
        told["artifact"]["pushed"] = f"{place.fake.address}/team/x@{place.image}"
        write_receipt(told, beside)
        bundle_path(beside).write_bytes(sign(attested(told), place.signer))
        opened = open_artifact(recipe, ("docker",), None)
        trust = load_site({}, str(place.site())).trust
        if fits:
            check_trust(opened, trust)
        else:
            with pytest.raises(VerificationError, match="of the recipe 'lab', and it was asked for as 'other'"):
                check_trust(opened, trust)


def test_a_bundle_is_of_its_recipe(place: Place) -> None:
    bundle = place.folder / "bundle"
    bundle.mkdir()
    about = {"format": FORMAT, "recipe": "lab", "target": "cpu-x86_64"}
    (bundle / FILE).write_text(json.dumps(about))
    attest_bundle(bundle, about, lambda payload: sign(payload, place.signer), 1)
    assert place.run("trust", str(bundle), "--recipe", "lab").exit_code == 0
    assert "of the recipe 'lab'" in place.refuses("trust", str(bundle), "--recipe", "other")
    place.site(**{str(bundle): "other"})
    assert "= 'other'" in place.refuses("trust", str(bundle))


@pytest.mark.parametrize(
    "name",
    [
        "team/x",
        "x",
        "Registry.example.org/x",
        "registry.example.org",
        "registry.example.org/x@sha256:1",
        "https://r.org/x",
        "index.docker.io/a/b",
        "./x.sqsh",
        "/fsx/../x",
        "/fsx/x/",
        "registry.example.org/x:",
    ],
)
def test_a_name_that_could_never_fit_is_refused(place: Place, name: str) -> None:
    with pytest.raises(RecipeError, match="is neither HOST/REPOSITORY nor"):
        load_site({}, str(place.site(**{name: "lab"})))


@pytest.mark.parametrize(
    "name",
    [
        "docker.io/library/x",
        "localhost/x",
        "localhost:5000/x:1",
        "r.example.org:5000/a/b_c:v1.2-x",
        "[::1]:5000/x",
        "host:5000/x",
        "/fsx/images/x.sqsh",
    ],
)
def test_a_name_that_fits_is_taken_as_references_have_it(place: Place, name: str) -> None:
    assert load_site({}, str(place.site(**{name: "lab"}))).trust.names == {name: "lab"}
    if not name.startswith("/"):
        assert name in parse_reference(name).names


@pytest.mark.parametrize("name", ["./x.example/y", "x.example/y"])
def test_a_path_is_no_registry(place: Place, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place.folder)
    Path("x.example").mkdir()
    error = place.run("trust", name).exception
    assert isinstance(error, EnvbuildError) and "does not exist" in error.message
