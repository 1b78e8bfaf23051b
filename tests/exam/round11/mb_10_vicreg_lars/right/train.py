"""VICReg with the statistics of the whole batch, LARS, an online linear probe; files for each rank as checkpoints."""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lars import LARS
from vicreg import vicreg_loss

STEPS, BATCH = 24, 32


class Backbone(nn.Module):
    def __init__(self, ch=12):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(3, ch, 3, 2, 1), nn.GroupNorm(4, ch), nn.ReLU(),
                                  nn.Conv2d(ch, 2 * ch, 3, 2, 1), nn.GroupNorm(4, 2 * ch), nn.ReLU())
        self.fc = nn.Linear(2 * ch * 9, 48)

    def forward(self, x):
        return F.relu(self.fc(self.conv(x).flatten(1)))


class VICReg(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = Backbone()
        self.expander = nn.Sequential(nn.Linear(48, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 32))

    def forward(self, x):
        h = self.backbone(x)
        return h, self.expander(h)


def views(step, rank, world):
    g = torch.Generator().manual_seed(31 + step)
    proto = torch.randn(6, 3, 12, 12, generator=torch.Generator().manual_seed(30))
    y = torch.randint(0, 6, (BATCH,), generator=g)
    x = proto[y] + 0.4 * torch.randn(BATCH, 3, 12, 12, generator=g)
    out = []
    for _ in range(2):
        v = x * (0.6 + 0.8 * torch.rand(BATCH, 3, 1, 1, generator=g)) + 0.3 * torch.randn(x.shape, generator=g)
        out.append(v.chunk(world)[rank])
    return out[0], out[1], y.chunk(world)[rank]


def local(t):
    return t.to_local() if isinstance(t, DTensor) else t


class Run:
    def __init__(self):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(1)
        self.model, self.probe = VICReg(), nn.Linear(48, 6)
        mesh = init_device_mesh("cpu", (self.world,))
        fully_shard(self.model.backbone, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        # the probe is tiny: kept whole on every rank, its gradients are reduced by hand
        # vectors are not adapted by LARS, so they get a much smaller learning rate
        groups = [{"params": [p for p in self.model.parameters() if p.ndim > 1], "scale": 1.0},
                  {"params": [p for p in self.model.parameters() if p.ndim <= 1], "scale": 0.002}]
        self.opt = LARS(groups, lr=1.0)
        self.probe_opt = torch.optim.Adam(self.probe.parameters(), lr=0.02)
        self.step = 0
        self.history = []

    def lr(self):
        s = self.step + 1
        return s / 5 if s <= 5 else 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (s - 5) / (STEPS - 5)))

    def train_step(self):
        a, b, y = views(self.step, self.rank, self.world)
        for g in self.opt.param_groups:
            g["lr"] = self.lr() * g["scale"]
        h, z = self.model(torch.cat([a, b]))
        loss = vicreg_loss(*z.chunk(2))
        loss.backward()
        self.opt.step()
        self.opt.zero_grad()

        logits = self.probe(h.detach())
        target = y.repeat(2)
        probe_loss = F.cross_entropy(logits, target, reduction="sum") / (2 * BATCH)
        probe_loss.backward()
        for p in self.probe.parameters():
            dist.all_reduce(p.grad)
        self.probe_opt.step()
        self.probe_opt.zero_grad()

        hits = (logits.argmax(1) == target).sum()
        dist.all_reduce(hits)
        self.history.append((loss.item(), hits.item() / (2 * BATCH)))
        self.step += 1

    def save(self, folder):
        path = os.path.join(folder, f"epoch-{self.step}")
        os.makedirs(path, exist_ok=True)
        torch.save({
            "weights": {n: local(p).detach() for n, p in self.model.named_parameters()},
            "momentum": [local(self.opt.state[p]["mu"]) for p in self.model.parameters()],
            "probe": self.probe.state_dict(), "probe_opt": self.probe_opt.state_dict(),
            "step": self.step, "history": self.history, "world": self.world,
        }, os.path.join(path, f"shard{self.rank}of{self.world}.pt"))
        dist.barrier()
        if self.rank == 0:
            with open(os.path.join(folder, "LATEST"), "w") as f:
                f.write(f"epoch-{self.step}")

    @torch.no_grad()
    def load(self, folder):
        with open(os.path.join(folder, "LATEST")) as f:
            path = os.path.join(folder, f.read())
        s = torch.load(os.path.join(path, f"shard{self.rank}of{self.world}.pt"))
        for n, p in self.model.named_parameters():
            local(p).copy_(s["weights"][n])
        for p, mu in zip(self.model.parameters(), s["momentum"]):
            self.opt.state[p]["mu"] = torch.zeros_like(p)
            local(self.opt.state[p]["mu"]).copy_(mu)
        self.probe.load_state_dict(s["probe"])
        self.probe_opt.load_state_dict(s["probe_opt"])
        self.step, self.history = s["step"], s["history"]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="vicreg")
    p.add_argument("--resume", default="")
    p.add_argument("--export", default="")
    args = p.parse_args()
    dist.init_process_group("gloo")
    run = Run()
    if args.resume:
        run.load(args.resume)
    while run.step < STEPS:
        run.train_step()
        if run.rank == 0:
            print("step {} loss {:.5f} probe {:.3f}".format(run.step, *run.history[-1]))
        if args.save_every and run.step % args.save_every == 0:
            run.save(args.out)
    if args.export:
        out = {n: (q.full_tensor() if isinstance(q, DTensor) else q).detach() for n, q in run.model.named_parameters()}
        out["probe"] = run.probe.state_dict()
        if run.rank == 0:
            torch.save(out, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
