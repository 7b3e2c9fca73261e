"""The largest row that may come in a training, for which there must be memory."""

from __future__ import annotations

import numpy as np

from trainer.data.plan import Plan


def longest(plan: Plan) -> tuple[int, int]:
    """Tokens of the longest row of any step, and the most targets that any row can have.

    Each pass deals documents anew to places of their length, so a pack keeps its tokens and not its targets: counted
    are, at each place, the most that a document of that length has.
    """
    assert plan.packs_of is not None
    documents, offsets = plan.packs_of.documents, plan.packs_of.offsets
    most = np.zeros(int(plan.lengths.max()) + 1, np.int64)
    np.maximum.at(most, plan.lengths, plan.targets)
    lengths = plan.lengths[documents]
    tokens = np.add.reduceat(lengths, offsets[:-1])
    targets = np.add.reduceat(most[lengths], offsets[:-1])
    if plan.mix is not None:  # packs hold one source each, and some are left out
        taken = np.array([passes > 0 for passes in plan.mix.passes])[plan.mix.source[documents[offsets[:-1]]]]
        tokens, targets = tokens[taken], targets[taken]
    return int(tokens.max()), int(min(targets.max(), tokens.max()))


def widest(plan: Plan) -> tuple[int, int]:
    """Columns of the widest rows of sources and targets, and how many of them are for targets.

    A forward pass may meet the longest source in one row and the longest target in another.
    """
    targets = int(plan.targets.max())
    return int((plan.lengths - plan.targets).max()) + targets, targets
