"""Entries of a report: receipts, the data of the artifacts beside them, and the differences from an earlier receipt."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from envbuild.base.errors import EnvbuildError, UsageError
from envbuild.base.files import parse_json, read_small
from envbuild.compat.judge import gpu_findings, judge
from envbuild.contract.manifest import shown
from envbuild.contract.receipt import receipt_path, recorded_gpu_code
from envbuild.describe import bill_of_materials, receipt_of
from envbuild.environment import Environment
from envbuild.inspect.compare import Change, compare
from envbuild.inspect.facts import ArtifactReader, Inventory
from envbuild.inspect.reader import open_artifact
from envbuild.locks import locked_stack
from envbuild.recipe.find import find_recipe, search_folders
from envbuild.recipe.load import load_recipe
from envbuild.recipe.targets import Target
from envbuild.report.data import (
    WORDS,
    Changes,
    ReportEntry,
    SizedPackage,
    checks_of,
    is_receipt,
    moment,
    number_of,
    packages_of,
    step_seconds,
    text_of,
)

_SUFFIX = ".receipt.json"
_NAME = re.compile(r"\w[\w.-]*", re.ASCII)
_GROUPS = {
    "settings": "Settings",
    "built": "Source layers",
    "conda": "conda packages",
    "python": "Python packages",
    "debian": "Debian packages",
}
# What two receipts have in common that are compared over time.
_SERIES = ("recipe.name", "target", "artifact.kind")
_FACTS = {
    "lock": "lock.digest",
    "recipe": "recipe.digest",
    "artifact": "artifact.digest",
    "fabric": "fabric",
    "runtime": "runtime",
    "envbuild": "versions.envbuild",
    "Python": "versions.python",
    "torch": "versions.torch",
    "NCCL": "versions.nccl",
    "host": "host.name",
    "kernel": "host.kernel",
    "processors": "host.cpus",
}


def gather(named: Sequence[str], environment: Environment, against: str | None = None) -> list[ReportEntry]:
    """Return the entries of the artifacts and receipts `named`, each with its changes.

    Changes are relative to `against`, an artifact or receipt, or else to the next older of these receipts with the same
    recipe, target and kind. Raises UsageError for a path that is neither an artifact nor a receipt, or has no receipt.
    """
    entries = [read_entry(name, environment) for name in named]
    if against is not None:
        return [
            replace(entry, changes=_against(entry, name, against, environment))
            for entry, name in zip(entries, named, strict=True)
        ]
    return [replace(entry, changes=_since(entry, entries)) for entry in entries]


def read_entry(named: str, environment: Environment, before: Mapping[str, Any] | None = None) -> ReportEntry:
    """Return the entry of one artifact or receipt, with its changes since the receipt `before`."""
    path = Path(named)
    if not _is_document(path):
        with open_artifact(named, environment, None) as opened:
            beside = receipt_of(opened.about)
            if beside is None:
                raise UsageError(
                    f"{named} has no receipt beside it", f"`envbuild verify {named}` verifies it and writes its receipt"
                )
            entry = ReportEntry(read_receipt_of(Path(beside["path"])), beside["path"])
            entry = _with_artifact(entry, opened, beside, environment)
    else:
        entry = ReportEntry(read_receipt_of(path), named)
        artifact = path.with_name(path.name.removesuffix(_SUFFIX))
        if path.name.endswith(_SUFFIX) and artifact.exists():
            try:
                with open_artifact(str(artifact), environment, None) as opened:
                    entry = _with_artifact(entry, opened, receipt_of(opened.about), environment)
            except EnvbuildError as error:
                entry = replace(entry, notes=(f"The artifact beside the receipt cannot be read: {error.message}",))
    entry = _with_chain(entry, environment)
    if before is not None and before != entry.receipt:
        entry = replace(entry, changes=receipt_changes(before, entry.receipt, f"the receipt of {_when(before)}"))
    return entry


def read_receipt_of(path: Path) -> dict[str, Any]:
    """Return the receipt in a file, complete or not. Raises UsageError for any other file."""
    advice = f"give an artifact, or the file NAME{_SUFFIX} that a build or `envbuild verify` writes beside it"
    try:
        content = parse_json(read_small(path))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", advice) from None
    except ValueError as error:
        raise UsageError(f"{path} is not a receipt: it is not JSON: {error}", advice) from None
    if not is_receipt(content):
        raise UsageError(f"{path} is not a receipt: it has no `passed` and `checks`", advice)
    loaded: dict[str, Any] = content
    return loaded


def _is_document(path: Path) -> bool:
    return path.name.endswith(".json") and not path.is_dir()


def _with_artifact(
    entry: ReportEntry, opened: ArtifactReader, state: Mapping[str, Any] | None, environment: Environment
) -> ReportEntry:
    """Add the data of the artifact, as far as it can be read; `state` is whether the receipt belongs to it."""
    contents = opened.contents(hashes=False)
    notes = []
    if state is not None and state["changed"]:
        notes.append(f"Changed since it was verified: {shown(state['changed'])}.")
    elif state is not None and not state["matches"]:
        notes.append(
            "The receipt is that of another artifact than the one beside it; sizes and SBOM are the artifact's."
        )
    return replace(
        entry,
        packages=tuple(sized_packages(contents)),
        files=len(contents.files),
        size=contents.size,
        sbom=bill_of_materials(opened, contents, environment),
        notes=tuple(notes),
    )


def sized_packages(contents: Inventory) -> Iterator[SizedPackage]:
    """Yield the packages of an artifact, each once."""
    conda = {package.name: package for package in contents.conda}
    yield from (SizedPackage(record.name, record.version, "conda", record.size) for record in contents.conda)
    for python_package in contents.python:
        # conda's packages of Python code are counted there, under conda's names (pytorch, typing_extensions).
        stem = python_package.info.removesuffix(".dist-info")
        paths = (f"{stem}.dist-info/METADATA", f"{stem}.egg-info/PKG-INFO", f"{stem}.egg-info")
        same = python_package.name in conda and conda[python_package.name].version == python_package.version
        if not same and not any(path in contents.recorded for path in paths):
            yield SizedPackage(python_package.name, python_package.version, "Python", python_package.size)
    yield from (SizedPackage(built.name, built.version, "source layer") for built in contents.built)
    yield from (SizedPackage(package.name, package.version, "Debian") for package in contents.debian)


def _with_chain(entry: ReportEntry, environment: Environment) -> ReportEntry:
    """Add the findings of `envbuild check`, if the recipe is in a search folder of this host."""
    name = text_of(entry.receipt, "recipe.name")
    if not _NAME.fullmatch(name):  # never a path: a receipt must not choose files
        return entry
    try:
        loaded = load_recipe(find_recipe(name, search_folders(environment.site.recipe_folders)))
        target = Target.parse(text_of(entry.receipt, "target"))
        if target.name not in loaded.recipe.targets:
            return entry
        stack, basis = locked_stack(loaded, target)
        findings = judge(stack) + gpu_findings(
            stack, loaded.recipe.targets[target.name].gpus, recorded_gpu_code(entry.receipt)
        )
    except EnvbuildError:
        return entry
    if loaded.digest != text_of(entry.receipt, "recipe.digest"):
        basis += ", by the recipe on this host, which is another than the receipt's"
    return replace(entry, chain=tuple(findings), basis=basis)


def _since(entry: ReportEntry, others: Sequence[ReportEntry]) -> Changes | None:
    """Return the changes since the next older receipt of the same recipe, target and kind."""
    at = moment(entry.receipt)
    if at is None:
        return entry.changes
    older = [
        (then, number)
        for number, report_entry in enumerate(others)
        if all(text_of(report_entry.receipt, place) == text_of(entry.receipt, place) for place in _SERIES)
        and (then := moment(report_entry.receipt)) is not None
        and then < at
    ]
    if not older:
        return entry.changes
    before = others[max(older)[1]].receipt
    return receipt_changes(before, entry.receipt, f"the receipt of {_when(before)}")


def _when(receipt: Mapping[str, Any]) -> str:
    at = moment(receipt)
    return f"{at.day} {at:%b %Y, %H:%M:%S} UTC" if at else "an unknown time"


def _against(entry: ReportEntry, named: str, other: str, environment: Environment) -> Changes:
    """Return the changes since `other`: between the artifacts if both are available, else between the receipts."""
    if _is_document(Path(other)) or _is_document(Path(named)):
        before = read_entry(other, environment).receipt
        return receipt_changes(before, entry.receipt, f"{other}, {_when(before)}")
    with open_artifact(other, environment, None) as reader, open_artifact(named, environment, None) as two:
        comparison = compare(reader, two, files=False)
    groups = {title: getattr(comparison, name) for name, title in _GROUPS.items()}
    return Changes(other, groups, (*comparison.notes, "Files were not compared: `envbuild diff` does."))


def page_path(artifact: Path) -> Path:
    """Return the path of the page beside the receipt of `artifact`."""
    return receipt_path(artifact).with_name(f"{artifact.name}.report.html")


def receipt_changes(before: Mapping[str, Any], now: Mapping[str, Any], title: str) -> Changes:
    """Return the differences between two receipts."""
    statuses = [
        {
            text_of(check, "name"): WORDS.get(text_of(check, "status"), text_of(check, "status"))
            for check in checks_of(receipt)
        }
        for receipt in (before, now)
    ]

    def measured(receipt: Mapping[str, Any]) -> dict[str, str]:
        step, whole = step_seconds(receipt), number_of(receipt, "seconds")
        return ({"training step": f"{step * 1000:.3g} ms"} if step is not None else {}) | (
            {"verification": f"{whole:.1f} s"} if whole is not None else {}
        )

    def facts(receipt: Mapping[str, Any]) -> dict[str, str]:
        return {name: _short_digest(text) for name, place in _FACTS.items() if (text := text_of(receipt, place))}

    groups = {
        "Checks": _differing(*statuses),
        "Packages": _differing(packages_of(before), packages_of(now)),
        "Facts": _differing(facts(before), facts(now)),
        "Measurements": _differing(measured(before), measured(now)),
    }
    return Changes(title, groups)


def _differing(before: Mapping[str, str], now: Mapping[str, str]) -> list[Change]:
    names = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    return [Change(name, before.get(name), now.get(name)) for name in names]


def _short_digest(text: str) -> str:
    """Return a digest, shortened for display."""
    return f"{text[:19]}…" if text.startswith("sha256:") else text
