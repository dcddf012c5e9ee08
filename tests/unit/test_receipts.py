"""Which receipt counts, for which artifact; and finding a rank's process."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest

from envbuild.base.errors import BuildError
from envbuild.build import commit
from envbuild.contract.receipt import passing_receipt, receipt_path
from envbuild.contract.state import State, read_state
from envbuild.contract.verification import FULL, Thoroughness, VerifySettings
from envbuild.lock.format import Lock
from envbuild.plan import Plan, make_plan
from envbuild.recipe.load import load_recipe
from envbuild.recipe.sources import LockedPackage
from envbuild.recipe.targets import Target
from envbuild.verify.model import Subject, Verdict, make_receipt
from envbuild.verify.processes import find_rank, find_with

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "pt_minimal"


def make_state(**changes: Any) -> State:
    state = State(
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
    return dataclasses.replace(state, **changes)


def the_plan(python: str = "3.11", **lock: Any) -> Plan:
    loaded = load_recipe(RECIPE / "recipe.toml")
    target = Target.parse("cpu-x86_64")
    packages = lock.get("packages", (LockedPackage("numpy", "2.2.6", ("a" * 64,)),))
    locked = Lock("pt_minimal", target.name, python, "x86_64-manylinux_2_28", "sha256:d", packages)
    return make_plan(loaded, locked, target, artifact="venv", trainer_version="1", trainer_digest="sha256:t")


def test_the_plan_digest_follows_what_decides_the_content() -> None:
    digest = the_plan().digest
    assert the_plan().digest == digest
    assert dataclasses.replace(the_plan(), indexes=("https://elsewhere.example/simple",)).digest == digest
    assert dataclasses.replace(the_plan(), compile_bytecode=True).digest != digest
    assert the_plan(python="3.12").digest != digest
    assert the_plan(packages=(LockedPackage("numpy", "2.2.6", ("b" * 64,)),)).digest != digest


def test_the_artifact_digest_ignores_where_and_by_whom_it_was_built() -> None:
    state = make_state()
    same = dataclasses.replace(state, interpreter="/opt/python", envbuild="9", recipe_digest="sha256:x")
    same = dataclasses.replace(same, verify=VerifySettings(nodes=9))
    assert same.digest == state.digest
    assert make_state(packages=(("numpy", "2.2.6", "sha256:other"),)).digest != state.digest
    assert make_state(python_version="3.11.8").digest != state.digest


def test_a_state_is_read_back_and_a_damaged_one_is_an_error(tmp_path: Path) -> None:
    assert read_state(tmp_path) is None and read_state(tmp_path / "none") is None
    file = tmp_path / "envbuild.json"
    file.write_text(make_state().render())
    assert read_state(tmp_path) == make_state()
    deep = "[" * 100_000
    for text in ("", "{}", '{"format": 1}', deep, make_state().render().replace('"format": 1', '"format": 9'), "[]"):
        file.write_text(text)
        with pytest.raises(BuildError, match=r"envbuild\.json"):
            read_state(tmp_path)


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(State)])
@pytest.mark.parametrize("value", [None, 5, [[1]]])
def test_a_state_with_a_part_of_another_type_names_that_part(field: str, value: object, tmp_path: Path) -> None:
    text = json.dumps({**json.loads(make_state().render()), field: value})
    (tmp_path / "envbuild.json").write_text(text)
    with pytest.raises(BuildError, match=r"envbuild\.json: invalid") as caught:
        read_state(tmp_path)
    assert caught.value.hint == "build the environment again"


@pytest.mark.parametrize(
    "changes",
    [
        {"settings": 5},
        {"fabric": []},
        {"target": 5},
        {"packages": 5},
        {"layers": 5},
        {"layers": [5]},
        {"layers": [{"name": "x"}]},
        {"recipe": "x"},
        {"recipe": {"name": 5}},
        {"versions": {"nccl": 5}},
        {"verified_at": 5},
        {"artifact": {"digest": "d", "pushed": 5}},
        {"passed": "yes"},
        {"plan": {"digest": 5}},
    ],
)
def test_a_receipt_with_a_part_of_another_type_counts_as_none(changes: dict[str, Any], tmp_path: Path) -> None:
    good = {"format": 1, "passed": True, "artifact": {"digest": "d"}}
    receipt_path(tmp_path / "venv").write_text(json.dumps(good))
    assert passing_receipt(tmp_path / "venv", "d") == good
    receipt_path(tmp_path / "venv").write_text(json.dumps({**good, **changes}))
    assert passing_receipt(tmp_path / "venv", "d") is None


QUICK, FAULTS = Thoroughness(quick=True), Thoroughness(faults=True)


def write_receipt(path: Path, digest: str, **changes: Any) -> None:
    settings = {**the_plan().verify.as_state(), "faults": False, **changes.pop("settings", {})}
    receipt = {"format": 1, "passed": True, "artifact": {"digest": digest}, "settings": settings, **changes}
    receipt_path(path).write_text(json.dumps(receipt))


@pytest.mark.parametrize(
    ("changes", "asked", "counts"),
    [
        ({}, FULL, True),
        ({}, FAULTS, False),
        ({"settings": {"faults": True}}, FAULTS, True),
        ({"settings": {"epochs": 2}}, FULL, False),
        ({"settings": {"nodes": 4}}, FULL, True),
        ({"settings": {"nodes": 1, "nproc_per_node": 4}}, FULL, False),
        ({"settings": {"nodes": 3, "nproc_per_node": 1}}, FULL, False),
        ({"settings": {"nproc_per_node": 1, "wanted_nproc_per_node": 2}}, FULL, True),
        ({"settings": {"model": "linear"}}, FULL, False),
        ({"settings": {"busbw_floor": 40.0}}, FULL, True),
        ({"passed": False}, FULL, False),
        ({"format": 2}, FULL, False),
        ({"artifact": {"digest": "sha256:other"}}, FULL, False),
        ({"settings": {"quick": True, "epochs": 1, "nproc_per_node": 1}}, FULL, False),
        ({"settings": {"quick": True}}, FULL, False),
        ({"settings": {"quick": True, "epochs": 1, "nproc_per_node": 1}}, QUICK, True),
        ({"settings": {"quick": True, "imports": ["other"]}}, QUICK, False),
        ({}, QUICK, True),
    ],
)
def test_a_receipt_counts_when_it_is_no_less_thorough(
    changes: dict[str, Any], asked: Thoroughness, counts: bool, tmp_path: Path
) -> None:
    state = make_state()
    write_receipt(tmp_path / "venv", state.digest, **changes)
    assert commit.has_receipt(tmp_path / "venv", state.digest, the_plan(), asked) is counts


@pytest.mark.parametrize(
    "settings",
    [
        {"nodes": "two"},
        {"epochs": None},
        {"loss_tolerance": []},
        {"gpus": 5},
        {"gpus": [{}]},
        {"busbw_floor": "x"},
        None,
        "nodes",
        "nproc_per_node",
        "epochs",
        "loss_tolerance",
        "model",
        "trainer",
    ],
)
def test_a_receipt_with_settings_of_another_form_counts_as_none(settings: Any, tmp_path: Path) -> None:
    state = make_state()
    write_receipt(tmp_path / "venv", state.digest, settings=settings if isinstance(settings, dict) else {})
    path = receipt_path(tmp_path / "venv")
    receipt = json.loads(path.read_text())
    if not isinstance(settings, dict):
        del (receipt["settings"] if settings else receipt)[settings or "settings"]
    path.write_text(json.dumps(receipt))
    assert not commit.has_receipt(tmp_path / "venv", state.digest, the_plan(), FULL)


@pytest.mark.parametrize("text", ["", "[]", "null", '{"format": 1}', "\0", "[" * 100_000, '{"format": ' + "9" * 5000])
def test_a_damaged_receipt_counts_as_none(text: str, tmp_path: Path) -> None:
    receipt_path(tmp_path / "venv").write_text(text)
    assert not commit.has_receipt(tmp_path / "venv", make_state().digest, the_plan(), FULL)


def test_a_rank_is_found_by_its_environment(tmp_path: Path) -> None:
    for pid, text in (
        ("10", "RANK=1\0TORCHELASTIC_RUN_ID=other\0"),
        ("11", "LOCAL_RANK=1\0TORCHELASTIC_RUN_ID=mine\0RANK=0\0"),
        ("12", "TORCHELASTIC_RUN_ID=mine\0RANK=1\0"),
        ("self", "TORCHELASTIC_RUN_ID=mine\0RANK=1\0"),
    ):
        (tmp_path / pid).mkdir()
        (tmp_path / pid / "environ").write_text(text)
    (tmp_path / "13").mkdir()  # ended meanwhile
    assert find_rank("mine", 1, tmp_path) == 12
    assert find_rank("mine", 3, tmp_path) is None
    assert sorted(find_with(("TORCHELASTIC_RUN_ID=mine",), tmp_path)) == [11, 12]


def test_paths_are_seen_from_the_artifact_through_links_too(tmp_path: Path) -> None:
    real = tmp_path / "real"
    (real / "venv").mkdir(parents=True)
    (tmp_path / "link").symlink_to(real)
    root = tmp_path / "link" / "venv"
    subject = Subject(
        root, make_state(), Target.parse("cpu-x86_64"), "sha256:d", "host", NotImplemented, NotImplemented
    )
    for inside in (f"{root}/bin/python", f"{real}/venv/bin/python"):
        assert subject.holds(inside) and subject.relative(inside) == "bin/python"
    assert not subject.holds(f"{real}/venv2/bin/python") and not subject.holds("/usr/bin/python3")


def test_in_a_container_every_path_is_the_artifacts() -> None:
    subject = Subject(
        Path("/opt/env"),
        make_state(),
        Target.parse("cpu-x86_64"),
        "sha256:d",
        "docker",
        NotImplemented,
        NotImplemented,
        isolated=True,
    )
    assert subject.holds("/usr/lib/python3.11/ssl.py")
    assert subject.relative("/opt/env/bin/python") == "bin/python"


def test_the_schema_of_receipts_has_every_setting_of_a_verification() -> None:
    schema = json.loads((Path(__file__).parents[2] / "docs/receipt.schema.json").read_text())
    settings = json.loads(json.dumps(dataclasses.asdict(VerifySettings())))
    jsonschema.validate(settings, schema["properties"]["settings"])
    assert schema["properties"]["settings"]["properties"].keys() == settings.keys()


def test_state_and_receipt_name_a_python_that_uv_downloaded(tmp_path: Path) -> None:
    """For any other Python, nothing: older artifacts keep the text of their state."""
    build = "cpython-3.11.18-linux-x86_64-gnu"
    assert "python_build" not in make_state().render()
    (tmp_path / "envbuild.json").write_text(make_state(python_build=build).render())
    state = read_state(tmp_path)
    assert state is not None and state.python_build == build and state.digest == make_state().digest
    verdict = Verdict((), VerifySettings(), 1.0, None)
    for one, expected in ((state, build), (make_state(), None)):
        subject = SimpleNamespace(state=one, kind="", digest="sha256:d", manifest="", runtime=None)
        receipt = make_receipt(subject, verdict, tmp_path)  # type: ignore[arg-type]
        assert receipt["versions"].get("python_build") == expected
