"""From an upload to the registered model, with what happens to it on the way."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from kubeflow_training.asking.instance import STORED_NAME
from kubeflow_training.jobs.local import LocalCluster
from kubeflow_training.jobs.manifest import pytorch_job
from kubeflow_training.jobs.manifest.ownership import Owner
from kubeflow_training.jobs.reaping.orphans import marked

from dropforge import checkpoints, layout, ledger, tracking
from dropforge.client.airflow import FINETUNE, ROLLBACK
from dropforge.client.drops import wait_for_run
from dropforge.errors import DropforgeError
from dropforge.stack.secrets import read_secrets
from dropforge.stack.state import AIRFLOW_USER
from dropforge.wheel import ANSWERS, CALLBACKS, FIGURES, ROWS
from tests.e2e.harness import RECIPE, Stack, typed, wait
from tests.wheels import make_wheel

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

FAMILY = "python-help"
REAP = "dropforge_reap"
FIRST = f"{RECIPE}train: {{max_steps: 60, checkpoint_every: 5}}\n"


@pytest.fixture(scope="module")
def killed(stack: Stack, samples: dict[int, dict[str, Path]]) -> str:
    """The run of the first drop, one of whose ranks was killed; the next try begins half a minute later."""
    drop = stack.drop(FAMILY, "one", samples[1], FIRST)
    run = wait_for_run(stack.connection, drop)
    stack.see_checkpoint(run)
    victims = wait("a training process", stack.ranks)
    victims[0].send_signal(signal.SIGKILL)
    return run


@pytest.fixture(scope="module")
def first(stack: Stack, killed: str) -> str:
    """The same run, which has ended."""
    assert stack.end(killed) == "success", stack.log(killed, "train")
    return killed


# These do not wait for the run; it goes on meanwhile.


def test_a_recipe_with_an_unknown_key_fails_at_once_and_names_the_nearest(
    stack: Stack, killed: str, samples: dict[int, dict[str, Path]]
) -> None:
    drop = stack.drop("bad-recipe", "d", samples[1], "extends: tiny\ntrain: {learning_rat: 0.1}\n")
    run = wait_for_run(stack.connection, drop)
    assert stack.end(run) == "failed"
    assert stack.tasks(run)["plan"]["try_number"] == 1
    assert "Did you mean `train.learning_rate`?" in stack.log(run, "plan")


@pytest.fixture(scope="module")
def unreadable(stack: Stack, killed: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A file without a readable row, and the run that failed for it."""
    path = tmp_path_factory.mktemp("unreadable") / "rows.jsonl"
    path.write_text("not json\n{broken\n" * 20)
    drop = stack.drop("bad-data", "d", {path.name: path}, RECIPE)
    run = wait_for_run(stack.connection, drop)
    assert stack.end(run) == "failed"
    return path, run


def test_a_drop_with_no_readable_row_says_so(stack: Stack, unreadable: tuple[Path, str]) -> None:
    log = stack.log(unreadable[1], "curate")
    assert "rows.jsonl" in log
    assert stack.tasks(unreadable[1])["curate"]["try_number"] == 1


def test_a_run_that_failed_before_training_is_listed(stack: Stack, unreadable: tuple[Path, str]) -> None:
    done = typed(stack, "runs", "--family", "bad-data")
    (line,) = [line for line in done.stdout.splitlines() if "bad-data/d" in line]
    assert line.split()[:2] == ["bad-data/d", "FAILED"]
    assert "curate failed: " in line
    assert "rows.jsonl" in line


def test_following_a_drop_of_known_bytes_follows_the_run_that_took_them(
    stack: Stack, unreadable: tuple[Path, str]
) -> None:
    path, run = unreadable
    recipe = stack.folder / "recipes" / "bad-data-d.yaml"  # it counts among the bytes
    words = ["--family", "bad-data", "--recipe", str(recipe), "--name", "again", "--follow"]
    done = typed(stack, "drop", str(path), *words)
    assert done.returncode == 1, done.stderr
    assert f"The same data was dropped before; as bad-data/d, taken by {run}." in done.stdout
    assert "curate: failed" in done.stdout
    assert "curate failed: " in done.stdout


# These do.


def test_a_killed_rank_still_ends_in_a_registered_model(stack: Stack, first: str) -> None:
    (tracked,) = stack.tracked(first)
    assert tracked.info.status == "FINISHED"
    assert tracked.data.tags[tracking.TAG_ATTEMPT] == "2"
    assert int(tracked.data.tags[tracking.TAG_RESUMED]) >= 5
    version = tracking.client(stack.connection.settings.tracking_uri).get_model_version(
        FAMILY, tracked.data.tags[tracking.TAG_VERSION]
    )
    assert version.run_id == tracked.info.run_id
    assert stack.champion(FAMILY) == version.version
    steps = stack.mlflow.get_metric_history(tracked.info.run_id, "train/loss")
    assert max(point.step for point in steps) == 60
    losses = sorted(stack.mlflow.get_metric_history(tracked.info.run_id, "eval/loss"), key=lambda point: point.step)
    assert losses[-1].value < losses[0].value


def test_mlflow_shows_the_checkpoints_and_the_machine(stack: Stack, first: str) -> None:
    (tracked,) = stack.tracked(first)
    steps = [point.step for point in stack.mlflow.get_metric_history(tracked.info.run_id, "train/loss")]
    assert len(steps) == len(set(steps))  # none twice, although the killed attempt got further than its checkpoint
    found = stack.mlflow.search_logged_models([tracked.info.experiment_id])
    own = [model for model in found if model.source_run_id == tracked.info.run_id]
    kept = [model for model in own if "dropforge.deleted" not in model.tags]
    assert len({model.name for model in own}) == len(own) > len(kept)
    folder = f"runs/{tracked.data.tags[tracking.TAG_RUN]}/checkpoints/"
    there = {info.key.removeprefix(folder).partition("/")[0] for info in stack.connection.store.list(folder)}
    assert {model.name for model in kept} == there
    assert tracked.data.metrics["system/system_memory_usage_megabytes"] > 100


def test_the_run_keeps_which_objects_went_in(stack: Stack, first: str, samples: dict[int, dict[str, Path]]) -> None:
    (tracked,) = stack.tracked(first)
    kept = json.loads(Path(stack.mlflow.download_artifacts(tracked.info.run_id, "drop.json")).read_text())
    assert kept["id"] == tracked.data.tags[tracking.TAG_DROP]
    assert kept["bucket"] == stack.connection.settings.bucket
    assert samples[1].keys() <= {file["key"] for file in kept["files"]}
    assert all(file["content"].startswith("sha256:") and file["size"] > 0 for file in kept["files"])


def test_a_checkpoint_chosen_in_mlflow_is_evaluated_and_the_answer_stands_there(stack: Stack, first: str) -> None:
    (tracked,) = stack.tracked(first)
    stack.mlflow.set_tag(tracked.info.run_id, checkpoints.ASK, "last evaluate")

    def tags() -> dict[str, str]:
        return dict(stack.mlflow.get_run(tracked.info.run_id).data.tags)

    wait("the answer", lambda: checkpoints.ASK not in tags())
    losses = sorted(stack.mlflow.get_metric_history(tracked.info.run_id, "eval/loss"), key=lambda point: point.step)
    assert tags()[checkpoints.ANSWER].startswith(f"last evaluate: loss {losses[-1].value:.3f}")
    done = typed(stack, "checkpoints", tracked.data.tags[tracking.TAG_RUN])
    assert f"last evaluate: loss {losses[-1].value:.3f}" in done.stdout


def test_the_log_tells_who_failed_and_from_where_it_went_on(stack: Stack, first: str) -> None:
    log = "\n".join(stack.connection.airflow.log(FINETUNE, first, "train", 1))
    assert "SIGKILL" in log
    assert "failed, killed: " in log
    assert "step 5/60" in log or "step" in log
    assert "resuming from checkpoint step-" in stack.log(first, "train")


def test_the_registered_model_is_whole(stack: Stack, first: str, tmp_path: Path) -> None:
    (tracked,) = stack.tracked(first)
    version = stack.mlflow.get_model_version(FAMILY, tracked.data.tags[tracking.TAG_VERSION])
    prefix = version.source.removeprefix(f"{stack.connection.settings.root}/").rstrip("/") + "/"
    names = {info.key.removeprefix(prefix) for info in stack.connection.store.list(prefix)}
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= names
    for name in names:
        stack.connection.store.download(prefix + name, tmp_path / name)
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer("What does", return_tensors="pt")["input_ids"]
    assert model(input_ids=ids).logits.shape[-1] == model.config.vocab_size


def test_the_same_bytes_are_not_trained_twice(stack: Stack, first: str, samples: dict[int, dict[str, Path]]) -> None:
    again = stack.drop(FAMILY, "one-again", samples[1], FIRST)
    wait("intake", lambda: not list(stack.connection.store.list("ledger/inbox/")) and _seen(stack, "one-again"))
    assert ledger.owner_of(stack.connection.store, FAMILY, again.id) == first
    assert ledger.owner_of(stack.connection.store, FAMILY, again.id, 2) is None
    assert [run["state"] for run in stack.dag_runs(again)].count("success") == 1


def _seen(stack: Stack, name: str) -> bool:
    """Whether intake has looked at a drop: its log says so."""
    for run in stack.connection.airflow.newest_runs("dropforge_intake", 5):
        tasks = stack.connection.airflow.task_states("dropforge_intake", run["dag_run_id"])
        for task in tasks:
            if task["state"] in {"success", "skipped"} and task["try_number"]:
                lines = stack.connection.airflow.log("dropforge_intake", run["dag_run_id"], task["task_id"], 1)
                if any(f"/{name} " in line for line in lines):
                    return True
    return False


def test_a_cancelled_run_frees_the_machine(stack: Stack, first: str, samples: dict[int, dict[str, Path]]) -> None:
    drop = stack.drop(FAMILY, "two", samples[2], None)
    run = wait_for_run(stack.connection, drop)
    wait("training to begin", stack.ranks)
    stack.cancel(run)
    wait("the end of its processes", lambda: not stack.ranks())
    # Its last tasks are skipped, which Airflow by itself would call a success.
    assert stack.end(run) == "failed"
    assert stack.tracked(run)[0].info.status == "KILLED"


OWN = """
    def politely(row):
        row["messages"][0]["content"] = "Please: " + row["messages"][0]["content"]
        return row

    def brief(answer, reference):
        return 1.0 / (1 + len(answer))

    def doubled(figures):
        return 2 * figures["loss"]

    def tell(event, facts):
        print(f"own callback: {event} at {facts['step']}", flush=True)
"""


@pytest.fixture(scope="module")
def wheel(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A wheel of own functions in the bucket, as the form asks for it."""
    groups = {ROWS: "politely", ANSWERS: "brief", FIGURES: "doubled", CALLBACKS: "tell"}
    entries = {group: {name: f"own_rules:{name}"} for group, name in groups.items()}
    made = make_wheel(tmp_path_factory.mktemp("wheel"), {"own_rules/__init__.py": OWN}, entries, "own_rules")
    key = f"wheels/{Path(made['wheel']).name}"
    stack.connection.store.put(key, Path(made["wheel"]).read_bytes())
    return {"code_wheel": f"{stack.connection.settings.root}/{key}", "code_sha256": made["sha256"]}


@pytest.fixture(scope="module")
def formed(
    stack: Stack, first: str, unreadable: tuple[Path, str], samples: dict[int, dict[str, Path]], wheel: dict[str, str]
) -> str:
    """A second, different drop, trained from the form, with functions of the user's own.

    The turn of its family was left behind by a run that failed: nobody will give it up.
    """
    stack.connection.store.put(layout.turn_key(FAMILY), json.dumps({"owner": unreadable[1]}).encode())
    conf = {"preset": "tiny", "drop": f"{FAMILY}/two", "again": True, "train_max_steps": 3}
    conf |= {"train_learning_rate": 1e-5, "evaluate_max_rows": 40, **wheel}
    generation = {"rows": 2, "max_new_tokens": 4, "metrics": ["exact-match", "brief"]}
    (tracked,) = stack.tracked(first)
    holdout = f"{FAMILY}/{tracked.data.tags[tracking.TAG_DATASET]}"
    overrides = {"evaluate": {"generation": generation, "holdout": holdout}, "compute": {"tokenize_ahead": True}}
    return stack.connection.airflow.trigger(FINETUNE, {**conf, "overrides": overrides})


@pytest.fixture
def waiting_reaper(stack: Stack, unreadable: tuple[Path, str]) -> Iterator[str]:
    """A run of the reaper that found the job of a task that is over, and waits for the end of its grace."""
    _, failed = unreadable
    cluster = LocalCluster(stack.env["KUBEFLOW_TRAINING_HOME"])
    owner = Owner(FINETUNE, failed, "curate")
    job = pytorch_job(name="left", image="local", command=["sleep", "600"], cpus=0.1, memory_gb=0.1)
    job["metadata"] |= {"labels": owner.labels("0.0", 1), "annotations": owner.annotations("0.0", 1)}
    left = cluster.create(marked(job, stack.connection.airflow.variable(STORED_NAME)))
    try:
        run = stack.connection.airflow.trigger(REAP, {})

        def waits() -> bool:
            tasks = stack.connection.airflow.task_states(REAP, run)
            return any(task["state"] == "deferred" for task in tasks if task["task_id"] == "local")

        wait("the reaper to find the job", waits)
        yield run
    finally:
        cluster.delete("left", "default", uid=left.uid)


def test_a_run_that_was_left_open_in_mlflow_is_ended_while_another_reaper_waits(
    stack: Stack, unreadable: tuple[Path, str], waiting_reaper: str
) -> None:
    _, failed = unreadable
    tags = {tracking.TAG_DAG_RUN: failed, tracking.TAG_RUN: "left-open"}
    left = stack.mlflow.create_run(stack.mlflow.create_experiment("left-open"), tags=tags).info.run_id
    elsewhere = stack.mlflow.create_run("0", tags={**tags, tracking.TAG_DAG_RUN: "of another Airflow"}).info.run_id
    stack.connection.airflow.trigger(REAP, {})
    wait("the reaper", lambda: stack.mlflow.get_run(left).info.status == "FAILED")
    assert stack.mlflow.get_run(elsewhere).info.status == "RUNNING"
    assert stack.connection.airflow.dag_run(REAP, waiting_reaper)["state"] == "running"


def test_another_wheel_than_was_named_is_refused_before_anything_starts(
    stack: Stack, formed: str, wheel: dict[str, str]
) -> None:
    conf = {"preset": "tiny", "drop": f"{FAMILY}/two", "again": True, **wheel, "code_sha256": "0" * 64}
    run = stack.connection.airflow.trigger(FINETUNE, conf)
    assert stack.end(run) == "failed"
    assert stack.tasks(run)["plan"]["try_number"] == 1
    log = stack.log(run, "plan")
    assert f"has the SHA-256 {wheel['code_sha256']}, not {'0' * 64}" in log
    assert "Name the digest of the wheel that was reviewed, or give back its bytes" in log
    assert stack.tracked(run) == []


def test_the_form_starts_the_same_dag_with_another_preset(stack: Stack, formed: str) -> None:
    """The next version, and the alias moves only by the rule."""
    assert stack.end(formed) == "success"
    (tracked,) = stack.tracked(formed)
    assert tracked.data.params["base.scratch.vocab_size"] == "1024"
    assert tracked.data.params["train.max_steps"] == "3"
    # The rows of the first drop are the family's own here.
    assert {f"{side}/holdout/loss" for side in ("candidate", "champion")} <= tracked.data.metrics.keys()
    assert "holdout/bits_per_byte is worse than the champion's" in tracked.data.tags[tracking.TAG_VERDICT]
    assert tracked.data.tags[tracking.TAG_VERDICT].startswith("keep champion")
    assert stack.champion(FAMILY) != tracked.data.tags[tracking.TAG_VERSION]


def test_a_person_promotes_a_version_by_hand_and_rolls_it_back(stack: Stack, first: str, formed: str) -> None:
    assert stack.end(formed) == "success"
    (one,), (two,) = stack.tracked(first), stack.tracked(formed)
    older, newer = (run.data.tags[tracking.TAG_VERSION] for run in (one, two))

    answer = typed(stack, "rollback", FAMILY, "--to", newer, "--reason", "it is shorter", "--yes")
    assert answer.returncode == 0, answer.stderr
    assert stack.champion(FAMILY) == newer
    (moved,) = stack.connection.airflow.newest_runs(ROLLBACK, 1)
    mlflow = stack.connection.settings.tracking_uri.replace("http", "mlflow")
    assert stack.lineage(ROLLBACK, moved["dag_run_id"], "move", "COMPLETE") == (
        {(mlflow, f"models:/{FAMILY}/{newer}")},
        {(mlflow, f"models:/{FAMILY}@champion")},
    )
    answer = typed(stack, "rollback", FAMILY, "--reason", "[/red] worse after all", "--yes")
    assert answer.returncode == 0, answer.stderr
    assert f"from version {newer} back to version {older}" in answer.stdout
    assert stack.champion(FAMILY) == older
    told = json.loads(stack.mlflow.get_model_version(FAMILY, newer).tags[tracking.TAG_ROLLED_BACK])
    assert (told["to"], told["by"], told["reason"]) == (older, AIRFLOW_USER, "[/red] worse after all")
    answer = typed(stack, "rollback", FAMILY, "--reason", "too far", "--yes")
    assert answer.returncode == 2
    assert "no earlier 'champion'" in answer.stderr


def test_events_for_openlineage_lead_from_the_drop_to_the_version(stack: Stack, first: str, formed: str) -> None:
    assert stack.end(formed) == "success"
    (one,), (two,) = stack.tracked(first), stack.tracked(formed)
    bucket, mlflow = stack.connection.settings.root, stack.connection.settings.tracking_uri.replace("http", "mlflow")
    drop, data = (bucket, f"drops/{FAMILY}/one"), (bucket, f"datasets/{FAMILY}/{one.data.tags[tracking.TAG_DATASET]}")
    model = (bucket, f"runs/{one.data.tags[tracking.TAG_RUN]}/model")
    older, newer = ((mlflow, f"models:/{FAMILY}/{run.data.tags[tracking.TAG_VERSION]}") for run in (one, two))
    champion = (mlflow, f"models:/{FAMILY}@champion")

    assert stack.lineage(FINETUNE, first, "curate", "COMPLETE") == ({drop}, {data})
    assert stack.lineage(FINETUNE, first, "train", "FAIL") == ({data}, set())  # the try whose rank was killed
    assert stack.lineage(FINETUNE, first, "train", "COMPLETE") == ({data}, {model})
    assert stack.lineage(FINETUNE, first, "register", "COMPLETE") == ({model}, {older, champion})
    assert stack.lineage(FINETUNE, formed, "register", "COMPLETE")[1] == {newer}


def test_a_drop_that_led_to_no_dataset_is_named_and_no_event_holds_a_secret(
    stack: Stack, unreadable: tuple[Path, str]
) -> None:
    failed = stack.lineage(FINETUNE, unreadable[1], "curate", "FAIL")
    assert failed == ({(stack.connection.settings.root, "drops/bad-data/d")}, set())
    events = "".join(path.read_text() for path in (stack.folder / "lineage").iterdir())
    assert "bad-data" in events
    assert not [name for name, secret in asdict(read_secrets(stack.folder)).items() if secret in events]


def test_rows_are_tokenised_ahead_where_the_recipe_asks_for_it(stack: Stack, first: str, formed: str) -> None:
    assert stack.end(formed) == "success"
    assert "tokenising" in stack.log(formed, "tokenise")
    log = stack.log(formed, "train")
    assert "tokens and plan are those of" in log
    assert "tokenising" not in log
    assert "tokenising" not in stack.log(first, "tokenise")


def test_own_functions_of_a_wheel_take_part_in_the_whole_run(stack: Stack, formed: str, wheel: dict[str, str]) -> None:
    assert stack.end(formed) == "success"
    (tracked,) = stack.tracked(formed)
    metrics = tracked.data.metrics
    assert metrics["eval/doubled"] == pytest.approx(2 * metrics["eval/loss"], rel=1e-6)
    assert 0 < metrics["gen/brief"] <= 1
    for side in ("candidate", "champion"):
        assert metrics[f"{side}/doubled"] == pytest.approx(2 * metrics[f"{side}/loss"], rel=1e-6)
        assert f"{side}/gen/brief" in metrics
    answers = json.loads(stack.connection.store.get(f"runs/{tracked.data.tags[tracking.TAG_RUN]}/answers/step-3.json"))
    assert answers["data"]
    assert all("Please: " in str(row) for row in answers["data"])
    log = stack.log(formed, "train")
    assert all(f"own callback: {told}" in log for told in ("step at 1", "evaluation at 3", "checkpoint at 3"))
    version = stack.mlflow.get_model_version(FAMILY, tracked.data.tags[tracking.TAG_VERSION])
    for tags in (tracked.data.tags, version.tags):
        assert wheel["code_sha256"] in tags[tracking.TAG_CODE]
        assert "own_rules-1.0-py3-none-any.whl" in tags[tracking.TAG_CODE]


def test_a_drop_with_a_wrong_file_is_refused_until_its_repair_and_one_that_lacks_a_file_waits(stack: Stack) -> None:
    store = stack.connection.store
    success = b'[{"key": "rows.jsonl", "size": 22}]'
    store.put("drops/early/d/_SUCCESS", success)  # its file is still to come
    store.put("drops/late/d/rows.jsonl", b"{}")
    store.put("drops/late/d/_SUCCESS", success)
    wait("the refusal", lambda: store.stat("ledger/refused/late/d.json"))
    assert b"rows.jsonl" in store.get("ledger/refused/late/d.json")
    with pytest.raises(DropforgeError):
        wait_for_run(stack.connection, ledger_drop(stack), 0)
    assert list(store.list("ledger/drops/early/")) == []
    assert store.stat("ledger/refused/early/d.json") is None
    store.put("drops/early/d/rows.jsonl", b'{"text": "one two 3"}\n')
    store.put("drops/late/d/rows.jsonl", b'{"text": "one two 4"}\n')
    store.put("drops/late/d/_SUCCESS", success)
    for family in ("late", "early"):
        wait(f"the entry of {family} in the ledger", lambda of=family: list(store.list(f"ledger/drops/{of}/")))


def ledger_drop(stack: Stack):  # type: ignore[no-untyped-def]
    from dropforge.drop import Drop

    return Drop(family="late", drop="d", id="0" * 32, bucket=stack.connection.settings.bucket, files=())
