"""conda-lock.yml: the conda packages of all targets of one accelerator, in one file.

The format is conda-lock's unified lock file, version 1 (conda-lock's documentation, "File Formats"; field names
from the published schema https://schemas.conda.org/conda-lock-v1.schema.json), so conda-lock, micromamba and pixi
read the file unchanged. envbuild's own data is in `custom_metadata`, which the format reserves for such data. All
strings are double-quoted: the file is valid YAML, and a line-based reader needs a tenth of a YAML parser's time
(`conda_yaml`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from envbuild.errors import LockError
from envbuild.lock.conda import CondaLock, CondaPackage, conda_platform
from envbuild.lock.conda_yaml import load, package_line
from envbuild.lock.lifecycle import read_lock_file
from envbuild.recipe.targets import ARCHES, Target, target_problem

FORMAT = "1"
_MARK = "envbuild_"  # envbuild's keys in custom_metadata
_HINT = "restore the file from version control, or remove it and run `envbuild lock RECIPE --conda`"
_HEX = {"md5": re.compile(r"[0-9a-f]{32}"), "sha256": re.compile(r"[0-9a-f]{64}")}
_NAME = re.compile(r"[a-z0-9_][a-z0-9_.-]*")
_WORD = re.compile(r"[^\s/#\"'\\]+")
_URL = re.compile(r"(?:https?|file)://[!-~]+")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class CondaPart:
    """Conda packages of one target in the lock file: a CondaLock without the packages that pip adds.

    `channels` are spelled as in the recipe. `pip_digest` is the digest of the pip lock that was resolved against
    exactly these packages, or "" without one.
    """

    recipe: str
    target: str
    recipe_digest: str
    channels: tuple[str, ...]
    packages: tuple[CondaPackage, ...]
    pip_digest: str = ""


def part_of(lock: CondaLock, channels: Sequence[str], pip_digest: str = "") -> CondaPart:
    """Return the part of `lock` that conda-lock.yml holds."""
    return CondaPart(lock.recipe, lock.target, lock.recipe_digest, tuple(channels), lock.packages, pip_digest)


def render(parts: Sequence[CondaPart]) -> str:
    """Return the text of the file with `parts`, all of one accelerator; `parse` returns equal parts."""
    parts = sorted(parts, key=lambda part: conda_platform(Target.parse(part.target)))
    recipe, accelerator = parts[0].recipe, Target.parse(parts[0].target).accelerator
    platforms = [conda_platform(Target.parse(part.target)) for part in parts]
    custom = {f"{_MARK}format": FORMAT, f"{_MARK}recipe": recipe}
    custom[f"{_MARK}accelerator"] = accelerator
    for part, platform in zip(parts, platforms, strict=True):
        custom[f"{_MARK}channels_{platform}"] = " ".join(part.channels)
        if part.pip_digest:
            custom[f"{_MARK}pip_{platform}"] = part.pip_digest.removeprefix("sha256:")
    lines = [
        f"# conda-lock.yml, version 1; made by: envbuild lock {recipe} --conda",
        "version: 1",
        "metadata:",
        "  content_hash:",
        *(
            f"    {platform}: {_text(part.recipe_digest.removeprefix('sha256:'))}"
            for part, platform in zip(parts, platforms, strict=True)
        ),
        "  channels:",
    ]
    for channel in dict.fromkeys(name for part in parts for name in part.channels):
        lines += [f"  - url: {_text(channel)}", "    used_env_vars: []"]
    lines += ["  platforms:", *(f"  - {_text(platform)}" for platform in platforms)]
    lines += ["  sources:", f"  - {_text('recipe.toml')}", "  custom_metadata:"]
    lines += [f"    {key}: {_text(value)}" for key, value in custom.items()]
    rows = sorted(
        ((package, platform) for part, platform in zip(parts, platforms, strict=True)
         for package in part.packages),
        key=lambda row: (row[0].name, row[1]),
    )  # fmt: skip
    lines.append("package:" if rows else "package: []")
    for package, platform in rows:
        lines += _entry(package, platform)
    return "\n".join(lines) + "\n"


def _entry(package: CondaPackage, platform: str) -> Iterator[str]:
    yield f"- name: {_text(package.name)}"
    yield f"  version: {_text(package.version)}"
    yield '  manager: "conda"'
    yield f"  platform: {_text(platform)}"
    yield "  dependencies:" if package.depends else "  dependencies: {}"
    for spec in package.depends:
        name, _, rest = spec.partition(" ")
        yield f"    {_text(name)}: {_text(rest)}"
    yield f"  url: {_text(package.url)}"
    yield "  hash:"
    yield f"    md5: {_text(package.md5)}"
    yield f"    sha256: {_text(package.sha256)}"
    yield '  category: "main"'
    yield "  optional: false"


def _text(value: str) -> str:
    return json.dumps(value)


def canonical_depends(specs: Iterable[str]) -> tuple[str, ...]:
    """Return match specs in the form that the format can hold: one per name, sorted by name.

    The versions of several specs for one name are joined; a spec that names a build is the most specific one and is
    kept alone.
    """
    found: dict[str, str] = {}
    for spec in specs:
        name, _, rest = spec.strip().partition(" ")
        name, rest = name.lower(), " ".join(rest.split())
        before = found.get(name, "")
        if " " in before or not rest or rest == before:
            rest = before
        elif before and " " not in rest and rest != "*" and before != "*":
            rest = f"{before},{rest}"
        found[name] = rest
    return tuple(f"{name} {found[name]}".strip() for name in sorted(found))


def parse(text: str, source: str) -> dict[str, CondaPart]:
    """Parse a file that `render` wrote and return its parts by target; `source` names the file in messages.

    Raises LockError when the text is not such a file, or when it holds entries that envbuild cannot install.
    """
    data = load(text, source, _HINT)
    metadata = _table(data, "metadata", source)
    custom = metadata.get("custom_metadata")
    own = custom if isinstance(custom, dict) else {}
    if own.get(f"{_MARK}format") is None:
        raise LockError(
            f"{source}: was not made by envbuild: metadata has no custom_metadata of it",
            "remove it, or give it another name, and run `envbuild lock RECIPE --conda`",
        )
    if own[f"{_MARK}format"] != FORMAT:
        raise LockError(
            f"{source}: format {own[f'{_MARK}format']!r} is not known (known: {FORMAT})",
            "a newer envbuild wrote it: update envbuild",
        )
    recipe, accelerator = own.get(f"{_MARK}recipe"), own.get(f"{_MARK}accelerator")
    hashes = metadata.get("content_hash")
    if not isinstance(hashes, dict) or not isinstance(recipe, str):
        raise LockError(f"{source}: content_hash or {_MARK}recipe is missing", _HINT)
    packages = _packages(data, source, text)
    parts: dict[str, CondaPart] = {}
    for platform, digest in hashes.items():
        arch = next((a for a in ARCHES if conda_platform(Target("cpu", a)) == platform), None)
        target = f"{accelerator}-{arch}"
        channels, pip = own.get(f"{_MARK}channels_{platform}"), own.get(f"{_MARK}pip_{platform}")
        digests = [digest] if pip is None else [digest, pip]
        good = all(isinstance(value, str) and _DIGEST.fullmatch(value) for value in digests)
        if target_problem(target) or not good or not isinstance(channels, str):
            raise LockError(f"{source}: the metadata of {platform} is damaged", _HINT)
        parts[target] = CondaPart(
            recipe,
            target,
            f"sha256:{digest}",
            tuple(channels.split()),
            packages.pop(platform, ()),
            f"sha256:{pip}" if pip else "",
        )
    if packages:
        raise LockError(f"{source}: {next(iter(packages))} has packages but no content_hash", _HINT)
    return parts


def parse_packages(text: str, source: str) -> dict[str, tuple[CondaPackage, ...]]:
    """Parse any conda-lock.yml of version 1, written by any tool, and return its packages by platform.

    Raises LockError when the text is not such a file, and for entries that envbuild does not install: pip packages,
    and categories other than main.
    """
    return _packages(load(text, source, _HINT), source, text)


def read(path: Path) -> dict[str, CondaPart] | None:
    """Return the parts in `path`, or None when the file does not exist. Raises LockError when it is not readable."""
    return read_lock_file(path, parse)


def _table(data: Mapping[str, Any], key: str, source: str) -> dict[str, Any]:
    value = data.get(key)
    if not isinstance(value, dict):
        raise LockError(f"{source}: {key!r} is missing or no table", _HINT)
    return value


def _packages(data: Mapping[str, Any], source: str, text: str) -> dict[str, tuple[CondaPackage, ...]]:
    if data.get("version") != 1:
        raise LockError(
            f"{source}: version {data.get('version')!r} of conda-lock's format is not known (known: 1)", _HINT
        )
    rows = data.get("package")
    if not isinstance(rows, list):
        raise LockError(f"{source}: 'package' is missing or no list", _HINT)
    found: dict[str, dict[str, CondaPackage]] = {}
    for index, row in enumerate(rows):
        try:
            platform, package = _package(row)
            if found.setdefault(platform, {}).setdefault(package.name, package) is not package:
                raise ValueError(f"{package.name} stands twice for {platform}")
        except ValueError as problem:
            where = f"{source}:{package_line(text, index)}"
            raise LockError(f"{where}: {problem}", _HINT) from None
    return {platform: tuple(by_name[name] for name in sorted(by_name)) for platform, by_name in found.items()}


def _package(row: object) -> tuple[str, CondaPackage]:
    """Return (platform, package) of one entry. Raises ValueError; its text never holds a URL's credentials."""
    if not isinstance(row, dict):
        raise ValueError("an entry of 'package' is no table")
    name, version = row.get("name"), row.get("version")
    if not isinstance(name, str) or not isinstance(version, str):
        raise ValueError("name and version have to be texts")
    if row.get("manager") != "conda":
        raise ValueError(
            f"{name} is a {row.get('manager')} package: envbuild keeps what pip adds in NAME.conda.requirements.txt"
        )
    if row.get("category", "main") != "main" or row.get("optional", False) is not False:
        raise ValueError(f"{name} is of category {row.get('category')!r}: only main is installed")
    platform, url, depends = row.get("platform"), row.get("url"), row.get("dependencies", {})
    if not isinstance(platform, str) or not _WORD.fullmatch(platform):
        raise ValueError(f"{name} has no platform")
    if not isinstance(url, str) or not _URL.fullmatch(url):
        raise ValueError(f"{name} has no URL")
    if "@" in url.split("/")[2] or "/t/" in url:
        raise ValueError(f"the URL of {name} holds credentials")
    if not _NAME.fullmatch(name) or not _WORD.fullmatch(version):
        raise ValueError(f"{name!r} {version!r} is no name and version of a conda package")
    if not isinstance(depends, dict) or not all(
        isinstance(key, str) and key and " " not in key and isinstance(value, str) for key, value in depends.items()
    ):
        raise ValueError(f"the dependencies of {name} are no table of texts")
    hashes = row.get("hash")
    values = {}
    for kind, form in _HEX.items():
        value = hashes.get(kind) if isinstance(hashes, dict) else None
        if not isinstance(value, str) or not form.fullmatch(value):
            raise ValueError(f"{name} has no {kind}")
        values[kind] = value
    subdir, build = file_parts(url, name, version)
    if subdir not in (platform, "noarch"):
        raise ValueError(f"{name} is a package of {subdir}, not of {platform}")
    specs = tuple(f"{key} {depends[key]}".strip() for key in sorted(depends))
    return platform, CondaPackage(name, version, build, subdir, url, values["md5"], values["sha256"], specs)


def file_parts(url: str, name: str, version: str) -> tuple[str, str]:
    """Return (subdir, build) from a package file's URL, .../SUBDIR/NAME-VERSION-BUILD.conda or .tar.bz2.

    Raises ValueError when the URL does not belong to `name` `version`.
    """
    folder, _, file = unquote(url).rpartition("/")
    subdir = folder.rpartition("/")[2]
    stem = file.removesuffix(".conda").removesuffix(".tar.bz2")
    parts = stem.rsplit("-", 2)
    if stem == file or len(parts) != 3 or (parts[0].lower(), parts[1]) != (name, version):
        raise ValueError(f"the URL of {name} is not that of {name} {version}")
    if not _WORD.fullmatch(parts[2]):
        raise ValueError(f"the URL of {name} names no build")
    return subdir, parts[2]
