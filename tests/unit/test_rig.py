"""The files of the test rig, whose digest says whether its tests have to run: tests/rig.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import rig


def test_the_rig_is_its_tests_and_what_they_use() -> None:
    names = {path.relative_to(rig.TESTS).as_posix() for path in rig.rig_files()}
    # Imported by a test, by a module of tests/lab, by a process that a test starts; a script that a module names.
    used = {"lab/conda_server.py", "lab/slurm_files.py", "lab/dockerd.py", "lab/slurm_node.sh"}
    assert used < names and "real/test_lab_dockerd.py" in names
    assert not names & {"lab/hub.py", "lab/terminal.py", "real/test_docker.py"}


@pytest.mark.parametrize(
    ("name", "changes"), [("lab/slurm_node.sh", True), ("real/test_lab_conda.py", True), ("lab/hub.py", False)]
)
def test_the_digest_changes_with_a_file_of_the_rig_alone(
    name: str, changes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("lab", "real"):
        (tmp_path / folder).mkdir()
        for path in [path for path in (rig.TESTS / folder).iterdir() if path.suffix in (".py", ".sh", ".c")]:
            (tmp_path / folder / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(rig, "TESTS", tmp_path)
    before = rig.rig_digest()
    with (tmp_path / name).open("a") as stream:
        stream.write("# changed\n")
    assert (rig.rig_digest() != before) == changes
