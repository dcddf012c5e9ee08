"""dpkg's database of installed packages, which scanners and dpkg-query read.

Source: dpkg 1.21, /var/lib/dpkg: status (deb-control fields, Status and Conffiles added), info/ in format 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from envbuild.debian.deb import Control
from envbuild.image.entry import Entry

_FOLDER = "var/lib/dpkg"


@dataclass(frozen=True, slots=True)
class InstalledPackage:
    """A package, its paths as in the package, and the MD5 of each of its conffiles by path."""

    control: Control
    listing: tuple[str, ...]
    conffiles: Mapping[str, str]


def database(installed: Sequence[InstalledPackage]) -> Iterator[tuple[Entry, bytes]]:
    """Yield the files of the database. Maintainer scripts are left out, because they were not run."""
    by_name = sorted(installed, key=lambda package: package.control.fields["package"])
    yield (Entry(f"{_FOLDER}/status"), "\n".join(map(_stanza, by_name)).encode("utf-8", "surrogateescape"))
    yield Entry(f"{_FOLDER}/info/format"), b"1\n"
    for package in by_name:
        fields = package.control.fields
        stem = f"{_FOLDER}/info/{fields['package']}"
        if fields.get("multi-arch") == "same":
            stem += f":{fields['architecture']}"
        paths = "".join(f"/{path or '.'}\n" for path in package.listing)
        yield Entry(f"{stem}.list"), paths.encode("utf-8", "surrogateescape")
        if package.control.md5sums:
            yield Entry(f"{stem}.md5sums"), package.control.md5sums.encode()
        if package.control.conffiles:
            names = "".join(f"/{path}\n" for path in package.control.conffiles)
            yield Entry(f"{stem}.conffiles"), names.encode("utf-8", "surrogateescape")


def _stanza(package: InstalledPackage) -> str:
    lines = package.control.text.split("\n")
    at = next(n for n, line in enumerate(lines) if line.lower().startswith("package:")) + 1
    lines.insert(at, "Status: install ok installed")
    if package.conffiles:
        rows = [f" /{path} {md5}" for path, md5 in sorted(package.conffiles.items())]
        lines += ["Conffiles:", *rows]
    return "\n".join(lines) + "\n"
