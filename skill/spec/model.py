"""The spec as a record: the keys and values that the schema allows, every default filled in, every
derived value a number.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from math import lcm
from pathlib import Path
from typing import Any

from .data_files import is_url
from .dump import to_yaml
from .meshes import Mesh, verified
from .presets import values_of

# parameters of which no device keeps a whole gradient from one micro-batch to the next, and whose
# training state takes the memory of a laptop
LARGE = 10**9
# not written to the spec of a project
OFF = [
    *((key, None) for key in ("config", "preset", "window", "full_attention_every", "experts")),
    ("qk_norm", False),
    ("norm_eps", 1e-5),
]


@dataclass(frozen=True)
class Spec:
    """`spec["train"]["steps"]` is the value of the key `train.steps`.

    Which keys there are is said by schema.json alone.

    `auto` names the keys (section, key) whose value was `auto`; `relative` has the paths that were
    written relative to the folder `base`: absolute path to written one. Do not change what is in
    `values`.
    """

    values: dict[str, Any]
    auto: frozenset[tuple[str, str]] = field(default=frozenset(), compare=False)
    base: Path = field(default=Path(), compare=False)
    relative: Mapping[str, str] = field(default_factory=dict, compare=False)

    def __getitem__(self, key: str) -> Any:
        return self.values[key]

    def to_dict(self) -> dict[str, Any]:
        """A copy of the values: plain data with the keys of the spec file, every derived value a
        number.
        """
        return deepcopy(self.values)

    def as_written(self) -> dict[str, Any]:
        """The same with `auto` where it was written or is the default: it follows when another
        value changes.

        A section that is off is left out, and so is what a preset says.
        """
        values = self.to_dict()
        for section, key in self.auto:
            values[section][key] = "auto"
        if not values["launch"]["engines"]:
            del values["launch"]
        from_preset = values_of(values["model"])
        values["model"] = {
            k: v
            for k, v in values["model"].items()
            if from_preset.get(k) != v and (k, v) not in OFF
        }
        if values["verify"]["model"] == "auto":
            del values["verify"]["model"]
        return values

    @property
    def tokens_per_step(self) -> int | None:
        """None for samples that are not sequences."""
        length = self["model"]["sequence_length"]
        return None if length is None else self["train"]["global_batch"] * length

    @property
    def verification_mesh(self) -> Mesh:
        """The mesh on which `fsdp2 verify` runs the project."""
        mesh = verified(self["parallel"], self["launch"], self["verify"]["nproc"])
        assert mesh is not None, "a checked spec has one"
        return mesh

    @property
    def scaled(self) -> dict[str, int]:
        """The dimensions of the mesh that are smaller in the verification, with their sizes there;
        {} if none is.
        """
        sizes = self.verification_mesh._asdict()
        fixed = {key: self["parallel"][key] for key in sizes if self["parallel"][key] != "auto"}
        return {key: sizes[key] for key, size in fixed.items() if size != sizes[key]}

    @property
    def verification_flags(self) -> list[str]:
        """What train.py gets for the mesh, the model and the batch of the verification."""
        return _flags(self.scaled) + self.small_flags

    @property
    def small_flags(self) -> list[str]:
        """What it gets for the small model, on any number of ranks."""
        return ["--debug-model", *_flags(self.small_batch)] if self["verify"]["model"] else []

    @property
    def small_batch(self) -> dict[str, int]:
        """The batch of a verification with a small model: few samples, that divide among the ranks
        of its mesh and of the other worlds, and one or two passes of a rank.
        """
        train, mesh = self["train"], self.verification_mesh
        micro = min(train["micro_batch"], 2)
        readers = [data_ranks(n, mesh.alike) for n in (mesh.ranks, *self["verify"]["reshard_to"])]
        passes = train["global_batch"] // (train["micro_batch"] * readers[0])
        return {"global_batch": micro * lcm(*readers) * min(passes, 2), "micro_batch": micro}

    def copies(self, ranks: int) -> int:
        """Copies of the model on so many ranks."""
        parallel = self["parallel"]
        replicate, shard, tp, cp = (parallel[key] for key in Mesh._fields)
        return max(1, ranks // (shard * tp * cp)) if replicate == "auto" else int(replicate)

    @property
    def own_modules(self) -> tuple[str, ...]:
        """The modules and packages of the user's own that the project imports, by their top
        name.
        """
        paths = [
            part["import"] for part in (self["model"], self["data"]) if part["kind"] == "import"
        ]
        return tuple(dict.fromkeys(path.partition(":")[0].partition(".")[0] for path in paths))

    @property
    def urls(self) -> list[str]:
        """The data files behind URLs, as they are written, each once."""
        validation = self["data"].get("validation") or []
        sets = validation.values() if isinstance(validation, dict) else [validation]
        lists = [
            self["data"].get("files", []),
            *(one["files"] for one in self["data"].get("mixture", [])),
            *sets,
        ]
        several = [[files] if isinstance(files, str) else files for files in lists]
        return list(dict.fromkeys(file for files in several for file in files if is_url(file)))

    @property
    def parameters(self) -> int | None:
        """The number of parameters of a decoder; None for a model that the scaffold does not
        write.
        """
        return decoder_parameters(self["model"]) if self["model"]["kind"] == "decoder" else None

    @property
    def experts_alone(self) -> bool:
        """Whether the experts are groups of FSDP of their own, on a mesh of their own: divided over
        ranks, or beside matrices that are split over ranks.
        """
        parallel = self["parallel"]
        split = parallel["tp"] > 1 and bool(self["model"].get("experts"))
        return parallel["ep"] > 1 or split

    @property
    def on_a_laptop(self) -> bool:
        """Whether what is verified surely trains on the CPUs of a laptop."""
        small = self["verify"]["model"] or (self.parameters or LARGE) < LARGE
        return bool(small) and not self["precision"]["fp8"]

    def gradient_accumulation_steps(self, world_size: int | None = None) -> int:
        """Micro-batches of one rank in one optimizer step (by default at verify.nproc)."""
        readers = data_ranks(world_size or self["verify"]["nproc"], self.verification_mesh.alike)
        steps: int = self["train"]["global_batch"] // (self["train"]["micro_batch"] * readers)
        return steps

    def to_yaml(self) -> str:
        """The spec as YAML that every YAML reader, 1.1 or 1.2, reads back as the same values."""
        return to_yaml(self.values)


def _flags(sizes: Mapping[str, int]) -> list[str]:
    return [f"--{key.replace('_', '-')} {size}" for key, size in sizes.items()]


def data_ranks(world_size: int, alike: int) -> int:
    """How many ranks read samples of their own: those of one tensor- or context-parallel group read
    the same.
    """
    return world_size // min(alike, world_size)


def decoder_parameters(model: Mapping[str, Any]) -> int:
    """The closed formula: embedding, blocks (attention, SwiGLU or experts, two norms), last norm,
    the head if it is untied.
    """
    width, vocabulary = int(model["width"]), int(model["vocabulary"])
    attention = 2 * width * width + 2 * width * model["kv_heads"] * (width // model["heads"])
    block = attention + 2 * width + (2 * width // model["heads"] if model.get("qk_norm") else 0)
    if experts := model.get("experts"):
        number, dense = experts["number"], experts["first_dense"]
        mixture = number * width + 3 * width * experts["ffn"] * (number + experts["shared"])
    else:
        mixture, dense = 0, model["layers"]
    hidden = dense * 3 * width * model["ffn"] + (model["layers"] - dense) * mixture
    tables = vocabulary * width * (1 if model["tied_embeddings"] else 2)
    return tables + int(model["layers"] * block + hidden) + width
