"""The job that builds and verifies an environment on a node of the kind that will train with it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from envbuild.base.errors import UsageError
from envbuild.data.schedulers import LAUNCHERS, TITLES, listed
from envbuild.jobs.model import JobArtifact, JobPlan, JobRequest, work_key
from envbuild.jobs.plan import scheduler_of
from envbuild.jobs.schedulers import SCHEDULERS
from envbuild.jobs.script import opening
from envbuild.runtimes.base import path_word, word, words
from envbuild.site.settings import Site

_VERIFIED = "# The verification simulates several nodes on this one, and writes its receipt beside the environment."


@dataclass(frozen=True, slots=True)
class Build:
    """An environment to build: `kind` of the recipe in the folder or file `recipe` for `target`.

    `place` is the destination, an absolute path that the nodes see. `bundle` is an offline bundle, "" if nodes
    can download packages. `tools` is the version of the Python that runs the bundle's envbuild, "" if the nodes
    have envbuild at `envbuild`. `options` are further options of the build command.
    """

    kind: str
    name: str
    recipe: str
    target: str
    place: str
    envbuild: str
    bundle: str = ""
    tools: str = ""
    options: tuple[str, ...] = ()


def plan_build(build: Build, request: JobRequest, site: Site) -> JobPlan:
    """Plan the job of `build`, on one whole node. Raises UsageError for a scheduler that cannot run it."""
    scheduler = scheduler_of(request, site)
    if SCHEDULERS[scheduler].pods:
        others = listed(tuple(TITLES[name] for name, known in SCHEDULERS.items() if not known.pods))
        raise UsageError(
            f"{others} build environments on nodes; Kubernetes runs them from an image",
            "use `envbuild docker`, or --site of a cluster with a scheduler",
        )
    artifact = JobArtifact(
        kind=build.kind,
        path=build.place,
        digest="",
        recipe=build.name,
        target=build.target,
        python=f"{build.place}/bin/python",
    )
    gpus = site.node.gpus or 1 if artifact.accelerator.gpu else 0
    origin = site.origin("paths", "shared") if site.paths.shared else "current folder"
    return JobPlan(
        name=request.name or f"{build.name}-build",
        scheduler=scheduler,
        artifact=artifact,
        site=replace(site, modules=replace(site.modules, run=site.modules.build)),
        runtime="folder",
        launcher=LAUNCHERS[scheduler][0],
        strategy="single",
        nodes=1,
        nproc_per_node=1,
        command=(),
        work=site.paths.shared or str(request.current.absolute()),
        gpus_per_node=gpus,
        cpus_per_node=site.node.cpus,
        variables=tuple(site.environment.items()),
        modules=site.modules.build,
        time=request.time or site.scheduler.time,
        origins={"work": origin},
    )


def render_build(plan: JobPlan, build: Build) -> str:
    """Return the script for the scheduler. Raises UsageError for values that it cannot express."""
    directives = SCHEDULERS[plan.scheduler].directives
    assert directives is not None, "plan_build refuses pods"
    about = f"builds the {build.kind} environment of {build.name} for {build.target} on a node of site {plan.site.name}"
    lines = [
        opening(plan, directives(plan), about, "Load the site's modules for builds. Jobs should load the same ones."),
        f"cd {path_word(plan.work, work_key(plan))}",
        "unset XDG_RUNTIME_DIR",
    ]
    for name, value in plan.variables:
        lines.append(f"export {name}={word(value, f'variable {name}')}")
    if plan.site.paths.scratch:
        lines.append(f"export TMPDIR={word(plan.site.paths.scratch, '[paths] scratch')}")
    recipe, tool = build.recipe, word(build.envbuild, "envbuild")
    options = [*build.options, "--locked"]
    store = plan.site.paths.cache and f"{plan.site.paths.cache}/envbuild"
    if build.bundle:
        lines.append("# The build reads nothing outside of the bundle and needs no network.")
        lines.append(f"bundle={word(build.bundle, '--bundle')}")
        lines.append('export ENVBUILD_VAULT="oci:$bundle"')
        recipe, store = f"{build.bundle}/recipes/{build.name}", f"{build.bundle}/store"
        options.append("--offline")
        if build.tools:
            lines.append('export PYTHONPATH="$bundle/envbuild"')
            python = f"python{build.tools}"
            lines.append(
                f"command -v {python} >/dev/null || stop 'there is no {python} on this node; "
                "add its module to [modules] build of the site'"
            )
            tool = f"{python} -m envbuild"
    else:
        lines.append(
            f"command -v {tool} >/dev/null || stop 'this node does not see envbuild; install it on a shared file "
            "system, or build from a --bundle'"
        )
    if store:
        lines.append(f"export ENVBUILD_STORE={word(store, 'the store')}")
    place = word(build.place, "--prefix")
    command = f"{tool} {build.kind} {word(recipe, 'the recipe')} --target {build.target} --prefix {place}"
    lines += [
        f"mkdir -p {word(str(PurePosixPath(build.place).parent), '--prefix')}",
        _VERIFIED,
        f"exec {command} {words(options)}",
    ]
    return "\n".join(lines) + "\n"
