"""Small latent diffusion with classifier-free guidance labels, in bfloat16 with float32 reduction."""

import argparse
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

T = 1000


def alpha_bar(t):
    return torch.cos((t.double() / T + 0.008) / 1.008 * math.pi / 2).square().float()


class TimeEmbedding(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.d = d
        self.mlp = nn.Sequential(nn.Linear(d, d), nn.SiLU(), nn.Linear(d, d))

    def forward(self, t):
        freq = torch.exp(-math.log(10000) * torch.arange(self.d // 2) / (self.d // 2))
        ang = t.float()[:, None] * freq
        emb = torch.cat([ang.sin(), ang.cos()], -1)
        return self.mlp(emb.to(self.mlp[0].weight.dtype))


class ResBlock(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)
        self.cond = nn.Linear(d, 2 * d)

    def forward(self, x, c):
        return x + self.b(F.silu(self.a(self.norm(x)) + self.cond(c)))


class Denoiser(nn.Module):
    def __init__(self, d_in=12, d=32, classes=4, depth=2):
        super().__init__()
        self.time = TimeEmbedding(d)
        self.label = nn.Embedding(classes + 1, d)
        self.inp, self.out = nn.Linear(d_in, d), nn.Linear(d, d_in)
        self.blocks = nn.ModuleList(ResBlock(d) for _ in range(depth))

    def forward(self, x, t, y):
        c = self.time(t) + self.label(y)
        h = self.inp(x)
        for blk in self.blocks:
            h = blk(h, c)
        return self.out(h)


def latents(n=1024, classes=4):
    g = torch.Generator().manual_seed(8)
    centre = torch.randn(classes, 12, generator=g)
    y = torch.randint(0, classes, (n,), generator=g)
    return centre[y] + 0.2 * torch.randn(n, 12, generator=g), y


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=30)
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--drop-label", type=float, default=0.1)
    p.add_argument("--export", default="")
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Denoiser()
    mp = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for blk in model.blocks:
        fully_shard(blk, mp_policy=mp)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32))
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)

    data, labels = latents()
    for step in range(args.steps):
        g = torch.Generator().manual_seed(step)
        idx = torch.randint(0, len(data), (args.batch,), generator=g)
        t = torch.randint(0, T, (args.batch,), generator=g)
        noise = torch.randn(args.batch, data.shape[1], generator=g)
        drop = torch.rand(args.batch, generator=g) < args.drop_label
        y = torch.where(drop, torch.tensor(4), labels[idx])
        x0, t, noise, y = (v.chunk(world)[rank] for v in (data[idx], t, noise, y))

        a = alpha_bar(t)[:, None]
        pred = model(a.sqrt() * x0 + (1 - a).sqrt() * noise, t.float(), y)
        loss = F.mse_loss(pred, noise)
        opt.zero_grad()
        loss.backward()
        opt.step()
        log = loss.detach() / world
        dist.all_reduce(log)
        if rank == 0 and step % 5 == 0:
            print(f"step {step} loss {log.item():.4f}", flush=True)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0 and args.export:
        torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
