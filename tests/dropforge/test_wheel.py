"""A user's wheel: what it provides is known before anything of it runs, and what could do harm is refused."""

from __future__ import annotations

import os
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from dropforge import wheel
from dropforge.code import look_at, told
from dropforge.errors import RecipeError
from dropforge.recipe import Recipe
from dropforge.recipes import parse_recipe
from dropforge.recipes.load import put_first_drop_over, resolve
from dropforge.store import Store
from dropforge.wheel import ANSWERS, CALLBACKS, FIGURES, ROWS, fetch, inspect, unpack
from tests.wheels import make_wheel, named

MODULES = {"own_a/__init__.py": "", "own_a/rows.py": "def clean(row):\n    return row\n"}
GROUPS = {
    ROWS: {"clean": "own_a.rows:clean"},
    ANSWERS: {"brief": "own_a.m:brief"},
    CALLBACKS: {"b": "own_a:b", "a": "own_a:a"},
}
TABLE = "own-1.0.dist-info/entry_points.txt"
GOOD = f"[{ROWS}]\nclean = own_a:clean\n"


def recipe(code: dict[str, str], text: str = "base: {scratch: {}}") -> Recipe:
    return parse_recipe(text, {"code": code})


def test_a_wheel_says_what_it_provides_and_is_unpacked_as_it_is(tmp_path: Path) -> None:
    code = make_wheel(tmp_path, MODULES, GROUPS)
    found = fetch(code["wheel"], code["sha256"], tmp_path / "copy")
    assert found.names(CALLBACKS) == ("a", "b")
    assert found.names(FIGURES) == ()
    assert found.plain()["provides"] == {
        "row functions": ["clean"], "metrics of answers": ["brief"], "callbacks": ["a", "b"],
    }  # fmt: skip
    digest = code["sha256"]
    assert str(found) == (
        f"own-1.0-py3-none-any.whl ({digest}): row functions clean; metrics of answers brief; callbacks a, b"
    )
    unpack(tmp_path / "copy", tmp_path / "unpacked")
    assert (tmp_path / "unpacked/own_a/rows.py").read_text() == MODULES["own_a/rows.py"]
    unpack(tmp_path / "copy", tmp_path / "unpacked")  # in a folder that is used again


def test_only_the_wheel_that_was_reviewed_is_used(tmp_path: Path, store: Store) -> None:
    code = make_wheel(tmp_path, MODULES, GROUPS)
    with pytest.raises(RecipeError, match=rf"`code.sha256`: .*has the SHA-256 {code['sha256']}, not 000"):
        fetch(code["wheel"], "0" * 64, tmp_path / "copy")
    with pytest.raises(RecipeError, match=r"`code.wheel`: there is no .*other-1.0"):
        fetch(f"{tmp_path}/other-1.0-py3-none-any.whl", code["sha256"], tmp_path / "copy")
    store.put("wheels/own-1.0-py3-none-any.whl", Path(code["wheel"]).read_bytes())
    address = f"{store.uri}/wheels/own-1.0-py3-none-any.whl"
    for client in (store, None):
        assert fetch(address, code["sha256"], tmp_path / "copy", client).names(ROWS) == ("clean",)


def archive(
    tmp_path: Path, *entries: tuple[str | zipfile.ZipInfo, str], name: str = "own-1.0-py3-none-any.whl"
) -> Path:
    path = tmp_path / name
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as made:
        for entry, text in entries:
            made.writestr(entry, text)
    return path


def link(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    return info


@pytest.mark.parametrize(
    "name", ["../own_a.py", "/etc/own_a.py", "own_a/../../x.py", "own_a\\..\\x.py", "C:/x.py", "own_a/.."]
)
def test_a_file_that_leaves_its_folder_is_refused(tmp_path: Path, name: str) -> None:
    path = archive(tmp_path, (name, "x = 1"), (TABLE, GOOD))
    with pytest.raises(RecipeError, match=r"`code.wheel`: own-1.0-py3-none-any.whl has a file .* leaves its folder"):
        inspect(path, path.name)
    with pytest.raises(RecipeError):
        unpack(path, tmp_path / "unpacked")
    assert sorted(item.name for item in tmp_path.iterdir()) == [path.name]


@pytest.mark.parametrize(
    ("entries", "cause"),
    [
        ([(link("own_a.py"), "/etc/passwd")], r"is a link or encrypted"),
        ([("own-1.0.data/scripts/run", "")], r"only an installer can place"),
        ([("own_a.py", ""), ("Own_A.py", "")], r"'own_a.py' twice"),
        ([("own_a", ""), ("own_a/b.py", "")], r"'own_a/b.py' twice"),
        ([("own_a/b.py", ""), ("own_a", "")], r"'own_a' twice"),
        ([("own_a/", ""), ("own_a", "")], r"'own_a' twice"),
    ],
)
def test_what_no_wheel_has_is_refused(tmp_path: Path, entries: list[tuple[str, str]], cause: str) -> None:
    path = archive(tmp_path, *entries, (TABLE, GOOD))
    with pytest.raises(RecipeError, match=rf"`code.wheel`: .*{cause}"):
        inspect(path, path.name)


def test_few_bytes_that_become_many_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel, "UNPACKED", 1 << 20)
    path = archive(tmp_path, ("own_a.py", "#" * (2 << 20)), (TABLE, GOOD))
    assert path.stat().st_size < 10_000
    with pytest.raises(RecipeError, match=r"more than 5000 files or 1 MiB unpacked"):
        inspect(path, path.name)
    # One that lies about its sizes, in both of the places that tell of them, gets no further.
    data = path.read_bytes().replace((2 << 20).to_bytes(4, "little"), (1 << 10).to_bytes(4, "little"))
    path.write_bytes(data)
    inspect(path, path.name)
    with pytest.raises(RecipeError, match=r"cannot be unpacked"):
        unpack(path, tmp_path / "unpacked")
    assert not (tmp_path / "unpacked").exists()
    monkeypatch.setattr(wheel, "LARGEST", 100)
    with pytest.raises(RecipeError, match=r"`code.wheel`: .*Leave data out of it"):
        fetch(str(path), "0" * 64, tmp_path / "copy")
    monkeypatch.setattr(wheel, "FILES", 1)
    with pytest.raises(RecipeError, match=r"more than 1 files"):
        inspect(path, path.name)


@pytest.mark.parametrize(
    ("table", "cause"),
    [
        ("[console_scripts]\nrun = own_a:run\n", r"provides nothing that takes part. Give it"),
        ("", r"provides nothing that takes part"),
        ("[dropforge.tokens]\na = own_a:a\n", r"entry points of 'dropforge.tokens'. What takes part is of"),
        ("[dropforge.callback]\na = own_a:a\n", r"entry points of 'dropforge.callback'"),
        (f"[{ROWS}]\nA B = own_a:a\n", r"'A B'"),
        (f"[{ROWS}]\na = own_a\n", r"'own_a', which is no `module:function`"),
        (f"[{ROWS}]\na = own_a:b()\n", r"which is no `module:function`"),
        (f"[{ROWS}]\na = own_a:b\na = own_a:c\n", r"cannot be read"),
        (f"[{ANSWERS}]\nrouge-l = own_a:b\n", r"'rouge-l', which is one of our figures"),
        (f"[{FIGURES}]\nloss = own_a:b\n", r"'loss', which is one of our figures"),
    ],
)
def test_entry_points_that_mean_nothing_are_refused(tmp_path: Path, table: str, cause: str) -> None:
    path = archive(tmp_path, ("own_a.py", ""), (TABLE, table))
    with pytest.raises(RecipeError, match=rf"`code.wheel`: .*{cause}"):
        inspect(path, path.name)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-30])


def spoil(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(b"own_a.py") + 9] ^= 0xFF
    path.write_bytes(data)


def use(path: Path, folder: Path) -> None:
    inspect(path, path.name)
    unpack(path, folder)


def before(path: Path) -> None:
    """Say that the directory lies elsewhere."""
    data = bytearray(path.read_bytes())
    at = data.rindex(b"PK\x05\x06")
    data[at + 12 : at + 20] = b"\xff\xff\xff\x7f" * 2
    path.write_bytes(data)


def other(path: Path) -> None:
    """Pack it as wheels are not, and spoil that."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("own_a.py", os.urandom(500).hex())
        archive.writestr(TABLE, GOOD)


@pytest.mark.parametrize("harm", [cut, spoil, before])
def test_a_broken_wheel_is_refused(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    path = archive(tmp_path, ("own_a.py", os.urandom(500).hex()), (TABLE, GOOD))
    harm(path)
    with pytest.raises(RecipeError, match=r"`code.wheel`: .*cannot be (read|unpacked)"):
        use(path, tmp_path / "unpacked")


def test_a_wheel_that_is_packed_as_none_is_is_refused(tmp_path: Path) -> None:
    path = archive(tmp_path, ("own_a.py", ""), (TABLE, GOOD))
    other(path)
    with pytest.raises(RecipeError, match=r"`code.wheel`: .*packed otherwise than by deflate"):
        inspect(path, path.name)


def test_a_wheel_with_compiled_parts_is_refused(tmp_path: Path) -> None:
    path = archive(tmp_path, (TABLE, GOOD), name="own-1.0-cp312-cp312-linux_x86_64.whl")
    with pytest.raises(RecipeError, match=r"no wheel for every machine"):
        inspect(path, path.name)
    with pytest.raises(RecipeError, match=r"`code.wheel`"):
        recipe(named(path))


GENERATION = "base: {scratch: {}}\nevaluate: {generation: {metrics: [rouge-l, brief]}}"


def test_a_plan_knows_what_a_recipe_names(tmp_path: Path) -> None:
    code = make_wheel(tmp_path, MODULES, GROUPS)
    assert look_at(parse_recipe("base: {scratch: {}}")) is None
    asked = recipe(code, f"{GENERATION}\npromote: {{metric: gen/brief}}")
    found = look_at(asked)
    assert found is not None
    assert told(asked, found) == str(found)
    with pytest.raises(RecipeError, match=r"there is no metric 'wit'. There are .*brief"):
        look_at(recipe(code, GENERATION.replace("brief", "wit")))
    with pytest.raises(RecipeError, match=r"'brief' is none of ours, .*`code` names no wheel"):
        parse_recipe(GENERATION)
    with pytest.raises(RecipeError, match=r"'rouge-1' is none of ours, .*Did you mean 'rouge-l'"):
        parse_recipe(GENERATION.replace("brief", "rouge-1"))
    with pytest.raises(RecipeError, match=r"`promote.metric`: `gen/brief` is to decide, and nothing measures it"):
        recipe(code, "base: {scratch: {}}\npromote: {metric: gen/brief}")
    on_cluster = recipe(
        {**code, "wheel": "/mnt/own-1.0-py3-none-any.whl"}, "base: {scratch: {}}\ncompute: {backend: kubernetes}"
    )
    assert look_at(on_cluster) is None
    assert "looked at where the pods see it" in told(on_cluster, None)


@pytest.mark.parametrize(
    "code",
    [
        {"wheel": "own-1.0-py3-none-any.whl", "sha256": "0" * 64},
        {"wheel": "https://x/own-1.0-py3-none-any.whl", "sha256": "0" * 64},
        {"wheel": "s3://key:secret@b/own-1.0-py3-none-any.whl", "sha256": "0" * 64},
        {"wheel": "/a/own-1.0.tar.gz", "sha256": "0" * 64},
        {"wheel": "/a/own-1.0-py3-none-any.whl", "sha256": "latest"},
    ],
)
def test_code_that_names_no_wheel_and_digest_is_refused_by_the_recipe(code: dict[str, str]) -> None:
    with pytest.raises(RecipeError, match=r"`code\."):
        recipe(code)


def test_who_may_upload_data_may_not_choose_what_code_runs() -> None:
    with pytest.raises(RecipeError, match=r"`code`: a recipe in a drop may not choose it"):
        put_first_drop_over(resolve({"extends": "tiny"}), {"code": {"wheel": "/a/own-1.0-py3-none-any.whl"}})
