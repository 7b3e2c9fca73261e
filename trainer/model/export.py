"""The final model: written as safetensors with its tokenizer, read back from where it was written, and compared.

`model/` holds the whole model, loadable without peft. With low-rank adapters, `model/adapter/` also holds them in
peft's format, with the base model recorded in `adapter_config.json`. A prefix cannot be merged: `model/` is just that.
Beside them lies what MLflow loads the folder by (`trainer.model.packaged`).
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from dropforge.errors import DataError, DropforgeError
from dropforge.store import Store
from trainer.data.batch import Batch
from trainer.data.labels import MADE_FOR, made_for
from trainer.data.prompts import stops
from trainer.data.tokenizer import begin_texts, is_ours
from trainer.model.attention import ON_GPU
from trainer.model.build import Built, is_classifier, is_seq2seq, load_classifier, prefix_length
from trainer.model.packaged import NEW_TOKENS, Packaging
from trainer.model.prefix import open_model
from trainer.model.pyfunc_loader import caches
from trainer.model.quantised import dequantise
from trainer.model.seq2seq import load_seq2seq
from trainer.model.transformers4 import make_readable

TOLERANCE: Final = 1e-3


class ExportError(DropforgeError):
    """What was stored is not the model that was trained."""


@dataclass(frozen=True)
class Exported:
    """What was written.

    :param files: SHA-256 by name, relative to the model's folder.
    :param max_logit_difference: between the live model and the one read back; with adapters, the merge is in it.
    :param base: what the model goes back to, see `Packaging`.
    """

    uri: str
    digest: str
    bytes: int
    files: Mapping[str, str]
    max_logit_difference: float
    base: Mapping[str, str] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        return asdict(self)


def export_model(
    built: Built,
    tokenizer: Any,
    store: Store,
    prefix: str,
    probe: Batch,
    base: str,
    revision: str | None = None,
    packaging: Packaging | None = None,
    local: str = "",
) -> Exported:
    """Write the model under `prefix`, read it back and compare logits.

    The model that is read back takes the place of the live one: there is memory for one, where one trained.

    :param built: on any device; nothing is left of its weights afterwards.
    :param base, revision: the base model's address and commit, recorded in the adapter.
    :param packaging: what MLflow loads it by; without it the folder is for transformers alone.
    :param local: the base model's folder on this machine, where a prefix is read back on it.
    :raises ExportError: if what was read back is another model.
    """
    if built.model.config.get_text_config()._attn_implementation in ON_GPU:  # nor can they do fp32, or be on a CPU
        built.model.set_attn_implementation("eager")
    device = built.model.get_input_embeddings().weight.device
    live = _logits(built.model, probe.ids.to(device))
    with tempfile.TemporaryDirectory(prefix="dropforge-model-") as name:
        folder = Path(name)
        model = built.model
        new_tokens = NEW_TOKENS if packaging is None else packaging.new_tokens
        tokenizer = as_reads(model, tokenizer, None if packaging is None else packaging.length)
        writes = None if is_classifier(model) else as_measured(model, tokenizer, new_tokens)
        mark_ends(tokenizer, [] if writes is None else writes.eos_token_id)
        if built.whole is not None:
            for adapter in built.whole.peft_config.values():
                adapter.base_model_name_or_path, adapter.revision = base, revision
            place = folder if prefix_length(model) else folder / "adapter"
            built.whole.save_pretrained(place, safe_serialization=True, save_embedding_layers=False)
            (place / "README.md").unlink(missing_ok=True)  # a template full of "more information needed"
        if not prefix_length(model):
            dequantise(model)  # merged into bytes, an adapter would be rounded away
            model = model if built.whole is None else built.whole.merge_and_unload()
            if writes is not None:
                model.config.use_cache = True
                model.generation_config = writes
            model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        make_readable(folder)
        if packaging is not None:
            packaging.write(folder, tokenizer, [] if writes is None else writes.eos_token_id)
        files = _upload(folder, store, prefix)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    with tempfile.TemporaryDirectory(prefix="dropforge-check-") as name:
        _download(Path(name), store, prefix, files)
        for weight in model.parameters():
            weight.data = torch.empty(0)  # whoever else holds it, its memory is free
        lm = partial(open_model, local=local)
        load = load_classifier if is_classifier(model) else load_seq2seq if is_seq2seq(model) else lm
        again = _logits(load(name).to(device), probe.ids.to(device))
    difference = float((live - again).abs().max()) if live.numel() else 0.0
    if not difference <= TOLERANCE * max(1.0, float(live.abs().max())):
        raise ExportError(
            f"model {store.uri}/{prefix}",
            f"read back, its logits differ by {difference:.3g} from the trained model's",
            "Do not use it; report this with the run's log",
        )
    digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    return Exported(
        f"{store.uri}/{prefix}".rstrip("/"),
        digest,
        size,
        files,
        difference,
        {} if packaging is None else packaging.base,
    )


def mark_ends(tokenizer: Any, ends: Sequence[int]) -> None:
    """Have what ends an answer left out of a decoded text, as evaluation leaves it out: a token that people added to a
    base for its turns is mostly none of its special ones."""
    from tokenizers import Tokenizer

    backend = getattr(tokenizer, "_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        return
    written = json.loads(backend.to_str())
    shown = [token for token in written["added_tokens"] if token["id"] in ends and not token["special"]]
    for token in shown:
        token["special"] = True
    if shown:
        tokenizer._tokenizer = Tokenizer.from_str(json.dumps(written))


def as_measured(model: Any, tokenizer: Any, new_tokens: int = NEW_TOKENS) -> Any:
    """How an exported model writes: greedily, to the end and at most the length that it was evaluated with. What else
    its base asked for, as a temperature, was not measured.
    """
    import transformers

    kind: Any = transformers.GenerationConfig
    before = model.generation_config
    try:
        ends = list(stops(model, tokenizer))
    except DataError:  # a template that ends no answer, where all of a conversation was learned
        ends = [int(tokenizer.eos_token_id)]
    return kind(
        bos_token_id=before.bos_token_id,
        pad_token_id=tokenizer.pad_token_id,  # which is left out of a decoded text; a base's own may be another one
        decoder_start_token_id=before.decoder_start_token_id,
        eos_token_id=ends,
        max_new_tokens=new_tokens,
        do_sample=False,  # said, since a pipeline would draw lots otherwise
        **({} if caches(model.config) else {"use_cache": False}),
    )


def as_reads(model: Any, tokenizer: Any, length: int | None = None) -> Any:
    """A tokenizer as evaluation uses it: nothing is tidied in an answer, and prompts side by side are padded, on the
    left where answers go on from them. How a classifier's are padded, `for_labels` says.

    :param length: tokens that rows were cut to, as a classifier's texts are wherever they are cut.
    """
    said: dict[str, Any] = {"clean_up_tokenization_spaces": False}
    if is_classifier(model):
        if length is not None and length != tokenizer.model_max_length:
            said |= {MADE_FOR: (most := made_for(tokenizer)), "model_max_length": min(length, most)}
    else:
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        said["padding_side"] = "right" if is_seq2seq(model) else "left"
        if is_ours(tokenizer) and not is_seq2seq(model):
            begin_texts(tokenizer)
    for name, value in said.items():
        setattr(tokenizer, name, value)
        tokenizer.init_kwargs[name] = value  # what it was not made with is not saved
    return tokenizer


def _upload(folder: Path, store: Store, prefix: str) -> dict[str, str]:
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            key = path.relative_to(folder).as_posix()
            files[key] = _sha256(path)
            store.upload(path, prefix + key)
    return files


def _download(folder: Path, store: Store, prefix: str, files: Mapping[str, str]) -> None:
    for key, digest in files.items():
        store.download(prefix + key, folder / key)
        if _sha256(folder / key) != digest:
            raise ExportError(f"model file {prefix}{key}", "it was stored with other bytes", "Check the storage")


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@torch.no_grad()
def _logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    training = model.training
    model.eval()
    more: dict[str, Any] = {} if is_classifier(model) else {"use_cache": False}
    if is_seq2seq(model):  # source and target stand side by side, each within the context
        ids = ids[:, : getattr(model.config, "max_position_embeddings", None)]
        more["decoder_input_ids"] = ids
    found = model(input_ids=ids, **more).logits.float()
    model.train(training)
    return found  # type: ignore[no-any-return]
