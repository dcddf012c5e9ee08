"""The GPUs on which the libraries of a recipe run: as built, or as the data on torch's wheels say."""

from __future__ import annotations

from collections.abc import Mapping

from envbuild.compat.rows import CompatFinding, Row, finding
from envbuild.compat.stack import Stack
from envbuild.compat.versions import matches
from envbuild.gpu_code import Containers
from envbuild.gpus import NATIVE, PTX, gpu_faults, is_judged, is_optional, library_runs, load_chips, torch_rows


def gpu_findings(stack: Stack, words: tuple[str, ...], built: Mapping[str, Containers]) -> list[CompatFinding]:
    """Say on which GPUs the libraries of a target run; "bad" when one of the GPUs that `words` name is not among them.

    `built` has the code in the libraries of an artifact that was built from the recipe; {} without one.
    """
    row = None
    if built:
        what, libraries = "its artifact here", dict(built)
    elif stack.cuda and stack.torch and stack.torch_origin != "conda" and stack.arch == "x86_64":
        fitting = (one for one in torch_rows() if one["cuda"] == stack.cuda and matches(stack.torch, one["versions"]))
        found = next(fitting, None)
        if found is None:
            text = f"whether it runs on {', '.join(words)} is known when it is built, or verified"
            return [finding("note", "gpus", text)] if words else []
        what, row = f"PyPI's torch {stack.torch.partition('+')[0]}", Row(source=found["source"], date=found["date"])
        libraries = {name: Containers({tuple(codes): 1}) for name, codes in found["libraries"].items()}
    else:
        return []
    if faults := gpu_faults(libraries, words):
        fix = "take another torch or CUDA, compile for them, or correct `gpus` of the target"
        return [finding("bad", "gpus", f"{what}: {'; '.join(faults[:3])}", fix, by=row)]
    ways: dict[str, list[str]] = {NATIVE: [], PTX: []}
    for chip in load_chips().values():
        needed = (one for path, one in libraries.items() if is_judged(one, chip) and not is_optional(path))
        runs = {library_runs(one, chip) for one in needed}
        if runs and "" not in runs and chip.accelerator == ("rocm" if stack.rocm else "cuda"):
            ways[PTX if PTX in runs else NATIVE].append(chip.name)
    said = "; ".join(f"{way} on {', '.join(chips)}" for way, chips in ways.items() if chips)
    if some := gpu_faults(libraries, words, optional=True):
        said += f"; not all need this: {some[0]}"
    return [finding("good" if words else "note", "gpus", f"{what} runs {said or 'on no GPU that is known'}", by=row)]
