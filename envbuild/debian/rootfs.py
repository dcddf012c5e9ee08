"""Conversion of Debian packages to the tree of one layer, as unpacked by dpkg with a merged /usr.

A package is read as a stream. Source: deb(5) format 2.0: an ar archive of debian-binary, control.tar and data.tar, in
this order.

Maintainer scripts are not run: this module writes the files that they would create, and dpkg's database.

Sources: the postinst scripts of base-files 12.4, base-passwd 3.6, ca-certificates 20230311, debianutils 5.7, libc-bin
2.36, readline-common 8.2; update-alternatives(1); shadow(5), gshadow(5); dpkg 1.21, /var/lib/dpkg: status (deb-control
fields, Status and Conffiles added), info/ in format 1.

There is no ld.so.cache: the loader's built-in paths include Debian's /usr/lib/<triplet>, and ldconfig of another
architecture cannot run. There are no hashed links in /etc/ssl/certs: only programs that use this folder as CApath need
them; OpenSSL's default is /usr/lib/ssl/cert.pem, a link to the bundle.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, cast

from envbuild.base.errors import BuildError, LockError
from envbuild.debian.control import parse_control
from envbuild.debian.lock import LockedDeb, TreeRules, load_rules
from envbuild.image.entry import DIR, FILE, HARDLINK, SYMLINK, Entry, Readable, Tree
from envbuild.image.layer import decompressed
from envbuild.image.tar import Member, PositionedStream, Slice, tar_items

_MAGIC = b"!<arch>\n"
_HEADER = 60
# Control files are read into memory; none of a real package is larger.
_MAX_CONTROL = 16 << 20
_COMPRESSIONS = ("", ".gz", ".xz", ".zst")
_HINT = "lock the base again"


@dataclass(frozen=True, slots=True)
class Control:
    """The control data of a package.

    `text` is its control file, `fields` are the fields of this file by lower-case name, `conffiles` are paths relative
    to the root, `md5sums` is the text of the package's md5sums file.
    """

    text: str
    fields: dict[str, str]
    conffiles: tuple[str, ...]
    md5sums: str


def read_control(path: Path, name: str) -> Control:
    """Return the control data of the package `name` at `path`. Raises BuildError for a faulty package."""
    texts: dict[str, str] = {}
    for entry, content in _members(path, name, "control.tar"):
        if entry.path in ("control", "conffiles", "md5sums") and content is not None:
            if entry.size > _MAX_CONTROL:
                raise _faulty(name, f"its {entry.path} has {entry.size} bytes")
            texts[entry.path] = content.read().decode("utf-8", "replace")
    text = texts.get("control", "").strip("\n")
    try:
        fields = parse_control(text, f"the package {name}")
    except LockError as error:
        raise _faulty(name, error.message) from None
    if fields.get("package") != name:
        raise _faulty(name, f"its control file is of {fields.get('package')!r}")
    # "remove-on-upgrade PATH" names a file that the package no longer has.
    lines = [line for line in texts.get("conffiles", "").splitlines() if line.startswith("/")]
    conffiles = tuple(relative(line.strip().lstrip("/"), name) for line in lines)
    return Control(text, fields, conffiles, texts.get("md5sums", ""))


def read_data(path: Path, name: str) -> Tree:
    """Return the files of the package `name`, in its own order; the root is "". Raises BuildError if it is faulty."""
    return _members(path, name, "data.tar")


def relative(path: str, name: str) -> str:
    """Return a package's `path` relative to the root. Raises BuildError for a path that could leave the root."""
    parts = path.split("/")
    if path.startswith("/") or ".." in parts or "\0" in path:
        raise _faulty(name, f"it holds the path {path!r}")
    return "/".join(part for part in parts if part not in ("", "."))


def _members(path: Path, name: str, part: str) -> Tree:
    where = _where(name)
    try:
        with path.open("rb") as file:
            stream = cast(BinaryIO, _find(file, name, part))
            for member, content in tar_items(decompressed(stream, where), where):
                yield _entry(member, name), content
    except BuildError as error:
        raise BuildError(error.message, error.hint or _HINT) from None
    except OSError as error:
        raise _faulty(name, f"it cannot be read: {error.strerror or error}") from None


def _entry(member: Member, name: str) -> Entry:
    target = relative(member.link, name) if member.kind == HARDLINK else member.link
    return Entry(
        relative(member.name, name),
        member.kind,
        member.mode,
        member.size,
        target,
        member.uid,
        member.gid,
        member.mtime,
        member.device,
    )


def _find(file: BinaryIO, name: str, part: str) -> Slice:
    """Return the ar member whose name begins with `part`, as a stream."""
    if file.read(len(_MAGIC)) != _MAGIC:
        raise _faulty(name, "it is no ar archive")
    size_of_file = file.seek(0, 2)
    place, number = len(_MAGIC), 0
    while place < size_of_file:
        file.seek(place)
        header = file.read(_HEADER)
        if len(header) < _HEADER or header[58:] != b"`\n":
            raise _faulty(name, "it is truncated or no ar archive")
        member = header[:16].decode("ascii", "replace").strip().removesuffix("/")
        digits = header[48:58].strip()
        if not digits.isdigit() or place + _HEADER + int(digits) > size_of_file:
            raise _faulty(name, f"it is truncated: {member!r} is not whole")
        size = int(digits)
        if number == 0 and (member != "debian-binary" or not file.read(size).startswith(b"2.")):
            raise _faulty(name, "it is no Debian package of format 2")
        if member.startswith(part):
            if member.removeprefix(part) not in _COMPRESSIONS:
                raise _faulty(name, f"{member} is compressed in a way that is not known here")
            source = PositionedStream(file, name)
            source.go(place + _HEADER)
            return Slice(source, size)
        place += _HEADER + size + size % 2
        number += 1
    raise _faulty(name, f"it has no {part}")


def _where(name: str) -> str:
    return f"the package {name} cannot be unpacked"


def _faulty(name: str, problem: str) -> BuildError:
    return BuildError(f"{_where(name)}: {problem}", _HINT)


# Files of packages from which other files are generated.
SOURCES = re.compile(
    r"usr/share/base-passwd/(?:passwd|group)\.master|usr/share/ca-certificates/.+\.crt"
    r"|usr/share/debianutils/shells(?:\.d/[^/]+)?|usr/share/base-files/[^/]+"
    r"|usr/share/libc-bin/nsswitch\.conf|usr/share/readline/inputrc"
)
_CERTIFICATES = "usr/share/ca-certificates/"
_PYTHON = re.compile(r"usr/bin/python3\.(\d+)")
_SHADOW_GID = 42
_DPKG = "var/lib/dpkg"
Made = Iterator[tuple[Entry, bytes | None]]


@dataclass(slots=True)
class InstalledPackage:
    """Unpacked package: its paths as in the package, and path → MD5 of its conffiles, as far as they are read."""

    control: Control
    listing: list[str] = field(default_factory=list)
    conffiles: dict[str, str] = field(default_factory=dict)


def made(rules: TreeRules, sources: Mapping[str, bytes], seen: Collection[str], mtime: int) -> Made:
    """Yield the files that maintainer scripts would create, as entries with their content.

    `sources` are the contents of the packages' files that SOURCES matches, `seen` are all paths of packages.
    """
    for path, (mode, gid) in sorted(rules.folders.items()):
        yield Entry(path, DIR, mode, gid=gid), None
    for path, text in sorted(rules.links.items()):
        yield _link(path, text)
    for path, source in sorted(rules.copies.items()):
        if source in sources:
            yield Entry(path), sources[source]
    yield from _accounts(sources, mtime)
    yield from _shells(sources)
    yield from _certificates(sources)
    for path, choices in sorted(rules.alternatives.items()):
        choice = next((other for other in choices if other in seen), None)
        if choice and path not in seen:
            name = path.rpartition("/")[2]
            yield _link(f"etc/alternatives/{name}", f"/{choice}")
            yield _link(path, f"/etc/alternatives/{name}")
    # python3-minimal, which has this link, would add scripts that only other packages' scripts run.
    versions = [int(match[1]) for path in seen if (match := _PYTHON.fullmatch(path))]
    if versions:
        yield _link("usr/bin/python3", f"python3.{max(versions)}")


def _accounts(sources: Mapping[str, bytes], mtime: int) -> Made:
    """Yield the account files from base-passwd's masters; passwords go to the shadow files, "*" allows no login."""
    # The date of the last password change, in days since 1970, must be the same for each build.
    aged = f"*:{mtime // 86400}:0:99999:7:::"
    for plain, shadow, secret in (("passwd", "shadow", aged), ("group", "gshadow", "*::")):
        master = sources.get(f"usr/share/base-passwd/{plain}.master")
        if master is not None:
            rows = [line.split(":") for line in master.decode("utf-8", "replace").splitlines()]
            yield Entry(f"etc/{plain}"), _lines(":".join([name, "x", *rest]) for name, _password, *rest in rows)
            yield Entry(f"etc/{shadow}", mode=0o640, gid=_SHADOW_GID), _lines(f"{row[0]}:{secret}" for row in rows)


def _shells(sources: Mapping[str, bytes]) -> Made:
    first = sources.get("usr/share/debianutils/shells")
    if first is not None:
        lines = first.decode("utf-8", "replace").splitlines()
        for path in sorted(sources):
            if path.startswith("usr/share/debianutils/shells.d/"):
                for shell in sources[path].decode("utf-8", "replace").split():
                    other = shell[4:] if shell.startswith("/usr/") else f"/usr{shell}"
                    lines += [name for name in (shell, other) if name not in lines]
        yield Entry("etc/shells"), _lines(lines)


def _certificates(sources: Mapping[str, bytes]) -> Made:
    paths = sorted(path for path in sources if path.startswith(_CERTIFICATES))
    if paths:
        # As in update-ca-certificates, a certificate without a final newline must not damage the next one.
        bundle = b"".join(sources[path].rstrip(b"\n") + b"\n" for path in paths)
        yield Entry("etc/ssl/certs/ca-certificates.crt"), bundle
        yield Entry("etc/ca-certificates.conf"), _lines(path[len(_CERTIFICATES) :] for path in paths)


def _link(path: str, target: str) -> tuple[Entry, None]:
    return Entry(path, SYMLINK, 0o777, target=target), None


def _lines(lines: Iterable[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode("utf-8", "surrogateescape")


def database(installed: Sequence[InstalledPackage]) -> Made:
    """Yield the files of dpkg's database, without maintainer scripts, because these were not run."""
    by_name = sorted(installed, key=lambda package: package.control.fields["package"])
    yield Entry(f"{_DPKG}/status"), "\n".join(map(_stanza, by_name)).encode("utf-8", "surrogateescape")
    yield Entry(f"{_DPKG}/info/format"), b"1\n"
    for package in by_name:
        control, fields = package.control, package.control.fields
        stem = f"{_DPKG}/info/{fields['package']}"
        if fields.get("multi-arch") == "same":
            stem += f":{fields['architecture']}"
        yield Entry(f"{stem}.list"), _lines(f"/{path or '.'}" for path in package.listing)
        if control.md5sums:
            yield Entry(f"{stem}.md5sums"), control.md5sums.encode()
        if control.conffiles:
            yield Entry(f"{stem}.conffiles"), _lines(f"/{path}" for path in control.conffiles)


def _stanza(package: InstalledPackage) -> str:
    lines = package.control.text.split("\n")
    at = next(n for n, line in enumerate(lines) if line.lower().startswith("package:")) + 1
    lines.insert(at, "Status: install ok installed")
    if package.conffiles:
        lines += ["Conffiles:", *(f" /{path} {md5}" for path, md5 in sorted(package.conffiles.items()))]
    return "\n".join(lines) + "\n"


# Folders that are links: files of packages below the first go below the second. Debian has those of /usr since 12
# (base-files creates them since 13); var/run and var/lock come from base-files itself.
_ALIASES = {name: f"usr/{name}" for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32")}
_ALIASES |= {"var/run": "run", "var/lock": "run/lock"}
_ALWAYS = ("bin", "lib", "sbin")
# Limit for files that are read into memory because others are generated from them; none in Debian comes near.
_MAX_SOURCE = 16 << 20


def debian_tree(debs: Sequence[tuple[LockedDeb, Path]], mtime: int) -> Tree:
    """Return the tree of a base from `debs` (locked package, its file); items and their order are reproducible.

    Parents come before their children; the root is left out. Each item has `mtime` (seconds since 1970). Raises
    BuildError, naming the package, for a package that is damaged, differs from the locked one, or shares a file with
    another package.
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
                f"{path}: holds {deb.name} {has[0]} ({has[1]}), but the lock names {deb}",
                "remove the file and fetch it again",
            )
        merge.name, merge.package = deb.name, InstalledPackage(control)
        for entry, content in read_data(path, deb.name):
            yield from merge.item(entry, content)
        installed.append(merge.package)
    files = made(merge.rules, merge.sources, frozenset(merge.seen), mtime)
    for entry, data in [*files, *database(installed)]:
        yield from merge.own(entry, data)


def merged(path: str) -> str:
    """Return the location of a package's `path` in a merged /usr."""
    for alias, real in _ALIASES.items():
        if path.startswith(alias + "/"):
            return real + path[len(alias) :]
    return path


@dataclass(slots=True)
class _Merge:
    """State of the conversion.

    `seen` maps each path in the tree to its kind and package. `name` is the current package's, or envbuild.
    """

    rules: TreeRules
    mtime: int
    seen: dict[str, tuple[str, str]] = field(default_factory=dict)
    sources: dict[str, bytes] = field(default_factory=dict)
    name: str = ""
    package: InstalledPackage = field(init=False)

    def item(self, entry: Entry, content: Readable | None) -> Tree:
        """Yield the items for an entry of the current package, with missing parents."""
        self.package.listing.append(entry.path)
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
        """Yield the items of a file that envbuild adds, unless a package has this path."""
        if entry.path not in self.seen:
            self.name = "envbuild"
            yield from self._parents(entry.path)
            self.seen[entry.path] = (entry.kind, self.name)
            content = None if data is None else io.BytesIO(data)
            yield replace(entry, size=len(data or b""), mtime=self.mtime), content

    def alias(self, alias: str) -> Tree:
        """Yield the link `alias` once, after its target folder; generated.py adds the links in /var later."""
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
        """Return the unread content; keep a copy of it if other files are generated from it."""
        source, conffile = SOURCES.fullmatch(path), entry.path in self.package.control.conffiles
        if not (source or conffile):
            return content
        if entry.size > _MAX_SOURCE:
            raise BuildError(f"{self.name}: /{path} has {entry.size} bytes; the archive is damaged")
        data = content.read()
        if source:
            self.sources[path] = data
        if conffile:
            self.package.conffiles[entry.path] = hashlib.md5(data, usedforsecurity=False).hexdigest()
        return io.BytesIO(data)
