"""What an open run's folder says: begun or not, saved when, held by which gangs."""

from __future__ import annotations

import json
from dataclasses import replace

from dropforge import gangs, layout
from dropforge.gangs import Gang
from dropforge.run import RunSpec
from dropforge.store import Store
from dropforge.watching.trainings import Folder, live_gangs, read_folder

RUN = "fam-1"
GANG = Gang("train", "j", "one", 1, gpus=4, cores=16, created=1000.0)


def begun(store: Store, *attempts: float, root: str = "s3://b/runs/fam-1", **train: str) -> None:
    recipe = {"train": {"method": "full", **train}}
    spec = RunSpec(RUN, "fam", 1, root, "s3://b", "m", "d" * 64, recipe, "c")
    store.put(layout.run_key(RUN), spec.to_json())
    for number, began in enumerate(attempts, 1):
        store.put(f"{layout.run_prefix(RUN)}attempts/{number}.json", json.dumps({"began": began}).encode())
    if attempts:
        store.put(f"{layout.run_prefix(RUN)}began.json", json.dumps({"began": attempts[0]}).encode())


def save(store: Store, step: int, *, complete: bool = True) -> None:
    folder = f"{layout.run_prefix(RUN)}checkpoints/step-{step}/"
    store.put(f"{folder}rank-0.safetensors", b"x")
    if complete:
        store.put(f"{folder}manifest.json", b"{}")


def test_a_run_whose_pods_wait_has_not_begun(store: Store) -> None:
    begun(store)
    gangs.keep(store, RUN, GANG)
    assert read_folder(store, RUN, 2000.0) == Folder(queued=1000.0)
    assert read_folder(store, "no-such-run", 2000.0) == Folder()


def test_a_run_that_tokenises_has_no_pods_that_wait_to_train(store: Store) -> None:
    begun(store)
    gangs.keep(store, RUN, replace(GANG, task="tokenise", uid="zero", created=10.0))
    assert read_folder(store, RUN, 2000.0) == Folder()
    gangs.keep(store, RUN, replace(GANG, task="tokenise", uid="zero", created=10.0, started=11.0, ended=900.0))
    gangs.keep(store, RUN, replace(GANG, ended=1100.0, reason="image"))
    assert read_folder(store, RUN, 2000.0) == Folder()  # the next gang isn't there yet
    gangs.keep(store, RUN, replace(GANG, uid="two", number=2, created=1200.0))
    assert read_folder(store, RUN, 2000.0) == Folder(queued=1200.0)


def test_a_checkpoint_in_the_making_is_none(store: Store) -> None:
    begun(store, 1010.0)
    assert read_folder(store, RUN, 2000.0).saved == 1010.0  # all since the start would be lost
    save(store, 9)
    save(store, 10, complete=False)
    found = store.stat(f"{layout.run_prefix(RUN)}checkpoints/step-9/manifest.json")
    assert found is not None
    assert read_folder(store, RUN, 2000.0).saved == found.modified


def test_checkpoints_that_lie_elsewhere_have_no_time(store: Store) -> None:
    begun(store, 1010.0, checkpoints="/fast")
    assert read_folder(store, RUN, 2000.0).saved is None


def test_gangs_hold_from_the_start_of_their_attempt(store: Store) -> None:
    begun(store, 1010.0)
    gangs.keep(store, RUN, GANG)
    found = read_folder(store, RUN, 1110.0)
    assert (found.gpus, found.cores, found.gpu_seconds, found.core_seconds) == (4, 16, 400, 1600)
    assert not found.trained
    # The second gang waits for room.
    gangs.keep(store, RUN, replace(GANG, started=1005.0, ended=1105.0))
    gangs.keep(store, RUN, replace(GANG, uid="two", number=2, created=1110.0))
    found = read_folder(store, RUN, 1200.0)
    assert (found.gpus, found.gpu_seconds) == (0, 400)
    begun(store, 1010.0, 1150.0)
    found = read_folder(store, RUN, 1200.0)
    assert (found.gpus, found.gpu_seconds) == (4, 600)
    store.put(layout.report_key(RUN), b"{}")
    assert read_folder(store, RUN, 1200.0).trained


def test_a_gang_whose_start_is_known_keeps_it() -> None:
    ended = replace(GANG, started=1001.0, ended=1002.0)
    assert live_gangs([ended], 1500.0) == [ended]
    assert live_gangs([GANG], 1010.0) == [replace(GANG, started=1010.0)]
