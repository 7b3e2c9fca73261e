"""Letters that a base's tokenizer does not know, as most of T5's and BERT's do not know all: they are told."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from trainer.data.chat import Document, TemplateEncoder, documents
from trainer.data.labels import for_labels, labelled_documents
from trainer.data.rows import Row
from trainer.data.seq2seq import for_seq2seq, pairs

WORDS = ["<unk>", "</s>", "<pad>", "user", "assistant", "how", "many", "select", "name", "a"]
TEMPLATE = (
    "{% for m in messages %}{{ m.role + ' ' + m.content + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
Read = Callable[[Any, Iterable[Row], dict[str, Any]], Iterator[Document]]
TASKS: dict[str, Read] = {
    "causal-lm": lambda made, rows, facts: documents(TemplateEncoder(made, "answers"), rows, 64, facts),
    "classification": lambda made, rows, facts: labelled_documents(for_labels(made), ("a",), rows, 64, facts),
    "sequence-to-sequence": lambda made, rows, facts: pairs(for_seq2seq(made), rows, 64, facts),
}


def tokenizer(unknown: str) -> Any:
    made = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token=unknown))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    found = PreTrainedTokenizerFast(tokenizer_object=made, unk_token=unknown, eos_token="</s>", pad_token="<pad>")
    found.chat_template = TEMPLATE
    return found


def row(question: str, answer: str) -> Row:
    return Row(b"k" * 16, (("user", question), ("assistant", answer)), None, label="a")


@pytest.mark.parametrize("task", TASKS)
def test_rows_with_letters_that_the_tokenizer_does_not_know_are_counted(task: str) -> None:
    rows = [row("how many", "select name"), row("how many", '{"name": 1}'), row("東京", "a"), row("{", "}")]
    facts: dict[str, Any] = {}
    assert len(list(TASKS[task](tokenizer("<unk>"), rows, facts))) == 4
    assert facts["unknown_letters"] == 3
    facts = {}
    assert len(list(TASKS[task](tokenizer("</s>"), rows, facts))) == 4  # as GPT-2's: it may be an end
    assert facts["unknown_letters"] == 0


def test_answers_that_a_tokenizer_changes_are_counted() -> None:
    """As T5's does, which makes one space of all white space and has one form of letters that look alike."""
    answers = ["select name", "select name\nfrom a", "select  name", "from １", "from a", " from a\n"]
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(r"\s+"), " ")])
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    known = trainers.UnigramTrainer(vocab_size=60, special_tokens=["<unk>", "</s>", "<pad>"], unk_token="<unk>")
    made.train_from_iterator([*answers, "how many", "from 1"] * 20, known)
    found = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", eos_token="</s>", pad_token="<pad>")
    facts: dict[str, Any] = {}
    assert len(list(pairs(for_seq2seq(found), [row("how many", answer) for answer in answers], 64, facts))) == 6
    assert (facts["changed_answers"], facts["unknown_letters"]) == (3, 0)
