"""conda-lock.yml: the conda packages of all targets of one accelerator, in one file.

The format is conda-lock's unified lock file, version 1 (https://schemas.conda.org/conda-lock-v1.schema.json), so
conda-lock, micromamba and pixi read the file unchanged. envbuild's own data is in `custom_metadata`, which the format
reserves for such data. All strings are double-quoted, so `read_lines` needs a tenth of a YAML parser's time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from envbuild.base.errors import LockError
from envbuild.base.yaml_reader import parse_yaml
from envbuild.lock.conda import WORD, CondaLock, CondaPackage, conda_platform, entry, file_parts
from envbuild.recipe.targets import ARCHES, Target, target_problem

FORMAT = "1"
MARK = "envbuild_"  # envbuild's keys in custom_metadata
_HINT = "restore the file from version control, or remove it and run `envbuild lock RECIPE --conda`"
_HEX = {"md5": re.compile(r"[0-9a-f]{32}"), "sha256": re.compile(r"[0-9a-f]{64}")}
_AS_OF = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ)?")
_NAME = re.compile(r"[a-z0-9_][a-z0-9_.-]*")
_URL = re.compile(r"(?:https?|file)://[!-~]+")
_text = json.dumps
# The largest lock files in use have a few megabytes; a larger file is not a lock.
_LIMIT = 8 << 20
# A line of envbuild's own files: no others are indented deeper.
_LINE = re.compile(r'( {0,8})(- )?(?:([a-zA-Z0-9_-]+|"[a-z0-9_.-]+"):(?: |$))?("[^"\\]*"|1|false|\[\]|\{\})?')
_Row = tuple[int, bool, str | None, str | None]  # indent, whether an element of a list, key, value
_FIRST = re.compile(r"^\s*- (?:name|version|manager|platform|url|category)\b", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class CondaPart:
    """Conda packages of one target in the lock file: a CondaLock without the packages that pip adds.

    `channels` are as in the recipe; `pip_digest` is that of the pip lock resolved against these packages, or "";
    `as_of` as in CondaLock.
    """

    recipe: str
    target: str
    recipe_digest: str
    channels: tuple[str, ...]
    packages: tuple[CondaPackage, ...]
    pip_digest: str = ""
    as_of: str = ""

    @property
    def platform(self) -> str:
        """Platform of the target in conda's spelling."""
        return conda_platform(Target.parse(self.target))


def part_of(lock: CondaLock, channels: Sequence[str], pip_digest: str = "") -> CondaPart:
    """Return the part of `lock` that conda-lock.yml holds."""
    return CondaPart(
        lock.recipe, lock.target, lock.recipe_digest, tuple(channels), lock.packages, pip_digest, lock.as_of
    )


def render(parts: Iterable[CondaPart]) -> str:
    """Return the text of the file with `parts`, all of one accelerator; `parse` returns equal parts."""
    parts = sorted(parts, key=lambda part: part.platform)
    recipe, accelerator = parts[0].recipe, Target.parse(parts[0].target).accelerator
    custom = {"format": FORMAT, "recipe": recipe, "accelerator": accelerator}
    for part in parts:
        custom[f"channels_{part.platform}"] = " ".join(part.channels)
        if part.pip_digest:
            custom[f"pip_{part.platform}"] = part.pip_digest.removeprefix("sha256:")
        if part.as_of:
            custom[f"exclude_newer_as_of_{part.platform}"] = part.as_of
    lines = [f"# conda-lock.yml, version 1; made by: envbuild lock {recipe} --conda", "version: 1", "metadata:"]
    lines.append("  content_hash:")
    lines += [f"    {part.platform}: {_text(part.recipe_digest.removeprefix('sha256:'))}" for part in parts]
    lines.append("  channels:")
    for channel in dict.fromkeys(name for part in parts for name in part.channels):
        lines += [f"  - url: {_text(channel)}", "    used_env_vars: []"]
    lines += ["  platforms:", *(f"  - {_text(part.platform)}" for part in parts)]
    lines += ["  sources:", f"  - {_text('recipe.toml')}", "  custom_metadata:"]
    lines += [f"    {MARK}{key}: {_text(value)}" for key, value in custom.items()]
    rows = [(package.name, part.platform, package) for part in parts for package in part.packages]
    lines.append("package:" if rows else "package: []")
    for name, platform, package in sorted(rows, key=lambda row: row[:2]):
        hashes = {"md5": package.md5, "sha256": package.sha256}
        lines += entry(name, package.version, "conda", platform, package.depends, package.url, hashes)
    return "\n".join(lines) + "\n"


def parse(text: str, source: str) -> dict[str, CondaPart]:
    """Parse a file that `render` wrote and return its parts by target; `source` names the file in messages.

    Raises LockError when the text is not such a file, or when it holds entries that envbuild cannot install.
    """
    data = _load(text, source)
    metadata = data.get("metadata")
    if not isinstance(metadata, dict):
        raise LockError(f"{source}: 'metadata' is missing or not a table", _HINT)
    custom = metadata.get("custom_metadata")
    own = custom if isinstance(custom, dict) else {}
    version = own.get(f"{MARK}format")
    if version is None:
        raise LockError(
            f"{source}: was not made by envbuild: metadata has no custom_metadata of it",
            "remove it, or give it another name, and run `envbuild lock RECIPE --conda`",
        )
    if version != FORMAT:
        raise LockError(
            f"{source}: format {version!r} is not known (known: {FORMAT})", "a newer envbuild wrote it: update envbuild"
        )
    recipe, accelerator = own.get(f"{MARK}recipe"), own.get(f"{MARK}accelerator")
    hashes = metadata.get("content_hash")
    if not isinstance(hashes, dict) or not isinstance(recipe, str):
        raise LockError(f"{source}: content_hash or {MARK}recipe is missing", _HINT)
    packages = _packages(data, source, text)
    parts: dict[str, CondaPart] = {}
    for platform, digest in hashes.items():
        arch = next((a for a in ARCHES if conda_platform(Target("cpu", a)) == platform), None)
        target = f"{accelerator}-{arch}"
        channels, pip = own.get(f"{MARK}channels_{platform}"), own.get(f"{MARK}pip_{platform}")
        as_of = own.get(f"{MARK}exclude_newer_as_of_{platform}", "")
        digests = [digest] if pip is None else [digest, pip]
        good = all(isinstance(value, str) and _HEX["sha256"].fullmatch(value) for value in digests)
        good = good and isinstance(as_of, str) and _AS_OF.fullmatch(as_of) is not None
        if target_problem(target) or not good or not isinstance(channels, str):
            raise LockError(f"{source}: the metadata of {platform} is damaged", _HINT)
        parts[target] = CondaPart(
            recipe,
            target,
            f"sha256:{digest}",
            tuple(channels.split()),
            packages.pop(platform, ()),
            f"sha256:{pip}" if pip else "",
            as_of,
        )
    if packages:
        raise LockError(f"{source}: {next(iter(packages))} has packages but no content_hash", _HINT)
    return parts


def parse_packages(text: str, source: str) -> dict[str, tuple[CondaPackage, ...]]:
    """Parse any conda-lock.yml of version 1, written by any tool, and return its packages by platform.

    Raises LockError for any other text, and for entries that envbuild does not install: of pip, or not of `main`.
    """
    return _packages(_load(text, source), source, text)


def _packages(data: Mapping[str, Any], source: str, text: str) -> dict[str, tuple[CondaPackage, ...]]:
    if data.get("version") != 1:
        raise LockError(
            f"{source}: version {data.get('version')!r} of conda-lock's format is not known (known: 1)", _HINT
        )
    rows = data.get("package")
    if not isinstance(rows, list):
        raise LockError(f"{source}: 'package' is missing or not a list", _HINT)
    packages: dict[str, dict[str, CondaPackage]] = {}
    for index, row in enumerate(rows):
        try:
            platform, package = _package(row)
            if packages.setdefault(platform, {}).setdefault(package.name, package) is not package:
                raise ValueError(f"{package.name} is listed twice for {platform}")
        except ValueError as problem:
            where = f"{source}:{_line_of(text, index)}"
            raise LockError(f"{where}: {problem}", _HINT) from None
    return {platform: tuple(by_name[name] for name in sorted(by_name)) for platform, by_name in packages.items()}


def _package(row: object) -> tuple[str, CondaPackage]:
    """Return (platform, package) of one entry. Raises ValueError; its text never holds a URL's credentials."""
    if not isinstance(row, dict):
        raise ValueError("an entry of 'package' is not a table")
    name, version = row.get("name"), row.get("version")
    if not isinstance(name, str) or not isinstance(version, str):
        raise ValueError("name and version must be strings")
    if row.get("manager") != "conda":
        raise ValueError(
            f"{name} is a {row.get('manager')} package: envbuild keeps what pip adds in NAME.conda.requirements.txt"
        )
    if row.get("category", "main") != "main" or row.get("optional", False) is not False:
        raise ValueError(f"{name} is of category {row.get('category')!r}: only main is installed")
    platform, url, depends = row.get("platform"), row.get("url"), row.get("dependencies", {})
    if not isinstance(platform, str) or not WORD.fullmatch(platform):
        raise ValueError(f"{name} has no platform")
    if not isinstance(url, str) or not _URL.fullmatch(url):
        raise ValueError(f"{name} has no URL")
    if "@" in url.split("/")[2] or "/t/" in url:
        raise ValueError(f"the URL of {name} holds credentials")
    if not _NAME.fullmatch(name) or not WORD.fullmatch(version):
        raise ValueError(f"{name!r} {version!r} are not the name and version of a conda package")
    if not isinstance(depends, dict) or not all(
        isinstance(key, str) and key and " " not in key and isinstance(value, str) for key, value in depends.items()
    ):
        raise ValueError(f"the dependencies of {name} are not a table of strings")
    hashes: dict[str, Any] = row["hash"] if isinstance(row.get("hash"), dict) else {}
    for kind, form in _HEX.items():
        if not isinstance(hashes.get(kind), str) or not form.fullmatch(hashes[kind]):
            raise ValueError(f"{name} has no {kind}")
    subdir, build = file_parts(url, name, version)
    if subdir not in (platform, "noarch"):
        raise ValueError(f"{name} is a package of {subdir}, not of {platform}")
    specs = tuple(f"{key} {depends[key]}".strip() for key in sorted(depends))
    return platform, CondaPackage(name, version, build, subdir, url, hashes["md5"], hashes["sha256"], specs)


def _load(text: str, source: str) -> dict[str, Any]:
    """Return the table in a YAML document. Raises LockError, with the line, when there is none."""
    if len(text) > _LIMIT:
        raise LockError(f"{source}: {len(text) >> 20} MiB are too many for a lock", _HINT)
    own = read_lines(text)
    data = own
    if data is None:  # no tool writes aliases into a lock
        documents = parse_yaml(text, source, LockError, _HINT, typ="safe", aliases=0)
        data = documents[0] if len(documents) == 1 else None
    if not isinstance(data, dict):
        raise LockError(f"{source}: not a YAML table", _HINT)
    return data


def read_lines(text: str) -> dict[str, Any] | None:
    """Return the contents of `text` if it has the form that `render` writes (no strings with escapes), else None."""
    rows: list[_Row] = []
    for line in text.split("\n"):
        if line and line[0] != "#":
            match = _LINE.fullmatch(line)
            if match is None:
                return None
            rows.append((len(match[1]), match[2] is not None, match[3], match[4]))
    rows.reverse()
    try:
        table = _take(rows, 0) if rows else {}
    except ValueError:
        return None
    return table if isinstance(table, dict) and not rows else None


def _take(rows: list[_Row], indent: int) -> dict[str, Any] | list[Any]:
    """Return the table or list at the end of `rows`, in reverse order, and remove its rows. Raises ValueError."""
    if not rows or rows[-1][0] != indent:
        raise ValueError("a key without a value")
    table: dict[str, Any] = {}
    listed: list[Any] = []
    is_list = rows[-1][1]
    while rows and rows[-1][:2] == (indent, is_list):
        _, _, key, value = rows.pop()
        if is_list and key is None and value is not None and value[0] == '"':
            listed.append(value[1:-1])
        elif is_list and key is not None:  # the first key of a table
            rows.append((indent + 2, False, key, value))
            listed.append(_take(rows, indent + 2))
        elif key is None or (key := key.strip('"')) in table:
            raise ValueError(f"not as `render` writes it: {key}: {value}")
        elif value is None:  # a list is at the level of its key
            table[key] = _take(rows, indent if rows and rows[-1][1] else indent + 2)
        else:
            table[key] = value[1:-1] if value[0] == '"' else json.loads(value)
    return listed if is_list else table


def _line_of(text: str, index: int) -> int:
    """Return the line where entry `index` of `package` begins, in the layout that all tools use."""
    start = re.search(r"^package:", text, re.MULTILINE)
    at = start.end() if start else 0
    entry = next(islice(_FIRST.finditer(text, at), index, None), None)
    return text.count("\n", 0, entry.end() if entry else at) + 1
