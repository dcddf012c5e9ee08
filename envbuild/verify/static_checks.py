"""Checks without a launch: the artifact's files by a survey, the commands of its source layers, the torch of a plan."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from envbuild.base import process
from envbuild.base.elf import machine_name
from envbuild.base.errors import EnvbuildError, UsageError
from envbuild.base.libraries import configured_folders, usual_folders
from envbuild.base.packages import record_digest
from envbuild.base.text import normalise
from envbuild.compat.host_stack import ArtifactLibraries
from envbuild.contract.installed import HOST, HostFiles
from envbuild.contract.state import IMAGE, PREFIX, BuiltLayer, State
from envbuild.gpus import UNREADABLE, Containers, all_chips, gpu_faults, is_judged, library_runs
from envbuild.image.limits import ImageLimits
from envbuild.layers.wheel import TRAINER_NAME, load_trainer
from envbuild.recipe.targets import Target, accelerator_fault, builds_title, survey_builds
from envbuild.verify.elf_files import folder_gpu_code
from envbuild.verify.image_file import open_image_file
from envbuild.verify.launch import run_program
from envbuild.verify.model import Check, Nodes, Subject, judge, listed, not_tried
from envbuild.verify.outside import ImageFiles, read_layers, read_squashfs
from envbuild.verify.survey import Survey, library_finder

_WRONG_FILES = ("altered", "missing", "unowned")
_KEPT_TEXT = 2000
_LAYER_TIMEOUT_S = 60.0
_READING_S = 3600.0
_SYSTEM = ("/", "/usr", "/usr/local")  # Pythons there are the nodes' own
_SHOWN, _KEPT = 5, 50


def check_built_torch(state: State, path: Path) -> None:
    """Raise UsageError when training would verify an environment without torch. Images pass: their base may have it."""
    if state.artifact != IMAGE and state.verify.trainer and not state.has_torch:
        raise UsageError(
            f"{path} cannot be verified: it has no torch, and verification trains with torch",
            f"add torch to the recipe {state.recipe}, or set `trainer = false` in its [verify], and build it again",
        )


def check_installed(subject: Subject, survey: Survey) -> Check:
    """Check that every distribution is the locked one, and every file has its recorded digest."""
    installed, files, layers = survey.distributions, survey.files, len(survey.layers)
    wrong = list(_installed_problems(subject.state, survey))
    slim = {name: dict(distribution.slim) for name, distribution in installed.items() if distribution.slim}
    built = f", {layers} source-built layer{'s' if layers > 1 else ''}" if layers else ""
    return judge(
        "installed",
        not wrong,
        seen="; ".join(wrong)
        or f"{len(installed)} packages{built}, {files.files} files, {files.bytes} bytes, all as locked",
        expected=f"{len(subject.state.packages)} packages exactly as locked, every file with its recorded sha256",
        evidence={
            "packages": {name: distribution.version for name, distribution in sorted(installed.items())},
            "files": files.files,
            "bytes": files.bytes,
            **({"slim": slim} if slim else {}),
            **{fault: getattr(files, fault)[:50] for fault in _WRONG_FILES},
        },
    )


def _installed_problems(state: State, survey: Survey) -> Iterator[str]:
    locked = {name: (version, record) for name, version, record in state.packages}
    for name in sorted(locked.keys() | survey.distributions.keys()):
        version, record = locked.get(name, ("nothing", ""))
        now = survey.distributions.get(name)
        if now is None or now.version != version:
            yield f"{name}: locked {version}, installed {now.version if now else 'nothing'}"
        elif now.record != record:
            yield f"{name} {version}: its RECORD is not the one that was installed"
    built = {layer.name: layer.files for layer in state.layers if layer.files}
    for name, files in built.items():
        if survey.layers.get(name) != files:
            yield f"layer {name}: the list of its files is not the one that was installed"
    yield from (f"layer {name}: not in the recipe" for name in sorted(survey.layers.keys() - built.keys()))
    for fault in _WRONG_FILES:
        paths = getattr(survey.files, fault)
        yield from (f"{fault} file {path}" for path in paths[:_SHOWN])
        if len(paths) > _SHOWN:
            yield f"{len(paths) - _SHOWN} more {fault} files"


def check_trainer(subject: Subject, survey: Survey) -> Check:
    """Check that the artifact's trainer is envbuild's; not tried for the trainer of another version of envbuild.

    This check compares the artifact's RECORD, `installed` compares the files with it.
    """
    own, installed = load_trainer(), survey.distributions.get(TRAINER_NAME)
    if installed and installed.version != own.version:
        return not_tried(
            "trainer", f"the artifact has {TRAINER_NAME} {installed.version}, not {own.version}, which trained here"
        )
    evidence = {"record": installed.record if installed else "", "expected": record_digest(own.entries()[-1][1])}
    same = evidence["record"] == evidence["expected"]
    seen, expected = (
        f"{TRAINER_NAME} {'is' if same else 'differs from'} envbuild's",
        f"{TRAINER_NAME} {own.version} of envbuild",
    )
    return judge("trainer", same, seen=seen, expected=expected, evidence=evidence)


def check_architecture(subject: Subject, survey: Survey) -> Check:
    """Check that every ELF file is for the target's processor architecture."""
    report = survey.elf
    wrong = [f"{path} is {machine}" for path, machine in report.foreign]
    counts = ", ".join(f"{count} files for {name}" for name, count in report.counts.items())
    return judge(
        "architecture",
        not wrong and bool(report.counts),
        seen=listed(wrong) or counts or "no ELF file at all",
        expected=f"every ELF file for {subject.target.arch}",
        evidence={"counts": report.counts, "foreign": wrong[:50]},
    )


def check_accelerator(subject: Subject, survey: Survey) -> Check:
    """Check that the artifact's own torch is built for the target; a base image's torch is not judged."""
    target, torch_rows = subject.target, survey.elf.torch
    builds: dict[str, str] = {}
    fault, seen = None, "no torch of its own"
    if torch_rows is not None:
        builds = survey_builds(torch_rows)
        exact = not subject.state.of_conda
        fault = accelerator_fault(target.name, builds, torch_rows, exact=exact)
        seen = f"torch {fault}" if fault else f"torch is built for {builds_title(builds) or 'CPUs'}"
    return judge(
        "accelerator",
        fault is None,
        seen=seen,
        expected=f"torch built for {' '.join(filter(None, (target.family.title, target.version)))}",
        evidence={"cuda": None, **builds, "libraries": [name for name in torch_rows or [] if "=" not in name]},
    )


def check_gpus(subject: Subject, survey: Survey, words: tuple[str, ...]) -> Check:
    """Check that every library with code for GPUs has code for each of the GPUs in `words`."""
    libraries, faults = survey.elf.gpu_code, gpu_faults(survey.elf.gpu_code, words)
    unread = [path for path, containers in libraries.items() if (UNREADABLE,) in containers]
    ways = [
        f"{chip.name}: {', '.join(f'{count} libraries {way}' for way, count in sorted(ways_of.items()) if way)}"
        for chip in all_chips(words)
        if (
            ways_of := Counter(
                library_runs(library, chip) for library in libraries.values() if is_judged(library, chip)
            )
        )
    ]
    good = "; ".join(ways) or f"{len(libraries)} libraries have code for GPUs"
    if not words:
        good += "; no GPUs are named to compare it with"
    if some := gpu_faults(libraries, words, optional=True):
        good += f"; not all need these: {listed(some)}"
    if unread:
        good += f"; not read, because their code is compressed: {', '.join(unread[:_SHOWN])}"
    return judge(
        "gpus",
        not faults,
        seen=listed(faults) or good,
        expected=f"code for {', '.join(words) or 'GPUs'} in every library that has code for GPUs",
        evidence={
            "gpus": list(words),
            "libraries": {
                path: {" ".join(codes): count for codes, count in sorted(code_counts.items())}
                for path, code_counts in sorted(libraries.items())
            },
        },
    )


def read_gpu_files(path: Path, target: Target, limits: ImageLimits) -> dict[str, Containers]:
    """Return the containers of each library in the folder or image file at `path`. Raises BuildError (damaged)."""
    if path.is_dir():
        return folder_gpu_code(path, target)
    return folder_gpu_code(Path("/", PREFIX), target, _read_file(path, limits, gpu=True))


def _read_file(path: Path, limits: ImageLimits, *, gpu: bool = False) -> ImageFiles:
    offset = open_image_file(path).offset
    with path.open("rb") as stream:
        return read_squashfs(stream, offset, str(path), limits, _READING_S, gpu=gpu)


def read_libraries(place: Path, limits: ImageLimits) -> ArtifactLibraries:
    """Return the libraries of the environment or image file at `place`. Raises BuildError (damaged), UsageError."""
    return _libraries_of(str(place), HOST if place.is_dir() else _read_file(place, limits))


def image_libraries(
    image: str, layers: Iterable[tuple[str, Path]], env: Mapping[str, str], limits: ImageLimits
) -> ArtifactLibraries:
    """Return the libraries of an image as `read_libraries`; for its parts see `read_layers`."""
    return _libraries_of(image, read_layers(layers, image, env, limits, _READING_S))


def _libraries_of(artifact: str, files: HostFiles | ImageFiles) -> ArtifactLibraries:
    isolated = isinstance(files, ImageFiles)
    root, folders = f"/{PREFIX}" if isolated else os.path.abspath(artifact), list[str]()
    paths, find = [*files.walk("/" if isolated else root)], library_finder(files, {})
    pythons = [f"{root}/bin/python", *(["/usr/bin/python3"] if isolated else [])]
    program = next((path for path in pythons if (elf := find(path)) and not elf.fault), "")
    base = os.path.dirname(os.path.dirname(files.real(program))) if program else ""
    base = "" if isolated or base in _SYSTEM else base
    program = files.real(program) if (isolated and program) or base else program  # for $ORIGIN, as the kernel names it
    libraries = (path for path in [program, *paths] if path == program or ".so" in path)
    known = next((elf for elf in map(find, libraries) if elf and not elf.fault), None)
    if known is None:
        raise UsageError(f"{artifact} has no libraries", "give a venv, a conda environment or an image with Python")
    if isolated:
        folders = [*configured_folders(files.names, files.read), *usual_folders(machine_name(known.machine))]
    return ArtifactLibraries(root, known.machine, find, paths, isolated, program, base, files.library_path(), folders)


def check_layer(layer: BuiltLayer, nodes: Nodes, work: Path) -> Check:
    """Check that a source layer's own command exits with 0 on a node, and fi_info reports the requested provider."""
    program, *arguments = layer.check
    log = work / f"layer-{layer.name}.log"
    asks = os.path.basename(program) == "fi_info" and "-p" in arguments[:-1]
    provider = arguments[arguments.index("-p") + 1] if asks else ""  # the provider
    code: int | None = None
    try:
        # FI_PROVIDER overrides the caller's: another provider would hide the requested one.
        chosen = {"FI_PROVIDER": provider} if provider else {}
        exit_code, ended = run_program(nodes, program, arguments, chosen, log, _LAYER_TIMEOUT_S)
        code = exit_code if ended else None
        text = log.read_text(encoding="utf-8", errors="replace").strip()
    except (OSError, EnvbuildError) as error:
        text = str(error)
    lines = text[-_KEPT_TEXT:].splitlines()[-process.TAIL_LINES :]
    good = code == 0 and (not provider or f"provider: {provider}" in text)
    seen = f"{layer.name} {layer.version}: " + ("did not end in time" if code is None else f"exit {code}")
    if good:
        seen += f", provider {provider}" if provider else ""
    else:
        seen += "\n" + ("\n".join(f"    {line}" for line in lines) or "    (it printed nothing)")
    return judge(
        f"layer:{layer.name}",
        good,
        title=" ".join(layer.check),
        seen=seen,
        expected="exit 0" + (f" and a line `provider: {provider}`" if provider else ""),
        evidence={"command": list(layer.check), "returncode": code, "output": "\n".join(lines)},
    )


def check_linkage(subject: Subject, survey: Survey) -> Check:
    """Check symbols, versions, copies and stubs of libraries, and torch's pins of the libraries that it loads."""
    linkage = survey.linkage
    wrong = [*linkage.faults, *_broken_pins(subject, survey)]
    more = f"; {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
    base = ", ".join(f"{name} {version}" for name, version in linkage.base.items())
    return judge(
        "linkage",
        not wrong,
        seen="; ".join(wrong[:_SHOWN]) + more
        or f"{linkage.symbols} symbols of {linkage.libraries} libraries are defined; "
        f"they need {base or 'no C library'}",
        expected="every symbol and version defined where the loader looks, one NCCL and cuDNN, no stub of the driver",
        evidence={"base": linkage.base, "absent": dict(list(linkage.absent.items())[:_KEPT]), "faults": wrong[:_KEPT]},
    )


def _broken_pins(subject: Subject, survey: Survey) -> Iterator[str]:
    """Yield the requirements of torch that the installed versions do not fulfil; a newer NCCL is accepted."""
    if not survey.requires:  # as of a machine's own torch, which is tried by a Python without packages
        return
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.version import InvalidVersion, Version

    target = subject.target
    system = {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": target.arch, "extra": ""}
    for text in survey.requires:
        try:
            requirement = Requirement(text)
            name, python = normalise(requirement.name), {"python_version": subject.state.python}
            now = survey.distributions.get(name)
            if now is None or not re.fullmatch(target.family.wheels, name):
                continue
            if requirement.marker is not None and not requirement.marker.evaluate(system | python):
                continue
            newer = name.startswith(target.family.nccl_wheel or "\0") and any(
                specifier.operator == "==" and Version(now.version) > Version(specifier.version)
                for specifier in requirement.specifier
            )
        except (InvalidRequirement, InvalidVersion):
            continue
        if not newer and not requirement.specifier.contains(now.version, prereleases=True):
            yield f"torch requires {name}{requirement.specifier}, installed is {now.version}"
