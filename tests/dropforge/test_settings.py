"""MLflow's address goes into files, logs and links, so a login in it is refused and not repeated."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from dropforge_airflow.triggers import asks

from dropforge import tracking
from dropforge.errors import DropforgeError
from dropforge.rest import Rest, reached
from dropforge.run import Tracking
from dropforge.settings import default_state, from_env, without_login
from dropforge.stack.state import check_folder
from trainer.report.artifacts import put_artifacts
from trainer.report.tracking import make_tracker

LOGIN = "http://anna:s3cret@mlflow:5000"


def test_the_environment_of_the_dags_names_no_login() -> None:
    env = {"DROPFORGE_BUCKET": "b", "MLFLOW_TRACKING_URI": "http://mlflow:5000/team"}
    assert from_env(env).tracking_uri == "http://mlflow:5000/team"
    with pytest.raises(DropforgeError, match="MLFLOW_TRACKING_USERNAME") as told:
        from_env(env | {"MLFLOW_TRACKING_URI": LOGIN})
    assert "s3cret" not in str(told.value)


@pytest.mark.parametrize(
    "uri",
    [LOGIN, "https://anna@mlflow", "http://anna:s3/cret@mlflow", "HTTP://anna:s3#cret@mlflow", "http://a:[s3cret@mlflow",
     "postgresql://anna:s3cret@db/mlflow"],
)  # fmt: skip
def test_any_login_is_found_and_not_repeated(uri: str) -> None:
    with pytest.raises(DropforgeError) as told:
        without_login(uri)
    assert "cret" not in "".join(traceback.format_exception(told.value))


@pytest.mark.parametrize(
    "uri", ["http://mlflow:5000/", "https://[::1]:1", "sqlite:////home/a@b/mlflow.db", "databricks"]
)
def test_other_addresses_stay_as_they_are(uri: str) -> None:
    assert without_login(uri) == uri


@pytest.mark.parametrize(
    "use",
    [
        lambda: Rest(LOGIN),
        lambda: tracking.client(LOGIN),
        lambda: reached(Tracking(LOGIN, "abc", "0")),
        lambda: asks._look(LOGIN),
        lambda: make_tracker(Tracking(LOGIN, "abc", "0"), print),
        lambda: put_artifacts(Tracking(LOGIN, "abc", "0"), {"a": b"1"}),
    ],
    ids=["rest", "client", "reached", "trigger", "tracker", "artifacts"],
)
def test_whoever_speaks_to_mlflow_refuses_a_login(
    use: Callable[[], object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(DropforgeError, match="carries a login") as told:
        use()
    assert "s3cret" not in f"{told.value}{capsys.readouterr()}"


def test_a_pods_own_address_is_looked_at_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", LOGIN)
    with pytest.raises(DropforgeError, match="carries a login"):
        reached(Tracking("http://mlflow", "abc", "0"))


def test_several_buckets_and_queues() -> None:
    env = {
        "DROPFORGE_BUCKET": "main",
        "DROPFORGE_BUCKET_ALIAS": "m",
        "DROPFORGE_DROP_BUCKETS": "eu=drops-eu, drops-us m=main",
        "DROPFORGE_QUEUE_URL": "http://q/1,http://q/2 http://q/1",
        "MLFLOW_TRACKING_URI": "http://m",
    }
    found = from_env(env)
    assert found.aliases == {"main": "m", "drops-eu": "eu", "drops-us": "drops-us"}
    assert found.queue_urls == ("http://q/1", "http://q/2")
    assert from_env({**env, **found.to_env()}) == found


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a/b", "'a/b' is no bucket"),
        ("=b", None),
        ("x=", "'x=' is no bucket"),
        ("s3://b", "'s3://b' is no bucket"),
        ("..", "'..' is no bucket"),
        ("x=a y=a", "bucket a has the alias x already"),
        ("x=a x=b", "two buckets have the alias x"),
        ("main=other", "two buckets have the alias main"),
        ("x=main", "bucket main has the alias main already"),
    ],
)
def test_a_list_of_buckets_that_cannot_work_is_refused(text: str, told: str | None) -> None:
    env = {"DROPFORGE_BUCKET": "main", "DROPFORGE_DROP_BUCKETS": text, "MLFLOW_TRACKING_URI": "http://m"}
    if told is None:
        assert from_env(env).drop_buckets == {"b": "b"}
        return
    with pytest.raises(DropforgeError, match=f"DROPFORGE_DROP_BUCKETS: {re.escape(told)}"):
        from_env(env)


@pytest.mark.parametrize("named", [None, "state"])
def test_a_current_folder_that_was_removed_is_told(
    named: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.delenv("DROPFORGE_STATE", raising=False)
    if named:
        monkeypatch.setenv("DROPFORGE_STATE", named)
    with pytest.raises(DropforgeError, match="the current folder: it was removed"):
        default_state()
    with pytest.raises(DropforgeError, match="the current folder: it was removed"):
        check_folder(Path("state"))
    assert check_folder(tmp_path) == tmp_path
