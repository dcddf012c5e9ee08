"""`[kubernetes]` of site.toml, and checks of its values: a `…_problem` returns the mistake in a value, or None.

Source: kubernetes/kubernetes, pkg/apis/core/validation/validation.go, and k8s.io/apimachinery/pkg/util/validation.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

from envbuild.toml import form, key

_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_SUBDOMAIN = rf"(?=.{{1,253}}\Z){_LABEL}(\.{_LABEL})*"
_NAME = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_PREFIX = rf"(?=[^/]{{1,253}}/){_LABEL}(\.{_LABEL})*/"
_UNITS = {"": Decimal(1), "m": Decimal("0.001"), "k": Decimal(1000)}
_UNITS |= {unit: Decimal(1000 ** (power + 2)) for power, unit in enumerate("MGTPE")}
_UNITS |= {f"{unit}i": Decimal(1024 ** (power + 1)) for power, unit in enumerate("KMGTPE")}
_QUANTITY = re.compile(rf"([0-9]+(?:\.[0-9]+)?)({'|'.join(_UNITS)})")
_OF_THE_CONTAINER = ("/dev", "/proc", "/sys")
_LARGEST_ID = 2**31 - 1
_ENDS = ", with a letter or digit first and last"


label_problem = form(_LABEL, f"is not a name in Kubernetes: up to 63 of a-z, 0-9 and -{_ENDS}")
# "" names no object, such as a claim or secret.
object_problem = form(f"({_SUBDOMAIN})?", f"is not a name in Kubernetes: up to 253 of a-z, 0-9, - and .{_ENDS}")
node_label_problem = form(
    f"({_PREFIX})?{_NAME}",
    "is not the name of a label: NAME or DOMAIN/NAME, NAME of up to 63 letters, digits, -, _ and .",
)
label_value_problem = form(
    f"({_NAME})?", f"is not the value of a label: up to 63 of letters, digits, -, _ and .{_ENDS}"
)


def resource_problem(key: str, amount: str) -> str | None:
    """Return why a pod cannot have the limit `key` = `amount`, or None."""
    if "/" in key:
        if not re.fullmatch(f"{_PREFIX}{_NAME}", key):
            return f"{key!r} is not the name of a resource: DOMAIN/NAME, such as vpc.amazonaws.com/efa"
        whole = re.fullmatch(r"[1-9][0-9]*", amount)
        return None if whole else f'{amount!r}: devices are whole numbers, such as "1"'
    size = key.removeprefix("hugepages-")
    pages = size != key and _QUANTITY.fullmatch(size)
    if key not in ("cpu", "memory", "ephemeral-storage") and not pages:
        return (
            f"{key!r} is not a resource of Kubernetes: cpu, memory, ephemeral-storage, hugepages-2Mi,"
            " or DOMAIN/NAME of a device, such as vpc.amazonaws.com/efa"
        )
    found = _QUANTITY.fullmatch(amount)
    if not found or (found[2] == "m" and key != "cpu"):
        like = "2 or 500m" if key == "cpu" else "16Gi"
        return f"{amount!r} is not an amount of {key}, such as {like}"
    if pages and (not quantity(amount) or quantity(amount) % max(1, quantity(size))):
        return f"{amount!r} is not a multiple of {size}, the size of a page"
    return None


def huge_pages_problem(limits: Collection[str]) -> str | None:
    """Return why a pod may not have these limits, or None: huge pages require a limit on cpu or memory."""
    if {"cpu", "memory"} & {*limits} or not any(key.startswith("hugepages-") for key in limits):
        return None
    return "Kubernetes refuses pods that ask for huge pages without CPUs or memory"


def quantity(text: str) -> int:
    """Return a quantity of Kubernetes, such as 16Gi or 8G, as an integer, rounded down; 0 for an invalid one."""
    found = _QUANTITY.fullmatch(text)
    return int(Decimal(found[1]) * _UNITS[found[2]]) if found else 0


def mount_path_problem(text: str) -> str | None:
    """Return why pods cannot mount their data at `text`, or None."""
    if not re.fullmatch(r"/[^\s:]+", text) or {"", ".", ".."} & {*text.strip("/").split("/")}:
        return f"{text!r} is not an absolute path below /, without spaces, colons, // and dots for folders"
    if f"/{text.split('/')[1]}" in _OF_THE_CONTAINER:
        return f"{text!r} is in the container's own file systems; the job mounts /dev/shm itself"
    return None


def user_problem(text: str) -> str | None:
    """Return why `text` is not UID or UID:GID of a user other than root, or None."""
    found = re.fullmatch(r"([0-9]{1,10})(:([0-9]{1,10}))?", text)
    if not text or (found and 0 < int(found[1]) <= _LARGEST_ID and int(found[3] or 0) <= _LARGEST_ID):
        return None
    return f"{text!r} is not UID or UID:GID of a user other than root, such as 1000:1000"


@dataclass(frozen=True, slots=True)
class KubernetesTable:
    """`[kubernetes]`: settings of pods."""

    namespace: str = key("default", "Namespace.", check=label_problem, pattern=r"^[a-z0-9-]+$")
    api: Literal["v1", "v2"] = key("v1", "v1: PyTorchJob of the training operator; v2: TrainJob of Trainer.")
    claim: str = key(
        "", "Persistent volume claim with data and snapshots.",
        check=object_problem, pattern=r"^[a-z0-9.-]*$", example="fsx-pv",
    )  # fmt: skip
    mount: str = key("/data", "Where pods see it.", check=mount_path_problem, pattern=r"^/\S*$")
    shm: str = key("", "Size of /dev/shm.", pattern=r"^(\d+[KMGT]i?)?$", example="16Gi")
    node_selector: dict[str, str] = key(
        {}, "Labels that nodes must have.", key_check=node_label_problem, check=label_value_problem
    )
    resources: dict[str, str] = key(
        {}, "Limits of a pod besides GPUs, such as vpc.amazonaws.com/efa.", entry_check=resource_problem
    )
    etcd_image: str = key(
        "quay.io/coreos/etcd:v3.5.18",
        "Server for --rendezvous etcd-v2, 3.4 or 3.5, with a version or digest.",
        pattern=r"^[^\s@]+(:(?!latest$)[A-Za-z0-9_][A-Za-z0-9_.-]*|@sha256:[0-9a-f]{64})$",
    )
    run_as: str = key(
        "", "UID or UID:GID of pods, with all else that PodSecurity `restricted` asks for. Default: the image's user.",
        check=user_problem, pattern=r"^([1-9]\d*(:\d+)?)?$", example="1000:1000",
    )  # fmt: skip
    pull_secret: str = key("", "Name of the secret for pulling.", check=object_problem, pattern=r"^[a-z0-9.-]*$")
