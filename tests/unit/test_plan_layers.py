"""Source-built layers in plans, records, environments and images: what they change, and what they leave as it was."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab.wheels import make_recipe, make_wheel

from envbuild.base.errors import BuildError, HostError, LockError, UsageError
from envbuild.build import image_layers, installing, prepare
from envbuild.build.installing import LayerFolder, layer_folder
from envbuild.contract import layer_lists
from envbuild.contract.installed import FileReport
from envbuild.contract.layer_lists import LayerFile, LayerList
from envbuild.contract.state import PREFIX, BuiltLayer, State, has_packages, parse_state
from envbuild.contract.verification import VerifySettings
from envbuild.debian.lock import DebianLock, LockedDeb
from envbuild.image.entry import DIR, SYMLINK, Entry
from envbuild.inspect.metadata import interest, source_built
from envbuild.layers import requested
from envbuild.layers.requested import RequestedLayers
from envbuild.layers.wheel import Scheme, WheelFile
from envbuild.lock import lifecycle
from envbuild.lock.base import builder_lock
from envbuild.lock.format import Lock
from envbuild.lock.image import ImageLock, render_image
from envbuild.plan import Plan, make_plan, state_of
from envbuild.recipe.load import LoadedRecipe, load_recipe
from envbuild.recipe.sources import HostLayer, LockedPackage, SourceLayer
from envbuild.recipe.targets import Target
from envbuild.run_environment import load_environment
from envbuild.store.store import Store
from envbuild.verify.elf_files import ElfReport
from envbuild.verify.static_checks import check_installed
from envbuild.verify.survey import Survey

TARGET = Target.parse("cpu-x86_64")
SOURCE = SourceLayer("libfoo", "1.0", TARGET.name, "autotools", "", "5" * 64, check=("foo", "--version"))
HOST = HostLayer("libfabric", "1.22.0", "/opt/cray/libfabric/1.22.0")
STATE = State(
    "venv",
    "r",
    "sha256:r",
    "sha256:l",
    "sha256:p",
    "cpu-x86_64",
    "3.11",
    "3.11.7",
    "/usr/bin/python3.11",
    (("numpy", "2.2.6", "sha256:n"),),
    VerifySettings(nodes=2),
    "0.1.0",
)


def loaded(folder: Path, extra: str = "") -> LoadedRecipe:
    return load_recipe(make_recipe(folder, "r", ["numpy==2.2.6"], extra=extra) / "recipe.toml")


def the_plan(recipe: LoadedRecipe, *sources: SourceLayer, hosts: tuple[HostLayer, ...] = ()) -> Plan:
    packages = (LockedPackage("numpy", "2.2.6", ("a" * 64,)),)
    lock = Lock("r", TARGET.name, "3.11", "x86_64-manylinux_2_28", "sha256:d", packages)
    return make_plan(
        recipe,
        lock,
        TARGET,
        artifact="venv",
        trainer_version="1",
        trainer_digest="sha256:t",
        sources=sources,
        host_layers=hosts,
    )


def built(folder: Path, source: SourceLayer = SOURCE, **files: str) -> LayerFolder:
    """A layer as a build leaves it: a library with its link, a program, a licence."""
    texts = {"lib/libfoo.so.1.0": "ELF", "bin/foo": "#!", **files}
    texts[f"share/licenses/{source.name}/COPYING"] = "free"
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "bin/foo").chmod(0o755)
    (folder / "lib/libfoo.so.1").symlink_to("libfoo.so.1.0")
    return layer_folder(source, folder)


def test_without_layers_plans_and_records_are_what_they_were_before_there_were_any(tmp_path: Path) -> None:
    plan = the_plan(loaded(tmp_path))
    assert plan.digest == "sha256:67e0919bd4f22e3d10cba32ed9558dc411555195dc3791a9fd4eeafdbc71fb8f"
    assert STATE.digest == "sha256:9a0fe996c9d4e12c6f253dba8fd3d88ccdd76a85d72174849d8cc3cb91b719da"
    told = hashlib.sha256(STATE.render().encode()).hexdigest()
    assert told == "be7b518e429d591d136fae4fd1980480dd6ef65a91f451b0041a46aa50aba6af"


def test_layers_stand_between_wheels_and_trainer_and_decide_the_plan(tmp_path: Path) -> None:
    recipe = loaded(tmp_path, 'fabric = "tcp-ofi"')
    plan = the_plan(recipe, SOURCE, hosts=(HOST,))
    kinds = [layer["kind"] for layer in plan.as_json()["layers"]]
    assert kinds == ["python", "wheel", "source", "host", "fabric", "trainer"]
    assert plan.as_json()["fabric"] == "tcp-ofi" and plan.layers[2].digest == SOURCE.digest
    others = [
        the_plan(recipe, hosts=(HOST,)),
        the_plan(recipe, SOURCE),
        the_plan(recipe, SOURCE, hosts=(dataclasses.replace(HOST, path="/usr"),)),
        the_plan(loaded(tmp_path), SOURCE, hosts=(HOST,)),
        *(
            the_plan(recipe, dataclasses.replace(SOURCE, **{name: value}), hosts=(HOST,))
            for name, value in (("environment", "gcc 13"), ("sha256", "6" * 64), ("configure", ("--with-x",)))
        ),
    ]
    assert len({other.digest for other in others} | {plan.digest}) == len(others) + 1
    # where it was fetched from is no part of what it is
    moved = dataclasses.replace(SOURCE, url="https://example.org/libfoo.tar.gz")
    assert the_plan(recipe, moved, hosts=(HOST,)).digest == plan.digest


def test_the_record_of_an_environment_tells_of_its_layers_and_is_read_back(tmp_path: Path) -> None:
    layer = built(tmp_path / "layer")
    plan = the_plan(loaded(tmp_path, 'fabric = "cxi"'), SOURCE, hosts=(HOST,))
    state = state_of(plan, python_version="3.11.2", interpreter="/p", packages=(), layers=[layer.built])
    assert parse_state(state.render().encode(), "x") == state and state.fabric == "cxi"
    one, other = state.layers
    assert one.files.startswith("sha256:") and one.check == ("foo", "--version") and not one.path
    assert other == BuiltLayer("libfabric", "1.22.0", "", "/opt/cray/libfabric/1.22.0")
    changed = (dataclasses.replace(one, files="sha256:0"), other)
    assert dataclasses.replace(state, layers=changed).digest != state.digest
    assert dataclasses.replace(state, layers=()).digest != state.digest
    assert parse_state(STATE.render().encode(), "x") == STATE
    for layers in ("x", [1], [{"name": "a"}], [{"name": "a", "version": "1", "files": "", "y": 1}]):
        data = {**json.loads(state.render()), "layers": layers}
        with pytest.raises(BuildError, match="invalid"):
            parse_state(json.dumps(data).encode(), "x")


NAMES = st.from_regex(r"[a-z0-9][a-z0-9_.+-]{0,9}", fullmatch=True)
PATHS = st.lists(
    st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1).filter(
        lambda part: part not in (".", "..")
    ),
    min_size=1,
    max_size=3,
).map("/".join)
FILES = st.one_of(
    st.builds(
        LayerFile,
        PATHS,
        st.integers(0, 1 << 40),
        st.text("0123456789abcdef", min_size=64, max_size=64),
        executable=st.booleans(),
    ),
    st.builds(LayerFile, PATHS, target=PATHS),
)
LISTS = st.builds(LayerList, NAMES, NAMES, NAMES, st.lists(FILES, unique_by=lambda one: one.path).map(tuple))


@given(LISTS)
def test_a_list_is_read_back_as_it_was_written(listed: LayerList) -> None:
    again = layer_lists.parse_list(listed.render())
    assert again == listed and again.digest == listed.digest


@given(
    st.one_of(
        st.binary(max_size=60),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=5),
            lambda inner: (
                st.lists(inner)
                | st.dictionaries(
                    st.sampled_from(["format", "name", "version", "source", "licences", "files", "path"]), inner
                )
            ),
            max_leaves=12,
        ).map(lambda value: json.dumps(value).encode()),
    )
)
def test_any_other_text_is_no_list_and_tells_nothing(text: bytes) -> None:
    read = interest("opt/env/share/envbuild/layers/x.json")
    assert read is not None
    note = read(text)
    assert note is None or set(note) == {"name", "version", "source", "files", "licences"}


def test_a_list_cannot_name_what_lies_outside() -> None:
    row = {"path": "../../etc/passwd", "size": 1, "sha256": "0" * 64}
    data = {"format": 1, "name": "x", "version": "1", "source": "", "licences": [], "files": [row]}
    with pytest.raises(ValueError, match="not below"):
        layer_lists.parse_list(json.dumps(data).encode())


def test_an_installed_layer_is_a_copy_and_every_change_of_it_is_seen(tmp_path: Path) -> None:
    layer, root = built(tmp_path / "layer"), tmp_path / "env"
    root.mkdir()
    (told,) = installing.install_layers([layer], root)
    assert told == layer.built
    library, program = root / "lib/libfoo.so.1.0", root / "bin/foo"
    assert os.readlink(root / "lib/libfoo.so.1") == "libfoo.so.1.0"
    assert library.stat().st_ino != (layer.folder / "lib/libfoo.so.1.0").stat().st_ino
    assert program.stat().st_mode & 0o777 == 0o755 and library.stat().st_mode & 0o777 == 0o644

    def survey() -> tuple[FileReport, dict[str, str]]:
        report = FileReport()
        return report, layer_lists.check_layers(root, report)

    report, found = survey()
    assert found == {"libfoo": told.files} and report.files == 4
    assert not report.missing and not report.altered
    library.write_text("elf")  # of the same size
    program.unlink()
    (root / "lib/libfoo.so.1").unlink()
    (root / "lib/libfoo.so.1").symlink_to("/usr/lib/libfoo.so.1")
    report, found = survey()
    assert report.missing == ["bin/foo (layer libfoo)"] and found == {"libfoo": told.files}
    assert report.altered == ["lib/libfoo.so.1 (layer libfoo)", "lib/libfoo.so.1.0 (layer libfoo)"]
    state = dataclasses.replace(STATE, layers=(told,))
    found = [(name, version) for name, version, _ in state.packages]
    assert has_packages(root, state, found)
    assert not has_packages(root, state, [*found, ("numpy", "9.9")])
    (root / "share/envbuild/layers/libfoo.json").unlink()
    assert survey()[1] == {} and not has_packages(root, state, found)


def test_the_check_of_what_is_installed_wants_each_list_as_it_was() -> None:
    layer = BuiltLayer("libfoo", "1.0", "sha256:good")
    outside = BuiltLayer("libfabric", "1.22.0", "", "/opt/cray")
    subject: Any = type("Subject", (), {"state": dataclasses.replace(STATE, packages=(), layers=(layer, outside))})
    for layers, said in (
        ({"libfoo": "sha256:good"}, None),
        ({"libfoo": "sha256:bad"}, "layer libfoo: the list of its files is not the one"),
        ({}, "layer libfoo: the list of its files is not the one"),
        ({"libfoo": "sha256:good", "other": "sha256:x"}, "layer other: not in the recipe"),
    ):
        found = Survey({}, FileReport(), ElfReport({"x86_64": 1}), layers)
        check = check_installed(subject, found)
        assert check.status == ("fail" if said else "pass")
        assert (said or "1 source-built layer,") in check.seen


@pytest.mark.parametrize("owner", ["wheel", "conda package", "layer", "environment"])
def test_a_path_that_something_else_has_already_is_an_error_that_names_both(owner: str, tmp_path: Path) -> None:
    root, layer = tmp_path / "env", built(tmp_path / "layer")
    (root / "lib").mkdir(parents=True)
    named = "the environment"
    if owner == "layer":
        other = dataclasses.replace(SOURCE, name="libbar", version="7")
        installing.install_layers([built(tmp_path / "other", other)], root)
        named = "layer libbar 7"
    elif owner == "wheel":
        info = root / "lib/python3.11/site-packages/foo_tools-2.0.dist-info"
        info.mkdir(parents=True)
        (info / "RECORD").write_text("../../../lib/libfoo.so.1.0,sha256=x,3\n")
        named = "foo_tools 2.0"
    elif owner == "conda package":
        (root / "conda-meta").mkdir()
        told = {"name": "foo", "version": "3", "files": ["lib/libfoo.so.1.0"]}
        (root / "conda-meta/foo-3-0.json").write_text(json.dumps(told))
        named = "conda package foo 3"
    if owner == "layer":
        (root / "bin/foo").unlink()
    else:
        (root / "lib/libfoo.so.1.0").write_text("theirs")
    with pytest.raises(BuildError) as refused:
        installing.install_layers([layer], root)
    assert "layer libfoo 1.0 and " in refused.value.message and named in refused.value.message
    assert refused.value.hint and "[layers.libfoo]" in refused.value.hint


def test_in_images_too_no_two_things_may_have_one_path(tmp_path: Path) -> None:
    store, scheme = Store(tmp_path / "store"), Scheme(PREFIX, "3.11")
    path = make_wheel(tmp_path, "tool", files={"tool-1.0.data/data/lib/libfoo.so.1": b"x"})
    wheel = WheelFile("tool", "1.0", path, hashlib.sha256(path.read_bytes()).hexdigest(), 1)
    layer = built(tmp_path / "layer")
    for _ in range(2):  # the answer is kept only where it is good
        with pytest.raises(BuildError, match=r"layer libfoo 1.0 and tool 1.0 both have lib/libfoo"):
            image_layers.check_paths([layer], [wheel], [], scheme, store)
    path = make_wheel(tmp_path, "good")
    fine = WheelFile("good", "1.0", path, hashlib.sha256(path.read_bytes()).hexdigest(), 1)
    image_layers.check_paths([layer], [fine], [], scheme, store)
    path.unlink()
    image_layers.check_paths([layer], [fine], [], scheme, store)  # it is known
    twin = built(tmp_path / "twin", dataclasses.replace(SOURCE, name="libbar"))
    with pytest.raises(BuildError, match=r"layer libbar 1.0 and layer libfoo 1.0 both have bin/foo"):
        installing.check_free([layer, twin], ())


def test_the_layer_of_an_image_is_the_same_whoever_built_it_and_changes_with_its_files(tmp_path: Path) -> None:
    os.umask(before := os.umask(0o077))
    layer = built(tmp_path / "one")
    os.umask(0o077)
    try:
        same = built(tmp_path / "two")
    finally:
        os.umask(before)
    scheme = Scheme(PREFIX, "3.11")
    part = image_layers.layer_part(layer, scheme, None, 1577836800)
    again = image_layers.layer_part(same, scheme, None, 1577836800)
    assert part.key == again.key and part.title == "libfoo 1.0"

    def items(of: Any) -> list[tuple[Entry, bytes]]:
        return [(entry, stream.read() if stream else b"") for entry, stream in of.tree()]

    assert items(part) == items(again)
    entries = {entry.path: entry for entry, _ in items(part)}
    assert {(e.uid, e.gid, e.mtime) for e in entries.values()} == {(0, 0, 1577836800)}
    assert entries["opt/env/lib/libfoo.so.1"].kind == SYMLINK
    assert entries["opt/env/bin/foo"].mode == 0o755 and entries["opt/env/lib"].kind == DIR
    files = [entry.path for entry, _ in items(part) if entry.kind != DIR]
    assert files[:-1] == sorted(files[:-1]) and files[-1].endswith("/layers/libfoo.json")
    changed = built(tmp_path / "three", **{"lib/libfoo.so.1.0": "ELF 2"})
    assert image_layers.layer_part(changed, scheme, None, 1577836800).key != part.key
    assert image_layers.layer_part(layer, scheme, None, 1577836801).key != part.key


def test_what_is_no_file_or_nothing_at_all_is_no_layer(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(BuildError, match=r"libfoo 1.0: its build installed nothing"):
        layer_folder(SOURCE, tmp_path / "empty")
    os.mkfifo(tmp_path / "empty/pipe")
    with pytest.raises(BuildError, match="pipe is neither file nor link"):
        layer_folder(SOURCE, tmp_path / "empty")


def test_a_layer_that_is_a_python_package_is_told_as_one(tmp_path: Path) -> None:
    info = "lib/python3.11/site-packages/Horo_vod-0.28.1.dist-info"
    layer = built(tmp_path, **{f"{info}/RECORD": "", f"{info}/METADATA": ""})
    assert layer.distributions == {("horo-vod", "0.28.1")}


def test_lists_of_layers_are_found_wherever_an_environment_lies(tmp_path: Path) -> None:
    text = built(tmp_path).listed.render()
    notes: dict[str, Any] = {}
    for place in ("", "opt/env/"):
        path = f"{place}share/envbuild/layers/libfoo.json"
        read = interest(path)
        assert read is not None
        notes[path] = read(text)
    one, other = source_built(notes)
    assert (one.location, other.location) == ("", "opt/env") and one.source == "5" * 64
    assert one.licences == ("share/licenses/libfoo/COPYING",)
    assert interest("usr/share/envbuild/layers.json") is None


BASE_IMAGE = '[image]\nbase = "docker.io/library/x:1"\npython = "/usr/bin/python3.11"\n'


def test_an_existing_base_without_compilers_is_an_error_with_its_line(tmp_path: Path) -> None:
    recipe = loaded(tmp_path, BASE_IMAGE)
    with pytest.raises(UsageError, match=r"recipe\.toml:\d+.*no image is set to build libfoo") as no:
        builder_lock(recipe, TARGET, [SOURCE])
    assert no.value.hint and "build_base" in no.value.hint
    good = loaded(tmp_path, BASE_IMAGE + 'build_base = "docker.io/library/x:1-devel"\n')
    assert builder_lock(good, TARGET, [SOURCE]).file == "cpu-x86_64.build.toml"


def test_the_builders_lock_follows_the_image_and_what_the_layers_need(tmp_path: Path) -> None:
    environment = load_environment({"HOME": os.fspath(tmp_path), "ENVBUILD_STORE": os.fspath(tmp_path / "store")})
    said: list[str] = []

    def ensure(recipe: LoadedRecipe, *sources: SourceLayer, **options: bool) -> ImageLock:
        chosen = {"locked": False, "offline": True, **options}
        kind = builder_lock(recipe, TARGET, sources)
        return lifecycle.ensure(kind, environment, log=said.append, **chosen)

    recipe = loaded(tmp_path)
    with pytest.raises(LockError, match=r"cpu-x86_64\.build\.toml: no lock of the builder.*--offl"):
        ensure(recipe, SOURCE)
    with pytest.raises(LockError, match="no lock of the builder") as refused:
        ensure(recipe, SOURCE, locked=True)
    command = f"`envbuild lock {recipe.folder} --target cpu-x86_64 --image`"
    assert refused.value.hint and command in refused.value.hint
    deb = LockedDeb("gcc", "12", "amd64", "pool/gcc.deb", "a" * 64, 1, "debian")
    base = DebianLock("bookworm", "2024-02-29T23:59:59Z", (deb,))
    kind = builder_lock(recipe, TARGET, [SOURCE])
    lock = ImageLock("r", TARGET.name, kind.digest, base)
    place = recipe.folder / kind.file
    place.write_text(render_image(lock))
    assert ensure(recipe, SOURCE, locked=True) == lock and not said
    # A layer's version is none of its business, what it needs to be built is.
    assert ensure(recipe, dataclasses.replace(SOURCE, version="2.0")) == lock
    for other in (
        (loaded(tmp_path, '[image]\nbuild_packages = ["libhwloc-dev"]'), SOURCE),
        (loaded(tmp_path, '[image]\npackages = ["openssh-client"]'), SOURCE),
        (recipe, dataclasses.replace(SOURCE, packages=("libnuma-dev",))),
    ):
        with pytest.raises(LockError, match="stale: what the layers need to be built changed"):
            ensure(*other, locked=True)


def test_layers_for_another_processor_are_not_built_here(tmp_path: Path) -> None:
    other = {"x86_64": "aarch64", "aarch64": "x86_64"}[os.uname().machine]
    layer = dataclasses.replace(SOURCE, target=f"cpu-{other}")
    environment = load_environment({"HOME": str(tmp_path), "ENVBUILD_STORE": str(tmp_path / "s")})
    with (
        pytest.raises(HostError, match=f"the store lacks some of libfoo for {other}") as refused,
        prepare.open_build_host(RequestedLayers((layer,)), tmp_path, environment, tmp_path, offline=False),
    ):
        pass
    assert refused.value.hint and "envbuild layers" in refused.value.hint


def test_a_python_project_is_compiled_again_for_other_packages_and_nothing_else_is() -> None:
    project = dataclasses.replace(SOURCE, name="project", system="wheel", environment="gcc 12")
    declared = RequestedLayers((SOURCE, project))
    packages = (LockedPackage("torch", "2.13.0+cpu", ("a" * 64,)),)
    lock = Lock("r", TARGET.name, "3.11", "x86_64-manylinux_2_28", "sha256:d", packages)
    foo, first = requested.bind_to_lock(declared, lock).sources
    assert foo == SOURCE and first.environment.startswith("gcc 12; packages ")
    # What does not change the packages does not compile for minutes.
    same = dataclasses.replace(lock, recipe="other", recipe_digest="sha256:e")
    assert requested.bind_to_lock(declared, same).sources == (foo, first)
    for other in (
        dataclasses.replace(lock, packages=(LockedPackage("torch", "2.13.0+cpu", ("b" * 64,)),)),
        dataclasses.replace(lock, python="3.12"),
    ):
        assert requested.bind_to_lock(declared, other).sources[1].digest != first.digest


def test_what_a_python_project_is_needed_for_waits_for_it() -> None:
    project = dataclasses.replace(SOURCE, name="project", system="wheel")
    on_it = dataclasses.replace(SOURCE, name="on-it", requires=("project",))
    more = dataclasses.replace(SOURCE, name="more", requires=("on-it",))
    first = requested.before_environment(RequestedLayers((SOURCE, project, on_it, more), (HOST,)))
    assert first == RequestedLayers((SOURCE,), (HOST,))


def test_what_no_image_can_have_is_refused_before_a_lock_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = dataclasses.replace(SOURCE, requires=("libfabric",))
    monkeypatch.setattr(requested, "requested_layers", lambda *_: RequestedLayers((layer,), (HOST,)))
    environment = load_environment({"HOME": str(tmp_path), "ENVBUILD_STORE": str(tmp_path / "s")})
    recipe = loaded(tmp_path)
    with pytest.raises(UsageError, match="libfoo is built with libfabric, which only the nodes have") as refused:
        requested.for_image(recipe, TARGET, environment, locked=False, offline=True, log=print)
    assert refused.value.hint and not (tmp_path / "s").exists()
