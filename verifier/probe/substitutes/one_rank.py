"""`fully_shard` over a mesh of one rank: the reference for scripts that use DTensor methods, which
DDP's plain tensors lack.

Every rank shards over its own mesh, so that parameters are DTensors, state dicts and
`distribute_tensor` work, and no collective of FSDP moves data between ranks. Gradients are averaged
after each backward, with a manual all-reduce over the mesh that the script gives to `fully_shard`;
the dims of tensor parallelism stay as they are. So FSDP's sharding, gathering and reducing are
compared with a run that does none of them.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..compat import tensors
from ..compat.groups import groups
from ..dispatcher import Call
from ..events.backward import finish_each
from ..events.sharding import DIVIDE
from ..session import Session

_state: dict[str, Any] = {
    "mesh": None,
    "modules": [],
}  # modules: (sharded module, the mesh that the script gave)


def install(session: Session) -> None:
    """From now on every rank shards over itself."""

    def sharded(call: Call, proceed: Callable[[], Any]) -> Any:
        given = tensors.data_mesh(call.kwargs)
        call.kwargs["mesh"] = _mesh()
        # A number of ranks to reshard to has no meaning on a mesh of one rank.
        if not isinstance(call.kwargs.get("reshard_after_forward"), bool | None):
            call.kwargs["reshard_after_forward"] = True
        result = proceed()
        module = call.given(0, "module")
        _state["modules"] += [
            (item, given) for item in (module if isinstance(module, list | tuple) else [module])
        ]
        return result

    def divided(call: Call, proceed: Callable[[], Any]) -> Any:
        factor = call.given(1, "factor") / max(
            (tensors.ranks_of(mesh) for _, mesh in _state["modules"]), default=1
        )
        call.args, call.kwargs = (call.args[0], factor), {}
        return proceed()

    around = session.dispatcher.around
    around("torch.distributed.fsdp:fully_shard", replace=sharded)
    around(f"torch.distributed.fsdp:FSDPModule.{DIVIDE}", replace=divided)
    finish_each(session, _average_all)


def _average_all() -> None:
    """Average the gradients in `.grad`.

    The part that was averaged before is equal on all ranks and does not change.
    """
    if not _state["modules"] or dist.get_world_size() == 1:
        return
    seen: set[int] = set()
    for module, mesh in _state["modules"]:
        for _, group in groups(module):
            for item in group.fsdp_params:
                param = item.sharded_param
                if id(param) not in seen and param.requires_grad:
                    seen.add(id(param))
                    _average(param, mesh)


def _average(param: nn.Parameter, mesh: DeviceMesh | None) -> None:
    """The mean over the data ranks; a rank without a gradient contributes zeros, and gets the mean
    if any rank has one.
    """
    mine = (
        torch.zeros_like(tensors.local(param)) if param.grad is None else tensors.local(param.grad)
    )
    there = torch.tensor([float(param.grad is not None)], device=mine.device)
    data_groups = tensors.groups_of(mesh)
    for group in data_groups:
        dist.all_reduce(there, group=group)
    if there.item() == 0.0:
        return
    for group in data_groups:
        dist.all_reduce(mine, group=group)
    mine.div_(tensors.ranks_of(mesh))
    if param.grad is None:
        param.grad = torch.empty_like(param)
        tensors.local(param.grad).copy_(mine)


def _mesh() -> DeviceMesh:
    """This rank's own mesh of one; made on all ranks at once, at the first call."""
    if _state["mesh"] is None:
        if not dist.is_initialized():
            dist.init_process_group()  # as fully_shard does without a mesh
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        whole = init_device_mesh(kind, (dist.get_world_size(), 1), mesh_dim_names=("copies", "own"))
        _state["mesh"] = whole["own"]
    mesh: DeviceMesh = _state["mesh"]
    return mesh
