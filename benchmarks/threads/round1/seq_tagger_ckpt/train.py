#!/usr/bin/env python
"""Sequence tagger (bidirectional transformer) trained with FSDP2 and DCP checkpoints."""
import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

VOCAB, TAGS, LENGTH, WIDTH = 40, 5, 16, 32


class Encoder(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.tagger = nn.Linear(WIDTH, TAGS)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.tagger(x)


class TagStream:
    """Infinite stream of tagged sequences; its position is part of the checkpoint."""

    def __init__(self, batch_size, rank, world, seed=5):
        self.batch_size, self.rank, self.world, self.seed = batch_size, rank, world, seed
        self.position = 0

    def __next__(self):
        g = torch.Generator().manual_seed(self.seed * 100003 + self.position)
        self.position += 1
        ids = torch.randint(VOCAB, (self.batch_size, LENGTH), generator=g)
        tags = (ids + torch.roll(ids, 1, dims=1)) // 16
        return ids[self.rank :: self.world], tags[self.rank :: self.world]

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class CheckpointManager:
    def __init__(self, root, model, optimizer, stream):
        self.root = Path(root)
        self.model, self.optimizer, self.stream = model, optimizer, stream

    def save(self, step):
        target = self.root / f"step_{step}"
        state = {
            "model": get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
        }
        dcp.save(state, checkpoint_id=str(target))
        if dist.get_rank() == 0:
            torch.save({"step": step, "stream": self.stream.state_dict()}, target / "train_state.pt")
            (self.root / "latest").write_text(target.name)
        dist.barrier()

    def load(self, exclude=()):
        source = self.root / (self.root / "latest").read_text().strip()
        state = {}
        if "model" not in exclude:
            state["model"] = get_model_state_dict(self.model)
        if "optimizer" not in exclude:
            state["optimizer"] = get_optimizer_state_dict(self.model, self.optimizer)
        dcp.load(state, checkpoint_id=str(source))
        if "model" in state:
            set_model_state_dict(self.model, state["model"])
        if "optimizer" in state:
            set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])
        extra = torch.load(source / "train_state.pt", weights_only=True)
        self.stream.load_state_dict(extra["stream"])
        return extra["step"]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--ckpt", default=None)
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()

    use_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if use_cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    mesh = dist.device_mesh.init_device_mesh(device.type, (world,))

    torch.manual_seed(21)
    model = Encoder().to(device)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01)
    stream = TagStream(args.batch_size, rank, world)
    manager = CheckpointManager(args.ckpt or ".", model, optimizer, stream)

    start = 0
    if args.resume:
        start = manager.load()
        if rank == 0:
            print(f"resumed at step {start}", flush=True)

    for step in range(start + 1, args.steps + 1):
        ids, tags = next(stream)
        logits = model(ids.to(device))
        tags = tags.to(device)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tags.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

        stats = torch.stack([loss.detach(), (logits.argmax(-1) == tags).float().mean()]) / world
        dist.all_reduce(stats)
        if rank == 0:
            print(f"step {step} loss {stats[0].item():.6f} acc {stats[1].item():.4f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            manager.save(step)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
