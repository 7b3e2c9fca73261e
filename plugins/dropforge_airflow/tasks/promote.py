"""What the measurement says, what the registry gets, and what people are told."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from dropforge import approval, gangs, layout, promotion
from dropforge.costs import Tariff
from dropforge.gangs import Gang
from dropforge.holdout import holdout_of
from dropforge.json_objects import read_object
from dropforge.moves import moving
from dropforge.recipe_approval import Approval
from dropforge.recipes.load import build_recipe
from dropforge.settings import from_env
from dropforge.small_data import too_small
from dropforge.store import Store
from dropforge.text import as_cell, as_line
from dropforge_airflow import connection, lineage
from dropforge_airflow.alerts import texts
from dropforge_airflow.alerts.callbacks import where
from dropforge_airflow.alerts.telling import tell
from dropforge_airflow.lineage import Lineage
from dropforge_airflow.tasks.failure import no_retry
from dropforge_airflow.tasks.opened import Opened, RunIdentity, read_spec
from dropforge_airflow.tasks.recipe import asked_approval
from dropforge_airflow.tasks.run import send_unsent
from dropforge_airflow.tasks.wall import wall_lines, whole_wall

if TYPE_CHECKING:
    from dropforge.promotion import Verdict
    from dropforge.run import RunSpec
    from dropforge.tracking import Champion, Registered

log = logging.getLogger(__name__)

LOSS = "eval/loss"


class Decided(TypedDict):
    """The verdict in one line; the whole of it is `verdict.json` in the run's folder."""

    promote: bool
    reason: str


class Listed(TypedDict):
    """What the registry made of the candidate. :param reason: of the verdict, with the reviewer's word."""

    version: str
    promoted: bool
    previous: str | None
    reason: NotRequired[str]


def decide(opened: Opened, families: str | None = None) -> Decided:
    """The task: judge candidate and champion by the recipe's policy, and show it in MLflow.

    :param families: folder of the families' files.
    """
    from dropforge import tracking

    settings = from_env()
    store = connection.open_store(settings.bucket)
    with no_retry():
        spec, evaluation, report, verdict = judge(store, opened, families)
        step = int(report["steps"])
        store.put(layout.verdict_key(spec.run), json.dumps(promotion.verdict_as_dict(verdict), indent=1).encode())
        tracking.log_evaluation(settings.tracking_uri, opened["mlflow_run"], spec.family, evaluation, verdict, step)
    log.info("%s: %s\n%s", "Promote" if verdict.promote else "Keep the champion", verdict.reason, verdict.as_markdown())
    for line in too_small(report["steps"], evaluation.get("rows")):
        log.warning("%s", line)
    return Decided(promote=verdict.promote, reason=verdict.reason)


def judge(
    store: Store, opened: RunIdentity, families: str | None = None, *, person: bool = True
) -> tuple[RunSpec, dict[str, Any], dict[str, Any], Verdict]:
    """Read what was measured and judge it: (run, evaluation.json, report.json, verdict).

    :param families: folder of the families' files. :param person: with a person's word, where one is wanted.
    """
    spec, run = read_spec(store, opened), opened["run"]
    evaluation = read_object(store, layout.evaluation_key(run))
    report = read_object(store, layout.report_key(run))
    pair = approval.Pair.of(report, evaluation)
    # A family's first candidate has nobody to share a tokenizer with.
    policy = promotion.policy_of(
        spec.recipe["promote"],
        same_tokenizer=evaluation.get("same_tokenizer") is not False,
        task=spec.recipe.get("task", "causal-lm"),
        held_out=holdout_of(spec.recipe) is not None,
    )
    base = (report.get("eval") or {}).get("before")
    gain = promotion.gain_from(evaluation.get("gain"))
    verdict = promotion.decide(
        evaluation["candidate"] | (used(store, spec) if any(map(promotion.is_cost, policy.guards)) else {}),
        evaluation.get("champion"),
        base,
        policy,
        gain,
        evaluation.get("slices") or (),
        evaluation.get("champion_days"),
        evaluation.get("shared"),
    )
    if person:
        verdict = with_word(store, spec, pair, verdict, families)
    return spec, evaluation, report, verdict


def with_word(store: Store, spec: RunSpec, pair: approval.Pair, verdict: Verdict, families: str | None) -> Verdict:
    """The verdict with a person's word, where one is wanted."""
    asked = approval_of(store, spec, families)
    if asked is None:
        return verdict
    answer, silence = approval.read(store, spec.run, pair), asked.otherwise == "promote"
    return approval.answered(verdict, answer, people=asked.people, silence=silence)


def used(store: Store, spec: RunSpec) -> dict[str, float]:
    """What the run's gangs have used, `cost/...`. All have ended by now, so it is the same when asked again."""
    known = gangs.kept(store, spec.run)
    tariff = Tariff.of(build_recipe(spec.recipe).compute)
    return gangs.used(known, time.time(), tariff).metrics("cost") if known else {}


def approval_of(store: Store, spec: RunSpec, families: str | None) -> Approval | None:
    """What holds about asking a person; None for not at all.

    The family's word of now counts before that of the run's recipe: a run may be older than its family's reviewers.

    :raises DropforgeError: if the family's recipe cannot be used.
    """
    of_family = asked_approval(store, spec.family, families)
    asked = spec.recipe["promote"].get("approval") if of_family is None else of_family
    return None if asked is None else Approval.model_validate(asked)


def holder(tracking_uri: str, spec: RunSpec, pair: approval.Pair) -> Champion | None:
    """The version that holds the alias, if it is this candidate's."""
    from dropforge import tracking

    found = tracking.champion(tracking_uri, spec.family, spec.recipe["promote"]["alias"])
    return found if found is not None and (found.run, found.digest) == (spec.run, pair.candidate) else None


def register(opened: Opened, families: str | None = None, outlet_events: Any = None, **context: Any) -> Listed:
    """The task: register the candidate; the alias moves only if the verdict says so.

    :param families: folder of the families' files.
    """
    from dropforge import tracking
    from dropforge_airflow.assets import MODELS

    settings = from_env()
    store = connection.open_store(settings.bucket)
    with no_retry():
        spec, evaluation, report, measured = judge(store, opened, person=False)
        pair = approval.Pair.of(report, evaluation)
        verdict = with_word(store, spec, pair, measured, families)
        if not verdict.promote and approval.read(store, spec.run, pair) is None:
            # Nobody is asked about the champion, also where the family has reviewers by now.
            verdict = verdict if holder(settings.tracking_uri, spec, pair) is None else measured
        alias = spec.recipe["promote"]["alias"]
        listed = tracking.register(
            settings.tracking_uri,
            spec,
            report,
            verdict,
            alias=alias,
            compared_with=evaluation.get("champion_version"),
            hold=moving(store, spec.family, f"run {spec.run}"),
        )
        of_run = settings.tracking_uri, opened["mlflow_run"]
        tracking.show_result(*of_run, spec, listed.version, promoted=listed.promoted)
    lineage.tell(lambda: _registered(settings.tracking_uri, spec, report, listed))
    word = f"now {alias}" if listed.promoted else f"not {alias}: {verdict.reason}"
    log.info("Version %s of %s is registered; it is %s", listed.version, spec.family, word)
    outlet_events[MODELS].extra = {
        "family": spec.family,
        "version": listed.version,
        "alias": alias if listed.promoted else None,
        "previous": listed.previous,
        "verdict": verdict.reason,
        "run": spec.run,
        "metrics": {name: value for name, value in evaluation["candidate"].items() if isinstance(value, int | float)},
    }
    if listed.promoted:
        tell(texts.promoted(where(context), listed.version, alias, listed.previous, verdict.reason), context)
    return Listed(version=listed.version, promoted=listed.promoted, previous=listed.previous, reason=verdict.reason)


def _registered(tracking_uri: str, spec: RunSpec, report: Mapping[str, Any], listed: Registered) -> Lineage:
    made = [lineage.version(tracking_uri, spec.family, listed.version)]
    if listed.promoted:
        made.append(lineage.alias(tracking_uri, spec.family, spec.recipe["promote"]["alias"]))
    return Lineage([lineage.at(report["model"]["uri"])], made)


def report(
    opened: Opened, listed: Listed, trained: Mapping[str, Any] | None = None, families: str | None = None
) -> str:
    """The task: a summary for people, in the log and as `summary.md` in the run's folder; its address.

    :param trained: the result of the training's task. :param families: folder of the families' files.
    """
    from dropforge import tracking

    settings = from_env()
    store = connection.open_store(settings.bucket)
    spec, evaluation, measured, unasked = judge(store, opened, person=False)
    verdict = with_word(store, spec, approval.Pair.of(measured, evaluation), unasked, families)
    if listed["promoted"] and not verdict.promote:  # the family has reviewers since
        verdict = unasked
    wall = whole_wall(opened.get("opened_at"), trained, measured.get("wall") or {})
    version = evaluation.get("champion_version")
    link = version and tracking.side_by_side(settings.tracking_uri, opened["mlflow_run"], spec.family, str(version))
    send_unsent(store, opened)
    health = _health(settings.tracking_uri, opened["mlflow_run"])
    failed = gangs.failed(gangs.kept(store, opened["run"]), "train")
    text = summary(spec, evaluation, measured, verdict, listed, wall, link, health, failed)
    key = layout.run_prefix(spec.run) + "summary.md"
    store.put(key, text.encode())
    log.info("%s", text)
    tracking.describe(settings.tracking_uri, opened["mlflow_run"], text)
    if wall:
        tracking.log_wall(settings.tracking_uri, opened["mlflow_run"], wall, int(measured["steps"]))
    return f"{settings.root}/{key}"


def _health(tracking_uri: str, mlflow_run: str) -> str:
    """What held the training back, on its MLflow run too; empty if that cannot be told, which ends nothing."""
    from dropforge import tracking
    from dropforge.watching.figures import verdict_of

    try:
        found = verdict_of(tracking_uri, mlflow_run)
        if found is not None:
            tracking.log_hours(tracking_uri, mlflow_run, found.metrics(), tracking.TAG_HEALTH, str(found))
    except Exception as error:
        log.warning("What held the training back is not known: %r", error)
        return ""
    return str(found or "")


def summary(
    spec: RunSpec,
    evaluation: Mapping[str, Any],
    report: Mapping[str, Any],
    verdict: Verdict,
    listed: Listed,
    wall: Mapping[str, float],
    link: str | None = None,
    health: str = "",
    failed: Sequence[Gang] = (),
) -> str:
    """The run in Markdown, in which what its pods wrote stays a text.

    :param link: to candidate and champion side by side. :param health: what held the training back.
    :param failed: its gangs that trained and failed.
    """
    alias = spec.recipe["promote"]["alias"]
    before, after = ((report.get("eval") or {}).get(side) or {} for side in ("before", "after"))
    resumed = report.get("resumed_from")
    lines = [
        f"# {spec.family}, version {listed['version']}{f' ({alias})' if listed['promoted'] else ''}",
        "",
        f"- Run `{spec.run}` on drop `{spec.drop.get('family')}/{spec.drop.get('drop')}`,"
        f" dataset `{spec.dataset_digest[:12]}`",
        f"- {_word(report['steps'])} steps, {report.get('tokens', 0):,} tokens in {report.get('seconds', 0):.0f} s",
        *([f"- Training {health}"] if health else []),
        f"- Evaluation loss {_number(before.get(LOSS))} before training, {_number(after.get(LOSS))} after",
        f"- Measured on {_word(evaluation.get('rows', '?'))} rows of this drop's evaluation split",
        *_held_out(spec, evaluation.get("holdout") or {}),
        *(f"- {line}" for line in too_small(report["steps"], evaluation.get("rows"))),
    ]
    if spec.start is not None:
        lines.append(f"- Began with {spec.start}")
    if resumed is not None:
        lines.append(f"- Resumed from step {_word(resumed)}; {len(report.get('attempts', []))} attempts")
    if failed:
        lost = gangs.lost_steps(failed)
        steps = "" if lost is None else f"; {lost} steps were done again"
        lines.append(f"- Trainings that failed: {', '.join(_word(gang.reason) for gang in failed)}{steps}")
    if listed["promoted"] and listed["previous"]:
        lines.append(f"- Took `{alias}` from version {listed['previous']}")
    if link:
        lines.append(f"- [Candidate and champion side by side]({link})")
    return "\n".join([*lines, "", verdict.as_markdown(), *(["", *wall_lines(wall)] if wall else []), ""])


def _held_out(spec: RunSpec, told: Mapping[str, Any]) -> list[str]:
    """What is said of the family's own evaluation rows, if it has some."""
    if not told:
        return []
    left = f"; {_word(told['trained_on'])} more are among the training rows" if told.get("trained_on") else ""
    return [f"- And on {_word(told['rows'])} rows of `{holdout_of(spec.recipe)!s:.54}`, the family's own{left}"]


def _word(value: Any) -> str:
    return as_cell(as_line(value))


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, int | float) else "not measured"
