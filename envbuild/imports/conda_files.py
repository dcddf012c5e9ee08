"""Readers of conda's environment.yml, conda-lock.yml, pixi.toml and pixi.lock.

Sources: conda's documentation, "Managing environments"; conda-lock's documentation (selectors) and the schema of its
format, version 1; pixi.sh, "Manifest" and "Lock file", version 6.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from envbuild.base.errors import UsageError
from envbuild.base.packages import CHANNEL_ALIAS
from envbuild.base.toml import Document, list_at, read, table_at, value_at
from envbuild.base.yaml_reader import line_of, parse_yaml
from envbuild.imports.pip_files import Find, beside, option_of, pip_line, poetry_requirement
from envbuild.imports.statement import (
    ENVIRONMENTS,
    INDEX,
    NO_FILE,
    OTHER_SYSTEM,
    SOURCE,
    TOOL,
    Statement,
    check_version,
    lost,
    text_of,
    texts,
    variable,
)
from envbuild.recipe import checks

_SELECTOR = re.compile(r"\s#\s*\[([a-z0-9]+)\]\s*$")
_SELECTED = {"linux": "", "unix": "", "linux64": "linux-64", "x86_64": "linux-64", "aarch64": "linux-aarch64"}
_LINUX = ("", "linux-64", "linux-aarch64")
CHANNEL = "carried without its channel: the order of `channels` decides which of them serves a package"
_OPTION = "an option of the package manager"
_LOCKED = "URLs and hashes: `envbuild lock` writes those of the same versions and builds"
# A line of `conda list --export`: NAME=VERSION=BUILD
_EXPORTED = r"([\w.-]+)=([^=\s]+)=([^=\s]+)"
# The head of the table that `conda list` and `micromamba list` print, and a row: name, version, build, channel.
_TABLE = re.compile(r"^[ \t]*(?:#[ \t]*)?Name[ \t]+Version[ \t]+Build\b", re.MULTILINE)
_ROW = r"([\w.-]+)\s+([^\s=]+)\s+(\S+)(?:\s+(\S+))?"
# Arrays of environment.yml, pixi and conda-lock → kind of their statements.
KINDS = {"channels": "channel", "platforms": "platform", "dependencies": "conda"}

# The header of `conda list --export`.
_CREATED = re.compile(r"^#.*\bconda create\b.*--file\b", re.MULTILINE)
# Packages that exist for Windows or macOS alone.
_FOREIGN = re.compile(
    r"vc|vc14_runtime|vcomp14|vs20\d\d_\S+|ucrt|wincertstore|win_inet_pton|win_unicode_console|pywin32(?:-\S+)?|pywinpty|winpty|m2w64-\S+"
    r"|msys2-\S+|libwinpthread|console_shortcut\S*|menuinst|pyreadline3?|icc_rt|pthreads-win32|appnope|python\.app|cctools\S*|pyobjc\S*"
)


def _yaml(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the table in a YAML file, and the file's lines. Raises UsageError."""
    text = text_of(path)
    hint = "name another file with --from"
    documents = parse_yaml(text, str(path), UsageError, hint, typ="rt", aliases=100, expanded=True)
    return table_at(documents[0] if documents else None), text.split("\n")


def _placed(path: Path, listed: Any) -> Iterator[tuple[Any, int, str]]:
    """Yield the values of a list, each with its line and place."""
    for index, item in enumerate(list_at(listed)):
        line = line_of(listed, index)
        yield item, line, f"{path}:{line}"


def read_environment(path: Path) -> Iterator[Statement]:
    """Yield the statements of an environment.yml; selectors such as `# [linux64]` count. Raises UsageError."""
    data, lines = _yaml(path)
    foreign = _system_of(data)
    specs = [item for item in list_at(data, "dependencies") if isinstance(item, str)]
    pins = {spec.partition("::")[0] for spec in specs if "::" in spec}
    listed = list_at(data, "channels")
    # conda takes these from its own default channels.
    others = [] if listed else [spec for spec in specs if not re.match(r"\S+::|(?:python|pip)(?![\w.-])", spec)]
    channels = listed or ([] if others else [*pins])
    for key, value in data.items():
        place = f"{path}:{line_of(data, key)}"
        if key in KINDS:
            if value is not None and not isinstance(value, list):
                yield lost(f"{key}: {value}", place, "not a list")
            for item, line, at in _placed(path, value):
                is_pip = list(table_at(item)) == ["pip"] and isinstance(item["pip"], list)
                inner = _placed(path, item["pip"]) if is_pip else [(item, line, at)]
                for text, number, where in inner:
                    selector = next(iter(_SELECTOR.findall(lines[number - 1])), "linux")
                    if not isinstance(text, str) or selector not in _SELECTED:
                        yield lost(text, where, OTHER_SYSTEM if isinstance(text, str) else "not a string")
                    elif text is item:
                        channel, marks, spec = text.partition("::") if key == "dependencies" else ("", "", text)
                        if marks:
                            yield Statement("channel", channel, where)
                        if marks and channels != [channel]:
                            yield lost(text, where, CHANNEL)
                        yield from _portable(KINDS[key], spec if marks else text, where, _SELECTED[selector], foreign)
                    else:
                        for pip in pip_line(text, where, beside(path.parent)):
                            yield replace(pip, platform=_SELECTED[selector])
            if key == "dependencies" and others:
                given = default_channels(others)
                yield from (Statement("channel", channel, place) for channel in given)
                yield lost(
                    "no channels", place, f"conda takes its own default channels; the recipe has {' and '.join(given)}"
                )
        elif key == "variables":
            for name, text in table_at(value).items():
                yield from variable(name, str(text), place)
        else:
            yield Statement("name", str(value), place) if key == "name" else lost(f"{key}: {value}", place, TOOL)


def _system_of(data: Mapping[str, Any]) -> str:
    """Return the other system on which `conda env export` wrote the file, by its prefix or packages; "" for Linux."""
    prefix = str(data.get("prefix", ""))
    names = {re.split(r"[=\s]", str(item))[0] for item in list_at(data, "dependencies") if str(item).count("=") > 1}
    if re.match(r"[A-Za-z]:[\\/]", prefix) or not names.isdisjoint(("vc", "vc14_runtime", "vs2015_runtime", "ucrt")):
        return "Windows"
    return "macOS" if prefix.startswith(("/Users/", "/opt/homebrew/")) or "appnope" in names else ""


# Builds of a platform: with a hash, or of PyTorch's channel, whose builds for Linux have cuDNN's whole version.
_PLATFORM_BUILD = re.compile(r"h[0-9a-f]{7}|win(?:32|64)|osx|_cudnn\d+_\d+$|^py3\.\d+_\d+$")


def _portable(kind: str, text: str, place: str, platform: str, foreign: str) -> Iterator[Statement]:
    """Yield a match spec; of one that was exported on a `foreign` system, the build is left out, which Linux lacks."""
    exact = re.fullmatch(r"([\w.-]+)=([^=\s]+)=([^=\s]+)", text.strip()) if foreign else None
    if foreign and _FOREIGN.fullmatch(re.split(r"[=\s<>]", text.strip())[0]):
        yield lost(text, place, OTHER_SYSTEM)
    elif not exact or not _PLATFORM_BUILD.search(exact[3]) or exact[3].startswith("pyh"):
        yield conda_spec(kind, text, place, platform=platform)  # a build of all systems, or of each: py_0, mkl
    else:
        cuda = re.search(r"cuda_?\d[\d.]*|cu\d{3}", exact[3])
        spec = f"{exact[1]}={exact[2]}" + (f"=*{cuda[0]}*" if cuda else "")
        yield conda_spec(kind, spec, place, platform=platform)
        known = "" if exact[1] == "python" else f", it is carried as {spec}"  # the recipe has a Python of its own
        yield lost(text, place, f"exported on {foreign}: without the build, which Linux lacks{known}")


def conda_spec(kind: str, text: str, place: str, group: str = "", platform: str = "") -> Statement:
    """Return the statement of a conda match spec; `python` without a build string constrains the recipe's Python."""
    plain = re.sub(r"\s*([<>=!~,|])\s*", r"\1", text.strip())
    if built := re.fullmatch(r"python={1,2}([\d.]+)=([^=\s]+)", plain):  # of `conda env export`
        return Statement(kind, f"python {built[1]} {built[2]}", place, group, platform)
    match = re.fullmatch(r"python(?:\s+|(?=[<>=!~])|$)([^\s\[|]*)", plain)
    if kind != "conda" or not match:
        return Statement(kind, text, place, group, platform)
    return Statement("python", ",".join(map(_python_clause, match[1].split(","))) or ">=3", place, group, platform)


def conda_problem(text: str) -> str | None:
    """Return why `text` is not a match spec that a recipe can hold and lock can read, or None."""
    from rattler import MatchSpec
    from rattler.exceptions import InvalidMatchSpecError

    if problem := checks.spec_problem(text):
        return problem
    try:
        MatchSpec(text)
    except InvalidMatchSpecError as error:
        return f"{text!r} is not a match spec: {error}"
    return None


def _python_clause(text: str) -> str:
    """Return one clause of a conda version of python as a PEP 440 specifier."""
    exact = re.fullmatch(r"={0,2}(\d+(?:\.\d+){0,2})(?:[.*][.*\d]*)?", text)
    return f"=={exact[1]}.*" if exact else re.sub(r"^=([<>])", r"\1=", text)  # =>3.9, as some write


def conda_entries(
    document: Document, keys: tuple[str, ...], group: str = "", platform: str = ""
) -> Iterator[Statement]:
    """Yield the statements of a `name = spec` table of pixi or conda-lock, without `pypi-dependencies`."""
    for name, spec in table_at(document.data, *keys).items():
        place, about = document.where(*keys, name), spec if isinstance(spec, dict) else {"version": spec}
        if platform not in _LINUX:
            yield lost(f"{name} {spec}", place, OTHER_SYSTEM, group)
        elif about.get("source") == "pypi" or keys[-1] == "pypi-dependencies":
            for statement in poetry_requirement(name, about, place, group):
                yield replace(statement, platform=platform)
        elif about.keys() - {"version", "build", "channel"}:
            yield lost(f"{name} = {spec}", place, SOURCE, group)
        else:
            if "channel" in about:
                yield Statement("channel", str(about["channel"]), place, group)
                yield lost(f"{name} = {spec}", place, CHANNEL, group)
            version, build = about.get("version") or "*", about.get("build", "")
            text = name if version == "*" and not build else f"{name} {version} {build}".strip()
            yield conda_spec("conda", text, place, group, platform)


def read_pixi(path: Path) -> Iterator[Statement]:
    """Yield the statements of a pixi.toml. Raises UsageError."""
    yield from pixi_entries(read(path, UsageError), ())


def pixi_default(document: Document, root: tuple[str, ...]) -> list[Any]:
    """Return the features of the environment `default` of pixi's tables below `root`."""
    default = value_at(document.data, *root, "environments", "default")
    return list_at(default if isinstance(default, list) else value_at(default, "features"))


def pixi_entries(document: Document, root: tuple[str, ...]) -> Iterator[Statement]:
    """Yield the statements of pixi's tables below `root`.

    The group of a feature's statements is its name, or "" if the environment `default` includes the feature.
    """
    data, in_default = table_at(document.data, *root), pixi_default(document, root)
    features = {(*root, "feature", name): "" if name in in_default else name for name in table_at(data, "feature")}
    places = {root: "", **features}
    for place, group in places.items():
        own = table_at(document.data, *place)
        for name, value in own.items():
            for target, inner in table_at(value).items() if name == "target" else ():
                platform = {"linux": "", "unix": ""}.get(target, target)
                for kind in table_at(inner):
                    yield from conda_entries(document, (*place, name, target, kind), group, platform)
            if name in ("dependencies", "pypi-dependencies"):
                yield from conda_entries(document, (*place, name), group)
            elif name in ("workspace", "project"):
                for key, text in table_at(value).items():
                    keys = (*place, name, key)
                    if key in ("channels", "platforms"):
                        yield from _pixi_list(document, keys)
                    else:
                        known = Statement("name", str(text), document.where(*keys))
                        yield known if key == "name" else lost(f"{key} = {text}", known.place, TOOL)
            elif name == "pypi-options":
                for key, given in table_at(value).items():
                    at = document.where(*place, name, key)
                    if key in ("index-url", "extra-index-urls"):
                        for url in given if isinstance(given, list) else [given]:
                            yield Statement("index", str(url), at, group)
                    else:
                        yield lost(f"{key} = {given}", at, TOOL, group)
            elif name == "environments":
                for key, about in table_at(value).items():
                    # Its features are names that --extra may have.
                    names = " ".join(map(str, in_default)) if key == "default" else ""
                    yield lost(f"{key} = {about}", document.where(*place, name, key), ENVIRONMENTS, names)
            elif name == "channels" and place != root:
                yield from _pixi_list(document, (*place, name), group)
            elif name not in ("target", "feature"):
                yield lost(f"{name} = {value}", document.where(*place, name), TOOL, group)


def _pixi_list(document: Document, keys: tuple[str, ...], group: str = "") -> Iterator[Statement]:
    """Yield the channels or platforms of pixi in an array; some are tables: {channel = "nvidia", priority = 1}.

    What a platform needs of the system (cuda, glibc) is listed as [system-requirements] is, which is its older form.
    """
    kind, key = KINDS[keys[-1]], keys[-1].removesuffix("s")
    for statement, item in zip(
        texts(document, keys, kind, group), [*list_at(document.data, *keys), None], strict=False
    ):
        if not (name := value_at(item, key)):
            yield statement
            continue
        yield Statement(kind, str(name), statement.place, group)
        needs = {other: value for other, value in item.items() if other not in (key, "name", "priority")}
        if needs:
            yield lost(f"system-requirements of {name} = {needs}", statement.place, TOOL, group)


def read_conda_lock(path: Path) -> Iterator[Statement]:
    """Yield the pins of a conda-lock.yml, version 1. Raises UsageError."""
    data, _ = _yaml(path)
    check_version(path, "conda-lock.yml", data.get("version"), "1")
    for item, _, place in _placed(path, value_at(data, "metadata", "channels")):
        yield Statement("channel", str(value_at(item, "url")), place)
    for item, _, place in _placed(path, data.get("package")):
        row = table_at(item)
        group = str(row.get("category", "main")).replace("main", "")
        yield _pin(row.get("manager") == "pip", str(row.get("url")), row, place, group, str(row.get("platform")))
    yield lost("url, hash", str(path), _LOCKED)


def read_pixi_lock(path: Path) -> Iterator[Statement]:
    """Yield the pins of a pixi.lock, versions 5 to 7; pins of environments other than `default` have a group.

    Source: the model of the lock in rattler_lock; version 7 names platforms, version 5 has `kind` and `url`.
    """
    data, _ = _yaml(path)
    check_version(path, "pixi.lock", data.get("version"), "[5-7]")
    subdirs = {str(value_at(row, "name")): str(value_at(row, "subdir")) for row in list_at(data, "platforms")}
    subdirs = {name: subdir for name, subdir in subdirs.items() if subdir != "None"}
    groups: dict[str, dict[str, list[str]]] = {}  # by URL and platform
    for name, environment in table_at(data, "environments").items():
        for item, _, place in _placed(path, value_at(environment, "channels")):
            yield Statement("channel", str(value_at(item, "url")).rstrip("/").removeprefix(f"{CHANNEL_ALIAS}/"), place)
        for item, _, place in _placed(path, value_at(environment, "indexes")):
            yield lost(item, place, INDEX)
        for platform, listed in table_at(environment, "packages").items():
            for item in map(table_at, list_at(listed)):
                platforms = groups.setdefault(str(item.get("conda") or item.get("pypi")), {})
                platforms.setdefault(subdirs.get(str(platform), str(platform)), []).append(str(name))
    for item, _, place in _placed(path, data.get("packages")):
        row = table_at(item)
        url = str(row.get("conda") or row.get("pypi") or row.get("url"))
        is_pip = "pypi" in row or row.get("kind") == "pypi"
        for platform, names in groups.get(url, {}).items():
            yield _pin(is_pip, url, row, place, "" if "default" in names else " ".join(names), platform)
    yield lost("url, hash", str(path), _LOCKED)


def is_conda_list(text: str) -> bool:
    """Return whether a text file is the output of `conda list`, also with --explicit or --export, or has its specs.

    Users shorten an exported file: its header or the one = of conda's versions still tell.
    """
    if _TABLE.search(text) or _CREATED.search(text):
        return True
    lines = [line.strip() for line in text.split("\n")]
    specs = [line for line in lines if line and not line.startswith("#")]
    is_specs = all(re.fullmatch(r"[\w.-]+(?:=[^=<>~!\s]+)*", line) for line in specs) and "=" in "".join(specs)
    return specs[:1] == ["@EXPLICIT"] or is_specs


def read_conda_list(path: Path) -> Iterator[Statement]:
    """Yield the pins of an output of `conda list`, also with --explicit or --export. Raises UsageError.

    Source: conda's documentation, "Managing environments", "Building identical conda environments".
    """
    platform, channels, content = "", dict[str, str](), text_of(path)
    table = _TABLE.search(content)
    head = content.count("\n", 0, table.end()) + 1 if table else 0
    for number, line in enumerate(content.split("\n"), 1):
        text, place = line.strip(), f"{path}:{number}"
        if number <= head:
            continue
        if table:
            if listed := re.fullmatch(_ROW, text):
                name, version, build, channel = listed.groups()
                is_pip = channel == "pypi" or build.startswith(("pypi_", "<pip>"))
                file = f"x/{name}-{version}-{build}.{'whl' if is_pip else 'conda'}"
                yield _pin(is_pip, file, {"name": name, "version": version}, place, "", "")
                if not is_pip:  # the table names no channel for those of `defaults`
                    channels.setdefault(channel or "defaults", place)
            elif re.search(r"\w", text):
                yield lost(text, place, "no row of `conda list`")
            continue
        if _CREATED.match(text):
            for channel in re.findall(r"\s(?:-c|--channel)[ =](\S+)", text):
                channels.setdefault(channel, place)
        elif named := re.fullmatch(r"# platform: (\S+)", text):
            platform = named[1]
        elif exported := re.fullmatch(_EXPORTED, text):
            row = {"name": exported[1], "version": exported[2]}
            is_pip = exported[3] == "pypi_0"
            file = f"x/{'-'.join(exported.groups())}.{'whl' if is_pip else 'conda'}"
            yield _pin(is_pip, file, row, place, "", platform)
        elif text and "://" not in text and not text.startswith(("#", "@")):
            yield conda_spec(
                "conda", text.partition(" #")[0].strip(), place, platform=platform if platform in _LINUX else ""
            )
        elif text and text != "@EXPLICIT" and not text.startswith("#"):
            url = text.partition("#")[0]
            channel, _, subdir = url.rpartition("/")[0].rpartition("/")
            channels.setdefault(channel.removeprefix(f"{CHANNEL_ALIAS}/"), place)
            yield _pin(False, url, {}, place, "", platform if subdir == "noarch" else subdir)
    for channel, place in channels.items():
        yield Statement("channel", channel, place)
    if platform:
        yield Statement("platform", platform, str(path))


def _pin(pip: bool, url: str, row: dict[str, Any], place: str, group: str, platform: str) -> Statement:
    """Return the pin of a locked package from the name of its file, NAME-VERSION-BUILD.EXTENSION."""
    text = f"{row.get('name')}=={row.get('version')}"
    if not pip:
        file = re.fullmatch(r".*/([^/]+)-([^/-]+)-([^/-]+?)(?:\.conda|\.tar\.bz2)", unquote(url))
        text = " ".join(file.groups()) if file else ""
    elif "git+" in url or not re.fullmatch(r"\S+\.(whl|tar\.gz|zip|tar\.bz2)([#?]\S*)?", url):
        text = ""
    if text and platform in _LINUX:
        return Statement("pin" if pip else "conda-pin", text, place, group, platform)
    return lost(f"{text or url} ({platform})", place, SOURCE if platform in _LINUX else OTHER_SYSTEM, group)


_UNKNOWN = "an option that envbuild does not know: the next word may be its value or a package"


def conda_words(words: list[str], place: str, find: Find, *, is_env: bool) -> Iterator[Statement]:
    """Yield the statements of the words after `conda install`; `is_env` is whether it is a command of `conda env`.

    An unknown option is listed together with the next word.
    """
    left, has_file = iter(words), False
    for word in left:
        name, equals, value = word.partition("=")
        if not word.startswith("-"):
            if re.fullmatch(r"[^-=<>]\S*\.ya?ml", word):
                yield from _conda_file(word, place, find)
                has_file = True
                continue
            channel, marks, spec = word.partition("::")
            if marks:
                yield Statement("channel", channel, place)
            yield conda_spec("conda", spec if marks else word, place)
            continue
        if re.fullmatch(r"-[a-zA-Z][^-=].*", word) and (option_of(word[:2], "conda") or ("", False))[1]:
            name, equals, value = word[:2], "=", word[2:]  # -cconda-forge
        long, is_valued = option_of(name, "conda") or ("", False)
        if is_valued and not equals:
            value = next(left, "")
        if long == "--channel":
            yield Statement("channel", value, place)
        elif long == "--file":
            yield from _conda_file(value, place, find)
            has_file = True
        elif is_valued:
            yield lost(f"{name} {value}", place, _OPTION)
        elif long not in ("--yes", "--quiet", ""):
            yield lost(word, place, _OPTION)
        elif not long and not re.fullmatch("-[a-zA-Z]+", word):
            yield lost(word if equals else f"{word} {next(left, '')}", place, _UNKNOWN)
        elif not long and not set(word[1:]) <= set("yq"):  # several short options
            yield lost(word, place, _OPTION)
    if is_env and not has_file:
        yield from _conda_file("environment.yml", place, find)


def _conda_file(name: str, place: str, find: Find) -> Iterator[Statement]:
    """Yield the statements of a file for `conda install --file` or `conda env create --file`.

    The environment's name is left out, because it does not name the recipe.
    """
    try:
        path = find(name)
        if not isinstance(path, Path):
            yield lost(f"--file {name}", place, NO_FILE)
        elif re.search(r"conda-lock\.ya?ml$", path.name):
            yield from read_conda_lock(path)
        elif path.name.endswith((".yml", ".yaml")):
            yield from (statement for statement in read_environment(path) if statement.kind != "name")
        elif is_conda_list(text := text_of(path)):
            yield from read_conda_list(path)
        else:
            for number, line in enumerate(text.split("\n"), 1):
                if spec := line.partition("#")[0].strip():
                    yield conda_spec("conda", spec, f"{path}:{number}")
    except UsageError as error:
        yield lost(f"--file {name}", place, error.message)


def default_channels(specs: Iterable[str]) -> list[str]:
    """Return the channels for specs whose sources name none: builds such as py3.8_cuda11.3_cudnn8 are PyTorch's own."""
    is_of_pytorch = any(re.search(r"py3\.\d+_(?:cuda[\d.]+_cudnn|cpu_)", spec) for spec in specs)
    return ["pytorch", "conda-forge"] if is_of_pytorch else ["conda-forge"]


# Channels that add packages to others, and have no Python.
_ADDITIONAL = re.compile(
    r"(?:https://conda\.anaconda\.org/)?(?:pytorch(?:-\w+|3d)?|nvidia(?:/label/\S+)?|rapidsai(?:-nightly)?|bioconda|pyg"
    r"|dglteam(?:/\S+)?|fastai|huggingface|xformers|simpleitk|fvcore|iopath)/?"
)


def with_python(channels: Sequence[Statement]) -> Iterator[Statement]:
    """Yield conda-forge if none of `channels` has a Python; conda adds its default channels to those of a file."""
    if channels and all(_ADDITIONAL.fullmatch(channel.text) for channel in channels):
        reason = "added: the named channels have no Python, and conda would add its default channels"
        yield Statement("channel", "conda-forge", channels[-1].place, reason=reason)


def torch_of_images(kept: Iterable[Statement], given: Iterable[Statement]) -> list[Statement]:
    """Return the requirements of torch that come from a FROM of `given`, if `kept` has conda's pytorch, too."""
    kept, images = list(kept), {statement.place for statement in given if statement.text.startswith("FROM ")}
    if not any(re.match(r"(?:\S+::)?pytorch(?![\w.-])", line.text) for line in kept if line.kind == "conda"):
        return []
    return [line for line in kept if line.kind == "requirement" and line.place in images]
