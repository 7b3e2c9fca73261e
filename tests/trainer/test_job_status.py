"""The progress of a training in the status of its TrainJob, as Kubeflow Trainer's server is told it."""

from __future__ import annotations

import datetime
import ipaddress
import json
import re
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from trainer.report import job_status
from trainer.report.job_status import CA, TOKEN, URL, JobStatus, status

NOW = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)


class Server:
    """Trainer's status server. :param answer: its HTTP status."""

    def __init__(self, folder: Path) -> None:
        self.asked: list[tuple[str, str, dict[str, Any]]] = []
        self.answer = 200
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.asked.append((self.path, self.headers["Authorization"], body))
                self.send_response(outer.answer)
                self.send_header("Content-Length", "0")
                if outer.answer == 307:
                    self.send_header("Location", f"https://127.0.0.1:{outer.server.server_port}/elsewhere")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "trainer")])
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(1)
            .not_valid_before(datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1))
            .not_valid_after(datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=1))
            .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
            .sign(key, hashes.SHA256())
        )
        self.ca, self.token, own = folder / "ca.crt", folder / "token", folder / "key"
        self.ca.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        plain = serialization.NoEncryption()
        own.write_bytes(
            key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, plain)
        )
        self.token.write_text("one\n")
        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.ca, own)
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def env(self) -> dict[str, str]:
        url = f"https://127.0.0.1:{self.server.server_port}/apis/trainer.kubeflow.org/v1alpha1/trainjobs/a/status"
        return {URL: url, TOKEN: str(self.token), CA: str(self.ca)}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    made = Server(tmp_path)
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_the_newest_progress_is_posted_with_the_token_of_the_moment(server: Server) -> None:
    said: list[str] = []
    made = JobStatus.from_env(server.env, said.append)
    assert made is not None
    made.tell(1, 8, 7.4, {"loss": 2.5})
    made.close()
    server.token.write_text("two")
    for step in range(2, 9):
        made.tell(step, 8, 8.0 - step, {"loss": 1.25})
    made.close()
    (path, first, body), *_, (_, last, end) = server.asked
    assert path == "/apis/trainer.kubeflow.org/v1alpha1/trainjobs/a/status"
    assert (first, last) == ("Bearer one", "Bearer two")
    assert body["trainerStatus"] | {"lastUpdatedTime": ""} == {
        "progressPercentage": 12,
        "estimatedRemainingSeconds": 7,
        "metrics": [{"name": "loss", "value": "2.5"}],
        "lastUpdatedTime": "",
    }
    assert end["trainerStatus"]["progressPercentage"] == 100
    assert said == []


@pytest.mark.parametrize("fault", ["refused", "redirect", "token", "torn", "plain"])
def test_a_server_that_does_not_take_it_is_told_of_once_and_stops_nothing(server: Server, fault: str) -> None:
    said: list[str] = []
    env = server.env
    if fault == "token":
        server.token.unlink()
    elif fault == "torn":
        server.token.write_text("one\ntwo")
    elif fault == "plain":
        env[URL] = env[URL].replace("https", "http")
    else:
        server.answer = {"refused": 403, "redirect": 307}[fault]
    made = JobStatus.from_env(env, said.append)
    assert made is not None
    for step in range(3):
        made.tell(step, 3, 1.0, {})
        made.close()
    assert len(said) == 1
    assert "does not show this training's progress" in said[0]
    assert "one" not in re.findall(r"\w+", said[0])
    assert not [path for path, *_ in server.asked if path == "/elsewhere"]


def test_where_no_server_is_named_none_is_told() -> None:
    assert JobStatus.from_env({}, print) is None
    assert JobStatus.from_env({URL: "https://a/b", TOKEN: "", CA: "/ca"}, print) is None


@pytest.mark.parametrize(
    ("step", "steps", "left", "percent", "seconds"),
    [(0, 0, 0.0, 0, 0), (5, 4, 1.0, 100, 1), (1, 3, float("inf"), 33, None), (1, 3, float("nan"), 33, None)],
)
def test_amounts_stay_in_the_bounds_of_the_api(
    step: int, steps: int, left: float, percent: int, seconds: int | None
) -> None:
    found = status(step, steps, left, {"x" * 70: 1 / 3}, NOW)["trainerStatus"]
    assert (found["progressPercentage"], found.get("estimatedRemainingSeconds")) == (percent, seconds)
    assert found["metrics"] == [{"name": "x" * 64, "value": "0.333333"}]
    assert found["lastUpdatedTime"] == "2026-01-02T03:04:05Z"
    assert job_status.URL == "KUBEFLOW_TRAINER_SERVER_URL"
