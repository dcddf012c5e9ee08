"""Checks of a verification are alive in real launches: break one thing, see exactly its check fail.

What is broken is broken from outside: a `sitecustomize` module on the path of the launched processes changes torch or
the trainer in some or all ranks, or files of the environment are touched. The product knows nothing of it. Breaks whose
checks do not depend on each other share a launch. Reports that are wrong in other ways: tests/unit/test_judgement.py.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import os
import re
import shlex
import shutil
import socket
import textwrap
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from ddp_train.loaded import interfaces
from envbuild.base.packages import record_digest
from envbuild.build import venv
from envbuild.build.commit import open_subject
from envbuild.contract.state import BuiltLayer
from envbuild.contract.verification import ExpectTable, VerifySettings
from envbuild.run_environment import load_environment
from envbuild.site.settings import load_site
from envbuild.verify import launch
from envbuild.verify.host import host_nodes
from envbuild.verify.model import Check, Nodes, Subject
from envbuild.verify.run import verify

from .conftest import Command, link_tree

SETTINGS = VerifySettings(nodes=1, nproc_per_node=2, epochs=4, imports=("json.tool",))
ONE_RANK = dataclasses.replace(SETTINGS, nproc_per_node=1, quick=True)

# In the agents (no RANK) torch is not touched; in ranks and the reference process it is, before use. OTHER is an
# interface of this host besides lo. Each has the checks that fail, the changed settings, and the code.
BREAKS: dict[str, tuple[list[str], dict[str, Any], str]] = {
    # Whether the address of that interface is used depends on which rank calls which: the variable tells in any case.
    "a sum, a version and a snapshot that are wrong, and a rank with another interface": (
        ["versions", "fabric", "allreduce", "snapshot"],
        {"quick": True},
        """
        if rank == "1":
            os.environ["GLOO_SOCKET_IFNAME"] = "OTHER"
            import torch
            all_reduce = torch.distributed.all_reduce
            def inexact(tensor, *args, **kwargs):
                result = all_reduce(tensor, *args, **kwargs)
                if tensor.numel() == 1023:
                    tensor[17] += 1
                return result
            torch.distributed.all_reduce = inexact
        if rank is not None:
            import torch
            torch.__version__ = "1.0.0"
        if rank == "0":
            replace = os.replace
            def cut(source, target, **kwargs):
                replace(source, target, **kwargs)
                if str(target).endswith("train.pt"):
                    os.truncate(target, os.path.getsize(target) // 2)
            os.replace = cut
        """,
    ),
    # Only the connections tell of the interface: the variable is put right again.
    "ranks that meet elsewhere, gradient sync off, a second launch that fails, an operation that is wrong, a module "
    "that one rank cannot import, and a missing restart": (
        ["fabric", "parameters", "relaunch", "operations", "imports", "restart"],
        {"faults": True},
        """
        if rank is None and any("reference-report" in word for word in sys.orig_argv):
            import torch
            attention = torch.nn.functional.scaled_dot_product_attention
            def uncausal(*args, is_causal=False, **kwargs):
                return attention(*args, **kwargs)
            torch.nn.functional.scaled_dot_product_attention = uncausal
        if rank == "1":
            sys.modules["json.tool"] = None
        if rank is not None:
            import torch
            init = torch.distributed.init_process_group
            def astray(*args, **kwargs):
                os.environ["GLOO_SOCKET_IFNAME"] = "OTHER"
                init(*args, **kwargs)
                os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            torch.distributed.init_process_group = astray
            ddp = torch.nn.parallel.DistributedDataParallel
            forward = ddp.forward
            def unsynchronised(self, *args, **kwargs):
                self.require_backward_grad_sync = False
                return forward(self, *args, **kwargs)
            ddp.forward = unsynchronised
        if rank == "0" and any("resume-report" in word for word in sys.orig_argv):
            os._exit(7)
        """,
    ),
    "an optimizer that does not step, a snapshot that forgets an epoch, and no reference": (
        ["optimizer", "resume", "reference"],
        {},
        """
        if rank == "0":
            import torch
            save = torch.save
            def forgetful(value, where, *args, **kwargs):
                if "EPOCHS_RUN" in value:
                    value = {**value, "EPOCHS_RUN": value["EPOCHS_RUN"] - 1}
                return save(value, where, *args, **kwargs)
            torch.save = forgetful
        if rank is not None:
            import torch
            torch.optim.SGD.step = lambda self, closure=None: None
        if rank is None and any("reference-report" in word for word in sys.orig_argv):
            os._exit(7)
        """,
    ),
    "a slow network, and a rank that trains on other samples": (
        ["bandwidth", "curve"],
        {"epochs": 2, "busbw_floor": 1e5},
        """
        if rank == "1":
            import torch.utils.data.distributed as distributed
            import torch
            randperm = torch.randperm
            def other(n, *, generator=None, **kwargs):
                if n == 1024:  # the training's samples, and not the probes'
                    generator = torch.Generator().manual_seed(987)
                return randperm(n, generator=generator, **kwargs)
            torch.randperm = other
        """,
    ),
}
DIES = """
if rank == "1":
    os._exit(7)
"""
# Layers of a subject, and the command that checks each.
LAYERS = {
    "good": ("python", "-c", "print('fine')"),
    "broken": ("python", "-c", "import sys; sys.exit('libown.so: no such file')"),
    "absent": ("own-tool", "--version"),
}


def other_interface() -> tuple[str, str]:
    """An interface of this host besides lo, and its IPv4 address."""
    for name, addresses in interfaces().items():
        for address in addresses:
            if name != "lo" and ":" not in address:
                return name, address
    pytest.skip("this host has no network interface with an IPv4 address besides lo")


def run_checks(subject: Subject, tmp_path: Path, code: str = "", settings: VerifySettings = SETTINGS) -> list[Check]:
    """Verify `subject` with `code` as the launched processes' sitecustomize."""
    folder = tmp_path / "broken"
    folder.mkdir(exist_ok=True)
    head = 'import os, sys\nrank = os.environ.get("RANK")\n'
    (folder / "sitecustomize.py").write_text(head + textwrap.dedent(code))

    def nodes(work: Path, _: int, env: Mapping[str, str]) -> AbstractContextManager[Nodes]:
        variables = venv.launch_environment(subject.root, env)
        return host_nodes(
            work,
            lambda program, arguments: venv.command(subject.root, program, *arguments),
            {**variables, "PYTHONPATH": str(folder)},
        )

    broken = dataclasses.replace(subject, nodes=nodes)
    return list(verify(broken, settings, load_site(os.environ), os.environ, print, logs=tmp_path / "logs").checks)


def failed(checks: list[Check]) -> list[str]:
    return [check.name for check in checks if check.status == "fail"]


@pytest.mark.parametrize("name", BREAKS)
def test_exactly_the_broken_things_fail(
    name: str, subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = launch._agent

    def final(job: launch.TrainingJob, *rest: Any) -> list[str]:
        return agent(dataclasses.replace(job, max_restarts=0), *rest)

    monkeypatch.setattr(launch, "_agent", final)
    wanted, change, code = BREAKS[name]
    interface, address = other_interface()
    settings = dataclasses.replace(SETTINGS, **change)
    checks = run_checks(subject, tmp_path, code.replace("OTHER", interface), settings)
    assert failed(checks) == wanted, [(check.name, check.seen) for check in checks]
    for failure in (check for check in checks if check.status == "fail"):
        assert failure.seen and failure.expected and failure.cause
    by_name = {check.name: check for check in checks}
    fabric = by_name["fabric"].seen
    if "ranks that meet elsewhere" in name:
        assert f"rank 1 talks over {address} ({interface}), not lo" in fabric
        assert "GLOO_SOCKET_IFNAME is" not in fabric
    elif "fabric" in wanted:
        assert f"rank 1: GLOO_SOCKET_IFNAME is {interface}" in fabric
    elif "bandwidth" in wanted:  # the recipe's floor goes over the site's
        assert "the recipe's busbw_floor" in by_name["bandwidth"].expected
    assert (tmp_path / "logs").is_dir()


def test_nodes_that_meet_only_themselves(subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = launch._agent

    def alone(job: launch.TrainingJob, node: int, endpoint: str, run_id: str, address: str) -> list[str]:
        with socket.create_server((address, 0)) as probe:
            own = f"{address}:{probe.getsockname()[1]}"
        return agent(dataclasses.replace(job, nodes=1), 0, own, f"{run_id}-{node}", address)

    monkeypatch.setattr(launch, "_agent", alone)
    settings = dataclasses.replace(SETTINGS, nodes=2, nproc_per_node=1, quick=True)
    assert failed(run_checks(subject, tmp_path, settings=settings)) == ["world"]


def test_commands_of_layers_and_a_rank_that_dies_at_start(subject: Subject, tmp_path: Path) -> None:
    layers = tuple(BuiltLayer(layer, "1.0", "", check=check) for layer, check in LAYERS.items())
    changed = dataclasses.replace(subject, state=dataclasses.replace(subject.state, layers=layers))
    checks = run_checks(changed, tmp_path, DIES, dataclasses.replace(SETTINGS, quick=True))
    assert failed(checks) == ["layer:broken", "layer:absent", "launch"]
    by_name = {check.name: check for check in checks}
    assert by_name["layer:good"].seen == "good 1.0: exit 0"
    assert "exit 1\n    libown.so: no such file" in by_name["layer:broken"].seen
    assert "own-tool" in by_name["layer:absent"].seen
    assert all(check.expected and check.cause for check in checks if check.status == "fail")
    assert (tmp_path / "logs").is_dir()


RISES = "import os\nfor i in 1, 2, 3: print('loss:', i)\nopen('out.txt', 'w').write(os.environ['WORLD_SIZE'])"


@pytest.mark.parametrize(
    ("change", "wanted", "seen"),
    [
        (
            {
                "command": "",
                "script": "../own.py '$x y'",
                "script_text": f"import sys\nassert sys.argv[1:] == ['$x y']\n{RISES}",
            },
            [],
            "",
        ),
        (
            {"expect": ExpectTable(metric="loss: (.+)", trend="falls", file="gone.txt")},
            ["command"],
            "the metric does not fall: 1 -> 3; gone.txt is missing or empty",
        ),
    ],
    ids=["script", "metric and file"],
)
def test_the_recipes_own_code_is_judged(
    change: dict[str, Any], wanted: list[str], seen: str, subject: Subject, tmp_path: Path
) -> None:
    """Exit codes: tests/unit/test_user_code.py, and those of a script in test_project.py."""
    expect = ExpectTable(metric="loss: ([0-9]+)", trend="rises", last=">= 3", file="out.txt")
    own = VerifySettings(
        nodes=1, trainer=False, direct=("numpy",), command=shlex.join(["python", "-c", RISES]), expect=expect
    )
    checks = run_checks(subject, tmp_path, settings=dataclasses.replace(own, **change))
    assert failed(checks) == wanted, [(check.name, check.seen) for check in checks]
    assert all(seen in check.seen for check in checks if check.status == "fail")
    assert not wanted or (tmp_path / "logs").is_dir()


def replace_trainer(venv: Path, packages: Path) -> None:
    """Put another trainer into a venv, as consistently as its builder would: in RECORD and in envbuild.json.

    It fails at once, so a verification that ran it would see no launch finish.
    """
    content = b"raise SystemExit(7)\n"
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    record = next(packages.glob("ddp_train-*.dist-info")) / "RECORD"
    row = f"ddp_train/__main__.py,sha256={digest},{len(content)}"
    text = re.sub(r"^ddp_train/__main__\.py,.*$", row, record.read_text(), flags=re.MULTILINE)
    state = json.loads((venv / "envbuild.json").read_text())
    next(one for one in state["packages"] if one[0] == "ddp-train")[2] = record_digest(text.encode())
    files = {packages / "ddp_train/__main__.py": content, record: text.encode()}
    for file, data in {**files, venv / "envbuild.json": json.dumps(state).encode()}.items():
        file.unlink()  # a hard link
        file.write_bytes(data)


def test_packages_that_are_not_the_locked_ones(pt_cpu: dict[str, Any], tmp_path: Path) -> None:
    packages = link_tree(pt_cpu["path"], tmp_path / "v") / "lib/python3.11/site-packages"
    # Edited, not in place: the file is a hardlink.
    file = packages / "sympy" / "abc.py"
    text = file.read_bytes() + b"\n"
    file.unlink()
    file.write_bytes(text)
    old = next(packages.glob("tqdm-*.dist-info"))
    shutil.move(old, old.with_name("tqdm-0.0.1.dist-info"))
    (packages / "startup.pth").write_text("import os")
    replace_trainer(tmp_path / "v", packages)
    checks = run_checks(open_subject(tmp_path / "v", load_environment()), tmp_path, settings=ONE_RANK)
    assert failed(checks) == ["installed", "trainer"]
    seen = "\n".join(check.seen for check in checks if check.status == "fail")
    for word in ("site-packages/sympy/abc.py", "tqdm: locked", "installed 0.0.1", "site-packages/startup.pth"):
        assert word in seen, word


def test_a_library_of_another_architecture(envbuild: Command, tmp_path: Path) -> None:
    """A wheel tagged for any platform that carries an aarch64 (or x86_64) library: locked, yet wrong."""
    from lab.wheels import make_recipe, make_wheel

    from envbuild.recipe.targets import host_arch

    here = host_arch()
    machine = {"x86_64": 183, "aarch64": 62}[here]
    library = b"\x7fELF\x02\x01" + b"\0" * 12 + machine.to_bytes(2, "little") + b"\0" * 44
    make_wheel(tmp_path / "wheels", "foreign-lib", files={"foreign_lib/native.so": library})
    make_recipe(tmp_path / "recipes", "foreign", ["foreign-lib"], extra="[verify]\ntrainer = false\n")
    done = envbuild("venv", "foreign", "--out", "v", PIP_FIND_LINKS=str(tmp_path / "wheels"), PIP_NO_INDEX="1")
    assert done.returncode == 5, done.stderr
    assert " checks failed\n  architecture" in done.stderr and "native.so is" in done.stderr
    assert not (tmp_path / "v").exists() and (tmp_path / "v.failed/bin/python").exists()
    assert (tmp_path / "v.failed.receipt.json").exists()
