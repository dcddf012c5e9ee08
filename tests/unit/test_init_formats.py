"""`envbuild init`: each format by a file of its own, damaged files, and files of other versions."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from lab.drafts import draft_of

from envbuild.base.errors import UsageError
from envbuild.base.masking import masked_text
from envbuild.imports import read_source
from envbuild.imports.pip_files import poetry_specifier
from envbuild.imports.statement import Draft, recipe_name
from envbuild.recipe.model import Recipe

DATA = Path(__file__).parent / "data/init"


def imported(folder: Path, name: str, text: str, **more: object) -> tuple[Draft, Recipe]:
    (folder / name).write_text(text)
    return draft_of(folder / name, **more)  # type: ignore[arg-type]


def reasons(draft: Draft) -> dict[str, str]:
    """Text of each entry that was not carried → the reason."""
    return {entry.text: entry.reason for entry in draft.lost}


def test_requirements(tmp_path: Path) -> None:
    (tmp_path / "more.txt").write_text("tqdm\n-r requirements.txt\n")
    (tmp_path / "limits.txt").write_text("setuptools<81\n")
    text = (
        "# a comment\n-r more.txt\n-climits.txt\n--index-url=https://pypi.example/simple\n"
        "-i https://user:secret@pypi.example/simple\n--extra-index-url https://download.pytorch.org/whl/cu126\n"
        "numpy==2.2.6 \\\n    --hash=sha256:" + "0" * 64 + "\nuvicorn[standard]>=0.30 # why\n"
        "torch==2.7.1\ntomli>=2; python_version < '3.11'\ntomli<3\n-e .\n./wheel.whl\nmissing @ https://host.example/m.whl\n"
        "git+https://host.example/x.git@main#egg=x\n${NAME}==1\n-r gone.txt\n--pre\n--find-links https://host.example/w\n"
    )
    draft, recipe = imported(tmp_path, "requirements.txt", text, target=None)
    git = "x @ git+https://host.example/x.git@main"
    assert recipe.requirements == ("tqdm", "numpy==2.2.6", "uvicorn[standard]>=0.30", "tomli<3", git)
    assert recipe.constraints == ("setuptools<81", 'tomli>=2; python_version < "3.11"')
    (name,) = recipe.targets
    assert name.startswith("cu126-")
    assert recipe.targets[name].requirements == ("torch==2.7.1+cu126",)
    assert recipe.targets[name].indexes == ("https://download.pytorch.org/whl/cu126", "https://pypi.example/simple")
    assert "secret" not in "".join(reasons(draft))
    assert draft.lost[0].place == f"{tmp_path}/more.txt:2"
    places = {entry.place.rpartition(":")[2]: entry.text for entry in draft.lost[1:]}
    assert places == {
        "5": "https://user:****@pypi.example/simple",
        "7": f"--hash=sha256:{'0' * 64}",
        "10": "torch==2.7.1",
        "13": "-e .",
        "14": "./wheel.whl",
        "15": "missing @ https://host.example/m.whl",
        "17": "${NAME}==1",
        "18": "-r gone.txt",
        "19": "--pre",
        "20": "--find-links https://host.example/w",
    }


def test_pyproject(tmp_path: Path) -> None:
    text = """\
[project]
name = "My Train"
requires-python = ">=3.12"
dependencies = ["numpy>=2", "torch>=2.7"]
dynamic = ["version"]
[project.optional-dependencies]
fast = ["flash-attn>=2"]
[dependency-groups]
test = ["pytest>=8"]
dev = [{include-group = "test"}, "ruff"]
[tool.uv]
constraint-dependencies = ["setuptools<81"]
[tool.uv.sources]
numpy = { git = "https://host.example/numpy", tag = "v2" }
flash-attn = { git = "git@host.example:dao/flash-attn" }
torch = { index = "own" }
[build-system]
requires = ["hatchling"]
"""
    draft, recipe = imported(tmp_path, "pyproject.toml", text, groups=("dev",))
    assert recipe.python == "3.13"
    assert recipe.requirements == ("numpy @ git+https://host.example/numpy@v2", "pytest>=8", "ruff")
    assert recipe.constraints == ("setuptools<81",)
    assert recipe.targets["cpu-x86_64"].requirements == ("torch>=2.7",)
    lost = reasons(draft)
    assert lost["flash-attn>=2"] == "belongs to fast: carry it with --extra fast"
    assert "pytest>=8" not in lost, "it is carried with dev"
    assert "hatchling" in lost and any(text.startswith("torch = ") for text in lost)
    address = "flash-attn @ git+ssh://git@host.example/dao/flash-attn"
    assert lost[masked_text(address)] == "belongs to fast: carry it with --extra fast"
    assert recipe_name("My Train") == "my_train"
    # With the extra it is the repository's package, never the index's of the same name.
    _, recipe = imported(tmp_path, "pyproject.toml", text, groups=("fast",))
    assert recipe.requirements == ("numpy @ git+https://host.example/numpy@v2", address)


def test_sources_of_uv_count_for_what_requires_them(tmp_path: Path) -> None:
    text = """\
[project]
name = "a"
dependencies = ["torch", "one", "two"]
[project.optional-dependencies]
cu13 = ["kernels"]
rocm = ["triton-rocm"]
[tool.uv]
override-dependencies = ["ml-dtypes==0.4.1"]
[tool.uv.sources]
torch = [
  { index = "arm", marker = "platform_machine == 'aarch64'" },
  { index = "cu128", marker = "platform_machine == 'x86_64' and sys_platform == 'linux'" },
  { index = "cu130", marker = "extra == 'cu13'" },
]
triton-rocm = { index = "rocm", marker = "sys_platform == 'linux'" }
one = { git = "https://host.example/one", marker = "sys_platform == 'linux'" }
two = { git = "https://host.example/two", marker = "sys_platform == 'darwin'" }
four = { git = "https://host.example/four" }
"""
    for name, tag in (("arm", "cpu"), ("cu128", "cu128"), ("cu130", "cu130"), ("rocm", "rocm6.4")):
        text += f'[[tool.uv.index]]\nname = "{name}"\nurl = "https://download.pytorch.org/whl/{tag}"\nexplicit = true\n'
    draft, recipe = imported(tmp_path, "pyproject.toml", text, target=None)
    assert {target.rpartition("-")[0] for target in recipe.targets} == {"cu128"}
    assert recipe.requirements == ("one @ git+https://host.example/one", "two")
    lost = reasons(draft)
    assert lost["https://download.pytorch.org/whl/rocm6.4"] == "belongs to rocm: carry it with --extra rocm"
    assert lost["https://download.pytorch.org/whl/cu130"] == "belongs to cu13: carry it with --extra cu13"
    assert recipe.overrides == ("ml-dtypes==0.4.1",) and "ml-dtypes==0.4.1" not in lost
    assert draft.warning.endswith("To carry them choose --extra cu13 or --extra rocm")
    # The index of a package that only an extra requires is a sign of that extra.
    text = '[project]\nname = "a"\ndependencies = ["numpy"]\n[project.optional-dependencies]\nxpu = ["triton-xpu"]\n'
    text += 'cuda = ["torch==2.7.1+cu128"]\n[tool.uv.sources]\ntriton-xpu = { index = "xpu" }\n'
    text += '[[tool.uv.index]]\nname = "xpu"\nurl = "https://download.pytorch.org/whl/xpu"\nexplicit = true\n'
    assert imported(tmp_path, "pyproject.toml", text, target=None)[0].warning.startswith(
        "extras or groups that name GPUs"
    )
    assert lost["four = {'git': 'https://host.example/four'}"] == "no requirement here names this package"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ('"7 days"', "7 days"),
        ('"P7D"', "7 days"),
        ('"1w"', "1 weeks"),
        ('"PT36H"', "36 hours"),
        ('"2026-11-01"', "2026-11-01"),
        ('"2026-11-01T12:00:00Z"', "2026-11-01T12:00:00Z"),
        ("2026-11-01", "2026-11-01"),
    ],
)
def test_the_age_of_releases_is_carried(tmp_path: Path, given: str, expected: str) -> None:
    text = '[project]\nname = "x"\ndependencies = ["numpy"]\n[tool.uv]\n'
    index = '[[tool.uv.index]]\nurl = "https://i/simple"\nexclude-newer = false\n'
    ages = f'exclude-newer = {given}\nexclude-newer-package = {{ six = "2026-01-01" }}\n'
    other = '[tool.uv.pip]\nexclude-newer = "1 month"\n'
    draft, recipe = imported(tmp_path, "pyproject.toml", text + ages + index + other)
    assert recipe.exclude_newer == expected
    lost = {one.text: one.reason for one in draft.lost}
    assert (
        "several" not in lost and "all packages, or of those of an index" in lost["exclude-newer of six = 2026-01-01"]
    )
    assert "[exclude_newer_index]" in lost["exclude-newer = False"]
    assert "neither a span nor a date" in lost["1 month"]


def test_an_override_of_uv_replaces_the_versions_of_a_requirement(tmp_path: Path) -> None:
    address = "six @ https://h.example/six-1-py3-none-any.whl"
    overrides = ["numpy>=2", "numpy<2.4", "torch==2.7.1", address, "idna", "tqdm>=4"]
    text = '[project]\nname = "a"\ndependencies = ["numpy[x]<2", "six", "torch==2.6.0"]\n[tool.uv]\n'
    draft, recipe = imported(tmp_path, "pyproject.toml", f"{text}override-dependencies = {json.dumps(overrides)}\n")
    assert recipe.requirements == ("numpy[x]", "six") and recipe.overrides == ("numpy>=2,<2.4", "tqdm>=4")
    lost = reasons(draft)
    assert lost["torch==2.7.1"].startswith("its builds differ by target") and "names no version" in lost["idna"]
    assert address in lost


@pytest.mark.parametrize(
    ("given", "specifier"),
    [
        ("^1.2.3", ">=1.2.3,<2"),
        ("^0.2.3", ">=0.2.3,<0.3"),
        ("^0.0.3", ">=0.0.3,<0.0.4"),
        ("^0", ">=0,<1"),
        ("^0.0", ">=0.0,<0.1"),
        ("~1.2.3", ">=1.2.3,<1.3"),
        ("~1.2", ">=1.2,<1.3"),
        ("~1", ">=1,<2"),
        ("~=1.2", "~=1.2"),
        ("*", ""),
        ("", ""),
        ("1.2.3", "==1.2.3"),
        ("1.2.*", "==1.2.*"),
        (">=1,<2", ">=1,<2"),
        ("^1!2.0", ">=1!2.0,<1!3"),
        ("~1!2.3.4", ">=1!2.3.4,<1!2.4"),
        ("^v1.2", ">=v1.2,<2"),
        (">=1 <2", ">=1,<2"),
        (">= 1, < 2", ">=1,<2"),
        ("==1.2", "==1.2"),
        ("^1.2 || ^2", None),
    ],
)
def test_poetrys_versions(given: str, specifier: str | None) -> None:
    assert poetry_specifier(given) == specifier


def test_poetry(tmp_path: Path) -> None:
    text = """\
[tool.poetry.dependencies]
python = "^3.10"
a = { version = "^1.2", extras = ["x", "y"], python = "<3.12", platform = "linux" }
b = { git = "git@host.example:o/b", rev = "main", subdirectory = "py", extras = ["z"] }
p = { path = "../p" }
c = { version = "1.0", optional = true }
d = [{ version = "<2", python = "<3.11" }, { version = ">=2", python = ">=3.11" }]
e = "^1 || ^2"
[tool.poetry.group.dev.dependencies]
pytest = "*"
[tool.poetry.extras]
more = ["c"]
"""
    draft, recipe = imported(tmp_path, "pyproject.toml", text, groups=("more",))
    assert recipe.requirements == (
        'a[x,y]<2,>=1.2; python_version < "3.12" and sys_platform == "linux"',
        "b[z] @ git+ssh://git@host.example/o/b@main#subdirectory=py",
        "c==1.0",
        'd<2; python_version < "3.11"',
        'd>=2; python_version >= "3.11"',
    )
    lost = reasons(draft)
    assert {"e ^1 || ^2", "pytest"} <= lost.keys() and any(text.startswith("p = ") for text in lost)


def test_environment(tmp_path: Path) -> None:
    draft, recipe = draft_of(DATA / "environment.yml")
    assert recipe.python == "3.10" and recipe.environment == "conda"
    assert recipe.conda.dependencies == ("numpy >=1.26,<2", "blas[build=mkl]")
    assert recipe.conda.requirements == ("einops==0.8.1",)
    assert recipe.conda.channels[0] == "conda-forge" and len(recipe.conda.channels) == 3
    assert recipe.targets["cpu-x86_64"].conda == ("libfoo 1.2",)
    assert recipe.targets["cpu-x86_64"].indexes == ("https://pypi.example/simple",)
    assert recipe.image.env == {"OMP_NUM_THREADS": "1"}
    places = {entry.text: entry.place.rpartition(":")[2] for entry in draft.lost}
    assert places == {
        "cudatoolkit": "6",
        "blas-extra[subdir=linux-64]": "9",
        "./local": "13",
        "prefix: /home/someone/env": "16",
    }
    _, other = draft_of(DATA / "environment.yml", target="cpu-aarch64")
    assert other.targets["cpu-aarch64"].conda == ()


def test_poetry_lock() -> None:
    draft, recipe = draft_of(DATA / "poetry.lock", target=None)
    git = "datatrove @ git+https://github.com/huggingface/datatrove@0ab5f40bbd7fd2ea2b0ed9ec7c4b5dbd2b4cfa2c"
    assert recipe.requirements == ("certifi==2025.8.3", git)
    (name,) = recipe.targets
    assert name.startswith("cu126-") and recipe.targets[name].requirements == ("torch==2.7.1+cu126",)
    lost = reasons(draft)
    assert lost["colorama==0.4.6"].startswith("for another operating system")
    assert lost["pytest==8.4.2"] == "belongs to dev: carry it with --extra dev"
    line = (DATA / "poetry.lock").read_text().split("\n").index('name = "pytest"')
    assert [entry.place for entry in draft.lost if entry.text.startswith("pytest")] == [f"{DATA}/poetry.lock:{line}:1"]


def test_a_lock_beside_its_project_gives_constraints(tmp_path: Path) -> None:
    (tmp_path / "poetry.lock").write_bytes((DATA / "poetry.lock").read_bytes())
    (tmp_path / "pyproject.toml").write_text('[project]\ndependencies = ["certifi", "torch>=2"]\n')
    _, recipe = draft_of(tmp_path, target=None)
    assert [one.partition(" ")[0] for one in recipe.requirements] == ["certifi", "datatrove"]
    assert recipe.constraints == ("certifi==2025.8.3", "torch==2.7.1")
    assert next(iter(recipe.targets.values())).requirements == ("torch>=2,==2.7.1+cu126",)


def test_pipfile_lock() -> None:
    draft, recipe = draft_of(DATA / "Pipfile.lock", groups=("develop",))
    assert recipe.python == "3.12"
    assert sorted(text.partition(";")[0] for text in recipe.requirements) == [
        "certifi==2025.8.3",
        "pytest==8.4.2",
        "requests[socks]==2.32.5",
    ]
    pytorch = "https://download.pytorch.org/whl/cpu"
    assert recipe.targets["cpu-x86_64"].indexes == (pytorch, "https://pypi.example/simple")
    assert any(text.startswith("mypkg ") for text in reasons(draft))


_COMMIT, _SHA256 = "c" * 40, "5" * 64
_REMOTE_LOCKS = {
    "uv.lock": f"""\
version = 1
[[package]]
name = "mine"
source = {{ virtual = "." }}
[package.metadata]
requires-dist = [
    {{ name = "a", extras = ["x"], git = "https://host.example/a?rev=main" }},
    {{ name = "b", url = "https://host.example/b-1-py3-none-any.whl" }}, {{ name = "e", editable = "e" }},
]
[[package]]
name = "a"
version = "1"
source = {{ git = "https://host.example/a?subdirectory=py&rev=main#{_COMMIT}" }}
[[package]]
name = "b"
version = "1"
source = {{ url = "https://host.example/b-1-py3-none-any.whl" }}
wheels = [{{ url = "https://host.example/b-1-py3-none-any.whl", hash = "sha256:{_SHA256}" }}]
[[package]]
name = "e"
version = "1"
source = {{ editable = "e" }}
""",
    "pylock.toml": f"""\
lock-version = "1.0"
[[packages]]
name = "a"
vcs = {{ type = "git", url = "https://host.example/a", commit-id = "{_COMMIT}", subdirectory = "py" }}
[[packages]]
name = "b"
archive = {{ url = "https://host.example/b-1-py3-none-any.whl", hashes = {{ sha256 = "{_SHA256}" }} }}
[[packages]]
name = "e"
directory = {{ path = "e", editable = true }}
""",
    "poetry.lock": f"""\
[[package]]
name = "a"
version = "1"
[package.source]
type = "git"
url = "https://host.example/a"
reference = "main"
resolved_reference = "{_COMMIT}"
subdirectory = "py"
[[package]]
name = "b"
version = "1"
files = [{{ file = "b-1-py3-none-any.whl", hash = "sha256:{_SHA256}" }}]
[package.source]
type = "url"
url = "https://host.example/b-1-py3-none-any.whl"
[[package]]
name = "e"
version = "1"
[package.source]
type = "directory"
url = "e"
[metadata]
lock-version = "2.1"
""",
    "Pipfile.lock": f"""\
{{"_meta": {{"pipfile-spec": 6}}, "default": {{
    "a": {{"git": "https://host.example/a", "ref": "{_COMMIT}", "subdirectory": "py", "extras": ["x"]}},
    "e": {{"path": "e", "editable": true}}
}}}}
""",
}


@pytest.mark.parametrize("name", _REMOTE_LOCKS)
def test_addresses_of_a_lock(tmp_path: Path, name: str) -> None:
    draft, recipe = imported(tmp_path, name, _REMOTE_LOCKS[name])
    git = f"git+https://host.example/a@{_COMMIT}#subdirectory=py"
    wheel = f"b @ https://host.example/b-1-py3-none-any.whl#sha256={_SHA256}"
    assert recipe.requirements == {"uv.lock": (f"a[x] @ {git}", wheel), "Pipfile.lock": (f"a[x] @ {git}",)}.get(
        name, (f"a @ {git}", wheel)
    )
    assert recipe.constraints == ()
    assert any(text == "e" or text.startswith(("e ", "{'name': 'e'")) for text in reasons(draft))


def test_the_address_of_a_package_whose_group_is_not_carried(tmp_path: Path) -> None:
    text = _REMOTE_LOCKS["uv.lock"].replace('rev=main" }', 'rev=main", marker = "extra == \'gpu\'" }')
    draft, recipe = imported(tmp_path, "uv.lock", text)
    assert [one.partition(" ")[0] for one in recipe.requirements] == ["b"]
    assert [entry.reason for entry in draft.lost if entry.text.startswith("a")] == [
        "belongs to gpu: carry it with --extra gpu"
    ] * 2


def test_torch_at_an_address(tmp_path: Path) -> None:
    torch = f"torch @ https://host.example/torch-2.7.1-py3-none-any.whl#sha256={_SHA256}"
    assert imported(tmp_path, "requirements.txt", f"{torch}\n")[1].requirements == (torch,)


def test_pylock() -> None:
    draft, recipe = draft_of(DATA / "pylock.toml")
    pinned = re.findall(r'name = "([^"]+)"\nversion = "([^"]+)"', (DATA / "pylock.toml").read_text())
    carried = {text.partition(";")[0].strip() for text in recipe.requirements}
    assert carried == {f"{name}=={version}" for name, version in pinned} - reasons(draft).keys()
    assert reasons(draft)["numpy==2.5.5"] == "not for Python 3.11 on Linux"


def test_pixi_lock() -> None:
    draft, recipe = draft_of(DATA / "pixi.lock")
    assert recipe.python == "3.12" and recipe.conda.channels == ("conda-forge",)
    assert recipe.targets["cpu-x86_64"].conda == (
        "libzlib 1.3.1 hb9d3cd8_2",
        "python 3.12.11 h9e4cc4f_0_cpython",
        "tqdm 4.67.1 pyhd8ed1ab_1",
    )
    assert recipe.conda.requirements == ("einops==0.8.1",)
    assert reasons(draft)["ruff 0.12.9 ha3a3aed_0"] == "belongs to lint: carry it with --extra lint"


def test_dockerfile(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text((DATA / "Dockerfile").read_text())
    draft, recipe = draft_of(tmp_path / "Dockerfile", target=None)
    assert recipe.python == "3.12"
    assert recipe.requirements == ("numpy>=2,<3", "einops==0.8.1")
    assert recipe.image.packages == ("git", "libnuma1")
    assert recipe.image.workdir == "/workspace/app"
    assert recipe.image.env == {"DATA_DIR": "/data", "OMP_NUM_THREADS": "1"}
    assert next(iter(recipe.targets.values())).requirements == ("torch==2.7.1+cu126",)
    lost = reasons(draft)
    assert "abc123" not in str(lost) and "API_TOKEN=****" in lost
    said = " | ".join(lost)
    for text in ("curl", "rm -rf", "python -c print(1)", "COPY . .", "-e .", "unclosed", "CMD"):
        assert text in said, text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("FROM pytorch/pytorch:2.7.1-cuda12.6-cudnn9-runtime\nRUN pip install tqdm\n", "torch==2.7.1+cu126"),
        ("FROM nvidia/cuda:12.6.3-devel-ubuntu22.04\nRUN pip install torch\n", "whl/cu126"),
        ("ARG V=3.12\nFROM --platform=linux/amd64 python:$V AS a\nFROM a\nRUN pip install x==${N:-1}\n", '"3.12"'),
        ("FROM condaforge/miniforge3:25.3.1-0\nRUN mamba install -y -c nvidia numpy=2.2\n", "condaforge/miniforge3"),
    ],
)
def test_bases(tmp_path: Path, text: str, said: str) -> None:
    draft, _ = imported(tmp_path, "Dockerfile", text, target=None)
    assert said in draft.text


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("uv.lock", "version = 2\n", "version 2 of the format uv.lock is not known (known: 1)"),
        ("pylock.toml", 'lock-version = "1.1"\n', "version 1.1 of the format pylock.toml is not known (known: 1.0)"),
        ("poetry.lock", '[metadata]\nlock-version = "3.0"\n', "version 3.0 of the format poetry.lock"),
        ("Pipfile.lock", '{"_meta": {"pipfile-spec": 5}}', "version 5 of the format Pipfile.lock"),
        ("pixi.lock", "version: 4\n", "version 4 of the format pixi.lock"),
        ("conda-lock.yml", "version: 2\n", "version 2 of the format conda-lock.yml"),
        ("pdm.lock", "", "not a file of a known format"),
        ("setup.cfg", "a\n", "no section headers"),
        ("setup.py", "print 'a'\n", "not Python 3"),
        ("uv.lock", "version = \n", "uv.lock:1:11"),
        ("environment.yml", "a: [\n", "not YAML"),
        ("Pipfile.lock", "{", "not JSON"),
        ("requirements.txt", "\udcff", "is not UTF-8"),
    ],
)
def test_refusals_name_the_file(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UsageError) as caught:
        list(read_source(tmp_path / name))
    assert said in caught.value.message and str(tmp_path / name) in caught.value.message
    if "of the format" in said:
        assert "write it anew" in str(caught.value.hint)


def test_pytorchs_index_of_a_conda_environment_stays(tmp_path: Path) -> None:
    text = """\
channels: [conda-forge]
platforms: [linux-64, linux-aarch64]
dependencies:
- numpy
- pip:
  - --extra-index-url https://download.pytorch.org/whl/cu121
  - xformers
  - deepspeed==0.18.3 # [linux64]
"""
    _, recipe = imported(tmp_path, "environment.yml", text, target=None)
    assert set(recipe.targets) == {"cu121-x86_64", "cu121-aarch64"}
    assert recipe.targets["cu121-x86_64"].indexes == ("https://download.pytorch.org/whl/cu121",)
    assert recipe.conda.requirements == ("xformers", 'deepspeed==0.18.3; platform_machine == "x86_64"')


def test_pixi(tmp_path: Path) -> None:
    draft, recipe = draft_of(DATA / "pixi.toml", target=None, groups=("dev",))
    assert recipe.name == "lab" and recipe.python == "3.11"
    assert recipe.conda.dependencies == ("numpy 2.2.* py312*", "scipy")
    assert recipe.conda.requirements == ("einops==0.8.1", "ty")
    assert recipe.targets["cpu-x86_64"].conda == ("libnuma 2.0",)
    texts = [one.text.partition(" ")[0] for one in draft.lost]
    assert sorted(texts) == ["default", "lab", "osx-arm64", "tasks", "xattr"]


@pytest.mark.parametrize(
    "head",
    [
        "# packages in environment at /opt/conda:\n#\n# Name      Version      Build  Channel\n",
        'List of packages in environment: "/opt/conda"\n\n  Name   Version  Build  Channel\n──────────────\n',
    ],
)
def test_the_table_of_conda_list(tmp_path: Path, head: str) -> None:
    rows = "  python   3.12.8   h9e4cc4f_1_cpython   conda-forge\n  zlib   1.3.1   h5eee18b_0\n"
    rows += "  pytorch  2.5.1   cuda126_py312_h1   conda-forge\n  wandb  0.16.0   pypi_0   pypi\n  old  1.0   <pip>\n"
    draft, recipe = imported(tmp_path, "packages.txt", f"{head}{rows}oh dear\n", target=None)
    assert recipe.python == "3.12" and [one.partition("-")[0] for one in recipe.targets] == ["cu126"]
    assert recipe.conda.channels[0] == "conda-forge" and "https://repo.anaconda.com/pkgs/main" in recipe.conda.channels
    assert recipe.conda.dependencies == (
        "python 3.12.8 h9e4cc4f_1_cpython",
        "zlib 1.3.1 h5eee18b_0",
        "pytorch 2.5.1 cuda126_py312_h1",
    )
    assert recipe.conda.requirements == ("wandb==0.16.0", "old==1.0")
    assert reasons(draft) == {"oh dear": "no row of `conda list`"}


def test_a_package_of_the_workspace_in_uv_lock_is_named_as_own(tmp_path: Path) -> None:
    text = 'version = 1\n[[package]]\nname = "a"\nsource = { editable = "." }\ndependencies = [{ name = "core" }]\n'
    text += '[package.metadata]\nrequires-dist = [{ name = "core", editable = "core" }]\n'
    text += '[[package]]\nname = "core"\nversion = "1"\nsource = { editable = "core" }\n'
    draft, recipe = imported(tmp_path, "uv.lock", text)
    said = [one.reason for one in draft.lost if "core" in one.text]
    assert len(said) == 2 and all("somebody else's package" in one for one in said) and not recipe.requirements


@pytest.mark.parametrize("default", ['["gpu"]', '{ features = ["gpu"], solve-group = "a" }'])
def test_the_features_of_pixis_default_environment_are_carried(tmp_path: Path, default: str) -> None:
    text = (
        '[workspace]\nname = "a"\nchannels = ["conda-forge"]\nplatforms = ["linux-64"]\n[dependencies]\nnumpy = "2.*"\n'
    )
    text += '[feature.gpu]\nchannels = ["nvidia"]\nsystem-requirements = { cuda = "12.6" }\n'
    text += '[feature.gpu.dependencies]\npytorch-gpu = "*"\n[feature.cpu.dependencies]\npytorch-cpu = "*"\n'
    draft, recipe = imported(
        tmp_path, "pixi.toml", f'{text}[environments]\ndefault = {default}\ncpu = ["cpu"]\n', target=None
    )
    assert list(recipe.targets) == ["cu126-x86_64"] and recipe.conda.dependencies == ("numpy 2.*", "pytorch-gpu")
    assert recipe.conda.channels == ("conda-forge", "nvidia") and not draft.warning
    draft, recipe = imported(tmp_path, "pixi.toml", f'{text}[environments]\ngpu = ["gpu"]\n', target=None)
    assert list(recipe.targets) == ["cpu-x86_64"] and recipe.conda.channels == ("conda-forge",)
    assert "pytorch-gpu" in draft.warning or "cuda" in draft.warning
    assert draft.warning.endswith("choose --extra gpu")


def test_uv_lock() -> None:
    draft, recipe = draft_of(DATA / "uv.lock", target=None, groups=("gpu", "dev"))
    (name,) = recipe.targets
    git = "datatrove @ git+https://host.example/datatrove@0ab5f40"
    assert recipe.requirements == ("numpy>=2", "pytest[x]>=8", git) and recipe.constraints == ("numpy==2.3.5",)
    assert recipe.targets[name].requirements == ("torch==2.7.1+cpu",)
    lost = reasons(draft)
    assert lost["numpy==2.2.6"] == "not for Python 3.11 on Linux"
    assert lost["https://pypi.example/simple"].startswith("the site decides")


@pytest.mark.parametrize(
    ("spec", "python"),
    [
        ("=3.10.13,<3.11", "3.10"),
        (">=3.10,<3.11", "3.10"),
        ("=>3.13", "3.13"),
        (" 3.12.*,!=3.12.1", "3.12"),
        (" =3.9", "3.9"),
    ],
)
def test_each_clause_of_condas_python_counts(tmp_path: Path, spec: str, python: str) -> None:
    (tmp_path / "environment.yml").write_text(f"channels: [a]\ndependencies: ['python{spec}', numpy]\n")
    draft, recipe = draft_of(tmp_path / "environment.yml")
    named = [f"the recipe has the minor version: {python}"] if f"{python}." in spec.replace("*", "") else []
    assert recipe.python == python and [statement.reason for statement in draft.lost] == named


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("environment.yml", "channels: [a]\ndependencies: [python=3.10.4, numpy]\n"),
        ("Pipfile", '[packages]\nnumpy = "*"\n[requires]\npython_version = "3.10.4"\n'),
        ("pyproject.toml", '[tool.poetry]\nname = "a"\n[tool.poetry.dependencies]\npython = "3.10.4"\n'),
        ("pixi.toml", '[dependencies]\npython = "3.10.4"\n'),
        ("Dockerfile", "FROM python:3.10.4-slim-buster\nRUN pip install rich\n"),
    ],
)
def test_a_patch_release_of_python_is_listed(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    draft, recipe = draft_of(tmp_path / name)
    assert recipe.python == "3.10"
    assert [statement.reason for statement in draft.lost] == ["the recipe has the minor version: 3.10"]


@pytest.mark.parametrize(
    ("specifier", "listed"),
    [
        (">=3.10.0,<3.11", False),
        ("~=3.10.0", False),
        (">=3.10.4,<3.11", True),
        ("~=3.10.4", True),
        (">3.10.2,<3.11", True),
    ],
)
def test_a_first_patch_release_says_no_more_than_its_minor_version(
    tmp_path: Path, specifier: str, listed: bool
) -> None:
    (tmp_path / "pyproject.toml").write_text(f'[project]\nname = "a"\nrequires-python = "{specifier}"\n')
    draft, recipe = draft_of(tmp_path / "pyproject.toml")
    assert recipe.python == "3.10" and bool(draft.lost) == listed


@pytest.mark.parametrize(
    ("constraint", "python"),
    [("3.10.* || 3.12.*", "3.12"), (">=3.9,<3.10 || ^3.13", "3.13"), (">=3.8.1 | 2.7", "3.11")],
)
def test_alternatives_of_poetrys_python_are_kept(tmp_path: Path, constraint: str, python: str) -> None:
    (tmp_path / "pyproject.toml").write_text(
        f'[tool.poetry]\nname = "a"\n[tool.poetry.dependencies]\npython = "{constraint}"\nnumpy = "*"\n'
    )
    draft, recipe = draft_of(tmp_path / "pyproject.toml")
    assert recipe.python == python and not draft.lost


def test_tables_of_pixis_channels_and_platforms_are_read(tmp_path: Path) -> None:
    text = '[workspace]\nname = "a"\nchannels = [{ channel = "bioconda", priority = -1 }, "conda-forge"]\n'
    text += 'platforms = [{ platform = "linux-aarch64" }]\n[dependencies]\nnumpy = "*"\n'
    (tmp_path / "pixi.toml").write_text(text)
    draft, recipe = draft_of(tmp_path / "pixi.toml", target=None)
    assert recipe.conda is not None and recipe.conda.channels == ("bioconda", "conda-forge") and not draft.lost
    assert list(recipe.targets) == ["cpu-aarch64"]


def test_what_a_platform_of_pixi_needs_of_the_system_chooses_the_target_or_is_listed(tmp_path: Path) -> None:
    text = '[workspace]\nname = "a"\nchannels = ["conda-forge"]\nplatforms = [{ name = "gpu", platform = "linux-64", '
    text += 'cuda = "12.9.1", glibc = "2.34" }]\n[dependencies]\npytorch = "2.10.*"\n'
    (tmp_path / "pixi.toml").write_text(text)
    draft, recipe = draft_of(tmp_path / "pixi.toml", target=None)
    assert list(recipe.targets) == ["cu129-x86_64"]
    assert "system-requirements of linux-64 = {'cuda': '12.9.1', 'glibc': '2.34'}" in reasons(draft)


def test_the_tables_of_rye_and_hatch_are_read(tmp_path: Path) -> None:
    text = '[project]\nname = "a"\n[tool.rye]\ndev-dependencies = ["ruff"]\n[[tool.rye.sources]]\nname = "x"\n'
    text += 'url = "https://host.example/simple"\n[tool.hatch.envs.gpu]\ndependencies = ["cupy-cuda12x"]\n'
    (tmp_path / "pyproject.toml").write_text(text)
    draft, recipe = draft_of(tmp_path / "pyproject.toml", target=None, groups=("gpu",))
    assert recipe.requirements == ("cupy-cuda12x",) and "CUDA 12" in draft.warning
    assert "https://host.example/simple" in recipe.targets["cpu-x86_64"].indexes
    assert [(one.text, one.group) for one in draft.lost] == [("ruff", "dev")]


def test_a_pixi_lock_of_the_versions_before_and_after(tmp_path: Path) -> None:
    conda = "https://conda.anaconda.org/conda-forge/linux-64/"
    rows = {"numpy": f"{conda}numpy-2.2.6-py312h1_0.conda", "cuda-version": f"{conda}cuda-version-12.8-h5_3.conda"}
    wheel = "https://files.example/rich-14.0.0-py3-none-any.whl"
    listed = "".join(f"      - conda: {url}\n" for url in rows.values()) + f"      - pypi: {wheel}\n"
    text = "version: {}\n{}environments:\n  {}:\n    channels:\n    - url: {}\n    packages:\n      {}:\n{}packages:\n"
    seven = text.format(7, "platforms:\n- name: p1\n  subdir: linux-64\n", "default", conda[:-9], "p1", listed)
    seven += "".join(f"- conda: {url}\n" for url in rows.values())
    seven += f"- pypi: {wheel}\n  name: rich\n  version: 14.0.0\n"
    five = text.format(5, "", "default", conda[:-9], "linux-64", listed)
    five += "".join(f"- kind: conda\n  name: {name}\n  url: {url}\n" for name, url in rows.items())
    five += f"- kind: pypi\n  name: rich\n  version: 14.0.0\n  url: {wheel}\n"
    for content in (five, seven):
        (tmp_path / "pixi.lock").write_text(content)
        _, recipe = draft_of(tmp_path / "pixi.lock", target=None)
        ((target, table),) = recipe.targets.items()
        assert target == "cu128-x86_64" and table.conda == ("numpy 2.2.6 py312h1_0", "cuda-version 12.8 h5_3")
        assert recipe.conda is not None and recipe.conda.requirements == ("rich==14.0.0",)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-8-sig"])
def test_requirements_that_powershell_wrote_are_read(tmp_path: Path, encoding: str) -> None:
    text = ("\ufeff" if encoding == "utf-16-be" else "") + "numpy==2.2.6\r\nrich\r\n"
    (tmp_path / "requirements.txt").write_bytes(text.encode(encoding))
    assert draft_of(tmp_path / "requirements.txt")[1].requirements == ("numpy==2.2.6", "rich")


def test_blanks_around_a_requirement_are_no_part_of_it(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "a"\ndependencies = ["vispy>=0.14.1   ", " rich "]\n')
    draft, recipe = draft_of(tmp_path / "pyproject.toml")
    assert recipe.requirements == ("vispy>=0.14.1", "rich") and not draft.lost


def test_a_file_of_another_host_is_listed(tmp_path: Path) -> None:
    line = f"jaxlib @ file:///opt/dist/jaxlib-0.4.26-cp311-cp311-linux_x86_64.whl#sha256={'c' * 64}\nrich\n"
    (tmp_path / "requirements.txt").write_text(line)
    draft, recipe = draft_of(tmp_path / "requirements.txt")
    assert recipe.requirements == ("rich",) and "of the host on which it was written" in draft.lost[0].reason
