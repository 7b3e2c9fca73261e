"""`dropforge compare` shows what differs between runs of a real MLflow, and nothing else."""

from __future__ import annotations

import json
import math
import re
import uuid
from collections.abc import Mapping, Sequence
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from dropforge import tracking
from dropforge.client.comparing import histories
from dropforge.errors import DropforgeError
from dropforge.promotion import Policy, decide
from tests.dropforge.cli.conftest import Terminal

HOSTILE = "<script>alert(1)</script>[/red]\x1b[31m\"'&"
PARAMS = {"train.seed": "1", "train.method": "full", "promote.metric": "eval/loss"}


@pytest.fixture
def family() -> str:
    return f"fam-{uuid.uuid4().hex[:8]}"


class Maker:
    """Makes runs as the DAG and the trainer do."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self.mlflow = tracking.client(uri)

    def run(
        self,
        family: str,
        name: str,
        *,
        params: Mapping[str, str] = PARAMS,
        tags: Mapping[str, str] | None = None,
        metrics: Mapping[str, Sequence[tuple[int, float]]] | None = None,
        files: Mapping[str, Any] | None = None,
        status: str | None = "FINISHED",
    ) -> str:
        """Its id. :param metrics: (step, value), in the order in which they were logged."""
        from mlflow.entities import Metric, Param, RunTag

        known = self.mlflow.get_experiment_by_name(family)
        experiment = known.experiment_id if known else self.mlflow.create_experiment(family)
        all_tags = {tracking.TAG_RUN: name, tracking.TAG_FAMILY: family, **(tags or {})}
        run = str(self.mlflow.create_run(experiment, run_name=name, tags=all_tags).info.run_id)
        points = [
            Metric(key, value, 1000 + at, step)
            for key, line in (metrics or {}).items()
            for at, (step, value) in enumerate(line)
        ]
        self.mlflow.log_batch(
            run, points, [Param(key, value) for key, value in params.items()], [RunTag("mlflow.user", "x")]
        )
        for path, content in (files or {}).items():
            self.mlflow.log_text(run, content if isinstance(content, str) else json.dumps(content), path)
        if status:
            self.mlflow.set_terminated(run, status)
        return run

    def version(self, family: str, run: str, alias: str = "") -> str:
        """Register a model of the run; its number."""
        from mlflow.exceptions import MlflowException

        try:
            self.mlflow.create_registered_model(family)
        except MlflowException:
            assert self.mlflow.get_registered_model(family)
        number = str(self.mlflow.create_model_version(family, source="s3://b/m", run_id=run).version)
        self.mlflow.set_tag(run, tracking.TAG_VERSION, number)
        if alias:
            self.mlflow.set_registered_model_alias(family, alias, number)
        return number


@pytest.fixture
def make(mlflow_server: str) -> Maker:
    return Maker(mlflow_server)


def answers(*rows: tuple[str, str, str]) -> dict[str, Any]:
    columns = ["row", "prompt", "reference", "answer", "ended", "rouge-l"]
    return {"columns": columns, "data": [["0" * 32, *row, True, 0.25] for row in rows]}


def refused(terminal: Terminal, *words: str) -> str:
    """What the command says when it refuses."""
    done = terminal("compare", *words)
    assert isinstance(done.exception, DropforgeError), done.output
    return str(done.exception)


def strict(text: str) -> Any:
    """JSON without the numbers that JSON has not."""

    def refuse(word: str) -> None:
        raise AssertionError(word)

    return json.loads(text, parse_constant=refuse)


def test_the_terminal_shows_what_differs_with_curves_and_a_link(
    terminal: Terminal, make: Maker, mlflow_server: str, family: str
) -> None:
    losses = [(step, 8.0 - step / 10) for step in range(0, 61, 10)]
    one, two = f"{family}-1", f"{family}-2"
    first = make.run(
        family,
        one,
        params={**PARAMS, "train.learning_rate": "0.1"},
        tags={"dropforge.git": "abc", tracking.TAG_VERDICT: "keep champion: [/red] worse"},
        metrics={"train/loss": losses, "eval/loss": [(0, 8.0), (30, 2.0), (60, 2.5)]},
    )
    second = make.run(
        family,
        two,
        params={**PARAMS, "train.learning_rate": "0.2"},
        tags={"dropforge.git": "abc"},
        metrics={"train/loss": losses[:4], "eval/loss": [(0, 8.0), (30, 2.0)]},
        status="KILLED",
    )
    done = terminal("compare", one, two)
    assert done.exit_code == 0, done.output
    lines = [" ".join(line.split()) for line in done.output.splitlines()]
    assert f"A {one} {family} - FINISHED keep champion: [/red] worse" in lines
    assert f"B {two} {family} - KILLED -" in lines
    assert "params 3 params are the same" in lines
    assert "train.learning_rate 0.1 0.2" in lines
    assert "train.seed" not in done.output
    assert "dropforge.git" not in done.output
    assert "eval/loss 2.5000 2 −0.5000 (−20.0%)" in lines
    assert "best 2 at 30" in lines
    curve = lines.index("train/loss steps 0 to 60, blocks from 2 to 8 nats")
    longer, shorter = lines[curve + 1 : curve + 3]
    assert re.fullmatch(r"A █[▁▂▃▄▅▆▇█]+▁ 8 → 2", longer)
    assert re.fullmatch(r"B █[▄▅▆▇█]+ 8 → 5", shorter)  # on the scale of both
    assert len(shorter) < len(longer)
    link = urlsplit(done.output.strip().splitlines()[-1].partition("view: ")[2])
    assert f"{link.scheme}://{link.netloc}" == mlflow_server
    page, _, query = link.fragment.partition("?")
    experiment = make.mlflow.get_experiment_by_name(family)
    assert page == "/compare-runs"
    assert {key: json.loads(value[0]) for key, value in parse_qs(query).items()} == {
        "runs": [first, second],
        "experiments": [experiment and experiment.experiment_id],
    }
    assert "train.seed" in terminal("compare", one, two, "--all").output


def test_a_version_names_the_run_that_made_it(terminal: Terminal, make: Maker) -> None:
    family = f"it's-{uuid.uuid4().hex[:8]}"
    names = [f"{family.partition('-')[2]}-{number}" for number in (1, 2)]
    old, new = (make.run(family, name) for name in names)
    assert make.version(family, old) == "1"
    make.version(family, new, "champion")
    done = terminal("compare", f"{family}@champion", f"{family}/1", "--json")
    assert done.exception is None, done.exception
    found = strict(done.output)
    assert [(run["name"], run["run_id"], run["version"]) for run in found["runs"]] == [
        (names[1], new, "2"),
        (names[0], old, "1"),
    ]
    assert "it is named as" in refused(terminal, names[1], f"{family}@champion")
    assert f"There is {family}/2 (the newest), {family}@champion." in refused(terminal, f"{family}/7", names[1])
    assert f"Did you mean {family}@champion?" in refused(terminal, f"{family[:-1]}@champion", names[1])
    assert "is not the number of a version" in refused(terminal, f"{family}/2026-11-21", names[1])


def test_what_cannot_be_compared_is_refused_with_the_mend(terminal: Terminal, make: Maker, family: str) -> None:
    names = [f"{family}-{number}" for number in range(3)]
    runs = [make.run(family, name) for name in names]
    make.mlflow.delete_run(runs[2])
    assert f"Did you mean {names[0]}?" in refused(terminal, names[1], f"{names[0]}x")
    assert "`dropforge runs`" in refused(terminal, names[1], "q'\"q")
    assert "it is named twice" in refused(terminal, names[0], names[0])
    assert "it was deleted in MLflow" in refused(terminal, names[0], names[2])
    assert names[1] in terminal("compare", names[0], family).output  # its newest run that is there
    make.run(f"{family}-other", names[0])
    assert f"families {family}, {family}-other" in refused(terminal, names[0], names[1])
    assert "a comparison is of 2 to 50 runs" in refused(terminal, names[0])
    assert "a comparison is of 2 to 50 runs" in refused(terminal, *(f"r{number}" for number in range(51)))


def test_a_run_is_found_whatever_somebody_calls_it_in_mlflow(terminal: Terminal, make: Maker, family: str) -> None:
    one, other = make.run(family, f"{family}-1"), make.run(family, f"{family}-2")
    make.mlflow.update_run(one, name="my favourite")
    found = strict(terminal("compare", f"{family}-1", f"{family}-2", "--json").output)
    assert [run["run_id"] for run in found["runs"]] == [one, other]


def test_json_is_strict_and_complete(terminal: Terminal, make: Maker, family: str) -> None:
    nan, inf = math.nan, math.inf
    other = f"{family}-other"
    one, two = f"{family}-1", f"{family}-2"
    make.run(family, one, metrics={"eval/loss": [(0, nan), (5, inf)], "train/loss": [(1, 3.0), (2, nan)]})
    # An attempt that goes on from step 2 logs the steps behind it again.
    again = [(1, 9.0), (2, 8.0), (3, 7.0), (4, 6.0), (3, 2.0), (4, 1.0)]
    own = {**PARAMS, "train.seed": "2", "train.weight_decay": "0.5"}
    make.run(other, two, params=own, metrics={"train/loss": again}, status=None)
    done = terminal("compare", one, two, "--json")
    found = strict(done.output)
    assert list(found) == ["mlflow", "families", "runs", "same", "params", "tags", "metrics", "curves"]
    assert found["families"] == [family, other]
    assert [run["status"] for run in found["runs"]] == ["FINISHED", "RUNNING"]
    assert found["same"] == {"params": 2, "tags": 0, "metrics": 0}
    assert found["params"] == {"train.seed": ["1", "2"], "train.weight_decay": ["0.1", "0.5"]}  # a default
    assert found["metrics"]["eval/loss"]["last"] == ["Infinity", None]
    assert found["metrics"]["train/loss"]["last"] == ["NaN", 1.0]
    assert found["metrics"]["train/loss"]["best"][0] == {"value": 3.0, "step": 1, "whole": True}
    assert found["curves"]["train/loss"]["points"] == [
        [[1, 3.0], [2, "NaN"]],
        [[1, 9.0], [2, 8.0], [3, 2.0], [4, 1.0]],
    ]
    assert strict(terminal("compare", one, two, "--json", "--all").output)["params"]["train.method"] == ["full"] * 2
    shown = terminal("compare", one, two).output
    assert f"Runs of 2 families: {family}, {other}." in shown
    assert "no values" in shown


class Page(HTMLParser):
    """Tags, and the text that a reader sees."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.cells: list[str] = []
        self.feed(content)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.cells.append(data)


def test_the_page_shows_verdicts_and_answers_and_runs_nothing_from_outside(
    terminal: Terminal, make: Maker, family: str, tmp_path: Path
) -> None:
    verdict = decide({"eval/loss": 2.0}, {"eval/loss": 2.5}, {"eval/loss": 9.0}, Policy())
    old = make.run(
        family,
        f"{family}-old",
        params={**PARAMS, "data.template": "x" * 5900 + "one"},
        metrics={"train/loss": [(1, 3.0), (2, 2.5)]},
        files={"answers/candidate.json": answers(("shared", "held", "old says"), ("old only", "held", "-"))},
    )
    make.version(family, old, "champion")
    make.run(
        family,
        f"{family}-new",
        params={**PARAMS, "data.template": "x" * 5900 + "two", "train.note": HOSTILE},
        tags={tracking.TAG_VERDICT: f"promote: {verdict.reason}", tracking.TAG_CHAMPION: "1"},
        metrics={"train/loss": [(1, 3.0), (2, 2.0)]},
        files={
            "verdict.md": verdict.as_markdown() + "\n",
            "answers/candidate.json": answers(("shared", "held", HOSTILE), (HOSTILE, "held", "new says")),
            "answers/champion.json": answers((HOSTILE, "held", "as champion")),
        },
    )
    file = tmp_path / "page.html"
    done = terminal("compare", f"{family}@champion", f"{family}-new", "--html", str(file))
    assert done.exit_code == 0, done.output
    assert "\x1b" not in done.output
    assert [path.name for path in tmp_path.glob("*.html*")] == ["page.html"]
    content = file.read_text()
    page = Page(content)
    assert not {"script", "link", "iframe", "img", "object"} & set(page.tags)
    assert "alert(1)</script>" not in content
    assert content.count("<svg") >= 1
    for check in verdict.checks:
        assert check.name in page.cells
        assert check.reason in page.cells
    assert {"2.0000", "2.5000", "9.0000"} <= set(page.cells)
    assert any(cell.endswith("xxtwo") and len(cell) == 5903 for cell in page.cells)  # whole, folded
    samples = page.cells[page.cells.index("Sample outputs") :]
    shared, hostile = samples.index("shared"), samples.index("<script>alert(1)</script>[/red]\\u001b[31m\"'&")
    assert shared < samples.index("old says") < hostile
    assert "as champion" in samples  # what the old model says to the new one's prompts
    assert samples.index("old only") > samples.index("new says")


def test_without_answers_the_page_says_how_to_get_them(
    terminal: Terminal, make: Maker, family: str, tmp_path: Path
) -> None:
    one, two = f"{family}-1", f"{family}-2"
    make.run(family, one, metrics={})
    make.run(family, two, tags={tracking.TAG_VERDICT: "promote: x"}, files={"answers/step-5.json": "no table"})
    file = tmp_path / "page.html"
    assert terminal("compare", one, two, "--html", str(file)).exit_code == 0
    content = unescape(file.read_text())
    assert "evaluate.generation" in content
    assert "B: verdict.md is not there" in content
    assert "B: answers/step-5.json cannot be read" in content


def test_the_page_is_kept_with_the_first_run(
    terminal: Terminal, make: Maker, mlflow_server: str, family: str, tmp_path: Path
) -> None:
    names = [f"{family}-1", f"{family}-2"]
    first, _ = (make.run(family, name) for name in names)
    file = tmp_path / "page.html"
    done = terminal("compare", *names, "--keep", "--html", str(file))
    path = f"comparisons/{names[0]}--{names[1]}.html"
    assert Path(make.mlflow.download_artifacts(first, path)).read_text() == file.read_text()
    assert f"/runs/{first}/artifacts/{path}" in done.output


def test_a_page_is_written_whole_or_not_at_all(
    terminal: Terminal, make: Maker, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"{family}-1", f"{family}-2"]
    for name in names:
        make.run(family, name)
    assert "it is a folder" in refused(terminal, *names, "--html", str(tmp_path))
    assert "there is no folder" in refused(terminal, *names, "--html", str(tmp_path / "none" / "page.html"))
    file = tmp_path / "page.html"
    file.write_text("before")

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert "No space left" in refused(terminal, *names, "--html", str(file))
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["page.html"]
    assert file.read_text() == "before"


def test_of_too_many_values_some_are_picked_evenly(
    terminal: Terminal, make: Maker, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"{family}-1", f"{family}-2"]
    line = [(step, 1000.0 - step) for step in range(1, 401)]
    for name in names:
        make.run(family, name, metrics={"train/loss": line, "eval/loss": line})
    whole = strict(terminal("compare", *names, "--json").output)
    assert [step for step, _ in whole["curves"]["eval/loss"]["points"][0]] == list(range(1, 401))
    monkeypatch.setattr(histories, "_WHOLE", 500)
    monkeypatch.setattr(histories, "_MOST", 60)
    picked = strict(terminal("compare", *names, "--json", "--all").output)
    for metric in ("train/loss", "eval/loss"):
        assert picked["metrics"][metric]["best"][0] == {"value": 600.0, "step": 400, "whole": False}
        for points in picked["curves"][metric]["points"]:
            assert len(points) == 60
            assert (points[0], points[-1]) == ([1, 999.0], [400, 600.0])


def test_many_runs_are_grouped_by_their_values(terminal: Terminal, make: Maker, family: str) -> None:
    names = [f"{family}-{number}" for number in range(7)]
    for number, name in enumerate(names):
        line = [(step, 10.0 - number) for step in range(3)]
        make.run(family, name, params={"train.seed": str(number // 4)}, metrics={"eval/loss": line})
    lines = [" ".join(line.split()) for line in terminal("compare", *names).output.splitlines()]
    assert "train.seed 0 A B C D" in lines
    assert "1 E F G" in lines
    assert "eval/loss 10 4 G 10 A" in lines


def test_without_mlflow_its_address_is_told(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    assert "MLflow at http://127.0.0.1:1: it gives no answer" in refused(terminal, "a", "b")
