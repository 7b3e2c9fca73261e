"""What one process per node does for all, before the ranks form a group: read, check, tokenise.

Slow work here can break no collective. The others wait for one file; if this process fails, the launcher ends them.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dropforge.errors import DataError
from dropforge.run import RunSpec
from dropforge.store import Store, open_store
from trainer.config import Settings
from trainer.data.chat import check_left_out, documents, make_encoder
from trainer.data.hub import fetch_from_hub
from trainer.data.rows import Row, check_keys, load_manifest, read_rows, texts
from trainer.data.tokenizer import TRAINING_CHARACTERS, load_tokenizer, train_tokenizer, wrap_tokenizer
from trainer.data.tokens import Tokens, collect
from trainer.model.build import fetch_folder, is_hub_id

TOKENIZER: Final = "tokenizer/tokenizer.json"
_READY: Final = "ready.json"
_KEYS: Final = "train-keys.npy"


@dataclass(frozen=True)
class Prepared:
    """What lies in the node's scratch folder.

    :param base: folder of the base model; empty for a model from a config.
    :param plan_content: digest of the training documents and the tokenizer.
    :param row_keys: content keys of the training rows, in their order.
    """

    train: Tokens
    eval: Tokens
    tokenizer: Any
    base: str
    plan_content: str
    row_keys: NDArray[np.void]


def prepare(
    spec: RunSpec, settings: Settings, scratch: Path, check: Callable[[], None], say: Callable[[str], None]
) -> None:
    """Fill the scratch folder. :param check: called now and then; it may raise to stop.

    :raises DataError: if the dataset is not what the run was planned for.
    """
    manifest = load_manifest(spec)
    data, run = open_store(spec.data_root), open_store(spec.root)
    base = ""
    if settings.base.model is not None:
        model = settings.base.model
        hub = is_hub_id(model)
        base = str(fetch_from_hub(model, settings.base.revision) if hub else fetch_folder(model, scratch / "base"))
    else:
        say("training the tokenizer")
        _publish_tokenizer(run, lambda: texts(read_rows(data, manifest, "train"), TRAINING_CHARACTERS), settings)
    check()
    tokenizer = open_tokenizer(settings, base, run)
    keys: dict[str, list[bytes]] = {"train": [], "eval": []}

    def seen(split: str) -> Iterator[Row]:
        for row in read_rows(data, manifest, split):
            keys[split].append(row.key)
            if len(keys[split]) % 512 == 0:
                check()
            yield row

    say(f"tokenising {manifest.rows('train')} rows")
    encoder = make_encoder(tokenizer, settings.train.loss_on)
    facts: dict[str, Any] = {}
    rows = seen("train")
    chosen_rows = islice(rows, settings.train.max_rows)
    train = collect(documents(encoder, chosen_rows, settings.train.sequence_length, facts), facts)
    for _ in rows:  # the rest is read for its keys
        pass
    rows = seen("eval")
    chosen = list(islice(rows, settings.eval_rows))
    for _ in rows:
        pass
    check_keys(manifest, keys)
    if not len(train):
        raise _no_target(spec.dataset, "training", facts)
    check_left_out(f"training rows of {spec.dataset}", facts, settings.max_left_out)
    evaluation = encode_eval(tokenizer, chosen, settings)
    if not len(evaluation):
        raise _no_target(spec.dataset, "evaluation", evaluation.facts)
    train.save(scratch / "train")
    np.save(scratch / _KEYS, np.array(keys["train"], dtype="V16"))
    evaluation.save(scratch / "eval")
    ready = {"base": base, "content": hashlib.sha256((train.digest() + _fingerprint(tokenizer)).encode()).hexdigest()}
    temporary = scratch / f".{_READY}"
    temporary.write_text(json.dumps(ready))
    temporary.rename(scratch / _READY)


def await_prepared(settings: Settings, spec: RunSpec, scratch: Path, check: Callable[[], None]) -> Prepared:
    """Open what the node's first process prepared, once it is there."""
    while not (scratch / _READY).exists():
        check()
        time.sleep(0.05)
    ready = json.loads((scratch / _READY).read_text())
    return Prepared(
        train=Tokens.load(scratch / "train"),
        eval=Tokens.load(scratch / "eval"),
        tokenizer=open_tokenizer(settings, ready["base"], open_store(spec.root)),
        base=ready["base"],
        plan_content=ready["content"],
        row_keys=np.load(scratch / _KEYS, mmap_mode="r"),
    )


def encode_eval(tokenizer: Any, rows: list[Row], settings: Settings) -> Tokens:
    """Evaluation rows as documents."""
    facts: dict[str, Any] = {}
    encoder = make_encoder(tokenizer, settings.train.loss_on)
    return collect(documents(encoder, rows, settings.train.sequence_length, facts), facts)


def open_tokenizer(settings: Settings, base: str, run: Store) -> Any:
    """The run's tokenizer: the published one of a model from a config, or the base model's own."""
    if settings.base.scratch is not None:
        return wrap_tokenizer(run.get(TOKENIZER), settings.base.scratch.context)
    return load_tokenizer(base, settings.base.revision)


def _no_target(dataset: str, split: str, facts: dict[str, Any]) -> DataError:
    first = next((f": {item['reason']}" for item in facts["left_out"]), "")
    return DataError(dataset, f"no {split} row has a token to learn from{first}", "Check the roles in the drop")


def _publish_tokenizer(run: Store, source: Callable[[], Iterator[str]], settings: Settings) -> None:
    # Whoever comes second takes what is there: all nodes and attempts share the same bytes.
    assert settings.base.scratch is not None
    if run.stat(TOKENIZER) is None:
        run.put_if_absent(TOKENIZER, train_tokenizer(source(), settings.base.scratch.vocab_size))


def _fingerprint(tokenizer: Any) -> str:
    return hashlib.sha256(str(tokenizer.backend_tokenizer.to_str()).encode()).hexdigest()


def scratch_folder() -> Path | None:
    """The folder that the launcher made for the ranks of this node."""
    name = os.environ.get("DROPFORGE_SCRATCH")
    return Path(name) if name else None
