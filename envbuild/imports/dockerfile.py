"""Reader of Dockerfiles: base, environment, working directory, and the packages of pip, conda and apt.

Like a builder, it tracks the variables of each stage, the copied files, the working directory of each command, and
stages whose environment a later stage copies. From the host, it reads only files of the build context. Source:
docs.docker.com, "Dockerfile reference". dockerfile-parse 2.0 is not used: it reads the lines of a here-document as
instructions, and has no types.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path

from envbuild.base.errors import UsageError
from envbuild.base.files import parse_json
from envbuild.base.text import normalise
from envbuild.image.model import GOARCH
from envbuild.imports.conda_files import conda_words
from envbuild.imports.pip_files import Find, last_installed, pip_words, shell_words
from envbuild.imports.pyproject import read_pyproject
from envbuild.imports.statement import BOUND, BRANCH, NOT_IN_IMAGE, NOT_TAKEN, Statement, lost, text_of, variable
from envbuild.recipe.targets import host_arch

# Bases whose content a recipe can name: Python's version, and torch's; data/gpu_signs.toml reads their CUDA.
_BASES = (
    re.compile(r"(?:docker\.io/)?(?:library/)?python:(?P<python>3\.\d+(?:\.\d+)?)\S*"),
    re.compile(r"(?:docker\.io/)?pytorch/pytorch:(?P<torch>\d+\.\d+\.\d+)-cuda\d+\.\d\S*"),
    re.compile(r"(?:docker\.io/)?rocm/pytorch:\S*_py(?P<python>3\.\d+)_\S*"),
    re.compile(r"(?:docker\.io/)?nvidia/cuda:\d+\.\d\S*"),
)
_ARM = re.compile(r"--platform=linux/(?:arm64|aarch64)(?![\w/])|/l4t-|(?:^| )(?:arm64v8|dustynv)/")  # NVIDIA's Jetson
# Python in the tag of another base, and in the paths of its packages.
_TAG_PYTHON = re.compile(r"(?<![A-Za-z0-9])py(?:thon)?-?3\.?(\d{1,2})(?![\d])")
_PATH_PYTHON = re.compile(r"/(?:usr/local|usr|opt/conda|opt/venv)/lib/python3\.(\d+)/(?:dist|site)-packages")
# $NAME, ${NAME}, ${NAME:-default} and ${NAME:+alternative}, whose words may have more; a backslash keeps the dollar.
_INNER = r"(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*"
_VARIABLE = re.compile(rf"(?<!\\)\$(?:(\w+)|\{{(\w+)(?:(:?[-+])({_INNER}))?\}})")
# Parts of a command in which blanks do not divide words.
_QUOTED = re.compile(rf"\\.|'[^']*'|\"(?:\\.|[^\"\\])*\"|\$\{{{_INNER}\}}", re.DOTALL)
_QUOTED_DOLLAR, _LITERAL_DOLLAR, _BLANK = "\x03", "\x05", "\x04"  # marks in words, until variables are expanded
_HEREDOC = re.compile(r"<<-?\s*[\"']?([A-Za-z_]\w*)[\"']?")
# A command in an environment of conda.
_RUN_IN = r"(?:(?:\S*/)?(?:conda|mamba|micromamba) run (?:(?:-n|-p|--name|--prefix)[ =]\S+ |-\S+ )*)?"
_INSTALL = {
    "pip": re.compile(rf"{_RUN_IN}(?:(?:\S*/)?python[\d.]* -m |(?:\S*/)?uv )?(?:\S*/)?pip[\d.]*(?: -\S+)* install"),
    "conda": re.compile(
        rf"{_RUN_IN}(?:\S*/)?(?:(?:conda|mamba|micromamba)(?: -[yq])* (?:env )?(?:install|create)"
        r"|(?:conda|mamba|micromamba)(?: -[yq])* env update|conda-lock install)"
    ),
    "package": re.compile(r"apt(?:-get)?(?: -\S+)* install"),
}
# They change neither packages nor versions.
_WITHOUT_EFFECT = ("-y", "-q", "-qq", "--yes", "--quiet", "--no-install-recommends", "--assume-yes")
_SHELL = "a command of the shell"
# A folder with code as pip installs it: -e .[all]
_FOLDER = re.compile(r"(?:(?:-e|--editable)[ =]?)?(\.{1,2}/?[\w./-]*|/[\w./-]+)(?:\[([\w., -]+)\])?")
_FOR_COMMAND = "a variable of this command alone"
_SYNC = re.compile(r"(?:\S*/)?(?:uv (?:\S+ )*?sync|(?:poetry|pipenv|pixi|pdm) (?:-\S+ )*(?:install|sync))(?= |$)")
_CHOSEN_PYTHON = re.compile(
    r"(?:\S*/)?(?:uv python install (?:-\S+ )*|uv venv (?:\S+ )*?(?:-p|--python)[ =](?:python)?)(3\.\d+)"
    r"|(?:\S*/)?python(3\.\d+) -m (?:venv|virtualenv) |pyenv (?:install|global) (3\.\d+)"
    r"|(?:dnf|yum|microdnf|zypper|apk) (?:\S+ )*?python(3\.\d+)(?![\w.])"
)
_SYNCED = "installs what the project's files and its lock have: name these with --from"
_PYTHON = "the recipe's Python"
# Statements about the environment of a stage that another copies; the others are about its image.
_OF_ENVIRONMENT = ("requirement", "constraint", "pin", "index", "conda", "conda-pin", "channel", "python")
_REDIRECTED = "a redirection of the shell: quote a requirement that has < or >"
_NEWLINE = ";;"  # which no command of a RUN outside of `case` has
_COPIES = "copies files: own code belongs to [project]"
_OTHER_BASE = "a recipe builds on Debian, or names base and python in [image]"
_DEFAULT = "its default is used where the file names it"
# Folders of environments, and the words before the path of one that a command makes.
_ENVIRONMENT = re.compile(
    r"/($|usr($|/local)|opt/conda|.*(venv|virtualenv|site-packages|dist-packages|\.local)(/|$)"
    r"|.*/(ana|mini|micro)?(conda|mamba|forge)(forge)?\d*(/|$))"
)
_MAKES = re.compile(r"(?:-m venv|virtualenv|uv venv|--prefix|--target|-t|-p)(?: -\S+)*[ =]((?:/|\.\w)\S*)")
# Parents of the Dockerfile's folder in which the build context is looked for.
_PARENTS = 3


@dataclass(slots=True, eq=False)
class _Stage:
    """A stage while it is read: its variables, its working directory, and the sources of its files.

    `files` are (path in the image, paths in possible build contexts, or text and place); the last one of a path counts.
    `made` are the folders of environments, `above` is the parent stage, `copied` are the stages whose environments it
    copies.
    """

    name: str
    above: _Stage | None = None
    env: dict[str, str] = field(default_factory=dict)
    args: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    files: list[tuple[str, list[Path] | tuple[str, str]]] = field(default_factory=list)
    made: list[str] = field(default_factory=list)
    copied: list[_Stage] = field(default_factory=list)
    statements: list[Statement] = field(default_factory=list)

    @property
    def variables(self) -> Mapping[str, str]:
        """Variables that are visible to its instructions."""
        return self.args | self.env

    def path(self, text: str) -> str:
        """Return the absolute path of `text` in the image."""
        return posixpath.normpath(posixpath.join(self.workdir, text))


def read_dockerfile(path: Path) -> Iterator[Statement]:
    """Yield the statements of a Dockerfile's last stage and of the stages it builds on or copies. Raises UsageError."""
    arch = GOARCH.get(host_arch(), host_arch())
    # What a builder sets; source: docs.docker.com, "Automatic platform ARGs in the global scope".
    platform = {"PLATFORM": f"linux/{arch}", "OS": "linux", "ARCH": arch}
    stages = [_Stage("", args={f"{of}{key}": value for of in ("TARGET", "BUILD") for key, value in platform.items()})]
    for number, name, rest in _instructions(text_of(path)):
        place, stage = f"{path}:{number}", stages[-1]
        if name == "FROM":
            stages.append(_from(rest, place, stages))
        else:
            stage.statements += _instruction(name, rest, place, stage, stages, path.parent)
    whole = [stages[0], stages[-1]]  # stages whose variables, working directory and Debian packages the image has
    while above := whole[-1].above:
        whole.append(above)
    copied = [
        copied_stage for stage in whole for copied_stage in stage.copied
    ]  # stages of which it has the Python packages
    for source_stage in copied:
        copied += [
            other for other in (*source_stage.copied, source_stage.above) if other is not None and other not in copied
        ]
    statements: list[Statement] = []
    for stage in stages:
        for statement in stage.statements:
            if stage in whole or (stage in copied and (statement.kind in _OF_ENVIRONMENT or statement.reason)):
                statements.append(statement)
            else:
                statements.append(replace(statement, reason=NOT_IN_IMAGE))
    yield from last_installed(statements)
    used = [statement for statement in statements if statement.reason != NOT_IN_IMAGE]
    if not any(statement.kind == "python" for statement in used):
        paths = ((_PATH_PYTHON.search(statement.text), statement.place) for statement in used)
        if python := next(((match[1], place) for match, place in paths if match), None):
            yield Statement("python", f"==3.{python[0]}.*", python[1])


def _from(rest: str, place: str, stages: list[_Stage]) -> _Stage:
    """Return the stage that a FROM begins."""
    # A builder knows those before the first FROM alone; some files have theirs after it.
    known = {**stages[-1].args, **stages[0].args}
    words = [word for word in _replaced(rest, known).split() if not word.startswith("--")]
    image = words[0] if words else ""
    name = words[2].lower() if len(words) == 3 and words[1].lower() == "as" else ""
    above = _stage_of(image, stages)
    stage = _Stage(name, above)
    if above is None:
        arm = [Statement("platform", "linux-aarch64", place)] if _ARM.search(rest) else []
        stage.statements += [*_base(image, place), *arm]
    else:
        stage.env, stage.workdir = dict(above.env), above.workdir
        stage.files, stage.made = list(above.files), list(above.made)
    return stage


def _stage_of(name: str, stages: list[_Stage]) -> _Stage | None:
    """Return the stage with this name or number, None for an image."""
    if name.isdecimal() and int(name) + 1 < len(stages):
        return stages[int(name) + 1]
    return next((stage for stage in reversed(stages[1:]) if name and stage.name == name.lower()), None)


def _instruction(
    name: str, rest: str, place: str, stage: _Stage, stages: list[_Stage], folder: Path
) -> Iterator[Statement]:
    text = rest if name == "RUN" else _replaced(rest, stage.variables)
    if name == "ARG":
        given = _values(rest, stage.variables)
        declared = re.findall(r"^(\w+)$", text)
        stage.args |= given | {name: stages[0].args[name] for name in declared if name in stages[0].args}
        yield lost(f"ARG {' '.join(f'{key}={value}' for key, value in given.items()) or rest}", place, _DEFAULT)
    elif name == "ENV":
        given = _values(rest, stage.variables)
        stage.env |= given
        stage.made += [value for key, value in given.items() if key in ("VIRTUAL_ENV", "CONDA_PREFIX")]
        for key, value in given.items():
            yield from variable(key, value, place)
            if key == "UV_PYTHON" and (python := re.fullmatch(r"(?:python)?(3\.\d+)(?:\.\d+)?", value)):
                yield Statement("python", f"=={python[1]}.*", place)
    elif name == "WORKDIR":
        stage.workdir = stage.path(text.strip("\"'"))
        yield Statement("workdir", stage.workdir if "$" not in text else text, place)
    elif name in ("COPY", "ADD"):
        yield from _copy(text, f"{name} {rest}", place, stage, stages, folder)
    elif name == "RUN":
        yield from _run(text, place, stage, folder)
    else:
        yield lost(f"{name} {rest}", place, "a recipe has no such setting")


def _replaced(text: str, variables: Mapping[str, str]) -> str:
    """Return `text` with known variables expanded; unknown variables are left unexpanded."""

    def value(match: re.Match[str]) -> str:
        name, sign = match[1] or match[2], match[3] or ""
        is_given = bool(variables.get(name)) if sign.startswith(":") else name in variables
        if sign.endswith("+"):
            return _replaced(match[4], variables) if is_given else ""
        return variables[name] if is_given else _replaced(match[4], variables) if sign else match[0]

    return _VARIABLE.sub(value, text)


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
                    rest += f"\n{_END}"
                    break
                rest += f"\n{inner}"
        if name:
            yield number, name.upper(), rest.strip()


# The end of a here-document, which no file has.
_END = "\x00"


def _pairs(text: str) -> dict[str, str]:
    """Return the variables of ENV or ARG."""
    words = shell_words(text)
    if len(words) > 1 and "=" not in words[0]:
        return {words[0]: " ".join(words[1:])}
    return {name: value for name, equals, value in (word.partition("=") for word in words) if equals}


def _values(text: str, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of ENV or ARG with expanded values; a dollar after a backslash is literal."""
    kept = {name: _replaced(value, variables) for name, value in _pairs(text.replace("\\$", "\x02")).items()}
    return {name: value.replace("\x02", "$") for name, value in kept.items()}


def _base(image: str, place: str) -> Iterator[Statement]:
    match = next((known for pattern in _BASES if (known := pattern.fullmatch(image))), None)
    about = match.groupdict() if match else {}
    in_tag = _TAG_PYTHON.search(image.partition("@")[0].rpartition(":")[2] if ":" in image else "")
    if python := about.get("python") or (in_tag and f"3.{in_tag[1]}"):
        yield Statement("python", f"=={python}.*", place)
    if match and match.re is _BASES[0]:
        return
    if "torch" in about:
        yield Statement("requirement", f"torch=={about['torch']}", place)
    yield lost(f"FROM {image}", place, _OTHER_BASE) if match else Statement("base", image, place)


def _copy(text: str, shown: str, place: str, stage: _Stage, stages: list[_Stage], folder: Path) -> Iterator[Statement]:
    """Record the files of a COPY or ADD, and yield a statement for each copy that is not carried into the recipe."""
    first, *bodies = text.split("\n", 1)
    words, options = _copied(first)
    *sources, target = words or [""]
    into = target.endswith("/") or len(sources) > 1
    other = _stage_of(options.get("from", ""), stages)
    if bodies:
        documents = bodies[0].split(f"\n{_END}")
        for source, document in zip(sources, documents, strict=False):
            inner = "/" + _HEREDOC.sub(r"\1", source) if into else ""
            stage.files.append((stage.path(target) + inner, (document, f"{place}: here-document")))
    elif other is not None:
        taken = [other.path(source) for source in sources]
        for source in taken:
            for file, path in other.files:
                if file == source or file.startswith(f"{source}/"):
                    stage.files.append((stage.path(target) + file[len(source) :], path))
        if any(
            _ENVIRONMENT.match(made_path) or any(_overlap(made_path, made) for made in other.made)
            for made_path in taken
        ):
            stage.copied.append(other)
            stage.made.append(stage.path(target))
            return  # its packages are the image's
    elif "from" not in options:
        for source in sources:
            stage.files += _placed(_in_context(source, folder), stage, target, into)
    yield lost(shown.partition("\n")[0], place, _COPIES)


def _copied(text: str) -> tuple[list[str], dict[str, str]]:
    """Return the paths (sources, then target) and the options of a COPY."""
    try:
        words = [str(item) for item in parse_json(text)] if text.startswith("[") else shlex.split(text)
    except (ValueError, TypeError):
        words = text.split()
    options = dict(word[2:].partition("=")[::2] for word in words if word.startswith("--"))
    return [word for word in words if not word.startswith("--")], options


def _overlap(path: str, other: str) -> bool:
    return f"{path}/".startswith(f"{other.rstrip('/')}/") or f"{other}/".startswith(f"{path.rstrip('/')}/")


def _in_context(source: str, folder: Path) -> list[Path]:
    """Return the matches of `source` in the possible build contexts: the Dockerfile's folder and the folders above."""
    relative = posixpath.normpath(source.lstrip("/"))
    if relative.startswith("..") or "$" in relative:
        return []
    here = folder.absolute()
    paths: list[Path] = []
    for parent in [here, *here.parents[:_PARENTS]]:
        paths += [parent] if relative == "." else sorted(parent.glob(relative))
        if (parent / ".git").exists():
            break
    return paths


def _placed(paths: list[Path], stage: _Stage, target: str, into: bool) -> Iterator[tuple[str, list[Path]]]:
    """Yield each path in the image with its possible sources in the build context, files or folders."""
    place = stage.path(target)
    for name in dict.fromkeys(path.name for path in paths if path.is_file()):
        inner = into or place in (stage.workdir, "/") or len({path.name for path in paths}) > 1
        same = [path for path in paths if path.is_file() and path.name == name]
        yield f"{place.rstrip('/')}/{name}" if inner else place, same
        if not inner and "." not in posixpath.basename(place):  # the image may have this folder: COPY x.txt /tmp
            yield f"{place}/{name}", same
    if folders := [path for path in paths if path.is_dir()]:
        yield place, folders


def _finder(stage: _Stage, workdir: str, mounted: list[tuple[str, list[Path]]]) -> Find:
    """Return a function that finds the source of a file in the image that an instruction copied or RUN mounts.

    The function raises UsageError if files of several possible build contexts match.
    """

    def find(name: str) -> Path | tuple[str, str] | None:
        full_name = posixpath.normpath(posixpath.join(workdir, name))
        copies = {(place, *paths): (place, paths) for place, paths in [*stage.files, *mounted][::-1]}
        for place, paths in copies.values():  # each once: a generated Dockerfile may repeat one hundreds of times
            if isinstance(paths, tuple):
                if full_name == place:
                    return paths
                continue
            inside = full_name.startswith(f"{place.rstrip('/')}/")
            inner = full_name[len(place.rstrip("/")) + 1 :] if inside else ""
            files = [path / inner for path in paths if (inside or full_name == place) and (path / inner).is_file()]
            if len(files) > 1:
                raise UsageError(
                    f"cannot tell the build context: both {files[0]} and {files[1]} fit; name one with --from"
                )
            if files:
                return files[0]
        return None

    return find


def _run(text: str, place: str, stage: _Stage, folder: Path) -> Iterator[Statement]:
    """Yield the statements of the commands of one RUN."""
    options, mounted = re.match(r"(--\w+=\S+\s+)*", text), list[tuple[str, list[Path]]]()
    flags = options[0].split() if options else []
    for about in [dict(part.partition("=")[::2] for part in flag[8:].split(",")) for flag in flags if "mount=" in flag]:
        source = _in_context(about.get("source", about.get("src", ".")), folder)
        if about.get("type") == "bind" and "from" not in about:
            target = next((about[key] for key in ("target", "dst", "destination") if key in about), stage.workdir)
            mounted += _placed(source, stage, _replaced(target, stage.variables), into=False)
    body = text[len(options[0]) if options else 0 :].replace(f"\n{_END}", "")
    body = _HEREDOC.sub("", body, count=1) if "\n" in body else body
    commands: list[list[str]] = [[]]
    held: list[str] = []
    try:
        if body.startswith("["):
            commands = [[str(item).replace("$", _QUOTED_DOLLAR) for item in parse_json(body)]]
        else:
            lines, comment = body.replace("\\\n", " ").replace("\n", f" {_NEWLINE} "), False
            while (whole := _SUBSTITUTION.sub(lambda match: _held(match[0], held), lines)) != lines:
                lines = whole
            lexer = shlex.shlex(_QUOTED.sub(_marked, lines), posix=True, punctuation_chars=";&|<>()")
            lexer.whitespace_split, lexer.commenters = True, ""  # a # inside a word, as in a URL, is no comment
            for word in lexer:
                comment = word != _NEWLINE and (comment or word.startswith("#"))
                if comment:
                    continue
                commands.append([]) if re.fullmatch(r"[;&|()]+", word) else commands[-1].append(word)
    except (ValueError, TypeError):
        yield lost(text.replace(_END, ""), place, _SHELL)
        return
    workdir, variables, shell = stage.workdir, dict(stage.variables), _Branches()
    for given in filter(None, commands):
        words = shell.enter([part for word in given for part in _expanded(word, variables, held, given[0] in _TESTS)])
        if not words or shell.reason == NOT_TAKEN:
            if words:
                yield lost(" ".join(words), place, shell.reason)
            continue
        start = next((index for index, word in enumerate(words) if not re.match(r"sudo$|[A-Za-z_]\w*=", word)), 0)
        if (words[0] == "export" or all("=" in word for word in words)) and not shell.reason:
            variables |= _pairs(" ".join(shlex.quote(_replaced(word, variables)) for word in words if "=" in word))
        if words[start] in ("cd", "pushd") and len(words) == start + 2:
            workdir = posixpath.normpath(posixpath.join(workdir, words[-1]))
            continue
        if inner := _script(words[start:]):
            statements = _run(inner, place, stage, folder)
        else:
            statements = _command(words, start, place, stage, _finder(stage, workdir, mounted))
        # The packages of a command that may not run are named, because they may be for GPUs.
        yield from (
            (replace(statement, reason=statement.reason or shell.reason) for statement in statements)
            if shell.reason
            else statements
        )


def _command(words: list[str], start: int, place: str, stage: _Stage, find: Find) -> Iterator[Statement]:
    """Yield the statements of one shell command; the name of its program is word number `start`."""
    line = " ".join(words[start:])
    stage.made += [stage.path(path) for path in _MAKES.findall(line)]
    # A program whose name has blanks, as of a quoted variable, is none of these.
    patterns = {} if " " in words[start] else _INSTALL
    matches = {kind: match for kind, pattern in patterns.items() if (match := pattern.match(line))}
    kind, options_found = next(iter(matches.items()), ("", None))
    if not options_found:
        if python := _CHOSEN_PYTHON.match(line):
            yield Statement("python", f"=={next(filter(None, python.groups()))}.*", place)
        yield lost(" ".join(words), place, _SYNCED if _SYNC.match(line) else _SHELL)
        return
    while redirected := next((index for index, word in enumerate(words) if re.fullmatch("[&]?[<>]+[&|]?", word)), 0):
        # In the shell, numpy>=2 without quotes is numpy, whose output goes to the file =2.
        yield lost(" ".join(words[redirected - 1 : redirected + 2]), place, _REDIRECTED)
        del words[redirected - words[redirected - 1].isdecimal() : redirected + 2]  # the 2 of 2>&1, too
    yield from (lost(word, place, _FOR_COMMAND) for word in words[:start] if "=" in word)
    left = words[start + len(options_found[0].split()) :]
    if kind == "pip":
        for statement in pip_words(left, place, find):
            yield statement
            yield from _own_requirements(statement, find)
    elif kind == "conda":
        yield from conda_words(left, place, find, is_env=" env " in options_found[0])
    else:
        yield from _packages(left, place)


def _own_requirements(statement: Statement, find: Find) -> Iterator[Statement]:
    """Yield what pip reads in the pyproject.toml of a folder with code that it installs, with its named extras."""
    match = _FOLDER.fullmatch(statement.text) if statement.kind == "requirement" else None
    try:
        path = find(posixpath.join(match[1], "pyproject.toml")) if match else None
        if not match or not isinstance(path, Path):
            return
        extras = {normalise(extra) for extra in (match[2] or "").split(",") if extra.strip()}
        for declared in read_pyproject(path):
            if declared.kind in ("requirement", "python", "index") or declared.reason == BOUND:
                is_chosen = not extras.isdisjoint(map(normalise, declared.group.split()))
                yield replace(declared, group="") if is_chosen else declared
    except UsageError as error:
        yield lost(statement.text, statement.place, error.message)


def _script(words: list[str]) -> str:
    """Return the script of `bash -c SCRIPT`, or ""."""
    if not re.fullmatch(r"(?:\S*/)?(?:ba|da|z)?sh", words[0]):
        return ""
    options = list(takewhile(lambda word: word.startswith("-"), words[1:]))
    match = options and re.fullmatch(r"-[a-z]*c", options[-1])
    return "".join(words[len(options) + 1 : len(options) + 2]) if match else ""


_SUBSTITUTION = re.compile(r"\$\([^()]*\)")


def _held(text: str, held: list[str]) -> str:
    """Return a placeholder for a command substitution, so that splitting into words does not divide it."""
    held.append(text)
    return f"\x01{len(held) - 1}\x01"


def _freed(word: str, held: list[str]) -> str:
    while (whole := re.sub("\x01(\\d+)\x01", lambda match: held[int(match[1])], word)) != word:
        word = whole
    return word


_TESTS = ("if", "elif", "[", "test")


def _marked(match: re.Match[str]) -> str:
    """Mark the dollars between quotes, and the blanks in the word of an unquoted ${NAME:-word}."""
    if match[0].startswith("$"):
        return re.sub(r"\s+", _BLANK, match[0])
    return match[0].replace("$", _QUOTED_DOLLAR)


def _expanded(word: str, variables: Mapping[str, str], held: list[str], is_test: bool) -> list[str]:
    """Return the words of the shell for `word`: it splits values of unquoted variables, and drops empty ones."""
    is_assignment = re.match(r"[A-Za-z_]\w*=", word)
    blank = " " if is_assignment else _BLANK
    whole = _replaced(word, {name: re.sub(r"\s+", blank, value) for name, value in variables.items()})
    whole = whole.replace("$", _LITERAL_DOLLAR).replace(_QUOTED_DOLLAR, "$")
    whole = _replaced(whole, variables).replace(_LITERAL_DOLLAR, "$")
    parts = [whole.replace(_BLANK, " ")] if is_assignment else [part for part in whole.split(_BLANK) if part]
    whole_parts = [_replaced(_freed(part, held), variables) if "\x01" in part else part for part in parts]
    return whole_parts or ([""] if is_test or "$" not in word else [])


@dataclass(slots=True)
class _Branches:
    """The branches and loops around a command of the shell.

    `open` holds for each whether it is taken (None: unknown), `before` whether an earlier branch of its `if` is taken;
    `testing` tells whether a condition is being read.
    """

    open: list[bool | None] = field(default_factory=list)
    before: list[bool | None] = field(default_factory=list)
    testing: bool = False

    @property
    def reason(self) -> str:
        """Reason why the command is not carried, or ""."""
        return NOT_TAKEN if False in self.open else BRANCH if None in self.open else ""

    def enter(self, words: list[str]) -> list[str]:
        """Record the keywords before a command, and return its other words: [] if none is a command."""
        while words:
            word, *rest = words
            if word in ("if", "for", "while", "until", "case"):
                self.open.append(_is_true(rest) if word == "if" else None)
                self.before.append(False)
                self.testing = word == "if"
                return []
            if word in ("elif", "else") and self.open:
                both = (self.open[-1], self.before[-1])
                self.before[-1] = True if True in both else None if None in both else False
                left = None if self.before[-1] is None else not self.before[-1]
                self.open[-1] = _is_true(rest) if left and word == "elif" else left
                self.testing = word == "elif"
                if word == "elif":
                    return []
            elif word in ("fi", "done", "esac") and self.open:
                self.open.pop()
                self.before.pop()
                return []
            elif word == "then":
                self.testing = False
            elif word not in ("do", "else", "{", "}", "!"):
                if self.testing:  # a second part of the condition
                    self.open[-1] = None
                    return []
                return words
            words = rest
        return []


def _is_true(words: list[str]) -> bool | None:
    """Return the result of a shell test that compares constant values; None for any other test."""
    if any(re.search(r"[$`*?]", word) for word in words):
        return None
    inner = words[1:-1] if words[:1] in (["["], ["[["]) else words[1:] if words[:1] == ["test"] else []
    match inner:
        case ["-z", value]:
            return not value
        case ["-n", value]:
            return bool(value)
        case [left, "=" | "==", right]:
            return left == right
        case [left, "!=", right]:
            return left != right
    return None


def _packages(words: list[str], place: str) -> Iterator[Statement]:
    for word in words:
        python = re.fullmatch(r"python(?:(3\.\d+)|3)?(?:-(?:full|minimal|venv|dev|distutils|pip|is-python3))?", word)
        if python and python[1]:
            yield Statement("python", f"=={python[1]}.*", place)
        elif python:
            yield lost(word, place, _PYTHON)
        elif not word.startswith("-"):
            yield Statement("package", word, place)
        elif word not in _WITHOUT_EFFECT:
            yield lost(word, place, "an option of the package manager")
