"""What the pods of ours that `dropforge` itself renders may do, by Kubernetes' restricted Pod Security Standard. Pure.

https://kubernetes.io/docs/concepts/security/pod-security-standards/#restricted
"""

from __future__ import annotations

from typing import Any


def pod(user: int) -> dict[str, Any]:
    """The pod's `securityContext`. :param user: uid of its processes."""
    return {"runAsUser": user, "runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}


def container() -> dict[str, Any]:
    """The `securityContext` of each of its containers."""
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
