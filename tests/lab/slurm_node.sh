#!/usr/bin/env bash
# What the namespaces of tests/lab/slurm.py run as their first process. The cluster's folder is /run/lab in all of them,
# so that no path in a configuration file depends on where the tests lie.
set -eu

isolated=(unshare --net --uts --mount --ipc --pid --fork --kill-child --mount-proc --propagation slave)

files() { # of this host, over those of the machine
    hostname "$1"
    ip link set lo up
    mount --bind "/run/lab/hosts/$1" /etc/hosts
    mount --bind /run/lab/nsswitch.conf /etc/nsswitch.conf
    mount --bind /run/lab/slurm /etc/slurm
    mount --bind /run/lab/ssh /etc/ssh
    # A root account that is locked may not log in, with a key neither.
    mount --bind /run/lab/shadow /etc/shadow
    for file in passwd group subuid subgid; do
        [ ! -e "/run/lab/users/$file" ] || mount --bind "/run/lab/users/$file" "/etc/$file"
    done
    [ ! -e /etc/lmod/modulespath ] || mount --bind /run/lab/modulespath /etc/lmod/modulespath
    # The machine's user may start programs at each login; one that a test killed may let all later ones wait.
    for file in .bashrc .bash_profile .bash_login .profile; do
        [ ! -e "$HOME/$file" ] || mount --bind /dev/null "$HOME/$file"
    done
}

bridge() { # its number, its address
    ip link add "lab$1" type bridge
    ip address add "$2/24" dev "lab$1"
    ip link set "lab$1" up
}

# The host where users log in and slurmctld runs. All ends when its standard input does.
control() { # the cluster's folder
    mount -t tmpfs -o mode=0755 tmpfs /run
    mkdir /run/lab /run/munge /run/node
    mount --bind "$1" /run/lab
    files ctl
    bridge 0 10.89.7.1
    bridge 1 10.89.8.1
    munged --force --key-file=/run/lab/munge.key --pid-file=/run/munge/pid --seed-file=/run/munge/seed \
        --log-file=/run/lab/log/munged --socket=/run/munge/socket
    slurmctld -D >/run/lab/log/slurmctld 2>&1 </dev/null &
    cat >/dev/null
}

# One end of a cable in the bridge, the other in the namespace of process $3.
cable() { # bridge, last byte of the node's address, process
    ip link delete "v$1-$2" 2>/dev/null || true
    ip link add "v$1-$2" type veth peer name "eth$1" netns "$3"
    ip link set "v$1-$2" master "lab$1" up
}

# In the control namespace: begin a node. This process becomes the parent of the node's first one.
start() { # name, last byte of the address, number of networks
    (
        until [ "$(readlink "/proc/$$/ns/net")" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.02; done
        for ((network = 0; network < $3; network++)); do cable $network "$2" $$; done
    ) &
    exec "${isolated[@]}" bash /run/lab/node.sh node "$@"
}

node() { # as start
    mount -t tmpfs -o mode=0755 tmpfs /run/node
    cd /run/node
    mkdir cgroup lab lock munge sshd slurmd tmp
    mount --rbind /run/lab lab
    mount --rbind /run/munge munge
    # Its own /tmp, but for the folders that the cluster shares.
    chmod 1777 tmp
    while IFS= read -r shared; do
        mkdir "tmp/$shared"
        mount --rbind "/tmp/$shared" "tmp/$shared"
    done </run/lab/shared-tmp
    # A sysfs shows the network devices of the namespace that mounted it.
    if [ -d /sys/fs/cgroup ]; then mount --rbind /sys/fs/cgroup cgroup; fi
    mount -t sysfs sysfs /sys
    if [ -d /sys/fs/cgroup ]; then mount --rbind cgroup /sys/fs/cgroup; fi
    if [ -d /run/lab/users ]; then
        # What rootless containers need, and this machine may lack: unified cgroups, message queues, FUSE for all users.
        mount -t cgroup2 cgroup2 /sys/fs/cgroup
        mkdir -p /dev/mqueue
        mount -t mqueue mqueue /dev/mqueue
        mknod -m 666 /run/node/fuse c 10 229
        mount --bind /run/node/fuse /dev/fuse
    fi
    mount -t tmpfs -o mode=1777 shm /dev/shm
    mount --rbind tmp /tmp
    mount --rbind /run/node /run
    cd /
    files "$1"
    for ((network = 0; network < $3; network++)); do
        until [ -e "/sys/class/net/eth$network" ]; do sleep 0.02; done
        ip address add "10.89.$((7 + network)).$2/24" dev "eth$network"
        ip link set "eth$network" up
    done
    /usr/sbin/sshd -D -e 2>/run/lab/log/sshd."$1" </dev/null &
    slurmd -D -N "$1" >/run/lab/log/slurmd."$1" 2>&1 </dev/null &
    sleep infinity
}

"$@"
