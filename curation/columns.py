"""Arrow arrays from Python lists and NumPy arrays without `pyarrow.array` and `to_numpy`.

Those import pandas where it is installed, which costs more time than curating a small drop.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import pyarrow as pa


def integers(values: Sequence[int]) -> pa.Array:
    """int64 without nulls."""
    return pa.Array.from_buffers(pa.int64(), len(values), [None, pa.py_buffer(array("q", values))])


def numbers(array: pa.Array) -> npt.NDArray[np.int64]:
    """int64 without nulls as NumPy sees it; `to_numpy` imports pandas too."""
    data = array.buffers()[1]
    return np.frombuffer(data, np.int64, len(array), array.offset * 8) if len(array) else np.empty(0, np.int64)


def from_numbers(values: npt.NDArray[np.int64]) -> pa.Array:
    """int64 without nulls."""
    return pa.Array.from_buffers(pa.int64(), values.size, [None, pa.py_buffer(np.ascontiguousarray(values))])


def offsets(values: Sequence[int]) -> pa.Array:
    """int32 without nulls."""
    return pa.Array.from_buffers(pa.int32(), len(values), [None, pa.py_buffer(array("i", values))])


def booleans(values: Sequence[bool]) -> pa.Array:
    return pa.Array.from_buffers(pa.bool_(), len(values), [None, _bits(values)])


def binaries(values: Sequence[bytes | None]) -> pa.Array:
    """Binary, None for null."""
    present = None if None not in values else [value is not None for value in values]
    return _variable(pa.binary(), [value or b"" for value in values], present)


def strings(values: Sequence[str | None]) -> pa.Array:
    """UTF-8 text, None for null. :raises UnicodeEncodeError: for a lone surrogate."""
    present = None if None not in values else [value is not None for value in values]
    return _variable(pa.string(), [b"" if value is None else value.encode() for value in values], present)


def _variable(kind: pa.DataType, values: Sequence[bytes], present: Sequence[bool] | None) -> pa.Array:
    ends = array("i", accumulate(map(len, values), initial=0))
    buffers = [None if present is None else _bits(present), pa.py_buffer(ends), pa.py_buffer(b"".join(values))]
    return pa.Array.from_buffers(kind, len(values), buffers)


def _bits(values: Sequence[bool]) -> pa.Buffer:
    return pa.py_buffer(np.packbits(np.fromiter(values, np.bool_, len(values)), bitorder="little"))
