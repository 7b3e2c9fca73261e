"""The recipe: what a person asks for, as one strict and frozen model.

Unknown keys are refused with the nearest key (`dropforge.recipes.load`), combinations that cannot work with their
mend (`dropforge.recipes.rules`). The same model gives the JSON schema of the form in Airflow's UI.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, Field, JsonValue, field_validator, model_validator

from dropforge.recipe_costs import Limits, Price
from dropforge.recipe_data import Curation, Data
from dropforge.recipe_drops import Drops
from dropforge.recipe_idle import Idle
from dropforge.recipe_network import NetworkEnv, Preflight
from dropforge.recipe_pods import Annotations, LabelName, LabelValue, ObjectName, PodEnv, PullSecrets, Tolerations
from dropforge.recipe_promote import Promote
from dropforge.section import Section
from dropforge.shape import config_of, context_of
from dropforge.volumes import USER, Volume

DEFAULT_TOKENS = 4096  # of a step, where neither tokens nor rows are given
LARGEST = 1_000_000_000  # no size of a model or batch comes near it, and what is computed from sizes stays small


Task = Literal["causal-lm", "classification", "sequence-to-sequence"]
Minutes = Annotated[str, Field(pattern="^[1-9][0-9]{0,8} ?min$")]
Count = Annotated[int, Field(ge=1, le=LARGEST)]
Score = Literal["exact-match", "token-f1", "rouge-l", "valid-json"]
OwnScore = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,40}$")]  # of the wheel that `code` names
NewToken = Annotated[str, Field(pattern=r"^\S{1,64}$")]
START: Final = r"^(base|champion|runs/[a-z0-9](?:[a-z0-9-]{0,80}[a-z0-9])?/step-[1-9][0-9]{0,8})$"


class Scratch(Section):
    """A model with random weights and a tokenizer trained on the drop: for machines without a hub. Its sizes, or the
    config of any causal language model, or for `task: sequence-to-sequence` any encoder-decoder, of transformers."""

    architecture: Literal["llama", "qwen2", "mistral", "gpt2", "distilbert"] | None = None
    """Model family; `llama` if neither it nor `config` is given. `distilbert` is an encoder, for
    `task: classification`."""
    hidden_size: int | None = Field(default=None, ge=16, le=LARGEST, multiple_of=8)
    """Width of the residual stream; 128 without `config`."""
    layers: int | None = Field(default=None, ge=1, le=LARGEST)
    """Number of decoder layers; 4 without `config`."""
    heads: int | None = Field(default=None, ge=1, le=LARGEST)
    """Attention heads; 4 without `config`."""
    vocab_size: int | None = Field(default=None, ge=300, le=LARGEST)
    """Size of the tokenizer's vocabulary, byte-level BPE; 4096 without `config`."""
    context: int | None = Field(default=None, ge=32, le=LARGEST)
    """Longest sequence in tokens; 512 without `config`."""
    config: dict[str, JsonValue] | None = None
    """Instead of the sizes above: `model_type` and `vocab_size`, and any other key of that model's config.json."""

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, values: Any) -> Any:
        """Without a config, what is not given has its default: a resolved recipe says all that is trained."""
        if not isinstance(values, Mapping) or values.get("config") is not None:
            return values
        return {**_SCRATCH, **{key: value for key, value in values.items() if value is not None}}

    @field_validator("config")
    @classmethod
    def _plain(cls, config: dict[str, JsonValue] | None) -> dict[str, JsonValue] | None:
        if config is not None:
            _check_plain(config)
            if len(json.dumps(config)) > _CONFIG_LIMIT:
                raise ValueError(f"it has more than {_CONFIG_LIMIT} bytes")
        return config

    @property
    def name(self) -> str:
        """The model's type, in transformers' word."""
        return str(self.plain_config()["model_type"])

    @property
    def longest(self) -> int | None:
        """Longest sequence in tokens; None where the config leaves it to the library."""
        return context_of(self.plain_config())

    def plain_config(self) -> dict[str, Any]:
        """The Hugging Face config that both ways of saying it come to."""
        return {"model_type": "", **config_of(self.model_dump())}


_SCRATCH: Final = {
    "architecture": "llama",
    "hidden_size": 128,
    "layers": 4,
    "heads": 4,
    "vocab_size": 4096,
    "context": 512,
}
_CONFIG_LIMIT: Final = 16 * 1024
_CONFIG_KEY: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


def _check_plain(value: JsonValue, depth: int = 4) -> None:
    """:raises ValueError: for what no config.json has: odd keys, deep nests."""
    if not depth:
        raise ValueError("it is nested too deep")
    if isinstance(value, dict):
        odd = next((key for key in value if not _CONFIG_KEY.fullmatch(key)), None)
        if odd is not None:
            raise ValueError(f"{odd[:40]!r} is no key of a config")
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_plain(item, depth - 1)


class Base(Section):
    """The model to start from: exactly one of `model` and `scratch`."""

    model: str | None = None
    """A Hugging Face id, a local folder, or `s3://...` of a folder with safetensors."""
    revision: str | None = None
    """Commit, tag or branch of a Hugging Face id. The plan resolves it to a commit, which the run then keeps."""
    scratch: Scratch | None = None
    """Make a model from a config instead."""
    new_tokens: Annotated[tuple[NewToken, ...], Field(strict=False, min_length=1, max_length=1000)] | None = None
    """Markers that become one token each, such as `[<call>, </call>]`; their rows start as the mean of all others."""
    start: str = Field(default="base", pattern=START)
    """Where the weights begin: `base`, the family's `champion` (the base while there is none), or `runs/RUN/step-N`, a
    checkpoint in the same bucket. Weights only; both must be derived from this base."""


class Lora(Section):
    """Low-rank adapters (Hu et al., 2021, https://arxiv.org/abs/2106.09685), of `lora`, `dora` and `qlora` alike."""

    r: int = Field(default=8, ge=1, le=LARGEST)
    """Rank of the adapters; a higher one learns more and takes more memory."""
    alpha: int = Field(default=16, ge=1, le=LARGEST)
    """Scale; the adapter's output is multiplied by alpha / r."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the adapter's input."""
    targets: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] | Literal["all-linear"] = "all-linear"
    """Modules to adapt, by the end of their names; `all-linear` takes all linear layers but the head."""


class Prefix(Section):
    """Learned keys and values that every layer attends to before each document (prefix tuning, Li and Liang, 2021,
    https://arxiv.org/abs/2101.00190)."""

    tokens: int = Field(default=16, ge=1, le=LARGEST)
    """Positions of the context that they take."""


class Freeze(Section):
    """Weights that keep the base model's values."""

    blocks: int = Field(default=0, ge=0, le=LARGEST)
    """Transformer blocks, from the first on."""
    embeddings: bool = False
    """Embeddings of tokens and positions; a head that is tied to them too."""


class EarlyStopping(Section):
    """When training ends before its last step."""

    patience: int = Field(default=3, ge=1, le=LARGEST)
    """Evaluations in a row that are not better than the best before them."""
    min_delta: float = Field(default=0.0, ge=0, le=1000)
    """Nats per token by which an evaluation must be better to count."""


class FastCheckpoints(Section):
    """A fast tier of checkpoints beside the durable place: a local folder of each node."""

    folder: str
    """An absolute folder that exists on every node: `/dev/shm`, or where a local NVMe is mounted."""
    every: Count | Minutes
    """Steps between checkpoints there, or time as in `"10 min"`; less than `checkpoint_every`."""
    keep: int = Field(default=1, ge=1, le=1000)
    """Newest checkpoints to keep there; while one is written there is one more."""


class Train(Section):
    """The training itself. Batch sizes are global: the number of ranks is a detail."""

    method: Literal["full", "lora", "dora", "qlora", "prefix"] = "full"
    """Train all weights, or adapters: low-rank ones, those with the weights' magnitudes apart from their directions
    (DoRA, Liu et al., 2024, https://arxiv.org/abs/2402.09353), low-rank ones beside a base in 4 bits (QLoRA, Dettmers
    et al., 2023, https://arxiv.org/abs/2305.14314; needs bitsandbytes where the ranks run), or a prefix."""
    lora: Lora = Lora()
    """Settings of the adapters."""
    prefix: Prefix = Prefix()
    """Settings of the prefix."""
    freeze: Freeze | None = None
    """With `full`, weights to leave as they are."""
    sequence_length: int = Field(default=512, ge=16, le=LARGEST)
    """Tokens per packed sequence."""
    packing: Literal["auto", "off"] = "auto"
    """`auto` packs where the self-check shows that documents stay apart, and pads elsewhere."""
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2", "flex_attention"] = "auto"
    """Attention's implementation; `auto` takes the model's own if it computes what eager attention does. The last two
    need a GPU. A named one is what runs, or it is an error."""
    tokens_per_step: int | None = Field(default=None, ge=16, le=LARGEST)
    """Tokens in one optimizer step over all ranks, a multiple of `sequence_length`; about 4096 if not given."""
    rows_per_step: int | None = Field(default=None, ge=1, le=LARGEST)
    """Sequences in one optimizer step over all ranks, instead of `tokens_per_step`."""
    micro_batch: int = Field(default=2, ge=1, le=LARGEST)
    """Largest number of sequences per forward pass and rank."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """What the backward pass computes again instead of keeping it: of each block all but its input (`full`), or all but
    the products with weights and attention's output (`selective`). The results are the same."""
    compile: bool = False
    """Let torch compile each block for passes with gradients; needs a C++ compiler where the ranks run, and takes
    a minute or more before the first step. Evaluations run the model's own code."""
    offload: Literal["none", "activations", "states", "all"] = "none"
    """What is kept in the host's memory instead of the GPU's: what the forward pass keeps for the backward pass
    (`activations`), or with shards their weights, gradients and optimizer states, which are updated there (`states`).
    Slower, with the same results."""
    epochs: float | None = Field(default=None, gt=0, le=1000)
    """Passes over the training rows; one if neither it nor `max_steps` is given."""
    max_steps: int | None = Field(default=None, ge=1, le=LARGEST)
    """Optimizer steps, instead of `epochs`."""
    max_rows: int | None = Field(default=None, ge=1, le=LARGEST)
    """Training rows to use, the first by content key: for smoke runs."""
    optimizer: Literal["adamw", "adamw-bf16", "adamw-8bit", "sgd"] = "adamw"
    """The optimizer, and what it keeps of each trained weight: `adamw` 8 bytes, `adamw-bf16` 4 (optimizer state in
    bf16), `adamw-8bit` 2 (needs bitsandbytes where the ranks run), `sgd` 4."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Of `sgd`; with 0 it keeps nothing."""
    learning_rate: float = Field(default=1e-3, gt=0, le=1000)
    """Peak learning rate."""
    schedule: Literal["cosine", "linear", "constant", "exponential", "step", "plateau", "wsd"] = "cosine"
    """Course of the learning rate after the warm-up; `wsd` stays at the peak and decays at the end."""
    warmup: float = Field(default=0.05, ge=0, le=LARGEST)
    """Share of the steps spent warming up, or from 1 on their number."""
    min_rate: float = Field(default=0.0, ge=0, le=1)
    """Lowest learning rate after the warm-up, as a share of the peak."""
    decay: float = Field(default=0.2, gt=0, le=LARGEST)
    """The last part of `wsd`: share of the steps, or from 1 on their number."""
    drop_factor: float = Field(default=0.1, gt=0, le=1)
    """What is left of the learning rate: at the end of `exponential`, after each drop of `step` and `plateau`."""
    drop_every: float = Field(default=0.3, gt=0, le=LARGEST)
    """From one drop of `step` to the next: share of the steps, or from 1 on their number."""
    plateau_patience: int = Field(default=2, ge=1, le=LARGEST)
    """Evaluations in a row without a new lowest loss that `plateau` tolerates; the next one drops the rate."""
    weight_decay: float = Field(default=0.1, ge=0, le=1000)
    """On matrices only, not on norms, biases and embeddings."""
    clip: float = Field(default=1.0, gt=0, le=1e9)
    """Largest global gradient norm."""
    seed: int = Field(default=17, ge=0, lt=2**32)
    """Seed of weights, order and dropout."""
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    """Arithmetic of forward and backward; master weights are fp32 either way. `tf32` is fp32 whose matrix products a
    GPU's tensor cores round to 10 bits (compute capability 8.0 or later). `fp16` is for GPUs without `bf16`: its loss
    is scaled, and a step whose gradient overflows is taken again with a smaller scale."""
    deterministic: bool = False
    """Only operations that give the same bits each time; slower on a GPU. On a CPU, runs are deterministic without
    it."""
    loss_on: Literal["answers", "all"] = "answers"
    """Tokens that are learned in conversations: the assistant's, or all."""
    router_loss: float | None = Field(default=None, ge=0, le=100)
    """For a mixture of experts, the factor of its router's loss; 0 leaves it out, null takes that of its config."""
    log_every: Count | Minutes | None = None
    """Steps between log lines, or time as in `"10 min"`; about a hundred lines if not given."""
    eval_every: Annotated[int, Field(ge=0, le=LARGEST)] | Minutes = 0
    """Steps between evaluations, or time as in `"10 min"`; 0 evaluates before and after only."""
    checkpoint_every: Count | Minutes = 25
    """Steps between checkpoints, or time as in `"10 min"`."""
    checkpoints: str | None = None
    """Where they are stored, below the run's name: a folder that all nodes share, or `s3://...`; null is the run's
    folder."""
    fast_checkpoints: FastCheckpoints | None = None
    """More frequent checkpoints, in a fast folder of each node; `checkpoint_every` then uploads from there."""
    keep_checkpoints: int = Field(default=2, ge=1, le=10_000)
    """Newest checkpoints to keep."""
    keep_best: int = Field(default=1, ge=0, le=10_000)
    """Checkpoints with the lowest evaluation loss to keep in addition, of those that were evaluated."""
    early_stopping: EarlyStopping | None = None
    """End the training once evaluations no longer improve."""
    export: Literal["last", "best"] = "last"
    """Weights that become the model: those of the last step, or of the lowest evaluation loss."""
    profile: Annotated[str, Field(pattern="^[1-9][0-9]{0,8}(-[1-9][0-9]{0,8})?$")] | None = None
    """Steps to run under torch's profiler, as in `100-103`: at most 50, and not the first."""
    tensorboard: bool = False
    """Write TensorBoard's event files into the run's folder too; needs the package tensorboard where the ranks run."""
    max_skipped_steps: int = Field(default=50, ge=0, le=LARGEST)
    """Steps in total that may be skipped because loss or gradient is not finite; at most five in a row."""

    @property
    def passes(self) -> float | None:
        """Epochs that are trained; None where `max_steps` counts."""
        return None if self.max_steps is not None else self.epochs or 1.0

    @property
    def rows(self) -> int:
        """Sequences in one optimizer step, over all ranks."""
        if self.rows_per_step is not None:
            return self.rows_per_step
        return (self.tokens_per_step or DEFAULT_TOKENS) // self.sequence_length or 1


class Compute(Section):
    """What each pod gets."""

    backend: Literal["local", "kubernetes"] = "local"
    """`local` runs the same PyTorchJob as processes of this machine."""
    instance: str | None = Field(default=None, min_length=1, max_length=60)
    """Kind of machine that each pod has for itself, as `dropforge instances` lists them: it sets `gpus`,
    `gpu_memory_gb`, `processes_per_node`, `cpus` and `memory_gb` where the recipe does not, and which nodes fit."""
    nodes: int = Field(default=1, ge=1, le=10_000)
    """Number of pods, each a node of the job."""
    min_nodes: int | None = Field(default=None, ge=1, le=10_000)
    """With how few pods the training may run: if some have no node within `queue_timeout_minutes`, it starts with
    those that have one, on the same rows for each step; the next attempt asks for all again. Null waits for all."""
    processes_per_node: int = Field(default=1, ge=1, le=64)
    """Ranks per pod."""
    cpus: float = Field(default=1, gt=0, le=4096)
    """CPU cores per pod."""
    memory_gb: float = Field(default=2, gt=0, le=100_000)
    """Memory per pod in gigabytes."""
    gpus: int = Field(default=0, ge=0, le=64)
    """GPUs per pod; one rank each."""
    gpu_memory_gb: float | None = Field(default=None, gt=0, le=10_000)
    """Memory of each GPU in gigabytes: what the estimate is compared with before the start. Null compares it with
    nothing; the trainer measures at the start either way."""
    parallel: Literal["auto", "ddp", "fsdp", "fsdp-no-reshard", "hybrid"] = "auto"
    """How ranks share the model. `ddp` gives each rank all of it, and `auto` is `ddp`; `fsdp` gives each a shard of the
    weights, gradients and optimizer states; `fsdp-no-reshard` gathers the weights once a step; `hybrid` shards within
    groups."""
    shard_group: int | None = Field(default=None, ge=2, le=LARGEST)
    """With `hybrid`, ranks that hold one copy of the model together; null takes those of a pod."""
    fabric: Literal["tcp", "efa", "infiniband"] | None = None
    """The network between nodes; null leaves the choice to NCCL."""
    network_env: NetworkEnv = Field(default_factory=dict)
    """Variables of NCCL, libfabric and gloo for every pod, instead of the fabric's own or in addition to them."""
    preflight: Preflight = Preflight()
    """What the ranks check before anything is fetched."""
    tokenize_ahead: bool = False
    """A job of one pod without GPUs tokenises and packs the rows before the training's pods start; otherwise its first
    rank does it while all GPUs wait."""
    compile_cache: str | None = Field(default=None, pattern=r"^/[^\s:]+$")
    """With `train.compile`, a folder where each node keeps what was compiled, for later pods and runs; null is its
    own temporary folder. Anyone who may write there can run code in a training."""
    data_cache: str | None = Field(default=None, pattern=r"^/[^\s:]+$")
    """A folder where each node keeps base models, tokens and packs by their SHA-256, for other pods and later runs;
    null fetches them for each pod. Anyone who may write there can change what a training starts from."""
    data_cache_gb: float = Field(default=100, gt=0, le=1e6)
    """Gigabytes that `data_cache` may take; what was least recently used is removed first."""
    image: str = "dropforge-trainer:latest"
    """Trainer image; the local backend does not use it."""
    namespace: str = "default"
    """Kubernetes namespace."""
    kind: Literal["auto", "TrainJob", "PyTorchJob", "Job"] = "auto"
    """Kind of the jobs on Kubernetes. `auto` is a TrainJob where Kubeflow Trainer 2.2 or later and the namespace's
    TrainingRuntime `dropforge` are there, and with a `queue` Kueue 0.17 or later; else a PyTorchJob of the training
    operator; a plain Job without either."""
    image_pull_secrets: PullSecrets = ()
    """Secrets of the namespace with which the image is pulled from a registry that requires a login."""
    service_account: ObjectName | None = None
    """Of the pods, for a role of their own in the cloud; null is that of the namespace. Dropforge does not use its
    rights in Kubernetes."""
    run_as: int | None = Field(default=USER, ge=1, le=2**31 - 1)
    """User id of the pods, which then follow Kubernetes' restricted Pod Security Standard; null leaves user and rights
    to the image, if it needs root."""
    volumes: Annotated[tuple[Volume, ...], Field(strict=False)] = ()
    """Claims that every pod mounts."""
    node_selector: dict[LabelName, LabelValue] | None = Field(default=None, max_length=20)
    """More labels that nodes of the pods must have, such as those of a zone or a capacity block."""
    tolerations: Tolerations = ()
    """Taints of nodes that the pods tolerate, besides those of GPUs that `instance` adds."""
    annotations: Annotations = Field(default_factory=dict)
    """Annotations of every pod, for example `{karpenter.sh/do-not-disrupt: "true"}`."""
    env: PodEnv = Field(default_factory=dict)
    """Environment variables of every pod, for example `{HF_HUB_OFFLINE: "1"}`; no secrets, which come from the
    Kubernetes secret `dropforge-trainer`."""
    priority_class: ObjectName | None = None
    """Kubernetes' PriorityClass of the pods, for clusters without Kueue; with `queue` use `priority`."""
    ephemeral_storage_gb: float | None = Field(default=None, gt=0, le=100_000)
    """Gigabytes of its node's disk that each pod requests and may fill; null requests what the base and the exported
    model take, where that is known and more than 10 GB, and limits nothing. In a `queue` null requests nothing."""
    shared_memory_gb: float | None = Field(default=None, gt=0, le=100_000)
    """Gigabytes of /dev/shm, a part of `memory_gb`; null is half of it."""
    queue: str | None = Field(default=None, pattern=r"^[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?$")
    """Kueue's local queue; without it the pods compete with all others."""
    priority: str | None = Field(default=None, pattern=r"^[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?$")
    """Kueue's WorkloadPriorityClass: the highest goes first, and may suspend running jobs. Needs `queue`."""
    topology: LabelName | None = None
    """Label of nodes that the pods of a job should have in common, such as that of a rack: one of the flavor's
    `topology` in the file of teams. Ranks follow the nodes' places. Needs `queue`."""
    topology_required: bool = False
    """Whether the job waits rather than being spread over several of them. Needs `topology`."""
    grace_seconds: int = Field(default=60, ge=5, le=86_400)
    """Time between SIGTERM and SIGKILL, for the last checkpoint."""
    idle: Idle | None = None
    """When idle GPUs end the run; null never. Needs `gpus`."""
    deadline_minutes: int = Field(default=720, ge=1, le=525_600)
    """Longest run time of each job (training, evaluation, requests for checkpoints), waiting not included."""
    queue_timeout_minutes: int | None = Field(default=None, ge=1, le=525_600)
    """Longest time that a job waits for its first pod to run, in a queue and while nodes start; null sets no limit."""
    retries: int = Field(default=2, ge=0, le=100)
    """Attempts after the first one failed because of the infrastructure, such as a lost node."""
    gpu_tflops: float | None = Field(default=None, gt=0, le=1e6)
    """What one of these GPUs achieves in a training, in teraFLOPs a second (its data sheet says two or three times as
    much), for the plan's time if no earlier run of the family was measured. Null gives no estimate."""
    price: Price | None = None
    """What hours cost; without it costs are shown in hours only."""
    limits: Limits | None = None
    """Hours and money above which a run needs approval, or ends; without it nothing is limited."""

    @property
    def all_pods(self) -> tuple[float, float, int]:
        """CPUs, bytes of memory and GPUs of all pods together."""
        return self.nodes * self.cpus, self.nodes * self.memory_gb * 1e9, self.nodes * self.gpus


class Generation(Section):
    """Evaluation by generation: the model answers evaluation rows whose own last answer is held out, greedily."""

    rows: Count = 64
    """The first evaluation rows that have an answer."""
    max_new_tokens: Count = 128
    """Longest answer; the model's end tokens end it earlier."""
    metrics: Annotated[tuple[Score | OwnScore, ...], Field(strict=False, min_length=1)] = (
        "exact-match",
        "token-f1",
        "rouge-l",
    )
    """Metrics of the answers, each `gen/NAME` in MLflow: built-in ones from 0 to 1, and those of `code` by their
    names."""
    batch: Count = 8
    """Rows that are answered together; fewer take less memory."""
    every: Count = 1
    """Number of evaluations from one with answers to the next; the first and the last always have them."""


class Evaluate(Section):
    """How candidate and champion are measured."""

    max_rows: int = Field(default=2000, ge=1, le=LARGEST)
    """Evaluation rows to use, chosen by content key."""
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    """Arithmetic of the forward pass, for candidate, champion and base alike; bf16 is exact to 2e-4 only, fp16 to 5e-5;
    `tf32`, of GPUs alone, rounds products as fp16 does.
    A training in shards is evaluated in shards where it is `train.precision`."""
    max_batches: int | None = Field(default=None, ge=1, le=LARGEST)
    """Largest number of forward passes of an evaluation while training: for smoke runs. Candidate and champion get all
    rows."""
    generation: Generation | None = None
    """Let the model answer some rows in each evaluation; `{}` takes the defaults."""
    holdout: str | None = Field(default=None, pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?/[0-9a-f]{64}$")
    """A dataset version outside the drops, in the form `FAMILY/DIGEST`. Candidate and champion are measured on it as
    well (`holdout/...`, up to `max_rows`, without those that the candidate was trained on), and the candidate may be no
    worse than the champion there; a guard of `holdout/...` says otherwise."""


class Code(Section):
    """A user's own functions, from entry points of a wheel that is identified by its digest and never installed."""

    wheel: str = Field(pattern=r"^(s3://[a-z0-9][a-z0-9.-]*/[^\s?@]+|/[^\s]*)-none-any\.whl$")
    """Where it is: `s3://...`, or a file that every pod can read."""
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    """SHA-256 of the wheel's bytes."""


class Recipe(Section):
    """What a person asks for."""

    task: Task = "causal-lm"
    """What the model learns: to continue text; to give each row its `label` (`classification`); or, like T5 and BART,
    to write the answer to a prompt that an encoder reads (`sequence-to-sequence`)."""
    base: Base
    """The model to start from."""
    data: Data = Data()
    """Rows and split."""
    curation: Curation = Curation()
    """From drop to dataset version."""
    train: Train = Train()
    """Training."""
    compute: Compute = Compute()
    """Pods."""
    evaluate: Evaluate = Evaluate()
    """Measurement."""
    promote: Promote = Promote()
    """Promotion."""
    drops: Drops = Drops()
    """What drops may set."""
    code: Code | None = None
    """Your own row functions, metrics and callbacks."""

    def plain(self) -> dict[str, Any]:
        """The resolved recipe as JSON values, the same for equal recipes."""
        return self.model_dump(mode="json")

    def flat(self) -> dict[str, str]:
        """Dotted keys of the recipe and text values, for MLflow's params.

        A mapping whose keys people choose (files of a mix, sets, labels of nodes) is one value, as JSON: MLflow takes
        few characters in names.
        """
        return dict(_flatten(self, self.plain()))


def _flatten(section: BaseModel, values: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """:param values: the section's, as JSON values."""
    rows: list[tuple[str, str]] = []
    for key, value in values.items():
        inner = getattr(section, key)
        if isinstance(inner, BaseModel):
            rows += _flatten(inner, value, f"{prefix}{key}.")
        else:
            text = json.dumps(value, ensure_ascii=False, sort_keys=True) if isinstance(value, dict) else str(value)
            rows.append((f"{prefix}{key}", text))
    return rows
