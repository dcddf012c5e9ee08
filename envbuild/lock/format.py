"""Wheel lock: one hash-pinned requirements file per target.

The format is pip's requirements file in hash-checking mode (pip documentation, "Secure installs"), so `pip
install --require-hashes`, `uv pip sync` and a Dockerfile read it unchanged. envbuild's own data is in comments
at the top. The file never holds a URL: the site decides which index or mirror serves a hash.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from envbuild.errors import LockError
from envbuild.lock.lifecycle import package_changes, read_lock_file
from envbuild.names import normalise

FORMAT = 1
_KEYS = ("recipe", "target", "python", "platform", "recipe-digest")
_HEADER = re.compile(rf"#\s*({'|'.join(_KEYS)})\s*:\s*(\S+)\s*$")
_WARNING = re.compile(r"#\s*warning\s*:\s*(.+)$")
_PIN = re.compile(r"([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)==([^\s;@\\]+)\s*(.*)$")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})$")
_FAULTS = 100
_FIRST_LINE = "# envbuild lock, format "


@dataclass(frozen=True, slots=True)
class LockedPackage:
    """One distribution: normalised `name` (PEP 503), exact `version`, sha256 of each fitting wheel."""

    name: str
    version: str
    hashes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Lock:
    """Resolution of one target.

    `recipe_digest` covers what affects it in the recipe; every build that uses the lock repeats its `warnings`.
    """

    recipe: str
    target: str
    python: str
    platform: str
    recipe_digest: str
    packages: tuple[LockedPackage, ...]
    warnings: tuple[str, ...] = field(default=(), compare=False)

    @property
    def digest(self) -> str:
        """sha256 of the packages to install, independent of comments and layout."""
        content = [self.target, self.python, [[p.name, p.version, p.hashes] for p in self.packages]]
        return "sha256:" + hashlib.sha256(json.dumps(content).encode()).hexdigest()

    @property
    def versions(self) -> dict[str, str]:
        """Version of each distribution by its name."""
        return {package.name: package.version for package in self.packages}


def lock_file_name(target: str) -> str:
    """Return the name of the lock file of `target`, in the recipe's folder."""
    return f"{target}.requirements.txt"


def render(lock: Lock) -> str:
    """Return the text of the lock file; `parse` returns an equal lock."""
    values = (lock.recipe, lock.target, lock.python, lock.platform, lock.recipe_digest)
    head = [
        f"{_FIRST_LINE}{FORMAT}; made by: envbuild lock {lock.recipe} --target {lock.target}",
        *(f"# {key}: {value}" for key, value in zip(_KEYS, values, strict=True)),
        *(f"# warning: {warning}" for warning in lock.warnings),
    ]
    return "\n".join(head) + "\n" + requirements(lock.packages)


def requirements(packages: Sequence[LockedPackage]) -> str:
    """Return `packages` as the lines of a requirements file, without the header."""
    lines = [
        " \\\n    ".join([f"{package.name}=={package.version}", *(f"--hash=sha256:{one}" for one in package.hashes)])
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
    warnings: list[str] = []
    faults: list[str] = []
    if not text.startswith(_FIRST_LINE):
        raise LockError(f"{source}: not an envbuild lock", "delete it and run `envbuild lock` again")
    found = text[len(_FIRST_LINE) :].partition(";")[0].strip()
    if found != str(FORMAT):
        raise LockError(
            f"{source}: lock format {found!r}; this envbuild reads format {FORMAT}",
            "use the envbuild version that wrote it, or make it again with `envbuild lock`",
        )
    for number, line in logical_lines(text):
        if len(faults) == _FAULTS:
            break
        if line.startswith("#"):
            if match := _HEADER.match(line):
                header[match[1]] = match[2]
            elif match := _WARNING.match(line):
                warnings.append(match[1])
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
    faults += [f"{source}: the header line '# {key}: …' is missing" for key in _KEYS if key not in header]
    if faults:
        raise LockError("\n".join(faults), "locks are not edited by hand: run `envbuild lock` again")
    recipe, target, python, platform, digest = (header[key] for key in _KEYS)
    return Lock(recipe, target, python, platform, digest, tuple(packages.values()), tuple(warnings))


def logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield lines joined at trailing backslashes, with the number of the first line; blank lines are left out."""
    start, parts = 0, list[str]()
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.strip()
        start = start if parts else number
        if parts or line:
            parts.append(line.removesuffix("\\").rstrip())
        if parts and not line.endswith("\\"):
            yield start, " ".join(parts)
            parts.clear()
    if parts:
        yield start, " ".join(parts)


def without_credentials(text: str) -> str:
    """Return `text` without user names and passwords in its URLs; an exported PEP 751 file must not hold them."""
    return re.sub(r"(://)[^/@\s\"']+@", r"\1", text)


def read(path: Path) -> Lock | None:
    """Return the lock in `path`, or None when the file does not exist. Raises LockError when it is not readable."""
    return read_lock_file(path, parse)


def changes(old: Lock | None, new: Lock) -> list[str]:
    """Return the changes of an update, one line per package, sorted by name."""

    def files(was: LockedPackage, now: LockedPackage) -> str:
        same = set(was.hashes) == set(now.hashes)
        return "" if same else f" (other files: {len(was.hashes)} -> {len(now.hashes)} hashes)"

    before = {p.name: p for p in old.packages} if old else {}
    return package_changes(before, {p.name: p for p in new.packages}, lambda p: p.version, files)
