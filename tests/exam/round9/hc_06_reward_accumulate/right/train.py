"""Bradley-Terry reward model, gradient accumulation over micro-batches of preference pairs."""
import argparse
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard


@dataclass
class Config:
    vocab: int = 40
    dim: int = 32
    length: int = 12
    pairs: int = 320
    micro: int = 32
    accumulate: int = 4
    epochs: int = 6
    lr: float = 0.3
    seed: int = 9


class RewardModel(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.tok = nn.Embedding(cfg.vocab, cfg.dim)
        self.conv = nn.Sequential(nn.Conv1d(cfg.dim, cfg.dim, 3, padding=1), nn.GELU(), nn.Conv1d(cfg.dim, cfg.dim, 3, padding=1))
        self.norm = nn.LayerNorm(cfg.dim)
        self.head = nn.Linear(cfg.dim, 1)

    def forward(self, ids):
        x = self.tok(ids)
        x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
        return self.head(self.norm(x).mean(1)).squeeze(-1)


def preference_pairs(cfg, seed, n):
    g = torch.Generator().manual_seed(seed)
    taste = torch.randn(cfg.vocab, generator=torch.Generator().manual_seed(77))
    a = torch.randint(0, cfg.vocab, (n, cfg.length), generator=g)
    b = torch.randint(0, cfg.vocab, (n, cfg.length), generator=g)
    swap = (taste[a].mean(1) < taste[b].mean(1))[:, None]
    return torch.where(swap, b, a), torch.where(swap, a, b)


def micro_batches(cfg, epoch, n):
    order = torch.randperm(n, generator=torch.Generator().manual_seed(cfg.seed + epoch))
    return list(order.split(cfg.micro))


def train_epoch(model, optimizer, data, cfg, epoch, rank, world):
    batches = micro_batches(cfg, epoch, len(data[0]))
    total = torch.zeros(())
    for i, batch in enumerate(batches):
        begin = i - i % cfg.accumulate
        in_group = min(cfg.accumulate, len(batches) - begin)
        last = (i + 1) % cfg.accumulate == 0 or i + 1 == len(batches)
        mine = batch.chunk(world)[rank]
        good, bad = data[0][mine], data[1][mine]

        model.set_requires_gradient_sync(last)
        score = model(torch.cat([good, bad]))
        loss = -F.logsigmoid(score[: len(mine)] - score[len(mine):]).mean()
        (loss / in_group).backward()
        total += loss.detach() / len(batches)

        if (i + 1) % cfg.accumulate == 0 or i + 1 == len(batches):
            optimizer.step()
            optimizer.zero_grad()
    total /= world
    dist.all_reduce(total)
    return total.item()


@torch.no_grad()
def accuracy(model, pairs, rank, world):
    good, bad = (t.chunk(world)[rank] for t in pairs)
    right = (model(good) > model(bad)).float().sum()
    dist.all_reduce(right)
    return right.item() / len(pairs[0])


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--out")
    p.add_argument("--save-every", type=int, default=2, help="epochs")
    p.add_argument("--resume")
    args = p.parse_args()
    cfg = Config()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(cfg.seed)
    model = RewardModel(cfg)
    fully_shard(model.conv)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=cfg.lr, momentum=0.8)
    data = preference_pairs(cfg, 1, cfg.pairs)
    held_out = preference_pairs(cfg, 2, 400)

    epoch = 0
    if args.resume:
        newest = sorted(os.listdir(args.resume))[-1]
        m, o = get_state_dict(model, optimizer)
        state = {"model": m, "optimizer": o, "epoch": 0}
        dcp.load(state, checkpoint_id=os.path.join(args.resume, newest))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        epoch = state["epoch"]

    while epoch < cfg.epochs:
        loss = train_epoch(model, optimizer, data, cfg, epoch, rank, world)
        acc = accuracy(model, held_out, rank, world)
        epoch += 1
        if rank == 0:
            print(f"epoch {epoch} loss {loss:.6f} held-out accuracy {acc:.4f}", flush=True)
        if args.out and epoch % args.save_every == 0 and epoch < cfg.epochs:
            m, o = get_state_dict(model, optimizer)
            dcp.save({"model": m, "optimizer": o, "epoch": epoch}, checkpoint_id=f"{args.out}/epoch_{epoch:02d}")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
