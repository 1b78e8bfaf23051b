"""The corpus: scripts with one seeded fault each (tests/faults) and right scripts (tests/zoo,
tests/hosts).

A case is a script whose docstring holds `key: value` lines on how to run it, a folder with a
`verify.yaml`, or a YAML file that says which right script or folder is edited, and how:

    rule: mesh-argument-wrong            the rule that must name it
    host: zoo/hsdp.py                    below tests/: a script, or a folder with a verify.yaml
    source: where the fault is known from
    silent: true                         exits 0 and trains
    also: [matches-ddp]                  rules that may fail too, as a consequence
    tier: simulate                       if a real run at this size would show nothing;
                                         static, if it needs what is not here
    edits:                               `old` stands exactly once in `file`
                                         (without one: in the script)
      - file: model.py
        old: |
          fully_shard(model, mesh=mesh)
        new: |
          fully_shard(model)

Every other key is a setting of the target and wins over the host's own.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from verified_fsdp2.verifier.config.flags import FLAGS

TESTS = Path(__file__).resolve().parents[1] / "tests"
SETTINGS = (*FLAGS, "args")
ABOUT = ("rule", "host", "source", "silent", "also", "edits", "strength", "tier")


@dataclass(frozen=True)
class Case:
    """One script, folder or edit. `rule` is None for a right one."""

    path: Path
    rule: str | None = None
    host: Path | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    edits: tuple[dict[str, str], ...] = ()

    @property
    def name(self) -> str:
        """`faults/hsdp_mesh`, `zoo/minimal`: the path below tests/ without its suffix."""
        return str(self.path.relative_to(TESTS).with_suffix(""))

    @property
    def tier(self) -> str:
        """The tier that can see the fault; a key `tier: simulate` is for what only a large world
        size shows.
        """
        return str(self.about.get("tier", "ranks"))

    @property
    def silent(self) -> bool:
        """Whether the script with its fault exits 0 and trains; a script says it in its header, as
        `silent: false` if not.
        """
        return bool(self.about.get("silent", True))

    @property
    def kind(self) -> str:
        """`script`, `edit` (of a right script) or `project` (an edit of several modules that belong
        together).
        """
        if self.host is None:
            return "script" if self.path.is_file() else "project"
        return "project" if self.host.is_dir() else "edit"

    @property
    def fixed_size(self) -> bool:
        """Whether the case needs its own number of ranks, such as four for a mesh of two
        dimensions.
        """
        config = self.path / "verify.yaml" if self.path.is_dir() else None
        own = yaml.safe_load(config.read_text(encoding="utf-8")) if config is not None else {}
        return int(self.settings.get("nproc", own.get("nproc", 2))) > 2

    def files(self) -> list[Path]:
        """The Python files of the script or of its folder."""
        base = self.host or self.path
        return sorted(base.rglob("*.py")) if base.is_dir() else [base]

    def target(self, into: Path) -> Path:
        """The script or folder to verify; an edited copy is made in the new folder `into`."""
        if self.host is None:
            return self.path
        copy = into / self.path.stem
        if self.host.is_dir():
            shutil.copytree(self.host, copy, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            copy.mkdir(parents=True)
            shutil.copy(self.host, copy / self.host.name)
            copy /= self.host.name
        edit(copy, self.edits, str(self.path))
        return copy


def edit(copy: Path, edits: Iterable[dict[str, str]], case: str) -> None:
    """Put the fault of a case into `copy`, a script or a folder, by its edits in their order."""
    for one in edits:
        file = copy / one["file"] if "file" in one else copy
        # as it is: reading as text would change the ends of lines
        text = file.read_bytes().decode()
        if text.count(one["old"]) != 1:
            raise ValueError(
                f"{case}: `old` stands {text.count(one['old'])} times in {file.name}, not once"
            )
        file.write_bytes(text.replace(one["old"], one["new"]).encode())


def faults() -> list[Case]:
    """Every seeded fault, by name."""
    folder = TESTS / "faults"
    return [load(path) for path in sorted([*folder.glob("*.py"), *folder.glob("*.yaml")])]


def right() -> list[Case]:
    """Every right script and host project, by name."""
    hosts = [path.parent for path in sorted((TESTS / "hosts").glob("*/verify.yaml"))]
    return [load(path) for path in [*sorted((TESTS / "zoo").glob("*.py")), *hosts]]


# What `make test` starts ranks for: a fault of each family, and right scripts that use most of them
# (tests/verifier/test_corpus.py).
IN_EVERY_TEST_RUN = (
    "zoo/hsdp",
    "zoo/minimal",
    "faults/checkpointed_after_sharding",
    "faults/double_or_missing_world_scale",
    "faults/gradients_consumed_once",
    "faults/manual_local_norm_clip",
    "faults/matches_ddp",
    "faults/mesh_argument_wrong",
    "faults/rank_conditional_collective",
    "faults/reduce_dtype_follows_param_dtype",
    "faults/root_only_wrap",
    "faults/same_data_on_every_rank",
    "faults/set_device_missing",
    "faults/suppressed_for_nothing",
    "faults/wrapper_prefix_keys",
    # No test on a hand-written trace makes these rules fail.
    "faults/converted_decays_norms",
    "faults/optim_built_after_forward",
    "faults/rank_dependent_init_no_broadcast",
    "faults/uneven_experts",
)
# One right script for each way in which they differ most; the rest of the zoo runs in `make
# detection`.
REPRESENTATIVE = (
    "zoo/minimal",
    "zoo/accumulation_token_mean",
    "zoo/async_checkpoint",
    "zoo/checkpoint_dropout_rng",
    "zoo/dataloader_workers",
    "zoo/forward_method",
    "zoo/hsdp",
    "zoo/ignored_params",
    "zoo/lora_adapters",
    "zoo/manual_global_clip",
    "zoo/meta_init_rope",
    "zoo/mixed_precision",
    "zoo/reentrant_checkpointing",
    "zoo/tied_embeddings",
)


def representative(cases: list[Case]) -> list[Case]:
    """The part that `make test-all` runs: the first fault of each rule, and the right scripts of
    REPRESENTATIVE.
    """
    seen: dict[str, Case] = {}
    for case in sorted(cases, key=lambda case: case.kind == "project"):  # short ones first
        if case.rule is not None:
            seen.setdefault(case.rule, case)
    return list(seen.values()) or [case for case in cases if case.name in REPRESENTATIVE]


def load(path: Path) -> Case:
    """The case at `path`."""
    if path.is_dir():
        return Case(path)
    if path.suffix == ".py":
        reported = header(path)
        rule, silent = reported.pop("rule", None), reported.pop("silent", "true") == "true"
        return Case(path, rule=rule, settings=reported, about={"silent": silent})
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    unknown = set(values) - {*SETTINGS, *ABOUT}
    if unknown:
        raise ValueError(f"{path}: unknown keys {sorted(unknown)}")
    host = TESTS / values["host"]
    own = {key: values[key] for key in SETTINGS if key in values}
    base = header(host) if host.is_file() else {}
    for key in ("rule", "silent"):
        base.pop(key, None)
    about = {key: values[key] for key in ABOUT if key in values}
    return Case(path, values.get("rule"), host, {**base, **own}, about, tuple(values["edits"]))


def header(script: Path) -> dict[str, str]:
    """The `key: value` lines of a corpus script's docstring."""
    doc = script.read_text(encoding="utf-8").partition('"""')[2].partition('"""')[0]
    return {
        m[1]: m[2]
        for m in re.finditer(rf"^({'|'.join(('rule', 'silent', *SETTINGS))}): (.*)$", doc, re.M)
    }
