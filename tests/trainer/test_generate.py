"""Answers are what the model likes best, token by token, whatever stands beside them and whatever a cache does."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer.config import Generation
from trainer.data.prompts import Prompt
from trainer.data.tokenizer import CHAT_TEMPLATE, END, EOS, SPECIAL
from trainer.gang import Gang
from trainer.generate import Answers, batches, generate
from trainer.model.loss import LossModel, loss_model

from .test_attention import KINDS
from .test_model import small

pytestmark = pytest.mark.compat
MOST = 9
LENGTHS = [31, 5, 17, 1, 40]
VOCABULARY = {token: 90 + place for place, token in enumerate(SPECIAL)}


class Spelled(SimpleNamespace):
    """A tokenizer of numbers: what was written can be read from the text."""

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return " ".join(map(str, ids))


NUMBERS = Spelled(chat_template=CHAT_TEMPLATE, get_vocab=lambda: VOCABULARY)


def asking(**values: Any) -> Generation:
    return Generation(
        **{"rows": 9, "max_new_tokens": MOST, "metrics": ("exact-match",), "batch": 4, "every": 1, **values}
    )


def prompts(lengths: Sequence[int] = LENGTHS) -> list[Prompt]:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, 90, (length,), generator=generator).tolist() for length in lengths]
    return [Prompt(f"{place:02x}", "", tuple(row), "") for place, row in enumerate(ids)]


def answer(loss: LossModel, asked: Generation, some: Sequence[Prompt], **more: Any) -> list[list[int] | None]:
    found = generate(loss, some, Gang(), NUMBERS, asked, pad=0, **more)
    assert found is not None
    return [None if item is None else [int(word) for word in item.text.split()] for item in found.answers]


@torch.no_grad()
def greedy(model: Any, ids: Sequence[int], most: int, ends: Sequence[int]) -> list[int]:
    """The definition: one row alone, all of it again for each token."""
    model.eval()
    row, written = list(ids), []
    for _ in range(most):
        token = int(model(input_ids=torch.tensor([row]), use_cache=False).logits[0, -1].argmax())
        if token in ends:
            break
        written.append(token)
        row.append(token)
    return written


def ends_of(model: Any) -> list[int]:
    own = model.generation_config.eos_token_id
    return [VOCABULARY[EOS], VOCABULARY[END], *([own] if isinstance(own, int) else own or [])]


@pytest.mark.parametrize(("kind", "more"), [(kind, more) for kind, more, *_ in KINDS], ids=[kind for kind, *_ in KINDS])
def test_each_kind_of_model_writes_what_it_likes_best(kind: str, more: dict[str, Any]) -> None:
    """Rows side by side, with padding and a cache, as each row alone without either."""
    model = small(kind, **more).eval()
    said: list[str] = []
    loss = loss_model(model, kind not in ("bloom", "falcon", "mamba"), False)
    some = prompts()
    found = answer(loss, asking(), some, say=said.append)
    assert found == [greedy(model, prompt.ids, MOST, ends_of(model)) for prompt in some]
    assert len({tuple(row or ()) for row in found}) > 3  # they do differ
    for size in (1, 2, 9):
        assert answer(loss, asking(batch=size), some) == found
    assert said == []  # the cache was of use, or the model has none


@pytest.mark.parametrize("widest", [99, 15])
def test_a_cache_that_gives_other_tokens_is_not_used(widest: int) -> None:
    """Also where it does so in the second batch only, whoever of the ranks has that."""
    model = small("llama").eval()
    loss, some, said = loss_model(model, True, False), prompts(), []
    expected = answer(loss, asking(), some)
    own = loss.next_logits

    def off(ids: Any, positions: Any, mask: Any, cache: Any) -> Any:
        return own(ids, positions + 3 * (cache is not None and mask.shape[1] < widest), mask, cache)

    loss.next_logits = off  # type: ignore[method-assign]
    assert answer(loss, asking(), some, say=said.append) == expected
    assert "without the model's cache" in said[0]


def test_an_answer_ends_at_any_end_token_of_the_model_or_the_tokenizer() -> None:
    model = small("llama").eval()
    loss, some = loss_model(model, True, False), prompts()
    free = greedy(model, some[0].ids, MOST, [])
    stop = free[4]
    expected = free[: free.index(stop)]
    model.generation_config.eos_token_id = [95, stop]
    assert answer(loss, asking(), some[:1]) == [expected]
    model.generation_config.eos_token_id = None
    assert answer(loss, asking(), some[:1]) == [greedy(model, some[0].ids, MOST, ends_of(model))]
    other = Spelled(chat_template=CHAT_TEMPLATE, get_vocab=lambda: VOCABULARY | {END: stop})
    found = generate(loss, some[:1], Gang(), other, asking(), pad=0)
    assert found is not None
    assert found.answers[0] is not None
    assert (found.answers[0].text, found.answers[0].ended) == (" ".join(map(str, expected)), True)
    assert found.metrics()["gen/ended"] == 1


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_row_at_the_end_of_the_context_is_cut_there_and_changes_no_other(kind: str) -> None:
    model = small(kind).eval()  # a context of 128
    some = prompts([128, 120, 7, 127, 0, 9, 200])
    loss = loss_model(model, True, False)
    found = answer(loss, asking(), some)
    ends = ends_of(model)
    assert [found[0], found[4], found[6]] == [None, None, None]
    for place, room in ((1, 8), (2, MOST), (3, 1), (5, MOST)):
        assert found[place] == greedy(model, some[place].ids, room, ends)
    everything = generate(loss, some, Gang(), NUMBERS, asking(), pad=0)
    assert everything is not None
    assert everything.plain()["unanswered_rows"] == 3


def test_batches_hold_rows_of_like_length_and_tight_ones_alone() -> None:
    assert batches([5, 9, 0, 30, 7, 8, 25], 2, 10, 32) == [[3], [6], [1, 5], [4, 0]]
    assert batches([5, 900], 4, 10, None) == [[1, 0]]
    assert batches([], 4, 10, 32) == batches([32, 0], 4, 10, 32) == []


def test_nothing_is_left_behind_and_nothing_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small("llama", attention_dropout=0.5).train()
    loss = loss_model(model, True, True).train()
    before = torch.get_rng_state()
    first = answer(loss, asking(), prompts())
    assert answer(loss, asking(), prompts()) == first
    assert torch.equal(torch.get_rng_state(), before)
    assert (loss.training, loss.precision) == (True, "bf16")


@pytest.mark.parametrize("at", [1, 3, MOST])
def test_a_stop_is_heard_between_tokens(at: int) -> None:
    loss = loss_model(small("llama").eval(), True, False)
    looks = 0

    def stop() -> bool:
        nonlocal looks
        looks += 1
        return looks >= at

    loss.model.generation_config.eos_token_id = None
    assert generate(loss, prompts(), Gang(), NUMBERS, asking(), pad=0, stop=stop) is None
    assert looks <= at + 8  # all tokens of the batches would be 18


def test_scores_are_means_over_all_prompts_and_the_table_has_them() -> None:
    loss = loss_model(small("llama").eval(), True, False)
    loss.model.generation_config.eos_token_id = None
    some = prompts([5, 200, 9])
    right = " ".join(map(str, greedy(loss.model, some[0].ids, MOST, ends_of(loss.model))))
    some = [Prompt(prompt.row, "asked", prompt.ids, right) for prompt in some]
    found = generate(loss, some, Gang(), NUMBERS, asking(metrics=("exact-match", "token-f1")), pad=0)
    assert found is not None
    metrics = found.metrics()
    assert metrics["gen/exact-match"] == pytest.approx(1 / 3)
    assert 1 / 3 <= metrics["gen/token-f1"] < 1
    assert metrics["gen/tokens"] == pytest.approx(2 * MOST / 3)
    table = found.table(7)
    assert table["columns"] == ["step", "row", "prompt", "reference", "answer", "ended", "exact-match", "token-f1"]
    assert table["data"][0] == [7, "00", "asked", right, right, False, 1.0, 1.0]
    assert table["data"][1] == [7, "01", "asked", right, "", False, 0.0, 0.0]
    assert isinstance(found, Answers)


def test_an_answer_is_compared_from_behind_its_lead_on() -> None:
    loss = loss_model(small("llama").eval(), True, False)
    loss.model.generation_config.eos_token_id = None
    [asked] = prompts([5])
    written = greedy(loss.model, asked.ids, MOST, ends_of(loss.model))
    lead = written[1]
    rest = " ".join(map(str, written[len(written) - written[::-1].index(lead) :]))
    whole = " ".join(map(str, written))
    for led, right, score in ((lead, rest, 1.0), (lead, whole, 0.0), (None, whole, 1.0), (1000, whole, 1.0)):
        found = generate(loss, [Prompt("00", "", asked.ids, right, led)], Gang(), NUMBERS, asking(), pad=0)
        assert found is not None
        assert found.metrics() == {"gen/exact-match": score, "gen/ended": 0.0, "gen/tokens": MOST}
        assert found.table()["data"][0][3] == whole


def test_no_prompt_that_fits_leaves_a_result_of_nothing() -> None:
    found = generate(
        loss_model(small("llama").eval(), True, False), prompts([0, 128]), Gang(), NUMBERS, asking(), pad=0
    )
    assert found is not None
    assert found.plain() == {"gen/exact-match": 0.0, "gen/ended": 0.0, "gen/tokens": 0.0, "asked_rows": 2,
                             "unanswered_rows": 2}  # fmt: skip
