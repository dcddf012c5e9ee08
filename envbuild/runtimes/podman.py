"""podman and podman-hpc, without root: images of a registry by digest, OCI layouts and .sqsh files.

A job's container is a child of conmon, which leaves the tree of the job's processes. So a process outside of that tree
ends the container and removes its folder when the job's script ends, also by SIGKILL; where Slurm kills that process,
too (proctrack/cgroup), the next job of the user removes the folder.

Sources: podman 4.3.1 (options, in tests) and 5.4.2; conmon, src/ctr_exit.c, which passes SIGTERM on; NVIDIA, Container
Device Interface (`--device nvidia.com/gpu=all`); NERSC/podman-hpc 1.1.4, podman_hpc/podman_hpc.py: it adds options and
becomes podman.
"""

from __future__ import annotations

import textwrap
from functools import partial

from envbuild.data import load_table
from envbuild.runtimes.base import (
    PRIVATE,
    Devices,
    HostProgram,
    HostStart,
    NodeContainer,
    Runtime,
    Way,
    fill,
    path_word,
    word,
)

# The job alone uses this storage: nothing of it is shared with the user's other containers.
_OWN = (
    'podman --log-level=error --root "$disk/storage" --runroot "$job/run" --cgroup-manager=cgroupfs \\\n'
    "        --events-backend=none"
)
_HPC = "podman-hpc --log-level=error"  # it has the site's storage, and adds its own options
_CLEAN = r"""# clean FOLDER [wait]: ends a job's container and removes its folder; with `wait`, after the job's script.
trap '' TERM INT HUP
cd /
job=$1 XDG_RUNTIME_DIR=$1 container=envbuild-${1##*/}
export XDG_RUNTIME_DIR
[ -z "${2-}" ] || cat "$job/alive" >/dev/null
[ -d "$job" ] || exit 0
read -r disk <"$job/disk" || exec rm -rf "$job"
podman() {
    command @COMMAND@ "$@"
}
podman ps || podman system migrate # after SIGKILL of all its processes, podman refuses other commands
podman kill --signal URG "$container" # ddp_train.launch tells the ranks to save their state
podman stop --time 20 "$container"
podman rm --force "$container"
@STORAGE@rm -rf "$disk" "$job"
"""
_STORAGE = r"""podman unshare rm -rf "$disk/storage"
kill "$(cat "$job/libpod/tmp/pause.pid")" # it holds podman's user namespace
for tool in fusermount3 fusermount; do "$tool" -u "$disk/image" && break; done
"""
_NODE = r"""@PRIVATE@# podman's storage and sockets are in folders of this job's. The job holds their lock.
state=/tmp/envbuild-podman-$(id -u) # podman takes no path of sockets with more than 50 characters
private "$state"
exec 8>"$state/lock"
flock 8
job=$(mktemp -d "$state/XXXXXX")
disk=@DISK@
echo "$disk" >"$job/disk"
cat >"$job/clean" <<'CLEAN'
@CLEAN@CLEAN
for old in "$state"/*/; do # of jobs that were killed: nobody holds the lock
    [ "$old" = "$job/" ] || flock -n "$old/lock" sh "$old/clean" "${old%/}" >/dev/null 2>&1 || true
done
exec 9>"$job/lock"
flock 9
exec 8>&-
mkfifo "$job/alive"
exec 7<>"$job/alive" # open as long as this script lives
(setsid sh "$job/clean" "$job" wait 7>&- >/dev/null 2>&1 </dev/null &)
XDG_RUNTIME_DIR=$job container=envbuild-${job##*/}
export XDG_RUNTIME_DIR
podman() {
    command @COMMAND@ "$@" 7>&- 9>&-
}
@OPEN@# Slurm may signal every process of a step: the container runs detached, with this script's output, and its
# program ddp_train.launch gets the signal that tells the ranks to save their state.
trap 'podman kill --signal URG "$container" >/dev/null 2>&1 || true' TERM INT HUP URG
podman @RUN@ \
    @IMAGE@ \
    @PROGRAM@ "$@" || stop 'podman cannot start the container, see above'
until [ -s "$job/code" ] || [ ! -d "$job" ]; do # a signal ends a wait
    (exec 7>&- 9>&- && podman wait "$container" >>"$job/code" 2>/dev/null) &
    wait "$!" || true
done
read -r code <"$job/code" || code=1
sh "$job/clean" "$job" >/dev/null 2>&1 || true
exit "$code"
"""
_MOUNTED = r"""@SET@mkdir "$disk/image"
# squashfuse inherits that SIGTERM is ignored, so the image stays readable while ranks save their state.
(
    trap '' TERM
    exec squashfuse -o "uid=$(id -u),gid=$(id -g)" "$image" "$disk/image" 7>&- 9>&-
) 2>/dev/null || unsquashfs -quiet -no-progress -no-xattrs -force -dest "$disk/image" "$image" >/dev/null ||
    stop "cannot open $image: this node needs squashfuse with /dev/fuse, or unsquashfs"
"""
_PULLED = r"""image=$(@LAYOUT@podman pull --quiet @IMAGE@) || stop 'podman cannot pull '@NAME@', see above'
"""
# podman 4 makes a layout's path the image's name, in which it allows few characters: the link has a path that it takes.
_LINKED = 'cd "$disk" && ln -s @FOLDER@ layout && '
_OF_LAYOUT = r"""[ "$(podman image inspect --format '{{.Digest}}' "$image")" = @DIGEST@ ] ||
    stop @NAME@' holds another image than @DIGEST@'
"""
_NAMES = r"""env | sed -n 's/=.*//p' | grep -xE '@PASSED@' |
    grep -vxE '@KEPT@' >"$job/variables" || true
"""
_WIDTH = 104


def _options(devices: Devices, *how: str) -> list[str]:
    """Return the words of `podman run`: the container sees the node's network, memory and devices, no other folder.

    Its root is the user, so files have the right owner.
    """
    options = ["run", *how, "--network=host", "--ipc=host", "--uts=host", "--user=0"]
    options += ["--ulimit=host", "--security-opt=label=disable", "--volume=/dev:/dev:rslave"]
    options += [f"--device={devices.kubernetes}=all"] if devices.docker_request else []
    options += ["--group-add=keep-groups"] if devices.docker_devices else []
    return [*options, *(f"--env={name}={value}" for name, value in devices.container_variables)]


def _run_words(container: NodeContainer, *how: str) -> str:
    # Without a cgroup of its own, the container stays in the job's.
    options = _options(container.devices, *how, "--cgroups=disabled")
    options += [word("--volume=" + ":".join(filter(None, bind))) for bind in container.binds()]
    options += ['--env-file="$job/variables"']
    lines = textwrap.wrap(" ".join(options), _WIDTH, break_long_words=False, break_on_hyphens=False)
    return " \\\n    ".join(lines)


def _variables() -> str:
    """Return the line that writes the names of the job's variables that the container gets into a file."""
    table = load_table("caller")
    prefixes, names = table["image"]["prefixes"], [*table["image"]["names"], *table["python"]["kept"]]
    lines = [f"({line.replace(' ', '|')}).*" for line in textwrap.wrap(" ".join(prefixes), _WIDTH)]
    lines += [line.replace(" ", "|") for line in textwrap.wrap(" ".join(names), _WIDTH)]
    return fill(_NAMES, passed="\n".join(lines), kept="|".join(table["image"]["kept_out"]))


def _start(container: NodeContainer, program: str, command: str = _OWN) -> str:
    """Return lines of the node's shell script that run `program` in podman with the script's arguments.

    `command` is the command line of podman, or podman-hpc for images that `podman-hpc pull` or `migrate` squashed.
    """
    how = ["--detach", '--name="$container"', "--log-driver=passthrough"]
    name, at, digest = container.path.partition("@")
    own = command == _OWN
    if not own:
        opened, image = "", container.image
    elif at:
        layout = name.removeprefix("oci:") if name.startswith("oci:") else ""
        opened = fill(
            _PULLED,
            layout=fill(_LINKED, folder=path_word(layout, "the image")) if layout else "",
            image="oci:layout" if layout else path_word(container.path, "the image"),
            name=word(name),
        )
        opened += fill(_OF_LAYOUT, digest=digest, name=word(name)) if layout else ""
        image = '"$image"'
    else:
        opened = fill(_MOUNTED, set="" if container.staged else f"image={container.image}\n")
        image = '--rootfs "$disk/image:O" /bin/sh /etc/rc'
        how.append('--env-file="$disk/image/etc/environment"')
    scratch = container.scratch and path_word(container.scratch, "[paths] scratch")
    return fill(
        _NODE,
        private=fill(PRIVATE, name="podman"),
        disk=f'$(mktemp -d {scratch}/envbuild-podman-"$(id -u)"-XXXXXX)' if container.scratch else "$job",
        clean=fill(_CLEAN, command=command, storage=_STORAGE if own else ""),
        command=command,
        open=f"{_variables()}{opened}",
        run=_run_words(container, *how),
        image=image,
        program=program,
    )


def _command(started: HostProgram) -> tuple[list[str], dict[str, str]]:
    # torchrun tells the agents of one host apart by their process numbers, which have to differ between containers.
    options = _options(started.devices, "--rm", "--pid=host", f"--env-file={started.image}/etc/environment")
    options += [f"--env={name}={value}" for name, value in sorted(started.variables.items())]
    options += [f"--volume={started.folder}:{started.inside}"] if started.folder else []
    line = [str(started.runtime), "--log-level=error", *options, "--rootfs", started.image, "/bin/sh", "/etc/rc"]
    # Without XDG_RUNTIME_DIR, podman's sockets are below TMPDIR, whose path may be too long for them.
    return [*line, *started.command], {"TMPDIR": "/tmp"}


PODMAN = Runtime(
    kinds=("enroot", "docker"),
    start=_start,
    host=HostStart(
        programs=("podman",),
        variables=("CONTAINERS_", "XDG_", "DBUS_"),
        ways=(Way("(unpacked)", unpacked=True),),
        command=_command,
        splits=":",
    ),
)
PODMAN_HPC = Runtime(kinds=("docker",), start=partial(_start, command=_HPC))
