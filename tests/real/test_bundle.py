"""`envbuild bundle`: what a node without a network builds from."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from lab import lmod, slurm
from lab.jobs import Jobs
from lab.slurm import slurm_cluster

from .conftest import REPOSITORY, Command


def test_a_bundle_of_the_same_content_is_left_alone_and_one_for_conda_too_is_new(bundle: tuple[Command, Path]) -> None:
    command, path = bundle
    before = os.stat(path / "bundle.json").st_ino
    again = command("bundle", "pt_minimal", "--out", path)
    assert "nothing changed" in again.stderr
    assert os.stat(path / "bundle.json").st_ino == before
    without = command("bundle", "pt_minimal", "--out", path.with_name("small"), "--no-tools")
    assert without.returncode == 0, without.stderr
    assert not (path.with_name("small") / "envbuild").exists()
    about = json.loads((path / "bundle.json").read_text())
    assert about["recipe"] == "pt_minimal" and about["kinds"] == ["venv"]


def test_a_bundle_of_a_recipe_that_changed_is_made_anew_whatever_changed(
    bundle: tuple[Command, Path], tmp_path: Path
) -> None:
    """Also what decides no package, such as [verify] and comments: the nodes build from the bundle's recipe."""
    command, _ = bundle
    recipe = shutil.copytree(REPOSITORY / "recipes/pt_minimal", tmp_path / "pt_minimal")
    line = ["bundle", recipe, "--no-tools", "--out", tmp_path / "made"]
    assert command(*line).returncode == 0
    text = (recipe / "recipe.toml").read_text() + "\n# The reason why.\n"
    (recipe / "recipe.toml").write_text(text)
    again = command(*line)
    assert again.returncode == 0 and "nothing changed" not in again.stderr, again.stderr
    assert (tmp_path / "made/recipes/pt_minimal/recipe.toml").read_text() == text
    assert "nothing changed" in command(*line).stderr


def test_a_folder_of_something_else_is_not_touched(bundle: tuple[Command, Path], tmp_path: Path) -> None:
    command, _ = bundle
    (tmp_path / "thesis.tex").write_text("mine")
    for place in (tmp_path, tmp_path / "thesis.tex"):
        done = command("bundle", "pt_minimal", "--out", place)
        assert done.returncode == 2 and "not a bundle" in done.stderr, done.stderr
    assert os.listdir(tmp_path) == ["thesis.tex"]
    assert (tmp_path / "thesis.tex").read_text() == "mine"


def test_a_job_builds_and_verifies_on_a_node_with_modules_and_without_network_home_or_envbuild(
    tmp_path: Path, session_store: Path, bundle: tuple[Command, Path]
) -> None:
    """The job runs the bundle's envbuild, and the cluster's network leads nowhere."""
    if reason := slurm.missing():
        pytest.skip(reason)
    python = Path(os.path.realpath(sys.executable)).parent
    with slurm_cluster(tmp_path / "cluster", share=(session_store, bundle[0].folder)) as cluster:
        lmod.module_tree(cluster.modules, {"python/3.11": {"PATH": str(python)}})
        jobs = Jobs(cluster, {"ENVBUILD_STORE": str(session_store)})
        jobs.write_site(f'[modules]\ninit = "{lmod.INIT}"\nbuild = ["python/3.11"]\n', HOME="/nonexistent")
        line = [jobs.command(), "venv", bundle[0].folder / "recipes/pt_minimal", "--job", "--site", jobs.site]
        shared = cluster.shared
        done = cluster.run(
            [*line, "--bundle", bundle[1], "--prefix", shared / "venv", "--verify", "quick", "--submit", "--json"],
            env=jobs.env,
            timeout_s=120,
        )
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
        end = cluster.wait(int(told["job"]), 240)
        log = (shared / "logs" / f"pt_minimal-build_{told['job']}.out").read_text()
    assert end.state == "COMPLETED", log
    receipt = json.loads((shared / "venv.receipt.json").read_text())
    assert receipt["passed"] and receipt["settings"]["quick"] and receipt["host"]["name"] == "n1"
    assert receipt["artifact"]["path"] == told["path"] == str(shared / "venv")
