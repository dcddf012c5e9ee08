"""Start ddp_train.launch in a container: pyxis's options, the command's first words, or enroot's shell lines.

Sources: pyxis, args.c and its wiki, "Usage"; enroot 4.1, doc/cmd/start.md, doc/cmd/create.md;
apptainer-exec(1). Tests with real runtimes: docs/howto/jobs.md.
"""

from __future__ import annotations

from envbuild.errors import UsageError
from envbuild.jobs.model import JobPlan
from envbuild.jobs.quote import fill, mount, path_word, word, words
from envbuild.jobs.stage import image_word
from envbuild.recipe.accelerators import CUDA

_ENROOT = r"""# On a node that users share, the folder above is everybody's: one put there by another user is refused.
private() {
    (umask 077 && mkdir -p "$1") || true
    [ -n "$(find "$1" -prune -type d -user "$(id -u)" ! -perm -020 ! -perm -002)" ] ||
        stop "enroot cannot use $1: it must be a folder of user $(id -u), no link, closed to other writers. Remove it"
}
@DATA@# Without a login session there is no XDG_RUNTIME_DIR, where enroot keeps what runs.
XDG_RUNTIME_DIR=${TMPDIR:-/tmp}/envbuild-$(id -u)-${ENVBUILD_RUN##*/}-$restarts
export XDG_RUNTIME_DIR
private "$XDG_RUNTIME_DIR"
@IMAGE@created=
if ! enroot start "$image" /bin/true >/dev/null 2>&1; then # no squashfuse or overlayfs: unpack it
    created=envbuild-${ENVBUILD_RUN##*/}-$restarts-$name-$$
    enroot create --force --name "$created" "$image"
    image=$created
fi
# The scheduler signals every process of a step, also squashfuse, which holds the image and inherits the ignored signal:
# it stays until all ranks have saved their state. ddp_train.launch takes SIGTERM again.
(
    trap '' TERM
    exec enroot start @OPTIONS@ \
        "$image" @PROGRAM@ "$@"
) &
child=$!
trap 'kill -TERM "$child" 2>/dev/null' TERM INT HUP
code=0
wait "$child" || code=$?
while kill -0 "$child" 2>/dev/null; do # a signal ended the wait, not the child
    code=0
    wait "$child" || code=$?
done
[ -z "$created" ] || enroot remove --force "$created" || true
rmdir @FOLDERS@ 2>/dev/null || true # if empty
exit "$code"
"""
_DATA = r"""# Images are unpacked here.
ENROOT_DATA_PATH=@SCRATCH@/enroot-$(id -u)
export ENROOT_DATA_PATH
private "$ENROOT_DATA_PATH"
"""

# tidy-RESTARTS.sh. Source: srun(1), --task-epilog; Slurm 22.05 limits it to five seconds.
TIDY = r"""#!/bin/sh
# Removes this job's containers from a node: they have names, so that pyxis keeps them when a step ends or is killed.
# Without an argument, as the epilog of a step, only when the job was cancelled or requeued: no step can start then.
[ $# -gt 0 ] || case $(squeue --noheader --format=%T --jobs="$SLURM_JOB_ID") in RUNNING) exit 0 ;; esac
trap '' TERM
if ! command -v enroot >/dev/null; then
    echo "envbuild: node $SLURMD_NODENAME: cannot remove this job's containers: there is no enroot; add it to PATH" >&2
    exit 0
fi
enroot list | while read -r name; do
    case $name in # pyxis_NAME, or pyxis_JOB_NAME where the site says container_scope=job
    pyxis_*envbuild-"$SLURM_JOB_ID"-*) enroot remove --force "$name" </dev/null ;;
    esac
done
"""


def work_key(plan: JobPlan) -> str:
    """Return the name of the setting that chose the working folder, for error messages."""
    origin = plan.origins.get("work", "--work")
    return "the current folder, without --work," if origin == "current folder" else origin


def pyxis_options(plan: JobPlan) -> list[str]:
    """Return srun's options for a pyxis container, as shell words for the batch script.

    --container-env lists variables that an image could define too; by default, the image's value wins.
    --container-name makes the training use the preflight's container; the name differs between jobs and between
    restarts of a job. Raises UsageError for a mount that a shell would expand.
    """
    mounts = []
    for host, container in plan.mounts:
        source, place, options = mount(host, container)
        if set("$`") & set(source + place):
            raise UsageError(
                f"pyxis cannot mount {host!r} ({_mount_key(plan, host)}): it gives mounts to a shell, "
                "which expands $ and `",
                "rename the folder, or choose another",
            )
        mounts.append(":".join([source, place, *(["+".join(options)] if options else [])]))
    return [
        # pyxis treats an image name without a slash as one in a registry.
        '--container-image="$image"'
        if plan.stage
        else word(f"--container-image={plan.artifact.path}", "the image's path"),
        '--container-name="envbuild-$job-$restarts"',
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
    if any(one.partition(":")[0] == host for one in plan.site.container.mounts):
        return plan.site.origin("container", "mounts")
    return work_key(plan) if host == plan.work else "the folder of --script"


def container_words(plan: JobPlan) -> list[str]:
    """Return the words that start a command in the plan's container, quoted for the shell.

    There are none for environments in folders, for pyxis and for enroot. With Apptainer, the home folder is not
    mounted, as in verification: ~/.local is not part of the artifact. Apptainer passes the job's variables
    (SLURM_…, PMIX_…, CUDA_VISIBLE_DEVICES) on by itself.
    """
    image = image_word(plan)
    binds = []
    for host, container in plan.mounts:
        source, place, options = mount(host, container)
        binds.append(words(["--bind", ":".join([source, place, *([",".join(options)] if options else [])])]))
    match plan.runtime:
        case "apptainer":
            flags = f"apptainer exec --no-home {plan.artifact.accelerator.apptainer}".rstrip()
            return [flags, *binds, image]
        case "own":
            return [f"{path_word(plan.envbuild, 'the command envbuild')} exec", *binds, f"{image} --"]
        case _:
            return []


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
        image="" if plan.stage else f"image={image_word(plan)} ",
        options=" \\\n        ".join(options),
        program=program,
        folders=" ".join(folders),
    )
