"""Settings for the unit tests."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from envbuild.base import process


def _popen(command: list[str], *, preexec_fn: object, **options: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, **options)


@pytest.fixture(scope="session", autouse=True)
def _children_without_a_fork() -> Iterator[None]:
    """Start the tools that envbuild runs in this process by vfork, without a function that Python calls in the child.

    A fork copies the page tables of a worker, which has some hundred MB: 35 ms of CPU time for each tool. Commands in
    processes of their own, as most tests of killed ones are, start their tools as users' do.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": _popen}))
        yield
