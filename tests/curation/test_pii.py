"""Personal data and secrets: what is found and what is not, masks that hold, and time that stays in proportion."""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
import time
import weakref
from collections.abc import Iterator
from re import _parser as parser  # type: ignore[attr-defined]  # what a pattern consists of
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from curation import pii
from curation.columns import strings
from curation.pii import KINDS, Pii, find, fingerprint, make_pii, make_scrub
from curation.pii.hits import Hit, settle
from curation.pii.masks import mask
from curation.pii.planted import measure, plant
from curation.pii.prefilter import Prefilter
from curation.stage import Staged, passages_of
from curation.tokens import neutralise
from dropforge.errors import DropforgeError

KEY = {"OUR_KEY": "0123456789abcdef" * 2}
KEYED = Pii(key_env="OUR_KEY", key=fingerprint(KEY["OUR_KEY"].encode()))
PARTS = [
    "bob@northwind.com",
    "4111 1111 1111 1111",
    "+44 20 7946 0958",
    "DE89 3704 0044 0532 0130 00",
    "12345678Z",
    "93.184.216.34",
    "(212) 555-0187",
    "sk" + "_live_" + "4eC39HqLyjWDarjtT1zd",
    *("http://me:hunter22@db.net/x", "2a00:1450:4001:81b::200e", "529.982.247-25", "<EMAIL>", "<PHONE:abcdefghijkl>"),
    *("\u00a0", "%20", "'", "@firma.zip", "password = "),
    *(" ", ", ", "-", ".", "1", "a", "\n", "\\n", '"', "<", ">", "|", "@", "+", "(", ")", "order 12 "),
]
TEXTS = st.lists(st.sampled_from(PARTS), max_size=12).map("".join)


def staged(*rows: str | tuple[str, ...], asked: Pii = KEYED) -> Staged:
    texts = [(number, text) for number, row in enumerate(rows) for text in ((row,) if isinstance(row, str) else row)]
    rows_of, contents = [number for number, _ in texts], [text for _, text in texts]
    return make_pii(asked, KEY)(passages_of(rows_of, [None] * len(texts), contents))


def masked(*rows: str, asked: Pii = KEYED) -> list[str]:
    return staged(*rows, asked=asked).passages.column("content").to_pylist()


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("to bob.smith+x@sub.northwind.co.uk.", "email", "bob.smith+x@sub.northwind.co.uk"),
        ("an jürgen@müller.de, bitte", "email", "jürgen@müller.de"),
        ("メールはbob@northwind.jpです", "email", "bob@northwind.jp"),
        ("a juan.perez@correo.com.py hoy", "email", "juan.perez@correo.com.py"),
        ("la ion.popescu@mail.md azi", "email", "ion.popescu@mail.md"),
        ("an anna@firma.zip heute", "email", "anna@firma.zip"),
        ("mail bob@northwind.com- thanks", "email", "bob@northwind.com"),
        ("to bob@mail.northwind.com-x", "email", "bob@mail.northwind.com"),
        ("{'mail': 'bob@northwind.com'}", "email", "bob@northwind.com"),
        ("-" * 80 + "bob@northwind.com", "email", "bob@northwind.com"),
        ("CORP\\ursula@northwind.com", "email", "ursula@northwind.com"),
        ("o'brien-x@northwind.com", "email", "o'brien-x@northwind.com"),
        ("?to=j%C3%BCrgen@northwind.com", "email", "j%C3%BCrgen@northwind.com"),
        ("IBAN NO93 8 601 111 794 7", "iban", "NO93 8 601 111 794 7"),
        ("call +1 (415) 555-2671 now", "phone", "+1 (415) 555-2671"),
        ("call (212) 555-0187 now", "phone", "(212) 555-0187"),
        ("au 06 12 34 56 78", "phone", "06 12 34 56 78"),
        ("unter 030/1234567", "phone", "030/1234567"),
        ("at +44 (0)20 7946 0958", "phone", "+44 (0)20 7946 0958"),
        ("phone: 4155552671", "phone", "4155552671"),
        ("tel 5550187", "phone", "5550187"),
        ("from 93.184.216.34:443", "ip", "93.184.216.34"),
        ("on 2a00:1450:4001:81b::200e", "ip", "2a00:1450:4001:81b::200e"),
        ("card 4111-1111-1111-1111", "card", "4111-1111-1111-1111"),
        ("card 378282246310005", "card", "378282246310005"),
        ("IBAN GB29 NWBK 6016 1331 9268 19 AT", "iban", "GB29 NWBK 6016 1331 9268 19"),
        ("NO9386011117947", "iban", "NO9386011117947"),
        ("ssn 123-45-6780", "national_id", "123-45-6780"),
        ("DNI 12345678Z", "national_id", "12345678Z"),
        ("NIE X1234567L", "national_id", "X1234567L"),
        ("NIR 2 69 05 49 588 157 80", "national_id", "2 69 05 49 588 157 80"),
        ("CF RSSMRA85T10A562S", "national_id", "RSSMRA85T10A562S"),
        ("BSN: 111222333", "national_id", "111222333"),
        ("PESEL 44051401359", "national_id", "44051401359"),
        ("CPF 529.982.247-25", "national_id", "529.982.247-25"),
        ("NI AB 12 34 56 C", "national_id", "AB 12 34 56 C"),
        ("Steuer-ID 86 095 742 719", "national_id", "86 095 742 719"),
        ("see https://me:hunter22@db/x", "secret", "me:hunter22"),
        ('API_KEY = "q8W2' + "zL0pXc7VtB" + '5n"', "secret", "q8W2zL0pXc7VtB5n"),
        ("x AKIA" + "IOSFODNN7EXAMPLE y", "secret", "AKIA" + "IOSFODNN7EXAMPLE"),
        ("x gh" + "p_" + "a1B2" * 9, "secret", "gh" + "p_" + "a1B2" * 9),
    ],
)
def test_what_names_a_person_or_opens_something_is_found(text: str, kind: str, value: str):
    assert [(hit.kind, text[hit.start : hit.end]) for hit in find(text)] == [(kind, value)]
    done = staged(text)
    assert value not in done.passages.column("content")[0].as_py()
    assert (done.refused.num_rows, done.counts) == (0, {f"pii_{kind}": 1, "pii_rows": 1})


@pytest.mark.parametrize(
    "text",
    [
        "order 1234567890123456, no. 987654321, and 12345678",
        "4111 1111 1111 1112 has a wrong check digit, GB29 NWBK 6016 1331 9268 18 too",
        "ssn 000-12-3456, 666-12-3456, 900-12-3456, 123-00-4567",
        "version 2.10.33.4, v91.0.47.12, section 1.2.3.4",
        "10.0.0.1, 192.168.1.20, 172.16.5.4, 127.0.0.1, 203.0.113.9, 2001:db8::1, fe80::1",
        "2024-01-15 10:20:33, 15.01.2024, 1700000000, 1700000000123",
        "ISBN 978-3-16-148410-0, 52.520008, 13.404954, 1 234 567 890",
        "git@github.com:group/project and icon@2x.png and @property",
        "icon@2x.zip icon@1.5x.md main@v2.min.js '-@northwind.com %20@northwind.com",
        "d41d8cd98f00b204e9800998ecf8427e 550e8400-e29b-41d4-a716-446655440000 00:1b:44:11:3a:b7",
        'password = "your_password_here"; token = get_token(); key: ${SECRET_KEY}',
        "<EMAIL> <PHONE:abcdefghijkl> <SECRET>",
    ],
)
def test_what_only_looks_like_it_stays(text: str):
    assert find(text) == []
    assert masked(text) == [text]


def test_a_private_key_goes_whole_also_inside_json():
    key = "-----BEGIN " + "PRIVATE KEY-----\n" + "\n".join(["MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSj"] * 20)
    whole = f"{key}\n-----END " + "PRIVATE KEY-----"
    assert masked(f"a {whole} b", asked=Pii()) == ["a <SECRET> b"]
    inside = masked(json.dumps({"key": whole, "n": [1]}), asked=Pii())[0]
    assert json.loads(inside) == {"key": "<SECRET>", "n": [1]}
    assert masked(f"a {key} b", asked=Pii()) == ["a <SECRET> b"]


def test_one_value_has_one_pseudonym_however_it_is_written_and_in_any_row():
    one, other, third = masked(
        "pay 4111 1111 1111 1111", "4111-1111-1111-1111 paid", "Bob@Northwind.com bob@northwind.com"
    )
    assert one.removeprefix("pay ") == other.removesuffix(" paid")
    assert len(set(third.split())) == 1
    assert neutralise(one + other + third)[1] == 0
    assert masked("bob@northwind.com", asked=Pii()) == ["<EMAIL>"]
    others = {"OUR_KEY": "f" * 32}
    again = make_pii(Pii(key_env="OUR_KEY", key=fingerprint(b"f" * 32)), others)
    text = again(staged("x").passages.set_column(2, "content", strings(["bob@northwind.com"])))
    assert text.passages.column("content")[0].as_py() not in third


@pytest.mark.parametrize(
    "forms",
    [
        (
            *(
                "bob@northwind.com",
                "'bob@northwind.com'",
                "-bob@northwind.com",
                "--Bob@northwind.com-",
                "~bob@northwind.com",
            ),
            *(
                "%20bob@northwind.com",
                "mailto%3Abob@northwind.com",
                "hi%2520bob@northwind.com",
                "x-%0A'bob@northwind.com",
            ),
            *(
                "\\n'bob@northwind.com'",
                "\\u003cbob@northwind.com",
                "bob@northwind.com-x",
                "bob@northwind.com'bob@northwind.com",
            ),
        ),
        (
            *(
                "+1 415 555 2671",
                "(415) 555-2671",
                "415-555-2671",
                "1-415-555-2671",
                "+1 (415) 555-2671",
                "+14155552671",
            ),
            *("phone: 4155552671", "tel 14155552671"),
        ),
    ],
)
def test_one_value_has_one_pseudonym_whatever_stands_around_it(forms: tuple[str, ...]):
    found = [re.findall("<[A-Z]+:[a-p]{12}>", after) for after in masked(*forms)]
    assert {name for names in found for name in names} == {found[0][0]}
    assert all(found)


def test_addresses_in_one_line_all_go_and_leave_nothing_between_them():
    many = "-".join(["ann@northwind.com"] * 20)
    assert masked(many, asked=Pii()) == ["-".join(["<EMAIL>"] * 20)]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('{"card": 4111111111111111, "n": 1}', {"card": "<CARD>", "n": 1}),
        ('{"pesel": 44051401359}', {"pesel": "<NATIONAL_ID>"}),
        ('{"a": [4111111111111111,\n  4012888888881881 ], "said": "44051401359"}', None),
        ('[1, -4111111111111111, 4111111111111111.0, {"x": 0.4111111111111111}]', None),
        ('{"said": "cards: [4111111111111111, 4012888888881881]"}', {"said": "cards: [<CARD>, <CARD>]"}),
        (json.dumps({"arguments": json.dumps({"card": 4111111111111111, "b\\": '"', "n": [44051401359]})}), None),
    ],
)
def test_a_number_of_json_becomes_a_string(before: str, after: object):
    once = masked(before, asked=Pii())
    assert json.loads(once[0]) == after or after is None
    assert "<CARD>" in once[0] or after
    assert not any(value in once[0] for value in ("4111111111111111", "4012888888881881", "44051401359"))
    assert masked(*once, asked=Pii()) == once
    assert json.loads(masked(before)[0])


def test_json_in_a_string_of_json_keeps_its_numbers_as_strings_too():
    arguments = json.dumps({"card": 4111111111111111, "path\\": '"', "pesel": 44051401359})
    (after,) = masked(json.dumps({"arguments": arguments}), asked=Pii())
    said = json.loads(json.loads(after)["arguments"])
    assert said == {"card": "<CARD>", "path\\": '"', "pesel": "<NATIONAL_ID>"}


def test_numbers_in_a_sentence_get_no_quotes():
    text = 'a 24" screen, card: 4111111111111111, and\n{"n": 44051401359}'
    assert masked(text, asked=Pii()) == ['a 24" screen, card: <CARD>, and\n{"n": "<NATIONAL_ID>"}']
    assert masked("paid, 4111111111111111, and [1]", asked=Pii()) == ["paid, <CARD>, and [1]"]


@pytest.mark.parametrize("space", [chr(code) for code in range(0x3001) if chr(code).isspace()])
def test_the_prefilter_knows_all_spaces(space: str):
    password = f"password{space}: Zx8qHn3kLw9Tr2abcdef"
    token = f"token{space}= 'Zx8qHn3kLw9Tr2'"
    assert [len(find(text)) for text in (password, token)] == [1, 1]
    assert not any("Zx8q" in after for after in masked(password, token))


@pytest.mark.parametrize(
    "name",
    ["AP\u0130_KEY", "pr\u0131vate_key", "cl\u0131ent_id", "credent\u0131al", "to\u212aen", "authorization" + "x" * 32],
)
def test_the_prefilter_knows_all_names(name: str):
    text = f"{name} = Zx8qHn3kLw9Tr2abcdef"
    assert find(text)
    assert "Zx8q" not in masked(text)[0]


def test_only_short_texts_are_kept_with_their_masks():
    class Text(str):
        __slots__ = ("__weakref__",)

    scrub = make_scrub(Pii())

    def kept(length: int) -> bool:
        text = Text("bob@northwind.com ".ljust(length, "x"))
        assert scrub(text).startswith("<EMAIL> x")
        seen = weakref.ref(text)
        del text
        return seen() is not None

    assert kept(1000)
    assert not kept(1001)


def test_no_pseudonym_is_found_again():
    text = "\n".join(mask(Hit(0, 1, kind, str(number)), b"k" * 32) for kind in KINDS for number in range(1500))
    assert find(text) == []
    assert neutralise(text)[1] == 0


@pytest.mark.parametrize("env", [{}, {"OUR_KEY": "short"}, {"OUR_KEY": "g" * 32}])
def test_a_missing_short_or_other_key_is_refused_and_not_shown(env: dict[str, str]):
    with pytest.raises(DropforgeError, match="OUR_KEY") as caught:
        make_pii(KEYED, env)
    assert not any(value in str(caught.value) for value in env.values())


def test_overlapping_hits_become_one_whatever_their_order():
    text = "x" * 40
    hits = [Hit(0, 10, "phone", "a"), Hit(8, 20, "email", "b"), Hit(25, 30, "card", "c"), Hit(25, 30, "phone", "c")]
    assert settle(text, hits) == settle(text, hits[::-1])
    assert [(hit.start, hit.end, hit.kind) for hit in settle(text, hits)] == [(0, 20, "email"), (25, 30, "card")]
    (hit,) = find("https://me:hunter22@northwind.com/x")
    assert hit.kind == "secret"


def test_rows_are_dropped_where_that_is_asked_for():
    done = staged("a", "bob@northwind.com", ("b", "4111111111111111 +442079460958"), asked=Pii(action="drop-row"))
    ended = done.refused.to_pylist()
    assert [(item["row"], item["reason"], item["detail"]) for item in ended] == [
        (1, "personal_data", "email"),
        (2, "personal_data", "card, phone"),
    ]
    assert done.counts == {"pii_email": 1, "pii_card": 1, "pii_phone": 1, "pii_rows": 2}
    assert "bob" not in str(done.passages.to_pylist())


def test_a_kind_that_is_not_asked_for_stays():
    text = "bob@northwind.com 4111111111111111"
    assert masked(text, asked=Pii(kinds=("card",))) == ["bob@northwind.com <CARD>"]
    assert staged(text, asked=Pii(kinds=("card",))).counts == {"pii_card": 1, "pii_rows": 1}


@settings(max_examples=300, deadline=None)
@given(TEXTS)
def test_masking_twice_changes_nothing(text: str):
    done = staged(text)
    once = done.passages.column("content").to_pylist()
    if not done.refused.num_rows:
        assert masked(*once) == once


@settings(max_examples=200, deadline=None)
@given(TEXTS, st.booleans())
def test_json_in_a_message_stays_json(text: str, ascii_only: bool):
    said = {"said": [text, 4111111111111111, "é" + text], "n": 44051401359, "x": [-4111111111111111.0, text]}
    after = masked(json.dumps(said | {"within": json.dumps({text: text, "n": 44051401359})}, ensure_ascii=ascii_only))
    for whole in (*after, *masked(*after)):
        read = json.loads(whole)
        assert [*read, *json.loads(read["within"])][-1] == "n"
        assert [read["n"][:1], read["said"][1][:1], json.loads(read["within"])["n"][:1]] == ["<"] * 3


@settings(max_examples=60, deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=8), st.integers(1, 7))
def test_no_cut_into_batches_changes_anything(rows: list[str], cut: int):
    whole, first, rest = staged(*rows), staged(*rows[:cut]), staged(*rows[cut:])
    texts = [done.passages.column("content").to_pylist() for done in (whole, first, rest)]
    assert texts[0] == texts[1] + texts[2]
    assert whole.refused.num_rows == first.refused.num_rows + rest.refused.num_rows
    both = {name: first.counts.get(name, 0) + rest.counts.get(name, 0) for name in {*first.counts, *rest.counts}}
    assert whole.counts == both


@settings(max_examples=300, deadline=None)
@given(st.one_of(TEXTS, st.text(st.sampled_from("0123456789+-. ()/@aB:\u00a0"), max_size=60)))
def test_the_prefilter_misses_nothing(text: str):
    found = {hit.kind for hit in find(text)}
    for kind in KINDS:
        asked = find(text, (kind,))
        assert not asked or Prefilter((kind,)).suspects(strings([text])), asked
    assert not found or Prefilter(KINDS).suspects(strings([text]))


@pytest.mark.parametrize("planted_in", [0, 1])
def test_the_prefilter_lets_all_that_is_planted_through(planted_in: int):
    rows = [planted for planted in plant(60, planted_in) if find(planted.text)]
    passed = {place for place, _ in Prefilter(KINDS).suspects(strings([planted.text for planted in rows]))}
    assert passed == set(range(len(rows)))
    through = masked(*[planted.text for planted in rows])
    assert all(after != planted.text for after, planted in zip(through, rows, strict=True))


@pytest.mark.parametrize(
    "unit",
    [
        *(
            "1",
            "1 ",
            "a@",
            "a.",
            "a@a.",
            "4111 ",
            "+1",
            "AB12",
            "GB29 ",
            "1.1.",
            "2a00:",
            "secret",
            "token=",
            "eyJa",
            "(1)",
        ),
        *(
            "http://a:",
            "\\",
            "\\n",
            "-----BEGIN " + "PRIVATE KEY-----",
            "sk-",
            "a@b.c ",
            "8.8.4.45 ",
            "<EMAIL>",
            "00 1-",
            "a-",
            "%25",
            "'-",
            "a@b.cd-",
            "[4111111111111111,",
            '\\"n\\": 4111111111111111, ',
        ),
    ],
)
def test_hostile_text_takes_time_in_proportion(unit: str):
    def cost(size: int) -> float:
        text = unit * (size // len(unit))
        start = time.process_time()
        staged(text)
        return time.process_time() - start

    cost(1000)  # what is compiled once
    small, large = (min(cost(size) for _ in range(2)) for size in (100_000, 1_000_000))
    assert large < max(30 * small, 1.0)  # ten times the text; a square would be a hundred


def test_precision_and_recall_of_the_planted_set_have_floors():
    floors = {  # (precision, recall) in thousandths
        "secret": (990, 860),
        "iban": (990, 990),
        "card": (970, 990),
        "national_id": (960, 920),
        "email": (990, 990),
        "ip": (990, 990),
        "phone": (980, 890),
    }
    figures = measure(each=200)
    found = {kind: (figure.precision, figure.recall) for kind, figure in figures.items()}
    assert all(found[kind] >= (0, 0) and found[kind][0] >= least[0] for kind, least in floors.items()), found
    assert all(found[kind][1] >= least[1] for kind, least in floors.items()), found
    assert all(figure.planted == 200 for figure in figures.values())


def possessive_bodies(part: Any) -> Iterator[Any]:
    """What is repeated without giving back, in any part of a parsed pattern."""
    match part:
        case (name, (_, _, body)) if str(name) == "POSSESSIVE_REPEAT":
            yield body
            yield from possessive_bodies(body)
        case parser.SubPattern() | tuple() | list():
            for inner in part:
                yield from possessive_bodies(inner)


def test_no_pattern_reads_otherwise_on_an_older_python() -> None:
    """Before 3.11.5 a possessive group of more than one character keeps what its last turn read in vain (gh-106052)."""
    names = [info.name for info in pkgutil.iter_modules(pii.__path__, "curation.pii.")]
    found = {
        value
        for name in names
        for value in vars(importlib.import_module(name)).values()
        if isinstance(value, re.Pattern)
    }
    assert len(found) > 20
    seen = 0
    for pattern in found:
        for body in possessive_bodies(parser.parse(pattern.pattern, pattern.flags)):
            seen += 1
            assert str(body[0][0]) in {"IN", "LITERAL", "NOT_LITERAL", "GROUPREF_EXISTS"}, pattern.pattern
            assert body.getwidth() == (1, 1), pattern.pattern
    assert seen > 5
