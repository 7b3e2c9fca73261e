"""Rows of prompts with their answers, and small encoder-decoders for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from dropforge.store import open_store
from trainer.data.tokenizer import SPECIAL, train_tokenizer, wrap_tokenizer

from .toy import _WORDS, Toy, sample_rows, write_dataset

T5: Final[dict[str, Any]] = {
    "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4, "dropout_rate": 0.0,
}  # fmt: skip
BART: Final[dict[str, Any]] = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64, "dropout": 0.0,
}  # fmt: skip
# The scaled head of T5, the head without a scale of T5 1.1, and BART.
KINDS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "t5": ("t5", T5),
    "t5-gated": ("t5", {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "bart": ("bart", BART),
}


def pair_tokenizer() -> Any:
    """It puts the end token behind a text, and has no chat template: as that of T5."""
    made = wrap_tokenizer(train_tokenizer(iter([" ".join(_WORDS)] * 40), 320, ended=True), 64)
    made.chat_template = None
    return made


def make_pairs(kind: str, **more: Any) -> Any:
    """A small model of one of `KINDS`."""
    name, config = KINDS[kind]
    tokenizer = pair_tokenizer()
    ids = dict(zip(("pad_token_id", "bos_token_id", "eos_token_id"), map(tokenizer.convert_tokens_to_ids, SPECIAL[:3]),
                   strict=True))  # fmt: skip
    start = ids["pad_token_id"] if name == "t5" else ids["eos_token_id"]
    torch.manual_seed(0)
    asked = {"vocab_size": 320, "decoder_start_token_id": start, **ids, **config, **more}
    return AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(name, **asked))


def pair_base(folder: Path, kind: str, **more: Any) -> str:
    """A small base model with its tokenizer, as from a hub."""
    make_pairs(kind, **more).save_pretrained(folder)
    pair_tokenizer().save_pretrained(folder)
    return str(folder)


def pair_toy(root: str, train: int = 60, held: int = 17) -> Toy:
    rows = {"train": sample_rows(train), "eval": sample_rows(held, seed=1)}
    return Toy(root, write_dataset(open_store(root), rows))
