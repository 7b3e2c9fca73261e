"""The order of an installation, as text that is a shell script: each step with its reason, commands and check. Pure."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Collection, Mapping

from dropforge.errors import DropforgeError
from dropforge.install.steps import STEPS, VARIABLES, Chart, Place, Size, Step, has_roles

_WIDTH = 110
_VALUES = "helm-values"


def chosen(size: Size, on: Place) -> tuple[Step, ...]:
    """The steps of such an installation, in order.

    :raises DropforgeError: for a pair that would not work.
    """
    if (size, on) == ("laptop", "eks"):
        raise DropforgeError(
            "size 'laptop' on 'eks'",
            "its tasks run as `airflow-scheduler`, which has no role there and so no access to the bucket",
            "Give --size team",
        )
    return tuple(step for step in STEPS if size in step.sizes and on in step.places)


def values_of(release: str, size: Size, on: Place, files: Collection[str]) -> tuple[str, ...]:
    """The files of values that a release gets, later ones first to win.

    :param files: that there are, as `helm-values/airflow.yaml`.
    """
    named = (f"{_VALUES}/{release}.yaml", f"{_VALUES}/{on}/{release}.yaml", f"{_VALUES}/{size}/{release}.yaml")
    return tuple(name for name in named if name in files)


def command(chart: Chart, size: Size, on: Place, files: Collection[str]) -> str:
    """Helm's command: the same for a first installation and for an upgrade."""
    words = [f"helm upgrade --install {chart.release} {chart.chart}"]
    if chart.repository:
        words.append(f"--repo {chart.repository}")
    if chart.version:
        words.append(f"--version {chart.version}")
    words.append(f"--namespace {chart.namespace} --create-namespace")
    words += [f"--values {name}" for name in values_of(chart.release, size, on, files)]
    settings = chart.settings if has_roles(size, on) else (*chart.settings, *chart.without_roles)
    words += [f'--set "{setting}"' for setting in settings]
    words.append("--wait --timeout 15m" if chart.wait else "--timeout 15m")
    return " \\\n  ".join(words)


def commands(step: Step, size: Size, on: Place, files: Collection[str]) -> tuple[str, ...]:
    """All commands of a step."""
    own = (command(step.chart, size, on, files),) if step.chart else ()
    before = step.before if has_roles(size, on) else step.without_roles or step.before
    return (*before, *own, *step.after)


def text(size: Size, on: Place, files: Collection[str], given: Mapping[str, str]) -> str:
    """The whole plan.

    :param given: variables whose value is known.
    :raises DropforgeError: as `chosen` does.
    """
    steps = chosen(size, on)
    lines = [
        f"# Dropforge, size {size}, on {on}: {len(steps)} steps, from the repository's folder.",
        "#",
        "#   set first:",
    ]
    body: list[str] = []
    for number, step in enumerate(steps, 1):
        chart = f" ({step.chart.chart} {step.chart.version})" if step.chart and step.chart.version else ""
        told = textwrap.wrap(f"{step.why}.", _WIDTH)
        body += ["", f"# {number}. {step.what}{chart}", *(f"#    {line}" for line in told)]
        body += [*commands(step, size, on, files), f"# check:\n{step.check}"]
    script = "\n".join(body)
    lines.append(f"SIZE={size}")
    for name, (example, what) in VARIABLES.items():
        if re.search(rf"\${{?{name}\b", script):
            value = shlex.quote(given[name]) if given.get(name) else example
            lines.append(f"{name}={value}  # {what}")
    return "\n".join(lines) + "\n" + script + "\n"
