"""A resume from an older checkpoint: what is newer is set aside, and nothing of it is lost until it is replaced."""

from __future__ import annotations

import pytest

from dropforge import aside
from dropforge.errors import DropforgeError
from dropforge.store import FolderStore
from trainer.state.checkpoint import Checkpoints

from .test_checkpoint import checkpoints, newest, said, snapshot  # noqa: F401 - fixtures


def step(found: Checkpoints) -> int | None:
    """The step from which a new attempt goes on."""
    attempt = Checkpoints(found.store, "run", "plan", found.recipe, found.say, pause=0.0)
    restored = newest(attempt)
    return restored.seal.step if restored else None


@pytest.fixture
def three(checkpoints: Checkpoints) -> Checkpoints:  # noqa: F811
    for at in (4, 6, 8):
        checkpoints.save(snapshot(at), eval_loss=10.0 - at)
    return checkpoints


def test_the_older_one_is_taken_again_and_again_until_there_is_a_newer_one(
    three: Checkpoints,
    said: list[str],  # noqa: F811
) -> None:
    newer = aside.set_aside(three.store, aside.sealed(three.store), 4)
    assert [item.step for item in newer] == [6, 8]
    assert (step(three), step(three)) == (4, 4)  # also where the attempt was killed before it had saved
    assert "checkpoint step-8 was set aside by a user; it is skipped" in said
    assert [seal.step for seal in three.seals()] == [4, 6, 8]
    # What is made now counts, at the step of one that was set aside too.
    three.save(snapshot(6), eval_loss=3.5)
    assert step(three) == 6
    three.save(snapshot(7))
    assert step(three) == 7


def test_one_that_was_set_aside_can_be_taken_up_again(three: Checkpoints) -> None:
    aside.set_aside(three.store, aside.sealed(three.store), 4)
    aside.set_aside(three.store, aside.sealed(three.store), 8)
    assert step(three) == 8
    aside.set_aside(three.store, aside.sealed(three.store), 6)
    assert step(three) == 6


def test_retention_keeps_none_of_them_for_one_of_the_new(three: Checkpoints) -> None:
    aside.set_aside(three.store, aside.sealed(three.store), 4)
    attempt = Checkpoints(three.store, "run", "plan", three.recipe, three.say, pause=0.0)
    assert newest(attempt) is not None
    attempt.save(snapshot(7))
    attempt.prune(keep=2, step=7, best=1)
    # 6 has the better evaluation and is newer than 4; 8 is not come past yet.
    assert [seal.step for seal in three.seals()] == [4, 7, 8]
    assert step(three) == 7


def test_what_cannot_be_is_refused_and_changes_nothing(three: Checkpoints) -> None:
    with pytest.raises(DropforgeError, match=r"no complete checkpoint of it.*step-4, step-6, step-8"):
        aside.set_aside(three.store, aside.sealed(three.store), 5)
    assert three.store.stat(aside.KEY) is None
    assert aside.set_aside(three.store, aside.sealed(three.store), 8) == []
    assert three.store.stat(aside.KEY) is None


def test_two_people_do_not_overwrite_each_other(three: Checkpoints) -> None:
    class Late(FolderStore):
        """Somebody else writes between this one's look and its write."""

        def put_if_absent(self, key: str, data: bytes) -> bool:
            aside.set_aside(three.store, aside.sealed(three.store), 6)
            return super().put_if_absent(key, data)

    assert isinstance(three.store, FolderStore)
    with pytest.raises(DropforgeError, match="another process"):
        aside.set_aside(Late(three.store.root), aside.sealed(three.store), 4)
    assert step(three) == 6


@pytest.mark.parametrize("text", [b"", b"{}", b'{"aside": [1]}', b"[]", b"\xff"])
def test_a_file_that_says_nothing_ends_the_attempt(three: Checkpoints, text: bytes) -> None:
    three.store.put(aside.KEY, text)
    with pytest.raises(DropforgeError, match="which checkpoints are set aside"):
        step(three)
    with pytest.raises(DropforgeError, match="which checkpoints are set aside"):
        aside.known(three.store)


def test_a_checkpoint_that_is_not_whole_is_none(three: Checkpoints) -> None:
    three.unseal(8)
    three.store.put("checkpoints/step-6/manifest.json", b"{")
    three.store.put("checkpoints/step-x/manifest.json", b"{}")
    three.store.put("checkpoints/aside/step-9/manifest.json", b"{}")
    assert [item.step for item in aside.sealed(three.store)] == [4]
    assert aside.newest(aside.sealed(three.store), frozenset()) == aside.sealed(three.store)[0]
    assert aside.newest([], frozenset()) is None


def test_of_many_some_are_named() -> None:
    many = [aside.Sealed(step, "") for step in range(100)]
    assert aside.listed(many) == "step-0, step-1, step-2, step-3, ..., step-96, step-97, step-98, step-99"
    assert (aside.listed(many[:2]), aside.listed([])) == ("step-0, step-1", "none")
