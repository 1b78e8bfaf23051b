"""Pre-training of a byte-level LM. Checkpoints hold the plain state_dict()s of the model, the optimizer and the schedule."""
from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

TEXT = (b"the quick brown fox jumps over the lazy dog. a model reads bytes, and a sampler cuts windows. "
        b"weights are split over ranks; gradients are summed and split again. ") * 4


class CausalConv(nn.Module):
    def __init__(self, d: int, k: int):
        super().__init__()
        self.k = k
        self.norm = nn.LayerNorm(d)
        self.conv = nn.Conv1d(d, 2 * d, k)
        self.out = nn.Linear(d, d)

    def forward(self, x):
        h = F.pad(self.norm(x).transpose(1, 2), (self.k - 1, 0))
        return x + self.out(F.glu(self.conv(h).transpose(1, 2), -1))


class ByteLM(nn.Module):
    def __init__(self, d: int = 32, layers: int = 3):
        super().__init__()
        self.emb = nn.Embedding(128, d)
        self.layers = nn.ModuleList(CausalConv(d, 3) for _ in range(layers))
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, 128, bias=False)

    def forward(self, x):
        h = self.emb(x)
        for layer in self.layers:
            h = layer(h)
        return self.head(self.norm(h))


class Windows:
    """Windows at random places of the text; window i of step s is the same for any number of ranks."""

    def __init__(self, width: int, batch: int, rank: int, world: int):
        self.data = torch.tensor(list(TEXT))
        self.width, self.batch, self.rank, self.world = width, batch, rank, world

    def __getitem__(self, step: int) -> torch.Tensor:
        g = torch.Generator().manual_seed(3 * step + 1)
        at = torch.randint(len(self.data) - self.width, (self.batch,), generator=g)
        at = at.chunk(self.world)[self.rank]
        return self.data[at[:, None] + torch.arange(self.width + 1)]


def touch_optimizer(opt: torch.optim.Optimizer) -> None:
    """A step on zero gradients, so that every parameter has its state tensors before they are loaded into."""
    for group in opt.param_groups:
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    opt.step()
    opt.zero_grad()


class Checkpointer:
    def __init__(self, model, opt, sched):
        self.model, self.opt, self.sched = model, opt, sched

    def save(self, folder: Path, step: int) -> None:
        state = {"model": self.model.state_dict(), "optim": self.opt.state_dict(), "sched": self.sched.state_dict(), "step": step}
        dcp.save(state, checkpoint_id=str(folder / f"{step:05d}"))

    def restore(self, folder: Path) -> int:
        done = sorted(p for p in folder.iterdir() if p.name.isdigit())
        if not done:
            return 0
        touch_optimizer(self.opt)
        state = {"model": self.model.state_dict(), "optim": self.opt.state_dict(), "sched": self.sched.state_dict(), "step": 0}
        dcp.load(state, checkpoint_id=str(done[-1]))
        self.model.load_state_dict(state["model"])
        self.opt.load_state_dict(state["optim"])
        self.sched.load_state_dict(state["sched"])
        return state["step"]


def main() -> None:
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--width", type=int, default=24)
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--out", type=Path)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume", type=Path)
    a = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1234)
    model = ByteLM()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=a.lr, betas=(0.9, 0.99), weight_decay=0.01)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1, (s + 1) / 4) * (0.6 + 0.4 * math.cos(math.pi * s / a.steps)))
    ck = Checkpointer(model, opt, sched)
    begin = ck.restore(a.resume) if a.resume else 0

    windows = Windows(a.width, a.batch, rank, world)
    for step in range(begin, a.steps):
        x = windows[step]
        loss = F.cross_entropy(model(x[:, :-1]).reshape(-1, 128), x[:, 1:].reshape(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sched.step()
        opt.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0 and (step + 1 == a.steps or step % 3 == 0):
            print(f"[{step + 1}/{a.steps}] loss {mean.item() / world:.4f} lr {sched.get_last_lr()[0]:.2e}", flush=True)
        if a.out and a.save_every and (step + 1) % a.save_every == 0:
            ck.save(a.out, step + 1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
