"""How MLflow loads a model of Dropforge: `mlflow.pyfunc.load_model("models:/FAMILY@champion")`.

This file is copied beside the weights, as `code/dropforge_pyfunc.py`, and needs nothing of Dropforge there: only torch,
transformers and, for a prefix, peft. What the model was trained to read stands in the metadata of `MLmodel`. A prompt
is a user's turn where the training rows were conversations, else a text as it stands; answers are written greedily.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PREFIX = "adapter_config.json"
PREFIX_WEIGHTS = "adapter_model.safetensors"


def _load_pyfunc(path: str) -> Reader:  # the name is MLflow's
    import torch
    import yaml

    folder = Path(path)
    about = yaml.safe_load((folder / "MLmodel").read_bytes())["metadata"]["dropforge"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return (Classifier if about["task"] == "classification" else Writer)(folder, about, device)


class Reader:
    """A model and its tokenizer.

    :param about: `task`, `chat` (whether a prompt is a user's turn), `special` (whether the tokenizer adds its special
        tokens to a turn), `begin` (tokens before a plain text), `ends` (tokens that end an answer), `new_tokens`.
    """

    auto = "AutoModelForSequenceClassification"

    def __init__(self, folder: Path, about: dict[str, Any], device: str) -> None:
        import transformers

        self.about, self.device = about, device
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
        self.model: Any = self.load(folder).to(device).eval()

    def load(self, folder: Path) -> Any:
        return self.weights(str(folder))

    def weights(self, source: str, revision: str | None = None) -> Any:
        """A model of a folder or a hub: safetensors alone, and none of its own code."""
        import transformers

        config = transformers.AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
        if any(hub_kernels(config)):
            raise ValueError(f"model {source}: its config.json names a kernel of a hub, and no code of a model is run")
        kind = getattr(transformers, self.auto)
        return kind.from_pretrained(
            source, config=config, revision=revision, use_safetensors=True, trust_remote_code=False
        )

    def ids(self, prompt: str, system: str | None) -> list[int]:
        """A prompt's tokens, as the training read such rows."""
        if not self.about["chat"]:
            found = [*self.about["begin"], *self._tokens(prompt, special=not self.about["begin"])]
            goes_on = self.about["task"] == "causal-lm" and found[-1:] == [self.tokenizer.eos_token_id]
            return found[:-1] if goes_on else found
        messages = [{"role": "user", "content": prompt}]
        if system:
            messages.insert(0, {"role": "system", "content": system})
        asked = self.about["task"] != "classification"
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=asked)
        return self._tokens(text, special=self.about["special"])

    def _tokens(self, text: str, *, special: bool) -> list[int]:
        longest = self.tokenizer.model_max_length
        cut = {"truncation": True, "max_length": longest} if self.auto.endswith("Classification") else {}
        found = self.tokenizer(text, add_special_tokens=special, **(cut if longest < 1 << 30 else {}))
        return list(found["input_ids"])

    def predict(self, inputs: Any, params: dict[str, Any] | None = None) -> Any:
        """A data frame with the columns of the signature to one."""
        import pandas
        import torch

        inputs = inputs.explode(list(inputs.columns), ignore_index=True)  # MLflow makes one row of a dict of lists
        systems = inputs["system"] if "system" in inputs else [None] * len(inputs)
        with torch.no_grad():
            rows = [
                self.answer(self.ids(str(prompt), system if isinstance(system, str) else None), params or {})
                for prompt, system in zip(inputs["prompt"], systems, strict=True)
            ]
        return pandas.DataFrame(rows)

    def answer(self, ids: list[int], params: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError


class Classifier(Reader):
    """Texts to labels."""

    def answer(self, ids: list[int], params: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        import torch

        shares = self.model(input_ids=torch.tensor([ids], device=self.device)).logits[0].float().softmax(-1)
        best = int(shares.argmax())
        return {"label": str(self.model.config.id2label[best]), "score": float(shares[best])}


class Writer(Reader):
    """Prompts to answers, by a causal language model or an encoder-decoder."""

    def load(self, folder: Path) -> Any:
        self.auto = "AutoModelForSeq2SeqLM" if self.about["task"] == "sequence-to-sequence" else "AutoModelForCausalLM"
        if not (folder / PREFIX).is_file():
            return super().load(folder)
        of_prefix = json.loads((folder / PREFIX).read_text()).get("peft_type") == "PREFIX_TUNING"
        if not of_prefix or not (folder / PREFIX_WEIGHTS).is_file():  # other kinds could run code
            raise ValueError(f"model {folder}: it is no prefix with a {PREFIX_WEIGHTS}. Export the run's model again")
        from peft import PeftModel

        return PeftModel.from_pretrained(self._base(), str(folder))

    def weights(self, source: str, revision: str | None = None) -> Any:
        """A model that writes as it was measured: greedily, whatever its base's generation_config.json asks for.

        Some of what stands there (contrastive search, DoLa) would have transformers fetch code from a hub.
        """
        import transformers

        kind: Any = transformers.GenerationConfig
        model = super().weights(source, revision)
        begin = getattr(model.config, "decoder_start_token_id", None)  # which the training began with
        model.generation_config = kind(decoder_start_token_id=begin)
        return model

    def _base(self) -> Any:
        """The model that a prefix stands before, and no other: a commit of the hub, or a folder of known bytes."""
        base = self.about["base"]
        if base.get("revision"):
            return self.weights(base["model"], base["revision"])
        folder = Path(base["model"].removeprefix("file://"))
        if base["model"].startswith("s3://"):
            from mlflow.artifacts import download_artifacts

            folder = Path(download_artifacts(base["model"]))
        found = folder_digest(folder)
        if found != base["digest"]:
            raise ValueError(
                f"base model {base['model']}: its files have the digest {found[:12]}, and the prefix was trained on "
                f"{base['digest'][:12]}. Give the base model's files back"
            )
        return super().load(folder)

    def answer(self, ids: list[int], params: dict[str, Any]) -> dict[str, Any]:
        import torch

        asked = torch.tensor([ids], device=self.device)
        most = int(params.get("max_new_tokens") or self.about["new_tokens"])
        context = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if isinstance(context, int) and self.about["task"] == "causal-lm":
            most = max(1, min(most, context - len(ids)))
        ends = self.about["ends"]
        found = self.model.generate(
            input_ids=asked,
            attention_mask=torch.ones_like(asked),
            do_sample=False,
            max_new_tokens=most,
            use_cache=caches(self.model.config),
            eos_token_id=ends or None,
            pad_token_id=self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else (ends or [0])[0],
        )[0]
        said = (found if self.about["task"] == "sequence-to-sequence" else found[len(ids) :]).tolist()
        said = said[:-1] if said and said[-1] in ends else said  # it may be no special token
        return {"answer": self.tokenizer.decode(said, skip_special_tokens=True)}


def hub_kernels(config: Any) -> Iterator[tuple[str, str]]:
    """Key and value of what a config, or a part of it, names as a kernel of a hub, which are written OWNER/NAME."""
    for key in ("attn_implementation", "experts_implementation"):
        value = getattr(config, f"_{key}", None)
        if isinstance(value, str) and "/" in value:
            yield key, value
    for name in getattr(config, "sub_configs", None) or ():
        if (part := getattr(config, name, None)) is not None and part is not config:
            yield from hub_kernels(part)


def caches(config: Any) -> bool:
    """Whether a model writes with its cache: transformers makes a decoder's for as many layers as the encoder has."""
    deep = getattr(config, "num_decoder_layers", None) or getattr(config, "decoder_layers", None)
    return deep in (None, getattr(config, "num_hidden_layers", None))


def folder_digest(folder: Path) -> str:
    """Digest of a base model: of its config's and its weights' files, and of no hidden ones: a pod has none. Folders
    and links that lead nowhere are no files, whatever they are called."""
    names = sorted(
        path.name
        for path in folder.iterdir()
        if path.name.endswith((".safetensors", ".json")) and not path.name.startswith(".") and path.is_file()
    )
    found = {}
    for name in names:
        with (folder / name).open("rb") as stream:
            found[name] = hashlib.file_digest(stream, "sha256").hexdigest()
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()
