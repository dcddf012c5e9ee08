"""Opening of artifacts by a user's spelling: a path, FORM:PLACE, or the name of an image.

A new form is one module with a function that takes a `Request`, and one line in `_FORMS`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from envbuild.artifacts.conda_survey import is_conda
from envbuild.base.errors import EnvbuildError, HostError, UsageError
from envbuild.base.files import MISSING
from envbuild.image.layer import kind_of as compressed_kind
from envbuild.image.reference import parse_reference
from envbuild.image.sif import is_sif
from envbuild.image.squashfs.read import is_squashfs
from envbuild.inspect.facts import ArtifactReader, ReadAccess, Request
from envbuild.inspect.folder_reader import is_venv, open_conda, open_venv
from envbuild.inspect.image_sources import open_archive, open_daemon, open_layout, open_registry_image
from envbuild.inspect.squashfs_reader import open_sif, open_sqsh
from envbuild.recipe.targets import Target

HELP = (
    "a path, conda:DIR, venv:DIR, oci:DIR[:TAG], docker-archive:FILE, sqsh:FILE, sif:FILE, "
    "docker-daemon:NAME or docker://NAME"
)
# A file's kind is visible in its first bytes; a tar's magic number ends at 262.
_HEAD = 512


def _begins(path: Path, is_one: Callable[[bytes], bool]) -> bool:
    try:
        if not path.is_file():  # a FIFO would block
            return False
        with path.open("rb") as stream:
            return is_one(stream.read(_HEAD))
    except (*MISSING, PermissionError):
        return False


def _is_archive(head: bytes) -> bool:
    return head[257:262] == b"ustar" or compressed_kind(head) != "none"


# Form → the function that opens it, and the one that says whether a path has this form. Paths are tried in this order.
_FORMS: dict[str, tuple[Callable[[Request], ArtifactReader], Callable[[Path], bool]]] = {
    "conda": (open_conda, is_conda),
    "venv": (open_venv, is_venv),
    "oci": (open_layout, lambda path: (path / "oci-layout").is_file()),
    "sqsh": (open_sqsh, lambda path: _begins(path, is_squashfs)),
    "sif": (open_sif, lambda path: _begins(path, is_sif)),
    "docker-archive": (open_archive, lambda path: _begins(path, _is_archive)),
    "docker-daemon": (open_daemon, lambda _: False),
    "docker": (open_registry_image, lambda _: False),
}


@contextmanager
def open_artifacts(texts: Sequence[str], access: ReadAccess, target: str | None) -> Iterator[list[ArtifactReader]]:
    """Open the artifacts that `texts` name.

    `target` selects a platform of an image, None the only one or this host's. Raises UsageError when there is no such
    artifact or it is for another target, BuildError when it is damaged, HostError when no docker daemon answers.
    """
    wanted = Target.parse(target) if target else None
    places = [split(text) for text in texts]
    names = [text for text, (form, _) in zip(texts, places, strict=True) if form is None]
    with ExitStack() as stack:
        found = []
        for text, (form, rest) in zip(texts, places, strict=True):
            request = Request(text, rest, wanted.arch if wanted else None, access, stack)
            try:
                opened = _FORMS[form or "docker-daemon"][0](request)
            except HostError as error:
                raise _neither_path_nor_image(names, error) if form is None else error from None
            if wanted and opened.about.target not in ("", wanted.name):
                raise UsageError(f"{text} is for {opened.about.target}, not for {wanted.name}")
            found.append(opened)
        yield found


@contextmanager
def open_artifact(text: str, access: ReadAccess, target: str | None) -> Iterator[ArtifactReader]:
    """Open one artifact, see `open_artifacts`."""
    with open_artifacts([text], access, target) as (opened,):
        yield opened


def split(text: str) -> tuple[str | None, str]:
    """Return (form, place) of an artifact's spelling; the form is None for the name of an image.

    An existing path counts as a path, whatever it looks like. Raises UsageError for any other text.
    """
    path = Path(text)
    if text and os.path.lexists(path):
        for form, (_, holds) in _FORMS.items():
            if holds(path):
                return form, text
        raise _no_artifact(path)
    form, colon, rest = text.partition(":")
    if colon and form in _FORMS:
        # docker:26 is an image called docker; docker://docker:26 is the same image in a registry.
        if form != "docker":
            if not rest:
                raise UsageError(f"{text!r}: nothing follows {form}:", f"give {HELP}")
            return form, rest
        if rest.startswith("//"):
            return form, rest[2:]
    try:
        parse_reference(text)
    except UsageError as error:
        if text.startswith(("/", ".", "~")) or "://" in text or not text:
            said = f"{text or repr(text)} does not exist"
        else:
            said = f"{text}: no such file or folder, and no name of an image: {error.message}"
        raise UsageError(said, f"give {HELP}") from None
    return None, text


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
