"""Weights that a state dict has brought into a model, and that other values have replaced before
any forward read them.
"""

import weakref

import torch
from torch import nn

from ...trace.events import Overwritten, Place
from ..compat.groups import slots
from ..compat.tensors import elements, local
from ..dispatcher import Call
from ..session import Session

SAMPLED = 1 << 12  # elements that are kept of a parameter's shard
# Constants (biases, norms) are the same before and after an initialisation: they show nothing.
VARIED = 16  # elements that differ from their mean: a constant says nothing
# Loaded and trained weights stay alike; an independent initialisation has a cosine near 0 (exam
# round 9, missed: an initialisation that overwrites the given weights).
UNLIKE = 0.5  # the cosine below which two sets of weights have nothing to do with each other
# More than half of what was loaded: a new head on a loaded model is right.
MOST = 0.5  # of the elements that were loaded
_NAMES = 32
_SHARD = " (shard)"  # of a name: a parameter has other elements before it is sharded


class Loads:
    """What the last state dict has left in each model that has not been called since."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.kept: list[
            tuple[weakref.ref[nn.Module], dict[str, torch.Tensor], Place | None, int]
        ] = []

    def loaded(self, call: Call) -> None:
        """A state dict has been set, by the script or by a library."""
        model = call.given(0, "model", call.kwargs.get("self"))
        if call.failed is None and isinstance(model, nn.Module):
            inside = {id(module) for module in model.modules()}
            self.kept = [one for one in self.kept if id(one[0]()) not in inside]
            self.kept.append(
                (
                    weakref.ref(model),
                    _values(model),
                    self.session.here(),
                    self.session.progress.step_number(),
                )
            )

    def called(self, call: Call) -> None:
        """A module is called: from here on its weights are read."""
        if not self.kept:
            return
        module: nn.Module = call.args[0]
        inside = {id(part) for part in module.modules()}
        found = [
            one
            for one in self.kept
            if (held := one[0]()) and ({id(held), *map(id, held.modules())} & inside)
        ]
        self.kept = [
            one for one in self.kept if one[0]() and all(one is not other for other in found)
        ]
        for model, before, line, step in found:
            if step != self.session.progress.step_number():
                # Weights that differ after a step were trained, or averaged, not overwritten.
                continue  # trained since, or an average of what is
            now = _values(model())
            pairs = {
                n: (b, now[n])
                for n, b in before.items()
                if n in now and now[n].shape == b.shape and _varied(b)
            }
            other = [name for name, pair in pairs.items() if _unlike(*pair)]
            elements = sum(values.numel() for values, _ in pairs.values())
            if other and sum(pairs[name][0].numel() for name in other) > MOST * elements:
                self.session.write(
                    Overwritten(
                        names=[name.removesuffix(_SHARD) for name in other[:_NAMES]],
                        of=len(pairs),
                        at_line=line,
                    )
                )


def _values(model: nn.Module | None) -> dict[str, torch.Tensor]:
    """{name: some elements of this rank's shard} of parameters that have memory; the name says
    whether they are sharded.
    """
    held = slots(model) if model is not None else []
    with torch.no_grad():
        return {
            s.name + (_SHARD if s.fsdp is not None else ""): _some(s.param)
            for s in held
            if local(s.param).device.type != "meta"
        }


def _some(param: torch.Tensor) -> torch.Tensor:
    flat = elements(local(param)).detach().reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLED)].to(torch.float64).clone()


def _varied(values: torch.Tensor) -> bool:
    return (
        values.numel() >= VARIED
        and int((values != values.mean()).sum()) >= VARIED
        and float(values.std()) > 0.0
    )


def _unlike(before: torch.Tensor, now: torch.Tensor) -> bool:
    """Whether values are not those that were loaded, nor made of them."""
    if before.shape != now.shape or bool(torch.isclose(before, now, rtol=1e-2, atol=1e-8).all()):
        return False
    a, b = before - before.mean(), now - now.mean()
    return float(a @ b) < UNLIKE * float(a.norm() * b.norm())


def install(session: Session) -> None:
    """Watch the survey and the train run: in others the verifier sets weights, too."""
    if session.request.mode not in ("fsdp", "survey") or not session.request.leave_starting_point:
        return
    loads = Loads(session)
    for name in ("set_model_state_dict", "set_state_dict"):
        session.around(f"torch.distributed.checkpoint.state_dict:{name}", after=loads.loaded)
    session.around("torch.nn:Module.load_state_dict", after=loads.loaded)
    session.around("torch.nn:Module.__call__", before=loads.called)
