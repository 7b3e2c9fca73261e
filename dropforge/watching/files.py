"""The dashboards and rules as files: `python -m dropforge.watching.files [FOLDER] [--runbooks ADDRESS]`.

Those in `helm-values/watching/` are committed, so that using them does not need this; a test holds them equal.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import yaml

from dropforge.watching.alerts import RUNBOOKS, rules
from dropforge.watching.dashboards import DASHBOARDS
from dropforge.watching.panels import to_grafana

FOLDER: Final = Path(__file__).parents[2] / "helm-values" / "watching"


def files(runbooks: str = RUNBOOKS) -> Mapping[str, str]:
    """Content by name. :param runbooks: see `dropforge.watching.alerts.rules`."""
    dashboards = {
        f"{dashboard.uid}.json": json.dumps(to_grafana(dashboard), indent=1) + "\n" for dashboard in DASHBOARDS
    }
    return {**dashboards, "rules.yaml": yaml.safe_dump(rules(runbooks), sort_keys=False, width=120)}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m dropforge.watching.files", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    parser.add_argument("--runbooks", default=RUNBOOKS, help="address of the page of runbooks, for links that work")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, content in files(options.runbooks).items():
        (options.folder / name).write_text(content)
        print(options.folder / name)


if __name__ == "__main__":
    main()
