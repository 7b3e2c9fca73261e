"""A snapshot as Prometheus' metrics. Pure.

Counts of drops and runs are gauges: a run that is cleared goes back from `failed` to `training`, which no counter may.
Times are given as timestamps and not as ages, so that they are right at whatever time they are read.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeVar

from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric

from dropforge import __version__
from dropforge.watching.airflow_state import Dag
from dropforge.watching.drops import Ledger
from dropforge.watching.health import HEALTHS
from dropforge.watching.runs import Seen
from dropforge.watching.snapshot import SOURCES, Names, Snapshot
from dropforge.watching.trainings import Folder

STATES: Final = ("preparing", "waiting", "training", "judging", "asked", "finished", "failed", "killed", "unread")
GATES: Final = ("promote", "keep")
WAITS: Final = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0, 24 * 3600.0)
"""Upper ends of the buckets of both waits, in seconds: from a free machine to a day's queue."""

STALE: Final = 900.0
"""Seconds after which the speed of the last log step is no speed any more."""

_Key = TypeVar("_Key", bound=tuple[str, ...])
Figure = Callable[[Seen], float | None]


def _share(part: str) -> Figure:
    def of(run: Seen) -> float | None:
        whole, found = run.figures.get("step_seconds"), run.figures.get(part)
        return None if not whole or found is None else found / whole

    return of


def _figure(name: str) -> Figure:
    return lambda run: run.figures.get(name)


def _progress(run: Seen) -> float | None:
    return run.step / run.steps if run.steps else None


#: What is told of the newest training of a family: name, help, and where it comes from.
NEWEST: Final[tuple[tuple[str, str, Figure], ...]] = (
    ("loss", "Loss of the newest training at its last log step, in nats per target.", _figure("loss")),
    ("eval_loss", "Loss of the newest training at its last evaluation, in nats per target.", _figure("eval/loss")),
    ("mfu_ratio", "Share of the devices' peak that the newest training's model FLOPs take.", _figure("mfu")),
    ("grad_norm", "Gradient norm of the newest training before clipping.", _figure("grad_norm")),
    ("progress_ratio", "Share of its steps that the newest training has done.", _progress),
    ("step_seconds", "Seconds of a step of the newest training.", _figure("step_seconds")),
    ("data_wait_ratio", "Share of a step in which rank 0 made batches.", _share("data_wait_seconds")),
    ("gradient_wait_ratio", "Share of a step in which rank 0 waited for gradients.", _share("gradient_wait_seconds")),
    ("rank_spread_ratio", "How many times as long the slowest rank works as the fastest.", _figure("rank_spread")),
)


def metrics(snapshot: Snapshot, names: Names) -> Iterator[Metric]:
    """All that is known. What is not known has no series, rather than an old or a zero one."""
    yield _labelled("dropforge_build_info", "Version of the exporter.", ("version",), {(__version__,): 1})
    yield from _sources(snapshot)
    families = {run.family for run in snapshot.runs or ()} | set(snapshot.ledger.families if snapshot.ledger else ())
    names.take(families)
    folded = GaugeMetricFamily("dropforge_families_folded", "Families that have no series of their own, but `other`.")
    folded.add_metric([], names.folded)
    yield folded
    if snapshot.ledger is not None:
        yield from _ledger(snapshot.ledger, names)
    if snapshot.runs is not None:
        yield from _runs(snapshot.runs, snapshot.folders, names)
        yield from _trainings(snapshot, names)
        yield from _used(snapshot.runs, snapshot.folders, names)
    if snapshot.dags is not None:
        yield from _dags(snapshot.dags)


def _sources(snapshot: Snapshot) -> Iterator[Metric]:
    known = {(name,): source for name in SOURCES if (source := snapshot.sources.get(name)) is not None}
    up = {key: float(source.up) for key, source in known.items()}
    yield _labelled("dropforge_source_up", "Whether the last look at a source succeeded.", ("source",), up)
    yield _labelled(
        "dropforge_source_last_success_timestamp_seconds",
        "When a look at a source succeeded for the last time.",
        ("source",),
        {key: source.succeeded for key, source in known.items() if source.succeeded},
    )
    yield _labelled(
        "dropforge_source_read_seconds",
        "How long the last look at a source took.",
        ("source",),
        {key: source.seconds for key, source in known.items()},
    )


def _ledger(ledger: Ledger, names: Names) -> Iterator[Metric]:
    counts: Counter[tuple[str, ...]] = Counter()
    refused: Counter[tuple[str, ...]] = Counter()
    oldest: dict[tuple[str, ...], float] = {}
    waits: dict[str, list[float]] = defaultdict(list, {name: [] for name in names.own})
    for family, drops in ledger.families.items():
        name = names.label(family)
        for state, count in (("waiting", drops.waiting), ("taken", drops.taken), ("superseded", drops.superseded)):
            counts[name, state] += count
        refused[(name,)] += drops.refused
        if drops.oldest is not None:
            oldest[(name,)] = min(drops.oldest, oldest.get((name,), drops.oldest))
        waits[name] += drops.waits
    yield _labelled("dropforge_drops", "Complete drops by what happened to them.", ("family", "state"), counts)
    yield _labelled("dropforge_drops_refused", "Drops that could not be entered.", ("family",), refused)
    yield _labelled(
        "dropforge_drop_oldest_waiting_timestamp_seconds",
        "Since when the drop waits for a run that waits longest; absent while none waits.",
        ("family",),
        oldest,
    )
    yield _histogram("dropforge_drop_wait_seconds", "How long drops waited until a run took them.", waits)
    for name, what, count in (
        ("dropforge_inbox_messages", "Messages that intake has not worked through.", ledger.inbox),
        ("dropforge_dead_messages", "Messages in the bucket that are no S3 event.", ledger.dead),
    ):
        yield _labelled(name, what, (), {(): count})


def state_of(run: Seen, folder: Folder | None) -> str:
    """The state of a run, that of an open one by how far it is."""
    if run.state != "running":
        return run.state
    if folder is None:
        return "unread"
    if folder.began is None:
        return "preparing" if folder.queued is None else "waiting"
    return "judging" if folder.trained else "training"


def _runs(runs: Sequence[Seen], folders: Mapping[str, Folder], names: Names) -> Iterator[Metric]:
    # A zero for each, so that the first failure of a family is a change and not the beginning of a series.
    counts = Counter({(name, state, "", ""): 0 for name in names.own for state in STATES})
    ends: dict[tuple[str, ...], float] = {}
    waiting: dict[tuple[str, ...], float] = {}
    gates: Counter[tuple[str, ...]] = Counter({(name, gate): 0 for name in names.own for gate in GATES})
    healths: Counter[tuple[str, ...]] = Counter({(name, health): 0 for name in names.own for health in HEALTHS})
    queued: dict[str, list[float]] = defaultdict(list, {name: [] for name in names.own})
    for run in runs:
        name, folder = names.label(run.family), folders.get(run.run)
        state = state_of(run, folder)
        counts[name, state, bounded(run.task, TASKS), bounded(run.reason, REASONS)] += 1
        if run.ended is not None:
            ends[name, state] = max(run.ended, ends.get((name, state), 0.0))
        if state == "waiting" and folder is not None and folder.queued is not None:
            waiting[(name,)] = min(folder.queued, waiting.get((name,), folder.queued))
        if run.gate:
            gates[name, run.gate] += 1
        if run.health in HEALTHS:
            healths[name, run.health] += 1
        if run.queue_seconds is not None:
            queued[name].append(run.queue_seconds)
    yield _labelled(
        "dropforge_runs",
        "Runs by state; of those that failed or were killed, the task that ended them and why its job did.",
        ("family", "state", "task", "reason"),
        counts,
    )
    yield _labelled(
        "dropforge_run_last_end_timestamp_seconds", "When the last run ended in this way.", ("family", "state"), ends
    )
    yield _labelled(
        "dropforge_run_oldest_waiting_timestamp_seconds",
        "Since when the pods of the training wait that wait longest; absent while none do.",
        ("family",),
        waiting,
    )
    yield _histogram("dropforge_run_queue_seconds", "How long finished runs waited for their first pod's node.", queued)
    yield _labelled("dropforge_gate_decisions", "Judged runs by the gate's word.", ("family", "decision"), gates)
    yield _labelled("dropforge_runs_by_health", "Finished runs by what held them back.", ("family", "health"), healths)


def _trainings(snapshot: Snapshot, names: Names) -> Iterator[Metric]:
    """Of trainings that go on now; a family without one has no series."""
    found: dict[str, list[tuple[Seen, Folder]]] = defaultdict(list)
    for run in snapshot.runs or ():
        folder = snapshot.folders.get(run.run)
        if folder is not None and state_of(run, folder) == "training":
            found[names.label(run.family)].append((run, folder))
    speeds: dict[tuple[str, ...], float] = defaultdict(float)
    for name, pairs in found.items():
        for run, _ in pairs:
            if run.stepped is not None and snapshot.at - run.stepped < STALE:
                speeds[(name,)] += run.figures.get("tokens_per_second", 0.0)
    gpus = {(name,): sum(folder.gpus for _, folder in pairs) for name, pairs in found.items()}
    cores = {(name,): sum(folder.cores for _, folder in pairs) for name, pairs in found.items()}
    stepped = {
        (name,): min(max(run.stepped or 0.0, folder.began or 0.0) for run, folder in pairs)
        for name, pairs in found.items()
    }
    saved = {
        (name,): min(times)
        for name, pairs in found.items()
        if (times := [folder.saved for _, folder in pairs if folder.saved is not None])
    }
    attempts = {(name,): max(run.attempts for run, _ in pairs) for name, pairs in found.items()}
    family = ("family",)
    yield _labelled(
        "dropforge_training_tokens_per_second", "Tokens per second of all trainings of a family.", family, speeds
    )
    yield _labelled("dropforge_training_gpus", "GPUs that trainings hold.", family, gpus)
    yield _labelled("dropforge_training_cores", "Cores that trainings hold.", family, cores)
    yield _labelled("dropforge_training_attempts", "Attempts of the training that has most.", family, attempts)
    yield _labelled(
        "dropforge_training_last_step_timestamp_seconds",
        "When the training logged a step for the last time whose last one is longest ago.",
        family,
        stepped,
    )
    yield _labelled(
        "dropforge_training_checkpoint_timestamp_seconds",
        "When the newest complete checkpoint was written, else its attempt began; of trainings the longest ago.",
        family,
        saved,
    )
    newest = {name: max(pairs, key=lambda pair: pair[0].began)[0] for name, pairs in found.items()}
    for metric, what, figure in NEWEST:
        values = {(name,): value for name, run in newest.items() if (value := figure(run)) is not None}
        yield _labelled(f"dropforge_training_{metric}", what, family, values)


def _dags(dags: Mapping[str, Dag]) -> Iterator[Metric]:
    paused = {(name,): float(dag.paused) for name, dag in dags.items()}
    runs = {(name, state): count for name, dag in dags.items() for state, count in dag.runs.items()}
    yield _labelled("dropforge_dag_paused", "Whether a DAG is paused, so that nothing begins.", ("dag",), paused)
    yield _labelled("dropforge_dag_runs", "Runs of a DAG that Airflow has, by state.", ("dag", "state"), runs)


def _used(runs: Iterable[Seen], folders: Mapping[str, Folder], names: Names) -> Iterator[Metric]:
    """Gauges: an open gang counts until now and its end may be told as earlier, and a run may be deleted."""
    gpus: dict[tuple[str, ...], float] = {(name,): 0.0 for name in names.own}
    cores = dict(gpus)
    for run in runs:
        name, folder = names.label(run.family), folders.get(run.run, Folder())
        gpus[(name,)] = gpus.get((name,), 0.0) + max(run.gpu_seconds, folder.gpu_seconds)
        cores[(name,)] = cores.get((name,), 0.0) + max(run.core_seconds, folder.core_seconds)
    for what, sums in (("gpu", gpus), ("core", cores)):
        yield _labelled(
            f"dropforge_{what}_seconds", f"Time that runs have held {what}s, used or not.", ("family",), sums
        )


_WORK: Final = ("plan", "curate", "check_data", "open_run", "confirm", "tokenise", "train")
_JUDGEMENT: Final = ("champion", "evaluate", "decide", "approve", "register", "report", "close_run")
TASKS: Final = frozenset((*_WORK, *_JUDGEMENT, "reaper"))
"""Those of the fine-tune DAG, and the reaper that ends what they could not."""
REASONS: Final = frozenset(
    (
        "user error",
        "bad data",
        "out of memory",
        "preempted",
        "evicted",
        "node lost",
        "image",
        "quota",
        "unschedulable",
        "too few nodes",
        "killed",
        "collective timeout",
        "deadline",
        "idle GPUs",
        "deleted",
        "unknown",
    )
)
"""Those of `kubeflow_training.jobs.observation.Reason`, which may not be imported here; a test holds it."""


def bounded(word: str, known: frozenset[str]) -> str:
    """A word as a label; tags can be edited by anybody, and a label must not take any value."""
    return word if not word or word in known else "other"


def _labelled(name: str, what: str, labels: Sequence[str], values: Mapping[_Key, float]) -> GaugeMetricFamily:
    found = GaugeMetricFamily(name, what, labels=labels)
    for key, value in sorted(values.items()):
        found.add_metric(list(key), value)
    return found


def _histogram(name: str, what: str, values: Mapping[str, Sequence[float]]) -> HistogramMetricFamily:
    found = HistogramMetricFamily(name, what, labels=["family"])
    for family, seconds in sorted(values.items()):
        buckets = [(str(end), float(sum(one <= end for one in seconds))) for end in WAITS]
        found.add_metric([family], [*buckets, ("+Inf", float(len(seconds)))], sum(seconds))
    return found
