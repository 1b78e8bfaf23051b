"""Denoising of vibration windows with channel gates drawn once a step (the same on all ranks) and recomputed activations."""
import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint import load as dcp_load
from torch.distributed.checkpoint import save as dcp_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint


@dataclass
class Settings:
    window: int = 32
    width: int = 32
    depth: int = 3
    keep: float = 0.6
    batch: int = 32
    steps: int = 30
    lr: float = 4e-3


class GatedBlock(nn.Module):
    """Residual layer in which a random half of the inner channels is off for a whole step."""

    def __init__(self, width, keep, seed):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.keep = keep
        self.rng = torch.Generator().manual_seed(seed)

    def draw(self):
        if not self.training:
            return torch.ones(self.up.out_features)
        return torch.bernoulli(torch.full((self.up.out_features,), self.keep), generator=self.rng) / self.keep

    def forward(self, x, gates=None):
        gates = self.draw() if gates is None else gates
        return x + self.down(F.gelu(self.up(self.norm(x))) * gates)


class Denoiser(nn.Module):
    def __init__(self, s: Settings):
        super().__init__()
        self.read = nn.Linear(s.window, s.width)
        self.blocks = nn.ModuleList(GatedBlock(s.width, s.keep, seed=70 + i) for i in range(s.depth))
        self.write = nn.Linear(s.width, s.window)

    def forward(self, x):
        h = self.read(x)
        for block in self.blocks:
            h = checkpoint(block, h, block.draw(), use_reentrant=False)
        return self.write(h)


def windows(step, s):
    g = torch.Generator().manual_seed(900 + step)
    t = torch.linspace(0, 1, s.window)
    f = 1 + 5 * torch.rand(s.batch, 2, 1, generator=g)
    phase = 6.28 * torch.rand(s.batch, 2, 1, generator=g)
    clean = torch.sin(6.28 * f * t + phase).sum(1)
    noisy = clean + 0.4 * torch.randn(s.batch, s.window, generator=g)
    rank, world = dist.get_rank(), dist.get_world_size()
    return noisy.chunk(world)[rank], clean.chunk(world)[rank]


class Run:
    def __init__(self, settings):
        self.s = settings
        torch.manual_seed(44)
        self.model = Denoiser(settings)
        for block in self.model.blocks:
            fully_shard(block)
        fully_shard(self.model)
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=settings.lr, eps=1e-6, weight_decay=0.02)
        self.step = 0

    def state(self):
        model, optim = get_state_dict(self.model, self.optim)
        rngs = {str(i): b.rng.get_state() for i, b in enumerate(self.model.blocks)}
        return {"model": model, "optim": optim, "rngs": rngs, "step": self.step}

    def save(self, root):
        dcp_save(self.state(), checkpoint_id=str(Path(root) / f"run-{self.step:04d}"))

    def resume(self, root):
        state = self.state()
        dcp_load(state, checkpoint_id=str(max(Path(root).glob("run-*"))))
        set_state_dict(self.model, self.optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
        for i, block in enumerate(self.model.blocks):
            block.rng.set_state(state["rngs"][str(i)])
        self.step = state["step"]

    def train_step(self):
        noisy, clean = windows(self.step, self.s)
        loss = F.mse_loss(self.model(noisy), clean)
        self.optim.zero_grad()
        loss.backward()
        self.optim.step()
        self.step += 1
        return loss.detach()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    run = Run(Settings())
    if args.resume:
        run.resume(args.resume)
    while run.step < run.s.steps:
        loss = run.train_step()
        if run.step % 6 == 0:
            dist.all_reduce(loss)
            if dist.get_rank() == 0:
                print(f"step {run.step} mse {loss.item() / dist.get_world_size():.5f}", flush=True)
        if args.save_every and run.step % args.save_every == 0:
            run.save(args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
