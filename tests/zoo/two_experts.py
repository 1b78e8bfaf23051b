"""Two experts, each for one kind of rows. The batches are sorted by kind, so a rank may use one expert only in a step."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

FEATURES, WIDTH, CLASSES = 12, 24, 5
GLOBAL_BATCH, STEPS, SEED = 16, 12, 0
HIDDEN = (48, 48)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, hidden), nn.ReLU(), nn.Linear(hidden, WIDTH)) for hidden in HIDDEN
        )

    def forward(self, x, kind):
        y = self.norm(x)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (kind == number).nonzero().flatten()
            if len(rows):
                out = out.index_copy(0, rows, expert(y[rows]))
        return x + out


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(FEATURES, WIDTH)
        self.layers = nn.ModuleList(Experts() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x, kind):
        x = torch.tanh(self.stem(x))
        for layer in self.layers:
            x = layer(x, kind)
        return self.head(x)


def make_batch(step):
    """A global batch: the first half of its rows is of kind 0, the second of kind 1."""
    gen = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(GLOBAL_BATCH, FEATURES, generator=gen)
    kind = torch.arange(GLOBAL_BATCH) * 2 // GLOBAL_BATCH
    target = (x[:, :CLASSES] * (1.0 - 2.0 * kind[:, None])).argmax(dim=1)
    return x, kind, target


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(SEED)
    model = Classifier()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
        layer.set_reduce_scatter_unused_params(True)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    rows = GLOBAL_BATCH // world
    for step in range(STEPS):
        x, kind, target = (t[rank * rows : (rank + 1) * rows] for t in make_batch(step))
        loss = F.cross_entropy(model(x, kind), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step + 1} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
