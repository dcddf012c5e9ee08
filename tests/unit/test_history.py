"""What verifications measured: figures from the trainer's reports, the record in the store, and `envbuild history`."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner

from envbuild.base.errors import UsageError
from envbuild.cli.commands import cli
from envbuild.store import history
from envbuild.store.history import merged, record, recorded, sparkline
from envbuild.store.store import Store
from envbuild.verify.launch import Outcome, TrainingJob
from envbuild.verify.run import performance_of

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "receipt.schema.json").read_text())
REPORT: dict[str, Any] = {
    "epoch_seconds": [0.4, 0.16, 0.2],
    "steps_per_epoch": 16,
    "seconds": {"import_torch": 1.25},
    "started": 100.5,
    "ranks": [{"peak_memory": 1000}, {"peak_memory": 3000}],
    "bandwidth": [{"bytes": 1, "busbw": 0.1}, {"bytes": 2, "busbw": 1.5}],
}


def outcome(**changes: Any) -> Outcome:
    job = TrainingJob("train", (), 2, 2, 60.0)
    return Outcome(job, [0, 0], [{**REPORT, **changes}], "", 9.0, False, [], 100.25)


def receipt(second: int, step_s: float | None = 0.01, **changes: Any) -> dict[str, Any]:
    return {
        "format": 1,
        "passed": True,
        "verified_at": f"2026-01-01T00:00:{second:02}+00:00",
        "target": "cpu-x86_64",
        "artifact": {"kind": "venv", "path": "/venv", "digest": f"sha256:{second:064}"},
        "recipe": {"name": "pt_cpu"},
        "lock": {"digest": "sha256:" + "ab" * 32},
        "plan": {"digest": "sha256:p"},
        "runtime": "host",
        "host": {"name": "node1", "cpus": 2, "processor": "Some CPU"},
        "settings": {"nodes": 2, "nproc_per_node": 1, "model": "mlp", "batch_size": 32},
        "versions": {"torch": "2.7"},
        "checks": [{"name": "launch", "status": "pass"}],
        **({} if step_s is None else {"performance": {"step_s": step_s}}),
        **changes,
    }


def test_the_figures_of_a_report() -> None:
    found = performance_of(outcome(), outcome())
    assert found == {"step_s": 0.01, "import_s": 1.25, "startup_s": 0.25, "peak_memory_bytes": 3000, "busbw_gbs": 1.5}
    jsonschema.validate(found, SCHEMA["properties"]["performance"])
    gpu = [{"peak_memory": 1000, "peak_gpu_memory": 5, "gpu": "NVIDIA X"}]
    found = performance_of(outcome(ranks=gpu), outcome())
    assert (found["peak_gpu_memory_bytes"], found["gpu"]) == (5, "NVIDIA X")
    jsonschema.validate(found, SCHEMA["properties"]["performance"])


@pytest.mark.parametrize(
    ("changes", "lost"),
    [
        ({"epoch_seconds": []}, "step_s"),
        ({"steps_per_epoch": 0}, "step_s"),
        ({"seconds": None}, "import_s"),
        ({"started": 5000.0}, "startup_s"),  # the clock of another machine
        ({"started": "x"}, "startup_s"),
        ({"ranks": [{"peak_memory": 1}, {}]}, "peak_memory_bytes"),
        ({"bandwidth": []}, "busbw_gbs"),
        ({"bandwidth": [{"busbw": float("nan")}]}, "busbw_gbs"),
    ],
)
def test_what_was_not_measured_is_left_out(changes: dict[str, Any], lost: str) -> None:
    whole = performance_of(outcome(), outcome())
    assert performance_of(outcome(**changes), outcome(**changes)) == {k: v for k, v in whole.items() if k != lost}
    failed = Outcome(outcome().job, [1], [REPORT], "", 1.0, False, [])
    assert performance_of(failed, outcome()) == {}


def test_the_record_is_bounded_for_each_series(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "KEPT", 3)
    store = Store(tmp_path)
    record(store, receipt(9, target="cu126-x86_64"))
    with ThreadPoolExecutor(4) as pool:  # builds at one time lose no row
        list(pool.map(lambda second: record(store, receipt(second)), range(3)))
    assert len(recorded(store, "pt_cpu")) == 4
    record(store, receipt(5))
    rows = recorded(store, "pt_cpu")
    assert [row["target"] for row in rows].count("cu126-x86_64") == 1 and len(rows) == 4
    assert rows[-1]["performance"] == {"step_s": 0.01} and "checks" not in rows[-1]
    assert merged(rows, rows) == sorted(rows, key=lambda row: (row["verified_at"], row["digest"]))
    record(store, receipt(6, recipe={"name": "../up"}))
    assert [path.name for path in tmp_path.rglob("*.json")] == ["pt_cpu.json"]
    (tmp_path / "history" / "pt_cpu.json").write_text("{}")
    assert recorded(store, "pt_cpu") == [] == recorded(store, "none")


def test_a_sparkline() -> None:
    assert sparkline([1.0, 2.0, None, 1.5]) == "▁█ ▅"
    assert sparkline([1.0, 1.01, 1.0]) == "▁▁▁" and sparkline([]) == "" and sparkline([None]) == " "


def test_the_command_shows_series_and_receipts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENVBUILD_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("COLUMNS", "120")
    done = CliRunner().invoke(cli, ["history", "pt_cpu"])
    assert isinstance(done.exception, UsageError) and "no verification of pt_cpu is recorded" in done.exception.message
    store = Store(tmp_path / "store")
    for second, step in enumerate((0.010, 0.011, 0.020)):
        record(store, receipt(second, step))
    failed = receipt(4, checks=[{"name": "curve", "status": "fail"}], passed=False)
    (tmp_path / "venv.receipt.json").write_text(json.dumps(failed))
    (tmp_path / "other.receipt.json").write_text(json.dumps(receipt(5, recipe={"name": "other"})))
    done = CliRunner().invoke(cli, ["history", "pt_cpu", "--receipts", str(tmp_path)])
    lines = done.stdout.splitlines()
    assert lines[0] == ("pt_cpu cpu-x86_64, venv by host on node1, 2 processors, Some CPU; 2 × 1 ranks, mlp, batch 32")
    assert lines[1].split() == ["verified", "at", "result", "lock", "torch", "one", "step"]
    assert lines[2].split() == ["2026-01-01T00:00:00+00:00", "passed", "abababab", "2.7", "10.0", "ms"]
    assert "failed: curve" in lines[5] and lines[6] == "  one step  ▁▂█" and len(lines) == 8
    told = json.loads(CliRunner().invoke(cli, ["history", "pt_cpu", "--json", "--target", "cpu-aarch64"]).stdout)
    assert told == {"recipe": "pt_cpu", "verifications": []}
    (tmp_path / "bad.receipt.json").write_text("{}")
    done = CliRunner().invoke(cli, ["history", "pt_cpu", "--receipts", str(tmp_path)])
    assert isinstance(done.exception, UsageError) and "bad.receipt.json is not a receipt" in done.exception.message


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"lock": ["x"]}, "`lock`"),
        ({"host": "x"}, "`host`"),
        ({"checks": 5}, "`checks`"),
        ({"artifact": {"kind": [], "digest": "sha256:1"}}, "`artifact.kind`"),
    ],
)
def test_a_receipt_with_parts_of_other_types_is_none(tmp_path: Path, changes: dict[str, Any], where: str) -> None:
    path = tmp_path / "venv.receipt.json"
    path.write_text(json.dumps(receipt(1, **changes)))
    done = CliRunner().invoke(cli, ["history", "pt_cpu", "--receipts", str(path)])
    assert isinstance(done.exception, UsageError) and where in done.exception.message


@pytest.mark.parametrize("value", [None, "1", [], float("nan"), float("inf"), 10**400])
def test_a_figure_that_is_no_number_is_left_out(tmp_path: Path, value: object) -> None:
    path = tmp_path / "venv.receipt.json"
    path.write_text(json.dumps(receipt(1, verified_at=None, checks=None, performance={"step_s": value, "gpu": "G"})))
    done = CliRunner().invoke(cli, ["history", "pt_cpu", "--receipts", str(path)])
    assert done.exit_code == 0 and "on node1, 2 processors, Some CPU, G;" in done.stdout


def test_the_hint_names_a_command_that_builds_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENVBUILD_STORE", str(tmp_path / "store"))
    folder = tmp_path / "only_conda"
    folder.mkdir()
    (folder / "recipe.toml").write_text(
        'name = "only_conda"\ndescription = "x"\npython = "3.11"\nrequirements = []\nenvironment = "conda"\n'
        '[conda]\ndependencies = ["pytorch"]\n[targets.cpu-x86_64]\n'
    )
    done = CliRunner().invoke(cli, ["history", str(folder)])
    assert isinstance(done.exception, UsageError) and f"envbuild conda {folder}; or" in str(done.exception.hint)
