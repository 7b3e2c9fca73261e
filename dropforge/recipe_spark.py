"""The recipe's section on Spark: on one machine, or as pods on Kubernetes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from dropforge.placement.storages import STORAGES
from dropforge.recipe_pods import PullSecrets, Tolerations
from dropforge.section import Section
from dropforge.volumes import USER, Volume, nearest

_NAME = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"
_MEMORY = r"^[1-9][0-9]{0,5}[mg]$"


class SparkCluster(Section):
    """Driver and executors as pods: their image, resources and nodes."""

    submit: Literal["operator", "spark-submit"] = "operator"
    """`operator` makes a SparkApplication for the Spark operator; `spark-submit` a Job whose one pod is the driver."""
    image: str = Field(min_length=1, max_length=500)
    """With Python, Java and Dropforge; for the architecture of the nodes."""
    namespace: str = Field(default="default", pattern=_NAME)
    """One that the Spark operator watches."""
    service_account: str = Field(default="spark", pattern=_NAME)
    """Of driver and executors; the driver creates the executors with it."""
    executors: int = Field(default=2, ge=1, le=1000)
    """Executor pods; the driver is one more."""
    cores: int = Field(default=1, ge=1, le=256)
    """Tasks at a time in each pod."""
    memory: str = Field(default="2g", pattern=_MEMORY)
    """Memory of Java in each pod, such as `512m` or `2g`; Python's share comes on top."""
    cpu_request: str | None = Field(default=None, pattern=r"^[1-9][0-9]{0,5}m?$")
    """What each pod requests of its node, such as `500m`; null is `cores`."""
    node_selector: dict[Annotated[str, Field(min_length=1, max_length=316)], Annotated[str, Field(max_length=63)]] = (
        Field(default_factory=dict, max_length=50)
    )
    """Labels of the nodes, for example `{kubernetes.io/arch: arm64}`."""
    tolerations: Tolerations = ()
    """Taints that the pods tolerate."""
    image_pull_secrets: PullSecrets = ()
    """Secrets of the namespace with which the image is pulled from a registry that requires a login."""
    run_as: int | None = Field(default=USER, ge=1, le=2**31 - 1)
    """User id of the pods, which then follow Kubernetes' restricted Pod Security Standard; null leaves it to the
    image."""
    volumes: Annotated[tuple[Volume, ...], Field(strict=False, max_length=50)] = ()
    """Claims that every pod mounts; one of them, written by all, holds the work folder."""
    work_path: str = Field(default="/work", pattern=r"^/[^\s:]+$")
    """Where driver and executors share unfinished files, within one of the `volumes`."""
    entrypoint: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False, max_length=20)] = ()
    """Command of the pods, which is given Spark's `driver` or `executor`; none is the image's own."""
    code: str = Field(default="/opt/dropforge", pattern=r"^/[^\s:]+$")
    """Folder in the image that holds `curation`."""

    @model_validator(mode="after")
    def _can_share(self) -> SparkCluster:
        if ".." in self.work_path.split("/"):
            raise ValueError("`work_path` has `..` in it")
        held = nearest(self.work_path, self.volumes)
        if held is None:
            raise ValueError(
                f"`work_path` {self.work_path} is in none of the `volumes`, so the pods would not share it"
            )
        if held.read_only:
            raise ValueError(f"`work_path` is in claim {held.claim}, which is read-only: write `read_only: false`")
        if held.storage is not None and not STORAGES[held.storage].shared:
            raise ValueError(
                f"`work_path` is in claim {held.claim}, {STORAGES[held.storage].what}, which the pods do not share"
            )
        return self


class Spark(Section):
    """Settings of `curation.engine: spark`."""

    driver_memory: str = Field(default="2g", pattern=_MEMORY)
    """Memory of the Java process on this machine, such as `512m` or `2g`; the Python processes beside it need more."""
    cluster: SparkCluster | None = None
    """Pods on Kubernetes instead of this machine, for example `{image: ..., volumes: [...]}`."""
