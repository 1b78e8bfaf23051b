"""Ragged sequences, two micro-batches per update; the loss is the sum over real tokens divided by the number of
real tokens in the whole update (all ranks, all micro-batches)."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

VOCAB, PAD, MAXLEN = 20, -100, 12


class Reader(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, d)
        self.rnn = nn.GRU(d, d, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(d, d), nn.GELU())
        self.out = nn.Linear(d, VOCAB)

    def forward(self, ids):
        h, _ = self.rnn(self.emb(ids))
        return self.out(h + self.mlp(h))


def documents(step, n):
    g = torch.Generator().manual_seed(3_000 + step)
    start = torch.randint(0, VOCAB, (n, 1), generator=g)
    skip = torch.randint(1, 3, (n, 1), generator=g)
    seq = (start + skip * torch.arange(MAXLEN + 1)) % VOCAB
    length = torch.randint(2, MAXLEN + 1, (n, 1), generator=g)
    target = seq[:, 1:].masked_fill(torch.arange(MAXLEN) >= length, PAD)
    return seq[:, :-1], target


def updates(steps, n, micro, rank, world):
    """yields (micro-batches of this rank, real tokens over everything)"""
    for step in range(steps):
        ids, target = documents(step, n)
        ids, target = ids[rank::world], target[rank::world]
        tokens = (target != PAD).sum()
        dist.all_reduce(tokens)
        yield step, list(zip(ids.chunk(micro), target.chunk(micro))), tokens.item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=32)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--micro", type=int, default=2)
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(9)
    model = Reader()
    fully_shard(model.mlp)
    fully_shard(model)
    opt = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.8)

    for step, parts, tokens in updates(args.steps, args.batch, args.micro, rank, world):
        nll = torch.zeros(())
        for k, (ids, target) in enumerate(parts):
            model.set_requires_gradient_sync(k == len(parts) - 1)
            part = F.cross_entropy(model(ids).flatten(0, 1), target.flatten(), ignore_index=PAD, reduction="sum")
            (part * world / tokens).backward()  # the reduction over ranks is a mean
            nll += part.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        dist.all_reduce(nll)
        if rank == 0 and step % 4 == 0:
            print(f"step {step} tokens {tokens} nll/token {nll.item() / tokens:.4f}", flush=True)
    sd = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0 and args.export:
        torch.save(sd, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
