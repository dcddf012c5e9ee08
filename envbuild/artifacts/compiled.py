"""Bytecode that Python writes beside modules: whether it is the compiled form of its source.

Python looks for it in `__pycache__` (PEP 3147, PEP 488) and loads it by its header (PEP 552), whatever code follows.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

from envbuild.base import process
from envbuild.base.files import shipped
from envbuild.base.workers import each

_SHARE = 400
_BYTECODE = re.compile(r"(?P<folder>.*/)__pycache__/(?P<name>[^/]+?)\.(?P<tag>[^./]+)(?:\.opt-[^./]+)?\.pyc", re.DOTALL)


def is_bytecode(path: str) -> bool:
    """Return whether `path` is a file that Python writes when it imports a module."""
    return _BYTECODE.fullmatch(path) is not None


def source_of(path: str) -> str:
    """Return the source of the bytecode at `path`, "" for another file."""
    match = _BYTECODE.fullmatch(path)
    return f"{match['folder']}{match['name']}.py" if match else ""


def other_code(root: Path, paths: Sequence[str], interpreter: str, workers: int) -> list[str]:
    """Return those of the bytecode files `paths` that are not the compiled form of their source."""

    def compare(share: Sequence[str], _: object) -> list[str]:
        asked = [(os.path.join(root, path), os.path.join(root, source_of(path))) for path in share]
        pairs = [pair for pair in asked if os.path.isfile(pair[1])]  # without a source never loaded
        with os.fdopen(os.memfd_create("bytecode"), "w", encoding="ascii") as stream:  # a killed run leaves no file
            json.dump(pairs, stream)
            stream.flush()
            job = f"/proc/{os.getpid()}/fd/{stream.fileno()}"
            # Nothing in the environment's own __pycache__ is run.
            options = ["-I", "-S", "-B", "-X", f"pycache_prefix={os.devnull}/none"]
            program = shipped("ddp_train") / "preflight/bytecode.py"
            done = process.run([interpreter, *options, program, job], check=False)
        if done.returncode != 0:  # marshal may crash on what is no bytecode
            return list(share) if len(share) == 1 else [path for one in share for path in compare([one], None)]
        return [os.path.relpath(json.loads(line), root) for line in done.stdout.splitlines()]

    shares = [paths[start : start + _SHARE] for start in range(0, len(paths), _SHARE)]
    return [path for some in each(shares, compare, workers) for path in some]
