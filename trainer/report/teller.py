"""What a training tells besides its log lines: attempts, checkpoints, profiles, curves, the card and the report."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from threading import Thread
from typing import TYPE_CHECKING, Any, Final

from dropforge.profiling import Span
from dropforge.run import DATASET_DIGEST, RunSpec
from dropforge.store import Store, open_store
from trainer.config import Settings
from trainer.data.template_date import told_date
from trainer.gang import Gang
from trainer.generate import Answers
from trainer.model.export import Exported
from trainer.report.artifacts import keep_files
from trainer.report.board import Board
from trainer.report.card import NAME as CARD
from trainer.report.card import model_card
from trainer.report.console import Console, warn
from trainer.report.curves import NAME as CURVES
from trainer.report.curves import draw_curves
from trainer.report.final import (
    REPORT,
    begin_attempt,
    checkpoint_rows,
    checkpoint_tag,
    first_began,
    make_report,
    wall_rows,
)
from trainer.report.job_status import JobStatus
from trainer.report.models import BEST, LAST, Shown, make_models, shown
from trainer.report.profile import Profiler, Requests
from trainer.report.samples import TAG, name_of, table_json, tables_tag
from trainer.report.tracking import make_tracker
from trainer.report.wall import Wall
from trainer.state.checkpoint import Seal
from trainer.state.retention import best_steps

if TYPE_CHECKING:
    from trainer.loop.loop import Loop

_CHECKPOINTS: Final = "dropforge.checkpoints"
_PROFILE: Final = 60.0  # seconds that the end of a training waits for traces that are being written
_CLOSE: Final = 15.0  # seconds that the end waits for MLflow to take the last metrics
_CLOSE_LEAST: Final = 0.5  # the same however late it is, and what keeping the others takes
_DRAW: Final = 30.0  # seconds that the end of a training waits for its pictures
_DRAW_FAILED: Final = 6.0  # the same where it failed: peers are ended ten seconds later


class Teller:
    """Tells of one attempt; only rank 0 has anything to tell, but for its profile.

    :param store: the run's folder.
    """

    def __init__(
        self, spec: RunSpec, settings: Settings, gang: Gang, store: Store, console: Console, wall: Wall
    ) -> None:
        self._spec, self._gang, self._store, self._console, self._wall = spec, gang, store, console, wall
        tracking = spec.tracking if gang.leader else None
        self.tracker = make_tracker(tracking, console.say)
        dataset = (spec.family, spec.dataset_digest[:DATASET_DIGEST])
        self._listed = ""  # the checkpoints as a tag, where they cannot be logged models
        self._models = make_models(tracking, self.tracker, console.say, dataset, self._tag_checkpoints)
        self._requests = Requests(store, console.say) if gang.leader else None
        self.profiler = Profiler(
            gang,
            store,
            console.say if gang.leader else warn,
            planned=Span.parse(settings.train.profile) if settings.train.profile else None,
            requests=self._requests,
            told=lambda address: self.tracker.tags({"dropforge.profile": address}) if gang.leader else None,
        )
        self.board: Board | None = None
        if settings.train.tensorboard and gang.leader:
            self.board = Board(open_store(spec.root, hurried=True), console.say)
        self.job_status = JobStatus.from_env(os.environ, console.say) if gang.leader else None
        self.attempt = 0
        self._first: float | None = None
        self._shown: list[Shown] = []
        self._resumed_from: int | None = None
        self._keeping: list[Thread] = []

    def asked(self) -> int:
        """How many steps somebody wants to have profiled; each wish is told once."""
        return self._requests.take() if self._requests else 0

    def begin(self, resumed_from: int | None, steps: int) -> None:
        """A new attempt begins. :param steps: of the whole training."""
        self._resumed_from = resumed_from
        if self.board is not None:
            self.board.begin(resumed_from)
        if self._gang.leader:
            self.attempt = begin_attempt(self._store, self._gang, resumed_from, self._wall.began)
            self._first = first_began(self._store)
            came = {} if resumed_from is None else {"dropforge.resumed_from": str(resumed_from)}
            if self.attempt > 1 or resumed_from is not None:  # also where no checkpoint was kept: its metrics are there
                self.tracker.resume(resumed_from or 0)
            self.tracker.tags({"dropforge.attempt": str(self.attempt), "dropforge.steps": str(steps), **came})
        if resumed_from is not None:
            self._console.say(f"attempt {self.attempt}: resuming from checkpoint step-{resumed_from}")
        else:
            self._wall.resume({}, self._first)  # of what was done before, nothing was kept

    def checkpoints(self, store: Store, seals: list[Seal], evaluations: Sequence[Mapping[str, Any]]) -> None:
        """Make the kept checkpoints visible in the MLflow run; returns at once. :param store: where they are."""
        best = {f"{BEST}_checkpoint": f"step-{step}" for step in best_steps(seals, 1)}
        last = {f"{LAST}_checkpoint": f"step-{seals[-1].step}"} if seals else {}
        self._listed = checkpoint_tag(checkpoint_rows(store, seals))
        self.tracker.tags(best | last)
        if self._models is None or self._models.absent:
            self._tag_checkpoints()
        if self._models is not None:
            self._shown = shown(store.uri, seals, evaluations)
            self._models.show(self._shown)
        self.tracker.wake()

    def _tag_checkpoints(self) -> None:
        self.tracker.tags({_CHECKPOINTS: self._listed})

    def answered(self, answers: Answers, evaluations: Sequence[Mapping[str, Any]]) -> None:
        """Keep the answers of the last evaluation as a table, for the run's folder and for MLflow; returns at once."""
        step = int(evaluations[-1]["step"])
        thread = keep_files(
            lambda: {name_of(step): table_json(answers.table(step))},
            self._store,
            self._spec.tracking,
            self._console.say,
            f"the answers at step {step}",
        )
        self._keeping = [*(one for one in self._keeping if one.is_alive()), thread]
        self.tracker.tags({TAG: tables_tag(evaluations)})

    def trained(self, step: int) -> None:
        """All steps are done: traces that are still being written are waited for."""
        self.profiler.close(step, _PROFILE)

    def succeeded(self, loop: Loop, exported: Exported, packing: Mapping[str, Any]) -> None:
        """Curves, card, and at last the report, with which the run has succeeded."""
        self._keep(lambda: self._curves(loop), "curves", _DRAW)
        self._await_answers(_DRAW)
        report = make_report(
            self._store,
            self._spec,
            self._gang,
            resumed_from=self._resumed_from,
            figures=loop.report(),
            wall=wall_rows(self._wall, self._first),
            packing=packing,
            checkpoints=checkpoint_rows(loop.checkpoints.store, loop.checkpoints.seals()),
            model=exported,
            date=told_date(loop.tokenizer.chat_template, self._spec.date),
        )
        self._keep(lambda: {CARD: model_card(self._spec, report).encode()}, "the model card", _DRAW)
        self._store.put(REPORT, json.dumps(report, indent=1, ensure_ascii=False).encode())
        self._console.say(f"model {exported.uri}: {exported.bytes / 1e6:.1f} MB, {report['steps']} steps, done")

    def failed(self, loop: Loop, error: BaseException) -> None:
        """A training that ends early has its picture and its answers too, if there is time for them."""
        seconds = max(0.0, min(_DRAW_FAILED, loop.saving.grace_left() - 1))
        self._await_answers(seconds / 2)
        if self._gang.leader and loop.log.points.rows:
            seconds = max(0.0, min(_DRAW_FAILED, loop.saving.grace_left() - 1))
            self._keep(lambda: self._curves(loop, f": ended: {error}"), "curves", seconds)

    def close(self, seconds: float = math.inf) -> None:
        """Send the last metrics; what MLflow could not take is kept in the run's folder.

        Whatever goes wrong is said: it must not replace how the training ended.

        :param seconds: until the launcher ends this process, which must have told by then how it went.
        """
        if self.board is not None:
            try:
                self.board.close()
            except Exception as error:
                self._console.say(f"TensorBoard's files could not be ended ({type(error).__name__}: {error})")
        if self.job_status is not None:
            self.job_status.close()
        metrics = self.tracker.close(max(_CLOSE_LEAST, min(_CLOSE, seconds - _CLOSE_LEAST)))
        if metrics:
            self._keep_unsent("unsent-metrics", metrics, f"{len(metrics)} metrics")
        tags = self.tracker.unsent_tags()
        models = self._shown if self._models is not None and self._models.waits() else []
        if tags or models:
            what = [f"{len(tags)} tags"] * bool(tags) + [f"{len(models)} checkpoints as logged models"] * bool(models)
            tags = {**tags, **({_CHECKPOINTS: self._listed} if models else {})}
            left = {"tags": tags, "checkpoints": [asdict(item) for item in models]}
            self._keep_unsent("unsent-tags", left, " and ".join(what))

    def _await_answers(self, seconds: float) -> None:
        """Wait until the tables of answers are stored, as far as that is done in time."""
        end = time.monotonic() + seconds
        for thread in self._keeping:
            thread.join(max(0.0, end - time.monotonic()))

    def _keep_unsent(self, folder: str, content: Any, what: str) -> None:
        key = f"{folder}/{self.attempt}-{int(time.time())}.json"
        self._console.say(f"MLflow did not take {what}; they are in {self._store.uri}/{key}")
        try:
            self._store.put(key, json.dumps(content).encode())
        except Exception as error:  # stores raise many kinds
            self._console.say(f"they could not be stored either ({type(error).__name__}: {error})")

    def _curves(self, loop: Loop, how: str = "") -> dict[str, bytes]:
        progress = loop.progress
        note = f"step {progress.step} of {loop.steps}{' '.join(how.split())[:120]}"
        return {CURVES: draw_curves(loop.log.points, progress.evaluations, progress.resumed, self._spec.run, note)}

    def _keep(self, make: Callable[[], dict[str, bytes]], what: str, seconds: float) -> None:
        """Make files beside the training and keep them, as far as that is done in time."""
        keep_files(make, self._store, self._spec.tracking, self._console.say, what).join(seconds)
