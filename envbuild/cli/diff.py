"""`envbuild diff`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from envbuild.cli.common import log, print_json
from envbuild.cli.options import with_options
from envbuild.environment import load_environment

if TYPE_CHECKING:
    from envbuild.inspect.compare import Change, Comparison

_SIGNS = {"added": ("+", "green"), "removed": ("-", "red"), "changed": ("~", "yellow")}
_LINES = 40
# Fields of Comparison: name in JSON, name of one difference, of several.
_PARTS = {
    "settings": ("settings", "setting", "settings"),
    "built": ("source_built", "source-built layer", "source-built layers"),
    "conda": ("conda_packages", "conda package", "conda packages"),
    "python": ("python_packages", "Python package", "Python packages"),
    "debian": ("debian_packages", "Debian package", "Debian packages"),
    "files": ("files", "file", "files"),
}


@click.command("diff")
@click.argument("a")
@click.argument("b")
@click.option("--target", metavar="TARGET", help="Platform of multi-platform images.")
@click.option("--files/--no-files", default=True, help="Compare every file (default), or packages alone.")
@click.option("--all", "everything", is_flag=True, help=f"List all files, not the first {_LINES}.")
@with_options("json")
def diff_command(a: str, b: str, target: str | None, files: bool, everything: bool, as_json: bool) -> None:
    """Compare two artifacts of any kinds: settings, packages, files. Exit code 0 equal, 1 different.

    A and B are paths of venvs, conda environments, OCI layouts, image archives, squashfs images or SIFs, venv:DIR,
    conda:DIR, oci:DIR[:TAG], docker-archive:FILE, sqsh:FILE, sif:FILE, docker-daemon:NAME, docker://REGISTRY/NAME, or
    names of images in the docker daemon. A venv or conda environment is compared with the environment in an image, and
    a venv with a conda environment by their site-packages; what differs between two kinds by nature is left out, and
    said.

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
        digests = [about.digest or about.identity for about in (one.about, other.about)]
    if as_json:
        changes = {key: getattr(found, name) for name, (key, _, _) in _PARTS.items()}
        print_json(
            {
                "format": 1,
                "equal": found.equal,
                "a": {"artifact": a, "digest": digests[0]},
                "b": {"artifact": b, "digest": digests[1]},
                **{key: None if part is None else [one.as_json() for one in part] for key, part in changes.items()},
                "left_out": list(found.left_out),
                "notes": list(found.notes),
            }
        )
    else:
        _show(found, everything)
    if not found.equal:
        sys.exit(1)


def _show(found: Comparison, everything: bool) -> None:
    counts = []
    for name, (_, one, several) in _PARTS.items():
        if changes := getattr(found, name):
            counts.append(f"{len(changes)} {one if len(changes) == 1 else several}")
    same = "equal" if found.files is not None else "equal, files not compared"
    click.echo(f"different: {', '.join(counts)}" if counts else same)
    for name, (_, _, title) in _PARTS.items():
        changes = getattr(found, name) or ()
        shown = changes[:_LINES] if name == "files" and not everything else changes
        if shown:
            click.echo(f"{title}:")
        for change in shown:
            sign, colour = _SIGNS[change.kind]
            line = {"settings": _value, "files": _file}.get(name, _package)(change)
            click.echo(click.style(f"  {sign} {line}", fg=colour))
        if len(shown) < len(changes):
            click.echo(f"  … and {len(changes) - len(shown)} more; --all lists them")
    for note in found.notes:
        log(f"note: {note}")
    if found.left_out:
        log(f"not compared: {'; '.join(found.left_out)}")


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
