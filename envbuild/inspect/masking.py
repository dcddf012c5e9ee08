"""Masking of secrets in the texts of an image's configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from envbuild.site.pip_config import redact

HIDDEN = "****"
_NAMES = r"TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|KEY"
_SECRET = re.compile(_NAMES, re.IGNORECASE)
# NAME=value, as in build arguments and `ENV` lines of a history, `Name: value` of a header, --name value. A
# package's name before == or a version is none of these.
_ASSIGNED = re.compile(
    rf"(?P<name>(?P<option>--)?[\w.-]*(?:{_NAMES})[\w.-]*)(?P<sign>=(?!=)|:\s*(?=\S)|(?(option)\s+|(?!)))"
    r"""(?P<value>"[^"]*"|'[^']*'|[^\s"',;]+)""",
    re.IGNORECASE,
)


def is_secret(name: str) -> bool:
    """Return whether a variable or label of this name may hold a secret."""
    return _SECRET.search(name) is not None


def masked(values: Mapping[str, str]) -> dict[str, str]:
    """Return variables or labels with the values of secret ones, and passwords in all URLs, masked."""
    return {name: HIDDEN if is_secret(name) and value else redact(value) for name, value in values.items()}


def masked_words(words: Sequence[str]) -> list[str]:
    """Return a command line with `--token=x`, `--token x` and passwords in URLs masked."""
    shown: list[str] = []
    after = False
    for word in words:
        shown.append(HIDDEN if after and not word.startswith("-") else masked_text(word))
        after = word.startswith("-") and "=" not in word and is_secret(word)
    return shown


def masked_text(text: str) -> str:
    """Return a line of a history with the values of secret names masked."""
    return redact(_ASSIGNED.sub(lambda m: f"{m['name']}{m['sign']}{HIDDEN}", text))
