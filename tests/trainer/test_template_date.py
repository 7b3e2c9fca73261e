"""A chat template that asks for the date is told one for the run, wherever and whenever it is rendered."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from trainer.data.template import ChatTemplate
from trainer.data.template_date import told_date, with_date
from trainer.rank import run as train
from trainer.report.console import Console
from trainer.state.stop import StopSignal

from .ranks_loop import make_base
from .test_template import CHATML, tokenizer
from .toy import Toy

#: As published ones ask: Llama 3.x, Granite 3, and one that asks inside a macro, where nothing is defined before it.
LLAMA = (
    "{%- if not date_string is defined %}{%- if strftime_now is defined %}"
    '{%- set date_string = strftime_now("%d %b %Y") %}{%- else %}{%- set date_string = "26 Jul 2024" %}'
    "{%- endif %}{%- endif %}{{- 'Today Date: ' + date_string + '\\n' }}"
) + CHATML
GRANITE = "{{ \"Today's Date: \" + strftime_now('%B %d, %Y') + '.\\n' }}" + CHATML
MACRO = "{% macro head() %}{{ strftime_now('%A %-d/%-m/%y %H:%M') }}{% endmacro %}{{ head() + '\\n' }}" + CHATML
DAYS = {"first": "2026-11-05", "again": "2026-11-05", "later": "2026-12-24"}
ASKED = [{"role": "user", "content": "What day is it?"}]


def first_line(template: Any) -> str:
    return ChatTemplate(tokenizer(template)).prompt(ASKED).splitlines()[0]


@pytest.mark.parametrize(
    ("template", "line"),
    [
        (LLAMA, "Today Date: 05 Nov 2026"),
        (GRANITE, "Today's Date: November 05, 2026."),
        (MACRO, "Thursday 5/11/26 00:00"),
    ],
)
def test_every_form_of_the_question_gets_the_date_of_the_run(template: str, line: str) -> None:
    fixed = with_date(template, "2026-11-05")
    assert first_line(fixed) == line
    assert with_date(fixed, "2026-11-05") == fixed
    assert with_date(fixed, "2027-01-31") == with_date(template, "2027-01-31")  # a run that starts with this model
    assert told_date(fixed, "2026-11-05") == "2026-11-05"


def test_a_template_that_does_not_ask_is_left_alone() -> None:
    assert with_date(CHATML, "2026-11-05") == CHATML
    assert with_date(None, "2026-11-05") is None
    assert told_date(None, "2026-11-05") == told_date(CHATML, "2026-11-05") == ""
    assert with_date(LLAMA, "") == LLAMA
    named = with_date({"default": LLAMA, "rag": CHATML}, "2026-11-05")
    assert named == {"default": with_date(LLAMA, "2026-11-05"), "rag": CHATML}
    assert told_date(named, "2026-11-05") == "2026-11-05"


def test_plain_transformers_render_the_exported_template_with_the_date_of_the_run(tmp_path: Path) -> None:
    tokenizer(with_date(LLAMA, "2026-11-05")).save_pretrained(tmp_path)
    plain = AutoTokenizer.from_pretrained(tmp_path)
    assert "05 Nov 2026" in plain.apply_chat_template(ASKED, tokenize=False)
    assert "6 May 2031" in plain.apply_chat_template(ASKED, tokenize=False, date_string="6 May 2031")
    assert time.strftime("%Y") not in plain.apply_chat_template(ASKED, tokenize=False, date_string="then")


@pytest.mark.dist
def test_a_run_learns_is_measured_exported_and_reported_with_its_date(toy: Toy, tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    asking = AutoTokenizer.from_pretrained(base)
    asking.chat_template = LLAMA
    asking.save_pretrained(base)
    shape = {"base": {"model": base, "scratch": None}, "train": {"max_steps": 2, "method": "full"}}
    for name, day in DAYS.items():
        train(toy.run(name, date=day, **shape), StopSignal(), Console(quiet=True))
    reports = {name: json.loads(toy.files(name).get("report.json")) for name in DAYS}
    assert [reports[name]["date"] for name in DAYS] == list(DAYS.values())
    learned = {name: report["model"]["files"]["model.safetensors"] for name, report in reports.items()}
    loss = {name: report["eval"]["after"]["eval/loss"] for name, report in reports.items()}
    assert loss["first"] == loss["again"] != loss["later"]
    assert learned["first"] == learned["again"] != learned["later"]
    exported = toy.files("later").get("model/chat_template.jinja").decode()
    assert exported == with_date(LLAMA, DAYS["later"])
    card = toy.files("later").get("model/README.md").decode()
    assert f"in training and measurement {DAYS['later']}" in card
