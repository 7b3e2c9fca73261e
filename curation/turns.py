"""What a message says beside its role and content: calls of tools, thoughts, and whether it is to be learned.

==================================================  ================================================================
key of a message                                    becomes
==================================================  ================================================================
tool_calls, function_call                           `tool_calls`: OpenAI's list, with arguments as an object; in a call,
                                                    `parameters`, `args` or `input` are arguments as well
tool_call_id, name                                  the same
reasoning_content, reasoning, thinking, thoughts    `reasoning_content`
weight, train, training, trainable, loss            `train: false` of an answer where it is 0 or false; 1 and true are
                                                    the rule
==================================================  ================================================================

Columns of Parquet give every object all keys of its column, so there a key without a value is not there, at any depth;
in JSON, arguments and schemas keep it. Their keys stay in the order in which they were written, as a model in use is
given them. Parts of a content may have a flag as messages have, where all of a message's say the same; their other keys
are told.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

from curation import shapes
from curation.extras import numbered
from curation.nesting import JsonObject, parse_text
from curation.reasons import Reason, RejectError
from curation.tokens import blank


class Beside(NamedTuple):
    """What a message says beside its content. :param unknown: its keys that mean nothing here."""

    told: dict[str, Any]
    unknown: tuple[str, ...] = ()


_CALLS: Final = "tool_calls", "function_call"
_NAMES: Final = "tool_call_id", "name"
_THOUGHTS: Final = "reasoning_content", "reasoning", "thinking", "thoughts"
#: The channel of thoughts in OpenAI's Harmony; joined to the answer they would be learned as one.
_THINKING: Final = "analysis"
FLAGS: Final = "weight", "train", "training", "trainable", "loss"
_SAID: Final = "role", "from", "content", "value"
KNOWN: Final = frozenset({*_SAID, *_CALLS, *_NAMES, *_THOUGHTS, *FLAGS})
#: Of a row: the tools that a conversation may call.
TOOLS: Final = "tools", "functions"


def tells(beside: Beside | None) -> bool:
    """Whether there is anything that reaches a template or the loss."""
    return beside is not None and bool(beside.told)


def is_silent(beside: Beside | None) -> bool:
    """Whether an answer is not to be learned."""
    return beside is not None and "train" in beside.told


def goes_on(before: Beside | None, content: str, beside: Beside | None) -> bool:
    """Whether an answer goes on in the message behind it, as programs write each call, or text and calls, by itself.

    Not with thoughts of its own or text behind calls: an answer has thoughts, text and calls, in this order.

    :param before: of the message before. :param content: and :param beside: of the other message.
    """
    one, other = (found.told if found else {} for found in (before, beside))
    if _THOUGHTS[0] in other or (_CALLS[0] in one and not blank(content)):
        return False
    return _apart(one) == _apart(other)


def _apart(told: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in told.items() if key not in {_CALLS[0], _THOUGHTS[0]}}


def together(parts: Sequence[Beside | None]) -> Beside:
    """What an answer says in all messages in which it goes on."""
    told: dict[str, Any] = {}
    for part in parts:
        told |= part.told if part else {}
    calls = [call for part in parts if part for call in part.told.get(_CALLS[0], ())]
    return Beside({**told, _CALLS[0]: calls} if calls else told)


def beside(message: Mapping[Any, Any], role: str = "assistant", nulls: bool = False) -> Beside | None:
    """What of a message's other keys reaches a template or the loss; None if there is nothing to tell.

    :param nulls: whether what is null was written so, and no column made it.
    :raises RejectError: if one of them has a value that cannot be read.
    """
    found: dict[str, Any] = {}
    calls = _calls(message, nulls)
    if calls:
        found["tool_calls"] = [_call(call) for call in calls]
    for key in _NAMES:
        if (value := shapes.texts(message.get(key))) is not None and (text := _text(value, key)):
            found[key] = text
    others: list[str] = []  # that say a second time what one before has said, in other words
    for key in _THOUGHTS:
        thought = shapes.texts(message.get(key))
        if "reasoning_content" in found:
            if thought not in (None, "", found["reasoning_content"]):
                others.append(key)
        elif thought is not None and not blank(_text(thought, key)):
            found["reasoning_content"] = thought
    if all(shapes.listed(message.get(key)) for key in _CALLS):
        others.append("function_call")
    if message.get("content") is not None and message.get("value") not in (None, message["content"]):
        others.append("value")
    if message.get("channel") == _THINKING:
        cause = "a message of the channel 'analysis' is a thought: write it as `thinking` of the answer behind it"
        raise RejectError(Reason.BAD_MESSAGES, cause)
    flags = _flags(message)
    if role == "assistant" and not all(flags.values()):
        found["train"] = False
    others += _asked(flags, role)
    unknown = (*others, *(str(key) for key, value in message.items() if key not in KNOWN and value is not None))
    if calls:
        unknown += tuple(f"tool_calls.{key}" for key in _unread(calls))
        given = [message.get(key) for key in _CALLS] + [_arguments(call.get("function", call)) for call in calls]
        unknown += (RENUMBERED,) * any(map(_renumbered, given))
    return Beside(found, unknown) if found or unknown else None


def called(message: Mapping[Any, Any], content: str, nulls: bool = False) -> Beside:
    """The answer that a message of ShareGPT's role `function_call` is. :raises RejectError: if it calls nothing."""
    others: tuple[str, ...] = ()
    if not blank(content):
        others = tuple(key for key in _CALLS if message.get(key))
        message = {**message, "tool_calls": None, "function_call": content}
    found = beside(message, nulls=nulls)
    if found is None or "tool_calls" not in found.told:
        raise RejectError(Reason.BAD_MESSAGES, "a tool call has no name")
    return found._replace(unknown=(*others, *found.unknown))


def both(one: Beside | None, other: Beside | None) -> Beside | None:
    """What a message and the parts of its content say."""
    if one is None or other is None:
        return one or other
    return Beside({**one.told, **other.told}, (*one.unknown, *other.unknown))


def _asked(flags: Mapping[str, bool], role: str) -> list[str]:
    """Flags that ask to learn what somebody else than the assistant says: the recipe decides that for all rows.

    Those that ask for the contrary say what holds without them.
    """
    return [] if role == "assistant" else [f"{key} of {role}" for key, flag in flags.items() if flag]


def flagged(message: Mapping[Any, Any]) -> bool:
    """Tell whether a message says itself whether it is to be learned. :raises RejectError: as `beside`."""
    return bool(_flags(message))


def of_parts(parts: list[dict[Any, Any]], name: str, role: str = "assistant") -> tuple[str, Beside | None]:
    """The text of a content in parts, and what they say beside it. :param name: what is told of the content.

    :raises RejectError: if a part is no text, or only some of them are to be learned.
    """
    pictured = {
        key: None
        for part in parts
        for key, value in part.items()
        if value is not None and _PICTURED.fullmatch(str(key))
    }
    kinds = {str(part.get("type") or _kind_of_part(part)): None for part in parts} | pictured
    if others := sorted(kinds.keys() - _TEXTS):
        shown = ", ".join(map(str, others))[:80]
        raise RejectError(Reason.BAD_FIELD, f"{name} has parts of type {shown}, and only text is learned")
    texts = [part.get("text") for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise RejectError(Reason.BAD_FIELD, f"{name} is a list, not text")
    flags = [_flags(part) for part in parts]
    learned = {role != "assistant" or all(of_part.values()) for of_part in flags}
    if len(learned) > 1:
        mend = "is learned whole or not at all: make it several messages"
        raise RejectError(Reason.BAD_FIELD, f"{name} has parts of weight 0 beside others, and a message {mend}")
    unknown = {
        f"content.{key}": None
        for part in parts
        for key, value in part.items()
        if key not in _IN_PARTS and value not in _EMPTY
    }
    unknown |= {key: None for of_part in flags for key in _asked(of_part, role)}
    told = {} if learned == {True} else {"train": False}
    return "".join(map(str, texts)), Beside(told, tuple(unknown)) if told or unknown else None


#: Types of parts that are text, of OpenAI's Responses the last two.
_TEXTS: Final = frozenset({"text", "input_text", "output_text"})
#: What makes a part one of another kind, whatever its type says.
_PICTURED: Final = re.compile(r"(?:input_)?(?:image|video|audio)s?(?:_url)?")
_EMPTY: Final[tuple[Any, ...]] = (None, "", [], {})
_IN_PARTS: Final = frozenset({"type", "text", *FLAGS})


def _kind_of_part(part: Mapping[Any, Any]) -> str:
    """What a part without a type is, by what it has: a text, where it has one."""
    if part.get("text") is not None:
        return "text"
    return next((str(key) for key, value in part.items() if key not in _IN_PARTS and value is not None), "text")


def tools_of(fields: Mapping[str, Any], nulls: bool = False) -> tuple[list[Any] | None, str | None]:
    """The tools that a row's conversation may call, as OpenAI's list, None if it has none; and the field that holds
    others, which are not read.

    :param nulls: as of `beside`. :raises RejectError: if they are no list of functions.
    """
    found: list[Any] | None = None
    for key in TOOLS:
        if fields.get(key) is None:
            continue
        if found is None:
            found = _tools(fields[key], key, nulls)
            continue
        try:
            more = _tools(fields[key], key, nulls)
        except RejectError:
            return found, key
        return found, None if more in (None, found) else key
    return found, None


def _tools(value: Any, key: str, nulls: bool) -> list[Any] | None:
    if not (found := shapes.listed(_given(value, key, nulls))):
        return None
    if not isinstance(found, list) or not all(isinstance(tool, dict) for tool in found):
        raise RejectError(Reason.BAD_FIELD, f"`{key}` is no list of tools")
    return [_tool(tool) for tool in found]


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """The tool as OpenAI's, which templates read: also MCP's, Anthropic's and that of OpenAI's Responses.

    :raises RejectError: if it is of a shape in which no template would find its name or schema.
    """
    function = tool.get("function")
    given = function is not None
    if not given:
        function = {key: value for key, value in tool.items() if key not in {"type", "function"}}
    schemas = [key for key in _SCHEMAS if function.get(key) is not None] if isinstance(function, dict) else []
    kind = tool.get("type")
    if kind not in ((None, "function", "custom") if schemas else (None, "function")):
        raise RejectError(Reason.BAD_FIELD, f"a tool is of type {str(kind)[:40]!r}: write it as {_AS_FUNCTION}")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        keys = ", ".join(map(str, function if isinstance(function, dict) else tool))[:40]
        raise RejectError(Reason.BAD_FIELD, f"a tool has no name, but {keys or 'nothing'}: write it as {_AS_FUNCTION}")
    if schemas and schemas[0] != "parameters":
        function = {
            "parameters" if key == schemas[0] else key: function[key] for key in function if key != "parameters"
        }
    return {**tool, "function": function} if given else {"type": "function", "function": function}


#: What holds the schema of a function's arguments, by OpenAI, Anthropic and MCP; the first one that has a value.
_SCHEMAS: Final = "parameters", "input_schema", "inputSchema"
_AS_FUNCTION: Final = "OpenAI's `function`"


def written(value: Any, change: Callable[[str], str], number: Callable[[Any], Any] = lambda value: value) -> str:
    """The value as JSON in its own order, without spaces, its texts, keys and numbers changed.

    :raises RejectError: if it holds a number that JSON has none for.
    """
    how: dict[str, Any] = {**_COMPACT, "default": str}
    try:
        return json.dumps(_mapped(value, change, number), allow_nan=False, **how)
    except ValueError:
        raise RejectError(Reason.BAD_NUMBER, "a number of a tool is NaN or infinite") from None


#: How JSON is written here.
_COMPACT: Final[Mapping[str, Any]] = {"ensure_ascii": False, "separators": (",", ":")}


def told_text(told: Mapping[str, Any], change: Callable[[str], str]) -> str:
    """What a message says beside its content, as `written` makes it, with our own keys sorted."""
    return written(dict(sorted(told.items())), change)


def calls_of(text: str) -> str:
    """The calls in what `told_text` made, as they name an answer: keys in one order, without ids."""
    return json.dumps(_without_ids(json.loads(text)), sort_keys=True, **_COMPACT)


def _without_ids(told: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{key: value for key, value in call.items() if key != "id"} for call in told.get("tool_calls", ())]


def without_ids(text: str) -> str:
    """What `told_text` made, as it names a row: keys in one order, without the ids by which calls find their results.

    APIs make new ids for each answer, and most templates write none.
    """
    if '"tool_call' not in text:  # only calls have an order of their own
        return text
    told = json.loads(text)
    told.pop("tool_call_id", None)
    calls = _without_ids(told)
    told |= {"tool_calls": calls} if calls else {}
    return json.dumps(told, sort_keys=True, **_COMPACT) if told else ""


def in_one_order(text: str) -> str:
    """What `written` made, its keys sorted: rows that differ in their order alone are copies."""
    return json.dumps(json.loads(text), sort_keys=True, **_COMPACT)


def with_texts(text: str, change: Callable[[str], str]) -> str:
    """What `told_text` made, with its texts and keys changed; nothing of nothing."""
    return written(json.loads(text), change) if text else ""


def texts_of(text: str) -> list[str]:
    """All texts within what `told_text` made, without keys."""
    found: list[str] = []
    rest = [json.loads(text)]
    while rest:
        value = rest.pop()
        if isinstance(value, str):
            found.append(value)
        elif isinstance(value, dict | list):
            rest += reversed([*value.values()] if isinstance(value, dict) else value)
    return found


def hidden(text: str, scrub: Callable[[str], str]) -> str:
    """What `written` made, with masks in its texts and keys, and for numbers that are personal data."""

    def masked(number: Any) -> Any:
        shown = json.dumps(number)
        return number if (mask := scrub(shown)) == shown else mask

    return written(json.loads(text), scrub, masked)


def _mapped(value: Any, change: Callable[[str], str], number: Callable[[Any], Any]) -> Any:
    """A JSON value with every text, key and number changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):  # of two keys with one mask none is lost
        return numbered((change(str(key)), _mapped(item, change, number)) for key, item in value.items())
    if isinstance(value, list):
        return [_mapped(item, change, number) for item in value]
    return number(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _given(value: Any, key: str, nulls: bool = True) -> Any:
    """A value that may be written as JSON text. :param nulls: as of `beside`; of JSON text it is always so."""
    if isinstance(value, dict | list):
        return shapes.texts(value if nulls else _present(value))
    text = shapes.texts(value)
    if not isinstance(text, str):
        return text
    if not text.strip():
        return None
    try:
        return parse_text(text)
    except ValueError:
        cause = shapes.no_json(text) or "is text, but no JSON"
        raise RejectError(Reason.BAD_MESSAGES, f"`{key}` {cause}") from None


def _present(value: Any) -> Any:
    """The value without what is null in objects of a column; a map, which comes in pairs, has its own keys alone, and
    JSON text in a column keeps what was written."""
    if isinstance(value, JsonObject):
        return value
    if isinstance(value, dict):
        return {key: _present(item) for key, item in value.items() if item is not None}
    return type(value)(map(_present, value)) if isinstance(value, list | tuple) else value


def _calls(message: Mapping[Any, Any], nulls: bool) -> list[Any]:
    """The calls of a message, without what has no value in them, but for their arguments."""
    for key in _CALLS:
        if (value := message.get(key)) and (value := shapes.listed(_given(value, key, nulls))):
            return [_filled(call) for call in (value if isinstance(value, list) else [value])]
    return []


def _filled(call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    return {key: _filled(item) if key == "function" else item for key, item in call.items() if item is not None}


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not name:
        kind = call.get("type") if isinstance(call, dict) else None
        if isinstance(kind, str) and kind != "function":
            cause = f"a tool call is of type {kind[:40]!r}, and only those of functions are read: write it as one"
            raise RejectError(Reason.BAD_MESSAGES, cause)
        raise RejectError(Reason.BAD_MESSAGES, "a tool call has no name")
    arguments = _arguments(function)
    if isinstance(arguments, str):
        arguments = _given(arguments, "arguments") or {}
    if not isinstance(arguments, dict):
        raise RejectError(Reason.BAD_MESSAGES, f"the arguments of tool call {name[:40]!r} are no object")
    made: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return made if call.get("id") is None else {"id": _text(call["id"], "id of a tool call"), **made}


def _unread(calls: list[dict[str, Any]]) -> dict[str, None]:
    """Keys of calls that no template is given; what only says again what one that is given says is none."""
    found: dict[str, None] = {}
    for call in calls:
        function = call.get("function", call)
        given = _arguments(function)
        said = {"name": function["name"], "id": call.get("id"), **dict.fromkeys(_ARGUMENTS, given)}
        for part in (call, function):
            found |= {str(key): None for key in part if key not in _IN_CALLS and part[key] != said.get(key)}
    return found


#: What is told of calls whose arguments are JSON text with numbers that are written otherwise here, as 19.50, and of
#: results that stand in another order than the calls, belong to none, or are missing beside others: templates without
#: ids pair them by their order.
RENUMBERED: Final = "tool_calls.arguments (numbers as 19.50)"
REORDERED: Final = "tool_call_id (results not in the order of calls)"
UNPAIRED: Final = "tool_call_id (results of no call, or too few)"
#: A number that may be written in two ways.
_TWO_WAYS: Final = re.compile(r"\d[.eE]")


def _arguments(function: Mapping[str, Any]) -> Any:
    return next((function[key] for key in _ARGUMENTS if key in function), {})


def _renumbered(given: Any) -> bool:
    """Whether a value is JSON text with a number that comes out otherwise."""
    if not isinstance(given, str) or _TWO_WAYS.search(given) is None:
        return False
    found: list[str] = []
    with suppress(ValueError, RecursionError):
        json.loads(given, parse_float=found.append)
    return any(repr(float(number)) != number for number in found)


def misplaced(roles: Sequence[str], besides: Sequence[Beside | None]) -> set[str]:
    """What is told of results that are not those of the calls before them, one for each and in their order.

    :param roles: and :param besides: of all messages.
    """
    found: set[str] = set()
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for role, told in zip([*roles, ""], [*(one.told if one else {} for one in besides), {}], strict=True):
        if role == "tool":
            results.append(told)
            continue
        if results and calls:
            found |= _misplaced(calls, results)
        calls, results = told.get(_CALLS[0], []), []
    return found


def _misplaced(calls: Sequence[Mapping[str, Any]], results: Sequence[Mapping[str, Any]]) -> set[str]:
    """:param calls: of an answer. :param results: behind it, by ids, or by names of functions."""
    found = {UNPAIRED} if len(results) != len(calls) else set()
    ids = [call.get("id") for call in calls]
    names = [call["function"]["name"] for call in calls]
    if len(set(ids)) == len(ids) and None not in ids and all("tool_call_id" in told for told in results):
        known, given = ids, [told["tool_call_id"] for told in results]
    elif len(set(names)) == len(names) and all("name" in told for told in results):
        known, given = names, [told["name"] for told in results]
    else:
        return found
    where = {name: place for place, name in enumerate(known)}
    places = [where[one] for one in given if one in where]
    if len(places) < len(given):
        found.add(UNPAIRED)
    if places != sorted(places):
        found.add(REORDERED)
    return found


#: What holds the arguments of a call, by OpenAI, Llama, LangChain and Anthropic; the first one that is there.
_ARGUMENTS: Final = "arguments", "parameters", "args", "input"
#: `type` and `index` tell nothing that the list does not.
_IN_CALLS: Final = frozenset({"function", "type", "index"})


def _text(value: Any, key: str) -> str:
    if not isinstance(value, str):
        raise RejectError(Reason.BAD_FIELD, f"`{key}` of a message is no text")
    return value


def _flags(message: Mapping[Any, Any]) -> dict[str, bool]:
    """What a message or a part says of whether it is to be learned, by its keys. :raises RejectError: as `_flag`."""
    given = {key: shapes.texts(message[key]) for key in FLAGS if message.get(key) is not None}
    return {key: _flag(value, key) for key, value in given.items() if value != "" and value == value}  # NaN is none


def _flag(value: Any, key: str) -> bool:
    """Whether the message is to be learned. :raises RejectError: if that is not a yes or a no."""
    if isinstance(value, str) and (named := _NAMED.get(value.strip().lower())) is not None:
        return named
    if value in (0, 1):  # also false, true and 1.0
        return bool(value)
    shown = repr(value) if isinstance(value, str) else str(value)
    raise RejectError(Reason.BAD_FIELD, f"`{key}` of a message is {shown[:40]}, and only 0 and 1 can be learned")


#: Flags as text, as a column of texts has them.
_NAMED: Final = {"0": False, "0.0": False, "false": False, "1": True, "1.0": True, "true": True}
