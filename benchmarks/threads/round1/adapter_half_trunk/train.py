"""Adapt a trunk that is stored in half precision, with new layers on top (FSDP2).

The trunk comes from a bf16 release; norms and adapter layers are created fresh.
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

FEATURES, CLASSES, WIDTH = 20, 6, 32


class AdaptedBlock(nn.Module):
    def __init__(self, width=WIDTH, bottleneck=8):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, width)
        self.down = nn.Linear(width, bottleneck)
        self.up = nn.Linear(bottleneck, width)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, x):
        h = F.gelu(self.fc(self.norm(x)))
        return x + h + self.up(F.gelu(self.down(h)))


class AdaptedNet(nn.Module):
    def __init__(self, depth=3):
        super().__init__()
        self.stem = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(AdaptedBlock() for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        h = self.stem(x)
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


def load_release(model):
    """Stand-in for reading the released trunk: its tensors keep their stored dtype."""
    g = torch.Generator().manual_seed(404)
    release = {"stem.weight": torch.randn(WIDTH, FEATURES, generator=g) / FEATURES**0.5, "stem.bias": torch.zeros(WIDTH)}
    for i in range(len(model.blocks)):
        release[f"blocks.{i}.fc.weight"] = torch.randn(WIDTH, WIDTH, generator=g) / WIDTH**0.5
        release[f"blocks.{i}.fc.bias"] = torch.zeros(WIDTH)
    release = {k: nn.Parameter(v.to(torch.bfloat16)) for k, v in release.items()}
    missing, unexpected = model.load_state_dict(release, strict=False, assign=True)
    assert not unexpected
    return missing


def prepare_model(model, args, mesh, device):
    param_dtype = getattr(torch, args.param_dtype)
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    model.to(device)
    model.to(param_dtype)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def batch_of(step, size, centers):
    g = torch.Generator().manual_seed(70_000 + step)
    label = torch.randint(CLASSES, (size,), generator=g)
    return centers[label] + 0.8 * torch.randn(size, FEATURES, generator=g), label


@torch.no_grad()
def accuracy(model, centers, rank, world, device):
    x, y = batch_of(10**6, 128, centers)
    hit = (model(x[rank::world].to(device)).argmax(-1) == y[rank::world].to(device)).sum().float()
    dist.all_reduce(hit)
    return hit.item() / 128


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=14)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--param-dtype", default="float32", choices=["float32", "bfloat16"])
    args = ap.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)

    torch.manual_seed(2)
    centers = torch.randn(CLASSES, FEATURES)
    model = AdaptedNet()
    fresh = load_release(model)
    if rank == 0:
        print(f"{len(fresh)} tensors are not in the release and start fresh")
    model = prepare_model(model, args, init_device_mesh(device.type, (world,)), device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    for step in range(args.steps):
        x, y = batch_of(step, args.batch, centers)
        x, y = x[rank::world].to(device), y[rank::world].to(device)
        loss = F.cross_entropy(model(x).float(), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step:2d} loss {mean.item():.6f} norm {float(norm):.5f}", flush=True)
    acc = accuracy(model, centers, rank, world, device)
    if rank == 0:
        print(f"accuracy {acc:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
