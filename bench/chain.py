"""From the `_SUCCESS` upload to the intake run started and the fine-tune run queued, on the embedded stack.

    python bench/chain.py [--drops 8] [--state FOLDER]

Each drop carries a recipe with an unknown key, so its run ends in `plan`: the chain is measured, not the training.
The clock of the upload and of Airflow's database is this machine's.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from dropforge.client.airflow import FINETUNE, INTAKE
from dropforge.client.connection import connect
from dropforge.drop import read_drop
from dropforge.stack import control

FAMILY = "bench-chain"


def main(
    drops: Annotated[int, typer.Option(help="How many drops, one after another.", min=1)] = 8,
    state: Annotated[Path | None, typer.Option(help="Folder of a stack; else one in a temporary folder.")] = None,
) -> None:
    """Measure and print medians."""
    folder = state or Path(tempfile.mkdtemp(prefix="dropforge-bench-"))
    started = control.start(folder)
    try:
        control.wait_ready(folder)
        rows = [_one(folder, f"{time.time_ns()}") for _ in range(drops)]
    finally:
        if started:
            control.stop(folder)
    for name, place, bar in (("upload to intake started", 0, 2.0), ("upload to fine-tune run queued", 1, 4.0)):
        values = sorted(row[place] for row in rows)
        print(
            f"{name:32} median {statistics.median(values):.2f} s  min {values[0]:.2f}  max {values[-1]:.2f}"
            f"  bar {bar:g} s  n {len(values)}"
        )


def _one(folder: Path, name: str) -> tuple[float, float]:
    connection = connect(folder)
    store, prefix = connection.store, f"drops/{FAMILY}/{name}/"
    store.put(f"{prefix}rows.jsonl", f'{{"text": "{name}"}}\n'.encode())
    store.put(f"{prefix}recipe.yaml", b"unknown: 1\n")
    uploaded = datetime.now(UTC)
    store.put(f"{prefix}_SUCCESS", b"")
    drop = read_drop(store, FAMILY, name)
    intake = queued = None
    end = time.monotonic() + 120
    while (intake is None or queued is None) and time.monotonic() < end:
        if intake is None:
            intake = _first(connection.airflow.newest_runs(INTAKE), uploaded, "start_date")
        if queued is None:
            mine = [run for run in connection.airflow.newest_runs(FINETUNE) if drop.id in str(run["partition_key"])]
            queued = _first(mine, uploaded, "queued_at")
        time.sleep(0.1)
    if intake is None or queued is None:
        raise SystemExit(f"drop {name}: no run within 120 s")
    # Let the run end, so that the next drop meets a quiet stack.
    while any(run["state"] in {"queued", "running"} for run in connection.airflow.newest_runs(FINETUNE)):
        time.sleep(0.2)
    return (intake - uploaded).total_seconds(), (queued - uploaded).total_seconds()


def _first(runs: list[dict[str, str]], after: datetime, field: str) -> datetime | None:
    times = [datetime.fromisoformat(run[field]) for run in runs if run.get(field)]
    return min((moment for moment in times if moment > after), default=None)


if __name__ == "__main__":
    typer.run(main)
