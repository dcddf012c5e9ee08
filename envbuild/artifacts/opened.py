"""Artifacts by what a user calls them: a path, FORM:PLACE, or the name of an image.

A new kind of artifact is one module with a function that takes a `Request`, and one line in `_KINDS`.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from envbuild.artifacts.conda_survey import is_conda
from envbuild.artifacts.facts import Opened
from envbuild.artifacts.opened_venv import is_venv
from envbuild.environment import Environment
from envbuild.errors import EnvbuildError, HostError, UsageError
from envbuild.image.sif import is_sif
from envbuild.image.squashfs.read import is_squashfs
from envbuild.recipe.targets import Target

HELP = (
    "a path, conda:DIR, venv:DIR, oci:DIR[:TAG], docker-archive:FILE, sqsh:FILE, sif:FILE, "
    "docker-daemon:NAME or docker://NAME"
)
# What tells of a file's kind lies in its first bytes.
_HEAD = 64


@dataclass(frozen=True, slots=True)
class Request:
    """What to open: `rest` follows the form's name, `arch` (x86_64, aarch64) is None for whatever there is.

    What must be closed or removed when the artifact is done with goes onto `stack`.
    """

    spelling: str
    rest: str
    arch: str | None
    environment: Environment
    stack: ExitStack


@dataclass(frozen=True, slots=True)
class _Kind:
    """`opens` is MODULE:FUNCTION, imported when used; `holds` tells whether a path is of this kind."""

    opens: str
    holds: Callable[[Path], bool] = lambda _: False


def _begins(is_one: Callable[[bytes], bool]) -> Callable[[Path], bool]:
    def holds(path: Path) -> bool:
        try:
            with path.open("rb") as stream:
                return path.is_file() and is_one(stream.read(_HEAD))
        except OSError:
            return False

    return holds


# Form → kind. Paths are tried in this order.
_KINDS = {
    "conda": _Kind("opened_venv:open_conda", is_conda),
    "venv": _Kind("opened_venv:open_venv", is_venv),
    "oci": _Kind("opened_forms:open_layout", lambda path: (path / "oci-layout").is_file()),
    "sqsh": _Kind("opened_squashfs:open_sqsh", _begins(is_squashfs)),
    "sif": _Kind("opened_squashfs:open_sif", _begins(is_sif)),
    "docker-archive": _Kind("opened_forms:open_archive", lambda path: path.is_file()),
    "docker-daemon": _Kind("opened_forms:open_daemon"),
    "docker": _Kind("opened_forms:open_registry_image"),
}


@contextmanager
def open_artifact(text: str, environment: Environment, target: str | None) -> Iterator[Opened]:
    """Open what `text` names; `target` chooses among the platforms of an image (None: this host's, or
    the only one).

    Raises UsageError when there is no such artifact, or it is for another target; BuildError when it is
    damaged; HostError when no docker daemon answers.
    """
    wanted = Target.parse(target) if target else None
    form, rest = split(text)
    with ExitStack() as stack:
        request = Request(text, rest, wanted.arch if wanted else None, environment, stack)
        try:
            opened = _open(form or "docker-daemon", request)
        except HostError as error:
            raise _taken_as_image(error, text) if form is None else error from None
        if wanted and opened.about.target not in ("", wanted.name):
            raise UsageError(f"{text} is for {opened.about.target}, not for {wanted.name}")
        yield opened


def split(text: str) -> tuple[str | None, str]:
    """(form, place) of an artifact's spelling; the form is None for the name of an image.

    Raises UsageError when it is neither. What exists as a path is a path, whatever it looks like.
    """
    path = Path(text)
    if text and os.path.lexists(path):
        for form, kind in _KINDS.items():
            if kind.holds(path):
                return form, text
        raise UsageError(f"{text} is not an artifact", f"give {HELP}")
    form, colon, rest = text.partition(":")
    if colon and form in _KINDS:
        # docker:26 is an image called docker, docker://docker:26 the same in a registry.
        if form != "docker":
            if not rest:
                raise UsageError(f"{text!r}: nothing follows {form}:", f"give {HELP}")
            return form, rest
        if rest.startswith("//"):
            return form, rest[2:]
    return None, _image_name(text)


def _open(form: str, request: Request) -> Opened:
    module, _, function = _KINDS[form].opens.partition(":")
    opens = getattr(importlib.import_module(f"envbuild.artifacts.{module}"), function)
    opened: Opened = opens(request)
    return opened


def _image_name(text: str) -> str:
    from envbuild.image.reference import parse_reference

    try:
        parse_reference(text)
    except UsageError as error:
        if text.startswith(("/", ".", "~")) or "://" in text or not text:
            raise UsageError(f"{text or repr(text)} does not exist", f"give {HELP}") from None
        raise UsageError(
            f"{text}: no such file or folder, and no name of an image: {error.message}",
            f"give {HELP}",
        ) from None
    return text


def _taken_as_image(error: EnvbuildError, text: str) -> EnvbuildError:
    return HostError(
        f"{text}: no such file or folder; as the name of an image: {error.message}", error.hint
    )
