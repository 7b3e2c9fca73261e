"""Data and models that a task reads and makes, named for OpenLineage: https://openlineage.io/docs/spec/naming.

Its provider for Airflow asks the operator of a task that ends. Where it is not installed, or not told where events go,
nobody asks, and nothing of it is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from airflow.sdk import get_current_context

from dropforge import layout

if TYPE_CHECKING:
    from airflow.providers.openlineage.extractors import OperatorLineage

    from dropforge.dataset import Manifest
    from dropforge.run import RunSpec
    from dropforge_airflow.tasks.plan import Plan

HUB: Final = "https://huggingface.co"
_ASKED: Final = "get_openlineage_facets_on_complete"  # also of a task that failed


class Name(NamedTuple):
    """Where something lies, and what it is called there."""

    namespace: str
    name: str


class Lineage(NamedTuple):
    read: Sequence[Name] = ()
    made: Sequence[Name] = ()


def tell(found: Callable[[], Lineage]) -> None:
    """What the running task has read or made so far; outside of a task nothing happens.

    :param found: called when the task ends, well or not, if somebody asks. What it raises is a line in the task's log.
    """
    try:
        task: Any = get_current_context()["task"]
    except RuntimeError:
        return
    # On the task itself: DAGs are the same with and without the provider, which looks for this method.
    if not isinstance(told := getattr(task, _ASKED, None), _Told):
        setattr(task, _ASKED, told := _Told())
    told.append(found)


class _Told(list[Callable[[], Lineage]]):
    def __call__(self, _: object) -> OperatorLineage[Any, Any]:
        """What the provider asks for."""
        from airflow.providers.openlineage.extractors import OperatorLineage
        from openlineage.client.event_v2 import InputDataset, OutputDataset

        told = [found() for found in self]
        read, made = (dict.fromkeys(chain.from_iterable(names)) for names in zip(*told, strict=True))
        return OperatorLineage([InputDataset(*name) for name in read], [OutputDataset(*name) for name in made])


def at(address: str) -> Name:
    """An object or a folder: of S3, of the hub, or of this machine."""
    scheme, separator, rest = address.partition("://")
    if not separator or scheme == "file":
        return Name("file", (rest if separator else address).rstrip("/"))
    if scheme == "hf":
        return Name(HUB, rest.strip("/"))
    bucket, _, key = rest.partition("/")
    return Name(f"{scheme}://{bucket}", key.strip("/"))


def curating(planned: Plan, root: str) -> Lineage:
    """What a curation reads: the folder of each upload, or what the recipe names instead of one.

    :param root: address of the bucket.
    """
    source = planned["recipe"]["data"].get("source") or {}
    if source.get("dataset"):
        return Lineage([dataset(root, *source["dataset"].split("/"))])
    prefix = planned["prefix"]
    folders = [f"{prefix}{part['drop']}" for part in planned.get("parts") or ()] or [prefix]
    return Lineage([at(folder if "://" in folder else f"{root}/{folder}") for folder in folders])


def dataset(root: str, family: str, digest: str) -> Name:
    """A dataset version: the folder of its manifest."""
    return at(f"{root}/{layout.dataset_prefix(family, digest)}")


def curated(root: str, made: Manifest) -> Lineage:
    """A dataset version, and the one that it adds a drop to."""
    before = [dataset(root, made.family, made.parent)] if made.parent else []
    return Lineage(before, [dataset(root, made.family, made.digest)])


def training(spec: RunSpec) -> Lineage:
    """What a training reads before it makes anything: its rows, and the model that it begins with."""
    return Lineage([dataset(spec.data_root, spec.family, spec.dataset_digest), *base(spec.recipe["base"])])


def base(recipe: Mapping[str, Any]) -> list[Name]:
    """The model: of the hub as MODEL@COMMIT, or a folder, as of a champion; nothing if it is made of chance."""
    from dropforge.hub import is_hub_id

    model, revision = recipe.get("model"), recipe.get("revision")
    if not model:
        return []
    if is_hub_id(model):
        return [Name(HUB, f"{model}@{revision}" if revision else model)]
    return [at(model)]


def trained(spec: RunSpec) -> Lineage:
    """What a training makes."""
    return Lineage(made=[at(f"{spec.root}/model")])


def version(tracking_uri: str, family: str, number: str) -> Name:
    """A version in MLflow's registry, by the name that MLflow loads it by."""
    return Name(_registry(tracking_uri), f"models:/{family}/{number}")


def alias(tracking_uri: str, family: str, name: str) -> Name:
    """Whatever version has the alias: what services load."""
    return Name(_registry(tracking_uri), f"models:/{family}@{name}")


def _registry(tracking_uri: str) -> str:
    return f"mlflow://{tracking_uri.partition('://')[2].rstrip('/')}"
