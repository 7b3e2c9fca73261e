"""Prompts whose answers are known and held out: the first evaluation rows that have an answer to something.

Which rows they are follows from the rows alone, so every model is asked the same, whatever its tokenizer. A row whose
prompt a chat template refuses stays among them, without tokens: a model that cannot be asked gives no answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

from dropforge.errors import DataError
from trainer.data.chat import OwnEncoder, TemplateEncoder, make_encoder
from trainer.data.rows import Row
from trainer.data.template import UnusableChatError
from trainer.data.tokenizer import END, EOS, is_ours, no_panic

#: How DeepSeek, Qwen and those who learn from them, Mistral and Seed end their thoughts.
_THOUGHTS_END: Final = re.compile(r"</(?:seed:)?think(?:ing)?>|\[/THINK\]")
Ask = Callable[[Row], tuple[str, tuple[int, ...]] | None]


@dataclass(frozen=True)
class Prompt:
    """One row up to its last answer.

    :param row: content key as hexadecimal digits. :param text: the prompt as the model gets it, special tokens spelled.
    :param ids: its tokens; none if the chat template refuses it. :param answer: what the row has, without
        thoughts in its text.
    :param lead: id of the token behind which the answer's own text begins, where the chat template has the model say
        something before it, as thoughts or an empty block of them; None where it begins at once.
    """

    row: str
    text: str
    ids: tuple[int, ...]
    answer: str
    lead: int | None = None


def held_out(row: Row, *, calling: bool = True) -> tuple[Row, str] | None:
    """The row before its last answer that is learned and says something, and that answer; None if there is none, or
    nothing stands before it.

    :param calling: whether it may call tools besides.
    """
    messages, silent = row.messages or (), row.silent
    for turn in range(len(messages) - 1, 0, -1):
        role, content = messages[turn]
        if role != "assistant" or not content.strip() or turn in silent:
            continue
        if calling or not (row.beside and row.beside[turn].get("tool_calls")):
            return row.until(turn), content
    return None


def prompted(row: Row) -> tuple[Row, str] | None:
    """The part of a row that a model is asked, and the answer, as `held_out`: who calls tools as it was taught would
    not have written its text alone."""
    return held_out(row, calling=False)


def behind_thoughts(text: str) -> str:
    """The answer behind thoughts that its text holds, as `<think>...</think>`; all of it where nothing is behind."""
    _, *behind = _THOUGHTS_END.split(text)
    return (behind[-1].lstrip() if behind else "") or text


def make_prompts(tokenizer: Any, rows: Iterable[Row], count: int, ask: Ask | None = None) -> list[Prompt]:
    """The prompts of the first rows that have one, at most `count`; the rest of `rows` is not looked at.

    :param ask: makes text and tokens of the messages before an answer, or nothing if they are refused; without it
        they are what the training puts before an answer that a language model continues.
    :raises DataError: if no row has an answer, or the chat template ends no answer.
    """
    leads = _leads(tokenizer) if ask is None else None
    ask = ask or _continued(tokenizer)
    found = []
    for row, (before, content) in islice(_usable(rows), count):
        answer = behind_thoughts(content)
        text, ids = ask(before) or ("", ())
        lead = leads(row.until(len(before.messages or ()) + 1), text, answer) if leads and ids else None
        found.append(Prompt(row.key.hex(), text, ids, answer, lead))
    if not found:
        raise DataError(
            "the evaluation rows",
            "none of them is a conversation with an answer of text alone that could be held out",
            "Drop conversations, or leave `evaluate.generation` out",
        )
    return found


def end_tokens(tokenizer: Any) -> tuple[int, ...]:
    """Ids that end an answer as the training teaches it: the end of a turn, and the tokenizer's end token.

    :raises DataError: if the chat template ends no answer.
    """
    if is_ours(tokenizer):
        vocabulary = tokenizer.get_vocab()
        return (vocabulary[EOS], vocabulary[END])
    encoder = make_encoder(tokenizer, "answers")
    assert isinstance(encoder, TemplateEncoder)
    turns = (int(tokenizer.convert_tokens_to_ids(end)) for end in encoder.template.every_end)
    return tuple(dict.fromkeys((int(tokenizer.eos_token_id), *turns)))


def stops(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Ids at which a model ends an answer, in evaluation and wherever it is loaded: what the training teaches, and what
    its base ended at.

    :raises DataError: if the chat template ends no answer.
    """
    own = model.generation_config.eos_token_id
    taught = (int(tokenizer.eos_token_id),) if model.config.is_encoder_decoder else end_tokens(tokenizer)
    return tuple(sorted({*taught, *([own] if isinstance(own, int) else own or ())}))


def write_prompts(prompts: Sequence[Prompt], path: Path) -> None:
    path.write_text(json.dumps([asdict(prompt) for prompt in prompts]))


def read_prompts(path: Path) -> list[Prompt]:
    """What `write_prompts` wrote."""
    return [Prompt(**{**item, "ids": tuple(item["ids"])}) for item in json.loads(path.read_text())]


def _usable(rows: Iterable[Row]) -> Iterator[tuple[Row, tuple[Row, str]]]:
    for row in rows:
        if (parts := prompted(row)) is not None:
            yield row, parts


def _leads(tokenizer: Any) -> Callable[[Row, str, str], int | None]:
    """What finds `Prompt.lead` of a row that ends with its answer, whose prompt is known."""
    encoder = make_encoder(tokenizer, "answers")
    if not isinstance(encoder, TemplateEncoder):
        return lambda *_: None
    template, added = encoder.template, {str(token): id for id, token in tokenizer.added_tokens_decoder.items()}
    mark = re.compile("|".join(map(re.escape, sorted(filter(None, added), key=len, reverse=True))) or "(?!)")

    def lead(row: Row, prompt: str, answer: str) -> int | None:
        try:
            text = template.whole(row.turns, row.tools)
        except UnusableChatError:
            return None
        said = text.removeprefix(prompt)
        # The last place: thoughts often name the answer. Nor is it a part of a mark.
        place = mark.sub(lambda found: "\0" * len(found.group()), said).rfind(answer.strip())
        if place < 0 or not text.startswith(prompt):
            return None
        before = mark.findall(said[:place])
        return int(added[before[-1]]) if before else None

    return lead


def _continued(tokenizer: Any) -> Ask:
    encoder = make_encoder(tokenizer, "answers")
    assert isinstance(encoder, (OwnEncoder, TemplateEncoder))

    @no_panic()
    def ask(before: Row) -> tuple[str, tuple[int, ...]] | None:
        if isinstance(encoder, OwnEncoder):
            ids = [] if before.calls else encoder.prompt(before)
            return tokenizer.decode(ids), tuple(ids)
        try:
            text = encoder.template.prompt(before.turns, before.tools)
        except UnusableChatError:
            return None
        # Templates write the begin token themselves: adding it again would double it.
        return text, tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

    return ask
