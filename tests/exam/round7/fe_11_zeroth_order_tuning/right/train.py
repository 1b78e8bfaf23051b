import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from zo import MeZO

CLASSES, VOCAB, SEQ, BATCH = 4, 32, 12, 128


class Classifier(nn.Module):
    """A frozen random encoder with a tuned prefix, norm and head."""

    def __init__(self, dim=32):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.0, batch_first=True) for _ in range(2))
        self.prefix = nn.Parameter(torch.zeros(2, dim))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, CLASSES)
        self.embed.requires_grad_(False)
        self.encoder.requires_grad_(False)

    def forward(self, ids):
        x = torch.cat([self.prefix.expand(len(ids), -1, -1), self.embed(ids)], dim=1)
        for layer in self.encoder:
            x = layer(x)
        return self.head(self.norm(x.mean(1)))


def build():
    torch.manual_seed(0)
    model = Classifier()
    for layer in model.encoder:
        fully_shard(layer)
    # without a backward nothing would free the root's full parameters, and the next forward would
    # not see the shifted shards
    return fully_shard(model, reshard_after_forward=True)


def batch_for(step):
    g = torch.Generator().manual_seed(2_000 + step)
    y = torch.randint(CLASSES, (BATCH,), generator=g)
    typical = torch.randint(VOCAB // CLASSES, (BATCH, SEQ), generator=g) + (y * (VOCAB // CLASSES))[:, None]
    noise = torch.randint(VOCAB, (BATCH, SEQ), generator=g)
    ids = torch.where(torch.rand(BATCH, SEQ, generator=g) < 0.6, typical, noise)
    return ids, y


def global_loss(model, ids, y):
    rank, world = dist.get_rank(), dist.get_world_size()
    loss = F.cross_entropy(model(ids.chunk(world)[rank]), y.chunk(world)[rank], reduction="sum").double()
    dist.all_reduce(loss)
    return loss / len(y)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--out", default="ckpt")
    parser.add_argument("--resume")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    model = build().eval()
    optimizer = MeZO(model, lr=5e-3, eps=1e-2)

    if args.resume:
        state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
        dcp.load(state, checkpoint_id=os.path.join(args.resume, sorted(os.listdir(args.resume))[-1]))
        model.load_state_dict(state["model"])
        optimizer.velocity, optimizer.step_count = state["optim"]["velocity"], state["optim"]["step_count"]

    while optimizer.step_count < args.steps:
        ids, y = batch_for(optimizer.step_count)
        loss = optimizer.step(lambda: global_loss(model, ids, y))
        step = optimizer.step_count
        if dist.get_rank() == 0 and step % 4 == 0:
            print(f"step {step} loss {loss:.6f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            dcp.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, checkpoint_id=os.path.join(args.out, f"{step:05d}"))

    ids, y = batch_for(10_000)
    with torch.no_grad():
        final = global_loss(model, ids, y)
    if dist.get_rank() == 0:
        print(f"held-out loss {final.item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
