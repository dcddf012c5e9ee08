"""An image in a docker daemon as the subject of a verification."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from envbuild.artifacts.state import State
from envbuild.layers.compose import PREFIX
from envbuild.recipe.targets import Target
from envbuild.verify.containers import ContainerNodes, container_nodes
from envbuild.verify.model import Settings
from envbuild.verify.subject import Subject

# The number of launches in one verification (reference with training, resume, faults) and the time to start them.
_LAUNCHES, _SPARE_S = 4, 300


class Built(Protocol):
    """An image in a daemon, whoever built it: its state, its digest, its image ID."""

    @property
    def state(self) -> State: ...

    @property
    def digest(self) -> str: ...

    @property
    def image_id(self) -> str: ...


def image_subject(client: Any, image: Built, settings: Settings, image_id: str | None = None) -> Subject:
    """Return the subject for `image` in `client`'s daemon, run as containers; `image_id` overrides the image to run."""
    state = image.state
    target = Target.parse(state.target)
    root = f"/{PREFIX}"
    lifetime = settings.timeout_s * _LAUNCHES + _SPARE_S
    packages = f"{root}/lib/python{state.python}/site-packages"

    def survey(nodes: Any) -> Any:
        assert isinstance(nodes, ContainerNodes)
        return nodes.survey(root, packages, target.elf_machine)

    version = client.version().get("Version", "")
    return Subject(
        path=Path(root),
        root=Path(root),
        state=state,
        target=target,
        digest=image.digest,
        runtime=f"docker {version}".strip(),
        survey=survey,
        nodes=lambda _, count, __: container_nodes(
            client, image_id or image.image_id, count, lifetime, accelerator=target.family
        ),
        alone=True,
        kind="docker",
    )
