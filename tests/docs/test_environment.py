"""The table of environment variables has each that the code reads, and no other."""

from __future__ import annotations

import re
from typing import Final

from dropforge.stack.secrets import _OF_MLFLOW
from dropforge.stack.services import _CURATING, _WELCOME
from tests.docs.markdown_pages import ROOT

_NAME: Final = r"(?:DROPFORGE|KUBEFLOW_TRAINING|KUBEFLOW_TRAINER|COSIGN)_[A-Z0-9_]+"
_PARTS: Final = ("dropforge", "curation", "trainer", "plugins", "dags")
#: Where a name of the environment is asked for by itself, and not given a value.
_ASKED: Final = re.compile(
    r"""(?x) (?:\bos\.environ|\benv) (?: \.(?:get|pop|setdefault)\(\s* (["'])(?P<got>[A-Z][A-Z0-9_]+)\1
    | \[ (["'])(?P<had>[A-Z][A-Z0-9_]+)\3 \] (?!\s*=[^=]) )
    | (["'])(?P<there>[A-Z][A-Z0-9_]+)\5 \ (?:not\ )?in\ (?:os\.environ|env)\b"""
)
#: Constants with the name of a variable, which is asked for by the constant.
_CONSTANT: Final = re.compile(r'^[A-Z_]*VARIABLE: Final = "([A-Z][A-Z0-9_]+)"', re.MULTILINE)
#: Of terminals, shells and loaders; set by PySpark for its own process; a part of torch's log.
_SYSTEM: Final = {
    "COLUMNS",
    "LD_LIBRARY_PATH",
    "PATH",
    "PYSPARK_GATEWAY_PORT",
    "SHELL",
    "TERM",
    "CUBLAS_WORKSPACE_CONFIG",
}
PAGE = (ROOT / "docs/reference/environment.md").read_text()


TEXTS = [path.read_text() for part in _PARTS for path in (ROOT / part).rglob("*.py")]


def test_every_variable_of_ours_that_is_read_has_a_line() -> None:
    read = {name for text in TEXTS for name in re.findall(rf"[\"'`]({_NAME})[\"'`]", text)}
    assert set(re.findall(rf"`({_NAME})", PAGE)) == read


def test_so_has_every_variable_of_others_that_is_read_by_name() -> None:
    found = {name for text in TEXTS for match in _ASKED.finditer(text) for name in match.groupdict().values() if name}
    assert {"JAVA_HOME", "MLFLOW_BACKEND_STORE_URI", "NO_COLOR", "OMP_NUM_THREADS", "RANK"} <= found
    found |= {name for text in TEXTS for name in _CONSTANT.findall(text)}
    assert "AIRFLOW_API_URL" in found
    told = set(re.findall(r"`([A-Z][A-Z0-9_]+)`", PAGE))
    own = {name for name in found if name.startswith(("AIRFLOW__", "PET_"))}
    assert {*found, *_OF_MLFLOW.values()} - own - _SYSTEM <= told


def test_what_the_embedded_stack_takes_over_is_marked() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("|")]
    marked = {name for row in rows if "†" in row for name in re.findall(rf"`({_NAME})`", row)}
    assert marked == {*_WELCOME, *_CURATING}
