"""Debian packages → the tree of one layer, as dpkg would unpack them with a merged /usr.

No maintainer script is run; generated.py creates the files that programs need from them.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from envbuild.base.errors import BuildError
from envbuild.debian.deb import read_control, read_data
from envbuild.debian.defaults import TreeRules, load_rules
from envbuild.debian.generated import SOURCES, InstalledPackage, database, made
from envbuild.debian.lock import LockedDeb
from envbuild.image.entry import DIR, FILE, HARDLINK, SYMLINK, Entry, Readable, Tree

# Folders that are links: files of packages below the first go below the second. Debian has those of /usr since 12
# (base-files creates them since 13); var/run and var/lock come from base-files itself.
_ALIASES = {name: f"usr/{name}" for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32")}
_ALIASES |= {"var/run": "run", "var/lock": "run/lock"}
_ALWAYS = ("bin", "lib", "sbin")
# Limit for files that are read into memory because others are generated from them; none in Debian comes near.
_MAX_SOURCE = 16 << 20


def debian_tree(debs: Sequence[tuple[LockedDeb, Path]], mtime: int) -> Tree:
    """Return the base made of `debs` (locked package, its file): the same items in the same order each time.

    Parents come before their children; the root itself is not among the items. Each item has `mtime` (seconds since
    1970). Raises BuildError, naming the package, for one that is damaged, is not the locked one, or has a file that
    another one has.
    """
    merge = _Merge(load_rules(), mtime)
    for alias in _ALWAYS:
        yield from merge.alias(alias)
    installed = []
    # base-files first: it sets the modes of the common folders.
    for deb, path in sorted(debs, key=lambda item: (item[0].name != "base-files", item[0].name)):
        control = read_control(path, deb.name)
        has = (control.fields.get("version"), control.fields.get("architecture"))
        if has != (deb.version, deb.arch):
            raise BuildError(
                f"{path}: holds {deb.name} {has[0]} ({has[1]}), but {deb} is locked",
                "remove the file and fetch it again",
            )
        merge.name, merge.listing, merge.conffiles = deb.name, [], {}
        merge.expected = frozenset(control.conffiles)
        for entry, content in read_data(path, deb.name):
            yield from merge.item(entry, content)
        installed.append(InstalledPackage(control, tuple(merge.listing), dict(merge.conffiles)))
    files = made(merge.rules, merge.sources, frozenset(merge.seen), mtime)
    for entry, data in [*files, *database(installed)]:
        yield from merge.own(entry, data)


def merged(path: str) -> str:
    """Return the path that `path` of a package has with a merged /usr."""
    for alias, real in _ALIASES.items():
        if path.startswith(alias + "/"):
            return real + path[len(alias) :]
    return path


@dataclass(slots=True)
class _Merge:
    """The state of a merge.

    `seen` maps each path in the tree to its kind and package. `name`, `listing`, `conffiles` and `expected` belong to
    the current package: its name, its paths as in the package, the MD5 of its conffiles so far, the paths of them all.
    """

    rules: TreeRules
    mtime: int
    seen: dict[str, tuple[str, str]] = field(default_factory=dict)
    sources: dict[str, bytes] = field(default_factory=dict)
    name: str = ""
    listing: list[str] = field(default_factory=list)
    conffiles: dict[str, str] = field(default_factory=dict)
    expected: frozenset[str] = frozenset()

    def item(self, entry: Entry, content: Readable | None) -> Tree:
        """Yield the items for an entry of the current package, with missing parents."""
        self.listing.append(entry.path)
        if not entry.path:
            return
        if entry.path in _ALIASES:
            real = _ALIASES[entry.path]
            if entry.kind != DIR and (entry.kind, entry.target.lstrip("/")) != (SYMLINK, real):
                raise BuildError(f"{self.name}: its /{entry.path} is neither a folder nor a link to {real}")
            yield from self.alias(entry.path)
            return
        path = merged(entry.path)
        if content is not None:
            content = self._remembered(entry, path, content)
        # Links directly in usr/share/doc are kept: they lead to a licence elsewhere.
        licence = entry.kind == SYMLINK and path.startswith("usr/share/doc/") and path.count("/") == 3
        if self.rules.drop.fullmatch(path) and not self.rules.keep.fullmatch(path) and not licence:
            return
        if known := self.seen.get(path):
            if entry.kind == known[0] == DIR:
                return
            raise BuildError(
                f"{known[1]} and {self.name} both have /{path}", "leave one of the two packages out of the base"
            )
        target = entry.target
        if entry.kind == HARDLINK:
            target = merged(target)
            if self.seen.get(target, ("",))[0] not in (FILE, HARDLINK):
                raise BuildError(f"{self.name}: /{path} is a hard link to /{target}, which is no file")
        if alias := next((a for a in _ALIASES if entry.path.startswith(a + "/")), ""):
            yield from self.alias(alias)
        yield from self._parents(path)
        self.seen[path] = (entry.kind, self.name)
        yield replace(entry, path=path, target=target, mtime=self.mtime), content

    def own(self, entry: Entry, data: bytes | None) -> Tree:
        """Yield the items of a file that envbuild adds, none if a package has it."""
        if entry.path not in self.seen:
            self.name = "envbuild"
            yield from self._parents(entry.path)
            self.seen[entry.path] = (entry.kind, self.name)
            content = None if data is None else io.BytesIO(data)
            yield replace(entry, size=len(data or b""), mtime=self.mtime), content

    def alias(self, alias: str) -> Tree:
        """Yield the link `alias`, once, after the folder that it names; links in /var come later, from generated.py."""
        if alias not in self.seen and _ALIASES[alias].startswith("usr/"):
            yield from self._parents(_ALIASES[alias] + "/")
            self.seen[alias] = (SYMLINK, "envbuild")
            yield Entry(alias, SYMLINK, 0o777, target=_ALIASES[alias], mtime=self.mtime), None

    def _parents(self, path: str) -> Tree:
        parts = path.split("/")
        for count in range(1, len(parts)):
            parent = "/".join(parts[:count])
            kind, owner = self.seen.get(parent, ("", ""))
            if not kind:
                self.seen[parent] = (DIR, self.name)
                yield Entry(parent, DIR, 0o755, mtime=self.mtime), None
            elif kind != DIR:
                raise BuildError(
                    f"{self.name}: /{path} lies below /{parent}, which is no folder but a {kind} of {owner}"
                )

    def _remembered(self, entry: Entry, path: str, content: Readable) -> Readable:
        """Return the content again, after keeping a copy if other files are generated from it."""
        source, conffile = SOURCES.fullmatch(path), entry.path in self.expected
        if not (source or conffile):
            return content
        if entry.size > _MAX_SOURCE:
            raise BuildError(f"{self.name}: /{path} has {entry.size} bytes, which cannot be right")
        data = content.read()
        if source:
            self.sources[path] = data
        if conffile:
            self.conffiles[entry.path] = hashlib.md5(data, usedforsecurity=False).hexdigest()
        return io.BytesIO(data)
