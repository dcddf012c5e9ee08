"""The first step on every node: find its number, name, address and interface on the host.

Addresses do not come from host names: Debian's /etc/hosts maps this host's name to 127.0.1.1, and a name may be
unknown on other nodes. The interface is the site's, or else that of the route to the head node.

Source: ip-address(8), ip-route(8); without ip, proc(5): /proc/net/route and /proc/net/fib_trie.
"""

from __future__ import annotations

from envbuild.jobs.model import JobPlan, Launcher
from envbuild.jobs.node_program import beginning
from envbuild.jobs.quote import word

_ADDRESSES = r"""# The interface that has an address.
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

"""

_STEP = r"""find_address "$extra"
if [ "$step" = head ]; then
    echo "$address $interface"
    exit
fi
port=0
[ "$number" -ne 0 ] || free_port "$4"
row=$ENVBUILD_RUN/at-$restarts.$number
echo "$name $address $interface $port" >"$row.new"
mv "$row.new" "$row"
"""

# Remove the container that a run before a requeue left.
_TIDY = r"""sh "$ENVBUILD_RUN/tidy-$restarts.sh" now
"""


def find_program(plan: JobPlan, launcher: Launcher) -> str:
    """Return the text of find-RESTARTS.sh.

    `sh find-0.sh nodes NUMBER TARGET FIRST_PORT` writes a node's row into the file `at-RESTARTS.NUMBER` beside
    itself; `head` only prints address and interface. TARGET is the host that the address must reach.
    """
    interface = plan.site.fabric.interface.split(",")[0]
    # NCCL's syntax: ^ excludes interfaces, = requires an exact name.
    wanted = "" if interface.startswith("^") else interface.removeprefix("=")
    known = f"nodes={plan.nodes}\nwanted_interface={word(wanted, '[fabric] interface')}\n\n"
    what = "Where node NUMBER is (STEP nodes), or its address and interface, printed (STEP head)."
    begin = beginning(plan, launcher, "find-RESTARTS.sh", "TARGET FIRST_PORT", what)
    return begin + known + _ADDRESSES + _STEP + (_TIDY if plan.runtime == "pyxis" else "")
