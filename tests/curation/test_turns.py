"""What messages say beside role and content: tools and their calls, thoughts, and what is not to be learned."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from curation.canonical import EMPTY_SYSTEM, NO_KEYS, canonical
from curation.gate import check, checks
from curation.identity import names
from curation.reasons import Reason, RejectError
from curation.turns import REORDERED, UNPAIRED, hidden
from dropforge.dataset import Manifest
from dropforge.errors import DataError
from dropforge.recipe import Recipe
from dropforge.recipes import load_recipe
from dropforge.store import FolderStore

Make = Callable[..., Manifest]
SCHEMA = {"name": "look", "parameters": {"type": "object", "properties": {"unit": {"type": "integer"}}}}
TOOL = {"type": "function", "function": SCHEMA}
CALL = {"type": "function", "function": {"name": "look", "arguments": {"unit": 1}}}
ASK = {"role": "user", "content": "Is it on?"}
SAID = {"role": "tool", "content": "on"}
ANSWER = {"role": "assistant", "content": "It is on."}


def call(number: int, role: str = "tool_call") -> dict[str, Any]:
    return {"role": role, "content": json.dumps({"name": "look", "arguments": {"unit": number}})}


def chat(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"messages": list(messages), **fields}


def beside(fields: dict[str, Any]) -> list[dict[str, Any]]:
    return [json.loads(text or "{}") for text in canonical(fields).beside]


def calling(**call: Any) -> dict[str, Any]:
    return chat(ASK, {"role": "assistant", **call}, SAID, ANSWER)


@pytest.mark.parametrize(
    "fields",
    [
        calling(content=None, tool_calls=[CALL]),
        calling(content="", tool_calls=[{**CALL, "function": {"name": "look", "arguments": '{"unit": 1}'}}]),
        calling(tool_calls=json.dumps([CALL])),
        calling(content=None, tool_calls=[CALL["function"]]),
        calling(content=None, tool_calls=[{"name": "look", "arguments": {"unit": 1, "place": None}}]),
        calling(content=None, function_call={"name": "look", "arguments": '{"unit": 1}'}),
        calling(content="", tool_calls=[{"name": "look", "args": {"unit": 1}, "type": "tool_call", "index": 0}]),
        calling(content="", tool_calls=[{"name": "look", "input": {"unit": 1}, "type": "tool_use"}]),
        calling(content=b"", tool_calls=[CALL], name=None, function_call=None),
        calling(content="", tool_calls={"id": [None], **{key: [value] for key, value in CALL.items()}}),
        calling(content="", tool_calls={"id": [], "function": []}, function_call=CALL["function"]),
        calling(content="", tool_calls=[json.dumps(CALL)]),
        chat(ASK, {"from": "function_call", "value": '{"name": "look", "arguments": {"unit": 1}}'}, SAID, ANSWER),
        chat(ASK, {"from": "function_call", "value": '[{"name": "look", "arguments": {"unit": 1}}]'}, SAID, ANSWER),
        chat(ASK, call(1), {"role": "tool_response", "content": "on"}, ANSWER),
    ],
)
def test_a_call_is_one_call_however_it_is_written(fields: dict[str, Any]) -> None:
    plain = canonical(calling(content=None, tool_calls=[CALL]))
    assert (canonical(fields), names(canonical(fields))) == (plain, names(plain))
    assert beside(fields) == [{}, {"tool_calls": [CALL]}, {}, {}]


@pytest.mark.parametrize(
    "given",
    [
        {"tools": [TOOL]},
        {"tools": json.dumps([SCHEMA])},
        {"functions": [SCHEMA]},
        {"tools": json.dumps([TOOL]).encode()},
        {"tools": [json.dumps(TOOL)]},
        {"tools": {key: [value] for key, value in TOOL.items()}},
    ],
)
def test_tools_are_one_list_however_they_are_written(given: dict[str, Any]) -> None:
    row = canonical({**calling(content=None, tool_calls=[CALL]), **given})
    assert json.loads(row.tools or "") == [TOOL]


@pytest.mark.parametrize(
    "tool",
    [
        {"name": "look", "input_schema": SCHEMA["parameters"]},  # Anthropic
        {"type": "custom", "name": "look", "input_schema": SCHEMA["parameters"]},
        {"name": "look", "inputSchema": SCHEMA["parameters"], "parameters": None},  # MCP
        {"type": "function", **SCHEMA},  # OpenAI's Responses
        {"type": "function", "function": {"name": "look", "input_schema": SCHEMA["parameters"]}},
    ],
)
def test_tools_of_other_apis_have_name_and_schema_where_templates_read_them(tool: dict[str, Any]) -> None:
    assert json.loads(canonical(chat(ASK, ANSWER, tools=[tool]), nulls=True).tools or "") == [TOOL]


def test_keys_of_tools_and_arguments_stay_in_their_order_and_rows_that_differ_in_it_alone_are_copies(
    make: Make, rows: Callable[..., list[dict[str, Any]]]
) -> None:
    """So whoever serves the model writes them, for transformers' `tojson` sorts nothing."""
    tools = [{"type": "function", "function": {"name": "look", "description": "d", "parameters": {"b": 1, "a": 2}}}]
    calls = [
        {"id": "c", "type": "function", "function": {"name": "look", "arguments": {"unit": 1, "at": {"y": 1, "x": 2}}}}
    ]

    def one(turned: bool) -> dict[str, Any]:
        given = (_turned(tools), _turned(calls)) if turned else (tools, calls)
        return chat(ASK, {"role": "assistant", "content": "", "tool_calls": given[1]}, SAID, ANSWER, tools=given[0])

    row = canonical(one(False))
    assert (row.tools, json.dumps(json.loads(row.beside[1])["tool_calls"])) == (
        json.dumps(tools, separators=(",", ":")),
        json.dumps(calls),
    )
    assert hidden(row.tools or "", str) == row.tools
    turned = canonical(one(True))
    assert turned.tools != row.tools
    assert names(turned)[0] == names(row)[0]
    assert names(turned)[3] == names(row)[3]
    lines = "\n".join(json.dumps(one(n % 2 == 1)) for n in range(4))
    made = make({"a.jsonl": lines.encode()})
    assert made.counts["duplicate"] == 3
    [found] = rows(made)
    assert json.dumps(json.loads(found["chat"])["tools"]) in {json.dumps(tools), json.dumps(_turned(tools))}


def _turned(value: Any) -> Any:
    """The value with the keys of its objects the other way round."""
    if isinstance(value, dict):
        return {key: _turned(item) for key, item in reversed(value.items())}
    return [_turned(item) for item in value] if isinstance(value, list) else value


def test_null_in_arguments_and_schemas_is_kept_unless_a_column_made_it(
    make: Make, rows: Callable[..., list[dict[str, Any]]]
) -> None:
    given, schema = {"unit": 1, "place": None}, {"name": "look", "parameters": {"type": "object", "default": None}}

    def one(arguments: Any, tools: Any = None) -> dict[str, Any]:
        call = {"name": "look", "arguments": arguments, "id": None}
        return calling(content=None, tool_calls=[call], function_call=None, tools=None) | {"tools": tools}

    def arguments(fields: dict[str, Any], nulls: bool = False) -> Any:
        told = json.loads(canonical(fields, nulls=nulls).beside[1])
        assert told.keys() == {"tool_calls"}
        return told["tool_calls"][0]["function"]["arguments"]

    assert arguments(one(given)) == {"unit": 1}
    assert arguments(one(given), nulls=True) == given
    assert arguments(one(json.dumps(given))) == given
    assert arguments(one([("unit", 1), ("place", None)])) == given  # a map of Arrow's
    assert arguments({"messages": json.dumps(one(given)["messages"])}) == given
    assert arguments({"messages": list(map(json.dumps, one(given)["messages"]))}) == given

    lines = [{**one(given, [schema]), "source": "line"}] * 2 + [{**one(given, json.dumps([schema])), "source": "text"}]
    columns = [{**one({"unit": n, "place": None}, [schema]), "source": "column"} for n in range(20)]
    table = pa.Table.from_pylist(columns)
    texts = pa.array([json.dumps([schema])] * 20)
    typed = table.set_column(1, "tools", pa.ExtensionArray.from_storage(pa.json_(), texts))
    typed = typed.set_column(2, "source", pa.array(["json"] * 20))
    files = {"a.jsonl": "\n".join(map(json.dumps, lines)).encode()}
    for name, held in {"b.parquet": table, "c.parquet": typed}.items():
        sink = io.BytesIO()
        pq.write_table(held, sink)
        files[name] = sink.getvalue()
    found = rows(make(files))
    parameters = {row["source"]: json.loads(row["chat"])["tools"][0]["function"]["parameters"] for row in found}
    assert parameters["column"] == {"type": "object"}
    assert parameters["json"] == schema["parameters"]
    assert (parameters.get("line") or parameters.get("text")) == schema["parameters"]


def test_answers_in_a_prompt_are_context_and_the_completion_alone_is_learned() -> None:
    wrong = {"role": "assistant", "content": "Smash it."}
    asked = [ASK, wrong, {"role": "user", "content": "Again."}]
    becomes = canonical(chat(ASK, {**wrong, "weight": 0}, asked[2], ANSWER))
    for prompt in (
        asked,
        json.dumps(asked),
        {"role": [one["role"] for one in asked], "content": [one["content"] for one in asked]},
    ):
        for completion in (ANSWER["content"], [ANSWER]):
            assert canonical({"prompt": prompt, "completion": completion}) == becomes
    called = [ASK, {"role": "assistant", "content": "", "tool_calls": [CALL]}, SAID]
    assert beside({"prompt": called, "completion": ANSWER["content"]})[1] == {"tool_calls": [CALL], "train": False}
    # What a message says itself counts.
    assert beside({"prompt": [ASK, {**wrong, "weight": 1}, ASK], "completion": "Yes."}) == []
    assert canonical({"prompt": [ASK], "completion": [ANSWER, ASK, ANSWER]}).beside == ()
    with pytest.raises(RejectError, match="no answer is to be learned"):
        canonical({"prompt": asked, "completion": [ASK]})


@pytest.mark.parametrize("given", [{}, {"tools": []}, {"tools": "[]"}, {"tools": None}, {"tools": ""}])
def test_no_tools_are_none(given: dict[str, Any]) -> None:
    assert canonical(chat(ASK, ANSWER, **given)) == canonical(chat(ASK, ANSWER))


def test_rows_that_differ_in_the_ids_of_calls_alone_are_copies() -> None:
    """Each sampling of an API has new ones, and most templates write none."""

    def one(number: str, **given: str) -> bytes:
        call = {**CALL, **({"id": f"call_{number}"} if number else {})}
        said = {**SAID, **given, **({"tool_call_id": f"call_{number}"} if number else {})}
        return names(canonical(chat(ASK, {"role": "assistant", "content": "", "tool_calls": [call]}, said, ANSWER)))[0]

    assert one("a") == one("b") == one("")
    assert one("a", name="look") == one("b", name="look") != one("a")


def test_what_stands_beside_the_same_question_puts_it_on_no_other_side(
    make: Make, rows: Callable[..., list[dict[str, Any]]]
) -> None:
    """The last answer, or what the model is told besides, may have changed between two files of the same rows."""
    asked = [{"role": "user", "content": ""}, {"role": "assistant", "content": "Smash it."}]

    def lines(**first: Any) -> bytes:
        talks = ([{**asked[0], "content": f"number {n}"}, {**asked[1], **first}, ASK, ANSWER] for n in range(60))
        return "\n".join(json.dumps(chat(*talk)) for talk in talks).encode()

    plain, flagged = lines(), lines(weight=0)
    with_tools = "\n".join(json.dumps(chat(*json.loads(line)["messages"], tools=[TOOL])) for line in plain.splitlines())
    found = rows(
        make({"a.jsonl": plain, "b.jsonl": flagged, "c.jsonl": with_tools.encode()}, data={"eval_fraction": 0.3})
    )
    sides: dict[str, set[str]] = {}
    for row in found:
        sides.setdefault(row["messages"][0]["content"], set()).add(row["split"])
    assert len(found) == 180
    assert {len(side) for side in sides.values()} == {1}
    assert len(set().union(*sides.values())) == 2


@pytest.mark.parametrize("key", ["weight", "train", "training", "trainable", "loss"])
@pytest.mark.parametrize(
    ("no", "yes"), [(0, 1), (False, True), (0.0, 1.0), ("0", "1"), ("False", " true"), (b"0.0", ""), ("0", math.nan)]
)
def test_an_answer_of_weight_0_is_kept_and_not_to_be_learned(key: str, no: object, yes: object) -> None:
    wrong = {"role": "assistant", "content": "Smash it."}
    flagged = chat(ASK, {**wrong, key: no}, ASK, {**ANSWER, key: yes})
    assert beside(flagged) == [{}, {"train": False}, {}, {}]
    assert canonical(flagged).contents[1] == "Smash it."
    assert names(canonical(flagged))[0] != names(canonical(chat(ASK, wrong, ASK, ANSWER)))[0]
    # Neighbours of one role are one message; not where one of them is not to be learned.
    assert canonical(chat(ASK, {**wrong, key: no}, ANSWER)).roles == ("user", "assistant", "assistant")
    assert canonical(chat(ASK, {**ANSWER, key: yes})) == canonical(chat(ASK, ANSWER))


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking", "thoughts"])
def test_rows_that_differ_in_thoughts_are_no_copies(
    make: Make, rows: Callable[..., list[dict[str, Any]]], key: str
) -> None:
    thoughts = [f"It hums, {n} times." for n in range(30)]
    made = [json.dumps(chat(ASK, {**ANSWER, key: thought})) for thought in thoughts]
    kept = rows(make({"a.jsonl": "\n".join(made).encode()}))
    assert {json.loads(row["chat"])["messages"][1]["reasoning_content"] for row in kept} == set(thoughts)


def test_an_empty_name_is_none() -> None:
    bare = canonical(chat(ASK, {**ASK, "content": "And now?"}, ANSWER))
    empty = {"name": "", "tool_call_id": ""}
    assert canonical(chat({**ASK, **empty}, {**ASK, "content": "And now?", **empty}, {**ANSWER, **empty})) == bare


def test_keys_that_mean_nothing_keep_no_neighbours_apart_and_each_is_told() -> None:
    row = canonical(chat(ASK, {**ANSWER, "id": 1}, {**ANSWER, "mood": "x"}, ANSWER))
    assert (row.roles, row.unknown, row.beside) == (("user", "assistant"), ("messages.id", "messages.mood"), ())


def test_what_a_message_says_twice_in_other_words_is_told() -> None:
    thoughts = {"reasoning": "a", "reasoning_content": "b", "thinking": "b", "thoughts": ""}
    assert canonical(chat(ASK, {**ANSWER, **thoughts})).unknown == ("messages.reasoning",)
    assert canonical(chat(ASK, {**ANSWER, "value": "No."})).unknown == ("messages.value",)
    assert canonical(chat(ASK, {**ANSWER, "value": ANSWER["content"]})).unknown == ()
    both = calling(content=None, tool_calls=[CALL], function_call={"name": "other", "arguments": {}})
    assert canonical(both).unknown == ("messages.function_call",)
    assert canonical(chat({**ASK, "from": "gpt"}, {**ANSWER, "from": 7})).unknown == ("messages.from",)
    assert canonical(chat({**ASK, "from": "Human"}, {**ANSWER, "from": None})).unknown == ()


def test_a_question_that_asks_to_be_learned_is_told() -> None:
    """It is where `train.loss_on` is `all`, whatever its message says."""
    asked = chat({**ASK, "train": True}, {**ANSWER, "train": True})
    assert canonical(asked).unknown == ("messages.train of user",)
    assert canonical(chat({**ASK, "weight": 0}, {**ANSWER, "weight": 1})).unknown == ()
    parts = [{"type": "text", "text": "Is it on?", "weight": 1}]
    assert canonical(chat({"role": "user", "content": parts}, ANSWER)).unknown == ("messages.weight of user",)


def test_a_question_that_asks_not_to_be_learned_is_as_one_that_says_nothing() -> None:
    """Also where its parts do not agree, and beside a neighbour with which it is one question."""
    silent = {**ASK, "weight": 0}
    assert canonical(chat(silent, {**ANSWER, "weight": 1})) == canonical(chat(ASK, ANSWER))
    assert canonical(chat(ASK, silent, ANSWER)) == canonical(chat(ASK, ASK, ANSWER))
    parts = [{"type": "text", "text": ASK["content"], "train": False}, {"type": "text", "text": ""}]
    assert canonical(chat({"role": "user", "content": parts}, ANSWER)) == canonical(chat(ASK, ANSWER))


@pytest.mark.parametrize("column", ["image", "images", "Audio", "videos"])
def test_a_message_that_speaks_of_a_picture_is_refused_by_name(make: Make, store: FolderStore, column: str) -> None:
    mark = f"<{column.lower().removesuffix('s')}>"
    chats = [chat({**ASK, "content": f"{mark}\nWhat is {n}?"}, ANSWER) for n in range(3)]
    chats += [chat({**ASK, "content": f"What is {n}?"}, ANSWER) for n in range(3, 30)]
    pictures = [{"bytes": b"\xff", "path": "a"}] * 30
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(chats).append_column(column, [pictures]), sink)
    lines = [json.dumps({**one, column.lower(): ["a.png"]}) for one in chats]
    for name, data in {"a.parquet": sink.getvalue(), "a.jsonl": "\n".join(lines).encode()}.items():
        made = make({name: data}, name)
        assert (made.counts["bad_field"], made.counts["train"] + made.counts["eval"]) == (3, 27)
        assert "only text is learned" in store.get(made.files["quarantine"]).decode()
    assert canonical(chat({**ASK, "content": mark}, ANSWER, images=[], image=None)).contents[0] == mark


def test_keys_of_calls_that_mean_nothing_are_told_too() -> None:
    call = {"function": {"name": "look", "arguments": {}, "strict": True}, "kwargs": {"unit": 1}}
    told = ("messages.tool_calls.kwargs", "messages.tool_calls.strict")
    assert canonical(calling(content=None, tool_calls=[call])).unknown == told
    called = {"from": "function_call", "value": json.dumps(call)}
    assert canonical(chat(ASK, called, SAID, ANSWER)).unknown == told


def test_what_a_call_says_twice_in_other_words_is_told() -> None:
    def told(**call: Any) -> tuple[str, ...]:
        return canonical(calling(content=None, tool_calls=[{"name": "look", **call}])).unknown

    assert told(parameters={"a": 1}, args={"b": 2}) == ("messages.tool_calls.args",)
    assert told(parameters={"a": 1}, args={"a": 1}, type="x", index=3) == ()
    assert told(function={"name": "look"}, id="c", arguments={"a": 1}) == ("messages.tool_calls.arguments",)
    assert told(function={"name": "look", "id": "d"}, id="c") == ("messages.tool_calls.id",)


def test_of_two_lists_of_tools_the_second_is_told() -> None:
    other = {"name": "other"}
    assert canonical(chat(ASK, ANSWER, tools=[TOOL], functions=[other])).unknown == ("functions",)
    assert canonical(chat(ASK, ANSWER, tools=[TOOL], Functions="none")).unknown == ("Functions",)
    assert canonical(chat(ASK, ANSWER, tools=[TOOL], functions=[SCHEMA])).unknown == ()
    assert json.loads(canonical(chat(ASK, ANSWER, tools="[]", functions=[SCHEMA])).tools or "") == [TOOL]


@pytest.mark.parametrize("role", ["function_call", "tool_call", "Tool_Calls"])
def test_a_message_that_is_a_call_says_what_an_answer_that_calls_says(role: str) -> None:
    more = {"weight": 0, "reasoning": "It hums.", "mask": True, "value": json.dumps(CALL)}
    row = canonical(chat(ASK, {"role": role, **more}, SAID, ANSWER))
    assert row == canonical(calling(content=None, tool_calls=[CALL], weight=0, reasoning="It hums.", mask=True))
    assert (json.loads(row.beside[1])["train"], row.unknown) == (False, ("messages.mask",))
    twice = {"role": role, "content": json.dumps(CALL), "tool_calls": [{"name": "other"}]}
    assert canonical(chat(ASK, twice, SAID, ANSWER)).unknown == ("messages.tool_calls",)
    assert (
        canonical(chat(ASK, {"role": role, "content": "", "tool_calls": [CALL]}, SAID, ANSWER)).roles[1] == "assistant"
    )


OTHER = {"type": "function", "function": {"name": "look", "arguments": {"unit": 2}}}
LOOKS = {"role": "assistant", "content": "I look."}


@pytest.mark.parametrize(
    ("messages", "content", "calls"),
    [
        # As ms-swift writes calls that go out at once, ShareGPT text and a call, and a client of OpenAI each part.
        ([call(1), call(2)], "", [CALL, OTHER]),
        ([LOOKS, call(1, "function_call")], "I look.", [CALL]),
        (
            [LOOKS, ANSWER, *({"role": "assistant", "content": None, "tool_calls": [one]} for one in (CALL, OTHER))],
            "I look.\n\nIt is on.",
            [CALL, OTHER],
        ),
        ([{**LOOKS, "weight": 0}, {**call(1), "weight": 0}], "I look.", [CALL]),
        ([{**LOOKS, "reasoning": "It hums."}, call(1)], "I look.", [CALL]),
    ],
)
def test_text_and_calls_in_messages_of_their_own_are_one_answer(
    messages: list[dict[str, Any]], content: str, calls: list[Any]
) -> None:
    row = canonical(chat(ASK, *messages, SAID, SAID, ANSWER))
    assert row.roles == ("user", "assistant", "tool", "tool", "assistant")
    assert row.contents[1] == content
    told = json.loads(row.beside[1])
    assert told.pop("tool_calls") == calls
    assert told in ({}, {"train": False}, {"reasoning_content": "It hums."})


@pytest.mark.parametrize(
    "messages",
    [
        [LOOKS, {**call(1), "weight": 0}],
        [LOOKS, {**call(1), "reasoning": "It hums."}],
        [call(1), ANSWER],
        [{**LOOKS, "name": "a"}, {**call(1), "name": "b"}],
    ],
)
def test_answers_that_are_not_one_stay_apart_and_are_counted(
    make: Make, store: FolderStore, messages: list[dict[str, Any]]
) -> None:
    rows = [chat({**ASK, "content": f"Is {number} on?"}, *messages) for number in range(3)]
    assert canonical(rows[0]).roles == ("user", "assistant", "assistant")
    manifest = make({"a.jsonl": "\n".join(map(json.dumps, rows)).encode()})
    warned = json.loads(store.get(manifest.files["card_json"]))["warnings"]
    assert [line for line in warned if line.startswith("a.jsonl: 3 rows have an answer directly behind another")]


def test_an_answer_behind_one_that_is_not_learned_is_not_told(make: Make, store: FolderStore) -> None:
    rows = [chat({**ASK, "content": f"Is {number} on?"}, {**LOOKS, "weight": 0}, ANSWER) for number in range(3)]
    manifest = make({"a.jsonl": "\n".join(map(json.dumps, rows)).encode()})
    assert "directly behind" not in store.get(manifest.files["card_json"]).decode()


def test_a_row_of_very_many_calls_is_read_at_once() -> None:
    row = canonical(chat(ASK, *(call(number) for number in range(30_000))))
    assert (len(row.roles), len(json.loads(row.beside[1])["tool_calls"])) == (2, 30_000)


def test_keys_of_parts_are_told_and_a_flag_of_all_is_the_message_s() -> None:
    def parts(*flags: dict[str, Any]) -> dict[str, Any]:
        return {"role": "assistant", "content": [{"type": "text", "text": "It is on.", **flag} for flag in flags]}

    assert canonical(chat(ASK, parts({"train": True}, {"weight": 1}))).beside == ()
    assert canonical(chat(ASK, parts({"citations": ["x"], "cache": None}))).unknown == ("messages.content.citations",)
    assert canonical(chat(ASK, parts({"loss_mask": 0, "annotations": []}))).unknown == ("messages.content.loss_mask",)
    assert beside(chat(ASK, parts({"train": False}), ASK, ANSWER))[1] == {"train": False}
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "x"}}]
    assert canonical(chat(ASK, ANSWER, system=system)).unknown == ("messages.content.cache_control",)
    for message, cause in (
        (parts({"train": False}, {}), "parts of weight 0 beside others"),
        (parts({"weight": 0.5}), "`weight` of a message is 0.5"),
        (parts({"image_url": {"url": "x"}}), "parts of type image_url"),
        (parts({"input_audio": "x"}), "parts of type input_audio"),
    ):
        with pytest.raises(RejectError, match=cause):
            canonical(chat(ASK, message))
    with pytest.raises(RejectError, match=r"input has parts with content\.cache_control"):
        canonical({"instruction": "do", "input": system, "output": "done"})


def test_only_the_thoughts_and_the_tools_before_an_answer_are_part_of_what_is_asked() -> None:
    def question(*messages: dict[str, Any], **fields: Any) -> bytes | None:
        return names(canonical(chat(*messages, **fields)))[3]

    assert (
        question(ASK, ANSWER) == question(ASK, {**ANSWER, "reasoning": "hm"}) == question(ASK, {**ANSWER, "name": "x"})
    )
    assert (
        len({question(ASK, ANSWER), question(ASK, ANSWER, tools=[TOOL]), question({**ASK, "name": "x"}, ANSWER)}) == 3
    )


@pytest.mark.parametrize(
    ("fields", "reason", "detail"),
    [
        (calling(content=None), Reason.BAD_FIELD, "content of assistant is null"),
        (calling(content=None, tool_calls=[]), Reason.BAD_FIELD, "content of assistant is null"),
        (calling(content="", tool_calls=[{}]), Reason.BAD_MESSAGES, "a tool call has no name"),
        (calling(content="", tool_calls=["look"]), Reason.BAD_MESSAGES, "a tool call has no name"),
        (calling(content="", tool_calls="look(1)"), Reason.BAD_MESSAGES, "`tool_calls` is text, but no JSON"),
        (calling(content="", tool_calls="[{'name': 'look'}]"), Reason.BAD_MESSAGES, "as Python shows a list"),
        (calling(content="", tool_calls=[{"name": "look", "arguments": [1]}]), Reason.BAD_MESSAGES, "are no object"),
        (calling(content="", tool_calls=[{"name": "look", "arguments": '{"a": NaN}'}]), Reason.BAD_NUMBER, "NaN"),
        (calling(content="", tool_calls=[{"name": "look", "arguments": {"a": "\ud800"}}]), Reason.LONE_SURROGATE, ""),
        (calling(content="", tool_calls=[{"name": "look", "arguments": {"a": "\0"}}]), Reason.NUL, ""),
        (calling(content="", tool_calls="[" * 100_000), Reason.TOO_DEEP, "more than 100 deep"),
        (chat({**ASK, "content": [{"image": "a.png"}, {"text": "a"}]}, ANSWER), Reason.BAD_FIELD, "type image,"),
        (chat({**ASK, "content": [{"text": "a", "image_url": {}}]}, ANSWER), Reason.BAD_FIELD, "type image_url"),
        ({"messages": '[{"role": "user", "role": "user"}]'}, Reason.DUPLICATE_FIELD, "'role' appears twice"),
        (chat(ASK, ANSWER, tools="look"), Reason.BAD_MESSAGES, "`tools` is text, but no JSON"),
        (chat(ASK, ANSWER, tools={"look": 1}), Reason.BAD_FIELD, "`tools` is no list of tools"),
        (chat(ASK, ANSWER, tools=[TOOL, {"type": "web_search"}]), Reason.BAD_FIELD, "a tool is of type 'web_search'"),
        (chat(ASK, ANSWER, tools=[{"type": "custom", "name": "a"}]), Reason.BAD_FIELD, "a tool is of type 'custom'"),
        (chat(ASK, ANSWER, tools=[{"title": "a", "type": "object"}]), Reason.BAD_FIELD, "a tool is of type 'object'"),
        (chat(ASK, ANSWER, tools=[{"functionDeclarations": []}]), Reason.BAD_FIELD, "no name, but functionDecl"),
        (chat(ASK, ANSWER, tools=[{"toolSpec": SCHEMA}]), Reason.BAD_FIELD, "no name, but toolSpec: write it as"),
        (chat(ASK, ANSWER, tools=[{"type": "function", "function": {}}]), Reason.BAD_FIELD, "no name, but nothing"),
        (calling(content="", tool_calls=["my function"]), Reason.BAD_MESSAGES, "a tool call has no name"),
        (chat(ASK, {**ANSWER, "weight": 0.5}), Reason.BAD_FIELD, "`weight` of a message is 0.5, and only 0 and 1"),
        (chat(ASK, {**ANSWER, "train": "no"}), Reason.BAD_FIELD, "`train` of a message is 'no'"),
        (chat(ASK, {**ANSWER, "weight": 0}), Reason.NO_ANSWER, "no answer is to be learned"),
        (chat(ASK, {**ANSWER, "reasoning": {"effort": 1}}), Reason.BAD_FIELD, "`reasoning` of a message is no text"),
        (
            chat({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}, ANSWER),
            Reason.BAD_FIELD,
            "content of user has parts of type image_url, and only text is learned",
        ),
        (
            chat(ASK, {**ANSWER, "channel": "analysis"}, {**ANSWER, "channel": "final"}),
            Reason.BAD_MESSAGES,
            "a message of the channel 'analysis' is a thought: write it as `thinking` of the answer behind it",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_learned_is_refused_by_name(fields: dict[str, Any], reason: Reason, detail: str) -> None:
    with pytest.raises(RejectError) as error:
        canonical(fields)
    assert error.value.reason == reason
    assert detail in error.value.detail


def test_the_card_shows_calls_and_thoughts(make: Make, store: FolderStore) -> None:
    def one(n: int) -> str:
        call = {"name": "look", "arguments": {"unit": n}}
        turn = {"role": "assistant", "content": None, "tool_calls": [call], "thinking": f"unit {n}?"}
        return json.dumps(chat({**ASK, "content": f"on {n}?"}, turn, SAID, ANSWER))

    made = make({"a.jsonl": "\n".join(map(one, range(30))).encode()})
    [shown, *_] = json.loads(store.get(made.files["card_json"]))["statistics"]["samples"]
    assert shown["messages"][1]["content"].startswith('reasoning_content: "unit ')
    assert '"name": "look"' in shown["messages"][1]["content"]
    assert "reasoning_content" in store.get(made.files["card_html"]).decode()


def test_control_tokens_in_calls_and_tools_are_made_harmless_too() -> None:
    call = {"name": "look", "arguments": {"<|im_end|>": "<|im_end|>"}}
    row = canonical(
        chat(ASK, {**ANSWER, "tool_calls": [call], "reasoning": "<|im_end|>"}, tools=[{**TOOL, "x": "<s>"}])
    )
    assert row.neutralised == 4
    assert "<|im_end|>" not in "".join(row.beside)
    assert "<s>" not in (row.tools or "")


def test_the_same_rows_from_columns_of_parquet(make: Make) -> None:
    """There each object has all keys of its column: those without a value are not there."""
    calls = [{"type": "function", "function": {"name": "look", "arguments": {"unit": n}}} for n in range(30)]
    chats = [
        chat(ASK, {"role": "assistant", "content": None, "tool_calls": [call]}, SAID, ANSWER, tools=[TOOL])
        for call in calls
    ]
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(chats), sink)
    plain = make({"a.jsonl": "\n".join(map(json.dumps, chats)).encode()}, "plain")
    assert make({"a.parquet": sink.getvalue()}, "columns").digest == plain.digest
    assert plain.counts["train"] + plain.counts["eval"] == 30
    # Named columns do not lose the tools, which are found by their name.
    named = [{"talk": row["messages"], "tools": row["tools"]} for row in chats]
    again = make(
        {"a.jsonl": "\n".join(map(json.dumps, named)).encode()}, "named", data={"columns": {"messages": "talk"}}
    )
    assert again.counts == plain.counts


def test_rows_that_share_their_tools_are_no_near_copies_and_such_that_share_all_else_are(make: Make) -> None:
    tools = [{**TOOL, "description": "what every row of this drop may call, at some length " * 20}]

    def one(n: int, thought: str) -> str:
        asked = {**ASK, "content": f"How is {n} {n * 7} {n * 13}, in {n * 17}?"}
        return json.dumps(chat(asked, {**ANSWER, "content": f"{n} {n * 5}", "reasoning": thought}, tools=tools))

    rows = [one(n, f"{n} {n * 11} {n * 19} {n * 23} {n * 29} and {n * 31}") for n in range(1, 31)]
    made = make({"a.jsonl": "\n".join(rows).encode()}, dedup={})
    assert made.counts.get("near_duplicate", 0) == 0
    same = [one(1, f"a long thought of many words which all these rows have but for this one: {n}") for n in range(30)]
    alike = make({"a.jsonl": "\n".join([*rows, *same]).encode()}, "alike", dedup={})
    assert alike.counts["near_duplicate"] == 29


def test_personal_data_in_calls_thoughts_and_tools_are_masked(
    make: Make, rows: Callable[..., list[dict[str, Any]]]
) -> None:
    def one(n: int) -> dict[str, Any]:
        arguments = {"to": f"\nada{n}@example.com", "card": 4111111111111111, "a@b.org": 1, "c@d.org": 2}
        call = {"name": "mail", "arguments": arguments}
        tool = {**TOOL, "owner": "bob@example.com"}
        return chat(ASK, {**ANSWER, "tool_calls": [call], "reasoning": f"eve{n}@example.com asked"}, tools=[tool])

    made = make({"a.jsonl": "\n".join(json.dumps(one(n)) for n in range(30)).encode()}, pii={}, min_rows=2)
    found = rows(made)
    assert found
    for row in found:
        told = json.loads(row["chat"])
        assert told["messages"][1]["reasoning_content"] == "<EMAIL> asked"
        assert told["messages"][1]["tool_calls"][0]["function"]["arguments"] == {
            "to": "\n<EMAIL>", "card": "<CARD>", "<EMAIL>": 1, "<EMAIL> 2": 2,
        }  # fmt: skip
        assert told["tools"][0]["owner"] == "<EMAIL>"


def test_keys_that_mean_nothing_are_told_by_name_or_refused(make: Make, store: FolderStore) -> None:
    lines = [
        json.dumps(chat({**ASK, "content": f"{ASK['content']} {n}"}, {**ANSWER, "mood": "x"}, id=n)) for n in range(30)
    ]
    made = make({"a.jsonl": "\n".join(lines).encode()})
    card = json.loads(store.get(made.files["card_json"]))
    assert card["unknown_keys"] == {"id": 30, "messages.mood": 30}
    assert any("`messages.mood` (30 rows), `id` (30 rows)" in line for line in card["warnings"])
    assert all(rule.ok for rule in checks(made, _recipe()))
    strict = _recipe(unknown_keys="refuse")
    with pytest.raises(
        DataError, match=r"no unknown keys.*`messages.mood` \(30 rows\), `id` \(30 rows\).*keep_columns"
    ):
        check(made, strict)
    kept = make({"a.jsonl": "\n".join(lines).encode()}, "kept", data={"keep_columns": ["id"]})
    assert json.loads(store.get(kept.files["card_json"]))["unknown_keys"] == {"messages.mood": 30}


def test_a_system_message_without_a_word_is_told_and_no_key(make: Make, store: FolderStore) -> None:
    rows = [chat({"role": "system", "content": " "}, {**ASK, "content": f"Is {n} on?"}, ANSWER) for n in range(30)]
    rows += [{**chat({**ASK, "content": f"Was {n} on?"}, ANSWER), "system": ""} for n in range(3)]
    made = make({"a.jsonl": "\n".join(map(json.dumps, rows)).encode()})
    assert json.loads(store.get(made.files["card_json"]))["unknown_keys"] == {EMPTY_SYSTEM: 30}
    check(made, _recipe(unknown_keys="refuse"))


def test_content_beside_other_content_is_told_and_may_be_kept_by_name(make: Make, store: FolderStore) -> None:
    rows = [{"prompt": f"p {n}", "completion": "c", "text": f"p {n} c", "Input": "x"} for n in range(30)]
    made = make({"a.jsonl": "\n".join(map(json.dumps, rows)).encode()})
    assert json.loads(store.get(made.files["card_json"]))["unknown_keys"] == {"Input": 30, "text": 30}
    kept = make(
        {"a.jsonl": "\n".join(map(json.dumps, rows)).encode()}, "kept", data={"keep_columns": ["text", "input"]}
    )
    assert json.loads(store.get(kept.files["card_json"]))["unknown_keys"] == {}


def _recipe(**values: Any) -> Recipe:
    return load_recipe("tiny", {"curation": values})


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ('{"amount": 19.50}', True),
        ('{"amount": 1e3}', True),
        ('{"amount": 19.5, "n": 12345678901234567890123, "text": "19.50"}', False),
        ({"amount": 19.5}, False),
    ],
)
def test_numbers_of_arguments_in_text_that_are_written_anew_are_told(arguments: Any, told: bool) -> None:
    for call in (
        {"tool_calls": [{"type": "function", "id": "c1", "function": {"name": "pay", "arguments": arguments}}]},
        {"function_call": {"name": "pay", "arguments": arguments}},
    ):
        row = canonical(chat(ASK, {"role": "assistant", "content": "", **call}, ANSWER))
        assert ("messages.tool_calls.arguments (numbers as 19.50)" in row.unknown) == told


@pytest.mark.parametrize(
    ("order", "told"),
    [
        (("c1", "c2", "c3"), set()),
        (("c2", "c1", "c3"), {REORDERED}),
        (("c1", "c3"), {UNPAIRED}),
        (("c1", "c2", "x"), {UNPAIRED}),
        (("c3", "x", "c1"), {REORDERED, UNPAIRED}),
        ((), set()),  # as of a call that is the last thing that is learned
    ],
)
@pytest.mark.parametrize("by", ["tool_call_id", "name"])
def test_results_that_are_not_those_of_their_calls_are_told(order: tuple[str, ...], told: set[str], by: str) -> None:
    """Templates without ids and names pair results with calls by their order."""
    ids = by == "tool_call_id"
    calls = [
        {**({"id": name} if ids else {}), "function": {"name": "look" if ids else name, "arguments": {"at": name}}}
        for name in ("c1", "c2", "c3")
    ]
    results = [{"role": "tool", by: name, "content": f"of {name}"} for name in order]
    again = [ASK, {"role": "assistant", "content": "", "tool_calls": calls[:1]}]
    again += [{"role": "tool", by: "c1", "content": "on"}, ANSWER]
    row = canonical(chat(ASK, {"role": "assistant", "content": "", "tool_calls": calls}, *results, ANSWER, *again))
    assert {name.removeprefix("messages.") for name in row.unknown} & {REORDERED, UNPAIRED} == told


def test_what_is_told_as_keys_are_and_is_none_is_not_refused(make: Make) -> None:
    calls = [{"id": f"c{n}", "function": {"name": "pay", "arguments": '{"x": 1.50}'}} for n in range(2)]
    results = [{"role": "tool", "tool_call_id": f"c{n}", "content": "done"} for n in (1, 0, 7)]
    rows = [
        chat(
            {**ASK, "content": f"Pay {n}"}, {"role": "assistant", "content": "", "tool_calls": calls}, *results, ANSWER
        )
        for n in range(30)
    ]
    made = make({"a.jsonl": "\n".join(map(json.dumps, rows)).encode()})
    assert made.measured["unknown_keys"].keys() == NO_KEYS - {EMPTY_SYSTEM}
    assert all(rule.ok for rule in checks(made, _recipe(unknown_keys="refuse")))
