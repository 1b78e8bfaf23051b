"""Next-symbol model on made-up sequences; validates late and keeps the weights of the best validation."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

SYMBOLS, CONTEXT = 12, 6


class Mixer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.time, self.wide = nn.Linear(CONTEXT, CONTEXT), nn.Linear(width, width)

    def forward(self, x):
        x = x + self.time(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return x + F.silu(self.wide(x))


class Model(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.symbols = nn.Embedding(SYMBOLS, width)
        self.mixers = nn.ModuleList(Mixer(width) for _ in range(2))
        self.out = nn.Linear(CONTEXT * width, SYMBOLS)

    def forward(self, ids):
        x = self.symbols(ids)
        for mixer in self.mixers:
            x = mixer(x)
        return self.out(x.flatten(1))


def sequences(seed, rows):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(SYMBOLS, (rows, CONTEXT), generator=g)
    follow = (ids[:, -1] + 2 * ids[:, -2]) % SYMBOLS
    noise = torch.rand(rows, generator=g) < 0.3
    return ids, torch.where(noise, torch.randint(SYMBOLS, (rows,), generator=g), follow)


class Best:
    """The weights at the lowest validation loss."""

    def __init__(self):
        self.loss, self.step, self.weights = float("inf"), 0, {}

    def see(self, model, loss, step):
        if loss < self.loss:
            self.loss, self.step = loss, step
            self.weights = {n: p.detach().clone() for n, p in model.named_parameters()}

    @torch.no_grad()
    def restore(self, model):
        for name, p in model.named_parameters():
            p.copy_(self.weights[name])


class Trainer:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(args.seed)
        self.model = Model()
        for mixer in self.model.mixers:
            fully_shard(mixer)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr, eps=1e-5)
        self.train_set, self.valid_set = sequences(1, 480), sequences(2, 77)
        self.best = Best()

    def mine(self, data, rows):
        return (t[rows][self.rank :: self.world] for t in data)

    @torch.no_grad()
    def validate(self):
        """The loss of a symbol; the 77 sequences do not divide by the ranks."""
        ids, follow = self.mine(self.valid_set, torch.arange(77))
        total = F.cross_entropy(self.model(ids), follow, reduction="sum")
        self.model.reshard()  # the root stays gathered behind a forward without backward
        both = torch.stack([total, torch.tensor(float(len(ids)))])
        dist.all_reduce(both)
        loss = both[0] / both[1]
        return loss.item(), loss.exp().item()

    def say(self, text):
        if self.rank == 0:
            print(text, flush=True)

    def fit(self):
        for step in range(1, self.args.steps + 1):
            g = torch.Generator().manual_seed(50 + step)
            rows = torch.randperm(480, generator=g)[: self.args.batch]
            ids, follow = self.mine(self.train_set, rows)
            loss = F.cross_entropy(self.model(ids), follow)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if step >= self.args.valid_from and step % 4 == 0:
                value, perplexity = self.validate()
                self.best.see(self.model, value, step)
                self.say(f"step {step} validation {value:.5f} perplexity {perplexity:.4f}")
        self.best.restore(self.model)
        self.say(f"best step {self.best.step}, restored: {self.validate()[0]:.5f}")


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=72)
    ap.add_argument("--batch", type=int, default=24)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--valid-from", type=int, default=36)
    ap.add_argument("--seed", type=int, default=8)
    options = ap.parse_args()
    dist.init_process_group("gloo")
    Trainer(options).fit()
    dist.destroy_process_group()
