"""Chats by the chat template that came with a model: the text, and which parts of it the model is to say.

The template's own `{% generation %}` markers tell it where they hold the answer, its end of turn and no question.
Else it is what a turn adds to its prompt. A template may rewrite earlier turns (Qwen3 takes their thinking out, older
Mistral ones move the system message), so nothing is looked up by its wording: the prompt and the turn, rendered alone,
must both be how the whole text begins. Where one is not, the conversation is unrolled into one text per answer, which
are the very texts that the model meets when it is used. What cannot be told even then is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from dropforge.errors import DataError
from dropforge.text import as_line
from trainer.data.tokenizer import plain_template

Message = dict[str, Any]

_MARKER: Final = re.compile(r"\{%-?\s*generation\s*-?%\}")
_QUESTION: Final = "DROPFORGEQUESTION"
_ANSWER: Final = "DROPFORGEANSWER"
_MEND: Final = (
    "Put `{% generation %}` and `{% endgeneration %}` around the answer and its end token in the template, "
    "and save it with the tokenizer"
)
# What one conversation may take, so that no row holds up a training. 260 answers in 500 kB, where each is a text of its
# own, reach the second.
_RENDERED: Final = 1 << 28  # characters, if all of it were rendered for each answer
_UNROLLED: Final = 1 << 26  # characters of the texts that it becomes

Tools = Sequence[Any]
_TOOL_USE: Final = "tool_use"


class UnusableChatError(Exception):
    """One conversation that this template cannot render, or whose answers cannot be told. The text says why."""


def check_work(messages: list[Message], tools: Tools, answers: int) -> None:
    """Refuse a conversation whose answers would take too long to tell, because all before each is rendered for it.

    :param answers: that are to be told. :raises UnusableChatError: if they are too many for what it says.
    """
    if answers < 2:
        return
    size = len(json.dumps([messages, list(tools)], ensure_ascii=False, default=str))
    if answers * size > _RENDERED:
        raise UnusableChatError(f"{_long(answers)}, and rendering its {size:,} characters for each takes too long")


def _long(answers: int) -> str:
    return f"it is too long a conversation, to be split into several: {answers:,} of its answers are to be rendered"


def _size(message: Message, *, thoughts: bool) -> int:
    """UTF-8 bytes of what a message says, its calls included. :param thoughts: whether its thoughts, too."""
    calls = json.dumps(message["tool_calls"], ensure_ascii=False) if "tool_calls" in message else ""
    aside = message.get("reasoning_content") or "" if thoughts else ""
    return len(f"{message['content']}{calls}{aside}".encode())


#: What a row may say that a template leaves out or a tokenizer lacks, and what is told of how many rows it is.
UNWRITTEN: Final = {
    "unwritten_thoughts": "rows have thoughts that the chat template leaves out, so they are not learned",
    "unwritten_system": "rows have system messages that the chat template leaves out, so they are learned without",
    "unwritten_results": "rows have results of tools that the chat template leaves out, so they are learned without",
    "unwritten_names": "rows have names of who speaks that the chat template leaves out, so they are learned without",
    "unwritten_text": "rows have answers of which the chat template leaves out what comes before a thought, so it is "
    "not learned",
    "unwritten_indents": "rows have answers that begin with white space, which the chat template leaves out",
    "unknown_letters": "rows have letters that the tokenizer does not know: it reads, and learns, its unknown token "
    "in their place",
    "changed_answers": "rows have answers that the tokenizer does not give back as they are, such as line breaks or "
    "several spaces: the model learns what it gives",
}
_ROLES: Final = ("system", "user", "assistant", "tool")
_COUNTED: Final = {
    "thoughts": "unwritten_thoughts",
    "written thoughts": "unwritten_thoughts",
    "system": "unwritten_system",
    "later system": "unwritten_system",
    "several systems": "unwritten_system",
    "results": "unwritten_results",
    "results of written calls": "unwritten_results",
    "text before a thought": "unwritten_text",
    "text between thoughts": "unwritten_text",
    "indent": "unwritten_indents",
    **{f"names of {role}": "unwritten_names" for role in _ROLES},
}
_REFUSED: Final = {
    "tools": "the chat template takes no tools, and the row has some",
    "calls": "the chat template writes no tool calls, and the row has some",
    "several calls": "the chat template does not write all tool calls of an answer, and the row has several in one",
    "content": "the chat template leaves out what an answer says beside its tool calls, and the row has such an answer",
}


def _kinds(messages: list[Message], tools: Tools) -> set[str]:
    """What a conversation has that a template may leave out: keys of `_COUNTED` and `_REFUSED`."""
    found = {"tools"} if tools else set()
    last = max((turn for turn, message in enumerate(messages) if message["role"] == "user"), default=-1)
    for turn, message in enumerate(messages):
        role = message["role"]
        if role == "system":
            found |= {"several systems"} if found & {"system", "later system"} else set()
            found.add("later system" if turn else "system")
        elif role == "tool":
            found.add("results" if "calls" in found else "results of written calls")
        elif role == "assistant":
            found |= _written(message["content"], turn < last)
        if len(message) == 2:  # as most: a role and a content
            continue
        if message.get("tool_calls"):
            found |= {"calls"} | ({"several calls"} if len(message["tool_calls"]) > 1 else set())
            found |= {"content"} if message["content"].strip() else set()
        if message.get("name"):
            found.add(f"names of {role}")
        if "reasoning_content" in message:
            found |= {"thoughts"} | ({"earlier thoughts"} if turn < last else set())
    return found


def _written(answer: str, earlier: bool) -> set[str]:
    """What an answer's own text has of them. :param earlier: a question follows it."""
    found = {"indent"} if answer[:1].isspace() and answer.strip() else set()
    if "</think>" in answer:
        found |= {"written thoughts"} | ({"earlier written thoughts"} if earlier else set())
        first, _, rest = answer.partition("<think>")
        found |= {"text before a thought"} if rest and first.strip() else set()
        found |= {"text between thoughts"} if rest.count("<think>") else set()
    return found


def _message(role: str, content: str, **beside: Any) -> Message:
    return {"role": role, "content": content, **beside}


def _call(number: int) -> dict[str, Any]:
    function = {"name": f"DROPFORGECALL{number}", "arguments": {"unit": f"DROPFORGEVALUE{number}"}}
    return {"type": "function", "function": function, "id": f"dropforg{number}"}  # Mistral's ids have 9 letters


_TOLD: Final = "DROPFORGETOLD"  # what a probe looks for
_ASK: Final = _message("user", _QUESTION)
_SAY: Final = _message("assistant", _ANSWER)
_TOOLS: Final = (
    {
        "type": "function",
        "function": {
            "name": "DROPFORGETOOL",
            "description": "It looks.",
            "parameters": {"type": "object", "properties": {"unit": {"type": "string", "description": "A unit."}}},
        },
    },
)


def _calling(content: str, *numbers: int) -> list[list[Message]]:
    """A conversation with calls in its middle, and one that ends with them."""
    head = [_ASK, _message("assistant", content, tool_calls=[_call(number) for number in numbers])]
    results = [_message("tool", "on", tool_call_id=f"dropforg{number}") for number in numbers]
    return [[*head, *results, _SAY], head]


#: As most models write thoughts, and as templates that leave them out look for them.
_THOUGHT: Final = _message("assistant", f"<think>\n{_TOLD}\n</think>\n\n{_ANSWER}")
_RESULT: Final = _message("tool", _TOLD, tool_call_id="dropforg1")
_UNCALLED: Final = [[_ASK, _RESULT, _SAY], [_ASK, _SAY, _RESULT, _SAY]]
_THINKS: Final = "<think>\nso\n</think>\n\n"
_PROBES: Final[dict[str, list[list[Message]]]] = {
    "tools": [[_ASK, _SAY], [_ASK]],
    "calls": _calling("", 1),
    "several calls": _calling("", 1, 2),
    "content": _calling(_TOLD, 1),
    "thoughts": [[_ASK, _message("assistant", _ANSWER, reasoning_content=_TOLD)]],
    "earlier thoughts": [[_ASK, _message("assistant", _ANSWER, reasoning_content=_TOLD), _ASK, _SAY]],
    "written thoughts": [[_ASK, _THOUGHT]],
    "earlier written thoughts": [[_ASK, _THOUGHT, _ASK, _SAY]],
    "system": [[_message("system", _TOLD), _ASK, _SAY]],
    "later system": [
        [_ASK, _SAY, _message("system", _TOLD), _ASK, _SAY],
        [_ASK, _message("system", _TOLD), _SAY],
    ],
    # A template may write the last one alone.
    "several systems": [[_message("system", _TOLD), _ASK, _SAY, _message("system", "Be brief."), _ASK, _SAY]],
    "text before a thought": [[_ASK, _message("assistant", f"{_TOLD}\n{_THINKS}{_ANSWER}")]],
    "text between thoughts": [[_ASK, _message("assistant", f"{_THINKS}{_TOLD}\n{_THINKS}{_ANSWER}")]],
    "indent": [[_ASK, _message("assistant", f"    {_TOLD}")]],
    "results": [[*_calling("", 1)[1], _RESULT, _SAY], *_UNCALLED],
    "results of written calls": _UNCALLED,
    "names of system": [[_message("system", "Be brief.", name=_TOLD), _ASK, _SAY]],
    "names of user": [[_message("user", _QUESTION, name=_TOLD), _SAY]],
    "names of assistant": [[_ASK, _message("assistant", _ANSWER, name=_TOLD)]],
    "names of tool": [[*_calling("", 1)[1], {**_RESULT, "content": "on", "name": _TOLD}, _SAY]],
}
_WORDS: Final = {
    **dict.fromkeys(_PROBES, (_TOLD,)),
    "indent": (f"    {_TOLD}",),
    "tools": ("DROPFORGETOOL",),
    "calls": ("DROPFORGECALL1", "DROPFORGEVALUE1"),
    "several calls": ("DROPFORGECALL1", "DROPFORGEVALUE1", "DROPFORGECALL2", "DROPFORGEVALUE2"),
}

#: What an answer may say beside its text.
_BESIDE: Final = frozenset({"calls", "several calls", "content", "thoughts"})


@dataclass(frozen=True)
class Rendered:
    """A text for the model.

    :param spans: ranges of characters that the model is to say, each with its end of turn.
    :param said: UTF-8 bytes of the answers in the spans, as they stand in the row.
    """

    text: str
    spans: tuple[tuple[int, int], ...]
    said: int


@dataclass(frozen=True)
class _Turn:
    """How an answer ends. :param closing: all that follows it; :param end: characters of that up to the end token."""

    closing: str
    end: int


@dataclass(frozen=True)
class _Place:
    """Where an answer stands in the text that ends with its turn.

    :param size: characters of that text. :param whole: whether the text of the whole conversation begins like it.
    """

    low: int
    high: int
    size: int
    whole: bool


class ChatTemplate:
    """A tokenizer's chat template; of named ones `default`, or `tool_use` where there are tools, as transformers takes
    them.

    :param named: which of them. :raises DataError: if it has several and none is the default.
    """

    def __init__(self, tokenizer: Any, named: str = "default") -> None:
        self.name = f"chat template of {tokenizer.name_or_path or 'the base model'}"
        template = tokenizer.chat_template or plain_template(tokenizer)
        several = template if isinstance(template, dict) else {}
        self.with_tools = ChatTemplate(tokenizer, _TOOL_USE) if named != _TOOL_USE and _TOOL_USE in several else self
        if several:
            template = several.get(named)
        if not isinstance(template, str):
            raise DataError(self.name, "there are several and none is `default`", "Save one `chat_template`")
        self.template = template
        self._found_hidden: dict[bool, frozenset[str]] = {}
        self._found_unmarked: dict[bool, frozenset[str]] = {}
        self.special = dict(tokenizer.special_tokens_map)
        added = {str(token) for token in tokenizer.added_tokens_decoder.values()} | {tokenizer.eos_token}
        # Gemma's vocabulary has line breaks among its added tokens: they end nothing.
        self.ends = sorted((token for token in added if token and token.strip()), key=len, reverse=True)

    @cached_property
    def marked(self) -> bool:
        """Whether the template's markers can be believed: they hold an answer with its end, and no question."""
        if not _MARKER.search(self.template):
            return False
        text, spans = self._probe()
        begin, question = text.index(_ANSWER), text.index(_QUESTION)
        end = begin + len(_ANSWER) + self._turn.end
        return any(low <= begin and end <= high and not low <= question < high for low, high in spans)

    @cached_property
    def _turn(self) -> _Turn:
        """How an answer ends.

        :raises DataError: if no end token follows it: the model would not learn to stop.
        """
        text, _ = self._probe()
        closing = text[text.index(_ANSWER) + len(_ANSWER) :]
        found = [(closing.index(token), -len(token)) for token in self.ends if token in closing]
        if not found:
            raise DataError(self.name, "no end token follows an answer, so a model could not learn to stop", _MEND)
        place, size = min(found)
        return _Turn(closing, place - size)

    def check(self) -> None:
        """:raises DataError: if the template does not tell what the assistant says in the plainest conversation."""
        if self.marked:
            return
        question = {"role": "user", "content": _QUESTION}
        messages = [question, {"role": "assistant", "content": _ANSWER}]
        try:
            self.answers(messages)
        except UnusableChatError as error:
            raise DataError(self.name, f"it does not show what the assistant says ({error})", _MEND) from error

    @property
    def end(self) -> str:
        """The end token behind an answer. :raises DataError: if there is none."""
        stem = self._turn.closing[: self._turn.end]
        return next(token for token in self.ends if stem.endswith(token))

    @property
    def every_end(self) -> tuple[str, ...]:
        """The end tokens behind answers, without tools and with them. :raises DataError: if there is none."""
        found = [self.end]
        with suppress(DataError):  # rows with tools will tell, if there are some
            found.append(self.with_tools.end)
        return tuple(found)

    def prompt(self, messages: list[Message], tools: Tools = ()) -> str:
        """The text of a conversation up to where its next answer begins, as for a model that is in use.

        :raises UnusableChatError: if the template refuses it.
        """
        used = self._of(tools)
        used._check(messages, tools)
        return used._render(messages, tools, prompt=True)[0]

    def whole(self, messages: list[Message], tools: Tools = ()) -> str:
        """The text of a conversation. :raises UnusableChatError: if the template refuses it."""
        used = self._of(tools)
        used._check(messages, tools)
        return used._text(messages, tools)

    def unwritten(self, messages: list[Message], tools: Tools = (), whole: bool = False) -> frozenset[str]:
        """What a conversation says and the template leaves out, by names of `UNWRITTEN`.

        :param whole: it is learned as one text, in which many templates leave out what was thought before a later
            question; answers that are learned are texts of their own then, unless the template marks them.
        """
        used = self._of(tools)
        lost = used._lost(messages, tools)
        found = {_COUNTED[kind] for kind in lost if kind in _COUNTED}
        if lost & {"earlier thoughts", "earlier written thoughts"} and (whole or used._marks(messages, tools)):
            found.add(_COUNTED["thoughts"])
        return frozenset(found)

    def _of(self, tools: Tools) -> ChatTemplate:
        """The one that a conversation with such tools is written by."""
        return self.with_tools if tools else self

    def _check(self, messages: list[Message], tools: Tools) -> None:
        """:raises UnusableChatError: if the template leaves out what is to be learned, or tools."""
        lost = self._lost(messages, tools)
        for kind, cause in _REFUSED.items():
            if kind in lost:
                raise UnusableChatError(cause)

    def _lost(self, messages: list[Message], tools: Tools) -> set[str]:
        found = _kinds(messages, tools)
        return found & self._hidden(bool(tools)) if found else found

    def _hidden(self, tools: bool) -> frozenset[str]:
        """Kinds of `_kinds` that the template leaves out, as small conversations show that have one each.

        :param tools: whether a conversation has tools, for which templates are often written apart.
        """

        def shown(kind: str) -> bool:
            return any(self._shows(probe, _WORDS[kind], _TOOLS if tools else ()) for probe in _PROBES[kind])

        if tools not in self._found_hidden:
            kinds = (kind for kind in _PROBES if tools or kind != "tools")
            self._found_hidden[tools] = frozenset(kind for kind in kinds if not shown(kind))
        return self._found_hidden[tools]

    def _marks(self, messages: list[Message], tools: Tools) -> bool:
        """Whether the template's markers hold all that the answers of such a conversation say."""
        if not self.marked:
            return False
        beside = _kinds(messages, tools) & _BESIDE
        return not beside or not beside & self._unmarked(bool(tools))

    def _unmarked(self, tools: bool) -> frozenset[str]:
        """Kinds of `_BESIDE` that the template writes outside its markers, or without an end token in them."""

        def marked(kind: str) -> bool:
            for probe in _PROBES[kind]:
                try:
                    text, spans = self._render(probe, _TOOLS if tools else (), marks=True)
                except UnusableChatError:  # as it will refuse the rows
                    continue
                for word in filter(text.__contains__, _WORDS[kind]):
                    at = text.index(word)
                    if not any(low <= at and at + len(word) <= high for low, high in spans):
                        return False
                if not spans or not text[slice(*spans[-1])].rstrip().endswith(tuple(self.ends)):
                    return False
            return True

        if tools not in self._found_unmarked:
            self._found_unmarked[tools] = frozenset(kind for kind in _BESIDE if not marked(kind))
        return self._found_unmarked[tools]

    def _shows(self, probe: list[Message], words: Sequence[str], tools: Tools) -> bool:
        try:
            text = self._text(probe, tools)
        except UnusableChatError:  # as it will refuse the rows
            return False
        return all(word in text for word in words)

    def answers(
        self, messages: list[Message], tools: Tools = (), silent: Collection[int] = frozenset()
    ) -> Iterable[Rendered]:
        """A conversation as one text, or as one for each answer; a conversation without an answer has no span.

        What is refused is refused at once. Several texts are made as they are taken, since they may be large together.

        :param silent: answers that are not to be learned.
        :raises UnusableChatError: if the template refuses it, or does not tell what the assistant says, or that takes
            too long.
        :raises DataError: if the template trains no end of turn.
        """
        if (used := self._of(tools)) is not self:
            return used.answers(messages, tools, silent)
        answers = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
        turns = [turn for turn in answers if turn not in silent]
        sizes = self.sizes(messages, turns, tools)
        said = sum(sizes)
        marked = self._marks(messages, tools)
        check_work(messages, tools, len(answers) if marked else len(turns))
        self._check(messages, tools)
        text, spans = self._render(messages, tools, marks=marked)
        if marked and len(turns) == len(answers):
            return [Rendered(text, spans, said)]
        if marked:
            if len(spans) != len(answers):
                raise UnusableChatError("its answers cannot be distinguished, and one is not to be learned")
            kept = tuple(span for turn, span in zip(answers, spans, strict=True) if turn not in silent)
            return [Rendered(text, kept, said)]
        places = [self._place(text, messages, turn, tools) for turn in turns]
        found = [place for place in places if place is not None]
        if all(place is not None and place.whole for place in places):
            return [Rendered(text, tuple((place.low, place.high) for place in found), said)]
        if len(found) < len(places):
            raise UnusableChatError("the prompt for an answer is not how the answered text begins")
        size = sum(place.size for place in found)
        if len(found) > 1 and size > _UNROLLED:
            each = f"each in a text of its own, with {size:,} characters in total"
            raise UnusableChatError(f"{_long(len(found))}, {each}")
        return (
            Rendered(self._text(messages[: turn + 1], tools), ((place.low, place.high),), size)
            for turn, place, size in zip(turns, found, sizes, strict=True)
        )

    def sizes(self, messages: list[Message], turns: Iterable[int], tools: Tools = (), whole: bool = False) -> list[int]:
        """UTF-8 bytes of what messages say and the template writes: contents, tool calls and thoughts.

        :param whole: as of `unwritten`.
        """
        if not any("reasoning_content" in message for message in messages):
            return [_size(messages[turn], thoughts=False) for turn in turns]
        used = self._of(tools)
        lost, first = used._lost(messages, tools), 0
        if "thoughts" in lost:
            first = len(messages)
        elif "earlier thoughts" in lost and (whole or used._marks(messages, tools)):
            first = max((turn for turn, message in enumerate(messages) if message["role"] == "user"), default=0)
        return [_size(messages[turn], thoughts=turn >= first) for turn in turns]

    def span(self, text: str, messages: list[Message], turn: int, tools: Tools = ()) -> tuple[int, int] | None:
        """Characters of `text` that answer `turn` adds to its prompt; None if the text does not begin with both."""
        found = self._of(tools)._place(text, messages, turn, tools)
        return (found.low, found.high) if found is not None and found.whole else None

    def _place(self, text: str, messages: list[Message], turn: int, tools: Tools) -> _Place | None:
        """Where answer `turn` stands; None if its prompt is not how the text that ends with it begins.

        :param text: of the whole conversation.
        """
        if not turn:
            raise UnusableChatError("it begins with an answer")
        before = self._render(messages[:turn], tools, prompt=True)[0]
        after = text if turn == len(messages) - 1 else self._text(messages[: turn + 1], tools)
        if not after.endswith(self._turn.closing):
            raise UnusableChatError("an answer does not end as the template's answers do")
        stem = after[: len(after) - len(self._turn.closing) + self._turn.end]
        if len(before) < len(stem) and stem.startswith(before):
            return _Place(len(before), len(stem), len(after), text.startswith(stem))
        return None

    def _text(self, messages: list[Message], tools: Tools = ()) -> str:
        return self._render(messages, tools)[0]

    def _probe(self) -> tuple[str, tuple[tuple[int, int], ...]]:
        try:
            found = self._render(
                [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}], (), marks=True
            )
        except UnusableChatError as error:
            raise DataError(self.name, f"it does not render a question and its answer ({error})", _MEND) from error
        if found[0].count(_ANSWER) != 1 or found[0].count(_QUESTION) != 1:
            raise DataError(self.name, "it does not show a question and its answer once each", _MEND)
        return found

    def _render(
        self, messages: list[Message], tools: Tools, prompt: bool = False, marks: bool = False
    ) -> tuple[str, tuple[tuple[int, int], ...]]:
        """The text and, with `marks`, the ranges inside generation markers, whose time grows with its square."""
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            found: Any = render_jinja_template(
                conversations=[messages],
                tools=list(tools) or None,
                chat_template=self.template,
                return_assistant_tokens_mask=marks and bool(_MARKER.search(self.template)),
                add_generation_prompt=prompt,
                **self.special,
            )
        except Exception as error:  # a stranger's program: whatever it raises is its fault
            cause = as_line(error) or type(error).__name__
            raise UnusableChatError(f"the chat template refuses it: {cause}") from error
        texts, ranges = found
        return str(texts[0]), tuple((low, high) for low, high in ranges[0]) if ranges else ()
