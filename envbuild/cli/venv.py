"""`envbuild venv`."""

from __future__ import annotations

from pathlib import Path

import click

from envbuild.cli.common import (
    json_option,
    locked_option,
    offline_option,
    open_recipe,
    print_json,
    say,
    target_option,
)
from envbuild.environment import load_environment


@click.command("venv")
@click.argument("recipe")
@target_option
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Default: build/RECIPE/TARGET/venv.",
)
@click.option(
    "--python", metavar="P", help="Interpreter: a path or a version. Default: the recipe's version."
)
@click.option("--no-verify", is_flag=True, help="Only build; leave no receipt.")
@click.option(
    "--faults", is_flag=True, help="Verify too that a killed rank restarts from the snapshot."
)
@click.option(
    "--compile-bytecode", is_flag=True, help="Compile all modules now, not when first imported."
)
@click.option("--dry-run", is_flag=True, help="Print the plan and stop.")
@locked_option
@offline_option
@json_option
def venv_command(
    recipe: str,
    target: str | None,
    out: Path | None,
    python: str | None,
    no_verify: bool,
    faults: bool,
    compile_bytecode: bool,
    dry_run: bool,
    locked: bool,
    offline: bool,
    as_json: bool,
) -> None:
    """Build the virtual environment of RECIPE from its lock and prove it by distributed training.

    The environment appears in its place only when it is whole and passed; until then an older one
    stays there. The last line of standard output is its path.

    \b
    Examples:
      envbuild venv pt_cpu
      envbuild venv pt_cpu --out /scratch/envs/pt_cpu --locked --faults
      source build/pt_cpu/cpu-x86_64/venv/bin/activate
    """
    from envbuild.artifacts import venv
    from envbuild.make import make_venv, prepare

    environment = load_environment()
    loaded = open_recipe(recipe, environment)
    wanted, _ = loaded.target(target)
    if not dry_run:
        venv.probe(wanted)
    plan, trainer = prepare(
        loaded, wanted, environment, artifact=venv.KIND, locked=locked, offline=offline, say=say,
        compile_bytecode=compile_bytecode,
    )  # fmt: skip
    if loaded.recipe.image.base != "debian" and not any(p.name == "torch" for p in plan.packages):
        from envbuild.errors import UsageError

        raise UsageError(
            f"recipe {loaded.recipe.name} takes torch from {loaded.recipe.image.base}; "
            "a virtual environment would be without it",
            f"build it with `envbuild docker {loaded.recipe.name}`",
        )
    path = out or venv.default_path(loaded.recipe.name, wanted.name)
    if dry_run:
        if as_json:
            print_json({**plan.as_json(), "path": str(path.absolute())})
            return
        from envbuild.cli.plan import show

        show(plan)
        click.echo(path)
        return
    result = make_venv(
        plan, trainer, environment, path, say,
        python=python, offline=offline, verify=not no_verify, faults=faults,
    )  # fmt: skip
    if not result.built and not result.verified:
        say(f"{path}: nothing changed ({result.seconds:.2f} s)")
    if as_json:
        print_json(result.as_json())
    else:
        click.echo(path)
