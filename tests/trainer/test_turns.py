"""What conversations say beside their contents reaches the model: calls and tools, thoughts, answers of weight 0."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

import curation
from dropforge.drop import read_drop
from dropforge.recipes import load_recipe
from dropforge.store import FolderStore
from trainer.commands.segments import sample_of_row
from trainer.data.chat import OwnEncoder, TemplateEncoder, documents, make_encoder
from trainer.data.prompts import end_tokens, held_out, make_prompts
from trainer.data.rows import Row, read_rows
from trainer.data.template import UNWRITTEN
from trainer.data.tokenizer import core, wrap_tokenizer
from trainer.generate import Answers
from trainer.row_sums import answered_columns

from .test_template import CHATML, DATA, MARKED, QWEN_3, tokenizer

# As Qwen's: tools before all, calls behind the content, thoughts in front of it, results as a user's.
TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\\n' }}{% for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endif %}{% for m in messages %}"
    "{{ '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\\n' }}"
    "{% if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}"
    "{{ '(call)' + call.function.name + call.function.arguments | tojson + '(end)' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CALL = {"type": "function", "function": {"name": "look", "arguments": {"unit": 1}}}
SHOWN = '(call)look{"unit": 1}(end)'
TOOL = {"type": "function", "function": {"name": "look"}}
TALK = (("user", "on?"), ("assistant", ""), ("tool", "yes"), ("assistant", "It is on."))
CALLING = Row(b"k" * 16, TALK, None, beside=({}, {"tool_calls": [CALL]}, {}, {}), tools=(TOOL,))
PAIRS = (("user", "a"), ("assistant", "wrong"), ("user", "b"), ("assistant", "right"))
FLAGGED = Row(b"k" * 16, PAIRS, None, beside=({}, {"train": False}, {}, {}))
THINKING = Row(b"k" * 16, PAIRS[:2], None, beside=({}, {"reasoning_content": "hm"}))


def parts(encoder: Any, made: Any, row: Row) -> tuple[list[str], list[str]]:
    """What is learned of a row, run by run, and what is not."""
    [found] = encoder.encode([row])
    assert not isinstance(found, str), found
    runs: dict[bool, list[list[int]]] = {True: [], False: []}
    for item in found:
        last = None
        for token, trained in zip(item.ids, item.trained, strict=True):
            if trained is not last:
                runs[trained].append([])
            runs[trained][-1].append(token)
            last = trained
    return [made.decode(ids) for ids in runs[True]], [made.decode(ids) for ids in runs[False]]


def test_a_call_is_an_answer_and_tools_and_results_are_what_it_is_given() -> None:
    made = tokenizer(TOOLS)
    learned, given = parts(TemplateEncoder(made, "answers"), made, CALLING)
    assert learned == [f"{SHOWN}<|im_end|>", "It is on.<|im_end|>"]
    tools = f"<|im_start|>system\n{json.dumps(TOOL)}\n<|im_end|>\n"
    assert given[0] == f"{tools}<|im_start|>user\non?<|im_end|>\n<|im_start|>assistant\n"
    assert "yes" in given[1]
    [document] = documents(TemplateEncoder(made, "answers"), [CALLING], 512, facts := {})
    assert facts["target_bytes"] == len(json.dumps([CALL])) + len("It is on.") == document.spelled


@pytest.mark.parametrize("loss_on", ["answers", "all"])
@pytest.mark.parametrize(
    ("template", "row"),
    [(CHATML, CALLING), (MARKED, CALLING), (CHATML, Row(b"k", TALK, None, beside=({},) * 4, tools=(TOOL,)))],
)
def test_a_template_that_leaves_out_tools_or_calls_refuses_their_rows(template: str, row: Row, loss_on: str) -> None:
    [found] = TemplateEncoder(tokenizer(template), loss_on).encode([row])
    assert "tool" in str(found)


def test_a_tokenizer_of_ours_refuses_rows_with_tools_and_the_run_tells() -> None:
    encoder = OwnEncoder(core(tokenizer(None)), "answers")
    facts: dict[str, Any] = {}
    made = list(documents(encoder, [CALLING, FLAGGED], 512, facts))
    assert [document.row for document in made] == [1]
    assert "tool calls" in facts["left_out"][0]["reason"]


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("template", [CHATML, MARKED, QWEN_3, TOOLS])
@pytest.mark.parametrize("loss_on", ["answers", "all"])
def test_an_answer_of_weight_0_is_context_and_never_a_target(template: str, loss_on: str, own: bool) -> None:
    made = tokenizer(template)
    if template == QWEN_3 and loss_on == "all" and not own:
        [found] = TemplateEncoder(made, loss_on).encode([FLAGGED])
        assert "not to be learned" in str(found)  # what it writes of an earlier answer is not what it asked for
        return
    encoder = OwnEncoder(core(made), loss_on) if own else TemplateEncoder(made, loss_on)
    learned, given = parts(encoder, made, FLAGGED)
    assert "wrong" in "".join(given)
    assert "wrong" not in "".join(learned)
    assert "right" in "".join(learned)
    assert ("b" in "".join(learned)) == (loss_on == "all")
    [document] = documents(encoder, [FLAGGED], 512, {})
    assert document.spelled == len("right" if loss_on == "answers" else "abright")


def test_thoughts_are_learned_where_the_template_writes_them() -> None:
    made = tokenizer(TOOLS)
    assert parts(TemplateEncoder(made, "answers"), made, THINKING)[0] == ["<think>hm</think>wrong<|im_end|>"]


@pytest.mark.parametrize("loss_on", ["answers", "all"])
def test_bytes_of_targets_are_of_all_that_is_written(loss_on: str) -> None:
    """By them models with other tokenizers are compared."""
    row = replace(THINKING, messages=(("user", "é?"), ("assistant", "on")), beside=({}, {"reasoning_content": "hé"}))
    asked = len("é?".encode()) if loss_on == "all" else 0
    for template, thoughts in ((TOOLS, 3), (CHATML, 0)):
        [found] = TemplateEncoder(tokenizer(template), loss_on).encode([row])
        assert [one.spelled for one in found] == [asked + thoughts + 2]  # type: ignore[union-attr]
    [found] = TemplateEncoder(tokenizer(TOOLS), loss_on).encode([CALLING])
    said = len("on?yes") + len(json.dumps([TOOL])) if loss_on == "all" else 0
    assert sum(one.spelled for one in found) == said + len(json.dumps([CALL])) + len("It is on.")  # type: ignore[union-attr]


LAST_THOUGHTS = TOOLS.replace("{% if m.reasoning_content %}", "{% if m.reasoning_content and loop.last %}", 1)
NO_THOUGHTS = CHATML.replace("m['content'] +", "m['content'].split('</think>')[-1] +", 1)  # as DeepSeek R1's
ASIDE, WRITTEN = {"reasoning_content": "hm"}, "<think>\nhm\n</think>\n\nwrong"


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize(
    ("aside", "written_as", "loss_on", "lost"),
    [
        (LAST_THOUGHTS, QWEN_3, "answers", 0),
        (LAST_THOUGHTS, QWEN_3, "all", 1),
        (TOOLS, CHATML, "answers", 0),
        (TOOLS, CHATML, "all", 0),
        (CHATML, NO_THOUGHTS, "answers", 1),
        (CHATML, NO_THOUGHTS, "all", 1),
    ],
)
def test_thoughts_before_a_later_question_are_counted_where_they_are_left_out(
    aside: str, written_as: str, loss_on: str, lost: int, written: bool
) -> None:
    """Qwen 3's template writes the last ones alone: answers that are learned are texts of their own, all of it is one.
    Thoughts stand beside an answer, or in it as the model would write them."""
    pairs = tuple((role, WRITTEN if written and text == "wrong" else text) for role, text in PAIRS)
    row = Row(b"k" * 16, pairs, None, beside=() if written else ({}, ASIDE, {}, {}))
    facts: dict[str, Any] = {}
    made = tokenizer(written_as if written else aside)
    texts = [made.decode(list(one.ids)) for one in documents(TemplateEncoder(made, loss_on), [row], 512, facts)]
    assert (facts["unwritten_thoughts"], any("hm" in text for text in texts)) == (lost, not lost)


NAMED = Row(b"k" * 16, PAIRS[:2], None, beside=({"name": "Bob"}, {"name": "Eve"}))
BRIEF = Row(b"k" * 16, (("system", "be brief"), *PAIRS[:2]), None)
LATER = Row(b"k" * 16, (*PAIRS[:2], ("system", "be brief"), *PAIRS[2:]), None)
RESULT = Row(b"k" * 16, (*PAIRS[:2], ("tool", "on"), PAIRS[3]), None)
CHATS = CHATML.replace("{{ '<|im_start|>'", "{% if m.role in ('user', 'assistant') %}{{ '<|im_start|>'", 1).replace(
    "}}{% endfor %}", "}}{% endif %}{% endfor %}", 1
)
FIRST_SYSTEM = CHATML.replace(
    "{{ '<|im_start|>'", "{% if loop.first or m.role != 'system' %}{{ '<|im_start|>'", 1
).replace("}}{% endfor %}", "}}{% endif %}{% endfor %}", 1)
SPEAKERS = CHATML.replace("m['content'] +", "(m.name + ': ' if m.name else '') + m['content'] +", 1)


@pytest.mark.parametrize(
    ("template", "unwritten"),
    [
        (CHATML, {"thoughts": 1, "names": 1}),
        (TOOLS, {"names": 1}),
        (CHATS, {"thoughts": 1, "names": 1, "system": 2, "results": 1}),
        (FIRST_SYSTEM, {"thoughts": 1, "names": 1, "system": 1}),
        (SPEAKERS, {"thoughts": 1}),
        (None, {"thoughts": 1, "names": 1}),
    ],
)
def test_what_a_template_leaves_out_is_counted_by_its_kind(template: str | None, unwritten: dict[str, int]) -> None:
    """Of a tokenizer of ours too; and rows that a template refuses are counted as refused alone."""
    encoder = OwnEncoder(core(tokenizer(None)), "answers") if template is None else None
    encoder = encoder or TemplateEncoder(tokenizer(template), "answers")
    facts: dict[str, Any] = {}
    list(documents(encoder, [THINKING, FLAGGED, NAMED, BRIEF, LATER, RESULT], 512, facts))
    assert {name: facts[name] for name in UNWRITTEN} == {
        name: unwritten.get(name.removeprefix("unwritten_"), 0) for name in UNWRITTEN
    }
    assert not facts["refused_by_template"]


#: As DeepSeek R1's: the last one alone, before all turns.
LAST_SYSTEM = (
    "{% set last = namespace(text='') %}{% for m in messages if m.role == 'system' %}{% set last.text = m.content %}"
    "{% endfor %}{{ last.text }}"
) + CHATML.replace("{{ '<|im_start|>'", "{% if m.role != 'system' %}{{ '<|im_start|>'", 1).replace(
    "}}{% endfor %}", "}}{% endif %}{% endfor %}", 1
)


@pytest.mark.parametrize(("template", "lost"), [(CHATML, 0), (FIRST_SYSTEM, 1), (LAST_SYSTEM, 1)])
def test_a_system_message_of_several_that_a_template_leaves_out_is_counted(template: str, lost: int) -> None:
    talk = ("user", "a"), ("assistant", "b")
    facts: dict[str, Any] = {}
    row = Row(b"k" * 16, (("system", "be x"), *talk, ("system", "be y"), *talk), None)
    list(documents(TemplateEncoder(tokenizer(template), "answers"), [row], 512, facts))
    assert facts["unwritten_system"] == lost


TRIMMED = QWEN_3.replace("+ said", "+ said | trim")
THOUGHT = "<think>\nhm\n</think>\n\n"


@pytest.mark.parametrize(
    ("template", "answer", "unwritten"),
    [
        (QWEN_3, f"Well.\n{THOUGHT}So.", "text"),
        (QWEN_3, f"{THOUGHT}Well.\n{THOUGHT}So.", "text"),
        (QWEN_3, f"{THOUGHT}So.", None),
        (CHATML, f"Well.\n{THOUGHT}So.", None),
        (TRIMMED, "    return 1", "indents"),
        (CHATML, "    return 1", None),
    ],
)
def test_text_of_an_answer_that_a_template_leaves_out_is_counted(
    template: str, answer: str, unwritten: str | None
) -> None:
    facts: dict[str, Any] = {}
    row = Row(b"k" * 16, (("user", "and?"), ("assistant", answer)), None)
    list(documents(TemplateEncoder(tokenizer(template), "answers"), [row], 512, facts))
    assert {name: facts[name] for name in UNWRITTEN if facts[name]} == (
        {f"unwritten_{unwritten}": 1} if unwritten else {}
    )


ONE_CALL = TOOLS.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")
CALLS_ALONE = TOOLS.replace("{{ m.content }}", "{{ m.content if not m.tool_calls else '' }}")
NO_ARGUMENTS = TOOLS.replace("call.function.name + call.function.arguments | tojson", "call.function.name")
TWICE = replace(CALLING, beside=({}, {"tool_calls": [CALL, CALL]}, {}, {}))
SAYING = replace(CALLING, messages=(TALK[0], ("assistant", "Let me look."), *TALK[2:]))


@pytest.mark.parametrize("loss_on", ["answers", "all"])
@pytest.mark.parametrize(
    ("template", "row", "cause"),
    [
        (ONE_CALL, TWICE, "all tool calls"),
        (CALLS_ALONE, SAYING, "beside its tool calls"),
        (NO_ARGUMENTS, CALLING, "no tool calls"),
    ],
)
def test_a_template_that_leaves_out_a_part_of_an_answer_refuses_its_rows(
    template: str, row: Row, cause: str, loss_on: str
) -> None:
    made = tokenizer(template)
    [found] = TemplateEncoder(made, loss_on).encode([row])
    assert cause in str(found)
    [plain] = TemplateEncoder(tokenizer(TOOLS), loss_on).encode([row])
    assert not isinstance(plain, str)
    if template != NO_ARGUMENTS:  # and no others
        assert not isinstance(TemplateEncoder(made, loss_on).encode([CALLING])[0], str)


#: `TOOLS` with markers; and as people put them: around the content and its end alone, or that of answers without calls.
HEAD, BODY, TAIL = re.split(
    r"(\{% if m\.reasoning_content.*)\{\{ '<\|im_end\|>\\n' \}\}(?=\{% endfor %\}\{% if add)", TOOLS
)
ENDED = f"{BODY}{{{{ '<|im_end|>' }}}}"
MARKS = "{% if m.role == 'assistant' %}{% generation %}"
ALL_MARKED = f"{HEAD}{MARKS}{ENDED}{{% endgeneration %}}{{% else %}}{ENDED}{{% endif %}}{{{{ '\\n' }}}}{TAIL}"
PLAIN_MARKED = ALL_MARKED.replace(MARKS, MARKS.replace(" %}", " and not (m.tool_calls or m.reasoning_content) %}", 1))


@pytest.mark.parametrize("template", [ALL_MARKED, PLAIN_MARKED], ids=["all", "content alone"])
@pytest.mark.parametrize(
    "row", [CALLING, SAYING, TWICE, THINKING, FLAGGED], ids=["calls", "says", "two", "thinks", "weight"]
)
def test_markers_are_believed_for_what_they_hold(template: str, row: Row) -> None:
    plain, marked = tokenizer(TOOLS), tokenizer(template)
    expected = parts(TemplateEncoder(plain, "answers"), plain, row)
    assert parts(TemplateEncoder(marked, "answers"), marked, row) == expected


def test_rows_with_tools_are_written_by_the_template_for_tools(tmp_path: Path) -> None:
    """As transformers itself takes it; both are exported, and both ends end an answer."""
    made = tokenizer(
        {"default": CHATML, "tool_use": TOOLS.replace("<|im_end|>\\n' }}{% endfor %}", "<|end|>' }}{% endfor %}")}
    )
    learned, _ = parts(TemplateEncoder(made, "answers"), made, CALLING)
    assert learned == [f"{SHOWN}<|end|>", "It is on.<|end|>"]
    assert parts(TemplateEncoder(made, "answers"), made, THINKING)[0] == ["wrong<|im_end|>"]
    [prompt] = make_prompts(made, [CALLING], 1)
    head = Row(b"k", CALLING.messages, None, beside=CALLING.beside).until(3).turns
    assert prompt.text == made.apply_chat_template(head, tools=[TOOL], tokenize=False, add_generation_prompt=True)
    ends = {made.convert_tokens_to_ids(token) for token in ("<|end|>", "<|im_end|>")}
    assert ends <= set(end_tokens(made))
    made.save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == made.chat_template


def test_what_is_held_out_is_the_last_answer_that_is_learned_and_says_something() -> None:
    made = tokenizer(TOOLS)
    [prompt] = make_prompts(made, [CALLING], 1)
    assert prompt.answer == "It is on."
    assert SHOWN in prompt.text
    assert json.dumps(TOOL) in prompt.text
    for other in (tokenizer(CHATML), wrap_tokenizer(DATA, 4096)):  # they write no tools, and cannot be asked
        assert [prompt.ids for prompt in make_prompts(other, [CALLING], 1)] == [()]
    assert held_out(Row(b"k", TALK[:2], None, beside=CALLING.beside[:2])) is None
    last = Row(b"k", PAIRS, None, beside=({}, {}, {}, {"train": False}))
    found = held_out(last)
    assert found is not None
    assert (found[0].messages, found[1]) == (PAIRS[:1], "wrong")


def test_no_answer_that_calls_tools_is_asked_for_by_its_text_alone() -> None:
    made = tokenizer(TOOLS)
    calls = ({}, {"tool_calls": [CALL]})
    first, asked = (("user", "hello"), ("assistant", "Good day.")), (("user", "on?"), ("assistant", "Let me look."))
    rows = [
        Row(b"1", asked, None, beside=calls, tools=(TOOL,)),
        Row(b"2", (*first, *asked), None, beside=(*({},) * 2, *calls), tools=(TOOL,)),
        CALLING,
    ]
    assert held_out(rows[0]) is not None  # which a target of text alone has to refuse
    prompts = make_prompts(made, rows, 3)
    assert [prompt.answer for prompt in prompts] == ["Good day.", "It is on."]
    [column] = answered_columns(Answers(prompts, [None, None], ["exact-match"]), rows).values()
    assert np.isnan(column).tolist() == [True, False, False]


def test_rows_of_a_drop_are_learned_as_they_were_meant(tmp_path: Path) -> None:
    """From the file to the targets, as `inspect` shows them."""
    store = FolderStore(tmp_path / "bucket")
    lines = []
    for n in range(30):
        wrong, right = (
            {"role": "assistant", "content": f"wrong {n}", "weight": 0},
            {"role": "assistant", "content": f"right {n}"},
        )
        call = {"role": "assistant", "content": None, "tool_calls": [CALL]}
        user, tool = {"role": "user", "content": f"on {n}?"}, {"role": "tool", "content": "yes", "tool_call_id": "c"}
        lines.append({"messages": [user, wrong, user, call, tool, {**right, "thinking": "hm"}], "tools": [TOOL]})
    store.put("drops/fam/d/a.jsonl", "\n".join(map(json.dumps, lines)).encode())
    store.put("drops/fam/d/_SUCCESS", b"")
    made = curation.curate(store, read_drop(store, "fam", "d"), load_recipe("tiny", {}), workdir=tmp_path / "work")
    rows = list(read_rows(store, made, "train"))
    model = tokenizer(TOOLS)
    for row in rows:
        learned, given = parts(make_encoder(model, "answers"), model, row)
        assert [learned[0], learned[1][:21]] == [f"{SHOWN}<|im_end|>", "<think>hm</think>right"[:21]]
        assert "wrong" in given[0]
        shown = sample_of_row(0, row, "answers").segments
        assert not any("wrong" in part.text for part in shown if part.kind == "target")
        assert any('"look"' in part.text for part in shown if part.kind == "target")
