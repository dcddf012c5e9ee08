#!/bin/bash
#PBS -N pt_cpu
#PBS -l select=2:mpiprocs=1
#PBS -l walltime=01:00:00
#PBS -l place=scatter:excl
#PBS -r y
#PBS -j oe
#PBS -o logs/pt_cpu.pbs
# envbuild VERSION: pt_cpu for cpu-x86_64, venv sha256:abababababababababababababababababababababababababababababababab, verified 2026-01-02T03:04:05Z; site lab
stop() { # message, exit code
    printf 'envbuild: %s\n' "$1" >&2
    exit "${2-6}"
}

set -euo pipefail

# 123.server, or 123[4].server in an array
nodes=2 job=${PBS_JOBID//[^A-Za-z0-9_.-]/_}
export ENVBUILD_RUN=/fsx/me/pt_cpu_$job
log=/fsx/me/logs/pt_cpu_$job.out
mkdir -p "$ENVBUILD_RUN" /fsx/me/logs
cd /fsx/me
# PBS shows its own file of output only when the job has ended, and writes one job's over another's.
echo "envbuild: the output goes to $log"
exec >>"$log" 2>&1
# PBS does not tell how often it has started this job: count. A job that starts again meets under another name.
restarts=0
[ ! -s "$ENVBUILD_RUN/starts" ] || read -r restarts <"$ENVBUILD_RUN/starts"
echo $((restarts + 1)) >"$ENVBUILD_RUN/starts"

# Nodes by their numbers; the second tells by which interface the head reaches it.
mapfile -t hosts < <(awk '!seen[$0]++' "$PBS_NODEFILE")
peer=${hosts[1]-}

# For every node: ddp_train.launch, in the artifact, reads it, finds the others and starts the training.
cat >"$ENVBUILD_RUN/settings-$restarts.sh" <<'SETTINGS'
# What every process is told.
export OMP_NUM_THREADS=2
# What ddp_train.launch is told.
ENVBUILD_JOB='{
  "name": "pt_cpu", "nodes": 2, "nproc_per_node": 2, "strategy": "deepspeed", "max_restarts": 3,
  "join_timeout_s": 900, "read_timeout_s": 300, "launcher": "mpiexec",
  "number": ["OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "PALS_RANKID"], "python": "/fsx/envs/pt/bin/python",
  "environment": "/fsx/envs/pt", "command": ["-m", "ddp_train", "10", "1"],
  "run_files": {"--checkpoint_path": "snapshot.pt", "--report": "report.json"}
}'
SETTINGS
# shellcheck disable=SC1090,SC1091
. "$ENVBUILD_RUN/settings-$restarts.sh"
# From the host where the job was submitted; it need not be here.
unset XDG_RUNTIME_DIR
launch=(/fsx/envs/pt/bin/python -I -X utf8 -m ddp_train.launch)
settings=$ENVBUILD_RUN/settings-$restarts.sh

mpirun=$(command -v mpiexec) ||
    stop 'there is no mpiexec here; say its module in [modules] run of the site' 6
case $("$mpirun" --version 2>&1 || true) in
*'Open MPI'* | *OpenRTE* | *PRTE*)
    hostfile=$ENVBUILD_RUN/slots-$restarts
    for host in "${hosts[@]}"; do echo "$host slots=1"; done >"$hostfile"
    mpi=openmpi
    ;;
*PALS*) mpi=pals ;;
*) mpi=hydra ;;
esac

# everywhere STEP: runs a step once on every node and becomes its launcher, so call it in a subshell.
everywhere() {
    local each=1 options=()
    case $mpi in
    # Without --bind-to none torchrun and all of its workers would have one core.
    openmpi) options+=(-np $((nodes * each)) --map-by "ppr:$each:node" --bind-to none --hostfile "$hostfile") ;;
    pals) options+=(-n $((nodes * each)) --ppn "$each" --cpu-bind none) ;;
    hydra) options+=(-n $((nodes * each)) -ppn "$each") ;;
    esac
    # All but Open MPI give this environment to every node, where Slurm's name of this node would be wrong.
    [ "$mpi" = openmpi ] || unset SLURMD_NODENAME
    exec "$mpirun" "${options[@]}" "${launch[@]}" "$1" "$settings" </dev/null
}

[ "${#hosts[@]}" -eq "$nodes" ] ||
    stop "$nodes nodes were asked for, and there are ${#hosts[@]}: ${hosts[*]-}" 5
[ -z "$peer" ] || peer=$(getent ahosts "$peer" | awk '$1 !~ /^(127\.|::1$)/ { print $1; exit }') || peer=
printf '%s\n' "$peer" "${hosts[@]}" >"$ENVBUILD_RUN/hosts-$restarts"
rm -f "$ENVBUILD_RUN/at-$restarts".* "$ENVBUILD_RUN/failed-$restarts"

everywhere training &
launched=$!
# Time is up, or the job is cancelled: torchrun ends its workers in order.
trap 'kill -TERM "$launched" 2>/dev/null || true' TERM USR1
# Ends the training before the time limit: the scheduler then signals what serves a container's files, too.
(
    trap 'kill "$!"; exit' TERM
    sleep $((3480 > SECONDS ? 3480 - SECONDS : 0)) &
    wait "$!" && kill -USR1 $$
) >/dev/null 2>&1 &
timer=$!
while :; do
    code=0
    wait "$launched" || code=$?
    kill -0 "$launched" 2>/dev/null || break # else a signal ended the wait
done
kill "$timer" 2>/dev/null || true
# The launcher's code may be that of a node that it ended. The first node that failed left its own.
[ "$code" -eq 0 ] || code=$(cat "$ENVBUILD_RUN/failed-$restarts" 2>/dev/null || echo "$code")
[ "$code" -eq 0 ] || stop "the job failed with exit code $code: envbuild diagnose $log $ENVBUILD_RUN" "$code"
