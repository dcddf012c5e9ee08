"""Steps from a source archive to installed files: unpack, patch, configure, make, install, tidy.

This module imports only the standard library, errors and the description of a layer, so that a stage of a Dockerfile
can run `python -m envbuild.layers.source_standalone`. Sources: the GNU Coding Standards (configure, DESTDIR, standard
targets), reproducible-builds.org (SOURCE_DATE_EPOCH, -ffile-prefix-map).
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from envbuild.elf import is_elf
from envbuild.errors import BuildError
from envbuild.layers.source_job import PREFIX, SourceBuild

if TYPE_CHECKING:
    pass

_LICENCES = ("COPYING*", "LICENSE*", "LICENCE*", "NOTICE*")
# Reports all missing programs before the build begins.
_LOOK = 'for p; do command -v "$p" >/dev/null || { echo "$p: not found"; m=127; }; done; exit ${m:-0}'
_UNWANTED = ("share/doc", "share/info", "share/man")


def make_layer(job: SourceBuild) -> Path:
    """Build and install the layer of `job`, and return the folder (on this host) with the files below the prefix.

    Raises StepError for a command that fails, BuildError for an unusable archive or result.
    """
    from envbuild.layers.source_unpack import unpack

    work, layer = job.build_host.work, job.layer
    (work / "tmp").mkdir()
    (work / "stage").mkdir()
    unpack(job.archive, job.source)
    programs = [*layer.tools, *(["patch"] if job.patches else [])]
    job.run("programs", ["sh", "-c", _LOOK, "sh", *programs])
    for patch in job.patches:
        # A fixed name, because `patch` would take a file name with a leading dash for an option.
        shutil.copyfile(patch, work / "patch.diff")
        job.run(
            f"patch {patch.name}",
            ["patch", "-p1", "--batch", "--forward", "--no-backup-if-mismatch", "-i",
             str(job.build_host.inside / "patch.diff")],
        )  # fmt: skip
    _SYSTEMS[layer.system](job)
    if not job.staged.is_dir() or not any(job.staged.iterdir()):
        raise BuildError(
            f"{layer.name} {layer.version}: `make install` installed nothing below {PREFIX}",
            "its Makefile must honour DESTDIR and PREFIX; a variable in `configure` may name {install}, "
            "the folder to install into",
        )
    _licences(job)
    tidy(job.staged)
    _strip(job)
    return job.staged


def _autotools(job: SourceBuild) -> None:
    if not (job.source / "configure").is_file():
        # The archive of a tag does not contain the version: write it to the files that gnulib's git-version-gen and
        # aws-ofi-nccl read.
        for name in (".tarball-version", ".release_version"):
            (job.source / name).write_text(job.layer.version + "\n", encoding="utf-8")
        if (job.source / "autogen.sh").is_file():
            # Some scripts have no "#!" line: a shell runs them, execve does not.
            text = (job.source / "autogen.sh").read_bytes()
            os.chmod(job.source / "autogen.sh", 0o755)
            job.run("autogen.sh", ["./autogen.sh"] if text[:2] == b"#!" else ["sh", "autogen.sh"])
        elif (job.source / "configure.ac").is_file():
            job.run("autoreconf", ["autoreconf", "--force", "--install"])
        else:
            raise BuildError(
                f"{job.layer.name} {job.layer.version}: its archive has no configure script",
                f'say how it is built: `system = "make"` in [layers.{job.layer.name}]',
            )
    os.chmod(job.source / "configure", 0o755)
    job.run(
        "configure",
        ["./configure", f"--prefix={PREFIX}", f"--libdir={PREFIX}/lib", "--disable-static",
         "--enable-shared", "--disable-dependency-tracking", *job.options()],
        more=("config.log",),
    )  # fmt: skip
    job.run("make", ["make", f"-j{job.jobs}"])
    job.run("make install", ["make", "install", f"DESTDIR={job.stage}"])


def _make(job: SourceBuild) -> None:
    # The last value on a command line wins: a layer's own PREFIX={install} is for Makefiles without DESTDIR.
    named = [f"PREFIX={PREFIX}", f"DESTDIR={job.stage}", *job.options()]
    job.run("make", ["make", f"-j{job.jobs}", *named])
    job.run("make install", ["make", "install", *named])


def _wheel(job: SourceBuild) -> None:
    from envbuild.layers.source_wheel import build_wheel

    build_wheel(job)


_SYSTEMS: Mapping[str, Callable[[SourceBuild], None]] = {
    "autotools": _autotools, "make": _make, "wheel": _wheel,
}  # fmt: skip


def _licences(job: SourceBuild) -> None:
    """Copy the licence texts of the source to the installed files."""
    for patterns in (job.layer.licences, _LICENCES):
        found = sorted({path for one in patterns for path in job.source.glob(one) if path.is_file()})
        if found:
            break
    else:
        job.log(f"{job.layer.name} {job.layer.version}: no licence file in its archive")
        return
    folder = job.staged / "share" / "licenses" / job.layer.name
    folder.mkdir(parents=True, exist_ok=True)
    for path in found:
        shutil.copyfile(path, folder / path.name)


def tidy(tree: Path) -> None:
    """Normalize an installed tree.

    Documentation, static libraries, libtool files and empty folders are removed, modes become independent of the umask,
    and links into the prefix become relative.
    """
    for name in _UNWANTED:
        shutil.rmtree(tree / name, ignore_errors=True)
    for here, folders, names in os.walk(tree, topdown=False):
        for name in names + [one for one in folders if os.path.islink(os.path.join(here, one))]:
            path = Path(here, name)
            if path.is_symlink():
                target = os.readlink(path)
                if target.startswith(PREFIX + "/"):
                    inner = os.path.relpath(target, os.path.join(PREFIX, os.path.relpath(here, tree)))
                    path.unlink()
                    path.symlink_to(inner)
            elif path.suffix in (".la", ".a"):
                path.unlink()
            else:
                path.chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)
        os.chmod(here, 0o755)
        if Path(here) != tree:
            with contextlib.suppress(OSError):
                os.rmdir(here)  # empty ones only


def _strip(job: SourceBuild) -> None:
    """Strip debugging information, which is most of a library's size."""
    root = job.build_host.work
    found = []
    for here, _, names in os.walk(job.staged):
        for name in names:
            path = Path(here, name)
            if is_elf(path):
                found.append(str(job.build_host.inside / path.relative_to(root)))
    if found:
        job.run("strip", ["strip", "--strip-debug", *sorted(found)])
