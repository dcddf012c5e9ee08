"""Loading of images into a Docker daemon over its API; only the layers that the daemon lacks are sent.

A load archive may omit layers that the daemon has in the same chain: docker's image specification v1.2 names layers by
position, and the daemon looks a chain up before it opens the layer's file. Daemons that keep images in containerd's
store need complete archives.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envbuild.errors import BuildError, HostError
from envbuild.image.blobs import Blobs
from envbuild.image.compression import open_layer
from envbuild.image.entry import Entry
from envbuild.image.layer import Layer, header
from envbuild.image.model import COMPRESSION
from envbuild.progress import OnProgress

_PIECE = 1 << 20
_BLOCK = 512


@dataclass(frozen=True, slots=True)
class Loaded:
    """An image in the daemon: its ID there, the number of layers and bytes sent, whether it existed before.

    `bytes_sent` is the size of the layers' blobs as they are stored.
    """

    image_id: str
    layers_sent: int
    bytes_sent: int
    was_there: bool


@contextmanager
def connect(env: Mapping[str, str]) -> Iterator[Any]:
    """Connect to the daemon at DOCKER_HOST, or at the default socket, and yield the client.

    Raises HostError when no daemon answers.
    """
    import docker
    from docker.errors import DockerException

    try:
        client = docker.from_env(environment=dict(env), timeout=600)
    except DockerException as error:
        raise _unreachable(error, env) from error
    try:
        try:
            client.ping()
        except (DockerException, OSError) as error:
            raise _unreachable(error, env) from error
        yield client
    finally:
        client.close()


def load(
    client: Any,
    config: bytes,
    image_id: str,
    layers: Sequence[Layer],
    tags: Sequence[str],
    blobs: Blobs,
    on_progress: OnProgress,
) -> Loaded:
    """Load an image, and tag it. `config` is its configuration, and `image_id` the digest of the configuration.

    `on_progress` is called with the number of bytes of each piece that is sent. Raises BuildError when the
    daemon refuses the image, or has it afterwards under another ID or with other layers.
    """
    from docker.errors import APIError, ImageNotFound

    try:
        present = client.api.inspect_image(image_id)["Id"] == image_id
    except ImageNotFound:
        present = False
    sent: list[Layer] = []
    total = 0
    if not present:
        known = 0 if _uses_containerd(client) else _known_prefix(client, [i.diff_id for i in layers])
        sent = list(layers[known:])
        total = sum(layer.blob.size for layer in sent)
        archive = _archive(config, image_id, layers, sent, blobs, on_progress)
        try:
            said = list(client.api.load_image(archive))
        except (APIError, OSError) as error:
            raise BuildError(f"the docker daemon refused the image: {_text(error)}", _hint(str(error))) from error
        faults = [str(line["error"]) for line in said if isinstance(line, dict) and "error" in line]
        if faults:
            raise BuildError(f"the docker daemon refused the image: {faults[0]}", _hint(faults[0]))
    loaded_id = _loaded_id(client, image_id, layers)
    for tag in tags:
        name, _, label = tag.rpartition(":")
        client.api.tag(loaded_id, name, label)
    return Loaded(loaded_id, len(sent), total, present)


def _loaded_id(client: Any, image_id: str, layers: Sequence[Layer]) -> str:
    from docker.errors import ImageNotFound

    try:
        found = client.api.inspect_image(image_id)
    except ImageNotFound:
        raise BuildError(
            f"the docker daemon loaded the image and does not list it as {image_id}",
            "its image store is of a kind that envbuild does not know; use --push or --out",
        ) from None
    if found["RootFS"].get("Layers") != [layer.diff_id for layer in layers]:
        raise BuildError(f"the docker daemon has other layers than were sent for {image_id}")
    return str(found["Id"])


def _known_prefix(client: Any, diff_ids: Sequence[str]) -> int:
    """Return the number of the lowest layers that the daemon has as one chain."""
    from docker.errors import APIError

    best = 0
    for listed in client.api.images(all=True):
        try:
            has = client.api.inspect_image(listed["Id"])["RootFS"].get("Layers") or []
        except APIError:  # removed in the meantime
            continue
        count = 0
        for mine, theirs in zip(diff_ids, has, strict=False):
            if mine != theirs:
                break
            count += 1
        best = max(best, count)
    return best


def _uses_containerd(client: Any) -> bool:
    status = client.info().get("DriverStatus") or []
    return any("io.containerd" in str(value) for _, value in status)


def _archive(
    config: bytes, image_id: str, layers: Sequence[Layer], sent: Sequence[Layer], blobs: Blobs, on_progress: OnProgress
) -> Iterator[bytes]:
    """Yield the load archive: the configuration, the layers in `sent`, manifest.json."""
    name = f"{image_id.partition(':')[2]}.json"
    manifest: list[dict[str, Any]] = [
        {"Config": name, "RepoTags": None, "Layers": [_member(layer) for layer in layers]}
    ]
    yield _small(name, config)
    for layer in dict.fromkeys(sent):
        path = _readable(layer, blobs)
        size = path.stat().st_size
        yield header(Entry(_member(layer), size=size))
        with path.open("rb") as stream:
            while data := stream.read(_PIECE):
                on_progress(len(data))
                yield data
        yield bytes(-size % _BLOCK)
    yield _small("manifest.json", json.dumps(manifest).encode())
    yield bytes(2 * _BLOCK)


def _readable(layer: Layer, blobs: Blobs) -> Path:
    """Return the layer's file in a compression that every daemon reads.

    Docker 20.10 refuses zstd, so an uncompressed copy of such a layer is added to the blobs. Raises BuildError when its
    content does not match the configuration's diff_id.
    """
    if COMPRESSION.get(layer.blob.media_type) != "zstd":
        return blobs.path(layer.blob.digest)
    plain = blobs.path(layer.diff_id)
    if not plain.exists():
        digest = hashlib.sha256()
        with open_layer(blobs.path(layer.blob.digest), layer.blob.digest) as source, blobs.new() as (stream, place):
            while data := source.read(_PIECE):
                stream.write(data)
                digest.update(data)
            stream.flush()
            if f"sha256:{digest.hexdigest()}" != layer.diff_id:
                raise BuildError(f"layer {layer.blob.digest} is not {layer.diff_id} inside")
            place(layer.diff_id)
    return plain


def _member(layer: Layer) -> str:
    return f"{layer.diff_id.partition(':')[2]}/layer.tar"


def _small(name: str, data: bytes) -> bytes:
    return header(Entry(name, size=len(data))) + data + bytes(-len(data) % _BLOCK)


def _unreachable(error: Exception, env: Mapping[str, str]) -> HostError:
    where = env.get("DOCKER_HOST") or "its usual socket, /var/run/docker.sock"
    return HostError(
        f"no docker daemon answers at {where}: {_text(error)}",
        "start dockerd, set DOCKER_HOST, or become a member of the group docker; "
        "--out oci:DIR and --push need no daemon",
    )


def _text(error: Exception) -> str:
    return str(getattr(error, "explanation", None) or error).splitlines()[0]


def _hint(said: str) -> str | None:
    if "no space left" in said:
        return "free room where the daemon keeps its images (docker system df, docker system prune)"
    return None
