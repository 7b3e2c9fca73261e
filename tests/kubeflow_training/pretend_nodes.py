"""Nodes of KWOK, which run nothing and tell what a kubelet would."""

from __future__ import annotations

import time
from typing import Any


def until_ready(core: Any, selector: str) -> None:
    """Wait until new ones bear no taint but KWOK's own."""
    end = time.monotonic() + 60
    while any(
        taint.key != "kwok.x-k8s.io/node"
        for node in core.list_node(label_selector=selector).items
        for taint in node.spec.taints or ()
    ):
        assert time.monotonic() < end, "the nodes do not become ready"
        time.sleep(0.1)
