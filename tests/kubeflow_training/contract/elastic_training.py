"""A training that counts: `torchrun elastic_training.py FOLDER`. It saves every step, resumes, and goes on until told.

FOLDER/state.json is its checkpoint; FOLDER/finish ends it. Rank 0 reports in the termination message of its pod.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    saved = folder / "state.json"
    step = json.loads(saved.read_text())["step"] if saved.exists() else 0
    print(f"rank {rank} of {world} goes on from step {step}", flush=True)
    while True:
        # Everybody sums; rank 0 adds what nobody else could, when it was told to end.
        value = torch.tensor([1.0, float(rank == 0 and (folder / "finish").exists())])
        dist.all_reduce(value)
        step += 1
        assert value[0] == world
        if rank == 0:
            new = saved.with_suffix(".new")
            new.write_text(json.dumps({"step": step, "world": world}))
            new.replace(saved)
        if value[1]:
            break
        time.sleep(0.05)
    dist.barrier()
    if rank == 0:
        report = {"exit_code": 0, "message": "done", "rank": 0, "step": step}
        Path(os.environ.get("TERMINATION_LOG") or "/dev/termination-log").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
