"""The files of the lab's Slurm cluster: its configuration, keys, host names."""

from __future__ import annotations

import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from lab.pbs import PLUGIN, write_pbs

SCRIPT = Path(__file__).parent / "slurm_node.sh"
REPOSITORY = Path(__file__).resolve().parents[2]
CONTROL = "10.89.7.1"
FIRST_USER = 60001

# The cluster's folder is /run/lab on every host, whatever its path outside is.
_SLURM = """\
ClusterName=lab
SlurmctldHost=ctl({control})
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=/run/munge/socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation=/run/lab/state
SlurmdSpoolDir=/run/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
SlurmctldTimeout=10
SlurmdTimeout=10
KillWait=5
SchedulerParameters=sched_min_interval=100000,batch_sched_delay=0
{nodes}PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

_SSHD = """\
HostKey /etc/ssh/host_key
AuthorizedKeysFile /etc/ssh/key.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin prohibit-password
SetEnv PATH={path}
"""

_SSH = """\
Host *
    IdentityFile /etc/ssh/key
    StrictHostKeyChecking no
    UserKnownHostsFile /dev/null
    LogLevel ERROR
"""


def write_files(
    folder: Path,
    addresses: Mapping[str, str],
    *,
    cpus: int,
    pbs: bool,
    path: str,
    share: Sequence[Path],
    plugins: str = "",
    users: Sequence[str] = (),
) -> None:
    """Write all that the hosts of a cluster with nodes of `addresses` read; `plugins` are lines of plugstack.conf.

    `users` get accounts from FIRST_USER on, with subordinate IDs.
    """
    shutil.rmtree(folder / "state", ignore_errors=True)  # another cluster's jobs
    for name in ("hosts", "log", "modules", "shared", "slurm", "ssh", "state"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    shutil.copyfile(SCRIPT, folder / "node.sh")
    (folder / "munge.key").unlink(missing_ok=True)
    (folder / "munge.key").write_bytes(secrets.token_bytes(128))
    (folder / "munge.key").chmod(0o400)
    _write_names(folder, addresses)
    nodes = "".join(
        f"NodeName={name} NodeAddr={address} CPUs={cpus} RealMemory=4000 State=UNKNOWN\n"
        for name, address in addresses.items()
    )
    configuration = _SLURM.format(control=CONTROL, nodes=nodes)
    (folder / "slurm/plugstack.conf").write_text(plugins + (f"optional {PLUGIN}\n" if pbs else ""))
    if pbs:
        configuration += write_pbs(folder / "slurm")
    (folder / "slurm/slurm.conf").write_text(configuration)
    _write_keys(folder / "ssh", path)
    if users:
        _write_users(folder / "users", users)
        # slurmd would take the nodes' unified cgroups for its own.
        (folder / "slurm/cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    old = Path("/etc/lmod/modulespath")
    system = old.read_text() if old.exists() else ""
    (folder / "modulespath").write_text(f"{folder / 'modules'}\n{system}")
    visible = [folder, REPOSITORY, Path(sys.prefix), Path(sys.base_prefix), *share]
    (folder / "shared-tmp").write_text("".join(f"{name}\n" for name in _below_tmp(visible)))


def default_hosts(addresses: Mapping[str, str]) -> str:
    """The right /etc/hosts: every name with its address in the first network."""
    rows = {"ctl": CONTROL, **addresses}
    return "127.0.0.1 localhost\n" + "".join(f"{rows[name]} {name}\n" for name in rows)


def _write_names(folder: Path, addresses: Mapping[str, str]) -> None:
    for name in ("ctl", *addresses):
        (folder / "hosts" / name).write_text(default_hosts(addresses))
    # Nothing is asked of a name server: what is not in the file has no address, at once.
    (folder / "nsswitch.conf").write_text("passwd: files\ngroup: files\nshadow: files\nhosts: files\n")
    # No account is locked, and none has its password here.
    accounts = re.sub(r"(?m)^([^:\n]+):[^:\n]*", r"\1:*", Path("/etc/shadow").read_text())
    (folder / "shadow").write_text(accounts)
    (folder / "shadow").chmod(0o600)


def _write_keys(folder: Path, path: str) -> None:
    for name in ("key", "host_key"):
        (folder / name).unlink(missing_ok=True)
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "lab", "-f", folder / name], check=True)
    (folder / "sshd_config").write_text(_SSHD.format(path=path))
    (folder / "ssh_config").write_text(_SSH)


def _write_users(folder: Path, users: Sequence[str]) -> None:
    folder.mkdir()
    numbered = list(enumerate(users, start=FIRST_USER))
    ids = "".join(f"{name}:{number << 16}:65536\n" for number, name in enumerate(users, start=10))
    accounts = "".join(f"{name}:x:{number}:{number}::/tmp:/bin/bash\n" for number, name in numbered)
    groups = "".join(f"{name}:x:{number}:\n" for number, name in numbered)
    rows = {"passwd": Path("/etc/passwd").read_text() + accounts, "group": Path("/etc/group").read_text() + groups}
    for file, text in {**rows, "subuid": ids, "subgid": ids}.items():
        (folder / file).write_text(text)


def _below_tmp(paths: Sequence[Path]) -> list[str]:
    """The entries of /tmp that hold `paths`."""
    tmp = Path("/tmp").resolve()
    inside = (path.resolve() for path in paths)
    return sorted({path.relative_to(tmp).parts[0] for path in inside if path != tmp and path.is_relative_to(tmp)})
