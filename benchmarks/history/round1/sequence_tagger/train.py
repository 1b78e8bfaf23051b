"""Sequence tagger (which span of the sequence a token belongs to), with gradient accumulation.

    torchrun --nproc-per-node 2 train.py
"""
import math
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


@dataclass
class OptimArgs:
    lr: float = 0.3
    momentum: float = 0.9
    weight_decay: float = 1e-4
    clip: float = 0.25
    warmup: int = 3


@dataclass
class TrainArgs:
    steps: int = 24
    grad_acc_steps: int = 4
    batch_size: int = 16  # sequences per micro step, over all ranks
    seq_len: int = 20
    vocab: int = 24
    n_tags: int = 5
    dim: int = 24
    n_layers: int = 2
    seed: int = 777
    log_freq: int = 2
    eval_every: int = 12
    optim: OptimArgs = field(default_factory=OptimArgs)


@dataclass
class TrainState:
    step: int = 0
    acc_step: int = 0
    n_tokens: int = 0


class BiConvLayer(nn.Module):
    def __init__(self, dim, dilation):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.conv = nn.Conv1d(dim, 2 * dim, 3, padding=dilation, dilation=dilation)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        h = F.glu(self.conv(self.norm(x).transpose(1, 2)), dim=1).transpose(1, 2)
        return x + self.proj(h)


class Tagger(nn.Module):
    def __init__(self, args: TrainArgs):
        super().__init__()
        self.embed = nn.Embedding(args.vocab, args.dim)
        self.layers = nn.ModuleList(BiConvLayer(args.dim, 2**i) for i in range(args.n_layers))
        self.norm = nn.LayerNorm(args.dim)
        self.out = nn.Linear(args.dim, args.n_tags)

    def forward(self, ids, tags=None):
        h = self.embed(ids)
        for layer in self.layers:
            h = layer(h)
        logits = self.out(self.norm(h))
        if tags is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), tags.flatten())


class SpanCorpus:
    """Each tag has its own token distribution; spans of 2 to 6 tokens follow each other."""

    def __init__(self, args: TrainArgs):
        self.args = args
        g = torch.Generator().manual_seed(args.seed)
        self.emission = torch.softmax(2.5 * torch.randn(args.n_tags, args.vocab, generator=g), -1)

    def batch(self, index, rank, world):
        a = self.args
        g = torch.Generator().manual_seed(a.seed * 1009 + index)
        tags = torch.zeros(a.batch_size, a.seq_len, dtype=torch.long)
        for row in tags:
            at = 0
            while at < a.seq_len:
                length = int(torch.randint(2, 7, (), generator=g))
                row[at : at + length] = int(torch.randint(a.n_tags, (), generator=g))
                at += length
        ids = torch.multinomial(self.emission[tags.flatten()], 1, generator=g).view_as(tags)
        return ids[rank::world], tags[rank::world]


def build_optimizer(model, args: OptimArgs, n_steps):
    optimizer = torch.optim.SGD(
        model.parameters(), lr=args.lr, momentum=args.momentum, weight_decay=args.weight_decay
    )

    def factor(step):
        if step < args.warmup:
            return (step + 1) / args.warmup
        return 0.5 * (1 + math.cos(math.pi * (step - args.warmup) / (n_steps - args.warmup)))

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


@torch.no_grad()
def evaluate(model, corpus, rank, world, n_batches=8):
    model.eval()
    hits = torch.zeros(2)
    for i in range(n_batches):
        ids, tags = corpus.batch(900_000 + i, rank, world)
        hits += torch.tensor([(model(ids).argmax(-1) == tags).sum().item(), tags.numel()])
    dist.all_reduce(hits)
    model.train()
    return (hits[0] / hits[1]).item()


def train(args: TrainArgs):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    model = Tagger(args)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer, scheduler = build_optimizer(model, args.optim, args.steps)
    corpus = SpanCorpus(args)
    state = TrainState()

    micro, window, grad_norm = 0, [], 0.0
    while state.step < args.steps:
        state.acc_step = (state.acc_step + 1) % args.grad_acc_steps
        ids, tags = corpus.batch(micro, rank, world)
        micro += 1
        state.n_tokens += tags.numel() * world

        loss = model(ids, tags)
        # scaled so that the gradient does not depend on the number of micro steps
        (loss / args.grad_acc_steps).backward()
        window.append(loss.detach())

        if state.acc_step == 0:
            grad_norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=args.optim.clip, foreach=True)
            grad_norm = (grad_norm.full_tensor() if isinstance(grad_norm, DTensor) else grad_norm).item()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            state.step += 1

            mean = torch.stack(window).mean()
            window.clear()
            dist.all_reduce(mean)
            if rank == 0 and state.step % args.log_freq == 0:
                print(
                    f"step {state.step} loss {mean.item() / world:.6f} grad {grad_norm:.5f} "
                    f"lr {scheduler.get_last_lr()[0]:.4f} tokens {state.n_tokens}",
                    flush=True,
                )
            if state.step % args.eval_every == 0:
                accuracy = evaluate(model, corpus, rank, world)
                if rank == 0:
                    print(f"step {state.step} tag accuracy {accuracy:.4f}", flush=True)


def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    train(TrainArgs())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
