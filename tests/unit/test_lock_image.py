"""The image lock: what is written is read back, faults are named, and it is renewed when it has to be."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab.wheels import make_recipe

from envbuild.base.errors import LockError
from envbuild.base.toml import Document
from envbuild.debian.lock import DebianLock, LockedDeb
from envbuild.environment import Environment
from envbuild.image.layer import write_layer
from envbuild.image.layout import Blobs, fill_layout
from envbuild.image.model import OCI_CONFIG, OCI_MANIFEST, Descriptor, ImageManifest, canonical, parse
from envbuild.lock import lifecycle
from envbuild.lock.base import image_lock
from envbuild.lock.image import (
    ImageLock,
    OciLock,
    image_changes,
    image_lock_name,
    parse_image,
    read_image,
    render_image,
)
from envbuild.locks import needed_locks
from envbuild.recipe.load import LoadedRecipe, decode_recipe, load_recipe
from envbuild.recipe.targets import Target
from envbuild.run_environment import load_environment

TARGET = Target.parse("cpu-x86_64")
HEX = st.text("0123456789abcdef", min_size=64, max_size=64)
DIGESTS = HEX.map("sha256:{}".format)
DEBS = st.builds(
    LockedDeb,
    name=st.from_regex(r"[a-z0-9][a-z0-9+.\-]{1,9}", fullmatch=True),
    version=st.from_regex(r"[0-9A-Za-z.+~:\-]{1,9}", fullmatch=True),
    arch=st.sampled_from(["all", "amd64"]),
    path=st.from_regex(r"pool/[A-Za-z0-9_+~%:\-]{1,9}\.deb", fullmatch=True),
    sha256=HEX,
    size=st.integers(1, 1 << 40),
    archive=st.sampled_from(["debian", "debian-security"]),
)
BASES = st.one_of(
    st.builds(
        DebianLock,
        st.sampled_from(["bookworm", "trixie"]),
        st.just("2024-02-29T23:59:59Z"),
        st.lists(DEBS, min_size=1, max_size=5, unique_by=lambda deb: deb.name).map(
            lambda debs: tuple(sorted(debs, key=lambda deb: deb.name))
        ),
    ),
    # Local references are paths, in which nearly every character may stand.
    st.builds(OciLock, st.text(st.characters(exclude_categories=["Cs"]), min_size=1), DIGESTS),
)
LOCKS = st.builds(ImageLock, st.sampled_from(["pt_cpu", "a.b-c"]), st.just("cpu-x86_64"), DIGESTS, BASES)


@given(LOCKS)
def test_what_is_written_is_read_back(lock: ImageLock) -> None:
    again = parse_image(render_image(lock), "x")
    assert again == lock and again.digest == lock.digest
    assert image_changes(again, lock) == []


@given(st.text(st.sampled_from("[]debianoci.\n=\"'{}, 12#\x7fé"), max_size=60))
def test_any_text_is_a_lock_or_a_clear_error(text: str) -> None:
    with pytest.raises(LockError, match=r"^x:"):
        parse_image(text, "x")


DEB = LockedDeb("bash", "5.2-2+b7", "amd64", "pool/main/b/bash.deb", "a" * 64, 12)
OCI = ImageLock("r", "cpu-x86_64", "sha256:" + "0" * 64, OciLock("reg/a:1", "sha256:" + "1" * 64))
DEBIAN = replace(OCI, base=DebianLock("bookworm", "2024-01-01T00:00:00Z", (DEB,)))


def test_the_file_says_how_it_was_made_and_holds_no_place() -> None:
    for lock in (OCI, DEBIAN):
        text = render_image(lock)
        first, rest = text.split("\n", 1)
        assert first == "# envbuild image lock; made by: envbuild lock r --target cpu-x86_64"
        assert tomllib.loads(rest)["format"] == 1 and "://" not in text


@pytest.mark.parametrize(
    ("lock", "old", "new", "told"),
    [
        (OCI, "format = 1\n", "", "missing key 'format'"),
        (OCI, "format = 1\n", "format = 2\n", "format 2; this envbuild reads 1"),
        (OCI, "format = 1\n", "format = true\n", "'format': expected an integer, got a boolean"),
        (OCI, "format = 1\n", 'format = "1"\n', ":2:1: 'format': expected an integer, got a string"),
        (OCI, 'recipe = "r"\n', "", "missing key 'recipe'"),
        (OCI, 'recipe = "r"\n', "recipe = 7\n", ":3:1: 'recipe': expected a string"),
        (OCI, 'recipe = "r"\n', 'recipe = ""\n', "'recipe': '' does not match"),
        (OCI, 'target = "cpu-x86_64"\n', "target = []\n", "'target': expected a string, got an array"),
        (OCI, "recipe-digest", "recipe_digest", "unknown key 'recipe_digest'"),
        (OCI, "[oci]", "[oci]\nextra = 1", r"unknown key 'extra' in \[oci\]"),
        (OCI, "[oci]", "[image]", "unknown key 'image'"),
        (OCI, '[oci]\nreference = "reg/a:1"\ndigest', "oci", "'oci': expected a table, got a string"),
        (OCI, "sha256:1", "sha256:g", "is not a sha256 digest"),
        (OCI, "sha256:1", "sha512:1", "is not a sha256 digest"),
        (OCI, 'digest = "sha256:1', 'digest = 5 #"', r"'digest' in \[oci\]: expected a string"),
        (OCI, 'reference = "reg/a:1"\n', "", r"missing key 'reference' in \[oci\]"),
        (OCI, "[oci]", "[debian]\n[oci]", r"missing key 'suite' in \[debian\]"),
        (OCI, "[oci]", "[[oci]]", "'oci': expected a table, got an array"),
        (OCI, "[oci]", "[oci", r"not an image lock: .* \(at line 7"),
        (OCI, "format = 1", "format = 1\nformat = 1", "Cannot overwrite"),
        (OCI, "format = 1", "format = " + "[" * 100_000, "nested too deeply"),
        (OCI, "format = 1", "format = " + "9" * 5000, "4300 digits"),
        (DEBIAN, "[debian]", 'debian = "x"\n[other]', "unknown key 'other'"),
        (DEBIAN, 'suite = "bookworm"', "suite = 12", "suite"),
        (DEBIAN, "size = 12", "size = -1", r":11:.*'size' in \[debian.package.0\]: expected at least 1"),
        (DEBIAN, "size = 12", "size = 12, more = 1", r"unknown key 'more'"),
        (DEBIAN, "a" * 64, "a" * 63, "sha256"),
        (DEBIAN, 'path = "pool', 'path = "../pool', "path"),
        (DEBIAN, "package = [", "package = 7 #", r"not an image lock|:10:"),
        (DEBIAN, "package = [", "package = []\nother = [", "expected at least 1, got 0"),
        (DEBIAN, 'archive = "debian"', 'archive = "ubuntu"', "archive"),
    ],
)
def test_a_faulty_lock_is_refused_with_the_file_and_the_fault(lock: ImageLock, old: str, new: str, told: str) -> None:
    text = render_image(lock)
    assert old in text
    with pytest.raises(LockError, match=rf"(?s)^where/x\.image\.toml.*{told}") as refused:
        parse_image(text.replace(old, new, 1), "where/x.image.toml")
    assert refused.value.exit_code == 3


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    place = tmp_path / "x.image.toml"
    assert read_image(place) is None
    place.write_bytes(b"\xff\xfe")
    with pytest.raises(LockError, match=f"{place}: cannot be read"):
        read_image(place)
    place.unlink()
    place.mkdir()
    with pytest.raises(LockError, match=f"{place}: cannot be read"):
        read_image(place)


def debs(*packages: tuple[str, str, str], suite: str = "bookworm") -> ImageLock:
    rows = tuple(replace(DEB, name=n, version=v, sha256=s * 64) for n, v, s in packages)
    return replace(DEBIAN, base=DebianLock(suite, "2024-01-01T00:00:00Z", rows))


ONE = "sha256:" + "1" * 64
TWO = "sha256:" + "2" * 64


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (None, debs(("a", "1", "a")), ["+ a 1"]),
        (debs(("a", "1", "a")), debs(("a", "1", "a")), []),
        (
            debs(("a", "1", "a"), ("b", "1", "b"), ("d", "1", "d")),
            debs(("b", "2", "b"), ("c", "1", "c"), ("d", "1", "e")),
            ["- a 1", "~ b 1 -> 2", "+ c 1", "~ d 1: another file"],
        ),
        (
            debs(("a", "1", "a")),
            debs(("a", "2", "a"), suite="trixie"),
            ["~ base debian:bookworm -> debian:trixie", "~ a 1 -> 2"],
        ),
        (None, OCI, [f"~ reg/a:1 nothing -> {ONE}"]),
        (OCI, OCI, []),
        (OCI, replace(OCI, base=OciLock("reg/a:1", TWO)), [f"~ reg/a:1 {ONE} -> {TWO}"]),
        (OCI, replace(OCI, base=OciLock("reg/b:1", ONE)), [f"~ reg/b:1 reg/a:1 {ONE} -> {ONE}"]),
        (DEBIAN, OCI, [f"~ reg/a:1 debian:bookworm -> {ONE}"]),
        (OCI, DEBIAN, ["~ base reg/a:1 -> debian:bookworm", "+ bash 5.2-2+b7"]),
    ],
)
def test_what_an_update_changed_is_told_line_by_line(old: ImageLock | None, new: ImageLock, told: list[str]) -> None:
    assert image_changes(old, new) == told


def test_the_digest_is_of_what_the_base_is_and_not_of_where_it_comes_from() -> None:
    assert replace(OCI, base=OciLock("mirror/a:1", ONE)).digest == OCI.digest
    assert replace(OCI, base=OciLock("reg/a:1", TWO)).digest != OCI.digest
    moved = replace(DEB, path="pool/updates/b.deb", archive="debian-security")
    later = DebianLock("bookworm", "2025-01-01T00:00:00Z", (moved,))
    assert replace(DEBIAN, base=later).digest == DEBIAN.digest
    for field, value in (("name", "sh"), ("version", "6"), ("sha256", "b" * 64)):
        other: dict[str, Any] = {field: value}
        changed = DebianLock("bookworm", "2024-01-01T00:00:00Z", (replace(DEB, **other),))
        assert replace(DEBIAN, base=changed).digest != DEBIAN.digest


# Resolving, with a real base that needs no network: an OCI layout beside the recipe.


def layout(folder: Path, label: str) -> str:
    """Write an OCI layout of one empty image and return the digest of its manifest."""
    blobs = Blobs(folder.with_name(f"blobs of {label}"))
    layer = write_layer([], blobs)
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Labels": {"is": label}},
        "rootfs": {"type": "layers", "diff_ids": [layer.diff_id]},
    }
    raw = canonical(config)
    manifest = {
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST,
        "config": Descriptor(OCI_CONFIG, blobs.add(raw), len(raw)).as_json(),
        "layers": [layer.blob.as_json()],
    }
    made = parse(canonical(manifest), "it")
    assert isinstance(made, ImageManifest) and blobs.add(made.raw) == made.digest
    folder.mkdir(exist_ok=True)
    fill_layout(folder, blobs, [(made.descriptor, "latest")])
    return made.digest


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return load_environment({"HOME": os.fspath(tmp_path), "ENVBUILD_STORE": os.fspath(tmp_path / "store")})


def recipe_on(folder: Path, base: str, extra: str = "") -> LoadedRecipe:
    image = f'[image]\nbase = "{base}"\npython = "/usr/bin/python3.11"\n{extra}'
    return load_recipe(make_recipe(folder, "r", ["a"], extra=image) / "recipe.toml")


def ensure(recipe: LoadedRecipe, environment: Environment, said: list[str], **options: bool) -> ImageLock:
    chosen: Mapping[str, bool] = {"locked": False, "offline": False, **options}
    return lifecycle.ensure(image_lock(recipe, TARGET), environment, log=said.append, **chosen)


def test_a_missing_lock_is_made_once_and_a_stale_one_again(tmp_path: Path, environment: Environment) -> None:
    said: list[str] = []
    (tmp_path / "r").mkdir()
    digest = layout(tmp_path / "r/base", "one")
    recipe = recipe_on(tmp_path, "oci:base")
    place = tmp_path / "r" / image_lock_name("cpu-x86_64")
    lock = ensure(recipe, environment, said)
    assert lock.base == OciLock("oci:base", digest) and read_image(place) == lock
    assert said[0] == f"{place}: no image lock for this target yet; resolving the base of cpu-x86_64 …"
    assert said[-1].endswith("1 changed")
    said.clear()
    assert ensure(recipe, environment, said, locked=True, offline=True) == lock and not said
    # what does not decide the base does not make it stale, what does does
    assert ensure(recipe_on(tmp_path, "oci:base", 'workdir = "/w"'), environment, said) == lock
    assert not said
    second = layout(tmp_path / "r/other", "two")
    changed = recipe_on(tmp_path, "oci:other")
    for options in ({"locked": True}, {"offline": True}, {"locked": True, "offline": True}):
        with pytest.raises(LockError, match=f"{place}: stale: the recipe's base changed") as refused:
            ensure(changed, environment, said, **options)
        hint = refused.value.hint
        assert hint and f"`envbuild lock {recipe.folder} --target cpu-x86_64 --image`" in hint
        assert ("--offline" in refused.value.message) == ("locked" not in options)
        assert read_image(place) == lock and not said
    assert ensure(changed, environment, said).base == OciLock("oci:other", second)
    assert said[1] == f"  ~ oci:other oci:base {digest} -> {second}"


@pytest.mark.parametrize("options", [{"locked": True}, {"offline": True}])
def test_no_lock_is_made_when_none_may_be(options: dict[str, bool], tmp_path: Path, environment: Environment) -> None:
    recipe = recipe_on(tmp_path, "oci:base")
    with pytest.raises(LockError, match="no image lock for this target yet"):
        ensure(recipe, environment, [], **options)
    assert not (tmp_path / "r" / image_lock_name("cpu-x86_64")).exists()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"recipe": "another"}, r"locks another \(cpu-x86_64\) instead"),
        ({"target": "cpu-aarch64"}, r"locks r \(cpu-aarch64\) instead"),
        ({"recipe_digest": "sha256:" + "9" * 64}, "stale"),
    ],
)
def test_a_lock_of_something_else_is_not_taken(
    change: dict[str, Any], told: str, tmp_path: Path, environment: Environment
) -> None:
    recipe = recipe_on(tmp_path, "oci:base")
    good = replace(OCI, recipe_digest=recipe.image_digest(TARGET))
    place = recipe.folder / image_lock_name("cpu-x86_64")
    place.write_text(render_image(good))
    assert image_lock(recipe, TARGET).inspect().fault is None
    place.write_text(render_image(replace(good, **change)))
    with pytest.raises(LockError, match=told):
        ensure(recipe, environment, [], locked=True)


def test_a_base_that_is_not_there_is_an_error_and_the_old_lock_stays(tmp_path: Path, environment: Environment) -> None:
    recipe = recipe_on(tmp_path, "oci:base")
    place = recipe.folder / image_lock_name("cpu-x86_64")
    place.write_text(render_image(OCI))
    with pytest.raises(LockError, match="base"):
        ensure(recipe, environment, [])
    assert read_image(place) == OCI


def test_a_dry_run_tells_what_would_change_and_writes_nothing(tmp_path: Path, environment: Environment) -> None:
    (tmp_path / "r").mkdir()
    digest, said = layout(tmp_path / "r/base", "one"), list[str]()
    recipe = recipe_on(tmp_path, "oci:base")
    lock = lifecycle.update(
        image_lock(recipe, TARGET), environment, upgrade=None, offline=False, log=said.append, write=False
    ).lock
    assert lock.base == OciLock("oci:base", digest)
    assert "not written" in said[-1] and "1 would change" in said[-1]
    assert not list(tmp_path.rglob("*.image.toml"))


def test_a_recipe_that_may_not_be_written_has_its_lock_under_build(
    tmp_path: Path, environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "r").mkdir()
    layout(tmp_path / "r/base", "one")
    recipe = recipe_on(tmp_path, "oci:base")
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != recipe.folder and real(path, mode))
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    lock = ensure(recipe, environment, said)
    place = Path("build/r/cpu-x86_64") / image_lock_name("cpu-x86_64")
    assert read_image(place) == lock and said[-1].startswith(f"{place}: ")
    assert not list(recipe.folder.glob("*.image.toml"))
    said.clear()
    assert ensure(recipe, environment, said, locked=True) == lock and not said
    # what was committed beside the recipe counts first, as long as it is current
    beside = replace(lock, base=OciLock("oci:base", TWO))
    (recipe.folder / image_lock_name("cpu-x86_64")).write_text(render_image(beside))
    assert ensure(recipe, environment, said) == beside
    stale = replace(beside, recipe_digest=TWO)
    (recipe.folder / image_lock_name("cpu-x86_64")).write_text(render_image(stale))
    assert ensure(recipe, environment, said, locked=True) == lock


def test_a_lock_that_cannot_be_written_says_what_to_do(
    tmp_path: Path, environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "r").mkdir()
    layout(tmp_path / "r/base", "one")
    recipe = recipe_on(tmp_path, "oci:base")
    monkeypatch.setattr(os, "access", lambda path, mode: path != recipe.folder)
    monkeypatch.chdir(tmp_path)
    Path("build").symlink_to("/nowhere/at/all")
    with pytest.raises(LockError, match=r"^build/r/.*image\.toml: cannot be written") as refused:
        ensure(recipe, environment, [])
    assert refused.value.hint and "./recipes/NAME" in refused.value.hint


def test_a_python_without_a_debian_release_needs_no_image_lock(tmp_path: Path) -> None:
    for python, base, is_needed in (("3.11", "debian", True), ("3.12", "debian", False), ("3.12", "x:1", True)):
        extra = "" if base == "debian" else f'base = "{base}"\npython = "/usr/bin/python3"\n'
        text = f'name = "lab"\ndescription = "d"\npython = "{python}"\nrequirements = []\n'
        text += f"[targets.cpu-x86_64]\n[image]\n{extra}"
        recipe = decode_recipe(Document(tmp_path / "recipe.toml", text, tomllib.loads(text)))
        assert ("image" in {one.part for one in needed_locks(recipe, TARGET)}) == is_needed
        assert [one.part for one in needed_locks(recipe, TARGET, ("image",))] == ["image"]
