"""What ranks tell each other: all kinds that they have to say, and no pickle that runs code."""

from __future__ import annotations

import ast
import os
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

import trainer
from dropforge.errors import DataError
from dropforge.run import ExitCode, RunSpec
from trainer import peer_values
from trainer.gang import CollectiveError, Gang
from trainer.model.fit import Load
from trainer.peer_values import gather_values
from trainer.state.checkpoint import Seal, StorageError, TakenError
from trainer.state.resume import _Verdict


@pytest.fixture
def gang() -> Iterator[Gang]:
    """A rank that hears itself alone, as it would hear others."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield Gang(world=2)  # with one rank nothing would be sent
    dist.destroy_process_group()


class _Call:
    """A pickle that calls a function as it is read."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


def test_a_peer_runs_no_code_by_what_it_says(gang: Gang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks meet without a login: whoever reached the port of a local training ran code as its user."""
    monkeypatch.setattr(peer_values, "_to_plain", lambda value: value)  # by a hand that sends what it likes
    for function, arguments in (
        (os.system, (f"touch {tmp_path}/ran",)),
        (os.mkdir, (f"{tmp_path}/made",)),
        (eval, (f"open('{tmp_path}/opened', 'w')",)),
        (Path, ("a",)),
        (bytearray, (1 << 40,)),
        (gather_values, (1,)),
    ):
        with pytest.raises(CollectiveError, match="which no rank of ours does"):
            gang.gather({"digest": _Call(function, *arguments)})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "data",
    [
        b"\x80",
        b"cos\nsystem\n(S'true'\ntR.",
        b"\x80\x04\x8c\x0ctrainer.gang\x8c\x07os.kill\x93.",  # a dotted name leads out of the module
        b"\x80\x04\x8c\x0ctrainer.gang\x8c\nrendezvous\x93.",  # imported there, and not ours
        b"\x80\x04\x8c\x14trainer.launch.absent\x8c\x04main\x93.",
    ],
    ids=["torn", "function", "dotted", "not ours", "not imported"],
)
def test_a_pickle_by_hand_is_none_of_ours(gang: Gang, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickle, "dumps", lambda value: data)
    with pytest.raises(CollectiveError, match="a peer sent"):
        gang.gather(1)


@pytest.mark.parametrize(
    "said",
    [
        ["record", "dropforge.run", "RunSpec", ["checkpoints_root", "/home"]],
        ["record", "dropforge.run", "RunSpec"],
        ["record", "trainer.gang", "Gang", ["sum", 1]],
        ["named", "trainer.state.checkpoint", "Seal", 1],
        ["enum", "dropforge.run", "ExitCode", "__class__"],
        ["error", "dropforge.run", "RunSpec", "a"],
        ["error", "builtins", "SystemExit", 0],
        ["dict", ["a"]],
        ["bytearray", 1 << 40],
        ["set", ["list"]],
        [],
        {"a": 1},
    ],
)
def test_a_list_by_hand_makes_nothing_but_whole_values(gang: Gang, monkeypatch: pytest.MonkeyPatch, said: Any) -> None:
    """A pickle that named a class could set its attributes in all ranks."""
    before = dict(vars(RunSpec))
    monkeypatch.setattr(peer_values, "_to_plain", lambda value: value)
    with pytest.raises(CollectiveError, match="a peer sent"):
        gang.gather(said)
    assert vars(RunSpec) == before


def test_what_cannot_be_sent_is_refused_by_all(gang: Gang) -> None:
    with pytest.raises(CollectiveError, match="cannot be sent: no rank is sent a PosixPath"):
        gang.gather([Path("a")])
    (found,) = gang.gather(ValueError(Path("a"), [1]))
    assert found.args == ("a", [1])


def test_what_ranks_say_comes_as_it_was_said(gang: Gang) -> None:
    said = [
        None,
        (True, 1, 2.5, "a\ud800", b"\0", 1 << 70),
        {"a": [1, {2, 3}, frozenset("x")]},
        Load(1.0, 2.0, 3.0),
        ExitCode.DIVERGED,
        Seal("run", 8, 2, "f" * 64, {"a": "1"}, {"rank-0": {"bytes": 3}}, "a" * 64),
    ]
    assert gang.gather(said) == [said]
    errors = (
        DataError("a", "b", "c"),
        StorageError("away"),
        TakenError("d", "e", "f"),
        ValueError("g"),
        OSError(2, "h"),
    )
    (found,) = gang.gather([*errors, _Verdict(errors[0], broken=True)])
    assert [(type(error), str(error)) for error in found[:-1]] == [(type(error), str(error)) for error in errors]
    assert (str(found[-1].error), found[-1].broken) == (str(errors[0]), True)


def test_nothing_else_reads_pickles_of_peers() -> None:
    """torch's collectives of objects unpickle whatever comes."""
    found = []
    for path in Path(str(trainer.__file__)).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            if re.fullmatch(r"(all_gather|gather|broadcast|scatter|send|recv)_object(_list)?", name):
                found.append(f"{path.name}: {name}")
            if isinstance(node, ast.Import) and any(one.name == "pickle" for one in node.names):
                found.append(f"{path.name}: pickle")
    assert found == ["peer_values.py: pickle"]
