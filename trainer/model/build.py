"""The model to train: made from a config or loaded, in fp32."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from dropforge.errors import DropforgeError, RecipeError
from dropforge.hub import check_folder, check_pickles, check_sizes, is_hub_id
from dropforge.shape import check_positions, check_unquantised
from dropforge.store import LASTING, ObjectInfo, Store, error_code, open_store, why_unreadable
from trainer.config import Task
from trainer.data.hub import Through, fetch_from_hub
from trainer.data.model_cache import Filling, Wanted, fetch_through, takes
from trainer.data.node_cache import NodeCache
from trainer.pretrained import load_config, load_weights

CONFIG: Final = "config.json"
PREFIX_CONFIG: Final = "adapter_config.json"  # of peft, in the folder of a prefix

_CLASSIFIER: Final = "ForSequenceClassification"
_LAYER: Final = re.compile(r"\.\d+\.")


@dataclass
class Built:
    """A model ready to train.

    :param model: the Hugging Face model, adapters injected; its trainable weights are fp32. With a prefix, which cannot
        be injected, it is `whole`.
    :param whole: the peft model around it, if there are adapters.
    :param slices: where weights without values (on torch's meta device) are read from, see `trainer.model.hollow`.
    """

    model: Any
    whole: Any = None
    slices: Any = None

    def around(self, copied: Any) -> Built:
        """The same parts of a copy of `whole`, or of the model where there are no adapters."""
        if self.whole is None:
            return Built(copied)
        return Built(copied if self.model is self.whole else copied.get_base_model(), copied)

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        """Names and weights that the optimizer moves, tied ones once."""
        return [(name, weight) for name, weight in self.model.named_parameters() if weight.requires_grad]


def fetch_folder(
    uri: str, folder: Path, *, prefix: bool = False, weights: bool = True, through: Through | None = None
) -> Path:
    """Copy a model's folder from a store to this machine; a local folder stays where it is.

    :param prefix: whether it may also be a prefix that names its base. :param weights: whether to copy them too.
    :param through: the node's cache, whose files are linked instead.
    :raises RecipeError: if nothing is there, or its weights are pickled.
    """
    local = Path(uri.removeprefix("file://"))
    configs = (CONFIG, *([PREFIX_CONFIG] if prefix else []))
    if not uri.startswith("s3://"):
        if not any((local / name).is_file() for name in configs):
            raise RecipeError("recipe key `base.model`", f"{uri} has no config.json", "Name a folder with a model")
        check_pickles((path.name for path in local.iterdir()), uri)
        check_folder(local)
        return local
    with _of_the_user(uri):
        return _fetch_objects(uri, folder, configs, weights=weights, through=through)


@contextmanager
def _of_the_user(uri: str) -> Iterator[None]:
    """:raises RecipeError: where S3 says that trying again changes nothing: no such bucket, no right, an archive."""
    from botocore.exceptions import ClientError

    try:
        yield
    except ClientError as error:
        code, unreadable = error_code(error), why_unreadable(error)
        if unreadable is not None and code not in LASTING:
            cause, mend = unreadable
            raise RecipeError("recipe key `base.model`", f"a file of {uri} cannot be read: {cause}", mend) from None
        if code not in LASTING:
            raise
        raise RecipeError(
            "recipe key `base.model`",
            f"{uri} cannot be read ({code})",
            "Name a bucket that is there, and that the credentials of trainings may read",
        ) from None


def _fetch_objects(uri: str, folder: Path, configs: tuple[str, ...], *, weights: bool, through: Through | None) -> Path:
    store = open_store(uri.rstrip("/"))
    items = [item for item in store.list() if takes(item.key)]  # and no console's mark of a folder, with an empty key
    names = [item.key for item in items]
    check_pickles(names, uri)
    check_sizes({item.key: item.size for item in items}, uri)
    if not set(configs) & set(names) or not any(name.endswith(".safetensors") for name in names):
        raise RecipeError(
            "recipe key `base.model`", f"{uri} has no config.json and safetensors", "Upload the model with both"
        )
    if through is not None and _through(uri, store, items, folder, through, weights):
        return folder
    for name in names:
        if name.endswith(".safetensors") and not weights:
            continue
        store.download(name, folder / name)
    return folder


def _through(
    uri: str, store: Store, items: Sequence[ObjectInfo], folder: Path, through: Through, weights: bool
) -> bool:
    """Link a model's files of the node's cache, which is filled where it lacks them; False if it cannot be used."""

    def fill(filling: Filling) -> None:
        filling.add([Wanted(item.key, item.size) for item in items], bring)

    def bring(key: str, work: Path) -> Path:
        # By its tag: what the name stands for must not be what somebody uploads meanwhile.
        try:
            store.download(key, work / key, tags[key])
        except DropforgeError as error:
            raise RecipeError(
                "recipe key `base.model`",
                f"{key} of {uri} was replaced or removed while it was fetched",
                "Put each model into a folder of its own, and start again",
            ) from error
        return work / key

    tags = {item.key: item.etag for item in items}

    listed = hashlib.sha256(json.dumps(sorted((item.key, item.size, item.etag) for item in items)).encode())
    name = f"{uri.rstrip('/')}@{listed.hexdigest()[:16]}"
    return fetch_through(through.node, name, folder, fill, weights=weights, check=through.check)


def upload_folder(folder: Path, store: Store) -> None:
    """Copy a model's folder into a store, its config last: without it no reader takes the folder for a model."""
    last = (folder / CONFIG, folder / PREFIX_CONFIG)
    paths = [path for path in folder.rglob("*") if path.is_file()]
    for path in sorted(paths, key=lambda path: path in last):
        store.upload(path, path.relative_to(folder).as_posix())


def fetch_base(
    model: str,
    revision: str | None,
    folder: Path,
    *,
    weights: bool = True,
    node: NodeCache | None = None,
    check: Callable[[], None] = lambda: None,
) -> Path:
    """The folder of a base model on this machine, from the hub or from an address.

    :param folder: for a store's copy. :param weights: whether they are needed, or only what tells its shape and tokens.
    :param node: the node's cache, if there is one; it holds the files until it is released.
    :param check: called while another pod fetches the same; it may raise to stop.
    :raises RecipeError, UnreachableError: if it is not there, or the hub does not answer.
    """
    through = Through(node, folder, check) if node is not None else None
    if is_hub_id(model):
        return fetch_from_hub(model, revision, weights=weights, through=through)
    return fetch_folder(model, folder, weights=weights, through=through)


def is_classifier(model: Any) -> bool:
    """Whether a model gives each row logits of labels, and not of the next token."""
    return type(model).__name__.endswith(_CLASSIFIER)


def is_seq2seq(model: Any) -> bool:
    """Whether a model reads with an encoder and writes with a decoder."""
    return bool(getattr(model.config, "is_encoder_decoder", False)) and not is_classifier(model)


def task_of(folder: str | Path, revision: str | None = None) -> Task:
    """What a model was made for, by its config. :raises RecipeError: if that cannot be read."""
    if (Path(folder) / PREFIX_CONFIG).is_file() and not (Path(folder) / CONFIG).is_file():
        return "causal-lm"
    config = _read_config(folder, revision)
    if any(str(name).endswith(_CLASSIFIER) for name in config.architectures or ()):
        return "classification"
    return "sequence-to-sequence" if config.is_encoder_decoder else "causal-lm"


def name_labels(config: Any, labels: Sequence[str], pad: int) -> None:
    """Write labels and padding into a config. :param pad: decoders pool the last token that is not this one."""
    config.id2label = dict(enumerate(labels))
    config.label2id = {label: number for number, label in enumerate(labels)}
    config.problem_type = "single_label_classification"
    config.get_text_config().pad_token_id = pad


def head_labels(folder: str | Path, revision: str | None = None) -> tuple[str, ...] | None:
    """The labels of a model that is a classifier, in the order of their numbers; None if it is none.

    :raises RecipeError: if its config cannot be read.
    """
    if (Path(folder) / PREFIX_CONFIG).is_file() and not (Path(folder) / CONFIG).is_file():
        return None  # a prefix, which a classifier cannot have
    config = _read_config(folder, revision)
    if not any(str(name).endswith(_CLASSIFIER) for name in config.architectures or ()):
        return None
    return tuple(str(config.id2label[number]) for number in sorted(config.id2label))


def _read_config(folder: str | Path, revision: str | None) -> Any:
    try:
        return load_config(folder, revision)
    except (OSError, ValueError, KeyError) as error:
        cause = " ".join(str(error).split())[:300]
        raise RecipeError(
            "recipe key `base.model`", f"{folder} has no config that can be read ({cause})", "Name another"
        ) from error


def load_pretrained(
    kind: Any, folder: str | Path, revision: str | None, what: str, mend: str, config: Any = None
) -> tuple[Any, list[str]]:
    """A model in fp32, whatever the files hold, and the names of its weights that they lack, sorted.

    :param kind: of transformers' auto classes. :param what: and :param mend: for the error.
    :param config: as of `load_weights`.
    :raises RecipeError: if it cannot be loaded.
    """
    config = _read_config(folder, revision) if config is None else config
    check_unquantised(config.to_dict(), str(folder))
    try:
        return load_weights(kind, folder, revision, config)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        cause = " ".join(str(error).split())[:300]
        raise RecipeError(
            "recipe key `base.model`", f"{folder} cannot be loaded {what} with safetensors ({cause})", mend
        ) from error


def load_classifier(
    folder: str | Path,
    revision: str | None = None,
    *,
    labels: Sequence[str] | None = None,
    pad: int | None = None,
    seed: int = 0,
) -> Any:
    """A model for sequence classification in fp32.

    :param labels: those it is to know; a model without a head gets one from `seed`. Without them it must have one.
    :param pad: id for padding, by which a decoder finds the last token of a row; without it the model's own counts.
    :raises RecipeError: if it cannot be loaded so, or weights besides the head are missing.
    """
    from transformers import AutoModelForSequenceClassification

    config = _read_config(folder, revision)
    if config.is_encoder_decoder:  # its head pools where end tokens stand, which was not tried with any row
        raise RecipeError(
            "recipe key `base.model`",
            f"{folder} is an encoder-decoder, which learns answers here and no labels",
            "Name an encoder such as DistilBERT, or a decoder, or set `task: sequence-to-sequence`",
        )
    if labels is not None:
        assert pad is not None
        name_labels(config, labels, pad)
    torch.manual_seed(seed)
    model, absent = load_pretrained(
        AutoModelForSequenceClassification,
        folder,
        revision,
        "for sequence classification",
        "Name a model that transformers knows for `AutoModelForSequenceClassification`",
        config=config,
    )
    new = () if labels is None else tuple(f"{name}." for name in head_modules(model))
    missing = [name for name in absent if not name.startswith(new) or _LAYER.search(name)]
    if missing:
        raise RecipeError(
            "recipe key `base.model`",
            f"{folder} lacks {len(missing)} of its weights, as {missing[0]}",
            "Name a model whose files are whole" if labels is not None else "Name a model with a head for its labels",
        )
    return model


def head_modules(model: Any) -> list[str]:
    """Names of the parts of a classifier that stand above its base model, and are new where a base gets a head."""
    return [
        name
        for name, part in model.named_children()
        if name != model.base_model_prefix and any(True for _ in part.parameters())
    ]


def load_model(folder: str | Path, revision: str | None = None) -> Any:
    """A causal language model in fp32, whatever the files hold: bf16 weights swallow small updates.

    :raises RecipeError: if it cannot be loaded.
    """
    from transformers import AutoModelForCausalLM

    config = _read_config(folder, revision)
    if config.is_encoder_decoder:  # of some the library would take the decoder alone
        raise RecipeError(
            "recipe key `base.model`",
            f"{folder} is an encoder-decoder, which reads a prompt and writes the answer to it",
            "Set `task: sequence-to-sequence`, or name a causal language model",
        )
    model, absent = load_pretrained(
        AutoModelForCausalLM,
        folder,
        revision,
        "as a causal language model",
        "Name such a model, and see that this machine can reach it",
        config,
    )
    if any(str(name).endswith(_CLASSIFIER) for name in model.config.architectures or ()):
        raise RecipeError(
            "recipe key `base.model`",
            f"{folder} is a classifier, whose head gives labels and no text",
            "Set `task: classification`, or name a language model",
        )
    weights = dict(model.named_parameters(remove_duplicate=False))  # buffers follow from the config
    missing = [name for name in absent if name in weights]
    if missing:
        raise RecipeError(
            "recipe key `base.model`",
            f"{folder} lacks {len(missing)} of its weights, as {missing[0]}",
            "Name a language model whose files are whole",
        )
    return model


def check_vocabulary(model: Any, largest: int) -> None:
    """:raises RecipeError: if a token id lies outside the model's embedding."""
    rows = model.get_input_embeddings().weight.shape[0]
    if largest >= rows:
        raise RecipeError(
            "recipe key `base`",
            f"the tokenizer gives token {largest}, the model has {rows} embeddings",
            "Use the model's own tokenizer",
        )


def prefix_length(model: Any) -> int:
    """Places before each document that a prefix takes; 0 for a model without one."""
    configs = (getattr(model, "peft_config", None) or {}).values()
    return max((getattr(config, "num_virtual_tokens", 0) for config in configs), default=0)


def context_of(model: Any) -> int | None:
    """Longest row in tokens that the model takes, where its config tells: its context without a prefix's places."""
    context = getattr(model.config, "max_position_embeddings", None)
    return context - prefix_length(model) if isinstance(context, int) else None


def check_context(model: Any, length: int) -> None:
    """:raises RecipeError: if rows would be longer than the model was made for."""
    context, prefix = context_of(model), prefix_length(model)
    check_positions(length, None if context is None else context + prefix, prefix)


def takes_positions(model: Any) -> bool:
    """Whether the model's forward knows `position_ids`; without them documents cannot be kept apart."""
    return "position_ids" in inspect.signature(model.forward).parameters
