"""A recipe is strict, names the nearest key, and refuses what cannot work."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dropforge.cli.submit import parse_change
from dropforge.errors import DropforgeError, RecipeError
from dropforge.families import parse_family
from dropforge.placement.teams_file import parse_teams
from dropforge.recipe import Recipe
from dropforge.recipes import load_recipe, parse_recipe, presets
from dropforge.recipes.load import (
    build_recipe,
    default_preset,
    key_names,
    merge,
    preset_values,
    put_first_drop_over,
    read_drop_recipe,
    read_pasted,
    read_yaml,
    resolve,
)
from dropforge.recipes.rules import check_startable
from dropforge.recipes.unknown_keys import WORDS, find_unknown
from dropforge.sweep import build_sweep

SCRATCH = "base: {scratch: {}}\n"
CONFIG = "base: {{scratch: {{config: {{model_type: llama, vocab_size: 400, {}}}}}}}"
MODEL = "base: {model: x}\n"
NUL = {"extends": "tiny", "data": {"text_column": "\0"}}
KUBERNETES = SCRATCH + "compute:\n  backend: kubernetes\n"


@pytest.mark.parametrize("name", presets())
def test_every_preset_loads(name: str) -> None:
    assert isinstance(load_recipe(name), Recipe)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            SCRATCH + "train: {learning_rat: 1.0}",
            r"`train.learning_rat`: it is unknown. Did you mean `train.learning_rate`",
        ),
        (SCRATCH + "learning_rate: 1.0", r"Did you mean `train.learning_rate`"),
        (SCRATCH + "trian: {}", r"Did you mean `train`"),
        ("base: {scratch: {hiden_size: 64}}", r"`base.scratch.hiden_size`.*`base.scratch.hidden_size`"),
        (SCRATCH + "zzzz: 1", r"Known here: task, base, data"),
        (SCRATCH + "train: {epochs: many}", r"`train.epochs`: .*valid number"),
        (SCRATCH + "train: {max_steps: true}", r"`train.max_steps`"),
        (SCRATCH + "train: {learning_rate: -1.0}", r"greater than 0"),
        (SCRATCH + "train: 3", r"`train`"),
        (SCRATCH + "promote: {alias: latest}", r"`promote.alias`: `latest` and names as `v1` are MLflow's own"),
        (SCRATCH + "promote: {alias: v12}", r"`promote.alias`: .* not 'v12'"),
        ("base: {}", r"neither is given. Give exactly one"),
        ("base: {model: x, scratch: {}}", r"both are given"),
        ("train: {}", r"`base`"),
        (SCRATCH + "train: {method: lora}", r"adapters on random weights"),
        (SCRATCH + "train: {method: dora}", r"adapters on random weights"),
        (SCRATCH + "train: {freeze: {blocks: 1}}", r"`train.freeze`: .*frozen they stay so"),
        ("base: {scratch: {}, new_tokens: [<a>]}", r"`base.new_tokens`: .*trained on the drop"),
        (MODEL + "train: {method: lora, freeze: {blocks: 1}}", r"`lora` freezes the whole base model anyway"),
        (MODEL + "train: {freeze: {}}", r"neither blocks nor embeddings"),
        ("base: {model: x, new_tokens: [<a>, <b>, <a>]}", r"'<a>' is there twice"),
        ("base: {model: x, new_tokens: [a b]}", r"`base.new_tokens.0`"),
        ("base: {model: x, new_tokens: [<a>]}\ntrain: {freeze: {embeddings: true}}", r"rows would stay as they begin"),
        ("base: {model: x, new_tokens: [<a>]}\ntrain: {method: prefix}", r"`train.method: prefix` trains no row"),
        (MODEL + "train: {method: prefix, prefix: {tokens: 0}}", r"`train.prefix.tokens`"),
        (MODEL + "train: {method: prefix, activation_checkpointing: full}", r"would meet the prefix twice"),
        (MODEL + "train: {method: prefix, compile: true}", r"`train.compile`: each block would be compiled for itself"),
        (SCRATCH + "train: {compile: true, activation_checkpointing: selective}", r"Use `none`, or `full`"),
        (SCRATCH + "train: {offload: activations}", r"`train.offload`: `compute.gpus` is 0"),
        (
            SCRATCH + "train: {offload: states}\ncompute: {gpus: 2, processes_per_node: 2, parallel: ddp}",
            r"`compute.parallel: ddp` keeps weights, gradients and optimizer state on each GPU",
        ),
        (
            SCRATCH + "train: {offload: activations, activation_checkpointing: selective}\ncompute: {gpus: 1}",
            r"`train.offload`: what .*selective` keeps stays on the GPU",
        ),
        (SCRATCH + "compute: {compile_cache: /cache}", r"`compute.compile_cache`: nothing is compiled"),
        (SCRATCH + "train: {compile: true}\ncompute: {compile_cache: cache}", r"`compute.compile_cache`"),
        (
            SCRATCH + "train: {compile: true}\ncompute: {backend: kubernetes, compile_cache: /models/cache, "
            "volumes: [{claim: models, path: /models}]}",
            r"pods may not write to /models, where models is mounted. Give that volume `read_only: false`",
        ),
        (
            SCRATCH + "compute: {backend: kubernetes, data_cache: /data/cache, volumes: [{claim: c, path: /data}]}",
            r"`compute.data_cache`: pods may not write to /data, where c is mounted",
        ),
        (
            SCRATCH + "compute: {backend: kubernetes, data_cache: /data}",
            r"`compute.data_cache`: /data is in none of the `volumes`, and is lost with each pod",
        ),
        (SCRATCH + "compute: {data_cache: data}", r"`compute.data_cache`"),
        (
            KUBERNETES + "  nodes: 2\n  volumes: [{claim: c, path: /c, storage: disk}]",
            r"`compute.volumes`: c is a disk of one node \(ReadWriteOnce\), and 2 nodes would mount it. Claim",
        ),
        (
            KUBERNETES + "  volumes: [{claim: c, path: /c, read_only: false, storage: node}]\n"
            "train: {checkpoints: /c/checkpoints}",
            r"`train.checkpoints`: c is each node's own disk: the next attempt may be on another node",
        ),
        (
            KUBERNETES + "  data_cache: /c\n  volumes: [{claim: c, path: /c, read_only: false, storage: virtiofs}]",
            r"`compute.data_cache`: c is virtiofs, whose locks may hold within a node only.*`storage: node`",
        ),
        (
            KUBERNETES + "  volumes: [{claim: c, path: /c, storage: nfs}, {claim: c, path: /d, storage: lustre}]",
            r"`compute.volumes`: c is said to be `nfs` and `lustre`",
        ),
        (KUBERNETES + "  volumes: [{claim: c, path: /c, storage: floppy}]", r"`compute.volumes.0.storage`"),
        (SCRATCH + "compute: {data_cache: /data, data_cache_gb: 0}", r"`compute.data_cache_gb`"),
        (MODEL + "train: {method: prefix}\nevaluate: {generation: {}}", r"not written with a prefix"),
        (MODEL + "train: {method: dpo}", r"learns from preferences.*Fine-tune.*TRL's DPOTrainer"),
        (MODEL + "train: {method: GRPO}", r"`GRPO` learns from preferences or rewards.*TRL's GRPOTrainer"),
        (MODEL + "train: {precision: fp8}", r"`train.precision`: `fp8` is not done: .*the rows beside it.*Use `bf16`"),
        (MODEL + "train: {precision: float8_e4m3fn}", r"`train.precision`: `float8_e4m3fn` is not done"),
        (MODEL + "train: {precision: nvfp4}", r"`train.precision`: `nvfp4` is not done"),
        (MODEL + "train: {precision: fp64}", r"`train.precision`: it should be 'fp32', 'tf32', 'bf16'"),
        (MODEL + "evaluate: {precision: fp8}", r"`evaluate.precision`: `fp8` is not done"),
        (MODEL + "train: {method: lorra}", r"`train.method`: it should be 'full', 'lora'"),
        ("base: {scratch: {hidden_size: 64, heads: 7}}", r"does not divide into 7 heads"),
        ("base: {scratch: {context: 64}}", r"longer than the model's context of 64"),
        ("base: {scratch: {config: {vocab_size: 400}}}", r"`base.scratch.config.model_type`: it is missing"),
        ("base: {scratch: {config: {model_type: llama}}}", r"`base.scratch.config.vocab_size`: it must be a number"),
        (
            "base: {scratch: {config: {model_type: llama, vocab_size: 300, num_hidden_layers: 1000000000}}}",
            r"`base.scratch.config.num_hidden_layers`: 1,000,000,000 is more than the 20,000",
        ),
        (
            "base: {scratch: {config: {model_type: llama, vocab_size: 300, hidden_size: many}}}",
            r"`base.scratch.config.hidden_size`: 'many' is a text",
        ),
        (CONFIG.format("max_position_embeddings: 64"), r"context of 64. Raise `base.scratch.config`"),
        (
            "base: {scratch: {layers: 2, config: {model_type: llama, vocab_size: 400}}}",
            r"`base.scratch.layers`: .*says the sizes",
        ),
        (CONFIG.format("'no key': 1"), r"`base.scratch.config`: .*'no key' is no key of a config"),
        (CONFIG.format("a: .inf"), r"`base.scratch.config.a.*finite number"),
        (CONFIG.format("a: {b: {c: {d: {}}}}"), r"`base.scratch.config`: .*nested too deep"),
        ("base: {model: /a/b, revision: abc}", r"only a Hugging Face id has revisions"),
        (SCRATCH + "train: {tokens_per_step: 256}", r"less than one sequence of 512"),
        (SCRATCH + "train: {tokens_per_step: 5000}", r"no multiple of the 512.*Set it to 4608 or 5120"),
        (SCRATCH + "train: {tokens_per_step: 512, rows_per_step: 1}", r"`train.rows_per_step`: both are given"),
        (SCRATCH + "train: {epochs: 1, max_steps: 9}", r"`train.epochs` and `train.max_steps`: both are given"),
        (SCRATCH + "train: {max_steps: 9, warmup: 9}", r"do not fit into 9 steps"),
        (SCRATCH + "train: {warmup: 1.5}", r"1.5 is neither a share of the steps nor a number"),
        (SCRATCH + "train: {schedule: plateau}", r"`schedule: plateau` needs evaluations"),
        (SCRATCH + "train: {early_stopping: {}}", r"`early_stopping` needs evaluations"),
        (SCRATCH + "train: {profile: 9-8}", r"`train.profile`"),
        (SCRATCH + "train: {profile: 1-3}", r"first step is like no other"),
        (SCRATCH + "train: {export: best}", r"`export: best` needs evaluations"),
        (SCRATCH + "train: {checkpoints: here}", r"`train.checkpoints`: it is no absolute folder and no `s3://`"),
        (SCRATCH + "train: {checkpoints: s3://id:key@bucket/x}", r"`train.checkpoints`: an address carries no cred"),
        (SCRATCH + "train: {checkpoints: s3://}", r"`train.checkpoints`: it names no bucket"),
        (SCRATCH + "train: {fast_checkpoints: {folder: s3://bucket, every: 5}}", r"folder`: it is no absolute folder"),
        (
            SCRATCH + "train: {checkpoints: /disk/, fast_checkpoints: {folder: /disk, every: 5}}",
            r"`train.fast_checkpoints.folder`: it is the durable place",
        ),
        (SCRATCH + "train: {fast_checkpoints: {folder: /dev/shm, every: 25}}", r"no more often than .* of 25"),
        (SCRATCH + "task: seq2seq", r"`task`"),
        (SCRATCH + "promote: {metric: eval/macro_f1}", r"a language model has none"),
        (MODEL + "task: sequence-to-sequence\npromote: {metric: eval/macro_f1}", r"a language model has none"),
        (SCRATCH + "task: sequence-to-sequence", r"`base.scratch`: .*Give `base.scratch.config` with .* t5 or bart"),
        (MODEL + "task: sequence-to-sequence\ntrain: {loss_on: all}", r"`train.loss_on`: the prompt is what the enc"),
        (MODEL + "task: sequence-to-sequence\ntrain: {method: prefix}", r"`train.method`: a prefix is trained for lan"),
        (MODEL + "task: sequence-to-sequence\ntrain: {compile: true}", r"`train.compile`: .* were not tried compiled"),
        (MODEL + "task: sequence-to-sequence\ntrain: {precision: fp16}", r"`train.precision`: .* the range of fp16"),
        (MODEL + "task: sequence-to-sequence\nevaluate: {precision: fp16}", r"`evaluate.precision`: .* range of fp16"),
        (
            "base: {model: x, new_tokens: [<a>]}\ntask: sequence-to-sequence\ntrain: {method: lora}",
            r"`base.new_tokens`: with `lora` their rows",
        ),
        ("base: {scratch: {architecture: distilbert}}", r"an encoder, which cannot continue a text"),
        (SCRATCH + "task: classification\ntrain: {loss_on: all}", r"`train.loss_on`: a classifier learns the label"),
        (SCRATCH + "task: classification\npromote: {metric: eval/perplexity}", r"a classifier continues none"),
        (SCRATCH + "task: classification\npromote: {metric: eval/bits_per_byte}", r"a classifier continues none"),
        (
            SCRATCH + "task: classification\npromote: {metric: gen/rouge-l}",
            r"`promote.metric`: .* a classifier writes none",
        ),
        (
            SCRATCH + "task: classification\nevaluate: {generation: {metrics: [rouge-l]}}",
            r"`evaluate.generation`: a classifier gives labels",
        ),
        (MODEL + "task: classification\ntrain: {method: prefix}", r"`train.method`: a classifier's head is new"),
        (SCRATCH + "train: {eval_every: 10 hours}", r"`train.eval_every`"),
        (SCRATCH + "train: {checkpoint_every: 0}", r"`train.checkpoint_every`"),
        (SCRATCH + "evaluate: {max_batches: 1}", r"measured on fewer rows than the candidate"),
        (SCRATCH + "promote: {guards: [{metric: eval/loss}]}", r"it guards nothing: give it at_least"),
        (SCRATCH + "promote: {confidence: 1.0}", r"promote\.confidence"),
        (
            SCRATCH + "promote: {confidence: 0.9}\nevaluate: {max_rows: 19}",
            r"`promote\.confidence`: the 19 rows of `evaluate\.max_rows` are too few",
        ),
        (
            SCRATCH + "promote: {confidence: 0.9, metric: gen/rouge-l}\nevaluate: {generation: {rows: 8}}",
            r"the 8 rows of `evaluate\.generation\.rows` are too few",
        ),
        (
            SCRATCH + "promote: {guards: [{metric: eval/loss, at_least: 2.0, at_most: 1.0}]}",
            r"nothing is at least 2 and at most 1",
        ),
        (
            SCRATCH + "promote: {guards: [{metric: eval/loss, at_most: 3.0}, {metric: gen/rouge-l, at_least: 0.1}]}",
            r"`promote\.guards\[1\]\.metric`: `gen/rouge-l` is to decide, and nothing measures it",
        ),
        (
            SCRATCH + "task: classification\npromote: {guards: [{metric: eval/perplexity, at_most: 9.0}]}",
            r"`promote\.guards\[0\]\.metric`: .* a classifier continues none",
        ),
        (SCRATCH + "promote: {metric: gen/rouge-l}", r"nothing measures it. Add `rouge-l` to `evaluate.generation"),
        (
            SCRATCH + "promote: {metric: gen/valid-json}\nevaluate: {generation: {metrics: [rouge-l]}}",
            r"`promote.metric`: `gen/valid-json` is to decide, and nothing measures it",
        ),
        (
            SCRATCH + "evaluate: {generation: {metrics: [bleu]}}",
            r"`evaluate.generation.metrics`: .bleu. is none of ours",
        ),
        (SCRATCH + "evaluate: {generation: {metrics: []}}", r"`evaluate.generation.metrics`: .*at least 1"),
        (
            SCRATCH + "evaluate: {generation: {metrics: [rouge-l, rouge-l]}}",
            r"metrics`: one of them is listed twice",
        ),
        (SCRATCH + "evaluate: {max_rows: 5, generation: {rows: 6}}", r"more than the 5 of .*Set it to 5 or less"),
        (SCRATCH + "evaluate: {generation: {every: 2}}", r"every`: there are no evaluations on the way"),
        (
            SCRATCH + "train: {eval_every: 5, export: best}\nevaluate: {generation: {every: 2}}",
            r"with `early_stopping` or `export: best` each evaluation may be that of the model",
        ),
        (SCRATCH + "evaluate: {generation: {max_new_tokens: 512}}", r"no room for a prompt in a context of 512"),
        (SCRATCH + "compute: {nodes: 9}", r"leave some of 9 ranks idle"),
        (SCRATCH + "compute: {gpus: 8}", r"1 ranks cannot share 8 GPUs"),
        (SCRATCH + "compute: {idle: {}}", r"`compute\.idle`: `compute\.gpus` is 0, .*Remove it, or ask for GPUs"),
        (SCRATCH + "compute: {gpus: 1, idle: {minutes: 0}}", r"compute\.idle\.minutes"),
        (SCRATCH + "compute: {gpus: 1, idle: {below_percent: 101}}", r"compute\.idle\.below_percent"),
        (SCRATCH + "compute: {parallel: fsdp}", r"`compute.parallel`: `fsdp` needs several ranks"),
        (SCRATCH + "compute: {nodes: 2, parallel: ddp, shard_group: 2}", r"only `compute.parallel: hybrid` has groups"),
        (SCRATCH + "compute: {nodes: 2, parallel: hybrid}", r"2 ranks do not make several groups of 1"),
        (SCRATCH + "compute: {nodes: 4, parallel: hybrid, shard_group: 3}", r"4 ranks .* several groups of 3"),
        (SCRATCH + "compute: {nodes: 2, parallel: fsdp2}", r"`compute.parallel`"),
        (SCRATCH + "compute: {image: mine}", r"the local backend runs no image"),
        (SCRATCH + "compute: {queue: gpus}", r"the local backend has neither claims nor queues"),
        (SCRATCH + "compute: {priority: high}", r"`compute.priority`: it is one of a queue, and `compute.queue` names"),
        (KUBERNETES + "  queue: Team A", r"`compute.queue`: string should match"),
        (KUBERNETES + "  queue: a\n  priority: 100", r"`compute.priority`: it should be a valid string, not 100"),
        (KUBERNETES + "  volumes: [{claim: x, path: /x, sub_path: ../etc}]", r"`compute.volumes.0.sub_path`"),
        (KUBERNETES + "  volumes: [{claim: x, path: x}]", r"`compute.volumes.0.path`"),
        (SCRATCH + "curation: {engine: ray}", r"`curation.engine`: .*'embedded', 'spark' or 'auto'"),
        (SCRATCH + "curation: {spark: {driver_memory: 2 GB}}", r"`curation.spark.driver_memory`"),
        (SCRATCH + "curation: {dedup: {threshold: 0.4}}", r"`curation.dedup.threshold`: .*equal to 0.5"),
        (SCRATCH + "curation: {dedup: {treshold: 0.8}}", r"Did you mean `curation.dedup.threshold`"),
        (SCRATCH + "curation: {dedup: {shingle: sentence}}", r"`curation.dedup.shingle`: .*'word' or 'character'"),
        (
            SCRATCH + "curation: {dedup: {}, exact_duplicates: keep}",
            r"nearly the same removed. Use `exact_dup.*: drop`",
        ),
        (SCRATCH + "curation: {dedup: {bands: 200, rows_per_band: 8}}", r"are 1600 minima a row, and at most 1024"),
        (
            SCRATCH + "curation: {dedup: {threshold: 0.5}}",
            r"8 rows find 5% of the pairs .* of 0.5. Set it to 4 or less",
        ),
        (SCRATCH + "curation: {pii: {kinds: [email, email]}}", r"`curation.pii.kinds`: 'email' is listed twice"),
        (SCRATCH + "curation: {pii: {kinds: [mail]}}", r"curation.pii.kinds"),
        (SCRATCH + "curation: {pii: {key_env: 'a b'}}", r"curation.pii.key_env"),
        (SCRATCH + "curation: {prefer: [a, b, a]}", r"`curation.prefer`: 'a' is listed twice"),
        ("extends: sampel", r"Did you mean 'sample'"),
        ("extends: /etc/passwd", r"there is no preset"),
        ("- 1", r"not a YAML mapping"),
        ("a: [", r"not a YAML mapping"),
        (SCRATCH + "train: {learning_rate: .inf}", r"`train.learning_rate`: .*finite"),
        (SCRATCH + "train: {epochs: 1e12}", r"`train.epochs`: .*less than or equal to 1000"),
        (SCRATCH + "train: {seed: 99999999999999999999}", r"`train.seed`"),
        ("base: {model: x}\ntrain: {lora: {targets: []}}", r"`train.lora.targets`: .*at least 1"),
        ("a: &x 1\nb: *x", r"aliases are not allowed"),
        (SCRATCH + SCRATCH, r"appears twice"),
        ("a: !!bool x", "it is not a YAML mapping"),
        ("a: !!int ''", "it is not a YAML mapping"),
        ("a: !!timestamp x", "it is not a YAML mapping"),
        (SCRATCH + "train: {epochs: " + "1:" * 300 + "1.0}", r"recipe key `train.epochs`: .*'1:1:1"),
        (SCRATCH + "train: {max_steps: 1:30}", r"recipe key `train.max_steps`: .*not '1:30'"),
        ("a: 1\nb: !!float " + "1:" * 300 + "1.0", r"it is not a YAML mapping \(.*float, line 2\)"),
        ("a: 2001-99-99", r"it is not a YAML mapping \(month .*, line 1\)"),
        ("a: !!set [1]", "it is not a YAML mapping"),
        ("[1]: 2", "a key is no plain value"),
        ("!!python/object/apply:os.system ['true']", r"not a YAML mapping"),
        ("#" + "x" * 70_000, r"larger than 64 KiB"),
        (SCRATCH + "train: {max_steps: " + "9" * 60 + "}", r"`train.max_steps`: it is a number of about 60"),
        (SCRATCH + "train: {seed: 0x" + "f" * 4000 + "}", r"recipe key `train.seed`: it is a number of about 4817"),
        (
            "base: {scratch: {config: {model_type: llama, vocab_size: -0x" + "f" * 4000 + "}}}",
            r"`base.*vocab_size`: it is",
        ),
        ("extends: 0x" + "f" * 5000, r"a number of 5002 characters, line 1"),
        ("extends: 0b" + "1_" * 3000, r"a number of 6002 characters, line 1"),
        ("a: 1\nextends: 0" + "7" * 5000, r"a number of 5001 characters, line 2"),
        ("extends: " + "9" * 5000, r"a number of 5000 characters, line 1"),
        ("extends: 0x" + "f" * 4000, r"recipe key `extends`: it is a number of about 4817"),
        ("extends: 1_" + "000_" * 6 + "0", r"recipe key `extends`: it is a number of about 19"),
        ("extends: 7", r"recipe key `extends`: it is no preset's name, but a int. Presets:"),
        ("extends: [tiny]", r"recipe key `extends`: it is no preset's name, but a list"),
        (SCRATCH + "data: {mix: {? 0x" + "f" * 4000 + " : 1}}", r"recipe key `data.mix`: it is a number of about"),
        ('base: {model: "\\ud800"}', r"recipe key `base.model`: .*ud800' holds half of a character"),
        ('"\\udfff": 1', r"holds half of a character"),
        (SCRATCH + 'data: {prompt_template: "{prompt}\\0 and"}', r"recipe key `data.prompt_template`: .* holds a NUL"),
        (SCRATCH + 'data: {columns: {text: "a\\0"}}', r"recipe key `data.columns.text`: 'a\\x00' holds a NUL"),
        (SCRATCH + 'data: {mix: {"a\\0": 1}}', r"recipe key `data.mix`: 'a\\x00' holds a NUL"),
        (SCRATCH + "data: {keep_columns: !!set {a, b}}", r"`data.keep_columns`: it is a set"),
        (SCRATCH + "curation: {spark: {driver_memory: 1\uff11g}}", r"`curation.spark.driver_memory`: "),
        (SCRATCH + "data: {split_salt: 2026-11-27}", r"`data.split_salt`: it is a date.*quotes"),
        (SCRATCH + "compute: {memory_gb: 1.0e+12}", r"`compute.memory_gb`: it should be less than"),
        (SCRATCH + "compute: {retries: 1000000000}", r"`compute.retries`: it should be less than"),
        (SCRATCH + "compute: {grace_seconds: 999999999999}", r"`compute.grace_seconds`: it should be less than"),
    ],
)
def test_a_bad_recipe_is_refused_with_the_mend(text: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(text)
    assert re.search(message, str(caught.value)), str(caught.value)


@pytest.mark.parametrize(
    ("read", "key"),
    [
        (lambda: read_yaml('a: [{b: "\\0"}]'), "recipe key `a.b`"),
        (lambda: read_pasted('{"a": {"b": "\\u0000"}}'), "recipe key `a.b`"),
        (lambda: build_recipe(NUL), "recipe key `data.text_column`"),
        (lambda: parse_change('data.text_column="\\0"'), "option --set"),
        (
            lambda: parse_family('recipe: {extends: tiny, data: {columns: {text: "\\0"}}}'),
            "key `recipe.data.columns.text`",
        ),
        (lambda: parse_teams('teams: {"\\0": {}}'), "key `teams`"),
        (lambda: build_sweep({"recipe": NUL, "space": {"train.seed": [1]}}), "recipe key `data.text_column`"),
    ],
    ids=["yaml", "json", "values", "set", "family", "teams", "sweep"],
)
def test_a_text_that_no_database_holds_is_refused_however_it_comes(read: Callable[[], object], key: str) -> None:
    with pytest.raises(DropforgeError, match=f"{re.escape(key)}.* holds a NUL"):
        read()


def test_a_recipe_file_is_read_up_to_its_bound_only(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.touch()
    os.truncate(path, 1 << 40)  # more than any machine's memory, and no block of the disk
    for read in (read_drop_recipe, load_recipe):
        with pytest.raises(RecipeError, match="larger than 64 KiB"):
            read(path)


def test_every_number_of_the_recipe_has_an_upper_bound() -> None:
    schema = Recipe.model_json_schema()

    def unbounded(part: dict[str, Any], path: str) -> Iterator[str]:
        part = schema["$defs"][part["$ref"].rpartition("/")[2]] if "$ref" in part else part
        if part.get("type") in {"integer", "number"} and not {"maximum", "exclusiveMaximum", "const"} & part.keys():
            yield path
        for kind in ("anyOf", "allOf", "oneOf", "prefixItems"):
            for inner in part.get(kind, ()):
                yield from unbounded(inner, path)
        for key, inner in part.get("properties", {}).items():
            yield from unbounded(inner, f"{path}.{key}")
        for inner in (part.get("items"), part.get("additionalProperties")):
            if isinstance(inner, dict) and not path.endswith("scratch.config"):  # held to plain values instead
                yield from unbounded(inner, path)

    assert list(unbounded(schema, "")) == []


def test_a_number_with_an_exponent_needs_no_dot() -> None:
    assert parse_recipe(SCRATCH + "train: {learning_rate: 2e-4}").train.learning_rate == 2e-4
    assert parse_recipe('base: {model: x, revision: "1e5"}').base.revision == "1e5"


def check_drop_recipe(path: Path) -> Recipe:
    """What a family's first drop makes of the installation's preset."""
    values = put_first_drop_over(preset_values(default_preset()), read_yaml(path.read_bytes()))
    return check_startable(build_recipe(values))


def test_the_recipe_of_a_first_drop_is_checked_as_the_run_will_read_it(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("extends: tiny\ntrain: {max_steps: 7}")
    assert check_drop_recipe(path).train.max_steps == 7
    path.write_text("base: {model: Qwen/Qwen2.5-0.5B}\ntrain: {method: lora}")
    assert check_drop_recipe(path).train.max_steps is None  # nothing of a toy's comes along
    for text, message in (
        ("train: {max_steps: 7}", "`base`: it is missing.*dropforge init --base MODEL"),
        ("extends: lora", "`base.model`: this preset trains a model of your own"),
        ("compute: {image: evil}", "`compute.image`: a recipe in a drop may not"),
        ("compute: {volumes: [{claim: x, path: /x}]}", "`compute.volumes`: a recipe in a drop may not"),
        ("compute: {priority: urgent}", "`compute.priority`: a recipe in a drop may not"),
    ):
        path.write_text(text)
        with pytest.raises(RecipeError, match=message):
            check_drop_recipe(path)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("code", "code: null"),
        ("compute.compile_cache", "compute: {compile_cache: /shared}"),
        ("compute.data_cache", "compute: {data_cache: /etc}"),
        ("compute.network_env", "compute: {network_env: {NCCL_NET_PLUGIN: /shared/mine.so}}"),
        ("compute.preflight", "compute: {preflight: {when: never}}"),
        ("compute.env", "compute: {env: {LD_PRELOAD: /shared/mine.so}}"),
        ("compute.tolerations", "compute: {tolerations: [{key: reserved}]}"),
        ("compute.annotations", "compute: {annotations: {a: b}}"),
        ("compute.image_pull_secrets", "compute: {image_pull_secrets: [other]}"),
        ("compute.priority_class", "compute: {priority_class: system-node-critical}"),
        ("compute.ephemeral_storage_gb", "compute: {ephemeral_storage_gb: 900}"),
        ("compute.shared_memory_gb", "compute: {shared_memory_gb: 1}"),
        ("compute.queue_timeout_minutes", "compute: {queue_timeout_minutes: null}"),
        ("compute.kind", "compute: {kind: Job}"),
        ("compute.min_nodes", "compute: {min_nodes: 1}"),
        ("curation.engine", "curation: {engine: embedded}"),
        ("curation.spark", "curation: {spark: {driver_memory: 900g}}"),
        ("curation.workers", "curation: {workers: 500}"),
        ("curation.memory", "curation: {memory: 900GB}"),
        ("curation.pii.key_env", "curation: {pii: {key_env: AWS_SECRET_ACCESS_KEY}}"),
        ("curation.deadline_minutes", "curation: {deadline_minutes: 1}"),
        ("train.checkpoints", "train: {checkpoints: 's3://elsewhere/x'}"),
        ("curation.decontaminate", "curation: {decontaminate: null}"),
        ("curation.min_rows", "curation: {min_rows: 2}"),
        ("curation.max_quarantined", "curation: {max_quarantined: 1}"),
        ("curation.max_quarantined", "curation: {max_quarantined: .nan}"),
        ("curation.unknown_keys", "curation: {unknown_keys: tell}"),
        ("curation.unknown_keys", "curation: {unknown_keys: null}"),
        ("data.max_left_out", "data: {max_left_out: 1.0}"),
        ("data.max_row_bytes", "data: {max_row_bytes: 1000000000}"),
        ("curation.pii", "curation: none"),
        ("curation.pii", "curation: null"),
        ("curation.pii", "curation: {steps: none, pii: null}"),
        ("curation.pii", "curation: {pii: {kinds: [ip]}}"),
        ("curation.pii", "extends: lax"),
        ("curation.gate.max.contaminated", "curation: {gate: null}"),
        ("curation.gate.max.contaminated", "curation: {gate: {max: {contaminated: 1}}}"),
        ("curation.gate.override", "curation: {gate: {override: it is good enough}}"),
        ("promote.approval", "promote: {approval: null}"),
        ("promote.approval", "promote: {approval: {otherwise: promote}}"),
        ("promote.guards", "promote: null"),
        ("promote.guards", "promote: {guards: []}"),
        ("promote.slices", "promote: {slices: []}"),
        ("promote.slices", "promote: {slices: [{by: source, min_rows: 1000}]}"),
        ("promote.stale", "promote: {stale: {after_days: 1, min_improvement: -0.5}}"),
        ("promote.alias", "promote: {alias: production}"),
        ("promote.input_example", "promote: {input_example: true}"),
        ("promote.metric", "promote: {metric: eval/perplexity}"),
        ("promote.min_improvement", "promote: {min_improvement: 0}"),
        ("promote.min_improvement", "promote: {min_improvement: .nan}"),
        ("promote.confidence", "promote: {confidence: null}"),
        ("promote.confidence", "promote: {confidence: 0.5}"),
        ("promote.better_than_base", "promote: {better_than_base: false}"),
        ("promote.better_than_base", "promote: {better_than_base: null}"),
        ("compute.idle", "compute: {idle: null}"),
        ("compute.idle", "compute: {idle: {minutes: 10080}}"),
        ("compute.idle", "compute: {gpus: 0, idle: null}"),
    ],
)
def test_a_drop_neither_chooses_where_it_is_computed_nor_takes_masks_and_gate_off(
    key: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = "engine: embedded, workers: 1, pii: {}, gate: {max: {contaminated: 0}, max_drift: 0.3}, min_rows: 1000, "
    asked += "max_quarantined: 0.01, unknown_keys: refuse, decontaminate: {sets: {gsm8k: s3://sets/gsm8k/}}"
    promote = "approval: {people: [ann]}, guards: [{metric: eval/perplexity, at_most: 90}], slices: [{by: source}], "
    promote += "min_improvement: 0.01, confidence: 0.9, better_than_base: true, input_example: false"
    compute, data = "gpus: 1, idle: {minutes: 20}", "max_left_out: 0.01, max_row_bytes: 10000"
    team = f"extends: tiny\ncuration: {{{asked}}}\npromote: {{{promote}}}\ncompute: {{{compute}}}\ndata: {{{data}}}"
    (tmp_path / "team.yaml").write_text(team)
    (tmp_path / "lax.yaml").write_text("extends: tiny\ncuration: none")
    monkeypatch.setenv("DROPFORGE_PRESETS", str(tmp_path))
    monkeypatch.setenv("DROPFORGE_PRESET", "team")
    path = tmp_path / "recipe"
    path.write_text(text)
    with pytest.raises(RecipeError, match=rf"recipe key `{re.escape(key)}`: .*a recipe in a drop may not"):
        check_drop_recipe(path)
    closer = "curation: {dedup: {}, min_rows: 2000, max_quarantined: 0, gate: {max: {near_duplicate: 0.5}}}"
    path.write_text(f"{closer}\npromote: {{metric: eval/loss, min_improvement: 0.05, confidence: 0.99}}")
    assert check_drop_recipe(path).curation.gate.max == {"contaminated": 0, "near_duplicate": 0.5}
    assert check_drop_recipe(path).promote.min_improvement == 0.05


def test_what_a_preset_does_not_say_of_the_promotion_is_the_drop_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "recipe"
    path.write_text("promote: {metric: eval/accuracy, min_improvement: -0.1, better_than_base: false}")
    monkeypatch.setenv("DROPFORGE_PRESET", "tiny")
    assert check_drop_recipe(path).promote.metric == "eval/accuracy"
    (tmp_path / "by-rows.yaml").write_text("extends: tiny\npromote: {metric: eval/accuracy}")
    monkeypatch.setenv("DROPFORGE_PRESETS", str(tmp_path))
    monkeypatch.setenv("DROPFORGE_PRESET", "by-rows")
    assert check_drop_recipe(path).promote.min_improvement == -0.1
    path.write_text("promote: {metric: eval/loss}")
    with pytest.raises(RecipeError, match=r"`promote.metric`: .*may not change it"):
        check_drop_recipe(path)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("promote.guards", "promote: {guards: [{metric: holdout/loss, max_regression: 0.99}]}"),
        ("evaluate.max_rows", "evaluate: {max_rows: 1}"),
    ],
    ids=["guard", "rows"],
)
def test_a_first_drop_takes_no_weight_from_the_evaluation_set_of_a_preset(
    key: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "recipe"
    monkeypatch.setenv("DROPFORGE_PRESETS", str(tmp_path))
    monkeypatch.setenv("DROPFORGE_PRESET", "team")
    named = f"holdout: own/{'0' * 64}"
    for team in (f"{{{named}}}", f"{{{named}, max_rows: 500}}"):
        (tmp_path / "team.yaml").write_text(f"extends: tiny\nevaluate: {team}")
        path.write_text(text)
        with pytest.raises(RecipeError, match=rf"recipe key `{re.escape(key)}`: .*a recipe in a drop may not"):
            check_drop_recipe(path)
        more = "[{metric: holdout/accuracy, at_least: 0.9}, {metric: eval/loss, max_regression: 0.1}]"
        path.write_text(f"evaluate: {{max_rows: 3000}}\npromote: {{guards: {more}}}")
        assert check_drop_recipe(path).evaluate.max_rows == 3000
    (tmp_path / "team.yaml").write_text("extends: tiny")
    path.write_text(f"{text}\n" + ("evaluate: {" + named + "}" if key == "promote.guards" else ""))
    check_drop_recipe(path)  # of a preset without a set


def test_the_bounds_of_a_preset_hold_for_a_first_drop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = "{train.max_steps: [1, 500], data.limit_rows: [1, 1000]}"
    (tmp_path / "team.yaml").write_text(f"extends: tiny\ndata: {{limit_rows: 100}}\ndrops: {{bounds: {bounds}}}")
    monkeypatch.setenv("DROPFORGE_PRESETS", str(tmp_path))
    monkeypatch.setenv("DROPFORGE_PRESET", "team")
    path = tmp_path / "recipe"
    for text, key in (
        ("train: {max_steps: 501}", "train.max_steps"),
        ("drops: {bounds: {train.max_steps: [1, 9000]}}", "drops.bounds"),
        ("drops: null", "drops.bounds"),
        ("train: {epochs: 1000}", "train.max_steps"),
        ("train: {max_steps: null, epochs: 1000}", "train.max_steps"),
        ("data: {limit_rows: null}", "data.limit_rows"),
    ):
        path.write_text(text)
        with pytest.raises(RecipeError, match=rf"`{key}`: .*may not change it"):
            check_drop_recipe(path)
    path.write_text("train: {max_steps: 500}\ndata: {limit_rows: 1000}")
    assert check_drop_recipe(path).train.max_steps == 500
    by_epochs = "extends: tiny\ntrain: {max_steps: null}\ndrops: {bounds: {train.epochs: [0.5, 3]}}"
    (tmp_path / "team.yaml").write_text(by_epochs)
    path.write_text("train: {epochs: 3}")
    assert check_drop_recipe(path).train.epochs == 3
    path.write_text("train: {max_steps: 1000000}")
    with pytest.raises(RecipeError, match=r"`train.epochs`: .*may not change it"):
        check_drop_recipe(path)
    (tmp_path / "team.yaml").write_text(f"{by_epochs.replace('null', '10')}")  # which its bounds say nothing of
    check_drop_recipe(path)


def test_a_drop_does_not_lose_the_preset_its_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wide.yaml").write_text("extends: tiny\ncuration: {engine: spark, workers: 3}")
    monkeypatch.setenv("DROPFORGE_PRESETS", str(tmp_path))
    monkeypatch.setenv("DROPFORGE_PRESET", "wide")
    path = tmp_path / "recipe"
    path.write_text("curation: none")
    with pytest.raises(RecipeError, match=r"`curation.engine`: .*`curation: none`"):
        check_drop_recipe(path)
    path.write_text("curation: {steps: none}")
    assert check_drop_recipe(path).curation.engine == "spark"


def test_a_team_keeps_presets_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cluster.yaml").write_text("extends: tiny\ncompute: {backend: kubernetes, namespace: training}")
    monkeypatch.setenv("DROPFORGE_PRESETS", str(tmp_path))
    assert load_recipe("cluster").compute.namespace == "training"
    assert parse_recipe("extends: cluster").train.max_steps == load_recipe("tiny").train.max_steps
    (tmp_path / "tiny.yaml").write_text("extends: sample")
    with pytest.raises(RecipeError, match="has a preset `tiny`, as we do"):
        load_recipe("cluster")
    monkeypatch.setenv("DROPFORGE_PRESETS", str(tmp_path / "none"))
    with pytest.raises(RecipeError, match="Name a folder of presets"):
        load_recipe("tiny")


def test_extends_and_overrides_win_in_order() -> None:
    recipe = parse_recipe("extends: tiny\ntrain: {max_steps: 7}", {"train": {"seed": 3}})
    assert (recipe.train.max_steps, recipe.train.seed) == (7, 3)
    assert recipe.train.sequence_length == load_recipe("tiny").train.sequence_length


def test_one_way_to_say_the_length_or_the_batch_replaces_the_preset_s_other() -> None:
    train = parse_recipe("extends: sample\ntrain: {epochs: 2, rows_per_step: 24}").train
    assert (train.epochs, train.max_steps, train.rows, train.tokens_per_step) == (2.0, None, 24, None)
    again = parse_recipe("extends: sample\ntrain: {epochs: 2}", {"train": {"max_steps": 5}}).train
    assert (again.epochs, again.max_steps, again.rows) == (None, 5, 16)


def test_a_config_replaces_the_preset_s_sizes_and_another_type_its_config() -> None:
    config = {"model_type": "gemma2", "vocab_size": 400, "hidden_size": 64}
    scratch = load_recipe("sample", {"base": {"scratch": {"config": config}}}).base.scratch
    assert scratch is not None
    assert (scratch.config, scratch.hidden_size, scratch.architecture, scratch.name) == (config, None, None, "gemma2")
    values = {"base": {"scratch": {"config": config}}}
    wider = merge(values, {"base": {"scratch": {"config": {"hidden_size": 128}}}})
    assert wider["base"]["scratch"]["config"] == {**config, "hidden_size": 128}
    other = merge(values, {"base": {"scratch": {"config": {"model_type": "llama", "vocab_size": 500}}}})
    assert other["base"]["scratch"]["config"] == {"model_type": "llama", "vocab_size": 500}


def test_another_base_replaces_the_preset_s() -> None:
    recipe = parse_recipe("extends: sample\nbase: {model: /models/mine}")
    assert recipe.base.scratch is None


def test_an_unknown_file_names_the_presets(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"Presets: .*full, .*lora, .*sample, .*tiny"):
        load_recipe(tmp_path / "none.yaml")


def test_plain_values_give_the_same_recipe_again() -> None:
    recipe = load_recipe("sample")
    assert Recipe.model_validate(recipe.plain()) == recipe
    assert recipe.flat()["train.max_steps"] == "120"


def test_what_people_call_their_things_names_no_parameter() -> None:
    recipe = parse_recipe(
        "extends: tiny\n"
        "base: {model: null, scratch: {config: {model_type: llama, vocab_size: 512, hidden_size: 64,"
        " num_attention_heads: 4, num_hidden_layers: 1, intermediate_size: 64, rope_scaling: {rope_type: default}}}}\n"
        "data: {mix: {'chats (1).jsonl': 2, 'faq+answers.jsonl': 0.5, ../../xs: 1}}\n"
        "curation: {decontaminate: {sets: {a.b: eval/a.jsonl}}, max_rows_per_source: {'b+c': 7}}\n"
    )
    flat = recipe.flat()
    assert set(flat) <= set(key_names())
    assert json.loads(flat["data.mix"]) == {"../../xs": 1.0, "chats (1).jsonl": 2.0, "faq+answers.jsonl": 0.5}
    assert json.loads(flat["curation.max_rows_per_source"]) == {"b+c": 7}
    assert json.loads(flat["base.scratch.config"])["rope_scaling"] == {"rope_type": "default"}


@given(st.text(max_size=200))
def test_any_text_is_a_recipe_or_a_recipe_error(text: str) -> None:
    try:
        parse_recipe(text)
    except RecipeError as error:
        assert error.mend  # noqa: PT017 - either outcome is right


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: st.dictionaries(
            st.sampled_from(["base", "scratch", "model", "train", "extends", "lora", "x"]), inner, max_size=4
        ),
        max_leaves=8,
    )
)
def test_any_overrides_give_a_recipe_or_a_recipe_error(values: object) -> None:
    if isinstance(values, dict):
        try:
            parse_recipe("extends: tiny", values)
        except RecipeError as error:
            assert error.thing  # noqa: PT017 - either outcome is right


def test_all_wrong_keys_are_named_at_once() -> None:
    text = "train: {learning_rte: 1, precision: float16, optimizer: adam}\ndata: {eval_fraction: much}\n"
    with pytest.raises(RecipeError) as caught:
        parse_recipe(SCRATCH + text)
    assert (caught.value.thing, caught.value.mend) == ("recipe", "Correct all of them")
    assert [line.partition("`: ")[0] for line in caught.value.cause.splitlines()] == [
        "4 keys are wrong:",
        "- `train.learning_rte",
        "- `data.eval_fraction",
        "- `train.optimizer",
        "- `train.precision",
    ]
    with pytest.raises(RecipeError, match=r"`extend`: it is unknown. Did you mean `extends`\?$"):
        parse_recipe("extend: sample")  # not that it has no base, which is what that was to say
    many = {"extends": "sample", "train": {f"key-{number}": 1 for number in range(1000)}}
    with pytest.raises(RecipeError, match=r"1000 keys are wrong(?s:.*)and 980 more"):
        build_recipe(resolve(many))
    hints = [fault.hint for fault in find_unknown(many)]
    assert all(hints[:20])
    assert not any(hints[20:])  # looking for what thousands of keys were to be takes a minute


@pytest.mark.parametrize("word", sorted(WORDS))
def test_words_of_other_tools_are_known(word: str) -> None:
    meant = WORDS[word]
    assert meant in key_names()
    for values in ({word: 1}, {"train": {word: 1}}, {"base": {word: 1}}):
        (fault,) = find_unknown(values)
        assert fault.hint == f"Did you mean `{meant}`?"


def test_a_file_that_is_no_yaml_is_named(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("a: [b\n")
    with pytest.raises(RecipeError, match=r"recipe '.*r.yaml': it is not a YAML mapping .*line 1, column 4") as caught:
        load_recipe(tmp_path / "r.yaml")
    assert "string>" not in str(caught.value)
