"""Reading a recipe: its mistakes, its targets, its digests."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab.wheels import make_recipe
from packaging.requirements import InvalidRequirement, Requirement

from envbuild.base.errors import RecipeError, UsageError
from envbuild.locks import wheel_locks
from envbuild.recipe import load
from envbuild.recipe.checks import _ORDINARY, index_problem, requirement_problem
from envbuild.recipe.load import LoadedRecipe, load_recipe
from envbuild.recipe.targets import Target

GOOD = """\
name = "lab"
description = "For the lab"
python = "3.12"
requirements = ["numpy==2.2.6", "Pillow"]

[targets.cpu-x86_64]
requirements = ["torch==2.13.0+cpu"]
indexes = ["https://download.pytorch.org/whl/cpu"]
[targets.cpu-aarch64]
[targets.cu126-x86_64]
[targets.cu130-aarch64]
glibc = "2.34"
"""


def load_text(folder: Path, text: str, name: str = "lab") -> LoadedRecipe:
    file = folder / "recipes" / name / "recipe.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return load_recipe(file)


def mistakes(folder: Path, text: str) -> list[str]:
    """The lines of the error, without the path of the file."""
    with pytest.raises(RecipeError) as caught:
        load_text(folder, text)
    start = f"{folder}/recipes/lab/recipe.toml:"
    lines = caught.value.message.splitlines()
    assert all(line.startswith(start) for line in lines)
    return [line.removeprefix(start) for line in lines]


def test_good_recipe_and_its_defaults(tmp_path: Path) -> None:
    loaded = load_text(tmp_path, GOOD)
    recipe = loaded.recipe
    assert recipe.requirements == ("numpy==2.2.6", "Pillow")
    assert recipe.constraints == ()
    assert recipe.targets["cpu-aarch64"].glibc == "2.28"
    verify = recipe.verify
    assert (verify.nodes, verify.nproc_per_node, verify.epochs, verify.batch_size) == (2, 2, 6, 32)
    assert (verify.model, verify.timeout_s, verify.loss_tolerance) == ("mlp", 600, 1e-4)
    assert loaded.folder == tmp_path / "recipes" / "lab"
    assert loaded.where("targets", "cpu-x86_64", "indexes", 0) == f"{loaded.path}:8:12"


def test_five_mistakes_are_reported_together_in_order(tmp_path: Path) -> None:
    text = """\
name = "lab"
description = "Five mistakes"
python = "3.7"
requirements = [
  "numpy==2.2.6",
  "-r more.txt",
]

[targets."cpu-x86_64"]
requirments = ["torch==2.13.0+cpu"]
requirements = ["NumPy==2.3.0"]

[verify]
nodes = "two"
"""
    assert mistakes(tmp_path, text) == [
        "3:1: 'python': '3.7' is not accepted; did you mean '3.9'? Accepted: 3.9, 3.10, 3.11, 3.12, 3.13, 3.14, 3.15",
        "6:3: 'requirements[1]': an option of pip (-r), not a requirement: which index or mirror"
        " serves a file is the site's affair; write name==version",
        "10:1: unknown key 'requirments' in [targets.cpu-x86_64]; did you mean 'requirements'?"
        " Accepted: requirements, indexes, glibc, conda, pythons, gpus",
        f"11:17: 'numpy' is also required by 'numpy==2.2.6' at {tmp_path}/recipes/lab/recipe.toml:5:3",
        "14:1: 'nodes' in [verify]: expected an integer, got a string",
    ]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('"lab"', '"lob"', "1:1: 'lob' is not the name of its folder, 'lab'"),
        (
            '"lab"',
            '"Lab"',
            "1:1: 'Lab' is not the name of its folder, 'lab'\n1:1: 'name': 'Lab' does not match ^[a-z0-9][a-z0-9_.-]*$",
        ),
        ('"For the lab"', '""', r"2:1: 'description': '' does not match ^\S([^\n]*\S)?$"),
        ('"3.12"', "3.12", "3:1: 'python': expected a string, got a number"),
        (
            "cu126-x86_64",
            "cu12.6-x86_64",
            "10:10: 'cu12' in [targets]: not a target: expected"
            " ACCELERATOR-ARCH, of cpu, cuNNN (cu126) or rocmN.N (rocm6.4), x86_64 or aarch64\n"
            "10:15: unknown key '6-x86_64' in [targets.cu12];"
            " accepted: requirements, indexes, glibc, conda, pythons, gpus",
        ),
        ('"2.34"', '"2.29"', None),
        ('"Pillow"', '"NUMPY>2"', "4:33: 'numpy' is also required by 'numpy==2.2.6' at HERE:4:17"),
        ('"torch==2.13.0+cpu"', '"pillow<12"', "7:17: 'pillow' is also required by 'Pillow' at HERE:4:33"),
    ],
)
def test_one_mistake(tmp_path: Path, old: str, new: str, expected: str | None) -> None:
    assert GOOD.count(old) == 1
    found = "\n".join(mistakes(tmp_path, GOOD.replace(old, new)))
    if expected is not None:
        assert found == expected.replace("HERE", f"{tmp_path}/recipes/lab/recipe.toml")


def test_no_target(tmp_path: Path) -> None:
    head = GOOD.partition("[targets")[0]
    assert mistakes(tmp_path, head) == ["1:1: missing key 'targets'"]
    assert mistakes(tmp_path, head + "[targets]\n") == ["6:2: 'targets': expected at least 1, got 0"]


def test_the_same_project_again(tmp_path: Path) -> None:
    """The same words twice do no harm, and markers choose between two versions."""
    load_text(tmp_path, GOOD.replace('"torch==2.13.0+cpu"', '"NUMPY == 2.2.6"'))
    both = """'six==1; python_version < "3.12"', 'six==2; python_version >= "3.12"'"""
    load_text(tmp_path, GOOD.replace('"Pillow"', both))
    # Two targets never meet in one environment.
    one_each = GOOD.replace("[targets.cpu-aarch64]", "[targets.cpu-aarch64]\nrequirements=['torch']")
    load_text(tmp_path, one_each)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["six"], "'six' names no version: an override replaces the versions that packages ask for"),
        (["six @ https://h/six.whl"], "an address without a name"),
        (["six==1", "SIX>=2"], "'six' is overridden twice"),
        (["torch>=2"], "'torch>=2' would replace 'torch==2.13.0+cpu' at "),
        (["six=1"], "write 'six==1'"),
    ],
)
def test_an_override_that_would_mislead(tmp_path: Path, overrides: list[str], expected: str) -> None:
    text = GOOD.replace("[targets.cpu-x86_64]", f"overrides = {overrides}\n[targets.cpu-x86_64]")
    (found,) = mistakes(tmp_path, text)
    assert expected in found


def test_an_override_of_what_is_required_without_a_version(tmp_path: Path) -> None:
    overrides = """overrides = ["Pillow>=11", 'six==1; python_version < "3.12"', 'six==2; python_version >= "3.12"']"""
    loaded = load_text(tmp_path, GOOD.replace("[targets.cpu-x86_64]", f"{overrides}\n[targets.cpu-x86_64]"))
    assert loaded.recipe.overrides[0] == "Pillow>=11" and len(loaded.recipe.overrides) == 3


def test_name_is_free_outside_a_recipes_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text(GOOD)
    monkeypatch.chdir(tmp_path)
    assert load_recipe(Path("recipe.toml")).recipe.name == "lab"
    inside = tmp_path / "recipes" / "other"
    inside.mkdir(parents=True)
    (inside / "recipe.toml").write_text(GOOD)
    monkeypatch.chdir(inside)
    with pytest.raises(RecipeError, match=r"^recipe\.toml:1:1: 'lab' is not .* 'other'$"):
        load_recipe(Path("recipe.toml"))


# --- single values -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "torch",
        "torch==2.13.0+cpu",
        "ruamel.yaml>=0.18,<0.19",
        "uvicorn[standard]==0.30",
        "jax[cuda12_pip]",
        "a==1.*",
        'tomli==2; python_version < "3.11"',
        "numpy (==1.2)",
    ],
)
def test_requirement(text: str) -> None:
    assert requirement_problem(text) is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("--hash=sha256:00", "an option of pip (--hash)"),
        (" -e .", "an option of pip (-e)"),
        ("-ihttps://u:secret@h/simple", "an option of pip"),
        ("torch @ https://u:secret@host/torch.whl", "user name or password"),
        ("https://u:secret@host/torch.whl ", "an address"),
        ("git+ssh://git@host/x", "an address"),
        ("./torch", "is a path"),
        ("wheels/torch", "is a path"),
        ("torch-2.0-py3-none-any.whl", "is a path"),
        ("", "is empty"),
        ("numpy==1\n-e .", "unprintable"),
        (" numpy", "blanks at its ends"),
        ("numpy=1", "is not a requirement"),
        ("numpy==1 # why", "is not a requirement"),
        ("numpy==1 --no-deps", "is not a requirement"),
        ("-", "an option of pip"),
        ("numpy==1.x", "is not a requirement"),
    ],
)
def test_not_a_requirement(text: str, why: str) -> None:
    found = requirement_problem(text)
    assert found is not None and why in found
    assert "secret" not in found and "\n" not in found


@given(st.from_regex(_ORDINARY, fullmatch=True))
def test_the_quick_way_accepts_nothing_that_packaging_rejects(text: str) -> None:
    Requirement(text)


@given(st.text(st.sampled_from("ab-_.=<>[]1+!*;@/ ,"), max_size=12))
def test_what_passes_is_a_requirement(text: str) -> None:
    if requirement_problem(text) is None:
        assert Requirement(text).url is None
        return
    with contextlib.suppress(InvalidRequirement):
        # What packaging would accept, a recipe may still not say.
        assert Requirement(text).url is not None or text != text.strip()


@pytest.mark.parametrize(
    "url",
    [
        "https://download.pytorch.org/whl/cpu",
        "http://[::1]:8080/simple",
        "file:///srv/wheels",
        "https://mirror.example/@scope/simple",
    ],
)
def test_index(url: str) -> None:
    assert index_problem(url) is None


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("https://user:secret@host/simple", "user name or password"),
        ("https://secret@host", "user name or password"),
        ("ftp://user:secret@host", "user name or password"),
        ("user:secret@host/simple", "user name or password"),
        ("https://user:sec/ret@host/", "not a URL"),
        ("https://host:secret/", "not a URL"),
        ("https://host/secret simple", "not a URL"),
        ("https:///secret", "not the URL of a package index"),
        ("download.pytorch.org/secret", "not the URL of a package index"),
        ("/srv/secret", "not the URL of a package index"),
        ("file://secret/wheels", "absolute path"),
        ("https://[secret", "not a URL"),
        ("", "not the URL"),
    ],
)
def test_not_an_index(url: str, why: str) -> None:
    found = index_problem(url)
    assert found is not None and why in found and "sec" not in found


def test_a_password_never_reaches_the_message(tmp_path: Path) -> None:
    for url in ("https://user:hunter2@host/simple", "user:hunter2@host", " ftp://u:hunter2@h\\n"):
        text = GOOD.replace("https://download.pytorch.org/whl/cpu", url)
        assert "hunter2" not in "".join(mistakes(tmp_path, text))
        text = GOOD.replace("torch==2.13.0+cpu", f"--index-url {url}")
        assert "hunter2" not in "".join(mistakes(tmp_path, text))


# --- targets -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "drop", "expected"),
    [
        ("x86_64", "", "cpu-x86_64"),
        ("aarch64", "", "cpu-aarch64"),
        ("aarch64", "[targets.cpu-aarch64]\n", "cu130-aarch64"),
        ("riscv64", "", None),
    ],
)
def test_target_of_this_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str, drop: str, expected: str | None
) -> None:
    monkeypatch.setattr(load, "host_arch", lambda: arch)
    loaded = load_text(tmp_path, GOOD.replace(drop, "") if drop else GOOD)
    if expected is None:
        with pytest.raises(UsageError, match=r"no target for this host \(riscv64\); .*cpu-x86_64"):
            loaded.target()
        return
    target, table = loaded.target()
    assert target.name == expected
    assert table is loaded.recipe.targets[expected]


def test_several_targets_without_cpu_are_a_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "host_arch", lambda: "aarch64")
    loaded = load_text(tmp_path, GOOD.replace("cpu-aarch64", "cu128-aarch64"))
    with pytest.raises(UsageError, match=r"several targets.*cu128-aarch64, cu126-x86_64"):
        loaded.target()


def test_named_target(tmp_path: Path) -> None:
    loaded = load_text(tmp_path, GOOD)
    target, table = loaded.target("cu130-aarch64")
    assert (target, table.glibc) == (Target("cu130", "aarch64"), "2.34")
    with pytest.raises(UsageError, match="no target 'cu128-x86_64'; did you mean 'cu126-x86_64'") as e:
        loaded.target("cu128-x86_64")
    assert "cpu-x86_64, cpu-aarch64, cu126-x86_64, cu130-aarch64" in e.value.message


# --- digests -------------------------------------------------------------------------------------

SHUFFLED = """\
# The same recipe, written by someone else.
python      = '3.12'
name = "lab"
requirements = [ # two
  'numpy==2.2.6',
  "Pillow", ]
description = "For the lab"
[targets]
cu126-x86_64 = {}
cu130-aarch64.glibc = "2.34"
cpu-x86_64.indexes = ["https://download.pytorch.org/whl/cpu"]
cpu-x86_64.requirements = ["torch==2.13.0\\u002Bcpu"]
cpu-aarch64 = {}
"""


def test_digest_is_of_the_meaning(tmp_path: Path) -> None:
    digest = load_text(tmp_path, GOOD).digest
    assert digest.startswith("sha256:") and len(digest) == 71
    assert load_text(tmp_path, SHUFFLED).digest == digest
    assert load_text(tmp_path, GOOD + "[verify]\nnodes = 2\nloss_tolerance = 1e-4").digest == digest
    assert load_text(tmp_path, GOOD + "[verify]\nnodes = 3\n").digest != digest


@pytest.mark.parametrize(
    ("old", "new", "changes"),
    [
        ("For the lab", "For all", ()),
        ('"lab"', '"lob"', ()),
        ("[targets.cu126-x86_64]", "[verify]\nnodes = 3\n[targets.cu126-x86_64]", ()),
        ("3.12", "3.13", ("cpu-x86_64", "cu130-aarch64")),
        ("Pillow", "Pillow==11", ("cpu-x86_64", "cu130-aarch64")),
        ("[targets.cpu-x86_64]", "constraints = ['six<2']\n[targets.cpu-x86_64]", ("cpu-x86_64", "cu130-aarch64")),
        ("[targets.cpu-x86_64]", "overrides = ['six<2']\n[targets.cpu-x86_64]", ("cpu-x86_64", "cu130-aarch64")),
        ("2.13.0+cpu", "2.12.0+cpu", ("cpu-x86_64",)),
        ("whl/cpu", "whl/nightly/cpu", ("cpu-x86_64",)),
        ("2.34", "2.35", ("cu130-aarch64",)),
    ],
)
def test_resolution_digest(tmp_path: Path, old: str, new: str, changes: tuple[str, ...]) -> None:
    assert GOOD.count(old) == 1
    before = load_text(tmp_path, GOOD)
    after = load_text(tmp_path, GOOD.replace(old, new), "lob" if "lob" in new else "lab")
    assert before.digest != after.digest
    for name in ("cpu-x86_64", "cu130-aarch64"):
        target = Target.parse(name)
        differ = before.resolution_digest(target) != after.resolution_digest(target)
        assert differ == (name in changes), name


def test_resolution_digest_tells_targets_apart(tmp_path: Path) -> None:
    loaded = load_text(tmp_path, GOOD)
    digests = {loaded.resolution_digest(Target.parse(name)) for name in loaded.recipe.targets}
    assert len(digests) == 4
    with pytest.raises(UsageError):
        loaded.resolution_digest(Target("cu118", "x86_64"))


# --- cost ----------------------------------------------------------------------------------------


def test_a_good_recipe_loads_without_the_costly_modules(tmp_path: Path) -> None:
    load_text(tmp_path, GOOD)
    code = """
import sys
from pathlib import Path
from envbuild.recipe.find import find_recipe
from envbuild.recipe.load import load_recipe
load_recipe(find_recipe("lab", [Path("recipes")])).target("cpu-x86_64")
costly = {"packaging", "pydantic", "json", "difflib", "hashlib", "click", "rich", "requests"}
print(sorted(costly & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_bound_packages_are_checked_and_change_the_locks_that_have_them(tmp_path: Path) -> None:
    start, targets = GOOD.split("[targets", 1)
    text = (
        start
        + '[indexes]\nPIL-low = "a"\npillow = "internal"\nPillow = "internal"\ntorch = "In side"\n[targets'
        + targets
    )
    assert mistakes(tmp_path, text) == [
        "7:1: 'PIL-low' in [indexes] is in no `requirements`; did you mean 'pillow'? Accepted: numpy, pillow, torch",
        "9:1: 'Pillow' in [indexes] is there in another spelling",
        "10:1: 'torch' in [indexes]: 'In side' does not match ^[a-z0-9][a-z0-9_.-]*$",
    ]
    plain = load_text(tmp_path, GOOD)
    one = load_text(tmp_path, start + '[indexes]\ntorch = "internal"\n[targets' + targets)
    other = load_text(tmp_path, start + '[indexes]\nTorch = "internal"\n[targets' + targets)
    cpu, arm = Target.parse("cpu-x86_64"), Target.parse("cpu-aarch64")
    assert one.resolution_digest(cpu) == other.resolution_digest(cpu) != plain.resolution_digest(cpu)
    assert one.resolution_digest(arm) == plain.resolution_digest(arm)  # it has no torch
    assert one.image_digest(cpu) == plain.image_digest(cpu) and one.digest != plain.digest


def test_another_python_of_a_target_has_a_lock_of_its_own(tmp_path: Path) -> None:
    text = '[targets.cpu-x86_64]\npythons = ["3.13"]\n[targets.cpu-aarch64]\n'
    place = make_recipe(tmp_path, "small", ["numpy"], targets=text) / "recipe.toml"
    loaded = load_recipe(place)
    target, other = Target("cpu", "x86_64"), Target("cpu", "aarch64")
    assert loaded.for_python(target, "3.11") is loaded
    assert loaded.for_python(target, "3.12") is None and loaded.for_python(other, "3.13") is None
    newer = loaded.for_python(target, "3.13")
    assert newer is not None and newer.recipe.python == newer.variant == "3.13"
    assert newer.resolution_digest(target) != loaded.resolution_digest(target)
    assert [one.file for one in wheel_locks(loaded, target)] == [
        "cpu-x86_64.requirements.txt",
        "cpu-x86_64.python3.13.requirements.txt",
    ]
    assert len(wheel_locks(loaded, other)) == 1
    place.write_text(place.read_text().replace('pythons = ["3.13"]', ""))
    assert load_recipe(place).digest == loaded.digest  # what the recipe builds by default is the same
