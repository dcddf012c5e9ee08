"""What a job asks for, and what its artifact lacks for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from envbuild.errors import UsageError
from envbuild.jobs.artifact import Opened
from envbuild.jobs.model import Scheduler

if TYPE_CHECKING:
    from envbuild.jobs.plan import JobRequest


def check_strategy(request: JobRequest, opened: Opened) -> None:
    """Raises UsageError for Horovod's strategy with an artifact that has none."""
    packages = opened.packages
    # An image that brings torch may bring the Horovod that was built with it; nothing tells.
    known = packages is not None and "torch" in packages
    if request.strategy == "horovod" and known and "horovod" not in (packages or ()):
        raise UsageError(
            f"{opened.artifact.path} has no Horovod",
            "build one of the recipe `horovod`, or of one with [layers.horovod]; or use the default, --strategy ddp",
        )


def check_rendezvous(request: JobRequest, opened: Opened, scheduler: Scheduler) -> None:
    """Raises UsageError for a rendezvous that cannot take place."""
    if request.rendezvous == "c10d":
        if request.endpoint:
            raise UsageError(
                "--endpoint is for --rendezvous etcd-v2", "c10d meets at the head node"
            )
        return
    if request.strategy != "ddp":
        raise UsageError(f"strategy {request.strategy} has no rendezvous", "leave out --rendezvous")
    if not request.endpoint and scheduler != "kubernetes":
        raise UsageError("--rendezvous etcd-v2 needs --endpoint", "HOST:PORT of the etcd server")
    if opened.packages is not None and "python-etcd" not in opened.packages:
        raise UsageError(
            f"{opened.artifact.path} lacks python-etcd, which torch's etcd rendezvous imports",
            'add "python-etcd" to the recipe\'s requirements, or use the default, c10d',
        )
