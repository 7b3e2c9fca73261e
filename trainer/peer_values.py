"""Values that ranks tell each other: plain ones, our own records, and errors. Nothing that a peer sends runs code.

Ranks meet without a login, and on one machine each of its users reaches their port: who joins in place of a rank may
spoil a training, and may do no more. So what is sent are lists of plain values, with names for what they stand for,
where torch's own collectives of objects (`all_gather_object` and others) run whatever a pickle says. No class is in the
pickle, which could set its attributes too.
"""

from __future__ import annotations

import dataclasses
import enum
import io
import pickle
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch
import torch.distributed as dist

_OURS: Final = ("trainer.", "dropforge.")
_SCALARS: Final = frozenset({type(None), bool, int, float, str, bytes})
_MAKERS: Final[Mapping[str, Callable[[Iterable[Any]], Any]]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}
_REFUSED: Final = "refused"
_SEQUENCES: Final = frozenset({list, tuple, set, frozenset})


class StrangeValueError(Exception):
    """A value that no rank of ours sends."""


def gather_values(value: Any, group: Any = None, device: torch.device | str = "cpu") -> list[Any]:
    """Everybody's value, by rank; a collective.

    :param value: of numbers, texts, bytes, lists, tuples, dicts and sets; of our own dataclasses, named tuples and
        enums; of our errors and Python's own.
    :param group: of the ranks; None for all. :param device: of tensors that the group carries.
    :raises StrangeValueError: for anything else that a peer sends.
    """
    try:
        plain = _to_plain(value)
    except TypeError as error:  # the others wait for something
        plain = [_REFUSED, str(error)]
    data = torch.frombuffer(bytearray(pickle.dumps(plain)), dtype=torch.uint8)
    world = dist.get_world_size(group)
    size = torch.tensor([len(data)], dtype=torch.int64, device=device)
    sizes = [torch.zeros_like(size) for _ in range(world)]
    dist.all_gather(sizes, size, group=group)
    lengths = [int(one) for one in sizes]
    mine = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    mine[: len(data)] = data.to(device)
    parts = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(parts, mine, group=group)
    return [_loads(part[:length].cpu().numpy().tobytes()) for part, length in zip(parts, lengths, strict=True)]


def _loads(data: bytes) -> Any:
    try:
        return _from_plain(_Reader(io.BytesIO(data)).load())
    except StrangeValueError:
        raise
    except Exception as error:  # of a torn pickle there are many kinds
        raise StrangeValueError(f"a peer sent what is no value of ours ({error!r:.200})") from error


class _Reader(pickle.Unpickler):
    """Reads plain values; nothing is found by its name."""

    def find_class(self, module: str, name: str) -> Any:
        raise StrangeValueError(f"a peer sent a value of {module[:80]!r} {name[:80]!r}, which no rank of ours does")


def _to_plain(value: Any) -> Any:
    """A value as scalars, and lists that begin with what they stand for. :raises TypeError: if it cannot be sent."""
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind in _SEQUENCES:
        return [kind.__name__, *map(_to_plain, value)]
    if kind is dict:
        return ["dict", *([_to_plain(key), _to_plain(inner)] for key, inner in value.items())]
    name = [kind.__module__, kind.__qualname__]
    if isinstance(value, enum.Enum):
        return ["enum", *name, value.name]
    if isinstance(value, tuple) and _is_plain(kind):
        return ["named", *name, *map(_to_plain, value)]
    if isinstance(value, Exception):
        return ["error", *name, *map(_argument, _arguments(value))]
    if dataclasses.is_dataclass(value):
        fields = (one.name for one in dataclasses.fields(value))
        return ["record", *name, *([field, _to_plain(getattr(value, field))] for field in fields)]
    raise TypeError(f"no rank is sent a {kind.__name__}")


def _arguments(error: Exception) -> tuple[Any, ...]:
    made = error.__reduce__()
    return made[1] if isinstance(made, tuple) and made[0] is type(error) else error.args


def _argument(value: Any) -> Any:
    """Of an error that others raised, which is told also where it holds more than can be sent."""
    try:
        return _to_plain(value)
    except TypeError:
        return str(value)


def _from_plain(said: Any) -> Any:
    """The value that `_to_plain` made a list of. :raises Exception: of many kinds, if it made none."""
    if type(said) in _SCALARS:
        return said
    what, *parts = said
    if what == _REFUSED:
        raise StrangeValueError(f"a peer has a value that cannot be sent: {str(parts[0])[:200]}")
    if what in _MAKERS:
        return _MAKERS[what](map(_from_plain, parts))
    if what == "dict":
        return {_from_plain(key): _from_plain(inner) for key, inner in parts}
    kind, values = _class(parts[0], parts[1]), parts[2:]
    if what == "enum" and issubclass(kind, enum.Enum):
        return kind.__members__[values[0]]
    if what == "named" and issubclass(kind, tuple) and len(values) == len(kind._fields):  # type: ignore[attr-defined]
        return tuple.__new__(kind, map(_from_plain, values))
    if what == "error" and issubclass(kind, Exception):
        return kind(*map(_from_plain, values))
    fields = {name: _from_plain(inner) for name, inner in values} if what == "record" else {}
    if not dataclasses.is_dataclass(kind) or [*fields] != [one.name for one in dataclasses.fields(kind)]:
        raise StrangeValueError(f"a peer sent a {kind.__name__} that is none")
    made = object.__new__(kind)  # what its constructor would do is done
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made


def _class(module: str, name: str) -> type:
    """A class of ours that holds values alone, or an error of Python's."""
    # Only of what is imported: to import a module runs it.
    found = getattr(sys.modules.get(module), name, None) if "." not in name else None
    if isinstance(found, type) and found.__module__ == module and _is_plain(found):
        return found
    raise StrangeValueError(f"a peer sent a value of {module[:80]!r} {name[:80]!r}, which no rank of ours does")


def _is_plain(kind: type) -> bool:
    """Tell whether a class is an error of Python's, or one of ours that only holds values."""
    if not kind.__module__.startswith(_OURS):
        return kind.__module__ == "builtins" and issubclass(kind, Exception)
    named = issubclass(kind, tuple) and hasattr(kind, "_fields")
    return named or dataclasses.is_dataclass(kind) or issubclass(kind, Exception | enum.Enum)
