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

from envbuild.base.errors import UsageError

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
# Plain words that YAML 1.1 or 1.2 does not read as strings.
_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"}
# Control characters except tab and line feed, lone surrogates, byte order marks and non-characters: other YAML
# readers refuse or change them.
_FOREIGN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufeff\ufffe\uffff\u2028\u2029]")
_WIDE = 1_000_000


def literal(text: str, name: str) -> str:
    """Return `text` for a container's command, args or variable, escaped so that kubelet passes on exactly `text`.

    Raises UsageError for characters that a manifest cannot contain; `name` names the text in it.
    """
    return checked(text, name).replace("$", "$$")


def checked(text: str, name: str) -> str:
    """Return `text` if every YAML reader reads it alike. Raises UsageError if not; `name` names it there."""
    if foreign := _FOREIGN.search(text):
        raise UsageError(
            f"{name}: a Kubernetes manifest cannot carry the character {foreign[0]!r} of {text!r}",
            "put such text into a file that pods see, and name the file",
        )
    return text


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
        return {_quoted(key): _quoted(item) for key, item in value.items()}
    if isinstance(value, YamlScript):
        return LiteralScalarString(value.text)
    if isinstance(value, list | tuple):
        return [_quoted(item) for item in value]
    if isinstance(value, str) and (not _PLAIN.fullmatch(value) or value.lower() in _WORDS):
        return DoubleQuotedScalarString(value)
    return value


class YamlScript:
    """A shell script that is written as a readable block of YAML."""

    def __init__(self, text: str) -> None:
        if "$(" in text or "$$" in text or not text.endswith("\n"):
            raise ValueError("kubelet would change this text")
        self.text = text
