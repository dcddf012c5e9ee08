"""An image file, squashfs or SIF, as the subject of a verification.

The nodes are groups of processes on this host that communicate over loopback; each process runs in the image.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from envbuild.artifacts import survey as survey_module
from envbuild.artifacts.state import State
from envbuild.artifacts.survey import Survey, read_survey
from envbuild.environment import Environment
from envbuild.errors import HostError, VerificationError
from envbuild.image.blobs import file_digest
from envbuild.layers.compose import PREFIX
from envbuild.recipe.targets import Target, host_arch
from envbuild.verify.host import HostNodes
from envbuild.verify.image_file import Runtime, image_state, open_image_file
from envbuild.verify.model import Settings
from envbuild.verify.runtimes import runtime_for
from envbuild.verify.subject import Subject

_TOOLS = ".tools"
_POLL_S = 0.05
# The survey is written to a file: a runtime may print messages of its own to stdout.
_SURVEY = """
import sys
sys.path.insert(0, sys.argv[1])
from envbuild.artifacts import survey
with open(sys.argv[2], "w") as sys.stdout:
    survey.main(*sys.argv[3:])
"""


def file_subject(
    path: Path, kind: str, state: State, digest: str, settings: Settings, environment: Environment, runtime: str | None
) -> Subject:
    """Return the subject for the image file `path` of `kind` (`enroot` or `apptainer`).

    `runtime` is one of runtimes.NAMES, or None for the best available one. Raises UsageError for a file or a
    runtime of another kind, HostError when no runtime on this host can start the image.
    """
    target = Target.parse(state.target)
    if target.arch != host_arch():
        raise HostError(
            f"an image for {target.name} cannot be started on this {host_arch()} host",
            f"run `envbuild verify {path}` on an {target.arch} node",
        )
    started = runtime_for(open_image_file(path, kind, accelerator=target.family), runtime, environment)
    root = f"/{PREFIX}"
    where = [root, f"{root}/lib/python{state.python}/site-packages", str(target.elf_machine)]

    def survey(nodes: Any) -> Survey:
        assert isinstance(nodes, HostNodes)
        return _survey(nodes, where, settings.timeout_s)

    return Subject(
        root=Path(root),
        state=state,
        target=target,
        digest=digest,
        runtime=started.name,
        survey=survey,
        nodes=lambda work, _, __: _nodes(started, work),
        isolated=True,
        kind=kind,
    )


def open_file_subject(path: Path, environment: Environment, runtime: str | None) -> Subject:
    """Return the subject for the .sqsh or .sif file at `path`, whose digest is the file's sha256.

    Raises UsageError when envbuild did not make the file, and the errors of `file_subject`.
    """
    image = open_image_file(path)
    return file_subject(path, image.kind, image_state(image), file_digest(path), Settings(), environment, runtime)


@contextmanager
def _nodes(runtime: Runtime, work: Path) -> Iterator[HostNodes]:
    package = Path(survey_module.__file__).parents[1]
    for name in survey_module.MODULES:
        place = work / _TOOLS / "envbuild" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(package / name, place)
    with runtime.open(work) as launch:
        yield HostNodes(work, launch, PurePosixPath(runtime.work))


def _survey(nodes: HostNodes, where: list[str], timeout_s: float) -> Survey:
    """Survey the environment with the image's own interpreter. Raises VerificationError when that fails."""
    log, answer = nodes.folder / "survey.log", nodes.folder / "survey.json"
    names = [str(nodes.work / _TOOLS), str(nodes.work / answer.name)]
    agent = nodes.start(0, "python", ["-B", "-c", _SURVEY, *names, *where], {}, log)
    deadline = time.monotonic() + timeout_s
    try:
        while agent.poll() is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
    finally:
        nodes.stop([agent])
    try:
        if agent.returncode != 0:
            raise ValueError(log.read_text(errors="replace").strip()[-2000:] or "no answer")
        return read_survey(answer.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise VerificationError(
            f"the image could not be surveyed (exit {agent.returncode}):\n  {error}",
            "the image lacks what verification runs in it; see the message above",
        ) from error
