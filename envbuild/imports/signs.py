"""Signs of GPUs in statements: the accelerator of the targets that they choose, and warnings about those not carried.

The signs are rows of data/gpu_signs.toml.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import unquote

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from envbuild.base.masking import masked_text
from envbuild.base.text import normalise
from envbuild.compat.rows import TorchBuild, TorchRocm, load_rows, matches
from envbuild.data import load_table
from envbuild.imports.statement import (
    BOUND,
    BRANCH,
    COMMENT,
    ENVIRONMENTS,
    EXCLUDED,
    NOT_IN_IMAGE,
    NOT_TAKEN,
    OTHER_SYSTEM,
    UNREAD_LINE,
    UNUSED_INDEX,
    UNUSUAL_FILE,
    Statement,
    project_of,
    text_of,
)
from envbuild.recipe.targets import ACCELERATORS, Target, accelerator_of

# A statement is a line; a longer text is a script of a Dockerfile, whose beginning is enough.
_MAX_TEXT, _MAX_SCRIPT = 2000, 20_000
# Signs that a warning names with their places, and those that it names at all.
_SHOWN, _NAMED = 3, 12
_MAX_NAME = 80
_PINS = ("pin", "conda-pin")
_REQUIREMENTS = ("requirement", "constraint", "pin", "override")
# Commands that may not run, indexes without packages, files of a folder that are not read: they choose no target.
_MAYBE = (BRANCH, UNUSED_INDEX, UNUSUAL_FILE, UNREAD_LINE)
# Statements that say nothing about this environment.
ELSEWHERE = (OTHER_SYSTEM, NOT_IN_IMAGE, NOT_TAKEN)
# A comment of TOML, YAML, a requirements file, Dockerfile or Python; not the output of pip-compile.
_LEGAL = re.compile(r"copyright|SPDX-|\(c\) \d{4}", re.IGNORECASE)
_COMMENT = re.compile(r"(?:^|\s)(#+\s*(?!via\b|\s{2})[^#\s].*)")
_TORCH = re.compile(r"(?:[\w./-]+::)?(?:torch|pytorch|pytorch-cuda|libtorch)(?![\w-])")


@dataclass(frozen=True, slots=True)
class GpuSign:
    """A statement that names GPUs of `family` (cuda, rocm; another name, such as Intel XPU, if no target is for it).

    `name` is the part of its text that does. `version` is the toolkit's version, "12.6", only its major part, or "". A
    `weak` sign chooses a target only if no other sign does: a base image's CUDA may differ from torch's.
    """

    statement: Statement
    family: str
    version: str
    weak: bool
    name: str = ""
    any_gpu: bool = False

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
        """The family and its version: CUDA 12.6. An extra called gpu is for any GPU."""
        if self.any_gpu and (not self.name or self.statement.kind in ("comment", "name")):
            return "GPUs"
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
    any_gpu: bool
    unpublished: re.Pattern[str] | None


def tag_of_version(family: str, version: str) -> str:
    """Return the accelerator's tag for a version of its toolkit: cu126 for CUDA 12.6."""
    return f"cu{version.replace('.', '')}" if family == "cuda" else f"{family}{version}"


def gpu_signs(statements: Iterable[Statement], groups: Collection[str] | None = None) -> list[GpuSign]:
    """Return the most precise sign of each of `statements`.

    The names of extras and groups are signs if they are in `groups` (normalised names; None: all are).
    """
    signs = (_sign(statement) or _group_sign(statement, groups) for statement in statements)
    return [sign for sign in signs if sign is not None]


def is_only_elsewhere(statement: Statement) -> bool:
    """Return whether a requirement is of a package that only an index for an accelerator without a target has."""
    name = project_of(statement.text)
    return any(row.unpublished.match(name) for row in _rows() if row.unpublished)


def comments_with_signs(path: Path) -> Iterator[Statement]:
    """Yield the comments of a file that have a sign of GPUs: its author may mean one that no requirement names."""
    for number, line in enumerate(text_of(path).split("\n"), 1):
        if (comment := _COMMENT.search(line)) and not _LEGAL.search(line):
            statement = Statement("comment", " ".join(comment[1].split()), f"{path}:{number}", reason=COMMENT)
            yield from [statement] if gpu_signs([statement]) else []


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
    if family.name == "cuda" and arch == "x86_64" and (earlier := _earlier(torch)):
        if version in earlier:
            return tag
        rows, indexes = (), earlier
    elif version in {version_of_row for row in rows for version_of_row in row.cuda} or (is_open and version in indexes):
        return tag
    major = version.partition(".")[0]
    lists = [row.cuda for row in reversed(rows)] if rows else [indexes]  # the newest torch with this major version
    choices = next(
        filter(None, ([candidate for candidate in each if candidate.partition(".")[0] == major] for each in lists)), []
    )
    nearest = min(
        choices, key=lambda candidate: abs(Version(candidate).minor - Version(version).minor), default=version
    )
    return tag_of_version(family.name, nearest)


def has_no_build(version: str, target: Target) -> bool:
    """Return whether PyTorch is known to have no build of torch's release `version` for a target's accelerator.

    The rows for ROCm are not complete: only a release before all rows is known to lack a newer ROCm.
    """
    try:
        torch, release = [SpecifierSet(f"=={version}")], Version(version)
    except ValueError:
        return False
    accelerator = target.version
    if target.family.name == "rocm":
        firsts = [(_first(row), row.rocm) for row in load_rows().torch_rocm]
        oldest = min(first for first, _ in firsts)
        return release < oldest and any(first > oldest and accelerator in versions for first, versions in firsts)
    if target.family.name != "cuda":
        return False
    if target.arch == "x86_64" and (earlier := _earlier(torch)):
        return accelerator not in earlier
    row = load_rows().torch_build(version, target.arch)
    return row is not None and row.complete and accelerator not in row.cuda


def is_published(tag: str) -> bool:
    """Return whether PyTorch publishes a wheel index for an accelerator."""
    family = accelerator_of(tag)
    return family is not None and (
        not family.gpu or family.version(tag) in load_table("gpu_signs")["published"].get(family.name, ())
    )


# Releases of torch that may exist; those that specifiers accept tell which rows apply.
_RELEASES = tuple(f"{major}.{minor}.{patch}" for major in (1, 2) for minor in range(30) for patch in range(3))


def _accepted(torch: Collection[SpecifierSet], versions: str) -> Iterator[str]:
    """Yield the releases of torch within `versions` that all specifiers accept; local versions do not count."""
    specifiers = [SpecifierSet(re.sub(r"[+][^,;]*", "", str(specifier))) for specifier in (*torch, versions)]
    with suppress(ValueError):  # of int() for thousands of digits
        yield from (release for release in _RELEASES if all(release in specifier for specifier in specifiers))


def _earlier(torch: Collection[SpecifierSet]) -> list[str]:
    """Return the CUDA versions of an old torch release if the specifiers accept no other, else []."""
    known: dict[str, list[str]] = load_table("gpu_signs")["earlier"]
    releases = {release.rpartition(".")[0] for release in _accepted(torch, ">=0")} if torch else set()
    return known.get(releases.pop(), []) if len(releases) == 1 else []


def _first(row: TorchBuild | TorchRocm) -> Version:
    return Version(re.split(r"[<>=,]+", row.versions)[1])


def published_note(signs: Sequence[GpuSign], tags: Sequence[str], targets: Sequence[Target]) -> str:
    """Return the warning that `targets` have another accelerator version than the `tags` of the signs, or ""."""
    sign = next(
        (
            sign
            for sign in signs
            if sign.tag in tags
            # builds for ROCm 7.2 run on 7.2.3
            and not any(f"{sign.tag}.".startswith(f"{target.accelerator}.") for target in targets)
        ),
        None,
    )
    if sign is None:
        return ""
    names = ", ".join(target.name for target in targets)
    driver = next((row.minimum for row in load_rows().drivers if matches(sign.version, row.cuda)), "")
    same = f", which the same drivers run ({driver} or newer)" if sign.family == "cuda" and driver else ""
    head = f"PyTorch has no build of torch for {sign.title} that the sources accept: {_named([sign])}"
    return f"{head}. The recipe is for {names}{same}"


def not_carried(signs: Iterable[GpuSign], targets: Sequence[Target]) -> list[GpuSign]:
    """Return the signs of GPUs that no target supports."""

    def is_carried(sign: GpuSign) -> bool:
        # Names of CUDA in variables and commands are those of ROCm's builds, too: NVTE_FRAMEWORK, TRITON_CACHE_DIR.
        is_general = sign.any_gpu or (sign.weak and sign.family == "cuda" and not sign.version)
        return any(_agrees(target.accelerator, sign) or (is_general and target.family.gpu) for target in targets)

    return [sign for sign in signs if not is_carried(sign)]


def gpu_note(
    signs: Sequence[GpuSign], comments: Sequence[GpuSign], targets: Sequence[Target], tags: Sequence[str]
) -> str:
    """Return the warning about `signs` that no target supports, or ""; `tags` are the tags that signs choose.

    If a target supports torch's own sign, differing signs of other pins in a lock are ignored. The signs of `comments`
    make no warning, and are named in it: one may have the version.
    """
    missing = not_carried(signs, targets)
    if any(sign.rank == 0 and sign not in missing for sign in signs):
        missing = [sign for sign in missing if sign.statement.kind not in _PINS]
    if not missing:
        return ""
    is_rocm = {gpu_sign.family for gpu_sign in missing if not gpu_sign.any_gpu} == {"rocm"}
    missing += not_carried(comments, targets)
    if is_rocm:  # builds of deepspeed for it, too
        missing = [replace(gpu_sign, family="rocm") if gpu_sign.any_gpu else gpu_sign for gpu_sign in missing]
    missing.sort(
        key=lambda gpu_sign: (not gpu_sign.version, gpu_sign.known)
    )  # a package of CUDA tells less than a name
    sign = missing[0]
    names = ", ".join(target.name for target in targets)
    head = (
        f"the sources name {'GPUs' if sign.known else sign.family}, and the recipe is for {names}: {_named(missing)}."
    )
    if not sign.known:
        return f"{head} envbuild has no target for {sign.family}"
    choice = next((tag for tag in tags if _agrees(tag, sign)), _usual(sign))
    # Without a version in the sources, any CUDA of torch may do.
    words = "--target" if sign.version and _agrees(choice, sign) else "a --target, such as"
    return f"{head} For these GPUs choose {words} {choice}-{targets[0].arch}"


def group_note(signs: Sequence[GpuSign], targets: Sequence[Target], usable: Collection[str]) -> str:
    """Return the warning that extras and groups with GPU `signs` are not carried, or "".

    It advises those that are `usable`: they have a statement that can be carried.
    """
    groups: dict[str, GpuSign] = {}
    signs = sorted(signs, key=lambda sign: not sign.tag)  # those that choose a target first
    for sign in signs:
        groups.setdefault(sign.statement.group.split()[0], sign)
    if not groups:
        return ""
    signs = [*groups.values(), *(sign for sign in signs if sign not in groups.values())]
    names = ", ".join(target.name for target in targets)
    choice = " or ".join(f"--extra {name}" for name in [name for name in groups if name in usable][:_SHOWN])
    return (
        f"extras or groups that name GPUs are not carried, and the recipe is for {names}:"
        f" {_named(signs)}. {f'To carry them choose {choice}' if choice else 'None of their statements can be carried'}"
    )


ELSEWHERE_PARTS = "other stages, branches or systems, or unused indexes,"


def elsewhere_note(signs: Sequence[GpuSign], targets: Sequence[Target], parts: str = ELSEWHERE_PARTS) -> str:
    """Return the warning about `signs` in `parts` of the sources that are not for this recipe.

    Returns "" if a target is for GPUs.
    """
    if not signs or any(target.family.gpu for target in targets):
        return ""
    names = ", ".join(target.name for target in targets)
    sign = min(signs, key=lambda sign: (not sign.tag, not sign.version, not sign.known))
    tag = _usual(sign) if sign.known else ACCELERATORS["cuda"].usual[-1]
    return (
        f"{parts} name GPUs, and the recipe is for {names}:"
        f" {_named(signs)}. If it is meant for GPUs, choose --target {tag}-{targets[0].arch}"
    )


def _usual(sign: GpuSign) -> str:
    """Return the tag of a sign, else the newest usual one of its family and major version."""
    usual = ACCELERATORS[sign.family].usual
    return sign.tag or ([tag for tag in usual if _agrees(tag, sign)] or usual)[-1]


def _named(signs: Sequence[GpuSign]) -> str:
    named: dict[str, str] = {}  # by text: a lock has it for each architecture
    for sign in signs:
        statement, text = sign.statement, sign.statement.text
        shown = text if len(text) <= _MAX_NAME or not sign.name else f"{text[: _MAX_NAME // 2]} … {sign.name}"
        place = statement.place if len(named) < _SHOWN else statement.place.rpartition("/")[2]
        named.setdefault(text, f"{place}: {masked_text(shown)[: 2 * _MAX_NAME]} ({sign.title})")
    more = f"; and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
    return "; ".join([*named.values()][:_NAMED]) + more


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
            row.get("any_gpu", False),
            re.compile(row["unpublished"]) if "unpublished" in row else None,
        )
        for row in load_table("gpu_signs")["sign"]
    )


# A statement as the kind of content that rows are for, and its text.
_Form = tuple[str, str]
# In commands, options and settings: words that may be packages, images, and variables with their values.
_WORD = re.compile(r"(?<![\w./@:$-])[A-Za-z][\w.-]*(?:\[[\w,. -]{1,80}\])?(?:[=<>~!]=?[\w.*+!-]+)?")
_IMAGE = re.compile(r"(?:--from=|\bimage['\"]?[:=] ?['\"]?)([\w.-]+(?:[:/@][\w.-]+)*)")
_ADDRESS = re.compile(r"\w://[^\s'\"]+")
_PAIR = re.compile(r"(?<![\w-])([A-Z][A-Z0-9_]*)['\"]?(?: ?= ?|: ?)['\"]?([^\s'\",}]*)")
_FILE = re.compile(r".*\.(?:py|txt|in|sh|ya?ml|toml|json|cfg|md|lock|cu|whl|gz|deb|run)")
# Instructions whose text is prose.
_PROSE = ("LABEL ", "MAINTAINER ", "description = ", "authors = ", "keywords = ", "homepage = ", "repository = ")


def _forms(statement: Statement) -> Iterator[_Form]:
    """Yield the statement as rows read it; a requirement also with normalised name, and as NAME==VERSION of its wheel.

    A git repository counts as a package with the repository's name, a folder as one with its name. In commands,
    options and settings that are not carried, each word may be a package: `--no-build-isolation-package flash-attn`.
    """
    kind = _kind(statement)
    text = statement.text[:_MAX_TEXT]
    yield kind, text
    if kind in _REQUIREMENTS:
        yield from ((kind, form) for form in _names(text))
    elif (
        kind in ("lost", "env", "comment")
        and not text.startswith(_PROSE)
        and "pip uninstall" not in text
        and statement.reason not in (BOUND, ENVIRONMENTS, EXCLUDED)
    ):
        text = statement.text[:_MAX_SCRIPT]
        for word in dict.fromkeys(_WORD.findall(text)):
            # A table of pyproject.toml may be named by a package; upper case names a variable.
            is_name = not _FILE.fullmatch(word) and not re.match(r"[A-Z0-9_]+(?![\w.-])", word)
            for part in word.split(".") if word.startswith("tool.") else [word] if is_name else []:
                yield from ((of, part) for of in ("package", "conda", "requirement"))
                yield from (("requirement", form) for form in _names(part))
        for address in dict.fromkeys(_ADDRESS.findall(text)):
            yield from (("requirement", form) for form in _names(f"git+{address}"))
        yield from (("base", image) for image in _IMAGE.findall(text))
        yield from (("env", f"{name}={value}") for name, value in _PAIR.findall(text))


def _names(text: str) -> Iterator[str]:
    """Yield the names that a requirement has besides its text."""
    if named := re.match(r"(?!git\+)([\w.-]+)([^\w.:/-].*)?$", text, re.DOTALL):
        yield normalise(named[1]) + (named[2] or "")
    address = re.search(r"\w://\S+/([^\s/#?'\"]+)", text)
    if address and (wheel := re.fullmatch(r"([^-]+)-([^-]+)-.*\.whl", unquote(address[1]))):
        yield f"{normalise(wheel[1])}=={wheel[2]}"
    elif address and "git+" in text:
        yield normalise(re.split(r"\.git|@", address[1])[0])
    elif folder := re.fullmatch(r"(?:(?:-e|--editable)[ =])?\.{0,2}(?:[^\s/]*/)+([\w.-]+)/?(?:\[.*)?", text):
        yield normalise(folder[1])


# Extras and groups that are named by accelerators: cu126, gpu, torch-cuda, rocm6.2.
_GROUP = re.compile(r"(?:[\w.-]*[-_.])?(?:(cu\d\d\d|rocm\d+\.\d+)|(?:cuda|cu|gpu)\d*|(rocm)\d*)")


def _group_sign(statement: Statement, groups: Collection[str] | None) -> GpuSign | None:
    """Return the sign in the name of an extra or group of a requirement, or None for other statements."""
    if statement.kind not in _REQUIREMENTS:
        return None
    for name in statement.group.split():
        match = _GROUP.fullmatch(name.lower()) if groups is None or normalise(name) in groups else None
        if match:
            accelerator = accelerator_of(match[1] or "") or ACCELERATORS["rocm" if match[2] else "cuda"]
            version = (match[1] and accelerator.version(match[1])) or ""
            is_general = "gpu" in match[0] and not version  # the GPUs of any vendor
            return GpuSign(replace(statement, group=name), accelerator.name, version, True, any_gpu=is_general)
    return None


def _sign(statement: Statement) -> GpuSign | None:
    signs = []
    for kind, form in _forms(statement):
        for row in _rows():
            applies = not row.kinds or kind in row.kinds
            if kind == "lost" and "base" in row.kinds:  # of what is not carried, images alone
                applies = form.startswith("FROM ")
            match = row.pattern.search(form) if applies else None
            if not match:
                continue
            groups, start = match.groupdict(), max(match.start() - 20, 0)
            name = form[start : start + _MAX_NAME]
            tag = (groups.get("tag") or "").lower()
            accelerator = accelerator_of(tag) if tag else ACCELERATORS.get(row.family)
            if accelerator is None:
                signs.append(GpuSign(statement, row.family, "", row.weak, name))
                continue
            parts = [part for part in (groups.get("major"), groups.get("minor")) if part]
            version = (accelerator.version(tag) if tag else ".".join(parts)) or ""
            weak = row.weak or kind != _kind(statement)
            signs.append(GpuSign(statement, accelerator.name, version, weak, name, row.any_gpu))
    return max(signs, key=lambda sign: ("." in sign.version, not sign.weak, len(sign.version)), default=None)


def _kind(statement: Statement) -> str:
    return "requirement" if statement.kind == "override" else statement.kind
