"""YAML that people write, read strictly: no aliases, merges or keys twice, and numbers as JSON has them.

It needs PyYAML alone: the trainer reads a base model's card by it, where there may be no pydantic.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any, Final

import yaml

DIGITS: Final = 4096  # characters of a whole number; Python writes none of more than 4300 digits
#: What PyYAML raises for values that their tag does not fit: `2001-99-99`, `!!bool x`, `!!float 1:1:...:1.0`.
UNFIT: Final = (ValueError, ArithmeticError, LookupError, AttributeError, TypeError)
_INT_TAG: Final = "tag:yaml.org,2002:int"
_NUMBER_TAGS: Final = {_INT_TAG, "tag:yaml.org,2002:float"}


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML without aliases, merges and duplicate keys; numbers are those of JSON and YAML 1.2: `1e-3` is one, and
    `1:30` is a text."""

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        tag: str = super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]
        sexagesimal = tag in _NUMBER_TAGS and ":" in value  # a long one is too large for a float
        return self.DEFAULT_SCALAR_TAG if sexagesimal else tag

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are not allowed")
        return super().compose_node(parent, index)

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        if node.tag == _INT_TAG and len(node.value) > DIGITS:
            raise yaml.YAMLError(f"a number of {len(node.value)} characters, line {node.start_mark.line + 1}")
        try:
            return super().construct_object(node, deep)
        except UNFIT as error:
            raise yaml.YAMLError(f"{error}, line {node.start_mark.line + 1}") from error

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for one, _ in node.value:
            key = self.construct_object(one, deep=True)
            if not isinstance(key, Hashable):
                raise yaml.YAMLError(f"a key is no plain value, line {one.start_mark.line + 1}")
            if key in seen:
                raise yaml.YAMLError(f"key {str(key)!r:.80} appears twice, line {one.start_mark.line + 1}")
            seen.add(key)
        return super().construct_mapping(node, deep)


_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+\Z"), list("-+0123456789")
)


def load_strict(text: bytes | str) -> Any:
    """Whatever strict YAML says. :raises Exception: of many kinds, for what is none; the caller bounds its length."""
    return yaml.load(text, Loader=_StrictLoader)  # noqa: S506 - a SafeLoader
