"""A run: one attempt to make a model, and the contract between the DAG and the trainer.

Standard library only, because the trainer's image has no pydantic. Everything a rank needs is in `run.json`;
the container gets its address as the one argument.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from typing import Any, Final, Literal

from dropforge import layout
from dropforge.json_objects import UnreadableError, parse_object, read_object, typed
from dropforge.store import Store

DATASET_DIGEST: Final = 36  # characters of a dataset's digest that MLflow has room for
TERMINATION_MESSAGE_LIMIT: Final = 2048  # bytes; the kubelet cuts at 4096 and 12 KiB per pod
_MEND: Final = "Write it with this version of Dropforge"
_SECTIONS: Final = ("base", "data", "curation", "train", "compute", "evaluate", "promote", "drops")


class ExitCode(IntEnum):
    """How the trainer ends. Anything else is an unknown failure."""

    DONE = 0
    BAD_RECIPE = 10
    BAD_DATA = 11
    DIVERGED = 12
    IDLE = 13
    PREEMPTED = 20
    HARDWARE = 21
    NODE = 22  # this node is the cause: another one may do


@dataclass(frozen=True)
class Tracking:
    """The MLflow run that the DAG opened; the trainer only logs into it."""

    uri: str
    run_id: str
    experiment_id: str


@dataclass(frozen=True)
class Start:
    """Where the weights of a run begin if its recipe names more than its base; settled once, when it is planned.

    :param asked: what the recipe says. :param kind: `base` if the family had no champion yet, so that the base it is.
    :param model: address of the folder that takes the base model's place; of a checkpoint it is made by the first job.
    :param digest: of the files of a champion's model, or of the checkpoint.
    :param files: SHA-256 by name of the model's files, where they are known.
    :param run, step: whose checkpoint, or which run made the champion. :param version: of the champion.
    :param origin: `model` and `scratch` of the base that all of this goes back to.
    :param tokens: what has been added to the base's tokenizer on the way.
    """

    asked: str
    kind: Literal["base", "champion", "checkpoint"] = "base"
    model: str = ""
    digest: str = ""
    run: str = ""
    step: int | None = None
    version: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    origin: Mapping[str, Any] = field(default_factory=dict)
    tokens: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.kind == "base":
            return "the base: the family had no champion"
        what = f"version {self.version}, run" if self.kind == "champion" else f"checkpoint step-{self.step} of run"
        return f"{what} {self.run}, digest {self.digest[:12]}"

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Start:
        """From JSON values."""
        return cls(**{**values, "tokens": tuple(values["tokens"])})


@dataclass(frozen=True)
class RunSpec:
    """The content of `run.json`.

    :param run: the run's name, a function of what went in (`run_name`).
    :param recipe: the resolved recipe, as plain values.
    :param root: address of the run's folder (`s3://BUCKET/runs/RUN` or a path): checkpoints, report and model go there.
    :param dataset: address of the dataset's `manifest.json`; shard keys are relative to `data_root`.
    :param drop: provenance: family, drop, id, prefix; `parts`, the drop and id of each upload, if it was several; and
        `retrain`, if the calendar started the run: reason, data, start and its own run.
    :param code: digest of the code that trains; `image` is the image reference it runs in.
    :param start: where its weights begin, if the recipe's `base.start` is not `base`.
    :param date: the day it was planned, `YYYY-MM-DD` in UTC, which a chat template that asks for the date is told.
    """

    run: str
    family: str
    counter: int
    root: str
    data_root: str
    dataset: str
    dataset_digest: str
    recipe: Mapping[str, Any]
    code: str
    image: str = ""
    git: str = ""
    tracking: Tracking | None = None
    drop: Mapping[str, Any] = field(default_factory=dict)
    start: Start | None = None
    date: str = ""

    @property
    def checkpoints_root(self) -> str:
        """Address below which `checkpoints/` lies: the run's folder, unless the recipe names another place."""
        place = (self.recipe.get("train") or {}).get("checkpoints")
        return f"{place.rstrip('/')}/{self.run}" if place else self.root

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), indent=1, sort_keys=True, ensure_ascii=False).encode()

    @classmethod
    def from_json(cls, data: bytes) -> RunSpec:
        """:raises UnreadableError: if the text is not a run."""
        return cls._of(parse_object(data, "run.json", _MEND), "run.json")

    @property
    def digest(self) -> str:
        """SHA-256 of the `run.json` that this version of Dropforge writes of it."""
        return hashlib.sha256(self.to_json()).hexdigest()

    @classmethod
    def read(cls, store: Store, key: str, digest: str | None = None) -> RunSpec:
        """The run whose `run.json` lies there, where pods may write.

        :param digest: of the bytes as Airflow wrote them, kept where pods do not write: without it anything there may
            be a pod's. None for runs that an earlier version opened.
        :raises UnreadableError: if it is not a run, or another one. :raises MissingObjectError: if it is not there.
        """
        return cls._of(read_object(store, key, _MEND, sha256=digest), f"object {store.uri}/{key}")

    @classmethod
    def read_opened(cls, store: Store, run: str, family: str, root: str, digest: str | None) -> RunSpec:
        """A run as Airflow opened it, by what is kept where pods do not write.

        :param run, family, root: what its fields have to be. :param digest: as of `read`.
        :raises UnreadableError: naming what is another by now.
        """
        key = layout.run_key(run)
        spec = cls.read(store, key, digest)
        for name, opened in (("run", run), ("family", family), ("root", root)):
            if (found := getattr(spec, name)) != opened:
                raise changed(f"object {store.uri}/{key}", name, found, opened)
        return spec

    @classmethod
    def _of(cls, values: dict[str, Any], thing: str) -> RunSpec:
        try:
            if values.get("tracking"):
                values["tracking"] = typed(Tracking(**values["tracking"]))
            if values.get("start"):
                values["start"] = typed(Start.read(values["start"]))
            spec = typed(cls(**values))
            _check_recipe(spec.recipe)
            return spec
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UnreadableError(thing, f"it cannot be read ({error!r})", _MEND) from error


def _check_recipe(recipe: Mapping[str, Any]) -> None:
    """:raises TypeError: if what readers of a run look into is of another kind; who builds it looks at the rest."""
    for name in _SECTIONS:
        if not isinstance(recipe.get(name) or {}, Mapping):
            raise TypeError(f"recipe key `{name}` is no section")
    if not isinstance((recipe.get("train") or {}).get("checkpoints") or "", str):
        raise TypeError("recipe key `train.checkpoints` is no text")


def changed(thing: str, name: str, found: object, opened: object) -> UnreadableError:
    """The error of a `run.json` in which a value is another than the one with which the run was opened."""
    cause = f"it was changed: `{name}` is {found!r:.80}, and the run was opened with {opened!r:.80}"
    return UnreadableError(thing, cause, "Restore it from the bucket's versions")


def wrong_address(address: str, *, folder: bool = False) -> str | None:
    """What is wrong with a place for checkpoints: an absolute folder, or `s3://BUCKET[/PREFIX]`; None if nothing is.

    :param folder: whether it must be a folder.
    """
    if address.startswith("s3://") and not folder:
        if "@" in address or "?" in address:
            return "an address carries no credentials; they come from the environment (AWS_*)"
        return None if re.fullmatch(r"s3://[a-z0-9][a-z0-9.-]*[a-z0-9](/[^\s]*)?", address) else "it names no bucket"
    if not address.startswith("/") or ".." in address.split("/"):
        return "it is no absolute folder" + ("" if folder else " and no `s3://` address")
    return None


def run_name(family: str, recipe: Mapping[str, Any], dataset_digest: str, code: str, counter: int = 1) -> str:
    """The run's name: the same recipe, data, code and counter give the same name."""
    content = json.dumps([recipe, dataset_digest, code, counter], sort_keys=True, separators=(",", ":"))
    name = f"{family}-{hashlib.sha256(content.encode()).hexdigest()[:12]}"
    return name if counter == 1 else f"{name}-{counter}"


def job_name(run: str, purpose: str = "") -> str:
    """A job's name for a run: DNS-1035, and short enough for a pod's `-node-0-9999-abcde` of a TrainJob."""
    tail = hashlib.sha256(f"{run}/{purpose}".encode()).hexdigest()[:10]
    head = re.sub(r"[^a-z0-9]+", "-", f"{purpose}-{run}".lower()).strip("-")[:34].rstrip("-")
    return f"{head}-{tail}" if head[:1].isalpha() else f"df-{head[:31].rstrip('-')}-{tail}"


def termination_message(
    code: int,
    message: str,
    *,
    rank: int | None = None,
    signal: str | None = None,
    step: int | None = None,
    steps: int | None = None,
) -> bytes:
    """The pod's termination message: JSON of at most 2,048 bytes; a long message is cut in its middle.

    :param signal: name of the one that ended the rank, if one did.
    """
    body: dict[str, Any] = {"exit_code": code, "message": message, "rank": rank, "step": step, "steps": steps}
    if signal is not None:
        body["signal"] = signal
    data = json.dumps(body, ensure_ascii=False).encode()
    while len(data) > TERMINATION_MESSAGE_LIMIT:
        keep = max(0, len(body["message"]) - (len(data) - TERMINATION_MESSAGE_LIMIT) - 16)
        body["message"] = f"{body['message'][: keep // 2]} ... {body['message'][-(keep - keep // 2) :] if keep else ''}"
        data = json.dumps(body, ensure_ascii=False).encode()
    return data
