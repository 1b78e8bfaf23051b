"""Audio event tagging with early stopping: the export is the model of the best validation loss."""
import argparse
import copy

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard

TAGS, BINS, FRAMES = 6, 16, 10


class GLUBlock(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.up = nn.Linear(d, 4 * d)
        self.down = nn.Linear(2 * d, d)

    def forward(self, x):
        return x + self.down(F.glu(self.up(self.norm(x))))


class Tagger(nn.Module):
    def __init__(self, d=24, depth=2):
        super().__init__()
        self.inp = nn.Linear(BINS, d)
        self.blocks = nn.ModuleList(GLUBlock(d) for _ in range(depth))
        self.att = nn.Linear(d, 1)
        self.out = nn.Linear(d, TAGS)

    def forward(self, x):
        h = self.inp(x)
        for b in self.blocks:
            h = b(h)
        w = self.att(h).softmax(1)
        return self.out((w * h).sum(1))


def events(n, seed):
    g = torch.Generator().manual_seed(seed)
    shapes = torch.randn(TAGS, BINS, generator=torch.Generator().manual_seed(99))
    y = (torch.rand(n, TAGS, generator=g) < 0.3).float()
    where = (torch.rand(n, TAGS, FRAMES, generator=g) < 0.4).float()
    x = torch.einsum("nt,ntf,tb->nfb", y, where, shapes)
    return x + 0.8 * torch.randn(n, FRAMES, BINS, generator=g), y


@torch.no_grad()
def val_loss(model, x, y, rank, world):
    model.eval()
    xs, ys = x[rank::world], y[rank::world]
    total = F.binary_cross_entropy_with_logits(model(xs), ys, reduction="sum")
    dist.all_reduce(total)
    model.train()
    return total.item() / y.numel()


class Best:
    """Remembers the (sharded) weights of the best evaluation so far."""

    def __init__(self, patience):
        self.loss, self.step, self.weights, self.bad, self.patience = float("inf"), -1, None, 0, patience

    def update(self, loss, step, model):
        if loss < self.loss:
            self.loss, self.step, self.bad = loss, step, 0
            self.weights = copy.deepcopy(get_model_state_dict(model))
        else:
            self.bad += 1
        return self.bad > self.patience


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--lr", type=float, default=0.6)
    ap.add_argument("--eval-every", type=int, default=4)
    ap.add_argument("--patience", type=int, default=5)
    ap.add_argument("--export")
    a = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = Tagger()
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)
    opt = torch.optim.SGD(model.parameters(), lr=a.lr, momentum=0.9)
    x, y = events(32, seed=1)
    xv, yv = events(64, seed=2)
    best = Best(a.patience)

    for step in range(1, a.steps + 1):
        idx = torch.randperm(len(x), generator=torch.Generator().manual_seed(step))[: a.batch]
        idx = idx.chunk(world)[rank]
        loss = F.binary_cross_entropy_with_logits(model(x[idx]), y[idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % a.eval_every == 0:
            v = val_loss(model, xv, yv, rank, world)
            stop = best.update(v, step, model)
            if rank == 0:
                print(f"step {step} train {loss.item():.4f} val {v:.4f} best {best.loss:.4f}@{best.step}", flush=True)
            if stop:
                break

    set_model_state_dict(model, best.weights)
    if rank == 0:
        print(f"restored the weights of step {best.step} (val {best.loss:.4f})")
    if a.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, a.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
