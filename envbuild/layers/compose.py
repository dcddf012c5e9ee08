"""Content, order and titles of an image's layers; docs/reference/layering.md explains order and grouping."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO
from typing import Protocol, TypeVar

from envbuild.image.entry import DIR, FILE, SYMLINK, Entry, Tree, closing
from envbuild.image.layer import with_parents
from envbuild.layers.bytecode import Compiler, with_bytecode
from envbuild.layers.layer_cache import LayerRequest
from envbuild.layers.wheel import Scheme, WheelFile, wheel_paths, wheel_tree
from envbuild.store.entry import key_of

# A directory in a layer overrides the mode that it has in the base; these directories keep the modes that every
# distribution gives them.
_MODES = {"root": 0o700, "tmp": 0o1777, "var/tmp": 0o1777}
# A wheel or conda package of at least LARGE bytes, as published, has a dedicated layer, up to MOST_LARGE of them:
# overlayfs supports 127 layers, including those of the base.
LARGE = 100_000
MOST_LARGE = 60
Frame = list[tuple[Entry, BytesIO | None]]


class Sized(Protocol):
    """Package file of any kind on this host; `size` is its size in bytes."""

    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int: ...


S = TypeVar("S", bound=Sized)


def alone(*kinds: Sequence[Sized]) -> list[int]:
    """Return, per kind, the number of packages that get a dedicated layer: the largest ones across all kinds."""
    large = [
        (-package.size, package.name, number)
        for number, packages in enumerate(kinds)
        for package in packages
        if package.size >= LARGE
    ]
    kept = [number for _, _, number in sorted(large)[:MOST_LARGE]]
    return [kept.count(number) for number in range(len(kinds))]


def groups(packages: Sequence[S], alone: int) -> list[list[S]]:
    """Return the packages of each layer: the `alone` largest ones, one per layer, then all others by name."""
    by_size = sorted(packages, key=lambda package: (-package.size, package.name))
    small = sorted(by_size[alone:], key=lambda package: package.name)
    return [*([package] for package in by_size[:alone]), *([small] if small else [])]


def title_of(packages: Sequence[tuple[str, str]]) -> str:
    """Return the title of the layer with these packages (name, version)."""
    names = [f"{name} {version}" for name, version in packages]
    return names[0] if len(names) == 1 else f"{len(names)} packages: {', '.join(names)}"


def wheel_parts(
    wheels: Sequence[WheelFile], scheme: Scheme, compiler: Compiler | None, mtime: int, alone: int
) -> list[LayerRequest]:
    """Return the layers of `wheels`: one for each of the `alone` largest wheels, and the last layer for all others."""
    return [_wheel_part(group, scheme, compiler, mtime) for group in groups(wheels, alone)]


def _wheel_part(group: list[WheelFile], scheme: Scheme, compiler: Compiler | None, mtime: int) -> LayerRequest:
    title = title_of([(wheel.name, wheel.version) for wheel in group])
    key: list[object] = [scheme.prefix, scheme.python, compiler and compiler.identity, mtime]
    key += [[w.name, w.version, w.sha256] for w in group]
    key += ["conda"] if scheme.conda else []

    def tree() -> Tree:
        files = _without_overwritten(group, scheme, mtime)
        return with_parents(with_bytecode(files, compiler, [scheme.site_packages], mtime), mtime)

    return LayerRequest(title, key_of("wheels", key), tree)


def _without_overwritten(group: Sequence[WheelFile], scheme: Scheme, mtime: int) -> Tree:
    """Yield the files of the group's wheels; if several wheels have a path, only the last wheel's file."""
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
    own: Sequence[WheelFile],
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
    parents: Sequence[Entry] = (),
) -> LayerRequest:
    """Return the last layer: the environment's frame, own code (the trainer's wheel, then the project's if there is
    one), and envbuild.json with the content `state`.

    `interpreter` is an absolute path. The frame is that of a virtual environment (PEP 405) on the base's Python; a
    `conda` environment contains its own Python and needs only conda's marker file. `folders` are created; `parents` are
    folders around them as the layers below have them.
    """
    # conda, mamba and pixi treat a folder with this file as an environment.
    marker: Frame = [(Entry(f"{scheme.prefix}/conda-meta/history", mtime=mtime), None)]
    frame = marker if conda else _frame(scheme, interpreter, python_version, system_packages, mtime)

    def content() -> Tree:
        yield from frame
        yield from _without_overwritten(own, scheme, mtime)
        yield from ((parent, None) for parent in parents)
        for folder in folders:
            yield Entry(posixpath.normpath(f"/{folder}").strip("/"), DIR, 0o755, mtime=mtime), None
        yield _file(f"{scheme.prefix}/envbuild.json", state, mtime)

    def tree() -> Tree:
        modules = with_bytecode(content(), compiler, [scheme.site_packages], mtime)
        with closing(with_parents(modules, mtime)) as files:
            for entry, stream in files:
                known = entry.kind != DIR or entry in parents
                mode = entry.mode if known else _MODES.get(entry.path, entry.mode)
                yield replace(entry, mode=mode), stream

    key: list[object] = [scheme.prefix, scheme.python, compiler and compiler.identity, mtime]
    key += [interpreter, python_version, system_packages, own[0].sha256, list(folders), state]
    key += ["conda"] if conda else []
    key += [wheel.sha256 for wheel in own[1:]]
    key += [[entry.path, entry.mode, entry.uid, entry.gid, repr(entry.xattrs)] for entry in parents]
    title = ", ".join(f"{wheel.name} {wheel.version}" for wheel in own)
    return LayerRequest(f"{title} and envbuild.json", key_of("environment", key), tree)


def _frame(scheme: Scheme, interpreter: str, python_version: str, system_packages: bool, mtime: int) -> Frame:
    config = (
        f"home = {interpreter.rpartition('/')[0] or '/'}\n"
        f"include-system-site-packages = {str(system_packages).lower()}\n"
        f"version = {python_version}\n"
        f"executable = {interpreter}\n"
    )
    frame: Frame = [_file(f"{scheme.prefix}/pyvenv.cfg", config, mtime)]
    for name, target in (("python", interpreter), ("python3", "python"), (f"python{scheme.python}", "python")):
        frame.append((Entry(f"{scheme.scripts}/{name}", SYMLINK, 0o777, 0, target, mtime=mtime), None))
    if system_packages:
        # The base's own torchrun would start the base's interpreter, without this environment.
        text = (
            f"#!{scheme.interpreter}\nimport sys\nfrom torch.distributed.run import main\n"
            'if __name__ == "__main__":\n    sys.exit(main())\n'
        )
        frame.append(_file(f"{scheme.scripts}/torchrun", text, mtime, 0o755))
    return frame


def _file(path: str, text: str, mtime: int, mode: int = 0o644) -> tuple[Entry, BytesIO]:
    data = text.encode()
    return Entry(path, FILE, mode, len(data), mtime=mtime), BytesIO(data)
