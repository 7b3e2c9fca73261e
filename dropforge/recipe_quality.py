"""The recipe's sections on which rows are good enough: Gopher's and C4's rules, and languages."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dropforge.section import Section

Share = Annotated[float, Field(ge=0, le=1)]
Number = Annotated[int, Field(ge=0, le=1_000_000_000)]


class Gopher(Section):
    """Gopher's rules on quality (Rae et al. 2021, appendix A.1, https://arxiv.org/abs/2112.11446); null turns a rule
    off."""

    min_words: Number | None = 50
    """A row with fewer words is removed."""
    max_words: Number | None = 100_000
    """A row with more words is removed."""
    min_mean_word_length: Annotated[float, Field(ge=0, le=1000)] | None = 3.0
    """Characters; words of scripts without spaces do not count."""
    max_mean_word_length: Annotated[float, Field(ge=0, le=1000)] | None = 10.0
    """Characters."""
    max_hashes: Annotated[float, Field(ge=0, le=1000)] | None = 0.1
    """`#` per word."""
    max_ellipses: Annotated[float, Field(ge=0, le=1000)] | None = 0.1
    """`...` and `…` per word."""
    max_bullet_lines: Share | None = 0.9
    """Share of the lines that begin with a bullet."""
    max_ellipsis_lines: Share | None = 0.3
    """Share of the lines that end with an ellipsis."""
    min_alphabetic_words: Share | None = 0.8
    """Share of the words with at least one letter."""
    min_stop_words: Number | None = 2
    """Number of different words of `stop_words` that must occur."""
    stop_words: Annotated[
        tuple[Annotated[str, Field(pattern=r"^\S{1,64}$")], ...], Field(strict=False, max_length=1000)
    ] = ("the", "be", "to", "of", "and", "that", "have", "with")
    """Words that any prose in the data's language has."""


class GopherRepetition(Section):
    """Gopher's rules on repetition (table A1 there): shares of lines, paragraphs or characters. null turns one off."""

    max_duplicate_lines: Share | None = 0.3
    """Share of the lines that repeat another."""
    max_duplicate_paragraphs: Share | None = 0.3
    """Share of the paragraphs that repeat another."""
    max_duplicate_line_characters: Share | None = 0.2
    """Share of the characters in lines that repeat another."""
    max_duplicate_paragraph_characters: Share | None = 0.2
    """Share of the characters in paragraphs that repeat another."""
    max_top_2_gram: Share | None = 0.2
    """Share of the characters in the most frequent run of two words."""
    max_top_3_gram: Share | None = 0.18
    """The same of three words."""
    max_top_4_gram: Share | None = 0.16
    """The same of four words."""
    max_duplicate_5_gram: Share | None = 0.15
    """Share of the characters in runs of five words that repeat another."""
    max_duplicate_6_gram: Share | None = 0.14
    """The same of six words."""
    max_duplicate_7_gram: Share | None = 0.13
    """The same of seven words."""
    max_duplicate_8_gram: Share | None = 0.12
    """The same of eight words."""
    max_duplicate_9_gram: Share | None = 0.11
    """The same of nine words."""
    max_duplicate_10_gram: Share | None = 0.10
    """The same of ten words."""


class C4(Section):
    """C4's rules (Raffel et al. 2020, section 2.2, https://jmlr.org/papers/v21/20-074.html). Those on lines change the
    text: a line that breaks one is removed, and the row stays."""

    terminal_punctuation: bool = True
    """On lines: one that ends with no full stop, question mark, exclamation mark or quotation mark is removed."""
    min_words: Number | None = 3
    """On lines: one with fewer words is removed; null turns it off."""
    max_word_characters: Number | None = 1000
    """On lines: one with a longer word is removed; null turns it off."""
    javascript: bool = True
    """On lines: one that contains Javascript is removed."""
    policies: bool = True
    """On lines: one on cookies, privacy policies or terms of use is removed."""
    citations: bool = True
    """On lines: marks like `[1]` and `[citation needed]` are removed."""
    lorem_ipsum: bool = True
    """A row that contains lorem ipsum is removed."""
    curly_bracket: bool = True
    """A row with a curly bracket is removed; so is most code."""
    min_sentences: Number | None = 5
    """A row with fewer sentences in the lines that stay is removed; null turns it off."""


class Quality(Section):
    """Which rows are good enough. `{}` takes a section's published thresholds; a section that is not named is off."""

    gopher: Gopher | None = None
    """Gopher's rules on quality."""
    gopher_repetition: GopherRepetition | None = None
    """Gopher's rules on repetition."""
    c4: C4 | None = None
    """C4's rules."""
    of: Literal["answers", "all"] = "answers"
    """What a conversation is judged by: the assistant's messages, or all. A text is judged as a whole."""


class Language(Section):
    """Which languages are kept."""

    keep: Annotated[tuple[Annotated[str, Field(pattern=r"^[a-z]{2,3}$")], ...], Field(strict=False, min_length=1)]
    """Codes as `[en, de]` (ISO 639)."""
    min_letters: int = Field(default=20, ge=1, le=1000)
    """A text with fewer letters is too short for its language to be detected."""
    unknown: Literal["keep", "drop"] = "keep"
    """What happens to rows that are too short for that."""
    of: Literal["answers", "all"] = "all"
    """What a conversation is judged by: the assistant's messages, or all but the system's."""
