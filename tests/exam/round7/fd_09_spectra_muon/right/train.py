"""Concentrations from mixed spectra. Matrices by Muon, everything else by AdamW; warm-up and linear decay for both."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, get_optimizer_state_dict, set_model_state_dict, set_optimizer_state_dict)
from torch.distributed.fsdp import fully_shard

from muon import Muon

CHANNELS, SPECIES = 64, 6


class Mixer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.a = nn.Linear(d, 2 * d + 3)
        self.b = nn.Linear(2 * d + 3, d)

    def forward(self, x):
        return x + self.b(torch.nn.functional.gelu(self.a(self.norm(x))))


class SpectraNet(nn.Module):
    def __init__(self, d=40, depth=3):
        super().__init__()
        self.stem = nn.Linear(CHANNELS, d)
        self.body = nn.ModuleList(Mixer(d) for _ in range(depth))
        self.head = nn.Linear(d, SPECIES)

    def forward(self, x):
        h = self.stem(x)
        for m in self.body:
            h = m(h)
        return self.head(h).softmax(-1)


def spectra(n, g):
    f = torch.linspace(0, 1, CHANNELS)
    peaks = torch.exp(-((f - torch.linspace(0.1, 0.9, SPECIES)[:, None]) / 0.12) ** 2)
    c = torch.rand(n, SPECIES, generator=g) ** 2
    c = c / c.sum(1, keepdim=True)
    y = torch.tanh(2 * c @ peaks) + 0.02 * torch.randn(n, CHANNELS, generator=g)
    return y, c


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=40)
    p.add_argument("--save-at", type=int, nargs="*", default=[])
    p.add_argument("--ckpt")
    p.add_argument("--resume")
    p.add_argument("--dump")
    a = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = SpectraNet()
    for m in model.body:
        fully_shard(m)
    fully_shard(model)

    hidden = [q for n, q in model.named_parameters() if q.ndim == 2 and n.startswith("body")]
    ids = {id(q) for q in hidden}
    rest = [q for q in model.parameters() if id(q) not in ids]
    opts = {"muon": Muon(hidden, lr=0.02, weight_decay=0.01), "adam": torch.optim.AdamW(rest, lr=3e-3)}

    def factor(s):
        return min((s + 1) / 5, max(0.05, 1 - s / a.steps))

    scheds = {k: torch.optim.lr_scheduler.LambdaLR(o, factor) for k, o in opts.items()}
    g = torch.Generator().manual_seed(17)
    step = 0

    def snapshot():
        return {
            "model": get_model_state_dict(model),
            **{k: get_optimizer_state_dict(model, o) for k, o in opts.items()},
            "sched": {k: s.state_dict() for k, s in scheds.items()},
            "rng": g.get_state(), "step": step,
        }

    if a.resume:
        newest = max(os.listdir(a.resume), key=lambda n: int(n.split("_")[-1]))
        st = snapshot()
        dcp.load(st, checkpoint_id=os.path.join(a.resume, newest))
        set_model_state_dict(model, st["model"])
        for k, o in opts.items():
            set_optimizer_state_dict(model, o, st[k])
            scheds[k].load_state_dict(st["sched"][k])
        g.set_state(st["rng"])
        step = st["step"]

    while step < a.steps:
        x, c = spectra(96, g)
        x, c = x.chunk(world)[rank], c.chunk(world)[rank]
        loss = -(c * model(x).clamp_min(1e-7).log()).sum(-1).mean()
        loss.backward()
        for k in opts:
            opts[k].step()
            opts[k].zero_grad()
            scheds[k].step()
        step += 1
        if step % 8 == 0:
            l = loss.detach()
            dist.all_reduce(l)
            if rank == 0:
                print(f"{step:4d}  cross entropy {l.item() / world:.5f}  lr {scheds['muon'].get_last_lr()[0]:.4f}")
        if step in a.save_at:
            dcp.save(snapshot(), checkpoint_id=os.path.join(a.ckpt, f"at_{step}"))

    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0 and a.dump:
        torch.save(full, a.dump)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
