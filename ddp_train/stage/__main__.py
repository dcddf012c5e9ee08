"""`python3 -I stage-RESTARTS.zip ABOUT STEP SETTINGS [NUMBER]`, once on every node of a job.

ABOUT is JSON: `source`, the shared file or environment; `manifest`, the SHA-256 of the environment's; `folder`, on
each node's disk; `keep`, the limit of images there, in bytes; `number`, the launcher's variables with this node's
number; `interface`, the network's, "" for the one by which node 0 reaches node 1. SETTINGS is a file in the run's
folder, which all nodes see; beside it are the nodes' names (hosts-RESTARTS) and the job's secret (stage-RESTARTS.key).

Afterwards the link FOLDER/envbuild-UID/RUN-RESTARTS, with the suffix of `source`, points to the image or to the
unpacked environment. A node that cannot get it prints the reason, and its link points to `source`. The exit code is 1
if the node cannot make the link.
"""

# ruff: noqa: UP032 - Python 3.6

import fcntl
import json
import os
import socket
import struct
import sys
import time
from contextlib import suppress
from functools import partial

from .disk import Folder, Lost
from .node import Node
from .tree import unpack

_SIOCGIFADDR = 0x8915  # netdevice(7)


def own_address(interface: str, peer: str) -> str:
    """Return this node's IPv4 address on `interface`, else its address on the route to `peer`. Raises OSError."""
    if interface:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
            return socket.inet_ntoa(answer[20:24])
    # Nothing is sent: udp(7). The documentation block leads to the default route.
    target = peer or "198.51.100.1"
    with socket.socket(socket.AF_INET6 if ":" in target else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((target, 9))
        return str(probe.getsockname()[0])


def main() -> int:
    """Stage the image on this node and serve its child nodes; return the exit code."""
    began, about, settings = time.time(), json.loads(sys.argv[1]), sys.argv[3]
    run, restarts = os.path.dirname(settings), settings.rpartition("-")[2].partition(".")[0]
    with open(os.path.join(run, "hosts-" + restarts)) as file:
        peer, *hosts = file.read().splitlines()
    given = [*sys.argv[4:], *(os.environ.get(name, "") for name in about["number"])]
    number = int(next(argument for argument in given if argument))
    files = os.path.join(run, "stage-" + restarts)
    manifest = about.get("manifest", "")
    kind = "environment" if manifest else "image"
    name = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
    path = os.path.join(about["folder"], "envbuild-{}".format(os.getuid()))
    link = "{}-{}{}".format(os.path.basename(run), restarts, os.path.splitext(about["source"])[1])
    with open(files + ".key", "rb") as secret:
        node = Node(number, len(hosts), files, Folder(path, about["keep"]), secret.read())
    code = 0
    try:
        node.folder.make()
        if number:
            node.receive()
        else:
            node.read(about["source"], manifest, own_address(about["interface"], peer))
        tree = partial(unpack, digest=manifest)
        key = node.copy.key
        node.folder.link(link, node.folder.tree(key, tree) if manifest else key + ".image")
        node.wait()
    except (OSError, Lost) as error:
        text = "envbuild: node {}: reads the {} from the shared file system: {}"
        print(text.format(name, kind, error), file=sys.stderr)
        node.counts["shared"].append([name, str(error)])
        node.say("!")  # so that nobody waits for this node
        try:
            node.folder.make()
            node.folder.link(link, about["source"])
        except (OSError, Lost):
            code = 1
    if number:
        with suppress(OSError, Lost):  # without any parent, this is not in node 0's summary
            node.report()
    else:
        print(_summary(kind, node, len(hosts), time.time() - began), file=sys.stderr)
    return code


def _summary(kind: str, node: Node, nodes: int, seconds: float) -> str:
    counts = node.counts
    read, network, disk = (counts[name] / 1e6 for name in ("file", "network", "disk"))
    return (
        "envbuild: the {} is on the disks of {} of {} nodes after {:.1f} s; {} had it; {:.0f} MB from the shared file "
        "system, {:.0f} MB from other nodes, {:.0f} MB from earlier {}s"
    ).format(kind, counts["nodes"] - len(counts["shared"]), nodes, seconds, counts["had"], read, network, disk, kind)


if __name__ == "__main__":
    try:
        code = main()
    except (OSError, Lost) as error:
        print("envbuild: node {}: no image is staged: {}".format(os.uname().nodename, error), file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads may still answer children that nobody waits for
