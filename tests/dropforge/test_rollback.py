"""Rolling back on a real registry and bucket: who gets the alias, what is marked, what is refused."""

from __future__ import annotations

import json
import re
import threading
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dropforge import layout, rollback, tracking
from dropforge.cli.app import app
from dropforge.errors import DropforgeError
from dropforge.lock import STALE
from dropforge.moves import moving
from dropforge.run import RunSpec
from dropforge.settings import Settings
from dropforge.start import model_digest
from dropforge.store import S3Store
from tests.dropforge.test_tracking import verdict

FILES = {"model.safetensors": "a" * 64}


class Family:
    """A family whose versions are registered, and promoted by their verdicts."""

    def __init__(self, server: str, store: S3Store) -> None:
        self.server, self.store = server, store
        self.name = f"fam-{uuid.uuid4().hex[:8]}"
        self.mlflow = tracking.client(server)
        self.made: list[tuple[RunSpec, dict[str, Any]]] = []

    def name_services(self, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Set what commands find the services by."""
        settings = Settings(self.store.bucket, self.store.bucket, "", self.server, "", state)
        for name, value in settings.to_env().items():
            monkeypatch.setenv(name, value)

    @property
    def champion(self) -> str | None:
        found = tracking.champion(self.server, self.name)
        return found.version if found else None

    def add(self, promote: bool = True) -> str:
        """A run whose model lies in the bucket, registered."""
        self.prepare()
        return self.register(promote)

    def prepare(self) -> tuple[RunSpec, dict[str, Any]]:
        """A run whose model lies in the bucket, and its report."""
        run = f"{self.name}-{len(self.made) + 1}"
        root = f"{self.store.uri}/{layout.run_prefix(run)}".rstrip("/")
        report = {"model": {"uri": f"{root}/model", "digest": model_digest(FILES), "files": FILES}}
        recipe = {"train": {"method": "full"}, "promote": {"alias": "champion"}}
        spec = RunSpec(run, self.name, 1, root, self.store.uri, "m", "d" * 64, recipe, "c", drop={"id": "x"})
        spec = replace(spec, tracking=tracking.open_run(self.server, spec, {}, {}))
        self.store.put(layout.report_key(run), json.dumps(report).encode())
        self.store.put(f"{layout.run_prefix(run)}model/model.safetensors", b"weights")
        self.made.append((spec, report))
        return spec, report

    def register(self, promote: bool = True, number: int = 0, compared_with: str | None = None) -> str:
        """What the task `register` does, also when it is cleared."""
        spec, report = self.made[number - 1]
        compared = compared_with or self.champion
        return tracking.register(
            self.server, spec, report, verdict(promote), alias="champion", compared_with=compared
        ).version

    def roll_back(self, to: str | None = None, reason: str = "it swears") -> rollback.Choice:
        choice = rollback.choose(self.server, self.store, self.name, to=to)
        rollback.move(self.server, choice, reason, "ada")
        return choice

    def tags(self, version: str) -> dict[str, str]:
        return dict(self.mlflow.get_model_version(self.name, version).tags)


@pytest.fixture
def family(mlflow_server: str, s3_store: S3Store) -> Family:
    return Family(mlflow_server, s3_store)


def test_the_alias_goes_back_step_by_step_and_never_to_what_was_rolled_back(family: Family) -> None:
    for promote in (True, True, False, True):
        family.add(promote)
    assert family.champion == "4"
    assert family.roll_back().version == "2"
    told = json.loads(family.tags("4")[tracking.TAG_ROLLED_BACK])
    assert (told["to"], told["by"], told["reason"]) == ("2", "ada", "it swears")
    assert family.roll_back().version == "1"
    with pytest.raises(DropforgeError, match=r"version 1 of fam.*no earlier 'champion'.*versions 1, 2, 3, 4"):
        family.roll_back()
    assert family.roll_back(to="4").version == "4"
    assert tracking.TAG_ROLLED_BACK not in family.tags("4")
    assert family.roll_back().version == "1"  # 2 was rolled back, and nobody has said otherwise


def test_a_version_that_was_rolled_back_is_not_promoted_by_a_cleared_task(family: Family) -> None:
    for _ in range(2):
        family.add()
    family.roll_back(reason="worse on French")
    with pytest.raises(DropforgeError, match=r"(?s)worse on French.*dropforge rollback fam-\w+ --to 2"):
        family.register(number=2, compared_with="1")
    assert family.champion == "1"
    family.add()
    assert family.champion == "3"  # the next candidate is judged as ever


def test_an_old_version_that_was_promoted_again_is_rolled_back_like_any_other(family: Family) -> None:
    """By a task that was cleared: numbers say nothing about who held the alias before."""
    for _ in range(2):
        family.add()
    family.register(number=1, compared_with="2")
    assert family.champion == "1"
    choice = family.roll_back(reason="worse on French")
    assert (choice.version, choice.back) == ("2", True)
    assert "worse on French" in family.tags("1")[tracking.TAG_ROLLED_BACK]
    with pytest.raises(DropforgeError, match="worse on French"):
        family.register(number=1, compared_with="2")
    with pytest.raises(DropforgeError, match="no earlier 'champion'"):
        family.roll_back()
    assert family.champion == "2"


def test_a_version_that_was_made_but_not_promoted_is_missed_once_it_is_deleted(family: Family) -> None:
    family.add()
    family.prepare()
    with pytest.raises(DropforgeError, match="it moved from version 9 to 1"):
        family.register(number=2, compared_with="9")
    family.roll_back(to="2")
    family.roll_back(reason="it swears")
    family.mlflow.delete_model_version(family.name, "2")
    with pytest.raises(DropforgeError, match=r"version 2 of .*it was deleted since this run registered it"):
        family.register(number=2, compared_with="1")
    assert family.champion == "1"


def test_a_version_that_never_was_champion_is_promoted_by_hand_and_that_can_be_undone(family: Family) -> None:
    for promote in (True, False):
        family.add(promote)
    assert family.roll_back(to="2").back is False
    assert family.champion == "2"
    assert tracking.TAG_ROLLED_BACK not in family.tags("1")
    assert family.roll_back().version == "1"


def test_where_people_approve_a_version_that_never_was_champion_needs_their_yes(family: Family) -> None:
    for promote in (True, False, True):
        family.add(promote)

    def choose(to: str | None) -> str:
        return rollback.choose(family.server, family.store, family.name, to=to, approved=True).version

    with pytest.raises(DropforgeError, match=r"version 2 of fam.* never was 'champion'.*`approve` of its run"):
        choose("2")
    assert choose(None) == choose("1") == "1"
    # A yes for another alias is none for this one, and the chains of two are apart.
    staged = rollback.choose(family.server, family.store, family.name, "staging", "2")
    rollback.move(family.server, staged, "to be looked at", "ada")
    with pytest.raises(DropforgeError, match="never was 'champion'"):
        choose("2")
    assert family.roll_back(to="2").version == "2"
    assert family.roll_back().version == "1"


def test_a_version_that_was_chosen_before_there_were_reviewers_needs_their_yes_too(family: Family) -> None:
    for promote in (True, False):
        family.add(promote)
    choice = rollback.choose(family.server, family.store, family.name, to="2")
    with pytest.raises(DropforgeError, match="it never was 'champion', and people approve"):
        rollback.move(family.server, choice, "by hand", "ada", approved=True)
    assert family.champion == "1"


def test_a_rollback_of_one_alias_says_nothing_of_another(family: Family) -> None:
    for _ in range(3):
        family.add()

    def stage(to: str) -> None:
        choice = rollback.choose(family.server, family.store, family.name, "staging", to)
        rollback.move(family.server, choice, "staging is broken", "ada")

    stage("2")
    stage("3")
    stage("2")
    assert {tag for tag in family.tags("3") if "rolled_back" in tag} == {"dropforge.rolled_back.staging"}
    family.add()
    assert family.roll_back().version == "3"  # it held the alias before 4, and nobody rolled it back from there
    family.roll_back()
    stage("3")
    assert tracking.TAG_ROLLED_BACK in family.tags("3")
    with pytest.raises(DropforgeError, match="it was rolled back"):
        family.register(number=3, compared_with="2")


@pytest.mark.parametrize("alias", ["v3", "latest", "Latest", "a b", "a/b", "..", ""])
def test_an_alias_that_no_version_can_have_is_refused_before_anything_is_written(family: Family, alias: str) -> None:
    with pytest.raises(DropforgeError, match="MLflow lets no version have it"):
        rollback.choose(family.server, family.store, family.name, alias, "1")


def test_versions_of_before_know_whom_they_followed_by_one_tag_for_all_aliases(family: Family) -> None:
    for _ in range(2):
        family.add(promote=False)
    for number, before in ((1, "none"), (2, "1")):
        family.mlflow.set_model_version_tag(family.name, str(number), tracking.TAG_PREVIOUS, before)
    family.mlflow.set_registered_model_alias(family.name, "live", "2")
    assert rollback.choose(family.server, family.store, family.name, "live", approved=True).version == "1"
    family.mlflow.set_registered_model_alias(family.name, "champion", "1")  # the tags are this one's then
    with pytest.raises(DropforgeError, match="there is no earlier 'live'"):
        rollback.choose(family.server, family.store, family.name, "live")


def test_a_second_try_of_the_move_goes_back_no_further(family: Family) -> None:
    for _ in range(3):
        family.add()
    choice = family.roll_back()
    assert rollback.move(family.server, choice, "again", "ada") is False
    assert family.champion == "2"
    assert json.loads(family.tags("3")[tracking.TAG_ROLLED_BACK])["reason"] == "it swears"


def test_a_promotion_does_not_overtake_a_rollback_of_the_same_moment(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    for promote in (True, True, False):
        family.add(promote)
    choice, ask, told = rollback.choose(family.server, family.store, family.name), tracking.by_alias, []

    def go_back() -> None:
        try:
            hold = moving(family.store, family.name, "a person")
            told.append(str(rollback.move(family.server, choice, "now", "ada", hold)))
        except DropforgeError as error:
            told.append(str(error))

    person = threading.Thread(target=go_back)

    def asked(*arguments: Any) -> Any:
        found = ask(*arguments)
        if person.ident is None:  # the promotion has read the alias, and has yet to move it
            person.start()
            person.join(2)
        return found

    monkeypatch.setattr(tracking, "by_alias", asked)
    spec, report = family.made[2]
    hold = moving(family.store, family.name, "a run")
    tracking.register(family.server, spec, report, verdict(True), alias="champion", compared_with="2", hold=hold)
    person.join()
    [answer] = told
    assert "moved from version 2 to 3 since the choice" in answer
    assert family.champion == "3"
    assert family.store.stat(layout.move_key(family.name)) is None


def test_aliases_that_somebody_left_held_are_taken_up_again_or_over(family: Family) -> None:
    key, now, waits = layout.move_key(family.name), 1000.0, 0
    others: list[bytes] = []

    def sleep(_: float) -> None:
        nonlocal now, waits
        waits, now = waits + 1, now + STALE / 3
        if others:
            family.store.put(key, others.pop())

    with moving(family.store, family.name, "a"):
        held = family.store.get(key)
    assert family.store.stat(key) is None
    family.store.put(key, held)  # as after a kill
    with moving(family.store, family.name, "a", clock=lambda: now, sleep=sleep):
        assert waits == 0
    family.store.put(key, held)
    with moving(family.store, family.name, "b", clock=lambda: now, sleep=sleep):
        assert 3 <= waits <= 5
    assert family.store.stat(key) is None
    others += [json.dumps({"owner": "a", "at": number}).encode() for number in range(9)]
    family.store.put(key, others.pop())  # one after another
    with (
        pytest.raises(DropforgeError, match="a has been moving them"),
        moving(family.store, family.name, "b", clock=lambda: now, sleep=sleep),
    ):
        raise AssertionError
    assert json.loads(family.store.get(key))["owner"] == "a"


@pytest.mark.parametrize("step", [-86400.0, 86400.0], ids=["back", "forward"])
def test_a_clock_that_is_set_neither_keeps_the_aliases_held_nor_takes_them_away(
    family: Family, monkeypatch: pytest.MonkeyPatch, step: float
) -> None:
    now, waited, wall = 1000.0, 0.0, time.time

    def sleep(_: float) -> None:
        nonlocal now, waited
        waited, now = waited + STALE / 3, now + STALE / 3

    with moving(family.store, family.name, "a"):
        monkeypatch.setattr(time, "time", lambda: wall() + step)
        with moving(family.store, family.name, "b", clock=lambda: now, sleep=sleep):
            assert STALE < waited < 2 * STALE
        assert family.store.stat(layout.move_key(family.name)) is None


def test_an_alias_that_moved_since_the_choice_is_left_alone(family: Family) -> None:
    for _ in range(2):
        family.add()
    choice = rollback.choose(family.server, family.store, family.name)
    family.add()
    with pytest.raises(DropforgeError, match=r"moved from version 2 to 3"):
        rollback.move(family.server, choice, "late", "ada")
    assert family.champion == "3"


@pytest.mark.parametrize("to", ["9", "x", "²", "-1"])
def test_a_version_that_is_not_there_is_refused_with_those_that_are(family: Family, to: str) -> None:
    family.add()
    with pytest.raises(DropforgeError, match="versions 1"):
        family.roll_back(to=to)


def test_what_is_champion_already_and_a_family_without_a_version_are_refused(family: Family) -> None:
    with pytest.raises(DropforgeError, match=r"no version of it is 'champion'.*None of its runs registered a version"):
        family.roll_back()
    family.add()
    with pytest.raises(DropforgeError, match=rf"Did you mean {family.name}\?"):
        rollback.choose(family.server, family.store, f"{family.name}x")
    with pytest.raises(DropforgeError, match="it is 'champion' already"):
        family.roll_back(to="1")


@pytest.mark.parametrize("to", [None, "1"])
def test_an_alias_of_somebody_else_s_model_does_not_move(family: Family, to: str | None) -> None:
    family.mlflow.create_registered_model(family.name)
    for number in (1, 2):
        tags = {tracking.TAG_PREVIOUS: "1"} if number == 2 else {}
        family.mlflow.create_model_version(family.name, f"s3://theirs/{number}", tags=tags)
    family.mlflow.set_registered_model_alias(family.name, "champion", "2")
    with pytest.raises(DropforgeError, match=rf"family {family.name}: a model in MLflow's registry has its name"):
        family.roll_back(to=to)
    assert family.champion == "2"
    assert tracking.TAG_ROLLED_BACK not in family.tags("2")


def test_a_model_that_is_not_whole_any_more_does_not_become_champion(family: Family) -> None:
    for _ in range(3):
        family.add()
    family.store.delete(f"{layout.run_prefix(family.made[1][0].run)}model/model.safetensors")
    with pytest.raises(DropforgeError, match=r"version 2 of fam.*model\.safetensors is gone"):
        family.roll_back()
    spec, report = family.made[0]
    report["model"]["files"] = {"model.safetensors": "b" * 64}
    family.store.put(layout.report_key(spec.run), json.dumps(report).encode())
    with pytest.raises(DropforgeError, match=r"version 1 of fam.*another model"):
        family.roll_back(to="1")
    assert family.champion == "3"


def test_a_family_without_versions_is_told_before_anybody_is_asked_why(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family.name_services(tmp_path, monkeypatch)
    done = CliRunner().invoke(app, ["rollback", family.name, "--state", str(tmp_path / "none")], input="too late\n")
    assert "Reason" not in done.output
    assert re.search(r"no version of it is 'champion'\. None of its runs registered a version", str(done.exception))


def test_the_reason_is_asked_for_until_there_is_one(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family.name_services(tmp_path, monkeypatch)
    family.add()
    family.add()
    words = ["rollback", family.name, "--state", str(tmp_path / "none")]
    done = CliRunner().invoke(app, words, input="\n \nit swears\nn\n")
    assert (done.exit_code, done.output.count("Reason"), "Do it?" in done.output) == (1, 3, True)
    for given in ([], ["--yes"], ["--reason", "it swears"]):  # and there is nothing to read an answer from
        done = CliRunner().invoke(app, [*words, *given], input="")
        assert f"champion of {family.name} would move from version 2 back to version 1" in done.output
        assert "it did not move: " in str(done.exception)
        assert "Give `--reason` and `--yes`" in str(done.exception)
    done = CliRunner().invoke(app, [*words, "--reason", " "])
    assert (done.exit_code, family.champion) == (2, "2")
