"""`envbuild report`, and --report of the commands that build or verify."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from envbuild.base.errors import UsageError, VerificationError
from envbuild.base.progress import log
from envbuild.cli import complete
from envbuild.cli.common import check_out
from envbuild.cli.options import BESIDE, PATH, Names
from envbuild.contract.kinds import ARTIFACTS
from envbuild.environment import Environment, load_environment

if TYPE_CHECKING:
    from envbuild.report.data import ReportEntry


@click.command("report")
@click.argument(
    "named",
    metavar="RECIPE|ARTIFACT|RECEIPT…",
    nargs=-1,
    required=True,
    shell_complete=complete.recipes_artifacts_or_receipts,
)
@click.option("--out", type=PATH, default="report.html", show_default=True, metavar="FILE", help="Where the page goes.")
@click.option(
    "--against",
    metavar="RECIPE|ARTIFACT|RECEIPT",
    shell_complete=complete.recipes_artifacts_or_receipts,
    help="Show what changed since this one.",
)
@click.option("--open", "show_it", is_flag=True, help="Open the page in the browser.")
def report_command(named: Names, out: Path, against: str | None, show_it: bool) -> None:
    """Write receipts as one HTML page: verdict, checks with evidence, training, packages, SBOM.

    The page is one file that loads nothing and runs nothing; it works from a disk, as an artifact of CI, on a phone and
    on paper. Sizes of packages and the SBOM are in it where the artifact is there. Several receipts begin with a grid
    of their verdicts, and each shows what changed since the one before it.

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
    artifacts = [_documented(one, environment) for one in named]
    _write(gather(artifacts, environment, against and _documented(against, environment)), out)
    if show_it:
        import webbrowser

        if not webbrowser.open(out.absolute().as_uri()):
            log(f"no browser could be started; open {out} by hand")
    click.echo(out)


def _documented(text: str, environment: Environment) -> str:
    """Return `text`, or the artifact that was built of it if it is a recipe."""
    from envbuild.kinds.built import find_built

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
    from envbuild.contract.receipt import receipt_path
    from envbuild.kinds.commit import failed_path
    from envbuild.report.gather import page_path, read_entry

    usual = page_path(places[0]) if len(places) == 1 else places[0].with_name("report.html")
    page = usual if file == BESIDE else Path(file)
    if file != BESIDE:  # the folder of receipts is made by the build
        check_out(page, "--report")
    where = environment or load_environment()
    before = {path: _state(path) for place in places for path in map(receipt_path, (place, failed_path(place)))}
    receipts = {path: _loaded(path) for path in before}

    def write(paths: Sequence[Path]) -> None:
        # A failed one is compared with the passing one before it.
        older = {
            path: receipts[path] or receipts[receipt_path(place)]
            for place in places
            for path in map(receipt_path, (place, failed_path(place)))
        }
        if paths:
            _write([read_entry(str(path), where, older[path]) for path in paths], page)
            log(f"report: {page}")

    try:
        yield
    except VerificationError:
        write([path for path, state in before.items() if _state(path) not in (None, state)])
        raise
    write([path for path in map(receipt_path, places) if path.exists()])


def _write(entries: Sequence[ReportEntry], page: Path) -> None:
    from envbuild.base.atomic import write_beside
    from envbuild.report.page import report_page

    write_beside(page, report_page(entries))


def _state(path: Path) -> tuple[int, int] | None:
    """Return what differs when a file was written again, None without one."""
    with suppress(OSError):
        found = os.stat(path)
        return found.st_ino, found.st_mtime_ns
    return None


def _loaded(path: Path) -> dict[str, Any] | None:
    from envbuild.report.gather import read_receipt_of

    with suppress(UsageError):
        return read_receipt_of(path)
    return None
