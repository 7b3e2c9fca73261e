"""What the assistant says in other people's chat templates: every answer with its end, and nothing of anybody else."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from curation.canonical import canonical
from dropforge.errors import DataError
from trainer.data.chat import TemplateEncoder, check_left_out, documents
from trainer.data.rows import Row
from trainer.data.tokenizer import train_tokenizer, wrap_tokenizer
from trainer.training import portable

from .toy import sample_rows

TEXTS = [message["content"] for row in sample_rows(60) for message in row["messages"]]

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA_3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + m['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
# Earlier answers lose their thinking; the last one gets an empty block if it has none.
QWEN_3 = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set said = m.content.split('</think>')[-1].lstrip('\\n') %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\\n') "
    "if '</think>' in m.content else '' %}"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}"
    "{{ '<|im_start|>assistant\\n<think>\\n' + thought + '\\n</think>\\n\\n' + said }}"
    "{% else %}{{ '<|im_start|>assistant\\n' + said }}{% endif %}{{ '<|im_end|>\\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# The system message goes into the user's last turn, wherever that is.
MISTRAL = (
    "{% if messages[0]['role'] == 'system' %}{% set sys = messages[0]['content'] + '\\n\\n' %}"
    "{% set turns = messages[1:] %}{% else %}{% set sys = '' %}{% set turns = messages %}{% endif %}{{ bos_token }}"
    "{% set ns = namespace(last=0) %}{% for m in turns %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in turns %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + (sys if loop.index0 == ns.last else '') + m['content'] + '[/INST]' }}"
    "{% else %}{{ ' ' + m['content'] | trim + eos_token }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for m in messages %}{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
    "{{ '<start_of_turn>' + role + '\\n' + m['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
# An end of text after the last turn, which the prompts of later turns do not have.
PHI_3 = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\\n' + m['content'] + '<|end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"
)
MARKED = CHATML.replace(
    "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}",
    "{{ '<|im_start|>' + m['role'] + '\\n' }}{% if m['role'] == 'assistant' %}"
    "{%- generation -%}{{ m['content'] + '<|im_end|>' }}{%- endgeneration -%}"
    "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}",
)
ENDS = {
    "chatml": (CHATML, "<|im_end|>"),
    "marked": (MARKED, "<|im_end|>"),
    "llama-3": (LLAMA_3, "<|eot_id|>"),
    "qwen-3": (QWEN_3, "<|im_end|>"),
    "mistral": (MISTRAL, "<|eos|>"),
    "gemma": (GEMMA, "<end_of_turn>"),
    "phi-3": (PHI_3, "<|end|>"),
}
TOKENS = sorted(
    {"<|start_header_id|>", "<|end_header_id|>", "<think>", "</think>", "[INST]", "[/INST]", "<start_of_turn>"}
    | {"<|user|>", "<|assistant|>", "<|system|>", "\n\n"}
    | {end for _, end in ENDS.values()}
)
DATA = train_tokenizer(TEXTS, 320)


def tokenizer(template: Any) -> Any:
    made = wrap_tokenizer(DATA, 4096)
    made.add_tokens([token for token in TOKENS if token != "\n\n"], special_tokens=True)
    made.chat_template = template
    return made


KNOWN = {name: (tokenizer(template), end) for name, (template, end) in ENDS.items()}


def row(*contents: str, system: str = "") -> Row:
    turns = [(role, text) for role, text in zip(("user", "assistant") * len(contents), contents, strict=False)]
    return Row(b"k" * 16, (*((("system", system),) if system else ()), *turns), None)


def said(made: Any, one: Row) -> list[str]:
    """What is trained in a row, run by run."""
    [found] = TemplateEncoder(made, "answers").encode([one])
    assert not isinstance(found, str), found
    runs: list[str] = []
    for item in found:
        ids: list[int] = []
        for token, trained in [*zip(item.ids, item.trained, strict=True), (0, False)]:
            if trained:
                ids.append(token)
            elif ids:
                runs.append(made.decode(ids))
                ids = []
    return runs


WORDS = st.lists(
    st.sampled_from(["yes", "no", "the cat", "user", "assistant\n", "a  b", "é東🙂"]), min_size=1, max_size=4
)
TALK = st.lists(WORDS.map(" ".join).map(str.strip), min_size=2, max_size=7)


@pytest.mark.parametrize("name", ENDS)
@settings(max_examples=40, deadline=None)
@given(contents=TALK, system=st.sampled_from(["", "be brief", "yes"]))
def test_every_answer_with_its_end_and_nothing_else_is_trained(name: str, contents: list[str], system: str) -> None:
    """Questions and answers share their words, and one may be the other."""
    made, end = KNOWN[name]
    # Each of Qwen's answers is the last of a text, and has the empty thinking that it was asked for there.
    lead = {"qwen-3": "<think>\n\n</think>\n\n", "mistral": " "}.get(name, "")
    found = said(made, row(*contents, system="" if name == "gemma" else system))
    assert found == [f"{lead}{answer}{end}" for answer in contents[1::2]]


def test_an_answer_that_the_user_repeats_is_not_looked_for_by_its_words() -> None:
    assert said(KNOWN["qwen-3"][0], row("a", "yes", "yes", "yes", "yes yes", "no")) == [
        "<think>\n\n</think>\n\nyes<|im_end|>",
        "<think>\n\n</think>\n\nyes<|im_end|>",
        "<think>\n\n</think>\n\nno<|im_end|>",
    ]


def test_thinking_that_later_prompts_lose_is_trained_where_it_was_thought() -> None:
    one = row("a", "<think>\nhm\n</think>\n\nyes", "b", "<think>\nso\n</think>\n\nno")
    found = said(KNOWN["qwen-3"][0], one)
    assert found == ["<think>\nhm\n</think>\n\nyes<|im_end|>", "<think>\nso\n</think>\n\nno<|im_end|>"]
    counts: dict[str, Any] = {}
    made = list(documents(TemplateEncoder(KNOWN["qwen-3"][0], "answers"), [one], 512, counts))
    assert [document.row for document in made] == [0, 0]
    assert counts["unrolled_conversations"] == 1
    assert counts["target_bytes"] == sum(len(text.encode()) for _, text in (one.messages or ())[1::2])
    # The prompt of the second answer is the template's own, without the first one's thinking.
    prompt = KNOWN["qwen-3"][0].decode(made[1].ids[~made[1].trained])
    assert "hm" not in prompt
    assert "yes" in prompt
    counts.clear()
    assert len(list(documents(TemplateEncoder(KNOWN["qwen-3"][0], "answers"), [one, one], 8, counts))) > 2
    assert counts["cut_conversations"] == 2  # each once, however many of its answers are cut


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("loss_on", ["answers", "all"])
def test_without_a_template_a_chat_begins_as_the_tokenizer_begins_a_text(begins: bool, loss_on: str) -> None:
    """As Llama's and Gemma's base models, whose first token has never been another one; GPT-2 knows no such thing."""
    made = tokenizer(None)
    if begins:
        made.backend_tokenizer.post_processor = TemplateProcessing(
            single="<|bos|> $A", special_tokens=[("<|bos|>", made.bos_token_id)]
        )
    one = row("a", "yes")
    [[found]] = TemplateEncoder(made, loss_on).encode([one])
    assert not isinstance(found, str)
    assert [token == made.bos_token_id for token in found.ids[:2]] == [begins, False]
    if loss_on == "answers":
        assert said(made, one) == ["yes<|eos|>"]
    exported = portable(made).apply_chat_template([{"role": "user", "content": "a"}], add_generation_prompt=True)
    prompt = list(exported["input_ids"])
    assert list(found.ids[: len(prompt)]) == prompt


@pytest.mark.parametrize("name", ["chatml", "llama-3", "gemma", "phi-3"])
def test_templates_that_only_append_give_one_text(name: str) -> None:
    [found] = TemplateEncoder(KNOWN[name][0], "answers").encode([row("a", "b", "c", "d")])
    assert len(found) == 1


def test_markers_and_prefixes_give_the_same_mask() -> None:
    one = row("a", "b", "a", "b a", "b", system="a")
    [marked], [plain] = (TemplateEncoder(KNOWN[name][0], "answers").encode([one]) for name in ("marked", "chatml"))
    assert marked == plain


@pytest.mark.parametrize(
    "template",
    [
        MARKED.replace(" + '<|im_end|>' }}{%- endgeneration -%}", " }}{%- endgeneration -%}<|im_end|>"),
        "{% generation %}" + CHATML + "{% endgeneration %}",
        CHATML + "{% generation %}{% endgeneration %}",
    ],
    ids=["no end", "everything", "nothing"],
)  # fmt: skip
def test_markers_that_hold_no_end_or_all_or_nothing_are_not_believed(template: str) -> None:
    assert said(tokenizer(template), row("a", "b", "c", "d")) == ["b<|im_end|>", "d<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (CHATML.replace("<|im_end|>", "\\n"), "no end token follows"),
        (CHATML.replace("'<|im_start|>assistant\\n'", "'<|im_start|>bot\\n'"), "not how the answered text begins"),
        ("{{ raise_exception('never') }}", "never"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ 2.0 ** 5000 }}", "refuses it"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ 'a' * (2 ** 62) }}", "refuses it"),
        ("{% for m in messages %}{{ m['role'] }}<|im_end|>{% endfor %}", "once each"),
        ({"tool_use": CHATML}, "none is `default`"),
    ],
)
def test_a_template_that_does_not_tell_the_answers_is_refused_with_the_mend(template: Any, reason: str) -> None:
    with pytest.raises(DataError, match=reason) as caught:
        TemplateEncoder(tokenizer(template), "answers").encode([row("a", "b")])
    assert "template" in caught.value.mend
    # Texts need none.
    assert TemplateEncoder(tokenizer(template), "answers").encode([Row(b"k" * 16, None, "the cat")])


def test_what_a_template_says_of_a_row_is_a_text_of_one_line() -> None:
    """It is a stranger's, and repeats the row's words."""
    refusing = (
        "{% if 'bad' in messages[0]['content'] %}{{ raise_exception('no ' + messages[0]['content']) }}{% endif %}"
    )
    facts: dict[str, Any] = {}
    rows = [row("bad \x1b]0;a\x07 \u202e\nb" + "x" * 1000, "b"), row("a", "b")]
    list(documents(TemplateEncoder(tokenizer(refusing + CHATML), "answers"), rows, 64, facts))
    (left,) = facts["left_out"]
    assert left["reason"].startswith(r"the chat template refuses it: no bad \x1b]0;a\x07 \u202e b")
    assert len(left["reason"]) < 300


def test_the_default_of_several_templates_is_used() -> None:
    assert said(tokenizer({"default": CHATML, "tool_use": "x"}), row("a", "b")) == ["b<|im_end|>"]


def test_rows_that_a_template_refuses_are_counted_with_the_reason_and_too_many_end_the_run() -> None:
    rows = [row("a", "b", system="be brief"), *[row("a", "b")] * 3]
    facts: dict[str, Any] = {}
    made = list(documents(TemplateEncoder(KNOWN["gemma"][0], "answers"), rows, 64, facts))
    assert [document.row for document in made] == [1, 2, 3]
    assert (facts["without_targets"], facts["refused_by_template"]) == (1, 1)
    check_left_out("rows", facts, 0.25)
    with pytest.raises(DataError, match=f"1 of 4 rows.*{rows[0].key.hex()}.*System role not supported"):
        check_left_out("rows", facts, 0.2)


def test_a_token_across_the_border_is_where_the_model_begins_and_is_counted() -> None:
    made = wrap_tokenizer(train_tokenizer(["\n\n\n\n"] * 50, 300), 4096)
    made.chat_template = CHATML
    assert made.tokenize("\n\n") != made.tokenize("\n") * 2
    facts: dict[str, Any] = {}
    [document] = documents(TemplateEncoder(made, "answers"), [row("a", "\n b")], 128, facts)
    assert made.decode(document.ids[document.trained]) == "\n\n b<|im_end|>"
    assert facts["merged_at_border"] == 1


def test_prompt_and_completion_of_a_drop_train_the_completion() -> None:
    found = canonical({"prompt": "the cat", "completion": "sees", "system": "be brief"})
    one = Row(b"k" * 16, tuple(zip(found.roles, found.contents, strict=True)), None)
    assert said(KNOWN["llama-3"][0], one) == ["sees<|eot_id|>"]
