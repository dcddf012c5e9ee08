"""Composition of a recipe from statements of imported files; statements that it cannot hold are listed."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from packaging.requirements import Requirement

from envbuild.base.masking import is_secret, masked_text
from envbuild.base.text import normalise
from envbuild.base.toml import nearest
from envbuild.imports.conda_files import conda_problem, default_channels, torch_of_images, with_python
from envbuild.imports.signs import (
    ELSEWHERE,
    elsewhere_note,
    gpu_note,
    gpu_signs,
    group_note,
    has_no_build,
    is_only_elsewhere,
    is_published,
    not_carried,
    published,
    published_note,
    tags_of,
)
from envbuild.imports.statement import (
    OF_HOST,
    OF_OTHER_SYSTEM,
    OTHER_SYSTEM,
    OWN_NAME,
    UNUSED_INDEX,
    Draft,
    Lose,
    Statement,
    always_on_linux,
    builds_for,
    carried_as,
    for_linux,
    is_torch_wheel,
    linux_places,
    lose_contradicting,
    minor_versions,
    of_torch_wheel,
    project_of,
    python_version,
    requirement_text,
    split_extras,
)
from envbuild.recipe import checks
from envbuild.recipe.checks import reference_of
from envbuild.recipe.model import PYTHONS
from envbuild.recipe.targets import ARCHES, Target, accelerator_of, host_arch, torch_index

_PLATFORMS = {"linux-64": "x86_64", "linux-aarch64": "aarch64"}
# The channels that conda's `defaults` stands for on Linux (conda's documentation, "Managing channels").
_DEFAULTS = ("https://repo.anaconda.com/pkgs/main", "https://repo.anaconda.com/pkgs/r")
_FORMS = {
    "package": r"[a-z0-9][a-z0-9+.-]+",
    "workdir": r"/\S*",
    "index": "[a-z]+:.*",
    "platform": "|".join(_PLATFORMS),
}
_REQUIREMENTS = ("requirement", "constraint", "pin")
# The tag in a local version of a build for an accelerator: torch==2.7.1+cu126, but not flash-attn==2.8+cu12torch2.7.
_LOCAL = re.compile(r"===?[^;,+=]*\+([a-z]+[0-9]*(?:\.[0-9]+)*)(?![A-Za-z0-9])")
_ANY_LOCAL = re.compile(r"===?[^;,+=]*(\+[^\s;,]+)")


def _requirement_problem(text: str) -> str | None:
    problem = OTHER_SYSTEM if OF_OTHER_SYSTEM.match(text) else checks.requirement_problem(text)
    if re.search(r"@\s*file:", text):
        return f"{OF_HOST}: copy it into the recipe's folder, name it `NAME @ ./FILE`"
    if problem is None and (reference := reference_of(text)) and reference.kind == "path":
        return "a file of the project: copy it into the recipe's folder, and name it as `NAME @ ./FILE`"
    return problem


_CHECKS: Mapping[str, Callable[[str], str | None]] = {
    "requirement": _requirement_problem,
    "constraint": checks.constraint_problem,
    "override": checks.override_problem,
    "age": checks.age_problem,
    "pin": _requirement_problem,
    "conda": conda_problem,
    "conda-pin": conda_problem,
    "channel": checks.channel_problem,
    "index": checks.index_problem,
    "base": checks.base_problem,
    "accelerator": lambda tag: None if accelerator_of(tag) else "no known accelerator",
}
_CONDA = ("conda", "conda-pin")
# In PyTorch's indexes, builds for accelerators that no target has.
_OTHER_TAGS = ("xpu", "hpu", "npu")
_OTHER_ARCH = f"for another architecture: envbuild builds for {' and '.join(ARCHES)}"
_NO_TARGET = "of an accelerator for which envbuild has no target"
_OTHER_BASE = "a package of another base image: name the one that Debian has for it in `packages` of [image]"
# Images of Debian, whose packages a recipe's images may have; an image of a stage that they do not contain counts not.
_DEBIAN = re.compile(
    r"(?:[\w.-]+/)*(?:debian|python|buildpack-deps|slim|pypy)(?=[:@]|$)(?!\S*(?:alpine|ubuntu))"
    r"|(?:docker\.io/)?(?:continuumio/|mambaorg/micromamba|jupyter/)(?!\S*(?:jammy|focal|noble|cuda))"
    r"|ghcr\.io/astral-sh/uv:(?!\S*alpine)|mcr\.microsoft\.com/(?:vscode/)?devcontainers/(?:base:debian|python|anaconda|miniconda)"
)
# Packages of which PyTorch's indexes have builds for each accelerator.
_PYTORCH = re.compile(r"torch(?:vision|audio|text|data)?(?![\w.-])")


def compose(
    name: str,
    statements: Iterable[Statement],
    groups: Collection[str] = (),
    target: str | None = None,
    preferred: str = "",
) -> Draft:
    """Return the recipe called `name` with `statements`.

    Statements of extras, groups, features or categories are carried if `groups` names one of these; an unknown name in
    `groups` is reported as not carried. The Python is `preferred` if the statements accept it. The targets are
    `target`, else those of the accelerators and platforms in the statements, else this host's with CPUs. Raises
    UsageError for an invalid `target`.
    """
    kept: dict[Statement, None] = {}
    gone: list[Statement] = []

    def lose(statement: Statement, reason: str) -> None:
        text = ("python " if statement.kind == "python" else "") + statement.text.partition(" ;")[0]
        gone.append(replace(statement, reason=reason, text=masked_text(text)))
        kept.pop(statement, None)

    def of(*kinds: str, arch: str = "") -> list[str]:
        return list(dict.fromkeys(e.text for e in kept if e.kind in kinds and _PLATFORMS.get(e.platform, "") == arch))

    statements = list(statements)
    wheels = [statement for statement in statements if is_torch_wheel(statement)]
    gone += [replace(statement, reason=carried_as(statement)) for statement in wheels]
    given = _once(map(_without_extras, map(of_torch_wheel, statements)))
    comments = [statement for statement in given if statement.kind == "comment"]
    given = [statement for statement in given if statement.kind != "comment"]
    chosen = {normalise(group) for group in groups}
    known = {normalise(group): group for statement in given for group in statement.group.split()}
    for group in dict.fromkeys(groups):
        if normalise(group) not in known:
            tail = nearest(group, sorted(known.values())) if known else ""
            gone.append(Statement("extra", group, "--extra", reason=f"no statement belongs to it{tail}"))
    for statement in given:
        problem = statement.reason or _problem(statement, chosen, known)
        lose(statement, problem) if problem else kept.setdefault(statement)
    arches = [Target.parse(target).arch] if target else _arches(kept)
    here, left_out, elsewhere = _by_use(given, kept, arches, chosen)
    signs = gpu_signs(here, chosen)
    torch = [
        Requirement(statement.text).specifier
        for statement in kept
        if statement.kind in _REQUIREMENTS and _project(statement) == "torch"
    ]
    is_conda = any(statement.kind in _CONDA for statement in kept)
    for statement in torch_of_images(kept, given):
        lose(statement, "torch of the base image: the recipe has conda's pytorch")
    signed = tags_of(signs, torch, arches[0])
    # conda's channels have other builds than PyTorch's indexes
    chosen_tags = signed if is_conda else [published(tag, torch, arches[0]) for tag in signed]
    targets = [Target.parse(target)] if target else _targets(kept, arches, chosen_tags)
    tags = {target.accelerator for target in targets}
    for statement in [statement for statement in kept if statement.kind == "age"][1:]:
        lose(statement, "a recipe has one `exclude_newer`")
    for statement in list(kept):
        if _PLATFORMS.get(statement.platform or statement.text, targets[0].arch) not in arches:
            lose(statement, f"no target is for {statement.platform or statement.text}: choose with --target")
        elif statement.kind in ("index", "accelerator") and (tag := _tag(statement)) not in ("", *tags):
            lose(statement, f"no target is for {tag}: choose with --target" if accelerator_of(tag) else _NO_TARGET)
        elif statement.kind == "channel" and not is_conda:
            lose(statement, "no conda package is carried")
    python = python_version(kept, given, lose, preferred, wheels, () if is_conda else sorted(tags))
    kept = dict.fromkeys(builds_for(python, kept, gone))
    lose_contradicting(kept, lose)
    pins = _pins(kept, python, targets, lose)
    named, limits = _merged(kept, "requirement"), _merged(kept, "constraint")
    limits = {name: [_for_targets(name, text, targets) for text in texts] for name, texts in limits.items()}
    addresses = {project: pins.pop(project) for project, pin in list(pins.items()) if pin.url}
    if not named:  # a lock alone
        named = {project: [str(pin)] for project, pin in pins.items()}
        pins = {project: pin for project, pin in pins.items() if project == "torch"}
    others = {_project(statement): statement for statement in gone if statement.kind == "requirement"}
    for statement in [statement for statement in kept if statement.kind == "pin" and _project(statement) in addresses]:
        project = _project(statement)
        if project in others and project not in named:  # of an extra or group that is not carried
            lose(statement, others[project].reason)
        else:  # a constraint cannot have an address
            pin, texts_of_pin = addresses[project], named.get(project, [statement.text])
            named[project] = [_at(pin, Requirement(text)) for text in texts_of_pin]
    constraints = [text for texts in limits.values() for text in texts]
    for texts_of_project in named.values():  # a second requirement of a project has to have a marker, as the first
        constraints += texts_of_project[1:] if ";" not in texts_of_project[0] else []
        texts_of_project[1:] = texts_of_project[1:] if ";" in texts_of_project[0] else []
    constraints += [f"{project}{_for_targets(project, str(pin.specifier), ())}" for project, pin in pins.items()]
    for statement in [statement for statement in kept if statement.kind == "override"]:
        project = _project(statement)
        if differs(project, [statement.text]) or any("@" in text for text in named.get(project, ())):
            lose(statement, "its builds differ by target, or it has an address: change its version there")
        elif project in named:  # an override replaces its versions, too
            first = Requirement(named[project][0])
            named[project] = [_joined(first.name, first.extras, ())]
    # Packages whose builds differ by accelerator: torch, and those with a local version such as +cu126.
    built = [] if is_conda else [project for project, texts in named.items() if differs(project, texts)]
    of_targets = {project: named.pop(project) for project in built}
    common = [text for texts in named.values() for text in texts]
    tables: dict[str, dict[str, Any]] = {}
    for recipe_target in targets:
        own = dict.fromkeys([*of("index"), *of("index", arch=recipe_target.arch)])
        indexes = [url for url in own if _tag_of(url) in ("", recipe_target.accelerator)]
        indexes.sort(key=lambda url: not _tag_of(url))
        # Where PyTorch has no index for a build that the sources pin, it is in theirs.
        if (
            not is_conda
            and needs_index(recipe_target, indexes)
            and (is_published(recipe_target.accelerator) or not indexes)
        ):
            indexes.insert(0, torch_index(recipe_target.accelerator))
        tables[recipe_target.name] = _filled(
            requirements=[
                built_for(text, pins.get(name), recipe_target) for name, texts in of_targets.items() for text in texts
            ],
            indexes=indexes,
            conda=of(*_CONDA, arch=recipe_target.arch),
        )
    data: dict[str, Any] = {"name": name, "description": f"Imported by envbuild init: {name}", "python": python}
    data |= {"requirements": [] if is_conda else common} | _filled(
        constraints=list(dict.fromkeys(constraints)),
        overrides=[text for texts in _merged(kept, "override").values() for text in texts],
        exclude_newer=next(iter(of("age")), ""),
    )
    if is_conda:
        added = list(with_python([statement for statement in kept if statement.kind == "channel"]))
        gone += added
        named_channels = [*of("channel"), *(channel.text for channel in added)]
        channels = [url for text in named_channels for url in (_DEFAULTS if text == "defaults" else (text,))]
        conda = {"channels": channels or default_channels(of(*_CONDA)), "dependencies": of(*_CONDA) or ["python"]}
        data |= {"environment": "conda", "conda": conda | _filled(requirements=common)}
    for statement in [statement for statement in kept if statement.kind == "project"]:
        if any(statement.reason == OWN_NAME for statement in gone):
            lose(statement, "its requirements name packages of its workspace, which an index would replace")
        else:
            data["project"] = {"path": statement.text}
    data |= (
        _filled(fabric="".join(of("fabric")))
        | {"targets": tables}
        | _filled(image=_image(kept, tuple(gone), lose, is_conda))
    )
    gone += [*_rebuilt(kept, targets, given_target=bool(target)), *minor_versions(kept, python)]
    gone += [] if is_conda else _torch_builds(kept, targets)
    of_comments = gpu_signs(comments)
    notes = [gpu_note(signs, of_comments, targets, chosen_tags)]
    if not notes[0] and signed != chosen_tags and tags == {*chosen_tags}:
        notes.append(published_note(signs, signed, targets))
    if not target and not any(map(_chooses, kept)):
        notes += [
            group_note(gpu_signs(left_out), targets, _with_content(given, known)),
            elsewhere_note(gpu_signs(elsewhere), targets),
        ]
        if not notes[0]:
            notes.append(elsewhere_note(of_comments, targets, "comments of the sources"))
    if not any(notes) and any(target.family.gpu for target in targets):  # comments for other GPUs
        gone += [sign.statement for sign in not_carried(of_comments, targets)]
    return Draft(name, data, tuple(kept), tuple(gone), ". ".join(filter(None, notes)))


def _filled(**values: Any) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value}


def _once(statements: Iterable[Statement]) -> list[Statement]:
    """Return the statements without duplicates; the groups of equal statements are combined."""
    groups: dict[Statement, list[str]] = {}
    for statement in statements:
        groups.setdefault(replace(statement, group=""), []).append(statement.group)
    return [
        replace(statement, group="" if "" in groups_of else " ".join(dict.fromkeys(groups_of)))
        for statement, groups_of in groups.items()
    ]


def _by_use(
    given: Sequence[Statement], kept: Collection[Statement], arches: Collection[str], chosen: set[str]
) -> tuple[list[Statement], list[Statement], list[Statement]]:
    """Return the statements for the recipe, those of extras that are not carried, and those for other systems."""
    here, left_out, elsewhere = list[Statement](), list[Statement](), list[Statement]()
    # Sources that choose an index do not mean those that they leave unused.
    reasons = (*ELSEWHERE, UNUSED_INDEX) if any(statement.kind == "index" for statement in given) else ELSEWHERE
    for statement in given:
        is_out = statement not in kept and _left_out(statement, chosen)
        if _is_for(statement, arches) and statement.reason not in reasons:
            (left_out if is_out else here).append(statement)
        elif not is_out:
            elsewhere.append(statement)
    return here, left_out, elsewhere


def _without_extras(statement: Statement) -> Statement:
    """Return the statement with the extras in its marker as its groups."""
    text, semicolon, marker = statement.text.partition(";")
    if statement.kind not in _REQUIREMENTS or not semicolon:
        return statement
    rest, names = split_extras(marker.strip())
    if not names and rest == marker.strip():
        return statement
    return replace(statement, text=f"{text.strip()} ; {rest}" if rest else text.strip(), group=statement.group or names)


def _left_out(statement: Statement, groups: Collection[str]) -> bool:
    """Return whether a statement has groups, but none of `groups` (normalised names, PEP 685)."""
    own = statement.group.split()
    return bool(own) and not any(normalise(name) in groups for name in own)


def _with_content(given: Iterable[Statement], known: Collection[str]) -> set[str]:
    """Return the groups, of the `known` ones, that have a statement that can be carried."""
    members = (statement for statement in given if statement.group and not statement.reason)
    return {name for member in members if not _problem(member, known) for name in member.group.split()}


def _chooses(statement: Statement) -> bool:
    """Return whether a statement in an extra chooses the torch build: torch itself, or an index of PyTorch."""
    return bool(statement.group) and (
        _project(statement) == "torch" or (statement.kind == "index" and bool(_tag(statement)))
    )


def _is_for(statement: Statement, arches: Collection[str]) -> bool:
    """Return whether a statement's platform and marker are true on Linux on one of `arches`."""
    marker = statement.text.partition(";")[2] if statement.kind in _REQUIREMENTS else ""
    is_here = _PLATFORMS.get(statement.platform, next(iter(arches))) in arches
    return is_here and for_linux(marker, linux_places(arches))


def _problem(statement: Statement, groups: Collection[str], known: Collection[str] = ()) -> str | None:
    """Return why a statement cannot be carried, or None.

    The recipe has the statements of `groups`, out of all that are `known`: both are normalised names (PEP 685).
    """
    if _left_out(statement, groups):
        own = statement.group.split()
        more = [f"{len(own) - 2} more"] if len(own) > 3 else own[2:]
        problem = _problem(statement, known)
        advice = f", and cannot be carried: {problem}" if problem else f": carry it with --extra {own[0]}"
        return f"belongs to {' and '.join((*own[:2], *more))}{advice}"
    if statement.kind == "channel" and statement.text == "nodefaults":
        return "envbuild adds no default channels"
    if statement.kind == "conda" and re.search(r"\[(?!build=|version=)", statement.text):
        return "a recipe's match specs have no other keys than version and build"
    if statement.kind == "requirement" and re.match(r"(-e|--editable)\b|\.{1,2}(/|$)", statement.text):
        if statement.text.endswith((".whl", ".tar.gz", ".zip")):
            return "a file of the project: copy it into the recipe's folder, and name it as `NAME @ ./FILE`"
        return "a folder with code: own code belongs to [project], another project's is NAME @ git+URL@COMMIT"
    marker = statement.text.partition(";")[2] if statement.kind in _REQUIREMENTS else ""
    if not for_linux(marker):
        other = re.search(r"sys_platform|platform_system|platform_machine|os_name", marker)
        return OTHER_SYSTEM if other else f"not for Python {PYTHONS[0]} to {PYTHONS[-1]}"
    tags = _LOCAL.findall(statement.text) if statement.kind in _REQUIREMENTS else ()
    if statement.kind in _REQUIREMENTS and is_only_elsewhere(statement):
        return _NO_TARGET  # its index is left out, too
    if any(tag in _OTHER_TAGS for tag in tags) and not _PYTORCH.match(statement.text):
        return _NO_TARGET
    if statement.text.count(".") > 63:
        return "has more dots than envbuild's reader of TOML accepts"
    problem = _CHECKS[statement.kind](statement.text) if statement.kind in _CHECKS else None
    if problem is None and statement.kind in _FORMS and not re.fullmatch(_FORMS[statement.kind], statement.text):
        if statement.kind == "platform":
            return _OTHER_ARCH if statement.text.startswith("linux") else OTHER_SYSTEM
        return f"a recipe accepts {_FORMS[statement.kind]} only"
    return problem


def _tag(statement: Statement) -> str:
    return statement.text if statement.kind == "accelerator" else _tag_of(statement.text)


def _tag_of(url: str) -> str:
    """Return the accelerator's tag in the URL of a PyTorch index, nightly index or mirror; "" for other indexes."""
    parts = [part for part in url.split("/")[3:] if accelerator_of(part) or part in _OTHER_TAGS]
    return parts[-1] if parts else ""


def _arches(kept: Collection[Statement]) -> list[str]:
    """Return the architectures of the platforms in the sources, else this host's."""
    named = [
        _PLATFORMS.get(statement.platform or statement.text, "")
        for statement in kept
        if statement.kind in ("platform", *_CONDA)
    ]
    arches = [arch for arch in dict.fromkeys(named) if arch]
    return arches or [host_arch() if host_arch() in ARCHES else ARCHES[0]]


def _targets(kept: Collection[Statement], arches: Sequence[str], signed: Sequence[str]) -> list[Target]:
    """Return the targets for torch's local version, else for the indexes, else for the tags `signed`, else for CPUs."""
    here = [statement for statement in kept if _is_for(statement, arches)]
    texts = [statement.text for statement in here if statement.kind in _REQUIREMENTS]
    pinned = [tag for text in texts if project_of(text) == "torch" for tag in _LOCAL.findall(text)]
    indexed = [_tag(statement) for statement in here if statement.kind in ("index", "accelerator")]
    tags = list(filter(accelerator_of, pinned)) or list(filter(accelerator_of, indexed)) or signed or ["cpu"]
    return [Target(tag, arch) for tag in dict.fromkeys(tags) for arch in arches]


def _pins(kept: Collection[Statement], python: str, targets: list[Target], lose: Lose) -> dict[str, Requirement]:
    """Return the pin of each project; if a project has several, the pin whose marker is true for all targets."""
    requirements: dict[str, dict[Statement, Requirement]] = {}
    for statement in [statement for statement in kept if statement.kind == "pin"]:
        pin = Requirement(statement.text)
        requirements.setdefault(normalise(pin.name), {})[statement] = pin
    chosen: dict[str, Requirement] = {}
    places = [(target.arch, python) for target in targets]
    for name, pins in requirements.items():
        several = len({pin.url or str(pin.specifier) for pin in pins.values()}) > 1
        enough = all if several else any
        fitting = [
            statement
            for statement, pin in pins.items()
            if enough(for_linux(str(pin.marker or ""), [place]) for place in places)
        ]
        if len({pins[statement].url or str(pins[statement].specifier).partition("+")[0] for statement in fitting}) == 1:
            chosen[name] = pins[fitting[0]]
        for statement in pins:
            if statement not in fitting:
                lose(statement, f"not for Python {python} on Linux")
            elif name not in chosen:
                lose(statement, "several versions fit, and the recipe can have one: add it to `constraints`")
    return chosen


def _merged(kept: Collection[Statement], kind: str) -> dict[str, list[str]]:
    """Return the requirements of each project: first one that combines all without markers, then those with markers."""
    by_name: dict[str, list[Requirement]] = {}
    for statement in [statement for statement in kept if statement.kind == kind]:
        arch = _PLATFORMS.get(statement.platform) if ";" not in statement.text else None
        requirement = Requirement(statement.text + (f' ; platform_machine == "{arch}"' if arch else ""))
        by_name.setdefault(normalise(requirement.name), []).append(requirement)
    merged: dict[str, list[str]] = {}
    for name, several in by_name.items():
        plain = [requirement for requirement in several if requirement.marker is None]
        if plain:  # a marker that is true on each Linux adds nothing to the others
            plain = [
                requirement
                for requirement in several
                if requirement.marker is None or always_on_linux(str(requirement.marker))
            ]
        extras = {extra for requirement in plain for extra in requirement.extras}
        parts = [str(part) for requirement in plain for part in requirement.specifier]
        direct = next(
            (f" @ {requirement.url}" for requirement in plain if requirement.url), ""
        )  # it decides the version
        merged[name] = [_joined(plain[0].name, extras, [direct] if direct else parts)] if plain else []
        merged[name] += dict.fromkeys(str(requirement) for requirement in several if requirement not in plain)
        if plain and any(set(requirement.extras) - extras for requirement in several):  # a constraint brings no extra
            merged[name][0] += f' ; python_version >= "{PYTHONS[0]}"'
    return merged


def _project(statement: Statement) -> str:
    return project_of(statement.text)


def _joined(name: str, extras: Collection[str], specifiers: Iterable[str], marker: object = None) -> str:
    return requirement_text(name, sorted(extras), ",".join(dict.fromkeys(specifiers)), str(marker or ""))


def _at(pin: Requirement, requirement: Requirement) -> str:
    """Return the requirement with the address from its `pin` instead of a version."""
    return _joined(requirement.name, requirement.extras | pin.extras, [f" @ {pin.url}"], requirement.marker)


def local_version(target: Target) -> str:
    """Return the local version of torch's builds for a target; CPU builds for aarch64 lack one on some indexes."""
    return "" if target.arch == "aarch64" and not target.family.gpu else f"+{target.accelerator}"


def needs_index(target: Target, indexes: Iterable[str]) -> bool:
    """Return whether PyTorch's builds for a target are in an index that is not among `indexes`."""
    return bool(local_version(target)) and not any(map(_tag_of, indexes))


def differs(name: str, texts: Collection[str]) -> bool:
    """Return whether the builds of a package, whose requirements are `texts`, differ by accelerator."""
    return (name == "torch" or any(_is_built(name, text) for text in texts)) and " @ " not in "".join(texts)


def _is_built(name: str, text: str) -> bool:
    """Return whether a requirement pins a build for an accelerator; any local version of PyTorch's packages is one."""
    tags = _LOCAL.findall(text)
    is_pytorch = _PYTORCH.fullmatch(name) is not None and _ANY_LOCAL.search(text) is not None
    return is_pytorch or any(accelerator_of(tag) or tag in _OTHER_TAGS for tag in tags)


def _for_targets(name: str, text: str, targets: Sequence[Target]) -> str:
    """Return a constraint or specifiers without the local version of a build that none of `targets` has."""
    is_other = _is_built(name, text) and not any(f"+{target.accelerator}" in text for target in targets)
    return re.sub(r"(===?[^;,+=]*)\+[^\s;,]+", r"\1", text) if is_other else text


def built_for(text: str, pin: Requirement | None, target: Target, old: str = "") -> str:
    """Return a requirement for a target: with the locked version, and the local version of the target's build.

    A version without a local part keeps none, unless it is torch's, or that of the `old` requirement has one:
    torchvision==0.22.1 has the same version in the indexes of all accelerators.
    """
    requirement = Requirement(text)
    parts = [str(part) for part in requirement.specifier] + ([str(pin.specifier)] if pin else [])
    name = normalise(requirement.name)
    is_built = name == "torch" or any(_is_built(name, text) for text in (*parts, old))
    local = local_version(target) if is_built else ""

    def replaced(match: re.Match[str]) -> str:  # a longer local version of the same build, +rocm6.4.1, stays
        is_kept = (local and (match[3] or "").startswith(local)) or not is_built
        unknown = name == "torch" and has_no_build(match[2], target)
        return match[0] if is_kept else f"{match[1]}{match[2]}{'' if unknown else local}"

    built = [re.sub(r"^(===?)([^+*]+)(\+.*)?$", replaced, part) for part in parts]
    return _joined(requirement.name, requirement.extras, built, requirement.marker)


def _rebuilt(kept: Collection[Statement], targets: Sequence[Target], given_target: bool) -> Iterator[Statement]:
    """Yield the statements whose local version the recipe replaces by that of another build, with the reason."""
    for statement in [statement for statement in kept if statement.kind in _REQUIREMENTS]:
        text = statement.text.partition(";")[0]
        name, local, tags = project_of(text), _ANY_LOCAL.search(text), _LOCAL.findall(text)
        if not local or " @ " in text or not _is_built(name, text):
            continue
        is_known = any(accelerator_of(tag) for tag in tags)
        is_same = any(local[1].startswith(f"+{target.accelerator}") for target in targets)
        if not is_same and not (is_known and (given_target or statement.kind == "pin")):
            new = built_for(text.strip(), None, targets[0])
            yield replace(statement, text=text.strip(), reason=f"the recipe has the build for its target: {new}")


def _torch_builds(kept: Collection[Statement], targets: Sequence[Target]) -> Iterator[Statement]:
    """Yield the pins of torch without a local version to which the recipe adds one, or for which no build is known."""
    pins = {
        statement.text.partition(";")[0].strip(): statement for statement in kept if statement.kind in _REQUIREMENTS
    }
    for text, statement in pins.items():
        pin = re.fullmatch(r"torch(?:\[[^]]*\])?\s*={2,3}\s*([\w.]+)", text)
        for target in filter(local_version, targets if pin else ()):
            new = built_for(text, None, target)
            reason = f"carried with the local version of its target's build: {new}"
            if "+" not in new:
                reason = f"carried as it is: PyTorch has no build of it for {target.family.title} {target.version}"
            yield replace(statement, text=text, reason=reason)


def _image(kept: Collection[Statement], gone: Collection[Statement], lose: Lose, is_conda: bool) -> dict[str, Any]:
    """Return the [image] table."""
    image: dict[str, Any] = {}
    # Debian's packages have other names and versions than those of Ubuntu, ROS and NVIDIA's images.
    bases = [
        statement.text.removeprefix("FROM ")
        for statement in (*kept, *gone)
        if statement.kind == "base" or statement.text[:5] == "FROM "
    ]
    others = [base for base in bases if not _DEBIAN.match(base)]
    for statement in sorted(kept, key=lambda statement: statement.kind == "package"):  # after the base
        name, _, value = statement.text.partition("=")
        if statement.kind in ("base", "workdir"):
            if statement.kind == "base" and not is_conda:
                lose(statement, "which interpreter does it have? Without base and python in [image]: Debian")
            else:
                image[statement.kind] = statement.text
        elif statement.kind == "package":
            if "base" in image or others:
                lose(statement, _OTHER_BASE if others else "the image has another base than Debian")
            else:
                image.setdefault("packages", []).append(statement.text)
        elif statement.kind == "env":
            problem = checks.variable_problem(name) or ("refers to another variable" if "$" in value else None)
            if name in ("PATH", "VIRTUAL_ENV", "CONDA_PREFIX"):
                problem = "envbuild sets it"
            elif is_secret(name, value) or masked_text(value) != value:
                problem = "may be a secret"
            lose(statement, problem) if problem else image.setdefault("env", {}).update({name: value})
    return image
