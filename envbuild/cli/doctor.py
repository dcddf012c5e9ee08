"""`envbuild doctor`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from envbuild.cli import layout
from envbuild.cli.common import json_option, print_json

if TYPE_CHECKING:
    from envbuild.doctor.probe import HostFinding
    from envbuild.doctor.registry import StepVerdict

_STYLES = {"ok": "green", "info": "cyan", "warn": "yellow", "fail": "bold red"}
_MARKS = {"ok": "ok", "info": "-", "warn": "!", "fail": "FAIL"}


@click.command("doctor")
@click.option("--offline", is_flag=True, help="Ask nothing over a network.")
@json_option
def doctor_command(offline: bool, as_json: bool) -> None:
    """Look at this host: tools, kernel, file systems, GPUs, network, scheduler, sources of packages.

    Ends with what each of the five artifacts can and cannot do here, and what to change. Takes less than five
    seconds, changes nothing and needs no root. Exit code 6 when no artifact can be built here, else 0.

    \b
    Examples:
      envbuild doctor
      envbuild doctor --json | jq .artifacts
      srun -N1 envbuild doctor --offline
    """
    from envbuild.doctor.probe import facts_of, run_checks
    from envbuild.doctor.registry import CHECKS, judge, this_host

    results = run_checks(CHECKS, this_host(dict(os.environ), offline=offline))
    verdicts = judge(facts_of(results))
    areas: dict[str, list[HostFinding]] = {}
    for check, findings in results:
        areas.setdefault(check.area, []).extend(findings)
    useless = all(steps["build"].status == "fail" for steps in verdicts.values())
    if as_json:
        print_json(_as_json(areas, verdicts, useless))
    else:
        show_areas(areas)
        _show_artifacts(verdicts)
    if useless:
        from envbuild.errors import HostError

        first = next(iter(verdicts.values()))["build"]
        raise HostError(f"no artifact can be built here; {first.what}", first.hint or None)


def _as_json(
    areas: Mapping[str, Sequence[HostFinding]], verdicts: Mapping[str, Mapping[str, StepVerdict]], useless: bool
) -> dict[str, Any]:
    return {
        "usable": not useless,
        "areas": {area: [f.as_json() for f in findings] for area, findings in areas.items()},
        "artifacts": {
            kind: {step: verdict.as_json() for step, verdict in steps.items()} for kind, steps in verdicts.items()
        },
    }


def show_areas(areas: Mapping[str, Sequence[HostFinding]]) -> None:
    """Print findings under their areas, with a hint below each that needs one."""
    console = _console()
    with console.capture() as captured:
        _areas(areas, console)
    _echo(captured.get())


def _areas(areas: Mapping[str, Sequence[HostFinding]], console: Any) -> None:
    from rich.table import Table
    from rich.text import Text

    for area, findings in areas.items():
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column(width=4)
        table.add_column(overflow="fold", max_width=30)
        table.add_column(overflow="fold")
        for finding in findings:
            style = _STYLES[finding.status]
            cell = Text(_printable(finding.what))
            if finding.hint and finding.status != "ok":
                cell.append(f"\n→ {_printable(finding.hint)}", style="dim")
            elif finding.hint:
                cell.append(f"; {_printable(finding.hint)}", style="dim")
            table.add_row(Text(_MARKS[finding.status], style=style), finding.name, cell)
        console.print(Text(area, style="bold"))
        console.print(table)
        console.print()


def _show_artifacts(verdicts: Mapping[str, Mapping[str, StepVerdict]]) -> None:
    from rich.table import Table
    from rich.text import Text

    console = _console()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("artifact", "build", "verify", "run"):
        table.add_column(title, overflow="fold")
    remedies: dict[str, list[str]] = {}
    rows: list[list[Text]] = []
    for kind, steps in verdicts.items():
        rows.append([Text(kind, style="bold")])
        for step, verdict in steps.items():
            rows[-1].append(Text(_printable(verdict.what), style=_STYLES[verdict.status]))
            if verdict.hint and verdict.status != "ok":
                remedies.setdefault(_printable(verdict.hint), []).append(f"{kind} {step}")
        table.add_row(*rows[-1])
    if console.measure(table, options=console.options.update(width=layout.NO_LIMIT)).maximum > console.width:
        table = _narrow(verdicts, rows)
    with console.capture() as captured:
        console.print(table)
        advice = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 0))
        for remedy, cells in remedies.items():
            advice.add_row("→", Text(f"{', '.join(cells)}: {remedy}", style="dim"))
        console.print(advice)
    _echo(captured.get())


def _narrow(verdicts: Mapping[str, Mapping[str, StepVerdict]], rows: Sequence[Sequence[Any]]) -> Any:
    """Return a table with a row for each step of each artifact, for a terminal that is too narrow for wider rows."""
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for steps, (kind, *cells) in zip(verdicts.values(), rows, strict=True):
        for number, (step, cell) in enumerate(zip(steps, cells, strict=True)):
            table.add_row("" if number else kind, step, cell)
    return table


def _console() -> Any:
    import sys

    from rich.console import Console

    return Console(
        file=sys.stdout, width=layout.width(), highlight=False, markup=False, emoji=False, soft_wrap=False
    )  # fmt: skip


def _echo(text: str) -> None:
    """Print `text` without the blanks that pad a table's cells."""
    click.echo("\n".join(line.rstrip() for line in text.splitlines()))


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)
