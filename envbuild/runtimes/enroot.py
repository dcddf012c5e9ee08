"""enroot, by itself and by pyxis, the plugin of Slurm by which srun starts its containers.

Sources: enroot 4.1, doc/cmd/start.md, doc/cmd/create.md; pyxis, args.c and its wiki, "Usage". enroot's hook
98-nvidia.sh reads the accelerator's variables.
"""

from __future__ import annotations

from pathlib import Path

from envbuild.base.errors import UsageError
from envbuild.runtimes.base import (
    NAME_PREFIX,
    PRIVATE,
    HostProgram,
    HostStart,
    NodeContainer,
    Runtime,
    Way,
    fill,
    path_word,
    word,
    words,
)

_NODE = r"""@DATA@@TIDY@# enroot keeps its running containers in XDG_RUNTIME_DIR, which only exists in a login session.
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
""".replace("@PREFIX@", NAME_PREFIX)


def _start(container: NodeContainer, program: str) -> str:
    """Return lines of the node's shell script that run `program` in enroot with the script's arguments."""
    options = []
    for source, place, more in container.binds():
        flags = ",".join(["x-create=auto", "rbind", *filter(None, [more])])
        options.append(words(["--mount", f"{source}:{place}:none:{flags}"]))
    devices, scratch = container.devices, container.scratch
    options += [f"--env {name}={value}" for name, value in devices.container_variables]
    named = ["SLURMD_NODENAME", *([devices.visible] if devices.visible else [])]
    options += [f'${{{name}:+--env "{name}=${name}"}}' for name in named]
    folders = ['"$XDG_RUNTIME_DIR/enroot"', '"$XDG_RUNTIME_DIR"']
    if scratch:
        folders.insert(0, '"$ENROOT_DATA_PATH"')
    return fill(PRIVATE, name="enroot") + fill(
        _NODE,
        data=fill(_DATA, scratch=path_word(scratch, "[paths] scratch")) if scratch else "",
        tidy=_EARLIER if container.tidied else "",
        created=f'"{NAME_PREFIX}$SLURM_JOB_ID-$restarts-$name-$$"'
        if container.tidied
        else "envbuild-${ENVBUILD_RUN##*/}-$restarts-$name-$$",
        image="" if container.staged else f"image={container.image} ",
        options=" \\\n        ".join(options),
        program=program,
        folders=" ".join(folders),
    )


_NAME = "envbuild"  # of an unpacked image on this host


def _create(runtime: Path, image: Path, folder: Path) -> tuple[list[str], dict[str, str], str]:
    """Return the command that unpacks `image` into `folder`, the variables with which to use it, and its name."""
    return [str(runtime), "create", "--name", _NAME, str(image)], {"ENROOT_DATA_PATH": str(folder)}, _NAME


def _command(started: HostProgram) -> tuple[list[str], dict[str, str]]:
    named = [word for name in sorted(started.variables) for word in ("--env", name)]
    mount = f"{started.folder}:{started.inside}:none:x-create=dir,bind,rw"
    shown = ["--mount", mount] if started.folder else []
    return [str(started.runtime), "start", *named, *shown, started.image, *started.command], dict(started.variables)


ENROOT = Runtime(
    kinds=("enroot",),
    start=_start,
    tidy=TIDY,
    host=HostStart(
        programs=("enroot",),
        variables=("ENROOT_", "XDG_", "NVIDIA_", "MELLANOX_"),
        version=("version",),
        kinds=("enroot",),
        ways=(Way(), Way("(unpacked)", unpacked=True, unpack=_create)),
        command=_command,
        selects_devices=True,
        splits=":\\ \t\n",  # fstab(5) escapes by backslash
    ),
)


# The variable in which Slurm lists a step's GPUs; it is harmless on nodes without GPUs.
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def _options(container: NodeContainer) -> list[str]:
    """Return srun's options for the container, as shell words for the batch script.

    --container-env lists variables that an image could define too; by default, the image's value wins.
    --container-name makes the training use the preflight's container; the name differs between clusters, users, jobs
    and restarts of a job. Raises UsageError for a mount that a shell would expand.
    """
    mounts = []
    for source, place, options in container.binds("+"):
        if set("$`") & set(source + place):
            raise UsageError(
                f"pyxis cannot mount {source!r} ({container.mounted_by(source)}): it passes mounts to a shell, "
                "which expands $ and `",
                "rename the folder, or choose another",
            )
        mounts.append(":".join(filter(None, (source, place, options))))
    return [
        # pyxis treats an image name without a slash as one in a registry.
        '--container-image="$image"'
        if container.staged
        else word(f"--container-image={container.path}", "the image's path"),
        f'--container-name="{NAME_PREFIX}$job-$restarts"',
        word(f"--container-mounts={','.join(mounts)}"),
        f"--container-env=SLURM_NODEID,SLURMD_NODENAME,{container.devices.visible or _VISIBLE}",
        "--no-container-mount-home",
        "--no-container-entrypoint",
    ]


PYXIS = Runtime(kinds=("enroot",), launcher="srun", step_options=_options, instead="enroot", tidy=ENROOT.tidy)
