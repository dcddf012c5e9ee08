"""`envbuild init` on text that is valid and unusual: nothing gets lost in silence, and nothing is added."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from lab.drafts import draft_of
from uv import find_uv_bin

from envbuild.imports.pip_files import option_of


def test_a_comment_that_ends_with_a_backslash_takes_no_requirement_with_it(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("a==1\n# b==2 \\\nc==3\nd==4 \\\n# why\ne==5\n")
    _, recipe = draft_of(tmp_path / "requirements.txt")
    assert recipe.requirements == ("a==1", "c==3", "d==4", "e==5")


def test_a_requirement_with_its_name_and_egg(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text(
        "a[x] @ git+https://host.example/a@v1#egg=a\ngit+ssh://git@host.example/b#egg=b\n"
        "c@git+https://host.example/c#egg=c&subdirectory=py\n"
    )
    draft, recipe = draft_of(tmp_path / "requirements.txt")
    assert [text.partition("#")[0] for text in recipe.requirements] == [
        "a[x] @ git+https://host.example/a@v1",
        "b @ git+ssh://git@host.example/b",
        "c @ git+https://host.example/c",
    ]
    assert draft.lost == ()


def test_a_run_of_a_dockerfile_with_comments_and_here_documents(tmp_path: Path) -> None:
    text = r"""FROM python:3.11
RUN pip install a # why not b
RUN <<"EOF" bash -e
apt-get install -y git \
    vim  # an editor
# pip install c
pip install d git+https://host.example/e#egg=e && pip install f
EOF
RUN pip install g \

    # a comment
    h \
    && pip install i
"""
    (tmp_path / "Dockerfile").write_text(text)
    draft, recipe = draft_of(tmp_path / "Dockerfile")
    assert recipe.requirements == ("a", "d", "e @ git+https://host.example/e", "f", "g", "h", "i")
    assert recipe.image.packages == ("git", "vim")
    assert [entry.text for entry in draft.lost] == ["bash -e"]


def test_a_project_whose_extras_name_its_own_extras(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("""\
[project]
name = "My.Train"
dependencies = ["numpy"]
[project.optional-dependencies]
gpu = ["triton", "my-train[all]"]
Log_It = ["rich"]
all = ["my_train [gpu, log-it]", "my-train[gone]"]
[dependency-groups]
dev = ["pytest", "My.Train[log-it]", "my-train"]
""")
    assert draft_of(tmp_path / "pyproject.toml", groups=("all",))[1].requirements == ("numpy", "triton", "rich")
    draft, recipe = draft_of(tmp_path / "pyproject.toml", groups=("dev",))
    assert recipe.requirements == ("numpy", "rich", "pytest")
    said = {entry.text for entry in draft.lost if entry.reason.startswith("the project itself")}
    assert said == {"my-train[gone]", "my-train"}


def test_an_extra_that_is_spelled_otherwise_and_one_that_there_is_not(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("""\
[project]
name = "a"
[project.optional-dependencies]
Dev_Tools = ["rich"]
docs = ["sphinx"]
[tool.poetry.extras]
none = ["numpy"]
""")
    draft, recipe = draft_of(tmp_path / "pyproject.toml", groups=("dev-tools", "doc", "none"))
    assert recipe.requirements == ("rich",)
    said = {entry.text: entry.reason for entry in draft.lost if entry.place == "--extra"}
    assert said == {"doc": "no statement belongs to it; did you mean 'docs'? Accepted: Dev_Tools, docs, none"}
    (tmp_path / "requirements.txt").write_text("numpy\n")
    draft, _ = draft_of(tmp_path / "requirements.txt", groups=("gpu",))
    assert [(entry.text, entry.reason) for entry in draft.lost] == [("gpu", "no statement belongs to it")]


def test_a_group_that_is_included_by_another_spelling_and_one_that_there_is_not(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("""\
[dependency-groups]
Test_Tools = ["pytest"]
dev = [{include-group = "test.tools"}, "ruff", {include-group = "gone"}, {include-group = "dev"}]
""")
    draft, recipe = draft_of(tmp_path / "pyproject.toml", groups=("dev",))
    assert recipe.requirements == ("pytest", "ruff")
    said = {entry.text for entry in draft.lost if entry.reason == "no other group has this name"}
    assert said == {"{'include-group': 'gone'}", "{'include-group': 'dev'}"}


def test_a_uv_lock_whose_project_requires_its_own_extras(tmp_path: Path) -> None:
    (tmp_path / "uv.lock").write_text("""\
version = 1
[[package]]
name = "my-train"
source = { editable = "." }
[package.metadata]
requires-dist = [
    { name = "numpy" },
    { name = "my-train", extras = ["gpu"], marker = "extra == 'all'" },
    { name = "triton", marker = "extra == 'gpu'" },
]
""")
    draft, recipe = draft_of(tmp_path / "uv.lock", groups=("all", "gpu"))
    assert recipe.requirements == ("numpy", "triton")
    assert [entry.text for entry in draft.lost][:1] == ["my-train[gpu]"]


def test_the_python_of_an_exported_conda_environment(tmp_path: Path) -> None:
    (tmp_path / "environment.yml").write_text(
        "channels: [a]\ndependencies:\n- numpy=1.26.4=py310hb13e2d6_0\n- python=3.10.14=hd12c33a_0_cpython\n"
    )
    draft, recipe = draft_of(tmp_path / "environment.yml")
    assert recipe.python == "3.10" and draft.lost == ()
    assert recipe.conda.dependencies == ("numpy=1.26.4=py310hb13e2d6_0", "python 3.10.14 hd12c33a_0_cpython")


def test_a_python_of_conda_by_its_major_version(tmp_path: Path) -> None:
    (tmp_path / "environment.yml").write_text("channels: [a]\ndependencies:\n- python=3\n- x\n")
    draft, recipe = draft_of(tmp_path / "environment.yml")
    assert recipe.python == "3.11" and draft.lost == ()


def test_a_conda_environment_with_a_merged_table_tags_and_texts_in_the_place_of_lists(tmp_path: Path) -> None:
    (tmp_path / "environment.yml").write_text("""\
base: &base {channels: [bioconda], variables: {A: "1"}}
<<: *base
dependencies: !packages
- tqdm
- pip: einops
- pip: !more [rich]
platforms: linux-64
""")
    draft, recipe = draft_of(tmp_path / "environment.yml")
    assert recipe.conda.channels == ("bioconda", "conda-forge") and recipe.image.env == {"A": "1"}
    assert recipe.conda.dependencies == ("tqdm",) and recipe.conda.requirements == ("rich",)
    lost = {entry.text.partition(":")[0]: (entry.place.rpartition(":")[2], entry.reason) for entry in draft.lost}
    assert lost["{'pip'"] == ("3", "not a string") and lost["platforms"] == ("7", "not a list")


def test_values_of_options_are_no_packages(tmp_path: Path) -> None:
    """pip's and uv's options; a long one of pip may be abbreviated."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/r.txt").write_text("a\n")
    (tmp_path / "Dockerfile").write_text(
        "FROM python:3.11\nCOPY . .\n"
        "RUN pip --no-cache-dir install --progress-bar off --resume-retries 7 -qU -rsub/r.txt b\n"
        "RUN pip install --extra-index https://p.example/simple --upgrade-strategy eager c --config-settings x=y\n"
        "RUN uv pip install --link-mode copy --index own=https://q.example/simple -p 3.11 --no-progress d\n"
        "RUN pip install e --wibble 7 f\n"
        "RUN pip install g --wobble=7 h\n"
    )
    draft, recipe = draft_of(tmp_path / "Dockerfile")
    assert recipe.requirements == ("a", "b", "c", "d", "e", "g", "h")
    indexes = recipe.targets["cpu-x86_64"].indexes
    assert {"https://p.example/simple", "https://q.example/simple"} < set(indexes)
    said = {entry.text: (entry.place.rpartition(":")[2], entry.reason) for entry in draft.lost}
    assert said.keys() == {"COPY . .", "--config-settings x=y", "-p 3.11", "--wibble 7 f", "--wobble=7"}
    assert said["--wibble 7 f"][0] == "6" and "no such option" in said["--wibble 7 f"][1]


def test_every_option_of_the_installed_pip_and_uv_is_known() -> None:
    helps = {
        "pip": subprocess.run(
            [sys.executable, "-m", "pip", "install", "--help"], capture_output=True, text=True
        ).stdout,
        "uv": subprocess.run([find_uv_bin(), "pip", "install", "--help"], capture_output=True, text=True).stdout,
    }
    for tool, text in helps.items():
        found = re.findall(r"^ {2,8}((?:-\w, )?--[a-z0-9-]+(?:, --[a-z0-9-]+)*)( <\S+>)?", text, re.MULTILINE)
        assert len(found) > 40, tool
        for spellings, value in found:
            for name in spellings.split(", "):
                option = option_of(name, "pip", "uv")
                assert option and option[1] == bool(value), (tool, name)


def test_outputs_of_conda_list(tmp_path: Path) -> None:
    (tmp_path / "export.txt").write_text(
        "# This file may be used to create an environment using:\n# $ conda create --name <env> --file <this file>\n"
        "# platform: linux-64\nnumpy=2.2.6=py311h5d046bc_0\npython=3.11.9=hb806964_0_cpython\neinops=0.8.1=pypi_0\n"
        "pytorch=2.7.1=cuda126_mkl_py311_h1\n"
    )
    _, recipe = draft_of(tmp_path / "export.txt", target=None)
    assert list(recipe.targets) == ["cu126-x86_64"] and recipe.python == "3.11"
    assert recipe.targets["cu126-x86_64"].conda == (
        "numpy 2.2.6 py311h5d046bc_0",
        "python 3.11.9 hb806964_0_cpython",
        "pytorch 2.7.1 cuda126_mkl_py311_h1",
    )
    assert recipe.conda.requirements == ("einops==0.8.1",)
    url = "https://conda.anaconda.org/conda-forge"
    (tmp_path / "explicit.txt").write_text(
        f"# platform: linux-64\n@EXPLICIT\n{url}/noarch/tqdm-4.67.1-pyhd8ed1ab_1.conda#{'0' * 32}\n"
        f"{url}/linux-64/numpy-2.2.6-py311h5d046bc_0.conda\n"
    )
    _, recipe = draft_of(tmp_path / "explicit.txt")
    assert recipe.conda.channels == ("conda-forge",)
    assert recipe.targets["cpu-x86_64"].conda == ("tqdm 4.67.1 pyhd8ed1ab_1", "numpy 2.2.6 py311h5d046bc_0")


@pytest.mark.parametrize(
    ("text", "python"),
    [
        ("numpy==1.22.4", "3.10"),
        ("pandas<1.5", "3.10"),
        ("torch~=1.12.0", "3.10"),
        ("torch==1.13.1\nscipy==1.11.4", "3.11"),
        ("scipy==1.7.0", "3.9"),
        ("torch==1.13.1\ntorchvision", "3.10"),
        ("torch==1.13.1\ntorchaudio>=0.10", "3.10"),
        ("torch==2.0.1\ntorchvision\ntorchaudio", "3.11"),
        ("numpy==1.22.4 ; sys_platform == 'win32'", "3.11"),
        ("numpy>=1.22", "3.11"),
        ("numpy==2.5.2", "3.13"),
        ("scipy>=1.18,<2\nrich", "3.13"),
        ("networkx~=3.7", "3.13"),
        ("numpy>=2.4,<2.6", "3.11"),
        ("numpy==2.5.2 ; python_version >= '3.12'", "3.11"),
        ("numpy==1.22.4 ; python_version < '3.11'", "3.11"),
        ("numpy==2.5.2\npandas==2.1.4", "3.12"),
        ("x @ https://host.example/x-1-cp312-cp312-linux_x86_64.whl#sha256=" + 64 * "a", "3.12"),
        ("https://host.example/x-1-cp310-cp310-linux_x86_64.whl", "3.10"),
        ("https://host.example/x-1-cp310-cp310-a.whl\nhttps://host.example/x-1-cp311-cp311-a.whl", "3.11"),
        ("https://host.example/x-1-cp38-abi3-linux_x86_64.whl", "3.11"),
    ],
)
def test_the_python_is_one_for_which_pinned_packages_have_wheels(tmp_path: Path, text: str, python: str) -> None:
    (tmp_path / "requirements.txt").write_text(f"{text}\n")
    assert draft_of(tmp_path / "requirements.txt")[1].python == python


@pytest.mark.parametrize(
    ("accelerator", "package", "python"),
    [("cu101", "torch", "3.9"), ("cu113", "torch", "3.10"), ("cu101", "rich", "3.11"), ("cu121", "torch", "3.11")],
)
def test_an_old_cuda_has_wheels_of_torch_for_old_pythons_alone(
    tmp_path: Path, accelerator: str, package: str, python: str
) -> None:
    index = f"https://download.pytorch.org/whl/{accelerator}"
    (tmp_path / "requirements.txt").write_text(f"--index-url {index}\n{package}\n")
    assert draft_of(tmp_path / "requirements.txt", target=None)[1].python == python


def test_an_exact_python_counts_more_than_a_missing_wheel(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM python:3.12\nRUN pip install numpy==1.22.4\n")
    assert draft_of(tmp_path / "Dockerfile")[1].python == "3.12"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("Dockerfile", "FROM python:3.8\nRUN pip install rich\n"),
        ("environment.yml", "dependencies:\n- python=3.7\n- numpy\n"),
        ("pyproject.toml", '[project]\nname = "a"\nrequires-python = ">=3.6,<3.9"\ndependencies = ["rich"]\n'),
    ],
)
def test_a_python_that_is_too_old_becomes_the_nearest(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    draft, recipe = draft_of(tmp_path / name)
    assert recipe.python == "3.9"
    assert [one.reason for one in draft.lost if "the recipe has 3.9" in one.reason]


def test_the_python_of_the_projects_tools(tmp_path: Path) -> None:
    project = '[project]\nname = "a"\nrequires-python = ">=3.9"\ndependencies = ["rich"]\n'
    (tmp_path / "pyproject.toml").write_text(project)
    assert draft_of(tmp_path)[1].python == "3.11"
    (tmp_path / "pyproject.toml").write_text(f"{project}[tool.uv]\nenvironments = [\"python_version < '3.11'\"]\n")
    assert draft_of(tmp_path)[1].python == "3.10"
    (tmp_path / ".python-version").write_text("# own\n3.9.18\n3.12\n")
    assert draft_of(tmp_path)[1].python == "3.9"


def test_the_overrides_and_constraints_of_a_uv_lock(tmp_path: Path) -> None:
    text = """\
version = 1
requires-python = ">=3.9"
supported-markers = ["python_full_version == '3.12.*'"]
[manifest]
overrides = [{ name = "one", specifier = ">=2" }, { name = "three", git = "https://host.example/three" }]
constraints = [{ name = "two", specifier = "<3", marker = "sys_platform == 'linux'" }]
[[package]]
name = "a"
version = "1"
source = { virtual = "." }
dependencies = [{ name = "one" }]
[package.metadata]
requires-dist = [{ name = "one", specifier = "<2" }]
[[package]]
name = "one"
version = "2.1"
source = { registry = "https://pypi.org/simple" }
"""
    (tmp_path / "uv.lock").write_text(text)
    draft, recipe = draft_of(tmp_path / "uv.lock")
    assert recipe.overrides == ("one>=2",) and recipe.requirements == ("one",)
    assert 'two<3; sys_platform == "linux"' in recipe.constraints and recipe.python == "3.12"
    assert any("three" in one.text for one in draft.lost)


def test_the_extras_of_repeated_requirements_are_merged(tmp_path: Path) -> None:
    text = "one==1\none[a]; sys_platform != 'darwin'\ntwo\ntwo[b] ; platform_machine == 'x86_64'\n"
    (tmp_path / "requirements.txt").write_text(text)
    _, recipe = draft_of(tmp_path / "requirements.txt")
    assert recipe.requirements == (
        "one[a]==1",
        'two ; python_version >= "3.9"',
        'two[b]; platform_machine == "x86_64"',
    )
    assert recipe.constraints == ()


def test_extras_in_markers_are_groups(tmp_path: Path) -> None:
    text = """\
[project]
name = "a"
dependencies = ["rich"]
[tool.poetry.dependencies]
one = [
  { version = "1", markers = "extra == 'slow' and extra != 'fast'" },
  { version = "2", source = "f", markers = "extra == 'fast' and sys_platform == 'linux'" },
]
[[tool.poetry.source]]
name = "f"
url = "https://host.example/f"
priority = "explicit"
"""
    (tmp_path / "pyproject.toml").write_text(text)
    draft, recipe = draft_of(tmp_path / "pyproject.toml")
    assert recipe.requirements == ("rich",)
    assert {one.group for one in draft.lost if one.text.startswith("one==")} == {"slow", "fast"}
    _, recipe = draft_of(tmp_path / "pyproject.toml", groups=("fast",))
    assert recipe.requirements == ("rich", 'one==2; sys_platform == "linux"')
    assert recipe.targets["cpu-x86_64"].indexes[-1] == "https://host.example/f"


def test_sources_and_resolution_of_pdm(tmp_path: Path) -> None:
    text = """\
[project]
name = "a"
dependencies = ["one>=1"]
[tool.pdm.resolution]
excludes = ["two"]
overrides = { one = "2.0", three = ">=3" }
[[tool.pdm.source]]
type = "find_links"
url = "https://host.example/links"
name = "x"
include_packages = ["one"]
"""
    (tmp_path / "pyproject.toml").write_text(text)
    draft, recipe = draft_of(tmp_path / "pyproject.toml")
    assert recipe.overrides == ("one==2.0", "three>=3") and recipe.requirements == ("one",)
    lost = {one.text for one in draft.lost}
    assert {"excludes = two", "find-links https://host.example/links", "include_packages = ['one']"} <= lost


def test_a_poetry_lock_of_version_1_is_read_and_an_unknown_one_is_listed_beside_its_project(tmp_path: Path) -> None:
    row = '[[package]]\nname = "{0}"\nversion = "1.2"\ncategory = "{1}"\noptional = false\n'
    text = row.format("one", "main") + row.format("two", "dev") + '[metadata]\nlock-version = "{}"\n'
    (tmp_path / "pyproject.toml").write_text('[tool.poetry]\nname = "a"\n[tool.poetry.dependencies]\none = "^1.1"\n')
    (tmp_path / "poetry.lock").write_text(text.replace("{}", "1.1"))
    draft, recipe = draft_of(tmp_path)
    assert recipe.requirements == ("one>=1.1,<2",) and recipe.constraints == ("one==1.2",)
    assert next(one for one in draft.lost if one.text == "two==1.2").group == "dev"
    (tmp_path / "poetry.lock").write_text(text.replace("{}", "9.1"))
    draft, recipe = draft_of(tmp_path)
    assert recipe.constraints == () and "version 9.1 of the format poetry.lock" in draft.lost[0].reason


@pytest.mark.parametrize(
    ("base", "is_debian"),
    [
        ("python:3.11-slim-bookworm", True),
        ("debian:12", True),
        ("ghcr.io/astral-sh/uv:python3.11-bookworm", True),
        ("mambaorg/micromamba:2", True),
        ("ubuntu:24.04", False),
        ("ros:humble", False),
        ("nvidia/cuda:12.6.3-devel-ubuntu22.04", False),
        ("pytorch/pytorch:2.7.1-cuda12.6-cudnn9-runtime", False),
        ("condaforge/miniforge3", False),
    ],
)
def test_the_debian_packages_of_other_bases_are_listed(tmp_path: Path, base: str, is_debian: bool) -> None:
    (tmp_path / "Dockerfile").write_text(f"FROM {base}\nRUN apt-get install -y git\nRUN pip install rich\n")
    draft, recipe = draft_of(tmp_path / "Dockerfile")
    assert recipe.image.packages == (("git",) if is_debian else ())
    reasons = {one.text: one.reason for one in draft.lost}
    assert is_debian or reasons["git"].startswith("a package of another base image")


def test_an_architecture_without_a_target_is_no_other_system(tmp_path: Path) -> None:
    (tmp_path / "environment.yml").write_text("platforms: [linux-64, linux-ppc64le, win-64]\ndependencies: [rich]\n")
    reasons = {one.text: one.reason for one in draft_of(tmp_path / "environment.yml")[0].lost}
    assert reasons["linux-ppc64le"].startswith("for another architecture")
    assert reasons["win-64"].startswith("for another operating system")


def test_packages_that_only_conda_has_are_condas_for_conda_lock(tmp_path: Path) -> None:
    text = """\
[tool.poetry]
name = "a"
[tool.poetry.dependencies]
python = "^3.11"
pytorch = "^2.1"
pytorch-cuda = "12.1"
rich = "13.7"
[tool.conda-lock]
channels = ["nvidia", "pytorch"]
"""
    (tmp_path / "pyproject.toml").write_text(text)
    _, recipe = draft_of(tmp_path / "pyproject.toml", target=None)
    assert recipe.conda.dependencies == ("pytorch >=2.1,<3", "pytorch-cuda ==12.1") and "cu121-x86_64" in recipe.targets
    assert recipe.conda.requirements == ("rich==13.7",)
    pip = text.replace("channels", 'default-non-conda-source = "pip"\nchannels')
    (tmp_path / "pyproject.toml").write_text(pip)
    assert draft_of(tmp_path / "pyproject.toml", target=None)[1].environment == "venv"


def test_a_file_that_includes_itself_is_listed_with_that_reason(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("-r more.txt\nrich\n")
    (tmp_path / "more.txt").write_text("-c requirements.txt\nnumpy\n")
    draft, recipe = draft_of(tmp_path / "requirements.txt")
    assert recipe.requirements == ("numpy", "rich")
    assert [one.reason for one in draft.lost] == ["this file is being read already: it includes itself"]


def test_a_project_that_a_recipe_cannot_have_is_listed(tmp_path: Path) -> None:
    text = '[build-system]\nrequires = []\n[project]\nname = "a"\ndependencies = ["rich", "x @ https://host.example/x.zip"]\n'
    (tmp_path / "pyproject.toml").write_text(text)
    (tmp_path / "Dockerfile.bin").write_bytes(b"\xff\x00\xfe")
    (tmp_path / "dockerfile").mkdir()
    draft, recipe = draft_of(tmp_path)
    assert recipe.project is None and recipe.requirements == ("rich",)
    reasons = [one.reason for one in draft.lost]
    assert any(one.startswith("[project] cannot have it: ") and "no sha256" in one for one in reasons)
    assert any("is not UTF-8" in one for one in reasons)
    (tmp_path / "pyproject.toml").write_text(text.replace(', "x @ https://host.example/x.zip"', ""))
    assert draft_of(tmp_path)[0].data["project"]


def test_an_environment_that_was_exported_on_windows(tmp_path: Path) -> None:
    text = (
        "name: a\ndependencies:\n  - numpy=1.26.4=py311hdab7c0b_0\n"
        "  - vc=14.42=haa95532_3\n  - tqdm=4.65.0=pyhd8ed1ab_0\n"
        "  - pytorch=2.1.2=py3.11_cuda12.1_cudnn8_0\n  - m2w64-gcc-libs=5.3.0=7\n  - python=3.11.5=he1021f5_0\n"
        "prefix: C:\\Users\\a\\envs\\a\n"
    )
    (tmp_path / "environment.yml").write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    draft, recipe = draft_of(tmp_path / "environment.yml", target=None)
    assert recipe.conda is not None
    assert recipe.conda.dependencies[:3] == (
        "numpy=1.26.4",
        "tqdm=4.65.0=pyhd8ed1ab_0",
        "pytorch=2.1.2=*cuda12.1*",
    )
    assert list(recipe.targets) == ["cu121-x86_64"] and recipe.python == "3.11"
    reasons = {one.text: one.reason for one in draft.lost}
    assert "carried as numpy=1.26.4" in reasons["numpy=1.26.4=py311hdab7c0b_0"]
    assert "operating system" in reasons["vc=14.42=haa95532_3"] and "m2w64-gcc-libs=5.3.0=7" in reasons


def test_a_file_that_a_dockerfile_copies_to_a_folder_of_its_base(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("rich==14.0.0\n")
    for run in ("cd /tmp && pip install -r requirements.txt", "pip install -r /tmp/requirements.txt"):
        (tmp_path / "Dockerfile").write_text(f"FROM python:3.11\nWORKDIR /app\nCOPY requirements.txt /tmp\nRUN {run}\n")
        assert draft_of(tmp_path / "Dockerfile")[1].requirements == ("rich==14.0.0",)


def test_wheels_of_the_host_that_wrote_the_file(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text(
        "torch @ file:///D:/whl/torch-2.6.0%2Bcu124-cp311-cp311-win_amd64.whl#sha256=00\n"
        "own @ file:///C:/Users/a/own-1.0-py3-none-any.whl\n"
    )
    draft, recipe = draft_of(tmp_path / "requirements.txt", target=None)
    assert recipe.targets["cu124-x86_64"].requirements == ("torch==2.6.0+cu124",) and recipe.requirements == ()
    reasons = {one.text.partition(" ")[0]: one.reason for one in draft.lost}
    assert reasons["torch"].endswith("carried as torch==2.6.0+cu124") and "NAME @ ./FILE" in reasons["own"]


def test_specs_of_conda_in_a_text_file(tmp_path: Path) -> None:
    path = tmp_path / "requirements.txt"
    path.write_text(
        "# platform: linux-64\npython=3.11.5\npytorch=1.11.0=py3.8_cuda11.3_cudnn8.2.0_0\ncudatoolkit=11.3.1\n"
    )
    _, recipe = draft_of(path, target=None)
    assert recipe.environment == "conda" and recipe.python == "3.11" and list(recipe.targets) == ["cu113-x86_64"]
    assert "cudatoolkit=11.3.1" in recipe.conda.dependencies + recipe.targets["cu113-x86_64"].conda
    path.write_text(
        "# $ conda create --name <env> --file <this file> -c nvidia -c conda-forge\npytorch-gpu==2.5.1 # why\nrich\n"
    )
    _, recipe = draft_of(path, target=None)
    assert recipe.environment == "conda" and recipe.conda.dependencies == ("pytorch-gpu==2.5.1", "rich")
    assert recipe.conda.channels == ("nvidia", "conda-forge")
    path.write_text("rich\nnumpy==1.26.4\n")
    assert draft_of(path)[1].environment != "conda"


def test_a_wheel_without_a_fragment_is_told_what_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("https://host.example/flash_attn-2.8.0-cp311-cp311-linux_x86_64.whl\n")
    (lost,) = draft_of(tmp_path / "requirements.txt")[0].lost
    assert lost.text.endswith(".whl") and "append #sha256=HEX" in lost.reason


@pytest.mark.parametrize(
    ("text", "is_foreign"),
    [
        ("tensorflow-macos==2.9", True),
        ("tensorflow_metal", True),
        ("six @ https://host.example/six-1.0-cp37-cp37m-macosx_10_13_x86_64.whl", True),
        ("six @ https://host.example/six-1.0-cp311-cp311-win_amd64.whl", True),
        ("six @ https://host.example/six-1.0-cp311-cp311-linux_x86_64.whl", False),
        ("tensorflow-macos-tools", False),
    ],
)
def test_packages_and_wheels_of_another_system_are_named_as_such(tmp_path: Path, text: str, is_foreign: bool) -> None:
    (tmp_path / "requirements.txt").write_text(f"numpy\n{text}\n")
    draft, _ = draft_of(tmp_path / "requirements.txt")
    reasons = [item.reason for item in draft.lost if item.text == text]
    assert any("another operating system" in reason for reason in reasons) is is_foreign


def test_an_export_of_macos_does_not_contradict_the_python_of_the_recipe(tmp_path: Path) -> None:
    text = "dependencies:\n- appnope=0.1.0=py38_1001\n- python=3.8.5=h26836e1_1\n- icu=58.2=h0a44026_3\n"
    (tmp_path / "environment.yml").write_text(text)
    draft, recipe = draft_of(tmp_path / "environment.yml")
    reasons = [item.reason for item in draft.lost if "python" in item.text]
    assert recipe.python == "3.9"
    assert any("the recipe has 3.9" in reason for reason in reasons)
    assert not any("carried as" in reason for reason in reasons)
    assert any("carried as icu=58.2" in item.reason for item in draft.lost)


def test_a_package_for_any_gpu_is_none_of_cuda_in_a_file_for_rocm(tmp_path: Path) -> None:
    for name, is_rocm in (("requirements_rocm.txt", True), ("requirements.txt", False)):
        (tmp_path / name).write_text("deepspeed\nsix\n")
        draft, _ = draft_of(tmp_path / name)
        assert ("CUDA" in draft.warning) is not is_rocm
        assert ("--target, such as rocm" in draft.warning) is is_rocm
