"""Virtual environments."""

from envbuild.kinds.base import FolderArtifact

VENV = FolderArtifact(
    name="venv",
    help="Build a verified virtual environment.",
    place="venv",
    sources=("package index",),
    imports=("requests",),
    states=("image",),  # the state of an image, seen from inside it
)
