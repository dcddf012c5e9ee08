"""`envbuild init` on setup.py, setup.cfg and Pipfile, and on sources that contradict each other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lab.drafts import draft_of

from envbuild.base.errors import UsageError

SETUP = """
from setuptools import find_packages, setup
BASE = ["numpy>=1.24,<3", "rich"]
DEV = ["pytest"]
OTHERS = ["ruff"]
OTHERS.insert(0, "mypy")
setup(
    name="Own",
    python_requires=">=3.10",
    install_requires=BASE + ["pandas; python_version < '3.0'", "torch==2.6.0"] + read("more.txt"),
    extras_require={"gpu": ["flash-attn>=2"], "dev": DEV + OTHERS, ":sys_platform == 'win32'": ["pywin32"]},
)
"""


def test_literals_of_setup_py_are_carried_and_the_rest_is_named(tmp_path: Path) -> None:
    (tmp_path / "setup.py").write_text(SETUP)
    draft, recipe = draft_of(tmp_path / "setup.py", target=None)
    assert recipe.requirements == ("numpy>=1.24,<3", "rich")
    assert recipe.targets["cpu-x86_64"].requirements == ("torch==2.6.0+cpu",) and recipe.python == "3.11"
    lost = {one.text: one.reason for one in draft.lost}
    assert "computed by the program" in lost["install_requires: read('more.txt')"]
    assert "computed by the program" in lost["extras_require['dev']: OTHERS"]
    assert "--extra gpu" in lost["flash-attn>=2"] and "another operating system" in lost["pywin32"]
    assert "--extra gpu" in draft.warning and "flash-attn" in draft.warning
    _, recipe = draft_of(tmp_path / "setup.py", groups=("gpu",))
    assert "flash-attn>=2" in recipe.requirements


def test_keywords_of_a_dictionary_and_a_program_without_literals(tmp_path: Path) -> None:
    (tmp_path / "setup.py").write_text("args = dict(install_requires=['rich>=13'])\nsetup(**args)\n")
    assert draft_of(tmp_path / "setup.py")[1].requirements == ("rich>=13",)
    (tmp_path / "setup.py").write_text("from own import install_requires\nown.run(install_requires)\n")
    draft, _ = draft_of(tmp_path / "setup.py")
    assert [(one.text, one.reason[:8]) for one in draft.lost] == [("install_requires", "computed")]


def test_setup_cfg(tmp_path: Path) -> None:
    text = (
        "[metadata]\nname = own\n[options]\npython_requires = >=3.9\ninstall_requires =\n    numpy>=1.24\n"
        "    # not this\n    rich; python_version >= '3.9'  # why\n    file: base.txt\n"
        "[options.extras_require]\ngpu = cupy-cuda12x\n"
    )
    (tmp_path / "setup.cfg").write_text(text)
    draft, recipe = draft_of(tmp_path / "setup.cfg")
    assert recipe.requirements == ("numpy>=1.24", 'rich; python_version >= "3.9"')
    assert {one.text: one.reason for one in draft.lost} == {
        "install_requires = file: base.txt": "name that file with --from",
        "cupy-cuda12x": "belongs to gpu: carry it with --extra gpu",
    }


def test_a_pipfile_beside_its_lock(tmp_path: Path) -> None:
    (tmp_path / "Pipfile").write_text(
        '[[source]]\nurl = "https://download.pytorch.org/whl/cu126"\nname = "pytorch"\n'
        '[packages]\nnumpy = ">=1.24"\nrich = "*"\nb = {git = "https://host.example/b.git", ref = "v1"}\n'
        "pywin32 = {version = '*', sys_platform = \"== 'win32'\"}\n"
        'torch = {version = "==2.6.0", index = "pytorch"}\nown = {path = ".", editable = true}\n'
        '[dev-packages]\npytest = "*"\n[requires]\npython_version = "3.11"\n'
    )
    draft, recipe = draft_of(tmp_path / "Pipfile", target=None)
    assert recipe.requirements == ("numpy>=1.24", "rich", "b @ git+https://host.example/b.git@v1")
    assert recipe.targets["cu126-x86_64"].requirements == ("torch==2.6.0+cu126",)
    lost = {one.text.split(" ")[0]: one.reason for one in draft.lost}
    assert "--extra develop" in lost["pytest"] and "another operating" in lost["pywin32"] and "own" in lost
    (tmp_path / "Pipfile.lock").write_text(
        '{"_meta": {"pipfile-spec": 6}, "default": {"numpy": {"version": "==2.0.0"}, "idna": {"version": "==3.4"}}}'
    )
    _, recipe = draft_of(tmp_path, target=None)
    assert "numpy>=1.24" in recipe.requirements and set(recipe.constraints) == {"numpy==2.0.0", "idna==3.4"}


def test_of_contradicting_sources_the_first_is_carried_and_the_other_named(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "a"\ndependencies = ["numpy>=2", "rich>=13"]\n')
    (tmp_path / "requirements.txt").write_text("numpy==1.26.4\nrich==14.0.0\n")
    draft, recipe = draft_of(tmp_path)
    assert recipe.requirements == ("numpy>=2", "rich>=13,==14.0.0")
    reasons = {one.text: one.reason for one in draft.lost}
    assert reasons["numpy==1.26.4"].startswith(f"contradicts numpy>=2 at {tmp_path}/pyproject.toml:3")


def test_the_file_that_a_program_reads_is_named(tmp_path: Path) -> None:
    (tmp_path / "base.txt").write_text("rich\n")
    (tmp_path / "setup.py").write_text(
        "def read():\n    return open('base.txt').read().split()\n"
        "setup(install_requires=read(), extras_require={'fast': ['vllm']})\n"
    )
    draft, _ = draft_of(tmp_path / "setup.py", target=None)
    reasons = {one.text: one.reason for one in draft.lost}
    assert "name base.txt with --from" in reasons["install_requires: read()"]
    assert len(draft.lost) == 2 and "--extra fast" in draft.warning


def test_a_pipfile_with_categories_and_addresses(tmp_path: Path) -> None:
    wheel = "https://download.pytorch.org/whl/cu124/torch-2.6.0%2Bcu124-cp311-cp311-linux_x86_64.whl"
    (tmp_path / "Pipfile").write_text(
        '[[source]]\nurl = "https://download.pytorch.org/whl/cu118"\nname = "old"\n'
        f'[packages]\ntorch = {{file = "{wheel}"}}\n[gpu]\ntorchvision = {{index = "old"}}\n'
    )
    draft, recipe = draft_of(tmp_path / "Pipfile", target=None)
    assert list(recipe.targets) == ["cu124-x86_64"]
    assert recipe.targets["cu124-x86_64"].requirements == ("torch==2.6.0+cu124",)
    reasons = {one.text: one.reason for one in draft.lost}
    assert reasons[f"torch @ {wheel}"].endswith("its index has it: carried as torch==2.6.0+cu124")
    assert "--extra gpu" in reasons["https://download.pytorch.org/whl/cu118"]


def test_what_the_program_adds_to_a_list_is_carried_or_named(tmp_path: Path) -> None:
    (tmp_path / "setup.py").write_text(
        "required = ['numpy']\nrequired += ['rich']\nrequired.append('six>=1')\nrequired.extend(['idna'])\n"
        "if sys.platform == 'linux':\n    required.append('triton>=2')\nelse:\n    required += ['pywin32']\n"
        "setup(install_requires=required)\n"
    )
    draft, recipe = draft_of(tmp_path / "setup.py", target=None)
    assert recipe.requirements == ("numpy", "rich", "six>=1", "idna")
    lost = {statement.text: statement.place.rpartition(":")[2] for statement in draft.lost}
    assert lost["install_requires: ['triton>=2'] if sys.platform == 'linux' else []"] == "6"
    assert "install_requires: ['pywin32'] if not sys.platform == 'linux' else []" in lost
    assert "triton>=2" in draft.warning
    (tmp_path / "setup.py").write_text(
        "required = ['numpy']\nfor name in NAMES:\n    required.append(name)\nsetup(install_requires=required)\n"
    )
    draft, recipe = draft_of(tmp_path / "setup.py", target=None)
    assert not recipe.requirements and [statement.text for statement in draft.lost] == ["install_requires: required"]


def test_extras_that_the_program_adds_are_carried_or_named(tmp_path: Path) -> None:
    (tmp_path / "setup.py").write_text(
        "extras = {'redis': ['redis>=2']}\n"
        "extras['all'] = list(set(sum(extras.values(), [])))\n"
        "extras['dev'] = extras['all'] + ['pytest<4', 'tox']\n"
        "extras['redis'] += ['hiredis']\n"
        "extras['dev'].append('twine')\n"
        "setup(install_requires=['rich'], extras_require=extras)\n"
    )
    draft, recipe = draft_of(tmp_path / "setup.py", groups=("dev",))
    assert recipe.requirements == ("rich", "pytest<4", "tox")
    lost = [statement.text for statement in draft.lost]
    assert "extras_require: extras['redis'] += ['hiredis']" in lost
    assert "extras_require: extras['dev'].append('twine')" in lost
    assert "extras_require['all']: list(set(sum(extras.values(), [])))" in lost
    assert "extras_require['dev']: extras['all']" in lost


def test_f_strings_without_a_placeholder_are_literals_and_lines_are_those_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "setup.py").write_text(
        "VERSION = 2\nsetup(\n    install_requires=[f'rich>=13', 'six' f'>=1', f'idna>={VERSION}'],\n"
        "    tests_require='''\n    attrs\n    toml\n    ''',\n)\n"
    )
    draft, recipe = draft_of(tmp_path / "setup.py")
    assert recipe.requirements == ("rich>=13", "six>=1")
    lost = {one.text: one.place.rpartition(":")[2] for one in draft.lost}
    assert lost == {"install_requires: f'idna>={VERSION}'": "3", "attrs": "5", "toml": "6"}


def test_an_extra_is_advised_only_if_a_statement_of_it_can_be_carried(tmp_path: Path) -> None:
    (tmp_path / "setup.py").write_text(
        "setup(extras_require={'gpu': [f'cupy-cuda12x @ https://host.example/cupy.html']"
        ", 'cuda': ['cupy-cuda12x; sys_platform == \"win32\"', 'flash-attn']})\n"
    )
    draft, _ = draft_of(tmp_path / "setup.py", target=None)
    reasons = {
        one.text.split(" ")[0]: one.reason for one in draft.lost if "host.example" in one.text or "fl" in one.text
    }
    assert reasons["cupy-cuda12x"].startswith("belongs to gpu, and cannot be carried: ")
    assert reasons["flash-attn"] == "belongs to cuda: carry it with --extra cuda"
    assert draft.warning.endswith("To carry them choose --extra cuda")
    (tmp_path / "setup.py").write_text(
        "setup(extras_require={'gpu': ['cupy-cuda12x @ https://host.example/a.html']})\n"
    )
    draft, _ = draft_of(tmp_path / "setup.py", target=None)
    assert "GPU" in draft.warning and "--extra" not in draft.warning


def test_lines_of_setup_cfg_are_those_of_their_statements(tmp_path: Path) -> None:
    (tmp_path / "setup.cfg").write_text(
        "# name = other\n[metadata]\nname = own\n[options]\n# rich; idna\n# python_requires = >=3\n"
        "python_requires = >=3.10\ninstall_requires =\n\n    rich;\n    # six\n    idna\n"
    )
    draft, recipe = draft_of(tmp_path / "setup.cfg")
    places = {one.text: int(one.place.rpartition(":")[2]) for one in draft.carried}
    assert places == {"own": 3, ">=3.10": 7, "rich": 10, "idna": 12} and recipe.requirements == ("rich", "idna")
    (tmp_path / "setup.cfg").write_text(
        "[options]\ninstall_requires = rich; idna>=3;\nsetup_requires = six; python_version >= '3.9'\n"
    )
    draft, recipe = draft_of(tmp_path / "setup.cfg", groups=("setup_requires",))
    assert recipe.requirements == ("rich", "idna>=3", 'six; python_version >= "3.9"') and not draft.lost
    (tmp_path / "setup.cfg").write_text("[options]\ninstall_requires = rich\nnot a pair\n")
    with pytest.raises(UsageError) as caught:
        draft_of(tmp_path / "setup.cfg")
    assert "'not a pair'" in caught.value.message.replace("\\n", "") and "\0" not in caught.value.message


def test_a_package_of_a_pipfile_lock_that_is_called_as_a_key(tmp_path: Path) -> None:
    (tmp_path / "Pipfile.lock").write_text(
        '{\n"_meta": {"pipfile-spec": 6},\n"default": {\n"attrs": {\n"version": "==1"\n},\n"version": {\n'
        '"version": "==2"\n}\n}\n}\n'
    )
    draft, _ = draft_of(tmp_path / "Pipfile.lock")
    assert {one.text: one.place.rpartition(":")[2] for one in draft.carried if one.kind == "pin"} == {
        "attrs==1": "4",
        "version==2": "7",
    }


def test_pins_have_the_order_of_the_categories_in_the_file(tmp_path: Path) -> None:
    categories = ("default", "develop", "docs", "tests", "types", "site", "extra")
    lock = {"_meta": {"pipfile-spec": 6}} | {name: {f"of-{name}": {"version": "==1"}} for name in categories}
    (tmp_path / "Pipfile.lock").write_text(json.dumps(lock))
    draft, _ = draft_of(tmp_path / "Pipfile.lock", groups=categories)
    assert [one.text for one in draft.carried if one.kind == "pin"] == [f"of-{name}==1" for name in categories]


def test_dynamic_requirements_come_before_those_of_extras(tmp_path: Path) -> None:
    (tmp_path / "base.txt").write_text("rich\n")
    (tmp_path / "more.txt").write_text("attrs\n")
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "a"\ndynamic = ["optional-dependencies", "version", "dependencies"]\n'
        '[tool.setuptools.dynamic]\ndependencies = {file = ["base.txt"]}\n'
        'optional-dependencies = {more = {file = ["more.txt"]}}\n'
    )
    _, recipe = draft_of(tmp_path / "pyproject.toml", groups=("more",))
    assert recipe.requirements == ("rich", "attrs")
