import contextlib

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard


def hsdp_mesh():
    world = dist.get_world_size()
    nodes = 2 if world >= 2 else 1
    return init_device_mesh("cpu", (nodes, world // nodes), mesh_dim_names=("node", "local"))


def wrap(model, mesh):
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    # gradients are summed over ranks; the division by the number of tokens is in the loss
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled reduction
    return model


@contextlib.contextmanager
def accumulation(model, last):
    """Inside the window only the reduce-scatter within the node runs, with the last micro-batch the all-reduce too."""
    model.set_requires_all_reduce(last)
    model.set_reshard_after_backward(last)
    try:
        yield
    finally:
        model.set_requires_all_reduce(True)
        model.set_reshard_after_backward(True)


def window_tokens(windows, ignore):
    """Number of target tokens of a whole accumulation window on all ranks."""
    count = torch.tensor(float(sum((y != ignore).sum() for _, y in windows)))
    dist.all_reduce(count)
    return count
