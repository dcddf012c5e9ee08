"""Statements of a source file (packages, Python, index …), and the draft of a recipe."""

from __future__ import annotations

import codecs
import functools
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.markers import InvalidMarker, Marker, UndefinedComparison, UndefinedEnvironmentName

from envbuild.base.errors import RecipeError, UsageError
from envbuild.base.files import read_small
from envbuild.base.text import normalise
from envbuild.base.toml import Document, list_at, parse_toml, table_at, table_text, value_at
from envbuild.recipe.load import LoadedRecipe, decode_recipe
from envbuild.recipe.model import NAME_PATTERN, PYTHONS
from envbuild.recipe.targets import ARCHES

OTHER_SYSTEM = "for another operating system: envbuild builds for Linux"
NOT_IN_IMAGE = "of a stage that is not in the final image"
BRANCH = "in a branch or loop of the shell that envbuild does not evaluate: name what you need with --from"
NOT_TAKEN = "in a branch of the shell that the values of ARG and ENV do not take"
UNUSED_INDEX = "an explicit index that no package names"
UNUSUAL_FILE = "not the usual name, so the import of its folder leaves it out: name it with --from"
INDEX = "the site decides which index serves a package: name it in pip's configuration, or in `indexes`"
TOOL = "a setting of that tool, not a package"
BOUND = (
    "the target has this index; that the package comes from it alone is said in [indexes] of the recipe and the site"
)
OWN = "the project itself: name its extras with --extra; own code belongs to [project]"
OWN_NAME = (
    "a package of this workspace or folder: under its bare name an index would serve somebody else's package;"
    " own code belongs to [project]"
)
SOURCE = "a source other than an index or git; give its wheel to an index or a find-links folder of the site"


# The environment of markers on Linux, without architecture and Python.
LINUX = {
    "sys_platform": "linux",
    "platform_system": "Linux",
    "os_name": "posix",
    "extra": "",
    "implementation_name": "cpython",
    "platform_python_implementation": "CPython",
}
_EXTRAS = re.compile(r"""extra (?:==|!=) ['"][^'"]*['"]|['"][^'"]*['"] (?:not )?in (?:extras|dependency_groups)""")


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement of a source, at `place` (FILE:LINE).

    `kind` is the kind of its content: requirement, constraint, override, age (`exclude_newer`), pin (of a lock), conda,
    conda-pin, channel, index, platform (conda's), python (a specifier), base, env, workdir, package (Debian's), fabric,
    project (the folder of own code, relative to the recipe's) or name.
    `group` lists its extras, dependency groups, features or categories, separated by blanks, "" for none;
    `platform` restricts it to one conda platform. A statement with a `reason` is not carried into the recipe.
    """

    kind: str
    text: str
    place: str
    group: str = ""
    platform: str = ""
    reason: str = ""


def linux_places(arches: Iterable[str] = ARCHES) -> list[tuple[str, str]]:
    """Return all pairs of `arches` and Pythons, the Linux environments for which markers are evaluated."""
    return [(arch, python) for arch in arches for python in PYTHONS]


@functools.lru_cache(maxsize=4096)
def _parsed(marker: str) -> Marker:
    return Marker(marker)


def for_linux(marker: str, places: Iterable[tuple[str, str]] | None = None) -> bool:
    """Return whether an environment marker (PEP 508) is true on Linux at one of `places` (all, for None).

    Clauses about extras and invalid markers count as true.
    """
    if not marker.strip():
        return True
    try:
        parsed = _parsed(_EXTRAS.sub("python_version >= '3'", marker))
        names = ("platform_machine", "python_version", "python_full_version")
        return any(
            parsed.evaluate(LINUX | dict(zip(names, (arch, one, f"{one}.9"), strict=True)))
            for arch, one in (linux_places() if places is None else places)
        )
    except (InvalidMarker, UndefinedComparison, UndefinedEnvironmentName):
        return True


def lost(text: object, place: str, reason: str, group: str = "") -> Statement:
    """Return a statement that is not carried, with the reason."""
    return Statement("lost", " ".join(str(text).split()), place, group, reason=reason)


def git_address(about: Mapping[str, Any]) -> str:
    """Return the address of a git repository in a requirement, "" if `about`, a table of poetry or uv, names none."""
    url = str(about.get("git", ""))
    # scp's form, which git accepts: git@host:path
    url = re.sub(r"^(?:([^@/:]+)@)?([^/:@]+):(?!//)", lambda found: f"ssh://{found[1] or 'git'}@{found[2]}/", url)
    ref = next((str(about[key]) for key in ("rev", "tag", "branch") if about.get(key)), "")
    folder = str(about.get("subdirectory", ""))
    found = f"git+{url}" + (f"@{ref}" if ref else "") + (f"#subdirectory={folder}" if folder else "")
    return found if url else ""


def text_of(path: Path) -> str:
    """Return the text of a source. Raises UsageError when it cannot be read or is not UTF-8.

    UTF-16 with its mark is read, too: PowerShell writes it for `pip freeze > requirements.txt`, and pip reads it.
    """
    try:
        data = read_small(path)
        is_wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        return data.decode("utf-16" if is_wide else "utf-8-sig").replace("\r\n", "\n")
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: byte {error.start} is not UTF-8", "save it as UTF-8") from None


def check_version(path: Path, name: str, found: object, known: str) -> None:
    """Raise UsageError unless the lock format version `found` matches the pattern `known`."""
    if not re.fullmatch(known, str(found)):
        shown = known.replace("\\", "").replace("[0-9]+", "x")
        hint = "write it anew with a current version of the tool that made it, or name what it was made from"
        raise UsageError(f"{path}: version {found} of the format {name} is not known (known: {shown})", hint)


def texts(
    document: Document, keys: tuple[str, ...], kind: str, group: str = "", seen: tuple[str, ...] = ()
) -> Iterator[Statement]:
    """Yield a statement for each string in the array at `keys` and in the groups that it includes (PEP 735)."""
    table = table_at(document.data, *keys[:-1])
    found, names = table.get(keys[-1], []), {normalise(name): name for name in table}
    if not isinstance(found, list):
        yield lost(found, document.where(*keys), "not an array of strings", group)
    for index, one in enumerate(list_at(found)):
        place, inner = document.where(*keys, index), value_at(one, "include-group")
        name = names.get(normalise(inner), "") if isinstance(inner, str) else ""
        if name and name not in (*seen, keys[-1]):
            yield from texts(document, (*keys[:-1], name), kind, group, (*seen, keys[-1]))
        elif isinstance(one, str):
            yield Statement(kind, one.strip(), place, group)
        else:
            yield lost(one, place, "not a string" if inner is None else "no other group has this name", group)


@dataclass(frozen=True, slots=True)
class Draft:
    """Recipe before it is written: its `data`, and the statements that were carried and not carried.

    `warning` asks the user for a decision about GPUs that the sources name and no target supports. The recipe's text
    contains it, too.
    """

    name: str
    data: Mapping[str, Any]
    carried: tuple[Statement, ...]
    lost: tuple[Statement, ...]
    warning: str = ""

    @property
    def text(self) -> str:
        """The recipe file."""
        comment = textwrap.fill(self.warning, 100, initial_indent="# ", subsequent_indent="# ")
        return (f"{comment}\n" if comment else "") + table_text(self.data)

    def loaded(self, path: Path) -> LoadedRecipe:
        """Return the recipe as loaded from `path`. Raises RecipeError when it is invalid."""
        try:
            return decode_recipe(Document(path, self.text, parse_toml(self.text)))
        except ValueError as error:
            raise RecipeError(f"{path}: {error}") from None


def recipe_name(text: str) -> str:
    """Return `text` converted to a valid name of a recipe."""
    name = re.sub(r"[^a-z0-9_.-]+", "_", text.lower()).strip("_.-")
    return name if re.fullmatch(NAME_PATTERN, name) else "environment"
