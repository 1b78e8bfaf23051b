"""Sequence tagging with sharpness-aware minimisation (two backward passes per step, global norm by hand),
early stopping on validation accuracy and the best weights kept in memory of rank 0 only."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

WORDS, TAGS, LENGTH = 40, 6, 16


class BiBlock(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.rnn = nn.GRU(d, d // 2, batch_first=True, bidirectional=True)
        self.norm = nn.LayerNorm(d)

    def forward(self, x):
        return self.norm(x + self.rnn(x)[0])


class Tagger(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.emb = nn.Embedding(WORDS, d)
        self.blocks = nn.ModuleList([BiBlock(d), BiBlock(d)])
        self.tag = nn.Linear(d, TAGS, bias=False)

    def forward(self, ids):
        h = self.emb(ids)
        for b in self.blocks:
            h = b(h)
        return self.tag(h)


def corpus(seed, n):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, WORDS, (n, LENGTH), generator=g)
    tags = (ids + F.pad(ids, (1, 0))[:, :-1] // 8) % TAGS  # a word's tag depends on the word before it
    return ids, tags


def local(t):
    return t.to_local() if isinstance(t, DTensor) else t


class SAM:
    """Climb by rho along the gradient of the whole batch, take the gradient there, come back, step."""

    def __init__(self, params, base, rho):
        self.params, self.base, self.rho = list(params), base, rho

    @torch.no_grad()
    def climb(self):
        # shards are disjoint, so the sum of their squared norms over ranks is that of the full gradient
        sq = sum(local(p.grad).square().sum() for p in self.params)
        dist.all_reduce(sq)
        scale = self.rho / (sq.sqrt() + 1e-12)
        self.kept = [local(p).clone() for p in self.params]
        for p in self.params:
            local(p).add_(local(p.grad) * scale)
            p.grad = None

    @torch.no_grad()
    def come_back_and_step(self):
        for p, k in zip(self.params, self.kept):
            local(p).copy_(k)
        self.base.step()
        self.base.zero_grad()


@torch.no_grad()
def errors(model, ids, tags, rank, world):
    model.eval()
    wrong = (model(ids.chunk(world)[rank]).argmax(-1) != tags.chunk(world)[rank]).sum()
    model.reshard()
    model.train()
    dist.all_reduce(wrong)
    return int(wrong)


def gathered(model):
    return {n: p.detach().full_tensor() if isinstance(p, DTensor) else p.detach().clone() for n, p in model.named_parameters()}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=18)
    ap.add_argument("--patience", type=int, default=3)
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(41)
    model = Tagger()
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)
    opt = SAM(model.parameters(), torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.9), rho=0.05)
    valid = corpus(10**7, 64)

    best, best_step, best_weights, bad = None, 0, None, 0
    for step in range(1, args.steps + 1):
        ids, tags = (z.chunk(world)[rank] for z in corpus(step, 32))
        first = F.cross_entropy(model(ids).flatten(0, 1), tags.flatten())
        first.backward()
        opt.climb()
        F.cross_entropy(model(ids).flatten(0, 1), tags.flatten()).backward()
        opt.come_back_and_step()
        if step % 3:
            continue
        n = errors(model, *valid, rank, world)
        if best is None or n < best:
            best, best_step, bad = n, step, 0
            full = gathered(model)  # collective: all ranks take part, one keeps the result
            best_weights = {k: v.cpu() for k, v in full.items()} if rank == 0 else None
        else:
            bad += 1
        shown = first.detach().clone()
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} loss {shown.item() / world:.4f} validation errors {n}", flush=True)
        if bad >= args.patience:
            break

    # rank 0 has the best weights; the others get them piece by piece
    with torch.no_grad():
        for n, p in model.named_parameters():
            whole = best_weights[n].contiguous() if rank == 0 else torch.empty(p.shape)
            dist.broadcast(whole, src=0)
            if isinstance(p, DTensor):
                p.copy_(distribute_tensor(whole, p.device_mesh, p.placements))
            else:
                p.copy_(whole)
    again = errors(model, *valid, rank, world)
    if rank == 0:
        print(f"best step {best_step}: {best} errors, restored model {again} errors", flush=True)
    weights = gathered(model)
    if args.export and rank == 0:
        torch.save(weights, args.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
