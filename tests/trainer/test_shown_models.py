"""What is shown of checkpoints in MLflow, where people write as well, and what is read of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from dropforge import tracking
from dropforge.errors import RecipeError
from trainer.commands.models import fetch_model
from trainer.report.models import DELETED, note

TAGS = {"dropforge.run": "r", "dropforge.step": "5", "dropforge.uri": "s3://b/r", "dropforge.bytes": "2500000"}


def test_a_number_that_a_person_wrote_does_not_keep_the_description_away() -> None:
    assert "1,000 tokens, 2.5 MB, `s3://b/r`" in note({**TAGS, "dropforge.tokens": "1000"})
    edited = {**TAGS, "dropforge.tokens": "1,000", "dropforge.bytes": "2.5M", DELETED: "now"}
    assert note(edited).endswith(" 1,000 tokens, 2.5M bytes, `s3://b/r`")


def test_a_copy_of_a_registered_model_is_followed_and_one_that_copies_itself_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    sources = {"a": "models:/b/1", "b": "models:/a/1", "copy": "models:/first/1", "first": str(tmp_path)}
    server = SimpleNamespace(get_model_version=lambda name, _: SimpleNamespace(source=sources[name]))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setattr(tracking, "client", lambda _: server)
    assert fetch_model("models:/copy/1", tmp_path, print) == tmp_path
    with pytest.raises(RecipeError, match="model models:/a/1: it is its own source"):
        fetch_model("models:/a/1", tmp_path, print)
