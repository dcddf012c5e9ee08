"""Statements of a source file (packages, Python, index …), the signs of GPUs in them, and the draft of a recipe."""

from __future__ import annotations

import codecs
import functools
import re
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from packaging.markers import InvalidMarker, Marker, UndefinedComparison, UndefinedEnvironmentName
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from envbuild.base.errors import RecipeError, UsageError
from envbuild.base.files import read_small
from envbuild.base.masking import masked_text
from envbuild.base.text import normalise
from envbuild.base.toml import Document, list_at, parse_toml, table_at, table_text, value_at
from envbuild.compat.rows import TorchBuild, load_rows, matches
from envbuild.data import load_table
from envbuild.recipe.load import LoadedRecipe, decode_recipe
from envbuild.recipe.model import NAME_PATTERN, PYTHONS
from envbuild.recipe.targets import ACCELERATORS, ARCHES, Target, accelerator_of

OTHER_SYSTEM = "for another operating system: envbuild builds for Linux"
NOT_IN_IMAGE = "of a stage that is not in the final image"
BRANCH = "in a branch or loop of the shell that envbuild does not evaluate: name what you need with --from"
NOT_TAKEN = "in a branch of the shell that the values of ARG and ENV do not take"
UNUSED_INDEX = "an explicit index that no package names"
INDEX = "the site decides which index serves a package: name it in pip's configuration, or in `indexes`"
TOOL = "a setting of that tool, not a package"
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

    `kind` is the kind of its content: requirement, constraint, override, pin (of a lock), conda,
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


# A statement is a line; a longer text is a script of a Dockerfile, whose beginning is enough.
_MAX_TEXT = 2000
_SHOWN = 3
_PINS = ("pin", "conda-pin")
_REQUIREMENTS = ("requirement", "constraint", "pin")
# Commands that may not run and indexes without packages: their signs are named, and choose no target.
_MAYBE = (BRANCH, NOT_TAKEN, UNUSED_INDEX)
# Statements that say nothing about this environment.
_ELSEWHERE = (OTHER_SYSTEM, NOT_IN_IMAGE)
_TORCH = re.compile(r"(?:[\w./-]+::)?(?:torch|pytorch|pytorch-cuda|libtorch)(?![\w-])")


@dataclass(frozen=True, slots=True)
class GpuSign:
    """A statement that names GPUs of `family` (cuda, rocm; another name, such as Intel XPU, if no target is for it).

    `version` is the toolkit's version, "12.6", only its major part, or "". A `weak` sign chooses a target only if no
    other sign does: a base image's CUDA may differ from torch's.
    """

    statement: Statement
    family: str
    version: str
    weak: bool

    @property
    def rank(self) -> int:
        """Precedence in the choice of the target: 0 for signs of torch itself, 2 for weak signs, else 1."""
        return 2 if self.weak else 0 if _TORCH.match(self.statement.text) else 1

    @property
    def tag(self) -> str:
        """Tag of the accelerator, cu126; "" if the version is unknown, incomplete, or has no target (CUDA 9.0)."""
        tag = tag_of_version(self.family, self.version)
        return tag if "." in self.version and self.known and ACCELERATORS[self.family].version(tag) else ""

    @property
    def title(self) -> str:
        """The family and its version: CUDA 12.6."""
        return f"{ACCELERATORS[self.family].title if self.known else self.family} {self.version}".strip()

    @property
    def known(self) -> bool:
        """Whether targets for its family exist."""
        return self.family in ACCELERATORS


@dataclass(frozen=True, slots=True)
class _SignRow:
    pattern: re.Pattern[str]
    kinds: frozenset[str]
    family: str
    weak: bool


def tag_of_version(family: str, version: str) -> str:
    """Return the accelerator's tag for a version of its toolkit: cu126 for CUDA 12.6."""
    return f"cu{version.replace('.', '')}" if family == "cuda" else f"{family}{version}"


def gpu_signs(statements: Iterable[Statement], groups: Collection[str] | None = None) -> list[GpuSign]:
    """Return the most precise sign of each of `statements`; statements for other systems have none.

    The names of extras and groups are signs if they are in `groups` (normalised names; None: all are).
    """
    given = list(statements)
    # Sources that choose an index do not mean those that they leave unused.
    elsewhere = (*_ELSEWHERE, UNUSED_INDEX) if any(statement.kind == "index" for statement in given) else _ELSEWHERE
    signs = (
        _sign(statement) or _group_sign(statement, groups) for statement in given if statement.reason not in elsewhere
    )
    return [sign for sign in signs if sign is not None]


def tags_of(signs: Sequence[GpuSign], torch: Collection[SpecifierSet], arch: str) -> list[str]:
    """Return the accelerator's tag that `signs` choose, as a list with at most one entry: an environment has one CUDA.

    The newest version among the signs of the first rank counts, since other packages may have older ones. Signs with
    only a major version choose the CUDA of torch's default wheel, for the torch pinned by the specifiers `torch`.
    """
    signs = [sign for sign in signs if sign.statement.reason not in _MAYBE]
    for rank in range(3):
        tags = {sign.tag: Version(sign.version) for sign in signs if sign.tag and sign.rank == rank}
        if tags:
            return [max(tags, key=lambda tag: tags[tag])]
    majors = {sign.version for sign in signs if sign.family == "cuda"} - {""}
    for row in load_rows().torch:
        if row.arch == arch and row.default.partition(".")[0] in majors and _pins_release(torch, row.versions):
            return [tag_of_version("cuda", row.default)]
    return []


def published(tag: str, torch: Collection[SpecifierSet], arch: str) -> str:
    """Return the tag nearest to `tag` for which PyTorch publishes builds of a torch that the specifiers `torch` accept.

    Its major version is the same; for CUDA, the same drivers run it. Returns `tag` itself if no such tag is known.
    """
    family = next(accelerator for accelerator in ACCELERATORS.values() if accelerator.version(tag))
    version, indexes = family.version(tag) or "", load_table("gpu_signs")["published"][family.name]
    rows = load_rows().torch if family.name == "cuda" else ()
    rows = tuple(row for row in rows if row.arch == arch and row.cuda and any(_accepted(torch, row.versions)))
    older = not rows or any(_accepted(torch, f"<{min(map(_first, load_rows().torch))}"))
    is_open = older or not all(row.complete for row in rows)
    if version in {one for row in rows for one in row.cuda} or (is_open and version in indexes):
        return tag
    major = version.partition(".")[0]
    lists = [row.cuda for row in reversed(rows)] if rows else [indexes]  # the newest torch with this major version
    choices = next(filter(None, ([one for one in each if one.partition(".")[0] == major] for each in lists)), [])
    nearest = min(choices, key=lambda one: abs(Version(one).minor - Version(version).minor), default=version)
    return tag_of_version(family.name, nearest)


def _newest_first(rows: Sequence[TorchBuild]) -> list[tuple[str, ...]]:
    return [row.cuda for row in reversed(rows)]


def is_published(tag: str) -> bool:
    """Return whether PyTorch publishes a wheel index for an accelerator."""
    versions = load_table("gpu_signs")["published"]
    return tag == "cpu" or any(
        accelerator.version(tag) in versions.get(accelerator.name, ()) for accelerator in ACCELERATORS.values()
    )


# Releases of torch that may exist; those that specifiers accept tell which rows apply.
_RELEASES = tuple(f"{major}.{minor}.{patch}" for major in (1, 2) for minor in range(30) for patch in range(3))


def _accepted(torch: Collection[SpecifierSet], versions: str) -> Iterator[str]:
    """Yield the releases of torch within `versions` that all specifiers accept; local versions do not count."""
    specifiers = [SpecifierSet(re.sub(r"[+][^,;]*", "", str(one))) for one in (*torch, versions)]
    yield from (release for release in _RELEASES if all(release in one for one in specifiers))


def _first(row: TorchBuild) -> Version:
    return Version(re.split(r"[<>=,]+", row.versions)[1])


def published_note(signs: Sequence[GpuSign], tags: Sequence[str], targets: Sequence[Target]) -> str:
    """Return the warning that `targets` have another accelerator version than the `tags` of the signs, or ""."""
    sign = next(
        (sign for sign in signs if sign.tag in tags and sign.tag not in {two.accelerator for two in targets}), None
    )
    if sign is None:
        return ""
    names = ", ".join(target.name for target in targets)
    driver = next((row.minimum for row in load_rows().drivers if matches(sign.version, row.cuda)), "")
    same = f", which the same drivers run ({driver} or newer)" if sign.family == "cuda" and driver else ""
    head = f"PyTorch has no build of torch for {sign.title} that the sources accept: {_named([sign])}"
    return f"{head}. The recipe is for {names}{same}"


def gpu_note(signs: Sequence[GpuSign], targets: Sequence[Target], tags: Sequence[str]) -> str:
    """Return the warning about `signs` that no target supports, or ""; `tags` are the tags that signs choose.

    If a target supports torch's own sign, differing signs of other pins in a lock are ignored.
    """

    def is_carried(sign: GpuSign) -> bool:
        return any(_agrees(target.accelerator, sign) for target in targets)

    settled = any(sign.rank == 0 and is_carried(sign) for sign in signs)
    missing = [
        gpu_sign
        for gpu_sign in signs
        if not is_carried(gpu_sign) and not (settled and gpu_sign.statement.kind in _PINS)
    ]
    if not missing:
        return ""
    sign = next((gpu_sign for gpu_sign in missing if gpu_sign.version), missing[0])
    names = ", ".join(target.name for target in targets)
    head = (
        f"the sources name {'GPUs' if sign.known else sign.family}, and the recipe is for {names}: {_named(missing)}."
    )
    if not sign.known:
        return f"{head} envbuild has no target for {sign.family}"
    usual = [tag for tag in ACCELERATORS[sign.family].usual if _agrees(tag, sign)] or ACCELERATORS[sign.family].usual
    choice = next((tag for tag in tags if _agrees(tag, sign)), sign.tag or usual[-1])
    return f"{head} For these GPUs choose --target {choice}-{targets[0].arch}"


def group_note(signs: Sequence[GpuSign], targets: Sequence[Target]) -> str:
    """Return the warning that extras and groups with GPU `signs` are not carried and no target is for GPUs, or ""."""
    groups: dict[str, GpuSign] = {}
    for sign in sorted(signs, key=lambda sign: not sign.tag):  # those that choose a target first
        groups.setdefault(sign.statement.group.split()[0], sign)
    if not groups or any(target.family.gpu for target in targets):
        return ""
    names = ", ".join(target.name for target in targets)
    choice = " or ".join(f"--extra {name}" for name in list(groups)[:_SHOWN])
    return (
        f"extras or groups that name GPUs are not carried, and the recipe is for {names}:"
        f" {_named(list(groups.values()))}. For GPUs choose {choice}"
    )


def _named(signs: Sequence[GpuSign]) -> str:
    named = [f"{one.statement.place}: {masked_text(one.statement.text)[:80]} ({one.title})" for one in signs]
    more = f", and {len(named) - _SHOWN} more" if len(named) > _SHOWN else ""
    return f"{'; '.join(named[:_SHOWN])}{more}"


def _agrees(tag: str, sign: GpuSign) -> bool:
    """Return whether the accelerator `tag` is of the family of `sign`, and has its major version if it has one."""
    version = ACCELERATORS[sign.family].version(tag) if sign.known else None
    if version is None:  # of another family
        return False
    return not sign.version or version.partition(".")[0] == sign.version.partition(".")[0]


def _pins_release(torch: Collection[SpecifierSet], versions: str) -> bool:
    known = SpecifierSet(versions)
    pinned = [
        part.version.partition("+")[0] for specifiers in torch for part in specifiers if part.operator in ("==", "===")
    ]
    return any(version.rstrip(".*") in known for version in pinned if not version.endswith("*"))


@functools.cache
def _rows() -> tuple[_SignRow, ...]:
    return tuple(
        _SignRow(
            re.compile(row["pattern"], re.IGNORECASE),
            frozenset(row.get("in", ())),
            row.get("family", "cuda"),
            row.get("weak", False),
        )
        for row in load_table("gpu_signs")["sign"]
    )


def _forms(statement: Statement) -> Iterator[str]:
    """Yield the text of a statement; for a requirement, also with normalised name, and as NAME==VERSION of its wheel.

    A git repository counts as a package with the repository's name.
    """
    text = statement.text[:_MAX_TEXT]
    yield text
    if statement.kind not in _REQUIREMENTS:
        return
    if named := re.match(r"([\w.-]+)([^\w.:/-].*)?$", text, re.DOTALL):
        yield normalise(named[1]) + (named[2] or "")
    address = re.search(r"\S+://\S+/([^\s/#?]+)", text)
    if address and (wheel := re.fullmatch(r"([^-]+)-([^-]+)-.*\.whl", unquote(address[1]))):
        yield f"{normalise(wheel[1])}=={wheel[2]}"
    elif address and "git+" in text:
        yield normalise(re.split(r"\.git|@", address[1])[0])


# Extras and groups that are named by accelerators: cu126, gpu, torch-cuda, rocm6.2.
_GROUP = re.compile(r"(?:[\w.-]*[-_.])?(?:(cu\d\d\d|rocm\d+\.\d+)|(?:cuda|cu|gpu)\d*|(rocm)\d*)")


def _group_sign(statement: Statement, groups: Collection[str] | None) -> GpuSign | None:
    """Return the sign in the name of an extra or group of a requirement of torch, or None for other statements."""
    if statement.kind not in _REQUIREMENTS or not _TORCH.match(statement.text):
        return None
    for name in statement.group.split():
        match = _GROUP.fullmatch(name.lower()) if groups is None or normalise(name) in groups else None
        if match:
            accelerator = accelerator_of(match[1] or "") or ACCELERATORS["rocm" if match[2] else "cuda"]
            version = (match[1] and accelerator.version(match[1])) or ""
            return GpuSign(replace(statement, group=name), accelerator.name, version, True)
    return None


def _sign(statement: Statement) -> GpuSign | None:
    signs = []
    forms = list(_forms(statement))
    for row in _rows():
        applies = not row.kinds or statement.kind in row.kinds
        if statement.kind == "lost" and "base" in row.kinds:  # of what is not carried, images alone
            applies = statement.text.startswith("FROM ")
        for match in filter(None, (row.pattern.search(form) for form in forms if applies)):
            groups = match.groupdict()
            tag = (groups.get("tag") or "").lower()
            accelerator = accelerator_of(tag) if tag else ACCELERATORS.get(row.family)
            if accelerator is None:
                signs.append(GpuSign(statement, row.family, "", row.weak))
                continue
            parts = [part for part in (groups.get("major"), groups.get("minor")) if part]
            version = (accelerator.version(tag) if tag else ".".join(parts)) or ""
            signs.append(GpuSign(statement, accelerator.name, version, row.weak))
    return max(signs, key=lambda sign: ("." in sign.version, not sign.weak, len(sign.version)), default=None)
