"""What an image's layers hold, in which order, and what each is called.

Order and grouping, with the reason: docs/reference/layering.md.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Protocol, TypeVar

from envbuild.image.entry import DIR, FILE, SYMLINK, Entry, Tree, closing
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
# A wheel or conda package of this size (bytes, as published) or more has a layer of its own, but no more than so
# many of them: overlayfs takes 127 layers with those of the base.
LARGE = 100_000
MOST_LARGE = 60


Frame = list[tuple[Entry, BytesIO | None]]


@dataclass(frozen=True, slots=True)
class WheelFile:
    """A located wheel: its distribution, its file and the file's sha256 and size."""

    name: str
    version: str
    path: Path
    sha256: str
    size: int


@dataclass(frozen=True, slots=True)
class LayerRequest:
    """One layer to be made: its title, a digest of all that decides its bytes, and its content."""

    title: str
    key: str
    tree: Callable[[], Tree]


class Sized(Protocol):
    """A located package of any kind; `size` is that of its file, in bytes."""

    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int: ...


S = TypeVar("S", bound=Sized)


def alone(*kinds: Sequence[Sized]) -> list[int]:
    """How many packages of each kind have a layer of their own: the largest of all kinds together."""
    large = [
        (-package.size, package.name, number)
        for number, packages in enumerate(kinds)
        for package in packages
        if package.size >= LARGE
    ]
    kept = [number for _, _, number in sorted(large)[:MOST_LARGE]]
    return [kept.count(number) for number in range(len(kinds))]


def groups(packages: Sequence[S], alone: int) -> list[list[S]]:
    """The packages of each layer: each of the `alone` largest, largest first, then the others by name."""
    by_size = sorted(packages, key=lambda package: (-package.size, package.name))
    small = sorted(by_size[alone:], key=lambda package: package.name)
    return [[package] for package in by_size[:alone]] + ([small] if small else [])


def title_of(packages: Sequence[tuple[str, str]]) -> str:
    """What the layer of these packages (name, version) is called."""
    names = [f"{name} {version}" for name, version in packages]
    return names[0] if len(names) == 1 else f"{len(names)} packages: {', '.join(names)}"


def wheel_parts(
    wheels: Sequence[WheelFile],
    scheme: Scheme,
    compiler: Compiler | None,
    mtime: int,
    most: int = MOST_LARGE,
) -> list[LayerRequest]:
    """The layers of `wheels`: each large one but no more than `most`, largest first, then the others together."""
    large = sum(wheel.size >= LARGE for wheel in wheels)
    return [
        _wheel_part(group, scheme, compiler, mtime) for group in groups(wheels, min(large, most))
    ]


def _wheel_part(
    group: list[WheelFile], scheme: Scheme, compiler: Compiler | None, mtime: int
) -> LayerRequest:
    title = title_of([(wheel.name, wheel.version) for wheel in group])
    key: list[object] = [scheme.prefix, scheme.python, compiler and compiler.identity, mtime]
    key += [[w.name, w.version, w.sha256] for w in group]

    def tree() -> Tree:
        files = _without_overwritten(group, scheme, mtime)
        return with_parents(with_bytecode(files, compiler, [scheme.site_packages], mtime), mtime)

    return LayerRequest(title, key_of("wheels", key), tree)


def _without_overwritten(group: list[WheelFile], scheme: Scheme, mtime: int) -> Tree:
    """The files of the group's wheels; of a path that several have, the last, as installers leave it."""
    if len(group) == 1:
        yield from wheel_tree(group[0].path, scheme, mtime)
        return
    last = {path: i for i, wheel in enumerate(group) for path in wheel_paths(wheel.path, scheme)}
    for number, wheel in enumerate(group):
        with closing(wheel_tree(wheel.path, scheme, mtime)) as files:
            for entry, content in files:
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
    conda: bool = False,
    folders: Sequence[str] = (),
) -> LayerRequest:
    """The last layer: the environment's frame, the trainer and the record of what was built.

    `interpreter` is an absolute path. The frame is that of a virtual environment (PEP 405) on the base's
    python; a `conda` environment has its own, so that conda's mark is all it needs. `folders` are made if the
    base lacks them.
    """
    if conda:
        # conda, mamba and pixi take a folder with this file for an environment.
        history = Entry(f"{scheme.prefix}/conda-meta/history", FILE, 0o644, mtime=mtime)
        frame: Frame = [(history, None)]
    else:
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
        with closing(with_parents(modules, mtime)) as files:
            for entry, stream in files:
                mode = _MODES.get(entry.path, entry.mode) if entry.kind == DIR else entry.mode
                yield replace(entry, mode=mode), stream

    key: list[object] = [scheme.prefix, scheme.python, compiler and compiler.identity, mtime]
    key += [interpreter, python_version, system_packages, trainer.sha256, list(folders), state]
    key += ["conda"] if conda else []
    return LayerRequest(
        f"ddp-train {trainer.version} and envbuild.json", key_of("environment", key), tree
    )


def _frame(
    scheme: Scheme, interpreter: str, python_version: str, system_packages: bool, mtime: int
) -> Frame:
    config = (
        f"home = {interpreter.rpartition('/')[0] or '/'}\n"
        f"include-system-site-packages = {str(system_packages).lower()}\n"
        f"version = {python_version}\n"
        f"executable = {interpreter}\n"
    ).encode()
    links = {"python": interpreter, "python3": "python", f"python{scheme.python}": "python"}
    frame: Frame = [
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
