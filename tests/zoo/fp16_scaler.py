"""float16 compute with a GradScaler, unscaled before the clip; the norm of every gradient is logged whole."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.utils import clip_grad_norm_

FEATURES, WIDTH, CLASSES, BLOCKS = 20, 48, 8, 3
GLOBAL_BATCH, SAMPLES, STEPS = 32, 512, 20


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.inward = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.outward = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.outward(self.blocks(self.inward(x))).float()


def make_data():
    gen = torch.Generator().manual_seed(2)
    centres = torch.randn(CLASSES, FEATURES, generator=gen)
    labels = torch.randint(0, CLASSES, (SAMPLES,), generator=gen)
    return centres[labels] + 0.7 * torch.randn(SAMPLES, FEATURES, generator=gen), labels


def gradient_norms(model):
    norms = {}
    for name, param in model.named_parameters():
        if param.grad is not None:
            norms[name] = param.grad.norm().full_tensor().item()
    return norms


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(1)
    model = Classifier()
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    inputs, labels = make_data()
    local = GLOBAL_BATCH // world
    for step in range(STEPS):
        start = step * GLOBAL_BATCH % SAMPLES + rank * local
        loss = F.cross_entropy(model(inputs[start : start + local]), labels[start : start + local])
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norms = gradient_norms(model)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if rank == 0:
            largest = max(norms, key=norms.get)
            print(f"step {step + 1} loss {loss.item():.4f} {largest} {norms[largest]:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
