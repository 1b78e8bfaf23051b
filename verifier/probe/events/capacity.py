"""A capacity plan: memory by kind, collectives, FLOPs and reads of a script that runs on fake
tensors, as rank 0 of many.
"""

from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ..capacity import recorder as kinds
from ..capacity.recorder import Recorder
from ..capacity.replay import record
from ..compat.groups import module_name, slots, whole_gradients
from ..compat.names import PARAM_GROUP
from ..compat.tensors import tensors
from ..dispatcher import Call, Leave
from ..session import Session
from .backward import BACKWARD

STATE_DICT = "torch.distributed.checkpoint.state_dict"
WHOLE = (torch.int64, torch.int32)
FEW = 2  # forwards without gradients on other weights: an evaluation before and after a load


class Phases:
    """Which part of which step the script is in; the recorder counts under its name."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.now = Recorder.now
        self.stepped = False  # whether an optimizer has stepped since the last forward began
        self.trials = 0  # forwards without gradients, each on other weights than the one before
        self.known: set[int] = set()  # modules that the script has called itself

    def write(self, ended: bool = False) -> None:
        """Write all that was recorded until now."""
        self.session.write(record(self.now, self.session.request.world_size))

    def _updated(self) -> bool:
        """Whether the script has updated its weights itself since the last forward: by gradients,
        or by trials without them.
        """
        now = self.now
        own, now.updated = now.updated and not now.optimized, False
        if torch.is_grad_enabled():
            return own and bool(now.backwards)
        self.trials += own
        return own and self.trials > FEW

    def _begin_forward(self, own: bool) -> None:
        """A forward begins outside of another: perhaps that of a new step."""
        now = self.now
        if self.stepped or own or not now.step:
            now.whole = now.step
            if now.step >= self.session.request.steps:
                self.session.stop()
            self.stepped = False
            if now.step:
                self.write()
            now.step += 1
            now.forwards = 0
            now.phase(kinds.FIRST if now.step == 1 else kinds.LATER)
            now.forward_ended = now.backward_ended = False
        now.forwards += 1

    def _called_by_script(self, call: Call) -> None:
        """A module is called outside of another and of backward."""
        now, module = self.now, call.args[0]
        if id(module) not in self.known and any(True for _ in module.parameters()):
            self.known.add(id(module))
            now.adopt(module)
        if id(module) not in self.known:
            return
        own = (torch.is_grad_enabled() or not now.backwards) and self._updated()
        if torch.is_grad_enabled() or own:
            self._begin_forward(own)
            given = tensors((call.args[1:], call.kwargs))
            counts = (one.numel() for one in given if one.dtype in WHOLE)
            now.tokens[now.step] += max(counts, default=0)

    def called(self, call: Call) -> Leave:
        """A module is about to be called."""
        now, module = self.now, call.args[0]
        if now.depth == 0 and not now.in_backward:
            self._called_by_script(call)
        now.depth += 1
        around = now.stack[-1] if now.stack else type(module).__name__
        now.stack.append(now.names.get(id(module)) or around)

        def leave() -> None:
            now.depth -= 1
            now.stack.pop()
            if now.depth == 0 and now.in_backward:
                now.recomputed.append(len(now.changes))
            elif now.depth == 0 and id(module) in self.known:
                now.forward_ended = True

        return leave

    def returned(self, call: Call) -> None:
        """A module has returned."""
        now = self.now
        if now.depth == 0 and not now.in_backward and id(call.args[0]) in self.known:
            now.label(call.result, kinds.LOGITS)

    def backward(self, call: Call) -> Leave | None:
        """A backward is about to begin."""
        now = self.now
        if now.in_backward:
            return None
        now.in_backward = True
        now.backwards.append(len(now.changes))

        def leave() -> None:
            now.in_backward, now.forward_ended, now.backward_ended = False, False, True

        return leave

    def stepping(self, optimizer: torch.optim.Optimizer, *given: Any) -> None:
        """An optimizer is about to step."""
        now = self.now
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for param in params:
            now.label(param, kinds.SHARDED if hasattr(param, "device_mesh") else kinds.WHOLE)
        now.label([param.grad for param in params if param.grad is not None], kinds.GRADIENTS)
        now.in_optimizer = True

    def has_stepped(self, optimizer: torch.optim.Optimizer, *given: Any) -> None:
        """An optimizer has stepped."""
        now = self.now
        now.in_optimizer = now.backward_ended = False
        now.optimized = True
        self.stepped = self.stepped or now.step > 0
        now.whole = now.step
        state = [value for values in optimizer.state.values() for value in values.values()]
        now.label(state, kinds.OPTIMIZER)

    def install(self) -> None:
        """Follow forwards, backwards and optimizer steps."""
        session = self.session
        session.around("torch.nn:Module.__call__", before=self.called, after=self.returned)
        session.around(BACKWARD, before=self.backward)
        register_optimizer_step_pre_hook(session.guarded(self.stepping))
        register_optimizer_step_post_hook(session.guarded(self.has_stepped))
        session.subscribe("stop", self.write)
        session.subscribe("ended", self.write)


class Sharding:
    """What FSDP does: the mesh, its modules, and the gathers and reductions of its groups."""

    def __init__(self, now: Recorder) -> None:
        self.now = now

    def sharding(self, call: Call) -> Leave:
        """`fully_shard` is about to be applied."""
        for module in _modules(call):
            params = [slot.param for slot in slots(module)]
            self.now.label(params, kinds.WHOLE, unless=(kinds.SHARDED,))
        self.now.purpose.append((kinds.WHOLE, ""))  # FSDP moves what lies on the CPU
        return self.now.purpose.pop

    def sharded(self, call: Call) -> None:
        """`fully_shard` was applied."""
        for module in _modules(call):
            params = [p for p in module.parameters() if hasattr(p, "device_mesh")]
            self.now.label(params, kinds.SHARDED)

    def gathering(self, call: Call) -> Leave:
        """A group is about to gather its parameters, or waits for them."""
        return self._for_group(kinds.GATHERED, call.args[0])

    def reducing(self, call: Call) -> Leave:
        """A group is about to reduce its gradients."""
        self.now.label(whole_gradients(call.args[0]), kinds.UNSHARDED_GRADIENTS)
        return self._for_group(kinds.REDUCTION, call.args[0])

    def _for_group(self, kind: str, group: Any) -> Leave:
        self.now.purpose.append((kind, kinds.plain(module_name(group))))
        return self.now.purpose.pop

    def meshed(self, call: Call) -> None:
        """A mesh was made."""
        now, mesh = self.now, call.result
        now.mesh |= dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
        if mesh.size() > now.mesh_ranks:
            now.mesh_ranks, now.mesh_line = mesh.size(), now.frames.here()

    def install(self, session: Session) -> None:
        """Follow meshes, `fully_shard` and the groups."""
        fully_shard = "torch.distributed.fsdp:fully_shard"
        session.around(fully_shard, before=self.sharding, after=self.sharded)
        for name in ("unshard", "wait_for_unshard"):
            session.around(f"{PARAM_GROUP}.{name}", before=self.gathering)
        session.around(f"{PARAM_GROUP}.post_backward", before=self.reducing)
        session.around("torch.distributed.device_mesh:init_device_mesh", after=self.meshed)


def _modules(call: Call) -> Any:
    """The modules that are given to `fully_shard`."""
    given = call.given(0, "module")
    return given if isinstance(given, list | tuple) else [given]


def install(session: Session) -> None:
    """Follow the phases of the run.

    It stops at the first forward after its last step, and writes the record after each step.
    """
    now = Recorder.now
    Phases(session).install()
    Sharding(now).install(session)
    session.around(
        "torch.cuda:synchronize", before=lambda call: now.read("torch.cuda.synchronize()", True)
    )
    for name in ("get_state_dict", "get_model_state_dict", "get_optimizer_state_dict"):
        session.around(f"{STATE_DICT}:{name}", before=lambda call: now.phase(kinds.SAVE))
