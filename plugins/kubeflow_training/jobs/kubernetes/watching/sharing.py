"""The feeds of a process: those who wait in the same place find the same one."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from weakref import WeakKeyDictionary

from kubeflow_training.jobs.kinds import Kind
from kubeflow_training.jobs.kubernetes.client import AsyncCluster, Connect
from kubeflow_training.jobs.kubernetes.watching.feed import Feed

_CLUSTERS: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Hashable, _Shared]] = WeakKeyDictionary()


class _Shared:
    """A cluster's client and its feeds in one event loop."""

    def __init__(self, connect: Connect) -> None:
        self.cluster = AsyncCluster(connect)
        self.feeds: dict[tuple[str, str], Feed] = {}


def shared_feed(key: Hashable, connect: Connect, namespace: str, kind: Kind) -> Feed:
    """The feed of a namespace and kind on the cluster of that key, made if nobody waits there yet.

    :param key: names the cluster, such as its connection's id; `connect` must lead there.
    """
    clusters = _CLUSTERS.setdefault(asyncio.get_running_loop(), {})
    shared = clusters.setdefault(key, _Shared(connect))
    feed = shared.feeds.get((namespace, kind.name))
    if feed is None:
        feed = shared.feeds[namespace, kind.name] = Feed(shared.cluster, namespace, kind)

        def release() -> AsyncCluster | None:
            del shared.feeds[namespace, kind.name]
            if shared.feeds:
                return None
            del clusters[key]
            return shared.cluster

        feed.release = release
    return feed
