"""The spec as a record: the keys and values that the schema allows, every default filled in, every
derived value a number.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from .data_files import is_url
from .dump import to_yaml
from .meshes import Mesh, verified
from .presets import values_of

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

    `auto` names the keys (section, key) whose value was `auto`. Do not change what is in `values`.
    """

    values: dict[str, Any]
    auto: frozenset[tuple[str, str]] = field(default=frozenset(), compare=False)

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
        if values["verify"]["model"] is None:
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
        """What train.py gets for the mesh and the model of the verification."""
        small = ["--debug-model"] if self["verify"]["model"] is not None else []
        return [f"--{key.replace('_', '-')} {size}" for key, size in self.scaled.items()] + small

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

    def gradient_accumulation_steps(self, world_size: int | None = None) -> int:
        """Micro-batches of one rank in one optimizer step (by default at verify.nproc)."""
        readers = data_ranks(world_size or self["verify"]["nproc"], self.verification_mesh.alike)
        steps: int = self["train"]["global_batch"] // (self["train"]["micro_batch"] * readers)
        return steps

    def to_yaml(self) -> str:
        """The spec as YAML that every YAML reader, 1.1 or 1.2, reads back as the same values."""
        return to_yaml(self.values)


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
