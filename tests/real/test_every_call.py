"""A change of the file system fails, or the process is killed there: the old or the new artifact, and no litter.

A sample of all calls; `python -m lab.fault_walk` walks all of them, docs/reliability.md has its figures.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from lab import fault_cases
from lab.fault_cases import CASES, Lab, Walk
from lab.faults import FAULTS

# Each command is killed early, sees one of these errors, and most see a disk that is full from then on.
ERRORS = [fault for fault in FAULTS if fault not in ("kill", "full")]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    if reason := fault_cases.missing():
        pytest.skip(reason)
    with fault_cases.lab(tmp_path_factory.mktemp("faults")) as lab:
        yield lab


def assert_kept(walk: Walk, fault: str, number: int, only: str = "") -> str:
    """Assert every promise for one failing call; returns what the command said."""
    outcome = walk.try_at(fault, number, only)
    ran = outcome.ran
    assert outcome.wrong == [], f"{fault} at call {number}, {ran.call} {ran.path}:\n" + "\n".join(outcome.wrong)
    return ran.said


# Calls that broke a promise once: the case, the pattern of paths, and what the message says.
ONCE = {
    "lock": [("kill", "/recipes/small/*", 2, ""), ("full", "/tmp/*/uv.toml", 2, "/lock-")],
    "lock-conda": [
        ("EIO", "*/shards-v1", 2, "Input/output error"),
        ("EINTR", "/tmp/envbuild-run-*/*", 1, ""),
        ("kill", "/store/conda/repodata/*", 2, "killed by SIGKILL"),
    ],
    "venv": [
        ("full", "/store/uv/.tmp*/get_interpreter_info.py", 1, "left on device (os error 28)"),
        ("kill", "/store/uv/*", 1, "killed by SIGKILL"),
        ("EIO", "*/alpha-2.0.dist-info/RECORD", 1, "out/v: uv "),
        ("EIO", "*/gamma-1.0.dist-info/RECORD", 5, "not listed"),  # uv ignores it
    ],
    "conda": [
        ("EIO", "/out/.c.envbuild-*/.tmp*", 1, ""),  # uv's .lock was a part of the environment, or not
        ("EIO", "/out/.c.envbuild-*/symtest_*", 2, ""),  # rattler's probe stayed
        ("kill", "*/conda-meta/*", 1, "killed by SIGKILL"),
    ],
    "oci": [("kill", "/store/layers/.new-*", 3, ""), ("kill", "/store/layers/*.lock", 2, "")],
    "enroot": [("full", "/out/.i.sqsh.envbuild-*/*", 6, "cannot write ")],
    # A Lustre client that was evicted: exit code 0, and no artifact.
    "pull-sqsh": [("ESHUTDOWN", "/out/.w.sqsh.envbuild-*/w.sqsh", 2, "w.sqsh: Cannot send after")],
    "report": [("ESHUTDOWN", "/out/.r.html.envbuild-*", 2, "out/r.html: Cannot send after")],
    "push-sqsh": [("full", "/store/opened/*/config", 1, "cannot write ")],
    "init": [("EUCLEAN", "/recipes/.fresh.envbuild-*/recipe.toml", 2, "cannot write ")],
    "attest-sif": [("kill", "/out/.i.sif.envbuild-*", 3, "")],  # a second image stayed
}


@pytest.mark.parametrize("name", CASES)
def test_a_failed_call_leaves_the_old_or_the_new_artifact_and_the_next_run_succeeds(here: Lab, name: str) -> None:
    walk = here.walk(CASES[name])
    assert walk.calls > 5
    chosen = random.Random(name)
    once = {fault for fault, *_ in ONCE.get(name, [])}  # below, each of them is tried at a call that counts more
    faults = ["kill"] if once & {*ERRORS} else ["kill", ERRORS[list(CASES).index(name) % len(ERRORS)]]
    if not CASES[name].before:  # those take longer to prepare
        faults.append("full")
    for place, fault in enumerate(faults):
        if fault not in once:
            assert_kept(walk, fault, 1 + int(walk.calls * (place + chosen.random()) / len(faults)))
    for fault, only, number, said in ONCE.get(name, []):
        assert said in assert_kept(walk, fault, number, only)
