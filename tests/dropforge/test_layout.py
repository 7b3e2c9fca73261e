"""Keys of the bucket: no name that a person may choose leads into a folder of another kind."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest

from dropforge import layout
from dropforge.errors import DataError

FAMILY = "some-family"
#: Folders that hold no family's names: what layout spells without one.
FIXED = (
    layout.INBOX,
    layout.MESSAGES,
    layout.SEEN,
    layout.PROBES,
    layout.RUNS,
    layout.told_key("x"),
    layout.probe_key("0" * 32),
    layout.probe_answer_key("0" * 32),
    layout.network_key("x"),
    "mlflow/",
)


def family_keys() -> dict[str, str]:
    """A key of each function that is given a family, by its name."""
    found = {}
    for name, function in vars(layout).items():
        if not (inspect.isfunction(function) and name.endswith(("_key", "_prefix"))):
            continue
        parameters = list(inspect.signature(function).parameters.values())
        if parameters and parameters[0].name == "family":
            make: Callable[..., str] = function
            rest = [1 if each.annotation == "int" else "x" for each in parameters[1:] if each.default is each.empty]
            found[name] = make(FAMILY, *rest)
    return found


def test_no_family_leads_into_a_folder_of_another_kind() -> None:
    keys = family_keys()
    assert len(keys) > 15
    roots = {key.partition(FAMILY)[0] for key in keys.values()}
    for root in roots:
        for other in (roots - {root}) | set(FIXED):
            if other.startswith(root):
                name = other.removeprefix(root).partition("/")[0].partition(".json")[0]
                with pytest.raises(DataError):
                    layout.check_family(name)
