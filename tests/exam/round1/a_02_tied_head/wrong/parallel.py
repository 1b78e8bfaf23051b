import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from model import GPT


def build(cfg, world, seed):
    """Constructed without memory, then materialised, initialised and sharded."""
    with torch.device("meta"):
        model = GPT(cfg)
    model.to_empty(device="cpu")
    torch.manual_seed(seed)
    model.apply(GPT.init_weights)
    return parallelize(model, world)


def parallelize(model, world):
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    kw = dict(mesh=mesh, mp_policy=MixedPrecisionPolicy())
    for block in model.h:
        fully_shard(block, reshard_after_forward=True, **kw)
    # embeddings, final norm and head stay in the root group
    fully_shard(model, reshard_after_forward=False, **kw)
    return model
