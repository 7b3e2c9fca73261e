"""What ranks are told about their network, and what they must show of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dropforge.cli.app import app
from dropforge.errors import RecipeError
from dropforge.job import gang_environment
from dropforge.placement.fabrics import (
    _BETWEEN,
    _WITHIN,
    LEFT_ALONE,
    PREFLIGHT,
    Network,
    Preflight,
    preflight,
    variables,
)
from dropforge.recipe import Compute
from dropforge.recipes.load import build_recipe, resolve

GANG = {"backend": "kubernetes", "nodes": 2, "gpus": 4, "processes_per_node": 4}


def compute(**keys: Any) -> Compute:
    return build_recipe(resolve({"extends": "tiny", "compute": {**GANG, **keys}})).compute


@pytest.mark.parametrize(
    ("network", "names"),
    [
        (Network(1, 0), []),
        (Network(4, 0, "tcp"), []),
        (Network(1, 8, "efa", "nvlink"), ["NCCL_DEBUG"]),
        (Network(2, 8), ["NCCL_DEBUG"]),
        (Network(2, 8, "infiniband"), ["NCCL_DEBUG"]),
        (Network(2, 8, "efa"), ["NCCL_DEBUG", "FI_EFA_USE_HUGE_PAGE"]),
        (Network(2, 8, "tcp"), ["NCCL_DEBUG", "NCCL_NET"]),
    ],
)
def test_only_what_is_known_to_matter_is_set_and_each_has_its_reason(network: Network, names: list[str]) -> None:
    found = variables(network)
    assert [one.name for one in found] == names
    assert all(one.reason and "\n" not in one.reason for one in (*found, *LEFT_ALONE))
    assert not {one.name for one in found} & {one.name for one in LEFT_ALONE}


def test_the_pages_have_every_reason() -> None:
    pages = Path(__file__).parents[2] / "docs/how-to"
    text = "".join((pages / name).read_text() for name in ("network-settings.md", "network-preflight.md"))
    assert [one.name for one in LEFT_ALONE if one.reason not in text] == []
    for fabric, (least, most) in _BETWEEN.items():
        name = "not said, several nodes" if fabric == "unknown" else f"`{fabric}`"
        assert f"| {name} | {least:g} | {most:g} |" in text
    links = {"nvlink": "NVLink", "pcie": "PCIe", "unknown": "not said"}
    for link, (least, most) in _WITHIN.items():
        assert f"| one node, `when: always`, {links[link]} | {least:g} | {most:g} |" in text


def test_the_recipes_own_variables_win_over_those_of_its_fabric() -> None:
    env = gang_environment(compute(fabric="efa", network_env={"NCCL_DEBUG": "INFO", "NCCL_IB_HCA": "mlx5_0"}))
    held = json.loads(env.pop(PREFLIGHT))
    assert env == {"NCCL_DEBUG": "INFO", "FI_EFA_USE_HUGE_PAGE": "0", "NCCL_IB_HCA": "mlx5_0"}
    assert held == {"fabric": "efa", "gb_per_second": 1.0, "milliseconds": 10.0, "seconds": 60.0}


def test_a_preflight_is_held_by_several_nodes_with_gpus_or_where_it_is_asked_for() -> None:
    assert PREFLIGHT in gang_environment(compute())
    assert PREFLIGHT not in gang_environment(compute(nodes=1))
    assert PREFLIGHT not in gang_environment(compute(gpus=0))
    assert PREFLIGHT not in gang_environment(compute(preflight={"when": "never"}))
    asked = gang_environment(compute(gpus=0, nodes=1, preflight={"when": "always", "min_gb_per_second": 0.5}))
    assert json.loads(asked[PREFLIGHT]) == {
        "fabric": "gloo", "gb_per_second": 0.5, "milliseconds": 0.0, "seconds": 60.0,
    }  # fmt: skip


def test_the_floor_follows_from_the_fabric_or_its_rated_speed() -> None:
    assert preflight(Network(2, 8, "efa", "nvlink", gbps=400)).gb_per_second == 5
    assert preflight(Network(2, 8, "tcp", gbps=400)).gb_per_second == 0.1
    assert preflight(Network(1, 8, "efa", "nvlink", gbps=400)).fabric == "nvlink"
    assert preflight(Network(2, 0, "tcp", gbps=400)) == Preflight("gloo", 0, 0, 60)
    held = preflight(Network(2, 8), floor=0, latency=0, seconds=20)
    assert Preflight.from_json(held.to_json()) == held == Preflight("unknown", 0, 0, 20)
    for text in ("", "[]", "{}", '{"fabric": 1, "gb_per_second": null, "milliseconds": 0, "seconds": 1}'):
        with pytest.raises(ValueError, match=r"\S"):
            Preflight.from_json(text)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"nodes": 1, "fabric": "tcp"}, "`compute.fabric`: there is one node"),
        ({"gpus": 0, "fabric": "efa"}, "gloo does not speak efa"),
        ({"network_env": {"NCCL_NETWORK_TIMEOUT": "60"}}, "no version of NCCL reads it"),
        ({"network_env": {"FI_EFA_USE_HUGE_PAGE": "1"}}, "pods ask for no huge pages"),
        ({"network_env": {"LD_PRELOAD": "/tmp/x.so"}}, "LD_PRELOAD"),
        ({"network_env": {"NCCL_DEBUG": "a\nb"}}, "NCCL_DEBUG"),
        ({"preflight": {"when": "never", "max_latency_ms": 3}}, "`compute.preflight.when`: it is `never`"),
        ({"preflight": {"seconds": 9}}, "seconds"),
        (
            {"nodes": 1, "gpus": 0, "processes_per_node": 1, "preflight": {"when": "always"}},
            "`compute.preflight.when`: there is one rank",
        ),
    ],
)
def test_settings_that_would_do_nothing_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        compute(**keys)


def test_the_plan_tells_each_variable_with_its_reason(tmp_path: Any) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "extends: tiny\ncompute: {backend: kubernetes, nodes: 2, gpus: 1, fabric: tcp, "
        "network_env: {NCCL_BUFFSIZE: '1'}}"
    )
    text = " ".join(CliRunner().invoke(app, ["plan", str(path)], env={"COLUMNS": "200"}).output.split())
    assert "network, tcp NCCL_DEBUG=WARN NCCL's warnings go to the log" in text
    assert "NCCL_NET=Socket no rank takes an RDMA device" in text
    assert "NCCL_BUFFSIZE=1 the recipe sets it preflight of at most 60 s: all ranks there, 0.1 GB/s, 20 ms" in text


def test_an_instance_tells_fabric_and_speed() -> None:
    compute = {"backend": "kubernetes", "instance": "p5.48xlarge", "nodes": 2}
    values = {"extends": "tiny", "train": {"tokens_per_step": 4096}, "compute": compute}
    found = gang_environment(build_recipe(resolve(values)).compute)
    assert found["FI_EFA_USE_HUGE_PAGE"] == "0"
    assert Preflight.from_json(found[PREFLIGHT]) == Preflight("efa", 40, 10, 60)


def test_the_floor_of_a_pod_with_a_share_is_that_of_the_adapters_that_it_gets() -> None:
    def floor(**keys: Any) -> float:
        values = {"extends": "tiny", "train": {"tokens_per_step": 65536}}
        found = gang_environment(
            build_recipe(resolve({**values, "compute": {"backend": "kubernetes", **keys}})).compute
        )
        return Preflight.from_json(found[PREFLIGHT]).gb_per_second

    assert floor(instance="p5.48xlarge", nodes=2) == 40
    assert floor(instance="p5.48xlarge", nodes=9, gpus=1) == 5  # 4 of 32 devices
    assert floor(instance="p5.48xlarge", nodes=9, gpus=1, fabric="tcp") == 0.1
    # One GPU of eight gets one of four adapters, and no less than a whole one.
    assert floor(instance="p4d.24xlarge", nodes=9, gpus=1) == 400 / 4 / 8 / 10
