"""Chat templates of strangers, rendered within bounds: a template loops, repeats and writes no more than a chat needs.

Jinja's sandbox keeps a template from the machine, and not from its time and memory: two nested loops go on for hours,
and `2 ** 2 ** 31` cannot even be interrupted. transformers compiles all templates in one place, which `install`
replaces: what it renders stays the same to the letter, with counted loops and calls, and weighed results.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache, wraps
from typing import Any, Final

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.visitor import NodeTransformer

STEPS: Final = 2_000_000
"""Turns of loops and calls of macros for one text, many times those of a row with as many messages as it can hold."""
CHARS: Final = 1 << 26
"""Characters of one text or value, beside sixteen times those of the conversation."""
_BITS: Final = 1 << 16
_WIDENING: Final = frozenset({"batch", "center", "indent", "slice", "tojson"})  # filters that are told how far
_WIDENING_METHODS: Final = frozenset({"center", "expandtabs", "ljust", "rjust", "zfill"})
_WIDE: Final = re.compile(r"%(\([^)]*\))?[-+ #0]*(\d*\.)?(\d{7}|\*)")
_WIDE_FIELD: Final = re.compile(r"\{[^{}]*:[^{}]*(\d{7}|\{)")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox of transformers, with bounds for each text. `most` is what the present one may have of characters."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    spent = 0
    most = CHARS

    def begin(self, messages: Any) -> None:
        """Count anew, for a conversation."""
        texts = [one.get("content") for one in messages if isinstance(one, dict)] if isinstance(messages, list) else []
        self.spent, self.most = 0, CHARS + 16 * sum(len(text) for text in texts if isinstance(text, str))

    @property
    def turn(self) -> bool:
        """True, and one more turn counted: templates look it up, which costs less than a call."""
        self.spend(1)
        return True

    def spend(self, steps: int) -> None:
        """Count work. :raises SecurityError: if it is too much."""
        self.spent += steps
        if self.spent > STEPS:
            raise SecurityError(f"it takes more than {STEPS:,} turns of its loops")

    def weigh(self, size: int) -> None:
        """:raises SecurityError: if a value of so many characters or items is too large."""
        if size > self.most:
            raise SecurityError(f"it makes a value of more than {self.most:,} characters")

    def pieces(self, found: Iterable[str]) -> Iterator[str]:
        """The pieces of a text as long as they are not too much together."""
        size = 0
        for piece in found:
            size += len(piece)
            self.weigh(size)
            yield piece

    def concat(self, found: Iterable[str]) -> str:
        """What macros, blocks and the whole are made of."""
        return "".join(self.pieces(found))

    def joined(self, *values: Any) -> str:
        """What `~` means."""
        return self.concat(map(str, values))

    def limited_range(self, *args: int) -> range:
        """A range, all of which counts as work: filters go through it without a loop."""
        found = safe_range(*args)
        self.spend(len(found))
        return found

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Add, multiply, raise or format, if the result is not too large."""
        if operator == "+" and isinstance(left, str) and isinstance(right, str):  # nearly all of them
            self.weigh(len(left) + len(right))
            return left + right
        sizes = [len(one) if isinstance(one, str | list | tuple) else None for one in (left, right)]
        if operator == "%" and isinstance(left, str) and _WIDE.search(left):
            raise SecurityError("it formats a value wider than any text")
        if operator == "+" and None not in sizes:
            self.weigh(len(left) + len(right))
        elif operator == "*" and sizes != [None, None] and isinstance(right if sizes[1] is None else left, int):
            self.weigh((sizes[0] or 1) * right if sizes[1] is None else left * (sizes[1] or 1))
        elif operator in {"*", "**"} and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() + right.bit_length() if operator == "*" else left.bit_length() * right
            if bits > _BITS:
                raise SecurityError(f"it makes a number of more than {_BITS:,} bits")
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as Jinja's own
        """Call what a template calls, if it asks for no text without end."""
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps `str.format`
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            if method.__name__ in _WIDENING_METHODS:
                __self.weigh(_largest(args, kwargs))
            elif method.__name__ in {"format", "format_map"} and _WIDE_FIELD.search(owner):
                raise SecurityError("it formats a value wider than any text")
        return __self.held(super().call(__context, __obj, *args, **kwargs))

    def held(self, value: Any) -> Any:
        """What a function or filter gave, if it is not too large."""
        self.weigh(len(value) if isinstance(value, str | list | tuple) else 0)
        return value

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _Counted().visit(tree)
        tree.set_environment(self)
        tree.set_lineno(1)  # where none is set
        return tree


class _Counted(NodeTransformer):
    """Have each turn of a loop and each call of a macro counted, and what `~` makes weighed."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802 - as Jinja's own
        self.generic_visit(node)
        if node.test is not None:
            node.test = nodes.And(nodes.EnvironmentAttribute("turn"), node.test)
        node.body.insert(0, nodes.ExprStmt(nodes.EnvironmentAttribute("turn")))
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:  # noqa: N802 - as Jinja's own
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(nodes.EnvironmentAttribute("turn")))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:  # noqa: N802 - as Jinja's own
        self.generic_visit(node)
        return nodes.Call(nodes.EnvironmentAttribute("joined"), node.nodes, [], None, None)


def _largest(args: Iterable[Any], kwargs: dict[str, Any]) -> int:
    """The largest whole number among them: a width, an indentation or a count of a text that is made."""
    return max((one for one in (*args, *kwargs.values()) if isinstance(one, int)), default=0)


def _bounded(environment: BoundedEnvironment, name: str, filter_: Any) -> Any:
    @wraps(filter_)  # which keeps what Jinja is to pass to it
    def held(*args: Any, **kwargs: Any) -> Any:
        if name in _WIDENING:
            environment.weigh(_largest(args[1:], kwargs))
        return environment.held(filter_(*args, **kwargs))

    return held


def install() -> None:
    """Have transformers compile every chat template of this process with bounds."""
    from transformers.utils import chat_template_utils

    theirs: Any = inspect.unwrap(chat_template_utils._compile_jinja_template)
    if getattr(theirs, "bounded", False):
        return

    def compile_bounded(chat_template: str) -> Any:
        environment: Any = theirs("").environment  # each has its own, with their filters and functions
        environment.__class__ = BoundedEnvironment
        environment.globals["range"] = environment.limited_range
        environment.globals.pop("lipsum", None)  # words by the million, of which no chat has any
        for name, filter_ in environment.filters.items():
            environment.filters[name] = _bounded(environment, name, filter_)
        template = environment.from_string(chat_template)
        root = template.root_render_func

        def pieces(context: Any) -> Iterator[str]:
            environment.begin(context.get("messages"))
            yield from environment.pieces(root(context))

        template.root_render_func = pieces
        return template

    compile_bounded.bounded = True  # type: ignore[attr-defined]
    chat_template_utils._compile_jinja_template = lru_cache(compile_bounded)
