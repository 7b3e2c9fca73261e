"""A registered version of a family, to be loaded or downloaded."""

from __future__ import annotations

import json
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dropforge import tracking
from dropforge.client.patience import asking_mlflow
from dropforge.errors import DataError, DropforgeError, file_error
from dropforge.json_objects import read_object
from dropforge.rest import STRANGE
from dropforge.store import FolderStore
from dropforge.text import read_count

if TYPE_CHECKING:
    from mlflow.pyfunc import PyFuncModel

_LOADER: Final = "dropforge_pyfunc"  # the module beside a model's weights that loads them
_CODE: Final = "code"


@dataclass(frozen=True)
class Model:
    """A version in MLflow's registry.

    :param family: its registered model. :param version: its number. :param tracking_uri: of MLflow.
    """

    family: str
    version: int
    tracking_uri: str

    @property
    def uri(self) -> str:
        """By which MLflow loads it."""
        return f"models:/{self.family}/{self.version}"

    def load(self) -> PyFuncModel:
        """Load it: `model.predict(rows)` answers as the evaluation did. Code that lies beside it is not run.

        :raises DropforgeError: for a package that is not installed here, and a model that no run of Dropforge wrote.
        """
        import mlflow

        folder = Path(tempfile.mkdtemp(prefix="dropforge-model-"))
        try:
            with self._fetching():
                self._download(str(folder))
                self._take_own_code(folder)
                model: PyFuncModel = mlflow.pyfunc.load_model(str(folder))
            weakref.finalize(model, shutil.rmtree, folder, ignore_errors=True)  # it reads its example from there later
            return model
        except BaseException as error:
            shutil.rmtree(folder, ignore_errors=True)
            if not isinstance(error, ImportError):
                raise
            raise DropforgeError(
                f"model {self.family}/{self.version}",
                f"loading it needs a package that is not installed ({error})",
                "Install what `requirements.txt` beside the model names, as after `model.download()`",
            ) from error

    def download(self, folder: str | Path | None = None) -> Path:
        """Copy its files: weights, tokenizer, README. :param folder: into this one, else a temporary one."""
        with self._fetching():
            return self._download(None if folder is None else str(folder))

    def _download(self, folder: str | None) -> Path:
        import mlflow

        try:
            return Path(mlflow.artifacts.download_artifacts(self.uri, dst_path=folder))
        except OSError as error:
            if error.filename is not None:
                raise
            raise self._unfetched(error) from error
        except (*STRANGE, ValueError) as error:  # as of a listing, version or address that no MLflow has
            raise self._unfetched(error) from error

    def _unfetched(self, error: Exception) -> DropforgeError:
        cause = f"its files cannot be fetched ({error})"
        mend = f"See that MLflow at {self.tracking_uri} and its artifacts' store answer, and that the version is there"
        return DropforgeError(f"model {self.family}/{self.version}", cause, mend)

    def _take_own_code(self, folder: Path) -> None:
        """Put this installation's loader in the place of the code beside a model, which a pod wrote.

        :raises DropforgeError: if the model is loaded by something else.
        """
        package = find_spec("trainer")
        places = list(package.submodule_search_locations or ()) if package else []
        if not places:
            raise ImportError("trainer", name="trainer")
        try:
            about = read_object(FolderStore(folder), "MLmodel")
            flavor = about["flavors"]["python_function"]
            if flavor["loader_module"] != _LOADER or not isinstance(about["metadata"]["dropforge"], dict):
                raise ValueError(flavor["loader_module"])
        except (OSError, ValueError, KeyError, TypeError):
            raise DropforgeError(
                f"model {self.family}/{self.version}",
                "its MLmodel is none that a run of Dropforge writes, and may name any code to be run",
                f"If you trust who wrote it, load it with `mlflow.pyfunc.load_model({self.uri!r})`",
            ) from None
        about["flavors"]["python_function"] = {
            "loader_module": _LOADER,
            "code": _CODE,
            "python_version": flavor.get("python_version"),
        }
        (folder / "MLmodel").write_text(json.dumps(about), encoding="utf-8")
        shutil.rmtree(folder / _CODE, ignore_errors=True)
        (folder / _CODE).mkdir()
        shutil.copyfile(Path(places[0]) / "model" / "pyfunc_loader.py", folder / _CODE / f"{_LOADER}.py")

    @contextmanager
    def _fetching(self) -> Iterator[None]:
        """Fetch with the patience of MLflow's client; its addresses are the whole process's, and are put back."""
        import mlflow
        from mlflow.exceptions import MlflowException

        tracking_uri, registry_uri = mlflow.get_tracking_uri(), mlflow.get_registry_uri()
        mlflow.set_tracking_uri(self.tracking_uri)
        mlflow.set_registry_uri(self.tracking_uri)
        try:
            yield
        except OSError as error:
            raise file_error(error) if error.filename is not None else error from error
        except (MlflowException, RecursionError) as error:  # MLflow lists a key with `..` in it without end
            raise self._unfetched(error) from error
        finally:
            mlflow.set_tracking_uri(tracking_uri)
            mlflow.set_registry_uri(registry_uri)


def find_model(tracking_uri: str, word: str) -> Model:
    """Find a version by FAMILY@ALIAS or FAMILY/NUMBER. :raises DataError: if there is none."""
    from mlflow.exceptions import MlflowException

    family, at, alias = word.partition("@")
    if not at:
        family, _, number = word.rpartition("/")
        if not family or read_count(number) is None:
            raise DataError(f"model {word}", "it names no version", "Write FAMILY@ALIAS or FAMILY/NUMBER")
    with asking_mlflow(tracking_uri):
        mlflow = tracking.client(tracking_uri)
        try:
            found = tracking.by_alias(mlflow, family, alias) if at else mlflow.get_model_version(family, number)
        except MlflowException as error:
            if error.error_code not in tracking.NOT_THERE:
                raise
            found = None
    if found is None:
        raise DataError(f"model {word}", "MLflow has no such version", "List runs with `dropforge runs`")
    version = read_count(str(found.version))
    if version is None:
        cause = f"MLflow at {tracking_uri} says that it is {str(found.version)[:40]!r}, which is no version"
        raise DataError(f"model {word}", cause, "See that it is an MLflow")
    return Model(family, version, tracking_uri)
