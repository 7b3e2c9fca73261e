"""A follow that goes from a rotated file straight to the newest one has left out those between."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from kubeflow_training.jobs.kubernetes.cursor import Batch
from kubeflow_training.jobs.kubernetes.rotation import Rotation

SECOND = 10**9


def batch(*seconds):
    return Batch([f"at {second}" for second in seconds], [(int(second * SECOND), 1) for second in seconds])


def shown(rotation, *batches):
    return [(part.gap, part.lines) for one in batches for part in rotation.parts(one) if part.lines]


def test_a_file_that_is_left_out_is_a_gap_before_the_first_line_behind_it():
    rotation = Rotation(5 * SECOND)
    rotation.begins(20 * SECOND)
    rotation.begins(40 * SECOND)
    assert shown(rotation, batch(6, 7), batch(8, 40, 41), batch(42)) == [
        (None, ["at 6", "at 7"]),
        (None, ["at 8"]),
        ((8 * SECOND, 40 * SECOND), ["at 40", "at 41"]),
        (None, ["at 42"]),
    ]


def test_each_file_that_is_left_out_is_told_where_it_is_missing():
    rotation = Rotation()
    for second in (1, 20, 40):
        rotation.begins(second * SECOND)
    parts = shown(rotation, batch(1, 2, 30, 31, 60))
    assert [gap and (gap[0] // SECOND, gap[1] // SECOND) for gap, _ in parts] == [None, (2, 30), (31, 60)]
    assert [line for _, lines in parts for line in lines] == ["at 1", "at 2", "at 30", "at 31", "at 60"]


def test_what_was_passed_before_it_was_known_is_no_gap():
    rotation = Rotation(10 * SECOND)
    rotation.begins(9 * SECOND)
    rotation.begins(10 * SECOND)
    assert [gap for gap, _ in shown(rotation, batch(11, 30))] == [None]


def test_stamps_that_run_backwards_by_a_little_are_no_gap():
    rotation = Rotation(1 * SECOND)
    rotation.begins(20 * SECOND)
    assert [gap for gap, _ in shown(rotation, batch(2, 20.4, 20, 20.5, 25))] == [None]


@given(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=8), min_size=2, max_size=8), st.data())
def test_files_read_one_after_the_other_have_no_gap_and_any_other_order_has(steps, data):
    """Files of lines, each beginning ten seconds after the one before ended, as the node looks every ten seconds."""
    files, now = [], 0
    for pauses in steps:
        now += 10
        files.append([now := now + pause for pause in pauses])
    left_out = data.draw(st.sets(st.integers(1, len(files) - 2))) if len(files) > 2 else set()
    rotation, gaps = Rotation(), 0
    for file in files:
        rotation.begins(file[0] * SECOND)
    for number, file in enumerate(files):
        if number not in left_out:
            gaps += sum(part.gap is not None for part in rotation.parts(batch(*file)))
    assert gaps == sum(number in left_out and number + 1 not in left_out for number in range(len(files)))
