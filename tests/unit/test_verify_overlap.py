"""When a verification's second launch may get ready beside its first."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from envbuild.verify.launch import Outcome, Running, TrainingJob
from envbuild.verify.model import Nodes
from envbuild.verify.run import _may_start_beside


def first_launch(ago: float) -> Running:
    job = TrainingJob("train", (), nodes=2, nproc_per_node=2, timeout_s=60)
    return Running(job, "id", Path(), time.monotonic() - ago, cast(Nodes, None))


def reference(*reports: dict[str, Any]) -> Outcome:
    return Outcome(first_launch(0).job, [0], list(reports), "", 1.0, False, [])


SECONDS = {"seconds": {"import_torch": 2.0}}


@pytest.mark.parametrize("reports", [[], [{"unreadable": "x"}]], ids=["failed", "damaged report"])
def test_after_a_failed_reference_the_second_launch_starts_after_the_first(reports: list[dict[str, Any]]) -> None:
    assert not _may_start_beside(first_launch(60), reference(*reports))


def test_it_starts_when_the_agents_of_the_first_have_imported_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    clock = SimpleNamespace(sleep=slept.append, monotonic=time.monotonic)
    monkeypatch.setattr("envbuild.verify.run.time", clock)
    assert _may_start_beside(first_launch(0.5), reference(SECONDS))
    assert _may_start_beside(first_launch(9.0), reference(SECONDS))
    assert slept == [pytest.approx(1.5, abs=0.1), 0.0]
