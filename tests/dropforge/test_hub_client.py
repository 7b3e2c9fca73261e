"""A hub that means us ill writes and reads no file, fills neither memory nor disk, takes no hour and no token."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from dropforge.errors import RecipeError
from dropforge.hub import MOST_FILES, StrangeError, UnreachableError, asking, check_listing, fetch_config, pin, storage
from dropforge.hub_client import LONGEST_PAUSE, StrangeAnswerError, bound_requests, check_headers, within
from tests.hub_server import Hub, open_hub, serve

MODEL = "some/model"
REPOSITORY = Path(__file__).parents[2]
FILES = {"config.json": b'{"model_type": "llama"}', "model.safetensors": b"weights"}
STRANGE = "base model some/model.*: the hub answers what no hub does"

Answer = Callable[[BaseHTTPRequestHandler], None]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    made = Hub()
    made.model(MODEL, FILES)
    with open_hub(made, tmp_path / "cache", monkeypatch):
        yield made


def commit_of(hub: Hub) -> str:
    return hub.repositories[MODEL].refs["main"]


def gives(body: bytes, **headers: str) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        for name, value in {"Content_Length": str(len(body)), **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def never_ends(piece: bytes, pause: float = 0) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "application/json")
        handler.end_headers()
        while True:  # until the client hangs up
            handler.wfile.write(piece)
            time.sleep(pause)

    return answer


@pytest.mark.parametrize("header", ["ETag", "X-Linked-Etag", "X-Repo-Commit"])
@pytest.mark.parametrize("place", ["{}/thesis.txt", "../../../../own/thesis.txt", "new.txt/../../../../own/new.txt"])
def test_a_digest_or_commit_that_is_a_path_touches_no_file(hub: Hub, tmp_path: Path, header: str, place: str) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "thesis.txt").write_text("ten years of work")
    path = place.format(own)
    hub.headers = {header: path if header == "X-Repo-Commit" else f'"{path}"'}
    for ask in (lambda: pin(MODEL), lambda: fetch_config(MODEL, commit_of(hub))):
        with pytest.raises(StrangeError, match=f"{STRANGE}.*a (digest|commit) that is none"):
            ask()
    assert {found.name: found.read_text() for found in own.iterdir()} == {"thesis.txt": "ten years of work"}
    assert hub.gets("config.json") == 0


def test_a_link_out_of_the_cache_is_not_read(hub: Hub, tmp_path: Path) -> None:
    """An older client may have made one."""
    secret = tmp_path / "secret"
    secret.write_text("{}")
    folder = storage(MODEL) / "snapshots" / commit_of(hub)
    folder.mkdir(parents=True)
    (folder / "config.json").symlink_to(secret)
    with pytest.raises(StrangeError, match=r"config\.json became a link out of"):
        fetch_config(MODEL, commit_of(hub))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (never_ends(b" " * (1 << 16)), "more than the 16,777,216 bytes"),
        (gives(b"", Content_Length="9" * 15), "more than the 16,777,216 bytes"),
        (gives(b"\x1f\x8b\x08", Content_Encoding="gzip"), "it packs what we asked for as it is"),
    ],
)
def test_an_answer_without_end_ends(hub: Hub, answer: Answer, words: str) -> None:
    hub.instead = {f"/api/models/{MODEL}": answer}
    with pytest.raises(StrangeError, match=f"{STRANGE}.*{words}"):
        pin(MODEL)


@pytest.mark.parametrize(
    ("pages", "words"), [(b"[]", "40 answers"), (b"[%s]" % (b" " * (15 << 20)), "268,435,456 bytes")]
)
def test_a_list_without_end_ends(hub: Hub, pages: bytes, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each page is small and quick, and names another one."""
    from huggingface_hub import HfApi

    monkeypatch.setattr("dropforge.hub_client.MOST_ANSWERS", 40)
    path = f"/api/datasets/{MODEL}/tree/main"
    hub.instead = {path: gives(pages, Link=f'<{hub.url}{path}>; rel="next"')}
    bound_requests()
    with pytest.raises(StrangeError, match=f"{STRANGE}.*{words}.* and do not end"), asking(MODEL):
        list(HfApi(endpoint=hub.url).list_repo_tree(MODEL, repo_type="dataset"))
    with asking(MODEL):  # the next thing that is asked for begins anew
        assert pin(MODEL)


def test_a_file_without_end_ends_at_its_bound(hub: Hub) -> None:
    hub.instead = {"/config.json": never_ends(b" " * (1 << 16))}
    with pytest.raises(StrangeError, match=f"{STRANGE}.*more than the 8,388,608 bytes"):
        fetch_config(MODEL, commit_of(hub))


def test_bytes_that_come_one_by_one_end(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dropforge.hub_client.PATIENCE", 0.1)
    hub.instead = {f"/api/models/{MODEL}": never_ends(b" ", 0.02)}
    with pytest.raises(StrangeError, match=f"{STRANGE}.*and does not end"):
        pin(MODEL)


def test_what_the_reader_does_with_the_bytes_takes_what_it_takes(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import get_session

    monkeypatch.setattr("dropforge.hub_client.PATIENCE", 0.1)
    hub.instead = {"/rows": gives(b"x" * (3 << 16))}
    bound_requests()
    came = 0
    with within(1 << 20), get_session().stream("GET", f"{hub.url}/rows") as answer:
        for piece in answer.iter_bytes(1 << 16):
            time.sleep(0.05)
            came += len(piece)
    assert came == 3 << 16


@pytest.mark.parametrize(
    ("told", "kept"),
    [("7", "7"), ("999999999", "60"), ("9" * 5000, "60"), ("Wed, 21 Oct 2065 07:28:00 GMT", "60"), ("-1", "60")],
)
def test_a_hub_s_pause_is_bounded(told: str, kept: str) -> None:
    headers = {"Retry-After": told, "ratelimit": f'"api";r=0;t={told}'}
    check_headers(headers, head=False, final=True)
    assert headers["Retry-After"] == kept
    if told.isdecimal():
        assert headers["ratelimit"] == f'"api";r=0;t={kept}'
    assert LONGEST_PAUSE == 60


def test_a_redirects_own_digest_is_no_ones_and_a_file_s_is_checked() -> None:
    right = {"ETag": 'W/"0f"', "X-Linked-Etag": f'"{"a" * 64}"'}
    check_headers(right, head=True, final=False)
    assert right == {"X-Linked-Etag": f'"{"a" * 64}"'}
    check_headers({"ETag": '"md5-of-parts-7"'}, head=False, final=True)  # of a file's bytes, where nobody reads it
    with pytest.raises(StrangeAnswerError):
        check_headers({"ETag": f'"{"a" * 32}"'}, head=True, final=True)


def test_the_token_stays_with_the_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import get_session

    monkeypatch.setenv("HF_TOKEN", "hf_ours")
    other = Hub()
    server = serve(other)
    try:
        # What has the client ask another host for a right to the file.
        hub.headers = {"X-Xet-Hash": "c" * 64, "Link": f'<{other.url}/auth>; rel="xet-auth"'}
        assert (fetch_config(MODEL, commit_of(hub)) / "config.json").read_bytes() == FILES["config.json"]
        assert (hub.tokens, other.asked) == ({"hf_ours"}, [])
        login = {"Authorization": "Bearer hf_ours"}
        with within(0), pytest.raises(StrangeAnswerError, match=r"it sends us to .* with our token"):
            get_session().get(f"{other.url}/auth", headers=login)
        assert other.asked == []
        get_session().get(f"{other.url}/auth", headers=login)  # what others ask for with the client is theirs
        bound_requests(other.url)
        with within(0):
            get_session().get(f"{other.url}/auth", headers=login)
        assert len(other.asked) == 2
    finally:
        server.shutdown()
        server.server_close()


def test_a_client_that_is_made_anew_is_bounded_too(hub: Hub) -> None:
    from huggingface_hub import close_session, get_session

    bound_requests()
    bound_requests()
    before = get_session()
    close_session()
    assert get_session() is not before
    hooks = get_session().event_hooks
    assert [hook.__module__ for hook in hooks["response"]] == ["dropforge.hub_client"]
    assert [hook.__module__ for hook in hooks["request"]].count("dropforge.hub_client") == 1


@pytest.mark.parametrize(
    "told",
    [
        b"[1, 2]",
        b"null",
        b"{}",
        b"7",
        b"[" * 100_000,
        b"<html>",
        b'{"id": 5, "sha": "' + b"a" * 40 + b'", "siblings": [7]}',
        b'{"id": "a/b", "sha": "' + b"a" * 40 + b'", "siblings": [{"rfilename": ["config.json"], "size": "x"}]}',
        b'{"id": "a/b", "sha": "' + b"a" * 40 + b'", "lastModified": "never"}',
        b'{"id": "a/b", "sha": ' + b"9" * 5000 + b"}",
    ],
)
@pytest.mark.parametrize("status", [200, 400])
def test_json_of_no_hub_is_told_as_such(hub: Hub, told: bytes, status: int) -> None:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("Content-Type", "application/json")
        handler.end_headers()
        handler.wfile.write(told)

    hub.instead = {f"/api/models/{MODEL}": answer}
    with pytest.raises(
        StrangeError if status == 200 else UnreachableError, match=r"the hub (does not answer|answers what)"
    ):
        pin(MODEL)


@pytest.mark.parametrize("size", [None, "10", -1, True, 1.5])
def test_a_file_that_is_read_has_a_size(size: Any) -> None:
    listed: dict[str, Any] = {"config.json": 2, "model.safetensors": 10, "folder/x.json": None}
    check_listing(listed, "it")
    for name in listed:
        if size is not None or "/" not in name:
            with pytest.raises(StrangeAnswerError):
                check_listing({**listed, name: size}, "it")


def test_a_model_of_too_many_files_is_refused() -> None:
    listed = {"config.json": 2, "model.safetensors": 10}
    check_listing({**listed, **{f"more/{number}.json": 1 for number in range(3 * MOST_FILES)}}, "it")
    with pytest.raises(RecipeError, match=r"it has 2,002 files that are read, and a model may have 2,000"):
        check_listing({**listed, **{f"{number}.json": 1 for number in range(MOST_FILES)}}, "it")


def test_all_that_a_hub_gives_comes_by_the_places_that_bound_it() -> None:
    allowed = {f"dropforge/{name}.py" for name in ("hub", "hub_client", "hub_data")} | {"trainer/data/hub.py"}
    calls = re.compile(r"\b(snapshot_download|hf_hub_download|HfApi|HfFileSystem|get_session)\b")
    found = {
        str(path.relative_to(REPOSITORY))
        for package in ("dropforge", "curation", "trainer", "plugins", "dags", "images")
        for path in (REPOSITORY / package).rglob("*.py")
        if calls.search(path.read_text())
    }
    assert found <= allowed
    assert "trainer/data/hub.py" in found
