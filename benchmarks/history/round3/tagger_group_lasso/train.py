"""Train a sequence tagger with structured sparsity.

Hidden channels of the MLPs are pruned during training by a group lasso: after every step of the base
optimizer the rows of the regularized weights go through the proximal map of the group norm. The last
part of the run is a healing phase where the pruned rows stay at zero.
"""
import argparse
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.experimental import local_map


class ProxGroupLasso:
    """Proximal map of ``reg_lambda * sqrt(n) * ||group||``, in place, for one group."""

    def __init__(self, reg_lambda):
        self.reg_lambda = reg_lambda

    def tau(self, p):
        return math.sqrt(p.numel())

    def norm(self, p):
        return torch.linalg.vector_norm(p)

    def apply_(self, p, gamma):
        norm = self.norm(p)
        mult = (1 - gamma * self.reg_lambda * self.tau(p) / norm.clamp(min=1e-12)).clamp(min=0)
        p.mul_(mult)
        return mult.eq(0).sum()


class ProxGroupLassoRows(ProxGroupLasso):
    """The same with every row of a matrix as a group."""

    def tau(self, p):
        return math.sqrt(p.size(1))

    def norm(self, p):
        return torch.linalg.vector_norm(p, dim=1, keepdim=True)


class PruneOptimizer:
    """Wraps a base optimizer and applies a proximal map to the groups that carry a ``prox``."""

    def __init__(self, base, warmup_steps, healing_start_step):
        self.base = base
        self.warmup_steps = warmup_steps
        self.healing_start_step = healing_start_step
        self.num_steps = 0
        self.relative_sparsity = 0.0

    def regularized_groups(self):
        return [g for g in self.base.param_groups if g.get("prox") is not None]

    def zero_grad(self):
        self.base.zero_grad()

    @staticmethod
    def _apply_prox(p, prox, gamma):
        """Prune ``p`` in place and return the number of its rows that are zero."""
        if isinstance(p, DTensor):
            prox_rows = ProxGroupLassoRows(prox.reg_lambda)
            zero_rows = local_map(
                prox_rows.apply_,
                out_placements=[Partial()],
                in_placements=(p.placements, None),
            )(p, gamma)
            return zero_rows.full_tensor().item()
        return sum(prox.apply_(row, gamma).item() for row in p)

    @torch.no_grad()
    def step(self):
        healing = self.num_steps >= self.healing_start_step
        masks = {}
        if healing:
            for group in self.regularized_groups():
                for p in group["params"]:
                    masks[p] = p.ne(0)
                    p.grad.mul_(masks[p])
        self.base.step()
        # momentum may have moved pruned values
        for p, mask in masks.items():
            p.mul_(mask)

        if self.warmup_steps <= self.num_steps < self.healing_start_step:
            zero_rows = rows = 0
            for group in self.regularized_groups():
                for p in group["params"]:
                    zero_rows += self._apply_prox(p, group["prox"], group["lr"])
                    rows += p.shape[0]
            self.relative_sparsity = zero_rows / rows
        self.num_steps += 1


class MLPBlock(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.mix = nn.Conv1d(dim, dim, 3, padding=1, groups=dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x):
        y = self.mix(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return x + self.down(F.relu(self.up(y)))


class Tagger(nn.Module):
    def __init__(self, vocab, tags, dim, hidden, depth):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(MLPBlock(dim, hidden) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, tags)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_corpus(n, length, vocab, tags, seed):
    """Tags depend on a token's class and on that of its left neighbour."""
    g = torch.Generator().manual_seed(seed)
    table = torch.randint(tags, (8, 8), generator=torch.Generator().manual_seed(99))
    tokens = torch.randint(vocab, (n, length), generator=g)
    cls = tokens % 8
    left = torch.cat([torch.zeros(n, 1, dtype=torch.long), cls[:, :-1]], dim=1)
    return tokens, table[cls, left]


def reduce_mean(x):
    x = x.detach().clone()
    dist.all_reduce(x)
    return (x / dist.get_world_size()).item()


@torch.no_grad()
def evaluate(model, tokens, labels):
    logits = model(tokens)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    acc = (logits.argmax(-1) == labels).float().mean()
    return reduce_mean(loss), reduce_mean(acc)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warmup-steps", type=int, default=10, help="steps before the pruning")
    parser.add_argument("--healing-start-step", type=int, default=44)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--seq-len", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.3)
    parser.add_argument("--reg-lambda", type=float, default=0.010)
    parser.add_argument("--seed", type=int, default=3)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    vocab, tags = 16, 6
    model = Tagger(vocab, tags, dim=32, hidden=48, depth=2)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)

    pruned = [block.up.weight for block in model.blocks]
    others = [p for p in model.parameters() if all(p is not q for q in pruned)]
    base = torch.optim.SGD([{"params": others},
                            {"params": pruned, "prox": ProxGroupLasso(args.reg_lambda)}], lr=args.lr, momentum=0.8)
    optimizer = PruneOptimizer(base, args.warmup_steps, args.healing_start_step)

    tokens, labels = make_corpus(args.steps * args.batch_size, args.seq_len, vocab, tags, args.seed)
    val = [t[rank::world_size] for t in make_corpus(64, args.seq_len, vocab, tags, args.seed + 1)]
    for step in range(args.steps):
        rows = slice(step * args.batch_size + rank, (step + 1) * args.batch_size, world_size)
        x, y = tokens[rows], labels[rows]
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == args.steps - 1:
            train_loss = reduce_mean(loss)
            if rank == 0:
                print(f"step {step:3d} loss {train_loss:.6f} sparsity {optimizer.relative_sparsity:.3f}", flush=True)

    val_loss, val_acc = evaluate(model, *val)
    if rank == 0:
        print(f"val loss {val_loss:.6f} acc {val_acc:.4f} pruned {optimizer.relative_sparsity:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
