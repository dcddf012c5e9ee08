"""What several commands share: finding a recipe and its target, printing a result."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import click

from envbuild.environment import Environment
from envbuild.progress import say
from envbuild.recipe.find import find_recipe, search_folders
from envbuild.recipe.load import LoadedRecipe, load_recipe

target_option = click.option(
    "--target", metavar="TARGET", help="ACCELERATOR-ARCH, such as cpu-x86_64. Default: this host's."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
locked_option = click.option(
    "--locked", is_flag=True, help="Refuse (exit 3) where the lock is missing or stale; for CI."
)
offline_option = click.option(
    "--offline", is_flag=True, help="Use the store, find-links folders and file indexes only."
)


def open_recipe(name: str, environment: Environment) -> LoadedRecipe:
    """The recipe called `name`, or at that path."""
    return load_recipe(find_recipe(name, search_folders(environment.site.recipe_folders)))


def print_json(value: Mapping[str, Any]) -> None:
    """Print one JSON object on standard output."""
    click.echo(json.dumps(value, indent=1))


__all__ = [
    "json_option",
    "locked_option",
    "offline_option",
    "open_recipe",
    "print_json",
    "say",
    "target_option",
]
