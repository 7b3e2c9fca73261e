"""The weights of a base model's files, read one by one or by their slices: nobody needs room for all of them.

The library's own rules say which weight of the model comes from which of the files' tensors, so that a weight that it
makes of several, as the stacked experts of a mixture, is read as it reads it.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

_ONE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
_LOOKS: Final = 256  # places of a file that ranks compare
_LOOK: Final = 4096  # bytes at each of them
_HEADER: Final = 100_000_000  # bytes that safetensors lets a header have


class UnsliceableError(Exception):
    """The files do not give each weight of the model by itself; the text says why."""


@dataclass(frozen=True)
class _Origin:
    """Where a weight comes from. :param keys: of the files, each with the pattern that it matched.

    :param made: the library's way to make weights of several tensors; None where the weight is one tensor.
    """

    keys: tuple[tuple[str, str], ...]
    made: Any = None
    first: str = ""


class Slices:
    """The weights of a model by its own names.

    :param folder: with safetensors. :param model: made of the folder's config, on any device.
    :raises UnsliceableError: if a weight is not there, or in another shape.
    """

    def __init__(self, folder: str | Path, model: Any) -> None:
        self.folder = Path(folder)
        self._files = _files(self.folder)
        self._model = model
        try:
            self._origins, model._weight_conversions = self._find()
        except (ImportError, TypeError, AttributeError, KeyError, ValueError, RuntimeError) as error:
            raise UnsliceableError(f"this release of transformers does not say how ({error})") from error
        self.names: dict[str, str] = {}  # of weights as the model has them now, the name that it was made with
        self.sums: dict[str, int] = {}  # of the weights as the first rank read them, by the names of now
        self._match()

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Rows of a weight, all of them if `stop` is not given; fp32, in memory of its own."""
        origin = self._origins[self.names.get(name, name)]
        if origin.made is None:
            [(key, _)] = origin.keys
            return self._tensor(key, start, stop)
        whole = self._make(origin, lambda key: self._tensor(key))[self.names.get(name, name)]
        return whole[start:stop].clone()

    def __contains__(self, name: str) -> bool:
        return name in self._origins

    def rename(self, kept: Mapping[int, str], model: Any) -> None:
        """Follow weights that have other names by now. :param kept: names by the weights' `id`, see `identities`."""
        self.names = {name: kept[id(weight)] for name, weight in model.named_parameters() if id(weight) in kept}

    def identities(self) -> dict[int, str]:
        """The name of each weight by its `id`."""
        return {id(weight): self.names[name] for name, weight in self._model.named_parameters()}

    def digest(self) -> str:
        """A look at the files, the same wherever they are: sizes, headers, and some of the bytes between."""
        state = hashlib.sha256()
        for path in sorted(set(self._files.values())):
            size = path.stat().st_size
            state.update(f"{path.name} {size} ".encode())
            with path.open("rb") as stream:
                state.update(stream.read(8 + min(_HEADER, int.from_bytes(stream.read(8), "little"))))
                for place in range(0, size, max(_LOOK, size // _LOOKS)):
                    stream.seek(place)
                    state.update(stream.read(_LOOK))
        return state.hexdigest()[:16]

    def _tensor(self, key: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        from safetensors import safe_open

        # Opened for each of them: what was mapped is let go, and is no memory of this process any more.
        with safe_open(self._files[key], framework="pt", device="cpu") as file:
            part = file.get_slice(key)
            shape = part.get_shape()
            if shape and start >= (shape[0] if stop is None else stop):  # a rank may have no row of a small weight
                return torch.empty(0, *shape[1:])
            found = part[start:stop] if shape else file.get_tensor(key)
            return found.to(torch.float32, copy=True)  # type: ignore[no-any-return]

    def _shape(self, key: str) -> tuple[int, ...]:
        from safetensors import safe_open

        with safe_open(self._files[key], framework="pt", device="cpu") as file:
            return tuple(file.get_slice(key).get_shape())

    def _find(self) -> tuple[dict[str, _Origin], list[Any]]:
        """Each weight's origin, and the library's rules that were used, which it undoes when it saves the model."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )

        model = self._model
        rules = get_model_conversion_mapping(model)
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        makers = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        known = model.state_dict()
        groups: dict[str, list[tuple[str, str]]] = {}
        for key in sorted(self._files, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, known)
            if name not in known and key in known:
                name, pattern = key, None
            if name in known:
                groups.setdefault(name, []).append((key, pattern or ""))
        found: dict[str, _Origin] = {}
        for first, keys in groups.items():
            if not keys[0][1]:
                found[first] = _Origin(tuple(keys[-1:]))
                continue
            origin = _Origin(tuple(keys), makers[keys[0][1]], first)
            for name in self._make(origin, lambda key: torch.empty(self._shape(key), device="meta")):
                found[name] = origin
        return found, [rule for rule in rules if rule.was_used()]

    def _make(self, origin: _Origin, read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        maker = copy.deepcopy(origin.made)
        for key, pattern in origin.keys:
            maker.add_tensor(origin.first, key, pattern, lambda key=key: read(key))
        made = maker.convert(origin.first, model=self._model, config=self._model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def _match(self) -> None:
        model = self._model
        others: dict[int, list[str]] = {}
        for name, weight in model.named_parameters(remove_duplicate=False):
            others.setdefault(id(weight), []).append(name)
        for name, weight in model.named_parameters():
            there = [other for other in others[id(weight)] if other in self._origins]
            if not there:
                raise UnsliceableError(f"its files have no {name}")
            if len(there) > 1 and not all(torch.equal(self.read(there[0]), self.read(other)) for other in there[1:]):
                raise UnsliceableError(f"{' and '.join(there)} are one weight of the model, and differ in its files")
            self.names[name] = there[0]
            origin = self._origins[there[0]]
            shape = (
                self._shape(origin.keys[0][0])
                if origin.made is None
                else tuple(self._make(origin, lambda key: torch.empty(self._shape(key), device="meta"))[there[0]].shape)
            )
            if shape != tuple(weight.shape):
                raise UnsliceableError(
                    f"{name} has the shape {shape} in its files and {tuple(weight.shape)} in its config"
                )


def _files(folder: Path) -> dict[str, Path]:
    """The file of each tensor."""
    from safetensors import safe_open

    if (folder / _INDEX).is_file():
        try:
            return {key: folder / name for key, name in json.loads((folder / _INDEX).read_text())["weight_map"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UnsliceableError(f"its index cannot be read ({error})") from error
    if not (folder / _ONE).is_file():
        raise UnsliceableError(f"it has neither {_ONE} nor {_INDEX}")
    with safe_open(folder / _ONE, framework="pt", device="cpu") as file:
        return dict.fromkeys(file.keys(), folder / _ONE)
