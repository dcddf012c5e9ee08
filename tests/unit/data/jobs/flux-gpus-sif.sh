#!/bin/bash
#flux: --job-name=pt_cpu
#flux: --nodes=2
#flux: --nslots=2
#flux: --cores-per-slot=96
#flux: --gpus-per-slot=4
#flux: --queue=pbatch
#flux: --setattr=bank=p1
#flux: --requires=rack1
#flux: --time-limit=1591m
#flux: --cwd=/fsx/me
#flux: --output=/fsx/me/logs/pt_cpu_{{id.dec}}.out
#flux: --exclusive
#flux: --urgency=20
# envbuild VERSION: gh200 for cu126-aarch64, apptainer sha256:abababababababababababababababababababababababababababababababab, verified 2026-01-02T03:04:05Z; site lab
stop() { # message, exit code
    printf 'envbuild: %s\n' "$1" >&2
    exit "${2-6}"
}

# Exactly these modules.
set +eu
# shellcheck disable=SC1090,SC1091
. /etc/profile.d/lmod.sh
type module >/dev/null 2>&1 || stop 'there is no module command; say [modules] init of the site'
module purge
module load python/3.11.7 || stop 'module python/3.11.7 cannot be loaded; change [modules] of the site'
module load cuda/12.6 || stop 'module cuda/12.6 cannot be loaded; change [modules] of the site'
set -eu
set -euo pipefail

# A batch script has no FLUX_JOB_ID. The number in decimal, for names of files.
job=$(flux job id "$(flux getattr jobid)")
nodes=2
restarts=0 # Flux does not start a job again
export ENVBUILD_RUN=/fsx/me/pt_cpu_$job
log=/fsx/me/logs/pt_cpu_$job.out
mkdir -p "$ENVBUILD_RUN"
cd /fsx/me

# Nodes by their numbers; the second tells by which interface the head reaches it.
mapfile -t hosts < <(flux hostlist --expand --delimiter='\n' instance)
peer=${hosts[1]-}

# For every node: ddp_train.launch, in the artifact, reads it, finds the others and starts the training.
cat >"$ENVBUILD_RUN/settings-$restarts.sh" <<'SETTINGS'
# What every process is told.
export ENVBUILD_DEVICES='/dev/cxi*'
export OMP_NUM_THREADS=2
# What ddp_train.launch is told.
ENVBUILD_JOB='{
  "name": "pt_cpu", "nodes": 2, "nproc_per_node": 4, "max_restarts": 3, "join_timeout_s": 900,
  "read_timeout_s": 300, "launcher": "flux", "number": ["FLUX_TASK_RANK"], "signalled": true, "exit_codes": true,
  "gpu": true, "check": ["--arch", "aarch64", "--gpus", "4", "--provider", "cxi"],
  "python": "/opt/env/bin/python", "command": ["-m", "ddp_train", "10", "1"],
  "run_files": {"--checkpoint_path": "snapshot.pt", "--report": "report.json"}
}'
SETTINGS
# shellcheck disable=SC1090,SC1091
. "$ENVBUILD_RUN/settings-$restarts.sh"
# From the host where the job was submitted; it need not be here.
unset XDG_RUNTIME_DIR
launch=(
    apptainer exec --no-home --nv
    --bind /fsx:/fsx
    /fsx/pt.sif
    /opt/env/bin/python -I -X utf8 -m ddp_train.launch
)
settings=/fsx/me/${ENVBUILD_RUN##*/}/settings-$restarts.sh

# everywhere STEP: runs a step once on every node and becomes its launcher, so call it in a subshell.
everywhere() {
    # This instance of Flux has the nodes of this job alone; a task has all of its node.
    local options=(--nodes=2 --ntasks=2 --exclusive --setopt=exit-on-error)
    options+=(--setopt=cpu-affinity=off --setopt=gpu-affinity=off --setopt=pmi=off)
    exec flux run "${options[@]}" "${launch[@]}" "$1" "$settings" </dev/null
}

[ "${#hosts[@]}" -eq "$nodes" ] ||
    stop "$nodes nodes were asked for, and there are ${#hosts[@]}: ${hosts[*]-}" 5
[ -z "$peer" ] || peer=$(getent ahosts "$peer" | awk '$1 !~ /^(127\.|::1$)/ { print $1; exit }') || peer=
printf '%s\n' "$peer" "${hosts[@]}" >"$ENVBUILD_RUN/hosts-$restarts"
rm -f "$ENVBUILD_RUN/at-$restarts".* "$ENVBUILD_RUN/failed-$restarts"

(everywhere preflight) || stop 'preflight: this job would fail, see above; nothing was trained' 5

everywhere training &
launched=$!
# Time is up, or the job is cancelled: torchrun ends its workers in order.
# Flux signals every process of a task, also squashfuse, which holds a container's image: the signal is 23, SIGURG,
# which only ddp_train.launch heeds.
trap ': >"$ENVBUILD_RUN/told-$restarts" || true; flux job killall --force --signal=23 2>/dev/null || true' TERM USR1
# Ends the training before the time limit: the scheduler then signals what serves a container's files, too.
(
    trap 'kill "$!"; exit' TERM
    sleep $((95281 > SECONDS ? 95281 - SECONDS : 0)) &
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
# Nodes that were asked to stop wrote their codes: an error would have made flux kill the others.
[ "$code" -ne 0 ] || code=$(cat "$ENVBUILD_RUN/ended-$restarts".* 2>/dev/null | sort -n | tail -n 1) || code=0
[ "$code" -eq 0 ] || stop "the job failed with exit code $code: envbuild diagnose $log $ENVBUILD_RUN" "$code"
