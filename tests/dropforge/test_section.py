"""The help of a key is the docstring under it."""

from __future__ import annotations

from pydantic import Field

from dropforge.section import Section, help_of


class Lamp(Section):
    """A lamp."""

    watts: int = 5
    """Watts that it takes,
    at the most."""
    hue: str = "warm"

    bulbs: int = 1
    "How many bulbs it has."


class Lantern(Lamp):
    """A lamp with a handle."""

    handle_of: str = Field("wood", alias="handle-of")
    """What its handle is of."""
    bulbs: int = 2
    """One more than a lamp."""


def test_a_docstring_helps_with_the_field_above_it() -> None:
    assert help_of(Lamp, "watts") == "Watts that it takes,\nat the most."
    assert help_of(Lamp, "hue") is None
    assert help_of(Lamp, "none_such") is None


def test_a_base_helps_with_what_it_has_given() -> None:
    assert help_of(Lantern, "watts") == help_of(Lamp, "watts")
    assert help_of(Lantern, "bulbs") == "One more than a lamp."
    assert help_of(Lamp, "bulbs") == "How many bulbs it has."


def test_the_schema_has_it_by_the_keys_name_and_leaves_what_has_a_description() -> None:
    class Own(Lamp):
        hue: str = Field("cold", description="Its colour.")

    properties = Lantern.model_json_schema()["properties"]
    assert properties["handle-of"]["description"] == "What its handle is of."
    assert "description" not in properties["hue"]
    assert Own.model_json_schema()["properties"]["hue"]["description"] == "Its colour."
