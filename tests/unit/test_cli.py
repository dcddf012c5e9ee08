"""The command line: light to start, clear to misuse."""

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from lab.forked import run_forked
from lab.users import as_nobody

from envbuild.base.errors import UsageError
from envbuild.cli.commands import cli
from envbuild.cli.common import check_out

HEAVY = ("torch", "docker", "conda_lock", "rattler", "requests", "mousebender", "rich", "packaging", "jsonschema")


def run(*arguments: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    return run_forked(*arguments, cwd=cwd or Path.cwd(), env={**os.environ, **env})


@pytest.mark.parametrize("arguments", [["--help"], ["venv", "--help"], ["list"], ["show", "pt_cpu"]])
def test_light_commands_import_nothing_heavy(arguments: list[str]) -> None:
    script = (
        f"import sys; sys.argv = ['envbuild', *{arguments!r}]\n"
        "from envbuild.cli import main\n"
        "try:\n    main()\n"
        f"finally:\n    print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "[]"


def test_help_lists_every_command_with_examples() -> None:
    from envbuild.cli.commands import COMMANDS, GROUPS

    overview = run("--help").stdout
    for heading, group in GROUPS.items():
        below = overview.partition(f"\n{heading}:\n")[2].partition("\n\n")[0]
        assert re.findall("^  ([a-z-]+)", below, re.MULTILINE) == list(group), heading
    for name in COMMANDS:
        done = CliRunner().invoke(cli, [name, "--help"])
        assert done.exit_code == 0 and "Examples:" in done.output, name


def test_a_former_name_of_a_command_works_and_is_shown_nowhere() -> None:
    from envbuild.cli.commands import COMMANDS, RENAMED, cli

    context = click.Context(cli)
    for old, new in RENAMED.items():
        assert cli.get_command(context, old) is cli.get_command(context, new) is not None
        assert old not in COMMANDS and old not in [one.value for one in cli.shell_complete(context, old)]
    assert run("explain", "pt_cu126").stdout == run("check", "pt_cu126").stdout != ""


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["vnev", "pt_cpu"], 2, "did you mean 'venv'"),
        (["push", "pt_cpu"], 2, "REF"),
        (["venv", "pt_cpuu"], 2, "pt_cpu"),
        (["venv", "pt_cpu", "--target", "cpu-x86-64"], 2, "cpu-x86_64"),
        (["plan", "pt_cpu", "--target", "cu126-x86_64"], 2, "cpu-x86_64"),
        (["venv", "pt_cpu", "--target", "cu126-x86_64"], 2, "recipes with this target: pt_cu126"),
        (["lock", "pt_cpu", "--target", "cu126-x86_64"], 2, "recipes with this target: pt_cu126"),
        (["lock", "--upgrade", "pt_cpu"], 2, "--upgrade took the recipe 'pt_cpu' as a package"),
        (["lock", "pt_cpu", "--upgrade=nonesuch", "--offline"], 3, "nonesuch"),
        (["venv", "pytorch_hub", "--target", "cpu-x86_64", "--locked"], 2, "takes torch from docker.io/pytorch"),
        (["verify", "./nowhere"], 2, "does not exist"),
        (["verify", "pt_cpuu"], 2, "did you mean the recipe 'pt_cpu'"),
        (["verify", "."], 2, "not an artifact"),
        (["venv", "pt_cpu", "--nope"], 2, "--nope"),
        (["venv", "pt_cpu", "--verify", "quick", "--faults"], 2, "--verify quick and --faults exclude each other"),
        (["docker", "pt_cpu", "--tag", "r.example/x:1", "--push", "--verify", "quick"], 2, "needs a full verification"),
        (
            ["job", "pt_cpu", "--site", "slurm-modules", "--script", "t.py", "--lr", "0.1"],
            2,
            "put -- before arguments of the training script",
        ),
    ],
)
def test_misuse_is_one_clear_message(arguments: list[str], code: int, said: str, tmp_path: Path) -> None:
    done = run(*arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert said in done.stderr and "Traceback" not in done.stderr


def test_a_venv_for_another_architecture_is_refused_with_the_way_out(tmp_path: Path) -> None:
    import platform

    other = "cpu-aarch64" if platform.machine() == "x86_64" else "cpu-x86_64"
    done = run("venv", "pt_cpu", "--target", other, cwd=tmp_path)
    assert done.returncode == 6 and other in done.stderr and "hint:" in done.stderr


def test_a_place_that_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "thesis.tex").write_text("years")
    done = run("venv", "pt_cpu", "--out", str(theirs), cwd=tmp_path)
    assert done.returncode == 2 and "not made by envbuild" in done.stderr, done.stderr
    assert (theirs / "thesis.tex").read_text() == "years"


@pytest.mark.parametrize(
    "line",
    [
        "venv pt_cpu --out no/such/venv",
        "venv pt_cpu --out no/such/venv --dry-run",
        "conda pt_cpu --prefix no/such/env",
        "enroot pt_cpu --out no/such/pt.sqsh",
        "apptainer --from oci:image --out no/such/pt.sif",
        "docker pt_cpu --out oci:no/such/image",
        "bundle pt_cpu --out no/such/bundle",
        "venv pt_cpu --job --site slurm-modules --bundle no/such/bundle",
        "job pt_cpu --site slurm-modules --out no/such/job.sbatch",
        "site init --out no/such/site.toml",
    ],
)
def test_a_slip_in_a_path_makes_no_folders(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli, line.split())
    assert isinstance(done.exception, UsageError) and list(tmp_path.iterdir()) == []
    assert f"the folder {tmp_path}/no does not exist" in done.exception.message
    assert str(done.exception.hint).endswith(f": mkdir -p {tmp_path}/no")


def test_folders_that_are_no_slip_are_left_to_what_writes_into_them(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    check_out(tmp_path / "file/b/c")
    (tmp_path / "closed").mkdir()
    with as_nobody(tmp_path / "closed"):
        check_out(tmp_path / "closed/a/b/c")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="/link does not exist"):
        check_out(tmp_path / "link/b/c")
    check_out(tmp_path / "new/venv")
    check_out(None)


@pytest.mark.parametrize("target", ["cpu-x86_64", "cpu-aarch64"])
def test_the_plan_is_the_same_each_time_and_for_any_target(target: str, tmp_path: Path) -> None:
    done = [
        run("plan", "pt_cpu", "--target", target, "--elsewhere", "--json", "--locked", cwd=tmp_path) for _ in range(2)
    ]
    assert done[0].returncode == 0, done[0].stderr
    assert done[0].stdout == done[1].stdout
    plan = json.loads(done[0].stdout)
    assert plan["target"] == target and plan["layers"][0]["kind"] == "python"
    assert plan["layers"][-1]["name"] == "ddp-train"
    names = [layer["name"] for layer in plan["layers"] if layer["kind"] == "wheel"]
    assert "torch" in names and not [name for name in names if name.startswith("nvidia")]


def test_dry_run_writes_nothing(tmp_path: Path) -> None:
    done = run("venv", "pt_cpu", "--dry-run", "--locked", cwd=tmp_path, ENVBUILD_STORE=str(tmp_path / "store"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].endswith("venv") and list(tmp_path.iterdir()) == []


def test_locks_that_are_shipped_are_current() -> None:
    done = run("lock", "pt_cpu", "pt_minimal", "pt_cuda_conda", "--check")
    assert done.returncode == 0, done.stderr
    for target in ("cpu-x86_64", "cpu-aarch64", "cu129-x86_64"):
        assert f"conda-lock.yml: current for {target}" in done.stderr


@pytest.mark.parametrize("options", [["--offline"], []], ids=["offline", "unreachable"])
def test_a_channel_that_cannot_be_reached_takes_a_few_lines(options: list[str], tmp_path: Path) -> None:
    """They name what is missing, its source, and the way to bring it; locks that ship need no channel at all."""
    variables = dict.fromkeys(("https_proxy", "HTTPS_PROXY", "PIP_PROXY"), "http://127.0.0.1:9")
    variables |= {"ENVBUILD_STORE": str(tmp_path / "store"), "HOME": str(tmp_path)}
    forge = "https://conda.anaconda.org/conda-forge: "
    build = run("conda", "pt_cpu", "--no-verify", *options, cwd=tmp_path, **variables)
    assert build.returncode == 4 and " conda packages: no source has them" in build.stderr, build.stderr
    assert forge + ("not asked, --offline" if options else "[Errno 111] Connection refused") in build.stderr
    assert "`envbuild bundle RECIPE --kind conda`" in build.stderr and len(build.stderr.splitlines()) < 8
    recipe = tmp_path / "recipes/pt_cpu/recipe.toml"
    recipe.parent.mkdir(parents=True)
    shutil.copy(Path(__file__).parents[2] / "recipes/pt_cpu/recipe.toml", recipe)
    lock = run("lock", "recipes/pt_cpu", "--conda", *options, cwd=tmp_path, **variables)
    assert lock.returncode == 3 and "cannot be read" in lock.stderr and lock.stderr.count(forge) == 1, lock.stderr
    assert "bring the lock of a host that reaches it" in lock.stderr and len(lock.stderr.splitlines()) < 8


@pytest.mark.parametrize("signal_name", ["SIGINT", "SIGTERM"])
def test_an_interruption_where_python_drops_exceptions_still_interrupts(signal_name: str) -> None:
    """A weak reference's callback is such a place; the import system uses one for every module."""
    script = f"""if True:
        import signal, sys, time, weakref
        from envbuild.cli import commands, main
        class Thing: pass
        def lose():
            thing = Thing()
            kept = weakref.ref(thing, lambda _: signal.raise_signal(signal.{signal_name}))
            del thing
            time.sleep(20)
        commands.cli.main = lambda **_: lose()
        sys.argv = ["envbuild", "list"]
        main()
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=15)
    assert (done.returncode, done.stderr) == (130, "envbuild: interrupted\n")


def test_an_interruption_within_code_made_of_text_exits_as_any_other(tmp_path: Path) -> None:
    """Where dataclasses and named tuples are made, that is while modules are imported: Python would die of SIGINT."""
    (tmp_path / "interrupted.py").write_text(
        textwrap.dedent("""
            import signal
            from envbuild.cli import commands, main
            commands.cli.main = lambda **_: exec("import signal; signal.raise_signal(signal.SIGINT)")
            main()
        """)
    )
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).resolve().parents[2])])
    done = subprocess.run(
        [sys.executable, "-m", "interrupted"],
        capture_output=True,
        text=True,
        timeout=15,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert (done.returncode, done.stderr) == (130, "envbuild: interrupted\n")


def test_a_command_that_ends_with_a_code_of_its_own_ends_with_it() -> None:
    script = (
        "import sys, click\n"
        "from envbuild.cli import commands, main, recipes\n"
        "recipes.stop_command = click.Command('stop', callback=lambda: click.get_current_context().exit(7))\n"
        "commands.COMMANDS['stop'] = ('recipes', 'Stop.')\n"
        "sys.argv = ['envbuild', 'stop']\n"
        "main()\n"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 7


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("/opt/tools/bin/envbuild", "/opt/tools/bin/envbuild"),
        ("/opt/envbuild/__main__.py", str(Path(sys.executable).parent / "envbuild")),
    ],
)
def test_nodes_are_told_a_program_that_they_can_start(
    program: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from envbuild.environment import own_command

    monkeypatch.setattr(sys, "argv", [program])
    assert own_command() == expected
