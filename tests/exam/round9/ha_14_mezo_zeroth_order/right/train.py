"""Fine-tuning a small language model without backward passes (zeroth order, as in MeZO).

The model is first trained in the usual way for a few steps; then the gradient is estimated from the losses at
two mirrored perturbations of the weights, along directions that are never stored but drawn again from a seed.
"""
import argparse
import pathlib
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor, DTensor


@dataclass
class Settings:
    vocab: int = 24
    length: int = 12
    dim: int = 20
    batch: int = 16
    pretrain: int = 10
    steps: int = 16
    lr: float = 4e-3
    zo_lr: float = 2e-3
    eps: float = 1e-2
    probes: int = 3
    momentum: float = 0.8


class Net(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.embed = nn.Embedding(s.vocab, s.dim)
        self.mix = nn.ModuleList(nn.Linear(3 * s.dim, s.dim, bias=False) for _ in range(2))
        self.head = nn.Linear(s.dim, s.vocab, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for mix in self.mix:
            past = [F.pad(x, (0, 0, k, 0))[:, :x.shape[1]] for k in range(3)]
            x = x + torch.tanh(mix(torch.cat(past, -1)))
        return self.head(x)


def sequences(step, s, shift):
    g = torch.Generator().manual_seed(17 * step + shift)
    rows = torch.randint(0, s.vocab, (s.batch, 1), generator=g)
    rows = (rows + shift * torch.arange(s.length + 1)) % s.vocab
    swap = torch.rand(rows.shape, generator=g) < 0.05
    rows = torch.where(swap, torch.randint(0, s.vocab, rows.shape, generator=g), rows)
    mine = rows[dist.get_rank()::dist.get_world_size()]
    return mine[:, :-1], mine[:, 1:]


def global_loss(model, ids, targets):
    loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten()) / dist.get_world_size()
    dist.all_reduce(loss)
    return loss.item()


class ZerothOrder:
    """SPSA with several probes per step and momentum on the projected updates."""

    def __init__(self, model, s, seed=12345):
        self.model, self.s, self.seed = model, s, seed
        self.velocity = {n: torch.zeros_like(p) for n, p in model.named_parameters()}

    def directions(self, step, probe):
        """The whole direction is drawn on every rank from the same seed, and each keeps its shard."""
        g = torch.Generator().manual_seed(self.seed + 1_000 * step + probe)
        for name, p in self.model.named_parameters():
            z = torch.randn(p.shape, generator=g)
            yield name, p, distribute_tensor(z, p.device_mesh, p.placements) if isinstance(p, DTensor) else z

    def move(self, step, probe, scale):
        for _, p, z in self.directions(step, probe):
            p.add_(z, alpha=scale)

    @torch.no_grad()
    def step(self, step, ids, targets):
        s, slopes = self.s, []
        start = {n: p.clone() for n, p in self.model.named_parameters()}
        for probe in range(s.probes):
            losses = []
            for sign in (1, -1):
                self.move(step, probe, sign * s.eps)
                losses.append(global_loss(self.model, ids, targets))
                for n, p in self.model.named_parameters():
                    p.copy_(start[n])
            slopes.append((losses[0] - losses[1]) / (2 * s.eps))
        for v in self.velocity.values():
            v.mul_(s.momentum)
        for probe, slope in enumerate(slopes):
            for name, _, z in self.directions(step, probe):
                self.velocity[name].add_(z, alpha=slope / s.probes)
        for name, p in self.model.named_parameters():
            p.add_(self.velocity[name], alpha=-s.zo_lr)
        return slopes


def pretrain(model, s):
    optimizer = torch.optim.Adam(model.parameters(), lr=s.lr, eps=1e-6)
    for step in range(s.pretrain):
        ids, targets = sequences(step, s, shift=1)
        loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", type=pathlib.Path)
    ap.add_argument("--resume", type=pathlib.Path)
    args = ap.parse_args()
    s = Settings()
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = Net(s)
    for mix in model.mix:
        fully_shard(mix)
    fully_shard(model, reshard_after_forward=True)
    zo = ZerothOrder(model, s)

    first = 0
    if args.resume:
        newest = max(args.resume.glob("zo-*"), key=lambda f: int(f.name[3:]))
        state = {"model": get_model_state_dict(model), "velocity": zo.velocity, "step": 0}
        dcp.load(state, checkpoint_id=newest)
        set_model_state_dict(model, state["model"])
        zo.velocity, first = state["velocity"], state["step"]
    else:
        pretrain(model, s)
    model.requires_grad_(False)

    for step in range(first, s.steps):
        ids, targets = sequences(1_000 + step, s, shift=2)
        before = global_loss(model, ids, targets)
        slopes = zo.step(step, ids, targets)
        if dist.get_rank() == 0:
            print(f"zo step {step + 1:2d} loss {before:.5f} slopes {' '.join(f'{x:+.3f}' for x in slopes)}")
        if args.save_every and (step + 1) % args.save_every == 0 and step + 1 < s.steps:
            state = {"model": get_model_state_dict(model), "velocity": zo.velocity, "step": step + 1}
            dcp.save(state, checkpoint_id=args.out / f"zo-{step + 1}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
