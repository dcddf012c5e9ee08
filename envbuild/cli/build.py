"""`envbuild build`."""

from __future__ import annotations

import click

from envbuild.cli.squash import Choices, make, with_choices
from envbuild.kinds import kinds_of


@click.command("build")
@click.argument("recipe", required=False)
@click.option(
    "--artifact", "artifacts", required=True, metavar="KIND,…",
    help="enroot, apptainer or both: the squashfs in them is then made once.",
)  # fmt: skip
@with_choices
def build_command(recipe: str | None, artifacts: str, choices: Choices) -> None:
    """Build several artifacts of RECIPE (default: pt_cpu) in one go, each verified, below build/.

    Every kind has a command of its own, with more to choose: see `envbuild enroot --help`.

    \b
    Examples:
      envbuild build pt_cpu --artifact enroot,apptainer
      envbuild build pt_cpu --artifact enroot,apptainer --target cpu-aarch64 --json
    """
    from envbuild.errors import UsageError

    kinds = kinds_of("file")
    wanted = list(dict.fromkeys(kind.strip() for kind in artifacts.split(",") if kind.strip()))
    unknown = [kind for kind in wanted if kind not in kinds]
    if unknown or not wanted:
        raise UsageError(
            f"--artifact {artifacts!r}: {unknown[0] if unknown else 'nothing'} is not built here",
            f"name {' or '.join(kinds)}, or both with a comma; venv and docker have commands of their own",
        )
    make(sorted(wanted, key=kinds.index), recipe, choices)
