"""`envbuild doctor` and `envbuild site`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import click

from envbuild.base.atomic import write_beside
from envbuild.base.errors import HostError, RecipeError, UsageError
from envbuild.base.masking import redact
from envbuild.base.progress import display, log
from envbuild.base.toml import toml_key, toml_pairs
from envbuild.cli import complete, layout
from envbuild.cli.common import check_out, print_json, show, with_options
from envbuild.cli.layout import verbosity
from envbuild.doctor.probe import HostFinding, facts_of, run_checks
from envbuild.doctor.registry import CHECKS, StepVerdict, judge, this_host
from envbuild.site.settings import Site, SiteTables, find_site, load_site, named_sites

_STYLES = {"ok": "green", "info": "cyan", "warn": "yellow", "fail": "bold red"}
_MARKS = {"ok": "ok", "info": "-", "warn": "!", "fail": "FAIL"}


@click.command("doctor")
@click.option("--offline", is_flag=True, help="Make no network requests.")
@with_options("json")
@verbosity
def doctor_command(offline: bool, as_json: bool) -> None:
    """Look at this host: tools, kernel, file systems, GPUs, network, scheduler, sources of packages.

    Prints the findings that need attention; --verbose prints all of them. Ends with the abilities and limits of this
    host for each of the five kinds of artifacts, and how to lift the limits. Takes less than five seconds, changes
    nothing and needs no root. Exit code 6 when no artifact can be built here, else 0.

    \b
    Examples:
      envbuild doctor
      envbuild doctor --verbose
      envbuild doctor --json | jq .artifacts
      srun -N1 envbuild doctor --offline
    """
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
        artifacts = {
            kind: {step: verdict.as_json() for step, verdict in steps.items()} for kind, steps in verdicts.items()
        }
        print_json({"usable": not useless, "areas": shown, "artifacts": artifacts})
    else:
        if every:
            show_areas(areas)
        else:
            _show_faults(areas)
        _show_artifacts(verdicts)
    if useless:
        first = next(iter(verdicts.values()))["build"]
        raise HostError(f"no artifact can be built here; {first.summary}", first.hint or None)


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
            cell = Text(layout.printable(finding.summary))
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
        faults = [host_finding for host_finding in findings if host_finding.status in ("warn", "fail")]
        fine = ", ".join(host_finding.name for host_finding in findings if host_finding.status == "ok")
        table.add_row(Text(area, style="bold"), f"ok: {fine}" if fine else "" if faults else "nothing here")
        for finding in faults:
            mark = Text(_MARKS[finding.status].rjust(len(area)), style=_STYLES[finding.status])
            cell = Text(f"{finding.name}: {layout.printable(finding.summary)}")
            if finding.hint:
                cell.append(f"\n→ {layout.printable(finding.hint)}", style="dim")
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
        cells = {
            step: Text(layout.printable(verdict.summary), style=_STYLES[verdict.status])
            for step, verdict in steps.items()
        }
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
        for finding in shown:
            console.print(finding)
    click.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


@click.group("site")
def site_command() -> None:
    """Describe where jobs run: scheduler, modules, file systems, containers, network.

    SITE is the path of a site file, or a name looked for in ./sites, ~/.config/envbuild/sites, /etc/envbuild/sites and
    among those that come with envbuild. Without it: $ENVBUILD_SITE, else /etc/envbuild/site.toml and
    ~/.config/envbuild/site.toml.

    \b
    Examples:
      envbuild site list
      envbuild site init --out site.toml
      envbuild site check ./site.toml
      envbuild site show aws-parallelcluster
    """


@site_command.command("init")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Default: site.toml.")
@click.option(
    "--from", "origin", metavar="SITE", shell_complete=complete.sites, help="Copy this site's file, with its comments."
)
@click.option("--force", is_flag=True, help="Replace an existing file.")
def init_command(out: Path | None, origin: str | None, force: bool) -> None:
    """Write a commented site file for this host, or a copy of another site's to change.

    If its [host_stack] names libraries, SITE.stack.json beside it gets their symbols on this host: run it on a node.

    \b
    Examples:
      envbuild site init
      envbuild site init --from hyperpod --out ~/.config/envbuild/site.toml
      envbuild site init --out -
    """
    from envbuild.doctor.sites import site_file, stack_inventory

    path = out or Path("site.toml")
    if ".config" not in path.parts:  # the user's own folder, which may not exist yet
        check_out(out)
    if str(path) != "-" and not force and (path.exists() or path.is_symlink()):
        raise UsageError(f"{path} exists", "choose another --out, or write over it with --force")
    text = site_file(dict(os.environ)) if origin is None else _file_of(origin)
    if str(path) == "-":
        click.echo(text, nl=False)
        return
    try:
        write_beside(path, text)
    except OSError as error:
        raise HostError(f"{path} cannot be written: {error.strerror}", "choose another --out") from error
    place, rows = stack_inventory(load_site(os.environ, str(path.absolute())))
    if place:
        write_beside(Path(place), rows)
        log(f"the libraries of [host_stack] on this host: {place}, for `envbuild check ARTIFACT --site {path}`")
    log(f"read it through, then: envbuild site check {path}")
    click.echo(path)


def _file_of(site: str) -> str:
    """Return the text of a site's file, without the line that tells editors a schema beside it."""
    load_site(os.environ, site)  # raises for a faulty file
    lines = find_site(site, os.environ).read_text(encoding="utf-8").splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("#:schema "))


@site_command.command("show")
@click.argument("site", required=False, shell_complete=complete.sites)
@click.option("--all", "everything", is_flag=True, help="Also print defaults.")
@click.option("--file", "as_file", is_flag=True, help="Print SITE's file as it is, with comments and {user}.")
@with_options("json")
def show_command(site: str | None, everything: bool, as_file: bool, as_json: bool) -> None:
    """Print the settings of SITE, and the origin of each.

    \b
    Examples:
      envbuild site show
      envbuild site show aws-parallelcluster --all
      envbuild site show hyperpod --file
    """
    if as_file:
        if site is None or everything or as_json:
            raise UsageError("--file prints the file of one SITE", "name it, and leave out --all and --json")
        click.echo(_file_of(site), nl=False)
        return
    known_site, values = effective_settings(site, dict(os.environ))
    if as_json:
        files = [str(file) for file in known_site.files]
        print_json({"name": known_site.name, "files": files, "values": list(map(asdict, values))})
        return
    click.echo(f"# site {known_site.name}: {', '.join(map(str, known_site.files)) or 'no file'}")
    tables: dict[str, list[EffectiveSetting]] = {}
    for value in values:
        if everything or value.given:
            tables.setdefault(value.table, []).append(value)
    for table, settings in tables.items():
        if table:
            name = f"registries.{toml_key(table[11:])}" if table.startswith("registries.") else table
            click.echo(f"\n[{name}]")
        for line in layout.columns([(_setting(row), f"# {row.origin}") for row in settings], most=60):
            click.echo(line)
    if not tables:
        click.echo("# no setting; --all shows the defaults, `envbuild site init` writes a file")


def _setting(row: EffectiveSetting) -> str:
    # TOML has no null: a value that nobody set is a comment.
    return f"# {row.key}" if row.value is None else toml_pairs({row.key: row.value})[0]


@site_command.command("check")
@click.argument("site", required=False, shell_complete=complete.sites)
@click.option("--offline", is_flag=True, help="Make no network requests.")
@with_options("json")
def check_command(site: str | None, offline: bool, as_json: bool) -> None:
    """Check SITE for mistakes, contradictions, and differences from this host.

    Checks that need a login node or a compute node of the site are reported as "not checked". Exit code 2 when
    something is wrong, else 0.

    \b
    Examples:
      envbuild site check ./site.toml
      envbuild site check pbs-gh200 --json
    """
    from envbuild.doctor.sites import check_site

    variables = dict(os.environ)
    # The site file is judged below; this is only the way in which this host reaches mirrors.
    environment = this_host(variables, offline=offline).environment
    findings = check_site(site, variables, environment, offline=offline)
    wrong, doubtful = (sum(finding.status == status for finding in findings) for status in ("fail", "warn"))
    name = f"site {site or 'in force'}"
    if as_json:
        print_json({"passed": not wrong, "findings": [f.as_json() for f in findings]})
    else:
        show_areas({name: findings})
    if wrong:
        raise RecipeError(f"{name}: {wrong} invalid", "see what is marked FAIL")
    log(f"nothing is wrong, {doubtful} doubtful" if doubtful else "nothing wrong was found")


@site_command.command("list")
@with_options("json")
def list_command(as_json: bool) -> None:
    """List the sites that have a name, and where they are.

    \b
    Examples:
      envbuild site list --json
    """
    paths = named_sites(os.environ)
    column, width = max(map(len, paths), default=0), layout.width()
    sites = [{"name": name, "path": str(path)} for name, path in paths.items()]
    entries = (layout.entry(name, [_about(path), f"({path})"], column, width) for name, path in paths.items())
    show(as_json, {"sites": sites}, *entries)


def _about(path: Path) -> str:
    """Return the first line of the file's comment."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        return error.strerror or "cannot be read"
    first = next((line[1:].strip() for line in lines if line.startswith("#") and not line.startswith("#:")), "")
    return layout.printable(first, "")


_DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class EffectiveSetting:
    """One value of a site: its `table` ("" at the top), `key`, and `origin` (a file, a variable or "default")."""

    table: str
    key: str
    value: Any
    origin: str

    @property
    def given(self) -> bool:
        """Whether the value is set explicitly."""
        return self.origin != _DEFAULT


def effective_settings(name: str | None, env: Mapping[str, str]) -> tuple[Site, list[EffectiveSetting]]:
    """Return the site called `name` (None: the effective one) and all its values, with passwords in URLs hidden.

    Raises UsageError for an unknown name, RecipeError for a faulty file.
    """
    site = load_site({**env, "USER": "{user}"}, name)  # {user} is shown as the files have it
    # Keys without a table come first, as in TOML.
    tables: dict[str, dict[str, Any]] = {"": {"store": str(site.store), "recipes": list(map(str, site.recipe_folders))}}
    for table_name in (field.name for field in fields(SiteTables)):
        value: Any = getattr(site, table_name)
        if table_name == "registries":
            tables |= {f"registries.{host}": asdict(table) for host, table in value.items()}
        elif isinstance(value, Mapping):
            tables[table_name] = dict(value)
        elif is_dataclass(value) and not isinstance(value, type):
            tables[table_name] = asdict(value)
        else:
            tables[""][table_name] = value
    settings = [
        EffectiveSetting(table, redact(key), _shown(value), _origin(site, table, key))
        for table, values in tables.items()
        for key, value in values.items()
    ]
    if name is None and env.get("ENVBUILD_STORE"):
        settings[0] = replace(settings[0], origin="ENVBUILD_STORE")
    # A site that is not in force has no store but that of its file.
    return site, settings if name is None or settings[0].given else settings[1:]


def _origin(site: Site, table: str, key: str) -> str:
    head, _, host = table.partition(".")
    return str(site.origins.get(f"[{head}] {host or key}", _DEFAULT))


def _shown(value: Any) -> Any:
    """Return `value` in JSON's types, without passwords."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, list | tuple):
        return [_shown(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _shown(item) for key, item in value.items()}
    return value
