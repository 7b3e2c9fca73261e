"""Keys of `compute` that Kubernetes is given for each pod as they are: variables, taints, annotations, pull secrets."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field, model_validator

from dropforge.section import Section

_LABEL: Final = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
LabelName = Annotated[str, Field(pattern=rf"^([a-z0-9]([-a-z0-9.]{{0,251}}[a-z0-9])?/)?{_LABEL}$")]
"""Of labels and annotations alike."""
LabelValue = Annotated[str, Field(pattern=rf"^({_LABEL})?$")]
ObjectName = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$")]
"""Of a Kubernetes object, such as a Secret or a PriorityClass."""

Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,99}$")]
PodEnv = Annotated[dict[Variable, Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]{0,2048}$")]], Field(max_length=64)]
Annotations = Annotated[dict[LabelName, Annotated[str, Field(max_length=4096)]], Field(max_length=32)]


class Toleration(Section):
    """A taint that the pods tolerate, in Kubernetes' terms."""

    key: str = Field(min_length=1, max_length=316)
    operator: Literal["Exists", "Equal"] = "Exists"
    value: str | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None

    @model_validator(mode="after")
    def _value_of_equal(self) -> Toleration:
        if self.operator == "Exists" and self.value is not None:
            raise ValueError("`operator: Exists`, which is the default, takes any value: write `operator: Equal`")
        return self


Tolerations = Annotated[tuple[Toleration, ...], Field(strict=False, max_length=50)]
PullSecrets = Annotated[tuple[ObjectName, ...], Field(strict=False, max_length=10)]
