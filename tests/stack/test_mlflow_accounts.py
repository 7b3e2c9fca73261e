"""MLflow of the embedded stack lets in three accounts, and each does what it is for: the real server, over HTTP."""

from __future__ import annotations

import base64
import json
import posixpath
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dropforge_airflow.pages import versions

from dropforge import rollback, tracking
from dropforge.errors import DataError
from dropforge.rest import Rest
from dropforge.run import Tracking
from dropforge.stack import mlflow_accounts
from dropforge.stack.mlflow_accounts import AIRFLOW, PERSON, TRAINER, Account
from dropforge.stack.mlflow_guard import body_refusal
from dropforge.stack.secrets import Secrets, secrets_path
from dropforge.stack.services import services
from tests.mlflow_server import MlflowServer
from trainer.report.models import BEST, Models, Shown

PODS = "127.0.0.2"  # another address of every Linux machine


class Asked(MlflowServer):
    """One that is asked by HTTP, as whoever one likes."""

    def ask(
        self,
        who: Account | tuple[str, str] | None,
        path: str,
        body: object = None,
        method: str = "POST",
        host: str = "127.0.0.1",
    ) -> tuple[int, Any]:
        """Status and JSON, of which a refusal has none."""
        if isinstance(who, Account):
            who = who.name, mlflow_accounts.password(who, self.secrets)
        headers = {"Content-Type": "application/json"}
        if who:
            headers["Authorization"] = f"Basic {base64.b64encode(':'.join(who).encode()).decode()}"
        below = posixpath.normpath(f"/api/2.0/mlflow{'' if path.startswith('-') else '/'}{path}")
        url = f"http://{host}:{self.port}{below}{'/' if path.endswith('/') else ''}"
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(urllib.request.Request(url, data, headers, method=method)) as answer:
                return answer.status, json.loads(answer.read() or b"{}")
        except urllib.error.HTTPError as error:
            return error.code, None


@pytest.fixture(scope="module")
def mlflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    server = Asked(tmp_path_factory.mktemp("mlflow"), "--pod-host", PODS)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def run(mlflow: Asked) -> tuple[str, str]:
    """Ids of an experiment and a run of it, which Airflow made."""
    status, made = mlflow.ask(AIRFLOW, "experiments/create", {"name": f"family-{time.monotonic_ns()}"})
    assert status == 200
    experiment = made["experiment_id"]
    status, made = mlflow.ask(AIRFLOW, "runs/create", {"experiment_id": experiment})
    assert status == 200
    return experiment, made["run"]["info"]["run_id"]


@pytest.fixture
def model(mlflow: Asked, run: tuple[str, str]) -> str:
    """A model with one version, which Airflow registered."""
    name = f"model-{time.monotonic_ns()}"
    assert mlflow.ask(AIRFLOW, "registered-models/create", {"name": name})[0] == 200
    assert mlflow.ask(AIRFLOW, "model-versions/create", version(name, run))[0] == 200
    return name


def version(name: str, run: tuple[str, str]) -> dict[str, str]:
    return {"name": name, "source": f"mlflow-artifacts:/{run[0]}/{run[1]}/artifacts/model", "run_id": run[1]}


def checkpoint(step: int, best: bool) -> Shown:
    facts = {"step": step, "tokens": 8, "bytes": 8, "digest": f"{step:064}", "uri": f"s3://b/step-{step}", "run": "one"}
    marks = {BEST: "true"} if best else {}
    return Shown(step, f"{step:064}", {key: str(value) for key, value in facts.items()}, marks, {})


def logged(mlflow: Asked, run: tuple[str, str]) -> dict[str, str]:
    """Ids of the logged models of a run's experiment by their names."""
    status, found = mlflow.ask(PERSON, "logged-models/search", {"experiment_ids": [run[0]]})
    assert status == 200
    return {one["info"]["name"]: one["info"]["model_id"] for one in found.get("models", [])}


def test_a_head_without_end_is_not_kept(mlflow: Asked) -> None:
    line = b"x: " + b"a" * 1000 + b"\r\n"
    with socket.create_connection(("127.0.0.1", mlflow.port), timeout=60) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n")
        with pytest.raises(ConnectionError):
            connection.sendall(line * 60_000)


def test_what_comes_without_a_login_fills_no_log(mlflow: Asked) -> None:
    log = mlflow.folder / "log"
    before = log.stat().st_size
    for _ in range(120):
        with socket.create_connection(("127.0.0.1", mlflow.port), timeout=60) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: " + b"A" * 60_000 + b"\r\n\r\n")
            assert connection.recv(1)
    text = log.read_bytes()[before:].decode()
    assert text.count("invalid Host header") == 100
    assert len(text) < 40_000


@pytest.mark.parametrize("host", ["127.0.0.1", PODS])
@pytest.mark.parametrize(
    "who",
    [None, (PERSON.name, "password1234"), ("nobody", "password1234"), (TRAINER.name, "")],
    ids=["nobody", "wrong password", "stranger", "no password"],
)
def test_whoever_has_no_account_reads_and_moves_nothing(
    mlflow: Asked, model: str, host: str, who: tuple[str, str] | None
) -> None:
    moved = {"name": model, "alias": "champion", "version": "1"}
    for path, body, method in [
        ("registered-models/alias", moved, "POST"),
        ("experiments/search", {"max_results": 1}, "POST"),
        ("-artifacts/artifacts/1/x", b"bytes", "PUT"),
        ("-artifacts/artifacts", None, "GET"),
        ("users/create", {"username": "mine", "password": "password1234"}, "POST"),
    ]:
        assert mlflow.ask(who, path, body, method, host)[0] == 401, path
    assert mlflow.ask(AIRFLOW, f"registered-models/alias?name={model}&alias=champion", method="GET")[0] != 200


@pytest.mark.parametrize("told", ["Bearer x", "Digest x", "Basic !", "Basic eA==", "basic"])
def test_what_is_no_login_is_asked_for_one(mlflow: Asked, told: str) -> None:
    request = urllib.request.Request(f"{mlflow.url}/api/2.0/mlflow/experiments/search", headers={"Authorization": told})
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(request)
    assert error.value.code == 401
    assert error.value.headers["WWW-Authenticate"] == 'Basic realm="mlflow"'


def send_head(mlflow: Asked, method: str, path: str, *lines: str) -> int:
    """Send no more than the head of a request; the answer's status."""
    with socket.create_connection(("127.0.0.1", mlflow.port), timeout=60) as connection:
        head = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json", *lines, "", ""]
        connection.sendall("\r\n".join(head).encode())
        return int(connection.makefile("rb").readline().split()[1])


def basic(user: str, password: str) -> str:
    return f"Authorization: Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"


def test_a_body_is_not_kept_for_who_says_no_name(mlflow: Asked) -> None:
    for path in (
        "/api/2.0/mlflow/experiments/search",
        "/v1/traces",
        "/gateway/x",
        "/signup",
        "/api/2.0/mlflow-artifacts/artifacts/x",
    ):
        for more in ("Content-Length: 1000000000", "Content-Length: 1", "Transfer-Encoding: chunked"):
            assert send_head(mlflow, "POST", path, more) == 401, (path, more)
            assert send_head(mlflow, "POST", path, "Authorization: Bearer x", more) == 401, (path, more)
    assert send_head(mlflow, "GET", "/health") == 200


def test_a_body_has_a_bound(mlflow: Asked) -> None:
    path, name = "/api/2.0/mlflow/runs/log-batch", basic(PERSON.name, mlflow_accounts.password(PERSON, mlflow.secrets))
    for login in (name, basic("stranger", "password1234")):
        assert send_head(mlflow, "POST", path, login, f"Content-Length: {(64 << 20) + 1}") == 413
        assert send_head(mlflow, "POST", path, login, "Content-Length: " + "9" * 30) in {400, 413}
        assert send_head(mlflow, "POST", path, login, "Transfer-Encoding: chunked") == 411
    # MLflow asks who it is before it reads a file.
    file = "/api/2.0/mlflow-artifacts/artifacts/1/x"
    assert send_head(mlflow, "PUT", file, basic("stranger", "password1234"), "Content-Length: 1000000000") == 401


def test_an_upload_has_a_bound_of_parts(mlflow: Asked) -> None:
    """MLflow signs an address for each before it answers, and goes on when nobody waits any more."""
    for who in (TRAINER, PERSON):
        for path in ("-artifacts/mpu/create", "-artifacts/mpu/create/1/x"):
            assert mlflow.ask(who, path, {"path": "f", "num_parts": 10_001})[0] == 400
            assert mlflow.ask(who, path, {"path": "f", "num_parts": 2})[0] != 400


def test_a_file_may_be_longer_than_other_bodies() -> None:
    long = [(b"Content-Length", b"1000000000")]
    assert body_refusal("PUT", "/api/2.0/mlflow-artifacts/artifacts/1/x", long) == 0
    assert (
        body_refusal("PUT", "/ajax-api/2.0/mlflow-artifacts/artifacts/1/x", [(b"transfer-encoding", b"chunked")]) == 0
    )
    for method, path in (
        ("POST", "/api/2.0/mlflow-artifacts/artifacts/1/x"),
        ("PUT", "/x/api/2.0/mlflow-artifacts/artifacts/1"),
    ):
        assert body_refusal(method, path, long) == 413
    assert body_refusal("POST", "/", [(b"content-length", b"%d" % (64 << 20))]) == 0
    assert body_refusal("GET", "/", []) == 0


def test_a_training_writes_to_a_run_and_reads_models(mlflow: Asked, run: tuple[str, str], model: str) -> None:
    metric = {"key": "train/loss", "value": 1.0, "timestamp": 1, "step": 0}
    tag = {"run_id": run[1], "key": "dropforge.attempt", "value": "1"}
    file = f"-artifacts/artifacts/{run[0]}/{run[1]}/artifacts/note.txt"
    for path, body, method in [
        ("runs/log-batch", {"run_id": run[1], "metrics": [metric]}, "POST"),
        ("runs/set-tag", tag, "POST"),
        ("runs/delete-tag", {"run_id": run[1], "key": tag["key"]}, "POST"),
        ("runs/update", {"run_id": run[1], "status": "FINISHED"}, "POST"),
        (file, b"{}", "PUT"),
        (file, None, "GET"),
        (f"model-versions/get?name={model}&version=1", None, "GET"),
    ]:
        assert mlflow.ask(TRAINER, path, body, method)[0] == 200, path


def test_a_training_registers_and_promotes_nothing(mlflow: Asked, run: tuple[str, str], model: str) -> None:
    moved = {"name": model, "alias": "champion", "version": "1"}
    for path, body, method in [
        ("registered-models/create", {"name": "taken-before"}, "POST"),
        ("registered-models/create/", {"name": "taken-before"}, "POST"),
        ("experiments/create", {"name": "taken-before"}, "POST"),
        ("experiments/update", {"experiment_id": run[0], "new_name": "taken-before"}, "POST"),
        ("runs/create", {"experiment_id": run[0]}, "POST"),
        ("gateway/secrets/create", {"secret_name": "mine", "secret_value": {"a": "b"}}, "POST"),
        ("../../3.0/mlflow/demo/generate", {}, "POST"),
        ("../../../ajax-api/3.0/mlflow/assistant/config", {}, "PUT"),
        ("logged-models/m-1", None, "DELETE"),
        ("model-versions/create", version(model, run), "POST"),
        ("registered-models/alias", moved, "POST"),
        ("registered-models/delete", {"name": model}, "DELETE"),
        ("runs/delete", {"run_id": run[1]}, "POST"),
        ("experiments/delete", {"experiment_id": run[0]}, "POST"),
        ("users/create", {"username": "mine", "password": "password1234"}, "POST"),
        ("users/update-admin", {"username": TRAINER.name, "is_admin": True}, "PATCH"),
    ]:
        assert mlflow.ask(TRAINER, path, body, method)[0] == 403, path
    assert mlflow.ask(AIRFLOW, "registered-models/alias", moved)[0] == 200


def test_a_training_gives_no_orders_by_tags(mlflow: Asked, run: tuple[str, str]) -> None:
    ask, own = {"key": "dropforge.ask", "value": "last register"}, {"key": "dropforge.step", "value": "1"}
    logged = {"experiment_id": run[0], "name": "step-1", "source_run_id": run[1]}
    status, made = mlflow.ask(TRAINER, "logged-models", {**logged, "tags": [own]})
    assert status == 200
    model = made["model"]["info"]["model_id"]
    for path, body, method in [
        ("runs/set-tag", {"run_id": run[1], **ask}, "POST"),
        ("../../../ajax-api/2.0/mlflow/runs/set-tag", {"run_id": run[1], **ask}, "POST"),
        ("runs/set-tag", {"run_id": run[1], "key": "dropforge.run", "value": "another"}, "POST"),
        ("runs/set-tag", json.dumps(json.dumps({"run_id": run[1], **ask})).encode(), "POST"),
        ("runs/set-tag", json.dumps({"run_id": run[1], **ask}).encode("utf-16"), "POST"),
        ("runs/delete-tag", {"run_id": run[1], "key": "dropforge.run"}, "POST"),
        ("runs/log-batch", {"run_id": run[1], "tags": [{"key": "mine", "value": "x"}, ask]}, "POST"),
        ("logged-models", {**logged, "tags": [own, ask]}, "POST"),
        (f"logged-models/{model}/tags", {"tags": [ask]}, "PATCH"),
        (f"logged-models/{model}/tags/dropforge.answer", None, "DELETE"),
        (f"logged-models/{model}/tags/dropforge%2Eask", None, "DELETE"),
    ]:
        assert mlflow.ask(TRAINER, path, body, method)[0] == 403, (path, body)
    login = basic(TRAINER.name, mlflow_accounts.password(TRAINER, mlflow.secrets))
    assert send_head(mlflow, "POST", "/api/2.0/mlflow/runs/set-tag", login, f"Content-Length: {9 << 20}") == 413
    for path, body, method in [
        ("runs/log-batch", {"run_id": run[1], "tags": [{"key": "mine", "value": "dropforge.ask"}]}, "POST"),
        (f"logged-models/{model}/tags", {"tags": [{"key": "dropforge.best", "value": "true"}]}, "PATCH"),
        (f"logged-models/{model}/tags/dropforge.best", None, "DELETE"),
    ]:
        assert mlflow.ask(TRAINER, path, body, method)[0] == 200, path
    assert mlflow.ask(PERSON, "runs/set-tag", {"run_id": run[1], **ask})[0] == 200
    status, found = mlflow.ask(PERSON, f"runs/get?run_id={run[1]}", method="GET")
    tags = {one["key"]: one["value"] for one in found["run"]["data"]["tags"] if "." in one["key"]}
    assert tags["dropforge.ask"] == "last register"
    assert "dropforge.run" not in tags


def test_airflow_removes_what_is_forgotten_and_makes_no_account(
    mlflow: Asked, run: tuple[str, str], model: str
) -> None:
    assert mlflow.ask(AIRFLOW, "users/create", {"username": "mine", "password": "password1234"})[0] == 403
    for path, body, method in [
        (f"-artifacts/artifacts/{run[0]}/{run[1]}/artifacts/model", b"bytes", "PUT"),
        (f"-artifacts/artifacts/{run[0]}/{run[1]}/artifacts/model", None, "DELETE"),
        ("registered-models/delete", {"name": model}, "DELETE"),
        ("runs/delete", {"run_id": run[1]}, "POST"),
        ("experiments/delete", {"experiment_id": run[0]}, "POST"),
    ]:
        assert mlflow.ask(AIRFLOW, path, body, method)[0] == 200, path


def test_what_is_not_there_is_missing_and_not_denied(
    mlflow: Asked, run: tuple[str, str], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow denies it to who is no administrator."""
    for name, value in mlflow_accounts.login(AIRFLOW, mlflow.secrets).items():
        monkeypatch.setenv(name, value)
    uri = mlflow.url
    assert tracking.champion(uri, "nobody") is None
    assert tracking.champion(uri, model) is None
    assert (
        mlflow.ask(AIRFLOW, "registered-models/alias", {"name": model, "alias": "champion", "version": "1"})[0] == 200
    )
    found = tracking.champion(uri, model)
    assert found is not None
    assert found.version == "1"
    assert versions.read(uri, "nobody").versions == ()
    with pytest.raises(DataError, match="there is none"):
        rollback._version(tracking.client(uri), "nobody", "1")
    assert [(one.number, one.aliases) for one in versions.read(uri, model).versions] == [("1", ("champion",))]


def test_a_checkpoint_that_a_person_deletes_ends_no_reporting(
    mlflow: Asked, run: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in mlflow_accounts.login(TRAINER, mlflow.secrets).items():
        monkeypatch.setenv(name, value)
    said: list[str] = []
    whereabouts = Tracking(mlflow.url, run[1], run[0])
    shown = [checkpoint(step, best=step == 1) for step in (1, 2)]
    models = Models(Rest(whereabouts.uri), whereabouts, said.append)
    models.show(shown)
    models.work()
    found = logged(mlflow, run)
    assert mlflow.ask(PERSON, f"logged-models/{found['step-1']}", method="DELETE")[0] == 200
    models.show([checkpoint(step, best=step == 2) for step in (1, 2)])  # the mark of the one that is gone goes too
    models.work()
    assert not models.waits()
    assert len(said) == 1
    assert "does not take checkpoint" in said[0]
    assert logged(mlflow, run).keys() == {"step-2"}


def test_accounts_are_as_the_secrets_say_after_each_start(tmp_path: Path) -> None:
    """A lost file of secrets is made anew, and rights that somebody widened are taken back."""
    server = Asked(tmp_path)
    server.start()
    before = server.secrets
    try:
        for account in (AIRFLOW, TRAINER):
            widened = {"username": account.name, "is_admin": True}
            assert server.ask(PERSON, "users/update-admin", widened, "PATCH")[0] == 200
        assert server.ask(TRAINER, "registered-models/create", {"name": "a"})[0] == 403  # as administrator too
        assert server.ask(AIRFLOW, "users/create", {"username": "mine", "password": "password1234"})[0] == 200
    finally:
        server.stop()
    secrets_path(tmp_path).unlink()
    server.start()
    try:
        for account in (PERSON, AIRFLOW, TRAINER):
            assert server.ask(account, "users/current", method="GET")[0] == 200
            old = account.name, mlflow_accounts.password(account, before)
            assert server.ask(old, "users/current", method="GET")[0] == 401
        assert server.ask(AIRFLOW, "users/create", {"username": "mine2", "password": "password1234"})[0] == 403
    finally:
        server.stop()


def test_each_part_has_its_own_account_and_the_others_none(tmp_path: Path) -> None:
    secrets = Secrets()
    found = {one.name: one for one in services(tmp_path, {"objects": 1, "mlflow": 2, "airflow": 3}, secrets)}
    users = {name: one.env.get("MLFLOW_TRACKING_USERNAME") for name, one in found.items()}
    airflow = {name: "airflow" for name in users if name.startswith("airflow")}
    assert users == {"database": None, "objects": None, "mlflow": None, "cluster": "trainer"} | airflow
    for name, one in found.items():
        held = {password for password in vars(secrets).values() if password in one.env.values()}
        mlflows = {secrets.mlflow_password, secrets.mlflow_airflow_password, secrets.mlflow_trainer_password}
        own = {"airflow": secrets.mlflow_airflow_password, "trainer": secrets.mlflow_trainer_password}.get(
            users[name] or ""
        )
        assert held & mlflows == ({own} if own else set())
