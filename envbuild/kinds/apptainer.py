"""SIF images for Apptainer and Singularity."""

from envbuild.kinds.base import FileArtifact

APPTAINER = FileArtifact(
    name="apptainer",
    help="Build a verified SIF image for Apptainer, without it or root.",
    place="{recipe}.sif",
    sources=("package index", "Debian's archive"),
    imports=("deflate", "zstandard", "isal", "lz4", "pysequoia", "requests"),
    starters=("apptainer", "singularity"),
    containers=("apptainer",),
)
