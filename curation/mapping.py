"""The recipe's own names of columns, and its template: a row's fields become the fields that are known."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, time
from decimal import Decimal
from functools import cached_property
from typing import Any, Final
from uuid import UUID

from curation.canonical import FIELDS, GROUPS
from curation.reasons import Reason, RejectError
from curation.shapes import texts
from curation.turns import TOOLS
from dropforge.recipe_data import CONTENT, parts

_SHOWN: Final = 200
#: What is found by its usual name also where content is named.
_ABOUT: Final = ("label", "source", *GROUPS, *TOOLS)


@dataclass(frozen=True)
class Columns:
    """Which column holds what.

    :param names: pairs of a known name and the column that holds it, sorted.
    :param template: what the prompt is made of, if it is not in a column; without a `completion` it is the text.
    """

    names: tuple[tuple[str, str], ...] = ()
    template: str | None = None

    def __bool__(self) -> bool:
        return bool(self.names) or self.template is not None

    def text(self, usual: str) -> str:
        """The column in which a file of plain text comes. :param usual: where none is named."""
        return dict(self.names).get("text", usual)

    def wanted(self, text_column: str) -> frozenset[str]:
        """Columns that are read, in small letters."""
        usual = {*FIELDS, text_column} if self._finds else set(_ABOUT)
        usual -= self._replaced
        return frozenset(name.strip().lower() for name in {*self.wanted_by_name, *usual})

    @cached_property
    def wanted_by_name(self) -> frozenset[str]:
        """Columns that the recipe names, in small letters."""
        named = [name for _, name in self.names] + [name for _, name in self._parts if name is not None]
        return frozenset(name.strip().lower() for name in named)

    def apply(self, fields: Mapping[str, Any], longest: int) -> dict[str, Any]:
        """The row's fields by their known names.

        :param longest: what the filled template may have, in characters.
        :raises RejectError: if a named column with content is not there, or the template cannot be filled, or gets too
            long.
        """
        seen = _Fields(fields)
        known = self._known(seen)
        if self.template is not None:
            known["prompt" if "completion" in self._content else "text"] = self._filled(seen, longest)
        for name, column in self.names:
            if name in self._content and name not in known and name != "system":
                reason = Reason.NO_ANSWER if name == "completion" else Reason.NO_CONTENT
                raise RejectError(reason, f"no `{column}`; fields: {', '.join(map(str, fields))}"[:_SHOWN])
        return known

    def made(self, known: Mapping[str, Any]) -> int:
        """Characters that the template made of a row. :param known: what `apply` gave."""
        if self.template is None:
            return 0
        return len(known["prompt" if "completion" in self._content else "text"])

    def known(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The same of any row, as far as it goes, without the template."""
        return self._known(_Fields(fields))

    def _known(self, seen: _Fields) -> dict[str, Any]:
        known: dict[str, Any] = self._about(seen)
        if self._finds:
            known = {key: value for key, value in seen.fields.items() if key.strip().lower() not in self._taken}
        for name, column in self.names:
            if (value := seen.get(column)) is not None:
                known[name] = value
        return known

    def _about(self, fields: _Fields) -> dict[str, Any]:
        """What says of a row whose it is, where no column is named for it and none of these is content."""
        found = {name: fields.get(name) for name in _ABOUT if name not in self._taken}
        return {name: value for name, value in found.items() if value is not None}

    @cached_property
    def _replaced(self) -> frozenset[str]:
        """Usual names of which the recipe says that other columns hold what they mean."""
        named = {name for name, _ in self.names}
        return frozenset(named | {*GROUPS} if "group" in named else named)

    @cached_property
    def _taken(self) -> frozenset[str]:
        """Names that are not looked for: columns that the recipe names are what it says and nothing else, as an answer
        that is the label, and what another column holds is not in the usual one."""
        return self.wanted_by_name | self._replaced

    @cached_property
    def _finds(self) -> bool:
        """Whether content is still found by its usual names."""
        return not self._content - {"system"} and self.template is None

    @cached_property
    def _content(self) -> frozenset[str]:
        return CONTENT & {name for name, _ in self.names}

    @cached_property
    def _parts(self) -> list[tuple[str, str | None]]:
        return [] if self.template is None else parts(self.template)

    def _filled(self, fields: _Fields, longest: int) -> str:
        made: list[str] = []
        length = 0
        for text, name in self._parts:
            value = "" if name is None else _written(fields.get(name), name)
            made += (text, value)
            length += len(text) + len(value)
            # A template may name a long field thousands of times.
            if length > longest:
                raise RejectError(Reason.TOO_LARGE, f"the filled template has more than {longest} characters")
        return "".join(made)


class _Fields:
    """A row's fields, without case where nothing fits exactly."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.fields = fields
        self.folded: dict[str, Any] | None = None

    def get(self, name: str) -> Any:
        if name in self.fields:
            return self.fields[name]
        if self.folded is None:
            self.folded = {key.strip().lower(): value for key, value in self.fields.items() if isinstance(key, str)}
        return self.folded.get(name.strip().lower())


def _written(value: Any, name: str) -> str:
    if value is None or value == "" or value != value:  # NaN, as pandas writes a missing number
        raise RejectError(Reason.NO_CONTENT, f"the template's `{name}` has no value"[:_SHOWN])
    value = texts(value)
    if isinstance(value, str):
        return value
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, date | time):  # a datetime is a date
        return value.isoformat()
    if isinstance(value, UUID):
        return str(value)
    raise RejectError(Reason.BAD_FIELD, f"the template's `{name}` is no text, number or time"[:_SHOWN])
