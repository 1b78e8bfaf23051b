"""A rehearsal: memory by kind, collectives, FLOPs and reads of a script that runs on hollow
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


def install(session: Session) -> None:
    """Follow the phases of the run.

    It stops at the first forward after its last step, and writes the record after each step.
    """
    now = Recorder.now
    stepped = False
    trials = 0  # forwards without gradients, each on other weights than the one before
    known: set[int] = set()

    def write(ended: bool = False) -> None:
        session.write(record(now, session.request["world_size"]))

    def updated() -> bool:
        """Whether the script has updated its weights itself since the last forward: by gradients,
        or by trials without them.
        """
        nonlocal trials
        own, now.updated = now.updated and not now.optimized, False
        if torch.is_grad_enabled():
            return own and bool(now.backwards)
        trials += own
        return own and trials > FEW

    def begins(own: bool) -> None:
        """A forward begins outside of another: perhaps that of a new step."""
        nonlocal stepped
        if stepped or own or not now.step:
            if now.step >= session.steps:
                session.stop()
            stepped = False
            if now.step:
                write()
            now.step += 1
            now.forwards = 0
            now.phase(kinds.FIRST if now.step == 1 else kinds.LATER)
            now.forward_ended = now.backward_ended = False
        now.forwards += 1

    def called(call: Call) -> Leave:
        module = call.args[0]
        if now.depth == 0 and not now.in_backward:
            if id(module) not in known and any(True for _ in module.parameters()):
                known.add(id(module))
                now.adopt(module)
            own = (
                id(module) in known and (torch.is_grad_enabled() or not now.backwards) and updated()
            )
            if id(module) in known and (torch.is_grad_enabled() or own):
                begins(own)
                given = tensors((call.args[1:], call.kwargs))
                now.tokens[now.step] += max(
                    (one.numel() for one in given if one.dtype in WHOLE), default=0
                )
        now.depth += 1
        now.stack.append(
            now.names.get(id(module)) or (now.stack[-1] if now.stack else type(module).__name__)
        )

        def leave() -> None:
            now.depth -= 1
            now.stack.pop()
            if now.depth == 0 and now.in_backward:
                now.recomputed.append(len(now.changes))
            elif now.depth == 0 and id(module) in known:
                now.forward_ended = True

        return leave

    def returned(call: Call) -> None:
        if now.depth == 0 and not now.in_backward and id(call.args[0]) in known:
            now.label(call.result, kinds.LOGITS)

    def backward(call: Call) -> Leave | None:
        if now.in_backward:
            return None
        now.in_backward = True
        now.backwards.append(len(now.changes))

        def leave() -> None:
            now.in_backward, now.forward_ended, now.backward_ended = False, False, True

        return leave

    def for_group(kind: str) -> Any:
        def before(call: Call) -> Leave:
            group = call.args[0]
            if kind == kinds.REDUCTION:
                now.label(whole_gradients(group), kinds.UNSHARDED_GRADIENTS)
            now.purpose.append((kind, kinds.plain(module_name(group))))
            return now.purpose.pop

        return before

    def stepping(optimizer: torch.optim.Optimizer, *given: Any) -> None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for param in params:
            now.label(param, kinds.SHARDED if hasattr(param, "device_mesh") else kinds.WHOLE)
        now.label([param.grad for param in params if param.grad is not None], kinds.GRADIENTS)
        now.in_optimizer = True

    def has_stepped(optimizer: torch.optim.Optimizer, *given: Any) -> None:
        nonlocal stepped
        now.in_optimizer, now.backward_ended, now.optimized, stepped = (
            False,
            False,
            True,
            stepped or now.step > 0,
        )
        now.label(
            [value for state in optimizer.state.values() for value in state.values()],
            kinds.OPTIMIZER,
        )

    def sharding(call: Call) -> Leave:
        given = call.given(0, "module")
        for module in given if isinstance(given, list | tuple) else [given]:
            now.label([slot.param for slot in slots(module)], kinds.WHOLE, unless=(kinds.SHARDED,))
        now.purpose.append((kinds.WHOLE, ""))  # FSDP moves what lies on the CPU
        return now.purpose.pop

    def sharded(call: Call) -> None:
        given = call.given(0, "module")
        for module in given if isinstance(given, list | tuple) else [given]:
            now.label([p for p in module.parameters() if hasattr(p, "device_mesh")], kinds.SHARDED)

    session.around("torch.nn:Module.__call__", before=called, after=returned)
    session.around(BACKWARD, before=backward)
    session.around("torch.distributed.fsdp:fully_shard", before=sharding, after=sharded)
    for name in ("unshard", "wait_for_unshard"):
        session.around(f"{PARAM_GROUP}.{name}", before=for_group(kinds.GATHERED))
    session.around(f"{PARAM_GROUP}.post_backward", before=for_group(kinds.REDUCTION))
    session.around(
        "torch.cuda:synchronize", before=lambda call: now.read("torch.cuda.synchronize()", True)
    )
    register_optimizer_step_pre_hook(session.guarded(stepping))
    register_optimizer_step_post_hook(session.guarded(has_stepped))
    session.subscribe("stop", write)
    session.subscribe("ended", write)

    def meshed(call: Call) -> None:
        mesh = call.result
        now.mesh |= dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
        if mesh.size() > now.mesh_ranks:
            now.mesh_ranks, now.mesh_line = mesh.size(), now.frames.here()

    session.around("torch.distributed.device_mesh:init_device_mesh", after=meshed)
    for name in ("get_state_dict", "get_model_state_dict", "get_optimizer_state_dict"):
        session.around(f"{STATE_DICT}:{name}", before=lambda call: now.phase(kinds.SAVE))
