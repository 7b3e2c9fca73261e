"""Rows with labels, and small base models for them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from dropforge.store import open_store
from trainer.data.tokenizer import SPECIAL, train_tokenizer, wrap_tokenizer

from .toy import Toy, write_dataset

LABELS: Final = ("animal", "colour", "place")
WORDS: Final = {
    "animal": ("cat", "dog", "bird"),
    "colour": ("red", "green", "blue"),
    "place": ("house", "river", "tree"),
}
FILL: Final = ("the", "a", "small", "big", "old", "and", "sees", "likes")


def labelled_rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Texts of varied length, some as conversations; one word among them tells the label."""
    generator = random.Random(seed)
    rows: list[dict[str, Any]] = []
    for _ in range(count):
        label = generator.choice(LABELS)
        words = [generator.choice(FILL) for _ in range(generator.randint(1, 12))]
        words.insert(generator.randint(0, len(words)), generator.choice(WORDS[label]))
        text = " ".join(words)
        if generator.random() < 0.2:
            rows.append({"messages": [{"role": "user", "content": text}], "label": label})
        else:
            rows.append({"text": text, "label": label})
    return rows


def labelled_toy(root: str, train: int = 60, held: int = 17) -> Toy:
    rows = {"train": labelled_rows(train, 0), "eval": labelled_rows(held, 1)}
    return Toy(root, write_dataset(open_store(root), rows))


def small_tokenizer(framed: bool = True) -> Any:
    texts = [" ".join((*FILL, *WORDS[label])) for label in LABELS] * 20
    return wrap_tokenizer(train_tokenizer(iter(texts), 320, framed=framed), 64)


def classifier_base(folder: Path, kind: str, **config: Any) -> str:
    """A small base model without a head for labels, as from a hub: an encoder, or a language model."""
    tokenizer = small_tokenizer()
    names = ("pad_token_id", "bos_token_id", "eos_token_id")
    ids = dict(zip(names, map(tokenizer.convert_tokens_to_ids, SPECIAL[:3]), strict=True))
    if kind == "distilbert":
        shape = {"dim": 32, "hidden_dim": 48, "n_layers": 3, "n_heads": 4, "max_position_embeddings": 64,
                 "dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0}  # fmt: skip
        make: Any = AutoModel
    else:
        shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
                 "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
        make = AutoModelForCausalLM
    torch.manual_seed(0)
    made = make.from_config(AutoConfig.for_model(kind, vocab_size=320, **{**ids, **shape, **config}))
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
