"""`envbuild doctor`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click

from envbuild.base.errors import HostError
from envbuild.base.progress import display
from envbuild.cli import layout
from envbuild.cli.common import print_json
from envbuild.cli.options import with_options
from envbuild.cli.verbosity import verbosity
from envbuild.doctor.probe import HostFinding
from envbuild.doctor.registry import CHECKS, StepVerdict, this_host

_STYLES = {"ok": "green", "info": "cyan", "warn": "yellow", "fail": "bold red"}
_MARKS = {"ok": "ok", "info": "-", "warn": "!", "fail": "FAIL"}


@click.command("doctor")
@click.option("--offline", is_flag=True, help="Ask nothing over a network.")
@with_options("json")
@verbosity
def doctor_command(offline: bool, as_json: bool) -> None:
    """Look at this host: tools, kernel, file systems, GPUs, network, scheduler, sources of packages.

    Prints the findings that need attention, with --verbose all of them. Ends with what each of the five artifacts can
    and cannot do here, and what to change. Takes less than five seconds, changes nothing and needs no root. Exit code 6
    when no artifact can be built here, else 0.

    \b
    Examples:
      envbuild doctor
      envbuild doctor --verbose
      envbuild doctor --json | jq .artifacts
      srun -N1 envbuild doctor --offline
    """
    from envbuild.doctor.probe import facts_of, run_checks
    from envbuild.doctor.registry import judge

    # The probes' own programs are no findings: --verbose prints all findings, and not them.
    every, display().verbosity = display().verbosity > 0, min(display().verbosity, 0)
    results = run_checks(CHECKS, this_host(dict(os.environ), offline=offline))
    verdicts = judge(facts_of(results))
    areas: dict[str, list[HostFinding]] = {}
    for check, findings in results:
        areas.setdefault(check.area, []).extend(findings)
    useless = all(steps["build"].status == "fail" for steps in verdicts.values())
    if as_json:
        shown = {area: [finding.as_json() for finding in findings] for area, findings in areas.items()}
        artifacts = {kind: {step: one.as_json() for step, one in steps.items()} for kind, steps in verdicts.items()}
        print_json({"usable": not useless, "areas": shown, "artifacts": artifacts})
    else:
        if every:
            show_areas(areas)
        else:
            _show_faults(areas)
        _show_artifacts(verdicts)
    if useless:
        first = next(iter(verdicts.values()))["build"]
        raise HostError(f"no artifact can be built here; {first.what}", first.hint or None)


def show_areas(areas: Mapping[str, Sequence[HostFinding]]) -> None:
    """Print findings under their areas, with a hint below each that needs one."""
    from rich.text import Text

    shown: list[Any] = []
    for area, findings in areas.items():
        table = _table()
        table.add_column(width=4)
        table.add_column(overflow="fold", max_width=30)
        table.add_column(overflow="fold")
        for finding in findings:
            cell = Text(layout.printable(finding.what))
            if finding.hint:
                start = "; " if finding.status == "ok" else "\n→ "
                cell.append(f"{start}{layout.printable(finding.hint)}", style="dim")
            table.add_row(Text(_MARKS[finding.status], style=_STYLES[finding.status]), finding.name, cell)
        shown += [Text(area, style="bold"), table, ""]
    _print(*shown)


def _show_faults(areas: Mapping[str, Sequence[HostFinding]]) -> None:
    """Print a line for each area, and below it the findings that need attention."""
    from rich.text import Text

    table = _table()
    table.add_column(min_width=max(map(len, areas)))
    table.add_column(overflow="fold")
    for area, findings in areas.items():
        faults = [one for one in findings if one.status in ("warn", "fail")]
        fine = ", ".join(one.name for one in findings if one.status == "ok")
        table.add_row(Text(area, style="bold"), f"ok: {fine}" if fine else "" if faults else "nothing here")
        for one in faults:
            mark = Text(_MARKS[one.status].rjust(len(area)), style=_STYLES[one.status])
            cell = Text(f"{one.name}: {layout.printable(one.what)}")
            if one.hint:
                cell.append(f"\n→ {layout.printable(one.hint)}", style="dim")
            table.add_row(mark, cell)
    number = sum(map(len, areas.values()))
    _print(table, "", f"All {number} findings: envbuild doctor --verbose", "")


def _show_artifacts(verdicts: Mapping[str, Mapping[str, StepVerdict]]) -> None:
    from rich.text import Text

    remedies: dict[str, list[str]] = {}
    wide, narrow = _table(header=True), _table()
    for title in ("artifact", "build", "verify", "run"):
        wide.add_column(title, overflow="fold")
    for kind, steps in verdicts.items():
        name: Any = Text(kind, style="bold")
        cells = {step: Text(layout.printable(one.what), style=_STYLES[one.status]) for step, one in steps.items()}
        wide.add_row(name, *cells.values())
        for step, cell in cells.items():
            narrow.add_row(name, step, cell)
            name = ""
        for step, verdict in steps.items():
            if verdict.hint and verdict.status != "ok":
                remedies.setdefault(layout.printable(verdict.hint), []).append(f"{kind} {step}")
    console = _console()
    needed = console.measure(wide, options=console.options.update(width=layout.NO_LIMIT)).maximum
    advice = _table(gap=1)
    for remedy, steps_of in remedies.items():
        advice.add_row("→", Text(f"{', '.join(steps_of)}: {remedy}", style="dim"))
    # In a narrow terminal, each step has its row.
    _print(narrow if needed > console.width else wide, advice)


def _table(*, header: bool = False, gap: int = 2) -> Any:
    from rich.table import Table

    return Table(box=None, show_header=header, pad_edge=False, padding=(0, gap, 0, 0))


def _console() -> Any:
    from rich.console import Console

    return Console(file=sys.stdout, width=layout.width(), highlight=False, markup=False, emoji=False, soft_wrap=False)


def _print(*shown: Any) -> None:
    """Print rich objects, without the blanks that pad a table's cells."""
    console = _console()
    with console.capture() as captured:
        for one in shown:
            console.print(one)
    click.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))
