"""What one process per node does for all, before the ranks form a group: read, check, tokenise, pack.

Slow work here can break no collective. The first node's first process does it and stores what comes of it in the run's
folder; the first processes of other nodes, and those of later attempts, take it over from there. The other ranks
wait for one file; if the process that they wait for fails, the launcher ends them.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dropforge.errors import DataError, RecipeError
from dropforge.hub import is_commit, is_hub_id
from dropforge.run import RunSpec
from dropforge.store import Store, open_store
from trainer.compat import versions
from trainer.config import Settings
from trainer.data.chat import check_left_out
from trainer.data.labels import LABELS, choose_labels, find_labels, for_labels, made_for, read_labels, told
from trainer.data.mix import Mix, make_mix
from trainer.data.node_cache import NodeCache
from trainer.data.packing import Packs
from trainer.data.plan import make_packs
from trainer.data.plan_store import PlanStore, UnusableError
from trainer.data.prompts import Prompt, read_prompts
from trainer.data.rows import Row, load_manifest, read_rows, texts
from trainer.data.seq2seq import for_seq2seq
from trainer.data.template_date import told_date, with_date
from trainer.data.tokenizer import TRAINING_CHARACTERS, add_tokens, load_tokenizer, train_tokenizer, wrap_tokenizer
from trainer.data.tokens import Tokens
from trainer.data.user_code import UserCode, bring_code, load_code
from trainer.model.build import fetch_base, head_labels
from trainer.model.scratch import check_scratch, longest
from trainer.model.start import BASE, check_files, check_start
from trainer.model.transformers4 import make_readable
from trainer.pretrained import load_config
from trainer.token_cache import TokenCache
from trainer.tokenise import KEYS, PROMPTS, SOURCES, tokenise

TOKENIZER: Final = "tokenizer/tokenizer.json"
PATIENCE: Final = 3600.0  # seconds that a node waits for what the first one prepares, before it does so itself
_READY: Final = "ready.json"
_CODE_FOLDER: Final = "code"  # in the scratch folder
_PLAN: Final = "plan"  # the folder in the scratch folder
_LOOK: Final = 5.0  # seconds, at most, between two looks for what another node prepares
_DATA: Final = Path(__file__).parent / "data"
_CODE: Final = (
    "chat",
    "prompts",
    "template",
    "tokenizer",
    "tokens",
)  # of trainer/data: what the tokens follow from, besides rows and settings


@dataclass(frozen=True)
class Prepared:
    """What lies in the node's scratch folder.

    :param base: folder of the base model; empty for a model from a config.
    :param plan_content: digest of the training documents and the tokenizer.
    :param row_keys: content keys of the training rows, in their order.
    :param mix: the sources of the documents, if the recipe mixes them.
    :param packs: the packed plan's packs; None if the recipe packs nothing. Padded, each document is its own.
    :param prompts: of the evaluation by generation, if the recipe asks for one.
    :param labels: of a classifier, in the order of their numbers; None for other tasks.
    :param code: the user's own functions.
    """

    train: Tokens
    eval: Tokens
    tokenizer: Any
    base: str
    plan_content: str
    row_keys: NDArray[np.void]
    mix: Mix | None = None
    packs: Packs | None = None
    prompts: Sequence[Prompt] = ()
    labels: tuple[str, ...] | None = None
    code: UserCode = field(default_factory=UserCode)


def prepare(
    spec: RunSpec,
    settings: Settings,
    scratch: Path,
    check: Callable[[], None],
    say: Callable[[str], None],
    *,
    first: bool = True,
    keep: bool = True,
    share: bool = True,
    weights: bool = True,
    node: NodeCache | None = None,
    patience: float = PATIENCE,
) -> None:
    """Fill the scratch folder.

    :param check: called now and then; it may raise to stop.
    :param first: whether this is the first node; the others wait for what it stores.
    :param keep: whether to take over, and to store, what is prepared in the run's folder.
    :param share: whether to take over, and to store, tokens beside the dataset, for other runs; only with `keep`.
    :param weights: whether the base model's are needed; those of a model that the run goes on from are held to their
        digests either way.
    :param node: the node's cache; the base model's files are read there until it is released.
    :raises DataError: if the dataset is not what the run was planned for.
    :raises DropforgeError: if what was made here is not what is stored.
    """
    manifest = load_manifest(spec)
    data, run = open_store(spec.data_root), open_store(spec.root)
    end = time.monotonic() + (0.0 if first or not keep else patience)
    check_start(settings.base, spec.start)
    code = bring_code(settings.code, scratch / _CODE_FOLDER)
    code.check_metrics(settings.generation)
    base = ""
    if settings.base.scratch is not None:
        check_scratch(settings.base.scratch, settings.task)
    if settings.base.model is not None:
        if keep and is_hub_id(settings.base.model) and not is_commit(settings.base.revision):
            raise RecipeError(
                "recipe key `base.revision`",
                "run.json names no commit of the hub, so two nodes or two attempts could take different weights",
                "Start a new run, whose plan pins it",
            )
        whole = weights or bool(spec.start and spec.start.files)
        model, revision, to = settings.base.model, settings.base.revision, scratch / "base"
        base = str(fetch_base(model, revision, to, weights=whole, node=node, check=check))
        check_files(spec.start, Path(base))
    labels = None
    if settings.task == "classification":
        if not comes(lambda: run.stat(LABELS) is not None, end, check):
            name = f"train split of {manifest.family}/{manifest.digest[:12]}"
            _publish_labels(run, read_rows(data, manifest, "train", code.rows), name, settings, base, say)
        labels = read_labels(run)
    if not base and not comes(lambda: run.stat(TOKENIZER) is not None, end, check):
        say("training the tokenizer")
        rows = partial(read_rows, data, manifest, "train", code.rows)
        _publish_tokenizer(run, lambda: texts(rows(), TRAINING_CHARACTERS), settings)
    check()
    tokenizer = open_tokenizer(settings, base, run, spec.date)
    if base:
        check_saved(tokenizer, base)
    if told := told_date(tokenizer.chat_template, spec.date):
        say(f"the chat template asks for the date, and gets the run's: {told}")
    folder = scratch / _PLAN
    (scratch / _READY).unlink(missing_ok=True)  # of another run, in a folder that is used again
    shutil.rmtree(folder, ignore_errors=True)
    stored = PlanStore(run, identity(spec, settings, tokenizer, labels, code), cache=node)
    if keep and comes(lambda: _take_over(stored, folder, check, say), end, check):
        say(f"tokens and plan are those of {stored.uri}")
    else:
        staging = scratch / f".{_PLAN}"
        shutil.rmtree(staging, ignore_errors=True)
        cache = TokenCache.of(spec, manifest, stored.parts, node) if keep and share else None
        if cache is None or not cache.take(staging, check, say):
            tokenise(spec, settings, manifest, tokenizer, labels, code, staging, check, say)
            if cache is not None:
                cache.give(staging, say)
        _pack(spec, settings, staging)
        check()
        staging.rename(folder)
        if keep:
            stored.keep(folder)
    train, evaluation = Tokens.load(folder / "train"), Tokens.load(folder / "eval")
    _check(spec, settings, train, evaluation)
    names = ["ids", "trained", "offsets", *(["labels"] if labels else [])]
    content = [_sha256(folder / "train" / f"{name}.npy") for name in names] + [_fingerprint(tokenizer)]
    ready = {"base": base, "content": hashlib.sha256("".join(content).encode()).hexdigest()}
    temporary = scratch / f".{_READY}"
    temporary.write_text(json.dumps(ready))
    temporary.rename(scratch / _READY)


def await_prepared(settings: Settings, spec: RunSpec, scratch: Path, check: Callable[[], None]) -> Prepared:
    """Open what the node's first process prepared, once it is there."""
    while not (scratch / _READY).exists():
        check()
        time.sleep(0.05)
    ready = json.loads((scratch / _READY).read_text())
    folder = scratch / _PLAN
    train = Tokens.load(folder / "train")
    run = open_store(spec.root)
    return Prepared(
        train=train,
        eval=Tokens.load(folder / "eval"),
        tokenizer=open_tokenizer(settings, ready["base"], run, spec.date),
        base=ready["base"],
        plan_content=ready["content"],
        row_keys=np.load(folder / KEYS, mmap_mode="r"),
        mix=_mix(settings, folder, train),
        packs=Packs.load(folder / "packs") if _packs(settings) else None,
        prompts=read_prompts(folder / PROMPTS) if settings.generation is not None else (),
        labels=read_labels(run) if settings.task == "classification" else None,
        code=load_code(settings.code, scratch / _CODE_FOLDER),
    )


def _packs(settings: Settings) -> bool:
    """Whether documents may share a row."""
    return settings.train.packing != "off" and settings.task == "causal-lm"


def identity(
    spec: RunSpec,
    settings: Settings,
    tokenizer: Any,
    labels: tuple[str, ...] | None = None,
    code: UserCode | None = None,
) -> dict[str, Any]:
    """Everything that tokens and packs follow from, as JSON values."""
    train, found = settings.train, versions()
    special = {key: str(value) for key, value in tokenizer.special_tokens_map.items()}
    seq2seq = settings.task == "sequence-to-sequence"
    names = (*_CODE, *(["labels"] if labels else []), *(["seq2seq"] if seq2seq else []))
    side, split = tokenizer.truncation_side, getattr(tokenizer, "split_special_tokens", False)
    return {
        "dataset": spec.dataset_digest,
        "tokenizer": _fingerprint(tokenizer),
        "chat_template": tokenizer.chat_template,
        "special_tokens": special,
        "sequence_length": train.sequence_length,
        "loss_on": train.loss_on,
        "packing": train.packing,
        "max_rows": train.max_rows,
        "eval_rows": settings.eval_rows,
        "mix": settings.mix,
        "prompts": None if settings.generation is None else settings.generation.rows,
        "code": hashlib.sha256(b"".join((_DATA / f"{name}.py").read_bytes() for name in names)).hexdigest(),
        # Of the tokenizer's settings those that are not as nearly all have them.
        **({"truncation_side": side} if side != "right" else {}),
        **({"split_special_tokens": True} if split else {}),
        **({"labels": list(labels)} if labels else {}),
        **({"task": settings.task} if seq2seq else {}),
        **({"row_functions": code.rows_facts} if code is not None and code.rows_facts else {}),
        "versions": {key: found[key] for key in sorted(found) if key in ("tokenizers", "transformers")},
    }


def _pack(spec: RunSpec, settings: Settings, folder: Path) -> None:
    """Packs of the tokens in a folder, written beside them."""
    train, evaluation = Tokens.load(folder / "train"), Tokens.load(folder / "eval")
    _check(spec, settings, train, evaluation)
    mix = _mix(settings, folder, train)
    if _packs(settings):
        make_packs(train.lengths, settings.train.sequence_length, True, mix).save(folder / "packs")


def _check(spec: RunSpec, settings: Settings, train: Tokens, evaluation: Tokens) -> None:
    """:raises DataError: if too few rows teach anything."""
    if not len(train):
        raise _no_target(spec.dataset, "training", train.facts)
    check_left_out(f"training rows of {spec.dataset}", train.facts, settings.max_left_out)
    if not len(evaluation):
        raise _no_target(spec.dataset, "evaluation", evaluation.facts)
    if settings.task == "classification":  # what is left out there makes the figures better than the model
        check_left_out(f"evaluation rows of {spec.dataset}", evaluation.facts, settings.max_left_out)


def _mix(settings: Settings, folder: Path, train: Tokens) -> Mix | None:
    if settings.mix is None:
        return None
    names = tuple(json.loads((folder / SOURCES).read_text()))
    source = np.load(folder / "row_sources.npy", mmap_mode="r")[train.rows]
    return make_mix(settings.mix, names, source, np.bincount(source, minlength=len(names)))


def _take_over(stored: PlanStore, folder: Path, check: Callable[[], None], say: Callable[[str], None]) -> bool:
    try:
        return stored.fetch(folder, check)
    except UnusableError as error:
        say(f"the plan {stored.uri} is not used: {error}")
        return False


def comes(look: Callable[[], bool], end: float, check: Callable[[], None]) -> bool:
    """Whether something is there, or comes until `end`; looked for once at least, and ever more seldom."""
    pause = 0.1
    while not look():
        until = time.monotonic() + pause
        if time.monotonic() >= end:
            return False
        while time.monotonic() < until:
            check()
            time.sleep(0.05)
        pause = min(_LOOK, 1.5 * pause)
    return True


def check_saved(tokenizer: Any, base: str) -> None:
    """Save a base model's tokenizer and config once for nothing, as they are saved with the trained model after all
    steps.

    :raises DataError: if their library does not write what it has read, as chat templates whose names are paths.
    """
    config = None
    with suppress(OSError, ValueError):  # whoever loads the weights tells it
        config = load_config(base)
    with tempfile.TemporaryDirectory(prefix="dropforge-tokenizer-") as folder:
        try:
            tokenizer.save_pretrained(folder)
            if config is not None:
                config.save_pretrained(folder)
            make_readable(Path(folder))
        except OSError:  # of this machine, not of the model
            raise
        except Exception as error:
            cause = f"they could not be saved with the trained model ({' '.join(str(error).split())[:300]})"
            mend = "Fix its tokenizer_config.json, its chat templates or its config.json, or name another base model"
            raise DataError(f"tokenizer and config of {base}", cause, mend) from error


def open_tokenizer(settings: Settings, base: str, run: Store, date: str) -> Any:
    """The run's tokenizer: the published one of a model from a config, or the base model's own.

    :param date: what a chat template that asks for it is told (`RunSpec.date`).
    :raises RecipeError: if a classifier's rows would be longer than it is made for.
    """
    classifies = settings.task == "classification"
    if settings.base.scratch is not None:
        tokenizer = wrap_tokenizer(run.get(TOKENIZER), longest(settings.base.scratch))
    else:
        tokenizer = load_tokenizer(base, settings.base.revision, ends=not classifies)
        add_tokens(tokenizer, settings.base.new_tokens or ())
        tokenizer.chat_template = with_date(tokenizer.chat_template, date)
    if settings.task == "sequence-to-sequence":
        return for_seq2seq(tokenizer)
    if not classifies:
        return tokenizer
    if settings.train.sequence_length > (most := made_for(tokenizer)):  # less than the embeddings of some encoders
        raise RecipeError(
            "recipe key `train.sequence_length`",
            f"{settings.train.sequence_length} is longer than the {most} tokens that the base model's tokenizer is "
            "made for",
            f"Set it to {most} or less",
        )
    return for_labels(tokenizer)


def _no_target(dataset: str, split: str, facts: dict[str, Any]) -> DataError:
    first = next((f": {item['reason']}" for item in facts["left_out"]), "")
    return DataError(dataset, f"no {split} row has a token to learn from{first}", "Check the roles in the drop")


def _publish_labels(
    run: Store,
    rows: Iterable[Row],
    name: str,
    settings: Settings,
    base: str,
    say: Callable[[str], None],
) -> None:
    # Of all training rows, so that a smoke run on few of them makes the same model.
    head = head_labels(base, settings.base.revision) if base else None
    found = find_labels(rows, name)
    chosen = choose_labels(found, head, goes_on=settings.base.start != BASE)
    if absent := [label for label in chosen if label not in found]:
        say(f"no training row has {len(absent)} of the labels that the model knows: {told(absent)}")
    run.put_if_absent(LABELS, json.dumps(chosen, ensure_ascii=False).encode())


def _publish_tokenizer(run: Store, source: Callable[[], Iterator[str]], settings: Settings) -> None:
    # Whoever comes second takes what is there: all nodes and attempts share the same bytes.
    assert settings.base.scratch is not None
    if run.stat(TOKENIZER) is None:
        framed, ended = settings.task == "classification", settings.task == "sequence-to-sequence"
        trained = train_tokenizer(source(), settings.base.scratch.vocabulary, framed=framed, ended=ended)
        run.put_if_absent(TOKENIZER, trained)


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _fingerprint(tokenizer: Any) -> str:
    return hashlib.sha256(str(tokenizer.backend_tokenizer.to_str()).encode()).hexdigest()


def node_cache(settings: Settings, say: Callable[[str], None]) -> AbstractContextManager[NodeCache | None]:
    """The cache of the node, if the recipe names one; what was read there is held until the end of the `with`."""
    if settings.data_cache is None:
        return nullcontext()
    return NodeCache(Path(settings.data_cache), settings.data_cache_bytes, say)


def scratch_folder() -> Path | None:
    """The folder that the launcher made for the ranks of this node."""
    name = os.environ.get("DROPFORGE_SCRATCH")
    return Path(name) if name else None
