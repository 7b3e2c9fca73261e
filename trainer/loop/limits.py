"""Less of the data than there is, for smoke runs."""

from __future__ import annotations

import numpy as np

from trainer.data.packing import pack_window
from trainer.data.tokens import Tokens


def first_batches(tokens: Tokens, batches: int, *, micro: int, size: int, packed: bool) -> Tokens:
    """The documents of the first forward passes of an evaluation of all, which are packed the same without the rest.

    :param micro: rows of a forward pass, :param size: tokens of a row.
    """
    order = (-tokens.lengths).argsort(kind="stable")
    packs = pack_window(tokens.lengths, order, size) if packed else [order[i : i + 1] for i in range(len(order))]
    chosen = np.sort(np.concatenate(packs[: batches * micro])) if packs else order
    if len(chosen) == len(tokens):
        return tokens
    pairs = [tokens.document(int(index)) for index in chosen]
    rows = tokens.rows[chosen]
    # What the targets spell is known for all documents together only.
    facts = {key: value for key, value in tokens.facts.items() if key != "target_bytes"}
    return Tokens(
        ids=np.concatenate([ids for ids, _ in pairs]),
        trained=np.concatenate([trained for _, trained in pairs]),
        offsets=np.concatenate([[0], np.cumsum(tokens.lengths[chosen])]).astype(np.int64),
        rows=rows,
        facts={**facts, "rows": len(np.unique(rows))},
        counts=tokens.targets[chosen],
        labels=None if tokens.labels is None else tokens.labels[chosen],
    )
