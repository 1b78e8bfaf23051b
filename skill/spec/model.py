"""The spec as frozen records: every value is valid, every default is filled in, every derived value is a number."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal


class Section:
    """One mapping of the spec. A field whose name is a word of Python has a `_` at its end (`import_`, `async_`)."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data with the keys of the spec file."""
        return {part.name.rstrip("_"): _plain(getattr(self, part.name)) for part in fields(self)}  # type: ignore[arg-type]


@dataclass(frozen=True)
class DecoderModel(Section):
    kind: Literal["decoder"]
    layers: int
    width: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    sequence_length: int
    tied_embeddings: bool
    rope_theta: float

    @property
    def head_size(self) -> int:
        return self.width // self.heads


@dataclass(frozen=True)
class ImportModel(Section):
    kind: Literal["import"]
    import_: str
    shard: tuple[str, ...]
    arguments: dict[str, Any]
    initialize: Literal["every-rank", "rank-0"]
    vocabulary: int
    sequence_length: int | None


@dataclass(frozen=True)
class TransformersModel(Section):
    """`config` (keys, or the path of a config.json) or `pretrained` (a folder) is set, the other is None."""

    kind: Literal["transformers"]
    config: dict[str, Any] | str | None
    pretrained: str | None
    shard: tuple[str, ...] | Literal["auto"]
    vocabulary: int
    sequence_length: int


@dataclass(frozen=True)
class TextData(Section):
    """`files` are absolute paths, folders or globs, or start with `{stdlib}`; so in the other kinds of data."""

    kind: Literal["text"]
    files: tuple[str, ...]
    tokenizer: str | None
    separator: str
    validation_fraction: float
    workers: int


@dataclass(frozen=True)
class TokenData(Section):
    kind: Literal["tokens"]
    files: tuple[str, ...]
    dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"]
    validation_fraction: float
    workers: int


@dataclass(frozen=True)
class JsonlData(Section):
    kind: Literal["jsonl"]
    files: tuple[str, ...]
    field: str
    tokenizer: str | None
    separator: str
    packing: bool
    validation_fraction: float
    workers: int


@dataclass(frozen=True)
class SavedDataset(Section):
    """A Hugging Face dataset on disk."""

    kind: Literal["datasets"]
    folder: str
    split: str | None
    field: str
    tokenizer: str | None
    separator: str
    packing: bool
    validation_fraction: float
    workers: int


@dataclass(frozen=True)
class ImageData(Section):
    kind: Literal["images"]
    folder: str
    image_size: int
    validation_fraction: float
    workers: int


@dataclass(frozen=True)
class ImportData(Section):
    kind: Literal["import"]
    import_: str
    arguments: dict[str, Any]
    workers: int


@dataclass(frozen=True)
class SyntheticData(Section):
    kind: Literal["synthetic"]
    samples: int
    validation_fraction: float
    workers: int


Data = TextData | TokenData | JsonlData | SavedDataset | ImageData | ImportData | SyntheticData


@dataclass(frozen=True)
class FullTuning(Section):
    kind: Literal["full"]


@dataclass(frozen=True)
class Freezing(Section):
    """`train`: regular expressions, found in the names of the parameters that are trained."""

    kind: Literal["freeze"]
    train: tuple[str, ...]


@dataclass(frozen=True)
class LoRA(Section):
    kind: Literal["lora"]
    rank: int
    alpha: float
    dropout: float
    targets: tuple[str, ...]


@dataclass(frozen=True)
class Prefetch(Section):
    """Blocks ahead; 0 is torch's own order."""

    forward: int
    backward: int


@dataclass(frozen=True)
class Parallel(Section):
    dp_shard: int | Literal["auto"]
    dp_replicate: int
    tp: int
    reshard_after_forward: bool | int
    prefetch: Prefetch
    cpu_offload: bool


@dataclass(frozen=True)
class Precision(Section):
    param_dtype: Literal["float32", "bfloat16"]
    reduce_dtype: Literal["float32", "bfloat16"]
    master_dtype: Literal["float32"]
    fp8: bool


@dataclass(frozen=True)
class Memory(Section):
    """`every` is of `every-nth` alone; `gc_interval` None leaves the garbage to Python."""

    activation_checkpointing: Literal["none", "full", "every-nth", "op-selective"]
    every: int
    compile: bool
    gc_interval: int | None


@dataclass(frozen=True)
class Group(Section):
    """Parameters whose names hold a match of the regular expression; None means as the optimizer has it."""

    match: str
    lr: float | None
    weight_decay: float | None


@dataclass(frozen=True)
class AdamW(Section):
    kind: Literal["adamw"]
    lr: float
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    decay_only_matrices: bool
    groups: tuple[Group, ...]


@dataclass(frozen=True)
class SGD(Section):
    kind: Literal["sgd"]
    lr: float
    weight_decay: float
    momentum: float
    decay_only_matrices: bool
    groups: tuple[Group, ...]


@dataclass(frozen=True)
class Curve(Section):
    """Down to `min_lr_ratio` from the end of the warm-up on."""

    kind: Literal["cosine", "linear"]
    warmup_steps: int
    min_lr_ratio: float


@dataclass(frozen=True)
class WarmupStableDecay(Section):
    kind: Literal["wsd"]
    warmup_steps: int
    min_lr_ratio: float
    decay_steps: int


@dataclass(frozen=True)
class Constant(Section):
    kind: Literal["constant"]
    warmup_steps: int


@dataclass(frozen=True)
class Train(Section):
    steps: int
    global_batch: int
    micro_batch: int
    clip_norm: float | None
    seed: int
    log_interval: int
    validate_interval: int
    validate_batches: int
    on_nonfinite: Literal["stop", "skip"]
    dry_run: bool


@dataclass(frozen=True)
class Checkpoint(Section):
    directory: str
    interval: int
    keep: int
    mode: Literal["sync", "thread", "process"]
    grace_seconds: float
    export: bool


@dataclass(frozen=True)
class Operation(Section):
    progress: bool
    tensorboard: bool
    wandb: bool
    mfu: bool
    peak_tflops: float | None
    plot: bool
    profile: bool
    flight_recorder: bool
    start_timeout: int
    step_timeout: int


@dataclass(frozen=True)
class Verify(Section):
    ranks: int
    reshard_to: tuple[int, ...]
    steps: int
    ci: Literal["github", "gitlab", "none"]


@dataclass(frozen=True)
class Launch(Section):
    """Off without engines. A key that begins with the name of an engine is for that engine alone."""

    engines: tuple[Literal["torchrun", "slurm", "kubernetes", "ray", "skypilot"], ...]
    nodes: int
    devices_per_node: int
    device: Literal["gpu", "cpu"]
    cpus_per_device: int
    max_restarts: int
    join_timeout: int
    slurm_partition: str | None
    slurm_account: str | None
    slurm_time: str | None
    kubernetes_image: str | None
    kubernetes_claim: str | None
    kubernetes_namespace: str | None
    kubernetes_runtime: str
    skypilot_accelerator: str | None
    skypilot_volume: str | None


@dataclass(frozen=True)
class Spec(Section):
    version: Literal[1]
    name: str
    model: DecoderModel | ImportModel | TransformersModel
    data: Data
    finetune: FullTuning | Freezing | LoRA
    parallel: Parallel
    precision: Precision
    memory: Memory
    optimizer: AdamW | SGD
    schedule: Curve | WarmupStableDecay | Constant
    train: Train
    checkpoint: Checkpoint
    operation: Operation
    verify: Verify
    launch: Launch
    auto: frozenset[tuple[str, str]] = field(default=frozenset(), compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain data with the keys of the spec file, every derived value a number."""
        values = super().to_dict()
        del values["auto"]
        return values

    def as_written(self) -> dict[str, Any]:
        """The same with `auto` where it was written or is the default: it follows when another value changes.

        A section that is off is left out.
        """
        values = self.to_dict()
        for section, key in self.auto:
            values[section][key] = "auto"
        if not self.launch.engines:
            del values["launch"]
        return values

    @property
    def tokens_per_step(self) -> int | None:
        """None for samples that are not sequences."""
        length = self.model.sequence_length
        return None if length is None else self.train.global_batch * length

    @property
    def own_modules(self) -> tuple[str, ...]:
        """The modules and packages of the user's own that the project imports, by their top name."""
        paths = [part.import_ for part in (self.model, self.data) if isinstance(part, ImportModel | ImportData)]
        return tuple(dict.fromkeys(path.partition(":")[0].partition(".")[0] for path in paths))

    @property
    def parameters(self) -> int | None:
        """The number of parameters of a decoder; None for a model that the scaffold does not write."""
        return decoder_parameters(self.model) if isinstance(self.model, DecoderModel) else None

    def gradient_accumulation_steps(self, world_size: int | None = None) -> int:
        """Micro-batches of one rank in one optimizer step (at verify.ranks unless told)."""
        readers = data_ranks(world_size or self.verify.ranks, self.parallel.tp)
        return self.train.global_batch // (self.train.micro_batch * readers)

    def to_yaml(self) -> str:
        """The spec as YAML that every YAML reader, 1.1 or 1.2, reads back as the same values."""
        from .dump import to_yaml

        return to_yaml(self.to_dict())


def data_ranks(world_size: int, tp: int) -> int:
    """How many ranks read samples of their own: those of one tensor-parallel group read the same."""
    return world_size // min(tp, world_size)


def decoder_parameters(model: DecoderModel) -> int:
    """The closed formula: embedding, blocks (attention, SwiGLU, two norms), last norm, and the head if it is untied."""
    attention = 2 * model.width * model.width + 2 * model.width * model.kv_heads * model.head_size
    block = attention + 3 * model.width * model.ffn + 2 * model.width
    tables = model.vocabulary * model.width * (1 if model.tied_embeddings else 2)
    return tables + model.layers * block + model.width


def _plain(value: Any) -> Any:
    if isinstance(value, Section):
        return value.to_dict()
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, dict) else value
