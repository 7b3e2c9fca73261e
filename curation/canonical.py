"""One canonical row from the many shapes that people use.

==========================  ==================================================================================
row                         becomes
==========================  ==================================================================================
messages, conversations...  messages: lists of {role, content} or {from, value}, or one object with a list of each;
                            also as JSON text in one cell; what else messages say is in `curation.turns`
prompt + completion...      a user's and an assistant's message; `system` in front if there is one
text                        text
==========================  ==================================================================================

Roles human, gpt and so on become user and assistant; neighbours with the same role become one message. A field that
is not there by its exact name is looked for without case. What cannot be mapped is rejected with a reason, and a field
that has no meaning beside the others of its row, as a `text` beside messages, is named in `Row.unknown`.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from datetime import date, datetime
from decimal import Decimal
from functools import lru_cache
from typing import Any, Final, NamedTuple

from curation import shapes, turns
from curation.nesting import parse_text
from curation.reasons import Reason, RejectError
from curation.spellings import is_inexact, value_name
from curation.tokens import blank, invisible, neutralise

LISTS: Final = ("messages", "conversations", "conversation", "dialog", "dialogue", "turns")
PAIRS: Final = (
    ("prompt", "completion"),
    ("prompt", "response"),
    ("question", "answer"),
    ("question", "response"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("instruction", "completion"),
    ("query", "response"),
    ("query", "answer"),
    ("input", "output"),
    ("user", "assistant"),
)
ROLES: Final = {
    **dict.fromkeys(("function_call", "tool_call", "tool_calls"), "function_call"),
    **dict.fromkeys(("user", "human", "prompter", "customer", "question"), "user"),
    **dict.fromkeys(("assistant", "gpt", "bot", "model", "chatbot", "ai", "answer"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "function", "observation", "function_response", "ipython"), "tool"),
    **dict.fromkeys(("tool_response", "tool_result"), "tool"),
}
SYSTEM: Final = ("system", "system_prompt")
#: How a system message without a word is counted: it is left out, and a template may have a default one in its place.
EMPTY_SYSTEM: Final = "messages.system (empty)"
#: What is told as keys are, and is none that a recipe may refuse.
NO_KEYS: Final = frozenset(
    {EMPTY_SYSTEM, f"messages.{turns.RENUMBERED}", f"messages.{turns.REORDERED}", f"messages.{turns.UNPAIRED}"}
)
#: Characters of a label, source or group: they are joined and counted by it in memory, however long the row may be.
LONGEST_NAME: Final = 1 << 16
GROUPS: Final = ("group", "group_id", "conversation_id")
_GROUPS: Final = frozenset(GROUPS)
#: Digits of the first whole number that a float cannot tell from the next one, 2^53.
_ROUNDED: Final = 16
#: Fields beside a conversation that messages may speak of (`shapes.PLACES`); they are not learned.
PICTURES: Final = frozenset({"image", "images", "video", "videos", "audio", "audios"})
#: Every field that is looked at besides `text`; columns of Parquet files outside this list are never read.
FIELDS: Final = frozenset(
    {*LISTS, *(name for pair in PAIRS for name in pair), *SYSTEM, *GROUPS, *turns.TOOLS, "label", "source"}
)


#: Role, content, and what it says beside them; plain tuples, for millions of them are made.
Message = tuple[str, str, turns.Beside | None]


class Row(NamedTuple):
    """A canonical row. Either `roles` and `contents` (same length) or `text` is set.

    :param neutralised: control tokens made harmless.
    :param invisible: it holds characters that change what a person sees.
    :param extras: columns that are only kept, as JSON text (`curation.extras`).
    :param beside: what each message says beside its content, as JSON text or nothing (`curation.turns`); empty where
        none does and there are no tools. :param tools: that it may call, as JSON text.
    :param unknown: its fields that mean nothing beside the others, and `messages.NAME` for keys of its messages.
    :param rounded: its label, source or group is a float, which cannot tell it from its neighbours.
    """

    roles: tuple[str, ...]
    contents: tuple[str, ...]
    text: str | None
    label: str | None
    source: str | None
    group: str | None
    neutralised: int
    invisible: bool
    extras: str | None = None
    beside: tuple[str, ...] = ()
    tools: str | None = None
    unknown: tuple[str, ...] = ()
    rounded: bool = False

    @property
    def chars(self) -> int:
        if self.text is not None:
            return len(self.text)
        beside = sum(map(len, self.beside)) + len(self.tools or "") if self.beside else 0
        return sum(map(len, self.contents)) + beside

    @property
    def held(self) -> int:
        """About how much it holds in memory beside others, in characters."""
        return self.chars + len(self.extras or "") + 50 * len(self.roles)


def canonical(
    fields: Mapping[str, Any],
    text_column: str = "text",
    labels: bool = False,
    answers: bool = False,
    pictures: bool = False,
    nulls: bool = False,
) -> Row:
    """Map a row's fields.

    :param labels: whether the row is there for its label: it needs one, and a conversation needs no answer.
    :param answers: whether the row is there for an answer to something: a text is of no use.
    :param pictures: whether it has one of `PICTURES` that is not among the fields.
    :param nulls: whether what is null in it was written so: in columns each object has all keys of its column.
    :raises RejectError: if they hold no usable text.
    """
    try:
        return _canonical(fields, text_column, labels, answers, pictures, nulls)
    except RejectError:
        filled = {name: value for name, value in fields.items() if not _is_empty(name, value)}
        if len(filled) == len(fields):
            raise
        # Of several shapes some programs leave the columns of the others empty, and not null.
        with suppress(RejectError):
            row = _canonical(filled, text_column, labels, answers, pictures, nulls)
            if FIELDS.isdisjoint(name.strip().lower() for name in row.unknown):
                return row  # else one side of a pair is there, which has no answer
        raise


def _canonical(
    fields: Mapping[str, Any], text_column: str, labels: bool, answers: bool, pictures: bool, nulls: bool
) -> Row:
    """The row, as `canonical` gives it, where no field is there that holds nothing."""
    given, spelled = fields, _AS_NAMED
    messages, used = _messages(fields, text_column, nulls)
    text = fields.get(text_column) if messages is None else None
    unknown: tuple[str, ...] = ()
    seen = pictures
    odd = len(given) > len(used) and not given.keys() <= _expected(used)
    if odd or (messages is None and text is None):
        if spelled := _spelled(given, text_column):
            fields = {**given, **{name: given[written] for name, written in spelled.items()}}
            if not spelled.keys() <= _ABOUT:
                messages, used = _messages(fields, text_column, nulls)
                text = fields.get(text_column) if messages is None else None
        if messages is None and text is None:
            raise RejectError(Reason.NO_CONTENT, shapes.rows_within(given) or _listed(given))
        odd = len(given) > len(used)
        read = _expected(used, messages is not None)
        read = frozenset(spelled.get(name, name) for name in read) if spelled else read
        unknown = _unused(given, read, text_column)
        seen = pictures or not PICTURES.isdisjoint(fields)
    touched = 0
    unseen = False
    label = source = group = None
    rounded = False
    if len(given) > len(used):
        if (value := fields.get("label")) is not None:
            plain = isinstance(value, str) and not (labels and value.lstrip()[:1] in _OPENING)
            label = _repeated(value, "label") if plain else _label(value, labels)
        if (value := fields.get("source")) is not None:
            source = _repeated(value, "source")
        if not _GROUPS.isdisjoint(fields):
            group, others = _group(fields)
            unknown += tuple(spelled.get(key, key) for key in others)
        if (
            (label and len(label) >= _ROUNDED)
            or (source and len(source) >= _ROUNDED)
            or (group and len(group) >= _ROUNDED)
        ):
            rounded = any(is_inexact(fields.get(name)) for name in _NAMES)
    if labels and label is None:
        given_label = fields.get("label")
        missing = given_label in (None, [], [None], [""]) or (isinstance(given_label, str) and blank(given_label))
        raise RejectError(
            Reason.NO_LABEL, f"no `label`; {_listed(given)}" if missing else "`label` is NaN, which is no value"
        )
    if messages is None:
        if not isinstance(text, str) and not isinstance(text := shapes.texts(text), str):
            raise RejectError(Reason.BAD_FIELD, shapes.column(text, text_column) or f"`{text_column}` is {_kind(text)}")
        if blank(text):
            raise RejectError(Reason.EMPTY, f"`{text_column}` is empty")
        if answers:
            raise RejectError(Reason.NO_ANSWER, f"`{text_column}` is no prompt with its answer")
        cleaned, touched = clean(text)
        row = Row((), (), cleaned, label, source, group, touched, invisible(cleaned), rounded=rounded)
        return row._replace(unknown=unknown) if unknown else row
    roles, contents, besides = zip(*_ordered(messages, answered=not labels), strict=True)
    if len(roles) < len(messages) and messages[0][0] == "system" and blank(messages[0][1]):
        unknown += (EMPTY_SYSTEM,)
    if used[:2] in PAIRS and isinstance(fields[used[0]], list) and _is_begun(fields[used[0]], fields[used[1]]):
        unknown += (f"{used[0]} (ends with an answer)",)
    harmless = []
    for content in contents:
        cleaned, count = clean(content)
        touched += count
        unseen = unseen or invisible(cleaned)
        harmless.append(cleaned)
    if seen and _speaks_of_pictures(contents, None if pictures else fields):
        raise RejectError(
            Reason.BAD_FIELD,
            "a message has `<image>`, `<video>` or `<audio>` beside a column of them: only text is learned",
        )
    row = Row(roles, tuple(harmless), None, label, source, group, touched, unseen, rounded=rounded)
    tools = None
    if odd:
        tools, more = turns.tools_of(fields, nulls)
        unknown += () if more is None else (spelled.get(more, more),)
    if unknown:
        row = row._replace(unknown=unknown)
    return row if tools is None and not any(besides) else _with(row, besides, tools, messages)


def _with(
    row: Row, besides: Sequence[turns.Beside | None], tools: list[Any] | None, messages: Sequence[Message]
) -> Row:
    """The row with what its messages say beside their contents.

    :param messages: as they were before some were joined.
    """
    touched = row.neutralised

    def harmless(text: str) -> str:
        nonlocal touched
        cleaned, count = clean(text)
        touched += count
        return cleaned

    names = {name for _, _, one in messages if one for name in one.unknown}
    unknown = sorted(f"messages.{name}" for name in names | turns.misplaced(row.roles, besides))
    row = row._replace(unknown=(*row.unknown, *unknown))
    if tools is None and not any(map(turns.tells, besides)):
        return row
    try:
        beside = tuple(turns.told_text(one.told, harmless) if one and one.told else "" for one in besides)
        given = None if tools is None else turns.written(tools, harmless)
    except RecursionError:
        raise RejectError(Reason.TOO_DEEP, "brackets of tools are nested too deeply") from None
    unseen = row.invisible or any(map(invisible, (*beside, given or "")))
    return row._replace(beside=beside, tools=given, neutralised=touched, invisible=unseen)


def _messages(fields: Mapping[str, Any], text_column: str, nulls: bool) -> tuple[list[Message] | None, tuple[str, ...]]:
    """Roles and contents as they were written, or None if the row is no conversation; and the fields that they, or the
    text, are from."""
    # A text column that the recipe names wins over everything else.
    if text_column != "text" and fields.get(text_column) is not None:
        return None, (text_column,)
    for name in LISTS:
        value = fields.get(name)
        if value is not None and not _is_name(value):
            return _with_system(_parse_list(value, name, nulls), (name,), fields)
    half = None
    for asked, answered in PAIRS:
        if fields.get(asked) is not None and answered in fields:
            if fields[answered] is not None:
                return _pair(fields, asked, answered, nulls)
            half = half or (asked, answered)
    return (None, (text_column,)) if half is None else _pair(fields, *half, nulls)


def _is_name(value: Any) -> bool:
    """Whether a column called as those of conversations says how many turns there are, or which conversation it is, as
    `{"id": ...}` in OpenAI's Responses."""
    if isinstance(value, dict):
        return value.keys() == {"id"} and not isinstance(value["id"], list)
    return isinstance(value, int | float) or (isinstance(value, str) and value.isdecimal())


def _pair(fields: Mapping[str, Any], asked: str, answered: str, nulls: bool) -> tuple[list[Message], tuple[str, ...]]:
    question, answer = fields[asked], fields[answered]
    more = fields.get("input") if asked == "instruction" else None
    if more is not None and not blank(more := _text(more, "input")):
        told = _text(question, asked)
        question = f"{told}\n\n{more}" if not blank(told) else more
    messages = _side(question, asked, "user", nulls) + _side(answer, answered, "assistant", nulls)
    used = (asked, answered) if more is None else (asked, answered, "input")
    return _with_system(messages, used, fields)


def _is_begun(question: list[Any], answer: Any) -> bool:
    """Whether a prompt ends with what may be the beginning of the answer, a text, which is not learned as a part of it.

    A flag says that it is none.
    """
    last = question[-1] if question and isinstance(answer, str) and answer[:1] != "[" else None
    if not isinstance(last, dict) or any(last.get(flag) is not None for flag in turns.FLAGS):
        return False
    role = last.get("role", last.get("from"))
    return isinstance(role, str) and ROLES.get(role.strip().lower()) == "assistant"


def _with_system(
    messages: list[Message], used: tuple[str, ...], fields: Mapping[str, Any]
) -> tuple[list[Message], tuple[str, ...]]:
    """What `_messages` gives, with a row's own system message before those that begin with none."""
    for key in SYSTEM if len(fields) > len(used) else ():
        if (system := fields.get(key)) and messages[0][0] != "system":
            return [("system", *_content(system, "system")), *messages], (*used, key)
    return messages, used


@lru_cache(64)
def _expected(used: tuple[str, ...], tools: bool = False) -> frozenset[str]:
    """Fields of a row that has none without a meaning, as most have. :param tools: whether it may have some."""
    return frozenset({*used, *(_ABOUT if tools else _NAMES)})


#: Fields that say whose a row is.
_NAMES: Final = ("label", "source", *GROUPS)
#: And those beside a conversation that are not content.
_ABOUT: Final = frozenset({*_NAMES, *turns.TOOLS})

#: Where each field is called as it is looked for.
_AS_NAMED: Final[Mapping[str, str]] = {}


def _speaks_of_pictures(contents: Sequence[str], given: Mapping[str, Any] | None) -> bool:
    """:param given: fields, of which one may be a picture; None if the row has one elsewhere."""
    has = given is None or has_pictures(given)
    return has and any(mark in content for content in contents for mark in shapes.PLACES)


def has_pictures(fields: Mapping[str, Any]) -> bool:
    """Return whether one of a row's fields holds a picture, a video or a sound."""
    return any(fields.get(name) for name in PICTURES)


def _spelled(given: Mapping[str, Any], text_column: str) -> dict[str, str]:
    """Known names that no field with a value has exactly, and the first field that is called so in other letters."""
    found: dict[str, str] = {}
    text = text_column.strip().lower()
    for written, value in given.items():
        if value is None or written in _EXACT or written == text_column or not isinstance(written, str):
            continue
        name = written.strip().lower()
        if name == written and name != text:
            continue
        name = text_column if name == text else name
        if (name in _EXACT or name == text_column) and given.get(name) is None:
            found.setdefault(name, written)
    return found


def _unused(given: Mapping[str, Any], read: Container[str], text_column: str) -> tuple[str, ...]:
    """Names of fields that hold a value and are not read: others of the row have gone before.

    :param read: as the row has them.
    """
    found: tuple[str, ...] = ()
    text = text_column.strip().lower()
    for name, value in given.items():
        if name in read:
            continue
        if ((folded := name.strip().lower()) in FIELDS or folded == text) and value not in _NOTHING:
            found += (name,)
    return found


def _listed(given: Mapping[str, Any]) -> str:
    """What a row has, for whoever looks for something else."""
    known = given.keys() if any(value is not None for value in given.values()) else ()
    return f"fields: {', '.join(map(str, known))}"[:200] if known else "no field has a value"


def _is_empty(name: str, value: Any) -> bool:
    """Whether a field holds nothing; an answer may well be `[]`."""
    return value in _NOTHING or (value == "[]" and name in LISTS)


_NOTHING: Final[tuple[Any, ...]] = (None, "", [], {})
#: Fields that mean something by this name, as most are called.
_EXACT: Final = FIELDS | PICTURES | {"text"}


def _side(value: Any, name: str, role: str, nulls: bool) -> list[Message]:
    """One side of a pair: text, or a list of messages, which may be JSON text as a whole conversation's may."""
    if isinstance(value, str) and value[:1] != "[":  # as most are
        return [(role, value, None)]
    if told := shapes.column(value, name):
        raise RejectError(Reason.BAD_FIELD, told)
    if isinstance(value, dict) and isinstance(value.get("role"), str):  # one message, as Langfuse keeps an answer
        value = [value]
    if isinstance(value, list) or (isinstance(value, dict) and shapes.objects(value)):
        return _parse_list(value, name, nulls, role == "user")
    content = _text(value, name)
    if content.startswith("[") and shapes.may_be_chat(content):
        if told := shapes.repr_of_python(content):
            raise RejectError(Reason.BAD_MESSAGES, f"`{name}` {told}")
        if (found := shapes.chat_of(content)) is not None:
            return _parse_list(found, name, True, role == "user")
    return [(role, content, None)]


def _parse_list(value: Any, name: str, nulls: bool, prompt: bool = False) -> list[Message]:
    """Messages of a list. :param prompt: whether they are what is asked: their answers are not to be learned."""
    if isinstance(value, bytes):
        value = shapes.texts(value)
    if isinstance(value, str):
        nulls = True
        try:
            value = parse_text(value)
        except ValueError:
            cause = shapes.no_json(value) or f"is text, but not a JSON list of messages: {_ONE_TEXT}"
            raise RejectError(Reason.BAD_MESSAGES, f"`{name}` {cause}") from None
    if isinstance(value, dict):
        if value and all(isinstance(key, str) and key.isdecimal() for key in value):
            raise RejectError(Reason.BAD_MESSAGES, shapes.column(value, name) or "")
        value = shapes.objects(value) or value
    if not isinstance(value, list) or not value:
        cause = "is an empty list" if isinstance(value, list) else f"is {_kind(value)}, not a list"
        raise RejectError(Reason.BAD_MESSAGES, f"`{name}` {cause}")
    found: list[Message] = []
    for message in value:
        if not isinstance(message, dict) and not isinstance(message := shapes.parsed(message), dict):
            cause = f"texts, not objects: {_WHO}" if isinstance(message, str) else f"{_kind(message)}, not an object"
            raise RejectError(Reason.BAD_MESSAGES, f"`{name}` holds {cause}")
        role, content = message.get("role"), message.get("content")
        if role is None:
            role = message.get("from")
        if content is None:
            content = message.get("value")
        if not isinstance(role, str):
            role = shapes.texts(role)
        if not isinstance(role, str):
            if role is None and not prompt and (pair := _both_sides(message, nulls)):
                found += pair
                continue
            if role is not None:
                raise RejectError(
                    Reason.BAD_MESSAGES, f"the role of a message is {_kind(role)}, not text: write its name"
                )
            raise RejectError(Reason.BAD_MESSAGES, f"a message has no role, but {_keys(message)}: {_WHO}")
        known = ROLES.get(role) or ROLES.get(role.strip().lower())
        if known is None:
            raise RejectError(Reason.UNKNOWN_ROLE, f"role {role[:40]!r}")
        if type(content) is str and len(message) == _PLAIN and known != "function_call":
            found.append((known, content, None))
        else:
            made = _message(known, content, message, nulls)
            twice = message.get("role") is not None and message.get("from") is not None
            found.append((*made[:2], turns.both(made[2], _speaker(known, message["from"]))) if twice else made)
        if prompt and found[-1][0] == "assistant" and not turns.flagged(message):
            found[-1] = (*found[-1][:2], turns.both(found[-1][2], _GIVEN))
    return found


_ONE_TEXT: Final = (
    "if it is one side of a pair, or the text, name it in `data.columns` as `prompt`, `completion` or `text`"
)
_WHO: Final = "write each as an object with `role`, which says who speaks, and `content`"


def _both_sides(both: Mapping[Any, Any], nulls: bool) -> list[Message]:
    """What is asked and answered in an object that holds both, as a pair of a row's fields; empty for any other."""
    for asked, answered in PAIRS:
        if isinstance(both.get(asked), str) and isinstance(both.get(answered), str):
            (first, *rest), used = _pair(both, asked, answered, nulls)
            others = tuple(str(key) for key, value in both.items() if key not in used and value is not None)
            return [(*first[:2], turns.both(first[2], turns.Beside({}, others) if others else None)), *rest]
    return []


#: An answer that stands in a prompt, as TRL has it: only the completion is learned.
_GIVEN: Final = turns.Beside({"train": False})


def _speaker(role: str, speaker: Any) -> turns.Beside | None:
    """What a `from` beside a `role` says that the role does not."""
    same = isinstance(speaker, str) and ROLES.get(speaker.strip().lower()) == role
    return None if same else turns.Beside({}, ("from",))


def _message(role: str, content: Any, message: Mapping[Any, Any], nulls: bool) -> Message:
    if role == "function_call":
        text, parts = _content(content, "content of a call")
        return "assistant", "", turns.both(turns.called(message, text, nulls), parts)
    beside = turns.beside(message, role, nulls)
    if content is None and beside is not None and "tool_calls" in beside.told:
        return role, "", beside
    if content is None:
        others = {key: value for key, value in message.items() if key not in _SPEAKERS and value not in _NOTHING}
        if others or message.keys().isdisjoint(_CONTENTS):
            cause = f"a message of {role} has no `content`, but {_keys(others)}: write what it says as its `content`"
            raise RejectError(Reason.BAD_FIELD, cause)
    text, parts = _content(content, f"content of {role}", role)
    return role, text, turns.both(beside, parts)


_SPEAKERS: Final = frozenset({"role", "from"})
_CONTENTS: Final = frozenset({"content", "value"})


def _keys(message: Mapping[Any, Any]) -> str:
    """Keys of a message, as far as an error has room for them."""
    return ", ".join(f"`{key}`" for key in message)[:80] or "nothing"


#: Keys of a message that has a role and a content alone.
_PLAIN: Final = 2


def _content(value: Any, name: str, role: str = "assistant") -> tuple[str, turns.Beside | None]:
    """The text of a content, and what its parts say beside theirs, if it has parts."""
    value = shapes.texts(value)
    if isinstance(value, str):
        return value, None
    value = (shapes.objects(value) if isinstance(value, dict) else None) or value
    if isinstance(value, list) and value and all(isinstance(part, dict) for part in value):
        return turns.of_parts(value, name, role)
    raise RejectError(Reason.BAD_FIELD, f"{name} is {_kind(value)}, not text")


def _text(value: Any, name: str) -> str:
    """The text of a field that says nothing beside it."""
    text, beside = _content(value, name)
    if beside is not None:
        keys = ", ".join((*beside.told, *beside.unknown))[:80]
        raise RejectError(Reason.BAD_FIELD, f"{name} has parts with {keys}, and only text is learned")
    return text


def _ordered(messages: list[Message], answered: bool = True) -> list[Message]:
    """Check the order that chat templates ask for, and join neighbours of one role.

    :param answered: whether there must be an answer.
    """
    if _is_in_order(tuple([role for role, _, _ in messages])):  # as most are
        for _, content, beside in messages:
            if beside is not None or blank(content):
                break
        else:
            return messages
    joined: list[Message] = []
    # Joined once: a row may be one long run of short messages.
    runs: dict[int, list[str]] = {}
    besides: dict[int, list[turns.Beside | None]] = {}
    for message in messages:
        role, content, beside = message
        if blank(content) and (beside is None or "tool_calls" not in beside.told):
            if role == "assistant":
                raise RejectError(Reason.NO_ANSWER, "an answer is empty")
            if role != "system":
                raise RejectError(Reason.EMPTY, f"a message of {role} is empty")
            continue
        last = joined[-1] if joined else ("", "", None)
        if last[0] != role or role == "tool":
            joined.append(message)
        elif not turns.tells(last[2]) and not turns.tells(beside):
            runs.setdefault(len(joined) - 1, [last[1]]).append(content)
            joined[-1] = (role, last[1], last[2] or beside)
        elif role == "assistant" and turns.goes_on(last[2], content, beside):
            if not blank(content):
                runs.setdefault(len(joined) - 1, [last[1]]).append(content)
            besides.setdefault(len(joined) - 1, [last[2]]).append(beside)
            joined[-1] = (role, last[1], beside)
        else:
            joined.append(message)
    for at, run in runs.items():
        joined[at] = (joined[at][0], "\n\n".join(run), joined[at][2])
    for at, parts in besides.items():
        joined[at] = (*joined[at][:2], turns.together(parts))
    roles = [role for role, _, _ in joined]
    body = roles[1:] if roles[:1] == ["system"] else roles
    if answered and "assistant" not in body:
        raise RejectError(Reason.NO_ANSWER, "no message of the assistant")
    if answered and all(turns.is_silent(beside) for role, _, beside in joined if role == "assistant"):
        raise RejectError(Reason.NO_ANSWER, "no answer is to be learned: all have weight 0 or are in a prompt")
    if body[:1] != ["user"]:
        raise RejectError(Reason.BAD_ORDER, f"it begins with {body[0]}" if body else "no message of the user")
    if "system" in body:
        raise RejectError(Reason.BAD_ORDER, "a system message in the middle")
    return joined


@lru_cache(maxsize=256)
def _is_in_order(roles: tuple[str, ...]) -> bool:
    """Whether user and assistant take turns, behind a system message or none, and the user begins."""
    body = roles[1:] if roles[:1] == ("system",) else roles
    return len(body) > 1 and all(role == _TURNS[place % 2] for place, role in enumerate(body))


_TURNS: Final = ("user", "assistant")


def clean(text: str) -> tuple[str, int]:
    """The text with control tokens made harmless, and how many there were.

    :raises RejectError: if it holds what is no text.
    """
    if "\0" in text:
        raise RejectError(Reason.NUL, "a NUL character in the text")
    _unicode(text)
    return neutralise(text)


def _unicode(text: str) -> None:
    """:raises RejectError: if the text holds half of a surrogate pair, which no file can hold."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise RejectError(Reason.LONE_SURROGATE, "half of a surrogate pair") from None


def _name(value: Any, name: str) -> str | None:
    """A label, source or group as text, one for each value; a structure becomes canonical JSON."""
    try:
        text = None if value is None else value_name(value)
    except RejectError as error:
        raise RejectError(error.reason, f"`{name}` {error.detail}") from None
    if not text:
        return None
    if len(text) > LONGEST_NAME:
        raise RejectError(Reason.TOO_LARGE, f"`{name}` has {len(text)} characters, more than {LONGEST_NAME}")
    if "\0" in text:
        raise RejectError(Reason.NUL, f"a NUL character in `{name}`")
    _unicode(text)
    return text


#: Most rows have a label or source that others had before.
_name_of_text: Final = lru_cache(maxsize=1024)(_name)


def _repeated(value: Any, name: str) -> str | None:
    return _name_of_text(value, name) if type(value) is str and len(value) < _OFTEN else _name(value, name)


_OFTEN: Final = 100  # characters of a name that is kept
#: What a list or an object begins with that is written as text.
_OPENING: Final = frozenset("[{(")


def _label(value: Any, labels: bool) -> str | None:
    """The name of a label, also where it is a list of one value; any other structure is no class.

    :param labels: whether a class is asked for. :raises RejectError: if it is, and there is none.
    """
    value = shapes.texts(value)
    if labels and isinstance(value, str) and (held := shapes.several(value)):
        raise RejectError(Reason.BAD_FIELD, f"`label` is text that holds {held}, {_ONE_CLASS}")
    if isinstance(value, list) and len(value) < 2 and not any(isinstance(item, list | dict) for item in value):
        value = value[0] if value else None
    if labels and isinstance(value, list | dict):
        several = isinstance(value, list) and len(value) > 1
        within = "a list that holds a list or an object" if isinstance(value, list) else "an object"
        what = f"a list of {len(value):,}" if several else within
        how = "write one class for each row" if several else "write the value alone"
        raise RejectError(Reason.BAD_FIELD, f"`label` is {what}, and a class is one text or number: {how}")
    return _name(value, "label")


_ONE_CLASS: Final = "and a class is one text or number: write one class for each row"


def _group(fields: Mapping[str, Any]) -> tuple[str | None, list[str]]:
    """The first group that a row has, and the fields that name another one, which is not looked at."""
    named = {key: name for key in GROUPS if (name := _name(fields.get(key), key)) is not None}
    group = next(iter(named.values()), None)
    return group, [key for key, name in named.items() if name != group]


def group_of(fields: Mapping[str, Any]) -> str | None:
    """The group of a row that may be unusable otherwise; its name may be one that a usable row's cannot be."""
    spelled = _spelled(fields, "text")
    for key in GROUPS:
        with suppress(RejectError):
            if name := value_name(fields.get(spelled.get(key, key))):
                return name
    return None


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), "a list" if isinstance(value, list) else "an object")


_KINDS: Final = {
    type(None): "null",
    bool: "a truth value",
    int: "a number",
    float: "a number",
    str: "text",
    bytes: "bytes that are not UTF-8",
    Decimal: "a decimal number",
    datetime: "a time",
    date: "a date",
}
