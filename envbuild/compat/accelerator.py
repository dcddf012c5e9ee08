"""Compatibility checks of glibc, driver, torch and torch's NCCL."""

from __future__ import annotations

from collections.abc import Iterator

from envbuild.compat import rows as data
from envbuild.compat.finding import LOOK_IT_UP, CompatFinding
from envbuild.compat.rows import Rows
from envbuild.compat.stack import Stack
from envbuild.compat.versions import older


def glibc_links(stack: Stack, rows: Rows) -> Iterator[CompatFinding]:
    if stack.torch is None or stack.torch_origin == "conda":
        return
    row = data.torch_build(rows, stack.torch, stack.arch)
    if row is None or not row.glibc:
        return
    low = older(stack.glibc, row.glibc)
    wheels = f"torch {stack.torch}'s wheels for {stack.arch} need glibc {row.glibc}"
    if low and stack.torch_origin == "lock":
        text = f"{wheels}, the locked one says that {stack.glibc} is enough: it is another build"
        yield CompatFinding("unknown", "glibc", text, "", row.source, row.date)
    elif low:
        yield CompatFinding(
            "bad", "glibc", f"{wheels}, the target allows {stack.glibc} at most",
            f'set glibc = "{row.glibc}" or newer in the target, and use hosts that have it',
            row.source, row.date,
        )  # fmt: skip
    elif low is not None:
        text = f"{wheels}; hosts have {stack.glibc} or newer"
        yield CompatFinding("good", "glibc", text, "", row.source, row.date)


def driver_links(stack: Stack, rows: Rows) -> Iterator[CompatFinding]:
    if stack.cuda is None:
        return
    row = data.driver_row(rows, stack.cuda)
    if row is None:
        text = f"no row says which driver CUDA {stack.cuda} needs"
        yield CompatFinding("unknown", "driver", text, "see NVIDIA's CUDA release notes")
        return
    need = f"CUDA {stack.cuda} needs driver {row.minimum} or newer"
    if stack.driver is None:
        text = f"{need} on the nodes; `--driver VERSION` judges one"
        yield CompatFinding("note", "driver", text, "", row.source, row.date)
        return
    low = older(stack.driver, row.minimum)
    if low is None:
        text = f"{need}; {stack.driver!r} is not a version"
        yield CompatFinding("unknown", "driver", text, "give it as nvidia-smi prints it: 550.54.15")
    elif low:
        yield CompatFinding(
            "bad", "driver", f"{need}, the nodes have {stack.driver}",
            f"update the driver to {row.minimum} or newer, or take a target of an older CUDA",
            row.source, row.date,
        )  # fmt: skip
    else:
        yield CompatFinding("good", "driver", f"{need}: {stack.driver}", "", row.source, row.date)


def torch_links(stack: Stack, rows: Rows) -> Iterator[CompatFinding]:
    if stack.cuda is None:
        return
    if stack.torch is None:
        if stack.base:
            text = "torch, its NCCL and CUDA are what the base image has; envbuild does not know them"
            yield CompatFinding("note", "torch", text)
        else:
            text = "no torch is pinned or locked: which build it will be is not known"
            fix = "pin torch in the recipe, or make the lock with `envbuild lock`"
            yield CompatFinding("unknown", "torch", text, fix)
        return
    what = f"torch {stack.torch}"
    if stack.torch_origin == "conda":
        text = f"{what} comes from conda, whose solver matched its build with CUDA and NCCL"
        yield CompatFinding("note", "torch", text)
        return
    row = data.torch_build(rows, stack.torch, stack.arch)
    if row is None:
        text = f"no row says which CUDA {what} is built for on {stack.arch}"
        yield CompatFinding("unknown", "torch", text, LOOK_IT_UP)
        return
    built = ", ".join(row.cuda) or "none that is known"
    if stack.cuda in row.cuda:
        yield CompatFinding(
            "good", "torch",
            f"{what} is built for CUDA {stack.cuda} on {stack.arch}: {_index(stack, row)}",
            "", row.source, row.date,
        )  # fmt: skip
        return
    text = f"{what} is built for CUDA {built} on {stack.arch}"
    if row.complete and stack.torch_origin == "lock" and f"+cu{stack.cuda.replace('.', '')}" in stack.torch:
        text = f"PyTorch's {text}; the locked one for {stack.cuda} is another build"
        yield CompatFinding("unknown", "torch", text, "", row.source, row.date)
    elif row.complete:
        near = " or ".join(f"cu{one.replace('.', '')}-{stack.arch}" for one in row.cuda)
        fix = f"take a torch that is built for CUDA {stack.cuda} there, or the target {near}"
        yield CompatFinding("bad", "torch", f"{text}, not {stack.cuda}", fix, row.source, row.date)
    else:
        text = f"{text}; whether for {stack.cuda} too is not known"
        yield CompatFinding("unknown", "torch", text, LOOK_IT_UP, row.source, row.date)


def _index(stack: Stack, row: data.TorchBuild) -> str:
    if row.default == stack.cuda:
        return "the plain wheel of the default index"
    index = f"https://download.pytorch.org/whl/cu{(stack.cuda or '').replace('.', '')}"
    return f"{index} has it" + (f" (the plain wheel is {_plain(row)})" if row.default else "")


def _plain(row: data.TorchBuild) -> str:
    return "for CPUs" if row.default == "cpu" else f"for CUDA {row.default}"


_NCCL_IS = {
    "pin": "torch's pin",
    "lock": "in the lock",
    "wheel": "the recipe's wheel",
    "source": "built from source",
    "host": "the host's",
    "conda": "conda's",
}


def nccl_links(stack: Stack, rows: Rows) -> Iterator[CompatFinding]:
    if stack.nccl is None or stack.cuda is None or stack.torch_origin == "conda":
        return
    row = data.pin_row(rows, stack.torch, stack.cuda) if stack.torch else None
    what = f"NCCL {stack.nccl} ({_NCCL_IS.get(stack.nccl_origin, stack.nccl_origin)})"
    if row is None:
        if stack.torch:
            text = f"{what}: no row says which NCCL torch {stack.torch} for CUDA {stack.cuda} pins"
            yield CompatFinding("unknown", "nccl", text, LOOK_IT_UP)
        return
    low = older(stack.nccl, row.nccl)
    pins = f"torch {stack.torch} for CUDA {stack.cuda} pins {row.nccl}"
    if low is None:
        yield CompatFinding("unknown", "nccl", f"{what} cannot be compared: {pins}", LOOK_IT_UP)
    elif low:
        yield CompatFinding(
            "bad", "nccl", f"{what} is older than torch's: {pins}, and torch may call what it lacks",
            f'set version = "{row.nccl}" or newer in [layers.nccl], or leave the layer out',
            row.source, row.date,
        )  # fmt: skip
    elif stack.nccl_origin == "pin":
        inside = ", inside its wheel" if stack.nccl_in == "inside" else ""
        yield CompatFinding("good", "nccl", f"{pins}{inside}", "", row.source, row.date)
    else:
        text = f"{what}: {pins}; all ranks must have the same"
        yield CompatFinding("good", "nccl", text, "", row.source, row.date)
