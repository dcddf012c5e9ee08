"""Containers of a job: pyxis's options, the command's first words, or enroot's shell lines; copies on nodes' disks.

Sources: pyxis, args.c and its wiki, "Usage"; enroot 4.1, doc/cmd/start.md, doc/cmd/create.md;
apptainer-exec(1). Tests with real runtimes: docs/howto/jobs.md.

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
from collections.abc import Mapping

import envbuild
from envbuild.base.errors import UsageError
from envbuild.base.files import shipped
from envbuild.data.schedulers import LAUNCHERS
from envbuild.jobs.model import JobPlan, JobRuntime, Launcher
from envbuild.jobs.quote import fill, heredoc, mount, path_word, word, words
from envbuild.recipe.targets import CUDA
from envbuild.site.settings import Site

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


_ENROOT = r"""# All users of a node may write to the parent folder: refuse a folder that another user created there.
private() {
    (umask 077 && mkdir -p "$1") || true
    [ -n "$(find "$1" -prune -type d -user "$(id -u)" ! -perm -020 ! -perm -002)" ] ||
        stop "enroot cannot use $1: it must be a folder of user $(id -u), no link, closed to other writers. Remove it"
}
@DATA@@TIDY@# enroot keeps its running containers in XDG_RUNTIME_DIR, which only exists in a login session.
XDG_RUNTIME_DIR=${TMPDIR:-/tmp}/envbuild-$(id -u)-${ENVBUILD_RUN##*/}-$restarts
export XDG_RUNTIME_DIR
private "$XDG_RUNTIME_DIR"
@IMAGE@created=
if ! enroot start "$image" /bin/true >/dev/null 2>&1; then # no squashfuse or overlayfs: unpack the image
    created=@CREATED@
    enroot create --force --name "$created" "$image"
    image=$created
fi
# The scheduler signals every process of a step, including squashfuse, which serves the image. squashfuse inherits the
# ignored SIGTERM, so the image stays readable while ranks save their state. ddp_train.launch handles SIGTERM again.
(
    trap '' TERM
    exec enroot start @OPTIONS@ \
        "$image" @PROGRAM@ "$@"
) &
child=$!
trap 'kill -TERM "$child" 2>/dev/null' TERM INT HUP
code=0
wait "$child" || code=$?
while kill -0 "$child" 2>/dev/null; do # a signal ended the wait: wait again
    code=0
    wait "$child" || code=$?
done
[ -z "$created" ] || timeout 60 enroot remove --force "$created" || true
rmdir @FOLDERS@ 2>/dev/null || true # only empty folders
exit "$code"
"""
_EARLIER = r"""# During the training, remove containers that ended jobs of this user left on this node.
[ "$1" != training ] || sh "$ENVBUILD_RUN/tidy-$restarts.sh" earlier >/dev/null 2>&1 &
"""
_DATA = r"""# enroot unpacks images on the node's own disk.
ENROOT_DATA_PATH=@SCRATCH@/enroot-$(id -u)
export ENROOT_DATA_PATH
private "$ENROOT_DATA_PATH"
"""

# What the names of a job's containers begin with; a folder of containers may be on a file system that clusters share.
_PREFIX = "envbuild-${SLURM_CLUSTER_NAME-}-$(id -u)-"
# tidy-RESTARTS.sh. Sources: srun(1), --task-epilog, which Slurm 22.05 limits to five seconds; squeue(1), "Job state
# codes". To remove a container of 970 MB took 75 s.
TIDY = r"""#!/bin/sh
# Removes enroot containers of this user's jobs from a node. Their names begin with envbuild-CLUSTER-UID-JOB-RESTARTS.
#   own       removes those of this job
#   earlier   removes those of jobs that have ended, and of this job before it was requeued
#   (none)    as the epilog of a step: removes those of this job if it was cancelled or requeued, when no step can start
prefix="@PREFIX@"
restarts=${0##*-} restarts=${restarts%.sh} limit=60
[ "${1-}" = earlier ] || trap '' TERM
[ $# -gt 0 ] || case $(squeue --noheader --format=%T --jobs="$SLURM_JOB_ID") in RUNNING) exit 0 ;; esac
if ! command -v enroot >/dev/null; then
    echo "envbuild: node $SLURMD_NODENAME: cannot remove containers of jobs: there is no enroot; add it to PATH" >&2
    exit 0
fi
names=$(enroot list) # before squeue: a job that starts in between is then never taken for an ended one
if [ "${1-}" = earlier ]; then
    limit=3600 ended='^(BOOT_FAIL|CANCELLED|COMPLETED|DEADLINE|FAILED|NODE_FAIL|OUT_OF_MEMORY|PREEMPTED|TIMEOUT)$'
    live=$(squeue --noheader --states=all --user="$(id -u)" --format='%A %T' | awk -v e="$ended" '$2 !~ e { print $1 }')
    live=" $(echo "$live" | tr '\n' ' ')"
    case $live in *" $SLURM_JOB_ID "*) ;; *) exit 0 ;; esac # squeue failed: remove nothing
fi
echo "$names" | while read -r name; do
    rest=${name##*"$prefix"}
    job=${rest%%-*} run=${rest#*-}
    run=${run%%-*}
    case $job$run in *[!0-9]*) continue ;; esac
    case $rest in [0-9]*-[0-9]*) ;; *) continue ;; esac
    # pyxis names containers pyxis_NAME, or pyxis_JOB_NAME with container_scope=job; enroot alone uses NAME itself.
    case ${name%"$prefix$rest"} in '' | pyxis_ | pyxis_"$job"_) ;; *) continue ;; esac
    if [ "${1-}" != earlier ]; then
        [ "$job" = "$SLURM_JOB_ID" ] || continue
    elif [ "$job" = "$SLURM_JOB_ID" ]; then
        [ "$run" != "$restarts" ] || continue
    else
        case $live in *" $job "*) continue ;; esac
    fi
    timeout "$limit" enroot remove --force "$name" </dev/null
done
""".replace("@PREFIX@", _PREFIX)


def work_key(plan: JobPlan) -> str:
    """Return the name of the setting that chose the working folder, for error messages."""
    origin = plan.origins.get("work", "--work")
    return "the current folder, without --work," if origin == "current folder" else origin


def pyxis_options(plan: JobPlan) -> list[str]:
    """Return srun's options for a pyxis container, as shell words for the batch script.

    --container-env lists variables that an image could define too; by default, the image's value wins.
    --container-name makes the training use the preflight's container; the name differs between clusters, users, jobs
    and restarts of a job. Raises UsageError for a mount that a shell would expand.
    """
    mounts = []
    for host, container in plan.mounts:
        source, place, options = mount(host, container)
        if set("$`") & set(source + place):
            raise UsageError(
                f"pyxis cannot mount {host!r} ({_mount_key(plan, host)}): it passes mounts to a shell, "
                "which expands $ and `",
                "rename the folder, or choose another",
            )
        mounts.append(":".join([source, place, *(["+".join(options)] if options else [])]))
    return [
        # pyxis treats an image name without a slash as one in a registry.
        '--container-image="$image"'
        if plan.stage
        else word(f"--container-image={plan.artifact.path}", "the image's path"),
        f'--container-name="{_PREFIX}$job-$restarts"',
        word(f"--container-mounts={','.join(mounts)}"),
        f"--container-env=SLURM_NODEID,SLURMD_NODENAME,{_visible(plan)}",
        "--no-container-mount-home",
        "--no-container-entrypoint",
    ]


def _visible(plan: JobPlan) -> str:
    """Return the variable in which Slurm lists a step's GPUs; it is harmless on nodes without GPUs."""
    return plan.artifact.accelerator.visible or CUDA.visible


def _mount_key(plan: JobPlan, host: str) -> str:
    """Return the name of the setting that requests the mount of `host`, for error messages."""
    if any(bind.partition(":")[0] == host for bind in plan.site.container.mounts):
        return plan.site.origin("container", "mounts")
    return work_key(plan) if host == plan.work else "the folder of --script"


def tidies(plan: JobPlan) -> bool:
    """Return whether a job removes the containers of ended jobs on its nodes; squeue reports which jobs have ended."""
    return "srun" in LAUNCHERS[plan.scheduler] and runtime_of(plan).tidies


def container_words(plan: JobPlan) -> list[str]:
    """Return the words that start a command in the plan's container; none for environments in folders."""
    words_of = runtime_of(plan).words
    return words_of(plan) if words_of else []


def _binds(plan: JobPlan) -> list[str]:
    binds = []
    for host, container in plan.mounts:
        source, place, options = mount(host, container)
        binds.append(words(["--bind", ":".join([source, place, *([",".join(options)] if options else [])])]))
    return binds


def _apptainer_words(plan: JobPlan) -> list[str]:
    """Return the words that start a command in Apptainer.

    The home folder is not mounted, as in verification: ~/.local is not part of the artifact. Apptainer passes the job's
    variables (SLURM_…, PMIX_…, CUDA_VISIBLE_DEVICES) on by itself.
    """
    flags = f"apptainer exec --no-home {plan.artifact.accelerator.apptainer}".rstrip()
    return [flags, *_binds(plan), image_word(plan)]


def _own_words(plan: JobPlan) -> list[str]:
    """Return the words that start a command by `envbuild run`."""
    return [f"{path_word(plan.envbuild, 'the command envbuild')} run", *_binds(plan), f"{image_word(plan)} --"]


def start_enroot(plan: JobPlan, program: str) -> str:
    """Return lines of the node's shell script that run `program` in enroot with the script's arguments."""
    options = []
    for host, container in plan.mounts:
        source, place, more = mount(host, container)
        flags = ",".join(["x-create=auto", "rbind", *more])
        options.append(words(["--mount", f"{source}:{place}:none:{flags}"]))
    accelerator = plan.artifact.accelerator
    options += [f"--env {name}={value}" for name, value in accelerator.container_variables]
    named = ["SLURMD_NODENAME", *([accelerator.visible] if accelerator.visible else [])]
    options += [f'${{{name}:+--env "{name}=${name}"}}' for name in named]
    scratch = plan.site.paths.scratch
    folders = ['"$XDG_RUNTIME_DIR/enroot"', '"$XDG_RUNTIME_DIR"']
    if scratch:
        folders.insert(0, '"$ENROOT_DATA_PATH"')
    return fill(
        _ENROOT,
        data=fill(_DATA, scratch=path_word(scratch, "[paths] scratch")) if scratch else "",
        tidy=_EARLIER if tidies(plan) else "",
        created=f'"{_PREFIX}$SLURM_JOB_ID-$restarts-$name-$$"'
        if tidies(plan)
        else "envbuild-${ENVBUILD_RUN##*/}-$restarts-$name-$$",
        image="" if plan.stage else f"image={image_word(plan)} ",
        options=" \\\n        ".join(options),
        program=program,
        folders=" ".join(folders),
    )


def _folder_caches(site: Site) -> dict[str, str]:
    return {"XDG_CACHE_HOME": site.paths.cache, "TMPDIR": site.paths.scratch}


def _apptainer_caches(site: Site) -> dict[str, str]:
    cache = site.paths.cache
    return {"APPTAINER_CACHEDIR": cache and f"{cache}/apptainer", "APPTAINER_TMPDIR": site.paths.scratch}


FOLDER, OWN, POD = "folder", "own", "pod"
JOB_RUNTIMES: Mapping[str, JobRuntime] = {
    FOLDER: JobRuntime(host_files=True, caches=_folder_caches),
    POD: JobRuntime(pods=True),
    OWN: JobRuntime(words=_own_words),
    "pyxis": JobRuntime(launcher="srun", step_options=pyxis_options, instead="enroot", tidies=True),
    "enroot": JobRuntime(start=start_enroot, tidies=True),
    "apptainer": JobRuntime(words=_apptainer_words, caches=_apptainer_caches),
}


def runtime_of(plan: JobPlan) -> JobRuntime:
    """Return the runtime that starts the plan's artifact on the nodes."""
    return JOB_RUNTIMES[plan.runtime]
