"""The program that runs on every node, in POSIX sh, the same for all launchers.

The batch script writes it into the run's folder, which every node sees, with the settings and, after the first
step (find_program), the table of nodes. So it does not depend on the variables that a launcher passes on, and
it looks up nothing inside a container, which may lack scontrol, ip and host names.

Sources: torch.distributed.run's documentation; pytorch/pytorch issues 73656, 79388, 135712, 150532.
"""

from __future__ import annotations

from envbuild.fabrics import preflight_devices
from envbuild.jobs.containers import start_container
from envbuild.jobs.ending import orderly_shutdown
from envbuild.jobs.model import JobPlan, Launcher
from envbuild.jobs.modules import module_lines
from envbuild.jobs.quote import fill, indented, path_word, word, words

_BEGINNING = r"""#!/bin/sh
# @WHAT@
# sh @FILE@ STEP NUMBER [@MORE@]; a NUMBER of - is found out.
set -eu
step=$1 number=$2 extra=${3-}
ENVBUILD_RUN=${0%/*}
restarts=${0##*-} restarts=${restarts%.sh}
name=${SLURMD_NODENAME:-$(uname -n)}

stop() {
    printf 'envbuild: node %s: %s\n' "$name" "$1" >&2
    exit 1
}

"""

_NUMBER = r"""case $number in
*[!0-9]* | '') stop "@LAUNCHER@ does not tell the number of this node" ;;
esac

"""

_PLACE = r"""# The table of nodes: who is where.
# shellcheck disable=SC1090,SC1091
. "$ENVBUILD_RUN/nodes-$restarts.sh"
pick() {
    shift "$((number + 1))"
    echo "$1"
}
# shellcheck disable=SC2086
{
    here=$(pick - $ENVBUILD_HOSTS)
    ENVBUILD_ADDRESS=$(pick - $ENVBUILD_ADDRESSES)
    ENVBUILD_INTERFACE=$(pick - $ENVBUILD_INTERFACES)
}
@AGREE@
# From the host where the job was submitted, or of another environment than the verified one.
unset XDG_RUNTIME_DIR PYTHONHOME PYTHONPATH
# pyxis and enroot's hook set these where the image has PYTORCH_VERSION: no rank has been started yet.
unset RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT
# What every process is told; it asks nobody again.
export ENVBUILD_NODE="$number" ENVBUILD_NODES=@NODES@ ENVBUILD_HOSTS ENVBUILD_ADDRESSES ENVBUILD_ADDRESS
export ENVBUILD_INTERFACE ENVBUILD_PORT ENVBUILD_RUN ENVBUILD_RUN_ID
export GLOO_SOCKET_IFNAME="$ENVBUILD_INTERFACE"@NCCL@
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 PYTHONUNBUFFERED=1 PYTHONNOUSERSITE=1 LOGLEVEL=INFO
# shellcheck disable=SC1090,SC1091
. "$ENVBUILD_RUN/settings-$restarts.sh"
cd "${ENVBUILD_RUN%/*}"

"""

_AGREE = r"""[ "$extra" = inside ] || [ "${here%%.*}" = "${name%%.*}" ] ||
    stop "@LAUNCHER@ calls this node number $number, and that was $here before"
"""

_REPLACED = r"""if [ "${here%%.*}" != "${name%%.*}" ]; then # --auto-resume put this node in the place of another
    where=$(sh "$ENVBUILD_RUN/find-$restarts.sh" head "$number" "${ENVBUILD_ADDRESSES%% *}") || exit 1
    here=$name ENVBUILD_ADDRESS=${where% *} ENVBUILD_INTERFACE=${where#* }
fi
"""

_FIRST = "$((number == 0))"
# The batch script runs on the head, which is never replaced; a replacement may be the first node in the table.
_HEAD = r"""$([ "$ENVBUILD_ADDRESS" = "$head" ] && echo 1 || echo 0)"""

_C10D = r"""    head=${ENVBUILD_ADDRESSES%% *}
    case $head in
    *:*) endpoint="[$head]:$ENVBUILD_PORT" ;;
    *) endpoint=$head:$ENVBUILD_PORT ;;
    esac
    set -- -m torch.distributed.run \
        --nnodes @NODES@ --nproc-per-node @NPROC@ --max-restarts @RESTARTS@ \
        --rdzv-id "$ENVBUILD_RUN_ID" --rdzv-backend c10d --rdzv-endpoint "$endpoint" \
        --rdzv-conf "is_host=@HOST@,join_timeout=@JOIN@,read_timeout=@READ@" \
        --local-addr "$ENVBUILD_ADDRESS" "$@"
"""

_ETCD = r"""    set -- -m torch.distributed.run \
        --nnodes @NODES@ --nproc-per-node @NPROC@ --max-restarts @RESTARTS@ \
        --rdzv-id "$ENVBUILD_RUN_ID" --rdzv-backend etcd-v2 --rdzv-endpoint @ENDPOINT@ \
        --rdzv-conf timeout=@JOIN@ --local-addr "$ENVBUILD_ADDRESS" "$@"
"""

# The variables that horovodrun would set; a build with MPI asks MPI instead.
_HOROVOD = r"""    rank=${OMPI_COMM_WORLD_RANK:?Open MPI starts the ranks}
    export HOROVOD_RANK="$rank" HOROVOD_SIZE=@WORLD@ HOROVOD_LOCAL_SIZE=@NPROC@
    export HOROVOD_LOCAL_RANK="${OMPI_COMM_WORLD_LOCAL_RANK:-$((rank % @NPROC@))}"
    export HOROVOD_CROSS_RANK="$number" HOROVOD_CROSS_SIZE=@NODES@ HOROVOD_HOSTNAME="$here"
    export HOROVOD_GLOO_IFACE="$ENVBUILD_INTERFACE" HOROVOD_GLOO_RENDEZVOUS_ADDR="${ENVBUILD_ADDRESSES%% *}"
    export HOROVOD_GLOO_RENDEZVOUS_PORT="$ENVBUILD_PORT"
"""

# nproc obeys OMP_NUM_THREADS, so it is unset.
_THREADS = r"""threads=$(unset OMP_NUM_THREADS OMP_THREAD_LIMIT; nproc || echo 1)
export OMP_NUM_THREADS=$((threads > @NPROC@ ? threads / @NPROC@ : 1))"""

# Like JobPlan.script_word, for a path that only the node knows.
_ESCAPED_RUN = r'"$(printf %s "$ENVBUILD_RUN" | sed "s/[$]/&&/g")"'

# Like `conda activate`; activation scripts are written for bash.
_CONDA = r"""export CONDA_PREFIX=@FOLDER@ CONDA_DEFAULT_ENV=@FOLDER@ CONDA_SHLVL=1
@PATH@
for script in "$CONDA_PREFIX"/etc/conda/activate.d/*.sh; do
    [ -e "$script" ] || continue
    # shellcheck disable=SC2016
    exec bash -c 'for script in "$CONDA_PREFIX"/etc/conda/activate.d/*.sh; do . "$script"; done >&2; exec "$0" "$@"' \
        @PYTHON@ "$@"
done
exec @PYTHON@ "$@"
"""


def settings(plan: JobPlan) -> str:
    """Return the text of settings-RESTARTS.sh: variables, in order, and the command as "$@"."""
    lines = ["# What this job is told; ENVBUILD_RUN is its own folder."]
    if "OMP_NUM_THREADS" not in dict(plan.variables):  # the site does not set the number of CPUs
        lines.append(fill(_THREADS, nproc=plan.nproc_per_node))
    for name, value in plan.variables:
        lines.append(f"export {name}={word(value, f'variable {name}')}")
    command = words(map(plan.script_word, plan.command), "an argument of the command")
    changed = plan.script_word("$") != "$" and "$" in f"{plan.work}{plan.mounts}"
    run = _ESCAPED_RUN if changed else '"$ENVBUILD_RUN"'
    for option, name in plan.run_files:
        command += f" \\\n    {word(option)} {run}/{word(name)}"
    return "\n".join([*lines, f"set -- {command}"])


def beginning(plan: JobPlan, launcher: Launcher, file: str, more: str, what: str, *, ranks: int = 1) -> str:
    """Return the first lines of a node's program: its arguments and the node's number.

    `ranks` is the number of processes on each node.
    """
    text = fill(_BEGINNING, what=what, file=file, more=more)
    if launcher.number:
        text += f'if [ "$number" = - ]; then\n    number={launcher.number}\n'
        if ranks > 1:  # the first step and the preflight start one process per node
            text += f'    [ "$step" != training ] || number=$((number / {ranks}))\n'
        text += "fi\n"
    return text + fill(_NUMBER, launcher=plan.launcher)


def node_program(plan: JobPlan, launcher: Launcher) -> str:
    """Return the text of node-RESTARTS.sh, which starts the preflight or the training on a node."""
    horovod = plan.strategy == "horovod"
    parts = [
        beginning(
            plan,
            launcher,
            "node-RESTARTS.sh",
            "inside",
            "STEP, preflight or training, on node NUMBER.",
            ranks=plan.nproc_per_node if horovod else 1,
        ),
        fill(
            _PLACE,
            agree=_REPLACED if plan.site.scheduler.auto_resume else fill(_AGREE, launcher=plan.launcher),
            nodes=plan.nodes,
            nccl=' NCCL_SOCKET_IFNAME="$ENVBUILD_INTERFACE"' if plan.artifact.accelerator.gpu else "",
        ),
    ]
    parts.append(launcher.node_lines)
    if plan.modules and not launcher.carries_environment:
        parts.append(f'if [ "$extra" != inside ]; then\n{indented(module_lines(plan))}\nfi\n\n')
    parts.append(start_container(plan))
    parts.append(f"case $step in\npreflight) {_preflight(plan)} ;;\n")
    parts.append(f"training)\n{_training(plan)}    ;;\nesac\n")
    if plan.library_path:
        path = word(":".join(plan.library_path), "library_path")
        parts.append(f'export LD_LIBRARY_PATH={path}"${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"\n')
    parts.append(orderly_shutdown(plan, launcher, enter(plan)))
    return "".join(parts)


def enter(plan: JobPlan) -> str:
    """Return the last lines of the node program, which start the interpreter in an activated environment."""
    python = path_word(plan.artifact.python, "the interpreter")
    if plan.runtime != "folder":
        return f'exec {python} "$@"\n'
    folder = path_word(plan.artifact.path, "the environment")
    path = f'export PATH={folder}/bin"${{PATH:+:$PATH}}"'
    if not plan.artifact.of_kind.of_conda:
        return f'export VIRTUAL_ENV={folder}\n{path}\nexec {python} "$@"\n'
    return fill(_CONDA, folder=folder, path=path, python=python)


def _training(plan: JobPlan) -> str:
    match plan.strategy:
        case "ddp":
            return fill(
                _C10D if plan.rendezvous == "c10d" else _ETCD,
                nodes=plan.nodes,
                nproc=plan.nproc_per_node,
                restarts=plan.max_restarts,
                host=_HEAD if plan.site.scheduler.auto_resume else _FIRST,
                join=plan.join_timeout_s,
                read=plan.read_timeout_s,
                endpoint=word(plan.rendezvous_endpoint, "--endpoint"),
            )
        case "horovod":
            return fill(_HOROVOD, nodes=plan.nodes, nproc=plan.nproc_per_node, world=plan.world_size)
        case "single":
            return ""


def _preflight(plan: JobPlan) -> str:
    artifact = plan.artifact
    given = ["-m", "ddp_train.preflight", "--arch", artifact.arch]
    if plan.runtime == "folder":  # an image's digest is not visible from inside
        given += ["--digest", artifact.digest]
    if plan.gpus_per_node:
        given += ["--gpus", str(plan.gpus_per_node)]
    if artifact.provider:
        given += ["--provider", artifact.provider]
    devices = preflight_devices(artifact.provider)
    told = f"export ENVBUILD_DEVICES={word(devices)} && " if devices else ""
    return f"{told}set -- {words(given)}"
