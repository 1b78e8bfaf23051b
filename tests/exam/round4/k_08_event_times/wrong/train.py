"""Transformer for event sequences with time stamps (seconds since the start of the log), bf16 compute.
The kind of the next event depends on the last kind and on the time that passed before it."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

KINDS, LEN = 12, 24


def events(n, seed):
    g = torch.Generator().manual_seed(seed)
    gaps = torch.randint(1, 5, (n, LEN + 1), generator=g).float()          # 1 to 4 seconds
    times = 3000 + 1000 * torch.rand(n, 1, generator=g).round() + gaps.cumsum(1)
    kinds = torch.randint(KINDS, (n, 1), generator=g)
    for k in range(1, LEN + 1):
        jump = gaps[:, k - 1:k].long() * 2
        noise = (torch.rand(n, 1, generator=g) < 0.05).long()
        kinds = torch.cat([kinds, (kinds[:, -1:] + jump + noise) % KINDS], 1)
    return kinds, times


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)
        self.ff = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        q, k, v = self.qkv(self.n1(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.ff(self.n2(x))


class EventModel(nn.Module):
    def __init__(self, dim=32, depth=1):
        super().__init__()
        self.kind = nn.Embedding(KINDS, dim)
        self.gap = nn.Linear(6, dim)
        self.layers = nn.ModuleList(Layer(dim) for _ in range(depth))
        self.head = nn.Linear(dim, KINDS)

    def time_features(self, times):
        gap = times - F.pad(times, (1, 0))[:, :-1]
        gap[:, 0] = 1.0
        gap = gap.clamp(0, 8)
        return torch.stack([f(gap * w) for w in (0.5, 1.0, 2.0) for f in (torch.sin, torch.cos)], -1)

    def forward(self, kinds, times):
        x = self.kind(kinds)
        x = x + self.gap(self.time_features(times).to(x.dtype))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))

    torch.manual_seed(4)
    model = EventModel()
    mp = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=mp)
    fully_shard(model, mesh=mesh, mp_policy=mp)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))

    start = 0
    if args.resume:
        last = sorted(os.listdir(args.resume))[-1]
        m, o = get_state_dict(model, opt)
        sd = {"model": m, "opt": o, "step": 0}
        dcp.load(sd, checkpoint_id=os.path.join(args.resume, last))
        set_state_dict(model, opt, model_state_dict=sd["model"], optim_state_dict=sd["opt"])
        start = sd["step"]

    for step in range(start, args.steps):
        kinds, times = events(args.batch, seed=step)
        kinds, times = kinds.chunk(world)[rank], times.chunk(world)[rank]
        logits = model(kinds[:, :-1], times[:, :-1]).float()
        loss = F.cross_entropy(logits.flatten(0, 1), kinds[:, 1:].flatten())
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        hit = (logits.argmax(-1) == kinds[:, 1:]).float().mean()
        s = torch.stack([loss.detach(), hit]) / world
        dist.all_reduce(s)
        if rank == 0 and step % 5 == 4:
            print(f"step {step + 1} loss {s[0]:.4f} accuracy {s[1]:.3f}", flush=True)
        if args.out and args.save_every and (step + 1) % args.save_every == 0:
            m, o = get_state_dict(model, opt)
            dcp.save({"model": m, "opt": o, "step": step + 1}, checkpoint_id=os.path.join(args.out, f"s{step + 1:05d}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
