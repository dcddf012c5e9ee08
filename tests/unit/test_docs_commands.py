"""Every command that help and docs show works: it is run here as far as that takes no time; what needs a network, a
daemon, a cluster or minutes is run by the test that data/commands.toml names."""

from __future__ import annotations

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from lab.commands import TOP, Shown, command_of, shown
from lab.shown_site import SITE_OF_PAGE, ShownSite

from ddp_train.args import build_parser
from envbuild.cli.commands import GROUPS, cli

SHOWN = shown()
# A line that several pages show is tried once for each site that they are about.
LINES = list({(one.line, SITE_OF_PAGE.get(one.where)): one for one in SHOWN if not one.is_form}.values())
FORMS = [one for one in SHOWN if one.is_form]
DIFFERENT = 1  # of `envbuild diff`
BY_HAND = "by hand on releases (docs/howto/jobs.md)"
# What is not run here, or not as it stands, by a pattern, and the test that runs such a one.
ELSEWHERE: dict[str, str] = tomllib.loads((TOP / "tests/unit/data/commands.toml").read_text())
# Of these not even the plan can be had here: a registry, channel or daemon is asked, or nothing is left to try.
NOT_TRIED = re.compile(
    r"envbuild (lock (?!pt_minimal --check$)|docker (?!.*--(out|push))|conda (?!.*--job))"
    r"|envbuild (add|remove) |envbuild check .*--(?:suggest|site)|envbuild init .*--update|envbuild venv .*--from"
    r"|envbuild (layers|bundle|exec|run|verify|preflight|doctor|attest|trust|cache|vault|rebuild|push|pull|audit"
    r"|history|bisect|report)"
    r"|envbuild store prune --recipe"
    r"|envbuild venv .*--python"
    r"|envbuild \w+ (pytorch_hub|aws_dlc)|--engine apptainer|--changed-since|(inspect|diff) .*(pt_cpu:cpu|docker://)"
)
BUILDS = {"venv", "conda", "docker", "enroot", "apptainer", "build", "init"}


def name(one: Shown) -> str:
    return f"{one.where}: {one.line}"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> ShownSite:
    return ShownSite(tmp_path_factory.mktemp("shown") / "top")


def elsewhere(line: str) -> str:
    """Return the test that runs such a command, "" for none."""
    return next((test for pattern, test in ELSEWHERE.items() if re.search(pattern, line)), "")


def test_commands_are_found_in_help_and_on_every_kind_of_page() -> None:
    places = {one.where for one in SHOWN}
    assert {"envbuild --help", "envbuild site check --help", "README.md", "docs/seeds/gh200-pbs.md"} <= places
    assert len(LINES) > 180


@pytest.mark.parametrize("one", LINES, ids=name)
def test_each_command_is_run_as_far_as_it_can_be(one: Shown, place: ShownSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place.here)
    found = one.arguments("envbuild")
    for arguments in found:
        command, rest = command_of(arguments)
        try:
            command.make_context(command.name, list(rest))
        except click.ClickException as error:
            raise AssertionError(error.format_message()) from error
        spoken = f"envbuild {' '.join(arguments)}"
        whole = tried(place, one.where, arguments, spoken)
        assert whole or elsewhere(spoken), f"no row of data/commands.toml names a test that runs {spoken}"
    assert found or elsewhere(one.line), "no row of data/commands.toml names a test that runs it"
    for words in one.arguments("torchrun") + one.arguments("python"):
        if "ddp_train" in words:
            build_parser().parse_args(words[words.index("ddp_train") + 1 :])


def tried(place: ShownSite, page: str, arguments: list[str], spoken: str) -> bool:
    """Run the command: as it stands (True), or without what cannot be done here."""
    if NOT_TRIED.search(spoken):
        return False
    words = place.words(page, arguments)
    kind, whole = words[0], True
    if kind in BUILDS and "--dry-run" not in words:
        words, whole = [*words, "--dry-run"], False
    if kind == "job" and "--submit" in words:
        words.remove("--submit")
        whole = False
    if kind == "init":  # other pages have another my_train and another pyproject.toml
        words = ["new" if word == "my_train" else word for word in words]
        words = [
            f"imported/{word}" if before == "--from" else word
            for before, word in zip(["", *words], words, strict=False)
        ]
    if words[:2] == ["site", "check"]:
        words.append("--offline")
    if words[:2] == ["site", "init"]:
        (place.here / "site.toml").unlink(missing_ok=True)
    run(place, tuple(words))
    return whole


@cache
def run(place: ShownSite, words: tuple[str, ...]) -> None:
    log = (place.here / "node1.log").read_bytes()
    done = CliRunner().invoke(cli, words, env=place.env, input=log)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    good = (0, DIFFERENT) if words[0] == "diff" else (0,)
    assert done.exit_code in good, done.output


@pytest.mark.parametrize("one", FORMS, ids=name)
def test_a_form_shows_options_that_there_are(one: Shown) -> None:
    for arguments in one.arguments("envbuild"):
        command, rest = command_of(arguments)
        own = rest[: rest.index("--")] if "--" in rest else rest
        known = {text for option in command.params for text in (*option.opts, *option.secondary_opts)}
        shown_options = set(re.findall(r"--[a-z][a-z-]*", " ".join(own)))
        assert shown_options <= known | {"--help"}, shown_options - known


def test_every_row_of_the_table_names_a_test_that_there_is_and_is_needed() -> None:
    unused = [row for row in ELSEWHERE if not any(re.search(row, one.line) for one in SHOWN)]
    gone = [
        test
        for test in ELSEWHERE.values()
        if test != BY_HAND and test.partition("::")[2] not in functions(TOP / "tests" / test.partition("::")[0])
    ]
    assert (unused, gone) == ([], [])


@cache
def functions(file: Path) -> frozenset[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def test_nobody_is_told_to_install_envbuild_from_an_index_before_the_first_release() -> None:
    """It is on none: whoever took its name there would be run by those who believe us."""
    if "<!-- before the release -->" not in (TOP / "README.md").read_text():
        return
    files = [TOP / "README.md", *(TOP / "docs").rglob("*.md"), *(TOP / "envbuild").rglob("*.py")]
    files += [TOP / "tests/golden/matrix/gitlab.json", *(TOP / ".github").rglob("*.yml")]
    told = re.compile(r"(pip|pipx|tool) install( -\S+)* ['\"\\]*(\$\{\w+:-)?envbuild\b(?!/)|uvx (--from )?envbuild\b")
    assert all(told.search(line) for line in ("pip install -q envbuild", "uv tool install 'envbuild", "uvx envbuild"))
    for file in files:
        # What tools/release puts in place of the block before it.
        text = re.sub(r"<!-- since the release\n.*?\n-->", "", file.read_text(), flags=re.DOTALL)
        found = told.search(text)
        assert found is None, f"{file}: {found and found[0]}"


def test_the_page_of_commands_has_each_command_in_its_group_of_help() -> None:
    page = (TOP / "docs/reference/commands.md").read_text(encoding="utf-8")
    for group, commands in GROUPS.items():
        rows = page.partition(f"\n## {group}\n")[2].partition("\n## ")[0]
        assert set(re.findall(r"^\| `envbuild ([a-z-]+)", rows, re.MULTILINE)) == set(commands), group
