"""The model card says what rows say as text, and no more of it than a person reads."""

from __future__ import annotations

from dropforge.run import RunSpec
from trainer.report.card import _data

BAD = "\x1b[31mx` ![t](https://evil.example/p.png) <img src=x> [**Approved**](https://evil.example/) | `"


def test_labels_are_texts_and_not_all_of_thousands() -> None:
    labels = {BAD: 3, **{f"label-{number}": 1 for number in range(9_999)}}
    packing = {"train": {"labels": labels}, "eval": {"labels": labels}}
    spec = RunSpec("run-1", "fam", 1, "", "", "", "0" * 64, {}, "code", tracking=None)
    card = _data(spec, {"packing": packing})
    assert len(card.splitlines()) < 120
    assert "and 9,900 more labels" in card
    (line,) = [line for line in card.splitlines() if "evil" in line]
    assert r"!\[t](https://evil.example/p.png) \<img src=x> \[**Approved**](" in line
    assert "\x1b" not in card
    assert line.replace(r"\|", "").count("|") == 3  # a row of two cells
