"""Text that is not UTF-8, as UTF-8: told by its bytes, or by the recipe, and never guessed.

UTF-16 and UTF-32 show themselves, so a whole file is read as one of them. Encodings of one byte a character do not:
nearly all bytes mean something in each of them. They are read where the recipe names one (`data.encoding`), line by
line, and only where a line is not UTF-8, so neither the cut into splits nor a mixed file changes what a row is.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator

from curation.reasons import Reason
from curation.records import Fault, Line
from curation.streams import TornError


def narrowed(pieces: Iterator[bytes], codec: str) -> Iterator[bytes]:
    """A stream of UTF-16 or UTF-32 as UTF-8.

    Half of a surrogate pair becomes bytes that are no UTF-8, so that its row ends alone.

    :raises TornError: where the stream ends within a character, or has one beyond Unicode.
    """
    decoder = codecs.getincrementaldecoder(codec)("surrogatepass")
    try:
        for piece in pieces:
            yield decoder.decode(piece).encode("utf-8", "surrogatepass")
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise TornError(Reason.TORN_FILE, f"the {codec.upper()} text breaks off: {error.reason}") from None


class Fallback:
    """Lines that are not UTF-8, read as the encoding that the recipe names.

    :param codec: a superset of ASCII with one byte for a character.
    """

    def __init__(self, codec: str) -> None:
        self.codec = codec
        self.lines = 0

    def over(self, found: Iterator[Line | Fault]) -> Iterator[Line | Fault]:
        """The lines as UTF-8, at the places that they have. What cannot be read stays as it is."""
        for item in found:
            if isinstance(item, Fault) or item.data.isascii() or (text := self._text(item.data)) is None:
                yield item
            else:
                self.lines += 1
                yield item._replace(data=text.encode())

    def _text(self, data: bytes) -> str | None:
        try:
            data.decode()
        except UnicodeDecodeError:
            pass
        else:
            return None
        # UTF-8 beside other bytes: whichever of both it were read as, the other would be garbled.
        if not data.decode("utf-8", "ignore").isascii():
            return None
        try:
            text = data.decode(self.codec)
        except UnicodeDecodeError:
            return None
        # Of ISO 8859, 0x80 to 0x9F are control characters that no text has; it is Windows' then, or another one.
        return None if any("\x80" <= char <= "\x9f" for char in text) else text
