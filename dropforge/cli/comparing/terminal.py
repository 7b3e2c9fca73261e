"""The comparison in the terminal: what differs as tables, and each curve as a line of blocks on one scale."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from rich.console import RenderableType
from rich.table import Column, Table

from dropforge.cli.comparing.texts import counted, difference, excerpts, figure, visible
from dropforge.comparison import Comparison, Curve, MetricRow, Points, TextRow
from dropforge.scales import mean, share
from dropforge.terminal import Console, Text

BARS = "▁▂▃▄▅▆▇█"
BROKEN = "×"  # a value that is not finite
_COLUMNS = 5  # runs that have a column each; of more a row tells who has which value
_TEXT = 60  # characters of a value
_VERDICT = 160


def show(comparison: Comparison, console: Console, *, every: bool = False) -> None:
    """Print the comparison. :param every: equal values too."""
    for part in _parts(comparison, console.width, every):
        console.print(part, soft_wrap=isinstance(part, Text))


def sparkline(points: Points, steps: tuple[int, int], scale: tuple[float, float], width: int) -> str:
    """A curve as blocks: a column is the mean of its values, or lies between those beside it.

    :param steps: what the first and the last column stand for. :param scale: what the lowest and highest block do.
    """
    if not points:
        return ""
    first, span = steps[0], max(1, steps[1] - steps[0])
    low, high = scale
    columns: dict[int, list[float]] = {}
    for step, value in points:
        columns.setdefault(round((step - first) / span * (width - 1)), []).append(value)
    means = {place: mean(values) for place, values in columns.items()}
    finite = {place: value for place, value in means.items() if math.isfinite(value)}
    line = [" "] * width
    for place in range(width):
        height = means[place] if place in means else _between(finite, place)
        if height is not None:
            line[place] = BARS[round(share(height, low, high) * 7)] if math.isfinite(height) else BROKEN
    return "".join(line)


def _parts(comparison: Comparison, width: int, every: bool) -> Iterator[RenderableType]:
    yield _legend(comparison)
    if len(comparison.families) > 1:
        yield Text(f"Runs of {len(comparison.families)} families: {', '.join(map(visible, comparison.families))}.")
    for run, letter in zip(comparison.runs, comparison.letters, strict=True):
        for note in run.notes:
            yield Text(f"{letter}: {visible(note)}.", "yellow")
    for name, rows in (("param", comparison.params), ("tag", comparison.tags)):
        shown = [row for row in rows if every or not row.same]
        yield _heading(name, len(rows), sum(row.same for row in rows))
        if shown:
            yield _texts(comparison, name, shown)
    metrics = [row for row in comparison.metrics if every or not row.same]
    yield _heading("metric", len(comparison.metrics), sum(row.same for row in comparison.metrics))
    if metrics:
        few = len(comparison.runs) <= _COLUMNS
        yield _metrics(comparison, metrics) if few else _extremes(comparison, metrics)
    for curve in comparison.curves:
        yield from _curve(curve, comparison.letters, width)


def _legend(comparison: Comparison) -> Table:
    table = Table(
        Column("", style="bold", no_wrap=True),
        Column("run", no_wrap=True),
        Column("family", overflow="fold", min_width=8),
        *(Column(name, no_wrap=True) for name in ("version", "status")),
        Column("verdict", min_width=12),
        box=None,
        header_style="bold",
    )
    for run, letter in zip(comparison.runs, comparison.letters, strict=True):
        asked = f"\n({visible(run.asked)})" if run.asked and run.asked != run.name else ""
        # Why a model was held back; that it beat everybody needs no words.
        (verdict,) = excerpts(["promote" if run.verdict.startswith("promote:") else run.verdict or "-"], _VERDICT)
        cells = (run.family, run.version or "-", run.status, verdict or "-")
        table.add_row(letter, Text(visible(run.name) + asked), *(Text(visible(cell)) for cell in cells))
    return table


def _heading(name: str, count: int, same: int) -> Text:
    if not count:
        return Text.assemble("\n", (f"{name}s", "bold"), (f"  no run has a {name}", "dim"))
    told = f"all {counted(same, name)}" if same == count else counted(same, name)
    return Text.assemble("\n", (f"{name}s", "bold"), (f"  {told}", "dim"))


def _texts(comparison: Comparison, name: str, rows: Sequence[TextRow]) -> Table:
    if len(comparison.runs) <= _COLUMNS:
        table = Table(Column(name), *(Column(sign, overflow="fold") for sign in comparison.letters), box=None)
        for row in rows:
            cells = [_value(value) for value in excerpts(row.values, _TEXT)]
            table.add_row(Text(visible(row.name)), *cells)
        return table
    table = Table(Column(name), Column("value", overflow="fold"), Column("runs"), box=None)
    for row in rows:
        values = list(dict.fromkeys(row.values))
        for place, (value, cut) in enumerate(zip(values, excerpts(values, _TEXT), strict=True)):
            who = [sign for sign, own in zip(comparison.letters, row.values, strict=True) if own == value]
            table.add_row(Text(visible(row.name)) if not place else "", _value(cut), " ".join(who))
    return table


def _value(value: str | None) -> Text:
    return Text("none", "dim italic") if value is None else Text(visible(value)) if value else Text("empty", "dim")


def _metrics(comparison: Comparison, rows: Sequence[MetricRow]) -> Table:
    table = Table(Column("metric"), *(Column(sign, justify="right") for sign in comparison.letters), box=None)
    for row in rows:
        cells = []
        for place, (last, best, change) in enumerate(zip(row.last, row.best, row.changes, strict=True)):
            cell = Text(figure(last), "green" if place in row.leaders else "")
            if told := difference(change):
                cell.append(f"  {told}", "dim")
            if best is not None and best.value != last:
                cell.append(f"\nbest {'' if best.whole else '≈ '}{figure(best.value)} at {best.step:,}", "dim")
            cells.append(cell)
        table.add_row(Text(visible(row.name)), *cells)
    return table


def _extremes(comparison: Comparison, rows: Sequence[MetricRow]) -> Table:
    """Of many runs the lowest and the highest value."""
    names = (f"{comparison.letters[0]} (the first)", "lowest", "highest")
    table = Table("metric", *(Column(name, justify="right") for name in names), "none of it", box=None)
    for row in rows:
        known = {place: value for place, value in enumerate(row.last) if value is not None and math.isfinite(value)}
        ends = [f(known, key=known.__getitem__) for f in (min, max)] if known else []
        cells = [Text(figure(row.last[0]))]
        for place in ends:
            told = f"{figure(known[place])} {comparison.letters[place]}"
            cells.append(Text(told, "green" if place in row.leaders else ""))
        none = [comparison.letters[place] for place in range(len(row.last)) if place not in known]
        table.add_row(Text(visible(row.name)), *(cells + [Text("-")] * (3 - len(cells))), Text(" ".join(none), "dim"))
    return table


def _curve(curve: Curve, letters: Sequence[str], width: int) -> Iterator[Text]:
    values, (first, last) = curve.finite, curve.steps
    low, high = (min(values), max(values)) if values else (0.0, 0.0)
    unit = f" {curve.unit}" if curve.unit else ""
    told = f"  steps {first:,} to {last:,}, blocks from {figure(low)} to {figure(high)}{unit}"
    yield Text.assemble("\n", (visible(curve.name), "bold"), (told, "dim"))
    room = max(10, min(60, width - 40))
    widest = max(map(len, letters))
    for letter, line in zip(letters, curve.lines, strict=True):
        if not line:
            yield Text.assemble((f"{letter:{widest}}", "bold"), ("  no values", "dim"))
            continue
        drawn = sparkline(line, (first, last), (low, high), room)
        ends = f"  {figure(line[0][1])} → {figure(line[-1][1])}"
        yield Text.assemble((f"{letter:{widest}}", "bold"), "  ", (drawn, "cyan"), ends)


def _between(means: Mapping[int, float], place: int) -> float | None:
    """On the line from the column before to the one after; None outside of them."""
    before = max((other for other in means if other < place), default=None)
    after = min((other for other in means if other > place), default=None)
    if before is None or after is None:
        return None
    way = (place - before) / (after - before)
    return (1 - way) * means[before] + way * means[after]  # no difference, which may be no float
