"""Masking of secrets in texts: passwords in URLs, values of secret names, and secrets known by their form."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence

from envbuild.data import load_table

HIDDEN = "****"
_NAMES = r"TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|KEY(?!SERVER|RING)|(?<![A-Za-z])PAT(?![A-Za-z])"
_SECRET = re.compile(_NAMES, re.IGNORECASE)
# Excludes TOKENIZERS_PARALLELISM, BYPASS and COMPASS_HOME.
_SOUNDS_SECRET = re.compile(
    r"TOKEN(?!IZ)|SECRET|(?<!BY)(?<!COM)PASS(W|PHRASE|$|_)|CREDENTIAL|API_?KEY|(^|_)(KEY|PAT)$|PRIVATE", re.IGNORECASE
)
# Switches, and numbers of tokens, of variables whose names have a word in common with secrets.
_SWITCH = re.compile(r"true|false|yes|no|on|off|none|[01]", re.IGNORECASE)
_NUMBER = re.compile(r"[\d_,.]+[kmgbt]?", re.IGNORECASE)
_COUNT = re.compile(r"(?:(?<![a-z])(?:max|min|num|total|n)[_-][\w-]{0,40})?tokens(?![a-z])", re.IGNORECASE)
# NAME=value, as in build arguments and `ENV` lines of a history, `Name: value` of a header, --name value. A
# package's name before == or a version is none of these.
_ASSIGNED = re.compile(
    rf"(?<![\w.-])(?P<name>(?P<option>--)?(?=[\w.-]*(?:{_NAMES}))[\w.-]*+)(?P<sign>=(?!=)|:\s*(?=\S)|(?(option)\s+|(?!)))"
    r"""(?P<value>"[^"]*"|'[^']*'|[^\s"',;]+)""",
    re.IGNORECASE,
)
# The user part of a URL. A password with / or # is invalid there, and users write it all the same: then the text after
# the user's name is no port, or the name is no host. It has at most 1,024 characters: without a bound, the time would
# be quadratic. An image's reference (HOST:PORT/NAME@sha256:…) is no user part.
_USERINFO = re.compile(
    r"(?<=://)(?:"
    r"[^/\s?#@:\[]+:(?!\d{1,5}[/?#])[^\s\"<>]{0,1024}@(?!sha\d+:)"
    r"|(?!localhost:)[^/\s?#@:.\[]+:\d{1,5}[/?#][^\s\"<>]{0,1024}@(?!sha\d+:)"
    r"|(?!\[USER@\])[^/\s?#]*@)"
)
# Tokens of conda channels: https://host/t/TOKEN/channel. Below /v2/ are the repositories of registries.
_TOKEN = re.compile(r"((?i:https?)://[^/\s]*(?!/v2/)(?:/[^/\s]+)*?/t/)[^/\s]+")


def redact(text: str) -> str:
    """Return `text` with `****` for the password or bare token of every URL in it, and for a conda channel's token."""

    def hide(match: re.Match[str]) -> str:
        user, colon, secret = match.group()[:-1].partition(":")
        # A token may also be the user of an empty password, or of a fixed one.
        return f"{user}:{HIDDEN}@" if colon and secret and not looks_secret(user) else f"{HIDDEN}@"

    return _TOKEN.sub(rf"\1{HIDDEN}", _USERINFO.sub(hide, text)) if "://" in text else text


@functools.cache
def _forms() -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{pattern})" for pattern in load_table("secrets")["forms"].values()))


def looks_secret(text: str) -> bool:
    """Return whether `text` contains a secret that is known by its form (data/secrets.toml), such as a token."""
    return _forms().search(text) is not None


def is_secret(name: str, value: str = "") -> bool:
    """Return whether a variable or label of this name may hold a secret; a switch or a number of tokens is none."""
    if _SWITCH.fullmatch(value) or name.upper().endswith("_PARALLELISM"):
        return False
    return _SECRET.search(_COUNT.sub("", name) if _NUMBER.fullmatch(value) else name) is not None


def sounds_secret(name: str) -> bool:
    """Return whether a variable of this name almost certainly holds a secret, so that envbuild refuses it."""
    counts = _COUNT.search(name)
    rest = _COUNT.sub("", name) if counts and len(counts[0]) > len("tokens") else name
    return _SOUNDS_SECRET.search(rest) is not None


def masked(values: Mapping[str, str]) -> dict[str, str]:
    """Return variables or labels with the values of secret ones, and all secrets known by their form, masked."""
    return {
        name: HIDDEN if (is_secret(name, value) or looks_secret(value)) and value else redact(value)
        for name, value in values.items()
    }


def masked_words(words: Sequence[str]) -> list[str]:
    """Return a command line with `--token=x`, `--token x` and passwords in URLs masked."""
    shown: list[str] = []
    before = ""
    for word in words:
        hidden = before.startswith("-") and "=" not in before and not word.startswith("-") and is_secret(before, word)
        shown.append(HIDDEN if hidden else masked_text(word))
        before = word
    return shown


def masked_text(text: str) -> str:
    """Return a line of text with the values of secret names, and all secrets known by their form, masked."""

    def hide(match: re.Match[str]) -> str:
        secret = is_secret(match["name"], match["value"].strip("\"'"))
        return f"{match['name']}{match['sign']}{HIDDEN}" if secret else match[0]

    return masked_forms(_ASSIGNED.sub(hide, text))


def masked_forms(text: str) -> str:
    """Return `text` with the passwords in URLs and all secrets known by their form masked."""
    return redact(_forms().sub(HIDDEN, text))
