"""The client: connect once, then drop, look and compare."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dropforge import layout
from dropforge.client.airflow import FINETUNE
from dropforge.client.comparing.fetch import collect
from dropforge.client.comparing.find import check_number
from dropforge.client.connection import connect
from dropforge.client.drops import NotTakenError, dropped_before, foresee, start_again
from dropforge.client.model import Model, find_model
from dropforge.client.named import find_dag_run, name_for_mlflow
from dropforge.client.patience import asking_rest
from dropforge.client.run import Run
from dropforge.client.runs import ListedRun, list_runs
from dropforge.client.s3 import asking_s3
from dropforge.client.upload import default_name, find_files, upload
from dropforge.comparison import Comparison
from dropforge.comparison import compare as compared
from dropforge.drop import read_drop
from dropforge.errors import DataError, DropforgeError, RecipeError, file_error
from dropforge.layout import check_family
from dropforge.recipes.load import read_drop_recipe
from dropforge.stack.state import check_folder, state_path

log = logging.getLogger("dropforge")


class Client:
    """Talks to the embedded stack of a folder, or to the services that the environment names.

    It puts their addresses and logins into this process's environment, as `eval "$(dropforge env)"` would, so that
    MLflow and boto3 find them too: one process has one stack.
    """

    def __init__(self, state: str | Path | None = None) -> None:
        """:param state: folder of the stack, as of `--state`; else `DROPFORGE_STATE`, the services that
            `DROPFORGE_BUCKET` and its kin name, or `.dropforge`.
        :raises DropforgeError: if neither is there.
        """
        if state is not None and not state_path(check_folder(Path(state))).exists():
            mend = "Start it with `dropforge up`, or leave `state` out for services of your own"
            raise DropforgeError(f"stack in {state}", "it is not running", mend)
        self.connection = connect(None if state is None else Path(state))

    def drop(
        self,
        data: str | Path | Sequence[str | Path],
        family: str,
        *,
        recipe: str | Path | Mapping[str, Any] | None = None,
        name: str | None = None,
        again: bool = False,
        on_upload: Callable[[int], None] = lambda _bytes: None,
        on_skip: Callable[[Path, str], None] = lambda _path, _why: None,
    ) -> Run:
        """Upload files as a drop; return its run, which the upload itself starts.

        The same files with the same recipe are not trained again: their run is the one that took them, also if it
        failed.

        :param data: files or folders with rows. :param recipe: a file, or its values. :param name: of the drop.
        :param again: train on data that were dropped before. :param on_upload: called with the bytes of each file that
            is sent. :param on_skip: called with each file of a folder that is left out, and why.
        :raises RecipeError: for a recipe that the run would refuse, before anything is uploaded; where the services are
            others' (no embedded stack), only for one that cannot be read, and the rest is a warning in the log.
        :raises DataError: for no data, or a drop of this name.
        """
        check_family(family)
        paths = [Path(path) for path in ([data] if isinstance(data, str | Path) else data)]
        with asking_s3(), _naming_files(), tempfile.TemporaryDirectory() as folder:
            files = find_files(paths, on_skip)
            if isinstance(recipe, Mapping):
                files[layout.RECIPE] = Path(folder) / layout.RECIPE
                files[layout.RECIPE].write_text(_as_json(recipe), encoding="utf-8")
            elif recipe is not None:
                files[layout.RECIPE] = _recipe_file(recipe)
            own = read_drop_recipe(files[layout.RECIPE]) if layout.RECIPE in files else {}
            _, refuses = foresee(self.connection, family, own)
            if refuses:
                log.warning("%s", refuses)
            store, name = self.connection.store, name or default_name()
            upload(store, family, name, files, on_upload)
            drop = read_drop(store, family, name, self.connection.settings.bucket)
            known = dropped_before(self.connection, drop)
            title = f"{family}/{name}"
            if known is None:
                return Run(self.connection, title, drop=drop)
            if again:
                return Run(self.connection, title, dag_run=start_again(self.connection, known))
            return Run(self.connection, f"{known.family}/{known.drop}", drop=known)

    def run(self, name: str) -> Run:
        """Find a run by any of its names: FAMILY/DROP, FAMILY/DROP#2, FAMILY/VERSION, FAMILY@ALIAS, its id or the
        beginning of that, or FAMILY for its newest run, which is logged. A drop that waits for its run is found too.

        :raises DropforgeError: if there is none, or several are meant.
        """
        with asking_s3():
            try:
                dag_run, title = find_dag_run(self.connection, name)
            except NotTakenError:
                family, _, drop_name = name.partition("/")
                drop = read_drop(self.connection.store, family, drop_name, self.connection.settings.bucket)
                return Run(self.connection, name, drop=drop)
            self.connection.airflow.dag_run(FINETUNE, dag_run)
        return Run(self.connection, title, dag_run=dag_run)

    def runs(self, family: str | None = None, limit: int = 20, *, trials: bool = False) -> list[ListedRun]:
        """List the newest runs, the newest first.

        :param trials: the trials of sweeps, too. :raises DropforgeError: if MLflow does not answer.
        """
        if limit < 1:
            raise DataError("runs", f"{limit} of them are asked for", "Ask for one at least")
        found = list_runs(self.connection, family, limit, trials=trials)
        if found.missing:
            log.warning("Runs that failed before training are not listed: %s", found.missing)
        return found.runs

    def model(self, name: str) -> Model:
        """Find a registered version by FAMILY@ALIAS or FAMILY/NUMBER. :raises DataError: if there is none."""
        return find_model(self.connection.settings.tracking_uri, name)

    def compare(self, *runs: str | Run) -> Comparison:
        """Compare 2 to 50 runs: recipe, data, metrics, curves and verdicts.

        :raises DataError: for one that is not known, or that has not begun.
        """
        names = [run.dag_run if isinstance(run, Run) else run for run in runs]
        check_number(names)
        for run, found in zip(runs, names, strict=True):
            if isinstance(run, Run) and not found:
                raise DataError(f"run {run.name}", "it has not begun", "Wait for it")
        uri = self.connection.settings.tracking_uri
        words = [name_for_mlflow(self.connection, name) for name in names]
        with asking_rest(uri):
            return compared(collect(uri, words, verdicts=True, answers=False).runs)


def _as_json(recipe: Mapping[str, Any]) -> str:
    """JSON is YAML too, and says of every text that it is one."""
    try:
        return json.dumps(dict(recipe), ensure_ascii=False, indent=1, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        mend = "Use dicts, lists, texts, numbers and truth values alone"
        raise RecipeError("recipe", f"it cannot be written as YAML ({error})", mend) from error


def _recipe_file(recipe: str | Path) -> Path:
    path = Path(recipe)
    if not path.is_file():
        raise RecipeError(f"recipe {path}", "there is no such file", "Name a file, or give its values as a dict")
    return path


@contextmanager
def _naming_files() -> Iterator[None]:
    """:raises DropforgeError: for a file that the system refuses."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise
        raise file_error(error) from error
