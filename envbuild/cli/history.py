"""`envbuild history`: what the verifications of a recipe measured, over time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from envbuild.base.errors import UsageError
from envbuild.cli import complete, layout
from envbuild.cli.common import open_recipe, print_json
from envbuild.cli.options import PATH, with_options
from envbuild.contract.receipt import read_receipt, receipt_path
from envbuild.environment import load_environment
from envbuild.recipe.find import command_word
from envbuild.recipe.targets import Target
from envbuild.store.history import METRICS, merged, recorded, row_of, sparkline

_SHORT = len("sha256:") + 8


@click.command("history")
@click.argument("recipe", required=False, shell_complete=complete.recipes)
@click.option(
    "--target", metavar="TARGET", shell_complete=complete.targets, help="Only this target. Default: all of them."
)
@click.option(
    "--metric", "metrics", multiple=True, type=click.Choice(list(METRICS)), help="Only this metric; repeatable."
)
@click.option(
    "--receipts",
    "places",
    multiple=True,
    type=PATH,
    metavar="PATH",
    help="Also a receipt, that of an artifact, or all receipts in a folder; repeatable.",
)
@with_options("json")
def history_command(
    recipe: str | None, target: str | None, metrics: tuple[str, ...], places: tuple[Path, ...], as_json: bool
) -> None:
    """Show what the verifications of RECIPE measured, oldest first, with a sparkline for each metric.

    Each verification on this store is recorded, passed or not: the last 100 of each kind of artifact and target. Only
    those of one kind, target, host and shape of training are compared with each other.

    \b
    Examples:
      envbuild history pt_cpu
      envbuild history pt_cpu --target cpu-x86_64 --metric step_s
      envbuild history pt_cpu --receipts /srv/receipts --json
    """
    environment = load_environment()
    loaded = open_recipe(recipe, environment)
    name = loaded.recipe.name
    given = [row_of(one) for place in places for one in _receipts(place, name)]
    rows = [row for row in merged(recorded(environment.store, name), given) if target in (None, row["target"])]
    if as_json:
        print_json({"recipe": name, "verifications": rows})
        return
    if not rows:
        of = f" for {target}" if target else ""
        has_venv = any(loaded.has_wheels(Target.parse(one)) for one in loaded.recipe.targets)
        kind = "venv" if has_venv else "conda"
        raise UsageError(
            f"no verification of {name}{of} is recorded in {environment.store.root}",
            f"build it: envbuild {kind} {command_word(loaded)}; or name receipts with --receipts",
        )
    series: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        series.setdefault(_series(name, row), []).append(row)
    for title, those in series.items():
        for line in [title, *_lines(those, metrics or tuple(METRICS)), ""]:
            click.echo(layout.fitted(line))


def _receipts(place: Path, recipe: str) -> Iterator[Mapping[str, Any]]:
    """Yield the receipts of `recipe` at `place`. Raises UsageError for a file that is none, OSError."""
    if receipt_path(place).is_file():
        place = receipt_path(place)
    for path in sorted(place.rglob("*.receipt.json")) if place.is_dir() else [place]:
        try:
            receipt = read_receipt(path)
        except (OSError, ValueError) as error:
            raise UsageError(f"{path} is not a receipt: {error}", "name the receipts that are, or a folder") from error
        if receipt.get("recipe", {}).get("name") == recipe:
            yield receipt


def _series(recipe: str, row: Mapping[str, Any]) -> str:
    """Return the title of the series of `row`: all that must be equal for a comparison."""
    host, shape = row["host"], row["settings"]
    machine = [str(host.get("name", "unknown host")), f"{host.get('cpus', '?')} processors"]
    machine += [str(one) for one in (host.get("processor"), row["performance"].get("gpu")) if one]
    training = f"{shape['nodes']} × {shape['nproc_per_node']} ranks, {shape['model']}, batch {shape['batch_size']}"
    return f"{recipe} {row['target']}, {row['kind']} by {row['runtime']} on {', '.join(machine)}; {training}"


def _lines(rows: Iterable[Mapping[str, Any]], metrics: Iterable[str]) -> list[str]:
    rows = list(rows)
    # A failed verification measured something else than those that passed.
    figures = [row["performance"] if row["passed"] else {} for row in rows]
    shown = [name for name in metrics if any(name in one for one in figures)]
    table = [["verified at", "result", "lock", "torch", *(METRICS[name].title for name in shown)]]
    for row, one in zip(rows, figures, strict=True):
        result = "passed" if row["passed"] else f"failed: {', '.join(map(str, row['failed']))}"
        cells = [METRICS[name].show(one[name]) if name in one else "" for name in shown]
        torch = str(row["versions"].get("torch") or "")
        table.append([row["verified_at"], result, row["lock"][len("sha256:") : _SHORT], torch, *cells])
    lines = [f"  {layout.printable(line)}" for line in layout.columns(table)]
    drawn = [[METRICS[name].title, sparkline([one.get(name) for one in figures])] for name in shown]
    return [*lines, *(f"  {line}" for line in layout.columns(drawn) if drawn)]
