"""The kept checkpoints of runs as MLflow shows them, and what people ask to be done with one.

The trainer makes a logged model of each (`trainer.report.models`). Somebody asks by a tag `dropforge.ask`: on the
MLflow run, where MLflow's page lets tags be edited, as `step-50 evaluate` (or `best`, or `last`); or on the logged
model itself as `evaluate`. The DAG `dropforge_checkpoints` does it, answers by the tag `dropforge.answer` and takes the
ask away. Only REST is spoken here: mlflow takes seconds to import, and asks are looked for all the time.
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

from dropforge import layout
from dropforge.json_objects import MOST_MANIFEST, read_object
from dropforge.rest import MissingError, Rest
from dropforge.run import RunSpec, changed
from dropforge.store import MissingObjectError, Store
from dropforge.text import read_count
from dropforge.tracking import MOST_PARAM, TAG_FAMILY, TAG_NOTE, TAG_RUN, TAG_RUN_DIGEST

VERBS: Final = ("evaluate", "export", "register")
ASK: Final = "dropforge.ask"
ANSWER: Final = "dropforge.answer"
STARTED: Final = "started by "
NOTE: Final = TAG_NOTE
NOTE_LINE: Final = "\n\n---\n\n"  # what stands below it in a description is not the trainer's
_PAGE: Final = 50
_MODELS_OF: Final = 500  # experiments in one search


@dataclass(frozen=True)
class Checkpoint:
    """A logged model that stands for a checkpoint. Nothing here is checked: anybody may write tags.

    :param model: its id in MLflow. :param deleted: when retention was seen to have deleted it; empty while it is kept.
    """

    model: str
    mlflow_run: str
    run: str
    step: int
    tokens: int
    bytes: int
    digest: str
    uri: str
    best: bool
    last: bool
    deleted: str
    eval_loss: float | None
    ask: str
    answer: str


@dataclass(frozen=True)
class Ask:
    """A tag that asks for something. :param model: id of the logged model that has it; empty if its run has it."""

    mlflow_run: str
    text: str
    answer: str
    model: str = ""


@dataclass(frozen=True)
class Order:
    """What is to be done with a checkpoint."""

    verb: str
    checkpoint: Checkpoint


class BadAskError(Exception):
    """What is asked for cannot be done; the text says why."""


def checkpoints(rest: Rest, experiment: str, mlflow_run: str) -> list[Checkpoint]:
    """The checkpoints of an MLflow run, deleted ones too, by their steps."""
    found = _models(rest, [experiment], f"source_run_id = '{mlflow_run}'")
    return sorted((item for row in found if (item := _checkpoint(row)) is not None), key=lambda item: item.step)


def asks(rest: Rest) -> list[Ask]:
    """All that is asked for, on runs and on logged models."""
    found = []
    experiments = list(_experiments(rest))
    for row in _runs(rest, experiments, f"tags.`{ASK}` LIKE '%'"):
        tags = _tags(row["data"])
        found.append(Ask(row["info"]["run_id"], tags.get(ASK, ""), tags.get(ANSWER, "")))
    for start in range(0, len(experiments), _MODELS_OF):
        for row in _models(rest, experiments[start : start + _MODELS_OF], f"tags.`{ASK}` LIKE '%'"):
            tags, info = _tags(row["info"]), row["info"]
            found.append(Ask(info.get("source_run_id", ""), tags.get(ASK, ""), tags.get(ANSWER, ""), info["model_id"]))
    return found


def is_ours(row: Mapping[str, Any], store: Store) -> bool:
    """Whether an MLflow run is of a run in our bucket: several installations may share one MLflow.

    :param row: the run, as MLflow gives it. :param store: the bucket.
    :raises UnreadableError: if the bucket has it, and its `run.json` cannot be read.
    """
    run = _tags(row["data"]).get(TAG_RUN, "")
    if not layout.is_run(run):
        return False
    try:
        spec = RunSpec.read(store, layout.run_key(run))
    except MissingObjectError:
        return False
    return spec.tracking is not None and spec.tracking.run_id == row["info"]["run_id"]


def read(ask: Ask, known: Sequence[Checkpoint]) -> Order:
    """What an ask means; a pure function.

    :param known: checkpoints of its run. :raises BadAskError: if it means nothing, or something that cannot be done.
    """
    words = ask.text.lower().replace(":", " ").split()
    verbs = [word for word in words if word in VERBS]
    rest = [word for word in words if word not in VERBS]
    if len(verbs) != 1:
        near = [match for word in rest for match in difflib.get_close_matches(word, VERBS, 1)]
        hint = f" Did you mean {near[0]}?" if near else ""
        raise BadAskError("it names more than one" if verbs else f"it names none of {', '.join(VERBS)}.{hint}")
    own = [item for item in known if item.model == ask.model]
    chosen = own if ask.model and not rest else _named(rest, known)
    if len(chosen) != 1:
        there = ", ".join(f"step-{item.step}" for item in known if not item.deleted) or "none"
        raise BadAskError(f"write it as `step-N {verbs[0]}`, or best or last for step-N. Kept are: {there}")
    if chosen[0].deleted:
        raise BadAskError(f"step-{chosen[0].step} was deleted by the run's retention ({chosen[0].deleted})")
    return Order(verbs[0], chosen[0])


def _named(words: Sequence[str], known: Sequence[Checkpoint]) -> list[Checkpoint]:
    if len(words) != 1:
        return []
    word = words[0].removeprefix("step-")
    kept = [item for item in known if not item.deleted]
    if word in ("best", "last"):
        return [item for item in kept if (item.best if word == "best" else item.last)]
    of_step = [item for item in known if str(item.step) == word]
    return [item for item in of_step if not item.deleted] or of_step[-1:]


def read_spec(row: Mapping[str, Any], store: Store, root: str) -> RunSpec:
    """The run of an MLflow run as Airflow opened it; a training sets none of the tags that say how.

    :param row: the run, as MLflow gives it. :param store, root: the bucket and its address.
    :raises UnreadableError: if its `run.json` is another by now. :raises MissingObjectError: if it is not there.
    """
    tags = _tags(row["data"])
    run, digest = tags[TAG_RUN], tags.get(TAG_RUN_DIGEST)
    own = f"{root}/{layout.run_prefix(run)}".rstrip("/")
    spec = RunSpec.read_opened(store, run, tags[TAG_FAMILY], own, digest)
    if digest is None:
        _check_compute(spec, row)
    return spec


def _check_compute(spec: RunSpec, row: Mapping[str, Any]) -> None:
    """Hold what a run asks of the cluster to the parameters of its MLflow run, which stay as they were logged.

    For runs without a digest, which an earlier version opened. :raises UnreadableError: naming the key.
    """
    params = {item["key"]: item.get("value", "") for item in row["data"].get("params", [])}
    for name, value in (spec.recipe.get("compute") or {}).items():
        opened = params.get(key := f"compute.{name}")
        if opened is not None and not isinstance(value, Mapping) and opened != str(value)[:MOST_PARAM]:
            raise changed(f"`run.json` of run {spec.run}", key, value, opened)


def check(order: Order, row: Mapping[str, Any], store: Store, root: str) -> RunSpec:
    """See that a checkpoint is what its tags say: a kept one, of a run in our bucket, which MLflow has as its own.

    One in a place of its own (`train.checkpoints`) is looked at by the job, which can reach it.

    :param row: its MLflow run, as MLflow gives it. :param store, root: the bucket and its address.
    :returns: the run as Airflow opened it. :raises BadAskError: if it is not.
    """
    item = order.checkpoint
    where = f"checkpoints/step-{item.step}"
    if item.run != (run := _tags(row["data"]).get(TAG_RUN)):
        raise BadAskError(f"it says that it is of run {item.run!r}, and its MLflow run is that of {run!r}")
    try:
        spec = read_spec(row, store, root)
        own = spec.checkpoints_root
        if item.uri != f"{own}/{where}":
            raise BadAskError(f"its address {item.uri} is not one of run {item.run} in {root}")
        if spec.tracking is None or spec.tracking.run_id != item.mlflow_run:
            raise BadAskError(f"run {item.run} has another MLflow run than this one")
        if own == spec.root:
            key = f"{layout.run_prefix(item.run)}{where}/manifest.json"
            seal = read_object(store, key, "Choose another checkpoint", most=MOST_MANIFEST)
            if seal.get("digest") != item.digest:
                raise BadAskError(f"{item.uri} holds other bytes by now than this one's")
    except MissingObjectError as error:
        raise BadAskError(f"there is no {item.uri} (any more)") from error
    except ValueError as error:
        raise BadAskError(f"{item.uri} cannot be read ({error})") from error
    return spec


def ask_for(rest: Rest, checkpoint: Checkpoint, verb: str) -> None:
    """Ask for something to be done with a checkpoint."""
    rest.call("PATCH", f"logged-models/{checkpoint.model}/tags", _body(checkpoint.model, {ASK: verb}))


def start(rest: Rest, ask: Ask, by: str) -> None:
    """Note who does what was asked for, so that nobody does it twice."""
    _set(rest, ask, f"{ask.text}: {STARTED}{by}")


def started_by(ask: Ask) -> str:
    """Who has begun to do it; empty if nobody has."""
    head, _, by = ask.answer.partition(f": {STARTED}")
    return by if head == ask.text else ""


def answer(rest: Rest, ask: Ask, text: str, checkpoint: Checkpoint | None = None) -> None:
    """Answer an ask and take it away; an answer that was given before is given again.

    What somebody has asked for instead meanwhile stays: it is an ask of its own.

    :param checkpoint: whose description tells it too.
    """
    _set(rest, ask, f"{ask.text}: {text}"[:5000])
    if checkpoint is not None:
        _describe(rest, checkpoint.model, ask, f"{ask.text}: {text}"[:5000])
    try:
        if _tags_now(rest, ask).get(ASK) != ask.text:
            return
        if ask.model:
            rest.call("DELETE", f"logged-models/{ask.model}/tags/{quote(ASK)}")
        else:
            rest.call("POST", "runs/delete-tag", {"run_id": ask.mlflow_run, "key": ASK})
    except MissingError:
        pass  # somebody was faster


def _tags_now(rest: Rest, ask: Ask) -> dict[str, str]:
    if ask.model:
        return _tags(rest.call("GET", f"logged-models/{ask.model}")["model"]["info"])
    return _tags(rest.call("GET", f"runs/get?run_id={ask.mlflow_run}")["run"]["data"])


def _describe(rest: Rest, model: str, ask: Ask, text: str) -> None:
    """Add the answer to the model's description: MLflow's page of a model shows no tags."""
    tags = _tags(rest.call("GET", f"logged-models/{model}")["model"]["info"])
    head, _, below = tags.get(NOTE, "").partition(NOTE_LINE)
    line = f"- {time.strftime('%Y-%m-%d %H:%M', time.gmtime())} {text}"
    if below.endswith(text):
        return
    values = {NOTE: f"{head}{NOTE_LINE}{below}\n{line}".replace(f"{NOTE_LINE}\n", NOTE_LINE)}
    if not ask.model:
        values[ANSWER] = text
    rest.call("PATCH", f"logged-models/{model}/tags", _body(model, values))


def _set(rest: Rest, ask: Ask, text: str) -> None:
    if ask.model:
        rest.call("PATCH", f"logged-models/{ask.model}/tags", _body(ask.model, {ANSWER: text}))
    else:
        rest.call("POST", "runs/set-tag", {"run_id": ask.mlflow_run, "key": ANSWER, "value": text})


def _body(model: str, tags: Mapping[str, str]) -> dict[str, Any]:
    return {"model_id": model, "tags": [{"key": key, "value": value} for key, value in tags.items()]}


def _checkpoint(row: Mapping[str, Any]) -> Checkpoint | None:
    """A logged model as a checkpoint; None if it is none."""
    info = row["info"]
    tags = _tags(info)
    losses = [item["value"] for item in row.get("data", {}).get("metrics", []) if item["key"] == "eval/loss"]
    try:
        return Checkpoint(
            model=info["model_id"],
            mlflow_run=info.get("source_run_id", ""),
            run=tags[TAG_RUN],
            step=_amount(tags["dropforge.step"]),
            tokens=_amount(tags["dropforge.tokens"]),
            bytes=_amount(tags["dropforge.bytes"]),
            digest=tags["dropforge.digest"],
            uri=tags["dropforge.uri"],
            best="dropforge.best" in tags,
            last="dropforge.last" in tags,
            deleted=tags.get("dropforge.deleted", ""),
            eval_loss=float(losses[-1]) if losses else None,
            ask=tags.get(ASK, ""),
            answer=tags.get(ANSWER, ""),
        )
    except (KeyError, ValueError):
        return None


def _amount(tag: str) -> int:
    """:raises ValueError: for what no checkpoint has: a number of hundreds of digits ends who shows it."""
    if (found := read_count(tag)) is None:
        raise ValueError(f"{tag!r:.60} is no amount")
    return found


def _tags(holder: Mapping[str, Any]) -> dict[str, str]:
    return {tag["key"]: tag["value"] for tag in holder.get("tags", [])}


def _models(rest: Rest, experiments: Sequence[str], condition: str) -> Iterator[Mapping[str, Any]]:
    body = {"experiment_ids": list(experiments), "filter": condition, "max_results": _PAGE}
    return rest.pages("logged-models/search", body, "models")


def _runs(rest: Rest, experiments: Sequence[str], condition: str) -> Iterator[Mapping[str, Any]]:
    if not experiments:
        return iter(())
    body = {"experiment_ids": list(experiments), "filter": condition, "max_results": _PAGE}
    return rest.pages("runs/search", body, "runs")


def _experiments(rest: Rest) -> Iterator[str]:
    for row in rest.pages("experiments/search", {"max_results": 1000}, "experiments"):
        yield str(row["experiment_id"])
