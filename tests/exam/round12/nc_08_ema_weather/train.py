"""Next-step emulator of a one-dimensional advection-diffusion "weather" on a ring of stations.

The averaged weights are what the forecast office gets, they are evaluated at the end and stored in the checkpoint."""
import argparse
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


@dataclass
class Settings:
    stations: int = 24
    width: int = 48
    cases: int = 32
    steps: int = 56
    lr: float = 2e-3
    ema_decay: float = 0.98
    ema_dtype: torch.dtype = torch.float32


def simulate(fields, n=3):
    for _ in range(n):
        left, right = fields.roll(1, -1), fields.roll(-1, -1)
        fields = fields - 0.4 * (fields - left) + 0.1 * (left + right - 2 * fields) + 0.02 * torch.sin(3 * fields)
    return fields


def weather(s, n, key):
    g = torch.Generator().manual_seed(key)
    modes = torch.randn(n, 5, generator=g)
    shift = 6.2832 * torch.rand(n, 5, generator=g)
    pos = torch.arange(s.stations) * 6.2832 / s.stations
    k = torch.arange(1.0, 6.0)
    x = (modes[..., None] / k[:, None] * torch.sin(k[:, None] * pos + shift[..., None])).sum(1)
    return x, simulate(x)


class Emulator(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.encode = nn.Linear(s.stations, s.width)
        self.mix = nn.Sequential(nn.LayerNorm(s.width), nn.Linear(s.width, s.width), nn.GELU(), nn.Linear(s.width, s.width))
        self.decode = nn.Linear(s.width, s.stations)

    def forward(self, x):
        h = self.encode(x)
        return x + self.decode(h + self.mix(h))


class Average:
    def __init__(self, model, decay, dtype):
        self.decay = decay
        self.shadow = {n: p.detach().to(dtype, copy=True) for n, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model):
        for n, p in model.named_parameters():
            s = self.shadow[n]
            s.add_(p.detach().to(s.dtype) - s, alpha=1 - self.decay)

    @torch.no_grad()
    def swap_in(self, model):
        for n, p in model.named_parameters():
            p.copy_(self.shadow[n].to(p.dtype))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=12)
    ap.add_argument("--resume")
    args = ap.parse_args()
    s = Settings()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(9)
    model = Emulator(s)
    fully_shard(model.mix, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    opt = torch.optim.Adam(model.parameters(), lr=s.lr)
    ema = Average(model, s.ema_decay, s.ema_dtype)

    def everything(step):
        m, o = get_state_dict(model, opt)
        return {"model": m, "opt": o, "ema": ema.shadow, "step": step}

    step = 0
    if args.resume:
        state = everything(0)
        dcp.load(state, checkpoint_id=os.path.join(args.resume, max(os.listdir(args.resume))))
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["opt"])
        step = state["step"]

    def mean_over_ranks(value):
        value = value.detach() / world
        dist.all_reduce(value)
        return value.item()

    mine = slice(rank * s.cases // world, (rank + 1) * s.cases // world)
    while step < s.steps:
        x, y = weather(s, s.cases, 5000 + step)
        loss = (model(x[mine]) - y[mine]).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        ema.update(model)
        step += 1
        if step % 8 == 1:
            shown = mean_over_ranks(loss)
            if rank == 0:
                print(f"step {step} loss {shown:.5f}", flush=True)
        if args.out and step % args.save_every == 0:
            dcp.save(everything(step), checkpoint_id=os.path.join(args.out, f"{step:04d}"))

    ema.swap_in(model)
    x, y = weather(s, 64, 1)
    part = slice(rank * 64 // world, (rank + 1) * 64 // world)
    with torch.no_grad():
        score = mean_over_ranks((model(x[part]) - y[part]).square().mean())
    if rank == 0:
        print(f"forecast error of the averaged weights {score:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
