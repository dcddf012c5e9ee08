"""Values → YAML that every reader understands alike, and text that kubelet does not expand.

kubectl reads YAML 1.1, where `no`, `on`, `0o7` and `1e3` are not strings; others read 1.2. A string that may be
read as another type, or that has special characters, is written in double quotes.
kubelet replaces $(NAME) in command, args and variables and turns $$ into $. Source: kubernetes/kubernetes,
third_party/forked/golang/expansion/expand.go.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

from envbuild.errors import UsageError

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
# Plain words that YAML 1.1 or 1.2 does not read as strings.
_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"}
# Control characters except tab and line feed, lone surrogates, byte order marks and non-characters: other YAML
# readers refuse or change them.
_FOREIGN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufeff\ufffe\uffff\u2028\u2029]")
_WIDE = 1_000_000
# Real manifests nest below 20 levels and have few aliases; each can stand for all that is before it.
_DEEPEST, _MOST_ALIASES = 64, 256


def literal(text: str, what: str) -> str:
    """Return `text` for a container's command, args or variable, escaped so that kubelet passes on exactly `text`.

    Raises UsageError, naming `what`, for characters that a manifest cannot contain.
    """
    return checked(text, what).replace("$", "$$")


def checked(text: str, what: str) -> str:
    """Return `text` if every YAML reader reads it alike. Raises UsageError, naming `what`, if not."""
    if found := _FOREIGN.search(text):
        raise UsageError(
            f"{what}: a Kubernetes manifest cannot carry the character {found[0]!r} of {text!r}",
            "put such text into a file that pods see, and name the file",
        )
    return text


def load(text: str, name: str) -> list[Any]:
    """Return the documents of a manifest. Raises UsageError, naming `name` and the line, for text that is not YAML.

    A manifest with more nesting or aliases than people write is refused before its documents are made.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError
    from ruamel.yaml.events import AliasEvent, CollectionEndEvent, CollectionStartEvent

    depth = aliases = 0
    try:
        for event in YAML(typ="rt").parse(text):
            depth += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
            aliases += isinstance(event, AliasEvent)
            if depth > _DEEPEST or aliases > _MOST_ALIASES:
                what = f"{_DEEPEST} levels" if depth > _DEEPEST else f"{_MOST_ALIASES} aliases"
                raise UsageError(f"{name}:{event.start_mark.line + 1}: more than {what}", "write the manifest flatter")
        return list(YAML(typ="rt").load_all(text))
    except YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f":{where.line + 1}" if where else ""
        problem = getattr(error, "problem", None) or str(error)
        raise UsageError(f"{name}{line}: this is no YAML: {problem}") from None
    except (ValueError, TypeError, OverflowError, AttributeError, KeyError, IndexError, RecursionError) as error:
        # for example a number with thousands of digits, an invalid date, a list as a key
        raise UsageError(f"{name}: this is no YAML of a manifest: {str(error)[:200]}") from None


def dump(comment: str, documents: Sequence[Mapping[str, Any]]) -> str:
    """Return `documents` as one YAML text that begins with `comment`; keys keep their order."""
    from ruamel.yaml import YAML

    yaml = YAML()
    yaml.indent(mapping=2, sequence=4, offset=2)
    yaml.width = _WIDE
    yaml.representer.ignore_aliases = lambda data: True
    parts = []
    for document in documents:
        text = io.StringIO()
        yaml.dump(_quoted(document), text)
        parts.append(text.getvalue())
    line = "".join(character if character.isprintable() else "?" for character in comment)
    return f"# {line}\n" + "---\n".join(parts)


def _quoted(value: Any) -> Any:
    """Return `value` with its strings marked by the style in which to write them."""
    from ruamel.yaml.scalarstring import DoubleQuotedScalarString, LiteralScalarString

    if isinstance(value, Mapping):
        return {_quoted(key): _quoted(one) for key, one in value.items()}
    if isinstance(value, YamlScript):
        return LiteralScalarString(value.text)
    if isinstance(value, list | tuple):
        return [_quoted(one) for one in value]
    if isinstance(value, str) and (not _PLAIN.fullmatch(value) or value.lower() in _WORDS):
        return DoubleQuotedScalarString(value)
    return value


class YamlScript:
    """A shell script that is written as a readable block of YAML."""

    def __init__(self, text: str) -> None:
        if "$(" in text or "$$" in text or not text.endswith("\n"):
            raise ValueError("kubelet would change this text")
        self.text = text
