#!/bin/bash
#BSUB -J pt_cpu
#BSUB -n 4
#BSUB -W 60
#BSUB -cwd /fsx/me
#BSUB -o /fsx/me/logs/pt_cpu.lsf
#BSUB -R "span[ptile=2]"
#BSUB -r
# envbuild VERSION: pt_cpu for cpu-x86_64, venv sha256:abababababababababababababababababababababababababababababababab, verified 2026-01-02T03:04:05Z; site lab
stop() { # message, exit code
    printf 'envbuild: %s\n' "$1" >&2
    exit "${2-6}"
}

set -euo pipefail

nodes=2 job=$LSB_JOBID
export ENVBUILD_RUN=/fsx/me/pt_cpu_$job
log=/fsx/me/logs/pt_cpu_$job.out
mkdir -p "$ENVBUILD_RUN" /fsx/me/logs
cd /fsx/me
# LSF may show its own file of output only when the job has ended.
echo "envbuild: the output goes to $log"
exec >>"$log" 2>&1
# LSF tells that it starts a job again (LSB_RESTART), not how often: count. Such a job meets under another name.
restarts=0
[ ! -s "$ENVBUILD_RUN/starts" ] || read -r restarts <"$ENVBUILD_RUN/starts"
echo $((restarts + 1)) >"$ENVBUILD_RUN/starts"
# SIGUSR2 tells all processes of a job that its time is up. By default it ends them: the script alone heeds it, below.
trap '' USR2

# Nodes by their numbers, of a line for each slot; the second tells by which interface the head reaches it.
mapfile -t hosts < <(awk 'NF && !seen[$1]++ { print $1 }' "$LSB_DJOB_HOSTFILE")
peer=${hosts[1]-}

# For every node: ddp_train.launch, in the artifact, reads it, finds the others and starts the training.
cat >"$ENVBUILD_RUN/settings-$restarts.sh" <<'SETTINGS'
# What every process is told.
export OMP_NUM_THREADS=2
# What ddp_train.launch is told.
ENVBUILD_JOB='{
  "name": "pt_cpu", "nodes": 2, "nproc_per_node": 2, "max_restarts": 3, "join_timeout_s": 900,
  "read_timeout_s": 300, "launcher": "ssh", "python": "/fsx/envs/pt/bin/python", "environment": "/fsx/envs/pt",
  "command": ["-m", "ddp_train", "10", "1"],
  "run_files": {"--checkpoint_path": "snapshot.pt", "--report": "report.json"}
}'
SETTINGS
cat >"$ENVBUILD_RUN/node-$restarts.sh" <<'NODE'
#!/bin/sh
# Starts ddp_train.launch on a node: sh node-RESTARTS.sh STEP SETTINGS [NUMBER].
set -eu
ENVBUILD_RUN=${0%/*}
restarts=${0##*-} restarts=${restarts%.sh}
name=${SLURMD_NODENAME:-$(uname -n)}

stop() {
    printf 'envbuild: node %s: %s\n' "$name" "$1" >&2
    exit 5
}
# The first node that fails leaves its exit code for the job's script.
trap 'set -- $?; [ "$1" -eq 0 ] || (set -C; echo "$1" >"$ENVBUILD_RUN/failed-$restarts") 2>/dev/null || true' EXIT

exec 3<&0 </dev/null
(
    exec >/dev/null 2>&1
    cat <&3
    kill -TERM $$
) &
exec 3<&-

# shellcheck disable=SC1090,SC1091
. "$ENVBUILD_RUN/settings-$restarts.sh"
# From the host where the job was submitted; it need not be here.
unset XDG_RUNTIME_DIR
exec /fsx/envs/pt/bin/python -I -X utf8 -m ddp_train.launch "$@"
NODE
# shellcheck disable=SC1090,SC1091
. "$ENVBUILD_RUN/settings-$restarts.sh"
# From the host where the job was submitted; it need not be here.
unset XDG_RUNTIME_DIR
launch=(sh "$ENVBUILD_RUN/node-$restarts.sh")
settings=$ENVBUILD_RUN/settings-$restarts.sh

alive=$(mktemp -u -p /tmp) # the scratch folder of nodes need not be here
mkfifo -m 600 "$alive"
trap 'rm -f "$alive"' EXIT

quoted() { printf "'%s' " "${@//\'/\'\\\'\'}"; }

# everywhere STEP: runs a step once on every node and becomes its launcher, so call it in a subshell.
everywhere() {
    local number pids=() left last code=0 signalled=
    exec 9<>"$alive"
    exec 8<"$alive"
    trap 'signalled=yes; exec 9>&-' TERM
    for number in "${!hosts[@]}"; do
        ssh -o BatchMode=yes -o ConnectTimeout=20 "${hosts[number]}" \
            "$(quoted "${launch[@]}" "$1" "$settings" "$number")" <&8 8<&- 9>&- &
        pids+=($!)
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
        left=$((left - 1))
        if [ "$last" -ne 0 ]; then
            [ "$code" -ne 0 ] || code=$last
            kill -TERM "${pids[@]}" 2>/dev/null || true
        fi
    done
    exit "$code"
}

[ "${#hosts[@]}" -eq "$nodes" ] ||
    stop "$nodes nodes were asked for, and there are ${#hosts[@]}: ${hosts[*]-}" 5
[ -z "$peer" ] || peer=$(getent ahosts "$peer" | awk '$1 !~ /^(127\.|::1$)/ { print $1; exit }') || peer=
printf '%s\n' "$peer" "${hosts[@]}" >"$ENVBUILD_RUN/hosts-$restarts"
rm -f "$ENVBUILD_RUN/at-$restarts".* "$ENVBUILD_RUN/failed-$restarts"

everywhere training &
launched=$!
# Time is up, or the job is cancelled: torchrun ends its workers in order.
trap 'kill -TERM "$launched" 2>/dev/null || true' INT TERM USR1 USR2
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
