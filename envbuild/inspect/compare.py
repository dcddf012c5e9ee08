"""Comparison of two artifacts: settings, packages, files.

docs/reference/inspect.md says which differences between files count.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from envbuild.inspect.comparable import BETWEEN, LEFT_OUT, SITE, comparable, view_of
from envbuild.inspect.facts import (
    CONDA,
    FOLDERS,
    IMAGE,
    SQUASHED,
    VENV,
    ArtifactReader,
    Description,
    Inventory,
    completed,
)
from envbuild.inspect.masking import HIDDEN, is_secret, masked_words
from envbuild.site.pip_config import redact

ADDED, REMOVED, CHANGED = "added", "removed", "changed"
# Labels about the origin of an image. They may differ between images with the same content.
_PROVENANCE = {
    "org.envbuild.recipe.digest": "recipe",
    "org.envbuild.lock.digest": "lock",
    "org.envbuild.base.digest": "base lock",
    "org.envbuild.plan.digest": "plan",
    "org.envbuild.version": "envbuild",
    "org.opencontainers.image.created": "created",
}
_SAID = ("org.envbuild.recipe", "org.envbuild.target", "org.opencontainers.image.title",
         "org.opencontainers.image.base.name", "org.opencontainers.image.base.digest")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Change:
    """One difference; `before` or `after` is None for a missing thing.

    `what` maps each part that differs to its values: part → [before, after].
    """

    name: str
    before: str | None
    after: str | None
    what: Mapping[str, tuple[str, str]] | None = None

    @property
    def kind(self) -> str:
        """`added`, `removed` or `changed`, from the first artifact to the second."""
        if self.before is None:
            return ADDED
        return REMOVED if self.after is None else CHANGED

    def as_json(self) -> dict[str, Any]:
        data = {"change": self.kind, **asdict(self)}
        if self.what is None:
            del data["what"]
        return data


@dataclass(frozen=True, slots=True)
class Comparison:
    """The differences between two artifacts.

    `files` is None when files were not compared. `left_out` names what the comparison of files ignores. `notes`
    do not count as differences.
    """

    settings: tuple[Change, ...]
    built: tuple[Change, ...]
    conda: tuple[Change, ...]
    python: tuple[Change, ...]
    debian: tuple[Change, ...]
    files: tuple[Change, ...] | None
    left_out: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Whether nothing that was compared differs."""
        packages = self.built or self.conda or self.python or self.debian
        return not (self.settings or packages or self.files)


def compare(one: ArtifactReader, other: ArtifactReader, *, files: bool) -> Comparison:
    """Compare two artifacts of any kinds. Raises BuildError when one of them is damaged."""
    kinds = {one.about.kind, other.about.kind}
    between = len(kinds) > 1 and not kinds.isdisjoint(FOLDERS)
    notes = _provenance(one.about, other.about)
    if _same_content(one.about, other.about):
        settings = _setting_changes(one.about, None, other.about, None, between)
        return Comparison(settings, (), (), (), (), () if files else None, (), notes)
    left, right = one.contents(hashes=files), other.contents(hashes=files)
    view = view_of(one.about.kind, left, other.about.kind, right)
    settings = _setting_changes(one.about, left, other.about, right, between)
    inner = between or view == CONDA
    python = _changes(_python(left, inner), _python(right, inner))
    conda: tuple[Change, ...] = ()
    if view not in (SITE, VENV, BETWEEN):
        conda = _changes(_conda(left, inner), _conda(right, inner))
    built = _changes(_built(left, inner), _built(right, inner)) if view != SITE else ()
    debian = () if between else _changes(_debian(left), _debian(right))
    left_out: tuple[str, ...] = ()
    found: tuple[Change, ...] | None = None
    if files:
        left_out = LEFT_OUT[view]
        if left.prefix is None or right.prefix is None:
            notes += _no_environment(one.about, left, other.about, right, between)
        if not between or (left.prefix is not None and right.prefix is not None):
            found = _files(comparable(left, view), comparable(right, view))
    return Comparison(settings, built, conda, python, debian, found, left_out, notes)


def _same_content(one: Description, other: Description) -> bool:
    """Return whether both are images of the same layers, or both are image files with the same file system.

    Their contents then need not be read.
    """
    if one.kind in SQUASHED and other.kind in SQUASHED:
        return one.identity == other.identity
    if one.kind != IMAGE or other.kind != IMAGE:
        return False
    return [layer.diff_id for layer in one.layers] == [layer.diff_id for layer in other.layers]


def _setting_changes(
    one: Description, left: Inventory | None, other: Description, right: Inventory | None, between: bool
) -> tuple[Change, ...]:  # fmt: skip
    """Return the differences in settings.

    Artifacts of different kinds do not record the same settings. Between them, environment variables are
    compared when both artifacts record some, any other setting only when both record it.
    """
    before, after = _settings(one, left, between), _settings(other, right, between)
    if one.kind != other.kind and not between:
        told = before.keys() & after.keys()
        if one.env and other.env:
            told |= {name for name in before | after if name.startswith("env ")}
        before = {name: value for name, value in before.items() if name in told}
        after = {name: value for name, value in after.items() if name in told}
    return _changes(before, after)


def _settings(about: Description, contents: Inventory | None, between: bool = False) -> dict[str, str]:
    about = completed(about, contents)
    found = {"target": about.target, "recipe": about.recipe}
    if between:
        found["python"] = about.python
    else:
        found["python"] = about.python_version or about.python
        found |= {"base": about.base, "base digest": about.base_digest}
        found |= {"platform": about.platform, "workdir": about.workdir, "user": about.user}
        found |= {"entrypoint": _line(about.entrypoint), "cmd": _line(about.cmd)}
        found |= {f"env {name}": f"={value}" for name, value in about.env.items()}
        labels = about.labels.items()
        skipped = (*_PROVENANCE, *_SAID)
        found |= {f"label {name}": f"={value}" for name, value in labels if name not in skipped}
    return {name: value for name, value in found.items() if value}


def _line(words: Sequence[str]) -> str:
    return json.dumps(list(words)) if words else ""


def _built(contents: Inventory, inner: bool) -> dict[str, tuple[str, str]]:
    """Return source layer → (version, digest of its files); with `inner`, only layers inside the environment."""
    found = {}
    for layer in contents.built:
        if layer.location == (contents.prefix or ""):
            found[layer.name] = layer.version, layer.files
        elif not inner:
            found[f"{layer.name} (/{layer.location})"] = layer.version, layer.files
    return found


def _conda(contents: Inventory, inner: bool) -> dict[str, tuple[str, str]]:
    """Return package → (version and build, digest); with `inner`, only packages of the environment itself."""
    own = contents.own_conda
    found = {package.name: package for package in own}
    if not inner:
        others = (package for package in contents.conda if package not in own)
        found |= {f"{package.name} (/{package.location})": package for package in others}
    return {name: (f"{p.version} {p.build}", p.record) for name, p in found.items()}


def _python(contents: Inventory, inner: bool) -> dict[str, tuple[str, str]]:
    """Return package → (version, digest).

    Packages outside the environment are named with their folder, or skipped with `inner`. With `inner`, a
    digest covers only content that does not depend on the installer.
    """
    prefix = contents.prefix
    found: dict[str, tuple[str, str]] = {}
    for package in contents.python:
        inside = prefix is not None and (not prefix or package.location.startswith(f"{prefix}/"))
        if inner and prefix is not None and not inside:
            continue
        name = package.name if inside or inner else f"{package.name} (/{package.location})"
        digest = package.content if inner else package.record
        if name in found:  # the package is installed twice: keep both
            version, known = found[name]
            found[name] = f"{version}, {package.version}", f"{known} {digest}"
        else:
            found[name] = package.version, digest
    return found


def _debian(contents: Inventory) -> dict[str, tuple[str, str]]:
    return {f"{p.name}:{p.arch}": (p.version, "") for p in contents.debian}


def _changes(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[Change, ...]:
    """Return the differences between two tables of values or of (version, digest)."""
    found = []
    for name in sorted(one.keys() | other.keys()):
        before, after = one.get(name), other.get(name)
        if before == after:
            continue
        what = None
        if isinstance(before, tuple) and isinstance(after, tuple) and before[0] == after[0]:
            what = {"content": (before[1] or "no RECORD", after[1] or "no RECORD")}
        found.append(Change(name, _shown(name, before), _shown(name, after), what))
    return tuple(found)


def _shown(name: str, value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, tuple):
        return str(value[0])
    text = str(value)
    if name.startswith(("env ", "label ")):
        text = text[1:]
        return HIDDEN if is_secret(name.partition(" ")[2]) and text else redact(text)
    if name in ("entrypoint", "cmd"):
        return json.dumps(masked_words(json.loads(text)))
    return redact(text)


def _files(one: Mapping[str, Mapping[str, str]], other: Mapping[str, Mapping[str, str]]) -> tuple[Change, ...]:
    found = []
    for path in sorted(one.keys() | other.keys()):
        before, after = one.get(path), other.get(path)
        if before == after:
            continue
        if before is None or after is None:
            found.append(Change(path, _brief(before), _brief(after)))
            continue
        parts = {
            name: (before.get(name, ""), after.get(name, ""))
            for name in (*before, *(n for n in after if n not in before))
            if before.get(name) != after.get(name)
        }
        found.append(Change(path, _brief(before), _brief(after), parts))
    return tuple(found)


def _brief(item: Mapping[str, str] | None) -> str | None:
    if item is None:
        return None
    return f"{item['kind']} {item['size']}" if item.get("size") else item["kind"]


def _provenance(one: Description, other: Description) -> tuple[str, ...]:
    told: list[tuple[str, Callable[[Description], str]]] = [
        ("recipe", lambda about: about.recipe_digest),
        ("lock", lambda about: about.lock_digest),
        ("base lock", lambda about: about.base_lock_digest),
        ("envbuild version", lambda about: about.envbuild),
    ]
    differing = [name for name, get in told if get(one) and get(other) and get(one) != get(other)]
    return (f"made from another {', '.join(differing)}",) if differing else ()


def _no_environment(
    one: Description, left: Inventory, other: Description, right: Inventory, between: bool
) -> tuple[str, ...]:
    if not between:
        return ()
    without = [about.spelling for about, contents in ((one, left), (other, right)) if contents.prefix is None]
    return (f"{', '.join(without)} has no environment of its own: files were not compared",)
