"""An image in a docker daemon as the subject of a verification: its nodes are containers on one docker network.

Each node is an idle container; torchrun is started in it as by `docker exec`, with the image's own environment.
A shared volume stands in for the cluster's file system. Every object has a label with its expiry time, so that
a later run can remove the leftovers of a killed one.
"""

from __future__ import annotations

import io
import posixpath
import shutil
import tarfile
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

from envbuild.base.errors import HostError, VerificationError
from envbuild.base.workers import Workers
from envbuild.contract.image_manifest import OCI
from envbuild.contract.state import PREFIX, State
from envbuild.contract.verification import VerifySettings
from envbuild.image.limits import ImageLimits
from envbuild.image.tar import Chunks
from envbuild.recipe.targets import CPU, Accelerator, Target
from envbuild.verify import processes
from envbuild.verify.model import Subject
from envbuild.verify.namespace import WORK
from envbuild.verify.outside import read_container, survey_image
from envbuild.verify.survey import Survey

_WORK = PurePosixPath(WORK)
LABEL = "org.envbuild.verify.until"
_TOOLS = f"{WORK}/.tools"
_KILL = ("python", f"{_TOOLS}/processes.py")
_FREE_PORT = "import socket; s = socket.socket(); s.bind(('', 0)); print(s.getsockname()[1])"
_JOIN_S = 10.0
# The launches of one verification (reference with training, resume, faults, command) and the time to start them.
_LAUNCHES, _SPARE_S = 5, 300


@dataclass(frozen=True, slots=True)
class BuiltImage:
    """An image in a daemon, built by any tool; `file_manifest` is the digest of the manifest of its files, or ""."""

    image_id: str
    state: State
    digest: str
    file_manifest: str = ""


def image_subject(
    client: Any, image: BuiltImage, settings: VerifySettings, limits: ImageLimits | None = None
) -> Subject:
    """Return the subject for `image` in `client`'s daemon, run as containers; `limits` are the site's for images."""
    state, target, root = image.state, Target.parse(image.state.target), f"/{PREFIX}"
    lifetime = settings.timeout_s * _LAUNCHES + _SPARE_S

    def surveyed(timeout_s: float) -> Survey:
        files = read_container(client, image.image_id, _until(lifetime), limits, timeout_s, gpu=target.family.gpu)
        return survey_image(files, state, OCI, image.file_manifest)

    return Subject(
        Path(root),
        state,
        target,
        image.digest,
        f"docker {client.version().get('Version', '')}".strip(),
        survey=surveyed,
        nodes=lambda _, count, __: container_nodes(client, image.image_id, count, lifetime, accelerator=target.family),
        isolated=True,
        kind="docker",
        manifest=image.file_manifest,
    )


@dataclass(slots=True)
class _Agent:
    """A running program in a container; a thread reads its output."""

    api: Any
    exec_id: str
    container: str
    mark: str
    reader: threading.Thread
    returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and not self.reader.is_alive():
            state = self.api.exec_inspect(self.exec_id)
            if not state["Running"]:
                self.returncode = state["ExitCode"]
        return self.returncode


@dataclass(frozen=True, slots=True)
class ContainerNodes:
    """Running containers, one per node."""

    client: Any
    containers: Sequence[Any]
    network: str
    work: PurePosixPath = _WORK
    interface: str = "eth0"

    def address(self, node: int) -> str:
        return str(self.containers[node].attrs["NetworkSettings"]["Networks"][self.network]["IPAddress"])

    def free_port(self) -> int:
        return int(self._run(self.containers[0].id, ["python", "-c", _FREE_PORT]))

    def start(self, node: int, program: str, arguments: Sequence[str], extra: Mapping[str, str], log: Path) -> _Agent:
        api, container = self.client.api, self.containers[node].id
        mark = f"ENVBUILD_AGENT={uuid.uuid4().hex}"  # all child processes inherit it
        variables = [mark, *(f"{name}={value}" for name, value in extra.items())]
        created = api.exec_create(container, [program, *arguments], environment=variables, workdir=WORK)
        stream = api.exec_start(created["Id"], stream=True)
        opened = log.open("wb")

        def read() -> None:
            with opened as file, suppress(Exception):
                for data in stream:
                    file.write(data)
                    file.flush()

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        return _Agent(api, created["Id"], container, mark, reader)

    def stop(self, agents: Sequence[Any]) -> None:
        for agent in [agent for agent in agents if agent.poll() is None]:
            with suppress(Exception):
                self._run(agent.container, [*_KILL, "all", agent.mark], check=False)
        for agent in agents:
            agent.reader.join(_JOIN_S)
            agent.poll()

    def collect(self, into: Path) -> None:
        stream, _ = self.containers[0].get_archive(WORK)
        with tarfile.open(fileobj=cast(BinaryIO, Chunks(stream)), mode="r|") as archive:
            for member in archive:
                name = posixpath.basename(member.name)
                source = archive.extractfile(member) if member.isfile() else None
                # Only files of the work folder itself; the nodes' logs are written on this host already.
                if source is not None and member.name.count("/") == 1 and not name.endswith(".log"):
                    with (into / name).open("wb") as file:
                        shutil.copyfileobj(source, file)

    def kill_rank(self, run_id: str, rank: int) -> int | None:
        for container in self.containers:
            answer = self._run(container.id, [*_KILL, "rank", run_id, str(rank)], check=False)
            if answer.strip().isdigit():
                return int(answer)
        return None

    def share(self, files: Mapping[str, bytes]) -> None:
        """Write files into the shared folder. Raises VerificationError when the daemon refuses."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            for name, content in files.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
        if not self.containers[0].put_archive(WORK, buffer.getvalue()):
            raise VerificationError("the docker daemon refused files for a container")

    def _run(self, container: str, command: Sequence[str], *, check: bool = True) -> str:
        api = self.client.api
        created = api.exec_create(container, list(command), stderr=True)
        out, err = api.exec_start(created["Id"], demux=True)
        code = api.exec_inspect(created["Id"])["ExitCode"]
        if check and code != 0:
            text = (err or out or b"").decode(errors="replace").strip()
            raise VerificationError(
                f"{command[0]} failed in the container (exit {code}):\n  {text[-2000:]}",
                "the image lacks a program that verification needs; see the message above",
            )
        return (out or b"").decode(errors="replace")


@contextmanager
def container_nodes(
    client: Any, image: str, count: int, lifetime_s: float, *, accelerator: Accelerator = CPU
) -> Iterator[ContainerNodes]:
    """Start `count` containers of `image` with all GPUs, and remove them at the end. Raises HostError."""
    from docker.errors import DockerException
    from docker.types import DeviceRequest

    name = f"envbuild-verify-{uuid.uuid4().hex[:12]}"
    until = _until(lifetime_s)
    gpus = [DeviceRequest(count=-1, capabilities=[["gpu"]])] if accelerator.docker_request else None
    _remove_stale(client)
    containers: dict[int, Any] = {}
    others: list[Any] = []
    try:
        try:
            others.append(client.networks.create(name, driver="bridge", labels=until))
            others.append(client.volumes.create(name, labels=until))

            def run(node: int) -> None:
                containers[node] = client.containers.run(
                    image,
                    [str(int(lifetime_s))],
                    entrypoint=["sleep"],
                    user="0",
                    init=True,
                    detach=True,
                    name=f"{name}-{node}",
                    hostname=f"node{node}",
                    network=name,
                    labels=until,
                    shm_size="1g",
                    working_dir=WORK,
                    volumes={name: {"bind": WORK, "mode": "rw"}},
                    device_requests=gpus,
                    devices=list(accelerator.docker_devices) or None,
                )
                containers[node].reload()  # its address is known now

            # Workers finish their task even after an interruption. Otherwise a container that the daemon
            # creates while nobody waits for the response would be left behind.
            with closing(Workers(count)) as pool:
                for started in [pool.submit(run, node) for node in range(count)]:
                    started.result()
        except DockerException as error:
            text = str(getattr(error, "explanation", None) or error)
            raise HostError(f"the docker daemon could not start containers of the image: {text}") from error
        nodes = ContainerNodes(client, [containers[node] for node in range(count)], name)
        nodes.share({".tools/processes.py": Path(processes.__file__).read_bytes()})
        yield nodes
    finally:
        _remove(containers.values(), others)


def _until(lifetime_s: float) -> dict[str, str]:
    return {LABEL: str(int(time.time() + lifetime_s))}


def _remove(containers: Iterable[Any], others: Iterable[Any]) -> None:
    for container in containers:
        with suppress(Exception):
            container.remove(force=True, v=True)
    for other in others:
        with suppress(Exception):
            other.remove()


def _remove_stale(client: Any) -> None:
    """Remove the expired objects of killed verifications."""
    ours = {"label": LABEL}
    with suppress(Exception):
        _remove(
            [container for container in client.containers.list(all=True, filters=ours) if _is_over(container.labels)],
            (),
        )
        others = [*client.networks.list(filters=ours), *client.volumes.list(filters=ours)]
        _remove((), [other for other in others if _is_over(other.attrs.get("Labels") or {})])


def _is_over(labels: Mapping[str, str]) -> bool:
    return labels.get(LABEL, "").isdigit() and int(labels[LABEL]) < time.time()
