"""The generated pages are what the code gives, and they leave nothing out."""

from __future__ import annotations

import pytest
import typer.main
from typer.core import TyperGroup

from docs.site.reference import FOLDER, PAGES
from dropforge.cli.app import app
from dropforge.recipes.load import key_names


@pytest.mark.parametrize("page", PAGES)
def test_a_generated_page_is_what_the_code_gives(page: str) -> None:
    assert (FOLDER / page).read_text() == PAGES[page](), "run: make docs-reference"


def test_the_recipe_reference_has_every_key() -> None:
    page = (FOLDER / "recipe.md").read_text().replace("[]", "")  # of lists of sections
    assert not [key for key in key_names() if f"| `{key}` |" not in page]


def test_the_command_reference_has_every_command_and_option() -> None:
    page = (FOLDER / "commands.md").read_text()
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    for name, command in group.commands.items():
        if command.hidden:  # another name
            continue
        inner = command.commands.values() if isinstance(command, TyperGroup) else ()
        assert f"## `dropforge {name}`\n" in page
        for each in (command, *inner):
            options = [option for parameter in each.params for option in parameter.opts if option.startswith("--")]
            assert not [option for option in options if option not in page], each.name
