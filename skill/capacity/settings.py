"""The settings of a spec that change no mathematics: the values to compare, and the keys that a
choice of them sets.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ...verifier.errors import UserError
from .candidates import Choice, Knob

if TYPE_CHECKING:
    from ..spec import Spec

TP, REPLICATE, MICRO = "parallel.tp", "parallel.dp_replicate", "train.micro_batch"
RESHARD, OFFLOAD = "parallel.reshard_after_forward", "parallel.cpu_offload"
CHECKPOINTING, CHUNKED = "memory.activation_checkpointing", "memory.chunked_loss"
SIZES = (1, 2, 4, 8, 16, 32)  # of a micro-batch
NEAREST = 3  # of these are compared beside the given one
REPLICAS = 3
DEGREES = (1, 2, 4, 8)
# sections of a spec whose values decide how a step is computed, not what
NEUTRAL = ("parallel", "memory", "checkpoint", "operation", "verify", "launch")
# forward passes of a step that is tried; more are counted (verifier/analysis/settings_search.py)
TWO = 2


@dataclass(frozen=True)
class OfSpec:
    """The settings of one spec on so many ranks. `changes`: those with which it is read."""

    path: Path
    changes: tuple[str, ...]
    spec: Spec
    ranks: int
    per_node: int

    def knobs(self) -> list[Knob]:
        """What can be chosen, the given value first. Each has two values or more."""
        found = {
            CHECKPOINTING: [self._value(CHECKPOINTING), "none", "op-selective", "full"],
            MICRO: self._micro_batches(),
            CHUNKED: (
                [self._value(CHUNKED), False, True]
                if self.spec["model"]["kind"] == "decoder"
                else []
            ),
            RESHARD: self._reshard(),
            REPLICATE: self._replicas(),
            TP: self._degrees(),
            OFFLOAD: [False, True],
        }
        knobs = [Knob(name, tuple(dict.fromkeys(values))) for name, values in found.items()]
        return [knob for knob in knobs if len(knob.values) > 1]

    def extremes(self) -> list[dict[str, Any]]:
        """The choices that need least memory, the one that costs least first."""
        knobs = {knob.name: knob.values for knob in self.knobs()}
        found: list[dict[str, Any]] = []
        for more in (
            {
                CHECKPOINTING: "full",
                CHUNKED: True,
                RESHARD: True,
                MICRO: min(knobs.get(MICRO, [1])),
            },
            {REPLICATE: 1},
            {OFFLOAD: True},
        ):
            known = {key: value for key, value in more.items() if value in knobs.get(key, ())}
            if known:
                found.append({**(found[-1] if found else {}), **known})
        return found

    def written(self, choice: Choice) -> dict[str, str]:
        """The keys that differ from the spec, as text for `--set`: the mesh and the nodes follow
        from what was chosen.
        """
        whole = {REPLICATE: self._given_replicas(), MICRO: self._given_micro_batch(), **choice}
        keys = {name: value for name, value in whole.items() if self._value(name) != value}
        parallel, launch = self.spec["parallel"], self.spec["launch"]
        rest = int(choice.get(TP, parallel["tp"])) * int(whole[REPLICATE])
        shard = self.ranks // (rest * parallel["cp"])
        if parallel["dp_shard"] not in ("auto", shard):
            keys["parallel.dp_shard"] = shard
        if launch["engines"] and launch["nodes"] * launch["devices_per_node"] != self.ranks:
            nodes = {
                "nodes": -(-self.ranks // self.per_node),
                "devices_per_node": min(self.ranks, self.per_node),
            }
            keys |= {
                f"launch.{key}": number for key, number in nodes.items() if launch[key] != number
            }
        return {key: _text(value) for key, value in keys.items()}

    def read(self, keys: Mapping[str, str]) -> tuple[Spec, dict[str, str]]:
        """The spec with these keys, and the keys with those of `verify` that a mesh of another
        shape needs. Raises SpecError.
        """
        from ..spec import SpecError, load

        first: SpecError | None = None
        for more in (
            {},
            {"verify.nproc": "auto"},
            {"verify.nproc": "auto", "verify.reshard_to": "[1]"},
        ):
            whole = {**keys, **more}
            try:
                return (
                    load(self.path, [*self.changes, *map("=".join, whole.items())], offline=True),
                    whole,
                )
            except SpecError as error:
                first = first or error
        assert first is not None
        raise first

    def _value(self, key: str) -> Any:
        section, name = key.split(".")
        value = self.spec[section][name]
        return (
            yaml.safe_dump(value, default_flow_style=True, width=math.inf).strip()
            if isinstance(value, list)
            else value
        )

    def _micro_batches(self) -> list[int]:
        given = self._given_micro_batch()
        near = sorted(
            (size for size in SIZES if self._divides(size)),
            key=lambda size: abs(_steps(size, given)),
        )
        return [given, *sorted([size for size in near if size != given][:NEAREST])]

    def _given_micro_batch(self) -> int:
        """That of the spec, or the nearest that divides the global batch on these ranks."""
        given = int(self._value(MICRO))
        suited = [size for size in SIZES if self._divides(size)]
        return (
            given
            if self._divides(given) or not suited
            else min(suited, key=lambda size: abs(_steps(size, given)))
        )

    def _divides(self, size: int) -> bool:
        parallel = self.spec["parallel"]
        return bool(
            self.spec["train"]["global_batch"]
            % (size * (self.ranks // (parallel["tp"] * parallel["cp"])))
            == 0
        )

    def _reshard(self) -> list[bool | int]:
        given, across = (
            self._value(RESHARD),
            self.ranks > self.per_node and self.spec["parallel"]["tp"] == 1,
        )
        return [
            given,
            True,
            False,
            *([self.per_node] if across and self.ranks % self.per_node == 0 else []),
        ]

    def _replicas(self) -> list[int]:
        """Copies of the model: one, and one for each group of nodes; inside a node they only cost
        memory.
        """
        given, cp = self._given_replicas(), self.spec["parallel"]["cp"]
        groups = [
            n
            for n in range(2, self.ranks // self.per_node + 1)
            if self.ranks % (n * self.per_node * cp) == 0
        ]
        stride = max(1, -(-len(groups) // REPLICAS))
        return [given, 1, *groups[::-1][::stride]]

    def _given_replicas(self) -> int:
        """That of the spec; on another number of ranks, as many as leave its dp_shard as it is."""
        parallel = self.spec["parallel"]
        replicate, shard, alike = (
            parallel["dp_replicate"],
            parallel["dp_shard"],
            parallel["tp"] * parallel["cp"],
        )
        if shard == "auto":
            return int(replicate) if self.ranks % (replicate * alike) == 0 else 1
        return max(1, self.ranks // (shard * alike)) if self.ranks % (shard * alike) == 0 else 1

    def _degrees(self) -> list[int]:
        given = self._value(TP)
        suited = [n for n in DEGREES if n <= self.per_node and self.ranks % n == 0]
        return [
            given,
            *(
                suited
                if self.spec["parallel"]["cp"] == 1 and self.spec["model"]["kind"] != "import"
                else []
            ),
        ]


def shortened(spec: Spec, ranks: int) -> tuple[Spec, int]:
    """The spec to try, and the forward passes of its step: more than TWO are not run one by one."""
    parallel, train = spec["parallel"], spec["train"]
    readers = max(1, ranks // (parallel["tp"] * parallel["cp"]))
    passes, rest = divmod(train["global_batch"], train["micro_batch"] * readers)
    if rest or passes <= TWO:
        return spec, min(passes, TWO)
    small = {**train, "global_batch": TWO * train["micro_batch"] * readers}
    return replace(spec, values={**spec.values, "train": small}), passes


def check_grid(grid: Sequence[Knob]) -> None:
    """Raise UserError where a key of a spec is compared of which another value is another
    training.
    """
    for knob in grid:
        if knob.name.partition(".")[0] not in NEUTRAL and knob.name != MICRO:
            message = "another value is another training; compared is what changes no mathematics"
            raise UserError(f"--explore {knob.name}: {message} (plan the others by --set)")


def of_arguments(texts: Sequence[str]) -> list[Knob]:
    """The user's own grid: `--micro-batch 1,2,4`, or `KEY=1,2,4` for a spec; a flag alone is left
    out and given. Raises UserError.
    """
    knobs = []
    for text in texts:
        words = shlex.split(text.replace("=", " ", 1))
        if not words or len(words) > 2 or not re.match(r"[-\w]", words[0]):
            raise UserError(
                "--explore: expected an option and its values, such as '--micro-batch 1,2,4',"
                f" found {text!r}"
            )
        values: list[Any] = (
            [one for one in words[1].split(",") if one] if len(words) > 1 else [False, True]
        )
        if len(set(values)) < 2:
            raise UserError(
                f"--explore: give {words[0]} two values or more, such as '{words[0]} 1,2', found"
                f" {text!r}"
            )
        knobs.append(Knob(words[0], tuple(dict.fromkeys(values))))
    if len({knob.name for knob in knobs}) < len(knobs):
        raise UserError("--explore: give each option once, with all its values")
    return knobs


def as_arguments(choice: Choice) -> list[str]:
    """What a script is given for a choice: `--name value`, or `name=value` where it has no dashes,
    as for Hydra and OmegaConf.
    """
    words: list[str] = []
    for name, value in choice.items():
        if value is not False:
            words += (
                [name]
                if value is True
                else [name, str(value)]
                if name.startswith("-")
                else [f"{name}={value}"]
            )
    return words


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _steps(size: int, given: int) -> float:
    """How far apart two sizes are, in doublings; the larger one of two is nearer."""
    return size / given - 1 if size > given else 1.01 * (given / size - 1)
