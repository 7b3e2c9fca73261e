"""Manifests as text, which may be hostile: one YAML document of bounded size that holds nothing but JSON's values."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import Any, Final

from kubeflow_training.jobs.errors import ManifestError

LARGEST: Final = 1 << 20
"""Bytes; etcd takes no larger object."""
_NUMBERS: Final = 2**63
_MOST_VALUES: Final = 100_000
"""How many values the document may come to once its aliases are written out."""
_MERGE_TAG: Final = "tag:yaml.org,2002:merge"
_MEND: Final = "Give one YAML document with one job"


def manifest_from_text(text: str, what: str = "the manifest") -> dict[str, Any]:
    """The one mapping that the text holds; JSON is YAML too.

    :param what: what to call it in an error.
    :raises ManifestError: for anything else, with the line.
    """
    import yaml

    size = len(text.encode(errors="replace"))
    if size > LARGEST:
        raise ManifestError(what, f"it has {size:,} bytes, and {LARGEST:,} are the most", "Make it smaller")
    try:
        loader = _loader()(text)
        try:
            found = loader.get_single_data()
        finally:
            loader.dispose()
        _count(found, what)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        cause = " ".join(str(part) for part in (error.context, error.problem) if part)
        if "expected a single document" in cause:
            cause = "it has more than one document"
        raise ManifestError(what, f"{where}{cause}", _MEND) from error
    except (yaml.YAMLError, ValueError, TypeError, OverflowError) as error:
        raise ManifestError(what, " ".join(str(error).split())[:300], _MEND) from error
    except RecursionError as error:
        raise ManifestError(what, "it is nested too deep", "Write it flatter") from error
    if not isinstance(found, dict):
        kind = "empty" if found is None else f"a {type(found).__name__}"
        raise ManifestError(what, f"it is {kind} instead of a mapping", _MEND)
    return found


def manifest_to_text(manifest: Mapping[str, Any]) -> str:
    """The manifest as YAML for `kubectl apply -f -`."""
    import yaml

    text: str = yaml.safe_dump(_copied(manifest), sort_keys=False, allow_unicode=True, width=120)
    return text


def _loader() -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """Safe, and strict: a key stands once, and a date is text as it is in JSON."""

        def __init__(self, stream: str) -> None:
            super().__init__(stream)
            self._brought: set[tuple[int, str]] = set()
            self._weight = 0

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
            self.flatten_mapping(node)
            seen: dict[Any, int] = {}
            for key_node, _ in node.value:
                key, line = self.construct_object(key_node, deep=True), key_node.start_mark.line + 1
                if not isinstance(key, str):
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key!r} is not text", key_node.start_mark
                    )
                if seen.get(key) is not None and not self._merged(node, key):
                    cause = f"the key {key!r} appears twice, first in line {seen[key]}"
                    raise yaml.constructor.ConstructorError(None, None, cause, key_node.start_mark)
                seen[key] = line
            return super().construct_mapping(node, deep)

        def flatten_mapping(self, node: Any) -> None:
            for key, value in node.value:
                if key.tag == _MERGE_TAG:
                    self._weigh(value.value if isinstance(value, yaml.SequenceNode) else [value])
            own = {id(key) for key, _ in node.value}
            super().flatten_mapping(node)
            # What a merge key (`<<`) brought may be said again by the mapping itself.
            self._brought.update((id(node), str(key.value)) for key, _ in node.value if id(key) not in own)

        def _weigh(self, sources: list[Any]) -> None:
            """Merges of merges grow like powers: count what they bring before it is brought."""
            for source in sources:
                if isinstance(source, yaml.MappingNode):
                    self.flatten_mapping(source)
                    self._weight += len(source.value)
            if self._weight > _MOST_VALUES:
                raise ValueError(f"its merge keys bring more than {_MOST_VALUES:,} values")

        def _merged(self, node: Any, key: str) -> bool:
            return (id(node), key) in self._brought

    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    return Loader


def _count(value: Any, what: str) -> None:
    """Refuse what is no JSON, what contains itself, and what grows beyond all bounds where aliases are written out."""
    sizes: dict[int, int] = {}
    open_: set[int] = set()

    def size(item: Any) -> int:
        if isinstance(item, float) and not math.isfinite(item):
            raise ManifestError(what, f"{item} is no number of JSON", "Write a number")
        if isinstance(item, int) and not -_NUMBERS <= item < _NUMBERS:  # no text: Python writes none that is longer
            raise ManifestError(what, f"it holds a number of {item.bit_length()} bits", "Kubernetes takes 64")
        if item is None or isinstance(item, str | int | float):
            return 1
        if not isinstance(item, dict | list):
            raise ManifestError(what, f"it holds a {type(item).__name__}", "Use text, numbers, lists and mappings")
        if id(item) in open_:
            raise ManifestError(what, "a part of it contains itself", "Remove the alias")
        if id(item) not in sizes:
            open_.add(id(item))
            total = 1 + sum(size(part) for part in (item.values() if isinstance(item, dict) else item))
            open_.discard(id(item))
            if total > _MOST_VALUES:
                raise ManifestError(what, f"it comes to more than {_MOST_VALUES:,} values", "Make it smaller")
            sizes[id(item)] = total
        return sizes[id(item)]

    size(value)


def _copied(value: Any) -> Any:
    """Without shared parts, which YAML would write as aliases."""
    if isinstance(value, Mapping):
        return {str(key): _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list | tuple) else value
