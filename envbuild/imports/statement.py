"""Statements of a source file (packages, Python, index …), the Python that they choose, and the draft of a recipe."""

from __future__ import annotations

import codecs
import functools
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from packaging.markers import Marker
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import Specifier, SpecifierSet
from packaging.version import Version

from envbuild.base.errors import RecipeError, UsageError
from envbuild.base.files import read_small
from envbuild.base.text import normalise
from envbuild.base.toml import Document, list_at, parse_toml, table_at, table_text, value_at
from envbuild.data import load_table
from envbuild.recipe.checks import LINUX
from envbuild.recipe.load import LoadedRecipe, decode_recipe
from envbuild.recipe.model import NAME_PATTERN, PYTHONS
from envbuild.recipe.targets import ARCHES

OTHER_SYSTEM = "for another operating system: envbuild builds for Linux"
NOT_IN_IMAGE = "of a stage that is not in the final image"
BRANCH = "in a branch or loop of the shell that envbuild does not evaluate: name what you need with --from"
NOT_TAKEN = "in a branch of the shell that the values of ARG and ENV do not take"
UNUSED_INDEX = "an explicit index that no package names"
UNREAD_LINE = "a line that envbuild does not read"
COMMENT = "a comment"
NO_FILE = "no such file here: name it, or what a command makes it from, with --from"
UNUSUAL_FILE = "not the usual name or folder, so the import of the project leaves it out: name it with --from"
INDEX = "the site decides which index serves a package: name it in pip's configuration, or in `indexes`"
TOOL = "a setting of that tool, not a package"
ALTERNATIVES = "alternatives of versions, which PEP 440 does not know"
TRUST = "certificates are checked: give a site's own authority with SSL_CERT_FILE or in pip's configuration"
EXCLUDED = "uv leaves this package out; a recipe cannot: its lock has it if another package requires it"
BOUND = (
    "the target has this index beside the others; to take the package from it alone, name it in [indexes] of the recipe"
)
ENVIRONMENTS = "the features of `default` are carried, others with --extra FEATURE"
OWN = "the project itself: name its extras with --extra; own code belongs to [project]"
OWN_NAME = (
    "a package of this workspace or folder: under its bare name an index would serve somebody else's package;"
    " own code belongs to [project]"
)
SOURCE = "a source other than an index or git; give its wheel to an index or a find-links folder of the site"


_EXTRAS = re.compile(
    r"""\bextra\s*(?:==|!=)\s*['"][^'"]*['"]|['"][^'"]*['"] (?:not )?in (?:extras|dependency_groups)"""
)


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


def linux_places(arches: Iterable[str] = ARCHES, pythons: Iterable[str] = PYTHONS) -> list[tuple[str, str]]:
    """Return all pairs of `arches` and `pythons`, the Linux environments for which markers are evaluated."""
    return [(arch, python) for arch in arches for python in pythons]


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
            parsed.evaluate(LINUX | dict(zip(names, (arch, python, f"{python}.99"), strict=True)))
            for arch, python in (linux_places() if places is None else places)
        )
    except ValueError:  # of packaging.markers, and of int() for thousands of digits
        return True


def always_on_linux(marker: str) -> bool:
    """Return whether a marker is true on Linux for each architecture and Python."""
    return all(for_linux(marker, [place]) for place in linux_places())


def python_of(markers: Sequence[str], place: str) -> Iterator[Statement]:
    """Yield the Pythons for which one of `markers` is true on Linux, unless it is true for each."""
    fitting = [
        python
        for python in PYTHONS
        if any(for_linux(marker, [(arch, python) for arch in ARCHES]) for marker in markers)
    ]
    if fitting and len(fitting) < len(PYTHONS):
        others = [f"!={python}.*" for python in PYTHONS if python not in fitting]
        yield Statement("python", ",".join(others), place)


def fitting_pythons(specifiers: str, pythons: Iterable[str]) -> list[str]:
    """Return those of `pythons` of which a patch release fits: ">=3.11.4" accepts 3.11. Raises ValueError."""
    # ">=3.8.*", which old versions of pip accepted
    known = SpecifierSet(re.sub(r"([<>]=?\s*\d[\d.]*?)\.\*", r"\1", specifiers))
    return [python for python in pythons if any(f"{python}.{patch}" in known for patch in range(40))]


def split_extras(marker: str) -> tuple[str, str]:
    """Return a marker without its clauses about extras, and the extras that it names, separated by blanks.

    A recipe has no extras, so that such a clause would never be true: the extras are the groups of its requirement.
    """
    if not re.search(r"\bextra\b", marker):
        return marker, ""
    names = re.findall(r"\bextra\s*==\s*['\"]([^'\"]+)['\"]", marker)
    kept, true = _EXTRAS.sub("python_version >= '3'", marker), r"python_version >= '3'"
    kept = re.sub(rf"(?:^| and ){true}(?=$| and )", "", kept).strip().removeprefix("and ")
    return kept, " ".join(dict.fromkeys(names))


def contradict(left: SpecifierSet, right: SpecifierSet) -> bool:
    """Return whether a version that one of two specifiers pins is not accepted by the other one."""
    return any(
        part.operator == "==" and "*" not in part.version and not second.contains(part.version, prereleases=True)
        for first, second in ((left, right), (right, left))
        for part in first
    )


def lost(text: object, place: str, reason: str, group: str = "") -> Statement:
    """Return a statement that is not carried, with the reason."""
    return Statement("lost", " ".join(str(text).split()), place, group, reason=reason)


# Variables from which pip and uv read the URLs of indexes (pip's documentation, "Configuration"; uv's, "Environment").
_INDEX_VARIABLE = re.compile(r"PIP_(?:EXTRA_)?INDEX_URL|UV_(?:DEFAULT_INDEX|(?:EXTRA_)?INDEX(?:_URL)?)")


def variable(name: str, value: str, place: str) -> Iterator[Statement]:
    """Yield the statement of an environment variable, and the indexes that pip or uv read from it."""
    yield Statement("env", f"{name}={value}", place)
    for url in value.split() if _INDEX_VARIABLE.fullmatch(name) else ():
        yield index_of(url, place)


def index_of(text: str, place: str) -> Statement:
    """Return the statement of an index's URL, to which uv may give a name: NAME=URL."""
    return Statement("index", re.sub(r"^[\w.-]+=(?=\w+://)", "", text), place)


def requirement_text(name: object, extras: Iterable[object], version: str, marker: str = "") -> str:
    """Return a requirement (PEP 508); `version` is a specifier or an address."""
    names = ",".join(map(str, extras))
    return f"{name}{f'[{names}]' if names else ''}{version}{f' ; {marker}' if marker else ''}"


def git_address(about: Mapping[str, Any]) -> str:
    """Return the address of a git repository in a requirement, "" if `about`, a table of poetry or uv, names none."""
    url = str(about.get("git", ""))
    # scp's form, which git accepts: git@host:path
    url = re.sub(r"^(?:([^@/:]+)@)?([^/:@]+):(?!//)", lambda match: f"ssh://{match[1] or 'git'}@{match[2]}/", url)
    ref = next((str(about[key]) for key in ("rev", "tag", "branch") if about.get(key)), "")
    folder = str(about.get("subdirectory", ""))
    address = f"git+{url}" + (f"@{ref}" if ref else "") + (f"#subdirectory={folder}" if folder else "")
    return address if url else ""


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


def check_version(path: Path, name: str, version: object, known: str) -> None:
    """Raise UsageError unless the lock format version `version` matches the pattern `known`."""
    if not re.fullmatch(known, str(version)):
        shown = known.replace("\\", "").replace("[0-9]+", "x")
        hint = "write it anew with a current version of the tool that made it, or name what it was made from"
        raise UsageError(f"{path}: version {version} of the format {name} is not known (known: {shown})", hint)


def texts(
    document: Document, keys: tuple[str, ...], kind: str, group: str = "", seen: tuple[str, ...] = ()
) -> Iterator[Statement]:
    """Yield a statement for each string in the array at `keys` and in the groups that it includes (PEP 735)."""
    table = table_at(document.data, *keys[:-1])
    items, names = table.get(keys[-1], []), {normalise(name): name for name in table}
    if not isinstance(items, list):
        yield lost(items, document.where(*keys), "not an array of strings", group)
    for index, item in enumerate(list_at(items)):
        place, inner = document.where(*keys, index), value_at(item, "include-group")
        name = names.get(normalise(inner), "") if isinstance(inner, str) else ""
        if name and name not in (*seen, keys[-1]):
            yield from texts(document, (*keys[:-1], name), kind, group, (*seen, keys[-1]))
        elif isinstance(item, str):
            yield Statement(kind, item.strip(), place, group)
        else:
            yield lost(item, place, "not a string" if inner is None else "no other group has this name", group)


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
        plain = "".join(character if character.isprintable() else "?" for character in self.warning)
        comment = textwrap.fill(plain, 100, initial_indent="# ", subsequent_indent="# ")
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


def project_of(text: str) -> str:
    """Return the normalised name that a requirement or a pin begins with."""
    return normalise(re.split(r"[^\w.-]", text, maxsplit=1)[0])


# The end of the name of a wheel for macOS or Windows.
FOREIGN_FILE = re.compile(r"-(?:macosx_|win_|win32)[a-z0-9_.]*\.whl(?![\w.])")
# Requirements of packages, or of wheels, that exist for macOS or Windows alone.
OF_OTHER_SYSTEM = re.compile(
    r"(?:tensorflow[-_](?:macos|metal|intel)|jax[-_]metal|mlx[-_]metal|pywin32|pypiwin32|pywinpty|windows[-_]curses|winsdk"
    r"|winrt-[\w-]+|triton[-_]windows|onnxruntime[-_]directml|pyobjc(?:-[\w-]+)?)(?![\w.-])|[\w.-]+(?:\[[^\]]*\])?\s*@\s*https?:\S+-(?:macosx_|win_|win32)[a-z0-9_]*\.whl(?![\w.])"
)


OF_HOST = "a file of the host on which it was written"
# A wheel of one of PyTorch's packages on the host that wrote the file, or at an address without a sha256: their indexes
# have the same version.
_TORCH_WHEEL = re.compile(
    r"(torch(?:vision|audio|text|data)?)\s*@\s*"
    r"(?:file:|https?://download\.pytorch\.org/whl/(?=\S*(?:\+|%2B))(?!\S*sha256=))"
    r"\S*/torch[a-z]*-([^-/\s]+)-[^/\s]*\.whl[^\s;]*"
)


def is_torch_wheel(statement: Statement) -> bool:
    """Return whether a requirement is a wheel of PyTorch's that the recipe has as a version instead."""
    return (
        statement.kind in ("requirement", "constraint", "pin")
        and not statement.reason
        and _TORCH_WHEEL.match(statement.text) is not None
    )


def of_torch_wheel(statement: Statement) -> Statement:
    """Return the statement with the version of a wheel of PyTorch's on another host instead of its path."""
    text = _TORCH_WHEEL.sub(lambda match: f"{match[1]}=={unquote(match[2])}", statement.text, count=1)
    return replace(statement, text=text) if is_torch_wheel(statement) else statement


def carried_as(statement: Statement) -> str:
    """Return why the recipe has the version of a wheel of PyTorch's instead of its address."""
    if FOREIGN_FILE.search(statement.text):
        return f"{OTHER_SYSTEM}, and its index has the version for Linux: carried as {of_torch_wheel(statement).text}"
    reason = OF_HOST if re.search(r"@\s*file:", statement.text) else "its URL has no sha256, and its index has it"
    return f"{reason}: carried as {of_torch_wheel(statement).text}"


Lose = Callable[[Statement, str], None]
# Pythons before those of envbuild.
_OLD = ("2.7", *(f"3.{minor}" for minor in range(5, 9)))
# The CPython of a wheel that no other one can install: x-1.0-cp310-cp310-linux_x86_64.whl
_WHEEL = re.compile(r"/([\w.]+)-[^-/\s]+-cp(3)(\d+)-cp3\d+-[^/\s]*\.whl")


def python_version(
    kept: Collection[Statement],
    given: Iterable[Statement],
    lose: Lose,
    preferred: str,
    replaced: Collection[Statement] = (),
    tags: Collection[str] = (),
) -> str:
    """Return a Python that all specifiers accept and for which pinned packages have wheels.

    It is the `preferred` one, else the first of `pythons`. `given` are all statements of the sources: files for one
    Python that a recipe cannot have still tell it. `replaced` are those whose wheel is carried as a version.
    `tags` are the accelerators of the targets: an old CUDA has builds of old releases of torch alone.
    """
    accepted, old = pythons(), list[Statement]()
    stated = [statement for statement in kept if statement.kind == "python" or re.match(r"python \d", statement.text)]
    for statement in stated:
        try:
            specifiers = re.sub(r"^python (\d+\.\d+).*", r"==\1.*", statement.text)
            fitting = fitting_pythons(specifiers, accepted)
            is_old = not fitting and bool(fitting_pythons(specifiers, _OLD))
        except ValueError:  # InvalidSpecifier is one
            lose(statement, f"{statement.text!r} is not a version specifier (PEP 440)")
            continue
        if is_old:  # the oldest one has most of the wheels of that time
            accepted = sorted(accepted, key=PYTHONS.index)
            old.append(statement)
        elif not fitting:
            lose(statement, f"no Python of {PYTHONS[0]} to {PYTHONS[-1]} that the other sources accept too")
        accepted = fitting or accepted
    if any(python in _OLD for known in _of_files([*kept, *replaced]).values() for python in known.values()):
        accepted = sorted(accepted, key=PYTHONS.index)
    last: dict[str, str] = load_table("gpu_signs")["last"]
    names = {project_of(statement.text) for statement in kept}
    of_torch = [Statement("constraint", f"torch<={last[tag]}", "") for tag in tags if tag in last and "torch" in names]
    for fits in (_has_files([*given, *replaced]), _has_builds(kept), _has_wheels([*kept, *of_torch])):
        accepted = [python for python in accepted if fits(python)] or accepted
    chosen = preferred if preferred in accepted else accepted[0]
    for known in _of_files([*kept, *replaced]).values():
        for statement, python in known.items() if chosen not in known.values() else ():
            lose(statement, f"its wheel is for Python {python}, and the recipe has {chosen}")
    for statement in old:
        lose(statement, f"envbuild has Python {PYTHONS[0]} to {PYTHONS[-1]}: the recipe has {chosen}")
    return chosen


_BUILT = re.compile(r"((?:\S+::)?[\w.-]+)(?:=| +)([^=\s]+)(?:=| +)(?:[\w.]*_)?py(?:thon)?(3)\.?(\d+)(?![\d.])[\w.]*")


def builds_for(python: str, kept: Iterable[Statement], gone: list[Statement]) -> Iterator[Statement]:
    """Yield the statements `kept`; match specs lose the builds for other Pythons, which are added to `gone`."""
    for statement in kept:
        match = _BUILT.fullmatch(statement.text) if statement.kind in ("conda", "conda-pin") else None
        if match is None or f"{match[3]}.{match[4]}" == python:
            yield statement
            continue
        spec = f"{match[1]}={match[2]}"
        reason = f"its build is for Python {match[3]}.{match[4]}, and the recipe has {python}: carried as {spec}"
        gone.append(replace(statement, reason=reason))
        yield replace(statement, text=spec)


def lose_contradicting(kept: Collection[Statement], lose: Lose) -> None:
    """Lose requirements and pins that an earlier requirement of the same project contradicts: no version fits both."""
    first: dict[str, list[tuple[Statement, SpecifierSet]]] = {}
    overridden = {project_of(statement.text) for statement in kept if statement.kind == "override"}
    of_kinds = [statement for kind in ("requirement", "pin") for statement in kept if statement.kind == kind]
    for statement in of_kinds:
        requirement = Requirement(statement.text)
        project = normalise(requirement.name)
        if project in overridden or requirement.url or (statement.kind == "requirement" and requirement.marker):
            continue
        specifier = SpecifierSet(re.sub(r"\+[^,;]*", "", str(requirement.specifier)))
        others = first.setdefault(project, [])
        other = next((other for other, known in others if contradict(known, specifier)), None)
        if other is not None and other.place.rpartition(":")[0] != statement.place.rpartition(":")[0]:
            lose(statement, f"contradicts {other.text} at {other.place}, which the recipe has")
        elif statement.kind == "requirement":
            others.append((statement, specifier))


def minor_versions(kept: Iterable[Statement], python: str) -> Iterator[Statement]:
    """Yield the statements with a patch release of Python: a recipe has the minor version."""
    for statement in kept:
        if statement.kind == "python" and re.search(
            rf"(?:[=!<]=|(?:~=|>=?)(?!\s*[\d.]+\.0(?!\d)))\s*{re.escape(python)}\.\d", statement.text
        ):
            text, reason = f"python {statement.text}", f"the recipe has the minor version: {python}"
            yield replace(statement, text=text, reason=reason)


def pythons() -> list[str]:
    """Return the Pythons in order of preference: first Debian's, which images use, then the others."""
    packages = " ".join(name for suite in load_table("debian")["suites"].values() for name in suite["python"])
    usual = PYTHONS.index("3.11")
    newer_first = [*PYTHONS[usual:], *reversed(PYTHONS[:usual])]
    return sorted(newer_first, key=lambda python: f"python{python}-" not in packages)


def _of_files(statements: Iterable[Statement]) -> dict[str, dict[Statement, str]]:
    """Return the statements with a wheel at an address, by project, with the Python that alone can install it."""
    files: dict[str, dict[Statement, str]] = {}
    for statement in statements:
        match = _WHEEL.search(statement.text) if statement.kind in ("requirement", "pin") else None
        if match and not statement.group:
            files.setdefault(normalise(match[1]), {})[statement] = f"{match[2]}.{match[3]}"
    return files


def _has_files(given: Iterable[Statement]) -> Callable[[str], bool]:
    """Return whether a Python can install one wheel at an address of each package that has such wheels."""
    versions = [{*known.values()} for known in _of_files(given).values()]
    return lambda python: all(python in known for known in versions)


def _has_builds(kept: Iterable[Statement]) -> Callable[[str], bool]:
    """Return whether conda's packages with builds for a Python have one for it."""
    matches = (_BUILT.fullmatch(statement.text) for statement in kept if statement.kind in ("conda", "conda-pin"))
    versions = {f"{match[3]}.{match[4]}" for match in matches if match}
    return lambda python: not versions or python in versions


def _has_wheels(kept: Iterable[Statement]) -> Callable[[str], bool]:
    """Return whether the versions that the statements accept install with a Python, by data/wheels.toml.

    A package without a wheel for any of the Pythons that have one does not count.
    """
    first: dict[str, dict[str, str]] = load_table("wheels")["first"]
    ends: dict[str, dict[str, str]] = load_table("wheels")["ends"]
    limits: list[tuple[str, str, Version | None, Version | None]] = []
    for statement in kept:
        if statement.kind not in ("requirement", "constraint", "pin"):
            continue
        try:
            requirement = Requirement(statement.text)
        except InvalidRequirement:
            continue
        name = normalise(requirement.name)
        if (name in first or name in ends) and not requirement.url:
            specifiers = requirement.specifier
            limits.append((name, str(requirement.marker or ""), _newest(specifiers), _oldest(specifiers)))

    torch = min((newest for name, _, newest, _ in limits if name == "torch" and newest), default=None)
    limits += [
        (name, marker, _with_torch(name, torch), None)
        for name, marker, newest, _ in limits
        if torch and not newest and name in ("torchvision", "torchaudio")
    ]

    def fits(python: str, name: str, marker: str, newest: Version | None, oldest: Version | None) -> bool:
        if not for_linux(marker, linux_places(pythons=[python])):
            return True
        if name in first and newest and (python not in first[name] or Version(first[name][python]) > newest):
            return False
        # A release that a Python does not install any more is none for older Pythons either.
        later = [end for other, end in ends.get(name, {}).items() if PYTHONS.index(other) >= PYTHONS.index(python)]
        return oldest is None or all(oldest < Version(end) for end in later)

    possible = [limit for limit in limits if any(fits(python, *limit) for python in PYTHONS)]
    return lambda python: all(fits(python, *limit) for limit in possible)


def _with_torch(name: str, torch: Version) -> Version:
    """Return a version that is not older than those of torchvision or torchaudio that are released with a torch.

    Source: README.md of torchvision (0.14 is for torch 1.13, 0.15 for 2.0) and of torchaudio (0.13, 2.0).
    """
    if name == "torchaudio":
        return Version(f"{torch.major if torch.major > 1 else 0}.{torch.minor}.99999")
    return Version(f"0.{torch.minor + (15 if torch.major > 1 else 1)}.99999")


def _newest(specifiers: Iterable[Specifier]) -> Version | None:
    """Return a version that is not older than all accepted ones, None without an upper bound."""
    limits = []
    for specifier in specifiers:
        try:
            release = [*Version(specifier.version.removesuffix(".*")).release]
        except ValueError:  # InvalidVersion is one, and the error of int() for thousands of digits
            continue
        if specifier.operator in ("==", "===") and not specifier.version.endswith(".*"):
            limits.append(Version(".".join(map(str, release))))
        elif specifier.operator in ("==", "~=", "<", "<="):
            # The last part of ~= is free, and < excludes its version: 1.24 becomes 1.23.99999.
            if specifier.operator in ("~=", "<"):
                release = release[:-1] if specifier.operator == "~=" else _before(release)
            limits.append(Version(".".join(map(str, [*release, *([] if specifier.operator == "<=" else [99999])]))))
    return min(limits, default=None)


def _oldest(specifiers: Iterable[Specifier]) -> Version | None:
    """Return a version that is not newer than all accepted ones, None without a lower bound."""
    limits = []
    for specifier in specifiers:
        with suppress(ValueError):  # InvalidVersion is one, and the error of int() for thousands of digits
            if specifier.operator in ("==", "===", "~=", ">=", ">"):
                limits.append(Version(specifier.version.removesuffix(".*")))
    return max(limits, default=None)


def _before(release: Sequence[int]) -> list[int]:
    """Return the release numbers that precede `release`: 1.24 for 1.24.1, 1.23 for 1.24 and for 1.24.0."""
    numbers = list(release)
    while len(numbers) > 1 and numbers[-1] == 0:
        numbers.pop()
    return [*numbers[:-1], numbers[-1] - 1] if numbers[-1] else [0]
