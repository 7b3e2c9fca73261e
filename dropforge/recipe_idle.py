"""`compute.idle`: when GPUs that do nothing end a run."""

from __future__ import annotations

from pydantic import Field

from dropforge.section import Section


class Idle(Section):
    """GPUs that do nothing end the run, after a checkpoint, and it is not tried again."""

    below_percent: float = Field(default=5, gt=0, le=100)
    """A pod's GPUs are idle if the driver reports less for each of them."""
    minutes: float = Field(default=30, ge=1, le=10_080)
    """For how long without a break, while ranks train or evaluate."""
