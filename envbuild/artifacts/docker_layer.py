"""A layer of a few files on an image that `docker build` made."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any

from envbuild.artifacts.dockerfile import DockerCommand, run
from envbuild.environment import Environment
from envbuild.layers.compose import PREFIX

# BuildKit knows local images by name alone, so an image without its last layer has this one, and the time as its tag.
_UNFINISHED = "envbuild-unfinished"
# Older names are of runs that were killed.
_LONGEST_S = 3600


def add_files(
    command: DockerCommand, client: Any, image_id: str, files: Mapping[str, bytes], environment: Environment
) -> str:
    """Return the id of a new image: `image_id`, which is removed, and a layer with `files` in the environment's folder.

    Raises BuildError with the output of `docker build`.
    """
    import docker.errors

    now = time.time()
    name = f"{_UNFINISHED}:{now:.6f}"
    text = f"FROM {name}\nCOPY {' '.join(files)} /{PREFIX}/\n".encode()
    with environment.store.working("docker") as folder:
        try:
            for file, content in {"Dockerfile": text, **files}.items():
                (folder / file).write_bytes(content)
                (folder / file).chmod(0o644)
        except OSError as error:
            raise environment.store.unwritable(error) from error
        client.api.tag(image_id, *name.split(":"))
        try:
            return run(command, (), folder)
        finally:
            for one in [tag for image in client.api.images(_UNFINISHED) for tag in image["RepoTags"]]:
                if one == name or float(one.rpartition(":")[2]) < now - _LONGEST_S:
                    with contextlib.suppress(docker.errors.APIError):
                        client.api.remove_image(one)
