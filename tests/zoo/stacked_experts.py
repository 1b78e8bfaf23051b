"""A mixture of experts whose weights are stacked on dim 0; each is sharded on its longest dim, so that it stays even on many ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

CLASSES, WIDTH, HIDDEN, EXPERTS, BLOCKS = 8, 256, 512, 8, 2
GLOBAL_BATCH, STEPS, SEED = 64, 6, 7


class Experts(nn.Module):
    """Every expert computes; the router mixes their outputs. Shapes: x [batch, WIDTH]."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) * WIDTH**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) * HIDDEN**-0.5)

    def forward(self, x):
        h = self.norm(x)
        hidden = F.gelu(torch.einsum("bw,ewh->beh", h, self.up))
        mixed = torch.einsum("beh,ehw,be->bw", hidden, self.down, self.router(h).softmax(dim=-1))
        return x + mixed


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(Experts() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def longest(parameter):
    return Shard(max(range(parameter.ndim), key=lambda dim: parameter.shape[dim]))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))

    torch.manual_seed(SEED)
    model = Classifier()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, shard_placement_fn=longest)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    gen = torch.Generator().manual_seed(SEED)
    local = GLOBAL_BATCH // world
    for step in range(STEPS):
        features = torch.randn(GLOBAL_BATCH, CLASSES, generator=gen)
        labels = features.argmax(dim=1)
        mine = slice(rank * local, (rank + 1) * local)
        loss = F.cross_entropy(model(features[mine]), labels[mine])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step + 1} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
