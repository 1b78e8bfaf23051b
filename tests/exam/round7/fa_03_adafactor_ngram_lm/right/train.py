"""Neural n-gram language model (embedding, two hidden layers, softmax) on Zipf-distributed text."""
import argparse
import glob
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from adafactor import Adafactor


@dataclass
class Config:
    vocab: int = 60
    context: int = 4
    dim: int = 24
    hidden: int = 48
    batch: int = 256
    steps: int = 24
    lr: float = 1e-2


class NGramLM(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.embed = nn.Embedding(cfg.vocab, cfg.dim)
        self.fc1 = nn.Linear(cfg.dim * cfg.context, cfg.hidden)
        self.fc2 = nn.Linear(cfg.hidden, cfg.hidden)
        self.out = nn.Linear(cfg.hidden, cfg.vocab)

    def forward(self, ctx):
        h = torch.relu(self.fc1(self.embed(ctx).flatten(1)))
        return self.out(torch.relu(self.fc2(h)))


class Corpus:
    """A Markov chain: the next token is Zipf distributed around a function of the last two tokens."""

    def __init__(self, cfg, length=6000, seed=5):
        g = torch.Generator().manual_seed(seed)
        zipf = 1.0 / torch.arange(1, cfg.vocab + 1).float() ** 1.3
        noise = torch.multinomial(zipf, length, replacement=True, generator=g)
        keep = torch.rand(length, generator=g) < 0.3
        tokens = noise.clone()
        for i in range(2, length):
            if keep[i]:
                tokens[i] = (tokens[i - 1] + 2 * tokens[i - 2]) % cfg.vocab
        self.tokens, self.cfg = tokens, cfg

    def batch(self, step, rank, world):
        g = torch.Generator().manual_seed(10_000 + step)
        start = torch.randint(0, len(self.tokens) - self.cfg.context - 1, (self.cfg.batch,), generator=g)
        start = start[rank::world]
        window = self.tokens[start[:, None] + torch.arange(self.cfg.context + 1)]
        return window[:, :-1], window[:, -1]


def rank_file(folder, step, rank):
    return os.path.join(folder, f"{step:06d}", f"rank{rank}.pt")


def save(folder, step, model, opt, rank):
    path = rank_file(folder, step, rank)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    weights = {n: p.to_local().clone() for n, p in model.named_parameters()}
    torch.save({"weights": weights, "opt": opt.state_dict(), "step": step}, path)
    dist.barrier()


def resume(folder, model, opt, rank):
    newest = sorted(glob.glob(os.path.join(folder, "[0-9]*")))[-1]
    saved = torch.load(os.path.join(newest, f"rank{rank}.pt"), weights_only=False)
    with torch.no_grad():
        for n, p in model.named_parameters():
            p.to_local().copy_(saved["weights"][n])
    opt.load_state_dict(saved["opt"])
    return saved["step"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--dir", default="")
    parser.add_argument("--resume", default="")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    cfg = Config()
    corpus = Corpus(cfg)

    torch.manual_seed(0)
    model = NGramLM(cfg)
    fully_shard(model)
    opt = Adafactor(model.parameters(), lr=cfg.lr)

    first = resume(args.resume, model, opt, rank) if args.resume else 0
    for step in range(first, cfg.steps):
        ctx, target = corpus.batch(step, rank, world)
        loss = F.cross_entropy(model(ctx), target)
        loss.backward()
        for group in opt.param_groups:
            group["lr"] = cfg.lr * min(1.0, (step + 1) / 5)
        opt.step()
        opt.zero_grad(set_to_none=True)

        mean = loss.detach()
        dist.all_reduce(mean)
        if rank == 0 and (step + 1) % 5 == 0:
            print(f"{step + 1:4d} loss {mean.item() / world:.5f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0 and step + 1 < cfg.steps:
            save(args.dir, step + 1, model, opt, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
