"""The artifact of a job as nodes find it: shared or on their own disks, and in the container of the plan's runtime.

ddp_train/stage copies an artifact to the disk of every node before a job starts it. Nodes have no artifact yet, so the
script carries the package for their own python3. Afterwards a link on each node points to its copy, or to the shared
file.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import posixpath
import textwrap
import zipfile

import envbuild
from envbuild.base.errors import UsageError
from envbuild.base.files import shipped
from envbuild.base.toml import toml_value
from envbuild.data.schedulers import LAUNCHERS
from envbuild.jobs.model import JobPlan, Launcher, runtime_of, work_key
from envbuild.runtimes.base import NodeContainer, fill, heredoc, path_word, word

_WIDTH = 118
_MAIN = 'import runpy\n\nrunpy.run_module("stage", run_name="__main__")\n'

_PROGRAM = r"""
# Copies the @KIND@ to each node's own disk. Node 0 reads it from the shared file system, and the nodes pass it on to
# each other; a node copies files that it has from an earlier job. The program below is a zip file in base64, run by
# the nodes' own python3. Its source is ddp_train/stage of envbuild @VERSION@, also in site-packages of the @KIND@.
# sha256 of the decoded file: @SHA@
@PROGRAM@
"""

_STAGE = r"""rm -f "$ENVBUILD_RUN/stage-$restarts".[0-9]*
(umask 077 && head -c 32 /dev/urandom >"$ENVBUILD_RUN/stage-$restarts.key")
# shellcheck disable=SC2030,SC2031 # the subshell changes `launch` for this step only
if ! (
    launch=(
        @PYTHON@ -I -B "$ENVBUILD_RUN/stage-$restarts.zip"
        @ABOUT@
    )
    @CONTAINER@settings=$ENVBUILD_RUN/settings-$restarts.sh
    everywhere stage
); then
    printf 'envbuild: %s\n' 'the @KIND@ is not on every node, see above: all read the shared one' >&2
    rm -f "$ENVBUILD_RUN/stage-$restarts".[0-9]*
    @INSTEAD@
fi
"""


def staged_image(plan: JobPlan) -> str:
    """Return the line that sets `image`, the path on every node; "" if the job reads the shared artifact."""
    if not plan.stage:
        return ""
    folder = f'{path_word(plan.stage, "[stage] dir")}/envbuild-"$(id -u)"'
    suffix = posixpath.splitext(plan.artifact.path)[1]
    suffix = suffix and path_word(suffix, "the artifact's path")
    return f'image={folder}/"${{ENVBUILD_RUN##*/}}-$restarts"{suffix}\n'


def shared_unless_staged(plan: JobPlan) -> str:
    """Return the line for a node's shell script that uses the shared artifact if nothing was staged on the node."""
    return f'[ -e "$image" ] || image={_shared(plan)}\n' if plan.stage else ""


def image_word(plan: JobPlan) -> str:
    """Return the word for the image of a job."""
    return '"$image"' if plan.stage else _shared(plan)


def interpreter_word(plan: JobPlan) -> str:
    """Return the word for the interpreter of a job."""
    python = plan.artifact.python
    if plan.stage and runtime_of(plan).host_files:
        return f'"$image"/{path_word(posixpath.relpath(python, plan.artifact.path), "the interpreter")}'
    return path_word(python, "the interpreter")


def _shared(plan: JobPlan) -> str:
    return path_word(plan.artifact.path, "the image's path")


def _packed() -> tuple[str, str]:
    """Return the package `stage` as a zip file that Python runs, in base64, and the sha256 of the file.

    Python puts the file first in its path, also isolated from the variables of whoever submits the job.
    """
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as file:
        file.writestr(zipfile.ZipInfo("__main__.py"), _MAIN)
        for path in sorted(shipped("ddp_train").glob("stage/*.py")):
            file.writestr(zipfile.ZipInfo(f"stage/{path.name}"), path.read_bytes(), zipfile.ZIP_DEFLATED, 9)
    data = packed.getvalue()
    return "\n".join(textwrap.wrap(base64.b64encode(data).decode(), _WIDTH)), hashlib.sha256(data).hexdigest()


def stage_lines(plan: JobPlan, launcher: Launcher) -> str:
    """Return the step that stages the artifact; "" if the job reads the shared one."""
    if not plan.stage:
        return ""
    folder, in_step = runtime_of(plan).host_files, runtime_of(plan).step_options is not None
    kind = "environment" if folder else "image"
    interface = plan.site.fabric.interface.split(",")[0]
    about = {
        "source": plan.artifact.path,
        **({"manifest": plan.artifact.manifest} if folder else {}),
        "folder": plan.stage,
        "keep": plan.stage_bytes,
        "number": launcher.number,
        "interface": "" if interface.startswith(("^", "=")) else interface,
    }
    array = "container" if in_step else "launch"
    packed, digest = _packed()
    program = heredoc('base64 -d >"$ENVBUILD_RUN/stage-$restarts.zip"', packed, "STAGE")
    return fill(_PROGRAM, kind=kind, program=program, version=envbuild.__version__, sha=digest) + fill(
        _STAGE,
        kind=kind,
        python=path_word(plan.site.stage.python, "[stage] python"),
        about=word(json.dumps(about, ensure_ascii=False), "[stage]"),
        container="container=()\n    " if in_step else "",
        instead=f'{array}=("${{{array}[@]/"$image"/{_shared(plan)}}}")',
    )


def _mount_key(plan: JobPlan, host: str) -> str:
    """Return the name of the setting that requests the mount of `host`, for error messages."""
    if any(bind.partition(":")[0] == host for bind in plan.site.container.mounts):
        return plan.site.origin("container", "mounts")
    return work_key(plan) if host == plan.work else "the folder of --script"


def tidies(plan: JobPlan) -> bool:
    """Return whether a job removes the containers of ended jobs on its nodes; squeue reports which jobs have ended."""
    return "srun" in LAUNCHERS[plan.scheduler] and runtime_of(plan).tidy != ""


def container_of(plan: JobPlan) -> NodeContainer:
    """Return the container of the plan on each node."""
    return NodeContainer(
        path=plan.artifact.path,
        image=image_word(plan),
        staged=plan.stage != "",
        mounts=plan.mounts,
        mounted_by=lambda host: _mount_key(plan, host),
        devices=plan.artifact.accelerator,
        scratch=plan.site.paths.scratch,
        tidied=tidies(plan),
        envbuild=plan.envbuild,
    )


def container_words(plan: JobPlan) -> list[str]:
    """Return the words that start a command in the plan's container; none for environments in folders."""
    words_of = runtime_of(plan).words
    return words_of(container_of(plan)) if words_of else []


def environment_definition(plan: JobPlan) -> str:
    """Return the plan's container as an EDF, CSCS's file for `srun --environment`. Raises UsageError without one.

    Sources: docs.cscs.ch, "EDF reference" and "Sarus Suite … on Alps", of 2026-08-21: `$` starts a variable of
    the host; only Sarus Suite knows `devices`, and it takes images from registries alone.
    """
    runtime, artifact = runtime_of(plan), plan.artifact
    if runtime.host_files or runtime.pods:
        raise UsageError(f"{artifact.path} runs in no container of a node", "give a .sqsh, or an image in a registry")
    values: dict[str, object] = {"image": artifact.path, "workdir": plan.work, "entrypoint": False}
    values["mounts"] = [":".join(filter(None, bind)) for bind in container_of(plan).binds("+")]
    if artifact.of_kind.form == "registry" and artifact.accelerator.docker_request:
        values["devices"] = [f"{artifact.accelerator.kubernetes}=all"]
    variables = dict(plan.variables)
    if plan.library_path:
        variables["LD_LIBRARY_PATH"] = ":".join(plan.library_path)
    lines = [
        f"# {artifact.recipe} for {artifact.target}, {artifact.kind} {artifact.digest}. envbuild never ran an EDF."
    ]
    lines += [f"{key} = {toml_value(value).replace('$', '$$')}" for key, value in values.items()]
    lines += ["", "[env]", *(f"{name} = {toml_value(value.replace('$', '$$'))}" for name, value in variables.items())]
    if artifact.provider == "cxi":
        lines += ["", "[annotations]", 'com.hooks.cxi.enabled = "true"']
    return "\n".join(lines) + "\n"
