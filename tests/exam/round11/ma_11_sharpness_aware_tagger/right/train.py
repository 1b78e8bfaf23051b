"""Sequence labelling with a linear-chain CRF, trained with sharpness-aware minimisation.

Every step takes two gradients: one at the weights, one at the weights moved uphill by a fixed distance.
The optimizer works on the local shards and keeps its state in plain tensors.
"""
import argparse
import glob
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

WORDS, TAGS, LENGTH = 40, 4, 10


class CRFTagger(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.emb = nn.Embedding(WORDS, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True, bidirectional=True)
        self.emit = nn.Linear(2 * dim, TAGS)
        self.trans = nn.Parameter(torch.zeros(TAGS, TAGS))

    def forward(self, words, tags):
        """Negative log-likelihood of each sentence."""
        h, _ = self.rnn(self.emb(words))
        e = self.emit(h)
        gold = e.gather(-1, tags[..., None]).sum((1, 2)) + self.trans[tags[:, :-1], tags[:, 1:]].sum(1)
        alpha = e[:, 0]
        for t in range(1, e.shape[1]):
            alpha = torch.logsumexp(alpha[:, :, None] + self.trans, dim=1) + e[:, t]
        return torch.logsumexp(alpha, -1) - gold


def sentences(step, n):
    g = torch.Generator().manual_seed(800 + step)
    words = torch.randint(0, WORDS, (n, LENGTH), generator=g)
    tags = words % 2
    tags[:, 1:] += 2 * ((words[:, 1:] + words[:, :-1]) % 3 == 0).long()
    return words, tags


class SAM:
    """Adam with decoupled decay around a sharpness-aware gradient."""

    def __init__(self, named_params, lr, rho, betas=(0.9, 0.98), decay=0.01):
        self.params = dict(named_params)
        self.lr, self.rho, self.betas, self.decay = lr, rho, betas, decay
        self.t = 0
        self.m = {n: torch.zeros_like(p.to_local()) for n, p in self.params.items()}
        self.v = {n: torch.zeros_like(p.to_local()) for n, p in self.params.items()}
        self.home = {}

    @torch.no_grad()
    def climb(self):
        sq = torch.zeros(())
        for p in self.params.values():
            sq += p.grad.to_local().pow(2).sum()
        dist.all_reduce(sq)
        scale = self.rho / (sq.sqrt() + 1e-12)
        for n, p in self.params.items():
            local = p.to_local()
            self.home[n] = local.clone()
            local.add_(p.grad.to_local() * scale)
            p.grad = None

    @torch.no_grad()
    def descend(self):
        self.t += 1
        b1, b2 = self.betas
        step_size = self.lr * math.sqrt(1 - b2 ** self.t) / (1 - b1 ** self.t)
        for n, p in self.params.items():
            local, g = p.to_local(), p.grad.to_local()
            local.copy_(self.home.pop(n))
            self.m[n].mul_(b1).add_(g, alpha=1 - b1)
            self.v[n].mul_(b2).addcmul_(g, g, value=1 - b2)
            local.mul_(1 - self.lr * self.decay)
            local.addcdiv_(self.m[n], self.v[n].sqrt().add_(1e-7), value=-step_size)
            p.grad = None

    def state_dict(self):
        return {"t": self.t, "m": self.m, "v": self.v}

    def load_state_dict(self, s):
        self.t, self.m, self.v = s["t"], s["m"], s["v"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=12)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="sam")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(6)
    model = CRFTagger()
    fully_shard(model)
    sam = SAM(model.named_parameters(), lr=1e-2, rho=0.05)

    first = 0
    if args.resume:
        files = glob.glob(os.path.join(args.resume, f"s*.r{rank}.pt"))
        newest = max(files, key=lambda f: int(os.path.basename(f)[1:].split(".")[0]))
        blob = torch.load(newest, weights_only=False)
        model.load_state_dict(blob["model"])
        sam.load_state_dict(blob["sam"])
        first = sam.t

    for step in range(first, args.steps):
        words, tags = (x[rank::world] for x in sentences(step, args.batch))
        losses = []
        for move in (sam.climb, sam.descend):
            loss = model(words, tags).mean()
            loss.backward()
            move()
            losses.append(loss.detach() / world)
        shown = torch.stack(losses)
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step + 1} nll {shown[0].item():.4f} uphill {shown[1].item():.4f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            os.makedirs(args.out, exist_ok=True)
            torch.save({"model": model.state_dict(), "sam": sam.state_dict()}, os.path.join(args.out, f"s{step + 1}.r{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
