"""Squashfs images for enroot and pyxis."""

from envbuild.kinds.base import FileArtifact

ENROOT = FileArtifact(
    name="enroot",
    help="Build a verified squashfs image for enroot and pyxis, without root.",
    place="{recipe}.sqsh",
    sources=("package index", "Debian's archive"),
    imports=("deflate", "zstandard", "isal", "lz4", "pysequoia", "requests"),
    starters=("enroot",),
    containers=("pyxis", "enroot"),
)
