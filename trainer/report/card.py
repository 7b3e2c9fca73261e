"""The model card: what a model is, as far as the run knows it, in the form that the Hugging Face hub reads."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from dropforge.hub import is_hub_id
from dropforge.methods import ADAPTERS, LOW_RANK
from dropforge.run import RunSpec
from dropforge.shape import config_of, shape_of_config
from dropforge.text import as_cell, escape, shorten
from dropforge.wheel import ANSWERS, FIGURES, GROUPS, ROWS
from trainer.data.template import UNWRITTEN
from trainer.report.usage import usage

NAME: Final = "model/README.md"
_LABELS: Final = 100  # that are named, of up to 10,000
_METRICS: Final = (
    ("eval/loss", "Loss, nats per token", "loss"),
    ("eval/perplexity", "Perplexity", "perplexity"),
    ("eval/accuracy", "Accuracy of the next token", "accuracy"),
    ("eval/bits_per_byte", "Bits per byte", "bits_per_byte"),
    ("gen/exact-match", "Exact match of generated answers", "exact_match"),
    ("gen/token-f1", "Token F1 of generated answers", "f1"),
    ("gen/rouge-l", "ROUGE-L of generated answers", "rouge"),
    ("gen/valid-json", "Generated answers that are JSON", "valid_json"),
)
_OF_LABELS: Final = (
    ("eval/loss", "Loss, nats per row", "loss"),
    ("eval/accuracy", "Accuracy", "accuracy"),
    ("eval/macro_f1", "Macro F1", "f1"),
)
_PIPELINES: Final = {
    "causal-lm": "text-generation",
    "classification": "text-classification",
    "sequence-to-sequence": "text2text-generation",
}
_KINDS: Final = {
    "causal-lm": "A causal language model",
    "classification": "A classifier of texts",
    "sequence-to-sequence": "An encoder-decoder, which writes an answer to what it reads",
}
_SHOWN: Final = ("method", "sequence_length", "tokens_per_step", "rows_per_step", "learning_rate", "schedule", "warmup",
                 "weight_decay", "clip", "precision", "loss_on", "seed", "export")  # fmt: skip


_HOW: Final = {
    "lora": "low-rank adapters, merged into it",
    "dora": "low-rank adapters with magnitudes of their own (DoRA), merged into it",
    "qlora": "low-rank adapters learned beside a base in 4 bits (NF4), merged in fp32 into the values of these bits",
    "prefix": "a prefix of learned keys and values before each document, with no merged form: `model/` holds "
    "the prefix alone, and peft's `AutoPeftModelForCausalLM` puts it on the base",
}


def model_card(spec: RunSpec, report: Mapping[str, Any]) -> str:
    """The card as Markdown with front matter; a pure function.

    :param report: the content of `report.json`.
    """
    base, train = spec.recipe["base"], spec.recipe["train"]
    asked = _ASKED if _language(spec) else _ASKED.replace("continues rows", "labels rows").replace(_TRUE, _TRUE_LABELS)
    if _task(spec) == "sequence-to-sequence":
        asked = f"{_ASKED.replace('continues rows', 'answers rows')}\n\n{_USE}"
    sections = [
        ("", _front_matter(spec, report)),
        (f"# {spec.family}", _what(spec, base, train)),
        ("## How to use it", usage(spec)),
        ("## Use and limits", f"{asked}{_date(report)}"),
        ("## Licences", _licenses(spec, report)),
        ("## Data", _data(spec, report)),
        ("## Training", _training(report, train)),
        ("## Evaluation", _evaluation(report, (*_metrics(spec), *_own_metrics(report)))),
        ("## Checks", _checks(report)),
        ("## Environment", _environment(report)),
    ]
    return "\n\n".join(part for heading, text in sections for part in (heading, text) if part) + "\n"


def _task(spec: RunSpec) -> str:
    return str(spec.recipe.get("task", "causal-lm"))


def _language(spec: RunSpec) -> bool:
    return _task(spec) != "classification"


def _metrics(spec: RunSpec) -> tuple[tuple[str, str, str], ...]:
    return _METRICS if _language(spec) else _OF_LABELS


def _own_metrics(report: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Those of the user's wheel."""
    code = report.get("user_code") or {}
    found = code.get("provides") or {}
    groups = (("eval/", found.get(GROUPS[FIGURES], ())), ("gen/", found.get(GROUPS[ANSWERS], ())))
    return [(f"{kind}{name}", f"`{kind}{name}` of `{code['wheel']}`", name) for kind, names in groups for name in names]


_TRUE: Final = "whether what it says is true, safe or fair."
_TRUE_LABELS: Final = "whether the labels of other rows come out right, or of whom they come out wrong."
_ASKED: Final = (
    "<!-- Only you know this. Intended use; uses that are out of scope; whom the data speaks of and for; known bias; "
    "licence of the model. -->\n"
    "Not stated. The figures below say how well the model continues rows like those it was measured on, and nothing "
    f"about {_TRUE}"
)


_USE: Final = (
    "The encoder reads a prompt as it is, unless the base model brought a chat template of its own: "
    '`model.generate(**tokenizer(prompt, return_tensors="pt"))`. Of several messages the tokenizer\'s chat template '
    "makes one prompt."
)


def _date(report: Mapping[str, Any]) -> str:
    if not report.get("date"):
        return ""
    return (
        f" The chat template writes a date into each prompt, in training and measurement {report['date']}, and writes "
        "that one still: take the macro `strftime_now` from its head to have it ask the clock, which was not measured."
    )


def _licenses(spec: RunSpec, report: Mapping[str, Any]) -> str:
    """What is known of the licences of what went in; what follows for the model is for people to say."""
    base, terms = report["model"].get("base") or {}, (spec.recipe.get("data") or {}).get("license")
    rows = [("Rows", f"`{terms}`, as the recipe says" if terms else "not stated: `data.license` of the recipe")]
    if base:
        named = base.get("license")
        pinned = base.get("revision") or base.get("digest")
        rows.append(("Base model", f"`{named}`, as its own card says" if named else "not stated by its card"))
        rows.append(("Base model is pinned by", f"`{pinned}`" if pinned else "nothing: it is an address"))
    return _table(("", ""), rows)


def _front_matter(spec: RunSpec, report: Mapping[str, Any]) -> str:
    base, train = spec.recipe["base"], spec.recipe["train"]
    model = spec.start.origin.get("model") if spec.start and spec.start.origin else base.get("model")
    kind_of = _PIPELINES[_task(spec)]
    lines = [
        f"library_name: {'peft' if train['method'] == 'prefix' else 'transformers'}",
        f"pipeline_tag: {kind_of}",
    ]
    if license := (report["model"].get("base") or {}).get("license"):
        lines.append(f"license: {json.dumps(license)}")
    if model and is_hub_id(model):
        lines.append(f"base_model: {json.dumps(model)}")
        lines.append(f"base_model_relation: {'adapter' if train['method'] == 'prefix' else 'finetune'}")
    lines.append("tags:")
    lines += [
        f"- {json.dumps(tag)}"
        for tag in ("dropforge", spec.family, *([train["method"]] if train["method"] in ADAPTERS else []))
    ]
    after = (report.get("eval") or {}).get("after") or {}
    figures = [
        (kind, name, after[key]) for key, name, kind in _metrics(spec) if isinstance(after.get(key), int | float)
    ]
    if figures:
        lines += [
            "model-index:",
            f"- name: {json.dumps(spec.family)}",
            "  results:",
            "  - task:",
            f"      type: {kind_of}",
            "    dataset:",
            f"      name: {json.dumps(f'{spec.family}, evaluation split')}",
            f"      type: {json.dumps(spec.family)}",
            f"      revision: {json.dumps(spec.dataset_digest)}",
            "    metrics:",
        ]
        for kind, name, value in figures:
            lines += [f"    - type: {kind}", f"      name: {json.dumps(name)}", f"      value: {json.dumps(value)}"]
    return "\n".join(["---", *lines, "---"])


def _what(spec: RunSpec, base: Mapping[str, Any], train: Mapping[str, Any]) -> str:
    scratch = base.get("scratch")
    if scratch:
        config = config_of(scratch)
        shape = shape_of_config(config)
        sizes = f" (width {shape.hidden}, {shape.layers} layers, vocabulary of {shape.vocab})" if shape else ""
        origin = f"a new {config['model_type']} model{sizes}, trained from random weights"
    else:
        revision = base.get("revision")
        how = _HOW.get(train["method"]) or _all_but(train.get("freeze"))
        if base.get("new_tokens"):
            how += f"; new tokens: {', '.join(f'`{name}`' for name in base['new_tokens'])}"
        at = f" at revision `{revision}`" if revision else " (no revision was pinned)"
        named = f"`{base['model']}`{at}"
        if spec.start is not None and spec.start.kind != "base":
            from_base = spec.start.origin.get("model")
            named = f"`{base['model']}`, {spec.start}"
            named += f", which goes back to `{from_base}`" if from_base else ", which goes back to a new model"
        origin = f"{named}, fine-tuned: {how}"
    return (
        f"{_KINDS[_task(spec)]}: {origin}.\n\n"
        f"It was made by the run `{spec.run}` of Dropforge, code `{spec.code[:12]}`"
        + (f", git `{spec.git[:12]}`" if spec.git else "")
        + "."
    )


def _all_but(freeze: Mapping[str, Any] | None) -> str:
    if not freeze:
        return "all weights"
    blocks = [f"its first {freeze['blocks']} blocks"] if freeze["blocks"] else []
    return f"all weights but {' and '.join([*blocks, *(['its embeddings'] if freeze['embeddings'] else [])])}"


def _data(spec: RunSpec, report: Mapping[str, Any]) -> str:
    packing = report.get("packing") or {}
    train, held = packing.get("train") or {}, packing.get("eval") or {}
    drop = spec.drop.get("drop")
    rows: list[tuple[str, Any]] = [
        ("Dataset digest", f"`{spec.dataset_digest}`"),
        *([("Drop", f"`{spec.drop.get('family')}/{drop}`")] if drop else []),
        ("Training rows", _count(train.get("rows"))),
        ("Tokens in them, targets", f"{_count(train.get('tokens'))}, {_count(train.get('targets'))}"),
        ("Evaluation rows, targets", f"{_count(held.get('rows'))}, {_count(held.get('targets'))}"),
    ]
    for key, words in (
        ("without_targets", "Rows that teach nothing, left out"),
        *((key, f"Rows with {text.removeprefix('rows have ')}") for key, text in UNWRITTEN.items()),
        ("cut_conversations", "Conversations cut to the length of a row"),
        ("split_texts", "Texts split into several rows"),
        ("cut_rows", "Rows cut to what the model reads"),
    ):
        if train.get(key):
            rows.append((words, _count(train[key])))
    code = report.get("user_code") or {}
    if functions := (code.get("provides") or {}).get(GROUPS[ROWS]):
        names = ", ".join(f"`{name}`" for name in functions)
        rows.append(("Each row was changed by", f"{names} of `{code['wheel']}`, SHA-256 `{code['sha256']}`"))
    labels = list((train.get("labels") or {}).items())
    for label, number in labels[:_LABELS]:
        named = as_cell(shorten(label, 200)).replace("\\|", "|")  # every cell's are escaped below
        rows.append((f"Label {named}, training and evaluation rows", f"{number:,}, {held['labels'][label]:,}"))
    if len(labels) > _LABELS:
        rows.append((f"and {len(labels) - _LABELS:,} more labels", "`packing.train.labels` of `report.json` has them"))
    if held.get("unseen_labels"):
        rows.append(("Evaluation rows left out, whose label no training row has", _count(held["unseen_labels"])))
    return _table(("", ""), rows)


def _training(report: Mapping[str, Any], train: Mapping[str, Any]) -> str:
    attempts = report.get("attempts") or []
    resumes = [str(item["resumed_from"]) for item in attempts if item.get("resumed_from") is not None]
    wall, skipped = report.get("wall") or {}, report.get("skipped") or []
    rows: list[tuple[str, Any]] = [
        ("Optimizer steps", f"{report['steps']}; the weights are those of step {report['exported_step']}"),
        ("Ended", report["ended"]),
        ("Epochs", f"{report['epochs']:g}"),
        ("Tokens, targets", f"{_count(report['tokens'])}, {_count(report['target_tokens'])}"),
        ("Tokens per second in steps", _count(round(report["tokens_per_second"]))),
        *([("Model FLOPs utilisation", f"{report['mfu']:.1%}")] if report.get("mfu") is not None else []),
        ("Attempts", f"{len(attempts)}" + (f", resumed from step {', '.join(resumes)}" if resumes else "")),
        ("Skipped steps", f"{len(skipped)}" + (f": {_steps(skipped)}" if skipped else "")),
        *(
            [("Wall time", f"{wall['seconds']:.0f} s, {wall.get('restarts', 0.0):.0f} s of it lost to restarts")]
            if wall
            else []
        ),
    ]
    settings = [(f"`{key}`", f"`{train[key]}`") for key in _SHOWN if train.get(key) is not None]
    if train["method"] == "prefix":
        settings.append(("`prefix.tokens`", f"`{train['prefix']['tokens']}`"))
    if train["method"] in LOW_RANK:
        settings += [(f"`lora.{key}`", f"`{value}`") for key, value in train["lora"].items()]
    return f"{_table(('', ''), rows)}\n\n{_table(('Recipe', ''), settings)}"


def _evaluation(report: Mapping[str, Any], metrics: tuple[tuple[str, str, str], ...]) -> str:
    sides = [(report.get("eval") or {}).get(side) or {} for side in ("before", "after")]
    before, after = sides
    if not after:
        return "Not measured."
    rows = [
        (name, _figure(before.get(key)), _figure(after.get(key)))
        for key, name, _ in metrics
        if after.get(key) is not None
    ]
    how = f"{_count(after.get('rows'))} rows, {_count(after.get('target_tokens'))} targets; "
    how += f"arithmetic: {after.get('precision', '?')}"
    if "asked_rows" in after:
        how += f". Answers are written greedily, for {_count(after['asked_rows'])} of these rows"
    return f"{_table(('Metric', 'Before training', 'After'), rows)}\n\nMeasured on the evaluation split: {how}."


def _checks(report: Mapping[str, Any]) -> str:
    packing, model = report.get("packing") or {}, report["model"]
    if packing.get("packs"):
        packed = (
            "Rows hold several documents, which do not see each other: the largest difference of logits between "
            f"packed and alone is {packing.get('difference', 0.0):.2g}."
        )
    else:
        packed = f"Rows hold one document each: {packing.get('reason', 'packing is off')}."
    lines = [
        packed,
        f"Read back from where it is stored, the model's logits differ by at most {model['max_logit_difference']:.2g}.",
        f"Digest of its files: `{model['digest']}`.",
    ]
    if report.get("accumulation_difference") is not None:
        found = report["accumulation_difference"]
        lines.append(f"The gradient of a micro-batch and that of its halves differ by {found:.2g} of its norm.")
    return "\n".join(f"- {line}" for line in lines)


def _environment(report: Mapping[str, Any]) -> str:
    facts = {**(report.get("environment") or {}), **{"mode": (report.get("distribution") or {}).get("parallel")}}
    return _table(("", ""), [(key, f"`{value}`") for key, value in facts.items() if value is not None])


def _table(head: tuple[str, ...], rows: Iterable[tuple[Any, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(_cell(value) for value in row)} |" for row in lines)


def _cell(value: Any) -> str:
    return escape(" ".join(str(value).split())).replace("|", "\\|")


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else "?"


def _figure(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, int | float) else "not measured"


def _steps(skipped: list[Mapping[str, Any]]) -> str:
    numbers = [str(item["step"]) for item in skipped]
    return ", ".join(numbers[:20]) + (" and more" if len(numbers) > 20 else "")
