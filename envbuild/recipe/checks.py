"""Checks of single recipe values, each of which returns a description of the mistake or None; requirements' parts."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

from envbuild.base.errors import UsageError
from envbuild.base.text import normalise
from envbuild.base.toml import form

if TYPE_CHECKING:
    from packaging.requirements import Requirement

DIRECT = re.compile(r"\s*+[A-Za-z0-9][A-Za-z0-9._-]*+\s*+(?:\[[^]]*\]\s*+)?@\s*+\S")
_SDISTS = (".tar.gz", ".zip")
_REF = re.compile(r"[A-Za-z0-9._][A-Za-z0-9._/+-]*")
_GIT = ("git+https", "git+ssh", "git+file")
# The environment of markers (PEP 508) on Linux, without architecture and Python.
LINUX = {
    "sys_platform": "linux",
    "platform_system": "Linux",
    "os_name": "posix",
    "extra": "",
    "implementation_name": "cpython",
    "platform_python_implementation": "CPython",
}
# An index whose files have no limit of age.
AGE_OFF = "off"


@dataclass(frozen=True, slots=True)
class DirectReference:
    """Source of a requirement that comes from git, a URL or a file and not from an index.

    `kind` is "git" (the repository at `url`, at `ref` or at HEAD, with the project in `subdirectory`), "url" (the
    file at `url` with `sha256`) or "path" (a file; `url` is its path relative to the recipe's folder).
    """

    name: str
    kind: Literal["git", "url", "path"]
    url: str
    ref: str = ""
    subdirectory: str = ""
    sha256: str = ""

    @property
    def file_name(self) -> str:
        """Name of the file that a URL or path refers to."""
        return unquote(urlsplit(self.url).path).rpartition("/")[2]

    @property
    def is_wheel(self) -> bool:
        """Whether it refers to a wheel, which needs no build."""
        return self.kind != "git" and self.file_name.endswith(".whl")

    def source(self, folder: Path, commit: str = "") -> str:
        """Return its address for uv and store/archives.py: at a git `commit` or ref, or below the recipe's `folder`."""
        if self.kind == "git":
            fragment = f"#subdirectory={self.subdirectory}" if self.subdirectory else ""
            return f"git+{self.url}" + (f"@{commit}" if commit else "") + fragment
        return self.url if self.kind == "url" else (folder / self.url).absolute().as_uri()


def reference_of(text: str) -> DirectReference | None:
    """Return the direct reference of the requirement `text`, None if an index provides it.

    Raises ValueError for an unsupported reference. The message omits the address, which may contain a password.
    """
    if DIRECT.match(text) is None:
        return None
    from packaging.requirements import Requirement

    try:
        parsed = Requirement(text)
    except ValueError:
        raise ValueError("not a direct reference: write `NAME @ ADDRESS`, with ` ; MARKER` after it") from None
    address, name = parsed.url or "", normalise(parsed.name)
    if not text.isprintable() or text != text.strip():
        raise ValueError("has blanks at its ends or unprintable characters")
    if address.startswith((".", "/")):
        return _path(name, address)
    try:
        parts = urlsplit(address)
    except ValueError:
        raise ValueError("its address is not a URL") from None
    user, _, password = parts.netloc.rpartition("@")[0].partition(":")
    if password or (user and parts.scheme != "git+ssh"):
        raise ValueError("holds a user name or password; a recipe is shared: credentials belong to git, or to netrc")
    if parts.scheme in _GIT:
        return _git(name, parts)
    if parts.scheme not in ("https", "http", "file") or not (parts.netloc or parts.scheme == "file"):
        known = ", ".join(f"{scheme}://" for scheme in (*_GIT, "https", "http", "file"))
        raise ValueError(f"its address is none of {known} and ./PATH")
    return _url(name, parts)


def references(requirements: Iterable[str]) -> dict[str, DirectReference]:
    """Return the direct references among valid `requirements`, by name."""
    return {reference.name: reference for reference in map(reference_of, requirements) if reference}


def _git(name: str, parts: SplitResult) -> DirectReference:
    path, at, ref = parts.path.rpartition("@") if "@" in parts.path else (parts.path, "", "")
    if (at and not _REF.fullmatch(ref)) or parts.query or not path.strip("/"):
        raise ValueError("its git reference is not a branch, tag or commit: write git+URL@REF")
    if bool(parts.netloc) == (parts.scheme == "git+file"):
        raise ValueError("its repository is not a URL: write git+https://HOST/PATH or git+file:///PATH")
    fragment = _fragment(parts.fragment, "subdirectory")
    folder = fragment.get("subdirectory", "")
    if folder.startswith("/") or ".." in folder.split("/"):
        raise ValueError("its subdirectory is not a folder of the repository")
    url = urlunsplit((parts.scheme.removeprefix("git+"), parts.netloc, path, "", ""))
    return DirectReference(name, "git", url, ref, folder.strip("/"))


def _url(name: str, parts: SplitResult) -> DirectReference:
    sha256 = _fragment(parts.fragment, "sha256").get("sha256", "").lower()
    reference = DirectReference(name, "url", urlunsplit(parts._replace(fragment="")), sha256=sha256)
    _check_file(reference)
    if not re.fullmatch("[0-9a-f]{64}", sha256):
        raise ValueError("its URL has no sha256, so its content is not pinned: append #sha256=HEX")
    return reference


def _path(name: str, address: str) -> DirectReference:
    path = address.removeprefix("./")
    if path.startswith("/") or ".." in path.split("/"):
        raise ValueError("its path is not below the recipe's folder: write ./PATH")
    reference = DirectReference(name, "path", path)
    _check_file(reference)
    return reference


def _check_file(reference: DirectReference) -> None:
    if reference.is_wheel:
        from packaging.utils import parse_wheel_filename

        try:
            project = parse_wheel_filename(reference.file_name)[0]
        except ValueError:
            raise ValueError("its file has not the name of a wheel, NAME-VERSION-TAGS.whl") from None
        if project != reference.name:
            raise ValueError(f"its wheel is one of {project}")
    elif not reference.file_name.endswith(_SDISTS):
        raise ValueError("its file is neither a wheel (.whl) nor a source archive (.tar.gz or .zip)")


def _fragment(text: str, accepted: str) -> dict[str, str]:
    """Return KEY=VALUE pairs of a URL's fragment. Raises ValueError for keys but `accepted` and pip's old `egg`."""
    pairs = {key: unquote(value) for key, _, value in (field.partition("=") for field in text.split("&") if field)}
    if pairs.keys() - {accepted, "egg"}:
        raise ValueError(f"after # only {accepted}= is accepted")
    return pairs


# Matches the common `name` or `name[extra]==1.2.3+local` without an import of packaging.
_ORDINARY = re.compile(
    r"[A-Za-z0-9]+(?:[._-]+[A-Za-z0-9]+)*(?:\[[A-Za-z0-9]+\])?"
    r"(?:==[0-9]+(?:\.[0-9]+)*(?:(?:a|b|rc)[0-9]+)?(?:\.post[0-9]+)?(?:\.dev[0-9]+)?"
    r"(?:\+[a-z0-9]+(?:[._-][a-z0-9]+)*)?)?"
)
_START = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[[^]]*\])?\s*(.*)", re.S)
_NAMED_CHANNEL = r"[a-z0-9][a-z0-9_.-]*(/[a-z0-9][a-z0-9_.-]*)*(/label/[A-Za-z0-9_.-]+)?"
_SPEC = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(?P<rest>.*)", re.S)
_SITE = "which index or mirror serves a file is the site's affair; write name==version"


def requirement_problem(text: str) -> str | None:
    """Return why `text` is not a requirement of a recipe: a name with specifiers or an address, extras, markers."""
    if DIRECT.match(text) is None:
        return constraint_problem(text)
    try:
        reference_of(text)
    except ValueError as problem:
        return str(problem)
    return None


def constraint_problem(text: str) -> str | None:
    """Return why `text` is not a name with specifiers, extras and markers, or None."""
    file = text.endswith((".whl", ".zip", ".tar.gz"))  # valid as a name, but a file to pip
    if _ORDINARY.fullmatch(text) and not file:
        return None
    # The messages leave out an option's value and a URL: they may hold a password.
    option = re.match(r"\s*(--?[a-z-]*)", text)
    if option:
        return f"an option of pip ({option[1]}), not a requirement: {_SITE}"
    before_marker = text.partition(";")[0]
    if "@" in before_marker or "://" in before_marker:
        return "an address without a name: write `NAME @ ADDRESS`, in `requirements`"
    if not text.isprintable() or text != text.strip() or not text:
        return f"{text!r} is empty, or has blanks at its ends or unprintable characters"
    if file or re.search(r"[/\\]|^\.", before_marker):
        return f"{text!r} is a path, not a requirement: {_SITE}"
    problem = _parse_problem(text)
    if problem is None:
        return None
    meant = _corrected(text)
    return f"{text!r} is not a requirement: " + (f"write {meant!r}" if meant else problem)


def override_problem(text: str) -> str | None:
    """Return why `text` is not an override (a name with the versions that replace other requirements), or None."""
    if (problem := constraint_problem(text)) is not None:
        return problem
    if re.match(r"[=<>!~]", requirement_parts(text)[1]):
        return None
    return f"{text!r} names no version: an override replaces the versions that packages ask for"


def parse_age(text: str) -> timedelta | datetime:
    """Return a span such as "7 days", or the end of a date or an RFC 3339 time. Raises ValueError for other texts."""
    if span := re.fullmatch(r"([1-9]\d{0,3}) (hour|day|week)s?", text):
        return timedelta(**{f"{span[2]}s": int(span[1])})
    if re.fullmatch(r"\d{4}-\d\d-\d\d", text):
        return datetime.fromisoformat(f"{text}T00:00:00+00:00") + timedelta(days=1)
    if (time := datetime.fromisoformat(text)).tzinfo is None:
        raise ValueError(f"{text!r} has no time zone")
    return time.astimezone(UTC)


def age_problem(text: str) -> str | None:
    """Return why `text` is not a release age as `parse_age` reads it, or None."""
    try:
        parse_age(text)
    except (ValueError, OverflowError):
        forms = "'7 days' (hours, days or weeks), a date such as '2026-11-01' or a time such as '2026-11-01T12:00:00Z'"
        return f"{text!r} is neither a span nor a date: write {forms}"
    return None


def index_age_problem(text: str) -> str | None:
    """Return why `text` is neither a release age nor `off`, or None."""
    problem = age_problem(text) if text != AGE_OFF else None
    return problem and f"{problem}, or {AGE_OFF!r}"


def _parse_problem(text: str) -> str | None:
    from packaging.requirements import Requirement

    if re.search(r"\d{1000}", text):  # int() refuses some thousand, when a version is compared
        return "a number in it has 1000 digits or more"
    try:
        Requirement(text)
    except ValueError as problem:
        return str(problem).splitlines()[0]
    return None


def _corrected(text: str) -> str | None:
    """Return `text`, in conda's syntax or with a common typing mistake, as a valid requirement; None if impossible."""
    parts = re.fullmatch(r"(\w[\w.-]*?(?:\s*\[[^]]*\])?)\s*([=<>!~\s].*)", text, re.S)
    if parts is None:
        return None
    name, version = parts[1], parts[2].strip()
    version = version.replace("=>", ">=").replace("=<", "<=")
    version = re.sub(r"(?<![=<>!~])=(?!=)\s*([\w.]+\*?)(=[\w*]+)?", r"==\1", version)
    version = re.sub(r"(?<=[\w*])\s*(?=[<>!~])", ",", version)
    corrected = f"{name}=={version}" if version[:1].isdigit() else f"{name}{version}"
    return corrected if corrected != text and _parse_problem(corrected) is None else None


def requirement_parts(text: str) -> tuple[str, str]:
    """Return the normalised project name of a requirement, and its specifiers and marker without spaces."""
    match = _START.fullmatch(text.strip())
    if match is None:
        return text, ""
    return normalise(match[1]).strip("-"), re.sub(r"\s+", "", match[2])


project_problem = form(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", "is not the name of a package")


def index_problem(url: str) -> str | None:
    """Return why `url` is not the URL of an index, or None. The message omits the URL, which may contain a password."""
    # This check comes first: a password is a worse mistake than a missing or wrong scheme.
    if "@" in re.split(r"[/?#]", url.partition("://")[2] or url, maxsplit=1)[0]:
        return "holds a user name or password; a recipe is shared: credentials belong to the site"
    try:
        parts = urlsplit(url)
        port_is_good = parts.port is None or parts.port > 0
    except ValueError:  # the text of the error holds a part of the URL
        return "not a URL"
    if not url.isprintable() or " " in url:
        return "not a URL: holds blanks or unprintable characters"
    if variable := re.search(r"\$\w+|\$?\{[^}]*\}?", url):
        return f"holds the variable {variable[0]}, which has no value here: write its value"
    if parts.scheme == "file":
        good = parts.netloc in ("", "localhost") and parts.path.startswith("/")
        return None if good else "a file URL has an absolute path: file:///PATH"
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_is_good:
        return "not the URL of a package index: expected https://, http:// or file://"
    return None


def base_problem(text: str) -> str | None:
    """Return why `text` is neither `debian` nor an image in a registry, daemon, archive or layout, or None."""
    if text == "debian":
        return None
    kind, _, rest = text.partition(":")
    if kind in ("oci", "docker-archive", "docker-daemon"):
        return None if rest else f"{text!r} names no image: write {kind}:NAME"
    if "://" in text:
        return f"{text!r} is a URL; write the reference alone, as in docker.io/pytorch/pytorch:TAG"
    from envbuild.image.reference import parse_reference

    try:
        parse_reference(text)
    except UsageError as error:
        return error.message
    return None


variable_problem = form(r"[A-Za-z_][A-Za-z0-9_]*", "is not the name of an environment variable")


def channel_problem(text: str) -> str | None:
    """Return why `text` is not a channel (a name on conda's own server, or a URL), or None. The message omits URLs."""
    if "://" in text or "@" in text:
        if re.search(r"/t/[^/]+/", text):
            return "holds a token; a recipe is shared: credentials belong to the site"
        return index_problem(text)
    return form(_NAMED_CHANNEL, "is not a channel: a name such as conda-forge, or a URL")(text)


def spec_problem(text: str) -> str | None:
    """Return why `text` does not have the form of a conda match spec, or None; the solver's parser checks the rest."""
    if "://" in text or "::" in text or "@" in text:
        return "names a channel or an address: channels stand in `channels`, in their order"
    match = _SPEC.fullmatch(text)
    if match is None or not text.isprintable() or text != text.strip():
        return f"{text!r} is not a match spec, such as 'numpy 2.2.*' or 'pytorch >=2.7 cpu*'"
    if re.search(r"[{}]|\$[\w(]", match["rest"]):
        return f"{text!r} holds a variable: write its value"
    if re.match(r"\s*[;#]", match["rest"]):
        return f"{text!r}: match specs have no markers or comments; use [targets.NAME] conda = [...]"
    return None


def applicable(lines: Iterable[str], python: str, platform: str, extra: str = "") -> dict[str, list[Requirement]]:
    """Return the requirements whose markers hold on the target with this `extra`, by normalised name."""
    from packaging.requirements import Requirement

    variables = LINUX | {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "platform_machine": platform.partition("-")[0],
        "extra": extra,
    }
    lines_of: dict[str, list[Requirement]] = {}
    for text in lines:
        line = Requirement(text)
        if line.marker is None or line.marker.evaluate(variables):
            lines_of.setdefault(normalise(line.name), []).append(line)
    return lines_of
