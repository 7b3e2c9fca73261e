"""`train.deterministic` is really on in the ranks, and off without it."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from dropforge.errors import RecipeError
from dropforge.recipes.load import build_recipe, merge
from trainer.gang import Gang
from trainer.model.deterministic import ENVIRONMENT, enable, environment, ran
from trainer.rank import run
from trainer.report.console import Console
from trainer.state.stop import StopSignal

from .ranks import Ranks
from .toy import Toy, recipe


def flags(gang: Gang, uri: str) -> dict[str, Any]:
    """What is in force at the optimizer's steps of a run, and whether an operation without an order is refused."""
    del gang
    seen: dict[str, Any] = {}
    step = torch.optim.AdamW.step

    def look(self: Any, closure: Any = None) -> Any:
        seen.update(ran())
        return step(self, closure)

    torch.optim.AdamW.step = look  # type: ignore[method-assign]
    run(uri, StopSignal(), Console(quiet=True))
    try:
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))
        seen["refuses"] = False
    except RuntimeError as error:
        seen["refuses"] = "deterministic" in str(error)
    return seen


@pytest.mark.dist
@pytest.mark.parametrize("asked", [True, False])
def test_it_is_on_in_the_ranks_if_it_is_asked_for(ranks: Ranks, toy: Toy, asked: bool) -> None:
    uri = toy.run("flags", train={"deterministic": asked, "max_steps": 2})
    [seen] = ranks(flags, 1, uri)
    assert seen["deterministic"] is asked
    assert seen["cudnn_deterministic"] is asked
    assert ("mem_efficient" in seen["attention_backends"]) is not asked
    assert seen["refuses"] is asked


def test_the_environment_is_asked_for_by_the_recipe_alone() -> None:
    assert environment(recipe(train={"deterministic": True})) == ENVIRONMENT
    assert environment(recipe()) == {}
    assert environment({}) == {}


@pytest.mark.parametrize(
    ("train", "compute", "words"),
    [
        ({"attention": "flex_attention", "deterministic": True}, {"gpus": 1}, "not known to be deterministic"),
        ({"attention": "flex_attention"}, {}, "needs a GPU"),
        ({"attention": "flash_attention_2"}, {"gpus": 1}, "is used in bf16 only"),
    ],
)
def test_attention_that_cannot_be_so_is_refused_before_any_pod(train: Any, compute: Any, words: str) -> None:
    with pytest.raises(RecipeError, match=f"train.attention.*{words}"):
        build_recipe(merge(recipe(), {"train": train, "compute": compute}))


def gradients(gang: Gang) -> bool:
    """Whether two backward passes through attention on a GPU are equal to the bit."""
    del gang
    os.environ.update(ENVIRONMENT)
    enable()
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        query, key, value = (torch.randn(2, 8, 512, 64, device="cuda", requires_grad=True) for _ in range(3))
        torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True).square().sum().backward()
        found.append(torch.cat([item.grad for item in (query, key, value)]))  # type: ignore[misc]
    return torch.equal(*found)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_attention_on_a_gpu_gives_the_same_bits(ranks: Ranks) -> None:
    assert ranks(gradients, 1) == [True]
