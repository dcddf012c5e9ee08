"""`envbuild diff`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from envbuild.cli.common import json_option, log, print_json
from envbuild.environment import load_environment

if TYPE_CHECKING:
    from envbuild.inspect.compare import Change, Comparison

_SIGNS = {"added": "+", "removed": "-", "changed": "~"}
_COLOURS = {"added": "green", "removed": "red", "changed": "yellow"}
_LINES = 40
_WHAT = {
    "settings": ("setting", "settings"),
    "built": ("source-built layer", "source-built layers"),
    "conda": ("conda package", "conda packages"),
    "python": ("Python package", "Python packages"),
    "debian": ("Debian package", "Debian packages"),
    "files": ("file", "files"),
}


@click.command("diff")
@click.argument("a")
@click.argument("b")
@click.option("--target", metavar="TARGET", help="Platform of multi-platform images.")
@click.option("--files/--no-files", default=True, help="Compare every file (default), or packages alone.")
@click.option("--all", "everything", is_flag=True, help=f"List all files, not the first {_LINES}.")
@json_option
def diff_command(a: str, b: str, target: str | None, files: bool, everything: bool, as_json: bool) -> None:
    """Compare two artifacts of any kinds: settings, packages, files. Exit code 0 equal, 1 different.

    A and B are paths of venvs, conda environments, OCI layouts, image archives, squashfs images or SIFs,
    venv:DIR, conda:DIR, oci:DIR[:TAG], docker-archive:FILE, sqsh:FILE, sif:FILE, docker-daemon:NAME,
    docker://REGISTRY/NAME, or names of images in the docker daemon. A venv or conda environment is compared with
    the environment in an image, and a venv with a conda environment by their site-packages; what differs between
    two kinds by nature is left out, and said.

    \b
    Examples:
      envbuild diff pt_cpu:cpu-x86_64 docker://registry.example.org/team/pt_cpu:2.13
      envbuild diff build/pt_cpu/cpu-x86_64/venv oci:image
      envbuild diff oci:image pt_cpu.sqsh
      envbuild diff old.tar new.tar --no-files --json
    """
    from envbuild.inspect.compare import compare
    from envbuild.inspect.reader import open_artifacts

    environment = load_environment()
    with open_artifacts((a, b), environment, target) as (one, other):
        found = compare(one, other, files=files)
        kinds = (one.about, other.about)
    if as_json:
        print_json(_as_json(found, a, b, *(about.digest or about.identity for about in kinds)))
    else:
        _show(found, everything)
    if not found.equal:
        sys.exit(1)


def _as_json(found: Comparison, a: str, b: str, digest_a: str, digest_b: str) -> dict[str, Any]:
    def table(changes: Sequence[Change]) -> list[dict[str, Any]]:
        return [change.as_json() for change in changes]

    return {
        "format": 1,
        "equal": found.equal,
        "a": {"artifact": a, "digest": digest_a},
        "b": {"artifact": b, "digest": digest_b},
        "settings": table(found.settings),
        "source_built": table(found.built),
        "conda_packages": table(found.conda),
        "python_packages": table(found.python),
        "debian_packages": table(found.debian),
        "files": None if found.files is None else table(found.files),
        "left_out": list(found.left_out),
        "notes": list(found.notes),
    }


def _show(found: Comparison, everything: bool) -> None:
    click.echo(_summary(found))
    _section("settings", found.settings, _value)
    _section("source-built layers", found.built, _package)
    _section("conda packages", found.conda, _package)
    _section("Python packages", found.python, _package)
    _section("Debian packages", found.debian, _package)
    files = found.files or ()
    shown = files if everything else files[:_LINES]
    _section("files", shown, _file)
    if len(shown) < len(files):
        click.echo(f"  … and {len(files) - len(shown)} more; --all lists them")
    for note in found.notes:
        log(f"note: {note}")
    if found.left_out:
        log(f"not compared: {'; '.join(found.left_out)}")


def _summary(found: Comparison) -> str:
    counts = []
    for name, (one, several) in _WHAT.items():
        changes = getattr(found, name)
        if changes:
            counts.append(f"{len(changes)} {one if len(changes) == 1 else several}")
    if counts:
        return f"different: {', '.join(counts)}"
    return "equal" if found.files is not None else "equal, files not compared"


def _section(title: str, changes: Sequence[Change], line: Callable[[Change], str]) -> None:
    if not changes:
        return
    click.echo(f"{title}:")
    for change in changes:
        text = f"  {_SIGNS[change.kind]} {line(change)}"
        click.echo(click.style(text, fg=_COLOURS[change.kind]))


def _value(change: Change) -> str:
    if change.before is None or change.after is None:
        return f"{change.name}: {change.after if change.before is None else change.before}"
    if change.before == change.after:
        return f"{change.name}: {change.before} (hidden, another value)"
    return f"{change.name}: {change.before} -> {change.after}"


def _package(change: Change) -> str:
    if change.before is None or change.after is None:
        return f"{change.name} {change.after if change.before is None else change.before}"
    if change.what:
        return f"{change.name} {change.before}, same version, other content"
    return f"{change.name} {change.before} -> {change.after}"


def _file(change: Change) -> str:
    name = _printable(change.name)
    if change.what is None:
        return f"{name} ({change.after if change.before is None else change.before})"
    parts = [
        part if part == "content" else f"{part} {before or '-'} -> {after or '-'}"
        for part, (before, after) in change.what.items()
    ]
    return f"{name}: {', '.join(map(_printable, parts))}"


def _printable(text: str) -> str:
    """Return `text` with control characters, which could move a terminal's cursor, and invalid UTF-8 escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in text)  # fmt: skip
