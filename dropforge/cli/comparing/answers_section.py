"""The page's section on what the models answered to the same prompts."""

from __future__ import annotations

from collections.abc import Sequence

from dropforge.answers import Answer, AnswerTable, Sample, match
from dropforge.cli.comparing.pieces import chip, cut, text
from dropforge.cli.comparing.plot import colour
from dropforge.cli.comparing.texts import figure

_MOST = 20  # prompts
_SHOWN = 6  # different answers to a prompt; the others are folded
_LONG = 500  # characters; longer texts are folded
_NO_ANSWERS = (
    "<p>No run has kept answers. With <code>evaluate.generation</code> in the recipe (<code>{}</code> takes the "
    "defaults) a model answers some of the evaluation rows in each evaluation, candidate and champion at the end.</p>"
)


def samples(answers: Sequence[Sequence[AnswerTable]], letters: Sequence[str]) -> str:
    """:param answers: for each run the tables with its answers."""
    found, prompts = match(answers, _MOST)
    if not found:
        return _NO_ANSWERS
    answered = [place for place, tables in enumerate(answers) if any(tables)]
    shared = sum(all(sample.answers[place] is not None for place in answered) for sample in found)
    told = f"{len(found)} of {prompts:,} prompts" if len(found) < prompts else f"{prompts} prompt{'s'[: prompts > 1]}"
    if len(answered) > 1:
        whom = "both" if len(answered) == 2 else f"all {len(answered)}"
        told += f", {shared} of which {whom} runs with answers were asked"
    without = [chip(place, sign) for place, sign in enumerate(letters) if place not in answered]
    silent = f'<p class="legend">No answers were kept of {" ".join(without)}</p>' if without else ""
    return f'<p class="lead">{told}.</p>{silent}{"".join(_sample(sample, letters) for sample in found)}'


def _sample(sample: Sample, letters: Sequence[str]) -> str:
    groups: dict[tuple[str, bool, str], list[int]] = {}
    for place, answer in enumerate(sample.answers):
        if answer is not None:
            groups.setdefault((answer.text, answer.ended, answer.source), []).append(place)
    found = [_answer(sample.answers[places[0]], places, letters) for places in groups.values()]
    answers, more = "".join(found[:_SHOWN]), "".join(found[_SHOWN:])
    folded = f'<summary>{len(found) - _SHOWN} more answers</summary><div class="answers">{more}</div>'
    return (
        f'<article><div class="turns"><div class="text"><b>prompt</b>{cut(sample.prompt, _LONG)}</div>'
        f'<div class="text"><b>held out</b>{cut(sample.reference, _LONG)}</div></div>'
        f'<div class="answers">{answers}</div>{f"<details>{folded}</details>" if more else ""}</article>'
    )


def _answer(answer: Answer | None, places: Sequence[int], letters: Sequence[str]) -> str:
    if answer is None:
        return ""
    who = " ".join(chip(place, letters[place]) for place in places)
    notes = [f"{text(name)} {figure(value)}" for name, value in answer.scores.items()]
    notes += [] if answer.ended else ["cut at the longest answer"]
    notes += [text(answer.source)] if answer.source else []
    told = f"<small>{' · '.join(notes)}</small>" if notes else ""
    own = f' style="--c:{colour(places[0])}"'
    return f'<div class="text answer"{own}><b>{who}</b>{cut(answer.text, _LONG)}{told}</div>'
