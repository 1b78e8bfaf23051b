"""Log-line language model with token-budget batching.

A step takes a fixed set of lines; they are dealt to the ranks by length and packed into micro-batches of at most
BUDGET padded tokens.  Ranks may get different numbers of micro-batches, the short ones fill up with an empty one.
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

VOCAB, WIDTH, LINES, BUDGET, IGNORE = 24, 24, 16, 48, -100


class CausalMix(nn.Module):
    """Running mean of the past plus a gated projection."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.value, self.out = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        h = self.norm(x)
        past = h.cumsum(1) / torch.arange(1, h.shape[1] + 1).view(1, -1, 1)
        h = torch.cat([h, past], -1)
        return x + self.out(torch.sigmoid(self.gate(h)) * self.value(h))


class LogModel(nn.Module):
    def __init__(self, depth=2):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.mixes = nn.ModuleList(CausalMix() for _ in range(depth))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids):
        x = self.embed(ids)
        for mix in self.mixes:
            x = mix(x)
        return self.head(x)


def lines_of(step):
    g = torch.Generator().manual_seed(1234 + step)
    lines = []
    for length in torch.randint(4, 21, (LINES,), generator=g).tolist():
        start, stride = torch.randint(0, VOCAB, (1,), generator=g), torch.randint(1, 4, (1,), generator=g)
        line = (start + stride * torch.arange(length)) % VOCAB
        noise = torch.rand(length, generator=g) < 0.1
        lines.append(torch.where(noise, torch.randint(0, VOCAB, (length,), generator=g), line))
    return lines


def deal(lines, world):
    """Longest first, always to the rank with the fewest tokens."""
    hands, load = [[] for _ in range(world)], [0] * world
    for line in sorted(lines, key=len, reverse=True):
        r = load.index(min(load))
        hands[r].append(line)
        load[r] += len(line)
    return hands


def pack(hand):
    packs, current = [], []
    for line in hand:
        if current and len(current[0]) * (len(current) + 1) > BUDGET:
            packs.append(current)
            current = []
        current.append(line)
    return packs + [current] if current else packs


def tensors(lines):
    width = max((len(line) for line in lines), default=4)
    ids = torch.zeros(max(len(lines), 1), width, dtype=torch.long)
    labels = torch.full_like(ids, IGNORE)
    for i, line in enumerate(lines):
        ids[i, :len(line)] = line
        labels[i, :len(line) - 1] = line[1:]
    return ids, labels


def train(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(30)
    model = LogModel()
    mesh = init_device_mesh("cpu", (world,))
    for mix in model.mixes:
        fully_shard(mix, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in (model, *model.mixes):
        module.set_force_sum_reduction_for_comms(True)      # gloo has no pre-multiplied sum
        module.set_gradient_divide_factor(1.0)
    optim = torch.optim.AdamW(model.parameters(), lr=args.lr, eps=1e-6)

    def state(step):
        m, o = get_state_dict(model, optim)
        return {"model": m, "optim": o, "step": step}

    begin = 0
    if args.resume:
        found = state(0)
        dcp.load(found, checkpoint_id=os.path.join(args.resume, max(os.listdir(args.resume))))
        set_state_dict(model, optim, model_state_dict=found["model"], optim_state_dict=found["optim"])
        begin = found["step"]

    for step in range(begin, args.steps):
        lines = lines_of(step)
        plans = [pack(hand) for hand in deal(lines, world)]
        rounds = max(len(p) for p in plans)
        mine = plans[rank] + [[]] * (rounds - len(plans[rank]))
        tokens = sum(len(line) - 1 for line in lines)
        total = torch.zeros(())
        for k, chosen in enumerate(mine):
            ids, labels = tensors(chosen)
            model.set_requires_gradient_sync(k == rounds - 1)
            logits = model(ids)
            nll = nn.functional.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORE, reduction="sum")
            (nll / tokens).backward()
            total += nll.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()
        optim.zero_grad()
        dist.all_reduce(total)
        if rank == 0 and step % 4 == 0:
            print(f"{step:3d} nll/token {total.item() / tokens:.4f} micro-batches {rounds}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0 and step + 1 < args.steps:
            dcp.save(state(step + 1), checkpoint_id=os.path.join(args.out, f"{step + 1:05d}"))


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=21)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume", default="")
    dist.init_process_group("gloo")
    train(ap.parse_args())
    dist.destroy_process_group()
