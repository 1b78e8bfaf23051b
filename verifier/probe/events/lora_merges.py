"""Weights of adapters that the script merges into an export: held against the module that computes
with both, in the survey run.

A module is called apart with the whole tensors that the script has gathered: no collective, no
gradient, nothing drawn. One whose frozen weights are others than in training has its adapters in
them already, and is left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.func import functional_call
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ...trace.events import Merged
from ..compat.tensors import local
from ..dispatcher import Call
from ..session import Session
from .checkpoints import DCP

# float32 rounding of a module on whole tensors is below; an adapter that adds less says nothing.
_ROUNDED = 1e-3  # relative, what a linear module may differ by
# An export may be in 16 bits: what it adds must be a multiple of the adapters' part up to that
# rounding.
_STRAIGHT = 0.05  # relative, what a multiple may differ by, in 16 bits


@dataclass
class Adapted:
    """What a linear module gives for `inputs`: of its base weight, and beside it."""

    inputs: torch.Tensor
    base: torch.Tensor
    added: torch.Tensor


class Exports:
    """The modules with adapters, as they were when their model was last gathered, and what is
    written of them.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.known: dict[str, Adapted] = {}
        # of each frozen parameter, by its id, the length of this rank's part in training
        self.frozen: dict[int, float] = {}

    def steps(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        """An optimizer steps: the frozen parameters are those of the training."""
        if not self.frozen:
            slots = self.session.all_slots()
            self.frozen = {
                id(slot.param): _length(slot.param)
                for slot in slots
                if not slot.param.requires_grad
            }

    def gathered(self, call: Call) -> None:
        """A state dict was made: of whole tensors, on this rank."""
        found = call.result[0] if isinstance(call.result, tuple) else call.result
        model = call.given(0, "model")
        whole = {
            k: v.float()
            for k, v in found.items()
            if type(v) is torch.Tensor and v.is_floating_point()
        }
        for path, module in model.named_modules() if whole else ():
            own = {
                k.removeprefix(f"{path}."): v for k, v in whole.items() if k.startswith(f"{path}.")
            }
            # An export that merges in place and gathers then has the adapters in its weights
            # already (exam r11 ma_01_lora_export twin).
            changed = any(
                self.frozen.get(id(p), length) != length
                for p in module.parameters()
                for length in [_length(p)]
            )
            if (
                len(own) > 2
                and not changed
                and not any(isinstance(part, FSDPModule) for part in module.modules())
            ):
                adapted = _adapted(module, own)
                if adapted is not None:
                    self.known[path] = adapted

    def writes(self, call: Call) -> None:
        """A file is about to be written; a weight beside its adapters is not merged with them."""
        given = call.args[0] if call.args else None
        if not isinstance(given, Mapping):
            return
        for path, adapted in self.known.items():
            value = given.get(f"{path}.weight")
            if isinstance(value, torch.Tensor) and value.shape[1:] == adapted.inputs.shape[1:]:
                held = adapted.inputs @ value.float().T - adapted.base
                factor = float((held * adapted.added).sum() / adapted.added.square().sum())
                if float((held - factor * adapted.added).norm()) <= _STRAIGHT * float(held.norm()):
                    self.session.write(
                        Merged(name=f"{path}.weight", factor=factor, at_line=self.session.here())
                    )


def _length(param: torch.Tensor) -> float:
    return float(local(param.detach()).double().square().sum())


@torch.no_grad()
def _adapted(module: nn.Module, own: dict[str, torch.Tensor]) -> Adapted | None:
    """None if the module is not linear, or if its largest weight is all that it computes with."""
    weight = max((w for w in own.values() if w.ndim == 2), key=torch.Tensor.numel, default=None)
    if weight is None:
        return None
    modes = [(part, part.training) for part in module.modules()]
    inputs = torch.randn(4, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(
        weight.device
    )
    try:
        module.train(False)
        zero, once, twice = (functional_call(module, own, (times * inputs,)) for times in (0, 1, 2))
    except Exception:  # it takes something else: no adapter around a linear layer
        return None
    finally:
        for part, mode in modes:
            part.training = mode
    base = inputs @ weight.T
    if not isinstance(once, torch.Tensor) or once.shape != base.shape:
        return None
    # A module that is not linear in its input has no one scale of its adapters.
    curved = float((twice - 2 * once + zero).norm()) > _ROUNDED * float((twice - zero).norm())
    added = once - zero - base
    return (
        None
        if curved or float(added.norm()) <= _ROUNDED * float(base.norm())
        else Adapted(inputs, base, added)
    )


def install(session: Session) -> None:
    """Subscribe to what gathers and what writes."""
    if session.request.mode != "survey":
        return
    exports = Exports(session)
    register_optimizer_step_post_hook(session.guarded(exports.steps))
    for name in ("get_model_state_dict", "get_state_dict"):
        session.around(f"{DCP}.state_dict:{name}", after=exports.gathered)
    session.around("torch:save", before=exports.writes)
    session.around("safetensors.torch:save_file", before=exports.writes, optional=True)
