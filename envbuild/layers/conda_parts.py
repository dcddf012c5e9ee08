"""Layers of an environment's conda packages.

They are ordered and grouped like wheels; see docs/reference/layering.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from envbuild.image.entry import Tree
from envbuild.image.layer import with_parents
from envbuild.layers.bytecode import Compiler, with_bytecode
from envbuild.layers.compose import LayerRequest, groups, key_of, title_of
from envbuild.layers.conda import conda_tree
from envbuild.layers.conda_paths import CondaFile
from envbuild.layers.conda_shared import Shared
from envbuild.layers.wheel import Scheme


def conda_parts(
    files: Sequence[CondaFile], shared: Shared, scheme: Scheme, compiler: Compiler | None, mtime: int, alone: int
) -> list[LayerRequest]:
    """Return the layers of `files`.

    Each of the `alone` largest packages has its own layer, largest first; the others share the last one.
    """
    return [_part(group, shared, scheme, compiler, mtime) for group in groups(files, alone)]


def _part(
    group: Sequence[CondaFile], shared: Shared, scheme: Scheme, compiler: Compiler | None, mtime: int
) -> LayerRequest:
    without = [shared.without.get(file.name, ()) for file in group]
    key: list[object] = [scheme.prefix, scheme.python, compiler and compiler.identity, mtime]
    for file, lost in zip(group, without, strict=True):
        one = file.package
        # Inputs of the record in conda-meta besides the package's own content.
        told = [one.subdir, one.url, one.md5, one.depends]
        key.append([one.name, one.version, one.build, one.sha256, told, lost])

    def files() -> Tree:
        for file, lost in zip(group, without, strict=True):
            yield from conda_tree(file, scheme, mtime, frozenset(lost))

    def tree() -> Tree:
        # The standard library and site-packages.
        modules = [f"{scheme.prefix}/lib/python{scheme.python}"]
        return with_parents(with_bytecode(files(), compiler, modules, mtime), mtime)

    return LayerRequest(title_of([(f.name, f.package.version) for f in group]), key_of("conda", key), tree)
