"""Launchers that several schedulers share, and the loop over nodes for launchers that start one process at a time.

Each defines `everywhere`, the bash function of a job's script that runs a step on every node; `stop`, `nodes`,
`hosts`, `restarts`, `launch`, `settings` and ENVBUILD_RUN are defined by the script.
Sources: mpirun(1) of Open MPI 4 and 5, mpiexec of MPICH's Hydra, HPE's PALS.
"""

from __future__ import annotations

from functools import partial

from envbuild.jobs.model import JobPlan, Launcher
from envbuild.jobs.quote import fill

ABOUT = """\
# everywhere STEP: runs one step on every node. It ends in exec or exit: call it in a subshell."""

# The number of SIGURG on Linux: Slurm does not know its name. ddp_train/launch/end.py tells why this signal.
STEP_SIGNAL = 23

_MPI = r"""mpirun=$(command -v @LAUNCHER@) ||
    stop 'there is no @LAUNCHER@ here; say its module in [modules] run of the site' 6
case $("$mpirun" --version 2>&1 || true) in
*'Open MPI'* | *OpenRTE* | *PRTE*)
    @HOSTFILE@mpi=openmpi
    ;;
*PALS*) mpi=pals ;;
*) mpi=hydra ;;
esac

@ABOUT@
everywhere() {
    local each=1 options=()
@HOROVOD@    case $mpi in
    # Without --bind-to none, torchrun and all of its workers would share one core.
    openmpi) options+=(-np $((nodes * each)) --map-by "ppr:$each:node" --bind-to none @HOSTS@) ;;
    pals) options+=(-n $((nodes * each)) --ppn "$each" --cpu-bind none) ;;
    hydra) options+=(-n $((nodes * each)) -ppn "$each") ;;
    esac
    # Launchers other than Open MPI's pass this environment to every node, where this node's name would be wrong.
    [ "$mpi" = openmpi ] || unset SLURMD_NODENAME
    exec "$mpirun" "${options[@]}" "${launch[@]}" "$1" "$settings" </dev/null
}"""

_HOSTFILE = r"""hostfile=$ENVBUILD_RUN/slots-$restarts
    for host in "${hosts[@]}"; do echo "$host slots=@EACH@"; done >"$hostfile"
    """

_HOROVOD = r"""    if [ "$1" = training ]; then
        each=@EACH@
        [ "$mpi" = openmpi ] || stop 'Horovod is started by Open MPI, and this @LAUNCHER@ is another' 6
        interface=$(cut -d ' ' -f 3 "$ENVBUILD_RUN/at-$restarts".* | sort -u)
        if [ "$(wc -l <<<"$interface")" -eq 1 ]; then # all nodes use the same interface
            options+=(--mca btl_tcp_if_include "$interface" --mca oob_tcp_if_include "$interface")
        fi
    fi
"""

_EACH = r"""@ABOUT@
everywhere() {
    local number pids=() left last code=0 signalled=
@OPEN@    trap 'signalled=yes; @TELL@' TERM
    for number in "${!hosts[@]}"; do
@START@        pids+=($!)
    done
    # If one node fails, stop the others: they would only wait for it.
    left=${#pids[@]}
    while [ "$left" -gt 0 ]; do
        last=0
        wait -n || last=$?
        if [ -n "$signalled" ]; then # the trap ended the wait, not a node
            signalled='' code=143
            continue
        fi
@CHECK@        left=$((left - 1))
        if [ "$last" -ne 0 ]; then
            [ "$code" -ne 0 ] || code=$last
            kill -TERM "${pids[@]}" 2>/dev/null || true
        fi
    done
@END@    exit "$code"
}"""

# ssh's standard input ends with this script, or on SIGTERM: node-RESTARTS.sh then ends its process. An ssh that was
# killed could not carry what a rank prints while it saves its state, and the rank would end with a broken pipe.
_SSH_BEFORE = r"""alive=$(mktemp -u -p /tmp) # TMPDIR may name a folder that exists on other nodes only
mkfifo -m 600 "$alive"
trap 'rm -f "$alive"' EXIT

quoted() { printf "'%s' " "${@//\'/\'\\\'\'}"; }

"""

_SSH_START = r"""        ssh -o BatchMode=yes -o ConnectTimeout=20 "${hosts[number]}" \
            "$(quoted "${launch[@]}" "$1" "$settings" "$number")" <&8 8<&- 9>&- &
"""


# Each launcher's process number: Open MPI, PMIx, MPICH and Intel MPI, HPE's PALS.
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "PALS_RANKID")

# The scheduler does not manage a process that ssh started. The process ends with the batch script, which holds
# the other end of its standard input. $$ stays the same over exec.
_WATCH = r"""exec 3<&0 </dev/null
(
    exec >/dev/null 2>&1
    cat <&3
    kill -TERM $$
) &
exec 3<&-

"""


def each(
    start: str,
    check: str = "",
    end: str = "",
    begin: str = "",
    tell: str = 'kill -TERM "${pids[@]}" 2>/dev/null || true',
) -> str:
    """Return `everywhere` as a loop over the nodes.

    `begin` are its first lines, `tell` tells the nodes to end when the script is told to. `start` are the lines that
    start a process on node $number, `check` those that correct $last, the exit code of an ended process, `end` those
    that run after all processes have ended.
    """
    return fill(_EACH, about=ABOUT, open=begin, tell=tell, start=start, check=check, end=end)


def _ssh(_: JobPlan) -> str:
    return _SSH_BEFORE + each(_SSH_START, begin='    exec 9<>"$alive"\n    exec 8<"$alive"\n', tell="exec 9>&-")


def mpi(*, hostfile: bool = False) -> Launcher:
    """Return the launcher mpirun or mpiexec, as the plan names it.

    `hostfile` passes the nodes to Open MPI, for a scheduler that many of its builds do not support.
    """
    return Launcher(partial(_mpi, hostfile), number=_RANKS)


def _mpi(hostfile: bool, plan: JobPlan) -> str:
    horovod = plan.strategy == "horovod"
    each = plan.nproc_per_node if horovod else 1
    return fill(
        _MPI,
        about=ABOUT,
        launcher=plan.launcher,
        hostfile=fill(_HOSTFILE, each=each) if hostfile else "",
        hosts='--hostfile "$hostfile"' if hostfile else "",
        horovod=fill(_HOROVOD, each=each, launcher=plan.launcher) if horovod else "",
    ).replace("none )", "none)")


SSH = Launcher(_ssh, node_lines=_WATCH)
