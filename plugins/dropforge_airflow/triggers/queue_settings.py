"""Whether a queue is set up so that no drop is lost or late: a pure look at its attributes."""

from __future__ import annotations

import json
from collections.abc import Mapping

from dropforge.text import read_count

_DAY = 24 * 60 * 60
_VISIBLE = 10  # seconds in which a batch of messages is in the inbox even if S3 is slow
_TRIES = 5  # an outage of S3 takes a try each time the message comes again


def queue_troubles(
    attributes: Mapping[str, str], dead: Mapping[str, str] | None, acknowledge: float
) -> tuple[list[str], list[str]]:
    """(what should be mended, what is good to know) about a queue, each in a sentence with its mend.

    :param attributes: of the queue, as SQS tells them. :param dead: of its dead-letter queue; None if there is none.
    :param acknowledge: seconds after which Airflow gives up on an event that is not stored
        (`[triggerer] shared_stream_ack_timeout`).
    """
    mend: list[str] = []
    know: list[str] = []
    visible, kept = _number(attributes, "VisibilityTimeout"), _number(attributes, "MessageRetentionPeriod")
    if visible is not None and visible < _VISIBLE:
        mend.append(f"VisibilityTimeout is {visible} s: messages come again while they are read. Set it to 30 or more")
    elif visible is not None and visible <= acknowledge:
        know.append(
            f"VisibilityTimeout is {visible} s, below the {acknowledge:g} s of shared_stream_ack_timeout: while "
            "Airflow's database is slow messages come again, which wakes intake once more and does no harm"
        )
    if kept is not None and kept < _DAY:
        mend.append(f"MessageRetentionPeriod is {kept} s: drops made in a longer outage are lost. Set it to 1209600")
    tries = _tries(attributes)
    if dead is None:
        know.append("it has no dead-letter queue: what cannot be read is kept under ledger/messages/")
        return mend, know
    if tries is not None and tries < _TRIES:
        mend.append(f"maxReceiveCount is {tries}: an outage of S3 makes dead letters of drops. Set it to 20 or more")
    dead_kept = _number(dead, "MessageRetentionPeriod")
    # A dead letter keeps the age that it had in the queue.
    if kept is not None and dead_kept is not None and dead_kept < kept:
        mend.append(
            f"its dead-letter queue keeps messages for {dead_kept} s and the queue for {kept} s: a letter may be gone "
            "at once. Set the dead-letter queue's MessageRetentionPeriod to 1209600"
        )
    return mend, know


def _number(attributes: Mapping[str, str], name: str) -> int | None:
    return read_count(attributes.get(name, ""))


def _tries(attributes: Mapping[str, str]) -> int | None:
    try:
        return int(json.loads(attributes.get("RedrivePolicy") or "{}")["maxReceiveCount"])
    except (ValueError, KeyError, TypeError):
        return None
