import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict)
from torch.distributed.fsdp import fully_shard


class WarmupCosine:
    """Linear warmup, then cosine down to `floor` of each group's own rate."""

    def __init__(self, optimizer, warmup, total, floor=0.05):
        self.optimizer = optimizer
        self.base = [g["lr"] for g in optimizer.param_groups]
        self.warmup, self.total, self.floor = warmup, total, floor

    def factor(self, step):
        if step < self.warmup:
            return (step + 1) / self.warmup
        frac = (step - self.warmup) / max(1, self.total - self.warmup)
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * frac))

    def set(self, step):
        for base, g in zip(self.base, self.optimizer.param_groups):
            g["lr"] = base * self.factor(step)


class CharNet(nn.Module):
    def __init__(self, vocab=20, dim=24, ctx=4):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.mix = nn.Sequential(nn.Linear(dim * ctx, 48), nn.GELU(), nn.Linear(48, dim))
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.head(self.mix(self.emb(ids).flatten(1)))


def corpus(n=3000, vocab=20):
    g = torch.Generator().manual_seed(11)
    table = torch.randint(vocab, (vocab, vocab), generator=g)
    seq = [1, 2]
    noise = torch.rand(n, generator=g)
    rnd = torch.randint(vocab, (n,), generator=g)
    for t in range(2, n):
        seq.append(int(rnd[t]) if noise[t] < 0.1 else int(table[seq[-2], seq[-1]] if t % 3 else (seq[-1] + 3) % vocab))
    return torch.tensor(seq)


def get_batch(seq, step, batch, rank, world, ctx=4):
    g = torch.Generator().manual_seed(7_000 + step)
    pos = torch.randint(len(seq) - ctx - 1, (batch,), generator=g)
    pos = pos.view(world, -1)[rank]
    window = seq[pos[:, None] + torch.arange(ctx + 1)]
    return window[:, :ctx], window[:, ctx]


def save(folder, step, model, opt):
    msd, osd = get_state_dict(model, opt)
    dcp.save({"model": msd, "optim": osd, "step": step}, checkpoint_id=os.path.join(folder, f"step-{step:05d}"))
    if dist.get_rank() == 0:
        with open(os.path.join(folder, "latest"), "w") as f:
            f.write(f"step-{step:05d}")


def load(folder, model, opt):
    name = open(os.path.join(folder, "latest")).read().strip()
    msd, osd = get_state_dict(model, opt)
    state = {"model": msd, "optim": osd, "step": 0}
    dcp.load(state, checkpoint_id=os.path.join(folder, name))
    set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return state["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=36)
    ap.add_argument("--stop-at", type=int, default=0)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(3)
    model = CharNet()
    fully_shard(model.mix)
    fully_shard(model)
    slow = [p for n, p in model.named_parameters() if n.startswith("emb")]
    fast = [p for n, p in model.named_parameters() if not n.startswith("emb")]
    opt = torch.optim.AdamW([{"params": slow, "lr": 6e-3, "weight_decay": 0.0},
                             {"params": fast, "lr": 1e-2, "weight_decay": 0.02}], eps=1e-6)
    start = 0
    schedule = WarmupCosine(opt, warmup=4, total=args.steps)
    if args.resume:
        start = load(args.resume, model, opt)
    seq = corpus()

    for step in range(start, args.stop_at or args.steps):
        schedule.set(step)
        ids, nxt = get_batch(seq, step, args.batch, rank, world)
        loss = nn.functional.cross_entropy(model(ids), nxt)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0:
            print(f"[{step + 1}/{args.steps}] loss={mean.item():.4f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            save(args.out, step + 1, model, opt)

    if args.export:
        sd = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(sd, args.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
