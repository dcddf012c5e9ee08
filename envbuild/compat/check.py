"""Compatibility checks of a lock or a build: refuse stacks known not to work, report unknown ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from envbuild.base.errors import LockError

if TYPE_CHECKING:
    from envbuild.compat.rows import CompatFinding
    from envbuild.recipe.load import LoadedRecipe
    from envbuild.recipe.targets import Target

# A resolution decides these links; when it fails, they explain why.
_OF_RESOLUTION = ("glibc", "torch", "packages")


def check_stack(
    loaded: LoadedRecipe,
    target: Target,
    packages: Mapping[str, str] | None,
    log: Callable[[str], None] | None,
    *,
    conda: bool = False,
) -> None:
    """Refuse `target` with the locked `packages` (name → version), as in `stack_of`, if it is known not to work.

    If `packages` is None, because there is no lock yet, the recipe's layers are checked against its pins; the
    contents of indexes are unknown before a resolution. Targets with neither GPUs nor layers are not checked.
    Unknown links are reported through `log`, one line each. Raises LockError with every reason and fix.
    """
    recipe = loaded.recipe
    layers = [name for name, table in recipe.layers.items() if table.for_target(target.name)]
    if not target.family.gpu and not layers:
        return
    # Imported here: a CPU recipe needs none of it.
    from envbuild.compat.judge import judge
    from envbuild.compat.stack import stack_of

    stack = stack_of(loaded, target, packages, conda=conda)
    findings = judge(stack)
    if conda and log is not None and stack.cuda != target.version and stack.cuda:
        log(
            f"note: {target.name}: the conda packages are those of CUDA {stack.cuda}, not {target.version}, and need a"
            f" driver for it; else add 'cuda-version {target.version}.*' to conda in {target.table}"
        )
    if packages is None:
        findings = [finding for finding in findings if finding.subject not in _OF_RESOLUTION]
    bad = [finding for finding in findings if finding.status == "bad"]
    if bad:
        raise LockError(
            f"{loaded.path}: target {target.name} is known not to work:{_lines(bad)}",
            f"`envbuild check {recipe.name} --target {target.name}` shows all reasons with their sources",
        )
    for finding in findings:
        if finding.status == "unknown" and log is not None:
            log(f"note: {target.name}: {finding.subject}: {finding.text}")


def impossible_pins(loaded: LoadedRecipe, target: Target) -> str:
    """Return why the recipe's pins for `target` conflict, as lines to append; "" if no conflict is known."""
    from envbuild.compat.judge import judge
    from envbuild.compat.stack import stack_of

    findings = judge(stack_of(loaded, target, None))
    return _lines([one for one in findings if one.status == "bad" and one.subject in _OF_RESOLUTION])


def _lines(findings: list[CompatFinding]) -> str:
    return "".join(f"\n  {one.subject}: {one.text}\n    fix: {one.fix}" for one in findings)
