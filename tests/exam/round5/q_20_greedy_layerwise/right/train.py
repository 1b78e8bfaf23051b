"""Greedy block-wise training: each block learns with its own local head and optimizer, blocks never see each other's gradients.

All blocks train at the same time on detached inputs; a coroutine per block does its own forward, backward and step."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

CLASSES = 4


class Local(nn.Module):
    """A block with its own classifier; the root of one FSDP tree."""

    def __init__(self, cin, cout, stride):
        super().__init__()
        self.conv = nn.Conv2d(cin, cout, 3, stride, 1)
        self.norm = nn.GroupNorm(4, cout)
        self.mix = nn.Conv2d(cout, cout, 1)
        self.head = nn.Linear(cout, CLASSES)

    def forward(self, x, y=None):
        h = F.gelu(self.norm(self.conv(x)))
        h = h + self.mix(h)
        logits = self.head(h.mean((2, 3)))
        return h.detach(), logits, None if y is None else F.cross_entropy(logits, y)


def learner(block, opt, budget):
    """Coroutine: send (step, x, y), receive (features, loss). Stops learning after its budget of steps."""
    out = None
    while True:
        step, x, y = yield out
        if step < budget:
            h, _, loss = block(x, y)
            loss.backward()
            opt.step()
            opt.zero_grad()
        else:
            with torch.no_grad():
                h, _, loss = block(x, y)
        out = h, loss.detach()


def textures(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (n,), generator=g)
    u = torch.arange(12).float()
    fy, fx = 0.5 + (y % 2) * 1.0, 0.5 + (y // 2) * 1.0
    ph = 6.28 * torch.rand(n, 2, 1, 1, generator=g)
    img = torch.sin(fy[:, None, None] * u[:, None] + ph[:, 0]) + torch.sin(fx[:, None, None] * u[None] + ph[:, 1])
    return img[:, None] + 0.3 * torch.randn(n, 1, 12, 12, generator=g), y


class Stack:
    def __init__(self, widths=(12, 16, 20), lr=0.1):
        torch.manual_seed(0)
        dims = [1, *widths]
        self.blocks = [fully_shard(Local(a, b, 1 if i == 0 else 2)) for i, (a, b) in enumerate(zip(dims, dims[1:]))]
        self.opts = [torch.optim.SGD(b.parameters(), lr=lr, momentum=0.9) for b in self.blocks]

    def state(self):
        return {
            f"block{i}": {"model": get_model_state_dict(b), "opt": get_optimizer_state_dict(b, o)}
            for i, (b, o) in enumerate(zip(self.blocks, self.opts))
        }

    def load(self, folder):
        step = max(int(n.removeprefix("greedy.")) for n in os.listdir(folder))
        state = self.state()
        dcp.load(state, checkpoint_id=os.path.join(folder, f"greedy.{step}"))
        for i, (b, o) in enumerate(zip(self.blocks, self.opts)):
            set_model_state_dict(b, state[f"block{i}"]["model"])
            set_optimizer_state_dict(b, o, state[f"block{i}"]["opt"])
        return step

    @torch.no_grad()
    def vote(self, x):
        total = 0
        for b in self.blocks:
            x, logits, _ = b(x)
            total = total + logits.softmax(-1)
        return total.argmax(-1)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    a = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    stack = Stack()
    start = stack.load(a.resume) if a.resume else 0
    x, y = textures(192, seed=1)
    budgets = [a.steps // 2 + i * a.steps // 4 for i in range(len(stack.blocks))]
    crew = [learner(b, o, n) for b, o, n in zip(stack.blocks, stack.opts, budgets)]
    for c in crew:
        next(c)

    for step in range(start, a.steps):
        idx = torch.randperm(len(y), generator=torch.Generator().manual_seed(step))[: a.batch].view(-1, world)[:, rank]
        h, target, losses = x[idx], y[idx], []
        for c in crew:
            h, loss = c.send((step, h, target))
            losses.append(loss)
        shown = torch.stack(losses) / world
        dist.all_reduce(shown)
        if rank == 0 and step % 5 == 4:
            print(f"step {step + 1} local losses " + " ".join(f"{v:.4f}" for v in shown.tolist()), flush=True)
        if a.save_every and (step + 1) % a.save_every == 0:
            dcp.save(stack.state(), checkpoint_id=os.path.join(a.out, f"greedy.{step + 1}"))

    xv, yv = textures(96, seed=2)
    hits = (stack.vote(xv[rank::world]) == yv[rank::world]).sum()
    dist.all_reduce(hits)
    if rank == 0:
        print(f"accuracy of the vote {hits.item() / len(yv):.3f}")
    if a.export:
        o = StateDictOptions(full_state_dict=True, cpu_offload=True)
        full = {f"block{i}": get_model_state_dict(b, options=o) for i, b in enumerate(stack.blocks)}
        if rank == 0:
            torch.save(full, a.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
