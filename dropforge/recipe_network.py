"""`compute.preflight` and `compute.network_env`: what ranks hold before they begin, and variables of their network."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field

from dropforge.section import Section

PREFIXES: Final = ("NCCL_", "FI_", "OFI_NCCL_", "TORCH_NCCL_", "GLOO_", "UCX_")
"""Beginnings of variables of NCCL, libfabric, gloo and UCX."""
_PREFIX: Final = "|".join(prefix.removesuffix("_") for prefix in PREFIXES)
NetworkName = Annotated[str, Field(pattern=rf"^({_PREFIX})_[A-Z0-9_]{{1,60}}$")]
NetworkEnv = Annotated[dict[NetworkName, Annotated[str, Field(pattern=r"^[\x20-\x7e]{0,256}$")]], Field(max_length=32)]


class Preflight(Section):
    """A check of at most a minute, by default, that all ranks are there and how fast their network is; a node or
    network that fails it ends the attempt before anything is fetched."""

    when: Literal["auto", "always", "never"] = "auto"
    """`auto` checks jobs of several nodes with GPUs."""
    min_gb_per_second: float | None = Field(default=None, ge=0, le=10_000)
    """Least bus bandwidth of an all-reduce in gigabytes a second, 0 accepts any; null takes the fabric's."""
    max_latency_ms: float | None = Field(default=None, ge=0, le=60_000)
    """Most milliseconds of a small all-reduce, 0 accepts any; null takes the fabric's."""
    seconds: int = Field(default=60, ge=10, le=600)
    """Longest time for all of it."""
