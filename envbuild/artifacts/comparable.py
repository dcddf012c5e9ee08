"""Files of artifacts as they are compared: what differs by nature, and not by content, is left out.

docs/reference/inspect.md lists the exceptions; `LEFT_OUT` says them to the user.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace

from envbuild.artifacts.enroot import normalised
from envbuild.artifacts.facts import CONDA, FOLDERS, IMAGE, SQUASHED, VENV, Inventory, Item
from envbuild.image.entry import DIR, FILE, SYMLINK, Entry

# How files are seen: IMAGE, two images or two file systems; CONVERTED, an image and a file system made for users
# without privileges; VENV, two venvs; BETWEEN, a venv and one in an image; CONDA, two conda environments of which
# none or one is in an image; SITE, a conda environment and a venv, wherever they are.
BETWEEN, CONVERTED, SITE = "between", "converted", "site"
LEFT_OUT = {
    IMAGE: ("times", "envbuild.json"),
    VENV: (
        "times", "owners", "permissions other than x", "compiled modules", "envbuild.json",
        "uv_cache.json and direct_url.json", "where the host's interpreter lies",
    ),
    CONVERTED: (
        "times", "envbuild.json", "owners", "what lies in dev, and devices",
        "permissions and extended attributes that only root can give",
    ),
    BETWEEN: (
        "times", "owners", "permissions other than x", "folders", "compiled modules",
        "envbuild.json and pyvenv.cfg", "the interpreter's links", "activate scripts",
        "the text of scripts in bin", "an installer's own files and their rows in RECORD",
    ),
    CONDA: (
        "times", "owners", "permissions other than x", "folders", "compiled modules", "envbuild.json",
        "conda-meta, but for packages and their lists of files", "where the environment lies",
        "the text of scripts in bin that pip wrote",
        "an installer's own files and their rows in RECORD",
    ),
    SITE: (
        "all that lies outside of site-packages", "conda packages as such", "times", "owners",
        "permissions other than x", "folders", "compiled modules",
        "an installer's own files and their rows in RECORD",
    ),
}  # fmt: skip
_VENV_ONLY = re.compile(
    r"(?:^|/)(?:__pycache__(?:/.*)?|\.lock|[^/]+\.dist-info/(?:uv_cache\.json|direct_url\.json))$"
)
_FRAME = re.compile(
    r"lib64|\.gitignore|CACHEDIR\.TAG|pyvenv\.cfg|pylock\.toml"
    r"|bin/(?:python[0-9.]*|(?:de)?activate[^/]*|[Aa]ctivate\.ps1|pydoc\.bat)"
    r"|.*\.dist-info/(?:INSTALLER|REQUESTED)"
)
# rattler keeps in __clobbers__ what two packages have, of the one whose file is not in its place.
_CONDA_FRAME = re.compile(
    r"CACHEDIR\.TAG|(?:conda-meta|__clobbers__|pkgs|envs)/.*|.*\.dist-info/(?:INSTALLER|REQUESTED)"
)
_SITE = re.compile(
    r"lib/python[^/]+/site-packages/.*(?<!\.dist-info/INSTALLER)(?<!\.dist-info/REQUESTED)"
)
# Lines of pyvenv.cfg that tell where the host's interpreter is and who made the environment.
_OF_THE_HOST = ("home", "executable", "command", "prompt", "uv", "version", "version_info")


def view_of(one: str, left: Inventory, other: str, right: Inventory) -> str:
    """How the files of two artifacts are seen when they are compared; `one` and `other` are their kinds."""
    if one not in FOLDERS and other not in FOLDERS:
        return IMAGE if (one in SQUASHED) == (other in SQUASHED) else CONVERTED
    environments = {left.environment, right.environment} - {""}
    if len(environments) > 1:
        return SITE
    if CONDA in environments:
        return CONDA
    return VENV if one == other else BETWEEN


def comparable(contents: Inventory, view: str) -> dict[str, dict[str, str]]:
    """Path → what is compared of it, as text. Paths are relative to the root, or to the environment where
    only environments are compared."""
    prefix = contents.prefix
    frame = None if prefix is None else (f"{prefix}/" if prefix else "")
    inner = view in (BETWEEN, CONDA, SITE)
    records = {
        f"{package.info}/RECORD": package.content if inner else package.record
        for package in contents.python
    }
    found = {}
    for path, item in contents.files.items():
        inside = path.removeprefix(frame) if frame is not None and path.startswith(frame) else None
        if inside == "envbuild.json" or (inner and inside is None):
            continue
        name = inside if inner and inside is not None else path
        if view == CONVERTED:
            converted = _converted(path, item)
            if converted is not None:
                found[name] = _exact(converted)
        elif view == IMAGE:
            found[name] = _exact(item)
        elif not _VENV_ONLY.search(name) and not (inner and _is_frame(name, item, view)):
            found[name] = _loose(item)
            if contents.environment == CONDA:
                _settle_conda(found[name], path, name, item, contents)
            else:
                _settle(found[name], name, item, view, contents)
            if records.get(path):
                found[name] |= {"size": "", "content": records[path]}
    return found


def _exact(item: Item) -> dict[str, str]:
    size = str(item.size) if item.kind == FILE else ""
    return {
        "kind": item.kind,
        "mode": f"{item.mode:04o}",
        "owner": f"{item.uid}:{item.gid}",
        "size": size,
        "content": item.sha256,
        "link": item.target,
        "attributes": item.extra.strip(),
    }


def _converted(path: str, item: Item) -> Item | None:
    """`item` as it is once it was put into a file system for users without privileges, None if left out."""
    entry = normalised(Entry(path, item.kind, item.mode))
    if entry is None:
        return None
    extra = " ".join(word for word in item.extra.split() if word.startswith("user."))
    return replace(item, mode=entry.mode, uid=entry.uid, gid=entry.gid, extra=extra)


def _loose(item: Item) -> dict[str, str]:
    executable = "x" if item.kind == FILE and item.mode & 0o111 else ""
    size = str(item.size) if item.kind == FILE else ""
    return {
        "kind": item.kind,
        "mode": executable,
        "size": size,
        "content": item.sha256,
        "link": item.target,
    }


def _is_frame(name: str, item: Item, view: str) -> bool:
    if item.kind == DIR:
        return True
    if view == SITE:
        return _SITE.fullmatch(name) is None
    return (_CONDA_FRAME if view == CONDA else _FRAME).fullmatch(name) is not None


def _settle(seen: dict[str, str], name: str, item: Item, view: str, contents: Inventory) -> None:
    """Put what stays the same in place of what does not."""
    if name == "pyvenv.cfg":
        kept = sorted((k, v) for k, v in contents.config.items() if k not in _OF_THE_HOST)
        seen |= {"size": "", "content": hashlib.sha256(json.dumps(kept).encode()).hexdigest()}
    elif re.fullmatch(r"bin/python[0-9.]*", name) and item.kind == SYMLINK:
        seen["link"] = "the interpreter" if item.target.startswith("/") else item.target
    elif view == BETWEEN and item.script and name.startswith("bin/"):
        seen |= {"size": "", "content": ""}


def _settle_conda(
    seen: dict[str, str], path: str, name: str, item: Item, contents: Inventory
) -> None:
    """Put a file as its package holds it in place of one that names where the environment lies."""
    known = contents.recorded.get(path)
    if known is None:
        if item.script and name.startswith("bin/"):  # pip's: its first line names the interpreter
            seen |= {"size": "", "content": ""}
    elif item.kind == FILE:
        same = item.sha256 == known.here
        seen |= {"size": "", "content": known.original if same else item.sha256}
