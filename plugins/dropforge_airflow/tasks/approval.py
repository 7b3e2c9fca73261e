"""The question that a person is asked before a promotion, and what becomes of the answer."""

from __future__ import annotations

import logging
from datetime import datetime

from dropforge import approval, layout
from dropforge.approval import Answer, Pair
from dropforge.json_objects import find_object
from dropforge.promotion import Verdict
from dropforge.run import RunSpec
from dropforge.settings import from_env
from dropforge_airflow import connection
from dropforge_airflow.asking import Question
from dropforge_airflow.tasks import promote
from dropforge_airflow.tasks.failure import no_retry
from dropforge_airflow.tasks.opened import Opened

log = logging.getLogger(__name__)


def question(opened: Opened, families: str | None = None) -> Question | str:
    """What to ask about a run; if nobody has to be asked, why not. :param families: folder of the families' files."""
    from dropforge import tracking

    store = connection.open_store(from_env().bucket)
    with no_retry():
        spec, evaluation, report, verdict = promote.judge(store, opened, person=False)
        asked = promote.approval_of(store, spec, families)
        if asked is None:
            return "Neither the family nor the recipe asks for approval"
        if not verdict.promote:
            return f"No approval is asked for: {verdict.reason}"
        pair = Pair.of(report, evaluation)
        alias = spec.recipe["promote"]["alias"]
        if (holder := promote.holder(from_env().tracking_uri, spec, pair)) is not None:
            return (
                f"Version {holder.version} is {alias} already, so no one is asked again. "
                f"`{tracking.rollback_command(spec.family, alias)}` takes it back"
            )
        link = pair.champion and tracking.side_by_side(
            from_env().tracking_uri, opened["mlflow_run"], spec.family, pair.champion
        )
        text = body(spec, pair, verdict, opened, link)
        yes = asked.otherwise == "promote"
        return Question(subject(spec, pair), text, pair.about, yes, asked.deadline_hours, asked.people)


def subject(spec: RunSpec, pair: Pair) -> str:
    alias = spec.recipe["promote"]["alias"]
    instead = f"instead of version {pair.champion}" if pair.champion else "as the family's first"
    return f"Make the model of {spec.run} {alias} of {spec.family}, {instead}?"


def body(spec: RunSpec, pair: Pair, verdict: Verdict, opened: Opened, link: str | None = None) -> str:
    """The verdict's table, and where to look."""
    lines = [
        f"- [The run in MLflow]({opened['mlflow_url']})",
        f"- Drop `{spec.drop.get('family')}/{spec.drop.get('drop')}`, dataset `{spec.dataset_digest[:12]}`",
        f"- Model `{pair.candidate[:12]}`",
    ]
    if pair.champion:
        page = opened["mlflow_url"].partition("#")[0]
        lines.append(f"- [Version {pair.champion}]({page}#/models/{spec.family}/versions/{pair.champion})")
        if link:
            lines.append(f"- [Candidate and champion side by side]({link}) in MLflow")
        lines.append(
            f"- In the terminal: `dropforge compare {spec.run} {spec.family}@{spec.recipe['promote']['alias']}`"
        )
    return "\n".join([verdict.as_markdown(), "", *lines])


def tell_asked(opened: Opened, text: str) -> None:
    """Show in MLflow that the run waits for a person."""
    from dropforge import tracking

    tracking.note(from_env().tracking_uri, opened["mlflow_run"], tracking.TAG_APPROVAL, text)


def withdraw(opened: Opened, about: str, families: str | None = None) -> None:
    """Have a person's word of before a clear count no more: who is asked anew has not said it.

    :param about: what the question is about.
    """
    store, pair = connection.open_store(from_env().bucket), Pair.asked(about)
    if pair is None:
        return
    # A try that was cut off behind the first of the two has left the verdict of before.
    told = find_object(store, layout.verdict_key(opened["run"])).get("promote") is True
    if approval.withdraw(store, opened["run"], pair) or told:
        log.info("The answer of before does not count any more: it is asked again")
        promote.decide(opened, families)


def take_answer(
    opened: Opened,
    about: str,
    families: str | None = None,
    *,
    promoted: bool,
    by: str | None,
    at: datetime,
    user: str | None = None,
) -> str:
    """Keep a person's word, and show it in MLflow; in one line.

    :param about: what the question was about. Pods may have written others into the run's folder since.
    :param by: who said it, by name. :param user: by id.
    """
    store = connection.open_store(from_env().bucket)
    _, evaluation, report, _ = promote.judge(store, opened, person=False)
    answer, now = Answer(promoted, by, f"{at:%FT%TZ}", user), Pair.of(report, evaluation)
    pair = Pair.asked(about) or now
    if pair != now:
        log.warning("The answer is about %s, and the run's folder has %s by now", pair.about, now.about)
    approval.write(store, opened["run"], pair, answer)
    show(opened, answer, families)
    return answer.told


def show(opened: Opened, answer: Answer, families: str | None = None) -> None:
    """Show a person's word in MLflow, and the verdict that follows from it."""
    from dropforge import tracking

    tracking.note(from_env().tracking_uri, opened["mlflow_run"], tracking.TAG_APPROVAL, answer.told)
    promote.decide(opened, families)
