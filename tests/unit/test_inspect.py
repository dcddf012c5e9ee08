"""Artifacts looked into: every form of an image and venvs tell the same; secrets are never shown."""

from __future__ import annotations

import csv
import dataclasses
import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab import artifacts as lab
from lab.forked import run_forked
from lab.users import as_nobody

from envbuild.base.errors import BuildError, EnvbuildError, HostError, UsageError
from envbuild.base.masking import masked, masked_text, masked_words
from envbuild.describe import describe
from envbuild.environment import Environment
from envbuild.image.layout import Blobs
from envbuild.image.limits import Quota
from envbuild.inspect.facts import Description, Inventory, PythonPackage
from envbuild.inspect.images import read_listing, remembered
from envbuild.inspect.metadata import interest, portable_digest
from envbuild.inspect.reader import open_artifact, open_artifacts, split
from envbuild.inspect.sbom import cyclonedx
from envbuild.run_environment import load_environment

STATUS = """\
Package: libc6
Status: install ok installed
Architecture: amd64
Version: 2.36-9
Description: text
 Package: none

Package: gone
Status: deinstall ok config-files
Architecture: amd64
Version: 1
"""
OS = 'ID=debian\nVERSION_ID="12"\nVERSION_CODENAME=bookworm\n'
ENV = lab.under("opt/env", {**lab.frame(), **lab.package("numpy", "2.1", {"numpy/__init__.py": "1"})})


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return load_environment({"ENVBUILD_STORE": str(tmp_path / "store"), "HOME": str(tmp_path)})


@pytest.fixture
def blobs(tmp_path: Path) -> Blobs:
    return Blobs(tmp_path / "blobs")


def look(text: str | Path, environment: Environment, target: str | None = None) -> dict[str, Any]:
    with open_artifact(str(text), environment, target) as opened:
        return describe(opened.about, opened.contents(hashes=False))


def write_image(tmp_path: Path, blobs: Blobs) -> dict[str, str]:
    """One image in every form that needs no server: form → spelling."""
    base = lab.layer(blobs, {"var/lib/dpkg/status": STATUS, "usr/lib/os-release": OS, "etc/x": "1"})
    top = lab.layer(blobs, {**ENV, "etc/.wh.x": ""})
    descriptor, config = lab.image(
        blobs,
        [base, top],
        Env=["PATH=/bin", "HF_TOKEN=hunter2", "VIRTUAL_ENV=/opt/env"],
        Cmd=["serve", "--password", "hunter2"],
        WorkingDir="/srv",
        Labels={"org.envbuild.recipe": "lab", "org.envbuild.target": "cpu-x86_64"},
    )
    lab.layout(tmp_path / "layout", blobs, [(descriptor, "lab:cpu")])
    lab.docker_archive(tmp_path / "image.tar", blobs, config, [base, top], "lab:cpu")
    (tmp_path / "image.tgz").write_bytes(gzip.compress((tmp_path / "image.tar").read_bytes()))
    return {
        "layout": str(tmp_path / "layout"),
        "layout with a tag": f"oci:{tmp_path / 'layout'}:lab:cpu",
        "archive": str(tmp_path / "image.tar"),
        "compressed archive": f"docker-archive:{tmp_path / 'image.tgz'}",
    }


def test_every_form_of_an_image_tells_the_same(tmp_path: Path, blobs: Blobs, environment: Environment) -> None:
    forms = write_image(tmp_path, blobs)
    found = {form: look(text, environment) for form, text in forms.items()}
    first = found["layout"]
    assert first["python_packages"][0]["name"] == "numpy"
    assert first["python_packages"][0]["location"] == f"opt/env/{lab.SITE}"
    assert first["debian_packages"] == [{"name": "libc6", "version": "2.36-9", "arch": "amd64"}]
    assert first["base"]["suite"] == "bookworm" and first["workdir"] == "/srv"
    assert first["python"] == {"version": "3.11", "full": "3.11.7", "interpreter": "/usr/bin/python3.11"}
    base = {"var/lib/dpkg/status": "", "usr/lib/os-release": "", "etc/": ""}
    assert first["files"] == len(ENV) + folders(ENV) + len(base) + folders(base)
    own = ("artifact", "digest", "layers", "stored")
    for form, about in found.items():
        assert {k: v for k, v in about.items() if k not in own} == {k: v for k, v in first.items() if k not in own}, (
            form
        )
        assert [layer["diff_id"] for layer in about["layers"]] == [layer["diff_id"] for layer in first["layers"]]
    assert list((tmp_path / "store" / "opened").iterdir()) == []


def folders(files: lab.Files) -> int:
    return len({str(p) for name in files for p in Path(name).parents}) - 1


@pytest.mark.parametrize("as_json", [True, False])
def test_no_secret_is_shown(tmp_path: Path, blobs: Blobs, as_json: bool) -> None:
    folder = write_image(tmp_path, blobs)["layout"]
    variables = {"ENVBUILD_STORE": str(tmp_path / "store"), "HOME": str(tmp_path)}
    done = run_forked("inspect", str(folder), *["--json"] * as_json, cwd=tmp_path, env=variables)
    assert done.returncode == 0, done.stderr
    assert "HF_TOKEN" in done.stdout and "hunter2" not in done.stdout + done.stderr


@given(st.sampled_from(["TOKEN", "secret", "DB_PASSWORD", "Api_Key"]), st.text("abcXYZ019", min_size=6))
def test_values_of_secret_names_are_hidden_wherever_they_stand(name: str, value: str) -> None:
    value = f"zq{value}"
    shown = [
        masked({name: value})[name],
        masked_text(f"RUN |1 {name}={value} /bin/sh -c make"),
        masked_text(f'curl -H "X-{name}: {value}" host'),
        *masked_words(["serve", f"--{name}", value, f"--{name}={value}", f"https://u:{value}@h/"]),
    ]
    assert not [text for text in shown if value in text]


def test_names_of_packages_are_not_taken_for_secrets() -> None:
    title = "8 packages: keyring 25.0, monkeytype==1.2, tokenizers 0.2"
    assert masked_text(title) == title


def test_layers_are_read_once_and_only_when_something_in_them_is_asked_for(
    tmp_path: Path, blobs: Blobs, environment: Environment
) -> None:
    folder = Path(write_image(tmp_path, blobs)["layout"])
    with open_artifact(str(folder), environment, None) as opened:
        layers = opened.about.layers
        assert not remembered(layers[0].diff_id, environment.store)
        before = opened.contents(hashes=True)
    for layer in layers:  # unreadable from now on, though of the same size
        path = Blobs(folder / "blobs").path(layer.digest)
        path.unlink()
        path.write_bytes(bytes(layer.size))
    with open_artifact(str(folder), environment, None) as opened:
        assert opened.contents(hashes=True) == before


def test_a_layer_that_is_not_what_the_configuration_names_is_refused(
    tmp_path: Path, blobs: Blobs, environment: Environment
) -> None:
    real, other = lab.layer(blobs, {"a": "1"}), lab.layer(blobs, {"a": "2"})
    false = dataclasses.replace(real, diff_id=other.diff_id)
    descriptor, _ = lab.image(blobs, [false])
    folder = lab.layout(tmp_path / "layout", blobs, [(descriptor, None)])
    with pytest.raises(BuildError, match="not the layer of the image's configuration"):
        look(folder, environment)
    assert remembered(other.diff_id, environment.store) is None


def test_a_damaged_note_of_a_layer_is_made_again(tmp_path: Path, blobs: Blobs, environment: Environment) -> None:
    folder = write_image(tmp_path, blobs)["layout"]
    before = look(folder, environment)
    for note in (tmp_path / "store" / "listings").iterdir():
        note.write_bytes(note.read_bytes()[:-20])
    assert look(folder, environment) == before


def test_the_platform_is_this_hosts_or_the_only_one_or_as_asked(
    tmp_path: Path, blobs: Blobs, environment: Environment
) -> None:
    from envbuild.image.model import GOARCH
    from envbuild.recipe.targets import host_arch

    both = [lab.image(blobs, [lab.layer(blobs, {"a": arch})], arch=arch)[0] for arch in ("amd64", "arm64")]
    many = lab.layout(tmp_path / "many", blobs, [(lab.multi(blobs, both), "x")])
    assert look(many, environment)["platform"] == f"linux/{GOARCH[host_arch()]}"
    assert look(many, environment, "cpu-aarch64")["platform"] == "linux/arm64"
    assert look(many, environment, "cu126-x86_64")["platform"] == "linux/amd64"
    one = lab.layout(tmp_path / "one", blobs, [(both[1], "x")])
    assert look(one, environment)["platform"] == "linux/arm64"
    with pytest.raises(EnvbuildError, match="amd64"):
        look(one, environment, "cpu-x86_64")


def test_one_of_several_images_must_be_named(tmp_path: Path, blobs: Blobs, environment: Environment) -> None:
    two = [lab.image(blobs, [lab.layer(blobs, {"a": text})])[0] for text in "12"]
    folder = lab.layout(tmp_path / "two", blobs, [(two[0], "one"), (two[1], "other")])
    with pytest.raises(UsageError, match="one, other"):
        look(folder, environment)
    assert look(f"oci:{folder}:other", environment)["digest"] == two[1].digest


def test_a_path_with_colons_is_a_path(tmp_path: Path, environment: Environment) -> None:
    folder = lab.make_venv(tmp_path / "docker:x", {**lab.frame(), **lab.package("a", "1", {})})
    assert look(folder, environment)["recipe"]["name"] == "lab"
    assert look(f"venv:{folder}", environment)["python"]["full"] == "3.11.7"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("docker:26", (None, "docker:26")),
        ("docker://docker:26", ("docker", "docker:26")),
        ("pt_cpu:cpu-x86_64", (None, "pt_cpu:cpu-x86_64")),
        ("oci:no:where", ("oci", "no:where")),
        ("docker-daemon:x", ("docker-daemon", "x")),
    ],
)
def test_spellings(text: str, expected: tuple[str | None, str]) -> None:
    assert split(text) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "does not exist"),
        ("./nowhere", "does not exist"),
        ("/no/where", "does not exist"),
        ("Nowhere", "no such file or folder"),
        ("oci:", "nothing follows"),
        ("oci:nowhere", "does not exist"),
        ("venv:nowhere", "does not exist"),
        ("docker-archive:nowhere", "does not exist"),
        (".", "neither a venv, a conda environment nor an OCI layout"),
        ("train.py", "train.py is not an artifact: it is neither a squashfs, a SIF nor an image"),
        ("venv:.", "not a virtual environment"),
        ("oci:.", "no OCI image layout"),
    ],
)
def test_what_is_no_artifact_is_a_clear_usage_error(
    text: str, said: str, tmp_path: Path, environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import torch\n" * 100)
    with pytest.raises(UsageError, match=said) as caught:
        look(text, environment)
    assert caught.value.hint


def test_a_file_that_may_not_be_read_is_said_so(tmp_path: Path, environment: Environment) -> None:
    file = tmp_path / "image.tar"
    file.write_bytes(b"x")
    with as_nobody(file), pytest.raises(UsageError, match=r"image\.tar: permission denied"):
        look(str(file), environment)


def test_a_short_file_that_is_called_an_archive_gets_no_advice_on_targets(
    tmp_path: Path, environment: Environment
) -> None:
    file = tmp_path / "train.py"
    file.write_text("import torch\n")
    with pytest.raises(BuildError, match="not a tar archive") as caught:
        look(f"docker-archive:{file}", environment)
    assert "--target" not in (caught.value.hint or "")


def test_names_that_are_no_paths_are_all_told_where_no_daemon_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    here = load_environment({"ENVBUILD_STORE": str(tmp_path), "DOCKER_HOST": f"unix://{tmp_path}/no"})
    with (
        pytest.raises(HostError, match="neither old nor new is a file or folder") as caught,
        open_artifacts(["old", "new"], here, None),
    ):
        pass
    assert str(caught.value.hint).startswith("correct the path; ")


def test_venvs_of_other_tools_are_read_too(tmp_path: Path, environment: Environment) -> None:
    files = {"pyvenv.cfg": "home = /usr/bin\nversion = 3.12.4\n", **lab.package("a_b.C", "1.0", {})}
    found = look(lab.make_venv(tmp_path / "venv", files), environment)
    assert found["python"]["version"] == "3.12" and found["recipe"] is None
    assert [p["name"] for p in found["python_packages"]] == ["a-b-c"]


def test_a_receipt_beside_it_is_shown_with_whether_it_is_of_this_artifact(
    tmp_path: Path, environment: Environment
) -> None:
    folder = lab.make_venv(tmp_path / "venv", lab.frame())
    assert look(folder, environment)["receipt"] is None
    digest = look(folder, environment)["digest"]
    receipt = {
        "passed": True,
        "artifact": {"digest": digest, "pushed": "r.example/x@sha256:1"},
        "plan": {"digest": "sha256:p"},
        "verified_at": "now",
    }
    place = tmp_path / "venv.receipt.json"
    place.write_text(json.dumps(receipt))
    expected = {
        "path": str(place),
        "passed": True,
        "matches": True,
        "changed": [],
        "verified_at": "now",
        "pushed": "r.example/x@sha256:1",
    }
    assert look(folder, environment)["receipt"] == expected
    place.write_text(json.dumps({**receipt, "artifact": {"digest": "sha256:other"}}))
    assert look(folder, environment)["receipt"]["matches"] is False


@given(st.binary(max_size=400))
@pytest.mark.parametrize(
    "path",
    [
        "lib/site-packages/a-1.dist-info/METADATA",
        "lib/site-packages/a-1.dist-info/RECORD",
        "usr/lib/python3/dist-packages/a-1.egg-info",
        "var/lib/dpkg/status",
        "var/lib/dpkg/status.d/base",
        "etc/os-release",
    ],
)
def test_whatever_a_metadata_file_holds_it_is_read_and_can_be_kept(path: str, data: bytes) -> None:
    reader = interest(path)
    assert reader is not None
    json.dumps(reader(data))


@given(st.permutations(["a/x.py,sha256=1,1", "b.py,sha256=2,2", '"c,d.py",sha256=3,3']))
def test_records_of_two_installers_are_the_same_but_for_their_own_rows(rows: list[str]) -> None:
    own = [
        "../../../bin/tool,sha256=9,9",
        "a-1.dist-info/INSTALLER,sha256=7,2",
        "a-1.dist-info/RECORD,,",
        "a/__pycache__/x.cpython-311.pyc,,",
    ]
    plain = ["a/x.py,sha256=1,1", "b.py,sha256=2,2", '"c,d.py",sha256=3,3']
    assert portable_digest("\r\n".join([*rows, *own]).encode()) == portable_digest("\n".join(plain).encode())
    changed = "\n".join([*plain[:2], '"c,d.py",sha256=4,3']).encode()
    assert portable_digest(changed) != portable_digest("\n".join(plain).encode())
    assert len(list(csv.reader(io.StringIO("\n".join(rows))))) == 3


def test_a_cut_layer_is_refused() -> None:
    with pytest.raises(BuildError):
        read_listing(io.BytesIO(b"x" * 700), "lab", "sha256:0", Quota())


LICENCES: list[dict[str, Any]] = [
    {"expression": "MIT OR Apache-2.0"},
    {"licenses": ("BSD License", "MIT")},
    {"expression": "not an (expression"},
    {},
]


@pytest.mark.parametrize("source_date", [None, 1700000000])
def test_the_bill_of_materials_is_valid_and_the_same_each_time(source_date: int | None) -> None:
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    from envbuild.inspect.facts import DebianPackage

    about = Description(
        "image",
        "x",
        "sha256:" + "a" * 64,
        "sha256:" + "b" * 64,
        recipe="pt_cpu",
        created="2026-01-02T03:04:05.123456789Z",
    )
    packages = tuple(PythonPackage(f"p{n}", "1.0+cpu", "opt", **kw) for n, kw in enumerate(LICENCES))
    twice = (*packages, packages[0])
    debian = (DebianPackage("libstdc++6", "1:2~3+b1", "amd64"),)
    contents = Inventory({}, twice, debian, os={"ID": "debian", "VERSION_ID": "12"})
    text = cyclonedx(about, contents, source_date)
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    assert text == cyclonedx(about, contents, source_date)
    bom = json.loads(text)
    time = "2026-01-02T03:04:05+00:00" if source_date is None else "2023-11-14T22:13:20+00:00"
    assert bom["metadata"]["timestamp"] == time
    assert bom["metadata"]["component"]["hashes"] == [{"alg": "SHA-256", "content": "b" * 64}]
    purls = {component["purl"] for component in bom["components"]}
    assert "pkg:pypi/p0@1.0%2Bcpu" in purls
    assert "pkg:deb/debian/libstdc%2B%2B6@1:2~3%2Bb1?arch=amd64&distro=debian-12" in purls
    other = json.loads(cyclonedx(Description("image", "x", "sha256:" + "c" * 64), contents, source_date))
    assert other["serialNumber"] != bom["serialNumber"]


@pytest.mark.parametrize(
    ("created", "expected"),
    [
        ("2026-01-02T01:04:05.123456789+02:00", "2026-01-01T23:04:05+00:00"),
        ("2026-01-02T01:04:05-05:30", "2026-01-02T06:34:05+00:00"),
        ("2026-01-02 01:04:05", "2026-01-02T01:04:05+00:00"),
        ("2026-01-02 01:04:05 +0000 UTC", "2026-01-02T01:04:05+00:00"),
        ("0001-01-01T00:00:00+02:00", "0001-01-01T00:00:00+00:00"),
        ("yesterday", "2020-01-01T00:00:00+00:00"),
    ],
)
def test_the_bill_of_materials_has_the_time_of_an_image_in_any_zone(created: str, expected: str) -> None:
    bom = json.loads(cyclonedx(Description("image", "x", created=created), Inventory({}), None))
    assert bom["metadata"]["timestamp"] == expected


def test_the_bill_of_materials_of_a_venv_does_not_depend_on_its_place(tmp_path: Path, environment: Environment) -> None:
    files = {**lab.frame(), **lab.package("a", "1", {}, extra="License-Expression: MIT\n")}
    texts = []
    for name in ("one", "two"):
        folder = lab.make_venv(tmp_path / name, files)
        with open_artifact(str(folder), environment, None) as opened:
            texts.append(cyclonedx(opened.about, opened.contents(hashes=False), None))
    assert texts[0] == texts[1] and '"expression": "MIT"' in texts[0]
