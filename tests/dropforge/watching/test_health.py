"""The verdict on a training: the sign that cost most, above its bound; judged is what MLflow has of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dropforge import tracking
from dropforge.rest import Rest
from dropforge.watching.figures import read_figures, verdict_of
from dropforge.watching.health import HEALTHS, Figures, judge
from tests.dropforge.watching.conftest import Field

STEPS = range(10, 210, 10)


def flat(value: float) -> dict[int, float]:
    return dict.fromkeys(STEPS, value)


def figures(**more: object) -> Figures:
    """A training of two ranks whose steps take a second, without any trouble."""
    found: dict[str, object] = {
        "seconds": flat(1.0),
        "data": flat(0.02),
        "gradients": flat(0.05),
        "collective": flat(0.01),
        "speed": flat(1000.0),
        "spread": flat(1.02),
        "slowest": flat(3),
    }
    return Figures(**(found | more))  # type: ignore[arg-type]


def halves(first: float, second: float) -> dict[int, float]:
    return {step: first if step <= 100 else second for step in STEPS}


@pytest.mark.parametrize(
    ("found", "health", "words"),
    [
        (figures(), "healthy", "2% of the steps' time went into batches, 4% into waiting for other ranks"),
        (figures(data=flat(0.14)), "healthy", ""),
        (figures(data=flat(0.4)), "data-bound", "40% of the steps' time went into making batches"),
        (figures(gradients=flat(0.5)), "communication-bound", "49% of the steps' time went into waiting for other"),
        (figures(gradients=flat(0.2)), "healthy", ""),
        # Waiting for a slow rank is no fault of the network.
        (figures(gradients=flat(0.5), spread=flat(2.0)), "throttled", "rank 3 took 2.00 times as long as"),
        # Now this one, now that one: chance, and no fault of the network either.
        (figures(gradients=flat(0.5), spread=flat(2.0), slowest=halves(1, 0)), "healthy", ""),
        (figures(spread=flat(1.2)), "healthy", ""),
        (figures(speed=halves(1000, 700)), "throttled", "1.43 times as long in the second half"),
        (figures(speed=halves(1000, 850)), "healthy", ""),
        (figures(speed=halves(700, 1000)), "healthy", ""),  # it became faster
        # It became slower because batches do.
        (figures(seconds=halves(1.0, 2.0), data=halves(0.02, 1.02), speed=halves(1000, 500)), "data-bound", "36%"),
        (
            figures(slowed={"gpu_0": 0.02, "node_1/gpu_3": 0.5}),
            "throttled",
            "node_1/gpu_3 was slowed by heat or power in 50%",
        ),
        (figures(slowed={"gpu_0": 0.05}), "healthy", ""),
        # One rank: nothing is known of waiting, and nothing is said.
        (Figures(seconds=flat(1.0), data=flat(0.01)), "healthy", "1% of the steps' time went into batches"),
        (Figures(), "unknown", "the training logged no step"),
        (Figures(seconds={1: 0.5}), "healthy", "0%"),
        # The first log step compiles and fills caches.
        (figures(data={**flat(0.02), 10: 1.0}, seconds={**flat(1.0), 10: 9.0}), "healthy", ""),
    ],
)
def test_the_sign_that_cost_most_gives_the_verdict(found: Figures, health: str, words: str) -> None:
    verdict = judge(found)
    assert verdict.health == health, str(verdict)
    assert words in str(verdict)
    assert str(verdict).startswith(f"{health}: ")


def test_the_one_furthest_above_its_bound_is_named() -> None:
    both = figures(data=flat(0.45), gradients=flat(0.3))
    assert judge(both).health == "data-bound"
    shares = judge(both).metrics()
    assert shares["health/data_share"] == pytest.approx(0.45)
    assert shares["health/communication_share"] == pytest.approx(0.31 - 0.0196, abs=0.001)


values = st.dictionaries(st.integers(0, 50), st.floats(0, 1e6), max_size=12)


@given(values, values, values, values, values, values)
def test_whatever_was_logged_there_is_a_verdict(
    seconds: dict[int, float],
    data: dict[int, float],
    gradients: dict[int, float],
    collective: dict[int, float],
    speed: dict[int, float],
    spread: dict[int, float],
) -> None:
    verdict = judge(Figures(seconds, data, gradients, collective, speed, spread, spread))
    assert verdict.health in HEALTHS
    assert all(share >= 0 for share in verdict.shares.values())


def test_what_mlflow_has_of_a_run_is_judged(field: Field) -> None:
    spec = field.open(1)
    client, run_id = tracking.client(field.mlflow), field.id(spec)
    assert str(verdict_of(field.mlflow, run_id)) == "unknown: the training logged no step"
    for step in range(1, 5):
        for name, value in (("step_seconds", 2.0), ("data_wait_seconds", 0.8), ("tokens_per_second", 100.0)):
            client.log_metric(run_id, f"train/{name}", value, step=step)
    for at, value in ((0, 0.0), (10, 100.0)):
        client.log_metric(run_id, "system/node_1/gpu_0_throttled_percentage", value, step=at)
    found = read_figures(Rest(field.mlflow), run_id)
    assert found.data == {1: 0.8, 2: 0.8, 3: 0.8, 4: 0.8}
    assert found.slowed == {"node_1/gpu_0": 0.5}
    assert str(judge(found)) == "throttled: node_1/gpu_0 was slowed by heat or power in 50% of its samples"
    assert verdict_of("sqlite:///somewhere.db", run_id) is None
