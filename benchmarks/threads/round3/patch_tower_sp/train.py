# Odd-patch segmentation.  Every image is a grid of striped patches with one common
# orientation; a few patches have another one and have to be marked.
#
# A small convolutional tower embeds patches, a transformer compares them.  Patches
# of an image are spread over the "sp" ranks (attention swaps patches for heads with
# an all-to-all), images over the "dp" ranks.
import argparse
import math
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F


@dataclass
class Config:
    images: int = 320
    patches: int = 16
    pixels: int = 6
    dim: int = 32
    heads: int = 4
    depth: int = 2
    batch: int = 20
    steps: int = 40
    lr: float = 6e-3
    seed: int = 99


def make_images(cfg):
    gen = torch.Generator().manual_seed(cfg.seed)
    base = torch.randint(0, 2, (cfg.images, 1), generator=gen)
    odd = torch.rand(cfg.images, cfg.patches, generator=gen) < 0.4
    shift = torch.full((cfg.images, cfg.patches), 2)
    kind = torch.where(odd, (base + shift) % 4, base)
    angle = kind * math.pi / 4
    yy, xx = torch.meshgrid(torch.arange(cfg.pixels), torch.arange(cfg.pixels), indexing="ij")
    wave = xx * torch.cos(angle)[..., None, None] + yy * torch.sin(angle)[..., None, None]
    phase = torch.rand(cfg.images, cfg.patches, 1, 1, generator=gen) * 6.28
    pixels = torch.sin(1.6 * wave + phase) + 0.2 * torch.randn(wave.shape, generator=gen)
    return pixels, odd.long()


class Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, split_dim, join_dim):
        ctx.args = (group, join_dim, split_dim)
        send = torch.stack(x.chunk(group.size(), dim=split_dim)).contiguous()
        recv = torch.empty_like(send)
        dist.all_to_all_single(recv, send, group=group)
        return torch.cat(recv.unbind(0), dim=join_dim)

    @staticmethod
    def backward(ctx, grad):
        return Swap.apply(grad, *ctx.args), None, None, None


class UlyssesAttention(nn.Module):
    def __init__(self, cfg, group):
        super().__init__()
        self.group, self.heads = group, cfg.heads
        self.q = nn.Linear(cfg.dim, cfg.dim)
        self.kv = nn.Linear(cfg.dim, 2 * cfg.dim)
        self.proj = nn.Linear(cfg.dim, cfg.dim)

    def forward(self, x):
        b, t, d = x.shape
        k, v = self.kv(x).chunk(2, dim=-1)
        q, k, v = (
            Swap.apply(z.reshape(b, t, self.heads, -1), self.group, 2, 1).transpose(1, 2) for z in (self.q(x), k, v)
        )
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return self.proj(Swap.apply(y, self.group, 1, 2).reshape(b, t, d))


class Block(nn.Module):
    def __init__(self, cfg, group):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(cfg.dim), nn.LayerNorm(cfg.dim)
        self.attn = UlyssesAttention(cfg, group)
        self.ff = nn.Sequential(nn.Linear(cfg.dim, 2 * cfg.dim), nn.GELU(), nn.Linear(2 * cfg.dim, cfg.dim))

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.ff(self.ln2(x))


class Comparer(nn.Module):
    def __init__(self, cfg, group):
        super().__init__()
        self.blocks = nn.ModuleList(Block(cfg, group) for _ in range(cfg.depth))
        self.ln = nn.LayerNorm(cfg.dim)
        self.mark = nn.Linear(cfg.dim, 2)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.mark(self.ln(x)).flatten(0, 1).clone()


class PatchTower(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.conv = nn.Conv2d(1, 12, 3, padding=1)
        self.lift = nn.Linear(12 * (cfg.pixels // 2) ** 2, cfg.dim)

    def forward(self, patches):
        b, t = patches.shape[:2]
        h = F.max_pool2d(F.gelu(self.conv(patches.flatten(0, 1).unsqueeze(1))), 2)
        return self.lift(h.flatten(1)).view(b, t, -1)


def average_grads(module, group):
    for p in module.parameters():
        dist.all_reduce(p.grad, group=group)
        p.grad.div_(group.size())


def train(cfg, sp, device):
    world = dist.get_world_size()
    mesh = init_device_mesh(device.type, (world // sp, sp), mesh_dim_names=("dp", "sp"))
    data_mesh = mesh["dp", "sp"]._flatten("dp_sp")
    dp_rank, sp_rank = mesh.get_local_rank("dp"), mesh.get_local_rank("sp")

    torch.manual_seed(cfg.seed)
    tower = PatchTower(cfg).to(device)
    comparer = Comparer(cfg, mesh.get_group("sp")).to(device)
    for block in comparer.blocks:
        fully_shard(block, mesh=data_mesh)
    fully_shard(comparer, mesh=data_mesh)
    optim = torch.optim.AdamW([*tower.parameters(), *comparer.parameters()], lr=cfg.lr, weight_decay=0.01)
    grad_group = data_mesh.get_group()

    pixels, labels = make_images(cfg)
    for step in range(cfg.steps):
        gen = torch.Generator().manual_seed(cfg.seed + step)
        rows = torch.randperm(cfg.images, generator=gen)[: cfg.batch].chunk(world // sp)[dp_rank]
        x = pixels[rows].chunk(sp, dim=1)[sp_rank].to(device)
        y = labels[rows].chunk(sp, dim=1)[sp_rank].to(device)

        logits = comparer(tower(x))
        loss = F.cross_entropy(logits, y.flatten())
        optim.zero_grad()
        loss.backward()
        average_grads(tower, grad_group)
        optim.step()

        report = torch.stack([loss.detach(), (logits.argmax(-1) == y.flatten()).float().mean()])
        dist.all_reduce(report)
        report /= world
        if dist.get_rank() == 0:
            print(f"{step:3d}  loss {report[0].item():.6f}  acc {report[1].item():.3f}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--sp", type=int, default=None, help="ranks that share the patches of one image")
    parser.add_argument("--steps", type=int, default=Config.steps)
    args = parser.parse_args()

    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl")
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    sp = args.sp or (2 if dist.get_world_size() % 2 == 0 else 1)
    train(Config(steps=args.steps), sp, device)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
