"""Comparison of two artifacts: settings, packages, files.

Irrelevant differences between files are left out: docs/reference/inspect.md lists them, and data/comparison.toml has
their names for the user.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from envbuild.base.masking import masked, masked_words, redact
from envbuild.contract import image_manifest, manifest, state
from envbuild.data import load_table
from envbuild.image.entry import DIR, FILE, SYMLINK
from envbuild.inspect.facts import (
    CONDA,
    FOLDERS,
    IMAGE,
    SQUASHED,
    VENV,
    ArtifactReader,
    Description,
    Inventory,
    Item,
    completed,
)

# Views, in which files are compared. IMAGE: two images or two file systems. CONVERTED: an image and a file system for
# unprivileged users. VENV: two venvs. BETWEEN: a venv and one in an image. CONDA: two conda environments, at most one
# of them in an image. SITE: a conda environment and a venv, each in a folder or an image.
BETWEEN, CONVERTED, SITE = "between", "converted", "site"
NO_CONDA = (BETWEEN, SITE, VENV)  # conda packages are not compared
# What envbuild writes about the artifact as a whole.
_ABOUT = frozenset({state.FILE, manifest.FILE, posixpath.basename(image_manifest.FILE_NAME)})
_VENV_ONLY = re.compile(r"(?:^|/)(?:__pycache__(?:/.*)?|\.lock|[^/]+\.dist-info/(?:uv_cache\.json|direct_url\.json))$")
_FRAME = re.compile(
    r"lib64|\.gitignore|CACHEDIR\.TAG|pyvenv\.cfg|pylock\.toml"
    r"|bin/(?:python[0-9.]*|(?:de)?activate[^/]*|[Aa]ctivate\.ps1|pydoc\.bat)"
    r"|.*\.dist-info/(?:INSTALLER|REQUESTED)"
)
# When two packages have the same path, rattler keeps one file in its place and the other one in __clobbers__.
_CONDA_FRAME = re.compile(
    r"CACHEDIR\.TAG|(?:conda-meta|__clobbers__|pkgs|envs)/.*|.*\.dist-info/(?:INSTALLER|REQUESTED)"
)
_SITE = re.compile(r"lib/python[^/]+/site-packages/.*(?<!\.dist-info/INSTALLER)(?<!\.dist-info/REQUESTED)")
# Keys of pyvenv.cfg about the host's interpreter and the tool that made the environment.
_OF_THE_HOST = ("home", "executable", "command", "prompt", "uv", "version", "version_info")
ADDED, REMOVED, CHANGED = "added", "removed", "changed"
# Labels that are no settings of their own: about the origin, which may differ between images with the same content, and
# those that are compared under another name.
_NOT_COMPARED = (
    "org.envbuild.recipe.digest",
    "org.envbuild.lock.digest",
    "org.envbuild.base.digest",
    "org.envbuild.plan.digest",
    "org.envbuild.version",
    "org.opencontainers.image.created",
    "org.envbuild.recipe",
    "org.envbuild.target",
    "org.opencontainers.image.title",
    "org.opencontainers.image.base.name",
    "org.opencontainers.image.base.digest",
)
# Differences in these fields of a Description are notes.
_PROVENANCE = {
    "recipe": "recipe_digest",
    "lock": "lock_digest",
    "base lock": "base_lock_digest",
    "envbuild version": "envbuild",
}


def view_of(left_kind: str, left: Inventory, right_kind: str, right: Inventory) -> str:
    """Return the view in which the files of two artifacts of `left_kind` and `right_kind` are compared."""
    if left_kind not in FOLDERS and right_kind not in FOLDERS:
        return IMAGE if (left_kind in SQUASHED) == (right_kind in SQUASHED) else CONVERTED
    environments = {left.environment, right.environment} - {""}
    if len(environments) > 1:
        return SITE
    if CONDA in environments:
        return CONDA
    return VENV if left_kind == right_kind else BETWEEN


def comparable(contents: Inventory, view: str) -> dict[str, dict[str, str]]:
    """Return path → the properties that are compared, as text.

    Paths are relative to the root, or to the environment when only environments are compared.
    """
    prefix = contents.prefix
    frame = None if prefix is None else (f"{prefix}/" if prefix else "")
    inner = view in (BETWEEN, CONDA, SITE)
    records = {f"{package.info}/RECORD": package.content if inner else package.record for package in contents.python}
    properties = {}
    for path, item in contents.files.items():
        inside = path.removeprefix(frame) if frame is not None and path.startswith(frame) else None
        if inside in _ABOUT or (inner and inside is None):
            continue
        name = inside if inner and inside is not None else path
        if view in (CONVERTED, IMAGE):
            exact = _converted(path, item) if view == CONVERTED else item
            if exact is not None:
                properties[name] = _properties(exact, True)
        elif not _VENV_ONLY.search(name) and not (inner and _is_frame(name, item, view)):
            properties[name] = {**_properties(item, False), **_settled(path, name, item, view, contents)}
            if records.get(path):
                properties[name] |= {"size": "", "content": records[path]}
    return properties


def _properties(item: Item, exact: bool) -> dict[str, str]:
    return {
        "kind": item.kind,
        "mode": f"{item.mode:04o}" if exact else "x" if item.kind == FILE and item.mode & 0o111 else "",
        "owner": f"{item.uid}:{item.gid}" if exact else "",
        "size": str(item.size) if item.kind == FILE else "",
        "content": item.sha256,
        "link": item.target,
        "attributes": item.extra.strip() if exact else "",
    }


def _converted(path: str, item: Item) -> Item | None:
    """Return `item` as a file system for unprivileged users has it, None if it is left out there."""
    mode = image_manifest.converted_mode(path, item.kind, item.mode)
    if mode is None:
        return None
    extra = " ".join(word for word in item.extra.split() if word.startswith("user."))
    return replace(item, mode=mode, uid=0, gid=0, extra=extra)


def _is_frame(name: str, item: Item, view: str) -> bool:
    if item.kind == DIR:
        return True
    if view == SITE:
        return _SITE.fullmatch(name) is None
    return (_CONDA_FRAME if view == CONDA else _FRAME).fullmatch(name) is not None


def _settled(path: str, name: str, item: Item, view: str, contents: Inventory) -> dict[str, str]:
    """Return the properties of a file that differ between hosts or places, with values that do not."""
    script = {"size": "", "content": ""} if item.script and name.startswith("bin/") else {}
    if contents.environment == CONDA:
        known = contents.recorded.get(path)
        if known is None:
            return script  # pip's: its first line names the interpreter
        here, original = known
        return {"size": "", "content": original if item.sha256 == here else item.sha256} if item.kind == FILE else {}
    if name == "pyvenv.cfg":
        kept = sorted((k, v) for k, v in contents.config.items() if k not in _OF_THE_HOST)
        return {"size": "", "content": hashlib.sha256(json.dumps(kept).encode()).hexdigest()}
    if re.fullmatch(r"bin/python[0-9.]*", name) and item.kind == SYMLINK:
        return {"link": "the interpreter" if item.target.startswith("/") else item.target}
    return script if view == BETWEEN else {}


@dataclass(frozen=True, slots=True)
class Change:
    """One difference; `before` or `after` is None for a missing thing.

    `parts` maps each part that differs to its values: part → [before, after].
    """

    name: str
    before: str | None
    after: str | None
    parts: Mapping[str, tuple[str, str]] | None = None

    @property
    def kind(self) -> str:
        """`added`, `removed` or `changed`, from the first artifact to the second."""
        if self.before is None:
            return ADDED
        return REMOVED if self.after is None else CHANGED

    def as_json(self) -> dict[str, Any]:
        """Return the fields for --json, which calls the parts `what`."""
        fields = {"change": self.kind, "name": self.name, "before": self.before, "after": self.after}
        return fields if self.parts is None else {**fields, "what": dict(self.parts)}


@dataclass(frozen=True, slots=True)
class Comparison:
    """The differences between two artifacts.

    `files` is None when files were not compared. `left_out` lists the differences that the comparison of files ignores.
    `notes` do not count as differences.
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
        """Whether the comparison found no difference."""
        packages = self.built or self.conda or self.python or self.debian
        return not (self.settings or packages or self.files)


def compare(first: ArtifactReader, other: ArtifactReader, *, files: bool) -> Comparison:
    """Compare two artifacts of any kinds. Raises BuildError when one of them is damaged."""
    kinds = {first.about.kind, other.about.kind}
    between = len(kinds) > 1 and not kinds.isdisjoint(FOLDERS)
    notes = _provenance(first.about, other.about)
    if _same_content(first.about, other.about):
        settings = _setting_changes(first.about, None, other.about, None, between)
        return Comparison(settings, (), (), (), (), () if files else None, (), notes)
    left, right = first.contents(hashes=files), other.contents(hashes=files)
    view = view_of(first.about.kind, left, other.about.kind, right)
    settings = _setting_changes(first.about, left, other.about, right, between)
    inner = between or view == CONDA
    built = () if view == SITE else _changes(_built(left, inner), _built(right, inner))
    conda = () if view in NO_CONDA else _changes(_conda(left, inner), _conda(right, inner))
    python = _changes(_python(left, inner), _python(right, inner))
    debian = () if between else _changes(_debian(left), _debian(right))
    pairs = ((first, left), (other, right))
    without = [read.about.spelling for read, contents in pairs if between and contents.prefix is None]
    if files and without:
        notes += (f"{', '.join(without)} has no environment of its own: files were not compared",)
    changes = _changes(comparable(left, view), comparable(right, view)) if files and not without else None
    left_out = tuple(load_table("comparison")[view]) if files else ()
    return Comparison(settings, built, conda, python, debian, changes, left_out, notes)


def _same_content(left: Description, other: Description) -> bool:
    """Return whether both are images of the same layers, or image files with the same file system.

    If so, their contents need not be read.
    """
    if left.kind in SQUASHED and other.kind in SQUASHED:
        return left.identity == other.identity
    ids = [[layer.diff_id for layer in about.layers] for about in (left, other)]
    return left.kind == other.kind == IMAGE and ids[0] == ids[1]


def _setting_changes(
    first: Description, left: Inventory | None, other: Description, right: Inventory | None, between: bool
) -> tuple[Change, ...]:
    """Return the differences in settings.

    Artifacts of different kinds do not record the same settings. Between them, environment variables are compared when
    both artifacts record some, any other setting only when both record it.
    """
    before, after = _settings(first, left, between), _settings(other, right, between)
    if first.kind != other.kind and not between:
        shown_names = before.keys() & after.keys()
        if first.env and other.env:
            shown_names |= {name for name in before | after if name.startswith("env ")}
        before = {name: value for name, value in before.items() if name in shown_names}
        after = {name: value for name, value in after.items() if name in shown_names}
    return _changes(before, after)


def _settings(about: Description, contents: Inventory | None, between: bool) -> dict[str, str]:
    about = completed(about, contents)
    settings = {"target": about.target, "recipe": about.recipe}
    if between:
        settings["python"] = about.python
    else:
        settings["python"] = about.python_version or about.python
        settings |= {"base": about.base, "base digest": about.base_digest}
        settings |= {"platform": about.platform, "workdir": about.workdir, "user": about.user}
        commands = {"entrypoint": about.entrypoint, "cmd": about.cmd}
        settings |= {name: json.dumps(words) for name, words in commands.items() if words}
        settings |= {f"env {name}": f"={value}" for name, value in about.env.items()}
        settings |= {f"label {name}": f"={value}" for name, value in about.labels.items() if name not in _NOT_COMPARED}
    return {name: value for name, value in settings.items() if value}


def _built(contents: Inventory, inner: bool) -> dict[str, tuple[str, str]]:
    """Return source layer → (version, digest of its files)."""
    named = _named(contents.built, lambda layer: layer.location == (contents.prefix or ""), inner)
    return {name: (layer.version, layer.files) for name, layer in named}


def _conda(contents: Inventory, inner: bool) -> dict[str, tuple[str, str]]:
    """Return package → (version and build, digest)."""
    named = _named(contents.conda, lambda package: package.location == contents.prefix, inner)
    return {name: (f"{package.version} {package.build}", package.record) for name, package in named}


def _python(contents: Inventory, inner: bool) -> dict[str, tuple[str, str]]:
    """Return package → (version, digest); with `inner`, of content that does not depend on the installer."""
    prefix = contents.prefix

    def inside(package: Any) -> bool:
        return inner if prefix is None else not prefix or package.location.startswith(f"{prefix}/")

    packages: dict[str, tuple[str, str]] = {}
    for name, package in _named(contents.python, inside, inner):
        digest = package.content if inner else package.record
        if name in packages:  # the package is installed twice: keep both
            version, known = packages[name]
            packages[name] = f"{version}, {package.version}", f"{known} {digest}"
        else:
            packages[name] = package.version, digest
    return packages


def _named(packages: Iterable[Any], inside: Callable[[Any], bool], inner: bool) -> Iterator[tuple[str, Any]]:
    """Yield packages by name, with the folder of packages outside of the environment; `inner` leaves these out."""
    for package in packages:
        if inside(package):
            yield package.name, package
        elif not inner:
            yield f"{package.name} (/{package.location})", package


def _debian(contents: Inventory) -> dict[str, tuple[str, str]]:
    return {f"{p.name}:{p.arch}": (p.version, "") for p in contents.debian}


def _changes(left: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[Change, ...]:
    """Return the differences between two tables of texts, of (version, digest), or of files with their properties."""
    return tuple(
        Change(
            name, _shown(name, left.get(name)), _shown(name, other.get(name)), _parts(left.get(name), other.get(name))
        )
        for name in sorted(left.keys() | other.keys())
        if left.get(name) != other.get(name)
    )


def _parts(before: Any, after: Any) -> dict[str, tuple[str, str]] | None:
    """Return the differing parts of two packages of one version, or of two files; None for anything else."""
    if isinstance(before, dict) and isinstance(after, dict):
        both = {name: (before.get(name, ""), after.get(name, "")) for name in {**before, **after}}
        return {name: values for name, values in both.items() if values[0] != values[1]}
    if isinstance(before, tuple) and isinstance(after, tuple) and before[0] == after[0]:
        return {"content": (before[1] or "no RECORD", after[1] or "no RECORD")}
    return None


def _shown(name: str, value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, dict):
        return f"{value['kind']} {value['size']}" if value.get("size") else str(value["kind"])
    if isinstance(value, tuple):
        return str(value[0])
    text = str(value)
    if name.startswith(("env ", "label ")):
        text = text[1:]
        return masked({name.partition(" ")[2]: text}).popitem()[1]
    if name in ("entrypoint", "cmd"):
        return json.dumps(masked_words(json.loads(text)))
    return redact(text)


def _provenance(left: Description, other: Description) -> tuple[str, ...]:
    values = {name: (getattr(left, field), getattr(other, field)) for name, field in _PROVENANCE.items()}
    differing = [name for name, (before, after) in values.items() if before and after and before != after]
    return (f"made from another {', '.join(differing)}",) if differing else ()
