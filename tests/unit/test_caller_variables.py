"""The caller's variables that programs of an artifact get: none of them decides what is imported, run or judged."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from ddp_train.launch.__main__ import PYTHON_KEPT
from envbuild.base.process import of_caller
from envbuild.build import conda, venv
from envbuild.contract.state import State
from envbuild.contract.verification import VerifySettings
from envbuild.data import load_table
from envbuild.exec_image import inherited
from envbuild.recipe.targets import Target
from envbuild.site.settings import load_site
from envbuild.verify import run
from envbuild.verify.model import Subject

# Each decides which files Python imports, runs code, or ends it.
DECIDES = {
    "PYTHONPATH": "/x",
    "PYTHONHOME": "/x",
    "PYTHONPYCACHEPREFIX": "/x",
    "PYTHONINSPECT": "1",
    "PYTHONSTARTUP": "/x",
    "PYTHONBREAKPOINT": "os.abort",
    "PYTHONUSERBASE": "/x",
    "PYTHONPLATLIBDIR": "x",
    "PYTHONEXECUTABLE": "/x",
    "PYTHONOPTIMIZE": "2",
    "PYTHONMALLOC": "x",
    "PYTHON_OF_THE_FUTURE": "1",
    "__PYVENV_LAUNCHER__": "/x",
}
OTHERS = {"HOME": "/h", "LD_LIBRARY_PATH": "/l", "NCCL_DEBUG": "INFO", "PYENV_VERSION": "3"}
KEPT = dict.fromkeys(load_table("caller")["python"]["kept"], "1")
# What made honest verifications fail, or could: settings of torch, gloo and the libraries for threads.
SETTINGS = {
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    "GLOO_DEVICE_TRANSPORT": "TCP_TLS",
    "TP_SOCKET_IFNAME": "nonexist0",
    "KMP_AFFINITY": "x",
    "OMP_NUM_THREADS": "64",
    "TORCHINDUCTOR_MAX_AUTOTUNE": "1",
    "DDP_TRAIN_PROBES": "/x",
}


@pytest.mark.parametrize("kind", [venv, conda])
def test_programs_of_environments_get_the_settings_of_python_that_decide_nothing(tmp_path: Path, kind: object) -> None:
    made = kind.launch_environment(tmp_path, DECIDES | OTHERS | KEPT)  # type: ignore[attr-defined]
    assert not DECIDES.keys() & made.keys()
    assert (OTHERS | KEPT).items() <= made.items()


def test_so_do_programs_in_images_and_jobs() -> None:
    assert inherited(DECIDES | KEPT) == KEPT
    assert set(PYTHON_KEPT) == KEPT.keys(), "ddp_train, which nodes run, cannot read envbuild's table"


def test_a_verification_gets_none_and_no_settings_of_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert of_caller(DECIDES | OTHERS | KEPT | SETTINGS | {"TORCH_HOME": "/t"}, verifying=True) == {
        **OTHERS,
        "TORCH_HOME": "/t",
    }
    seen: list[Mapping[str, str]] = []

    class Opened(Exception):
        pass

    def nodes(_work: Path, _count: int, env: Mapping[str, str]) -> object:
        seen.append(env)
        raise Opened

    state = State("venv", "r", "", "", "", "cpu-x86_64", "3.11", "3.11.0", sys.executable, ())
    target = Target.parse(state.target)
    subject = Subject(tmp_path, state, target, "", "host", survey=None, nodes=nodes)  # type: ignore[arg-type]
    given = {"TMPDIR": str(tmp_path)}
    with pytest.raises(Opened):
        run.verify(subject, VerifySettings(), load_site({}), given | DECIDES | SETTINGS, print)
    assert seen == [given]


def test_python_knows_no_setting_that_the_table_forgets(tmp_path: Path) -> None:
    """The interpreter's own list: each is dropped, or one of those that are kept."""
    said = subprocess.run([sys.executable, "--help-env"], capture_output=True, text=True, env={"PATH": os.defpath})
    names = {line.split()[0].rstrip(":") for line in said.stdout.splitlines() if line.startswith("PYTHON")}
    assert len(names) > 15 and of_caller(dict.fromkeys(names, "1")).keys() == names & KEPT.keys()
