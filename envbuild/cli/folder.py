"""`envbuild venv` and `envbuild conda`, on this host or in a job."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import click

from envbuild.base.errors import UsageError
from envbuild.base.files import absolute_path, build_folder, home_folder
from envbuild.base.progress import log, step
from envbuild.cli import complete
from envbuild.cli.common import (
    BUILD_OPTIONS,
    PATH,
    BuildOptions,
    Decorator,
    build_options,
    check_out,
    hand_over,
    open_recipe,
    open_target,
    run_environment,
    show,
    show_job,
    show_plan,
    use_recipe,
)
from envbuild.cli.report import reported, summarise
from envbuild.contract.kinds import ARTIFACTS, FolderArtifact
from envbuild.contract.state import check_place
from envbuild.environment import Environment, own_command
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.targets import Target, host_arch
from envbuild.site.settings import load_site


def _folder_options(kind: str, *own: Decorator) -> Decorator:
    return build_options(
        click.option(
            "--from",
            "sources",
            multiple=True,
            type=PATH,
            metavar="PATH",
            help="Make RECIPE of what `envbuild init` reads, such as requirements.txt, or take what changed there "
            "into it. RECIPE is then a name; default: the project's, else its folder's. Repeatable.",
        ),
        "target",
        click.option(
            "--prefix",
            "-p",
            type=PATH,
            metavar="DIR",
            help=f"The environment's folder. Default: build/RECIPE/TARGET/{kind}, with --job in [paths] shared.",
        ),
        click.option(
            "--out",
            type=PATH,
            metavar="PATH",
            help="With --job: write the job to this file; default: print it. Without --job: as --prefix.",
        ),
        *own,
        click.option(
            "--job",
            is_flag=True,
            help="Render the job that builds and verifies it on a node of --site: at --prefix, or in its [paths] "
            "shared. With --dry-run the job is printed, and nothing locked, bundled or submitted.",
        ),
        "site",
        click.option(
            "--bundle",
            type=PATH,
            metavar="DIR",
            help="For nodes without a network: an offline bundle, made there when it is missing or stale.",
        ),
        click.option("--submit", is_flag=True, help="Submit the job with sbatch or qsub."),
        click.option("--script", type=PATH, hidden=True, help="As --out, with --job."),
        "verify",
        "no-verify",
        "faults",
        "exact",
        click.option(
            "--compile-bytecode", is_flag=True, help="Compile all modules now instead of at their first import."
        ),
        *BUILD_OPTIONS,
    )


@click.command("venv")
@click.argument("recipe", required=False, shell_complete=complete.recipes)
@_folder_options(
    "venv",
    click.option(
        "--python",
        metavar="P",
        help="Its Python: a path, or a version that the recipe has a lock for. Default: the recipe's version.",
    ),
    click.option("--editable", is_flag=True, help="Refer to the folder of [project] instead of copying its files."),
)
def venv_command(recipe: str | None, sources: Sequence[Path], options: BuildOptions) -> None:
    """Build the virtual environment of RECIPE from its lock and verify it by distributed training.

    With --from, RECIPE need not exist: envbuild writes it to ./recipes, and lists what it does not carry, before it
    builds. The environment replaces an older one only after it passed verification. The last line of standard output is
    its path.

    \b
    Examples:
      envbuild venv --from requirements.txt
      envbuild venv pt_cpu
      envbuild venv pt_cpu --out /scratch/envs/pt_cpu --locked --faults
      envbuild venv pt_cpu --job --site slurm-modules --dry-run
      envbuild venv gh200_cu126 --target cu126-aarch64 --job --site pbs-gh200 --bundle bundle --submit
      source build/pt_cpu/cpu-x86_64/venv/bin/activate
    """
    _build("venv", recipe, sources, options)


@click.command("conda")
@click.argument("recipe", required=False, shell_complete=complete.recipes)
@_folder_options(
    "conda",
    click.option(
        "--name",
        "-n",
        metavar="NAME",
        help="Build it where `conda activate NAME` finds it (CONDA_ENVS_DIRS, conda's envs, ~/.conda/envs).",
    ),
)
def conda_command(recipe: str | None, sources: Sequence[Path], name: str | None, options: BuildOptions) -> None:
    """Build the conda environment of RECIPE from its lock and verify it by distributed training.

    conda is not needed: envbuild downloads packages from the recipe's channels (or the site's mirrors of them), checks
    their sha256 and links them from a shared cache. The environment replaces an older one only after it passed
    verification. The last line of standard output is its path; conda, mamba and micromamba can activate it.

    \b
    Examples:
      envbuild conda --from environment.yml
      envbuild conda pt_cpu
      envbuild conda pt_cpu --name pt_cpu --locked && conda activate pt_cpu
      envbuild conda pt_cpu --prefix /fsx/envs/pt_cpu --faults
      envbuild conda pt_cpu --job --site aws-parallelcluster --submit
      build/pt_cpu/cpu-x86_64/conda/bin/torchrun --nproc-per-node 2 -m ddp_train 3 1
    """
    if name is not None and (options.prefix or (options.out and not options.job)):
        raise UsageError("--name and --prefix exclude each other: each sets the folder to build", "give one of them")
    _build("conda", recipe, sources, options, name)


def _open(recipe: str | None, sources: Sequence[Path], options: BuildOptions) -> tuple[Environment, LoadedRecipe]:
    """Return the environment of this process and the recipe; write the recipe from `sources`, unless in a dry run."""
    environment = run_environment()
    if not sources:
        return environment, open_recipe(recipe, environment)
    from envbuild.cli.init import report_import
    from envbuild.imports.origin import imported_recipe

    made = imported_recipe(recipe, sources, options.target, environment)
    for line in report_import(made):
        log(line)
    if not options.dry_run:
        made.write()
        log(f"recipe: {made.path}, from {', '.join(map(str, made.origin.sources))}")
    use_recipe(made.loaded, environment)
    return environment, made.loaded


def _build(
    kind_name: str, recipe: str | None, sources: Sequence[Path], options: BuildOptions, conda_name: str | None = None
) -> None:
    """Build the environment, on this host or in a job, and print its path."""
    from envbuild.build.bundle import keep_built
    from envbuild.build.folder import make_environment, prepare_folder

    environment, loaded = _open(recipe, sources, options)
    target = open_target(loaded, options.target, environment)
    if not options.job:  # for a job, nodes may see folders that this host does not
        if options.prefix and options.out:
            raise UsageError("--out and --prefix exclude each other: each sets the folder to build", "give one of them")
        options = replace(options, prefix=options.prefix or options.out)
        check_out(options.prefix)
    if conda_name is not None:
        options = replace(options, prefix=_named_prefix(conda_name, environment.variables))
    kind = ARTIFACTS[kind_name]
    assert isinstance(kind, FolderArtifact)
    if options.job:
        _build_by_job(kind, options, environment, loaded, target)
        return
    title = f"{kind_name} of {loaded.recipe.name}"
    with step(f"planning {title} for {target.name}", printed=True):
        plan, trainer = prepare_folder(
            kind,
            loaded,
            target,
            environment,
            compile_bytecode=options.compile_bytecode,
            editable=options.editable,
            python=options.python,
            verify=not options.no_verify,
            **options.lock_use,
        )
    path = options.prefix or kind.default_path(loaded.recipe.name, target.name)
    if options.dry_run:
        check_place(path)
        show_plan(plan, options.as_json, path)
        return
    with reported(options.report, [path], environment), step(f"building {title} for {target.name}", printed=True):
        result = make_environment(
            kind,
            plan,
            trainer,
            environment,
            path,
            offline=options.offline,
            python=options.python,
            verify=not options.no_verify,
            asked=options.asked,
            exact=options.exact,
        )
    if not result.built and not result.verified:
        log(f"{path}: nothing changed ({result.seconds:.2f} s)")
    else:
        summarise(title, result.as_json())
        keep_built(loaded, [(plan, None)], environment, offline=options.offline)
    show(options.as_json, result.as_json(), path)


def _build_by_job(
    kind: FolderArtifact, options: BuildOptions, environment: Environment, loaded: LoadedRecipe, target: Target
) -> None:
    """Render the job that builds `kind` of the recipe, and submit it on request."""
    from envbuild.build.bundle import make_bundle, tools_python
    from envbuild.build.image import plan_of
    from envbuild.jobs.build import Build, plan_build, render_build
    from envbuild.jobs.model import JobRequest

    bundle = options.bundle
    if target.arch != host_arch() and bundle is None:
        raise UsageError(
            f"nodes of {target.name} cannot run the envbuild of this {host_arch()} host ({own_command()})",
            "give --bundle DIR, a folder that the nodes see: it brings envbuild for them",
        )
    check_out(bundle, "--bundle")
    script = options.out or options.script
    check_out(script)
    site = load_site(environment.variables, options.site)
    top = Path(site.paths.shared) / "build" if site.paths.shared else build_folder()
    place = absolute_path(options.prefix or top / loaded.recipe.name / target.name / kind.default_name)
    if not options.dry_run:  # nodes may be unable to reach an index, so resolve now
        plan_of(kind, loaded, target, environment, here=False, verify=not options.no_verify, **options.lock_use)
        if bundle is not None:
            make_bundle(loaded, target, environment, bundle, log, kinds=(kind.name,), offline=options.offline)
    flags = {
        "--faults": options.faults,
        "--no-verify": options.no_verify,
        "--exact": options.exact,
        "--editable": options.editable,
        "--compile-bytecode": options.compile_bytecode,
        "--offline": options.offline and bundle is None,
    }
    build = Build(
        kind=kind.name,
        name=loaded.recipe.name,
        recipe=str(loaded.folder.absolute()),
        target=target.name,
        place=str(place),
        envbuild=own_command(),
        bundle=str(bundle.absolute()) if bundle else "",
        tools=tools_python(loaded) if bundle else "",
        options=(
            *(("--python", options.python) if options.python else ()),
            *(("--verify", options.verify) if options.verify != "full" else ()),
            *(option for option, is_set in flags.items() if is_set),
        ),
    )
    job = plan_build(build, JobRequest(current=Path.cwd()), site)
    text = render_build(job, build)
    script, number = hand_over(
        job,
        text,
        None if options.dry_run else script,
        submit=options.submit and not options.dry_run,
        hint="name another file with --out, or another folder by [paths] shared of the site",
        note=f"; {place} appears when it is built and has passed",
    )
    about = {
        "path": str(place),
        "scheduler": job.scheduler,
        "script": str(script.absolute()) if script else None,
        "text": text,
    }
    show_job(options.as_json, about, text, script, number)


def _named_prefix(name: str, env: Mapping[str, str]) -> Path:
    """Return the folder of the environment called `name`, in the first envs folder that the variables name.

    The candidates are CONDA_ENVS_DIRS or CONDA_ENVS_PATH, the envs folder of the installation of CONDA_EXE (if
    it is writable) or of MAMBA_ROOT_PREFIX, and ~/.conda/envs. Raises UsageError for an invalid name.
    """
    if not re.fullmatch(r"[^\s/#:.][^\s/#:]*", name) or name in ("base", "root"):
        raise UsageError(
            f"--name {name!r} is not the name of a conda environment",
            "no blanks, '/', ':' or '#', and not conda's own base; or give a folder with --prefix",
        )
    for variable in ("CONDA_ENVS_DIRS", "CONDA_ENVS_PATH"):
        if first := env.get(variable, "").split(os.pathsep)[0]:
            return Path(first, name)
    if program := env.get("CONDA_EXE"):  # ROOT/bin/conda
        envs = Path(program).parent.parent / "envs"
        if os.access(envs, os.W_OK):  # the conda of a site is often read-only
            return envs / name
    if root := env.get("MAMBA_ROOT_PREFIX"):
        return Path(root, "envs", name)
    return home_folder(env) / ".conda" / "envs" / name
