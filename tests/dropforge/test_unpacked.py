"""Lines of packed texts, whole ones and those that were made to harm who reads them."""

from __future__ import annotations

import gzip
import io
import zlib

import pytest

from dropforge.unpacked import LongTextError, NoTextError, lines


@pytest.mark.parametrize(
    "text",
    [b"", b"a", b"a\n", b"\n", b"a\n\nb", b"x" * 200_000 + b"\ny\n", b"".join(b"%d\n" % n for n in range(50_000))],
)
def test_lines_are_those_of_the_text(text: bytes) -> None:
    wanted = text.removesuffix(b"\n").split(b"\n") if text.strip(b"\n") else [b""] * text.count(b"\n")
    assert list(lines(io.BytesIO(gzip.compress(text)), 1 << 24)) == wanted
    both = gzip.compress(text[:7]) + gzip.compress(text[7:])  # one text for every reader of gzip
    assert list(lines(io.BytesIO(both), 1 << 24)) == wanted


def test_a_text_of_just_the_bound_is_whole() -> None:
    assert list(lines(io.BytesIO(gzip.compress(b"ab\nc")), 4)) == [b"ab", b"c"]
    found = lines(io.BytesIO(gzip.compress(b"ab\ncd")), 4)
    assert [next(found), next(found)] == [b"ab", b"c"]
    with pytest.raises(LongTextError):
        next(found)


def test_a_bomb_and_a_long_file_of_nothing_end_at_the_bound() -> None:
    class Counted(io.BytesIO):
        asked = 0

        def read(self, size: int | None = -1, /) -> bytes:
            self.asked += size or 0
            return super().read(size)

    bomb = Counted(gzip.compress(bytes(64 << 20)))
    with pytest.raises(LongTextError):
        list(lines(bomb, 1 << 20))
    empty = zlib.compressobj(wbits=31)
    nothing = Counted(b"".join([empty.flush(zlib.Z_FULL_FLUSH) for _ in range(3)]) + b"\0\0\0\xff\xff" * 2_000_000)
    with pytest.raises((LongTextError, NoTextError)):
        list(lines(nothing, 1 << 20))
    assert nothing.asked < 2 << 20


@pytest.mark.parametrize(
    "data", [b"\0" * 1000, b"", gzip.compress(b"a\nb" * 1000, mtime=0)[:-9]], ids=["zeros", "empty", "torn"]
)
def test_what_is_broken_is_told_behind_what_there_is(data: bytes) -> None:
    found = lines(io.BytesIO(data), 1 << 20)
    if data[:1] == b"\x1f":
        assert next(found) == b"a"
    with pytest.raises(NoTextError):
        list(found)
