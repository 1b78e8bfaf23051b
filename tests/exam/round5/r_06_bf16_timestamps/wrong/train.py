"""Click model with a time-of-week encoding, trained in bfloat16 compute with float32 master weights."""
import argparse
import glob
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, get_optimizer_state_dict, set_model_state_dict, set_optimizer_state_dict)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

ITEMS, WEEK = 64, 7 * 24 * 60.0


class TimeEncoding(nn.Module):
    """minutes since the log began -> sine and cosine of hour, day and week, then a projection"""

    def __init__(self, dim):
        super().__init__()
        self.register_buffer("freq", 2 * math.pi / torch.tensor([60.0, 24 * 60.0, WEEK]), persistent=False)
        self.proj = nn.Linear(6, dim)

    def forward(self, minutes):
        phase = minutes[:, None] * self.freq
        waves = torch.cat([phase.sin(), phase.cos()], 1)
        return self.proj(waves.to(self.proj.weight.dtype))


class ClickModel(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.item = nn.Embedding(ITEMS, dim)
        self.time = TimeEncoding(dim)
        self.mlp = nn.Sequential(nn.Linear(2 * dim, 48), nn.GELU(), nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 1))

    def forward(self, item, minutes):
        h = torch.cat([self.item(item), self.time(minutes)], 1)
        return self.mlp(h).squeeze(1)


def make_log(n=8192, seed=0):
    g = torch.Generator().manual_seed(seed)
    item = torch.randint(0, ITEMS, (n,), generator=g)
    minutes = torch.randint(0, 52 * int(WEEK), (n,), generator=g).float()
    taste = torch.randn(ITEMS, generator=g) * 0.5
    hour = torch.sin(2 * math.pi * minutes / 60.0)
    day = torch.cos(2 * math.pi * minutes / (24 * 60.0))
    logit = taste[item] + 2.0 * hour + 2.0 * day
    return item, minutes, (torch.rand(n, generator=g) < logit.sigmoid()).float()


def build():
    torch.manual_seed(0)
    model = ClickModel()
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model.mlp, mp_policy=bf16)
    fully_shard(model.time, mp_policy=bf16)
    return fully_shard(model, mp_policy=bf16)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=40)
    p.add_argument("--global-batch", type=int, default=256)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="")
    p.add_argument("--resume", default="")
    p.add_argument("--export", default="")
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = build()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    item, minutes, click = make_log()
    first = 0
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    if args.resume:
        ck = torch.load(max(glob.glob(os.path.join(args.resume, "click-*.pt"))), weights_only=True)
        set_model_state_dict(model, ck["model"], options=StateDictOptions(full_state_dict=True))
        set_optimizer_state_dict(model, opt, ck["optim"], options=StateDictOptions(full_state_dict=True))
        first = ck["step"]

    for step in range(first, args.steps):
        g = torch.Generator().manual_seed(step)
        idx = torch.randint(0, len(item), (args.global_batch,), generator=g).chunk(world)[rank]
        logit = model(item[idx], minutes[idx])
        loss = F.binary_cross_entropy_with_logits(logit.float(), click[idx])
        loss.backward()
        opt.step()
        opt.zero_grad()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step + 1} logloss {shown.item() / world:.4f}", flush=True)
        if args.save_every and args.out and (step + 1) % args.save_every == 0:
            ck = {"model": get_model_state_dict(model, options=full),
                  "optim": get_optimizer_state_dict(model, opt, options=full), "step": step + 1}
            if rank == 0:
                os.makedirs(args.out, exist_ok=True)
                torch.save(ck, os.path.join(args.out, f"click-{step + 1:05d}.pt"))
            dist.barrier()

    if args.export:
        weights = get_model_state_dict(model, options=full)
        if rank == 0:
            torch.save(weights, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
