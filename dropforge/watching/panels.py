"""Dashboards as data, and the JSON that Grafana reads of them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

Kind = Literal["timeseries", "stat", "table"]
_WIDE: Final = 24  # columns of Grafana's grid
_HIGH: Final = 7
_SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
#: From each dashboard to the others. Grafana's schema asks for every key, its pages do not.
_LINK: Final = {
    "type": "dashboards",
    "tags": ["dropforge"],
    "title": "Dropforge",
    "icon": "dashboard",
    "tooltip": "",
    "asDropdown": False,
    "targetBlank": False,
    "includeVars": True,
    "keepTime": True,
}
_NAME: Final = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_ASIDE: Final = re.compile(
    r'"[^"]*"|\{[^}]*\}|\[[^\]]*\]|\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)'
)
_OPERATORS: Final = frozenset({"and", "or", "unless", "bool", "offset"})
OURS: Final = "dropforge_"


@dataclass(frozen=True)
class Query:
    """:param legend: in Grafana's words, as `{{family}}`."""

    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    """:param unit: one of Grafana's. :param about: shown behind the panel's mark."""

    title: str
    queries: tuple[Query, ...]
    unit: str = "short"
    kind: Kind = "timeseries"
    about: str = ""
    width: int = 8


@dataclass(frozen=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Dashboard:
    """:param several: whether several families may be chosen at once."""

    uid: str
    title: str
    rows: tuple[Row, ...]
    several: bool = True

    def queries(self) -> Iterator[Query]:
        for row in self.rows:
            for panel in row.panels:
                yield from panel.queries


def names_in(expr: str) -> set[str]:
    """The metrics that a query asks for: its names that are neither labels nor functions."""
    bare = _ASIDE.sub(" ", expr)
    found = set()
    for match in _NAME.finditer(bare):
        if match[0] not in _OPERATORS and not bare[match.end() :].lstrip().startswith("(") and not _number(bare, match):
            found.add(match[0])
    return found


def _number(text: str, match: re.Match[str]) -> bool:
    """Whether a name is the end of a number, as in `1e3` or `5m`."""
    return match.start() > 0 and text[match.start() - 1].isdigit()


def is_ours(expr: str) -> bool:
    """Whether the exporter alone answers a query; others are answered where DCGM, kube-state-metrics and so on run."""
    return all(name.startswith(OURS) for name in names_in(expr))


def to_grafana(dashboard: Dashboard) -> dict[str, Any]:
    """The dashboard as Grafana reads it from a file or a ConfigMap."""
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "tags": ["dropforge"],
        "schemaVersion": 39,
        "version": 1,
        "editable": False,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [_datasource(), _family(dashboard.several)]},
        "annotations": {"list": []},
        "links": [_LINK],
        "panels": list(_panels(dashboard.rows)),
    }


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _family(several: bool) -> dict[str, Any]:
    return {
        "name": "family",
        "label": "Family",
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": "label_values(dropforge_runs, family)", "refId": "family"},
        "refresh": 2,
        "sort": 1,
        "multi": several,
        "includeAll": several,
        **({"allValue": ".*", "current": {"text": ["All"], "value": ["$__all"]}} if several else {}),
    }


def _panels(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    number = top = 0
    for row in rows:
        number += 1
        place = {"h": 1, "w": _WIDE, "x": 0, "y": top}
        yield {"id": number, "type": "row", "title": row.title, "collapsed": False, "gridPos": place, "panels": []}
        top, left = top + 1, 0
        for panel in row.panels:
            if left + panel.width > _WIDE:
                top, left = top + _HIGH, 0
            number += 1
            place = {"h": _HIGH, "w": panel.width, "x": left, "y": top}
            yield {"id": number, "gridPos": place, **_panel(panel)}
            left += panel.width
        top += _HIGH


def _panel(panel: Panel) -> dict[str, Any]:
    table = panel.kind == "table"
    targets = [
        {
            "refId": chr(ord("A") + place),
            "datasource": _SOURCE,
            "expr": query.expr,
            **({"format": "table", "instant": True} if table else {"legendFormat": query.legend or "__auto"}),
        }
        for place, query in enumerate(panel.queries)
    ]
    found: dict[str, Any] = {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": _SOURCE,
        "targets": targets,
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0} if not table else {"unit": panel.unit},
            "overrides": [],
        },
    }
    if table:
        found["transformations"] = [{"id": "organize", "options": {"excludeByName": {"Time": True}}}]
    return found
