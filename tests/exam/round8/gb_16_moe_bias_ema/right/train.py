import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from ema import ShardEMA
from moe import MoELM

VOCAB, LENGTH, BATCH = 32, 20, 16


def sentences(seed, n):
    """Sequences of different lengths from a fixed second-order rule, padded to LENGTH + 1."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(VOCAB, (n, LENGTH + 1), generator=g)
    free = torch.rand(n, LENGTH + 1, generator=g) < 0.15
    for t in range(2, LENGTH + 1):
        x[:, t] = torch.where(free[:, t], x[:, t], (x[:, t - 1] + 2 * x[:, t - 2] + 3) % VOCAB)
    length = torch.randint(6, LENGTH + 1, (n,), generator=g)
    mask = torch.arange(LENGTH)[None] < length[:, None]
    return x, mask.float()


def token_loss(model, x, mask):
    """Sum over the local tokens, and the number of tokens of all ranks."""
    logits = model(x[:, :-1], mask)
    nll = F.cross_entropy(logits.transpose(1, 2), x[:, 1:], reduction="none")
    tokens = mask.sum()
    dist.all_reduce(tokens)
    return (nll * mask).sum(), tokens


@torch.no_grad()
def evaluate(model, rank, world):
    model.eval()
    x, mask = (t.chunk(world)[rank] for t in sentences(1, 64))
    total, tokens = token_loss(model, x, mask)
    dist.all_reduce(total)
    model.reshard()  # the root stays gathered after a forward pass without backward
    model.train()
    return (total / tokens).item()


def checkpoint(args, step, model, opt, ema, best, rank):
    folder = os.path.join(args.out, f"step{step:04d}")
    os.makedirs(folder, exist_ok=True)
    torch.save({
        "step": step,
        "params": {n: p.detach().to_local() for n, p in model.named_parameters()},
        "buffers": {n: b for n, b in model.named_buffers() if n.endswith("moe.bias")},
        "moments": {n: {k: v.to_local() if hasattr(v, "to_local") else v for k, v in opt.state[p].items()}
                    for n, p in model.named_parameters()},
        "ema": ema.shards,
        "best": best,
    }, os.path.join(folder, f"{rank}.pt"))
    dist.barrier()


def restore(args, model, opt, ema, best, rank):
    folder = os.path.join(args.resume, max(os.listdir(args.resume)))
    ck = torch.load(os.path.join(folder, f"{rank}.pt"))
    buffers = dict(model.named_buffers())
    with torch.no_grad():
        for n, p in model.named_parameters():
            p.to_local().copy_(ck["params"][n])
            ema.shards[n].copy_(ck["ema"][n])
            p.grad = torch.zeros_like(p)
        for n, b in ck["buffers"].items():
            buffers[n].copy_(b)
    # a step with learning rate zero makes the state, whose tensors are then filled
    rates = [g["lr"] for g in opt.param_groups]
    for g in opt.param_groups:
        g["lr"] = 0.0
    opt.step()
    opt.zero_grad()
    for g, lr in zip(opt.param_groups, rates):
        g["lr"] = lr
    for n, p in model.named_parameters():
        for k, v in ck["moments"][n].items():
            mine = opt.state[p][k]
            (mine.to_local() if hasattr(mine, "to_local") else mine).copy_(v)
    best.update(ck["best"])
    return ck["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--eval-every", type=int, default=6)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="moe")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(50)
    model = MoELM(VOCAB)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    experts = [p for n, p in model.named_parameters() if ".moe.w" in n]
    rest = [p for n, p in model.named_parameters() if ".moe.w" not in n]
    opt = torch.optim.Adam([{"params": experts, "lr": 8e-3}, {"params": rest, "lr": 5e-3}], betas=(0.9, 0.98), eps=1e-6)
    ema = ShardEMA(model)
    best = {"loss": float("inf"), "step": 0, "shards": {}}
    start = restore(args, model, opt, ema, best, rank) if args.resume else 0

    for step in range(start + 1, args.steps + 1):
        x, mask = (t.chunk(world)[rank] for t in sentences(100 + step, BATCH))
        total, tokens = token_loss(model, x, mask)
        (total * world / tokens).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        worst = max(layer.moe.adjust() for layer in model.layers)
        ema.update()
        if step % args.eval_every == 0:
            with ema.applied():
                value = evaluate(model, rank, world)
            if value < best["loss"]:
                best.update(loss=value, step=step, shards={n: t.clone() for n, t in ema.shards.items()})
            if rank == 0:
                print(f"step {step} ema loss {value:.6f} load max/mean {worst:.3f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            checkpoint(args, step, model, opt, ema, best, rank)

    with torch.no_grad():
        for n, p in model.named_parameters():
            p.to_local().copy_(best["shards"][n])
    final = evaluate(model, rank, world)
    if rank == 0:
        print(f"best ema of step {best['step']}: {best['loss']:.6f}, evaluated again {final:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
