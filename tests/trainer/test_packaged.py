"""What lies beside a model: MLflow loads and asks it where nothing of Dropforge is installed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, distribution
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pandas
import pytest
import torch
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from dropforge.errors import DataError
from dropforge.run import RunSpec
from trainer.data.rows import Row
from trainer.data.tokenizer import load_tokenizer, train_tokenizer
from trainer.data.user_code import UserCode
from trainer.model import pyfunc_loader
from trainer.model.export import as_measured, as_reads, mark_ends
from trainer.model.packaged import Example, example_of, license_of, packaging, reading
from trainer.model.pyfunc_loader import folder_digest
from trainer.prepare import check_saved
from trainer.rank import run
from trainer.report.console import Console
from trainer.restore import Choice, export
from trainer.state.stop import StopSignal

from .classes import LABELS, classifier_base, labelled_rows
from .pairs import pair_base
from .ranks_loop import make_base
from .test_template import CHATML, TEXTS
from .toy import REPOSITORY, Toy, sample_rows, write_dataset

CARD = "---\nlicense: apache-2.0\nlanguage: en\n---\n# A base\n"
#: Loads folders as a serving process would, and tells what came of it.
ASK = """
import json, sys
sys.path.append(sys.argv[1])
import mlflow
told = {}
for name, folder in json.loads(sys.argv[2]).items():
    try:
        model = mlflow.pyfunc.load_model(folder)
    except ValueError as error:
        told[name] = {"error": str(error)}
        continue
    params = {"max_new_tokens": 3} if model.metadata.signature.params else None
    told[name] = {
        "example": model.input_example.to_dict("records"),
        "inputs": model.metadata.signature.inputs.to_dict(),
        "outputs": model.metadata.signature.outputs.to_dict(),
        "answers": model.predict(model.input_example, params=params).to_dict("records"),
        "again": model.predict({"prompt": ["the red cat", "a dog"]}, params=params).to_dict("records"),
        "about": model.metadata.metadata["dropforge"],
        "serving": json.loads(model.metadata.get_serving_input(folder)),
    }
    if "transformers" in model.metadata.flavors:
        parts = mlflow.transformers.load_model(folder, return_type="components")
        told[name]["parts"] = {key: type(value).__name__ for key, value in parts.items()}
        if name in ("lora", "classes"):
            told[name]["pipeline"] = mlflow.transformers.load_model(folder)("the red cat")
print(json.dumps(told))
"""


def image(folder: Path) -> Path:
    """A folder of what the trainer's image has, and nothing else of this environment."""
    folder.mkdir()
    listed = (REPOSITORY / "requirements" / "trainer.txt").read_text()
    for name in re.findall(r"^([A-Za-z0-9_.-]+)==", listed, re.MULTILINE):
        try:
            found = distribution(name)
        except PackageNotFoundError:  # of another platform
            continue
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(Path(str(found.locate_file(top))))
    return folder


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Toy]:
    from dropforge.store import open_store

    folder = tmp_path_factory.mktemp("buckets")
    rows = {
        "chats": {"train": sample_rows(60), "eval": sample_rows(9, seed=1)},
        "texts": {"train": labelled_rows(60, 1), "eval": [row for row in labelled_rows(30, 2) if "text" in row]},
    }
    return {
        name: Toy(str(folder / name), write_dataset(open_store(str(folder / name)), found))
        for name, found in rows.items()
    }


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = make_base(tmp_path_factory.mktemp("base"))
    (Path(folder) / "README.md").write_text(CARD)
    (Path(folder) / "generation_config.json").write_text('{"eos_token_id": [2, 77]}')  # an end of its own
    return folder


@pytest.fixture(scope="module")
def models(toys: dict[str, Toy], base: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of models of all kinds, by what they are."""
    chats, texts = toys["chats"], toys["texts"]
    steps: dict[str, Any] = {"max_steps": 1}
    on_base: dict[str, Any] = {"base": {"model": base, "scratch": None}}
    low = {**steps, "method": "lora"}
    prefix = {**steps, "method": "prefix", "prefix": {"tokens": 4}, "sequence_length": 60, "tokens_per_step": 240}
    labels: dict[str, Any] = {"task": "classification", "train": steps}
    labels["base"] = {"model": classifier_base(tmp_path_factory.mktemp("encoder"), "distilbert"), "scratch": None}
    pairs: dict[str, Any] = {"task": "sequence-to-sequence", "train": steps}
    pairs["base"] = {"model": pair_base(tmp_path_factory.mktemp("t5"), "t5"), "scratch": None}
    made = {
        "full": chats.run("full", train=steps, promote={"input_example": False}),
        "lora": chats.run("lora", **on_base, train=low, data={"license": "CC-BY-4.0"}),
        "prefix": chats.run("prefix", **on_base, train=prefix),
        "pairs": chats.run("pairs", **pairs),
        "classes": texts.run("classes", **labels),
    }
    for uri in made.values():
        run(uri, StopSignal(), Console(quiet=True))
    return {name: f"{uri.rpartition('/')[0]}/model" for name, uri in made.items()}


@pytest.fixture(scope="module")
def answers(models: dict[str, str], base: str, toys: dict[str, Toy], tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("serving")
    spec = RunSpec.from_json(toys["chats"].files("lora").get("run.json"))
    export(spec, Choice(), folder / "exported", print)
    other = folder / "other"
    moved = json.loads(Path(models["prefix"], "MLmodel").read_text())
    moved["metadata"]["dropforge"]["base"]["digest"] = "0" * 64
    other.mkdir()
    for path in Path(models["prefix"]).rglob("*"):
        if path.is_file():
            (other / path.relative_to(models["prefix"])).parent.mkdir(exist_ok=True)
            (other / path.relative_to(models["prefix"])).write_bytes(path.read_bytes())
    (other / "MLmodel").write_text(json.dumps(moved))
    own = shutil.copytree(models["lora"], folder / "own")  # what its base's author may have put beside the weights
    for name, values in {
        "generation_config.json": {"penalty_alpha": 0.6, "top_k": 4, "repetition_penalty": 50.0, "num_beams": 1},
        "config.json": {"auto_map": {"AutoModelForCausalLM": "evil.Model"}},
        "tokenizer_config.json": {"auto_map": {"AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"]}},
    }.items():
        path = own / name
        path.write_text(json.dumps(json.loads(path.read_text()) | values))
    (own / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    asked = {name: models[name] for name in ("lora", "prefix", "pairs", "classes")}
    asked |= {"exported": str(folder / "exported"), "moved": str(other), "own": str(own)}
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", ASK, str(image(folder / "image")), json.dumps(asked)],
        capture_output=True, text=True, cwd=folder, timeout=300, env={"HOME": str(folder), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert not (folder / "ran").exists()
    assert "trust_remote_code" not in done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_process_with_the_images_packages_alone_loads_and_asks_each_kind(answers: Any) -> None:
    for name in ("lora", "prefix", "pairs", "exported"):
        found = answers[name]
        assert [column["name"] for column in found["inputs"]] == ["prompt", "system"]
        assert [(column["name"], column["type"]) for column in found["outputs"]] == [("answer", "string")]
        assert [set(row) for row in found["answers"] + found["again"]] == [{"answer"}] * 3
    assert answers["exported"]["again"] == answers["lora"]["again"]
    assert answers["own"]["again"] == answers["lora"]["again"]  # greedy, and none of its code
    labelled = answers["classes"]
    assert {row["label"] for row in labelled["again"]} <= set(LABELS)
    assert all(0 < row["score"] <= 1 for row in labelled["again"])
    assert [column["name"] for column in labelled["outputs"]] == ["label", "score"]
    assert labelled["pipeline"][0]["label"] in LABELS
    assert answers["lora"]["parts"]["model"] == "LlamaForCausalLM"
    assert answers["pairs"]["parts"]["model"] == "T5ForConditionalGeneration"
    assert answers["lora"]["pipeline"][0]["generated_text"].startswith("the red cat")


@pytest.mark.parametrize("name", ["lora", "classes"])
def test_mlflows_server_answers_like_the_model(models: dict[str, str], answers: Any, name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "models", "serve", "-m", models[name], "--env-manager", "local"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # it starts uvicorn by its name
    server = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", str(port)], env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        body: dict[str, Any] = {"dataframe_records": [{"prompt": "the red cat"}, {"prompt": "a dog"}]}
        if name == "lora":
            body["params"] = {"max_new_tokens": 3}
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            end = time.monotonic() + 120
            while not _answers(client):
                assert server.poll() is None, server.communicate()[0].decode()
                assert time.monotonic() < end
                time.sleep(0.2)
            found = client.post("/invocations", json=body)
        assert found.status_code == 200, found.text
        assert found.json()["predictions"] == [
            {key: pytest.approx(value) if key == "score" else value for key, value in row.items()}
            for row in answers[name]["again"]
        ]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _answers(client: httpx.Client) -> bool:
    try:
        return client.get("/ping").status_code == 200
    except httpx.TransportError:
        return False


def test_the_example_is_an_evaluation_row_and_only_where_the_recipe_lets_it(
    answers: Any, models: dict[str, str], toys: dict[str, Toy]
) -> None:
    questions = {row["messages"][0]["content"] for row in sample_rows(9, seed=1)}
    assert answers["lora"]["example"][0]["prompt"] in questions
    shown = answers["classes"]["example"][0]["prompt"]
    assert any(row.get("text") == shown for row in labelled_rows(30, 2))
    assert answers["lora"]["serving"]["dataframe_split"]["data"] == [[answers["lora"]["example"][0]["prompt"]]]
    assert not list(Path(models["full"]).glob("*input_example*"))
    assert "saved_input_example_info" not in json.loads(Path(models["full"], "MLmodel").read_text())
    long = Row(b"", (("system", "be brief"), ("user", "why " * 2000), ("assistant", "so")), None)
    assert example_of(long) == Example(("why " * 2000)[:2000], "be brief")
    assert example_of(Row(b"", None, "one two three four")) == Example("one two", chat=False)


def test_a_base_is_pinned_and_another_one_is_not_taken(answers: Any, models: dict[str, str], base: str) -> None:
    digest = folder_digest(Path(base))
    assert answers["lora"]["about"]["base"] == {"model": base, "digest": digest, "license": "apache-2.0"}
    assert answers["prefix"]["about"]["base"]["digest"] == digest
    assert "Give the base model's files back" in answers["moved"]["error"]
    report = json.loads(Path(models["lora"]).parent.joinpath("report.json").read_text())
    assert report["model"]["base"]["digest"] == digest
    assert {"MLmodel", "code/dropforge_pyfunc.py"} <= report["model"]["files"].keys()


def test_the_card_tells_the_licences(models: dict[str, str]) -> None:
    card = Path(models["lora"], "README.md").read_text()
    assert 'license: "apache-2.0"' in card.split("---")[1]
    assert "| Rows | `CC-BY-4.0`, as the recipe says |" in card
    assert "| Base model | `apache-2.0`, as its own card says |" in card
    assert "| Rows | not stated" in Path(models["full"], "README.md").read_text()


@pytest.mark.parametrize(
    ("card", "named"),
    [
        (CARD, "apache-2.0"),
        ("---\nlicense: other\nlicense_name: own-1.0\n---\n", "own-1.0"),
        ("# no front matter\nlicense: mit\n", ""),
        ("---\nlicense: [mit]\n---\n", ""),
        ("---\nlicense: 'a|`b`'\n---\n", ""),
        ("---\n: [\n---\n", ""),
        ("---\n- license\n---\n", ""),
        ("---\n", ""),
        ("---\nlicense: !!bool maybe\n---\n", ""),
        ("---\nlicense: mit\nseen: !!timestamp x\n---\n", ""),
        ("---\nlicense: 0x" + "f" * 9000 + "\n---\n", ""),
        ("---\na: &a {x: 1}\nb: {<<: [*a, *a]}\nlicense: mit\n---\n", ""),
        ("---\nlicense: mit\nreleased: 2026-11-27\n---\n", "mit"),
    ],
)
def test_a_licence_is_a_name_or_nothing(tmp_path: Path, card: str, named: str) -> None:
    (tmp_path / "README.md").write_text(card)
    assert license_of(tmp_path) == named


def test_what_a_base_says_and_holds_besides_its_weights_costs_no_trained_model(
    toys: dict[str, Toy], base: str, tmp_path: Path
) -> None:
    odd = Path(shutil.copytree(base, tmp_path / "odd"))
    (odd / "README.md").write_text("---\nlicense: !!bool maybe\n---\n")
    (odd / "generation_config.json").write_text('{"eos_token_id": 2, "pad_token_id": -1}')  # as the first Llamas have
    config = json.loads((odd / "config.json").read_text())
    (odd / "config.json").write_text(json.dumps({**config, "note": "\ud800"}))
    (odd / "notes.json").mkdir()
    (odd / "gone.json").symlink_to(tmp_path / "nowhere")
    on_odd = {"base": {"model": str(odd), "scratch": None}, "train": {"max_steps": 1, "method": "lora"}}
    uri = toys["chats"].run("odd", **on_odd)
    run(uri, StopSignal(), Console(quiet=True))
    about = json.loads(Path(uri).with_name("model").joinpath("MLmodel").read_text())["metadata"]["dropforge"]["base"]
    assert set(about) == {"model", "digest"}


def test_a_row_that_cannot_be_read_any_more_is_no_example_and_no_error(toys: dict[str, Toy]) -> None:
    def fails(_: Row) -> Row:
        raise ArithmeticError("as no reader of rows does")

    toys["chats"].run("unshown")
    spec = RunSpec.from_json(toys["chats"].files("unshown").get("run.json"))
    code: Any = SimpleNamespace(rows=fails)
    told: list[str] = []
    assert packaging(spec, code, "", told.append).example is None
    assert "as no reader of rows does" in told[0]
    assert "also where its rows were plain texts" in told[0]
    assert packaging(spec, UserCode(), "", told.append).example is not None
    assert len(told) == 1


def test_most_rows_decide_whether_a_prompt_is_a_turn_and_not_the_first_one(toys: dict[str, Toy]) -> None:
    toys["chats"].run("mixed")
    spec = RunSpec.from_json(toys["chats"].files("mixed").get("run.json"))
    for texts in (1, 10_000):  # which of them come first follows from a hash
        seen = count()
        code: Any = SimpleNamespace(
            rows=lambda row, seen=seen, texts=texts: (
                replace(row, messages=None, text="A text of many words") if next(seen) < texts else row
            )
        )
        made = packaging(spec, code, "", print)
        assert made.example is not None
        assert (made.chat, made.example.chat) == ((True, True) if texts == 1 else (False, False))


def test_an_end_that_is_no_special_token_is_no_part_of_an_answer(tmp_path: Path) -> None:
    """As of a base that was given its turns by `tokenizer.add_tokens`."""
    from tokenizers import Tokenizer

    written = json.loads(train_tokenizer(TEXTS, 400))
    for token in written["added_tokens"]:
        token["special"] &= not token["content"].startswith("<|im_")
    backend = Tokenizer.from_str(json.dumps(written))
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<|pad|>", eos_token="<|eos|>", chat_template=CHATML
    )
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2, eos_token_id=tokenizer.eos_token_id)
    model = GPT2LMHeadModel(config)
    with torch.no_grad():  # it says its end and nothing else
        model.transformer.ln_f.weight.zero_()
        model.transformer.ln_f.bias.fill_(1.0)
        model.lm_head.weight.zero_()
        model.lm_head.weight[end] = 1.0
    model.generation_config = as_measured(model, as_reads(model, tokenizer))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    about = reading(tokenizer, "causal-lm", True, model.generation_config.eos_token_id, 8)
    (tmp_path / "MLmodel").write_text(json.dumps({"metadata": {"dropforge": about}}))
    assert pyfunc_loader._load_pyfunc(str(tmp_path)).predict(pandas.DataFrame({"prompt": ["on?"]}))["answer"][0] == ""
    asked = "a<|im_end|>"
    before = tokenizer(asked)["input_ids"]
    mark_ends(tokenizer, [end])
    tokenizer.save_pretrained(tmp_path)
    plain = AutoTokenizer.from_pretrained(tmp_path)
    assert plain(asked)["input_ids"] == before
    assert plain.decode(before, skip_special_tokens=True) == "a"


@pytest.mark.parametrize(
    ("template", "told"),
    [
        (
            {"name": "../x/y", "template": "a"},
            r"could not be saved with the trained model \(Invalid chat template name",
        ),
        ({"name": "other", "template": 7}, r"could not be saved with the trained model"),
        ({"name": "other", "template": "\ud800"}, r"could not be saved with the trained model"),
    ],
)
def test_a_tokenizer_that_nobody_could_save_is_refused_before_the_training(
    base: str, tmp_path: Path, template: dict[str, Any], told: str
) -> None:
    odd = Path(shutil.copytree(base, tmp_path / "odd"))
    text = (odd / "chat_template.jinja").read_text()
    (odd / "chat_template.jinja").unlink()
    path = odd / "tokenizer_config.json"
    templates = [{"name": "default", "template": text}, template]
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": templates}))
    with pytest.raises(DataError, match=told):
        check_saved(load_tokenizer(odd), str(odd))


def test_answers_end_where_they_were_measured_to_end_whoever_loads_the_model(models: dict[str, str]) -> None:
    """The chat template's end, the tokenizer's, and the one that the base had of its own, also behind a prefix."""
    told = {
        name: json.loads(Path(folder, "MLmodel").read_text())["metadata"]["dropforge"]
        for name, folder in models.items()
    }
    assert told["classes"]["ends"] == []
    assert 77 in told["lora"]["ends"]
    assert told["prefix"]["ends"] == told["lora"]["ends"]
    for name in ("full", "lora", "pairs"):
        plain = json.loads(Path(models[name], "generation_config.json").read_text())
        assert (plain["eos_token_id"], plain["max_new_tokens"]) == (told[name]["ends"], told[name]["new_tokens"])
