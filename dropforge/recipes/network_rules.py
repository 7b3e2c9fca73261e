"""Settings of the network that cannot work, each with its mend."""

from __future__ import annotations

from dropforge.errors import RecipeError
from dropforge.placement.fabrics import HUGE_PAGES, LEFT_ALONE, NO_HUGE_PAGES, USELESS
from dropforge.recipe import Compute


def check_network(compute: Compute) -> None:
    """:raises RecipeError: for the first setting that would do nothing, or not what it says."""
    if compute.fabric is not None and compute.nodes == 1:
        raise RecipeError("recipe key `compute.fabric`", "there is one node, and none to reach", "Remove it")
    if compute.fabric in ("efa", "infiniband") and not compute.gpus:
        raise RecipeError(
            "recipe key `compute.fabric`",
            f"`compute.gpus` is 0, and gloo does not speak {compute.fabric}",
            "Remove it, or ask for GPUs",
        )
    why = {one.name: one.reason for one in LEFT_ALONE}
    for name in compute.network_env:
        if name in USELESS:
            raise RecipeError(f"recipe key `compute.network_env.{name}`", why[name], "Remove it")
    huge = compute.network_env.get(HUGE_PAGES)
    if huge is not None and huge.lower() not in NO_HUGE_PAGES:
        raise RecipeError(
            f"recipe key `compute.network_env.{HUGE_PAGES}`",
            "pods ask for no huge pages, of which Kubernetes gives a pod only what it asked for",
            "Remove it",
        )
    asked = compute.preflight
    if asked.when == "always" and compute.nodes * compute.processes_per_node == 1:
        raise RecipeError(
            "recipe key `compute.preflight.when`", "there is one rank, and none to reach", "Use `auto`, or ask for more"
        )
    if asked.when == "never" and (asked.min_gb_per_second is not None or asked.max_latency_ms is not None):
        raise RecipeError("recipe key `compute.preflight.when`", "it is `never`, and a limit is set", "Remove either")
