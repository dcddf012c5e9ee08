"""Images by `docker build` of Dockerfile.cpu or Dockerfile.gpu: the context, the command, its output.

docker's command line is used because the daemon's API alone cannot drive BuildKit, which secrets and bind
mounts of a build need (Docker's documentation, "docker build", "RUN --mount").
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from envbuild.artifacts import image
from envbuild.artifacts.image import PreparedImage
from envbuild.artifacts.layers_stage import MODULES
from envbuild.base import process
from envbuild.base.errors import BuildError, HostError
from envbuild.base.files import link_or_copy, shipped
from envbuild.base.progress import log
from envbuild.environment import Environment
from envbuild.image.reference import parse_reference
from envbuild.layers.compose import WheelFile
from envbuild.layers.source_build import fetch_source
from envbuild.layers.source_files import patchelf_program
from envbuild.layers.source_standalone import describe
from envbuild.layers.wheels import fetch_wheels, pinned
from envbuild.lock.format import lock_file_name
from envbuild.lock.image import ImageLock, OciLock
from envbuild.plan.plan import Plan
from envbuild.recipe.targets import Target, host_arch
from envbuild.site.pip_config import ca_bundle, redact

# Files of this package that the Dockerfiles use, to build the trainer's wheel and source layers.
SOURCES = (*MODULES, "base/files.py", "layers/trainer.py")
DESCRIPTION = "layers.json"
# Predefined build arguments: they are in no layer, history or cache key.
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "NO_PROXY", "ALL_PROXY")
# BuildKit refuses larger secrets (bytes).
_MAX_SECRET = 500 * 1024
_SHOWN = 160
_STEP_OUTPUT = re.compile(r"#(\d+) (?:\d+\.\d+ )?(.*)")


@dataclass(frozen=True, slots=True)
class DockerCommand:
    """A docker command line that can run BuildKit, and the variables to run it with."""

    program: str
    env: Mapping[str, str]


def find_docker(env: Mapping[str, str]) -> DockerCommand:
    """Return the first `docker` in PATH that can run BuildKit. Raises HostError when there is none.

    Before version 23, BuildKit is part of docker's command line; since then it is the plugin buildx.
    """
    # The SDK, which verification uses, knows no docker contexts: both must use the same daemon.
    variables = {**env, "DOCKER_BUILDKIT": "1", "BUILDX_BUILDER": "default", "BUILDX_NO_DEFAULT_ATTESTATIONS": "1"}
    variables.pop("DOCKER_CONTEXT", None)
    if not env.get("DOCKER_HOST"):
        variables["DOCKER_CONTEXT"] = "default"
    unable = []
    for folder in env.get("PATH", os.defpath).split(os.pathsep):
        program = shutil.which("docker", path=folder) if folder else None
        if program is None:
            continue
        if process.run([program, "buildx", "version"], env=variables, check=False).returncode == 0:
            return DockerCommand(program, variables)
        said = process.run([program, "--version"], env=variables, check=False).stdout.strip()
        version = re.search(r"version (\d+)\.", said)
        if version and 19 <= int(version[1]) <= 22:
            return DockerCommand(program, variables)
        unable.append(f"{program} ({said.partition(',')[0] or 'it does not run'})")
    instead = "; the native builder (without --builder dockerfile) needs neither"
    if unable:
        raise HostError(
            f"no BuildKit: the plugin buildx is missing from {', '.join(unable)}",
            f"install docker-buildx-plugin (Debian and Ubuntu: docker-buildx){instead}",
        )
    raise HostError(
        "docker's command line is not installed: there is no `docker` in PATH",
        f"install docker-ce-cli and docker-buildx-plugin, or your distribution's docker.io{instead}",
    )


def read_dockerfile(target: Target) -> str:
    """Return the text of the Dockerfile that ships with envbuild. Raises BuildError when it is missing."""
    file = shipped(target.family.dockerfile)
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise BuildError(f"{file} cannot be read: {error.strerror}", "reinstall envbuild") from error


def default_base(target: Target, argument: str = "BASE") -> str:
    """Return the default of BASE, or of BUILD_BASE, in the target's Dockerfile."""
    match = re.search(rf"^ARG {argument}=(\S+)$", read_dockerfile(target), re.MULTILINE)
    assert match is not None
    return match[1]


@contextlib.contextmanager
def build_context(
    one: PreparedImage, wheels: Sequence[WheelFile], environment: Environment, sources: Mapping[str, Path | bytes]
) -> Iterator[Path]:
    """Yield a temporary folder with all that the Dockerfile reads; `sources` are the files that `stage_files` found."""
    plan, package = one.plan, Path(__file__).resolve().parents[1]
    lock = f"# python: {plan.python}\n{pinned(wheels)}"
    files: dict[str, Path | bytes] = {
        "Dockerfile": _dockerfile(plan).encode(),
        f"recipes/{plan.recipe}/recipe.toml": b"",  # its content is in the plan
        f"recipes/{plan.recipe}/{lock_file_name(plan.target)}": lock.encode(),
        **{f"envbuild/{name}": (package / name).read_bytes() for name in SOURCES},
        **dict(one.trainer.files),
        **{f"wheels/{wheel.path.name}": wheel.path for wheel in wheels},
        **{f"sources/{name}": source for name, source in sources.items()},
    }
    # In the store, because most wheels are there.
    with environment.store.working("docker") as folder:
        try:
            for name, source in files.items():
                path = folder / name
                if isinstance(source, bytes):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(source)
                else:
                    link_or_copy(source, path)
            (folder / "wheels").mkdir(exist_ok=True)
            yield folder
        except OSError as error:
            raise environment.store.unwritable(error) from error


def stage_files(plan: Plan, environment: Environment, *, offline: bool) -> dict[str, Path | bytes]:
    """Return the files from which a stage builds the source layers of `plan`, by name. Raises BuildError."""
    if not plan.sources:
        return {}
    files: dict[str, Path | bytes] = {}
    described = []
    for layer in plan.sources:
        files[f"{layer.sha256}.source"] = fetch_source(layer, environment, offline=offline)
        for wheel in fetch_wheels(layer.wheels, environment, offline=offline):
            files[wheel.name] = wheel
        files |= {f"{patch.sha256}.patch": Path(patch.path) for patch in layer.patches}
        # A stage finds its files by hash: paths are of this host alone, and the URL may hold a password.
        patches = tuple(replace(patch, path=os.path.basename(patch.path)) for patch in layer.patches)
        described.append(replace(layer, patches=patches, url=""))
    if Target.parse(plan.target).arch == host_arch():  # patchelf is one static program
        files["patchelf"] = Path(patchelf_program())
    files[DESCRIPTION] = describe(described).encode()
    return files


def _dockerfile(plan: Plan) -> str:
    """Return the Dockerfile with the recipe's variables; their values are arguments, which need no quoting."""
    assert plan.image is not None
    lines = [read_dockerfile(Target.parse(plan.target)).rstrip("\n")]
    if plan.image.base != "debian":  # as in `image.run_config`: the base's Python would import from ~/.local
        lines.append("ENV PYTHONNOUSERSITE=1")
    for number, name in enumerate(plan.image.env):
        lines += [f"ARG ENVBUILD_ENV_{number}", f"ENV {name}=${{ENVBUILD_ENV_{number}}}"]
    return "\n".join(lines) + "\n"


def image_name(lock: ImageLock) -> str:
    """Return the image that `lock` names for `docker build`: by its digest if it has one."""
    assert isinstance(lock.base, OciLock)
    reference, digest = lock.base.reference, lock.base.digest
    local = reference.removeprefix("docker-daemon:")
    if local != reference or not digest:
        return local
    return f"{parse_reference(reference).name}@{digest}"


def build_arguments(plan: Plan, builder: ImageLock | None = None) -> dict[str, str]:
    """Return the Dockerfile's arguments for `plan`; `builder` (None: the base) is the image that builds source layers.

    As by the native builder, an environment on an image that the recipe names sees its interpreter's packages.
    """
    assert plan.image is not None and plan.base is not None
    variables = {f"ENVBUILD_ENV_{number}": value for number, value in enumerate(plan.image.env.values())}
    return {
        "BASE": image_name(plan.base),
        # Without source layers, no compilers are needed.
        "BUILD_BASE": image_name(builder or plan.base),
        "RECIPE": plan.recipe,
        "TARGET": plan.target,
        "NO_INDEX": "1",
        "BYTECODE": str(int(plan.compile_bytecode)),
        "WORKDIR": plan.image.workdir,
        "TORCH": next((p.version for p in plan.packages if p.name == "torch"), ""),
        "INTERPRETER": plan.image.python,
        "VENV_OPTIONS": "" if plan.image.base == "debian" else "--system-site-packages",
        **variables,
    }


def labels(plan: Plan) -> dict[str, str]:
    """Return the labels that the native builder sets, except those in the Dockerfile."""
    assert plan.base is not None and isinstance(plan.base.base, OciLock)
    known = image.labels(plan)
    if digest := plan.base.base.digest:
        known |= {"org.opencontainers.image.base.digest": digest, "org.envbuild.base.digest": plan.base.digest}
    return known


def build(
    command: DockerCommand, context: Path, plan: Plan, builder: ImageLock | None, environment: Environment
) -> str:
    """Build the image of `plan` in `context` and return its id. Raises BuildError with the failed step's output."""
    line = ["--file", str(context / "Dockerfile")]
    for name, value in build_arguments(plan, builder).items():
        line += ["--build-arg", f"{name}={value}"]
    for name in _PROXIES:
        for known in (name, name.lower()):
            if command.env.get(known):  # by name: the value may hold a password
                line += ["--build-arg", known]
    for name, value in labels(plan).items():
        line += ["--label", f"{name}={value}"]
    if bundle := _certificates(environment):
        line += ["--secret", f"id=ca,src={bundle}"]
    return run(command, line, context)


def run(command: DockerCommand, options: Sequence[str], context: Path) -> str:
    """Run `docker build` in `context` and return the image's id. Raises BuildError with the failed step's output."""
    line = [command.program, "build", "--progress=plain", "--iidfile", str(context / "id"), *options, str(context)]
    seen: list[str] = []

    def show(said: str) -> None:
        text = redact(said)
        seen.append(text)
        if text and not re.fullmatch(r"#\d+ sha256:[0-9a-f]{64}", text):
            log("  " + (text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"))

    code = process.follow(line, command.env, show)
    if code != 0:
        raise BuildError(f"docker build failed (exit {code}):\n{explain(seen)}")
    try:
        return (context / "id").read_text(encoding="ascii").strip()
    except OSError as error:
        raise BuildError(f"docker build left no image id: {error.strerror}") from error


def _certificates(environment: Environment) -> str | None:
    bundle = ca_bundle(environment.pip, environment.variables)
    try:
        size = os.stat(bundle).st_size if bundle else 0
    except OSError:
        return None
    if size > _MAX_SECRET or "," in (bundle or ""):  # a comma would end the option
        log(f"{bundle} cannot be given to docker build (500 kB at most, no comma in its path)")
        return None
    return os.path.abspath(bundle) if bundle else None


def explain(lines: Sequence[str]) -> str:
    """Return the failed step's output in a plain log of `docker build`, whose own summary repeats only the command."""
    steps = [(match[1], match[2]) for line in lines if (match := _STEP_OUTPUT.fullmatch(line))]
    failed = next((number for number, text in steps if text.startswith("ERROR: ")), None)
    said = [match[1] for line in lines if failed and (match := re.fullmatch(rf"#{failed} \d+\.\d+ (.*)", line))]
    errors = [text for number, text in steps if number == failed and text.startswith("ERROR: ")]
    shown = said or errors or [line for line in lines if line]
    return "\n".join("  " + line for line in shown[-process.TAIL_LINES :])
