"""`fully_shard` over one rank each: the reference for scripts that ask DTensors what DDP's plain tensors cannot answer.

Every rank shards over a mesh of its own, so that parameters are DTensors, state dicts and `distribute_tensor` work, and no
collective of FSDP moves data between ranks. Gradients are averaged after each backward, with a manual all-reduce over the mesh that the
script gives to `fully_shard`; beside tensor parallelism the other dims stay as they are. So FSDP's own sharding, gathering and reducing
is still judged by something that has none of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..compat import tensors
from ..dispatcher import Call
from ..events.backward import finish_each
from ..events.sharding import DIVIDE
from ..session import Session

_state: dict[str, Any] = {"mesh": None, "modules": []}  # modules: (sharded module, the mesh that the script gave)


def install(session: Session) -> None:
    """From now on every rank shards over itself."""

    def sharded(call: Call, proceed: Callable[[], Any]) -> Any:
        given = tensors.data_mesh(call.kwargs)
        call.kwargs["mesh"] = _mesh()
        if not isinstance(call.kwargs.get("reshard_after_forward"), bool | None):
            call.kwargs["reshard_after_forward"] = True
        result = proceed()
        module = call.given(0, "module")
        _state["modules"] += [(item, given) for item in (module if isinstance(module, list | tuple) else [module])]
        return result

    def divided(call: Call, proceed: Callable[[], Any]) -> Any:
        factor = call.given(1, "factor") / max((_ranks(mesh) for _, mesh in _state["modules"]), default=1)
        call.args, call.kwargs = (call.args[0], factor), {}
        return proceed()

    around = session.dispatcher.around
    around("torch.distributed.fsdp:fully_shard", replace=sharded)
    around(f"torch.distributed.fsdp:FSDPModule.{DIVIDE}", replace=divided)
    finish_each(session, _average_all)


def _average_all() -> None:
    """Average the gradients that FSDP has left in `.grad`. What was averaged before is equal everywhere and stays."""
    if not _state["modules"] or dist.get_world_size() == 1:
        return
    seen: set[int] = set()
    for module, mesh in _state["modules"]:
        for _, group in tensors.groups(module):
            for item in group.fsdp_params:
                param = item.sharded_param
                if id(param) not in seen and param.requires_grad:
                    seen.add(id(param))
                    _average(param, mesh)


def _average(param: nn.Parameter, mesh: DeviceMesh | None) -> None:
    """The mean over the data ranks; a rank without a gradient gives zeros, and takes the mean if any rank has one."""
    mine = torch.zeros_like(tensors.local(param)) if param.grad is None else tensors.local(param.grad)
    there = torch.tensor([float(param.grad is not None)], device=mine.device)
    groups = tensors.groups_of(mesh)
    for group in groups:
        dist.all_reduce(there, group=group)
    if there.item() == 0.0:
        return
    for group in groups:
        dist.all_reduce(mine, group=group)
    mine.div_(_ranks(mesh))
    if param.grad is None:
        param.grad = torch.empty_like(param)
        tensors.local(param.grad).copy_(mine)


def _ranks(mesh: DeviceMesh | None) -> int:
    """How many ranks share the gradients of what is sharded over a mesh; without one, all."""
    if mesh is not None:
        return int(mesh.size())
    return dist.get_world_size() if dist.is_initialized() else 1


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
