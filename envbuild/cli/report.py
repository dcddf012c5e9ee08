"""`envbuild report`, and --report of the commands that build or verify."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from envbuild.base.atomic import write_beside
from envbuild.base.errors import BuildError, UsageError, VerificationError
from envbuild.base.progress import display, log
from envbuild.base.text import human_size, human_time
from envbuild.cli import complete
from envbuild.cli.common import BESIDE, PATH, Names, check_out
from envbuild.contract.kinds import ARTIFACTS
from envbuild.contract.manifest import read_manifest
from envbuild.contract.receipt import passed_line, read_receipt, receipt_path
from envbuild.environment import Environment
from envbuild.run_environment import load_environment

if TYPE_CHECKING:
    from envbuild.report.data import ReportEntry


def summarise(title: str, made: Mapping[str, Any]) -> None:
    """Print the summary of a build of `title` to stderr, from the object that `--json` prints."""
    size = _size(Path(made["path"]))
    rows = [
        ("built", f"{title} for {made['target']}"),
        ("path", _near(made["path"])),
        ("size", human_size(size) if size else ""),
        ("digest", made["digest"]),
        ("checks", _checks(made["receipt"])),
        ("receipt", _near(made["receipt"] or "")),
        ("time", human_time(made["seconds"])),
        ("reused", _reused(display().reused)),
    ]
    # A digest begins in column 9, so that it ends in column 80.
    log("\n".join(["", *(f"{name:<7}  {text}" for name, text in rows if text)]))


def _near(path: str) -> str:
    """Return a path from the current folder, if it is below that."""
    return path.removeprefix(os.path.join(os.getcwd(), ""))


def _size(path: Path) -> int | None:
    if path.is_file():
        return path.stat().st_size
    with suppress(BuildError, OSError):
        if (manifest := read_manifest(path)) is not None:
            return sum(row.size for row in manifest.rows.values())
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())  # an OCI layout
    return None


def _checks(receipt: str | None) -> str:
    """Return the checks that passed, from the receipt at that path; they may be those of an earlier build."""
    if receipt is None:
        return "not verified"
    with suppress(OSError, ValueError, LookupError, TypeError):
        content = read_receipt(Path(receipt))
        return f"{passed_line(content)}, {human_time(content['seconds'])}, {content['verified_at']}"
    return ""


def _reused(parts: Mapping[str, Mapping[str, bool]]) -> str:
    """Return how many parts of each kind were there before: "9 of 10 wheels, 5 of 5 layers"."""
    return ", ".join(f"{sum(there.values())} of {len(there)} {kind}" for kind, there in parts.items())


@click.command("report")
@click.argument(
    "named",
    metavar="RECIPE|ARTIFACT|RECEIPT…",
    nargs=-1,
    required=True,
    shell_complete=complete.recipes_artifacts_or_receipts,
)
@click.option("--out", type=PATH, default="report.html", show_default=True, metavar="FILE", help="Path of the page.")
@click.option(
    "--against",
    metavar="RECIPE|ARTIFACT|RECEIPT",
    shell_complete=complete.recipes_artifacts_or_receipts,
    help="Show the changes since this artifact or receipt.",
)
@click.option("--open", "show_it", is_flag=True, help="Open the page in the browser.")
def report_command(named: Names, out: Path, against: str | None, show_it: bool) -> None:
    """Write receipts as one HTML page: verdict, checks with evidence, training, packages, SBOM.

    The page is one file without scripts or external resources; it works from a disk, as a CI artifact, on a phone and
    on paper. It includes sizes of packages and the SBOM if the artifact is present. A page of several receipts begins
    with a grid of their verdicts, and each receipt shows its changes since the one before it.

    \b
    Examples:
      envbuild report pt_cpu
      envbuild report build/*/*/*.receipt.json --out report.html --open
      envbuild report pytorch.sqsh --against old.sqsh
    """
    from envbuild.report.gather import gather

    if against is not None and len(named) > 1:
        raise UsageError("--against compares one artifact or receipt", "name one, or leave out --against")
    check_out(out)
    environment = load_environment()
    artifacts = [_documented(path, environment) for path in named]
    _write(gather(artifacts, environment, against and _documented(against, environment)), out)
    if show_it:
        import webbrowser

        if not webbrowser.open(out.absolute().as_uri()):
            log(f"no browser could be started; open {out} by hand")
    click.echo(out)


def _documented(text: str, environment: Environment) -> str:
    """Return `text`, or the artifact that was built of it if it is a recipe."""
    from envbuild.build.built import find_built

    built = find_built(text, tuple(ARTIFACTS), site_folders=environment.site.recipe_folders)
    return text if built is None else built.documented


@contextmanager
def reported(file: str | None, places: Sequence[Path], environment: Environment | None = None) -> Iterator[None]:
    """Write the page of the receipts that the block writes beside `places`, whether it passes or fails verification.

    `file` is the page's path, BESIDE for one beside the receipt, None for no page.
    """
    if file is None or not places:
        yield
        return
    from envbuild.build.commit import failed_path
    from envbuild.report.gather import page_path, read_entry

    usual = page_path(places[0]) if len(places) == 1 else places[0].with_name("report.html")
    page = usual if file == BESIDE else Path(file)
    if file != BESIDE:  # the folder of receipts is made by the build
        check_out(page, "--report")
    where = environment or load_environment()
    passing = {path: receipt_path(place) for place in places for path in map(receipt_path, (place, failed_path(place)))}
    before, receipts = {path: _state(path) for path in passing}, {path: _loaded(path) for path in passing}

    def write(paths: Sequence[Path]) -> None:
        if paths:
            # A failed one is compared with the passing one before it.
            _write([read_entry(str(path), where, receipts[path] or receipts[passing[path]]) for path in paths], page)
            log(f"report: {page}")

    try:
        yield
    except VerificationError:
        write([path for path, state in before.items() if _state(path) not in (None, state)])
        raise
    write([path for path in map(receipt_path, places) if path.exists()])


def _write(entries: Sequence[ReportEntry], page: Path) -> None:
    from envbuild.report.page import report_page

    write_beside(page, report_page(entries))


def _state(path: Path) -> tuple[int, int] | None:
    """Return what differs when a file was written again, None without one."""
    with suppress(OSError):
        status = os.stat(path)
        return status.st_ino, status.st_mtime_ns
    return None


def _loaded(path: Path) -> dict[str, Any] | None:
    from envbuild.report.gather import read_receipt_of

    with suppress(UsageError):
        return read_receipt_of(path)
    return None
