"""Build on the meta device, shard, then give storage and initial values."""
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def build_sharded(factory, seed):
    with torch.device("meta"):
        model = factory()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")
    init_weights(model, seed)
    return model


@torch.no_grad()
def init_weights(model, seed):
    gen = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if p.dim() == 1:
            p.fill_(1.0)
            continue
        shard = p.to_local() if isinstance(p, DTensor) else p
        shard.normal_(0.0, model.std_of(name, p), generator=gen)
