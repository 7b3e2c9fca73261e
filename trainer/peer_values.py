"""Values that ranks tell each other: plain ones, our own records, and errors. Nothing that a peer sends runs code.

Ranks meet without a login, and on one machine each of its users reaches their port: who joins in place of a rank may
spoil a training, and may do no more. So what comes is unpickled by names of a list, where torch's own collectives of
objects (`all_gather_object` and others) run whatever a pickle says.
"""

from __future__ import annotations

import dataclasses
import enum
import io
import pickle
import sys
from typing import Any, Final

import torch
import torch.distributed as dist

_OURS: Final = ("trainer.", "dropforge.")


class StrangeValueError(Exception):
    """A value that no rank of ours sends."""


def gather_values(value: Any, group: Any = None, device: torch.device | str = "cpu") -> list[Any]:
    """Everybody's value, by rank; a collective.

    :param value: of numbers, texts, bytes, lists, tuples, dicts and sets; of our own dataclasses, named tuples and
        enums; of our errors and Python's own.
    :param group: of the ranks; None for all. :param device: of tensors that the group carries.
    :raises StrangeValueError: for anything else that a peer sends.
    """
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
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
        return _Reader(io.BytesIO(data)).load()
    except StrangeValueError:
        raise
    except Exception as error:  # of a torn pickle there are many kinds
        raise StrangeValueError(f"a peer sent what is no value of ours ({error!r:.200})") from error


class _Reader(pickle.Unpickler):
    """Reads plain values, and classes of ours that hold nothing else; no function is found by its name."""

    def find_class(self, module: str, name: str) -> Any:
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
