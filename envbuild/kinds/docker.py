"""Container images in a docker daemon or a registry."""

from envbuild.kinds.base import RegistryArtifact

DOCKER = RegistryArtifact(
    name="docker",
    help="Build a verified container image, without a daemon or root.",
    place="docker",
    sources=("package index", "Debian's archive"),
    imports=("deflate", "zstandard", "isal", "pysequoia", "requests"),
)
