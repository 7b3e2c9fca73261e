"""What a training would take: every figure is derived from something that is named, or it is not known."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import Any

import pytest

from dropforge import speeds, tracking
from dropforge.estimate import estimate
from dropforge.forecast import Forecast, Speed, by_throughput, forecast, time_text
from dropforge.recipe import Recipe
from dropforge.recipes import load_recipe, parse_recipe
from dropforge.run import RunSpec
from dropforge.small_data import too_small

GPUS: dict[str, Any] = {"nodes": 2, "processes_per_node": 4, "gpus": 4, "cpus": 16, "memory_gb": 200}
SPEED = Speed(1000.0, "measured")


def recipe(**compute: Any) -> Recipe:
    return load_recipe("tiny", {"compute": compute, "train": {"tokens_per_step": 8192, "max_steps": 450}})


def test_hours_are_those_that_all_pods_hold() -> None:
    made = recipe(**GPUS, price={"gpu_hour": 2.0, "currency": "EUR"})
    found = forecast(made, estimate(made), SPEED)
    assert (found.steps, found.tokens, found.ranks, found.gpus, found.cores) == (450, 450 * 8192, 8, 8, 32)
    seconds = 450 * 8192 / 8000
    assert found.seconds == pytest.approx(seconds)
    assert found.gpu_hours == pytest.approx(seconds * 8 / 3600)
    assert found.core_hours == pytest.approx(seconds * 32 / 3600)
    assert found.cost == pytest.approx(seconds * 16 / 3600)
    assert "measured" in str(found)
    assert Forecast.from_dict(found.to_dict()) == found
    assert found.metrics()["plan/gpu_hours"] == found.gpu_hours
    assert found.metrics()["plan/total"] == found.cost


def test_without_a_speed_time_and_hours_are_not_known() -> None:
    made = recipe(**GPUS)
    found = forecast(made, estimate(made))
    assert (found.seconds, found.gpu_hours, found.core_hours, found.cost) == (None, None, None, None)
    assert "no earlier run of the family" in found.source
    assert "compute.gpu_tflops" in found.source
    assert "time: not known" in str(found)
    assert set(found.metrics()) == {"plan/steps", "plan/tokens", "plan/rank_bytes"}


def test_without_gpus_no_gpu_hours_pass_whatever_the_time() -> None:
    made = recipe()
    found = forecast(made, estimate(made))
    assert (found.gpu_hours, found.core_hours) == (0.0, None)


def test_a_training_of_few_steps_and_an_evaluation_of_few_rows_are_pointed_out() -> None:
    assert too_small(10, 20) == too_small(None, None) == too_small("1", [2]) == []
    steps, rows = too_small(1, 2, estimated=True)
    assert steps.startswith("The training has about 1 step, fewer than 10")
    assert rows.startswith("The evaluation has 2 rows, fewer than 20")


def test_steps_that_follow_from_the_text_are_called_an_estimate() -> None:
    made = load_recipe("tiny", {"train": {"max_steps": None, "epochs": 2}})
    found = forecast(made, estimate(made, 4096 * 100, curated=True), SPEED)
    assert f"steps: about {found.steps:,}, estimated from the length of the text; tokens: about " in str(found)
    assert "about " in found.as_markdown().split("steps")[1].split("tokens")[0]  # what a person is asked with
    assert Forecast.from_dict(found.to_dict()) == found
    older = {name: value for name, value in found.to_dict().items() if name != "estimated"}
    assert not Forecast.from_dict(older).estimated
    exact = recipe()
    assert "steps: 450; tokens: 3," in str(forecast(exact, estimate(exact)))


def test_without_steps_there_is_no_time() -> None:
    made = load_recipe("tiny", {"train": {"epochs": 1}})
    found = forecast(made, estimate(made), SPEED)
    assert (found.steps, found.seconds, found.source) == (None, None, "the steps are not known")
    found = forecast(made, estimate(made, 4096 * 100, curated=True), SPEED)
    assert (found.steps, found.tokens) == (100, 100 * 1024)


@pytest.mark.parametrize(
    ("preset", "billions"),
    # Six times the weights that a token meets, and a little for attention; adapters need four.
    [("llama-3.1-8b", (4 * 7.5, 4 * 8.5)), ("mixtral-8x7b", (4 * 12.5, 4 * 14))],
)
def test_a_stated_throughput_gives_the_speed(preset: str, billions: tuple[float, float]) -> None:
    made = load_recipe(preset)
    made = made.model_copy(update={"compute": made.compute.model_copy(update={"gpu_tflops": 400.0})})
    speed, why = by_throughput(made)
    assert speed is not None, why
    flops = 400e12 / speed.tokens_per_second / 1e9
    low, high = billions
    assert low <= flops <= high * 1.15, flops
    assert "`compute.gpu_tflops`" in speed.source
    # What was measured wins.
    assert forecast(made, replace(estimate(made), tokens=10**6), SPEED).source == "measured"


def test_a_stated_throughput_says_nothing_about_cores_or_an_unknown_model() -> None:
    assert by_throughput(recipe(gpu_tflops=400.0))[0] is None
    unknown = load_recipe("lora", {"base": {"model": "nobody/knows"}, "compute": {**GPUS, "gpu_tflops": 400.0}})
    assert by_throughput(unknown) == (None, "the FLOPs of this model are not known")


@pytest.mark.parametrize(
    ("seconds", "told"), [(59.6, "60 s"), (3540, "59 min"), (7200, "2 h 00 min"), (90061, "25 h 01 min")]
)
def test_seconds_for_people(seconds: float, told: str) -> None:
    assert time_text(seconds) == told


def spec(run: str, made: Recipe, family: str) -> RunSpec:
    return RunSpec(run, family, 1, "s3://b/r", "s3://b", "s3://b/m", "d" * 64, made.plain(), "code")


def test_earlier_runs_with_the_same_model_and_compute_tell_the_speed(mlflow_server: str) -> None:
    family, made = "measured-speeds", recipe()
    assert speeds.measured(mlflow_server, family, made) is None
    client = tracking.client(mlflow_server)
    other = load_recipe("tiny", {"train": {"micro_batch": 1}})
    learned = load_recipe("tiny", {"train": {"tokens_per_step": 8192, "learning_rate": 0.5, "max_steps": 3}})
    for name, one, speed in (("a", made, 100.0), ("b", learned, 300.0), ("c", other, 9000.0), ("d", made, None)):
        opened = tracking.open_run(mlflow_server, spec(name, one, family), one.flat(), {})
        if speed is not None:
            client.log_metric(opened.run_id, speeds.METRIC, speed)
    found = speeds.measured(mlflow_server, family, made)
    assert found is not None
    assert found.tokens_per_second == 200.0
    assert "the median of 2 runs of the family with this model and compute (b)" in found.source
    assert speeds.measured(mlflow_server, family, recipe(cpus=7)) is None


def test_hours_of_a_plan_stand_on_the_mlflow_run(mlflow_server: str) -> None:
    made = recipe(**GPUS)
    opened = tracking.open_run(mlflow_server, spec("e", made, "planned-hours"), made.flat(), {})
    found = forecast(made, estimate(made), SPEED)
    for _ in range(2):
        tracking.log_hours(mlflow_server, opened.run_id, found.metrics(), tracking.TAG_PLAN, str(found))
    data = tracking.client(mlflow_server).get_run(opened.run_id).data
    assert data.metrics["plan/gpu_hours"] == pytest.approx(found.gpu_hours)
    assert "GPU-hours" in data.tags[tracking.TAG_PLAN]


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("task: classification\nextends: distilbert\ntrain: {epochs: 3, rows_per_step: 32}", 17),
        ("extends: t5-small\ntrain: {epochs: 1, rows_per_step: 32}", 6),
        ("extends: tiny\ntrain: {epochs: 1, rows_per_step: 8, packing: 'off', max_steps: null}", 22),
    ],
)
def test_rows_that_are_not_packed_are_counted_and_not_their_bytes(text: str, steps: int) -> None:
    recipe = parse_recipe(f"{text}\n")
    assert estimate(recipe, 9000, data_rows=180).steps == pytest.approx(steps, abs=1)
    assert estimate(recipe, 9000).steps is None
    assert estimate(recipe, 9000, data_rows=180, curated=True).steps == ceil(
        180 * (recipe.train.passes or 1) / recipe.train.rows
    )
