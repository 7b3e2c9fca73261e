"""Options that change the same passes, several at once: a run with those that should change nothing is the one without.

Each alone is compared with plain runs elsewhere (`test_offload`, `test_recompute`, `test_hollow`). All is equal to the
bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from dropforge.store import open_store
from trainer.gang import Gang
from trainer.model import offload

from .classes import classifier_base, labelled_toy
from .ranks import Ranks
from .ranks_loop import Outcome, Stage, make_base, make_stage, take_steps
from .test_fp16 import same
from .test_mixture import MIXTURES
from .toy import Toy, write_dataset

pytestmark = [pytest.mark.dist, pytest.mark.exact]
STEPS = 2


@dataclass(frozen=True)
class Cell:
    """Two runs of one recipe.

    :param base: kind of the base model. :param mode: `compute.parallel`; `hybrid` is on four ranks, all else on two.
    :param both: settings of both runs. :param added: those that the second has too, and that change nothing.
    :param sliced: whether the second reads its base in slices.
    """

    base: str
    mode: str
    both: dict[str, Any] = field(default_factory=dict)
    added: dict[str, Any] = field(default_factory=dict)
    sliced: bool = False


AGAIN = {"activation_checkpointing": "full"}
CELLS = {
    "dora-activations": Cell("llama", "fsdp", {"method": "dora"}, {"offload": "activations", **AGAIN}),
    "8bit-activations": Cell("llama", "fsdp", {"optimizer": "adamw-8bit"}, {"offload": "activations"}),
    "mixture-states": Cell("mixtral", "fsdp-no-reshard", {"router_loss": 0.3}, {"offload": "states"}),
    "classifier-states-again": Cell("distilbert", "fsdp", {}, {"offload": "states", **AGAIN}),
    "fp16-all-again": Cell("llama", "fsdp-no-reshard", {"precision": "fp16"}, {"offload": "all", **AGAIN}),
    "hybrid-bf16-moments-all": Cell("llama", "hybrid", {"optimizer": "adamw-bf16"}, {"offload": "all"}),
    "slices-of-a-mixture-activations-again": Cell(
        "mixtral", "fsdp", {"router_loss": 0.3}, {"offload": "activations", **AGAIN}, sliced=True
    ),
}


@pytest.fixture(scope="module")
def stage_of(tmp_path_factory: pytest.TempPathFactory, toy_rows: dict[str, Any]) -> Callable[[str], Stage]:
    folder = tmp_path_factory.mktemp("together")
    known: dict[str, Stage] = {}

    def find(kind: str) -> Stage:
        if kind in known:
            return known[kind]
        labelled = kind == "distilbert"
        if labelled:
            toy, base = labelled_toy(str(folder / "labels")), classifier_base(folder / kind, kind)
        else:
            root = str(folder / "chats")
            toy = Toy(root, write_dataset(open_store(root), toy_rows))
            base = make_base(folder / kind, kind, **MIXTURES.get(kind, {}))
        known[kind] = make_stage(
            toy,
            kind,
            folder / f"{kind}-scratch",
            task="classification" if labelled else "causal-lm",
            base={"model": base, "scratch": None},
            train={
                "lora": {"r": 3, "alpha": 6, "dropout": 0.1},
                "tokens_per_step": 64 * 5,
                "max_steps": STEPS,
                "schedule": "constant",
            },
            evaluate={"max_rows": 9},
        )
        return known[kind]

    return find


def both(gang: Gang, plain: Stage, changed: Stage, packs: bool, sliced: bool) -> tuple[Outcome, Outcome]:
    """Both runs, one after the other: the second finds everything imported."""
    offload.LEAST = 0  # the process is this test's own
    return take_steps(gang, plain, packs, STEPS), take_steps(gang, changed, packs, STEPS, sliced)


@pytest.mark.parametrize("name", CELLS)
def test_what_changes_nothing_alone_changes_nothing_together(
    ranks: Ranks, stage_of: Callable[[str], Stage], name: str
) -> None:
    cell = CELLS[name]
    world, group = (4, 2) if cell.mode == "hybrid" else (2, None)
    stage = stage_of(cell.base).change(parallel=cell.mode, shard_group=group, micro_batch=2, **cell.both)
    packs = stage.settings.task == "causal-lm"
    plain, found = ranks(both, world, stage, stage.change(**cell.added), packs, cell.sliced)[0]
    where = {"activations": "activations", "states": "states", "all": "activations and states"}
    for ran, asked in ((plain.ran, {}), (found.ran, cell.added)):
        assert ran["on_the_host"] == where.get(asked.get("offload", ""), "none")
        assert ran["activation_checkpointing"] == ("full, 3 blocks" if "activation_checkpointing" in asked else "none")
    assert found.evaluated == plain.evaluated
    tensors = [(getattr(found, key), getattr(plain, key)) for key in ("gradients", "weights", "moments")]
    assert (found.losses, found.norms) == (plain.losses, plain.norms)
    assert all(same(left, right) for left, right in tensors)
