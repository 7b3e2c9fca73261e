"""What is said of a queue whose settings lose or delay drops."""

from __future__ import annotations

import json

import pytest
from dropforge_airflow.triggers.queue_settings import queue_troubles

GOOD = {
    "VisibilityTimeout": "330",
    "MessageRetentionPeriod": "1209600",
    "RedrivePolicy": json.dumps({"deadLetterTargetArn": "arn:aws:sqs:eu-west-1:1:dead", "maxReceiveCount": 50}),
}
DEAD = {"MessageRetentionPeriod": "1209600"}


def test_a_good_queue_needs_no_word() -> None:
    assert queue_troubles(GOOD, DEAD, 300) == ([], [])


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"VisibilityTimeout": "0"}, "Set it to 30"),
        ({"MessageRetentionPeriod": "3600"}, "Set it to 1209600"),
        ({"RedrivePolicy": '{"maxReceiveCount": 1}'}, "dead letters of drops"),
    ],
)
def test_what_loses_or_delays_drops_is_named_with_its_mend(change: dict[str, str], word: str) -> None:
    mend, know = queue_troubles({**GOOD, **change}, DEAD, 300)
    assert len(mend) == 1
    assert word in mend[0]
    assert know == []


def test_letters_that_die_with_the_age_of_the_message_are_named() -> None:
    mend, _ = queue_troubles(GOOD, {"MessageRetentionPeriod": "345600"}, 300)
    assert "may be gone at once" in mend[0]


def test_what_does_no_harm_is_only_told() -> None:
    mend, know = queue_troubles({**GOOD, "VisibilityTimeout": "30", "RedrivePolicy": ""}, None, 300)
    assert mend == []
    assert [("no harm" in note, "ledger/messages/" in note) for note in know] == [(True, False), (False, True)]


def test_a_queue_that_tells_nothing_has_no_trouble() -> None:
    assert queue_troubles({}, {}, 300) == ([], [])
