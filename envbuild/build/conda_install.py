"""Installation of conda packages into a prefix by rattler, with records that conda, mamba and pixi read."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from envbuild.base import atomic, process
from envbuild.base.errors import BuildError
from envbuild.base.host import check_disk_space, link_mode
from envbuild.base.progress import OnProgress, log, reuse, transfer
from envbuild.base.workers import Answer, Workers
from envbuild.build import conda_cache
from envbuild.build.conda_cache import Locate, Metadata
from envbuild.build.conda_link import run_job
from envbuild.contract.conda_meta import META
from envbuild.contract.manifest import Stat
from envbuild.lock.conda import CondaPackage
from envbuild.store.store import Store

# The operating system's part of an error of rattler, which says more than the rest.
_ERRNO = re.compile(r"\(os error (\d+)\)")
_URL = re.compile(rb'\n  "url": "[^"]*"')
# A disk with fewer bytes left than this is the one that was full.
_FULL = 1 << 20


@dataclass(frozen=True, slots=True)
class Prefix:
    """An empty folder to install into, and the final path of that folder, which installed files contain."""

    staged: Path
    final: str


def install_packages(
    packages: Sequence[CondaPackage], prefix: Prefix, store: Store, locate: Locate, then: Callable[[], None]
) -> Mapping[Stat, str]:
    """Install conda packages into a folder, and call `then`. Return the sha256 of the packages' files, by stat.

    `locate` finds the archives of packages that are not unpacked in the store. While `then` runs, the unpacked packages
    are checked; if one was damaged, everything is done again. Raises BuildError when a package is not available, the
    path is too long for one, or a write failed.
    """
    if not prefix.final.isprintable():  # newlines, and bytes that are not UTF-8
        raise BuildError(
            f"{prefix.final!r} cannot be an environment's path: its files contain the path as text",
            "choose another path with --out, without control characters and in UTF-8",
        )
    # Fetched before the lock on the store is taken: other processes need not wait for this download.
    locate([package for package in packages if conda_cache.known(store, package) is None])
    with conda_cache.held(store):
        for last in (False, True):
            work = _prepared(packages, prefix, store, locate)
            bad = _link_and_check(work, then)
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
            for path in prefix.staged.iterdir():
                if path.is_dir() and not path.is_symlink():
                    atomic.remove_tree(path)
                else:
                    path.unlink()
    scripts = [path for row in work.known.values() for path in row.scripts]
    if scripts:
        log(f"link scripts of packages are not run: {', '.join(scripts)}")
    return work.read


@dataclass(frozen=True, slots=True)
class _Work:
    """The inputs of linking; `new` are the archives of packages that have to be unpacked first.

    `read` has the sha256 of the packages' files, by stat, once they were checked.
    """

    store: Store
    staged: Path
    final: str
    known: dict[CondaPackage, Metadata]
    new: dict[CondaPackage, Path]
    read: dict[Stat, str] = field(default_factory=dict)

    def changed(self) -> list[CondaPackage]:
        """Return the packages that changed since they were unpacked."""
        return conda_cache.damaged(
            self.store, [package for package in self.known if package not in self.new], self.read
        )

    def check(self) -> list[CondaPackage]:
        """Record the files of the new packages, and return the changed ones."""
        conda_cache.stamp(self.store, list(self.new), self.read)
        return self.changed()


def _prepared(packages: Sequence[CondaPackage], prefix: Prefix, store: Store, locate: Locate) -> _Work:
    rows = {package: conda_cache.known(store, package) for package in packages}
    missing = [package for package, row in rows.items() if row is None]
    for package in rows.keys() - set(missing):
        reuse("conda packages", package.file_name, True)
    new = conda_cache.archives(store, missing, locate) if missing else {}
    known = {
        package: row or conda_cache.metadata(store, package) or conda_cache.read_metadata(store, package, new[package])
        for package, row in rows.items()
    }
    length = len(prefix.final.encode())
    for package, row in known.items():
        if row.longest is not None and length > row.longest:
            raise BuildError(
                f"{prefix.final}: the path is too long for {package.stem}: it has {length} bytes, and {row.file} "
                f"has space for at most {row.longest}",
                "choose a shorter path with --out",
            )
    conda_cache.forget(store, missing)
    return _Work(store, prefix.staged, prefix.final, known, new)


def _link_and_check(work: _Work, then: Callable[[], None]) -> list[CondaPackage]:
    """Link packages, call `then`, and return damaged packages. These explain an error, which is then not raised."""
    with contextlib.closing(Workers(1)) as pool:
        checking: Answer[list[CondaPackage]] | None = None
        try:
            if work.new:
                total = sum(work.known[package].size for package in work.new)
                with transfer(f"unpacking {len(work.new)} conda packages", total) as on_progress:
                    _link(work, on_progress)
            else:
                _link(work, lambda _count: None)
            # Not earlier: linking keeps all CPUs busy, but `then` waits for a child process.
            checking = pool.submit(work.check)
            with atomic.writing(work.staged):
                _clean_records(work)
            then()
        except Exception:
            checking = checking or pool.submit(work.changed)
            if not (bad := checking.result()):
                raise
            return bad
        return checking.result()


def _link(work: _Work, on_progress: OnProgress) -> None:
    """Unpack and link in a child process, for the reason in `conda_link`. Its job file is in `staged` meanwhile."""
    pkgs = work.store.folder("conda", "pkgs")
    job = work.staged / ".job.json"
    with atomic.writing(work.staged):
        plain = {
            "records": [_record(package, work) for package in work.known],
            "prefix": work.final,
            "staged": os.fspath(work.staged),
            "pkgs": os.fspath(pkgs),
            "copying": link_mode(pkgs, work.staged) == "copy",
        }
        job.write_text(json.dumps(plain), encoding="utf-8")
    sizes = {package.name: work.known[package].size for package in work.new}
    output_lines: list[str] = []

    def read(line: str) -> None:
        kind, _, text = line.partition(" ")
        if kind == "unpacked":
            on_progress(sizes.get(text, 0))
        elif kind == "failed":
            raise _explained(text, work)
        else:
            output_lines.append(line)

    status = run_job(job, read)
    if "done" not in output_lines:
        lines = [
            f"{work.final}: linking the conda packages ended early ({process.ending(status)})",
            *output_lines[-20:],
        ]
        raise BuildError("\n  ".join(lines), process.KILLED if status < 0 else None)
    job.unlink()


def _record(package: CondaPackage, work: _Work) -> dict[str, Any]:
    """Return a record to install. rattler unpacks only by the archive's URL, which `_clean_records` replaces."""
    row, archive = work.known[package], work.new.get(package)
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
    """Return the error for a failure of rattler, with the operating system's message if that was the cause."""
    match = _ERRNO.search(text)
    if match is None or int(match[1]) == errno.ENOENT:  # a package lacks a file that it lists
        return BuildError(f"{work.final}: the locked conda packages cannot be installed: {text}", "run it again")
    number = int(match[1])
    full = False
    if number == errno.ENOSPC:
        try:
            check_disk_space(work.store.root / "conda" / "pkgs", _FULL)
        except BuildError:
            full = True
    if "failed to fetch" in text or full:
        return work.store.unwritable(OSError(number, os.strerror(number)))
    reason = f"{os.strerror(number)} while packages were linked"
    return BuildError(f"cannot write {work.staged.parent}: {reason}", atomic.write_hint(number))


def _clean_records(work: _Work) -> None:
    """Make conda-meta the same on every host, by edits of its text: parsing would take longer than installing."""
    for package in work.known:
        path = work.staged / META / f"{package.stem}.json"
        data = path.read_bytes()
        held = json.dumps(os.fspath(conda_cache.folder(work.store, package)), ensure_ascii=False).encode()
        data = data.replace(b'  "extracted_package_dir": ' + held + b",\n", b"")
        data = data.replace(b'"source": ' + held, b'"source": ""')
        if package in work.new:
            url = b'\n  "url": ' + json.dumps(package.url).encode()
            data = _URL.sub(lambda _, url=url: url, data, count=1)  # type: ignore[misc]
        path.unlink()  # rattler lets only its owner read it
        path.write_bytes(data)
    # This file makes backup tools skip the folder; conda's own environments have none.
    (work.staged / "CACHEDIR.TAG").unlink(missing_ok=True)
    for probe in (".refprobe-*", "symtest_*-*-*-*"):  # of rattler, which ignores errors of removing them
        for path in work.staged.glob(probe):
            atomic.remove(path)
