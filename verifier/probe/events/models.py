"""Models at their first forward: they are recorded, and load the common starting point or save it
for other runs.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ...trace.events import Buffer, Group, Model, Parameter, signature
from .. import starting_point
from ..compat.groups import Slot, dtypes_of, groups, slots
from ..compat.tensors import layout, local, own_parameters
from ..measures import dtype_name, repeated_blocks
from ..session import Session
from ..tensor_fingerprint import sketch
from .sharding import Versions
from .uninitialised_memory import Fills


class Models:
    """The roots of one rank."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._written: dict[str, Model] = {}  # by root

    def holds(self, module: nn.Module) -> bool:
        """Whether a module is a root, or holds parameters of roots alone, as a loss does that has
        the model's head.
        """
        if any(module is root for _, root in self._session.roots):
            return True
        inside = {id(part) for _, root in self._session.roots for part in root.modules()}
        return all(
            id(part) in inside
            for part in module.modules()
            # A loss module that holds the model's head is a part of the model, not one beside it
            # (public trainers: a loss that holds the model's head).
            if any(p is not None for p in own_parameters(part).values())
        )

    def adopt(self, root: nn.Module) -> None:
        """First call of a root: load the common starting point or save it for other runs, and
        record the model.
        """
        session = self._session
        session.roots = [
            (name, old) for name, old in session.roots if all(old is not m for m in root.modules())
        ]
        number, name = self._number(root)
        session.roots.append((name, root))
        held, found = slots(root), groups(root)
        untouched = [sketch(slot.param) for slot in held]
        written = session.one(Versions).written()
        optimizers = session.progress.optimizers.alive()
        loaded = starting_point.share(root, held, session.request, session.rank, number, optimizers)
        owners = {id(item): name + key for key, group in found for item in group.fsdp_params}
        fills = session.one(Fills)
        buffers = [(name + key, value) for key, value in root.named_buffers()]
        self._written[name] = Model(
            root=name,
            parameters=[
                replace(
                    self._parameter(name, slot, before, owners.get(id(slot.fsdp))),
                    written=id(slot.param) in written,
                )
                for slot, before in zip(held, untouched, strict=True)
            ],
            buffers=[
                Buffer(name=key, shape=list(b.shape), unset=fills.unset(b)) for key, b in buffers
            ],
            groups=[_group(name + key, group) for key, group in found],
            blocks=repeated_blocks(root),
            starting_point=loaded,
            at_line=session.here(),
        )
        session.write(self._written[name])
        session.publish("adopt", root, name)

    def grow(self) -> None:
        """Record again the models that have got parameters since."""
        for name, root in self._session.roots:
            old = self._written[name]
            known = {parameter.name for parameter in old.parameters}
            added = [slot for slot in slots(root) if name + slot.name not in known]
            if added:
                owners = {
                    id(item): name + key
                    for key, group in groups(root)
                    for item in group.fsdp_params
                }
                new = [
                    self._parameter(name, one, sketch(one.param), owners.get(id(one.fsdp)))
                    for one in added
                ]
                self._written[name] = replace(old, parameters=[*old.parameters, *new])
                self._session.write(self._written[name])

    def adopt_the_rest(self) -> None:
        """Models that were sharded and not called before training begins, such as an average of the
        weights.
        """
        for top in [reference() for reference in self._session.tops]:
            # A model without memory cannot be trained yet: it is adopted when it is called.
            if top is None or any(p.device.type == "meta" for p in top.parameters()):
                continue
            if all(
                top is not module for _, root in self._session.roots for module in root.modules()
            ):
                self.adopt(top)

    def _number(self, root: nn.Module) -> tuple[int, str]:
        """(number, prefix of its names): models are counted in the order of sharding, whichever is
        called first.
        """
        inside = {id(module) for module in root.modules()}
        tops = [reference() for reference in self._session.tops]
        number = next((k for k, top in enumerate(tops) if id(top) in inside), len(tops))
        taken = {name for name, _ in self._session.roots}
        number = self._as_before(root, number, taken)
        while (name := f"model{number}." if number else "") in taken:
            number += 1
        return number, name

    def _as_before(self, root: nn.Module, number: int, taken: set[str]) -> int:
        """In a resume: the number of the model with these parameters in the train run, if the one
        of this number had others.
        """
        request = self._session.request
        before = request.models
        own = _signature(root)
        tops = [top for reference in self._session.tops if (top := reference()) is not None]
        if (
            # Stages of the same shapes: if all are made again they keep their order, and frozen
            # ones their own numbers (exam r12 nc_14_stagewise_boost; round 13: frozen stages).
            trained(root) and sum(_signature(top) == own for top in tops) < 2
        ):  # earlier stages are not made again
            before = {
                prefix: known for prefix, known in before.items() if prefix not in request.retired
            }
        alike = [prefix for prefix, known in before.items() if known == own and prefix not in taken]
        if not alike or before.get(f"model{number}." if number else "") == own:
            return number
        return int(alike[0].strip("model.") or 0)

    def _parameter(
        self, root: str, slot: Slot, untouched: list[float], group: str | None
    ) -> Parameter:
        part = local(slot.param)
        return Parameter(
            name=root + slot.name,
            shape=list(slot.param.shape),
            dtype=dtype_name(slot.param.dtype),
            trainable=slot.param.requires_grad,
            managed=slot.fsdp is not None,
            group=group,
            local_numel=part.numel(),
            numel=slot.param.numel(),
            sketch=untouched,
            unset=self._session.one(Fills).unset(part),
            **vars(layout(slot.param, self._session.rank)),
        )


def _signature(root: nn.Module) -> str:
    return signature((slot.name, list(slot.param.shape)) for slot in slots(root))


def trained(root: nn.Module) -> bool:
    """Whether any parameter of a model is trained."""
    return any(param.requires_grad for param in root.parameters())


def gradient_sketches(held: list[Slot]) -> dict[str, list[float] | None]:
    """The sketch of each gradient; None where there is none, or a stale one of a frozen parameter
    (an optimizer may still hold it).
    """
    found: dict[str, torch.Tensor | None] = {
        s.name: s.param.grad if s.param.requires_grad else None for s in held
    }
    return {name: None if grad is None else sketch(grad) for name, grad in found.items()}


def _group(module: str, group: Any) -> Group:
    param, reduce = (None if dtype is None else dtype_name(dtype) for dtype in dtypes_of(group))
    return Group(module=module, param_dtype=param, reduce_dtype=reduce)
