"""What lies beside a model's weights so that MLflow loads it and people know what it is: a pure function of the run.

`MLmodel` names two ways to load the folder where it stands, `mlflow.pyfunc` (by `trainer.model.pyfunc_loader`, whose
text is copied) and, for what is no prefix, `mlflow.transformers`; the signature; an example of an input; and under
`metadata` what the model goes back to. There is no time in any of it: the same run writes the same bytes again.
"""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Final

from dropforge.hub import is_hub_id
from dropforge.methods import ADAPTERS
from dropforge.run import RunSpec
from dropforge.store import open_store
from trainer.compat import versions
from trainer.data.prompts import held_out
from trainer.data.rows import Row, load_manifest, read_rows
from trainer.data.seq2seq import TEMPLATE
from trainer.data.tokenizer import is_ours
from trainer.data.user_code import UserCode
from trainer.model import pyfunc_loader
from trainer.model.build import PREFIX_CONFIG
from trainer.model.transformers4 import make_readable

MLMODEL: Final = "MLmodel"
_MODULE: Final = "dropforge_pyfunc"
_LOOKED_AT: Final = 1000  # rows, of which most decide whether a prompt is a user's turn
NEW_TOKENS: Final = 128  # of an answer, unless the recipe or the caller says otherwise
_LONGEST: Final = 2000  # characters of the example
_TEXT: Final = 200  # the same of a text that a model is to continue
_LICENSE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9 .:/+_-]{0,98}")
_PIPELINES: Final = {
    "causal-lm": "text-generation",
    "classification": "text-classification",
    "sequence-to-sequence": "text2text-generation",
}


@dataclass(frozen=True)
class Example:
    """An input to show. :param chat: whether the prompt is a user's turn, and no plain text."""

    prompt: str
    system: str = ""
    chat: bool = True


@dataclass(frozen=True)
class Packaging:
    """What is known of a model beside its weights.

    :param base: `model`, and as far as they are known its `revision`, `digest` and `license`; see `base_facts`.
    :param example: None if there is none to show, or none shall be.
    :param chat: whether most rows are conversations.
    """

    spec: RunSpec
    base: Mapping[str, str] = field(default_factory=dict)
    example: Example | None = None
    chat: bool = True

    @property
    def new_tokens(self) -> int:
        """The longest answer in tokens, as the evaluation has it written."""
        generation = (self.spec.recipe.get("evaluate") or {}).get("generation") or {}
        return int(generation.get("max_new_tokens", NEW_TOKENS))

    @property
    def length(self) -> int:
        """The longest row in tokens."""
        return int(self.spec.recipe["train"]["sequence_length"])

    def write(self, folder: Path, tokenizer: Any, ends: Sequence[int]) -> None:
        """Add the files to a model's folder, which has its weights and its tokenizer.

        :param ends: tokens that an answer ended with where the model was measured.
        """
        prefix = (folder / PREFIX_CONFIG).is_file()
        task = str(self.spec.recipe.get("task", "causal-lm"))
        if not prefix:  # where mlflow.transformers looks for it, and nowhere else
            tokenizer.save_pretrained(folder / "components" / "tokenizer")
            make_readable(folder / "components" / "tokenizer")
        found = mlmodel(
            self, task, reading(tokenizer, task, self.chat, ends, self.new_tokens), _architecture(folder, prefix)
        )
        (folder / MLMODEL).write_text(json.dumps(found, indent=1, ensure_ascii=False), encoding="utf-8")
        (folder / "code").mkdir()
        (folder / "code" / f"{_MODULE}.py").write_bytes(Path(pyfunc_loader.__file__).read_bytes())
        needed = requirements(prefix=prefix)
        (folder / "requirements.txt").write_text("\n".join(needed) + "\n")
        environment = {"python": platform.python_version(), "dependencies": ["-r requirements.txt"]}
        (folder / "python_env.yaml").write_text(json.dumps(environment, indent=1))
        if self.example is not None:
            frame = _frame(self.example)
            (folder / "input_example.json").write_text(json.dumps(frame, ensure_ascii=False), encoding="utf-8")
            serving = {"dataframe_split": frame}
            (folder / "serving_input_example.json").write_text(
                json.dumps(serving, ensure_ascii=False), encoding="utf-8"
            )


def packaging(spec: RunSpec, code: UserCode, base: str, say: Callable[[str], None]) -> Packaging:
    """What is known of a run's model.

    :param base: folder of its base model on this machine; empty if it has none. :param say: told what is not known.
    """
    rows = _first_rows(spec, code, say)
    chats = [row for row in rows if row.messages is not None]
    chat = 2 * len(chats) >= len(rows)
    row = next(iter(chats), None) if chat else next(row for row in rows if row.messages is None)
    shown = (spec.recipe.get("promote") or {}).get("input_example", True)
    example = example_of(row) if row is not None and shown else None
    return Packaging(spec, base_facts(spec, base), example, chat)


def base_facts(spec: RunSpec, folder: str) -> dict[str, str]:
    """What a model goes back to: the hub's commit; of a folder, where adapters were learned on it, its digest."""
    base = spec.recipe["base"]
    if not base.get("model"):
        return {}
    model, found = str(base["model"]), {}
    if is_hub_id(model):
        found["revision"] = str(base.get("revision") or "")
    elif spec.recipe["train"]["method"] in ADAPTERS and folder:
        found["digest"] = pyfunc_loader.folder_digest(Path(folder))
    found["license"] = license_of(Path(folder)) if folder else ""
    return {"model": model, **{key: value for key, value in found.items() if value}}


def license_of(folder: Path) -> str:
    """The licence that a model's own card names; empty if it has none, one that is no name, or a card that nobody can
    read: what is only said of a base shall not cost a trained model."""
    from dropforge.strict_yaml import load_strict

    try:
        if not (folder / "README.md").is_file():  # reading a pipe has no end
            return ""
        with (folder / "README.md").open(encoding="utf-8") as stream:
            text = stream.read(1 << 16)
        front = load_strict(text.split("---", 2)[1]) if text.startswith("---\n") else {}
        named = front.get("license_name") if front.get("license") == "other" else front.get("license")
        return named if isinstance(named, str) and _LICENSE.fullmatch(named) else ""
    except Exception:  # YAML alone raises a dozen kinds for what strangers write
        return ""


def example_of(row: Row) -> Example:
    """A row's question, or how its text begins."""
    if row.messages is None:
        text = row.text or ""
        if row.label is not None:
            return Example(text[:_LONGEST], chat=False)
        head = text[: min(_TEXT, len(text) // 2)]
        return Example(head.rpartition(" ")[0] or head, chat=False)
    before = row.messages if (parts := held_out(row)) is None else parts[0].messages or ()
    system = next((content for role, content in before if role == "system"), "")
    prompt = next((content for role, content in before if role == "user"), before[0][1] if before else "")
    return Example(prompt[:_LONGEST], system[:_LONGEST])


def reading(tokenizer: Any, task: str, chat: bool, ends: Sequence[int], new_tokens: int) -> dict[str, Any]:
    """How prompts become tokens and where answers end, see `pyfunc_loader.Reader`."""
    ours = is_ours(tokenizer)
    return {
        "task": task,
        "chat": chat,
        "special": task == "sequence-to-sequence" and tokenizer.chat_template == TEMPLATE,
        "begin": [int(tokenizer.bos_token_id)] if ours and task == "causal-lm" else [],
        "ends": list(ends),
        "new_tokens": new_tokens,
    }


def mlmodel(about: Packaging, task: str, reads: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """The content of `MLmodel`. :param architecture: class of the model; empty of a prefix."""
    spec, found = about.spec, versions()
    lineage = {"run": spec.run, "family": spec.family, "dataset": spec.dataset_digest, "base": dict(about.base)}
    flavors: dict[str, Any] = {
        "python_function": {
            "loader_module": _MODULE,
            "code": "code",
            "env": {"virtualenv": "python_env.yaml"},
            "python_version": platform.python_version(),
        }
    }
    if architecture:
        flavors["transformers"] = {
            "task": _PIPELINES[task],
            "pipeline_model_type": architecture,
            "model_binary": ".",
            "components": ["tokenizer"],
            "tokenizer_type": "AutoTokenizer",
            "instance_type": "Pipeline",
            "source_model_name": spec.family,
            "transformers_version": found["transformers"],
        }
    return {
        **({"run_id": spec.tracking.run_id} if spec.tracking else {}),
        "flavors": flavors,
        "signature": signature(task, chat=bool(reads["chat"]), new_tokens=int(reads["new_tokens"])),
        **({} if about.example is None else {"saved_input_example_info": dict(_EXAMPLE)}),
        "metadata": {"dropforge": {**reads, **lineage}},
    }


def signature(task: str, *, chat: bool, new_tokens: int) -> dict[str, str | None]:
    """MLflow's signature of a task: a prompt to an answer, or to a label with its probability."""
    inputs: list[dict[str, Any]] = [_column("prompt")]
    if chat:
        inputs.append({**_column("system"), "required": False})
    if task == "classification":
        outputs, params = [_column("label"), _column("score", "double")], None
    else:
        outputs = [_column("answer")]
        params = json.dumps([{"name": "max_new_tokens", "type": "long", "default": new_tokens, "shape": None}])
    return {"inputs": json.dumps(inputs), "outputs": json.dumps(outputs), "params": params}


def requirements(*, prefix: bool) -> list[str]:
    """What loading takes. :param prefix: whether it is one, which peft puts on its base."""
    found = versions()
    names = ["torch", "transformers", "tokenizers", "safetensors", *(["peft"] if prefix else [])]
    return ["mlflow>=3.17,<4", *(f"{name}=={found[name].partition('+')[0]}" for name in names)]


_EXAMPLE: Final = {
    "artifact_path": "input_example.json",
    "type": "dataframe",
    "pandas_orient": "split",
    "serving_input_path": "serving_input_example.json",
}


def _column(name: str, kind: str = "string") -> dict[str, Any]:
    return {"type": kind, "name": name, "required": True}


def _frame(example: Example) -> dict[str, Any]:
    if example.system:
        return {"columns": ["prompt", "system"], "data": [[example.prompt, example.system]]}
    return {"columns": ["prompt"], "data": [[example.prompt]]}


def _architecture(folder: Path, prefix: bool) -> str:
    return "" if prefix else str(json.loads((folder / "config.json").read_text())["architectures"][0])


def _first_rows(spec: RunSpec, code: UserCode, say: Callable[[str], None]) -> list[Row]:
    """The first evaluation rows, as the model reads them. What cannot be read now shall not cost a trained model."""
    try:
        return list(islice(read_rows(open_store(spec.data_root), load_manifest(spec), "eval", code.rows), _LOOKED_AT))
    except Exception as error:
        say(
            f"The evaluation rows cannot be read now ({error!r:.300}): the model has no example of an input, and takes "
            "a prompt as a user's turn, also where its rows were plain texts"
        )
        return []
