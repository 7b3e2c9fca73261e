"""A model with random weights from any causal config of transformers: what it may say, and what is checked."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch

from dropforge.errors import DropforgeError, RecipeError
from trainer.config import Scratch, Task
from trainer.data.tokenizer import BOS, END, EOS, PAD
from trainer.model.build import Built, name_labels
from trainer.pretrained import make_random

_KEY: Final = "recipe key `base.scratch.config"
_TOKENS: Final = tuple(
    f"{name}_token_id" for name in ("bos", "eos", "pad", "decoder_start", "forced_bos", "forced_eos")
)
# Keys of every config that say nothing of how a model is built, or that belong to somebody else, with who decides.
_NOT_HERE: Final = {
    **dict.fromkeys(_TOKENS, "the tokenizer is trained on the drop, and its tokens are the model's"),
    **dict.fromkeys(("dtype", "torch_dtype"), "weights are fp32, and `train.precision` is the arithmetic"),
    "attn_implementation": "`train.attention` chooses it",
    "use_cache": "training has no cache, and the exported model has one",
    "quantization_config": "new weights are not quantised",
    "auto_map": "code of a model's own is not run",
    "architectures": "it follows from `model_type`",
    "transformers_version": "it does not shape a model",
}
_OLD_ROPE: Final = ("rope_theta", "rope_scaling", "partial_rotary_factor")  # taken wherever there are rope_parameters
_ANY: Final = {token: index for index, token in enumerate((PAD, BOS, EOS, END))}  # where ids do not matter
_LOOK: Final = 12  # tokens of the row that shows whether a model looks ahead


def scratch_config(scratch: Scratch, special: Mapping[str, int]) -> Any:
    """The Hugging Face config of a new model. :param special: ids of the special tokens by their text.

    :raises RecipeError: for keys and values that the model's config does not have, naming them.
    """
    from transformers import AutoConfig

    plain = scratch.plain
    kind = str(plain.pop("model_type"))
    if scratch.config is not None:
        _check_keys(_config_class(kind), plain, "")
    tokens = {"bos_token_id": special[BOS], "eos_token_id": special[EOS], "pad_token_id": special[PAD]}
    try:
        return AutoConfig.for_model(kind, **plain, **tokens)
    except Exception as error:  # the library has errors of its own for a wrong type, and more of them by release
        if scratch.config is None:
            raise
        cause = " ".join(str(error).split())[:300]
        raise RecipeError(f"{_KEY}`", f"{kind} does not take it ({cause})", "Fix the value") from error


def begin_decoder(config: Any, special: Mapping[str, int]) -> None:
    """Have an encoder-decoder of this config begin its answers with the begin token, and end them with the end token.

    :param special: ids of the special tokens by their text.
    """
    config.decoder_start_token_id = special[BOS]
    if getattr(config, "forced_eos_token_id", None) is not None:
        config.forced_eos_token_id = special[EOS]


def check_scratch(scratch: Scratch, task: Task = "causal-lm") -> None:
    """See that a new model can be what the recipe says, before anything is made of it.

    :raises RecipeError: for a config that is unknown, of no model for the task, or wrong.
    """
    if scratch.config is None:
        return
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    )

    config = scratch_config(scratch, _ANY)
    if task == "classification":
        if config.model_type not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES or config.is_encoder_decoder:
            raise RecipeError(
                f"{_KEY}.model_type`", f"{config.model_type} learns no labels here", "Name an encoder or a decoder"
            )
        return
    if task == "sequence-to-sequence":
        if config.model_type not in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES or not config.is_encoder_decoder:
            raise RecipeError(
                f"{_KEY}.model_type`", f"{config.model_type} is no encoder-decoder of texts", "Name one, such as `t5`"
            )
        return
    if config.is_encoder_decoder:  # of some the library would make the decoder alone
        raise RecipeError(
            f"{_KEY}.model_type`",
            f"{config.model_type} is an encoder-decoder, and no causal language model",
            "Set `task: sequence-to-sequence`, or name a decoder",
        )
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise RecipeError(f"{_KEY}.model_type`", f"{config.model_type} is no causal language model", "Name one")


def longest(scratch: Scratch) -> int | None:
    """Longest sequence in tokens that the new model is made for; None where its kind has no limit."""
    if scratch.config is None:
        return scratch.context
    config = scratch_config(scratch, _ANY)
    found = getattr(config, "max_position_embeddings", None)
    return found if isinstance(found, int) else None


def make_scratch(
    scratch: Scratch,
    special: Mapping[str, int],
    seed: int,
    labels: Sequence[str] | None = None,
    task: Task = "causal-lm",
) -> Built:
    """A new model with weights from `seed`, the same on every rank.

    :param labels: those of a classifier. :param task: what it is made for, if it is no classifier.
    :raises RecipeError: if its kind does not do for training: see `scratch_config`, or it looks ahead.
    :raises DropforgeError: if the library left a weight as the memory was.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification

    config = scratch_config(scratch, special)
    kind: Any = AutoModelForCausalLM
    if task == "sequence-to-sequence":
        begin_decoder(config, special)
        kind = AutoModelForSeq2SeqLM
    if labels is not None:
        name_labels(config, labels, special[PAD])
        kind = AutoModelForSequenceClassification
    torch.manual_seed(seed)
    try:
        with _marked_memory():
            model = make_random(kind, config)
    except Exception as error:
        if scratch.config is None:
            raise
        cause = " ".join(str(error).split())[:300]
        raise RecipeError(f"{_KEY}`", f"no {config.model_type} can be made of it ({cause})", "Fix the sizes") from error
    check_initialised(model)
    if scratch.config is not None and kind is AutoModelForCausalLM:
        check_causal(model)
    if kind is AutoModelForCausalLM:  # a chat ends with its turn, a text with its end: generation stops at both
        model.generation_config.eos_token_id = [special[EOS], special[END]]
    return Built(model)


def check_initialised(model: Any) -> None:
    """:raises DropforgeError: if a weight is not finite: the library did not initialise it."""
    for name, weight in model.named_parameters():
        if not bool(torch.isfinite(weight).all()):
            raise DropforgeError(
                f"the new model's weight {name}",
                f"this release of transformers does not initialise it for {model.config.model_type}",
                "Choose another `model_type`, or start from a trained model with `base.model`",
            )


@torch.no_grad()
def check_causal(model: Any) -> None:
    """:raises RecipeError: if a token's logits depend on those after it: an encoder, which would read its answers."""
    training = model.training
    model.eval()
    ids = torch.arange(_LOOK)[None] % model.get_input_embeddings().weight.shape[0]
    other = ids.clone()
    other[0, -1] = ids[0, 0]
    first, second = (model(input_ids=row, use_cache=False).logits[0, :-1] for row in (ids, other))
    model.train(training)
    difference = float((first - second).abs().max())
    if not difference <= 1e-4 * max(1.0, float(first.abs().max())):
        raise RecipeError(
            f"{_KEY}.model_type`",
            f"{model.config.model_type} looks at what comes after a token (logits differ by {difference:.2g})",
            "Set `is_decoder: true` if it has that key, or name a decoder",
        )


@contextmanager
def _marked_memory() -> Iterator[None]:
    """Memory that nobody writes is NaN: torch fills it so where operations are to be deterministic."""
    before, only_warns = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    flags: Any = torch.utils.deterministic
    filled = flags.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    flags.fill_uninitialized_memory = True
    try:
        yield
    finally:
        flags.fill_uninitialized_memory = filled
        torch.use_deterministic_algorithms(before, warn_only=only_warns)


def _config_class(kind: str) -> Any:
    from transformers import CONFIG_MAPPING

    if kind not in CONFIG_MAPPING:
        near = difflib.get_close_matches(kind, list(CONFIG_MAPPING.keys()), 1)
        raise RecipeError(
            f"{_KEY}.model_type`",
            f"this release of transformers has no {kind!r}",
            f"Did you mean `{near[0]}`?" if near else "Name one that it has",
        )
    return CONFIG_MAPPING[kind]


def _check_keys(config: Any, values: Mapping[str, Any], path: str) -> None:
    """:raises RecipeError: for the first key that is none of the config's own."""
    known = _own_keys(config)
    for key, value in values.items():
        thing = f"{_KEY}.{path}{key}`"
        if key in _NOT_HERE:
            raise RecipeError(thing, _NOT_HERE[key], "Leave it out")
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            kind = getattr(config, "model_type", "") or config.__name__
            raise RecipeError(
                thing,
                f"{kind} has no such key",
                f"Did you mean `{near[0]}`?" if near else f"Known: {', '.join(sorted(known))}",
            )
        inner = (getattr(config, "sub_configs", None) or {}).get(key)
        if isinstance(value, Mapping) and inner is not None:
            _check_keys(inner, value, f"{path}{key}.")


def _own_keys(config: Any) -> set[str]:
    """Keys by which a kind of model differs from all others."""
    from transformers import PreTrainedConfig

    if dataclasses.is_dataclass(config):
        common = {field.name for field in dataclasses.fields(PreTrainedConfig)}
        own = {field.name for field in dataclasses.fields(config)} - common
    else:  # as some were before transformers 5.20
        own = set(inspect.signature(config.__init__).parameters) - {"self", "kwargs"}
    own |= set(getattr(config, "attribute_map", {})) | {"tie_word_embeddings"}
    return own | set(_OLD_ROPE) if "rope_parameters" in own else own
