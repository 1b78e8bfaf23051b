"""LM training as a generator: `training()` yields events, the consumer prints, saves and decides when to stop.

Gradients are SUMMED over ranks and micro-batches (divide factor 1) and scaled once, just before the optimizer step, by
the number of target tokens that the whole window turned out to have. So nothing has to be known about a window in advance.

    torchrun --standalone --nproc-per-node 2 train.py --save-every 4 --out ckpt
"""

import argparse
import itertools
import os
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FSDPModule, fully_shard

VOCAB, T = 29, 18


class Stepped(NamedTuple):
    step: int
    nll: float
    tokens: int
    norm: float
    cursor: int


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.n1, self.n2 = nn.RMSNorm(d), nn.RMSNorm(d)
        self.qkv, self.o = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.gate, self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        q, k, v = (z.unflatten(-1, (2, -1)).transpose(1, 2) for z in self.qkv(self.n1(x)).chunk(3, -1))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = self.n2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, d), nn.Embedding(T, d)
        self.blocks = nn.Sequential(Block(d), Block(d))
        self.out = nn.Sequential(nn.RMSNorm(d), nn.Linear(d, VOCAB))

    def forward(self, ids):
        return self.out(self.blocks(self.tok(ids) + self.pos.weight))


def stream(rank, world, micro, cursor):
    """Endless micro-batches; micro-batch number `cursor` holds rows cursor*micro .. of an endless virtual corpus."""
    for n in itertools.count(cursor):
        rows, keep = [], []
        for r in range(n * micro + rank, (n + 1) * micro, world):
            g = torch.Generator().manual_seed(r % 400)
            a, b = torch.randint(1, 6, (2,), generator=g).tolist()
            length = int(torch.randint(4, T + 1, (1,), generator=g))
            row = torch.cumsum(torch.tensor([a, b] * T)[: T + 1], 0) % VOCAB
            rows.append(row)
            keep.append(torch.arange(T) < length)
        rows, keep = torch.stack(rows), torch.stack(keep)
        yield n + 1, rows[:, :-1], rows[:, 1:].masked_fill(~keep, -100)


def training(model, opt, batches, accum, clip, step):
    """Yields a Stepped after every optimizer step, for ever. The consumer owns the stop and the schedule."""
    params = [p for p in model.parameters() if p.requires_grad]
    while True:
        seen = torch.zeros(2, dtype=torch.float64)
        for k in range(accum):
            cursor, x, y = next(batches)
            model.set_requires_gradient_sync(k == accum - 1)
            nll = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")
            nll.backward()
            seen += torch.tensor([nll.item(), (y != -100).sum().item()], dtype=torch.float64)
        dist.all_reduce(seen)
        for p in params:
            p.grad.div_(seen[1].item())
        norm = nn.utils.clip_grad_norm_(params, clip).full_tensor()
        opt.step()
        opt.zero_grad(set_to_none=True)
        step += 1
        yield Stepped(step, (seen[0] / seen[1]).item(), int(seen[1]), norm.item(), cursor)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=28)
    ap.add_argument("--micro", type=int, default=8)
    ap.add_argument("--accum", type=int, default=3)
    ap.add_argument("--lr", type=float, default=0.3)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    a = ap.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(77)
    model = Decoder()
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)
    for m in model.modules():
        if isinstance(m, FSDPModule):
            m.set_gradient_divide_factor(1.0)
            m.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
    # plain momentum SGD: the scale of the gradients matters
    opt = torch.optim.SGD(model.parameters(), lr=a.lr, momentum=0.9, weight_decay=1e-4)

    step = cursor = 0
    if a.resume:
        msd, osd = get_state_dict(model, opt)
        state = {"model": msd, "opt": osd, "step": 0, "cursor": 0}
        dcp.load(state, checkpoint_id=os.path.join(a.resume, max(os.listdir(a.resume))))
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["opt"])
        step, cursor = state["step"], state["cursor"]

    events = training(model, opt, stream(rank, world, a.micro, cursor), a.accum, 1.0, step)
    while step < a.steps:
        for group in opt.param_groups:
            group["lr"] = a.lr * min(1.0, (step + 1) / 5, (a.steps - step) / 10)
        event = next(events)
        step = event.step
        if rank == 0:
            print(f"step {step} loss {event.nll:.4f} tokens {event.tokens} norm {event.norm:.3f}", flush=True)
        if a.save_every and step % a.save_every == 0:
            msd, osd = get_state_dict(model, opt)
            dcp.save(
                {"model": msd, "opt": osd, "step": step, "cursor": event.cursor},
                checkpoint_id=os.path.join(a.out, f"{step:06d}"),
            )
    events.close()

    if a.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, a.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
