"""The build matrix of a CI: recipes × targets × artifact kinds as jobs, in the formats of GitHub and GitLab."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from functools import cache, partial
from itertools import product
from pathlib import Path, PurePosixPath
from subprocess import CompletedProcess
from typing import Any

from envbuild.base import process
from envbuild.base.errors import EnvbuildError, UsageError
from envbuild.base.git import run_git
from envbuild.base.toml import nearest
from envbuild.build.image import plan_of
from envbuild.contract.kinds import ARTIFACTS, kinds_of
from envbuild.environment import Environment
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.targets import ARCHES, Target, target_problem

# "A matrix will generate a maximum of 256 jobs per workflow run" (GitHub's workflow syntax, jobs.<id>.strategy.matrix).
GITHUB_LIMIT = 256
# Paths at the top of envbuild's own checkout that can change the artifacts of every recipe.
_DECIDE_ALL = ("envbuild", "ddp_train", "pyproject.toml")
# No default: envbuild is on no package index, and whoever registered its name there could run code on the runner.
_GITLAB_PACKAGE = "${ENVBUILD_PACKAGE:?what pip takes envbuild from, such as git+https://HOST/GROUP/envbuild@VERSION}"
_GITLAB_DEFAULT = {
    "image": "docker.io/library/python:3.11",
    "before_script": [f'python -m pip install --quiet "{_GITLAB_PACKAGE}"'],
}


@dataclass(frozen=True, slots=True)
class SelectedRecipe:
    """A recipe to build: its name on the command line, and the recipe loaded from there."""

    name: str
    loaded: LoadedRecipe


@dataclass(frozen=True, slots=True)
class MatrixJob:
    """One artifact that one runner builds.

    `id` is RECIPE-TARGET-ARTIFACT, unique in a matrix; `runner` is the runner's label (GitHub) or tag (GitLab). `gpu`
    is whether the artifact is for GPUs, `verify` whether the runner can train in it. `command` is the build as a shell
    command, with --no-verify when `verify` is false.
    """

    id: str
    recipe: str
    target: str
    artifact: str
    accelerator: str
    arch: str
    runner: str
    gpu: bool
    verify: bool
    command: str


@dataclass(frozen=True, slots=True)
class Omission:
    """The builds of one recipe that the matrix omits for the same error of `envbuild plan --locked`."""

    recipe: str
    targets: tuple[str, ...]
    artifacts: tuple[str, ...]
    error: EnvbuildError

    def __str__(self) -> str:
        hint = f"; {self.error.hint}" if self.error.hint else ""
        builds = f"{', '.join(self.targets)}; {', '.join(self.artifacts)}"
        return f"left out: {self.recipe} ({builds}): {self.error.message}{hint}"


def make_jobs(
    recipes: Sequence[SelectedRecipe],
    runners: Mapping[str, str],
    environment: Environment,
    *,
    artifacts: Sequence[str] = (),
    targets: Sequence[str] = (),
) -> tuple[list[MatrixJob], list[Omission]]:
    """Return the jobs of `recipes`, and the builds that are omitted because their plan fails with --locked.

    Jobs are sorted by recipe; the targets of a recipe are in the recipe's order, artifacts in the order of ARTIFACTS.
    Empty `artifacts` or `targets` mean all, except that recipes without [conda] get conda environments only if
    `artifacts` names them. `runners` gives a runner to each architecture, and may give one to a target
    (`cu126-x86_64`), which then counts as having that target's GPUs. Raises UsageError for two recipes with the same
    name.
    """
    unique = {selected_recipe.loaded.path.resolve(): selected_recipe for selected_recipe in reversed(recipes)}
    _check_names(unique.values())
    images = kinds_of("file", "registry")
    jobs: list[MatrixJob] = []
    omitted: list[Omission] = []
    for recipe in sorted(unique.values(), key=lambda selected: selected.loaded.recipe.name):
        refusal = cache(partial(_refusal, recipe, environment, runners))
        reasons: dict[tuple[str, str | None], list[tuple[str, str, EnvbuildError]]] = {}
        names = [name for name in recipe.loaded.recipe.targets if not targets or name in targets]
        for name, kind in product(names, _kinds(recipe, artifacts)):
            # All kinds of images have the same plan.
            error = refusal(name, images[0] if kind in images else kind)
            if error is None:
                jobs.append(_job(recipe, Target.parse(name), kind, runners))
            else:
                reasons.setdefault((error.message, error.hint), []).append((name, kind, error))
        for refused in reasons.values():
            of_targets, of_kinds, errors = (tuple(dict.fromkeys(column)) for column in zip(*refused, strict=True))
            omitted.append(Omission(recipe.name, of_targets, of_kinds, errors[0]))
    return jobs, omitted


def _kinds(selected: SelectedRecipe, artifacts: Sequence[str]) -> list[str]:
    if artifacts:
        return [kind for kind in ARTIFACTS if kind in artifacts]
    conda = bool(selected.loaded.recipe.conda.dependencies)
    return [kind for kind, artifact in ARTIFACTS.items() if conda or not artifact.of_conda]


def _refusal(
    selected: SelectedRecipe, environment: Environment, runners: Mapping[str, str], name: str, artifact: str
) -> EnvbuildError | None:
    """Return the error with which a job would end before it builds anything, None if it would build."""
    target = Target.parse(name)
    try:
        plan_of(
            ARTIFACTS[artifact],
            selected.loaded,
            target,
            environment,
            here=False,
            bytecode=False,
            verify=_verifies(target, runners),
            locked=True,
            offline=True,
            write=False,
            log=lambda _: None,
        )
    except EnvbuildError as error:
        return error
    return None


def _job(selected: SelectedRecipe, target: Target, artifact: str, runners: Mapping[str, str]) -> MatrixJob:
    verify = _verifies(target, runners)
    words = ["envbuild", artifact, selected.name, "--target", target.name, "--locked"]
    return MatrixJob(
        id=f"{selected.loaded.recipe.name}-{target.name}-{artifact}",
        recipe=selected.loaded.recipe.name,
        target=target.name,
        artifact=artifact,
        accelerator=target.accelerator,
        arch=target.arch,
        runner=runners.get(target.name) or runners[target.arch],
        gpu=target.family.gpu,
        verify=verify,
        command=shlex.join([*words, *([] if verify else ["--no-verify"])]),
    )


def _verifies(target: Target, runners: Mapping[str, str]) -> bool:
    """Return whether a runner of `target` can train."""
    return not target.family.gpu or target.name in runners


def check_targets(recipes: Iterable[SelectedRecipe], targets: Iterable[str]) -> None:
    """Raise UsageError for a target that none of `recipes` has."""
    known = {name for recipe in recipes for name in recipe.loaded.recipe.targets}
    for name in targets:
        Target.parse(name)
        if known and name not in known:
            raise UsageError(f"no recipe here has the target {name!r}{nearest(name, sorted(known))}")


def _check_names(recipes: Iterable[SelectedRecipe]) -> None:
    seen: dict[str, SelectedRecipe] = {}
    for selected in recipes:
        other = seen.setdefault(selected.loaded.recipe.name, selected)
        if other is not selected:
            raise UsageError(
                f"two recipes are named {selected.loaded.recipe.name!r}: {other.loaded.path} "
                f"and {selected.loaded.path}",
                hint="jobs are told apart by their recipe's name: rename one, or leave one out",
            )


def parse_runners(options: Iterable[str], defaults: Mapping[str, str]) -> dict[str, str]:
    """Return `defaults`, updated by each ARCH=LABEL or TARGET=LABEL in `options`.

    Raises UsageError for any other form.
    """
    runners = dict(defaults)
    for option in options:
        key, equals, label = option.partition("=")
        if not equals or not label.strip() or not label.isprintable():
            raise UsageError(f"--runner {option!r} is not ARCH=LABEL", hint="such as --runner aarch64=my-arm-runner")
        if key not in ARCHES and target_problem(key) is not None:
            raise UsageError(
                f"--runner {option!r}: no architecture {key!r}{nearest(key, ARCHES)}",
                hint="a target, such as cu126-x86_64, is accepted too",
            )
        runners[key] = label.strip()
    return runners


def changes_since(revision: str, folder: Path) -> tuple[Path, list[str]]:
    """Return the files that the branch checked out at `folder` changed since it left `revision`.

    The first value is the checkout's top, to which the POSIX paths of the files are relative. As for `git diff
    REVISION...`, only commits count. Raises UsageError when `folder` is not in a git checkout or git does not know the
    revision, HostError when git is not installed.
    """
    git = partial(run_git, folder, variables=os.environ)
    top = git("rev-parse", "--show-toplevel")
    if top.returncode != 0:
        raise UsageError(
            f"--changed-since needs a git checkout, and {folder.absolute()} is not in one that git will read:"
            f"\n{process.tail(top)}",
            hint="run it in a clone, or leave --changed-since out to get every job",
        )
    resolved = git("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    if resolved.returncode != 0 or revision.startswith("-"):
        raise _unknown(git, f"git knows no revision {revision!r}", "name a commit, branch or tag")
    # With renames, git would list only a file's new path; the folder that it left has changed too.
    differing = git("diff", "--name-only", "--no-renames", "-z", f"{resolved.stdout.strip()}...HEAD", "--")
    if differing.returncode != 0:
        message = f"git finds nothing that {revision!r} and HEAD have in common:\n{process.tail(differing)}"
        raise _unknown(git, message, "name a revision that this branch came from")
    return Path(top.stdout.removesuffix("\n")), [path for path in differing.stdout.split("\0") if path]


def _unknown(git: Callable[..., CompletedProcess[str]], message: str, hint: str) -> UsageError:
    if git("rev-parse", "--is-shallow-repository").stdout.strip() == "true":
        return UsageError(
            f"{message}; this clone is shallow and may lack it",
            "fetch it: git fetch --unshallow; with actions/checkout, set fetch-depth: 0",
        )
    return UsageError(message, f"{hint}, or leave --changed-since out to get every job")


def changed_recipes(recipes: Iterable[SelectedRecipe], top: Path, changed: Iterable[str]) -> list[SelectedRecipe]:
    """Return the `recipes` that the `changed` files affect; paths are relative to `top`, the top of a checkout.

    A recipe is affected by files in its folder, the script of its [verify], and the files of its [project]; a recipe
    outside of the checkout only by files that affect every recipe.
    """
    files = [PurePosixPath(path) for path in changed]
    if any(fnmatchcase(path.parts[0], pattern) for path in files for pattern in _DECIDE_ALL):
        return list(recipes)
    paths = [top / path for path in files]
    return [recipe for recipe in recipes if any(_concerns(path, recipe.loaded) for path in paths)]


def _concerns(path: Path, loaded: LoadedRecipe) -> bool:
    if path.is_relative_to(loaded.folder.resolve()) or (loaded.script and path == loaded.script[0].resolve()):
        return True
    if loaded.code is None or loaded.recipe.project is None or not path.is_relative_to(loaded.code.root.resolve()):
        return False
    return loaded.recipe.project.takes(path.relative_to(loaded.code.root.resolve()).as_posix())


def as_json(jobs: Sequence[MatrixJob]) -> str:
    """Return the jobs as a JSON array."""
    return json.dumps([asdict(job) for job in jobs], indent=1)


def as_github(jobs: Sequence[MatrixJob]) -> str:
    """Return one line of JSON for `strategy.matrix: ${{ fromJSON(…) }}`.

    GitHub refuses a matrix without entries: the workflow has to skip the job then. Raises UsageError when there are
    more jobs than one workflow run may have.
    """
    if len(jobs) > GITHUB_LIMIT:
        raise UsageError(
            f"{len(jobs)} jobs, and GitHub runs at most {GITHUB_LIMIT} of one matrix",
            hint="split it with --artifact, --target or by recipes",
        )
    return json.dumps({"include": [asdict(job) for job in jobs]}, separators=(",", ":"))


def as_gitlab(jobs: Sequence[MatrixJob]) -> str:
    """Return a child pipeline as JSON, which is valid YAML (YAML 1.2, section 1.3).

    It is complete, because GitLab cannot include another file beside one that a job generated. GitLab refuses a
    pipeline without jobs: if there are none, one job says that there is nothing to build.
    """
    pipeline: dict[str, Any] = {"stages": ["build"], "default": _GITLAB_DEFAULT}
    for job in jobs:
        pipeline[job.id] = {
            "stage": "build",
            "tags": [job.runner],
            "script": [f"{job.command} --report" if job.verify else job.command],
            "artifacts": {"when": "always", "paths": ["build/**/*.receipt.json", "build/**/*.report.html"]},
        }
    if not jobs:
        pipeline["nothing-to-build"] = {"stage": "build", "before_script": [], "script": ["echo nothing to build"]}
    return json.dumps(pipeline, indent=1)
