"""Subject and body of each alert: plain text, short, and safe against what drops and people are called. Pure."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Literal

Occasion = Literal["failed", "approval", "promoted", "rejected"]
OCCASIONS: Final[tuple[Occasion, ...]] = ("failed", "approval", "promoted", "rejected")

_SUBJECT: Final = 100  # characters; SNS takes no more, and ASCII alone
_REASON: Final = 800
_NAME: Final = 140


@dataclass(frozen=True)
class Alert:
    """One message.

    :param occasions: whoever wants one of them gets it; a run that ends because its data are refused is of two.
    :param once: names what happened, so that a retry does not tell it again.
    """

    occasions: tuple[Occasion, ...]
    subject: str
    body: str
    once: str
    family: str | None = None

    def fill(self, template: Any) -> Any:
        """A notifier's argument with this alert in the place of its words in braces."""
        if isinstance(template, Mapping):
            return {key: self.fill(value) for key, value in template.items()}
        if isinstance(template, list):
            return [self.fill(value) for value in template]
        if not isinstance(template, str):
            return template
        # In one pass: a word in braces that came with a text stays what it is.
        words = self.words()
        parts = template.split("{")
        filled = [parts[0]]
        for part in parts[1:]:
            name, brace, rest = part.partition("}")
            filled.append(f"{words[name]}{rest}" if brace and name in words else "{" + part)
        return "".join(filled)

    def words(self) -> dict[str, str]:
        """What may stand in braces in a notifier's arguments; with `_html`, what Slack and mail may show."""
        return {
            "subject": self.subject,
            "body": self.body,
            "subject_html": html.escape(self.subject),
            "body_html": html.escape(self.body, quote=False),
            "family": self.family or "",
            "occasion": self.occasions[0],
        }


@dataclass(frozen=True)
class Where:
    """A DAG run, as alerts name it. :param page: its address in Airflow. :param mlflow: that of its MLflow run."""

    dag: str
    run: str
    clears: int = 0
    family: str | None = None
    drop: str | None = None
    page: str = ""
    mlflow: str = ""
    more: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.family or self.dag

    @property
    def once(self) -> str:
        """Names this run until somebody clears a part of it."""
        return f"{self.dag}/{self.run}/{self.clears}"

    def lines(self) -> list[str]:
        known = {"Family": self.family, "Drop": self.drop, **self.more, "Run": self.page or self.run}
        return [f"{name}: {plain(value, 500)}" for name, value in {**known, "MLflow": self.mlflow}.items() if value]


def failed(where: Where, task: str, reason: str, mend: str = "", *, attempt: int | None = None) -> Alert:
    """A run failed for good at a task."""
    tries = f", try {attempt}" if attempt and attempt > 1 else ""
    return Alert(
        ("failed",),
        _subject(f"{where.name}: run failed at {task}"),
        _body(f"The run failed at task {plain(task)}{tries}.", _why(reason, mend), where.lines()),
        f"failed/{where.once}",
        where.family,
    )


def refused_data(where: Where, task: str, cause: str, mend: str) -> Alert:
    """The data of a drop may not be trained on, so its run failed."""
    return Alert(
        ("rejected", "failed"),
        _subject(f"{where.name}: drop {where.drop or ''} is rejected at {task}"),
        _body(f"The data may not be trained on: task {plain(task)} refused them.", _why(cause, mend), where.lines()),
        f"failed/{where.once}",
        where.family,
    )


def rejected(family: str, drop: str, entry: str, cause: str, mend: str) -> Alert:
    """Intake refused a drop. :param entry: the message that told of it."""
    lines = [f"Family: {plain(family)}", f"Drop: {plain(drop)}", "Later: `dropforge letters` lists what was refused"]
    return Alert(
        ("rejected",),
        _subject(f"{family}: drop {drop} is rejected"),
        _body("The drop cannot be taken in, and no run begins.", _why(cause, mend), lines),
        f"rejected/{family}/{drop}/{entry}",
        family,
    )


def letters(reasons: Sequence[str], first: str) -> Alert:
    """Messages were put aside. :param reasons: of each. :param first: the number of the first."""
    number = f"{len(reasons)} messages were" if len(reasons) > 1 else "A message was"
    others = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
    return Alert(
        ("rejected",),
        _subject(f"{number} set aside by intake"),
        _body(
            f"{number} set aside: they lead to no run.",
            _why(f"{reasons[0]}{others}", "`dropforge letters` shows them, and sends one again with `--replay ID`"),
            [],
        ),
        f"letters/{first}",
    )


def approval(where: Where, task: str, question: str, page: str, until: datetime | None, otherwise: str) -> Alert:
    """A person's word is needed. :param otherwise: what silence means; empty if nothing."""
    silence = f"; without an answer: {plain(otherwise)}" if otherwise else ""
    lines = [plain(question, _REASON), "", f"Answer: {page}"]
    if until is not None:
        lines.append(f"Until: {until:%F %H:%M} UTC{silence}")
    return Alert(
        ("approval",),
        _subject(f"{where.name}: your approval is needed"),
        _body("A run awaits approval.", lines, where.lines()),
        f"approval/{task}/{where.once}",
        where.family,
    )


def promoted(where: Where, version: str, alias: str, previous: str | None, verdict: str) -> Alert:
    """A new version holds the alias."""
    instead = f"instead of version {plain(previous)}" if previous else "as the family's first"
    return Alert(
        ("promoted",),
        _subject(f"{where.name}: version {version} is {alias}"),
        _body(
            f"Version {plain(version)} is {plain(alias)} now, {instead}.",
            [f"Verdict: {plain(verdict, _REASON)}"],
            where.lines(),
        ),
        # A version is promoted once; to come back it is named by a person.
        f"promoted/{where.family}/{alias}/{version}",
        where.family,
    )


def rolled_back(where: Where, version: str, alias: str, previous: str | None, reason: str, by: str) -> Alert:
    """A person gave the alias to another version."""
    after = f", after version {plain(previous)}" if previous else ""
    return Alert(
        ("promoted",),
        _subject(f"{where.name}: {alias} is version {version} by hand"),
        _body(
            f"{plain(by)} made version {plain(version)} {plain(alias)}{after}.",
            [f"Reason: {plain(reason, _REASON)}"],
            where.lines(),
        ),
        f"moved/{where.family}/{alias}/{version}/{previous}/{where.dag}/{where.run}",
        where.family,
    )


def trial(text: str, run: str) -> Alert:
    """What the DAG that tries the notifiers sends."""
    return Alert(OCCASIONS, _subject("a trial of the alerts"), plain(text, _REASON), f"trial/{run}")


def plain(text: object, limit: int = _NAME) -> str:
    """In one line, without what moves cursors or headers, cut at a limit."""
    line = " ".join("".join(char if char.isprintable() else " " for char in str(text)).split())
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def _subject(text: str) -> str:
    line = plain(f"Dropforge: {text}", 1000).encode("ascii", "replace").decode()
    return line if len(line) <= _SUBJECT else f"{line[: _SUBJECT - 3]}..."


def _why(reason: str, mend: str) -> list[str]:
    lines = [f"Reason: {plain(reason, _REASON)}"]
    return [*lines, f"Fix: {plain(mend, _REASON)}"] if mend else lines


def _body(first: str, *parts: Sequence[str]) -> str:
    return "\n\n".join([first, *("\n".join(part) for part in parts if part)])
