"""The option --job of the commands that build an environment in a folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from envbuild.cli.common import FolderOptions, check_out, finish, log, own_command, packed, print_json, show_plan
from envbuild.environment import Environment
from envbuild.errors import UsageError
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.targets import Target, host_arch

if TYPE_CHECKING:
    from envbuild.kinds import FolderArtifact


@dataclass(frozen=True, slots=True)
class AsJob:
    """Values of the options for a build in a job, see `job_options`. Raises UsageError for options without --job."""

    job: bool
    site: str | None
    bundle: Path | None
    submit: bool
    script: Path | None

    def __post_init__(self) -> None:
        if not self.job and (self.site or self.bundle or self.submit or self.script):
            raise UsageError("--site, --bundle, --submit and --script are for --job", "add --job")


job_options = packed(
    AsJob, "as_job",
    click.option(
        "--job", is_flag=True,
        help="Render the job that builds and verifies it on a node of --site, in [paths] shared there where --out "
        "says nothing else. With --dry-run the job is printed, and nothing locked, bundled or submitted.",
    ),
    click.option(
        "--site", metavar="SITE", help="Name or path of a site file. Default: the site.toml in force."
    ),
    click.option(
        "--bundle", type=click.Path(path_type=Path), metavar="DIR",
        help="For nodes without a network: an offline bundle, made there when it is missing or stale.",
    ),
    click.option("--submit", is_flag=True, help="Hand the job to sbatch or qsub."),
    click.option(
        "--script", type=click.Path(path_type=Path), metavar="FILE", help="Write the job there. Default: print it."
    ),
)  # fmt: skip


def build_folder(
    name: str,
    loaded: LoadedRecipe,
    target: Target,
    out: Path | None,
    as_job: AsJob,
    how: FolderOptions,
    environment: Environment,
    python: str | None = None,
) -> None:
    """Build the environment of the kind `name`, on this host or in a job, and print its path."""
    from envbuild.artifacts.state import check_place
    from envbuild.kinds import ARTIFACTS, FolderArtifact
    from envbuild.kinds.folder import make_environment, prepare_folder
    from envbuild.verify.static_checks import check_torch

    kind = ARTIFACTS[name]
    assert isinstance(kind, FolderArtifact)
    if as_job.job:
        options = ("--python", python) if python else ()
        _build_by_job(kind, loaded, target, out, as_job, how, environment, options)
        return
    plan, trainer = prepare_folder(
        kind, loaded, target, environment, locked=how.locked, offline=how.offline, log=log,
        compile_bytecode=how.compile_bytecode, write=not how.dry_run,
    )  # fmt: skip
    check_torch(loaded, plan, verify=not how.no_verify)
    path = out or kind.default_path(loaded.recipe.name, target.name)
    if how.dry_run:
        check_place(path)
        show_plan(plan, how.as_json, path)
        return
    result = make_environment(
        kind, plan, trainer, environment, path, offline=how.offline, python=python,
        verify=not how.no_verify, faults=how.faults,
    )  # fmt: skip
    finish(result, path, how.as_json)


def _build_by_job(
    kind: FolderArtifact,
    loaded: LoadedRecipe,
    target: Target,
    out: Path | None,
    as_job: AsJob,
    how: FolderOptions,
    environment: Environment,
    options: tuple[str, ...] = (),
) -> None:
    """Render the job that builds `kind` of the recipe, and submit it on request.

    `options` are additional options of the command that the job runs.
    """
    from envbuild.jobs.build import Build, plan_build, render_build
    from envbuild.jobs.model import JobRequest
    from envbuild.jobs.submit import default_script, submit_script, write_script
    from envbuild.kinds import plan_of
    from envbuild.site.settings import load_site

    if target.arch != host_arch() and as_job.bundle is None:
        raise UsageError(
            f"nodes of {target.name} cannot run the envbuild of this {host_arch()} host ({own_command()})",
            "give --bundle DIR, a folder that the nodes see: it brings envbuild for them",
        )
    check_out(as_job.bundle, "--bundle")
    check_out(as_job.script, "--script")
    site = load_site(environment.variables, as_job.site)
    top = Path(site.paths.shared or Path.cwd()) / "build"
    place = (out or top / loaded.recipe.name / target.name / kind.default_name).absolute()
    if not how.dry_run:  # nodes may be unable to reach an index, so resolve now
        plan_of(
            kind, loaded, target, environment, locked=how.locked, offline=how.offline, log=log,
            here=False, verify=not how.no_verify,
        )  # fmt: skip
    tools = ""
    if as_job.bundle is not None:
        from envbuild.bundle import make_bundle, tools_python

        tools = tools_python(loaded)
        if not how.dry_run:
            make_bundle(loaded, target, environment, as_job.bundle, log, kinds=(kind.name,), offline=how.offline)
    flags = [
        ("--faults", how.faults),
        ("--no-verify", how.no_verify),
        ("--compile-bytecode", how.compile_bytecode),
        ("--offline", how.offline and as_job.bundle is None),
    ]
    build = Build(
        kind=kind.name,
        name=loaded.recipe.name,
        recipe=str(loaded.folder.absolute()),
        target=target.name,
        place=str(place),
        envbuild=own_command(),
        bundle=str(as_job.bundle.absolute()) if as_job.bundle else "",
        tools=tools,
        options=(*options, *(option for option, wanted in flags if wanted)),
    )
    job = plan_build(build, JobRequest(current=Path.cwd()), site)
    text = render_build(job, build)
    script, number = None if how.dry_run else as_job.script, None
    hint = "name another file with --script, or another folder by [paths] shared of the site"
    if as_job.submit and not how.dry_run:
        script = script or default_script(job, Path(job.work))
        named = as_job.script is not None
        number = submit_script(job, text, script, environment.variables, hint, named=named)
        log(f"submitted {script} to {job.scheduler}; {place} appears when it is built and has passed")
    elif script is not None:
        write_script(text, script, hint)
    if how.as_json:
        print_json({
            "job": number, "path": str(place), "scheduler": job.scheduler,
            "script": str(script.absolute()) if script else None, "text": text,
        })  # fmt: skip
    elif number is not None:
        click.echo(number)
    else:
        click.echo(script if script is not None else text, nl=script is not None)
