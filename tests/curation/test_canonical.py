"""The shapes that people use, and what cannot be mapped."""

from __future__ import annotations

import json
import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from curation.canonical import EMPTY_SYSTEM, LONGEST_NAME, canonical
from curation.identity import fold, names, rank, salt_bytes, unit
from curation.reasons import Reason, RejectError
from curation.tokens import invisible, neutralise

TALK = [("user", "q"), ("assistant", "a")]


def turns(fields: dict[str, Any], text_column: str = "text") -> list[tuple[str, str]]:
    row = canonical(fields, text_column)
    return list(zip(row.roles, row.contents, strict=True))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}, TALK),
        ({"messages": '[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]'}, TALK),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, TALK),
        ({"messages": [{"role": "User", "content": "q"}, {"role": " BOT ", "content": "a"}]}, TALK),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "q"}]},
                    {"role": "ai", "content": [{"type": "output_text", "text": "a", "annotations": []}]},
                ]
            },
            TALK,
        ),
        ({"prompt": "q", "completion": "a"}, TALK),
        ({"prompt": [{"role": "user", "content": "q"}], "completion": [{"role": "assistant", "content": "a"}]}, TALK),
        ({"question": "q", "answer": "a", "text": "not this"}, TALK),
        ({"Question": "q", " ANSWER ": "a"}, TALK),
        ({"input": "q", "output": "a"}, TALK),
        ({"instruction": "q", "input": "", "output": "a"}, TALK),
        ({"instruction": "q", "input": "x", "output": "a"}, [("user", "q\n\nx"), ("assistant", "a")]),
        ({"system": "s", "prompt": "q", "response": "a"}, [("system", "s"), *TALK]),
        (
            {
                "messages": [
                    {"role": r, "content": c} for r, c in [("user", "q"), ("assistant", "a"), ("assistant", "b")]
                ]
            },
            [("user", "q"), ("assistant", "a\n\nb")],
        ),
        (
            {"messages": [{"role": r, "content": c} for r, c in [("system", " "), ("user", "q"), ("assistant", "a")]]},
            TALK,
        ),
    ],
)
def test_conversations(fields: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    assert turns(fields) == expected


CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
SAID = [{"role": "system", "content": "s"}, *CHAT]


@pytest.mark.parametrize(
    ("fields", "expected", "unknown"),
    [
        ({"conversations": CHAT, "system": "s"}, [("system", "s"), *TALK], ()),
        ({"Messages": CHAT, "System_Prompt": "s", "tools": "[]"}, [("system", "s"), *TALK], ()),
        ({"messages": SAID, "system": "t"}, [("system", "s"), *TALK], ("system",)),
        ({"prompt": SAID[:2], "completion": CHAT[1:], "system": "t"}, [("system", "s"), *TALK], ("system",)),
        ({"messages": CHAT, "system": ""}, TALK, ()),
        ({"messages": CHAT, "dialog": CHAT, "text": "x", "label": "l", "id": 1}, TALK, ("dialog", "text")),
        ({"question": "q", "input": "context", "answer": "a"}, TALK, ("input",)),
        ({"query": "q", "answer": "a", "response": "b", "prompt": None, "input": ""},
         [("user", "q"), ("assistant", "b")], ("answer",)),
        ({"instruction": "q", "Input": "x", "output": "a"}, [("user", "q\n\nx"), ("assistant", "a")], ()),
        ({"Question": "q", "Answer": "a", "TEXT": "x", "Label": "l"}, TALK, ("TEXT",)),
        ({"turns": [{"question": "q", "answer": "a", "id": 1, "note": None}]}, TALK, ("messages.id",)),
        ({"turns": [{"user": "q", "assistant": "a"}] * 2}, TALK * 2, ()),
        ({"prompt": "q", "completion": "a", "turns": 2, "dialog": False}, TALK, ("turns", "dialog")),
        ({"prompt": "q", "completion": "a", "conversation": "17"}, TALK, ("conversation",)),  # as CSV has numbers
        # OpenAI's Responses; and Langfuse, which keeps an answer as one message.
        ({"input": "q", "output": "a", "conversation": {"id": "c"}}, TALK, ("conversation",)),
        ({"input": [{"role": "user", "content": "q"}], "output": {"role": "assistant", "content": "a"}}, TALK, ()),
        ({"turns": [{"instruction": "q", "input": "x", "output": "a"}]}, [("user", "q\n\nx"), TALK[1]], ()),
    ],
)  # fmt: skip
def test_no_content_beside_other_content_goes_without_a_word(
    fields: dict[str, Any], expected: list[tuple[str, str]], unknown: tuple[str, ...]
) -> None:
    row = canonical(fields)
    assert (list(zip(row.roles, row.contents, strict=True)), row.unknown) == (expected, unknown)


@pytest.mark.parametrize(
    "text",
    ['[{"role": "CEO", "name": "Ann"}]', '[{"from": "user", "to": "x"}]', '[{"role": "user"', '[{"role": "user"}, 1]',
     "[{'role': 'admin'}]", '[{"value": 1}]', "[" * 200 + '{"role": "user", "content": "x"}'],
)  # fmt: skip
def test_an_answer_that_is_json_stays_text(text: str) -> None:
    assert turns({"prompt": "q", "completion": text}) == [("user", "q"), ("assistant", text)]


@pytest.mark.parametrize("content", [{"text": "t"}, {"messages": CHAT}, {"prompt": "q", "completion": "a"}])
def test_a_name_in_other_letters_is_read_where_it_is_not_there_exactly(content: dict[str, Any]) -> None:
    about = {"label": "l", "source": "s", "group_id": "g", "system": "y", "tools": [{"name": "x"}]}
    plain = canonical({**content, **about})
    assert canonical({**content, **{name.upper(): value for name, value in about.items()}}, labels=True) == (
        plain._replace(unknown=tuple(map(str.upper, plain.unknown)))
    )
    assert canonical(
        {**content, **about, **dict.fromkeys(about), **{f" {n.title()}": v for n, v in about.items()}}
    ) == (plain._replace(unknown=tuple(f" {name.title()}" for name in plain.unknown)))
    both = canonical({**content, **about, "Label": "m", "SOURCE": "s", "Group": "g", "Tools": []})
    assert (both.label, both.source, both.group) == ("l", "s", "g")
    assert {"Label", "SOURCE"} <= set(both.unknown)


def test_of_two_groups_the_first_one_counts_and_the_other_is_told() -> None:
    row = canonical({"text": "t", "conversation_id": "c", "Group_ID": "h", "group": "g"})
    assert (row.group, row.unknown) == ("g", ("Group_ID", "conversation_id"))
    same = canonical({"text": "t", "conversation_id": 7.0, "group": "7", "group_id": float("nan")})
    assert (same.group, same.unknown) == ("7", ())


@pytest.mark.parametrize(
    ("label", "what"),
    [
        ([{"user_id": "u1", "value": "A"}], "`label` is a list that holds .*, .*: write the value alone"),
        ({"value": "A"}, "`label` is an object"),
        (["a", "b"], "`label` is a list of 2, .*: write one class for each row"),
        ([["a"]], "`label` is a list that holds a list"),
        ([], "no `label`"),
    ],
)
def test_a_class_is_one_value(label: object, what: str) -> None:
    with pytest.raises(RejectError, match=what):
        canonical({"text": "t", "label": label}, labels=True)
    assert canonical({"text": "t", "label": label}).label in (None, json.dumps(label))


def test_a_list_of_one_label_is_that_label() -> None:
    assert [canonical({"text": "t", "label": label}, labels=True).label for label in (["pos"], [b"pos"], [1.0])] == [
        "pos", "pos", "1",
    ]  # fmt: skip


def test_content_beside_a_text_is_told_too() -> None:
    assert canonical({"text": "t", "Text": "u", "prompt": "p", "tools": [{}], "url": "x"}).unknown == (
        "Text", "prompt", "tools",
    )  # fmt: skip
    assert canonical({"body": "t", "messages": CHAT, "text": "x"}, "body").unknown == ("messages",)


def test_text_label_source_group() -> None:
    row = canonical({"text": " as it is \n", "label": 3, "source": "web", "conversation_id": "g"})
    assert (row.text, row.label, row.source, row.group) == (" as it is \n", "3", "web", "g")
    assert canonical({"body": "x", "messages": None}, "body").text == "x"
    assert canonical({"body": "x", "prompt": "q", "completion": "a"}, "body").text == "x"
    assert canonical({"text": "x", "label": ["b", 1]}).label == '["b", 1]'


#: What editors and chat programs write for an empty paragraph or message, and Python takes for no white space.
UNSEEN = ("\u200b", "\ufffc", "\ufeff", "\u2060", "\u00ad", "\u200c", "\u200e", "\u3164", "\u2800")


def talk(*messages: tuple[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in messages]}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, Reason.NO_CONTENT),
        ({"body": "x"}, Reason.NO_CONTENT),
        ({"text": None}, Reason.NO_CONTENT),
        ({"text": "  \n"}, Reason.EMPTY),
        *(({"text": f" {unseen}\n{unseen}"}, Reason.EMPTY) for unseen in UNSEEN),
        *((talk(("user", "q"), ("assistant", unseen)), Reason.NO_ANSWER) for unseen in UNSEEN),
        *((talk(("user", unseen), ("assistant", "a")), Reason.EMPTY) for unseen in UNSEEN),
        ({"text": 7}, Reason.BAD_FIELD),
        ({"text": ["a"]}, Reason.BAD_FIELD),
        ({"text": "a\0b"}, Reason.NUL),
        ({"text": "a", "label": "\0"}, Reason.NUL),
        ({"messages": []}, Reason.BAD_MESSAGES),
        ({"messages": "hello"}, Reason.BAD_MESSAGES),
        ({"messages": ["hello"]}, Reason.BAD_MESSAGES),
        ({"messages": [{"content": "x"}]}, Reason.BAD_MESSAGES),
        (talk(("wizard", "x")), Reason.UNKNOWN_ROLE),
        (talk(("user", None), ("assistant", "a")), Reason.BAD_FIELD),
        (talk(("user", [{"type": "image"}]), ("assistant", "a")), Reason.BAD_FIELD),
        (talk(("user", " "), ("assistant", "a")), Reason.EMPTY),
        (talk(("user", "q"), ("assistant", "")), Reason.NO_ANSWER),
        (talk(("user", "q")), Reason.NO_ANSWER),
        (talk(("assistant", "a")), Reason.BAD_ORDER),
        (talk(("user", "q"), ("system", "s"), ("assistant", "a")), Reason.BAD_ORDER),
        ({"prompt": "q", "completion": None}, Reason.BAD_FIELD),
        ({"question": "q", "answer": ""}, Reason.NO_ANSWER),
    ],
)
def test_what_cannot_be_mapped_has_a_reason(fields: dict[str, Any], reason: Reason) -> None:
    with pytest.raises(RejectError) as caught:
        canonical(fields)
    assert caught.value.reason == reason


def test_lone_surrogates_are_rejected_wherever_they_stand() -> None:
    for fields in ({"text": "\ud800"}, {"text": "a", "group": "\udfff"}, {"text": "a", "label": "\ud800"}):
        with pytest.raises(RejectError) as caught:
            names(canonical(fields))
        assert caught.value.reason == Reason.LONE_SURROGATE


CONTROL = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "</s>",
    "<s>",
    "[INST]",
    "[/INST]",
    "<end_of_turn>",
    "<｜end▁of▁sentence｜>",
    "<</SYS>>",
    "<bos>",
    "<|turn>",
    "<turn|>",
    "<seed:eos>",
    "[|user|]",
    "[|endofturn|]",
    "]~b]",
    "]~!b[",
    "[e~[",
    "]<]image[>[",
)


@pytest.mark.parametrize("token", CONTROL)
def test_control_tokens_are_made_harmless_and_counted(token: str) -> None:
    row = canonical({"prompt": f"a{token}b{token}", "completion": "fine"})
    assert token not in row.contents[0]
    assert row.contents[0].replace(" ", "") == f"a{token}b{token}"
    assert row.neutralised == 2


@pytest.mark.parametrize(
    "text", ["a < b", "x[0]", "<b>bold</b>", "<div|>", "let a = [|b|]", "[INSTALL]", "List<String>", "a <| b |> c"]
)
def test_ordinary_text_is_left_alone(text: str) -> None:
    assert neutralise(text) == (text, 0)


@given(st.lists(st.sampled_from([*CONTROL, "<", "|", ">", "[", "]", "~", "im_end", "/", " ", "x"]), max_size=12))
def test_nothing_is_left_after_neutralising(parts: list[str]) -> None:
    clean, _ = neutralise("".join(parts))
    assert neutralise(clean) == (clean, 0)
    assert not any(token in clean for token in CONTROL)


def test_invisible_characters_are_seen() -> None:
    assert invisible("a\u202eb")
    assert invisible("a\U000e0041")
    assert invisible("Good day" + "".join(chr(0xE0100 + byte) for byte in b"obey"))
    assert not invisible("naïve שלום 👩‍👩‍👧 ❤️ 葛\U000e0100城")


def key(fields: dict[str, Any]) -> bytes:
    return names(canonical(fields))[0]


def test_what_counts_as_the_same_content() -> None:
    base = key({"text": "Ångström  ist\tgleich"})
    for other in ("A\u030angstro\u0308m ist gleich", " Ångström\n\nist\u00a0gleich ", "Ångström ist\u2028gleich"):
        assert key({"text": other}) == base
    for other in ("ångström ist gleich", "Ångström istgleich", "Angstrom ist gleich", "Ångström ist gleich."):
        assert key({"text": other}) != base
    assert key({"prompt": "q", "completion": "a"}) == key(
        {"conversations": [{"from": "human", "value": "q "}, {"from": "gpt", "value": "a"}]}
    )
    assert key({"prompt": "q", "completion": "a"}) != key({"prompt": "q a", "completion": "a"})
    assert key({"text": "a", "label": "x", "source": "s", "group": "g"}) == key({"text": "a"})


def test_exact_name_sees_every_difference() -> None:
    def exact(fields: dict[str, Any]) -> bytes:
        return names(canonical(fields))[1]

    rows = [{"text": "a b"}, {"text": "a  b"}, {"text": "a b", "label": "1"}, {"text": "a b", "group": "1"}]
    assert len({exact(row) for row in rows}) == len(rows)


@pytest.mark.parametrize("empty", ["", [], "[]"])
def test_a_column_of_another_shape_that_is_empty_is_not_there(empty: Any) -> None:
    pair = {"prompt": "Is it on?", "completion": "Yes."}
    assert canonical({"messages": empty, "text": "", **pair}) == canonical(pair)
    assert canonical({"prompt": "", "completion": "", "text": "It is on."}) == canonical({"text": "It is on."})
    for nothing in ({"prompt": "Is it on?", "completion": "", "text": "Is it on?"}, {"messages": empty}):
        with pytest.raises(RejectError):
            canonical(nothing)
    assert canonical({**pair, "completion": "[]"}).contents[1] == "[]"


@given(st.text(), st.text())
def test_folding_is_stable_and_normalised(left: str, right: str) -> None:
    assert fold(fold(left)) == fold(left)
    if unicodedata.normalize("NFC", left) == unicodedata.normalize("NFC", right):
        assert fold(left) == fold(right)


def test_golden_names() -> None:
    """The same on every machine and Python: a change here changes every digest, so raise the kernel's version."""
    row = canonical({"prompt": "Grüße <|im_end|>", "completion": "ok", "label": "x", "group": "g1"})
    content, exact, words, *_ = names(row)
    assert content.hex() == "cf9de53df8d3681d0ea4ef892867118a"
    assert exact.hex() == "0ce1c83d824136451ed2794dd00be7b7"
    assert unit(row.group, content, salt_bytes("dropforge")).hex() == "8df271b608fe9df8ab56303a576bd272"
    assert words == 4
    assert rank(exact, content, 3, 258).hex() == f"0000{exact.hex()}{content.hex()}000000030000000000000102"


def test_a_run_of_many_messages_is_joined_once() -> None:
    """One by one it would take minutes: each would copy all before it."""
    many = 300_000
    told = [{"role": "user", "content": "a short message, and another"}] * many
    row = canonical({"messages": [*told, {"role": "assistant", "content": "b"}]})
    assert row.roles == ("user", "assistant")
    assert row.contents[0].split("\n\n") == ["a short message, and another"] * many


@pytest.mark.parametrize("name", ["label", "source", "group"])
def test_a_name_without_end_is_refused(name: str) -> None:
    """Rows are joined and counted by it, in memory."""
    assert canonical({"text": "a", name: "x" * LONGEST_NAME})
    with pytest.raises(RejectError, match="more than 65536") as refused:
        canonical({"text": "a", name: "x" * (LONGEST_NAME + 1)})
    assert refused.value.reason == Reason.TOO_LARGE


def test_what_a_row_holds_is_more_than_its_texts() -> None:
    """Stages get few rows at once where each holds much, whatever it is."""
    row = canonical({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 500})
    assert row.held > 20 * row.chars
    assert canonical({"text": "a"})._replace(extras="x" * 1_000).held == 1_001


def test_a_prompt_that_ends_with_the_beginning_of_its_answer_is_told() -> None:
    """A prefill, as of `continue_final_message`: it is no part of the answer that is learned."""
    begun = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "Hold"}]
    answer = [{"role": "assistant", "content": "no"}]
    for completion, unknown in (
        (" the key.", ("prompt (ends with an answer)",)),
        (answer, ()),
        (json.dumps(answer), ()),
    ):
        row = canonical({"prompt": begun, "completion": completion})
        assert (row.roles, row.unknown) == (("user", "assistant", "assistant"), unknown)
    flagged = [begun[0], {**begun[1], "train": False}]
    assert canonical({"prompt": flagged, "completion": " the key."}).unknown == ()
    assert canonical({"prompt": begun[:1], "completion": " the key."}).unknown == ()


@pytest.mark.parametrize("unseen", UNSEEN)
def test_what_shows_nothing_is_no_label_and_no_system_message_and_is_kept_within_texts(unseen: str) -> None:
    with pytest.raises(RejectError, match="no `label`"):
        canonical({"text": "a", "label": unseen}, labels=True)
    row = canonical(talk(("system", unseen), ("user", "q"), ("assistant", f"a{unseen}b")))
    assert (row.roles, row.contents) == (("user", "assistant"), ("q", f"a{unseen}b"))
    assert EMPTY_SYSTEM in row.unknown
    assert canonical({"text": f"{unseen}\u0915"}).text == f"{unseen}\u0915"


@pytest.mark.parametrize("unseen", ["\u200b", "\ufeff", "\u00ad", "\u2060", "\u200e", "\u200f"])
def test_texts_that_differ_in_what_nobody_sees_are_copies(unseen: str) -> None:
    assert key({"text": f"{unseen}Lamp 3{unseen} is on{unseen}."}) == key({"text": "Lamp 3 is on."})
    assert fold(f"a{unseen}\u0915") == "a\u0915"


def test_joiners_of_letters_make_another_text() -> None:
    assert fold("\u0915\u200d") != fold("\u0915") != fold("\u0915\u200c")


def test_a_row_without_a_label_tells_what_it_has() -> None:
    with pytest.raises(RejectError, match="no `label`; fields: text, klass"):
        canonical({"text": "a", "klass": "b"}, labels=True)
