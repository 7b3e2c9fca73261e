"""Data sets of the hub: the dataset of an upload of the same rows, pinned, checked, and each no with its word."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

import curation
from dropforge.dataset import Manifest
from dropforge.drop import Drop
from dropforge.errors import DataError, RecipeError
from dropforge.hub import UnreachableError
from dropforge.hub_data import HubFile, is_elsewhere, named_files
from dropforge.recipe import Recipe
from dropforge.recipe_data import Source
from dropforge.sources import pin
from dropforge.store import FolderStore
from tests.hub_server import Hub, open_hub, serve

NAME = "some/rows"
CARD = b"""---
configs:
- config_name: tables
  default: true
  data_files:
  - {split: train, path: tables/*.parquet}
- config_name: lines
  data_files:
  - {split: train, path: lines/train.jsonl}
  - {split: test, path: lines/test.jsonl}
---
# Rows
"""


def _parquet(lines: list[bytes]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist([json.loads(line) for line in lines]), sink)
    return sink.getvalue()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    made = Hub()
    with open_hub(made, tmp_path / "hub-cache", monkeypatch):
        monkeypatch.setattr("datasets.config.HF_ENDPOINT", made.url)
        address = f"{made.url}/datasets/{{repo_id}}/resolve/{{revision}}/{{path}}"
        monkeypatch.setattr("datasets.config.HUB_DATASETS_URL", address)
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "datasets-cache"))
        monkeypatch.setattr("datasets.config.HF_UPDATE_DOWNLOAD_COUNTS", False)
        yield made


@pytest.fixture
def lines(hub: Hub, texts: Callable[..., list[bytes]]) -> list[bytes]:
    """Eighty rows, which the data set has as two tables and as lines."""
    found = texts(80)
    files = {"README.md": CARD, "tables/0.parquet": _parquet(found[:30]), "tables/1.parquet": _parquet(found[30:])}
    files |= {"lines/train.jsonl": b"\n".join(found), "lines/test.jsonl": b"\n".join(texts(5, 1000))}
    hub.data_set(NAME, files)
    return found


@pytest.fixture
def run(store: FolderStore, recipe: Callable[..., Recipe], tmp_path: Path) -> Callable[..., Manifest]:
    def run(drop: Drop, **data: Any) -> Manifest:
        return curation.curate(store, drop, recipe(**data), workdir=tmp_path / f"work-{drop.id}")

    return run


def source(**more: Any) -> Source:
    return Source.model_validate({"hub": NAME, **more})


def test_it_is_the_dataset_of_an_upload_of_its_rows(
    store: FolderStore, hub: Hub, lines: list[bytes], upload: Callable[..., Drop], run: Callable[..., Manifest]
) -> None:
    uploaded = run(upload({"a.jsonl": b"\n".join(lines)}))
    tables, text = pin(store, source(), "fam"), pin(store, source(config="lines"), "fam")
    commit = hub.repositories[f"datasets/{NAME}"].refs["main"]
    assert tables.root == text.root == f"hf://datasets/{NAME}@{commit}/"
    assert [file.key for file in tables.files] == ["tables/0.parquet", "tables/1.parquet"]
    assert [file.content.partition(":")[0] for file in (*tables.files, *text.files)] == ["sha256", "sha256", "git"]
    assert run(tables).digest == run(text).digest == uploaded.digest
    assert len(pin(store, source(config="lines", split="test"), "fam").files) == 1


def test_a_branch_that_moves_changes_nothing_that_was_pinned(
    store: FolderStore, hub: Hub, lines: list[bytes], texts: Callable[..., list[bytes]], run: Callable[..., Manifest]
) -> None:
    before = pin(store, source(config="lines"), "fam")
    repository = hub.repositories[f"datasets/{NAME}"]
    old = repository.refs["main"]
    repository.commit({**repository.commits[old], "lines/train.jsonl": b"\n".join(texts(9, 500))})
    assert run(before).counts["input"] == len(lines)
    assert pin(store, source(config="lines"), "fam").id != before.id
    assert pin(store, source(config="lines", revision=old), "fam") == before
    with pytest.raises(DataError, match=r"its files have the id .* `data\.source\.id`"):
        pin(store, source(config="lines", id=before.id), "fam")


def test_without_a_description_files_are_found_by_their_names(
    store: FolderStore, hub: Hub, texts: Callable[..., list[bytes]]
) -> None:
    hub.data_set(NAME, {"data/train-0.jsonl": b"\n".join(texts(5)), "data/test-0.jsonl": b"", "notes.pdf": b"x"})
    assert [file.key for file in pin(store, source(), "fam").files] == ["data/train-0.jsonl"]


def test_a_limit_fetches_no_more_files_than_it_needs(
    store: FolderStore, hub: Hub, lines: list[bytes], run: Callable[..., Manifest]
) -> None:
    made = run(pin(store, source(), "fam"), data={"limit_rows": 20})
    assert made.counts["input"] == 20
    assert (hub.gets("0.parquet"), hub.gets("1.parquet")) == (1, 0)


def test_other_bytes_than_those_that_were_pinned_are_refused(
    store: FolderStore, hub: Hub, lines: list[bytes], run: Callable[..., Manifest]
) -> None:
    hub.spoilt = {"tables/1.parquet": 1, "lines/train.jsonl": 1}
    for asked, name in (({}, "tables/1.parquet"), ({"config": "lines"}, "lines/train.jsonl")):
        with pytest.raises(DataError, match=f"file '{name}' of the drop"):
            run(pin(store, source(**asked), "fam"))


def test_a_connection_that_is_cut_is_taken_up_or_told_as_such(
    store: FolderStore, hub: Hub, lines: list[bytes], run: Callable[..., Manifest]
) -> None:
    drop = pin(store, source(), "fam")
    hub.cuts = {"tables/0.parquet": 1}
    try:
        made = run(drop)
    except UnreachableError:
        made = run(drop)
    assert made.counts["input"] == len(lines)
    hub.status = 503
    with pytest.raises(UnreachableError, match="data set some/rows: the hub does not answer"):
        pin(store, source(), "fam")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"hub": "no/such"}, r"`data\.source\.hub`: the hub has no no/such, or hides it from us"),
        ({"revision": "no-such"}, r"`data\.source\.revision`: the hub has no some/rows at no-such"),
        ({"config": "no-such"}, r"`data\.source\.config`: .*tables.*Name a configuration"),
        ({"split": "validation"}, r"`data\.source\.split`: some/rows has no split 'validation', but train"),
    ],
)
def test_what_is_not_there(store: FolderStore, hub: Hub, lines: list[bytes], asked: dict[str, str], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        pin(store, source(**asked), "fam")


def _card(path: str) -> bytes:
    return (
        f"configs:\n- config_name: default\n  data_files:\n  - {{split: train, path: ['a.jsonl', '{path}']}}\n".encode()
    )


@pytest.mark.parametrize("file", ["README.md", ".huggingface.yaml"])
@pytest.mark.parametrize(
    "path",
    [
        "{url}/latest/x.jsonl",
        "zip://*.jsonl::{url}/x.zip",
        "simplecache::{url}/x.jsonl",
        "hf://datasets/other/rows@main/a.jsonl",
        "s3://other/secret/*.jsonl",
        "/**/*.nothing",
        "{folder}/*.jsonl",
        "file:{folder}/own.jsonl",
    ],
)
def test_files_of_another_place_are_refused_before_anything_looks_there(
    store: FolderStore, hub: Hub, texts: Callable[..., list[bytes]], tmp_path: Path, file: str, path: str
) -> None:
    other = Hub()
    server = serve(other)
    try:
        (tmp_path / "own.jsonl").write_bytes(b'{"text": "mine"}')
        card = _card(path.format(url=other.url, folder=tmp_path))
        files = {"a.jsonl": b"\n".join(texts(5)), file: card if file == ".huggingface.yaml" else b"---\n%s---\n" % card}
        hub.data_set(NAME, files)
        with pytest.raises(RecipeError, match=rf"some/rows names files that are not its own in {file}: "):
            pin(store, source(), "fam")
        assert other.asked == []
        assert not any("/tree/" in asked for _, asked in hub.asked)  # none of its patterns was looked for
    finally:
        server.shutdown()
        server.server_close()


def test_a_description_that_is_a_link_out_of_the_cache_is_not_read(
    store: FolderStore, hub: Hub, lines: list[bytes], tmp_path: Path
) -> None:
    """An older client may have made one."""
    own = tmp_path / "own.txt"
    own.write_text("ten years of work")
    commit = hub.repositories[f"datasets/{NAME}"].refs["main"]
    folder = tmp_path / "hub-cache" / "datasets--some--rows" / "snapshots" / commit
    folder.mkdir(parents=True)
    (folder / "README.md").symlink_to(own)
    with pytest.raises(UnreachableError, match=r"README\.md became a link out of"):
        pin(store, source(), "fam")


def test_what_may_lead_out_of_a_data_set() -> None:
    out = ["..", "../x", "a/../x", "a\\..\\x", "~/x", "\\x", "C:x", " http:x", "a::b", "x\ny", b"x", 5]
    assert [name for name in out if not is_elsewhere(name)] == []
    within = [
        "",
        "*",
        "**/train[-._ 0-9]*",
        "data/*.parquet",
        "a..b",
        "x/..y",
        ".hidden/a",
        "en/a:b.jsonl",
        "ä ö.jsonl",
    ]
    assert [name for name in within if is_elsewhere(name)] == []
    told = {
        "configs": [{"data_dir": "a", "data_files": {"train": ["b", {"path": ("c",)}]}, "sep": "::"}, {"data_files": 5}]
    }
    assert set(named_files(told)) == {"a", "b", "c", 5}


def test_a_library_that_is_missing_is_told(
    store: FolderStore, hub: Hub, lines: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("datasets.load_dataset_builder", missing)
    with pytest.raises(RecipeError, match=r"needs a library that is not installed here \(Install s3fs"):
        pin(store, source(), "fam")


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"rows.py": b"print()"}, r"made by a program, and no code of a data set runs.*Name a revision"),
        ({"README.md": b"---\nconfigs: [\n---\n"}, r"in README\.md cannot be read.*Name a revision"),
        ({"README.md": b"---\nconfigs: " + b"[" * 20_000 + b"\n---\n"}, r"README\.md cannot be read .*recursion"),
        (
            {"README.md": b"\xef\xbb\xbf---\r\n" + _card("/etc/x") + b"\r\n---\r\n"},
            r"not its own in README\.md: /etc/x",
        ),
        ({"README.md": b"\n ---\n" + _card("/etc/x") + b"\n--- \n"}, r"not its own in README\.md: /etc/x"),
        ({"README.md": b"---\na: &a [1]\nb: *a\n---\n"}, r"README\.md cannot be read .*aliases are not allowed"),
        ({".huggingface.yaml": b"- 5\n"}, r"in \.huggingface\.yaml cannot be read .*mapping"),
        ({"README.md": b"---\n\xff\n---\n"}, r"README\.md cannot be read .*utf-8"),
        ({"README.md": b"---\n#" + b"#" * (1 << 20) + b"\n---\n"}, r"README\.md cannot be read .*larger than 1024 KiB"),
        ({"README.md": b"#" * (9 << 20)}, r"answers what no hub does .*more than the 8,388,608 bytes"),
        ({"README.md": b"---\nconfigs: 5\n---\n"}, r"`data\.source\.(hub|config)`: "),
        ({"README.md": b"---\nconfigs: [5]\n---\n"}, r"`data\.source\.(hub|config)`: "),
    ],
)
def test_what_cannot_be_read_without_its_code_or_description(
    store: FolderStore, hub: Hub, texts: Callable[..., list[bytes]], files: dict[str, bytes], words: str
) -> None:
    hub.data_set(NAME, {"a.jsonl": b"\n".join(texts(5)), **files})
    with pytest.raises((RecipeError, UnreachableError), match=words):
        pin(store, source(), "fam")


def test_a_folder_of_its_name_is_not_taken_for_it(
    store: FolderStore, hub: Hub, lines: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = pin(store, source(config="lines"), "fam")
    folder = tmp_path / "here" / NAME
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_text('{"text": "of this machine"}')
    monkeypatch.chdir(tmp_path / "here")
    assert pin(store, source(config="lines"), "fam") == expected


def test_a_file_that_ends_too_early_may_come_whole_with_another_try(hub: Hub, lines: list[bytes]) -> None:
    commit = hub.repositories[f"datasets/{NAME}"].refs["main"]
    size = len(b"\n".join(lines))
    address = f"hf://datasets/{NAME}@{commit}/lines/train.jsonl"
    with HubFile(address, size) as whole:
        assert b"".join(iter(lambda: whole.read(1000), b"")) == b"\n".join(lines)
    with HubFile(address, size + 7) as short, pytest.raises(UnreachableError, match="it ended 7 bytes too early"):
        b"".join(iter(lambda: short.read(1000), b""))


def test_a_hidden_one_needs_a_token(
    store: FolderStore, hub: Hub, lines: list[bytes], monkeypatch: pytest.MonkeyPatch, run: Callable[..., Manifest]
) -> None:
    repository = hub.repositories[f"datasets/{NAME}"]
    repository.hidden, repository.gate = True, "hf_right"
    with pytest.raises(RecipeError, match=r"or hides it from us.*HF_TOKEN"):
        pin(store, source(), "fam")
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert run(pin(store, source(), "fam")).counts["input"] == len(lines)
    assert hub.tokens <= {"hf_right"}


@pytest.mark.parametrize(
    "values",
    [
        {"hub": "a/b", "prefix": "x"},
        {"prefix": "x", "split": "test"},
        {"prefix": "x", "config": "en"},
        {"hub": "a/b/c"},
        {"hub": "../b"},
        {"hub": "a/b", "split": "train[:10%]"},
    ],
)
def test_names_that_are_none(values: dict[str, str]) -> None:
    with pytest.raises(ValidationError):
        Source.model_validate(values)
