"""Forward-Forward (Hinton 2022) on small images: every layer has its own loss, its own backward and its own optimizer.

There is no root wrap, for no gradient ever passes from one layer to another.
"""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

CLASSES, PIXELS = 4, 64


def digits(n, seed):
    g = torch.Generator().manual_seed(seed)
    proto = (torch.rand(CLASSES, PIXELS, generator=torch.Generator().manual_seed(123)) > 0.6).float()
    y = torch.randint(0, CLASSES, (n,), generator=g)
    return proto[y] + 0.4 * torch.randn(n, PIXELS, generator=g), y


def with_label(x, y):
    return torch.cat([2.0 * F.one_hot(y, CLASSES).float(), x], 1)


class Layer(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.lin = nn.Linear(i, o)

    def forward(self, x):
        x = x / (x.norm(dim=1, keepdim=True) + 1e-4)
        return F.relu(self.lin(x))


def goodness(h):
    return h.square().mean(1)


class LocalLearner:
    """A sharded layer together with all that it needs to learn alone."""

    def __init__(self, i, o, lr, threshold):
        self.layer = Layer(i, o)
        fully_shard(self.layer, reshard_after_forward=False)
        self.opt = torch.optim.Adam(self.layer.parameters(), lr=lr)
        self.threshold = threshold

    def learn(self, pos, neg):
        h = self.layer(torch.cat([pos, neg]))
        hp, hn = h.chunk(2)
        loss = F.softplus(self.threshold - goodness(hp)).mean() + F.softplus(goodness(hn) - self.threshold).mean()
        loss.backward()
        self.opt.step()
        self.opt.zero_grad()
        return hp.detach(), hn.detach(), loss.detach()


@torch.no_grad()
def classify(learners, x):
    score = torch.zeros(len(x), CLASSES)
    for c in range(CLASSES):
        h = with_label(x, torch.full((len(x),), c))
        for k, l in enumerate(learners):
            h = l.layer(h)
            score[:, c] += goodness(h)
    for l in learners:
        l.layer.reshard()
    return score.argmax(1)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--hidden", type=int, nargs="+", default=[40, 40])
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(44)
    sizes = [PIXELS + CLASSES, *args.hidden]
    learners = [LocalLearner(i, o, args.lr, 1.0) for i, o in zip(sizes, sizes[1:])]
    x, y = digits(512, 1)
    tx, ty = digits(128, 2)

    for step in range(args.steps):
        g = torch.Generator().manual_seed(step)
        ids = torch.randint(0, len(x), (args.batch,), generator=g)
        shift = torch.randint(1, CLASSES, (args.batch,), generator=g)
        bx, by = x[ids][rank::world], y[ids][rank::world]
        pos, neg = with_label(bx, by), with_label(bx, (by + shift[rank::world]) % CLASSES)
        losses = []
        for l in learners:
            pos, neg, loss = l.learn(pos, neg)
            losses.append(loss)
        if (step + 1) % 10 == 0:
            shown = torch.stack(losses) / world
            dist.all_reduce(shown)
            ok = (classify(learners, tx[rank::world]) == ty[rank::world]).sum().float()
            dist.all_reduce(ok)
            if rank == 0:
                print(f"step {step + 1} loss {[round(v, 4) for v in shown.tolist()]} test acc {ok.item() / len(tx):.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
