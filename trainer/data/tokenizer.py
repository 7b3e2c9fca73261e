"""The tokenizer of a model made from a config: byte-level BPE trained on the dataset's train split.

It is trained once per run and published by conditional PUT, so that all nodes and all attempts use the same bytes.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Final

from dropforge.errors import DataError, DropforgeError, RecipeError
from dropforge.model_files import LARGEST_FRAME
from trainer.pretrained import load_tokenizer_files

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PAD, BOS, EOS, START, END = "<|pad|>", "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"
SPECIAL: Final = (PAD, BOS, EOS, START, END)
TRAINING_CHARACTERS: Final = 50_000_000  # more text changes a small vocabulary little
MOST_PER_BYTE: Final = 16  # tokens; those known make one at most
_PROBE: Final = "The quick brown fox jumps over the lazy dog, aaaaaaaa 0123456789.\n\tÄé 東京 🙂 "

CHAT_TEMPLATE: Final = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# For models that bring neither a chat template nor tokens for one: plain words, and the model's own end token.
PLAIN_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{{ message['role'].capitalize() + ':\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{{ '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:\\n' }}{% endif %}"
)


def plain_template(tokenizer: Any) -> str:
    """`PLAIN_TEMPLATE` for a tokenizer: it begins as the tokenizer begins any text, with its begin token or without."""
    begin = tokenizer.bos_token_id
    if begin is None or tokenizer("a")["input_ids"][:1] != [begin]:
        return PLAIN_TEMPLATE
    return "{{ bos_token }}" + PLAIN_TEMPLATE


def train_tokenizer(texts: Iterable[str], vocab_size: int, *, framed: bool = False, ended: bool = False) -> bytes:
    """Train byte-level BPE; the content of `tokenizer.json`, the same for the same texts.

    :param framed: whether the tokenizer itself puts a text between begin and end token, as those of encoders do.
    :param ended: whether it puts the end token alone behind a text, as those of T5 do.
    :param vocab_size: at least 261: 256 bytes and 5 special tokens; fewer merges are made if the text has no more.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=32,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if framed or ended:
        ends = [(token, tokenizer.token_to_id(token)) for token in ((BOS, EOS) if framed else (EOS,))]
        frame = f"{BOS} $A {EOS}" if framed else f"$A {EOS}"
        tokenizer.post_processor = processors.TemplateProcessing(single=frame, special_tokens=ends)
    return str(tokenizer.to_str()).encode()


def wrap_tokenizer(data: bytes, context: int | None) -> Any:
    """A `PreTrainedTokenizerFast` around the bytes of `train_tokenizer`. :param context: None without a limit."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=Tokenizer.from_buffer(data),
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        extra_special_tokens=[START, END],
        chat_template=CHAT_TEMPLATE,
        **({} if context is None else {"model_max_length": context}),
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(folder: str | Path, revision: str | None = None, *, ends: bool = True) -> Any:
    """The tokenizer beside a model.

    :param ends: whether it needs an end token, as text that a model is to continue does.
    :raises DataError: if there is none, or none that a model could be trained with.
    """
    name = f"tokenizer of {folder}"
    try:
        with no_panic(name):
            tokenizer = load_tokenizer_files(folder, revision)
    except DropforgeError:
        raise
    except Exception as error:  # the library below raises this very class
        cause = " ".join(str(error).split())[:300]
        raise DataError(name, cause, "Name a base model with a tokenizer beside it") from error
    if not tokenizer.is_fast:
        raise DataError(name, "it has no fast form", "Save it with a tokenizer.json")
    for key, kind in (("model_max_length", (int, float)), ("chat_template", (str, dict, NoneType))):
        if not isinstance(value := getattr(tokenizer, key, None), kind):
            raise DataError(name, f"its `{key}` is {str(value)[:100]!r}", f"Fix `{key}` in its tokenizer_config.json")
    _check_length(tokenizer, name)
    if ends and tokenizer.eos_token_id is None:
        raise DataError(
            name,
            "it has no end token, so a model could not learn to stop",
            "Set `eos_token` in its tokenizer_config.json",
        )
    _keep_settings(tokenizer)
    return tokenizer


def _keep_settings(tokenizer: Any) -> None:
    """Have a tokenizer save each switch that its class takes: its library leaves out some, as Llama's `legacy`, and
    reads otherwise without them.
    """
    for name in inspect.signature(type(tokenizer).__init__).parameters:
        value = vars(tokenizer).get(name)
        if isinstance(value, bool):
            tokenizer.init_kwargs.setdefault(name, value)


@contextmanager
def no_panic(name: str = "tokenizer of the base model") -> Iterator[None]:
    """Make an error of what ends the library below, as a regular expression that gives up; also as a decorator.

    :raises DataError: then. A panic is no Exception, so nothing that treats a user's mistakes would see it.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # its module cannot be imported
            raise
        cause = f"its library gave up on a text ({' '.join(str(error).split())[:200]})"
        raise DataError(name, cause, "Name a base model with a tokenizer that reads any text") from None


def unknown_id(tokenizer: Any) -> int | None:
    """The id by which a tokenizer reads letters that it does not know; None if it knows all, by bytes or otherwise."""
    found = tokenizer.unk_token_id
    # GPT-2's and others' is the end token, which nothing but an end becomes.
    special = (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id)
    return None if found is None or found in special else int(found)


def _check_length(tokenizer: Any, name: str) -> None:
    """:raises DataError: if a tokenizer makes so many tokens of a text that no memory would hold those of a drop."""
    try:
        with no_panic(name):
            length = len(tokenizer(_PROBE, verbose=False)["input_ids"])
    except DropforgeError:
        raise
    except Exception:  # it has no token for letters that it never saw, as one of genomes: its own rows may all do
        return
    size = len(_PROBE.encode())
    if length > MOST_PER_BYTE * size + LARGEST_FRAME:
        raise DataError(
            name, f"it makes {length:,} tokens of {size} bytes", "Name a base model with a tokenizer of few tokens"
        )


def add_tokens(tokenizer: Any, names: Sequence[str]) -> None:
    """Have a tokenizer read each of these as one token, wherever text has it.

    They are no special tokens: decoded text shows them, as it must for a program that reads a model's answer.

    :raises RecipeError: if one is a token already, whose row in the model was trained for what it means there.
    """
    from tokenizers import AddedToken

    vocabulary = tokenizer.get_vocab()
    there = [name for name in names if name in vocabulary]
    if there:
        raise RecipeError(
            "recipe key `base.new_tokens`",
            f"{there[0]!r} is token {vocabulary[there[0]]} of the base model already",
            "Leave it out: it is one token as it is",
        )
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in names])


def token_ids(tokenizer: Any, names: Sequence[str]) -> list[int]:
    """The ids of tokens by their text."""
    return [int(tokenizer.convert_tokens_to_ids(name)) for name in names]


def core(tokenizer: Any) -> Tokenizer:
    """The Rust tokenizer inside a wrapped one."""
    return tokenizer.backend_tokenizer  # type: ignore[no-any-return]


def begin_texts(tokenizer: Any) -> None:
    """Have a tokenizer of ours put the begin token before plain texts, as the training did, wherever it is loaded."""
    from tokenizers import processors

    begin = [(BOS, int(tokenizer.bos_token_id))]
    core(tokenizer).post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=begin)


def reading_digest(tokenizer: Any) -> str:
    """SHA-256 of how a tokenizer reads; of ours without what only other programs use, see `begin_texts`."""
    said = json.loads(core(tokenizer).to_str())
    if is_ours(tokenizer):
        said["post_processor"] = None
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def is_ours(tokenizer: Any) -> bool:
    """Whether a tokenizer was made by `train_tokenizer`, here or in another run."""
    vocabulary = tokenizer.get_vocab()
    return tokenizer.chat_template == CHAT_TEMPLATE and all(token in vocabulary for token in SPECIAL)
