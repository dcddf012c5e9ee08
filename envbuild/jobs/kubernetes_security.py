"""The settings that PodSecurity `restricted` requires of pods, if the site names the user that they run as.

Source: kubernetes.io/docs/concepts/security/pod-security-standards.
"""

from __future__ import annotations

from typing import Any

from envbuild.jobs.model import JobPlan


def pod_security(plan: JobPlan) -> dict[str, Any]:
    """Return the pod's settings. A group also owns the volumes whose drivers let Kubernetes set one."""
    user, _, group = plan.site.kubernetes.run_as.partition(":")
    if not user:
        return {}
    context: dict[str, Any] = {"runAsNonRoot": True, "runAsUser": int(user)}
    if group:
        context |= {"runAsGroup": int(group), "fsGroup": int(group), "fsGroupChangePolicy": "OnRootMismatch"}
    return {"securityContext": context | {"seccompProfile": {"type": "RuntimeDefault"}}}


def container_security(plan: JobPlan) -> dict[str, Any]:
    """Return the container's settings."""
    if not plan.site.kubernetes.run_as:
        return {}
    context = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    return {"securityContext": context}
