"""Known faults of a lock: a torch for another accelerator than the target's, and stacks that are known not to work.

The most reported failure of PyTorch locks is a target that resolves to a build for another accelerator. Module
compat/judge.py checks the links of a stack: driver, CUDA, torch, NCCL and network libraries.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from envbuild.base.errors import LockError
from envbuild.data import load_table
from envbuild.gpus import chips_named
from envbuild.lock.conda import CondaPackage
from envbuild.recipe.sources import LockedPackage
from envbuild.recipe.targets import CUDA, Target, accelerator_of, gpu_families, torch_index

if TYPE_CHECKING:
    from envbuild.compat.rows import CompatFinding
    from envbuild.recipe.load import LoadedRecipe

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
    """Raise LockError if `target` with the locked `packages` (name → version) is a stack that is known not to work.

    If `packages` is None, because there is no lock yet, the recipe's layers are checked against its pins; the
    contents of indexes are unknown before a resolution. Targets with neither GPUs nor layers are not checked.
    Combinations without data are reported through `log`, one line each. The error names every reason and fix.
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
            f"{loaded.path}: target {target.name} cannot work:{_lines(bad)}",
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
    return _lines([finding for finding in findings if finding.status == "bad" and finding.subject in _OF_RESOLUTION])


def _lines(findings: list[CompatFinding]) -> str:
    return "".join(f"\n  {finding.subject}: {finding.text}\n    fix: {finding.fix}" for finding in findings)


def check_accelerator(
    target: Target, packages: Iterable[LockedPackage], source: str, indexes: Collection[str] = ()
) -> None:
    """Raise LockError when the torch build in `packages` does not match `target`'s accelerator.

    The hint names PyTorch's index unless it is among the target's `indexes`.

    The wheel's local version identifies the build (`+cpu`, `+cu126`, as on download.pytorch.org), or, on the default
    index, where builds have no local version, the CUDA packages that it depends on.
    """
    versions, family, families = {p.name: p.version for p in packages}, target.family, gpu_families()
    if "torch" not in versions:
        return
    torch = f"torch=={versions['torch']}"
    local = versions["torch"].partition("+")[2]
    gpu = sorted(
        f"{n}=={v}" for n, v in versions.items() if any(re.fullmatch(accelerator.wheels, n) for accelerator in families)
    )
    # Local versions `+cu126`, `+rocm6.4`, and `+xpu`, for which envbuild has no targets.
    named = local.startswith(("xpu", *(accelerator.usual[0].rstrip(".0123456789") for accelerator in families)))
    if not family.gpu:
        if named or (gpu and not local.startswith("cpu")):  # another package may need the GPU's wheels
            more = f" and brings {len(gpu)} GPU packages ({', '.join(gpu[:4])}{', …' if len(gpu) > 4 else ''})"
            raise LockError(
                f"{source}: target {target.name} is for CPUs, but {torch} is a GPU build{more if gpu else ''}",
                f"pin torch==VERSION+cpu in the target{_index_hint(target, indexes)} (on {target.arch},"
                " releases whose plain wheel is CPU-only also do; see docs/reference/recipe.md)",
            )
        return
    pin = f"pin torch==VERSION+{target.accelerator} in {target.table}{_index_hint(target, indexes)}"
    if not gpu and not named:
        raise LockError(f"{source}: target {target.name} needs {family.title}, but {torch} is a CPU-only build", pin)
    # torch's wheel on the default index pins the runtime: 12.6.77 is that of cu126.
    runtime = next((v for name, v in versions.items() if re.fullmatch(r"nvidia-cuda-runtime(-cu\d+)?", name)), None)
    tag = local if named else runtime and "cu" + "".join(runtime.split(".")[:2])
    own = tag is not None or any(re.fullmatch(family.wheels, name) for name in versions)
    if not own or tag not in (None, target.accelerator):
        same = own and (accelerator_of(tag or "") or family) is family
        raise LockError(
            f"{source}: target {target.name} resolved to {torch}, built for another "
            f"{family.title if same else 'accelerator'}{f' ({tag})' if tag else ''}",
            pin + (f", or make it a target of {tag}" if tag else ""),
        )


def _index_hint(target: Target, indexes: Collection[str]) -> str:
    index = torch_index(target.accelerator)
    return "" if index in {url.rstrip("/") for url in indexes} else f" and name the index {index} there"


# AMD's wheels of torch for several GPUs have no code for any: each extra [device-GPU] brings a wheel with it. Source:
# ROCm/rocm-systems, shared/kpack/python/rocm_kpack/wheel_splitter.py; ROCm/TheRock, RELEASES.md (2026-11-29).
_DEVICE, _SPLIT = "amd-torch-device-", "rocm-bootstrap"


def check_devices(loaded: LoadedRecipe, target: Target, packages: Iterable[LockedPackage]) -> None:
    """Raise LockError when torch's code for GPUs is in wheels of their own, and one of the target's is missing."""
    names = {package.name for package in packages}
    devices = {name.removeprefix(_DEVICE) for name in names if name.startswith(_DEVICE)}
    if "torch" not in names or not (devices or _SPLIT in names):
        return
    gpus = loaded.recipe.targets[target.name].gpus
    chips = dict.fromkeys(chip.name for word in gpus for chip in chips_named(word))
    extras = ",".join(f"device-{name}" for name in chips) or "device-all"
    if missing := [name for name in chips if name not in devices] if devices else ["any GPU"]:
        problem = f"torch has no code for {', '.join(missing)}: its wheel is split by GPU" + (
            f", and the lock has {', '.join(sorted(devices))} alone" if devices else ", and no extra chooses one"
        )
        raise LockError(
            f"{loaded.where('targets', target.name, 'gpus')}: {target.name}: {problem}",
            f"write torch[{extras}] in `requirements` of {target.table}",
        )


def check_conda_accelerator(target: Target, packages: Iterable[CondaPackage], source: str) -> None:
    """Raise LockError when the PyTorch build in `packages` does not match `target`'s accelerator.

    A CUDA build's string begins with `cuda`, or it depends on CUDA packages and its string does not begin with `cpu`.
    """
    data, accelerator = load_table("conda")["accelerator"], target.family
    for package in packages:
        if package.name not in data["packages"]:
            continue
        needs = sorted(set(package.needs) & set(data["cuda_packages"]))
        cuda = package.build.startswith(CUDA.conda_builds) or bool(needs and not package.build.startswith("cpu"))
        if cuda and not accelerator.gpu:
            raise LockError(
                f"{source}: target {target.name} is for CPUs, but {package.stem} is a CUDA build"
                + (f" and needs {', '.join(needs)}" if needs else ""),
                f"ask for a CPU build in {target.table}: conda = ['{package.name} * cpu*']",
            )
        own = cuda if accelerator is CUDA else package.build.startswith(accelerator.conda_builds)
        if accelerator.gpu and not own:
            raise LockError(
                f"{source}: target {target.name} needs {accelerator.title}, but {package.stem} is a "
                f"{'CUDA' if cuda else 'CPU-only'} build",
                f"ask for a {accelerator.title} build in {target.table}: "
                f"conda = ['{package.name} * {accelerator.conda_builds[0]}*']",
            )
