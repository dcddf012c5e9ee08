"""Checks on the artifact's files, from a survey of them."""

from __future__ import annotations

from envbuild.artifacts.survey import Survey
from envbuild.verify.model import Check, judge
from envbuild.verify.subject import Subject

_SHOWN = 5


def check_installed(subject: Subject, survey: Survey) -> Check:
    """Check that every distribution is the locked one, and every file has its recorded digest."""
    found = survey.distributions
    wanted = {name: (version, record) for name, version, record in subject.state.packages}
    wrong: list[str] = []
    for name in sorted(wanted.keys() | found.keys()):
        version, record = wanted.get(name, ("nothing", ""))
        now = found.get(name)
        if now is None or now.version != version:
            wrong.append(f"{name}: locked {version}, installed {now.version if now else 'nothing'}")
        elif now.record != record:
            wrong.append(f"{name} {version}: its RECORD is not the one that was installed")
    for layer in subject.state.layers:
        if layer.files and survey.layers.get(layer.name) != layer.files:
            wrong.append(f"layer {layer.name}: the list of its files is not the one that was installed")
    built = {layer.name for layer in subject.state.layers if layer.files}
    wrong += [f"layer {name}: not in the recipe" for name in sorted(survey.layers.keys() - built)]
    files = survey.files
    for what, paths in (("altered", files.altered), ("missing", files.missing), ("unowned", files.unowned)):
        wrong += [f"{what} file {path}" for path in paths[:_SHOWN]]
        if len(paths) > _SHOWN:
            wrong.append(f"{len(paths) - _SHOWN} more {what} files")
    return judge(
        "installed",
        "installed = locked",
        not wrong,
        seen="; ".join(wrong)
        or f"{len(found)} packages{_layers(survey)}, {files.files} files, {files.bytes} bytes, all as locked",
        expected=f"{len(wanted)} packages exactly as locked, every file with its recorded sha256",
        cause="something was installed, upgraded or edited after the build (pip install inside the venv, a "
        "partial copy, a full disk); build it again, and put additions into the recipe",
        evidence={
            "packages": {name: d.version for name, d in sorted(found.items())},
            "files": files.files,
            "bytes": files.bytes,
            "altered": files.altered[:50],
            "missing": files.missing[:50],
            "unowned": files.unowned[:50],
        },
    )


def _layers(survey: Survey) -> str:
    count = len(survey.layers)
    return f", {count} source-built layer{'s' if count > 1 else ''}" if count else ""


def check_architecture(subject: Subject, survey: Survey) -> Check:
    """Check that every ELF file is for the target's processor architecture."""
    report = survey.elf
    wanted = subject.target.arch
    shown = [f"{path} is {machine}" for path, machine in report.foreign]
    return judge(
        "architecture",
        "architecture of every ELF file",
        not shown and bool(report.counts),
        seen="; ".join(shown[:_SHOWN]) + (f"; {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else "")
        or ", ".join(f"{count} files for {name}" for name, count in report.counts.items())
        or "no ELF file at all",
        expected=f"every ELF file for {wanted}",
        cause="a wheel tagged for any platform carries a library of another one, or the environment was "
        "copied from a node of another architecture (login x86_64, compute aarch64)",
        evidence={"counts": report.counts, "foreign": shown[:50]},
    )
