"""The head first: after the warm-up the optimizer is built again for all parameters, and its schedule, too."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import CosineAnnealingLR

FEATURES, WIDTH, CLASSES, BLOCKS = 16, 32, 4, 2
GLOBAL_BATCH, SAMPLES, STEPS, HEAD_ONLY = 16, 256, 20, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inward = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.outward = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.inward(x)
        for block in self.blocks:
            x = block(x)
        return self.outward(x)


def make_data():
    gen = torch.Generator().manual_seed(4)
    centres = torch.randn(CLASSES, FEATURES, generator=gen)
    labels = torch.randint(0, CLASSES, (SAMPLES,), generator=gen)
    return centres[labels] + 0.6 * torch.randn(SAMPLES, FEATURES, generator=gen), labels


def build_optimizer(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Net()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    model.requires_grad_(False)
    model.outward.requires_grad_(True)
    optimizer = build_optimizer(model)
    scheduler = CosineAnnealingLR(optimizer, T_max=STEPS, eta_min=1e-3)

    inputs, labels = make_data()
    local = GLOBAL_BATCH // world
    for step in range(STEPS):
        if step == HEAD_ONLY:
            model.requires_grad_(True)
            optimizer = build_optimizer(model)
            scheduler = CosineAnnealingLR(optimizer, T_max=STEPS - HEAD_ONLY, eta_min=1e-3)
        start = step * GLOBAL_BATCH % SAMPLES + rank * local
        loss = F.cross_entropy(model(inputs[start : start + local]), labels[start : start + local])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if rank == 0:
            print(f"step {step + 1} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
