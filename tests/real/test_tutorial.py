"""docs/tutorial.md, word for word: its files and its commands, in their order, on this host and the lab's cluster."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab import slurm
from lab.slurm import Cluster, slurm_cluster

from envbuild.recipe.targets import host_arch

from .conftest import QUICK, REPOSITORY

PAGE = (REPOSITORY / "docs/tutorial.md").read_text()
# What is written in the other form after the release stands in comments.
SHOWN = re.sub(r"<!--.*?-->", "", PAGE, flags=re.DOTALL)
ON_THE_CLUSTER = "## 4. Describe the cluster"


@pytest.fixture
def cluster(tmp_path: Path, session_store: Path) -> Iterator[Cluster]:
    if reason := slurm.missing():
        pytest.skip(reason)
    with slurm_cluster(tmp_path / "cluster", share=[session_store]) as started:
        yield started


def files(page: str) -> dict[str, str]:
    """The files that the page gives: a name in backquotes before a block."""
    return dict(re.findall(r"^`([\w.]+)`:\n\n```\w+\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))


def commands(page: str) -> list[str]:
    return [line.strip() for line in page.splitlines() if line.startswith("    ") and not line.startswith("     ")]


def outside_of_blocks(page: str) -> str:
    return re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)


def test_the_tutorial_word_for_word(cluster: Cluster, session_store: Path) -> None:
    folder = cluster.shared / "my_train"
    folder.mkdir()
    given = files(SHOWN)
    assert set(given) == {"requirements.txt", "train.py"}
    for name, text in given.items():
        (folder / name).write_text(text)
    here, there = (commands(outside_of_blocks(part)) for part in SHOWN.split(ON_THE_CLUSTER))
    install, first = here[:2]
    assert install.startswith("python3 -m venv") and first == ".venv/bin/envbuild venv --from requirements.txt"
    # Python compiles those modules of envbuild's dependencies that the commands import; pip would compile all.
    env = {**os.environ, "ENVBUILD_STORE": str(session_store), "PIP_NO_COMPILE": "1"}

    def run(*lines: str) -> str:
        line = "\n".join(["set -e", *lines])
        done = subprocess.run(["bash", "-c", line], cwd=folder, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    # Two commands, from nothing to a verified environment.
    run(install.replace("PATH/OF/THE/CHECKOUT", str(REPOSITORY)))
    built = run(first).splitlines()[-1]
    receipt = folder / f"{built}.receipt.json"
    assert built == f"build/my_train/cpu-{host_arch()}/venv"
    told = json.loads(receipt.read_text())
    assert told["passed"] and not told["settings"]["quick"]

    exported, script, add, quick, full = here[2:]
    said = run(exported, script)
    for node, rank in ((0, 0), (0, 1), (1, 0), (1, 1)):
        assert f"[{node}.{rank}]:rank {2 * node + rank} of 4: loss " in said, said
    # The verifications that follow train one rank: the first one had the recipe's own numbers.
    with (folder / "recipes/my_train/recipe.toml").open("a") as recipe:
        recipe.write(QUICK)
    run(exported, add, quick)
    told = json.loads(receipt.read_text())
    assert told["passed"] and told["settings"]["quick"] and "einops" in told["packages"]

    def on_the_cluster(line: str) -> subprocess.CompletedProcess[str]:
        variables = {"ENVBUILD_STORE": str(session_store)}
        return cluster.run(["bash", "-c", f"{exported}\n{line}"], cwd=folder, env=variables)

    init, check, look, submit, diagnose = there
    for line in (init, check):
        done = on_the_cluster(line)
        assert done.returncode == 0, done.stdout + done.stderr
    site = folder / "site.toml"
    text = re.sub(r"^#? *partition = .*$", 'partition = "main"', site.read_text(), flags=re.MULTILINE)
    site.write_text(re.sub(r"^#? *shared = .*$", f'shared = "{folder}"', text, flags=re.MULTILINE))
    refused = on_the_cluster(submit)
    assert refused.returncode == 5 and "was verified with --verify quick only" in refused.stderr, refused.stderr
    before = (folder / built / "envbuild.json").stat().st_ino
    run(exported, full)
    assert (folder / built / "envbuild.json").stat().st_ino == before, "not built again"
    assert not json.loads(receipt.read_text())["settings"]["quick"]
    done = on_the_cluster(look)
    assert done.returncode == 0 and "#SBATCH --nodes=2" in done.stdout, done.stderr
    assert "[scheduler] kind of site.toml" in done.stderr
    done = on_the_cluster(submit)
    assert done.returncode == 0, done.stderr
    number = done.stdout.split()[-1]
    end = cluster.wait(int(number), 180)
    log = next(folder.glob(f"logs/my_train_{number}*.out"))
    assert end.state == "COMPLETED" and "of 4: loss" in log.read_text(), log.read_text()
    done = on_the_cluster(diagnose.replace("my_train_42.out", log.name))
    assert done.returncode == 0, done.stdout + done.stderr
