"""Reader of Dockerfiles: base, environment, working directory, and the packages of pip, conda and apt.

Source: docs.docker.com, "Dockerfile reference". The reader is envbuild's own: dockerfile-parse 2.0 reads the lines of a
here-document as instructions, and has no types.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from envbuild.files import parse_json
from envbuild.imports.pip_files import pip_words
from envbuild.imports.statement import NOT_IN_IMAGE, Statement, lost, text_of

# Bases whose content a recipe can name: Python's version, and torch's; data/gpu_signs.toml reads their CUDA.
_BASES = (
    re.compile(r"(?:docker\.io/)?(?:library/)?python:(?P<python>3\.\d+)\S*"),
    re.compile(r"(?:docker\.io/)?pytorch/pytorch:(?P<torch>\d+\.\d+\.\d+)-cuda\d+\.\d\S*"),
    re.compile(r"(?:docker\.io/)?nvidia/cuda:\d+\.\d\S*"),
)
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
_HEREDOC = re.compile(r"<<-?\s*[\"']?([A-Za-z_]\w*)[\"']?")
_INSTALL = {
    "pip": re.compile(r"(?:(?:\S*/)?python[\d.]* -m |uv )?(?:\S*/)?pip[\d.]*(?: -\S+)* install"),
    "conda": re.compile(r"(?:\S*/)?(?:conda|mamba|micromamba) (?:install|create)"),
    "package": re.compile(r"apt(?:-get)?(?: -\S+)* install"),
}
# They change neither packages nor versions.
_WITHOUT_EFFECT = ("-y", "-q", "-qq", "--yes", "--quiet", "--no-install-recommends", "--assume-yes")
_SHELL = "a command of the shell"
_NEWLINE = ";;"  # which no command of a RUN outside of `case` has
_REASONS = dict.fromkeys(("COPY", "ADD"), "copies files: own code belongs to [project]") | {
    "FROM": "a recipe builds on Debian, or names base and python in [image]",
    "ARG": "its default is used where the file names it",
}


def read_dockerfile(path: Path) -> Iterator[Statement]:
    """Yield the statements of a Dockerfile's last stage and of the stages on which it builds. Raises UsageError."""
    stages: list[list[tuple[int, str, str]]] = [[]]
    for one in _instructions(text_of(path)):
        stages += [[]] if one[1] == "FROM" else []
        stages[-1].append(one)
    named = ((index, re.findall(r"\sas (\S+)$", stage[0][2].lower())) for index, stage in enumerate(stages) if index)
    names = {found[0]: index for index, found in named if found}
    kept, index = {0}, len(stages) - 1
    while index not in kept:
        kept.add(index)
        above = names.get(_image(stages[index][0][2]).lower(), 0) if stages[index] else 0
        index = above if above < index else 0
    variables: dict[str, str] = {}
    for index, stage in enumerate(stages):
        for number, name, rest in stage:
            place, given = f"{path}:{number}", dict[str, str]()
            text = _VARIABLE.sub(lambda found: variables.get(found[1] or found[2], found[0]), rest)
            if name in ("ARG", "ENV"):
                given = _pairs(text)
                variables.update(given)
                rest = " ".join(f"{key}={value}" for key, value in given.items()) or rest
            if index not in kept:
                yield lost(f"{name} {rest}", place, NOT_IN_IMAGE)
            elif name == "FROM":
                yield from _base(_image(text), place) if names.get(_image(text).lower(), index) >= index else ()
            elif name == "RUN":
                yield from _run(text, place, path.parent)
            elif name == "WORKDIR" or (name == "ENV" and given):
                found = [f"{key}={value}" for key, value in given.items()] or [text.strip("\"'")]
                yield from (Statement("env" if given else "workdir", one, place) for one in found)
            else:
                yield lost(f"{name} {rest}", place, _REASONS.get(name, "a recipe has no such setting"))


def _instructions(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield line, name and arguments of each instruction."""
    lines = iter(enumerate(text.split("\n"), 1))
    for number, line in lines:
        whole = "" if line.lstrip().startswith("#") else line.strip()
        while whole.endswith("\\"):
            at, following = next(lines, (0, ""))
            following = following.strip()
            # Comments and blank lines do not end an instruction.
            skipped = following.startswith("#") or (at and not following)
            whole = whole[:-1] + ("\\" if skipped else f" {following}")
        name, _, rest = whole.partition(" ")
        for end in _HEREDOC.findall(rest) if name.upper() in ("RUN", "COPY", "ADD") else ():
            for _, inner in lines:
                if inner.strip() == end:
                    break
                rest += f"\n{inner}"
        if name:
            yield number, name.upper(), rest.strip()


def _pairs(text: str) -> dict[str, str]:
    """Return the variables of ENV or ARG."""
    try:
        words = shlex.split(text)
    except ValueError:
        words = text.split()
    if len(words) > 1 and "=" not in words[0]:
        return {words[0]: " ".join(words[1:])}
    return {name: value for name, equals, value in (word.partition("=") for word in words) if equals}


def _image(text: str) -> str:
    """Return the image in the arguments of FROM."""
    return next((word for word in text.split() if not word.startswith("--")), "")


def _base(image: str, place: str) -> Iterator[Statement]:
    found = next((known for pattern in _BASES if (known := pattern.fullmatch(image))), None)
    about = found.groupdict() if found else {}
    if "python" in about:
        yield Statement("python", f"=={about['python']}.*", place)
        return
    if "torch" in about:
        yield Statement("requirement", f"torch=={about['torch']}", place)
    yield lost(f"FROM {image}", place, _REASONS["FROM"]) if found else Statement("base", image, place)


def _run(text: str, place: str, folder: Path) -> Iterator[Statement]:
    """Yield the statements of the commands of one RUN."""
    body = re.sub(r"^(--\w+=\S+\s+)+", "", text)
    body = _HEREDOC.sub("", body, count=1) if "\n" in body else body
    commands: list[list[str]] = [[]]
    try:
        if body.startswith("["):
            commands = [[str(one) for one in parse_json(body)]]
        else:
            lines, comment = body.replace("\\\n", " ").replace("\n", f" {_NEWLINE} "), False
            lexer = shlex.shlex(lines, posix=True, punctuation_chars=";&|<>()")
            lexer.whitespace_split, lexer.commenters = True, ""  # a # inside a word, as in a URL, is no comment
            for word in lexer:
                comment = word != _NEWLINE and (comment or word.startswith("#"))
                if comment:
                    continue
                commands.append([]) if re.fullmatch(r"[;&|()]+", word) else commands[-1].append(word)
    except (ValueError, TypeError):
        yield lost(text, place, _SHELL)
        return
    for words in filter(None, commands):
        start = next((index for index, word in enumerate(words) if not re.match(r"sudo$|[A-Za-z_]\w*=", word)), 0)
        line = " ".join(words[start:])
        matches = {kind: one for kind, pattern in _INSTALL.items() if (one := pattern.match(line))}
        kind, found = next(iter(matches.items()), ("", None))
        if not found or {"<", ">", ">>"} & set(words):  # a redirection, or a requirement without quotes
            yield lost(" ".join(words), place, _SHELL)
            continue
        left = words[start + len(found[0].split()) :]
        yield from pip_words(left, place, folder) if kind == "pip" else _packages(left, place, kind)


def _packages(words: list[str], place: str, kind: str) -> Iterator[Statement]:
    left = iter(words)
    for word in left:
        name, equals, value = word.partition("=")
        if kind == "conda" and name in ("-c", "--channel"):
            yield Statement("channel", value if equals else next(left, ""), place)
        elif kind == "conda" and name in ("-f", "--file", "-n", "--name", "-p", "--prefix"):
            yield lost(f"{name} {value if equals else next(left, '')}", place, "name a file with --from")
        elif not word.startswith("-"):
            yield Statement(kind, word, place)
        elif word not in _WITHOUT_EFFECT:
            yield lost(word, place, "an option of the package manager")
