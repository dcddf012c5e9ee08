"""Bring an artifact to the disk of every node before a job starts it: the lines of the script. ddp_train/stage does it.

Nodes have no artifact yet, so the script carries the package for their own python3. From then on a link on each node
leads to its copy, or to the shared file.
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
from envbuild.base.files import shipped
from envbuild.jobs.model import JobPlan, Launcher
from envbuild.jobs.quote import fill, heredoc, path_word, word

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
    """Return the line for a node's shell script that goes back to the shared artifact where nothing was staged."""
    return f'[ -e "$image" ] || image={_shared(plan)}\n' if plan.stage else ""


def image_word(plan: JobPlan) -> str:
    """Return the word for the image of a job."""
    return '"$image"' if plan.stage else _shared(plan)


def interpreter_word(plan: JobPlan) -> str:
    """Return the word for the interpreter of a job."""
    python = plan.artifact.python
    if plan.stage and plan.runtime == "folder":
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
    folder = plan.runtime == "folder"
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
    pyxis = plan.runtime == "pyxis"
    array = "container" if pyxis else "launch"
    packed, digest = _packed()
    program = heredoc('base64 -d >"$ENVBUILD_RUN/stage-$restarts.zip"', packed, "STAGE")
    return fill(_PROGRAM, kind=kind, program=program, version=envbuild.__version__, sha=digest) + fill(
        _STAGE,
        kind=kind,
        python=path_word(plan.site.stage.python, "[stage] python"),
        about=word(json.dumps(about, ensure_ascii=False), "[stage]"),
        container="container=()\n    " if pyxis else "",
        instead=f'{array}=("${{{array}[@]/"$image"/{_shared(plan)}}}")',
    )
