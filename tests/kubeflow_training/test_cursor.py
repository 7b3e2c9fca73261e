"""Which lines of a pod's log are new, whatever the API repeats or leaves out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kubeflow_training.jobs.kubernetes.cursor import Cursor, Lines, instant, nanoseconds

SECOND = 10**9
BASE = 1767225600 * SECOND


def log(stamps):
    """Raw lines of the API, each with its number as its text."""
    return [f"{instant(BASE + stamp)} {number}" for number, stamp in enumerate(stamps)]


def since(lines, cursor):
    """What the API gives from the cursor's second on."""
    if cursor.since is None:
        return lines
    return [line for line in lines if nanoseconds(line.split(" ")[0]) >= nanoseconds(cursor.since)]


def fresh(cursor):
    return Cursor(cursor.at, cursor.seen)


@given(
    st.lists(st.integers(0, 5 * SECOND // 10**8).map(lambda n: n * 10**8), max_size=60).map(sorted),
    st.lists(st.integers(0, 60), max_size=5),
)
def test_however_often_the_reading_breaks_each_line_comes_once(stamps, breaks):
    lines, cursor, got = log(stamps), Cursor(), []
    for count in [*breaks, len(lines)]:
        cursor = fresh(cursor)
        for line in since(lines, cursor)[:count] if count < len(lines) else since(lines, cursor):
            batch = cursor.take([line])
            assert batch.gap is None
            got += batch.lines
        if cursor.looking:
            # Broken before the anchor came back: the next reading begins where this one did.
            continue
    assert got == [str(number) for number in range(len(lines))]


def test_stamps_that_run_backwards_between_stdout_and_stderr_lose_nothing():
    lines = log([10 * SECOND, 10 * SECOND + 500, 10 * SECOND + 400, 10 * SECOND + 600])
    for count in range(1, 5):
        cursor = Cursor()
        first = cursor.take(lines[:count]).lines
        cursor = fresh(cursor)
        rest = cursor.take(since(lines, cursor))
        assert (first + rest.lines, rest.gap) == (["0", "1", "2", "3"], None)


def test_an_anchor_that_does_not_come_back_is_a_gap():
    cursor = Cursor(BASE + 7, 2)
    # Held back for a second: a line with the anchor's stamp might still come.
    assert cursor.take(log([8, 9])).lines == []
    batch = cursor.take(log([3 * SECOND]))
    assert batch.gap == (BASE + 7, BASE + 8)
    assert batch.lines == ["0", "1", "0"]
    assert cursor.at == BASE + 3 * SECOND


def test_an_anchor_that_has_not_come_back_when_the_reading_ends_is_a_gap_only_if_lines_came():
    cursor = Cursor(BASE + 7, 1)
    assert cursor.end().gap is None
    cursor.take(log([8]))
    batch = cursor.end()
    assert (batch.gap, batch.lines) == ((BASE + 7, BASE + 8), ["0"])


def test_an_anchor_of_which_too_few_came_back_is_looked_for_on():
    cursor = Cursor(BASE + 7, 3)
    assert cursor.take(log([7, 7])).lines == []
    assert cursor.take(log([7])).lines == []
    assert cursor.take(log([7])).lines == ["0"]


@pytest.mark.parametrize("line", ["", "unable to retrieve container logs", "2026-13-01T00:00:00Z x"])
def test_a_line_without_a_stamp_is_told_where_it_stands(line):
    cursor = Cursor()
    cursor.take(log([5]))
    assert cursor.take([line]).lines == [line]
    assert (cursor.at, cursor.seen) == (BASE + 5, 1)
    # The API does not say it again: what comes after the last line of a rank is found without it.
    cursor.begin()
    again = cursor.take([*log([5]), *log([7])])
    assert (len(again.lines), again.gap) == (1, None)


@pytest.mark.parametrize("size", [1, 7, 64, 4096])
def test_a_line_that_is_too_long_is_cut_the_same_way_at_every_reading(size):
    text = b"2026-01-01T00:00:00.5Z " + b"abc" * 500 + b"\n2026-01-01T00:00:00.7Z end\n"

    def read(blocks):
        lines = Lines(200)
        return [piece for at in range(0, len(text), blocks) for piece in lines.take(text[at : at + blocks])]

    pieces = read(size)
    assert pieces == read(len(text))
    assert max(map(len, pieces)) <= 200
    shown, cursor = Cursor(), Cursor()
    assert "".join(shown.take(pieces).lines) == "abc" * 500 + "end"
    cursor.take(pieces[:3])
    cursor.begin()
    rest = cursor.take(pieces)
    assert len(rest.lines) == len(pieces) - 3
    assert rest.gap is None


def test_time_stamps_with_every_number_of_digits():
    assert nanoseconds("2026-01-01T00:00:00Z") == BASE
    for digits in range(1, 10):
        assert nanoseconds(f"2026-01-01T00:00:00.{'123456789'[:digits]}Z") == BASE + int(
            "123456789"[:digits].ljust(9, "0")
        )
    assert nanoseconds("2026-01-01T02:00:00.5+02:00") == BASE + 500_000_000
    assert nanoseconds("2026-01-01T02:00:00+02:00") == BASE
    for wrong in (
        "not a stamp",
        "2026-13-01T00:00:00Z",
        "2026-01-01T00:00:00.Z",
        "2026-01-01T00:00:00.1234567890Z",
        "",
    ):
        assert nanoseconds(wrong) is None
    assert nanoseconds(instant(BASE + 1)) == BASE + 1
