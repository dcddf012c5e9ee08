"""Packages without a wheel in a recipe: direct references, and [build] in both of its forms."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import ValidationError, validate
from lab.wheels import make_recipe
from packaging.requirements import Requirement

from envbuild.base.errors import RecipeError
from envbuild.recipe.checks import DirectReference as Direct
from envbuild.recipe.checks import constraint_problem, reference_of, requirement_problem
from envbuild.recipe.load import LoadedRecipe, load_recipe
from envbuild.recipe.model import BuildTable
from envbuild.recipe.targets import Target

HEX = "0123456789abcdef" * 4
TARGET = Target.parse("cpu-x86_64")
SCHEMA = json.loads((Path(__file__).resolve().parents[2] / "docs/recipe.schema.json").read_text())


def loaded(folder: Path, *requirements: str, extra: str = "", targets: str = "") -> LoadedRecipe:
    return load_recipe(make_recipe(folder, "r", requirements, extra=extra, targets=targets) / "recipe.toml")


def mistakes(folder: Path, *requirements: str, extra: str = "", targets: str = "") -> str:
    with pytest.raises(RecipeError) as caught:
        loaded(folder, *requirements, extra=extra, targets=targets)
    return caught.value.message.replace(f"{folder}/r/", "")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("A.b @ git+https://h.example/o/r.git@v1.0", Direct("a-b", "git", "https://h.example/o/r.git", "v1.0")),
        ("a@git+https://h.example/o/r", Direct("a", "git", "https://h.example/o/r")),
        (
            "a[x] @ git+ssh://git@h.example/o/r@feature/x#subdirectory=py/a&egg=a ; python_version > '3'",
            Direct("a", "git", "ssh://git@h.example/o/r", "feature/x", "py/a"),
        ),
        ("a @ git+file:///srv/r@0a1b", Direct("a", "git", "file:///srv/r", "0a1b")),
        (f"a @ https://h.example/v1.zip#sha256={HEX}", Direct("a", "url", "https://h.example/v1.zip", sha256=HEX)),
        (
            f"a-b @ https://h.example/a_b-1.0%2Bx-py3-none-any.whl#sha256={HEX.upper()}",
            Direct("a-b", "url", "https://h.example/a_b-1.0%2Bx-py3-none-any.whl", sha256=HEX),
        ),
        ("a @ ./wheels/a-1-py3-none-any.whl", Direct("a", "path", "wheels/a-1-py3-none-any.whl")),
    ],
)
def test_a_direct_reference(text: str, found: Direct) -> None:
    assert reference_of(text) == found and requirement_problem(text) is None
    assert found.is_wheel == text.partition("#")[0].endswith(".whl")
    assert constraint_problem(text) is not None, "a constraint installs nothing"


def test_an_ordinary_requirement_is_none() -> None:
    assert reference_of("torch>=2 ; python_version < '3.12'") is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a @ https://ada:secret@h.example/a-1.tar.gz#sha256=" + HEX, "user name or password"),
        ("a @ git+https://secret@h.example/r", "user name or password"),
        ("a @ git+ssh://git:secret@h.example/r", "user name or password"),
        ("a @ https://h.example/a-1.tar.gz", "has no sha256"),
        ("a @ https://h.example/secret-1.tar.gz#sha256=12", "has no sha256"),
        ("a @ https://h.example/a-1.tar.gz#md5=12", "only sha256= is accepted"),
        ("a @ https://h.example/a-1.tar.bz2#sha256=" + HEX, "neither a wheel"),
        ("a @ https://h.example/b-1-py3-none-any.whl#sha256=" + HEX, "one of b"),
        ("a @ ./b.whl", "name of a wheel"),
        ("a @ ../a-1.tar.gz", "not below the recipe's folder"),
        ("a @ ./x/../../a-1.tar.gz", "not below the recipe's folder"),
        ("a @ /srv/a-1.tar.gz", "not below the recipe's folder"),
        ("a @ ftp://h.example/a-1.tar.gz", "none of git+https://"),
        ("a @ git+http://h.example/r", "none of git+https://"),
        ("a @ git+https://h.example/r@--upload-pack=x", "branch, tag or commit"),
        ("a @ git+https://h.example/r?x=1", "branch, tag or commit"),
        ("a @ git+https:///r", "not a URL"),
        ("a @ git+file://host/r", "not a URL"),
        ("a @ git+https://h.example/r#subdirectory=../x", "not a folder of the repository"),
        ("a @ https://[h/a-1.tar.gz", "not a URL"),
        ("a @ https://h.example/a;b @", "not a direct reference"),
        ("git+https://secret@h.example/r", "write `NAME @ ADDRESS`"),
    ],
)
def test_a_reference_that_a_recipe_cannot_have(text: str, why: str) -> None:
    found = requirement_problem(text)
    assert found is not None and why in found and "secret" not in found


@given(st.text(st.sampled_from("a@: /.+#=git;-%[]whl~\\\n"), max_size=30))
def test_every_text_is_judged_and_what_passes_is_a_requirement(text: str) -> None:
    full = f"a @ {text}"
    if requirement_problem(full) is None:
        assert Requirement(full).url and reference_of(full)


def test_both_forms_of_build_are_tables(tmp_path: Path) -> None:
    short = loaded(tmp_path, "Flash_Attn", extra='build = ["Flash_Attn", "etcd"]')
    assert short.recipe.build == {"Flash_Attn": BuildTable(), "etcd": BuildTable()}
    assert set(short.builds(TARGET)) == {"flash-attn", "etcd"}
    long = loaded(
        tmp_path,
        "flash-attn",
        targets="[targets.cpu-x86_64]\n[targets.cpu-aarch64]\n[build.flash-attn]\nisolation = false\n"
        'requires = ["ninja"]\ndependencies = ["torch"]\ntargets = ["cpu-x86_64"]\nenvironment = { MAX_JOBS = "2" }\n',
    )
    table = long.build_table("flash-attn")
    assert not table.isolation and table.environment == {"MAX_JOBS": "2"} and table.dependencies == ("torch",)
    assert long.builds(TARGET) and not long.builds(Target.parse("cpu-aarch64"))
    for one in (short, long):
        validate(one.document.data, SCHEMA)
    with pytest.raises(ValidationError):
        validate({**short.document.data, "build": [1]}, SCHEMA)


def test_the_wheel_lock_depends_on_what_a_build_needs_and_nothing_else(tmp_path: Path) -> None:
    digests = []
    for number, table in enumerate(("", "[build.a]", '[build.a]\nrequires = ["x"]', '[build.a]\npackages = ["gcc"]')):
        targets = f"[targets.cpu-x86_64]\n[targets.cu126-x86_64]\n{table}\n"
        digests.append(loaded(tmp_path / str(number), "a", targets=targets).resolution_digest(TARGET))
    assert len(set(digests)) == 3 and digests[1] == digests[3], "Debian packages change no resolution"


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ('build = ["b", 7]', "recipe.toml:5:15: 'build[1]': expected a string"),
        ('build = ["b/c"]', "recipe.toml:5:10: 'build[0]': 'b/c' is not the name"),
        ('build = ["b", "c", "b"]', "recipe.toml:5:20: 'build[2]': 'b' is there twice"),
        ("build = 3", "recipe.toml:5:1: 'build': expected a table"),
        ("build = { b = { targets = ['cpu-riscv64'] } }", "recipe.toml:5:28"),
        ("build = { b = { targets = ['cu126-x86_64'] } }", "the recipe has no target 'cu126-x86_64'"),
        ("build = { b = { patches = ['../x'] } }", "not a file below the recipe's folder"),
        ("build = { b = { requires = ['x @ git+https://h/r'] } }", "an address without a name"),
        ("indexes = { a = 'main' }", "'a' in [indexes]: it is a direct reference"),
        ("build = ['w']", "'w' in [build]: its requirement names a wheel"),
        ("build = ['horovod']\n[layers.horovod]\nversion = '0.28.1'", "is built as [layers.horovod]"),
    ],
)
def test_mistakes_have_positions(tmp_path: Path, extra: str, said: str) -> None:
    wheel = "w @ ./w-1-py3-none-any.whl"
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "w-1-py3-none-any.whl").write_bytes(b"")
    assert said in mistakes(tmp_path, "a @ git+https://h.example/r", wheel, extra=extra)


def test_a_file_that_is_absent_is_named(tmp_path: Path) -> None:
    text = mistakes(tmp_path, "numpy", "a @ ./sub/a-1.tar.gz")
    assert text == "recipe.toml:4:26: 'a': there is no file sub/a-1.tar.gz"
