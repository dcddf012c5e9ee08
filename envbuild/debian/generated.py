"""Files of a base that no package has: those that maintainer scripts would create, and dpkg's database.

Sources: the postinst scripts of base-files 12.4, base-passwd 3.6, ca-certificates 20230311, debianutils 5.7, libc-bin
2.36, readline-common 8.2; update-alternatives(1); shadow(5), gshadow(5); dpkg 1.21, /var/lib/dpkg: status (deb-control
fields, Status and Conffiles added), info/ in format 1.

There is no ld.so.cache: it holds paths that the loader searches anyway (its built-in ones name Debian's
/usr/lib/<triplet>), and ldconfig of another architecture cannot run. There are no hashed links in /etc/ssl/certs: they
serve programs that get this folder as CApath; OpenSSL's default is /usr/lib/ssl/cert.pem, a link to the bundle.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from envbuild.debian.deb import Control
from envbuild.debian.defaults import TreeRules
from envbuild.image.entry import DIR, SYMLINK, Entry

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


@dataclass(frozen=True, slots=True)
class InstalledPackage:
    """A package, its paths as in the package, and the MD5 of each of its conffiles by path."""

    control: Control
    listing: tuple[str, ...]
    conffiles: Mapping[str, str]


def made(rules: TreeRules, sources: Mapping[str, bytes], seen: Collection[str], mtime: int) -> Made:
    """Yield what to add to the packages' files: entries, and the content of each file.

    `sources` are the contents of the files that SOURCES matches, `seen` are all paths of packages.
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
    """Yield the files of dpkg's database. Maintainer scripts are left out, because they were not run."""
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
