"""Classification on several ranks: each cell comes to what one rank does, a stop and a resume included."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from .classes import classifier_base, labelled_toy
from .matrix import Cell
from .ranks import Ranks
from .ranks_course import Course, run_course
from .ranks_loop import Stage, make_stage
from .test_ranks_matrix import ROWS, STEPS, check_cell

pytestmark = pytest.mark.dist

# By the kind of the model: an encoder and a decoder from a folder, with all weights or adapters, and a new encoder.
ADAPTED = ("lora", "qlora")
BASES = {"encoder": "distilbert", "decoder": "llama"}
SHARED = [("auto", 1), ("ddp", 2), ("fsdp", 2), ("fsdp-no-reshard", 2), ("hybrid", 4), ("fsdp", 4)]
METHODS = (("encoder", "full"), ("encoder", "lora"), ("decoder", "full"), ("decoder", "lora"), ("encoder", "config"))
WAYS = (("same", "fp32"), ("other", "bf16"), ("broken", "fp32"))
# A Latin square: every two of kind with method, way to share, and way to resume meet; the whole of the product is what
# the matrix has for language models, and the loop is the same.
ALL = [
    (kind, Cell(mode, ranks, method, "padded", *WAYS[(row + column) % len(WAYS)], 1.0))
    for row, (kind, method) in enumerate(METHODS)
    for column, (mode, ranks) in enumerate(SHARED)
]
# The head is trained as with `lora`, so a few cells tell.
ALL += [
    ("encoder", Cell("fsdp", 2, "qlora", "padded", "same", "bf16", 1.0)),
    ("encoder", Cell("ddp", 2, "qlora", "padded", "broken", "fp32", 1.0)),
    ("decoder", Cell("hybrid", 4, "qlora", "padded", "other", "fp32", 1.0)),
]
SOME = [
    ("encoder", Cell("fsdp", 2, "lora", "padded", "same", "fp32", 1.0)),
    ("decoder", Cell("ddp", 2, "full", "padded", "other", "bf16", 1.0)),
]


@pytest.fixture(scope="module")
def stage_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Stage]:
    folder = tmp_path_factory.mktemp("classes")
    toy = labelled_toy(str(folder / "bucket"), train=34, held=9)
    bases = {kind: classifier_base(folder / kind, name) for kind, name in BASES.items()}
    known: dict[tuple[str, str], Stage] = {}

    def find(kind: str, method: str) -> Stage:
        if (kind, method) not in known:
            name = f"{kind}-{method}"
            known[kind, method] = make_stage(
                toy,
                name,
                folder / name,
                task="classification",
                base={"scratch": {"architecture": BASES[kind]}}
                if method == "config"
                else {"model": bases[kind], "scratch": None},
                train={
                    "method": method if method in ADAPTED else "full",
                    "lora": {"r": 3, "alpha": 6, "dropout": 0.0, "targets": ["q_lin", "v_lin"]}
                    if kind == "encoder"
                    else {"r": 3, "alpha": 6, "dropout": 0.0, "targets": ["q_proj", "v_proj"]},
                    "epochs": 1.0,
                    **STEPS,
                },
                evaluate={"max_rows": 9},
            )
        return known[kind, method]

    return find


@pytest.fixture(scope="module")
def alone(ranks: Ranks, stage_of: Callable[[str, str], Stage]) -> Callable[[str, str], Course]:
    """What one rank in fp32 with one forward pass a step makes of the rows; computed once."""
    known: dict[tuple[str, str], Course] = {}

    def find(kind: str, method: str) -> Course:
        if (kind, method) not in known:
            stage = stage_of(kind, method)
            [known[kind, method]] = ranks(run_course, 1, stage.change(micro_batch=ROWS), False, "alone")
        return known[kind, method]

    return find


@pytest.fixture
def check(
    ranks: Ranks, stage_of: Callable[[str, str], Stage], alone: Callable[[str, str], Course]
) -> Callable[[str, Cell], None]:
    def look(kind: str, cell: Cell) -> None:
        one = alone(kind, cell.method)
        assert all("eval/macro_f1" in found for found in one.evaluations)
        if cell.method in ADAPTED:  # the head is trained whole, and nothing else beside the adapters
            assert {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in one.weights if "lora" in name} in (
                {"q_lin", "v_lin"}, {"q_proj", "v_proj"},
            )  # fmt: skip
            assert all("lora" in name or "modules_to_save" in name for name in one.weights)
            assert any("modules_to_save" in name for name in one.weights)
        check_cell(ranks, stage_of(kind, cell.method), one, cell)

    return look


@pytest.mark.parametrize(("kind", "cell"), SOME, ids=str)
def test_ranks_learn_labels_as_one_rank_does(check: Callable[[str, Cell], None], kind: str, cell: Cell) -> None:
    check(kind, cell)


@pytest.mark.exact
@pytest.mark.parametrize(("kind", "cell"), [item for item in ALL if item not in SOME], ids=str)
def test_every_way_to_share_a_classifier(check: Callable[[str, Cell], None], kind: str, cell: Cell) -> None:
    check(kind, cell)
