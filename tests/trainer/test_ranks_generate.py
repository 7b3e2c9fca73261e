"""Generated answers on several ranks: the same for any number of them and any way to share the model."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from dropforge.store import open_store
from trainer.gang import Gang
from trainer.state.stop import PreemptedError

from .ranks import Ranks
from .ranks_loop import Stage, Tensors, copied, make_base, make_loop, make_stage
from .toy import Toy, write_dataset

pytestmark = [pytest.mark.dist, pytest.mark.compat]
EXACT = pytest.mark.exact
ROWS = 9
# Five batches: with four ranks, three of them have none in the second turn.
ASKED = {"rows": ROWS, "max_new_tokens": 10, "metrics": ["exact-match", "token-f1", "rouge-l"], "batch": 2}


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory, toy_rows: dict[str, Any]) -> dict[str, Stage]:
    folder = tmp_path_factory.mktemp("generate")
    toy = Toy(str(folder / "bucket"), write_dataset(open_store(str(folder / "bucket")), toy_rows))
    base = {"model": make_base(folder / "base", initializer_range=0.3), "scratch": None}
    train = {"max_steps": 2, "warmup": 0.0}
    lora = {**train, "method": "lora", "lora": {"dropout": 0.2}}
    more = {"base": base, "evaluate": {"generation": ASKED}}
    return {
        "full": make_stage(toy, "full", folder / "full", train=train, **more),
        "lora": make_stage(toy, "lora", folder / "lora", train=lora, **more),
    }


def answered(gang: Gang, stage: Stage, packs: bool, folder: str) -> tuple[list[Any], list[Any], Tensors]:
    """The answers before and after two steps, what was recorded, and the weights at the end."""
    loop = make_loop(gang, stage, packs, folder)
    found: list[Any] = []
    loop.answered = lambda answers, _: found.append(answers)  # type: ignore[assignment]
    loop.start()
    loop.run()
    weights = copied(loop.wrapped.full(dict(loop.wrapped.trainable())))
    return [item.answers for item in found], loop.progress.evaluations, weights


WAYS = [
    (method, mode, world, packs)
    for method in ("full", "lora")
    for mode in ("ddp", "fsdp", "fsdp-no-reshard", "hybrid")
    for world in (2, 4)
    for packs in (True, False)
    if mode != "hybrid" or world == 4
]
FIRST = {("full", "fsdp", 2, True)}  # the others are for `make test-exact`


def shared(stage: Stage, mode: str, **values: Any) -> Stage:
    return stage.change(parallel=mode, shard_group=2 if mode == "hybrid" else None, **values)


@pytest.fixture(scope="module")
def alone(ranks: Ranks, stages: dict[str, Stage]) -> Any:
    known: dict[Any, Any] = {}

    def find(method: str, packs: bool) -> Any:
        if (method, packs) not in known:
            stage = stages[method].change(micro_batch=5)
            [known[method, packs]] = ranks(answered, 1, stage, packs, f"alone-{method}-{packs}")
        return known[method, packs]

    return find


@pytest.mark.parametrize(
    ("method", "mode", "world", "packs"),
    [pytest.param(*way, marks=[] if way in FIRST else EXACT) for way in WAYS],
)
def test_ranks_answer_what_one_rank_answers(
    ranks: Ranks, stages: dict[str, Stage], alone: Any, method: str, mode: str, world: int, packs: bool
) -> None:
    stage = shared(stages[method], mode)
    leader, *others = ranks(answered, world, stage, packs, f"{method}-{mode}-{world}-{packs}")
    before, after = leader[0]
    expected, trained = alone(method, packs)[0]
    assert before == expected
    assert len({answer.text for answer in before if answer is not None}) > 3
    # LoRA's dropout differs by rank, and so do weights; answers of the full model are those of weights that are alike.
    assert (after == trained) or method == "lora"
    assert all(other[1] == leader[1] and not other[0] for other in others)
    assert leader[1][-1]["asked_rows"] == ROWS


@pytest.mark.parametrize(
    ("mode", "world"),
    [("fsdp-no-reshard", 2), *(pytest.param(*way, marks=EXACT) for way in (("auto", 1), ("ddp", 2), ("fsdp", 2)))],
)
def test_answers_change_no_bit_of_what_is_learned(
    ranks: Ranks, stages: dict[str, Stage], mode: str, world: int
) -> None:
    """With dropout, so that a random number more or less would show."""
    stage = shared(stages["lora"], mode, eval_every=1)
    with_answers = ranks(answered, world, stage, True, f"with-{mode}")[0]
    without = ranks(answered, world, stage.change(generation=None), True, f"without-{mode}")[0]
    assert len(with_answers[0]) == 3
    assert not without[0]
    assert all(torch.equal(weight, without[2][name]) for name, weight in with_answers[2].items())
    assert [item["eval/loss"] for item in with_answers[1]] == [item["eval/loss"] for item in without[1]]


@pytest.mark.exact
@pytest.mark.parametrize(("mode", "precision"), [("fsdp", "fp32"), ("ddp", "fp32"), ("fsdp", "bf16")])
def test_a_training_in_bf16_is_answered_for_in_the_evaluations_precision(
    ranks: Ranks, stages: dict[str, Stage], alone: Any, mode: str, precision: str
) -> None:
    stage = shared(stages["full"], mode, precision="bf16", eval_precision=precision)
    found, evaluations, _ = ranks(answered, 2, stage, True, f"bf16-{mode}-{precision}")[0]
    expected = alone("full", True)[0][0]
    same = sum(left == right for left, right in zip(found[0], expected, strict=True))
    assert same == ROWS if precision == "fp32" else same > ROWS // 2
    assert evaluations[0]["precision"] == precision


def stopped(gang: Gang, stage: Stage, folder: str) -> tuple[str, list[int], int]:
    """One rank of two is asked to stop while the answers at step 1 are written; then the run goes on without."""
    loop = make_loop(gang, stage, True, folder)
    ask, looks = loop._answers, [0]

    def asked(model: Any) -> Any:
        before = loop.stop.looks
        loop.stop.since = time.monotonic() if gang.rank == 1 and loop.progress.step == 1 else None
        found = ask(model)
        looks[0] = loop.stop.looks - before
        return found

    loop._answers = asked  # type: ignore[method-assign]
    loop.start()
    try:
        loop.run()
    except PreemptedError as error:
        message = str(error)
    again = make_loop(gang, stage, True, folder)
    assert again.resume() == 1
    again.start()
    again.run()
    assert all("asked_rows" in item for item in again.progress.evaluations)
    return message, [item["step"] for item in again.progress.evaluations], looks[0]


def test_a_stop_that_one_rank_hears_ends_the_answers_of_all_and_they_are_due_again(
    ranks: Ranks, stages: dict[str, Stage]
) -> None:
    stage = shared(stages["full"], "ddp", eval_every=1, grace_seconds=30)
    found = ranks(stopped, 2, stage, "stopped", limit=120.0)
    for message, evaluated, looks in found:
        assert message == "asked to stop at step 1"
        assert evaluated == [0, 1, 2]
        assert looks == 8  # not all tokens of five batches
