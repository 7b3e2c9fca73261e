"""Encoder-decoders on several ranks: each cell comes to what one rank does, and answers are the same for any ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from .matrix import Cell
from .pairs import BART, T5, pair_base, pair_toy
from .ranks import Ranks
from .ranks_course import Course, run_course
from .ranks_loop import Stage, make_stage
from .test_ranks_generate import answered
from .test_ranks_matrix import ROWS, STEPS, check_cell, shared

pytestmark = pytest.mark.dist

SHARED = [("auto", 1), ("ddp", 2), ("fsdp", 2), ("fsdp-no-reshard", 2), ("hybrid", 4), ("fsdp", 4), ("ddp", 4)]
RESUMES = (("same", "fp32", "full"), ("other", "bf16", "none"), ("broken", "fp32", "selective"))
# Each kind with each way to share, and each of the other values with both, in turn.
ALL = [
    (kind, Cell(mode, ranks, method, "padded", *RESUMES[(place + turn) % 3][:2], 1.0, "adamw",
                RESUMES[(place + turn) % 3][2]))
    for turn, (kind, method) in enumerate((("t5", "full"), ("bart", "lora"), ("t5", "config"), ("bart", "full")))
    for place, (mode, ranks) in enumerate(SHARED)
]  # fmt: skip
ALL += [
    ("t5", Cell("fsdp", 2, "qlora", "padded", "same", "fp32", 1.0)),
    ("bart", Cell("hybrid", 4, "qlora", "padded", "other", "fp32", 1.0)),
]
SOME = [
    ("t5", Cell("fsdp", 2, "full", "padded", "same", "fp32", 1.0)),
    ("bart", Cell("ddp", 2, "lora", "padded", "broken", "bf16", 1.0)),
]
ASKED = {"rows": 9, "max_new_tokens": 10, "metrics": ["exact-match", "token-f1", "rouge-l"], "batch": 2}


@pytest.fixture(scope="module")
def stage_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Stage]:
    folder = tmp_path_factory.mktemp("pairs")
    toy = pair_toy(str(folder / "bucket"), train=34, held=9)
    bases = {kind: pair_base(folder / kind, kind) for kind in ("t5", "bart")}
    configs = {
        "t5": {"model_type": "t5", "vocab_size": 320, **T5},
        "bart": {"model_type": "bart", "vocab_size": 320, **BART},
    }
    known: dict[tuple[str, str], Stage] = {}

    def find(kind: str, method: str) -> Stage:
        if (kind, method) not in known:
            name = f"{kind}-{method}"
            known[kind, method] = make_stage(
                toy,
                name,
                folder / name,
                task="sequence-to-sequence",
                base={"scratch": {"config": configs[kind]}}
                if method == "config"
                else {"model": bases[kind], "scratch": None},
                train={
                    "method": method if method in ("lora", "qlora") else "full",
                    "lora": {
                        "r": 3,
                        "alpha": 6,
                        "dropout": 0.0,
                        "targets": ["q_proj", "v_proj"] if method == "lora" else "all-linear",
                    },
                    "epochs": 1.0,
                    **STEPS,
                },
                evaluate={"max_rows": 9, "generation": ASKED},
            )
        return known[kind, method]

    return find


@pytest.fixture(scope="module")
def alone(ranks: Ranks, stage_of: Callable[[str, str], Stage]) -> Callable[[str, str], Course]:
    """What one rank in fp32 with one forward pass a step makes of the rows; computed once."""
    known: dict[tuple[str, str], Course] = {}

    def find(kind: str, method: str) -> Course:
        if (kind, method) not in known:
            stage = stage_of(kind, method).change(generation=None)
            [known[kind, method]] = ranks(run_course, 1, stage.change(micro_batch=ROWS), False, "alone")
        return known[kind, method]

    return find


@pytest.mark.parametrize(("kind", "cell"), SOME, ids=str)
def test_ranks_learn_answers_as_one_rank_does(
    ranks: Ranks, stage_of: Callable[[str, str], Stage], alone: Callable[[str, str], Course], kind: str, cell: Cell
) -> None:
    check_cell(ranks, stage_of(kind, cell.method).change(generation=None), alone(kind, cell.method), cell)


@pytest.mark.exact
@pytest.mark.parametrize(("kind", "cell"), ALL, ids=str)
def test_every_way_to_share_an_encoder_decoder(
    ranks: Ranks, stage_of: Callable[[str, str], Stage], alone: Callable[[str, str], Course], kind: str, cell: Cell
) -> None:
    check_cell(ranks, stage_of(kind, cell.method).change(generation=None), alone(kind, cell.method), cell)


@pytest.mark.parametrize(
    ("kind", "mode", "world"),
    [("t5", "fsdp", 2), *(pytest.param(*way, marks=pytest.mark.exact) for way in (
        ("bart", "fsdp", 4), ("t5", "fsdp-no-reshard", 4), ("bart", "hybrid", 4), ("t5", "ddp", 2)))],
)  # fmt: skip
def test_ranks_answer_what_one_rank_answers(
    ranks: Ranks, stage_of: Callable[[str, str], Stage], kind: str, mode: str, world: int
) -> None:
    """Five batches of prompts: ranks without one keep step with an encoder and a decoder that others wait for."""
    stage = stage_of(kind, "full").change(max_steps=2, epochs=None, warmup=0.0)
    [one] = ranks(answered, 1, stage, False, f"alone-{kind}-{mode}-{world}")
    leader, *others = ranks(answered, world, shared(stage, mode), False, f"{kind}-{mode}-{world}")
    assert leader[0][0] == one[0][0]
    assert leader[0][1] == one[0][1]
    assert leader[1][-1]["asked_rows"] == 9
    assert all(other[1] == leader[1] and not other[0] for other in others)
