import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

from engine import drive, training
from listeners import Checkpoints, Clip, Console, Export, Schedule
from source import LENGTH, VOCAB, Source


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.attn = nn.TransformerEncoderLayer(dim, 4, 2 * dim, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.attn(x, src_mask=mask, is_causal=True)


def build():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(VOCAB, 24), Positions(24), Block(24), Block(24), nn.Linear(24, VOCAB))
    for layer in (model[2], model[3]):
        fully_shard(layer)
    return fully_shard(model)


class Positions(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.table = nn.Parameter(torch.randn(LENGTH, dim) * 0.2)

    def forward(self, x):
        return x + self.table


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="run")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01, eps=1e-6)
    checkpoints = Checkpoints(model, optimizer, args.out, args.save_every)
    first = checkpoints.restore(args.resume) if args.resume else 0
    source = Source(dist.get_rank(), dist.get_world_size())
    drive(
        training(model, optimizer, source, first, args.steps),
        [Schedule(optimizer, 1e-2, args.steps), Clip(model, 1.0), Console(), checkpoints, Export(model, args.export)],
    )
    dist.destroy_process_group()
