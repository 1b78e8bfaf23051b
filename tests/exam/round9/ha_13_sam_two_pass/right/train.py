"""Character model trained with sharpness-aware minimisation (two passes per step, momentum SGD below)
and a running average of the weights (SWA) over the last part of the training."""
import argparse
import contextlib
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

CHARS = "abcdefghijklmnopqrstuvwxyz ."
WORDS = ("shard", "gather", "reduce", "scatter", "rank", "mesh", "tensor", "loss", "step", "warm", "decay", "batch")


def sentence(g, length):
    text = ""
    while len(text) < length:
        text += WORDS[int(torch.randint(0, len(WORDS), (1,), generator=g))]
        text += "." if torch.rand(1, generator=g) < 0.2 else " "
    return torch.tensor([CHARS.index(c) for c in text[:length]])


def global_batch(step, size, length=25):
    g = torch.Generator().manual_seed(71 + 13 * step)
    rows = torch.stack([sentence(g, length) for _ in range(size)])
    return rows[:, :-1], rows[:, 1:]


class CharNet(nn.Module):
    def __init__(self, dim=40):
        super().__init__()
        self.embed = nn.Embedding(len(CHARS), dim)
        self.context = nn.ModuleList(nn.Conv1d(dim, dim, 3) for _ in range(2))
        self.norms = nn.ModuleList(nn.GroupNorm(1, dim) for _ in range(2))
        self.head = nn.Linear(dim, len(CHARS), bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for conv, norm in zip(self.context, self.norms):
            # the norm is per position, so nothing leaks from later characters
            h = norm(x.flatten(0, 1)).view_as(x).transpose(1, 2)
            x = x + F.silu(conv(F.pad(h, (2, 0)))).transpose(1, 2)
        return self.head(x)


class Sam:
    """Adds rho * g / |g| to the weights for the second pass and takes it back before the update."""

    def __init__(self, model, rho):
        self.model, self.rho = model, rho

    def params(self):
        return [p for p in self.model.parameters() if p.grad is not None]

    @torch.no_grad()
    def norm(self):
        square = torch.stack([p.grad.to_local().square().sum() for p in self.params()]).sum()
        dist.all_reduce(square)
        return square.sqrt()

    @contextlib.contextmanager
    def ascended(self):
        scale = self.rho / (self.norm().item() + 1e-12)
        with torch.no_grad():
            kept = [(p, p.detach().clone()) for p in self.params()]
            for p, _ in kept:
                p.add_(p.grad, alpha=scale)
                p.grad = None
        try:
            yield
        finally:
            with torch.no_grad():
                for p, value in kept:
                    p.copy_(value)


class WeightAverage:
    def __init__(self, model, first_step):
        self.model, self.first_step, self.count = model, first_step, 0
        self.mean = {n: torch.zeros_like(p) for n, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, step):
        if step < self.first_step:
            return
        self.count += 1
        for n, p in self.model.named_parameters():
            self.mean[n].add_(p - self.mean[n], alpha=1 / self.count)

    @contextlib.contextmanager
    def swapped_in(self):
        with torch.no_grad():
            live = {n: p.detach().clone() for n, p in self.model.named_parameters()}
            for n, p in self.model.named_parameters():
                p.copy_(self.mean[n] if self.count else live[n])
            yield
            for n, p in self.model.named_parameters():
                p.copy_(live[n])


def evaluate(model, size, rank, world):
    ids, targets = global_batch(100_000, size)
    with torch.no_grad():
        total = F.cross_entropy(model(ids[rank::world]).flatten(0, 1), targets[rank::world].flatten(), reduction="sum")
    dist.all_reduce(total)
    return total.item() / targets.numel()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=20)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--lr", type=float, default=0.15)
    ap.add_argument("--rho", type=float, default=0.05)
    ap.add_argument("--average-from", type=int, default=8)
    ap.add_argument("--eval-every", type=int, default=5)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--save-to", default="ckpt")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2)
    model = CharNet()
    for conv in model.context:
        fully_shard(conv)
    fully_shard(model, reshard_after_forward=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True, weight_decay=1e-4)
    sam, average = Sam(model, args.rho), WeightAverage(model, args.average_from)

    def state(step):
        weights, optim = get_state_dict(model, optimizer)
        return {"weights": weights, "optim": optim, "mean": average.mean, "count": average.count, "step": step}

    first = 0
    if args.resume:
        names = [n for n in os.listdir(args.resume) if os.path.exists(os.path.join(args.resume, n, ".metadata"))]
        saved = state(0)
        dcp.load(saved, checkpoint_id=os.path.join(args.resume, max(names)))
        set_state_dict(model, optimizer, model_state_dict=saved["weights"], optim_state_dict=saved["optim"])
        average.mean, average.count, first = saved["mean"], saved["count"], saved["step"]

    for step in range(first, args.steps):
        ids, targets = (t[rank::world] for t in global_batch(step, args.batch))

        def backward():
            loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
            loss.backward()
            return loss.detach()

        loss = backward()
        with sam.ascended():
            sharp = backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update(step)

        shown = torch.stack([loss, sharp]) / world
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step + 1:2d} loss {shown[0]:.5f} at the ascended point {shown[1]:.5f}")
        if (step + 1) % args.eval_every == 0:
            live = evaluate(model, 32, rank, world)
            with average.swapped_in():
                mean = evaluate(model, 32, rank, world)
            if rank == 0:
                print(f"   held out: live {live:.5f} averaged {mean:.5f}")
        if args.save_every and (step + 1) % args.save_every == 0 and step + 1 < args.steps:
            dcp.save(state(step + 1), checkpoint_id=os.path.join(args.save_to, f"{step + 1:06d}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
