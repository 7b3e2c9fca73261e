"""What a recipe's `compute.instance` fills in, where it brings the pods, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kubeflow_training.jobs.kinds import kind_of
from kubeflow_training.jobs.manifest import pytorch_job
from kubeflow_training.jobs.manifest.naming import renamed

from dropforge.costs import Tariff
from dropforge.errors import RecipeError
from dropforge.gangs import rates_of
from dropforge.job import asked_job, evaluate_job, tokenise_job, train_job
from dropforge.placement.catalogue import VARIABLE, Instance, pod_room, read
from dropforge.placement.pods import ARCH, EFA, GIB, TYPE, ZONE, devices, placed, told
from dropforge.recipe import Compute, Recipe
from dropforge.recipes import parse_recipe
from dropforge.recipes.load import build_recipe, merge
from dropforge.run import RunSpec
from tests.dropforge.test_recipe import check_drop_recipe

ALL = read({})
BASE = "base: {scratch: {}}\ntrain: {tokens_per_step: 65536}\ncompute: {backend: kubernetes, "
JOB = "training.kubeflow.org/job-name"


def recipe_of(compute: str) -> Recipe:
    return parse_recipe(f"{BASE}{compute}}}")


def spec_of(recipe: Recipe) -> RunSpec:
    return RunSpec("fam-1", "fam", 1, "s3://b/runs/fam-1", "s3://b", "s3://b/m.json", "ab", recipe.plain(), "code")


def pods_of(arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """Checked, as the operator does before it creates the job."""
    manifest = pytorch_job(**arguments)
    kind_of(manifest).require_valid(manifest)
    return [replica["template"]["spec"] for replica in manifest["spec"]["pytorchReplicaSpecs"].values()]


@pytest.mark.parametrize("on", ALL.values(), ids=lambda on: on.name)
def test_the_jobs_of_every_instance_are_sound_and_fit_on_it(on: Instance) -> None:
    recipe = recipe_of(f"nodes: 2, instance: {on.name}")
    compute, spec, room = recipe.compute, spec_of(recipe), pod_room(on)
    selector = {ARCH: on.arch} if on.cloud == "any" else {TYPE: on.name, ARCH: on.arch}
    assert (compute.gpus, compute.processes_per_node) == (on.gpus, on.gpus or 1)
    assert 0.9 * room.cpus < compute.cpus <= room.cpus
    assert 0.9 * room.memory_gib * GIB < compute.memory_gb <= room.memory_gib * GIB
    assert build_recipe(recipe.plain()) == recipe
    for arguments in (train_job(spec, recipe), evaluate_job(spec, recipe), asked_job(spec, recipe, "x", "s3://b/o")):
        for pod in pods_of(arguments):
            assert pod["nodeSelector"] == selector
            asked = pod["containers"][0]["resources"]["limits"]
            assert asked.get("nvidia.com/gpu") == (str(on.gpus) if on.gpus else None)
            assert bool(pod.get("tolerations")) == bool(on.gpus)
            assert int(asked.get(EFA, 0)) == (
                on.adapters if arguments["nodes"] == 2 and on.gpus and on.fabric == "efa" else 0
            )
            assert not [name for name in asked if name.startswith("hugepages")]  # FI_EFA_USE_HUGE_PAGE is 0
    (pod,) = pods_of(tokenise_job(spec, recipe))
    assert pod["nodeSelector"] == ({ARCH: on.arch} if on.gpus else selector)
    # It bears the taint of nodes with GPUs: often no others have room for it.
    assert [one["key"] for one in pod.get("tolerations", [])] == (["nvidia.com/gpu"] if on.gpus else [])
    assert "nvidia.com/gpu" not in pod["containers"][0]["resources"]["limits"]


def test_pods_of_a_gang_keep_apart_on_nodes_that_are_near_each_other_and_so_do_those_of_the_next_gang() -> None:
    recipe = recipe_of("nodes: 3, instance: p5.48xlarge")
    manifest = renamed(pytorch_job(**train_job(spec_of(recipe), recipe)), "train-g2")
    for replica in manifest["spec"]["pytorchReplicaSpecs"].values():
        affinity = replica["template"]["spec"]["affinity"]
        (apart,) = affinity["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        (zone,) = affinity["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert (apart["topologyKey"], zone["topologyKey"]) == ("kubernetes.io/hostname", ZONE)
        wishes = affinity["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
        terms = [apart, zone, *(wish["podAffinityTerm"] for wish in wishes)]
        assert {term["labelSelector"]["matchLabels"][JOB] for term in terms} == {"train-g2"}
        assert [(wish["weight"], wish["podAffinityTerm"]["topologyKey"][-7:]) for wish in wishes] == [
            (100, "layer-3"), (50, "layer-2"), (25, "layer-1"),
        ]  # fmt: skip


def test_a_cluster_whose_nodes_have_no_zone_does_not_wait_for_one() -> None:
    """A required affinity to a label that no node has would leave every pod pending."""
    for name in ("gpu-h100-sxm.8gpu-128vcpu-1600gb", "m7i.2xlarge", "g5.xlarge"):
        affinity = placed(ALL[name], job="j", nodes=2, gpus=ALL[name].gpus)["affinity"]["podAffinity"]
        assert "requiredDuringSchedulingIgnoredDuringExecution" not in affinity
    alone = placed(ALL["p5.48xlarge"], job="j", nodes=1, gpus=8)
    assert not alone.keys() & {"affinity", "spread", "resources"}  # its GPUs reach each other without a network


def test_the_fabric_follows_and_who_wants_tcp_gets_no_devices() -> None:
    found = {
        name: recipe_of(f"nodes: 2, instance: {name}").compute.fabric
        for name in ("p5.48xlarge", "g5.xlarge", "m7i.large", "gpu-h100-sxm.8gpu-128vcpu-1600gb")
    }
    assert list(found.values()) == ["efa", "tcp", None, "tcp"]  # pods ask for no InfiniBand that nobody has named
    assert recipe_of("instance: p5.48xlarge").compute.fabric is None
    recipe = recipe_of("nodes: 2, instance: p5.48xlarge, fabric: tcp")
    for pod in pods_of(train_job(spec_of(recipe), recipe)):
        assert EFA not in pod["containers"][0]["resources"]["limits"]
    again = merge(recipe_of("nodes: 2, instance: p5.48xlarge").plain(), {"compute": {"instance": "p3.8xlarge"}})
    assert build_recipe(again).compute.fabric == "tcp"


def test_fewer_gpus_are_given_their_share_of_the_machine() -> None:
    all_of_it, half = recipe_of("instance: p5.48xlarge").compute, recipe_of("instance: p5.48xlarge, gpus: 4").compute
    assert (half.gpus, half.processes_per_node, half.gpu_memory_gb) == (4, 4, 80)
    assert all_of_it.cpus / 2 - 0.1 <= half.cpus <= all_of_it.cpus / 2
    assert all_of_it.memory_gb / 2 - 1 <= half.memory_gb <= all_of_it.memory_gb / 2
    assert devices(ALL["p5.48xlarge"], 4)[EFA] == "16"
    assert devices(ALL["g6e.24xlarge"], 1)[EFA] == "1"
    given = recipe_of("instance: p5.48xlarge, cpus: 70, memory_gb: 300, gpu_memory_gb: null").compute
    assert (given.gpus, given.cpus, given.memory_gb, given.gpu_memory_gb) == (8, 70, 300, None)
    little = recipe_of("instance: p5.48xlarge, gpus: 1, cpus: 2, memory_gb: 4").compute  # others have the rest
    assert (little.cpus, little.memory_gb) == (2, 4)


def test_tokenising_takes_one_gpus_share_and_is_billed_so() -> None:
    recipe = recipe_of("instance: p5.48xlarge, tokenize_ahead: true")
    job = tokenise_job(spec_of(recipe), recipe)
    assert job["cpus"] == recipe.compute.cpus / 8 == rates_of(recipe.compute, "tokenise").cores
    assert job["memory_gb"] == recipe.compute.memory_gb / 8
    assert rates_of(recipe.compute, "train").cores == recipe.compute.cpus


def test_another_instance_brings_its_own_sizes_and_what_is_said_above_it_stays() -> None:
    text = "extends: llama-3.1-8b\ncompute: {backend: kubernetes, instance: p4d.24xlarge}"
    preset = parse_recipe(text)  # the preset's are those of one GPU
    assert (preset.compute.gpus, preset.compute.gpu_memory_gb) == (8, 40)
    again = merge(preset.plain(), {"compute": {"instance": "g6e.12xlarge", "memory_gb": 100}})
    assert build_recipe(again).compute.gpus == 4
    assert build_recipe(again).compute.memory_gb == 100
    same = merge({"compute": {"instance": "p4d.24xlarge", "gpus": 4}}, {"compute": {"instance": "p4d.24xlarge"}})
    assert same["compute"]["gpus"] == 4
    off = build_recipe(merge(preset.plain(), {"compute": {"instance": None}})).compute
    assert (off.instance, off.gpus) == (None, 8)


@pytest.mark.parametrize(
    ("compute", "message"),
    [
        ("instance: p5.48xlarg", r"`compute.instance`: instance 'p5.48xlarg'.*mean p5.48xlarge.*DROPFORGE_INST"),
        ("instance: [p5]", r"`compute.instance`: .*valid string"),
        ("instance: g5.xlarge, gpus: many", r"`compute.gpus`: "),
        ("instance: p5.48xlarge, cpus: 192", r"`compute.cpus`: p5.48xlarge leaves a pod 190.9 cores, not 192"),
        ("instance: p5.48xlarge, memory_gb: 2199", r"`compute.memory_gb`: p5.48xlarge leaves a pod .* GB, not 2199"),
        ("instance: p5.48xlarge, cpus: 19", r"`compute.cpus`: with all GPUs .* 19 of 190.9 cores, .*Leave out"),
        ("instance: p5.48xlarge, memory_gb: 99", r"`compute.memory_gb`: .* has 99 of .* GB.*Leave out `cpus`, `m"),
        ("instance: g5.xlarge, gpus: 2", r"`compute.gpus`: g5.xlarge has 1, not 2.*`dropforge instances --gpus 2`"),
        ("instance: m7i.large, gpus: 1", r"`compute.gpus`: m7i.large has none, not 1"),
        ("instance: g5.xlarge, gpus: 0, gpu_memory_gb: null", r"`compute.gpus` is 0: they would be paid for nothing"),
        ("instance: g5.xlarge, gpu_memory_gb: 40", r"`compute.gpu_memory_gb`: each A10G of g5.xlarge has 24 GiB"),
        ("instance: g5.12xlarge, processes_per_node: 2", r"`compute.processes_per_node`: 2 ranks cannot share 4 GPUs"),
        ("nodes: 4, instance: g5.12xlarge, gpus: 1", r"no more than one g5.12xlarge.*Use `nodes: 1` with `gpus: 4`"),
        ("instance: r8g.large, node_selector: {kubernetes.io/arch: amd64}", r"node_selector`: no r8g.large has"),
        ("nodes: 2, instance: g5.xlarge, fabric: efa", r"`compute.fabric`: g5.xlarge has tcp, not efa"),
        ("node_selector: {'a b': c}", r"`compute.node_selector"),
        *(
            (f"env: {{{name}: x}}", rf"`compute.env.{name}`: it looks like a secret")
            for name in ("AZURE_STORAGE_KEY", "SSH_KEY", "WANDB_KEY", "PASSPHRASE", "PGPASSFILE")
        ),
        *(
            (f"env: {{A: '{text}'}}", r"`compute.env.A`: it looks like a secret")
            for text in (
                f"sk-{'a1' * 12}",
                f"github_pat_{'a1' * 12}",
                f"xoxb-{'12' * 8}",
                "eyJhbGciOiJ9.eyJzdWIiOiJ9.c2lnbmF0dXJl",
            )
        ),
        ("env: {HF_TOKEN: x}", r"`compute.env.HF_TOKEN`: it looks like a secret.*Kubernetes secret"),
        ("env: {PROXY: 'http://me:word@proxy:3128'}", r"`compute.env.PROXY`: it looks like a secret"),
        ("env: {NCCL_DEBUG: INFO}", r"`compute.env.NCCL_DEBUG`: .*Write it under `compute.network_env`"),
        ("env: {AWS_ENDPOINT_URL: 'http://x'}", r"`compute.env.AWS_ENDPOINT_URL`: the job sets"),
        ("env: {PET_NNODES: '3'}", r"`compute.env.PET_NNODES`: the job sets"),
        ("env: {RANK: '3'}", r"`compute.env.RANK`: the job sets"),
        ("env: {'a b': c}", r"`compute.env"),
        ("env: {a: 1}", r"`compute.env.a`"),
        ("annotations: {kueue.x-k8s.io/podset-group-name: x}", r"`compute.annotations.kueue.*the job sets"),
        ("annotations: {a: 'https://me:word@host'}", r"`compute.annotations.a`: it looks like a secret"),
        ("tolerations: [{key: a, value: b}]", r"`compute.tolerations.*: write `operator: Equal`"),
        ("tolerations: [{key: a, effect: Never}]", r"`compute.tolerations.*NoSchedule"),
        ("image_pull_secrets: [Login]", r"`compute.image_pull_secrets"),
        ("priority_class: high, queue: team-a", r"`compute.priority_class`: .*Use `compute.priority`"),
        ("memory_gb: 4, shared_memory_gb: 4", r"`compute.shared_memory_gb`: 4 GB of the pod's 4 GB"),
        ("ephemeral_storage_gb: .inf", r"`compute.ephemeral_storage_gb`"),
        (
            "instance: g5.xlarge, gpus: 1, ephemeral_storage_gb: 300",
            r"`compute.ephemeral_storage_gb`: g5.xlarge has disks of 250 GB, not 300 GB.*DROPFORGE_INSTANCES",
        ),
        ("queue_timeout_minutes: 0", r"`compute.queue_timeout_minutes`"),
        ("nodes: 2, min_nodes: 2, queue_timeout_minutes: 5", r"`compute.min_nodes`: 2 is no fewer than"),
        ("nodes: 2, min_nodes: 1", r"`compute.min_nodes`: .*Set `compute.queue_timeout_minutes`"),
        ("nodes: 2, min_nodes: 1, queue_timeout_minutes: 5, queue: a", r"`compute.min_nodes`: Kueue"),
        ("nodes: 2, min_nodes: 1, queue_timeout_minutes: 5, kind: Job", r"`compute.min_nodes`: a plain Job"),
        ("node_selector: {zone: 'a/b'}", r"`compute.node_selector.zone"),
    ],
)  # fmt: skip
def test_what_cannot_be_had_there_is_refused_with_the_mend(compute: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        recipe_of(compute)


def test_this_machine_is_no_instance() -> None:
    for key in (
        "instance: g5.xlarge",
        "node_selector: {a: b}",
        "tolerations: [{key: a}]",
        "annotations: {a: b}",
        "image_pull_secrets: [a]",
        "priority_class: a",
        "ephemeral_storage_gb: 1",
        "shared_memory_gb: 1",
    ):
        with pytest.raises(RecipeError, match=rf"`compute.{key.partition(':')[0]}`: the local backend"):
            parse_recipe(f"base: {{scratch: {{}}}}\ncompute: {{{key}}}")


def test_labels_of_ones_own_are_asked_for_beside_the_instances() -> None:
    recipe = recipe_of("instance: m7i.2xlarge, node_selector: {topology.kubernetes.io/zone: eu-1a}")
    (pod,) = pods_of(train_job(spec_of(recipe), recipe))
    assert pod["nodeSelector"] == {TYPE: "m7i.2xlarge", ARCH: "amd64", ZONE: "eu-1a"}
    recipe = recipe_of("node_selector: {pool: a}")
    for job in (train_job, tokenise_job, evaluate_job):
        (pod,) = pods_of(job(spec_of(recipe), recipe))
        assert pod["nodeSelector"] == {"pool": "a"}


def test_a_drop_does_not_choose_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "team.yaml").write_text("extends: tiny\ncompute: {backend: kubernetes, instance: m7i.2xlarge}")
    monkeypatch.setenv("DROPFORGE_PRESETS", str(tmp_path))
    monkeypatch.setenv("DROPFORGE_PRESET", "team")
    path = tmp_path / "recipe"
    for key, value in (("instance", "p5.48xlarge"), ("instance", "null"), ("node_selector", "{a: b}")):
        path.write_text(f"compute: {{{key}: {value}}}")
        with pytest.raises(RecipeError, match=rf"`compute.{key}`: a recipe in a drop may not"):
            check_drop_recipe(path)
    path.write_text("compute: {memory_gb: 900}")
    with pytest.raises(RecipeError, match=r"m7i\.2xlarge leaves a pod"):
        check_drop_recipe(path)
    path.write_text("compute: {memory_gb: 9}")
    assert check_drop_recipe(path).compute.memory_gb == 9


def test_ones_own_machines_have_prices_and_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own.csv"
    own.write_text(
        "name,cloud,arch,cpus,memory_gib,gpu,gpus,gpu_memory_gib,gpu_link,fabric,adapters,device,price_hour,currency\n"
        "dgx,own,amd64,224,2000,H100,8,80,nvlink,infiniband,8,rdma/hca,24,EUR\n"
        "box,own,amd64,10,64,,,,,,,,1.8,\n"
    )
    monkeypatch.setenv(VARIABLE, str(own))
    dgx = recipe_of("nodes: 2, instance: dgx")
    assert dgx.compute.price is not None
    assert (dgx.compute.price.gpu_hour, dgx.compute.price.currency) == (3, "EUR")
    assert devices(read()["dgx"], 8) == {"rdma/hca": "8"}
    assert pods_of(train_job(spec_of(dgx), dgx))[0]["containers"][0]["resources"]["requests"]["rdma/hca"] == "8"
    box = recipe_of("instance: box").compute
    found = Tariff.of(box).hours(0, 10 * box.cpus)  # ten hours of a pod that has the machine for itself
    assert found.cost == pytest.approx(18)
    given = recipe_of("instance: box, price: {core_hour: 7}").compute
    assert given.price is not None
    assert given.price.core_hour == 7
    own.write_text("name,cloud\nx")
    with pytest.raises(RecipeError, match=r"recipe key `compute.instance`: file .*own\.csv, line 2"):
        recipe_of("instance: dgx")


def test_a_plan_tells_where_pods_go_or_could_go() -> None:
    def line(**more: Any) -> str:
        return told(Compute(backend="kubernetes", **more), ALL)

    assert line(instance="p5.48xlarge", nodes=2, gpus=8).endswith(f"reach each other over 32 {EFA} each")
    assert line(instance="g5.xlarge", gpus=1) == "g5.xlarge (1 x A10G 24 GiB)"
    assert "TCP: no `device`" in line(instance="gpu-h200-sxm.8gpu-128vcpu-1600gb", nodes=2, gpus=8)
    assert line(instance="m7i.large", nodes=2).endswith("m7i.large, one pod on each, that reach each other over TCP")
    assert line(gpus=8, gpu_memory_gb=80, memory_gb=800).startswith("p4de.24xlarge, ")
    assert line(gpus=16) == "none of the catalogue has room for such a pod"


def test_a_generic_instance_gives_sizes_and_leaves_the_choice_of_nodes() -> None:
    chosen = "node_selector: {nvidia.com/gpu.product: NVIDIA-A100, node.kubernetes.io/instance-type: rack-7}"
    recipe = recipe_of(f"nodes: 2, instance: generic.8gpu-80gb, {chosen}")
    assert (recipe.compute.gpus, recipe.compute.gpu_memory_gb, recipe.compute.fabric) == (8, 80, "tcp")
    for pod in pods_of(train_job(spec_of(recipe), recipe)):
        assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-A100", TYPE: "rack-7", ARCH: "amd64"}
    with pytest.raises(RecipeError, match="leaves a pod"):
        recipe_of("instance: generic.8gpu-80gb, cpus: 100")
    # What could have room is named by its own name.
    assert "generic" not in told(Compute(backend="kubernetes", gpus=1, cpus=2, memory_gb=8), ALL)


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        (0, {"gpus": 0, "processes_per_node": 1, "gpu_memory_gb": None}),
        (4, {"gpus": 4, "processes_per_node": 4, "gpu_memory_gb": 16}),
        (1, {"gpus": 1, "processes_per_node": 1, "gpu_memory_gb": 16}),
    ],
)
def test_a_recipe_that_changes_the_gpus_of_a_preset_needs_to_say_no_more(gpus: int, expected: dict[str, Any]) -> None:
    text = f"extends: distilbert\ntrain: {{rows_per_step: 32}}\ncompute: {{gpus: {gpus}}}"
    compute = parse_recipe(text).compute
    assert {key: getattr(compute, key) for key in expected} == expected


def test_what_a_recipe_says_of_gpus_that_it_has_not_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"`compute\.gpu_memory_gb`"):
        parse_recipe("extends: distilbert\ncompute: {gpus: 0, gpu_memory_gb: 16}")
    kept = parse_recipe("extends: sample\ncompute: {gpus: 2}").compute  # two ranks, which share no GPU
    assert (kept.gpus, kept.processes_per_node) == (2, 2)
