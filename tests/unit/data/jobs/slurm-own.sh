#!/bin/bash
#SBATCH --job-name=pt_cpu
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=01:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --chdir=/fsx/me
#SBATCH --output=logs/%x_%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --exclusive
# The folder logs must be there: `envbuild job --submit` makes it, sbatch does not.
# envbuild VERSION: pt_cpu for cpu-x86_64, enroot sha256:abababababababababababababababababababababababababababababababab, verified 2026-01-02T03:04:05Z; site lab
stop() { # message, exit code
    printf 'envbuild: %s\n' "$1" >&2
    exit "${2-6}"
}

set -euo pipefail

nodes=2 job=$SLURM_JOB_ID
# A job that Slurm starts again goes on from its snapshot, and meets under another name.
restarts=${SLURM_RESTART_COUNT:-0}
export ENVBUILD_RUN=/fsx/me/pt_cpu_$job
log=/fsx/me/logs/pt_cpu_$job.out
mkdir -p "$ENVBUILD_RUN"
cd /fsx/me

# Nodes by their numbers, and an address of the second, to know by which interface the head reaches it.
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
peer=
if [ "$nodes" -gt 1 ]; then
    peer=$(scontrol show node -o "${hosts[1]}" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p') || peer=
fi

# For every node: ddp_train.launch, in the artifact, reads it, finds the others and starts the training.
cat >"$ENVBUILD_RUN/settings-$restarts.sh" <<'SETTINGS'
# What every process is told.
export OMP_NUM_THREADS=2
# What ddp_train.launch is told.
ENVBUILD_JOB='{
  "name": "pt_cpu", "nodes": 2, "nproc_per_node": 2, "max_restarts": 3, "join_timeout_s": 900,
  "read_timeout_s": 300, "launcher": "srun", "number": ["SLURM_NODEID"], "signalled": true, "exit_codes": true,
  "python": "/opt/env/bin/python", "command": ["-m", "ddp_train", "10", "1"],
  "run_files": {"--checkpoint_path": "snapshot.pt", "--report": "report.json"}
}'
SETTINGS
# shellcheck disable=SC1090,SC1091
. "$ENVBUILD_RUN/settings-$restarts.sh"
# From the host where the job was submitted; it need not be here.
unset XDG_RUNTIME_DIR
launch=(envbuild run --bind /fsx:/fsx /fsx/pt.sqsh -- /opt/env/bin/python -I -X utf8 -m ddp_train.launch)
settings=/fsx/me/${ENVBUILD_RUN##*/}/settings-$restarts.sh

# everywhere STEP: runs a step once on every node and becomes its launcher, so call it in a subshell.
everywhere() {
    # A step has all CPUs of the job, unless it names a number: that means these alone.
    local options=(--nodes=2 --ntasks=2 --ntasks-per-node=1 --kill-on-bad-exit=1)
    options+=(--cpu-bind=none --mpi=none --export=ALL)
    exec srun "${options[@]}" "${launch[@]}" "$1" "$settings" </dev/null
}

[ "${#hosts[@]}" -eq "$nodes" ] ||
    stop "$nodes nodes were asked for, and there are ${#hosts[@]}: ${hosts[*]-}" 5
[ -z "$peer" ] || peer=$(getent ahosts "$peer" | awk '$1 !~ /^(127\.|::1$)/ { print $1; exit }') || peer=
printf '%s\n' "$peer" "${hosts[@]}" >"$ENVBUILD_RUN/hosts-$restarts"
rm -f "$ENVBUILD_RUN/at-$restarts".* "$ENVBUILD_RUN/failed-$restarts"

everywhere training &
launched=$!
# Time is up, or the job is cancelled: torchrun ends its workers in order.
# srun would kill them. Slurm signals every process of a step, also squashfuse, which holds a container's image: the
# signal is 23, SIGURG, which only ddp_train.launch heeds.
trap ': >"$ENVBUILD_RUN/told-$restarts" || true; scancel --signal=23 "$SLURM_JOB_ID" 2>/dev/null || true' TERM USR1
while :; do
    code=0
    wait "$launched" || code=$?
    kill -0 "$launched" 2>/dev/null || break # else a signal ended the wait
done
# The launcher's code may be that of a node that it ended. The first node that failed left its own.
[ "$code" -eq 0 ] || code=$(cat "$ENVBUILD_RUN/failed-$restarts" 2>/dev/null || echo "$code")
# Nodes that were asked to stop wrote their codes: an error would have made srun kill the others.
[ "$code" -ne 0 ] || code=$(cat "$ENVBUILD_RUN/ended-$restarts".* 2>/dev/null | sort -n | tail -n 1) || code=0
[ "$code" -eq 0 ] || stop "the job failed with exit code $code: envbuild diagnose $log $ENVBUILD_RUN" "$code"
