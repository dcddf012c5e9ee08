"""Reader of pip's requirements files, and of the arguments of `pip install`.

Source: pip's documentation, "Requirements File Format". Variables such as ${TOKEN} are not replaced: they hold secrets.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from envbuild.errors import UsageError
from envbuild.imports.statement import Statement, lost, text_of
from envbuild.lock.format import logical_lines

HASHES = "hashes: `envbuild lock` writes those of the same versions"
_OPTION = re.compile(r"(--[a-z-]+|-[A-Za-z])\s*=?\s*(.*)", re.S)
_LONG = {"-r": "--requirement", "-c": "--constraint", "-i": "--index-url", "-f": "--find-links", "-e": "--editable"}
_VALUED = {*_LONG, *_LONG.values(), "--extra-index-url", "--trusted-host", "--no-binary", "--only-binary", "--python",
           "-t", "--target", "--prefix", "--root", "--platform", "--python-version", "--index", "--default-index",
           "--index-strategy", "--torch-backend", "--timeout", "--retries", "--cache-dir", "--proxy"}  # fmt: skip
# They change neither packages nor versions.
_WITHOUT_EFFECT = {"-U", "-q", "--upgrade", "--quiet", "--no-cache-dir", "--no-cache", "--system", "--user",
                   "--disable-pip-version-check", "--root-user-action", "--break-system-packages"}  # fmt: skip


def read_requirements(path: Path, kind: str = "requirement", seen: tuple[Path, ...] = ()) -> Iterator[Statement]:
    """Yield the statements of a requirements file and of the files that it names. Raises UsageError."""
    for number, line in logical_lines(text_of(path)):
        text = re.sub(r"(^|\s)#.*$", "", line).strip()
        if text:
            yield from pip_line(text, f"{path}:{number}", path.parent, kind, (*seen, path.absolute()))


def pip_words(words: list[str], place: str, folder: Path) -> Iterator[Statement]:
    """Yield the statements of the arguments of `pip install`."""
    left = iter(words)
    for word in left:
        text = f"{word} {next(left, '')}" if word in _VALUED else word
        if text.partition("=")[0] not in _WITHOUT_EFFECT:
            yield from pip_line(text, place, folder)


def pip_line(
    text: str, place: str, folder: Path, kind: str = "requirement", seen: tuple[Path, ...] = ()
) -> Iterator[Statement]:
    """Yield the statements of one line of a requirements file in `folder`; `seen` are the files that lead to it."""
    found = _OPTION.fullmatch(text)
    if found is None:
        requirement, *options = re.split(r"\s+(?=--[a-z])", text)
        yield Statement(kind, _named(requirement.strip()), place)
        for option in options:
            yield lost(option, place, HASHES if option.startswith("--hash") else "an option of pip for one package")
        return
    option, value = _LONG.get(found[1], found[1]), found[2].strip().strip("'\"")
    if option in ("--requirement", "--constraint"):
        other = folder / value
        if "://" in value or len(seen) > 20 or other.absolute() in seen or not os.path.isfile(other):
            yield lost(text, place, "no such file here: name it with --from")
            return
        try:
            yield from read_requirements(other, "constraint" if option == "--constraint" else kind, seen)
        except UsageError as error:
            yield lost(text, place, error.message)
    elif option in ("--index-url", "--extra-index-url", "--index", "--default-index"):
        yield Statement("index", value, place)
    elif option == "--find-links":
        yield lost(text, place, "find-links belong to pip's configuration, which envbuild reads")
    else:
        named = _named(value) if "://" in value else text  # a repository that pip would clone
        yield Statement(kind, named, place) if option == "--editable" else lost(text, place, "an option of pip")


def _named(text: str) -> str:
    """Return a URL with pip's old `egg=NAME` as `NAME @ URL`, any other text, such as `NAME @ URL`, unchanged."""
    address, _, fragment = text.partition("#")
    pairs = {key: value for key, _, value in (one.partition("=") for one in fragment.split("&"))}
    name = pairs.pop("egg", "")
    if not name or "://" not in address or re.match(r"[\w.-]+\s*(\[[^]]*\]\s*)?@", address):
        return text
    rest = "&".join(f"{key}={value}" for key, value in pairs.items())
    return f"{name} @ {address}" + (f"#{rest}" if rest else "")
