"""From a spec to a training project: render all files in memory, then write them all or none."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import __version__
from ...verifier.errors import UserError
from .. import atomic_write
from ..spec import Spec
from ..spec.dump import to_yaml
from . import manifest
from .data import data_context, data_files
from .imports import used_imports
from .launch import launch_context, launch_files
from .literals import FILTERS
from .model import model_context
from .parallel import parallel_context

if TYPE_CHECKING:
    import jinja2

TEMPLATES = Path(__file__).resolve().parents[2] / "templates"
SCHEDULES = {
    "cosine": "a cosine down to MIN_LR_RATIO at STEPS",
    "linear": "a straight line down to MIN_LR_RATIO at STEPS",
    "wsd": "constant, then a straight line down to MIN_LR_RATIO over DECAY_STEPS",
    "constant": "constant",
}
CI = {"github": ".github/workflows/verify.yml", "gitlab": ".gitlab-ci.yml"}
PACKAGES = {"progress": "tqdm", "tensorboard": "tensorboard", "wandb": "wandb"}  # what a run needs for operation.KEY


def files(spec: Spec) -> dict[str, str]:
    """The files of the project, path to template: only what the spec asks for."""
    operation, ci = spec["operation"], spec["verify"]["ci"]
    wanted = {
        "train.py": True,
        "model.py": True,
        "lora.py": spec["finetune"]["kind"] == "lora",
        "optim.py": True,
        **dict.fromkeys(data_files(spec["data"]), True),
        **dict.fromkeys(("checkpoint.py", "runs.py", "metrics.py"), True),
        "flops.py": operation["mfu"],
        "profiling.py": operation["profile"],
        "plot.py": operation["plot"],
        "distributed.py": True,
        "export.py": spec["checkpoint"]["export"],
        **dict.fromkeys(("verify.yaml", "spec.yaml", "README.md"), True),
    }
    found = {path: f"{path}.j2" for path, asked in wanted.items() if asked}
    found |= {"model.py": "model_transformers.py.j2"} if spec["model"]["kind"] == "transformers" else {}
    found |= {"tests/test_train.py": "test_train.py.j2", **({CI[ci]: f"ci_{ci}.yml.j2"} if ci in CI else {})}
    return {**found, **launch_files(spec["launch"])}


def render(spec: Spec) -> dict[str, str]:
    """The files of the project, path to text: the same bytes for the same spec."""
    values = context(spec)
    return {path: _environment().get_template(template).render(values) for path, template in files(spec).items()}


@cache
def _environment() -> jinja2.Environment:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters.update(FILTERS, used_imports=used_imports, document=lambda data: to_yaml(data).rstrip("\n"))
    return environment


def context(spec: Spec) -> dict[str, Any]:
    """What the templates see: the sections of the spec, and the switches that follow from it."""
    values = spec.to_dict()
    model, optimizer, parallel, train = values["model"], values["optimizer"], values["parallel"], values["train"]
    length = model["sequence_length"]
    for name in spec.own_modules:
        if f"{name}.py" in files(spec):
            raise UserError(f"import: the scaffold has a module {name!r} of its own; rename yours")
    operation, data = values["operation"], data_context(values)
    packages = [package for key, package in PACKAGES.items() if operation[key]]
    decay = optimizer["weight_decay"] > 0
    worlds = values["verify"]["reshard_to"]
    suited = [world for world in worlds if _fits(parallel, world)]
    return {
        **values,
        **data,
        **model_context(values),
        **launch_context(spec),
        "spec": spec.as_written(),
        "own_modules": spec.own_modules,
        "version": __version__,
        "ci_file": CI.get(spec["verify"]["ci"]),
        "gqa": model["kind"] == "decoder" and model["kv_heads"] != model["heads"],
        "sequences": length is not None,
        "unit": "sample" if length is None else "token",
        "bf16": values["precision"]["param_dtype"] == "bfloat16",
        "broadcast": model.get("initialize") == "rank-0",
        **parallel_context(values),
        "hsdp": parallel["dp_replicate"] > 1,
        "fixed_shard": parallel["dp_shard"] != "auto",
        "adamw": optimizer["kind"] == "adamw",
        "decay": decay,
        "grouped": decay and optimizer["decay_only_matrices"],
        "groups": {group["match"]: _own_settings(group) for group in optimizer["groups"]},
        "warmup": values["schedule"]["warmup_steps"] > 0,
        "schedule_words": _schedule_words(values["schedule"]),
        "clip": train["max_norm"] is not None,
        "skip": train["on_nonfinite"] == "skip",
        "every_step": train["log_interval"] == 1,
        "packages": packages,
        "wanted_packages": [
            *["transformers"] * (model["kind"] == "transformers"),
            *data["data_packages"],
            *packages,
            *["matplotlib"] * operation["plot"],
            *["torchao"] * values["precision"]["fp8"],
        ],
        "peak_table": operation["mfu"] and operation["peak_tflops"] is None,
        "asynchronous": values["checkpoint"]["mode"] != "sync",
        "process": values["checkpoint"]["mode"] == "process",
        "tied_names": values["checkpoint"]["export"] and model["kind"] == "import",
        "reshard_to": suited,
        "unsuited": [world for world in worlds if world not in suited],
        "save_step": values["verify"]["steps"] // 2 + 1,
    }


def _own_settings(group: Mapping[str, Any]) -> dict[str, float]:
    """The settings in which a parameter group differs from the optimizer."""
    return {key: group[key] for key in ("lr", "weight_decay") if group[key] is not None}


def _schedule_words(schedule: Mapping[str, Any]) -> str:
    warmup = "linear warm-up, then " if schedule["warmup_steps"] else ""
    words = warmup + SCHEDULES[schedule["kind"]]
    return words[0].upper() + words[1:] + "."


def _fits(parallel: Mapping[str, Any], world: int) -> bool:
    """Whether the generated mesh can be built on this many ranks."""
    unit, shard = parallel["dp_replicate"] * parallel["tp"], parallel["dp_shard"]
    return bool(world == 1 or (world % unit == 0 if shard == "auto" else world == shard * unit))


def write(files: Mapping[str, str], out: Path, force: bool = False) -> None:
    """Write the project: all files or none; with `force` over an older one, whose other files stay."""
    check_target(files, out, force)
    contents = {path: text.encode() for path, text in files.items()}
    atomic_write.write_files({**contents, **manifest.record(contents)}, out)


def check_target(files: Mapping[str, str], out: Path, force: bool = False) -> None:
    """Raises UserError for a target where a file would be lost or misplaced."""
    if not os.path.lexists(out):
        return
    if not out.is_dir():
        raise UserError(f"{out} exists and is not a folder")
    if any(out.iterdir()) and not force:
        raise UserError(f"{out} is not empty; choose another folder, or --force to replace the files of the scaffold")
    for path in (*files, manifest.MANIFEST, *map(manifest.base_path, files)):
        if why := atomic_write.obstacle(out, path, replace_link=True):
            raise UserError(why)


def edited(files: Mapping[str, str], out: Path) -> list[str]:
    """Which of these files exist in `out` with a text that no scaffold wrote."""
    try:
        hashes = manifest.read(out).files
    except UserError:
        hashes = {}
    there = {path: (out / path).read_bytes().replace(b"\r\n", b"\n") for path in files if (out / path).is_file()}
    return [
        path
        for path, data in there.items()
        if manifest.sha256(data) != hashes.get(path) and data != files[path].encode()
    ]
