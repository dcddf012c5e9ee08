"""Shell completion: the values that a shell offers, and the scripts that ask for them.

Every command imports this module, so it imports little.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem, ShellComplete, split_arg_string

from envbuild.base.errors import UsageError
from envbuild.base.files import build_folder
from envbuild.contract.kinds import ARTIFACTS, kinds_of

SHELLS = ("bash", "zsh", "fish")
# Set by the scripts, to the name of the shell; cli/__init__.py looks for it.
VARIABLE = "_ENVBUILD_COMPLETE"
_IMAGES = (".sqsh", ".sif")
_CURSOR = "x"

Item = CompletionItem[Any]


@click.command("completion")
@click.argument("shell", type=click.Choice(SHELLS))
def completion_command(shell: str) -> None:
    """Print the script with which SHELL completes commands, options, recipes, targets, sites and artifacts.

    Put the line for your shell into its start-up file, or save the script in the folder from which the shell loads
    completions, as envbuild, _envbuild or envbuild.fish.

    \b
    Examples:
      source <(envbuild completion bash)
      source <(envbuild completion zsh)
      envbuild completion fish | source
    """
    click.echo((Path(__file__).parents[1] / "data" / f"completion.{shell}").read_text(encoding="utf-8"), nl=False)


def recipes(context: click.Context, parameter: click.Parameter, text: str) -> list[Item]:
    """Return the recipes that have a name, or files for a path."""
    from envbuild.recipe.find import recipe_files

    return _files(".toml") if _is_path(text) else _items(recipe_files(_folders()), text)


def targets(context: click.Context, parameter: click.Parameter, text: str) -> list[Item]:
    """Return the targets of the recipes on the command line; without one, of all recipes."""
    from envbuild.recipe.find import find_recipe, list_recipes
    from envbuild.recipe.load import load_recipe

    folders, loaded = _folders(), []
    # Arguments before an option without its value are left unparsed.
    for name in [*_words(context.params, "recipe", "named", "recipes"), *context.args]:
        try:
            loaded.append(load_recipe(find_recipe(name, folders)))
        except UsageError:
            continue
    loaded = loaded or [recipe.loaded for recipe in list_recipes(folders) if recipe.loaded]
    return _items(sorted({target for recipe in loaded for target in recipe.recipe.targets}), text)


def sites(context: click.Context, parameter: click.Parameter, text: str) -> list[Item]:
    """Return the sites that have a name, or files for a path."""
    from envbuild.site.settings import named_sites

    return _files(".toml") if _is_path(text) else _items(sorted(named_sites(os.environ)), text)


def recipes_artifacts_or_receipts(context: click.Context, parameter: click.Parameter, text: str) -> list[Item]:
    """Return recipes, artifacts, and receipts here; if none fits, files for a path."""
    names = [] if _is_path(text) else recipes(context, parameter, text)
    return [*names, *_artifacts(text, _here((".receipt.json",)), (".json",), only_plain=bool(names))]


def recipes_or_artifacts(context: click.Context, parameter: click.Parameter, text: str) -> list[Item]:
    """Return recipes and artifacts; if none fits, files for a path."""
    names = [] if _is_path(text) else recipes(context, parameter, text)
    return [*names, *_artifacts(text, only_plain=bool(names))]


def runnable(context: click.Context, parameter: click.Parameter, text: str) -> list[Item]:
    """Return recipes, artifacts and the Python scripts here."""
    items = [*recipes_or_artifacts(context, parameter, text), *_items(_here((".py",)), text)]
    return [item for item in items if item.type == "plain"] or _files(*_IMAGES, ".py")


def python_files(context: click.Context, parameter: click.Parameter, text: str) -> list[Item]:
    """Return the request for Python files."""
    return _files(".py")


def any_files(context: click.Context, parameter: click.Parameter, text: str) -> list[Item]:
    """Return the request for files."""
    return _files()


def answer() -> int:
    """Print the completions at the cursor in the form that the shell's script reads; nothing after an error. Return 0.

    A line is a type of click's, a value and its help, with tabs between. `file` and `dir` ask the shell for its own
    files, of the suffixes in the value if there are any.
    """
    from envbuild.cli.commands import cli

    try:
        words, inserted = _command_line(os.environ[VARIABLE], sys.argv[1:])
        items = ShellComplete(cli, {}, "envbuild", VARIABLE).get_completions(words[:-1], words[-1])
        lines = list(_lines(items, words[-1], inserted))
    except Exception:  # noqa: BLE001 - a message would stand in the user's prompt
        return 0
    sys.stdout.writelines(lines)
    return 0


def _command_line(shell: str, arguments: list[str]) -> tuple[list[str], int]:
    """Return the words up to the cursor, and how many characters of the last one the shell does not replace."""
    if shell == "zsh":
        return arguments, 0
    if shell == "fish":  # the last word as it was typed, with its quotes
        return [*arguments[:-1], _unquoted(arguments[-1])[-1]], 0
    line, replaced = arguments
    words = _unquoted(line)[1:]  # bash's own words end at : and =
    if not line.removesuffix(replaced).endswith(('"', "'")):  # inside of an open quote it is without quotes
        replaced = _unquoted(replaced)[-1]
    return words, len(words[-1]) - len(replaced)


def _unquoted(text: str) -> list[str]:
    *words, last = split_arg_string(text + _CURSOR)
    return [*words, last.removesuffix(_CURSOR)]


def _lines(items: Iterable[Item], word: str, kept: int) -> Iterator[str]:
    option = word[: word.index("=") + 1] if word.startswith("--") and "=" in word else ""
    for item in items:
        value = f"{option}{item.value}"[kept:] if item.type == "plain" else " ".join(item.suffixes or ())
        text = " ".join((item.help or "").split())
        if value.isprintable():
            yield f"{item.type}\t{value}\t{text}\n"


def _items(values: Iterable[str], text: str) -> list[Item]:
    return [CompletionItem(value) for value in values if value.startswith(text)]


def _files(*suffixes: str) -> list[Item]:
    return [CompletionItem("", "file", suffixes=suffixes)]


def _is_path(text: str) -> bool:
    return "/" in text or text.startswith((".", "~"))


def _artifacts(text: str, more: Iterable[str] = (), suffixes: Sequence[str] = (), *, only_plain: bool) -> list[Item]:
    """Return the artifacts below ./build, the image files in this folder, and `more`; else the request for files."""
    kinds = [ARTIFACTS[name] for name in kinds_of("folder", "file")]
    places = [
        kind.default_path(top.parent.name, top.name) for top in sorted(build_folder().glob("*/*")) for kind in kinds
    ]
    own = [*(os.fspath(place) for place in places if place.exists()), *_here(_IMAGES), *more]
    return _items(own, text) or ([] if only_plain else _files(*_IMAGES, *suffixes))


def _words(values: dict[str, Any], *names: str) -> list[str]:
    groups = [values[name] for name in names if values.get(name)]
    return [word for group in groups for word in ([group] if isinstance(group, str) else group)]


def _folders() -> list[Path]:
    from envbuild.recipe.find import search_folders
    from envbuild.site.settings import load_site

    return search_folders(load_site(os.environ).recipe_folders)


def _here(suffixes: tuple[str, ...]) -> list[str]:
    return sorted(name for name in os.listdir() if name.endswith(suffixes))
