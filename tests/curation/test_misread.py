"""Texts that programs damaged are told, whichever encoding they took them for; texts of no language are."""

from __future__ import annotations

import json
import quopri

import pytest

from curation.misread import is_misread, reread
from dropforge.store import FolderStore
from tests.curation.test_spellings import Make, lines

SAID = {
    "de": "Müller grüßt die Straße und öffnet schöne Türen",
    "fr": "L’été dernier, à la forêt, j’ai été gâté par les élèves",
    "cs": "Příliš žluťoučký kůň úpěl ďábelské ódy",
    "ru": "Сегодня хорошая погода, и мы пошли гулять в парк",
    "el": "Σήμερα ο καιρός είναι ωραίος και πάμε βόλτα",
    "ar": "الطقس جميل جدا اليوم ونحن نذهب إلى الحديقة",
    "zh": "今天天气很好我们去公园散步",
    "ja": "今日は天気がとてもいいです",
}
UTF8_AS = {
    "latin-1": SAID.keys(),
    "cp1252": ("de", "fr"),
    "cp1251": ("de", "ru"),
    "cp1250": ("de", "cs"),
    "mac_roman": SAID.keys(),
    "cp437": SAID.keys(),
    "cp850": SAID.keys(),
}
#: Texts as people write them, with characters next to each other that encodings show for bytes of UTF-8.
SOUND = (
    *SAID.values(),
    "„Viel Spaß“, sagte er. „Großes Maß“… «ÄÖÜäöüß» 20 °C ± 1",
    "«École» “Über” ‘À’ «É» — ‘Ø’ …é “à” «ô» “ü”",
    "AÇÃO, ÂNCORA, ÓRGÃO, CORAÇÃO, PÃES e NÃO",
    "¿Qué? ¡¡Sí!! ¿¿Cómo?? ££££ §§ 5–6 ¶¶ ÿÿÿÿÿÿ ¡¡¡¡¡¡",
    "Việt Nam có nhiều món ăn ngon, phở và bún chả",
    "İstanbul’da güneşli bir gün, ağaçların gölgesinde",
    "Þetta er íslenska með þorn og eð: ÞÆÖ ÁÉÍ",
    "Ще не вмерла України і слава, і воля; Ёлка моё её",
    "שלום עולם", "สวัสดีชาวโลก", "नमस्ते दुनिया", "안녕하세요 세계",
    "╔══╗\n║ä ║\n╚══╝ ┌──┬──┐ │é │ü │ └──┴──┘ ░▒▓█▓▒░",
    "∀x∈ℝ: ⌈x⌉ = −⌊−x⌋, α ∧ ¬β → γ ≈ √2 ∞ ∑∂",
    "ˈfoʊnɛmz ðə ˈmɪŋ 👍👍🏽 ❤️❤️ ★★★☆☆ ①②③",
)  # fmt: skip


@pytest.mark.parametrize("page", UTF8_AS)
def test_utf8_that_was_read_as_something_else_is_told(page: str) -> None:
    for language in UTF8_AS[page]:
        shown = SAID[language].encode().decode(page, "ignore")  # a byte that the page has no character for is lost
        assert is_misread(shown), (language, shown)
        assert is_misread(f"A first line.\n{shown}\nAnd a last one.")


@pytest.mark.parametrize(("language", "page"), [("ru", "cp1251"), ("el", "cp1253"), ("zh", "gbk"), ("ja", "cp932")])
def test_other_encodings_that_were_read_as_latin1_are_told(language: str, page: str) -> None:
    assert is_misread(SAID[language].encode(page).decode("latin-1"))


@pytest.mark.parametrize("text", SOUND)
def test_text_of_any_language_is_not_told(text: str) -> None:
    assert not is_misread(text)
    assert not is_misread(f"{text} {text.upper()}")
    assert reread(text) == text


def test_what_programs_lost_and_wrote_otherwise_is_told_with_its_rows(make: Make, store: FolderStore) -> None:
    russian, german = SAID["ru"], SAID["de"]
    tables = {
        "read.jsonl": [f"{german} {n}".encode().decode("mac_roman") for n in range(20)],
        "lost.jsonl": [f"{russian} {n}".encode("ascii", "replace").decode() for n in range(20)],
        "letters.jsonl": [f"{german} {n}".encode("ascii", "replace").decode() for n in range(20)],
        "mail.jsonl": [quopri.encodestring(f"{german} {n}".encode()).decode() for n in range(20)],
        "head.jsonl": [f"=?utf-8?Q?M=C3=BCller_{n}?= said so" for n in range(20)],
        "bytes.jsonl": [f"{german} {n}".encode("ascii", "backslashreplace").decode() for n in range(20)],
        "html.jsonl": [f"it&rsquo;s caf&eacute; number {n} &mdash; open" for n in range(20)],
        "rich.jsonl": [rf"{{\rtf1\ansi\deff0 number {n} is on\par}}" for n in range(20)],
        "sound.jsonl": [
            f"Really?? Is number {n} on? And why? See a?b=1&c={n}&copy=2, x=C3, a=?b and c?d:e; AT&T; path \\x41"
            for n in range(20)
        ],
    }
    made = make({name: lines(text=texts) for name, texts in tables.items()})
    warnings = json.loads(store.get(made.files["card_json"]))["warnings"]
    told = {line.partition(":")[0]: line.partition(": ")[2] for line in warnings if ": 20 rows" in line}
    assert {name: text.split()[2:6] for name, text in told.items()} == {
        "read.jsonl": ["were", "read", "in", "another"],
        "lost.jsonl": ["hold", "`?`", "for", "letters,"],
        "letters.jsonl": ["hold", "`?`", "for", "letters,"],
        "mail.jsonl": ["have", "characters", "as", "JSON,"],
        "head.jsonl": ["have", "characters", "as", "JSON,"],
        "bytes.jsonl": ["have", "characters", "as", "JSON,"],
        "html.jsonl": ["have", "characters", "as", "HTML"],
        "rich.jsonl": ["hold", "RTF", "(`{\\rtf1`):", "write"],
    }


def test_answers_that_are_numbers_as_pandas_and_excel_write_them_are_told(make: Make, store: FolderStore) -> None:
    def asked(answers: list[str]) -> bytes:
        return "".join(
            json.dumps({"prompt": f"What is {n} times 3?", "completion": answer}) + "\n"
            for n, answer in enumerate(answers)
        ).encode()

    tables = {
        "pandas.jsonl": asked([f"{n * 3}.0" for n in range(40)]),
        "parts.jsonl": asked([f"{n * 5 / 2}" for n in range(40)]),
        "excel.jsonl": asked([f"1.{n}3457E+17" for n in range(10, 50)]),
        "whole.jsonl": asked([f"{n * 7}" for n in range(40)]),
    }
    made = make(tables)
    warnings = json.loads(store.get(made.files["card_json"]))["warnings"]
    told = [line.partition(", ")[0].partition(": write")[0] for line in warnings if " answers are " in line]
    assert sorted(told) == [
        "excel.jsonl: 40 answers are numbers as Excel has rounded them (`1.23457E+17`)",
        "pandas.jsonl: 40 answers are whole numbers with `.0`",
    ]
