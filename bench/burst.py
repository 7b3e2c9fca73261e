"""Many drops at once, with the triggerer and the scheduler killed in the middle: none lost, none trained on twice.

    python -m bench.burst [--drops 1000] [--seconds 60] [--kills/--no-kills] [--state FOLDER]

The real intake on the embedded stack (S3, SQS, watcher, intake DAG). In the place of the fine-tune DAG stands one task
that claims its drop and leaves a mark with its run's name: a drop without a mark is lost, one with two is doubled.
Ends with 1 if one is.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from bench.stack import REPOSITORY, ask, restarts, stack
from dropforge import layout
from dropforge.client.airflow import FINETUNE, INTAKE
from dropforge.client.connection import Connection
from dropforge.store import Store

DAGS = {"intake.py": REPOSITORY / "dags/intake.py", "finetune.py": REPOSITORY / "bench/dags/burst.py"}
KILLS = {1 / 3: "airflow-triggerer", 2 / 3: "airflow-scheduler"}
MARKS = "burst/"
FAMILIES = 4  # that drop in turns


def main(
    drops: Annotated[int, typer.Option(help="How many drops.", min=1)] = 1000,
    seconds: Annotated[float, typer.Option(help="Time in which they are uploaded.", min=0)] = 60.0,
    kills: Annotated[bool, typer.Option(help="Kill the triggerer and the scheduler in the middle.")] = True,
    limit: Annotated[float, typer.Option(help="Seconds to wait for the last run.")] = 1800.0,
    state: Annotated[Path | None, typer.Option(help="Folder of the stack, which stays; else a temporary one.")] = None,
) -> None:
    """Upload, kill, wait, count."""
    with stack(DAGS, state) as connection:
        burst = Burst(connection, drops, seconds, KILLS if kills else {})
        burst.upload()
        burst.wait(limit)
        burst.tell()
    sys.exit(1 if burst.lost or burst.doubled else 0)


@dataclass
class Burst:
    """One burst and what became of it."""

    connection: Connection
    drops: int
    seconds: float
    kills: dict[float, str]
    began: float = field(default_factory=time.time)
    uploaded: dict[str, float] = field(default_factory=dict)
    marks: dict[str, list[str]] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        assert self.connection.stack is not None
        return self.connection.stack

    @property
    def lost(self) -> int:
        return sum(name not in self.marks for name in self.uploaded)

    @property
    def doubled(self) -> int:
        return sum(len(runs) > 1 for runs in self.marks.values())

    def upload(self) -> None:
        """All drops, evenly over the time; the kills come when their part of the drops is there."""
        kills = {round(part * self.drops): service for part, service in self.kills.items()}
        with ThreadPoolExecutor(4) as pool:
            sent: list[Future[None]] = []
            for number in range(self.drops):
                time.sleep(max(0.0, self.began + number * self.seconds / self.drops - time.time()))
                sent.append(pool.submit(self._drop, f"d{number:05}"))
                if number in kills:
                    self._kill(kills[number])
            for future in sent:
                future.result()
        self._say("all uploaded")

    def _drop(self, name: str) -> None:
        store, family = self.connection.store, f"bench-burst-{int(name[1:]) % FAMILIES}"
        prefix = layout.drop_prefix(family, name)
        store.put(f"{prefix}rows.jsonl", f'{{"text": "{name}"}}\n'.encode())
        store.put(prefix + layout.SUCCESS, b"")
        self.uploaded[name] = time.time()

    def _kill(self, service: str) -> None:
        pid, _ = restarts(self.folder, service)
        if pid is None:
            raise SystemExit(f"{service} does not run, so it cannot be killed")
        os.kill(pid, signal.SIGKILL)
        self._say(f"killed {service}")

    def wait(self, limit: float) -> None:
        """Until every drop has its mark and no run is left that could leave a second one."""
        end, said = time.time() + limit, 0.0
        while time.time() < end:
            self.marks = dict(_marks(self.connection.store))
            if not self.lost and not self._unfinished():
                return
            if time.time() - said > 15:
                said = time.time()
                self._say(f"{len(self.marks)} of {self.drops} have a run, {self._unfinished()} runs to come or on")
            time.sleep(1)

    def _unfinished(self) -> int:
        (runs,), (keys,) = (
            *ask(
                self.folder,
                "select count(*) from dag_run where dag_id = %s and state in ('queued', 'running')",
                FINETUNE,
            ),
            *ask(self.folder, "select count(*) from asset_partition_dag_run where created_dag_run_id is null"),
        )
        return int(runs) + int(keys)

    def _say(self, text: str) -> None:
        print(f"{time.time() - self.began:7.1f} s  {text}", flush=True)

    def tell(self) -> None:
        store = self.connection.store
        at = {name: float(store.get(f"{MARKS}{name}/{runs[0]}")) for name, runs in self.marks.items()}
        waits = sorted(at[name] - self.uploaded[name] for name in at if name in self.uploaded)
        first, last = min(self.uploaded.values()), max(self.uploaded.values())
        print(f"drops       {self.drops} in {last - self.began:.0f} s")
        if at:
            end = max(at.values())
            print(f"last run    {end - first:.0f} s after the first _SUCCESS, {end - last:.0f} s after the last")
            print(
                f"_SUCCESS to its own run   median {statistics.median(waits):.1f} s"
                f"  p95 {waits[int(len(waits) * 0.95)]:.1f} s  max {waits[-1]:.1f} s"
            )
        print(f"lost        {self.lost}")
        print(f"doubled     {self.doubled}")
        partitions, runs = ask(
            self.folder, "select count(distinct partition_key), count(*) from dag_run where dag_id = %s", FINETUNE
        )[0]
        print(f"partitions  {partitions}")
        (skipped,) = ask(
            self.folder, "select count(*) from task_instance where dag_id = %s and state = 'skipped'", FINETUNE
        )[0]
        print(f"runs        {runs}, {skipped} of them skipped because another run had the drop")
        intakes, retried = ask(
            self.folder,
            "select count(*), count(*) filter (where try_number > 1) from task_instance where dag_id = %s",
            INTAKE,
        )[0]
        print(f"intake runs {intakes}, {retried} of them tried again")
        for service in KILLS.values():
            print(f"{service} was started again {restarts(self.folder, service)[1]} times")


def _marks(store: Store) -> Iterator[tuple[str, list[str]]]:
    found: dict[str, list[str]] = {}
    for info in store.list(MARKS):
        name, _, run = info.key.removeprefix(MARKS).partition("/")
        found.setdefault(name, []).append(run)
    yield from found.items()


if __name__ == "__main__":
    typer.run(main)
