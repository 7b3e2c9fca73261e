"""What strangers write reaches people in bounds, and steers no terminal."""

from __future__ import annotations

import io
import pickle

from rich.table import Table

from dropforge.errors import DataError
from dropforge.terminal import Console, Text
from dropforge.text import as_line, escape, shorten


def test_invisible_characters_are_spelled_out_and_letters_stay() -> None:
    assert escape("a\x1b]0;owned\x07\r\u202eb\x9b\ud800") == r"a\x1b]0;owned\x07\r\u202eb\x9b\ud800"
    plain = "Bonjour\u00a0! \u3000a\u200db\n\tGrüße, 你好, क्‍ष, one\tline\nmore"
    assert escape(plain) == plain


def test_a_long_text_keeps_both_ends_and_says_what_is_left_out() -> None:
    found = shorten("a" * 500 + "b" * 1_000_000 + "c" * 500, 300)
    assert len(found) <= 300
    assert found.startswith("a" * 100)
    assert found.endswith("c" * 50)
    assert "1,000,741 characters" in found
    assert shorten(found, 300) == found
    assert shorten("a" * 30, 12) == "a" * 8 + " [... 18 characters ...] " + "a" * 4


def test_a_word_of_a_pod_s_is_a_part_of_one_line() -> None:
    assert as_line(30) == "30"
    assert as_line("[a]\n\n# b\t\x1b[2J\ud800") == r"[a] # b \x1b[2J\ud800"
    assert max(len(as_line(text * 1_000_000)) for text in ("\n# ", "\x1b", "\U000e0041")) <= 200


def test_an_error_is_short_however_much_it_quotes() -> None:
    error = DataError("file '\x1b[2J'" * 1000, "\x00" * 10_000_000, "Upload " + "it" * 100_000)
    assert len(str(error)) < 13_000
    assert all(char.isprintable() for char in str(error))
    again = pickle.loads(pickle.dumps(error))
    assert (again.thing, again.cause, again.mend) == (error.thing, error.cause, error.mend)


def test_what_is_printed_steers_no_terminal_and_our_colours_stay() -> None:
    seen = io.StringIO()
    console = Console(file=seen, force_terminal=True, color_system="standard", width=100, highlight=False)
    table = Table("name", box=None)
    table.add_row(Text("cell\x1b[2J"))
    table.add_row(Text.assemble(("string", "red"), "\x1b[2J"))
    table.add_row("\x1b[2Jstring\x1b[2J")
    hostile = "plain\x1b]0;owned\x07\x9b\r\u202e"
    for printed in (hostile, Text(hostile, "red"), table, {"key\x1b": hostile}, f"[bold]{hostile}[/bold]"):
        console.print(printed)
    with console.status(hostile):
        pass
    shown = seen.getvalue()
    for sequence in ("\x1b]", "\x1b[2J", "\x07", "\x9b", "\u202e", "plain\r"):
        assert sequence not in shown, sequence
    assert shown.count(r"plain\x1b]0;owned\x07\x9b\r\u202e") >= 3
    assert r"cell\x1b[2J" in shown
    assert r"string\x1b[2J" in shown
    assert "\x1b[31mplain" in shown
