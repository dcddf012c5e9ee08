#!/bin/bash
#BSUB -J pt_cpu
#BSUB -n 88
#BSUB -W 1591
#BSUB -q gpu
#BSUB -P p1
#BSUB -cwd /fsx/me
#BSUB -o /fsx/me/logs/pt_cpu.lsf
#BSUB -R "select[hname!=n7]"
#BSUB -R "span[ptile=44]"
#BSUB -R "rusage[mem=480M/host]"
#BSUB -gpu "num=4/host"
#BSUB -x
#BSUB -rn
#BSUB -alloc_flags smt4
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

nodes=2 job=$LSB_JOBID job_number=$LSB_JOBID
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

# What every node reads and runs, in the folder of this run.

cat >"$ENVBUILD_RUN/settings-$restarts.sh" <<'SETTINGS'
# What this job is told; ENVBUILD_RUN is its own folder.
export OMP_NUM_THREADS=2
set -- -m ddp_train 10 1 \
    --checkpoint_path "$ENVBUILD_RUN"/snapshot.pt \
    --report "$ENVBUILD_RUN"/report.json
SETTINGS

cat >"$ENVBUILD_RUN/find-$restarts.sh" <<'FIND'
#!/bin/sh
# Where node NUMBER is (STEP nodes), or its address and interface, printed (STEP head).
# sh find-RESTARTS.sh STEP NUMBER [TARGET FIRST_PORT]; a NUMBER of - is found out.
set -eu
step=$1 number=$2 extra=${3-}
ENVBUILD_RUN=${0%/*}
restarts=${0##*-} restarts=${restarts%.sh}
name=${SLURMD_NODENAME:-$(uname -n)}

stop() {
    printf 'envbuild: node %s: %s\n' "$name" "$1" >&2
    exit 1
}

case $number in
*[!0-9]* | '') stop "blaunch does not tell the number of this node" ;;
esac

nodes=2
wanted_interface=''

# The interface that has an address.
interface_of() {
    ip -o addr show | awk -v address="$1" '{ split($4, part, "/") } part[1] == address { print $2; exit }'
}

# An interface's address, IPv4 before IPv6.
address_of() {
    ip -o addr show dev "$1" scope global 2>/dev/null | awk '
        { split($4, part, "/") }
        $3 == "inet" && !four { four = part[1] }
        $3 == "inet6" && !six { six = part[1] }
        END { print four ? four : six }'
}

# Interfaces that can reach other nodes.
interfaces() {
    ip -o addr show scope global | awk '$2 !~ /^(lo|docker|br-|virbr|cni|flannel|podman)/ && !seen[$2]++ { print $2 }'
}

# The address from which this node reaches another one, or the world.
source_of() {
    ip -o route get "$1" 2>/dev/null | sed -n 's/.* src \([^ ]*\).*/\1/p'
}

# The same without ip, from /proc/net, for IPv4: "address interface". Numbers there have their bytes reversed.
number_of() {
    IFS=. read -r a b c d <<ADDRESS
$1
ADDRESS
    echo $((d << 24 | c << 16 | b << 8 | a))
}

from_proc() {
    case $1 in *:*) return ;; esac
    wanted=$(number_of "$1") device=$wanted_interface best=-1
    own=$(awk '/32 host LOCAL/ && last !~ /^127\./ && !seen[last]++ { print last } { last = $2 }' /proc/net/fib_trie)
    while read -r interface to _ flags _ _ _ mask _; do
        case $flags$wanted_interface in *[!0-9A-F]* | '') continue ;; esac # the head line, or the site says which
        if [ $((wanted & 0x$mask)) -eq $((0x$to)) ] && [ $((0x$mask)) -gt "$best" ]; then
            best=$((0x$mask)) device=$interface
        fi
    done </proc/net/route
    for address in $own; do
        while read -r interface to gateway flags _ _ _ mask _; do
            [ "$interface $gateway" = "$device 00000000" ] || continue
            if [ $(($(number_of "$address") & 0x$mask)) -eq $((0x$to)) ]; then
                echo "$address $device"
                return
            fi
        done </proc/net/route
    done
}

# Sets address and interface: those of the site's interface, else those of the route to $1, else of the first that
# has an address. A name is never asked for: /etc/hosts may call this node 127.0.1.1.
find_address() {
    target=$1 address='' interface=''
    case $target in
    '' | *:*) ;;
    *[!0-9.]*) target=$(getent ahosts "$target" | awk '$1 !~ /^(127\.|::1$)/ { print $1; exit }') || target='' ;;
    esac
    case $target in 127.* | ::1) target='' ;; esac
    if ! command -v ip >/dev/null; then
        found=$(from_proc "${target:-198.51.100.1}")
        address=${found%% *} interface=${found#* }
    elif [ -n "$wanted_interface" ]; then
        interface=$(ip -o link show | awk -F ': ' -v wanted="$wanted_interface" '
            { sub("@.*", "", $2) }
            $2 == wanted { exact = $2 }
            index($2, wanted) == 1 && !prefix { prefix = $2 }
            END { print exact ? exact : prefix }')
        [ -n "$interface" ] ||
            stop "no interface $wanted_interface, but $(interfaces | xargs); change [fabric] interface of the site"
        address=$(address_of "$interface")
        [ -n "$address" ] || stop "interface $interface has no address; change [fabric] interface of the site"
    else
        [ -z "$target" ] || address=$(source_of "$target")
        [ -n "$address" ] || address=$(source_of 198.51.100.1)
        if [ -z "$address" ]; then
            interface=$(interfaces | head -n 1)
            [ -z "$interface" ] || address=$(address_of "$interface")
        fi
        [ -z "$address" ] || interface=$(interface_of "$address")
    fi
    if [ -z "$address" ] && [ "$nodes" -eq 1 ]; then
        address=127.0.0.1 interface=lo
    fi
    case $address in
    '') stop "no address at which other nodes reach this one; say [fabric] interface of the site" ;;
    127.* | ::1)
        [ "$nodes" -eq 1 ] || stop "other nodes do not reach this one at $address; say [fabric] interface of the site"
        ;;
    esac
}

in_use() {
    cat /proc/net/tcp /proc/net/tcp6 2>/dev/null | awk -v port="$(printf ':%04X' "$1")" '
        $4 == "0A" && substr($2, length($2) - 4) == port { found = 1 }
        END { exit !found }'
}

# A port that nothing listens on: this job's own, else another. Each job looks in steps of its own: of two that start
# at one time, both may find a port free before either has it.
free_port() {
    port=$1 stride=$((1013 + 2 * ($1 % 1000))) tried=0
    while in_use "$port"; do
        tried=$((tried + 1)) port=$((20000 + (port - 20000 + stride) % 10000))
        [ "$tried" -lt 100 ] || stop "no free port after $1"
    done
}

find_address "$extra"
if [ "$step" = head ]; then
    echo "$address $interface"
    exit
fi
port=0
[ "$number" -ne 0 ] || free_port "$4"
row=$ENVBUILD_RUN/at-$restarts.$number
echo "$name $address $interface $port" >"$row.new"
mv "$row.new" "$row"
FIND

cat >"$ENVBUILD_RUN/node-$restarts.sh" <<'NODE'
#!/bin/sh
# STEP, preflight or training, on node NUMBER.
# sh node-RESTARTS.sh STEP NUMBER [inside]; a NUMBER of - is found out.
set -eu
step=$1 number=$2 extra=${3-}
ENVBUILD_RUN=${0%/*}
restarts=${0##*-} restarts=${restarts%.sh}
name=${SLURMD_NODENAME:-$(uname -n)}

stop() {
    printf 'envbuild: node %s: %s\n' "$name" "$1" >&2
    exit 1
}

case $number in
*[!0-9]* | '') stop "blaunch does not tell the number of this node" ;;
esac

# The table of nodes: who is where.
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
[ "$extra" = inside ] || [ "${here%%.*}" = "${name%%.*}" ] ||
    stop "blaunch calls this node number $number, and that was $here before"

# From the host where the job was submitted, or of another environment than the verified one.
unset XDG_RUNTIME_DIR PYTHONHOME PYTHONPATH
# pyxis and enroot's hook set these where the image has PYTORCH_VERSION: no rank has been started yet.
unset RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT
# What every process is told; it asks nobody again.
export ENVBUILD_NODE="$number" ENVBUILD_NODES=2 ENVBUILD_HOSTS ENVBUILD_ADDRESSES ENVBUILD_ADDRESS
export ENVBUILD_INTERFACE ENVBUILD_PORT ENVBUILD_RUN ENVBUILD_RUN_ID
export GLOO_SOCKET_IFNAME="$ENVBUILD_INTERFACE" NCCL_SOCKET_IFNAME="$ENVBUILD_INTERFACE"
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 PYTHONUNBUFFERED=1 PYTHONNOUSERSITE=1 LOGLEVEL=INFO
# shellcheck disable=SC1090,SC1091
. "$ENVBUILD_RUN/settings-$restarts.sh"
cd "${ENVBUILD_RUN%/*}"

if [ "$extra" != inside ]; then
    set +eu
    # shellcheck disable=SC1090,SC1091
    . /etc/profile.d/lmod.sh
    type module >/dev/null 2>&1 || stop 'there is no module command; say [modules] init of the site'
    module purge
    module load python/3.11.7 || stop 'module python/3.11.7 cannot be loaded; change [modules] of the site'
    module load cuda/12.6 || stop 'module cuda/12.6 cannot be loaded; change [modules] of the site'
    set -eu
fi

if [ "$extra" != inside ]; then
    exec apptainer exec --no-home --nv \
        --bind /fsx:/fsx \
        /fsx/pt.sif \
        /bin/sh /fsx/me/"${ENVBUILD_RUN##*/}/node-$restarts.sh" "$step" "$number" inside
fi

case $step in
preflight) export ENVBUILD_DEVICES='/dev/cxi*' && set -- -m ddp_train.preflight --arch aarch64 --gpus 4 --provider cxi ;;
training)
    head=${ENVBUILD_ADDRESSES%% *}
    case $head in
    *:*) endpoint="[$head]:$ENVBUILD_PORT" ;;
    *) endpoint=$head:$ENVBUILD_PORT ;;
    esac
    set -- -m torch.distributed.run \
        --nnodes 2 --nproc-per-node 4 --max-restarts 3 \
        --rdzv-id "$ENVBUILD_RUN_ID" --rdzv-backend c10d --rdzv-endpoint "$endpoint" \
        --rdzv-conf "is_host=$((number == 0)),join_timeout=900,read_timeout=300" \
        --local-addr "$ENVBUILD_ADDRESS" "$@"
    ;;
esac
exec /opt/env/bin/python "$@"
NODE

# shellcheck disable=SC1090,SC1091
. "$ENVBUILD_RUN/settings-$restarts.sh"
# From the host where the job was submitted; it need not be here.
unset XDG_RUNTIME_DIR

# everywhere PROGRAM STEP [ARGUMENT…]: starts PROGRAM-RESTARTS.sh once on every node and becomes it, so call it in a
# subshell.
everywhere() {
    local number pids=() left last code=0 signalled=
    trap 'signalled=yes; kill -TERM "${pids[@]}" 2>/dev/null || true' TERM
    for number in "${!hosts[@]}"; do
        blaunch -no-shell "${hosts[number]}" \
            bash "$ENVBUILD_RUN/$1-$restarts.sh" "$2" "$number" "${@:3}" </dev/null &
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

# The first step: every node tells where it is.
head=$(sh "$ENVBUILD_RUN/find-$restarts.sh" head 0 "$peer") || exit 5
head=${head% *}
rm -f "$ENVBUILD_RUN/at-$restarts".*
(everywhere find nodes "$head" $((20000 + 10#$job_number % 10000))) || stop 'the first step failed, see above' 5
names=() addresses=() interfaces=()
for ((number = 0; number < nodes; number++)); do
    row=$ENVBUILD_RUN/at-$restarts.$number
    for ((wait = 0; wait < 20; wait++)); do
        [ ! -s "$row" ] || break
        sleep 1 # network file systems may be late
    done
    read -r name address interface port <"$row" ||
        stop "node $number left no word in $ENVBUILD_RUN, which must be on a file system that all nodes see" 5
    for host in "${hosts[@]}"; do
        [ "${host%%.*}" != "${name%%.*}" ] || name=$host
    done
    case " ${names[*]-} " in
    *" $name "*) stop "blaunch started two processes on node $name and none on another" 5 ;;
    esac
    names+=("$name") addresses+=("$address") interfaces+=("$interface")
    [ "$number" -gt 0 ] || ENVBUILD_PORT=$port
    echo "envbuild: node $number is $name, $address on $interface"
done
printf "%s='%s'\n" >"$ENVBUILD_RUN/nodes-$restarts.sh" \
    ENVBUILD_HOSTS "${names[*]}" ENVBUILD_ADDRESSES "${addresses[*]}" ENVBUILD_INTERFACES "${interfaces[*]}" \
    ENVBUILD_PORT "$ENVBUILD_PORT" ENVBUILD_RUN_ID pt_cpu"-$job-$restarts"

(everywhere node preflight) || stop 'preflight: this job would fail, see above; nothing was trained' 5

everywhere node training &
launched=$!
# Time is up, or the job is cancelled: torchrun ends its workers in order.
trap 'kill -TERM "$launched" 2>/dev/null || true' INT TERM USR1 USR2
while :; do
    code=0
    wait "$launched" || code=$?
    kill -0 "$launched" 2>/dev/null || break # else a signal ended the wait
done
[ "$code" -eq 0 ] || stop "the job failed with exit code $code; why: envbuild diagnose $log" "$code"
