"""Instruction tuning of a small causal LM: the loss is taken on the answer tokens only."""

import argparse
import os
import re

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
from torch.distributed.fsdp import fully_shard

VOCAB, WIDTH, LENGTH, BATCH = 32, 24, 20, 16
IGNORE = -100


class Block(nn.Module):
    def __init__(self, width, heads=2):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c)
        x = x + self.out(y)
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids):
        x = self.tok(ids) + self.pos.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_example(index):
    """prompt (masked) + answer of very different lengths; short answers are terse, long ones count upwards."""
    g = torch.Generator().manual_seed(10_000 + index)
    n_answer = (
        int(torch.randint(1, 4, (1,), generator=g)) if index % 16 < 6 else int(torch.randint(8, 14, (1,), generator=g))
    )
    n_prompt = int(torch.randint(2, 6, (1,), generator=g))
    prompt = torch.randint(1, VOCAB, (n_prompt,), generator=g)
    step = 3 if n_answer < 4 else 1
    answer = (prompt[-1] + step * torch.arange(1, n_answer + 1)) % VOCAB
    ids = torch.cat([prompt, answer])
    labels = torch.cat([torch.full((n_prompt,), IGNORE), answer])
    pad = LENGTH - len(ids)
    return F.pad(ids, (0, pad), value=0), F.pad(labels, (0, pad), value=IGNORE)


def batch_for(step, rank, world):
    per_rank = BATCH // world
    start = step * BATCH + rank * per_rank
    ids, labels = zip(*(make_example(i) for i in range(start, start + per_rank)))
    return torch.stack(ids), torch.stack(labels)


def shifted(labels):
    return F.pad(labels[:, 1:], (0, 1), value=IGNORE)


def newest(folder):
    found = [(int(m.group(1)), d) for d in os.listdir(folder) if (m := re.fullmatch(r"step-(\d+)", d))]
    return os.path.join(folder, max(found)[1])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--accum", type=int, default=2)
    ap.add_argument("--lr", type=float, default=0.3)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = LM()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    start = 0
    if args.resume:
        msd, osd = get_state_dict(model, optimizer)
        state = {"model": msd, "optim": osd, "step": 0}
        dcp.load(state, checkpoint_id=newest(args.resume))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        start = state["step"]

    for step in range(start, args.steps):
        ids, labels = batch_for(step, rank, world)
        micro_batches = list(zip(ids.chunk(args.accum), labels.chunk(args.accum)))
        total = torch.zeros(2)
        for i, (x, y) in enumerate(micro_batches):
            target = shifted(y)
            n_tokens = (target != IGNORE).sum() * len(micro_batches)
            dist.all_reduce(n_tokens)
            model.set_requires_gradient_sync(i == len(micro_batches) - 1)
            loss_sum = F.cross_entropy(model(x).flatten(0, 1), target.flatten(), ignore_index=IGNORE, reduction="sum")
            # gradients are averaged over the ranks, hence the factor world
            (loss_sum * world / n_tokens).backward()
            total += torch.tensor([loss_sum.item(), float((target != IGNORE).sum())])
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step + 1} loss {total[0] / total[1]:.4f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            msd, osd = get_state_dict(model, optimizer)
            dcp.save(
                {"model": msd, "optim": osd, "step": step + 1}, checkpoint_id=os.path.join(args.out, f"step-{step + 1}")
            )

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
