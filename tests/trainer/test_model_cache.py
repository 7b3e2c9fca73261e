"""A node's pods fetch a base model once, read it where it lies, and lose nothing by each other's deaths."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ReadTimeoutError

from dropforge.errors import RecipeError
from dropforge.run import RunSpec
from dropforge.store import FolderStore, S3Store
from tests.hub_server import Hub, open_hub
from trainer.asked import main
from trainer.config import read_settings
from trainer.data import node_cache
from trainer.data.node_cache import NodeCache, NoRoomError
from trainer.evaluate import evaluation_rows, measure_model
from trainer.model import build
from trainer.model.pyfunc_loader import folder_digest
from trainer.rank import run
from trainer.report.console import Console
from trainer.restore import open_checkpoints
from trainer.state.stop import PreemptedError, StopSignal

from .ranks_loop import make_base
from .toy import Toy

MODEL = "some/model"
INDEX = "model.safetensors.index.json"
ONE, TWO = "model-1-of-2.safetensors", "model-2-of-2.safetensors"
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b'{"a": 1}',
    INDEX: json.dumps({"weight_map": {"a": ONE, "b": TWO}}).encode(),
    ONE: bytes(range(256)) * 3000,
    TWO: bytes(reversed(range(256))) * 3000,
}
ROOM = 10_000_000

#: A pod: says what it is told, has the files in its folder, tells their digests and holds them until it reads a line.
POD = """
import hashlib, json, sys
from pathlib import Path
from trainer.data.hub import Through, fetch_from_hub
from trainer.data.node_cache import NodeCache

cache, folder, commit, room = sys.argv[1:]
say = lambda line: print(line, flush=True)
with NodeCache(Path(cache), int(room), say) as node:
    found = fetch_from_hub("some/model", commit, through=Through(node, Path(folder)))
    say(json.dumps({path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in found.iterdir()}))
    sys.stdin.readline()
"""


class Pod:
    """A process that fetches the model, with a client's cache of its own, as a pod has one."""

    def __init__(self, hub: Hub, cache: Path, scratch: Path, room: int = ROOM) -> None:
        self.folder = scratch / "base"
        own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(scratch / "home"), "HF_HUB_DISABLE_XET": "1"}
        commit = hub.repositories[MODEL].refs["main"]
        self.process = subprocess.Popen(
            [sys.executable, "-c", POD, str(cache), str(self.folder), commit, str(room)],
            env={**os.environ, **own, "PYTHONPATH": str(Path(__file__).parents[2])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def lines(self, last: str) -> list[str]:
        """What it says until a line that holds this."""
        assert self.process.stdout is not None
        said: list[str] = []
        for line in self.process.stdout:
            said.append(line.strip())
            if last in line:
                return said
        raise AssertionError(f"it ended with {self.process.wait()}, and said {said}")

    def end(self) -> None:
        self.process.communicate("\n", timeout=30)
        assert self.process.returncode == 0


DIGESTS = {name: hashlib.sha256(data).hexdigest() for name, data in FILES.items()}
TOLD = f'"{ONE}": "{DIGESTS[ONE]}"'


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    made = Hub()
    made.model(MODEL, FILES)
    with open_hub(made, tmp_path / "client", monkeypatch):
        monkeypatch.setattr("trainer.data.hub.PAUSE", 0.0)
        yield made


class Node:
    """A node's cache in this process."""

    def __init__(self, hub: Hub, cache: Path, scratch: Path) -> None:
        self.hub, self.cache, self.scratch = hub, cache, scratch
        self.said: list[str] = []
        self.count = 0

    @contextmanager
    def pod(self, room: int = ROOM, model: str | None = None, **more: Any) -> Iterator[Path]:
        """The folder of a base model, held."""
        self.count += 1
        commit = self.hub.repositories[MODEL].refs["main"] if model is None else None
        with NodeCache(self.cache, room, self.said.append) as node:
            yield build.fetch_base(model or MODEL, commit, self.scratch / f"pod-{self.count}", node=node, **more)

    def entry(self, name: str) -> Path:
        return self.cache / DIGESTS[name][:2] / DIGESTS[name]

    def whole(self) -> bool:
        return all(self.entry(name).is_file() for name in FILES)


@pytest.fixture
def node(hub: Hub, tmp_path: Path) -> Node:
    return Node(hub, tmp_path / "cache", tmp_path)


def read(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FolderStore:
    """The model in a store, whatever address it is asked for."""
    store = FolderStore(tmp_path / "bucket")
    for name, data in FILES.items():
        store.put(name, data)
    monkeypatch.setattr(build, "open_store", lambda uri: store)
    return store


def leftovers(cache: Path) -> list[str]:
    return [str(path) for path in cache.rglob("*") if path.suffix == ".part" or path.name == "lock"]


def test_the_next_pod_asks_no_hub_and_copies_nothing(hub: Hub, node: Node) -> None:
    with node.pod() as folder:
        assert read(folder) == FILES
    hub.asked.clear()
    hub.status = 500
    with node.pod() as folder:
        assert read(folder) == FILES
        assert (folder / ONE).readlink() == node.entry(ONE)
    assert hub.asked == []
    assert leftovers(node.cache) == []
    with node.pod(weights=False) as folder:  # as a pod that tokenises
        assert set(read(folder)) == {"config.json", "tokenizer.json", INDEX}
    assert not any("not used" in line for line in node.said)


def test_a_file_that_changed_in_the_cache_is_fetched_anew_and_no_other(hub: Hub, node: Node) -> None:
    with node.pod():
        pass
    node.entry(TWO).write_bytes(bytes(len(FILES[TWO])))  # as long as it was
    with node.pod() as folder:
        assert read(folder) == FILES
    assert [hub.gets(name) for name in ("config.json", ONE, TWO)] == [1, 1, 2]
    assert sum("is not what was written" in line for line in node.said) == 1


def test_two_pods_at_once_fetch_it_once(hub: Hub, tmp_path: Path) -> None:
    waits = threading.Event()

    def hold(name: str) -> None:
        if name == TWO:
            waits.wait(20)

    hub.hold = hold
    pods = [Pod(hub, tmp_path / "cache", tmp_path / name) for name in "ab"]
    said: list[str] = []

    def listen(pod: Pod) -> None:
        for last in ("", TOLD):  # the first line is that of the pod that waits, or the last one of the other
            lines = pod.lines(last)
            said.extend(lines)
            if any("another pod of this node fetches" in line for line in lines):
                waits.set()
            if TOLD in lines[-1]:
                return

    listeners = [threading.Thread(target=listen, args=(pod,)) for pod in pods]
    for listener in listeners:
        listener.start()
    for listener in listeners:
        listener.join(60)
    for pod in pods:
        pod.end()
    assert [hub.gets(name) for name in FILES] == [1] * len(FILES)
    assert [json.loads(line) for line in said if TOLD in line] == [DIGESTS, DIGESTS]


def test_a_pod_killed_in_the_middle_leaves_what_was_whole_and_the_next_goes_on(
    hub: Hub, node: Node, tmp_path: Path
) -> None:
    reached, go = threading.Event(), threading.Event()

    def hold(name: str) -> None:
        if name == TWO:
            reached.set()
            go.wait(60)

    hub.hold = hold
    pod = Pod(hub, node.cache, tmp_path / "killed")
    assert reached.wait(60)
    pod.process.kill()
    pod.process.wait()
    go.set()
    assert node.entry(ONE).is_file()
    assert not node.entry(TWO).exists()
    with node.pod() as folder:
        assert read(folder) == FILES
    assert (hub.gets(ONE), hub.gets(TWO)) == (1, 2)
    assert leftovers(node.cache) == []


def test_what_a_pod_reads_is_not_removed_and_what_none_reads_goes_first(hub: Hub, node: Node, tmp_path: Path) -> None:
    with node.pod():
        pass
    other = Pod(hub, node.cache, tmp_path / "other")
    other.lines(TOLD)
    tokens = tmp_path / "tokens"
    tokens.write_bytes(b"x" * 600_000)
    digest = hashlib.sha256(tokens.read_bytes()).hexdigest()
    small = NodeCache(node.cache, 1_600_000, node.said.append)  # the model and no tokens
    small.give(digest, tokens)
    assert "beside what is in use" in node.said[-1]
    assert node.whole()
    other.end()
    small.give(digest, tokens)
    assert not node.whole()
    assert small.take(digest, tmp_path / "taken")


def test_the_same_bytes_under_another_name_are_not_put_over_those_that_a_pod_reads(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies there then would be held by nobody."""
    bucket(tmp_path, monkeypatch)
    with node.pod(model="s3://bucket/a") as read_here:
        with node.pod(model="s3://bucket/b") as folder:
            assert read(folder) == FILES
        with pytest.raises(NoRoomError):
            NodeCache(node.cache, 1_600_000, node.said.append).make_room(600_000)
        assert node.whole()
        node.entry(TWO).write_bytes(b"broken under its readers")
        with node.pod(model="s3://bucket/b") as folder:
            assert read(folder) == FILES
        assert (read_here / TWO).read_bytes() == FILES[TWO]
    assert leftovers(node.cache) == []


def test_of_a_model_that_lacks_a_file_the_others_are_looked_through_once(
    hub: Hub, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    with node.pod():
        pass
    node.entry(TWO).unlink()
    looked: list[str] = []
    digest = node_cache._digest

    def watched(number: int) -> str:
        looked.append(digest(number))
        return looked[-1]

    monkeypatch.setattr(node_cache, "_digest", watched)
    with node.pod() as folder:
        assert read(folder) == FILES
    assert sorted(looked) == sorted(DIGESTS[name] for name in FILES if name != TWO)
    assert hub.gets(ONE) == 1


def test_a_pod_that_is_asked_to_stop_looks_through_no_file(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    with node.pod():
        pass
    looked: list[int] = []

    def stop() -> None:
        raise PreemptedError(None)

    monkeypatch.setattr(node_cache, "_digest", looked.append)
    with pytest.raises(PreemptedError), node.pod(check=stop):
        pass
    assert looked == []


def test_a_model_that_has_no_room_comes_as_without_a_cache(node: Node) -> None:
    with node.pod(room=1_000_000) as folder:
        assert read(folder) == FILES
        assert not str(folder).startswith(str(node.cache))
    assert "compute.data_cache_gb" in node.said[-1]
    assert not node.entry(ONE).exists()


def test_a_disk_that_fails_is_told_and_done_without(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    download = huggingface_hub.hf_hub_download

    def full(*names: Any, local_dir: Path | None = None, **more: Any) -> str:
        if local_dir is not None and TWO in names:
            raise OSError(errno.ENOSPC, "No space left on device")
        return str(download(*names, local_dir=local_dir, **more))

    monkeypatch.setattr("huggingface_hub.hf_hub_download", full)
    with node.pod() as folder:
        assert read(folder) == FILES
    assert "No space left on device" in node.said[-1]
    assert leftovers(node.cache) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting takes root")
def test_a_small_disk_and_one_that_can_only_be_read(hub: Hub, node: Node) -> None:
    node.cache.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(node.cache)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("this machine's root may not mount")
    try:
        with node.pod() as folder:
            assert read(folder) == FILES
        assert "do not fit" in node.said[-1]
        subprocess.run(["mount", "-o", "remount,size=8m", str(node.cache)], check=True)
        (node.scratch / "client").rename(node.scratch / "gone")  # where the files came to instead
        with node.pod():
            pass
        assert node.whole()
        subprocess.run(["mount", "-o", "remount,ro", str(node.cache)], check=True)
        hub.status = 500
        with node.pod() as folder:
            assert read(folder) == FILES
    finally:
        subprocess.run(["umount", "-l", str(node.cache)], check=True)


def test_offline_the_cache_is_enough_and_an_empty_one_is_refused(
    hub: Hub, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(RecipeError, match="HF_HUB_OFFLINE forbids"), node.pod():
        pass
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with node.pod():
        pass
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    hub.asked.clear()
    with node.pod() as folder:
        assert read(folder) == FILES
    assert hub.asked == []


def test_after_the_training_the_base_of_a_prefix_is_read_in_the_cache(hub: Hub, toy: Toy, tmp_path: Path) -> None:
    """By the export, by an evaluation of the model and by what somebody asks for: no hub or token may be left."""
    made = Path(make_base(tmp_path / "base"))
    commit = hub.repositories[MODEL].commit({path.name: path.read_bytes() for path in made.iterdir()})
    train = {"method": "prefix", "prefix": {"tokens": 4}, "sequence_length": 60, "max_steps": 2, "checkpoint_every": 2,
             "tokens_per_step": 240}  # fmt: skip
    base = {"model": MODEL, "revision": commit, "scratch": None}
    cache = {"data_cache": str(tmp_path / "cache"), "data_cache_gb": 1}
    uri = toy.run("prefix", base=base, train=train, compute=cache)
    run(uri, StopSignal(), Console(quiet=True))
    assert hub.gets("model.safetensors") == 1
    hub.asked.clear()
    hub.status = 500
    spec = RunSpec.from_json(Path(uri).read_bytes())
    settings = read_settings(spec.recipe)
    rows = evaluation_rows(spec, settings)
    found = measure_model("model", f"{spec.root}/model", rows, settings, StopSignal(), Console(quiet=True))
    assert found.figures["eval/loss"] > 0
    [seal] = open_checkpoints(spec, print).seals()
    for verb in ("evaluate", "export"):
        asked = {"run": uri, "step": 2, "digest": seal.digest, "verb": verb, "to": f"{spec.root}/exports/step-2"}
        order = tmp_path / verb / "order.json"
        order.parent.mkdir()
        order.write_text(json.dumps(asked))
        assert main([str(order)], {"TERMINATION_LOG": str(tmp_path / "word")}) == 0
    assert hub.asked == []


def test_hidden_files_of_a_repository_are_left_out_and_long_names_are_kept(hub: Hub, node: Node) -> None:
    files = {**FILES, f"{'x' * 230}.json": b"{}"}
    hub.repositories[MODEL].commit({**files, ".eslintrc.json": b"{}"})
    with node.pod() as folder:
        assert read(folder) == files
    hub.asked.clear()
    with node.pod() as folder:
        assert read(folder) == files
    assert hub.asked == []


def test_of_a_folder_in_s3_a_pod_without_the_cache_has_the_same_files(
    node: Node, tmp_path: Path, s3_store: S3Store
) -> None:
    store = S3Store(s3_store.bucket, "model", s3_store.client)
    for name, data in {**FILES, "": b"", ".hidden.json": b"{}"}.items():  # the console marks a folder so
        store.put(name, data)
    (tmp_path / "local").mkdir()
    for name in (*FILES, ".hidden.json"):
        store.download(name, tmp_path / "local" / name)
    with node.pod(model=store.uri) as folder:
        assert read(folder) == FILES
        plain = build.fetch_base(store.uri, None, tmp_path / "plain")
        assert read(plain) == FILES
        assert len({folder_digest(found) for found in (folder, plain, tmp_path / "local")}) == 1


def test_a_note_that_names_files_elsewhere_is_no_note(hub: Hub, node: Node, tmp_path: Path) -> None:
    with node.pod():
        pass
    note = next(node.cache.glob("??/*.json"))
    values = json.loads(note.read_text())
    values["files"]["../../escaped"] = values["files"]["config.json"]
    note.write_text(json.dumps(values))
    with node.pod() as folder:
        assert read(folder) == FILES
    assert not list(tmp_path.rglob("escaped"))
    assert hub.gets(ONE) == 1


@pytest.mark.parametrize("note", ['{"files": {"a": {"bytes": Infinity, "sha256": "%s"}}}' % ("a" * 64), "[" * 200_000])
def test_a_note_that_no_trainer_writes_is_none(hub: Hub, node: Node, note: str) -> None:
    with node.pod():
        pass
    next(node.cache.glob("??/*.json")).write_text(note)
    with node.pod() as folder:
        assert read(folder) == FILES


def test_a_store_that_does_not_answer_is_no_broken_disk(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of which all would be fetched once more, around the cache."""
    asked: list[str] = []

    def slow(_: FolderStore, key: str, path: Path, etag: str | None = None) -> None:
        asked.append(key)
        raise ReadTimeoutError(endpoint_url="http://s3")

    bucket(tmp_path, monkeypatch)
    monkeypatch.setattr(FolderStore, "download", slow)
    with pytest.raises(ReadTimeoutError), node.pod(model="s3://bucket/model"):
        pass
    assert len(asked) == 1
    assert not any("not used" in line for line in node.said)
    assert leftovers(node.cache) == []


def test_a_model_in_s3_is_known_by_its_objects_tags(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = bucket(tmp_path, monkeypatch)
    fetched: list[str] = []
    download = FolderStore.download

    def watched(self: FolderStore, key: str, path: Path, etag: str | None = None) -> None:
        fetched.append(key)
        download(self, key, path, etag)

    monkeypatch.setattr(FolderStore, "download", watched)
    with node.pod(model="s3://bucket/model") as folder:
        assert read(folder) == FILES
    fetched.clear()
    with node.pod(model="s3://bucket/model") as folder:
        assert read(folder) == FILES
    assert fetched == []
    store.put(TWO, b"another model")
    with node.pod(model="s3://bucket/model") as folder:
        assert read(folder) == {**FILES, TWO: b"another model"}

    def replaced(self: FolderStore, key: str, path: Path, etag: str | None = None) -> None:
        store.put(key, b"a third one")
        download(self, key, path, etag)

    store.put(ONE, b"to be fetched")
    monkeypatch.setattr(FolderStore, "download", replaced)
    with (
        pytest.raises(RecipeError, match="was replaced or removed while it was fetched"),
        node.pod(model="s3://bucket/model"),
    ):
        pass
