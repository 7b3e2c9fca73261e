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
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from dropforge.errors import DataError
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
    return f"it is too long a conversation, to be split into several: {answers:,} of its answers are to be told"


def _size(message: Message) -> int:
    """UTF-8 bytes of what an answer says, its calls included."""
    calls = json.dumps(message["tool_calls"], ensure_ascii=False) if "tool_calls" in message else ""
    return len(f"{message['content']}{calls}".encode())


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
    """A tokenizer's chat template. :raises DataError: if it has several and none is the default."""

    def __init__(self, tokenizer: Any) -> None:
        self.name = f"chat template of {tokenizer.name_or_path or 'the base model'}"
        template = tokenizer.chat_template or plain_template(tokenizer)
        if isinstance(template, dict):
            template = template.get("default")
        if not isinstance(template, str):
            raise DataError(self.name, "there are several and none is `default`", "Save one `chat_template`")
        self.template = template
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
            raise DataError(self.name, f"it does not tell what the assistant says ({error})", _MEND) from error

    @property
    def end(self) -> str:
        """The end token behind an answer. :raises DataError: if there is none."""
        stem = self._turn.closing[: self._turn.end]
        return next(token for token in self.ends if stem.endswith(token))

    def prompt(self, messages: list[Message], tools: Tools = ()) -> str:
        """The text of a conversation up to where its next answer begins, as for a model that is in use.

        :raises UnusableChatError: if the template refuses it.
        """
        self._check_tools(messages, tools)
        return self._render(messages, tools, prompt=True)[0]

    def whole(self, messages: list[Message], tools: Tools = ()) -> str:
        """The text of a conversation. :raises UnusableChatError: if the template refuses it."""
        self._check_tools(messages, tools)
        return self._text(messages, tools)

    def _check_tools(self, messages: list[Message], tools: Tools) -> None:
        """:raises UnusableChatError: if the template leaves out tools or their calls, which are to be learned."""
        if not tools and not any("tool_calls" in message for message in messages):
            return
        text = self._text(messages, tools)
        if tools and text == self._text(messages):
            raise UnusableChatError("the chat template takes no tools, and the row has some")
        plain = [{key: value for key, value in message.items() if key != "tool_calls"} for message in messages]
        if plain != messages and text == self._text(plain, tools):
            raise UnusableChatError("the chat template writes no tool calls, and the row has some")

    def shows_thoughts(self, messages: list[Message], tools: Tools = ()) -> bool:
        """Whether the template writes what the last answer's `reasoning_content` says."""
        last = max(turn for turn, message in enumerate(messages) if "reasoning_content" in message)
        head = messages[: last + 1]
        plain = [*head[:-1], {key: value for key, value in head[-1].items() if key != "reasoning_content"}]
        return self._text(head, tools) != self._text(plain, tools)

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
        answers = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
        turns = [turn for turn in answers if turn not in silent]
        said = sum(_size(messages[turn]) for turn in turns)
        check_work(messages, tools, len(answers) if self.marked else len(turns))
        self._check_tools(messages, tools)
        text, spans = self._render(messages, tools, marks=self.marked)
        if self.marked and len(turns) == len(answers):
            return [Rendered(text, spans, said)]
        if self.marked:
            if len(spans) != len(answers):
                raise UnusableChatError("its answers cannot be told apart, and one is not to be learned")
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
            raise UnusableChatError(f"{_long(len(found))}, each in a text of its own, with {size:,} characters in all")
        return (
            Rendered(self._text(messages[: turn + 1], tools), ((place.low, place.high),), _size(messages[turn]))
            for turn, place in zip(turns, found, strict=True)
        )

    def span(self, text: str, messages: list[Message], turn: int, tools: Tools = ()) -> tuple[int, int] | None:
        """Characters of `text` that answer `turn` adds to its prompt; None if the text does not begin with both."""
        found = self._place(text, messages, turn, tools)
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
            cause = " ".join(str(error).split())[:200] or type(error).__name__
            raise UnusableChatError(f"the chat template refuses it: {cause}") from error
        texts, ranges = found
        return str(texts[0]), tuple((low, high) for low, high in ranges[0]) if ranges else ()
