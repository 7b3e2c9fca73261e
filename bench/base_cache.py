"""A pod's base model: with no cache of the node, with one that is empty, and with one that another pod filled.

    python -m bench.base_cache [--megabytes 500] [--rate 125] [--rounds 3]

The hub is a server on 127.0.0.1 that gives a file no faster than `--rate` MB/s (125 is a network of 1 Gbit/s). Each
pod is a fresh process with a client's cache of its own, as a pod has; its clock starts before the interpreter, and
stops when the model's files are there and were looked through. Ways are interleaved.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.hub_server import Hub, serve

POD = """
import sys
from pathlib import Path
from trainer.data.hub import Through, fetch_from_hub
from trainer.data.node_cache import NodeCache

cache, folder, commit = sys.argv[1:]
if cache:
    with NodeCache(Path(cache), 10**12, lambda line: None) as node:
        fetch_from_hub("some/model", commit, through=Through(node, Path(folder)))
else:
    fetch_from_hub("some/model", commit)
"""


def pod(hub: Hub, cache: Path | None) -> float:
    """Seconds until a pod has the model."""
    with TemporaryDirectory(prefix="base-cache-pod-") as scratch:
        own = {"HF_ENDPOINT": hub.url, "HF_HOME": f"{scratch}/home", "HF_HUB_DISABLE_XET": "1"}
        commit = hub.repositories["some/model"].refs["main"]
        began = time.monotonic()
        subprocess.run(
            [sys.executable, "-c", POD, str(cache or ""), f"{scratch}/base", commit],
            env={**os.environ, **own, "PYTHONPATH": str(Path(__file__).parents[1])},
            check=True,
        )
        return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--rate", type=float, default=125)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    weights = os.urandom(arguments.megabytes * 1_000_000)
    hub = Hub()
    files = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": weights}
    hub.model("some/model", files)
    hub.hold = lambda name: time.sleep(len(files[name]) / arguments.rate / 1e6)
    server = serve(hub)
    found: dict[str, list[float]] = {"no cache": [], "the first pod": [], "the next pod": []}
    for _ in range(arguments.rounds):
        with TemporaryDirectory(prefix="base-cache-") as cache:
            found["no cache"].append(pod(hub, None))
            found["the first pod"].append(pod(hub, Path(cache)))
            asked = hub.gets("model.safetensors")
            found["the next pod"].append(pod(hub, Path(cache)))
            assert hub.gets("model.safetensors") == asked
    server.shutdown()
    for way, times in found.items():
        print(f"{way}: {statistics.median(times):.2f} s ({min(times):.2f} to {max(times):.2f})")


if __name__ == "__main__":
    main()
