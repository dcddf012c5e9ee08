"""Readers of requirements in the forms of pip, setuptools and Poetry.

They read requirements files, the arguments of `pip install`, setup.py and setup.cfg. Sources: pip's documentation,
"Requirements File Format"; setuptools, "Keywords"; python-poetry.org, "Dependency specification": a name, and a version
or a table; pipenv, pixi and conda-lock share it. The options are those of data/pip_options.toml. Variables such as
${TOKEN} are not replaced: they hold secrets. setup.py is parsed and never run: only literal values count.
"""

from __future__ import annotations

import ast
import configparser
import functools
import os
import posixpath
import re
import shlex
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet

from envbuild.base.errors import UsageError
from envbuild.base.text import normalise
from envbuild.base.toml import list_at
from envbuild.data import load_table
from envbuild.imports.statement import (
    ALTERNATIVES,
    BOUND,
    NO_FILE,
    OTHER_SYSTEM,
    SOURCE,
    TOOL,
    Statement,
    contradict,
    fitting_pythons,
    for_linux,
    git_address,
    index_of,
    lost,
    requirement_text,
    split_extras,
    text_of,
)
from envbuild.lock.format import logical_lines
from envbuild.recipe.checks import requirement_problem
from envbuild.recipe.model import PYTHONS
from envbuild.recipe.targets import accelerator_of

HASHES = "hashes: `envbuild lock` writes those of the same versions"
_UNKNOWN = "pip and uv have no such option, so the words after it may be values or packages: correct it"
_NO_DEPENDENCIES = frozenset(("--no-deps", "--no-dependencies"))
_APART = (
    "installed without its dependencies, which may contradict the other packages: add it if `envbuild lock` accepts it"
)
_AFTER_OPTIONS = "words after the options of a line: pip ignores them; a package needs a line of its own"
# What the options mean that name packages or indexes.
_FILES = {"--requirement": "requirement", "--requirements": "requirement", "--constraint": "constraint"} | {
    "--constraints": "constraint"
}
# Programs of commands in prose: python -m venv venv.
_PROGRAM = re.compile(
    r"(?:\S*[/\\])?(?:(?:python|pip)[\d.]*(?:\.exe)?|conda|mamba|uv|poetry|sudo|source|export|apt(?:-get)?)"
)
_INDEXES = ("--index-url", "--extra-index-url", "--index", "--default-index")


# The requirements file that `-r NAME` means: its path, or its text and place if another file holds it.
Find = Callable[[str], Path | tuple[str, str] | None]


def beside(folder: Path) -> Find:
    """Return a function that finds files relative to `folder`."""
    return lambda name: folder / name if os.path.isfile(folder / name) else None


# The Python in the head of a file that pip-compile or uv wrote: its pins are for it.
_COMPILED = re.compile(
    r"^# ?.* by pip-compile with [Pp]ython (3\.\d+)|^# +uv pip compile .*?(?:--python-version|--python|-p)[ =](3\.\d+)",
    re.MULTILINE,
)


def read_requirements(path: Path, kind: str = "requirement", seen: tuple[Path, ...] = ()) -> Iterator[Statement]:
    """Yield the statements of a requirements file and of the files that it names. Raises UsageError."""
    text = text_of(path)
    if compiled := _COMPILED.search(text[:2000]):
        place = f"{path}:{text[: compiled.start()].count(chr(10)) + 1}"
        yield Statement("python", f"=={compiled[1] or compiled[2]}.*", place)
    yield from requirement_lines(text, str(path), beside(path.parent), kind, (*seen, path.absolute()))


def requirement_lines(
    text: str, place: str, find: Find, kind: str = "requirement", seen: tuple[Path, ...] = ()
) -> Iterator[Statement]:
    """Yield the statements of a requirements file with this `text`; arguments as in `pip_line`."""
    for number, line in logical_lines(text):
        if stripped := re.sub(r"(^|\s)#.*$", "", line).strip():
            yield from pip_line(stripped, f"{place}:{number}", find, kind, seen)


def pip_line(
    text: str, place: str, find: Find, kind: str = "requirement", seen: tuple[Path, ...] = ()
) -> Iterator[Statement]:
    """Yield the statements of one line of a requirements file.

    `find` locates included files, `kind` is the kind of its requirements, `seen` are the including files.
    """
    requirement, *options = re.split(r"(?:^|\s+)(?=-)", text, maxsplit=1)
    if not requirement:
        yield from pip_words(shell_words(options[0]), place, find, kind, seen, is_file=True)
        return
    if options and _PROGRAM.fullmatch(requirement.split()[0]):
        yield lost(text, place, "a command of the shell, not a requirement")
        return
    yield Statement(kind, _named(requirement.strip()), place)
    for option in re.split(r"\s+(?=--[a-z])", options[0]) if options else ():
        name, _, value = option.replace("=", " ", 1).partition(" ")
        if name in _INDEXES:  # pip refuses them here, but what is meant is plain
            yield Statement("index", value.strip(), place)
            continue
        yield lost(option, place, HASHES if option.startswith("--hash") else "an option of pip for one package")


def pip_words(
    words: list[str],
    place: str,
    find: Find,
    kind: str = "requirement",
    seen: tuple[Path, ...] = (),
    *,
    is_file: bool = False,
) -> Iterator[Statement]:
    """Yield the statements of the arguments of `pip install`; arguments as in `pip_line`.

    With `is_file`, the words are a line with options of a requirements file: pip ignores those that are no options.
    """
    left, alone = deque(words), not _NO_DEPENDENCIES.isdisjoint(words)
    while left:
        word = left.popleft()
        if is_file and not re.match(r"-[-\w]", word):
            ignored = [word]
            while left and not re.match(r"-[-\w]", left[0]):
                ignored.append(left.popleft())
            yield lost(" ".join(ignored), place, _AFTER_OPTIONS)
            continue
        if not is_file and word in ("export", "source"):  # without ; before them
            yield lost(" ".join((word, *left)), place, "a command of the shell, not a requirement")
            return
        if not re.match(r"-[-\w]", word):
            is_apart = alone and "==" in word and not re.match(r"torch(?![\w-])", word)
            yield Statement(kind, _named(word), place, reason=_APART if is_apart else "")
            continue
        name, equals, value = word.partition("=")
        if not word.startswith("--"):  # -rFILE, -qU
            name, equals, value = word[:2], "", word[2:].removeprefix("=")
        option = option_of(name, "pip", "uv")
        if option is None:
            yield lost(word if equals else " ".join((word, *left)), place, _UNKNOWN)
            if not equals:
                return
        elif not option[1]:  # a flag; -qU are two
            if value and not equals:
                left.appendleft(f"-{value}")
            yield from () if option[0] in _without_effect() else [lost(name, place, "an option of pip")]
        else:
            if not value and not equals:
                value = left.popleft() if left else ""
                word = f"{word} {value}"
            yield from _valued(option[0], value, word, place, find, kind, seen)


def _valued(
    option: str, value: str, text: str, place: str, find: Find, kind: str, seen: tuple[Path, ...]
) -> Iterator[Statement]:
    """Yield the statements of an option with its value; `text` is the original spelling of both."""
    if option in _FILES:
        try:
            other = None if "://" in value else find(value)
        except UsageError as error:
            yield lost(text, place, error.message)
            return
        inner = "constraint" if _FILES[option] == "constraint" else kind
        if "://" in value:
            yield lost(text, place, "a file at a URL: download it, and name it with --from")
        elif re.search(r"\.(toml|lock|cfg|py)$", value):  # uv reads these, too
            yield lost(text, place, f"not a requirements file: name {posixpath.basename(value)} with --from")
        elif len(seen) > 20 or (isinstance(other, Path) and other.absolute() in seen):
            yield lost(text, place, "this file is being read already: it includes itself")
        elif other is None:
            yield lost(text, place, NO_FILE)
        elif isinstance(other, Path):
            try:
                yield from read_requirements(other, inner, seen)
            except UsageError as error:
                yield lost(text, place, error.message)
        else:
            yield from requirement_lines(*other, find, inner, (*seen, Path(value)))
    elif option in _INDEXES:
        yield index_of(value, place)
    elif option == "--find-links":
        yield lost(text, place, "find-links belong to pip's configuration, which envbuild reads")
    elif option == "--group":
        yield lost(text, place, f"a group of pyproject.toml: name that file with --from, and --extra {value}")
    elif option == "--editable":
        yield Statement(kind, _named(value) if "://" in value else text, place)
    elif option not in _without_effect():
        yield lost(text, place, "an option of pip")


def last_installed(statements: list[Statement]) -> Iterator[Statement]:
    """Yield the statements; of contradicting requirements of several instructions, the last one replaces the others."""
    later: dict[str, list[tuple[Statement, SpecifierSet]]] = {}
    kept: list[Statement] = []
    for statement in reversed(statements):
        try:
            requirement = Requirement(statement.text) if statement.kind == "requirement" else None
        except InvalidRequirement:
            requirement = None
        if requirement and not (statement.reason or statement.group or requirement.marker or requirement.url):
            others = later.setdefault(normalise(requirement.name), [])
            winner = next(
                (
                    other
                    for other, specifier in others
                    if other.place != statement.place and contradict(specifier, requirement.specifier)
                ),
                None,
            )
            if winner is None:
                others.append((statement, requirement.specifier))
            else:
                reason = f"a later `pip install` replaces it: {winner.text} at {winner.place}"
                statement = replace(statement, reason=reason)
        kept.append(statement)
    yield from reversed(kept)


@functools.cache
def _options(tool: str) -> dict[str, tuple[str, bool]]:
    """Return spelling → (first long spelling, takes a value) for the options of a tool."""
    options: dict[str, tuple[str, bool]] = {}
    for key in ("valued", "flags"):
        for spellings in map(str.split, load_table("pip_options")[tool][key]):
            long = next(name for name in spellings if name.startswith("--"))
            options |= dict.fromkeys(spellings, (long, key == "valued"))
    return options


def option_of(name: str, *tools: str) -> tuple[str, bool] | None:
    """Return the option `name` of the first of `tools` that has it, None if it is unknown.

    For the first tool, the unique beginning of a long name is enough, as for pip and conda.
    """
    for options in map(_options, tools):
        if name in options:
            return options[name]
    begun = name if name.startswith("--") else " "
    candidates = {option for spelling, option in _options(tools[0]).items() if spelling.startswith(begun)}
    return candidates.pop() if len(candidates) == 1 else None


@functools.cache
def _without_effect() -> frozenset[str]:
    return frozenset(load_table("pip_options")["without_effect"])


def shell_words(text: str) -> list[str]:
    """Return the words of a command of the shell, or those between blanks if a quote is not closed."""
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _named(text: str) -> str:
    """Return `NAME @ URL` for a URL of a wheel, or with pip's old `egg=NAME`; return any other text unchanged."""
    address, _, fragment = text.partition("#")
    pairs = {key: value for key, _, value in (pair.partition("=") for pair in fragment.split("&") if pair)}
    name = pairs.pop("egg", "")
    wheel = re.match(r"\w[\w+.-]*://\S*/([\w.]+)-[^-/\s]+-[^/\s]+\.whl(?=[\s?]|$)", address)
    if not name and wheel:
        name = normalise(wheel[1])
    if not name or "://" not in address or re.match(r"[\w.-]+\s*(\[[^]]*\]\s*)?@", address):
        return text
    rest = "&".join(f"{key}={value}" for key, value in pairs.items())
    return f"{name} @ {address}" + (f"#{rest}" if rest else "")


_GIT = {"git", "rev", "tag", "branch", "subdirectory"}
_CARRIED = _GIT | {"url", "file", "index", "version", "extras", "markers", "python", "platform", "optional"}


def poetry_requirement(name: str, about: dict[str, Any], place: str, group: str) -> Iterator[Statement]:
    """Yield a dependency in the form of poetry or pixi as a PEP 508 requirement."""
    version = poetry_specifier(str(about.get("version", "*")))
    if address := git_address(about):
        version = f" @ {address}"
    if about.get("source") == "pypi":
        about = {key: value for key, value in about.items() if key != "source"}
    if address := next((str(about[key]) for key in ("url", "file") if "://" in str(about.get(key, ""))), ""):
        version = f" @ {address}"
    elif {"path", "url", "file"} & about.keys():
        yield lost(f"{name} = {about}", place, SOURCE, group)
        return
    if version is None:
        yield lost(f"{name} {about['version']}", place, ALTERNATIVES, group)
    else:
        python = (poetry_specifier(str(about.get("python", ""))) or "").split(",")
        systems = str(about.get("platform", "")).split(",")
        markers = [str(about["markers"])] if "markers" in about else []
        for variable, parts in (("python_version", python), ("sys_platform", systems)):
            pairs = [re.findall(r"^([<>=!~]*)(.*)", part.strip(), re.S)[0] for part in parts if part.strip()]
            operators = {"": "==", "!": "!="}  # poetry writes "!darwin"
            markers += [f'{variable} {operators.get(sign, sign)} "{value.strip()}"' for sign, value in pairs]
        marker = " and ".join(f"({marker})" if " or " in marker else marker for marker in markers)
        marker, named = split_extras(marker)
        group = named or group
        text = requirement_text(name, list_at(about, "extras"), version, marker)
        yield Statement("requirement", text, place, group)
        if re.match(r"[~^](?!=)[^+]*\+", given := str(about.get("version", "")).strip()):
            yield lost(f"{name} {given}", place, f"PEP 440 has no local versions in ranges: carried as {text}", group)
        tag = re.search(r"\+([a-z]+[0-9.]*)$", given)
        if tag and accelerator_of(tag[1]) and for_linux(marker):
            yield Statement("accelerator", tag[1], place, group)
        if "://" in str(about.get("index", "")):  # pixi
            yield Statement("index", str(about["index"]), place, group)
        for key in sorted(about.keys() - _CARRIED):
            if key != "source":
                yield lost(f"{name}: {key} = {about[key]}", place, TOOL)
            else:
                reason = BOUND if for_linux(marker) else OTHER_SYSTEM
                yield lost(f"{name}: {key} = {about[key]}", place, reason, group)


def poetry_python(text: str, place: str) -> Iterator[Statement]:
    """Yield the Pythons of a constraint of poetry's; PEP 440 has no alternatives, so that all others are excluded."""
    parts = [poetry_specifier(part) or ">=3" for part in text.split("|") if part.strip()]
    if len(parts) < 2:
        yield Statement("python", parts[0] if parts else ">=3", place)
        return
    try:
        fitting = {python for part in parts for python in fitting_pythons(part, PYTHONS)}
    except ValueError:  # InvalidSpecifier is one
        yield lost(f"python {text}", place, ALTERNATIVES)
        return
    yield Statement("python", ",".join(f"!={python}.*" for python in PYTHONS if python not in fitting) or ">=3", place)


def poetry_specifier(text: str) -> str | None:
    """Return poetry's constraint as a PEP 440 specifier, with ^ and ~ translated; None when it has no such form."""
    joined = re.sub(r"([<>=!~^])\s+", r"\1", text.strip())
    parts = [part.strip() for part in re.split(r"[,\s]+(?=[<>=!~^*\d])", joined)]
    return None if "|" in text else ",".join(filter(None, (_translated(part) for part in parts)))


def _translated(part: str) -> str:
    operator, version = re.fullmatch(r"(\^|~(?!=)|[<>=!~]*)\s*(.*)", part, re.S).groups()  # type: ignore[union-attr]
    numbers = re.match(r"v?(\d{1,9}!)?(\d{1,9}(?:\.\d{1,9})*)", version)
    if version in ("", "*", "latest", "@latest"):
        return ""
    if operator not in ("^", "~") or not numbers:
        return f"{operator or '=='}{version}".replace("====", "===")
    version = version.partition("+")[0]  # PEP 440 has no local versions in ranges
    parts = [int(part) for part in numbers[2].split(".")]
    first = next((index for index, part in enumerate(parts) if part), len(parts) - 1)
    last = first if operator == "^" else min(1, len(parts) - 1)
    return f">={version},<{numbers[1] or ''}{'.'.join(map(str, [*parts[:last], parts[last] + 1]))}"


# ---- setup.py and setup.cfg
_COMPUTED = "computed by the program, which init does not run: name {} with --from"
_LISTS = {"install_requires": "", "setup_requires": "setup_requires", "tests_require": "tests_require"}
_MARK = "\0"  # before the number of a line


def read_setup(path: Path) -> Iterator[Statement]:
    """Yield the statements of the call of setup() in a setup.py; values that are no literals are named."""
    try:
        yield from list(_of_setup(path, text_of(path)))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the last two for deep expressions
        why = str(error) or "its expressions are too deep"
        raise UsageError(f"{path}: not Python 3: {why}", "write its install_requires to requirements.txt") from None


def _of_setup(path: Path, text: str) -> Iterator[Statement]:
    tree = ast.parse(text)
    values, given = _assigned(tree), list[tuple[str, ast.expr]]()
    files = [name for name in re.findall(r"""['"]([\w./-]+\.(?:txt|in))['"]""", text) if (path.parent / name).is_file()]
    computed = _COMPUTED.format(" or ".join(dict.fromkeys(files)) or "the file that has it")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "setup":
            given += [pair for keyword in node.keywords for pair in _keywords(keyword, values)]
    for name, value in given:
        place, literal = f"{path}:{value.lineno}", _literal(value, values)
        if name in ("name", "python_requires") and isinstance(literal, str):
            yield Statement("name" if name == "name" else "python", literal, place)
        elif name == "extras_require":
            yield from _extras(value, values, str(path), computed)
            yield from _added_extras(value, tree, values, str(path), computed)
        elif name in _LISTS:
            yield from _requirements(value, values, str(path), name, _LISTS[name], computed)
    if re.search(r"^[^#\n]{,300}\binstall_requires", text, re.MULTILINE) and "install_requires" not in dict(given):
        yield lost("install_requires", str(path), computed)


def _keywords(keyword: ast.keyword, values: Mapping[str, ast.expr]) -> Iterator[tuple[str, ast.expr]]:
    """Yield the keyword of a call with its value, or those of `**NAME` if NAME is a dictionary with literal keys."""
    value = keyword.value
    if keyword.arg:
        yield keyword.arg, value
        return
    value = values.get(value.id, value) if isinstance(value, ast.Name) else value
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "dict":
        yield from ((inner.arg, inner.value) for inner in value.keywords if inner.arg)
    elif isinstance(value, ast.Dict):
        pairs = zip(value.keys, value.values, strict=True)
        yield from ((str(key.value), inner) for key, inner in pairs if isinstance(key, ast.Constant))


def _assigned(tree: ast.Module) -> dict[str, ast.expr]:
    """Return the names that the module assigns once, with their values and what it adds to them."""
    pairs = [
        (target.id, node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    ]
    changes = [
        ast.unparse(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in ("append", "extend", "update", "insert", "remove")
    ]
    changes += [ast.unparse(node.target) for node in ast.walk(tree) if isinstance(node, ast.AugAssign)]
    names, added = [name for name, _ in pairs], list(_added(tree.body))
    values = {
        name: value
        for name, value in pairs
        if names.count(name) == 1 and changes.count(name) == [other for other, _ in added].count(name)
    }
    for name, value in added:
        if name in values:
            values[name] = ast.copy_location(ast.BinOp(values[name], ast.Add(), value), values[name])
    return values


def _added(body: list[ast.stmt], test: ast.expr | None = None) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names of lists with what `body` adds to them: names += [...]; in a branch, as VALUE if TEST else []."""
    for node in body:
        match node:
            case ast.If():
                yield from _added(node.body, node.test)
                yield from _added(node.orelse, ast.UnaryOp(ast.Not(), node.test))
                continue
            case ast.AugAssign(target=ast.Name(id=name), op=ast.Add(), value=value):
                pass
            case ast.Expr(ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="extend"), args=[value])):
                pass
            case ast.Expr(ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="append"), args=[item])):
                value = ast.copy_location(ast.List([item], ast.Load()), item)
            case _:
                continue
        empty = ast.List([], ast.Load())
        yield name, value if test is None else ast.copy_location(ast.IfExp(test, value, empty), value)


def _literal(node: ast.expr, values: Mapping[str, ast.expr]) -> object:
    """Return the value of a literal, or of a name for one; None for any other expression."""
    node = values.get(node.id, node) if isinstance(node, ast.Name) else node
    if isinstance(node, ast.JoinedStr):  # an f-string, which is a literal without placeholders
        parts = [part.value for part in node.values if isinstance(part, ast.Constant)]
        return "".join(map(str, parts)) if len(parts) == len(node.values) else None
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, MemoryError, RecursionError):
        return None


def _items(node: ast.expr, values: Mapping[str, ast.expr], depth: int = 0) -> Iterator[ast.expr]:
    """Yield the expressions in a list, a sum of lists, or a name for one."""
    if isinstance(node, ast.Name) and node.id in values and depth < 8:
        yield from _items(values[node.id], values, depth + 1)
    elif isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        for item in node.elts:
            yield from _items(item.value, values, depth + 1) if isinstance(item, ast.Starred) else [item]
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        yield from _items(node.left, values, depth)
        yield from _items(node.right, values, depth)
    else:
        yield node


def _requirements(
    node: ast.expr, values: Mapping[str, ast.expr], file: str, name: str, group: str, computed: str
) -> Iterator[Statement]:
    """Yield the requirements in the value of the keyword `name`; a string has one in each line."""
    for item in _items(node, values):
        text, first = _literal(item, values), item.lineno
        if not isinstance(text, str):
            yield lost(f"{name}: {ast.unparse(item)}", f"{file}:{first}", computed, group)
            continue
        is_block = text.count("\n") == (item.end_lineno or first) - first  # its lines are those of the file
        for number, line in enumerate(map(str.strip, text.split("\n")), first):
            if line:
                yield Statement("requirement", line, f"{file}:{number if is_block else first}", group)


def _extras(node: ast.expr, values: Mapping[str, ast.expr], file: str, computed: str) -> Iterator[Statement]:
    node = values.get(node.id, node) if isinstance(node, ast.Name) else node
    if not isinstance(node, ast.Dict):
        yield lost(f"extras_require: {ast.unparse(node)}", f"{file}:{node.lineno}", computed)
        return
    for key, value in zip(node.keys, node.values, strict=True):
        group = _literal(key, values) if key else None
        if isinstance(group, str):
            extra, _, marker = group.partition(":")  # "gpu:sys_platform == 'linux'"
            for statement in _requirements(value, values, file, f"extras_require[{group!r}]", extra, computed):
                yield replace(statement, text=f"{statement.text} ; {marker}") if marker else statement
        else:
            yield lost(f"extras_require: {ast.unparse(value)}", f"{file}:{value.lineno}", computed)


def _added_extras(
    node: ast.expr, tree: ast.Module, values: Mapping[str, ast.expr], file: str, computed: str
) -> Iterator[Statement]:
    """Yield the extras that the module adds to the dictionary `node`: extras["all"] = extras["a"] + ["b"]."""
    for added in ast.walk(tree):
        match added:
            case ast.Assign(targets=[ast.Subscript() as target]):
                group = _literal(target.slice, values)
            case (
                ast.AugAssign(target=ast.Subscript() as target)
                | ast.Call(func=ast.Attribute(value=ast.Subscript() as target))
            ):
                group = None
            case _:
                continue
        if ast.unparse(target.value) != ast.unparse(node):
            continue
        if isinstance(added, ast.Assign) and isinstance(group, str):
            yield from _requirements(added.value, values, file, f"extras_require[{group!r}]", group, computed)
        else:
            yield lost(f"extras_require: {ast.unparse(added)}", f"{file}:{target.lineno}", computed)


def read_setup_cfg(path: Path) -> Iterator[Statement]:
    """Yield the statements of a setup.cfg. Raises UsageError."""
    text = text_of(path)
    config = configparser.RawConfigParser(inline_comment_prefixes=None)
    config.optionxform = str  # type: ignore[assignment,method-assign]
    # Each line of a value ends with its number, so that a comment with the same text is not taken for it.
    lines = enumerate(text.split("\n"), 1)
    try:
        config.read_string("\n".join(f"{line}{_MARK}{number}" if line.strip() else line for number, line in lines))
    except configparser.Error as error:
        problem = re.sub(r"(?:\0|\\x00)\d+", "", " ".join(str(error).split()))
        raise UsageError(f"{path}: {problem}", "correct the file") from None
    for section, key, kind in (("metadata", "name", "name"), ("options", "python_requires", "python")):
        for value, place in _lines_of(config, section, key, path)[:1]:
            yield Statement(kind, value, place)
    groups = {("options", key): group for key, group in _LISTS.items()}
    extras = "options.extras_require"
    groups |= {(extras, key): key for key in (config.options(extras) if config.has_section(extras) else ())}
    for (section, key), group in groups.items():
        for line, place in _lines_of(config, section, key, path):
            stripped = line.split(" #")[0].rstrip("; ")
            if stripped.startswith("file:"):
                yield lost(f"{key} = {stripped}", place, "name that file with --from", group)
                continue
            # setuptools divides a value of one line at semicolons; those before a marker are left alone.
            is_list = "\n" not in config.get(section, key) and requirement_problem(stripped) is not None
            for item in map(str.strip, stripped.split(";") if is_list else [stripped]):
                if item and not item.startswith("#"):
                    yield Statement("requirement", item, place, group)


def _lines_of(config: configparser.RawConfigParser, section: str, key: str, path: Path) -> list[tuple[str, str]]:
    """Return the lines of a value that have text, each with its place, which `read_setup_cfg` appends to it."""
    lines = [line.rpartition(_MARK) for line in config.get(section, key, fallback="").split("\n")]
    return [(text.strip(), f"{path}:{number}") for text, _, number in lines if text.strip()]
