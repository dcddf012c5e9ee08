"""The recipe's own code in a verification: its table, the modules of packages, imports, command and metric."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab.wheels import make_recipe

from envbuild.base.errors import RecipeError, UsageError
from envbuild.base.packages import top_level
from envbuild.build.bundle import make_bundle
from envbuild.contract.installed import Distribution, FileReport
from envbuild.contract.verification import ExpectTable, VerifySettings, parse_settings
from envbuild.recipe.load import LoadedRecipe, load_recipe
from envbuild.recipe.targets import Target
from envbuild.run_environment import load_environment
from envbuild.verify.elf_files import ElfReport
from envbuild.verify.launch import Outcome, TrainingJob
from envbuild.verify.survey import Survey
from envbuild.verify.user_code import check_imports, judge_command, metric_values, modules_to_import

JOB = TrainingJob("command", (), 2, 2, 60.0, program=("python", "t.py"), named=True)
LOG = "[0.0]:loss: 3.5\n[0.1]:loss: 99\n[0.0]:loss: 2\n[1.0]:loss: 7\n[0.0]:epoch 3, loss: 1e-1\n"
METRIC = "loss: ([0-9.e+-]+)"


def load(tmp_path: Path, extra: str) -> LoadedRecipe:
    return load_recipe(make_recipe(tmp_path / "recipes", "mine", ["numpy", "PyYAML"], extra=extra) / "recipe.toml")


def outcome(log: str = LOG, codes: tuple[int, ...] = (0, 0), **more: Any) -> Outcome:
    return replace(Outcome(JOB, list(codes), [], log, 1.0, False, ["torchrun"]), **more)


# ---- the table
@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("imports = ['a-b']", "'imports[0]' in [verify]: 'a-b' is not the name of a module"),
        ("imports_except = ['x y']", "is not the name of a module"),
        ("command = 'python \"x'", "is no command line: No closing quotation"),
        ("command = ' '", "is empty"),
        ("command = 'x'\nexpect.metric = '('", "is no regular expression"),
        ("command = 'x'\nexpect.metric = 'loss'", "has 0 groups; the number must be its only one"),
        ("command = 'x'\nexpect.metric = '(a)'\nexpect.last = '= 3'", "is no bound, such as '< 0.5'"),
        ("command = 'x'\nexpect.metric = '(a)'\nexpect.last = '< 1.2.3'", "is no bound, such as '< 0.5'"),
        ("command = 'x'\nexpect.metric = '(a)'\nexpect.trend = 'drops'", "Accepted: finite, falls, rises"),
        ("command = 'x'\nexpect.trend = 'falls'", "'trend' in [verify.expect] needs `metric`"),
        ("expect.exit_code = 1", "[verify.expect] needs `command` or `script` in [verify]"),
        ("command = 'x'\nscript = 'x.py'", "[verify] has `command` and `script`: leave one of them out"),
        ("script = 'x.py \"'", "is no command line: No closing quotation"),
        ("script = 'x.py 1'", "mine/x.py cannot be read: No such file or directory"),
        ("script = 'recipe.toml'", "keeps at most 10"),
        ("script = '../bytes'", "is not UTF-8: invalid start byte at byte 0"),
        ("command = 'x'\nexpect.exits = 1", "unknown key 'exits' in [verify.expect]"),
    ],
)
def test_mistakes_are_named_with_their_place(
    extra: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envbuild.recipe.load._MOST_SCRIPT", 10)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/bytes").write_bytes(b"\xff")
    with pytest.raises(RecipeError) as error:
        load(tmp_path, f"[verify]\n{extra}\n")
    assert message.lower() in error.value.message.lower() and "recipe.toml:" in error.value.message


def test_a_recipe_without_these_keys_keeps_its_digest(tmp_path: Path) -> None:
    plain = load(tmp_path, "[verify]\nnodes = 3\n").digest
    assert load(tmp_path, "[verify]\nnodes = 3\ntrainer = true\nimports = []\n").digest == plain
    assert load(tmp_path, "[verify]\nnodes = 3\nimports = ['yaml']\n").digest != plain


def test_a_script_is_part_of_the_recipe_and_of_the_artifacts_state(tmp_path: Path) -> None:
    plain = load(tmp_path, "")
    script = tmp_path / "recipes/train.py"
    table = "[verify]\nscript = '../train.py --x 1'\n"
    script.write_text("print(1)\n")
    first = load(tmp_path, table)
    script.write_text("print(2)\n")
    second = load(tmp_path, table)
    assert len({plain.digest, first.digest, second.digest}) == 3
    assert second.script == (tmp_path / "recipes/mine/../train.py", "print(2)\n")
    with pytest.raises(UsageError, match="outside of the recipe's folder"):
        make_bundle(second, Target("cpu", "x86_64"), load_environment({}), tmp_path / "bundle", str)


def test_settings_survive_json(tmp_path: Path) -> None:
    text = "[verify]\nimports = ['yaml']\ncommand = 'x'\nexpect.metric = '(a)'\nexpect.last = '< 2'\n"
    verify = load(tmp_path, text).recipe.verify
    table = json.loads(json.dumps(replace(verify, direct=("numpy",)).as_state()))
    found = parse_settings(table).override({"faults": True, "nodes": None})
    assert found.imports == ("yaml",) and found.direct == ("numpy",) and found.faults
    assert found.expect == ExpectTable(metric="(a)", last="< 2")
    assert parse_settings({**table, "newer": 1, "expect": {"newer": 1}}).expect == ExpectTable()
    assert parse_settings(table) == replace(verify, direct=("numpy",))
    with pytest.raises(ValueError, match="'metric' of the verification's settings is 5"):
        parse_settings({**table, "expect": {"metric": 5}})


# ---- modules
@pytest.mark.parametrize(
    ("paths", "modules"),
    [
        (["yaml/__init__.py", "yaml/a.py", "_yaml/__init__.py", "PyYAML.dist-info/RECORD"], ("yaml",)),
        (["six.py", "__pycache__/six.cpython-311.pyc", "six-1.dist-info/METADATA"], ("six",)),
        (["fast.cpython-311-x86_64-linux-gnu.so", "fast.pyi", "fast.libs/x.so"], ("fast",)),
        (["google/protobuf/__init__.py", "google/protobuf/a/__init__.py"], ("google.protobuf",)),
        (["a/__init__.py", "a/b/__init__.py", "tests/__init__.py", "docs/x/__init__.py"], ("a",)),
        (["../../../bin/tool", "x.data/y.py", "dist-name/__init__.py", "a.pth"], ()),
        (["torch/__init__.py", "functorch/__init__.py", "torchgen/__init__.py"], ("functorch", "torch", "torchgen")),
    ],
)
def test_top_level_modules(paths: list[str], modules: tuple[str, ...]) -> None:
    assert top_level(paths) == modules


@given(st.lists(st.text(max_size=30), max_size=20))
def test_any_paths_give_names_that_can_be_imported(paths: list[str]) -> None:
    assert all(part.isidentifier() for name in top_level(paths) for part in name.split("."))


def survey_of(**modules: tuple[str, ...]) -> Survey:
    found = {name: Distribution(name, "1", "", names) for name, names in modules.items()}
    return Survey(found, FileReport(), ElfReport())


def test_direct_requirements_are_imported_but_for_exceptions() -> None:
    survey = survey_of(torch=("torch", "torchgen"), numpy=("numpy",), other=("other",))
    settings = VerifySettings(direct=("numpy", "torch", "windows-only"), imports=("pkg.train",))
    assert modules_to_import(settings, survey) == ["numpy", "pkg.train", "torch", "torchgen"]
    assert modules_to_import(replace(settings, imports_except=("torchgen",)), survey) == ["numpy", "pkg.train", "torch"]
    assert modules_to_import(replace(settings, imports_except=("*",)), survey) == ["pkg.train"]
    # What is named is imported, whatever is excepted.
    assert "torch" in modules_to_import(VerifySettings(imports=("torch",), imports_except=("torch",)), survey)


def test_the_trainer_reports_the_error_of_each_import(tmp_path: Path) -> None:
    (tmp_path / "exits.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "fails.py").write_text("1 / 0\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from ddp_train.imports import import_modules\n"
        "print(import_modules({'DDP_TRAIN_IMPORTS': 'json exits fails gone.one'}))\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(
        {
            "json": "",
            "exits": "SystemExit: 3",
            "fails": "ZeroDivisionError: division by zero",
            "gone.one": "ModuleNotFoundError: No module named 'gone'",
        }
    )
    assert done.stderr.splitlines()[-1] == "importing gone.one"


def report(*ranks: dict[str, str]) -> list[dict[str, Any]]:
    return [{"ranks": [{"rank": number, "imports": told} for number, told in enumerate(ranks)]}]


def test_an_import_that_fails_on_one_rank_fails_the_check() -> None:
    good = {"yaml": "", "pkg": ""}
    assert check_imports(["pkg", "yaml"], report(good, good)).status == "pass"
    check = check_imports(["pkg", "yaml"], report(good, {**good, "pkg": "ImportError: libx.so"}, good))
    assert check.status == "fail" and check.seen == "pkg on rank 1: ImportError: libx.so" and check.cause
    assert check_imports(["pkg"], report({}, good)).status == "fail"
    assert check_imports(["pkg"], []).status == "fail"
    assert check_imports([], []).status == "not tried"


# ---- the command
def test_the_metric_is_rank_0s() -> None:
    assert metric_values(METRIC, LOG) == [3.5, 2.0, 0.1]
    assert metric_values(METRIC, "loss: 4\nloss: 3\n") == [4.0, 3.0]  # without torchrun
    assert metric_values("", LOG) == []
    assert math.isnan(metric_values("loss: (.*)", "loss: none")[0])


@pytest.mark.parametrize(
    ("expect", "found", "wrong"),
    [
        ({}, {}, ""),
        ({"metric": METRIC, "trend": "falls", "last": "<= 0.1"}, {}, ""),
        ({"exit_code": 3}, {"codes": (1, 1), "log": "E1123 14:58 api.py:1] failed (exitcode: 3) local_rank"}, ""),
        ({}, {"codes": (1, 1), "log": "[0.0]:E1123 14:58 api.py:1] failed (exitcode: 0)"}, "exit codes [1, 1]"),
        ({"exit_code": 3}, {"codes": (0, 0), "log": "E1123 14:58 api.py:1] failed (exitcode: 3)"}, "exit codes [0, 0]"),
        ({}, {"codes": (1, 0)}, "exit codes [1, 0]"),
        ({"exit_code": 3}, {}, "exit codes [0, 0]"),
        ({}, {"timed_out": True}, "still running after 1 s; stopped"),
        ({"metric": METRIC, "trend": "rises"}, {}, "the metric does not rise: 3.5 -> 0.1"),
        ({"metric": METRIC, "trend": "falls"}, {"log": "loss: 1\nloss: 2\n"}, "the metric does not fall: 1 -> 2"),
        ({"metric": METRIC, "trend": "falls"}, {"log": "loss: 1\n"}, "the metric does not fall"),
        ({"metric": METRIC}, {"log": ""}, "no line of rank 0 matches"),
        ({"metric": "loss: (.*)"}, {"log": "loss: nan\n"}, "the metric is not finite: [nan]"),
        ({"metric": METRIC, "last": "> 1"}, {}, "the metric's last value is 0.1, not > 1"),
    ],
)
def test_a_command_is_judged_by_what_is_expected(expect: dict[str, Any], found: dict[str, Any], wrong: str) -> None:
    check = judge_command(ExpectTable(**expect), outcome(**found))
    assert (check.status == "fail") == bool(wrong)
    assert wrong in check.seen
    json.dumps(check.evidence, allow_nan=False)


def test_secrets_of_the_output_stay_out_of_the_receipt() -> None:
    check = judge_command(ExpectTable(), outcome("GET https://me:0123456789abcdef@h/x failed\n", codes=(1,)))
    assert "0123456789abcdef" not in json.dumps(dataclasses.asdict(check))


def test_a_missing_file_fails_the_command() -> None:
    check = judge_command(ExpectTable(file="out/model.pt"), outcome(), missing=True)
    assert check.status == "fail" and "out/model.pt is missing or empty" in check.seen
