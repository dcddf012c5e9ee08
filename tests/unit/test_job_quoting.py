"""Whatever a recipe, a site or a user says arrives unchanged, or is refused: run by real bash."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from unit.job_plans import LOADED, MODULES, PLAN, SIF, SITE, Stage, recorder

from envbuild.base.errors import UsageError
from envbuild.jobs.model import JobPlan
from envbuild.jobs.schedulers import render
from envbuild.runtimes.base import directive, heredoc, inside, mount, word, words
from envbuild.site.jobs import SchedulerTable
from examples import examples

# What shells, heredocs and printf stumble over; no control characters but tab and newline, which are refused.
NASTY = (
    "",
    "-n",
    "--",
    "'",
    '"',
    "\\",
    "$(touch pwned)",
    "`touch pwned`",
    "${HOME}",
    "$'\\n'",
    "a b",
    "a\nb",
    "\n",
    "*",
    "!!",
    "#",
    "; touch pwned",
    "& touch pwned",
    "%s",
    "NODE",
    "x\nNODE\ny",
    "SETTINGS\ntouch pwned\n",
    "a=b",
    "~",
    "@NODES@",
    "é",
    "\u2028",
    "🚀",
    "a\tb",
    "$",
    "\\\n",
    "'\"'\"'",
    "{a,b}",
    "<<EOF",
    "|",
    "<",
    ">",
    "[!a]",
    "\u00a0",
)
TEXT = st.one_of(
    st.sampled_from(NASTY),
    st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=20),
    st.lists(st.sampled_from(NASTY), max_size=4).map("".join),
)
ONE = replace(PLAN, nodes=1, nproc_per_node=1, strategy="single", run_files=(), variables=())


@contextmanager
def _stage(nodes: int = 1) -> Iterator[Stage]:
    with tempfile.TemporaryDirectory() as folder:
        yield Stage(Path(folder), nodes)


def _in(stage: Stage, plan: JobPlan, folder: str = "work") -> JobPlan:
    """`plan` in `folder` of the stage, with a recording interpreter."""
    work = stage.folder / folder
    work.mkdir(exist_ok=True)
    artifact = replace(plan.artifact, python=recorder(stage.folder / "env" / "python"))
    return replace(plan, work=str(work), artifact=artifact)


def _python(recorded: list[Any]) -> Any:
    (found,) = [one for one in recorded if one[0] == "python"]
    return found


@examples(40)
@given(values=st.lists(TEXT, max_size=5))
@example(values=list(NASTY))
def test_any_words_come_through_bash_and_sh(values: list[str]) -> None:
    printed = "".join(f"{value}\0" for value in values)
    text = f"values=({words(values)})\n" + 'printf "%s\\0" ${values[@]+"${values[@]}"}'
    if values:
        assert subprocess.run(["bash", "-c", text], stdout=subprocess.PIPE).stdout.decode() == printed
        plain = f'printf "%s\\0" {" ".join(word(value) for value in values)}'
        assert subprocess.run(["sh", "-c", plain], stdout=subprocess.PIPE).stdout.decode() == printed


@examples(40)
@given(text=st.lists(TEXT, max_size=5).map("\n".join))
@example(text="END\nEND_\ntouch pwned")
def test_any_text_comes_through_a_heredoc(text: str) -> None:
    done = subprocess.run(["bash"], input=heredoc("cat", text, "END").encode(), capture_output=True)
    assert (done.stdout.decode().rstrip(), done.stderr) == (text.rstrip(), b"")


@examples(15)
@given(
    arguments=st.lists(TEXT, max_size=4),
    value=TEXT,
    launcher=st.sampled_from(["srun", "mpirun", "mpiexec", "ssh", "pbsdsh"]),
)
@example(arguments=list(NASTY), value="\n".join(NASTY), launcher="srun")
@example(arguments=list(NASTY), value="\n".join(NASTY), launcher="ssh")
def test_arguments_and_variables_arrive_unchanged_with_a_recording_srun(
    arguments: list[str], value: str, launcher: Any
) -> None:
    with _stage() as stage:
        pbs = launcher not in ("srun", "mpirun")
        plan = replace(
            _in(stage, ONE),
            command=("-c", *arguments),
            variables=(("GIVEN", value),),
            scheduler="pbs" if pbs else "slurm",
            launcher=launcher,
        )
        done, recorded = stage.run(render(plan))
        assert done.returncode == 0, done.stderr
        _, given_arguments, variables = _python(recorded)
        assert given_arguments == ["-c", *arguments]
        assert variables["GIVEN"] == value
        assert not list(stage.folder.rglob("pwned"))


FOLDERS = ("it's a folder", "$(touch pwned)", "`id`", 'a"b', "-x", "a;b", "ü 🚀", "a*", "~", "&", "a\\b", "(", "!")


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_working_folder_and_an_interpreter_may_have_any_name_with_a_recording_ssh(folder: str) -> None:
    with _stage() as stage:
        plan = _in(stage, replace(ONE, scheduler="pbs", launcher="ssh"), folder)
        plan = replace(
            plan,
            artifact=replace(plan.artifact, python=recorder(stage.folder / folder / "python")),
            run_files=(("--out", f"{folder}.pt"),),
        )
        done, recorded = stage.run(render(plan))
        assert done.returncode == 0, done.stderr
        _, arguments, variables = _python(recorded)
        run = stage.folder / folder / "pt_cpu_77.head"
        assert arguments[-2:] == ["--out", f"{run}/{folder}.pt"]
        assert variables["ENVBUILD_RUN"] == str(run)
        assert not list(stage.folder.rglob("pwned"))


@pytest.mark.parametrize("image", [f"{folder}.sif" for folder in FOLDERS])
def test_an_image_may_have_any_name_with_a_recording_apptainer(image: str) -> None:
    with _stage() as stage:
        mounts = ((str(stage.folder), str(stage.folder)),)
        path = str(stage.folder / image)
        plan = _in(stage, replace(ONE, artifact=SIF, runtime="apptainer", mounts=mounts))
        plan = replace(plan, artifact=replace(plan.artifact, path=path))
        done, recorded = stage.run(render(plan))
        assert done.returncode == 0, done.stderr
        (started,) = [arguments for tool, arguments, *_ in recorded if tool == "apptainer"]
        bind = ["--bind", ":".join(mounts[0])]
        assert started[:6] == ["exec", "--no-home", *bind, path, plan.artifact.python]
        assert _python(recorded)[1] == list(ONE.command)


MODULE = """\
module() {
    [ "$1" != load ] || printf '%s\\n' "$2" >>"$RECORDED.modules"
    [ "$2" != absent ]
}
"""


@pytest.mark.parametrize("name", ["python/3.11", "it's; touch pwned", "$(touch pwned)", "a b", "`id`", "*"])
def test_a_module_may_have_any_name_with_a_recording_module(name: str) -> None:
    with _stage() as stage:
        init = stage.folder / "it's init.sh"
        init.write_text(MODULE)
        site = replace(SITE, modules=replace(MODULES.modules, init=str(init), run=(name,)))
        done, _ = stage.run(render(replace(_in(stage, ONE), site=site, modules=(name, "b"))))
        assert done.returncode == 0, done.stderr
        assert (stage.folder / "recorded.modules").read_text() == f"{name}\nb\n"
        assert not list(stage.folder.rglob("pwned"))


def test_a_module_that_cannot_be_loaded_stops_the_job(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    init = tmp_path / "init.sh"
    init.write_text(MODULE)
    site = replace(SITE, modules=replace(MODULES.modules, init=str(init)))
    modules = (*LOADED, "absent")
    done, recorded = stage.run(render(replace(_in(stage, ONE), site=site, modules=modules)))
    assert done.returncode == 6
    assert "module absent cannot be loaded" in done.stderr
    assert recorded == []


def test_a_site_whose_nodes_have_no_modules_stops_the_job(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    site = replace(SITE, modules=replace(MODULES.modules, init="/nonexistent/lmod.sh"))
    done, recorded = stage.run(render(replace(_in(stage, ONE), site=site, modules=LOADED)))
    assert (done.returncode, recorded) == (6, [])
    assert "there is no module command" in done.stderr


@pytest.mark.parametrize("value", ["a\0b", "a\rb", "\x1b[31m", "\udcff", "a\x7f"])
def test_what_no_script_can_hold_is_refused(value: str) -> None:
    for plan in (
        replace(PLAN, command=("train.py", value)),
        replace(PLAN, variables=(("A", value),)),
        replace(PLAN, artifact=replace(PLAN.artifact, python=f"/env/{value}")),
    ):
        with pytest.raises(UsageError):
            render(plan)


DIRECTIVES = ("partition", "account", "qos", "constraint")


@given(value=TEXT)
def test_a_directive_says_a_value_whole_or_refuses_it(value: str) -> None:
    for key in DIRECTIVES:
        site = replace(SITE, scheduler=replace(SchedulerTable(), **cast(Any, {key: value})))
        try:
            lines = render(replace(PLAN, site=site)).splitlines()
        except UsageError as error:
            assert f"[scheduler] {key}" in error.message
            continue
        assert not value or f"#SBATCH --{key}={value}" in lines


@pytest.mark.parametrize("value", ["a b", "a\nb", "'a'", '"a"', "a\\", "a#b", "%x", "", "a\u2028b", "`a`"])
def test_values_that_schedulers_cut_are_refused_by_name(value: str) -> None:
    with pytest.raises(UsageError, match=r"\[scheduler\] account"):
        directive("--account=", value, "[scheduler] account")


@pytest.mark.parametrize("line", ["--comment=a\nrm -rf /", "a\rb", ""])
def test_a_line_of_the_site_is_one_line(line: str) -> None:
    site = replace(SITE, scheduler=SchedulerTable(directives=(line,)))
    for plan in (PLAN, replace(PLAN, scheduler="pbs", launcher="ssh")):
        with pytest.raises(UsageError):
            render(replace(plan, site=site))


@pytest.mark.parametrize(
    "pair", [("/a b", "/a"), ("/a", "b"), ("a", "/a"), ("/a,b", "/c"), ("/a", "/b:RO"), ("/a\n", "/a"), ("/a'", "/a")]
)
def test_a_mount_that_runtimes_would_cut_is_refused(pair: tuple[str, str]) -> None:
    with pytest.raises(UsageError):
        mount(*pair)


def test_a_container_sees_a_path_by_the_longest_mount() -> None:
    mounts = (("/", "/host"), ("/fsx", "/data:ro"), ("/fsx/own", "/fsx/own"))
    assert inside("/fsx/own/x", mounts) == "/fsx/own/x"
    assert inside("/fsx/owner", mounts) == "/data/owner"
    assert inside("/tmp", mounts) == "/host/tmp"
    assert inside("/fsx", (("/fsx", "/"),)) == "/"
    with pytest.raises(UsageError, match="containers do not see /tmp"):
        inside("/tmp", mounts[1:])
