"""What a measured network comes to: bandwidths as nccl-tests count them, baselines, and what is told of the causes."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kubeflow_training.jobs.manifest import pytorch_job

import dropforge.network_baselines
from dropforge.errors import DropforgeError
from dropforge.job import network_job, train_job
from dropforge.network_baselines import Baseline, Kept, Shape, causes, compare, keep, published, read_kept
from dropforge.network_bench import Figure, Measured, Order, algorithm, bus, sizes
from dropforge.placement.catalogue import read
from dropforge.placement.fabrics import Network
from dropforge.recipes.load import build_recipe, merge
from dropforge.store import ObjectInfo, Store
from dropforge.volumes import Volume
from tests.dropforge.test_job import RECIPE, SPEC

MIB = 1 << 20
WRONG = r"it is no|do not fit|no all_reduce|that are none|speed is none|are no figure|no collective|invalid"
SHAPE = Shape("p5.48xlarge", "efa", 2, 8, 8)
EFA = Network(2, 8, "efa", "nvlink", 3200)
ORDER = Order(8, "efa", sizes(1 << 30), 60, 2400)


def measured(speed: float = 400, **more: Any) -> Measured:
    """Of two p5.48xlarge: an all-reduce of so many GB/s on the bus at each size, and of 0.1 ms below."""
    figures = [Figure("all_reduce", 8, 1e-4)]
    figures += [
        Figure("all_reduce", size * MIB, size * MIB * 2 * 15 / 16 / speed / 1e9) for size in (1, 4, 16, 64, 256, 1024)
    ]
    values: dict[str, Any] = {
        "transport": "Libfabric (efa)",
        "gpu": "H100",
        "hosts": ("a", "b"),
        "versions": {"nccl": "2.30.7"},
        "links": {(0, 1): 40},
    }
    return Measured(16, 2, **(values | {"figures": tuple(figures)} | more))


def test_bandwidths_are_those_of_nccl_tests() -> None:
    """Lines of https://github.com/NVIDIA/nccl-tests and of two p5.48xlarge in AWS's own log."""
    one = Figure("all_reduce", 1073741824, 4607.6e-6)
    assert (algorithm(one), bus(one, 16)) == (pytest.approx(233.04, abs=0.01), pytest.approx(436.95, abs=0.01))
    assert bus(replace(one, collective="all_gather"), 16) == bus(one, 16) / 2
    assert bus(replace(one, collective="reduce_scatter"), 16) == bus(one, 16) / 2
    assert measured().speeds("all_reduce").keys() == {MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB}
    assert measured().latency == 1e-4
    assert sizes(1 << 20) == (8, 4096, 16384, 65536, 262144, 1048576)


def test_what_was_measured_survives_json() -> None:
    assert Measured.of(measured().plain()) == measured()
    assert Order.from_json(ORDER.to_json()) == ORDER
    for text in ("", "{}", '{"gpus": 1, "fabric": "x", "sizes": 3, "seconds": 1, "joining": 1}'):
        with pytest.raises(ValueError, match=r"no order|Expecting"):
            Order.from_json(text)


@pytest.mark.parametrize(
    "wrong",
    [
        {"ranks": 0}, {"ranks": "x"}, {"nodes": 0}, {"nodes": 17}, {"hosts": ["a"]}, {"hosts": 3}, {"figures": []},
        {"ranks": 1, "nodes": 1, "hosts": ["a"], "links": []}, {"ranks": float("inf")},
        {"links": [{"from": 0, "to": 7, "gb_per_second": 1}]}, {"versions": []},
        {"links": [{"from": 0, "to": 1, "gb_per_second": 0}]},
        {"links": [{"from": 0, "to": 1, "gb_per_second": float("nan")}]},
        {"links": [{"from": 0, "to": 1, "gb_per_second": 10**400}]},
        {"figures": [{"collective": "all_reduce", "bytes": float("inf"), "seconds": 1}]},
        {"figures": [{"collective": "all_reduce", "bytes": 10**400, "seconds": 1}]},
        {"figures": [{"collective": "all_reduce", "bytes": 8, "seconds": 1e-320}]},
        {"figures": [{"collective": "all_reduce", "bytes": 8, "seconds": 10**400}]},
        {"figures": [{"collective": "all_reduce", "bytes": 8, "seconds": 0}]},
        {"figures": [{"collective": "all_reduce", "bytes": 8, "seconds": float("nan")}]},
        {"figures": [{"collective": "all_to_all", "bytes": 8, "seconds": 1}]},
    ],
)  # fmt: skip
def test_what_is_no_measurement_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=WRONG):
        Measured.of(measured().plain() | wrong)


def test_published_figures_are_of_known_instances_and_of_all_their_gpus() -> None:
    folder = Path(dropforge.network_baselines.__file__).parent
    with (folder / "placement" / "bandwidths.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["instance"] for row in rows} <= set(read())
    assert all(row["source"].startswith("https://") for row in rows)
    found = published("p5.48xlarge", 2, 8, 8)
    assert found is not None
    assert found.speeds["all_reduce"][1 << 30] == 437.0
    for other in (("p5.48xlarge", 4, 8, 8), ("p5.48xlarge", 2, 4, 8), ("m8g.large", 2, 0, 0), ("", 2, 8, 0)):
        assert published(*other) is None


def test_a_network_is_held_to_the_sizes_that_both_have() -> None:
    against = Baseline("published", {"all_reduce": {64 * MIB: 200, 1024 * MIB: 400, 4096 * MIB: 480}})
    (found,) = compare(measured(400), against, 0.15)
    assert (found.slow, found.expected) == (False, 400)
    assert found.share == pytest.approx(1.5)
    (found,) = compare(measured(200), against, 0.15)
    assert (found.slow, found.share) == (True, pytest.approx(0.75))
    assert "all_reduce: 200 GB/s, and 400 published: 25% below" in str(found)
    assert compare(measured(), Baseline("published", {"all_gather": {MIB: 1}}), 0.15) == []


def test_a_latency_counts_as_slow_from_twice_on() -> None:
    before = Baseline("kept", {}, measured())
    slower = measured(figures=(Figure("all_reduce", 8, 1.9e-4),))
    assert [one.slow for one in compare(slower, before, 0.15)] == [False]
    slower = measured(figures=(Figure("all_reduce", 8, 2.1e-4),))
    assert [one.slow for one in compare(slower, before, 0.15)] == [True]


@pytest.mark.parametrize(
    ("more", "network", "guilty", "word"),
    [
        ({"transport": "Socket"}, EFA, None, "it went over Socket, and over Libfabric (efa) before"),
        ({"versions": {"nccl": "3"}}, EFA, None, "nccl 2.30.7 before, 3 now"),
        ({"links": {(0, 1): 4.0}}, EFA, None, "a placement group or one zone"),
        ({"links": {(0, 1): 4.0}}, EFA, 1, "node 1 (b) is slow to all others"),
        ({}, EFA, None, "look at NVLink and PCIe"),
        ({"links": {(0, 1): 4.0}}, replace(EFA, fabric="tcp"), None, "`compute.fabric` is tcp"),
        ({}, Network(2, 0), None, "the cores were busy"),
    ],
)
def test_causes_follow_from_what_differs(more: dict[str, Any], network: Network, guilty: int | None, word: str) -> None:
    now, before = measured(100, **more), measured()
    compared = compare(now, Baseline("kept", {"all_reduce": before.speeds("all_reduce")}, before), 0.15)
    found = causes(now, compared, before, network, guilty)
    assert word in "\n".join(found)
    assert causes(before, compare(before, Baseline("kept", {}, before), 0.15), before, network, None) == []


def test_of_two_who_keep_a_measurement_one_is_told(store: Store) -> None:
    nothing = read_kept(store, SHAPE)
    assert nothing == Kept()
    keep(store, SHAPE, measured(), "2026-11-25T00:00:00+00:00", nothing)
    first = read_kept(store, SHAPE)
    assert first.baseline is not None
    assert (first.baseline.before, first.baseline.source) == (measured(), "kept on 2026-11-25")
    with pytest.raises(DropforgeError, match="another process has kept a measurement meanwhile"):
        keep(store, SHAPE, measured(1), "2026-11-26T00:00:00+00:00", nothing)
    keep(store, SHAPE, measured(300), "2026-11-26T00:00:00+00:00", first)
    with pytest.raises(DropforgeError, match="another process"):
        keep(store, SHAPE, measured(1), "2026-11-27T00:00:00+00:00", first)
    again = read_kept(store, SHAPE).baseline
    assert again is not None
    assert again.before == measured(300)
    assert read_kept(store, replace(SHAPE, nodes=3)) == Kept()
    for text in (b"", b"[]", b'{"taken": "x", "measured": {"ranks": 2}}', b"[" * 100_000):
        store.put(SHAPE.key, text)
        with pytest.raises(DropforgeError, match="it is no measurement"):
            read_kept(store, SHAPE)


def test_a_kept_measurement_that_is_replaced_while_it_is_read_is_read_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(store, SHAPE, measured(), "2026-11-25T00:00:00+00:00", Kept())
    stat = store.stat

    def replaced(key: str) -> ObjectInfo | None:
        found = stat(key)
        monkeypatch.undo()
        keep(store, SHAPE, measured(300), "2026-11-26T00:00:00+00:00", read_kept(store, SHAPE))
        return found

    monkeypatch.setattr(store, "stat", replaced)
    found = read_kept(store, SHAPE).baseline
    assert found is not None
    assert found.before == measured(300)


def test_the_job_has_the_pods_of_the_training_and_removes_itself() -> None:
    compute = {"backend": "kubernetes", "instance": "p5.48xlarge", "nodes": 2, "queue": "team-a", "image": "i@sha256:1"}
    over = {"compute": {**compute, "network_env": {"NCCL_ALGO": "Ring"}}, "train": {"tokens_per_step": 16 * 2048}}
    recipe = build_recipe(merge(RECIPE.plain(), over))
    job = pytorch_job(**network_job(recipe.compute, "bench", ORDER))
    other = pytorch_job(**train_job(SPEC, recipe))
    (mine, theirs) = (one["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"] for one in (job, other))
    same = {"image", "resources", "securityContext", "volumeMounts"}
    assert {key: mine["containers"][0].get(key) for key in same} == {
        key: theirs["containers"][0].get(key) for key in same
    }
    for key in ("nodeSelector", "tolerations", "volumes", "automountServiceAccountToken", "securityContext"):
        assert mine[key] == theirs[key]
    env = {one["name"]: one.get("value") for one in mine["containers"][0]["env"]}
    assert (env["NCCL_ALGO"], env["FI_EFA_USE_HUGE_PAGE"], env["NCCL_DEBUG"]) == ("Ring", "0", "WARN")
    assert "DROPFORGE_PREFLIGHT" not in env
    assert mine["containers"][0]["command"][:3] == ["python", "-m", "trainer.network"]
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
    assert job["spec"]["runPolicy"]["ttlSecondsAfterFinished"] == 3600
    assert job["spec"]["runPolicy"]["activeDeadlineSeconds"] == 2460
    assert mine["affinity"]["podAffinity"] != theirs["affinity"]["podAffinity"]  # near each other, not to the training


def test_the_job_takes_no_secret_and_no_disk_but_files_that_the_network_needs() -> None:
    volumes = [
        {"claim": "files", "path": "/etc/nccl"},
        {"claim": "cache", "path": "/cache", "read_only": False},
        {"claim": "disk", "path": "/data", "storage": "disk"},
    ]
    compute = RECIPE.compute.model_copy(
        update={"backend": "kubernetes", "volumes": tuple(map(Volume.model_validate, volumes))}
    )
    job = pytorch_job(**network_job(compute, "bench", ORDER))
    for replica in job["spec"]["pytorchReplicaSpecs"].values():
        pod = replica["template"]["spec"]
        (container,) = pod["containers"]
        claims = [one["persistentVolumeClaim"] for one in pod["volumes"] if "persistentVolumeClaim" in one]
        assert [one["claimName"] for one in claims] == ["files"]
        assert {"/etc/nccl"} == {one["mountPath"] for one in container["volumeMounts"]} - {"/dev/shm"}
        assert not container.get("envFrom")
