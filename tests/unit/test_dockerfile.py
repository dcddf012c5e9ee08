"""The Dockerfiles against the recipes they name, and what drives them, without a daemon."""

from __future__ import annotations

import csv
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab.wheels import make_recipe, make_wheel

from envbuild.artifacts import dockerfile, layers_stage
from envbuild.artifacts.dockerfile import SOURCES, stage_files
from envbuild.artifacts.image import PreparedImage
from envbuild.artifacts.layer_lists import LayerFile, LayerList
from envbuild.artifacts.pip_records import PipEnvironment, built_layers, check_installed, record_differences
from envbuild.base.errors import BuildError, HostError, UsageError
from envbuild.environment import Environment, load_environment
from envbuild.kinds.dockerfile import prepare_dockerfile
from envbuild.layers.compose import PREFIX, WheelFile
from envbuild.layers.source_standalone import describe, read_description
from envbuild.layers.trainer import load_trainer
from envbuild.layers.wheel import Scheme, wheel_record
from envbuild.lock.format import Lock, LockedPackage, parse, render
from envbuild.lock.image import ImageLock, OciLock
from envbuild.plan.plan import ImageInputs, Plan, make_plan
from envbuild.recipe.load import load_recipe
from envbuild.recipe.sources import Patch, SourceLayer
from envbuild.recipe.targets import Target
from envbuild.site.tables import RegistryTable

ROOT = Path(__file__).resolve().parents[2]
CPU, GPU = ((ROOT / f"Dockerfile.{name}").read_text() for name in ("cpu", "gpu"))
SCHEME = Scheme(PREFIX, "3.11")
LAYER = SourceLayer(
    "greet",
    "1.0",
    "cpu-x86_64",
    "autotools",
    "https://example.org/greet-1.0.tar.gz",
    "5" * 64,
    patches=(Patch("/home/someone/fix.patch", "6" * 64),),
    packages=("make", "no-such-package-x"),
)


def argument(text: str, name: str) -> str:
    found = re.search(rf"^ARG {name}=(.*)$", text, re.MULTILINE)
    assert found, name
    return found[1]


def test_the_defaults_of_dockerfile_cpu_are_those_of_its_recipe() -> None:
    recipe, target = argument(CPU, "RECIPE"), argument(CPU, "TARGET")
    text = (ROOT / "recipes" / recipe / f"{target}.requirements.txt").read_text()
    locked = parse(text, recipe)
    assert argument(CPU, "TORCH") == locked.versions["torch"]
    assert f"python:{locked.python}-" in argument(CPU, "BASE")
    loaded = load_recipe(ROOT / "recipes" / recipe / "recipe.toml")
    assert argument(CPU, "EXTRA_INDEX_URL") in loaded.recipe.targets[target].indexes


@pytest.mark.parametrize("text", [CPU, GPU], ids=["cpu", "gpu"])
def test_a_dockerfile_pulls_no_syntax_image_and_keeps_secrets_out_of_what_is_left(text: str) -> None:
    assert not re.search(r"^#\s*syntax\s*=", text, re.MULTILINE)
    steps = re.findall(r"^(?:RUN|COPY|ENV|ARG|LABEL)\b(?:.*\\\n)*.*", text, re.MULTILINE)
    final = text[text.rindex("\nFROM ") :]
    assert "--mount" not in final and "/inputs" not in final
    for step in steps:
        if "/run/secrets" in step:
            assert step.startswith("RUN") and "--mount=type=secret" in step


def test_both_dockerfiles_install_in_the_same_words() -> None:
    def part(text: str) -> str:
        start = text.index("# pip gets an environment of its own")
        return re.sub(r"whl/\w+", "whl/X", text[start : text.rindex("\nFROM ")])

    assert part(CPU) == part(GPU)


def test_the_context_of_a_checkout_has_what_the_dockerfiles_copy() -> None:
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"]
    assert all((ROOT / name).exists() for name in allowed if name not in ("wheels", "sources"))
    for text in (CPU, GPU):
        sources = " ".join(re.findall(r"^COPY ([^-].*) \S+$", text, re.MULTILINE)).split()
        for source in sources:
            plain = source.replace("[s]", "s").replace("${RECIPE}", "x").replace("${TARGET}", "y")
            known = [n for n in allowed if f"{plain}/".startswith(f"{n}/") or n.startswith(f"{plain}/")]
            assert known, source


def copy_modules(modules: Sequence[str], folder: Path) -> None:
    for module in modules:
        (folder / "envbuild" / module).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "envbuild" / module, folder / "envbuild" / module)


def test_the_trainers_wheel_is_made_of_what_a_context_has(tmp_path: Path) -> None:
    copy_modules(SOURCES, tmp_path)
    trainer = load_trainer()
    for name, content in trainer.files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    program = "from envbuild.layers.trainer import load_trainer; print(load_trainer().digest)"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-B", "-c", f"import sys; sys.path.insert(0, '.'); {program}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == trainer.digest, done.stderr


def test_the_modules_of_a_stage_need_no_others_and_are_in_every_context(tmp_path: Path) -> None:
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    assert all(f"!envbuild/{module}" in allowed for module in SOURCES)
    copy_modules(layers_stage.MODULES, tmp_path)
    (tmp_path / "layers.json").write_text(describe([LAYER]))
    done = subprocess.run(
        [
            sys.executable,
            "-I",
            "-S",
            "-B",
            "-c",
            "import runpy, sys; sys.path.insert(0, '.');"
            "runpy.run_module('envbuild.artifacts.layers_stage', run_name='__main__', alter_sys=True)",
            "layers.json",
            ".",
            "prefix",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 4 and "no file in . has sha256" in done.stderr, done.stderr


def program(folder: Path, text: str) -> None:
    folder.mkdir()
    (folder / "docker").write_text(f"#!/bin/sh\n{text}\n")
    (folder / "docker").chmod(0o755)


def version(text: str, buildx: int) -> str:
    return f'[ "$1" = --version ] && {{ echo "Docker version {text}, build x"; exit 0; }}; exit {buildx}'


def test_the_first_docker_with_buildkit_is_taken(tmp_path: Path) -> None:
    """Docker 23 moved BuildKit from the command line into a plugin that may be missing."""
    for name, text in (
        ("bare", version("28.2.2", 1)),
        ("broken", "exit 127"),
        ("old", version("20.10.24+dfsg1", 1)),
        ("plugin", version("28.2.2", 0)),
    ):
        program(tmp_path / name, text)

    def found(*names: str) -> str:
        path = os.pathsep.join(str(tmp_path / name) for name in names)
        program = dockerfile.find_docker({"PATH": path, "DOCKER_CONTEXT": "elsewhere"}).program
        return Path(program).parent.name

    assert found("bare", "broken", "plugin", "old") == "plugin"
    assert found("bare", "nothing-there", "old", "plugin") == "old"
    with pytest.raises(HostError, match=r"buildx is missing from .*bare/docker \(Docker version 28"):
        found("bare", "broken")
    with pytest.raises(HostError, match="not installed"):
        found("nothing-there")


def test_command_line_and_sdk_speak_to_one_daemon(tmp_path: Path) -> None:
    program(tmp_path / "old", version("20.10.24", 1))
    env = {"PATH": str(tmp_path / "old"), "DOCKER_CONTEXT": "elsewhere"}
    assert dockerfile.find_docker(env).env["DOCKER_CONTEXT"] == "default"
    assert "DOCKER_CONTEXT" not in dockerfile.find_docker({**env, "DOCKER_HOST": "unix:///s"}).env


FAILED = """\
#11 [build 2/5] RUN --mount=type=bind a very long command
#11 DONE 4.3s
#12 [build 3/5] RUN --mount=type=bind another long command
#12 1.185 Looking in links: /inputs/wheels
#12 1.236 ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.
#12 ERROR: executor failed running [/bin/sh -c another long command]: exit code: 1
------
 > [build 3/5] RUN --mount=type=bind another long command:
------
executor failed running [/bin/sh -c another long command]: exit code: 1
"""


def test_of_a_failed_build_only_the_cause_is_shown() -> None:
    assert dockerfile.explain(FAILED.splitlines()) == (
        "  Looking in links: /inputs/wheels\n"
        "  ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE."
    )
    pull = ["#3 [internal] load metadata for x:1", "#3 ERROR: pull access denied", "------"]
    assert dockerfile.explain(pull) == "  ERROR: pull access denied"
    assert dockerfile.explain(["unknown flag: --iidfile"]) == "  unknown flag: --iidfile"


@given(st.lists(st.text() | st.from_regex(r"#[0-9]{1,2} ([0-9]\.[0-9] )?(ERROR: )?.*")))
def test_whatever_docker_prints_something_of_it_is_shown(lines: list[str]) -> None:
    shown = dockerfile.explain(lines)
    assert bool(shown) == any(lines)


PATHS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1).map("pkg/{}".format)
ROWS = st.dictionaries(PATHS, st.tuples(st.just("sha256=x"), st.just("1")), min_size=1)


def record_of(rows: dict[str, tuple[str, str]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows((path, *row) for path, row in rows.items())
    return text.getvalue().encode()


@given(ROWS, st.data())
def test_every_other_lost_or_added_file_is_a_difference(rows: dict[str, tuple[str, str]], data: st.DataObject) -> None:
    record = record_of(rows)
    notes = b"pkg-1.dist-info/INSTALLER,sha256=y,4\npkg-1.dist-info/RECORD,,\n"
    assert record_differences(record, record + notes) == []
    path = data.draw(st.sampled_from(sorted(rows)))
    for hash_, size in (("sha256=z", "1"), ("sha256=x", "2"), ("", "")):
        (line,) = record_differences(record, record_of({**rows, path: (hash_, size)}))
        assert line == f"{path} has other content"
    fewer = record_of({name: row for name, row in rows.items() if name != path})
    assert record_differences(record, fewer) == [f"{path} is missing"]
    assert record_differences(fewer, record) == [f"{path} is not the wheel's"]


def test_an_image_with_other_distributions_than_locked_is_refused(tmp_path: Path) -> None:
    wheels = [WheelFile(name, "1.0", make_wheel(tmp_path, name), "", 0) for name in ("one", "two", "three")]
    records = {f"{w.name}-1.0.dist-info": wheel_record(w.path, SCHEME) for w in wheels}
    good = check_installed(PipEnvironment("3.11.2", "/usr/bin/python3.11", records), wheels, "3.11")
    assert [name for name, _, _ in good] == ["one", "three", "two"]
    del records["two-1.0.dist-info"]
    records["four-2.0.dist-info"] = b""
    records["one-1.0.dist-info"] += b"one/evil.py,sha256=x,1\n"
    with pytest.raises(BuildError) as caught:
        check_installed(PipEnvironment("3.11.2", "", records), wheels, "3.11")
    assert caught.value.message.splitlines()[1:] == [
        "  two 1.0 is missing",
        "  four 2.0 is not locked",
        "  one 1.0: one/evil.py is not the wheel's",
    ]


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return load_environment({"HOME": str(tmp_path), "ENVBUILD_STORE": str(tmp_path / "store")})


def plan_of(folder: Path, base: OciLock, target: str = "cpu-x86_64", extra: str = "") -> Plan:
    place = make_recipe(folder, "one", ["one"], targets=f"[targets.{target}]\n", extra=extra)
    loaded = load_recipe(place / "recipe.toml")
    locked = Lock("one", target, "3.11", "x", "d", (LockedPackage("one", "1.0", ("0" * 64,)),))
    inputs = ImageInputs(ImageLock("one", target, "d", base), "pip 3.11 -", 0)
    return make_plan(
        loaded,
        locked,
        Target.parse(target),
        artifact="docker",
        trainer_version="1",
        trainer_digest="t",
        compile_bytecode=True,
        image=inputs,
    )


def test_a_context_holds_all_that_is_copied_links_wheels_and_is_removed(
    tmp_path: Path, environment: Environment
) -> None:
    extra = "[image]\n[image.env]\nQUOTES = '''it's \"$HOME\"'''\n"
    plan = plan_of(tmp_path, OciLock("base:1", ""), extra=extra)
    one = PreparedImage(plan, load_trainer(), None, Target.parse(plan.target))
    path = make_wheel(tmp_path / "wheels", "one")
    wheel = WheelFile("one", "1.0", path, "", 0)
    sources = {"layers.json": b"{}", "5.source": path}
    with pytest.raises(KeyboardInterrupt), dockerfile.build_context(one, [wheel], environment, sources) as context:
        text = (context / "Dockerfile").read_text()
        assert text.startswith(CPU) and text.endswith("ENV QUOTES=${ENVBUILD_ENV_0}\n")
        assert dockerfile.build_arguments(plan)["ENVBUILD_ENV_0"] == 'it\'s "$HOME"'
        assert (context / "wheels" / path.name).stat().st_ino == path.stat().st_ino
        assert (context / "sources" / "5.source").stat().st_ino == path.stat().st_ino
        assert (context / "sources" / "layers.json").read_bytes() == b"{}"
        for source in " ".join(re.findall(r"^COPY ([^-].*) \S+$", text, re.MULTILINE)).split():
            named = source.replace("${RECIPE}", "one").replace("${TARGET}", "cpu-x86_64")
            assert list(context.glob(named)), source
        raise KeyboardInterrupt
    assert list((tmp_path / "store/docker").iterdir()) == []
    assert path.exists()


@pytest.mark.parametrize(
    ("reference", "digest", "told"),
    [
        ("docker-daemon:lab:1", "sha256:" + "1" * 64, "lab:1"),
        ("docker.io/library/python:3.11", "", "docker.io/library/python:3.11"),
        ("python:3.11", "sha256:" + "1" * 64, "docker.io/library/python@sha256:" + "1" * 64),
    ],
)
def test_a_locked_base_is_built_on_by_its_digest(tmp_path: Path, reference: str, digest: str, told: str) -> None:
    plan = plan_of(tmp_path, OciLock(reference, digest), "cu126-x86_64")
    arguments = dockerfile.build_arguments(plan)
    assert arguments["BASE"] == arguments["BUILD_BASE"] == told


def test_a_stage_gets_archives_by_their_hash_and_no_path_of_this_host(tmp_path: Path, environment: Environment) -> None:
    assert stage_files(plan_of(tmp_path, OciLock("base:1", "")), environment, offline=True) == {}
    patch = tmp_path / "fix.patch"
    patch.write_text("x")
    digest = hashlib.sha256(b"an archive").hexdigest()
    layer = replace(LAYER, sha256=digest, patches=(Patch(str(patch), "6" * 64),))
    plan = replace(plan_of(tmp_path, OciLock("base:1", "")), sources=(layer,))
    with pytest.raises(BuildError, match=r"greet 1\.0: no source has its archive"):
        stage_files(plan, environment, offline=True)
    archive = environment.store.folder(f"sources/{layer.sha256}") / "greet-1.0.tar.gz"
    archive.write_bytes(b"an archive")
    files = stage_files(plan, environment, offline=True)
    assert files[f"{layer.sha256}.source"] == archive and files[f"{'6' * 64}.patch"] == patch
    text = files["layers.json"]
    assert isinstance(text, bytes) and str(tmp_path) not in text.decode()
    (read,), hosts = read_description(text.decode())
    assert (read.name, read.sha256, hosts) == ("greet", layer.sha256, {})


def test_an_image_without_a_layer_of_its_plan_is_refused(tmp_path: Path) -> None:
    plan = replace(plan_of(tmp_path, OciLock("base:1", "")), sources=(LAYER,))
    listed = LayerList("greet", "1.0", LAYER.sha256, (LayerFile("bin/greet", 1, "7" * 64),))
    (built,) = built_layers(plan, {"greet": listed.render()})
    assert (built.name, built.files) == ("greet", listed.digest)
    for lists in ({}, {"other": listed.render()}, {"greet": b"{}"}, {"greet": b"\xff"}):
        with pytest.raises(BuildError, match=r"no layer greet 1\.0"):
            built_layers(plan, lists)


def test_packages_are_asked_for_only_where_they_are_missing() -> None:
    if shutil.which("dpkg-query") is None or shutil.which("make") is None:
        pytest.skip("not a Debian with make")
    missing = layers_stage.missing_packages([LAYER])
    assert "make" not in missing and "no-such-package-x" in missing


@pytest.mark.parametrize(
    ("base", "layers", "builder"),
    [
        (None, "", argument(GPU, "BASE")),
        (None, "[layers.libfabric]\nversion = '2.1.0'\n", argument(GPU, "BUILD_BASE")),
        ("mine:1", "[layers.libfabric]\nversion = '2.1.0'\n", "docker.io/library/mine:1"),
    ],
)
def test_layers_are_built_in_the_image_with_compilers_that_belongs_to_the_base(
    tmp_path: Path, environment: Environment, base: str | None, layers: str, builder: str
) -> None:
    prepared = prepare(tmp_path, environment, "cu126-x86_64", layers, base)
    arguments = dockerfile.build_arguments(prepared.plan, prepared.builder)
    assert arguments["BUILD_BASE"] == builder
    assert all(builder in source.environment for source in prepared.plan.sources)


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ("[layers.horovod]\nversion = '0.28.1'\n", "horovod is built as a Python package"),
        (
            "[layers.libfabric]\nversion = '1.22.0'\nkind = 'host'\npath = '/opt/cray'\n"
            "[layers.aws-ofi-nccl]\nversion = '1.14.2'\n",
            "aws-ofi-nccl is built with libfabric of the nodes",
        ),
    ],
)
def test_what_no_stage_can_build_is_said_with_its_line(
    tmp_path: Path, environment: Environment, layers: str, said: str
) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        prepare(tmp_path, environment, "cu126-x86_64", layers, "mine:1")
    assert "recipe.toml:" in caught.value.message


def prepare(folder: Path, environment: Environment, target: str, tables: str, base: str | None = None) -> PreparedImage:
    """The plan of a recipe without packages that has `tables`, for `docker build`."""
    place = make_recipe(folder, "one", [], targets=f"[targets.{target}]\n{tables}")
    loaded, found = load_recipe(place / "recipe.toml"), Target.parse(target)
    digest = loaded.resolution_digest(found)
    empty = Lock("one", target, "3.11", found.platform("2.28"), digest, ())
    (place / f"{target}.requirements.txt").write_text(render(empty))
    return prepare_dockerfile(
        loaded, found, environment, locked=True, offline=True, bytecode=True, log=print, base=base
    )


@pytest.mark.parametrize(
    ("python", "target", "mirror", "base"),
    [
        ("3.11", "cpu-x86_64", None, argument(CPU, "BASE")),
        ("3.13", "cpu-x86_64", None, "docker.io/library/python:3.13-slim-bookworm"),
        ("3.11", "cpu-x86_64", "https://hub.org/a/", "hub.org/a/library/python:3.11-slim-bookworm"),
        ("3.11", "cu126-x86_64", None, argument(GPU, "BASE")),
        ("3.11", "cu128-x86_64", None, "--base docker.io/nvidia/cuda"),
        ("3.9", "cpu-x86_64", None, "3.9"),
    ],
)
def test_the_base_follows_python_cuda_and_the_site_s_mirror(
    tmp_path: Path, environment: Environment, python: str, target: str, mirror: str | None, base: str
) -> None:
    place = make_recipe(tmp_path, "one", [], targets=f"[targets.{target}]\n")
    file = place / "recipe.toml"
    file.write_text(file.read_text().replace('python = "3.11"', f'python = "{python}"'))
    if mirror:
        site = replace(environment.site, registries={"docker.io": RegistryTable((mirror,))})
        environment = replace(environment, site=site)
    loaded = load_recipe(file)
    found = Target.parse(target)
    digest = loaded.resolution_digest(found)
    empty = Lock("one", target, python, found.platform("2.28"), digest, ())
    (place / f"{target}.requirements.txt").write_text(render(empty))
    try:
        prepared = prepare_dockerfile(loaded, found, environment, locked=True, offline=True, bytecode=True, log=print)
    except UsageError as error:
        assert base in f"{error.message} {error.hint}"
    else:
        assert dockerfile.build_arguments(prepared.plan)["BASE"] == base
