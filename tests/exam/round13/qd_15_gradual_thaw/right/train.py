"""Transfer with gradual unfreezing: the head first, then one block after the other from the top, finally the head rests."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

PHASE_LENGTH = 4
PHASES = (("head",), ("head", "blocks.1"), ("head", "blocks.1", "blocks.0"), ("blocks.1", "blocks.0"))
RATES = {"head": 1e-2, "blocks.1": 5e-3, "blocks.0": 2e-3}


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(d), nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x):
        return x + self.b(F.relu(self.a(self.norm(x))))


class Net(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.stem = nn.Linear(10, d)
        self.blocks = nn.ModuleList(Block(d) for _ in range(2))
        self.head = nn.Linear(d, 3)

    def forward(self, x):
        x = self.stem(x)
        for b in self.blocks:
            x = b(x)
        return self.head(x)


class GradualThaw:
    """Keeps requires_grad and the optimizer's groups in step with the phase; groups are only ever added, so that a
    part which rests keeps its moments."""

    def __init__(self, model):
        self.model, self.opt, self.added = model, None, []

    def enter(self, phase):
        active = PHASES[phase]
        self.model.requires_grad_(False)
        for name in active:
            self.model.get_submodule(name).requires_grad_(True)
        for name in active:
            if name in self.added:
                continue
            group = {"params": list(self.model.get_submodule(name).parameters()), "lr": RATES[name]}
            if self.opt is None:
                self.opt = torch.optim.Adam([group])
            else:
                self.opt.add_param_group(group)
            self.added.append(name)


def shard(t):
    return t.to_local() if isinstance(t, DTensor) else t


def save(folder, model, opt, step):
    """One file per rank with its shards; to be loaded on the same number of ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    params = {n: shard(p.detach()).clone() for n, p in model.named_parameters()}
    moments = {n: {k: shard(v).clone() for k, v in opt.state[p].items()} for n, p in model.named_parameters() if p in opt.state}
    torch.save({"params": params, "moments": moments, "step": step, "world": world}, os.path.join(folder, f"shard_{rank}_of_{world}.pt"))
    dist.barrier()


def load(folder, model, thaw):
    rank, world = dist.get_rank(), dist.get_world_size()
    ck = torch.load(os.path.join(folder, f"shard_{rank}_of_{world}.pt"))
    for phase in range((ck["step"] - 1) // PHASE_LENGTH + 1):
        thaw.enter(phase)
    for n, p in model.named_parameters():
        with torch.no_grad():
            shard(p).copy_(ck["params"][n])
        for k, v in ck["moments"].get(n, {}).items():
            if k != "step" and isinstance(p, DTensor):
                v = DTensor.from_local(v, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())
            thaw.opt.state[p][k] = v
    return ck["step"]


def batch(step):
    g = torch.Generator().manual_seed(step + 100)
    x = torch.randn(32, 10, generator=g)
    return x, (x[:, :3] * x[:, 3:6]).add(x[:, 6:9]).argmax(1)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-step", type=int, default=0)
    ap.add_argument("--folder", default="thaw")
    ap.add_argument("--resume", action="store_true")
    a = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(12)
    model = Net()
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)
    thaw = GradualThaw(model)
    start = load(a.folder, model, thaw) if a.resume else 0
    for step in range(start, PHASE_LENGTH * len(PHASES)):
        if step % PHASE_LENGTH == 0:
            thaw.enter(step // PHASE_LENGTH)
        x, y = batch(step)
        loss = F.cross_entropy(model(x[rank::world]), y[rank::world])
        thaw.opt.zero_grad()
        loss.backward()
        thaw.opt.step()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0 and step % 3 == 0:
            print(f"step {step + 1} loss {mean.item():.5f} training {'+'.join(PHASES[step // PHASE_LENGTH])}", flush=True)
        if step + 1 == a.save_step:
            save(a.folder, model, thaw.opt, step + 1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
