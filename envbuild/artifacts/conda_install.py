"""Installation of conda packages into a prefix by rattler, with records that conda, mamba and pixi read."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envbuild import atomic
from envbuild.artifacts import conda_cache
from envbuild.artifacts.conda_cache import Facts, Locate
from envbuild.artifacts.conda_link import run_job
from envbuild.artifacts.conda_survey import META
from envbuild.artifacts.links import link_mode
from envbuild.errors import BuildError
from envbuild.lock.conda import CondaPackage
from envbuild.progress import OnProgress, log, transfer
from envbuild.store.store import Store, remove_tree
from envbuild.workers import Answer, Workers

# The operating system's part of an error of rattler, which says more than the rest.
_ERRNO = re.compile(r"\(os error (\d+)\)")
_URL = re.compile(rb'\n  "url": "[^"]*"')
# A disk with fewer bytes left than this is the one that was full.
_FULL = 1 << 20


def install_packages(
    packages: Sequence[CondaPackage],
    store: Store,
    staged: Path,
    final: Path,
    command: str,
    locate: Locate,
    then: Callable[[], None],
) -> None:
    """Install `packages` into the empty folder `staged`, with files made for the prefix `final`, and call `then`.

    `locate` finds the archives of packages that are not unpacked in the store; `command` is the command that
    conda-meta/history names. While `then` runs, the unpacked packages are checked; if one was damaged,
    everything is done again. Raises BuildError when a package is not available, `final` is too long for one, or
    a write failed.
    """
    prefix = _checked_prefix(final)
    # Fetched before the lock on the store is taken: other processes need not wait for this download.
    locate([package for package in packages if conda_cache.known(store, package) is None])
    with conda_cache.held(store):
        for last in (False, True):
            work = _prepared(packages, store, staged, prefix, locate)
            bad = _link_and_check(work, command, then)
            if not bad:
                break
            names = ", ".join(package.stem for package in bad)
            if last:
                raise BuildError(
                    f"{names}: changed in {store.root} while it was used",
                    "run it again; nothing else may write to the store",
                )
            log(f"{names}: damaged in the store since it was unpacked; unpacking it again")
            conda_cache.forget(store, bad)
            _empty(staged)
    scripts = [path for row in work.facts.values() for path in row.scripts]
    if scripts:
        log(f"scripts that packages want run when linked are not run: {', '.join(scripts)}")


@dataclass(frozen=True, slots=True)
class _Work:
    """The inputs of linking; `new` are the archives of packages that have to be unpacked first."""

    store: Store
    staged: Path
    prefix: str
    facts: dict[CondaPackage, Facts]
    new: dict[CondaPackage, Path]

    @property
    def old(self) -> list[CondaPackage]:
        return [package for package in self.facts if package not in self.new]


def _prepared(packages: Sequence[CondaPackage], store: Store, staged: Path, prefix: str, locate: Locate) -> _Work:
    found = {package: conda_cache.known(store, package) for package in packages}
    missing = [package for package, row in found.items() if row is None]
    new = conda_cache.archives(store, missing, locate) if missing else {}
    facts = {
        package: row or conda_cache.facts(store, package) or conda_cache.read_facts(store, package, new[package])
        for package, row in found.items()
    }
    _check_room(facts, prefix)
    conda_cache.forget(store, missing)
    return _Work(store, staged, prefix, facts, new)


def _link_and_check(work: _Work, command: str, then: Callable[[], None]) -> list[CondaPackage]:
    """Unpack and link packages and call `then`; return the packages that changed since they were unpacked.

    An error is not raised if a package is damaged, because the damage explains it.
    """
    with contextlib.closing(Workers(1)) as pool:
        checking: Answer[list[CondaPackage]] | None = None
        try:
            with _progress(work) as on_progress:
                _link(work, on_progress)
            # Not earlier: linking keeps all CPUs busy, but `then` waits for a child process.
            checking = pool.submit(_looked_through, work)
            with atomic.writing(work.staged):
                _clean_records(work)
                _write_history(work, command)
            then()
        except Exception:
            checking = checking or pool.submit(conda_cache.damaged, work.store, work.old)
            if not (bad := checking.result()):
                raise
            return bad
        return checking.result()


def _progress(work: _Work) -> AbstractContextManager[OnProgress]:
    if not work.new:
        return contextlib.nullcontext(lambda _count: None)
    total = sum(work.facts[package].size for package in work.new)
    return transfer(f"unpacking {len(work.new)} conda packages", total)


def _looked_through(work: _Work) -> list[CondaPackage]:
    conda_cache.stamp(work.store, work.new)
    return conda_cache.damaged(work.store, work.old)


def _checked_prefix(final: Path) -> str:
    """Return `final` as text. Raises BuildError for a path that cannot be written into files."""
    prefix = os.fspath(final)
    if not prefix.isprintable():  # newlines, and bytes that are not UTF-8
        raise BuildError(
            f"{prefix!r} cannot be an environment's path: its files contain the path as text",
            "choose another path with --out, without control characters and in UTF-8",
        )
    return prefix


def _check_room(facts: Mapping[CondaPackage, Facts], prefix: str) -> None:
    length = len(prefix.encode())
    for package, row in facts.items():
        if row.room is not None and length > row.room:
            raise BuildError(
                f"{prefix}: the path is too long for {package.stem}: it has {length} bytes, and {row.file} "
                f"has space for at most {row.room}",
                "choose a shorter path with --out",
            )


def _link(work: _Work, on_progress: OnProgress) -> None:
    """Let a child process unpack and link, for the reason in `conda_link`. Its job file is in `staged` meanwhile."""
    pkgs = work.store.folder("conda", "pkgs")
    job = work.staged / ".job.json"
    with atomic.writing(work.staged):
        copying = link_mode(pkgs, work.staged) == "copy"
        rows = [_row(package, work) for package in work.facts]
        plain = {
            "records": rows, "prefix": work.prefix, "staged": os.fspath(work.staged),
            "pkgs": os.fspath(pkgs), "copying": copying,
        }  # fmt: skip
        job.write_text(json.dumps(plain), encoding="utf-8")
    sizes = {package.name: work.facts[package].size for package in work.new}
    said: list[str] = []
    with contextlib.closing(run_job(job)) as lines:
        for line in lines:
            kind, _, text = line.partition(" ")
            if kind == "unpacked":
                on_progress(sizes.get(text, 0))
            elif kind == "done":
                job.unlink()
                return
            elif kind == "failed":
                raise _explained(text, work)
            else:
                said.append(line)
    raise BuildError("linking the conda packages ended early:\n  " + "\n  ".join(said[-20:]))


def _row(package: CondaPackage, work: _Work) -> dict[str, Any]:
    """Return the record that rattler installs and writes to conda-meta, with the solved dependencies.

    rattler unpacks an archive only if the record has that file's URL: `_clean_records` restores the canonical
    URL.
    """
    row, archive = work.facts[package], work.new.get(package)
    return {
        "index": os.fspath(row.index),
        "size": row.size,
        "sha256": package.sha256,
        "md5": package.md5,
        "subdir": package.subdir,
        "depends": list(package.depends),
        "fn": package.file_name,
        "url": archive.absolute().as_uri() if archive else package.url,
        "channel": package.channel,
    }


def _explained(text: str, work: _Work) -> BuildError:
    """Return the error for a failure of rattler, with the operating system's message if it was the cause."""
    found = _ERRNO.search(text)
    if found is None:
        return BuildError(f"the locked conda packages cannot be installed: {text}")
    number = int(found[1])
    where = work.staged.parent
    pkgs = work.store.root / "conda" / "pkgs"
    if "failed to fetch" in text or (number == errno.ENOSPC and _is_full(pkgs)):
        return work.store.unwritable(OSError(number, os.strerror(number)))
    said = f"{os.strerror(number)} while packages were linked"
    return BuildError(f"{where}: {said}", atomic.write_hint(number))


def _clean_records(work: _Work) -> None:
    """Make conda-meta the same on every host: canonical URLs, and no paths of the store.

    The files are edited as text, because parsing takes longer than installing.
    """
    for package in work.facts:
        path = work.staged / META / f"{package.stem}.json"
        data = path.read_bytes()
        folder = os.fspath(conda_cache.folder(work.store, package))
        held = json.dumps(folder, ensure_ascii=False).encode()
        data = data.replace(b'  "extracted_package_dir": ' + held + b",\n", b"")
        data = data.replace(b'"source": ' + held, b'"source": ""')
        if package in work.new:
            url = b'\n  "url": ' + json.dumps(package.url).encode()
            data = _URL.sub(lambda _, url=url: url, data, count=1)  # type: ignore[misc]
        path.write_bytes(data)
    # This file makes backup tools skip the folder; conda's own environments have none.
    (work.staged / "CACHEDIR.TAG").unlink(missing_ok=True)


def _write_history(work: _Work, command: str) -> None:
    """Write conda-meta/history, by which conda recognises an environment: time, command, installed packages."""
    lines = [f"==> {time.strftime('%Y-%m-%d %H:%M:%S')} <==", f"# cmd: {command}"]
    lines += [f"+{p.channel}/{p.subdir}::{p.stem}" for p in work.facts]
    (work.staged / META / "history").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _is_full(path: Path) -> bool:
    try:
        room = os.statvfs(path)
    except OSError:
        return False
    return room.f_bavail * room.f_frsize < _FULL or (room.f_files > 0 and not room.f_favail)


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            remove_tree(path)
        else:
            path.unlink()
