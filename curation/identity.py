"""The names of a row: what it says, what it is byte for byte, and which side of the split it falls on.

All are blake2b over bytes that do not depend on the machine, its locale or the order of rows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Final

from curation.canonical import Row
from curation.composing import composed
from curation.turns import calls_of, in_one_order, without_ids

KEY_BYTES: Final = 16
#: Words of an answer that is compared by itself.
LONG: Final = 8
#: Characters of a text by which it is compared with what it may have become: two have them for one reason alone.
BEGINNING: Final = 300
_LETTERS: Final = 60  # of its turn, in scripts that set no spaces
#: The name of an answer with what led to it (16 bytes), whether the answer is learned, the name of all that was said
#: before that, or None for nothing, and that of its text alone, as of `_long`.
Answer = tuple[bytes, bool, bytes | None, bytes | None]
RANK_BYTES: Final = 46


def fold(text: str) -> str:
    """The form in which two texts count as the same: NFC, every run of white space one space, nothing that is not seen.

    Only keys are made of it; the text that is trained on stays as it was written.
    """
    return _folded(text)[0]


def _folded(text: str) -> tuple[str, int]:
    """A text's folded form, and how many runs without white space it has."""
    text = composed(text)
    # All white space but the space cannot be printed, so most texts are folded as they are, at a third of the cost.
    line = text.replace("\n", " ")
    if line.isprintable() and "  " not in line and line[:1] != " " and line[-1:] != " ":
        return line, line.count(" ") + (line != "")
    words = (text if text.isascii() else _UNSEEN.sub("", text)).split()
    return " ".join(words), len(words)


#: What shows nothing, joins nothing and says nothing, as soft hyphens and marks of byte order within texts.
_UNSEEN: Final = re.compile("[\u00ad\u200b\u200e\u200f\u2060\ufeff]")


def names(row: Row) -> tuple[bytes, bytes, int, bytes | None, bytes | None, list[Answer], bytes | None, int]:
    """(content key, exact name, words, input, asked, answers, answer, layout): names of 16 bytes each, how many runs
    without white space, and `_layout`.

    The key covers roles, folded text, and what messages say beside it but for ids of calls, in whichever order its keys
    are; the exact name covers all that, label, source, group and extras as they are. The input names what comes before
    the last answer, if there is one, and `asked` the roles and texts of that alone. The answers are those of
    `_answers`; none is listed of a row that is one question and its answer, whose key is the name, and of which
    `answer` is that of `_long`; of a text it is that of its first `BEGINNING` characters, if it is longer.
    """
    # Folding removes U+001E and U+001F, so the joined form can be taken apart again and no two rows share it.
    given = row.contents if row.text is None else (row.text,)
    folded = [_folded(text) for text in given]
    texts = [text for text, _ in folded]
    answers: list[Answer] = []
    answer = None
    if row.text is None:
        plain = [f"{role}\x1f{text}" for role, text in zip(row.roles, texts, strict=True)]
        said = turns = [turn.encode() for turn in plain]
        if row.beside:  # JSON text, which holds neither of these characters
            besides = map(without_ids, row.beside)
            turns = [turn + b"\x1f" + more.encode() if more else turn for turn, more in zip(said, besides, strict=True)]
        asked = _last_answer(row.roles)
        tools = b"m" if row.tools is None else f"n{_tools(row.tools)}\x1e".encode()
        state = blake2b(tools + b"\x1e".join(turns[:asked]), digest_size=KEY_BYTES)
        question = side = state.digest() if asked else None
        more = turns is not said or row.tools is not None
        if asked and more:
            side = _hash(b"m" + b"\x1e".join(said[:asked]))
        state.update(b"\x1e" + b"\x1e".join(turns[asked:]) if asked else b"\x1e".join(turns))
        key = state.digest()
        if asked and (
            more
            or asked + 1 < len(plain)
            or "assistant" in row.roles[:asked]
            or "system" in row.roles
            or _THOUGHT in plain[asked]
        ):
            answers = _answers(row, plain, said)
        elif asked:
            answer = _long(plain[asked], said[asked])
    else:
        key, question, side = _hash(f"t{texts[0]}".encode()), None, None
        answer = b"\0" + _hash(texts[0][:BEGINNING].encode())[:7] if len(texts[0]) > BEGINNING else None
    parts = (*row.roles, *row.contents, row.text, row.label, row.source, row.group)
    if row.extras is not None or row.beside:
        parts = (*parts, row.extras)
    if row.beside:
        parts = (*parts, row.tools, *row.beside)
    exact = "".join(["-" if part is None else f"{len(part)}:{part}" for part in parts])
    return (
        key,
        _hash(f"{len(row.roles)};{exact}".encode()),
        sum(words for _, words in folded),
        question,
        side,
        answers,
        answer,
        _layout(given, texts),
    )


def _long(turn: str, data: bytes) -> bytes | None:
    """The name of an answer's text, if it is so long that two have it for one reason alone (8 bytes, of which the first
    tells it from the beginning of a text)."""
    return b"\1" + _hash(data)[:7] if len(turn) >= _LETTERS or turn.count(" ") + 1 >= LONG else None


def _answers(row: Row, turns: list[str], encoded: list[bytes]) -> list[Answer]:
    """Each answer with what was said since the last but one: as much as a history has that was cut at its beginning.

    System messages, which may have the date, and thoughts, which a history leaves out, are no part of it. What an
    answer calls is.
    """
    found: list[Answer] = []
    said: list[bytes] = []
    before, past = b"", None
    for at, (role, turn, data) in enumerate(zip(row.roles, turns, encoded, strict=True)):
        if role != "assistant":
            if role != "system":
                said.append(data)
            continue
        if _THOUGHT in turn:
            turn = f"assistant\x1f{turn.rpartition(_THOUGHT)[2].strip()}"
            data = turn.encode()
        beside, text = row.beside[at] if row.beside else "", _long(turn, data)
        said.append(data + f"\x1f{calls_of(beside)}".encode() if _CALLS in beside else data)
        own = _hash(b"m" + b"\x1e".join(said))
        if before or len(said) > 1:
            name = before[:8] + own[8:] if before else own
            found.append((name, UNLEARNED not in beside, past, text))
        before, past = own, _hash((past or b"") + own)
        said.clear()
    return found


#: What ends a thought in the text of an answer.
_THOUGHT: Final = "</think>"
#: What a message has beside it whose text is not learned.
UNLEARNED: Final = '"train":false'
_CALLS: Final = '"tool_calls"'


def _tools(text: str) -> str:
    return _tools_of_many(text) if len(text) < _OFTEN else in_one_order(text)


#: Most conversations have the tools that others had before.
_tools_of_many: Final = lru_cache(maxsize=64)(in_one_order)
_OFTEN: Final = 1 << 14  # characters of tools that are kept


def _last_answer(roles: tuple[str, ...]) -> int:
    """Where the last answer stands, 0 for none."""
    if roles[-1] == "assistant":  # as most end
        return len(roles) - 1
    return len(roles) - 1 - roles[::-1].index("assistant") if "assistant" in roles else 0


def _layout(texts: Sequence[str], folded: Sequence[str]) -> int:
    """How texts lie in lines and blanks as a number (64 bits, signed), 0 for those that lie as keys have them.

    Two rows with one key and two layouts say the same words, and may be two programs. Blanks at the ends of lines and
    texts are none of it, nor how a line ends.
    """
    for text, plain in zip(texts, folded, strict=True):
        if text is not plain and text != plain:  # which most are
            laid = list(map(_laid, texts, folded))
            return int.from_bytes(_hash("\x1e".join(laid).encode())[:8], "big", signed=True) if any(laid) else 0
    return 0


def _laid(text: str, plain: str) -> str:
    """A text as it lies; nothing of one that its folded form is but for its ends."""
    if text == plain:
        return ""
    if not text.isascii():
        text = _UNSEEN.sub("", composed(text))
    text = text.rstrip().lstrip("\r\n")
    if " \n" in text or "\r" in text or "\t\n" in text or not text.isascii():
        text = "\n".join(map(str.rstrip, text.splitlines()))
    return "" if text == plain else text


def labelled(key: bytes, label: str | None) -> bytes:
    """The content key of a row whose label is part of what it says (16 bytes)."""
    return _hash(b"l" + key + (label or "").encode())


def rank(exact: bytes, unit: bytes, file: int, position: int, priority: int = 0) -> bytes:
    """The order among rows of one key, unique per input row (46 bytes): the smallest survives.

    :param unit: what two rows may differ in that are the same to the byte, where masks hide their groups.
    """
    return priority.to_bytes(2, "big") + exact + unit + file.to_bytes(4, "big") + position.to_bytes(8, "big")


def exact_name(rank: bytes) -> bytes:
    """The exact name that a rank holds (16 bytes)."""
    return rank[2 : 2 + KEY_BYTES]


def kind(label: str | None) -> int:
    """A label as a number (64 bits, signed)."""
    return int.from_bytes(_hash(b"k" + (label or "").encode())[:8], "big", signed=True)


def unit(group: str | None, key: bytes, salt: bytes) -> bytes:
    """What must not be torn apart by the split, as a salted and therefore uniform name (16 bytes).

    :param group: of the row, as it was before any mask. :param key: of what is asked, for rows without a group.
    """
    name = b"k" + key if group is None else b"g" + group.encode()
    return blake2b(name, digest_size=KEY_BYTES, key=salt).digest()


def document(group: str | None) -> bytes:
    """The name of a group without any salt (16 bytes); nothing for none."""
    return b"" if group is None else _hash(b"g" + group.encode())


def salt_bytes(salt: str) -> bytes:
    """The recipe's salt as a key for blake2b."""
    return _hash(salt.encode())


def _hash(data: bytes) -> bytes:
    return blake2b(data, digest_size=KEY_BYTES).digest()
