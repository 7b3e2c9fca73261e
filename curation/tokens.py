"""Strings that a chat template reads as control tokens, made harmless in people's text.

A row that contains `<|im_end|>` could end its own message and speak as somebody else once it is tokenised. One space
behind the first character keeps such text readable and makes it ordinary; how many rows were touched is on the card.
"""

from __future__ import annotations

import re
from typing import Final

#: By their first characters, each of which is looked for by itself: in a class of characters that takes much longer.
_CONTROL: Final = {
    "<": re.compile(
        r"<(?=\|[^\s<>|]{1,64}\|>"  # <|im_end|>, <|eot_id|>, <|endoftext|> and their kind
        r"|｜[^<>\n]{1,64}｜>"  # DeepSeek's, with full-width bars
        r"|/?(?:s|bos|eos|pad|unk|mask)>"
        r"|\|turn>|turn\|>"  # Gemma 4's
        r"|seed:[a-z_:]{1,32}>"  # Seed-OSS's
        r"|(?:start|end)_of_(?:turn|image|role)>"
        r"|\|?(?:start|end)_of_(?:text|role)\|?>"
        r"|</?SYS>>"
        r"|(?:extra|reserved|unused)_?[a-z_]*\d+>"
        r"|0x[0-9A-F]{2}>)"  # byte-level tokens of SentencePiece
    ),
    "[": re.compile(
        r"\[(?=\|(?:system|user|assistant|tool|endofturn)\|\]"  # EXAONE's
        r"|/?(?:INST|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS|SYSTEM_PROMPT|TOOL_CONTENT|IMG|PREFIX|SUFFIX|MIDDLE)\]"
        r"|e~\[)"  # MiniMax's, as those below
    ),
    "]": re.compile(r"\](?=~b\]|~!b\[|![pd]~\[|<\][a-z ]{1,32}\[>\[)"),
}
# Bidirectional overrides, tag characters that nobody sees, and variation selectors, of which one follows a character of
# Japanese and a row of them hides a text, a byte in each.
_OFTEN_INVISIBLE: Final = re.compile("[\u202a-\u202e\u2066-\u2069\U000e0000-\U000e007f\U000e0100-\U000e01ef]")
_INVISIBLE: Final = re.compile("[\u202a-\u202e\u2066-\u2069\U000e0000-\U000e007f]|[\U000e0100-\U000e01ef]{4}")


def neutralise(text: str) -> tuple[str, int]:
    """The text with every control token's first character followed by a space, and how many there were."""
    found = 0
    for first, control in _CONTROL.items():
        if first in text:
            text, count = control.subn(_parted, text)
            found += count
    return text, found


def _parted(match: re.Match[str]) -> str:
    return match.group() + " "


def blank(text: str) -> bool:
    """Whether a text shows nothing: it is empty, or of white space and characters that nobody sees, as editors and chat
    programs write them for an empty paragraph or message (U+200B, U+FEFF, U+3164, U+2800)."""
    first = text[:1]
    return not "!" <= first <= "~" and _BLANK.fullmatch(text) is not None


_BLANK: Final = re.compile(
    "[\\s\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u2800\u3164"
    "\ufe00-\ufe0f\ufeff\uffa0\ufffc\U000e0000-\U000e01ef]*"
)


def invisible(text: str) -> bool:
    """Does the text hold characters that change what a person sees? Such rows are kept and counted."""
    if text.isascii() or _OFTEN_INVISIBLE.search(text) is None:  # quick where there is none
        return False
    return _INVISIBLE.search(text) is not None
