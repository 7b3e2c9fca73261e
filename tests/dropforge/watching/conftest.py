"""A bucket and an MLflow with drops and runs in every state, written by the code that writes them in production."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from dropforge import gangs, intake_ledger, layout, ledger, tracking
from dropforge.drop import Drop, DropFile, identity
from dropforge.gangs import Gang
from dropforge.rest import Rest
from dropforge.run import RunSpec
from dropforge.store import S3Store
from dropforge.watching.exporter import Exporter, Watch, registry
from dropforge.watching.runs import Runs

Series = Mapping[tuple[str, tuple[tuple[str, str], ...]], float]
RECIPE = {"train": {"method": "full"}}


@dataclass
class Field:
    """:param family: one of its own for each test, since MLflow's server is shared."""

    store: S3Store
    mlflow: str
    family: str

    def drop(self, name: str) -> Drop:
        """A complete drop that waits."""
        files = (DropFile(key="a.jsonl", size=1, content=f"sha256:{name}", etag="e"),)
        drop = Drop(family=self.family, drop=name, id=identity(files), bucket=self.store.bucket, files=files)
        ledger.record(self.store, drop)
        return drop

    def open(self, number: int) -> RunSpec:
        """A run that was opened."""
        run = f"{self.family}-{number}"
        root = f"{self.store.uri}/{layout.run_prefix(run)}".rstrip("/")
        spec = RunSpec(run, self.family, number, root, self.store.uri, "m", "d" * 64, RECIPE, "c", drop={"id": "x"})
        spec = replace(spec, tracking=tracking.open_run(self.mlflow, spec, {}, {tracking.TAG_DAG_RUN: run}))
        self.store.put(layout.run_key(run), spec.to_json())
        return spec

    def queue(self, spec: RunSpec, ago: float = 60.0, task: str = "train") -> None:
        """The job of a task is made."""
        gang = Gang(task, "job", f"{task}-{spec.run}", 1, gpus=2, cores=8, created=time.time() - ago)
        gangs.keep(self.store, spec.run, gang)

    def begin(self, spec: RunSpec, ago: float = 60.0) -> None:
        """Its gang of two GPUs has begun."""
        began = time.time() - ago
        self.queue(spec, ago + 5)
        for key in ("began.json", "attempts/1.json"):
            self.store.put(layout.run_prefix(spec.run) + key, json.dumps({"began": began}).encode())

    def train(self, spec: RunSpec, step: int, **more: float) -> None:
        """A log step, as rank 0 tells it."""
        figures = {"tokens_per_second": 1000.0, "loss": 2.5, "step_seconds": 0.5, "data_wait_seconds": 0.1} | more
        client, run_id = tracking.client(self.mlflow), self.id(spec)
        for name, value in figures.items():
            client.log_metric(run_id, f"train/{name}", value, step=step)
        client.set_tag(run_id, tracking.TAG_STEPS, "100")
        client.set_tag(run_id, tracking.TAG_ATTEMPT, "1")

    def save(self, spec: RunSpec, step: int) -> None:
        """A complete checkpoint."""
        self.store.put(f"{layout.run_prefix(spec.run)}checkpoints/step-{step}/manifest.json", b"{}")

    def close(self, spec: RunSpec, status: tracking.Status, tags: Mapping[str, str], **metrics: float) -> None:
        client = tracking.client(self.mlflow)
        for name, value in metrics.items():
            client.log_metric(self.id(spec), name.replace("__", "/"), value)
        tracking.close_run(self.mlflow, self.id(spec), status, tags)

    def id(self, spec: RunSpec) -> str:
        assert spec.tracking is not None
        return spec.tracking.run_id

    def exporter(self, **more: Any) -> Exporter:
        return Exporter(Watch(self.store, Runs(Rest(self.mlflow)), **more), 0.2)

    def everything(self) -> dict[str, RunSpec]:
        """Something of each kind, by its state."""
        taken, old, new = (self.drop(name) for name in ("taken", "old", "new"))
        ledger.claim(self.store, self.family, taken.id, "dag-run")
        intake_ledger.supersede(self.store, self.family, old.id, old.drop, f"{new.drop} is newer")
        self.store.put(layout.refused_key(self.family, "bad"), b"{}")
        names = ("finished", "kept", "failed", "killed", "training", "waiting", "preparing", "asked")
        runs = {name: self.open(number) for number, name in enumerate(names, 1)}
        done = {"wall__queue_seconds": 42.0, "cost__gpu_hours": 2.0, "cost__core_hours": 8.0}
        told = {tracking.TAG_VERDICT: "promote: it is better", tracking.TAG_HEALTH: "data-bound: 40% of ..."}
        self.close(runs["finished"], "FINISHED", told, **done)
        told = {tracking.TAG_VERDICT: "not promoted: it is not", tracking.TAG_HEALTH: "healthy: 2% of ..."}
        self.close(runs["kept"], "FINISHED", told, **done)
        told = {tracking.TAG_ENDED_BY: "train", tracking.TAG_REASON: "out of memory"}
        self.close(runs["failed"], "FAILED", told, cost__gpu_hours=0.5)
        self.close(runs["killed"], "KILLED", {tracking.TAG_ENDED_BY: "confirm", tracking.TAG_REASON: ""})
        self.queue(runs["preparing"], task="tokenise")
        self.queue(runs["waiting"])
        self.begin(runs["training"])
        self.train(runs["training"], 30, mfu=0.4, rank_spread=1.1, gradient_wait_seconds=0.05, grad_norm=1.0)
        tracking.client(self.mlflow).log_metric(self.id(runs["training"]), "eval/loss", 2.4, step=30)
        self.save(runs["training"], 20)
        tracking.note(
            self.mlflow, self.id(runs["asked"]), tracking.TAG_CONFIRMED, "asked until 2026-11-24T00:00:00Z: x"
        )
        return runs


@pytest.fixture
def field(s3_store: S3Store, mlflow_server: str) -> Field:
    return Field(s3_store, mlflow_server, f"fam-{uuid.uuid4().hex[:8]}")


def scraped(exporter: Exporter) -> str:
    """What a scrape is answered after one look."""
    exporter.look()
    return generate_latest(registry(exporter)).decode()


def series(text: str) -> Series:
    """Name and labels with the value."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(found: Series, name: str, **labels: str) -> float | None:
    return found.get((f"dropforge_{name}", tuple(sorted(labels.items()))))
