"""Reward model on preference pairs, several epochs, gradient accumulation without communication in between."""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict)
from torch.distributed.fsdp import fully_shard

VOCAB, LEN, DIM = 32, 10, 24


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.attn = nn.MultiheadAttention(DIM, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, x):
        h = self.norm(x)
        x = x + self.attn(h, h, h, need_weights=False)[0]
        return x + self.mlp(x)


class RewardModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.score = nn.Linear(DIM, 1)

    def forward(self, ids):
        x = self.embed(ids)
        for b in self.blocks:
            x = b(x)
        return self.score(x.mean(1)).squeeze(-1)


def make_pairs(n=352, seed=9):
    """The answer with the larger hidden utility is the preferred one."""
    g = torch.Generator().manual_seed(seed)
    utility = torch.randn(VOCAB, generator=g)
    a, b = torch.randint(0, VOCAB, (2, n, LEN), generator=g)
    better = (utility[a].sum(1) > utility[b].sum(1))[:, None]
    return torch.where(better, a, b), torch.where(better, b, a)


def micro_batches(epoch, win, lose, micro, rank, world):
    """Rank's share of every global micro-batch of the epoch, in a new order each epoch."""
    order = torch.randperm(len(win), generator=torch.Generator().manual_seed(epoch))
    for part in order.split(micro):
        mine = part.chunk(world)[rank]
        yield win[mine], lose[mine]


def windows(n, size):
    """How many micro-batches each optimizer step of the epoch gets: the last step may get fewer."""
    return [min(size, n - i) for i in range(0, n, size)]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=8)
    p.add_argument("--micro", type=int, default=32, help="global size of a micro-batch")
    p.add_argument("--accumulate", type=int, default=4)
    p.add_argument("--save-every", type=int, default=0, help="in epochs")
    p.add_argument("--out", default="")
    p.add_argument("--resume", default="")
    p.add_argument("--export", default="")
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = RewardModel()
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    win, lose = make_pairs()
    per_epoch = math.ceil(len(win) / args.micro)

    epoch = 0
    if args.resume:
        newest = sorted(d for d in os.listdir(args.resume) if d.startswith("epoch"))[-1]
        m, o = get_state_dict(model, opt)
        state = {"m": m, "o": o, "epoch": 0}
        dcp.load(state, checkpoint_id=os.path.join(args.resume, newest))
        set_state_dict(model, opt, model_state_dict=state["m"], optim_state_dict=state["o"])
        epoch = state["epoch"]

    done = 0
    while epoch < args.epochs:
        stream = micro_batches(epoch, win, lose, args.micro, rank, world)
        total = torch.zeros(())
        for count in windows(per_epoch, args.accumulate):
            for k in range(count):
                w, l = next(stream)
                model.set_requires_gradient_sync(k == count - 1)
                loss = -F.logsigmoid(model(w) - model(l)).mean()
                (loss / count).backward()
                total += loss.detach() / per_epoch
            opt.step()
            opt.zero_grad()
            done += 1
        dist.all_reduce(total)
        epoch += 1
        if rank == 0:
            print(f"epoch {epoch} updates {done} loss {total.item() / world:.4f}", flush=True)
        if args.save_every and args.out and epoch % args.save_every == 0:
            m, o = get_state_dict(model, opt)
            dcp.save({"m": m, "o": o, "epoch": epoch}, checkpoint_id=os.path.join(args.out, f"epoch{epoch:04d}"))

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
