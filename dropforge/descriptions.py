"""What MLflow's pages say of a family, a run and a version, for people. Pure; tags and files are for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from dropforge.text import as_cell

if TYPE_CHECKING:
    from dropforge.promotion import Verdict
    from dropforge.run import RunSpec

_LONGEST: Final = 4900  # characters, of the 5,000 that MLflow's older servers take


def run_title(spec: RunSpec) -> str:
    """A run as people know it, such as `support/monday#2 · Qwen2.5-0.5B, lora`; its own name stays its tag."""
    drop, sweep = spec.drop.get("drop"), spec.drop.get("sweep")
    first = f"{spec.drop.get('family') or spec.family}/{drop}" if drop else spec.family
    first += f"#{spec.counter}" if spec.counter > 1 else ""
    base = str((spec.recipe.get("base") or {}).get("model") or "new model").rstrip("/").rpartition("/")[2]
    parts = [first, f"{base}, {(spec.recipe.get('train') or {}).get('method', '')}"]
    if isinstance(sweep, dict) and sweep.get("trial") is not None:
        parts.append(f"trial {sweep['trial']}")
    return " · ".join(parts)[:200]


def ended_title(spec: RunSpec, version: str, *, promoted: bool) -> str:
    """The same at its end. Which version has the alias may change later, and is on the version's page."""
    return f"{run_title(spec)} · version {version}, {'promoted' if promoted else 'not promoted'}"


def of_family(family: str) -> str:
    """The description of a family's registered model and of its experiment."""
    return (
        f"Models of the family `{family}`, made by Dropforge: each version is the end of a run, and the alias "
        f"`champion` is on the one that has beaten those before it.\n\n{_use(f'{family}@champion')}"
    )


def of_version(spec: RunSpec, verdict: Verdict, number: str) -> str:
    """The description of a registered version."""
    word = "Promoted" if verdict.promote else "Not promoted"
    head = f"{word}: {as_cell(verdict.reason)}\n\nMade by {as_cell(run_title(spec))} (`{spec.run}`)."
    use = _use(f"{spec.family}/{number}")
    table = verdict.as_markdown()
    whole = "\n\n".join([head, use, table])
    return whole if len(whole) <= _LONGEST else f"{head[: _LONGEST - len(use) - 2]}\n\n{use}"


def _use(address: str) -> str:
    return (
        f'```python\nimport mlflow\n\nmodel = mlflow.pyfunc.load_model("models:/{address}")\n'
        f'print(model.predict([{{"prompt": "..."}}]))\n```\n\n'
        "`README.md` beside its files says how to ask it, also with transformers, vLLM and `mlflow models serve`."
    )
