"""Where everything lies in the bucket: the only module that spells an S3 key.

::

    drops/FAMILY/DROP/...                    what people upload; complete when _SUCCESS exists
    ledger/inbox/DIGEST.json                 a queue message that intake has not worked through yet
    ledger/drops/FAMILY/ID.json              one object per complete drop, or data named by a recipe: the truth
    ledger/pending/FAMILY/ID.json            the drop is waiting for a run
    ledger/in-flight/FAMILY/ID.json          the drop's event was sent, and its run has not ended
    ledger/claims/FAMILY/ID/N.json           the run that took the drop; N > 1 for forced re-runs
    ledger/proven/FAMILY/ID.json             a run has read the drop's files, and they are what it promised
    ledger/batches/FAMILY/ID.json            several drops that became one run by the family's window, and its recipe
    ledger/superseded/FAMILY/ID.json         a drop that gets no run because of a newer one, and why
    ledger/intake/FAMILY.json                what the family's rules of intake remember
    ledger/families/FAMILY.json              the family's recipe, and who set it; none where the installation's preset
                                             or the family's file is its recipe
    ledger/refused/FAMILY/DROP.json          why a drop could not be entered, until it is mended; of another bucket
                                             DROP@ALIAS.json
    ledger/messages/DIGEST.json              a message that is no S3 event, where there is no dead-letter queue
    ledger/approvals/RUN/                    what people said: start.json, and CANDIDATE-CHAMPION.json
    ledger/turns/FAMILY.json                 the run that compares and promotes now; one at a time
    ledger/moves/FAMILY.json                 who moves an alias of the family, for that moment
    ledger/openings/FAMILY.json              who opens a run of the family, for that moment
    ledger/retrains/FAMILY.json              the fine-tune run that the calendar started last
    ledger/retrains/FAMILY/DIGEST.json       one object per retrain that came to its end: how long, and with what
    drops/.probe/ID/_SUCCESS                 what `dropforge doctor --watcher` sends; no family's name begins with a dot
    ledger/probes/ID.json                    that the watcher had it, until the doctor has read it
    ledger/seen/DIGEST                       a _SUCCESS that polling has found, where there is no queue
    ledger/told/DIGEST.json                  an alert that was sent; no retry sends it again
    datasets/FAMILY/DIGEST/manifest.json     a dataset version, written last
    datasets/FAMILY/DIGEST/passed.json       the gate let it pass
    datasets/FAMILY/shards/SHA256.parquet    its rows, content-addressed
    datasets/FAMILY/DIGEST/tokens/IDENTITY/  its tokens for one tokenizer and length, for all runs; plan.json comes last
    datasets/FAMILY/state/SHA256.parquet     what later drops are compared with, content-addressed
    datasets/FAMILY/head.json                the newest version of those that hold the family's rows of all drops


    sweeps/FAMILY/ID/trials/N.json           which run a trial of a sweep is; ID is a digest of the sweep's own DAG run
    sweeps/FAMILY/ID/stops/N.json            why a trial is ended, written before it is
    sweeps/FAMILY/ID/result.json             what came of each trial, and which is the best
    curation/FAMILY/ID/IDENTITY/job.json     what a curation on Kubernetes has to do; its outcome is result.json
    runs/RUN/run.json, checkpoints/, report.json, model/
    runs/RUN/checkpoints/aside.json          checkpoints that a person has set aside, see dropforge.aside
    runs/RUN/began.json, attempts/N.json     when the run's first launcher started; each attempt, where it began
    runs/RUN/best/step-N-DIGEST.safetensors  weights of the best evaluations that a checkpoint may still export
    runs/RUN/failures/POD/START/             stacks and last collectives of an attempt that failed
    runs/RUN/failures/UID.json               what the cluster said of a job that failed: it, pods, events, nodes
    runs/RUN/unsent-metrics/, unsent-tags/   what MLflow did not take
    runs/RUN/labels.json                     labels of a classifier, in the order of their numbers
    runs/RUN/plan/IDENTITY/plan.json         tokens and packs, made once; the manifest is written last
    runs/RUN/evaluate.json, evaluation.json  what is to be measured, and what was; verdict.json is the judgement on it
    runs/RUN/evaluation-rows.json            what each row adds to the figures of candidate and champion
    runs/RUN/forecast.json                   what the run would take, as it was planned
    runs/RUN/gangs/UID.json                  what one job of the run has held, and how long
    runs/RUN/answers/step-N.json             what the model answered in an evaluation; candidate.json and champion.json
    runs/RUN/asked/step-N-VERB-NONCE/        what somebody asked for with a checkpoint: order.json, result.json
    runs/RUN/exports/step-N-DIGEST/          a checkpoint's model
    runs/RUN/logs/POD/START-NUMBER.log.gz    the whole log of a training pod, in pieces whose names sort in their order
    runs/RUN/profile.json                    a person's wish to have the next steps profiled, until it is taken
    runs/RUN/profiles/steps-A-B/             Chrome traces of a window of steps, one for each rank
    network/DIGEST.json                      the kept measurement of such nodes' network, which later ones are held to
    mlflow/                                  MLflow's artifacts
"""

from __future__ import annotations

import hashlib
import re
from typing import NamedTuple

from dropforge.errors import DataError

DROPS = "drops/"
SUCCESS = "_SUCCESS"
RECIPE = "recipe.yaml"
INBOX = "ledger/inbox/"
ENTRIES = "ledger/drops/"
PENDING = "ledger/pending/"
IN_FLIGHT = "ledger/in-flight/"
CLAIMS = "ledger/claims/"
REFUSED = "ledger/refused/"
MESSAGES = "ledger/messages/"
SEEN = "ledger/seen/"
SUPERSEDED = "ledger/superseded/"
RUNS = "runs/"
RULES = "ledger/intake/"
PROBES = "ledger/probes/"
LOGS = "logs/"  # in a run's folder
FAILURES = "failures/"
PROFILE_REQUEST = "profile.json"
EXPORT_FACTS = "dropforge-export.json"  # in the folder of a checkpoint's model, written last

_FAMILY = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,38}[a-z0-9])?")
_DROP = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_RUN = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,80}[a-z0-9])?")
_MANIFEST = re.compile(r"datasets/[^/]+/[0-9a-f]{64}/manifest\.json")
_PROBE = re.compile(rf"{DROPS}\.probe/([0-9a-f]{{32}})/{SUCCESS}")
_POD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


class DropName(NamedTuple):
    """The two names in a drop's prefix."""

    family: str
    drop: str


def check_family(family: str) -> str:
    """Return `family` if it can name a registered model, a key prefix and a Kubernetes label.

    :raises DataError: otherwise.
    """
    if not _FAMILY.fullmatch(family):
        raise DataError(
            f"family {family!r}",
            "a family is 1 to 40 lower-case letters, digits and hyphens, with no hyphen at its ends",
            "Choose a name such as `support-answers`",
        )
    return family


def check_drop(drop: str) -> str:
    """Return `drop` if it is a valid name of a drop.

    :raises DataError: otherwise.
    """
    if not _DROP.fullmatch(drop):
        raise DataError(
            f"drop {drop!r}",
            "a drop's name is 1 to 100 letters, digits, dots, hyphens and underscores, first a letter or digit",
            "Choose a name such as `2026-11-21`",
        )
    return drop


def family_prefix(family: str) -> str:
    """Folder of all uploads of a family."""
    return f"{DROPS}{check_family(family)}/"


def drop_prefix(family: str, drop: str) -> str:
    return f"{family_prefix(family)}{check_drop(drop)}/"


def success_key(family: str, drop: str) -> str:
    return drop_prefix(family, drop) + SUCCESS


def parse_drop_key(key: str) -> tuple[DropName, str] | None:
    """Split a decoded object key into the drop's names and the file's relative key.

    Returns None for a key that lies outside every drop, a folder marker included.
    """
    if not key.startswith(DROPS):
        return None
    parts = key.removeprefix(DROPS).split("/", 2)
    if len(parts) != 3 or not parts[2]:
        return None
    family, drop, relative = parts
    if not _FAMILY.fullmatch(family) or not _DROP.fullmatch(drop):
        return None
    return DropName(family, drop), relative


def probe_key(probe: str) -> str:
    """Of the object by which a doctor asks whether finished drops are seen. :param probe: 32 hexadecimal digits."""
    return f"{DROPS}.probe/{probe}/{SUCCESS}"


def probe_answer_key(probe: str) -> str:
    return f"{PROBES}{probe}.json"


def parse_probe_key(key: str) -> str | None:
    """Which probe a decoded object key is of; None if it is of none."""
    found = _PROBE.fullmatch(key)
    return found[1] if found else None


def inbox_key(digest: str) -> str:
    return f"{INBOX}{digest}.json"


def entries_prefix(family: str) -> str:
    """Folder of the family's drops in the ledger."""
    return f"{ENTRIES}{family}/"


def ledger_key(family: str, drop_id: str) -> str:
    return f"{entries_prefix(family)}{drop_id}.json"


def family_and_id(prefix: str, key: str) -> tuple[str, str]:
    """Family and drop id of a key `PREFIX/FAMILY/ID.json` in the ledger."""
    family, _, name = key.removeprefix(prefix).partition("/")
    return family, name.removesuffix(".json")


def pending_key(family: str, drop_id: str) -> str:
    return f"{PENDING}{family}/{drop_id}.json"


def proven_key(family: str, drop_id: str) -> str:
    return f"ledger/proven/{family}/{drop_id}.json"


def in_flight_key(family: str, drop_id: str) -> str:
    return f"{IN_FLIGHT}{family}/{drop_id}.json"


def batch_key(family: str, drop_id: str) -> str:
    return f"ledger/batches/{family}/{drop_id}.json"


def superseded_key(family: str, drop_id: str) -> str:
    """Of a drop that gets no run."""
    return f"{SUPERSEDED}{family}/{drop_id}.json"


def rules_key(family: str) -> str:
    """What the family's rules of intake remember."""
    return f"{RULES}{family}.json"


def family_recipe_key(family: str) -> str:
    """The recipe that was kept for the family."""
    return f"ledger/families/{check_family(family)}.json"


def refused_key(family: str, drop: str, place: str = "") -> str:
    """Of a drop that cannot be entered. :param place: alias of its bucket, if that is not the ledger's."""
    return f"{REFUSED}{family}/{drop}{'@' if place else ''}{place}.json"


def turn_key(family: str) -> str:
    return f"ledger/turns/{family}.json"


def move_key(family: str) -> str:
    """Who moves an alias of the family at this moment."""
    return f"ledger/moves/{family}.json"


def opening_key(family: str) -> str:
    """Who opens a run of the family at this moment."""
    return f"ledger/openings/{family}.json"


def retrain_key(family: str) -> str:
    """Which fine-tune run the calendar started last for the family."""
    return f"ledger/retrains/{family}.json"


def told_key(once: str) -> str:
    """That an alert was sent. :param once: names what happened."""
    return f"ledger/told/{hashlib.sha256(once.encode()).hexdigest()[:32]}.json"


def retrains_prefix(family: str) -> str:
    """Folder of the retrains of the family that came to an end."""
    return f"ledger/retrains/{family}/"


def is_manifest(key: str) -> bool:
    """Tell whether a key is that of a dataset version's manifest: jobs keep others below a version.

    A version's folder is named by its digest, so that no folder which pods of trainings may write to is one.
    """
    return bool(_MANIFEST.fullmatch(key))


def claims_prefix(family: str, drop_id: str) -> str:
    return f"{CLAIMS}{family}/{drop_id}/"


def claim_key(family: str, drop_id: str, counter: int) -> str:
    return f"{claims_prefix(family, drop_id)}{counter}.json"


def datasets_prefix(family: str) -> str:
    """Folder of all the family's dataset versions and of their shards."""
    return f"datasets/{family}/"


def dataset_prefix(family: str, digest: str) -> str:
    return f"{datasets_prefix(family)}{digest}/"


def manifest_key(family: str, digest: str) -> str:
    return dataset_prefix(family, digest) + "manifest.json"


def passed_key(family: str, digest: str) -> str:
    return dataset_prefix(family, digest) + "passed.json"


def shard_key(family: str, sha256: str) -> str:
    return f"datasets/{family}/shards/{sha256}.parquet"


def state_key(family: str, sha256: str) -> str:
    return f"datasets/{family}/state/{sha256}.parquet"


def head_key(family: str) -> str:
    return f"datasets/{family}/head.json"


def sweep_prefix(family: str, dag_run: str) -> str:
    """Folder of a sweep. :param dag_run: its own run in Airflow."""
    return f"sweeps/{check_family(family)}/{hashlib.sha256(dag_run.encode()).hexdigest()[:32]}/"


def curation_prefix(family: str, drop_id: str, identity: str) -> str:
    return f"curation/{family}/{drop_id}/{identity}/"


def run_prefix(run: str) -> str:
    return f"{RUNS}{run}/"


def run_key(run: str) -> str:
    return run_prefix(run) + "run.json"


def report_key(run: str) -> str:
    return run_prefix(run) + "report.json"


def evaluate_key(run: str) -> str:
    return run_prefix(run) + "evaluate.json"


def logs_prefix(run: str) -> str:
    return run_prefix(run) + LOGS


def pod_folder(pod: str) -> str:
    """A pod's name as one part of a key; what is no such name is bent until it is one, and told apart by its hash."""
    if _POD.fullmatch(pod):
        return pod
    digest = hashlib.sha256(pod.encode(errors="surrogateescape")).hexdigest()[:8]
    return f"pod-{re.sub(r'[^A-Za-z0-9._-]+', '-', pod)[:60].strip('-.')}-{digest}"


def log_key(pod: str, began: str, number: int) -> str:
    """Key, in the run's folder, of a piece of a pod's log.

    :param began: when this life of the pod began, like `20261121T100000.123456Z`; a later one sorts behind.
    """
    return f"{LOGS}{pod_folder(pod)}/{began}-{number:06d}.log.gz"


def profile_key(run: str) -> str:
    return run_prefix(run) + PROFILE_REQUEST


def verdict_key(run: str) -> str:
    return run_prefix(run) + "verdict.json"


def approval_key(run: str, candidate: str, champion: str | None) -> str:
    """Key of a person's word. :param candidate: digest of its model. :param champion: version of the champion."""
    return f"{_approvals(run)}{candidate[:16]}-{champion or 'none'}.json"


def confirmation_key(run: str) -> str:
    """Key of a person's word on whether the run may begin."""
    return f"{_approvals(run)}start.json"


def _approvals(run: str) -> str:
    """In the ledger: the run's own pods write its folder, and a yes is a person's."""
    return f"ledger/approvals/{run}/"


def network_key(digest: str) -> str:
    """Of the kept measurement of a network. :param digest: of the nodes' shape."""
    return f"network/{digest}.json"


def forecast_key(run: str) -> str:
    return run_prefix(run) + "forecast.json"


def gangs_prefix(run: str) -> str:
    return run_prefix(run) + "gangs/"


def gang_key(run: str, uid: str) -> str:
    """Key of what a job of the run has held. :param uid: of the job, from the cluster."""
    return f"{gangs_prefix(run)}{pod_folder(uid)}.json"


def failure_key(run: str, uid: str) -> str:
    """Key of what the cluster said of a job of the run that failed. :param uid: of the job, from the cluster."""
    return f"{run_prefix(run)}{FAILURES}{pod_folder(uid)}.json"


def is_run(run: str) -> bool:
    """Whether this can be the name of a run; nothing else may become a part of a key."""
    return _RUN.fullmatch(run) is not None


def asked_prefix(run: str, step: int, verb: str, nonce: str) -> str:
    """Folder of what was asked for with a checkpoint: order.json and result.json."""
    return f"{run_prefix(run)}asked/step-{step}-{verb}-{nonce}/"


def export_prefix(run: str, step: int, digest: str) -> str:
    """Folder of a checkpoint's model. :param digest: of the checkpoint."""
    return f"{run_prefix(run)}exports/step-{step}-{digest[:12]}/"


def evaluation_key(run: str) -> str:
    return run_prefix(run) + "evaluation.json"
