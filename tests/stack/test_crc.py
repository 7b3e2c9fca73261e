"""The checksums that the standard library lacks, against a reference bit by bit."""

from __future__ import annotations

import base64
import random

import pytest

from dropforge.stack.bodies import Checksum
from tests.stack.clients.checksums import checksum


@pytest.mark.parametrize(("kind", "check"), [("CRC32C", "e3069283"), ("CRC64NVME", "ae8b14860a799888")])
def test_sums_of_any_length_and_in_any_pieces(kind: str, check: str) -> None:
    known = Checksum(kind.lower())
    known.update(b"123456789")
    assert known.digest().hex() == check
    chosen = random.Random(7)
    data = chosen.randbytes(9000)
    for size in (0, 1, 3, 4, 7, 8, 9, 63, 64, 65, 127, 128, 129, 4096, 9000):
        summed, at = Checksum(kind.lower()), 0
        while at < size:
            step = chosen.choice([1, 2, 5, 8, 64, 1000, size])
            summed.update(data[at : min(at + step, size)])
            at += step
        assert base64.b64encode(summed.digest()).decode() == checksum(kind, data[:size]), size
