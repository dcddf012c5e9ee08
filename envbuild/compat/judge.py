"""Checks of a stack's compatibility: a finding for each pair of parts, with its source and the advised change."""

from __future__ import annotations

from collections.abc import Mapping

from envbuild.compat.rows import (
    LOOK_IT_UP,
    UNKNOWN,
    CompatFinding,
    CompatRule,
    Rows,
    TorchBuild,
    finding,
    key,
    load_rows,
    matches,
    older,
    row_of,
)
from envbuild.compat.stack import EXACT, Stack
from envbuild.fabrics import load_fabrics
from envbuild.gpus import (
    NATIVE,
    PTX,
    Containers,
    gpu_faults,
    is_judged,
    is_optional,
    library_runs,
    load_chips,
)
from envbuild.recipe.targets import torch_index


def gpu_findings(stack: Stack, words: tuple[str, ...], built: Mapping[str, Containers]) -> list[CompatFinding]:
    """Return a finding with the GPUs on which a target's libraries run; "bad" if a GPU in `words` is missing.

    `built` holds the GPU code in the libraries of the recipe's artifact; {} without an artifact.
    """
    row = None
    if built:
        subject, libraries = "its artifact here", dict(built)
    elif stack.cuda and stack.torch and stack.torch_origin != "conda" and stack.arch == "x86_64":
        row = load_rows().release(stack.torch, stack.arch)
        if row is None or row.cuda != stack.cuda or not row.code:
            text = f"whether it runs on {', '.join(words)} is known when it is built, or verified"
            return [finding("note", "gpus", text)] if words else []
        subject = f"PyPI's torch {row.version}"
        libraries = {name: Containers({tuple(codes): 1}) for name, codes in row.code.items()}
    else:
        return []
    if faults := gpu_faults(libraries, words):
        fix = "take another torch or CUDA, compile for them, or correct `gpus` of the target"
        return [finding("bad", "gpus", f"{subject}: {'; '.join(faults[:3])}", fix, by=row)]
    ways: dict[str, list[str]] = {NATIVE: [], PTX: []}
    for chip in load_chips().values():
        needed = (library for path, library in libraries.items() if is_judged(library, chip) and not is_optional(path))
        runs = {library_runs(library, chip) for library in needed}
        if runs and "" not in runs and chip.accelerator == ("rocm" if stack.rocm else "cuda"):
            ways[PTX if PTX in runs else NATIVE].append(chip.name)
    run_text = "; ".join(f"{way} on {', '.join(chips)}" for way, chips in ways.items() if chips)
    if some := gpu_faults(libraries, words, optional=True):
        run_text += f"; not all need this: {some[0]}"
    return [
        finding("good" if words else "note", "gpus", f"{subject} runs {run_text or 'on no GPU that is known'}", by=row)
    ]


_NCCL_IS = {
    "pin": "torch's pin",
    "lock": "in the lock",
    "wheel": "the recipe's wheel",
    "source": "built from source",
    "host": "the host's",
    "conda": "conda's",
}
_TITLES = {"plugin": "aws-ofi-nccl", "cuda": "CUDA", "rocm": "ROCm", "python": "Python", "nccl": "NCCL"}


def judge(stack: Stack, rows: Rows | None = None) -> list[CompatFinding]:
    """Judge `stack` by `rows` (default: data/compatibility.toml). A malformed version gives "unknown", no error."""
    rows = rows or load_rows()
    links = (
        _glibc_links,
        _driver_links,
        _torch_links,
        _rocm_links,
        _nccl_links,
        _net_api_links,
        _libfabric_links,
        _provider_links,
        _rule_links,
        _release_links,
    )
    return [compat_finding for link in links for compat_finding in link(stack, rows)]


def _glibc_links(stack: Stack, rows: Rows) -> list[CompatFinding]:
    """Check the target's glibc against that of torch's wheels."""
    if stack.torch is None or stack.torch_origin == "conda":
        return []
    row = rows.torch_build(stack.torch, stack.arch)
    low = older(stack.glibc, row.glibc) if row else None
    if row is None or low is None:
        return []
    wheels = f"torch {stack.torch}'s wheels for {stack.arch} need glibc {row.glibc}"
    if not low:
        return [finding("good", "glibc", f"{wheels}; hosts have {stack.glibc} or newer", by=row)]
    if stack.torch_origin == "lock":
        text = f"{wheels}, the locked one says that {stack.glibc} is enough: it is another build"
        return [finding("unknown", "glibc", text, by=row)]
    fix = f'set glibc = "{row.glibc}" or newer in the target, and use hosts that have it'
    return [finding("bad", "glibc", f"{wheels}, the target allows {stack.glibc} at most", fix, by=row)]


def _driver_links(stack: Stack, rows: Rows) -> list[CompatFinding]:
    """Check the driver of the nodes, if it is known."""
    if stack.cuda is None:
        return []
    row = next((row for row in rows.drivers if matches(stack.cuda, row.cuda)), None)
    if row is None:
        text = f"no row says which driver CUDA {stack.cuda} needs"
        return [finding("unknown", "driver", text, "see NVIDIA's CUDA release notes")]
    need = f"CUDA {stack.cuda} needs driver {row.minimum} or newer"
    if stack.driver is None:
        return [finding("note", "driver", f"{need} on the nodes; `--driver VERSION` judges one", by=row)]
    low = older(stack.driver, row.minimum)
    if low is None:
        fix = "give it as nvidia-smi prints it: 550.54.15"
        return [finding("unknown", "driver", f"{need}; {stack.driver!r} is not a version", fix)]
    if not low:
        return [finding("good", "driver", f"{need}: {stack.driver}", by=row)]
    fix = f"update the driver to {row.minimum} or newer, or take a target of an older CUDA"
    return [finding("bad", "driver", f"{need}, the nodes have {stack.driver}", fix, by=row)]


def _torch_links(stack: Stack, rows: Rows) -> list[CompatFinding]:
    """Check that torch is built for the target's CUDA."""
    if stack.cuda is None:
        return []
    if stack.torch is None and stack.base:
        text = "torch, its NCCL and CUDA are what the base image has; envbuild does not know them"
        return [finding("note", "torch", text)]
    if stack.torch is None:
        return [_no_torch()]
    torch_title = f"torch {stack.torch}"
    if stack.torch_origin == "conda":
        text = f"{torch_title} comes from conda, whose solver matched its build with CUDA and NCCL"
        return [finding("note", "torch", text)]
    row = rows.torch_build(stack.torch, stack.arch)
    if row is None and rows.is_newer(stack.torch):
        text = (
            f"{torch_title} is newer than torch {rows.newest_torch}, the newest that this envbuild knows ({rows.read})"
        )
        return [finding("unknown", "torch", text, "update envbuild, or run `tools/refresh` in its checkout")]
    if row is None:
        text = f"no row says which CUDA {torch_title} is built for on {stack.arch}"
        return [finding("unknown", "torch", text, LOOK_IT_UP)]
    if stack.cuda in row.cuda:
        text = f"{torch_title} is built for CUDA {stack.cuda} on {stack.arch}: {_index(stack.cuda, row)}"
        return [finding("good", "torch", text, by=row)]
    text = f"{torch_title} is built for CUDA {', '.join(row.cuda) or 'none that is known'} on {stack.arch}"
    if not row.complete:
        text = f"{text}; whether for {stack.cuda} too is not known"
        return [finding("unknown", "torch", text, LOOK_IT_UP, by=row)]
    if stack.torch_origin == "lock" and f"+{_tag(stack.cuda)}" in stack.torch:
        text = f"PyTorch's {text}; the locked one for {stack.cuda} is another build"
        return [finding("unknown", "torch", text, by=row)]
    near = " or ".join(f"{_tag(cuda)}-{stack.arch}" for cuda in row.cuda)
    fix = f"take a torch that is built for CUDA {stack.cuda} there, or the target {near}"
    return [finding("bad", "torch", f"{text}, not {stack.cuda}", fix, by=row)]


def _no_torch() -> CompatFinding:
    text = "no torch is pinned or locked: which build it will be is not known"
    return finding("unknown", "torch", text, "pin torch in the recipe, or make the lock with `envbuild lock`")


def _tag(cuda: str) -> str:
    return f"cu{cuda.replace('.', '')}"


def _index(cuda: str, row: TorchBuild) -> str:
    if row.default == cuda:
        return "the plain wheel of the default index"
    plain = "for CPUs" if row.default == "cpu" else f"for CUDA {row.default}"
    return f"{torch_index(_tag(cuda))} has it" + (f" (the plain wheel is {plain})" if row.default else "")


def _rocm_links(stack: Stack, rows: Rows) -> list[CompatFinding]:
    """Check torch's build for ROCm, and name the RCCL inside it."""
    if stack.rocm is None:
        return []
    if stack.torch is None:
        return [_no_torch()]
    torch_title = f"torch {stack.torch}"
    if stack.torch_origin == "conda":
        return [finding("note", "torch", f"{torch_title} comes from conda, whose solver matched its build")]
    row, rccl = row_of(rows.torch_rocm, stack.torch), rows.rccl_of(stack.rocm)
    if row is None or stack.rocm not in row.rocm:
        text = f"no row says that {torch_title} is built for ROCm {stack.rocm}"
        build = finding("unknown", "torch", text, LOOK_IT_UP)
    else:
        text = f"{torch_title} is built for ROCm {stack.rocm}: {torch_index(f'rocm{stack.rocm}')} has it"
        build = finding("good", "torch", text, by=row)
    if rccl is None:
        text = f"no row says which RCCL ROCm {stack.rocm} has"
        return [build, finding("unknown", "nccl", text, LOOK_IT_UP)]
    text = f"ROCm {stack.rocm} has RCCL {rccl.nccl}, inside torch's wheel"
    return [build, finding("good", "nccl", text, by=rccl)]


def _nccl_links(stack: Stack, rows: Rows) -> list[CompatFinding]:
    """Check that the NCCL of the stack is not older than the one that torch pins."""
    if stack.nccl is None or stack.cuda is None or not stack.torch or stack.torch_origin == "conda":
        return []
    row = rows.pin(stack.torch, stack.cuda)
    nccl_title = f"NCCL {stack.nccl} ({_NCCL_IS.get(stack.nccl_origin, stack.nccl_origin)})"
    torch = f"torch {stack.torch} for CUDA {stack.cuda}"
    if row is None and rows.is_newer(stack.torch):
        return []  # the link to torch says so
    if row is None:
        return [finding("unknown", "nccl", f"{nccl_title}: no row says which NCCL {torch} pins", LOOK_IT_UP)]
    low, pins = older(stack.nccl, row.nccl), f"{torch} pins {row.nccl}"
    if low is None:
        return [finding("unknown", "nccl", f"{nccl_title} cannot be compared: {pins}", LOOK_IT_UP)]
    if low:
        text = f"{nccl_title} is older than torch's: {pins}, and torch may call what it lacks"
        fix = f'set version = "{row.nccl}" or newer in [layers.nccl], or leave the layer out'
        return [finding("bad", "nccl", text, fix, by=row)]
    if stack.nccl_origin == "pin":
        inside = ", inside its wheel" if stack.nccl_in == "inside" else ""
        return [finding("good", "nccl", f"{pins}{inside}", by=row)]
    return [finding("good", "nccl", f"{nccl_title}: {pins}; all ranks must have the same", by=row)]


def _net_api_links(stack: Stack, rows: Rows) -> list[CompatFinding]:
    """Check that NCCL and its plugin have a net API in common."""
    if stack.plugin is None:
        return []
    plugin, nccl = row_of(rows.plugins, stack.plugin), row_of(rows.nccl, stack.nccl)
    plugin_title = f"aws-ofi-nccl {stack.plugin}"
    if plugin is None:
        return [finding("unknown", "plugin", f"no row says which net APIs {plugin_title} has", LOOK_IT_UP)]
    if stack.nccl is None:
        text = f"{plugin_title} has net API {_span(plugin.apis)}; which NCCL opens it is not known"
        return [finding("unknown", "plugin", text, "pin torch, or make the lock with `envbuild lock`")]
    if nccl is None:
        text = f"no row says which net APIs NCCL {stack.nccl} speaks; {plugin_title} has {_span(plugin.apis)}"
        return [finding("unknown", "plugin", text, LOOK_IT_UP)]
    both = set(nccl.apis) & set(plugin.apis)
    source, date = f"{nccl.source}; {plugin.source}", max(nccl.date, plugin.date)
    speak = f"NCCL {stack.nccl} speaks net API {_span(nccl.apis)}, {plugin_title} has {_span(plugin.apis)}"
    if both:
        library = plugin.library if stack.rocm is None else "librccl-net-ofi.so"
        text = f"{speak}: v{max(both)} is used, from {library}"
        return [CompatFinding("good", "plugin", text, "", source, date)]
    newest = max((row.versions for row in rows.plugins if set(row.apis) & set(nccl.apis)), default="")
    fix = f"take {f'aws-ofi-nccl {newest}' if newest else 'another aws-ofi-nccl'}, or another NCCL"
    text = f"{speak}: they have none in common, and NCCL falls back to sockets"
    return [CompatFinding("bad", "plugin", text, fix, source, date)]


def _span(apis: tuple[int, ...]) -> str:
    return f"v{min(apis)} to v{max(apis)}" if len(apis) > 1 else f"v{min(apis, default=0)}"


def _libfabric_links(stack: Stack, rows: Rows) -> list[CompatFinding]:
    """Check libfabric against the plugin, and name its symbol version."""
    if stack.libfabric is None:
        if stack.plugin is None:
            return []
        text = f"aws-ofi-nccl {stack.plugin} needs libfabric, and the recipe names none"
        fix = 'add [layers.libfabric], with kind = "host" where the nodes have it'
        return [finding("unknown", "libfabric", text, fix)]
    title, findings = f"libfabric {stack.libfabric}", []
    row, plugin = row_of(rows.libfabric, stack.libfabric), row_of(rows.plugins, stack.plugin)
    if plugin is not None:
        enough = matches(stack.libfabric, plugin.libfabric)
        need = f"aws-ofi-nccl {stack.plugin} needs libfabric {plugin.libfabric}"
        if enough is False:
            fix = f"take libfabric {plugin.libfabric} ([layers.libfabric] version)"
            findings.append(finding("bad", "libfabric", f"{need}, here is {stack.libfabric}", fix, by=plugin))
        elif enough:
            findings.append(finding("good", "libfabric", f"{need}: {stack.libfabric}", by=plugin))
    if row is None:
        return [*findings, finding("unknown", "libfabric", f"no row says what {title} has", LOOK_IT_UP)]
    if stack.libfabric_origin == "host":
        text = (
            f"{title} is the nodes': what is built against it must run with symbol version {row.symbol}"
            " at most; build it with the headers in its own folder"
        )
    else:
        text = f"{title} has symbol version {row.symbol}: what is built against it needs that where it runs"
    return [*findings, finding("note", "libfabric", text, by=row)]


def _provider_links(stack: Stack, rows: Rows) -> list[CompatFinding]:
    """Check that NCCL supports the recipe's fabric, itself or through a libfabric provider."""
    fabric = load_fabrics().get(stack.fabric)
    if fabric is None:
        return [finding("unknown", "fabric", f"no row says what fabric {stack.fabric!r} needs", LOOK_IT_UP)]
    if not fabric.provider:
        text = f"NCCL speaks {stack.fabric!r} by itself"
        if fabric.nccl_net and stack.plugin is not None:
            return [finding("note", "fabric", f"{text}; aws-ofi-nccl is built and not used", by=fabric)]
        return [finding("good", "fabric", text, by=fabric)] if fabric.nccl_net and stack.gpus else []
    needs = f"fabric {stack.fabric!r} is libfabric's provider {fabric.provider!r}"
    findings = []
    if stack.gpus and stack.plugin is None:
        fix = "add [layers.aws-ofi-nccl] and [layers.libfabric], or set another fabric"
        if stack.base:
            text = f"{needs}; whether the base image has aws-ofi-nccl is not known"
            findings.append(finding("unknown", "fabric", text, f"see that it has, or {fix}"))
        else:
            text = f"{needs}, and nothing brings aws-ofi-nccl, by which NCCL reaches it"
            findings.append(finding("bad", "fabric", text, fix, by=fabric))
    row = row_of(rows.libfabric, stack.libfabric)
    if row is None:
        return findings
    if fabric.provider in row.providers:
        text = f"{needs}, which libfabric {stack.libfabric} has"
        return [*findings, finding("good", "fabric", text, by=row)]
    have = [libfabric.versions for libfabric in rows.libfabric if fabric.provider in libfabric.providers]
    fix = f"take libfabric {have[0]} or newer" if have else "set another fabric"
    text = f"{needs}, which libfabric {stack.libfabric} does not have"
    return [*findings, finding("bad", "fabric", text, f"{fix} ([layers.libfabric] version)", by=row)]


def _rule_links(stack: Stack, rows: Rows) -> list[CompatFinding]:
    findings = []
    for rule in rows.rules:
        if applies(rule, stack):
            has = ", ".join(_said(name, stack) for name in rule.when)
            findings.append(finding(rule.status, rule.subject, f"{rule.reason} ({has})", rule.fix, by=rule))
    return findings


def _release_links(stack: Stack, rows: Rows) -> list[CompatFinding]:
    """Check the requirements of releases on the default index, and the Pythons for which they have wheels."""
    findings = []
    release = rows.release(stack.torch, stack.arch) if stack.torch and stack.torch_origin == "recipe" else None
    if release and UNKNOWN not in release.python and stack.python not in release.python:
        pythons = f"Python {_range(release.python)} on {stack.arch}, not {stack.python}"
        having = [
            release.version
            for release in rows.releases
            if release.arch == stack.arch and stack.python in release.python
        ]
        fix = f'take torch {having[-1]}, or set python = "{release.python[-1]}"' if having else "take another Python"
        text = f"torch {release.version} has wheels for {pythons}"
        findings.append(finding("bad", "packages", text, fix, by=release))
    versions = dict(stack.packages)
    for row in rows.packages:
        if key(versions.get(row.name, "")) != key(row.version) or stack.torch_origin == "conda":
            continue
        title = f"{row.name} {row.version}"
        if stack.torch and matches(stack.torch, row.torch) is False:
            text, required = f"{title} requires torch{row.torch}, here is {stack.torch}", row.torch.removeprefix("==")
            fix = f"take torch {required}, or another {row.name}"
            findings.append(finding("bad", "packages", text, fix, by=row))
        if matches(stack.python, row.requires_python) is False or (row.wheels and stack.python not in row.wheels):
            pythons = _range(row.wheels) if row.wheels else row.requires_python
            fix = f"take another {row.name}, or another Python"
            text = f"{title} is for Python {pythons}, not {stack.python}"
            findings.append(finding("bad", "packages", text, fix, by=row))
    return findings


def _range(versions: tuple[str, ...]) -> str:
    return f"{versions[0]} to {versions[-1]}" if len(versions) > 1 else versions[0]


def applies(rule: CompatRule, stack: Stack) -> bool:
    """Return whether `rule` applies to `stack`: every value that the rule names is known and matches."""
    values = ((name, stack.value(name), condition) for name, condition in rule.when.items())
    return all(
        actual is not None and (actual == condition if name in EXACT else bool(matches(actual, condition)))
        for name, actual, condition in values
    )


def _said(name: str, stack: Stack) -> str:
    words = {
        "provider": f"provider {stack.provider}",
        "plugin_aws": "built for AWS",
        "libfabric_origin": f"libfabric from {stack.libfabric_origin}",
        "nccl_origin": f"NCCL is {_NCCL_IS.get(stack.nccl_origin, stack.nccl_origin)}",
        "nccl_in": "torch's NCCL is " + ("inside its wheel" if stack.nccl_in == "inside" else "a wheel of its own"),
        "fabric": f"fabric {stack.fabric}",
        "arch": stack.arch,
    }
    return words.get(name) or f"{_TITLES.get(name, name)} {stack.value(name)}"
