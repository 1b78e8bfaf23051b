"""Recipes: verified pieces of a training script, cut from the templates that make scaffolds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..verifier.errors import UserError
from . import scaffold, spec
from .snippet import Definition, extract

ORDER = (
    "distributed.py",
    "settings.py",
    "data.py",
    "model.py",
    "optim.py",
    "runs.py",
    "checkpoint.py",
    "metrics.py",
    "train.py",
)
BASE = Path(__file__).with_name("recipe_base.yaml")
FOREIGN = (
    "kind: import, import: 'mymodel:build', shard: [Block], vocabulary: 256, sequence_length: 256"
)


@dataclass(frozen=True)
class Recipe:
    """What a piece does, the definitions that it is cut from, and the rules that verify it where it
    is pasted.
    """

    about: str
    wanted: tuple[Definition, ...]
    rules: tuple[str, ...]
    settings: tuple[str, ...] = ()


RECIPES = {
    "init-distributed": Recipe(
        "Join the other ranks: device, process group, mesh; under torchrun or alone.",
        (("distributed", "init_distributed"), ("distributed", "build_mesh")),
        ("set-device-missing", "mesh-argument-wrong"),
    ),
    "meta-init": Recipe(
        "Build any module on the meta device but on rank 0, shard it, then fill every parameter and"
        " buffer from rank 0.",
        (("model", "build_model"),),
        (
            "meta-params-not-reset",
            "meta-buffers-garbage",
            "rank-dependent-init-no-broadcast",
            "root-not-wrapped",
        ),
        (f"model={{{FOREIGN}, initialize: rank-0}}",),
    ),
    "optimizer": Recipe(
        "Parameter groups, optimizer and learning-rate schedule, built on the sharded parameters.",
        (("optim", "build_optimizer"), ("optim", "build_scheduler")),
        ("optim-before-shard",),
    ),
    "train-step": Recipe(
        "One optimizer step: accumulation, a loss over the valid tokens of all ranks, clipping on"
        " the global norm.",
        (("train", "Agreement"), ("train", "train_step")),
        (
            "double-or-missing-world-scale",
            "token-mean-of-means",
            "accum-never-resynced",
            "matches-single-process",
        ),
    ),
    "data-position": Recipe(
        "One shuffled order for all ranks and a position in global samples: a run resumes on any"
        " number of ranks.",
        (("data", "GlobalBatches"),),
        (
            "same-data-on-every-rank",
            "scheduler-or-progress-not-restored",
            "reshard-keeps-trajectory",
        ),
    ),
    "checkpoint": Recipe(
        "Save, find the newest complete checkpoint, resume on any number of ranks.",
        (
            ("checkpoint", "Checkpointer"),
            ("runs", "open_run"),
            ("checkpoint", "load_checkpoint"),
        ),
        (
            "resume-is-exact",
            "reshard-keeps-trajectory",
            "incomplete-checkpoint-chosen",
            "damaged-checkpoint-loaded",
        ),
    ),
    "export": Recipe(
        "One safetensors file from a checkpoint, checked against its checksums first.",
        (("export", "main"),),
        ("local-shard-export",),
        ("checkpoint.export=true",),
    ),
    "parallelize": Recipe(
        "Shard any module from the inside out: the classes that are named, then the root.",
        (("model", "build_model"),),
        ("root-not-wrapped", "parent-before-child", "root-only-wrap"),
        (f"model={{{FOREIGN}}}",),
    ),
    "preemption": Recipe(
        "SIGTERM and SIGUSR1 set a flag; all ranks agree on it before a step, save and leave.",
        (("distributed", "catch_signals"), ("train", "Agreement")),
        ("rank-local-control-flow",),
    ),
}


def text(name: str, settings: Sequence[str] = ()) -> str:
    """The code of a recipe with the options of a spec. Raises UserError for an unknown name."""
    if name not in RECIPES:
        raise UserError(f"unknown recipe {name!r}; known: {', '.join(RECIPES)}")
    recipe = RECIPES[name]
    loaded = spec.load(BASE, [*recipe.settings, *settings])
    files = {
        path: code
        for path, code in scaffold.render(loaded).items()
        if path.endswith(".py") and "/" not in path
    }
    ordered = {path: files[path] for path in dict.fromkeys((*ORDER, *files)) if path in files}
    about = [
        f"# {recipe.about}",
        f"# Verify it where you paste it: fsdp2 verify SCRIPT ({', '.join(recipe.rules)})",
    ]
    return "\n".join(about) + "\n" + extract(ordered, recipe.wanted)
