"""From a spec to a training project: render all files in memory, then write them all or none."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import __version__
from ..verifier.errors import UserError
from .scaffold_literals import FILTERS
from .spec import Spec
from .spec.dump import to_yaml

TEMPLATES = Path(__file__).resolve().parents[1] / "templates"
MANIFEST = ".fsdp2/manifest.json"
BASE = ".fsdp2/base"
SPEC_VERSION = 1
SCHEDULES = {
    "cosine": "a cosine down to MIN_LR_RATIO at STEPS",
    "linear": "a straight line down to MIN_LR_RATIO at STEPS",
    "wsd": "constant, then a straight line down to MIN_LR_RATIO over DECAY_STEPS",
    "constant": "constant",
}


def files(spec: Spec) -> dict[str, str]:
    """The files of the project, path to template: only what the spec asks for."""
    export = {"export.py": "export.py.j2"} if spec.checkpoint.export else {}
    return {
        "train.py": "train.py.j2",
        "model.py": "model.py.j2",
        "optim.py": "optim.py.j2",
        "data.py": "data.py.j2",
        "checkpoint.py": "checkpoint.py.j2",
        "runs.py": "runs.py.j2",
        "metrics.py": "metrics.py.j2",
        "distributed.py": "distributed.py.j2",
        **export,
        "verify.yaml": "verify.yaml.j2",
        "spec.yaml": "spec.yaml.j2",
        "README.md": "README.md.j2",
        "tests/test_train.py": "test_train.py.j2",
    }


def render(spec: Spec) -> dict[str, str]:
    """The files of the project, path to text: the same bytes for the same spec."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters.update(FILTERS, document=lambda data: to_yaml(data).rstrip("\n"))
    values = context(spec)
    return {path: environment.get_template(template).render(values) for path, template in files(spec).items()}


def context(spec: Spec) -> dict[str, Any]:
    """What the templates see: the sections of the spec, and what is on or off in it."""
    values = spec.to_dict()
    model, optimizer, parallel, train = values["model"], values["optimizer"], values["parallel"], values["train"]
    data, length = values["data"], model["sequence_length"]
    own = {path.removesuffix(".py") for path in files(spec)}
    for section in ("model", "data"):
        path = values[section].get("import", "")
        if path.partition(":")[0].partition(".")[0] in own:
            raise UserError(f"{section}.import {path!r}: the scaffold has a module of this name; rename yours")
    decay = optimizer["weight_decay"] > 0
    worlds = values["verify"]["reshard_to"]
    suited = [world for world in worlds if _fits(parallel, world)]
    return {
        **values,
        "spec": values,
        "decoder": model["kind"] == "decoder",
        "gqa": model["kind"] == "decoder" and model["kv_heads"] != model["heads"],
        "text_data": data["kind"] == "text",
        "synthetic": data["kind"] == "synthetic",
        "images": data["kind"] == "images",
        "sequences": length is not None,
        "unit": "sample" if length is None else "token",
        "dry_sample": length is None and data["kind"] == "import",
        "vocabulary_checked": _needs_vocabulary(values),
        "stdlib": any(file.startswith("{stdlib}") for file in values["data"].get("files", [])),
        "bf16": values["precision"]["param_dtype"] == "bfloat16",
        "hsdp": parallel["dp_replicate"] > 1,
        "fixed_shard": parallel["dp_shard"] != "auto",
        "adamw": optimizer["kind"] == "adamw",
        "decay": decay,
        "grouped": decay and optimizer["decay_only_matrices"],
        "groups": {group["match"]: _own_settings(group) for group in optimizer["groups"]},
        "warmup": values["schedule"]["warmup_steps"] > 0,
        "schedule_words": _schedule_words(values["schedule"]),
        "clip": train["clip_norm"] is not None,
        "skip": train["on_nonfinite"] == "skip",
        "every_step": train["log_interval"] == 1,
        "asynchronous": values["checkpoint"]["mode"] != "sync",
        "process": values["checkpoint"]["mode"] == "process",
        "tied_names": values["checkpoint"]["export"] and model["kind"] == "import",
        "reshard_to": suited,
        "unsuited": [world for world in worlds if world not in suited],
        "save_step": values["verify"]["steps"] // 2 + 1,
    }


def _own_settings(group: Mapping[str, Any]) -> dict[str, float]:
    """In what a parameter group differs from the optimizer."""
    return {key: group[key] for key in ("lr", "weight_decay") if group[key] is not None}


def _schedule_words(schedule: Mapping[str, Any]) -> str:
    warmup = "linear warm-up, then " if schedule["warmup_steps"] else ""
    words = warmup + SCHEDULES[schedule["kind"]]
    return words[0].upper() + words[1:] + "."


def _needs_vocabulary(values: Mapping[str, Any]) -> bool:
    """Whether the data are made for, or checked against, the number of token ids or classes."""
    return values["data"]["kind"] != "text" or values["data"]["tokenizer"] is not None


def _fits(parallel: Mapping[str, Any], world: int) -> bool:
    """Whether the generated mesh can be built on this many ranks."""
    if world == 1:
        return True
    if parallel["dp_shard"] == "auto":
        return bool(world % parallel["dp_replicate"] == 0)
    return bool(world == parallel["dp_shard"] * parallel["dp_replicate"])


def manifest(files: Mapping[str, str]) -> dict[str, str]:
    """The files that let `update` tell an edit of the user from a change of the templates."""
    hashes = {path: hashlib.sha256(text.encode()).hexdigest() for path, text in files.items()}
    record = {"manifest": 1, "spec_version": SPEC_VERSION, "generator": __version__, "files": hashes}
    # The suffix keeps linters, formatters and test runners away from them.
    base = {f"{BASE}/{path}.base": text for path, text in files.items()}
    return {**base, MANIFEST: json.dumps(record, indent=2) + "\n"}


def write(files: Mapping[str, str], out: Path, force: bool = False) -> None:
    """Write the project: all files or none; with `force` over an older one, whose other files stay."""
    check_target(files, out, force)
    everything = {**files, **manifest(files)}
    target = Path(os.path.realpath(out))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            new = staging / "new"
            for path, text in everything.items():
                (new / path).parent.mkdir(parents=True, exist_ok=True)
                (new / path).write_text(text, encoding="utf-8", newline="\n")
            if target.exists():
                _replace_each(everything, new, target, staging / "old")
            else:
                new.rename(target)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror} ({error.filename})") from error


def check_target(files: Mapping[str, str], out: Path, force: bool = False) -> None:
    """Refuse a target that would lose or misplace a file."""
    if not os.path.lexists(out):
        return
    if not out.is_dir():
        raise UserError(f"{out} exists and is not a folder")
    if any(out.iterdir()) and not force:
        raise UserError(f"{out} is not empty; choose another folder, or --force to replace the files of the scaffold")
    for path in (*files, *manifest(files)):
        for parent in Path(path).parents:
            place = out / parent
            if parent != Path() and os.path.lexists(place) and (place.is_symlink() or not place.is_dir()):
                raise UserError(f"{place} is in the way: it must be a folder")
        if (out / path).is_dir():
            raise UserError(f"{out / path} is in the way: it must be a file")


def _replace_each(paths: Mapping[str, str], new: Path, target: Path, old: Path) -> None:
    """Move the new files in; if one cannot be, everything is as it was."""
    done: list[str] = []
    try:
        for path in paths:
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            (old / path).parent.mkdir(parents=True, exist_ok=True)
            done.append(path)
            if os.path.lexists(target / path):
                (target / path).rename(old / path)
            (new / path).rename(target / path)
    except BaseException:
        for path in reversed(done):
            (target / path).unlink(missing_ok=True)
            if os.path.lexists(old / path):
                (old / path).rename(target / path)
        raise
