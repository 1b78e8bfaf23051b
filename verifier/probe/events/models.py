"""Models at their first forward: they get the common starting point, or leave it for other runs, and are recorded."""

from __future__ import annotations

import torch
from torch import nn

from ...trace.events import Buffer, Group, Model, Parameter
from .. import starting_point
from ..compat.tensors import Slot, groups, layout, local, slots
from ..measures import repeated_blocks
from ..session import Session
from ..sketch import sketch
from .empty import unset


class Models:
    """The roots of one rank."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def adopt(self, root: nn.Module) -> None:
        """First call of a root: give it the common starting point or leave it for the others, and record what it is."""
        session = self._session
        session.roots = [(name, old) for name, old in session.roots if all(old is not m for m in root.modules())]
        number = self._number(root)
        name = _root_name(number)
        session.roots.append((name, root))
        held, found = slots(root), groups(root)
        untouched = {slot.name: sketch(slot.param) for slot in held}
        loaded = starting_point.share(root, held, session.request, session.rank, number)
        owners = {id(item): name + key for key, group in found for item in group.fsdp_params}
        session.write(
            Model(
                root=name,
                parameters=[
                    self._parameter(name, slot, untouched[slot.name], owners.get(id(slot.fsdp))) for slot in held
                ],
                buffers=[
                    Buffer(name=name + key, shape=list(value.shape), unset=unset(session, value))
                    for key, value in root.named_buffers()
                ],
                groups=[Group(module=name + key) for key, _ in found],
                blocks=repeated_blocks(root),
                starting_point=loaded,
                at_line=session.here(),
            )
        )
        session.publish("adopt", root, name)

    def adopt_the_rest(self) -> None:
        """Models that were sharded and have not been called when training begins, such as an average of the weights."""
        for top in [reference() for reference in self._session.tops]:
            if top is None or any(p.device.type == "meta" for p in top.parameters()):
                continue
            if all(top is not module for _, root in self._session.roots for module in root.modules()):
                self.adopt(top)

    def _number(self, root: nn.Module) -> int:
        """Models are counted in the order in which they were sharded, whichever is called first."""
        inside = {id(module) for module in root.modules()}
        tops = [reference() for reference in self._session.tops]
        number = next((k for k, top in enumerate(tops) if id(top) in inside), len(tops))
        taken = {name for name, _ in self._session.roots}
        while _root_name(number) in taken:
            number += 1
        return number

    def _parameter(self, root: str, slot: Slot, untouched: list[float], group: str | None) -> Parameter:
        part = local(slot.param)
        placed = layout(slot.param, self._session.rank)
        return Parameter(
            name=root + slot.name,
            shape=list(slot.param.shape),
            dtype=str(slot.param.dtype).removeprefix("torch."),
            trainable=slot.param.requires_grad,
            managed=slot.fsdp is not None,
            group=group,
            local_numel=part.numel(),
            numel=slot.param.numel(),
            sketch=untouched,
            unset=unset(self._session, part),
            sharded=placed.sharded,
            placements=placed.placements,
            mesh=placed.mesh,
            mesh_names=placed.mesh_names,
            ranks=placed.ranks,
            copy=placed.copy,
        )


def trained(root: nn.Module) -> bool:
    """Whether any parameter of a model is trained."""
    return any(param.requires_grad for param in root.parameters())


def gradient_sketches(held: list[Slot]) -> dict[str, list[float] | None]:
    """The sketch of each gradient; None where there is none."""
    found: dict[str, torch.Tensor | None] = {slot.name: slot.param.grad for slot in held}
    return {name: None if grad is None else sketch(grad) for name, grad in found.items()}


def _root_name(number: int) -> str:
    return "" if number == 0 else f"model{number}."
