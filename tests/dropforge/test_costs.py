"""Hours, money and the recipe's limits on them."""

from __future__ import annotations

from typing import Any

import pytest

from dropforge.costs import Hours, Rates, Tariff, judge, passed, seconds_left
from dropforge.errors import RecipeError
from dropforge.recipe_costs import Amounts, Limits, Price
from dropforge.recipes import load_recipe
from dropforge.recipes.load import build_recipe, merge, put_first_drop_over, read_yaml, resolve

PRICE = Price(gpu_hour=2.5, core_hour=0.1, currency="EUR")


@pytest.mark.parametrize(
    ("price", "gpus", "hours", "cost"),
    [
        (None, True, (4.0, 8.0), None),
        (PRICE, True, (4.0, 8.0), 10.8),
        (Price(gpu_hour=2.5), True, (4.0, 8.0), 10.0),
        (Price(gpu_hour=2.5), True, (0.0, 8.0), 0.0),
        (Price(gpu_hour=2.5), False, (0.0, 8.0), None),
        (Price(core_hour=0.1), False, (0.0, 8.0), 0.8),
        (Price(core_hour=0.1), True, (4.0, 8.0), None),
        (PRICE, True, (None, 8.0), None),
        (PRICE, False, (0.0, None), None),
    ],
)
def test_a_cost_is_known_or_not_and_never_guessed(
    price: Price | None, gpus: bool, hours: tuple[float | None, float | None], cost: float | None
) -> None:
    found = Tariff(price, gpus).hours(*hours)
    assert found.cost == (None if cost is None else pytest.approx(cost))
    assert (found.gpu_hours, found.core_hours) == hours


def test_what_is_not_known_is_said_and_is_no_metric() -> None:
    told = "GPU-hours not known, core-hours 8, cost not known"
    assert str(Hours(None, 8.0, None, "EUR")) == told
    assert Hours(0.0, 8.0, 1.5, "EUR").metrics("cost") == {
        "cost/gpu_hours": 0.0,
        "cost/core_hours": 8.0,
        "cost/total": 1.5,
    }
    assert Hours(None, None).metrics("plan") == {}


LIMITS = Limits(ask_above=Amounts(gpu_hours=8, cost=20.0))


@pytest.mark.parametrize(
    ("hours", "limits", "word", "reasons"),
    [
        (Hours(9.0, 1.0, 10.0), None, "start", 0),
        (Hours(9.0, 1.0, 10.0), Limits(stop_above=Amounts(gpu_hours=1)), "start", 0),
        (Hours(8.0, 1.0, 20.0), LIMITS, "start", 0),
        (Hours(8.1, 1.0, 20.0), LIMITS, "ask", 1),
        (Hours(8.1, 1.0, 21.0), LIMITS, "ask", 2),
        (Hours(None, None, None), LIMITS, "ask", 2),
        (Hours(1.0, 1.0, None), LIMITS.model_copy(update={"unknown": "start"}), "start", 1),
        (Hours(1.0, 1.0, None), LIMITS.model_copy(update={"unknown": "stop"}), "stop", 1),
        # What is above a limit is asked about, whatever else is not known.
        (Hours(9.0, 1.0, None), LIMITS.model_copy(update={"unknown": "start"}), "ask", 2),
        (Hours(0.0, None, 1.0), LIMITS, "start", 0),
    ],
)
def test_a_plan_is_held_against_the_limits(hours: Hours, limits: Limits | None, word: str, reasons: int) -> None:
    found = judge(hours, limits)
    assert (found.word, len(found.reasons)) == (word, reasons)


def test_a_reason_names_figure_key_and_limit() -> None:
    (told,) = passed(Hours(9.25, None), Amounts(gpu_hours=8, core_hours=1), "compute.limits.stop_above")
    assert told == "GPU-hours 9.25, and `compute.limits.stop_above.gpu_hours` is 8"


def test_a_job_may_run_until_the_first_limit_is_reached() -> None:
    rates, limits = Rates(gpus=4, cores=16), Limits(stop_above=Amounts(gpu_hours=8, cost=30.0))
    tariff = Tariff(PRICE, gpus=True)
    assert seconds_left(Hours(0.0, 0.0, 0.0), rates, limits, tariff) == 7200  # 4 GPUs for two hours
    assert seconds_left(Hours(0.0, 0.0, 24.2), rates, limits, tariff) == pytest.approx(1800)  # 11.6 an hour
    assert seconds_left(Hours(8.0, 0.0, 0.0), rates, limits, tariff) == 0
    assert seconds_left(Hours(0.0, 0.0, 31.0), Rates(0, 0), limits, tariff) == 0
    # A job that holds no GPU may go on for ever, as far as GPU-hours go.
    assert seconds_left(Hours(1.0, 0.0), Rates(0, 16), Limits(stop_above=Amounts(gpu_hours=8)), tariff) is None
    assert seconds_left(Hours(1.0, 0.0), rates, None, tariff) is None


def build(compute: dict[str, Any]) -> Any:
    return build_recipe(merge(load_recipe("tiny").plain(), {"compute": compute}))


@pytest.mark.parametrize(
    ("compute", "told"),
    [
        ({"limits": {}}, "it limits nothing"),
        ({"limits": {"ask_above": {}}}, "it limits nothing"),
        ({"price": {"currency": "EUR"}}, "it prices nothing"),
        ({"price": {"core_hour": 1, "currency": "euros"}}, "compute.price.currency"),
        ({"price": {"core_hour": -1}}, "compute.price.core_hour"),
        ({"limits": {"ask_above": {"cost": 1}}}, r"without `compute.price.core_hour`"),
        ({"limits": {"stop_above": {"cost": 1}}, "gpus": 1, "price": {"core_hour": 1}}, r"`compute.price.gpu_hour`"),
        (
            {"limits": {"ask_above": {"gpu_hours": 9}, "stop_above": {"gpu_hours": 8}}},
            "no approval would be asked for above 9",
        ),
        ({"limits": {"ask_above": {"hours": 9}}}, r"Did you mean `compute.limits.ask_above.\w+_hours`"),
    ],
)
def test_limits_that_could_not_be_looked_at_are_refused(compute: dict[str, Any], told: str) -> None:
    with pytest.raises(RecipeError, match=told):
        build(compute)


def test_a_first_drop_chooses_no_price_and_takes_no_limit_away() -> None:
    limits = {"ask_above": {"gpu_hours": 8}, "stop_above": {"gpu_hours": 20}}
    under = merge(resolve({"extends": "tiny"}), {"compute": {"limits": limits, "price": {"core_hour": 1.0}}})
    for own in ("price: {core_hour: 0.0}", "gpu_tflops: 900"):
        with pytest.raises(RecipeError, match="a recipe in a drop may not choose it"):
            put_first_drop_over(under, read_yaml(f"compute: {{{own}}}"))
    for own in (
        "limits: null",
        "limits: {ask_above: {gpu_hours: 9}}",
        "limits: {unknown: start}",
        "limits: {people: [me]}",
    ):
        with pytest.raises(RecipeError, match=r"compute.limits.*may not change it or take it away"):
            put_first_drop_over(under, read_yaml(f"compute: {{{own}}}"))
    assert put_first_drop_over(under, read_yaml("compute: {nodes: 2}"))["compute"]["limits"] == limits
    free = resolve({"extends": "tiny"})
    assert put_first_drop_over(free, {"compute": {"limits": {"ask_above": {"gpu_hours": 1}}}})["compute"]["limits"]
