"""Shell completion: the values of each parameter, each shell's words, and silence after errors."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.shell_completion import BashComplete, CompletionItem
from lab.commands import TOP
from lab.shellcheck import shellcheck

from envbuild.cli import complete
from envbuild.cli.commands import cli

HEAVY = ("torch", "docker", "conda_lock", "rich", "rattler", "requests")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two own recipes, a broken one, a site, artifacts and image files; the current one."""
    for name in ("mine", "my recipe"):
        recipe = (TOP / "recipes/pt_minimal/recipe.toml").read_text()
        (tmp_path / "recipes" / name).mkdir(parents=True)
        (tmp_path / "recipes" / name / "recipe.toml").write_text(recipe.replace('"pt_minimal"', f'"{name}"', 1))
    (tmp_path / "recipes/mistaken").mkdir()
    (tmp_path / "recipes/mistaken/recipe.toml").write_text("not TOML")
    (tmp_path / "sites").mkdir()
    (tmp_path / "sites/mine.toml").write_text("")
    (tmp_path / "build/mine/cpu-x86_64/venv").mkdir(parents=True)
    for name in (
        "build/mine/cpu-x86_64/mine.sqsh",
        "a:b.sif",
        "my image.sqsh",
        "notes.txt",
        "old.receipt.json",
        "my_train.py",
    ):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path


def completed(*words: str) -> list[CompletionItem]:
    return BashComplete(cli, {}, "envbuild", complete.VARIABLE).get_completions(list(words[:-1]), words[-1])


def values(*words: str) -> list[str]:
    return [item.value for item in completed(*words)]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["ve"], ["venv", "verify"]),
        (["site", "s"], ["show"]),
        (["venv", "--lo"], ["--locked"]),
        (["docker", "pt_cpu", "--format", "d"], ["docker"]),
        (["venv", "pt_m"], ["pt_minimal"]),
        (["venv", "m"], ["mine", "mistaken", "my recipe"]),
        (["lock", "pt_cpu", "pt_m"], ["pt_minimal"]),
        (["store", "prune", "--recipe", "my"], ["my recipe"]),
        (["venv", "mine", "--target", ""], ["cpu-aarch64", "cpu-x86_64"]),
        (["venv", "mine", "--target=cpu-x"], ["cpu-x86_64"]),
        (["venv", "--target", "rocm"], ["rocm6.4-x86_64"]),  # no recipe yet: those of all
        (["lock", "mine", "pt_cu126", "--target", "c"], ["cpu-aarch64", "cpu-x86_64", "cu126-aarch64", "cu126-x86_64"]),
        (["run", "mine", "--target", "cpu-a"], ["cpu-aarch64"]),
        (["job", "pt_cpu", "--site", "m"], ["mine"]),
        (["site", "show", "pbs"], ["pbs-gh200"]),
        (["site", "init", "--from", "hyper"], ["hyperpod"]),
        (["verify", "b"], ["build/mine/cpu-x86_64/venv", "build/mine/cpu-x86_64/mine.sqsh"]),
        (["report", "o"], ["old.receipt.json"]),
        (["report", "a:b.sif", "--against", "build/mine/cpu-x86_64/v"], ["build/mine/cpu-x86_64/venv"]),
        (["diff", "a:b.sif", "my"], ["my recipe", "my image.sqsh"]),
        (["run", "m"], ["mine", "mistaken", "my recipe", "my image.sqsh", "my_train.py"]),
        (["job", "m"], ["mine", "mistaken", "my recipe", "my image.sqsh"]),
        (["completion", ""], ["bash", "zsh", "fish"]),
    ],
)
def test_values_of_each_kind(place: Path, words: list[str], expected: list[str]) -> None:
    assert values(*words) == expected


@pytest.mark.parametrize(
    ("words", "suffixes"),
    [
        (["venv", "./m"], (".toml",)),
        (["site", "check", "~/"], (".toml",)),
        (["inspect", "/scratch/"], (".sqsh", ".sif")),
        (["report", "receipts/"], (".sqsh", ".sif", ".json")),
        (["job", "mine", "--script", ""], (".py",)),
        (["diagnose", "logs/"], ()),
        (["venv", "mine", "--out", "b"], None),  # click's own, of a path
    ],
)
def test_paths_are_left_to_the_shell(place: Path, words: list[str], suffixes: tuple[str, ...] | None) -> None:
    assert [(item.type, item.suffixes) for item in completed(*words)] == [("file", suffixes)]


def test_every_parameter_that_names_such_a_thing_is_completed(place: Path) -> None:
    """A new command has completion, too."""
    wanted = {"RECIPE", "TARGET", "SITE", "RECIPE|ARTIFACT", "RECIPE|ARTIFACT|RECEIPT"}
    missing, seen = [], set()
    for context in contexts(cli, click.Context(cli, info_name="envbuild")):
        for parameter in context.command.params:
            word = parameter.metavar or (
                parameter.human_readable_name if parameter.param_type_name == "argument" else ""
            )
            word = word.strip("[]….")
            seen.add(word)
            if word in wanted and not parameter.shell_complete(context, ""):
                missing.append(f"{context.command_path} {parameter.name}")
    assert wanted <= seen and missing == []


def contexts(command: click.Command, context: click.Context) -> Iterator[click.Context]:
    yield context
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from contexts(below, click.Context(below, info_name=name, parent=context))


def answer(monkeypatch: pytest.MonkeyPatch, shell: str, *arguments: str) -> None:
    monkeypatch.setenv(complete.VARIABLE, shell)
    monkeypatch.setattr(sys, "argv", ["envbuild", *arguments])
    assert complete.answer() == 0


@pytest.mark.parametrize(
    ("shell", "arguments", "expected"),
    [
        # bash gives the line up to the cursor, and the end of its last word that it replaces: its words end at : and =.
        ("bash", ["envbuild venv mine --target=cpu-x", "cpu-x"], ["plain\tcpu-x86_64\t"]),
        ("bash", ["envbuild verify a:", ""], ["plain\tb.sif\t"]),
        ("bash", [r"envbuild verify my\ im", r"my\ im"], ["plain\tmy image.sqsh\t"]),
        ("bash", ['envbuild verify "my im', "my im"], ["plain\tmy image.sqsh\t"]),
        ("bash", ['envbuild venv "mine" --target cpu-x', "cpu-x"], ["plain\tcpu-x86_64\t"]),
        ("bash", ["envbuild push a:b.sif host:5000/x:1 --js", "--js"], ["plain\t--json\tPrint one JSON object."]),
        ("zsh", ["venv", "mine", "--target=cpu-x"], ["plain\t--target=cpu-x86_64\t"]),
        ("zsh", ["inspect", "/scratch/"], ["file\t.sqsh .sif\t"]),
        ("fish", ["verify", r"my\ im"], ["plain\tmy image.sqsh\t"]),
        ("fish", ["verify", '"a:'], ["plain\ta:b.sif\t"]),
        # Mistakes: no such command, no such shell's arguments, no arguments.
        ("bash", ["envbuild vnev x", "x"], []),
        ("bash", ["envbuild venv mistaken --target ", ""], []),
        ("bash", ["envbuild venv"], []),
        ("fish", [], []),
    ],
)
def test_each_shell_gets_what_it_inserts(
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    shell: str,
    arguments: list[str],
    expected: list[str],
) -> None:
    answer(monkeypatch, shell, *arguments)
    assert (capsys.readouterr().out.splitlines(), capsys.readouterr().err) == (expected, "")


def test_a_mistake_in_the_site_file_is_not_shown_in_the_prompt(place: Path) -> None:
    (place / "config/envbuild").mkdir(parents=True)
    (place / "config/envbuild/site.toml").write_text("no [TOML")
    done = subprocess.run(
        [sys.executable, "-m", "envbuild", "venv", "m"],
        capture_output=True,
        text=True,
        env={**os.environ, complete.VARIABLE: "zsh", "PYTHONPATH": str(TOP)},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_names_of_commands_import_no_command_and_values_nothing_heavy(place: Path) -> None:
    script = (
        "import sys; from envbuild.cli.complete import answer\n"
        f"def ask(*words, among={HEAVY!r}):\n"
        "    sys.argv = ['envbuild', *words]; answer()\n"
        "    print([m for m in among if m in sys.modules], file=sys.stderr)\n"
        "ask('ve', among=['envbuild.cli.folder', 'envbuild.cli.inspect'])\n"
        "for name in ('venv', 'job', 'inspect', 'lock', 'attest'): ask(name, '')\n"
        "ask('job', 'mine', '--target', ''); ask('job', '--site', '')\n"
    )
    env = {**os.environ, complete.VARIABLE: "zsh", "PYTHONPATH": str(TOP)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env)
    assert done.stdout.count("plain\t") > 50 and done.stderr == "[]\n" * 8


def test_a_value_that_is_not_printable_is_not_offered(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "evil\x1b[2J.sif").touch()
    answer(monkeypatch, "zsh", "verify", "")
    assert "a:b" in (shown := capsys.readouterr().out) and "evil" not in shown


def test_shellcheck_finds_nothing_in_the_script_for_bash() -> None:
    assert shellcheck("--shell=bash", TOP / "envbuild/data/completion.bash") == ""
