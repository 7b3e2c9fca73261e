"""One line names the data of a run."""

from __future__ import annotations

from typing import Any

import pytest

from dropforge.data_names import Named, read_name
from dropforge.errors import DataError

DIGEST = "ab" * 32


@pytest.mark.parametrize(
    ("text", "drop", "source"),
    [
        ("", "", None),
        ("  ", "", None),
        (" fam/d1 ", "fam/d1", None),
        ("d1", "d1", None),
        ("drop:fam/d1", "fam/d1", None),
        ("s3://b/drops/fam/d1/", "drops/fam/d1/", None),
        ("s3://b/drops/fam/d1/_SUCCESS", "drops/fam/d1/", None),
        (f"dataset:fam/{DIGEST}", "", {"dataset": f"fam/{DIGEST}"}),
        ("prefix:lake/chats/", "", {"prefix": "lake/chats/"}),
        ("prefix:odd:name/", "", {"prefix": "odd:name/"}),
        ("s3://b/lake/chats/", "", {"prefix": "lake/chats/"}),
        (f"drops:{'0' * 32}, {'1' * 32}", "", {"drops": ["0" * 32, "1" * 32]}),
        ("hub:own/name", "", {"hub": "own/name"}),
        (
            "hub:own/name?config=en&split=test&revision=v1.0",
            "",
            {"hub": "own/name", "config": "en", "split": "test", "revision": "v1.0"},
        ),
    ],
)
def test_a_line_names_one_thing(text: str, drop: str, source: dict[str, Any] | None) -> None:
    assert read_name(text, "b") == Named(drop, source)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("file:/etc/passwd", "no data of the sort `file:`"),
        ("dataset:", "nothing follows `dataset:`"),
        ("s3://other/lake/", "not in the bucket b"),
        ("s3://b/", "a whole bucket"),
        ("s3://b", "a whole bucket"),
        ("hub:own/name?token=x", "`token` is none of config, split, revision"),
        ("hub:own/name?config=a&config=b", "`config` is given twice"),
        ("hub:own/name?config=", "`config` is empty"),
        ("hub:own/name?config", "is not `key=value"),
        ("x" * 5000, "5,000 characters"),
    ],
)
def test_a_line_that_names_nothing_is_refused_with_the_syntax(text: str, told: str) -> None:
    with pytest.raises(DataError, match=told) as caught:
        read_name(text, "b")
    assert "`dataset:FAMILY/DIGEST`" in str(caught.value)
    assert len(str(caught.value)) < 600
