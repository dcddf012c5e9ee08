"""The probes' expected results and envbuild's own trainer: pure functions, and results that torch gave."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from envbuild.base.packages import record_digest
from envbuild.contract.installed import Distribution, FileReport
from envbuild.contract.receipt import failures
from envbuild.contract.verification import VerifySettings
from envbuild.layers.wheel import Scheme, load_trainer, wheel_record
from envbuild.verify import launch, static_checks, training_checks
from envbuild.verify.elf_files import ElfReport
from envbuild.verify.model import Check, Verdict, not_tried
from envbuild.verify.probes import cases_of, expected_digest, expected_parameters, make_request
from envbuild.verify.survey import Survey

from .test_judgement import subject_of

REQUEST: dict[str, Any] = {
    "source": 1,
    "values": [[1, 2, -1], [2, 1, -2]],
    "optimizer": {
        "SGD": {"lr": 0.5, "momentum": 0.5, "weight_decay": 0.0},
        "AdamW": {"lr": 0.5, "betas": [0.5, 0.75], "eps": 1.0, "weight_decay": 0.5},
        "start": [0.0, 1.0],
        "data": [[[[1.0, 3.0]], [[2.0, 2.0]]]] * 2,
    },
}


@pytest.mark.parametrize(
    ("case", "rank", "values"),
    [
        (("sum", "int64", 4), 0, [3, 3, -3, 3]),
        (("max", "int64", 4), 0, [2, 2, -1, 2]),
        (("min", "int64", 4), 0, [1, 1, -2, 1]),
        (("product", "int64", 4), 0, [2, 2, 2, 2]),
        (("broadcast", "int64", 4), 0, [2, 1, -2, 2]),
        (("all_gather", "int64", 2), 0, [1, 2, 2, 1]),
        (("reduce_scatter", "int64", 2), 0, [3, 3]),
        (("reduce_scatter", "int64", 2), 1, [-3, 3]),
    ],
)
def test_results_by_hand(case: tuple[str, str, int], rank: int, values: list[int]) -> None:
    expected = hashlib.sha256(struct.pack(f"<{len(values)}q", *values)).hexdigest()
    assert expected_digest(REQUEST, case, rank) == expected


@pytest.mark.parametrize(
    ("dtype", "content"), [("float32", "0000404000004040"), ("float16", "00420042"), ("bfloat16", "40404040")]
)
def test_bytes_of_types(dtype: str, content: str) -> None:
    expected = hashlib.sha256(bytes.fromhex(content)).hexdigest()
    assert expected_digest(REQUEST, ("sum", dtype, 2), 0) == expected


def test_steps_by_hand() -> None:
    # Errors 1 - 3 and 1 - 2: gradient (2·-2·1 + 2·-1·2) / 2 = -4 and (2·-2 + 2·-1) / 2 = -3.
    # Then errors 1.5 and 4.5: gradient 10.5 and 6, velocity 10.5 - 4/2 = 8.5 and 6 - 3/2 = 4.5.
    assert expected_parameters(REQUEST, "SGD") == [2.0, 2.5, -2.25, 0.25]


def test_steps_with_weight_decay_by_hand() -> None:
    # The gradient -3 of the second parameter, whose value is 1, becomes -2.
    optimizer = {**REQUEST["optimizer"], "SGD": {"lr": 0.5, "momentum": 0.5, "weight_decay": 1.0}}
    assert expected_parameters({"optimizer": optimizer}, "SGD")[:2] == [2.0, 2.0]
    # The first step of AdamW, whose corrections are 1: gradient / (|gradient| + eps).
    first = expected_parameters(REQUEST, "AdamW")
    assert first[:2] == [0.5 * 4 / 5, 1 - 0.5 * 0.5 * 1 + 0.5 * 3 / 4]


def test_no_two_requests_are_equal_and_results_stay_exact() -> None:
    one, other = make_request(4), make_request(4)
    assert one["values"] != other["values"] and one["optimizer"] != other["optimizer"]
    assert one["operations"]["inputs"] != other["operations"]["inputs"]
    for world in (1, 2, 64):
        request = make_request(world)
        assert all(expected_digest(request, case, world - 1) for case in cases_of("allreduce") if case[2] < 2000)


def test_gpus_probe_64_mib_too() -> None:
    large = ("sum", "float32", 16 << 20)
    assert set(cases_of("allreduce", gpu=True)) - set(cases_of("allreduce")) == {large}
    request = make_request(2, gpu=True)
    assert large in request["cases"]["allreduce"] and large not in make_request(2)["cases"]["allreduce"]
    report = {
        "backend": "nccl",
        "ranks": [{"rank": 0, "device": "cuda:0", "torch_version": "2.13.0", "probes": {"allreduce": {}}}],
    }
    assert f"{large[0]} {large[1]} × {large[2]}" in " ".join(
        training_checks.check_allreduce(request, report).evidence["wrong"]
    )


@pytest.mark.parametrize(
    ("facts", "torch", "may"),
    [
        ({"op": "sum", "dtype": "bfloat16"}, "2.3.1+cpu", True),
        ({"op": "sum", "dtype": "bfloat16"}, "2.13.0+cpu", False),
        ({"op": "sum", "dtype": "float16"}, "2.0.1", False),
        ({"op": "reduce_scatter", "dtype": "int64"}, "2.7.1", True),
        ({"op": "reduce_scatter", "dtype": "int64"}, "2.8.0", False),
    ],
)
def test_only_known_gaps_of_older_torches_pass(facts: dict[str, str], torch: str, may: bool) -> None:
    rank = {"device": "cuda:0", "torch_version": torch}
    assert training_checks._may_lack({"backend": "gloo", **facts}, rank) is may
    assert not training_checks._may_lack({"backend": "nccl", **facts}, rank)


# ---- the trainer
def check_trainer(*found: Distribution) -> Check:
    subject = subject_of({"state": {"python_version": "3.11.7", "packages": []}})
    survey = Survey({one.name: one for one in found}, FileReport(), ElfReport())
    return static_checks.check_trainer(subject, survey)


def test_a_trainer_with_other_files_fails_and_another_envbuilds_is_not_compared(tmp_path: Path) -> None:
    wheel = tmp_path / load_trainer().file_name
    wheel.write_bytes(load_trainer().wheel())
    record = record_digest(wheel_record(wheel, Scheme("opt/env", "3.11")))
    own = Distribution("ddp-train", load_trainer().version, record)
    assert check_trainer(own).status == "pass"
    assert check_trainer(dataclasses.replace(own, record="sha256:other")).status == "fail"
    assert check_trainer().status == "fail"
    other = check_trainer(dataclasses.replace(own, version="0.0.1", record="sha256:other"))
    assert other.status == "not tried" and "the artifact has ddp-train 0.0.1" in other.seen


@pytest.mark.parametrize("safe", ["", "1"])
def test_the_script_starts_envbuilds_own_trainer(tmp_path: Path, safe: str) -> None:
    for name, content in launch.trainer_files().items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    theirs = tmp_path / "theirs/ddp_train"
    theirs.mkdir(parents=True)
    (theirs / "__init__.py").touch()
    (theirs / "__main__.py").write_text("raise SystemExit(7)\n")
    done = subprocess.run(
        [sys.executable, tmp_path / launch.TRAINER, "--help"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(theirs.parent), "PYTHONSAFEPATH": safe},
    )
    assert done.returncode == 0 and "Distributed training job" in done.stdout, done.stderr


# ---- checks that were not tried
def test_a_check_that_was_not_tried_fails_no_verification() -> None:
    passed, failed = (dataclasses.replace(not_tried("loss", ""), status=status) for status in ("pass", "fail"))
    restart = not_tried("restart", "give --faults")
    assert restart.status == "not tried" and restart.seen == "not tried: give --faults"
    assert Verdict((passed, restart), VerifySettings(), 1.0, None).passed
    assert not Verdict((failed, restart), VerifySettings(), 1.0, None).passed
    receipt = {"checks": [dataclasses.asdict(one) for one in (passed, failed, restart)]}
    assert failures(receipt).startswith("1 of 2 checks failed")
