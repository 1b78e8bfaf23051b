"""Rectified flow on 2D point images, bf16 compute with float32 master weights."""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


class TimeEmbedding(nn.Module):
    """Sinusoidal features of the continuous time, in float32."""

    def __init__(self, dim, scale=1000.0):
        super().__init__()
        self.dim, self.scale = dim, scale
        self.fc = nn.Linear(dim, dim)

    def forward(self, t):
        k = torch.arange(self.dim // 2, device=t.device) / (self.dim // 2)
        ang = self.scale * t.float()[:, None] * torch.exp(-math.log(200.0) * k)
        feats = torch.cat([ang.sin(), ang.cos()], -1)
        return F.silu(self.fc(feats.to(self.fc.weight.dtype)))


class AdaBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim, elementwise_affine=False)
        self.mod = nn.Linear(dim, 2 * dim)
        self.ff = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x, temb):
        shift, scale = self.mod(temb).chunk(2, -1)
        return x + self.ff(self.norm(x) * (1 + scale) + shift)


class VelocityNet(nn.Module):
    def __init__(self, data_dim=16, dim=48, depth=3):
        super().__init__()
        self.time = TimeEmbedding(dim)
        self.inp = nn.Linear(data_dim, dim)
        self.blocks = nn.ModuleList([AdaBlock(dim) for _ in range(depth)])
        self.out = nn.Linear(dim, data_dim)

    def forward(self, x, t):
        temb = self.time(t)
        h = self.inp(x.to(self.inp.weight.dtype))
        for block in self.blocks:
            h = block(h, temb)
        return self.out(h)


def flow_batch(step, n, rank, world):
    """Straight paths from noise to samples whose direction turns with the phase."""
    g = torch.Generator().manual_seed(900 + step)
    phase = 6.2832 * torch.rand(n, 1, generator=g)
    x1 = torch.cos(phase + torch.arange(16) * 0.5)
    x0 = torch.randn(n, 16, generator=g)
    t = torch.rand(n, generator=g)
    xt = (1 - t[:, None]) * x0 + t[:, None] * x1
    return [v.chunk(world)[rank] for v in (xt, t, x1 - x0)]


def apply_fsdp(model):
    block_policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=block_policy)
    root_policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        output_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    return fully_shard(model, mp_policy=root_policy)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=30)
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="ckpt")
    p.add_argument("--resume", default=None)
    args = p.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(8)
    model = apply_fsdp(VelocityNet())
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.0)

    start = 0
    if args.resume:
        newest = max(os.listdir(args.resume), key=lambda s: int(s.removeprefix("it")))
        m, o = get_state_dict(model, opt)
        state = {"model": m, "opt": o, "it": 0}
        dcp.load(state, checkpoint_id=f"{args.resume}/{newest}")
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["opt"])
        start = state["it"]

    for it in range(start, args.steps):
        xt, t, v = flow_batch(it, args.batch, rank, world)
        loss = F.mse_loss(model(xt, t), v)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        opt.step()
        opt.zero_grad()
        loss = loss.detach()
        dist.all_reduce(loss)
        if rank == 0:
            print(f"it {it + 1:3d} loss {loss.item() / world:.5f}")
        if args.save_every and (it + 1) % args.save_every == 0:
            m, o = get_state_dict(model, opt)
            dcp.save({"model": m, "opt": o, "it": it + 1}, checkpoint_id=f"{args.out}/it{it + 1}")

    with torch.no_grad():
        losses = [F.mse_loss(model(xt, t), v) for xt, t, v in (flow_batch(10**5 + i, 256, 0, 1) for i in range(2))]
    if rank == 0:
        print(f"held-out loss {torch.stack(losses).mean().item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
