"""What an image's layers hold, in which order, and what each is called.

Order and grouping, with the reason: docs/layering.md.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path

from envbuild.image.entry import DIR, FILE, SYMLINK, Entry, Tree
from envbuild.image.layer import with_parents
from envbuild.layers.bytecode import Compiler, with_bytecode
from envbuild.layers.wheel import Scheme, wheel_paths, wheel_tree

# Raise it when the bytes of layers change though their inputs do not.
FORMAT = 1
PREFIX = "opt/env"
# 2020-01-01, as the trainer's wheel; zipfile refuses times before 1980 inside of images.
FIXED_TIME = 1577836800
# A folder in a layer replaces the base's mode of it: these keep what every distribution gives them.
_MODES = {"root": 0o700, "tmp": 0o1777, "var/tmp": 0o1777}
# A wheel of this size (bytes, as published) or more has a layer of its own, but no more than so many wheels:
# overlayfs takes 127 layers with those of the base.
LARGE = 100_000
MOST_LARGE = 60


@dataclass(frozen=True, slots=True)
class WheelFile:
    """A located wheel: its distribution, its file and the file's sha256 and size."""

    name: str
    version: str
    path: Path
    sha256: str
    size: int


@dataclass(frozen=True, slots=True)
class Part:
    """One layer to be made: its title, a digest of all that decides its bytes, and its content."""

    title: str
    key: str
    tree: Callable[[], Tree]


def wheel_parts(
    wheels: Sequence[WheelFile], scheme: Scheme, compiler: Compiler | None, mtime: int
) -> list[Part]:
    """The layers of `wheels`: each large one, largest first, then the small ones together."""
    by_size = sorted(wheels, key=lambda w: (-w.size, w.name))
    large = [wheel for wheel in by_size[:MOST_LARGE] if wheel.size >= LARGE]
    small = sorted(by_size[len(large) :], key=lambda w: w.name)
    groups = [[wheel] for wheel in large] + ([small] if small else [])
    return [_wheel_part(group, scheme, compiler, mtime) for group in groups]


def _wheel_part(
    group: list[WheelFile], scheme: Scheme, compiler: Compiler | None, mtime: int
) -> Part:
    title = f"{group[0].name} {group[0].version}"
    if len(group) > 1:
        title = f"{len(group)} packages: " + ", ".join(f"{w.name} {w.version}" for w in group)
    key: list[object] = [scheme.prefix, scheme.python, compiler and compiler.identity, mtime]
    key += [[w.name, w.version, w.sha256] for w in group]

    def tree() -> Tree:
        files = _without_overwritten(group, scheme, mtime)
        return with_parents(with_bytecode(files, compiler, [scheme.site_packages], mtime), mtime)

    return Part(title, key_of("wheels", key), tree)


def _without_overwritten(group: list[WheelFile], scheme: Scheme, mtime: int) -> Tree:
    """The files of the group's wheels; of a path that several have, the last, as installers leave it."""
    if len(group) == 1:
        yield from wheel_tree(group[0].path, scheme, mtime)
        return
    last = {path: i for i, wheel in enumerate(group) for path in wheel_paths(wheel.path, scheme)}
    for number, wheel in enumerate(group):
        for entry, content in wheel_tree(wheel.path, scheme, mtime):
            if last.get(entry.path, number) == number:
                yield entry, content


def environment_part(
    trainer: WheelFile,
    scheme: Scheme,
    interpreter: str,
    python_version: str,
    state: str,
    compiler: Compiler | None,
    mtime: int,
    *,
    system_packages: bool,
    folders: Sequence[str] = (),
) -> Part:
    """The last layer: the environment's frame (PEP 405), the trainer and the record of what was built.

    `interpreter` is the base's python, an absolute path. `folders` are made if the base lacks them.
    """
    frame = _frame(scheme, interpreter, python_version, system_packages, mtime)
    record = state.encode()

    def tree() -> Tree:
        def content() -> Tree:
            yield from frame
            yield from wheel_tree(trainer.path, scheme, mtime)
            for folder in folders:
                yield (
                    Entry(posixpath.normpath(f"/{folder}").strip("/"), DIR, 0o755, mtime=mtime),
                    None,
                )
            place = f"{scheme.prefix}/envbuild.json"
            yield Entry(place, FILE, 0o644, len(record), mtime=mtime), BytesIO(record)

        modules = with_bytecode(content(), compiler, [scheme.site_packages], mtime)
        for entry, stream in with_parents(modules, mtime):
            mode = _MODES.get(entry.path, entry.mode) if entry.kind == DIR else entry.mode
            yield replace(entry, mode=mode), stream

    key: list[object] = [scheme.prefix, scheme.python, compiler and compiler.identity, mtime]
    key += [interpreter, python_version, system_packages, trainer.sha256, list(folders), state]
    return Part(f"ddp-train {trainer.version} and envbuild.json", key_of("environment", key), tree)


def _frame(
    scheme: Scheme, interpreter: str, python_version: str, system_packages: bool, mtime: int
) -> list[tuple[Entry, BytesIO | None]]:
    config = (
        f"home = {interpreter.rpartition('/')[0] or '/'}\n"
        f"include-system-site-packages = {str(system_packages).lower()}\n"
        f"version = {python_version}\n"
        f"executable = {interpreter}\n"
    ).encode()
    links = {"python": interpreter, "python3": "python", f"python{scheme.python}": "python"}
    frame: list[tuple[Entry, BytesIO | None]] = [
        (
            Entry(f"{scheme.prefix}/pyvenv.cfg", FILE, 0o644, len(config), mtime=mtime),
            BytesIO(config),
        )
    ]
    for name, target in links.items():
        frame.append(
            (Entry(f"{scheme.scripts}/{name}", SYMLINK, 0o777, 0, target, mtime=mtime), None)
        )
    if system_packages:
        # The base's own torchrun would start the base's interpreter, without this environment.
        text = (
            f"#!{scheme.interpreter}\nimport sys\nfrom torch.distributed.run import main\n"
            'if __name__ == "__main__":\n    sys.exit(main())\n'
        ).encode()
        entry = Entry(f"{scheme.scripts}/torchrun", FILE, 0o755, len(text), mtime=mtime)
        frame.append((entry, BytesIO(text)))
    return frame


def key_of(kind: str, inputs: object) -> str:
    """The digest of a layer's inputs (hexadecimal)."""
    return hashlib.sha256(json.dumps([FORMAT, kind, inputs]).encode()).hexdigest()
