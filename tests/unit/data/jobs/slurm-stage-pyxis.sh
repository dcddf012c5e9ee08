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
  "check": ["--arch", "x86_64"], "python": "/opt/env/bin/python", "command": ["-m", "ddp_train", "10", "1"],
  "run_files": {"--checkpoint_path": "snapshot.pt", "--report": "report.json"}
}'
SETTINGS
cat >"$ENVBUILD_RUN/tidy-$restarts.sh" <<'TIDY'
#!/bin/sh
# Removes containers from a node, those of this user's jobs alone, by their names: envbuild-CLUSTER-UID-JOB-RESTARTS.
# own: this job's. earlier: those of its runs before a requeue, and of jobs that have ended. Without an argument, as the
# epilog of a step: this job's, if it was cancelled or requeued, because no step can start then.
prefix="envbuild-${SLURM_CLUSTER_NAME-}-$(id -u)-"
restarts=${0##*-} restarts=${restarts%.sh} limit=60
[ "${1-}" = earlier ] || trap '' TERM
[ $# -gt 0 ] || case $(squeue --noheader --format=%T --jobs="$SLURM_JOB_ID") in RUNNING) exit 0 ;; esac
if ! command -v enroot >/dev/null; then
    echo "envbuild: node $SLURMD_NODENAME: cannot remove containers of jobs: there is no enroot; add it to PATH" >&2
    exit 0
fi
names=$(enroot list) # before squeue is asked: a job that starts now is in neither list, or in both
if [ "${1-}" = earlier ]; then
    limit=3600 ended='^(BOOT_FAIL|CANCELLED|COMPLETED|DEADLINE|FAILED|NODE_FAIL|OUT_OF_MEMORY|PREEMPTED|TIMEOUT)$'
    live=$(squeue --noheader --states=all --user="$(id -u)" --format='%A %T' | awk -v e="$ended" '$2 !~ e { print $1 }')
    live=" $(echo "$live" | tr '\n' ' ')"
    case $live in *" $SLURM_JOB_ID "*) ;; *) exit 0 ;; esac # else squeue did not answer
fi
echo "$names" | while read -r name; do
    rest=${name##*"$prefix"}
    job=${rest%%-*} run=${rest#*-}
    run=${run%%-*}
    case $job$run in *[!0-9]*) continue ;; esac
    case $rest in [0-9]*-[0-9]*) ;; *) continue ;; esac
    # pyxis_NAME, or pyxis_JOB_NAME where the site says container_scope=job; enroot alone takes the name as it is.
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
TIDY
# shellcheck disable=SC1090,SC1091
. "$ENVBUILD_RUN/settings-$restarts.sh"
# From the host where the job was submitted; it need not be here.
unset XDG_RUNTIME_DIR
image=/local/nvme/envbuild-"$(id -u)"/"${ENVBUILD_RUN##*/}-$restarts".sqsh
launch=(/opt/env/bin/python -I -X utf8 -m ddp_train.launch)
settings=/fsx/me/${ENVBUILD_RUN##*/}/settings-$restarts.sh

# shellcheck disable=SC2054 # the commas are for pyxis
container=(
    --container-image="$image"
    --container-name="envbuild-${SLURM_CLUSTER_NAME-}-$(id -u)-$job-$restarts"
    --container-mounts=/fsx:/fsx
    --container-env=SLURM_NODEID,SLURMD_NODENAME,CUDA_VISIBLE_DEVICES
    --no-container-mount-home
    --no-container-entrypoint
)

# everywhere STEP: runs a step once on every node and becomes its launcher, so call it in a subshell.
everywhere() {
    # A step has all CPUs of the job, unless it names a number: that means these alone.
    local options=(--nodes=2 --ntasks=2 --ntasks-per-node=1 --kill-on-bad-exit=1)
    options+=(--cpu-bind=none --mpi=none --export=ALL)
    case $1 in own | earlier) # beside any other step
        exec srun "${options[@]}" --overlap sh "$ENVBUILD_RUN/tidy-$restarts.sh" "$1" </dev/null
        ;;
    esac
    options+=("${container[@]}" --task-epilog="$ENVBUILD_RUN/tidy-$restarts.sh")
    exec srun "${options[@]}" "${launch[@]}" "$1" "$settings" </dev/null
}
chmod +x "$ENVBUILD_RUN/tidy-$restarts.sh"
# Removes the containers, however this script ends, within a minute: a later job of this user removes the rest. In a job
# that was cancelled, the epilogs of its steps do that, for five seconds.
trap '(SLURM_IMMEDIATE=60 everywhere own) >/dev/null 2>&1 || true' EXIT
# Beside the training: those of a run before a requeue, and of this user's jobs that have ended.
(everywhere earlier) &

[ "${#hosts[@]}" -eq "$nodes" ] ||
    stop "$nodes nodes were asked for, and there are ${#hosts[@]}: ${hosts[*]-}" 5
[ -z "$peer" ] || peer=$(getent ahosts "$peer" | awk '$1 !~ /^(127\.|::1$)/ { print $1; exit }') || peer=
printf '%s\n' "$peer" "${hosts[@]}" >"$ENVBUILD_RUN/hosts-$restarts"
rm -f "$ENVBUILD_RUN/at-$restarts".* "$ENVBUILD_RUN/failed-$restarts"

# Brings the image to every node's own disk: node 0 reads the shared one, the nodes pass it on to each other, and
# what is there of an earlier one is copied. The program, for the nodes' own python3, is a zip file in base64. Read it
# in the folder ddp_train/stage of envbuild VERSION, which is in site-packages of the image, too.
# sha256 of the decoded file: SHA256
base64 -d >"$ENVBUILD_RUN/stage-$restarts.zip" <<'STAGE'
UEsD
STAGE
rm -f "$ENVBUILD_RUN/stage-$restarts".[0-9]*
(umask 077 && head -c 32 /dev/urandom >"$ENVBUILD_RUN/stage-$restarts.key")
# shellcheck disable=SC2030,SC2031 # its values are for this step alone
if ! (
    launch=(
        python3 -I -B "$ENVBUILD_RUN/stage-$restarts.zip"
        '{"source": "/fsx/pt.sqsh", "folder": "/local/nvme", "keep": 100000000000, "number": ["SLURM_NODEID"], "interface": ""}'
    )
    container=()
    settings=$ENVBUILD_RUN/settings-$restarts.sh
    everywhere stage
); then
    printf 'envbuild: %s\n' 'the image is not on every node, see above: all read the shared one' >&2
    rm -f "$ENVBUILD_RUN/stage-$restarts".[0-9]*
    container=("${container[@]/"$image"//fsx/pt.sqsh}")
fi

(everywhere preflight) || stop 'preflight: this job would fail, see above; nothing was trained' 5

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
