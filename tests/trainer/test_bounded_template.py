"""A base model's chat template is a stranger's program: it ends, and what it raises is told."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from transformers.utils import chat_template_utils

from dropforge.errors import DataError
from trainer.data import bounded_template
from trainer.data.template import ChatTemplate, UnusableChatError

MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
]
THEIRS: Any = inspect.unwrap(chat_template_utils._cached_compile_jinja_template)


def chat(template: str) -> ChatTemplate:
    facts: dict[str, Any] = {"name_or_path": "m", "eos_token": "</s>", "chat_template": template}
    return ChatTemplate(SimpleNamespace(**facts, special_tokens_map={"eos_token": "</s>"}, added_tokens_decoder={}))


@pytest.mark.parametrize(
    ("template", "cause"),
    [
        ("{{ 1/0 }}", "division by zero"),
        ("{{ 2.0**5000 }}", "refuses it"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion depth"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "refuses it"),
        ("{{ 2 ** (2 ** 31) }}", "a number of more than"),
        (
            "{% set ns = namespace(x=3) %}{% for a in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
            "a number of",
        ),
        ("{{ 'a' * 2**31 }}", "a value of more than"),
        ("{{ 2**31 * messages }}", "a value of more than"),
        ("{{ 'a'.center(3 * 10**10) }}", "a value of more than"),
        ("{{ 'a' | center(3000000000) }}", "a value of more than"),
        ("{{ ['a'] | map('center', 3000000000) | list }}", "a value of more than"),
        ("{{ messages | tojson(indent=1000000000) }}", "a value of more than"),
        ("{{ '%3000000000d' % 1 }}", "wider than any text"),
        ("{{ '{:>3000000000}'.format(1) }}", "wider than any text"),
        ("{{ lipsum(n=100000) }}", "'lipsum' is undefined"),
        ("{% set ns = namespace(x='a') %}{% for a in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}", "a value"),
        ("{% set ns = namespace(x='a') %}{% for a in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}", "a value"),
        (
            "{% set ns = namespace(x='a') %}{% for a in range(99) %}{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}"
            "{% set ns.x = y %}{% endfor %}",
            "a value",
        ),
        ("{% set x = 'a' * 9999999 %}{% for a in range(999) %}{{ x }}{% endfor %}", "a value of more than"),
        ("{% for a in range(10**12) %}{% endfor %}", "Range too big"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "turns of its loops"),
        ("{% for a in range(99999) if 0 in range(1, 99999) | list %}{% endfor %}", "turns of its loops"),
        ("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}", "turns of its"),
        (
            "{% for a in [1, 2] recursive %}{% if loop.depth < 60 %}{{ loop([1, 2]) }}{% endif %}{% endfor %}",
            "turns of",
        ),
    ],
)
def test_what_a_template_does_without_end_or_by_mistake_is_told(
    monkeypatch: pytest.MonkeyPatch, template: str, cause: str
) -> None:
    monkeypatch.setattr(bounded_template, "STEPS", 20_000)
    for text in (template, template + "{% generation %}{% endgeneration %}"):  # rendered in another way
        with pytest.raises(UnusableChatError, match=cause):
            chat(text).whole(MESSAGES)
        with pytest.raises(DataError, match=rf"chat template of m: .*{cause}.*and save it with the tokenizer"):
            chat(text).check()


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ loop.index ~ '/' ~ loop.length }}{{ m.role + ': ' + m.content }}"
        "{% if not loop.last %}{{ loop.nextitem.role }}{% else %}{{ eos_token }}{% endif %}{% endfor %}",
        "{% for m in messages if m.role != 'system' %}{{ m | tojson(indent=2) }}{% else %}none{% endfor %}",
        "{%- macro say(m, sep='|') -%}\n{{ m.content | upper | replace('O', '0') }}{{ sep * 3 }}\n{%- endmacro -%}\n"
        "{%- for m in messages[::-1] %}\n  {{ say(m, sep=loop.cycle('a', 'b')) }}\n{%- endfor %}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}"
        "{% set ns.n = ns.n + 2 ** 3 %}{{ '%05d %s' % (ns.n, m.content) }}{% endfor %}{{ '{:>8}'.format(ns.n) }}",
        "{% for m in messages recursive %}{{ m.role }}{% if loop.depth == 1 %}{{ loop([m]) }}{% endif %}{% endfor %}",
        "{% if tools is not none %}{{ tools | length }}{% endif %}{{ messages | map(attribute='role') | join(', ') }}"
        "{% set block %}{% for i in range(3) %}{{ i }}{% endfor %}{% endset %}{{ block | trim }}{{ 1 ~ none ~ true }}"
        "{{ 1700000000 | string }}",
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content ~ eos_token }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
    ],
)
def test_bounds_change_no_text(monkeypatch: pytest.MonkeyPatch, template: str) -> None:
    found = chat(template)._render(MESSAGES)
    monkeypatch.setattr(chat_template_utils, "_compile_jinja_template", THEIRS)
    monkeypatch.setattr(bounded_template, "install", lambda: None)
    assert found == chat(template)._render(MESSAGES)
    assert found[0]
