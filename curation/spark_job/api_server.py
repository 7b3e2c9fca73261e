"""Where a pod reaches the API server."""

from __future__ import annotations

from collections.abc import Mapping

from dropforge.errors import DropforgeError


def address(env: Mapping[str, str]) -> str:
    """By number, which every pod is given, as Kubernetes' own clients do: a name needs the cluster's DNS.

    :raises DropforgeError: if this is no pod.
    """
    host, port = env.get("KUBERNETES_SERVICE_HOST", ""), env.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise DropforgeError(
            "environment variable KUBERNETES_SERVICE_HOST", "it is not set", "Start this in a pod, which has it"
        )
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
