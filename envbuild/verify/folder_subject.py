"""An environment in a folder of this host as the subject of a verification."""

from __future__ import annotations

from pathlib import Path

from envbuild.artifacts.folder import FolderModule, check_host, site_packages
from envbuild.artifacts.state import State
from envbuild.artifacts.survey import survey
from envbuild.recipe.targets import Target
from envbuild.verify.host import host_nodes
from envbuild.verify.subject import Subject


def folder_subject(path: Path, state: State, kind: FolderModule) -> Subject:
    """Return the subject for the environment in the folder `path`, whose programs are started as `kind` defines.

    Raises HostError when the environment cannot run on this host.
    """
    target = Target.parse(state.target)
    check_host(kind.TITLE, target)
    return Subject(
        path=path,
        root=path,
        state=state,
        target=target,
        digest=state.digest,
        runtime="host",
        survey=lambda _: survey(path, site_packages(path, state.python), target.elf_machine),
        nodes=lambda work, _, env: host_nodes(
            work, lambda program, arguments: kind.command(path, program, *arguments), kind.launch_environment(path, env)
        ),
    )
