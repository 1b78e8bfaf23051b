"""From a spec to a training project: render all files in memory, then write them all or none."""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from ...verifier.errors import UserError
from .. import atomic_write
from ..spec import Spec
from ..spec.dump import to_yaml
from . import manifest
from .context import averages, context, reads_llama, retains
from .data import data_files
from .launch import launch_files
from .literals import FILTERS
from .paths import relative
from .pruned import pruned
from .requirements import requirements

if TYPE_CHECKING:
    import jinja2

# made from the rest
HYGIENE = {".gitignore": "gitignore.j2", "pyproject.toml": "pyproject.toml.j2"}
CI = {"github": ".github/workflows/verify.yml", "gitlab": ".gitlab-ci.yml"}


def files(spec: Spec) -> dict[str, str]:
    """The files of the project, path to template: only what the spec asks for."""
    operation, ci, launch = spec["operation"], spec["verify"]["ci"], spec["launch"]
    wanted = {
        **_of_the_model(spec),
        **_of_the_optimizer(spec),
        **data_files(spec["data"]),
        **dict.fromkeys(("checkpoint.py", "runs.py", "metrics.py", "settings.py"), True),
        "retention.py": retains(spec["checkpoint"]),
        "shape.py": operation["shape_flags"],
        "starting.py": spec["train"]["init_from"] is not None,
        "record.py": operation["record"],
        "flops.py": operation["mfu"],
        "profiling.py": operation["profile"],
        "devices.py": launch["device"] == "cuda" and bool(launch["engines"]),
        "distributed.py": True,
        "export.py": spec["checkpoint"]["export"],
        "huggingface.py": spec["checkpoint"]["export"] == "huggingface" or reads_llama(spec),
        "generate.py": spec["checkpoint"]["generate"],
        **dict.fromkeys(("verify.yaml", "spec.yaml", "README.md"), True),
    }
    found = {path: f"{path}.j2" for path, asked in wanted.items() if asked}
    if spec["model"]["kind"] == "transformers":
        found["model.py"] = "model_transformers.py.j2"
    if spec["checkpoint"]["export"] == "huggingface":
        found["export.py"] = "export_llama.py.j2"
    found["tests/test_train.py"] = "test_train.py.j2"
    if ci in CI:
        found[CI[ci]] = f"ci_{ci}.yml.j2"
    return {**found, **launch_files(launch), **HYGIENE}


def _of_the_model(spec: Spec) -> dict[str, bool]:
    """Modules of the step and the model: whether the spec asks for them."""
    return {
        "train.py": True,
        "model.py": True,
        "experts.py": bool(spec["model"].get("experts")),
        "expert_parallel.py": spec.experts_alone,
        "lora.py": spec["finetune"]["kind"] == "lora",
        "quantised.py": spec["finetune"].get("base_dtype") == "nf4",
        "context_parallel.py": spec["parallel"]["cp"] > 1,
        "loss.py": spec["memory"]["chunked_loss"],
    }


def _of_the_optimizer(spec: Spec) -> dict[str, bool]:
    kind = spec["optimizer"]["kind"]
    return {
        "optim.py": True,
        "spikes.py": bool(spec["train"]["skip_spikes"]),
        "adamw8bit.py": kind == "adamw8bit",
        "muon.py": kind == "muon",
        "average.py": averages(spec["optimizer"]),
        "schedule_free.py": kind == "schedule_free",
    }


def render(spec: Spec, out: Path | None = None) -> dict[str, str]:
    """The files of the project, path to text: the same bytes for the same spec.

    In the folder `out` they name its data from there, where the spec names them from its own.
    """
    wanted, values = files(spec), {**context(spec), "ci_file": CI.get(spec["verify"]["ci"])}
    values = relative(values, spec, out) if out is not None else values
    for name in spec.own_modules:
        if f"{name}.py" in wanted:
            raise UserError(f"import: the scaffold has a module {name!r} of its own; rename yours")
    made = pruned(
        {
            path: _environment().get_template(wanted[path]).render(values)
            for path in wanted
            if path not in HYGIENE
        }
    )
    values["requirements"] = requirements(spec, made, values["wanted_packages"])
    return made | {
        path: _environment().get_template(wanted[path]).render(values) for path in HYGIENE
    }


def _template(name: str) -> str | None:
    """The text of a template, None if there is none; in an installed copy it is no file of its
    own.
    """
    with suppress(FileNotFoundError):
        return (pkgutil.get_data(__name__, f"../../templates/{name}") or b"").decode()
    return None


@cache
def _environment() -> jinja2.Environment:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_template),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters.update(FILTERS, document=lambda data: to_yaml(data).rstrip("\n"))
    return environment


def write(files: Mapping[str, str], out: Path, force: bool = False) -> None:
    """Write the project: all files or none; with `force` over an older one, whose other files
    stay.
    """
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
        raise UserError(
            f"{out} is not empty; choose another folder, or --force to replace the files of the"
            " scaffold"
        )
    for path in (*files, manifest.MANIFEST, *map(manifest.base_path, files)):
        if why := atomic_write.obstacle(out, path, replace_link=True):
            raise UserError(why)


def edited(files: Mapping[str, str], out: Path) -> list[str]:
    """Which of these files exist in `out` with a text that no scaffold wrote."""
    try:
        hashes = manifest.read(out).files
    except UserError:
        hashes = {}
    there = {
        path: (out / path).read_bytes().replace(b"\r\n", b"\n")
        for path in files
        if (out / path).is_file()
    }
    return [
        path
        for path, data in there.items()
        if manifest.sha256(data) != hashes.get(path) and data != files[path].encode()
    ]
