"""The manifest of an environment in a folder: every file with its mode, size and sha256, every link with its target.

It is written into the environment as `envbuild.manifest` when the environment is built, and the receipt names its
sha256. Each line is a JSON array, [path, mode, size, sha256] of a file or [path, target] of a link, sorted by path.

The manifest does not list bytecode that Python writes later: `check` compares it with its source. Other files in
`__pycache__` are caches of packages and not judged.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from envbuild.base import process
from envbuild.base.atomic import write_atomically
from envbuild.base.errors import BuildError
from envbuild.base.files import MISSING, parse_json, read_regular, shipped, walk_stats
from envbuild.base.packages import digest_of
from envbuild.base.progress import log
from envbuild.base.workers import each
from envbuild.contract.installed import FileReport, file_digest
from envbuild.contract.state import State

FILE = "envbuild.manifest"
# Variables that the user sets for the environment (`conda env config vars set`).
_USERS = frozenset({FILE, "conda-meta/state"})
_SHARE, _SHOWN, _MANY = 400, 5, 400
# Python looks for bytecode in `__pycache__` (PEP 3147, PEP 488) and loads it by its header (PEP 552), whatever follows.
_BYTECODE = re.compile(r"(?P<folder>.*/)__pycache__/(?P<name>[^/]+?)\.(?P<tag>[^./]+)(?:\.opt-[^./]+)?\.pyc", re.DOTALL)
# (mode, size, mtime_ns, ctime_ns, inode)
Stat = tuple[int, int, int, int, int]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Listed:
    """A file with its permissions, size in bytes and sha256, or a link with its `target`."""

    mode: int = 0
    size: int = 0
    sha256: str = ""
    target: str = ""


class SealStore(Protocol):
    """The store; its folder `seals` holds the results of comparisons."""

    @property
    def root(self) -> Path: ...

    def folder(self, *parts: str) -> Path:
        """Return a folder of the store; create it if missing. Raises BuildError when it cannot be created."""


_NO_FILE = Listed(mode=-1)
# Errors of a file that is another one than it was: not there, no regular file, or without the right to read it.
_OTHER_FILE = (
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ELOOP,
    errno.EINVAL,
    errno.ENXIO,
    errno.EACCES,
    errno.EPERM,
)


@dataclass(frozen=True, slots=True)
class Manifest:
    """The rows by path, and the sha256 of the manifest's text."""

    rows: Mapping[str, Listed]
    digest: str


def write_manifest(root: Path, workers: int, read: Mapping[Stat, str] = {}) -> tuple[Manifest, dict[str, Stat]]:
    """Read every file below `root` in `workers` threads and write the manifest there; return it and each file's stat.

    `read` has the sha256 of linked files that were read before, by stat. Raises BuildError for a file that cannot be
    read, and for a path that is no file, link or folder; OSError.
    """
    manifest, text, stats = list_tree(root, workers, read)
    (root / FILE).write_text(text, encoding="ascii")
    return manifest, stats


def list_tree(
    root: Path, workers: int, read: Mapping[Stat, str] = {}, without: str = ""
) -> tuple[Manifest, str, dict[str, Stat]]:
    """Return the manifest of `root` without the file `without`, its text, and the files' stat; see `write_manifest`."""
    stats, lines = scan(root), list[str]()
    stats.pop(without, None)
    rows = dict(zip(stats, _rows(root, list(stats.items()), workers, read), strict=True))
    if wrong := next((path for path, row in rows.items() if row == _NO_FILE), ""):
        raise BuildError(f"{root / wrong} is neither a file nor a link nor a folder, or cannot be read")
    for path, row in sorted(rows.items()):
        lines.append(json.dumps([path, row.target] if row.target else [path, row.mode, row.size, row.sha256]) + "\n")
    text = "".join(lines)
    return Manifest(rows, digest_of(text.encode())), text, stats


def read_manifest(root: Path) -> Manifest | None:
    """Return the manifest of the environment at `root`, None without one.

    Raises BuildError for a damaged manifest, OSError for one that cannot be read.
    """
    try:
        data = read_regular(root / FILE)
    except MISSING:
        return None
    try:
        rows = {str(path): _row(rest) for path, *rest in map(json.loads, data.splitlines())}
    except (ValueError, TypeError, RecursionError) as error:
        raise BuildError(f"{root / FILE}: invalid: {error}", "build the environment again") from error
    return Manifest(rows, digest_of(data))


def _row(fields: Sequence[object]) -> Listed:
    if len(fields) == 1 and isinstance(fields[0], str):
        return Listed(target=fields[0])
    mode, size, sha256 = fields
    if type(mode) is not int or type(size) is not int or not isinstance(sha256, str):
        raise ValueError("a row of another form")
    return Listed(mode, size, sha256)


def scan(root: Path) -> dict[str, Stat]:
    """Return the stat of every path below `root` except folders, by path; follow no links. Raises OSError."""
    stats = {path: stat_of(info) for path, info in walk_stats(root)}
    return {path: stats[path] for path in sorted(stats.keys() - _USERS)}


def stat_of(info: os.stat_result) -> Stat:
    """Return the fields of a file's stat that change with its content."""
    return info.st_mode, info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino


def check(
    root: Path,
    manifest: Manifest,
    stats: Mapping[str, Stat],
    known: Mapping[str, Stat],
    interpreter: str,
    workers: int,
    store: SealStore | None,
    timeout_s: float = math.inf,
    heads: dict[str, bytes] | None = None,
) -> tuple[FileReport, dict[str, Stat]]:
    """Compare the files `stats` at `root` with its `manifest`; also return the stat of the unchanged files.

    Files whose stat is in `known` are not read again. `interpreter` compiles sources to compare bytecode that neither
    the manifest nor `store` (if given) knows; with "", such bytecode is not judged. `heads` gets the first bytes of the
    files that are read, by their paths. Raises OSError, and TimeoutError when reading takes longer than `timeout_s`.
    """
    report = FileReport()
    report.files, report.bytes = len(stats), sum(info[1] for info in stats.values())
    report.missing = sorted(manifest.rows.keys() - stats.keys())
    changed = [(path, info) for path, info in stats.items() if known.get(path) != info]
    listed = [(path, info) for path, info in changed if path in manifest.rows]
    rows_now = _rows(root, listed, workers, timeout_s=timeout_s, heads=heads)
    now = dict(zip((path for path, _ in listed), rows_now, strict=True))
    others = {path for path, _ in changed} - now.keys()
    differing = {path for path, row in now.items() if row != manifest.rows[path]}
    bytecode = {path for path in others | differing if source_of(path)}
    report.altered = sorted(differing - bytecode)
    report.unowned = sorted(path for path in others - bytecode if "/__pycache__/" not in path)
    if interpreter and not (report.missing or report.altered or report.unowned):
        rows = dict(zip(sorted(bytecode), _rows(root, [(p, stats[p]) for p in sorted(bytecode)], workers), strict=True))
        compiled = _compiled(manifest, store) if store else {}
        # Python writes regular files alone: what a link leads to may change later, and a pipe may never be read.
        strange = [path for path, row in rows.items() if not row.sha256]
        new = [path for path, row in rows.items() if row.sha256 and row.sha256 not in compiled.get(path, ())]
        if len(new) > _MANY:
            log(f"{root}: comparing the bytecode of {len(new)} modules with their sources, once …")
        report.altered = sorted([*strange, *other_code(root, new, interpreter, workers)])
        bytecode = set()
    good = stats.keys() - bytecode.union(report.altered, report.unowned)
    return report, {path: stats[path] for path in sorted(good)}


def _rows(
    root: Path,
    files: Sequence[tuple[str, Stat]],
    workers: int,
    known: Mapping[Stat, str] = {},
    timeout_s: float = math.inf,
    heads: dict[str, bytes] | None = None,
) -> Iterator[Listed]:
    def read(share: Sequence[tuple[str, Stat]], _: object) -> list[Listed]:
        return [_read(os.path.join(root, path), info, known.get(info, ""), heads) for path, info in share]

    return (row for rows in each(_shares(files), read, workers, timeout_s=timeout_s) for row in rows)


def _shares(items: Sequence[T]) -> list[Sequence[T]]:
    return [items[start : start + _SHARE] for start in range(0, len(items), _SHARE)]


def _read(path: str, info: Stat, sha256: str = "", heads: dict[str, bytes] | None = None) -> Listed:
    try:
        if stat.S_ISLNK(info[0]):
            return Listed(target=os.readlink(path))
        return Listed(stat.S_IMODE(info[0]), info[1], sha256 or file_digest(path, heads=heads).hex())
    except OSError as error:
        if error.errno not in _OTHER_FILE:
            raise  # of the disk: nothing is known of the file
        return _NO_FILE


def sealed(root: Path, manifest: Manifest, store: SealStore) -> dict[str, Stat] | None:
    """Return the stat of the files that matched `manifest` when they were last compared, None if they never were."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        data = parse_json(_note(root, store).read_bytes())
        if data["manifest"] == manifest.digest:
            return {path: tuple(info) for path, info in data["compared"].items()}
    return None


def seal(root: Path, manifest: Manifest, files: Mapping[str, Stat], store: SealStore) -> None:
    """Record in the store that `files`, by path and stat, were compared with `manifest`, if the store can be written.

    The bytecode among them is recorded by its content too, for copies of the environment. The stat of `files` must be
    older than their comparison: a file that changed since then has another stat.
    """
    with suppress(OSError, BuildError):
        store.folder("seals")
        write_atomically(_note(root, store), json.dumps({"manifest": manifest.digest, "compared": files}))
        compiled = _compiled(manifest, store)
        paths = [path for path in files if path not in manifest.rows and is_bytecode(path)]
        read = {path: _read(os.path.join(root, path), files[path]).sha256 for path in paths}
        # What was read is what was compared if its stat is still the same.
        same = {path for path in paths if stat_of(os.lstat(root / path)) == files[path]}
        added = {path: sha256 for path, sha256 in read.items() if path in same}
        if any(sha256 not in compiled.get(path, ()) for path, sha256 in added.items()):
            all_known = {
                **compiled,
                **{path: sorted({*compiled.get(path, ()), sha256}) for path, sha256 in added.items()},
            }
            write_atomically(_known_code(manifest, store), json.dumps(all_known))


def _compiled(manifest: Manifest, store: SealStore) -> dict[str, list[str]]:
    """Return the recorded sha256 of bytecode in environments of `manifest`, by path."""
    with suppress(OSError, ValueError):
        rows = parse_json(_known_code(manifest, store).read_bytes())
        return rows if isinstance(rows, dict) else {}
    return {}


def _known_code(manifest: Manifest, store: SealStore) -> Path:
    return store.root / "seals" / f"{manifest.digest.partition(':')[2]}.compiled.json"


def move_seal(root: Path, final: Path, store: SealStore) -> None:
    """Move the seal of an environment that was moved from `root` to `final`."""
    with suppress(OSError):
        _note(root, store).replace(_note(final, store))


def changes(
    root: Path, state: State, expected: str, store: SealStore, workers: int, *, exact: bool = False
) -> list[str]:
    """Return the files of the environment at `root` that differ from its manifest, [] without a manifest.

    `expected` is the manifest's sha256 in the receipt, "" if it names none. Files are read only if their stat changed
    since they were last compared; with `exact`, all files are read. Raises BuildError for a damaged manifest, OSError.
    """
    manifest = read_manifest(root)
    if manifest is None or expected not in ("", manifest.digest):
        return [FILE] if expected else []
    known, stats = None if exact else sealed(root, manifest, store), scan(root)
    if stats == known:
        return []
    if known is None:
        log(f"{root}: reading every file, to compare it with the manifest …")
    interpreter = state.interpreter if os.access(state.interpreter, os.X_OK) else ""
    report, good = check(root, manifest, stats, known or {}, interpreter, workers, None if exact else store)
    wrong = [*report.missing, *report.altered, *report.unowned]
    if not wrong:
        seal(root, manifest, good, store)
    return wrong


def is_bytecode(path: str) -> bool:
    """Return whether `path` is a file that Python writes when it imports a module."""
    return _BYTECODE.fullmatch(path) is not None


def source_of(path: str) -> str:
    """Return the source of the bytecode at `path`, "" for another file."""
    match = _BYTECODE.fullmatch(path)
    return f"{match['folder']}{match['name']}.py" if match else ""


def other_code(root: Path, paths: Sequence[str], interpreter: str, workers: int) -> list[str]:
    """Return the bytecode files among `paths` that are not the compiled form of their source."""

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
            return (
                list(share) if len(share) == 1 else [path for path_name in share for path in compare([path_name], None)]
            )
        return [os.path.relpath(json.loads(line), root) for line in done.stdout.splitlines()]

    return [path for some in each(_shares(paths), compare, workers) for path in some]


def shown(changed: Sequence[str]) -> str:
    """Return the first of the `changed` files and their number, for a message."""
    more = f" and {len(changed) - _SHOWN} more files" if len(changed) > _SHOWN else ""
    return ", ".join(changed[:_SHOWN]) + more


def _note(root: Path, store: SealStore) -> Path:
    return store.root / "seals" / f"{hashlib.sha256(os.fsencode(os.path.realpath(root))).hexdigest()}.json"
