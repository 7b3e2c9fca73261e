"""The comparison as one page that needs nothing else. Names, params and answers come from outside: all is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from urllib.parse import urlsplit

from dropforge.answers import AnswerTable
from dropforge.cli.comparing import links
from dropforge.cli.comparing.answers_section import samples
from dropforge.cli.comparing.pieces import chip, cut, name, section, table, text
from dropforge.cli.comparing.plot import colour, dash, plot
from dropforge.cli.comparing.texts import counted, difference, excerpts, figure
from dropforge.comparison import ComparedRun, Comparison, Curve, MetricRow, TextRow

_EXCERPT = 120  # characters of a value beside others
_VERDICT = 240
_OPEN = 4  # runs whose checks need not be unfolded


def render(comparison: Comparison, answers: Sequence[Sequence[AnswerTable]], uri: str, now: float) -> str:
    """The page. :param answers: for each run the tables with its answers. :param now: seconds since 1970."""
    linked = uri if urlsplit(uri).scheme in ("http", "https") else ""
    letters = comparison.letters
    same = "Values that all runs share are left out."
    sections = [
        _head(comparison, linked, now),
        section("Runs", _runs(comparison, linked)),
        section("Params", _texts("param", comparison.params, letters), same),
        section("Tags", _texts("tag", comparison.tags, letters), same),
        section(
            "Metrics", _metrics(comparison.metrics, letters), f"Last values, and how far they are from {letters[0]}'s."
        ),
        section("Curves", "".join(_curve(curve, letters) for curve in comparison.curves)),
        section(
            "Verdicts", _verdicts(comparison), "Every check of the promotion rule, in the words that MLflow shows."
        ),
        section("Sample outputs", samples(answers, letters)),
    ]
    style = files("dropforge.cli.comparing").joinpath("page.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{text(_title(comparison))}</title><style>{style}</style></head><body><main>{''.join(sections)}"
        "<footer>Written by <code>dropforge compare</code>.</footer></main></body></html>\n"
    )


def _title(comparison: Comparison) -> str:
    if len(comparison.runs) > 3:
        return f"{len(comparison.runs)} runs of {', '.join(comparison.families)}"
    return " · ".join(run.name for run in comparison.runs)


def _title_lines(comparison: Comparison) -> str:
    """The title, broken between names only."""
    *before, last = (name(part) for part in _title(comparison).split(" · "))
    return "".join(f"<span>{part}&nbsp;·&nbsp;</span>" for part in before) + f"<span>{last}</span>"


def _head(comparison: Comparison, uri: str, now: float) -> str:
    families = ", ".join(comparison.families)
    of = f"{len(comparison.families)} families: {families}" if len(comparison.families) > 1 else f"family {families}"
    link = escape(links.compare_view(uri, comparison.runs), quote=True) if uri else ""
    view = f' · <a href="{link}">MLflow\'s compare view</a>' if link else ""
    notes = [
        f"<li>{sign}: {text(note)}</li>"
        for run, sign in zip(comparison.runs, comparison.letters, strict=True)
        for note in run.notes
    ]
    warn = f'<aside class="warn"><strong>Worth a look</strong><ul>{"".join(notes)}</ul></aside>' if notes else ""
    return (
        f'<header><p class="kind">Comparison</p><h1>{_title_lines(comparison)}</h1><p class="sub">{text(of)} · written '
        f"{_time(now)}{view}</p></header>{warn}"
    )


def _runs(comparison: Comparison, uri: str) -> str:
    rows = []
    for place, (run, sign) in enumerate(zip(comparison.runs, comparison.letters, strict=True)):
        address = escape(links.run_page(uri, run), quote=True) if uri else ""
        own = f'<a href="{address}">{name(run.name)}</a>' if address else name(run.name)
        asked = f"<br><small>named as {text(run.asked)}</small>" if run.asked and run.asked != run.name else ""
        facts = (run.family, run.version or "-", run.status, _time(run.began) if run.began else "-")
        cells = [chip(place, sign), own + asked, name(facts[0]), *(f"<span>{text(fact)}</span>" for fact in facts[1:])]
        cells.append(cut(run.verdict or "-", _VERDICT))
        rows.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    return table(["", "run", "family", "version", "status", "began (UTC)", "verdict"], rows, "runs")


def _texts(what: str, rows: Sequence[TextRow], letters: Sequence[str]) -> str:
    if not rows:
        return f"<p>No run has a {what}.</p>"
    body = []
    for row in (row for row in rows if not row.same):
        shown = excerpts(row.values, _EXCERPT)
        cells = [
            '<td class="none">none</td>' if value is None else f"<td>{cut(value, _EXCERPT, part)}</td>"
            for value, part in zip(row.values, shown, strict=True)
        ]
        body.append(f"<tr><th>{name(row.name)}</th>{''.join(cells)}</tr>")
    same = [row for row in rows if row.same]
    return (_by_run(what, body, letters) if body else "") + _folded(
        what, [f"<tr><th>{name(row.name)}</th><td>{cut(row.values[0] or '', _EXCERPT)}</td></tr>" for row in same]
    )


def _metrics(rows: Sequence[MetricRow], letters: Sequence[str]) -> str:
    if not rows:
        return "<p>No run has a metric.</p>"
    body = []
    for row in (row for row in rows if not row.same):
        cells = []
        for place, (last, best, change) in enumerate(zip(row.last, row.best, row.changes, strict=True)):
            told = difference(change)
            lines = [told] if told else []
            if best is not None and best.value != last:
                lines.append(f"best {'' if best.whole else '≈ '}{figure(best.value)} at {best.step:,}")
            small = "".join(f"<small>{line}</small>" for line in lines)
            kind = "n best" if place in row.leaders else "n"
            cells.append(f'<td class="{kind}">{figure(last)}{small}</td>')
        body.append(f"<tr><th>{name(row.name)}</th>{''.join(cells)}</tr>")
    same = [f'<tr><th>{name(row.name)}</th><td class="n">{figure(row.last[0])}</td></tr>' for row in rows if row.same]
    return (_by_run("metric", body, letters, "n") if body else "") + _folded("metric", same)


def _by_run(what: str, rows: Sequence[str], letters: Sequence[str], kind: str = "") -> str:
    return table([what, *(chip(place, sign) for place, sign in enumerate(letters))], rows, "by-run", kind)


def _folded(what: str, rows: Sequence[str]) -> str:
    if not rows:
        return ""
    return f"<details><summary>{counted(len(rows), what)}</summary>{table([what, 'value'], rows)}</details>"


def _curve(curve: Curve, letters: Sequence[str]) -> str:
    parts = []
    for place, (line, sign) in enumerate(zip(curve.lines, letters, strict=True)):
        pattern = f' stroke-dasharray="{dash(place)}"' if dash(place) else ""
        mark = (
            f'<svg viewBox="0 0 30 10"><line x1="0" x2="30" y1="5" y2="5" stroke="{colour(place)}" stroke-width="3"'
            f"{pattern}/></svg>"
        )
        ends = f"{figure(line[0][1])} → {figure(line[-1][1])}" if line else '<span class="none">no values</span>'
        parts.append(f"<span>{mark}<b>{sign}</b> {ends}</span>")
    unit = f", {escape(curve.unit)}" if curve.unit else ""
    drawn = plot(curve, letters) or "<p>No value is finite.</p>"
    return f'<h3>{text(curve.name)}{unit}</h3><figure>{drawn}</figure><p class="legend">{"".join(parts)}</p>'


def _verdicts(comparison: Comparison) -> str:
    shown = " open" if len(comparison.runs) <= _OPEN else ""
    return "".join(
        f"<details{shown}>{_verdict(run, place, sign)}</details>"
        for place, (run, sign) in enumerate(zip(comparison.runs, comparison.letters, strict=True))
    )


def _verdict(run: ComparedRun, place: int, sign: str) -> str:
    against = f" · measured against version {text(run.champion)}" if run.champion else ""
    head = f"<summary>{chip(place, sign)} {text(run.name)}{against}</summary>"
    if not run.checks:
        return f"{head}<p>{cut(run.verdict, _VERDICT) if run.verdict else 'There is no verdict yet.'}</p>"
    rows = []
    for check in run.checks:
        kind = "yes" if check.passed == "yes" else "no"
        rows.append(
            f"<tr><td>{text(check.check)}</td><td>{text(check.candidate)}</td><td>{text(check.reference)}</td>"
            f'<td class="{kind}">{text(check.passed)}</td><td>{text(check.reason)}</td></tr>'
        )
    return head + table(["check", "candidate", "reference", "passed", "reason"], rows, "checks")


def _time(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")
    except (ValueError, OverflowError, OSError):  # beyond the calendar, which MLflow takes
        return "?"
