"""Decoder over symbolic melodies; the sequence is split over a context parallel group.

Queries stay on their rank, keys and values of the whole sequence are collected before
attention. Weights are sharded by FSDP2 over data and context ranks together.
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

NOTES = 14


class CollectContext(torch.autograd.Function):
    """(batch, heads, own part, dim) -> (batch, heads, whole sequence, dim)"""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group, ctx.length = group, x.shape[2]
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        dist.all_reduce(g, group=ctx.group)
        first = dist.get_rank(ctx.group) * ctx.length
        return g[:, :, first:first + ctx.length].contiguous(), None


def rotate(x, positions):
    half = x.shape[-1] // 2
    freq = 64.0 ** (-torch.arange(half, device=x.device) / half)
    angle = positions.unsqueeze(-1) * freq
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


class ContextAttention(nn.Module):
    def __init__(self, dim, heads, cp_mesh):
        super().__init__()
        self.heads, self.group = heads, cp_mesh.get_group()
        self.q = nn.Linear(dim, dim, bias=False)
        self.kv = nn.Linear(dim, 2 * dim, bias=False)
        self.o = nn.Linear(dim, dim, bias=False)

    def forward(self, x, positions):
        b, t, d = x.shape
        q = self.q(x).view(b, t, self.heads, -1).transpose(1, 2)
        k, v = self.kv(x).view(b, t, 2, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, positions), rotate(k, positions)
        k, v = CollectContext.apply(k, self.group), CollectContext.apply(v, self.group)
        seen = torch.arange(k.shape[2], device=x.device) <= positions.unsqueeze(-1)
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.o(a.transpose(1, 2).reshape(b, t, d))


class Layer(nn.Module):
    def __init__(self, dim, heads, cp_mesh):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.attn = ContextAttention(dim, heads, cp_mesh)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim))

    def forward(self, x, positions):
        x = x + self.attn(self.norm1(x), positions)
        return x + self.mlp(self.norm2(x))


class MelodyLM(nn.Module):
    def __init__(self, args, cp_mesh):
        super().__init__()
        self.embed = nn.Embedding(NOTES, args.dim)
        self.layers = nn.ModuleList(Layer(args.dim, args.heads, cp_mesh) for _ in range(args.layers))
        self.norm = nn.RMSNorm(args.dim)
        self.head = nn.Linear(args.dim, NOTES)

    def forward(self, notes, positions):
        x = self.embed(notes)
        for layer in self.layers:
            x = layer(x, positions)
        return self.head(self.norm(x))


def melodies(args, index):
    """A phrase comes back transposed for the rest of the piece."""
    g = torch.Generator().manual_seed(3100 + index)
    phrase = torch.randint(0, NOTES, (args.batch, 4), generator=g)
    shift = torch.randint(1, 4, (args.batch, 1), generator=g)
    bars = [(phrase + i * shift) % NOTES for i in range(args.length // 4 + 1)]
    piece = torch.cat(bars, 1)[:, :args.length + 1]
    return piece[:, :-1], piece[:, 1:]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--dim", type=int, default=32)
    p.add_argument("--heads", type=int, default=2)
    p.add_argument("--layers", type=int, default=2)
    p.add_argument("--length", type=int, default=32)
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--steps", type=int, default=60)
    p.add_argument("--lr", type=float, default=8e-3)
    p.add_argument("--context-parallel", type=int, default=2)
    args = p.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    cp = min(args.context_parallel, world)
    mesh = init_device_mesh(device.type, (world // cp, cp), mesh_dim_names=("dp", "cp"))
    shard_mesh = mesh["dp", "cp"]._flatten("dp_cp")

    torch.manual_seed(8)
    model = MelodyLM(args, mesh["cp"]).to(device)
    for layer in model.layers:
        fully_shard(layer, mesh=shard_mesh)
    fully_shard(model, mesh=shard_mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.02)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.steps, eta_min=1e-3)

    n, part = args.batch // mesh["dp"].size(), args.length // cp
    rows = slice(mesh["dp"].get_local_rank() * n, (mesh["dp"].get_local_rank() + 1) * n)
    cols = slice(mesh["cp"].get_local_rank() * part, (mesh["cp"].get_local_rank() + 1) * part)
    positions = torch.arange(args.length, device=device)[cols]

    def loss_of(index):
        notes, following = (t[rows, cols].to(device) for t in melodies(args, index))
        # stretches are equally long, so FSDP's mean over ranks is the mean over the batch
        return F.cross_entropy(model(notes, positions).flatten(0, 1), following.flatten())

    def mean(value):
        value = value.detach().clone()
        dist.all_reduce(value)
        return value.item() / world

    for step in range(1, args.steps + 1):
        loss = loss_of(step)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor().item()
        opt.step()
        sched.step()
        opt.zero_grad()
        if step % 12 == 0:
            with torch.no_grad():
                valid = mean(loss_of(100_000))
            shown = mean(loss)
            if rank == 0:
                print(f"step {step:3d} loss {shown:.5f} valid {valid:.5f} grad norm {norm:.4f}", flush=True)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
