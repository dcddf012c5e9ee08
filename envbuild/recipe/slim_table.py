"""`[slim]` of a recipe: what its wheels are without."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from envbuild.base.toml import Document, Problem, key, table_at
from envbuild.recipe.targets import Target, target_problem
from envbuild.slim import file_rules


@dataclass(frozen=True)
class SlimTable:
    """`[slim]`: what artifacts leave out of wheels."""

    gpus: bool = key(
        False,
        "Leave out code for other GPUs than the target's `gpus`, in libraries whose licence allows it.",
        example=True,
    )
    debug: bool = key(False, "Leave out debug sections of the same libraries.", example=True)
    files: tuple[str, ...] = key(
        (),
        "Leave out files that running never reads: `include`, `static`, `tests`.",
        choices=file_rules,
        example=["static", "tests"],
    )


def slim_mistakes(document: Document) -> Iterator[Problem]:
    """Yield `gpus` of [slim] where a target for CUDA does not say which GPUs it is for."""
    if table_at(document.data, "slim").get("gpus") is not True:
        return
    for name in table_at(document.data, "targets"):
        cuda = target_problem(name) is None and Target.parse(name).family.name == "cuda"
        if cuda and not table_at(document.data, "targets", name).get("gpus"):
            yield ("slim", "gpus"), f"'gpus' in [slim] needs `gpus` in [targets.{name}]: which GPUs is it for?"
