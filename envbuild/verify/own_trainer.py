"""envbuild's own trainer, which every verification runs, and the check that the artifact has the same one."""

from __future__ import annotations

from pathlib import PurePath

from envbuild.artifacts.survey import Survey
from envbuild.base.packages import record_digest
from envbuild.layers.trainer import NAME, load_trainer
from envbuild.verify.launch import TRAINER
from envbuild.verify.model import Check, Subject, judge, not_tried

# The folder goes first even if the environment sets PYTHONSAFEPATH.
_START = b"""import os, runpy, sys
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
runpy.run_module("ddp_train", run_name="__main__", alter_sys=True)
"""


def trainer_files() -> dict[str, bytes]:
    """Return envbuild's own trainer and the script that starts it, by their paths in a node's work folder."""
    folder = PurePath(TRAINER).parent
    return {TRAINER: _START, **{str(folder / name): content for name, content in load_trainer().files}}


def check_trainer(subject: Subject, survey: Survey) -> Check:
    """Check that the artifact's trainer is envbuild's; not tried for the trainer of another version of envbuild.

    This check compares the artifact's RECORD, `installed` compares the files with it.
    """
    own, found = load_trainer(), survey.distributions.get(NAME)
    if found and found.version != own.version:
        return not_tried("trainer", f"the artifact has {NAME} {found.version}, not {own.version}, which trained here")
    evidence = {"record": found.record if found else "", "expected": record_digest(own.entries()[-1][1])}
    same = evidence["record"] == evidence["expected"]
    seen, expected = f"{NAME} {'is' if same else 'differs from'} envbuild's", f"{NAME} {own.version} of envbuild"
    return judge("trainer", same, seen=seen, expected=expected, evidence=evidence)
