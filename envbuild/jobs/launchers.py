"""`everywhere`, the bash function of a job's script that starts a program on every node, by each launcher.

Sources: srun(1); mpirun(1) of Open MPI 4 and 5, mpiexec of MPICH's Hydra, HPE's PALS; OpenPBS, src/cmds/pbsdsh.c.
"""

from __future__ import annotations

from envbuild.jobs.containers import program_inside, pyxis_options
from envbuild.jobs.model import JobPlan
from envbuild.jobs.modules import module_shell
from envbuild.jobs.quote import fill

_ABOUT = """\
# everywhere PROGRAM STEP [ARGUMENT…]: starts PROGRAM-RESTARTS.sh once on every node and becomes it, so call it in a
# subshell."""

# torchrun restarts workers itself; when it gives up on one node, the others would only wait for it.
_SRUN = r"""everywhere() {
    # A step has all CPUs of the job, unless it names a number: that means these alone.
    local options=(--nodes=@NODES@ --ntasks=@NODES@ --ntasks-per-node=1)
    options+=(--kill-on-bad-exit=1 --cpu-bind=none --mpi=none --export=ALL)
@MORE@    exec srun "${options[@]}" sh "$ENVBUILD_RUN/$1-$restarts.sh" "$2" - "${@:3}" </dev/null
}"""

_RESUME = r"""    if [ "$2" = training ]; then options+=(--auto-resume=1); fi
"""

_PYXIS = r"""    if [ "$1" = node ]; then
        exec srun "${options[@]}" "${container[@]}" --task-epilog="$ENVBUILD_RUN/tidy-$restarts.sh" \
            /bin/sh @PROGRAM@ "$2" - inside </dev/null
    fi
"""

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
    # Without --bind-to none torchrun and all of its workers would have one core.
    openmpi) options+=(-np $((nodes * each)) --map-by "ppr:$each:node" --bind-to none @HOSTS@) ;;
    pals) options+=(-n $((nodes * each)) --ppn "$each" --cpu-bind none) ;;
    hydra) options+=(-n $((nodes * each)) -ppn "$each") ;;
    esac
    # All but Open MPI give this environment to every node, where Slurm's name of this node would be wrong.
    [ "$mpi" = openmpi ] || unset SLURMD_NODENAME
    exec "$mpirun" "${options[@]}" @SHELL@ "$ENVBUILD_RUN/$1-$restarts.sh" "$2" - "${@:3}" </dev/null
}"""

_HOSTFILE = r"""hostfile=$ENVBUILD_RUN/hosts-$restarts
    for host in "${hosts[@]}"; do echo "$host slots=@EACH@"; done >"$hostfile"
    """

_HOROVOD = r"""    if [ "$2" = training ]; then
        each=@EACH@
        [ "$mpi" = openmpi ] || stop 'Horovod is started by Open MPI, and this @LAUNCHER@ is another' 6
        if [ "$one_interface" = yes ]; then
            options+=(--mca btl_tcp_if_include "$ENVBUILD_INTERFACE" --mca oob_tcp_if_include "$ENVBUILD_INTERFACE")
        fi
    fi
"""

_EACH = r"""@ABOUT@
everywhere() {
    local number pids=() left last code=0 signalled=
    trap 'signalled=yes; kill -TERM "${pids[@]}" 2>/dev/null || true' TERM
    for number in "${!hosts[@]}"; do
@START@        pids+=($!)
    done
    # When one node gives up, the others would only wait for it.
    left=${#pids[@]}
    while [ "$left" -gt 0 ]; do
        last=0
        wait -n || last=$?
        if [ -n "$signalled" ]; then # the trap ended the wait
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

# ssh's standard input ends when this script does: then node-RESTARTS.sh ends what it started.
_SSH_BEFORE = r"""alive=$(mktemp -u)
mkfifo -m 600 "$alive"
exec 9<>"$alive"
trap 'rm -f "$alive"' EXIT

quoted() { printf "'%s' " "${@//\'/\'\\\'\'}"; }

"""

_SSH_START = r"""        ssh -o BatchMode=yes -o ConnectTimeout=20 "${hosts[number]}" \
            "@SHELL@ $(quoted "$ENVBUILD_RUN/$1-$restarts.sh" "$2" "$number" "${@:3}")" <"$alive" 9>&- &
"""

# pbsdsh's exit code says nothing of its program's.
_PBSDSH_START = r"""        # shellcheck disable=SC2016
        pbsdsh -n "$number" -- /bin/sh -c 'code=0; @SHELL@ "$@" || code=$?; echo "$code" >"${1%.sh}.exit-$2-$3"' \
            sh "$ENVBUILD_RUN/$1-$restarts.sh" "$2" "$number" "${@:3}" </dev/null &
"""

_PBSDSH_CHECK = r"""        [ "$last" -ne 0 ] ||
            last=$(sort -n "$ENVBUILD_RUN/$1-$restarts.exit-$2-"* 2>/dev/null | tail -n 1) || last=0
"""

_PBSDSH_END = r"""    for number in "${!hosts[@]}"; do
        last=1
        read -r last <"$ENVBUILD_RUN/$1-$restarts.exit-$2-$number" || true
        [ "$last" -eq 0 ] || [ "$code" -ne 0 ] || code=$last
    done
"""


def everywhere(plan: JobPlan) -> str:
    """The definition of `everywhere`. `stop`, `nodes`, `hosts`, `restarts` and ENVBUILD_RUN are the script's."""
    shell = module_shell(plan, "sh")
    match plan.launcher:
        case "srun":
            return _srun(plan)
        case "mpirun" | "mpiexec":
            return _mpi(plan, shell)
        case "ssh":
            start = fill(_SSH_START, shell=shell)
            return _SSH_BEFORE + fill(_EACH, about=_ABOUT, start=start, check="", end="")
        case "pbsdsh":
            start = fill(_PBSDSH_START, shell=shell)
            return fill(_EACH, about=_ABOUT, start=start, check=_PBSDSH_CHECK, end=_PBSDSH_END)


def _srun(plan: JobPlan) -> str:
    more = _RESUME if plan.site.scheduler.auto_resume else ""
    container = ""
    if plan.runtime == "pyxis":
        options = "".join(f"    {option}\n" for option in pyxis_options(plan))
        container = (
            f"# shellcheck disable=SC2054 # the commas are for pyxis\ncontainer=(\n{options})\n\n"
        )
        more += fill(_PYXIS, program=program_inside(plan))
    return f"{container}{_ABOUT}\n{fill(_SRUN, nodes=plan.nodes, more=more)}"


def _mpi(plan: JobPlan, shell: str) -> str:
    horovod = plan.strategy == "horovod"
    each = plan.nproc_per_node if horovod else 1
    pbs = plan.scheduler == "pbs"
    return fill(
        _MPI,
        about=_ABOUT,
        launcher=plan.launcher,
        hostfile=fill(_HOSTFILE, each=each) if pbs else "",
        hosts='--hostfile "$hostfile"' if pbs else "",
        horovod=fill(_HOROVOD, each=each, launcher=plan.launcher) if horovod else "",
        shell=shell,
    ).replace("none )", "none)")
