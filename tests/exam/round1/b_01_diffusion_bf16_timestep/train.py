"""Class-conditional DDPM on 8x8 two-tone images, bf16 compute with fp32 master weights."""

import argparse
import dataclasses
import math
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

T = 1000


class TimeEmbedding(nn.Module):
    def __init__(self, dim):
        super().__init__()
        half = dim // 2
        self.register_buffer("freqs", torch.exp(-math.log(10000.0) * torch.arange(half) / half), persistent=False)
        self.fc = nn.Linear(dim, dim)

    def forward(self, t):
        ang = t.float()[:, None] * self.freqs[None]
        emb = torch.cat([ang.sin(), ang.cos()], dim=-1)
        return F.silu(self.fc(emb.to(self.fc.weight.dtype)))


class ResBlock(nn.Module):
    def __init__(self, ch, emb):
        super().__init__()
        self.norm = nn.GroupNorm(4, ch)
        self.c1 = nn.Conv2d(ch, ch, 3, padding=1)
        self.c2 = nn.Conv2d(ch, ch, 3, padding=1)
        self.shift = nn.Linear(emb, ch)

    def forward(self, x, emb):
        h = self.c1(F.silu(self.norm(x)))
        h = h + self.shift(emb)[:, :, None, None]
        return x + self.c2(F.silu(h))


class Denoiser(nn.Module):
    def __init__(self, ch=16, emb=32, classes=4, depth=3):
        super().__init__()
        self.temb = TimeEmbedding(emb)
        self.yemb = nn.Embedding(classes, emb)
        self.inp = nn.Conv2d(1, ch, 3, padding=1)
        self.blocks = nn.ModuleList(ResBlock(ch, emb) for _ in range(depth))
        self.out = nn.Conv2d(ch, 1, 3, padding=1)

    def forward(self, x, t, y):
        emb = self.temb(t) + self.yemb(y)
        h = self.inp(x)
        for b in self.blocks:
            h = b(h, emb)
        return self.out(h)


def make_images(n, seed=7):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 4, (n,), generator=g)
    img = -torch.ones(n, 1, 8, 8)
    for k, (rs, cs) in enumerate(
        [(slice(0, 4), slice(0, 4)), (slice(0, 4), slice(4, 8)), (slice(4, 8), slice(0, 4)), (slice(4, 8), slice(4, 8))]
    ):
        img[y == k, :, rs, cs] = 1.0
    return img + 0.05 * torch.randn(img.shape, generator=g), y


def cosine_alpha_bar():
    s = torch.linspace(0, 1, T + 1, dtype=torch.float64)
    ab = torch.cos((s + 0.008) / 1.008 * math.pi / 2) ** 2
    return (ab[1:] / ab[0]).clamp(1e-5, 0.9999).float()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=32)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    model = Denoiser()
    mp = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for blk in model.blocks:
        fully_shard(blk, mesh=mesh, mp_policy=mp)
    fully_shard(model, mesh=mesh, mp_policy=dataclasses.replace(mp, output_dtype=torch.float32))
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)

    start = 0
    if args.resume:
        last = sorted(d for d in os.listdir(args.resume) if d.startswith("step_"))[-1]
        msd, osd = get_state_dict(model, opt)
        state = {"model": msd, "optim": osd}
        dcp.load(state, checkpoint_id=os.path.join(args.resume, last))
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["optim"])
        start = int(last.split("_")[1])

    imgs, labels = make_images(512)
    abar = cosine_alpha_bar()
    for step in range(start, args.steps):
        g = torch.Generator().manual_seed(1000 + step)
        idx = torch.randint(0, len(imgs), (args.batch,), generator=g)[rank::world]
        t = torch.randint(0, T, (args.batch,), generator=g)[rank::world]
        eps = torch.randn(args.batch, 1, 8, 8, generator=g)[rank::world]
        a = abar[t][:, None, None, None]
        x_t = a.sqrt() * imgs[idx] + (1 - a).sqrt() * eps
        pred = model(x_t, t, labels[idx])
        loss = F.mse_loss(pred, eps)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        logged = loss.detach().clone()
        dist.all_reduce(logged)
        if rank == 0:
            print(f"step {step + 1} loss {logged.item() / world:.4f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            msd, osd = get_state_dict(model, opt)
            dcp.save({"model": msd, "optim": osd}, checkpoint_id=os.path.join(args.out, f"step_{step + 1:06d}"))

    if args.export:
        full = {k: v.full_tensor() for k, v in model.state_dict().items()}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
