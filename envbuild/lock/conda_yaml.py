"""Reader of conda-lock.yml: line by line for envbuild's own files, with a YAML parser for those of other tools."""

from __future__ import annotations

import json
import re
from itertools import islice
from typing import Any

from envbuild.errors import LockError

# The largest lock files in use have a few megabytes; a larger file is not a lock.
_LIMIT = 64 << 20
_LINE = re.compile(r'( *)(- )?(?:([a-zA-Z0-9_-]+|"[a-z0-9_.-]+"):(?: |$))?("[^"\\]*"|1|false|\[\]|\{\})?')
_FIRST = re.compile(r"^\s*- (?:name|version|manager|platform|url|category)\b", re.MULTILINE)
_CONSTANTS: dict[str, Any] = {"1": 1, "false": False}


def load(text: str, source: str, hint: str) -> dict[str, Any]:
    """Return the table in a YAML document. Raises LockError, with the line, when there is none."""
    if len(text) > _LIMIT:
        raise LockError(f"{source}: {len(text) >> 20} MiB are no lock", hint)
    data = read_lines(text)
    if data is None:
        data = _parse(text, source, hint)
    if not isinstance(data, dict):
        raise LockError(f"{source}: no YAML table", hint)
    return data


def read_lines(text: str) -> dict[str, Any] | None:
    """Return the contents of `text` if it has the form that `conda_format.render` writes, else None.

    That form has two spaces per level, lists at the level of their key, and strings in double quotes without
    escapes.
    """
    root: dict[str, Any] = {}
    # (indent, container) of all open containers; the line after a key without a value decides the container's
    # type.
    stack: list[tuple[int, Any]] = [(0, root)]
    waiting: tuple[int, dict[str, Any], str] | None = None
    for line in text.split("\n"):
        if not line or line[0] == "#":
            continue
        found = _LINE.fullmatch(line)
        if found is None:
            return None
        blanks, dash, key, value = found.groups()
        indent = len(blanks)
        if waiting is not None:
            level, owner, name = waiting
            waiting = None
            inside: Any = [] if dash else {}
            if indent != (level if dash else level + 2):
                return None
            owner[name] = inside
            stack.append((indent if not dash else indent + 1, inside))  # a list is at an odd level
        place = indent + 1 if dash else indent
        while stack and stack[-1][0] > place:
            stack.pop()
        if not stack or stack[-1][0] != place:
            return None
        container = stack[-1][1]
        if dash:
            if not isinstance(container, list):
                return None
            if key is None:
                if value is None or value[0] != '"':
                    return None
                container.append(value[1:-1])
                continue
            container.append({})
            container, indent = container[-1], indent + 2
            stack.append((indent, container))
        if key is None or not isinstance(container, dict):
            return None
        key = key.strip('"')
        if key in container:
            return None
        if value is None:
            waiting = (indent, container, key)
        elif value[0] == '"':
            container[key] = value[1:-1]
        else:
            container[key] = _CONSTANTS[value] if value in _CONSTANTS else json.loads(value)
    return None if waiting is not None else root


def _parse(text: str, source: str, hint: str) -> Any:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    try:
        return YAML(typ="safe").load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise LockError(f"{source}{place}: not YAML: {error.problem}", hint) from None
    except YAMLError as error:
        raise LockError(f"{source}: not YAML: {str(error).splitlines()[0]}", hint) from None
    except RecursionError:
        raise LockError(f"{source}: not a lock: nested too deeply", hint) from None
    except (ValueError, TypeError, OverflowError, AttributeError, KeyError, IndexError) as error:
        # for example a number with thousands of digits, an invalid date, a list as a key
        raise LockError(f"{source}: not a lock: {str(error).splitlines()[0]}", hint) from None


def package_line(text: str, index: int) -> int:
    """Return the line where entry `index` of `package` begins, in the layout that all tools use."""
    start = re.search(r"^package:", text, re.MULTILINE)
    at = start.end() if start else 0
    entry = next(islice(_FIRST.finditer(text, at), index, None), None)
    return text.count("\n", 0, entry.end() if entry else at) + 1
