"""Files of artifacts in a form for comparison, without differences that say nothing about the content.

docs/reference/inspect.md lists the differences that are left out; data/comparison.toml names them for the user.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
from dataclasses import replace

from envbuild.artifacts.enroot import normalised
from envbuild.contract import image_manifest, manifest, state
from envbuild.image.entry import DIR, FILE, SYMLINK, Entry
from envbuild.inspect.facts import CONDA, FOLDERS, IMAGE, SQUASHED, VENV, Inventory, Item

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


def view_of(one: str, left: Inventory, other: str, right: Inventory) -> str:
    """Return the view in which the files of two artifacts are compared; `one` and `other` are their kinds."""
    if one not in FOLDERS and other not in FOLDERS:
        return IMAGE if (one in SQUASHED) == (other in SQUASHED) else CONVERTED
    environments = {left.environment, right.environment} - {""}
    if len(environments) > 1:
        return SITE
    if CONDA in environments:
        return CONDA
    return VENV if one == other else BETWEEN


def comparable(contents: Inventory, view: str) -> dict[str, dict[str, str]]:
    """Return path → the properties that are compared, as text.

    Paths are relative to the root, or to the environment when only environments are compared.
    """
    prefix = contents.prefix
    frame = None if prefix is None else (f"{prefix}/" if prefix else "")
    inner = view in (BETWEEN, CONDA, SITE)
    records = {f"{package.info}/RECORD": package.content if inner else package.record for package in contents.python}
    found = {}
    for path, item in contents.files.items():
        inside = path.removeprefix(frame) if frame is not None and path.startswith(frame) else None
        if inside in _ABOUT or (inner and inside is None):
            continue
        name = inside if inner and inside is not None else path
        if view in (CONVERTED, IMAGE):
            exact = _converted(path, item) if view == CONVERTED else item
            if exact is not None:
                found[name] = _properties(exact, True)
        elif not _VENV_ONLY.search(name) and not (inner and _is_frame(name, item, view)):
            found[name] = {**_properties(item, False), **_settled(path, name, item, view, contents)}
            if records.get(path):
                found[name] |= {"size": "", "content": records[path]}
    return found


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
    """Return `item` as it is in a file system for unprivileged users, None if it is left out there."""
    entry = normalised(Entry(path, item.kind, item.mode))
    if entry is None:
        return None
    extra = " ".join(word for word in item.extra.split() if word.startswith("user."))
    return replace(item, mode=entry.mode, uid=entry.uid, gid=entry.gid, extra=extra)


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
