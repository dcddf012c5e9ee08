"""Wheel lock: one hash-pinned requirements file per target.

The format is pip's requirements file in hash-checking mode (pip documentation, "Secure installs"), so `pip
install --require-hashes`, `uv pip sync` and a Dockerfile read it unchanged. envbuild's own data is in comments
at the top. The file never holds a URL: the site decides which index or mirror serves a hash.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from envbuild.base.errors import LockError
from envbuild.base.files import parse_json
from envbuild.base.packages import json_digest
from envbuild.base.text import normalise
from envbuild.lock.lifecycle import package_changes, read_lock_file
from envbuild.recipe.sources import LockedPackage as LockedPackage

FORMAT = 1
_KEYS = ("recipe", "target", "python", "platform", "recipe-digest")
_HEADER = re.compile(rf"#\s*({'|'.join(_KEYS)})\s*:\s*(\S+)\s*$")
# Forms of values that become words of commands and parts of paths.
_FORMS = {"python": re.compile(r"\d\.\d{1,2}"), "platform": re.compile(r"[a-z0-9_]+-manylinux_2_\d{1,3}")}
_AS_OF = re.compile(r"#\s*exclude-newer-as-of\s*:\s*(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ)$")
_OVERRIDE = re.compile(r"#\s*override\s*:\s*(.+)$")
_WARNING = re.compile(r"#\s*warning\s*:\s*(.+)$")
_PIN = re.compile(r"([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)==([^\s;@\\]+)\s*(.*)$")
_BUILT = re.compile(r"#\s*built\s*:\s*(.+)$")
_FIELDS = {
    "name": re.compile(r"[a-z0-9]+(-[a-z0-9]+)*"),
    "version": re.compile(r"[A-Za-z0-9][A-Za-z0-9.!+_-]*"),
    "sha256": re.compile(r"[0-9a-f]{64}"),
    "commit": re.compile(r"([0-9a-f]{40,64})?"),
    "ref": re.compile(r"[A-Za-z0-9._/+-]*"),
}
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})$")
_FAULTS = 100
FIRST_LINE = "# envbuild lock, format "


@dataclass(frozen=True, slots=True)
class BuiltPackage:
    """A distribution whose wheel envbuild builds: normalised `name`, exact `version`, sha256 of its source archive.

    `commit` is the git commit to which the requested branch or tag `ref` resolved. `build` are the wheels of the
    build tools.
    """

    name: str
    version: str
    sha256: str
    commit: str = ""
    ref: str = ""
    build: tuple[LockedPackage, ...] = ()


@dataclass(frozen=True, slots=True)
class Lock:
    """Resolution of one target.

    `recipe_digest` covers the recipe's inputs of the lock; every build that uses the lock repeats its `warnings`.
    `built` are the packages whose wheels envbuild builds from source. `overrides` replaced requirements of packages.
    Spans in `exclude_newer` of the recipe counted back from `as_of`, "" without such a span.
    """

    recipe: str
    target: str
    python: str
    platform: str
    recipe_digest: str
    packages: tuple[LockedPackage, ...]
    warnings: tuple[str, ...] = field(default=(), compare=False)
    built: tuple[BuiltPackage, ...] = ()
    overrides: tuple[str, ...] = ()
    as_of: str = ""

    @property
    def digest(self) -> str:
        """sha256 of the packages to install, independent of comments and layout."""
        content: list[object] = [self.target, self.python, [[p.name, p.version, p.hashes] for p in self.packages]]
        if self.built:  # keeps the digest of locks of wheels alone unchanged
            content.append([built_row(package) for package in self.built])
        return json_digest(content)

    @property
    def versions(self) -> dict[str, str]:
        """Version of each distribution by its name."""
        return {package.name: package.version for package in self.packages} | {
            package.name: package.version for package in self.built
        }


def lock_file_name(target: str, python: str = "") -> str:
    """Return the name of the lock file of `target`, in the recipe's folder; `python` is one of its other Pythons."""
    return f"{target}.python{python}.requirements.txt" if python else f"{target}.requirements.txt"


def render(lock: Lock) -> str:
    """Return the text of the lock file; `parse` returns an equal lock."""
    values = (lock.recipe, lock.target, lock.python, lock.platform, lock.recipe_digest)
    head = [
        f"{FIRST_LINE}{FORMAT}; made by: envbuild lock {lock.recipe} --target {lock.target}",
        *(f"# {key}: {value}" for key, value in zip(_KEYS, values, strict=True)),
        *(f"# exclude-newer-as-of: {as_of}" for as_of in [lock.as_of] if as_of),
        *(f"# override: {override}" for override in lock.overrides),
        *(f"# warning: {warning}" for warning in lock.warnings),
        *(f"# built: {json.dumps(built_row(package))}" for package in lock.built),
    ]
    return "\n".join(head) + "\n" + requirements(lock.packages)


def requirements(packages: Sequence[LockedPackage]) -> str:
    """Return `packages` as the lines of a requirements file, without the header."""
    lines = [
        " \\\n    ".join(
            [f"{package.name}=={package.version}", *(f"--hash=sha256:{digest}" for digest in package.hashes)]
        )
        for package in packages
    ]
    return "".join(f"{line}\n" for line in lines)


def parse(text: str, source: str) -> Lock:
    """Parse a lock file's text; `source` names the file in messages.

    Raises LockError that lists the faulty lines, at most 100: not a pin, no sha256, a duplicate package. A missing
    header line is also listed.
    """
    header: dict[str, str] = {}
    packages: dict[str, LockedPackage] = {}
    overrides: list[str] = []
    as_of = ""
    warnings: list[str] = []
    built: list[BuiltPackage] = []
    faults: list[str] = []
    if not text.startswith(FIRST_LINE):
        raise LockError(f"{source}: not an envbuild lock", "delete it and run `envbuild lock` again")
    format_text = text[len(FIRST_LINE) :].partition(";")[0].strip()
    if format_text != str(FORMAT):
        raise LockError(
            f"{source}: lock format {format_text!r}; this envbuild reads format {FORMAT}",
            "use the envbuild version that wrote it, or make it again with `envbuild lock`",
        )
    for number, line in logical_lines(text):
        if len(faults) == _FAULTS:
            break
        if line.startswith("#"):
            if match := _HEADER.match(line):
                header[match[1]] = match[2]
            elif match := _AS_OF.match(line):
                as_of = match[1]
            elif match := _OVERRIDE.match(line):
                overrides.append(match[1])
            elif match := _WARNING.match(line):
                warnings.append(match[1])
            elif match := _BUILT.match(line):
                try:
                    built.append(parse_built(match[1]))
                except ValueError as error:
                    faults.append(f"{source}:{number}: not a built package: {error}")
            continue
        pin = _PIN.match(line)
        if not pin:
            faults.append(f"{source}:{number}: expected name==version --hash=sha256:…, got {line!r}")
            continue
        name, words = normalise(pin[1]), pin[3].split()
        hashes = [match[1] for word in words if (match := _HASH.match(word))]
        if not words or len(hashes) != len(words):
            faults.append(f"{source}:{number}: {pin[1]} needs --hash=sha256: and 64 hex digits, only")
        elif name in packages:
            faults.append(f"{source}:{number}: {pin[1]} is locked twice")
        else:
            packages[name] = LockedPackage(name, pin[2], tuple(hashes))
    names = [*packages, *(package.name for package in built)]
    faults += [f"{source}: {package.name} is locked twice" for package in built if names.count(package.name) > 1]
    faults += [f"{source}: the header line '# {key}: …' is missing" for key in _KEYS if key not in header]
    faults += [
        f"{source}: the header line '# {key}: {header[key]:.80}' has another form"
        for key, form in _FORMS.items()
        if key in header and not form.fullmatch(header[key])
    ]
    if faults:
        raise LockError("\n".join(faults), "locks are not edited by hand: run `envbuild lock` again")
    recipe, target, python, platform, digest = (header[key] for key in _KEYS)
    found_packages = tuple(packages.values())
    return Lock(
        recipe, target, python, platform, digest, found_packages, tuple(warnings), tuple(built), tuple(overrides), as_of
    )


def built_row(built_package: BuiltPackage) -> dict[str, object]:
    """Return a built package as the JSON object of its line in the lock; `parse_built` reads it back."""
    row = {
        "name": built_package.name,
        "version": built_package.version,
        "sha256": built_package.sha256,
        "commit": built_package.commit,
        "ref": built_package.ref,
    }
    build = {wheel.name: [wheel.version, *wheel.hashes] for wheel in built_package.build}
    return {key: value for key, value in row.items() if value} | {"build": build}


def parse_built(text: str) -> BuiltPackage:
    """Return the package in a JSON object of a lock. Raises ValueError for a malformed object."""
    row = parse_json(text)
    if not isinstance(row, dict) or not row.keys() <= {*_FIELDS, "build"} or not isinstance(row.get("build"), dict):
        raise ValueError("expected an object with name, version, sha256, commit, ref and build")
    rows = []
    for name, wheel in row["build"].items():
        known = wheel if isinstance(wheel, list) and len(wheel) > 1 else [""]
        if not _good("name", name) or not _good("version", known[0]) or not all(_good("sha256", x) for x in known[1:]):
            raise ValueError(f"its build wheel {name!r} is invalid")
        rows.append(LockedPackage(name, known[0], tuple(known[1:])))
    texts = {key: row.get(key, "") for key in _FIELDS}
    for key, value in texts.items():
        if not _good(key, value):
            raise ValueError(f"its {key} is invalid")
    return BuiltPackage(build=tuple(rows), **texts)


def _good(key: str, value: object) -> bool:
    return isinstance(value, str) and _FIELDS[key].fullmatch(value) is not None


def logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield lines joined at trailing backslashes, with the number of the first line; blank lines are left out.

    As for pip, the backslash at the end of a comment joins nothing.
    """
    start, parts = 0, list[str]()
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.strip()
        start = start if parts else number
        if parts or line:
            parts.append(line.removesuffix("\\").rstrip())
        if parts and (not line.endswith("\\") or line.startswith("#")):
            yield start, " ".join(parts)
            parts.clear()
    if parts:
        yield start, " ".join(parts)


def without_credentials(text: str) -> str:
    """Return `text` without user names and passwords in its URLs; an exported PEP 751 file must not hold them."""
    return re.sub(r"(://)[^/@\s\"']+@", r"\1", text)


def wheel_files(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the files of a PEP 751 row: its wheels on an index, or the file of a direct reference."""
    return [row["archive"]] if "archive" in row else list(row.get("wheels", []))


def read(path: Path) -> Lock | None:
    """Return the lock in `path`, or None when the file does not exist. Raises LockError when it is not readable."""
    return read_lock_file(path, parse)


def changes(old: Lock | None, new: Lock) -> list[str]:
    """Return the changes of an update, one line per package, sorted by name."""

    def files(was: LockedPackage, now: LockedPackage) -> str:
        same = set(was.hashes) == set(now.hashes)
        return "" if same else f" (other files: {len(was.hashes)} -> {len(now.hashes)} hashes)"

    before = {p.name: p for p in old.packages} if old else {}
    lines = package_changes(before, {p.name: p for p in new.packages}, lambda p: p.version, files)
    sources = {p.name: p for p in old.built} if old else {}
    lines += package_changes(
        sources,
        {p.name: p for p in new.built},
        lambda p: f"{p.version} {p.commit[:12]}".strip() + " (built)",
        lambda was, now: "" if was == now else " (another archive, or other build requirements)",
    )
    return lines
