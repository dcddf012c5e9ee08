"""Opening of artifacts by a user's spelling: a path, FORM:PLACE, or the name of an image.

A new form is one module with a function that takes a `Request`, and one line in `_KINDS`.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from envbuild.artifacts.conda_survey import is_conda
from envbuild.environment import Environment
from envbuild.errors import EnvbuildError, HostError, UsageError
from envbuild.image.compression import kind_of as compressed_kind
from envbuild.image.sif import is_sif
from envbuild.image.squashfs.read import is_squashfs
from envbuild.inspect.facts import ArtifactReader, Request
from envbuild.inspect.folder_reader import is_venv
from envbuild.recipe.targets import Target

HELP = (
    "a path, conda:DIR, venv:DIR, oci:DIR[:TAG], docker-archive:FILE, sqsh:FILE, sif:FILE, "
    "docker-daemon:NAME or docker://NAME"
)
# A file's kind is visible in its first bytes; a tar's magic number ends at 262.
_HEAD = 512


@dataclass(frozen=True, slots=True)
class _ReaderKind:
    """A form of artifacts; `opens` is MODULE:FUNCTION, imported on use, `holds` says whether a path has the form."""

    opens: str
    holds: Callable[[Path], bool] = lambda _: False


def _begins(is_one: Callable[[bytes], bool]) -> Callable[[Path], bool]:
    def holds(path: Path) -> bool:
        try:
            if not path.is_file():  # a FIFO would block
                return False
            with path.open("rb") as stream:
                return is_one(stream.read(_HEAD))
        except OSError:
            return False

    return holds


def _is_archive(head: bytes) -> bool:
    return head[257:262] == b"ustar" or compressed_kind(head) != "none"


# Form → kind. Paths are tried in this order.
_KINDS = {
    "conda": _ReaderKind("folder_reader:open_conda", is_conda),
    "venv": _ReaderKind("folder_reader:open_venv", is_venv),
    "oci": _ReaderKind("image_sources:open_layout", lambda path: (path / "oci-layout").is_file()),
    "sqsh": _ReaderKind("squashfs_reader:open_sqsh", _begins(is_squashfs)),
    "sif": _ReaderKind("squashfs_reader:open_sif", _begins(is_sif)),
    "docker-archive": _ReaderKind("image_sources:open_archive", _begins(_is_archive)),
    "docker-daemon": _ReaderKind("image_sources:open_daemon"),
    "docker": _ReaderKind("image_sources:open_registry_image"),
}


@contextmanager
def open_artifacts(
    texts: Sequence[str], environment: Environment, target: str | None
) -> Iterator[list[ArtifactReader]]:
    """Open the artifacts that `texts` name.

    `target` selects a platform of an image, None the only one or this host's. Raises UsageError when there is
    no such artifact or it is for another target, BuildError when it is damaged, HostError when no docker daemon
    answers.
    """
    wanted = Target.parse(target) if target else None
    places = [split(text) for text in texts]
    names = [text for text, (form, _) in zip(texts, places, strict=True) if form is None]
    with ExitStack() as stack:
        found = []
        for text, (form, rest) in zip(texts, places, strict=True):
            request = Request(text, rest, wanted.arch if wanted else None, environment, stack)
            try:
                opened = _open(form or "docker-daemon", request)
            except HostError as error:
                raise _neither_path_nor_image(names, error) if form is None else error from None
            if wanted and opened.about.target not in ("", wanted.name):
                raise UsageError(f"{text} is for {opened.about.target}, not for {wanted.name}")
            found.append(opened)
        yield found


@contextmanager
def open_artifact(text: str, environment: Environment, target: str | None) -> Iterator[ArtifactReader]:
    """Open one artifact, see `open_artifacts`."""
    with open_artifacts([text], environment, target) as (opened,):
        yield opened


def split(text: str) -> tuple[str | None, str]:
    """Return (form, place) of an artifact's spelling; the form is None for the name of an image.

    An existing path counts as a path, whatever it looks like. Raises UsageError for any other text.
    """
    path = Path(text)
    if text and os.path.lexists(path):
        for form, kind in _KINDS.items():
            if kind.holds(path):
                return form, text
        raise _no_artifact(path)
    form, colon, rest = text.partition(":")
    if colon and form in _KINDS:
        # docker:26 is an image called docker; docker://docker:26 is the same image in a registry.
        if form != "docker":
            if not rest:
                raise UsageError(f"{text!r}: nothing follows {form}:", f"give {HELP}")
            return form, rest
        if rest.startswith("//"):
            return form, rest[2:]
    return None, _image_name(text)


def _open(form: str, request: Request) -> ArtifactReader:
    module, _, function = _KINDS[form].opens.partition(":")
    opens = getattr(importlib.import_module(f"envbuild.inspect.{module}"), function)
    opened: ArtifactReader = opens(request)
    return opened


def _image_name(text: str) -> str:
    from envbuild.image.reference import parse_reference

    try:
        parse_reference(text)
    except UsageError as error:
        if text.startswith(("/", ".", "~")) or "://" in text or not text:
            raise UsageError(f"{text or repr(text)} does not exist", f"give {HELP}") from None
        raise UsageError(
            f"{text}: no such file or folder, and no name of an image: {error.message}", f"give {HELP}"
        ) from None
    return text


def _no_artifact(path: Path) -> UsageError:
    if not os.access(path, os.R_OK, effective_ids=True):
        return UsageError(f"cannot read {path}: permission denied", "ask its owner for read permission")
    if path.is_dir():
        kinds = "a venv, a conda environment nor an OCI layout"
    else:
        kinds = "a squashfs, a SIF nor an image archive (a tar, plain or in gzip or zstd)"
    return UsageError(f"{path} is not an artifact: it is neither {kinds}", f"give {HELP}")


def _neither_path_nor_image(names: Sequence[str], error: EnvbuildError) -> HostError:
    """Return the error for names that are not paths, when no daemon answers that could have images of these names."""
    if len(names) == 1:
        none = f"{names[0]} is no file or folder, nor could it be looked for as an image"
    else:
        none = f"neither {' nor '.join(names)} is a file or folder, nor could they be looked for as images"
    return HostError(
        f"{none}: {error.message}",
        f"correct the path; for an image of a registry write docker://{names[0]}, "
        "for one of the docker daemon start dockerd or set DOCKER_HOST",
    )
