"""The one date of a run, for chat templates that ask the clock (`strftime_now`, as Llama 3, Granite and SmolLM3 do).

A template that is read on two days makes two different data sets of the same rows. So the question is answered by the
template itself, in a macro of that name at its head: whatever renders it, in training, evaluation or use, gets the date
of the run, and what is exported behaves as it was measured.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any, Final

_ASKS: Final = re.compile(r"\bstrftime_now\b")
_MACRO: Final = re.compile(
    r"\{%- macro strftime_now\(format\) -%\}\{\{- format(?:\|replace\([^()]*\))* -\}\}\{%- endmacro -%\}"
)
_DIRECTIVES: Final = ("-d", "-m", "-H", "-I", "-M", "-S", "-j", "-y", *"aAbBcdDeFfGHIjmMpRSTuUVwWxXyYzZ")


def with_date(template: Any, date: str) -> Any:
    """A tokenizer's chat template, or its named ones, whose `strftime_now` tells the date's midnight in UTC.

    :param date: `YYYY-MM-DD`; "" leaves the template as it is. One that was set before is replaced.
    """
    if isinstance(template, dict):
        return {name: with_date(one, date) for name, one in template.items()}
    if not date or not isinstance(template, str):
        return template
    plain = _MACRO.sub("", template)
    return f"{_macro(date)}{plain}" if _ASKS.search(plain) else template


def told_date(template: Any, date: str) -> str:
    """The date that a chat template tells by `with_date`; "" if it does not ask for one."""
    named = template if isinstance(template, dict) else {"default": template or ""}
    return date if any(map(_ASKS.search, named.values())) else ""


def _macro(date: str) -> str:
    moment = datetime.strptime(date, "%Y-%m-%d").replace(tzinfo=UTC)
    told = "".join(f'|replace("%{one}", "{moment.strftime(f"%{one}")}")' for one in _DIRECTIVES)
    return f"{{%- macro strftime_now(format) -%}}{{{{- format{told} -}}}}{{%- endmacro -%}}"
