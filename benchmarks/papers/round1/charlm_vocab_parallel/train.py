"""Character-level language model with a vocabulary-sharded embedding.

Layout: a 2-d mesh (dp, tp). The token table is cut by rows over tp, everything
else is replicated over tp and sharded over dp by FSDP2.
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

VOCAB = 64
DIM = 32
CTX = 24


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=40)
    p.add_argument("--global-batch", type=int, default=16)
    p.add_argument("--lr", type=float, default=4e-3)
    p.add_argument("--layers", type=int, default=2)
    p.add_argument("--eval-every", type=int, default=20)
    p.add_argument("--seed", type=int, default=11)
    return p.parse_args()


class SumOverGroup(torch.autograd.Function):
    """All-reduce in the forward pass, identity in the backward pass."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class VocabParallelEmbedding(nn.Module):
    def __init__(self, vocab, dim, group, generator):
        super().__init__()
        self.group = group
        ranks, me = dist.get_world_size(group), dist.get_rank(group)
        assert vocab % ranks == 0, "pad the vocabulary to a multiple of tp"
        rows = vocab // ranks
        self.start, self.end = me * rows, (me + 1) * rows
        table = torch.randn(vocab, dim, generator=generator) * 0.3
        self.weight = nn.Parameter(table[self.start:self.end].clone())

    def forward(self, ids):
        foreign = (ids < self.start) | (ids >= self.end)
        local = (ids - self.start).clamp(0, self.end - self.start - 1)
        out = F.embedding(local, self.weight)
        out = out.masked_fill(foreign.unsqueeze(-1), 0.0)
        return SumOverGroup.apply(out, self.group)


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.mix = nn.GRU(dim, dim, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        h, _ = self.mix(self.norm(x))
        return x + self.mlp(h)


class CharLM(nn.Module):
    def __init__(self, layers, group, generator):
        super().__init__()
        self.embed = VocabParallelEmbedding(VOCAB, DIM, group, generator)
        self.blocks = nn.ModuleList(Block(DIM) for _ in range(layers))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        x = self.embed(ids)
        for b in self.blocks:
            x = b(x)
        return self.head(self.norm(x))


class Corpus:
    """A random second-order Markov source, the stand-in for real text."""

    def __init__(self, seed):
        g = torch.Generator().manual_seed(seed)
        self.table = torch.randint(0, VOCAB, (VOCAB, 4), generator=g)

    def batch(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        seq = [torch.randint(0, VOCAB, (n,), generator=g)]
        for _ in range(CTX):
            pick = torch.randint(0, 4, (n,), generator=g)
            seq.append(self.table[seq[-1], pick])
        s = torch.stack(seq, 1)
        return s[:, :-1], s[:, 1:]


@torch.no_grad()
def evaluate(model, corpus, seed, dp_group):
    model.eval()
    total = torch.zeros(2)
    for i in range(2):
        x, y = corpus.batch(32, seed + i)
        logits = model(x)
        total[0] += F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum")
        total[1] += y.numel()
    model.train()
    return (total[0] / total[1]).item()


def main():
    args = parse()
    use_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if use_cuda else "gloo")
    world, rank = dist.get_world_size(), dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else torch.device("cpu")
    torch.set_default_device(device)

    tp = 2 if world % 2 == 0 else 1
    mesh = init_device_mesh(device.type, (world // tp, tp), mesh_dim_names=("dp", "tp"))
    dp_mesh = mesh["dp"]
    dp_rank, dp_size = dp_mesh.get_local_rank(), dp_mesh.size()

    torch.manual_seed(args.seed)
    init = torch.Generator(device=device).manual_seed(args.seed)
    model = CharLM(args.layers, mesh["tp"].get_group(), init)
    for block in model.blocks:
        fully_shard(block, mesh=dp_mesh)
    fully_shard(model, mesh=dp_mesh)

    optim = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)
    corpus = Corpus(args.seed)
    per_rank = args.global_batch // dp_size

    for step in range(1, args.steps + 1):
        x, y = corpus.batch(args.global_batch, 1000 + step)
        rows = slice(dp_rank * per_rank, (dp_rank + 1) * per_rank)
        x, y = x[rows].to(device), y[rows].to(device)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optim.step()
        optim.zero_grad()

        if step % 10 == 0:
            shown = loss.detach().clone()
            dist.all_reduce(shown, group=dp_mesh.get_group())
            if rank == 0:
                print(f"step {step:3d}  loss {shown.item() / dp_size:.5f}", flush=True)
        if step % args.eval_every == 0:
            val = evaluate(model, corpus, 90_000, dp_mesh.get_group())
            if rank == 0:
                print(f"step {step:3d}  val {val:.5f}  bpc {val / 0.693147:.4f}", flush=True)

    model.reshard()
    head_norm = model.head.weight.full_tensor().norm()
    if rank == 0:
        print(f"done, |head| = {head_norm.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
