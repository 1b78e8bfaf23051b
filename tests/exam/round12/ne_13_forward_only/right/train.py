"""Zeroth-order fine-tuning of an adapter model: only forward passes, directions re-drawn from seeds (MeZO style)."""
import json
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

torch.set_default_dtype(torch.float64)

DEFAULTS = {"steps": 40, "batch": 32, "probes": 3, "eps": 1e-3, "lr": 8e-3,
            "journal": "", "journal_every": 12, "replay": ""}


class Scorer(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.lift = nn.Linear(6, width)
        self.hidden = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])
        self.score = nn.Linear(width, 1)

    def forward(self, x):
        x = torch.tanh(self.lift(x))
        for layer in self.hidden:
            x = x + 0.5 * torch.tanh(layer(x))
        return self.score(x)


def essays(step, n):
    g = torch.Generator().manual_seed(40 + step)
    x = torch.randn(n, 6, generator=g)
    return x, (x[:, :3].sum(1) * 0.6 - x[:, 3].abs() + 1.5).unsqueeze(1)


class Directions:
    """Adds c * z(seed) to the weights; z is drawn in full for every parameter and cut to the rows held here."""

    def __init__(self, model, rank, world):
        self.params, self.rank, self.world = list(model.parameters()), rank, world

    def slices(self, seed):
        g = torch.Generator().manual_seed(seed)
        for p in self.params:
            z = torch.randn(p.shape, generator=g)
            rows = z.chunk(self.world)
            yield p.to_local(), rows[self.rank] if self.rank < len(rows) else z[:0]

    @torch.no_grad()
    def add(self, seed, c):
        for local, z in self.slices(seed):
            if local.numel():
                local.add_(z, alpha=c)


def main(cfg):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    model = Scorer()
    mesh = init_device_mesh("cpu", (world,))
    for layer in model.hidden:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    model.requires_grad_(False)
    directions = Directions(model, rank, world)
    log = []                                   # (seed, coefficient) of every update so far: the whole checkpoint

    if cfg["replay"]:
        with open(os.path.join(cfg["replay"], "journal.json")) as f:
            log = [(s, float.fromhex(c)) for s, c in json.load(f)]
        for seed, c in log:
            directions.add(seed, c)

    @torch.no_grad()
    def loss_of(batch):
        x, y = (t.chunk(world)[rank] for t in batch)
        value = (model(x) - y).square().mean()
        dist.all_reduce(value)
        return value.item() / world

    for step in range(len(log) // cfg["probes"], cfg["steps"]):
        batch = essays(step, cfg["batch"])
        moves = []
        for k in range(cfg["probes"]):
            seed = 100_000 + step * cfg["probes"] + k
            kept = [p.to_local().clone() for p in model.parameters()]
            directions.add(seed, cfg["eps"])
            up = loss_of(batch)
            directions.add(seed, -2 * cfg["eps"])
            down = loss_of(batch)
            for p, old in zip(model.parameters(), kept):
                p.to_local().copy_(old)
            slope = max(-4.0, min(4.0, (up - down) / (2 * cfg["eps"])))
            moves.append((seed, -cfg["lr"] * slope / cfg["probes"]))
        for seed, c in moves:
            directions.add(seed, c)
        log += moves
        if rank == 0 and step % 8 == 0:
            print(f"{step:3d} loss {(up + down) / 2:.4f}", flush=True)
        if cfg["journal"] and (step + 1) % cfg["journal_every"] == 0 and step + 1 < cfg["steps"]:
            if rank == 0:
                os.makedirs(cfg["journal"], exist_ok=True)
                with open(os.path.join(cfg["journal"], "journal.json"), "w") as f:
                    json.dump([(s, c.hex()) for s, c in log], f)
            dist.barrier()
    final = loss_of(essays(-1, 256))
    if rank == 0:
        print(f"held-out {final:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    cfg = dict(DEFAULTS)
    for arg in sys.argv[1:]:
        key, value = arg.lstrip("-").split("=")
        key = key.replace("-", "_")
        cfg[key] = type(DEFAULTS[key])(value)
    main(cfg)
