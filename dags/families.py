"""No DAG of its own: for each broken family file of the calendar it is an import error that Airflow shows."""

from __future__ import annotations

import os
from pathlib import Path

from dropforge.errors import RecipeError
from dropforge.families import read_families
from dropforge.settings import families_folder

# Airflow looks into files only that hold its name, airflow, and the word DAG.
NAMED = os.environ.get("DROPFORGE_FAMILIES")
FOLDER = families_folder(Path(__file__).parent)

if NAMED and not FOLDER.is_dir():
    raise RecipeError("environment variable DROPFORGE_FAMILIES", f"{NAMED} is no folder", "Name the families' folder")
if broken := read_families(FOLDER).broken:
    first, others = broken[0], broken[1:]
    more = "".join(f"\n{error}" for error in others)
    raise RecipeError(first.thing, first.cause, f"{first.mend}{more}")
