"""`envbuild check`: the chain of reasons as a user reads it."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from lab.forked import run_forked

TOP = Path(__file__).parents[2]
SHIPPED = sorted(file.parent.name for file in (TOP / "recipes").glob("*/recipe.toml"))

RECIPE = """\
name = "lab"
description = "For the lab"
python = "3.11"
requirements = ["torch==2.9.1+cu126"]
fabric = "tcp-ofi"
[targets.cu126-x86_64]
[targets.cu126-aarch64]
[layers.libfabric]
version = "2.1.0"
[layers.aws-ofi-nccl]
version = "1.21.1"
"""

CHAIN = """\
lab for cu126-aarch64, as the recipe pins it: cu126-aarch64.requirements.txt: no lock for this target yet
  good     glibc     torch 2.9.1+cu126's wheels for aarch64 need glibc 2.28; hosts have 2.28 or newer
  bad      driver    CUDA 12.6 needs driver 525 or newer, the nodes have 470.82.01
                     fix: update the driver to 525 or newer, or take a target of an older CUDA
  good     torch     torch 2.9.1+cu126 is built for CUDA 12.6 on aarch64: \
https://download.pytorch.org/whl/cu126 has it (the plain wheel is for CPUs)
  good     nccl      torch 2.9.1+cu126 for CUDA 12.6 pins 2.27.5, inside its wheel
  good     plugin    NCCL 2.27.5 speaks net API v6 to v10, \
aws-ofi-nccl 1.21.1 has v6 to v12: v10 is used, from libnccl-net-ofi.so
  good     libfabric aws-ofi-nccl 1.21.1 needs libfabric >=1.11: 2.1.0
  note     libfabric libfabric 2.1.0 has symbol version FABRIC_1.8: what is built against it needs that where it runs
  good     fabric    fabric 'tcp-ofi' is libfabric's provider 'tcp', which libfabric 2.1.0 has
  1 known not to work
"""


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_forked("check", *arguments, cwd=TOP, env=os.environ)


def unwrapped(text: str) -> str:
    """What was printed without its sources, each entry on one line."""
    lines: list[str] = []
    source = False
    for line in text.splitlines():
        if re.match(r"\S|  [a-z]+ {2,}\S| +\d+ known |$", line):
            lines.append(line)
            source = False
        elif line.strip().startswith("source:"):
            source = True
        elif line.strip().startswith("fix: "):
            lines.append(line)
        elif not source:
            lines[-1] += " " + line.strip()
    return "\n".join(lines) + "\n"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "recipes" / "lab" / "recipe.toml"
    file.parent.mkdir(parents=True)
    file.write_text(RECIPE)
    return file


def test_the_chain_is_told_link_by_link_and_bad_is_exit_3(recipe: Path) -> None:
    done = check(str(recipe), "--target", "cu126-aarch64", "--driver", "470.82.01")
    assert (done.returncode, done.stderr) == (3, "")
    chain, _, data = done.stdout.partition("envbuild's data: ")
    assert unwrapped(chain) == CHAIN
    day = r"20\d\d-\d\d-\d\d"
    said = rf"releases read on {day} \(\d+ days? ago\), torch up to 2\.\d+\.\d; rows by hand up to {day}"
    assert re.fullmatch(said, " ".join(data.split()))
    assert max(map(len, done.stdout.splitlines()[1:])) <= 110
    assert done.stdout.count("source:") == 8
    assert "https://github.com/NVIDIA/nccl src/plugin/net.cc" in " ".join(done.stdout.split())


def test_all_targets_are_told_without_a_target(recipe: Path) -> None:
    done = check(str(recipe), "--driver", "550.54.15")
    assert done.returncode == 0
    assert "lab for cu126-x86_64" in done.stdout and "lab for cu126-aarch64" in done.stdout
    assert done.stdout.count("nothing is known not to work") == 2


def test_json_has_the_stack_and_each_finding(recipe: Path) -> None:
    done = check(str(recipe), "--json", "--driver", "100")
    told = json.loads(done.stdout)
    assert done.returncode == 3 and told["recipe"] == "lab"
    assert set(told["knowledge"]) == {"read", "torch", "by_hand"} and told["knowledge"]["read"] >= "2026-11-28"
    assert [one["target"] for one in told["targets"]] == ["cu126-x86_64", "cu126-aarch64"]
    for one in told["targets"]:
        assert one["verdict"] == "bad" and one["stack"]["nccl"] == "2.27.5"
        assert one["stack"]["driver"] == "100"
        keys = {"status", "subject", "text", "fix", "source", "date"}
        assert all(set(finding) == keys for finding in one["findings"])


def test_a_lock_that_cannot_be_read_is_said_and_the_pins_are_judged(recipe: Path) -> None:
    recipe.with_name("cu126-x86_64.requirements.txt").write_text("torch==nonsense\n")
    done = check(str(recipe), "--target", "cu126-x86_64")
    assert done.returncode == 0 and "as the recipe pins it: " in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"), [(["--target", "cu999-x86_64"], "no target"), (["--driver"], "requires an argument")]
)
def test_misuse_is_exit_2(recipe: Path, arguments: list[str], said: str) -> None:
    done = check(str(recipe), *arguments)
    assert done.returncode == 2 and said in done.stderr and not done.stdout


@pytest.mark.parametrize("name", SHIPPED)
def test_what_is_shipped_is_known_to_go_together(name: str) -> None:
    done = check(name, "--json")
    assert done.returncode == 0, done.stdout
    for one in json.loads(done.stdout)["targets"]:
        assert one["verdict"] == "good", one


def test_help_has_examples() -> None:
    assert re.search(r"Examples:\n\s+envbuild check pt_cu126", check("--help").stdout)
