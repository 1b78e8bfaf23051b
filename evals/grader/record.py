"""What the ranks of one run wrote, put together: whole weights and gradients after each step,
without any code of the script.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Piece = dict[str, Any]
Tensors = dict[str, torch.Tensor]


class Broken(Exception):
    """The pieces of a tensor do not make one tensor."""


def whole(name: str, pieces: list[Piece]) -> torch.Tensor:
    """The tensor whose pieces these are, one for each rank; replicas must be equal."""
    if not any(p["sharded"] for p in pieces):
        for rank, other in enumerate(pieces[1:], 1):
            if not torch.equal(other["local"], pieces[0]["local"]):
                raise Broken(
                    f"{name} is a plain tensor that differs between rank 0 and rank {rank}"
                )
        plain: torch.Tensor = pieces[0]["local"]
        return plain
    if not all(p["sharded"] for p in pieces):
        raise Broken(f"{name} is sharded on some ranks only")
    mesh, placements = pieces[0]["mesh"], pieces[0]["placements"]
    local: Tensors = {str(tuple(p["coordinate"])): p["local"] for p in pieces}

    def build(place: tuple[int, ...]) -> torch.Tensor:
        if len(place) == len(mesh):
            return local[str(place)]
        parts = [build((*place, index)) for index in range(mesh[len(place)])]
        if isinstance(dim := placements[len(place)][0], int):
            return torch.cat([p for p in parts if p.numel()] or parts[:1], dim)
        if dim != "R" and not dim.startswith("Replicate"):
            raise Broken(f"{name} has the placement {dim}")
        if any(not torch.equal(p, parts[0]) for p in parts):
            raise Broken(f"the replicas of {name} differ")
        return parts[0]

    result = build(())
    if list(result.shape) != pieces[0]["shape"]:
        raise Broken(f"the shards of {name} make {list(result.shape)}, not {pieces[0]['shape']}")
    return result


@dataclass(frozen=True)
class Record:
    """One run's folder."""

    folder: Path
    ranks: int

    @functools.cached_property
    def reported(self) -> list[dict[str, Any]]:
        paths = [self.folder / f"reported.{rank}.json" for rank in range(self.ranks)]
        return [json.loads(path.read_text(encoding="utf-8")) for path in paths]

    @property
    def steps(self) -> int:
        """The steps that every rank made."""
        return min(int(reported["steps"]) for reported in self.reported)

    def pieces(self, what: str, step: int) -> list[Any]:
        """What each rank stored of `what` (weights, grads) at a step."""
        paths = [self.folder / f"{what}{step}.{rank}.pt" for rank in range(self.ranks)]
        if not all(path.exists() for path in paths):
            raise Broken(f"not every rank came to optimizer step {max(step, 1)}")
        return [torch.load(path, weights_only=True) for path in paths]

    def parameters(self, step: int) -> list[dict[str, Piece]]:
        """Each rank's pieces of the parameters after a step."""
        return [kept["parameters"] for kept in self.pieces("weights", step)]

    def weights(self, step: int) -> Tensors:
        return together(self.parameters(step))

    def buffers(self, step: int) -> Tensors:
        """Rank 0's buffers; buffers may differ between ranks only if the check says so."""
        return {
            name: piece["local"]
            for name, piece in self.pieces("weights", step)[0]["buffers"].items()
        }

    def grads(self, step: int) -> Tensors:
        """The gradients that the optimizer got at a step."""
        return together(self.pieces("grads", step))


def together(ranks: list[dict[str, Piece]]) -> Tensors:
    """Whole tensors by name."""
    names = list(ranks[0])
    if any(list(other) != names for other in ranks):
        raise Broken("the ranks do not have the same tensors")
    return {name: whole(name, [rank[name] for rank in ranks]) for name in names}


def renamed(tensors: Tensors, names: list[str]) -> Tensors:
    """The tensors under the names that are asked for, where a model was put into, or taken out of,
    another module.
    """
    result = {}
    for name in names:
        found = [own for own in tensors if own == name] or [
            own for own in tensors if own.endswith("." + name) or name.endswith("." + own)
        ]
        if len(found) != 1:
            raise Broken(f"no parameter {name}; there are {', '.join(list(tensors)[:4])} ...")
        result[name] = tensors[found[0]]
    return result
