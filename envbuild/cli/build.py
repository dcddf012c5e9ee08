"""`envbuild build`."""

from __future__ import annotations

import click

from envbuild.cli.common import json_option, locked_option, offline_option, target_option
from envbuild.cli.squash import (
    compression_option,
    faults_option,
    make,
    no_bytecode_option,
    no_verify_option,
    runtime_option,
    show_results,
)

_KINDS = ("enroot", "apptainer")


@click.command("build")
@click.argument("recipe", required=False)
@click.option(
    "--artifact", "artifacts", required=True, metavar="KIND,…",
    help="enroot, apptainer or both: the squashfs in them is then made once.",
)  # fmt: skip
@target_option
@compression_option
@no_verify_option
@faults_option
@runtime_option
@no_bytecode_option
@click.option("--dry-run", is_flag=True, help="Print the plan and stop.")
@locked_option
@offline_option
@json_option
def build_command(
    recipe: str | None,
    artifacts: str,
    target: str | None,
    compression: str,
    no_verify: bool,
    faults: bool,
    runtime: str | None,
    no_bytecode: bool,
    dry_run: bool,
    locked: bool,
    offline: bool,
    as_json: bool,
) -> None:
    """Build several artifacts of RECIPE (default: pt_cpu) in one go, each verified, below build/.

    Every kind has a command of its own, with more to choose: see `envbuild enroot --help`.

    \b
    Examples:
      envbuild build pt_cpu --artifact enroot,apptainer
      envbuild build pt_cpu --artifact enroot,apptainer --target cpu-aarch64 --json
    """
    from envbuild.errors import UsageError

    wanted = list(dict.fromkeys(kind.strip() for kind in artifacts.split(",") if kind.strip()))
    unknown = [kind for kind in wanted if kind not in _KINDS]
    if unknown or not wanted:
        raise UsageError(
            f"--artifact {artifacts!r}: {unknown[0] if unknown else 'nothing'} is not built here",
            f"name {' or '.join(_KINDS)}, or both with a comma; venv and docker have commands of their own",
        )
    results, plan = make(
        sorted(wanted, key=_KINDS.index), recipe, target=target, compression=compression,
        verify=not no_verify, faults=faults, runtime=runtime, bytecode=not no_bytecode,
        dry_run=dry_run, locked=locked, offline=offline,
    )  # fmt: skip
    show_results(results, plan, as_json=as_json)
