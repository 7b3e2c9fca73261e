"""Which share of a small run is start-up: a drop on a cluster, through Kueue and the trainer's image, to its model.

    DROPFORGE_IMAGE_BUILDER=... python -m bench.startup [--rounds 3] [--steps 120]

The place is that of `tests/cluster/test_whole_way.py`: the image built and loaded before, a gang of two pods with a
rank each, a team's queue that is empty. Runs one after another, each of a family of its own so that nobody is waited
for; the first does not count. From the drop to the end of the run each second belongs to one part:

    intake, curation          from the drop to the opening of the run
    queue                     until Kueue admits the gang
    node                      until all pods have one
    image, container          until the last container's start: image, volumes, the operator's own init container
    start-up                  processes, imports, rendezvous, model, self-checks: the trainer's `load`
    data                      reading and tokenising the rows
    training                  steps, evaluations, checkpoints, the model
    evaluation, registry      a pod that measures the model, with its own start-up, and what follows

The image is on the node: what a pull takes depends on registry and network. Ends with 1 if the median share of
start-up is 25 % or more.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from bench.cluster import leave_out_without_cluster

BAR = 0.25


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=120, help="of each run")
    options = parser.parse_args()
    leave_out_without_cluster()
    from kubernetes import client, config

    from dropforge.client.upload import find_files
    from dropforge.samples import write_sample
    from tests.cluster.team_place import NO_IMAGE, place

    if NO_IMAGE:
        print(f"{NO_IMAGE}: this bench is left out")
        return 0
    config.load_kube_config()
    identity = Path("/etc/machine-id").read_text().strip()
    nodes = client.CoreV1Api().list_node().items
    node = next((one for one in nodes if one.status.node_info.machine_id == identity), None)
    if node is None:
        print("this machine is no node of the cluster: this bench is left out")
        return 0
    found: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="dropforge-bench-") as name:
        files = find_files(list(write_sample(Path(name), part=1)))
        # As `make demo`, with a checkpoint each 20 steps and two evaluations.
        recipe = {"extends": "sample", "train": {"max_steps": options.steps}}
        (Path(name) / "team").mkdir()
        with place(node, Path(name) / "team", recipe) as team:
            for number in range(options.rounds + 1):
                course = team.drop(f"startup-{number}", files)
                course.end()
                parts = course.marks().parts()
                print(f"run {number}: " + ", ".join(f"{part} {seconds:.1f} s" for part, seconds in parts.items()))
                found += [parts] if number else []
    shares = {part: [one[part] / sum(one.values()) for one in found] for part in found[0]}
    print(f"\n{'part':24} {'seconds':>8} {'share':>7}   median of {len(found)} runs")
    for part, each in shares.items():
        print(f"{part:24} {statistics.median(one[part] for one in found):8.1f} {statistics.median(each):7.1%}")
    print(f"{'in all':24} {statistics.median(sum(one.values()) for one in found):8.1f}")
    share = statistics.median(shares["start-up"])
    print(f"start-up {share:.1%}, bar {BAR:.0%}")
    return int(share >= BAR)


if __name__ == "__main__":
    sys.exit(main())
