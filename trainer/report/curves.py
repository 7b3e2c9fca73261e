"""A training's curves as one picture."""

from __future__ import annotations

import io
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

from trainer.report.points import Points

NAME: Final = "curves.png"
_BLUE, _ORANGE, _GREY = "#1f5fa8", "#d4681c", "#6b7079"
_STEEP: Final = 50  # times its smallest value from which a quantity is drawn on a logarithmic scale


def draw_curves(
    points: Points, evaluations: Sequence[Mapping[str, Any]], resumed: Sequence[int], title: str, note: str = ""
) -> bytes:
    """A PNG of loss, rate, gradient norm, speed, times and memory over the optimizer steps.

    :param evaluations: each with `step` and `eval/loss`. :param resumed: steps from which later attempts went on.
    :param note: how the training stands, below the title.
    """
    # No pyplot: it keeps a state of its own, and chooses a window system.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    figure = Figure(figsize=(12, 10), dpi=100, layout="constrained")
    figure.suptitle(title, fontsize=14, fontweight="bold", ha="left", x=0.01)
    if note:
        figure.text(0.99, 0.994, note, ha="right", va="top", fontsize=10, color=_GREY)
    panels: Any = figure.subplots(3, 2, sharex=True)
    loss, rate, norm, speed, times, memory = panels.flat

    _line(loss, *points.column("loss"), _BLUE, "training, mean since the last log step")
    found = [(item["step"], item["eval/loss"]) for item in evaluations if item.get("eval/loss") is not None]
    if found:
        loss.plot(*zip(*found, strict=True), color=_ORANGE, marker="o", markersize=5, label="evaluation")
    _name(loss, "Loss", "nats per target token")
    _line(rate, *points.column("learning_rate"), _BLUE)
    _name(rate, "Learning rate", "learning rate")
    steps, values = points.column("grad_norm")
    _line(norm, steps, values, _BLUE)
    if values and min(values) > 0 and max(values) > _STEEP * min(values):
        norm.set_yscale("log")
    _name(norm, "Gradient norm, before clipping", "L2 norm")
    _line(speed, *points.column("tokens_per_second"), _BLUE)
    speed.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    _, values = points.column("mfu")
    share = f"; median MFU {statistics.median(values):.1%}" if values else ""
    _name(speed, f"Throughput, all ranks{share}", "tokens per second")
    _line(times, *points.column("step_seconds"), _BLUE, "step")
    _line(times, *points.column("data_wait_seconds"), _ORANGE, "of it making batches")
    _name(times, "Time of a step, rank 0", "seconds")
    for name, colour, label in (
        ("peak_rss_megabytes", _BLUE, "resident"),
        ("cuda_peak_reserved_megabytes", _ORANGE, "GPU, reserved"),
    ):
        steps, values = points.column(name)
        if values:
            _line(memory, steps, [value / 1000 for value in values], colour, label)
    _name(memory, "Peak memory, rank 0", "gigabytes")
    last = max([1.0, *points.column("step")[1], *(float(item["step"]) for item in evaluations)])
    loss.set_xlim(-0.02 * last, 1.02 * last)
    for panel in (speed, times, memory):
        panel.set_ylim(0, 1.15 * max(1e-9, panel.dataLim.y1) if panel.lines else 1)

    for panel in panels.flat:
        for number, step in enumerate(resumed):
            told = "resumed from a checkpoint" if panel is loss and not number else None
            panel.axvline(step, color=_GREY, linestyle="--", linewidth=1, label=told)
        panel.grid(alpha=0.25)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.tick_params(labelbottom=True)
        if panel.get_legend_handles_labels()[0]:
            panel.legend(frameon=False, fontsize=9)
    for panel in panels[-1]:
        panel.set_xlabel("optimizer step")
    target = io.BytesIO()
    FigureCanvasAgg(figure).print_png(target)  # type: ignore[no-untyped-call]
    return target.getvalue()


def _line(panel: Any, steps: list[float], values: list[float], colour: str, label: str | None = None) -> None:
    marker = "o" if len(steps) < 3 else None  # a line of one point is not seen
    if values:
        panel.plot(steps, values, color=colour, linewidth=1.4, marker=marker, markersize=4, label=label)


def _name(panel: Any, title: str, label: str) -> None:
    panel.set_title(title, fontsize=11, loc="left")
    panel.set_ylabel(label)
