"""Which run a person means, and what MLflow knows of it."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from botocore.exceptions import BotoCoreError, ClientError

from dropforge import layout, ledger, sweeps, tracking
from dropforge.client.airflow import FINETUNE, NoSuchRunError
from dropforge.client.comparing.find import Row, find_runs, is_active, log_newest, newest_rows, of_dag_run, tags_of
from dropforge.client.connection import Connection
from dropforge.client.drops import NotTakenError, wait_for_run
from dropforge.client.patience import asking_rest
from dropforge.client.progress import find_earlier, read_stages, why_failed
from dropforge.drop import Drop, UnfinishedError, is_id, parse_partition_key, read_drop
from dropforge.errors import DataError, DropforgeError
from dropforge.mlflow_pages import run_page
from dropforge.recipe_params import with_defaults
from dropforge.rest import Rest
from dropforge.store import MissingObjectError
from dropforge.text import read_count

_TAKEN: Final = 10.0  # seconds that a drop may take to be taken by a run
_NEWEST: Final = 100  # runs among which one is looked for


@dataclass(frozen=True)
class Named:
    """A run.

    :param title: as the person has named it. :param dag_run: its id in Airflow.
    :param row: as MLflow gives it; None before the run was opened there. :param dag: whose run it is in Airflow.
    """

    title: str
    dag_run: str
    row: Row | None = None
    dag: str = FINETUNE

    @property
    def tags(self) -> Mapping[str, str]:
        return tags_of(self.row) if self.row else {}

    @property
    def params(self) -> Mapping[str, str]:
        """The flat recipe; empty before the run was opened in MLflow."""
        if self.row is None:
            return {}
        return with_defaults({str(item["key"]): str(item["value"]) for item in self.row["data"].get("params", [])})

    @property
    def run(self) -> str:
        """The run's name; empty before it was opened."""
        return self.tags.get(tracking.TAG_RUN, "")

    @property
    def mlflow_run(self) -> str:
        """Id of its MLflow run; empty before it was opened."""
        return str(self.row["info"]["run_id"]) if self.row else ""

    def mlflow_page(self, tracking_uri: str) -> str:
        """Address of its page in MLflow; empty before it was opened."""
        if self.row is None:
            return ""
        return run_page(tracking_uri, str(self.row["info"]["experiment_id"]), self.mlflow_run)


def find(connection: Connection, word: str, *, started: bool = True) -> Named:
    """Find a run by any of its names.

    :param word: FAMILY/DROP, FAMILY/DROP#2, FAMILY/VERSION, FAMILY@ALIAS, a name or the beginning of one, the id in
        Airflow, or FAMILY for its newest run.
    :param started: whether only a run will do that Airflow started.
    :raises DropforgeError: if there is no such run, several may be meant, or MLflow does not answer.
    """
    dag_run = _dag_run_of(connection, word)
    if dag_run is not None:
        return opened(connection, dag_run, word)
    if newest := _newest_of_family(connection, word):
        return opened(connection, *newest)
    return _find_in_mlflow(connection, word, started=started)


def find_dag_run(connection: Connection, word: str | None) -> tuple[str, str]:
    """The Airflow id and the title of a run, by any of its names; the newest run if `word` is None."""
    if word is not None:
        if "__" in word:  # who follows it bears with an Airflow that is away
            return word, word
        dag_run = _dag_run_of(connection, word)
        if dag_run is not None:
            return dag_run, word
        if newest := _newest_of_family(connection, word):
            return newest
        named = _find_in_mlflow(connection, word)
        return named.dag_run, named.title
    uri = connection.settings.tracking_uri
    with asking_rest(uri):
        rows = [row for row in newest_rows(Rest(uri), _NEWEST) if is_active(row)]
        rows = [row for row in rows if tags_of(row).get(tracking.TAG_DAG_RUN)]
    if not rows:
        raise DropforgeError("run", "there is none yet", "Start one with `dropforge drop PATH --family NAME`")
    tags = tags_of(rows[0])
    return tags[tracking.TAG_DAG_RUN], tags.get(tracking.TAG_RUN, "")


def find_name(connection: Connection, word: str) -> str:
    """The name of an opened run, by which its folder is found. Where it is given, only the bucket is asked."""
    if layout.is_run(word) and connection.store.stat(layout.run_key(word)) is not None:
        return word
    return tags_of(find_row(connection, word))[tracking.TAG_RUN]


def find_row(connection: Connection, word: str) -> Row:
    """An opened run as MLflow gives it, whoever started it. :raises DataError: if it is not opened yet, or failed."""
    named = find(connection, word, started=False)
    if named.row is None or not named.run:
        stages = read_stages(connection.airflow, named.dag_run) if named.dag_run else ()
        if failed := why_failed(connection.airflow, named.dag_run, stages):
            mend = f"Fix that, then `dropforge resume {named.title}`"
            raise DataError(f"run {named.title}", f"it was not opened, for {failed[0]} failed: {failed[1]}", mend)
        if earlier := find_earlier(connection.airflow, named.dag_run, stages):
            raise DataError(f"run {named.title}", f"it opened none. {earlier}", f"Name that run: {earlier.run}")
        raise DataError(
            f"run {named.title}", "it has not been opened yet", "Try again once its task `open_run` is over"
        )
    return named.row


def name_for_mlflow(connection: Connection, word: str) -> str:
    """What MLflow alone can be asked for: the run's name where Airflow or the bucket must say which is meant."""
    if "__" not in word:
        family, slash, rest = word.partition("/")
        if not slash or "@" in word or (rest.isdecimal() and not _is_drop(connection, family, rest)):
            return word
    return find_name(connection, word)


def asked_for(connection: Connection, run: Mapping[str, Any]) -> tuple[str, str]:
    """Family of a DAG run, and its drop as FAMILY/DROP; empty where they are not known."""
    conf = run.get("conf") or {}
    family, drop = str(conf.get("family") or ""), str(conf.get("data") or conf.get("drop") or "").removeprefix("drop:")
    try:
        if key := run.get("partition_key"):
            named = parse_partition_key(key)
            family, drop = named["family"], named["drop"]
        elif is_id(drop):
            drop = ledger.read(connection.store, family, drop).drop
        elif "/" in drop:
            family, _, drop = drop.removeprefix(layout.DROPS).partition("/")
    except (DataError, MissingObjectError):
        return family, ""
    return family, f"{family}/{drop}" if family and drop else ""


def is_trial(run: Mapping[str, Any]) -> bool:
    """Whether a DAG run is a trial of a sweep, and not its candidate."""
    sweep = (run.get("conf") or {}).get("sweep")
    return isinstance(sweep, Mapping) and sweep.get("candidate") is not True


def _newest_of_family(connection: Connection, word: str) -> tuple[str, str] | None:
    """The Airflow id and the title of a family's newest run, opened or not, which is said.

    None if the word names no family with drops, or Airflow tells none of its runs: MLflow knows those of before.
    """
    if not _may_be_drop(word, word):
        return None
    with suppress(DropforgeError, BotoCoreError, ClientError):
        if connection.store.folders(layout.family_prefix(word), 1):
            for run in connection.airflow.newest_runs(FINETUNE, _NEWEST):
                family, drop = asked_for(connection, run)
                if family == word and not is_trial(run):
                    log_newest(word, drop or run["dag_run_id"])
                    return run["dag_run_id"], drop or run["dag_run_id"]
    return None


def _dag_run_of(connection: Connection, word: str) -> str | None:
    """The Airflow id that a word gives without MLflow; None if it names a version, or a run as MLflow does."""
    if "__" in word:  # as Airflow names runs, and we never do
        connection.airflow.dag_run(FINETUNE, word)
        return word
    if word.count("/") != 1 or "@" in word:
        return None
    name, numbered, number = word.partition("#")
    family, _, rest = name.partition("/")
    if not _may_be_drop(family, rest):
        return None
    try:
        drop = read_drop(connection.store, family, rest, connection.settings.bucket)
    except UnfinishedError:
        if failed := _failed_of(connection, name):
            return failed
        if rest.isdecimal() and not numbered:
            return None  # a version
        raise
    if numbered:
        return _numbered(connection, drop, number)
    dag_run = wait_for_run(connection, drop, _TAKEN)
    check_begun(connection, dag_run, word)
    return dag_run


def _find_in_mlflow(connection: Connection, word: str, *, started: bool = True) -> Named:
    """A run by its name, the beginning of it, or its version. :raises DropforgeError: as `find`."""
    uri = connection.settings.tracking_uri
    with asking_rest(uri), ThreadPoolExecutor(1) as pool:
        (found,) = find_runs(Rest(uri), [word], pool)
    tags = tags_of(found.row)
    dag_run = tags.get(tracking.TAG_DAG_RUN, "")
    if started and not dag_run:
        raise DropforgeError(
            f"run {word}", "Airflow did not start it: MLflow knows no DAG run of it", "List runs with `dropforge runs`"
        )
    return Named(tags.get(tracking.TAG_RUN, word), dag_run, found.row)


def _is_drop(connection: Connection, family: str, name: str) -> bool:
    if not _may_be_drop(family, name):
        return False
    return connection.store.stat(layout.drop_prefix(family, name) + layout.SUCCESS) is not None


def _may_be_drop(family: str, name: str) -> bool:
    """Whether a drop may have such names; registered models of others may have names that no family has."""
    return layout.parse_drop_key(f"{layout.DROPS}{family}/{name}/{layout.SUCCESS}") is not None


def _numbered(connection: Connection, drop: Drop, number: str) -> str:
    """The run that took a drop as the first (1), the second, ..."""
    entry = ledger.find(connection.store, drop)
    owners = [] if entry is None else ledger.owners(connection.store, entry.family, entry.id)
    place = read_count(number) or 0
    if 1 <= place <= len(owners):
        return owners[place - 1]
    title = f"{drop.family}/{drop.drop}"
    known = f"`{title}#1` to `{title}#{len(owners)}`" if len(owners) > 1 else f"`{title}`" if owners else "none"
    raise DataError(f"run {title}#{number}", f"{len(owners)} runs have taken this drop", f"There is {known}")


def _failed_of(connection: Connection, drop: str) -> str | None:
    """The newest run that was asked for a drop which is not there, and failed."""
    runs = connection.airflow.newest_runs(FINETUNE, _NEWEST, state="failed")
    return next((str(run["dag_run_id"]) for run in runs if asked_for(connection, run)[1] == drop), None)


def check_begun(connection: Connection, dag_run: str, title: str) -> None:
    """:raises NotTakenError: of the data of a sweep whose best trial is not known yet."""
    if not dag_run.startswith(sweeps.CANDIDATE_RUN):
        return
    try:
        connection.airflow.dag_run(FINETUNE, dag_run)
    except NoSuchRunError:
        sweep = dag_run.removeprefix(sweeps.CANDIDATE_RUN)
        raise NotTakenError(
            f"drop {title}",
            f"{sweep} trains on it, and which of its trials is the best is not known yet",
            "Follow it with `dropforge sweep FILE --follow`, or name one of `dropforge runs --trials`",
        ) from None


def opened(connection: Connection, dag_run: str, title: str) -> Named:
    """The run of a DAG run, as far as it has come."""
    uri = connection.settings.tracking_uri
    with asking_rest(uri):
        return Named(title, dag_run, of_dag_run(Rest(uri), dag_run))
