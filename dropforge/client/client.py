"""The client: connect once, then drop, look and compare."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from dropforge import layout
from dropforge.client.comparing.fetch import collect
from dropforge.client.connection import connect
from dropforge.client.drops import dropped_before, start_again, trained_by
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
from dropforge.errors import RecipeError
from dropforge.layout import check_family
from dropforge.recipes.load import read_drop_recipe

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

        Data that were dropped before are not trained again: their run is the one that took them.

        :param data: files or folders with rows. :param recipe: a file, or its values. :param name: of the drop.
        :param again: train on data that were dropped before. :param on_upload: called with the bytes of each file that
            is sent. :param on_skip: called with each file of a folder that is left out, and why.
        :raises RecipeError: for a recipe that the run would refuse; nothing is uploaded.
        :raises DataError: for no data, or a drop of this name.
        """
        check_family(family)
        paths = [Path(path) for path in ([data] if isinstance(data, str | Path) else data)]
        with asking_s3(), tempfile.TemporaryDirectory() as folder:
            files = find_files(paths, on_skip)
            if isinstance(recipe, Mapping):
                files[layout.RECIPE] = Path(folder) / layout.RECIPE
                files[layout.RECIPE].write_text(_as_yaml(recipe), encoding="utf-8")
            elif recipe is not None:
                files[layout.RECIPE] = Path(recipe)
            own = read_drop_recipe(files[layout.RECIPE]) if layout.RECIPE in files else {}
            try:
                trained_by(self.connection, family, own)
            except RecipeError as error:
                if self.connection.stack is not None:
                    raise
                # The files of families and presets lie where Airflow runs.
                log.warning("The run may refuse it, as far as can be told from here: %s", error)
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
        beginning of that. :raises DropforgeError: if there is none, or several are meant."""
        with asking_s3():
            dag_run, title = find_dag_run(self.connection, name)
        return Run(self.connection, title, dag_run=dag_run)

    def runs(self, family: str | None = None, limit: int = 20, *, trials: bool = False) -> list[ListedRun]:
        """List the newest runs, the newest first.

        :param trials: the trials of sweeps, too. :raises DropforgeError: if MLflow does not answer.
        """
        found = list_runs(self.connection, family, limit, trials=trials)
        if found.missing:
            log.warning("Runs that failed before training are not listed: %s", found.missing)
        return found.runs

    def model(self, name: str) -> Model:
        """Find a registered version by FAMILY@ALIAS or FAMILY/NUMBER. :raises DataError: if there is none."""
        return find_model(self.connection.settings.tracking_uri, name)

    def compare(self, *runs: str | Run) -> Comparison:
        """Compare runs: recipe, data, metrics, curves and verdicts. :raises DataError: for one that is not known."""
        names = [run.dag_run if isinstance(run, Run) else run for run in runs]
        uri = self.connection.settings.tracking_uri
        words = [name_for_mlflow(self.connection, name) for name in names]
        with asking_rest(uri):
            return compared(collect(uri, words, verdicts=True, answers=False).runs)


def _as_yaml(recipe: Mapping[str, Any]) -> str:
    try:
        return yaml.safe_dump(dict(recipe), allow_unicode=True)
    except yaml.YAMLError as error:
        mend = "Write it with dicts, lists, texts, numbers and truth values alone"
        raise RecipeError("recipe", f"it holds what YAML has no word for ({error})", mend) from error
