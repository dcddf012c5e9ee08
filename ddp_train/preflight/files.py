"""Comparison of the files of this node's environment with its manifest, envbuild.manifest.

The manifest is a line of JSON for each file, [path, mode, size, sha256], and for each link, [path, target], of
envbuild/contract/manifest.py. It does not list the bytecode that Python writes later. Python may rewrite listed
bytecode, for example after a change of the source's time: it is then compared with its source.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import compress
from operator import not_
from pathlib import Path
from typing import NamedTuple

from . import bytecode

MANIFEST = "envbuild.manifest"
# A network file system answers many questions at once as fast as one.
_THREADS = 16
_SHOWN = 5
_BLOCK = 1 << 20
_BYTECODE = re.compile(r"(.*/)__pycache__/([^/]+?)\.[^./]+(?:\.opt-[^./]+)?\.pyc", re.DOTALL)


class FileCheck(NamedTuple):
    """A comparison of files with the manifest that has this sha256; `exact` reads their contents.

    The comparison stops after `limit_s` seconds.
    """

    manifest: str
    exact: bool
    limit_s: float


def changed_files(root: Path, expected: FileCheck) -> str:
    """Return a list of the files at `root` that differ from the manifest, as text; "" if there are none."""
    try:
        data = (root / MANIFEST).read_bytes()
    except OSError:
        data = b""
    if f"sha256:{hashlib.sha256(data).hexdigest()}" != expected.manifest:
        return MANIFEST
    rows = {str(path): rest for path, *rest in map(json.loads, data.splitlines())}
    with ThreadPoolExecutor(_THREADS) as pool:
        present = _walk(root, pool)
        changed = [path for path in rows if path not in present or not _like(root, path, present[path], rows[path])]
        changed += [path for path in present.keys() - rows.keys() if not _later(path)]
        if expected.exact:
            files = [path for path in rows.keys() - set(changed) if len(rows[path]) > 1]
            same = pool.map(lambda path: _sha256(os.path.join(root, path)) == rows[path][2], files)
            changed += compress(files, map(not_, same))
    regular = {path for path in changed if path in rows and path in present and stat.S_ISREG(present[path].st_mode)}
    again = sorted(path for path in regular if _BYTECODE.fullmatch(path))
    if again:
        changed = sorted(set(changed).difference(again).union(_other_code(root, again, expected.limit_s)))
    more = f" and {len(changed) - _SHOWN} more files" if len(changed) > _SHOWN else ""
    return ", ".join(sorted(changed)[:_SHOWN]) + more


def _walk(root: Path, pool: ThreadPoolExecutor) -> dict[str, os.stat_result]:
    """Return the stat of each file and link below `root`, by path. Unreadable folders count as empty."""

    def read(folder: str) -> tuple[list[str], dict[str, os.stat_result]]:
        folders: list[str] = []
        stats: dict[str, os.stat_result] = {}
        with suppress(OSError), os.scandir(os.path.join(root, folder)) as entries:
            for entry in entries:
                path = os.path.join(folder, entry.name)
                if entry.is_dir(follow_symlinks=False):
                    folders.append(path)
                else:
                    stats[path] = entry.stat(follow_symlinks=False)
        return folders, stats

    all_stats: dict[str, os.stat_result] = {}
    folders = [""]
    while folders:
        below: list[str] = []
        for deeper, here in pool.map(read, folders):
            below += deeper
            all_stats.update(here)
        folders = below
    return all_stats


def _like(root: Path, path: str, info: os.stat_result, row: list[object]) -> bool:
    if len(row) == 1:
        return stat.S_ISLNK(info.st_mode) and os.readlink(os.path.join(root, path)) == row[0]
    return stat.S_ISREG(info.st_mode) and [stat.S_IMODE(info.st_mode), info.st_size] == row[:2]


def _later(path: str) -> bool:
    """Return whether Python or users write the file at `path` into a finished environment."""
    return "/__pycache__/" in path or path in (MANIFEST, "conda-meta/state")


def _other_code(root: Path, paths: list[str], limit_s: float) -> list[str]:
    """Return those of the bytecode files `paths` that are not the compiled form of their source."""
    asked = {os.path.join(root, path): path for path in paths}
    sources = {pyc: os.path.join(root, _BYTECODE.sub(r"\1\2.py", path)) for pyc, path in asked.items()}
    pairs = [(pyc, source) for pyc, source in sources.items() if os.path.isfile(source)]  # without one never loaded
    # Nothing in the environment's own __pycache__ is run.
    options = ["-I", "-S", "-B", "-X", f"pycache_prefix={os.path.join(root, MANIFEST)}"]
    command = [sys.executable, *options, bytecode.__file__, "/dev/stdin"]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(pairs).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=True,
            timeout=limit_s,
        )
        return [asked[json.loads(line)] for line in done.stdout.splitlines()]
    except (OSError, ValueError, LookupError, subprocess.SubprocessError):
        return paths


def _sha256(path: str) -> str:
    digest = hashlib.sha256()
    try:
        with open(path, "rb", buffering=0) as stream:
            while block := stream.read(_BLOCK):
                digest.update(block)
    except OSError:
        return ""
    return digest.hexdigest()
