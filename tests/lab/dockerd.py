"""A real dockerd for tests, beside any other, that leaves nothing behind when it stops.

It runs under a shell that is the first process of its own PID and mount namespaces: when the shell ends, so do
containerd, the containers and every mount they made. The shell ends when its standard input closes, so also when
the test process is killed; before, it takes away the bridge, the firewall rules and the cgroups.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

TOOLS = ("dockerd", "containerd", "runc", "iptables", "ip", "unshare", "flock")
START_SECONDS = 90
STOP_SECONDS = 60

# $1: folder of the data, $2: short folder for sockets and run-time files (an AF_UNIX path has 108 bytes at most).
# The bridge's number is also the third byte of its subnet; creating the bridge claims it. The daemon's own
# firewall rules are off, because it never removes them: containers reach out through the three made here.
# Several labs share /run/docker and forwarding: the first sets them up and the last puts them back, under a lock.
_SUPERVISOR = r"""
[ $$ = 1 ] || exit 1  # 'kill -1' below is meant for a namespace of our own
exec 3<&0 4</run
forward=/proc/sys/net/ipv4/ip_forward
shared=/run/dlab.shared

rules() {
    iptables -w -t nat "$1" POSTROUTING -s $subnet.0/24 ! -d $subnet.0/24 -j MASQUERADE
    iptables -w "$1" FORWARD -s $subnet.0/24 -j ACCEPT
    iptables -w "$1" FORWARD -d $subnet.0/24 -j ACCEPT
}

clean() {
    kill -KILL -1 2>/dev/null
    flock 4
    rules -D
    # Networks that a test made: their bridges are named in the daemon's own records.
    for other in $(grep -aoh 'br-[0-9a-f]\{12\}' "$1/data/network/files/local-kv.db" | sort -u); do
        ip link delete "$other"
    done 2>/dev/null
    ip link delete $bridge
    for attempt in 1 2 3 4 5 6 7 8 9 10; do  # killed processes are in their cgroup a little longer
        find /sys/fs/cgroup -depth -type d \( -name $bridge -o -path "*/$bridge/*" \) -exec rmdir {} + 2>/dev/null
        [ -z "$(find /sys/fs/cgroup -type d -name $bridge)" ] && break
        sleep 0.2
    done
    if ! ls -d /sys/class/net/dlab* >/dev/null 2>&1; then
        [ -e $shared/forward ] && echo 0 >$forward
        for name in containerd docker; do
            [ -e $shared/$name ] && umount /run/$name && rmdir /run/$name
        done
        rm -rf $shared
    fi
    umount --recursive --lazy "$1/data"
    umount --recursive --lazy "$2"
    rm -rf "$2" "$1/data"
}

flock 4
# From a number of its own, so that a lab which starts does not take up the name of one that just stopped.
tries=0 number=$(printf %s "$2" | cksum | cut -d' ' -f1)
until
    tries=$((tries + 1)) number=$(((number + 1) % 254)) subnet=10.213.$number bridge=dlab$number
    [ -z "$(ip -4 route show root $subnet.0/24 table all)" ] && ip link add $bridge type bridge 2>/dev/null
do
    [ $tries -lt 254 ] || { echo "no bridge could be made, dlab0 to dlab253"; exit 1; }
done
trap 'clean "$@"' EXIT
mkdir -p $shared "$1/data"
[ "$(cat $forward)" = 1 ] || { : >$shared/forward; echo 1 >$forward; }
ip address add $subnet.1/25 dev $bridge && ip link set $bridge up && rules -I || exit 1
mount --bind "$1/data" "$1/data" && mount --bind "$2" "$2" || exit 1  # so that one umount takes all below
# A system's containerd, if there is one, would make the containers outside these namespaces.
for name in containerd docker; do
    mkdir /run/$name 2>/dev/null && : >$shared/$name
    mount -t tmpfs -o mode=0755 tmpfs /run/$name || exit 1
done
flock -u 4

mkdir -p "$2/try" "$1/data/try/lower" "$1/data/try/upper" "$1/data/try/work"
cd "$1/data/try" && driver=vfs
mount -t overlay -o lowerdir=lower,upperdir=upper,workdir=work overlay "$2/try" && umount "$2/try" && driver=overlay2
cd / && rm -rf "$1/data/try" "$2/try"

echo '{}' >"$2/daemon.json"
dockerd --config-file "$2/daemon.json" --data-root "$1/data" --exec-root "$2/exec" --pidfile "$2/pid" \
    --host "unix://$2/docker.sock" --group 0 --storage-driver $driver \
    --bridge $bridge --default-address-pool "base=$subnet.128/25,size=28" \
    --iptables=false --ip6tables=false --ip-masq=false --ip-forward=false \
    --cgroup-parent /$bridge --exec-opt native.cgroupdriver=cgroupfs 3<&- 4<&- &
daemon=$!
# Until the tests end, or die. Nothing of the daemon's is kept, so there is no reason to let it down gently.
{ cat <&3 >/dev/null; kill -KILL $daemon; } 4<&- &
exec 3<&-
wait $daemon
"""


@dataclass(frozen=True)
class Lab:
    """A running dockerd."""

    socket: Path
    log: Path
    pid: int
    """Process id of the supervisor; all others are its descendants."""

    def environment(self) -> dict[str, str]:
        """Variables that point docker's command line, its SDK and envbuild at this daemon."""
        return {"DOCKER_HOST": f"unix://{self.socket}"}


def missing() -> str | None:
    """Why dockerd cannot run here; None when it can."""
    if os.geteuid() != 0:
        return "dockerd needs root"
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    return f"not installed: {', '.join(absent)} (Debian: docker.io, iptables)" if absent else None


@contextmanager
def dockerd(folder: Path, *, wait: bool = True) -> Iterator[Lab]:
    """Start dockerd with its data in `folder` (made when missing); at the end, stop it with all its containers.

    Removing gigabytes of images may take half a minute: without `wait`, the supervisor goes on with it alone.

    Registries on 127.0.0.0/8 are reached in the host's network, without TLS. Raises RuntimeError with the end of
    the log when the daemon does not come up.
    """
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    # A long path is no place for sockets.
    run = Path(tempfile.mkdtemp(prefix="dlab-", dir="/run"))
    log = folder / "dockerd.log"
    command = ["unshare", "--mount", "--propagation", "slave", "--pid", "--fork"]
    command += ["--kill-child", "--mount-proc"]
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*command, "sh", "-c", _SUPERVISOR, "dockerd-lab", folder, run],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            # A Ctrl-C is for the tests; they stop the daemon.
            start_new_session=True,
        )
    assert process.stdin is not None
    try:
        _wait(process, run / "docker.sock", log)
        yield Lab(run / "docker.sock", log, process.pid)
    finally:
        process.stdin.close()
        if wait:
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(process: subprocess.Popen[bytes], path: Path, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not _answers(path):
        if process.poll() is not None or time.monotonic() > deadline:
            end = log.read_text(errors="replace")[-3000:]
            raise RuntimeError(f"dockerd did not come up; its log ends with:\n{end}")
        time.sleep(0.1)


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(5)
        try:
            connection.connect(str(path))
            connection.sendall(b"GET /_ping HTTP/1.0\r\nHost: docker\r\n\r\n")
            return b" 200 " in connection.recv(64)
        except OSError:
            return False
