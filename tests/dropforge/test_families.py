"""A family's file for the calendar: strict, and one that is broken says nothing about the others."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path

import pytest

from dropforge import families
from dropforge.errors import DropforgeError
from dropforge.families import Family, parse_family, read_families, rules_of

WHOLE = "cron: 0 3 * * MON\nrecipe: {extends: tiny}\n"


def test_the_example_works(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "families" / "python-help.yaml.example"
    (tmp_path / "python-help.yaml").write_text(example.read_text())
    found = read_families(tmp_path)
    assert found.broken == ()
    family = found.families["python-help"]
    assert (family.data, family.start, family.timezone) == ("all", "base", "Europe/Berlin")
    assert family.whole().promote.min_improvement == 0.01


def test_what_is_not_said_is_all_drops_from_the_base_in_utc() -> None:
    family = parse_family(WHOLE)
    assert (family.data, family.start, family.timezone, family.last) == ("all", "base", "UTC", None)
    assert parse_family(WHOLE + "data: last 12 drops").last == 12
    assert parse_family(WHOLE + "start: champion").whole().base.start == "champion"


@pytest.mark.parametrize("cron", ["0 3 29 2 *", "0 0 31 2 MON", "0 0 L * *", "0 3 * * 1#5"])
def test_a_rare_day_is_a_calendar_too(cron: str) -> None:
    assert parse_family(f"cron: '{cron}'\nrecipe: {{extends: tiny}}").cron == cron


def test_rules_of_intake_need_no_calendar() -> None:
    family = parse_family("intake: {rate: 1 per 30 minutes, latest_only: true}")
    assert family.cron is None
    assert family.intake is not None
    assert family.intake.limit == (1, timedelta(minutes=30))
    gathers = parse_family("intake: {window: 2 hours}\nstart: champion\nrecipe: {extends: tiny}")
    assert gathers.intake is not None
    assert gathers.intake.gathers == timedelta(hours=2)
    assert gathers.whole().base.start == "champion"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("schedule: 0 3 * * *\n" + WHOLE, "key `schedule`: it is unknown. Did you mean `cron`?"),
        ("train: {max_steps: 3}\n" + WHOLE, "key `train`: it is unknown. Did you mean `recipe`?"),
        ("recipe: {}", "keys `recipe`, `cron` and `intake`: all are missing. Give one of them"),
        ("recipe: {train: {max_steps: 3}}", "key `recipe`: it extends no preset"),
        ("intake: {rate: 1 per day}\nstart: champion", "key `start`: it is of the recipe. Give `recipe` too"),
        ("cron: R * * * *\nrecipe: {extends: tiny}", "key `cron`: `R` is another time whenever it is looked at"),
        ("cron: 0 r(1-5) * MAR *\nrecipe: {extends: tiny}", "key `cron`: `R` is another time"),
        ("cron: 61 * * * *\nrecipe: {extends: tiny}", "key `cron`: it is no cron expression of five fields"),
        ("recipe: {extends: 0x" + "f" * 5000 + "}", "a number of 5002 characters, line 1"),
        ("recipe: {extends: 0x" + "f" * 4000 + "}", "key `recipe.extends`: it is a number of about 4817 digits"),
        ("recipe: {extends: 1}", "recipe key `extends`: it is no preset's name, but a int"),
        ("recipe: {extends: null}", "key `recipe`: it extends no preset"),
        (WHOLE + "alert: {times: 0x" + "f" * 4000 + "}", "key `alert.times`: it is a number of about 4817 digits"),
        ("cron: 0 3 31 4 *\nrecipe: {extends: tiny}", "key `cron`: no such day ever comes, not '0 3 31 4 *'"),
        ("cron: 0 0 30 2 *\nrecipe: {extends: tiny}", "key `cron`: no such day ever comes, not '0 0 30 2 *'"),
        ("cron: '@daily'\nrecipe: {extends: tiny}", "key `cron`: it is no cron expression of five fields"),
        (WHOLE + "timezone: ../../etc/passwd", "key `timezone`: there is no such time zone"),
        (WHOLE + "timezone: Europe/Berlim", "key `timezone`: there is no such time zone"),
        ("cron:", "keys `recipe`, `cron` and `intake`: all are missing"),
        (WHOLE + "data: last 0 drops", "key `data`: it is none of `all`, `since-champion` and `last N drops`"),
        (WHOLE + "start: champion/../x", "key `start`: "),
        (WHOLE + "alert: {tims: 2}", "key `alert.tims`: it is unknown. Did you mean `alert.times`?"),
        (WHOLE + "alert: {times: 1}", "key `alert.times`: "),
        ("cron: 0 3 * * *\nrecipe: {train: {max_steps: 3}}", "key `recipe`: it extends no preset"),
        (
            "cron: 0 3 * * *\nrecipe: {extends: tiny, base: {start: champion}}",
            "key `recipe.base.start`: the file sets it. Say it as `start:` beside it",
        ),
        (
            "cron: 0 3 * * *\nrecipe: {extends: tiny, data: {source: {prefix: lake/}}}",
            "key `recipe.data.source`: the file sets it. Say it as `data:` beside it",
        ),
        ("cron: 0 3 * * *\nrecipe: {extends: tiny, data: 7}", "key `recipe.data`: it is no mapping"),
        ("cron: 0 3 * * *\nrecipe: {extends: tiny, train: {max_step: 3}}", "Did you mean `train.max_steps`?"),
        (
            "data: last 2 drops\ncron: 0 3 * * *\nrecipe: {extends: tiny, curation: {scope: family}}",
            "with `curation.scope: family` a dataset version holds all drops of the family",
        ),
        ("intake: {}", "key `intake`: it says nothing. Give `rate`, `window`, `latest_only: true` or"),
        ("intake: {latest: true}", "key `intake.latest`: it is unknown. Did you mean `intake.latest_only`?"),
        ("intake: {rate: 0 per day}", "key `intake.rate`: it is no rate as `4 per day`"),
        ("intake: {rate: 4 per fortnight}", "key `intake.rate`: it is no rate as `4 per day`"),
        ("intake: {window: 30}", "key `intake.window`: it should be a valid string, not 30"),
        ("intake: {window: 0 minutes}", "key `intake.window`: it is no time as `30 minutes`"),
        ("intake: {window: 1 hour}", "key `recipe`: it extends no preset"),
        (
            "intake: {window: 1 hour, latest_only: true}\nrecipe: {extends: tiny}",
            "key `intake.latest_only`: it takes one drop alone, and `window` puts them together. Leave one out",
        ),
        ("intake: {rate: 1 per day}\ndata: all", "key `data`: it is of the calendar. Give `cron` too"),
        ("- a list", "it is not a YAML mapping with text keys"),
        ("a: !!python/object/apply:os.system [id]", "could not determine a constructor for the tag"),
    ],
)
def test_what_is_wrong_is_told_with_its_mend(text: str, told: str) -> None:
    with pytest.raises(DropforgeError, match=re.escape(told)):
        parse_family(text)


def test_a_broken_file_takes_no_other_family_away(tmp_path: Path) -> None:
    (tmp_path / "good.yaml").write_text(WHOLE)
    (tmp_path / "bad.yaml").write_text("cron: [")
    (tmp_path / "Upper Case.yaml").write_text(WHOLE)
    (tmp_path / "other.yml").write_text(WHOLE)
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "huge.yaml").write_text(WHOLE + "#" * 3_000_000)
    (tmp_path / ".hidden.yaml").write_text("x")
    (tmp_path / "notes.txt").write_text("x")
    found = read_families(tmp_path)
    assert list(found.families) == ["good"]
    named = " ".join(str(error) for error in found.broken)
    for name in ("bad.yaml", "Upper Case.yaml", "other.yml", "folder.yaml", "huge.yaml"):
        assert f"family file '{name}'" in named
    assert "Rename it to `other.yaml`" in named
    assert len(found.broken) == 5
    assert read_families(tmp_path / "nowhere") == read_families(tmp_path / "nowhere-else")


def test_whatever_a_file_does_it_takes_no_other_family_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "good.yaml").write_text(WHOLE)
    (tmp_path / "number.yaml").write_text(f"recipe: {{extends: 0x{'f' * 5000}}}")
    (tmp_path / "unforeseen.yaml").write_text(WHOLE + "# unforeseen\n")

    def parsed(text: bytes) -> Family:
        if b"unforeseen" in text:
            raise ZeroDivisionError("nobody thought of it")
        return parse_family(text)

    monkeypatch.setattr(families, "parse_family", parsed)
    found = read_families(tmp_path)
    assert list(found.families) == ["good"]
    number, unforeseen = map(str, found.broken)
    assert "family file 'number.yaml', recipe: it is not a YAML mapping (a number of 5002 characters" in number
    assert "family file 'unforeseen.yaml': it cannot be read (ZeroDivisionError: nobody thought of it)" in unforeseen
    with pytest.raises(DropforgeError, match=r"family file 'unforeseen.yaml'"):
        rules_of(tmp_path, "unforeseen")
