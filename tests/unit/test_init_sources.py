"""`envbuild init`: sources of packages, own packages, markers, own code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from lab.drafts import draft_of
from rattler import MatchSpec

from envbuild.base.errors import UsageError
from envbuild.imports import read_source
from envbuild.imports.compose import compose
from envbuild.imports.origin import Origin, read_sources
from envbuild.imports.statement import Draft
from envbuild.recipe.model import Recipe

_INDEXES = "".join(
    f'[[tool.uv.index]]\nname = "{name}"\nurl = "https://download.pytorch.org/whl/{name}"\nexplicit = true\n'
    for name in ("cpu", "cu126", "cu128")
)


def imported(folder: Path, name: str, text: str, **more: object) -> tuple[Draft, Recipe]:
    (folder / name).write_text(text)
    return draft_of(folder / name, **{"target": None} | more)  # type: ignore[arg-type]


def reason(draft: Draft, text: str) -> str:
    (found,) = {entry.reason for entry in draft.lost if text in entry.text}
    return found


def accelerators(recipe: Recipe) -> set[str]:
    return {target.rpartition("-")[0] for target in recipe.targets}


def test_extras_of_uv_choose_their_index(tmp_path: Path) -> None:
    text = f"""\
[project]
name = "a"
dependencies = ["numpy"]
[project.optional-dependencies]
cpu = ["torch>=2.7"]
cu126 = ["torch>=2.7"]
[tool.uv.sources]
torch = [{{ index = "cpu", extra = "cpu" }}, {{ index = "cu126", extra = "cu126" }}]
{_INDEXES}"""
    for extra in ("cpu", "cu126"):
        draft, recipe = imported(tmp_path, "pyproject.toml", text, groups=(extra,))
        (table,) = recipe.targets.values()
        assert accelerators(recipe) == {extra} and table.requirements == ("torch>=2.7",)
        assert table.indexes == (f"https://download.pytorch.org/whl/{extra}",) and not draft.warning
        assert reason(draft, "whl/cu128") == "an explicit index that no package names"
    draft, recipe = imported(tmp_path, "pyproject.toml", text)
    assert accelerators(recipe) == {"cpu"}
    assert reason(draft, "whl/cu126") == "belongs to cu126: carry it with --extra cu126"


def test_markers_of_uv_choose_the_index_of_linux(tmp_path: Path) -> None:
    text = f"""\
[project]
name = "a"
dependencies = ["torch>=2.7"]
[tool.uv.sources]
torch = [
  {{ index = "cpu", marker = "sys_platform != 'linux'" }}, {{ index = "cu126", marker = "sys_platform == 'linux'" }},
]
{_INDEXES}"""
    draft, recipe = imported(tmp_path, "pyproject.toml", text)
    assert accelerators(recipe) == {"cu126"}
    assert reason(draft, "whl/cpu").startswith("for another operating system")


def test_the_source_of_a_package_of_poetry_chooses_the_index(tmp_path: Path) -> None:
    text = """\
[tool.poetry.dependencies]
torch = [
  { version = "^2.6.0", source = "mac", platform = "darwin" },
  { version = "^2.6.0+cu124", markers = "sys_platform == 'linux'", source = "gpu" },
]
scipy = { version = "1.15", platform = "!darwin" }
pywin32 = { version = "*", markers = "sys_platform == 'win32'" }
torchaudio = "~2.6.0+cu124"
[[tool.poetry.source]]
name = "mac"
url = "https://download.pytorch.org/whl/cpu"
priority = "explicit"
[[tool.poetry.source]]
name = "gpu"
url = "https://download.pytorch.org/whl/cu124"
priority = "explicit"
"""
    draft, recipe = imported(tmp_path, "pyproject.toml", text)
    assert accelerators(recipe) == {"cu124"}
    (table,) = recipe.targets.values()
    assert table.requirements == ('torch<3,>=2.6.0 ; sys_platform == "linux"',)
    assert recipe.requirements == ('scipy==1.15; sys_platform != "darwin"', "torchaudio>=2.6.0,<2.7")
    assert reason(draft, "pywin32").startswith("for another operating system")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "pyproject.toml",
            '[project]\nname = "a"\ndependencies = ["w-core>=1", "numpy"]\n'
            "[tool.uv.sources]\nw-core = { workspace = true }\n",
        ),
        (
            "pyproject.toml",
            '[project]\nname = "a"\ndependencies = ["w_core", "numpy"]\n'
            '[tool.uv.sources]\nw-core = { path = "../core", editable = true }\n',
        ),
        ("pyproject.toml", '[tool.poetry.dependencies]\nnumpy = "*"\nw-core = { path = "../core", develop = true }\n'),
        (
            "pixi.toml",
            '[workspace]\nname = "a"\nchannels = ["conda-forge"]\nplatforms = ["linux-64"]\n'
            '[pypi-dependencies]\nnumpy = "*"\nw-core = { path = "core", editable = true }\n',
        ),
        ("requirements.txt", "numpy\nw-core @ file:../core\n"),
        (
            "uv.lock",
            'version = 1\n[[package]]\nname = "a"\nversion = "1"\nsource = { virtual = "." }\n[package.metadata]\n'
            'requires-dist = [{ name = "numpy" }, { name = "w-core", editable = "core" }]\n'
            '[[package]]\nname = "numpy"\nversion = "2.2.6"\nsource = { registry = "https://pypi.example/simple" }\n'
            '[[package]]\nname = "w-core"\nversion = "1"\nsource = { editable = "core" }\n',
        ),
    ],
)
def test_the_name_of_an_own_package_is_never_asked_of_an_index(tmp_path: Path, name: str, text: str) -> None:
    draft, recipe = imported(tmp_path, name, text, target="cpu-x86_64")
    everything = [*recipe.requirements, *recipe.constraints, *recipe.conda.requirements, *recipe.conda.dependencies]
    assert any("numpy" in one for one in everything) and not any("core" in one for one in everything)
    assert any("core" in entry.text for entry in draft.lost)


def test_a_package_of_uv_at_a_url_is_not_its_name(tmp_path: Path) -> None:
    text = (
        '[project]\nname = "a"\ndependencies = ["flash-attn==2.7.4"]\n'
        '[tool.uv.sources]\nflash-attn = { url = "https://host.example/flash_attn-2.7.4-py3-none-any.whl" }\n'
    )
    draft, recipe = imported(tmp_path, "pyproject.toml", text)
    assert recipe.requirements == () and "#sha256=HEX" in reason(draft, "flash-attn==2.7.4")


def test_a_conda_spec_with_its_channel(tmp_path: Path) -> None:
    one = "channels: [conda-forge]\ndependencies:\n- conda-forge::numpy=2.1\n- bioconda::samtools\n"
    draft, recipe = imported(tmp_path, "environment.yml", one, target="cpu-x86_64")
    assert recipe.conda.dependencies == ("numpy=2.1", "samtools")
    assert recipe.conda.channels == ("conda-forge", "bioconda")
    assert [entry.text for entry in draft.lost] == ["bioconda::samtools"]


def test_an_environment_without_channels_has_one_that_is_named(tmp_path: Path) -> None:
    pins = "- nvidia::cuda-nvcc=12.4\n- pytorch::pytorch=2.5.*\n"
    draft, recipe = imported(tmp_path, "environment.yml", f"dependencies:\n{pins}- scipy\n")
    assert recipe.conda.channels == ("nvidia", "pytorch", "conda-forge")
    assert "the recipe has conda-forge" in reason(draft, "no channels")
    assert {"nvidia::cuda-nvcc=12.4", "pytorch::pytorch=2.5.*"} <= {entry.text for entry in draft.lost}
    draft, recipe = imported(tmp_path, "environment.yml", "dependencies:\n- mine::a\n- python=3.12\n")
    assert recipe.conda.channels == ("mine",) and draft.lost == ()


@pytest.mark.parametrize(
    "spec", ["numpy=2.2.6=py312_0", "a=1.5.*", "a 1.2", "a 1.2 py_0", "a=0.7dev1+1.*", "a>=1.0*", "a==1.*"]
)
def test_specs_as_conda_writes_them_are_carried_and_lock_reads_them(tmp_path: Path, spec: str) -> None:
    draft, recipe = imported(tmp_path, "environment.yml", f"channels: [a]\ndependencies:\n- {spec}\n")
    assert recipe.conda.dependencies == (spec,) and draft.lost == ()
    assert MatchSpec(recipe.conda.dependencies[0]).name is not None


@pytest.mark.parametrize(
    ("name", "text", "setting"),
    [
        ("pyproject.toml", '[project]\nname = "x"\n[tool.uv]\nprerelease = "allow"\n', "prerelease = allow"),
        ("pyproject.toml", '[project]\nname = "x"\n[tool.uv]\nexclude-dependencies = ["torchvision"]\n', "torchvision"),
        ("pyproject.toml", '[tool.uv]\nconflicts = [[{extra = "a"}, {extra = "b"}]]\n', "'extra': 'a'"),
        ("pyproject.toml", '[tool.uv]\nrequired-version = ">=0.11"\n', "required-version = >=0.11"),
        ("pyproject.toml", '[tool.uv]\ndefault-groups = ["docs"]\n', "default-groups = docs"),
        ("pyproject.toml", '[tool.hatch.envs.default]\npython = "3.10"\n', "[tool.hatch.envs.default] python = 3.10"),
        (
            "pyproject.toml",
            '[tool.hatch.envs.a.env-vars]\nPIP_INDEX_URL = "https://a.example/"\n',
            "env-vars PIP_INDEX_URL",
        ),
        ("Pipfile", '[packages]\nrich = "*"\n[pipenv]\nallow_prereleases = true\n', "allow_prereleases = True"),
    ],
)
def test_settings_that_change_what_is_resolved_are_listed(tmp_path: Path, name: str, text: str, setting: str) -> None:
    draft, _ = imported(tmp_path, name, text)
    assert re.match("a setting of that tool|uv leaves this package out", reason(draft, setting))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("Dockerfile", "FROM python:3.11\nENV PIP_EXTRA_INDEX_URL=https://a.example/simple\nRUN pip install rich\n"),
        ("Dockerfile", "FROM python:3.11\nENV UV_INDEX=own=https://a.example/simple\nRUN uv pip install rich\n"),
        (
            "environment.yml",
            "dependencies: [pip, {pip: [rich]}]\nvariables: {PIP_EXTRA_INDEX_URL: 'https://a.example/simple'}\n",
        ),
    ],
)
def test_indexes_in_variables_are_carried(tmp_path: Path, name: str, text: str) -> None:
    _, recipe = imported(tmp_path, name, text)
    (table,) = recipe.targets.values()
    assert "https://a.example/simple" in table.indexes


def test_what_pipenv_and_uv_say_of_an_index_is_listed(tmp_path: Path) -> None:
    text = '[[source]]\nurl = "https://a.example/simple"\nverify_ssl = false\nname = "a"\n[packages]\nrich = "*"\n'
    draft, _ = imported(tmp_path, "Pipfile", text)
    assert reason(draft, "verify_ssl = false of https://a.example/simple").startswith("certificates are checked")
    text = '[project]\nname = "a"\n[[tool.uv.index]]\nurl = "https://a.example/simple"\ndefault = true\n'
    draft, _ = imported(tmp_path, "pyproject.toml", text)
    assert "whether PyPI is asked" in reason(draft, "default = true of https://a.example/simple")


def test_an_optional_package_of_poetrys_lock_belongs_to_its_extra(tmp_path: Path) -> None:
    package = '[[package]]\nname = "{}"\nversion = "1.0"\noptional = {}\npython-versions = "*"\nfiles = []\n'
    text = package.format("rich", "false") + package.format("colorama", "true") + package.format("six", "true")
    text += '[extras]\ncolours = ["colorama (>=1)"]\n[metadata]\nlock-version = "2.0"\n'
    text += 'python-versions = "3.10.* || 3.12.*"\ncontent-hash = "x"\n'
    draft, recipe = imported(tmp_path, "poetry.lock", text)
    assert recipe.requirements == ("rich==1.0",) and recipe.python == "3.12"
    assert "--extra colours" in reason(draft, "colorama") and "belongs to optional" in reason(draft, "six")


@pytest.mark.parametrize(
    "package",
    ["pywin32==304", "pywinpty", "tensorflow-intel==2.15.0", "winrt-runtime", "pyobjc-framework-Cocoa", "mlx-metal==1"],
)
def test_packages_for_other_systems_alone_are_listed(tmp_path: Path, package: str) -> None:
    draft, recipe = imported(tmp_path, "requirements.txt", f"rich\n{package}\npywin32-ctypes\n")
    assert recipe.requirements == ("rich", "pywin32-ctypes")
    assert reason(draft, package).startswith("for another operating system")


@pytest.mark.parametrize(("specifier", "named"), [(">=3.10.*", ""), ("three", "is not a version specifier")])
def test_a_python_that_is_no_specifier_is_listed(tmp_path: Path, specifier: str, named: str) -> None:
    draft, recipe = imported(tmp_path, "pyproject.toml", f'[project]\nname = "a"\nrequires-python = "{specifier}"\n')
    assert recipe.python == "3.11"
    assert [named in statement.reason for statement in draft.lost if statement.text.startswith("python")] == (
        [True] if named else []
    )


@pytest.mark.parametrize(
    "head",
    [
        "#\n# This file is autogenerated by pip-compile with Python 3.12\n# by the following command:\n",
        "# This file was autogenerated by uv via the following command:\n#    uv pip compile a.in -p 3.12 -o b\n",
    ],
)
def test_the_python_of_compiled_requirements_is_carried(tmp_path: Path, head: str) -> None:
    draft, recipe = imported(tmp_path, "requirements.txt", f"{head}rich==14.0.0\n    # via -r a.in\n")
    assert recipe.python == "3.12" and recipe.requirements == ("rich==14.0.0",) and not draft.lost


def test_poetrys_markers_of_extras_need_no_blanks(tmp_path: Path) -> None:
    text = '[tool.poetry]\nname = "a"\n[tool.poetry.dependencies]\ntorch = [\n'
    text += """{version="2.3.0+cu121", markers="sys_platform=='linux' and extra=='cuda'"},\n"""
    text += """{version="2.3.0", markers="extra=='cpu'"}]\n[tool.poetry.extras]\ncuda = ["torch"]\ncpu = ["torch"]\n"""
    draft, _ = imported(tmp_path, "pyproject.toml", text)
    assert "--extra cuda" in reason(draft, "torch==2.3.0+cu121") and "--extra cuda" in draft.warning


def test_prose_in_a_requirements_file_is_no_package(tmp_path: Path) -> None:
    text = "python -m venv venv\nC:\\\\P\\\\python.exe -m pip install --upgrade pip\npip3 install rich --index-url https://a.example/\n"
    text += "rich --extra-index-url https://a.example/simple\n"
    draft, recipe = imported(tmp_path, "requirements.txt", text)
    (table,) = recipe.targets.values()
    assert recipe.requirements == ("rich",) and "https://a.example/simple" in table.indexes
    assert reason(draft, "python -m venv venv") == "a command of the shell, not a requirement"
    draft, recipe = imported(tmp_path, "Dockerfile", 'FROM python:3.11\nRUN pip install rich export "A=b"\n')
    assert recipe.requirements == ("rich",) and "of the shell" in reason(draft, "export A=b")


def test_builds_of_conda_tell_the_python_and_those_for_another_go(tmp_path: Path) -> None:
    _, recipe = imported(tmp_path, "environment.yml", "dependencies: [numpy=2.2.6=py312h1_0, blas=1.0=mkl]\n")
    assert recipe.python == "3.12" and "numpy=2.2.6=py312h1_0" in recipe.conda.dependencies
    text = "dependencies: [python=3.8.5, jedi=0.17=py38_0, click=7=py_0, vc=14=h0123456_1, libblas=3.9=12_win64_mkl]\n"
    draft, recipe = imported(tmp_path, "environment.yml", text)
    assert recipe.python == "3.9" and recipe.conda.dependencies == ("jedi=0.17", "click=7=py_0", "libblas=3.9")
    assert reason(draft, "jedi").startswith("its build is for Python 3.8, and the recipe has 3.9")


def test_a_comment_in_a_setup_py_computes_nothing(tmp_path: Path) -> None:
    draft, _ = imported(tmp_path, "setup.py", "setup(\n    name='a',\n    # install_requires=requirements,\n)\n")
    assert not draft.lost


def test_a_channel_with_a_python_is_added_and_named(tmp_path: Path) -> None:
    text = "channels: [pytorch, nvidia]\ndependencies: [pytorch, numpy]\n"
    draft, recipe = imported(tmp_path, "environment.yml", text)
    assert recipe.conda.channels == ("pytorch", "nvidia", "conda-forge")
    assert reason(draft, "conda-forge").startswith("added: the named channels have no Python")
    for channels in ("[pytorch, conda-forge]", "[pytorch, defaults]", "[own]", "['https://a.example/own']"):
        draft, recipe = imported(tmp_path, "environment.yml", text.replace("[pytorch, nvidia]", channels))
        assert not any(statement.text == "conda-forge" for statement in draft.lost)


def test_files_for_gpus_in_folders_of_a_project_are_named(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("rich\n")
    for name, text in (
        ("docker/cuda/Dockerfile", "FROM nvidia/cuda:12.4.1-base-ubuntu22.04\n"),
        ("envs/environment-gpu.yml", "dependencies: [cudatoolkit=11.3]\n"),
        ("docs/requirements-gpu.txt", "cupy-cuda12x\n"),
        ("docker/notes.txt", "CUDA\n"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    draft, _ = draft_of(tmp_path, target=None)
    named = {statement.text for statement in draft.lost}
    assert {"docker/cuda/Dockerfile", "envs/environment-gpu.yml"} <= named
    assert not any("notes" in text or "docs" in text for text in named)
    assert "nvidia/cuda:12.4.1" in draft.warning and "cudatoolkit=11.3" in draft.warning


def test_a_file_that_a_dockerfile_copies_is_not_called_left_out(tmp_path: Path) -> None:
    (tmp_path / "requirements-gpu.txt").write_text("rich\n")
    (tmp_path / "Dockerfile").write_text(
        "FROM python:3.11\nWORKDIR /a\nCOPY requirements-gpu.txt .\nRUN pip install -r requirements-gpu.txt\n"
    )
    draft, recipe = draft_of(tmp_path, target=None)
    assert recipe.requirements == ("rich",)
    assert not any("leaves it out" in statement.reason for statement in draft.lost)


def test_the_local_version_of_a_range_is_named(tmp_path: Path) -> None:
    text = '[tool.poetry]\nname = "a"\n[tool.poetry.dependencies]\ntorch = "^2.1.2+cu121"\n'
    draft, _ = imported(tmp_path, "pyproject.toml", text)
    assert reason(draft, "torch ^2.1.2+cu121").endswith("in ranges: carried as torch>=2.1.2,<3")
    assert not draft.warning


def test_extras_that_are_features_of_pixis_default_are_carried(tmp_path: Path) -> None:
    text = '[project]\nname = "a"\ndependencies = ["rich"]\n[project.optional-dependencies]\n'
    text += 'plots = ["seaborn"]\ndocs = ["sphinx"]\n[tool.pixi.workspace]\nchannels = ["conda-forge"]\n'
    text += 'platforms = ["linux-64"]\n[tool.pixi.environments]\ndefault = { features = ["plots"] }\n'
    draft, recipe = imported(tmp_path, "pyproject.toml", text)
    assert recipe.requirements == ("rich", "seaborn") and "--extra docs" in reason(draft, "sphinx")


def test_a_constraints_file_beside_another_source_adds_no_package(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("rich\n")
    (tmp_path / "constraints.txt").write_text("rich<14\nnumpy==2.2.0\n")
    origin = Origin((tmp_path / "requirements.txt", tmp_path / "constraints.txt"))
    draft = compose("a", read_sources(origin))
    assert draft.data["requirements"] == ["rich"] and draft.data["constraints"] == ["rich<14", "numpy==2.2.0"]
    alone = compose("a", read_sources(Origin((tmp_path / "constraints.txt",))))
    assert alone.data["requirements"] == ["rich<14", "numpy==2.2.0"]


def test_a_spec_that_lock_cannot_read_is_listed(tmp_path: Path) -> None:
    draft, recipe = imported(tmp_path, "environment.yml", "channels: [a]\ndependencies:\n- a=1.*.5\n- b\n")
    assert recipe.conda.dependencies == ("b",) and "is not a match spec" in reason(draft, "a=1.*.5")


def test_requirements_for_other_systems_are_listed(tmp_path: Path) -> None:
    text = (
        "numpy\npywin32; sys_platform == 'win32'\npyobjc ; platform_system=='Darwin'\n"
        "uvloop; sys_platform != 'win32'\ntomli; python_version < '3.5'\nx; platform_machine == 'aarch64'\n"
    )
    draft, recipe = imported(tmp_path, "requirements.txt", text)
    assert [one.partition(";")[0] for one in recipe.requirements] == ["numpy", "uvloop", "x"]
    assert {entry.text.partition(";")[0].strip() for entry in draft.lost} == {"pywin32", "pyobjc", "tomli"}
    assert "not for Python" in reason(draft, "tomli")


def test_a_folder_with_a_package_is_the_recipes_own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    project = '[project]\nname = "my-train"\nversion = "1"\ndependencies = ["numpy"]\n'
    build = '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
    (tmp_path / "code").mkdir()
    (tmp_path / "code/pyproject.toml").write_text(project + build)
    draft, _ = draft_of(tmp_path / "code")
    assert draft.data["project"] == {"path": "../../code"}
    assert "project" not in draft_of(tmp_path / "code/pyproject.toml")[0].data
    for text in (project, project + build + "[tool.uv]\npackage = false\n"):
        (tmp_path / "code/pyproject.toml").write_text(text)
        assert "project" not in draft_of(tmp_path / "code")[0].data
    own = project.replace('"numpy"', '"core"') + build + "[tool.uv.sources]\ncore = { workspace = true }\n"
    (tmp_path / "code/pyproject.toml").write_text(own)
    draft, _ = draft_of(tmp_path / "code")
    assert "project" not in draft.data and "which an index would replace" in reason(draft, "../../code")


def test_dynamic_dependencies_of_setuptools_and_hatch(tmp_path: Path) -> None:
    (tmp_path / "base.txt").write_text("numpy>=2\n")
    (tmp_path / "extra.txt").write_text("rich\n")
    text = """\
[project]
name = "a"
dynamic = ["dependencies", "optional-dependencies"]
[tool.setuptools.dynamic]
dependencies = { file = ["base.txt"] }
optional-dependencies.more = { file = ["extra.txt"] }
"""
    draft, recipe = imported(tmp_path, "pyproject.toml", text)
    assert recipe.requirements == ("numpy>=2",) and "--extra more" in reason(draft, "rich")
    text = text.partition("[tool")[0].replace(', "optional-dependencies"', "") + (
        '[tool.hatch.metadata.hooks.requirements_txt]\nfiles = ["base.txt"]\n'
    )
    assert imported(tmp_path, "pyproject.toml", text)[1].requirements == ("numpy>=2",)
    draft, _ = imported(tmp_path, "pyproject.toml", '[project]\nname = "a"\ndynamic = ["optional-dependencies"]\n')
    assert [(entry.text, entry.reason[:8]) for entry in draft.lost] == [("optional-dependencies", "dynamic:")]


def test_files_that_another_tool_converts_are_named(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("numpy\n")
    (tmp_path / "setup.py").write_text("from setuptools import setup\nsetup(install_requires=['rich'])\n")
    (tmp_path / "setup.cfg").write_text("[flake8]\nmax-line-length = 100\n")
    (tmp_path / "Pipfile").write_text("[packages]\nrich = '*'\n")
    (tmp_path / "pdm.lock").write_text('[[package]]\nname = "rich"\n')
    draft, _ = draft_of(tmp_path)
    assert {entry.text for entry in draft.lost} == {"pdm.lock"}
    assert "pdm export" in reason(draft, "pdm.lock") and set(draft.data["requirements"]) == {"numpy", "rich"}
    for name, said in (("pdm.lock", "pdm export"), ("a.sqsh", "envbuild inspect")):
        (tmp_path / name).touch()
        with pytest.raises(UsageError) as caught:
            list(read_source(tmp_path / name))
        assert said in str(caught.value.hint)
    with pytest.raises(UsageError, match="no such file or folder"):
        list(read_source(tmp_path / "gone.tar"))


def test_an_extra_in_many_extras_is_listed_once(tmp_path: Path) -> None:
    extras = "".join(f'e{n} = ["a[base]"]\n' for n in range(30)) + 'base = ["rich", "tqdm"]\n'
    text = f'[project]\nname = "a"\ndependencies = ["numpy"]\n[project.optional-dependencies]\n{extras}'
    draft, _ = imported(tmp_path, "pyproject.toml", text)
    assert [entry.text for entry in draft.lost] == ["rich", "tqdm"]
    draft, recipe = imported(tmp_path, "pyproject.toml", text, groups=("e3",))
    assert recipe.requirements == ("numpy", "rich", "tqdm") and draft.lost == ()


def test_a_wheel_beside_the_file_is_no_folder(tmp_path: Path) -> None:
    draft, _ = imported(tmp_path, "requirements.txt", "./wheels/x.whl\n-c https://host.example/limits.txt\n-e .\n")
    assert "a file of the project" in reason(draft, "./wheels/x.whl")
    assert "a file at a URL" in reason(draft, "-c https") and "a folder with code" in reason(draft, "-e .")


@pytest.mark.parametrize(
    ("line", "ignored"),
    [
        ("-i https://index.example/simple ; python_version >= '3.10'", "; python_version >= 3.10"),
        ("--extra-index-url https://index.example/simple cupy-cuda12x scipy", "cupy-cuda12x scipy"),
        ("--pre rich --index-url=https://index.example/simple", "rich"),
        ("--no-binary :all: scipy -i https://index.example/simple", "scipy"),
    ],
)
def test_words_after_the_options_of_a_line_are_no_requirements(tmp_path: Path, line: str, ignored: str) -> None:
    draft, recipe = imported(tmp_path, "requirements.txt", f"numpy\n{line}\n")
    assert recipe.requirements == ("numpy",)
    assert "pip ignores them" in reason(draft, ignored)
    assert next(one.place for one in draft.lost if one.text == ignored).endswith("requirements.txt:2")
    assert "https://index.example/simple" in recipe.targets["cpu-x86_64"].indexes
    (tmp_path / "Dockerfile").write_text("FROM python:3.11\nRUN pip install -i https://index.example/simple numpy\n")
    assert draft_of(tmp_path / "Dockerfile")[1].requirements == ("numpy",)


def test_an_index_with_a_variable_is_named_and_not_carried(tmp_path: Path) -> None:
    text = "--extra-index-url https://index.example/${BUILD}/simple\n-i https://index.example/simple\nnumpy\n"
    draft, recipe = imported(tmp_path, "requirements.txt", text)
    (lost,) = draft.lost
    assert lost.place.endswith(":1") and "variable ${BUILD}" in lost.reason
    assert not any("$" in url for url in recipe.targets["cpu-x86_64"].indexes)


def test_the_python_and_the_system_of_a_wheel_at_an_address(tmp_path: Path) -> None:
    url = "https://download.pytorch.org/whl/cu121/torch-2.4.1%2Bcu121-{0}-{0}-{1}.whl"
    draft, recipe = imported(tmp_path, "requirements.txt", f"torch @ {url.format('cp312', 'win_amd64')}\n")
    assert recipe.python == "3.12"
    assert recipe.targets["cu121-x86_64"].requirements == ("torch==2.4.1+cu121",)
    assert [one.reason.startswith("for another operating system") for one in draft.lost] == [True]
    draft, recipe = imported(tmp_path, "requirements.txt", f"torch@{url.format('cp38', 'linux_x86_64')}\n")
    reasons = [one.reason for one in draft.lost]
    assert f"its wheel is for Python 3.8, and the recipe has {recipe.python}" in reasons
    pin = "x @ https://host.example/x-1-{0}-{0}-linux_x86_64.whl#sha256=" + "0" * 64
    draft, recipe = imported(tmp_path, "requirements.txt", f"{pin.format('cp37')}\nnumpy\n")
    assert recipe.requirements == ("numpy",) and "is for Python 3.7" in draft.lost[0].reason


def test_a_pylock_whose_wheels_are_for_one_python_and_system(tmp_path: Path) -> None:
    def row(name: str, *files: str, more: str = "") -> str:
        rows = ", ".join(f'{{ name = "{name}-1-{file}.whl" }}' for file in files)
        return f'[[packages]]\nname = "{name}"\nversion = "1"\nwheels = [{rows}]\n{more}'

    head, pure = 'lock-version = "1.0"\n', "py3-none-any"
    text = head + row("six", pure) + row("a", "cp312-cp312-macosx_11_0_arm64") + row("b", "cp312-cp312-win32")
    draft, recipe = imported(tmp_path, "pylock.toml", text)
    assert recipe.python == "3.12" and set(recipe.requirements) == {"six==1", "a==1", "b==1"}
    assert [one.text.split("-")[0] for one in draft.lost if "another operating system" in one.reason] == ["a", "b"]
    both = row("a", "cp310-cp310-manylinux_2_28_x86_64", "cp310-cp310-win32") + row("b", "cp39-abi3-win32", pure)
    source = row("c", "cp312-cp312-win32", more='sdist = { name = "c-1.tar.gz" }\n')
    draft, recipe = imported(tmp_path, "pylock.toml", head + both + source)
    assert recipe.python == "3.10" and not any("another operating" in one.reason for one in draft.lost)
