"""ReLoRA pretraining of a small next-symbol model: high-rank training through a chain of low-rank updates."""
import argparse
import os

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

from relora import ReLoRALinear, fold_and_restart, jagged_lr

SYMBOLS, CONTEXT = 20, 6


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.a = ReLoRALinear(dim, 2 * dim)
        self.b = ReLoRALinear(2 * dim, dim)

    def forward(self, x):
        return x + self.b(F.silu(self.a(self.norm(x))))


class Net(nn.Module):
    def __init__(self, dim=32, depth=3):
        super().__init__()
        self.embed = nn.Embedding(SYMBOLS, dim)
        self.join = ReLoRALinear(CONTEXT * dim, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.head = nn.Linear(dim, SYMBOLS)

    def forward(self, ctx):
        x = self.join(self.embed(ctx).flatten(1))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(step, size):
    g = torch.Generator().manual_seed(7_000 + step)
    ctx = torch.randint(SYMBOLS, (size, CONTEXT), generator=g)
    return ctx, (2 * ctx[:, -1] + (ctx[:, 0] > 9).long()) % SYMBOLS


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--cycle", type=int, default=8, help="steps between two folds")
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="relora")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(15)
    model = Net()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    opt = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: jagged_lr(s, args.cycle, 3, args.steps))
    step = 0
    if args.resume:
        newest = os.path.join(args.resume, sorted(os.listdir(args.resume))[-1])
        m, o = get_state_dict(model, opt)
        state = {"model": m, "opt": o, "sched": sched.state_dict(), "step": 0}
        dcp.load(state, checkpoint_id=newest)
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["opt"])
        sched.load_state_dict(state["sched"])
        step = state["step"]

    n = args.batch // world
    while step < args.steps:
        ctx, target = (t[rank * n : (rank + 1) * n] for t in batch(step, args.batch))
        loss = F.cross_entropy(model(ctx), target)
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        step += 1
        if step % args.cycle == 0:
            fold_and_restart(model, opt, seed=step)
        shown = loss.detach() / world
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} loss {shown:.5f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            m, o = get_state_dict(model, opt)
            state = {"model": m, "opt": o, "sched": sched.state_dict(), "step": step}
            dcp.save(state, checkpoint_id=os.path.join(args.out, f"s{step:05d}"))

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
