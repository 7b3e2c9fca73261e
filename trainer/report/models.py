"""Each kept checkpoint as a logged model of the MLflow run: `step-N` with its figures, marked when it is deleted.

What MLflow shows is made like what exists, as often as it takes: a checkpoint is known by its digest, so another
attempt or a repeated call finds the model that is there. Where they cannot be made, as on a server without logged
models, the run has the tag `dropforge.checkpoints` instead.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from dropforge.checkpoints import NOTE, NOTE_LINE
from dropforge.rest import AbsentError, DeniedError, MissingError, RefusedError, Rest, reached, speaks_rest
from dropforge.run import Tracking
from trainer.report.tracking import Tracker
from trainer.state.checkpoint import Seal
from trainer.state.retention import best_steps

PREFIX: Final = "dropforge."
BEST, LAST, DELETED = f"{PREFIX}best", f"{PREFIX}last", f"{PREFIX}deleted"
_READY: Final = "LOGGED_MODEL_READY"
_GONE: Final = "LOGGED_MODEL_UPLOAD_FAILED"  # of MLflow's states the one without files to load
_PAGE: Final = 50


@dataclass(frozen=True)
class Shown:
    """A checkpoint as it is to be seen.

    :param facts: what never changes, by name. :param marks: tags that come and go.
    :param metrics: figures of the evaluation at its step, by their names in the run.
    """

    step: int
    digest: str
    facts: Mapping[str, str]
    marks: Mapping[str, str]
    metrics: Mapping[str, float]

    @property
    def tags(self) -> dict[str, str]:
        return {f"{PREFIX}{key}": value for key, value in self.facts.items()} | dict(self.marks)


@dataclass
class Model:
    """A logged model that MLflow has."""

    id: str
    digest: str
    tags: dict[str, str]
    metrics: set[str] = field(default_factory=set)
    ready: bool = False


def shown(root: str, seals: Sequence[Seal], evaluations: Sequence[Mapping[str, Any]]) -> list[Shown]:
    """What is to be seen of the checkpoints that exist.

    :param root: address of the run's folder. :param evaluations: as `Progress.evaluations`.
    """
    best, last = best_steps(seals, 1), max((seal.step for seal in seals), default=None)
    figures = {
        item["step"]: {
            key: float(value)
            for key, value in item.items()
            if key.startswith(("eval/", "gen/")) and isinstance(value, int | float) and math.isfinite(value)
        }
        for item in evaluations
    }
    return [
        Shown(
            seal.step,
            seal.digest,
            {
                "step": str(seal.step),
                "tokens": str(seal.tokens),
                "bytes": str(seal.bytes),
                "digest": seal.digest,
                "uri": f"{root}/checkpoints/step-{seal.step}",
                "run": seal.run,
            },
            {**({BEST: "true"} if seal.step in best else {}), **({LAST: "true"} if seal.step == last else {})},
            figures.get(seal.step, {}),
        )
        for seal in seals
    ]


def changes(wanted: Shown | None, model: Model, now: str) -> tuple[dict[str, str], list[str]]:
    """Tags to set and tags to take away; a pure function. :param wanted: None if there is no such checkpoint."""
    if wanted is None:
        return {} if DELETED in model.tags else {DELETED: now}, [key for key in (BEST, LAST) if key in model.tags]
    new = {key: value for key, value in wanted.tags.items() if model.tags.get(key) != value}
    return new, [key for key in (BEST, LAST, DELETED) if key in model.tags and key not in wanted.tags]


def note(tags: Mapping[str, str], before: str = "") -> str:
    """The description of a model, the one place where MLflow's page of it shows a mark.

    :param before: the one that it has: what stands below its line is others' and stays.
    """
    below = before.partition(NOTE_LINE)[2]
    words = [word for word, key in (("best", BEST), ("last", LAST)) if key in tags]
    if DELETED in tags:
        head = f"**Deleted** by the run's retention, noticed at {tags[DELETED]}."
        use = ""
    else:
        head = f"Kept: **{' and '.join(words)}**." if words else "Kept."
        ask = (
            f"`{tags[f'{PREFIX}run']}`, the tag `dropforge.ask` with the value `step-{tags[f'{PREFIX}step']} evaluate`"
        )
        use = f"\n\nTo use it, add to its run {ask} (or `export`, or `register`)."
    tokens, size = _count(tags[f"{PREFIX}tokens"], ",", " tokens"), _count(tags[f"{PREFIX}bytes"], ".1f", " MB", 1e6)
    text = f"{head} {tokens}, {size}, `{tags[f'{PREFIX}uri']}`{use}"
    return text + (NOTE_LINE + below if below else "")


def _count(text: str, form: str, unit: str, part: float = 1) -> str:
    """A number from a tag, for people; what a person wrote in its place as it stands."""
    try:
        number = int(text)
    except ValueError:
        return f"{text}{unit if part == 1 else ' bytes'}"
    return f"{number / part if part != 1 else number:{form}}{unit}"


class Models:
    """Keeps MLflow's logged models like the checkpoints; a task of the tracker's thread."""

    def __init__(
        self,
        rest: Rest,
        tracking: Tracking,
        say: Callable[[str], None],
        dataset: tuple[str, str] | None = None,
        on_absent: Callable[[], None] = lambda: None,
    ) -> None:
        self._rest = rest
        self._on_absent = on_absent
        self._tracking = tracking
        self._say = say
        self._dataset = {} if dataset is None else {"dataset_name": dataset[0], "dataset_digest": dataset[1]}
        self._wanted: list[Shown] | None = None
        self._found: dict[str, Model] | None = None
        self._given_up: set[str] = set()
        #: Whether this server has no logged models.
        self.absent = False

    def show(self, checkpoints: list[Shown]) -> None:
        """Have exactly these seen as kept; returns at once."""
        self._wanted = checkpoints

    def waits(self) -> bool:
        return self._wanted is not None and not self.absent

    def work(self) -> None:
        """Make MLflow's models like the checkpoints. :raises Exception: if the server is away; nothing is lost."""
        wanted = self._wanted
        if wanted is None:
            return
        try:
            if self._found is None:
                self._found = self._search()
            self._sync(wanted, self._found)
        except AbsentError:
            self.absent = True
            self._on_absent()
            self._say("this MLflow has no logged models: checkpoints are in the run's tag dropforge.checkpoints only")
        except Exception:
            self._found = None  # what was sent may have arrived although no answer did
            raise
        if self._wanted is wanted:  # nothing newer came meanwhile
            self._wanted = None

    def _sync(self, wanted: Sequence[Shown], found: dict[str, Model]) -> None:
        by_digest = {item.digest: item for item in wanted}
        for item in wanted:
            self._each(item.digest, lambda item=item: self._complete(item, found))  # type: ignore[misc]
        # Marks are taken away before they are given: there are never two best ones.
        for digest, model in sorted(found.items(), key=lambda pair: by_digest.get(pair[0]) is not None):
            self._each(digest, lambda digest=digest, model=model: self._tag(by_digest.get(digest), model))  # type: ignore[misc]

    def _each(self, digest: str, do: Callable[[], None]) -> None:
        """One checkpoint that MLflow does not take must not keep the others away."""
        if digest in self._given_up:
            return
        try:
            do()
        except (RefusedError, DeniedError, KeyError) as error:  # a person may have deleted it, or its tags
            # What is not there may be denied; what is there and denied, a person may mend.
            if isinstance(error, AbsentError) or (type(error) is DeniedError and digest in self._search()):
                raise
            self._say(f"MLflow does not take checkpoint {digest[:12]} as a logged model ({error})")
            self._given_up.add(digest)

    def _complete(self, item: Shown, found: dict[str, Model]) -> None:
        """Have the model, its place in the run and its figures; it is ready last, so a kill leaves no half of it."""
        model = found.get(item.digest)
        if model is None:
            body = {
                "experiment_id": self._tracking.experiment_id,
                "name": f"step-{item.step}",
                "model_type": "checkpoint",
                "source_run_id": self._tracking.run_id,
                "tags": _pairs({key: value for key, value in item.tags.items() if key not in (BEST, LAST)}),
                "params": _pairs(item.facts),
            }
            model = found[item.digest] = _model(self._rest.call("POST", "logged-models", body)["model"])
        missing = [key for key in item.metrics if key not in model.metrics]
        if missing:
            rows = [self._metric(key, item.metrics[key], item.step, model.id) for key in missing]
            self._rest.call("POST", "runs/log-batch", {"run_id": self._tracking.run_id, "metrics": rows})
            model.metrics.update(missing)
        if not model.ready:
            with suppress(RefusedError):  # it is there: a killed attempt got this far
                body = {"run_id": self._tracking.run_id, "models": [{"model_id": model.id, "step": item.step}]}
                self._rest.call("POST", "runs/outputs", body)
            self._rest.call("PATCH", f"logged-models/{model.id}", {"model_id": model.id, "status": _READY})
            model.ready = True

    def _metric(self, key: str, value: float, step: int, model: str) -> dict[str, Any]:
        """The point that the run has of this evaluation: the same one again, so that its curve gets no second."""
        history = self._rest.call("GET", f"metrics/get-history?run_id={self._tracking.run_id}&metric_key={key}")
        point = next((row for row in history.get("metrics", []) if int(row.get("step", 0)) == step), None)
        when = {"value": value, "timestamp": int(time.time() * 1000)} if point is None else point
        row = {"key": key, "value": when["value"], "timestamp": when["timestamp"], "step": step, "model_id": model}
        return row | self._dataset

    def _tag(self, wanted: Shown | None, model: Model) -> None:
        new, gone = changes(wanted, model, time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
        for key in gone:
            with suppress(MissingError):  # a person was faster
                self._rest.call("DELETE", f"logged-models/{model.id}/tags/{key}")
            del model.tags[key]
        told = note({**model.tags, **new})
        if not model.tags.get(NOTE, "").startswith(told):
            now = _model(self._rest.call("GET", f"logged-models/{model.id}")["model"]).tags  # others write there too
            new[NOTE] = note({**model.tags, **new}, now.get(NOTE, ""))
        if new:
            body = {"model_id": model.id, "tags": _pairs(new)}
            self._rest.call("PATCH", f"logged-models/{model.id}/tags", body)
            model.tags |= new
        if wanted is None and model.ready:
            self._rest.call("PATCH", f"logged-models/{model.id}", {"model_id": model.id, "status": _GONE})
            model.ready = False

    def _search(self) -> dict[str, Model]:
        """The logged models of this run's checkpoints, by digest."""
        found: dict[str, Model] = {}
        body = {
            "experiment_ids": [self._tracking.experiment_id],
            "filter": f"source_run_id = '{self._tracking.run_id}'",
            "max_results": _PAGE,
        }
        for row in self._rest.pages("logged-models/search", body, "models"):
            model = _model(row)
            if model.digest:
                found.setdefault(model.digest, model)
        return found


def _pairs(values: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"key": key, "value": value} for key, value in values.items()]


def _model(row: Mapping[str, Any]) -> Model:
    info, data = row["info"], row.get("data", {})
    tags = {tag["key"]: tag["value"] for tag in info.get("tags", [])}
    metrics = {metric["key"] for metric in data.get("metrics", [])}
    return Model(info["model_id"], tags.get(f"{PREFIX}digest", ""), tags, metrics, info.get("status") == _READY)


def make_models(
    tracking: Tracking | None,
    tracker: Tracker,
    say: Callable[[str], None],
    dataset: tuple[str, str] | None = None,
    on_absent: Callable[[], None] = lambda: None,
) -> Models | None:
    """The models of a run, worked on by its tracker; None where MLflow is not spoken to over REST.

    :param dataset: name and digest of what they are measured on, as the run's inputs have them.
    :param on_absent: called once if the server has no logged models.
    """
    if tracking is None or not speaks_rest(reached(tracking).uri):
        return None
    tracking = reached(tracking)
    models = Models(Rest(tracking.uri), tracking, say, dataset, on_absent)
    tracker.add(models)
    return models
