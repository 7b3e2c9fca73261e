"""What pods and containers may do, by Kubernetes' "restricted" Pod Security Standard. Pure.

https://kubernetes.io/docs/concepts/security/pod-security-standards/#restricted
"""

from __future__ import annotations

from typing import Any


def pod_rights(user: int | None) -> dict[str, Any]:
    """The pod's `securityContext`. :param user: uid and group of its processes; None asks for nothing."""
    if user is None:
        return {}
    return {
        "runAsNonRoot": True,
        "runAsUser": user,
        "runAsGroup": user,
        "fsGroup": user,
        # A large claim is not walked through at each start.
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_rights(user: int | None) -> dict[str, Any]:
    """The `securityContext` of each of its containers."""
    return {} if user is None else {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
