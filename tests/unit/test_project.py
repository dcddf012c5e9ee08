"""`[project]`: what a recipe declares, which files are taken, the wheel of them, and what they change in plans."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import validate
from lab.wheels import make_recipe, make_wheel

from envbuild.base.errors import BuildError, EnvbuildError, RecipeError, UsageError
from envbuild.build.folder import prepare_folder
from envbuild.build.prepare import prepare
from envbuild.contract.kinds import DOCKER, VENV
from envbuild.contract.state import parse_state
from envbuild.environment import Environment
from envbuild.layers import project
from envbuild.layers.project import collect, project_wheel
from envbuild.layers.wheel import WheelFile
from envbuild.lock.format import Lock
from envbuild.lock.format import render as render_lock
from envbuild.lock.lifecycle import write_lock_file
from envbuild.plan import Plan, make_plan, state_of
from envbuild.recipe.load import LoadedRecipe, load_recipe
from envbuild.recipe.model import ImageTable
from envbuild.recipe.project import ProjectTable
from envbuild.recipe.sources import LockedPackage
from envbuild.recipe.targets import Target
from envbuild.run_environment import load_environment

TOP = Path(__file__).resolve().parents[2]
TARGET = Target.parse("cpu-x86_64")
PLATFORM = "x86_64-manylinux_2_28"
PYPROJECT = """\
[build-system]
requires = ["setuptools"]
[project]
name = "Lab_Pkg"
version = "1.0"
dependencies = ["numpy>=2"]
[project.optional-dependencies]
Train = ["tqdm", "lab-pkg[more]"]
more = ["einops"]
[dependency-groups]
Dev = ["ruff", {include-group = "tests"}]
tests = ["pytest"]
"""


def recipe_of(
    top: Path, table: str = 'path = "../.."', requirements: tuple[str, ...] = (), extra: str = ""
) -> LoadedRecipe:
    folder = make_recipe(top / "recipes", "r", requirements, extra=f"{extra}\n[project]\n{table}\n".lstrip())
    return load_recipe(folder / "recipe.toml")


def put(top: Path, names: dict[str, str]) -> Path:
    for name, text in names.items():
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(text)
    return top


def git(top: Path, *words: str) -> str:
    line = ["git", "-c", "user.name=ada", "-c", "user.email=ada@example.org", *words]
    return subprocess.run(line, cwd=top, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return load_environment(
        {
            "HOME": str(tmp_path),
            "PATH": os.environ["PATH"],
            "ENVBUILD_STORE": str(tmp_path / "store"),
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_INDEX": "1",
            "GIT_DIR": "/nowhere",
        }
    )


# What a recipe declares


def test_its_requirements_join_those_of_the_recipe_with_extras_and_groups(tmp_path: Path) -> None:
    top = put(tmp_path / "top", {"pyproject.toml": PYPROJECT})
    plain = recipe_of(top)
    assert plain.recipe.requirements == ("numpy>=2",)
    assert plain.code is not None and (plain.code.name, plain.code.module, plain.code.root) == ("lab-pkg", "", top)
    whole = recipe_of(top, 'path = "../.."\nextras = ["train"]\ngroups = ["dev"]')
    assert set(whole.recipe.requirements) == {"numpy>=2", "tqdm", "einops", "ruff", "pytest"}
    assert whole.resolution_digest(TARGET) != plain.resolution_digest(TARGET)
    put(top, {"pyproject.toml": PYPROJECT.replace("numpy>=2", "numpy>=3")})
    assert recipe_of(top).resolution_digest(TARGET) != plain.resolution_digest(TARGET)


def test_setuptools_reads_requirements_from_files(tmp_path: Path) -> None:
    text = (
        '[project]\nname = "p"\ndynamic = ["dependencies"]\n'
        '[tool.setuptools.dynamic]\ndependencies = { file = "requirements.txt" }\n'
        'optional-dependencies.x = { file = ["x.txt"] }\n'
    )
    top = put(tmp_path / "top", {"pyproject.toml": text, "requirements.txt": "# all\nnumpy # 2\n\ntqdm\n"})
    assert recipe_of(top).recipe.requirements == ("numpy", "tqdm")
    put(top, {"requirements.txt": "numpy\n-r other.txt\n"})
    with pytest.raises(RecipeError, match=r"requirements\.txt:2: an option of pip"):
        recipe_of(top)
    (top / "requirements.txt").unlink()
    with pytest.raises(RecipeError, match=r"pyproject\.toml:4:18: requirements\.txt: "):
        recipe_of(top)


def test_conda_packages_get_them_too_and_alone_where_there_is_no_wheel_lock(tmp_path: Path) -> None:
    top = put(tmp_path / "top", {"pyproject.toml": PYPROJECT})
    conda = '[conda]\ndependencies = ["numpy"]\nrequirements = ["tqdm"]'
    both = recipe_of(top, requirements=("torch",), extra=conda).recipe
    assert both.requirements == ("torch", "numpy>=2") and both.conda.requirements == ("tqdm", "numpy>=2")
    alone = recipe_of(top, extra=f'environment = "conda"\n{conda}').recipe
    assert alone.requirements == () and alone.conda.requirements == ("tqdm", "numpy>=2")


@pytest.mark.parametrize(
    ("files", "table", "words"),
    [
        ({}, 'path = "../../none"', "recipe.toml:6:1: 'path' in [project]: there is no folder"),
        ({}, 'module = "pkg"', "recipe.toml:5:2: missing key 'path' in [project]"),
        ({}, 'path = "../.."\nmodule = "a-b"', "recipe.toml:7:1: 'module' in [project]: 'a-b' is not a module path"),
        ({}, 'path = ".."', "'recipes'"),
        ({"pyproject.toml": "[project"}, 'path = "../.."', "pyproject.toml:1:9: "),
        ({"pyproject.toml": '[project]\ndependencies = "x"\n'}, 'path = "../.."', "pyproject.toml:2:1: expected an"),
        ({"pyproject.toml": "[project]\ndependencies = [3]\n"}, 'path = "../.."', "pyproject.toml:2:1: expected an"),
        (
            {"pyproject.toml": '[project]\nname = "p"\ndependencies = ["a @ git+https://u:pw@h/x"]\n'},
            'path = "../.."',
            "pyproject.toml:3:17: holds a user name",
        ),
        (
            {"pyproject.toml": PYPROJECT},
            'path = "../.."\nextras = ["more", "trian"]',
            "recipe.toml:7:19: {top}/pyproject.toml has no project.optional-dependencies.trian; did you mean 'Train'?",
        ),
        ({"pyproject.toml": PYPROJECT}, 'path = "../.."\ngroups = ["x"]', "recipe.toml:7:11: "),
        (
            {"pyproject.toml": '[project]\nname = "p"\n[dependency-groups]\na = [{include-group = "b"}]\n'},
            'path = "../.."\ngroups = ["a"]',
            "pyproject.toml:4:6: {top}/pyproject.toml has no dependency-groups.b",
        ),
        ({"pyproject.toml": "dependency-groups = 1\n[project]"}, 'path = "../.."\ngroups = ["a"]', "7:11: "),
        ({"pyproject.toml": "[project]\ndynamic = 1\n"}, 'path = "../.."\nextras = ["a"]', "7:11: "),
        ({"pyproject.toml": "project = 1\n[dependency-groups]\na = 1\n"}, 'path = "../.."\ngroups = ["a"]', "expected"),
    ],
)
def test_mistakes_are_told_with_their_position(tmp_path: Path, files: dict[str, str], table: str, words: str) -> None:
    top = put(tmp_path / "top-1", files)
    top.mkdir(exist_ok=True)
    if words == "'recipes'":  # a folder that is a module's name needs no `module`
        assert (recipe_of(top, table).code or pytest.fail()).module == "recipes"
        return
    with pytest.raises(RecipeError) as caught:
        recipe_of(top, table)
    assert words.replace("{top}", str(top)) in caught.value.message
    assert "pw" not in caught.value.message


def test_a_folder_whose_name_is_no_module_needs_one(tmp_path: Path) -> None:
    top = put(tmp_path / "top-1", {"train.py": ""})
    with pytest.raises(RecipeError, match=r"has no package, and 'top-1' is not a module's name"):
        recipe_of(top)
    assert (recipe_of(top, 'path = "../.."\nmodule = "a.b"').code or pytest.fail()).name == "a-b"


def test_recipes_without_a_project_have_the_digest_that_they_had(tmp_path: Path) -> None:
    loaded = load_recipe(TOP / "recipes" / "pt_minimal" / "recipe.toml")
    assert loaded.code is None
    text = (TOP / "recipes" / "pt_minimal" / "cpu-x86_64.requirements.txt").read_text()
    assert f"recipe-digest: {loaded.resolution_digest(TARGET)}" in text


# Which files


def names(loaded: LoadedRecipe, environment: Environment) -> list[str]:
    code = collect(loaded, environment)
    assert code is not None
    return [name for name, _, _ in code.files]


def test_git_tells_the_files_changed_ones_count_and_untracked_ones_are_named(
    tmp_path: Path, environment: Environment, capfd: pytest.CaptureFixture[str]
) -> None:
    files = {"pkg/__init__.py": "1\n", "pkg/run.sh": "#!/bin/sh\n", "gone.py": "", "data é.txt": ""}
    top = put(tmp_path / "repo" / "top", files)
    git(tmp_path / "repo", "init", "-q")
    (top / "pkg/run.sh").chmod(0o755)
    (top / "link.py").symlink_to("pkg/__init__.py")
    (top / "folder").symlink_to("pkg")
    git(tmp_path / "repo", "add", "-A")
    put(tmp_path / "repo", {"outside.py": ""})
    git(tmp_path / "repo", "commit", "-qm", "x")
    loaded = recipe_of(top, 'path = "../.."\nmodule = "pkg"')
    code = collect(loaded, environment)
    assert code is not None and code.commit == git(top, "rev-parse", "HEAD")
    assert [name for name, _, _ in code.files] == sorted([*files, "link.py"])
    assert {name: mode for name, mode, _ in code.files}["pkg/run.sh"] == 0o755
    assert "files are left out" not in capfd.readouterr().err  # the recipe is no Python file
    put(top, {"pkg/__init__.py": "2\n", "new.py": "", "new.txt": ""})
    (top / "gone.py").unlink()
    changed = collect(loaded, environment)
    assert changed is not None and changed.commit == f"{code.commit}-dirty"
    assert "gone.py" not in dict.fromkeys(name for name, _, _ in changed.files)
    assert "new.py" in capfd.readouterr().err
    assert changed.digest != code.digest
    put(top, {"pkg/__init__.py": "1\n", "gone.py": ""})
    assert collect(loaded, environment) == code


@pytest.mark.parametrize("tracked", [True, False])
def test_links_to_folders_are_named(
    tmp_path: Path, environment: Environment, capfd: pytest.CaptureFixture[str], tracked: bool
) -> None:
    put(tmp_path, {"shared/s.py": "", "one.py": "", "pkg/__init__.py": ""})
    loaded = recipe_of(tmp_path, 'path = "../../pkg"')
    (tmp_path / "pkg" / "shared").symlink_to("../shared")
    (tmp_path / "pkg" / "one.py").symlink_to("../one.py")
    if tracked:
        git(tmp_path, "init", "-q")
        git(tmp_path, "add", "-A")
    assert names(loaded, environment) == ["__init__.py", "one.py"]
    assert capfd.readouterr().err.endswith("that do not lead to a file are left out: shared\n")


def test_outside_of_git_all_files_but_environments_and_outputs(tmp_path: Path, environment: Environment) -> None:
    taken = {"a.py": "", "pkg/b.py": "", "pkg/builder/c.txt": "", "pkg/dist/__init__.py": "", "pkg/dist/x/y.py": ""}
    left = {
        ".git/x.py": "",
        "pkg/__pycache__/b.pyc": "",
        ".venv/x.py": "",
        "env/pyvenv.cfg": "",
        "env/x.py": "",
        "build/x.py": "",
        "dist/x.whl": "",
        "pkg/build/c.o": "",
        "p.egg-info/PKG-INFO": "",
        "own.sqsh": "",
        "own.sif.failed": "",
        "own.sqsh.receipt.json": "",
    }
    top = put(tmp_path / "top", {**taken, **left})
    (top / ".git/x.py").unlink()
    loaded = recipe_of(top, 'path = "../.."\nmodule = "pkg"\nexclude = ["recipes"]')
    assert names(loaded, environment) == sorted(taken)


@pytest.mark.parametrize(
    ("table", "found"),
    [
        ('include = ["*.py"]', ["a.py", "pkg/b.py", "pkg/sub/c.py"]),
        ('include = ["/a.*"]', ["a.py"]),
        ('include = ["pkg"]', ["pkg/b.py", "pkg/d.txt", "pkg/sub/c.py"]),
        ('include = ["pkg/*"]\nexclude = ["sub/"]', ["pkg/b.py", "pkg/d.txt"]),
        ('include = ["pkg/*.py"]', ["pkg/b.py", "pkg/sub/c.py"]),
        ('include = ["c.py", "[a].py"]', ["a.py", "pkg/sub/c.py"]),
        ('include = ["pkg/**"]\nexclude = ["*.txt", "pkg/sub"]', ["pkg/b.py"]),
    ],
)
def test_globs_match_paths_names_and_folders(
    tmp_path: Path, environment: Environment, table: str, found: list[str]
) -> None:
    top = put(tmp_path / "top", {"a.py": "", "pkg/b.py": "", "pkg/sub/c.py": "", "pkg/d.txt": ""})
    assert names(recipe_of(top, f'path = "../.."\nmodule = "m"\n{table}'), environment) == found


@given(
    st.text(st.sampled_from("ab*?[].(/\\+é"), min_size=1, max_size=12), st.text(st.sampled_from("ab/.é"), max_size=12)
)
def test_a_glob_is_no_regular_expression(glob: str, path: str) -> None:
    matches = ProjectTable(path=".", include=(glob,)).takes(path)
    if not re.search(r"[*?[]", glob) and "/" not in glob:
        assert matches == (glob in path.split("/"))


def test_no_python_file_and_no_file_name_of_a_wheel_are_errors(tmp_path: Path, environment: Environment) -> None:
    top = put(tmp_path / "top", {"a.txt": ""})
    loaded = recipe_of(top, 'path = "../.."\nmodule = "m"')
    with pytest.raises(RecipeError, match=r"recipe.toml:6:1: 'path' in \[project\]: no Python package found"):
        collect(loaded, environment)
    put(top, {"a\nb.py": ""})
    with pytest.raises(RecipeError, match="is not a valid file name in a wheel"):
        collect(loaded, environment)


# The wheel and the plan


def plan_of(loaded: LoadedRecipe, environment: Environment, *locked: tuple[str, str], **changes: Any) -> Plan:
    packages = tuple(LockedPackage(name, version, ("a" * 64,)) for name, version in locked)
    lock = Lock("r", TARGET.name, "3.11", PLATFORM, "sha256:d", packages)
    code = collect(loaded, environment, editable=changes.pop("editable", False))
    plan = make_plan(
        loaded, lock, TARGET, artifact="venv", trainer_version="1", trainer_digest="sha256:t", project=code
    )
    return dataclasses.replace(plan, **changes)


def plain(tmp_path: Path, **files: str) -> LoadedRecipe:
    top = put(tmp_path / "lab", {"__init__.py": "", "sub/train.py": "x = 1\n"})
    return recipe_of(top, 'path = "../.."\nmodule = "a.lab"\nexclude = ["recipes"]')


def test_a_step_of_the_plan_is_the_project_and_comes_last(tmp_path: Path, environment: Environment) -> None:
    loaded = plain(tmp_path)
    plan = plan_of(loaded, environment)
    assert plan.project is not None
    assert (plan.layers[-1].kind, plan.layers[-1].name, plan.layers[-1].digest) == (
        "project",
        "a-lab",
        plan.project.digest,
    )
    assert plan_of(loaded, environment).digest == plan.digest
    (tmp_path / "lab/sub/train.py").chmod(0o755)
    moded = plan_of(loaded, environment).digest
    put(tmp_path / "lab", {"sub/train.py": "x = 2\n"})
    assert len({plan.digest, moded, plan_of(loaded, environment).digest}) == 3
    editable = plan_of(loaded, environment, editable=True)
    put(tmp_path / "lab", {"sub/train.py": "x = 3\n"})
    assert plan_of(loaded, environment, editable=True).digest == editable.digest


def test_a_folder_becomes_a_wheel_once(
    tmp_path: Path, environment: Environment, capfd: pytest.CaptureFixture[str]
) -> None:
    loaded = plain(tmp_path)
    (tmp_path / "lab/sub/train.py").chmod(0o755)
    name, version, path = project_wheel(plan_of(loaded, environment), environment, offline=True) or pytest.fail()
    assert (name, version, path.name) == ("a-lab", "0", "a_lab-0-py3-none-any.whl")
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        modes = {info.filename: info.external_attr >> 16 for info in archive.infolist()}
    assert modes["a/lab/sub/train.py"] == 0o100755 and modes["a/lab/__init__.py"] == 0o100644
    assert "building its wheel" in capfd.readouterr().err
    assert project_wheel(plan_of(loaded, environment), environment, offline=True) == (name, version, path)
    assert "building" not in capfd.readouterr().err
    other = dataclasses.replace(environment, store=type(environment.store)(tmp_path / "other"))
    again = project_wheel(plan_of(loaded, environment), other, offline=True) or pytest.fail()
    assert again[2].read_bytes() == path.read_bytes() and again[2].parent.name == path.parent.name
    path.write_bytes(b"damaged")  # made again
    assert (project_wheel(plan_of(loaded, environment), environment, offline=True) or pytest.fail())[2] == path


def test_a_file_that_changes_meanwhile_is_an_error(tmp_path: Path, environment: Environment) -> None:
    plan = plan_of(plain(tmp_path), environment)
    (tmp_path / "lab/__init__.py").write_text("later")
    with pytest.raises(BuildError, match="changed while envbuild read it"):
        project_wheel(plan, environment, offline=True)


def test_an_editable_wheel_names_the_folder(tmp_path: Path, environment: Environment) -> None:
    top = put(tmp_path / "top", {"a/lab/__init__.py": ""})
    folder = make_recipe(top / "recipes", "r", (), extra='[project]\npath = "../../a/lab"\nmodule = "a.lab"\n')
    plan = plan_of(load_recipe(folder / "recipe.toml"), environment, editable=True)
    _, _, path = project_wheel(plan, environment, offline=True) or pytest.fail()
    with zipfile.ZipFile(path) as archive:
        assert sorted(archive.namelist()) == [
            "__editable__.a_lab.pth",
            "a_lab-0.dist-info/METADATA",
            "a_lab-0.dist-info/RECORD",
            "a_lab-0.dist-info/WHEEL",
        ]
        assert archive.read("__editable__.a_lab.pth").decode() == f"{top}\n"
    with pytest.raises(BuildError, match="of its wheel is not in "):
        project_wheel(plan_of(plain(tmp_path), environment, editable=True), environment, offline=True)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Let the build back end make this wheel."""

    def back_end(name: str = "own", **options: Any) -> None:
        path = make_wheel(tmp_path / "made", name, **options)
        monkeypatch.setattr(project, "_built", lambda *_: path)

    return back_end


def built(tmp_path: Path) -> LoadedRecipe:
    return recipe_of(put(tmp_path / "top", {"setup.py": "", "own.py": ""}), 'path = "../.."\nextras = ["x"]', ())


@pytest.mark.parametrize(
    ("wheel", "changes", "words"),
    [
        ({"requires": ["leaf>=2"]}, {}, r"requires leaf>=2, and 1\.5 is locked"),
        ({"requires": ["other"]}, {}, "requires other, and no version is locked"),
        ({"requires": ['other; extra == "x"']}, {}, "requires other"),
        ({"tag": "cp311-cp311-linux_x86_64"}, {"image": ImageTable()}, "was compiled for this host"),
        ({"name": "leaf"}, {}, "its distribution is leaf, as that of a locked package"),
        ({"name": "ddp-train"}, {}, "its distribution is ddp-train"),
        ({"requires": ["((("]}, {}, "not a wheel, or damaged"),
    ],
)
def test_a_wheel_that_does_not_suit_is_refused(
    tmp_path: Path, environment: Environment, made: Callable[..., None], wheel: Any, changes: Any, words: str
) -> None:
    made(**wheel)
    with pytest.raises(EnvbuildError, match=words) as caught:
        project_wheel(plan_of(built(tmp_path), environment, ("leaf", "1.5"), **changes), environment, offline=True)
    assert "recipe.toml:6:1: " in caught.value.message or "damaged" in caught.value.message


def test_a_wheel_that_suits_is_taken(tmp_path: Path, environment: Environment, made: Callable[..., None]) -> None:
    made(requires=["leaf>=1", 'own[y]; extra == "x"', 'gone; extra == "y"', 'gone; sys_platform == "win32"'])
    plan = plan_of(built(tmp_path), environment, ("leaf", "1.5"))
    assert (project_wheel(plan, environment, offline=True) or pytest.fail())[:2] == ("own", "1.0")
    made(requires=["torch"])  # which an existing base may have
    based = dataclasses.replace(plan, python="3.12", image=ImageTable(base="docker.io/pytorch/pytorch:2"))
    project_wheel(based, environment, offline=True)


def test_a_wheel_of_another_processor_is_not_taken(
    tmp_path: Path, environment: Environment, made: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(built(tmp_path), environment)
    for machine in ("x86_64", "aarch64"):  # a login node and a compute node with one store
        monkeypatch.setattr(project, "host_arch", lambda machine=machine: machine)
        made(tag=f"cp311-cp311-linux_{machine}")
        path = (project_wheel(plan, environment, offline=True) or pytest.fail())[2]
        assert path.name == f"own-1.0-cp311-cp311-linux_{machine}.whl"


def test_a_failing_back_end_is_an_error_with_a_position(tmp_path: Path, environment: Environment) -> None:
    text = '[build-system]\nrequires = []\nbuild-backend = "no_such"\nbackend-path = ["."]\n'
    loaded = recipe_of(put(tmp_path / "top", {"pyproject.toml": text, "p.py": ""}))
    with pytest.raises(
        BuildError, match=r"(?s)recipe.toml:6:1: \[project\]: the wheel of .* cannot be built .*no_such"
    ):
        project_wheel(plan_of(loaded, environment), environment, offline=True)


def test_the_name_of_a_locked_package_is_refused_before_a_build(tmp_path: Path, environment: Environment) -> None:
    loaded = recipe_of(put(tmp_path / "top", {"pyproject.toml": PYPROJECT, "a.py": ""}))
    packages = (LockedPackage("lab-pkg", "1.0", ("a" * 64,)), LockedPackage("numpy", "2.2.6", ("a" * 64,)))
    lock = Lock("r", TARGET.name, "3.11", PLATFORM, loaded.resolution_digest(TARGET), packages)
    write_lock_file(loaded.folder / "cpu-x86_64.requirements.txt", render_lock(lock))
    with pytest.raises(RecipeError, match=r"recipe.toml:6:1: .* its distribution is lab-pkg"):
        prepare(loaded, TARGET, environment, artifact="venv", locked=True, offline=True, log=print)


def test_what_cannot_hold_a_project_says_so(tmp_path: Path, environment: Environment) -> None:
    use: Any = {"locked": True, "offline": True, "log": print}
    without = load_recipe(make_recipe(tmp_path / "w", "r", ["numpy"]) / "recipe.toml")
    with pytest.raises(UsageError, match=r"--editable: recipe r has no \[project\]"):
        prepare_folder(VENV, without, TARGET, environment, editable=True, here=False, **use)
    assert DOCKER.form == "registry"


# State and receipt


def test_the_state_names_the_project_and_is_read_back(tmp_path: Path, environment: Environment) -> None:
    plan = plan_of(plain(tmp_path), environment)
    own = [WheelFile("ddp-train", "1", Path("t"), "b" * 64, 1), WheelFile("a-lab", "0", Path("w"), "c" * 64, 1)]
    state = state_of(plan, "3.11.7", "/usr/bin/python3", [("a-lab", "0", "sha256:r")], own=own)
    assert plan.project is not None
    assert state.project == {
        "name": "a-lab",
        "version": "0",
        "commit": "",
        "digest": plan.project.digest,
        "editable": False,
    }
    assert parse_state(state.render().encode(), "x") == state
    schema = json.loads((TOP / "docs/receipt.schema.json").read_text())
    validate(state.project, schema["properties"]["project"])
    without = dataclasses.replace(state, project={})
    assert "project" not in json.loads(without.render()) and without.digest == state.digest
    with pytest.raises(BuildError, match="invalid"):
        parse_state(state.render().replace('"project": {', '"project": 3, "x": {').encode(), "x")
