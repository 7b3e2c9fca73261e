"""What a training would take, before a pod exists: steps, tokens, memory, time, hours and cost. Pure.

No figure is invented: time follows from a speed that was measured, or that the recipe states, or it is not known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from dropforge.costs import UNKNOWN, Hours, Tariff
from dropforge.estimate import Estimate, shape_of, size_text, trained_weights
from dropforge.json_objects import typed
from dropforge.recipe import Recipe
from dropforge.seq2seq_shape import Seq2SeqShape
from dropforge.shape import Shape
from dropforge.text import as_cell, as_line, counted, markdown_table


@dataclass(frozen=True)
class Speed:
    """Tokens a second of one rank while it trains, and where that figure comes from."""

    tokens_per_second: float
    source: str


@dataclass(frozen=True)
class Forecast:
    """What a training would take: its steps alone, without waiting, pulling, loading and evaluating.

    :param gpus, cores: that its pods hold together. :param source: where its time comes from, or why it has none.
    :param estimated: whether the steps, and the tokens with them, follow from the text's length, not from the recipe.
    """

    steps: int | None
    tokens: int | None
    rank_bytes: int | None
    ranks: int
    nodes: int
    gpus: int
    cores: float
    seconds: float | None
    source: str
    gpu_hours: float | None
    core_hours: float | None
    cost: float | None = None
    currency: str = ""
    estimated: bool = False

    @property
    def hours(self) -> Hours:
        return Hours(self.gpu_hours, self.core_hours, self.cost, self.currency)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Forecast:
        """Read a plan as it was kept. :raises TypeError: if a part has another type."""
        found = typed(cls(**{field.name: values[field.name] for field in fields(cls) if field.name in values}))
        # Pods write where it lies, and a person is asked with these words.
        return replace(found, source=as_line(found.source, 500), currency=as_line(found.currency))

    def rows(self) -> list[tuple[str, str]]:
        """For people, by what each figure is."""
        pods, gpus = counted(self.nodes, "pod"), counted(self.gpus, "GPU")
        ranks = f"{self.ranks} in {pods} with {gpus} and {self.cores:g} CPU cores in total"
        time = UNKNOWN if self.seconds is None else f"about {time_text(self.seconds)}"
        return [
            ("steps", steps_text(self.steps, estimated=self.estimated)),
            ("tokens", f"{'about ' if self.estimated and self.tokens else ''}{_count(self.tokens)}"),
            ("memory of a rank", UNKNOWN if self.rank_bytes is None else f"about {size_text(self.rank_bytes)}"),
            ("ranks", ranks),
            ("time", f"{time}: {self.source}"),
            ("takes", str(self.hours)),
        ]

    def as_markdown(self) -> str:
        """The rows as a table."""
        return markdown_table(("the plan", ""), [(name, as_cell(value)) for name, value in self.rows()])

    def __str__(self) -> str:
        return "; ".join(f"{name}: {value}" for name, value in self.rows())

    def metrics(self) -> dict[str, float]:
        """For MLflow; what is not known is left out."""
        found = {"steps": self.steps, "tokens": self.tokens, "rank_bytes": self.rank_bytes, "seconds": self.seconds}
        named = {f"plan/{name}": float(value) for name, value in found.items() if value is not None}
        return {**named, **self.hours.metrics("plan")}


def forecast(recipe: Recipe, figures: Estimate, measured: Speed | None = None) -> Forecast:
    """What a training would take.

    :param measured: of earlier runs like this one; without it the recipe's `compute.gpu_tflops` gives the speed.
    """
    compute = recipe.compute
    speed, why = measured, ""
    if speed is None:
        speed, why = by_throughput(recipe)
    seconds = None
    if speed is not None and figures.tokens is None:
        why = "the steps are not known"
    elif speed is not None and figures.tokens is not None:
        seconds = figures.tokens / (speed.tokens_per_second * figures.ranks)
    gpus, cores = compute.nodes * compute.gpus, compute.nodes * compute.cpus
    hours = None if seconds is None else seconds / 3600
    taken = Tariff.of(compute).hours(
        0.0 if gpus == 0 else None if hours is None else hours * gpus, None if hours is None else hours * cores
    )
    return Forecast(
        steps=figures.steps,
        tokens=figures.tokens,
        rank_bytes=figures.rank_bytes,
        ranks=figures.ranks,
        nodes=compute.nodes,
        gpus=gpus,
        cores=cores,
        seconds=seconds,
        source=speed.source if speed is not None and seconds is not None else why,
        gpu_hours=taken.gpu_hours,
        core_hours=taken.core_hours,
        cost=taken.cost,
        currency=taken.currency,
        estimated=recipe.train.max_steps is None,
    )


def steps_text(steps: int | None, *, estimated: bool) -> str:
    """Steps for people, before the data are tokenised. :param estimated: as of `Forecast`."""
    return f"about {_count(steps)}, estimated from the length of the text" if estimated and steps else _count(steps)


def by_throughput(recipe: Recipe) -> tuple[Speed | None, str]:
    """The speed that the recipe's `compute.gpu_tflops` comes to, or why there is none."""
    tflops = recipe.compute.gpu_tflops
    if tflops is None or not recipe.compute.gpus:
        key = " and the recipe names no `compute.gpu_tflops`" if recipe.compute.gpus else ""
        return None, f"no earlier run of the family with this model and compute was measured{key}"
    shape = shape_of(recipe)
    needed = None if shape is None else flops_per_token(recipe, shape)
    if needed is None:
        return None, "the FLOPs of this model are not known"
    source = f"{needed:.3g} FLOPs a token at {tflops:g} teraFLOPs a second, which `compute.gpu_tflops` says"
    return Speed(tflops * 1e12 / needed, source), ""


def flops_per_token(recipe: Recipe, shape: Shape) -> float | None:
    """Of forward and backward pass: two of each weight that a token meets for each pass, three where it is trained.

    Attention is counted over the whole sequence, so that short documents in a pack need less. None for an
    encoder-decoder, whose tokens do not all meet the same weights.
    """
    if isinstance(shape, Seq2SeqShape):
        return None
    met = shape.layers * shape.block + shape.vocab * shape.hidden
    if shape.experts:
        idle = (shape.experts - shape.chosen) * 3 * shape.hidden * shape.mlp
        met -= shape.layers * idle
    trained = trained_weights(recipe, shape)
    passes = 6.0 * met if recipe.train.method == "full" else 4.0 * met + 6.0 * trained
    return passes + 12.0 * shape.layers * shape.heads * shape.head * recipe.train.sequence_length


def time_text(seconds: float) -> str:
    """Seconds for people."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"


def _count(value: int | None) -> str:
    return UNKNOWN if value is None else f"{value:,}"
