"""Signs in dependency files that an environment is meant for GPUs; data/gpu_signs.toml has one row for each."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from envbuild.base.masking import masked_text
from envbuild.compat.rows import load_rows
from envbuild.data import load_table
from envbuild.imports.statement import NOT_IN_IMAGE, OTHER_SYSTEM, UNUSED_INDEX, Statement
from envbuild.recipe.accelerators import ACCELERATORS, accelerator_of
from envbuild.recipe.targets import Target

# A statement is a line; a longer text is a script of a Dockerfile, whose beginning is enough.
_MAX_TEXT = 2000
_SHOWN = 3
_PINS = ("pin", "conda-pin")
# Statements that say nothing about this environment.
_ELSEWHERE = (OTHER_SYSTEM, NOT_IN_IMAGE, UNUSED_INDEX)
_TORCH = re.compile(r"(?:[\w./-]+::)?(?:torch|pytorch|pytorch-cuda|libtorch)(?![\w-])")


@dataclass(frozen=True, slots=True)
class GpuSign:
    """A statement that names GPUs of `family` (cuda, rocm; another name, such as Intel XPU, if no target is for it).

    `version` is that of the family's toolkit, "12.6", only its major part, or "". A `weak` sign chooses a target only
    where no other one does: a base image's CUDA need not be torch's.
    """

    statement: Statement
    family: str
    version: str
    weak: bool

    @property
    def rank(self) -> int:
        """Which signs choose the target: first (0) those of torch itself, last (2) the weak ones."""
        return 2 if self.weak else 0 if _TORCH.match(self.statement.text) else 1

    @property
    def tag(self) -> str:
        """Tag of the accelerator, cu126; "" if the version is not known so far."""
        return tag_of_version(self.family, self.version) if "." in self.version else ""

    @property
    def title(self) -> str:
        """The family and its version: CUDA 12.6."""
        return f"{ACCELERATORS[self.family].title if self.known else self.family} {self.version}".strip()

    @property
    def known(self) -> bool:
        """Whether a target can be for it."""
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


def gpu_signs(statements: Iterable[Statement]) -> list[GpuSign]:
    """Return the signs in `statements`, of each its most precise one; those for other systems have none."""
    signs = (_sign(one) for one in statements if one.reason not in _ELSEWHERE)
    return [sign for sign in signs if sign is not None]


def tags_of(signs: Sequence[GpuSign], torch: Collection[SpecifierSet], arch: str) -> list[str]:
    """Return the accelerator's tag that `signs` choose, as a list of one or none: an environment has one CUDA.

    Of the signs of the first rank the newest version counts: other packages may have older ones. Signs with a major
    version alone choose the CUDA of the plain wheel of the torch that the specifiers `torch` pin, if it has that one.
    """
    for rank in range(3):
        tags = {sign.tag: Version(sign.version) for sign in signs if sign.tag and sign.rank == rank}
        if tags:
            return [max(tags, key=lambda tag: tags[tag])]
    majors = {sign.version for sign in signs if sign.family == "cuda"} - {""}
    for row in load_rows().torch:
        if row.arch == arch and row.default.partition(".")[0] in majors and _pins_release(torch, row.versions):
            return [tag_of_version("cuda", row.default)]
    return []


def gpu_note(signs: Sequence[GpuSign], targets: Sequence[Target], tags: Sequence[str]) -> str:
    """Return the warning about `signs` that none of `targets` carries, or ""; `tags` are those that signs choose.

    Where torch's own sign is carried, the versions of other packages in a lock are no contradiction.
    """

    def is_carried(sign: GpuSign) -> bool:
        return any(_agrees(target.accelerator, sign) for target in targets)

    settled = any(sign.rank == 0 and is_carried(sign) for sign in signs)
    missing = [one for one in signs if not is_carried(one) and not (settled and one.statement.kind in _PINS)]
    if not missing:
        return ""
    sign = next((one for one in missing if one.version), missing[0])
    names = ", ".join(target.name for target in targets)
    head = (
        f"the sources name {'GPUs' if sign.known else sign.family}, and the recipe is for {names}: {_named(missing)}."
    )
    if not sign.known:
        return f"{head} envbuild has no target for {sign.family}"
    usual = [tag for tag in ACCELERATORS[sign.family].usual if _agrees(tag, sign)]
    choice = next((tag for tag in tags if _agrees(tag, sign)), usual[-1] if usual else sign.tag)
    return f"{head} For these GPUs choose --target {choice}-{targets[0].arch}"


def group_note(signs: Sequence[GpuSign], targets: Sequence[Target]) -> str:
    """Return the warning about `signs` in extras and groups that are not carried while no target is for GPUs, or ""."""
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
    pinned = [part.version.partition("+")[0] for one in torch for part in one if part.operator in ("==", "===")]
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


def _sign(statement: Statement) -> GpuSign | None:
    signs = []
    for row in _rows():
        applies = not row.kinds or statement.kind in row.kinds
        if statement.kind == "lost" and "base" in row.kinds:  # of what is not carried, images alone
            applies = statement.text.startswith("FROM ")
        match = row.pattern.search(statement.text[:_MAX_TEXT]) if applies else None
        if match:
            groups = match.groupdict()
            tag = (groups.get("tag") or "").lower()
            accelerator = accelerator_of(tag) if tag else ACCELERATORS.get(row.family)
            if accelerator is None:
                signs += [] if tag else [GpuSign(statement, row.family, "", row.weak)]
                continue
            parts = [part for part in (groups.get("major"), groups.get("minor")) if part]
            version = (accelerator.version(tag) if tag else ".".join(parts)) or ""
            signs.append(GpuSign(statement, accelerator.name, version, row.weak))
    return max(signs, key=lambda sign: ("." in sign.version, not sign.weak, len(sign.version)), default=None)
