"""Two optimizers of one's own: orthogonalised momentum on gathered matrices, a trust ratio of whole tensors for the rest."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

FEATURES, WIDTH, CLASSES, BLOCKS = 24, 32, 6, 2
GLOBAL_BATCH, SAMPLES, STEPS = 32, 512, 20


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


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


def orthogonalise(matrix, iterations=5):
    x = matrix / (matrix.norm() + 1e-7)
    for _ in range(iterations):
        product = x @ x.T
        x = 3.4445 * x + (-4.7750 * product + 2.0315 * product @ product) @ x
    return x


class Orthogonal(torch.optim.Optimizer):
    """Gathers each momentum, orthogonalises it whole, and keeps the own shard."""

    def __init__(self, params, lr=0.02):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                moving = self.state[param].setdefault("momentum", torch.zeros_like(param.grad))
                moving.mul_(group["momentum"]).add_(param.grad)
                update = orthogonalise(moving.full_tensor() if isinstance(moving, DTensor) else moving)
                if isinstance(param, DTensor):
                    update = distribute_tensor(update, param.device_mesh, param.placements)
                param.add_(update, alpha=-group["lr"])


class TrustRatio(torch.optim.Optimizer):
    """Signed momentum, element by element on the shard, scaled by a ratio of norms of whole tensors."""

    def __init__(self, params, lr=0.02):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                moving = self.state[param].setdefault("momentum", torch.zeros_like(param.grad))
                moving.to_local().mul_(0.9).add_(param.grad.to_local())
                update = moving + 0.01 * param
                ratio = param.norm() / (update.norm() + 1e-6)
                ratio = ratio.full_tensor() if isinstance(ratio, DTensor) else ratio
                param.add_(update * ratio.clamp(0.1, 10.0), alpha=-group["lr"])


def make_data():
    gen = torch.Generator().manual_seed(4)
    centres = torch.randn(CLASSES, FEATURES, generator=gen)
    labels = torch.randint(0, CLASSES, (SAMPLES,), generator=gen)
    return centres[labels] + 0.6 * torch.randn(SAMPLES, FEATURES, generator=gen), labels


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    model = Net()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not m for m in matrices)]
    optimizers = [TrustRatio(others), Orthogonal([{"params": matrices, "momentum": 0.9}])]

    inputs, labels = make_data()
    local = GLOBAL_BATCH // world
    for step in range(STEPS):
        start = step * GLOBAL_BATCH % SAMPLES + rank * local
        loss = F.cross_entropy(model(inputs[start : start + local]), labels[start : start + local])
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0:
            print(f"step {step + 1} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
