"""Loading of images into a Docker daemon over its API; only the layers that the daemon lacks are sent.

A load archive may omit layers that the daemon has in the same chain: docker's image specification v1.2 names layers by
position, and the daemon looks a chain up before it opens the layer's file. Daemons that keep images in containerd's
store need complete archives.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from envbuild.base.errors import BuildError, HostError
from envbuild.base.packages import digest_of
from envbuild.base.progress import OnProgress
from envbuild.image.archive import archive_pieces
from envbuild.image.layer import Layer
from envbuild.image.layout import Blobs


@dataclass(frozen=True, slots=True)
class Loaded:
    """An image in the daemon: its ID there, the number of layers sent, whether it existed before."""

    image_id: str
    layers_sent: int
    was_there: bool


@contextmanager
def connect(env: Mapping[str, str]) -> Iterator[Any]:
    """Yield a client of the daemon at DOCKER_HOST or the default socket. Raises HostError when no daemon answers."""
    import docker
    from docker.errors import DockerException

    with ExitStack() as stack:
        try:
            client = stack.enter_context(closing(docker.from_env(environment=dict(env), timeout=600)))
            client.ping()
        except (DockerException, OSError) as error:
            where = env.get("DOCKER_HOST") or "its usual socket, /var/run/docker.sock"
            raise HostError(
                f"no docker daemon answers at {where}: {_text(error)}",
                "start dockerd, set DOCKER_HOST, or become a member of the group docker; "
                "--out oci:DIR and --push need no daemon",
            ) from error
        yield client


def load(
    client: Any, config: bytes, layers: Sequence[Layer], tags: Sequence[str], blobs: Blobs, on_progress: OnProgress
) -> Loaded:
    """Load the image with the configuration `config`, whose digest is the image's ID, and tag it.

    `on_progress` is called with the number of bytes of each piece that is sent. Raises BuildError when the daemon
    refuses the image, or has it afterwards under another ID or with other layers.
    """
    from docker.errors import APIError, ImageNotFound

    image_id = digest_of(config)
    try:
        present = client.api.inspect_image(image_id)["Id"] == image_id
    except ImageNotFound:
        present = False
    sent = 0
    if not present:
        known = 0 if _uses_containerd(client) else _known_prefix(client, [i.diff_id for i in layers])
        sent = len(layers) - known
        descriptors = [layer.blob for layer in layers]
        # Docker 20.10 refuses zstd, so such layers are sent uncompressed.
        archive = archive_pieces(config, descriptors, blobs, (), known=known, stored=("none", "gzip"))
        try:
            lines = list(client.api.load_image(_counted(archive, on_progress)))
        except (APIError, OSError) as error:
            raise BuildError(f"the docker daemon refused the image: {_text(error)}", _hint(str(error))) from error
        faults = [str(line["error"]) for line in lines if isinstance(line, dict) and "error" in line]
        if faults:
            raise BuildError(f"the docker daemon refused the image: {faults[0]}", _hint(faults[0]))
    loaded_id = _loaded_id(client, image_id, layers)
    for tag in tags:
        name, _, label = tag.rpartition(":")
        client.api.tag(loaded_id, name, label)
    return Loaded(loaded_id, sent, present)


def _counted(pieces: Iterable[bytes], on_progress: OnProgress) -> Iterator[bytes]:
    for piece in pieces:
        on_progress(len(piece))
        yield piece


def _loaded_id(client: Any, image_id: str, layers: Sequence[Layer]) -> str:
    from docker.errors import ImageNotFound

    try:
        image = client.api.inspect_image(image_id)
    except ImageNotFound:
        raise BuildError(
            f"the docker daemon loaded the image, but does not list it as {image_id}",
            "its image store is of a kind that envbuild does not know; use --push or --out",
        ) from None
    if image["RootFS"].get("Layers") != [layer.diff_id for layer in layers]:
        raise BuildError(f"the docker daemon's layers of {image_id} differ from those that were sent")
    return str(image["Id"])


def _known_prefix(client: Any, diff_ids: Sequence[str]) -> int:
    """Return the number of the lowest layers that the daemon has as one chain."""
    from docker.errors import APIError

    best = 0
    for listed in client.api.images(all=True):
        try:
            has = client.api.inspect_image(listed["Id"])["RootFS"].get("Layers") or []
        except APIError:  # removed in the meantime
            continue
        same = takewhile(lambda pair: pair[0] == pair[1], zip(diff_ids, has, strict=False))
        best = max(best, len(list(same)))
    return best


def _uses_containerd(client: Any) -> bool:
    status = client.info().get("DriverStatus") or []
    return any("io.containerd" in str(value) for _, value in status)


def _text(error: Exception) -> str:
    return str(getattr(error, "explanation", None) or error).splitlines()[0]


def _hint(message: str) -> str | None:
    if "no space left" in message:
        return "free room where the daemon keeps its images (docker system df, docker system prune)"
    return None
