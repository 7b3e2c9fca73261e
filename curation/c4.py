"""The rules of C4: lines that go, and rows that go.

Raffel et al., Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer, JMLR 21, 2020, section
2.2 (https://jmlr.org/papers/v21/20-074.html), with what their published code does beyond it: lines on cookies and terms
of use, words of more than 1,000 characters, and citation marks go too. Left out are the list of bad words and
the removal of sentences that other rows have too. Punctuation of other scripts ends sentences as well.

Unlike there, empty lines between lines that stay do not go, and a text that loses nothing stays as it was.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Final, NamedTuple

POLICIES: Final = (
    "terms of use",
    "privacy policy",
    "cookie policy",
    "uses cookies",
    "use of cookies",
    "use cookies",
)

_ENDS: Final = (".", "?", "!", '"', "”", "。", "？", "！", "．", "।", "۔", "؟", "」", "』")
_ELLIPSES: Final = ("...", "…")
_CITATION: Final = re.compile(r"\[\d*\]|\[edit\]|\[citation needed\]")
# A sentence's end: a mark and what closes quotes and brackets, with a space or nothing behind; or a mark of a script
# that puts no spaces between sentences.
_SENTENCE: Final = re.compile(r"""[.?!؟।۔]["'”’)\]]{0,4}(?=\s|$)|[。？！．]""")


@dataclass(frozen=True)
class C4:
    """Which rules are on. Those from `terminal_punctuation` to `citations` change the text, the others end the row.

    :param min_words: of a line. :param max_word_characters: a line with a longer word goes.
    :param policies: whether lines on cookies and terms of use go. :param citations: whether marks like `[1]` go.
    :param min_sentences: of a row, in the lines that stay.
    """

    terminal_punctuation: bool = True
    min_words: int | None = 3
    max_word_characters: int | None = 1000
    javascript: bool = True
    policies: bool = True
    citations: bool = True
    lorem_ipsum: bool = True
    curly_bracket: bool = True
    min_sentences: int | None = 5


class Cleaned(NamedTuple):
    """A text without the lines that went.

    :param counts: lines removed by rule, and citation marks. :param sentences: in the lines that stayed.
    """

    text: str
    counts: Counter[str]
    sentences: int


def clean_lines(text: str, rules: C4) -> Cleaned:
    """Apply the rules on lines to a text."""
    counts: Counter[str] = Counter()
    kept: list[str] = []
    sentences = 0
    gap = False  # whether lines went since the last one that stayed
    for line in text.split("\n"):
        bare = line.strip()
        if not bare:
            if not gap or (kept and kept[-1].strip()):
                kept.append(line)
            continue
        if rules.citations and "[" in line:
            line, marks = _CITATION.subn("", line)
            counts["c4_citations"] += marks
            bare = line.strip() if marks else bare
        reason = _line(bare, rules)
        if reason:
            counts[f"c4_lines_{reason}"] += 1
            gap = True
            continue
        kept.append(line)
        gap = False
        sentences += max(1, len(_SENTENCE.findall(bare)))
    counts = +counts
    if not counts:
        return Cleaned(text, counts, sentences)
    return Cleaned("\n".join(kept).strip("\n"), counts, sentences)


def _line(line: str, rules: C4) -> str:
    """Why a line goes, or nothing."""
    words = line.split()
    if rules.max_word_characters is not None and max(map(len, words), default=0) > rules.max_word_characters:
        return "long_word"
    if rules.terminal_punctuation and (not line.endswith(_ENDS) or line.endswith(_ELLIPSES)):
        return "no_terminal_punctuation"
    if rules.min_words is not None and len(words) < rules.min_words:
        return "few_words"
    lower = line.lower()
    if rules.javascript and "javascript" in lower:
        return "javascript"
    if rules.policies and any(phrase in lower for phrase in POLICIES):
        return "policies"
    return ""


def row_reason(texts: list[str], cleaned: list[Cleaned], rules: C4) -> tuple[str, str]:
    """(code, detail) of the first rule that ends a row, or two empty texts.

    :param texts: as they were. :param cleaned: what their lines became.
    """
    if rules.lorem_ipsum and any("lorem ipsum" in text.lower() for text in texts):
        return "c4_lorem_ipsum", "it says lorem ipsum"
    if rules.curly_bracket and any("{" in text for text in texts):
        return "c4_curly_bracket", "it holds a curly bracket"
    # A text may come empty, as of an answer that only calls a tool.
    if any(text.strip() and not item.text.strip() for text, item in zip(texts, cleaned, strict=True)):
        return "c4_no_lines", f"no line is left of {'one of its texts' if len(texts) > 1 else 'the text'}"
    sentences = sum(item.sentences for item in cleaned)
    if rules.min_sentences is not None and sentences < rules.min_sentences:
        return "c4_few_sentences", f"{sentences} sentences, at least {rules.min_sentences}"
    return "", ""
